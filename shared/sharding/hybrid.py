"""A mesh of two axes: sharded inside a node, replicated across nodes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shared.errors import InputError
from shared.sharding.flat_unit import FlatUnit
from shared.sharding.prefetch import PrefetchingShard


def mesh_groups(num_replicas: int, num_shards: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's two groups: those that share a model (a node), and those with the same shard.

    Rank r is shard r % num_shards of replica r // num_shards. Every rank makes every group: the
    call is a collective. Raises InputError where the sizes do not multiply to the world size.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if num_replicas < 1 or num_shards < 1 or num_replicas * num_shards != size:
        raise InputError(
            f"a mesh of {num_replicas} replicas x {num_shards} shards has "
            f"{num_replicas * num_shards} ranks, here are {size}"
        )
    rows = [list(range(i * num_shards, (i + 1) * num_shards)) for i in range(num_replicas)]
    columns = [list(range(i, size, num_shards)) for i in range(num_shards)]
    found = [(ranks, dist.new_group(ranks)) for ranks in (*rows, *columns)]
    own = [group for ranks, group in found if rank in ranks]
    assert len(own) == 2, f"rank {rank} is in {len(own)} groups"
    return own[0], own[1]


class HybridShard(PrefetchingShard):
    """FullyShard inside a group, whose shards' gradients are averaged over a second group."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        replicas: dist.ProcessGroup,
        group: dist.ProcessGroup,
        keep_whole: int = 0,
    ) -> None:
        super().__init__(module, units, compute_dtype, keep_whole=keep_whole, group=group)
        self.replicas, self._averaging = replicas, dict[FlatUnit, dist.Work]()
        for tensor in [*(unit.shard.detach() for unit in self.units), *module.buffers()]:
            dist.broadcast(tensor, group=replicas, group_src=0)

    def on_shard_gradient(self, unit: FlatUnit) -> None:
        """Start the second half of the mean: over those that hold the same shard."""
        grad = unit.shard.grad
        assert grad is not None, "a gradient has just arrived"
        grad.div_(dist.get_world_size(self.replicas))
        work = dist.all_reduce(grad, group=self.replicas, async_op=True)
        assert work is not None, "this rank is in the group"
        self._averaging[unit] = work

    def _reduce(self, unit: FlatUnit) -> None:
        if unit in self._averaging:  # a second backward is going to add to this gradient
            self._averaging.pop(unit).wait()
        super()._reduce(unit)

    def finish_gradient_sync(self) -> None:
        """As in FullyShard; waits for the other replicas, too."""
        super().finish_gradient_sync()
        self._finish_averaging()

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._finish_averaging()

    def _finish_averaging(self) -> None:
        for unit in list(self._averaging):
            self._averaging.pop(unit).wait()


def hybrid_shard(
    module: nn.Module,
    mesh: tuple[int, int],
    units: Sequence[nn.Module] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> HybridShard:
    """Shard a module over mesh[1] ranks, mesh[0] times: the node's size, and how many nodes.

    Parameters are gathered inside a node; across nodes only the gradient of a shard travels.
    Raises InputError where the sizes do not multiply to the world size.
    """
    replicas, shards = mesh
    group, others = mesh_groups(replicas, shards)
    return HybridShard(module, units, compute_dtype, replicas=others, group=group)
