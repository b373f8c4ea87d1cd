"""Lesson 16, the instructor's side: three ways to cut a model at once, and how to choose.

The lesson's one idea: the axes of a mesh differ in what they send and how often, so each belongs on
a link of its own: tensor parallelism, which sends several times in every layer, inside a node; data
parallelism, which sends once a step, anywhere; the pipeline, which sends little, furthest apart.
What a plan needs and takes can be written down before anything is run. The bytes are exact; the
seconds are a model with three fitted numbers, and the lesson shows where it misses.

The engine is shared/parallel3d, the planner shared/planner, which needs no torch. The exercises
16.3 to 16.5 are given what one micro-batch keeps (activations.py) and which plans are tried
(variants.py); what is asked for is the arithmetic that puts them together.

Points are the difficulty at the exercise (18 in all). What to ask behind a right answer: which
groups is this rank in, and what travels in each; which gradients are on more than one rank, and
why; which of the four kinds of bytes does each axis make smaller, and which does it leave; does the
fastest plan of a table have the smallest bubble, and if not, what does it gain elsewhere.
"""

from shared.parallel3d.mesh import build_mesh
from shared.parallel3d.norm import clip_gradients, gradient_norm
from shared.planner.memory import memory_per_rank
from shared.planner.search import best_plans
from shared.planner.seconds import step_time

__all__ = [
    "best_plans",
    "build_mesh",
    "clip_gradients",
    "gradient_norm",
    "memory_per_rank",
    "step_time",
]

NOTES = {
    "16.1": """
build_mesh: 2 points, 20 minutes. The groups for the default order 1, any order and refusals 1.
Ask for the links: with 8 GPUs a node and tp 8, which groups leave the node, and how often a step.
Common mistakes: the first axis taken for the one whose ranks are neighbours; for a group, the ranks
that share a place on the axis (they form a plane, not a line); a test with 2 x 2 x 2 alone, which
cannot tell dp from pp.
""",
    "16.2": """
gradient_norm: 3 points, 30 minutes. Parts and copies told apart 1, over pp with the tied weight 1,
messages (one number an axis; a rank without gradients takes part) 1.
Adding a copy's share, 1 / tp of its square, on every rank is as good as adding it after the first
sum, and gives all ranks the same bits. Ask why nothing is summed over dp.
Common mistakes: copies counted tp times (the norm is too large, and training merely a bit slower:
nothing crashes); norms added where squares should be; None taken for all ranks, as torch has it.
""",
    "16.2b": """
clip_gradients: 2 points, 15 minutes. The same factor on every rank 1, edges 1.
Common mistakes: each rank's own norm, after which copies of one weight drift apart; the tied copy
left as it was; a generator that the norm has used up.
""",
    "16.3": """
memory_per_rank: 4 points, 50 minutes. Parameters of a rank 1, states with ZeRO 1, activations with
what is in flight 1, what is computed again, the fullest rank and refusals 1.
Let them say which rank is the fullest before they run it: the first has most in flight, the last
has the logits.
Common mistakes: everything divided by the number of GPUs; norms cut by tp; all micro-batches of a
step alive, as in GPipe; the optimizer's float32 weights forgotten (8 bytes for 12).
""",
    "16.4": """
step_time: 4 points, 50 minutes. Compute 1, messages of tp and pp with their links 1, bubble 1,
data parallelism 1. The contract is long because every number has to be in it; read it aloud once,
line by line, with the picture of a mesh beside it.
Common mistakes: (p - 1) / (m + p - 1), which is the bubble's share of the whole step and not of the
work; one direction of an all-reduce; the link inside a node for groups that leave it; the whole
model's gradients where a rank has those of its part.
""",
    "16.5": """
best_plans: 3 points, 30 minutes. The layouts 1, what fits 1, order and the error 1.
Ask for a plan that is faster than the first of the list, and what it lacks.
Common mistakes: filling the memory to the last byte; ZeRO-3's two whole units forgotten; the search
ended by the first layout that the heads cannot be cut by; an empty list where nothing fits, which
tells nobody what to change.
""",
}
