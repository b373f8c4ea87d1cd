"""Bytes, counted rather than estimated."""

import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], Any], *, ignore: tuple[Tensor, ...] = ()) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass of `run()`.

    Counted over distinct storages: a tensor and its views are one. What is in `ignore` is left
    out (parameters, which exist anyway). Exact on any device that has memory ("meta" has none);
    temporaries that are freed before `run` returns are not part of it.

    Source: torch.autograd.graph.saved_tensors_hooks.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in ignore}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        # The storage itself is kept: a freed one could give its address to the next tensor.
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor.detach()  # its graph would hold it, and it its graph: never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # alive until counted
    total = sum(storage.nbytes() for address, storage in storages.items() if address not in known)
    del result
    return total


def peak_memory(device: torch.device) -> int:
    """The most memory so far: a GPU's tensors, or on a CPU this whole process, imports included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
