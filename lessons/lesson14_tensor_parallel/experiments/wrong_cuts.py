"""Small language models that are cut wrongly on purpose."""

from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.tensor_parallel.conjugates import copy_to_ranks, sum_over_ranks
from shared.tensor_parallel.linears import ColumnParallelLinear, RowParallelLinear
from shared.tensor_parallel.marks import cut_dim
from shared.tensor_parallel.models import make_mesh, parallel_model
from shared.tensor_parallel.regions import split_region
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

WORDS = 24
VARIANTS = ("dropout", "other dropout outside", "no dropout", "one part for all")


def sentences(seed: int) -> Int[Tensor, "batch length"]:
    """Rows in which one of two words follows each, by a rule: log 2 nats a word at best."""
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (16,), generator=draw)]
    for _ in range(16):
        coin = torch.randint(2, (16,), generator=draw)
        words.append((5 * words[-1] + 1 + coin) % WORDS)
    return torch.stack(words, 1)


def train(rank: int, seed: int, variant: str, steps: int) -> dict[str, float]:
    """Train a model over the ranks; its loss, and how much the ranks' parameters differ.

    "shared" are parameters that all ranks have, "shards" those that are cut.

    "one part for all" lets every rank begin with rank 0's part of each matrix, as if all had drawn
    their parts from one seed. "other dropout outside" lets each rank drop its own features of the
    residual stream.
    """
    dropout = 0.1 if "dropout" in variant and variant != "no dropout" else 0.0
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 4, "num_layers": 1, "d_ff": 32}
    config = TransformerConfig(vocab_size=WORDS, dropout=dropout, max_len=16, **sizes)
    torch.manual_seed(seed)
    model = LanguageModel(config)
    mesh = make_mesh("cpu", tp=dist.get_world_size())
    parallel_model(model, mesh)
    parts = [p for p in model.layers.parameters() if cut_dim(p) is not None]
    if variant == "one part for all":
        for part in parts:
            dist.broadcast(part.data, 0)
    if variant == "other dropout outside":
        for layer in model.layers:
            split_region(layer.dropout, mesh.get_group(), None)  # ty: ignore
    optimizer, last = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        tokens = sentences(1000 * seed + step)
        losses = vocab_parallel_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        last.append(losses.mean().item())
    common = [p for p in model.layers.parameters() if cut_dim(p) is None]
    return {
        "loss": sum(last[-10:]) / 10,
        "shared": max(spread(p) for p in common),
        "shards": max(spread(p) for p in parts),
    }


def spread(parameter: Tensor) -> float:
    """The largest difference between rank 0's tensor and this rank's, as all ranks know it."""
    first = parameter.detach().clone()
    dist.broadcast(first, 0)
    gap = (first - parameter.detach()).abs().max()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    return gap.item()


class BiasOnEveryRank(RowParallelLinear):
    """The bias inside of the product, so that the sum over ranks has it t times."""

    share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' products, each with a bias."""
        assert self.bias is not None
        return self.leave(F.linear(x, self.weight, self.bias * self.share), self.group)


class PartOfBias(BiasOnEveryRank):
    """A t-th of the bias as each rank's parameter: right until the first step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.bias is not None
        self.bias.data /= dist.get_world_size(self.group)


def bias_in_steps(rank: int, kind: type[RowParallelLinear], steps: int) -> list[float]:
    """How far a pair of layers is from the whole pair, before each step of gradient descent."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
    mine = nn.Sequential(
        ColumnParallelLinear(first, None, copy_to_ranks), kind(second, None, sum_over_ranks)
    )
    whole, gaps = nn.Sequential(first, second), []
    for _ in range(steps):
        x, wanted = torch.randn(2, 16, 6, dtype=torch.float64)
        outputs = [model(x) for model in (mine, whole)]
        gaps.append((outputs[0] - outputs[1]).abs().max().item())
        for model, y in zip((mine, whole), outputs, strict=True):
            model.zero_grad()
            F.mse_loss(y, wanted).backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.5 * p.grad
    return gaps
