"""What an answer does besides being right: whose code works for it, and what it leaves changed.

Names can be hidden in more ways than an audit knows. So what must not do the work is made to say
when an answer calls it: functions keep their identity and get other code, which passes calls on;
torch's compiled functions are seen by a mode. Forked ranks and autograd's threads write to the
same shared memory. Only calls that come from a cell count, through torch alone: checks and
laboratories compare with the same functions.
"""

import contextlib
import inspect
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

ITSELF = "which is the exercise itself"
CELL, NOT_OF_STUDENTS = "<cell ", ("<cell setup>", "<cell of a known wrong answer")
# Of the course, between an answer and what it calls: instruments that record and pass on.
TRANSPARENT = ("shared/measuring/", "shared/exercises/", "judge.py", "watching.py")
# Autograd's threads, too, are dummies to python.
NOT_OF_ANSWERS = (type(threading.main_thread()), threading._DummyThread)
JUDGING = ("watching", "hearing", "__main__")
LONG = 8  # letters of a function's name that no other name has by chance
LOOKED_AT = (
    *("builtins", "math", "random", "inspect", "torch", "torch.nn", "torch.nn.functional"),
    *("torch._tensor", "torch.nn.modules.module", "torch.autograd", "torch.distributed"),
    *("torch.distributed.distributed_c10d", "torch.autograd.function", "torch.autograd.graph"),
)
CLASSES = ("Tensor", "Module", "Function", "Parameter")  # of torch, with their methods
GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_")]
GLOBAL_HOOKS.remove("_global_is_full_backward_hook")  # torch leaves it as the last hook set it
# What calls something else, by the type's name, and where it holds that.
HOLDERS = {"partial": "func", "vectorize": "pyfunc", "OptimizedModule": "_orig_mod"}


def _passing_on(*args: Any, **kwargs: Any) -> Any:
    return "THE PASS".call(*args, **kwargs)  # ty: ignore[missing-attribute]


class Pass:
    """In a function's place: notes who calls it, then calls it."""

    def __init__(self, function: FunctionType, watch: "Watch", number: int, cls: Any, ours: bool):
        self.watch, self.number, self.cls, self.ours = watch, number, cls, ours
        self.starts = function.__name__ == "__init__"
        self.original = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.original.__qualname__ = function.__qualname__
        signature, code = inspect.signature(function), _passing_on.__code__
        consts = tuple(self if each == "THE PASS" else each for each in code.co_consts)
        function.__code__ = code.replace(
            co_consts=consts,
            co_freevars=function.__code__.co_freevars,
            co_filename=function.__code__.co_filename,
            co_name=function.__name__,
        )
        vars(function)["__signature__"] = signature

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A method of an object that the answer was given is the giver's."""
        given = self.cls is not None and not self.starts and args and isinstance(args[0], self.cls)
        frame, ours = sys._getframe(2), self.ours
        if not given and self.watch.asked_by_answer(frame, through_ours=ours):
            self.watch.seen[self.number] = 1
        return self.original(*args, **kwargs)


class Watch(TorchFunctionMode):
    """Sees who calls what an exercise forbids, and the course's own answer to it (`own`)."""

    def __init__(self, forbidden: Sequence[str], own: str, course: str) -> None:
        super().__init__()
        self.course, self.says, self.banned = course, list[str](), dict[int, str]()
        self.seen = mmap.mmap(-1, 4096)
        self.names: dict[str, int] = {}  # of compiled functions
        for path in forbidden:
            for name, value in _meant_by(path):
                self._watch(value, f"uses {name}, {ITSELF}", plain=False)
            module, _, name = path.rpartition(".")
            if module in ("torch", "torch.nn.functional"):
                self.names[name.removesuffix("_attention")] = len(self.says)
                self.says.append(f"uses torch's {name}, {ITSELF}")
        for value in (torch.jit.RecursiveScriptModule.define, torch.jit.load):
            self._watch(value, "runs TorchScript that nobody has read", plain=False)
        for _, value in _meant_by(own) if own else ():
            self._watch(value, f"runs the course's own answer ({own})", plain=True)

    def _watch(self, value: Any, says: str, *, plain: bool) -> None:
        """Let a function, or a class's methods, be heard; what is bound to the class if `plain`."""
        function = inspect.unwrap(value)
        self.banned[id(function)] = says
        functions: list[Any] = [function]
        if isinstance(value, type):
            functions = list(vars(value).values())
            functions = functions if plain else [x for x in functions if type(x) is FunctionType]
        for each in functions:
            each = getattr(each, "__func__", each)
            # Python gives every Enum its own __new__: that is no part of the engine. What torch
            # defines is: it says of a class in torch.optim._muon that torch.optim is its module.
            its_own = _package(each) == _package(function)
            if isinstance(each, FunctionType) and its_own and len(self.says) < len(self.seen):
                cls = value if isinstance(value, type) else None
                Pass(each, self, len(self.says), cls, plain)  # the function has it
                self.says.append(says)

    def __enter__(self) -> "Watch":
        if self.names:
            super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.names:
            super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        called = getattr(func, "__name__", "")
        for name, number in self.names.items():
            same = name in called if len(name) > LONG else called.removesuffix("enate") == name
            if same and self.asked_by_answer(sys._getframe(1)):
                self.seen[number] = 1
        return func(*args, **(kwargs or {}))

    def asked_by_answer(self, frame: FrameType | None, *, through_ours: bool = False) -> bool:
        """Whether the innermost code that is neither torch's nor python's is a student's cell.

        Or a module of a student's has it in the place of its forward, where no cell's code runs.
        """
        by_module = frame is not None and frame.f_code.co_filename == torch_module.__file__
        if by_module and not through_ours and _written_in_a_cell(type(frame.f_locals.get("self"))):
            return True
        begun_by_ours = type(threading.current_thread()) in NOT_OF_ANSWERS
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(CELL):
                return not file.startswith(NOT_OF_STUDENTS)
            inside = file.removeprefix(f"{self.course}/")
            begun_by_ours = begun_by_ours or inside != file
            if inside != file and not (through_ours or inside.startswith(TRANSPARENT)):
                return False
            frame = frame.f_back
        return not begun_by_ours  # a thread of torch's or python's, by an answer's wish

    def flags(self, candidate: Any, faults: Iterable[Any]) -> list[str]:
        """What was seen, here and by the checks, and what the answer derives from."""
        found = [says for number, says in enumerate(self.says) if self.seen[number]]
        found += [f"uses {each.engine}, {ITSELF}" for each in faults if each.engine]
        answer = _unwrapped(candidate)
        for each in (answer, *_class_of(answer).__mro__):
            found.append(self.banned.get(id(each), ""))
        if not isinstance(answer, type) and not _runs_a_cell(answer):
            found.append(f"is a {type(answer).__name__} that no cell defines")
        return [each for each in dict.fromkeys(found) if each]


