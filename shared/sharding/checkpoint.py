"""The checkpoint of a sharded module: a flat shard is given out as rows of the tensors in it.

A flat shard is a piece of the tensors of one unit on one number of ranks, and says nothing to
another engine. One unit at a time is gathered, and each rank gives its rows of every tensor.
"""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shared.sharding.fully_shard import FullyShard
from shared.training.named_checkpoint import TensorOf, load_named, save_named


def by_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a tensor that all ranks have, as a DTensor; a single number as it is."""
    if whole.dim() == 0:
        return whole.clone()
    rows = whole.chunk(mesh.size(), dim=0)
    at = mesh.get_local_rank()
    own = rows[at].clone() if at < len(rows) else whole[:0].clone()
    return DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


class ShardedByRows:
    """The layout of a sharded module for a checkpoint: every rank of the world has its rows."""

    def __init__(self, sharded: FullyShard) -> None:
        self.sharded = sharded
        device = next(iter(sharded.shards)).device.type
        self.mesh = init_device_mesh(device, (dist.get_world_size(),))

    def state_of(self, tensor_of: TensorOf) -> dict[str, Tensor]:
        """Rows of what belongs to the shards; one unit at a time is whole."""
        return self.sharded.each_whole(
            lambda unit: tensor_of(unit.shard), lambda whole, _: by_rows(whole, self.mesh)
        )

    def load_state(self, tensor_of: TensorOf, values: Mapping[str, Tensor]) -> None:
        """Put the rows together, one unit at a time, and keep this rank's part of each."""

        def whole(name: str) -> Tensor:
            value = values[name]
            return value.full_tensor() if isinstance(value, DTensor) else value

        self.sharded.fill_shards(whole, lambda unit: tensor_of(unit.shard))

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers, which are whole on every rank."""
        places = self.sharded.names()
        state = self.sharded.module.state_dict()
        return {name: x for name, x in state.items() if name not in places}


def save_by_rows(sharded: FullyShard, optimizer: Optimizer | None, folder: Path) -> None:
    """Write a checkpoint; every rank writes its rows."""
    save_named(ShardedByRows(sharded), optimizer, folder)


def load_by_rows(sharded: FullyShard, optimizer: Optimizer | None, folder: Path) -> None:
    """Continue from a checkpoint of any engine. The optimizer is new, or has the states."""
    load_named(ShardedByRows(sharded), optimizer, folder)
