"""Right answers to lesson 09 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def each_gradient(optimizer):
    """Yield the gradients that there are."""
    for group in optimizer.param_groups:
        yield from (p.grad for p in group["params"] if p.grad is not None)


class TensorScaler:
    """The scale is a tensor, as in torch; the flag travels as a byte with MAX."""

    def __init__(
        self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    ):
        values = init_scale, growth_factor, backoff_factor, growth_interval
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(f"these cannot be used: {values}")
        if growth_interval < 1:
            raise ValueError(f"these cannot be used: {values}")
        self.now = torch.tensor(float(init_scale))
        self.up, self.down, self.interval = growth_factor, backoff_factor, growth_interval
        self.clean, self.found = 0, {}

    def get_scale(self):
        return self.now.item()

    def scale(self, loss):
        return loss * self.now.to(loss.device)

    def unscale_(self, optimizer):
        if id(optimizer) in self.found:
            raise RuntimeError("already unscaled")
        finite = True
        for grad in each_gradient(optimizer):
            if grad.dtype is torch.float16:
                raise ValueError("fp16")
            grad /= self.now
            finite = finite and torch.isfinite(grad).all().item()
        if dist.is_initialized():
            flag = torch.tensor([not finite], dtype=torch.uint8)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            finite = flag.item() == 0
        self.found[id(optimizer)] = not finite

    def step(self, optimizer):
        if id(optimizer) not in self.found:
            self.unscale_(optimizer)
        if self.found[id(optimizer)]:
            return False
        optimizer.step()
        return True

    def update(self):
        if True in self.found.values():
            self.now, self.clean = self.now * self.down, 0
        elif self.clean + 1 < self.interval:
            self.clean += 1
        else:
            grown, self.clean = self.now * self.up, 0
            self.now = grown if grown.isfinite() else self.now
        self.found = {}

    def state_dict(self):
        return {
            "scale": self.get_scale(), "growth_factor": self.up, "backoff_factor": self.down,
            "growth_interval": self.interval, "_growth_tracker": self.clean,
        }  # fmt: skip

    def load_state_dict(self, state_dict):
        self.now = torch.tensor(float(state_dict["scale"]))
        self.up, self.down = state_dict["growth_factor"], state_dict["backoff_factor"]
        self.interval, self.clean = state_dict["growth_interval"], state_dict["_growth_tracker"]


class SummedScaler(TensorScaler):
    """Looks at 0 * gradient, whose sum is NaN exactly where something is not finite."""

    def unscale_(self, optimizer):
        if id(optimizer) in self.found:
            raise RuntimeError("already unscaled")
        grads = list(each_gradient(optimizer))
        if {grad.dtype for grad in grads} & {torch.float16}:
            raise ValueError("fp16")
        probe = torch.zeros(1)
        for grad in grads:
            grad.copy_(grad * (1 / self.now))
            probe += (0 * grad).sum()
        if dist.is_initialized():
            dist.all_reduce(probe)
        self.found[id(optimizer)] = bool(probe.isnan())


class PlainAdamW(Optimizer):
    """AdamW as in the paper, written with new tensors; a tensor counts the steps."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    self.move(p, **{k: v for k, v in group.items() if k != "params"})
        return loss

    def move(self, p, lr, betas, eps, weight_decay, **_):
        s, g = self.state[p], p.grad.to(torch.float32)
        if "step" not in s:
            s["step"] = torch.tensor(0.0)
            s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
            if p.dtype is not torch.float32:
                s["master"] = p.to(torch.float32)
        s["step"] += 1
        t, w = s["step"].item(), s.get("master", p.detach())
        s["exp_avg"] = betas[0] * s["exp_avg"] + (1 - betas[0]) * g
        s["exp_avg_sq"] = betas[1] * s["exp_avg_sq"] + (1 - betas[1]) * g**2
        m, v = s["exp_avg"] / (1 - betas[0] ** t), s["exp_avg_sq"] / (1 - betas[1] ** t)
        w -= lr * weight_decay * w
        w -= lr * m / (v.sqrt() + eps)
        if "master" in s:
            p.copy_(w)

    def load_state_dict(self, state_dict):
        kept = copy.deepcopy(state_dict["state"])
        super().load_state_dict(state_dict)
        everyone = [p for group in self.param_groups for p in group["params"]]
        for number, state in kept.items():
            self.state[everyone[number]] = state


