"""One run handed from mode to mode, on as many ranks as each likes, by checkpoints."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank

from shared.capstone.config import Config, DataTable, ModelTable, ParallelTable, TrainingTable
from shared.capstone.modes import How, check_mode, import_for, make
from shared.capstone.resuming import Origin, resume_run, save_run
from shared.capstone.tasks import LanguageTask, build_model, learning_rate, own_share
from shared.data.corpora import load_corpus
from shared.data.text import TextCorpus
from shared.ranks.forked import run_ranks
from shared.ranks.group import Rank
from shared.training.engine import DataParallelEngine, train_step
from shared.training.schedules import set_learning_rate

MODEL = ModelTable("modern", 32, 4, 4, 2, 96, vocab_size=400, length=32)
STEPS = 2  # of each runner


class Runner(NamedTuple):
    """A mode on some ranks."""

    mode: str
    ranks: int
    parallel: dict[str, Any]


RUNNERS = (
    Runner("single", 1, {}),
    Runner("fsdp2", 3, {}),
    Runner("3d", 4, {"tp": 2, "pp": 2, "micro_batches": 2}),
    Runner("deepspeed", 2, {"zero": 2}),
    Runner("ddp", 3, {}),
    Runner("deepspeed", 3, {"zero": 3}),
    Runner("3d", 2, {"zero": 3}),
)


def config_of(parallel: dict[str, Any]) -> Config:
    """The same run for every runner."""
    training = TrainingTable(batch=12, steps=STEPS * len(RUNNERS), warmup=2, peak=3e-3)
    return Config(MODEL, DataTable("grammar", 60_000), training, ParallelTable(**parallel))


def english() -> TextCorpus:
    """The English sentences of the course's own corpus, one a line: the same on every machine."""
    corpus = load_corpus("grammar")
    train, validation, test = (
        "".join(f"{pair.src}\n" for pair in pairs)
        for pairs in (corpus.train, corpus.validation, corpus.test)
    )
    return TextCorpus("grammar", train, validation, test)


def load_task() -> LanguageTask:
    """Windows of English sentences."""
    return LanguageTask(english(), config_of({}), seed=0)


def leg(
    rank: int, task: LanguageTask, runner: Runner, first: int, count: int, folder: Path | None
) -> list[float]:
    """Resume from the folder, train some steps, save there; on one rank."""
    config, place = config_of(runner.parallel), Rank(rank, rank, runner.ranks, DEVICE, "gloo")
    check_mode(runner.mode, config, runner.ranks)
    torch.manual_seed(0)
    made = make(runner.mode, build_model(MODEL, task.vocab_size), config, place, How())
    origin = Origin.of(config, task.vocab_size, 0, "")
    if folder is not None and first > 1:
        resume_run(folder, made, origin)
    losses = []
    for step in range(first, first + count):
        batch = task.batch(step)
        set_learning_rate(made.engine.optimizer, learning_rate(config, step, config.training.steps))
        own = own_share(batch, *made.engine.share)
        part, _ = train_step(made.engine, own, batch.num_tokens, config.training.max_norm)
        losses.append(made.engine.global_loss(part).item())
    if folder is not None:
        save_run(folder, made, origin, first + count - 1, place, runner.mode, keep=2)
    made.close()
    return losses


DEVICE = torch.device("cpu")


def relay(task: LanguageTask, folder: Path) -> tuple[list[float], list[float]]:
    """The losses of all runners in turn, and those of one process that was never stopped."""
    import_for("deepspeed", "cpu")  # before there is a group
    warnings.filterwarnings("ignore", category=FutureWarning)
    losses: list[float] = []
    for i, runner in enumerate(RUNNERS):
        given = (task, runner, 1 + i * STEPS, STEPS, folder)
        losses += run_ranks(leg, runner.ranks, *given, timeout=200)[0]
    alone = run_ranks(leg, 1, task, RUNNERS[0], 1, len(losses), None, timeout=200)[0]
    return losses, alone


def after_a_restart(task: LanguageTask, seed: int, forgets: str = "") -> list[float]:
    """Six steps in one process, a restart that forgets something, and four more.

    `forgets`: "" nothing, "moments" the optimizer's states, "step" where the data and the
    learning rate were. Returns the losses after the restart.
    """
    config = config_of({})
    torch.manual_seed(seed)
    model = build_model(MODEL, task.vocab_size)
    optimizer, losses = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95)), []
    engine = DataParallelEngine(model, optimizer)
    for i in range(1, 11):
        if i == 7 and forgets == "moments":
            engine.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
        step = i - 6 if i > 6 and forgets == "step" else i
        batch = task.batch(step)
        set_learning_rate(engine.optimizer, learning_rate(config, step, config.training.steps))
        part, _ = train_step(engine, batch, batch.num_tokens, config.training.max_norm)
        losses += [part.item()] if i > 6 else []
    return losses
