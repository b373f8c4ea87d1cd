"""What DeepSpeed's ranks do for lesson 10: train, count, save, fail. See `ask_deepspeed`.

Every function runs on all ranks of a gloo group, on the CPU, with the rank's number first.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from lessons.lesson10_zero.experiments.counting import deepspeed_bytes
from shared.measuring.live import (
    NEGLIGIBLE_IN_A_MODEL,
    PeakOfLive,
    count_live_bytes,
    live_storages,
)
from shared.measuring.traffic import Traffic, count_traffic
from shared.sharding.counting import ring_bytes
from shared.sharding.zero_reference import SETTINGS, build_zero
from shared.training.deepspeed_engine import DeepSpeedEngine
from shared.training.engine import DataParallelEngine, reference_curve
from shared.training.quiet_deepspeed import quiet_deepspeed
from shared.training.reference_run import GLOBAL_BATCH, reference_model, reference_optimizer

deepspeed = quiet_deepspeed()
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import (  # noqa: E402
    estimate_zero2_model_states_mem_needs,
)

PEAKS = ("in backward", "in the step", "in AdamW")
SETTLE = 0.03  # seconds in which gloo's thread lets go of what it has sent


def curve(rank: int, config: dict[str, Any], steps: int) -> list[float]:
    """The reference run's first losses under a configuration.

    The optimizer is the reference run's own, which DeepSpeed calls a client optimizer.
    """
    engine = _reference_engine(config)
    losses = reference_curve(engine, range(steps)).losses
    engine.model.destroy()
    return losses


def _reference_engine(config: dict[str, Any]) -> DeepSpeedEngine:
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    rows = GLOBAL_BATCH // dist.get_world_size()
    return DeepSpeedEngine(
        start(model, config | {"train_micro_batch_size_per_gpu": rows}, optimizer)
    )


def curves(rank: int, configs: list[dict[str, Any]], steps: int) -> list[list[float]]:
    """The reference run's first losses under each configuration, on the same ranks."""
    return [curve(rank, config, steps) for config in configs]


def start(
    model: nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """DeepSpeed's engine around a model."""
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )
    return engine


