"""What tells a right answer of lesson 07 from a wrong one.

The samplers are held against torch.utils.data.DistributedSampler; a resumed epoch against the
epoch of one rank that was never interrupted; the metric against the mean that one process takes.
Where the answers are observed: lessons/lesson07_distributed_sampler/laboratory.py.
"""

import math
import random
from functools import partial
from typing import Any

from lessons.lesson07_distributed_sampler import laboratory as lab
from lessons.lesson07_distributed_sampler.laboratory import (
    Evaluation,
    Samples,
    TorchSampler,
    common_state,
    evaluated,
    expect_from,
    on_all,
    parts,
    resumed,
    take,
    whole_epoch,
)  # fmt: skip
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    alike,
    expect,
    expect_equal,
    expect_raises,
    recognise,
    without_group,
)
from shared.exercises.on_ranks import on_one_rank
from shared.exercises.seeds import fresh_seed
from shared.exercises.wrong import Wrong
from shared.ranks.failures import Failure

exercise_07_1 = checks_for(
    "07.1",
    name="DistributedSampler",
    difficulty=2,
    minutes=25,
    hint=(
        "In __iter__: one order of all samples, the same on every rank; make its length divisible "
        "by num_replicas; then every num_replicas-th entry, from entry `rank` on."
    ),
    forbidden=("torch.utils.data.DistributedSampler", "torch.utils.data.distributed."),
)
exercise_07_2 = checks_for(
    "07.2",
    name="exact_evaluation",
    difficulty=2,
    minutes=20,
    hint=(
        "range(rank, len(dataset), world_size) is a share without padding. Add up sums and "
        "divisors; divide once, at the very end."
    ),
)
exercise_07_3 = checks_for(
    "07.3",
    name="ResumableSampler",
    difficulty=4,
    minutes=45,
    hint=(
        "The position is one number: how far all ranks together have come in the common order. "
        "What is left is order[position:]; share that out as in 07.1."
    ),
    forbidden=("torch.utils.data.DistributedSampler", "torch.utils.data.distributed."),
)

DRAWS = "iterating draws from the global random state: what draws from it later gets other numbers"
SEED_HINT = "torch.randperm(L, generator=torch.Generator().manual_seed(seed + epoch))"


# 07.1 DistributedSampler


def expect_own_hand(candidate: Any) -> None:
    """torch's sampler is neither the base nor inside."""
    recognise(
        {"torch's own sampler does the work": lab.is_torchs_own(candidate)},
        expected="the order, its padding and this rank's part of it, by your own hand",
        seen="torch.utils.data.DistributedSampler is set up",
    )


@exercise_07_1.check("12 samples in order, 3 ranks")
def sampler_split(candidate: Any) -> None:
    got = without_group(
        lambda: parts(candidate, 12, 3, shuffle=False),
        mistake="the process group is asked although num_replicas=3 and rank=0 were given",
        expected="no process group needed",
        hint="0 is a rank, and it is false: ask `rank is None`, not `rank or ...`",
    )
    whole, blocks = [list(range(12))] * 3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    looks_like = {
        "every rank has the whole dataset: each sample is trained on 3 times in an epoch": whole,
        "contiguous blocks, one after the other": blocks,
    }
    want = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    hint = "rank r takes entries r, r + num_replicas, r + 2 * num_replicas, ..."
    expect_equal(got, want, what="the ranks' indices", looks_like=looks_like, hint=hint)
    kind = type(got[0][0]).__name__
    expect(kind == "int", expected="indices of type int", seen=kind, hint="tensor.tolist()")
    expect_own_hand(candidate)


