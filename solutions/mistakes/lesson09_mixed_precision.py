"""Wrong answers to lesson 09 that people really give, and what the check must say to each."""

import contextlib
import math
import weakref

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


@mistake("09.1", says="the scaled loss has no graph")
class DynamicLossScaler(right.DynamicLossScaler):
    def scale(self, loss):
        return torch.tensor(loss.item() * self._scale)


@mistake("09.1", says="an fp16 loss is multiplied in fp16")
class DynamicLossScaler(right.DynamicLossScaler):
    def scale(self, loss):
        return loss * self._scale


@mistake("09.1", says="the optimizer sees gradients that are still scaled")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        self._overflowed[optimizer] = not all(g.isfinite().all() for g in grads_of(optimizer))


@mistake("09.1", says="only the first parameter group is unscaled")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= self._scale
        self._overflowed[optimizer] = False


@mistake("09.1", says="step() divides again what unscale_() has divided")
class DynamicLossScaler(right.DynamicLossScaler):
    def step(self, optimizer):
        self._overflowed.pop(optimizer, None)
        return super().step(optimizer)


@mistake("09.1", says="the gradients are replaced by new tensors")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        super().unscale_(optimizer)


@mistake("09.1", says="'NoneType' object has no attribute")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1 / self._scale)
        self._overflowed[optimizer] = False


@mistake("09.1", says="the optimizer steps in spite of an infinity")
class DynamicLossScaler(right.DynamicLossScaler):
    def step(self, optimizer):
        if optimizer not in self._overflowed:
            self.unscale_(optimizer)
        optimizer.step()
        return True


@mistake("09.1", says="no step is ever made again")
class DynamicLossScaler(right.DynamicLossScaler):
    seen = False

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self.seen = self._overflowed[optimizer] = self.seen or self._overflowed[optimizer]


@mistake("09.1", says="NaN is not recognised")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self._overflowed[optimizer] = any(bool(g.isinf().any()) for g in grads_of(optimizer))


@mistake("09.1", says="backoff_factor is not used")
class DynamicLossScaler(right.DynamicLossScaler):
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, **options):
        super().__init__(init_scale, growth_factor, 1 / growth_factor, **options)


@mistake("09.1", says="growth_factor is not used")
class DynamicLossScaler(right.DynamicLossScaler):
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, **options):
        super().__init__(init_scale, 1 / backoff_factor, backoff_factor, **options)


class OtherInterval(right.DynamicLossScaler):
    """Grows after another number of steps."""

    late = 0

    def __init__(self, *args, growth_interval=2000, **options):
        super().__init__(*args, growth_interval=max(1, growth_interval + self.late), **options)


@mistake("09.1", says="one step too late")
class DynamicLossScaler(OtherInterval):
    late = 1


@mistake("09.1", says="one step too early")
class DynamicLossScaler(OtherInterval):
    late = -1


@mistake("09.1", says="does not begin the count of clean steps anew")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        count, overflow = self._clean_steps, any(self._overflowed.values())
        super().update()
        if overflow:
            self._clean_steps = count


@mistake("09.1", says="a skipped step counts as a clean one")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        self._clean_steps += 1
        if any(self._overflowed.values()):
            self._scale *= self._backoff_factor
        elif self._clean_steps == self._growth_interval:
            self._scale *= self._growth_factor
            self._clean_steps = 0
        self._overflowed.clear()


@mistake("09.1", says="after it has grown the scale grows in every step")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        if any(self._overflowed.values()):
            self._scale *= self._backoff_factor
            self._clean_steps = 0
        else:
            self._clean_steps += 1
            if self._clean_steps >= self._growth_interval:
                self._scale *= self._growth_factor
        self._overflowed.clear()


@mistake("09.1", says="the scale never changes")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        self._overflowed.clear()


@mistake("09.1", says="what step() returned")
class DynamicLossScaler(right.DynamicLossScaler):
    def step(self, optimizer):
        super().step(optimizer)


