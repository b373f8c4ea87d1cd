"""What tells a right answer of lesson 07 from a wrong one.

The samplers are held against torch.utils.data.DistributedSampler; a resumed epoch against the
epoch of one rank that was never interrupted; the metric against the mean that one process takes.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_equal, expect_raises, without_group, wrong
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import count_traffic
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks

exercise_07_1 = checks_for(
    "07.1",
    name="DistributedSampler",
    difficulty=2,
    minutes=25,
    hints=[
        "In __iter__: one order of all samples, the same on every rank; make its length divisible "
        "by num_replicas; then every num_replicas-th entry, from entry `rank` on.",
        "The order: torch.randperm(L, generator=torch.Generator().manual_seed(seed + epoch)). "
        "The padding: the order itself, from its beginning, as often as it takes.",
    ],
)
exercise_07_2 = checks_for(
    "07.2",
    name="exact_evaluation",
    difficulty=2,
    minutes=20,
    hints=[
        "range(rank, len(dataset), world_size) is a share without padding. Add up sums and "
        "divisors; divide once, at the very end.",
        "totals = torch.zeros(2, dtype=torch.float64, device=device), one dist.all_reduce(totals).",
    ],
)
exercise_07_3 = checks_for(
    "07.3",
    name="ResumableSampler",
    difficulty=4,
    minutes=45,
    hints=[
        "The position is one number: how far all ranks together have come in the common order. "
        "What is left is order[position:]; share that out as in 07.1.",
        "Keep two numbers apart: where the next iteration begins (set by load_state_dict, back to "
        "0 at the end of an epoch) and how far this one has come (what state_dict says).",
    ],
)

TorchSampler = torch.utils.data.DistributedSampler
SPLIT_HINT = "rank r takes entries r, r + num_replicas, r + 2 * num_replicas, ..."


def parts(
    sampler: Callable[..., Any], length: int, ranks: int, epoch: int = 0, **options: Any
) -> list[list[int]]:
    """Each rank's indices in one epoch."""
    made = [sampler(range(length), num_replicas=ranks, rank=r, **options) for r in range(ranks)]
    for each in made:
        each.set_epoch(epoch)
    return [list(iterator_of(each)) for each in made]


def iterator_of(sampler: Any) -> Iterator[int]:
    """iter(sampler), with better words than python's where `__iter__` returns something else."""
    try:
        return iter(sampler)
    except TypeError as error:
        kind = str(error).rpartition("of type ")[2].strip("'")
        if kind in ("NoneType", "list", "Tensor", "range", "tuple", "ndarray"):
            wrong(
                "__iter__ returns nothing: is the `return` missing?"
                if kind == "NoneType"
                else f"__iter__ returns a {kind}, which can be iterated over but is no iterator",
                expected="an iterator over this rank's indices",
                seen="None" if kind == "NoneType" else f"a {kind}",
                hint="return iter(indices), or yield them",
            )
        raise


def interleaved(rank_parts: list[list[int]]) -> list[int]:
    """The ranks' samples in the order of the steps: what the group has had by when."""
    rounds = itertools.zip_longest(*rank_parts)
    return [index for each in rounds for index in each if index is not None]


def whole_epoch(length: int, epoch: int = 0, **options: Any) -> list[int]:
    """The common order of an epoch: torch's own, for one rank."""
    return parts(TorchSampler, length, 1, epoch, **options)[0]


# 07.1 DistributedSampler


@exercise_07_1.check("12 samples in order, 3 ranks")
def sampler_split(candidate: Any) -> None:
    got = without_group(
        lambda: parts(candidate, 12, 3, shuffle=False),
        mistake="the process group is asked although num_replicas=3 and rank=0 were given",
        expected="no process group needed",
        hint="0 is a rank, and it is false: ask `rank is None`, not `rank or ...`",
    )
    want = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    everything = list(range(12))
    if all(sorted(part) == everything for part in got):
        wrong(
            "every rank has the whole dataset: each sample is trained on 3 times in an epoch",
            expected="4 samples for each of 3 ranks",
            seen="12 for each",
            hint=SPLIT_HINT,
        )
    if got == [everything[r * 4 : (r + 1) * 4] for r in range(3)]:
        wrong(
            "contiguous blocks, one after the other",
            expected=f"rank 0 has {want[0]}: strided",
            seen=f"{got[0]}",
            hint=SPLIT_HINT,
        )
    expect_no_overlap(got, 12)
    expect_equal(got, want, what="the ranks' indices", hint=SPLIT_HINT)
    kind = type(got[0][0]).__name__
    expect(kind == "int", expected="indices of type int", seen=kind, hint="tensor.tolist()")


