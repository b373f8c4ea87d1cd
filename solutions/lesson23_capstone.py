"""Lesson 23, the instructor's side: one script for every mode, and a plan that is kept.

The lesson's one idea: an engine is four methods and a checkpoint is names. With both, the loop does
not know which mode runs, and a checkpoint does not know which mode wrote it; what a mode costs can
be said before it runs, and is then counted.

Points are the difficulty at the exercise (8 in all). What to ask behind a right answer: what would
have to be saved besides, if the model had dropout; why DeepSpeed's own checkpoint cannot be read on
another number of ranks, and the same numbers under their names can; which of the planner's promises
are exact, and which a model with something left out.
"""

from shared.capstone.choosing import choose_plan
from shared.capstone.resharding import read_part
from shared.model.modern import grouped_attention

__all__ = ["choose_plan", "grouped_attention", "read_part"]

NOTES = {
    "23.1": """
grouped_attention: 3 points, 20 minutes. The right head for each query 1, no copies 1, the causal
mask of a decoder that asks for its last positions 1. Ask what shrinks with fewer heads of keys:
what a decoder keeps, and the messages of lesson 17's ring; not the scores.
Common mistakes: `repeat` in place of `repeat_interleave`, which pairs head 1 with keys 1; copies of
the keys, which give back what the fewer heads have saved.
""",
    "23.2": """
read_part: 2 points, 15 minutes. The pieces 1, the ends 1. Ask how many files a rank touches when
4 ranks read what 3 wrote, and what a checkpoint that one rank gathers would cost in its place.
Common mistakes: whole files read and cut afterwards; filling taken for numbers where the last part
of the old cut is not the last part of the new one.
""",
    "23.3": """
choose_plan: 3 points, 30 minutes. Bytes 1, seconds 1, the two refusals 1. Ask why ZeRO-2 in a
pipeline sends more than ZeRO-1 does, and which of the plan's promises will be off by how much.
Common mistakes: activations or compute in the sums; the plan that keeps the least, however long it
sends; FITTED, whose links are slower than the budget's.
""",
}
