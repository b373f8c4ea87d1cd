"""Wrong answers to lesson 18, each with the words that the check must say to it."""

import copy
from typing import Any

import torch
import torch.distributed as dist

from shared.ddp.averaging import average_flat
from shared.exercises.mistakes import mistake
from shared.mixture_of_experts.layer import by_expert, each_its_rows, weighted_sum
from shared.mixture_of_experts.marks import is_expert
from shared.mixture_of_experts.routing import Routing, loads
from solutions import lesson18_mixture_of_experts as right

# 18.1a top_k_router


@mistake("18.1a", says="with k = 1 the weight is always 1")
def top_k_router(logits, k, bias=None):
    routing = right.top_k_router(logits, k, bias)
    weights = routing.weights
    return routing._replace(weights=weights / weights.sum(-1, keepdim=True))


@mistake("18.1a", says="the bias does not change who is chosen")
def top_k_router(logits, k, bias=None):
    return right.top_k_router(logits, k)


@mistake("18.1a", says="the most probable expert does not come first")
def top_k_router(logits, k, bias=None):
    routing = right.top_k_router(logits, k, bias)
    experts, order = routing.experts.sort(-1)
    return routing._replace(experts=experts, weights=routing.weights.gather(-1, order))


@mistake("18.1a", says="the probabilities have no graph")
def top_k_router(logits, k, bias=None):
    routing = right.top_k_router(logits, k, bias)
    return routing._replace(probabilities=routing.probabilities.detach())


@mistake("18.1a", says="k = 7 of 6 experts raises the wrong kind of error")
def top_k_router(logits, k, bias=None):
    if k < 1:
        raise ValueError(f"k = {k} of {logits.shape[-1]}")
    return right.top_k_router(logits, k, bias) if k < 6 else logits.topk(k)


# 18.1b balance_loss


@mistake("18.1b", says="the shares are this rank's alone")
def balance_loss(routing, group=None):
    counts = loads(routing.experts, routing.probabilities.shape[-1])
    return len(counts) * (counts / counts.sum() * routing.probabilities.mean(0)).sum()


@mistake("18.1b", says="even loads give 1 / E")
def balance_loss(routing, group=None):
    return right.balance_loss(routing, group) / routing.probabilities.shape[-1]


@mistake("18.1b", says="no gradient reaches the probabilities")
def balance_loss(routing, group=None):
    return right.balance_loss(routing, group).detach()


@mistake("18.1b", says="the ranks' counts differ in length")
def balance_loss(routing, group=None):
    n = routing.probabilities.shape[-1]
    counts = torch.bincount(routing.experts.flatten())
    if dist.is_initialized():
        dist.all_reduce(counts, group=group)
    return n * (counts / counts.sum() * routing.probabilities.mean(0)[: len(counts)]).sum()


# 18.2 MoELayer


class Layer(right.MoELayer):
    """The layer, in two parts that mistakes exchange."""

    routing: Any = None

    def apply_experts(self, rows, counts):
        return each_its_rows(self.experts, rows, counts)

    def weigh(self, outputs, order, token, shape):
        weights = self.routing.weights.flatten()[order]
        return weighted_sum(outputs, weights, token, len(self.routing.experts)).view(shape)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        self.routing = right.top_k_router(self.router(tokens), self.k)
        order, token = by_expert(self.routing.experts)
        counts = loads(self.routing.experts, len(self.experts)).tolist()
        return self.weigh(self.apply_experts(tokens[token], counts), order, token, x.shape)


@mistake("18.2", says="an expert computes rows that nobody sent to it")
class MoELayer(Layer):
    def apply_experts(self, rows, counts):
        which = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        every = torch.stack([expert(rows) for expert in self.experts])
        return every[which, torch.arange(len(rows))]


@mistake("18.2", says="weights that are float32 at least make float32 of 16-bit outputs")
class MoELayer(Layer):
    def weigh(self, outputs, order, token, shape):
        weighted = self.routing.weights.flatten()[order, None] * outputs
        total = outputs.new_zeros(len(self.routing.experts), outputs.shape[-1])
        return total.index_add(0, token, weighted).view(shape)


@mistake("18.2", says="the outputs are added up without their weights")
class MoELayer(Layer):
    def weigh(self, outputs, order, token, shape):
        return weighted_sum(outputs, torch.ones(len(token)), token, len(self.routing.experts)).view(
            shape
        )


@mistake("18.2", says="an expert without rows is not called")
class MoELayer(Layer):
    def apply_experts(self, rows, counts):
        parts = zip(self.experts, rows.split(counts), strict=True)
        return torch.cat([expert(part) for expert, part in parts if len(part)])


@mistake("18.2", says="routing has no graph")
class MoELayer(right.MoELayer):
    routing: Any = None

    def forward(self, x):
        y = super().forward(x)
        self.routing = Routing(*(each.detach() for each in self.routing))
        return y


@mistake("18.2", says="k = 4 of 3 is accepted")
class MoELayer(right.MoELayer):
    def __init__(self, experts, d_model, k):
        super().__init__(experts, d_model, min(k, len(experts)))


