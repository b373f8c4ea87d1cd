"""Lesson 11: stacks of layers to checkpoint, where their bytes are, one step under an engine."""

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shared.ddp.wrapping import Wrapped
from shared.measuring.activations import Saved, counting_saved, saved_by_module
from shared.measuring.live import PeakOfLive, count_live_bytes
from shared.model.single_layer import make_layer

BATCH, LENGTH, WIDTH, HEADS = 2, 48, 64, 4
Checkpoint = Callable[..., Any]


def make_stack(num_layers: int, **settings: Any) -> nn.ModuleList:
    """Equal layers with weights of their own, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.ModuleList(make_layer(**settings) for _ in range(num_layers))


def make_input(dtype: torch.dtype = torch.float32) -> Float[Tensor, "batch length d_model"]:
    """A batch of 2 x 48 vectors that need a gradient, the same in every process."""
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(dtype)
    return x.requires_grad_()


def run_stack(layers: Sequence[Any], x: Tensor, checkpoint: Checkpoint, choice: Sequence[bool]):
    """Run the layers in turn, those of `choice` under `checkpoint`."""
    for layer, again in zip(layers, choice, strict=True):
        x = checkpoint(layer, x) if again else layer(x)
    return x


def bytes_of_step(
    layers: nn.ModuleList, run: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[int, int]:
    """Bytes kept at the end of forward, and at the worst moment of forward and backward."""
    with counting_saved(layers.parameters()) as saved:
        result = run(x)
        held = saved.now
        result.sum().backward()
    return held, saved.peak


def live_peak(run: Callable[[], Any], already: Sequence[Tensor]) -> int:
    """Bytes that a step makes at the worst moment of forward and backward, gradients apart.

    `already` are the parameters and what else is there before; their gradients are made here.
    """
    grads = [torch.zeros_like(x) for x in already if isinstance(x, nn.Parameter)]
    for x, grad in zip((x for x in already if isinstance(x, nn.Parameter)), grads, strict=True):
        x.grad = grad
    with count_live_bytes(already=[*already, *grads]) as live:
        before = live.now()
        with PeakOfLive(live) as peak:
            run()
    return peak.most - before


class Checkpointed(Wrapped):
    """A layer of a model whose forward goes through `checkpoint`; names stay the layer's own."""

    def __init__(self, module: nn.Module, checkpoint: Checkpoint) -> None:
        super().__init__(module)
        self.checkpoint = checkpoint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, now and once more in backward; keywords are no tensors to go back to."""
        return self.checkpoint(partial(self.module, **kwargs), *args)


def checkpoint_layers(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Put every layer of the model's ModuleLists under `checkpoint`, and return the model."""
    for stack in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        for number, layer in enumerate(stack):
            stack[number] = Checkpointed(layer, checkpoint)
    return model


# Korthikanti et al. 2022, section 4.1: what is saved, in units of s b h numbers and of a s / h
# times as many, and the bytes a number (masks have 1 byte there).
PAPER = [
    ("norms", "inputs of both norms", 4.0, 0.0),
    ("attention", "input of the three projections", 2.0, 0.0),
    ("attention", "queries and keys", 4.0, 0.0),
    ("attention", "softmax", 0.0, 2.0),
    ("attention", "mask on the softmax", 0.0, 1.0),
    ("attention", "softmax after dropout", 0.0, 2.0),
    ("attention", "values", 2.0, 0.0),
    ("attention", "input of the output projection", 2.0, 0.0),
    ("attention", "mask on the output", 1.0, 0.0),
    ("feed-forward", "input of linear1", 2.0, 0.0),
    ("feed-forward", "input of GeLU", 8.0, 0.0),
    ("feed-forward", "input of linear2", 8.0, 0.0),
    ("feed-forward", "mask on the output", 1.0, 0.0),
]


def label(saved: Saved, seen: Sequence[str]) -> str:
    """What a saved tensor of `make_layer` is, in the paper's words, from its place and shape."""
    quadratic = saved.shape[-1] == saved.shape[-2] == LENGTH
    if saved.where.startswith("norm"):
        return "inputs of both norms" if saved.shape[-1] == WIDTH else "statistics of both norms"
    if saved.where == "self_attention" and quadratic:
        order = ["softmax", "mask on the softmax", "softmax after dropout"]
        return order[sum(each in order for each in seen)]
    if saved.where == "self_attention":
        projected = [each for each in seen if each in ("queries and keys", "values")]
        return "queries and keys" if len(projected) < 2 else "values"
    names = {
        "self_attention.w_q": "input of the three projections",
        "self_attention.w_k": "input of the three projections",
        "self_attention.w_o": "input of the output projection",
        "feed_forward.linear1": "input of linear1",
        "feed_forward": "input of linear2",  # the ReLU's result, which it keeps as well
        "dropout": "mask on the output",
    }
    return names[saved.where]


def counted_terms(dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Bytes of a layer with by-hand attention and dropout, by term: in s b h, and in a s^2 b."""
    layer = make_layer(attention_dropout=0.1, fused=False).to(dtype)
    x, terms, seen = make_input(dtype), dict[str, tuple[float, float]](), list[str]()
    for saved in saved_by_module(layer, lambda: layer(x)):
        name = label(saved, seen)
        seen.append(name)
        quadratic = saved.shape[-1] == saved.shape[-2] == LENGTH
        unit = HEADS * LENGTH * LENGTH * BATCH if quadratic else LENGTH * BATCH * WIDTH
        linear, square = terms.get(name, (0.0, 0.0))
        share = saved.nbytes / unit
        terms[name] = (linear, square + share) if quadratic else (linear + share, square)
    return terms


class Shared(nn.Module):
    """Blocks of which the first is used a second time at the end, each under `checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, shared: bool) -> None:
        super().__init__()
        self.checkpoint, self.shared = checkpoint, shared
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Float[Tensor, "batch 4"]) -> Float[Tensor, "batch 4"]:
        """Return the last block's output."""
        x = self.first(x)
        for block in [*self.blocks, *([self.blocks[0]] if self.shared else [])]:
            x = self.checkpoint(block, x)
        return x


def step_under(
    rank: int, wrap: Callable[[nn.Module], nn.Module], checkpoint: Checkpoint, shared: bool
) -> str:
    """Two backwards of a small model under an engine; how far from one process, or the error.

    For a rank of its own, whose stderr it closes: DDP's C++ warns there, with times and numbers.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.manual_seed(0)
    model = Shared(checkpoint, shared)
    twin = copy.deepcopy(model)
    twin.checkpoint = lambda block, x: block(x)
    batch = torch.randn(6, 4)
    try:
        engine = wrap(model)
        for _ in range(2):
            model.zero_grad()
            engine(batch[3 * rank : 3 * rank + 3]).sum().backward()
            getattr(engine, "finish_gradient_sync", lambda: None)()  # lesson 06's by hand
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split('.')[0].split(':')[0]}"
    (twin(batch).sum() / 2).backward()
    mine, theirs = (
        torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, twin)
    )
    gap = (mine - theirs).abs().max().item()
    return "gradients equal" if gap < 1e-6 else f"gradients off by {gap:.1e}"
