"""The checkpoint of a model on a mesh of three axes."""

from collections.abc import Mapping

from torch import Tensor, nn

from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.sharded_replicas import ShardedParameters, ShardedStates
from shared.ranks.collectives import local_part
from shared.sharding.flat import Bucket
from shared.sharding.flat_unit import FlatUnit
from shared.tensor_parallel.checkpoint import CutModel
from shared.training.named_checkpoint import TensorOf


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
        if isinstance(replicas, ShardedStates):
            self.optimizer = replicas.optimizer.inner
            self.flats = [(bucket, bucket.master) for bucket in replicas.optimizer.buckets]
        if isinstance(replicas, ShardedParameters):
            self.flats = [(unit, unit.shard) for unit in replicas.sharded.units]

    def state_of(self, tensor_of: TensorOf) -> dict[str, Tensor]:
        """The tensors of this rank's stages and part of tp; those in flat pieces are copies."""
        whole: dict[nn.Parameter, Tensor] = {}
        for unit, shard in self.flats:
            whole |= zip(unit.parameters, unit.full(tensor_of(shard)), strict=True)
        return {
            name: self._placed(whole[p] if p in whole else tensor_of(p), p)
            for name, p in self.parameters.items()
        }

    def load_state(self, tensor_of: TensorOf, values: Mapping[str, Tensor]) -> None:
        """Cut flat pieces out of what was filled; the model's parameters become what they say."""
        own = {p: local_part(values[name]) for name, p in self.parameters.items()}
        for unit, shard in self.flats:
            flat = shard.new_zeros(len(unit.flat))
            for p, piece in zip(unit.parameters, unit.pieces(flat), strict=True):
                piece.copy_(own[p])
            tensor_of(shard).copy_(unit.own_part(flat))
            if isinstance(unit, Bucket):
                unit.round()
                unit.gather().wait()