@exercise_07_1.check("one shuffle for all ranks")
def sampler_shuffle(candidate: Any) -> None:
    length, ranks, seed = 24, 4, fresh_seed() % 1000 + 1
    read, seeded, moved = lab.global_state_read_set_moved(candidate, length)
    got = parts(candidate, length, ranks, seed=seed)
    dealt = [index for part in got for index in part]
    kinds = sorted({type(index).__name__ for index in dealt})
    recognise(
        {"with shuffle the indices are no ints, without it they are": kinds != ["int"]},
        expected="ints in every order, as torch's sampler gives them",
        seen=", ".join(kinds),
        hint="torch.randperm(...).tolist()",
    )
    repeated = len(dealt) > len(set(dealt))
    own = [sorted(part) for part in got] == parts(TorchSampler, length, ranks, shuffle=False)
    recognise(
        {
            "the order comes from the global random state, which differs from rank to rank": read,
            "iterating sets the global random state: every epoch's dropout begins alike": seeded,
            DRAWS: moved,
            "nothing is shuffled": lab.interleaved(got) == list(range(length)),
            "the parts overlap: some samples go to two ranks, others to none": repeated,
            "each rank shuffles its own part: no sample ever changes rank": own,
            "the seed is not used": lambda: got == parts(candidate, length, ranks, seed=seed + 1),
        },
        expected="by default one shuffled order of the whole, the same on every rank, shared out",
        seen=f"{len(set(dealt))} different samples of {length}; rank 0 has {got[0]} of {seed=}",
        hint="a torch.Generator of the sampler's own, seeded with seed + epoch and nothing else",
    )
    want, what = parts(TorchSampler, length, ranks, seed=seed), "the indices, as torch deals them,"
    expect_equal(got, want, what=what, hint=SEED_HINT)


@exercise_07_1.check("another order in each epoch")
def sampler_epochs(candidate: Any) -> None:
    epochs = {epoch: parts(candidate, 40, 2, epoch) for epoch in (0, 1, 17)}
    sampler, other = (candidate(range(40), num_replicas=2, rank=1) for _ in range(2))
    first, begun = list(sampler), lab.iterator_of(sampler)
    head, again = next(begun), list(sampler)  # a second iteration within the first
    under_way = [head, *begun]
    for epoch in (17, 1):
        sampler.set_epoch(epoch)
    recognise(
        {
            "every epoch has the same order": epochs[0] == epochs[1],
            "the order changes without set_epoch: a rank that iterates once more than the others "
            "would leave the common order": first != again,
            "a second iteration takes over the one that is under way: each has its own": (
                under_way != first
            ),
            "set_epoch of one sampler sets the epoch of another": lambda: list(other) != first,
            "set_epoch changes nothing once the sampler was iterated over: it keeps the order that "
            "it drew first": lambda: list(sampler) == first != epochs[1][1],
            "epochs add up: set_epoch(1) after set_epoch(17) is not epoch 1": (
                lambda: list(sampler) != epochs[1][1]
            ),
        },
        expected="an order that changes with set_epoch, and only with it",
        seen=f"epoch 0: {first[:3]}, ..., once more: {again[:3]}, ..., epoch 1: {epochs[1][1][:3]}",
        hint="seed the generator with seed + epoch",
    )
    for epoch in (1, 17):
        want = parts(TorchSampler, 40, 2, epoch)
        words = f"epoch 0 is torch's and epoch {epoch} is not: its generator is not seeded with "
        words += "seed + epoch"
        what = f"the indices of epoch {epoch}"
        expect_equal(epochs[epoch], want, what=what, mistake=words, hint=SEED_HINT)


