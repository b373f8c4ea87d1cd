"""What forked ranks do with the frameworks: train, count, resolve, be refused. See `ask`.

Every function runs on all ranks of a gloo group, on the CPU, with the rank's number first.
"""

import gc
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.distributed as dist
import transformers
from lightning_fabric import Fabric
from lightning_fabric.strategies import FSDPStrategy
from torch import nn
from transformers import (  # noqa: F401 - the Trainer would be imported late
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.distributed.configuration_utils import DistributedConfig

from lessons.lesson22_ecosystem.loops import LOOPS, QUIET, ZERO3, trainer
from shared.ecosystem.engines import forget_accelerate
from shared.ecosystem.task import Task, count_tokens
from shared.measuring.traffic import count_traffic
from shared.training.quiet_deepspeed import quiet_deepspeed
from shared.training.reference_run import reference_model, reference_optimizer

deepspeed = quiet_deepspeed()
from deepspeed.pipe import PipelineModule  # noqa: E402

from lessons.lesson22_ecosystem.conflicts import conflicts, cuts, resolved  # noqa: E402, F401

transformers.logging.set_verbosity_error()
logging.getLogger("lightning_fabric").setLevel(logging.ERROR)


def warm_up() -> None:
    """Import before the ranks are forked what each of them would import."""
    import torch._dynamo
    import torch.distributed.fsdp

    with mock.patch.object(torch, "compile", lambda fn=None, **_: fn or (lambda inner: inner)):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    reference_optimizer(list(nn.Linear(1, 1).parameters()))
    gc.collect()
    gc.freeze()  # a rank that counts its tensors looks at its own objects alone


def forget() -> None:
    """Between two trainings on the same ranks: what Accelerate and the Trainer keep globally."""
    forget_accelerate()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()


def follow(rank: int, engine: str, num_steps: int) -> dict[str, Any]:
    """The reference run through a loop: losses, and what was counted of its last step."""
    with count_traffic() as traffic:
        task = Task(num_steps, traffic)
        LOOPS[engine](task)
    messages, sent = task.messages()
    calls = traffic.calls[task.marks[-2] : task.marks[-1]]
    seen = {"losses": task.losses(), "messages": messages, "bytes": sent, "kept": task.kept}
    return seen | {"wrapped": task.wrapped, "ops": [(c.op, c.num_bytes) for c in calls]}


def with_arguments(rank: int, changes: list[list[Any]], num_steps: int) -> list[list[float]]:
    """The Trainer's curves: each with some arguments changed, and with what of ours is left."""
    return [_curve(lambda task, c=c: trainer(task, *c), num_steps) for c in changes]


def with_arguments_alone(rank: int, arguments: dict[str, Any]) -> list[float]:
    """The Trainer's curve, optimizer and rates its own as well; all that is not given, its default.

    The rows are in order, and nothing is written.
    """
    given = {"max_grad_norm": 1.0, "train_sampling_strategy": "sequential"} | arguments
    return _curve(lambda task: trainer(task, given, ours=[]), arguments["max_steps"])


def _curve(loop: Callable[[Task], None], num_steps: int) -> list[float]:
    task = Task(num_steps)
    loop(task)
    forget()
    losses = task.losses()
    return losses


def own_loops(rank: int, names: list[str], num_steps: int) -> dict[str, list[float]]:
    """Curves of Accelerate's loop, each with one line done as one might in good faith."""
    return {name: _curve(lambda task, n=name: _accelerated(task, n), num_steps) for name in names}


def _accelerated(task: Task, fault: str) -> None:
    runner = accelerate.Accelerator(cpu=True)
    optimizer = task.optimizer(task.model.parameters())
    scheduler = task.schedule(optimizer)
    model, optimizer, loader = runner.prepare(task.model, optimizer, task.loader())
    if fault == "scheduler prepared":
        scheduler = runner.prepare(scheduler)
    for batch in loader:
        num_tokens = None if fault == "mean of means" else count_tokens(batch)
        loss = model(**batch, num_items_in_batch=num_tokens)["loss"]
        factor = 1 if fault in ("mean of means", "parts averaged") else task.ranks
        runner.backward(loss * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def samples_seen(rank: int, num_rows: int, settings: dict[str, Any]) -> list[list[int]]:
    """Which of `num_rows` rows each batch of Accelerate's loader has, for batches of four."""
    configuration = accelerate.DataLoaderConfiguration(**settings)
    runner = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    rows = [{"row": torch.tensor(i)} for i in range(num_rows)]
    loader = runner.prepare(torch.utils.data.DataLoader(rows, batch_size=4))  # ty: ignore
    return [batch["row"].tolist() for batch in loader]


def defaults(rank: int, names: list[str]) -> dict[str, Any]:
    """What TrainingArguments takes for these arguments if nobody gives them."""
    given = TrainingArguments(use_cpu=True, **QUIET)
    found = {name: getattr(given, name) for name in names}
    return found | {"lr_scheduler_type": str(found["lr_scheduler_type"].value)}


def by_config(rank: int, config: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed alone, with the optimizer of the configuration: losses and bytes by kind.

    The rates are those that transformers has for `arguments`, unless the configuration has a
    scheduler. The bytes are those after the last backward, before its step.
    """
    task = Task(arguments["max_steps"])
    model = task.model
    own = None if "scheduler" in config else lambda optimizer: linear(optimizer, arguments)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, lr_scheduler=own
    )
    kinds, rates = {}, []
    for _, batch, num_tokens in task.batches():
        loss = engine(**batch, num_items_in_batch=num_tokens)["loss"]
        engine.backward(loss * task.ranks)
        kinds = _kinds(engine)
        rates.append(engine.basic_optimizer.param_groups[0]["lr"])
        engine.step()
    found = {"losses": task.losses(), "kinds": kinds, "rates": rates}
    found["clipping"] = engine.gradient_clipping()
    found["batch"] = engine.train_batch_size()
    found["dtype"] = str(next(model.parameters()).dtype)
    engine.destroy()
    return found


def rates(rank: int, num_steps: int) -> dict[str, list[float]]:
    """The rates at which the first steps are made, by transformers and by DeepSpeed's JSON."""
    found = {}
    for kind in ("cosine", "linear"):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weight], lr=3e-3)
        scheduler = get_scheduler(kind, optimizer, 10, 50)
        found[f"Trainer, {kind}"] = []
        for _ in range(num_steps):
            found[f"Trainer, {kind}"].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    for how in ("linear", "log"):
        params = {"warmup_max_lr": 3e-3, "warmup_num_steps": 10, "total_num_steps": 50}
        section = {"type": "WarmupDecayLR", "params": params | {"warmup_type": how}}
        adam = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
        config = {"train_micro_batch_size_per_gpu": 16, "optimizer": adam, "scheduler": section}
        config["zero_optimization"] = ZERO3
        seen = by_config(rank, config, {"max_steps": num_steps})
        found[f"DeepSpeed, WarmupDecayLR, {how}"] = seen["rates"]
    return found


def linear(optimizer: Any, arguments: dict[str, Any]) -> Any:
    """The Trainer's schedule for these arguments."""
    kind, warmup = arguments.get("lr_scheduler_type", "linear"), arguments.get("warmup_steps", 0)
    return get_scheduler(kind, optimizer, warmup, arguments["max_steps"])


def _kinds(engine: Any) -> dict[str, int]:
    """Bytes of a rank under ZeRO-3 by kind; parameters that are kept whole count whole."""
    weights = [p.ds_tensor for p in engine.module.parameters()]
    weights += [p for p in engine.module.parameters() if p.numel()]
    masters = list(engine.optimizer.fp32_partitioned_groups_flat)
    states = [s for m in masters for s in engine.basic_optimizer.state.get(m, {}).values()]
    gradients = list(engine.optimizer.averaged_gradients.values())
    gradients = [g for each in gradients if each for g in each]
    kinds = {"weights": weights, "gradients": gradients, "masters": masters, "states": states}
    return {
        name: sum({x.data_ptr(): x.nbytes for x in tensors if x.numel() > 1}.values())
        for name, tensors in kinds.items()
    }


def refusals(rank: int) -> dict[str, str]:
    """What frameworks say to plans that look right on paper; "" where they say nothing."""
    found = {
        "Trainer, fsdp, use_cpu=False": _error(_trainer_with_fsdp),
        "Fabric, FSDPStrategy": _error(_fabric_with_fsdp),
        "transformers, FSDP and pipeline": _error(
            lambda: DistributedConfig(fsdp_size=2, pp_size=2)
        ),
    }
    for stage in (1, 2):
        name = f"DeepSpeed, pipeline of 2, ZeRO-{stage}"
        found[name] = _error(lambda stage=stage: _piped(stage))
    return found


def _trainer_with_fsdp() -> None:
    forget()
    task = Task(2)
    trainer(task, {"fsdp": True, "use_cpu": False})


def _fabric_with_fsdp() -> None:
    Fabric(accelerator="cpu", strategy=FSDPStrategy(), devices=dist.get_world_size())


def _piped(stage: int) -> None:
    deepspeed.init_distributed("gloo")
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    net = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW(net.parameters())
    deepspeed.initialize(model=net, optimizer=optimizer, config=config)


def _error(act: Callable[[], object]) -> str:
    """The error of a call in one line."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def silent(rank: int) -> dict[str, Any]:
    """What FSDP by Accelerate becomes on a CPU: the class, and the ranks that it knows of."""
    found = {}
    for cpu in (True, False):
        forget()
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
        runner = accelerate.Accelerator(cpu=cpu, fsdp_plugin=plugin)
        model = reference_model()
        wrapped, _ = runner.prepare(model, reference_optimizer(list(model.parameters())))
        words = f"{type(wrapped).__name__}, {runner.num_processes} ranks"
        found[f"Accelerator(cpu={cpu}, fsdp_plugin=...)"] = words
    return found
