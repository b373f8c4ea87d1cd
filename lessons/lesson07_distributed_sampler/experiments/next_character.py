"""A language model that trains in a fraction of a second: the next character, from the last few.

What data loading does to training shows in the differences between many runs, so runs must be
cheap: an embedding, one hidden layer, a softmax over some sixty characters (Bengio et al. 2003).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import Dataset

from shared.data.corpora import ParallelCorpus
from shared.errors import InputError

CONTEXT = 6  # characters that the next one is guessed from
UNKNOWN = 0  # the id of a character that is hidden, or was never seen
Characters = tuple[Int[Tensor, "batch context"], Int[Tensor, "batch"]]


class CharacterData(Dataset[Characters]):
    """Contexts of CONTEXT characters and the character that follows each.

    `count` places are taken from the whole text at equal distances, so neighbours in the dataset
    overlap only where the text is short. Raises InputError when the text has not that many.
    """

    def __init__(self, text: str, count: int, alphabet: str) -> None:
        if not 1 <= count <= len(text) - CONTEXT:
            raise InputError(
                f"{count} samples asked for; a text of {len(text)} characters has 1 to "
                f"{len(text) - CONTEXT} places with {CONTEXT} characters before them"
            )
        self.alphabet = alphabet
        known = {character: id for id, character in enumerate(alphabet, start=UNKNOWN + 1)}
        ids = torch.tensor([known.get(character, UNKNOWN) for character in text])
        places = torch.linspace(CONTEXT, len(text) - 1, count, dtype=torch.float64).long()
        self.contexts = ids[places[:, None] + torch.arange(-CONTEXT, 0)]  # (count, CONTEXT)
        self.targets = ids[places]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int | list[int] | slice) -> Characters:
        """One sample, or several at once."""
        return self.contexts[index], self.targets[index]


class NoisyCharacters(Dataset[tuple[Tensor, ...]]):
    """The samples with a tenth of their characters hidden, at random, by whoever loads them.

    A batch, asked for in one call, is (indices, contexts, targets); hidden places are UNKNOWN.
    """

    def __init__(self, data: CharacterData, share: float = 0.1) -> None:
        self.data, self.share = data, share

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """What DataLoader calls for a batch; pass `collate_fn=tuple`, nothing is left to do."""
        contexts, targets = self.data[indices]
        hidden = torch.rand(contexts.shape) < self.share  # (B, CONTEXT)
        return torch.tensor(indices), contexts.masked_fill(hidden, UNKNOWN), targets


def character_data(
    corpus: ParallelCorpus, num_train: int, num_validation: int = 2000
) -> tuple[CharacterData, CharacterData]:
    """Training and validation samples from the target side of a corpus, one sentence a line."""
    text, held_out = (
        "\n".join(pair.tgt for pair in split) for split in (corpus.train, corpus.validation)
    )
    alphabet = "".join(sorted(set(text)))
    num_validation = min(num_validation, len(held_out) - CONTEXT)
    train = CharacterData(text, num_train, alphabet)
    return train, CharacterData(held_out, num_validation, alphabet)


class NextCharacter(nn.Module):
    """Logits of the next character: embeddings side by side, one hidden layer, softmax."""

    def __init__(self, num_characters: int, d_model: int = 16, d_hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters + 1, d_model)  # UNKNOWN is one more
        self.hidden = nn.Linear(CONTEXT * d_model, d_hidden)
        self.logits = nn.Linear(d_hidden, num_characters + 1)

    def forward(self, contexts: Int[Tensor, "batch context"]) -> Float[Tensor, "batch characters"]:
        """Logits over all characters, UNKNOWN included."""
        return self.logits(self.hidden(self.embedding(contexts).flatten(1)).relu())


def train_on(
    model: nn.Module, data: CharacterData, batches: Sequence[Sequence[int]], peak: float
) -> nn.Module:
    """One step of SGD with momentum for each batch of indices, the rate falling to 0; in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    for batch in batches:
        contexts, targets = data[list(batch)]
        optimizer.zero_grad()
        F.cross_entropy(model(contexts), targets).backward()
        optimizer.step()
        falling.step()
    return model


@torch.no_grad()
def mean_loss(model: nn.Module, data: CharacterData) -> float:
    """Mean cross-entropy over the whole dataset, in nats a character."""
    contexts, targets = data[:]
    return float(F.cross_entropy(model(contexts), targets))


@torch.no_grad()
def score_loss(model: nn.Module, samples: Sequence[Characters]) -> tuple[float, int]:
    """Sum of the cross-entropy over some samples, and their number."""
    logits, targets = _predict(model, samples)
    return float(F.cross_entropy(logits, targets, reduction="sum")), len(targets)


@torch.no_grad()
def score_hits(model: nn.Module, samples: Sequence[Characters]) -> tuple[float, int]:
    """How many samples the model guesses right, and how many there are."""
    logits, targets = _predict(model, samples)
    return float((logits.argmax(-1) == targets).sum()), len(targets)


def _predict(model: nn.Module, samples: Sequence[Characters]) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    contexts, targets = (torch.stack(each).to(device) for each in zip(*samples, strict=True))
    return model(contexts), targets
