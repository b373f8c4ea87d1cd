"""A module around a module, which can stand in its place; torch's DDP in all its versions."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared.errors import InputError

WRAPPERS = r"(?:^|(?<=\.))(?:module|_orig_mod)\."


def refuse_prefixes(state: Mapping[str, Any], own: Iterable[str]) -> None:
    """InputError, once, for a state whose names are these but for what a wrapper puts into them."""
    found = dict.fromkeys(part for name in state for part in re.findall(WRAPPERS, name))
    bare = {re.sub(WRAPPERS, "", name) for name in state}
    if found and not bare.isdisjoint(own) and set(own).isdisjoint(state):
        words = " and ".join(f'"{part}"' for part in found)
        raise InputError(
            f"the names of the state have {words} in them, as torch's DDP and torch.compile save "
            "them: save the model inside (ddp.module, compiled._orig_mod), or take that out"
        )


class Wrapped(nn.Module):
    """A model inside another module: forward, attributes and state_dict are the model's own.

    `ddp.encoder` is `ddp.module.encoder`. `state_dict` and `load_state_dict` use the model's
    names, without a "module." before each, so that a checkpoint does not tell how it was trained
    and loads into the bare model, on any number of ranks. (torch's DDP adds the prefix; people
    then save `ddp.module.state_dict()`.) An attribute that is *set* is the wrapper's, and
    `named_parameters` is nn.Module's: it shows where things are, prefix and all.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Called for what the wrapper itself does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet: asking self.module for it would never end
                raise
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's state under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state whose names are the model's; InputError for those of a wrapped one."""
        refuse_prefixes(state_dict, self.module.state_dict())
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def ddp_of_fixed_buffers(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """torch's DDP of a model whose buffers never change: no forward sends them."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, **settings, **{name: False})  # the latter before 2.13
