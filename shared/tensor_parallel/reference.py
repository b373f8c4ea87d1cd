"""Lesson 04's reference run over the ranks of a tensor-parallel group."""

import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from shared.data.batching import Batch
from shared.model.transformer import Transformer
from shared.tensor_parallel.models import parallel_model, sum_partial_gradients
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from shared.training.reference_run import CONFIG, Step, reference_model, reference_optimizer
from shared.training.schedules import set_learning_rate


def parallel_reference(
    mesh: DeviceMesh, sequence_parallel: bool = False
) -> tuple[Transformer, Step]:
    """The reference model cut over the mesh's axis, and its step: every rank sees whole batches."""
    model = reference_model()
    parallel_model(model, mesh, sequence_parallel)
    optimizer, group = reference_optimizer(list(model.parameters())), mesh.get_group()

    def step(batch: Batch, rate: float) -> float:
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        inputs = batch.src, batch.tgt_in, batch.tgt_out
        if sequence_parallel:  # padding that nobody attends to, and that has no loss
            inputs = tuple(F.pad(x, (0, -x.shape[1] % group.size())) for x in inputs)
        src, tgt_in, tgt_out = inputs
        losses = vocab_parallel_cross_entropy(model(src, tgt_in), tgt_out, group, CONFIG.pad_id)
        loss = losses.sum() / batch.num_tokens
        loss.backward()
        sum_partial_gradients(model, group)
        optimizer.step()
        return loss.item()

    return model, step
