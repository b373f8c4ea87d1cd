"""Run the lessons' scripts one after the other, say how each went, and write the report.

python -m shared.cli.runner [lessonNN_topic ...] [--nproc N] [--preset NAME] [--device NAME]
    [--out DIR]
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.cli.command import INTERRUPTED, ROOT, all_lessons
from shared.cli.report import write_report
from shared.ranks.logs import first_death, first_failure, last_words
from shared.ranks.processes import Outcome, raise_on_stop_signals, supervise
from shared.ranks.torchrun import RUN, torchrun_command

NUM_LOG_LINES = 12
BAR_WIDTH = 24


@dataclass(frozen=True)
class Result:
    """How one lesson's script went; `problem` is empty when all is well.

    `warning` says what went wrong behind the results, which are whole.
    """

    lesson: str
    seconds: float
    headline: str
    problem: str
    log: str
    when: str
    warning: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problem


@dataclass(frozen=True)
class Settings:
    """What all lessons of one call are run with."""

    nproc: int
    time_limit: float
    arguments: tuple[str, ...]  # passed on to every script
    out: Path  # a folder for each lesson, and the report
    run: str  # the name of this call, which every script's numbers carry


class Display:
    """One line a lesson; on a terminal also a bar that moves while a lesson runs."""

    def __init__(self, lessons: list[str]) -> None:
        self.num_lessons = len(lessons)
        self.width = max(map(len, lessons))
        self.num_done = 0
        self.moves = sys.stdout.isatty()
        self._drawn = -1.0

    def running(self, lesson: str, seconds: float) -> None:
        """Draw the bar, about five times a second."""
        if not self.moves or 0 <= seconds - self._drawn < 0.2:
            return
        self._drawn = seconds
        filled = BAR_WIDTH * self.num_done // self.num_lessons
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        line = f"{bar} {self.num_done}/{self.num_lessons}  {lesson}, {seconds:.0f} s"
        print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def done(self, result: Result) -> None:
        """Print the lesson's line, and the end of its log if it failed."""
        self.num_done += 1
        self._drawn = -1.0
        self.clear()
        verdict = "pass" if result.passed else "FAIL"
        what = result.headline if result.passed else f"{result.problem} (see {result.log})"
        if result.warning:
            what += f" (warning: {result.warning}; see {result.log})"
        print(
            f"{result.lesson:<{self.width}}  {result.seconds:6.1f} s  {verdict}  {what}", flush=True
        )
        if not result.passed:
            log = Path(result.log).read_text(encoding="utf-8", errors="replace")
            for line in last_words(log, NUM_LOG_LINES):
                print(f"    | {line}", flush=True)

    def clear(self) -> None:
        """Take the bar off the terminal."""
        if self.moves:
            print("\r\033[K", end="", flush=True)


def run_lessons(lessons: list[str], settings: Settings) -> Iterator[Result]:
    """Run each lesson's train.py under torchrun and yield how it went; a failure stops no other."""
    display = Display(lessons)
    try:
        for lesson in lessons:
            result = run_lesson(lesson, settings, display)
            display.done(result)
            yield result
    finally:
        display.clear()


def run_lesson(lesson: str, settings: Settings, display: Display) -> Result:
    """Run one script, its output in lessonNN_topic/run.log; return how it went."""
    out = settings.out / lesson
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.json").unlink(missing_ok=True)  # an old one would hide a silent failure
    log = out / "run.log"
    script = ROOT / "lessons" / lesson / "train.py"
    command = torchrun_command(script, settings.nproc, [f"--out={out}", *settings.arguments])
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", RUN: settings.run}
    outcome = supervise(
        command,
        env=env,
        log=log,
        time_limit=settings.time_limit,
        tick=lambda seconds: display.running(lesson, seconds),
    )
    metrics, lacking = read_metrics(out / "metrics.json", settings.nproc)
    said = log.read_text(encoding="utf-8", errors="replace")
    problem, warning = say_problem(outcome, said) or lacking, ""
    if not lacking and (death := say_death(outcome, said)):
        problem, warning = "", f"{death} after the results had been written"
    return Result(
        lesson,
        round(outcome.seconds, 1),
        str(metrics.get("headline", "")),
        problem,
        str(log),
        time.strftime("%Y-%m-%d %H:%M"),
        warning,
    )


