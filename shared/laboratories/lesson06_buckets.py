"""Lesson 06: how gradients are cut into buckets, one rule at a time."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.exercises.rank_cases import RankCases
from shared.measuring.traffic import count_traffic

Sizes = tuple[int, ...]
KIB = 2**10


@dataclass(frozen=True)
class Cut:
    """A model whose gradients, and a limit, obey one rule where they break it otherwise.

    `gradients` are in the order in which buckets are filled, each with its size in units: "20" of
    float32, "d20" of float64, "x20" frozen; "4+20" are the bias and the weight of one layer.
    `looks_like` has the bucket sizes, smallest first, that a wrong rule makes of them.
    """

    gradients: str
    looks_like: Mapping[str, Sizes]
    cap_mb: float | None = 1 / 32  # None: left alone, 25
    unit: int = KIB
    firsts_mb: tuple[float, ...] = ()  # limits of a first bucket, if not cap_mb

    def in_units(self, sizes: Sequence[int]) -> Sizes:
        """Return sizes in bytes, smallest first, as numbers of units (of bytes, where uneven)."""
        whole = all(size % self.unit == 0 for size in sizes)
        return tuple(sorted(size // self.unit if whole else size for size in sizes))

    def model(self) -> nn.Module:
        """Return the model: a sum of squares of all that it holds."""
        return Sums([layer.split("+") for layer in self.gradients.split()], self.unit)

    def alone(self) -> Sizes:
        """Return the sizes of the gradients themselves."""
        return self.in_units([p.nbytes for p in self.model().parameters() if p.requires_grad])

    def buckets(self) -> list[Sizes]:
        """Return what torch's own rule makes of the gradients, for each first limit."""
        order = [p.detach() for p in self.model().parameters() if p.requires_grad][::-1]
        cap = 25.0 if self.cap_mb is None else self.cap_mb
        found = []
        for first in self.firsts_mb or (cap,):
            limits = [int(first * 2**20), int(cap * 2**20)]
            cut, _ = dist._compute_bucket_assignment_by_size(order, limits)
            found.append(self.in_units([sum(order[i].nbytes for i in bucket) for bucket in cut]))
        return found

    def sent(self, BucketedDDP: Any, rank: int) -> Sizes:
        """Return the sizes of the all-reduces of one step."""
        ddp = BucketedDDP(self.model(), *[] if self.cap_mb is None else [self.cap_mb])
        with count_traffic() as traffic:
            ddp(torch.ones(())).backward()
            ddp.finish_gradient_sync()
        return self.in_units([call.num_bytes for call in traffic.calls if call.op == "all_reduce"])


class Sums(nn.Module):
    """Layers of parameters without a purpose but their sizes."""

    def __init__(self, layers: Sequence[Sequence[str]], unit: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for layer in reversed(layers):
            self.layers.append(module := nn.Module())
            names = ("weight", "bias") if len(layer) > 1 else ("weight",)
            for name, size in zip(names, reversed(layer), strict=True):
                dtype = torch.float64 if size.startswith("d") else torch.float32
                numbers = torch.ones(int(size.lstrip("dx")) * unit // dtype.itemsize, dtype=dtype)
                module.register_parameter(name, nn.Parameter(numbers, not size.startswith("x")))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * p).double().square().mean() for p in self.parameters()]).sum()


EARLY = "a bucket is closed before the gradient that would exceed the cap, not with it"
CUTS = {
    "closed once it holds the cap or more": Cut(
        "20 20 12 16 12 8",
        {
            EARLY: (8, 20, 28, 32),
            "every number is counted as 8 bytes: a float32 has 4": (20, 20, 20, 28),
            "the buckets are filled from the first parameter to the last: the last ones' gradients "
            "are complete first": (20, 32, 36),
            "the first bucket is closed at 1 MiB although bucket_cap_mb is less": (20, 68),
        },
        cap_mb=1 / 2,
        unit=16 * KIB,
    ),
    "closed when it holds exactly the cap": Cut(
        "16 16 16 12",
        {"a bucket that holds exactly bucket_cap_mb is not closed: it is full": (12, 48)},
    ),
    "a MiB is 2^20 bytes": Cut(
        "31 9 20",
        {
            "a bucket is closed at bucket_cap_mb times 10^6 bytes: a MiB is 2^20": (29, 31),
            EARLY: (29, 31),
        },
    ),
    "a gradient larger than a bucket": Cut(
        "8 100 8 8 8",
        {
            "a gradient larger than a bucket travels alone: it joins the open bucket": (32, 100),
            EARLY: (8, 24, 100),
        },
    ),
    "one dtype a bucket, and each dtype fills its own": Cut(
        "20 8 d20 20 d20 8",
        {
            "a gradient of another dtype closes the bucket: each dtype goes on filling its own": (
                (8, 20, 20, 20, 28)
            ),
        },
    ),
    "bytes of float64": Cut(
        "d20 d20 d20 d20",
        {"every number is counted as 4 bytes: a float64 has 8": (80,)},
    ),
    "a bucket may end within a layer": Cut(
        "4+20 12+20 4+8",
        {
            "a layer's weight and bias are kept in one bucket: it may end between them": (12, 56),
        },
    ),
    "a frozen parameter takes no room": Cut(
        "20 x20 16 20 4",
        {"frozen parameters take room in the buckets: they have no gradient": (4, 20, 36)},
    ),
    "the first bucket of each dtype at 1 MiB": Cut(
        "31 9 32 4 d20 d20 d32 d4",
        {
            "the first bucket is as large as the others: the first message leaves late": (76, 76),
            "only one dtype has a first bucket of 1 MiB: the first of each dtype leaves early": (
                (36, 40, 76)
            ),
            "every bucket is closed at 1 MiB: bucket_cap_mb is 25 unless it is given": (
                (4, 4, 32, 32, 40, 40)
            ),
        },
        cap_mb=None,
        unit=32 * KIB,
        firsts_mb=(1.0,),
    ),
    "a bucket_cap_mb of 2": Cut(
        "32 40 24 12",
        {
            "buckets above 1 MiB are closed at another size than bucket_cap_mb": (32, 36, 40),
            "bucket_cap_mb is not used: the buckets are those of 25": (32, 76),
        },
        cap_mb=2.0,
        unit=32 * KIB,
        firsts_mb=(1.0, 2.0),
    ),
}


def bucket_messages(BucketedDDP: Any) -> RankCases:
    """Return what an engine sends in one step of each of the models."""
    return RankCases(
        2, {title: functools.partial(cut.sent, BucketedDDP) for title, cut in CUTS.items()}
    )


def sent_in_bfloat16(average_gradients_flat: Any) -> list[int]:
    """Return the bytes of each message for twelve gradients of two bytes, on one rank."""
    layer = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    layer.weight.grad = torch.ones_like(layer.weight)
    with count_traffic() as traffic:
        average_gradients_flat(layer)
    return [call.num_bytes for call in traffic.calls]
