"""The audit flags what an answer has no business with, and leaves honest answers alone."""

import importlib
import re
from pathlib import Path

import pytest

from solutions.grading.intake import audit as auditing
from solutions.grading.intake import literals
from solutions.grading.results import Exercise, Lesson
from tests.grading.course import course

COURSE = Path(__file__).resolve().parents[2]
SETUP = """import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from shared.exercises.notebook import check, exercise
from shared.measuring.memory import saved_bytes

limit = 3"""


def audit(source, setup, names=(), forbidden=()) -> tuple[str, ...]:
    """The flags as an instructor reads them, in the cell of exercise 01.1."""
    exercises = tuple(Exercise("01.1", name, 1) for name in names)
    lesson = Lesson("01", "lesson01_x", exercises, setup, {}, "", {"01.1": tuple(forbidden)})
    return tuple(map(str, auditing.audit(source, lesson, "01.1")))


CALLED = "a computed name of torch"
ODD = [
    ("import os", "line 1 imports os"),
    ("import torch, subprocess", "line 1 imports subprocess"),
    (
        "from shared.model.attention import split_heads",
        "imports shared.model.attention.split_heads, which can hold answers",
    ),
    ("from shared.exercises import notebook", "imports shared.exercises.notebook"),
    ("import solutions.lesson02_attention", "line 1 imports solutions"),
    ("from torch import multiprocessing", "imports torch.multiprocessing"),
    ("from torch.overrides import TorchFunctionMode", "imports torch.overrides"),
    ("from torch.nn.functional import *", "imports torch.nn.functional.*"),
    ("__import__('os')", "uses __import__"),
    ("def f():\n    return eval('1')", "line 2 uses eval"),
    ("def f():\n    return open('x').read()", "line 2 uses open"),
    ("torch.allclose = lambda *a, **k: True", "line 1 changes torch.allclose"),
    ("F.softmax = None", "changes torch.nn.functional.softmax"),
    ("for torch.allclose in [print]: ...", "changes torch.allclose"),
    ("(a, [torch.allclose, *F.relu]) = 1, (2, 3)", "changes torch.allclose"),
    ("del torch.nn.Linear", "changes torch.nn.Linear"),
    ("nn.Module.forward = None", "changes torch.nn.Module.forward"),
    ("def f():\n    setattr(torch, 'allclose', None)", "line 2 changes torch"),
    ("check = print", "gives check another meaning"),
    ("def exercise(id):\n    return print", "gives exercise another meaning"),
    ("def f():\n    global limit\n    limit = 9", "gives limit another meaning"),
    ("import random as math", "gives math another meaning"),
    ("def f(x):\n    return torch.func.sys.modules", "reaches for .sys"),
    (
        "def f(x):\n    return F.scaled_dot_product_attention(x, x, x)",
        "which is the exercise itself",
    ),
    ("limit = 4", "gives limit another meaning"),
    ("def f(x):\n    return f.__globals__", "uses __globals__"),
    ("def f(x):\n    return ().__class__.__subclasses__()", "uses __subclasses__"),
    ("def f(e):\n    return e.tb_frame.f_back", "uses f_back"),
    ("def f(e):\n    return getattr(e, 'f_locals')", "uses f_locals"),
    ("import logging", "line 1 imports logging"),
    ("import logging as l\ndef f():\n    return l.currentframe()", "line 3 uses currentframe"),
    ("from warnings import sys as s", "imports warnings.sys"),
    ("import random\ndef f():\n    return random._os", "line 3 reaches for ._os"),
    ("from operator import attrgetter\ndef f(n):\n    return attrgetter(n)", "line 3 reads"),
    ("import operator\nread = operator.attrgetter", "line 2 reads a computed name by attrgetter"),
    ("import operator\ndef f(x, n):\n    return operator.methodcaller(n)(x)", "by methodcaller"),
    ("from operator import attrgetter\nf = attrgetter('tb_next.tb_lineno')", "uses tb_next"),
    ("def f(x, n):\n    return list(map(getattr, x, n))", "line 2 uses getattr as a value"),
    ("def f(n):\n    return getattr(torch, n)", "reads a computed name of torch"),
    ("def f():\n    return torch.os.getcwd()", "reaches for .os"),
    ("def f():\n    return torch._C._nn", "reaches for torch._C"),
    ("class A:\n    def __eq__(self, o):\n        return True", "line 2 uses __eq__"),
    ("class A:\n    __ne__ = None", "line 2 uses __ne__"),
    (
        "class A(Tensor):\n    @classmethod\n    def __torch_function__(c): ...",
        "__torch_function__",
    ),
    ("A = type('A', (), {'__eq__': None})", "builds a class by calling type"),
    ("class A(metaclass=type): ...", "gives A a metaclass"),
    ("get_ipython().system('ls')", "uses get_ipython"),
    ("import lessons.lesson02_attention.train", "imports lessons.lesson02_attention.train"),
    ("from lessons.lesson02_attention import laboratory", "which can hold answers"),
    ("import lessons", "line 1 imports lessons"),
    (
        "def f(e):\n    match e:\n        case object(f_back=b):\n            return b",
        "uses f_back",
    ),
    ("match 1:\n    case object(attrgetter=get): ...", "reads a computed name by attrgetter"),
    ("t = torch\nt.allclose = None", "changes torch.allclose"),
    (
        "def f():\n    n = (g := nn).functional\n    n.relu = None",
        "changes torch.nn.functional.relu",
    ),
    ("class A(type(nn.Module)('B', (), {})): ...", "lets A derive from what a call gives"),
    ("import types\nA = types.new_class('A')", "reaches for types.new_class"),
    ("import string\nf = string.Formatter().get_field", "reaches for string.Formatter"),
    ("from typing import get_type_hints", "imports typing.get_type_hints"),
    ("from typing import *\nf = get_type_hints", "reaches for typing.get_type_hints"),
    ("from numpy import *", "imports numpy.*"),
    ("import numpy as np\nx = np.load('x', allow_pickle=True)", "reaches for numpy.load"),
    ("import numpy.testing", "imports numpy.testing"),
    ("g = torch.fx.graph_module", "reaches for torch.fx"),
    ("from torch.utils import benchmark", "imports torch.utils.benchmark"),
    ("import torch._sources as s", "imports torch._sources"),
    ("f = torch.serialization.io.open", "reaches for .io"),
    ("from torch.types import builtins", "imports torch.types.builtins"),
    ("import types\ndef f(c):\n    return types.FunctionType(c, {})", "calls types.FunctionType"),
    ("def f(m):\n    return torch.fx.GraphModule(m, m)", "calls torch.fx.GraphModule"),
    ("def f(x):\n    return torch.jit.load(x)", "reaches for torch.jit.load"),
    ("import collections\ns = getattr(collections, '_sys').modules", "reaches for ._sys"),
    ("import operator\ns = operator.attrgetter('_sys.modules')", "reaches for ._sys"),
    ("from operator import attrgetter as a\ns = a('_sys.modules')", "reaches for ._sys"),
    ("import collections\nmatch collections:\n    case object(_sys=s): ...", "reaches for ._sys"),
    ("def f(x):\n    return getattr(torch.serialization, 'io')", "reaches for .io"),
    ("class A(int): ...\nfor n in {'eq': 1}:\n    setattr(A, n, 1)", "computed name by setattr"),
    ("class A(int): ...\nfor n in ('eq', '__ne__'):\n    setattr(A, n, 1)", "by setattr"),
    ("for n in 'relu', 'scaled_dot_product_attention':\n    getattr(F, n)", "exercise itself"),
    ("def g(n):\n    getattr(torch, n)\ng('sin'), map(g, 'x')", CALLED),
    ("def g(n):\n    getattr(torch, n)\ng(*'x')", CALLED),
    ("for n in ('sin', '_sys'):\n    getattr(torch, n)", CALLED),
    ("for s in ('{}', '{0.f_' + 'back}'):\n    s.format(1)", "formats by a text that reads f_back"),
    ("def f(x, n):\n    setattr(x, '__%s__' % n, 1)", "computed name by setattr"),
    ("def f(x, n):\n    setattr(x, f'__{n}', 1)", "computed name by setattr"),
    ("def f(x):\n    setattr(x, '__annotations__', {'x': 'y'})", "sets a special"),
    ("import typing\nf = typing.ForwardRef('x')", "reaches for typing.ForwardRef"),
    ("def f(x):\n    return x._evaluate({}, {}, frozenset())", "uses _evaluate"),
    (
        "f = torch._jit_internal.createResolutionCallbackFromFrame(frames_up=2)",
        "reaches for torch._jit_internal",
    ),
    ("from torch import _jit_internal", "imports torch._jit_internal"),
    ("from tqdm.contrib.concurrent import thread_map", "imports tqdm.contrib"),
    ("import tqdm\nf = tqdm.contrib.concurrent", "reaches for tqdm.contrib"),
    ("def f(e, w):\n    return ('{0.__%(a)s__}' % w).format(e)", "formats by a computed text"),
    ("def f(e, s):\n    s += '.f_%s' % 1\n    return s.format(e)", "formats by a computed text"),
    ("s = '{0'\ns += '.x}'\nf = s.format(1)", "formats by a computed text"),
    ("f = map(str.format, ['{0.x}'])", "formats by a computed text"),
    ("def f(x):\n    return getattr('{%s}' % x, 'format_map')", "formats by a computed text"),
    ("match '{%s}' % 1:\n    case object(format=f): ...", "formats by a computed text"),
    ("def f(self):\n    return self.__dict__", "uses __dict__"),
    ("def f(x):\n    x.__dict__['a'] = 1", "uses __dict__"),
    ("import json\nf = json.codecs.open(3)", "reaches for .codecs"),
    (
        "match F:\n    case object(scaled_dot_product_attention=f): ...",
        "which is the exercise itself",
    ),
    ("f = nn.modules.activation.F.scaled_dot_product_attention", "which is the exercise itself"),
    ("'{0.tb_frame.x}'.format(1)", "formats by a text that reads tb_frame"),
    ("'{:{0.__code__}}'.format(1)", "formats by a text that reads __code__"),
    ("s = '{0'\nfor n in 'x':\n    s = s + '.f_'\ns.format(1)", "formats by a computed text"),
    *(
        (f"N = ['sin']\n{line}\ngetattr(torch, N[0])", CALLED)
        for line in (  # what can change a table, or give its name something else
            "N.insert(0, 'sys')",
            "N.__setitem__(0, 'sys')",
            "list.append(N, 'sys')",
            "M = N",
            "N[0] = 'sys'",
            "N += ['sys']",
            "def f(x=N): ...",
            "match ['sys']:\n    case N: ...",
            "match 'sys':\n    case [*N]: ...",
            "import types as N",
            "def N(): ...",
            "try: ...\nexcept KeyError as N: ...",
            "match {}:\n    case {**N}: ...",
            "def zip(*a):\n    N[0:] = 'sys'\nfor n in zip(N): ...",
        )
    ),
    (
        "def zip(*a):\n    return [['sys']]\nfor (n,) in zip(['sin']):\n    getattr(torch, n)",
        CALLED,
    ),
    ("def f(n): ...\nf('sin')\ndef g(n):\n    getattr(torch, n)\nmap(g, ['sys'])", CALLED),
    ("def g(a, /, n):\n    getattr(torch, n)\ng('sin', 'sys')", CALLED),
    ("def g(a, n, m=1):\n    getattr(torch, n)\ng(*['a', 'sys'], 'sin')", CALLED),
    ("for *_, n in (('a', 'sin', 'sys'),):\n    getattr(torch, n)", CALLED),
    ("for a, n, m in ((*('a', 'sys'), 'sin'),):\n    getattr(torch, n)", CALLED),
    ("for a, n, m in zip(*(['a'], ['sys']), ['sin']):\n    getattr(torch, n)", CALLED),
    ("class A:\n    def g(self, n):\n        getattr(torch, n)\n    g(1, 'sin')", CALLED),
]