def say_problem(outcome: Outcome, log: str) -> str:
    """Return what was wrong with how the script ended; "" if nothing was."""
    if outcome.timed_out:
        return f"stopped after {outcome.seconds:.0f} s, the time limit"
    if outcome.status != 0:
        to_do = re.search(r"^error: (exercise \S+ \(\w+\) is not solved yet)", log, re.MULTILINE)
        return (to_do and to_do[1]) or first_failure(log) or f"exit status {outcome.status}"
    if outcome.num_left:
        return f"left {outcome.num_left} process(es) behind, now ended"
    return ""


def say_death(outcome: Outcome, log: str) -> str:
    """Return which rank's death is all that was wrong with how the script ended; "" if not that.

    Results are written last (`write_results`), and the ranks wait for it (`process_group`): who
    dies behind them, an engine's threads at the interpreter's end for one, takes nothing away.
    """
    if outcome.timed_out or outcome.num_left or outcome.status == 0:
        return ""
    return first_death(log)


def read_metrics(path: Path, nproc: int) -> tuple[dict[str, Any], str]:
    """Return the script's numbers and what is wrong with them; "" if nothing is.

    A script that was to run with two ranks and ran with one has failed: its numbers look right.
    """
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}, "wrote no metrics.json"
    except ValueError as error:
        return {}, f"metrics.json cannot be read ({error})"
    if not isinstance(metrics, dict) or not isinstance(metrics.get("world_size"), int):
        return {}, "metrics.json has no world_size"
    if metrics["world_size"] != nproc:
        return metrics, f"ran with {metrics['world_size']} rank(s), {nproc} were asked for"
    return metrics, ""


def choose_arguments(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags for the scripts; with fewer GPUs than ranks, choose the CPU and say so."""
    arguments = [f"--preset={args.preset}"] if args.preset else []
    device = args.device
    if device is None:
        import torch  # takes a second, and nothing else here needs it

        num_gpus = torch.cuda.device_count()
        if 0 < num_gpus < args.nproc:
            device = "cpu"
            print(
                f"{args.nproc} ranks and {num_gpus} GPU: running on the CPU"
                f" (on the GPU: ./run_all.sh --nproc {num_gpus})"
            )
    return tuple(arguments + ([f"--device={device}"] if device else []))


def say_count(results: Sequence[Result], num_lessons: int, seconds: float) -> str:
    """The last line: how many lessons passed, and how many of those with a warning."""
    num_passed = sum(result.passed for result in results)
    num_warned = sum(bool(result.warning) for result in results)
    warned = f", {num_warned} of them with a warning" if num_warned else ""
    return f"{num_passed} of {num_lessons} lessons passed in {seconds:.0f} s{warned}."


def main() -> int:
    """Return 0 if every lesson passed, 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lessons", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=900.0)
    parser.add_argument("--preset")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    lessons = args.lessons or all_lessons()
    if not lessons:
        print("run_all.sh: there is no lesson in lessons/", file=sys.stderr)
        return 1
    run = time.strftime("%Y-%m-%d_%H-%M-%S") + f"_{os.getpid()}"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.html").unlink(missing_ok=True)  # an earlier run's
    except OSError as error:
        said = f"{error.strerror}: give a folder that can be written, --out DIR"
        print(f"run_all.sh: --out {args.out}: {said}", file=sys.stderr)
        return 2
    results: list[Result] = []
    began = time.monotonic()
    status = 0
    raise_on_stop_signals()
    try:
        arguments = choose_arguments(args)
        settings = Settings(args.nproc, args.time_limit, arguments, args.out.resolve(), run)
        for result in run_lessons(lessons, settings):
            results.append(result)
    except KeyboardInterrupt:
        print("stopped; no process was left behind", file=sys.stderr)
        status = INTERRUPTED
    num_passed = sum(result.passed for result in results)
    print(say_count(results, len(lessons), time.monotonic() - began))
    if results:
        report = write_report(args.out, [asdict(result) for result in results], run)
        print(f"Tables and pictures: {report}")
    return status or (0 if num_passed == len(lessons) else 1)


if __name__ == "__main__":
    sys.exit(main())