@mistake("09.1", says="large but finite gradients count as an overflow")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        total = sum(g.sum().item() for g in grads_of(optimizer))
        self._overflowed[optimizer] |= not math.isfinite(total) or any(
            not g.sum().isfinite() for g in grads_of(optimizer)
        )


@mistake("09.1", says="the scale grows beyond float32's largest number")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        before, clean = self._scale, self._clean_steps
        overflow = any(self._overflowed.values())
        super().update()
        if not overflow and clean + 1 == self._growth_interval:
            self._scale = before * self._growth_factor


@mistake("09.1", says="one optimizer's overflow makes the other skip")
class DynamicLossScaler(right.DynamicLossScaler):
    def step(self, optimizer):
        if optimizer not in self._overflowed:
            self.unscale_(optimizer)
        if overflow := any(self._overflowed.values()):
            return False
        optimizer.step()
        return not overflow


@mistake("09.1", says="update() backs off once for each optimizer")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        if any(self._overflowed.values()):
            self._scale *= self._backoff_factor ** (len(self._overflowed) - 1)
        super().update()


@mistake("09.1", says="update() looks at one of the optimizers only")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        last = list(self._overflowed.items())[-1:]
        self._overflowed = dict(last)
        super().update()


@mistake("09.1", says="the scale is shared by all scalers")
class DynamicLossScaler(right.DynamicLossScaler):
    shared = {}  # noqa: RUF012

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.shared["scale"] = self._scale
        self._scale = self.shared["scale"]

    def get_scale(self):
        return self.shared["scale"]

    def scale(self, loss):
        self._scale = self.shared["scale"]
        return super().scale(loss)

    def update(self):
        super().update()
        self.shared["scale"] = self._scale


@mistake("09.1", says="state_dict() after a few steps")
class DynamicLossScaler(right.DynamicLossScaler):
    def state_dict(self):
        return {"scale": self._scale}


@mistake("09.1", says="the count of clean steps is not restored")
class DynamicLossScaler(right.DynamicLossScaler):
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "_growth_tracker": 0})


@mistake("09.1", says="growth_factor, backoff_factor or growth_interval is not restored")
class DynamicLossScaler(right.DynamicLossScaler):
    def load_state_dict(self, state_dict):
        kept = ("scale", "_growth_tracker")
        super().load_state_dict({**self.state_dict(), **{key: state_dict[key] for key in kept}})


@mistake("09.1", says="unscale_() after unscale_(), before update(),")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        if optimizer not in self._overflowed:
            super().unscale_(optimizer)


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


@mistake("09.1", says="plain numbers, as in torch's")
class DynamicLossScaler(right.DynamicLossScaler):
    def get_scale(self):
        return torch.tensor(self._scale)


@mistake("09.1", says="the scaler keeps the loss")
class DynamicLossScaler(right.DynamicLossScaler):
    def scale(self, loss):
        self._loss = super().scale(loss)
        return self._loss


@mistake("09.1", says="an infinity in the first of the groups is not noticed")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self._overflowed[optimizer] = not all(g.isfinite().all() for g in grads_of(optimizer)[-1:])


@mistake("09.1", says="an fp16 gradient is accepted")
class DynamicLossScaler(right.DynamicLossScaler):
    def unscale_(self, optimizer):
        if any(grad.dtype == torch.float16 for grad in grads_of(optimizer)):
            for grad in grads_of(optimizer):
                grad /= self._scale
            self._overflowed[optimizer] = False
        else:
            super().unscale_(optimizer)


@mistake("09.1", says="growth_factor 1.0 is accepted")
class DynamicLossScaler(right.DynamicLossScaler):
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, **options):
        super().__init__(init_scale, max(growth_factor, 1.01), **options)


@mistake("09.1", says="torch's GradScaler does the work")
class DynamicLossScaler(right.DynamicLossScaler):
    def scale(self, loss):
        hidden = [torch.amp.GradScaler("cpu", init_scale=self._scale)]
        return hidden[0].scale(loss.float() if loss.dtype == torch.float16 else loss)


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


