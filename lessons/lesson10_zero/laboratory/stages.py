"""Lesson 10: ZeRO's stages under observation, beside one process that has everything."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lessons.lesson10_zero.laboratory.nets import (
    Nested,
    Slopes,
    Sums,
    TwoOutputs,
    Within,
    flat,
    numbers,
    rounded_since,
    whole_gradients,
)
from lessons.lesson10_zero.laboratory.twin import (
    CHANGES,
    EXTRA_BACKWARD_STEP,
    JOIN_STEP,
    NUM_SMALL_STEPS,
    SETTINGS,
    SMALL_STEPS,
    StageCase,
    change,
    groups_of,
    rows_of,
)
from shared.exercises.nets import clone, through_a_file
from shared.exercises.on_ranks import on_one_rank
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.exercises.wrong import Wrong
from shared.measuring.live import NEGLIGIBLE_BYTES, LiveBytes, count_live_bytes, settle
from shared.measuring.traffic import Call, count_traffic
from shared.ranks.failures import RankFailed

BUCKET = 700  # elements: Sums' parameters in several buckets
NET_BUCKET = 60  # the net's in several: its largest have 49 elements
HALF = torch.bfloat16
FREED = (
    "memory is read that was freed: a module computes before its unit is gathered. A ModuleList "
    "is never called, so that its hooks never run: its elements are the units"
)
EMPTY = (
    "a module computes with a parameter that is not gathered: every module that has a tied one "
    "gathers its unit, and the last frees it"
)
OF_NO_ELEMENTS = (
    "size mismatch, got",
    "setStorage",
    "mat1 and mat2 shapes",
    "vec (0)",
    "of size 0",
)

VALUES = (
    StageCase(3, frozen=True),  # 220 trained numbers and then 171: both need a zero at their end
    StageCase(2, tied=True, frozen=True),
    StageCase(1, tied=True),
    StageCase(2, quiet=1, kind=torch.optim.Adam),
    StageCase(2, with_closure=True),
)
FIRST_VALUES = (StageCase(3), StageCase(2, quiet=1, kind=torch.optim.Adam), StageCase(1))
GROUPS = StageCase(2, grouped=True)
SKIPPED = frozenset({(1, 0), (0, 1), (2, 1), (1, 3), (0, 4), (1, 4), (2, 4)})
UNUSED = StageCase(3, skipped=SKIPPED, absent=(2, 3))
IDLE = StageCase(2, skipped=frozenset({(0, 2), (1, 2), (0, 4), (1, 4)}))  # a layer that nobody uses
RESUMED, EXCHANGED, HALVES, OUTPUTS = "resumed", "exchanged", "16 bits", "two outputs"


@dataclass(frozen=True)
class Size:
    """Where bytes are counted: so many ranks, a dtype and a model."""

    world_size: int
    dtype: torch.dtype
    model: Callable[[torch.dtype], Any] = Sums


SIZES = (Size(3, torch.float32), Size(2, HALF), Size(4, torch.float16), Size(1, HALF))
FIRST_SIZES = (Size(3, torch.float32), Size(2, torch.float32), Size(1, torch.float32))
WITHIN = Size(2, torch.float32, Within)
NESTED = Size(2, torch.float32, Nested)  # float32: no master of a frozen parameter


@dataclass
class StepResult:
    """What one rank saw of some steps: weights by name, its own, at the start, after each step.

    `output` is a loss of the trained net, without gradients; `joined` are the weights of a group
    that joined late, and `closures` is what was seen of closures.
    """

    seed: int
    own: dict[str, Tensor]
    started: dict[str, Tensor]
    missing: list[str]  # names that full_state_dict() has not
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    output: Tensor = field(default_factory=lambda: torch.zeros(()))
    joined: dict[str, Tensor] = field(default_factory=dict)
    closures: list[dict[str, bool]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # whole gradients after the last backward


@dataclass
class Bytes:
    """One rank's live bytes beyond what was there before, at the moments of the second step."""

    numel: int
    trained: int
    outside: int  # elements of parameters that are in no layer
    unit: int  # elements of the largest layer
    moments: dict[str, int]
    calls: list[Call]