@pytest.mark.parametrize(("source", "flag"), ODD, ids=[source[:40] for source, _ in ODD])
def test_what_an_answer_has_no_business_with_is_flagged(source, flag):
    flags = audit(source, SETUP, forbidden=["torch.nn.functional.scaled_dot_product_attention"])
    assert any(flag in each for each in flags), flags


def test_what_a_lesson_s_own_module_has_is_no_way_around():
    setup = "from lessons.lesson20_less_communication import laboratory\nimport lessons.a.b as b"
    assert audit("x = laboratory.World(4).ranks", setup) == ()
    assert audit("x = laboratory.f", setup, {"f"}) == (
        "line 1 reaches for lessons.lesson20_less_communication.laboratory.f, an answer of the"
        " course",
    )


def test_every_forbidden_name_is_one_that_an_answer_can_reach():
    """A misspelt one would never be found in a cell."""
    missing = []
    for lesson in course().values():
        for path in {each for given in lesson.forbidden.values() for each in given}:
            module, _, name = path.rpartition(".")
            if re.match(r"peft|bitsandbytes|torch\.ops\.", path):
                continue  # not installed here
            if not any(x.startswith(name) for x in dir(importlib.import_module(module))):
                missing.append(path)
    assert missing == []


@pytest.mark.parametrize(
    ("id", "source"),
    [
        ("02.1", "f = F.multi_head_attention_forward"),
        ("02.1", "f = nn.MultiheadAttention(4, 1)"),
        ("03.1", "def f(x):\n    return F.group_norm(x, 1)"),
        ("03.1", "def f(x):\n    return F.batch_norm(x.T, None, None, training=True)"),
        ("03.1", "norm = nn.BatchNorm1d(3)"),
        ("03.2", "f = nn.modules.transformer.TransformerEncoderLayer._ff_block"),
        ("03.3", "f = nn.modules.transformer.TransformerEncoderLayer.forward"),
        ("07.1", "match torch.utils.data:\n    case object(DistributedSampler=Engine): ..."),
    ],
)
def test_torch_s_other_ways_to_the_same_are_forbidden(id, source):
    flags = auditing.audit(source, course()[id[:2]], id)
    assert "which is the exercise itself" in str(flags[0])


