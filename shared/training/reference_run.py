"""One loss curve that every engine of the course has to reproduce.

Model, data, order and optimizer are fixed here; the losses of one plain process are the record.
DDP, ZeRO, checkpointing, pipelines: on 1, 2 or 4 ranks they share the same global batches and must
come out at the same losses. What may differ is the order in which numbers are added.

The sentences are made by a rule and not read from a corpus, so that neither a corrected noun nor
a newer tokenizer changes the curve. Dropout is 0: its random numbers would depend on the layout.
`python -m shared.training.reference_run --write` trains the plain process and rewrites the record.
"""

import hashlib
import json
import platform
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from shared.data.batching import Batch, collate
from shared.data.rows import NO_TARGET, Rows, Text
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.training.loss import label_smoothed_loss
from shared.training.schedules import cosine_schedule, set_learning_rate

RECORD = Path(__file__).with_suffix(".json")
NUM_STEPS = 50
GLOBAL_BATCH = 32  # pairs: 8 a rank on 4 ranks
SEED = 4
# Two layers a stack make 4 pipeline stages; heads, widths and vocabulary divide by 4.
CONFIG = TransformerConfig(
    vocab_size=32, d_model=64, num_heads=4, num_layers=2, d_ff=128, dropout=0.0, max_len=32
)
TOLERANCE = 5e-5  # see compare_with_record

Step = Callable[[Batch, float], float]


def reference_model(dtype: torch.dtype = torch.float32) -> Transformer:
    """The model at its start, the same in every process; the random state is left untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # manual_seed would seed GPUs as well
        return Transformer(CONFIG).to(dtype)


def reference_optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW with an epsilon of 1e-5 in place of 1e-8, so that rounding stays small.

    Adam divides by the gradient's own size. The bias of the keys has a gradient of zero (softmax
    does not see a constant), in floating point about 1e-9 of noise, which an epsilon of 1e-8
    would turn into steps of a tenth of the learning rate, in a direction of its own per engine.
    """
    return torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.98), eps=1e-5, weight_decay=0.01)


def learning_rate(step: int) -> float:
    """The rate at `step`, counted from 1: 10 steps up to 3e-3, then half a cosine."""
    return cosine_schedule(step, warmup_steps=10, total_steps=NUM_STEPS, peak=3e-3)


@cache
def reference_batches() -> list[Batch]:
    """The global batches in their order: 50 of 32 pairs, whose numbers of tokens differ.

    The rule: after each word one of two can follow, each word has one translation, and the last
    word of the sentence moves to the second place.
    """
    draw = random.Random(SEED)
    num_words = CONFIG.vocab_size - 4  # ids 0 to 3 are pad, bos, eos, unk
    batches = []
    for _ in range(NUM_STEPS):
        pairs = []
        for _ in range(GLOBAL_BATCH):
            words = [draw.randrange(num_words)]
            for _ in range(draw.randrange(3, 13)):
                words.append((5 * words[-1] + 1 + draw.randrange(2)) % num_words)
            first, *middle, last = [(7 * word + 3) % num_words + 4 for word in words]
            pairs.append(([word + 4 for word in words], [first, last, *middle]))
        batches.append(collate(pairs))
    return batches


def shard(batch: Batch, rank: int, world_size: int) -> Batch:
    """Rank's rows of a global batch, padded like the whole, with its own count of tokens.

    The ranks' counts differ: a mean of their mean losses is not the loss of the whole batch.
    """
    rows = len(batch.src)
    assert rows % world_size == 0, f"{rows} pairs cannot be shared evenly by {world_size} ranks"
    mine = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
    tensors = {name: x[mine] for name, x in vars(batch).items() if isinstance(x, Tensor)}
    return replace(batch, **tensors, num_tokens=int((batch.tgt_out[mine] != CONFIG.pad_id).sum()))


