"""A second derivative through a message is one process's, or refused: never silently without it."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.long_context.exchange import _Exchange
from shared.long_context.ring import ring_attention
from shared.mixture_of_experts.dispatch import exchange
from shared.ranks.forked import run_ranks
from shared.tensor_parallel.conjugates import (
    copy_to_ranks,
    gather_sequence,
    scatter_sum,
    sum_over_ranks,
)
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy


def penalty(loss: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return gradient.square().sum()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tensor_parallel_errors(rank: int) -> list[float]:
    torch.manual_seed(0)
    x, first, second = draw(3, 4).requires_grad_(), draw(4, 6), draw(6, 4)
    whole = [nn.Parameter(first), nn.Parameter(second)]
    penalty((torch.tanh(x @ whole[0]) @ whole[1]).square().sum(), x).backward()
    own = [nn.Parameter(first.chunk(2, 1)[rank]), nn.Parameter(second.chunk(2, 0)[rank])]
    inside = torch.tanh(copy_to_ranks(x) @ own[0])
    penalty(sum_over_ranks(inside @ own[1]).square().sum(), x).backward()
    right = whole[0].grad.chunk(2, 1)[rank], whole[1].grad.chunk(2, 0)[rank]
    return [(p.grad - r).abs().max().item() for p, r in zip(own, right, strict=True)]


def sequence_parallel_error(rank: int) -> float:
    torch.manual_seed(1)
    x, weights = draw(1, 4, 3), [nn.Parameter(draw(3, 3)) for _ in range(2)]
    given = x.clone().requires_grad_()
    penalty(sum(torch.tanh(given @ w) for w in weights).square().sum(), given).backward()
    right, own = weights[rank].grad, nn.Parameter(weights[rank].detach().clone())
    part = x.chunk(2, 1)[rank].clone().requires_grad_()
    result = scatter_sum(torch.tanh(gather_sequence(part) @ own))
    penalty(result.square().sum(), part).backward()
    return (own.grad - right).abs().max().item()


def exchange_error(send) -> float:
    """What is sent away and back again is, for each number, as if it had stayed."""
    torch.manual_seed(2)
    x = draw(4, 2)
    found = []
    for way in (send, lambda x: x):
        given = x.clone().requires_grad_()
        penalty(torch.tanh(way(given)).square().sum(), given).backward()
        found.append(given.grad)
    return (found[0] - found[1]).abs().max().item()


def refused(loss: Tensor, x: Tensor) -> str:
    try:
        penalty(loss, x).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_second_derivative_is_that_of_one_process_or_refused():
    def errors(rank):
        counts = [1, 3] if rank == 0 else [3, 1]
        q = draw(1, 2, 4, 3).requires_grad_()
        logits = draw(4, 5).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, torch.arange(4)).square().sum()
        assert dist.get_world_size() == 2
        return [
            *tensor_parallel_errors(rank),
            sequence_parallel_error(rank),
            exchange_error(lambda x: _Exchange.apply(x, None, 0, 1)),
            exchange_error(lambda x: exchange(x, counts, counts)),
        ], [refused(ring_attention(q, q, q).square().sum(), q), refused(loss, logits)]

    for found, words in run_ranks(errors, 2):
        assert max(found) < 1e-12, found
        assert all("once_differentiable" in each for each in words), words
