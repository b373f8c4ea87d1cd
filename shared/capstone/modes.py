"""The five modes: what each makes of a model, and where a checkpoint finds its tensors."""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from shared.capstone.config import Config
from shared.capstone.deepspeed_shards import DeepSpeedShards
from shared.data.rows import Rows
from shared.ddp.wrapping import ddp_of_fixed_buffers
from shared.errors import InputError
from shared.model.layers import ResidualBlock
from shared.parallel3d.checkpoint import OnMesh
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import build_mesh, make_groups
from shared.planner.specs import Plan
from shared.ranks.group import Rank
from shared.tensor_parallel.checkpoint import CutModel
from shared.training.deepspeed_engine import DeepSpeedEngine
from shared.training.engine import DataParallelEngine, Engine
from shared.training.named_checkpoint import Layout
from shared.training.quiet_deepspeed import import_deepspeed, quiet_deepspeed
from shared.training.reference_run import loss_of

MODES = ("single", "ddp", "deepspeed", "fsdp2", "3d")
COMPILED = ("single", "ddp", "fsdp2")
BUCKET = 500_000  # elements that DeepSpeed sends at once


@dataclass
class Made:
    """An engine, with what a checkpoint needs of it: where tensors are, and the inner optimizer."""

    engine: Engine
    layout: Layout
    optimizer: Any
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class How:
    """What a run may ask of any mode."""

    recompute: bool = False  # layers in backward
    compiled: bool = False
    cast: torch.autocast | None = None


