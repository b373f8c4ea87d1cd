"""Lesson 07, the instructor's side: sharing out a dataset, adding up a metric, resuming an epoch.

Both samplers live in `shared/data/sampling.py`, where lesson 08 takes the resumable one from, and
are re-exported here; exact_evaluation is this lesson's own. The lesson's one idea: the ranks agree
on an order without a word, because each can compute it from (seed, epoch) alone. Everything in the
lesson is what follows, or what breaks when one of the two is not the same everywhere.

Points are the difficulty at the exercise (8 in all). Ask afterwards: "nothing raised, and the loss
falls: how would you have noticed?" No answer of this lesson ends in an exception, which is why the
mistakes are found in production.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shared.data.sampling import DistributedSampler as DistributedSampler
from shared.data.sampling import ResumableSampler as ResumableSampler
from shared.errors import InputError

__all__ = ["DistributedSampler", "ResumableSampler", "exact_evaluation"]


def exact_evaluation(
    score: Callable[[list[Any]], tuple[float, float]],
    dataset: Sequence[Any],
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> float:
    """Mean of a metric over a dataset that the ranks share, each sample counted once.

    `score(samples)` gets a list of 1 to `batch_size` samples and returns the metric's sum over
    them and what that sum is divided by in the end: their number, or that of their tokens. Every
    sample is scored by one rank, the shares differ by at most one sample, and a rank may have
    none: then it does not call `score`. The ranks talk once, in one all-reduce of two float64
    numbers on `device`, and all return the same float. No sum is rounded to float32 on the way.

    Raises InputError, on every rank, for a dataset of 0 samples.
    """
    if len(dataset) == 0:
        raise InputError("the dataset has 0 samples: there is nothing to take the mean of")
    # No padding: the ranks make no step together, so their shares need not be equal.
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, len(mine), batch_size):
        total, divisor = score([dataset[index] for index in mine[start : start + batch_size]])
        totals += torch.tensor([float(total), float(divisor)], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


NOTES = {
    "07.1": """
DistributedSampler: 2 points, 25 minutes.
Look for: three separate things in this order: the common permutation, making it divisible, the
stride. Whoever mixes them gets one of them wrong at an odd length.
Weigh it: half for the parts, half for what happens at the end of the order.
Common mistakes: seed + rank, in the belief that ranks need different seeds (they do, for dropout):
the parts then come from different permutations and overlap, and with two ranks a quarter of the
data is seen by nobody in an epoch. torch.manual_seed in __iter__, which makes the order right and
resets the dropout of every epoch. indices += indices[:missing], which is too short when there are
more ranks than samples. len() of the whole dataset: the learning-rate schedule then plans n times
the steps, and the rate never comes down.
Ask: why may rank r not take the r-th block? It may, when the order is shuffled. When it is not (a
validation set sorted by length) one rank gets the long sentences; and a prefix of the epoch is no
longer "the first k", which 07.3 lives on.
""",
    "07.2": """
exact_evaluation: 2 points, 20 minutes.
Look for: range(rank, L, world_size), sums and divisors, one division.
Weigh it: the right figure with an all-reduce per batch is worth nothing here: it hangs as soon as
one rank has one batch more.
Common mistakes: the padded sampler of training (duplicates); the mean of the ranks' means, or of
the batches' (shares and last batches differ); `1 if not mine` in place of 0 for a rank without
samples; float32 totals: counts of tokens pass 2^24 in any real validation set.
Ask: and BLEU? It is no mean over sentences: its counts of n-grams can be added up like sums here,
or the translations gathered by index; the mean of the ranks' BLEU is another number.
And: the model is wrapped in DDP. Call the module inside in evaluation: DDP's forward may broadcast
buffers, which is a collective, and the ranks no longer make the same number of calls.
""",
    "07.3": """
ResumableSampler: 4 points, 45 minutes.
Look for: the position is global, so that the world size appears only where what is left is shared
out. Two numbers: where the next iteration begins, how far this one has come.
Weigh it: the same world size, one point; another one, two; the ends (a finished epoch, set_epoch,
padding), the fourth.
Common mistakes: the position of one rank (right until a machine is lost); set_epoch that resets the
position, so that the usual loop throws it away one line after it was loaded; the position kept for
the epoch after; a finished epoch that looks like one not yet begun; the count of an iterator that
runs ahead, because a loader with w workers draws 2 w batches before the first is trained on.
The way out for the last one is to say what was trained on: state_dict(consumed=...). torchdata's
StatefulDataLoader keeps that book by itself, for one world size.
""",
}
