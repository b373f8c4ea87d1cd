"""Wrong answers to lesson 16, each with the words that the check must say to it."""

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from shared.exercises.mistakes import mistake
from shared.planner.activations import (
    embedding_bytes,
    head_bytes,
    in_flight,
    kept_and_again,
    layer_bytes,
    score_bytes,
)
from shared.planner.limits import check_shape, misfits
from shared.planner.memory import gathered_bytes
from shared.planner.outcomes import FITTED, Choice, Memory, StepTime
from shared.planner.specs import STATE_BYTES, Plan
from shared.planner.variants import USABLE, variants
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


# 16.3 memory_per_rank


def numbers_on(model, plan, rank, layer=None, first=None, last=None, layers=None):
    """The parameters of a pipeline rank: cut and whole ones of its layers and ends."""
    layer = model.layer.on(plan.tp) if layer is None else layer
    layers = sum(plan.layers(model)[rank]) if layers is None else layers
    is_first = rank == 0 if first is None else first
    is_last = rank == plan.pp - 1 if last is None else last
    total = layers * layer
    if is_first:
        total += model.embeddings.on(plan.tp)
    if is_last:
        total += model.head.whole if model.tied and is_first else model.head.on(plan.tp)
    return total


def states_of(numbers, plan, since=(3, 2, 1), sizes=None, parts=None):
    """Bytes of parameters, gradients and optimizer; `since` is the stage that cuts each."""
    found = []
    for size, stage in zip(sizes or STATE_BYTES[plan.precision], since, strict=True):
        over = (parts or plan.dp) if plan.zero >= stage else 1
        found.append(size * -(-numbers // over))
    return found


def kept(model, plan, rank, alive=None, freed=True, again_times=None, ends=True):
    """Activations of a pipeline rank; `alive` replaces the micro-batches in flight."""
    each, again = kept_and_again(model, plan)
    layers = plan.layers(model)[rank]
    head = head_bytes(model, plan) if ends and rank == plan.pp - 1 else 0
    held = [count * each for count in layers]
    held[0] += embedding_bytes(model, plan) if ends and rank == 0 else 0
    held[-1] += head
    most = 0
    for *counts, chunk in in_flight(plan, rank):
        counts = counts if alive is None else [alive] * plan.chunks
        now = sum(n * size for n, size in zip(counts, held, strict=True))
        times = layers[chunk] > 0 if again_times is None else again_times(layers[chunk])
        gone = head if freed and chunk == plan.chunks - 1 else 0
        most = max(most, now, now - gone + times * again)
    return most


def kept_otherwise(
    model,
    plan,
    rank,
    moments_of=None,
    before=True,
    embeddings=lambda alive: alive[0],
    heads=lambda alive: alive[-1],
    freed_by=None,
    again_on=bool,
    each_stage=True,
    embedding_of=None,
):
    """Activations of a pipeline rank, with one thing taken for another."""
    each, again = kept_and_again(model, plan)
    layers = plan.layers(model)[rank]
    first = embedding_bytes(model, plan) if rank == 0 else embedding_of or 0
    head = head_bytes(model, plan) if rank == plan.pp - 1 else 0
    most = 0
    for *alive, chunk in in_flight(plan, rank if moments_of is None else moments_of):
        counts = sum(n * k for n, k in zip(alive, layers, strict=True))
        now = each * (counts if each_stage else sum(alive) * max(layers))
        now += first * embeddings(alive) + head * heads(alive)
        gone = freed_by(chunk) if freed_by else chunk == plan.chunks - 1
        then = now + again * again_on(layers[chunk]) - head * gone
        most = max(most, then, now if before else 0)
    return most


def memory(model, plan, numbers=numbers_on, states=states_of, activations=kept, fullest=True):
    """The right answer from its pieces, with one exchanged."""
    check_shape(model, plan)
    stages = []
    for rank in range(plan.pp):
        own = states(numbers(model, plan, rank), plan)
        stages.append(Memory(*own, activations(model, plan, rank), rank=rank))
    if not fullest:
        return replace(stages[0], stages=tuple(stages))
    return replace(max(stages, key=lambda each: each.total), stages=tuple(stages))


@mistake("16.3", says="the ends of the model, embeddings and head, are left out")
def memory_per_rank(model, plan):
    return memory(model, plan, lambda m, p, r: numbers_on(m, p, r, first=False, last=False))


@mistake("16.3", says="every rank has embeddings and head")
def memory_per_rank(model, plan):
    return memory(model, plan, lambda m, p, r: numbers_on(m, p, r, first=True, last=True))


@mistake("16.3", says="a matrix that is tied counts twice")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        more = model.tied and plan.pp == 1
        return numbers_on(model, plan, rank) + more * model.head.cut // plan.tp

    return memory(model, plan, numbers)


@mistake("16.3", says="the last stage has no output matrix")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        less = model.tied and plan.pp > 1 and rank == plan.pp - 1
        return numbers_on(model, plan, rank) - less * model.head.cut // plan.tp

    return memory(model, plan, numbers)


@mistake("16.3", says="tensor parallelism cuts everything")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        one = replace(plan, tp=1)
        return numbers_on(model, one, rank) // plan.tp

    return memory(model, plan, numbers)


@mistake("16.3", says="tensor parallelism cuts nothing")
def memory_per_rank(model, plan):
    return memory(model, plan, lambda m, p, r: numbers_on(m, replace(p, tp=1), r))


@mistake("16.3", says="every rank has all layers")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        return numbers_on(model, plan, rank, first=True, last=True, layers=model.num_layers)

    return memory(model, plan, numbers)


@mistake("16.3", says="every stage has num_layers // pp layers")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        return numbers_on(model, plan, rank, layers=model.num_layers // plan.pp)

    return memory(model, plan, numbers)


@mistake("16.3", says="everything is divided by the number of GPUs")
def memory_per_rank(model, plan):
    share = lambda m, p, r: m.num_parameters // p.num_gpus  # noqa: E731
    return memory(model, plan, share, lambda n, p: states_of(n, replace(p, zero=0)))


@mistake("16.3", says="ZeRO cuts nothing")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, replace(p, zero=0)))


@mistake("16.3", says="stage 1 of ZeRO cuts gradients as well")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, p, since=(3, 1, 1)))


