"""How well the translator does on sentences it has never seen, after at most three minutes.

    python tests/benchmarks/translation_quality.py [--ranks 2] [-- FLAGS OF train.py]

Trains lessons/lesson04_training/train.py on the grammar corpus and prints a table. Leaves with
status 1 when a target is missed: 95 BLEU, 85 % exact matches, 180 seconds of training on two cores.
"""

import argparse
import sys

from shared.exercises.lessons import ROOT
from shared.ranks.launching import launch
from shared.results import format_table

SCRIPT = ROOT / "lessons" / "lesson04_training" / "train.py"
STEPS = 850


def main() -> int:
    """Run, print, compare with the targets."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="flags for train.py, after --")
    args = parser.parse_args()
    flags = ["--preset", "small", "--steps", str(STEPS), *args.flags]
    metrics = launch(SCRIPT, nproc=args.ranks, args=flags, timeout=3600)
    bleu, exact = metrics["scores"][0], metrics["scores"][-1]
    seconds = metrics["training_seconds"]
    rows = [
        {"measured": bleu["score"], "value": bleu["value"], "target": "at least 95"},
        {"measured": exact["score"], "value": exact["value"], "target": "at least 85"},
        {"measured": "training, seconds", "value": seconds, "target": "at most 180"},
        {"measured": "CPU seconds of rank 0", "value": metrics["cpu_seconds"], "target": ""},
    ]
    print(format_table(rows))
    print(f"{metrics['world_size']} ranks, {len(metrics['losses'])} steps, {bleu['signature']}")
    return int(bleu["value"] < 95 or exact["value"] < 85 or seconds > 180)


if __name__ == "__main__":
    sys.exit(main())
