"""In the kernel: judges each exercise, notices what was changed, and signs what it says.

This file is copied into the graded course and loaded before the learner's first cell. It runs in
the learner's process, so a learner who works at it can get past it: the signature keeps a printed
or forged verdict from counting, the fingerprints and the canaries make the known ways fail or
show. The standard library, torch and the course are all it imports.
"""

import contextlib
import hashlib
import hmac
import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MIME = "application/vnd.torch-handle.verdict+json"
MAX_TEXT = 8000  # characters of one text in a verdict: a repr in it can be any size
# What the checks lean on. Values are compared one level deep: functions, classes and their methods.
WATCHED = _names(
    "builtins hashlib hmac inspect itertools json math os random sys time torch "
    "torch.autograd torch.autograd.functional torch.distributed torch.func torch.linalg "
    "torch.nn torch.nn.functional torch.nn.init torch.optim torch.random torch.testing "
    "torch.utils.flop_counter"
)
# Counters, caches and hooks that honest code moves.
MOVING = {"sys.stdout", "sys.stderr", "sys.last_type", "sys.last_value", "sys.last_traceback"}
MOVING |= {"sys.displayhook", "sys.excepthook", "sys.ps1", "sys.ps2", "sys.ps3"}


def _essence(value: Any) -> tuple[Any, ...]:
    """What makes a function that function: its identity, its code and its defaults."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    value = _without_dynamo(value)
    if isinstance(value, FunctionType):
        defaults = (value.__defaults__, value.__kwdefaults__)
        return (id(value), id(value.__code__), repr(defaults) if any(defaults) else "")
    return (id(value),)


def _without_dynamo(value: Any) -> Any:
    """torch wraps manual_seed when its compiler is first imported, which some functions do."""
    wrapper = getattr(sys.modules.get("torch._compile"), "_disable_dynamo", None)
    code = getattr(value, "__code__", None)
    if wrapper is None or code is None or code not in wrapper.__code__.co_consts:
        return value
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=False))
    return cells["fn"].cell_contents if "fn" in cells else value


def _members(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """A module's functions and classes, and the methods of the classes that belong to it."""
    root = name.split(".")[0]
    for key, value in list(vars(module).items()):
        label = f"{name}.{key}"
        if key.startswith("__") and key not in ("__import__", "__build_class__"):
            continue
        if issubclass(type(value), type):  # not isinstance: torch warns of old names when asked
            yield label, value
            if str(getattr(value, "__module__", "")).split(".")[0] == root:
                for inner, method in list(vars(value).items()):
                    if callable(method) or isinstance(
                        method, staticmethod | classmethod | property
                    ):
                        yield f"{label}.{inner}", method
        elif callable(value) or issubclass(type(value), ModuleType):
            yield label, value


@dataclass(frozen=True)
class Options:
    """The lesson, and limits in bytes. `alone`: it can send signals to its own processes only."""

    number: str
    home: str
    output: int
    folder_size: int
    num_files: int
    alone: bool


