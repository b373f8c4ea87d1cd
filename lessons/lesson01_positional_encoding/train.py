"""What kind of position does a task need? Four small models, two tasks, shared out to the ranks.

torchrun --nproc_per_node=2 lessons/lesson01_positional_encoding/train.py

The tasks (experiments/order_tasks.py): "distance", the word three places to the left, and "place",
the fourth word. Training sees sentences up to a length, the test up to 4 x that.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lessons.lesson01_positional_encoding.experiments import order_tasks
from shared import script
from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.model.embeddings import LearnedPositions, PositionalEncoding, rotary
from shared.ranks.group import Rank, process_group
from shared.results import speed, write_results

VARIANTS = ("none", "sinusoidal", "learned", "rotary")
NUM_POINTS, NUM_HEADS = 20, 2  # points of an accuracy curve
FACTORS = (1, 1.5, 2, 4)  # lengths of the test's sentences, in units of the longest in training


@dataclass(frozen=True)
class Preset:
    steps: int
    seeds: int
    batch: int
    length: int  # of the longest training sentence; the shortest has half as many words
    d_model: int
    num_layers: int

    def __post_init__(self) -> None:
        if self.d_model % (2 * NUM_HEADS):
            raise InputError(f"--d-model {self.d_model} is no multiple of 4 (2 heads of pairs)")


PRESETS = {
    "tiny": Preset(steps=20, seeds=1, batch=16, length=8, d_model=16, num_layers=1),
    "small": Preset(steps=300, seeds=1, batch=64, length=16, d_model=32, num_layers=2),
    "large": Preset(steps=1000, seeds=3, batch=256, length=64, d_model=128, num_layers=2),
}


class Block(nn.Module):
    """A pre-norm Transformer layer; lesson 02 takes its attention apart, lesson 03 the rest."""

    def __init__(self, d_model: int, rotate) -> None:
        super().__init__()
        self.rotate = rotate
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.w_qkv, self.w_o = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.w_qkv(self.norm_1(x)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, H, L, K) each
        if self.rotate is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            query, key = self.rotate(query, positions), self.rotate(key, positions)
        mixed = F.scaled_dot_product_attention(query, key, value)  # no mask: all see all
        x = x + self.w_o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm_2(x)).relu())


def build_model(variant: str, preset: Preset) -> nn.Module:
    """Words to logits; the variants are the same model but for their positions."""
    D, max_len = preset.d_model, int(FACTORS[-1] * preset.length)
    added = {"sinusoidal": PositionalEncoding, "learned": LearnedPositions}.get(variant)
    positions = added(D, max_len) if added else nn.Identity()
    rotate = rotary if variant == "rotary" else None
    blocks = [Block(D, rotate) for _ in range(preset.num_layers)]
    words, logits = nn.Embedding(order_tasks.NUM_WORDS, D), nn.Linear(D, order_tasks.NUM_WORDS)
    return nn.Sequential(words, positions, *blocks, nn.LayerNorm(D), logits)


def train(model: nn.Module, task: str, seed: int, preset: Preset, bar, device, cast) -> dict:
    """Train on random lengths; return [step, accuracy at the longest] pairs, and the speed."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, preset.steps, pct_start=0.1)
    data, curve, taken, num_words = torch.Generator().manual_seed(seed), [], 0.0, 0
    for step in bar:
        began = synchronized_now(device)
        length = int(torch.randint(preset.length // 2, preset.length + 1, (), generator=data))
        words, targets = order_tasks.make_batch(task, preset.batch, length, data)
        with cast:
            logits = model(words.to(device)).transpose(1, 2)  # (B, V, L)
        loss = F.cross_entropy(logits.float(), targets.to(device), ignore_index=order_tasks.IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        taken, num_words = taken + synchronized_now(device) - began, num_words + words.numel()
        if step % math.ceil(preset.steps / NUM_POINTS) == 0:
            right = order_tasks.accuracy(model, task, preset.length)
            curve.append([step, float(right.nanmean())])
    return {"curve": curve, "speed": speed(taken, preset.steps, num_words, device)}


def measure(task: str, variant: str, seed: int, preset: Preset, rank: Rank, cast) -> dict:
    """Train one model; return its curve and its accuracy on sentences up to four times longer."""
    torch.manual_seed(seed)
    model = build_model(variant, preset).to(rank.device)
    steps = script.progress(range(1, preset.steps + 1), rank, f"{task}, {variant}, seed {seed}")
    seen = train(model, task, seed, preset, steps, rank.device, cast)
    right = [order_tasks.accuracy(model, task, int(each * preset.length)) for each in FACTORS]
    by_position = [None if share.isnan() else float(share) for share in right[-1]]
    run = {"task": task, "variant": variant, "seed": seed, "rank": rank.rank, **seen}
    by_length = [[len(each), float(each.nanmean())] for each in right]
    return run | {"by_length": by_length, "by_position": by_position}


def main() -> None:
    parser = script.lesson_parser(__file__, __doc__, precision=True)
    parser.add_argument("--seeds", type=script.positive_int, help="models a variant (preset's)")
    parser.add_argument("--d-model", type=script.positive_int, help="width (the preset's)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are slower on several threads
    with process_group(args.device) as rank:
        script.prepare(args, rank, globals())
        preset = script.choose_preset(args, rank.device, PRESETS)
        given = {"steps": args.steps, "seeds": args.seeds, "d_model": args.d_model}
        preset = replace(preset, **{key: value for key, value in given.items() if value})
        mine = VARIANTS[rank.rank :: rank.world_size]  # r, r + n, r + 2n, ...
        print(f"rank {rank.rank} of {rank.world_size} trains: {', '.join(mine) or 'nothing'}")
        seeds = range(args.seed, args.seed + preset.seeds)
        jobs = itertools.product(order_tasks.TASKS, mine, seeds)
        cast = script.autocast(args, rank.device)
        runs = [measure(*job, preset, rank, cast) for job in jobs]
        received: list | None = [None] * rank.world_size if rank.is_main else None
        dist.gather_object(runs, received)  # every rank's list, to rank 0 alone
        if received is not None:
            runs = list(itertools.chain(*received))
            figures = {"accuracy.png": order_tasks.draw_tasks(runs)}
            table = order_tasks.accuracy_table(runs)
            last = f"% at {int(FACTORS[-1] * preset.length)} words"
            far = ", ".join(f"{row['positions']} {row[last]}" for row in table[:4])
            headline = f"% right on 4x longer sentences, distance: {far}"
            write_results(args, rank, headline=headline, table=table, figures=figures, runs=runs)


if __name__ == "__main__":
    script.run_script(main)
