"""Causal models that tell distances apart: by a bias (ALiBi), and by what it is compared with.

The task is to name the word so many places to the left. Seeds and offsets are trained side by side:
their parameters are stacked, and Adam, which works number by number, does not notice.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from shared.measuring.timing import repetitions
from shared.model.embeddings import PositionalEncoding, rotary

NUM_WORDS, D_MODEL, NUM_HEADS, LONGEST = 16, 32, 8, 16
BATCH, NUM_TESTS = 16, 32
VARIANTS = ("mask alone", "sinusoidal", "rotary", "ALiBi")
Bias = Callable[[int, int], Tensor]  # (length, heads) -> what is added to the scores


class Block(nn.Module):
    """A pre-norm layer whose words see themselves and what stands to their left."""

    def __init__(self, rotate: bool, bias: Bias | None) -> None:
        super().__init__()
        self.rotate, self.bias = rotate, bias
        self.norm_1, self.norm_2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.w_qkv, self.w_o = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.up, self.down = nn.Linear(D_MODEL, 4 * D_MODEL), nn.Linear(4 * D_MODEL, D_MODEL)

    def forward(self, x: Float[Tensor, "batch length d_model"]) -> Tensor:
        """Return the new vectors."""
        length = x.shape[1]
        heads = self.w_qkv(self.norm_1(x)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, H, L, K) each
        if self.rotate:
            positions = torch.arange(length)
            query, key = rotary(query, positions), rotary(key, positions)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # (B, H, L, L)
        if self.bias is not None:
            scores = scores + self.bias(length, NUM_HEADS)
        scores = scores.masked_fill(
            torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
        )
        x = x + self.w_o((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm_2(x)).relu())


def build(variant: str, bias: Bias) -> nn.Module:
    """Words to logits; the variants are the same model but for their positions."""
    codes = PositionalEncoding(D_MODEL, 4 * LONGEST) if variant == "sinusoidal" else nn.Identity()
    block = partial(Block, variant == "rotary", bias if variant == "ALiBi" else None)
    words, logits = nn.Embedding(NUM_WORDS, D_MODEL), nn.Linear(D_MODEL, NUM_WORDS)
    return nn.Sequential(words, codes, block(), block(), nn.LayerNorm(D_MODEL), logits)


def shares_right(
    variant: str, bias: Bias, offsets: Sequence[int], seeds: int, steps: int
) -> dict[int, dict[int, list[float]]]:
    """Train on 8 to 16 words; return the shares of right answers by offset and length, by seed."""
    models = []
    for _, seed in itertools.product(offsets, range(seeds)):
        torch.manual_seed(seed)
        models.append(build(variant, bias))
    state = stack_module_state(models)
    of_models = vmap(partial(functional_call, models[0]), in_dims=((0, 0), 0))
    optimizer = torch.optim.AdamW(state[0].values())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1)
    shape = len(offsets), seeds
    for _ in range(steps):
        length = int(torch.randint(LONGEST // 2, LONGEST + 1, (), generator=generator))
        words = torch.randint(NUM_WORDS, (len(models), BATCH, length), generator=generator)
        logits = of_models(state, words).unflatten(0, shape)  # (offsets, seeds, B, L, V)
        loss = torch.zeros(())
        for offset, said, shown in zip(offsets, logits, words.unflatten(0, shape), strict=True):
            asked = said[:, :, offset:].flatten(0, 2)
            # The mean over all seeds, times their number: each model has a loss of its own.
            loss = loss + seeds * F.cross_entropy(asked, shown[:, :, :-offset].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    found: dict[int, dict[int, list[float]]] = {offset: {} for offset in offsets}
    for length in (LONGEST, 4 * LONGEST):
        words = torch.randint(NUM_WORDS, (len(models), NUM_TESTS, length), generator=generator)
        with torch.no_grad():
            said = of_models(state, words).argmax(-1)
        for offset, mine, shown in zip(
            offsets, said.unflatten(0, shape), words.unflatten(0, shape), strict=True
        ):
            right = mine[:, :, offset:] == shown[:, :, :-offset]
            found[offset][length] = right.double().mean((1, 2)).tolist()
    return found


def share_out(
    rank: int, world_size: int, bias: Bias, offsets: Sequence[int], seeds: int = 5, steps: int = 200
) -> dict[str, dict[int, dict[int, list[float]]]]:
    """Return what this rank's part of the variants reaches, for `run_ranks`."""
    torch.set_num_threads(1)
    mine, seeds = VARIANTS[rank::world_size], repetitions(seeds)
    return {variant: shares_right(variant, bias, offsets, seeds, steps) for variant in mine}
