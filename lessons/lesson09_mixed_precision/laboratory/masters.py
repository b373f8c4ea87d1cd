"""16-bit parameters beside float32 twins, AdamW by formula, a checkpoint loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, adam
from torch.utils._pytree import tree_leaves

from shared.exercises.nets import through_a_file
from shared.measuring.live import NEGLIGIBLE_BYTES

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
ADAMW = [(torch, "_fused_adamw_")] + [  # what is called where torch's own AdamW does the work
    (adam, name) for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam")
]
GROUPS = [
    {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 2.0},
    {"lr": 1e-2, "betas": (0.6, 0.9), "eps": 1e-2, "weight_decay": 0.0},
]
STATES = ("master", "exp_avg", "exp_avg_sq")


def grouped(make: Callable[..., Any], parameters: Sequence[nn.Parameter]) -> Any:
    """An optimizer with two groups of different settings, the second added afterwards."""
    optimizer = make([{"params": parameters[:1], **GROUPS[0]}])
    optimizer.add_param_group({"params": parameters[1:], **GROUPS[1]})
    return optimizer


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group."""
    return [{name: group[name] for name in GROUPS[0]} for group in optimizer.param_groups]


def dtypes_of(state: Mapping[str, Any]) -> dict[str, torch.dtype | None]:
    """The dtype of each state, None where there is none."""
    return {name: getattr(state.get(name), "dtype", None) for name in STATES}


def kept_bytes(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of the parameters, their gradients and their states; step counts are left out."""
    kept: list[Any] = [x for p in parameters for x in (p, p.grad, *optimizer.state[p].values())]
    sizes = [each.nbytes for each in kept if isinstance(each, Tensor)]
    return sum(size for size in sizes if size >= NEGLIGIBLE_BYTES)


def half_parameters(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """Three 16-bit parameters of odd sizes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((7,), (3, 5), (2, 3, 1))
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(parameters: Sequence[Tensor], steps: int, seed: int) -> list[list[Tensor | None]]:
    """Random gradients for each step, in the parameters' dtype: usual, large and very small ones.

    In the third and fourth step the first parameter has none; in the third the last one's are
    zero.
    """
    draw, sizes = torch.Generator().manual_seed(seed + 1), (0.3, 3.0, 2.0**-14)
    pairs = list(zip(parameters, sizes, strict=True))
    drawn: list[list[Tensor | None]] = [
        [(size * torch.randn(p.shape, generator=draw)).to(p.dtype) for p, size in pairs]
        for _ in range(steps)
    ]
    for step in drawn[2:4]:
        step[0] = None
    for third in drawn[2:3]:
        third[-1] = torch.zeros_like(parameters[-1])
    return drawn


def descend(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    grads: Sequence[Sequence[Tensor | None]],
    rates: Sequence[float],
) -> None:
    """One step for each list of gradients; the rate of the last group is changed before each."""
    for step, rate in zip(grads, rates, strict=True):
        optimizer.param_groups[-1]["lr"] = rate
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = None if grad is None else grad.to(parameter.dtype, copy=True)
        optimizer.step()


def adamw_by_formula(
    start: Tensor,
    grads: Sequence[Tensor | None],
    rates: Sequence[float],
    group: Mapping[str, Any],
    wrong: str = "",
) -> Tensor:
    """The master after the steps in float32; with `wrong`, of a formula that is wrong in one way.

    That is one of: coupled, late, whole or rounded decay; m, v or m and v uncorrected; inner or
    early eps; half square; one count.
    """
    (beta1, beta2), decay, eps = group["betas"], group["weight_decay"], group["eps"]
    w, m, v = start.float(), torch.zeros(start.shape), torch.zeros(start.shape)
    absent = 0
    for number, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        if grad is None:
            absent += 1
            continue
        t = number if wrong == "one count" else number - absent
        g = grad.float() + (decay * w if wrong == "coupled decay" else 0)
        decayed = w.to(start.dtype).float() if wrong == "rounded decay" else w
        if wrong not in ("coupled decay", "late decay"):
            w = w - (1.0 if wrong == "whole decay" else rate) * decay * decayed
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * ((grad * grad).float() if wrong == "half square" else g * g)
        plain = wrong.removesuffix(" uncorrected").split(" and ")
        a = 1.0 if "m" in plain else 1 - beta1**t
        b = 1.0 if "v" in plain else 1 - beta2**t
        root = (v / b).sqrt() + eps * (b**-0.5 if wrong == "early eps" else 1.0)
        root = (v / b + eps).sqrt() if wrong == "inner eps" else root
        w = w - rate * (m / a) / root
        w = w * (1 - rate * decay) if wrong == "late decay" else w
    return w


def squared_in_16_bits(grads: Sequence[Tensor | None], beta2: float) -> Tensor:
    """The second moment from squares that are rounded to the gradients' dtype."""
    v = torch.zeros(())
    for grad in grads:
        v = v if grad is None else beta2 * v + (1 - beta2) * (grad * grad).float()
    return v


def fits_16_bits(values: Tensor) -> bool:
    """Whether a 16-bit format holds each of these float32 numbers without rounding it."""
    return any(torch.equal(values, values.to(half).to(values.dtype)) for half in HALVES)


@dataclass
class Twins:
    """An answer's optimizer and torch's AdamW, on parameters in a dtype and on float32 twins."""

    starts: list[nn.Parameter]
    grads: list[list[Tensor | None]]
    ours: Any
    parameters: list[nn.Parameter]
    theirs: Optimizer
    twins: list[nn.Parameter]

    def descend(self, grads: Sequence[Sequence[Tensor | None]], rates: Sequence[float]) -> None:
        """Both go the same steps."""
        descend(self.ours, self.parameters, grads, rates)
        descend(self.theirs, self.twins, grads, rates)


def beside_adamw(make: Callable[..., Any], dtype: torch.dtype, seed: int, steps: int) -> Twins:
    """Both optimizers before their steps, from the same rounded weights, and the gradients."""
    starts, parameters = half_parameters(seed, dtype), half_parameters(seed, dtype)
    twins = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in starts]
    pair = grouped(make, parameters), parameters, grouped(torch.optim.AdamW, twins), twins
    return Twins(starts, gradients(parameters, steps, seed), *pair)