def check_mode(mode: str, config: Config, world_size: int, how: How = How()) -> Plan:
    """The mode as a plan of the planner's; InputError where so many ranks cannot run it."""
    given, n = config.parallel, world_size
    if how.compiled and mode not in COMPILED:
        raise InputError(f"--compile goes with --mode {', '.join(COMPILED)}, not with {mode}")
    if mode == "single" and n > 1:
        raise InputError(f"--mode single is one process, {n} were started: start one, or take ddp")
    rows, batch = 1, config.training.batch
    plan = Plan(precision="float32", checkpoint="full" if how.recompute else "none")
    fields: dict[str, Any] = {"dp": n}
    if mode == "deepspeed" and given.zero not in (1, 2, 3):
        raise InputError(f"--mode deepspeed needs parallel.zero 1, 2 or 3, got {given.zero}")
    if mode == "3d":
        copy = given.tp * given.pp
        if n % copy:
            raise InputError(
                f"--mode 3d: tp {given.tp} x pp {given.pp} are {copy} ranks a copy, and {n} ranks "
                f"are no multiple: start {copy * -(-n // copy)}"
            )
        rows = given.micro_batches
        fields = {"dp": n // copy, "tp": given.tp, "pp": given.pp, "num_micro_batches": rows}
    if batch < fields["dp"] * rows:
        raise InputError(
            f"training.batch {batch} has no row for each of {fields['dp']} ranks x {rows} "
            f"micro-batches: take {fields['dp'] * rows} or more"
        )
    zero = {"deepspeed": given.zero, "fsdp2": 3, "3d": given.zero}.get(mode, 0)
    fields |= {"zero": zero, "micro_batch": max(1, batch // (fields["dp"] * rows))}
    return Plan(**{**vars(plan), **fields})


def import_for(mode: str | None, device: str) -> None:
    """What has to be imported before there is a process group; InputError where it is missing."""
    if mode == "deepspeed":
        import_deepspeed(device)
        # What its first engine imports for 2 seconds: once here, not in every forked rank.
        importlib.import_module("torch._inductor.compile_fx")
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch's new names, old calls


def make(mode: str, model: Any, config: Config, rank: Rank, how: How) -> Made:
    """The engine of a mode around a model, which has the same numbers on every rank.

    Raises InputError for layers that are to be compiled on a GPU without Triton.
    """
    on_gpu = [rank.device.index] if rank.device.type == "cuda" else None
    if how.compiled and on_gpu and importlib.util.find_spec("triton") is None:
        raise InputError("--compile on a GPU needs Triton: pip install triton, or leave it out")
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": config.training.weight_decay}
    loss = partial(within, how.cast)
    if mode == "3d":
        return _on_mesh(model, config, rank, how, settings)
    if how.recompute:
        for layer in layers_of(model):
            layer.forward = partial(again, layer.forward)
    if mode == "deepspeed":
        return _deepspeed(model, config, rank, loss, settings)
    inner = model
    if mode == "fsdp2":
        shard_by_layer(model)
    if how.compiled:
        if rank.is_main:
            print("note: the first step compiles the layers, minutes on a CPU", flush=True)
        for layer in layers_of(inner):
            layer.compile()
    if mode == "ddp":
        model = ddp_of_fixed_buffers(model, device_ids=on_gpu)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    ranks = 1 if mode == "single" else rank.world_size
    engine = DataParallelEngine(model, optimizer, ranks, loss=loss, name=mode)
    return Made(engine, CutModel(inner), optimizer)


def _on_mesh(model: Any, config: Config, rank: Rank, how: How, settings: dict[str, Any]) -> Made:
    given = config.parallel
    dp = rank.world_size // (given.tp * given.pp)
    mesh = make_groups(build_mesh(dp, given.tp, given.pp, rank.world_size))
    engine = Parallel3D(
        model,
        mesh,
        torch.optim.AdamW,
        num_micro_batches=given.micro_batches,
        schedule=given.schedule,
        zero=given.zero,
        checkpoint=how.recompute,
        cast=how.cast,
        **settings,
    )
    layout = OnMesh(engine)
    return Made(engine, layout, layout.optimizer)


def _deepspeed(
    model: Any, config: Config, rank: Rank, loss: Callable[..., Tensor], settings: dict[str, Any]
) -> Made:
    """Stage and clipping by our file, the optimizer is torch's."""
    os.environ["LOCAL_RANK"] = str(rank.local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    wrapped = start_deepspeed(model, optimizer, config.parallel.zero, config.training.max_norm)
    engine = DeepSpeedEngine(wrapped)
    engine.loss = loss
    layout = DeepSpeedShards(wrapped)
    return Made(engine, layout, layout.optimizer, wrapped.destroy)  # its hooks hold the group


def start_deepspeed(
    model: Any, optimizer: Any, stage: int, max_norm: float = 0.0, bucket: int = BUCKET
) -> Any:
    """DeepSpeed's engine with ZeRO around a model; `bucket` elements travel at once."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    buckets = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    buckets["stage3_param_persistence_threshold"] = 0  # else small parameters stay whole
    config = {
        "train_micro_batch_size_per_gpu": 1,  # a number that DeepSpeed asks for and does not use
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": stage, "overlap_comm": False, **buckets},
        "zero_allow_untested_optimizer": True,
    }
    given = {"model": model, "model_parameters": model.parameters(), "optimizer": optimizer}
    return quiet_deepspeed().initialize(**given, config=config)[0]


def within(cast: torch.autocast | None, model: Any, batch: Rows, num_tokens: int) -> Tensor:
    """The batch's part of the loss, in the precision of the run."""
    if cast is None:
        return loss_of(model, batch, num_tokens)
    with cast:
        return loss_of(model, batch, num_tokens)


def again(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A layer that keeps its input alone: computed again in backward (lesson 11)."""
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def layers_of(model: nn.Module) -> Iterator[Any]:
    """The layers of a language model or of both stacks."""
    return (module for module in model.modules() if isinstance(module, ResidualBlock))


def shard_by_layer(model: Any) -> Any:
    """FSDP2 with a unit a layer; the model is the last one: embeddings, last norm, output."""
    for layer in layers_of(model):
        fully_shard(layer)
    return fully_shard(model)


@torch.no_grad()
def held_out_loss(engine: Engine, batches: list[Rows], share: Callable[..., Rows]) -> float:
    """The mean loss a token over batches that nobody trains on; a collective.

    On a mesh of three axes a forward alone has no schedule: the whole step runs, and its
    gradients are dropped, at three times the price.
    """
    total, tokens = 0.0, 0
    device = next(engine.model.parameters()).device
    for batch in batches:
        own = share(batch, *engine.share).to(device)
        if isinstance(engine, DataParallelEngine):
            part = engine.loss(engine.model, own, batch.num_tokens)
        else:
            with torch.enable_grad():
                part = engine.forward_backward(own, batch.num_tokens)
            engine.optimizer.zero_grad()
        total += engine.global_loss(part).item() * batch.num_tokens
        tokens += batch.num_tokens
    for module in engine.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays whole, for a backward that never comes
    return total / max(tokens, 1)


def num_parameters(model: nn.Module) -> int:
    """Trained parameters, a tied one once; before an engine cuts them."""
    return sum(p.numel() for p in model.parameters())
