"""Training in 16 bits: a loss scale that finds itself, AdamW with fp32 masters, bytes by kind."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.errors import InputError
from shared.ranks.group import current_world_size


class DynamicLossScaler:
    """Multiply the loss so that fp16 gradients do not vanish; back off when they overflow.

    The scales and steps of `torch.amp.GradScaler`, without its errors for a second step() or an
    update() that follows no step(): `scale(loss).backward()`, then if wanted
    `unscale_(optimizer)` to clip, then `step(optimizer)` and `update()`. On several ranks the
    ranks agree: one rank's overflow makes all skip.
    Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1):
            raise InputError(
                f"init_scale must be above 0, growth_factor above 1, backoff_factor between 0 and "
                f"1; got {init_scale}, {growth_factor} and {backoff_factor}"
            )
        if growth_interval < 1:
            raise InputError(f"growth_interval must be 1 step or more, got {growth_interval}")
        self._scale = float(init_scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._clean_steps = growth_interval, 0
        self._overflowed: dict[Optimizer, bool] = {}  # since the last update()

    def get_scale(self) -> float:
        """The factor that the next loss is multiplied by."""
        return self._scale

    def scale(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss times the scale, in float32: an fp16 loss would be infinite itself."""
        return loss.float() * self._scale if loss.dtype == torch.float16 else loss * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and look for inf and NaN.

        Raises RuntimeError a second time before update(), and ValueError for fp16 gradients:
        divided in fp16 they would vanish again.
        """
        if optimizer in self._overflowed:
            raise RuntimeError("unscale_() was already called for this optimizer in this step")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters if p.grad is not None]
        if any(grad.dtype == torch.float16 for grad in grads):
            raise InputError(
                "fp16 gradients cannot be unscaled, they would vanish again: copy them to float32"
            )
        if grads:
            torch._foreach_mul_(grads, 1.0 / self._scale)
        bad = torch.zeros(1, device=parameters[0].device)
        for grad in grads:
            bad += ~grad.isfinite().all()
        if current_world_size() > 1:  # also a rank without gradients takes part
            dist.all_reduce(bad)
        self._overflowed[optimizer] = bool(bad)

    def step(self, optimizer: Optimizer) -> bool:
        """Let the optimizer step unless a gradient of any rank is infinite or NaN; say if it did.

        Unscales first where that has not been done.
        """
        if optimizer not in self._overflowed:
            self.unscale_(optimizer)
        if not self._overflowed[optimizer]:
            optimizer.step()
        return not self._overflowed[optimizer]

    def update(self) -> None:
        """Back off after an overflow; grow after `growth_interval` steps in a row without one.

        The scale stays finite in float32: where growing would make it infinite, it stays.
        """
        if any(self._overflowed.values()):
            self._scale *= self._backoff_factor
            self._clean_steps = 0
        else:
            self._clean_steps += 1
            if self._clean_steps == self._growth_interval:
                grown = self._scale * self._growth_factor
                if grown <= torch.finfo(torch.float32).max:
                    self._scale = grown
                self._clean_steps = 0
        self._overflowed.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, under the keys of torch's own scaler."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._clean_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict(), of torch's scaler too."""
        self._scale = float(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._clean_steps = state_dict["_growth_tracker"]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class MasterWeightAdamW(Optimizer):
    """AdamW for 16-bit parameters: weights, m and v are kept in float32, and rounded at the end.

    The model holds the rounded copy. `state[p]` has "step", "exp_avg", "exp_avg_sq" and, for p of
    16 bits, "master"; what p of float64 has is float64. With 2 bytes of weight and 2 of gradient
    that is 16 a parameter.
    Source: Micikevicius et al. 2018, section 3.1; Loshchilov and Hutter 2019 (arXiv 1711.05101).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of AdamW on the masters; the parameters become the masters, rounded, in place.

        Gradients are left as they are. A parameter without one is left alone altogether.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "a parameter without a gradient is left alone"
        state, grad = self.state[parameter], _wide(parameter.grad)
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            if parameter.dtype != grad.dtype:
                state["master"] = _wide(parameter.detach())
        state["step"] += 1
        master = state.get("master", parameter)
        (beta1, beta2), lr = group["betas"], group["lr"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        master.mul_(1 - lr * group["weight_decay"])
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        # Both begin at zero, and are too small by these factors.
        m_correction, v_correction = (1 - beta ** state["step"] for beta in (beta1, beta2))
        root = (v.sqrt() / v_correction**0.5).add_(group["eps"])
        master.addcdiv_(m, root, value=-lr / m_correction)
        if master is not parameter:
            parameter.copy_(master)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict(), in float32.

        torch's own load_state_dict casts every state to the dtype of its parameter: masters, m
        and v would come back rounded to bf16, without a word.
        """
        super().load_state_dict(dict(state_dict))
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    value = value.detach().to(parameter.device, copy=True)
                self.state[parameter][key] = value


class MasterCopies:
    """fp32 copies of 16-bit parameters for any optimizer: masters, and *their* fp32 gradients.

    This is how torch's own AdamW and GradScaler train 16-bit weights: give them `masters`. Each
    gradient is copied to fp32 and its 16-bit form freed: 2 + 4 + 12 = 18 bytes a parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.rounded = list(parameters)
        self.masters = [nn.Parameter(_wide(p.detach()).clone()) for p in self.rounded]

    def take_gradients(self) -> None:
        """Call after backward: add the 16-bit gradients to the masters' own, and free them."""
        for rounded, master in zip(self.rounded, self.masters, strict=True):
            if rounded.grad is not None:
                grad = _wide(rounded.grad)
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                rounded.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Call after the optimizer's step: the model gets the masters, rounded, in place."""
        for rounded, master in zip(self.rounded, self.masters, strict=True):
            rounded.copy_(master)