class Guard:
    """One per notebook; bound under a name that nobody knows in advance."""

    def __init__(
        self, key: bytes, namespace: dict[str, Any], options: Options, printed: Any
    ) -> None:
        self._key, self._namespace, self._options = key, namespace, options
        self._number, self._printed = options.number, printed
        printed.limit = options.output
        self._environment = dict(os.environ)
        self._prints: dict[str, tuple[Any, ...]] = {}
        self._kept: list[Any] = []  # keeps what was replaced alive, so that no id is used again
        self._modules: set[str] = set()
        self._settled: frozenset[str] = frozenset()  # what an answer imports later is not watched

    def settle(self) -> None:
        """Call after the setup cell: from now on everything must stay what it is."""
        self._notebook = importlib.import_module("shared.exercises.notebook")
        self._expecting = importlib.import_module("shared.exercises.expecting")
        self._running = importlib.import_module("shared.exercises.checks")
        self._stubs = importlib.import_module("shared.exercises.stubs")
        lessons = importlib.import_module("shared.exercises.lessons")
        self._checks = lessons.load_checks(self._number)
        self._torch = importlib.import_module("torch")
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        assert shell is not None, "a guard lives in a kernel"
        self._publish = shell.display_pub.publish
        answers = {each.name for each in self._checks.values()}
        setup = {k: v for k, v in self._namespace.items() if not k.startswith("_")}
        self._names = {k: v for k, v in setup.items() if k not in answers}
        self._torch.zeros(()).__reduce_ex__(4)  # the first save leaves a note in Tensor's class
        kinds: list[Any] = [self._torch.optim.Optimizer]
        for kind in kinds:  # the first optimizer of a kind wraps its class's step
            kind._patch_step_function(kind.__new__(kind))
            kinds += kind.__subclasses__()
        self._kept = [value for _, value in self._watched()]
        self._prints = {label: _essence(value) for label, value in self._watched()}
        self._modules = set(sys.modules)
        self._settled = frozenset(sys.modules)
        self._allowed = self._tolerances()

    def _tolerances(self) -> str:
        return repr(getattr(sys.modules.get("shared.exercises.comparing"), "TOLERANCES", None))

    def _exceeded(self) -> str:
        """The limit that was passed, as a value of the grader's `Stop`; "" for none."""
        if self._printed.count > self._printed.limit:
            return "output"
        used = files = 0
        for folder, _, names in os.walk(self._options.home):
            files += len(names) + 1
            for name in names:
                with contextlib.suppress(OSError):
                    used += os.lstat(os.path.join(folder, name)).st_blocks * 512
        over = used > self._options.folder_size or files > self._options.num_files
        return "folder" if over else ""

    def clear_up(self) -> bool:
        """End what an answer left running, and note what it imported; whether something ran."""
        self._modules |= set(sys.modules)
        if not self._options.alone:
            return False
        _collect_children(os.WNOHANG)  # whoever has ended is not running, though a signal finds it
        try:
            os.kill(-1, signal.SIGKILL)  # all in this process namespace, but its first and this
        except ProcessLookupError:
            return False
        _collect_children()
        return True

    def _watched(self) -> Iterator[tuple[str, Any]]:
        mine = sorted(name for name in sys.modules if name.split(".")[0] == "shared")
        for name in (*WATCHED, *mine, f"_checks_of_lesson_{self._number}"):
            module = sys.modules.get(name)
            if module is not None and (not self._prints or name in self._settled):
                yield name, module
                yield from (each for each in _members(name, module) if each[0] not in MOVING)
        tensor = self._torch.Tensor
        for key, value in list(vars(tensor).items()):
            yield f"torch.Tensor.{key}", value
        for base in tensor.__mro__[1:-1]:
            for key, value in list(vars(base).items()):
                yield f"torch.Tensor ({base.__name__}).{key}", value
        for id, each in self._checks.items():
            yield f"the checks of {id}", each
            yield f"the list of checks of {id}", each.checks
            for title, function in list(each.checks):
                yield f"the check {id} {title!r}", function

    def changes(self) -> list[str]:
        """What is not what it was; at most four, in the order of their names."""
        watched = list(self._watched())
        now = {label: _essence(value) for label, value in watched}
        # torch imports many of its parts at their first use.
        lazy = {label for label, value in watched if isinstance(value, ModuleType)}
        same = self._tolerances() == self._allowed
        seen = {} if same else {"the table of tolerances": "changed"}
        inside: list[str] = []
        for label in sorted(self._prints.keys() | now.keys()):
            if now.get(label) == self._prints.get(label) or label.startswith(tuple(inside)):
                continue  # a module that was replaced stands for what is in it
            inside.append(f"{label}.")
            if label in self._prints:
                seen[label] = "replaced" if label in now else "removed"
            elif label not in lazy:
                seen[label] = "added"
        return [f"{label} was {what}" for label, what in seen.items()][:4]

    def judge(self, id: str, name: str) -> None:
        """Run the checks of one exercise on what its cell defined; publish the signed verdict."""
        exceeded = self._exceeded()
        tampered = self.changes() or self._canaries()
        fresh = sorted(m for m in set(sys.modules) - self._modules if m.split(".")[0] == "shared")
        found: dict[str, Any] = {"kind": "tampered"}
        if not tampered and not exceeded:
            self._same_start()
            with contextlib.suppress(self._printed.too_much):
                found = self._judge(id, name)
            tampered = self.changes() or self._canaries()
            exceeded = self._exceeded()
            self._same_start()
        seen = {"tampered": tampered, "imported": fresh, "left": self.clear_up()}
        self._sign({**found, "exercise": id, "exceeded": exceeded, **seen})

    def _judge(self, id: str, name: str) -> dict[str, Any]:
        """What came of an exercise and, where it is wrong, what the first failed check said."""
        checks, state = self._checks[id], self._notebook.defined.get(id)
        count = {"passed": 0, "total": len(checks.checks)}
        if state is None or name not in self._namespace:
            return {"kind": "undefined", **count}
        if not state.solved or self._stubs.is_stub(state.own):
            return {"kind": "unsolved", "hint": checks.hints[0], **count}
        faults = [each for each in checks.faults(self._namespace[name]) if each is not None]
        count["passed"] = count["total"] - len(faults)
        if not faults:
            return {"kind": "right", **count}
        first, *others = faults
        return {
            "kind": "wrong",
            "title": first.title,
            "mistake": first.mistake,
            "expected": first.expected,
            "seen": first.seen,
            "hint": first.hint or checks.hints[0],
            "also": [each.title for each in others],
            **count,
        }

    def _same_start(self) -> None:
        """The same names, random numbers, folder and environment, whatever ran before."""
        self._namespace.update(self._names)
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._options.home)
        seed = int(os.environ["TORCH_HANDLE_SEED"])
        random.seed(seed)
        self._torch.manual_seed(seed)
        self._torch.set_default_dtype(self._torch.float32)
        self._torch.set_grad_enabled(True)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    def _canaries(self) -> list[str]:
        """Known-wrong values that the course's own comparisons must reject."""
        torch, expecting = self._torch, self._expecting
        zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        traps: dict[str, Callable[[], Any]] = {
            "wrong": lambda: expecting.wrong("a"),
            "recognise": lambda: expecting.recognise({"a": True}, expected="b", seen="c"),
            "expect": lambda: expecting.expect(False, expected="a", seen="b"),
            "expect_equal": lambda: expecting.expect_equal(1, 2, what="a number"),
            "expect_close": lambda: expecting.expect_close(zero, one[:1], what="a tensor"),
            "expect_raises": lambda: expecting.expect_raises(ValueError, int, what="a call"),
        }
        failed = ["close is true of 0 and 1"] if expecting.close(zero, one, None, None) else []
        for name, trap in traps.items():
            found = self._running.run_check(lambda candidate: candidate(), trap)
            if type(found) is not expecting.Wrong:
                failed.append(f"{name} accepts a value that is known to be wrong")
        return failed

    def _sign(self, record: dict[str, Any]) -> None:
        short = {k: v[:MAX_TEXT] if type(v) is str else v for k, v in record.items()}
        text = json.dumps(short, sort_keys=True)
        signature = hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
        self._publish(data={MIME: {"text": text, "signature": signature}}, metadata={})


def _collect_children(options: int = 0) -> None:
    """Wait for every child process, or (os.WNOHANG) for those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def start(namespace: dict[str, Any], *, key_file: str, **options: Any) -> Guard:
    """Read the key and remove its file, before anything of the learner's has run."""
    path = Path(key_file)
    key = bytes.fromhex(path.read_text())
    path.unlink()
    sys.modules.pop("guard", None)
    printed = importlib.import_module("printed").PRINTED  # beside this file, in the sandbox
    return Guard(key, namespace, Options(**options), printed)