def test_a_megabyte_of_dots_is_read_at_once(monkeypatch):
    """A chain is gone down once, and no further than any path that somebody means."""
    looked = []
    monkeypatch.setattr(
        auditing._Cell, "_dotted", lambda self, node, real=auditing._Cell._dotted: (
            looked.append(node) or real(self, node)
        )
    )  # fmt: skip
    source = "\n".join(["torch" + ".a" * 300] * 20)
    assert audit(source, SETUP) == ()
    assert len(looked) <= 2 * 20 * 301 + 100


@pytest.mark.parametrize("how", ["batching.collate(pairs)", "getattr(batching, 'collate')(pairs)"])
def test_an_answer_in_a_module_that_the_setup_imports_is_flagged(how):
    """Lesson 04 imports the module that holds its first answer."""
    source = f"def f(pairs):\n    batching.pair_lengths(pairs)\n    return {how}"
    setup = "from shared.data import batching"
    flag = "line 3 reaches for shared.data.batching.collate, an answer of the course"
    assert audit(source, setup, {"collate"}) == (flag,)
    assert audit(source, setup, {"greedy_decode"}) == ()


HONEST = [
    "import torch\nfrom torch import nn\nimport math",
    "import torch.nn.functional as F\nfrom collections.abc import Iterator\nimport functools",
    "from contextlib import contextmanager\nimport copy, itertools, random, time",
    "from shared.measuring.memory import saved_bytes",
    "import torch.distributed as dist\nfrom torch._utils import _flatten_dense_tensors",
    "class A(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "    def __len__(self):\n        return 1\n    def __getattr__(self, name):\n"
    "        return super().__getattr__(name)",
    "def f(model):\n    for p in model.parameters():\n        p.grad = None\n        p.data[0] = 1",
    "def f(model):\n    model.register_forward_hook(print)\n    return type(model).__name__",
    "def f(model, name):\n    return getattr(model, f'w_{name}')",
    "def f(model, name, value):\n    setattr(model, name, value)",
    "def g(n, x):\n    return getattr(torch, n)(x)\ny = g('sin', 1) + g(x=1, n='cos')",
    "class A: ...\nfor n, v in (('low', 1), ('high', 2)):\n    setattr(A, n, v)",
    "class A: ...\nfor n, v in zip(('low', 'high'), (1, 2)):\n    setattr(A, 'the_' + n, v)",
    "NAMES = 'sin', 'cos'\ndef f(x):\n    return [getattr(torch, n)(x) for n in NAMES]",
    "def f(x):\n    for place, (n, m) in enumerate([('sin', 'cos')]):\n        getattr(x, n)",
    "def f(n):\n    for line in ('{} of', 'and {}'):\n        line.format(n)",
    "SAID = {'odd': 'odd: {}', 'low': '{} < 2'}\ndef f(why, n):\n    return SAID[why].format(n)",
    "def f(n):\n    return ('odd: {}' if n % 2 else 'below 2: {}').format(n)",
    "def f(x):\n    mask, scores = x > 0, x\n    scores[mask] = 0\n    return scores",
    "torch.backends.cudnn.deterministic = True",
    "def f(limit, x):\n    return limit * torch.random.initial_seed()",
    "def f():\n    raise ValueError(f'{__name__}')\nif __name__ == '__main__':\n    f()",
    "from operator import attrgetter, mul\ndef f(x):\n    return max(x, key=attrgetter('loss'))",
    "import operator, types\ndef f(x):\n    return operator.mul(*x), types.SimpleNamespace(a=1)",
    "def f():\n    return " + "+".join(["1"] * 900),
    "def f(x):\n    for saved_bytes in x:\n        saved_bytes.grad = None",
    "import collections.abc\nimport torch.distributed.nn.functional",
    "from typing import *\nfrom math import *\ndef f(x: Optional[int]):\n    return sin(x)",
    "from typing import NamedTuple\nclass A(NamedTuple('B', [('x', int)])): ...",
    "def f(x):\n    out = math.inf\n    out = x\n    out.grad = None",
    "match 1:\n    case Tensor(shape=s) | nn.Module(training=s): ...",
    "import torch.types\nfrom torch import types\ndef f(d: torch.types.Device): ...",
    "def f():\n    linear = nn.Linear\n    return linear\n"
    "def tie(linear, w):\n    linear.weight = w",
    "def f():\n    return torch._C._current_graph_task_id()",
    "import types\n@torch.jit.ignore\ndef f(g: types.FunctionType, m: torch.fx.GraphModule): ...",
    "from types import CodeType\n@torch.fx.wrap\ndef f(x):\n    return torch.jit.is_scripting()",
    "def f(x):\n    return getattr(x, 'shape'), 'os.path', 'sys'",
    "line = '{}: {:.2f}'\ndef f(x):\n    return line.format(*x) + ('{}' + ' {}').format(1, 2)",
    "class A(nn.Module):\n    def __init__(self, n):\n        self.__dict__['n'] = n",
    "from tqdm.auto import tqdm, trange\nimport tqdm as t\nf = t.trange, t.tqdm.write",
    "def f(x):\n    torch._foreach_mul_(x, 2)\n    setattr(x, f'w_{x}', nn.Linear(1, 1))",
    "def f(x):\n    raise ValueError('a dataset has no __len__, tb_next: {}'.format(x))",
    "def f(x):\n    line = '{}'\n    for n in x:\n        line = line + '{:>8}'\n"
    "    return line.format(*x)",
    "N = {'a': 'sin'}\ndef f(x):\n    if 'a' in N:\n        return getattr(torch, N['a'])(x)\n"
    "    return [n for n, m in N.items()] + [n for _, n in enumerate(zip(N, N))]",
    "line = " + " + ".join(["'{}'"] * 90) + "\nline.format(1)",
]


