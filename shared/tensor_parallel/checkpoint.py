"""The checkpoint of a model that is cut over tensor-parallel ranks, pipeline stages, or neither."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shared.tensor_parallel.marks import cut_dim
from shared.tensor_parallel.models import named_tensors
from shared.training.named_checkpoint import ModuleLayout


class CutModel(ModuleLayout):
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
        super().__init__(module, named_tensors(module) if named is None else named)
        self.mesh: DeviceMesh | None = None
        if any(cut_dim(p) is not None for p in self.parameters.values()):
            device = next(iter(self.parameters.values())).device.type
            group = dist.group.WORLD if group is None else group
            assert group is not None, "a model that is cut over ranks has a group of them"
            self.mesh = DeviceMesh.from_group(group, device)

    def _placed(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        dim = cut_dim(parameter)
        if dim is None or self.mesh is None:
            return part
        shape = torch.Size(
            n * self.mesh.size() if i == dim else n for i, n in enumerate(part.shape)
        )
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
        )
