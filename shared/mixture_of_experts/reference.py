"""Lesson 04's reference run with experts in the place of each feed-forward network."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shared.data.batching import Batch
from shared.mixture_of_experts.models import give_experts, routings, share_out
from shared.mixture_of_experts.parallel import average_gradients
from shared.mixture_of_experts.routing import balance_loss
from shared.model.transformer import Transformer
from shared.training.reference_run import Step, loss_of, reference_model, reference_optimizer, shard
from shared.training.schedules import set_learning_rate

BALANCE = 0.01


def expert_model(
    num_experts: int = 4, k: int = 2, dtype: torch.dtype = torch.float64
) -> Transformer:
    """The reference model, its networks as experts that begin alike, routers by a fixed seed."""
    model = reference_model(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        give_experts(model, num_experts, k, alike=True)
    return model


def expert_reference(
    mesh: DeviceMesh | None, dtype: torch.dtype = torch.float64, k: int = 2
) -> tuple[Transformer, Step]:
    """The model and its step: in this process alone, or over a mesh of "dp" and "ep".

    The step returns the mean loss per token of the global batch, without the balancing loss.
    """
    model = expert_model(k=k, dtype=dtype)
    rank, ranks = (0, 1) if mesh is None else (dist.get_rank(), mesh.size())
    if mesh is not None:
        share_out(model, mesh["ep"].get_group())
    optimizer = reference_optimizer(list(model.parameters()))

    def step(batch: Batch, rate: float) -> float:
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        loss = loss_of(model, shard(batch, rank, ranks), batch.num_tokens)
        even = sum(balance_loss(routing) for routing in routings(model))
        (ranks * loss + BALANCE * even).backward()  # the mean over ranks undoes the factor
        if mesh is not None:
            average_gradients(model, mesh)
            total = loss.detach().clone()
            dist.all_reduce(total)
            loss = total
        optimizer.step()
        return loss.item()

    return model, step
