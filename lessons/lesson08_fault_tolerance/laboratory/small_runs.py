"""Small runs with every kind of state, and a loop that is watched while it trains."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from shared.data.sampling import ResumableSampler
from shared.exercises.expecting import expect
from shared.exercises.seeds import seed_all
from shared.fault_tolerance.fitting import origin
from shared.fault_tolerance.state import TakeStep, TrainingState

MARK = "torch-handle checkpoint 1"  # shared.training.checkpoint_files.MARK
GENERATORS = ("python", "numpy", "torch")
LENGTH, STEPS, BATCH, EVERY = 22, 14, 4, 3  # 6 steps an epoch, the last of 2 samples


class Wrapped(DistributedDataParallel):
    """DDP as a state_dict sees it, "module." before the names, without a process group.

    What DDP's own methods would ask the group for is left out.
    """

    __setstate__ = nn.Module.__setstate__

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.module(x)


class _Endless(Exception):
    """A training loop that does not stop; the text says how far it came."""


class CountedSampler(ResumableSampler):
    """A sampler that ends a loop which begins epoch after epoch."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        if self.begun > 100:
            raise _Endless("the 101st epoch is begun")
        return super().__iter__()


def toy(
    seed: int, rank: int = 0, world_size: int = 1, width: int = 5, wrapped: bool = False
) -> TrainingState:
    """Return a model with buffers and dropout, AdamW, a schedule, and 22 samples in an order."""
    generator_kept = torch.get_rng_state()
    torch.manual_seed(seed)
    # Names that hold "module.", and that begin with letters of it.
    model: nn.Module = nn.Sequential()
    model.add_module("embed", nn.Linear(3, width))
    model.add_module("norm", nn.BatchNorm1d(width))
    model.add_module("drop", nn.Dropout(0.4))
    model.add_module("submodule", nn.Linear(width, 1))
    torch.set_rng_state(generator_kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = LambdaLR(optimizer, lambda n: 1.0 / (n + 2))
    sampler = CountedSampler(LENGTH, world_size, rank, seed=11)
    return TrainingState(Wrapped(model) if wrapped else model, optimizer, schedule, sampler)


def toy_step(state: TrainingState, seen: list[int] | None = None) -> TakeStep:
    """Return a step that draws from all three generators and notes which samples it was given."""
    data = torch.linspace(-1, 1, 3 * LENGTH).view(LENGTH, 3)

    def take_step(indices: list[int]) -> float:
        if seen is not None:
            seen.extend(indices)
        rows = data[indices] * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        state.optimizer.zero_grad()
        loss = state.model(rows).square().mean()
        loss.backward()
        state.optimizer.step()
        return loss.item() + 1e-12  # digits that a float32 does not have

    return take_step


def train(state: TrainingState, steps: int, seen: list[int] | None = None) -> None:
    """Take so many steps more, epoch after epoch."""
    take_step, end = toy_step(state, seen), state.step + steps
    while state.step < end:
        order = iter(state.sampler)
        while state.step < end and (indices := list(itertools.islice(order, BATCH))):
            state.losses.append(take_step(indices))
            state.schedule.step()
            state.step += 1
        if state.step < end:
            state.sampler.set_epoch(state.sampler.epoch + 1)


def trained(steps: int, seed: int | None = None, **options: Any) -> tuple[TrainingState, list[int]]:
    """Return a run that took so many steps, and its samples; `seed` sets the generators first."""
    if seed is not None:
        seed_all(seed)
    state, seen = toy(1, **options), []
    train(state, steps, seen)
    return state, seen


def states_now() -> dict[str, Any]:
    """Return where the three generators stand, as the contract of random_states writes it."""
    name, keys, *rest = np.random.get_state()
    numbers = (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    return {"python": random.getstate(), "numpy": numbers, "torch": torch.get_rng_state()}


def set_states(states: dict[str, Any]) -> None:
    """Put the generators back."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])


def is_numpy_state(value: Any) -> bool:
    """Return whether `set_random_states` could take a value as numpy's state."""
    keys = value[1] if isinstance(value, tuple) and len(value) == 5 else None
    return isinstance(keys, np.ndarray) or getattr(keys, "dtype", None) == torch.int64


def states_and_numbers(seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Return where the generators stand after a seed, and the numbers that come next."""
    seed_all(seed)
    return states_now(), draw_numbers()


def draw_numbers() -> dict[str, float]:
    """Return one number of each generator; numpy draws normal numbers in pairs, and keeps one."""
    return {
        "python": random.random(),
        "numpy": float(np.random.rand() + np.random.standard_normal()),
        "torch": torch.rand(()).item(),
    }


def draw_when_loaded(state: TrainingState) -> None:
    """Let optimizer and sampler draw numbers while their states are loaded, as any part may."""
    parts: list[Any] = [state.optimizer, state.sampler]
    for part in parts:
        load = part.load_state_dict
        part.load_state_dict = lambda content, load=load: (load(content), draw_numbers())


def asked_without_cuda(random_states: Callable[[], Any]) -> tuple[Any, str]:
    """Return the states, and what asking did to a CUDA that is there and not in use, in words."""
    unused, states = not torch.cuda.is_initialized(), None
    try:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            states = random_states()
    except (AssertionError, RuntimeError) as error:
        if not unused or "CUDA" not in str(error):
            raise
        return None, f"{type(error).__name__}: {error}"
    started = unused and torch.cuda.is_initialized()
    return states, "CUDA started by asking, after which no process can fork" if started else ""


def asked_with_cuda(random_states: Callable[[], Any]) -> str:
    """Return what is said of CUDA's generator where CUDA is in use; "" if it is its state.

    The CUDA is made up, so an answer that asks it otherwise than by torch.cuda gets no verdict.
    """
    state = torch.arange(16, dtype=torch.uint8)
    known: dict[str, Any] = {"is_initialized": True, "is_available": True, "device_count": 2}
    known |= {"current_device": 0, "get_rng_state": state, "get_rng_state_all": [state, state + 1]}
    with contextlib.ExitStack() as stack:
        # torch.cuda.get_rng_state is torch.cuda.random's, and may be called by either name.
        places: list[Any] = [torch.cuda, torch.cuda.random]
        for place, (name, value) in itertools.product(places, known.items()):
            if hasattr(place, name):
                stack.enter_context(mock.patch.object(place, name, return_value=value))
        try:
            found = random_states()
        except (AssertionError, AttributeError, LookupError, RuntimeError):
            stack.close()
            random_states()  # what fails in any case is not excused
            return ""
    if "cuda" not in found:
        return "nothing"
    return "" if equal(found["cuda"], state) else f"a {type(found['cuda']).__name__}"


def content_of(state: TrainingState) -> dict[str, Any]:
    """Return what a checkpoint of one rank holds, written down without the exercises' help."""
    inner = getattr(state.model, "module", state.model)
    return {
        "mark": MARK,
        "origin": origin(state),
        "step": state.step,
        "losses": list(state.losses),
        "model": inner.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "schedule": state.schedule.state_dict(),
        "sampler": state.sampler.state_dict(),
        "random": [states_now()],
    }


def equal(one: Any, other: Any) -> bool:
    """Return whether values and containers are equal, tensors bit for bit."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def rounded(got: Any, want: list[float]) -> bool:
    """Return whether losses are those wanted but for digits that float32 does not have."""
    if type(got) is not list or len(got) != len(want) or got == want:
        return False
    return all(
        type(x) is float and abs(x - y) <= 1e-6 * abs(y) for x, y in zip(got, want, strict=True)
    )


@dataclass
class WatchedRun:
    """A run and what was seen of it; `snapshot` is what `load` puts into it."""

    state: TrainingState
    snapshot: dict[str, Any] | None = None
    loads: int = 0
    saves: list[int] = field(default_factory=list)  # the step at each save
    rates: list[int] = field(default_factory=list)  # how far the schedule was at each save
    ahead: list[int] = field(default_factory=list)  # samples that it was ahead of training
    lacking: list[int] = field(default_factory=list)  # losses that were missing at each save
    stepped: list[int] = field(default_factory=list)  # how far it was at each step
    seen: list[int] = field(default_factory=list)  # the samples, in their order
    losses: Any = None  # what resume_training returned

    @property
    def schedule_steps(self) -> int:
        """How often the schedule was stepped."""
        return self.state.schedule.state_dict()["last_epoch"]

    def load(self, state: TrainingState) -> None:
        """Put the snapshot in, if there is one."""
        self.loads += 1
        if self.snapshot is not None:
            for part in ("model", "optimizer", "schedule", "sampler"):
                getattr(state, part).load_state_dict(self.snapshot[part])
            state.step, state.losses[:] = self.snapshot["step"], self.snapshot["losses"]
            set_states(self.snapshot["random"][0])

    def save(self, state: TrainingState) -> None:
        """Note the step, and where schedule, sampler and losses stand."""
        self.saves.append(state.step)
        self.rates.append(self.schedule_steps)
        place = state.sampler.state_dict()
        self.ahead.append(place["epoch"] * LENGTH + place["consumed"] - len(self.seen))
        self.lacking.append(state.step - len(state.losses))

    def resume(self, resume_training: Callable[..., Any], num_steps: int = STEPS) -> str:
        """Let an answer train this run; return how far it came if it did not stop, else ""."""
        step = toy_step(self.state, self.seen)

        def take_step(indices: list[int]) -> float:
            if len(self.seen) > 400:
                raise _Endless("over 400 samples")
            self.stepped.append(self.schedule_steps)
            kind = type(indices).__name__
            expect(
                isinstance(indices, list),
                mistake=f"take_step is given a {kind}: a dataset takes a list for several samples, "
                "and a tuple for one place in several dimensions" * (kind == "tuple"),
                expected="take_step(indices) with a list",
                seen=f"a {kind}",
            )
            return step(indices)

        try:
            self.losses = resume_training(
                self.state, take_step, num_steps=num_steps, batch_size=BATCH, interval=EVERY,
                save=self.save, load=self.load,
            )  # fmt: skip
        except _Endless as error:
            return f"{error} at step {self.state.step}"
        return ""