@mistake("16.3", says="ZeRO cuts over all GPUs")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, p, parts=p.num_gpus))


@mistake("16.3", says="the optimizer's float32 weights are left out")
def memory_per_rank(model, plan):
    def states(numbers, plan):
        sizes = (2, 2, 8) if plan.precision == "mixed" else (4, 4, 8)
        return states_of(numbers, plan, sizes=sizes)

    return memory(model, plan, states=states)


@mistake("16.3", says="the precision is not used")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, p, sizes=(2, 2, 12)))


@mistake("16.3", says="the optimizer's parts are rounded down")
def memory_per_rank(model, plan):
    def states(numbers, plan):
        sizes, since = STATE_BYTES[plan.precision], (3, 2, 1)
        over = [plan.dp if plan.zero >= stage else 1 for stage in since]
        return [size * (numbers // n) for size, n in zip(sizes, over, strict=True)]

    return memory(model, plan, states=states)


@mistake("16.3", says="all micro-batches of a step are kept")
def memory_per_rank(model, plan):
    def activations(model, plan, rank):
        return kept(model, plan, rank, alive=plan.num_micro_batches)

    return memory(model, plan, activations=activations)


@mistake("16.3", says="one micro-batch is kept")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept(m, p, r, alive=1))


@mistake("16.3", says="more micro-batches are kept than a step has")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept(m, p, r, alive=p.pp - r))


@mistake("16.3", says="look at in_flight")
def memory_per_rank(model, plan):
    def activations(model, plan, rank):
        return kept(model, plan, rank, alive=min(plan.pp - rank, plan.num_micro_batches))

    return memory(model, plan, activations=activations)


@mistake("16.3", says="1F1B's min(p - s, m) is taken for every stage of a rank")
def memory_per_rank(model, plan):
    def activations(model, plan, rank):
        each, again = kept_and_again(model, plan)
        layers = plan.layers(model)[rank]
        head = head_bytes(model, plan) if rank == plan.pp - 1 else 0
        a_batch = sum(layers) * each + head
        a_batch += embedding_bytes(model, plan) if rank == 0 else 0
        now = min(plan.pp - rank, plan.num_micro_batches) * a_batch
        return max(now, now - head + again * bool(layers[-1]))

    return memory(model, plan, activations=activations)


@mistake("16.3", says="every stage keeps as many micro-batches as the first")
def memory_per_rank(model, plan):
    def activations(model, plan, rank):
        return kept(model, plan, rank, alive=min(plan.pp, plan.num_micro_batches))

    return memory(model, plan, activations=activations)


@mistake("16.3", says="stages are counted from the other end")
def memory_per_rank(model, plan):
    def activations(model, plan, rank):
        return kept(model, plan, rank, alive=min(rank + 1, plan.num_micro_batches))

    return memory(model, plan, activations=activations)


@mistake("16.3", says="sequence parallelism is not used")
def memory_per_rank(model, plan):
    def activations(model, plan, rank):
        return kept(model, replace(plan, sequence_parallel=False), rank)

    return memory(model, plan, activations=activations)


