"""A training whose parts leave marks in its trace."""

import json
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from shared.exercises.remembered import once_an_answer
from shared.exercises.wrong import Wrong
from shared.measuring.trace import quiet_stderr
from shared.model.config import TransformerConfig

LABELS = ("data", "forward", "backward", "optimizer")
# What leaves a mark inside each: three of the laboratory's own, torch's for step() and zero_grad().
MARKS = dict(zip(LABELS, ("drawn", "in loss_of", "in backward", "Optimizer."), strict=True))
# What waits for a GPU's numbers.
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")
Interval = tuple[float, float]


class _MarkedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with record_function(MARKS["backward"]):
            return grads[0].clone()


@dataclass
class Marked:
    """Batches that differ and a loss, each of which is seen in the trace; who is ahead of whom."""

    raise_at: int = 0  # the loss of this number raises
    error: type[Exception] = TimeoutError
    drawn: int = 0
    used: int = 0
    ahead: int = 0  # the most batches that were drawn before the batches before them were used
    kept: int = 0  # how many graphs of earlier losses there were when the last loss was asked for
    graphs: list[Callable[[], Any]] = field(default_factory=list)
    kept_losses: int = 0  # how many earlier losses still had their storage then
    storages: list[StorageWeakRef] = field(default_factory=list)

    def batches(self, count: int) -> Iterator[Tensor]:
        """So many batches."""
        for number in range(count):
            with record_function(MARKS["data"]):
                batch = torch.linspace(-1, 1 + number, 12).view(4, 3)
            self.drawn += 1
            yield batch

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """A loss whose forward and backward are seen."""
        self.used += 1
        self.ahead = max(self.ahead, self.drawn - self.used)
        self.kept = sum(graph() is not None for graph in self.graphs)
        self.kept_losses = sum(not storage.expired() for storage in self.storages)
        with record_function(MARKS["forward"]), record_function(f"batch#{self.used}"):
            if self.used == self.raise_at:
                raise self.error(f"the loss of batch {self.used}")
            loss = _MarkedBackward.apply(model(batch).square().mean())
            if loss.grad_fn is not None:
                self.graphs.append(weakref.ref(loss.grad_fn))
            self.storages.append(StorageWeakRef(loss.untyped_storage()))
            return loss


@dataclass(frozen=True)
class Profiled:
    """What an answer left: its path, the file's content, the weights beside a plain loop's."""

    path: Any
    files: list[str]
    trace: dict[str, Any]
    weights: Tensor
    twin: Tensor
    first_only: Tensor  # the twin's weights where only the traced steps are made
    reads: list[str]  # how numbers were read from the device
    marked: Marked  # how often the loss was asked for, what was kept of it, what came too early
    running: int  # profilers that were not stopped
    training: bool  # the model's mode afterwards

    def spans(self, name: str) -> list[Interval]:
        """Start and end of the spans of that name, in order; what ends in # or . begins a name."""
        return sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in self.trace["traceEvents"]
            if event.get("ph") == "X"
            and (event["name"] == name or (name[-1] in "#." and event["name"].startswith(name)))
        )

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps in the trace."""
        return self._numbers("ProfilerStep#")

    @property
    def batches(self) -> list[int]:
        """The numbers, from 1, of the batches whose forward is in the trace."""
        return self._numbers("batch#")

    def _numbers(self, beginning: str) -> list[int]:
        names = [e["name"] for e in self.trace["traceEvents"] if e.get("ph") == "X"]
        return sorted(int(n.partition("#")[2]) for n in names if n.startswith(beginning))

    def inside(self, outer: str, inner: str) -> bool:
        """Whether each span of one name lies within one of the other."""
        around = self.spans(outer)
        return all(any(a <= s and e <= b for a, b in around) for s, e in self.spans(inner))


def _new() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.linspace(-0.5, 0.7 + number, parameter.numel()).view_as(parameter)
            )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_weights(count: int) -> Tensor:
    """The weights after so many steps of a plain loop."""
    (model, optimizer), marked = _new(), Marked()
    for batch in marked.batches(count):
        optimizer.zero_grad()
        marked.loss(model, batch).backward()
        optimizer.step()
    return _flat(model)


@contextmanager
def noted_reads() -> Generator[list[str]]:
    """The names of the calls that read numbers from the device, in any step."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return called

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(Tensor, name, noting(name)))
        yield calls