@pytest.mark.parametrize("source", HONEST)
def test_honest_code_is_not_flagged(source):
    assert audit(source, SETUP) == ()


def test_a_lesson_about_files_may_use_files():
    setup = "import os\nfrom pathlib import Path"
    source = "import io, shutil, tempfile\ndef f(p):\n    os.fsync(3)\n    os.replace(p, p)\n"
    assert audit(source + "    open(p)", setup) == ()
    assert audit("def f():\n    os._exit(0)", setup) == ("line 2 uses os._exit",)
    for source in ("import pickle\nf = pickle.loads(b'')", "from pickle import Unpickler"):
        assert "pickle." in audit(source, setup)[0]
        assert audit(source, f"{setup}\nimport pickle") == ()


def test_what_changes_things_for_others_is_known():
    lesson = Lesson("01", "lesson01_x", (), SETUP, {}, "")
    source = "import os\nfrom shared.model import attention\nlimit = 4"
    flags = auditing.audit(source, lesson, "01.1")
    assert [each.spoils for each in flags] == [False, False, True]


@pytest.mark.parametrize("source", ["def f(:", "(" * 5000])
def test_broken_code_has_no_flags(source):
    assert audit(source, SETUP) == ()


def test_tables_of_tables_are_read_in_few_steps(monkeypatch):
    """Each item is one of forty in the next table: a reader that follows them all never ends."""
    looked = []
    monkeypatch.setattr(
        literals.Literals, "of", lambda self, *given, real=literals.Literals.of: (
            looked.append(1) or real(self, *given)
        )
    )  # fmt: skip
    tables = (f"t{n + 1} = ({f't{n}[0],' * 40})" for n in range(9))
    source = "\n".join(("t0 = 'a', 'b'", *tables, "getattr(torch, t9[0])"))
    assert audit(source, SETUP) == ("line 11 reads a computed name of torch",)
    assert len(looked) <= 2 * literals.STEPS


def test_long_lists_end():
    assert len(audit("\n".join(f"import os as o{i}, sys as s{i}" for i in range(9)), SETUP)) == 6
