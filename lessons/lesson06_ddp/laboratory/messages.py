"""What an answer broadcasts, and into which buckets it cuts the gradients."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.lesson06_ddp.laboratory.engines import KNOWN_ERRORS
from shared.exercises.expecting import recognise
from shared.exercises.nets import Net, clone
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed
from shared.measuring.traffic import count_traffic


class Broadcasts:
    """An answer to 06.1: on models that agree, from rank src, and on models that do not."""

    SOURCES = ((0, 2), (2, 3))  # src, number of ranks
    # How rank 1's model differs, and the tensors in which it does.
    DIFFERENCES: ClassVar = {
        "shape": ("middle.weight",),
        "name": ("extra.weight", "extra.bias"),
        "requires_grad": ("middle.weight",),
        "dtype": ("middle.weight",),
        "buffer": ("shift",),
        "number of buffers": ("more",),
        "number of tensors": ("last.weight", "last.bias", "shift"),  # rank 1 lacks the first two
    }

    def __init__(self, answer: Any) -> None:
        self.answer, self.seed = answer, fresh_seed()
        heard = {kind: functools.partial(self._mismatch, kind) for kind in self.DIFFERENCES}
        different = RankCases(2, heard)
        self.group_of: dict[int | str, RankCases] = dict.fromkeys(heard, different)
        for src, n in self.SOURCES:
            self.group_of[src] = RankCases(n, {src: functools.partial(self._broadcast, src)})

    def outcome(self, case: int | str, *, apart: str) -> list[Any]:
        """Return by rank what was seen of a source, or heard of a difference."""
        return self.group_of[case].seen(case, apart=apart, known=KNOWN_ERRORS)

    def _broadcast(self, src: int, rank: int) -> tuple[dict, dict, bool, bool]:
        """Return the state before and after, whether the objects and their memory are the same."""
        torch.manual_seed(self.seed + rank)
        net = Net(tied=True, frozen=True).double()
        by_columns = net.last.weight.detach().T.contiguous().T
        net.last.weight = nn.Parameter(by_columns)
        with torch.no_grad():  # digits that float32 does not have
            for parameter in net.parameters():
                parameter += 1e-9 * torch.randn_like(parameter)
        net.register_buffer("cache", torch.randn(4), persistent=False)  # in no state_dict
        before, objects = (
            clone({**net.state_dict(), **dict(net.named_buffers())}),
            self._tensors(net),
        )
        trains = [each.requires_grad for each in objects]
        places = [each.data_ptr() for each in objects]
        self.answer(net, src=src)
        after = self._tensors(net)
        same = all(a is b for a, b in zip(objects, after, strict=True))
        recognise(
            {"requires_grad is changed": same and trains != [each.requires_grad for each in after]},
            expected="frozen parameters frozen, and the others not",
            seen="another requires_grad than before",
        )
        in_place = places == [each.data_ptr() for each in after]
        return before, clone({**net.state_dict(), **dict(net.named_buffers())}), same, in_place

    @staticmethod
    def _tensors(net: Net) -> list[torch.Tensor]:
        return [*net.parameters(), *net.buffers()]

    def _mismatch(self, kind: str, rank: int) -> tuple[str, str]:
        """What a rank hears when rank 1 has built another model: the error's name and words."""
        torch.manual_seed(self.seed + rank)
        net = Net().double()
        if rank == 1 and kind == "shape":
            net.middle.weight = nn.Parameter(torch.zeros(49, 1).double())  # as many numbers
        if rank == 1 and kind == "name":
            net.extra = nn.Linear(2, 2).double()
        if rank == 1 and kind == "requires_grad":
            net.middle.weight.requires_grad_(False)
        if rank == 1 and kind == "dtype":
            net.middle.weight = nn.Parameter(net.middle.weight.detach().float())
        if rank == 1 and kind == "buffer":
            net.shift = torch.randn(4).double()
        if rank == 1 and kind == "number of buffers":
            net.register_buffer("more", torch.randn(4))  # the last of all
        if rank == 1 and kind == "number of tensors":
            del net.last
        try:
            self.answer(net)
        except NotImplementedError:
            raise
        except Exception as error:  # whatever it is, the check judges it
            name = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            return name, str(error)
        return "", "no error"


@once_an_answer
def broadcasts(answer: Any) -> Broadcasts:
    """Return the laboratory of an answer to 06.1, one for all its checks."""
    return Broadcasts(answer)


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
        return ManyShapes([layer.split("+") for layer in self.gradients.split()], self.unit)

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

    def sent(self, BucketedDDP: Any, rank: int) -> tuple[Sizes, int]:
        """Return the sizes of the all-reduces of one step, and how many left in backward."""
        ddp = BucketedDDP(self.model(), *[] if self.cap_mb is None else [self.cap_mb])
        with count_traffic() as traffic:
            ddp(torch.ones(())).backward()
            in_backward = traffic.count("all_reduce")
            ddp.finish_gradient_sync()
        sizes = [call.num_bytes for call in traffic.calls if call.op == "all_reduce"]
        return self.in_units(sizes), in_backward


class ManyShapes(nn.Module):
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
        "64 64 127 1 12",
        {
            "a bucket that holds exactly bucket_cap_mb is not closed: it is full": (13, 255),
            "a bucket behind the first is closed before it holds bucket_cap_mb": (13, 127, 128),
            "a bucket behind the first is closed at more than bucket_cap_mb": (128, 140),
        },
        cap_mb=1 / 8,
    ),
    "one bucket for the whole model": Cut(
        "12 8 8",
        {"": ()},
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


@once_an_answer
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