@mistake("09.1", says="only the rank that met the infinity skips")
class DynamicLossScaler(Alone):
    pass


@mistake("09.1", says="not every rank takes part in the exchange")
class DynamicLossScaler(Alone):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if current_world_size() > 1 and self._overflowed[optimizer]:
            dist.all_reduce(torch.ones(1))


@mistake("09.1", says="whole gradients travel")
class DynamicLossScaler(Alone):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if current_world_size() > 1:
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
            total = torch.cat([each.flatten() for each in flat])
            dist.all_reduce(total)
            self._overflowed[optimizer] = not bool(total.isfinite().all())


@mistake("09.1", says="more than one message a step")
class DynamicLossScaler(Alone):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if current_world_size() > 1:
            bad = torch.tensor(float(self._overflowed[optimizer]))
            for _ in optimizer.param_groups:
                dist.all_reduce(bad)
            self._overflowed[optimizer] = bool(bad)


@mistake("09.1", says="an overflow that another scaler met is counted")
class DynamicLossScaler(right.DynamicLossScaler):
    everyone = {}  # noqa: RUF012

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._overflowed = self.everyone


@mistake("09.1", says="the scale stops falling")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        super().update()
        self._scale = max(self._scale, 1.0)


@mistake("09.1", says="the number of steps with torch.bfloat16 gradients")
class DynamicLossScaler(right.DynamicLossScaler):
    def step(self, optimizer):
        if any(grad.dtype == torch.bfloat16 for grad in grads_of(optimizer)):
            return False
        return super().step(optimizer)


@mistake("09.1", says="step() does not leave the gradients")
class DynamicLossScaler(right.DynamicLossScaler):
    def step(self, optimizer):
        made = super().step(optimizer)
        optimizer.zero_grad()
        return made


@mistake("09.1", says="a clean step counts once for each optimizer")
class DynamicLossScaler(right.DynamicLossScaler):
    def update(self):
        if not any(self._overflowed.values()):
            self._clean_steps += max(0, len(self._overflowed) - 1)
        super().update()


@mistake("09.1", says="divided by another scale than they were multiplied")
class DynamicLossScaler(right.DynamicLossScaler):
    backed_off = False

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if self._overflowed[optimizer] and not self.backed_off:
            self._scale *= self._backoff_factor
            self.backed_off = True

    def update(self):
        if self.backed_off:
            self._scale /= self._backoff_factor
        super().update()
        self.backed_off = False


@mistake("09.1", says="state_dict() at the beginning")
class DynamicLossScaler(right.DynamicLossScaler):
    def __init__(self, *args, growth_interval=None, **options):
        super().__init__(*args, growth_interval=growth_interval or 1000, **options)


@mistake("09.1", says="load_state_dict() changes the dict that it is given")
class DynamicLossScaler(right.DynamicLossScaler):
    def load_state_dict(self, state_dict):
        self._scale = state_dict.pop("scale")
        super().load_state_dict({"scale": self._scale, **state_dict})


@mistake("09.1", says="it is no copy")
class DynamicLossScaler(right.DynamicLossScaler):
    def state_dict(self):
        self.kept = super().state_dict()
        return self.kept

    def update(self):
        super().update()
        if hasattr(self, "kept"):
            self.kept.update(super().state_dict())


@mistake("09.1", says="the dtype of a scaled float64 loss")
class DynamicLossScaler(right.DynamicLossScaler):
    def scale(self, loss):
        return loss.float() * self._scale


@mistake("09.1", says="backoff_factor 0.0 is accepted")
class DynamicLossScaler(right.DynamicLossScaler):
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, **options):
        super().__init__(init_scale, growth_factor, backoff_factor or 0.5, **options)


# 09.2 MasterWeightAdamW


@mistake("09.2", says="the weights stop moving")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        if "master" in self.state[parameter]:
            self.state[parameter]["master"] = parameter.detach().float()
        super()._update(parameter, group)


