"""Where a rank works on its own part: what enters there, and whose random numbers are drawn."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from shared.ranks.collectives import Group
from shared.tensor_parallel.conjugates import Message, gather_sequence, joined


@contextlib.contextmanager
def own_random_numbers(group: Group = None, device: torch.device | str = "cpu") -> Generator[None]:
    """Draw this rank's own random numbers inside, and the ranks' common ones again afterwards.

    The ranks must have drawn the same numbers so far. The seed inside is drawn from the common
    state, so that a recomputation from that state (lesson 11) draws the same numbers again.
    """
    seed = int(torch.randint(2**62, ()))  # the same on all ranks, and all have drawn it
    on_gpu = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.manual_seed(seed + dist.get_rank(group))
        yield


def split_region(module: nn.Module, group: Group, enter: Message | None) -> None:
    """Make `module` a region in which each rank works on its own part.

    Every vector that is given to its forward, by position or by keyword, comes through `enter`
    first; one that is given several times, once. Where dropout is at work inside, each rank draws
    random numbers of its own.
    """
    region = _Region(group, enter)
    module.register_forward_pre_hook(region.begin, with_kwargs=True)
    module.register_forward_hook(region.end, always_call=True)


class _Region:
    def __init__(self, group: Group, enter: Message | None) -> None:
        self.group, self.enter = group, enter
        self.open: list[contextlib.ExitStack] = []

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stack = contextlib.ExitStack()
        self.open.append(stack)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if given and _draws(module):
            stack.enter_context(own_random_numbers(self.group, given[0].device))
        entered: dict[int, Tensor] = {}  # by id: what is given several times enters once
        enter = self.enter
        for x in given if enter is not None else ():
            if enter is not None and x.is_floating_point() and id(x) not in entered:
                entered[id(x)] = enter(x, self.group)
                if enter is gather_sequence:
                    stack.enter_context(_kept_as_part(entered[id(x)], x, self.group))
        named = {name: entered.get(id(x), x) for name, x in kwargs.items()}
        return tuple(entered.get(id(x), x) for x in args), named

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.open.pop().close()


def _draws(module: nn.Module) -> bool:
    """Whether this forward draws random numbers: attention has a rate, others an nn.Dropout."""
    rates = [getattr(submodule, "dropout", 0.0) for submodule in module.modules()]
    rates += [submodule.p for submodule in module.modules() if isinstance(submodule, nn.Dropout)]
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


@contextlib.contextmanager
def _kept_as_part(whole: Tensor, part: Tensor, group: Group) -> Generator[None]:
    """Where operators inside would save `whole` for backward, save `part`, and gather it again.

    Korthikanti et al. 2022, section 4.2.2: a gathered sequence that is saved would undo a part of
    what sequence parallelism saves. One gather serves all operators that saved it. If saved-tensor
    hooks are already installed (by checkpointing, for one), every saved tensor also passes through
    the innermost of them.
    """
    again = _Again(part.detach(), whole.data_ptr(), whole.shape, group)
    try:
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            yield
    finally:
        again.part = None  # from here on autograd has it, or computes it again


class _Again:
    """The two saved-tensor hooks of `_kept_as_part`, for one gathered sequence.

    `users` operators have saved it; the first of them that runs its backward gathers it, `left`
    have not run yet, and the last frees it.
    """

    def __init__(self, part: Tensor, address: int, shape: torch.Size, group: Group) -> None:
        self.part: Tensor | None = part
        self.address, self.shape, self.group = address, shape, group
        self.whole: Tensor | None = None
        self.users = self.left = 0
        # torch calls the innermost hooks alone, which are ours, so that we call those outside. The
        # function is private to torch: read in 2.13, and lesson 14's test_regions.py holds it.
        outer = _top_saved_tensors_default_hooks(True)
        self.keep, self.give_back = outer or (lambda x: x.detach(), lambda x: x)

    def pack(self, x: Tensor) -> Any:
        # A transposed view of the whole is the whole: what counts is where it begins, and its size.
        if x.data_ptr() != self.address or x.numel() != self.shape.numel():
            return self.keep(x), None, None
        assert self.part is not None
        self.users += 1
        return self.keep(self.part), x.shape, x.stride()

    def unpack(self, kept: tuple[Any, Any, Any]) -> Tensor:
        part, shape, stride = kept
        part = self.give_back(part)
        if shape is None:
            return part
        if self.whole is None:
            self.whole, self.left = joined(part, self.group), self.users
        whole = self.whole.as_strided(shape, stride)
        self.left -= 1
        if not self.left:
            self.whole = None
        return whole