def prepare(watched: Iterable[str]) -> None:
    """Import what is to be watched, and change what the first torch.compile would change."""
    import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()
    for path in watched:
        if path.startswith(("torch.", "shared.")):
            with contextlib.suppress(ImportError):  # a prefix, or what this week's class has not
                import_module(path.rpartition(".")[0])


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _unwrapped(answer: Any) -> Any:
    """What an answer passes its calls on to."""
    while True:
        answer = inspect.unwrap(answer)
        if (name := HOLDERS.get(type(answer).__name__)) is None:
            return answer
        answer = getattr(answer, name)


def _class_of(answer: Any) -> type:
    """The class of an object, of a method's object, or itself."""
    owner = getattr(answer, "__self__", answer)
    return owner if isinstance(owner, type) else type(owner)


def _runs_a_cell(answer: Any) -> bool:
    """Whether a cell has written what runs when it is called, or the class that this is of."""
    if isinstance(answer, torch.nn.Module):
        answer = _unwrapped(answer.forward)
    elif not isinstance(answer, FunctionType) and not hasattr(answer, "__self__"):
        answer = _unwrapped(type(answer).__call__)
    return _is_of_a_cell(answer) or _written_in_a_cell(_class_of(answer))


def _written_in_a_cell(cls: type) -> bool:
    return any(map(_is_of_a_cell, vars(cls).values()))


def _is_of_a_cell(value: Any) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is not None and code.co_filename.startswith(CELL)


def _meant_by(path: str) -> Iterator[tuple[str, Any]]:
    """What a path means, or everything whose path begins with it, as far as it is imported."""
    module, _, begin = path.rpartition(".")
    home = sys.modules.get(module)
    for name, value in list(vars(home).items()) if home is not None else ():
        origin = str(getattr(value, "__module__", ""))
        if callable(value) and name.startswith(begin) and (begin or f"{origin}.".startswith(path)):
            yield f"{module}.{name}", value


def state() -> dict[str, tuple[Any, ...]]:
    """What no answer may change: functions of the course and of torch, modes and hooks."""
    found: dict[str, tuple[Any, ...]] = {
        "the profiler or tracer": (sys.getprofile(), sys.gettrace()),
        "the default dtype": (torch.get_default_dtype(),),
        "torch's modes": (torch._C._len_torch_function_stack(),),
        "the hooks of all modules": tuple(_size(vars(torch_module)[n]) for n in GLOBAL_HOOKS),
    }
    if comparing := sys.modules.get("shared.exercises.comparing"):
        found["the checks' tolerances"] = tuple(comparing.TOLERANCES.values())
    known: dict[tuple[int, bool], tuple[Any, ...]] = {}  # Tensor is in a hundred modules
    for home, module in list(sys.modules.items()):
        ours = home.startswith(("shared.", "lessons.")) or home in JUDGING
        if isinstance(module, ModuleType) and (ours or home in LOOKED_AT):
            for name, value in list(vars(module).items()):
                if callable(value) and name != "_":
                    if (key := (id(value), ours)) not in known:
                        known[key] = _essence(value, ours)
                    found[f"{home}.{name}"] = known[key]
    return found


def _size(hooks: Any) -> int:
    return len(hooks) if hasattr(hooks, "__len__") else int(bool(hooks))


def _essence(value: Any, ours: bool) -> tuple[Any, ...]:
    if isinstance(value, FunctionType):
        return value, value.__code__, value.__defaults__, value.__kwdefaults__
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
        return (value,)  # torch gives its class another step() when the first object is made
    if isinstance(value, type) and (ours or value.__name__ in CLASSES):
        return value, *(each for each in vars(value).values() if callable(each))
    return (value,)


def changed(before: Mapping[str, tuple[Any, ...]], now: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """What is not as it was, a few of it."""
    known = dict[tuple[int, int], bool]()
    found = list[str]()
    for name, old in before.items():
        new = now.get(name, ())
        if (key := (id(old), id(new))) not in known:
            known[key] = len(old) == len(new) and all(map(_same, old, new))
        if not known[key]:
            found.append(f"changes {name}")
    return found[:3]


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is int and old == new)
