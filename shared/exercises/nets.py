"""The models that engines are tried on, and the steps that they take."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Grads = dict[str, Tensor | None]


class Mark(torch.autograd.Function):
    """The identity; calls back when backward passes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grads[0], None


class Net(nn.Module):
    """Odd sizes, a tied weight, frozen parameters, buffers, a layer that a step can leave out."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.fixed = nn.Linear(7, 7, bias=False)
        self.middle = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7, bias=False)
        self.spare = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("count", torch.randint(0, 1000, (2,)))
        if tied:
            self.again.weight = self.middle.weight
        if frozen:
            self.fixed.requires_grad_(False)
            self.spare.bias.requires_grad_(False)
        self.on_mark: Callable[[], None] = lambda: None

    def mix(self) -> "Net":
        """Have one layer in float32, and one weight that lies in memory column by column."""
        self.spare.float()
        self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())
        return self

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = Mark.apply(self.first(x), lambda: self.on_mark()).tanh()
        h = self.again(self.middle(self.fixed(h)).tanh()).tanh()
        if not skip:
            h = h + self.spare(h.to(self.spare.weight.dtype))
        return self.last(h) + self.shift


BUFFERS = ("shift", "count")
FROZEN = ("fixed.weight", "spare.bias")


@dataclass(frozen=True)
class Case:
    """Some training steps of the net on some ranks.

    `skipped` holds (rank, step) or (rank, step, micro-batch) that leave the layer `spare` out,
    `keep` leaves gradients where they are (zero_grad(set_to_none=False)), and so many micro-batches
    as `quiet` says come under no_sync before the one that is sent. `mixed`: two dtypes, and a
    weight that is transposed. `old`: what is frozen has a gradient of the time before. The loss is
    multiplied by `steepness`.
    """

    world_size: int = 2
    tied: bool = False
    frozen: bool = False
    steps: int = 2
    skipped: frozenset[tuple[int, ...]] = frozenset()
    keep: bool = False
    quiet: int = 0
    mixed: bool = False
    old: bool = False
    steepness: float = 1

    def net(self) -> Net:
        """Return the model, from the random state as it is."""
        net = Net(self.tied, self.frozen).double()
        return net.mix() if self.mixed else net

    def trainable_bytes(self) -> list[int]:
        """Return the gradients' bytes, each trained parameter once, the last one first."""
        return [p.nbytes for p in self.net().parameters() if p.requires_grad][::-1]

    def dtype_bytes(self) -> list[int]:
        """Return the gradients' bytes by dtype, the smaller first."""
        trained = [p for p in self.net().parameters() if p.requires_grad]
        dtypes = {p.dtype for p in trained}
        return sorted(sum(p.nbytes for p in trained if p.dtype == dtype) for dtype in dtypes)

    def loss(self, model: Any, seed: int, rank: int, step: int, part: int = 0) -> Tensor:
        """Return the mean over this rank's rows of a step's (micro-)batch."""
        generator = torch.Generator().manual_seed(seed + 1000 * rank + 10 * step + part)
        rows = torch.randn(4, 5, generator=generator).double()
        skip = not self.skipped.isdisjoint({(rank, step), (rank, step, part)})
        return model(rows, skip=skip).square().mean() * self.steepness


def leave_old_gradients(net: nn.Module) -> None:
    """Give what is frozen a gradient, as if it had been frozen in the middle of training."""
    for parameter in net.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def clone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a state's tensors."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def grads_of(net: nn.Module) -> Grads:
    """Return copies of all gradients by name, each tied one once."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}


def flat(grad: Tensor | None) -> Tensor:
    """Return a gradient as one row; none as nothing."""
    return torch.zeros(0) if grad is None else grad.flatten()


def flat_grads(grads: Mapping[str, Tensor | None]) -> Tensor:
    """Return all gradients as one row, nothing where there is none."""
    return torch.cat([flat(grad).double() for grad in grads.values()])


@torch.no_grad()
def descend(net: nn.Module) -> None:
    """Take a step of descent; torch.optim would import its compiler in every rank, for seconds."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad


def twin_steps(case: Case, seed: int, start: dict[str, Tensor]) -> Iterator[list[Grads]]:
    """For each step every rank's own gradients, from weights that follow the whole batch."""
    twin = case.net()
    twin.load_state_dict(start)
    for step in range(case.steps):
        local = []
        for rank in range(case.world_size):
            twin.zero_grad()
            for part in range(case.quiet + 1):
                case.loss(twin, seed, rank, step, part).backward()
            local.append(grads_of(twin))
        yield local
        mean = mean_of(local)
        for name, parameter in twin.named_parameters():
            parameter.grad = mean[name]
        descend(twin)


def mean_of_parts(case: Case, seed: int, start: dict[str, Tensor], parts: Sequence[int]) -> Tensor:
    """Return the mean over ranks of the first step's gradients, of some micro-batches alone."""
    twin = case.net()
    twin.load_state_dict(start)
    for rank in range(case.world_size):
        for part in parts:
            (case.loss(twin, seed, rank, 0, part) / case.world_size).backward()
    return flat_grads(grads_of(twin))


def own_of_parts(
    case: Case, seed: int, start: dict[str, Tensor], rank: int, parts: Sequence[int]
) -> Tensor:
    """Return one rank's own gradients of the first step, summed over some micro-batches."""
    twin = case.net()
    twin.load_state_dict(start)
    for part in parts:
        case.loss(twin, seed, rank, 0, part).backward()
    return flat_grads(grads_of(twin))


def mean_of(local: Sequence[Grads]) -> Grads:
    """Return the mean over ranks; a rank without a gradient counts as zeros."""
    result: Grads = {}
    for name in local[0]:
        there = [grad for grads in local if (grad := grads[name]) is not None]
        result[name] = torch.stack(there).sum(0) / len(local) if there else None
    return result


def through_a_file(state: Any) -> Any:
    """What is left of a state after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