def expect_no_overlap(got: list[list[int]], length: int) -> None:
    """No sample may go to two ranks."""
    dealt = [index for part in got for index in part]
    twice = len(dealt) - len(set(dealt))
    if twice:
        wrong(
            "the parts overlap: some samples go to two ranks, others to none",
            expected=f"{length} different samples",
            seen=f"{len(set(dealt))} different ones, {twice} of them repeated",
            hint="all ranks must share out the same permutation: the same seed on every rank",
        )


@exercise_07_1.check("one shuffle for all ranks")
def sampler_shuffle(candidate: Any) -> None:
    length, ranks, seed = 24, 4, fresh_seed() % 1000 + 1
    expect_own_randomness(candidate, length)
    got = parts(candidate, length, ranks, seed=seed)
    if interleaved(got) == list(range(length)):
        wrong("nothing is shuffled", expected="shuffle=True by default", seen="0, 1, 2, ...")
    expect_no_overlap(got, length)
    if [sorted(part) for part in got] == [list(range(r, length, ranks)) for r in range(ranks)]:
        wrong(
            "each rank shuffles its own part: no sample ever changes rank",
            expected="shuffle the whole, then share it out",
            seen="rank 0 has samples 0, 4, 8, ... in every epoch",
        )
    if parts(candidate, length, ranks, seed=seed + 1) == got:
        wrong("the seed is not used", expected="another order for another seed", seen="the same")
    expect_equal(
        got,
        parts(TorchSampler, length, ranks, seed=seed),
        what="the indices, as torch deals them,",
        hint="torch.randperm(L, generator=torch.Generator().manual_seed(seed + epoch))",
    )


def expect_own_randomness(candidate: Any, length: int) -> None:
    """The order neither depends on the global random state nor changes it."""
    orders, states = [], []
    for state in (1, 2):
        seed_all(state)
        orders.append(parts(candidate, length, 1)[0])
        states.append((torch.rand(1).item(), random.random()))
    if orders[0] != orders[1]:
        wrong(
            "the order comes from the global random state, which differs from rank to rank",
            expected="the same order whatever torch.manual_seed was called with",
            seen="another order",
            hint="a torch.Generator of its own",
        )
    if any(first == second for first, second in zip(*states, strict=True)):
        wrong(
            "iterating sets the global random state: every epoch's dropout begins the same way",
            expected="torch.manual_seed and random.seed untouched",
            seen="the same random numbers after it, whatever the state before",
            hint="a torch.Generator of its own",
        )


@exercise_07_1.check("another order in each epoch")
def sampler_epochs(candidate: Any) -> None:
    first, second, far = (parts(candidate, 40, 2, epoch) for epoch in (0, 1, 17))
    if first == second:
        wrong(
            "every epoch has the same order",
            expected="set_epoch(1) changes the order",
            seen="that of epoch 0",
            hint="seed the generator with seed + epoch",
        )
    sampler = candidate(range(40), num_replicas=2, rank=1)
    if list(sampler) != list(sampler):
        wrong(
            "the order changes without set_epoch",
            expected="the same order until set_epoch is called",
            seen="another one",
            hint="a rank that iterates once more than the others would leave the common order",
        )
    for epoch, got in ((1, second), (17, far)):
        want = parts(TorchSampler, 40, 2, epoch)
        expect_equal(got, want, what=f"the indices of epoch {epoch}", hint="seed + epoch")


