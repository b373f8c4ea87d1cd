"""Answers that try to harm, to hide or to cheat: each ends in its row, and costs nobody else.

Attacks of one kind are the exercises of one student's notebook, between two honest ones, and are
graded as a class, two notebooks at a time. Every attack is bounded by itself (processes, bytes,
time, loopback only), so that a limit that fails harms nobody.
"""

import shutil
import socket
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from solutions.grading.reports.table import reason
from solutions.grading.results import Answers, Exercise, Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox.confine import find_layers
from solutions.grading.sandbox.run import Workspace

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1500)  # the first test waits for its turn in the class
SETUP = """import math
import torch
from torch import Tensor, nn
from shared.exercises.notebook import check, exercise
"""
CHECKS = """import torch
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_close, expect_equal
from shared.exercises.seeds import fresh_generator


def small(label):
    expect_equal(label(3), "n = 3", what="label(3)")


def values(double):
    x = torch.randn(5, generator=fresh_generator())
    expect_close(double(x), x + x, what="the double", looks_like={"it squares": x * x})


def dimensions(double):
    expect_equal(double(torch.ones(2, 3)).ndim, 2, what="the number of dimensions")


def a_list(total):
    expect_equal(total([1, 2, 3]), 6, what="total([1, 2, 3])")


e1 = checks_for("01.1", name="label", difficulty=1, minutes=5, hints=["an f-string"])
e1.check("a small number")(small)
for n in range(2, 99):
    each = checks_for(f"01.{n}", name=f"double_{n}", difficulty=2, minutes=5, hints=["x + x"])
    each.check("random values")(values)
    each.check("the number of dimensions")(dimensions)
    globals()[f"e{n}"] = each
e99 = checks_for("01.99", name="total", difficulty=1, minutes=5, hints=["sum"])
e99.check("a list")(a_list)
"""


def cell(id: str, head: str, body: str) -> str:
    return f'@exercise("{id}")\ndef {head}:\n' + "\n".join(f"    {x}" for x in body.split("\n"))


FIRST, LAST = Exercise("01.1", "label", 1), Exercise("01.99", "total", 1)
HONEST = {
    "01.1": cell("01.1", "label(n)", 'return f"n = {n}"'),
    "01.99": cell("01.99", "total(xs)", "return sum(xs)"),
}
STUB = cell("01.2", "double(x)", "raise NotImplementedError")


@dataclass(frozen=True)
class Case:
    """An attack and its row: `says` must all stand in it.

    It is written as an answer to exercise 01.2, `double`; `placed` gives it a place of its own.
    """

    name: str
    source: str
    outcome: Outcome
    says: tuple[str, ...]
    points: float = 0.0


def placed(text: str, number: int) -> str:
    """A text about 01.2 as one about the exercise of that number."""
    text = text.replace("01.2", f"01.{number}").replace("double(", f"double_{number}(")
    return text.replace("key=double", f"key=double_{number}").replace(".e2.", f".e{number}.")


def code(text: str) -> str:
    """A piece of a cell, written here with the indentation of its surroundings."""
    return textwrap.dedent(text).strip()


def answer(body: str, before: str = "") -> str:
    """The attacked exercise with this body; `before` stands above it in the cell."""
    return (before + "\n" if before else "") + cell("01.2", "double(x)", body)


WRONG, STOPPED, RIGHT, PARTLY = Outcome.WRONG, Outcome.STOPPED, Outcome.RIGHT, Outcome.PARTLY
UNSOLVED = Outcome.UNSOLVED
ZERO = "return torch.zeros_like(x)"
LOOK = "needs a look: "
SPOILT = "what judges it was changed"

