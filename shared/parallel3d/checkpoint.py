"""The checkpoint of a model that is cut over tensor-parallel ranks, pipeline stages, or neither."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shared.fsdp.flat_unit import FlatUnit
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.sharing import SharedParameters, SharedStates
from shared.tensor_parallel.models import named_tensors
from shared.training.named_checkpoint import Of, load_named, save_named
from shared.zero.flat import Bucket


class CutModel:
    """The layout of a model whose tensors a rank has whole or cut along one dim, for a checkpoint.

    `group` are the tensor-parallel ranks, over which a parameter with `cut_dim` is cut. Of `named`
    (`named_tensors` of the model; by default of this module) those count that the module has: a
    pipeline has its own stages. torch's DTensors, of `parallelize_module` or of `fully_shard`, are
    taken as they are. So this also is the layout of one process, and of a DDP's inner module.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        named: Mapping[str, Tensor] | None = None,
    ) -> None:
        named = named_tensors(module) if named is None else named
        own = {*module.parameters(), *module.buffers()}
        named = {name: x for name, x in named.items() if x in own}
        self.parameters = {name: x for name, x in named.items() if isinstance(x, nn.Parameter)}
        self._buffers = {name: x for name, x in named.items() if name not in self.parameters}
        self.mesh: DeviceMesh | None = None
        if any(hasattr(p, "cut_dim") for p in self.parameters.values()):
            device = next(iter(self.parameters.values())).device.type
            group = dist.group.WORLD if group is None else group
            assert group is not None, "a model that is cut over ranks has a group of them"
            self.mesh = DeviceMesh.from_group(group, device)

    def give(self, of: Of) -> dict[str, Tensor]:
        """The tensors themselves, those that are cut with their place in the whole."""
        return {name: self._placed(of(p), p) for name, p in self.parameters.items()}

    def take(self, of: Of, values: Mapping[str, Tensor]) -> None:
        """What give() gave is filled in place: nothing is left to do."""

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the module."""
        return dict(self._buffers)

    def _placed(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        dim: int | None = getattr(parameter, "cut_dim", None)
        if dim is None or self.mesh is None:
            return part
        shape = torch.Size(
            n * self.mesh.size() if i == dim else n for i, n in enumerate(part.shape)
        )
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
        )


class OnMesh(CutModel):
    """The layout of a Parallel3D: tensors cut over tp and stages, with ZeRO in flat pieces over dp.

    The pieces are put together over the replicas first, so that while a checkpoint is written or
    read a rank holds all of its own part of the stage.
    """

    def __init__(self, engine: Parallel3D) -> None:
        super().__init__(engine.pipeline, engine.mesh.tp.group, engine.names)
        replicas = engine.replicas
        self.optimizer = replicas.optimizer
        self.flats: list[tuple[Bucket | FlatUnit, nn.Parameter]] = []  # with what is trained of it
        if isinstance(replicas, SharedStates):
            self.optimizer = replicas.optimizer.inner
            self.flats = [(bucket, bucket.master) for bucket in replicas.optimizer.buckets]
        if isinstance(replicas, SharedParameters):
            self.flats = [(unit, unit.shard) for unit in replicas.sharded.units]

    def give(self, of: Of) -> dict[str, Tensor]:
        """The tensors of this rank's stages and part of tp; those in flat pieces are copies."""
        whole: dict[nn.Parameter, Tensor] = {}
        for unit, shard in self.flats:
            whole |= zip(unit.parameters, unit.full(of(shard)), strict=True)
        return {
            name: self._placed(whole[p] if p in whole else of(p), p)
            for name, p in self.parameters.items()
        }

    def take(self, of: Of, values: Mapping[str, Tensor]) -> None:
        """Cut flat pieces out of what was filled; the model's parameters become what they say."""
        own = {p: _local(values[name]) for name, p in self.parameters.items()}
        for unit, shard in self.flats:
            flat = shard.new_zeros(len(unit.flat))
            for p, piece in zip(unit.parameters, unit.pieces(flat), strict=True):
                piece.copy_(own[p])
            of(shard).copy_(unit.own_part(flat))
            if isinstance(unit, Bucket):
                unit.round()
                unit.gather().wait()


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def save_engine(engine: Parallel3D, folder: Path) -> None:
    """Write model and optimizer of a mesh's engine as a checkpoint; every rank takes part."""
    layout = OnMesh(engine)
    save_named(layout, layout.optimizer, folder)


def load_engine(engine: Parallel3D, folder: Path) -> int:
    """Continue from a checkpoint of any engine; returns the number of steps that it had made."""
    layout = OnMesh(engine)
    return load_named(layout, layout.optimizer, folder)
