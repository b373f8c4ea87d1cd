"""How a check compares: tolerances, differences in words, and types that may be compared."""

import math
import sys
from typing import Any

import torch
from torch import Tensor

# (rtol, atol): loose enough for a different order of additions, tight enough to see a wrong formula
# and, in float64, a single rounding to float32 (6e-8 of the value).
TOLERANCES = {
    torch.float64: (1e-11, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
}

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what the language's own static types have not


def close(
    got: Tensor, want: Tensor, atol: float | None, rtol: float | None, *, scale: float = 1.0
) -> bool:
    """Equal within `scale` times the tolerance of the wanted dtype, NaN equal to NaN."""
    base_rtol, base_atol = TOLERANCES.get(want.dtype, (0.0, 0.0))
    rtol = base_rtol if rtol is None else rtol
    atol = base_atol if atol is None else atol
    return torch.allclose(
        got.to(want.dtype), want, rtol=scale * rtol, atol=scale * atol, equal_nan=True
    )


def same_values(before: Tensor, now: Tensor) -> bool:
    """Equal bit for bit as far as == can see, NaN equal to NaN: for copies of one tensor."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    unequal = before != now
    return not bool((unequal & ~((before != before) & (now != now))).any())


def difference(got: Tensor, want: Tensor, what: str) -> dict[str, str]:
    """What was expected and what was seen: the shape, the dtype, or the worst place."""
    if got.shape != want.shape:
        return {
            "expected": f"{what} of shape {tuple(want.shape)}",
            "seen": f"shape {tuple(got.shape)}",
        }
    if got.dtype != want.dtype:
        return {"expected": f"{what} in {want.dtype}", "seen": f"{got.dtype}"}
    bad = (~torch.isfinite(got.double())) & torch.isfinite(want.double())
    if bad.any():
        return {
            "expected": f"{what} with finite values",
            "seen": f"{int(bad.sum())} of {got.numel()} are NaN or infinite",
        }
    error = (got.double() - want.double()).abs().nan_to_num(nan=math.inf)
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    wanted, found = _distinct_digits(want[place].item(), got[place].item())
    if not place:  # a number has no places
        return {"expected": f"{what} is {wanted}", "seen": found}
    return {
        "expected": f"{what}; at {list(place)} it is {wanted}",
        "seen": f"{found} there; {_share(got, want)} of the values differ",
    }


def _distinct_digits(want: float, got: float) -> tuple[str, str]:
    """Both values with four digits, or with as many as it takes to see that they differ.

    A fifth digit may change from run to run: the order in which a sum is taken depends on where
    its numbers lie in memory.
    """
    if isinstance(want, int):
        return str(want), str(got)
    texts = [(f"{want:.{digits}g}", f"{got:.{digits}g}") for digits in (4, 6, 9, 17)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def _share(got: Tensor, want: Tensor) -> str:
    rtol, atol = TOLERANCES.get(want.dtype, (0.0, 0.0))
    apart = ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    return f"{100 * apart.double().mean().item():.0f} %"


def custom_eq_type(got: Any, want: Any) -> type | None:
    """The type in `got` that brings an == of its own, which would not say whether it is right.

    Types of the language, of torch and of numpy are trusted, and so is the type that is wanted.
    """
    kind = type(got)
    if isinstance(got, list | tuple | set | frozenset):
        wanted = list(want) if isinstance(want, list | tuple) else []
        wanted += [None] * (len(got) - len(wanted))
        for inner, other in zip(got, wanted, strict=False):
            if found := custom_eq_type(inner, other):
                return found
    if isinstance(got, dict):
        for key, value in got.items():
            other = want.get(key) if isinstance(want, dict) else None
            if found := custom_eq_type(key, key) or custom_eq_type(value, other):
                return found
    trusted = str(kind.__module__).split(".")[0] in ("builtins", "torch", "numpy", "collections")
    trusted = trusted and (not kind.__flags__ & HEAP_TYPE or _is_where_it_says(kind))
    plain = kind.__eq__ is object.__eq__ and kind.__ne__ is object.__ne__
    return None if trusted or plain or kind is type(want) else kind


def _is_where_it_says(kind: type) -> bool:
    """Whether its module has it: a class can be given any name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is kind