# Seconds an exercise: those that use them up all should not use up ours.
LIMITS = {
    "beside honest answers": Limits(exercise_seconds=40.0),
    "time": Limits(exercise_seconds=10.0),
    "memory, output and files": Limits(exercise_seconds=40.0),
    "leaving": Limits(exercise_seconds=40.0),
    "changing what judges": Limits(exercise_seconds=40.0),
}
GROUPS = {
    # Honest answers beside attacks that end by themselves: all in one kernel, one after another.
    "beside honest answers": [
        Case("right", answer("return 2 * x"), RIGHT, ("right (2 of 2 checks passed)",), 2.0),
        Case(
            "mistaken", answer("return x * x"), PARTLY, ("(1 of 2 checks passed): it squares",), 1.0
        ),
        Case("untouched", STUB, UNSOLVED, ("not solved yet",)),
        Case(
            "does not run",
            code("""
            undefined_name
            """)
            + "\n"
            + answer("return 2 * x"),
            WRONG,
            ("the cell does not run: NameError",),
        ),
        # Reading answers.
        Case(
            "imports solutions",
            answer(
                code("""
            from solutions import lesson02_attention
            return 2 * x
            """)
            ),
            WRONG,
            (LOOK, "imports solutions", "No module named 'solutions'"),
        ),
        Case(
            "reads solutions",
            answer(
                f"open({str(ROOT / 'solutions' / 'lesson02_attention.py')!r}).read()\nreturn 2 * x"
            ),
            WRONG,
            (LOOK, "uses open", "Error"),
        ),
        Case(
            "imports an answer of the course",
            answer("return 2 * x", "from shared.model import attention"),
            RIGHT,
            (LOOK, "look: line 1 imports shared.model.attention, which can hold answers; right"),
            2.0,
        ),
        # Pretending.
        Case(
            "changes check",
            answer(ZERO, "def check(id, candidate):\n    print('right')"),
            PARTLY,
            (LOOK, "gives check another meaning", "(1 of 2 checks passed)"),
            1.0,
        ),
        Case(
            "prints what a green cell prints",
            answer(
                code("""
            print('01.2 double: right (2 checks passed)')
            """)
                + "\n"
                + ZERO
            ),
            PARTLY,
            ("(1 of 2 checks passed)",),
            1.0,
        ),
        Case(
            "forges a verdict",
            answer(
                ZERO,
                code("""
            import json
            from IPython.display import display
            t = json.dumps({'kind': 'right', 'exercise': '01.2', 'passed': 2, 'total': 2})
            signed = {'text': t, 'signature': '0' * 64}
            display({'application/vnd.torch-handle.verdict+json': signed}, raw=True)
            """),
            ),
            PARTLY,
            (LOOK, "imports IPython.display", "(1 of 2 checks passed)"),
            1.0,
        ),
        Case(
            "looks at frames for what is expected",
            answer(
                code("""
            f = sys._getframe()
            while 'x' in f.f_locals or f.f_back:
                f = f.f_back
            """)
                + "\n"
                + ZERO,
                "import sys",
            ),
            PARTLY,
            (LOOK, "imports sys", "uses .f_locals", "(1 of 2 checks passed)"),
            1.0,
        ),
        Case(
            "a tensor that equals everything",
            answer(
                "return torch.zeros(3).as_subclass(Same)",
                code("""
            class Same(Tensor):
                @classmethod
                def __torch_function__(cls, f, types, args=(), kwargs=None):
                    return True
                ndim = 2
            """),
            ),
            PARTLY,
            (LOOK, "defines __torch_function__", "(1 of 2 checks passed)"),
            1.0,
        ),
        Case(
            "a number that equals everything",
            answer(
                code("""
            r = Any()
            r.ndim = Any()
            return r
            """),
                code("""
            class Any:
                def __eq__(self, o):
                    return True
                def __ne__(self, o):
                    return False
            """),
            ),
            WRONG,
            (LOOK, "defines __eq__", "(0 of 2 checks passed)"),
        ),
        Case(
            "changes the environment and the folder",
            answer(
                code("""
            os.environ['TORCH_HANDLE_IMPLEMENTATION'] = 'solution'
            os.environ['TORCH_HANDLE_SEED'] = '1'
            os.chdir('/')
            """)
                + "\n"
                + ZERO,
                "import os",
            ),
            PARTLY,
            (LOOK, "imports os"),
            1.0,
        ),
        Case(
            "changes the dice",
            answer(
                code("""
            torch.manual_seed(0)
            random.seed(0)
            return 2 * x
            """),
                "import random",
            ),
            WRONG,
            ("the global seed is set", "(0 of 2 checks passed)"),
        ),
        Case(
            "a fault that counts as none",
            answer(
                "raise Nothing('right')",
                code("""
                from shared.exercises.wrong import Wrong
                class Nothing(Wrong):
                    def __len__(self):
                        return 0
                """),
            ),
            WRONG,
            (LOOK, "imports shared.exercises.wrong.Wrong", "(0 of 2 checks passed)"),
        ),
        # Reaching out.
        Case(
            "a socket on loopback",
            answer(
                code("""
            s = socket.create_server(('127.0.0.1', 0))
            c = socket.create_connection(s.getsockname())
            c.close(); s.close()
            return 2 * x
            """),
                "import socket",
            ),
            RIGHT,
            (LOOK, "imports socket"),
            2.0,
        ),
        Case(
            "connects to a server of the machine",
            answer(
                code("""
            socket.create_connection(('127.0.0.1', PORT), 2)
            return 2 * x
            """),
                "import socket",
            ),
            WRONG,
            (LOOK, "imports socket", "Connection refused"),
        ),
        Case(
            "connects to the outside",
            answer(
                code("""
            socket.create_connection(('192.0.2.1', 80), 2)
            return 2 * x
            """),
                "import socket",
            ),
            WRONG,
            (LOOK, "imports socket", "Network is unreachable"),
        ),
        Case(
            "writes to the home folder",
            answer(
                code("""
            Path.home().joinpath('was_here').write_text('x')
            open(HOME + '/was_here', 'w')
            return 2 * x
            """),
                "from pathlib import Path",
            ),
            WRONG,
            (LOOK, "imports pathlib", "Error"),
        ),
        Case(
            "writes outside",
            answer(
                code("""
            open(OUTSIDE + '/was_here', 'w')
            return 2 * x
            """)
            ),
            WRONG,
            (LOOK, "uses open", "Error"),
        ),
        Case(
            "leaves a link to the outside behind",
            answer(
                code("""
            if not os.path.lexists('link'):
                os.symlink(OUTSIDE, 'link')
                os.mkdir('closed', 0)
            return 2 * x
            """),
                "import os",
            ),
            RIGHT,
            (LOOK, "imports os"),
            2.0,
        ),
        # Staying behind.
        Case(
            "a process that leaves its parent",
            answer(
                code("""
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(60)
                os._exit(0)
            return 2 * x
            """),
                "import os, time",
            ),
            RIGHT,
            (LOOK, "left processes running, which were ended"),
            2.0,
        ),
        Case(
            "a child that nobody waits for",
            answer(
                code("""
                if os.fork() == 0:
                    os._exit(0)
                time.sleep(0.2)
                return 2 * x
                """),
                "import os, time",
            ),
            RIGHT,
            ("look: line 1 imports os; line 4 uses os.fork; line 5 uses os._exit; right",),
            2.0,
        ),
        Case(
            "a rank that never joins",
            answer(
                code("""
            run_ranks(stay, 2, timeout=3.0)
            return 2 * x
            """),
                code("""
            import time
            from shared.ranks.forked import run_ranks
            def stay(rank):
                time.sleep(60 * rank)
            """),
            ),
            WRONG,
            (
                LOOK,
                "imports shared.ranks.forked.run_ranks",
                "RankFailed",
                "ranks [1] of 2 were not back",
            ),
        ),
        Case(
            "ranks that are left",
            answer(
                code("""
            global left
            left = [mp.get_context('fork').Process(target=time.sleep, args=(60,)) for _ in range(4)]
            for each in left:
                each.start()
            return 2 * x
            """),
                "import multiprocessing as mp, time",
            ),
            RIGHT,
            (LOOK, "imports multiprocessing", "left processes running, which were ended"),
            2.0,
        ),
        Case(
            "an exit handler",
            answer(
                code("""
            atexit.register(print, 'right' * 999)
            return 2 * x
            """),
                "import atexit",
            ),
            RIGHT,
            (LOOK, "imports atexit"),
            2.0,
        ),
        # Words that would do something where they are read.
        Case(
            "a huge message",
            answer("raise ValueError('long ' * 10**6)"),
            WRONG,
            ("ValueError: long long",),
        ),
        Case(
            "a message for a terminal, a page and a spreadsheet",
            answer(
                code("""
            terminal, page = '\\x1b[2J\\x1b]0;owned\\x07', '<script>alert(1)</script>'
            raise ValueError(terminal + page + '\\r\\n\\x00\\u202e=1+1')
            """)
            ),
            WRONG,
            ("ValueError: ", "<script>alert(1)</script>"),
        ),
    ],
    # Using up time.
    "time": [
        Case(
            "endless loop",
            answer(
                code("""
            while True:
                pass
            """)
            ),
            STOPPED,
            ("took longer than 10 s",),
        ),
        Case(
            "endless loop that swallows the interrupt",
            answer(
                code("""
            while True:
                try:
                    time.sleep(0.2)
                except BaseException:
                    pass
            """),
                "import time",
            ),
            STOPPED,
            ("took longer than 10 s",),
        ),
        Case(
            "1 GB past Python's print",
            answer(
                code("""
            for _ in range(2**10):
                os.write(1, b'x' * 2**20)
            return 2 * x
            """),
                "import os",
            ),
            STOPPED,
            (LOOK, "imports os", "stopped: "),
        ),
    ],
    # Using up memory, processes, output, files.
    "memory, output and files": [
        Case(
            "fork bomb",
            answer(
                code("""
            for n in range(300):
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
            return 2 * x
            """),
                "import os, time",
            ),
            WRONG,
            (LOOK, "imports os", "left processes running, which were ended", "BlockingIOError"),
        ),
        Case(
            "10 GB tensor",
            answer(
                code("""
            torch.ones(10 * 2**28)
            return 2 * x
            """)
            ),
            WRONG,
            ("can't allocate memory",),
        ),
        Case(
            "10 GB of Python",
            answer(
                code("""
            bytearray(10 * 2**30)
            return 2 * x
            """)
            ),
            WRONG,
            ("MemoryError",),
        ),
        Case("deep recursion", answer("return double(x)"), WRONG, ("RecursionError",)),
        Case(
            "1 GB print",
            answer(
                code("""
            print('x' * 2**30)
            return 2 * x
            """)
            ),
            STOPPED,
            ("printed more than 1 MiB",),
        ),
        Case(
            "many small prints",
            answer(
                code("""
            for _ in range(2**14):
                print('x' * 2**16)
            return 2 * x
            """)
            ),
            STOPPED,
            ("printed more than 1 MiB",),
        ),
        Case(
            "deep recursion without Python's limit",
            answer(
                "return max([x, x], key=double)",
                code("""
            import sys
            sys.setrecursionlimit(10**6)
            """),
            ),
            STOPPED,
            (LOOK, "imports sys", "the process was ended by SIGSEGV"),
        ),
        Case(
            "a large file",
            answer(
                code("""
            with open('f', 'wb') as f:
                for _ in range(200):
                    f.write(b'x' * 2**20)
            return 2 * x
            """)
            ),
            WRONG,
            (LOOK, "uses open", "File too large"),
        ),
        Case(
            "many files",
            answer(
                code("""
            for i in range(6000):
                open(f'f{i}', 'w').close()
            return 2 * x
            """)
            ),
            STOPPED,
            (LOOK, "uses open", "wrote more than 256 MiB or 4096 files"),
        ),
        Case(
            "every file descriptor",
            answer(
                code("""
            global kept
            kept = [open('/dev/null') for _ in range(5000)]
            return 2 * x
            """)
            ),
            WRONG,
            (LOOK, "uses open", "Too many open files"),
        ),
    ],
    # Leaving.
    "leaving": [
        Case("sys.exit", answer("sys.exit(3)", "import sys"), STOPPED, (LOOK, "SystemExit: 3")),
        Case(
            "os._exit",
            answer("os._exit(3)", "import os"),
            STOPPED,
            ("left the process with status 3",),
        ),
        Case(
            "os._exit at once",
            code("""
            import os
            os._exit(0)
            """)
            + "\n"
            + answer("return 2 * x"),
            STOPPED,
            ("with status 0",),
        ),
        Case(
            "segmentation fault",
            answer("ctypes.string_at(0)", "import ctypes"),
            STOPPED,
            ("SIGSEGV",),
        ),
        Case(
            "kills its parent and everybody",
            answer(
                code("""
            for p in (os.getppid(), 1, -1):
                with contextlib.suppress(OSError):
                    os.kill(p, 9)
            return 2 * x
            """),
                "import os, contextlib",
            ),
            RIGHT,
            (LOOK, "imports os"),
            2.0,
        ),
    ],
    # Changing what judges.
    "changing what judges": [
        Case(
            "changes torch.allclose",
            answer(ZERO, "torch.allclose = lambda *a, **k: True"),
            WRONG,
            (LOOK, "changes torch.allclose", "torch.allclose was replaced", SPOILT),
        ),
        Case(
            "changes torch while it is judged",
            answer(
                code("""
            setattr(torch, 'all' + 'close', lambda *a, **k: True)
            """)
                + "\n"
                + ZERO
            ),
            WRONG,
            (LOOK, "torch.allclose was replaced", SPOILT),
        ),
        Case(
            "changes the course's comparison",
            answer(
                ZERO,
                code("""
            import shared.exercises.expecting
            shared.exercises.expecting.expect_close = lambda *a, **k: None
            """),
            ),
            WRONG,
            (LOOK, "shared.exercises.expecting.expect_close was replaced", SPOILT),
        ),
        Case(
            "changes the code of the comparison",
            answer(
                ZERO,
                code("""
            from shared.exercises import comparing
            comparing.close.__code__ = (lambda a, b, c, d: True).__code__
            """),
            ),
            WRONG,
            (LOOK, "shared.exercises.comparing.close was replaced", SPOILT),
        ),
        Case(
            "changes the checks themselves",
            answer(
                ZERO,
                code("""
            import sys
            sys.modules['_checks_of_lesson_01'].e2.checks.clear()
            """),
            ),
            WRONG,
            (LOOK, "imports sys", "the check 01.2 'random values' was removed", SPOILT),
        ),
        Case(
            "changes builtins",
            answer(
                ZERO,
                code("""
            import builtins
            builtins.all = lambda a: True
            """),
            ),
            WRONG,
            (LOOK, "imports builtins", "builtins.all was replaced", SPOILT),
        ),
        Case(
            "takes modules away",
            answer(
                ZERO,
                code("""
            import sys
            for n in ('torch', 'shared.exercises.expecting'):
                sys.modules[n] = sys
            """),
            ),
            WRONG,
            (LOOK, "imports sys", SPOILT),
        ),
        Case(
            "patched time",
            answer(
                ZERO,
                code("""
            import time
            time.time = lambda: 0.0
            """),
            ),
            WRONG,
            (LOOK, "time.time was replaced", SPOILT),
        ),
        Case(
            "rewrites things later",
            answer(
                ZERO,
                code("""
            import threading
            threading.Timer(0.0, lambda: setattr(torch, 'allclose', lambda *a, **k: True)).start()
            """),
            ),
            WRONG,
            (LOOK, "imports threading"),
        ),
    ],
}