@mistake("16.3", says="what is computed again takes no memory")
def memory_per_rank(model, plan):
    return memory(
        model, plan, activations=lambda m, p, r: kept(m, p, r, again_times=lambda layers: 0)
    )


@mistake("16.3", says="all layers are computed again at once")
def memory_per_rank(model, plan):
    return memory(
        model, plan, activations=lambda m, p, r: kept(m, p, r, again_times=lambda layers: layers)
    )


@mistake("16.3", says="is still there when layers are computed again")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept(m, p, r, freed=False))


@mistake("16.3", says="what embeddings and head keep is left out")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept(m, p, r, ends=False))


@mistake("16.3", says="what comes back is the first rank")
def memory_per_rank(model, plan):
    return memory(model, plan, fullest=False)


@mistake("16.3", says="all ranks are added up")
def memory_per_rank(model, plan):
    found = memory(model, plan)
    kinds = ("parameters", "gradients", "optimizer", "activations")
    sums = [sum(getattr(each, kind) for each in found.stages) for kind in kinds]
    return Memory(*sums, stages=found.stages)


@mistake("16.3", says="there is not one Memory for each pipeline rank")
def memory_per_rank(model, plan):
    return replace(memory(model, plan), stages=())


@mistake("16.3", says="for 6 heads and 5 layers is accepted")
def memory_per_rank(model, plan):
    sizes = [model.num_heads, model.kv_heads, model.d_ff, model.vocab_size]
    if any(size % plan.tp for size in sizes):
        return replace(Memory(0, 0, 0, 0), stages=(Memory(0, 0, 0, 0),))
    return memory(model, plan)


@mistake("16.3", says="the embeddings are left out")
def memory_per_rank(model, plan):
    return memory(model, plan, lambda m, p, r: numbers_on(m, p, r, first=False))


@mistake("16.3", says="the head, norm and output matrix, is left out")
def memory_per_rank(model, plan):
    return memory(model, plan, lambda m, p, r: numbers_on(m, p, r, last=False))


@mistake("16.3", says="every rank has the embeddings")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        return numbers_on(model, plan, rank) + (rank > 0) * model.embeddings.on(plan.tp)

    return memory(model, plan, numbers)


@mistake("16.3", says="every rank has the head")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        return numbers_on(model, plan, rank) + (rank + 1 < plan.pp) * model.head.on(plan.tp)

    return memory(model, plan, numbers)


@mistake("16.3", says="tensor parallelism cuts all of a layer")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        return numbers_on(model, plan, rank, layer=sum(model.layer) // plan.tp)

    return memory(model, plan, numbers)


@mistake("16.3", says="stage 2 of ZeRO cuts parameters as well")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, p, since=(2, 2, 1)))


@mistake("16.3", says="ZeRO is a stage ahead")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, p, since=(2, 1, 1)))


@mistake("16.3", says="ZeRO is a stage behind")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, p, since=(4, 3, 2)))


@mistake("16.3", says="ZeRO begins at the wrong end")
def memory_per_rank(model, plan):
    return memory(model, plan, states=lambda n, p: states_of(n, p, since=(1, 2, 3)))


@mistake("16.3", says="bytes are no whole numbers")
def memory_per_rank(model, plan):
    def states(numbers, plan):
        over = [plan.dp if plan.zero >= stage else 1 for stage in (3, 2, 1)]
        sizes = STATE_BYTES[plan.precision]
        return [size * numbers / n for size, n in zip(sizes, over, strict=True)]

    return memory(model, plan, states=states)


@mistake("16.3", says="the first rank's in_flight is taken for every rank")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept_otherwise(m, p, r, moments_of=0))


@mistake("16.3", says="only the moments count when a layer is made again")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept_otherwise(m, p, r, before=False))


@mistake("16.3", says="the head is freed whichever stage")
def memory_per_rank(model, plan):
    return memory(
        model,
        plan,
        activations=lambda m, p, r: kept_otherwise(m, p, r, freed_by=lambda chunk: True),
    )


@mistake("16.3", says="a stage without a layer makes one again")
def memory_per_rank(model, plan):
    return memory(
        model,
        plan,
        activations=lambda m, p, r: kept_otherwise(m, p, r, again_on=lambda layers: True),
    )


@mistake("16.3", says="what the embeddings keep counts once")
def memory_per_rank(model, plan):
    return memory(
        model, plan, activations=lambda m, p, r: kept_otherwise(m, p, r, embeddings=lambda alive: 1)
    )


@mistake("16.3", says="what the head keeps counts once")
def memory_per_rank(model, plan):
    return memory(
        model, plan, activations=lambda m, p, r: kept_otherwise(m, p, r, heads=lambda alive: 1)
    )


@mistake("16.3", says="what the embeddings keep counts for every stage")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept_otherwise(m, p, r, embeddings=sum))