Make = Callable[..., torch.optim.Optimizer]
Weights = tuple[dict[str, Tensor], dict[str, Tensor]]  # by name: at the start, at the end


class Stage:
    """An answer to one stage's exercise, on its cases: one group of ranks for each world size.

    `first`: the exercise that asks for the happy path alone.
    """

    def __init__(self, stage: int, answer: Make, *, first: bool = False) -> None:
        self.stage, self.answer, self.first, self.seed = stage, answer, first, fresh_seed()
        self.values = FIRST_VALUES if first else VALUES
        self.others = (GROUPS, UNUSED) if stage < 3 else (IDLE,)
        more = {3: (WITHIN if first else NESTED,)}.get(stage, ())
        self.sizes = (*(FIRST_SIZES if first else SIZES), *more)
        rows: dict[int, dict[Any, Callable[[int], Any]]] = {1: {}, 2: {}, 3: {}, 4: {}}
        for case in (*self.values, *self.others * (not first)):
            rows[case.world_size][case] = functools.partial(self._train, case)
        for size in self.sizes:
            rows[size.world_size][size] = functools.partial(self._bytes, size)
        if not first:
            rows[2] |= {RESUMED: self._resumed, EXCHANGED: self._exchanged, HALVES: self._halves}
            rows[2] |= {OUTPUTS: self._outputs} if stage == 3 else {}
        self.cases = {n: RankCases(n, row) for n, row in rows.items()}
        self.at = {case: n for n, row in rows.items() for case in row}

    def seen(self, case: Any, apart: str) -> list[Any]:
        """What each rank saw of a case; `apart` names the mistake where they hang."""
        cases = self.cases[self.at[case]]
        try:
            return cases.outcome(case)
        except RankFailed as failed:
            if failed.signal == "SIGSEGV":
                raise Wrong(
                    FREED, "memory that is there when it is read", failed.headline
                ) from None
            if self.stage == 3 and any(words in str(failed) for words in OF_NO_ELEMENTS):
                raise Wrong(
                    EMPTY, "parameters that are there when a module computes", failed.headline
                ) from None
        return cases.seen(case, apart=apart)

    def foreign(self) -> str:
        """The type of the error when one rank loads what the first of two has saved; "": none."""
        state = self.seen(EXCHANGED, "")[0][1]
        return on_one_rank(lambda: error_of_loading(self.make(StageCase().net()), state))

    def make(self, net: nn.Module, groups: Any = None, kind: Any = None, **settings: Any) -> Any:
        """The answer over one of torch's optimizers, AdamW if none is named."""
        settings = {**SETTINGS, **settings}
        kind = kind or torch.optim.AdamW
        if self.stage == 3:
            units = {"units": net.layers} if isinstance(net, Nested | Within) else {}
            return self.answer(net, kind, **units, **settings)
        if self.first:
            return self.answer(net.parameters(), kind, **settings)
        settings["bucket_size"] = BUCKET if isinstance(net, Sums) else NET_BUCKET
        return self.answer(groups or net.parameters(), kind, **settings)

    def weights(self, net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        """The whole model's parameters, tied ones once; empty where memory or name is missing."""
        whole = optimizer.full_state_dict() if self.stage == 3 else net.state_dict()
        found = {name: whole.get(name, torch.empty(0)) for name, _ in net.named_parameters()}
        freed = {name for name, x in found.items() if x.untyped_storage().nbytes() < x.nbytes}
        return clone({name: x[:0] if name in freed else x for name, x in found.items()})

    def _train(self, case: StageCase, rank: int) -> StepResult:
        seed_all(self.seed + rank)
        net = case.net()
        own = clone(dict(net.named_parameters()))
        groups = groups_of(net) if case.grouped else []
        late = groups.pop() if groups else {"params": []}
        optimizer = self.make(net, groups, case.kind)
        for each in (*late["params"], *net.buffers()):  # of which the optimizer knows nothing
            dist.broadcast(each.detach(), 0)
        whole = optimizer.full_state_dict() if self.stage == 3 else net.state_dict()
        missing = sorted({*net.state_dict()} - {*whole})
        started = self.weights(net, optimizer) | dict(net.named_buffers())
        seen = StepResult(self.seed, own, started, missing)
        for step in range(len(CHANGES)):
            if step == JOIN_STEP and late["params"]:
                for parameter in late["params"]:  # each rank's own numbers, until it joins
                    parameter.data += rank
                net.zero_grad()
                optimizer.add_param_group(late)
                seen.joined = clone(dict(net.named_parameters()))
            change(optimizer.param_groups, step)
            self._step(case, rank, step, net, optimizer, seen)
            seen.steps.append(self.weights(net, optimizer))
        with torch.no_grad():
            seen.output = case.loss(net, self.seed, 0, 99)
        return seen

    def _step(
        self,
        case: StageCase,
        rank: int,
        step: int,
        net: nn.Module,
        optimizer: Any,
        seen: StepResult,
    ) -> None:
        if step == EXTRA_BACKWARD_STEP:  # zero_grad() comes after it
            case.loss(net, self.seed, rank, step, -1).backward()
        told: list[tuple[bool, Tensor]] = []

        def closure() -> Tensor:
            recorded, loss = torch.is_grad_enabled(), torch.zeros(())
            with torch.enable_grad():
                optimizer.zero_grad()
                for part in range(case.quiet + 1) if (rank, step) != case.absent else ():
                    loss = case.loss(net, self.seed, rank, step, part)
                    loss.backward()
            told.append((recorded, loss.detach()))
            return loss

        if not case.with_closure:
            closure()
            seen.kept = whole_gradients(net)
            optimizer.step()
            return
        with torch.no_grad():
            loss = optimizer.step(closure)
        row = {"called": bool(told), "recorded": bool(told) and told[0][0]}
        row["returned"] = isinstance(loss, Tensor) and bool(told and loss == told[0][1])
        seen.closures.append(row)

    def _resumed(self, rank: int) -> set[str]:
        """What was lost in a restart by which bf16 weights after five steps are others."""
        ends, lost = [], set()
        for restart in (False, True):
            seed_all(self.seed)
            net = Sums(HALF)
            optimizer = self.make(net, lr=1e-3)
            for step in range(5):
                if restart and step == 3:
                    saved = through_a_file(optimizer.state_dict())
                    weights = self.weights(net, optimizer)
                    net = Sums(HALF)
                    if self.stage < 3:  # stage 3's parts are in its state
                        net.load_state_dict(weights)
                    optimizer = self.make(net, lr=0.5, weight_decay=0.9)
                    optimizer.load_state_dict(saved)
                    if rounded_since(saved, optimizer.state_dict()):
                        lost.add("bits")
                    if not torch.equal(flat(self.weights(net, optimizer)), flat(weights)):
                        lost.add("weights")
                optimizer.zero_grad()
                net(torch.tensor(rank + step + 0.5, dtype=HALF)).backward()
                optimizer.step()
            ends.append(flat(self.weights(net, optimizer)))
        return set() if torch.equal(*ends) else {"apart", *lost}

    def _exchanged(self, rank: int) -> tuple[str, Any]:
        """The type of the error that the other rank's state is met with, and this rank's state."""
        optimizer = self.make(StageCase().net())
        states: list[Any] = [None, None]
        dist.all_gather_object(states, through_a_file(optimizer.state_dict()))
        return error_of_loading(optimizer, states[1 - rank]), states[rank]

    def _halves(self, rank: int) -> Weights:
        """Weights in bf16 before and after steps that are smaller than a rounding step."""
        seed_all(self.seed)
        net = Slopes()
        started = clone(dict(net.named_parameters()))
        optimizer = self.make(net, **SMALL_STEPS)
        for _ in range(NUM_SMALL_STEPS):
            optimizer.zero_grad()
            net(torch.tensor(1.0 + rank, dtype=HALF)).backward()
            optimizer.step()
        return started, self.weights(net, optimizer)

    def _outputs(self, rank: int) -> Weights | str:
        """Weights of a model with a unit that returns a tuple; or the error that came."""
        seed_all(self.seed)
        net = TwoOutputs()
        started = clone(dict(net.named_parameters()))
        optimizer = self.make(net)
        try:
            for step in range(3):
                optimizer.zero_grad()
                net(rows_of(rank, step)).square().mean().backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return started, self.weights(net, optimizer)

    def _bytes(self, size: Size, rank: int) -> Bytes:
        seed_all(self.seed)
        with count_live_bytes() as live:
            net = size.model(size.dtype)
            units = [numbers(layer.parameters()) for layer in net.layers]
            numel = numbers(net.parameters())
            trained = numbers(p for p in net.parameters() if p.requires_grad)
            optimizer = self.make(net)
            settle(0.02)
            before = live.now()
            for step in range(2):
                with count_traffic() as traffic:
                    moments = one_step(net, optimizer, live, rank + step)
            moments["before a backward"] = before
            net(torch.tensor(1.0, dtype=size.dtype)).backward()  # which zero_grad() throws away
            optimizer.zero_grad(set_to_none=False)
            note(moments, "a dropped backward", live)
            if not self.first:
                moments |= saved_bytes(optimizer.state_dict())
            if self.stage == 3:
                with torch.no_grad():
                    net(torch.tensor(1.0, dtype=size.dtype))
                note(moments, "an evaluation", live)
                optimizer.full_state_dict()
                note(moments, "full_state_dict", live)
        return Bytes(numel, trained, numel - sum(units), max(units), moments, traffic.calls)


def saved_bytes(state: Any) -> dict[str, int]:
    """The bytes of a state's tensors, and those that torch.save writes of them."""
    leaves = [
        x for x in tree_leaves(state) if isinstance(x, Tensor) and x.nbytes >= NEGLIGIBLE_BYTES
    ]
    storages = [x.untyped_storage() for x in leaves]
    return {
        "state_dict": sum({x.data_ptr(): x.nbytes for x in leaves}.values()),
        "saved": sum({x.data_ptr(): x.nbytes() for x in storages}.values()),
    }


def error_of_loading(optimizer: Any, state: Any) -> str:
    """The type of what load_state_dict() raises; "" for nothing."""
    try:
        optimizer.load_state_dict(state)
    except Exception as error:
        return "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return ""


def one_step(net: nn.Module, optimizer: Any, live: LiveBytes, value: float) -> dict[str, int]:
    """Train once; the live bytes after each part, and the most while something was sent in it."""
    dtype = next(net.parameters()).dtype
    moments: dict[str, int] = {}
    optimizer.zero_grad(set_to_none=False)  # frees them all the same
    note(moments, "zero_grad", live)
    loss = net(torch.tensor(1.0 + value, dtype=dtype))
    note(moments, "forward", live)
    moments["in parameters"] = sum(p.untyped_storage().nbytes() for p in net.parameters())
    loss.backward()
    del loss
    note(moments, "backward", live)
    optimizer.step()
    note(moments, "step", live)
    return moments


def note(moments: dict[str, int], name: str, live: LiveBytes) -> None:
    """Write down the bytes that are alive now, and the most while something was sent before."""
    moments[f"most in {name}"] = max((size for _, size in live.at_collectives), default=0)
    settle(0.02)
    moments[f"after {name}"] = live.now()
    live.at_collectives.clear()


@once_an_answer
def observed(stage: int, answer: Make) -> Stage:
    """The laboratory of an answer, one for all its checks."""
    return Stage(stage, answer)


@once_an_answer
def observed_first(stage: int, answer: Make) -> Stage:
    """The laboratory of an answer to the happy path of a stage."""
    return Stage(stage, answer, first=True)