CASES = [(kind, case) for kind, cases in GROUPS.items() for case in cases]


class Class:
    """A notebook for each kind of attack, handed in at once."""

    def __init__(self, folder: Path) -> None:
        self.outside = folder / "outside"
        self.outside.mkdir(mode=0o777)
        self.outside.chmod(0o755)
        self.server = socket.create_server(("127.0.0.1", 0))
        course = folder / "course"
        shutil.copytree(ROOT / "shared", course / "shared", ignore=shutil.ignore_patterns("__py*"))
        lesson = course / "lessons" / "01_toy"
        lesson.mkdir(parents=True)
        (lesson / "checks.py").write_text(CHECKS)
        self.workspace = Workspace(course, slots=2)
        self.pool = ThreadPoolExecutor(2)

    def hand_in(self, chosen: list[tuple[str, Case]]) -> None:
        """Grade the chosen cases, those of one kind in one notebook."""
        self.workspace.__enter__()
        kinds: dict[str, list[Case]] = {}
        for kind, case in chosen:
            kinds.setdefault(kind, []).append(case)
        self.results = {
            kind: self.pool.submit(self._grade, kind, cases) for kind, cases in kinds.items()
        }
        self.places = {
            case.name: n for cases in kinds.values() for n, case in enumerate(cases, start=2)
        }

    def _grade(self, kind: str, cases: list[Case]) -> dict[str, Verdict]:
        facts = {
            "OUTSIDE": str(self.outside),
            "HOME": str(Path.home()),
            "PORT": self.server.getsockname()[1],
        }
        cells, stubs = dict(HONEST), dict(HONEST)
        exercises = [FIRST]
        for n, case in enumerate(cases, start=2):
            source = case.source
            for name, value in facts.items():
                source = source.replace(name, repr(value))
            cells[f"01.{n}"], stubs[f"01.{n}"] = placed(source, n), placed(STUB, n)
            exercises.append(Exercise(f"01.{n}", f"double_{n}", 2))
        lesson = Lesson("01", "01_toy", (*exercises, LAST), SETUP, stubs, "toy")
        verdicts = self.workspace.grade(Answers(kind, "01", cells, {}), lesson, LIMITS[kind])
        return {each.exercise: each for each in verdicts}

    def verdict(self, kind: str, case: Case) -> Verdict:
        """What came of an attack."""
        return self.results[kind].result()[f"01.{self.places[case.name]}"]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.workspace.__exit__()
        self.server.close()