@mistake("09.2", says="the parameter is no bf16 any more")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        parameter.data = self.state[parameter].get("master", parameter).clone()


@mistake("09.2", says="torch's AdamW does the work")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        before = parameter.detach().float()
        super()._update(parameter, group)
        master = self.state[parameter].get("master", parameter)
        if self.state[parameter]["step"] == 1:
            inner = torch.nn.Parameter(before.clone())
            inner.grad = parameter.grad.float()
            settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            torch.optim.AdamW([inner], **settings).step()
            master.copy_(inner)


@mistake("09.2", says="m and v are kept in 16 bits")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter.dtype)

    def step(self, closure=None):
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].float()
        return super().step(closure)


@mistake("09.2", says="a float32 parameter has a master copy")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        self.state[parameter].setdefault("master", parameter.detach().clone())


@mistake("09.2", says="the gradients are changed by the step")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        parameter.grad.mul_(0.5)


@mistake("09.2", says="the parameters get new storage")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        parameter.data = parameter.data.clone()


@mistake("09.2", says="more is kept than the states")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        if "master" in self.state[parameter]:
            self.state[parameter]["master"].grad = parameter.grad.float()


@mistake("09.2", says="the states beside 'step'")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        self.state[parameter]["grad"] = parameter.grad.float()


class Variant(right.MasterWeightAdamW):
    """AdamW with a formula that is wrong in one way."""

    def settings(self, group):
        return group

    def before(self, parameter, group):
        pass

    def _update(self, parameter, group):
        grad = parameter.grad
        self.before(parameter, self.settings(group))
        super()._update(parameter, self.settings(group))
        parameter.grad = grad


@mistake("09.2", says="every group is given the first group's settings")
class MasterWeightAdamW(Variant):
    def settings(self, group):
        return self.param_groups[0]


@mistake("09.2", says="settings come from `defaults`")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, self.defaults)


@mistake("09.2", says="a group's lr is not read again")
class MasterWeightAdamW(Variant):
    def settings(self, group):
        return {**group, "lr": group.setdefault("initial", group["lr"])}

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["initial"] = self.param_groups[-1]["lr"]


@mistake("09.2", says="the weight decay is left out")
class MasterWeightAdamW(Variant):
    def settings(self, group):
        return {**group, "weight_decay": 0.0}


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


@mistake("09.2", says="Adam, not AdamW")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        written_out(self, parameter, group, coupled=True)


@mistake("09.2", says="the decay comes last, on the updated weight")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        written_out(self, parameter, group, late=True)


@mistake("09.2", says="the decay goes by the rounded parameter")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        rounded = parameter.detach().float()
        written_out(self, parameter, {**group, "weight_decay": 0.0})
        master = self.state[parameter].get("master", parameter)
        master -= group["lr"] * group["weight_decay"] * rounded
        parameter.copy_(master)


@mistake("09.2", says="the bias correction is missing")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        written_out(self, parameter, group, corrected=False)


@mistake("09.2", says="eps stands under the root")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        written_out(self, parameter, group, root=lambda v, eps: (v + eps).sqrt())


@mistake("09.2", says="the gradient is squared in 16 bits")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        written_out(self, parameter, group, square=lambda grad: (grad * grad).float())


@mistake("09.2", says="the parameter is not its master, rounded")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        if parameter.dtype == torch.bfloat16:  # the lower half of float32 is cut off
            bits = self.state[parameter]["master"].view(torch.int32) & -65536
            parameter.copy_(bits.view(torch.float32))


@mistake("09.2", says="m or v is rounded to 16 bits in every step")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        v = self.state[parameter]["exp_avg_sq"]
        v.copy_(v.half())


@mistake("09.2", says="one count of steps serves all parameters")
class MasterWeightAdamW(right.MasterWeightAdamW):
    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def _update(self, parameter, group):
        if self.state[parameter]:
            self.state[parameter]["step"] = self.count - 1
        super()._update(parameter, group)


