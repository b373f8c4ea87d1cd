"""kill -9 at random steps and ranks, and within saves, under torchrun: does every run come back?

Each run of the lesson's script (a translator with dropout, noise and a shuffled order on two ranks)
is killed once, at a place drawn from --seed: a rank before a step, or rank 0 within a save when a
random share of the file is written. torchrun starts the ranks again. Its losses and the SHA-256 of
its final weights are compared with those of a run that was left alone.

    python tests/benchmarks/kill_and_resume.py                     # 20 kills and 5 within a save
    python tests/benchmarks/kill_and_resume.py --kills 4 --saves 1
    python tests/benchmarks/kill_and_resume.py --nproc 4 --steps 60 --interval 7
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared.launching import LaunchFailed, launch

SCRIPT = Path(__file__).resolve().parents[2] / "lessons" / "08_fault_tolerance" / "train.py"


def main() -> None:
    args = parse()
    draw = random.Random(args.seed)
    steps = [draw.randrange(args.steps) for _ in range(args.kills)]
    places = [f"{step}:{draw.randrange(args.nproc)}" for step in steps]
    # A save begins after step 1, 2, ...; the last one begins at or before the last step.
    places += [
        f"{draw.randrange(1, args.steps + 1)}:0:{draw.random():.3f}" for _ in range(args.saves)
    ]
    with tempfile.TemporaryDirectory(prefix="kills_") as folder:
        untouched = run(args, Path(folder) / "untouched", [])
        print(f"untouched: {args.steps} steps, weights {untouched['checksum'][:16]}", flush=True)
        came_back = equal = 0
        for number, place in enumerate(places, start=1):
            began = time.perf_counter()
            try:
                metrics = run(args, Path(folder) / str(number), [place])
            except LaunchFailed as error:
                print(f"{number:3} killed at {place:12} DID NOT COME BACK\n{error}")
                continue
            back = metrics["restarts"] == 1
            same = all(metrics[name] == untouched[name] for name in ("checksum", "losses"))
            came_back, equal = came_back + back, equal + (back and same)
            verdict = "equal bit for bit" if same else "OTHER WEIGHTS"
            seconds = time.perf_counter() - began
            print(
                f"{number:3} killed at {place:12} gone on from step {metrics['began_at']:3}: "
                f"{verdict if back else 'WAS NOT KILLED'} ({seconds:.0f} s)",
                flush=True,
            )
    count = len(places)
    print(f"{came_back} of {count} came back, {equal} of {count} with equal losses and weights")
    sys.exit(equal != count)


def run(args: argparse.Namespace, out: Path, kills: list[str]) -> dict[str, Any]:
    """One run of the script, killed at these places."""
    flags = ["--preset", "tiny", "--device", "cpu", "--steps", args.steps, "--untimed"]
    flags += ["--interval", args.interval, "--save", args.save, "--out", out]
    flags += ["--kill", *kills] if kills else []
    return launch(SCRIPT, args.nproc, flags, timeout=240, max_restarts=len(kills))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="at random steps and ranks")
    parser.add_argument("--saves", type=int, default=5, help="within a save")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--interval", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--save", choices=("wait", "background"), default="wait")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