@mistake("18.2", says="copies of the experts are kept")
class MoELayer(right.MoELayer):
    def __init__(self, experts, d_model, k):
        super().__init__(copy.deepcopy(list(experts)), d_model, k)


# 18.3a exchange


def moved(rows, send, receive, group):
    came = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), receive, send, group=group)
    return came


def exchanging(forward, backward):
    """An autograd function from what is done to the rows and to the gradient."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, send, receive, group):
            ctx.given = send, receive, group
            return rows.clone() if len(send) == 1 else forward(rows, send, receive, group)

        @staticmethod
        def backward(ctx, *gradients):
            send, receive, group = ctx.given
            alone = len(send) == 1
            g = gradients[0] if alone else backward(gradients[0], send, receive, group)
            return g, None, None, None

    return Exchange.apply


def back(gradient, send, receive, group):
    return moved(gradient, receive, send, group)


@mistake("18.3a", says="no gradient reaches the rows")
def exchange(rows, send, receive, group=None):
    return moved(rows.detach(), send, receive, group)


@mistake("18.3a", says="backward hands on gradients of the rows that came")
def exchange(rows, send, receive, group=None):
    return exchanging(moved, lambda g, *lists: g)(rows, send, receive, group)


@mistake("18.3a", says="a message goes over all ranks")
def exchange(rows, send, receive, group=None):
    return exchanging(moved, lambda g, *lists: back(g, *lists[:2], None))(
        rows, send, receive, group
    )


@mistake("18.3a", says="every rank gets everybody's")
def exchange(rows, send, receive, group=None):
    def gathered(rows, send, receive, group):
        everyone: list[Any] = [None] * len(send)
        dist.all_gather_object(everyone, list(rows.split(send)), group)
        return torch.cat([parts[dist.get_rank(group)] for parts in everyone])

    return exchanging(gathered, back)(rows, send, receive, group)


@mistake("18.3a", says="the rows travel in another dtype")
def exchange(rows, send, receive, group=None):
    return right.exchange(rows.float(), send, receive, group).to(rows.dtype)


@mistake("18.3a", says="not every rank takes part in each message")
def exchange(rows, send, receive, group=None):
    return right.exchange(rows, send, receive, group) if sum(send) + sum(receive) else rows


# 18.3b Dispatcher


@mistake("18.3b", says="the rows lie by rank")
class Dispatcher(right.Dispatcher):
    def __init__(self, counts, group=None):
        super().__init__(counts, group)
        self.order = torch.arange(len(self.order))


@mistake("18.3b", says="undo the regrouping first")
class Dispatcher(right.Dispatcher):
    def combine(self, outputs):
        return right.exchange(outputs, self.receive, self.send, self.group)


@mistake("18.3b", says="counts has this rank's own rows")
class Dispatcher(right.Dispatcher):
    def __init__(self, counts, group=None):
        super().__init__(counts, group)
        self.counts = counts.view(len(self.send), -1)[dist.get_rank(group)]


@mistake("18.3b", says="counts has the rows by rank")
class Dispatcher(right.Dispatcher):
    def __init__(self, counts, group=None):
        super().__init__(counts, group)
        self.counts = torch.tensor(self.receive)


@mistake("18.3b", says="5 experts on 2 ranks are accepted")
class Dispatcher(right.Dispatcher):
    def __init__(self, counts, group=None):
        super().__init__(counts[: len(counts) - len(counts) % dist.get_world_size(group)], group)


# 18.4 within_capacity


@mistake("18.4", says="one choice more than its capacity")
def within_capacity(experts, num_experts, capacity):
    return right.within_capacity(experts, num_experts, capacity + 1 if capacity >= 0 else capacity)


@mistake("18.4", says="one choice less than its capacity")
def within_capacity(experts, num_experts, capacity):
    return right.within_capacity(experts, num_experts, capacity - (capacity > 0))


@mistake("18.4", says="a capacity of -1 is accepted")
def within_capacity(experts, num_experts, capacity):
    return right.within_capacity(experts, num_experts, max(0, capacity))


# 18.5 average_gradients


def by_kind(model, experts):
    """Gradients of the experts' parameters, or of the others; zeros where there are none."""
    chosen = [p for p in model.parameters() if p.requires_grad and is_expert(p) == experts]
    for p in chosen:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return [p.grad for p in chosen]


@mistake("18.5", says="a gradient that is None is left out of the message")
def average_gradients(model, mesh):
    experts = [p.grad for p in model.parameters() if is_expert(p) and p.grad is not None]
    average_flat(by_kind(model, False))
    average_flat(experts, mesh["dp"].get_group())
    for gradient in experts:
        gradient /= mesh["ep"].size()


@mistake("18.5", says="too large by the ranks of ep")
def average_gradients(model, mesh):
    average_flat(by_kind(model, True), mesh["dp"].get_group())
    average_flat(by_kind(model, False))


@mistake("18.5", says="a frozen parameter is given a gradient")
def average_gradients(model, mesh):
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    right.average_gradients(model, mesh)
