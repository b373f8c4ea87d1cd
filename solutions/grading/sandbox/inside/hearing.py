"""What python itself says that an answer does: evaluate a text, read frames, unpickle what can run.

An audit reads a cell, and a text can be put together where none looks: an annotation that
`singledispatch` evaluates, a pickle in bytes. Python tells a hook of each, by whatever name it was
reached (PEP 578). What was heard lies in memory that the parent made: an answer that writes its own
verdict does not take it back.
"""

import mmap
import sys
from collections.abc import Callable, Collection, Iterator
from dis import get_instructions
from types import CodeType, FrameType
from typing import Any

SAID = (
    "evaluates a text that calls something",
    "reads the frames of its callers",
    "lists the objects of its process",
    "unpickles what can run anything",
)
TEXT, FRAMES, OBJECTS, PICKLE = range(len(SAID))
OBJECT_LISTS = ("gc.get_objects", "gc.get_referrers", "gc.get_referents")
FRAME_HOLDERS = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
# Python's own, which runs texts that it writes itself; so may what is installed, but for these two,
# which run what they are given.
WRITERS = ("/dataclasses.py", "/collections/__init__.py")
INSTALLED, READERS = "/site-packages/", ("/jaxtyping/", "/numpy/")
CALLING = ("CALL", "IMPORT_NAME")  # CALL_FUNCTION_EX is one of them
PASSING = ("/inspect.py", "/string.py")  # of python, and ask for a frame in a caller's name


class Hearing:
    """What has been heard of the exercise at hand.

    No answer needs the names in `frames`, nor to unpickle those in `unneeded`.
    """

    def __init__(self, course: str, frames: Collection[str], unneeded: Collection[str]) -> None:
        self.course, self.frames, self.unneeded = f"{course}/", set(frames), set(unneeded)
        self.heard, self.busy = mmap.mmap(-1, mmap.PAGESIZE), False

    def begin(self) -> None:
        """From now on, in this process and those that it forks: a hook cannot be taken off."""
        self.heard[: len(SAID)] = bytes(len(SAID))
        sys.addaudithook(self._hook())

    def flags(self) -> list[str]:
        """What was heard, in words."""
        return [says for says, heard in zip(SAID, self.heard[: len(SAID)], strict=True) if heard]

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        looks = dict[str, Callable[..., None]]()
        looks |= dict.fromkeys(("exec", "function.__new__"), self._run)
        looks |= dict.fromkeys(("sys._getframe", "sys._current_frames"), self._frame)
        looks |= dict.fromkeys(OBJECT_LISTS, self._objects)
        looks |= {"object.__getattr__": self._attribute, "pickle.find_class": self._unpickle}

        def hook(event: str, args: tuple[Any, ...]) -> None:
            look = looks.get(event)
            if look is not None and not self.busy:  # what a look does is heard, too
                self.busy = True
                try:
                    look(sys._getframe(1), *args)
                finally:
                    self.busy = False

        return hook

    def _run(self, caller: FrameType, code: Any, *_: Any) -> None:
        file = caller.f_code.co_filename
        if file.startswith((self.course, "<frozen importlib")):
            return
        written = file.endswith(WRITERS)
        written |= INSTALLED in file and not any(each in file for each in READERS)
        for each in _all_of(code):
            names = {*each.co_names, *each.co_varnames}
            steps = () if written else get_instructions(each)
            if names & self.frames or any(step.opname.startswith(CALLING) for step in steps):
                self.heard[TEXT] = 1

    def _frame(self, caller: FrameType, *_: Any) -> None:
        if _is_an_answers(caller):
            self.heard[FRAMES] = 1

    def _attribute(self, caller: FrameType, _: Any, name: str) -> None:
        if name in FRAME_HOLDERS:
            self._frame(caller)

    def _objects(self, caller: FrameType, *_: Any) -> None:
        if _is_an_answers(caller):
            self.heard[OBJECTS] = 1

    def _unpickle(self, _: FrameType, module: str, name: str) -> None:
        root = module.split(".")[0]
        if (name if root == "builtins" else root) in self.unneeded:
            self.heard[PICKLE] = 1


def _all_of(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions and loops in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _all_of(each)


def _is_an_answers(frame: FrameType | None) -> bool:
    """Whether code of a cell asks, or of a text."""
    while frame is not None and frame.f_code.co_filename.endswith(PASSING):
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    return file.startswith(("<cell ", "<string>")) and not file.startswith("<cell setup>")