@dataclass
class Resumed:
    """A run that went on without interruption, and one that went on from its checkpoint."""

    taken_out: bool  # of the state_dict that was loaded
    wanted: list[dict[str, Any]]  # the groups' settings
    settings: list[dict[str, Any]]
    found: dict[str, torch.dtype | None]  # after loading, of the worse of the two bf16 parameters
    masters_equal: bool
    equal_later: bool


def resumed(make: Callable[..., Any], seed: int) -> Resumed:
    """Four steps, a checkpoint, three steps; two parameters are bf16, one is float32."""
    parameters = half_parameters(seed)[:2] + half_parameters(seed, torch.float32)[2:]
    grads, whole = gradients(parameters, 7, seed), grouped(make, parameters)
    descend(whole, parameters, grads[:4], [1e-2] * 4)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    fresh, saved = grouped(make, copies), through_a_file(whole.state_dict())
    fresh.param_groups[0].update(lr=0.5, weight_decay=0.9)
    size = len(tree_leaves(saved))
    fresh.load_state_dict(saved)
    taken_out = len(tree_leaves(saved)) < size
    settings, kinds = settings_of(fresh), [dtypes_of(fresh.state[p]) for p in copies[:2]]
    found = kinds[set(kinds[0].values()) == {torch.float32}]

    def equal() -> bool:
        masters = [
            [optimizer.state[p].get("master", p) for p in own]
            for optimizer, own in ((whole, parameters), (fresh, copies))
        ]
        return all(torch.equal(a, b) for a, b in zip(*masters, strict=True))

    masters_equal = equal()
    if set(found.values()) == {torch.float32}:
        for optimizer, own in ((whole, parameters), (fresh, copies)):
            descend(optimizer, own, grads[4:], [1e-2] * 3)
    return Resumed(taken_out, settings_of(whole), settings, found, masters_equal, equal())
