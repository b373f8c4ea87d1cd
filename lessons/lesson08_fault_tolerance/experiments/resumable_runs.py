"""Two runs that can be interrupted: the reference model, and a translator with random noise."""

import argparse
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from lessons.lesson08_fault_tolerance.experiments.saving import Meter
from shared.data.batching import EncodedPair, collate
from shared.data.loading import PairDataset
from shared.data.sampling import ResumableSampler
from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.fault_tolerance.checkpoints import checkpoints_in, from_rank_0, restart_count
from shared.fault_tolerance.fitting import unwrapped
from shared.fault_tolerance.kills import Kill
from shared.fault_tolerance.state import TakeStep, TrainingState
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.group import Rank, current_rank, current_world_size
from shared.script import load_same_corpus
from shared.training import reference_run
from shared.training.loop import mean_over_ranks
from shared.training.loss import label_smoothed_loss
from shared.training.schedules import cosine_schedule

Build = Callable[[], tuple[TrainingState, TakeStep]]


def reference_training() -> tuple[TrainingState, TakeStep]:
    """Return the reference run on this rank: its state, and its step on one of the 50 batches.

    The sampler's indices are the batches in their recorded order, the same on every rank, so
    `batch_size` is 1; each rank takes its rows. One rank computes what the record was made with.
    """
    model = reference_run.reference_model()
    optimizer = reference_run.reference_optimizer(list(model.parameters()))
    schedule = LambdaLR(optimizer, lambda done: reference_run.learning_rate(done + 1))
    sampler = ResumableSampler(reference_run.NUM_STEPS, num_replicas=1, rank=0, shuffle=False)
    batches = reference_run.reference_batches()

    def take_step(indices: list[int]) -> float:
        (index,) = indices
        if current_world_size() == 1:
            return reference_run.whole_step(model, optimizer, batches[index])
        mine = reference_run.shard(batches[index], current_rank(), current_world_size())
        optimizer.zero_grad()
        loss_sum = reference_run.loss_of(model, mine, global_tokens=1)  # a sum, not a mean
        loss_sum.backward()
        loss = mean_over_ranks(model.parameters(), loss_sum.detach(), mine.num_tokens)
        optimizer.step()
        return loss.item()

    return TrainingState(model, optimizer, schedule, sampler), take_step


@dataclass(frozen=True)
class Size:
    """A translator and how long it is trained; `batch` counts the pairs of all ranks."""

    d_model: int
    num_layers: int
    vocab_size: int
    num_pairs: int | None  # None: all of the corpus
    batch: int
    steps: int
    interval: int


