"""Wrong answers to lesson 09 that people really give, and what the check must say to each."""

import contextlib
import math

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


class Alone(right.DynamicLossScaler):
    """Looks at its own gradients and sends nothing."""

    def unscale_(self, optimizer):
        if optimizer in self._overflowed:
            raise RuntimeError("unscale_() was already called")
        grads = grads_of(optimizer)
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("fp16 gradients")
        for grad in grads:
            grad.mul_(1 / self._scale)
        self._overflowed[optimizer] = not all(bool(grad.isfinite().all()) for grad in grads)


@mistake("09.1", says="more than one message a step")
class DynamicLossScaler(Alone):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if current_world_size() > 1:
            bad = torch.tensor(float(self._overflowed[optimizer]))
            for _ in optimizer.param_groups:
                dist.all_reduce(bad)
            self._overflowed[optimizer] = bool(bad)


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


def written_out(
    self, parameter, group, *, coupled=False, late=False, corrected=True, root=None, square=None
):
    """AdamW's step on the states of the reference, with one thing changed."""
    state, grad = self.state[parameter], parameter.grad.float()
    if not state:
        state["step"] = 0
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(grad)
        if parameter.dtype != torch.float32:
            state["master"] = parameter.detach().float()
    state["step"] += 1
    master = state.get("master", parameter)
    if coupled:
        grad = grad + group["weight_decay"] * master
    elif not late:
        master.mul_(1 - group["lr"] * group["weight_decay"])
    (beta1, beta2), eps = group["betas"], group["eps"]
    squared = grad * grad if square is None else square(parameter.grad)
    state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
    state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * squared)
    a, b = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"]) if corrected else (1.0, 1.0)
    v = state["exp_avg_sq"] / b
    below = v.sqrt() + eps if root is None else root(v, eps)
    master -= group["lr"] * (state["exp_avg"] / a) / below
    if late:
        master.mul_(1 - group["lr"] * group["weight_decay"])
    if master is not parameter:
        parameter.copy_(master)


@mistake("09.2", says="the bias correction is missing")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        written_out(self, parameter, group, corrected=False)


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


def weighed_by(
    model,
    micro_batches,
    loss_of,
    scaler=None,
    *,
    weight,
    quiet="all",
    every=False,
    ranks=True,
    retain=False,
    half=False,
):
    """The reference with parts that can be exchanged; `weight` takes a micro-batch and its list."""
    if not micro_batches:
        raise ValueError("no micro-batch, got 0")
    world_size = current_world_size()
    total = 0.0
    for number, each in enumerate(micro_batches, start=1):
        silent = world_size > 1 and not every and (number < len(micro_batches) or quiet == "last")
        inside = model.no_sync() if silent else contextlib.nullcontext()
        with contextlib.nullcontext() if quiet == "backward" else inside:
            loss = loss_of(model, each)
            loss = loss.float() if loss.dtype == torch.float16 and not half else loss
            part = loss * weight(each, micro_batches)
        with (
            inside
            if quiet == "backward"
            else (model.no_sync() if silent else contextlib.nullcontext())
        ):
            scaled = part * (world_size if ranks else 1)
            (scaled if scaler is None else scaler.scale(scaled)).backward(retain_graph=retain)
        total = total + part.detach()
    return total


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
    return weighed_by(model, micro_batches, loss_of, scaler, weight=lambda one, all: 1 / len(all))


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
    return weighed_by(model, micro_batches, loss_of, scaler, weight=share, half=True)


# 09.4 float8_linear

E4M3 = torch.float8_e4m3fn


def eight_bits(x, weight, dtype, by_row, *, largest=None, scale=True, back=True, floor=1e-30):
    """The reference with parts that can be exchanged; `largest` makes a size from a factor."""
    largest = largest or (lambda f: f.abs().amax(1 if by_row else (0, 1), keepdim=True))
    x, weight = x.float(), weight.float()
    scales = [largest(f).clamp(min=floor) / torch.finfo(dtype).max for f in (x, weight)]
    scales = scales if scale else [torch.ones(1, 1)] * 2
    a, b = ((f / s).to(dtype).float() for f, s in zip((x, weight), scales, strict=True))
    return a @ b.T * scales[0] * scales[1].T if back else a @ b.T


@mistake("09.4", says="no scale: what is small")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return eight_bits(x, weight, dtype, by_row, scale=False)


@mistake("09.4", says="it has to be multiplied by both scales")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return eight_bits(x, weight, dtype, by_row, back=False)


@mistake("09.4", says="not by the largest in size")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    dim = 1 if by_row else (0, 1)
    return eight_bits(x, weight, dtype, by_row, largest=lambda f: f.amax(dim, keepdim=True))


@mistake("09.4", says="one scale a factor, where by_row asks")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return eight_bits(x, weight, dtype, False)


@mistake("09.4", says="the factors are rounded to another format")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return right.float8_linear(x, weight, E4M3, by_row)


@mistake("09.4", says="the product is rounded to 16 bits")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return right.float8_linear(x, weight, dtype, by_row).bfloat16().float()


@mistake("09.4", says="both factors are divided by one scale")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    if by_row:
        return right.float8_linear(x, weight, dtype, True)
    largest = torch.maximum(x.abs().amax(), weight.abs().amax()).float().view(1, 1)
    return eight_bits(x, weight, dtype, by_row, largest=lambda f: largest)


@mistake("09.4", says="the scales go by columns")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    if not by_row:
        return right.float8_linear(x, weight, dtype)
    (a, sa), (b, sb) = (right._in_8_bits(f.T, dtype, True) for f in (x, weight))
    return (a.float() * sa).T @ (b.float() * sb)


@mistake("09.4", says="a floor of 1e-12 under the scale")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return eight_bits(x, weight, dtype, by_row, floor=1e-12 * torch.finfo(dtype).max)


@mistake("09.4", says="the largest number becomes 1")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    (a, sa), (b, sb) = (right._in_8_bits(f, dtype, by_row) for f in (x, weight))
    largest = torch.finfo(dtype).max
    a, b = ((f.float() / (s * largest)).to(dtype) for f, s in ((x, sa), (weight, sb)))
    return a.float() @ b.float().T * (sa * largest) * (sb * largest).T


@mistake("09.4", says="is divided by its largest number, which is 0")
def float8_linear(x, weight, dtype=E4M3, by_row=False):
    return eight_bits(x, weight, dtype, by_row, floor=0.0)
