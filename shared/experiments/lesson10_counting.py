"""Bytes that a rank keeps under lesson 10's engines, by kind."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shared.zero.counting import state_bytes

CRUMB = 1024  # bytes; smaller storages are inputs, losses, step counts


def live_storages() -> list[torch.UntypedStorage]:
    """The storages of all tensors that Python can reach, gradients included."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    real = (x for x in tensors if x.device.type != "meta" and not isinstance(x, FakeTensor))
    return [x.untyped_storage() for x in real]


def deepspeed_bytes(engine: Any, known: set[int]) -> dict[str, int]:
    """Bytes of every live storage that is not `known`, by what DeepSpeed uses it for.

    Buckets are what is neither weight nor optimizer state: gradients on their way, gathered
    weights, buffers.
    """
    sizes = {s.data_ptr(): s.nbytes() for s in live_storages() if s.data_ptr() not in known}
    sizes = {address: size for address, size in sizes.items() if size >= CRUMB}
    weights, states, gradients = [], [], []
    for parameter in engine.module.parameters():
        weights += [parameter, getattr(parameter, "ds_tensor", None)]
    base = engine.basic_optimizer
    masters = [p for group in base.param_groups for p in group["params"]]
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        masters += getattr(engine.optimizer, name, [])
    for master in masters:
        states += [master, *base.state.get(master, {}).values()]
        gradients.append(master.grad)
    found = {}
    own = {"weights": weights, "optimizer states": states, "fp32 gradients": gradients}
    for kind, tensors in own.items():
        found[kind] = sum(sizes.pop(address, 0) for address in _addresses(tensors))
    found["gradients, buckets"] = sum(sizes.values())
    return found


def engine_bytes(model: nn.Module, optimizer: Any, known: set[int]) -> dict[str, int]:
    """Bytes by kind of an engine by hand; of a learner's own, everything that is not `known`."""
    if hasattr(optimizer, "buckets") and hasattr(optimizer, "inner"):
        return state_bytes(model, optimizer)
    sizes = {s.data_ptr(): s.nbytes() for s in live_storages() if s.data_ptr() not in known}
    return {"all kinds": sum(sizes.values())}


def _addresses(tensors: Iterable[Any]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if isinstance(x, Tensor)}
