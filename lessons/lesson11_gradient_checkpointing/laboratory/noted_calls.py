"""Lesson 11: functions that note how they are called, segments read off a log, ways back."""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared.exercises.expecting import expect_close, recognise
from shared.exercises.seeds import fresh_generator, fresh_seed, seed_all

ENGINE = torch.utils.checkpoint.__file__


def engine_at_work() -> bool:
    """Whether torch.utils.checkpoint is among the functions that lead to this call."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == ENGINE:
            return True
        frame = frame.f_back
    return False


class Block(nn.Module):
    """Two linear layers with a dropout between them, which notes each of its calls."""

    def __init__(self, rate: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.rate = rate
        self.first, self.second = nn.Linear(6, 14, dtype=dtype), nn.Linear(14, 6, dtype=dtype)
        self.masks: list[Tensor] = []
        self.by_engine = False

    @property
    def calls(self) -> int:
        """How often it has been called."""
        return len(self.masks)

    def forward(self, x: Tensor) -> Tensor:
        """Return second(mask * tanh(first(x))) / (1 - rate)."""
        self.by_engine |= engine_at_work()
        hidden = self.first(x).tanh()
        mask = torch.rand(hidden.shape, dtype=hidden.dtype) >= self.rate
        self.masks.append(mask)
        return self.second(hidden * mask / (1 - self.rate))


def block_and_twin(rate: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[Block, Block]:
    """Two equal blocks with weights of their own."""
    seed_all(fresh_seed())
    block = Block(rate, dtype)
    return block, copy.deepcopy(block)


def batch(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """A leaf of random numbers."""
    made = torch.randn(*shape, generator=fresh_generator(), dtype=torch.float64).to(dtype)
    return made.requires_grad_(grad)


def batch_and_twin(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Two leaves with the same random numbers."""
    x = batch(*shape, dtype=dtype)
    return x, x.detach().clone().requires_grad_()


def draw_after(seed: int) -> None:
    """Seed, and draw once: the seed alone does not say where the generator stands."""
    seed_all(seed)
    torch.rand(1)


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradient of each parameter, None where there is none."""
    return [p.grad for p in module.parameters()]


class Noting:
    """A function that notes what `look` sees at each call; its call number `raise_at` fails."""

    def __init__(
        self,
        function: Callable[..., Any],
        look: Callable[..., Any] = lambda *_: None,
        raise_at: int = 0,
    ) -> None:
        self.function, self.look, self.raise_at = function, look, raise_at
        self.seen: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        """Look, then compute."""
        self.seen.append(self.look(*args))
        if len(self.seen) == self.raise_at:
            raise InterruptedError
        return self.function(*args)


class Drawing(torch.autograd.Function):
    """The identity, whose backward draws random numbers and notes them."""

    drawn: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Drawing.drawn.append(torch.rand(3))
        return grads[0]


def autocast_now(*args: Any) -> tuple[bool, torch.dtype, bool]:
    """Whether autocast is on for the CPU, its dtype, and whether it keeps its casts of weights."""
    dtype, cache = torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return torch.is_autocast_enabled("cpu"), dtype, cache


def in_full_precision(x: Tensor) -> Tensor:
    """A product that is float32 whatever autocast is outside, as a sensitive layer may ask for."""
    with torch.autocast("cpu", enabled=False):
        return x @ torch.linspace(-1, 1, x.shape[1] * 5).view(-1, 5)


def needs_of(*args: Any) -> list[bool | None]:
    """Which arguments need a gradient; None for those that are no tensors."""
    return [x.requires_grad if isinstance(x, Tensor) else None for x in args]


class Chain:
    """Layers whose calls are written into one log, each a linear map, tanh and dropout."""

    def __init__(self, num_layers: int, rate: float = 0.0) -> None:
        seed_all(fresh_seed())
        self.modules = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), nn.Tanh(), nn.Dropout(rate))
            for _ in range(num_layers)
        )
        self.log: list[int] = []
        self.outputs: list[StorageWeakRef] = []
        self.by_engine = False
        self.layers = [self._noting(number) for number in range(num_layers)]

    def _noting(self, number: int) -> Callable[[Tensor], Tensor]:
        def layer(x: Tensor) -> Tensor:
            self.log.append(number)
            self.by_engine |= engine_at_work()
            output = self.modules[number](x)
            self.outputs.append(StorageWeakRef(output.untyped_storage()))
            return output

        return layer

    def run(self, x: Tensor) -> Tensor:
        """All layers in turn, plainly."""
        for module in self.modules:
            x = module(x)
        return x

    def alive(self) -> list[int]:
        """The layers whose output is still there, that of either run."""
        return [n for n, out in zip(self.log, self.outputs, strict=True) if not out.expired()]

    def passes(self) -> tuple[list[int], list[int]]:
        """The layers called in forward, and those called again in backward, in their order."""
        return self.log[: len(self.layers)], self.log[len(self.layers) :]


def noted_modes(modules: nn.ModuleList) -> list[bool]:
    """Return a list to which each later call of one of the modules, or a copy, adds its mode."""
    modes: list[bool] = []
    for module in modules:
        module.register_forward_hook(lambda module, *_: modes.append(module.training))
    return modes


def segments_of(again: Sequence[int], num_layers: int) -> list[int]:
    """Sizes of the segments, first to last, from the calls in backward: the last is the rest."""
    sizes: list[int] = []
    for before, number in zip([None, *again], again, strict=False):
        if before is None or number != before + 1:
            sizes.insert(0, 0)
        sizes[0] += 1
    return [*sizes, num_layers - len(again)]


def backward_of(output: Tensor) -> None:
    """Go back from a sum that weighs every number differently."""
    try:
        (output * torch.arange(1, output.numel() + 1).view_as(output)).sum().backward()
    except RuntimeError as error:
        said = str(error)
        recognise(
            {
                "the second run starts from inputs that are not detached, and its backward goes on "
                "into the graph that made them": "second time" in said,
                "tensors are made to need a gradient that needed none, and integers cannot": (
                    "floating point" in said
                ),
                "the second run has no graph: gradients are off in backward": "require grad"
                in said,
            },
            expected="one more run from detached inputs, under torch.enable_grad()",
            seen=f"RuntimeError: {said[:90]}",
        )
        raise


def expect_same_gradients(
    got: nn.Module, want: nn.Module, lost: str = "autograd.grad returns those of the inputs alone"
) -> None:
    """Each parameter's gradient is the twin's; `lost` says why there may be none."""
    for (name, mine), theirs in zip(got.named_parameters(), want.parameters(), strict=True):
        recognise(
            {f"the weights get no gradient: {lost}": mine.grad is None},
            expected=f"a gradient of {name}, as without checkpointing",
            seen="None",
            hint="torch.autograd.backward adds gradients to every leaf on the way",
        )
        assert mine.grad is not None
        assert theirs.grad is not None
        twice = {"the weights get their gradient twice": 2 * theirs.grad}
        expect_close(mine.grad, theirs.grad, what=f"the gradient of {name}", looks_like=twice)