@mistake("16.3", says="what the head keeps counts for every stage")
def memory_per_rank(model, plan):
    return memory(model, plan, activations=lambda m, p, r: kept_otherwise(m, p, r, heads=sum))


@mistake("16.3", says="everything that is alive counts as the rank's largest stage")
def memory_per_rank(model, plan):
    return memory(
        model, plan, activations=lambda m, p, r: kept_otherwise(m, p, r, each_stage=False)
    )


@mistake("16.3", says="the rank with the most activations")
def memory_per_rank(model, plan):
    found = memory(model, plan)
    most = max(found.stages, key=lambda each: each.activations)
    return replace(most, stages=found.stages)


@mistake("16.3", says="what comes back is the last rank")
def memory_per_rank(model, plan):
    found = memory(model, plan)
    return replace(found.stages[-1], stages=found.stages)


@mistake("16.3", says="a Memory in stages does not say which pipeline rank")
def memory_per_rank(model, plan):
    found = memory(model, plan)
    return replace(found, stages=tuple(replace(each, rank=0) for each in found.stages))


@mistake("16.3", says="the outer Memory does not say which pipeline rank")
def memory_per_rank(model, plan):
    return replace(memory(model, plan), rank=0)


@mistake("16.3", says="of a matrix that is tied all is taken off")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        more = model.head.cut - model.head.cut // plan.tp
        return numbers_on(model, plan, rank) - more * (model.tied and plan.pp == 1)

    return memory(model, plan, numbers)


@mistake("16.3", says="the output matrix is taken off where it is not tied")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        return numbers_on(replace(model, tied=True), plan, rank)

    return memory(model, plan, numbers)


@mistake("16.3", says="first stage alone count")
def memory_per_rank(model, plan):
    def numbers(model, plan, rank):
        return numbers_on(model, plan, rank, layers=plan.layers(model)[rank][0])

    return memory(model, plan, numbers)


