"""DeepSpeed's MoE layer beside ours: values, gradients, and what each hands to its messages."""

import contextlib
import io
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shared.measuring.largest import largest
from shared.measuring.traffic import count_traffic
from shared.mixture_of_experts.layer import MoELayer
from shared.mixture_of_experts.parallel import ExpertParallelLayer
from shared.model.layers import PositionwiseFeedForward
from shared.training.quiet_deepspeed import quiet_deepspeed

D_MODEL, D_FF, EXPERTS = 16, 32, 4


@dataclass
class Beside:
    """The largest differences, and bytes handed to all-to-alls in forward and backward."""

    output: float
    gradients: float
    ours: int
    theirs: int


def beside_deepspeed(rank: int, k: int, tokens: int = 21, lean: float = 0.0) -> Beside:
    """One forward and backward of both layers on tokens of each rank's own, nothing dropped.

    `lean` makes the router prefer the first expert, on all ranks. Call it in a forked rank: its
    standard error is closed, since DeepSpeed's import lets a compiler complain there.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.redirect_stdout(io.StringIO()):
        return _compared(rank, k, tokens, lean)


def _compared(rank: int, k: int, tokens: int, lean: float) -> Beside:
    deepspeed = quiet_deepspeed()
    ranks = dist.get_world_size()
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    layer = MoELayer([PositionwiseFeedForward(D_MODEL, D_FF) for _ in range(EXPERTS)], D_MODEL, k)
    theirs = _deepspeed_layer(layer, ranks, k)
    ours = ExpertParallelLayer(layer, dist.group.WORLD)
    torch.manual_seed(1 + rank)
    x, upstream = torch.randn(2, tokens, D_MODEL)
    with torch.no_grad():
        x = x + lean * layer.router.weight[0]
    inputs, sent, outputs = [x.clone().requires_grad_() for _ in range(2)], [], []
    for each, given in zip((ours, theirs), inputs, strict=True):
        with count_traffic() as traffic:
            y = each(given)
            y = y[0] if each is theirs else y
            y.backward(upstream)
        outputs.append(y)
        sent.append(traffic.bytes_of("all_to_all"))
    pairs = [(inputs[0], inputs[1]), (ours.router.weight, theirs.deepspeed_moe.gate.wg.weight)]
    experts = zip(
        ours.experts.values(), theirs.deepspeed_moe.experts.deepspeed_experts, strict=True
    )
    for mine, other in experts:
        pairs += zip(mine.parameters(), other.parameters(), strict=True)
    gaps = [(a.grad - b.grad).abs().max().item() for a, b in pairs]
    return Beside((outputs[0] - outputs[1]).abs().max().item(), largest(gaps), *sent)


def _deepspeed_layer(layer: MoELayer, ranks: int, k: int) -> Any:
    """Their layer with our numbers, and with what is random in it switched off."""
    from deepspeed.moe.layer import MoE

    theirs = MoE(
        D_MODEL,
        PositionwiseFeedForward(D_MODEL, D_FF),
        EXPERTS,
        ep_size=ranks,
        k=k,
        min_capacity=0,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    theirs.set_deepspeed_parallelism()
    theirs.deepspeed_moe.gate.wg.load_state_dict(layer.router.state_dict())
    first = EXPERTS // ranks * dist.get_rank()
    for i, expert in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
        expert.load_state_dict(layer.experts[first + i].state_dict())
    return theirs
