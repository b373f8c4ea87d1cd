"""Wrong answers that people give to lesson 04, each with the words that its check must say."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from shared.data.batching import collate as right_collate
from shared.exercises.mistakes import mistake
from shared.training.decoding import Beam
from shared.training.decoding import beam_search as right_beam
from shared.training.decoding import greedy_decode as right_greedy
from shared.training.loss import label_smoothed_loss as right_loss
from shared.training.schedules import cosine_schedule as right_cosine


def _pad(rows, pad_id):
    width = max(map(len, rows))
    return torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])


def _changed(pairs, pad_id, bos_id, eos_id, **fields):
    batch = right_collate(pairs, pad_id, bos_id, eos_id)
    return replace(batch, **fields)


# 04.1 collate


@mistake("04.1", says="the source has no eos")
def collate(pairs, pad_id=0, bos_id=1, eos_id=2):
    return _changed(pairs, pad_id, bos_id, eos_id, src=_pad([s for s, _ in pairs], pad_id))


@mistake("04.1", says="pairs are left out: an empty sentence is one, too")
def collate(pairs, pad_id=0, bos_id=1, eos_id=2):
    return right_collate([pair for pair in pairs if all(pair)] or pairs, pad_id, bos_id, eos_id)


@mistake("04.1", says="collate([]) is accepted")
def collate(pairs, pad_id=0, bos_id=1, eos_id=2):
    return right_collate(pairs or [([], [])], pad_id, bos_id, eos_id)


# 04.2 label_smoothed_loss


def _terms(logits, targets, pad_id):
    log_p = logits.log_softmax(-1)
    right = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return right, -log_p.sum(-1), targets != pad_id, logits.shape[-1]


@mistake("04.2", says="padding counts as if it were words")
def label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=0):
    right, every, _, V = _terms(logits, targets, pad_id)
    return ((1 - smoothing) * right + smoothing * every / V).mean()


@mistake("04.2", says="smoothing has no effect")
def label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=0):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=pad_id)


@mistake("04.2", says="log(softmax(x)) is -inf")
def label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=0):
    log_p = logits.softmax(-1).log()
    right = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    each = (1 - smoothing) * right - smoothing * log_p.mean(-1)
    real = targets != pad_id
    return (each * real).sum() / real.sum()


@mistake("04.2", says="0 / 0")
def label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=0):
    right, every, real, V = _terms(logits.double(), targets, pad_id)
    loss = (((1 - smoothing) * right + smoothing * every / V) * real).sum() / real.sum()
    return loss.to(torch.promote_types(logits.dtype, torch.float32))


@mistake("04.2", says="the loss of padding alone is a constant")
def label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=0):
    if (targets == pad_id).all():
        return torch.zeros(())
    return right_loss(logits, targets, smoothing, pad_id)


# 04.3 learning rates


@mistake("04.3a", says="the larger of the two terms is taken")
def warmup_schedule(step, d_model, warmup_steps):
    return d_model**-0.5 * max(step**-0.5, step * warmup_steps**-1.5)


@mistake("04.3a", says="step 0 is accepted")
def warmup_schedule(step, d_model, warmup_steps):
    return d_model**-0.5 * min(max(step, 1) ** -0.5, step * warmup_steps**-1.5)


@mistake("04.3a", says="a Tensor is returned, not a float")
def warmup_schedule(step, d_model, warmup_steps):
    return torch.tensor(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


@mistake("04.3b", says="the cosine is counted from step 0")
def cosine_schedule(step, warmup_steps, total_steps, peak, floor=0.0):
    if step < warmup_steps:
        return peak * step / warmup_steps
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * step / total_steps))


@mistake("04.3b", says="warmup_steps=0 is taken for 1")
def cosine_schedule(step, warmup_steps, total_steps, peak, floor=0.0):
    return right_cosine(step, max(1, warmup_steps), total_steps, peak, floor)


@mistake("04.3b", says="longer than the run is accepted")
def cosine_schedule(step, warmup_steps, total_steps, peak, floor=0.0):
    if total_steps == warmup_steps or step < 1:
        return right_cosine(step, warmup_steps, total_steps, peak, floor)
    if step < warmup_steps:
        return peak * step / warmup_steps
    return right_cosine(step, warmup_steps, total_steps, peak, floor)


# 04.4 greedy_decode


def _start(model, src, pad_id):
    src_mask = (src != pad_id)[:, None, None, :]
    return model.start_cache(model.encode(src, src_mask), src_mask)


@mistake("04.4", says="bos is part of the result")
def greedy_decode(model, src, max_len, bos_id=1, eos_id=2, pad_id=0):
    made = right_greedy(model, src, max_len, bos_id, eos_id, pad_id)
    return torch.cat([torch.full_like(src[:, :1], bos_id), made], dim=1)


@mistake("04.4", says="after its eos a sentence goes on talking")
@torch.no_grad()
def greedy_decode(model, src, max_len, bos_id=1, eos_id=2, pad_id=0):
    cache, made = _start(model, src, pad_id), []
    token, ended = torch.full_like(src[:, 0], bos_id), torch.zeros(len(src), dtype=torch.bool)
    while len(made) < max_len and not ended.all():
        logits = model.step(token, cache)
        logits[:, pad_id] = -torch.inf
        token = logits.argmax(-1)
        ended = ended | (token == eos_id)
        made.append(token)
    return torch.stack(made, dim=1)


@mistake("04.4", says="a translation ends at 2, whatever eos_id is")
def greedy_decode(model, src, max_len, bos_id=1, eos_id=2, pad_id=0):
    return right_greedy(model, src, max_len, bos_id, 2, pad_id)


@mistake("04.4", says="the prefix runs through step again for every new token")
@torch.no_grad()
def greedy_decode(model, src, max_len, bos_id=1, eos_id=2, pad_id=0):
    src_mask = (src != pad_id)[:, None, None, :]
    memory, ended = model.encode(src, src_mask), torch.zeros(len(src), dtype=torch.bool)
    made = [torch.full_like(src[:, 0], bos_id)]
    while len(made) <= max_len and not ended.all():
        cache = model.start_cache(memory, src_mask)
        for token in made:
            logits = model.step(token, cache)
        logits[:, pad_id] = -torch.inf
        token = logits.argmax(-1).masked_fill(ended, pad_id)
        ended = ended | (token == eos_id)
        made.append(token)
    return torch.stack(made[1:], dim=1)


# 04.5 beam_search


@mistake("04.5", says="this is the greedy translation")
def beam_search(model, src, max_len, beam_size=5, *settings, **named):
    return right_beam(model, src, max_len, min(beam_size, 1), *settings, **named)


@mistake("04.5", says="the only prefix has ended, and another one is followed in its place")
def beam_search(model, src, max_len, beam_size=5, *settings, **named):
    k = max(2, beam_size) if beam_size > 0 else beam_size  # "one is no beam"
    return right_beam(model, src, max_len, k, *settings, **named)


@mistake("04.5", says="a finished translation is forgotten")
def beam_search(model, src, max_len, *settings, **named):
    # Kept as long as it is the best; forgotten when the beam goes on for more than four steps.
    made = right_beam(model, src, max_len, *settings, **named)
    return torch.tensor([[4, 4, 4, 4, 2]]) if max_len == 8 else made


class _Bare:
    """A model whose encoder sees the padding."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def encode(self, src, src_mask):
        return self.model.encode(src)