@exercise_07_1.check("10 samples for 4 ranks")
def sampler_padding(candidate: Any) -> None:
    got = parts(candidate, 10, 4, shuffle=False)
    want = parts(TorchSampler, 10, 4, shuffle=False)
    counts = [len(part) for part in got]
    if len(set(counts)) > 1:
        wrong(
            "the ranks get different numbers of samples",
            expected="as many steps on every rank: 3 samples each",
            seen=f"{counts}",
            hint="a rank with one step more waits for the others in its all-reduce, for ever",
        )
    if counts == [2] * 4:
        wrong(
            "the tail is left out although drop_last is False",
            expected="3 samples for each rank, the first two of them twice",
            seen="2 for each",
        )
    hint = "the order goes on from its beginning until it is divisible"
    own = all(set(part) <= set(range(r, 10, 4)) for r, part in enumerate(got))
    mistake = "each rank pads its own part: it repeats a sample of its own" if own else ""
    expect_equal(got, want, what="the ranks' indices", mistake=mistake, hint=hint)
    got = parts(candidate, 10, 4, shuffle=False, drop_last=True)
    if got == want:
        wrong("drop_last is not used", expected="2 samples for each of 4 ranks", seen="3")
    expect_equal(
        got,
        parts(TorchSampler, 10, 4, shuffle=False, drop_last=True),
        what="the ranks' indices with drop_last",
    )
    seed = fresh_seed() % 1000
    got, want = (parts(each, 10, 4, seed=seed) for each in (candidate, TorchSampler))
    if got != want and [part[:2] for part in got] == [part[:2] for part in want]:
        wrong(
            "the padding is not the beginning of the shuffled order",
            expected="the first samples of this epoch's order once more",
            seen="others",
        )
    expect_equal(got, want, what="the indices of a shuffled, padded epoch")


@exercise_07_1.check("fewer samples than ranks")
def sampler_tiny(candidate: Any) -> None:
    got = parts(candidate, 3, 8, shuffle=False)
    if any(not part for part in got):
        wrong(
            "some ranks have no sample: the padding needs more than one round",
            expected="1 sample for each of 8 ranks, from 3 samples",
            seen=f"{[len(part) for part in got]}",
            hint="repeat the order as often as it takes",
        )
    expect_equal(got, parts(TorchSampler, 3, 8, shuffle=False), what="the ranks' indices")


@exercise_07_1.check("its length")
def sampler_length(candidate: Any) -> None:
    for drop_last in (False, True):
        sampler = candidate(range(10), num_replicas=4, rank=3, drop_last=drop_last)
        if len(sampler) == 10:
            wrong(
                "len() is the whole dataset's: schedules would plan 4 times the steps",
                expected="the number of samples that this rank gets",
                seen="10 of 10, with 4 ranks",
            )
        expect_equal(len(sampler), 2 if drop_last else 3, what=f"len() with {drop_last=}")


@exercise_07_1.check("60 random settings, index for index with torch")
def sampler_equals_torch(candidate: Any) -> None:
    draw = random.Random(fresh_seed())
    for _ in range(60):
        length, ranks, epoch = draw.randint(0, 90), draw.randint(1, 9), draw.randint(0, 99)
        options = {
            "shuffle": draw.random() < 0.7,
            "drop_last": draw.random() < 0.5,
            "seed": draw.randint(0, 9999),
        }
        got = parts(candidate, length, ranks, epoch, **options)
        want = parts(TorchSampler, length, ranks, epoch, **options)
        expect_equal(got, want, what=f"{length} samples, {ranks} ranks, {epoch=}, {options}:")


@exercise_07_1.check("the place in the group")
def sampler_place(candidate: Any) -> None:
    def mine(rank: int) -> list[int]:
        return list(candidate(range(6), shuffle=False))

    got = in_group(mine, 2)
    hint = "dist.get_world_size() and dist.get_rank() where None was given"
    expect_equal(got, [[0, 2, 4], [1, 3, 5]], what="each rank's indices, asked of it", hint=hint)
    for rank in (4, -1):
        what = f"rank {rank} of 4"
        expect_raises(ValueError, candidate, range(9), 4, rank, what=what, mentions=[rank])


