"""Train a translator that may be killed at any moment, and resumes as if it had not been.

torchrun --nproc_per_node=2 --max-restarts=2 lessons/lesson08_fault_tolerance/train.py --kill 37:1
torchrun --nproc_per_node=2 --max-restarts=1 lessons/lesson08_fault_tolerance/train.py --kill 9:0:1
python lessons/lesson08_fault_tolerance/train.py --reference
The same command again resumes from the last checkpoint in --checkpoints.

On SIGTERM, and on Ctrl-C (130), all ranks end their step, save, and leave with status 99, on which
Grid Engine requeues a job, and LSF with bsub -Q 99. torchrun itself ends with 1 then; train.sbatch
looks for the file `requeue` in --out. two_nodes.sh starts the script on two machines.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from lessons.lesson08_fault_tolerance.experiments import report
from lessons.lesson08_fault_tolerance.experiments import resumable_runs as runs
from lessons.lesson08_fault_tolerance.experiments.saving import Meter
from shared import script
from shared.data.batching import collate
from shared.fault_tolerance import preemption
from shared.fault_tolerance.background import BackgroundSaver
from shared.fault_tolerance.checkpoints import load_checkpoint, resume_training, save_checkpoint
from shared.fault_tolerance.elastic import load_elastic, save_elastic
from shared.fault_tolerance.fitting import SamplerOfData
from shared.fault_tolerance.state import TakeStep, TrainingState
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.group import Rank, process_group
from shared.script import autocast, choose_preset, lesson_parser, positive_int, prepare, run_script
from shared.training.loss import label_smoothed_loss
from shared.training.schedules import cosine_schedule

SIZES = {  # batches that 1 to 6 ranks can share
    "tiny": runs.Size(32, 1, 300, num_pairs=200, batch=60, steps=12, interval=4),
    "small": runs.Size(128, 2, 2000, num_pairs=4000, batch=60, steps=60, interval=10),
    "large": runs.Size(512, 6, 8000, num_pairs=None, batch=240, steps=1000, interval=100),
}


def begin_training(
    args: argparse.Namespace, rank: Rank, pairs: list, vocab_size: int, meter: Meter
) -> tuple[TrainingState, TakeStep]:
    """The run before its first step, and the step: what a checkpoint has to bring back."""
    size = SIZES[args.preset]
    torch.manual_seed(args.seed)  # the same first weights on every rank
    config = TransformerConfig(vocab_size, size.d_model, 4, size.num_layers, 4 * size.d_model)
    model = DistributedDataParallel(Transformer(config).to(rank.device))
    with autocast(args, rank.device):
        runs.settle_buckets(model, rank.device)  # or a restart would add in another order
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98))
    peak, warmup, end = 2e-3, min(100, args.steps // 4), args.steps + 1
    schedule = LambdaLR(optimizer, lambda done: cosine_schedule(done + 1, warmup, end, peak))
    sampler = SamplerOfData(args.data, len(pairs), rank.world_size, rank.rank, args.seed)
    runs.seed_generators(args.seed + 1 + rank.rank)  # dropout and noise of its own on every rank

    def take_step(indices: list[int]) -> float:
        noisy = [(runs.noisy(pairs[i][0]), pairs[i][1]) for i in indices]
        batch = collate(noisy).to(rank.device)
        tokens = torch.full((), batch.num_tokens, device=rank.device)  # made there, not fetched
        dist.all_reduce(tokens)  # of all ranks: sentences differ in length
        meter.tokens += tokens

        optimizer.zero_grad()
        with autocast(args, rank.device):
            loss = label_smoothed_loss(model(batch.src, batch.tgt_in), batch.tgt_out)
        loss = loss * (batch.num_tokens / tokens)  # this rank's part of the mean over all tokens
        # While backward runs, DDP all-reduces the gradients and divides by the number of ranks.
        (loss * rank.world_size).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # of the mean: the same factor on every rank
        optimizer.step()  # resume_training steps the schedule and counts
        total = loss.detach()
        dist.all_reduce(total)  # the parts add up
        return total.item()  # the step's one wait for a GPU: a checkpoint keeps numbers

    return TrainingState(model, optimizer, schedule, sampler), take_step


def train(args: argparse.Namespace, rank: Rank) -> None:
    """Load or begin, then step after step, saving now and then, to the end or to a SIGTERM."""
    meter = Meter(rank)
    build = choose_run(args, rank, meter)
    state, take_step = build()
    folder = report.folder_for(args, rank)
    saver = BackgroundSaver(folder)
    write, read = {
        "wait": (partial(save_checkpoint, folder), partial(load_checkpoint, folder)),
        "background": (saver.save, partial(load_checkpoint, folder)),
        "elastic": (partial(save_elastic, folder), partial(load_elastic, folder, seed=args.seed)),
    }[args.save]
    if kill := runs.kill_of_this_start(args, rank):
        take_step, write = kill.in_step(take_step, state), kill.in_save(write)

    def load(state: TrainingState) -> None:  # once, before the first step
        path = read(state)  # the newest that is whole, read by rank 0 for all; None at the start
        meter.begin(state.step, args.steps, path)

    def save(state: TrainingState) -> None:  # asked after every step
        told, done = notice.to_anyone(), state.step == args.steps
        args.untimed |= told  # no time is left to rehearse
        if told or done or state.step % args.interval == 0:
            write(state)  # aside, flushed, renamed: a kill in between costs an interval, no more
        if told and not done:
            saver.wait()
            raise preemption.Preempted(state.step, args.steps, folder, notice.by)

    resume = partial(resume_training, num_steps=args.steps, batch_size=args.share, interval=1)
    with preemption.notice_of_sigterm(rank.device) as notice:
        resume(state, meter.timed(take_step), save=save, load=load)
        saver.wait()
    rehearsal = partial(runs.rehearse, folder, state, build, resume, load_checkpoint)
    report.conclude(args, rank, state, meter, folder, rehearsal)


def choose_run(args: argparse.Namespace, rank: Rank, meter: Meter) -> runs.Build:
    """How a run begins, anew each time it is called; args get steps, interval and share."""
    size = choose_preset(args, rank.device, SIZES)
    args.interval = args.interval or size.interval
    if args.reference:
        return runs.reference_for_script(args, rank, meter)
    args.steps, args.share = args.steps or size.steps, runs.share_of(size.batch, rank)
    return partial(begin_training, args, rank, *runs.load_pairs(args, size), meter)


def main() -> None:
    parser = lesson_parser(__file__, __doc__, dataset="grammar", precision=True)
    parser.add_argument("--interval", type=positive_int, help="steps between checkpoints")
    ways = ("wait", "background", "elastic")
    parser.add_argument("--save", choices=ways, default="wait", help="how to save (wait)")
    parser.add_argument("--checkpoints", type=script.given_path, help="(in --out, by setting)")
    what = "STEP:RANK[:SHARE of the file written]: kill -9 there, one a start of the ranks"
    parser.add_argument("--kill", nargs="+", default=[], metavar="WHERE", help=what)
    what_not = "leave out the rehearsal and the timing of saves at the end"
    parser.add_argument("--untimed", action="store_true", help=what_not)
    parser.add_argument("--reference", action="store_true", help="train the course's reference run")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        with preemption.asking_to_requeue(args.out, rank):
            train(args, rank)


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