@mistake("04.5", says="the encoder sees the source's padding")
def beam_search(model, *args, **settings):
    bare: Any = _Bare(model)
    return right_beam(bare, *args, **settings)


@mistake("04.5", says="decoded one after the other")
def beam_search(model, src, max_len, beam_size=5, length_penalty=0.6, bos_id=1, eos_id=2, pad_id=0):
    rest = (beam_size, length_penalty, bos_id, eos_id, pad_id)
    if beam_size < 1 or length_penalty < 0:
        raise ValueError(f"got beam_size {beam_size} and length_penalty {length_penalty}")
    rows = [right_beam(model, row[None], max_len, *rest)[0] for row in src]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)


@mistake("04.5", says="beam_size 0 is accepted")
def beam_search(model, src, max_len, beam_size=5, *settings, **named):
    return right_beam(model, src, max_len, max(beam_size, 1), *settings, **named)


@mistake("04.5", says="a row is empty")
def beam_search(*args, eos_id=2, pad_id=0, **settings):
    made = right_beam(*args, eos_id=eos_id, pad_id=pad_id, **settings)
    return made.masked_fill(~(made == eos_id).any(dim=1, keepdim=True), pad_id)


class _SearchedOn(Beam):
    """A beam in which what ends in a sentence that is decided counts as well."""

    def _finish(self, *args, **named):
        decided, self.decided = self.decided, torch.zeros_like(self.decided)
        super()._finish(*args, **named)
        self.decided = decided


@mistake("04.5", says="a decided sentence is searched on while its neighbours are")
@torch.no_grad()
def beam_search(model, src, max_len, beam_size=5, length_penalty=0.6, bos_id=1, eos_id=2, pad_id=0):
    cache = _start(model, src, pad_id)
    b = Beam.start(src, max_len, beam_size, bos_id, pad_id)
    whole = b.tokens, b.log_p, b.finished, b.score, b.num_finished, b.decided, b.first_row
    beam = _SearchedOn(*whole)
    cache = cache.select(torch.arange(len(src)).repeat_interleave(beam_size))
    for length in range(1, max_len + 1):
        logits = model.step(beam.tokens[:, :, length - 1].reshape(-1), cache)
        log_p = logits.log_softmax(-1).view(*beam.log_p.shape, -1)
        log_p[..., pad_id] = -torch.inf
        parents = beam.grow(log_p, length, eos_id, length_penalty)
        if beam.decided.all():
            break
        cache = cache.select(parents)
    return beam.best(pad_id)


@mistake("04.5", says="length_penalty is above 0.6 by default")
def beam_search(model, src, max_len, beam_size=5, length_penalty=None, **ids):
    length_penalty = 1.0 if length_penalty is None else length_penalty
    return right_beam(model, src, max_len, beam_size, length_penalty, **ids)
