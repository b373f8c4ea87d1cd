"""What label smoothing and beam search do to a translator that still makes mistakes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shared.data.batching import EncodedPair, collate, pair_lengths
from shared.data.corpora import ParallelCorpus
from shared.data.tokenizer import Tokenizer
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.training.decoding import beam_search, greedy_decode, translate
from shared.training.loop import global_batches
from shared.training.loss import label_smoothed_loss
from shared.training.schedules import cosine_schedule, set_learning_rate
from shared.training.scoring import score_table

VOCAB, MAX_TOKENS, RATE = 1000, 1500, 5e-3
BEAMS = {"greedy": 1, "beam of 2": 2, "beam of 5": 5, "beam of 10": 10}


@dataclass(frozen=True)
class Task:
    """A corpus, encoded, and test sentences with their references."""

    tokenizer: Tokenizer
    trained: list[EncodedPair]
    sources: list[str]
    references: list[str]

    @classmethod
    def of(cls, corpus: ParallelCorpus, num_test: int) -> "Task":
        """Train a tokenizer, encode the training pairs, take the first test sentences."""
        texts = [text for pair in corpus.train for text in pair]
        tokenizer = Tokenizer.train(texts, VOCAB)
        ids = tokenizer.encode_batch(texts)
        sources, references = map(list, zip(*corpus.test[:num_test], strict=True))
        return cls(tokenizer, list(zip(ids[0::2], ids[1::2], strict=True)), sources, references)


@dataclass(frozen=True)
class Confidence:
    """On the test sentences, the right tokens before each shown; without smoothing.

    `loss` in nats per token; `hits` and `surest` in per cent: how often the likeliest token is the
    right one, and the mean probability that the model gives the likeliest one.
    """

    loss: float
    hits: float
    surest: float


def train_smoothed(task: Task, smoothing: float, num_steps: int, seed: int = 0) -> Transformer:
    """Train a small model with this label smoothing; the same first weights and batches by seed."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        task.tokenizer.vocab_size, d_model=64, num_heads=4, num_layers=2, d_ff=256, dropout=0.0
    )
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    plan = global_batches(pair_lengths(task.trained), MAX_TOKENS, num_steps, seed)
    for step, drawn in enumerate(plan, start=1):
        batch = collate([task.trained[i] for i in drawn])
        loss = label_smoothed_loss(model(batch.src, batch.tgt_in), batch.tgt_out, smoothing)
        optimizer.zero_grad()
        loss.backward()
        set_learning_rate(optimizer, cosine_schedule(step, num_steps // 3, num_steps, RATE))
        optimizer.step()
    return model.eval()


@torch.no_grad()
def confidence(model: Transformer, task: Task) -> Confidence:
    """Look at every token of the references, without smoothing."""
    encode = task.tokenizer.encode
    pairs = zip(task.sources, task.references, strict=True)
    batch = collate([(encode(src), encode(tgt)) for src, tgt in pairs])
    logits, asked = model(batch.src, batch.tgt_in), batch.tgt_out != 0
    surest, said = logits.softmax(-1).max(-1)
    loss = label_smoothed_loss(logits, batch.tgt_out, smoothing=0.0).item()
    return Confidence(loss, per_cent((said == batch.tgt_out)[asked]), per_cent(surest[asked]))


def per_cent(values: Tensor) -> float:
    """The mean, times 100."""
    return 100 * values.float().mean().item()


def bleu_by_beam(
    model: Transformer, task: Task, beams: Sequence[str] = tuple(BEAMS)
) -> dict[str, float]:
    """BLEU (cased, 13a) of the test sentences for each way to decode, length penalty 0.6."""
    scores = {}
    for name in beams:
        size = BEAMS[name]
        decode = greedy_decode if size == 1 else partial(beam_search, beam_size=size)
        said = translate(model, task.tokenizer, task.sources, decode)
        scores[name] = score_table(said, task.references)[0]["value"]
    return scores