def race(rank: int, stage: int, steps: int, config: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of the steps of a stage by hand and of DeepSpeed's, which take turns."""
    model, theirs = reference_model(), _reference_engine(config)
    ours = DataParallelEngine(model, build_zero(stage, model, **SETTINGS), dist.get_world_size())
    seconds: dict[str, list[float]] = {"by hand": [], "DeepSpeed": []}
    turns = [("by hand", ours), ("DeepSpeed", theirs)]
    for number in range(steps + 3):
        for name, engine in turns if number % 2 else turns[::-1]:
            dist.barrier()
            began = time.perf_counter()
            reference_curve(engine, [number])
            if number >= 3:  # DeepSpeed's stage 3 learns the order of the modules first
                seconds[name].append(time.perf_counter() - began)
    theirs.model.destroy()
    return seconds


def stack(layers: int, width: int) -> nn.Sequential:
    """Square matrices in a row, without bias: layers x width x width parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def count(rank: int, configs: list[dict[str, Any]], layers: int, width: int) -> list[dict]:
    """For each configuration the bytes a parameter of two steps: kinds at moments, and peaks.

    The moments: after forward, at rest. The peaks, over every operator: until backward is over, in
    the step before and after AdamW, in AdamW. One row a rank keeps activations out of the count.
    """
    return [_count(config, layers, width) for config in configs]


def _count(config: dict[str, Any], layers: int, width: int) -> dict[str, Any]:
    known = {storage.data_ptr() for storage in live_storages()}
    with count_live_bytes(negligible=NEGLIGIBLE_IN_A_MODEL) as live, PeakOfLive(live) as peak:
        model = stack(layers, width)
        number = sum(parameter.numel() for parameter in model.parameters())
        optimizer = None
        if "optimizer" not in config:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = start(model, config, optimizer)
        base = optimizer or engine.basic_optimizer
        moments: dict[str, dict[str, float]] = {}
        peaks = dict.fromkeys(PEAKS, 0.0)

        def look(moment: str) -> None:
            time.sleep(SETTLE)
            kinds = deepspeed_bytes(engine, known)
            moments[moment] = {kind: size / number for kind, size in kinds.items()}

        def passed(phase: str) -> None:
            peaks[phase] = max(peaks[phase], peak.take() / number)

        base.register_step_pre_hook(lambda *_: passed("in the step"))
        base.register_step_post_hook(lambda *_: passed("in AdamW"))
        peak.take()
        for _ in range(2 * engine.gradient_accumulation_steps()):  # Adam's states: in the first
            x = torch.randn(1, width, dtype=next(model.parameters()).dtype)
            loss = engine(x).float().square().mean()
            look("after forward")
            engine.backward(loss)
            passed("in backward")
            engine.step()
            passed("in the step")
        look("at rest")
    found = {"clipping": engine.gradient_clipping(), "train batch": engine.train_batch_size()}
    engine.destroy()
    return found | {"moments": moments, "peaks": peaks}


def sent(
    rank: int, configs: list[dict[str, Any]], layers: int, width: int
) -> list[dict[str, float]]:
    """For each configuration what a rank sends in a step, by operation, on a ring.

    In (n-1)/n of the parameters' bytes; all micro-batches of the step count. Messages below
    `NEGLIGIBLE_IN_A_MODEL` bytes (flags, norms) are left out.
    """
    return [_sent(config, layers, width) for config in configs]


def _sent(config: dict[str, Any], layers: int, width: int) -> dict[str, float]:
    model = stack(layers, width)
    engine = start(model, config, torch.optim.AdamW(model.parameters(), lr=1e-3))
    dtype = next(model.parameters()).dtype
    for _ in range(2):  # stage 3 learns the order of the modules in the first step
        with count_traffic() as traffic:
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(torch.randn(1, width, dtype=dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
    engine.destroy()
    n = dist.get_world_size()
    unit = layers * width * width * dtype.itemsize * (n - 1) / n
    found: dict[str, float] = {}
    for call in traffic.calls:
        if call.num_bytes >= NEGLIGIBLE_IN_A_MODEL:
            found[call.op] = found.get(call.op, 0.0) + ring_bytes(Traffic([call])) / unit
    return found


def traced(rank: int, configs: list[dict[str, Any] | None]) -> list[dict[str, int]]:
    """For each configuration (None: torch's DDP) the messages in a trace of a third step.

    By the name of the call ("c10d::...") and of gloo's label ("gloo:...").
    """
    found = []
    for config in configs:
        engine: Any = _ddp_engine() if config is None else _reference_engine(config)
        reference_curve(engine, [0, 1])
        with profile(acc_events=True) as profiler:
            reference_curve(engine, [2])
        rows = profiler.key_averages()
        found.append({r.key: r.count for r in rows if r.key.startswith(("gloo:", "c10d::"))})
        if config is not None:
            engine.model.destroy()
    return found


def _ddp_engine() -> DataParallelEngine:
    model = DistributedDataParallel(reference_model())
    optimizer = reference_optimizer(list(model.parameters()))
    return DataParallelEngine(model, optimizer, dist.get_world_size())


def refused(rank: int, configs: list[dict[str, Any]]) -> list[str]:
    """For each configuration the error that DeepSpeed raises for it, in one line; "" for none."""
    return [error_of(lambda config=config: _start_and_end(config)) for config in configs]


def refused_by_name(rank: int) -> dict[str, str]:
    """Errors that need more than a configuration: a device without fp16, optimizers done wrong."""
    plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=False):
        fp16 = error_of(lambda: _start_and_end(plain | {"fp16": {"enabled": True}}))
    model = stack(2, 8)
    weights = list(model.parameters())
    twice = torch.optim.AdamW(weights)
    twice.param_groups.append(twice.param_groups[0] | {"params": weights[:1]})
    section = plain | {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    given = stack(2, 8)
    both = start(given, section, torch.optim.AdamW(given.parameters(), lr=1e-3))
    both.destroy()
    return {
        "fp16": fp16,
        "parameter twice": error_of(lambda: start(model, plain, twice)),
        "no optimizer": error_of(lambda: start(stack(2, 8), plain)),
        "both": f"{type(both.basic_optimizer).__name__} with lr {both.get_lr()[0]}",
    }


def _start_and_end(config: dict[str, Any]) -> None:
    model = stack(2, 8)
    client = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    start(model, config, client).destroy()


def estimates(rank: int, parameters: int, largest: int, ranks: int) -> dict[str, float]:
    """DeepSpeed's own estimates of the bytes a GPU, per parameter, without its safety factor."""
    given = {"num_gpus_per_node": ranks, "num_nodes": 1, "cpu_offload": False}
    given["additional_buffer_factor"] = 1.0
    _, two = estimate_zero2_model_states_mem_needs(parameters, **given)
    three = estimate_zero3_model_states_mem_needs(
        parameters, largest, **given, cpu_offload_params=False, zero_init=True
    )
    return {"stage 2": two / parameters, "stage 3": three[1] / parameters}


def error_of(run: Callable[[], Any]) -> str:
    """The type and text of what `run` raises, in one line; "" where it raises nothing."""
    try:
        run()
    except Exception as error:  # whatever DeepSpeed raises is what the page shows
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""
