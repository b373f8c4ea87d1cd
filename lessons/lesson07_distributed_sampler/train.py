"""What goes wrong without a sound when ranks share data, beside the right way.

torchrun --nproc_per_node=2 lessons/lesson07_distributed_sampler/train.py
torchrun --nproc_per_node=2 lessons/lesson07_distributed_sampler/train.py --pitfall no_set_epoch

A small language model is trained under torch's DDP from several seeds in each way: the same first
weights, the same steps, the same global batch. Workers hide a tenth of the characters at random.
`none` is the right way; each of the others differs from it in one line.
"""

import warnings
from dataclasses import replace
from functools import cache, partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data import DistributedSampler as PaddingSampler

from lessons.lesson07_distributed_sampler.experiments import next_character, pitfalls
from lessons.lesson07_distributed_sampler.experiments.next_character import (
    CharacterData,
    NextCharacter,
)
from lessons.lesson07_distributed_sampler.experiments.pitfalls import PRESETS, Preset
from shared import script
from shared.data.batching import moved
from shared.data.sampling import DistributedSampler, WatchedSampler
from shared.measuring.timing import synchronized_now
from shared.ranks.group import Rank, process_group
from shared.results import speed, write_results
from solutions.lesson07_distributed_sampler import exact_evaluation

NUM_TEST = 61  # a small test set, of a length that no usual number of ranks divides
PITFALLS = ("none", "no_set_epoch", "no_sampler", "padded_eval", "worker_seed")


def make_loader(pitfall: str, data: CharacterData, batch: int, seed: int, rank: Rank) -> DataLoader:
    """This rank's batches, right but for the pitfall."""
    if pitfall == "no_sampler":  # shuffle=True on every rank, and every rank was seeded alike
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    else:
        place = (rank.world_size, rank.rank)
        sampler = DistributedSampler(data, *place, seed=seed, drop_last=True)
    if rank.is_main:  # one warning for all, if set_epoch is forgotten
        sampler = WatchedSampler(sampler)
    # Workers seed themselves from this generator; usually it is torch's own, seeded alike.
    noise = 1000 * seed + (0 if pitfall == "worker_seed" else rank.rank)
    return DataLoader(
        next_character.NoisyCharacters(data), batch // rank.world_size, sampler=sampler,
        drop_last=True, generator=torch.Generator().manual_seed(noise),
        num_workers=1, persistent_workers=True, collate_fn=tuple,
    )  # fmt: skip


def train(
    pitfall: str, seed: int, data: CharacterData, preset: Preset, rank: Rank, cast: torch.autocast
) -> tuple[nn.Module, float, *tuple[Tensor, ...]]:
    """Train one model; return it, seconds, and this rank's indices and hidden places by step."""
    torch.manual_seed(seed)  # the same first weights on every rank
    model = NextCharacter(len(data.alphabet), d_hidden=preset.d_hidden).to(rank.device)
    ddp = DistributedDataParallel(model)
    loader = make_loader(pitfall, data, preset.batch, seed, rank)
    steps = len(data) // preset.batch  # of an epoch; without a sampler a loader would go on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, preset.epochs * steps)
    seen, began = list[tuple[Tensor, Tensor]](), synchronized_now(rank.device)
    for epoch in range(preset.epochs):
        if pitfall not in ("no_set_epoch", "no_sampler"):
            loader.sampler.set_epoch(epoch)  # ty: ignore[missing-attribute]
        for indices, contexts, targets in islice(loader, steps):
            with cast:
                logits = ddp(moved(contexts, rank.device))
            loss = F.cross_entropy(logits.float(), moved(targets, rank.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
            seen.append((indices, contexts == next_character.UNKNOWN))
    seconds = synchronized_now(rank.device) - began
    return model, seconds, *(torch.stack(each) for each in zip(*seen, strict=True))


def padded_evaluation(score, test, rank: Rank) -> float:
    """The share of hits, sums and counts over all ranks, but over the sampler's padding too."""
    mine = [test[i] for i in PaddingSampler(test, rank.world_size, rank.rank, shuffle=False)]
    hits = torch.tensor(score(mine), device=rank.device)
    dist.all_reduce(hits)
    return float(hits[0] / hits[1])


def run(job: tuple[str, int], learned, validation: list, preset: Preset, rank: Rank) -> dict:
    """Evaluate what one way has `learned`; return what the ranks saw and what came of it."""
    pitfall, seed = job
    # A padded evaluation is another look at the model of the right way.
    model, seconds, *seen = learned("none" if pitfall == "padded_eval" else pitfall, seed)
    everyone: list = [None] * rank.world_size
    dist.all_gather_object(everyone, seen)
    indices, hidden = (torch.stack(each) for each in zip(*everyone, strict=True))
    score, test = partial(next_character.score_hits, model), validation[:NUM_TEST]
    exact = exact_evaluation(score, test, device=rank.device)
    reported = padded_evaluation(score, test, rank) if pitfall == "padded_eval" else exact
    score_loss = partial(next_character.score_loss, model)
    loss = exact_evaluation(score_loss, validation, 512, rank.device)
    result = {"pitfall": pitfall, "seed": seed, "loss": loss, "exact": exact, "reported": reported}
    result["speed"] = speed(seconds, indices.shape[1], indices.numel(), rank.device)
    return result | pitfalls.what_was_seen(indices, hidden, preset.epochs)


def main() -> None:
    parser = script.lesson_parser(__file__, __doc__, dataset="grammar", precision=True)
    parser.add_argument("--pitfall", nargs="+", choices=PITFALLS, default=PITFALLS, help="(all)")
    counts = {"seeds": "runs a pitfall", "samples": "to train on", "batch": "samples a step"}
    for name, what in counts.items():
        parser.add_argument(f"--{name}", type=script.positive_int, help=f"{what} (the preset's)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # ty: ignore
    with process_group(args.device) as rank:
        script.prepare(args, rank, globals())
        preset = script.choose_preset(args, rank.device, PRESETS)
        given = {key: getattr(args, key) for key in ("seeds", "samples", "batch")}
        preset = replace(preset, **{key: value for key, value in given.items() if value})
        if args.steps:  # in whole epochs
            preset = replace(preset, epochs=max(1, args.steps * preset.batch // preset.samples))
        pitfalls.check_sizes(preset.samples, preset.batch, rank.world_size)
        corpus = script.load_same_corpus(args)
        data, validation = next_character.character_data(corpus, preset.samples)
        jobs = [(name, args.seed + i) for name in args.pitfall for i in range(preset.seeds)]
        fixed = {"data": data, "preset": preset, "rank": rank}
        learned = cache(partial(train, **fixed, cast=script.autocast(args, rank.device)))
        jobs = script.progress(jobs, rank, "runs")
        runs = [run(job, learned, [*validation], preset, rank) for job in jobs]
        if rank.is_main:
            rows, figures = pitfalls.tabulate(runs), {"pitfalls.png": pitfalls.draw_runs(runs)}
            words = pitfalls.headline(rows)
            write_results(args, rank, headline=words, table=rows, figures=figures, runs=runs)


if __name__ == "__main__":
    script.run_script(main)
