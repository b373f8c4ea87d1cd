"""Slow runs, their fixes and a healthy one: one model, one batch, two ranks, one fault each."""

import functools
import random
import statistics
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule

from shared.measuring.chrome import read_chrome, step_spans
from shared.measuring.timing import repetitions
from shared.measuring.trace import file_alone, quiet_stderr
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks

FAULTS = ("loader", "item", "buckets", "kernels")
FIXED = tuple(f"{fault} fixed" for fault in FAULTS)
BUCKET_MIB = {"buckets": 1e-6, "buckets fixed": 25.0}  # 1e-6 MiB are a byte; 25 is the default
TURN = 5  # steps of a run before the next run has its turn; the first of them is not timed
STEPS = {"wait": 1, "warmup": 3, "active": 3}
ROWS, LENGTH, VOCAB, WIDTH, LAYERS = 6, 80, 32, 32, 3


class Net(nn.Module):
    """A small language model of torch's own layers: 39 parameters, small messages."""

    def __init__(self, row_by_row: bool = False) -> None:
        super().__init__()
        self.row_by_row = row_by_row
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.output = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits; the whole batch at once, or one row after the other."""
        if self.row_by_row:
            return torch.cat([self._logits(row) for row in tokens.split(1)])
        return self._logits(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


@dataclass(frozen=True)
class Recorded:
    """One run on a rank: its trace, its losses, and its fastest traced step in seconds."""

    trace: dict[str, Any]
    losses: list[float]
    seconds: float


@functools.cache
def record_runs(names: tuple[str, ...] = ("none", *FAULTS)) -> dict[str, Recorded]:
    """Train under each fault on two ranks, and return what rank 0 recorded of it.

    Once in a process: notebook and checks look at the same runs. The slow loader begins to wait
    with the first traced step, and waits three times as long as the steps before it took.
    """
    return record_ranks(names)[0]


def record_ranks(names: tuple[str, ...]) -> list[dict[str, Recorded]]:
    """Train under each fault on two ranks, and return what each rank recorded of it.

    With "straggler" rank 1 takes in each traced forward as much longer as a step took before.
    """
    import torch._dynamo  # what optimizers import: once here, and not in each forked rank  # noqa: F401

    try:
        return run_ranks(_all_runs, 2, names, timeout=600)
    except RankFailed:  # one of some 130 recordings ended so: SIGSEGV in a rank that is profiled
        return run_ranks(_all_runs, 2, names, timeout=600)


def _all_runs(rank: int, names: tuple[str, ...]) -> dict[str, Recorded]:
    return {name: train_with_fault(rank, name) for name in names}


def _build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(row_by_row=name == "kernels")
    # The model is a tenth of a MiB: two buckets, or one, or one for each parameter.
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MIB.get(name, 0.05))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train_with_fault(rank: int, name: str) -> Recorded:
    """Some steps on one batch: the losses are the same, whatever the fault."""
    model, optimizer = _build(name)
    losses, taken, pause, late = list[Tensor](), list[float](), 0.0, 0.0
    before = STEPS["wait"] + STEPS["warmup"]
    with TemporaryDirectory(prefix="trace_") as folder:
        path = Path(folder) / "trace.json"
        plan = schedule(**STEPS, repeat=1)

        def write(profiler: profile) -> None:
            profiler.export_chrome_trace(str(path))

        with (
            quiet_stderr(),
            profile(schedule=plan, on_trace_ready=write, **file_alone()) as profiler,
        ):
            for number in range(1, 1 + sum(STEPS.values())):
                began = time.perf_counter()
                losses.append(_step(model, optimizer, _batches(rank, pause), name, late))
                taken.append(time.perf_counter() - began)
                if name == "loader" and number == before:
                    pause = 3 * _mean_of_ranks(statistics.median(taken[1:]))
                if name == "straggler" and number == before:
                    late = rank * _mean_of_ranks(statistics.median(taken[1:]))
                profiler.step()
        trace = read_chrome(path)
    trace.pop("traceName", None)
    fastest = min(end - start for start, end in step_spans(trace))
    return Recorded(trace, torch.stack(losses).tolist(), fastest / 1e6)


def _mean_of_ranks(value: float) -> float:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def ratios(rounds: int, names: tuple[str, ...] = FAULTS) -> dict[str, float]:
    """How many times a healthy step's time a step takes in each run, without the profiler.

    `names` are of FAULTS and FIXED. The runs take turns of some steps at each round, and
    the median over rounds counts: a machine is faster in one second than in the next.
    """
    import torch._dynamo  # noqa: F401

    return run_ranks(_take_turns, 2, repetitions(rounds), names, timeout=600)[0]


def _take_turns(rank: int, rounds: int, names: tuple[str, ...]) -> dict[str, float]:
    built = {name: _build(name) for name in ("none", *names)}
    taken: dict[str, list[float]] = {name: [] for name in built}
    for number in range(rounds + 1):
        for name, (model, optimizer) in built.items():
            pause = 3 * taken["none"][-1] if name.startswith("loader") and number else 0.0
            batches = _read_ahead(rank, pause) if name == "loader fixed" else _batches(rank, pause)
            for step in range(TURN):
                if step == 1:
                    dist.barrier()
                    began = time.perf_counter()
                _step(model, optimizer, batches, name)
            taken[name].append((time.perf_counter() - began) / (TURN - 1))
            batches.close()
    return {
        name: statistics.median(  # the first round is slower
            slow / healthy for slow, healthy in zip(taken[name][1:], taken["none"][1:], strict=True)
        )
        for name in names
    }


def _step(
    model: nn.Module, optimizer: Any, batches: Iterator[Tensor], name: str, late: float = 0.0
) -> Tensor:
    with record_function("data"):
        tokens = next(batches)
    with record_function("forward"):
        time.sleep(late)  # a straggler: the same operators, after a pause
        logits, wanted = model(tokens[:, :-1]), tokens[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        if name in COUNTING:
            COUNTING[name](logits.detach(), wanted)
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def count_right(logits: Tensor, wanted: Tensor) -> int:
    """The tokens that are predicted right and with a logit above 0, counted one by one."""
    right = 0
    for row, targets in zip(logits, wanted, strict=True):
        for place, target in zip(row, targets, strict=True):
            right += (place.argmax().item() == target.item()) * (place.max().item() > 0)
    return right


def count_at_once(logits: Tensor, wanted: Tensor) -> Tensor:
    """The same count without a loop, on the device."""
    return ((logits.argmax(-1) == wanted) & (logits.amax(-1) > 0)).sum()


COUNTING = {"item": count_right, "item fixed": count_at_once}


def _batches(rank: int, pause: float) -> Generator[Tensor]:
    while True:
        yield _read(rank, pause)


def _read_ahead(rank: int, pause: float, readers: int = 4) -> Generator[Tensor]:
    """The same batches, read by some threads side by side, as DataLoader's workers do."""
    with ThreadPoolExecutor(readers) as pool:
        coming = deque(pool.submit(_read, rank, pause) for _ in range(readers))
        while True:
            batch = coming.popleft().result()
            coming.append(pool.submit(_read, rank, pause))
            yield batch


def _read(rank: int, pause: float) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    time.sleep(pause)  # a disk or a network that takes its time
    return tokens


def letters(seed: int) -> dict[str, str]:
    """Which fault each of the letters A to D stands for, in an order that depends on the seed."""
    order = list(FAULTS)
    random.Random(seed).shuffle(order)
    return dict(zip("ABCD", order, strict=True))


def anonymous(runs: dict[str, Recorded], seed: int) -> dict[str, Recorded]:
    """The slow runs under their letters."""
    return {letter: runs[fault] for letter, fault in letters(seed).items()}
