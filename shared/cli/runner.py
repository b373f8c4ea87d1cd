"""Run the lessons' scripts, one after the other or more, say how each went, write the report.

python -m shared.cli.runner [lessonNN_topic ...] [--nproc N] [--jobs N] [--preset NAME]
    [--device NAME] [--out DIR]
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.cli.command import INTERRUPTED, ROOT, all_lessons
from shared.cli.display import OPEN, Display, Result
from shared.cli.machine import num_cores
from shared.cli.report import write_report
from shared.ranks.logs import first_death, first_failure
from shared.ranks.processes import Outcome, raise_on_stop_signals, supervise
from shared.ranks.torchrun import RUN, torchrun_command

TIMED = "# timed:"  # in a script whose headline is a time: nothing else runs while it does


@dataclass(frozen=True)
class Settings:
    """What all lessons of one call are run with."""

    nproc: int
    time_limit: float
    arguments: tuple[str, ...]  # passed on to every script
    out: Path  # a folder for each lesson, and the report
    run: str  # the name of this call, which every script's numbers carry
    jobs: int = 1  # lessons at once


def run_lessons(lessons: list[str], settings: Settings) -> Generator[Result]:
    """Run each lesson's train.py under torchrun and yield how it went; a failure stops no other.

    Of several at once the first to be done comes first, and those that measure time come last.
    """
    display = Display(lessons)
    alone = [lesson for lesson in lessons if settings.jobs == 1 or measures_time(lesson)]
    try:
        with ThreadPoolExecutor(settings.jobs) as pool:
            try:
                others = [lesson for lesson in lessons if lesson not in alone]
                started = [pool.submit(run_lesson, lesson, settings, display) for lesson in others]
                for future in as_completed(started):
                    display.done(future.result())
                    yield future.result()
            except BaseException:
                display.over.set()
                pool.shutdown(cancel_futures=True)
                raise
        for lesson in alone:  # in this thread, where Ctrl-C arrives
            result = run_lesson(lesson, settings, display)
            display.done(result)
            yield result
    finally:
        display.clear()


def measures_time(lesson: str) -> bool:
    """Whether a lesson's script is marked as one whose headline is a time."""
    script = ROOT / "lessons" / lesson / "train.py"
    return script.exists() and TIMED in script.read_text(encoding="utf-8")


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
        said = rf"^(?: *traceback : )?error: (exercise \S+ \(\w+\) {OPEN})"
        to_do = re.search(said, log, re.MULTILINE)
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
    """The last line: how many lessons passed, of those with a warning, and wait for an answer."""
    num_passed = sum(result.passed for result in results)
    num_warned = sum(bool(result.warning) for result in results)
    warned = f", {num_warned} of them with a warning" if num_warned else ""
    num_open = sum(result.open for result in results)
    to_do = f", {num_open} with an open exercise" if num_open else ""
    return f"{num_passed} of {num_lessons} lessons passed in {seconds:.0f} s{warned}{to_do}."


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lessons", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=900.0)
    parser.add_argument("--preset")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    return parser.parse_args()


def main() -> int:
    """Return 0 if every lesson passed, 1 if one failed."""
    args = _parsed()
    lessons = list(dict.fromkeys(args.lessons)) or all_lessons()  # two in one folder would meet
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
        jobs, cores = min(args.jobs, len(lessons)), num_cores()
        if not args.lessons:
            what = f"the scripts of {len(lessons)} lessons, {args.nproc} ranks each"
            print(f"{what}: some minutes (./run_all.sh 01 runs one)", flush=True)
        if jobs > 1 and (ranks := jobs * args.nproc) > cores:
            print(f"--jobs {jobs}: {ranks} ranks at once, {cores} cores; each takes longer")
        settings = Settings(args.nproc, args.time_limit, arguments, args.out.resolve(), run, jobs)
        with closing(run_lessons(lessons, settings)) as done:
            for result in done:
                results.append(result)
    except KeyboardInterrupt:
        print("stopped; no process was left behind", file=sys.stderr)
        status = INTERRUPTED
    results.sort(key=lambda result: lessons.index(result.lesson))
    num_passed = sum(result.passed for result in results)
    print(say_count(results, len(lessons), time.monotonic() - began))
    if results:
        report = write_report(args.out, [asdict(result) for result in results], run)
        print(f"Tables and pictures: {report}")
    return status or (0 if num_passed == len(lessons) else 1)


if __name__ == "__main__":
    sys.exit(main())
