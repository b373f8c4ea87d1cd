"""Bytes of what training keeps for each parameter, counted by kind."""

import torch
from torch import Tensor, nn

KINDS = (
    "weights",
    "gradients",
    "fp32 gradients",
    "master weights",
    "first moment (m)",
    "second moment (v)",
)
_STATES = {
    "master": "master weights",
    "exp_avg": "first moment (m)",
    "exp_avg_sq": "second moment (v)",
}


def bytes_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states that exist now; `KINDS` in that order.

    Counted over tensors, not estimated. Parameters of the optimizer that are not the model's are
    master weights, and their gradients fp32 gradients. The number of steps is
    left out, and so is what lives for a part of a step only: activations, casts.
    Raises ValueError for a state of another name.
    """
    found = dict.fromkeys(KINDS, 0)
    for parameter in model.parameters():
        found["weights"] += parameter.nbytes
        found["gradients"] += 0 if parameter.grad is None else parameter.grad.nbytes
    own = {id(parameter) for parameter in model.parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in own:
            found["master weights"] += parameter.nbytes
            found["fp32 gradients"] += 0 if parameter.grad is None else parameter.grad.nbytes
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and name != "step":
                if name not in _STATES:
                    raise ValueError(f"a state {name!r}: bytes_by_kind knows {list(_STATES)}")
                found[_STATES[name]] += value.nbytes
    return found
