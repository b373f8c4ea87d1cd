"""What each collective does: run on four ranks with marked blocks, then drawn as it came out.

Each rank starts with one block for each rank. A block's mark says which rank it came from and which
of its blocks it was, so what a rank holds afterwards can be read from the numbers alone.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from shared.plots import BLACK, GREY, VARIANTS

Blocks = Float[Tensor, "n n n"]  # (place, source rank, source block): how often it is in this place


def marked_blocks(rank: int, world_size: int) -> Blocks:
    """The n blocks that a rank starts with, each marked with the rank and its own number."""
    blocks = torch.zeros(world_size, world_size, world_size)
    for block in range(world_size):
        blocks[block, rank, block] = 1
    return blocks


def broadcast(blocks: Blocks) -> Blocks:
    """Rank 0's blocks, on every rank."""
    dist.broadcast(blocks, src=0)
    return blocks


def reduce(blocks: Blocks) -> Blocks:
    """The sum on rank 0; what the others hold afterwards is undefined, and left out."""
    dist.reduce(blocks, dst=0)
    return blocks if dist.get_rank() == 0 else torch.zeros_like(blocks)


def all_reduce(blocks: Blocks) -> Blocks:
    """The sum, on every rank."""
    dist.all_reduce(blocks)
    return blocks


def scatter(blocks: Blocks) -> Blocks:
    """Block r of rank 0, on rank r."""
    rank = dist.get_rank()
    came = torch.zeros_like(blocks)
    dist.scatter(came[rank], list(blocks) if rank == 0 else None, src=0)
    return came


def gather(blocks: Blocks) -> Blocks:
    """Block r of rank r, all of them on rank 0."""
    rank = dist.get_rank()
    came = list(torch.zeros_like(blocks))
    dist.gather(blocks[rank].clone(), came if rank == 0 else None, dst=0)
    return torch.stack(came)


def all_gather(blocks: Blocks) -> Blocks:
    """Block r of rank r, all of them on every rank."""
    came = list(torch.zeros_like(blocks))
    dist.all_gather(came, blocks[dist.get_rank()].clone())
    return torch.stack(came)


def reduce_scatter(blocks: Blocks) -> Blocks:
    """The sum of all blocks r, on rank r."""
    came = torch.zeros_like(blocks)
    dist.reduce_scatter(came[dist.get_rank()], list(blocks))
    return came


def all_to_all(blocks: Blocks) -> Blocks:
    """Block r of every rank, on rank r, in the order of ranks."""
    came = torch.zeros_like(blocks)
    dist.all_to_all_single(came, blocks)
    return came


COLLECTIVES: dict[str, Callable[[Blocks], Blocks]] = {
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather,
    "all-gather": all_gather,
    "all-to-all": all_to_all,
    "reduce": reduce,
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
}


def outcomes(rank: int) -> dict[str, Blocks]:
    """What this rank holds at the start and after each collective, by name."""
    n = dist.get_world_size()
    after = {name: run(marked_blocks(rank, n)) for name, run in COLLECTIVES.items()}
    return {"start": marked_blocks(rank, n), **after}


def draw_blocks(ax: Axes, title: str, of_ranks: list[Blocks]) -> None:
    """A row a rank, a cell a block: colour and number of the rank it came from, and its letter."""
    n = len(of_ranks)
    for row, blocks in enumerate(of_ranks):
        for place, block in enumerate(blocks):
            sources = [(int(rank), int(number)) for rank, number in block.nonzero()]
            for part, (rank, _) in enumerate(sources):
                width = 0.9 / len(sources)
                left = place + part * width
                ax.add_patch(Rectangle((left, row), width, 0.8, color=VARIANTS[rank], linewidth=0))
            frame = Rectangle((place, row), 0.9, 0.8, fill=False, edgecolor=GREY, linewidth=0.6)
            ax.add_patch(frame)
            words = "".join(sorted({"abcdefgh"[number] for _, number in sources}))
            words += str(sources[0][0]) if len(sources) == 1 else ""
            ax.text(place + 0.45, row + 0.42, words, ha="center", va="center", color="white")
        ax.text(-0.2, row + 0.42, str(row), ha="right", va="center", color=BLACK)
    ax.set(xlim=(-0.7, n), ylim=(n, -0.15), title=title, aspect="equal")
    ax.axis("off")
