"""A small language model learns one language, then a second one by full tuning, LoRA or QLoRA."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from shared.data.corpora import ParallelCorpus, load_corpus
from shared.errors import InputError
from shared.lora.counting import Tuning
from shared.lora.layers import LoRALinear, add_lora, places_meant
from shared.lora.qlora import QLoRALinear
from shared.measuring.timing import repetitions
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.training.language_recipes import rows
from shared.training.schedules import cosine_schedule, set_learning_rate

NAMES = ("w_q", "w_k", "w_v", "w_o", "linear1", "linear2")  # all of a layer's matrices
KINDS = {"lora": LoRALinear, "qlora": QLoRALinear}
WINDOWS = 64  # of held-out text
SEEDS = range(repetitions(5))
Tokens = Int[Tensor, "tokens"]


@dataclass(frozen=True)
class Texts:
    """Two languages as bytes: what is trained on, and what a loss is measured on."""

    base: Tokens
    new: Tokens
    base_held: Tokens
    new_held: Tokens


def texts_of(corpus: ParallelCorpus, most: int | None = None, length: int = 0) -> Texts:
    """The two sides of a corpus, line by line; a byte is a token, so no alphabet is unknown.

    `most` bytes of each at most. Raises InputError where one is too short for windows of `length`.
    """
    sides = [
        torch.tensor(list("\n".join(pair[side] for pair in pairs).encode()[:most]))
        for pairs in (corpus.train, corpus.validation)
        for side in (0, 1)
    ]
    if min(map(len, sides)) <= length + 1:
        raise InputError(
            f"{corpus.name} has a side of {min(map(len, sides))} bytes; a window needs {length + 2}"
        )
    return Texts(*sides)


def english_and_german() -> Texts:
    """The course's own corpus."""
    return texts_of(load_corpus("grammar"))


@dataclass(frozen=True)
class Run:
    """How one model is trained: sizes, steps and the peak of the learning rate."""

    d_model: int = 64
    num_layers: int = 1
    length: int = 64
    batch: int = 8
    base_steps: int = 150
    steps: int = 40
    base_peak: float = 1e-2


def make_model(run: Run, seed: int) -> LanguageModel:
    """The model at its start; bytes are its vocabulary."""
    torch.manual_seed(seed)
    return LanguageModel(
        TransformerConfig(
            vocab_size=256,
            d_model=run.d_model,
            num_heads=4,
            num_layers=run.num_layers,
            d_ff=4 * run.d_model,
            dropout=0.0,
            max_len=run.length,
            positions="rotary",
        )
    )


def train(model: nn.Module, text: Tokens, run: Run, steps: int, peak: float, seed: int) -> None:
    """Train what is not frozen with AdamW and half a cosine, on random windows of a text."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=peak)
    for step in range(1, steps + 1):
        tokens, follow = rows(text, step, seed, run.batch, run.length, slice(None))
        set_learning_rate(optimizer, cosine_schedule(step, steps // 10, steps, peak))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), follow.flatten()).backward()
        optimizer.step()


@torch.no_grad()
def held_loss(
    model: nn.Module, held: Tokens, length: int, device: torch.device | str = "cpu"
) -> float:
    """The loss in nats a byte on the same windows of held-out text every time."""
    tokens, follow = (x.to(device) for x in rows(held, 0, 19, WINDOWS, length, slice(None)))
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), follow.flatten()).item()


def base_model(texts: Texts, run: Run, seed: int) -> LanguageModel:
    """A model that knows the first language."""
    model = make_model(run, seed)
    train(model, texts.base, run, run.base_steps, run.base_peak, seed)
    return model


def adapted(
    base: nn.Module, tuning: Tuning, alpha: float, seed: int, rest: bool = False
) -> nn.Module:
    """A copy of the base, ready to be tuned.

    With `rest` all but the layers' matrices is trained too: embedding (and output), norms, biases;
    under the method "full" nothing else.
    """
    model = copy.deepcopy(base)
    matrices = [linear.weight for _, linear in places_meant(model, NAMES)]
    torch.manual_seed(seed)
    if tuning.method != "full":
        add_lora(model, tuning.names, tuning.rank, alpha, KINDS[tuning.method])
    if rest:
        model.requires_grad_(True)
        for weight in matrices:
            weight.requires_grad_(False)
    return model
