"""Settings of the course's translator: one for tests, one for two cores, one published."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from shared.model.config import Norm, TransformerConfig
from shared.training.schedules import cosine_schedule, warmup_schedule


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained. `max_tokens` bounds the global batch, padding included."""

    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    dropout: float
    norm: Norm
    vocab_size: int
    max_tokens: int
    steps: int
    warmup: int
    peak: float
    schedule: Literal["cosine", "paper"] = "cosine"
    average: int = 1  # so many of the last checkpoints are averaged,
    interval: int = 50  # taken so many steps apart
    num_train: int | None = None  # so many pairs of the corpus; None: all
    num_test: int = 1000

    def config(self, vocab_size: int) -> TransformerConfig:
        """The model's description; the tokenizer may have found fewer merges than asked for."""
        return TransformerConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            d_ff=self.d_ff,
            dropout=self.dropout,
            norm=self.norm,
        )

    def learning_rate(
        self,
        step: int,
        steps: int,
        paper: Callable[..., float] = warmup_schedule,
        cosine: Callable[..., float] = cosine_schedule,
    ) -> float:
        """The rate at `step` of a run of `steps`, which may be shorter than the recipe's own."""
        if self.schedule == "cosine":
            warmup = min(self.warmup, steps // 2)
            return cosine(step, warmup, steps, self.peak)
        # The paper's peak follows from d_model and warm-up; this run's has its own factor.
        scale = self.peak / paper(self.warmup, self.d_model, self.warmup)
        return scale * paper(step, self.d_model, self.warmup)


TRANSLATION = {
    "tiny": Recipe(
        d_model=32, d_ff=64, num_heads=2, num_layers=1, dropout=0.0, norm="pre",
        vocab_size=300, max_tokens=1000, steps=10, warmup=5, peak=3e-3,
        num_train=2000, num_test=8,
    ),
    "small": Recipe(
        d_model=128, d_ff=512, num_heads=4, num_layers=2, dropout=0.05, norm="pre",
        vocab_size=4000, max_tokens=2000, steps=450, warmup=150, peak=5e-3,
    ),
    # Wu et al. 2021 (arXiv 2105.14462; github.com/LividWo/Revisit-MMT, README-baseline) for the
    # 29,000 captions of Multi30k: 4096 tokens on each of two GPUs, the last ten epochs averaged
    # (here ten checkpoints 50 steps apart, which is an epoch).
    "large": Recipe(
        d_model=128, d_ff=256, num_heads=4, num_layers=4, dropout=0.3, norm="post",
        vocab_size=10_000, max_tokens=2 * 4096, steps=8000, warmup=2000, peak=5e-3,
        schedule="paper", average=10,
    ),
}  # fmt: skip
# Where nobody says how many steps: some twenty seconds of two cores, which show the beginning.
_SHORT = {"dropout": 0.0, "max_tokens": 600, "steps": 200, "num_test": 200}
SHORT_TRANSLATION = TRANSLATION | {"small": replace(TRANSLATION["small"], **_SHORT)}
