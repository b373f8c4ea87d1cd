"""run_all.sh in a small tree of its own: stub lessons, torchrun, pytest and pip."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.cli import setup, todo
from shared.cli.command import UsageError, parse
from shared.cli.display import Display, Result
from shared.cli.machine import num_cores
from shared.cli.runner import measures_time, say_count, say_problem
from shared.cli.torch_build import VARIABLE
from shared.ranks.processes import Outcome, supervise

ROOT = Path(__file__).resolve().parents[2]

# Starts the ranks the way torchrun does, each in a session of its own, and ends without them if it
# is killed: what run_all.sh has to cope with.
TORCHRUN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
nproc = next(int(w.split("=")[1]) for w in sys.argv if w.startswith("--nproc_per_node="))
words = [w for w in sys.argv[1:] if not w.startswith(("--nproc", "--standalone"))]
ranks = [
    subprocess.Popen([sys.executable, *words], start_new_session=True,
                     env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(nproc)})
    for rank in range(nproc)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""

SCRIPT = """
import argparse, json, os, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--preset", default="small")
parser.add_argument("--device")
args = parser.parse_args()
world_size = int(os.environ["WORLD_SIZE"])
def finish(world_size=world_size):
    record = {"lesson": args.out.name, "world_size": world_size, "device": "cpu", "backend": "gloo",
              "torch": "2", "seconds": 0.1, "headline": f"preset {args.preset}",
              "run": os.environ["TORCH_HANDLE_RUN"],
              "table": [{"variant": "a", "loss": 0.5}]}
    if os.environ["RANK"] == "0":
        (args.out / "metrics.json").write_text(json.dumps(record))
"""
# A lesson that ends only beside another such one, and one that passes only if it was alone.
MEETS = """
(args.out / f"here{os.environ['RANK']}").touch()
while len([*args.out.parent.glob("*_meets/here*")]) < 2 * world_size: time.sleep(0.02)
finish()
"""
TIMED = """
(args.out / f"here{os.environ['RANK']}").touch()
time.sleep(0.3)
others = [each.parent for each in args.out.parent.glob("*/here*") if each.parent != args.out]
finish()
sys.exit(not all((each / "metrics.json").exists() for each in others))  # timed: alone
"""
BODIES = {
    "lesson01_good": "finish()",
    "lesson02_bad": "print('the last words'); sys.exit(3)",
    "lesson03_alone": "finish(world_size=1)",
    "lesson04_silent": "pass",
    "lesson05_slow": "print('asleep', flush=True); time.sleep(120)",
    "lesson06_leaves": "finish(); subprocess.Popen(['sleep', '120'], start_new_session=True)",
    "lesson07_timed": TIMED,
    "lesson08_meets": MEETS,
    "lesson09_meets": MEETS,
    "lesson10_timed": TIMED,
    "lesson11_slow": "print('asleep', flush=True); time.sleep(120)",
}

AT_ONCE = min(8, num_cores() + 1)  # processes of pytest

# A pytest that says how it was called.
PYTEST = """
import os, sys
print(os.environ.get("TORCH_HANDLE_IMPLEMENTATION", "unset"), *sys.argv[1:])
sys.exit(5 if os.environ["CUDA_VISIBLE_DEVICES"] == "" else "tests fork ranks: no GPU for them")
"""

# A Python whose venv and pip do nothing but write down that they were called.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "home = x" > "$3/pyvenv.cfg"
        echo venv >> calls.txt ;;
    "-m pip --version") echo "pip 1" ;;
    "-m pip install "*)
        echo "pip" >> calls.txt
        test -z "$STUB_PIP_SLEEPS" || { echo "Collecting torch"; sleep 120; }
        test -z "$STUB_PIP_FAILS" || { echo "no network"; exit 1; } ;;
    "-m shared.cli.command"*)
        shift 2
        exec REAL -c 'import runpy, sys
sys._base_executable = "BASE"
runpy.run_module("shared.cli.command", run_name="__main__")' "$@" ;;
    *) exec REAL "$@" ;;
esac
"""