@mistake("09.2", says="the states hold the graph of the step")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def _update(self, parameter, group):
        if not self.state[parameter] and parameter.dtype != torch.float32:
            super()._update(parameter, group)
            with torch.enable_grad():
                master = self.state[parameter]["master"]
                self.state[parameter]["master"] = master + 0 * parameter.float()
        else:
            super()._update(parameter, group)


@mistake("09.2", says="given other settings")
class MasterWeightAdamW(Variant):
    def settings(self, group):
        kept = {name: group[name] for name in ("betas", "eps", "weight_decay")}
        return {**group, **group.setdefault("first", kept)}


@mistake("09.2", says="gradients from before the closure")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def step(self, closure=None):
        pairs = [(p, p.grad) for group in self.param_groups for p in group["params"]]
        loss = None if closure is None else closure()
        for parameter, grad in pairs:
            parameter.grad = grad
        super().step()
        return loss


@mistake("09.2", says="a parameter without a gradient is decayed")
class MasterWeightAdamW(right.MasterWeightAdamW):
    @torch.no_grad()
    def step(self, closure=None):
        absent = [p for g in self.param_groups for p in g["params"] if p.grad is None]
        if closure is None:
            for parameter in absent:
                parameter.grad = torch.zeros_like(parameter)
        loss = super().step(closure)
        for parameter in absent:
            parameter.grad = None
        return loss


@mistake("09.2", says="the closure is not called")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def step(self, closure=None):
        return super().step()


@mistake("09.2", says="the closure is called with gradients switched off")
class MasterWeightAdamW(right.MasterWeightAdamW):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        super().step()
        return loss


@mistake("09.2", says="masters, m and v are in bf16")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)


@mistake("09.2", says="float32 again, but rounded")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)
        for state in self.state.values():
            state.update({k: v.float() for k, v in state.items() if k != "step"})


@mistake("09.2", says="after loading there is no state")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "state": {}})


@mistake("09.2", says="m, v or the number of steps is another")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = 0


@mistake("09.2", says="gradients are left switched off")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def step(self, closure=None):
        loss = super().step(closure)
        torch.set_grad_enabled(False)
        return loss


@mistake("09.2", says="of torch.float32 parameter 1")
class MasterWeightAdamW(Variant):
    def _update(self, parameter, group):
        if parameter.dtype == torch.float32:
            group = {**group, "eps": 10 * group["eps"]}
        super()._update(parameter, group)


@mistake("09.2", says="of torch.float16 parameter 1")
class MasterWeightAdamW(Variant):
    def _update(self, parameter, group):
        super()._update(parameter, group)
        if parameter.dtype == torch.float16:
            self.state[parameter]["exp_avg"].mul_(1.01)


@mistake("09.2", says="the settings where none is given")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=None, weight_decay=1e-2):
        super().__init__(params, lr, betas, 1e-6 if eps is None else eps, weight_decay)


@mistake("09.2", says="how often step(closure) calls the closure")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return super().step(closure)


@mistake("09.2", says="the groups' settings are not restored")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        kept = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, settings in zip(self.param_groups, kept, strict=True):
            group.update(settings)


@mistake("09.2", says="takes something out of the dict that it is given")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        state_dict["state"].clear()


@mistake("09.2", says="KeyError: 'master'")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in state_dict["state"].values():
            state["master"] = state["master"].float()


@mistake("09.2", says="of a parameter that had none")
class MasterWeightAdamW(right.MasterWeightAdamW):
    def load_state_dict(self, state_dict):
        before = dict(self.state)
        super().load_state_dict(state_dict)
        for parameter, state in before.items():
            self.state[parameter] = self.state[parameter] or state


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


def own_share(each, micro_batches):
    """Over this rank's tokens."""
    return each.num_tokens / sum(one.num_tokens for one in micro_batches)


@mistake("09.3", says="counts the same, whatever its number of tokens")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=lambda one, all: 1 / len(all))


