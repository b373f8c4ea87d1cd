"""Lesson 16, the instructor's side: three ways to cut a model at once, and how to choose.

The lesson's one idea: the axes of a mesh differ in what they send and how often, so each belongs on
a link of its own: tensor parallelism, which sends several times in every layer, inside a node; data
parallelism, which sends once a step, anywhere; the pipeline, which sends little, furthest apart.
What a plan needs and takes can be written down before anything is run. The bytes are exact; the
seconds are a model with eight fitted numbers, and the lesson shows where it misses.

The engine is shared/parallel3d, the planner shared/planner, which needs no torch. 16.3 puts the
pieces of lessons 14 and 15 together in the plainest way; the engine does the same with ZeRO. 16.4a
to 16.4c are three kinds of the planner's seconds, for one model and without its fitted shares.

Points are the difficulty at the exercise (20 in all). What to ask behind a right answer: which
groups is this rank in, and what travels in each; which gradients are on more than one rank, and
why; which of the four kinds of bytes does each axis make smaller, and which does it leave; does the
fastest plan of a table have the smallest bubble, and if not, what does it gain elsewhere.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from shared.data.rows import NO_TARGET, Text, own_rows
from shared.ddp.averaging import sum_flat
from shared.parallel3d.mesh import Mesh3D, build_mesh
from shared.parallel3d.norm import clip_gradients, gradient_norm
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import one_f_one_b_schedule
from shared.planner.search import best_plans
from shared.planner.specs import Cluster
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

__all__ = [
    "best_plans",
    "build_mesh",
    "clip_gradients",
    "compute_and_bubble",
    "data_parallel_seconds",
    "gradient_norm",
    "tensor_parallel_seconds",
    "train_step_3d",
]


def train_step_3d(
    pipeline: Pipeline,
    optimizer: Optimizer,
    batch: Text,
    mesh: Mesh3D,
    num_micro_batches: int,
    max_norm: float,
    clip: Callable[..., Tensor],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Train on a global batch as one process would; return its mean loss and the gradient's norm.

    Every part of a loss is divided by the targets of the whole batch, so that what is left to do
    is to add: micro-batches (the pipeline does), the uses of a tied weight, the replicas. Nothing
    is added over tp: its layers have sent what their gradients need.
    """
    optimizer.zero_grad()
    dp, tp, pp = mesh.dp, mesh.tp, mesh.pp

    def part_of_loss(logits: Tensor, targets: Tensor) -> Tensor:
        losses = vocab_parallel_cross_entropy(logits, targets, tp.group, NO_TARGET)
        return losses.sum() / batch.num_tokens

    pieces = own_rows(batch, dp.index, dp.size, num_micro_batches)
    inputs, targets = zip(*((piece.tokens, piece.targets) for piece in pieces), strict=True)
    table = one_f_one_b_schedule(pp.size, num_micro_batches)
    parts = pipeline.train_step(table, inputs, part_of_loss, targets)
    for parameter, stages in pipeline.tied.items():
        dist.all_reduce(parameter.grad, group=stages)
    sum_flat([p.grad for p in pipeline.parameters() if p.grad is not None], dp.group)
    loss = sum(parts, torch.zeros(()))
    for axis in (pp, dp):  # the last stage alone has a loss
        dist.all_reduce(loss, group=axis.group)
    norm = clip(pipeline.parameters(), max_norm, tp.group, pp.group)  # of whole gradients: last
    optimizer.step()
    return loss, norm


def compute_and_bubble(
    layers: Sequence[int],
    layer: float,
    head: float,
    num_micro_batches: int,
    chunks: int = 1,
    recompute: bool = False,
) -> tuple[float, float]:
    """Seconds in which the slowest pipeline rank computes in a step, and those in which it waits.

    `layers` are those of each pipeline rank, `layer` and `head` the seconds of one micro-batch's
    forward. Backward is twice the forward; a layer that is computed again is one more, the head is
    no layer. Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
    """
    work = [(4 if recompute else 3) * count * layer for count in layers]
    work[-1] += 3 * head
    compute = num_micro_batches * max(work)
    return compute, (len(layers) - 1) / (chunks * num_micro_batches) * compute


