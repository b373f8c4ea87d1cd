"""A fake translator: no weights, logits looked up by what it sees, every call counted.

Decoding can be checked on it exactly: the best translation is found by trying all, and an answer
that runs the prefix again, forgets a mask or mixes up the rows of a cache is seen doing so.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from shared.model.config import TransformerConfig

Tokens = tuple[int, ...]
Rule = Callable[[Tokens, Tokens], Tensor]  # (source, prefix from bos on) -> logits (V,)


def random_rule(vocab_size: int, seed: int, spread: float = 2.0) -> Rule:
    """Normal logits that depend on every token of source and prefix, the same at every call."""

    def logits(source: Tokens, prefix: Tokens) -> Float[Tensor, "vocab"]:
        # Python's hash of a tuple of ints is the same in every process.
        key = hash((seed, source, prefix)) % 2**31
        drawn = spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(key))
        drawn[0] -= 10 * spread  # padding is never likely by chance; a table can make it so
        return drawn

    return logits


def table_rule(vocab_size: int, table: Mapping[Tokens, Mapping[int, float]]) -> Rule:
    """Probabilities of the next token, written out for each prefix (without bos).

    Tokens that a prefix's row leaves out are as good as impossible (1e-9); after a prefix that the
    table does not hold comes token 3, again and again. The source does not matter.
    """

    def logits(source: Tokens, prefix: Tokens) -> Float[Tensor, "vocab"]:
        probabilities = torch.full((vocab_size,), 1e-9)
        for token, probability in table.get(prefix[1:], {3: 1.0}).items():
            probabilities[token] = probability
        return probabilities.log()

    return logits


@dataclass
class FakeCache:
    """For each row, the source that it may see and the tokens that it has been given."""

    sources: list[Tokens]
    prefixes: list[Tokens]
    owner: "FakeTranslator"
    reordered: bool = False  # whether select made it, of a cache that held tokens

    @property
    def length(self) -> int:
        """How many tokens each row has been given."""
        return len(self.prefixes[0]) if self.prefixes else 0

    def select(self, rows: Int[Tensor, "new_batch"]) -> "FakeCache":
        """The cache whose row i is this one's row rows[i]; this one stays as it is."""
        picked = [int(row) for row in rows]
        return FakeCache(
            [self.sources[i] for i in picked],
            [self.prefixes[i] for i in picked],
            self.owner,
            reordered=self.length > 0,
        )


class FakeTranslator(nn.Module):
    """What decoding needs of a Transformer, and a count of how it was used.

    A module with a configuration and one parameter (which does nothing), since an answer may ask a
    model for its device and its sizes, or switch it to eval mode and back.
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        vocab_size = len(rule((), (1,)))
        self.config = TransformerConfig(vocab_size, 1, 1, 1, 1, dropout=0.0, positions="none")
        self.weight = nn.Parameter(torch.zeros(1))
        self.encoded = 0  # calls of encode
        self.steps: list[int] = []  # rows of each call of step
        self.positions: list[int] = []  # and where its tokens stand
        self.replayed = 0  # target positions that went through decode or forward, without a cache
        self.reordered = 0  # calls of step with a cache that select had reordered
        self.with_gradient = False
        self.padding_encoded = False  # whether encode might look at padding, which is 0

    def usage(self) -> str:
        """The counts in words."""
        gradients = ", with gradients" if self.with_gradient else ""
        replayed = f", {self.replayed} through decode or forward" if self.replayed else ""
        return (
            f"{self.encoded} x encode, {len(self.steps)} x step for {len(set(self.positions))} "
            f"positions{replayed}{gradients}"
        )

    def encode(
        self,
        src: Int[Tensor, "batch source"],
        src_mask: Bool[Tensor, "batch 1 1 source"] | None = None,
    ) -> Float[Tensor, "batch source 1"]:
        """The source tokens themselves, as numbers.

        Without weights a forgotten mask changes no translation here, so padding that may be looked
        at is noted.
        """
        self.encoded += 1
        padding = (src == 0)[:, None, None, :]
        seen = torch.ones_like(padding) if src_mask is None else src_mask.bool()
        self.padding_encoded |= bool((seen & padding).any())
        self.with_gradient |= torch.is_grad_enabled()
        return src.double().unsqueeze(-1)

    def start_cache(
        self,
        memory: Float[Tensor, "batch source 1"],
        src_mask: Bool[Tensor, "batch 1 1 source"] | None = None,
    ) -> FakeCache:
        """A cache in which no target token has been seen."""
        sources = list(self._visible(memory, src_mask))
        return FakeCache(sources, [()] * len(sources), self)

    def step(self, token: Int[Tensor, "batch"], cache: FakeCache) -> Float[Tensor, "batch vocab"]:
        """Logits after one more token in each row; the cache grows in place."""
        if token.shape != (len(cache.sources),):
            raise ValueError(
                f"step got tokens of shape {tuple(token.shape)} for a cache of "
                f"{len(cache.sources)} rows; it takes one token a row, and cache.select returns "
                f"the new cache"
            )
        self.reordered += cache.reordered  # a result of select that is dropped reorders nothing
        self.steps.append(len(token))
        self.positions.append(cache.length)
        self.with_gradient |= torch.is_grad_enabled()
        pairs = zip(cache.prefixes, token.tolist(), strict=True)
        cache.prefixes = [(*prefix, new) for prefix, new in pairs]
        rows = zip(cache.sources, cache.prefixes, strict=True)
        return torch.stack([self.rule(source, prefix) for source, prefix in rows])

    def decode(
        self,
        tgt: Int[Tensor, "batch target"],
        memory: Float[Tensor, "batch source 1"],
        src_mask: Bool[Tensor, "batch 1 1 source"] | None = None,
    ) -> Float[Tensor, "batch target vocab"]:
        """Logits at every position, all computed again; `project` leaves them as they are."""
        self.replayed += tgt.numel()
        rows = [
            torch.stack([self.rule(source, tuple(row[: i + 1])) for i in range(len(row))])
            for source, row in zip(self._visible(memory, src_mask), tgt.tolist(), strict=True)
        ]
        return torch.stack(rows)

    def project(self, hidden: Tensor) -> Tensor:
        """Return what decode gave."""
        return hidden

    def forward(
        self, src: Int[Tensor, "batch source"], tgt: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocab"]:
        """Logits of the whole target, as training computes them."""
        mask = (src != 0)[:, None, None, :]
        return self.decode(tgt, self.encode(src, mask), mask)

    def _visible(self, memory: Tensor, src_mask: Tensor | None) -> Iterator[Tokens]:
        for i, row in enumerate(memory[..., 0].long().tolist()):
            seen = [True] * len(row) if src_mask is None else src_mask[i, 0, 0].tolist()
            yield tuple(itertools.compress(row, seen))
