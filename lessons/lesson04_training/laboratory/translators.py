"""Padded rows, torch's losses, and translations that are known before an answer gives its own.

Decoding runs on a fake translator whose logits are looked up: greedy search is repeated one
sentence at a time, and the best translation of all is found by trying every one.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons.lesson04_training.laboratory.fake_translator import (
    Rule,
    Tokens,
    random_rule,
    table_rule,
)
from shared.exercises.seeds import fresh_generator, fresh_seed

PAD, BOS, EOS = 0, 1, 2
Pairs = list[tuple[list[int], list[int]]]
Rate = Callable[[int], float]  # a learning rate by its step
Table = Mapping[Tokens, Mapping[int, float]]  # by prefix, the next token's probabilities


# 04.1: batches


def padded(rows: list[list[int]], pad: int = PAD, front: bool = False) -> Tensor:
    """Rows filled up to the longest of them."""
    width = max(map(len, rows))
    fill = [[pad] * (width - len(row)) for row in rows]
    return torch.tensor([f + r if front else r + f for r, f in zip(rows, fill, strict=True)])


def target_mask(rows: list[list[int]]) -> Tensor:
    """What each position may see, decided one by one: no padding, and nothing that is later."""
    width = max(map(len, rows))
    sees = [[[k <= q and k < len(row) for k in range(width)] for q in range(width)] for row in rows]
    return torch.tensor(sees).unsqueeze(1)


def whole_rows(pairs: Pairs, bos: int = BOS, eos: int = EOS) -> dict[str, list[list[int]]]:
    """The rows of each table of a batch before they are padded."""
    return {
        "src": [[*src, eos] for src, _ in pairs],
        "tgt_in": [[bos, *tgt] for _, tgt in pairs],
        "tgt_out": [[*tgt, eos] for _, tgt in pairs],
    }


def example() -> Pairs:
    """Two pairs, new lists each time."""
    return [([5, 6, 7], [8, 9]), ([4], [3, 4, 5, 6])]


def random_pairs() -> Pairs:
    """Seven pairs of 0 to 8 tokens a side, ids from 20 on."""
    draw = fresh_generator()
    sizes = [[0, 0], *torch.randint(0, 9, (6, 2), generator=draw).tolist()]
    ids = [[torch.randint(20, 90, (n,), generator=draw).tolist() for n in size] for size in sizes]
    return [(src, tgt) for src, tgt in ids]


# 04.2: losses


def loss_case(pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Random logits (3, 5, 11) and targets whose rows hold 5, 3 and 1 words, then padding.

    The first word is 3: with another `pad` one word at least lies below it.
    """
    draw = fresh_generator()
    logits = 3 * torch.randn(3, 5, 11, generator=draw)
    targets = torch.randint(3, 11, (3, 5), generator=draw)
    targets[0, 0] = 3
    for row, length in enumerate((5, 3, 1)):
        targets[row, length:] = pad
    return logits, targets


def torch_loss(logits: Tensor, targets: Tensor, smoothing: float, pad: int = PAD) -> Tensor:
    """Torch's own mean of the smoothed cross-entropy over the targets that are not `pad`."""
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=pad, label_smoothing=smoothing)


