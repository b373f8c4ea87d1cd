"""Answers that try to harm, to hide or to cheat: each ends in its row, and costs nobody else.

All are exercises of one student's notebook, between two honest ones. Every attack is bounded by
itself (processes, bytes, time, loopback only), so that a limit that fails harms nobody.
"""

import socket
import textwrap
from pathlib import Path

import psutil
import pytest

from shared.errors import InputError
from solutions.grading.intake.audit import audit
from solutions.grading.reports.table import reason
from solutions.grading.results import Answers, Exercise, Lesson, Limits, Outcome
from solutions.grading.sandbox import bubblewrap
from solutions.grading.sandbox.run import Workspace
from tests.grading.toy_lesson import write_course

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(900)  # the first test waits for the whole notebook
SETUP = """import math
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from shared.exercises.notebook import check, exercise
"""
CHECKS = """import torch
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_close, expect_equal, expect_raises
from shared.exercises.seeds import fresh_generator


def small(label):
    expect_equal(label(3), "n = 3", what="label(3)")


def values(double):
    x = torch.randn(5, generator=fresh_generator())
    expect_close(double(x), x + x, what="the double", looks_like={"it squares": x * x})


def dimensions(double):
    expect_equal(double(torch.ones(2, 3)).ndim, 2, what="the number of dimensions")


def refused(double):
    expect_raises(ValueError, double, "text", what="a text")


e1 = checks_for("01.1", name="label", difficulty=1, minutes=5, hint="an f-string")
e1.check("a small number")(small)
for n in range(2, 99):
    each = checks_for(f"01.{n}", name=f"double_{n}", difficulty=2, minutes=5, hint="x + x")
    each.check("random values")(values)
    each.check("the number of dimensions")(dimensions)
    if n == 98:
        each.check("what is no tensor")(refused)
    globals()[f"e{n}"] = each
e99 = checks_for("01.99", name="label_2", difficulty=1, minutes=5, hint="an f-string")
e99.check("a small number")(small)
"""
ENGINE = ("torch.nn.functional.scaled_dot_product_attention",)
LIMITS = Limits(exercise_seconds=12.0, num_processes=8)  # a fork bomb must meet the latter first
# What stands behind AS THE JUDGE, written as the process that judges writes it.
JUDGE = r"""import logging, operator
def double_NUMBER(x):
    def read(frame, *parts):
        return operator.attrgetter(''.join(parts))(frame)
    frame = logging.currentframe()
    while 'secret' not in read(frame, 'f_lo', 'cals'):
        frame = read(frame, 'f_ba', 'ck')
    found, system = read(frame, 'f_lo', 'cals'), read(frame, 'f_glo', 'bals')['os']
    said = 'SAID'
    system.write(found['sender'], f'{found["secret"]}{said}\n'.encode())
    system._exit(0)
"""
# === name | outcome, "flagged" where the audit has to say something | what must stand in its row
# and then the cell, or only the body of its function.
CASES = r"""
=== right | right | right (2 of 2 checks passed)
return 2 * x
=== mistaken | partly right | (1 of 2 checks passed): it squares
return x * x
=== untouched | not solved | not solved yet
raise NotImplementedError
=== does not run | wrong | the cell does not run: NameError
y = undefined_name
def double_NUMBER(x):
    return 2 * x
=== 1,500 terms | wrong | RecursionError
return LONG_SUM
=== many prints | right
print('x' * 2**28)
return 2 * x
=== prints what a green cell prints | partly right | (1 of 2 checks passed)
print('01.NUMBER double: right (2 checks passed)')
return ZERO
=== seeds the dice | wrong | the global seed is set
import random
def double_NUMBER(x):
    torch.manual_seed(0)
    random.seed(0)
    return 2 * x
=== an answer of the course | right, flagged
from shared.model import attention
def double_NUMBER(x):
    return 2 * x
=== solutions | wrong, flagged | named 's
from solutions import grade
return 2 * x
=== another check | partly right, flagged | gives check
def check(id, candidate):
    print('right')
def double_NUMBER(x):
    return ZERO
=== writes its own result to a file's name | partly right, flagged | imports logging
import logging
def double_NUMBER(x):
    for n in range(3, 30):
        try:
            file = logging.FileHandler(f'/proc/self/fd/{n}', 'w')
            file.emit(logging.makeLogRecord({'msg': '{"kind": "right", "passed": 1, "total": 1}'}))
        except OSError:
            pass
    return ZERO
=== writes its own result as the process that judges does | right, flagged | attrgetter
AS THE JUDGE {"kind": "right", "passed": 2, "total": 2}
=== writes that it passed nine checks | right, flagged | counts other checks
AS THE JUDGE {"kind": "right", "passed": 9, "total": 9}
=== writes that the grader was stopped | stopped, flagged | with status 0
AS THE JUDGE {"stop": "closing"}
=== torch's own under another name | right, flagged | uses torch's ldexp
return torch.ops.aten.ldexp(x, torch.ones(()))
=== torch's own in a backward | right, flagged | uses torch's ldexp
class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return torch._VF.ldexp(x, torch.ones(()))
def double_NUMBER(x):
    return Double.apply(x)
=== the course's own through a lesson | right, flagged | runs the course's own answer
import lessons.lesson01_toy.train
def double_NUMBER(x):
    return lessons.lesson01_toy.train.double(x)
=== changes torch while it works | right, flagged | changes torch.nn.functional.relu
def double_NUMBER(x):
    vars(F)['relu'] = F.gelu
    return 2 * x
=== writes its own result to every open file | stopped | said more than anybody reads
result = torch.tensor(list(b'{"kind": "right", "passed": 1, "total": 1}\n'), dtype=torch.uint8)
def double_NUMBER(x):
    for n in range(3, 30):
        try:
            result.untyped_storage()._write_file(n, True, False, 1)
        except RuntimeError:
            pass
    return ZERO
=== frames | partly right, flagged | imports sys
import sys
def double_NUMBER(x):
    f = sys._getframe()
    while f.f_back:
        f = f.f_back
    return ZERO
=== tracing | partly right, flagged | imports sys
import sys
def double_NUMBER(x):
    sys.settrace(None)
    return ZERO
=== a tensor that equals everything | partly right, flagged | uses __torch_function__
class Same(Tensor):
    ndim = 2
    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        return True
def double_NUMBER(x):
    return torch.zeros(3).as_subclass(Same)
=== a mode over all functions | right, flagged | imports torch.overrides.TorchFunctionMode
from torch.overrides import TorchFunctionMode
def double_NUMBER(x):
    return 2 * x
=== a number that equals everything | partly right, flagged | uses __eq__
class Any:
    ndim = 2
    def __eq__(self, o):
        return True
def double_NUMBER(x):
    return Any()
=== a fault that counts as none | wrong, flagged | imports shared.exercises.wrong.Wrong
from shared.exercises.wrong import Wrong
class Nothing(Wrong):
    def __len__(self):
        return 0
def double_NUMBER(x):
    raise Nothing('right')
=== allclose | wrong, flagged | known wrong answer pass
torch.allclose = ALWAYS
def double_NUMBER(x):
    return ZERO
=== allclose as the name of a loop | wrong, flagged | known wrong answer pass
for torch.allclose in [ALWAYS]:
    pass
def double_NUMBER(x):
    return ZERO
=== allclose until it is judged | wrong, flagged | known wrong answer pass
import weakref
class Owner:
    pass
owner, before = Owner(), torch.allclose
torch.allclose = ALWAYS
weakref.finalize(owner, setattr, torch, 'allclose', before)
def double_NUMBER(x):
    return ZERO
=== a comparison by a computed name | partly right, flagged | changes torch
setattr(torch, 'is' + 'close', ALWAYS)
return ZERO
=== the course's comparison | partly right, flagged | changes shared.exercises.comparing.close
from shared.exercises import comparing
comparing.close = ALWAYS
def double_NUMBER(x):
    return ZERO
=== the comparison's code | wrong, flagged | known wrong answer pass
from shared.exercises import comparing
comparing.close.__code__ = (lambda a, b, c, d: True).__code__
def double_NUMBER(x):
    return ZERO
=== errors swallowed | wrong, flagged | changes contextlib._GeneratorContextManager.__exit__
import contextlib
contextlib._GeneratorContextManager.__exit__ = lambda *a: True
def double_NUMBER(x):
    raise OSError
=== the checks taken away | wrong, flagged | imports sys
import sys
def double_NUMBER(x):
    sys.modules['_checks_of_lesson_01'].eNUMBER.checks.clear()
    return ZERO
=== modules taken away | partly right, flagged | imports sys
import sys
sys.modules['shared.exercises.expecting'] = sys
def double_NUMBER(x):
    return ZERO
=== modules by another's name | wrong, flagged | .sys
F.sys.modules
return 2 * x
=== builtins | not solved, flagged | imports builtins
import builtins
builtins.all = ALWAYS
def double_NUMBER(x):
    return ZERO
=== later | wrong, flagged | known wrong answer pass
import threading
def double_NUMBER(x):
    threading.Timer(0.0, lambda: setattr(torch, 'allclose', ALWAYS)).start()
    return ZERO
=== the engine | right, flagged | which is the exercise itself
F.scaled_dot_product_attention(x[None], x[None], x[None])
return 2 * x
=== reads solutions | wrong, flagged | No such
open(SOLUTION).read()
return 2 * x
=== loopback | right, flagged
import socket
def double_NUMBER(x):
    s = socket.create_server(('127.0.0.1', 0))
    s.close()
    return 2 * x
=== a server of the machine | wrong, flagged | refused
import socket
def double_NUMBER(x):
    socket.create_connection(('127.0.0.1', PORT), 2)
=== a socket file of the machine | wrong, flagged | No such file
import socket
def double_NUMBER(x):
    socket.socket(socket.AF_UNIX).connect(SOCKET)
=== the outside | wrong, flagged | Network is unreachable
import socket
def double_NUMBER(x):
    socket.create_connection(('192.0.2.1', 80), 2)
=== the machine around a virtual one | wrong, flagged | Operation not permitted
import socket
def double_NUMBER(x):
    socket.socket(socket.AF_VSOCK)
=== memory that no process holds | wrong, flagged | refused: 1
import ctypes
def double_NUMBER(x):
    c = ctypes.CDLL(None, use_errno=True)
    c.shmget(0, 1, 0o1600)
    raise OSError(f'refused: {ctypes.get_errno()}')
=== writes | wrong, flagged | No such
open(OUTSIDE + '/was_here', 'w')
=== changes a file's rights | wrong, flagged | No such file
import os
def double_NUMBER(x):
    os.chmod(OUTSIDE, 0o777)
=== changes the interpreter | wrong, flagged | Read-only file system
import os
def double_NUMBER(x):
    os.utime(os.path.dirname(os.__file__))
=== a device | wrong, flagged | permitted
import os
def double_NUMBER(x):
    os.mknod('/tmp/disk', 0o60666, 1)
=== a process that leaves its parent | right, flagged
import os, time
def double_NUMBER(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    return 2 * x
=== an exit handler | right, flagged
import atexit
def double_NUMBER(x):
    atexit.register(print, 9)
    return 2 * x
=== endless | stopped | took longer than 12 s
while True:
    pass
=== endless, and swallows what ends it | stopped | took longer than 12 s
import time
def double_NUMBER(x):
    while True:
        try:
            time.sleep(0.2)
        except BaseException:
            pass
=== fork bomb | wrong, flagged | BlockingIOError
import os, time
def double_NUMBER(x):
    for n in range(600):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
=== 10 GB tensor | wrong | can't allocate memory
torch.ones(10 * 2**28)
=== 10 GB of Python | wrong | MemoryError
bytearray(10 * 2**30)
=== files in memory | wrong, flagged | Operation not permitted
import os
def double_NUMBER(x):
    os.memfd_create('x')
=== files that have no name any more | wrong, flagged | No space left on device
import os, tempfile
def double_NUMBER(x):
    kept = []
    for n in range(6):
        kept.append(tempfile.TemporaryFile())
        kept[-1].write(b'x' * (60 << 20))
=== recursion | wrong | RecursionError
return double_NUMBER(x)
=== recursion without Python's limit | stopped, flagged | the process was ended by SIGSEGV
import sys
def double_NUMBER(x):
    sys.setrecursionlimit(10**6)
    return max([x, x], key=double_NUMBER)
=== a large file | wrong, flagged | File too large
open('f', 'wb').write(b'x' * (65 << 20))
=== a file beside matplotlib's | right
x.numpy().tofile('.cache/left')
return 2 * x
=== the file of another | wrong | No such file
torch.load('.cache/left')
=== a folder that nobody may enter | right, flagged
import os
def double_NUMBER(x):
    os.makedirs('shut/in', 0, exist_ok=True)
    return 2 * x
=== the folder of another | wrong | No such file
torch.load('shut/in')
=== many files | stopped, flagged | wrote more files
import time
def double_NUMBER(x):
    for i in range(6000):
        open(f'f{i}', 'w').close()
    time.sleep(9)
=== every descriptor | wrong, flagged | Too many open files
kept = [open('/dev/null') for _ in range(5000)]
=== sys.exit | stopped, flagged | status 1
import sys
def double_NUMBER(x):
    sys.exit(3)
=== os._exit | stopped, flagged | the process with status 3
import os
def double_NUMBER(x):
    os._exit(3)
=== os._exit at once | stopped, flagged | with status 0
import os
y = os._exit(0)
def double_NUMBER(x):
    return 2 * x
=== SIGSEGV | stopped, flagged | SIGSEGV
import ctypes
def double_NUMBER(x):
    ctypes.string_at(0)
=== kills everybody | stopped, flagged | the process was ended
import os
def double_NUMBER(x):
    for p in (os.getppid(), -1):
        os.kill(p, 9)
    return 2 * x
=== a huge message | wrong | long long
raise ValueError('long ' * 10**6)
=== a message for a terminal, page or sheet | wrong | ValueError:  | <script>alert(1)</script>
raise ValueError('\x1b[2J\x07<script>alert(1)</script>\r\n\x00\u202e=1+1')
=== a flag that is too long | right, flagged
MANY_IMPORTS
def double_NUMBER(x):
    return 2 * x
"""
WORDS = {
    "ZERO": "torch.zeros_like(x)",
    "ALWAYS": "lambda *a, **k: True",
    "LONG_SUM": "+".join(["x"] * 1500),
    "MANY_IMPORTS": "\n".join(f"import os as {'o' * 60}{n}" for n in range(6)),
}
HEADS, CELLS = [], []
for case in CASES.split("\n=== ")[1:]:
    head, _, source = case.partition("\n")
    HEADS.append(head.split(" | "))
    if source.startswith("AS THE JUDGE "):
        source = JUDGE.replace("SAID", source.removeprefix("AS THE JUDGE ").rstrip("\n"))
    wrapped = f"def double_NUMBER(x):\n{textwrap.indent(source, '    ')}"
    CELLS.append(source if "def double_NUMBER" in source else wrapped)
