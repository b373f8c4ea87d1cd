"""The wall is there or the grader refuses; whatever a run says, reading it never fails."""

import itertools
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.errors import InputError
from solutions import grade
from solutions.grading.results import Answers, Exercise, Flag, Lesson, Limits, Outcome, Stop
from solutions.grading.sandbox import bubblewrap, process
from solutions.grading.sandbox.cgroup import cgroup
from solutions.grading.sandbox.run import Workspace
from solutions.grading.verdicts import Reader
from tests.grading.toy_lesson import write_course

CELL = '@exercise("01.1")\ndef double(x):\n    '
LIMITS = Limits(exercise_seconds=20)
EXERCISE = Exercise("01.1", "double", 4)
SETUP = "import os\nfrom shared.exercises.notebook import check, exercise"
LESSON = Lesson("01", "lesson01_toy", (EXERCISE,), SETUP, {"01.1": CELL + "..."}, "")
CHECKS = """from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_equal

e = checks_for("01.1", name="double", difficulty=4, minutes=5, hint="x + x")


@e.check("a number")
def number(double):
    expect_equal(double(3), 6, what="double(3)")
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    write_course(folder, CHECKS)
    return folder


def graded(course, body, *, confined=True, limits=LIMITS):
    if confined:
        need_bubblewrap()
    with Workspace(course, confined=confined) as workspace:
        answers = Answers("ada", "01", {"01.1": CELL + body}, {})
        (verdict,) = workspace.grade(answers, LESSON, limits)
    return verdict


def need_bubblewrap():
    try:
        bubblewrap.require()
    except InputError as why:
        pytest.skip(str(why))


def test_without_bubblewrap_it_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"no bwrap here: install it .*--unconfined") as refused:
        Workspace(tmp_path)
    assert "\n" not in str(refused.value)


def test_where_a_sandbox_is_not_allowed_it_says_what_bubblewrap_said(tmp_path, monkeypatch):
    for name in ("bwrap", "prlimit", "setpriv"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'bwrap: No permission' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InputError, match=r"\(bwrap: No permission\): as root it needs CAP_SYS_ADM"):
        Workspace(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", [0, 65534])
def test_root_and_an_ordinary_user_get_the_same_walls(user, monkeypatch):
    need_bubblewrap()
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(bubblewrap, "interpreter_folders", list)  # they may be root's alone
    script = (
        "cat /proc/self/status; echo user $(id -u); ls / /proc; touch /x /usr/x; ls -l /dev/shm"
    )
    words = bubblewrap.command(["sh", "-c", script], (), {"PATH": "/usr/bin"}, Limits())
    done = subprocess.run(words, capture_output=True, text=True, check=False, user=user, group=user)
    if user and "No permissions" in done.stderr:
        pytest.skip("this system gives user namespaces to root alone")
    assert "CapEff:\t0000000000000000" in done.stdout, done.stderr
    assert "CapBnd:\t0000000000000000" in done.stdout
    assert "NoNewPrivs:\t1" in done.stdout
    assert int(done.stdout.split("user ")[1].split()[0]) >= bubblewrap.USER
    assert not {"home", "root", "etc/passwd", "run", "var"} & set(done.stdout.split())
    assert "touch: cannot touch '/x': " in done.stderr
    assert "touch: cannot touch '/usr/x': Read-only file system" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="another user may not read pytest's folder")
def test_a_course_below_tmp_is_seen_and_tmp_is_writable(tmp_path, monkeypatch):
    need_bubblewrap()
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "seen").write_text("seen")
    monkeypatch.setattr(bubblewrap, "interpreter_folders", lambda: [str(tmp_path / "python")])
    script = f"cat {tmp_path}/python/seen; touch /tmp/own; touch {tmp_path}/x; ls {tmp_path}"
    words = bubblewrap.command(["sh", "-c", script], (), {"PATH": "/usr/bin"}, Limits())
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "seenpython\n", done.stderr
    assert "touch: cannot touch '/tmp/own'" not in done.stderr


def test_no_folder_above_the_course_or_the_own_tmp_is_shown(tmp_path, monkeypatch):
    extra = tmp_path / "packages"
    extra.mkdir()
    above = Path(bubblewrap.__file__).parents[4]
    monkeypatch.setattr(bubblewrap.sys, "path", [str(above), bubblewrap.HOME, "/", str(extra)])
    seen = bubblewrap.interpreter_folders()
    assert str(extra) in seen
    assert not {str(above), bubblewrap.HOME, "/"} & set(seen)


def test_unconfined_it_grades_as_well_and_says_so(course, capsys):
    assert "WITHOUT a sandbox" in Workspace(course, confined=False).promise
    verdict = graded(course, "return 2 * x", confined=False)
    assert (verdict.points, verdict.outcome) == (4.0, Outcome.RIGHT), verdict
    assert "--unconfined" in grade.make_parser().format_help()


def test_processes_that_have_left_their_parents_count_as_memory(course):
    body = """for n in range(5):
        if os.fork() == 0:
            if os.fork() == 0:
                held = bytearray(b"x") * (600 << 20)
                while True: pass
            os._exit(0)
    while True: pass"""
    verdict = graded(course, body, limits=Limits(exercise_seconds=20, memory=2 << 30))
    assert verdict.outcome is Outcome.STOPPED
    assert verdict.message == "stopped: used more than 2 GiB of memory"


GREEDY = "x = bytearray(b'x') * (1600 << 20)"
MANY = "import os, time\nfor _ in range(40):\n    os.fork() or (time.sleep(9), os._exit(0))"


@pytest.mark.parametrize("program", [GREEDY, MANY])
def test_a_cgroup_holds_all_processes_together(program):
    with cgroup(Limits(memory=100 << 20, folder_size=0, num_processes=1)) as words:
        if not words:
            pytest.skip("no cgroup can be made here")
        groups = [Path(each) for each in re.findall(r"\S+(?=/cgroup.procs)", words[2])]
        assert groups and all(each.is_dir() for each in groups)
        python = [sys.executable, "-c", program]
        status = subprocess.run(
            [*words, *python], stderr=subprocess.DEVNULL, check=False
        ).returncode
        assert status == (-9 if program == GREEDY else 1)
        for pid in {line for each in groups for line in (each / "cgroup.procs").open()}:
            os.kill(int(pid), 9)
    assert not any(each.exists() for each in groups)


def test_what_is_written_to_a_cgroup_of_version_2(tmp_path):
    (tmp_path / "cgroup.controllers").touch()
    with cgroup(Limits(memory=4 << 30), tmp_path) as (_, _, join, _):
        (group,) = tmp_path.glob("torch_handle_*")
        assert join == f'{{ echo 0 > {group}/cgroup.procs; }} 2>/dev/null; exec "$@"'
        written = {each.name: each.read_text() for each in group.iterdir()}
    most = {"memory.max": str((5 << 30) + (256 << 20)), "memory.swap.max": "0", "pids.max": "400"}
    assert written == most


def test_without_the_right_to_make_a_cgroup_the_run_goes_on(tmp_path):
    with cgroup(Limits(), tmp_path / "none") as words:
        assert words == []


def test_a_run_may_take_long_and_not_fall_silent(monkeypatch):
    """An answer that stops its judge (SIGSTOP) holds a place for as long as this, and no longer."""
    reader, writer = os.pipe()
    clock = itertools.count(step=25)  # seconds between two looks

    def tick():
        if (now := next(clock)) < 300:
            os.write(writer, b".")
        return now

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=tick))
    said, stop = process._listen(reader, 60.0, threading.Event())
    assert set(said) == set(b".") and len(said) > 4 and stop is Stop.TIME
    os.close(writer)
    assert process._listen(reader, 60.0, threading.Event()) == (b"", None)
    os.close(reader)


def test_a_judge_that_has_spoken_is_not_waited_for_as_one_that_starts(monkeypatch):
    reader, writer = os.pipe()
    clock = SimpleNamespace(monotonic=itertools.count(step=25).__next__)
    monkeypatch.setattr(process, "time", clock)
    os.write(writer, b".")
    began = clock.monotonic()
    assert process._listen(reader, 60.0, threading.Event(), first=10_000.0) == (b".", Stop.TIME)
    assert clock.monotonic() - began < 1_000
    os.close(writer)
    os.close(reader)


# Each in a process of its own, by numbers of x86_64; 38 is ENOSYS, with which glibc takes clone.
REFUSED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for number, *given in {calls}:
    ctypes.set_errno(0)
    result = libc.syscall(number, *given)
    if result == 0 and number == 56: os._exit(0)
    print(number, result if result < 0 else "done", ctypes.get_errno())
sys.stdout.flush()
if os.fork() == 0: os._exit(7)
print(os.uname().nodename, os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86_64's")
def test_calls_that_leave_or_hold_what_no_limit_sees_are_refused(tmp_path):
    need_bubblewrap()
    new_user = 0x10000000 | 17  # CLONE_NEWUSER | SIGCHLD
    calls = [(56, new_user, 0, 0, 0, 0), (272, 0x10000000), (308, 0, 0), (165, 0, 0, 0, 0, 0)]
    calls += [(248, 0, 0, 0, 0, 0), (250, 0, 0), (319, b"x", 0), (447, 0), (64, 0, 1, 0o1666)]
    calls += [(68, 0, 0o1666), (29, 0, 4096, 0o1666), (321, 0, 0, 0), (298, 0, 0, 0, 0, 0)]
    calls += [(240, b"q", 0o102, 0o600, 0), (41, 40, 1, 0), (430, b"tmpfs", 0)]
    file = tmp_path / "calls"
    file.write_bytes(bubblewrap.refused_calls())
    program = REFUSED.format(calls=[*calls, (435, 0, 0)])
    with file.open("rb") as rules:
        number = rules.fileno()
        argv = [sys.executable, "-I", "-S", "-c", program]
        words = bubblewrap.command(argv, (), {}, Limits(), seccomp=number)
        done = subprocess.run(words, capture_output=True, text=True, check=False, pass_fds=[number])
    refused = [f"{number} -1 1" for number, *_ in calls]
    assert done.stdout.splitlines() == [*refused, "435 -1 38", "sandbox 7"], done


def test_groups_of_a_grader_that_was_killed_are_removed(tmp_path):
    (tmp_path / "cgroup.controllers").touch()
    left, own = tmp_path / "torch_handle_4194305_a", tmp_path / f"torch_handle_{os.getpid()}_b"
    young = tmp_path / "torch_handle_4194305_c"  # its maker's number is of another namespace
    for each in (left, own, young):
        each.mkdir()  # no system counts processes so far
    for each in (left, own):
        os.utime(each, (0, 0))
    with cgroup(Limits(), tmp_path):
        assert not left.exists()
        assert own.exists()
        assert young.exists()


READER = Reader(Answers("ada", "01", {}, {}), {"01.1": EXERCISE}, Limits(), {})
BEGINS = {"event": "begins", "exercise": "01.1"}


@pytest.mark.parametrize(
    ("record", "message", "points"),
    [
        ({"kind": "right", "passed": 2, "total": 2}, "right (2 of 2 checks passed)", 4.0),
        ({"kind": "right", "passed": 1, "total": 2}, "not right at the check", 0.0),
        ({"kind": "right"}, "not right at the check", 0.0),
        ({"kind": "wrong", "passed": 2, "total": 3, "for_nothing": 1}, "(2 of 3 checks", 2.0),
        ({"kind": "wrong", "passed": 2, "total": 3, "for_nothing": 9}, "(2 of 3 checks", 0.0),
        ({"kind": "wrong", "passed": 999, "total": 2}, "(999 of 2 checks", 0.0),
        ({"kind": "right", "passed": 400, "total": 3}, "not right at the check", 0.0),
        ({"kind": "wrong", "passed": 1, "total": 2, "for_nothing": -100}, "(1 of 2 checks", 0.0),
        ({"kind": "wrong", "passed": 2, "total": 2}, "(2 of 2 checks", 0.0),
        ({"kind": ["right"], "passed": 1, "total": 2}, "(1 of 2 checks", 0.0),
        ({"kind": "wrong", "passed": 1, "total": 2, "seen": 7}, "(1 of 2 checks", 0.0),
        ({"kind": "right", "passed": 9, "total": 9, "checks": 2}, "right (9 of 9", 0.0),
        ({"kind": "right", "passed": 2, "total": 2, "flags": ["uses"]}, "right (2 of 2", 0.0),
        ({"kind": "right", "passed": 2, "total": 2, "flags": {"a": 1}}, "right (2 of 2", 0.0),
        ({"kind": "wrong", "passed": "x", "total": [], "also": 3}, "(0 of 0 checks", 0.0),
        ({"kind": "undefined"}, "it defines no double", 0.0),
        ({"kind": "spoilt", "why": "w"}, "it makes a known wrong answer pass (w)", 0.0),
        ({"stop": "exercise time"}, "stopped: took longer than 60 s", 0.0),
        ({"stop": "memory"}, "stopped: used more than 4 GiB of memory", 0.0),
        ({"stop": "died", "status": -11}, "stopped: the process was ended by SIGSEGV", 0.0),
        ({"stop": {}}, "stopped: the process was ended", 0.0),
        ({"stop": "died", "status": "x"}, "stopped: the process was ended", 0.0),
        ({"stop": "died", "status": -200}, "it left the process with status -200", 0.0),
        ({"stop": "died", "status": 10**30}, "stopped: it left the process with status", 0.0),
    ],
)
def test_every_record_comes_to_a_verdict(record, message, points):
    found = READER.read([BEGINS, {"event": "judged", "exercise": "01.1", **record}], None)
    assert message in found["01.1"].message
    assert found["01.1"].points == points


def test_what_was_running_when_a_run_ended_is_stopped():
    assert READER.read([BEGINS], Stop.TIME)["01.1"].message.startswith("stopped: took longer")
    assert READER.read([{"event": "judged", "exercise": "01.1", "kind": "right"}], None) == {}
    assert READER.read([{"event": "broken", "why": 3}, {"event": "x", "exercise": []}], None) == {}
    assert READER.broken == "3"


def test_what_is_flagged_has_no_points_until_somebody_looked():
    flags = {"01.1": (Flag(1, "imports os"),)}
    reader = replace(READER, answers=replace(READER.answers, flags=flags))
    record = {"event": "judged", "exercise": "01.1", "kind": "right", "passed": 2, "total": 2}
    verdict = reader.read([BEGINS, record], None)["01.1"]
    assert (verdict.outcome, verdict.points) == (Outcome.RIGHT, 0.0)
    assert verdict.flags == ("line 1 imports os",)
