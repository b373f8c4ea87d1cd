"""The same layers under torch's own engine: `parallelize_module` with DTensor."""

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shared.model.attention import MultiHeadAttention
from shared.model.layers import PositionwiseFeedForward

Block = TypeVar("Block", bound=nn.Module)


def torch_parallel_block(block: Block, mesh: DeviceMesh, share_input: bool = True) -> Block:
    """Cut a layer with torch's engine, in place, as `parallel_block` does; return it.

    Queries, keys and values each bring the gradient of their input together. With `share_input`
    they get one DTensor, whose gradients are added up before they are sent: one message, not three.
    """
    plan: dict[str, Any] = {}
    for name, child in block.named_children():
        if isinstance(child, MultiHeadAttention):
            plan |= {f"{name}.{w}": ColwiseParallel() for w in ("w_q", "w_k", "w_v")}
            plan[f"{name}.w_o"] = RowwiseParallel()
            child.num_heads //= mesh.size()
            if share_input:
                child.register_forward_pre_hook(_Replicated(mesh))
        elif isinstance(child, PositionwiseFeedForward):
            plan |= {f"{name}.linear1": ColwiseParallel(), f"{name}.linear2": RowwiseParallel()}
    parallelize_module(block, mesh, plan)
    return block


class _Replicated:
    """Makes one DTensor of a tensor that is given several times."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        made: dict[int, DTensor] = {}
        for x in args:
            if isinstance(x, Tensor) and x.is_floating_point() and id(x) not in made:
                made[id(x)] = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return tuple(made.get(id(x), x) for x in args)


def whole_gradients(block: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient by name, DTensors gathered."""
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def groups_by_kind(module: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Parameters in two groups, for an optimizer that does not mix DTensors with tensors."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": parameters} for parameters in kinds.values()]
