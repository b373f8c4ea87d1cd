"""Wrong answers to lesson 16, each with the words that the check must say to it."""

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from shared.data.rows import NO_TARGET, own_rows
from shared.ddp.averaging import average_flat, sum_flat
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


@mistake("16.1", says="order is not used")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    refuse({"dp": dp, "tp": tp, "pp": pp}, world_size, order)
    ranks = torch.arange(dp * tp * pp).view(pp, dp, tp)
    return {
        "tp": ranks.reshape(-1, tp).tolist(),
        "dp": ranks.transpose(1, 2).reshape(-1, dp).tolist(),
        "pp": ranks.permute(1, 2, 0).reshape(-1, pp).tolist(),
    }


@mistake("16.1", says="dp is always the outermost axis")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    refuse({"dp": dp, "tp": tp, "pp": pp}, world_size, order)
    inner = [axis for axis in order if axis != "dp"]
    return right.build_mesh(dp, tp, pp, world_size, ("dp", *inner))


@mistake("16.1", says="dp has the size of pp")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    refuse({"dp": dp, "tp": tp, "pp": pp}, world_size, order)
    return right.build_mesh(pp, tp, dp, world_size, order)


@mistake("16.1", says="a group holds the ranks that share their place on the axis")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    refuse(sizes, world_size, order)
    ranks = torch.arange(dp * tp * pp).view([sizes[axis] for axis in order])
    return {
        axis: [place.flatten().tolist() for place in ranks.unbind(i)]
        for i, axis in enumerate(order)
    }


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


@mistake("16.1", says="a rank is in no group of an axis")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    groups = right.build_mesh(dp, tp, pp, world_size, order)
    return {axis: lists[:1] for axis, lists in groups.items()}


@mistake("16.1", says="an axis with one place has no groups")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    groups = right.build_mesh(dp, tp, pp, world_size, order)
    return {axis: [group for group in lists if len(group) > 1] for axis, lists in groups.items()}


@mistake("16.1", says="the ranks of a group are not in the order of their places")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    groups = right.build_mesh(dp, tp, pp, world_size, order)
    return {axis: [group[::-1] for group in lists] for axis, lists in groups.items()}


@mistake("16.1", says="the groups of an axis are not in the order of their first ranks")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    refuse(sizes, world_size, order)
    ranks = torch.arange(dp * tp * pp).view([sizes[axis] for axis in order])
    return {
        axis: ranks.movedim(i, 0).reshape(sizes[axis], -1).T.flip(0).tolist()
        for i, axis in enumerate(order)
    }


@mistake("16.1", says="the keys are not the three axes")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    return list(right.build_mesh(dp, tp, pp, world_size, order).values())


