"""What lesson 13's script counts of a run, shows, and searches for."""

import argparse
import gc
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from shared.cli.machine import memory_gib
from shared.errors import InputError
from shared.measuring.largest import largest_that_fits, until
from shared.measuring.live import NEGLIGIBLE_IN_A_MODEL, settle
from shared.measuring.memory import peak_memory
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.planner.models import spec_of
from shared.planner.peak import DDP, Held, peak_bytes
from shared.plots import MEANING, use_style
from shared.ranks.agreement import refused_by_any
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.sharding.checkpoint import ShardedByRows
from shared.sharding.counting import bytes_at_rest
from shared.sharding.fully_shard import FullyShard
from shared.training.engine import DataParallelEngine
from shared.training.language_recipes import Recipe, shared_out
from shared.training.named_checkpoint import Layout, ModuleLayout

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.01}
MIB = 2**20


@dataclass
class Run:
    """A model under an engine, and what has been seen of it."""

    engine: DataParallelEngine
    sizes: list[int]  # the units' elements
    parts: int  # ranks that share a unit
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    kept: int = 0  # bytes between steps
    known: dict[int, torch.UntypedStorage] = field(
        default_factory=dict
    )  # storages that were there before


def config_of(recipe: Recipe, vocab_size: int) -> TransformerConfig:
    """The recipe's model; its output is a matrix of its own, a unit like the others."""
    return replace(recipe.config(vocab_size), tie_embeddings=False)


def layout_of(engine: DataParallelEngine) -> Layout:
    """Where an engine has the tensors of the model; any of the four can read the others'."""
    if isinstance(engine.model, FullyShard):
        return ShardedByRows(engine.model)
    return ModuleLayout(engine.model.module if engine.name == "ddp" else engine.model)


def sizes_of(model: nn.Module, units: list[nn.Module]) -> list[int]:
    """The elements of the units, and of what is in none of them."""
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    rest = sum(p.numel() for p in model.parameters()) - sum(sizes)
    return [*sizes, *([rest] if rest else [])]


def check_flags(args: argparse.Namespace) -> None:
    """Raises InputError for flags that contradict each other, and for a single step."""
    if args.offload and args.engine != "fsdp2":
        raise InputError(f"--offload is torch's: use --engine fsdp2, not {args.engine}")
    if args.offload and args.max_norm < math.inf:
        raise InputError("--offload or --max-norm: NCCL adds up no gradients in the CPU's memory")
    if args.mesh and args.engine != "hybrid":
        raise InputError(f"--mesh belongs to --engine hybrid, not to {args.engine}")
    if args.steps == 1:
        raise InputError("--steps must be 2 or more: the last step is counted, not timed")


def read_mesh(text: str, world_size: int) -> tuple[int, int]:
    """The numbers of "2x4"; without a text two replicas, where the ranks are even in number.

    Raises InputError where it is no mesh, or another number of ranks.
    """
    if not text:
        replicas = 2 if world_size % 2 == 0 else 1
        return replicas, world_size // replicas
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise InputError(f"--mesh {text!r}: two numbers are needed, replicas x shards, as 2x4")
    replicas, shards = int(found[1]), int(found[2])
    if replicas * shards != world_size:
        raise InputError(
            f"--mesh {text}: {replicas} replicas x {shards} shards are {replicas * shards} ranks, "
            f"here are {world_size}"
        )
    return replicas, shards


def plain_storages() -> dict[int, torch.UntypedStorage]:
    """All live storages by address. A DTensor has none of its own: its part has."""
    gc.collect()
    settle(0.05)  # until gloo's threads hold nothing any more
    plain = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    plain += [x.grad for x in plain if x.is_leaf and type(x.grad) is Tensor]
    storages = (x.untyped_storage() for x in plain if x.device.type != "meta")
    return {s.data_ptr(): s for s in storages if s.nbytes() >= NEGLIGIBLE_IN_A_MODEL}


