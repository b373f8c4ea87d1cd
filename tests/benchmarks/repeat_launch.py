"""Launch lesson 06's script many times and count how the launches end: all of them must with 0.

python -m tests.benchmarks.repeat_launch [--times 200] [--nproc 2] [--cold]

A rank was once seen to abort as its interpreter ended (std::terminate), its work done: DDP sat in a
reference cycle that held the process group. `process_group` collects such cycles before it leaves;
this counts what is left. The ranks start from the tests' warm interpreter, which ends as any other
does; with --cold each imports torch by itself, which takes five times as long.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from shared.ranks.launching import LaunchFailed, launch
from shared.script import ROOT, positive_int
from tests.warm.server import interpreter

SCRIPT = ROOT / "lessons" / "lesson06_ddp" / "train.py"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=positive_int, default=200)
    parser.add_argument("--nproc", type=positive_int, default=2)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ends: Counter[str] = Counter()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if not args.cold:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm_")))
            os.environ["PYTHON_EXEC"] = str(stack.enter_context(interpreter(folder)))
        for number in range(1, args.times + 1):
            try:
                launch(SCRIPT, args.nproc, ["--preset", "tiny", "--device", "cpu"])
                ends["status 0"] += 1
            except LaunchFailed as error:
                print(error, file=sys.stderr)
                ends[str(error).splitlines()[0]] += 1
            if number % 20 == 0:
                print(f"{number} launches, {time.monotonic() - began:.0f} s: {dict(ends)}")
    failed = ends.total() - ends["status 0"]
    print(f"{args.nproc} ranks: {failed} of {args.times} launches did not end with status 0")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
