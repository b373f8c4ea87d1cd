"""Train one model in every mode of the course: single, ddp, deepspeed, fsdp2 or 3d.

torchrun --nproc_per_node=2 lessons/lesson23_capstone/train.py --mode fsdp2 --config small
--config is a TOML file, or the name of one in configs/. --save DIR keeps checkpoints there, at the
end, at SIGTERM or Ctrl-C and as often as the file says; all nodes have to see DIR. --resume DIR
continues from the one that was written last, of any mode, on any number of ranks. With both, one
command serves every start: an empty DIR begins. A file with a [plan] is planned and not run.
"""

import argparse
from pathlib import Path

import torch

from lessons.lesson23_capstone.results import bytes_needed, conclude, find_config, print_plan
from shared.capstone.config import Config, read_config
from shared.capstone.keeping import Keeping, predicted_states
from shared.capstone.modes import (
    MODES,
    How,
    Made,
    check_mode,
    held_out_loss,
    import_for,
    make,
    num_parameters,
)
from shared.capstone.record import Record, tracing
from shared.capstone.resuming import Origin, resume_run, save_run, where_to_save
from shared.capstone.tasks import (
    LanguageTask,
    Task,
    TranslationTask,
    build_model,
    learning_rate,
    model_spec,
    own_share,
)
from shared.fault_tolerance.preemption import Preempted, asking_to_requeue, notice_of_sigterm
from shared.measuring.peak import peak_of
from shared.ranks.group import Rank, process_group
from shared.script import (
    autocast,
    choose_preset,
    given_path,
    lesson_parser,
    load_same_corpus,
    load_same_text,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.training.engine import train_step
from shared.training.schedules import set_learning_rate
from solutions.lesson23_capstone import grouped_attention

CONFIGS = {"tiny": "tiny", "small": "small", "large": "124m"}  # of --preset


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of this lesson."""
    add = parser.add_argument
    add("--mode", choices=MODES, help="(single on one process, else ddp)")
    add("--config", type=Path, metavar="FILE", help="TOML, or a name in configs/ (the preset's)")
    add("--save", type=given_path, metavar="DIR", help="checkpoints of the run, by step")
    what = "continue from one, of any mode and ranks; begin where DIR is empty"
    add("--resume", type=given_path, metavar="DIR", help=what)
    add("--compile", action="store_true", help="the layers, by torch.compile")
    add("--checkpointing", action="store_true", help="compute layers again in backward")
    add("--profile", nargs="?", type=positive_int, const=1, default=0, help="trace a step, or more")
    add("--tensorboard", action="store_true", help="metrics for it as well")
    return parser


def load_task(args: argparse.Namespace, config: Config) -> Task:
    """The data: a text for language models, pairs of sentences for the translator."""
    args.dataset, args.source, args.target, args.empty = config.data.dataset, "en", "de", "error"
    if config.model.kind == "translator":
        return TranslationTask(load_same_corpus(args, config.data.size), config, args.seed)
    return LanguageTask(load_same_text(args), config, args.seed)


def train(
    made: Made, task: Task, config: Config, args: argparse.Namespace, rank: Rank, origin: Origin
) -> Record:
    """The loop of the course: batch, rate, step; then what is written down, and saved."""
    given, engine, steps = config.training, made.engine, args.steps or config.training.steps
    folder = where_to_save(args, rank)
    first = 1 + (resume_run(args.resume, made, origin) if args.resume else 0)
    record = Record(args.out, rank, given.log_every, first, args.tensorboard)
    numbers = range(first, steps + 1)
    with (
        notice_of_sigterm(rank.device) as notice,
        tracing(args.profile, args.out, rank, numbers) as traced,
    ):
        for step in progress(numbers, rank, "training"):
            set_learning_rate(engine.optimizer, learning_rate(config, step, steps))
            batch = task.batch(step)  # the same on every rank; an engine says whose rows are whose
            own = own_share(batch, *engine.share).to(rank.device)
            part, norm = train_step(engine, own, batch.num_tokens, given.max_norm)
            record.add(engine, step, part, norm, batch.num_tokens)
            traced()
            last, stop = step == steps, notice.to_anyone_before()  # nothing waits for it
            if last or stop:
                record.flush(engine)
            if last or (given.evaluate_every and step % given.evaluate_every == 0):
                batches = task.held_out(given.evaluate_batches)
                record.evaluated(step, held_out_loss(engine, batches, own_share))
            due = args.save and (last or (given.save_every and step % given.save_every == 0))
            if due or (stop and not last):
                save_run(folder, made, origin, step, rank, args.mode, given.keep)
                record.restart()
                if stop and not last:
                    raise Preempted(step, steps, folder, notice.by)
    record.close()
    return record


def main() -> None:
    parser = lesson_parser(__file__, __doc__, precision=True)
    args = add_flags(parser).parse_args()
    import_for(args.mode, args.device)
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        name = choose_preset(args, rank.device, CONFIGS, bytes_needed)
        config = read_config(find_config(args.config or Path(name)))
        if config.plan:
            return print_plan(config, args, rank)
        args.mode = args.mode or ("single" if rank.world_size == 1 else "ddp")
        how = How(args.checkpointing, args.compile, autocast(args, rank.device))
        plan = check_mode(args.mode, config, rank.world_size, how)
        task = load_task(args, config)
        peak, keeping = peak_of(rank, args.precision), Keeping()
        torch.manual_seed(args.seed)  # the same first weights on every rank
        model = build_model(config.model, task.vocab_size, grouped_attention).to(rank.device)
        size, spec = num_parameters(model), model_spec(config.model, task.vocab_size)
        made = make(args.mode, model, config, rank, how)
        keeping.watch(made.engine)
        origin = Origin.of(config, task.vocab_size, args.seed, args.data, args.steps)
        with asking_to_requeue(args.out, rank, "--resume that folder goes on"):
            record = train(made, task, config, args, rank, origin)
        states = predicted_states(spec, plan), keeping.most
        conclude(args, rank, record, spec, peak, states, size)
        made.close()


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
