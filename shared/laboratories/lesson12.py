"""Lesson 12: a training whose parts leave marks in its trace."""

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from shared.exercises.remembered import once_an_answer
from shared.measuring.trace import quiet_stderr
from shared.model.config import TransformerConfig

LABELS = ("data", "forward", "backward", "optimizer")
# What leaves a mark inside each: three of the laboratory's own, one of torch's.
MARKS = dict(zip(LABELS, ("drawn", "in loss_of", "in backward", "Optimizer.step#"), strict=True))
Interval = tuple[float, float]


class _MarkedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with record_function(MARKS["backward"]):
            return grads[0].clone()


def marked_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss whose forward and backward are seen in the trace."""
    with record_function(MARKS["forward"]):
        return _MarkedBackward.apply(model(batch).square().mean())


def marked_batches(count: int) -> Iterator[Tensor]:
    """Batches that differ, each of which is seen in the trace when it is drawn."""
    for number in range(count):
        with record_function(MARKS["data"]):
            batch = torch.linspace(-1, 1 + number, 12).view(4, 3)
        yield batch


@dataclass(frozen=True)
class Profiled:
    """What an answer left: its path, the file's content, the weights beside a plain loop's."""

    path: Any
    files: list[str]
    trace: dict[str, Any]
    weights: Tensor
    twin: Tensor
    first_only: Tensor  # the twin's weights where only the traced steps are made
    copied: int  # how often numbers were read that leave no aten::item on a CPU
    training: bool  # the model's mode afterwards

    def spans(self, name: str) -> list[Interval]:
        """Start and end of the spans whose name begins so, in order."""
        return spans_called(self.trace, name)

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps in the trace."""
        names = [e["name"] for e in self.trace["traceEvents"] if e.get("ph") == "X"]
        return sorted(int(n.partition("#")[2]) for n in names if n.startswith("ProfilerStep#"))

    def inside(self, outer: str, inner: str) -> bool:
        """Whether each span of one name lies within one of the other."""
        around = self.spans(outer)
        return all(any(a <= s and e <= b for a, b in around) for s, e in self.spans(inner))


def spans_called(trace: dict[str, Any], name: str) -> list[Interval]:
    """Start and end of the spans whose name begins so, in order."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event["name"].startswith(name)
    )


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
    model, optimizer = _new()
    for batch in marked_batches(count):
        optimizer.zero_grad()
        marked_loss(model, batch).backward()
        optimizer.step()
    return _flat(model)


@contextmanager
def counted_copies() -> Generator[Counter[str]]:
    """Count the calls that wait for a GPU's numbers and leave no operator in a CPU's trace."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return called

    with ExitStack() as stack:
        for name in ("tolist", "numpy", "cpu"):
            stack.enter_context(patch.object(Tensor, name, counting(name)))
        yield calls


@once_an_answer
def profiled(
    answer: Callable[..., Any], count: int, wait: int, warmup: int, active: int
) -> Profiled:
    """Train with the answer on `count` batches; what it left."""
    model, optimizer = _new()
    sizes = {"wait": wait, "warmup": warmup, "active": active}
    with TemporaryDirectory(prefix="profiled_") as folder, quiet_stderr():
        place = Path(folder)
        with counted_copies() as calls:
            path = answer(model, optimizer, marked_batches(count), marked_loss, place, **sizes)
        files = sorted(each.name for each in place.iterdir())
        trace = json.loads((place / files[0]).read_text()) if files else {"traceEvents": []}
    twins = plain_weights(count), plain_weights(wait + warmup + active)
    return Profiled(path, files, trace, _flat(model), *twins, sum(calls.values()), model.training)


def too_few(answer: Callable[..., Any], count: int, folder: Path) -> Any:
    """Ask for a trace of steps 3 and 4 of fewer batches."""
    with quiet_stderr():
        sizes = {"wait": 2, "warmup": 1, "active": 2}
        return answer(*_new(), marked_batches(count), marked_loss, folder, **sizes)


def profile_on_rank(rank: int, answer: Callable[..., Any], folder: str) -> tuple[str, int]:
    """The name of the file that this rank's answer wrote, and the rank that the file names."""
    with quiet_stderr():
        path = answer(*_new(), marked_batches(3), marked_loss, Path(folder), active=1)
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
