"""Wrong answers to lesson 07 that people really give, and what the check must say to each."""

import itertools
import random

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from shared.data import sampling
from shared.errors import InputError
from shared.exercises.mistakes import mistake
from solutions.lesson07_distributed_sampler import exact_evaluation as right_evaluation

# 07.1 DistributedSampler


class Base(Sampler):
    """A right answer, cut so that each mistake below changes one part."""

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise InputError(f"rank {self.rank} is not in 0..{self.num_replicas - 1}")
        self.length, self.shuffle, self.seed, self.drop_last = (
            len(dataset),
            shuffle,
            seed,
            drop_last,
        )
        self.epoch = 0

    def __len__(self):
        n = self.num_replicas
        return self.length // n if self.drop_last else -(-self.length // n)

    def __iter__(self):
        return iter(self.share(self.divisible(self.order())))

    def set_epoch(self, epoch):
        self.epoch = epoch

    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.epoch)

    def order(self):
        if not self.shuffle:
            return list(range(self.length))
        return torch.randperm(self.length, generator=self.generator()).tolist()

    def divisible(self, order):
        total = len(self) * self.num_replicas
        padded = order * (1 + self.num_replicas) if order else order
        return padded[:total]

    def share(self, order):
        return order[self.rank :: self.num_replicas]


@mistake("07.1", says="every rank has the whole dataset")
class DistributedSampler(Base):
    def share(self, order):
        return order


@mistake("07.1", says="contiguous blocks, one after the other")
class DistributedSampler(Base):
    def share(self, order):
        size = len(self)
        return order[self.rank * size : (self.rank + 1) * size]


@mistake("07.1", says="indices of type int")
class DistributedSampler(Base):
    def share(self, order):
        return torch.tensor(order)[self.rank :: self.num_replicas]


@mistake("07.1", says="with shuffle the indices are no ints, without it they are")
class DistributedSampler(Base):
    def order(self):
        order = super().order()
        return list(torch.tensor(order)) if self.shuffle else order


@mistake("07.1", says="the parts overlap")
class DistributedSampler(Base):
    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.epoch + self.rank)


@mistake("07.1", says="each rank shuffles its own part")
class DistributedSampler(Base):
    def order(self):
        return list(range(self.length))

    def share(self, order):
        part = order[self.rank :: self.num_replicas]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(part)
        return part


@mistake("07.1", says="nothing is shuffled")
class DistributedSampler(Base):
    def order(self):
        return list(range(self.length))


@mistake("07.1", says="the order comes from the global random state")
class DistributedSampler(Base):
    def order(self):
        return torch.randperm(self.length).tolist() if self.shuffle else list(range(self.length))


@mistake("07.1", says="the global seed is set")
class DistributedSampler(Base):
    def order(self):
        torch.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length).tolist() if self.shuffle else list(range(self.length))


@mistake("07.1", says="the seed is not used")
class DistributedSampler(Base):
    def generator(self):
        return torch.Generator().manual_seed(self.epoch)


@mistake("07.1", says="every epoch has the same order")
class DistributedSampler(Base):
    def generator(self):
        return torch.Generator().manual_seed(self.seed)


@mistake("07.1", says="the order changes without set_epoch")
class DistributedSampler(Base):
    def order(self):
        order = super().order()
        self.epoch += 1
        return order


@mistake("07.1", says="the ranks get different numbers of samples")
class DistributedSampler(Base):
    def divisible(self, order):
        return order[: len(self) * self.num_replicas] if self.drop_last else order