@mistake("16.1", says="world_size 8 for 6 places is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    return right.build_mesh(dp, tp, pp, None, order)


@mistake("16.1", says="world_size 4 for 6 places is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    if world_size is not None and dp * tp * pp < world_size:
        raise ValueError(f"{dp * tp * pp} places leave some of {world_size} ranks without work")
    return right.build_mesh(dp, tp, pp, None, order)


@mistake("16.1", says="dp -2 and pp -3 is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    if dp * tp * pp < 1:
        raise ValueError(f"{dp} x {tp} x {pp} places")
    return right.build_mesh(abs(dp), abs(tp), abs(pp), world_size, order)


@mistake("16.1", says="the order ('pp', 'tp') is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    order = [*(axis for axis in AXES if axis not in order), *order]
    return right.build_mesh(dp, tp, pp, world_size, order)


@mistake("16.1", says="dp has the size of tp")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    refuse({"dp": dp, "tp": tp, "pp": pp}, world_size, order)
    return right.build_mesh(tp, dp, pp, world_size, order)


@mistake("16.1", says="tp has the size of pp")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    refuse({"dp": dp, "tp": tp, "pp": pp}, world_size, order)
    return right.build_mesh(dp, pp, tp, world_size, order)


@mistake("16.1", says="the axis is moved to the front")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    refuse(sizes, world_size, order)
    ranks = torch.arange(dp * tp * pp).view([sizes[axis] for axis in order])
    return {
        axis: ranks.movedim(i, 0).reshape(-1, sizes[axis]).tolist() for i, axis in enumerate(order)
    }


@mistake("16.1", says="the groups of every axis are neighbouring ranks")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    refuse(sizes, world_size, order)
    ranks = torch.arange(dp * tp * pp)
    return {axis: ranks.reshape(-1, sizes[axis]).tolist() for axis in order}


@mistake("16.1", says="world_size 12 for 6 places is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    if world_size is not None and world_size % (dp * tp * pp):
        raise ValueError(f"{world_size} ranks for {dp * tp * pp} places")
    return right.build_mesh(dp, tp, pp, None, order)


@mistake("16.1", says="world_size 3 for 6 places is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    if world_size is not None and (world_size < 1 or dp * tp * pp % world_size):
        raise ValueError(f"{world_size} ranks for {dp * tp * pp} places")
    return right.build_mesh(dp, tp, pp, None, order)


@mistake("16.1", says="it asks for a process group")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    world_size = dist.get_world_size() if world_size is None else world_size
    return right.build_mesh(dp, tp, pp, world_size, order)


@mistake("16.1", says="order was changed in place")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    groups = right.build_mesh(dp, tp, pp, world_size, order)
    if isinstance(order, list):
        order.reverse()
    return groups


@mistake("16.1", says="world_size 0 for 6 places is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    return right.build_mesh(dp, tp, pp, world_size or None, order)


@mistake("16.1", says="pp 0 is accepted")
def build_mesh(dp, tp, pp, world_size=None, order=AXES):
    if min(dp, tp) < 1:
        raise ValueError(f"{dp} x {tp} places")
    return right.build_mesh(dp, tp, max(pp, 1), world_size, order)


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


@mistake("16.2", says="the second copy of a tied weight counts as well")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters, tied=False)
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="this rank's own gradients alone count")
def gradient_norm(parameters, tp=None, pp=None):
    return sum(split(parameters)).sqrt()


@mistake("16.2", says="the ranks' norms are added")
def gradient_norm(parameters, tp=None, pp=None):
    return summed(summed(sum(split(parameters)).sqrt(), tp), pp)


@mistake("16.2", says="the root is missing")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    return summed(summed(parts, tp) + copies, pp)


@mistake("16.2", says="the parts are not summed over tp")
def gradient_norm(parameters, tp=None, pp=None):
    return summed(sum(split(parameters)), pp).sqrt()


@mistake("16.2", says="the other stages' gradients do not count")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    return (summed(parts, tp) + copies).sqrt()


@mistake("16.2", says="the mean of the parts is taken")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    return summed(summed(parts, tp) / size_of(tp) + copies, pp).sqrt()


@mistake("16.2", says="what is not cut does not count")
def gradient_norm(parameters, tp=None, pp=None):
    parts, _ = split(parameters)
    return summed(summed(parts, tp), pp).sqrt()


@mistake("16.2", says="the sum runs over all ranks of the world")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    total = parts + copies / size_of(tp)
    if tp is not None or pp is not None:
        dist.all_reduce(total)
    return total.sqrt()


@mistake("16.2", says="something is sent although neither tp nor pp is given")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    if tp is None and pp is None:
        dist.all_reduce(torch.zeros(1))
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="squares or their sums are kept in 16 bits")
def gradient_norm(parameters, tp=None, pp=None):
    own = counting(parameters)
    kind = own[0].grad.dtype if own else torch.float32
    parts = sum((p.grad.square().sum() for p in own if hasattr(p, "cut_dim")), torch.zeros(()))
    copies = [p.grad.square().sum() for p in own if not hasattr(p, "cut_dim")]
    total = summed(parts.to(kind), tp) + sum(copies)
    return summed(total.to(kind), pp).sqrt()


@mistake("16.2", says="its .grad is None")
def gradient_norm(parameters, tp=None, pp=None):
    own = [p for p in parameters if not getattr(p, "tied_copy", False)]
    parts = squares(p for p in own if hasattr(p, "cut_dim"))
    copies = squares(p for p in own if not hasattr(p, "cut_dim"))
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="a rank that has no gradient at all has no sum")
def gradient_norm(parameters, tp=None, pp=None):
    own = counting(parameters)
    share = {True: 1.0, False: 1 / size_of(tp)}
    pieces = [p.grad.float().square().sum() * share[hasattr(p, "cut_dim")] for p in own]
    return summed(summed(torch.stack(pieces).sum(), tp), pp).sqrt()


@mistake("16.2", says="not every rank takes part in each message")
def gradient_norm(parameters, tp=None, pp=None):
    own = counting(parameters)
    if not own:
        return torch.zeros(())
    parts, copies = split(own)
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="a message for each parameter")
def gradient_norm(parameters, tp=None, pp=None):
    total = torch.zeros(())
    for p in counting(parameters):
        square = p.grad.float().square().sum()
        total += summed(square, tp) if hasattr(p, "cut_dim") else square
    return summed(total, pp).sqrt()


@mistake("16.2", says="whole gradients travel")
def gradient_norm(parameters, tp=None, pp=None):
    own, flat = counting(parameters), [torch.zeros(1)]
    flat += [p.grad.float().flatten() for p in own if hasattr(p, "cut_dim")]
    mine = torch.cat(flat)
    parts = [torch.empty_like(mine) for _ in range(size_of(tp))]
    if size_of(tp) > 1:
        dist.all_gather(parts, mine, group=tp)
    else:
        parts = [mine]
    copies = squares(p for p in own if not hasattr(p, "cut_dim"))
    return summed(torch.cat(parts).square().sum() + copies, pp).sqrt()


@mistake("16.2", says="gradients are changed")
def gradient_norm(parameters, tp=None, pp=None):
    own, norm = list(parameters), right.gradient_norm
    result = norm(own, tp, pp)
    for p in own:
        if p.grad is not None:
            p.grad.square_()
    return result


@mistake("16.2", says="it asks for a process group")
def gradient_norm(parameters, tp=None, pp=None):
    dist.get_world_size()
    return right.gradient_norm(parameters, tp, pp)


@mistake("16.2", says="the stages' norms are added")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    return summed((summed(parts, tp) + copies).sqrt(), pp)


@mistake("16.2", says="the largest of the stages' norms is taken")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    largest = (summed(parts, tp) + copies).sqrt()
    if size_of(pp) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=pp)
    return largest


@mistake("16.2", says="cut_dim 0 is taken for no cut")
def gradient_norm(parameters, tp=None, pp=None):
    own = counting(parameters)
    parts = squares(p for p in own if getattr(p, "cut_dim", None))
    copies = squares(p for p in own if not getattr(p, "cut_dim", None))
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="tied_copy = False is taken for a second copy")
def gradient_norm(parameters, tp=None, pp=None):
    own = [p for p in parameters if not hasattr(p, "tied_copy")]
    parts, copies = split(own)
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="the copies of the first stage alone count")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    if pp is not None and dist.get_rank(pp) > 0:
        copies = torch.zeros(())
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="None is given to torch.distributed as a group")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    if dist.is_initialized():
        dist.all_reduce(parts, group=tp)
    total = parts + copies
    if dist.is_initialized():
        dist.all_reduce(total, group=pp)
    return total.sqrt()


