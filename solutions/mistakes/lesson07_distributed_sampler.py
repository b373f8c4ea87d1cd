"""Wrong answers to lesson 07 that people really give, and what the check must say to each."""

import torch
import torch.distributed as dist

from shared.data import sampling
from shared.exercises.mistakes import mistake
from solutions.lesson07_distributed_sampler import exact_evaluation as right_evaluation

# 07.1 DistributedSampler


@mistake("07.1", says="every rank has the whole dataset")
class DistributedSampler(sampling.DistributedSampler):
    def __iter__(self):
        order = self._order()
        return iter((order * (1 + self.num_replicas))[: len(self) * self.num_replicas])


@mistake("07.1", says="nothing is shuffled")
class DistributedSampler(sampling.DistributedSampler):
    def _order(self):
        return list(range(self.length))


@mistake("07.1", says="the ranks get different numbers of samples")
class DistributedSampler(sampling.DistributedSampler):
    def __iter__(self):
        own = super().__iter__()
        return own if self.drop_last else iter(self._order()[self.rank :: self.num_replicas])


@mistake("07.1", says="the padding needs more than one round")
class DistributedSampler(sampling.DistributedSampler):
    def __iter__(self):
        order, whole = self._order(), len(self) * self.num_replicas
        once = order + order[: max(0, whole - len(order))]
        return iter(once[:whole][self.rank :: self.num_replicas])


@mistake("07.1", says="is accepted")
class DistributedSampler(sampling.DistributedSampler):
    def __init__(self, dataset, num_replicas=None, rank=None, *args, **kwargs):
        super().__init__(dataset, num_replicas, 0, *args, **kwargs)
        self.rank = dist.get_rank() if rank is None else rank


@mistake("07.1", says="set_epoch changes nothing once the sampler was iterated over")
class DistributedSampler(sampling.DistributedSampler):
    kept = None

    def _order(self):
        self.kept = self.kept or super()._order()
        return self.kept


@mistake("07.1", says="fewer samples than ranks with drop_last")
class DistributedSampler(sampling.DistributedSampler):
    def _rounded(self, count):
        return super()._rounded(count) or min(count, 1) * self.num_replicas


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


@mistake("07.2", says="the ranks talk after every batch")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    mine, totals = share(dataset), torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(mine), batch_size):
        part = added(score, dataset, mine[start : start + batch_size], batch_size)
        dist.all_reduce(part)
        totals += part
    return (totals[0] / totals[1]).item()


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


@mistake("07.2", says="added in float32")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    totals = added(score, dataset, share(dataset), batch_size).float()
    padded = torch.zeros(4)  # 16 bytes, as two numbers in float64 would be
    padded[:2] = totals
    return mean_of_all(padded)


@mistake("07.2", says="an empty dataset is accepted")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    return mean_of_all(added(score, dataset, share(dataset), batch_size))


@mistake("07.2", says="device is not used")
def exact_evaluation(score, dataset, batch_size=32, device="cpu"):
    return right_evaluation(score, dataset, batch_size)


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


@mistake("07.3", says="drop_last is forgotten after a resume")
class ResumableSampler(sampling.ResumableSampler):
    def _part(self, start):
        if not start:
            return super()._part(0)
        order = self._order()
        rounded = -(-(self.length - start) // self.num_replicas) * self.num_replicas
        return (order[start:] + order)[self.rank : rounded : self.num_replicas]


@mistake("07.3", says="an iteration that was broken off is continued by the next one")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        for index in super().__iter__():
            self._start = self._consumed
            yield index
        self._start = 0


@mistake("07.3", says="an epoch that was finished is begun again")
class ResumableSampler(sampling.ResumableSampler):
    def __iter__(self):
        yield from super().__iter__()
        self._consumed = 0


@mistake("07.3", says="a whole epoch is refused where its padding is counted")
class ResumableSampler(sampling.ResumableSampler):
    def state_dict(self, consumed=None):
        if consumed is not None and consumed > self.length:
            raise ValueError(f"{consumed=}")
        return super().state_dict(consumed)


@mistake("07.3", says="a state that is refused is half loaded")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        super().load_state_dict(state)


@mistake("07.3", says="for seed 6, both without shuffle is accepted")
class ResumableSampler(sampling.ResumableSampler):
    def load_state_dict(self, state):
        super().load_state_dict(state if self.shuffle else {**state, "seed": self.seed})
