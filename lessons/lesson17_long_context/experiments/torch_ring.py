"""Torch's own context parallelism: what a CPU is refused, and its ring with the CPU's kernels.

The public way, `context_parallel`, replaces attention by a ring of the GPU's kernels; no ring is
registered for those of a CPU. The ring itself takes the kernel as an argument, so here it is given
the CPU's. Its names are private to torch.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
except ImportError:  # torch 2.9 has it one folder above
    from torch.distributed.tensor.experimental import _attention as ring

aten = torch.ops.aten


def engine_error() -> str:
    """What torch says where its context_parallel meets the CPU's fused attention."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    try:
        with (
            context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except Exception as error:  # whatever it is, it is the answer
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


def torch_ring(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradients of q, k and v by torch's causal ring, in its head-tail order."""

    forward: Any = aten._scaled_dot_product_flash_attention_for_cpu

    def kernel(query: Any, key: Any, value: Any, is_causal: bool = True, **more: Any) -> Any:
        left = more["out"], more["logsumexp"], 0.0, is_causal
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            more["grad_out"], query, key, value, *left
        )

    backward: Any = kernel
    group = dist.group.WORLD
    assert group is not None
    out, logsumexp, *_ = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
    theirs: Any = ring
    found = theirs._templated_ring_attention_backward(
        group, 2, backward, gradient, "grad_out", q, k, v, out, logsumexp, True
    )
    return out, found[0], found[1], found[2]
