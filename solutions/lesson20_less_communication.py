"""Lesson 20, the instructor's side: what may be left out of a message, and when that pays.

The lesson's one idea: a compressed message is wrong in this step and right over all steps, if what
it leaves out is added to the next one (error feedback). The hooks differ only in what they send:
16 bits, the largest numbers, signs, two thin matrices. Rarer messages (local SGD) are the other
way, and a sum that minds which link is slow leaves the numbers as they are. Whether any of it pays
is arithmetic: bytes over bandwidth against compute, times the steps that it costs.

Points are the difficulty at the exercise (18 in all). What to ask behind a right answer: which
hooks' bytes grow with the number of ranks, and why; what the residual costs in memory; why torch's
PowerSGD may not start before DDP's third step, and why a residual by parameter may; what an average
of weights does to Adam's moments; which of these changes the loss curve, and which cannot.
"""

from shared.less_communication.hierarchical import hierarchical_all_reduce
from shared.less_communication.hooks import (
    fp16_hook,
    one_bit_with_error_feedback,
    topk_with_error_feedback,
)
from shared.less_communication.local_sgd import LocalSGD
from shared.less_communication.power_sgd import low_rank_mean, power_sgd

__all__ = [
    "LocalSGD",
    "fp16_hook",
    "hierarchical_all_reduce",
    "low_rank_mean",
    "one_bit_with_error_feedback",
    "power_sgd",
    "topk_with_error_feedback",
]

NOTES = {
    "20.1": """
fp16_hook: 2 points, 15 minutes. The mean in 16 bits 1, the future 1. Ask what happens to
a gradient of 1e-8, and which of lesson 09's tools would keep it.
Common mistakes: divided after the sum (it may overflow where the mean does not); `.wait()` inside,
which ends DDP's overlap.
""",
    "20.2": """
topk_with_error_feedback: 3 points, 30 minutes. Feedback 2, bytes 1. Ask for the number that is
never among the largest: when does it arrive? (When it has added up: the residual grows.)
Common mistakes: the residual of the gradient alone, which forgets what was kept before; zeros sent
for all that is small; the largest without abs().
""",
    "20.3": """
one_bit_with_error_feedback: 3 points, 25 minutes. Ask why the mean size, not the largest: the
residual is then shortest. Ask for the bytes a rank receives from n - 1 others.
Common mistakes: one scale for a bucket of layers whose gradients differ a hundredfold; a byte a
sign; each rank's own scale for all signs.
""",
    "20.4a": """
low_rank_mean: 2 points, 15 minutes. The two sums and messages 1, right angles 1. Ask what P P^T
does to a vector, and why all ranks end up with the same bits.
Common mistakes: P left as it is (the product then has the size of M cubed); a message a matrix.
""",
    "20.4b": """
power_sgd: 3 points, 30 minutes. Feedback 1, warm start 1, what is not compressed 1. Ask what the
power iteration would do with one and the same M in every step (converge to its best low rank).
Common mistakes: a new random factor in every step; the count of steps moved by every bucket.
""",
    "20.5": """
LocalSGD: 3 points, 30 minutes. Ask what the outer gradient is, and what its learning rate of 1
without momentum means. Ask whether H = 1 is DDP (with plain SGD yes, with Adam no).
Common mistakes: the outer step taken from where the rank is now, not from where all agreed; the
sign of the outer gradient; ranks that start apart.
""",
    "20.6": """
hierarchical_all_reduce: 2 points, 25 minutes. Ask which link each of the three messages takes, and
what m ranks of a node send across together (the tensor once, not m times).
Common mistakes: all-reduce inside, then all-reduce across, of the whole tensor; the two groups
exchanged, which sums the same and sends m times as much over the slow link.
""",
}
