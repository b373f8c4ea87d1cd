"""Right answers to lesson 07 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import itertools
import math

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler, Subset

# 07.1


def place(num_replicas, rank):
    """Number of ranks and rank, asked of the process group where they are not given."""
    num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
    rank = dist.get_rank() if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank {rank} of {num_replicas} ranks")
    return num_replicas, rank


class CyclingSampler(Sampler):
    """Nothing is stored but the arguments; the order is an endless cycle, cut by islice."""

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.replicas, self.place = place(num_replicas, rank)
        self.samples, self.mixed, self.start, self.cut = dataset, shuffle, seed, drop_last
        self.turn = 0

    def order(self):
        """The epoch's order as a list."""
        size = len(self.samples)
        if not self.mixed:
            return list(range(size))
        generator = torch.Generator()
        generator.manual_seed(self.start + self.turn)
        return torch.randperm(size, generator=generator).tolist()

    def __len__(self):
        whole, rest = divmod(len(self.samples), self.replicas)
        return whole + (rest > 0 and not self.cut)

    def __iter__(self):
        stop = len(self) * self.replicas
        return itertools.islice(itertools.cycle(self.order()), self.place, stop, self.replicas)

    def set_epoch(self, epoch):
        """Remember it."""
        self.turn = epoch


class MatrixSampler(Sampler):
    """The order as a matrix with a column a rank, by indices modulo the length."""

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.n, self.rank = place(num_replicas, rank)
        self.size, self.seed, self.epoch = len(dataset), seed, 0
        self.permute = torch.randperm if shuffle else lambda size, generator: torch.arange(size)
        self.rows = (math.floor if drop_last else math.ceil)(self.size / self.n)

    def __len__(self):
        return self.rows

    def __iter__(self):
        order = self.permute(
            self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)
        )
        places = torch.arange(self.rows * self.n) % max(1, self.size)
        for index in order[places].view(self.rows, self.n)[:, self.rank]:
            yield index.item()

    def set_epoch(self, epoch):
        """Remember it."""
        self.epoch = epoch


# 07.2