@exercise_07_1.check("10 samples for 4 ranks")
def sampler_padding(candidate: Any) -> None:
    padded = [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    looks_like = {
        "the ranks get different numbers of samples: one with a step more waits in its all-reduce "
        "for the others, who are done": [*padded[:2], [2, 6], [3, 7]],
        "the tail is left out although drop_last is False": [part[:2] for part in padded],
        "each rank pads its own part with one of its own": [*padded[:2], [2, 6, 2], [3, 7, 3]],
    }
    hint = "the order continues from its own beginning until it is divisible"
    got = parts(candidate, 10, 4, shuffle=False)
    expect_equal(got, padded, what="the ranks' indices", looks_like=looks_like, hint=hint)
    got = parts(candidate, 10, 4, shuffle=False, drop_last=True)
    cut = [part[:2] for part in padded]
    looks_like = {
        "drop_last is not used": padded,
        "with drop_last the tail is shared out all the same: the first ranks get one sample more": [
            *padded[:2],
            *cut[2:],
        ],
    }
    expect_equal(got, cut, what="the ranks' indices with drop_last", looks_like=looks_like)
    seed = fresh_seed() % 1000
    got, want = (parts(each, 10, 4, seed=seed) for each in (candidate, TorchSampler))
    padding = [part[:2] for part in got] == [part[:2] for part in want]
    words = "the padding is not the beginning of the shuffled order" if padding else ""
    what = "the indices of a shuffled epoch, its own first samples once more at the end,"
    expect_equal(got, want, what=what, mistake=words)


@exercise_07_1.check("fewer samples than ranks")
def sampler_tiny(candidate: Any) -> None:
    got, want = (parts(each, 3, 8, shuffle=False) for each in (candidate, TorchSampler))
    words = "" if all(got) else "some ranks have no sample: the padding needs more than one round"
    what, hint = "the indices of 3 samples on 8 ranks", "repeat the order as often as it takes"
    expect_equal(got, want, what=what, mistake=words, hint=hint)


@exercise_07_1.check("its length")
def sampler_length(candidate: Any) -> None:
    whole = {"len() is the whole dataset's: schedules would plan 4 times the steps": 10}
    for drop_last, want in ((False, 3), (True, 2)):
        got = len(candidate(range(10), num_replicas=4, rank=3, drop_last=drop_last))
        what = f"len(), this rank's share of 10 samples on 4 ranks with {drop_last=},"
        expect_equal(got, want, what=what, looks_like=whole)


# (samples, ranks, drop_last), with what torch deals there: no draw decides whether they are asked.
EDGES = (
    ("an empty dataset", 0, 3, False),
    ("an empty dataset with drop_last", 0, 3, True),
    ("fewer samples than ranks with drop_last", 3, 5, True),
    ("one sample for one rank", 1, 1, False),
    ("as many samples as ranks", 4, 4, True),
)


@exercise_07_1.check("at the edges, index for index with torch")
def sampler_edges(candidate: Any) -> None:
    for title, length, ranks, drop_last in EDGES:
        dealt = partial(parts, candidate, length, ranks, drop_last=drop_last)
        got = accepted(dealt, what=f"{title} ({length} samples, {ranks} ranks)")
        want = parts(TorchSampler, length, ranks, drop_last=drop_last)
        words = f"{title} is not dealt as torch deals it"
        expect_equal(got, want, what=f"{length} samples on {ranks} ranks", mistake=words)
        lengths = [len(candidate(range(length), ranks, 0, drop_last=drop_last))]
        what = f"len() for {length} samples on {ranks} ranks with {drop_last=}"
        expect_equal(lengths, [len(want[0])], what=what, mistake=f"{title}: len() is not its own")


@exercise_07_1.check("60 random settings, index for index with torch")
def sampler_equals_torch(candidate: Any) -> None:
    draw = random.Random(fresh_seed())
    for _ in range(60):
        length, ranks, epoch = draw.randint(0, 90), draw.randint(1, 9), draw.randint(0, 99)
        options: dict[str, Any] = {"shuffle": draw.random() < 0.7, "seed": draw.randint(0, 9999)}
        options["drop_last"] = draw.random() < 0.5
        got = parts(candidate, length, ranks, epoch, **options)
        want = parts(TorchSampler, length, ranks, epoch, **options)
        expect_equal(got, want, what=f"{length} samples, {ranks} ranks, {epoch=}, {options}:")


@exercise_07_1.check("the place in the group")
def sampler_place(candidate: Any) -> None:
    got = on_all(lambda rank: list(candidate(range(6), shuffle=False)), 2)
    hint = "dist.get_world_size() and dist.get_rank() where None was given, and there alone"
    expect_equal(got, [[0, 2, 4], [1, 3, 5]], what="each rank's indices, asked of it", hint=hint)
    got = on_all(lambda rank: list(candidate(range(6), 3, 0, shuffle=False)), 2)
    what, words = "both ranks' indices, with num_replicas=3, rank=0", "the group is asked although "
    words += "num_replicas and rank were given"
    expect_equal(got, [[0, 3], [0, 3]], what=what, mistake=words, hint=hint)
    for rank in (4, -1):
        what = f"rank {rank} of 4"
        expect_raises(ValueError, candidate, range(9), 4, rank, what=what, mentions=[rank])


# 07.2 exact_evaluation


def expect_mean(runs: list[Evaluation], want: float, looks_like: dict[str, float]) -> None:
    """Every rank must have the exact mean; a recognised wrong value is named."""
    results = [run.result for run in runs]
    floats = all(isinstance(result, float) for result in results)
    mean = results[0] if floats else math.nan
    apart = floats and max(results) - min(results) > 1e-9
    recognise(
        {
            "no sample is scored: a share that is smaller than batch_size is a batch as well, and "
            "range(0, len(mine), batch_size) counts it in": not any(run.batches for run in runs),
            "nothing is returned": all(result is None for result in results),
            "only rank 0 has the result": results[0] is not None and None in results[1:],
            "dist.reduce gives the sums to one rank alone: all of them return the mean, and need "
            "both sums": apart and any(op == "reduce" for run in runs for op, _ in run.sent),
            "the result is no float: tensor.item()": not floats,
            "a rank without samples makes the result NaN": math.isnan(mean),
            "each rank has a figure of its own": apart,
            **alike(mean, looks_like, math.isclose),
        },
        expected=f"{want:.6g} from every rank",
        seen=f"{mean:.6g}" if floats and not apart else f"{results}",
        hint="dist.all_reduce of sums and divisors, and one division at the end",
    )
    expect(math.isclose(mean, want, rel_tol=1e-6), expected=f"{want:.9g}", seen=f"{mean:.9g}")


def expect_each_once(runs: list[Evaluation], length: int) -> None:
    """Each sample is scored once in the world, and the shares are even."""
    counts = [len(run.share) for run in runs]
    scored = sorted(index for run in runs for index in run.share)
    whole = len(runs) > 1 and counts == [length] * len(runs)
    uneven = len(scored) == length and max(counts) - min(counts) > 1
    recognise(
        {
            "every rank scores the whole dataset: the right figure for the price of all": whole,
            "the shares are uneven: all wait for the rank with most": uneven,
            "`score` is called without samples": any([] in run.batches for run in runs),
        },
        expected=f"{length} samples scored by {len(runs)} ranks together, one more or less on each",
        seen=f"batches of {[[len(batch) for batch in run.batches] for run in runs]}",
    )
    expect_equal(scored, list(range(length)), what="the samples that were scored")


@exercise_07_2.check("9 samples, 4 ranks, the first one right")
def evaluation_small(candidate: Any) -> None:
    runs = evaluated(candidate, Samples([1.0] + [0.0] * 8), ranks=4, batch_size=8)
    looks_like = {
        "padding is counted: the first sample is scored twice": 2 / 12,
        "this is the mean of the ranks' means, or of their batches', one a rank here: rank 0 has 3 "
        "samples, the others 2": 1 / 12,
        "the tail is left out: 8 of 9 samples": 1 / 8,
        "this is the sum, not the mean": 1.0,
    }
    expect_mean(runs, 1 / 9, looks_like)
    expect_each_once(runs, 9)


@exercise_07_2.check("cost: one collective of two numbers")
def evaluation_cost(candidate: Any) -> None:
    runs = evaluated(candidate, Samples([float(i) for i in range(24)]), ranks=2, batch_size=4)
    sent, sizes = runs[0].sent, [len(batch) for batch in runs[0].batches]
    recognise(
        {
            "the ranks talk after every batch: one with a batch more would wait for the others "
            "and never return": len(sent) >= 3,
            "two collectives where one will do": len(sent) == 2,
            "batch_size is not used": max(sizes, default=0) != 4,
        },
        expected="batches of 4, then one all-reduce: sum and divisor side by side in one tensor",
        seen=f"batches of {sizes} and the collectives {', '.join(op for op, _ in sent)}",
    )
    what, hint = "what a rank sends (operation, bytes)", "the sum and its divisor, both in float64"
    in_32_bits = "the two sums travel in float32: seven digits of each are left"
    looks_like = {in_32_bits: [("all_reduce", 8)]}
    expect_equal(sent, [("all_reduce", 16)], what=what, looks_like=looks_like, hint=hint)


@exercise_07_2.check("batches of different sizes")
def evaluation_batches(candidate: Any) -> None:
    values = [float(i * i) for i in range(11)]
    runs = evaluated(candidate, Samples(values), ranks=2, batch_size=4)
    first, second = values[0::2], values[1::2]  # 6 and 5, so the last batches have 2 and 1
    full, last = [first[:4], second[:4]], [first[4:], second[4:]]
    means = [sum(batch) / len(batch) for batch in full + last]
    by_rank = (6 * (means[0] + means[2]) / 2 + 5 * (means[1] + means[3]) / 2) / 11
    short = "a short last batch weighs as much as a full one"
    looks_like = {
        f"this is the mean of the batches' means: {short}": sum(means) / 4,
        f"this is the mean of the batches' means, rank by rank: {short}": by_rank,
        "each batch takes the place of the one before: add to the totals": sum(map(sum, last)) / 3,
        "the last, shorter batch of each rank is left out": sum(map(sum, full)) / 8,
    }
    expect_mean(runs, sum(values) / 11, looks_like)
    expect_each_once(runs, 11)


@exercise_07_2.check("samples of different weight")
def evaluation_weights(candidate: Any) -> None:
    draw = random.Random(fresh_seed())
    weights = [float(draw.randint(1, 9)) for _ in range(13)]
    values = [draw.random() * weight for weight in weights]
    runs = evaluated(candidate, Samples(values, weights), ranks=3, batch_size=2)
    words = "divided by the number of samples, not by what `score` says"
    batches = [batch for run in runs for batch in run.batches]
    means = [sum(values[i] for i in each) / sum(weights[i] for i in each) for each in batches]
    by_number = sum(mean * len(each) for mean, each in zip(means, batches, strict=True)) / 13
    quotients = (
        "each batch's quotient is weighted by its number of samples: add up what `score` says"
    )
    looks_like = {words: sum(values) / 13, quotients: by_number}
    expect_mean(runs, sum(values) / sum(weights), looks_like)


@exercise_07_2.check("fewer samples than ranks")
def evaluation_tiny(candidate: Any) -> None:
    runs = evaluated(candidate, Samples([3.0, 5.0]), ranks=4, batch_size=8)
    expect_mean(runs, 4.0, {"ranks without samples count as zeros": 2.0})
    expect_each_once(runs, 2)


@exercise_07_2.check("large counts")
def evaluation_precision(candidate: Any) -> None:
    runs = evaluated(candidate, Samples([2.0**24 + 1, *5 * [1.0]]), ranks=2, batch_size=1)
    want = (2**24 + 6) / 6
    expect_mean(runs, want, {})
    words = "added in float32, in which 16,777,216 + 1 is 16,777,216; torch.float64 has room for it"
    passing = "what `score` returns for a batch becomes a float32 tensor before it is added: "
    passing += "torch.tensor of a float has that dtype unless another is given"
    looks_like = {passing: (2**24 + 5) / 6}
    expect_equal(runs[0].result, want, what="the mean", mistake=words, looks_like=looks_like)


@exercise_07_2.check("no samples at all")
def evaluation_empty(candidate: Any) -> None:
    act = partial(candidate, lambda samples: (0.0, 0.0), Samples([]))
    hint = "0 / 0 is NaN, or an error that does not say why: name the number of samples, 0"
    expect_raises(ValueError, on_one_rank, act, what="an empty dataset", mentions=[0], hint=hint)
    alone = "an empty dataset is refused by one rank alone, and the others wait for it"
    known = {Failure.PEER_LOST: (alone, "every rank sees the same length, and raises")}
    refused = on_all(partial(lab.refuses_nothing, candidate), 2, apart=alone, known=known)
    expect(all(refused), mistake=alone, expected="a ValueError on every rank", seen=f"{refused}")


@exercise_07_2.check("the device")
def evaluation_device(candidate: Any) -> None:
    expect(
        lab.uses_device(candidate),
        mistake="device is not used: NCCL reduces no tensor that is on the CPU",
        expected="a tensor of the two sums on `device`",
        seen="no function of torch is handed it",
    )


# 07.3 ResumableSampler


@exercise_07_3.check("an epoch that nothing interrupts")
def resumable_plain(candidate: Any) -> None:
    seed = fresh_seed() % 1000
    expect_own_hand(candidate)
    for length, ranks, options in ((23, 3, {}), (23, 3, {"drop_last": True}), (8, 2, {})):
        for epoch in (0, 4):
            samplers = lab.group(candidate, length, ranks, None, epoch, seed=seed, **options)
            got = [list(lab.iterator_of(each)) for each in samplers]
            want = parts(TorchSampler, length, ranks, epoch, seed=seed, **options)
            expect_equal(got, want, what=f"the indices of epoch {epoch}, {length} samples")
    got, want = (parts(each, 9, 2) for each in (candidate, TorchSampler))
    expect_equal(got, want, what="the indices of a dataset, range(9), instead of its length")
    got = on_all(lambda rank: list(candidate(6, shuffle=False)), 2)
    expect_equal(got, [[0, 2, 4], [1, 3, 5]], what="each rank's indices, asked of it")
    (alone,) = lab.group(candidate, 12, 1)
    take([alone], 5)
    words = "an iteration that was broken off is continued by the next one, and no state was loaded"
    order, what = whole_epoch(12), "the indices after an iteration that ended early"
    expect_equal(take([alone]), order, what=what, looks_like={words: order[5:]})
    moved = lab.global_state_read_set_moved(candidate, 9)[2]
    recognise({DRAWS: moved}, expected="a generator of its own", seen="other numbers afterwards")


@exercise_07_3.check("resumed on as many ranks")
def resumable_same_ranks(candidate: Any) -> None:
    seed = fresh_seed() % 1000
    order, first = (whole_epoch(24, epoch, seed=seed) for epoch in (2, 0))
    samplers = lab.group(candidate, 24, 2, None, 2, seed=seed)
    expect_equal(take(samplers, 5), order[:10], what="the first 5 steps of 2 ranks")
    state, fresh = common_state(samplers), lab.group(candidate, 24, 2, seed=seed)
    before, again = dict(state), lab.group(candidate, 24, 2, state, seed=seed)
    loaded, rest = {**common_state(again)}, take(again)
    looks_like = {
        "the epoch begins again: 10 samples come twice": order,
        "each rank skips as many samples as all of them had: 10 are left out": order[20:],
        "the last step comes again: count an index before it is yielded; what stands after the "
        "`yield` runs when the next one is asked for": order[8:],
        "the position counts one rank's samples: 5 steps of 2 ranks are 10": [*order[5:], order[0]],
        "the position counts the samples of one rank, and the last step comes again": order[4:],
        "the state does not hold the epoch, or loading does not take it": first[10:],
        "the state holds neither epoch nor position": first,
    }
    if rest != order[10:] and sorted(rest) == sorted(order[10:]):
        looks_like["what is left comes in another order"] = rest
    expect_from(10, order, rest, looks_like)
    written, _ = state != before, take(samplers)
    recognise(
        {
            "right after load_state_dict, state_dict says another place: a run that is stopped "
            "again at once has lost its own": loaded != before,
            "the dict that was loaded is written into: it is the caller's": written,
            "the dict that state_dict returned goes on changing: it is to be of its moment": (
                state != before
            ),
            "what one sampler loads changes another one": take(fresh, 2) != first[:4],
        },
        expected=f"{before}, now and later, and of one sampler alone",
        seen=f"{loaded} after loading, {state} after more steps",
    )
    twice = lab.group(candidate, 24, 2, before, seed=seed)
    take(twice, 2)
    words = "stopped a second time in the epoch, a run goes back: the position is counted from the "
    words += "resume, not from the epoch's beginning"
    rest = take(lab.group(candidate, 24, 2, common_state(twice), seed=seed))
    expect_from(14, order, rest, {words: order[4:]})


@exercise_07_3.check("resumed on another number of ranks")
def resumable_other_ranks(candidate: Any) -> None:
    seed = fresh_seed() % 1000
    order = whole_epoch(24, seed=seed)
    for before, after, steps in ((4, 2, 3), (2, 3, 6), (1, 4, 8)):
        had, want = order[: steps * before], order[steps * before :]
        what = f"a state of {before} ranks, loaded on {after},"
        act, numbers = partial(resumed, candidate, 24), (before, after)
        rest = take(accepted(act, numbers, steps, what=what, seed=seed))
        twice, missing = len({*had} & {*rest}), len({*want} - {*rest})
        one_rank = len(rest) in (24 - steps, 24 - steps * after)
        words = "the position counts one rank's samples; with other ranks that is another place"
        expect(
            rest == want,
            mistake=words if one_rank else "",
            expected=f"the {len(want)} samples that are left, once",
            seen=f"{twice} come twice and {missing} not at all, from {before} to {after} ranks",
            hint="count all ranks' samples, steps * num_replicas; share out order[consumed:] anew",
        )


@exercise_07_3.check("set_epoch after a resume, and the epoch after that")
def resumable_epochs(candidate: Any) -> None:
    order = [whole_epoch(12, epoch) for epoch in range(5)]
    samplers = lab.group(candidate, 12, 2, None, 3)
    take(samplers, 4)
    state = common_state(samplers)
    again = lab.group(candidate, 12, 2, state, 3)
    thrown = {"set_epoch with the epoch that is under way throws the position away": order[3]}
    expect_from(8, order[3], take(again), thrown)
    for sampler in again:
        sampler.set_epoch(4)
    words = "the epoch after the resumed one is cut short as well: the position is for one epoch"
    expect_from(0, order[4], take(again), {words: order[4][8:]})
    more = lab.group(candidate, 12, 2, state)
    take(more)
    short = "the iteration after the resumed one is short as well unless set_epoch is called"
    stays = "len() stays that of the resumed iteration once it is over: a whole epoch comes next"
    what = "len() for the iteration after the resumed one"
    expect_equal(len(more[0]), 6, what=what, looks_like={stays: 2})
    what = "the first 2 steps of the iteration after the resumed one"
    expect_equal(take(more, 2), order[3][:4], what=what, looks_like={short: order[3][8:]})
    from_there = lab.group(candidate, 12, 2, common_state(more))
    expect_equal(take(from_there), order[3][4:], what="what is left after 2 more steps")
    in_use = lab.group(candidate, 12, 2, None, 4)
    take(in_use, 2)
    for sampler in in_use:
        sampler.load_state_dict(state)
    own = "load_state_dict leaves a sampler that is in use "
    looks_like = {
        f"{own}in its own epoch": order[4][8:],
        f"{own}at its own position": order[3][4:],
        f"{own}where it is": order[4][4:],
    }
    expect_from(8, order[3], take(in_use), looks_like)
    abandoned = lab.group(candidate, 12, 2, state, 4)
    kept = {"set_epoch with another epoch keeps the position in the old one": order[4][8:]}
    what = "epoch 4, set at once after the resume,"
    expect_equal(take(abandoned), order[4], what=what, looks_like=kept)


@exercise_07_3.check("a state taken at the end of an epoch")
def resumable_end(candidate: Any) -> None:
    samplers = resumed(candidate, 10, (4, 4), None)
    words, order = "an epoch that was finished is begun again", whole_epoch(10)
    last = (
        "the last, padded step of a finished epoch comes again: what is left is order[consumed:], "
    )
    last += "shared out anew, and of 10 samples 10 are consumed"
    what, looks_like = "what is left of a finished epoch", {last: [*order[8:], *order[:2]]}
    expect_equal(take(samplers), [], what=what, mistake=words, looks_like=looks_like)
    samplers = resumed(candidate, 11, (4, 1), None, drop_last=True)
    words = "with drop_last the tail of a finished epoch comes after all"
    expect_equal(take(samplers), [], what="what drop_last leaves of an epoch", mistake=words)
    samplers = resumed(candidate, 10, (4, 4), None)
    for sampler in samplers:
        sampler.set_epoch(0)
    words = (
        "set_epoch with the epoch that is over begins it anew: every loop calls it after a resume"
    )
    expect_equal(take(samplers), [], what="what is left after set_epoch(0)", mistake=words)
    for sampler in samplers:
        sampler.set_epoch(1)
    words = "set_epoch leaves what was handed out before: a state says that the new epoch is over"
    fresh, want = lab.group(candidate, 10, 4, common_state(samplers)), parts(TorchSampler, 10, 4, 1)
    what = "epoch 1, resumed from a state that was taken as it began,"
    expect_equal(take(fresh), lab.interleaved(want), what=what, looks_like={words: []})
    expect_equal(take(samplers), lab.interleaved(want), what="epoch 1")


@exercise_07_3.check("padding and drop_last after a resume")
def resumable_padding(candidate: Any) -> None:
    order = whole_epoch(11)
    rest = take(resumed(candidate, 11, (4, 4), 1))
    what = "the rest of 11 samples on 4 ranks, padded as without the interruption,"
    words = "the padding repeats the first of what is left, not of the epoch"
    looks_like = {words: [*order[4:], order[4]]}
    expect_equal(rest, [*order[4:], order[0]], what=what, looks_like=looks_like)
    rest = take(resumed(candidate, 11, (4, 3), 1, drop_last=True))
    words = "drop_last cuts the epoch for these ranks before what was consumed is taken off"
    padded = "drop_last is forgotten after a resume: what is left is padded"
    looks_like = {words: order[4:7], padded: [*order[4:], *order[:2]]}
    what = "the rest on 3 ranks with drop_last"
    expect_equal(rest, order[4:10], what=what, looks_like=looks_like)


@exercise_07_3.check("its length")
def resumable_length(candidate: Any) -> None:
    expect_equal(len(lab.group(candidate, 20, 2)[0]), 10, what="len() at the beginning")
    (left,) = resumed(candidate, 20, (2, 1), 6)
    whole, what = {"len() is that of a whole epoch": 20}, "len() on one rank, with 8 of 20 left,"
    expect_equal(len(left), 8, what=what, looks_like=whole)


@exercise_07_3.check("indices drawn ahead of training")
def resumable_ahead(candidate: Any) -> None:
    order = whole_epoch(20)
    samplers = lab.group(candidate, 20, 2)
    take(samplers, 8)  # a loader with workers has drawn 16 samples; training has had 4, or none
    unused = "the argument `consumed` is not used: 12 samples that lay in the queue are skipped"
    passed = "consumed=0 passes for no argument: 0 is false, so ask `consumed is None`"
    for consumed, words in ((4, unused), (0, passed)):
        rest = take(lab.group(candidate, 20, 2, samplers[0].state_dict(consumed=consumed)))
        expect_from(consumed, order, rest, {words: order[16:]})
    before, _ = dict(samplers[1].state_dict()), samplers[1].state_dict(consumed=4)
    words = "state_dict(consumed=4) moves the sampler's own position: asking changes nothing"
    expect_equal(samplers[1].state_dict(), before, what="the state after it", mistake=words)
    try:
        padded = lab.group(candidate, 11, 4)[0].state_dict(consumed=12)
    except ValueError as error:
        words = (
            "a whole epoch is refused where its padding is counted: 12 for 11 samples on 4 ranks"
        )
        raise Wrong(words, "consumed=12 to be taken", f"ValueError: {error}") from None
    what = "what is left after consumed=12, an epoch of 11 with its padding,"
    finished = lab.group(candidate, 11, 1, padded)
    try:
        left = len(finished[0])
    except ValueError:  # of a length below 0
        left = -1
    words = "the padding counts: the position lies beyond the last sample"
    expect_equal(left, 0, what=f"len() of {what}", mistake=words * (left < 0))
    expect_equal(take(finished), [], what=what)
    for consumed in (-1, 21):
        what = f"consumed={consumed} of 20 samples"
        expect_raises(ValueError, samplers[0].state_dict, consumed, what=what, mentions=[consumed])


@exercise_07_3.check("a state of another dataset, seed or order")
def resumable_foreign(candidate: Any) -> None:
    samplers = lab.group(candidate, 20, 2, None, 3, seed=5)
    take(samplers, 2)
    state = common_state(samplers)
    hint = "the order would be another one: samples come twice, and others never"
    for what, length, options, mentions in (
        ("a state of 20 samples, for 21", 21, {"seed": 5}, [20, 21]),
        ("a state of seed 5, for seed 6", 20, {"seed": 6}, [5, 6]),
        ("a state of a shuffled order, without shuffle", 20, {"seed": 5, "shuffle": False}, []),
    ):
        (sampler,), (other,) = (lab.group(candidate, length, 1, **options) for _ in range(2))
        load = sampler.load_state_dict
        expect_raises(ValueError, load, state, what=what, mentions=mentions, hint=hint)
        words = "a state that is refused is half loaded: compare everything first"
        what = "the indices after a state was refused"
        expect_equal(list(sampler), list(other), what=what, mistake=words)
    state = lab.group(candidate, 20, 1, seed=5, shuffle=False)[0].state_dict()
    load = lab.group(candidate, 20, 1, seed=5)[0].load_state_dict
    what = "a state without shuffle, for a shuffled order"
    expect_raises(ValueError, load, state, what=what, hint=hint)
    load = lab.group(candidate, 20, 1, seed=6, shuffle=False)[0].load_state_dict
    what = "a state of seed 5, for seed 6, both without shuffle"
    hint = "compare the seed without shuffle, too"
    expect_raises(ValueError, load, state, what=what, mentions=[5, 6], hint=hint)
