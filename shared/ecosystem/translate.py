"""A Trainer configuration as a DeepSpeed JSON, and as a call of FSDP2."""

from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from shared.ecosystem.arguments import Arguments, checked
from shared.ecosystem.fsdp_options import FsdpOptions, fsdp_options
from shared.errors import InputError

Model = TypeVar("Model", bound=nn.Module)


def deepspeed_config(arguments: Arguments, hidden_size: int) -> dict[str, Any]:
    """The configuration under which DeepSpeed alone trains as the Trainer would, every state cut.

    Without a scheduler: DeepSpeed's WarmupDecayLR is a step behind the Trainer's "linear".
    Raises InputError for an argument that has an effect and no translation.
    """
    a = checked(arguments, of_optimizer=True)
    if a["weight_decay"]:
        raise InputError(
            f"weight_decay {a['weight_decay']}: the Trainer leaves biases and norms out of it, and"
            " a JSON has one decay for all parameters; give DeepSpeed an optimizer with two groups"
        )
    options = fsdp_options(a)
    if options.offload or options.checkpoint:
        raise InputError(
            "fsdp_config's offload and activation_checkpointing are FSDP's: DeepSpeed has"
            " offload_param and offload_optimizer, and checkpoints are the model's"
        )
    # torch's loss scaler, which the Trainer has without DeepSpeed
    scaler = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return {
        "train_micro_batch_size_per_gpu": a["per_device_train_batch_size"],
        "gradient_accumulation_steps": a["gradient_accumulation_steps"],
        "gradient_clipping": a["max_grad_norm"],
        "bf16": {"enabled": a["bf16"]},
        **({"fp16": {"enabled": True, **scaler}} if a["fp16"] else {}),
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
    """Apply `fully_shard` as the Trainer's fsdp arguments say; returns the model.

    Raises InputError for an argument that has an effect and no translation.
    """
    a, options = checked(arguments, of_optimizer=False), fsdp_options(arguments)
    if a["fp16"]:
        raise InputError("fp16 True: a call of FSDP2 has no loss scaler; take bf16, or lesson 09's")
    half = torch.bfloat16 if a["bf16"] else None
    given: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(half, half, half)}
    if options.offload:
        if not torch.accelerator.is_available():
            raise InputError("fsdp's offload: there is no accelerator here to offload from")
        given["offload_policy"] = CPUOffloadPolicy()
    for names, module in _units(model.float(), options):  # float32 masters
        unit = module
        if options.checkpoint:
            unit = checkpoint_wrapper(module, preserve_rng_state=False)
            for name in names:
                model.set_submodule(name, unit)
        fully_shard(unit, reshard_after_forward=options.reshard, **given)
    fully_shard(model, **given)  # the root: as torch decides, it stays whole
    return model


def _units(model: nn.Module, options: FsdpOptions) -> list[tuple[list[str], nn.Module]]:
    """The modules to shard, inner ones first, each with all its names in the model."""
    classes = options.classes
    if classes is None:
        classes = list(getattr(model, "_no_split_modules", None) or [])
    there = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in classes if name not in there]:
        raise InputError(f"transformer_layer_cls_to_wrap: the model has no {', '.join(missing)}")

    def is_unit(module: nn.Module) -> bool:
        if options.more_than is None:
            return type(module).__name__ in classes
        called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        return called and sum(p.numel() for p in module.parameters()) > options.more_than

    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    found = [(names[m], m) for m in model.modules() if m is not model and is_unit(m)]
    return found[::-1]