def tensor_parallel_seconds(
    vectors: float,
    layers: int,
    tp: int,
    num_micro_batches: int,
    cluster: Cluster,
    recompute: bool = False,
) -> float:
    """Seconds of a step's all-reduces over tp, of a pipeline rank with so many layers.

    Two in a layer's forward and two in its backward; a layer that is computed again repeats those
    of forward. Each sends 2 (tp - 1) / tp of the vectors, and has its latency.
    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
    """
    if tp == 1:
        return 0.0
    each = 2 * (tp - 1) / tp * vectors / cluster.link(tp, 1) + cluster.latency
    return num_micro_batches * layers * (6 if recompute else 4) * each


def data_parallel_seconds(
    size: float,
    dp: int,
    link: float,
    compute: float,
    num_micro_batches: int,
    zero: int = 0,
    overlap: bool = True,
) -> float:
    """Seconds of a step's messages over dp that compute does not hide; ZeRO stage 0, 1 or 3.

    A reduce-scatter or an all-gather sends (dp - 1) / dp of `size`. Gradients hide behind the last
    backward, 2/3 of a micro-batch's compute; ZeRO-1's gather comes after the step, where nothing is
    computed; ZeRO-3's three messages hide behind each micro-batch's forward and backward.
    """
    message = (dp - 1) / dp * size / link
    hidden = compute if overlap else 0.0
    if zero == 3:
        return num_micro_batches * max(0.0, 3 * message - hidden)
    if zero == 1:
        return max(0.0, message - 2 / 3 * hidden) + message
    return max(0.0, 2 * message - 2 / 3 * hidden)


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
train_step_3d: 4 points, 45 minutes. One divisor for all parts of the loss 1, the tied weight over
its stages 1, dp once and before clipping 1, loss and norm the same on every rank 1.
A mean over dp is as good as a sum, if the parts of the loss are dp times as large: then both have
to be seen together. Ask what changes where every row has equally many targets (nothing: that is why
a test with full rows does not see this mistake), and why nothing is summed over tp.
Common mistakes: divided twice, by all targets and again by dp; each replica's own targets as the
divisor; the tied weight left out; clipped before the replicas are added up, by norms that differ.
""",
    "16.4a": """
compute_and_bubble: 2 points, 15 minutes. Compute 1, bubble 1.
Let them cover the right half of the table and fill it row by row.
Common mistakes: the mean stage for the slowest; the head computed again; (p - 1) / (m + p - 1),
which is the bubble's share of the whole step and not of the work.
""",
    "16.4b": """
tensor_parallel_seconds: 2 points, 10 minutes. Number and size of messages 1, link and latency 1.
Ask for the limit of a large tp: the time of a message hardly grows, that of compute falls.
Common mistakes: one direction of an all-reduce; the link inside a node for a group that leaves it;
one latency a step.
""",
    "16.4c": """
data_parallel_seconds: 2 points, 15 minutes. What is sent 1, what hides behind what 1.
Ask which of the numbers falls with more micro-batches, as a share of the step.
Common mistakes: hidden behind all backwards of a step (gradients are whole in the last alone); the
gather of ZeRO-1 hidden too; less than nothing where compute is long.
""",
    "16.5": """
best_plans: 3 points, 30 minutes. The layouts 1, what fits 1, order and the error 1.
Ask for a plan that is faster than the first of the list, and what it lacks.
Common mistakes: filling the memory to the last byte; ZeRO-3's two whole units forgotten; the search
ended by the first layout that the heads cannot be cut by; an empty list where nothing fits, which
tells nobody what to change.
""",
}