@mistake("16.2", says="the copies are this stage's alone")
def gradient_norm(parameters, tp=None, pp=None):
    parts, copies = split(parameters)
    if tp is not None or pp is not None:
        dist.all_reduce(parts)
    return (parts + copies).sqrt()


@mistake("16.2", says="several numbers travel in one message")
def gradient_norm(parameters, tp=None, pp=None):
    both = summed(torch.stack(split(parameters)), tp)
    return summed(both[0] + both[1] / size_of(tp), pp).sqrt()


@mistake("16.2", says="a gradient that was None is a tensor afterwards")
def gradient_norm(parameters, tp=None, pp=None):
    parameters = list(parameters)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    parts, copies = split(parameters)
    return summed(summed(parts, tp) + copies, pp).sqrt()


@mistake("16.2", says="a Python number comes back")
def gradient_norm(parameters, tp=None, pp=None):
    return right.gradient_norm(parameters, tp, pp).item()


@mistake("16.2", says="a number is a tensor of shape ()")
def gradient_norm(parameters, tp=None, pp=None):
    return right.gradient_norm(parameters, tp, pp).reshape(1)


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


@mistake("16.2b", says="gradients are scaled up to max_norm")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    scale(own, limited(max_norm) / (norm + 1e-6))
    return norm


@mistake("16.2b", says="the 1e-6 beside the norm is missing")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    scale(own, factor_of(norm, max_norm, eps=0.0))
    return norm


@mistake("16.2b", says="the second copy of a tied weight is not scaled")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    scale(counting(own), factor_of(norm, max_norm))
    return norm


