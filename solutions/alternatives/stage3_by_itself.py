"""Lesson 10's stage 3 once more, with nothing of the reference's; see lesson10_zero."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shared.ranks.collectives import all_gather, reduce_scatter
from solutions import lesson10_zero as right


class Shard:
    """A unit of `ByItself`: this rank's part, and a flat tensor that comes and goes."""

    def __init__(self, members):
        self.members, self.trained = members, members[0].requires_grad
        self.flat, parts = right.partition(members, dist.get_world_size())
        dist.broadcast(self.flat, 0)
        self.size, self.part = self.flat.untyped_storage().nbytes(), parts[dist.get_rank()].clone()
        half = self.trained and self.part.dtype.itemsize == 2
        self.master = nn.Parameter(self.part.float() if half else self.part)
        self.views = self.cut(self.flat, [p.shape for p in members])
        self.grad = None
        self.begin()
        self.drop()

    def cut(self, flat, shapes):
        ends = [sum(s.numel() for s in shapes[: i + 1]) for i in range(len(shapes))]
        return [flat[end - s.numel() : end].view(s) for end, s in zip(ends, shapes, strict=True)]

    def begin(self):
        self.come, self.sent, self.fresh = set(), False, None

    def fetch(self):
        self.users += 1
        if not self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(self.size)
            for p, view in zip(self.members, self.views, strict=True):
                p.data = view
            all_gather(self.flat, self.part).wait()

    def leave(self):
        self.users -= 1
        if self.users <= 0:
            self.drop()

    def drop(self):
        self.users = 0
        self.flat.untyped_storage().resize_(0)
        for p in self.members:
            p.data = torch.empty(0, dtype=p.dtype)

    def take(self, p):
        if self.fresh is None:
            self.fresh = torch.zeros_like(self.flat)
            self.places = self.cut(self.fresh, [view.shape for view in self.views])
        (place,) = (x for x, q in zip(self.places, self.members, strict=True) if q is p)
        place.copy_(p.grad / dist.get_world_size())
        p.grad = None
        self.come.add(p)

    def send(self):
        whole, mean = self.fresh, torch.empty_like(self.part)
        reduce_scatter(mean, torch.zeros_like(self.flat) if whole is None else whole).wait()
        if whole is not None:
            whole.untyped_storage().resize_(0)
        self.grad = mean if self.grad is None else self.grad + mean
        self.sent, self.fresh, self.places = True, None, []


class ByItself(Optimizer):
    """Stage 3 from the hints alone: torch's hooks of modules, and nothing of the reference's."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        self.model, self.shards, of = model, [], {}
        if units is None:
            lists = [c if isinstance(c, nn.ModuleList) else [c] for c in model.children()]
            units = [each for one in lists for each in one]
        for module in (*units, model):
            own = [p for p in module.parameters() if p not in of]
            for members in ([p for p in own if p.requires_grad == kind] for kind in (True, False)):
                if members:
                    self.shards.append(Shard(members))
                    of |= dict.fromkeys(members, self.shards[-1])
        inside = {p for module in units for p in module.parameters()}
        outside = [p for p in model.parameters() if p not in inside]
        for module, used in (*((m, list(m.parameters())) for m in units), (model, outside)):
            self.watch(module, list(dict.fromkeys(of[p] for p in used)))
        for p, shard in of.items():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, s=shard: self.arrived(p, s))
        self.trained = [shard for shard in self.shards if shard.trained]
        self.inner = optimizer_class([shard.master for shard in self.trained], **kwargs)
        self.running = False
        super().__init__(model.parameters(), self.inner.defaults)

    def watch(self, module, shards):
        def fetch(*_):
            for shard in shards:
                shard.fetch()

        def leave(*_):
            for shard in shards:
                shard.leave()

        def again(*_):
            self.start()
            fetch()

        def frozen(*_):
            for shard in shards:
                if not shard.trained:
                    shard.leave()

        if shards:
            module.register_forward_pre_hook(fetch)
            module.register_forward_hook(leave)
            # A first layer's input needs no gradient: torch says that the hook fires all the same.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            module.register_full_backward_pre_hook(again)
            module.register_full_backward_hook(frozen)

    def start(self):
        if not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def arrived(self, p, shard):
        self.start()
        shard.take(p)
        if len(shard.come) == len(shard.members):
            shard.drop()
            shard.send()

    def finish(self):
        for shard in self.shards:
            shard.drop()
            if shard.trained and not shard.sent:
                shard.send()
            shard.begin()
        self.running = False

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for shard in self.trained:
                grad = torch.zeros_like(shard.part) if shard.grad is None else shard.grad
                shard.master.grad = grad.to(shard.master.dtype)
            mine = {k: v for k, v in self.param_groups[0].items() if k != "params"}
            self.inner.param_groups[0].update(mine)
            self.inner.step()
            self.inner.zero_grad()
            for shard in self.trained:
                shard.part.copy_(shard.master.detach())
        return loss

    def zero_grad(self, set_to_none=True):
        for shard in self.shards:
            shard.grad = None

    def full_state_dict(self):
        for shard in self.shards:
            shard.fetch()
        whole = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
        for shard in self.shards:
            shard.leave()
        return whole

    def state_dict(self):
        # In float32 the part is its own master, and is written twice: both are this rank's own.
        numbers = [(s.part.clone(), s.master.detach().clone()) for s in self.shards]
        return {
            "numbers": numbers,
            "inner": self.inner.state_dict(),
            "of": (dist.get_rank(), dist.get_world_size()),
        }

    def load_state_dict(self, state_dict):
        if state_dict["of"] != (dist.get_rank(), dist.get_world_size()):
            raise ValueError(f"the state of rank and number of ranks {state_dict['of']}")
        self.inner.load_state_dict(state_dict["inner"])
        group = self.inner.param_groups[0].items()
        self.param_groups[0].update({k: v for k, v in group if k != "params"})
        with torch.no_grad():
            for shard, (part, master) in zip(self.shards, state_dict["numbers"], strict=True):
                shard.part.copy_(part)
                shard.master.copy_(master)


class InAChain(Optimizer):
    """Stage 3 for a chain, with torch's hook before a module's backward; no more than is asked."""

    def __init__(self, model, optimizer_class, *, units=None, **kwargs):
        self.model = model
        if units is None:
            lists = [c if isinstance(c, nn.ModuleList) else [c] for c in model.children()]
            units = [each for one in lists for each in one]
        self.shards = [Shard(list(module.parameters())) for module in units]
        for module, shard in zip(units, self.shards, strict=True):
            module.register_forward_pre_hook(lambda *_, shard=shard: shard.fetch())
            module.register_forward_hook(lambda *_, shard=shard: shard.leave())
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            module.register_full_backward_pre_hook(lambda *_, shard=shard: shard.fetch())
            for p in shard.members:
                p.register_post_accumulate_grad_hook(lambda p, s=shard: self.arrived(p, s))
        self.updates = optimizer_class([s.master for s in self.shards], **kwargs)
        super().__init__(model.parameters(), self.updates.defaults)

    def arrived(self, p, shard):
        shard.take(p)
        if len(shard.come) == len(shard.members):
            shard.drop()
            shard.send()
            shard.begin()

    def step(self, closure=None):
        new = {k: v for k, v in self.param_groups[0].items() if k != "params"}
        self.updates.param_groups[0].update(new)
        for shard in self.shards:
            shard.master.grad = shard.grad
        self.updates.step()
        self.updates.zero_grad()

    def zero_grad(self, set_to_none=True):
        for shard in self.shards:
            shard.grad = None

    full_state_dict = ByItself.full_state_dict
