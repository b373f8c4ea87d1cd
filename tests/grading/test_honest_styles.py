"""Honest ways to write an answer pass the watch unflagged; a way around it does not."""

import textwrap
from types import SimpleNamespace

import pytest

from lessons.lesson05_collectives.checks import sends
from shared.exercises.wrong import Fault, Wrong
from shared.measuring.traffic import Call
from solutions.grading.results import Answers, Exercise, Lesson, Limits, Outcome
from solutions.grading.sandbox.run import Workspace
from tests.grading.toy_lesson import write_course

SETUP = """import torch
import torch.nn.functional as F
from torch import Tensor, nn
from shared.exercises.notebook import check, exercise
"""
CHECKS = """import torch
import lessons.lesson01_toy.laboratory
import shared.laboratory
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_close
from shared.exercises.properties import expect_by_hand

for n in range({count}):
    each = checks_for(f"01.{{n}}", name="double", difficulty=1, minutes=5, hint="x + x")

    @each.check("two numbers")
    def numbers(double):
        made = double() if isinstance(double, type) else double
        got = torch.as_tensor(made(torch.tensor([1.0, -1.0])))
        expect_close(got.float(), torch.tensor([2.0, -2.0]), what="the double")

    @each.check("by hand")
    def by_hand(double):
        made = double() if isinstance(double, type) else double
        expect_by_hand(lambda: made(torch.ones(2)), "hardswish", what="the double")

    globals()[f"e{{n}}"] = each
"""
LABORATORY = """from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple

def in_a_thread(target, *args):
    thread = Thread(target=target, args=args)
    thread.start()
    thread.join()

class Outer:
    @dataclass
    class Seen:
        number: int

class Pair(NamedTuple):
    number: int

class Stop(Exception):
    number = 2

class Oracle:
    number = 2
"""
# === name | what flags it, if anything does, and then the cell; own() makes it the answer.
CASES = """
=== a compiled function
@own
@torch.compile(backend="eager")
def double(x):
    return 2 * x
=== a compiled module
class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x
double = own(torch.compile(Doubling(), backend="eager"))
=== a function with an argument given
import functools
def times(number, also, x):
    return number * also * x
double = own(functools.partial(functools.partial(times, 2), 1))
=== an object that can be called
class Doubling:
    def __call__(self, x):
        return 2 * x
double = own(Doubling())
=== a method
class Doubling:
    def double(self, x):
        return 2 * x
double = own(Doubling().double)
=== a module
class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x
double = own(Doubling())
=== an autograd function
class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return 2 * x
double = own(Double.apply)
=== numpy's loop
import numpy as np
def one(x):
    return 2 * x
double = own(np.vectorize(one))
=== a hook on all modules, taken away
def double(x):
    nn.modules.module.register_module_full_backward_hook(lambda *_: None).remove()
    return 2 * x
own(double)
=== texts that python and jaxtyping evaluate
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import NamedTuple
from jaxtyping import Float
@dataclass(frozen=True)
class Factor:
    number: "int" = 2
    @singledispatchmethod
    def of(self, x):
        return self.number * x
    @of.register
    def _(self, x: "list | None"):
        return x
class Pair(NamedTuple):
    factor: "Factor"
    x: "Tensor"
def double(x):
    assert isinstance(torch.zeros(2, 4), Float[Tensor, "n 2*n"])
    pair = Pair(Factor(), x)
    return pair.factor.of(pair.x)
own(double)
=== what it saved itself
import collections, io
def double(x):
    file = io.BytesIO()
    torch.save({"x": x, "of": collections.OrderedDict(a=1), "as": {x.dtype, complex}}, file)
    file.seek(0)
    return 2 * torch.load(file, weights_only=False)["x"]
own(double)
=== a text in an annotation | evaluates a text that calls something
import functools
kept = []
@functools.singledispatch
def kind(x):
    return 2 * x
@kind.register
def _(x: "kept.append(__imp" + "ort__('math').sin) or int"):
    return x
double = own(lambda x: kind(x))
=== a text that reads a frame | reads the frames of its callers
double = own(eval("lambda x: (__imp" + "ort__('sys')._get" + "frame(1), 2 * x)[1]"))
=== a frame by a format | reads the frames of its callers
def double(x):
    try:
        raise KeyError
    except KeyError as error:
        "{0.__trace%s__.tb_%s}".__mod__(("back", "frame")).format(error)
    return 2 * x
own(double)
=== an error that is printed, and a warning in the log
import logging, traceback
from numpy import f2py
def double(x):
    try:
        raise KeyError
    except KeyError:
        traceback.print_exc()
        logging.warning("%s", traceback.format_exc())
    return 2 * x
own(double)
=== a frame by a walk up the stack | reads the frames of its callers
import traceback
def double(x):
    return 2 * x if list(traceback.walk_stack(None)) else x
own(double)
=== a frame by a walk down an error | reads the frames of its callers
import traceback
def double(x):
    try:
        raise KeyError
    except KeyError as error:
        return 2 * x if [*traceback.walk_tb(error.__traceback__)] else x
own(double)
=== a frame by the log's way | reads the frames of its callers
import logging
def double(x):
    return 2 * x if logging.currentframe() else x
own(double)
=== a frame by a profiler that is taken off again | reads the frames of its callers
import sys
def double(x):
    sys.setprofile(lambda *_: None)
    sys.setprofile(None)
    return 2 * x
own(double)
=== a frame by a tracer in a thread | reads the frames of its callers
import threading
def double(x):
    threading.settrace(lambda *_: None)
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    threading.settrace(None)
    return 2 * x
own(double)
=== what was heard, taken back | reads the frames of its callers
import sys
def double(x):
    frame = sys._getframe(0)
    while not hasattr(frame.f_locals.get("self"), "hearing"):
        frame = frame.f_back
    hearing = frame.f_locals["self"].hearing
    hearing.busy = True
    for value in vars(hearing).values():
        try:
            value[:8] = bytes(8)
        except TypeError:
            pass
    return 2 * x
own(double)
=== no more to be heard | closes what Python tells by
import os, stat
def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
_ = os.close(max(filter(is_socket, range(99))))
double = own(lambda x: 2 * x)
=== a pickle that runs a text | unpickles what can run anything
import io
def double(x):
    torch.load(io.BytesIO(b"cbuil" + b"tins\\nev" + b"al\\n(V2\\ntR."), weights_only=False)
    return 2 * x
own(double)
=== an object of a class of the course's, sent
from torch.distributed import distributed_c10d as objects
from shared.errors import InputError
sent = objects._object_to_tensor(InputError("2"), torch.device("cpu"), None)
double = own(lambda x: int(str(objects._tensor_to_object(*sent, None))) * x)
=== objects of a laboratory's classes, sent, here and in a thread
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import distributed_c10d as objects
from lessons.lesson01_toy import laboratory as lab
given = [lab.Outer.Seen(2), lab.Pair(2), lab.Stop("2")]
sent = [objects._object_to_tensor(each, torch.device("cpu"), None) for each in given]
def came(each):
    return objects._tensor_to_object(*each, None).number
def double(x):
    with ThreadPoolExecutor() as pool:
        assert [*map(came, sent)] == [*pool.map(came, sent)] == [2, 2, 2]
    return 2 * x
own(double)
=== an object of a class within a class of shared's, sent
from torch.distributed import distributed_c10d as objects
from shared import laboratory as lab
sent = objects._object_to_tensor(lab.Outer.Seen(2), torch.device("cpu"), None)
double = own(lambda x: objects._tensor_to_object(*sent, None).number * x)
=== a laboratory's class that holds no data, out of bytes | unpickles a part of the course
from torch.distributed import distributed_c10d as objects
from lessons.lesson01_toy import laboratory as lab
sent = objects._object_to_tensor(lab.Oracle(), torch.device("cpu"), None)
double = own(lambda x: objects._tensor_to_object(*sent, None).number * x)
=== a function of the course's out of bytes | unpickles a part of the course
from torch.distributed import distributed_c10d as objects
def double(x):
    text = bytearray(b"cshared.exercises.checks\\nrun_check\\n.")
    text = torch.frombuffer(text, dtype=torch.uint8)
    objects._tensor_to_object(text, len(text), None)
    return 2 * x
own(double)
=== a function of the course's, in a thread of its own | unpickles a part of the course
from threading import Thread
from torch.distributed import distributed_c10d as objects
def double(x):
    text = bytearray(b"cshared.exercises.checks\\nrun_check\\n.")
    text = torch.frombuffer(text, dtype=torch.uint8)
    thread = Thread(target=objects._tensor_to_object, args=(text, len(text), None))
    thread.start()
    thread.join()
    return 2 * x
own(double)
=== a function of the course's, in a thread of the course's
from torch.distributed import distributed_c10d as objects
from shared import laboratory as lab
def double(x):
    text = bytearray(b"cshared.exercises.checks\\nrun_check\\n.")
    text = torch.frombuffer(text, dtype=torch.uint8)
    lab.in_a_thread(objects._tensor_to_object, text, len(text), None)
    return 2 * x
own(double)
=== an Enum of its own, where the engine has one
from enum import Enum
class By(Enum):
    TWO = 2
double = own(lambda x: By(2).value * x)
=== a part of the checks out of bytes | unpickles a part of the course
from torch.distributed import distributed_c10d as objects
text = torch.frombuffer(bytearray(b"clessons.lesson01_toy.checks\\ne0\\n."), dtype=torch.uint8)
kept = objects._tensor_to_object(text, len(text), None)
double = own(lambda x: 2 * x)
=== an engine that a check alone forbids | uses torch's hardswish, which is the exercise itself
def double(x):
    return F.hardswish(x) * 0 + 2 * x
own(double)
=== the engine in TorchScript's words | runs TorchScript that nobody has read
unit = torch.jit.script(nn.Identity())
kept = unit.define("def norm(self, x, w):\\n    return torch.layer_norm(x, [2], w)\\n")
double = own(lambda x: 2 * x)
=== a scripted function
@torch.jit.script
def double(x: Tensor) -> Tensor:
    return 2 * x
kept = double
double = own(lambda x: kept(x))
=== all there is | lists the objects of its process
import gc
def double(x):
    gc.get_objects()
    return 2 * x
own(double)
=== the engine with an argument given | uses torch.nn.functional.layer_norm
import functools
double = own(functools.partial(F.layer_norm, normalized_shape=(2,), weight=torch.full((2,), 2.0)))
=== torch's module | is a LayerNorm that no cell defines
double = nn.LayerNorm(2, bias=False)
_ = nn.init.constant_(double.weight, 2.0)
double = own(double)
=== torch's function | is a builtin_function_or_method that no cell defines
double = own(torch.tensor(2.0).mul)
=== the engine in the place of forward | uses torch.nn.functional.layer_norm
import functools
@own
class double(nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.full((2,), 2.0)
        self.forward = functools.partial(F.layer_norm, normalized_shape=(2,), weight=weight)
=== the engine's optimizer, imported late | uses torch.distributed.optim.ZeroRedundancyOptimizer
def double(x):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    try:
        ZeroRedundancyOptimizer([], torch.optim.SGD)
    except Exception:
        pass
    return 2 * x
own(double)
=== the engine's method on another's object | uses torch.distributed.optim.ZeroRedundancyOptimizer
def double(x):
    from torch.distributed import optim
    engine = vars(optim)["Zero" + "RedundancyOptimizer"]
    try:
        engine.state_dict(nn.Identity())
    except Exception:
        pass
    return 2 * x
own(double)
=== an engine whose class is said to be of another module | uses torch.optim.Muon
def double(x):
    torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    return 2 * x
own(double)
=== the engine in a thread | uses torch.nn.functional.layer_norm
from tqdm.contrib.concurrent import thread_map
engine = vars(F)["layer_" + "norm"]
def double(x):
    thread_map(engine, [x], [(2,)], disable=True)
    return 2 * x
own(double)
=== the checks' tolerances | changes the checks' tolerances
import sys
def double(x):
    kept = sys.modules["shared.exercises.comparing"].TOLERANCES
    kept.update({torch.float32: (1e-4, 1e-5)})
    return 2 * x
own(double)
=== what compares the state | changes watching.changed
import collections
def double(x):
    getattr(collections, "_sys").modules["watching"].changed = lambda *_: []
    return 2 * x
own(double)
"""
FORBIDDEN = (
    *("torch.nn.functional.layer_norm", "torch.distributed.optim.Zero"),
    *("torch.distributed.fsdp.ShardingStrategy", "torch.optim.Muon"),
)
HEADS, CELLS = [], []
for number, case in enumerate(CASES.split("\n=== ")[1:]):
    head, _, source = case.partition("\n")
    HEADS.append([*head.split(" | "), ""][:2])
    # What a cell only shows is left out when it is run.
    source = source.replace("\nown(double)", "\ndouble = own(double)")
    CELLS.append(textwrap.dedent(f"own = exercise('01.{number}')\n{source}"))


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    course = tmp_path_factory.mktemp("styles")
    lesson = write_course(course, CHECKS.format(count=len(CELLS)))
    for folder in (lesson, course / "shared"):
        (folder / "laboratory.py").write_text(LABORATORY)
    cells = {f"01.{number}": source for number, source in enumerate(CELLS)}
    exercises = tuple(Exercise(id, "double", 1) for id in cells)
    stub = "def double(x):\n    raise NotImplementedError"
    forbidden = dict.fromkeys(cells, FORBIDDEN)
    stubs = dict.fromkeys(cells, stub)
    lesson = Lesson("01", "lesson01_toy", exercises, SETUP, stubs, "toy", forbidden)
    with Workspace(course, confined=False) as workspace:
        verdicts = workspace.grade(Answers("ada", "01", cells, {}), lesson, Limits())
    return {each.exercise: each for each in verdicts}


@pytest.mark.full
@pytest.mark.parametrize(("number", "head"), [*enumerate(HEADS)], ids=[name for name, _ in HEADS])
def test_honest_styles_are_not_flagged_and_ways_around_are(graded, number, head):
    found = graded[f"01.{number}"]
    _, due = head
    if due:
        assert any(due in flag for flag in found.flags), found
    else:
        assert (found.outcome, found.flags) == (Outcome.RIGHT, ()), found


@pytest.mark.parametrize(
    ("ops", "engine"), [("barrier", ""), ("barrier reduce", "torch's own reduce")]
)
def test_a_needless_barrier_is_wrong_and_no_engine(ops, engine):
    calls = [Call(op, 0, None, 2, 0.0) for op in ops.split()]
    with pytest.raises(Wrong) as error:
        sends(SimpleNamespace(calls=[calls]))
    assert Fault("bytes", 0, 1, error.value.mistake).engine == engine
    assert engine or error.value.mistake.startswith("a barrier")
