"""A translator that learns 160 sentences by heart, and what it loses on the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from shared.data.batching import Batch, EncodedPair, collate, random_batches
from shared.data.corpora import ParallelCorpus
from shared.data.pairs import Pair
from shared.data.tokenizer import Tokenizer
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.training.loop import average_weights, mean_loss
from shared.training.loss import label_smoothed_loss

NUM_TRAINED, NUM_HELD_OUT = 160, 100
BATCH = 16  # pairs: ten steps an epoch
VOCAB, RATE = 600, 5e-3


@dataclass(frozen=True)
class Epoch:
    """Losses (nats per token, dropout off) and weights at the end of an epoch.

    `hits` is the share of held-out tokens that the model gives the largest probability, in per
    cent, with the right tokens before them shown.
    """

    training: float
    held_out: float
    hits: float
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class FewSentences:
    """A small part of a corpus, encoded: what is trained on, and what is only looked at."""

    trained: list[EncodedPair]
    held_out: Batch
    vocab_size: int

    @classmethod
    def draw(
        cls, corpus: ParallelCorpus, seed: int, num_trained: int = NUM_TRAINED
    ) -> "FewSentences":
        """Draw the training pairs; the held-out ones are the same for every seed."""
        tokenizer = Tokenizer.train((text for pair in corpus.train for text in pair), VOCAB)

        def encode(pairs: Sequence[Pair]) -> list[EncodedPair]:
            return [(tokenizer.encode(src), tokenizer.encode(tgt)) for src, tgt in pairs]

        trained = encode(Random(seed).sample(corpus.train, num_trained))
        held_out = collate(encode(corpus.validation[:NUM_HELD_OUT]))
        return cls(trained, held_out, tokenizer.vocab_size)


def train_and_look(
    few: FewSentences, num_epochs: int, seed: int = 0, dropout: float = 0.0
) -> tuple[Transformer, list[Epoch]]:
    """Train from the first weights of `seed` and look at both losses after every epoch."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        few.vocab_size, d_model=64, num_heads=2, num_layers=2, d_ff=128, dropout=dropout, max_len=64
    )
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98), eps=1e-9)
    seen = collate(few.trained[:NUM_HELD_OUT])
    epochs = []
    for epoch in range(num_epochs):
        for drawn in random_batches(few.trained, BATCH, seed=seed + epoch):
            batch = collate([few.trained[i] for i in drawn])
            logits = model(batch.src, batch.tgt_in)
            loss = label_smoothed_loss(logits, batch.tgt_out, smoothing=0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        training, (held_out, hits) = mean_loss(model, [seen]), look(model, few.held_out)
        epochs.append(Epoch(training, held_out, hits, weights))
    return model, epochs


@torch.no_grad()
def look(model: Transformer, batch: Batch) -> tuple[float, float]:
    """Return the mean loss of a batch without smoothing, and the per cent of tokens hit."""
    model.eval()
    logits = model(batch.src, batch.tgt_in)
    model.train()
    asked = batch.tgt_out != 0
    loss = label_smoothed_loss(logits, batch.tgt_out, smoothing=0.0)
    return loss.item(), 100 * (logits.argmax(-1) == batch.tgt_out)[asked].float().mean().item()


def best_epoch(epochs: list[Epoch]) -> int:
    """Return the index of the epoch with the smallest held-out loss: what early stopping keeps."""
    return min(range(len(epochs)), key=lambda i: epochs[i].held_out)


def averaged_loss(model: Transformer, epochs: list[Epoch], held_out: Batch) -> float:
    """Return the held-out loss of the mean of these epochs' weights; the model takes them."""
    model.load_state_dict(average_weights([epoch.weights for epoch in epochs]))
    return look(model, held_out)[0]
