"""What tells a right answer of lesson 04 from a wrong one.

The loss is compared with F.cross_entropy, the schedules with their formulas. Decoding runs on a
stand-in whose logits are looked up, so that the best translation is known by trying all of them.
"""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, expect_raises, wrong
from shared.exercises.seeds import fresh_generator, fresh_seed
from shared.exercises.stand_in import Rule, StandIn, Tokens, random_rule, table_rule

PAD, BOS, EOS = 0, 1, 2

exercise_04_1 = checks_for(
    "04.1",
    name="collate",
    difficulty=2,
    minutes=20,
    hints=[
        "Make three lists of lists first: src + [eos], [bos] + tgt, tgt + [eos]. Then pad each to "
        "its own longest row.",
        "The target's mask is two conditions at once: not padding, and not later. Both broadcast "
        "to (B, 1, T, T).",
    ],
)
exercise_04_2 = checks_for(
    "04.2",
    name="label_smoothed_loss",
    difficulty=3,
    minutes=20,
    hints=[
        "log_softmax over the vocabulary, then two terms: the right token's (gather) with weight "
        "1 - smoothing, and the mean over the vocabulary with weight smoothing.",
        "Padding: set its losses to 0, then divide by the number of tokens that are left.",
    ],
)
exercise_04_3a = checks_for(
    "04.3a",
    name="warmup_schedule",
    difficulty=1,
    minutes=5,
    hints=["One line: d_model^-0.5 times the smaller of step^-0.5 and step * warmup_steps^-1.5."],
)
exercise_04_3b = checks_for(
    "04.3b",
    name="cosine_schedule",
    difficulty=2,
    minutes=10,
    hints=[
        "Two cases: below warmup_steps a share of the peak; from there on, progress runs from 0 "
        "at warmup_steps to 1 at total_steps and stays there.",
    ],
)
exercise_04_4 = checks_for(
    "04.4",
    name="greedy_decode",
    difficulty=3,
    minutes=25,
    hints=[
        "Before the loop: src_mask, encode, start_cache, a column of bos. In the loop: step, "
        "argmax, and what becomes of rows that have ended.",
        "Keep a (B,) tensor `ended`; masked_fill(ended, pad_id) is what an ended row says.",
    ],
)
exercise_04_5 = checks_for(
    "04.5",
    name="beam_search",
    difficulty=5,
    minutes=50,
    hints=[
        "Give each sentence beam_size rows of the batch: cache.select(row numbers, each repeated). "
        "At first the prefixes are equal, so let one have log p 0 and the others -inf.",
        "Scores of all continuations as (B, beam_size * V), then topk: flat // V is the prefix, "
        "flat % V the token. The cache has to follow the prefixes: cache = cache.select(...).",
        "Of the best beam_size, those that end in eos are finished: note their score. Fill the "
        "beam with the best that do not end; 2 * beam_size candidates are always enough.",
    ],
)


# 04.1 collate


def padded(rows: list[list[int]], pad: int = PAD, front: bool = False) -> Tensor:
    """Rows filled up to the longest of them."""
    width = max(map(len, rows))
    fill = [[pad] * (width - len(row)) for row in rows]
    return torch.tensor([f + r if front else r + f for r, f in zip(rows, fill, strict=True)])


def example() -> list[tuple[list[int], list[int]]]:
    """Two pairs, new lists each time: an answer may change what it is given."""
    return [([5, 6, 7], [8, 9]), ([4], [3, 4, 5, 6])]


@exercise_04_1.check("the source of two pairs")
def collate_source(collate) -> None:
    src = [pair[0] for pair in example()]
    ended = [[*row, EOS] for row in src]
    looks_like = {
        "the source has no eos at its end": padded(src),
        "the source begins with bos": padded([[BOS, *row] for row in ended]),
        "the padding stands in front": padded(ended, front=True),
        "eos comes after the padding": torch.tensor([[5, 6, 7, EOS], [4, PAD, PAD, EOS]]),
        "source and target are padded to one common length": torch.tensor(
            [[5, 6, 7, EOS, PAD], [4, EOS, PAD, PAD, PAD]]
        ),
    }
    expect_close(collate(example()).src, padded(ended), what="src", looks_like=looks_like)