@mistake("16.3", says="bytes are rounded up: a part")
def memory_per_rank(model, plan):
    def states(numbers, plan):
        over = [plan.dp if plan.zero >= stage else 1 for stage in (3, 2, 1)]
        sizes = STATE_BYTES[plan.precision]
        return [-(-size * numbers // n) for size, n in zip(sizes, over, strict=True)]

    return memory(model, plan, states=states)


@mistake("16.3", says="every rank keeps what the embeddings keep")
def memory_per_rank(model, plan):
    def activations(model, plan, rank):
        own = kept(model, plan, rank)
        each = embedding_bytes(model, plan)
        first = kept_otherwise(model, plan, rank, embedding_of=each)
        return own if rank == 0 else first

    return memory(model, plan, activations=activations)


# 16.4 step_time


def work(
    model,
    plan,
    cluster,
    fitted,
    passes=3,
    again=True,
    head=True,
    memory=True,
    peak=None,
    head_passes=None,
    again_flops=("full", "selective"),
    again_bytes=True,
    fused=False,
    trips=2,
):
    """Seconds of compute of one micro-batch on each pipeline rank."""
    n = plan.micro_batch * model.seq_len
    kept_bytes = layer_bytes(model, plan)
    flops, moved = passes * model.layer_flops, trips * kept_bytes
    more, times = (0, 0), (plan.checkpoint in again_flops, again_bytes)
    if again and plan.checkpoint == "full":
        more = model.layer_flops, kept_bytes
    if again and plan.checkpoint == "selective" and (fused or not model.fused_attention):
        more = model.attention_flops, score_bytes(model, plan)
    flops, moved = flops + times[0] * more[0], moved + times[1] * more[1]
    rate = peak or cluster.peak_flops * cluster.achievable * fitted.matmul * plan.tp
    layer = n * flops / rate
    layer += fitted.traffic * moved / cluster.memory_bandwidth if memory else 0
    stages = [sum(layers) * layer for layers in plan.layers(model)]
    head_passes = head_passes or passes
    stages[-1] += head_passes * n * model.head_flops / rate if head else 0
    return stages


def vectors(model, plan):
    """Bytes of a micro-batch's vectors."""
    return (
        plan.micro_batch * model.seq_len * model.d_model * (2 if plan.precision == "mixed" else 4)
    )


def reduces(
    model, plan, cluster, fitted, count=4, more=2, ring=2.0, link=None, latency=None, layers=max
):
    """Seconds of one micro-batch's all-reduces."""
    if plan.tp == 1:
        return 0.0
    count += more if plan.checkpoint == "full" else 0
    rate = (link or cluster.link(plan.tp, 1)) * fitted.link
    each = ring * (plan.tp - 1) / plan.tp * vectors(model, plan) / rate
    each += cluster.latency if latency is None else latency
    return layers([sum(own) for own in plan.layers(model)]) * count * each


def passing(
    model,
    plan,
    cluster,
    fitted,
    ways=2,
    link=None,
    parts=None,
    chunks=None,
    stride=None,
    latency=None,
    share=None,
):
    """Seconds of what one micro-batch sends between stages."""
    if plan.pp == 1:
        return 0.0
    stride = stride or plan.num_gpus // plan.pp
    rate = (link or cluster.link(plan.pp, stride)) * (share or fitted.link)
    each = vectors(model, plan) / (parts or plan.tp) / rate
    each += cluster.latency if latency is None else latency
    return ways * (chunks or plan.chunks) * each


def most_parameters(model, plan):
    return max(numbers_on(model, plan, rank) for rank in range(plan.pp))


def exposed(
    model,
    plan,
    cluster,
    fitted,
    one,
    parameters=None,
    link=None,
    twice=2,
    hidden=True,
    often=False,
    share=None,
    least=0.0,
    behind_of=2 / 3,
    hides=(),
    anyway=False,
    zero3_of=1.0,
    zero2_every=True,
    zero2_hides_once=False,
    zero3_gathers=2,
    overlap=None,
):
    """Seconds of gradients and parameters that nothing hides; `one` is a micro-batch's compute."""
    if plan.dp == 1:
        return 0.0
    number = most_parameters(model, plan) if parameters is None else parameters
    rate = (link or cluster.link(plan.dp, plan.tp)) * (share or fitted.link)
    byte = (plan.dp - 1) / plan.dp * number / rate
    weight, gradient, _ = STATE_BYTES[plan.precision]
    overlap = plan.overlap if overlap is None else overlap
    behind = one if overlap and hidden else 0.0
    m = plan.num_micro_batches
    if plan.zero == 0:
        return (m if often else 1) * max(least, twice * gradient * byte - behind * behind_of)
    if plan.zero == 3:
        behind = one if anyway else behind
        return m * max(least, (zero3_gathers * weight + gradient) * byte - behind * zero3_of)
    times = m if (plan.zero == 2 and zero2_every) or often else 1
    if plan.zero in hides:
        return times * max(least, (gradient + weight / times) * byte - behind * behind_of)
    if plan.zero == 2 and zero2_hides_once:
        return max(least, times * gradient * byte - behind * behind_of) + weight * byte
    return times * max(least, gradient * byte - behind * behind_of) + weight * byte


def seconds(
    model,
    plan,
    cluster,
    fitted,
    compute=work,
    slowest=max,
    tensor=reduces,
    pipeline=passing,
    bubble=None,
    bubble_of=None,
    data=exposed,
    batches=None,
    flops=None,
    check=True,
):
    """The right answer from its pieces, with one exchanged."""
    if check:
        check_shape(model, plan)
    if plan.num_gpus > cluster.gpus and check:
        raise ValueError(f"{plan.num_gpus} GPUs of {cluster.gpus}")
    case = model, plan, cluster, fitted
    m = plan.num_micro_batches if batches is None else batches
    one = slowest(compute(*case))
    parts = m * one, m * tensor(*case), m * pipeline(*case)
    share = plan.bubble if bubble is None else bubble(plan)
    waits = share * (sum(parts) if bubble_of is None else bubble_of(*parts))
    done = model.flops if flops is None else flops(model, plan)
    done = done * model.seq_len * plan.batch / plan.num_gpus
    return StepTime(*parts, waits, data(*case, one), done, cluster.peak_flops)


@mistake("16.4", says="backward is left out")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, passes=1))


@mistake("16.4", says="backward counts as one forward")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, passes=2))


@mistake("16.4", says="what backward computes again is not counted")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, again=False))


@mistake("16.4", says="the output matrix is left out")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, head=False))


@mistake("16.4", says="compute is not shared over tp")
def step_time(model, plan, cluster, fitted=FITTED):
    rate = cluster.peak_flops * cluster.achievable * fitted.matmul
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, peak=rate))


@mistake("16.4", says="the mean of the stages is taken")
def step_time(model, plan, cluster, fitted=FITTED):
    mean = lambda stages: sum(stages) / len(stages)  # noqa: E731
    return seconds(model, plan, cluster, fitted, slowest=mean)


@mistake("16.4", says="one micro-batch is counted, not the step's")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, batches=1)


@mistake("16.4", says="achievable is not used")
def step_time(model, plan, cluster, fitted=FITTED):
    rate = cluster.peak_flops * fitted.matmul * plan.tp
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, peak=rate))


@mistake("16.4", says="the traffic of the GPU's memory is left out")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, memory=False))


@mistake("16.4", says="backward's all-reduces are left out")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, tensor=lambda *case: reduces(*case, count=2))


