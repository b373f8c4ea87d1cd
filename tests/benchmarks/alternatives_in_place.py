"""Do right answers in another style carry a whole lesson? Its notebook under nbval, its script.

python -m tests.benchmarks.alternatives_in_place [--lessons 02 05] [--styles 1] [--only 10.2 10.4]

The lesson runs in a copy of the course. Its exercise cells hold the first alternative of every
exercise, then the second, written as a learner would have typed them; `--only` takes the reference
for all others, to find the one to blame. The cells that check are left out, `python -m
shared.exercises.mistakes NN` does that, and the script is started with `--mine`. A line a run: what
passed, and how the rest failed.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solutions.grading.intake.known import KnownAnswer, KnownAnswers, hand_in
from solutions.grading.intake.lesson import read_lessons

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = re.compile(r'(launch\("train.py", nproc=2, args=)(\[[^\n]*?\]|\([^\n]*?\)|\w+)')
# The flags with which a script uses what it does not use where its notebook starts it.
FLAGS = {
    "05": [""],
    "09": ["--precision fp16"],
    "10": ["--engine zero1", "--engine zero2 --precision bf16"],
    "11": ["--checkpointing sqrt", "--checkpointing plan --budget-mib 1"],
    "13": ["--engine hybrid --mesh 2x1"],
    "14": ["--sequence-parallel"],
    "15": ["--schedule gpipe", "--schedule interleaved --chunks 2"],
    "16": ["--tp 2 --zero 1", "--pp 2 --checkpointing"],
}
MEASURED = ("answers", "headline", "when", "arguments", "peak_mib")


def write_copy(number: str, answers: dict[str, KnownAnswer], place: Path) -> Path:
    """Copy the course; return the lesson's folder in it, where these answers are typed in."""
    ignored = shutil.ignore_patterns("__pycache__", "answers.ipynb", "results")
    for name in ("shared", "solutions", "lessons", "datasets"):
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", place)
    lesson = read_lessons(ROOT, [number])[number]
    known, path = KnownAnswers(ROOT, lesson), place / "lessons" / lesson.folder / "lesson.ipynb"
    cells = {id: known.cell(each) for id, each in answers.items()}
    content = json.loads(hand_in(path.read_bytes(), cells))
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and source.startswith("check("):
            cell["source"], cell["outputs"] = ["# left out\n"], []
        elif cell["cell_type"] == "code":
            cell["source"] = LAUNCH.sub(r'\1[*(\2), "--mine"]', source)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path.parent


def choose(number: str, style: int, only: list[str]) -> dict[str, KnownAnswer]:
    """Return the answer to each exercise: the alternative of this style, or the last there is."""
    known = KnownAnswers(ROOT, read_lessons(ROOT, [number])[number])
    chosen = {each.exercise: each for each in known.references()}
    styles: dict[str, list[KnownAnswer]] = {}
    for each in known.alternatives():
        styles.setdefault(each.exercise, []).append(each)
    for id, each in styles.items():
        if not only or id in only:
            chosen[id] = each[min(style, len(each)) - 1]
    return chosen


def environment(place: Path) -> dict[str, str]:
    """This process's variables, with the copy in front of this course, and nothing solved."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_HANDLE_")}
    return {**kept, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}


def run_notebook(folder: Path, place: Path) -> tuple[int, list[str]]:
    """Return how many cells passed, and a line for each that did not."""
    report = folder / "report.xml"
    options = ["--nbval", "-q", "-n", "0", f"--junitxml={report}", "-c", place / "pyproject.toml"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, options), "lesson.ipynb"],
        cwd=folder, env=environment(place), capture_output=True, text=True,
    )  # fmt: skip
    passed, failed = 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        passed += not faults
        failed += [f"{case.get('name')}: {_ending(each.text or '')}" for each in faults]
    return passed, failed


def _ending(text: str) -> str:
    """Return what nbval says of a cell, without colours; its end, which has the values."""
    lines = (line.strip() for line in text.replace("#x1B", "\x1b").split("\n"))
    plain = " | ".join(line for line in lines if line)
    return plain if len(plain) < 1500 else f"{plain[:500]} [...] {plain[-1000:]}"


def run_script(folder: Path, place: Path, flags: str, *more: str) -> dict[str, Any] | str:
    """Return the script's metrics on two ranks, or the end of what it printed where it failed."""
    out = Path(tempfile.mkdtemp(dir=place))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py",
         "--preset", "tiny", "--device", "cpu", "--out", str(out), *flags.split(), *more],
        cwd=folder, env=environment(place), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        own = [each for each in lines if "rror" in each and "elastic" not in each]
        return f"status {done.returncode}: {' | '.join(own[:4])}"
    return json.loads((out / "metrics.json").read_text())


def differences(mine: Any, reference: Any, where: str = "") -> Iterator[str]:
    """Yield what differs: names, counts, losses. Seconds and other measured floats may."""
    if isinstance(mine, dict) and isinstance(reference, dict):
        for key in {**mine, **reference}:
            if key not in MEASURED and "peak" not in key and "/s" not in key:
                yield from differences(mine.get(key), reference.get(key), f"{where} {key}")
    elif isinstance(mine, list) and isinstance(reference, list) and len(mine) == len(reference):
        for index, pair in enumerate(zip(mine, reference, strict=True)):
            yield from differences(*pair, f"{where} {index}")
    elif isinstance(mine, float) and isinstance(reference, float):
        if "loss" in where and not math.isclose(mine, reference, rel_tol=1e-4, abs_tol=1e-4):
            yield f"{where.strip()}: {mine} for {reference}"
    elif mine != reference:
        yield f"{where.strip()}: {mine!r} for {reference!r}"


def try_script(number: str, folder: Path, place: Path) -> Iterator[str]:
    """Yield how the script with these answers and with the references differs, a line a run."""
    for flags in FLAGS.get(number, []):
        mine, reference = (run_script(folder, place, flags, *m) for m in (["--mine"], []))
        if isinstance(mine, str) or isinstance(reference, str):
            wrong = [f"{who} {said}" for who, said in (("--mine", mine), ("reference", reference))]
            found = [each[:600] for each in wrong if " status " in each]
        else:
            found = list(differences(mine, reference))
        yield f"train.py {flags} --mine: {'; '.join(found[:5]) or 'as the reference'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lessons", nargs="+", help="numbers (all)")
    parser.add_argument("--styles", nargs="+", type=int, default=[1, 2], help="(1 2)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NN.E", help="exercises (all)")
    parser.add_argument("--part", choices=("notebook", "script"), help="(both)")
    args = parser.parse_args()
    for number in args.lessons or read_lessons(ROOT):
        for style in args.styles:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                lesson = write_copy(number, choose(number, style, args.only), place)
                if args.part != "script":
                    passed, failed = run_notebook(lesson, place)
                    print(f"{number}, style {style}: {passed} cells passed, {len(failed)} failed")
                    print(*(f"    {line}" for line in failed), sep="\n", flush=True)
                if args.part != "notebook":
                    for line in try_script(number, lesson, place):
                        print(f"{number}, style {style}: {line}", flush=True)


if __name__ == "__main__":
    main()
