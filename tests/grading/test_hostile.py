"""Answers that try to harm, to hide or to cheat: each ends in its row, and costs nobody else.

All are exercises of one student's notebook, between two honest ones. Every attack is bounded by
itself (processes, bytes, time, loopback only), so that a limit that fails harms nobody.
"""

import shutil
import socket
import textwrap
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from shared.errors import InputError
from solutions.grading.reports.table import reason
from solutions.grading.results import Answers, Exercise, Lesson, Limits, Outcome
from solutions.grading.sandbox import bubblewrap
from solutions.grading.sandbox.run import Workspace

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


e1 = checks_for("01.1", name="label", difficulty=1, minutes=5, hints=["an f-string"])
e1.check("a small number")(small)
for n in range(2, 99):
    each = checks_for(f"01.{n}", name=f"double_{n}", difficulty=2, minutes=5, hints=["x + x"])
    each.check("random values")(values)
    each.check("the number of dimensions")(dimensions)
    if n == 98:
        each.check("what is no tensor")(refused)
    globals()[f"e{n}"] = each
e99 = checks_for("01.99", name="label_2", difficulty=1, minutes=5, hints=["an f-string"])
e99.check("a small number")(small)
"""
RIGHT, PARTLY, WRONG = Outcome.RIGHT, Outcome.PARTLY, Outcome.WRONG
STOPPED, UNSOLVED = Outcome.STOPPED, Outcome.UNSOLVED
ZERO = "return torch.zeros_like(x)"
GOOD = "return 2 * x"
ALWAYS = "lambda *a, **k: True"
LIMITS = Limits(exercise_seconds=12.0)


def cell(id: str, head: str, body: str) -> str:
    return f'@exercise("{id}")\ndef {head}:\n' + textwrap.indent(textwrap.dedent(body), "    ")


HONEST = {
    "01.1": cell("01.1", "label(n)", 'return f"n = {n}"'),
    "01.99": cell("01.99", "label_2(n)", 'return f"n = {n}"'),
}


@dataclass(frozen=True)
class Case:
    """An attack: what stands above the answer, its body, and what must stand in its row."""

    name: str
    before: str
    body: str
    outcome: Outcome
    says: tuple[str, ...] = ()
    points: float = 0.0

    def source(self, number: int, facts: dict[str, object]) -> str:
        """The cell, as the answer to the exercise of that number."""
        text = textwrap.dedent(self.before) + "\n"
        text += cell(f"01.{number}", f"double_{number}(x)", self.body)
        for name, value in {**facts, "NUMBER": number}.items():
            text = text.replace(name, str(value) if name == "NUMBER" else repr(value))
        return text


def flagged(name: str, before: str, body: str, *says: str, outcome: Outcome = PARTLY) -> Case:
    """An attack that the audit points at, so that it has no points."""
    return Case(name, before, body, outcome, ("needs a look: ", *says))


FORBIDDEN = "torch.nn.functional.scaled_dot_product_attention"
PATCHED = "it makes a known wrong answer pass"
CASES = [
    Case("right", "", GOOD, RIGHT, ("right (2 of 2 checks passed)",), 2.0),
    Case("mistaken", "", "return x * x", PARTLY, ("(1 of 2 checks passed): it squares",), 1.0),
    Case("untouched", "", "raise NotImplementedError", UNSOLVED, ("not solved yet",)),
    Case("does not run", "y = undefined_name", GOOD, WRONG, ("the cell does not run: NameError",)),
    Case("1,500 terms", "", "return " + "+".join(["x"] * 1500), WRONG, ("RecursionError",)),
    Case("many prints", "", "print('x' * 2**28)\n" + GOOD, RIGHT, (), 2.0),
    Case(
        "prints what a green cell prints",
        "",
        "print('01.NUMBER double: right (2 checks passed)')\n" + ZERO,
        PARTLY,
        ("(1 of 2 checks passed)",),
        1.0,
    ),
    Case(
        "seeds the dice",
        "import random",
        "torch.manual_seed(0)\nrandom.seed(0)\n" + GOOD,
        WRONG,
        ("the global seed is set",),
    ),
    # Full points for nothing: each was one once.
    flagged("an answer of the course", "from shared.model import attention", GOOD, outcome=RIGHT),
    flagged("solutions", "", f"from solutions import grade\n{GOOD}", "named 's", outcome=WRONG),
    flagged("another check", "def check(id, candidate):\n    print('right')", ZERO, "gives check"),
    flagged(
        "frames",
        "import sys",
        "f = sys._getframe()\nwhile f.f_back:\n    f = f.f_back\n" + ZERO,
        "imports sys",
    ),
    flagged("tracing", "import sys", "sys.settrace(None)\n" + ZERO, "imports sys"),
    flagged(
        "a tensor that equals everything",
        """
        class Same(Tensor):
            ndim = 2
            @classmethod
            def __torch_function__(cls, f, types, args=(), kwargs=None):
                return True
        """,
        "return torch.zeros(3).as_subclass(Same)",
        "uses __torch_function__",
    ),
    flagged(
        "a mode over all functions",
        "from torch.overrides import TorchFunctionMode",
        GOOD,
        "imports torch.overrides.TorchFunctionMode",
        outcome=RIGHT,
    ),
    flagged(
        "a number that equals everything",
        "class Any:\n    ndim = 2\n    def __eq__(self, o):\n        return True",
        "return Any()",
        "uses __eq__",
    ),
    flagged(
        "a fault that counts as none",
        """
        from shared.exercises.wrong import Wrong
        class Nothing(Wrong):
            def __len__(self):
                return 0
        """,
        "raise Nothing('right')",
        "imports shared.exercises.wrong.Wrong",
        outcome=WRONG,
    ),
    flagged("allclose", f"torch.allclose = {ALWAYS}", ZERO, PATCHED, outcome=WRONG),
    flagged(
        "allclose until it is judged",
        f"""
        import weakref
        class Owner:
            pass
        owner, before = Owner(), torch.allclose
        torch.allclose = {ALWAYS}
        weakref.finalize(owner, setattr, torch, 'allclose', before)
        """,
        ZERO,
        PATCHED,
        outcome=WRONG,
    ),
    flagged(
        "a comparison by a computed name",
        "",
        f"setattr(torch, 'is' + 'close', {ALWAYS})\n{ZERO}",
        "changes torch",
    ),
    flagged(
        "the course's comparison",
        f"from shared.exercises import comparing\ncomparing.close = {ALWAYS}",
        ZERO,
        "changes shared.exercises.comparing.close",
    ),
    flagged(
        "the comparison's code",
        """
        from shared.exercises import comparing
        comparing.close.__code__ = (lambda a, b, c, d: True).__code__
        """,
        ZERO,
        PATCHED,
        outcome=WRONG,
    ),
    flagged(
        "errors swallowed",
        """
        import contextlib
        contextlib._GeneratorContextManager.__exit__ = lambda *a: True
        """,
        "raise OSError",
        "changes contextlib._GeneratorContextManager.__exit__",
        outcome=WRONG,
    ),
    flagged(
        "the checks taken away",
        "import sys",
        f"sys.modules['_checks_of_lesson_01'].eNUMBER.checks.clear()\n{ZERO}",
        "imports sys",
        outcome=WRONG,
    ),
    flagged(
        "modules taken away",
        "import sys\nsys.modules['shared.exercises.expecting'] = sys",
        ZERO,
        "imports sys",
    ),
    flagged("modules by another's name", "", f"F.sys.modules\n{GOOD}", ".sys", outcome=WRONG),
    flagged(
        "builtins",
        f"import builtins\nbuiltins.all = {ALWAYS}",
        ZERO,
        "imports builtins",
        outcome=UNSOLVED,
    ),
    flagged(
        "later",
        "import threading",
        f"threading.Timer(0.0, lambda: setattr(torch, 'allclose', {ALWAYS})).start()\n{ZERO}",
        PATCHED,
        outcome=WRONG,
    ),
    flagged(
        "the engine",
        "",
        "F.scaled_dot_product_attention(x[None], x[None], x[None])\n" + GOOD,
        "which is the exercise itself",
        outcome=RIGHT,
    ),
    # Reaching out.
    flagged("reads solutions", "", f"open(SOLUTION).read()\n{GOOD}", "No such", outcome=WRONG),
    flagged(
        "loopback",
        "import socket",
        f"s = socket.create_server(('127.0.0.1', 0))\ns.close()\n{GOOD}",
        outcome=RIGHT,
    ),
    flagged(
        "a server of the machine",
        "import socket",
        "socket.create_connection(('127.0.0.1', PORT), 2)",
        "refused",
        outcome=WRONG,
    ),
    flagged(
        "a socket file of the machine",
        "import socket",
        "socket.socket(socket.AF_UNIX).connect(SOCKET)",
        "No such file",
        outcome=WRONG,
    ),
    flagged(
        "the outside",
        "import socket",
        "socket.create_connection(('192.0.2.1', 80), 2)",
        "Network is unreachable",
        outcome=WRONG,
    ),
    flagged("writes", "", "open(OUTSIDE + '/was_here', 'w')", "No such", outcome=WRONG),
    flagged(
        "changes a file's rights",
        "import os",
        "os.chmod(OUTSIDE, 0o777)",
        "No such file",
        outcome=WRONG,
    ),
    flagged(
        "changes the interpreter",
        "import os",
        "os.utime(os.path.dirname(os.__file__))",
        "Read-only file system",
        outcome=WRONG,
    ),
    flagged(
        "a device", "import os", "os.mknod('/tmp/disk', 0o60666, 1)", "permitted", outcome=WRONG
    ),
    # Staying behind.
    flagged(
        "a process that leaves its parent",
        "import os, time",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        return 2 * x
        """,
        outcome=RIGHT,
    ),
    flagged(
        "an exit handler", "import atexit", f"atexit.register(print, 9)\n{GOOD}", outcome=RIGHT
    ),
    # Using up.
    Case("endless", "", "while True:\n    pass", STOPPED, ("took longer than 12 s",)),
    Case(
        "endless, and swallows what ends it",
        "import time",
        """
        while True:
            try:
                time.sleep(0.2)
            except BaseException:
                pass
        """,
        STOPPED,
        ("took longer than 12 s",),
    ),
    flagged(
        "fork bomb",
        "import os, time",
        """
        for n in range(600):
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        """,
        "BlockingIOError",
        outcome=WRONG,
    ),
    Case("10 GB tensor", "", "torch.ones(10 * 2**28)", WRONG, ("can't allocate memory",)),
    Case("10 GB of Python", "", "bytearray(10 * 2**30)", WRONG, ("MemoryError",)),
    flagged(
        "files in memory",
        "import os",
        "os.memfd_create('x')",
        "Operation not permitted",
        outcome=WRONG,
    ),
    flagged(
        "files that have no name any more",
        "import os, tempfile",
        """
        kept = []
        for n in range(6):
            kept.append(tempfile.TemporaryFile())
            kept[-1].write(b'x' * (60 << 20))
        """,
        "No space left on device",
        outcome=WRONG,
    ),
    Case("recursion", "", "return double_NUMBER(x)", WRONG, ("RecursionError",)),
    flagged(
        "recursion without Python's limit",
        "import sys",
        "sys.setrecursionlimit(10**6)\nreturn max([x, x], key=double_NUMBER)",
        "the process was ended by SIGSEGV",
        outcome=STOPPED,
    ),
    flagged(
        "a large file",
        "",
        "open('f', 'wb').write(b'x' * (65 << 20))",
        "File too large",
        outcome=WRONG,
    ),
    flagged(
        "many files",
        "import time",
        "for i in range(6000):\n    open(f'f{i}', 'w').close()\ntime.sleep(9)",
        "wrote more files",
        outcome=STOPPED,
    ),
    flagged(
        "every descriptor",
        "",
        "kept = [open('/dev/null') for _ in range(5000)]",
        "Too many open files",
        outcome=WRONG,
    ),
    # Leaving.
    flagged("sys.exit", "import sys", "sys.exit(3)", "status 1", outcome=STOPPED),
    flagged("os._exit", "import os", "os._exit(3)", "the process with status 3", outcome=STOPPED),
    flagged(
        "os._exit at once", "import os\ny = os._exit(0)", GOOD, "with status 0", outcome=STOPPED
    ),
    flagged("SIGSEGV", "import ctypes", "ctypes.string_at(0)", "SIGSEGV", outcome=STOPPED),
    flagged(
        "kills everybody",
        "import os",
        "for p in (os.getppid(), -1):\n    os.kill(p, 9)\n" + GOOD,
        "the process was ended",
        outcome=STOPPED,
    ),
    # Words that would do something where they are read.
    Case("a huge message", "", "raise ValueError('long ' * 10**6)", WRONG, ("long long",)),
    Case(
        "a message for a terminal, a page and a spreadsheet",
        "",
        "raise ValueError('\\x1b[2J\\x07<script>alert(1)</script>\\r\\n\\x00\\u202e=1+1')",
        WRONG,
        ("ValueError: ", "<script>alert(1)</script>"),
    ),
    flagged(
        "a flag that is too long",
        "\n".join(f"import os as {'o' * 60}{n}" for n in range(6)),
        GOOD,
        outcome=RIGHT,
    ),
]
PLACES = {case.name: place for place, case in enumerate(CASES, start=2)}
ALWAYS_RAISES = cell("01.98", "double_98(x)", "raise ValueError")


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
        shutil.copytree(ROOT / "shared", course / "shared", ignore=shutil.ignore_patterns("__py*"))
        (course / "lessons" / "01_toy").mkdir(parents=True)
        (course / "lessons" / "01_toy" / "checks.py").write_text(CHECKS)
        facts = {
            "OUTSIDE": str(self.outside),
            "SOCKET": str(folder / "socket"),
            "PORT": self.server.getsockname()[1],
            "SOLUTION": str(ROOT / "solutions" / "grade.py"),
        }
        cells = {"01.1": HONEST["01.1"]}
        cells |= {f"01.{n}": CASES[n - 2].source(n, facts) for n in PLACES.values()}
        cells |= {"01.98": ALWAYS_RAISES, "01.99": HONEST["01.99"]}
        exercises = [Exercise("01.1", "label", 1), Exercise("01.99", "label_2", 1)]
        numbers = [*PLACES.values(), 98]
        exercises[1:1] = [Exercise(f"01.{n}", f"double_{n}", 2) for n in numbers]
        stub = "raise NotImplementedError"
        lesson = Lesson(
            "01",
            "01_toy",
            tuple(exercises),
            SETUP,
            {each.id: cell(each.id, f"{each.name}(x)", stub) for each in exercises},
            "toy",
            {f"01.{n}": (FORBIDDEN,) for n in numbers},
            {
                f"01.{n}": (("it squares", cell(f"01.{n}", f"double_{n}(x)", "return x * x")),)
                for n in numbers
            },
        )
        self.workspace = Workspace(course)
        with self.workspace:
            graded = self.workspace.grade(Answers("x", "01", cells, {}), lesson, LIMITS)
            self.left = {path.name for path in self.workspace.folder.iterdir()}
            folder = str(self.workspace.folder)
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