def translator_training(
    pairs: Sequence[EncodedPair], vocab_size: int, size: Size, num_steps: int, seed: int, rank: Rank
) -> tuple[TrainingState, TakeStep]:
    """Return a translator under DDP that draws from every generator a checkpoint has to hold.

    Dropout draws from torch's (on a GPU, CUDA's); the noise on the source side, as in denoising
    (words left out, two neighbours swapped), from python's and numpy's; the order is shuffled.
    """
    share_of(size.batch, rank)
    torch.manual_seed(seed)  # the same first weights on every rank
    config = TransformerConfig(
        vocab_size, size.d_model, num_heads=4, num_layers=size.num_layers, d_ff=4 * size.d_model
    )
    model = DistributedDataParallel(Transformer(config).to(rank.device))
    settle_buckets(model, rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98))
    warmup = min(100, num_steps // 4)
    schedule = LambdaLR(optimizer, lambda n: cosine_schedule(n + 1, warmup, num_steps + 1, 2e-3))
    sampler = ResumableSampler(len(pairs), rank.world_size, rank.rank, seed=seed)
    seed_generators(seed + 1 + rank.rank)  # random numbers of its own on every rank

    def take_step(indices: list[int]) -> float:
        batch = collate([(noisy(pairs[i][0]), pairs[i][1]) for i in indices]).to(rank.device)
        tokens = torch.tensor(batch.num_tokens, device=rank.device)
        dist.all_reduce(tokens)
        optimizer.zero_grad()
        mean = label_smoothed_loss(model(batch.src, batch.tgt_in), batch.tgt_out)
        part = mean * (batch.num_tokens / tokens)  # of the loss per token of the whole batch
        (part * rank.world_size).backward()  # DDP divides by the number of ranks
        optimizer.step()
        loss = part.detach()
        dist.all_reduce(loss)
        return loss.item()

    return TrainingState(model, optimizer, schedule, sampler), take_step


def share_of(batch: int, rank: Rank) -> int:
    """Return this rank's part of a batch of all ranks; InputError where it does not divide."""
    if batch % rank.world_size:
        fit = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        raise InputError(
            f"a batch of {batch} cannot be shared evenly by {rank.world_size} ranks: start"
            f" {', '.join(fit[:6])}{' or another divisor' if len(fit) > 6 else ''}"
        )
    return batch // rank.world_size


def seed_generators(seed: int) -> None:
    """Seed torch's, python's and numpy's generators alike."""
    for seed_one in (torch.manual_seed, random.seed, np.random.seed):
        seed_one(seed)


def load_pairs(args: argparse.Namespace, size: Size) -> tuple[list[EncodedPair], int]:
    """Return the training pairs of `--dataset` in tokens, and the vocabulary's size."""
    corpus = load_same_corpus(args, size.num_pairs)
    tokenizer = Tokenizer.train((text for pair in corpus.train for text in pair), size.vocab_size)
    return list(PairDataset.encode(corpus.train, tokenizer, max_len=512)), tokenizer.vocab_size


def reference_for_script(args: argparse.Namespace, rank: Rank, meter: Meter) -> Build:
    """Return what begins the reference run; its steps and its precision are those of the record."""
    if args.steps or args.precision == "bf16":
        raise InputError(
            f"--reference has {reference_run.NUM_STEPS} steps in float32: leave out --steps and"
            " --precision"
        )
    if rank.device.type != "cpu":
        raise InputError("--reference trains on the CPU, as the record was made: add --device cpu")
    share_of(reference_run.GLOBAL_BATCH, rank)
    args.steps, args.share, args.precision = reference_run.NUM_STEPS, 1, "fp32"
    num_tokens = [batch.num_tokens for batch in reference_run.reference_batches()]

    def build() -> tuple[TrainingState, TakeStep]:
        state, take_step = reference_training()

        def take_counted(indices: list[int]) -> float:
            meter.tokens += sum(num_tokens[index] for index in indices)
            return take_step(indices)

        return state, take_counted

    return build


def kill_of_this_start(args: argparse.Namespace, rank: Rank) -> Kill | None:
    """Return where --kill ends this start of the ranks; InputError for a place that never comes."""
    kills = [Kill.parse(text) for text in args.kill]
    for kill in kills:
        kill.refuse_unless_it_comes(rank.world_size, args.steps)
    return kills[restart_count()] if restart_count() < len(kills) else None


def settle_buckets(model: DistributedDataParallel, device: torch.device) -> None:
    """Take one backward for nothing, so that DDP's buckets have their final order from step 1 on.

    DDP begins with its parameters in reverse order and lays its buckets out anew before the second
    step, in the order in which gradients came. A restarted run would take its first step with the
    first layout where the uninterrupted one had the second; an all-reduce over more than two ranks
    then adds in another order, and the last bits differ.
    """
    batch = collate([([3, 4], [5, 6])]).to(device)
    model(batch.src, batch.tgt_in).sum().backward()
    model.zero_grad(set_to_none=True)


def noisy(words: list[int], dropped: float = 0.1) -> list[int]:
    """Return the source with about a tenth of its words left out and two neighbours swapped."""
    kept = [word for word in words if random.random() >= dropped] or words[:1]
    at = int(np.random.randint(len(kept)))
    return [*kept[:at], *reversed(kept[at : at + 2]), *kept[at + 2 :]]


def rehearse(
    folder: Path,
    state: TrainingState,
    build: Build,
    resume: Callable[..., object],
    load: Callable[[Path, TrainingState], object],
) -> str:
    """Resume from the checkpoint before the last; return, in words, whether the weights agree.

    They are compared with those of `state`. That a checkpoint can be used is known only once it has
    been. `build` begins the run anew, `resume` is resume_training but for state, step, save and
    load; every rank calls it. Nothing is written.
    """
    older = checkpoints_in(folder)[:-1]
    if not from_rank_0([bool(older)])[0]:
        return "no older checkpoint to rehearse with"
    again, take_step = build()
    with tempfile.TemporaryDirectory() as scratch:
        if older:  # on rank 0, which reads for all
            shutil.copy(older[-1], scratch)
        load_older = partial(load, Path(scratch))
        began_at: list[int] = []

        def load_and_note(state: TrainingState) -> None:
            load_older(state)
            began_at.append(state.step)

        resume(again, take_step, save=lambda state: None, load=load_and_note)
    sums = [reference_run.checksum(unwrapped(each.model)) for each in (again, state)]
    verdict = "equal bit for bit" if sums[0] == sums[1] else "DIFFER"
    return f"resumed from step {began_at[0]}: weights {verdict}"