class GroupedAdamW(Optimizer):
    """A whole group at once, masters as parameters of their own; loads the groups alone first."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            if used := [p for p in group["params"] if p.grad is not None]:
                self.move(used, group)
        return loss

    def move(self, used, group):
        for p in used:
            if not self.state[p]:
                moments = {
                    name: torch.zeros_like(p.grad.float()) for name in ("exp_avg", "exp_avg_sq")
                }
                master = {} if p.dtype is torch.float32 else {"master": nn.Parameter(p.float())}
                self.state[p] = {"step": torch.zeros((), dtype=torch.int64), **moments, **master}
        states, grads = [self.state[p] for p in used], [p.grad.float() for p in used]
        masters = [state.get("master", p) for state, p in zip(states, used, strict=True)]
        m, v, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        (beta1, beta2), lr = group["betas"], group["lr"]
        torch._foreach_add_(steps, 1)
        torch._foreach_mul_(masters, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        below = torch._foreach_sqrt(torch._foreach_div(v, [1 - beta2 ** t.item() for t in steps]))
        torch._foreach_add_(below, group["eps"])
        rates = [-lr / (1 - beta1 ** t.item()) for t in steps]
        torch._foreach_addcdiv_(masters, m, below, rates)
        torch._foreach_copy_(used, masters)

    def load_state_dict(self, state_dict):
        saved, groups = state_dict["state"], state_dict["param_groups"]
        super().load_state_dict({"state": {}, "param_groups": groups})
        for new, old in zip(self.param_groups, groups, strict=True):
            for p, number in zip(new["params"], old["params"], strict=True):
                if number in saved:
                    self.state[p] = {k: v.detach().clone() for k, v in saved[number].items()}


def counts_in_a_tensor(model, micro_batches, loss_of, scaler=None):
    """Counts as one float32 tensor, and every micro-batch but the last inside one no_sync."""
    if len(micro_batches) == 0:
        raise ValueError("nothing to do: 0 micro-batches")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    counts = torch.tensor([float(batch.num_tokens) for batch in micro_batches]).sum()
    if ranks > 1:
        dist.all_reduce(counts)
    total = 0.0
    with contextlib.ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(model.no_sync())
        for batch in micro_batches[:-1]:
            total += backward(model, batch, loss_of, scaler, counts, ranks)
    return total + backward(model, micro_batches[-1], loss_of, scaler, counts, ranks)


def backward(model, batch, loss_of, scaler, counts, ranks):
    """One micro-batch, by a weight that is a float32 tensor; return its part of the loss."""
    loss = loss_of(model, batch)
    weight = batch.num_tokens / counts
    whole = loss * weight * ranks
    (scaler.scale(whole) if scaler else whole).backward()
    return loss.item() * weight.item()


def weight_in_backward(model, micro_batches, loss_of, scaler=None):
    """The weight is the gradient that backward begins with."""
    tokens = sum(batch.num_tokens for batch in micro_batches)
    if not tokens:
        raise ValueError(f"{len(micro_batches)} micro-batches without a token")
    ranks, everyone = 1, torch.tensor([tokens], dtype=torch.int64)
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(everyone)
    losses = []
    for i, batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with model.no_sync() if ranks > 1 and not last else contextlib.nullcontext():
            loss = loss_of(model, batch)
            share = batch.num_tokens / everyone.item()
            factor = 1.0 if scaler is None else scaler.get_scale()
            loss.backward(torch.full_like(loss, share * ranks * factor))
        losses.append(share * loss.detach())
    return sum(losses)


def inverse_scales(x, weight, dtype=torch.float8_e4m3fn, by_row=False):
    """Factors are multiplied by the inverse of a scale, which is at least a tiny number."""
    last = torch.finfo(dtype).max

    def inverse(factor):
        sizes = factor.abs().float()
        sizes = sizes.max(dim=-1).values if by_row else sizes.max()
        return last / sizes.clamp(min=1e-30)

    up_x, up_w = inverse(x), inverse(weight)
    if by_row:
        a, b = (x * up_x[:, None]).to(dtype), (weight * up_w[:, None]).to(dtype)
        return torch.einsum("rw,ow->ro", a.float(), b.float()) / up_x[:, None] / up_w
    a, b = (x * up_x).to(dtype), (weight * up_w).to(dtype)
    return torch.einsum("rw,ow->ro", a.float(), b.float()) / (up_x * up_w)


def scaled_back_first(x, weight, dtype=torch.float8_e4m3fn, by_row=False):
    """Each factor is rounded and multiplied by its scale before the product, in float64."""

    def kept(factor):
        wide = factor.double()
        size = wide.abs().amax(-1, keepdim=True) if by_row else wide.abs().max()
        scale = torch.finfo(dtype).max / torch.where(size == 0, torch.ones_like(size), size)
        return (wide * scale).float().to(dtype).double() / scale

    return (kept(x) @ kept(weight).mT).float()


ALTERNATIVES = {
    "09.1": [TensorScaler, SummedScaler],
    "09.2": [PlainAdamW, GroupedAdamW],
    "09.3": [counts_in_a_tensor, weight_in_backward],
    "09.4": [inverse_scales, scaled_back_first],
}
