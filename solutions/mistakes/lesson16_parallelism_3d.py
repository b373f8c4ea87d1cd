"""Wrong answers to lesson 16, each with the words that the check must say to it."""

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from shared.data.rows import own_rows
from shared.ddp.averaging import sum_flat
from shared.exercises.mistakes import mistake
from shared.pipeline.schedules import gpipe_schedule, one_f_one_b_schedule
from shared.planner.limits import misfits
from shared.planner.memory import gathered_bytes, memory_per_rank
from shared.planner.outcomes import Choice
from shared.planner.seconds import step_time
from shared.planner.specs import Plan
from shared.planner.variants import USABLE, variants
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


@mistake("16.1", says="dp has the size of tp")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    refuse({"dp": dp, "tp": tp, "pp": pp}, world_size, order)
    return right.build_mesh(tp, dp, pp, world_size, order)


@mistake("16.1", says="world_size 3 for 6 places is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    if world_size is not None and (world_size < 1 or dp * tp * pp % world_size):
        raise ValueError(f"{world_size} ranks for {dp * tp * pp} places")
    return right.build_mesh(dp, tp, pp, None, order)


@mistake("16.1", says="the order ('pp', 'dp', 'tp', 'dp') is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    return right.build_mesh(dp, tp, pp, world_size, list(dict.fromkeys(order)))


# 16.2 gradient_norm


def size_of(group):
    return 1 if group is None else dist.get_world_size(group)


def summed(x, group):
    """The sum over a group's ranks, and over one rank its own."""
    if group is not None and size_of(group) > 1:
        dist.all_reduce(x, group=group)
    return x


def counting(parameters, tied=True):
    """Those with a gradient that count; with `tied`, without second copies."""
    return [
        p
        for p in parameters
        if p.grad is not None and not (tied and getattr(p, "tied_copy", False))
    ]


def squares(parameters):
    """A sum of squares in float32."""
    return sum((p.grad.float().square().sum() for p in parameters), torch.zeros(()))


def split(parameters, tied=True):
    """Sums of squares of parts and of copies."""
    own = counting(parameters, tied)
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


def factor_of(norm, max_norm, eps=1e-6):
    return (limited(max_norm) / (norm + eps)).clamp(max=1.0)


@mistake("16.2b", says="each rank clips by the norm of its own gradients")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    mine = squares(p for p in own if p.grad is not None).sqrt()
    scale(own, factor_of(mine, max_norm))
    return norm


@mistake("16.2b", says="what is not cut is not scaled")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    scale([p for p in own if hasattr(p, "cut_dim")], factor_of(norm, max_norm))
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


def add_tied(pipeline, mesh):
    for parameter, stages in pipeline.tied.items():
        dist.all_reduce(parameter.grad, group=stages)


def gradients_of(pipeline):
    return [p.grad for p in pipeline.parameters() if p.grad is not None]


def add_replicas(pipeline, mesh):
    sum_flat(gradients_of(pipeline), mesh.dp.group)


def add_loss(parts, mesh):
    loss = sum(parts, torch.zeros(()))
    for axis in (mesh.pp, mesh.dp):
        dist.all_reduce(loss, group=axis.group)
    return loss


def begin(pipeline, optimizer):
    optimizer.zero_grad()


def of_all(batch, pieces, logits):
    return batch.num_tokens


def step(
    pipeline,
    optimizer,
    batch,
    mesh,
    num_micro_batches,
    max_norm,
    clip,
    *,
    begin=begin,
    divisor=of_all,
    table=one_f_one_b_schedule,
    before_clip=(add_tied, add_replicas),
    after_clip=(),
    loss=add_loss,
):
    """The right answer from its pieces, to exchange one."""
    begin(pipeline, optimizer)
    pieces = own_rows(batch, mesh.dp.index, mesh.dp.size, num_micro_batches)

    def part_of_loss(logits, targets):
        losses = vocab_parallel_cross_entropy(logits, targets, mesh.tp.group)
        return losses.sum() / divisor(batch, pieces, targets)

    parts = pipeline.train_step(
        table(mesh.pp.size, num_micro_batches),
        [piece.tokens for piece in pieces],
        part_of_loss,
        [piece.targets for piece in pieces],
    )
    for act in before_clip:
        act(pipeline, mesh)
    norm = clip(pipeline.parameters(), max_norm, mesh.tp.group, mesh.pp.group)
    for act in after_clip:
        act(pipeline, mesh)
    optimizer.step()
    return loss(parts, mesh), norm


def mean_of_tied(pipeline, mesh):
    add_tied(pipeline, mesh)
    for parameter in pipeline.tied:
        parameter.grad /= mesh.pp.size


def stepping(says, **changed):
    """A known mistake: the right step with a piece exchanged."""
    mistake("16.3", says=says)(lambda *args: step(*args, **changed))


stepping(
    "the tied embedding's gradients are not added up over its stages",
    before_clip=(add_replicas,),
)
stepping(
    "positions without a target are counted in the divisor",
    divisor=lambda batch, pieces, targets: batch.targets.numel(),
)
stepping(
    "the replicas' gradients are not added up",
    before_clip=(add_tied,),
)
stepping(
    "the tied embedding has the mean of its stages' gradients",
    before_clip=(mean_of_tied, add_replicas),
)
stepping("more micro-batches are in flight than 1F1B has", table=gpipe_schedule)


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

    return step(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip_all)


@mistake("16.3", says="a step returns two numbers")
def train_step_3d(*args):
    return step(*args)[0]


# 16.4a compute_and_bubble, 16.4b tensor_parallel_seconds, 16.4c data_parallel_seconds


def registered(id, wrong, table):
    """Known mistakes by what is said to them: a formula with something exchanged."""
    for says, changed in table.items():
        mistake(id, says=says)(
            lambda *args, changed=changed, **more: wrong(*args, **more, **changed)
        )


def pipeline_seconds(
    layers, layer, head, num_micro_batches, chunks=1, recompute=False, pace=max, waits=None
):
    """The right answer from its pieces."""
    work = [count * layer * (3 + recompute) for count in layers]
    work[-1] += 3 * head
    compute, m = num_micro_batches * pace(work), num_micro_batches
    return compute, compute * (waits or right_share)(len(layers), m, chunks)


def right_share(p, m, v):
    return (p - 1) / (v * m)


registered(
    "16.4a",
    pipeline_seconds,
    {
        "the bubble is taken as a share of the whole step": {
            "waits": lambda p, m, v: (p - 1) / (v * m + p - 1)
        },
        "interleaving is left out": {"waits": lambda p, m, v: (p - 1) / m},
        "the bubble has one slot too many": {"waits": lambda p, m, v: p / (v * m)},
        "the mean rank sets the pace": {"pace": lambda work: sum(work) / len(work)},
        "the last rank sets the pace": {"pace": lambda work: work[-1]},
        "all ranks are added up": {"pace": sum},
    },
)


@mistake("16.4a", says="the head is computed again")
def compute_and_bubble(layers, layer, head, num_micro_batches, chunks=1, recompute=False):
    head = head * 4 / 3 if recompute else head
    return right.compute_and_bubble(layers, layer, head, num_micro_batches, chunks, recompute)


def all_reduces(
    vectors, layers, tp, num_micro_batches, cluster, recompute, count=(4, 6), ring=2, rate=None
):
    """The right answer from its pieces, in one line."""
    rate = cluster.link(tp, 1) if rate is None else rate(cluster, tp)
    each = ring * (tp - 1) / tp * vectors / rate + cluster.latency * (tp > 1)
    return num_micro_batches * layers * count[recompute] * each


registered(
    "16.4b",
    all_reduces,
    {
        "backward's all-reduces are left out": {"count": (2, 4)},
        "what is computed again sends nothing": {"count": (4, 4)},
        "everything is sent once more where a layer is computed again": {"count": (4, 8)},
        "one direction of an all-reduce is counted": {"ring": 1},
        "every group has the link inside a node": {"rate": lambda cluster, tp: cluster.inner},
        "a group that leaves its node has one card": {
            "rate": lambda cluster, tp: (
                cluster.inner if tp <= cluster.gpus_per_node else cluster.outer
            )
        },
    },
)


@mistake("16.4b", says="an all-reduce sends everything twice")
def tensor_parallel_seconds(vectors, layers, tp, num_micro_batches, cluster, recompute=False):
    whole = vectors * tp / max(1, tp - 1)
    return right.tensor_parallel_seconds(whole, layers, tp, num_micro_batches, cluster, recompute)


def not_hidden(
    size, dp, link, compute, num_micro_batches, zero, overlap, gather=False, below=0.0, times=1
):
    """The right answer from its pieces."""
    one, hidden = (dp - 1) / dp * size / link, compute if overlap else 0.0
    if zero == 3:
        return num_micro_batches * max(below, 3 * one - hidden)
    if zero == 1 and not gather:
        return one + times * max(below, one - 2 / 3 * hidden)
    return times * max(below, 2 * one - 2 / 3 * hidden)


registered(
    "16.4c",
    not_hidden,
    {
        "ZeRO-1's gather is hidden as well": {"gather": True},
        "what is left can be below 0": {"below": -math.inf},
    },
)


@mistake("16.4c", says="gradients hide behind a whole micro-batch")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    hidden = compute if zero == 3 else 1.5 * compute
    return right.data_parallel_seconds(size, dp, link, hidden, num_micro_batches, zero, overlap)


@mistake("16.4c", says="ZeRO-3's messages hide behind backward alone")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    hidden = 2 / 3 * compute if zero == 3 else compute
    return right.data_parallel_seconds(size, dp, link, hidden, num_micro_batches, zero, overlap)


@mistake("16.4c", says="gradients travel with every micro-batch")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    return not_hidden(
        size, dp, link, compute, num_micro_batches, zero, overlap, times=num_micro_batches
    )


@mistake("16.4c", says="a rank sends its own part as well")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    two = 2 * size  # of which one half is sent on two ranks
    return right.data_parallel_seconds(two, 2, link, compute, num_micro_batches, zero, overlap)


# 16.5 best_plans


def layouts(model, cluster, batch, sizes=None, node=True, whole=True):
    """Every layout that the model, the nodes and the batch can be cut by."""
    for dp in range(1, cluster.gpus + 1):
        for tp in range(1, cluster.gpus // dp + 1):
            for pp in range(1, cluster.gpus // (dp * tp) + 1):
                plan = Plan(dp=dp, tp=tp, pp=pp)
                as_asked = plan.num_gpus == cluster.gpus if sizes is None else sizes(plan)
                if not as_asked or [*misfits(model, plan)]:
                    continue
                if (node and tp > cluster.gpus_per_node) or (whole and batch % dp):
                    continue
                yield plan


def as_choice(model, cluster, plan):
    return Choice(plan, memory_per_rank(model, plan), step_time(model, plan, cluster))


def needs(choice, model):
    return choice.memory.total + gathered_bytes(model, choice.plan)


def by_time(choice):
    return choice.time.total, choice.memory.total


def search(
    model,
    cluster,
    batch,
    count=5,
    plans=layouts,
    fits=None,
    key=by_time,
    some=lambda plans: plans,
    fail=True,
    reverse=False,
):
    """The right answer from its pieces, with one exchanged."""
    if batch < 1:
        raise ValueError(f"a batch of {batch}")

    def enough(choice):
        return needs(choice, model) <= USABLE * cluster.memory

    tried = []
    for layout in plans(model, cluster, batch):
        tried += [as_choice(model, cluster, p) for p in some([*variants(model, layout, batch)])]
    found = [each for each in tried if (fits or enough)(each)]
    if not found and fail:
        kinds = ("parameters", "gradients", "optimizer", "activations")
        near = min(tried, key=lambda each: needs(each, model), default=None)
        most = max(kinds, key=lambda kind: getattr(near.memory, kind)) if near else "none"
        raise ValueError(f"no plan fits: {most}")

    def worst(choice):
        return as_choice(model, cluster, replace(choice.plan, overlap=False))

    return sorted(found, key=lambda each: key(worst(each)), reverse=reverse)[:count]


@mistake("16.5", says="a plan does not fit")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, count, fits=lambda choice: True)


@mistake("16.5", says="a plan fills more of the memory than can be used")
def best_plans(model, cluster, batch, count=5):
    return search(
        model, cluster, batch, count, fits=lambda each: needs(each, model) <= cluster.memory
    )


@mistake("16.5", says="the units that ZeRO-3 has whole for a moment are left out")
def best_plans(model, cluster, batch, count=5):
    limit = USABLE * cluster.memory
    return search(model, cluster, batch, count, fits=lambda each: each.memory.total <= limit)


@mistake("16.5", says="more plans come back than were asked for")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, None)


@mistake("16.5", says="a search without a plan that fits")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, count, fail=False)


def complaining(words, model, cluster, batch, count):
    """The right answer, but for what it says where no plan fits."""
    found = search(model, cluster, batch, count, fail=False)
    tried = search(model, cluster, batch, None, fits=lambda choice: True) if not found else []
    if not found:
        raise ValueError(words(tried) if tried else "no layout is possible")
    return found


@mistake("16.5", says="no kind of bytes is named")
def best_plans(model, cluster, batch, count=5):
    return complaining(lambda tried: "too large", model, cluster, batch, count)