class Tree:
    """A copy of what run_all.sh needs, with lessons of a line each."""

    def __init__(self, root: Path, lessons: tuple[str, ...]) -> None:
        self.root = root
        self.programs = root / "programs"
        for folder in ("shared", "lessons", "programs", "torch/distributed"):
            (root / folder).mkdir(parents=True)
        shutil.copy(ROOT / "run_all.sh", root)
        for package in ("cli", "ranks"):
            shutil.copytree(ROOT / "shared" / package, root / "shared" / package)
        shutil.copy(ROOT / "shared" / "__init__.py", root / "shared")
        listing = "[project]\ndependencies = []\n[project.optional-dependencies]\ndev = []\n"
        (root / "pyproject.toml").write_text(listing)
        (root / "torch/__init__.py").write_text(
            "class cuda:\n    device_count = staticmethod(lambda: 0)\n"
        )
        (root / "torch/distributed/__init__.py").touch()
        (root / "torch/distributed/run.py").write_text(TORCHRUN)
        for lesson in lessons:
            (root / "lessons" / lesson).mkdir()
            (root / "lessons" / lesson / "train.py").write_text(SCRIPT + BODIES[lesson])
        # Nothing but these and the system's own: no other python3.12 is found by chance.
        for name in ("dirname", "cat", "sh", "bash", "mkdir", "cp", "sleep", "test", "echo"):
            found = shutil.which(name)
            if found:
                (self.programs / name).symlink_to(found)

    def add_program(self, name: str, text: str) -> None:
        """Put a shell script on PATH."""
        path = self.programs / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def add_python(self, name: str = "python3") -> None:
        """Put the Python that plays venv and pip on PATH."""
        base = str(self.programs / name)
        self.add_program(name, PYTHON.replace("REAL", sys.executable).replace("BASE", base))

    def start(self, *words: str, **env: str) -> subprocess.Popen:
        """Start run_all.sh as a new user's shell would, without our environment."""
        clean = {"PATH": str(self.programs), "HOME": str(self.root), "COURSE_TEST": str(self.root)}
        clean["TORCH_INDEX_URL"] = ""  # whatever GPU is here: pip's ordinary torch
        return subprocess.Popen(
            ["./run_all.sh", *words],
            cwd=self.root,
            env={**clean, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess:
        """Run run_all.sh to its end."""
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def run_lessons(self, *words: str) -> subprocess.CompletedProcess:
        """Run stub lessons in the environment that these tests run in."""
        return self.run("--no-setup", *words, PYTHON=sys.executable)

    def calls(self) -> list[str]:
        """What the fake Python was asked to do since the last look."""
        path = self.root / "calls.txt"
        calls = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return calls

    def leftovers(self) -> list[str]:
        """Command lines of the processes that carry this tree's marker."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"COURSE_TEST={self.root}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.fixture
def tree(tmp_path):
    """A function that makes a tree with the given stub lessons."""
    return lambda *lessons: Tree(tmp_path / "course", lessons)


def wait_for(path: Path, text: str = "") -> None:
    """Wait until a file holds a text."""
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path} never held {text!r}"
        time.sleep(0.05)


def test_a_line_a_lesson_and_failures_do_not_stop_the_others(tree):
    course = tree("lesson01_good", "lesson02_bad", "lesson03_alone", "lesson04_silent")
    stale = course.root / "runs" / "lesson04_silent"
    stale.mkdir(parents=True)
    (stale / "metrics.json").write_text(json.dumps({"world_size": 2, "headline": "of old"}))
    done = course.run_lessons()
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert any(line.startswith("lesson01_good") and "pass  preset small" in line for line in lines)
    assert any("lesson02_bad" in line and "FAIL  exit status 3" in line for line in lines)
    assert "    | the last words" in lines
    assert any("FAIL  ran with 1 rank(s), 2 were asked for" in line for line in lines)
    assert any("lesson04_silent" in line and "wrote no metrics.json" in line for line in lines)
    assert "1 of 4 lessons passed" in done.stdout
    page = (course.root / "runs" / "report.html").read_text()
    assert page.count('class="chip fail"') == 6  # three in the overview, three in their sections
    assert "the last words" in page


@pytest.mark.parametrize("said", ["error: {}", "  traceback : error: {}"])  # rank 0, any other
def test_an_open_exercise_is_named_whichever_rank_met_it(said):
    words = "exercise 01.2 (PositionalEncoding) is not solved yet"
    log = f"rank 0 trains: none\n{said.format(words)}, and this script uses it: solve it\n"
    assert say_problem(Outcome(1, 3.0), log) == words


def test_an_open_exercise_is_no_failure_and_needs_no_log(tmp_path, capsys):
    words = "exercise 01.2 (PositionalEncoding) is not solved yet"
    log = tmp_path / "run.log"
    log.write_text(f"rank 0 trains: none\nerror: {words}, and this script uses it\n", "utf-8")
    (result,) = results = [Result("lesson01_x", 3.0, "", words, str(log), "")]
    Display(["lesson01_x"]).done(result)
    assert capsys.readouterr().out == f"lesson01_x     3.0 s  open  {words}\n"
    assert say_count(results, 1, 3.4) == "0 of 1 lessons passed in 3 s, 1 with an open exercise."


def test_a_terminal_without_escapes_gets_none(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for term, moves in (("dumb", False), ("xterm", True)):
        monkeypatch.setenv("TERM", term)
        assert Display(["lesson01_x"]).moves is moves
        assert todo.Printer(details=False).moves is moves


def test_named_lessons_and_their_options(tree):
    course = tree("lesson01_good", "lesson02_bad", "lesson04_silent")
    done = course.run_lessons("1", "--preset", "tiny", "--nproc=3")
    assert done.returncode == 0, done.stderr
    assert "preset tiny" in done.stdout
    assert "1 of 1 lessons passed" in done.stdout
    metrics = json.loads((course.root / "runs" / "lesson01_good" / "metrics.json").read_text())
    assert metrics["world_size"] == 3
    assert not (course.root / "runs" / "lesson02_bad").exists()


def test_results_go_where_they_are_wanted(tree):
    course = tree("lesson01_good")
    done = course.run_lessons("--out", "elsewhere/deep")
    assert done.returncode == 0, done.stderr
    assert (course.root / "elsewhere" / "deep" / "lesson01_good" / "run.log").exists()
    assert "01 good" in (course.root / "elsewhere" / "deep" / "report.html").read_text()
    assert not (course.root / "runs").exists()
    (course.root / "file").touch()
    done = course.run_lessons("--out", "file/x")
    assert done.returncode == 2
    assert done.stderr.startswith("run_all.sh: --out file/x: Not a directory: give a folder")


def test_lessons_at_once_and_those_that_measure_time_alone(tree):
    lessons = ("lesson07_timed", "lesson08_meets", "lesson09_meets", "lesson10_timed")
    course = tree(*lessons)
    done = course.run_lessons("--jobs", "3", "--time-limit", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split()[0] for line in done.stdout.splitlines() if "  pass  " in line]
    assert sorted(lines[:2]) == ["lesson08_meets", "lesson09_meets"]
    assert lines[2:] == ["lesson07_timed", "lesson10_timed"]
    assert ("--jobs 3: 6 ranks at once" in done.stdout) == (num_cores() < 6)
    page = (course.root / "runs" / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)">', page) == [*lessons]


def test_a_lesson_named_twice_is_run_once(tree):
    done = tree("lesson01_good").run_lessons("01", "lesson01_good", "--jobs", "9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 lessons passed" in done.stdout
    assert "ranks at once" not in done.stdout


def test_which_lessons_measure_time_is_read_from_their_scripts():
    assert measures_time("lesson05_collectives")
    assert not measures_time("lesson01_positional_encoding")


def test_the_bar_names_all_lessons_that_run(capsys):
    display = Display(["lesson08_meets", "lesson09_meets"])
    display.moves = True
    display.running("lesson08_meets", 1)
    display._drawn -= 1  # seconds
    display.running("lesson09_meets", 2)
    assert capsys.readouterr().out.endswith("0/2  lesson08_meets, 1 s; lesson09_meets, 2 s")


@pytest.mark.full
def test_a_lesson_that_takes_too_long_or_leaves_a_process_fails(tree):
    course = tree("lesson05_slow", "lesson06_leaves")
    done = course.run_lessons("--time-limit", "0.5")
    assert done.returncode == 1
    assert "lesson05_slow" in done.stdout
    assert "the time limit" in done.stdout
    done = course.run_lessons("06")
    assert "left 2 process(es) behind" in done.stdout
    assert course.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_stopping_leaves_no_process_and_keeps_what_was_done(tree, number):
    course = tree("lesson01_good", "lesson05_slow")
    process = course.start("--no-setup", PYTHON=sys.executable)
    wait_for(course.root / "runs" / "lesson05_slow" / "run.log", "asleep")
    assert len(course.leftovers()) == 4  # the runner, torchrun, two ranks
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "no process was left behind" in err
    assert "1 of 2 lessons passed" in out
    assert course.leftovers() == []
    assert (course.root / "runs" / "report.html").exists()


def test_stopping_several_lessons_leaves_no_process(tree):
    course = tree("lesson01_good", "lesson05_slow", "lesson11_slow", "lesson10_timed")
    process = course.start("--no-setup", "--jobs=2", PYTHON=sys.executable)
    for lesson in ("lesson05_slow", "lesson11_slow"):
        wait_for(course.root / "runs" / lesson / "run.log", "asleep")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "no process was left behind" in err
    assert "1 of 4 lessons passed" in out
    assert course.leftovers() == []


def test_ctrl_c_with_the_real_torchrun(tree):
    course = tree("lesson05_slow")
    shutil.rmtree(course.root / "torch")
    process = course.start("--no-setup", "--device=cpu", PYTHON=sys.executable)
    wait_for(course.root / "runs" / "lesson05_slow" / "run.log", "asleep")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert course.leftovers() == []


def test_wrong_words_get_one_line(tree):
    course = tree("lesson01_good")
    wrong = (["frobnicate"], ["07"], ["--fast"], ["doctor", "01"], ["setup", "--no-setup"])
    for words in (*wrong, ["todo", "--nproc", "2"], ["notebooks", "--watch"]):
        done = course.run(*words, PYTHON=sys.executable)
        assert done.returncode == 2, words
        assert re.fullmatch(r"run_all\.sh: .+ \(all words: \./run_all\.sh --help\)\n", done.stderr)
        assert done.stdout == ""
    assert not (course.root / ".venv").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--nproc", "0"], "0"),
        (["--nproc", "two"], "two"),
        (["--jobs", "0"], "0"),
        (["--jobs", "many"], "many"),
        (["--preset", "huge"], "huge"),
        (["--time-limit", "-1"], "-1"),
        (["99"], "99"),
        (["notebooks", "x"], "'x'"),
        (["todo", "x"], "'x'"),
        (["todo", "--time-limit", "nan"], "nan"),
    ],
)
def test_what_is_wrong_is_named(words, part):
    with pytest.raises(UsageError, match=part):
        parse(words)


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_is_given_wherever_it_is_asked_for(tree, word):
    course = tree()
    for words in ([word], ["--no-setup", word]):
        done = course.run(*words, PYTHON=sys.executable)
        assert done.returncode == 0
        assert "./run_all.sh todo" in done.stdout


def test_arguments_of_the_to_do_list():
    assert parse(["todo"]).arguments == ["--time-limit=60.0"]
    reading = ["notebooks", "5", "--mode", "reading", "--no-write"]
    assert parse(reading).arguments == ["lesson05_collectives", "--mode=reading", "--no-write"]
    command = parse(["todo", "2", "--watch", "-v", "--time-limit", "5"])
    assert command.action == "todo"
    assert command.arguments == ["lesson02_attention", "--watch", "--details", "--time-limit=5.0"]


def test_pytest_arguments_pass_through():
    command = parse(["test", "-k", "links", "--no-setup", "-x"])
    assert command.no_setup
    assert command.arguments == ["-k", "links", "-x"]


def test_no_python_and_old_pythons_are_said(tree):
    course = tree("lesson01_good")
    done = course.run("01")
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "found: nothing" in done.stderr
    course.add_program("python3", "#!/bin/sh\necho 3.9\n")
    done = course.run("01")
    assert done.returncode == 1
    assert "python3 is 3.9" in done.stderr
    assert "PYTHON=" in done.stderr
    done = course.run("01", PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "PYTHON=/nowhere/python" in done.stderr


def test_an_environment_without_the_course_is_told_how_to_get_it(tree):
    course = tree("lesson01_good")
    # A Python that finds what lies in its working folder and nothing else, as a fresh one would.
    base = getattr(sys, "_base_executable", sys.executable)
    course.add_program("python", f'#!/bin/sh\nexec {base} "$@"\n')
    done = course.run("--no-setup", "01")
    assert done.returncode == 1
    assert "pip install --no-deps -e ." in done.stderr
    assert course.run("doctor", "--no-setup").stdout.count("course       MISSING") == 1


def test_set_up_once_and_not_again(tree):
    course = tree("lesson01_good")
    course.add_python("python3.12")
    course.add_program("python3", "#!/bin/sh\necho 3.9\n")
    assert course.run("setup").returncode == 0
    assert course.calls() == ["venv", "pip"]
    done = course.run("setup")
    assert done.returncode == 0
    assert "set-up:" not in done.stdout
    assert course.calls() == []
    done = course.run("01")
    assert done.returncode == 0, done.stdout + done.stderr
    (course.root / "pyproject.toml").write_text('[project]\nname = "other"\n')
    done = course.run("setup")
    assert "the pinned packages changed" in done.stdout
    assert course.calls() == ["pip"]


def test_a_half_made_environment_is_mended(tree):
    course = tree("lesson01_good")
    course.add_python()
    done = course.run("setup", STUB_PIP_FAILS="yes")
    assert done.returncode == 1
    assert "no network" in done.stderr
    assert "run it again" in done.stderr
    done = course.run("setup")
    assert done.returncode == 0
    assert "unfinished" in done.stdout
    assert course.calls() == ["venv", "pip", "pip"]
    (course.root / ".venv" / "bin" / "python").unlink()
    (course.root / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.11")
    done = course.run("setup")
    assert done.returncode == 0
    assert "does not run" in done.stdout
    assert course.calls() == ["venv", "pip"]


def test_ctrl_c_during_set_up_leaves_no_process_and_the_next_one_completes_it(tree):
    course = tree("lesson01_good")
    course.add_python()
    process = course.start("setup", STUB_PIP_SLEEPS="yes")
    wait_for(course.root / "runs" / "setup.log", "Collecting torch")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert course.leftovers() == []
    assert "unfinished" in course.run("setup").stdout


def test_ctrl_c_while_a_program_is_being_started_leaves_nothing_of_it(tree, monkeypatch):
    course = tree()
    start = subprocess.Popen._execute_child

    def start_late(self, *args):  # as on a busy machine: the child runs before Popen has returned
        start(self, *args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", start_late)
    with pytest.raises(KeyboardInterrupt):
        supervise(["sleep", "120"], env={**os.environ, "COURSE_TEST": str(course.root)})
    assert course.leftovers() == []


def test_a_course_that_cannot_be_written_says_so_in_one_line(tree):
    course = tree("lesson01_good")
    (course.root / "runs").touch()
    done = course.run("setup", PYTHON=sys.executable)
    assert done.returncode == 1
    assert re.fullmatch(
        r"run_all\.sh: .* cannot be written .*--no-setup, with --out.*\n", done.stderr
    )


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "thesis.txt").touch()
    with pytest.raises(setup.SetupFailed, match="move it away"):
        setup.find_need(tmp_path)
    assert (tmp_path / ".venv" / "thesis.txt").exists()


def test_set_up_says_how_far_it_is_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup, "SAYS_EVERY", 0.3)
    (tmp_path / "runs").mkdir()
    aside = r"\n  Attempting uninstall: x\n    Uninstalling x:\n      Successfully uninstalled x"
    slow = f"import time; print('Installing torch{aside}', flush=True); time.sleep(1)"
    setup._step(tmp_path, "installing", [sys.executable, "-c", slow], advice="")
    assert "  installing, 1 s: Installing torch\n" in capsys.readouterr().out


def test_every_difference_to_the_stamp_is_noticed(tmp_path, monkeypatch):
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    (tmp_path / "shared" / "cli").mkdir(parents=True)
    for name in ("pyproject.toml", setup.CONSTRAINTS):
        (tmp_path / name).write_text("[project]\n")
    good = setup._stamp(tmp_path)

    def need_with(stamp, **options):
        (tmp_path / ".venv" / setup.STAMP).write_text(json.dumps(stamp))
        return setup.find_need(tmp_path, **options)

    assert need_with(good) is None
    assert need_with({**good, VARIABLE: ""}) is None
    assert "moved" in need_with({**good, "root": "/elsewhere"}).reason
    assert "packages changed" in need_with({**good, "pins": "of an older list"}).reason
    assert "replaced" in need_with({**good, "python": "3.8"}).reason
    monkeypatch.setattr(setup.sys, "version_info", (3, 99, 0, "final", 0))
    assert need_with(good) is None
    assert "PYTHON names 3.99" in need_with(good, python_named=True).reason


PLUGINS = f"--nbval -n {AT_ONCE} --dist loadscope -p shared.cli.proven"


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ((), "--short tests lessons"),
        (("-x", "--slowest"), "--short tests lessons -x --durations=25"),
        (("--all", "-x"), "tests lessons -x"),
        (("--all", "lessons"), "lessons"),
        (("lessons", "-k", "one"), "lessons -k one"),  # what is named is run whole
    ],
)
def test_the_test_command_is_pytest_in_solution_mode(tree, words, called):
    course = tree("lesson01_good")
    (course.root / "solutions").mkdir()
    (course.root / "pytest.py").write_text(PYTEST)
    words += ("--no-setup",)
    done = course.run("test", *words, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="0")
    assert done.stdout.strip() == f"solution {PLUGINS} {called}"
    assert done.returncode == 5


def test_without_solutions_the_test_command_tests_the_learners_answers(tree):
    course = tree("lesson01_good")
    (course.root / "pytest.py").write_text(PYTEST)
    done = course.run("test", "--no-setup", PYTHON=sys.executable)
    said, command = done.stdout.splitlines()
    assert said.startswith("Your own answers are tested")
    assert command == f"unset {PLUGINS} --short tests lessons"


def test_continuous_integration_runs_the_test_command_and_nothing_less():
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert "set -euo pipefail" in text
    assert text.rstrip().endswith("./run_all.sh test --all")
    assert "./run_all.sh test" in (ROOT / "README.md").read_text()