@exercise_04_1.check("the shift between tgt_in and tgt_out")
def collate_shift(collate) -> None:
    batch = collate(example())
    tgt = [pair[1] for pair in example()]
    both = padded([[BOS, *row, EOS] for row in tgt])
    looks_like = {
        "tgt_in holds eos: it is the whole target and should leave out its last token": both,
        "tgt_in has no bos: nothing stands before the first word": padded(tgt),
        "tgt_in loses its last column, not its last token: short rows keep eos": both[:, :-1],
    }
    inputs = padded([[BOS, *row] for row in tgt])
    expect_close(batch.tgt_in, inputs, what="tgt_in", looks_like=looks_like)
    looks_like = {
        "tgt_out is tgt_in: without the shift the model learns to copy what it reads": inputs,
        "tgt_out begins with bos": both,
        "tgt_out has no eos: the model never learns to stop": padded(tgt),
    }
    outputs = padded([[*row, EOS] for row in tgt])
    expect_close(batch.tgt_out, outputs, what="tgt_out", looks_like=looks_like)


def target_mask(rows: list[list[int]]) -> Tensor:
    """One True or False at a time: not padding, and not later."""
    width = max(map(len, rows))
    sees = [[[k <= q and k < len(row) for k in range(width)] for q in range(width)] for row in rows]
    return torch.tensor(sees).unsqueeze(1)


@exercise_04_1.check("the two masks")
def collate_masks(collate) -> None:
    batch = collate(example())
    visible = torch.tensor([[True] * 4, [True, True, False, False]])[:, None, None, :]
    looks_like = {"src_mask is True at the padding; True means: may be attended": ~visible}
    expect_close(batch.src_mask, visible, what="src_mask", looks_like=looks_like)
    rows = [[BOS, *tgt] for _, tgt in example()]
    want = target_mask(rows)
    causal = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    real = (padded(rows) != PAD)[:, None, None, :].expand(2, 1, 5, 5)
    looks_like = {
        "tgt_mask hides the padding but lets a position see later ones": real,
        "tgt_mask hides what comes later but not the padding": causal,
        "tgt_mask is True where it should be False": ~want,
        "a position does not see itself in tgt_mask": real & causal.tril(-1),
        "tgt_mask lets a position see itself and what comes later": real & causal.mT,
    }
    expect_close(batch.tgt_mask, want, what="tgt_mask", looks_like=looks_like)


@exercise_04_1.check("the number of tokens")
def collate_count(collate) -> None:
    got = collate(example()).num_tokens
    mistakes = {
        10: "num_tokens counts padding too",
        6: "num_tokens leaves out eos, which the model has to predict as well",
        14: "num_tokens counts the source: the loss is a mean over target tokens",
    }
    mistake = mistakes.get(got, "") if isinstance(got, int) else "num_tokens is not an int"
    expect_equal(got, 8, what="num_tokens", mistake=mistake)


@exercise_04_1.check("random pairs, other special ids")
def collate_random(collate) -> None:
    draw = fresh_generator()
    sizes = torch.randint(1, 9, (7, 2), generator=draw).tolist()

    def words(length: int) -> list[int]:
        return torch.randint(20, 90, (length,), generator=draw).tolist()

    pairs = [(words(s), words(t)) for s, t in sizes]
    batch = collate(pairs, pad_id=11, bos_id=12, eos_id=13)
    rows = {"src": [[*s, 13] for s, _ in pairs], "tgt_in": [[12, *t] for _, t in pairs]}
    rows["tgt_out"] = [[*t, 13] for _, t in pairs]
    for name, want in rows.items():
        default = padded([[{12: BOS, 13: EOS}.get(x, x) for x in row] for row in want], PAD)
        looks_like = {
            "pad_id, bos_id and eos_id are not used: 0, 1 and 2 are written instead": default,
            "padding is 0 instead of pad_id": padded(want, PAD),
        }
        what = f"{name} with pad 11, bos 12, eos 13"
        expect_close(getattr(batch, name), padded(want, 11), what=what, looks_like=looks_like)
    want = target_mask(rows["tgt_in"])
    expect_close(batch.tgt_mask, want, what="tgt_mask with pad_id=11")


@exercise_04_1.check("a batch of nothing")
def collate_nothing(collate) -> None:
    expect_raises(ValueError, collate, [], what="collate([])", mentions=[0])


# 04.2 label_smoothed_loss