@mistake("16.4", says="an all-reduce sends everything twice")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, tensor=lambda *case: reduces(*case, ring=1.0))


@mistake("16.4", says="(t - 1) / t is missing")
def step_time(model, plan, cluster, fitted=FITTED):
    def whole(model, plan, *more):
        ring = 2 * plan.tp / max(1, plan.tp - 1)
        return reduces(model, plan, *more, ring=ring)

    return seconds(model, plan, cluster, fitted, tensor=whole)


@mistake("16.4", says="tensor parallelism goes over the link between nodes")
def step_time(model, plan, cluster, fitted=FITTED):
    outer = lambda *case: reduces(*case, link=cluster.outer)  # noqa: E731
    return seconds(model, plan, cluster, fitted, tensor=outer)


@mistake("16.4", says="what is computed again sends nothing")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, tensor=lambda *case: reduces(*case, more=0))


@mistake("16.4", says="the latency of messages is left out")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, tensor=lambda *case: reduces(*case, latency=0.0))


@mistake("16.4", says="the gradients that travel back are left out")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, pipeline=lambda *case: passing(*case, ways=1))


@mistake("16.4", says="stages are taken for neighbours inside a node")
def step_time(model, plan, cluster, fitted=FITTED):
    inner = lambda *case: passing(*case, link=cluster.inner)  # noqa: E731
    return seconds(model, plan, cluster, fitted, pipeline=inner)


@mistake("16.4", says="every rank of tp sends whole vectors")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, pipeline=lambda *case: passing(*case, parts=1))


@mistake("16.4", says="vectors pass a rank once")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, pipeline=lambda *case: passing(*case, chunks=1))


@mistake("16.4", says="(p - 1) / p is no bubble")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, bubble=lambda plan: (plan.pp - 1) / plan.pp)


@mistake("16.4", says="the bubble is taken as a share of the whole step")
def step_time(model, plan, cluster, fitted=FITTED):
    def share(plan):
        return (plan.pp - 1) / (plan.chunks * plan.num_micro_batches + plan.pp - 1)

    return seconds(model, plan, cluster, fitted, bubble=share)


@mistake("16.4", says="interleaving is left out")
def step_time(model, plan, cluster, fitted=FITTED):
    share = lambda plan: (plan.pp - 1) / plan.num_micro_batches  # noqa: E731
    return seconds(model, plan, cluster, fitted, bubble=share)


@mistake("16.4", says="the bubble is of compute alone")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, bubble_of=lambda compute, *messages: compute)


@mistake("16.4", says="the gradients of the whole model travel")
def step_time(model, plan, cluster, fitted=FITTED):
    def all_of_it(model, *case):
        return exposed(model, *case, parameters=model.num_parameters)

    return seconds(model, plan, cluster, fitted, data=all_of_it)


@mistake("16.4", says="the ranks of dp are taken for neighbours inside a node")
def step_time(model, plan, cluster, fitted=FITTED):
    inner = lambda *case: exposed(*case, link=cluster.inner)  # noqa: E731
    return seconds(model, plan, cluster, fitted, data=inner)


@mistake("16.4", says="an all-reduce counts as one reduce-scatter")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, twice=1))


@mistake("16.4", says="nothing is hidden")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, hidden=False))


@mistake("16.4", says="plan.overlap is not asked for")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, overlap=True))


@mistake("16.4", says="with ZeRO-2 gradients hide once a step")
def step_time(model, plan, cluster, fitted=FITTED):
    once = lambda *case: exposed(*case, zero2_hides_once=True)  # noqa: E731
    return seconds(model, plan, cluster, fitted, data=once)


@mistake("16.4", says="gradients travel with every micro-batch")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, often=True))


@mistake("16.4", says="ZeRO changes nothing")
def step_time(model, plan, cluster, fitted=FITTED):
    def plain(model, plan, *more):
        return exposed(model, replace(plan, zero=0), *more)

    return seconds(model, plan, cluster, fitted, data=plain)


@mistake("16.4", says="what is computed again counts as useful work")
def step_time(model, plan, cluster, fitted=FITTED):
    def flops(model, plan):
        again = plan.checkpoint == "full"
        return model.flops + again * model.num_layers * model.layer_flops

    return seconds(model, plan, cluster, fitted, flops=flops)


@mistake("16.4", says="the FLOPs are those of all GPUs together")
def step_time(model, plan, cluster, fitted=FITTED):
    all_of_them = lambda model, plan: model.flops * plan.num_gpus  # noqa: E731
    return seconds(model, plan, cluster, fitted, flops=all_of_them)


