"""The reference run, once for each framework, as its own documentation would write it.

Each function is whole: from a bare model to the last step. Read two of them side by side. A
framework is imported in the function that needs it, and nowhere else.
"""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared.ecosystem.task import Loop, Task, count_tokens, pad_rows
from shared.training.quiet_deepspeed import quiet_deepspeed
from shared.training.reference_run import CONFIG
from shared.training.schedules import set_learning_rate

BLOCKS = ("EncoderLayer", "DecoderLayer")
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50_000}


Shard = Callable[[dict[str, Any], nn.Module], nn.Module]
Configure = Callable[[dict[str, Any], int], dict[str, Any]]
OURS = ("optimizer", "rates")


def arguments_of(task: Task) -> dict[str, Any]:
    """The reference run in the words of the Trainer, under full sharding."""
    return {
        "per_device_train_batch_size": task.rows,
        "max_steps": task.num_steps,
        "max_grad_norm": 0.0,  # its default is 1.0
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": list(BLOCKS)},
    }


def ddp(task: Task) -> None:
    """torch alone, as lesson 06's script does it."""
    model = DistributedDataParallel(task.model)
    optimizer = task.optimizer(model.parameters())
    for rate, batch, num_tokens in task.batches():
        set_learning_rate(optimizer, rate)
        loss = model(**batch, num_items_in_batch=num_tokens)["loss"]
        (loss * task.ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    task.wrapped = type(model).__name__


def by_blocks(arguments: dict[str, Any], model: nn.Module) -> nn.Module:
    """Each block of the two stacks, then the model."""
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            fully_shard(module)
    fully_shard(model)
    return model


def fsdp2(task: Task, shard: Shard = by_blocks) -> None:
    """The optimizer is made afterwards: its parameters are shards."""
    model = shard(arguments_of(task), task.model)
    optimizer = task.optimizer(model.parameters())
    for rate, batch, num_tokens in task.batches():
        set_learning_rate(optimizer, rate)
        loss = model(**batch, num_items_in_batch=num_tokens)["loss"]
        (loss * task.ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    task.wrapped = type(model).__name__


def zero3(arguments: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """Stage 3 without clipping; DeepSpeed's own default clips at 1.0."""
    config = {"train_micro_batch_size_per_gpu": arguments["per_device_train_batch_size"]}
    return config | {"zero_optimization": ZERO3, "gradient_clipping": 0.0}


def deepspeed(task: Task, configure: Configure = zero3) -> None:
    """`initialize` takes model and optimizer; backward and step are the engine's."""
    config = configure(arguments_of(task), CONFIG.d_model)
    config.pop("optimizer", None)  # the reference run has its own, with a decay
    model, optimizer, *_ = quiet_deepspeed().initialize(
        model=task.model, optimizer=task.optimizer(task.model.parameters()), config=config
    )
    for rate, batch, num_tokens in task.batches():
        set_learning_rate(optimizer, rate)
        loss = model(**batch, num_items_in_batch=num_tokens)["loss"]
        model.backward(loss * task.ranks)
        model.step()
    task.wrapped = f"{type(model).__name__}, ZeRO-{model.zero_optimization_stage()}"
    model.destroy()


def accelerate(task: Task) -> None:
    """`prepare` wraps what is handed to it; the loader shares out the batches by itself."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=task.device.type == "cpu")
    optimizer = task.optimizer(task.model.parameters())
    scheduler = task.schedule(optimizer)  # not handed to prepare: it would step once for each rank
    model, optimizer, loader = accelerator.prepare(task.model, optimizer, task.loader())
    for batch in loader:
        loss = model(**batch, num_items_in_batch=count_tokens(batch))["loss"]
        accelerator.backward(loss * accelerator.num_processes)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    task.wrapped = type(model).__name__


def fabric(task: Task) -> None:
    """`setup` wraps; loop, loader and schedule stay ours."""
    from lightning_fabric import Fabric

    device = "gpu" if task.device.type == "cuda" else "cpu"
    nodes = task.ranks // task.local_ranks
    runner = Fabric(accelerator=device, devices=task.local_ranks, num_nodes=nodes)
    runner.launch()
    model, optimizer = runner.setup(task.model, task.optimizer(task.model.parameters()))
    for rate, batch, num_tokens in task.batches():
        set_learning_rate(optimizer, rate)
        loss = model(**batch, num_items_in_batch=num_tokens)["loss"]
        runner.backward(loss * task.ranks)
        optimizer.step()
        optimizer.zero_grad()
    task.wrapped = type(model._forward_module).__name__


def trainer(task: Task, changed: dict[str, Any] | None = None, ours: Sequence[str] = OURS) -> Any:
    """The Trainer's own loop, sampler, clipping and schedule, turned back into the reference run.

    `changed` replaces arguments. What is not in `ours` is as the Trainer makes it. Returns what it
    made of the model.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class Ours(Trainer):
        def create_optimizer(self, model: nn.Module | None = None) -> Any:
            if "optimizer" in ours:
                self.optimizer = task.optimizer(task.model.parameters())
            return super().create_optimizer(model)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if "rates" in ours:
                own: Any = optimizer or self.optimizer
                self.lr_scheduler = task.schedule(own)
            return super().create_scheduler(num_training_steps, optimizer)

    given: dict[str, Any] = arguments_of(task) | {
        "fsdp": None,
        "fsdp_config": None,
        "train_sampling_strategy": "sequential",  # its default shuffles
        "use_cpu": task.device.type == "cpu",
        "remove_unused_columns": False,  # its default drops what forward does not name
        **QUIET,
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **(given | (changed or {})))
        runner = Ours(task.model, arguments, data_collator=pad_rows, train_dataset=task.data)  # ty: ignore
        runner.remove_callback(PrinterCallback)
        runner.train()
    task.wrapped = type(runner.model_wrapped).__name__
    return runner.model_wrapped


QUIET: dict[str, Any] = {
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "log_level": "error",
}


def trainer_fsdp(task: Task) -> None:
    """FSDP2 by two arguments; on a CPU, read what came of it."""
    given = arguments_of(task)
    trainer(task, {name: given[name] for name in ("fsdp", "fsdp_config")})


def trainer_deepspeed(task: Task) -> None:
    """DeepSpeed by a dict, whose `auto` values the Trainer fills in."""
    quiet_deepspeed()
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = dict.fromkeys(keys, "auto") | {"zero_optimization": ZERO3}
    engine = trainer(task, {"deepspeed": config})
    engine.destroy()  # the Trainer leaves it with its groups


LOOPS: dict[str, Loop] = {
    "ddp": ddp,
    "accelerate": accelerate,
    "trainer": trainer,
    "trainer_fsdp": trainer_fsdp,
    "trainer_deepspeed": trainer_deepspeed,
    "deepspeed": deepspeed,
    "fsdp2": fsdp2,
    "fabric": fabric,
}