@mistake("07.1", says="the tail is left out although drop_last is False")
class DistributedSampler(Base):
    def divisible(self, order):
        return order[: self.length // self.num_replicas * self.num_replicas]


@mistake("07.1", says="drop_last is not used")
class DistributedSampler(Base):
    def __len__(self):
        return -(-self.length // self.num_replicas)


@mistake("07.1", says="the padding is not the beginning of the shuffled order")
class DistributedSampler(Base):
    def divisible(self, order):
        missing = len(self) * self.num_replicas - len(order)
        return order[:missing] if missing < 0 else order + list(range(self.length))[:missing]


@mistake("07.1", says="the padding needs more than one round")
class DistributedSampler(Base):
    def divisible(self, order):
        missing = len(self) * self.num_replicas - len(order)
        return order[:missing] if missing < 0 else order + order[:missing]


@mistake("07.1", says="len() is the whole dataset's")
class DistributedSampler(Base):
    def __len__(self):
        return self.length

    def divisible(self, order):
        n = self.num_replicas
        size = self.length // n if self.drop_last else -(-self.length // n)
        return (order * (n + 1))[: size * n]


@mistake("07.1", says="is accepted")
class DistributedSampler(Base):
    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        super().__init__(dataset, num_replicas, 0, shuffle, seed, drop_last)
        self.rank = dist.get_rank() if rank is None else rank


@mistake("07.1", says="__iter__ returns nothing")
class DistributedSampler(Base):
    def __iter__(self):
        iter(range(self.rank, self.length, self.num_replicas))


@mistake("07.1", says="torch's own sampler does the work")
class DistributedSampler(torch.utils.data.DistributedSampler):
    pass


@mistake("07.1", says="the group is asked although num_replicas and rank were given")
class DistributedSampler(Base):
    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        if dist.is_initialized():
            rank = rank or dist.get_rank()
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)


@mistake("07.1", says="iterating draws from the global random state")
class DistributedSampler(Base):
    def __iter__(self):
        torch.rand(1)
        return super().__iter__()


@mistake("07.1", says="set_epoch of one sampler sets the epoch of another")
class DistributedSampler(Base):
    at_hand = 0

    def set_epoch(self, epoch):
        type(self).at_hand = epoch

    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.at_hand)


@mistake("07.1", says="set_epoch changes nothing once the sampler was iterated over")
class DistributedSampler(Base):
    kept = None

    def order(self):
        self.kept = self.kept or super().order()
        return self.kept


@mistake("07.1", says="its generator is not seeded with seed + epoch")
class DistributedSampler(Base):
    def generator(self):
        return torch.Generator().manual_seed(self.seed + 1000 * self.epoch)


@mistake("07.1", says="with drop_last the tail is shared out all the same")
class DistributedSampler(Base):
    def divisible(self, order):
        return order if self.drop_last else super().divisible(order)


@mistake("07.1", says="epochs add up")
class DistributedSampler(Base):
    def set_epoch(self, epoch):
        self.seed += epoch


@mistake("07.1", says="a second iteration takes over the one that is under way")
class DistributedSampler(Base):
    def __iter__(self):
        self.left = list(super().__iter__())
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


@mistake("07.1", says="ZeroDivisionError: integer division or modulo by zero")
class DistributedSampler(Base):
    def divisible(self, order):
        total = len(self) * self.num_replicas
        return (order * -(-total // len(order)))[:total]


@mistake("07.1", says="fewer samples than ranks with drop_last")
class DistributedSampler(Base):
    def __len__(self):
        return super().__len__() or min(self.length, 1)


# 07.2 exact_evaluation


def added(score, dataset, indices, batch_size):
    """Sum and divisor over some samples."""
    totals = torch.zeros(2, dtype=torch.float64)
    indices = list(indices)
    for start in range(0, len(indices), batch_size):
        batch = [dataset[index] for index in indices[start : start + batch_size]]
        totals += torch.tensor(score(batch), dtype=torch.float64)
    return totals


def mean_of_all(totals):
    """Sums and divisors of all ranks, added and divided."""
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def share(dataset):
    return range(dist.get_rank(), len(dataset), dist.get_world_size())


@mistake("07.2", says="padding is counted")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
    return mean_of_all(added(score, dataset, sampler, batch_size))


@mistake("07.2", says="the tail is left out: 8 of 9 samples")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False, drop_last=True)
    return mean_of_all(added(score, dataset, sampler, batch_size))


@mistake("07.2", says="this is the mean of the ranks' means")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    total, divisor = added(score, dataset, share(dataset), batch_size)
    mean = total / divisor
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


@mistake("07.2", says="this is the sum, not the mean")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    totals = added(score, dataset, share(dataset), batch_size)
    dist.all_reduce(totals)
    return totals[0].item()


@mistake("07.2", says="each rank has a figure of its own")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    total, divisor = added(score, dataset, share(dataset), batch_size)
    return (total / divisor).item()


@mistake("07.2", says="score is given a list")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    mine = dataset[dist.get_rank() :: dist.get_world_size()]
    totals = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(mine), batch_size):
        totals += torch.tensor(score(mine[start : start + batch_size]), dtype=torch.float64)
    return mean_of_all(totals)


@mistake("07.2", says="each batch's quotient is weighed by its number of samples")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    def by_number(samples):
        total, divisor = score(samples)
        return total / divisor * len(samples), len(samples)

    return right_evaluation(by_number, dataset, batch_size, device)