@mistake("09.3", says="the micro-batches' means are added up")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=lambda one, all: 1.0)


@mistake("09.3", says="the sums over tokens are added up")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=lambda one, all: one.num_tokens)


@mistake("09.3", says="only the last micro-batch counts")
def accumulate(model, micro_batches, loss_of, scaler=None):
    def last(one, all):
        model.zero_grad()
        return own_share(one, all)

    return weighed_by(model, micro_batches, loss_of, scaler, weight=last)


@mistake("09.3", says="it asks for a process group where there is none")
def accumulate(model, micro_batches, loss_of, scaler=None):
    dist.get_world_size()


@mistake("09.3", says="still holds the graphs of the step")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return right.accumulate(model, micro_batches, loss_of, scaler).requires_grad_()


@mistake("09.3", says="one backward for all")
def accumulate(model, micro_batches, loss_of, scaler=None):
    if not micro_batches:
        raise ValueError("got 0")
    loss = sum(loss_of(model, one) * share(one, micro_batches) for one in micro_batches)
    whole = loss * current_world_size()
    (whole if scaler is None else scaler.scale(whole)).backward()
    return loss.detach()


@mistake("09.3", says="goes through the model more than once")
def accumulate(model, micro_batches, loss_of, scaler=None):
    loss = right.accumulate(model, micro_batches, loss_of, scaler)
    for one in micro_batches:
        loss_of(model, one).backward(torch.tensor(0.0, dtype=torch.float64))
    return loss


@mistake("09.3", says="what .grad held before is thrown away")
def accumulate(model, micro_batches, loss_of, scaler=None):
    model.zero_grad()
    return right.accumulate(model, micro_batches, loss_of, scaler)


@mistake("09.3", says="the scaler is not used")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return right.accumulate(model, micro_batches, loss_of)


TOTALS = weakref.WeakKeyDictionary()


@mistake("09.3", says="only the last micro-batch's loss goes through the scaler")
def accumulate(model, micro_batches, loss_of, scaler=None):
    class AtLast:
        number = 0

        def scale(self, loss):
            self.number += 1
            last = self.number == len(micro_batches)
            return scaler.scale(loss) if last and scaler is not None else loss

    return weighed_by(model, micro_batches, loss_of, AtLast(), weight=share)


@mistake("09.3", says="the first step's number of tokens serves all")
def accumulate(model, micro_batches, loss_of, scaler=None):
    def first_share(each, all):
        own = share(each, all)
        return each.num_tokens / TOTALS.setdefault(model, each.num_tokens / own)

    return weighed_by(model, micro_batches, loss_of, scaler, weight=first_share)


@mistake("09.3", says="the loss that is returned is the scaled one")
def accumulate(model, micro_batches, loss_of, scaler=None):
    loss = right.accumulate(model, micro_batches, loss_of, scaler)
    return loss if scaler is None else scaler.scale(loss)


@mistake("09.3", says="an empty list is accepted")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return right.accumulate(model, micro_batches, loss_of, scaler) if micro_batches else 0.0


@mistake("09.3", says="DDP divides by the number of ranks, and nothing makes up for it")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=share, ranks=False)


@mistake("09.3", says="the mean of the ranks' means")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=own_share, ranks=False)


@mistake("09.3", says="the ranks' means are added up")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=own_share)


@mistake("09.3", says="the gradients travel with every micro-batch")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=share, every=True)


@mistake("09.3", says="worked out in the loss's fp16")
def accumulate(model, micro_batches, loss_of, scaler=None):
    totals = []

    def losses(model, each):
        totals.append(each.num_tokens / share(each, micro_batches))
        loss = loss_of(model, each)
        return loss * torch.tensor(each.num_tokens).to(loss) / torch.tensor(totals[-1]).to(loss)

    return weighed_by(model, micro_batches, losses, scaler, weight=lambda one, all: 1.0)


@mistake("09.3", says="what is returned is multiplied by the ranks")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return current_world_size() * right.accumulate(model, micro_batches, loss_of, scaler)


