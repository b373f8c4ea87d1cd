"""A Trainer configuration as a DeepSpeed JSON, and as a call of FSDP2."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared.ecosystem.defaults import DEFAULTS
from shared.errors import InputError

Arguments = Mapping[str, Any]
Model = TypeVar("Model", bound=nn.Module)


def deepspeed_config(arguments: Arguments, hidden_size: int) -> dict[str, Any]:
    """The configuration under which DeepSpeed alone trains as the Trainer would, every state cut.

    Without a scheduler: DeepSpeed's WarmupDecayLR is a step behind the Trainer's "linear".
    """
    a = {**DEFAULTS, **arguments}
    if a["weight_decay"]:
        raise InputError(
            f"weight_decay {a['weight_decay']}: the Trainer leaves biases and norms out of it, and"
            " a JSON has one decay for all parameters; give DeepSpeed an optimizer with two groups"
        )
    return {
        "train_micro_batch_size_per_gpu": a["per_device_train_batch_size"],
        "gradient_accumulation_steps": a["gradient_accumulation_steps"],
        "gradient_clipping": a["max_grad_norm"],
        "bf16": {"enabled": a["bf16"]},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": hidden_size**2,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": a["learning_rate"],
                "betas": [a["adam_beta1"], a["adam_beta2"]],
                "eps": a["adam_epsilon"],
                "weight_decay": 0.0,
                "torch_adam": True,
            },
        },
    }


def shard_as_trainer(arguments: Arguments, model: Model) -> Model:
    """Apply `fully_shard` as the Trainer's fsdp arguments say; returns the model."""
    options = arguments.get("fsdp_config") or {}
    names = options.get("transformer_layer_cls_to_wrap", [])
    names = [names] if isinstance(names, str) else names
    there = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in names if name not in there]:
        raise InputError(f"transformer_layer_cls_to_wrap: the model has no {', '.join(missing)}")
    half = torch.bfloat16 if arguments.get("bf16", False) else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half)
    again = options.get("reshard_after_forward", True)
    for module in reversed(list(model.float().modules())):  # inner ones first; float32 masters
        if type(module).__name__ in names and module is not model:
            fully_shard(module, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mp_policy=policy)  # the root: as torch decides, it stays whole
    return model
