"""DeepSpeed's flat shards as rows of named tensors: its part in checkpoints that any mode reads.

DeepSpeed's own checkpoint is bound to its stage and its number of ranks. Its ZeRO keeps what the
optimizer updates in flat float32 tensors: stages 1 and 2 lay parameters end to end and cut the
whole into equal parts; stage 3 cuts each parameter and lays the parts of a rank end to end.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shared.sharding.checkpoint import by_rows
from shared.tensor_parallel.models import named_tensors
from shared.training.named_checkpoint import TensorOf


class Flat:
    """One flat shard, the parameters in it, and how to put them together or cut them out."""

    def __init__(self, shard: Tensor, parameters: Sequence[nn.Parameter], stage: int) -> None:
        self.shard, self.parameters, self.stage = shard, list(parameters), stage
        self.shapes = [getattr(p, "ds_shape", p.shape) for p in self.parameters]
        self.size, self.rank = dist.get_world_size(), dist.get_rank()

    def full(self, part: Tensor) -> list[Tensor]:
        """Every parameter whole, from what `part` is on each rank; a collective."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return [
            piece.view(shape) for piece, shape in zip(self._cut(parts), self.shapes, strict=True)
        ]

    def part(self, wholes: Sequence[Tensor]) -> Tensor:
        """This rank's shard of whole parameters: `full` the other way round."""
        numbers = [torch.zeros_like(self.shard.detach()) for _ in range(self.size)]
        if self.stage == 3:
            begin = 0
            for whole, share in zip(wholes, self._shares(), strict=True):
                padded = whole.new_zeros(share * self.size)
                padded[: whole.numel()] = whole.flatten()
                for rank, piece in enumerate(padded.split(share)):
                    numbers[rank][begin : begin + share] = piece
                begin += share
            return numbers[self.rank]
        flat = torch.cat(numbers)
        together = torch.cat([whole.flatten() for whole in wholes])
        flat[: len(together)] = together
        return flat.chunk(self.size)[self.rank]

    def _shares(self) -> list[int]:
        return [-(-shape.numel() // self.size) for shape in self.shapes]

    def _cut(self, parts: Sequence[Tensor]) -> list[Tensor]:
        sizes = [shape.numel() for shape in self.shapes]
        if self.stage == 3:
            columns = torch.stack(list(parts))[:, : sum(self._shares())].split(self._shares(), 1)
            return [c.flatten()[:size] for c, size in zip(columns, sizes, strict=True)]
        return list(torch.cat(list(parts))[: sum(sizes)].split(sizes))


class ShardOptimizer:
    """The optimizer inside DeepSpeed's, as a checkpoint asks it: states by shard, and a step."""

    def __init__(self, base: torch.optim.Optimizer, shards: Sequence[Tensor]) -> None:
        self.base, self.shards = base, list(shards)
        self.param_groups = [{"params": self.shards, "lr": 0.0}]

    @property
    def state(self) -> Any:
        """By shard."""
        return self.base.state

    def step(self) -> None:
        """A step of all shards at the rate of `param_groups`; stage 3 keeps its groups empty."""
        (group,) = self.base.param_groups
        kept, rate = group["params"], group["lr"]
        group["params"], group["lr"] = self.shards, self.param_groups[0]["lr"]
        self.base.step()
        group["params"], group["lr"] = kept, rate


class DeepSpeedShards:
    """The layout of DeepSpeed's engine, ZeRO 1 to 3 without offloading, for a checkpoint."""

    def __init__(self, engine: Any) -> None:
        self.zero, stage = engine.optimizer, engine.zero_optimization_stage()
        if stage == 3:
            pairs = zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True)
        else:
            shards = self.zero.single_partition_of_fp32_groups
            pairs = zip(shards, self.zero.round_robin_bit16_groups, strict=True)
        self.stage = stage
        self.flats = [Flat(shard, parameters, stage) for shard, parameters in pairs]
        self.optimizer = ShardOptimizer(self.zero.optimizer, [f.shard for f in self.flats])
        self.names = named_tensors(engine.module)
        self.mesh = init_device_mesh(engine.device.type, (dist.get_world_size(),))

    def state_of(self, tensor_of: TensorOf) -> dict[str, Tensor]:
        """Each rank's rows of what belongs to the shards; one flat tensor is whole at a time."""
        found: dict[int, Tensor] = {}
        for flat in self.flats:
            wholes = flat.full(tensor_of(flat.shard))  # ty: ignore[invalid-argument-type]
            for p, whole in zip(flat.parameters, wholes, strict=True):
                found[id(p)] = by_rows(whole, self.mesh)
        return {name: found[id(p)] for name, p in self.names.items() if id(p) in found}

    def load_state(self, tensor_of: TensorOf, values: Mapping[str, Tensor]) -> None:
        """Put the rows together, keep this rank's part, and let the parameters become it."""
        names = {id(p): name for name, p in self.names.items()}
        for flat in self.flats:
            given = [values[names[id(p)]] for p in flat.parameters]
            wholes = [x.full_tensor() if isinstance(x, DTensor) else x for x in given]
            tensor_of(flat.shard).copy_(flat.part(wholes))  # ty: ignore[invalid-argument-type]
        if self.stage < 3:
            self.zero.update_lp_params()
        else:
            self.zero._partition_all_parameters()  # those that a forward has left whole are old
            for number in range(len(self.flats)):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers."""
        return {n: x for n, x in self.names.items() if not isinstance(x, nn.Parameter)}
