"""Lesson 10's stage 2 once more, with nothing of the reference's; see lesson10_zero."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shared.ranks.collectives import all_gather, reduce_scatter
from shared.sharding.backward import at_end_of_backward


class Load:
    """Parameters whose gradients travel together: their memory in one piece, this rank's share."""

    def __init__(self, riders):
        n, self.riders, self.waiting = dist.get_world_size(), riders, set(riders)
        self.share = -(-sum(p.numel() for p in riders) // n)
        self.memory = riders[0].new_zeros(n * self.share)
        for p, place in zip(riders, self.places(self.memory), strict=True):
            place.copy_(p.detach())
            p.data = place
        mine = self.memory.narrow(0, dist.get_rank() * self.share, self.share)
        self.mine, self.mean = mine, None
        self.exact = nn.Parameter(mine.float() if mine.dtype.itemsize == 2 else mine)

    def places(self, memory):
        """Each parameter's own view of a flat tensor."""
        at = 0
        for p in self.riders:
            yield memory.narrow(0, at, p.numel()).view(p.shape)
            at += p.numel()

    def send(self):
        """Leave with the gradients that there are and zeros; add this rank's share of the mean."""
        whole = torch.zeros_like(self.memory)
        for p, place in zip(self.riders, self.places(whole), strict=True):
            if p.grad is not None:
                place.copy_(p.grad)
                p.grad = None
        whole /= dist.get_world_size()
        share = torch.empty_like(self.mine)
        reduce_scatter(share, whole).wait()
        self.mean = share if self.mean is None else self.mean + share
        self.waiting = set(self.riders)


class InTurn(Optimizer):
    """Stage 2 whose loads leave in turn, those of the last parameters first, and are awaited."""

    def __init__(self, params, optimizer_class, *, bucket_size=1_000_000, **kwargs):
        self.most, self.loads = bucket_size, []
        self.updates: Any = None
        self.turn, self.has_sent = None, False
        self.new = lambda groups: optimizer_class(groups, **kwargs)
        super().__init__(params, self.new([{"params": []}]).defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for p in added["params"]:
            dist.broadcast(p.data, src=0)
        loads = [Load(riders) for riders in self.together(added["params"])]
        self.loads = loads + self.loads
        for load in loads:
            for p in load.riders:
                p.register_post_accumulate_grad_hook(lambda p, load=load: self.arrived(p, load))
        settings = {key: value for key, value in added.items() if key != "params"}
        group = {"params": [load.exact for load in loads], **settings}
        if self.updates is None:
            self.updates = self.new([group])
        else:
            self.updates.add_param_group(group)

    def together(self, parameters):
        """Lists of neighbours of one dtype, from the last to the first, of `most` numbers each."""
        lists = {}
        for p in reversed([p for p in parameters if p.requires_grad]):
            of_dtype = lists.setdefault(p.dtype, [[]])
            if of_dtype[-1] and sum(x.numel() for x in of_dtype[-1]) + p.numel() > self.most:
                of_dtype.append([])
            of_dtype[-1].append(p)
        return [each for of_dtype in lists.values() for each in of_dtype]

    def arrived(self, p, load):
        if self.turn is None:
            self.turn = 0
            at_end_of_backward(self.send_the_rest)
        load.waiting.discard(p)
        while self.turn < len(self.loads) and not self.loads[self.turn].waiting:
            self.loads[self.turn].send()
            self.turn += 1

    def send_the_rest(self):
        for load in self.loads[self.turn :]:
            load.send()
        self.turn, self.has_sent = None, True

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for load in () if self.has_sent else self.loads:
            load.send()
        for load in self.loads:
            load.exact.grad = load.mean.to(load.exact.dtype)
        for ours, theirs in zip(self.param_groups, self.updates.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})
        self.updates.step()
        for load in self.loads:
            load.exact.grad = load.mean = None
            load.mine.copy_(load.exact)
            all_gather(load.memory, load.mine.clone()).wait()
        self.has_sent = False
        return loss

    def zero_grad(self, set_to_none=True):
        self.has_sent = False
        for load in self.loads:
            load.mean = None
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def whose(self):
        return [dist.get_rank(), dist.get_world_size()]

    def state_dict(self):
        exact = [load.exact.detach().clone() for load in self.loads]
        return {"updates": self.updates.state_dict(), "exact": exact, "whose": self.whose()}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        if state_dict["whose"] != self.whose():
            raise ValueError(f"a state of [rank, ranks] {state_dict['whose']}, not {self.whose()}")
        self.updates.load_state_dict(state_dict["updates"])
        for ours, theirs in zip(self.param_groups, self.updates.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        for load, exact in zip(self.loads, state_dict["exact"], strict=True):
            load.exact.copy_(exact)
