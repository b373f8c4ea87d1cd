"""Lesson 15, the instructor's side: a model cut into stages, and orders of work as tables.

The lesson's one idea: a schedule is an order of work on each rank, and nothing else. The same
stages, messages and executor train under all of them and get the same gradients; what differs is
how long ranks wait and how many micro-batches' activations are alive. The engine lives in
shared/pipeline, since lesson 16 trains with it: stages.py cuts, transfer.py sends, schedules.py has
the tables and timetable(), which says of any order what it takes or that it is a deadlock.

Points are the difficulty at the exercise (16 in all). What to ask behind a right answer: which
number does 1F1B leave as GPipe has it (the bubble), and which not (what is alive); why the last
stage turns back at once; what more stages a rank cost in messages; what happens to the bubble when
one stage is twice as slow, and what no schedule can do about it.
"""

from shared.pipeline.schedules import (
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
)
from shared.pipeline.stages import split_stages
from shared.pipeline.transfer import recv_activation, send_activation

__all__ = [
    "gpipe_schedule",
    "interleaved_schedule",
    "one_f_one_b_schedule",
    "recv_activation",
    "send_activation",
    "split_stages",
    "which_schedule",
]


def which_schedule() -> dict[str, str]:
    """Say of each of the four pictures which schedule it shows.

    The keys are the pictures' letters; the values "gpipe", "1f1b", "interleaved", or "none" where
    the order can be done but is none of the three.
    """
    return {"A": "interleaved", "B": "none", "C": "1f1b", "D": "gpipe"}


NOTES = {
    "15.1": """
split_stages: 2 points, 25 minutes. The best of all cuts 1, refusals and many parts 1.
A search for the smallest limit that a greedy fill keeps is as good, with one trap: it must not
leave a stage empty. Ask why the sum of squares is not what a pipeline pays.
Common mistakes: equal numbers of layers; a greedy fill to the mean, which leaves the rest to the
last stage; empty stages where costs are 0.
""",
    "15.2": """
send_activation: 3 points, 25 minutes. Forward without waiting 1, gradients of all tensors 1, the
two ways 1. Ask who waits for the messages at the end of a step, and what would happen if the number
that comes back were not kept until backward.
Common mistakes: dist.send, which waits (1F1B's neighbours both send first: a deadlock that GPipe
never shows); the Work thrown away, and the message with it; one buffer for all micro-batches.
""",
    "15.2b": """
recv_activation: 3 points, 25 minutes. Values 1, every gradient 1, without waiting 1.
Ask why the Function needs an input that requires a gradient. Common mistakes: hooks on each tensor,
which are silent for a tensor that nobody uses and come in the order of autograd, not of sending.
""",
    "15.3": """
gpipe_schedule: 1 point, 10 minutes. Common mistakes: slots counted by hand that are off by one at
the turn; the first micro-batch back first, which keeps all of them for longer.
""",
    "15.4": """
one_f_one_b_schedule: 2 points, 20 minutes. Warm-up 1, turns 1. A warm-up that is one too long has
the same number of slots: only what is alive tells. Ask for both numbers of a wrong table.
""",
    "15.5": """
interleaved_schedule: 4 points, 40 minutes. Order by groups 1, backwards 1, warm-up 1, refusals 1.
The factor 2 in the warm-up is the hard step: let them draw p = 2, v = 2, m = 2 on paper.
Common mistakes: neighbouring stages on one rank (no bubble is saved); the warm-up of 1F1B.
""",
    "15.6": """
which_schedule: 1 point, 10 minutes. Read off the picture, by the last rank and the first.
B is two GPipe steps with two micro-batches each behind one another, as gradients that are
accumulated would be: legal, and its bubble is that of two steps.
""",
}
