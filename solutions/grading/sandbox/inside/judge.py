"""Judges the exercises of one notebook, in the sandbox: `python judge.py PIPE < JOB`.

The job is JSON: the lesson's setup cell, its exercise cells in order, which of them are wanted,
and for each some known wrong answers. Cells run as `--mine` runs them. Every exercise is judged in
a process of its own, forked from this one, in which no answer ever runs; what it says comes back
through a socket, and this process writes a line of JSON for it to PIPE.

After an answer has passed a check, the same process must find a known wrong answer wrong: an answer
that has changed what judges it gives itself away.
"""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import time
from importlib import import_module
from types import ModuleType
from typing import Any

MAX_SAID = 256 << 10  # bytes that one exercise's result may have
MAX_FILES = 4096  # that one exercise may write
MAX_TEXT = 8000  # characters of one text in it: a repr can be any size
TICK = 0.1  # seconds between two looks at what the processes use
PR_SET_DUMPABLE = 4
CACHE = ".cache"  # in the folder that the judge is started in, which answers may write


def main() -> None:
    """Judge every exercise that is wanted; say "broken" where the setup cell does not run."""
    gc.disable()  # until all is imported: it would find nothing, again and again
    pipe = int(sys.argv[1])
    job = json.load(sys.stdin)
    # A course installed with `pip install -e` would find the original, with its solutions.
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f).lower()]
    sys.path[:] = [job["course"], *(entry for entry in sys.path[1:] if entry)]
    _protect(True)
    shutil.copytree(job["caches"], CACHE)
    clean = sorted(os.listdir())  # a folder of PYTHONPATH may be in it, too

    def tell(**event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]

    try:
        judge = Judge(job, pipe)
    except Exception as error:
        tell(event="broken", why=f"the setup cell fails: {type(error).__name__}: {error}"[:2000])
        return
    for exercise in judge.exercises:
        if exercise["wanted"]:
            tell(event="begins", exercise=exercise["id"])
            result = judge.judge_apart(exercise)
            # What ends a process, changes what judges it, or is heard reaches no later exercise.
            if {"stop", "why"} & {*result} or result.get("changes") or result.get("heard"):
                exercise["others"] = exercise["stub"]
            tell(event="judged", exercise=exercise["id"], **result)
            if sorted(os.listdir()) != clean:
                return  # what it has left cannot be removed: the others go on in a new sandbox