def loss_of(model: nn.Module, batch: Rows, global_tokens: int) -> Float[Tensor, ""]:
    """This batch's part of the global mean loss: its tokens' sum over the *global* token count.

    Add the parts of all ranks (or micro-batches) up: gradients and losses are then sums, never
    means. An engine that averages over ranks must multiply by their number first.
    """
    if isinstance(batch, Text):  # of a language model
        return sum_of_losses(model(batch.tokens), batch.targets) / global_tokens
    loss = label_smoothed_loss(model(batch.src, batch.tgt_in), batch.tgt_out, smoothing=0.0)
    return loss * (batch.num_tokens / global_tokens)


def sum_of_losses(
    logits: Float[Tensor, "batch length vocab"],
    targets: Int[Tensor, "batch length"],
    ignored: int = NO_TARGET,
) -> Float[Tensor, ""]:
    """The sum over all positions of the cross-entropy, in float32 at the least."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=ignored, reduction="sum")


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step that the record was made with: one process, the whole batch, nothing else."""

    def step(batch: Batch, rate: float) -> float:
        set_learning_rate(optimizer, rate)
        return whole_step(model, optimizer, batch)

    return step


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Train on a whole global batch at the rate that the optimizer has; return its mean loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch, batch.num_tokens)
    loss.backward()
    optimizer.step()
    return loss.item()


def run_reference(step: Step, num_steps: int = NUM_STEPS) -> list[float]:
    """Call `step(global_batch, learning_rate)` for each batch; return the losses it gives back.

    `step` takes its own rank's shard, updates the weights and returns the mean loss per token of
    the *global* batch, before the update.
    """
    batches = reference_batches()[:num_steps]
    return [step(batch, learning_rate(i)) for i, batch in enumerate(batches, start=1)]


def checksum(model: nn.Module) -> str:
    """SHA-256 over names, types and bytes of all weights: equal only when every bit is."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def read_record() -> dict:
    """The stored record: losses, checksums, and what they were computed with."""
    return json.loads(RECORD.read_text())


def compare_with_record(losses: Sequence[float], tolerance: float = TOLERANCE) -> float:
    """Return the largest difference from the record; AssertionError names the first step beyond.

    The tolerance is for float32. Two or four ranks, float64, the by-hand attention and first
    weights changed in their last bit moved these losses by at most 1e-6: sums are rounded in
    another order, and training carries that on. Now and then rounding pushes the input of a ReLU
    across zero, which moved neighbouring configurations by 3e-5. Averaging the ranks' means
    instead of weighing by tokens moves it by 4e-3. Half precision needs a bound of its own.
    """
    record = read_record()["losses"]
    assert len(losses) == len(record), f"{len(losses)} losses, {len(record)} in the record"
    gaps = [abs(a - b) for a, b in zip(losses, record, strict=True)]
    for number, (gap, got, want) in enumerate(zip(gaps, losses, record, strict=True), start=1):
        assert gap <= tolerance, f"step {number}: loss {got:.6f}, in the record {want:.6f}"
    return max(gaps)


def make_record() -> dict:
    """Train the plain process on one thread and describe the run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = reference_model()
    first = checksum(model)
    try:
        losses = run_reference(plain_step(model, reference_optimizer(list(model.parameters()))))
    finally:
        torch.set_num_threads(threads)
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "checksum_first": first,
        "checksum_final": checksum(model),
        "losses": losses,
    }


if __name__ == "__main__":
    record = make_record()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {RECORD.name}: {NUM_STEPS} losses, last {record['losses'][-1]:.6f}")
    elif not sys.argv[1:]:
        print(f"largest difference from the record: {compare_with_record(record['losses']):.2e}")
        same = record["checksum_final"] == read_record()["checksum_final"]
        print(f"final weights {'equal bit for bit' if same else 'differ in some bits'}")
    else:
        sys.exit(f"usage: python -m shared.training.reference_run [--write], not {sys.argv[1:]}")
