"""From a trained model to sentences: greedy and beam search over a key-value cache.

Training sees all target positions at once; translating makes them one by one. Keys and values of
the positions already made never change, so each new token costs one position, not the prefix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.data.tokenizer import EOS_ID, PAD_ID, Tokenizer
from shared.errors import InputError
from shared.model.transformer import Transformer


class Translator(Protocol):
    """What decoding needs of a model; `shared.model.transformer.Transformer` has it."""

    def encode(
        self, src: Int[Tensor, "batch src"], src_mask: Bool[Tensor, "batch 1 1 src"]
    ) -> Float[Tensor, "batch src d_model"]: ...

    def start_cache(
        self,
        memory: Float[Tensor, "batch src d_model"],
        src_mask: Bool[Tensor, "batch 1 1 src"],
    ) -> Any: ...

    def step(self, token: Int[Tensor, "batch"], cache: Any) -> Float[Tensor, "batch vocab"]: ...


Decode = Callable[[Any, Tensor, int], Tensor]  # (model, src (B, S), max_len) -> tokens (B, T)


@torch.no_grad()
def greedy_decode(
    model: Translator,
    src: Int[Tensor, "batch src"],
    max_len: int,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
) -> Int[Tensor, "batch length"]:
    """Translate by taking the likeliest next token, again and again, on a key-value cache.

    `src` is padded with `pad_id`. The result leaves out `bos_id`; a row ends with `eos_id` and is
    then filled with `pad_id`, or has no `eos_id` because it was cut at `max_len` tokens. Decoding
    stops as soon as every row has ended, so length <= max_len. `pad_id` is never chosen: training
    never taught the model anything about its logit. The source is encoded once, and the model sees
    each target position once: `length` calls of `model.step`, each with one token per row. The
    model stays in the mode that it was in.
    """
    src_mask = (src != pad_id)[:, None, None, :]  # (B, 1, 1, S)
    cache = model.start_cache(model.encode(src, src_mask), src_mask)
    token = torch.full_like(src[:, 0], bos_id)  # (B,)
    ended = torch.zeros_like(token, dtype=torch.bool)
    made: list[Tensor] = []
    while len(made) < max_len and not ended.all():
        logits = model.step(token, cache)  # (B, V)
        logits[:, pad_id] = -torch.inf
        # A row that has ended rides along in the batch; what it would say next is not kept.
        token = logits.argmax(dim=-1).masked_fill(ended, pad_id)
        ended = ended | (token == eos_id)
        made.append(token)
    return torch.stack(made, dim=1) if made else src[:, :0]  # (B, T)


@torch.no_grad()
def beam_search(
    model: Translator,
    src: Int[Tensor, "batch src"],
    max_len: int,
    beam_size: int = 5,
    length_penalty: float = 0.6,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
) -> Int[Tensor, "batch length"]:
    """Translate by keeping the `beam_size` likeliest prefixes at every step.

    A translation of n tokens, `eos_id` included, scores log p / ((5 + n) / 6) ** length_penalty
    (Wu et al. 2016, section 7): every token makes log p smaller, so without the divisor (penalty 0)
    short translations win. At each step the likeliest one-token continuations of all prefixes
    compete: one of the best `beam_size` that ends is a finished translation, and the best
    `beam_size` that do not end live on. A sentence is decided when it has `beam_size` finished
    translations or when no living prefix can still beat the best of them; at `max_len`, the best
    living prefix stands in where none has finished. Input and output are those of `greedy_decode`,
    which this equals at beam_size 1: `pad_id` is never chosen, the source is encoded once.
    Raises ValueError if `beam_size` is below 1 or `length_penalty` below 0.
    """
    if beam_size < 1 or length_penalty < 0:
        raise ValueError(
            f"beam search needs beam_size >= 1 and length_penalty >= 0, "
            f"not {beam_size} and {length_penalty}"
        )
    src_mask = (src != pad_id)[:, None, None, :]  # (B, 1, 1, S)
    cache = model.start_cache(model.encode(src, src_mask), src_mask)
    beam = Beam.start(src, max_len, beam_size, bos_id, pad_id)
    cache = cache.select(torch.arange(len(src), device=src.device).repeat_interleave(beam_size))
    for length in range(1, max_len + 1):
        logits = model.step(beam.tokens[:, :, length - 1].reshape(-1), cache)  # (B * k, V)
        log_p = logits.float().log_softmax(dim=-1).view(*beam.log_p.shape, -1)  # (B, k, V)
        log_p[..., pad_id] = -torch.inf
        parents = beam.grow(log_p, length, eos_id, length_penalty)
        if beam.decided.all():
            break
        cache = cache.select(parents)
    return beam.best(pad_id)


def length_divisor(length: int, length_penalty: float) -> float:
    """The divisor of the log-probability of `length` tokens (Wu et al. 2016, section 7)."""
    return ((5 + length) / 6) ** length_penalty


@dataclass
class Beam:
    """The k living prefixes and the best finished translation of each of B sentences.

    Sentence b's prefixes are rows b * k .. b * k + k - 1 of the model's batch.
    """

    tokens: Int[Tensor, "batch beam max_len+1"]  # living prefixes, from bos on
    log_p: Float[Tensor, "batch beam"]
    finished: Int[Tensor, "batch max_len+1"]  # best finished translation, from bos on
    score: Float[Tensor, "batch"]  # its score; -inf while there is none
    num_finished: Int[Tensor, "batch"]
    decided: Bool[Tensor, "batch"]
    first_row: Int[Tensor, "batch 1"]  # b * k

    @staticmethod
    def start(
        src: Int[Tensor, "batch src"], max_len: int, beam_size: int, bos_id: int, pad_id: int
    ) -> "Beam":
        """A beam before its first token: k equal prefixes, of which one lives."""
        B, k = src.shape[0], beam_size
        tokens = src.new_full((B, k, max_len + 1), pad_id)
        tokens[:, :, 0] = bos_id
        log_p = torch.full((B, k), -torch.inf, device=src.device)
        log_p[:, 0] = 0.0
        return Beam(
            tokens=tokens,
            log_p=log_p,
            finished=tokens[:, 0].clone(),
            score=log_p.new_full((B,), -torch.inf),
            num_finished=src.new_zeros(B),
            decided=torch.zeros(B, dtype=torch.bool, device=src.device),
            first_row=torch.arange(B, device=src.device).unsqueeze(1) * k,
        )

    def grow(
        self, log_p: Float[Tensor, "batch beam vocab"], length: int, eos_id: int, penalty: float
    ) -> Int[Tensor, "rows"]:
        """Add one token; return the rows whose caches the new living prefixes continue."""
        k, V = log_p.shape[1:]
        every = (self.log_p.unsqueeze(-1) + log_p).flatten(1)  # (B, k * V)
        # k of 2 k must live on, and at most one continuation of each prefix ends.
        sums, flat = every.topk(min(2 * k, k * V), dim=-1)  # (B, 2k)
        parent, token = flat // V, flat % V
        ends = token == eos_id
        self._finish(sums[:, :k], parent[:, :k], ends[:, :k], length, eos_id, penalty)
        # A stable sort puts those that go on first, in the order of their probability.
        alive = ends.sort(dim=-1, stable=True).indices[:, :k]  # (B, k)
        parent, token = parent.gather(1, alive), token.gather(1, alive)
        self.log_p = sums.gather(1, alive).masked_fill(ends.gather(1, alive), -torch.inf)
        self.tokens = self.tokens.gather(
            1, parent.unsqueeze(-1).expand(-1, -1, self.tokens.shape[-1])
        )
        self.tokens[:, :, length] = token
        # The most that a living prefix can reach: no further loss, and the largest divisor.
        longest = length_divisor(self.tokens.shape[-1] - 1, penalty)
        self.decided |= (self.num_finished >= k) | (self.score >= self.log_p.amax(1) / longest)
        return (self.first_row + parent).flatten()

    def _finish(
        self,
        sums: Float[Tensor, "batch beam"],
        parent: Int[Tensor, "batch beam"],
        ends: Bool[Tensor, "batch beam"],
        length: int,
        eos_id: int,
        penalty: float,
    ) -> None:
        """Note the translations that end now; keep the best one of each undecided sentence."""
        ends = ends & sums.isfinite() & ~self.decided.unsqueeze(1)
        self.num_finished += ends.sum(1)
        scores = (sums / length_divisor(length, penalty)).masked_fill(~ends, -torch.inf)
        score, which = scores.max(dim=1)  # (B,)
        better = score > self.score
        source = parent.gather(1, which.unsqueeze(1))  # (B, 1)
        text = self.tokens.gather(1, source.unsqueeze(-1).expand(-1, -1, self.tokens.shape[-1]))
        text = text.squeeze(1)  # (B, max_len + 1)
        text[:, length] = eos_id
        self.finished = torch.where(better.unsqueeze(1), text, self.finished)
        self.score = torch.where(better, score, self.score)

    def best(self, pad_id: int) -> Int[Tensor, "batch length"]:
        """The best finished translations without bos, cut after the longest of them."""
        unfinished = (self.score == -torch.inf).unsqueeze(1)
        tokens = torch.where(unfinished, self.tokens[:, 0], self.finished)[:, 1:]
        longest = int((tokens != pad_id).sum(1).max()) if tokens.numel() else 0
        return tokens[:, :longest]


def translate(
    model: Transformer,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    decode: Decode = greedy_decode,
    batch_size: int = 64,
) -> list[str]:
    """Translate sentences with dropout off and return the translations in the same order.

    `decode(model, src, max_len)` is greedy_decode, or beam_search with its settings filled in.
    Sentences of like length share a batch; a translation may have twice the tokens of its batch's
    longest source and ten more, up to the model's max_len. Raises InputError if a sentence has more
    tokens than the model's encoding.
    """
    device = next(model.parameters()).device
    encoded = [[*ids, EOS_ID] for ids in tokenizer.encode_batch(sentences)]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    translations = [""] * len(encoded)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            width = len(encoded[chosen[-1]])
            rows = [encoded[i] + [PAD_ID] * (width - len(encoded[i])) for i in chosen]
            src = torch.tensor(rows, device=device)  # (B, S)
            tokens = decode(model, src, min(2 * width + 10, model.config.max_len))
            for i, text in zip(chosen, tokenizer.decode_batch(tokens.tolist()), strict=True):
                translations[i] = text
    finally:
        model.train(was_training)
    return translations


def translate_together(
    model: Transformer, tokenizer: Tokenizer, sentences: list[str], decode: Decode = greedy_decode
) -> list[str]:
    """`translate`, shared out: rank r takes every world_size-th sentence, from the r-th on.

    Every rank has to call it, with the same sentences; each gets all translations, in order.
    Raises InputError on every rank where one of them does in `translate`.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine: list[str] | InputError
    try:
        mine = translate(model, tokenizer, sentences[rank::world_size], decode)
    except InputError as error:  # a rank that raised alone would leave the others waiting
        mine = error
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    translations = [""] * len(sentences)
    for other, part in enumerate(everyone):
        if isinstance(part, InputError):
            raise part
        translations[other::world_size] = part
    return translations