def _protect(closed: bool) -> None:
    """Close this process's memory and open files to others of its user, or open them again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(not closed), 0, 0, 0)


def _ended(child: int) -> int | None:
    """The status of a process that has ended, None for one that has not."""
    process, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if process else None


class Judge:
    """The course, imported once, and the exercises of one notebook."""

    def __init__(self, job: dict[str, Any], pipe: int) -> None:
        self.job, self.pipe, self.exercises = job, pipe, job["exercises"]
        self.torch = import_module("torch")
        self.torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        self.psutil, self.watching = import_module("psutil"), import_module("watching")
        self.hearing = import_module("hearing").Hearing(job["course"], **job["names"])
        kept_back = import_module("kept_back").KeptBack(job["course"], job.pop("texts"))
        self.answers = import_module("shared.exercises.answers")
        self.answers.import_what_torch_puts_off()
        self.notebook = import_module("shared.exercises.notebook")
        self.stubs = import_module("shared.exercises.stubs")
        self.checks = import_module("shared.exercises.lessons").load_checks(job["number"])
        self.module: ModuleType = self.answers.new_module(job["number"])
        self._run("setup", job["setup"], self.module)
        answers = {each["name"] for each in self.exercises}
        kept_back.forget()
        watched = (path for each in self.exercises for path in (each["own"], *each["forbidden"]))
        self.watching.prepare(watched)
        self.names = {k: v for k, v in vars(self.module).items() if k not in answers}
        self.environment, self.home = dict(os.environ), os.getcwd()
        gc.freeze()  # or each child's collector walks, and so copies, all of what torch has made
        gc.enable()

    def _run(self, label: str, source: str, module: ModuleType) -> None:
        self.answers.run_cell(source, f"cell {label}", module)

    def judge_apart(self, exercise: dict[str, Any]) -> dict[str, Any]:
        """The result of an exercise, or `stop`, the limit that its process has passed."""
        # Not a pipe: that could be written to by its name in /proc, as any file.
        receiver, sender = (each.detach() for each in socket.socketpair())
        secret = os.urandom(16).hex()  # an answer can write to any open file, by its number
        self.hearing.open()
        child = os.fork()
        if child == 0:
            self._be_the_child(exercise, sender, secret)
        os.close(sender)
        said, stop, status = b"", "", None
        deadline = time.monotonic() + self.job["seconds"]
        # Its end alone does not close the pipe: processes that it has left hold it open.
        while not stop:
            if select.select([receiver], [], [], 0.0 if status is not None else TICK)[0]:
                data = os.read(receiver, 1 << 16)
                said += data
                if not data or said.endswith(b"\n"):
                    break
            elif status is not None:
                break
            else:
                status = _ended(child)
            stop = self._passed(child, said, deadline)
        os.close(receiver)
        status = self._end(child, status, patience=0.0 if stop else 1.0)
        heard = self.hearing.flags()
        self._clear_folders()
        if stop:
            return {"stop": stop}
        if not said.startswith(secret.encode()):
            return {"stop": "output" if said else "died", "status": status}
        try:
            found = dict(json.loads(said[len(secret) :]))
        except (ValueError, TypeError, RecursionError):
            found = {"stop": ""}
        if "stop" in found:  # which is this process's to say
            return {"stop": "died", "status": status}
        return found | {"checks": len(self.checks[exercise["checks"]].checks), "heard": heard}

    def _passed(self, child: int, said: bytes, deadline: float) -> str:
        """The limit that is passed, as a value of the grader's `Stop`; "" for none."""
        confined, memory, used = self.job["confined"], self.job["memory"], os.statvfs(".")
        if time.monotonic() > deadline:
            return "exercise time"
        if len(said) > MAX_SAID:
            return "output"
        # Bytes are limited by the folder's size itself; without a sandbox the disk is not ours.
        if confined and used.f_files - used.f_ffree > MAX_FILES:
            return "folder"
        # In a sandbox all that there are: some may have left their parents.
        psutil = self.psutil
        found = psutil.process_iter() if confined else psutil.Process().children(recursive=True)
        processes = [each for each in found if each.pid not in (1, os.getpid())]
        # The first sum counts pages shared since a fork in each process; the second takes long.
        for exact in (False, True):
            if sum(self._memory(each, exact) for each in processes) <= memory:
                return ""
        return "memory"

    def _memory(self, process: Any, exact: bool) -> int:
        try:
            info = process.memory_info()
        except self.psutil.Error:
            return 0
        with contextlib.suppress(self.psutil.Error, AttributeError, OSError):
            if exact:
                return process.memory_full_info().pss
        return info.rss - getattr(info, "shared", 0)

    def _end(self, child: int, status: int | None, patience: float) -> int:
        """End all that an exercise has started; return the status of its own process."""
        deadline = time.monotonic() + patience  # it has said all, and may end by itself
        while status is None and time.monotonic() < deadline:
            time.sleep(0.005)
            status = _ended(child)
        with contextlib.suppress(ProcessLookupError):
            if self.job["confined"]:
                os.kill(-1, signal.SIGKILL)  # all but the sandbox's first process and this one
            else:
                os.killpg(child, signal.SIGKILL)
        if status is None:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass
        return status

    def _clear_folders(self) -> None:
        """Remove what an exercise has written: the next one has the whole of the space."""
        for folder in (self.home, *(["/dev/shm"] if self.job["confined"] else [])):
            with contextlib.suppress(OSError):  # /dev/shm may be another's
                os.chmod(folder, 0o700)  # an answer may have taken the right to list it
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
        shutil.copytree(self.job["caches"], CACHE, dirs_exist_ok=True)

    def _be_the_child(self, exercise: dict[str, Any], sender: int, secret: str) -> None:
        """Judge, say what came of it, and end; never returns."""
        status = 1
        try:
            os.close(self.pipe)
            os.setpgid(0, 0)
            _protect(False)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            text = f"{secret}{json.dumps(self._judged(exercise))}\n".encode()
            self.hearing.end()
            while text:
                text = text[os.write(sender, text) :]
            status = 0
        finally:
            os._exit(status)

    def _judged(self, exercise: dict[str, Any]) -> dict[str, Any]:
        """What came of an exercise: its kind, the first failed check, how many passed."""
        self.hearing.begin()  # earlier cells, too, could keep a frame for this one
        for earlier in itertools.takewhile(lambda each: each is not exercise, self.exercises):
            with contextlib.suppress(BaseException):  # its own verdict says what is wrong with it
                self._run(earlier["id"], earlier["others"], self.module)
        self._same_start()
        id, name, error = exercise["checks"], exercise["name"], ""
        watch = self.watching.Watch(exercise["forbidden"], exercise["own"], self.job["course"])
        state_of, changed, fooled = self.watching.state, self.watching.changed, self._fooled
        flags, before = watch.flags, state_of()  # all taken now: a cell could change them
        self.notebook.defined.pop(id, None)
        try:
            self._run(id, exercise["source"], self.module)
        except BaseException as raised:  # also SystemExit and KeyboardInterrupt
            error = f"{type(raised).__name__}: {raised}"[:MAX_TEXT]
        checks, state = self.checks[id], self.notebook.defined.get(id)
        count: dict[str, Any] = {"passed": 0, "total": len(checks.checks)}
        if error or state is None or not hasattr(self.module, name):
            return {"kind": "undefined", "error": error, **count}
        if not state.solved or self.stubs.is_stub(state.own):
            return {"kind": "unsolved", "hint": checks.hint, **count}
        self._same_start()
        candidate = getattr(self.module, name)
        with watch:
            faults = [each for each in checks.faults(candidate) if each is not None]
        count["passed"] = count["total"] - len(faults)
        count["flags"] = flags(candidate, faults) if count["passed"] else []
        count["changes"] = changed(before, state_of())
        if count["passed"] and (why := fooled(checks, exercise)):
            return {"kind": "spoilt", "why": why, **count}
        if not faults:
            return {"kind": "right", **count}
        first, *others = faults
        return {
            "kind": "wrong",
            **{n: getattr(first, n)[:MAX_TEXT] for n in ("title", "mistake", "expected", "seen")},
            "hint": (first.hint or checks.hint)[:MAX_TEXT],
            "also": [each.title for each in others],
            "for_nothing": checks.passed_for_nothing(faults) if count["passed"] else 0,
            **count,
        }

    def _fooled(self, checks: Any, exercise: dict[str, Any]) -> str:
        """Why what judges cannot be trusted any more: a known wrong answer passes. "" if none."""
        for number, (says, source) in enumerate(exercise["wrong"]):
            module = ModuleType("known_wrong")
            vars(module).update(self.names)
            self._run(f"of a known wrong answer {number}", source, module)
            if checks.first_fault(getattr(module, exercise["name"])) is None:
                return says
        return ""

    def _same_start(self) -> None:
        """The same names, random numbers, folder and environment, whatever ran before."""
        vars(self.module).update(self.names)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.home)
        seed = int(os.environ["TORCH_HANDLE_SEED"])
        random.seed(seed)
        self.torch.manual_seed(seed)
        self.torch.set_default_dtype(self.torch.float32)
        self.torch.set_grad_enabled(True)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)


if __name__ == "__main__":
    main()
    os._exit(0)  # torch takes its time to be taken apart