@mistake("16.2b", says="what is not cut is not scaled")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    scale([p for p in own if hasattr(p, "cut_dim")], factor_of(norm, max_norm))
    return norm


@mistake("16.2b", says="the parameters come as a generator")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    norm = right.gradient_norm(parameters, tp, pp)
    scale(parameters, factor_of(norm, max_norm))
    return norm


@mistake("16.2b", says="no gradient is scaled")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    for p in own:
        if p.grad is not None:
            gradient = p.grad
            gradient = gradient * factor_of(norm, max_norm)
    return norm


@mistake("16.2b", says="they are to be scaled in place")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    for p in own:
        if p.grad is not None:
            p.grad = p.grad * factor_of(norm, max_norm)
    return norm


@mistake("16.2b", says="the norm of the clipped gradients")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    right.clip_gradients(own, max_norm, tp, pp)
    return right.gradient_norm(own, tp, pp)


@mistake("16.2b", says="each parameter is clipped by its own norm")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    for p in own:
        if p.grad is not None:
            scale([p], factor_of(p.grad.norm(), max_norm))
    return norm


@mistake("16.2b", says="each number is clipped, not the norm")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    for p in own:
        if p.grad is not None:
            p.grad.clamp_(-limited(max_norm), max_norm)
    return norm


@mistake("16.2b", says="each number is cut off at the factor")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    factor = factor_of(norm, max_norm).item()
    for p in own:
        if p.grad is not None:
            p.grad.clamp_(-factor, factor)
    return norm


@mistake("16.2b", says="max_norm is not used")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    scale(own, 1 / (norm + 1e-6))
    limited(max_norm)
    return norm


@mistake("16.2b", says="its .grad is None")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    own = list(parameters)
    norm = right.gradient_norm(own, tp, pp)
    for p in own:
        p.grad.mul_(factor_of(norm, max_norm))
    return norm


@mistake("16.2b", says="max_norm -1.5 is accepted")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    return right.clip_gradients(parameters, abs(max_norm), tp, pp)


@mistake("16.2b", says="max_norm is divided by the square of the norm")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    parameters = list(parameters)
    norm = right.gradient_norm(parameters, tp, pp)
    scale(parameters, factor_of(norm**2, max_norm))
    return norm


@mistake("16.2b", says="the norm lacks the parts of the other ranks of tp")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    parameters = list(parameters)
    norm = right.gradient_norm(parameters, pp=pp)
    scale(parameters, factor_of(norm, max_norm))
    return norm


@mistake("16.2b", says="the norm lacks the other stages")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    parameters = list(parameters)
    norm = right.gradient_norm(parameters, tp)
    scale(parameters, factor_of(norm, max_norm))
    return norm


@mistake("16.2b", says="the weights are scaled")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    parameters = list(parameters)
    norm = right.gradient_norm(parameters, tp, pp)
    factor = factor_of(norm, max_norm)
    scale(parameters, factor)
    for p in parameters:
        p.data.mul_(factor)
    return norm


@mistake("16.2b", says="a gradient that was None is a tensor afterwards")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    parameters = list(parameters)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return right.clip_gradients(parameters, max_norm, tp, pp)


@mistake("16.2b", says="a max_norm of 0 times the norm is refused")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    if not max_norm:
        raise ValueError("max_norm must be above 0")
    return right.clip_gradients(parameters, max_norm, tp, pp)


@mistake("16.2b", says="nothing comes back")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    right.clip_gradients(parameters, max_norm, tp, pp)


@mistake("16.2b", says="a Python number comes back")
def clip_gradients(parameters, max_norm, tp=None, pp=None):
    return right.clip_gradients(parameters, max_norm, tp, pp).item()


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


def of_replica(batch, pieces, targets):
    return sum(piece.num_tokens for piece in pieces)


def mean_of_replicas(pipeline, mesh):
    average_flat(gradients_of(pipeline), mesh.dp.group)


def add_over_tp(pipeline, mesh):
    sum_flat(gradients_of(pipeline), mesh.tp.group)


def mean_of_tied(pipeline, mesh):
    add_tied(pipeline, mesh)
    for parameter in pipeline.tied:
        parameter.grad /= mesh.pp.size


