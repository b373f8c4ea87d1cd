"""Run the tests of Part II ten times in a row and count: what fails once is a flake.

python tests/benchmarks/repeat_tests.py [--times 10] [PATH ...] [-- PYTEST ARGUMENTS]

Ends with status 1 if any test failed in any run, or if the runs did not hold the same tests. What
pytest said of a failed run is kept in runs/repeat_tests/.
"""

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from shared.script import ROOT, positive_int

PART_TWO = [str(next((ROOT / "tests").glob(f"lesson{n:02}_*"))) for n in range(5, 9)]
PART_TWO += ["tests/frame/test_ranks.py", "tests/frame/test_bad_launch.py"]


def run_once(number: int, paths: list[str], arguments: list[str], out: Path) -> dict[str, bool]:
    """Whether each test that was not skipped passed."""
    report, log = out / f"run_{number:02}.xml", out / f"run_{number:02}.log"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *paths, *arguments]
    with log.open("w") as stream:
        subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if not report.is_file():
        sys.exit(f"pytest wrote no report; it said:\n{log.read_text()[-2000:]}")
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            results[f"{case.get('classname')}::{case.get('name')}"] = not failed
    report.unlink()
    if all(results.values()):
        log.unlink()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=positive_int, default=10)
    parser.add_argument("paths", nargs="*", help="tests (those of Part II)")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:cut])
    out = ROOT / "runs" / "repeat_tests"
    out.mkdir(parents=True, exist_ok=True)
    failures: Counter[str] = Counter()
    held: set[frozenset[str]] = set()
    for number in range(1, args.times + 1):
        began = time.monotonic()
        results = run_once(number, args.paths or PART_TWO, given[cut + 1 :], out)
        held.add(frozenset(results))
        failed = [name for name, passed in results.items() if not passed]
        failures.update(failed)
        seconds = time.monotonic() - began
        print(
            f"run {number}: {len(results)} tests, {len(failed)} failed, {seconds:.0f} s", flush=True
        )
    for name, count in failures.most_common():
        print(f"failed in {count} of {args.times} runs: {name}")
    if len(held) != 1 or not results:
        print("the runs did not hold the same tests, or none")
        return 1
    print(f"{args.times} runs of {len(results)} tests: {failures.total()} failures")
    return int(failures.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