@contextmanager
def running_profilers() -> Generator[list[profile]]:
    """The profilers that were started and are not stopped yet; at the end they are."""
    running: list[profile] = []
    start, stop = profile.start, profile.stop

    def started(profiler: profile) -> None:
        running.append(profiler)
        start(profiler)

    def stopped(profiler: profile) -> None:
        running[:] = [each for each in running if each is not profiler]
        stop(profiler)

    with patch.object(profile, "start", started), patch.object(profile, "stop", stopped):
        try:
            yield running
        finally:
            with quiet_stderr():
                for each in list(running):
                    each.on_trace_ready = None
                    each.stop()


@once_an_answer
def profiled(
    answer: Callable[..., Any], count: int, wait: int, warmup: int, active: int
) -> Profiled:
    """Train with the answer on `count` batches; what it left."""
    (model, optimizer), marked = _new(), Marked()
    sizes = {"wait": wait, "warmup": warmup, "active": active}
    with TemporaryDirectory(prefix="profiled_") as folder, quiet_stderr():
        place = Path(folder)
        with running_profilers() as running, noted_reads() as reads, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*warmup.*")  # torch advises against warmup=0
            path = answer(model, optimizer, marked.batches(count), marked.loss, place, **sizes)
            left = len(running)
        files = sorted(each.name for each in place.iterdir())
        try:
            trace = json.loads((place / files[0]).read_text()) if files else {"traceEvents": []}
        except ValueError as error:  # no text, or no JSON
            packed = "the file is no JSON: compressed, perhaps"
            raise Wrong(packed, "a trace in Chrome's format", str(error)) from None
    twins = plain_weights(count), plain_weights(wait + warmup + active)
    seen = reads, marked, left, model.training
    return Profiled(path, files, trace, _flat(model), *twins, *seen)


def steps_3_and_4(
    answer: Callable[..., Any], count: int, raise_at: int, error: type[Exception], folder: Path
) -> Any:
    """Ask for a trace of steps 3 and 4 of so many batches; the loss `raise_at` raises `error`."""
    marked, sizes = Marked(raise_at, error), {"wait": 2, "warmup": 1, "active": 2}
    with quiet_stderr():
        return answer(*_new(), marked.batches(count), marked.loss, folder, **sizes)


def profile_on_rank(rank: int, answer: Callable[..., Any], folder: str) -> tuple[str, int]:
    """The name of the file that this rank's answer wrote, and the rank in it; -2 without a file."""
    marked, path = Marked(), ""
    for turn in range(dist.get_world_size()):  # two that write one file would meet in it
        if turn == rank:
            with quiet_stderr():
                path = answer(*_new(), marked.batches(3), marked.loss, Path(folder), active=1)
        dist.barrier()
    if not Path(path).exists():
        return Path(path).name, -2
    content = json.loads(Path(path).read_text())
    return Path(path).name, content.get("distributedInfo", {}).get("rank", -1)


class _Decoder(nn.Module):
    """torch's own layers under a configuration, for torch's own counter of FLOPs."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        sizes = config.d_model, config.num_heads, config.d_ff, 0.0
        layer = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.output(self.layers(self.embedding(tokens)))


def counted_flops(config: TransformerConfig, rows: int, length: int) -> int:
    """FLOPs of a forward and a backward as FlopCounterMode counts them, attention not fused."""
    model = _Decoder(config)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_total_flops()
