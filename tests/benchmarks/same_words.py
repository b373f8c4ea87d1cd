"""Do a lesson's known answers hear the same in every run? Chance and a busy machine may differ.

python -m tests.benchmarks.same_words 06 16.5 [--runs 3]

Each run draws its own seeds. What is compared is the verdict, the check and the mistake's name;
the numbers that were seen may change with the seed. A line for each answer that heard different
things, or not what it must, and one for each lesson (or exercise).
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import chain

from shared.exercises.mistakes import HEARINGS, Heard


def words(heard: Heard) -> str:
    """Return what stays the same while the numbers change."""
    fault = heard.fault
    if fault is None:
        return "right"
    mark = "" if heard.as_expected else "NOT AS EXPECTED, "
    return f"{mark}{fault.title}: {fault.mistake or f'no name ({fault.expected}; {fault.seen})'}"


def hear_in_a_fresh_process(number: str, exercise: str | None) -> list[Heard]:
    """Put all answers before their checks; none remembers the run before, as a class of one may."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as fresh:
        return fresh.submit(hear, number, exercise).result()


def hear(number: str, exercise: str | None) -> list[Heard]:
    """Put all answers before their checks."""
    return list(chain(*(each(number, exercise) for each in HEARINGS)))


def compare(number: str, exercise: str | None, runs: int) -> int:
    """Print what differs between the runs; return how many answers it is."""
    said: dict[tuple[str, str, int], Counter[str]] = {}
    seconds = []
    for _ in range(runs):
        began, count = time.perf_counter(), Counter[tuple[str, str]]()
        for heard in hear_in_a_fresh_process(number, exercise):
            who = heard.exercise, heard.who
            said.setdefault((*who, count[who]), Counter())[words(heard)] += 1
            count[who] += 1
        seconds.append(time.perf_counter() - began)
    odd = 0
    for (id, who, _), heard in said.items():
        named = {each.split("no name")[0] for each in heard}
        if len(named) > 1 or any(each.startswith("NOT") for each in heard):
            odd += 1
            print(f"{id} {who}")
            print(*(f"    {n} of {runs}: {each}" for each, n in heard.items()), sep="\n")
    times = ", ".join(f"{each:.0f}" for each in seconds)
    print(
        f"{exercise or number}: {odd} of {len(said)} answers, {runs} runs of {times} s", flush=True
    )
    return odd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", help="lessons (06) or exercises (16.5)")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    odd = 0
    for each in args.what:
        odd += compare(each.split(".")[0], each if "." in each else None, args.runs)
    return int(odd > 0)


if __name__ == "__main__":
    sys.exit(main())
