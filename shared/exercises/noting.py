"""What a check notes of an answer's calls to torch.distributed."""

import contextlib
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def _replaced(owner: type, name: str, replace: Callable[[Any], Any]) -> Generator[None]:
    """Put `replace(method)` in a method's place inside the block."""
    # What the class holds: the function that getattr() finds would not be bound to an instance.
    held = inspect.getattr_static(owner, name)
    setattr(owner, name, replace(getattr(owner, name)))
    try:
        yield
    finally:
        setattr(owner, name, held)


@contextlib.contextmanager
def noted_waits() -> Generator[list[int]]:
    """Note each wait() for a message, from Python, inside the block."""
    noted = list[int]()

    def noting(wait: Any) -> Any:
        def wait_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
            noted.append(1)
            return wait(self, *args, **kwargs)

        return wait_and_note

    with _replaced(dist.Work, "wait", noting):
        yield noted


@dataclass
class Handles:
    """The handles of the all-reduces that were started, and those on which anybody waited."""

    started: list[Any] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)

    def num_untouched(self) -> int:
        """Return how many handles nobody has waited for, nor asked for a future or the state."""
        return sum(id(handle) not in self.touched for handle in self.started)


@contextlib.contextmanager
def noted_handles() -> Generator[Handles]:
    """Note what all-reduces return, and what is waited for, from Python, inside the block.

    Whether a sum that was not waited for is there already is a race; whether anybody waited is not.
    """
    handles = Handles()

    def starting(all_reduce: Any) -> Any:
        def start_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
            handles.started.append(all_reduce(self, *args, **kwargs))
            return handles.started[-1]

        return start_and_note

    def touching(method: Any) -> Any:
        def touch(self: Any, *args: Any, **kwargs: Any) -> Any:
            handles.touched.add(id(self))  # `started` keeps it: no other handle has its id
            return method(self, *args, **kwargs)

        return touch

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(dist.ProcessGroup, "allreduce", starting))
        for name in ("wait", "get_future", "is_completed"):
            stack.enter_context(_replaced(dist.Work, name, touching))
        yield handles