@mistake("09.3", says="the ranks do not send the same messages")
def accumulate(model, micro_batches, loss_of, scaler=None):
    every = len(micro_batches) > 2
    return weighed_by(model, micro_batches, loss_of, scaler, weight=share, every=every)


@mistake("09.3", says="gradients travel parameter by parameter")
def accumulate(model, micro_batches, loss_of, scaler=None):
    if current_world_size() == 1:
        return right.accumulate(model, micro_batches, loss_of, scaler)
    total = torch.tensor(sum(each.num_tokens for each in micro_batches))
    dist.all_reduce(total)
    before = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = []
    with model.no_sync():
        for each in micro_batches:
            part = loss_of(model, each) * (each.num_tokens / total.item())
            (part if scaler is None else scaler.scale(part)).backward()
            parts.append(part.detach())
    for parameter, old in zip(model.parameters(), before, strict=True):
        dist.all_reduce(parameter.grad)
        parameter.grad += 0 if old is None else old
    return torch.stack(parts).sum()


@mistake("09.3", says="DDP has done it already")
def accumulate(model, micro_batches, loss_of, scaler=None):
    result = right.accumulate(model, micro_batches, loss_of, scaler)
    for parameter in model.parameters() if current_world_size() > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= current_world_size()
    return result


@mistake("09.3", says="the loss is added up over the ranks")
def accumulate(model, micro_batches, loss_of, scaler=None):
    result = right.accumulate(model, micro_batches, loss_of, scaler)
    if current_world_size() > 1:
        dist.all_reduce(result)
    return result


@mistake("09.3", says="the share of the tokens is rounded to bf16")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(
        model,
        micro_batches,
        loss_of,
        scaler,
        weight=lambda each, every: torch.tensor(share(each, every)).bfloat16().item(),
    )


@mistake("09.3", says="numbers of tokens travel one by one")
def accumulate(model, micro_batches, loss_of, scaler=None):
    if current_world_size() > 1:
        for each in micro_batches:
            dist.all_reduce(torch.tensor(each.num_tokens))
            if len(micro_batches) == 3:
                break
    return right.accumulate(model, micro_batches, loss_of, scaler)


@mistake("09.3", says="the last micro-batch is not sent")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=share, quiet="last")


@mistake("09.3", says="training or evaluation mode is not left as it was")
def accumulate(model, micro_batches, loss_of, scaler=None):
    model.train()
    return right.accumulate(model, micro_batches, loss_of, scaler)


@mistake("09.3", says="backward keeps the graph")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=share, retain=True)


@mistake("09.3", says="what .grad held before is divided, too")
def accumulate(model, micro_batches, loss_of, scaler=None):
    loss = weighed_by(
        model, micro_batches, loss_of, scaler, weight=lambda one, all: one.num_tokens, ranks=False
    )
    for one in micro_batches[:1]:
        tokens = one.num_tokens / share(one, micro_batches)
    for parameter in model.parameters():
        parameter.grad *= current_world_size() / tokens
    return loss / tokens


@mistake("09.3", says="what .grad held before is multiplied by the ranks")
def accumulate(model, micro_batches, loss_of, scaler=None):
    loss = weighed_by(model, micro_batches, loss_of, scaler, weight=share, ranks=False)
    for parameter in model.parameters():
        parameter.grad *= current_world_size()
    return loss


@mistake("09.3", says="left without exchange")
def accumulate(model, micro_batches, loss_of, scaler=None):
    if current_world_size() > 1:
        model.require_backward_grad_sync = True
    loss = right.accumulate(model, micro_batches, loss_of, scaler)
    if current_world_size() > 1:
        model.require_backward_grad_sync = False
    return loss


@mistake("09.3", says="an fp16 loss is weighted in fp16")
def accumulate(model, micro_batches, loss_of, scaler=None):
    return weighed_by(model, micro_batches, loss_of, scaler, weight=share, half=True)
