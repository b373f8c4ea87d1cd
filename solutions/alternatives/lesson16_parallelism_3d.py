"""Right answers to lesson 16 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import itertools

import numpy as np
import torch
import torch.distributed as dist

from shared.data.rows import NO_TARGET, own_rows
from shared.pipeline.schedules import one_f_one_b_schedule
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from solutions.alternatives.plans import (
    left_by_stage,
    left_from_a_table,
    pace_in_a_loop,
    plans_by_products,
    plans_from_a_generator,
    reduces_by_kind,
    reduces_one_by_one,
    work_then_waiting,
)

# 16.1


def refuse(dp, tp, pp, world_size, order):
    if any(size <= 0 for size in (dp, tp, pp)):
        raise ValueError(f"a mesh of {dp} x {tp} x {pp} has no places")
    if world_size is not None and world_size != dp * tp * pp:
        raise ValueError(f"{world_size} ranks do not fill {dp * tp * pp} places")
    if len(order) != 3 or set(order) != {"dp", "tp", "pp"}:
        raise ValueError(f"not an order of dp, tp and pp: {order}")


def mesh_by_numpy(dp, tp, pp, world_size=None, order=("pp", "dp", "tp")):
    """A box of ranks, seen along each axis."""
    refuse(dp, tp, pp, world_size, order)
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    box = np.arange(dp * tp * pp).reshape(*(sizes[axis] for axis in order))
    return {
        axis: np.moveaxis(box, order.index(axis), -1).reshape(-1, sizes[axis]).tolist()
        for axis in sizes
    }


def mesh_by_coordinates(dp, tp, pp, world_size=None, order=("pp", "dp", "tp")):
    """Every rank's coordinates; who agrees in two of them is in one group."""
    refuse(dp, tp, pp, world_size, order)
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    places = itertools.product(*(range(sizes[axis]) for axis in order))
    found = {"tp": {}, "pp": {}, "dp": {}}
    for rank, place in enumerate(places):
        for i, axis in enumerate(order):
            others = place[:i] + place[i + 1 :]
            found[axis].setdefault(others, []).append(rank)
    return {axis: list(groups.values()) for axis, groups in found.items()}


# 16.2


def norm_in_two_sums(parameters, tp=None, pp=None):
    """Parts and copies apart, in float64 until the end."""
    sums = {True: torch.zeros((), dtype=torch.float64), False: torch.zeros((), dtype=torch.float64)}
    for p in parameters:
        if p.grad is None or getattr(p, "tied_copy", False):
            continue
        cut = getattr(p, "cut_dim", None) is not None
        sums[cut] += torch.sum(p.grad.double() ** 2)
    if tp is not None:
        dist.all_reduce(sums[True], group=tp)
    total = sums[True] + sums[False]
    if pp is not None:
        dist.all_reduce(total, group=pp)
    return total.sqrt().float()


def norm_by_gathering_numbers(parameters, tp=None, pp=None):
    """Torch's own norm on each rank, and the ranks' numbers gathered."""
    own = [p for p in parameters if p.grad is not None and not is_tied_copy(p)]
    cut = [p.grad.float() for p in own if hasattr(p, "cut_dim")]
    whole = [p.grad.float() for p in own if not hasattr(p, "cut_dim")]
    squares = [torch.nn.utils.get_total_norm(each).reshape(1) ** 2 for each in (cut, whole)]
    total = over(squares[0], tp) + squares[1]
    return over(total, pp)[0] ** 0.5


def is_tied_copy(p):
    return hasattr(p, "tied_copy") and p.tied_copy


def over(number, group):
    if group is None:
        return number
    found = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, number, group=group)
    return torch.stack(found).sum(0)


def norm_on_one_rank(parameters, tp=None, pp=None):
    """Copies count on the first rank of tp alone."""
    first = tp is None or dist.get_rank(tp) == 0
    total = 0.0
    for p in parameters:
        counts = p.grad is not None and not getattr(p, "tied_copy", False)
        if counts and (first or hasattr(p, "cut_dim")):
            total += p.grad.float().pow(2).sum().item()
    total = torch.tensor(total)
    for group in (pp, tp):
        if group is not None and group.size() > 1:
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return torch.sqrt(total)


# 16.2b