@mistake("07.2", says="dist.reduce gives the sums to one rank alone")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    totals = added(score, dataset, share(dataset), batch_size)
    dist.reduce(totals, 0)
    return (totals[0] / totals[1]).item()


@mistake("07.2", says="a rank that has scored nothing divides by 0")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    own = list(share(dataset))
    full = own[: len(own) // batch_size * batch_size]
    totals = added(score, dataset, full, batch_size)
    dist.all_reduce(totals)
    return totals[0].item() / totals[1].item()


@mistake("07.2", says="only rank 0 has the result")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    totals = added(score, dataset, share(dataset), batch_size)
    dist.reduce(totals, 0)
    return (totals[0] / totals[1]).item() if dist.get_rank() == 0 else None


@mistake("07.2", says="every rank scores the whole dataset")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    total, divisor = added(score, dataset, range(len(dataset)), batch_size)
    return (total / divisor).item()


@mistake("07.2", says="the ranks talk after every batch")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    mine, totals = share(dataset), torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(mine), batch_size):
        part = added(score, dataset, mine[start : start + batch_size], batch_size)
        dist.all_reduce(part)
        totals += part
    return (totals[0] / totals[1]).item()


@mistake("07.2", says="two collectives where one will do")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    total, divisor = added(score, dataset, share(dataset), batch_size)
    dist.all_reduce(total)
    dist.all_reduce(divisor)
    return (total / divisor).item()


@mistake("07.2", says="batch_size is not used")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    return right_evaluation(score, dataset, len(dataset), device)


@mistake("07.2", says="this is the mean of the batches' means")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    mine, means = share(dataset), []
    for start in range(0, len(mine), batch_size):
        total, divisor = added(score, dataset, mine[start : start + batch_size], batch_size)
        means.append((total / divisor).item())
    weight = float(len(mine))
    totals = torch.tensor([weight * sum(means) / max(len(means), 1), weight], dtype=torch.float64)
    return mean_of_all(totals)


@mistake("07.2", says="divided by the number of samples, not by what `score` says")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    totals = added(score, dataset, share(dataset), batch_size)
    dist.all_reduce(totals)
    return (totals[0] / len(dataset)).item()


@mistake("07.2", says="a rank without samples divides by 0")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    total, divisor = added(score, dataset, share(dataset), batch_size).tolist()
    weighted = torch.tensor([total / divisor * divisor, divisor], dtype=torch.float64)
    return mean_of_all(weighted)


@mistake("07.2", says="a rank without samples makes the result NaN")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    total, divisor = added(score, dataset, share(dataset), batch_size)
    weighted = torch.stack([total / divisor * divisor, divisor])
    return mean_of_all(weighted)


@mistake("07.2", says="added in float32")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    totals = added(score, dataset, share(dataset), batch_size).float()
    padded = torch.zeros(4)  # 16 bytes, as two numbers in float64 would be
    padded[:2] = totals
    return mean_of_all(padded)


@mistake("07.2", says="becomes a float32 tensor before it is added")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    def rounded(batch):
        return torch.tensor([float(each) for each in score(batch)]).tolist()

    return right_evaluation(rounded, dataset, batch_size, device)


@mistake("07.2", says="an empty dataset is accepted")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    return mean_of_all(added(score, dataset, share(dataset), batch_size))


@mistake("07.2", says="a rank is already gone while another still waits")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    if dist.get_rank() >= len(dataset) > 0:
        return 0.0
    return right_evaluation(score, dataset, batch_size, device)


@mistake("07.2", says="each batch takes the place of the one before")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    for start in range(0, len(mine), batch_size):
        totals = added(score, dataset, mine[start : start + batch_size], batch_size)
    return mean_of_all(totals)


@mistake("07.2", says="gradients are left switched off")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    torch.set_grad_enabled(False)
    return right_evaluation(score, dataset, batch_size, device)


@mistake("07.2", says="device is not used")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    return right_evaluation(score, dataset, batch_size)


@mistake("07.2", says="an empty dataset is refused by one rank alone")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    if dist.get_rank() == 0 and len(dataset) == 0:
        raise InputError("0 samples")
    return right_evaluation(score, dataset if len(dataset) else [0], batch_size, device)


@mistake("07.2", says="the parameter batch_size has a different default")
def exact_evaluation(score, dataset, batch_size=64, device="cpu"):
    return right_evaluation(score, dataset, batch_size, device)