@pytest.fixture(scope="module")
def graded(request, tmp_path_factory):
    """The class with those cases that were chosen (pytest -k)."""
    layers = find_layers()
    if not (layers.landlock and layers.namespaces and layers.mounts):
        pytest.skip(f"this machine does not isolate fully: {layers}")
    found = Class(tmp_path_factory.mktemp("hostile"))
    own = [item for item in request.session.items if item.path == request.path]
    calls = [call.params for item in own if (call := getattr(item, "callspec", None))]
    found.hand_in([(each["kind"], each["case"]) for each in calls if "case" in each])
    yield found
    found.close()


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[case.name for _, case in CASES])
def test_each_attack_ends_in_its_row(graded, kind, case):
    found = graded.verdict(kind, case)
    row = reason(found)
    number = graded.places[case.name]
    said = "; ".join([row, *found.flags])  # a long row cuts its flags, the page does not
    assert all(placed(each, number) in said for each in case.says), said
    assert found.outcome is case.outcome, row
    assert found.points == case.points
    texts = [found.message, found.title, found.mistake, found.expected, found.seen, found.hint]
    texts += [*found.also, *found.flags, row]
    assert all(text.isprintable() for text in texts)
    assert str(graded.workspace.folder) not in " ".join(texts)
    assert len(row) <= 300


@pytest.mark.parametrize("kind", GROUPS)
def test_honest_answers_before_and_after_attacks_lose_nothing(graded, kind):
    if kind not in graded.results:
        pytest.skip("none of its attacks was chosen")
    verdicts = graded.results[kind].result()
    for each in (verdicts[FIRST.id], verdicts[LAST.id]):
        assert (each.points, each.outcome, each.flags) == (1.0, RIGHT, ()), each


def test_there_are_thirty_cases_and_more():
    assert len({case.name for _, case in CASES}) == len(CASES) >= 30


def test_nothing_remains(graded):
    for result in graded.results.values():
        result.result()
    assert list(graded.outside.iterdir()) == []
    assert not (Path.home() / "was_here").exists()
    assert {path.name for path in graded.workspace.folder.iterdir()} == {"course", "caches"}
    folder = str(graded.workspace.folder)
    left = [p for p in psutil.process_iter() if folder in " ".join(_command(p))]
    assert left == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