def with_a_loader(score, dataset, batch_size=32, device="cpu"):
    """A DataLoader over a Subset, whose batches stay lists."""
    if not len(dataset):
        raise ValueError("a dataset of 0 samples has no mean")
    share = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    loader = DataLoader(share, batch_size=batch_size, collate_fn=list)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for samples in loader:
        numbers = [float(each) for each in score(samples)]
        sums += torch.tensor(numbers, dtype=torch.float64).to(device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def in_blocks(score, dataset, batch_size=32, device="cpu"):
    """Neighbouring samples in place of every n-th; exact sums on each rank."""
    if len(dataset) == 0:
        raise ValueError("nothing to evaluate: 0 samples")
    n, rank = dist.get_world_size(), dist.get_rank()
    first, last = (len(dataset) * each // n for each in (rank, rank + 1))
    metrics, counts = [0.0], [0.0]
    while first < last:
        batch = [dataset[each] for each in range(first, min(first + batch_size, last))]
        first += len(batch)
        metric, count = score(batch)
        metrics.append(float(metric))
        counts.append(float(count))
    pair = torch.tensor([math.fsum(metrics), math.fsum(counts)], dtype=torch.float64, device=device)
    dist.all_reduce(pair, op=dist.ReduceOp.SUM)
    metric, count = pair.tolist()
    return metric / count


# 07.3


class BuiltOnCycling(CyclingSampler):
    """On the first sampler of 07.1: an iterator class counts what it hands out."""

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        samples = range(dataset) if isinstance(dataset, int) else dataset
        super().__init__(samples, num_replicas, rank, shuffle, seed, drop_last)
        self.begin = self.handed_out = 0

    def __len__(self):
        left = len(self.samples) - self.begin
        return left // self.replicas if self.cut else -(-left // self.replicas)

    def __iter__(self):
        return Dealing(self)

    def set_epoch(self, epoch):
        """Only another epoch begins at its beginning."""
        if epoch != self.turn:
            self.begin = self.handed_out = 0
        super().set_epoch(epoch)

    def state_dict(self, consumed=None):
        """A dict of five."""
        size = len(self.samples)
        most = -(-size // self.replicas) * self.replicas
        if consumed is None:
            consumed = self.handed_out
        elif consumed not in range(most + 1):
            raise ValueError(f"consumed={consumed} is not within 0 and {most}")
        return {
            "epoch": self.turn,
            "position": min(consumed, size),
            "fits": [size, self.start, int(self.mixed)],
        }

    def load_state_dict(self, state):
        """Compared one by one."""
        own = [len(self.samples), self.start, int(self.mixed)]
        for what, theirs, ours in zip(
            ("length", "seed", "shuffle"), state["fits"], own, strict=True
        ):
            if theirs != ours:
                raise ValueError(f"the state has {what} {theirs}, this sampler {ours}")
        self.turn, self.begin = state["epoch"], state["position"]
        self.handed_out = self.begin


class Dealing:
    """One pass over a sampler's epoch: what was handed out is written down before it is."""

    def __init__(self, sampler):
        self.sampler, order = sampler, sampler.order()
        number, n = len(sampler), sampler.replicas
        left = itertools.chain(order[sampler.begin :], itertools.cycle(order))
        self.indices = itertools.islice(left, sampler.place, number * n, n)
        sampler.handed_out = sampler.begin

    def __iter__(self):
        return self

    def __next__(self):
        sampler = self.sampler
        for index in self.indices:
            sampler.handed_out = min(sampler.handed_out + sampler.replicas, len(sampler.samples))
            return index
        sampler.begin, sampler.handed_out = 0, len(sampler.samples)
        raise StopIteration


class BegunAfresh(Sampler):
    """Without 07.1: a loaded position is used up by the first iteration that begins."""

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.n, self.rank = place(num_replicas, rank)
        self.size = dataset if isinstance(dataset, int) else len(dataset)
        self.shuffle, self.seed, self.drop_last = bool(shuffle), seed, drop_last
        self.epoch, self.loaded, self.done = 0, 0, 0

    def rows(self, begin):
        """How many indices each rank gets from `begin` on."""
        return (self.size - begin + (0 if self.drop_last else self.n - 1)) // self.n

    def __len__(self):
        return self.rows(self.loaded)

    def __iter__(self):
        begin, self.loaded = self.loaded, 0
        self.done = begin
        order = torch.arange(self.size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.size, generator=generator)
        for row in range(self.rows(begin)):
            at = begin + row * self.n + self.rank
            self.done = min(begin + (row + 1) * self.n, self.size)
            yield int(order[at] if at < self.size else order[(at - self.size) % self.size])
        self.done = self.size

    def set_epoch(self, epoch):
        """Another epoch forgets the position."""
        if epoch != self.epoch:
            self.epoch, self.loaded, self.done = epoch, 0, 0

    def state_dict(self, consumed=None):
        """With names of its own."""
        padded = self.size + -self.size % self.n
        if consumed is not None and not 0 <= consumed <= padded:
            raise ValueError(f"{consumed} samples of {self.size} cannot have been consumed")
        samples = self.done if consumed is None else consumed
        return {
            "number_of_epoch": self.epoch,
            "samples": samples if samples < self.size else self.size,
            "of": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state):
        """All or nothing."""
        for name, own in (("of", self.size), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != own:
                raise ValueError(f"{name}: {state[name]} was saved, {own} is here")
        self.epoch = state["number_of_epoch"]
        self.loaded = self.done = state["samples"]


ALTERNATIVES = {
    "07.1": [CyclingSampler, MatrixSampler],
    "07.2": [with_a_loader, in_blocks],
    "07.3": [BuiltOnCycling, BegunAfresh],
}
