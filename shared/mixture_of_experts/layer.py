"""A layer of experts in one process: each token is computed by the few it was sent to."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from shared.errors import InputError
from shared.mixture_of_experts.routing import Routing, loads, top_k_router


class MoELayer(nn.Module):
    """A router and its experts, in the place of a feed-forward network.

    Parameters are `router.weight` and those of `experts`. After a forward, `routing` has what the
    router decided, with its graph: the balancing loss is made of it.
    """

    def __init__(self, experts: Sequence[nn.Module], d_model: int, k: int) -> None:
        super().__init__()
        if not 1 <= k <= len(experts):
            raise InputError(
                f"k = {k} of {len(experts)} experts: take a k from 1 to {len(experts)}"
            )
        self.router = nn.Linear(d_model, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.k = k
        self.routing: Routing | None = None

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return for each token the weighted sum of its k experts' outputs.

        Each expert is called once, with its own tokens: with no rows if there are none, so that its
        parameters have a gradient, of zeros, on every rank that has them.
        """
        tokens = x.reshape(-1, x.shape[-1])
        self.routing = top_k_router(self.router(tokens), self.k)
        order, token = by_expert(self.routing.experts)
        counts = loads(self.routing.experts, len(self.experts))
        outputs = each_its_rows(self.experts, tokens[token], counts.tolist())
        weights = self.routing.weights.flatten()[order]
        return weighted_sum(outputs, weights, token, len(tokens)).view_as(x)


def by_expert(
    experts: Int[Tensor, "tokens k"],
) -> tuple[Int[Tensor, "choices"], Int[Tensor, "choices"]]:
    """The order that brings the choices (token by token) together by expert, and their tokens.

    Among the rows of an expert earlier tokens come first.
    """
    order = experts.flatten().argsort(stable=True)
    return order, order // experts.shape[1]


def each_its_rows(
    experts: Iterable[nn.Module], rows: Float[Tensor, "rows d_model"], counts: Sequence[int]
) -> Float[Tensor, "rows d_model"]:
    """Apply to each expert's rows, which lie together, that expert."""
    parts = rows.split(list(counts))
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


def weighted_sum(
    outputs: Float[Tensor, "choices d_model"],
    weights: Float[Tensor, "choices"],
    token: Int[Tensor, "choices"],
    num_tokens: int,
) -> Float[Tensor, "tokens d_model"]:
    """Add each choice's output, times its weight, to its token."""
    total = outputs.new_zeros(num_tokens, outputs.shape[-1])
    return total.index_add(0, token, weights.to(outputs.dtype)[:, None] * outputs)