@mistake("16.4", says="65 GPUs of 64 is accepted")
def step_time(model, plan, cluster, fitted=FITTED):
    check_shape(model, plan)
    return seconds(model, plan, cluster, fitted, check=False)


@mistake("16.4", says="a layer's backward is taken for one forward")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model, plan, cluster, fitted, compute=lambda *case: work(*case, passes=2, head_passes=3)
    )


@mistake("16.4", says="the output matrix counts in forward alone")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, head_passes=1))


@mistake("16.4", says="the output matrix's backward is taken for one forward")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, head_passes=2))


@mistake("16.4", says="what backward computes again is no work")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, again_flops=()))


@mistake("16.4", says="a layer that is computed again is no work")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model, plan, cluster, fitted, compute=lambda *case: work(*case, again_flops=("selective",))
    )


@mistake("16.4", says="a layer that is computed again costs nothing")
def step_time(model, plan, cluster, fitted=FITTED):
    def compute(model, plan, *more):
        return work(model, plan, *more, again=plan.checkpoint != "full")

    return seconds(model, plan, cluster, fitted, compute=compute)


@mistake("16.4", says="scores that are computed again cost nothing")
def step_time(model, plan, cluster, fitted=FITTED):
    def compute(model, plan, *more):
        return work(model, plan, *more, again=plan.checkpoint != "selective")

    return seconds(model, plan, cluster, fitted, compute=compute)


@mistake("16.4", says="does not go through the memory once more")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model, plan, cluster, fitted, compute=lambda *case: work(*case, again_bytes=False)
    )


@mistake("16.4", says="attention that is fused is computed again")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, fused=True))


@mistake("16.4", says="goes through the memory once: forward writes")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, compute=lambda *case: work(*case, trips=1))


@mistake("16.4", says="the output matrix comes on top of the slowest stage")
def step_time(model, plan, cluster, fitted=FITTED):
    def on_top(*case):
        head = sum(work(*case)) - sum(work(*case, head=False))
        return [max(work(*case, head=False)) + head]

    return seconds(model, plan, cluster, fitted, compute=on_top)


@mistake("16.4", says="the first stage is taken for the slowest")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, slowest=lambda stages: stages[0])


@mistake("16.4", says="the last stage is taken for the slowest")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, slowest=lambda stages: stages[-1])


@mistake("16.4", says="all stages are added up")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, slowest=sum)


@mistake("16.4", says="the argument fitted is not used")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, FITTED)


@mistake("16.4", says="a number has 2 bytes in float32 as well")
def step_time(model, plan, cluster, fitted=FITTED):
    got = seconds(model, plan, cluster, fitted)
    if plan.precision == "mixed":
        return got
    half = got.tensor_parallel / 2 + plan.num_micro_batches * 2 * cluster.latency * (
        max(map(sum, plan.layers(model))) * (plan.tp > 1)
    )
    return replace(got, tensor_parallel=half)


@mistake("16.4", says="the layers of the whole model send")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model,
        plan,
        cluster,
        fitted,
        tensor=lambda *case: reduces(*case, layers=lambda own: sum(own)),
    )


@mistake("16.4", says="the mean of the stages sends")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model,
        plan,
        cluster,
        fitted,
        tensor=lambda *case: reduces(*case, layers=lambda own: sum(own) / len(own)),
    )


@mistake("16.4", says="stages are taken to stand tp apart")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model, plan, cluster, fitted, pipeline=lambda *case: passing(*case, stride=plan.tp)
    )


@mistake("16.4", says="the latency of the pipeline's messages is left out")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, pipeline=lambda *case: passing(*case, latency=0.0))


@mistake("16.4", says="the share of the link is not used for the pipeline")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, pipeline=lambda *case: passing(*case, share=1.0))


@mistake("16.4", says="v stages a rank are left out")
def step_time(model, plan, cluster, fitted=FITTED):
    share = lambda plan: (plan.pp - 1) / (plan.num_micro_batches + plan.pp - 1)  # noqa: E731
    return seconds(model, plan, cluster, fitted, bubble=share)


@mistake("16.4", says="the bubble has one slot too many")
def step_time(model, plan, cluster, fitted=FITTED):
    share = lambda plan: plan.pp / (plan.chunks * plan.num_micro_batches)  # noqa: E731
    return seconds(model, plan, cluster, fitted, bubble=share)


@mistake("16.4", says="the parameters of embeddings and head are left out")
def step_time(model, plan, cluster, fitted=FITTED):
    def layers_alone(model, plan, *more):
        number = max(map(sum, plan.layers(model))) * model.layer.on(plan.tp)
        return exposed(model, plan, *more, parameters=number)

    return seconds(model, plan, cluster, fitted, data=layers_alone)