def kept_bytes(known: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of all live storages that were not there before; those are held until here."""
    found = plain_storages()
    return sum(storage.nbytes() for place, storage in found.items() if place not in known)


def formula(run: Run) -> float:
    """Bytes a parameter between steps: shards and moments; DDP keeps its gradients' buckets."""
    whole = sum(run.sizes)
    return 16.0 if run.engine.name == "ddp" else bytes_at_rest(run.sizes, run.parts) / whole


@refused_by_any()  # what comes after it waits for all
def conclude(args: argparse.Namespace, rank: Rank, run: Run, tokens: int) -> None:
    """Average the ranks' losses; rank 0 writes table and figure. Call on all ranks.

    `tokens` are those of a step on all ranks. Raises InputError where a loss is not finite.
    """
    training, count = of_all_ranks(rank, run.losses, run.seconds, mean=False), sum(run.sizes)
    if not rank.is_main:
        return
    row = {
        "engine": run.engine.name,
        "units": args.units,
        "parameters": count,
        **training.row(tokens),
        "bytes a parameter": round(run.kept / count, 2),
        "formula": round(formula(run), 2),
        **{op: run.calls.get(op, 0) for op in ("all_gather", "reduce_scatter", "all_reduce")},
        "peak, MiB": round(peak_memory(rank.device) / MIB),
    }
    words = f"{run.engine.name}, units by {args.units}: "
    words += f"{row['bytes a parameter']:.2f} bytes a parameter"
    words += f" on each of {rank.world_size} rank(s), formula {row['formula']:g}, "
    words += f"{row['all_gather']} gathers a step, loss {row['last loss']:.3f}"
    figures = {"fsdp.png": draw(training.losses, row)}
    write_results(args, rank, headline=words, table=[row], figures=figures, losses=training.losses)


def draw(losses: list[float], row: dict[str, Any]) -> Figure:
    """Left: the loss; right: the bytes a parameter, and the formula as a line."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    left.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training with {row['engine']}")
    bars = right.barh([row["engine"]], [row["bytes a parameter"]], color=MEANING["parameters"])
    right.bar_label(bars, fmt="%.2f")
    right.axvline(row["formula"], color=MEANING["theory"], linestyle="--", linewidth=1)
    right.set(xlabel="bytes a parameter on rank 0 (dashed: formula)", title="Kept between steps")
    return figure


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each rank: see `check_room`. What is offloaded is not on the GPU."""
    if args.search or args.offload:
        return 0
    spec = spec_of(config_of(recipe, recipe.vocab_size), recipe.length)
    replicas, shards = read_mesh(args.mesh, ranks) if args.engine == "hybrid" else (1, ranks)
    if args.engine == "ddp":
        held: Held = "autocast" if half else "float32"
        return peak_bytes(spec, shared_out(recipe, ranks), held, beside=DDP)
    plan = replace(shared_out(recipe, replicas * shards), dp=shards, zero=3)
    return peak_bytes(spec, plan, "bf16" if half else "float32")


Build = Callable[[str, LanguageModel, bool], Run]


WIDE = {"d_model": 2048, "num_heads": 16}


def check_the_cpu(num_parameters: int) -> None:
    """Raise MemoryError where a model may not be made there, whole, before it is offloaded."""
    if 5 * num_parameters >= 0.8 * memory_gib() * 2**30:  # in float32
        raise MemoryError


def search(args: argparse.Namespace, rank: Rank, recipe: Recipe, build: Build) -> None:
    """The most layers of width 2048 of which one GPU holds the share of a rank, by engine.

    One real GPU is one of `args.search` ranks: the others are torch's fake process group, whose
    messages carry nothing and take no time, so that bytes are right and numbers are not. (DDP, of
    which every rank has the same bytes, comes before, in the real group of one.) Raises InputError
    on a CPU: it swaps or is stopped where a GPU says that it is full.
    """
    if rank.device.type != "cuda" or rank.world_size > 1:
        seen = "several ranks are" if rank.world_size > 1 else "none is"
        raise InputError(f"--search fills one GPU until it says that it is full; {seen} here")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    wide, width = replace(recipe, **WIDE), WIDE["d_model"]
    table: list[dict[str, Any]] = []
    for engine, offload in (("ddp", False), ("by_hand", False), ("fsdp2", False), ("fsdp2", True)):
        if table:
            dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.search)

        def layers_fit(number: int, engine: str = engine, offload: bool = offload) -> None:
            config = config_of(replace(wide, num_layers=number), wide.vocab_size)
            if offload:
                check_the_cpu(12 * width**2 * number)  # it would not say so
            with torch.device("cpu" if offload else rank.device):
                model = LanguageModel(config)
            sharded = build(engine, model, offload).engine
            tokens = torch.zeros(1, wide.length, dtype=torch.long, device=rank.device)
            for _ in range(2):  # the first step makes Adam's states
                sharded.optimizer.zero_grad()
                sharded.model(tokens).float().mean().backward()
                sharded.average_gradients()
                sharded.optimizer.step()

        layers, full = largest_that_fits(layers_fit, most=512)
        size = (12 * width**2 * layers + 2 * width * recipe.vocab_size) / 1e9
        name = f"{engine}, offloaded" if offload else engine
        row = {"engine": name, "layers": layers, "billion parameters": size, "full": full}
        table.append(row)
    words = [
        f"{row['engine']} {row['billion parameters']:.1f}{until(row['full'])}" for row in table
    ]
    head = f"billion parameters that fit a GPU as one of {args.search} ranks: {', '.join(words)}"
    write_results(args, rank, headline=head, table=table)