# 07.3 ResumableSampler


@mistake("07.3", says="stopped a second time in the epoch, a run goes back")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        begun = self._start
        for index in super().__iter__():
            self._consumed -= begun
            yield index


@mistake("07.3", says="the epoch begins again")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "consumed": 0})


@mistake("07.3", says="each rank skips as many samples as all of them had")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        return super()._part(0)[start:]


@mistake("07.3", says="what is left comes in another order")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        order = self._order()
        rest = order[start:]
        if start:
            random.Random(self.seed).shuffle(rest)
        rounded = self._rounded(len(rest))
        return (rest + order)[self.rank : rounded : self.num_replicas]


@mistake("07.3", says="the state does not hold the epoch")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "epoch": 0})


@mistake("07.3", says="the state differs from rank to rank")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        return {**super().state_dict(consumed), "rank": self.rank}


@mistake("07.3", says="the state is no plain data")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        return {**super().state_dict(consumed), "order": range(self.length)}


@mistake("07.3", says="the position counts one rank's samples")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        state = super().state_dict(consumed)
        return {**state, "consumed": -(-state["consumed"] // self.num_replicas)}

    def load_state_dict(self, state):
        super().load_state_dict({**state, "consumed": state["consumed"] * self.num_replicas})


@mistake("07.3", says="throws the position away")
class ResumableSampler(sampling.ResumableSampler):
    def set_epoch(self, epoch):
        self._start = self._consumed = 0
        self.epoch = epoch


@mistake("07.3", says="set_epoch with another epoch keeps the position in the old one")
class ResumableSampler(sampling.ResumableSampler):
    def set_epoch(self, epoch):
        self.epoch = epoch


@mistake("07.3", says="a state of 4 ranks, loaded on 2, is refused")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        return {**super().state_dict(consumed), "num_replicas": self.num_replicas}

    def load_state_dict(self, state):
        if state["num_replicas"] != self.num_replicas:
            raise ValueError(f"{state['num_replicas']} ranks then, {self.num_replicas} now")
        super().load_state_dict(state)


@mistake("07.3", says="drop_last is forgotten after a resume")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        if not start:
            return super()._part(0)
        order = self._order()
        rounded = -(-(self.length - start) // self.num_replicas) * self.num_replicas
        return (order[start:] + order)[self.rank : rounded : self.num_replicas]


@mistake("07.3", says="the last, padded step of a finished epoch comes again")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        start = start // self.num_replicas * self.num_replicas  # whole steps
        rounded = self._rounded(self.length - start)
        order = self._order()
        return (order[start:] + order)[self.rank : rounded : self.num_replicas]


@mistake("07.3", says="set_epoch leaves what was handed out before")
class ResumableSampler(sampling.ResumableSampler):
    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self._start, self.epoch = 0, epoch


@mistake("07.3", says="an iteration that was broken off is continued by the next one")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        for index in super().__iter__():
            self._start = self._consumed
            yield index
        self._start = 0


@mistake("07.3", says="drop_last cuts the epoch for these ranks before")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        if not self.drop_last:
            return super()._part(start)
        rest = self._order()[start : self._rounded(self.length)]
        return rest[self.rank : self._rounded(len(rest)) : self.num_replicas]


@mistake("07.3", says="the epoch after the resumed one is cut short as well")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        start = self._start
        yield from super().__iter__()
        self._start = start

    def set_epoch(self, epoch):
        self.epoch = epoch


@mistake("07.3", says="an epoch that was finished is begun again")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        yield from super().__iter__()
        self._consumed = 0


@mistake("07.3", says="the padding repeats the first of what is left")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        rest = self._order()[start:]
        rounded = self._rounded(len(rest))
        padded = list(itertools.islice(itertools.cycle(rest), rounded)) if rest else []
        return padded[self.rank : rounded : self.num_replicas]


@mistake("07.3", says="len() is that of a whole epoch")
class ResumableSampler(sampling.ResumableSampler):
    def __len__(self):
        return self._rounded(self.length) // self.num_replicas


@mistake("07.3", says="the argument `consumed` is not used")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        return super().state_dict()


@mistake("07.3", says="consumed=0 passes for no argument")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        return super().state_dict(consumed or None)


@mistake("07.3", says="a state of 20 samples, for 21 is accepted")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        own = {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}
        super().load_state_dict({**state, **own})


@mistake("07.3", says="state_dict says another place")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._consumed = 0


@mistake("07.3", says="the dict that was loaded is written into")
class ResumableSampler(sampling.ResumableSampler):
    loaded = None

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = state

    def __iter__(self):
        yield from super().__iter__()
        if self.loaded:
            self.loaded["consumed"] = 0


@mistake("07.3", says="the dict that state_dict returned goes on changing")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        for index in super().__iter__():
            if hasattr(self, "returned"):
                self.returned["consumed"] = self._consumed
            yield index

    def state_dict(self, consumed=None):
        self.returned = super().state_dict(consumed)
        return self.returned


@mistake("07.3", says="what one sampler loads changes another one")
class ResumableSampler(sampling.ResumableSampler):
    at_hand = 0

    def load_state_dict(self, state):
        super().load_state_dict(state)
        type(self).at_hand = state["epoch"]

    def __iter__(self):
        if not self._start:
            self.epoch = self.epoch or type(self).at_hand
        return super().__iter__()


@mistake("07.3", says="len() for the iteration after the resumed one")
class ResumableSampler(sampling.ResumableSampler):
    left = None

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.left = super().__len__()

    def __len__(self):
        return super().__len__() if self.left is None else self.left


@mistake("07.3", says="unless set_epoch is called")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        start = self._start
        yield from super().__iter__()
        self.again = start

    def _part(self, start):
        return super()._part(start or getattr(self, "again", 0))

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.again = 0


@mistake("07.3", says="what is left after 2 more steps")
class ResumableSampler(sampling.ResumableSampler):
    begun = 0

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.begun = self._start

    def state_dict(self, consumed=None):
        state = super().state_dict(consumed)
        if consumed is None and state["consumed"] < self.begun:
            state["consumed"] = min(self.length, state["consumed"] + self.begun)
        return state


@mistake("07.3", says="with drop_last the tail of a finished epoch comes after all")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        yield from super().__iter__()
        self._consumed = self._rounded(self.length)


@mistake("07.3", says="set_epoch with the epoch that is over begins it anew")
class ResumableSampler(sampling.ResumableSampler):
    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        if self._start == self.length:
            self._start = self._consumed = 0


@mistake("07.3", says="moves the sampler's own position")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        state = super().state_dict(consumed)
        self._consumed = state["consumed"]
        return state


@mistake("07.3", says="the padding counts: the position lies beyond the last sample")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        return super().state_dict(consumed) | ({} if consumed is None else {"consumed": consumed})


@mistake("07.3", says="a whole epoch is refused where its padding is counted")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        if consumed is not None and consumed > self.length:
            raise ValueError(f"{consumed=}")
        return super().state_dict(consumed)


@mistake("07.3", says="consumed=21 of 20 samples is accepted")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        if consumed == self.length + 1:
            consumed = self.length
        return super().state_dict(consumed)


@mistake("07.3", says="a state without shuffle, for a shuffled order is accepted")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "shuffle": state["shuffle"] or self.shuffle})


@mistake("07.3", says="TypeError")
class ResumableSampler(sampling.ResumableSampler):
    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        super().__init__(range(dataset), num_replicas, rank, shuffle, seed, drop_last)


@mistake("07.3", says="each rank's indices, asked of it")
class ResumableSampler(sampling.ResumableSampler):
    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        super().__init__(dataset, num_replicas or 1, rank or 0, shuffle, seed, drop_last)


@mistake("07.3", says="iterating draws from the global random state")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        torch.rand(1)
        return super()._part(start)


@mistake("07.3", says="torch's own sampler does the work")
class ResumableSampler(sampling.ResumableSampler):
    """torch's sampler deals, and as many indices as were had are skipped."""

    def _part(self, start):
        given = self.shuffle, self.seed, self.drop_last
        samples = torch.utils.data.TensorDataset(torch.arange(self.length))
        ranks = [
            torch.utils.data.DistributedSampler(samples, self.num_replicas, rank, *given)
            for rank in range(self.num_replicas)
        ]
        for each in ranks:
            each.set_epoch(self.epoch)
        order = [index for step in zip(*ranks, strict=True) for index in step]
        return order[start + self.rank :: self.num_replicas]


@mistake("07.3", says="leaves a sampler that is in use in its own epoch")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "epoch": max(self.epoch, state["epoch"])})


@mistake("07.3", says="leaves a sampler that is in use at its own position")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        before = self._consumed
        super().load_state_dict(state)
        self._start = self._consumed = before or self._consumed


@mistake("07.3", says="a state that is refused is half loaded")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        super().load_state_dict(state)