def own_loss(parts, mesh):
    """Without the other replicas' part."""
    loss = sum(parts, torch.zeros(()))
    dist.all_reduce(loss, group=mesh.pp.group)
    return loss


def loss_of_last_stage(parts, mesh):
    loss = sum(parts, torch.zeros(()))
    dist.all_reduce(loss, group=mesh.dp.group)
    return loss


def loss_where_there_is_one(parts, mesh):
    """Only ranks with a loss add it up, over the stages as well."""
    return add_loss(parts, mesh) if parts else torch.zeros(())


def stepping(says, **changed):
    """A known mistake: the right step with a piece exchanged."""
    mistake("16.3", says=says)(lambda *args: step(*args, **changed))


stepping(
    "the tied embedding's gradients are not added up over its stages",
    before_clip=(add_replicas,),
)
stepping(
    "gradients are divided by dp as well",
    before_clip=(add_tied, mean_of_replicas),
)
stepping(
    "each replica divides by its own targets",
    divisor=of_replica,
    before_clip=(add_tied, mean_of_replicas),
)
stepping(
    "each micro-batch divides by its own targets",
    divisor=lambda batch, pieces, targets: len(pieces) * (targets != NO_TARGET).sum(),
    before_clip=(add_tied, mean_of_replicas),
)
stepping(
    "positions without a target are counted in the divisor",
    divisor=lambda batch, pieces, targets: batch.targets.numel(),
)
stepping(
    "gradients are divided by the micro-batches as well",
    divisor=lambda batch, pieces, targets: batch.num_tokens * len(pieces),
)
stepping(
    "the replicas' gradients are not added up",
    before_clip=(add_tied,),
)
stepping(
    "gradients are added up over tp as well",
    before_clip=(add_tied, add_replicas, add_over_tp),
)
stepping(
    "the tied embedding has the mean of its stages' gradients",
    before_clip=(mean_of_tied, add_replicas),
)
stepping(
    "the norm is that of one replica's gradients",
    before_clip=(add_tied,),
    after_clip=(add_replicas,),
)
stepping(
    "the norm is taken before the tied embedding's gradients are added up",
    before_clip=(add_replicas,),
    after_clip=(add_tied,),
)
stepping("the last step's gradients are still there", begin=lambda pipeline, optimizer: None)
stepping("more micro-batches are in flight than 1F1B has", table=gpipe_schedule)
stepping("the loss is one replica's part", loss=own_loss)
stepping("the loss is known on the last stage alone", loss=loss_of_last_stage)
stepping("not every rank takes part in each message", loss=loss_where_there_is_one)


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


@mistake("16.3", says="the gradients are not clipped")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    return step(pipeline, optimizer, batch, mesh, num_micro_batches, math.inf, clip)


@mistake("16.3", says="gradients travel over dp more than once in a step")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    def mean(p):
        dist.all_reduce(p.grad, group=mesh.dp.group)
        p.grad /= mesh.dp.size

    trained = [p for p in pipeline.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(mean) for p in trained]
    try:
        return step(
            pipeline,
            optimizer,
            batch,
            mesh,
            num_micro_batches,
            max_norm,
            clip,
            divisor=lambda batch, pieces, targets: batch.num_tokens / mesh.dp.size,
            before_clip=(add_tied,),
            loss=lambda parts, mesh: add_loss(parts, mesh) / mesh.dp.size,
        )
    finally:
        for hook in hooks:
            hook.remove()