@mistake("16.4", says="a matrix that is tied counts twice")
def step_time(model, plan, cluster, fitted=FITTED):
    def twice(model, plan, *more):
        ends = model.tied and plan.pp == 1
        number = most_parameters(model, plan) + ends * model.head.cut // plan.tp
        return exposed(model, plan, *more, parameters=number)

    return seconds(model, plan, cluster, fitted, data=twice)


@mistake("16.4", says="the mean rank's parameters travel")
def step_time(model, plan, cluster, fitted=FITTED):
    def mean(model, plan, *more):
        number = sum(numbers_on(model, plan, rank) for rank in range(plan.pp)) / plan.pp
        return exposed(model, plan, *more, parameters=number)

    return seconds(model, plan, cluster, fitted, data=mean)


@mistake("16.4", says="the ranks of dp are taken for neighbours: they")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model,
        plan,
        cluster,
        fitted,
        data=lambda *case: exposed(*case, link=cluster.link(plan.dp, 1)),
    )


@mistake("16.4", says="the share of the link is not used for dp")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, share=1.0))


@mistake("16.4", says="what is left can be below 0")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model, plan, cluster, fitted, data=lambda *case: exposed(*case, least=-float("inf"))
    )


@mistake("16.4", says="gradients hide behind a whole micro-batch")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, behind_of=1.0))


@mistake("16.4", says="the gradients hide behind all backwards of a step: 2/3 of one")
def step_time(model, plan, cluster, fitted=FITTED):
    def data(model, plan, *case):
        behind = 2 / 3 * (1 if plan.zero == 3 else plan.num_micro_batches)
        return exposed(model, plan, *case, behind_of=behind)

    return seconds(model, plan, cluster, fitted, data=data)


@mistake("16.4", says="ZeRO-3's messages alone are hidden")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, behind_of=0.0))


@mistake("16.4", says="the parameters that ZeRO-1 and 2 gather are hidden")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, hides=(1, 2)))


@mistake("16.4", says="the parameters that ZeRO-1 gathers are hidden")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, hides=(1,)))


@mistake("16.4", says="ZeRO-3's messages are hidden without overlap")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, anyway=True))


@mistake("16.4", says="ZeRO-3's messages hide behind backward alone")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, zero3_of=2 / 3))


@mistake("16.4", says="ZeRO-2 sends gradients once a step")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(
        model, plan, cluster, fitted, data=lambda *case: exposed(*case, zero2_every=False)
    )


@mistake("16.4", says="is refused")
def step_time(model, plan, cluster, fitted=FITTED):
    if plan.num_gpus != cluster.gpus:
        raise ValueError(f"{plan.num_gpus} GPUs of {cluster.gpus}")
    return seconds(model, plan, cluster, fitted)


@mistake("16.4", says="scores that are computed again do not go through the memory")
def step_time(model, plan, cluster, fitted=FITTED):
    def none(model, plan, *more):
        stages = work(model, plan, *more)
        if plan.checkpoint == "selective":
            stages = work(model, plan, *more, again_bytes=False)
        return stages

    return seconds(model, plan, cluster, fitted, compute=none)


@mistake("16.4", says="the output matrix is not shared over tp")
def step_time(model, plan, cluster, fitted=FITTED):
    def alone(*case):
        stages, bare = work(*case), work(*case, head=False)
        return [*stages[:-1], bare[-1] + (stages[-1] - bare[-1]) * plan.tp]

    return seconds(model, plan, cluster, fitted, compute=alone)


@mistake("16.4", says="dp's messages wait in the bubble as well")
def step_time(model, plan, cluster, fitted=FITTED):
    got = seconds(model, plan, cluster, fitted)
    return replace(got, bubble=got.bubble + plan.bubble * got.data_parallel)


@mistake("16.4", says="ZeRO-3 gathers parameters once a micro-batch")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, data=lambda *case: exposed(*case, zero3_gathers=1))


@mistake("16.4", says="the FLOPs are those of one sequence")
def step_time(model, plan, cluster, fitted=FITTED):
    return seconds(model, plan, cluster, fitted, flops=lambda model, plan: model.flops / plan.batch)


@mistake("16.4", says="a micro-batch is taken for one sequence")
def step_time(model, plan, cluster, fitted=FITTED):
    def one_sequence(*case):
        flops = [a - b for a, b in zip(work(*case), work(*case, peak=float("inf")), strict=True)]
        bytes_ = work(*case, peak=float("inf"))
        return [a / plan.micro_batch + b for a, b in zip(flops, bytes_, strict=True)]

    return seconds(model, plan, cluster, fitted, compute=one_sequence)


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
    return Choice(plan, right.memory_per_rank(model, plan), right.step_time(model, plan, cluster))


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
    return sorted(found, key=key, reverse=reverse)[:count]


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