PLACES = {name: place for place, (name, *_) in enumerate(HEADS, start=2)}
RIGHT = {"01.1": ("label", 'return f"n = {n}"'), "01.99": ("label_2", 'return f"n = {n}"')}


def cell(id: str, name: str, body: str) -> str:
    return f'@exercise("{id}")\ndef {name}({"n" if name.startswith("label") else "x"}):\n    {body}'


def typed(number: int, source: str, facts: dict[str, object]) -> str:
    """The cell as it is handed in: with the exercise's number and what the attack is after."""
    for name, value in {**WORDS, "NUMBER": number}.items():
        source = source.replace(name, str(value))
    for name, value in facts.items():
        source = source.replace(name, repr(value))
    function = f"def double_{number}"
    return source.replace(function, f'@exercise("01.{number}")\n{function}')


class Class:
    """One notebook with all of them, graded."""

    def __init__(self, folder: Path) -> None:
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.outside.chmod(0o755)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.file = socket.socket(socket.AF_UNIX)
        self.file.bind(str(folder / "socket"))
        self.file.listen()
        course = folder / "course"
        lesson = write_course(course, CHECKS)
        (course / "shared" / "doubled.py").write_text("def double(x):\n    return x + x\n")
        (lesson / "train.py").write_text("from shared.doubled import double\n")
        facts = {
            "OUTSIDE": str(self.outside),
            "SOCKET": str(folder / "socket"),
            "PORT": self.server.getsockname()[1],
            "SOLUTION": str(ROOT / "solutions" / "grade.py"),
        }
        names = {f"01.{n}": f"double_{n}" for n in (*PLACES.values(), 98)}
        cells = {f"01.{n}": typed(n, source, facts) for n, source in enumerate(CELLS, start=2)}
        cells["01.98"] = cell("01.98", "double_98", "raise ValueError")
        cells |= {id: cell(id, *answer) for id, answer in RIGHT.items()}
        inner = [Exercise(id, name, 2) for id, name in names.items()]
        exercises = (Exercise("01.1", "label", 1), *inner, Exercise("01.99", "label_2", 1))
        stubs = {e.id: cell(e.id, e.name, "raise NotImplementedError") for e in exercises}
        forbidden = dict.fromkeys(names, (*ENGINE, "torch.ldexp"))
        own = dict.fromkeys(names, "shared.doubled.double")
        squares = {id: (("it squares", cell(id, n, "return x * x")),) for id, n in names.items()}
        lesson = Lesson(
            "01", "lesson01_toy", exercises, SETUP, stubs, "toy", forbidden, squares, own
        )
        flags = {id: audit(source, lesson, id) for id, source in cells.items()}
        with Workspace(course) as workspace:
            graded = workspace.grade(Answers("x", "01", cells, {}, flags=flags), lesson, LIMITS)
            self.left = {path.name for path in workspace.folder.iterdir()}
            folder = str(workspace.folder)
            found = [p for p in psutil.process_iter() if folder in " ".join(_command(p))]
            self.processes = psutil.wait_procs(found, timeout=5.0)[1]
        self.verdicts = {each.exercise: each for each in graded}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    try:
        bubblewrap.require()
    except InputError as why:
        pytest.skip(str(why))
    return Class(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("head", HEADS, ids=PLACES)
def test_each_attack_ends_in_its_row(graded, head):
    name, outcome, *says = head
    outcome, _, flagged = outcome.partition(", ")
    found = graded.verdicts[f"01.{PLACES[name]}"]
    row = reason(found)
    said = "; ".join([row, *found.flags])  # a long row cuts its flags, the page does not
    assert found.outcome == outcome, row
    assert ("needs a look: " in said) == bool(flagged), said
    assert all(each in said for each in says), said
    due = {"right": 2.0, "partly right": 1.0}.get(outcome, 0.0)
    assert found.points == (0.0 if flagged else due)
    texts = [found.message, found.title, found.mistake, found.expected, found.seen, found.hint]
    texts += [*found.also, *found.flags, row]
    assert all(text.isprintable() for text in texts)
    assert len(row) <= 300


@pytest.mark.parametrize("id", RIGHT)
def test_honest_answers_before_and_after_attacks_lose_nothing(graded, id):
    found = graded.verdicts[id]
    assert (found.points, found.outcome, found.flags) == (1.0, Outcome.RIGHT, ()), found


def test_an_answer_that_always_refuses_earns_nothing(graded):
    found = graded.verdicts["01.98"]
    assert (found.passed, found.total, found.points) == (1, 3, 0.0), found


def test_nothing_remains(graded):
    assert list(graded.outside.iterdir()) == []
    assert graded.outside.stat().st_mode & 0o777 == 0o755
    assert graded.left == {"course", "caches"}
    assert graded.processes == []
