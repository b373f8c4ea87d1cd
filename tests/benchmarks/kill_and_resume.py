"""kill -9 at random steps and ranks, and within saves, under torchrun: does every run come back?

Each run of the lesson's script (a translator with dropout, noise and a shuffled order on two ranks)
is killed --per-run times, at places drawn from --seed: a rank before a step, or rank 0 within a
save when a random share of the file is written. torchrun starts the ranks again each time. Losses
and the SHA-256 of the final weights are compared with those of a run that was left alone.

    python tests/benchmarks/kill_and_resume.py                     # 20 kills and 5 within a save
    python tests/benchmarks/kill_and_resume.py --fork              # without torchrun: seconds each
    python tests/benchmarks/kill_and_resume.py --kills 4 --saves 1 --per-run 1
    python tests/benchmarks/kill_and_resume.py --nproc 4 --steps 60 --interval 7
"""

import argparse
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lessons.lesson08_fault_tolerance.experiments.resumable_runs import Size, translator_training
from shared.data.corpora import load_corpus
from shared.data.loading import PairDataset
from shared.data.tokenizer import Tokenizer
from shared.fault_tolerance.checkpoints import load_checkpoint, resume_training, save_checkpoint
from shared.fault_tolerance.fitting import unwrapped
from shared.fault_tolerance.kills import Kill
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks
from shared.ranks.group import Rank
from shared.ranks.launching import LaunchFailed, launch
from shared.training.reference_run import checksum

SCRIPT = Path(__file__).resolve().parents[2] / "lessons" / "lesson08_fault_tolerance" / "train.py"


def main() -> None:
    args = parse()
    places = draw_places(args)
    if args.fork:
        sys.exit(kill_forked_ranks(args, places))
    runs = [places[i : i + args.per_run] for i in range(0, len(places), args.per_run)]
    came_back = equal = 0
    with tempfile.TemporaryDirectory(prefix="kills_") as folder:
        untouched = run(args, Path(folder) / "untouched", [])
        print(f"untouched: {args.steps} steps, weights {untouched['checksum'][:16]}", flush=True)
        for number, kills in enumerate(runs, start=1):
            # In the order of their steps: a run goes on at or before the step of its last death.
            texts = [text for _, text in sorted(kills)]
            began = time.perf_counter()
            try:
                metrics = run(args, Path(folder) / str(number), texts)
            except LaunchFailed as error:
                print(f"run {number}: killed at {' '.join(texts)}: DID NOT COME BACK\n{error}")
                continue
            same = all(metrics[name] == untouched[name] for name in ("checksum", "losses"))
            came_back += metrics["restarts"]
            equal += same
            verdict = "losses and weights equal bit for bit" if same else "OTHER WEIGHTS"
            seconds = time.perf_counter() - began
            print(
                f"run {number}: killed at {' '.join(texts)}, back {metrics['restarts']} times, "
                f"{verdict} ({seconds:.0f} s)",
                flush=True,
            )
    print(f"{came_back} of {len(places)} kills came back; {equal} of {len(runs)} runs equal")
    sys.exit(came_back != len(places) or equal != len(runs))


def draw_places(args: argparse.Namespace) -> list[tuple[int, str]]:
    """Where to kill, as (step, text for --kill), in an order that mixes both kinds."""
    draw = random.Random(args.seed)
    steps = [draw.randrange(args.steps) for _ in range(args.kills)]
    places = [(step, f"{step}:{draw.randrange(args.nproc)}") for step in steps]
    for _ in range(args.saves):
        step = draw.randrange(1, args.steps + 1)  # the next save from there on
        places.append((step, f"{step}:0:{draw.random():.3f}"))
    draw.shuffle(places)
    return places


def kill_forked_ranks(args: argparse.Namespace, places: list[tuple[int, str]]) -> int:
    """The same kills one by one, in processes that are forked; 1 if one does not come out equal."""
    torch.set_num_threads(1)
    corpus = load_corpus("grammar", max_train=200)
    tokenizer = Tokenizer.train((text for pair in corpus.train for text in pair), 300)
    pairs = list(PairDataset.encode(corpus.train, tokenizer, max_len=512))
    size = Size(32, 1, 300, num_pairs=200, batch=16, steps=args.steps, interval=args.interval)

    def train(rank: int, folder: Path, kill: Kill | None) -> tuple[int, list[float], str]:
        place = Rank(rank, rank, args.nproc, torch.device("cpu"), "gloo")
        state, step = translator_training(pairs, tokenizer.vocab_size, size, args.steps, 0, place)
        load_checkpoint(folder, state)
        began, save = state.step, partial(save_checkpoint, folder)
        losses = resume_training(
            state, kill.in_step(step, state) if kill else step, num_steps=args.steps,
            batch_size=16 // args.nproc, interval=args.interval,
            save=kill.in_save(save) if kill else save, load=lambda state: None,
        )  # fmt: skip
        return began, losses, checksum(unwrapped(state.model))

    equal = 0
    with tempfile.TemporaryDirectory(prefix="kills_") as folder:
        untouched = run_ranks(train, args.nproc, Path(folder) / "untouched", None, timeout=600)[0]
        for number, (_, text) in enumerate(places, start=1):
            kill, own = Kill.parse(text), Path(folder) / str(number)
            died = ""
            try:
                run_ranks(train, args.nproc, own, kill, timeout=600)
            except RankFailed as error:
                died = str(error).splitlines()[0]
            began, *again = run_ranks(train, args.nproc, own, None, timeout=600)[0]
            same = again == [*untouched[1:]] and "SIGKILL" in died
            equal += same
            print(f"{number:3} {text:10} {died}; from step {began}, equal: {same}", flush=True)
    print(f"{equal} of {len(places)} killed runs come out with equal losses and weights")
    return int(equal != len(places))


def run(args: argparse.Namespace, out: Path, kills: list[str]) -> dict[str, Any]:
    """One run of the script, killed at these places."""
    flags = ["--preset", "tiny", "--device", "cpu", "--steps", args.steps, "--untimed"]
    flags += ["--interval", args.interval, "--save", args.save, "--out", out]
    flags += ["--kill", *kills] if kills else []
    return launch(SCRIPT, args.nproc, flags, timeout=args.timeout, max_restarts=len(kills))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="at random steps and ranks")
    parser.add_argument("--saves", type=int, default=5, help="within a save")
    parser.add_argument("--fork", action="store_true", help="one kill a run, without torchrun")
    parser.add_argument("--per-run", type=int, default=5, help="kills of one run")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--interval", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--save", choices=("wait", "background"), default="wait")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