@pytest.mark.parametrize("case", CASES, ids=PLACES)
def test_each_attack_ends_in_its_row(graded, case):
    number = PLACES[case.name]
    found = graded.verdicts[f"01.{number}"]
    row = reason(found)
    said = "; ".join([row, *found.flags])  # a long row cuts its flags, the page does not
    assert found.outcome is case.outcome, row
    assert all(each.replace("NUMBER", str(number)) in said for each in case.says), said
    assert found.points == case.points
    texts = [found.message, found.title, found.mistake, found.expected, found.seen, found.hint]
    texts += [*found.also, *found.flags, row]
    assert all(text.isprintable() for text in texts)
    assert len(row) <= 300


@pytest.mark.parametrize("id", HONEST)
def test_honest_answers_before_and_after_attacks_lose_nothing(graded, id):
    found = graded.verdicts[id]
    assert (found.points, found.outcome, found.flags) == (1.0, RIGHT, ()), found


def test_an_answer_that_always_refuses_earns_nothing(graded):
    found = graded.verdicts["01.98"]
    assert (found.passed, found.total, found.points) == (1, 3, 0.0), found


def test_nothing_remains(graded):
    assert list(graded.outside.iterdir()) == []
    assert graded.outside.stat().st_mode & 0o777 == 0o755
    assert graded.left == {"course", "caches"}
    assert graded.processes == []