@mistake("16.3", says="the pipeline runs once for each micro-batch")
def train_step_3d(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    optimizer.zero_grad()
    table, parts = one_f_one_b_schedule(mesh.pp.size, 1), []

    def part_of_loss(logits, targets):
        losses = vocab_parallel_cross_entropy(logits, targets, mesh.tp.group)
        return losses.sum() / batch.num_tokens

    for piece in own_rows(batch, mesh.dp.index, mesh.dp.size, num_micro_batches):
        parts += pipeline.train_step(table, [piece.tokens], part_of_loss, [piece.targets])
    add_tied(pipeline, mesh)
    add_replicas(pipeline, mesh)
    norm = clip(pipeline.parameters(), max_norm, mesh.tp.group, mesh.pp.group)
    optimizer.step()
    return add_loss(parts, mesh), norm


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


@mistake("16.4a", says="what is computed again costs nothing")
def compute_and_bubble(layers, layer, head, num_micro_batches, chunks=1, recompute=False):
    return right.compute_and_bubble(layers, layer, head, num_micro_batches, chunks)


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


@mistake("16.4b", says="the latency is left out")
def tensor_parallel_seconds(vectors, layers, tp, num_micro_batches, cluster, recompute=False):
    quick = replace(cluster, latency=0.0)
    return right.tensor_parallel_seconds(vectors, layers, tp, num_micro_batches, quick, recompute)


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


@mistake("16.4c", says="gradients hide behind all backwards of a step")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    hidden = compute if zero == 3 else compute * num_micro_batches
    return right.data_parallel_seconds(size, dp, link, hidden, num_micro_batches, zero, overlap)


@mistake("16.4c", says="gradients hide behind a whole micro-batch")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    hidden = compute if zero == 3 else 1.5 * compute
    return right.data_parallel_seconds(size, dp, link, hidden, num_micro_batches, zero, overlap)


@mistake("16.4c", says="ZeRO-3's messages hide behind backward alone")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    hidden = 2 / 3 * compute if zero == 3 else compute
    return right.data_parallel_seconds(size, dp, link, hidden, num_micro_batches, zero, overlap)


@mistake("16.4c", says="overlap is not asked for")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    return right.data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero)


@mistake("16.4c", says="gradients travel with every micro-batch")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    return not_hidden(
        size, dp, link, compute, num_micro_batches, zero, overlap, times=num_micro_batches
    )


@mistake("16.4c", says="an all-reduce counts as one message")
def data_parallel_seconds(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    one = (dp - 1) / dp * size / link
    if zero > 0:
        return not_hidden(size, dp, link, compute, num_micro_batches, zero, overlap)
    return max(0.0, one - 2 / 3 * compute * overlap)


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


@mistake("16.5", says="a plan does not take all GPUs")
def best_plans(model, cluster, batch, count=5):
    def fewer(*question):
        return layouts(*question, sizes=lambda plan: plan.num_gpus <= cluster.gpus)

    return search(model, cluster, batch, count, plans=fewer)


@mistake("16.5", says="a layout that cannot be ends the search")
def best_plans(model, cluster, batch, count=5):
    def all_of_them(model, cluster, batch):
        for tp in range(1, cluster.gpus_per_node + 1):
            for pp in range(1, cluster.gpus // tp + 1):
                dp = cluster.gpus // (tp * pp)
                if dp * tp * pp == cluster.gpus and batch % dp == 0:
                    yield Plan(dp=dp, tp=tp, pp=pp)

    return search(model, cluster, batch, count, plans=all_of_them)


@mistake("16.5", says="tensor parallelism reaches over nodes")
def best_plans(model, cluster, batch, count=5):
    return search(
        model,
        cluster,
        batch,
        count,
        plans=lambda *question: layouts(*question, node=False),
    )


@mistake("16.5", says="a plan's step has another number of sequences")
def best_plans(model, cluster, batch, count=5):
    def left_over(*question):
        return layouts(*question, whole=False)

    return search(model, cluster, batch, count, plans=left_over)


@mistake("16.5", says="a plan fills more of the memory than can be used")
def best_plans(model, cluster, batch, count=5):
    return search(
        model, cluster, batch, count, fits=lambda each: needs(each, model) <= cluster.memory
    )


@mistake("16.5", says="the units that ZeRO-3 has whole for a moment are left out")
def best_plans(model, cluster, batch, count=5):
    limit = USABLE * cluster.memory
    return search(model, cluster, batch, count, fits=lambda each: each.memory.total <= limit)


@mistake("16.5", says="the slowest comes first")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, count, reverse=True)


@mistake("16.5", says="they are in the order of their memory")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, count, key=lambda choice: choice.memory.total)


@mistake("16.5", says="of equally fast plans the one with more memory comes first")
def best_plans(model, cluster, batch, count=5):
    key = lambda choice: (choice.time.total, -choice.memory.total)  # noqa: E731
    return search(model, cluster, batch, count, key=key)


@mistake("16.5", says="they are not in the order of their seconds")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, count, key=lambda choice: choice.time.compute)


@mistake("16.5", says="more plans come back than were asked for")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, None)


@mistake("16.5", says="the number of plans for count=1")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, 5)


