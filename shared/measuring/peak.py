"""The arithmetic that a device can do, measured by what it is best at."""

import torch

from shared.measuring.timing import fastest_seconds
from shared.ranks.agreement import gathered
from shared.ranks.group import Rank


def product_flops(
    device: torch.device | str, dtype: torch.dtype = torch.float32, size: int | None = None
) -> float:
    """Return the FLOP/s of the fastest of some square matrix products, on the threads in use.

    A multiplication with its addition counts as two. The size is large enough that the product
    is limited by arithmetic: 512 on a CPU, 8,192 on a GPU. A data sheet's peak is higher; what a
    product of matrices reaches is what training could reach.
    """
    cuda = torch.device(device).type == "cuda"
    size = size or (8192 if cuda else 512)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / fastest_seconds(lambda: a @ b, 30, device)


def peak_of(rank: Rank, precision: str) -> float:
    """FLOP/s of large products on all ranks at once, the mean of them: what MFU is a share of.

    A GPU's peak of memory counts anew behind it: the products are larger than many a run.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    found = gathered(product_flops(rank.device, dtype))
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(rank.device)
    return sum(found) / len(found)
