"""Lesson 13: sharded modules under observation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import Tensor, nn

from lessons.lesson13_fsdp.experiments.step_memory import Matrices, count_step, units_of
from lessons.lesson13_fsdp.laboratory.nets import NUM_STEPS, RATE, Case, Net
from shared.exercises.noting import noted_waits
from shared.exercises.rank_cases import RankCases
from shared.exercises.seeds import seed_all
from shared.measuring.traffic import Call, count_traffic
from shared.training.engine import finish

HALF = torch.bfloat16


# 13.2 to 13.4


@dataclass
class StepResult:
    """One rank's weights at the start and after each step, and what it keeps."""

    own: dict[str, Tensor]
    started: dict[str, Tensor]
    kept: int
    numel: int
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    evaluated: float = 0.0
    left: int = 0  # elements of the module's parameters after an evaluation
    between: int = 0  # and after finish_gradient_sync
    unwaited: int = 0  # messages of a step that nobody waits for
    mixed: bool = False  # something is all-reduced over all ranks at once
    small: int = 0  # elements of those that may stay whole


Make = Callable[..., Any]


def observe_training(make: Make, case: Case, seed: int, rank: int) -> StepResult:
    """Some steps of SGD on the shards, an evaluation in between."""
    seed_all(seed + rank)
    net = case.net()
    own = {name: x.detach().clone() for name, x in net.state_dict().items()}
    model = make(net, case.chosen(net), case.mesh, **case.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    seen = StepResult(own, model.full_state_dict(), 0, sum(x.numel() for x in own.values()))
    seen.kept = sum(p.numel() for p in model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with count_traffic() as traffic, noted_waits() as waits:
            for part in range(case.passes(step)):
                case.loss(model, seed, step, part, rank).backward()
            model.finish_gradient_sync()
        seen.unwaited = max(seen.unwaited, len(traffic.calls) - len(waits))
        everywhere = [c for c in traffic.calls if c.group_size == case.world_size]
        seen.mixed = seen.mixed or any(c.op == "all_reduce" for c in everywhere)
        large = [p for n, p in net.named_parameters() if own[n].numel() >= case.keep_whole]
        seen.between = max(seen.between, sum(p.numel() for p in large))
        seen.small = sum(p.numel() for p in net.parameters()) - sum(p.numel() for p in large)
        optimizer.step()
        with torch.no_grad():
            seen.evaluated = case.loss(model, seed, 9, 0, 0).item()
        seen.left = max(seen.left, sum(p.numel() for p in large))
        state = model.full_state_dict()
        seen.steps.append({name: state[name] for name, _ in net.named_parameters()})
    return seen


def observe_calls(
    make: Make, choice: str, rank: int, mesh: Any = None, **options: Any
) -> list[Call]:
    """What is sent in the third step of `Matrices`."""
    torch.manual_seed(0)
    net = Matrices(3)
    model = make(net, units_of(net, choice), mesh, **options)
    for _ in range(3):
        with count_traffic() as traffic:
            model(torch.randn(1, 64)).backward()
            finish(model)
    return traffic.calls


def observe_bytes(make: Make, choice: str, rank: int) -> tuple[int, int, int]:
    """Bytes before a step of `Matrices`, the most in it, and how many units its first one sees."""
    gathered = [0]

    def wrap(net: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        model = make(net, units, None)

        def look(*_: Any) -> None:
            gathered.append(sum(any(p.numel() for p in each.parameters()) for each in units))

        for each in units[:1]:  # after the answer's own hook
            each.register_forward_pre_hook(look)
        return model

    timeline, before = count_step(wrap, choice, 3)
    return before, timeline.peak, gathered[-1]


class Shifted(nn.Linear):
    """A layer with an input that is given by its name, whose dtype it notes."""

    def __init__(self, d_in: int, d_out: int, named: set[torch.dtype]) -> None:
        super().__init__(d_in, d_out)
        self.named = named

    def forward(self, input: Tensor, shift: Tensor | None = None) -> Tensor:
        if shift is not None:
            self.named.add(shift.dtype)
        return super().forward(input)


class Row(nn.Sequential):
    """Layers in a row; what is given by its name goes on to the first."""

    def forward(self, input: Tensor, shift: Tensor | None = None) -> Tensor:
        first, *others = self
        x = first(input, shift=shift)
        for layer in others:
            x = layer(x)
        return x


def observe_half(make: Make, seed: int, rank: int) -> dict[str, Any]:
    """Three steps in bf16: the weights, dtypes, and the inputs that the units saw."""
    seed_all(seed)
    named = set[torch.dtype]()
    net = Row(*(Shifted(a, b, named) for a, b in ((5, 9), (9, 7), (7, 3))))
    start = {name: x.detach().clone() for name, x in net.state_dict().items()}
    inputs: list[torch.dtype] = []
    model = make(net, list(net), None, HALF)
    for unit in net:
        unit.register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        rows = half_rows(seed, step, rank)
        out = model(rows.double() if step == 1 else rows, shift=torch.zeros(5))
        out.float().square().mean().backward()
        model.finish_gradient_sync()
        optimizer.step()
    return {
        "start": start,
        "masters": {p.dtype for p in model.parameters()},
        "output": out.dtype,
        "inputs": set(inputs),
        "named": named,
        "state": model.full_state_dict(),
    }


def half_rows(seed: int, step: int, rank: int) -> Tensor:
    """One rank's rows of a step."""
    draw = torch.Generator().manual_seed(seed % 10_000 + 10 * step + rank)
    return torch.randn(4, 5, generator=draw)


class Observed:
    """An answer on its cases: one group of ranks for each world size."""

    def __init__(self, rows: dict[int, dict[Any, Callable[[int], Any]]]) -> None:
        self.cases = {n: RankCases(n, row) for n, row in rows.items()}
        self.at = {key: n for n, row in rows.items() for key in row}

    def seen(self, key: Any, apart: str, **words: Any) -> list[Any]:
        """What each rank saw of a case; `apart` names the mistake where they hang."""
        return self.cases[self.at[key]].seen(key, apart=apart, **words)


def refusals(make: Make, attempts: dict[str, Callable[[Net], Any]], rank: int) -> dict[str, str]:
    """The type of the error that each attempt is met with; "" for none."""
    found = {}
    for name, arguments in attempts.items():
        net = Net()
        units, mesh = arguments(net)
        try:
            make(net, units, mesh)
            found[name] = ""
        except Exception as error:
            found[name] = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return found


def sizes_of(calls: Sequence[Call], op: str) -> list[int]:
    """The bytes of each call of an operation, in order."""
    return [call.num_bytes for call in calls if call.op == op]
