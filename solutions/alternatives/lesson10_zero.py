"""Right answers to lesson 10 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shared.ranks.collectives import all_gather, reduce_scatter
from solutions import lesson10_zero as right
from solutions.alternatives.stage1_by_lists import Listed
from solutions.alternatives.stage2_by_itself import InTurn
from solutions.alternatives.stage3_by_itself import ByItself, InAChain


def filled_partition(tensors, num_parts):
    """Zeros first, the numbers written into them."""
    if num_parts < 1 or not len(tensors):
        raise ValueError("nothing to cut")
    if any(x.dtype != tensors[0].dtype for x in tensors):
        raise ValueError("several dtypes")
    total = sum(x.numel() for x in tensors)
    size = -(-total // num_parts)
    flat = torch.zeros(size * num_parts, dtype=tensors[0].dtype, device=tensors[0].device)
    with torch.no_grad():
        at = 0
        for x in tensors:
            flat[at : at + x.numel()].view(x.shape).copy_(x)
            at += x.numel()
    return flat, [flat[i * size : (i + 1) * size] for i in range(num_parts)]


@torch.no_grad()
def padded_partition(tensors, num_parts):
    """Concatenate, pad, split."""
    try:
        (dtype,) = {x.dtype for x in tensors}
    except ValueError:
        raise ValueError(f"tensors of one dtype, not {[x.dtype for x in tensors]}") from None
    if num_parts <= 0:
        raise ValueError(f"{num_parts} parts of {dtype}")
    flat = torch.cat([x.flatten() for x in tensors])
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % num_parts))
    return flat, list(flat.split(flat.numel() // num_parts))


def place():
    """This rank and the number of ranks, to which a state belongs."""
    return dist.get_rank(), dist.get_world_size()


class MoreThanAsked(right.ZeroStage1):
    """All of stage 1 is right where its idea alone is asked for."""


class MoreThanAChain(right.ZeroStage3):
    """All of stage 3 is right for a chain."""


class WholeGroups(Optimizer):
    """Stage 1 with one flat tensor for each group and dtype, and one update of all parts."""

    def __init__(self, params, optimizer_class, *, bucket_size=1_000_000, **kwargs):
        self.inner: Any = None
        self.buckets = []
        self.make = lambda groups: optimizer_class(groups, **kwargs)
        super().__init__(params, self.make([{"params": []}]).defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group, rank = self.param_groups[-1], dist.get_rank()
        masters = []
        for p in group["params"]:
            dist.broadcast(p.data, src=0)
        trained = [p for p in group["params"] if p.requires_grad]
        for dtype in {p.dtype: None for p in trained}:
            members = [p for p in trained if p.dtype == dtype]
            flat, parts = right.partition(members, dist.get_world_size())
            at = 0
            for p in members:
                p.data = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
            small = dtype in (torch.bfloat16, torch.float16)
            masters.append(nn.Parameter(parts[rank].float() if small else parts[rank]))
            self.buckets.append((members, flat, parts[rank], masters[-1]))
        settings = {k: v for k, v in group.items() if k != "params"}
        if self.inner is None:
            self.inner = self.make([{"params": masters, **settings}])
        else:
            self.inner.add_param_group({"params": masters, **settings})

    def collect(self, members, flat):
        whole = torch.zeros_like(flat)
        at = 0
        for p in members:
            if p.grad is not None:
                whole[at : at + p.numel()] = p.grad.reshape(-1)
                p.grad = None
            at += p.numel()
        return whole.div_(dist.get_world_size())

    def gradient(self, members, flat, part):
        mean = torch.empty_like(part)
        reduce_scatter(mean, self.collect(members, flat)).wait()
        return mean

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for members, flat, part, master in self.buckets:
                master.grad = self.gradient(members, flat, part).to(master.dtype)
            for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
                theirs.update({k: v for k, v in mine.items() if k != "params"})
            self.inner.step()
            self.inner.zero_grad()
            self.publish()
        return loss

    def publish(self):
        for _, flat, part, master in self.buckets:
            part.copy_(master.detach())
            all_gather(flat, part.clone()).wait()

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def state_dict(self):
        masters = [master.detach().clone() for *_, master in self.buckets]
        return {"inner": self.inner.state_dict(), "masters": masters, "of": place()}

    def load_state_dict(self, state_dict):
        if state_dict["of"] != place():
            raise ValueError(f"the state of rank and number of ranks {state_dict['of']}")
        self.inner.load_state_dict(state_dict["inner"])
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
        with torch.no_grad():
            for (*_, master), saved in zip(self.buckets, state_dict["masters"], strict=True):
                master.copy_(saved)


class ListCollectives(WholeGroups):
    """The same by the older collectives, which take lists of parts."""

    def gradient(self, members, flat, part):
        mean = torch.empty_like(part)
        whole = self.collect(members, flat)
        dist.reduce_scatter(mean, list(whole.chunk(dist.get_world_size())))
        return mean

    def publish(self):
        for _, flat, part, master in self.buckets:
            part.copy_(master.detach())
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part.clone())
            flat.copy_(torch.cat(parts))


class Blocking(right.ZeroStage2):
    """Stage 2 that waits for every bucket where it is sent."""

    def _on_gradient(self, parameter):
        self._begin_backward()
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            for each in [p for p in bucket.missing if p.grad is not None]:
                bucket.collect(each)
            if bucket.missing:
                return
            bucket.reduce()
            bucket.finish()
            self._next += 1


class SmallBuckets(right.ZeroStage2):
    """Stage 2 with buckets of three quarters of the size that is allowed."""

    def __init__(self, params, optimizer_class, *, bucket_size=1_000_000, **kwargs):
        less = max(1, bucket_size * 3 // 4)
        super().__init__(params, optimizer_class, bucket_size=less, **kwargs)


class TorchHooks(right.ZeroStage3):
    """Stage 3 with torch's own hooks for a module's backward."""

    def _hook(self, module, parameters):
        units = list(dict.fromkeys(self._unit_of[p] for p in parameters))
        if not units:
            return

        def hold(*_):
            self._use(units)

        def let_go(*_):
            for unit in units:
                unit.users -= 1
                if unit.users <= 0:
                    unit.free()

        def before(*_):
            self._begin_backward()
            hold()

        def after(module, to_inputs, _):
            if any(grad is not None for grad in to_inputs):
                let_go()

        module.register_forward_pre_hook(hold)
        module.register_forward_hook(let_go)
        # A first layer's input needs no gradient: torch says that the hook fires all the same.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        module.register_full_backward_pre_hook(before)
        module.register_full_backward_hook(after)


def bare_config(num_params, num_ranks, budget, batch_size, micro_batch):
    """Only the keys that matter for the stage; the accumulation is left to DeepSpeed."""
    if batch_size % (micro_batch * num_ranks):
        raise ValueError(f"{batch_size} over {num_ranks} x {micro_batch}")
    D, most = num_ranks, 0.9 * budget / num_params
    if most >= 20:
        zero = {"stage": 0}
    elif most >= max(4 + 14 / D, 2 + 24 / D):
        zero = {"stage": 1, "reduce_bucket_size": num_params // 51, "overlap_comm": True}
    elif most >= 2 + 24 / D:
        zero = {"stage": 2, "reduce_bucket_size": num_params // 100, "overlap_comm": False}
    elif most >= 20 / D:
        zero = {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "reduce_bucket_size": num_params // 60,
        }
    else:
        raise ValueError(f"{budget} bytes are too few")
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def frugal_config(num_params, num_ranks, budget, batch_size, micro_batch):
    """Stage 3's step in sub-groups; the whole batch is left to DeepSpeed; keys it need not."""
    D = num_ranks
    times = batch_size // (micro_batch * D)
    if times * micro_batch * D != batch_size or not times:
        raise ValueError(f"a batch of {batch_size}")
    peak = {0: 20, 1: max(4 + 14 / D, 2 + 24 / D), 2: 2 + 24 / D, 3: 28 / D}
    stage = min((s for s, size in peak.items() if size * num_params <= 0.9 * budget), default=None)
    if stage is None:
        raise ValueError(f"{budget} bytes a rank")
    section = dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"), num_params // 128 * 2
    )
    section |= {"stage": stage, "contiguous_gradients": True, "round_robin_gradients": False}
    section |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    section |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": times,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": section,
    }


ALTERNATIVES = {
    "10.1": [filled_partition, padded_partition],
    "10.2": [Listed, MoreThanAsked],
    "10.2b": [WholeGroups, ListCollectives],
    "10.3": [InTurn, Blocking, SmallBuckets],
    "10.4": [InAChain, MoreThanAChain],
    "10.4b": [ByItself, TorchHooks],
    "10.5": [bare_config, frugal_config],
}