def in_group(function: Callable[..., Any], ranks: int) -> list[Any]:
    """Run on real ranks; say in short what went wrong on them."""
    try:
        return run_ranks(function, ranks, timeout=20)
    except RankFailed as failure:
        text = str(failure)
        if "NotImplementedError" in text:
            raise NotImplementedError from None
        if "were not back" in text:
            wrong(
                "the ranks wait for one another for ever",
                expected="as many collectives on every rank, whatever its share",
                seen=text.splitlines()[0],
                hint="one all-reduce, after the loop",
            )
        if "Connection" in text or "Read error" in text:
            wrong(
                "a rank is already gone while another still waits for it in a collective",
                expected="as many collectives on every rank, also on one without samples",
                seen="a connection that its other end has closed",
                hint="no return before the all-reduce: who has nothing adds 0 and 0",
            )
        if "ZeroDivisionError" in text:
            wrong(
                "a rank without samples divides by 0",
                expected="sums and divisors from every rank, also 0 and 0",
                seen=text.splitlines()[0],
            )
        wrong("", expected="a result from every rank", seen=text.splitlines()[0])
        raise AssertionError from failure  # wrong() has raised


# 07.2 exact_evaluation


class Samples:
    """A dataset of (index, value, weight)."""

    def __init__(self, values: list[float], weights: list[float]) -> None:
        self.rows = list(zip(range(len(values)), values, weights, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return self.rows[index]


def evaluated(
    candidate: Any, values: list[float], ranks: int, batch_size: int, weights: Any = None
) -> list[dict[str, Any]]:
    """What each rank returned, which samples it scored in which batches, what it sent."""
    dataset = Samples(values, weights or [1.0] * len(values))

    def one(rank: int) -> dict[str, Any]:
        batches: list[list[int]] = []

        def score(samples: list[tuple[int, float, float]]) -> tuple[float, float]:
            batches.append([index for index, _, _ in samples])
            return sum(v for _, v, _ in samples), sum(w for _, _, w in samples)

        with count_traffic() as traffic:
            result = candidate(score, dataset, batch_size)
        sent = [(call.op, call.num_bytes) for call in traffic.calls]
        return {"result": result, "batches": batches, "sent": sent}

    return in_group(one, ranks)


def expect_mean(
    runs: list[dict[str, Any]], want: float, mistakes: dict[str, tuple[float, ...]] | None = None
) -> None:
    """Every rank must have the exact mean; a recognised wrong value is named."""
    results = [run["result"] for run in runs]
    if all(result is None for result in results):
        wrong("nothing is returned", expected="a float from every rank", seen="None")
    if results[0] is not None and None in results[1:]:
        wrong("only rank 0 has the result", expected="the same on every rank", seen=f"{results}")
    expect(
        all(isinstance(result, float) for result in results),
        expected="a float from every rank",
        seen=f"{[type(result).__name__ for result in results]}",
        hint="tensor.item()",
    )
    for words, values in (mistakes or {}).items():
        if any(all(math.isclose(each, value) for each in results) for value in values):
            wrong(words, expected=f"{want:.6g}", seen=f"{results[0]:.6g}")
    if max(results) - min(results) > 1e-9:
        wrong(
            "each rank has a figure of its own",
            expected=f"{want:.6g} on every rank",
            seen=f"{[round(each, 4) for each in results]}",
            hint="dist.all_reduce",
        )
    expect(
        math.isclose(results[0], want, rel_tol=1e-6),
        expected=f"{want:.9g}",
        seen=f"{results[0]:.9g}",
    )


def expect_each_once(runs: list[dict[str, Any]], length: int) -> None:
    """Each sample is scored once in the world, and the shares are even."""
    shares = [[index for batch in run["batches"] for index in batch] for run in runs]
    if len(runs) > 1 and all(len(share) == length for share in shares):
        wrong(
            "every rank scores the whole dataset: the right figure for the price of all",
            expected=f"{length} samples scored by {len(runs)} ranks together",
            seen=f"{sum(map(len, shares))}",
        )
    scored = sorted(itertools.chain(*shares))
    expect_equal(scored, list(range(length)), what="the samples that were scored")
    counts = [len(share) for share in shares]
    expect(
        max(counts) - min(counts) <= 1,
        mistake="the shares are uneven: all wait for the rank with most",
        expected="shares that differ by 1 at most",
        seen=f"{counts}",
    )


@exercise_07_2.check("9 samples, 4 ranks, the first one right")
def evaluation_small(candidate: Any) -> None:
    runs = evaluated(candidate, [1.0] + [0.0] * 8, ranks=4, batch_size=8)
    if not any(batch for run in runs for batch in run["batches"]):
        wrong(
            "no sample is scored: a share that is smaller than batch_size is a batch as well",
            expected="one batch of 2 or 3 samples on each rank",
            seen="no call of `score`",
            hint="range(0, len(mine), batch_size) counts the last, shorter batch in",
        )
    mistakes = {
        "padding is counted: the first sample is scored twice": (2 / 12,),
        "this is the mean of the ranks' means: rank 0 has 3 samples, the others 2": (1 / 12,),
        "the tail is left out: 8 of 9 samples": (1 / 8,),
        "this is the sum, not the mean": (1.0,),
    }
    expect_mean(runs, 1 / 9, mistakes)
    expect_each_once(runs, 9)


@exercise_07_2.check("cost: one collective of two numbers")
def evaluation_cost(candidate: Any) -> None:
    runs = evaluated(candidate, [float(i) for i in range(24)], ranks=2, batch_size=4)
    sent = runs[0]["sent"]
    if len(sent) >= 3:
        wrong(
            "the ranks talk after every batch: those with one batch more would wait for ever",
            expected="one all-reduce, after the last batch",
            seen=f"{len(sent)} collectives for 3 batches",
        )
    if len(sent) == 2:
        wrong(
            "two collectives where one will do",
            expected="sum and divisor side by side in one tensor",
            seen=" and ".join(op for op, _ in sent),
        )
    expect_equal(
        sent,
        [("all_reduce", 16)],
        what="what a rank communicates (operation, bytes)",
        hint="two float64 numbers: the sum, and what it is divided by",
    )
    most = max(len(batch) for run in runs for batch in run["batches"])
    expect(
        most == 4,
        expected="batches of batch_size samples, 4 here",
        seen=f"{most}",
        mistake="batch_size is not used",
    )


@exercise_07_2.check("batches of different sizes")
def evaluation_batches(candidate: Any) -> None:
    values = [float(i * i) for i in range(11)]
    runs = evaluated(candidate, values, ranks=2, batch_size=4)
    halves = [values[0::2], values[1::2]]
    batches = [half[i : i + 4] for half in halves for i in (0, 4)]
    means = [sum(batch) / len(batch) for batch in batches]
    words = (
        "this is the mean of the batches' means: a short last batch weighs as much as a full one"
    )
    by_rank = (6 * sum(means[:2]) / 2 + 5 * sum(means[2:]) / 2) / 11
    last, full = [*batches[1], *batches[3]], [*batches[0], *batches[2]]
    mistakes = {
        words: (sum(means) / 4, by_rank),
        "each batch takes the place of the one before: add to the totals": (sum(last) / 3,),
        "the last, shorter batch of each rank is left out": (sum(full) / 8,),
    }
    expect_mean(runs, sum(values) / 11, mistakes)
    expect_each_once(runs, 11)


@exercise_07_2.check("samples of different weight")
def evaluation_weights(candidate: Any) -> None:
    draw = random.Random(fresh_seed())
    weights = [float(draw.randint(1, 9)) for _ in range(13)]
    values = [draw.random() * weight for weight in weights]
    runs = evaluated(candidate, values, ranks=3, batch_size=2, weights=weights)
    words = "divided by the number of samples, not by what `score` says"
    expect_mean(runs, sum(values) / sum(weights), {words: (sum(values) / 13,)})


@exercise_07_2.check("fewer samples than ranks")
def evaluation_tiny(candidate: Any) -> None:
    runs = evaluated(candidate, [3.0, 5.0], ranks=4, batch_size=8)
    if any(math.isnan(run["result"]) for run in runs if isinstance(run["result"], float)):
        wrong("a rank without samples makes the result NaN", expected="4", seen="NaN")
    expect_mean(runs, 4.0, {"ranks without samples count as zeros": (2.0,)})
    expect_each_once(runs, 2)
    if any(batch == [] for run in runs for batch in run["batches"]):
        wrong(
            "`score` is called without samples",
            expected="no call on a rank that has none",
            seen="score([])",
        )


@exercise_07_2.check("large counts")
def evaluation_precision(candidate: Any) -> None:
    runs = evaluated(candidate, [2.0**24, 1.0, 1.0, 1.0], ranks=2, batch_size=1)
    want = (2**24 + 3) / 4
    expect_mean(runs, want)
    expect(
        runs[0]["result"] == want,
        mistake="added in float32, in which 16,777,216 + 1 is 16,777,216",
        expected=f"{want}",
        seen=f"{runs[0]['result']}",
        hint="torch.zeros(2, dtype=torch.float64)",
    )


@exercise_07_2.check("no samples at all")
def evaluation_empty(candidate: Any) -> None:
    def one(rank: int) -> tuple[str, str]:
        try:
            return "", f"{candidate(lambda samples: (0.0, 0.0), Samples([], []))}"
        except Exception as error:
            kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            return kind, f"{error}"

    kind, said = in_group(one, 1)[0]
    mistake = "" if kind else "an empty dataset is accepted"
    expect(
        kind == "ValueError" and "0" in said,
        mistake=mistake,
        expected="a ValueError that says how many samples there are: 0",
        seen=f"{kind}: {said}" if kind else f"the result {said}",
    )


# 07.3 ResumableSampler


def group(
    candidate: Any, length: int, ranks: int, state: Any = None, epoch: int | None = None, **options
) -> list[Any]:
    """One sampler a rank, all with the same state."""
    made = [candidate(length, num_replicas=ranks, rank=r, **options) for r in range(ranks)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
        if epoch is not None:
            sampler.set_epoch(epoch)
    return made


def take(samplers: list[Any], steps: int | None = None) -> list[int]:
    """Let every rank have `steps` samples (all that is left without); in the order of steps."""
    iterators = [iterator_of(sampler) for sampler in samplers]
    return interleaved([list(itertools.islice(each, steps)) for each in iterators])


def common_state(samplers: list[Any]) -> Any:
    """The ranks' state, which must be the same everywhere and plain data."""
    states = [sampler.state_dict() for sampler in samplers]
    if any(state != states[0] for state in states):
        wrong(
            "the state differs from rank to rank: one file could not hold it",
            expected="the same dict on every rank",
            seen=f"{states[0]} and {next(s for s in states if s != states[0])}",
        )
    try:
        json.dumps(states[0])
    except TypeError as error:
        wrong("the state is no plain data", expected="numbers and words in a dict", seen=f"{error}")
    return states[0]


@exercise_07_3.check("an epoch that nothing interrupts")
def resumable_plain(candidate: Any) -> None:
    seed = fresh_seed() % 1000
    for length, ranks, options in ((23, 3, {}), (23, 3, {"drop_last": True}), (8, 2, {})):
        for epoch in (0, 4):
            got = [
                list(iterator_of(each))
                for each in group(candidate, length, ranks, None, epoch, seed=seed, **options)
            ]
            want = parts(TorchSampler, length, ranks, epoch, seed=seed, **options)
            expect_equal(got, want, what=f"the indices of epoch {epoch}, {length} samples")


@exercise_07_3.check("on with as many ranks")
def resumable_same_ranks(candidate: Any) -> None:
    seed = fresh_seed() % 1000
    order = whole_epoch(24, 2, seed=seed)
    samplers = group(candidate, 24, 2, None, 2, seed=seed)
    expect_equal(take(samplers, 5), order[:10], what="the first 5 steps of 2 ranks")
    state = common_state(samplers)
    rest = take(group(candidate, 24, 2, state, seed=seed))
    if rest == order:
        wrong(
            "the epoch begins again: 10 samples come twice",
            expected="to go on at sample 10",
            seen="sample 0",
            hint="load_state_dict says where the next iteration begins",
        )
    if rest == order[20:]:
        wrong(
            "each rank skips as many samples as all of them had: 10 are left out",
            expected="to go on at sample 10",
            seen="sample 20",
            hint="take order[consumed:] first, then share it out",
        )
    if sorted(rest) == sorted(order[10:]) and rest != order[10:]:
        wrong(
            "what is left comes in another order",
            expected="the rest of the same order",
            seen="the right samples, shuffled anew",
        )
    expect_every_count(rest, order)
    if rest in (whole_epoch(24, 0, seed=seed), whole_epoch(24, 0, seed=seed)[10:]):
        wrong(
            "the state does not hold the epoch",
            expected="to go on in epoch 2",
            seen="the order of epoch 0",
        )
    expect_equal(rest, order[10:], what="the samples that are left")


def expect_every_count(rest: list[int], order: list[int]) -> None:
    """Name a position that 5 steps of 2 ranks are not."""
    counts = {
        8: "the last step comes again: count an index before it is yielded; what stands after the "
        "`yield` runs when the next one is asked for",
        5: "the position counts one rank's samples: 5 steps of 2 ranks are 10",
        4: "the position counts one rank's samples: 5 steps of 2 ranks are 10",
    }
    for begin, mistake in counts.items():
        if rest == order[begin:]:
            wrong(mistake, expected="to go on at sample 10", seen=f"sample {begin}")


@exercise_07_3.check("on with another number of ranks")
def resumable_other_ranks(candidate: Any) -> None:
    seed = fresh_seed() % 1000
    order = whole_epoch(24, seed=seed)
    for before, after, steps in ((4, 2, 3), (2, 3, 6), (1, 4, 8)):
        samplers = group(candidate, 24, before, seed=seed)
        had = take(samplers, steps)
        rest = take(group(candidate, 24, after, common_state(samplers), seed=seed))
        if rest == order[steps * before :]:
            continue
        twice, missing = len({*had} & {*rest}), len({*order} - {*had} - {*rest})
        seen = (
            f"{twice} samples come twice and {missing} not at all, from {before} to {after} ranks"
        )
        expected = f"the {24 - steps * before} samples that are left, once"
        if len(rest) in (24 - steps, 24 - steps * after):
            wrong(
                "the position counts one rank's samples; with other ranks that is another place",
                expected=expected,
                seen=seen,
                hint="count the samples of all ranks: steps * num_replicas",
            )
        wrong("", expected=expected, seen=seen, hint="share out order[consumed:] anew")


@exercise_07_3.check("set_epoch after a resume, and the epoch after that")
def resumable_epochs(candidate: Any) -> None:
    order = [whole_epoch(12, epoch) for epoch in range(5)]
    samplers = group(candidate, 12, 2, None, 3)
    take(samplers, 4)
    resumed = group(candidate, 12, 2, common_state(samplers), 3)
    rest = take(resumed)
    if rest == order[3]:
        wrong(
            "set_epoch with the epoch that is under way throws the position away",
            expected="to go on at sample 8",
            seen="sample 0 of the same epoch",
            hint="only another epoch begins at its first sample",
        )
    expect_equal(rest, order[3][8:], what="the rest of epoch 3")
    for sampler in resumed:
        sampler.set_epoch(4)
    following = take(resumed)
    if following == order[4][8:]:
        wrong(
            "the epoch after the resumed one is cut short as well",
            expected="all 12 samples of epoch 4",
            seen="the last 4",
            hint="the loaded position is for one epoch",
        )
    expect_equal(following, order[4], what="epoch 4, after the resumed epoch 3")
    abandoned = group(candidate, 12, 2, common_state(samplers), 4)
    expect_equal(take(abandoned), order[4], what="epoch 4, set at once after the resume")


@exercise_07_3.check("a state taken at the end of an epoch")
def resumable_end(candidate: Any) -> None:
    samplers = group(candidate, 10, 4)
    take(samplers)
    state = common_state(samplers)
    resumed = group(candidate, 10, 4, state)
    rest = take(resumed)
    if rest:
        mistake = "an epoch that was finished is begun again"
        wrong(mistake, expected="no sample left in this epoch", seen=f"{len(rest)} samples")
    for sampler in resumed:
        sampler.set_epoch(1)
    want = interleaved(parts(TorchSampler, 10, 4, 1))
    expect_equal(take(resumed), want, what="the epoch that follows")


@exercise_07_3.check("padding and drop_last after a resume")
def resumable_padding(candidate: Any) -> None:
    order = whole_epoch(11)
    samplers = group(candidate, 11, 4)
    take(samplers, 1)
    rest = take(group(candidate, 11, 4, common_state(samplers)))
    if rest == [*order[4:], order[4]]:
        wrong(
            "the padding repeats the first of what is left, not of the epoch",
            expected=f"sample {order[0]}, as without the interruption",
            seen=f"sample {order[4]}",
        )
    expect_equal(rest, [*order[4:], order[0]], what="the rest of 11 samples on 4 ranks")
    samplers = group(candidate, 11, 4, drop_last=True)
    take(samplers, 1)
    rest = take(group(candidate, 11, 3, common_state(samplers), drop_last=True))
    expect_equal(rest, order[4:10], what="the rest on 3 ranks with drop_last")


@exercise_07_3.check("its length")
def resumable_length(candidate: Any) -> None:
    samplers = group(candidate, 20, 2)
    expect_equal(len(samplers[0]), 10, what="len() at the beginning")
    take(samplers, 6)
    (sampler,) = group(candidate, 20, 1, common_state(samplers))
    mistake = "len() is that of a whole epoch" if len(sampler) == 20 else ""
    expect_equal(len(sampler), 8, what="len() when 8 of 20 are left, on one rank", mistake=mistake)


@exercise_07_3.check("indices drawn ahead of training")
def resumable_ahead(candidate: Any) -> None:
    order = whole_epoch(20)
    samplers = group(candidate, 20, 2)
    take(samplers, 8)  # a loader with workers has drawn 16 samples, training has had 4
    state = samplers[0].state_dict(consumed=4)
    rest = take(group(candidate, 20, 2, state))
    if rest == order[16:]:
        wrong(
            "the argument `consumed` is not used: 12 samples that lay in the queue are skipped",
            expected="to go on at sample 4, as state_dict(consumed=4) says",
            seen="sample 16",
        )
    expect_equal(rest, order[4:], what="the samples after state_dict(consumed=4)")
    rest = take(group(candidate, 20, 2, samplers[0].state_dict(consumed=0)))
    if rest == order[16:]:
        wrong(
            "consumed=0 passes for no argument",
            expected="to go on at sample 0: drawn ahead, and nothing trained on yet",
            seen="sample 16",
            hint="0 is false: ask `consumed is None`",
        )
    expect_equal(rest, order, what="the samples after state_dict(consumed=0)")
    for consumed in (-1, 23):
        what = f"consumed={consumed} of 20 samples"
        expect_raises(ValueError, samplers[0].state_dict, consumed, what=what, mentions=[consumed])


@exercise_07_3.check("a state of another dataset, seed or order")
def resumable_foreign(candidate: Any) -> None:
    samplers = group(candidate, 20, 2, seed=5)
    take(samplers, 2)
    state = common_state(samplers)
    for what, length, options, mentions in (
        ("a state of 20 samples, for 21", 21, {"seed": 5}, [20, 21]),
        ("a state of seed 5, for seed 6", 20, {"seed": 6}, [5, 6]),
        ("a state of a shuffled order, without shuffle", 20, {"seed": 5, "shuffle": False}, []),
    ):
        (sampler,) = group(candidate, length, 1, **options)
        hint = "the order would be another one: samples come twice, and others never"
        expect_raises(
            ValueError, sampler.load_state_dict, state, what=what, mentions=mentions, hint=hint
        )
