"""A stage of this room by its number, with the settings of lesson 04's reference run."""

from typing import Any

import torch
from torch import nn

from shared.errors import InputError
from shared.sharding.stage3 import ZeroStage3
from shared.sharding.stages import ZeroStage1, ZeroStage2

# What reference_optimizer takes; see there for the epsilon.
SETTINGS: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.98), "eps": 1e-5, "weight_decay": 0.01}


def build_zero(stage: int, model: nn.Module, **settings: Any) -> ZeroStage1:
    """The stage's optimizer over torch's AdamW. Raises ValueError for a stage that is none."""
    if stage == 3:
        return ZeroStage3(model, torch.optim.AdamW, **settings)
    if stage not in (1, 2):
        raise InputError(f"ZeRO by hand has the stages 1, 2 and 3, not {stage}")
    kind = ZeroStage1 if stage == 1 else ZeroStage2
    return kind(model.parameters(), torch.optim.AdamW, **settings)
