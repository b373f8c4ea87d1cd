"""Training tokens/s of our Transformer against torch.nn.Transformer, measured in one run.

Both models have the same sizes, the same weights, the same embeddings and output projection, and
train on the same batch with the same loss (F.cross_entropy) and optimizer; the loss of both is
compared before the clock starts. Repetitions alternate, and the ratio is the median over pairs
of neighbouring repetitions, so that a machine whose speed drifts slows both alike.

    python tests/benchmarks/training_speed.py                # CPU float32, or CUDA bf16
    python tests/benchmarks/training_speed.py --compile      # torch.compile for both, too

Tokens are the source and target tokens of the batch that are not padding.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.model.torch_twin import TorchTwin
from shared.model.transformer import Transformer

SIZES = {
    # name: config, batch size, source length, target length
    "course": (TransformerConfig(4000, dropout=0.0), 64, 24, 24),
    "long": (TransformerConfig(4000, dropout=0.0), 8, 160, 160),
    "tiny": (TransformerConfig(8000, 128, 4, 4, 256, dropout=0.0), 64, 24, 24),
    "base": (TransformerConfig(8000, 512, 8, 6, 2048, dropout=0.0), 16, 32, 32),
    "base-gpu": (TransformerConfig(32000, 512, 8, 6, 2048, dropout=0.0), 128, 128, 128),
    "big-gpu": (TransformerConfig(32000, 1024, 16, 6, 4096, dropout=0.0), 64, 128, 128),
}
DROPOUTS = {"0": (0.0, 0.0), "0.1": (0.1, 0.1)}  # on both sides in the same places


@dataclass
class Contender:
    """One model with its optimizer, ready to take steps."""

    name: str
    step: Callable[[], Tensor]
    seconds: list[float]


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {args.threads} thread"
    print(
        f"{where}, {'bf16 autocast' if device.type == 'cuda' else 'float32'}, {torch.__version__}"
    )
    head = ("sizes", "norm", "dropout", "ours / torch", "tokens/s", "tokens/s", "ratio")
    print("{:10} {:5} {:8} {:24} {:>10} {:>10} {:>6}".format(*head), flush=True)
    worst = float("inf")
    for name in args.sizes:
        for norm in args.norms:
            for dropout in args.dropout:
                worst = min(worst, *measure(name, norm, dropout, device, args))
    print(f"lowest ratio of like with like: {worst:.3f}")
    sys.exit(args.at_least is not None and worst < args.at_least)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    default = ["base-gpu", "big-gpu"] if cuda else ["course", "long", "tiny"]  # base: 10 s a step
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=default)
    parser.add_argument("--norms", nargs="+", choices=["pre", "post"], default=["pre", "post"])
    parser.add_argument("--dropout", nargs="+", choices=DROPOUTS, default=list(DROPOUTS))
    parser.add_argument("--repeats", type=int, default=9, help="timed pairs (9)")
    parser.add_argument("--steps", type=int, default=10 if cuda else 1, help="steps in each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile, both")
    parser.add_argument("--at-least", type=float, help="exit 1 if a ratio is lower")
    return parser.parse_args()


def measure(
    name: str, norm: str, dropout: str, device: torch.device, args: argparse.Namespace
) -> list[float]:
    """Time one setting, print its lines, return the ratios of like with like."""
    config, batch, source, target = SIZES[name]
    outer, inner = DROPOUTS[dropout]
    config = replace(config, norm=norm, dropout=outer, inner_dropout=inner)
    torch.manual_seed(0)
    ours = Transformer(config).to(device)
    theirs = TorchTwin(ours).to(device)
    data = make_batch(config, batch, source, target, device)
    compare_losses(ours, theirs, data, device)
    contenders = [contender("ours", ours, data, device), contender("torch", theirs, data, device)]
    if args.compile:
        contenders += [
            contender("ours compiled", torch.compile(ours), data, device),
            contender("torch compiled", torch.compile(theirs), data, device),
        ]
    run(contenders, args.repeats, args.steps, device)
    tokens = int((data[0] != 0).sum() + (data[1] != 0).sum()) * args.steps
    pairs = [(0, 1)] + ([(2, 1), (2, 3)] if args.compile else [])
    ratios = []
    for a, b in pairs:
        left, right = contenders[a], contenders[b]
        ratio = statistics.median(y / x for x, y in zip(left.seconds, right.seconds, strict=True))
        speeds = [tokens / statistics.median(each.seconds) for each in (left, right)]
        print(
            f"{name:10} {norm:5} {dropout:8} {left.name + ' / ' + right.name:24} "
            f"{speeds[0]:10,.0f} {speeds[1]:10,.0f} {ratio:6.3f}",
            flush=True,
        )
        if (a, b) != (2, 1):
            ratios.append(ratio)
    return ratios


def make_batch(
    config: TransformerConfig, batch: int, source: int, target: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random ids; lengths between 60 % and 100 %, padded at the end, as in a bucketed batch."""
    generator = torch.Generator().manual_seed(1)

    def side(length: int) -> Tensor:
        ids = torch.randint(4, config.vocab_size, (batch, length), generator=generator)
        ends = torch.randint(int(0.6 * length), length + 1, (batch, 1), generator=generator)
        ends[0] = length
        return ids.masked_fill(torch.arange(length) >= ends, config.pad_id)

    src, tgt = side(source), side(target + 1)
    return src.to(device), tgt[:, :-1].to(device), tgt[:, 1:].to(device)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor, Tensor], device: torch.device) -> Tensor:
    """The loss that both train on; bf16 autocast on a GPU."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(data[0], data[1])
    return F.cross_entropy(logits.flatten(0, 1).float(), data[2].flatten(), ignore_index=0)


def compare_losses(
    ours: nn.Module, theirs: nn.Module, data: tuple[Tensor, Tensor, Tensor], device: torch.device
) -> None:
    """Refuse to time two models that do not compute the same thing."""
    ours.eval(), theirs.eval()
    with torch.enable_grad():  # no_grad would send the engine to its inference kernels
        pair = [loss_of(model, data, device).item() for model in (ours, theirs)]
    ours.train(), theirs.train()
    tolerance = 2e-2 if device.type == "cuda" else 1e-4
    if abs(pair[0] - pair[1]) > tolerance:
        raise InputError(f"the two models' losses differ: {pair[0]:.6f} and {pair[1]:.6f}")


def contender(
    name: str, model: Any, data: tuple[Tensor, Tensor, Tensor], device: torch.device
) -> Contender:
    """A model with its optimizer and the step that is timed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, data, device)
        loss.backward()
        optimizer.step()
        return loss

    return Contender(name, step, [])


def run(contenders: list[Contender], repeats: int, steps: int, device: torch.device) -> None:
    """Warm up, then take turns; the order turns round from one repetition to the next."""
    for each in contenders:
        for _ in range(3):
            each.step()
    for repeat in range(repeats):
        for each in contenders if repeat % 2 == 0 else reversed(contenders):
            synchronise(device)
            start = time.perf_counter()
            for _ in range(steps):
                each.step()
            synchronise(device)
            each.seconds.append(time.perf_counter() - start)


def synchronise(device: torch.device) -> None:
    """A GPU's launches are asynchronous: wait for them before looking at the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
