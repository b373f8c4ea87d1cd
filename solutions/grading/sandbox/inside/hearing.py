"""What python itself says that an answer does: evaluate a text, read frames, unpickle what can run.

An audit reads a cell, and a text can be put together where none looks: an annotation that
`singledispatch` evaluates, a pickle in bytes. Python tells a hook of each, by whatever name it was
reached (PEP 578). What was heard goes at once through a socket whose other end the judge holds: an
answer that writes its own verdict does not take it back, and one that closes the socket is heard.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import is_dataclass
from dis import get_instructions
from functools import reduce
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

SAID = (
    "evaluates a text that calls something",
    "reads the frames of its callers",
    "lists the objects of its process",
    "unpickles what can run anything",
    "unpickles a part of the course",
)
TEXT, FRAMES, OBJECTS, PICKLE, PART = range(len(SAID))
ALL = len(SAID)  # said last, when the exercise has been judged
OBJECT_LISTS = ("gc.get_objects", "gc.get_referrers", "gc.get_referents")
FRAME_LISTS = ("sys._getframe", "sys._current_frames", "sys.setprofile", "sys.settrace")
STARTS = ("_start_new_thread", "_start_joinable_thread")  # of threading, by version
FRAME_HOLDERS = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
# Python's own, which runs texts that it writes itself; so may what is installed, but for these two,
# which run what they are given.
WRITERS = ("/dataclasses.py", "/collections/__init__.py", "/numpy/f2py/auxfuncs.py")
INSTALLED, READERS = ("/site-packages/", "/dist-packages/"), ("/jaxtyping/", "/numpy/")
CALLING = ("CALL", "IMPORT_NAME")  # CALL_FUNCTION_EX is one of them
PASSING = ("/inspect.py", "/string.py")  # of python, and ask for a frame in a caller's name
# So do these, but by functions of their own, too, when an error is printed or a line logged.
ONE_FURTHER = ("/traceback.py", "/logging/__init__.py")
JUDGE = str(Path(__file__).parent)


class Hearing:
    """What has been heard of the exercise at hand.

    No answer needs the names in `frames`, nor to unpickle those in `unneeded`.
    """

    def __init__(self, course: str, frames: Collection[str], unneeded: Collection[str]) -> None:
        self.trusted = (f"{course}/", f"{JUDGE}/", "<frozen importlib")
        self.frames, self.unneeded = frozenset(frames), frozenset(unneeded)
        self.ours = set[int]()  # threads that the course has begun

    def open(self) -> None:
        """Before a fork: the way from what is heard in the child to its parent."""
        self.ear, self.mouth = socket.socketpair()

    def begin(self) -> None:
        """From now on, in this process and those that it forks: a hook cannot be taken off."""
        self.ear.close()
        for name in STARTS:
            if start := getattr(threading, name, None):  # 3.11 tells no hook of it
                setattr(threading, name, self._noting(start))
        sys.addaudithook(self._hook(self.mouth.send))

    def end(self) -> None:
        """In the child: nothing has closed the way before."""
        with contextlib.suppress(OSError):
            self.mouth.send(bytes([ALL]))

    def flags(self) -> list[str]:
        """What was heard, in words."""
        self.mouth.close()
        heard = set[int]()
        with contextlib.suppress(OSError), self.ear:
            while data := self.ear.recv(1 << 16, socket.MSG_DONTWAIT):
                heard |= set(data)
        flags = [says for kind, says in enumerate(SAID) if kind in heard]
        return flags if ALL in heard else ["closes what Python tells by", *flags]

    def _hook(self, send: Callable[[bytes, int], int]) -> Callable[[str, tuple[Any, ...]], None]:
        looks = dict[str, Callable[..., int | None]]()
        looks |= dict.fromkeys(("exec", "function.__new__"), self._run)
        looks |= dict.fromkeys(FRAME_LISTS, self._frame)
        looks |= dict.fromkeys(OBJECT_LISTS, self._objects)
        looks |= {"object.__getattr__": self._attribute, "pickle.find_class": self._unpickle}
        busy, told = set[int](), set[int]()

        def hook(event: str, args: tuple[Any, ...]) -> None:
            look, thread = looks.get(event), get_ident()
            if look is None or thread in busy:  # what a look does is heard, too
                return
            busy.add(thread)
            try:
                kind = look(sys._getframe(1), *args)
                if kind is not None and kind not in told:
                    told.add(kind)
                    with contextlib.suppress(OSError):  # full of what others have told, or closed
                        send(bytes([kind]), socket.MSG_DONTWAIT)
            finally:
                busy.discard(thread)

        return hook

    def _run(self, caller: FrameType, code: Any, *_: Any) -> int | None:
        file = caller.f_code.co_filename
        if file.startswith(self.trusted):
            return None
        written = any(each in file for each in INSTALLED)
        written &= not any(each in file for each in READERS)
        written |= file.endswith(WRITERS)
        for each in _all_of(code):
            names = {*each.co_names, *each.co_varnames}
            steps = () if written else get_instructions(each)
            if names & self.frames or any(step.opname.startswith(CALLING) for step in steps):
                return TEXT
        return None

    def _frame(self, caller: FrameType, *_: Any) -> int | None:
        # A new thread sets what some code has given to threading.settrace() or setprofile().
        by_threading = caller.f_code.co_filename.endswith("/threading.py")
        return FRAMES if by_threading or _is_an_answers(caller) else None

    def _attribute(self, caller: FrameType, _: Any, name: str) -> int | None:
        return self._frame(caller) if name in FRAME_HOLDERS else None

    def _objects(self, caller: FrameType, *_: Any) -> int | None:
        return OBJECTS if _is_an_answers(caller) else None

    def _noting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Start a thread, and note whether it is the course's."""

        def noting(run: Any, *args: Any, **kwargs: Any) -> Any:
            thread = id(getattr(run, "__self__", run))
            (self.ours.discard if self._by_an_answer(sys._getframe(1)) else self.ours.add)(thread)
            return start(run, *args, **kwargs)

        return noting

    def _unpickle(self, caller: FrameType, module: str, name: str) -> int | None:
        root = module.split(".")[0]
        if (name if root == "builtins" else root) in self.unneeded:
            return PICKLE
        part = root in ("lessons", "shared") and not _is_sent(root, module, name)
        return PART if part and self._by_an_answer(caller) else None

    def _by_an_answer(self, frame: FrameType | None) -> bool:
        """Whether a cell is nearer than the course, on the way to here or to this thread's start.

        A thread that no Thread stands for is an answer's, too.
        """
        while frame is not None and not frame.f_code.co_filename.startswith(self.trusted):
            if _is_an_answers(frame):
                return True
            frame = frame.f_back
        return frame is None and id(threading.current_thread()) not in self.ours


def _is_sent(root: str, module: str, name: str) -> bool:
    """Whether ranks send each other objects of this class: shared's, a laboratory's that hold data.

    Functions stay, and what checks are made of.
    """
    steps = name.split(".")
    found = reduce(lambda at, step: getattr(at, step, None), steps, sys.modules.get(module))
    if not isinstance(found, type) or root == "shared":
        return isinstance(found, type)
    holds_data = is_dataclass(found) or issubclass(found, tuple | BaseException)
    return holds_data and "laboratory" in module.split(".")


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
    if frame is not None and frame.f_code.co_filename.endswith(ONE_FURTHER):
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    return file.startswith(("<cell ", "<string>")) and not file.startswith("<cell setup>")
