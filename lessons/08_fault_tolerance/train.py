"""Train a translator that may be killed at any moment, and goes on as if it had not been.

torchrun --nproc_per_node=2 --max-restarts=2 lessons/08_fault_tolerance/train.py --kill 37:1 45:0
torchrun --nproc_per_node=2 --max-restarts=1 lessons/08_fault_tolerance/train.py --kill 40:0:0.5
python lessons/08_fault_tolerance/train.py --reference
The same command again goes on from the last checkpoint in --checkpoints.
"""

import argparse
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from shared.data.corpora import load_corpus
from shared.data.loading import PairDataset
from shared.data.tokenizer import Tokenizer
from shared.exercises.answers import lesson_answers
from shared.experiments.lesson08_runs import (
    Build,
    Size,
    reference_training,
    rehearse,
    translator_training,
)
from shared.experiments.lesson08_save_times import draw_run, time_saves
from shared.fault_tolerance.background import BackgroundSaver
from shared.fault_tolerance.checkpoints import restart_count
from shared.fault_tolerance.elastic import load_elastic, save_elastic
from shared.fault_tolerance.fitting import unwrapped
from shared.fault_tolerance.kills import Kill
from shared.fault_tolerance.state import TrainingState
from shared.plots import save_figure
from shared.ranks.group import Rank, process_group
from shared.script import (
    checked_out,
    choose_preset,
    lesson_parser,
    positive_int,
    run_script,
    write_metrics,
)
from shared.training.reference_run import NUM_STEPS, checksum, compare_with_record

SIZES = {
    "tiny": Size(32, 1, 300, num_pairs=200, batch=16, steps=12, interval=4),
    "small": Size(128, 2, 2000, num_pairs=4000, batch=32, steps=60, interval=10),
    "large": Size(512, 6, 8000, num_pairs=None, batch=256, steps=1000, interval=100),
}


def choose_run(args: argparse.Namespace, rank: Rank) -> tuple[Build, dict[str, int]]:
    """What is trained: a function that begins it anew, and its counts."""
    size = choose_preset(args, rank.device, SIZES)
    interval = args.interval or size.interval
    if args.reference:
        return reference_training, {"num_steps": NUM_STEPS, "batch_size": 1, "interval": interval}
    corpus = load_corpus(args.dataset, empty=args.empty, max_train=size.num_pairs)
    tokenizer = Tokenizer.train((text for pair in corpus.train for text in pair), size.vocab_size)
    pairs = list(PairDataset.encode(corpus.train, tokenizer, max_len=512))
    steps = args.steps or size.steps
    build = partial(translator_training, pairs, tokenizer.vocab_size, size, steps, args.seed, rank)
    share = size.batch // rank.world_size
    return build, {"num_steps": steps, "batch_size": share, "interval": interval}


def train(args: argparse.Namespace, rank: Rank, parts: SimpleNamespace) -> None:
    """Go on from what there is, train to the end, rehearse a restart, write it all down."""
    build, counts = choose_run(args, rank)
    kills = [Kill.parse(text) for text in args.kill]
    for kill in kills:
        kill.refuse_unless_it_comes(rank.world_size, counts["num_steps"])
    state, take_step = build()
    folder = args.checkpoints or args.out / "checkpoints" / run_name(args, rank, counts)
    saver = BackgroundSaver(checked_out(folder, "--checkpoints" if args.checkpoints else "--out"))
    save, load = {
        "wait": (partial(parts.save_checkpoint, folder), partial(parts.load_checkpoint, folder)),
        "background": (saver.save, partial(parts.load_checkpoint, folder)),
        "elastic": (partial(save_elastic, folder), partial(load_elastic, folder, seed=args.seed)),
    }[args.save]
    began_at: list[int] = []

    def load_and_note(state: TrainingState) -> None:
        path = load(state)
        began_at.append(state.step)
        if rank.is_main and path is not None:
            print(f"going on from step {state.step} of {counts['num_steps']}: {path}", flush=True)

    if restart_count() < len(kills):  # one for each start
        kill = kills[restart_count()]
        take_step, save = kill.in_step(take_step, state), kill.in_save(save)
    losses = parts.resume_training(state, take_step, **counts, save=save, load=load_and_note)
    saver.wait()
    headline, table = "not rehearsed, not timed", []
    if not args.untimed:
        go_on = partial(parts.resume_training, **counts)
        headline = rehearse(folder, state, build, go_on, parts.load_checkpoint)
        table = time_saves(folder / "timing", state, repeats=1 if args.reference else 3)
    if rank.is_main:
        if table:
            shutil.rmtree(folder / "timing")
            stops = [row["stops training, ms"] for row in table[:2]]
            headline += f"; a save stops training {stops[0]} ms, in the background {stops[1]} ms"
        extra = {"difference_from_record": compare_with_record(losses)} if args.reference else {}
        extra |= {"began_at": began_at[0], "restarts": restart_count(), "losses": losses}
        run_row = {"steps": len(losses), "last start at step": began_at[0]}
        run_row |= {"restarts": restart_count(), "last loss": round(losses[-1], 3)}
        save_figure(draw_run(losses, table, began_at[0]), args.out / "resumed.png")
        final = checksum(unwrapped(state.model))
        rows = table or [run_row]
        write_metrics(args.out, rank, headline=headline, table=rows, checksum=final, **extra)


def run_name(args: argparse.Namespace, rank: Rank, counts: dict[str, int]) -> str:
    """A folder for each kind of run, so that another size begins, and does not go on."""
    own = f"{args.preset or 'default'}_{Path(args.dataset).name}"
    what = "reference" if args.reference else own
    ranks = "elastic" if args.save == "elastic" else f"{rank.world_size}_ranks"
    return f"{what}_seed{args.seed}_{counts['num_steps']}_steps_{ranks}"


def main() -> None:
    parser = lesson_parser("08_fault_tolerance", __doc__, dataset="grammar")
    parser.add_argument("--interval", type=positive_int, help="steps between checkpoints")
    ways = ("wait", "background", "elastic")
    parser.add_argument("--save", choices=ways, default="wait", help="how to save (wait)")
    parser.add_argument("--checkpoints", type=Path, help="folder (one in --out for each setting)")
    what = "STEP:RANK or STEP:RANK:SHARE: kill -9 there, one for each start of the ranks"
    parser.add_argument("--kill", nargs="+", default=[], metavar="WHERE", help=what)
    what_not = "leave out the rehearsal and the timing of saves at the end"
    parser.add_argument("--untimed", action="store_true", help=what_not)
    parser.add_argument("--reference", action="store_true", help="train the course's reference run")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        checked_out(args.out)
        train(args, rank, lesson_answers("08", mine=args.mine))


if __name__ == "__main__":
    run_script(main)
