"""Wrong answers to lesson 16, each with the words that the check must say to it."""

import contextlib
import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from shared.data.rows import Text, own_rows
from shared.exercises.mistakes import mistake
from shared.pipeline.schedules import gpipe_schedule, one_f_one_b_schedule
from shared.planner.variants import USABLE
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from solutions import lesson16_parallelism_3d as right

# 16.1 build_mesh

AXES = ("pp", "dp", "tp")


def refuse(sizes, world_size, order):
    """What the right answer refuses."""
    if min(sizes.values()) < 1:
        raise ValueError(f"sizes {sizes}")
    if world_size not in (None, math.prod(sizes.values())):
        raise ValueError(f"{sizes} for {world_size} ranks")
    if sorted(order) != sorted(AXES):
        raise ValueError(f"order {order}")


@mistake("16.1", says="the first axis of order varies fastest")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    return right.build_mesh(dp, tp, pp, world_size, order[::-1])


@mistake("16.1", says="a rank is in two groups of one axis")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    refuse(sizes, world_size, order)
    n, groups, stride = dp * tp * pp, {}, 1
    for axis in reversed(order):
        size = sizes[axis]
        firsts = range(n // size)
        groups[axis] = [[(first + i * stride) % n for i in range(size)] for first in firsts]
        stride *= size
    return groups


@mistake("16.1", says="the keys are not the three axes")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    return list(right.build_mesh(dp, tp, pp, world_size, order).values())


@mistake("16.1", says="world_size 3 for 6 places is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    if world_size is not None and (world_size < 1 or dp * tp * pp % world_size):
        raise ValueError(f"{world_size} ranks for {dp * tp * pp} places")
    return right.build_mesh(dp, tp, pp, None, order)


@mistake("16.1", says="the order ('pp', 'dp', 'tp', 'dp') is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    return right.build_mesh(dp, tp, pp, world_size, list(dict.fromkeys(order)))


# 16.2 gradient_norm


def summed(x, group):
    """The sum over a group's ranks, and over one rank its own."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x


def squares(parameters):
    """A sum of squares in float32."""
    return sum((p.grad.float().square().sum() for p in parameters), torch.zeros(()))


def split(parameters):
    """Sums of squares of parts and of copies, without second copies."""
    own = [p for p in parameters if p.grad is not None and not getattr(p, "tied_copy", False)]
    parts = [p for p in own if hasattr(p, "cut_dim")]
    copies = [p for p in own if not hasattr(p, "cut_dim")]
    return squares(parts), squares(copies)


@mistake("16.2", says="what every rank has a copy of counts once for each")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    return summed(summed(parts + copies, tp), pp).sqrt()


@mistake("16.2", says="the other stages' gradients do not count")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    return (summed(parts, tp) + copies).sqrt()


@mistake("16.2", says="its .grad is None")
def gradient_norm(parameters, tp=None, pp=None):
    own = [p for p in parameters if not getattr(p, "tied_copy", False)]
    parts = squares(p for p in own if hasattr(p, "cut_dim"))
    copies = squares(p for p in own if not hasattr(p, "cut_dim"))
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="it asks for a process group")
def gradient_norm(parameters, tp=None, pp=None):
    dist.get_world_size()
    return right.gradient_norm(parameters, tp, pp)


@mistake("16.2", says="None is given to torch.distributed as a group")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    if dist.is_initialized():
        dist.all_reduce(parts, group=tp)
    total = parts + copies
    if dist.is_initialized():
        dist.all_reduce(total, group=pp)
    return total.sqrt()


@mistake("16.2", says="the norm comes back in float64")
def gradient_norm(parameters, tp=None, pp=None):
    return right.gradient_norm(parameters, tp, pp).double()


# 16.2b clip_gradients


def limited(max_norm):
    """What the right answer refuses."""
    if max_norm < 0:
        raise ValueError(f"max_norm {max_norm}")
    return max_norm


def scale(parameters, factor):
    """Scale every gradient in place."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def factor_of(norm, max_norm):
    return (limited(max_norm) / (norm + 1e-6)).clamp(max=1.0)


@mistake("16.2b", says="each rank clips by the norm of its own gradients")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    mine = squares(p for p in own if p.grad is not None).sqrt()
    scale(own, factor_of(mine, max_norm))
    return norm


@mistake("16.2b", says="its .grad is None")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    for p in own:
        p.grad.mul_(factor_of(norm, max_norm))
    return norm


@mistake("16.2b", says="no gradient is scaled")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    limited(max_norm)
    return right.gradient_norm(list(parameters), tp, pp)


@mistake("16.2b", says="max_norm -1.5 is accepted")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    return right.clip_gradients(parameters, abs(max_norm), tp, pp)


# 16.3 train_step_3d


@mistake("16.3", says="the tied embedding's gradients are not added up over its stages")
def train_step_3d(pipeline, *args):
    tied, pipeline.tied = pipeline.tied, {}
    try:
        return right.train_step_3d(pipeline, *args)
    finally:
        pipeline.tied = tied


class AllPositions(Text):
    """A batch whose positions without a target count as well."""

    @property
    def num_tokens(self):
        return self.targets.numel()


@mistake("16.3", says="positions without a target are counted in the divisor")
def train_step_3d(pipeline, optimizer, batch, *args):
    batch = AllPositions(batch.tokens, batch.targets)
    return right.train_step_3d(pipeline, optimizer, batch, *args)


@mistake("16.3", says="the replicas' gradients are not added up")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    optimizer.zero_grad()
    pieces = own_rows(batch, mesh.dp.index, mesh.dp.size, num_micro_batches)

    def part_of_loss(logits, targets):
        losses = vocab_parallel_cross_entropy(logits, targets, mesh.tp.group)
        return losses.sum() / batch.num_tokens

    parts = pipeline.train_step(
        one_f_one_b_schedule(mesh.pp.size, num_micro_batches),
        [piece.tokens for piece in pieces],
        part_of_loss,
        [piece.targets for piece in pieces],
    )
    for parameter, stages in pipeline.tied.items():
        dist.all_reduce(parameter.grad, group=stages)
    norm = clip(pipeline.parameters(), max_norm, mesh.tp.group, mesh.pp.group)
    optimizer.step()
    loss = sum(parts, torch.zeros(()))
    for axis in (mesh.pp, mesh.dp):
        dist.all_reduce(loss, group=axis.group)
    return loss, norm


@mistake("16.3", says="the tied embedding has the mean of its stages' gradients")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    def clip_means(*args):
        for parameter in pipeline.tied:
            parameter.grad /= mesh.pp.size
        return clip(*args)

    return right.train_step_3d(
        pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip_means
    )


@contextlib.contextmanager
def run_by(pipeline, run):
    """Inside, the pipeline's step is `run(its own, table, ...)`."""
    own = pipeline.train_step
    pipeline.train_step = partial(run, own)
    try:
        yield
    finally:
        pipeline.train_step = own


@mistake("16.3", says="more micro-batches are in flight than 1F1B has")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, *args):
    def by_gpipe(own, table, *more):
        return own(gpipe_schedule(mesh.pp.size, num_micro_batches), *more)

    with run_by(pipeline, by_gpipe):
        return right.train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, *args)


@mistake("16.3", says="the pipeline runs more than once")
def train_step_3d(pipeline, *args):
    with run_by(pipeline, lambda own, *more: [own(*more), own(*more)][1]):
        return right.train_step_3d(pipeline, *args)


@mistake("16.3", says="the pipeline runs once for each micro-batch")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, *args):
    def again(own, *more):
        return [own(*more) for _ in range(num_micro_batches)][-1]

    with run_by(pipeline, again):
        return right.train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, *args)