def loss_case(dtype: torch.dtype = torch.float64, pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Random logits (3, 5, 11) and targets whose rows hold 5, 3 and 1 real tokens."""
    draw = fresh_generator()
    logits = (3 * torch.randn(3, 5, 11, generator=draw, dtype=torch.float64)).to(dtype)
    targets = torch.randint(3, 11, (3, 5), generator=draw)
    for row, length in enumerate((5, 3, 1)):
        targets[row, length:] = pad
    return logits, targets


def engine_loss(logits: Tensor, targets: Tensor, smoothing: float, pad: int = PAD) -> Tensor:
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=pad, label_smoothing=smoothing)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@exercise_04_2.check("plain cross-entropy, smoothing 0")
def loss_plain(label_smoothed_loss) -> None:
    logits, targets = loss_case()
    each, real = token_losses(logits, targets), targets != PAD
    looks_like = {
        "padding counts as if it were words": each.mean(),
        "the sum is divided by all positions, padding included": (each * real).sum() / real.numel(),
        "the sum is not divided by the number of tokens": (each * real).sum(),
        "it is the mean of the sentences' means: words of short sentences weigh more": (
            (each * real).sum(1) / real.sum(1)
        ).mean(),
        "the sign is wrong: it falls when the model gets worse": -(each * real).sum() / real.sum(),
    }
    want = engine_loss(logits, targets, 0.0)
    got = label_smoothed_loss(logits, targets, smoothing=0.0)
    expect_close(got, want, what="the loss", looks_like=looks_like)


@exercise_04_2.check("the smoothed target")
def loss_smoothed(label_smoothed_loss) -> None:
    logits, targets = loss_case()
    log_p, real = logits.log_softmax(-1), targets != PAD
    right = token_losses(logits, targets)
    every, V = -log_p.sum(-1), logits.shape[-1]

    def mean(each: Tensor) -> Tensor:
        return (each * real).sum() / real.sum()

    for smoothing in (0.1, 0.35):
        e = smoothing
        looks_like = {
            "smoothing has no effect": mean(right),
            "the right token gets weight `smoothing`, the others the rest": mean(
                e * right + (1 - e) * every / V
            ),
            "the smoothing is shared by the V - 1 wrong tokens only; here the right one has its "
            "part too": mean((1 - e) * right + e * (every - right) / (V - 1)),
            "the smoothing is added for every token: sum over the vocabulary, not mean": mean(
                (1 - e) * right + e * every
            ),
            "the right token keeps its full weight of 1": mean(right + e * every / V),
            "padding has a part of the smoothing that is not taken off": mean((1 - e) * right)
            + e * (every / V).mean(),
        }
        got = label_smoothed_loss(logits, targets, smoothing=e)
        want = engine_loss(logits, targets, e)
        expect_close(got, want, what=f"the loss at smoothing {e}", looks_like=looks_like)
    got = label_smoothed_loss(logits, targets)
    expect_close(got, engine_loss(logits, targets, 0.1), what="the loss with its defaults")


@exercise_04_2.check("the gradient, and another pad_id")
def loss_gradient(label_smoothed_loss) -> None:
    logits, targets = loss_case(pad=7)
    mine, engine = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    label_smoothed_loss(mine, targets, smoothing=0.2, pad_id=7).backward()
    engine_loss(engine, targets, 0.2, pad=7).backward()
    assert engine.grad is not None
    expect(
        mine.grad is not None,
        expected="a gradient for the logits",
        seen="none",
        mistake="the loss is cut off from the logits",
    )
    at_zero = logits.clone().requires_grad_()
    engine_loss(at_zero, targets, 0.2, pad=0).backward()
    assert at_zero.grad is not None
    looks_like = {"padding is recognised by 0 and not by pad_id": at_zero.grad}
    expect_close(mine.grad, engine.grad, what="the gradient of the logits", looks_like=looks_like)


@exercise_04_2.check("large logits, bf16 logits")
def loss_numbers(label_smoothed_loss) -> None:
    logits, targets = loss_case(torch.float32)
    got = label_smoothed_loss(1000 * logits, targets, smoothing=0.1)
    if not torch.isfinite(got):
        wrong(
            "log(softmax(x)) is -inf as soon as one probability is below 1e-45",
            seen=f"{got.item()} for logits of about 3000",
            hint="log_softmax",
        )
    expect_close(got, engine_loss(1000 * logits, targets, 0.1), what="the loss of large logits")
    coarse = logits.bfloat16()
    got = label_smoothed_loss(coarse, targets, smoothing=0.1)
    if got.dtype == torch.bfloat16:
        wrong(
            "the loss is computed in bf16: three decimal digits are too few for it",
            expected="float32",
            seen="bfloat16",
            hint="logits.float() first",
        )
    want = engine_loss(coarse.float(), targets, 0.1)
    expect_close(got, want, what="the loss of bf16 logits")


@exercise_04_2.check("nothing but padding, and a smoothing of 1")
def loss_edges(label_smoothed_loss) -> None:
    logits, _ = loss_case()
    got = label_smoothed_loss(logits, torch.zeros(3, 5, dtype=torch.long))
    mistake = "0 / 0: a batch without real tokens gives NaN, which one all-reduce spreads to all"
    expect(bool(torch.isfinite(got)), expected="0", seen=f"{got.item()}", mistake=mistake)
    expect_close(got, torch.zeros((), dtype=got.dtype), what="the loss of padding alone")
    targets = torch.ones(3, 5, dtype=torch.long)
    for bad in (1.0, -0.25):
        args = (label_smoothed_loss, logits, targets, bad)
        expect_raises(ValueError, *args, what=f"smoothing={bad}", mentions=[bad])


# 04.3 learning rates


def curve(function: Callable[[int], float], steps: range) -> Tensor:
    """The learning rates of these steps."""
    return torch.tensor([float(function(step)) for step in steps], dtype=torch.float64)


def expect_curve(got: Tensor, want: Tensor, what: str, looks_like: dict[str, Tensor]) -> None:
    expect_close(got, want, what=what, looks_like=looks_like, rtol=1e-7, atol=1e-15)


@exercise_04_3a.check("the curve")
def warmup_curve(warmup_schedule) -> None:
    for d_model, warmup in ((512, 4000), (128, 30)):
        expect_warmup(warmup_schedule, d_model, warmup)


def expect_warmup(warmup_schedule, d: int, w: int) -> None:
    """The paper's curve for one width d and one length of warm-up w."""
    steps, root = range(1, 4 * w, max(1, w // 25)), d**-0.5

    def paper(s: int) -> float:
        return root * min(s**-0.5, s * w**-1.5)

    rules = {
        "the larger of the two terms is taken": lambda s: root * max(s**-0.5, s * w**-1.5),
        "d_model is missing": lambda s: paper(s) / root,
        "d_model stands in the numerator: wider models need smaller rates": lambda s: paper(s) * d,
        "the rate does not fall after the warm-up": lambda s: paper(min(s, w)),
        "the warm-up has exponent -0.5 and ends too high": (
            lambda s: root * min(s**-0.5, s * w**-0.5)
        ),
        "steps count from 0: the first step has rate 0": (lambda s: paper(s - 1) if s > 1 else 0.0),
    }
    looks_like = {words: curve(rule, steps) for words, rule in rules.items()}
    got = curve(lambda s: warmup_schedule(s, d, w), steps)
    what = f"the rates for d_model {d}, warm-up {w}"
    expect_curve(got, curve(paper, steps), what, looks_like)


@exercise_04_3a.check("step 0")
def warmup_step_zero(warmup_schedule) -> None:
    expect_raises(ValueError, warmup_schedule, 0, 512, 4000, what="step 0", mentions=[0])


def cosine(progress: float, peak: float, floor: float = 0.0) -> float:
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


@exercise_04_3b.check("the curve")
def cosine_curve(cosine_schedule) -> None:
    expect_cosine(cosine_schedule, w=7, n=50, peak=1.0, floor=0.1)
    expect_cosine(cosine_schedule, w=10, n=100, peak=3e-3, floor=0.0)


def expect_cosine(cosine_schedule, w: int, n: int, peak: float, floor: float) -> None:
    """The curve for one warm-up w of n steps, and curves that are nearly it."""

    def rise(s: int) -> float:
        return peak * s / w

    def share(s: int) -> float:
        return (s - w) / (n - w)

    def curve_of(fall: Callable[[int], float], rise: Callable[[int], float] = rise) -> Tensor:
        return curve(lambda s: rise(s) if s < w else fall(s), range(1, n + 1))

    def right(s: int) -> float:
        return cosine(share(s), peak, floor)

    looks_like = {
        "the cosine is counted from step 0: the rate drops where the warm-up ends": curve_of(
            lambda s: cosine(s / n, peak, floor)
        ),
        "there is no warm-up": curve(lambda s: cosine(s / n, peak, floor), range(1, n + 1)),
        "the warm-up starts at rate 0: its first step does nothing": curve_of(
            right, lambda s: peak * (s - 1) / w
        ),
        "floor is ignored": curve_of(lambda s: cosine(share(s), peak)),
        "a whole cosine: the rate comes back up to the peak": curve_of(
            lambda s: cosine(2 * share(s), peak, floor)
        ),
        "the way down is a straight line": curve_of(lambda s: peak + (floor - peak) * share(s)),
        "the floor is added on top: the peak is too high": curve_of(
            lambda s: floor + cosine(share(s), peak)
        ),
    }
    got = curve(lambda s: cosine_schedule(s, w, n, peak, floor), range(1, n + 1))
    what = f"the rates for warm-up {w} of {n} steps, peak {peak}, floor {floor}"
    expect_curve(got, curve_of(right), what, looks_like)


@exercise_04_3b.check("after the last step, and without warm-up")
def cosine_edges(cosine_schedule) -> None:
    late = float(cosine_schedule(150, 10, 100, 1.0, 0.2))
    mistake = "the rate rises again after total_steps" if late > 0.2 + 1e-9 else ""
    expect(
        abs(late - 0.2) < 1e-9,
        expected="0.2, the floor, at step 150 of 100",
        seen=f"{late:.4f}",
        mistake=mistake,
        hint="progress may not go beyond 1",
    )
    got = curve(lambda s: cosine_schedule(s, 0, 10, 1.0), range(1, 11))
    want = curve(lambda s: cosine(s / 10, 1.0), range(1, 11))
    expect_curve(got, want, "the rates without warm-up", {})


@exercise_04_3b.check("impossible numbers of steps")
def cosine_refuses(cosine_schedule) -> None:
    expect_raises(ValueError, cosine_schedule, 0, 10, 100, 1.0, what="step 0", mentions=[0])
    what = "a warm-up as long as the run"
    expect_raises(ValueError, cosine_schedule, 5, 40, 40, 1.0, what=what, mentions=[40])


# 04.4 greedy_decode


def sources(rows: int, length: int) -> Tensor:
    """Random source tokens with padding at the end of all rows but the first."""
    draw = fresh_generator()
    src = torch.randint(3, 30, (rows, length), generator=draw)
    for row in range(1, rows):
        src[row, length - row :] = PAD
    return src


def real(row: Tensor) -> Tokens:
    """A row of tokens without padding."""
    return tuple(token for token in row.tolist() if token != PAD)


def greedy(rule: Rule, source: Tokens, max_len: int) -> list[int]:
    """One sentence, one token at a time: the twin that every greedy answer must equal."""
    made: list[int] = []
    while len(made) < max_len and EOS not in made:
        logits = rule(source, (BOS, *made)).clone()
        logits[PAD] = -torch.inf
        made.append(int(logits.argmax()))
    return made


def random_case(rows: int = 4, max_len: int = 12) -> tuple[Rule, Tensor, Tensor]:
    """A rule, sources and their greedy translations, of which some end early and some late."""
    while True:
        rule = random_rule(7, fresh_seed(), spread=3.0)
        src = sources(rows, rows + 2)
        rows_made = [greedy(rule, real(row), max_len) for row in src]
        lengths = {len(made) for made in rows_made}
        unmasked = [greedy(rule, tuple(row.tolist()), max_len) for row in src]
        if len(lengths) > 2 and max(lengths) < max_len and unmasked != rows_made:
            return rule, src, padded(rows_made)


def expect_no_replay(model: StandIn, steps: int) -> None:
    """One call of encode, and step once per position; else say which cost was paid."""
    if model.replayed:
        wrong(
            "the whole prefix runs through the decoder again for every new token",
            expected=f"{steps} positions, each seen once by model.step",
            seen=f"{model.replayed} positions through decode or forward",
            hint="start_cache once, then step(token, cache)",
        )
    mistake = "the source is encoded again for every token" if model.encoded > 1 else ""
    expect(
        model.encoded == 1,
        expected="one call of model.encode",
        seen=f"{model.encoded}",
        mistake=mistake,
    )


@exercise_04_4.check("one sentence, step by step")
def greedy_one(greedy_decode) -> None:
    table = {(): {4: 0.6, EOS: 0.3}, (4,): {5: 0.9}, (4, 5): {EOS: 0.8, 5: 0.2}}
    model = StandIn(table_rule(7, table))
    got = greedy_decode(model, torch.tensor([[9, 8, EOS]]), 10)
    looks_like = {
        "bos is part of the result": torch.tensor([[BOS, 4, 5, EOS]]),
        "eos is missing from the result": torch.tensor([[4, 5]]),
    }
    expect_close(got, torch.tensor([[4, 5, EOS]]), what="the translation", looks_like=looks_like)


@exercise_04_4.check("several sentences that end at different steps")
def greedy_batch(greedy_decode) -> None:
    rule, src, want = random_case()
    model = StandIn(rule)
    got = greedy_decode(model, src, 12)
    steps = want.shape[1]
    if isinstance(got, Tensor) and got.shape[-1] > steps and torch.equal(got[:, :steps], want):
        wrong(
            "decoding goes on to max_len although every sentence has ended",
            expected=f"{steps} tokens",
            seen=f"{got.shape[1]}",
            hint="stop when ended.all()",
        )
    shorter = want[:, : int((want == EOS).int().argmax(1).min()) + 1]
    looks_like = {"decoding stops when the first sentence of the batch has ended": shorter}
    if isinstance(got, Tensor) and got.shape == want.shape:
        after = (want == PAD) & (got != PAD)
        if after.any() and torch.equal(got.masked_fill(want == PAD, PAD), want):
            wrong(
                "after its eos a sentence goes on talking",
                expected="padding after eos",
                seen="other tokens there",
                hint="masked_fill the new tokens of the rows that have ended",
            )
    unmasked = [greedy(rule, tuple(row.tolist()), 12) for row in src]
    looks_like["the padding of the source is not masked"] = padded(unmasked)
    expect_close(got, want, what="the translations", looks_like=looks_like)


@exercise_04_4.check("cost: each position once")
def greedy_cost(greedy_decode) -> None:
    rule, src, want = random_case(rows=3)
    model = StandIn(rule)
    greedy_decode(model, src, 12)
    expect_no_replay(model, want.shape[1])
    expect_equal(
        model.steps,
        [3] * want.shape[1],
        what="tokens in each call of model.step",
        mistake="the sentences of a batch are decoded one after the other"
        if set(model.steps) == {1}
        else "",
    )
    mistake = "a graph is built for a backward pass that never comes"
    expect(
        not model.with_gradient,
        expected="no gradients while decoding",
        seen="torch.is_grad_enabled() in model.step",
        mistake=mistake,
        hint="@torch.no_grad()",
    )


@exercise_04_4.check("the cut at max_len, and padding never chosen")
def greedy_edges(greedy_decode) -> None:
    endless = {tuple([4] * n): {4: 0.9, PAD: 0.05} for n in range(9)}
    got = greedy_decode(StandIn(table_rule(6, endless)), torch.tensor([[5, 5]]), 6)
    looks_like = {
        "max_len counts bos: one token is missing": torch.full((1, 5), 4),
        "one token more than max_len is made": torch.full((1, 7), 4),
    }
    expect_close(got, torch.full((1, 6), 4), what="a cut translation", looks_like=looks_like)
    padding = {(): {PAD: 0.6, 4: 0.4}, (4,): {PAD: 0.5, EOS: 0.3}, (PAD,): {PAD: 0.5, EOS: 0.5}}
    got = greedy_decode(StandIn(table_rule(6, padding)), torch.tensor([[5, 5]]), 5)
    if isinstance(got, Tensor) and got.numel() and got[0, 0] == PAD:
        wrong(
            "padding is chosen as a word",
            expected="the best token that is not padding",
            seen="pad_id at the first position",
            hint="logits[:, pad_id] = -inf",
        )
    expect_close(got, torch.tensor([[4, EOS]]), what="a translation where padding is likely")


# 04.5 beam_search


def score(rule: Rule, source: Tokens, tokens: Tokens, penalty: float) -> float:
    """log p of a whole translation over ((5 + n) / 6) ** penalty."""
    log_p = [
        rule(source, (BOS, *tokens[:i])).log_softmax(-1)[token].item()
        for i, token in enumerate(tokens)
    ]
    return sum(log_p) / ((5 + len(tokens)) / 6) ** penalty


def best_of_all(rule: Rule, source: Tokens, max_len: int, penalty: float) -> Tokens:
    """Try every translation of up to max_len tokens, out of a vocabulary of six."""
    every = [
        (*prefix, EOS)
        for n in range(max_len)
        for prefix in itertools.product([BOS, 3, 4, 5], repeat=n)
    ]
    return max(every, key=lambda tokens: score(rule, source, tokens, penalty))


# Greedy takes 4 (0.5) and then has 0.3 at best; 5 (0.4) is followed by eos for certain.
GARDEN_PATH: dict[Tokens, dict[int, float]] = {
    (): {4: 0.5, 5: 0.4, 3: 0.1},
    (4,): {EOS: 0.3, 3: 0.25, 4: 0.2, 5: 0.2},
    (5,): {EOS: 0.97, 3: 0.01},
    **{(4, word): {EOS: 0.9} for word in (3, 4, 5)},
    (3,): {EOS: 0.5, 4: 0.5},
}


@exercise_04_5.check("a translation that greedy search misses")
def beam_beats_greedy(beam_search) -> None:
    model = StandIn(table_rule(6, GARDEN_PATH))
    got = beam_search(model, torch.tensor([[9, 9]]), 5, beam_size=2, length_penalty=0.0)
    looks_like = {
        "this is the greedy translation: the beam holds copies of one prefix, or only one lives": (
            torch.tensor([[4, EOS]])
        ),
        "bos is part of the result": torch.tensor([[BOS, 5, EOS]]),
        "all of the beam is returned, not its best": torch.tensor([[5, EOS], [4, EOS]]),
        "the last token's probability decides, not the sum of all logarithms": (
            torch.tensor([[3, EOS]])
        ),
    }
    expect_close(got, torch.tensor([[5, EOS]]), what="the translation", looks_like=looks_like)


@exercise_04_5.check("a finished translation stays what it is")
def beam_keeps_finished(beam_search) -> None:
    # eos is best at once; the prefixes that live on look good for a while and end badly.
    table = {(): {EOS: 0.4, 4: 0.35, 5: 0.25}, (4,): {4: 1.0}, (5,): {5: 1.0}}
    for word in (4, 5):
        table |= {(word,) * n: {word: 1.0} for n in range(1, 4)}
        table[(word,) * 4] = {EOS: 0.2, 3: 0.2, 4: 0.2, 5: 0.2}
    model = StandIn(table_rule(6, table))
    got = beam_search(model, torch.tensor([[9]]), 8, beam_size=2, length_penalty=0.0)
    if isinstance(got, Tensor) and got.numel() and got[0, 0] == EOS and (got[0, 1:] != PAD).any():
        wrong(
            "a finished translation goes on growing after its eos",
            expected="[eos]",
            seen=str(got[0].tolist()),
        )
    looks_like = {
        "a finished translation is forgotten while the search goes on": (
            torch.tensor([[4, 4, 4, 4, EOS]])
        )
    }
    expect_close(got, torch.tensor([[EOS]]), what="the translation", looks_like=looks_like)


# Two translations: (4, eos), log p = log 0.5, and six tokens in a row, log p = log 0.41.
LONG = (5, 5, 5, 5, 5)
TWO_LENGTHS: dict[Tokens, dict[int, float]] = {
    (): {4: 0.5, 5: 0.41, 3: 0.09},
    (4,): {EOS: 1.0},
    **{LONG[:n]: {5: 1.0} for n in range(1, 5)},
    LONG: {EOS: 1.0},
}


@exercise_04_5.check("the length penalty")
def beam_length_penalty(beam_search) -> None:
    src, short, long = torch.tensor([[9]]), torch.tensor([[4, EOS]]), torch.tensor([[*LONG, EOS]])

    def run(penalty: float) -> Tensor:
        model = StandIn(table_rule(6, TWO_LENGTHS))
        return beam_search(model, src, 9, beam_size=3, length_penalty=penalty)

    expect_close(
        run(0.0),
        short,
        what="the translation at length_penalty 0",
        looks_like={"a penalty of 0 should leave log p as it is; the long one wins": long},
    )
    # By the formula the two break even at a penalty of 0.56; with n ** penalty at 0.23.
    expect_close(
        run(0.4),
        short,
        what="the translation at length_penalty 0.4",
        looks_like={"long translations gain too much: is the divisor n ** penalty?": long},
    )
    expect_close(
        run(1.0),
        long,
        what="the translation at length_penalty 1",
        looks_like={"the length penalty has no effect, or works against long translations": short},
    )


def best_case(penalty: float) -> tuple[Rule, Tensor, Tensor, Tensor]:
    """A rule, sources, their best translations, and those that padding in view would give."""
    while True:
        rule, src = random_rule(6, fresh_seed(), spread=1.5), sources(3, 4)
        best = [list(best_of_all(rule, real(row), 4, penalty)) for row in src]
        unmasked = [list(best_of_all(rule, tuple(row.tolist()), 4, penalty)) for row in src]
        if best != unmasked:
            return rule, src, padded(best), padded(unmasked)


@exercise_04_5.check("a beam that holds everything finds the best of all")
def beam_exhaustive(beam_search) -> None:
    for penalty in (0.0, 0.6, 1.5):
        rule, src, want, unmasked = best_case(penalty)
        model = StandIn(rule)
        got = beam_search(model, src, 4, beam_size=300, length_penalty=penalty)
        if len(model.steps) > 1 and model.selections < 2:
            wrong(
                "the cache never follows the prefixes: a prefix goes on with another one's keys",
                hint="cache = cache.select(the rows that the new prefixes continue)",
            )
        looks_like = {"the padding of the source is not masked": unmasked}
        what = f"the translations at length_penalty {penalty}"
        hint = "is the cache reordered, are sums kept apart for each sentence, does eos count?"
        expect_close(got, want, what=what, looks_like=looks_like, hint=hint)


@exercise_04_5.check("a beam of 1 is greedy")
def beam_of_one(beam_search) -> None:
    rule, src, want = random_case()
    got = beam_search(StandIn(rule), src, 12, beam_size=1)
    expect_close(got, want, what="the translations at beam_size 1 (greedy ones expected)")


@exercise_04_5.check("a sentence does not depend on its neighbours")
def beam_rows_apart(beam_search) -> None:
    rule, src, _ = random_case()
    together = beam_search(StandIn(rule), src, 12, beam_size=3)
    for row in range(len(src)):
        alone = beam_search(StandIn(rule), src[row : row + 1], 12, beam_size=3)
        if real(together[row]) != real(alone[0]):
            wrong(
                "in a batch a sentence is translated differently than alone",
                expected=f"{len(real(alone[0]))} tokens as alone, for sentence {row}",
                seen=f"{len(real(together[row]))} tokens, or other ones",
                hint="do row numbers of the cache count b * beam_size + prefix?",
            )


@exercise_04_5.check("cost: one call of step for each position")
def beam_cost(beam_search) -> None:
    rule, src, _ = random_case()
    model = StandIn(rule)
    got = beam_search(model, src, 12, beam_size=3)
    expect_no_replay(model, got.shape[1])
    expect(
        len(model.steps) <= 12 and set(model.steps) <= {12},
        expected="at most 12 calls of model.step, with 4 x 3 rows each",
        seen=f"{len(model.steps)} calls with {sorted(set(model.steps))} rows",
        mistake="sentences or prefixes are decoded one after the other",
    )
    expect(
        not model.with_gradient,
        expected="no gradients while decoding",
        seen="torch.is_grad_enabled() in model.step",
        mistake="a graph is built for a backward pass that never comes",
        hint="@torch.no_grad()",
    )
    model = StandIn(table_rule(6, TWO_LENGTHS))
    beam_search(model, torch.tensor([[9]]), 200, beam_size=2, length_penalty=0.0)
    expect(
        len(model.steps) < 100,
        expected="an end when nothing can win any more",
        seen=f"{len(model.steps)} steps of 200 for translations of 2 and 6 tokens",
        mistake="the search goes on to max_len although it is decided",
    )


@exercise_04_5.check("impossible settings")
def beam_refuses(beam_search) -> None:
    args = (StandIn(random_rule(6, 0)), torch.tensor([[9]]), 5)
    expect_raises(ValueError, beam_search, *args, 0, what="beam_size 0", mentions=[0])
    what = "length_penalty -0.5"
    expect_raises(ValueError, beam_search, *args, 2, -0.5, what=what, mentions=[-0.5])
