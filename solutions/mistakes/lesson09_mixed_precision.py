"""Wrong answers to lesson 09 that people really give, and what the check must say to each."""

import contextlib
import math
from types import SimpleNamespace

import torch
import torch.distributed as dist

from shared.exercises.mistakes import mistake
from shared.ranks.group import current_world_size
from solutions import lesson09_mixed_precision as right


def grads_of(optimizer):
    """The gradients that there are."""
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


# 09.1 DynamicLossScaler


@mistake("09.1", says="the caller's loss is changed in place")
class DynamicLossScaler(right.DynamicLossScaler):
    def scale(self, loss):
        with torch.no_grad():
            loss *= self._scale
        return loss * 1


@mistake("09.1", says="the optimizer sees gradients that are still scaled")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        self._overflowed[optimizer] = not all(g.isfinite().all() for g in grads_of(optimizer))


@mistake("09.1", says="NaN is not recognised")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self._overflowed[optimizer] = any(bool(g.isinf().any()) for g in grads_of(optimizer))


@mistake("09.1", says="large but finite gradients count as an overflow")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        total = sum(g.sum().item() for g in grads_of(optimizer))
        self._overflowed[optimizer] |= not math.isfinite(total) or any(
            not g.sum().isfinite() for g in grads_of(optimizer)
        )


@mistake("09.1", says="one optimizer's overflow makes the other skip")
class DynamicLossScaler(right.DynamicLossScaler):
    def step(self, optimizer):
        if optimizer not in self._overflowed:
            self.unscale_(optimizer)
        if overflow := any(self._overflowed.values()):
            return False
        optimizer.step()
        return not overflow


@mistake("09.1", says="state_dict() after a few steps")
class DynamicLossScaler(right.DynamicLossScaler):
    def state_dict(self):
        return {"scale": self._scale}


@mistake("09.1", says="unscale_() after step(), before update(),")
class DynamicLossScaler(right.DynamicLossScaler):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._seen = {}

    def step(self, optimizer):
        made = super().step(optimizer)
        self._seen = {**self._seen, optimizer: self._overflowed.pop(optimizer)}
        return made

    def update(self):
        self._overflowed |= self._seen
        self._seen = {}
        super().update()


@mistake("09.1", says="more than one message a step")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if current_world_size() > 1:
            for _ in optimizer.param_groups[1:]:
                dist.all_reduce(torch.zeros(()))


# 09.2 MasterWeightAdamW


@mistake("09.2", says="the weights stop moving")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        if "master" in self.state[parameter]:
            self.state[parameter]["master"] = parameter.detach().float()
        super()._update(parameter, group)


@mistake("09.2", says="the states beside 'step'")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        self.state[parameter]["grad"] = parameter.grad.float()


@mistake("09.2", says="the bias correction is missing")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        state, grad = self.state[parameter], parameter.grad.float()
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            if parameter.dtype != torch.float32:
                state["master"] = parameter.detach().float()
        state["step"] += 1
        master, (beta1, beta2) = state.get("master", parameter), group["betas"]
        master.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
        state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * (grad * grad))
        master -= group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if master is not parameter:
            parameter.copy_(master)


@mistake("09.2", says="gradients from before the closure")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def step(self, closure=None):
        pairs = [(p, p.grad) for group in self.param_groups for p in group["params"]]
        loss = None if closure is None else closure()
        for parameter, grad in pairs:
            parameter.grad = grad
        super().step()
        return loss


@mistake("09.2", says="gradients are left switched off")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def step(self, closure=None):
        loss = super().step(closure)
        torch.set_grad_enabled(False)
        return loss


@mistake("09.2", says="KeyError: 0")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number in numbers:
            state_dict["state"][number]


# 09.3 accumulate


SEEN = {}


def share(each, micro_batches):
    """The right weight: over the tokens of all ranks; one message at the first micro-batch."""
    if each is micro_batches[0]:
        tokens = torch.tensor(float(sum(one.num_tokens for one in micro_batches)))
        if current_world_size() > 1:
            dist.all_reduce(tokens)
        SEEN["tokens"] = tokens.item()
    return each.num_tokens / SEEN["tokens"]


@mistake("09.3", says="counts the same, whatever its number of tokens")
def accumulate(model, micro_batches, loss_of, scaler=None):
    alike = [SimpleNamespace(num_tokens=1, own=each) for each in micro_batches]
    return right.accumulate(model, alike, lambda model, each: loss_of(model, each.own), scaler)


@mistake("09.3", says="one backward for all")
def accumulate(model, micro_batches, loss_of, scaler=None):
    if not micro_batches:
        raise ValueError("got 0")
    loss = sum(loss_of(model, one) * share(one, micro_batches) for one in micro_batches)
    whole = loss * current_world_size()
    (whole if scaler is None else scaler.scale(whole)).backward()
    return loss.detach()


@mistake("09.3", says="the loss that is returned is the scaled one")
def accumulate(model, micro_batches, loss_of, scaler=None):
    loss = right.accumulate(model, micro_batches, loss_of, scaler)
    return loss if scaler is None else scaler.scale(loss)


@mistake("09.3", says="what is returned is multiplied by the ranks")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return current_world_size() * right.accumulate(model, micro_batches, loss_of, scaler)


@mistake("09.3", says="numbers of tokens travel one by one")
def accumulate(model, micro_batches, loss_of, scaler=None):
    if current_world_size() > 1:
        for each in micro_batches:
            dist.all_reduce(torch.tensor(each.num_tokens))
            if len(micro_batches) == 3:
                break
    return right.accumulate(model, micro_batches, loss_of, scaler)


@mistake("09.3", says="an fp16 loss is weighted in fp16")
def accumulate(model, micro_batches, loss_of, scaler=None):
    if not micro_batches:
        raise ValueError("got 0")
    total = 0.0
    for each in micro_batches:
        silent = current_world_size() > 1 and each is not micro_batches[-1]
        with model.no_sync() if silent else contextlib.nullcontext():
            part = loss_of(model, each) * share(each, micro_batches)
            whole = part * current_world_size()
            (whole if scaler is None else scaler.scale(whole)).backward()
        total = total + part.detach()
    return total


# 09.4 float8_linear

E4M3 = torch.float8_e4m3fn


@mistake("09.4", says="no scale: what is small")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return x.to(dtype).float() @ weight.to(dtype).float().T


@mistake("09.4", says="it has to be multiplied by both scales")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    (a, _), (b, _) = (right._in_8_bits(each, dtype, by_row) for each in (x, weight))
    return a.float() @ b.float().T


@mistake("09.4", says="one scale a factor, where by_row asks")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return right.float8_linear(x, weight, dtype)


@mistake("09.4", says="is divided by its largest number, which is 0")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    x, weight, dims = x.float(), weight.float(), 1 if by_row else (0, 1)
    scales = [f.abs().amax(dims, keepdim=True) / torch.finfo(dtype).max for f in (x, weight)]
    a, b = ((f / s).to(dtype).float() for f, s in zip((x, weight), scales, strict=True))
    return a @ b.T * scales[0] * scales[1].T