def torch_gradient(logits: Tensor, targets: Tensor, smoothing: float, pad: int) -> Tensor:
    """The gradient of `torch_loss` for the logits."""
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(torch_loss(leaf, targets, smoothing, pad), leaf)[0]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The plain cross-entropy of each position (B, T)."""
    return -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


# 04.3: learning rates


def curve(rate: Rate, steps: range) -> Tensor:
    """The learning rates of these steps, in float64."""
    return torch.tensor([float(rate(step)) for step in steps], dtype=torch.float64)


def falling(start: float, end: float, peak: float, floor: float = 0.0) -> Rate:
    """Half a cosine, from `peak` at step `start` to `floor` at step `end`; unbounded outside."""

    def rate(step: int) -> float:
        progress = (step - start) / (end - start)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return rate


def warmed(warmup: int, peak: float, down: Rate, up: Rate | None = None) -> Rate:
    """A straight line up to `peak` (or `up`) before step `warmup`, `down` from there on."""
    rising = up or (lambda step: peak * step / warmup)
    return lambda step: rising(step) if step < warmup else down(step)


# 04.4, 04.5: decoding


@dataclass(frozen=True)
class Case:
    """Sources, the translations to be found, and those of a model that sees the padding."""

    rule: Rule
    src: Tensor
    want: Tensor
    unmasked: Tensor

    @property
    def first_end(self) -> int:
        """The length of the translation that ends first."""
        return int((self.want == EOS).int().argmax(1).min()) + 1


# Padding is the likeliest at every step.
LIKELY_PADDING: Table = {
    (): {PAD: 0.6, 4: 0.3, 5: 0.1},
    (4,): {PAD: 0.5, EOS: 0.4, 3: 0.1},
    (5,): {PAD: 0.5, EOS: 0.5},
    (PAD,): {PAD: 0.6, EOS: 0.4},
}
# Greedy takes 4 (0.5) and then has 0.3 at best; 5 (0.4) is followed by eos for certain.
GARDEN_PATH: Table = {
    (): {4: 0.5, 5: 0.4, 3: 0.1},
    (4,): {EOS: 0.3, 3: 0.25, 4: 0.2, 5: 0.2},
    (5,): {EOS: 0.97, 3: 0.01},
    **{(4, word): {EOS: 0.9} for word in (3, 4, 5)},
    (3,): {EOS: 0.5, 4: 0.5},
}
# eos is best at once; the prefixes that live on look good for a while and end badly.
EARLY_END: Table = {
    (): {EOS: 0.4, 4: 0.35, 5: 0.25},
    **{(word,) * n: {word: 1.0} for word in (4, 5) for n in range(1, 4)},
    **{(word,) * 4: {EOS: 0.2, 3: 0.2, 4: 0.2, 5: 0.2} for word in (4, 5)},
}
# (3, eos) with 0.4 is finished first; (4, 5, eos) with 0.54 ends one step later.
BETTER_LATER: Table = {
    (): {4: 0.6, 3: 0.4},
    (3,): {EOS: 1.0},
    (4,): {5: 0.9, EOS: 0.05},
    (4, 5): {EOS: 1.0},
}
# The best prefix is followed by padding, which takes what eos would have had.
PADDING_TAKES: Table = {
    (): {4: 0.5, 5: 0.4, 3: 0.1},
    (4,): {PAD: 0.6, EOS: 0.4},
    (5,): {EOS: 0.9, 3: 0.1},
}
# (4, eos) ends at the second step; (4, 3), which is third there, ends better with a penalty.
REFILLED: Table = {
    (): {4: 0.5, 5: 0.4, 3: 0.1},
    (4,): {EOS: 0.5, 3: 0.4, 5: 0.1},
    (5,): {3: 0.55, EOS: 0.05, 4: 0.2, 5: 0.2},
    (4, 3): {EOS: 1.0},
    (5, 3): {EOS: 0.1, 3: 0.3, 4: 0.3, 5: 0.3},
}
# (5, 3) is likelier than (4, eos), 0.45, when that ends; with its eos it is less likely, 0.44.
FALLING_LATE: Table = {
    (): {5: 0.5, 4: 0.45, 3: 0.05},
    (4,): {EOS: 1.0},
    (5,): {3: 1.0},
    (5, 3): {EOS: 0.88, 4: 0.12},
}
# One unlikely translation ends at once, the rest never.
ONE_ENDS: Table = {(): {4: 0.9, EOS: 0.1}, **{(4,) * n: {4: 1.0} for n in range(1, 9)}}
# 3 is second throughout, so that no tie can let eos into a beam of two.
ENDLESS: Table = {(4,) * n: {4: 0.9, PAD: 0.05, 3: 0.001} for n in range(9)}
# Two translations: (4, eos), log p = log 0.5, and six tokens in a row, log p = log 0.41. By the
# formula they break even at a length penalty of 0.56; with n ** penalty at 0.23.
TWO_LENGTHS: Table = {
    (): {4: 0.5, 5: 0.41, 3: 0.09},
    (4,): {EOS: 1.0},
    **{(5,) * n: {5: 1.0} for n in range(1, 5)},
    (5,) * 5: {EOS: 1.0},
}

ENDS_AT_ONCE: Table = TWO_LENGTHS | {(): {EOS: 0.5, 5: 0.41, 3: 0.09}}

# The same two, the longer less likely: they break even at 0.65, a little above the default of 0.6.
BREAK_EVEN_LATER: Table = {**TWO_LENGTHS, (): {4: 0.5, 5: 0.3945, 3: 0.1055}}


def table_case(table: Table, want: list[int]) -> Case:
    """One sentence for a model of six tokens whose probabilities are written out."""
    wanted = torch.tensor([want])
    return Case(table_rule(6, table), torch.tensor([[9, 9]]), wanted, unmasked=wanted)


# A beam of five holds 7, whose eos makes it the best; a smaller one does not, and a larger one also
# holds 8, which ends better still.
FIVE_PREFIXES: Table = {
    (): {3: 0.2, 4: 0.19, 5: 0.18, 6: 0.17, 7: 0.16, 8: 0.1},
    **{(word,): {3: 0.16, **dict.fromkeys(range(4, 11), 0.12)} for word in range(3, 7)},
    (7,): {EOS: 0.5, **dict.fromkeys(range(3, 11), 0.06)},
    (8,): {EOS: 1.0},
    **{(word, each): {EOS: 1.0} for word in range(3, 8) for each in range(3, 11)},
}


def five_prefixes_case() -> Case:
    """One sentence for a model of eleven tokens that a beam of five alone translates like this."""
    wanted = torch.tensor([[7, EOS]])
    rule = table_rule(11, FIVE_PREFIXES)
    return Case(rule, torch.tensor([[9, 9]]), wanted, unmasked=wanted)


def other_ids(source: Tokens, prefix: Tokens) -> Tensor:
    """Logits of a model with bos 6, eos 7 and padding 5: source 9 is translated as 3 4, 8 as "".

    Whoever begins with another token, or sees the source's padding, hears token 1 for ever.
    """
    table: Table = {(): {3: 0.4, 5: 0.6}, (3,): {4: 1.0}, (3, 4): {7: 1.0}}
    if prefix[0] != 6 or 5 in source:
        table = {prefix[1:]: {1: 1.0}}
    elif source == (8, 8):
        table = {(): {7: 1.0}}
    return table_rule(8, table)(source, prefix)


def other_ids_case() -> Case:
    """Two sentences for the model of `other_ids`."""
    want = torch.tensor([[3, 4, 7], [7, 5, 5]])
    return Case(other_ids, torch.tensor([[9, 5], [8, 8]]), want, unmasked=want)


def sources(rows: int, length: int) -> Tensor:
    """Random source tokens with padding at the end of all rows but the first."""
    src = torch.randint(3, 30, (rows, length), generator=fresh_generator())
    for row in range(1, rows):
        src[row, length - row :] = PAD
    return src


def real(row: Tensor) -> Tokens:
    """A row of tokens without padding."""
    return tuple(token for token in row.tolist() if token != PAD)


def greedy(rule: Rule, source: Tokens, max_len: int) -> list[int]:
    """The greedy translation of one sentence, one token at a time."""
    made: list[int] = []
    while len(made) < max_len and EOS not in made:
        logits = rule(source, (BOS, *made)).clone()
        logits[PAD] = -torch.inf
        made.append(int(logits.argmax()))
    return made


def greedy_case(rows: int = 4, max_len: int = 12) -> Case:
    """Greedy translations of at least three lengths, none of them cut at max_len."""
    while True:
        rule, src = random_rule(7, fresh_seed(), spread=3.0), sources(rows, rows + 2)
        want = [greedy(rule, real(row), max_len) for row in src]
        unmasked = [greedy(rule, tuple(row.tolist()), max_len) for row in src]
        lengths = {len(made) for made in want}
        if len(lengths) > 2 and max(lengths) < max_len and unmasked != want:
            return Case(rule, src, padded(want), padded(unmasked))


def score(rule: Rule, source: Tokens, tokens: Tokens, penalty: float) -> float:
    """log p of a whole translation over ((5 + n) / 6) ** penalty."""
    log_p = [
        rule(source, (BOS, *tokens[:i])).log_softmax(-1)[token].item()
        for i, token in enumerate(tokens)
    ]
    return sum(log_p) / ((5 + len(tokens)) / 6) ** penalty


def best_of_all(rule: Rule, source: Tokens, max_len: int, penalty: float) -> list[int]:
    """The best of every translation of up to max_len tokens, out of a vocabulary of six."""
    every = [
        (*prefix, EOS)
        for n in range(max_len)
        for prefix in itertools.product([BOS, 3, 4, 5], repeat=n)
    ]
    return list(max(every, key=lambda tokens: score(rule, source, tokens, penalty)))


def best_case(penalty: float, max_len: int = 4) -> Case:
    """The best translations of all, for three sentences whose padding would change them."""
    while True:
        rule, src = random_rule(6, fresh_seed(), spread=1.5), sources(3, 4)
        want = [best_of_all(rule, real(row), max_len, penalty) for row in src]
        unmasked = [best_of_all(rule, tuple(row.tolist()), max_len, penalty) for row in src]
        if want != unmasked:
            return Case(rule, src, padded(want), padded(unmasked))


def out_of_place(tokens: Tensor) -> tuple[int, int]:
    """How many tokens follow the first eos of their row, and how many paddings stand before it."""
    ends = tokens == EOS
    after = ends.cumsum(1) - ends.int() > 0
    return int((after & (tokens != PAD)).sum()), int((~after & (tokens == PAD)).sum())


# Two translations of source 9 end at the second step, and a beam of 2 is full. A third one that
# goes on would win at the sixth step, if the search for its neighbour's translation kept it alive.
EARLY_AND_SLOW = torch.tensor([[9, 9], [8, 8]])
LATE = [4, 3, 3, 3, 3, EOS]
EARLY: Table = {
    (): {4: 0.5, 5: 0.45, 3: 0.05},
    (4,): {EOS: 0.55, 3: 0.45},
    (5,): {EOS: 0.55, 3: 0.45},
    **{(4, *[3] * n): {3: 1.0} for n in range(1, 4)},
    (4, 3, 3, 3, 3): {EOS: 1.0},
}
SLOW: Table = {
    **{(4,) * n: {4: 0.9, 5: 0.1} for n in range(9)},
    (4,) * 9: {EOS: 0.9, 3: 0.1},
}


def early_and_slow(source: Tokens, prefix: Tokens) -> Tensor:
    """The logits of the next token: of two tables, the one for this source."""
    return table_rule(6, EARLY if 9 in source else SLOW)(source, prefix)


def same(got: Tensor, want: Tensor) -> bool:
    """Whether two tables of tokens have one shape and the same values."""
    return got.shape == want.shape and bool((got == want).all())
