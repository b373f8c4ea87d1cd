"""What an answer must leave as it was: its arguments, and the switches that all code shares."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shared.exercises.comparing import same_values
from shared.exercises.seeds import seed_was_set_by_answer
from shared.exercises.wrong import Wrong

T = TypeVar("T")


@contextlib.contextmanager
def preserve_global_state(*, seeding: bool = False) -> Generator[Callable[[], Wrong | None]]:
    """Put gradient mode, default dtype and number of threads back afterwards.

    Yields a function that says, as a `Wrong`, which of them, or the global seed, is not what it
    was; None if all are. With `seeding` the block may set the global seed.
    """
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    threads, seed = torch.get_num_threads(), torch.initial_seed()
    try:
        yield lambda: _changed_switch(
            grad, dtype, threads, torch.initial_seed() if seeding else seed
        )
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def call_guarded(act: Callable[..., T], *args: Any) -> T:
    """Call it on a rank, where it may set the global seed; return what it returns.

    Raises `Wrong` for a switch that it leaves changed.
    """
    with preserve_global_state(seeding=True) as changed:
        result = act(*args)
        if (wrong := changed()) is not None:
            raise wrong
    return result


def _changed_switch(grad: bool, dtype: torch.dtype, threads: int, seed: int) -> Wrong | None:
    """Return what is not as it was, as a fault."""
    if torch.is_grad_enabled() != grad:
        return Wrong(
            "gradients are left switched off: everything that runs later records none",
            expected=f"torch.is_grad_enabled() is {grad} afterwards, as before",
            seen=f"{torch.is_grad_enabled()}",
            hint="`with torch.no_grad():` or the decorator @torch.no_grad() switch back by "
            "themselves; torch.set_grad_enabled(False) does not",
        )
    if torch.get_default_dtype() != dtype:
        return Wrong(
            "the default dtype is left changed, for all code that runs later",
            expected=f"{dtype}, as before",
            seen=f"{torch.get_default_dtype()}",
            hint="give the dtype to the functions that make tensors",
        )
    if torch.get_num_threads() != threads:
        return Wrong(
            "torch's number of threads is left changed, for all code that runs later",
            expected=f"{threads}, as before",
            seen=f"{torch.get_num_threads()}",
        )
    if seed_was_set_by_answer(seed):
        return Wrong(
            "the global seed is set: whoever calls this draws the same numbers every time",
            expected="torch's global generator on the seed of the caller",
            seen="torch.manual_seed(...) was called",
            hint="a torch.Generator of its own leaves the global one alone",
        )
    return None


def guarding_arguments(answer: Any) -> Any:
    """The answer, which now raises `Wrong` when it has changed an argument.

    A function, or the `forward` and `__call__` of a class. Tensors and containers of them are
    looked at, by value, and modules, engines and files are not.
    """
    if not inspect.isclass(answer):
        return _guarded(answer) if inspect.isfunction(answer) else answer
    methods = {name: getattr(answer, name, None) for name in ("forward", "__call__")}
    own = {n: _guarded(m) for n, m in methods.items() if inspect.isfunction(m) and is_own(m)}
    if not own:
        return answer
    names = {"__module__": answer.__module__, "__qualname__": answer.__qualname__}
    return type(answer.__name__, (answer,), {**own, **names, "__doc__": answer.__doc__})


def is_own(method: Callable[..., Any]) -> bool:
    """Whether a method is the answer's and not inherited from torch."""
    return not method.__module__.startswith("torch.")


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            given: Mapping[str, Any] = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself says better what does not fit
            given = {}
        before = {name: _copied(value) for name, value in given.items()}
        result = function(*args, **kwargs)
        for name, value in given.items():
            if not _unchanged(before[name], value):
                raise Wrong(
                    f"{name} was changed in place: it is the caller's own, and is used again "
                    "(in the next epoch, say)",
                    expected=f"{name} as it was before the call",
                    seen="other values afterwards",
                    hint="methods that end in _, +=, indexed assignment, .append and .sort write "
                    "into what they are given: make a new object",
                )
        return result

    return guarded


def _copied(value: Any) -> Any:
    """Copies of tensors and of plain containers; everything else by reference."""
    if type(value) is Tensor:
        with _disable_current_modes(), torch.no_grad():
            return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(part) for part in value)
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return value


def _unchanged(before: Any, now: Any) -> bool:
    if type(before) is Tensor:
        with _disable_current_modes(), torch.no_grad():
            return same_values(before, now.detach())
    if type(before) in (list, tuple):
        same_length = len(before) == len(now)
        return same_length and all(_unchanged(a, b) for a, b in zip(before, now, strict=True))
    if type(before) is dict:
        same_keys = list(before) == list(now)
        return same_keys and all(_unchanged(before[key], now[key]) for key in before)
    return before is now