def norm_of_shared_copies(parameters, tp=None, pp=None):
    """A copy counts by its share on each rank of tp: one number goes through both groups."""
    total = torch.zeros(1)
    for p in parameters:
        if p.grad is not None and not getattr(p, "tied_copy", False):
            flat = p.grad.reshape(-1).float()
            copies = 1 if tp is None or hasattr(p, "cut_dim") else dist.get_world_size(tp)
            total += torch.dot(flat, flat) / copies
    for group in filter(None, (tp, pp)):
        dist.all_reduce(total, group=group)
    return total.sqrt()[0]


def clip_with_min(parameters, max_norm, tp=None, pp=None):
    """A number of Python as the factor."""
    if max_norm < 0:
        raise ValueError(f"cannot clip to {max_norm}")
    parameters = tuple(parameters)
    norm = norm_in_two_sums(parameters, tp, pp)
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for p in parameters:
        if p.grad is not None:
            p.grad *= factor
    return norm


def clip_if_larger(parameters, max_norm, tp=None, pp=None):
    """All at once, and only where there is something to do."""
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm = {max_norm}, which is below 0")
    own = [p for p in parameters if p.grad is not None]
    norm = norm_on_one_rank(own, tp, pp)
    if max_norm / (norm + 1e-6) < 1 and own:
        torch._foreach_mul_([p.grad for p in own], max_norm / (norm + 1e-6))
    return norm


# 16.3


def step_by_means(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    """A loss that is dp times as large and the mean over dp; replicas come before stages."""
    for p in pipeline.parameters():
        p.grad = None
    mine = own_rows(batch, mesh.dp.index, mesh.dp.size, num_micro_batches)
    scale = mesh.dp.size / (batch.targets != NO_TARGET).sum()
    losses = pipeline.train_step(
        one_f_one_b_schedule(mesh.pp.size, num_micro_batches),
        [rows.tokens for rows in mine],
        lambda logits, targets: scale * tp_losses(logits, targets, mesh).sum(),
        [rows.targets for rows in mine],
    )
    for p in pipeline.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=mesh.dp.group)
            p.grad /= mesh.dp.size
    for p in pipeline.tied:
        dist.all_reduce(p.grad, group=pipeline.tied[p])
    norm = clip(list(pipeline.parameters()), max_norm, mesh.tp.group, mesh.pp.group)
    optimizer.step()
    loss = torch.stack(losses).sum() / mesh.dp.size if losses else torch.tensor(0.0)
    dist.all_reduce(loss, group=mesh.dp.group)
    dist.broadcast(loss, mesh.pp.ranks[-1], group=mesh.pp.group)
    return loss, norm


def tp_losses(logits, targets, mesh):
    return vocab_parallel_cross_entropy(logits, targets, mesh.tp.group, NO_TARGET)


def step_with_sums_first(pipeline, optimizer, batch, mesh, num_micro_batches, max_norm, clip):
    """Sums of losses in backward; everything is divided by the number of targets afterwards."""
    optimizer.zero_grad(set_to_none=True)
    pieces = own_rows(batch, mesh.dp.index, mesh.dp.size, num_micro_batches)
    parts = pipeline.train_step(
        one_f_one_b_schedule(mesh.pp.size, len(pieces)),
        [piece.tokens for piece in pieces],
        lambda logits, piece: tp_losses(logits, piece.targets, mesh).sum(),
        pieces,
    )
    for p, stages in pipeline.tied.items():
        dist.all_reduce(p.grad, group=stages)
    own = [p.grad for p in pipeline.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in own])
    dist.all_reduce(flat, group=mesh.dp.group)
    flat /= batch.num_tokens
    for gradient, mean in zip(own, flat.split([x.numel() for x in own]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    norm = clip(pipeline.parameters(), max_norm, mesh.tp.group, mesh.pp.group)
    optimizer.step()
    everywhere = torch.tensor(sum((float(part) for part in parts), 0.0))
    dist.all_reduce(everywhere)  # of all ranks: each of tp has the same
    return everywhere.item() / mesh.tp.size / batch.num_tokens, norm.item()


ALTERNATIVES = {
    "16.1": [mesh_by_numpy, mesh_by_coordinates],
    "16.2": [norm_in_two_sums, norm_by_gathering_numbers, norm_on_one_rank, norm_of_shared_copies],
    "16.2b": [clip_with_min, clip_if_larger],
    "16.3": [step_by_means, step_with_sums_first],
    "16.4a": [work_then_waiting, pace_in_a_loop],
    "16.4b": [reduces_by_kind, reduces_one_by_one],
    "16.4c": [left_by_stage, left_from_a_table],
    "16.5": [plans_by_products, plans_from_a_generator],
}
