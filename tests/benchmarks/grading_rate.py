"""How fast, how small and how steady the grader is.

    python tests/benchmarks/grading_rate.py --count 30 --repeat 10
    python tests/benchmarks/grading_rate.py --lessons 01,02,03,04,05,06,07,08 --repeat 2 --copies 3

Makes students' submissions of some lessons out of their references, their known mistakes and their
stubs, no two alike, and --copies students who handed in another's. Grades them with the command.
Prints the rate, what that means for 200 submissions, and the most memory that the grader's own
process took. With --repeat it grades them again and again and counts the rows that were not the
same each time.
"""

import argparse
import csv
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from solutions.grading.intake.known import hand_in
from solutions.grading.intake.lesson import read_lessons
from solutions.rehearsal import mixed_class

COURSE = Path(__file__).resolve().parents[2]
TARGET_RATE, TARGET_MIB, CLASS = 24, 300, 200


def make_class(folder: Path, number: str, count: int, copies: int, seed: int) -> None:
    """Store `count` notebooks, each exercise right, mistaken or untouched; the last are copies."""
    lesson = read_lessons(COURSE, [number])[number]
    pristine, last = (COURSE / "lessons" / lesson.folder / "lesson.ipynb").read_bytes(), b""
    for place, (cells, _) in enumerate(mixed_class(COURSE, lesson, count, seed)):
        path = folder / f"student {place:03d}" / f"{number}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(last := hand_in(pristine, cells) if place < count - copies else last)


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and the grader's own peak memory in MiB."""

    seconds: float
    peak: float


def grade(folder: Path, out: Path, *words: str) -> Cost:
    """Run the command and measure it."""
    began, peak = time.monotonic(), 0.0
    command = [sys.executable, "-m", "solutions.grade", str(folder), "--out", str(out), *words]
    with subprocess.Popen(command, cwd=COURSE, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, peak_mib(process.pid))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return Cost(time.monotonic() - began, peak)


def peak_mib(pid: int) -> float:
    """The peak that Linux keeps of a process, without its children; elsewhere the value now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return max(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, ValueError):
        try:
            return psutil.Process(pid).memory_info().rss / 2**20
        except psutil.Error:
            return 0.0


def read_rows(out: Path) -> dict[tuple[str, str], str]:
    """Points and message of each row."""
    with (out / "grades.csv").open(encoding="utf-8-sig", newline="") as file:
        return {
            (row["student"], row["exercise"]): f"{row['points']} {row['message']}"
            for row in csv.DictReader(file)
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lessons", default="02", help="which lessons, with commas (02)")
    parser.add_argument("--count", type=int, default=30, help="students (30)")
    parser.add_argument("--copies", type=int, default=0, help="of them who copied another's (0)")
    parser.add_argument("--repeat", type=int, default=1, help="gradings of the same (1)")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time (2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="grading_rate_"))
    try:
        for lesson in args.lessons.split(","):
            make_class(place / "in", lesson, args.count, args.copies, args.seed)
        first: dict[tuple[str, str], str] = {}
        flakes: Counter[tuple[str, str]] = Counter()
        for turn in range(args.repeat):
            words = ("--jobs", str(args.jobs), "--again")
            cost = grade(place / "in", place / "out", *words)
            rows = read_rows(place / "out")
            first = first or rows
            changed = [key for key in first if rows.get(key) != first[key]]
            flakes.update(changed)
            for key in changed:
                print(f"  {' '.join(key)}: {first[key]!r}, then {rows.get(key)!r}")
            report(turn, args, cost, (place / "out" / "grades.csv").read_bytes())
    finally:
        shutil.rmtree(place)
    if args.repeat > 1:
        total = len(first)
        print(f"{args.repeat} gradings of {total} rows: {len(flakes)} were not always the same")


def report(turn: int, args: argparse.Namespace, cost: Cost, table: bytes) -> None:
    """One grading in three lines; equal digests are equal tables."""
    count = args.count * len(args.lessons.split(","))
    rate = 60 * count / cost.seconds
    print(
        f"grading {turn + 1}: {count} of lesson {args.lessons}, {args.jobs} at a time, in "
        f"{cost.seconds:.0f} s: {rate:.1f} a minute (wanted of lesson 02: {TARGET_RATE})\n"
        f"  {CLASS} would take {CLASS / rate:.1f} minutes; "
        f"the grader itself took {cost.peak:.0f} MiB (wanted: {TARGET_MIB})\n"
        f"  grades.csv {hashlib.sha256(table).hexdigest()[:12]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
