"""What tells a right answer of lesson 04 from a wrong one.

The loss is compared with F.cross_entropy, the schedules with their formulas. Decoding runs on a
fake translator whose logits are looked up, so that the best translation is known by trying all.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons.lesson04_training.laboratory import translators as lab
from lessons.lesson04_training.laboratory.fake_translator import FakeTranslator
from lessons.lesson04_training.laboratory.translators import BOS, EOS, PAD
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    alike,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.properties import expect_by_hand

exercise_04_1 = checks_for(
    "04.1",
    name="collate",
    difficulty=2,
    minutes=20,
    hint=(
        "Make three lists of lists first: src + [eos], [bos] + tgt, tgt + [eos]. Then pad each to "
        "its own longest row."
    ),
)
exercise_04_2 = checks_for(
    "04.2",
    name="label_smoothed_loss",
    difficulty=3,
    minutes=20,
    hint=(
        "log_softmax over the vocabulary, then two terms: the right token's (gather) with weight "
        "1 - smoothing, and the mean over the vocabulary with weight smoothing."
    ),
)
exercise_04_3a = checks_for(
    "04.3a",
    name="warmup_schedule",
    difficulty=1,
    minutes=5,
    hint="One line: d_model^-0.5 times the smaller of step^-0.5 and step * warmup_steps^-1.5.",
)
exercise_04_3b = checks_for(
    "04.3b",
    name="cosine_schedule",
    difficulty=2,
    minutes=10,
    hint=(
        "Two cases: below warmup_steps a share of the peak; from there on, progress runs from 0 "
        "at warmup_steps to 1 at total_steps and stays there."
    ),
)
exercise_04_4 = checks_for(
    "04.4",
    name="greedy_decode",
    difficulty=3,
    minutes=25,
    hint=(
        "Before the loop: src_mask, encode, start_cache, a column of bos. In the loop: step, "
        "argmax, and what becomes of rows that have ended."
    ),
)
exercise_04_5 = checks_for(
    "04.5",
    name="beam_search",
    difficulty=5,
    minutes=50,
    hint=(
        "Give each sentence beam_size rows of the batch: cache.select(row numbers, each repeated). "
        "At first the prefixes are equal, so let one have log p 0 and the others -inf."
    ),
)


# 04.1 collate


@exercise_04_1.check("the source of two pairs")
def collate_source(collate) -> None:
    rows = lab.whole_rows(lab.example())["src"]
    want = lab.padded(rows)
    mistakes = {
        "the source has no eos at its end": lab.padded([src for src, _ in lab.example()]),
        "the source begins with bos": lab.padded([[BOS, *row] for row in rows]),
        "the padding stands in front": lab.padded(rows, front=True),
        "eos comes after the padding": torch.tensor([[5, 6, 7, EOS], [4, PAD, PAD, EOS]]),
        "source and target are padded to one common length": F.pad(want, (0, 1), value=PAD),
        "the source is filled up with eos: padding is pad_id": lab.padded(rows, EOS),
    }
    expect_close(collate(lab.example()).src, want, what="src", looks_like=mistakes)


@exercise_04_1.check("the shift between tgt_in and tgt_out")
def collate_shift(collate) -> None:
    batch, tgt = collate(lab.example()), [tgt for _, tgt in lab.example()]
    whole, bare = lab.padded([[BOS, *row, EOS] for row in tgt]), lab.padded(tgt)
    _, inputs, outputs = map(lab.padded, lab.whole_rows(lab.example()).values())
    mistakes = {
        "tgt_in holds eos: it is the whole target and should leave out its last token": whole,
        "tgt_in has no bos: nothing stands before the first word": bare,
        "tgt_in loses its last column, not its last token: short rows keep eos": whole[:, :-1],
        "tgt_in and tgt_out are exchanged": outputs,
        "the target has one column too many": F.pad(inputs, (0, 1), value=PAD),
    }
    expect_close(batch.tgt_in, inputs, what="tgt_in", looks_like=mistakes)
    mistakes = {
        "tgt_out is tgt_in: without the shift the model learns to copy what it reads": inputs,
        "tgt_out begins with bos": whole,
        "tgt_out has no eos: the model never learns to stop": bare,
        "the end of tgt_out is filled up with eos: padding is pad_id": lab.padded(
            lab.whole_rows(lab.example())["tgt_out"], EOS
        ),
    }
    expect_close(batch.tgt_out, outputs, what="tgt_out", looks_like=mistakes)


@exercise_04_1.check("the two masks")
def collate_masks(collate) -> None:
    batch, rows = collate(lab.example()), lab.whole_rows(lab.example())["tgt_in"]
    visible = torch.tensor([[True] * 4, [True, True, False, False]])[:, None, None, :]
    mistakes = {"src_mask is True at the padding; True means: may be attended": ~visible}
    expect_close(batch.src_mask, visible, what="src_mask", looks_like=mistakes)
    want, past = lab.target_mask(rows), torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    words = (lab.padded(rows) != PAD)[:, None, None, :].expand(2, 1, 5, 5)
    mistakes = {
        "tgt_mask hides the padding but lets a position see later ones": words,
        "tgt_mask hides what comes later but not the padding": past,
        "tgt_mask is True where it should be False": ~want,
        "a position does not see itself in tgt_mask": words & past.tril(-1),
        "tgt_mask lets a position see itself and what comes later": words & past.mT,
        "tgt_mask closes the rows of padded queries too: padding is hidden as a key, and no more": (
            want & words.mT
        ),
        "tgt_mask opens a key that meets one of the two conditions: use &, not |": words | past,
    }
    expect_close(batch.tgt_mask, want, what="tgt_mask", looks_like=mistakes)


@exercise_04_1.check("the number of tokens")
def collate_count(collate) -> None:
    got = collate(lab.example()).num_tokens
    mistakes = {
        "num_tokens counts padding too": 10,
        "num_tokens leaves out eos, which the model has to predict as well": 6,
        "num_tokens counts the source: the loss is a mean over target tokens": 14,
    }
    words = "num_tokens is no int: a tensor on a GPU is waited for wherever it is read"
    expected, seen = "num_tokens, an int", f"a {type(got).__name__}"
    expect(isinstance(got, int), mistake=words, expected=expected, seen=seen)
    expect_equal(got, 8, what="num_tokens", looks_like=mistakes)


@exercise_04_1.check("random pairs, other special ids")
def collate_random(collate) -> None:
    pairs = lab.random_pairs()
    batch = collate(pairs, pad_id=11, bos_id=12, eos_id=13)
    few, words = len(batch.src) < len(pairs), "pairs are left out: an empty sentence is one, too"
    recognise({words: few}, expected=f"{len(pairs)} rows", seen=f"{len(batch.src)}")
    rows, default = lab.whole_rows(pairs, 12, 13), lab.whole_rows(pairs)
    got, want = batch.src.tolist(), lab.padded(rows["src"], 11).tolist()
    recognise(
        {
            "the pairs stand in another order than given": got != want
            and sorted(got) == sorted(want)
        },
        expected="row i for pair i",
        seen="the same rows, in another order",
        hint="who sorts by length must do so before collate, where batches are made",
    )
    for name, want in rows.items():
        unused = "pad_id, bos_id and eos_id are not used: 0, 1 and 2 are written instead"
        zeros = "padding is 0 instead of pad_id"
        mistakes = {unused: lab.padded(default[name]), zeros: lab.padded(want)}
        what = f"{name} with pad 11, bos 12, eos 13"
        expect_close(getattr(batch, name), lab.padded(want, 11), what=what, looks_like=mistakes)
    expect_close(batch.tgt_mask, lab.target_mask(rows["tgt_in"]), what="tgt_mask with pad_id=11")
    visible = (lab.padded(rows["src"], 11) != 11)[:, None, None]
    expect_close(batch.src_mask, visible, what="src_mask with pad_id=11")
    expect_equal(batch.num_tokens, sum(map(len, rows["tgt_out"])), what="num_tokens")


@exercise_04_1.check("a batch of nothing")
def collate_nothing(collate) -> None:
    expect_raises(ValueError, collate, [], what="collate([])", mentions=[0])


# 04.2 label_smoothed_loss


def is_number(got: Any, want: Tensor) -> bool:
    """Whether an answer gave this number."""
    return isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, want)


def in_float32(label_smoothed_loss):
    """The answer, rounded where its loss is of float64: the contract asks for float32 at least."""

    def loss(*args, **kwargs):
        got = label_smoothed_loss(*args, **kwargs)
        return got.float() if getattr(got, "dtype", None) == torch.float64 else got

    return loss


@exercise_04_2.check("plain cross-entropy, smoothing 0")
def loss_plain(label_smoothed_loss: Any) -> None:
    label_smoothed_loss = in_float32(label_smoothed_loss)
    logits, targets = lab.loss_case()
    each, words = lab.token_losses(logits, targets), targets != PAD
    sums, counts = (each * words).sum(1), words.sum(1)  # of each sentence
    mistakes = {
        "padding counts as if it were words": each.mean(),
        "the sum is divided by all positions, padding included": sums.sum() / words.numel(),
        "the sum is not divided by the number of tokens": sums.sum(),
        "it is the mean of the sentences' means: words of short sentences weigh more": (
            (sums / counts).mean()
        ),
        "the sign is wrong: it falls when the model gets worse": -sums.sum() / counts.sum(),
        "the sum is divided by the number of sentences": sums.sum() / len(targets),
        "the loss is in bits, not in nats": sums.sum() / counts.sum() / math.log(2),
        "softmax runs over the positions, not over the vocabulary": (
            -(logits.log_softmax(1).gather(-1, targets[..., None])[..., 0] * words).sum()
            / words.sum()
        ),
    }
    large = 1000 * logits
    got, want = (
        label_smoothed_loss(large, targets, smoothing=0.0),
        lab.torch_loss(large, targets, 0),
    )
    recognise(
        {
            "softmax is taken before log_softmax, which makes logits of probabilities": (
                is_number(got, lab.torch_loss(large.softmax(-1), targets, 0))
            ),
            "probabilities are kept away from 0, which cuts large losses off": (
                isinstance(got, Tensor) and bool(0 <= got < want / 10)
            ),
        },
        expected=f"a loss of {want.item():.0f} for logits of about 3000",
        seen=f"{got}",
        hint="log_softmax needs no epsilon and no clamp",
    )
    got = label_smoothed_loss(logits, targets, smoothing=0.0)
    expect_close(got, lab.torch_loss(logits, targets, 0.0), what="the loss", looks_like=mistakes)


@exercise_04_2.check("the smoothed target")
def loss_smoothed(label_smoothed_loss: Any) -> None:
    label_smoothed_loss = in_float32(label_smoothed_loss)
    for e in (0.9, 0.35, 0.1):  # by chance, two formulas can agree on one case
        expect_smoothed(label_smoothed_loss, e)
    logits, targets = lab.loss_case()
    got = label_smoothed_loss(logits, targets)
    expect_close(got, lab.torch_loss(logits, targets, 0.1), what="the loss with its defaults")
    expect_by_hand(lambda: label_smoothed_loss(logits, targets), "cross_entropy", what="the loss")


def expect_smoothed(label_smoothed_loss, e: float) -> None:
    logits, targets = lab.loss_case()
    right, every = lab.token_losses(logits, targets), -logits.log_softmax(-1).sum(-1)
    words, V = targets != PAD, logits.shape[-1]
    q = torch.tensor([1 - e + e / V, *(V - 1) * [e / V]])  # the smoothed target

    def mean(each: Tensor) -> Tensor:
        return (each * words).sum() / words.sum()

    mistakes = {
        "smoothing has no effect": mean(right),
        "the right token gets weight `smoothing`, the others the rest": (
            mean(e * right + (1 - e) * every / V)
        ),
        "the smoothing is shared by the V - 1 wrong tokens only; here the right one has its "
        "part too": mean((1 - e) * right + e * (every - right) / (V - 1)),
        "the smoothing is added for every token: sum over the vocabulary, not mean": (
            mean((1 - e) * right + e * every)
        ),
        "the right token keeps its full weight of 1": mean(right + e * every / V),
        "padding's column is left out of the mean over the vocabulary": (
            mean((1 - e) * right + e * (every + logits.log_softmax(-1)[..., PAD]) / (V - 1))
        ),
        "padding has a part of the smoothing that is not taken off": (
            mean((1 - e) * right) + e * (every / V).mean()
        ),
        "padding has a part of the smoothing that is not taken off, and the sum is divided by the "
        "words": (mean((1 - e) * right) + e * (every / V).sum() / words.sum()),
        "it is the divergence from the smoothed target (kl_div), not the cross-entropy: less by "
        "that target's entropy": mean((1 - e) * right + e * every / V) + (q * q.log()).sum(),
    }
    got, what = label_smoothed_loss(logits, targets, smoothing=e), f"the loss at smoothing {e}"
    want = lab.torch_loss(logits, targets, e)
    expect_close(got, want, what=what, looks_like=mistakes, rtol=1e-5, atol=1e-6)


@exercise_04_2.check("the gradient, and another pad_id")
def loss_gradient(label_smoothed_loss) -> None:
    logits, targets = lab.loss_case(pad=7)
    leaf = logits.clone().requires_grad_()
    loss = label_smoothed_loss(leaf, targets, smoothing=0.2, pad_id=7)
    cut = "the loss is cut off from the logits"
    expect(loss.requires_grad, mistake=cut, expected="a gradient for the logits", seen="none")
    want, at_zero = (lab.torch_gradient(logits, targets, 0.2, pad) for pad in (7, 0))
    got = torch.autograd.grad(loss, leaf)[0]
    mistakes = {
        "padding is recognised by 0 and not by pad_id": at_zero,
        "ids below pad_id are taken for padding: ask !=, not >": (
            lab.torch_gradient(logits, targets.where(targets > 7, 7), 0.2, 7)
        ),
        "the smoothing term is cut off from the logits: only the right token's has a gradient": (
            0.8 * lab.torch_gradient(logits, targets, 0.0, 7)
        ),
    }
    expect_close(got, want, what="the gradient of the logits", looks_like=mistakes)


@exercise_04_2.check("large logits, bf16 logits")
def loss_numbers(label_smoothed_loss: Any) -> None:
    label_smoothed_loss = in_float32(label_smoothed_loss)
    logits, targets = lab.loss_case()
    got = label_smoothed_loss(1000 * logits, targets, smoothing=0.1)
    mistake = "log(softmax(x)) is -inf as soon as one probability is below 1e-45: use log_softmax"
    what = "a finite loss for logits of about 3000"
    expect(bool(got.isfinite()), mistake=mistake, expected=what, seen=f"{got.item()}")
    expect_close(got, lab.torch_loss(1000 * logits, targets, 0.1), what="the loss of large logits")
    for case in range(9):  # in a single loss the errors may cancel
        (logits, targets), row = lab.loss_case(), case % 3
        coarse, aims = logits[row : row + 1].bfloat16(), targets[row : row + 1]
        got = label_smoothed_loss(coarse, aims, smoothing=0.1)
        expect(
            got.dtype != torch.bfloat16,
            mistake="the loss is computed in bf16: three decimal digits are too few for it",
            expected="float32",
            seen="bfloat16",
            hint="logits.float() first",
        )
        want = lab.torch_loss(coarse.float(), aims, 0.1)
        hint = "logits.float() before log_softmax"
        expect_close(got, want, what="the loss of bf16 logits", hint=hint)


@exercise_04_2.check("nothing but padding, and a smoothing of 1")
def loss_edges(label_smoothed_loss: Any) -> None:
    label_smoothed_loss = in_float32(label_smoothed_loss)
    logits, targets = lab.loss_case()[0], torch.ones(3, 5, dtype=torch.long)
    mistake = "0 / 0: a batch without real tokens gives NaN, which one all-reduce spreads to all"
    got = label_smoothed_loss(logits, 0 * targets)
    expect(bool(got.isfinite()), mistake=mistake, expected="0", seen=f"{got.item()}")
    expect_close(got, torch.zeros(()), what="the loss of padding alone")
    leaf = logits.clone().requires_grad_()
    alone = label_smoothed_loss(leaf, 0 * targets)
    expect(
        alone.requires_grad,
        mistake="the loss of padding alone is a constant: backward() raises where it is met",
        expected="0 with a graph, whose gradients are 0",
        seen="a tensor without a graph",
        hint="a sum over no token is 0, and has one: divide it by at least 1",
    )
    grad = torch.autograd.grad(alone, leaf)[0]
    expect_close(grad, torch.zeros_like(leaf), what="the gradient for a batch of padding alone")
    for bad in (1.0, -0.25):
        args = (label_smoothed_loss, logits, targets, bad)
        expect_raises(ValueError, *args, what=f"smoothing={bad}", mentions=[bad])


# 04.3 learning rates


def expect_curve(got, want: lab.Rate, steps: range, what: str, mistakes=None, hint="") -> None:
    """The same rate at each of these steps; `mistakes` maps words to the rates of a mistake."""
    kind = type(got(steps[0]))
    right, words = issubclass(kind, int | float), f"a {kind.__name__} is returned, not a float"
    expect(right, mistake=words, expected="a rate that is a float", seen=kind.__name__)
    rates, wanted = lab.curve(got, steps), lab.curve(want, steps)
    looks_like = {words: lab.curve(rate, steps) for words, rate in (mistakes or {}).items()}
    expect_close(rates, wanted, what=what, looks_like=looks_like, rtol=1e-7, atol=1e-15, hint=hint)


@exercise_04_3a.check("the curve")
def warmup_curve(warmup_schedule) -> None:
    for d_model, warmup in ((512, 4000), (128, 30)):
        expect_warmup(warmup_schedule, d_model, warmup)


def expect_warmup(warmup_schedule, d: int, w: int) -> None:
    def paper(s: int) -> float:
        return d**-0.5 * min(s**-0.5, s * w**-1.5)

    mistakes = {
        "the larger of the two terms is taken": lambda s: d**-0.5 * max(s**-0.5, s * w**-1.5),
        "d_model is missing": lambda s: paper(s) * d**0.5,
        "d_model stands in the numerator: wider models need smaller rates": lambda s: paper(s) * d,
        "the rate does not fall after the warm-up": lambda s: paper(min(s, w)),
        "the warm-up has exponent -0.5 and ends too high": (
            lambda s: d**-0.5 * min(s**-0.5, s * w**-0.5)
        ),
        "the warm-up has exponent -1 and ends too high": (lambda s: d**-0.5 * min(s**-0.5, s / w)),
        "the factor is 1 / d_model, not its root": lambda s: paper(s) * d**-0.5,
        "steps count from 0: the first step has rate 0": lambda s: paper(s - 1) if s > 1 else 0.0,
        "the rate is 0 until the warm-up ends: // drops the fraction, / keeps it": (
            lambda s: paper(s) * (s >= w)
        ),
        "each step has the rate of the one after it: step counts from 1 already": (
            lambda s: paper(s + 1)
        ),
        "d_model^-0.5 is missing in the rising term": lambda s: min((d * s) ** -0.5, s * w**-1.5),
        "d_model^-0.5 is missing in the falling term": (
            lambda s: min(s**-0.5, d**-0.5 * s * w**-1.5)
        ),
        "only the warm-up is multiplied by d_model^-0.5: the rate jumps where it ends": (
            lambda s: paper(s) if s <= w else s**-0.5
        ),
    }
    steps, what = range(1, 4 * w, max(1, w // 25)), f"the rates for d_model {d}, warm-up {w}"
    expect_curve(lambda s: warmup_schedule(s, d, w), paper, steps, what, mistakes)


@exercise_04_3a.check("step 0, and a warm-up of 0")
def warmup_step_zero(warmup_schedule) -> None:
    expect_raises(ValueError, warmup_schedule, 0, 512, 4000, what="step 0", mentions=[0])
    expect_raises(ValueError, warmup_schedule, 3, 512, 0, what="warmup_steps 0", mentions=[0])


@exercise_04_3b.check("the curve")
def cosine_curve(cosine_schedule) -> None:
    expect_cosine(cosine_schedule, w=7, n=50, peak=1.0, floor=0.1)
    expect_cosine(cosine_schedule, w=30, n=100, peak=3e-3, floor=5e-4)


def expect_cosine(cosine_schedule, w: int, n: int, peak: float, floor: float) -> None:
    warm, right = partial(lab.warmed, w, peak), lab.falling(w, n, peak, floor)
    early, steps = lab.falling(0, n, peak, floor), range(1, n + 1)
    mistakes = {
        "the cosine is counted from step 0: the rate drops where the warm-up ends": warm(early),
        "there is no warm-up": early,
        "the cosine takes total_steps from the warm-up's end on: it ends at total_steps": (
            warm(lab.falling(w, w + n, peak, floor))
        ),
        "the warm-up starts at rate 0: its first step does nothing": (
            warm(right, lambda s: peak * (s - 1) / w)
        ),
        "the rate is 0 until the warm-up ends: // drops the fraction, / keeps it": (
            warm(right, lambda s: 0.0)
        ),
        "the warm-up rises from the floor, not from 0": (
            warm(right, lambda s: floor + (peak - floor) * s / w)
        ),
        "the floor cuts a cosine to 0 off: the cosine itself ends there": (
            warm(lambda s: max(floor, lab.falling(w, n, peak)(s)))
        ),
        "floor is ignored": warm(lab.falling(w, n, peak)),
        "a whole cosine: the rate comes back up to the peak": (
            warm(lab.falling(w, (w + n) / 2, peak, floor))
        ),
        "the cosine is upside down: after the warm-up the rate starts at floor and rises": (
            warm(lab.falling(w, n, floor, peak))
        ),
        "a quarter of a cosine: it has not reached floor at total_steps": (
            warm(lab.falling(w, 2 * n - w, peak, floor))
        ),
        "the angle is in degrees: math.cos takes radians": (
            warm(lambda s: floor + (peak - floor) * 0.5 * (1 + math.cos(180 * (s - w) / (n - w))))
        ),
        "// drops the fraction of the progress: the rate stays at the peak, then falls at once": (
            warm(lambda s: floor if s >= n else peak)
        ),
        "the step after the warm-up has the peak once more: there the fall has begun": (
            warm(lambda s: lab.falling(w + 1, n, peak, floor)(max(s, w + 1)))
        ),
        "the cosine ends a step after total_steps": warm(lab.falling(w, n + 1, peak, floor)),
        "the cosine ends a step before total_steps": (
            warm(lambda s: lab.falling(w, n - 1, peak, floor)(min(s, n - 1)))
        ),
        "the way down is a straight line": (
            warm(lambda s: peak + (floor - peak) * (s - w) / (n - w))
        ),
        "the floor is added on top: the peak is too high": (
            warm(lambda s: floor + lab.falling(w, n, peak)(s))
        ),
        "the floor is added to a cosine from the peak to 0: just after the peak, it is above it": (
            warm(lambda s: floor * (s > w) + lab.falling(w, n, peak)(s))
        ),
        "the floor holds in the warm-up as well: it is where the cosine ends, and no more": (
            lambda s: max(floor, warm(right)(s))
        ),
    }
    what = f"the rates for warm-up {w} of {n} steps, peak {peak}, floor {floor}"
    expect_curve(
        lambda s: cosine_schedule(s, w, n, peak, floor), warm(right), steps, what, mistakes
    )


@exercise_04_3b.check("after the last step, and without warm-up")
def cosine_edges(cosine_schedule) -> None:
    def late(step: int) -> float:
        return cosine_schedule(step, 10, 100, 1.0, 0.2)

    what, hint = (
        "the rate at step 150 of 100, the floor of 0.2",
        "at total_steps and after it the rate is floor",
    )
    mistakes = {
        "the rate rises again after total_steps: progress may not go beyond 1": (
            lab.falling(10, 100, 1.0, 0.2)
        ),
        "after total_steps the rate is 0: it stays at floor": lambda s: 0.0,
        "after total_steps the rate is the peak again": lambda s: 1.0,
    }
    expect_curve(late, lambda s: 0.2, range(150, 151), what, mistakes, hint)
    what, want = "the rates without warm-up", lab.falling(0, 10, 1.0)
    rate = partial(accepted, cosine_schedule, what="warmup_steps=0, no warm-up,")
    mistakes = {
        "warmup_steps=0 is taken for 1: without a warm-up the cosine falls from step 0 on": (
            lab.falling(1, 10, 1.0)
        ),
    }
    expect_curve(lambda s: rate(s, 0, 10, 1.0), want, range(1, 11), what, mistakes)


@exercise_04_3b.check("impossible numbers of steps")
def cosine_refuses(cosine_schedule) -> None:
    expect_raises(ValueError, cosine_schedule, 0, 10, 100, 1.0, what="step 0", mentions=[0])
    what = "a warm-up as long as the run"
    expect_raises(ValueError, cosine_schedule, 5, 40, 40, 1.0, what=what, mentions=[40])
    what = "a warm-up that is longer than the run"
    expect_raises(ValueError, cosine_schedule, 5, 50, 40, 1.0, what=what, mentions=[50, 40])


# 04.4 greedy_decode


def expect_translations(
    decode, case: lab.Case, max_len: int, mistakes, what="the translations", hint=""
) -> None:
    """The answer's tokens (B, T), in which nothing follows a row's eos, are those wanted."""
    trains = len(case.src) > 1
    model = FakeTranslator(case.rule).train(trains)
    got = decode(model, case.src, max_len)
    recognise(
        {
            "the model is left in eval mode: the training that goes on has no dropout": (
                trains and not model.training
            ),
            "the model is left in training mode, and was in eval mode: put back what it was": (
                model.training and not trains
            ),
        },
        expected="model.training as before: who calls decides on the mode",
        seen=f"{model.training}",
    )
    expect(isinstance(got, Tensor), expected="a tensor", seen=f"a {type(got).__name__}")
    expect(got.dim() == 2, expected="tokens of shape (B, T)", seen=f"shape {tuple(got.shape)}")
    words, pads = lab.out_of_place(got)
    endless = lab.same(got, case.want.where(case.want != EOS, PAD)) and EOS in case.want
    recognise(
        {
            "eos is taken out of the result, and padding stands in its place": endless,
            "a row is empty: at max_len, what has been made stands in for a finished translation": (
                bool((got == PAD).all(dim=1).any()) and EOS not in case.want
            ),
            "a row is filled up with eos: what follows its first eos is pad_id": (
                words > 0 and lab.same(got, case.want.where(case.want != PAD, EOS))
            ),
            "after its eos a sentence goes on talking": words > 0,
            "padding is chosen as a word": pads > 0,
        },
        expected="padding after eos, and nowhere before it",
        seen=f"{words} other tokens after an eos, {pads} times padding before one",
        hint="masked_fill the new tokens of rows that have ended; logits[:, pad_id] = -inf",
    )
    prefixes_compete = len(model.steps) > 1 and max(model.steps) > len(case.src)
    expect(
        lab.same(got, case.want) or model.reordered > 0 or not prefixes_compete,
        mistake="the cache never follows the prefixes: a prefix goes on with another one's keys",
        expected=f"{what}, from a cache that is reordered after each step",
        seen="another one, without cache.select between the steps",
        hint="cache = cache.select(the rows that the new prefixes continue)",
    )
    expect_close(got, case.want, what=what, looks_like=mistakes, hint=hint)
    expect(
        not model.padding_encoded,
        mistake="the encoder sees the source's padding: encode takes src_mask as well",
        expected="encode(src, src_mask), and the same mask for start_cache",
        seen="a source with padding, encoded without a mask that hides it",
    )


def expect_by_table(decode, table, max_len, want, mistakes, what="the translation") -> None:
    """The one right translation where a table holds the probabilities of the next token."""
    looks_like = {words: torch.tensor(rows) for words, rows in mistakes.items()}
    expect_translations(decode, lab.table_case(table, want), max_len, looks_like, what)


def expect_other_ids(decode) -> None:
    """Special tokens are those that are given: the model knows 6, 7 and 5."""
    decode = partial(decode, bos_id=6, eos_id=7, pad_id=5)
    case, what = lab.other_ids_case(), "the translations with bos_id=6, eos_id=7, pad_id=5"
    got = decode(FakeTranslator(case.rule), case.src, 5)
    fixed = {
        "the source's padding is looked for as 0, whatever pad_id is": [[1] * 5, [7, 5, 5, 5, 5]],
        "the first token is 1, whatever bos_id is": [[1] * 5, [1] * 5],
        "a translation ends at 2, whatever eos_id is": [[3, 4, 7, 3, 3], [7, 3, 3, 3, 3]],
        "the result is filled up with 0, whatever pad_id is": [[3, 4, 7], [7, 0, 0]],
    }
    recognise(
        alike(got, {words: torch.tensor(rows) for words, rows in fixed.items()}, lab.same),
        expected=what,
        seen=f"{got.tolist()}",
        hint="no 0, 1 or 2 in the body: bos_id, eos_id and pad_id",
    )
    hint = "no 0, 1 or 2 in the body: bos_id, eos_id and pad_id"
    expect_translations(decode, case, 5, {}, what, hint)


def expect_none(decode) -> None:
    """At max_len 0 there are as many rows as sentences, and no token."""
    case = lab.table_case(lab.ENDLESS, [4])
    got = decode(FakeTranslator(case.rule), case.src, 0)
    shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
    one = "max_len 0 makes a token all the same: ask for max_len before a step, not after it"
    expect_equal(shape, (1, 0), what="the shape at max_len 0", looks_like={one: (1, 1)})


def expect_cost(model: FakeTranslator, rows: int, who: str) -> None:
    """The source encoded once, then one call of step for each position, with all rows in it."""
    again, most = len(model.steps) > len({*model.positions}), max(model.steps, default=0)
    recognise(
        {
            "the whole prefix runs through the decoder again for every new token": (
                model.replayed > 0
            ),
            "the prefix runs through step again for every new token: one cache keeps what it was "
            "given": again and most >= rows,
            f"{who} are decoded one after the other": again,
            "the source is encoded again for every token": model.encoded > 1,
            "a graph is built for a backward pass that never comes": model.with_gradient,
        },
        expected="1 x encode, 1 x step for each position, without gradients",
        seen=model.usage(),
        hint="start_cache once, then step(token, cache) for all rows, under @torch.no_grad()",
    )
    expect(0 < most <= rows, expected=f"1 to {rows} rows in a call of step", seen=f"{most}")


@exercise_04_4.check("one sentence, step by step")
def greedy_one(greedy_decode) -> None:
    table = {(): {4: 0.6, EOS: 0.3}, (4,): {5: 0.9}, (4, 5): {EOS: 0.8, 5: 0.2}}
    mistakes = {
        "bos is part of the result": [[BOS, 4, 5, EOS]],
        "the result is (T, B): the batch comes first": [[4], [5], [EOS]],
        "a column of padding stands at the end: the longest row ends with its eos": [
            [4, 5, EOS, PAD]
        ],
        "eos is missing from the result": [[4, 5]],
        "decoding goes on to max_len although every sentence has ended": [[4, 5, EOS] + [PAD] * 7],
    }
    expect_by_table(greedy_decode, table, 10, [4, 5, EOS], mistakes)


@exercise_04_4.check("several sentences that end at different steps")
def greedy_batch(greedy_decode) -> None:
    case = lab.greedy_case()
    to_the_first = case.want[:, : case.first_end]
    mistakes = {
        "decoding stops when the first sentence of the batch has ended": to_the_first,
        "the padding of the source is not masked": case.unmasked,
        "decoding stops only where all sentences end at one step: note which have ended": (
            F.pad(case.want, (0, 12 - case.want.shape[1]), value=PAD)
        ),
    }
    hint = "stop when ended.all(), and not before; src_mask hides the source's padding"
    expect_translations(greedy_decode, case, 12, mistakes, hint=hint)


@exercise_04_4.check("cost: each position once")
def greedy_cost(greedy_decode) -> None:
    case = lab.greedy_case(rows=3)
    model = FakeTranslator(case.rule)
    greedy_decode(model, case.src, 12)
    expect_cost(model, rows=3, who="the sentences of a batch")
    calls, enough = len(model.steps), case.want.shape[1]
    late = "step is called once more when all is said" if calls == enough + 1 else ""
    expect_equal(calls, enough, what="number of calls of model.step", mistake=late)


@exercise_04_4.check("the cut at max_len, and padding never chosen")
def greedy_edges(greedy_decode) -> None:
    mistakes = {
        "max_len counts bos: one token is missing": [[4] * 5],
        "one token more than max_len is made": [[4] * 7],
        "eos is put at max_len: a row that is cut has none": [[4] * 5 + [EOS]],
    }
    expect_by_table(greedy_decode, lab.ENDLESS, 6, [4] * 6, mistakes, "a cut translation")
    what = "a translation where padding is likely"
    mistakes = {"where padding is likeliest a row ends: the next best word is to come": [[EOS]]}
    expect_by_table(greedy_decode, lab.LIKELY_PADDING, 5, [4, EOS], mistakes, what)
    expect_other_ids(greedy_decode)
    expect_none(greedy_decode)


# 04.5 beam_search


@exercise_04_5.check("a translation that greedy search misses")
def beam_beats_greedy(beam_search) -> None:
    mistakes = {
        "this is the greedy translation: the beam holds copies of one prefix, only one lives, or "
        "what is returned is not the best of the finished": [[4, EOS]],
        "bos is part of the result": [[BOS, 5, EOS]],
        "all of the beam is returned, not its best": [[5, EOS], [4, EOS]],
    }
    search = partial(beam_search, beam_size=2, length_penalty=0.0)
    expect_by_table(search, lab.GARDEN_PATH, 5, [5, EOS], mistakes)
    what, last = "a translation where padding is likely", [[5, EOS]]
    mistakes = {"the last token's probability decides, not the sum of all logarithms": last}
    expect_by_table(search, lab.LIKELY_PADDING, 5, [4, EOS], mistakes, what)


@exercise_04_5.check("a finished translation stays what it is, and ends nothing")
def beam_keeps_finished(beam_search) -> None:
    search = partial(beam_search, beam_size=2, length_penalty=0.0)
    forgotten = "a finished translation is forgotten while the search goes on"
    expect_by_table(search, lab.EARLY_END, 8, [EOS], {forgotten: [[4] * 4 + [EOS]]})
    too_soon = (
        "the search ends with the first finished translation, or counts one that is not among a "
        "step's best beam_size continuations: a better one can follow"
    )
    expect_by_table(search, lab.BETTER_LATER, 8, [4, 5, EOS], {too_soon: [[3, EOS]]})


@exercise_04_5.check("one rule at a time")
def beam_rules(beam_search) -> None:
    short, long = [4, EOS], [5, 5, 5, 5, 5, EOS]
    for table, beam_size, penalty, want, mistake, other in [
        (lab.PADDING_TAKES, 2, 0.0, [5, EOS], "log p is taken without padding: log_softmax runs "
         "over the whole vocabulary, and pad_id is left out after it", [4, EOS]),
        (lab.ONE_ENDS, 2, 0.0, [EOS], "a living prefix wins over a finished translation, or an eos "
         "counts only where it is the best continuation of all", [4] * 9),
        (lab.TWO_LENGTHS, 3, 0.0, short, "a penalty of 0 should leave log p as it is", long),
        (lab.ENDS_AT_ONCE, 1, 0.6, [EOS], "the only prefix has ended, and another one is followed "
         "in its place: at beam_size 1 this is greedy search", long),
        (lab.FALLING_LATE, 2, 1.0, [5, 3, EOS], "the length penalty has no effect, or works "
         "against long translations", short),
        (lab.TWO_LENGTHS, 3, 1.0, long, "the search ends before a longer translation can win: it "
         "may hope for the largest divisor, that of max_len", short),
        (lab.REFILLED, 2, 1.5, [4, 3, EOS], "the beam is not filled up: the place of a finished "
         "translation belongs to the next best prefix", [4, EOS]),
        (lab.TWO_LENGTHS, 3, 0.4, short, "long translations gain too much: is the divisor "
         "n ** penalty, or is a sum divided while it lives?", long),
        (lab.TWO_LENGTHS, 3, 0.525, short, "n leaves out eos, which is a token, too", long),
        (lab.TWO_LENGTHS, 3, 0.59, long, "n counts bos, which nobody has chosen", short),
    ]:  # fmt: skip
        search = partial(beam_search, beam_size=beam_size, length_penalty=penalty)
        what = f"the translation at length_penalty {penalty}, beam_size {beam_size}"
        expect_by_table(search, table, 9, want, {mistake: [other]}, what)


@exercise_04_5.check("a sentence does not depend on its neighbours")
def beam_rows_apart(beam_search) -> None:
    search = partial(beam_search, max_len=12, beam_size=2, length_penalty=1.0)
    alone, among = (
        lab.real(search(FakeTranslator(lab.early_and_slow), src)[0])
        for src in (lab.EARLY_AND_SLOW[:1], lab.EARLY_AND_SLOW)
    )
    recognise(
        {
            "a decided sentence is searched on while its neighbours are, and changes": (
                alone != among and list(among) == lab.LATE
            )
        },
        expected=f"{len(alone)} tokens, as alone",
        seen=f"{len(among)} tokens beside a sentence that ends later",
        hint="what ends after a sentence is decided comes too late for it",
    )
    expect(4 in alone or 5 in alone, expected="words of the model, 4 or 5", seen=f"{alone}")
    for _ in range(4):  # in one draw of seventy, the caches of other rows lead to the same words
        case = lab.greedy_case()
        together = beam_search(FakeTranslator(case.rule), case.src, 12, beam_size=3)
        for row, src in enumerate(case.src.unsqueeze(1)):
            alone = lab.real(beam_search(FakeTranslator(case.rule), src, 12, beam_size=3)[0])
            among = lab.real(together[row])
            expect(
                alone == among,
                mistake="in a batch a sentence is translated differently than alone",
                expected=f"{len(alone)} tokens as alone, for sentence {row}",
                seen=f"{len(among)} tokens, or other ones",
                hint="do row numbers of the cache count b * beam_size + prefix?",
            )


@exercise_04_5.check("a beam that holds everything finds the best of all")
def beam_exhaustive(beam_search) -> None:
    for penalty in (0.0, 0.6, 1.5):
        case, what = lab.best_case(penalty), f"the translations at length_penalty {penalty}"
        mistakes = {"the padding of the source is not masked": case.unmasked}
        hint = "is the cache reordered, are sums kept apart for each sentence, does eos count?"
        search = partial(beam_search, beam_size=300, length_penalty=penalty)
        expect_translations(search, case, 4, mistakes, what, hint)


@exercise_04_5.check("a beam of 1 is greedy")
def beam_of_one(beam_search) -> None:
    search = partial(beam_search, beam_size=1)
    what = "the translations at beam_size 1 (greedy ones expected)"
    expect_by_table(search, lab.GARDEN_PATH, 5, [4, EOS], {}, what)  # a beam of 2 finds [5, EOS]
    expect_translations(search, lab.greedy_case(), 12, {}, what)


@exercise_04_5.check("the cut at max_len, and other special tokens")
def beam_edges(beam_search) -> None:
    search = partial(beam_search, beam_size=2)
    expect_by_table(search, lab.ENDLESS, 6, [4] * 6, {}, "the translation, cut at max_len")
    expect_none(search)
    expect_other_ids(search)


@exercise_04_5.check("cost: one call of step for each position")
def beam_cost(beam_search) -> None:
    case, decided = lab.greedy_case(), lab.table_case(lab.TWO_LENGTHS, [4, EOS])
    for size in (3, 1):
        model = FakeTranslator(case.rule)
        beam_search(model, case.src, 12, beam_size=size)
        expect_cost(model, rows=4 * size, who="sentences or prefixes")
    long = FakeTranslator(decided.rule)
    beam_search(long, decided.src, 200, beam_size=2, length_penalty=0.0)
    expect(
        len(long.steps) < 100,
        mistake="the search goes on to max_len although it is decided",
        expected="an end when nothing can win any more",
        seen=f"{len(long.steps)} steps of 200 for translations of 2 and 6 tokens",
    )


@exercise_04_5.check("the settings by default")
def beam_defaults(beam_search) -> None:
    mistakes = {
        "beam_size is below 5 by default": torch.tensor([[3, 3, EOS]]),
        "beam_size is above 5 by default": torch.tensor([[8, EOS]]),
    }
    case, what = lab.five_prefixes_case(), "the translation at the beam_size by default"
    expect_translations(beam_search, case, 4, mistakes, what)
    what = "the translation at the length_penalty by default"
    short, long = [4, EOS], [5] * 5 + [EOS]
    for table, want, other, side in (
        (lab.TWO_LENGTHS, long, short, "below"),
        (lab.BREAK_EVEN_LATER, short, long, "above"),
    ):
        mistakes = {f"length_penalty is {side} 0.6 by default": [other]}
        expect_by_table(partial(beam_search, beam_size=3), table, 9, want, mistakes, what)


@exercise_04_5.check("impossible settings")
def beam_refuses(beam_search) -> None:
    args = (FakeTranslator(lab.table_case({}, [EOS]).rule), torch.tensor([[9]]), 5)
    expect_raises(ValueError, beam_search, *args, 0, what="beam_size 0", mentions=[0])
    what = "length_penalty -0.5"
    expect_raises(ValueError, beam_search, *args, 2, -0.5, what=what, mentions=[-0.5])