@mistake("16.3", says="the loss is added up over tp as well, whose ranks have the same, or multi")
def train_step_3d(pipeline, optimizer, batch, mesh, *args):
    loss, norm = right.train_step_3d(pipeline, optimizer, batch, mesh, *args)
    dist.all_reduce(loss, group=mesh.tp.group)
    return loss, norm


@mistake("16.3", says="what every rank of tp has a copy of counts tp times in the norm")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    def clip_all(parameters, limit, tp, pp):
        own = [p for p in parameters if p.grad is not None]
        total = sum(p.grad.square().sum() for p in own if not getattr(p, "tied_copy", False))
        for group in (tp, pp):
            dist.all_reduce(total, group=group)
        for p in own:
            p.grad *= min(1.0, limit / (total.sqrt().item() + 1e-6))
        return total.sqrt()

    return right.train_step_3d(
        pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip_all
    )


@mistake("16.3", says="a step returns two numbers")
def train_step_3d(*args):
    return right.train_step_3d(*args)[0]


# 16.4a compute_and_bubble, 16.4b tensor_parallel_seconds, 16.4c data_parallel_seconds


@mistake("16.4a", says="the bubble is taken as a share of the whole step")
def compute_and_bubble(*args, **sizes):
    compute, waits = right.compute_and_bubble(*args, **sizes)
    return compute, compute * waits / (compute + waits)


