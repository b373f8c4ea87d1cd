"""Train a language model on text, its activations kept or computed a second time.

--checkpointing none keeps them all, all keeps each layer's input, sqrt keeps the inputs of sqrt(n)
segments, and plan chooses layers so that the layers' activations stay within --budget-mib at any
moment; those of the embedding and of the output come on top. A step without checkpoints takes turns
with it at first, for the ratio of times.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from lessons.lesson11_gradient_checkpointing.experiments.results import (
    PRESETS,
    Seen,
    Size,
    bytes_needed,
    conclude,
    count_step,
)
from shared import script
from shared.errors import InputError
from shared.measuring.activations import layer_costs, peak_bytes
from shared.measuring.timing import synchronized_now
from shared.model.language_model import LanguageModel
from shared.ranks.group import Rank, process_group
from shared.training.schedules import cosine_schedule, set_learning_rate
from solutions.lesson11_gradient_checkpointing import checkpoint, checkpoint_sequential, plan

TIMED = slice(2, 12)  # steps of which the time is taken, beside one without checkpoints
Layer = Callable[[Tensor], Tensor]


class Layers(nn.Module):
    """The model's layers as one, of which some are run again in backward.

    `arrangement` has a bool for each layer, or is a number of segments.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.arrangement: list[bool] | int = [False] * len(layers)

    def functions(self) -> list[Layer]:
        """The layers as functions of one tensor."""
        return [partial(layer, causal=True) for layer in self.layers]

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        """Return the last layer's output."""
        if isinstance(self.arrangement, int):
            return checkpoint_sequential(self.functions(), x, self.arrangement)
        for layer, again in zip(self.functions(), self.arrangement, strict=True):
            x = checkpoint(layer, x) if again else layer(x)
        return x


def arrange(
    layers: Layers, mode: str, x: Tensor, budget: float | None, seen: Seen
) -> list[bool] | int:
    """The layers to run again: all or none, the segments, or what a budget in MiB asks for."""
    count = len(layers.layers)
    if mode == "sqrt":
        return round(math.sqrt(count))
    if mode != "plan":
        return [mode == "all"] * count
    assert budget is not None
    costs = layer_costs(layers.functions(), x, layers.parameters())
    chosen = list(plan(costs, int(budget * 2**20)))
    seen.planned = peak_bytes(costs, chosen)
    return chosen


def forward_backward(model: nn.Module, tokens: Tensor, cast: torch.autocast) -> Tensor:
    """The second forward is inside of backward; DDP averages the gradients there as well."""
    with cast:
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def train(args: argparse.Namespace, rank: Rank, size: Size, steps: int, data: Tensor) -> Seen:
    """Train for so many steps; return what was seen."""
    torch.manual_seed(args.seed)
    model = LanguageModel(size.config()).to(rank.device)
    layers = Layers(model.layers)
    model.layers = nn.ModuleList([layers])
    sample = torch.zeros(size.batch, size.length, size.d_model, device=rank.device)
    none, seen = layers.arrangement, Seen(tokens=size.batch * size.length)
    with (cast := script.autocast(args, rank.device)):
        chosen = arrange(layers, args.checkpointing, sample, args.budget_mib, seen)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    torch.manual_seed(args.seed + 1 + rank.rank)  # batches and dropout of its own on every rank
    for number in script.progress(range(steps), rank, "training"):
        starts = torch.randint(len(data) - size.length, (size.batch,)).tolist()
        tokens = torch.stack([data[at : at + size.length + 1] for at in starts])
        tokens = tokens.to(rank.device, torch.long)
        if number == 0:
            layers.arrangement = chosen
            count_step(model, tokens, cast, seen)
        if number == TIMED.stop and rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(rank.device)  # of the steps to come
        timed = number in range(TIMED.start, TIMED.stop) or steps <= TIMED.start
        for arrangement in (none, chosen) if timed else (chosen,):
            layers.arrangement = arrangement
            optimizer.zero_grad()
            began = synchronized_now(rank.device)
            loss = forward_backward(ddp, tokens, cast)
            if timed:
                taken = seen.seconds if arrangement is chosen else seen.plain_seconds
                taken.append(synchronized_now(rank.device) - began)
        set_learning_rate(optimizer, cosine_schedule(number + 1, max(1, steps // 10), steps, 1e-3))
        clip_grad_norm_(model.parameters(), 1.0)  # averaged by then
        optimizer.step()
        seen.losses.append(loss)
    seen.layers_again = sum(chosen) if isinstance(chosen, list) else f"{chosen} segments"
    return seen


def main() -> None:
    parser = script.lesson_parser(__file__, __doc__, text="stdlib", precision=True)
    ways = ("none", "all", "sqrt", "plan")
    parser.add_argument("--checkpointing", choices=ways, default="all", help="which layers (all)")
    parser.add_argument("--budget-mib", type=float, help="activations of the layers on a rank")
    args = parser.parse_args()
    if (args.checkpointing == "plan") != (args.budget_mib is not None):
        raise InputError("--checkpointing plan and --budget-mib belong together: give both or none")
    if args.budget_mib is not None and not 0 < args.budget_mib < math.inf:
        raise InputError(f"--budget-mib must be above 0 and finite, got {args.budget_mib}")
    with process_group(args.device) as rank:
        script.prepare(args, rank, globals())
        size = script.choose_preset(args, rank.device, PRESETS, bytes_needed)
        text = script.load_same_text(args).train.encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if len(data) < 2 * size.length:
            raise InputError(f"--dataset {args.dataset}: {len(data)} bytes are too few to train on")
        conclude(args, rank, train(args, rank, size, args.steps or size.steps, data))


if __name__ == "__main__":
    script.run_script(main)  # timed: --jobs runs it alone
