"""Right answers to lesson 18 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from shared.mixture_of_experts.marks import is_expert
from shared.mixture_of_experts.routing import Routing
from solutions import lesson18_mixture_of_experts as right


def sorting_router(logits, k, bias=None):
    """Sorts all experts and cuts; the weights through the logits of the chosen alone."""
    if k < 1 or k > logits.size(1):
        raise ValueError(f"{k} of {logits.size(1)} experts")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    everything = torch.softmax(wide, 1)
    ranked = everything if bias is None else everything + bias
    chosen = ranked.argsort(1, descending=True)[:, :k]
    weights = wide.gather(1, chosen).softmax(1) if k > 1 else everything.gather(1, chosen)
    return Routing(chosen, weights, everything)


def plain_router(logits, k, bias=None):
    """Three named fields, whatever holds them; dense weights first."""
    num_experts = logits.shape[1]
    if k not in range(1, num_experts + 1):
        raise ValueError(f"k={k} and {num_experts} experts")
    p = logits.exp() if logits.dtype == torch.float64 else logits.float().exp()
    p = p / p.sum(1, keepdim=True)
    _, chosen = torch.topk(p if bias is None else p + bias, k)
    mask = torch.zeros_like(p).scatter(1, chosen, 1.0)
    dense = p * mask if k == 1 else p * mask / (p * mask).sum(1, keepdim=True)
    return SimpleNamespace(experts=chosen, weights=dense.gather(1, chosen), probabilities=p)


def one_hot_balance(routing, group=None):
    """Shares from one-hot vectors in floating point."""
    p = routing.probabilities
    chosen = nn.functional.one_hot(routing.experts, p.shape[1]).sum((0, 1)).to(p.dtype)
    if dist.is_initialized():
        dist.all_reduce(chosen, group=group)
    return p.shape[1] * torch.dot(chosen / chosen.sum(), p.mean(0))


def gathered_balance(routing, group=None):
    """Each choice brings the mean probability of its expert."""
    p, counts = routing.probabilities, routing.experts.flatten().bincount()
    counts = nn.functional.pad(counts, (0, p.shape[1] - len(counts)))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        parts = [torch.empty_like(counts) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, counts, group=group)
        counts = torch.stack(parts).sum(0)
    shares = counts.to(p.dtype) / counts.sum()
    return (p * shares).sum(1).mean() * p.shape[1]


class MaskedLayer(nn.Module):
    """One expert after the other, its tokens by a mask."""

    def __init__(self, experts, d_model, k):
        super().__init__()
        if k < 1 or k > len(experts):
            raise ValueError(f"{k} of {len(experts)}")
        self.router = nn.Linear(d_model, len(experts), bias=False)
        self.experts, self.k = nn.ModuleList(experts), k

    def forward(self, x):
        """Return the weighted sums."""
        rows = x.flatten(0, -2)
        self.routing = right.top_k_router(self.router(rows), self.k)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, column = (self.routing.experts == number).nonzero(as_tuple=True)
            weights = self.routing.weights[token, column, None].type_as(y)
            y = y.index_put((token,), weights * expert(rows[token]), accumulate=True)
        return y.unflatten(0, x.shape[:-1])


class GatheringLayer(MaskedLayer):
    """All outputs in one buffer, brought back by the inverse order."""

    def forward(self, x):
        """Return the weighted sums."""
        rows = x.reshape(-1, x.size(-1))
        self.routing = right.top_k_router(self.router(rows), self.k)
        flat = self.routing.experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        sizes = [int((flat == e).sum()) for e in range(len(self.experts))]
        pieces = rows.repeat_interleave(self.k, 0)[order].split(sizes)
        outputs = torch.cat([e(piece) for e, piece in zip(self.experts, pieces, strict=True)])
        back = outputs[torch.argsort(order)].view(len(rows), self.k, -1)
        return (back * self.routing.weights[..., None]).sum(1).to(x.dtype).view(x.shape)


def one_by_one_exchange(rows, send, receive, group=None):
    """The conjugate is the function itself, applied in backward by a hook of autograd."""

    class There(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return travel(x, send, receive)

        @staticmethod
        def backward(ctx, *gradients):
            return travel(gradients[0], receive, send)

    def travel(x, out, into):
        if len(out) == 1:
            return x.clone()
        came = torch.empty((sum(into), x.shape[1]), dtype=x.dtype, device=x.device)
        dist.all_to_all_single(came, x.contiguous(), into, out, group=group, async_op=True).wait()
        return came

    return There.apply(rows)


class Posted(torch.autograd.Function):
    """As torch has it in pairs: what is sent lies in a saved tensor."""

    @staticmethod
    def forward(ctx, rows, table, group):
        ctx.save_for_backward(table)
        ctx.group = group
        return Posted.post(rows, table[0].tolist(), table[1].tolist(), group)

    @staticmethod
    def backward(ctx, *gradients):
        (table,) = ctx.saved_tensors
        sent, received = table.tolist()
        return Posted.post(gradients[0], received, sent, ctx.group), None, None

    @staticmethod
    def post(rows, sent, received, group):
        """The message itself."""
        if dist.get_world_size(group) == 1:
            return rows + 0
        came = torch.zeros(sum(received), *rows.shape[1:]).to(rows)
        dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
        return came


def posted_exchange(rows, send, receive, group=None):
    """The Function above."""
    return Posted.apply(rows, torch.tensor([send, receive]), group)


class LoopingDispatcher:
    """Slices in place of an argsort."""

    def __init__(self, counts, group=None):
        n = dist.get_world_size(group)
        if len(counts) % n != 0:
            raise ValueError(f"{len(counts)} experts, {n} ranks")
        self.group, self.mine = group, counts.reshape(n, -1).contiguous()
        self.theirs = self.mine.clone()
        if n > 1:
            dist.all_to_all_single(self.theirs, self.mine, group=group)
        self.counts = self.theirs.sum(0)

    def dispatch(self, rows):
        """There."""
        came = right.exchange(
            rows, self.mine.sum(1).tolist(), self.theirs.sum(1).tolist(), self.group
        )
        parts = came.split(self.theirs.flatten().tolist())
        n, own = self.theirs.shape
        return torch.cat([parts[r * own + e] for e in range(own) for r in range(n)])

    def combine(self, outputs):
        """And back."""
        n, own = self.theirs.shape
        parts = outputs.split(self.theirs.t().flatten().tolist())
        by_rank = torch.cat([parts[e * n + r] for r in range(n) for e in range(own)])
        lists = self.theirs.sum(1).tolist(), self.mine.sum(1).tolist()
        return right.exchange(by_rank, *lists, self.group)


class IndexDispatcher:
    """The places of the rows as a table of indices."""

    def __init__(self, counts, group=None):
        ranks = dist.get_world_size(group)
        own, rest = divmod(counts.numel(), ranks)
        if rest:
            raise ValueError(f"{ranks} ranks do not divide {counts.numel()} experts")
        table = counts.clone()
        if ranks > 1:
            table = torch.empty_like(counts)
            dist.all_to_all_single(table, counts, group=group)
        ends = table.cumsum(0)
        order = [
            torch.arange(int(ends[r * own + e] - table[r * own + e]), int(ends[r * own + e]))
            for e in range(own)
            for r in range(ranks)
        ]
        self.order, self.counts = torch.cat(order), table.view(ranks, own).sum(0)
        self.lists = counts.view(ranks, own).sum(1).tolist(), table.view(ranks, own).sum(1).tolist()
        self.group = group

    def dispatch(self, rows):
        """There."""
        return right.exchange(rows, *self.lists, self.group).index_select(0, self.order)

    def combine(self, outputs):
        """And back."""
        back = torch.zeros_like(outputs).index_copy(0, self.order, outputs)
        return right.exchange(back, *self.lists[::-1], self.group)


def counting_capacity(experts, num_experts, capacity):
    """A dictionary of what is taken, choice by choice."""
    if capacity < 0:
        raise ValueError(f"capacity {capacity}")
    keep, taken = torch.zeros(experts.shape, dtype=torch.bool), {}
    for column in range(experts.shape[1]):
        for token, expert in enumerate(experts[:, column].tolist()):
            taken[expert] = taken.get(expert, 0) + 1
            keep[token, column] = taken[expert] <= capacity
    return keep


def sorted_capacity(experts, num_experts, capacity):
    """Each choice's place among those of its expert, by a stable sort."""
    if capacity < 0:
        raise ValueError(f"capacity of {capacity}: none can be negative")
    turns = experts.T.reshape(-1)
    order = turns.argsort(stable=True)
    starts = torch.searchsorted(turns[order].contiguous(), turns[order].contiguous())
    keep = torch.empty_like(turns, dtype=torch.bool)
    keep[order] = torch.arange(len(turns)) - starts < capacity
    return keep.view(experts.T.shape).T


def one_by_one_average(model, mesh):
    """A message for each parameter."""
    for p in model.parameters():
        if not p.requires_grad:
            continue
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad, group=mesh.get_group("dp") if is_expert(p) else None)
        p.grad.div_(mesh.size())


def divided_before(model, mesh):
    """Divided first; then sums along the axes: dp for all, ep for what is on all ranks."""
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        grad = grad / (mesh["dp"].size() * mesh["ep"].size())
        dist.all_reduce(grad, group=mesh["dp"].get_group())
        if not is_expert(p):
            dist.all_reduce(grad, group=mesh["ep"].get_group())
        p.grad = grad


ALTERNATIVES = {
    "18.1a": [sorting_router, plain_router],
    "18.1b": [one_hot_balance, gathered_balance],
    "18.2": [MaskedLayer, GatheringLayer],
    "18.3a": [one_by_one_exchange, posted_exchange],
    "18.3b": [LoopingDispatcher, IndexDispatcher],
    "18.4": [counting_capacity, sorted_capacity],
    "18.5": [one_by_one_average, divided_before],
}
assert set(ALTERNATIVES) == set(right.NOTES)