@mistake("16.5", says="each layout comes once")
def best_plans(model, cluster, batch, count=5):
    best = {}
    for choice in search(model, cluster, batch, None):
        best.setdefault((choice.plan.dp, choice.plan.tp), choice)
    return [*best.values()][:count]


@mistake("16.5", says="a plan that fits and is faster is left out")
def best_plans(model, cluster, batch, count=5):
    def plain(plans):
        return [plan for plan in plans if plan.zero in (0, 1)]

    return search(model, cluster, batch, count, some=plain)


@mistake("16.5", says="a Choice has the numbers of another plan")
def best_plans(model, cluster, batch, count=5):
    found = search(model, cluster, batch, count)
    return [replace(each, time=found[0].time) for each in found]


@mistake("16.5", says="a search without a plan that fits")
def best_plans(model, cluster, batch, count=5):
    return search(model, cluster, batch, count, fail=False)


@mistake("16.5", says="a batch of 0")
def best_plans(model, cluster, batch, count=5):
    try:
        return search(model, cluster, batch, count)
    except ValueError:
        if batch == 0:
            return []
        raise


KINDS = ("parameters", "gradients", "optimizer", "activations")


def most_of(choice):
    """The kind of bytes that a plan needs most of."""
    return max(KINDS, key=lambda kind: getattr(choice.memory, kind))


def complaining(words, model, cluster, batch, count):
    """The right answer, but for what it says where no plan fits."""
    found = search(model, cluster, batch, count, fail=False)
    tried = search(model, cluster, batch, None, fits=lambda choice: True) if not found else []
    if not found:
        raise ValueError(words(tried) if tried else "no layout is possible")
    return found


@mistake("16.5", says="fewer plans fit than were asked for, and that is an error")
def best_plans(model, cluster, batch, count=5):
    found = search(model, cluster, batch, count)
    if len(found) < count:
        raise ValueError(f"{len(found)} plans fit, not {count}")
    return found


@mistake("16.5", says="nothing is found where some plans fit")
def best_plans(model, cluster, batch, count=5):
    def without_pipeline(*question):
        return (plan for plan in layouts(*question) if plan.pp == 1)

    return search(model, cluster, batch, count, plans=without_pipeline)


@mistake("16.5", says="the bytes of units that are whole for a moment")
def best_plans(model, cluster, batch, count=5):
    found = search(model, cluster, batch, count)
    whole = [gathered_bytes(model, each.plan) for each in found]
    return [
        replace(each, memory=replace(each.memory, gradients=each.memory.gradients + more))
        for each, more in zip(found, whole, strict=True)
    ]


@mistake("16.5", says="a plan that needs exactly what can be used is left out")
def best_plans(model, cluster, batch, count=5):
    limit = USABLE * cluster.memory
    return search(model, cluster, batch, count, fits=lambda each: needs(each, model) < limit)


@mistake("16.5", says="no kind of bytes is named")
def best_plans(model, cluster, batch, count=5):
    return complaining(lambda tried: "too large", model, cluster, batch, count)


@mistake("16.5", says="several kinds are named")
def best_plans(model, cluster, batch, count=5):
    return complaining(lambda tried: f"none of {KINDS} fits", model, cluster, batch, count)


@mistake("16.5", says="one kind is named for every model")
def best_plans(model, cluster, batch, count=5):
    return complaining(lambda tried: "too many optimizer states", model, cluster, batch, count)


@mistake("16.5", says="the kind is that of a plan that misses by far more")
def best_plans(model, cluster, batch, count=5):
    def farthest(tried):
        return most_of(max(tried, key=lambda each: needs(each, model)))

    return complaining(farthest, model, cluster, batch, count)


@mistake("16.5", says="a batch of -4")
def best_plans(model, cluster, batch, count=5):
    if batch == 0:
        raise ValueError("a batch of 0")
    try:
        return search(model, cluster, batch, count)
    except ValueError:
        if batch < 0:
            return []
        raise


@mistake("16.5", says="plans are ranked by seconds that hide messages")
def best_plans(model, cluster, batch, count=5):
    found = search(model, cluster, batch, None)
    return sorted(found, key=by_time)[:count]


@mistake("16.5", says="is found without gathered_bytes")
def best_plans(model, cluster, batch, count=5):
    def nearest(tried):
        return most_of(min(tried, key=lambda each: each.memory.total))

    return complaining(nearest, model, cluster, batch, count)
