"""Whole models over the ranks of a mesh's axis, and back again."""

import math

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.ddp.averaging import sum_flat
from shared.errors import InputError
from shared.model.language_model import LanguageModel
from shared.model.layers import ResidualBlock
from shared.model.transformer import Transformer
from shared.ranks.collectives import Group
from shared.tensor_parallel.blocks import (
    MeshOrGroup,
    group_of,
    keep_rank_0,
    parallel_block,
    sequence_parallel_block,
)
from shared.tensor_parallel.conjugates import (
    copy_to_ranks,
    gather_sequence,
    joined,
    scatter_sum,
    sum_over_ranks,
)
from shared.tensor_parallel.linears import ColumnParallelLinear
from shared.tensor_parallel.marks import cut_dim, is_partial, mark_partial
from shared.tensor_parallel.regions import split_region
from shared.tensor_parallel.vocabulary import VocabParallelEmbedding


def make_mesh(device: str, **sizes: int) -> DeviceMesh:
    """A mesh whose axes have these names and sizes, the last one of neighbouring ranks.

    One size may be -1: as many as are left. Raises InputError unless the sizes multiply to the
    number of ranks.
    """
    ranks, known = dist.get_world_size(), math.prod(size for size in sizes.values() if size > 0)
    sizes = {name: ranks // known if size == -1 else size for name, size in sizes.items()}
    product = math.prod(sizes.values())
    if product != ranks or min(sizes.values()) < 1:
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise InputError(f"a mesh of {shape} has {product} places for {ranks} ranks")
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def parallel_model(
    model: LanguageModel | Transformer, mesh: MeshOrGroup, sequence_parallel: bool = False
) -> None:
    """Cut a model over a mesh with one axis, in place: its layers, embeddings and output.

    Its forward then takes whole batches and returns this rank's part of the vocabulary's logits.
    """
    cut_block = sequence_parallel_block if sequence_parallel else parallel_block
    for module in list(model.modules()):
        if isinstance(module, ResidualBlock):
            cut_block(module, mesh)
    cut_vocabulary(model, mesh, sequence_parallel)


def cut_vocabulary(
    model: LanguageModel | Transformer, mesh: MeshOrGroup, sequence_parallel: bool = False
) -> None:
    """Cut embeddings and output by the vocabulary, in place; with tied weights they stay tied.

    With `sequence_parallel` the embeddings leave in parts of the sequence, the logits are of all
    positions, and what lies between, positions and last norm, is of this rank's part.
    Raises InputError where the ranks cannot have equal parts of the vocabulary.
    """
    group = group_of(mesh)
    leave, enter = sum_over_ranks, copy_to_ranks
    if sequence_parallel:
        leave, enter = scatter_sum, gather_sequence
    whole = model.output.weight
    output = ColumnParallelLinear(model.output, group, None)
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Embedding):
            embedding = VocabParallelEmbedding(child, group, leave)
            if child.weight is whole:
                embedding.weight = output.weight
            setattr(model, name, embedding)
        elif sequence_parallel and name.endswith("positions"):
            setattr(model, name, PartOfPositions(child, group))
        elif sequence_parallel and name.endswith("norm"):  # of any kind: lesson 23's is another
            for parameter in child.parameters():
                mark_partial(parameter)
    model.output = output  # ty: ignore[invalid-assignment]
    split_region(output, group, enter)
    keep_rank_0(model, group)


class PartOfPositions(nn.Module):
    """The positions of a model whose sequences are in parts: this rank's part begins later."""

    def __init__(self, positions: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner, self.group = positions, group
        split_region(positions, group, None)
        for parameter in positions.parameters():
            mark_partial(parameter)

    def forward(
        self, x: Float[Tensor, "batch part d_model"], start: int = 0
    ) -> Float[Tensor, "batch part d_model"]:
        """Return x with the positions of this rank's part."""
        return self.inner(x, start + dist.get_rank(self.group) * x.shape[1])


def sum_partial_gradients(model: nn.Module, group: Group = None) -> None:
    """Add up over the ranks what each knows only of its own positions; one message a dtype.

    Call between backward and step. Without sequence parallelism there is nothing to add.
    """
    partial = [p for p in model.parameters() if is_partial(p)]
    partial = [p for p in partial if p.requires_grad and dist.get_world_size(group) > 1]
    for dtype in {p.dtype: None for p in partial}:
        own = [p for p in partial if p.dtype == dtype]
        for p in own:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        sum_flat((p.grad for p in own if p.grad is not None), group)


def whole_state_dict(model: nn.Module, group: Group = None) -> dict[str, Tensor]:
    """The state_dict of the model before it was cut, gathered on every rank; a collective."""
    return {
        name: uncut(x.detach().clone(), cut_dim(x), group).contiguous()
        for name, x in named_tensors(model).items()
    }


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names before the model was cut, tied ones by each name.

    Call it after the matrices were cut over ranks and before the model is cut into stages: a
    pipeline's parts have names of their own.
    """
    state = model.state_dict(keep_vars=True)
    return {name.replace("positions.inner.", "positions."): x for name, x in state.items()}


def uncut(part: Tensor, dim: int | None, group: Group = None) -> Tensor:
    """The ranks' parts along `dim`, joined; a tensor that is not cut, None, as it is."""
    if dim is None:
        return part
    # joined() puts together along dim 1
    return joined(part.movedim(dim, 0).unsqueeze(0), group).squeeze(0).movedim(0, dim)