@mistake("16.4a", says="interleaving is left out")
def compute_and_bubble(layers, layer, head, num_micro_batches, chunks=1, recompute=False):
    return right.compute_and_bubble(layers, layer, head, num_micro_batches, 1, recompute)


@mistake("16.4a", says="the head is computed again")
def compute_and_bubble(layers, layer, head, num_micro_batches, chunks=1, recompute=False):
    head = head * 4 / 3 if recompute else head
    return right.compute_and_bubble(layers, layer, head, num_micro_batches, chunks, recompute)


@mistake("16.4b", says="what is computed again sends nothing")
def tensor_parallel_seconds(vectors, layers, tp, num_micro_batches, cluster, recompute=False):
    return right.tensor_parallel_seconds(vectors, layers, tp, num_micro_batches, cluster)


@mistake("16.4b", says="every group has the link inside a node")
def tensor_parallel_seconds(vectors, layers, tp, num_micro_batches, cluster, recompute=False):
    one_node = replace(cluster, gpus_per_node=cluster.gpus)
    return right.tensor_parallel_seconds(
        vectors, layers, tp, num_micro_batches, one_node, recompute
    )


@mistake("16.4b", says="an all-reduce sends everything twice")
def tensor_parallel_seconds(vectors, layers, tp, num_micro_batches, cluster, recompute=False):
    whole = vectors * tp / max(1, tp - 1)
    return right.tensor_parallel_seconds(whole, layers, tp, num_micro_batches, cluster, recompute)


@mistake("16.4c", says="gradients hide behind a whole micro-batch")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    hidden = compute if zero == 3 else 1.5 * compute
    return right.data_parallel_seconds(size, dp, link, hidden, num_micro_batches, zero, overlap)


@mistake("16.4c", says="ZeRO-3's messages hide behind backward alone")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    hidden = 2 / 3 * compute if zero == 3 else compute
    return right.data_parallel_seconds(size, dp, link, hidden, num_micro_batches, zero, overlap)


@mistake("16.4c", says="a rank sends its own part as well")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    two = 2 * size  # of which one half is sent on two ranks
    return right.data_parallel_seconds(two, 2, link, compute, num_micro_batches, zero, overlap)


# 16.5 best_plans


def whatever_fits(model, cluster, batch):
    """Every plan, the fastest first, on GPUs whose memory has no end."""
    return right.best_plans(model, replace(cluster, memory=10**30), batch, 10**9)


@mistake("16.5", says="a plan does not fit")
def best_plans(model, cluster, batch, count=5):
    return whatever_fits(model, cluster, batch)[:count]


@mistake("16.5", says="a plan fills more of the memory than can be used")
def best_plans(model, cluster, batch, count=5):
    larger = replace(cluster, memory=cluster.memory / USABLE)
    return right.best_plans(model, larger, batch, count)


@mistake("16.5", says="the units that ZeRO-3 has whole for a moment are left out")
def best_plans(model, cluster, batch, count=5):
    plans, limit = whatever_fits(model, cluster, batch), USABLE * cluster.memory
    found = [each for each in plans if each.memory.total <= limit]
    return found[:count] or right.best_plans(model, cluster, batch, count)


@mistake("16.5", says="more plans come back than were asked for")
def best_plans(model, cluster, batch, count=5):
    return right.best_plans(model, cluster, batch, 10**9)


@mistake("16.5", says="a search without a plan that fits")
def best_plans(model, cluster, batch, count=5):
    try:
        return right.best_plans(model, cluster, batch, count)
    except ValueError:
        if batch < 1:
            raise
        return []


@mistake("16.5", says="no kind of bytes is named")
def best_plans(model, cluster, batch, count=5):
    try:
        return right.best_plans(model, cluster, batch, count)
    except ValueError:
        whatever_fits(model, cluster, batch)  # says that no layout is possible, or not
        raise ValueError("too large") from None
