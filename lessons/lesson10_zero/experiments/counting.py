"""Bytes that a rank keeps under lesson 10's engines, by kind."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from shared.measuring.live import NEGLIGIBLE_BYTES, NEGLIGIBLE_IN_A_MODEL, live_storages
from shared.sharding.counting import state_bytes
from shared.sharding.stages import ZeroStage1


def live_sizes(
    model: nn.Module,
    known: set[int],
    inputs: Iterable[Tensor] = (),
    negligible: int = NEGLIGIBLE_BYTES,
) -> dict[int, int]:
    """Bytes of the live storages that may be model states, by address.

    Left out are `known` ones, which were there before, the model's buffers, a step's `inputs`, and
    what is smaller than `negligible`: losses and step counts.
    """
    others = known | _addresses([*model.buffers(), *inputs])
    sizes = {s.data_ptr(): s.nbytes() for s in live_storages() if s.data_ptr() not in others}
    return {address: size for address, size in sizes.items() if size >= negligible}


def deepspeed_bytes(engine: Any, known: set[int], inputs: Iterable[Tensor] = ()) -> dict[str, int]:
    """Bytes of the `live_sizes` under DeepSpeed's engine, by what it uses them for.

    Buckets are what is neither weight nor optimizer state: gradients on their way, gathered
    weights, buffers.
    """
    sizes = live_sizes(engine.module, known, inputs, NEGLIGIBLE_IN_A_MODEL)
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


def engine_bytes(
    model: nn.Module, optimizer: Any, known: set[int], inputs: Iterable[Tensor] = ()
) -> dict[str, int]:
    """Bytes by kind of the course's own engines; of any other, all its `live_sizes` together.

    Of an answer nobody knows how it names what it keeps: it is counted by what is alive.
    """
    if isinstance(optimizer, ZeroStage1):
        return state_bytes(model, optimizer)
    return {"all kinds": sum(live_sizes(model, known, inputs).values())}


def _addresses(tensors: Iterable[Any]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if isinstance(x, Tensor)}
