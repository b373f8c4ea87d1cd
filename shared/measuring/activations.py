"""Activations: which tensors autograd keeps for backward, how many bytes, alive at which moment."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


class SavedBytes:
    """Bytes of the tensors that autograd keeps: `now`, and `peak`, the most at any moment so far.

    Counted over distinct storages: a tensor and its views are one. A tensor leaves the count when
    backward has passed its operator. `ignore` holds what exists anyway, the parameters.
    Source: torch.autograd.graph.saved_tensors_hooks.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self.now = self.peak = 0
        # Held, so that no other storage comes to stand at their place.
        self._ignored = {_address(tensor): tensor.untyped_storage() for tensor in ignore}
        # By a storage's address: how many saved tensors lie in it, and its bytes when it was saved.
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that has been saved."""
        address = _address(tensor)
        if address in self._ignored:
            return
        self._users[address] = self._users.get(address, 0) + 1
        if self._users[address] == 1:
            self._sizes[address] = tensor.untyped_storage().nbytes()
            self.now += self._sizes[address]
            self.peak = max(self.peak, self.now)

    def remove(self, tensor: Tensor) -> None:
        """Take a tensor that has been freed out of the count."""
        address = _address(tensor)
        if address in self._ignored:
            return
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self.now -= self._sizes.pop(address)  # it may have been resized since


class _Held:
    """What autograd is given to hold: when it lets go of this, the tensor is out of the count."""

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        # Detached: what an operator returned would hold this, and this it, out of Python's sight.
        self.tensor, self.counter = tensor.detach(), counter
        counter.add(tensor)

    def __del__(self) -> None:
        self.counter.remove(self.tensor)


def _address(tensor: Tensor) -> int:
    """Of the storage, not of its memory: a storage that is resized to 0 and back is the same."""
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def counting_saved(ignore: Iterable[Tensor] = ()) -> Generator[SavedBytes]:
    """Count what is saved inside the block, also by forwards that run inside of a backward.

    Exact on any device. Not seen: what a recomputation by torch's non-reentrant checkpoint keeps,
    since it has hooks of its own, and temporaries that no operator saves.
    """
    counter = SavedBytes(ignore)
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda tensor: _Held(tensor, counter), lambda held: held.tensor):
        yield counter


@dataclass(frozen=True)
class Saved:
    """A storage that is kept for backward, and the module whose operator saved it first."""

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def saved_by_module(module: nn.Module, run: Callable[[], Any]) -> list[Saved]:
    """What is kept for the backward of `run()`, each storage once, in order; no parameters.

    `where` is the name, inside `module`, of the innermost submodule that was in its forward.
    """
    stack, known = [""], {_address(p) for p in module.parameters()}
    found: list[tuple[Saved, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # its graph would hold it, and it its graph: never freed
        if _address(tensor) not in known:
            known.add(_address(tensor))
            size = tensor.untyped_storage().nbytes()
            # The tensor is kept: a freed one could give its address to the next.
            found.append((Saved(stack[-1], tuple(tensor.shape), tensor.dtype, size), kept))
        return kept

    handles = []

    def leave(*_: Any) -> None:  # no lambda: what a hook returns takes the place of the output
        stack.pop()

    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(part.register_forward_hook(leave))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run()  # alive until counted
    finally:
        for handle in handles:
            handle.remove()
    del result
    return [saved for saved, _ in found]


@dataclass(frozen=True)
class LayerCost:
    """What a layer keeps for backward in bytes, its input among it; the input alone; FLOPs.

    A checkpointed layer keeps `inputs` and pays `flops`, those of a forward, once more.
    """

    saved: int
    inputs: int
    flops: int


Layer = Callable[[Float[Tensor, "batch length d_model"]], Float[Tensor, "batch length d_model"]]


def layer_costs(
    layers: Iterable[Layer],
    x: Float[Tensor, "batch length d_model"],
    ignore: Iterable[Tensor] = (),
) -> list[LayerCost]:
    """Count each layer's costs in one forward from `x`; random states are left as they were."""
    costs, ignore = [], list(ignore)
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        for layer in layers:
            x = x.detach().requires_grad_()
            with counting_saved(ignore) as saved, FlopCounterMode(display=False) as counter:
                saved.add(
                    x
                )  # some layers keep it in another form only: then this is an upper bound
                result = layer(x)  # alive until counted
            flops = counter.get_total_flops()
            costs.append(LayerCost(saved.now, x.untyped_storage().nbytes(), flops))
            x = result
    return costs


def peak_bytes(costs: Sequence[LayerCost], choice: Sequence[bool]) -> int:
    """Bytes alive at the worst moment of a step in which the layers of `choice` are checkpointed.

    Backward goes from the last layer to the first. When it works on layer i, what layers 0 to i-1
    hold is still there, and all that layer i saves, kept or made again.
    """
    assert len(costs) == len(choice), f"{len(costs)} layers, {len(choice)} choices"
    held = [c.inputs if again else c.saved for c, again in zip(costs, choice, strict=True)]
    before = itertools.accumulate(held, initial=0)
    moments = (there + cost.saved for there, cost in zip(before, costs, strict=False))
    return max(moments, default=0)
