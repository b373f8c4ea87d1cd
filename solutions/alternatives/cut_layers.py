"""Lesson 14 in another style: linear layers and a Transformer's layer cut over ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shared.model.attention import MultiHeadAttention
from shared.model.layers import PositionwiseFeedForward
from shared.tensor_parallel.conjugates import copy_to_ranks, sum_over_ranks
from shared.tensor_parallel.marks import mark_cut
from shared.tensor_parallel.regions import own_random_numbers, split_region


def scattered(whole, dim, group):
    """This rank's part, from rank 0 of the group by a scatter: less travels."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if whole.shape[dim] % n != 0:
        raise ValueError(f"{whole.shape[dim]} and {n}")
    part = whole.detach().tensor_split(n, dim)[rank].contiguous().clone()
    if n > 1:
        parts = [p.contiguous() for p in whole.detach().tensor_split(n, dim)] if rank == 0 else None
        dist.scatter(part, parts, group=group, group_src=0)
    return part


class LinearOfPart(nn.Linear):
    """Column-parallel as an nn.Linear with fewer outputs."""

    def __init__(self, linear, group, enter):
        weight = scattered(linear.weight, 0, group)
        super().__init__(
            weight.shape[1], weight.shape[0], bias=linear.bias is not None, dtype=weight.dtype
        )
        self.entered = (lambda x: x) if enter is None else (lambda x: enter(x, group))
        self.weight.data = weight
        self.weight.requires_grad_(linear.weight.requires_grad)
        if linear.bias is not None:
            self.bias.data = scattered(linear.bias, 0, group)
            self.bias.requires_grad_(linear.bias.requires_grad)
        for part in self.parameters():
            mark_cut(part, 0)

    def forward(self, input):
        return super().forward(self.entered(input))


class RegisteredColumns(nn.Module):
    """Column-parallel with registered parameters and a product written out."""

    def __init__(self, linear, group, enter):
        super().__init__()
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        size, left = divmod(linear.out_features, n)
        if left:
            raise ValueError(f"{linear.out_features} outputs, {n} ranks")
        self.how = group, enter
        for name in ("weight", "bias"):
            whole = getattr(linear, name)
            if whole is None:
                self.register_parameter(name, None)
                continue
            numbers = whole.detach().clone()
            dist.broadcast(numbers, group=group, group_src=0)
            own = numbers[rank * size : (rank + 1) * size].clone()
            part = nn.Parameter(own, whole.requires_grad)
            mark_cut(part, 0)
            self.register_parameter(name, part)

    def forward(self, x):
        group, enter = self.how
        y = (x if enter is None else enter(x, group)) @ self.get_parameter("weight").t()
        return y if self.bias is None else y + self.bias


class RowsOfPart(nn.Module):
    """Row-parallel by a scatter; the bias by a broadcast."""

    def __init__(self, linear, group, leave):
        super().__init__()
        self.weight = nn.Parameter(
            scattered(linear.weight, 1, group), requires_grad=linear.weight.requires_grad
        )
        mark_cut(self.weight, 1)
        self.register_parameter("bias", None)
        if linear.bias is not None:
            bias = linear.bias.detach().clone()
            if dist.get_world_size(group) > 1:
                dist.broadcast(bias, group=group, group_src=0)
            self.bias = nn.Parameter(bias, linear.bias.requires_grad)
        self.join = lambda x: leave(x, group)

    def forward(self, x):
        y = self.join(torch.einsum("...i,oi->...o", x, self.weight))
        return y + self.bias if self.bias is not None else y


class InheritedRows(nn.Linear):
    """Row-parallel as an nn.Linear with fewer inputs, whose bias is added by itself."""

    def __init__(self, linear, group, leave):
        part = scattered(linear.weight, 1, group)
        kept = linear.bias is not None
        super().__init__(part.shape[1], part.shape[0], bias=kept, dtype=part.dtype)
        self.group, self.leave = group, leave
        self.weight = nn.Parameter(part, linear.weight.requires_grad)
        mark_cut(self.weight, 1)
        if kept:
            shared = linear.bias.detach().clone()
            dist.broadcast(shared, group=group, group_src=0)
            self.bias = nn.Parameter(shared, linear.bias.requires_grad)

    def forward(self, input):
        summed = self.leave(F.linear(input, self.weight), self.group)
        return summed if self.bias is None else summed.add(self.bias)


def evenly(block, mesh):
    """Refuse what does not fit; the number of ranks and their group."""
    if mesh.ndim > 1:
        raise ValueError("one axis, please")
    n = mesh.size()
    for each in block.modules():
        heads = getattr(each, "num_heads", n)
        inner = getattr(getattr(each, "linear1", None), "out_features", n)
        if heads % n or inner % n:
            raise ValueError(f"{heads} heads and {inner} features on {n} ranks")
    return n, mesh.get_group(0)


def same_norms(block, group):
    """Rank 0's numbers for what is not cut."""
    for name, each in block.named_parameters():
        if name.startswith("norm"):
            dist.broadcast(each.data, group=group, group_src=0)


def block_by_children(block, mesh):
    """Child by child, with the region that is given."""
    n, group = evenly(block, mesh)
    for child in block.children():
        if isinstance(child, MultiHeadAttention):
            for layer in ("w_q", "w_k", "w_v"):
                child._modules[layer] = LinearOfPart(child._modules[layer], group, None)
            child.w_o = RowsOfPart(child.w_o, group, sum_over_ranks)
            child.num_heads = child.num_heads // n
        elif isinstance(child, PositionwiseFeedForward):
            child.linear1 = LinearOfPart(child.linear1, group, None)
            child.linear2 = InheritedRows(child.linear2, group, sum_over_ranks)
        else:
            continue
        split_region(child, group, copy_to_ranks)
    same_norms(block, group)
    return block


class OwnAttention(MultiHeadAttention):
    """Attention whose inputs are copied in its own forward."""

    group: Any

    def forward(self, query, key, value, mask=None, causal=False):
        inputs = {id(x): copy_to_ranks(x, self.group) for x in (query, key, value)}
        query, key, value = (inputs[id(x)] for x in (query, key, value))
        if not (self.training and self.dropout):
            return super().forward(query, key, value, mask, causal)
        with own_random_numbers(self.group):
            return super().forward(query, key, value, mask, causal)


class OwnFeedForward(PositionwiseFeedForward):
    """A feed-forward network whose first layer copies; dropout with numbers of its own."""

    group: Any

    def forward(self, x):
        hidden = F.relu(self.linear1(x))
        if self.training and self.dropout.p:
            with own_random_numbers(self.group):
                hidden = self.dropout(hidden)
        return self.linear2(hidden)


def block_by_classes(block, mesh):
    """Modules that change their class: no hooks."""
    n, group = evenly(block, mesh)
    for child in [*block.children()]:
        if isinstance(child, MultiHeadAttention):
            child.__class__ = OwnAttention
            child.num_heads //= n
            for layer in "qkv":
                name = f"w_{layer}"
                setattr(child, name, RegisteredColumns(getattr(child, name), group, None))
            child.w_o = InheritedRows(child.w_o, group, sum_over_ranks)
        elif isinstance(child, PositionwiseFeedForward):
            child.__class__ = OwnFeedForward
            child.linear1 = RegisteredColumns(child.linear1, group, copy_to_ranks)
            child.linear2 = RowsOfPart(child.linear2, group, sum_over_ranks)
        child.group = group
    same_norms(block, group)
    return block
