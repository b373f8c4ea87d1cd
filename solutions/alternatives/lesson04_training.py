"""Right answers to lesson 04 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import math

import torch
from torch.nn.utils.rnn import pad_sequence

from shared.data.batching import Batch
from solutions.alternatives.beams import ending_and_living_apart, hypotheses_in_heaps, sorted_tables

# 04.1


def padded_by_torch(pairs, pad_id=0, bos_id=1, eos_id=2):
    """pad_sequence, and masks from the sentences' lengths."""
    if len(pairs) == 0:
        raise ValueError("0 pairs make no batch")
    sources, targets = zip(*pairs, strict=True)

    def rectangle(rows):
        return pad_sequence([torch.tensor(row) for row in rows], True, pad_id)

    def real(sentences, width):
        lengths = torch.tensor([len(sentence) + 1 for sentence in sentences])
        return (torch.arange(width) < lengths[:, None])[:, None, None]

    src = rectangle([[*sentence, eos_id] for sentence in sources])
    shown = rectangle([[bos_id, *sentence] for sentence in targets])
    asked = rectangle([[*sentence, eos_id] for sentence in targets])
    places = torch.arange(shown.size(1))
    masks = real(sources, src.size(1)), real(targets, shown.size(1)) & (places <= places[:, None])
    return Batch(src, shown, asked, *masks, num_tokens=sum(map(len, targets)) + len(targets))


def written_into_full(pairs, pad_id=0, bos_id=1, eos_id=2):
    """Tensors full of padding, into which each sentence is written."""
    B = len(pairs)
    if not B:
        raise ValueError(f"a batch of {B} pairs")
    S, T = max(len(src) for src, _ in pairs) + 1, max(len(tgt) for _, tgt in pairs) + 1
    src = torch.full((B, S), pad_id)
    tgt_in, tgt_out = torch.full((B, T), pad_id), torch.full((B, T), pad_id)
    src_mask = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    tgt_mask = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for b, (source, target) in enumerate(pairs):
        for t, token in enumerate([*source, eos_id]):
            src[b, t], src_mask[b, 0, 0, t] = token, True
        for t, token in enumerate([bos_id, *target]):
            tgt_in[b, t], tgt_mask[b, 0, t:, t] = token, True
        for t, token in enumerate([*target, eos_id]):
            tgt_out[b, t] = token
    return Batch(src, tgt_in, tgt_out, src_mask, tgt_mask, sum(len(t) + 1 for _, t in pairs))


# 04.2


def against_soft_targets(logits, targets, smoothing=0.1, pad_id=0):
    """The cross-entropy with a whole distribution for each target that counts."""
    if smoothing < 0 or smoothing >= 1:
        raise ValueError(f"smoothing {smoothing} is not in [0, 1)")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    real = targets != pad_id
    if not real.any():
        return wide.sum() * 0
    rows, right = wide[real], targets[real]
    wanted = torch.full_like(rows, smoothing / rows.shape[-1])
    wanted[torch.arange(len(right)), right] += 1 - smoothing
    return torch.einsum("nv,nv->", wanted, -rows.log_softmax(-1)) / len(right)


def by_logsumexp(logits, targets, smoothing=0.1, pad_id=0):
    """logsumexp less a mixture of two logits; padding weighs 0."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    z = logits if logits.dtype == torch.float64 else logits.float()
    weight = targets.ne(pad_id).to(z.dtype)
    right = torch.where(targets == pad_id, 0, targets)
    chosen = z.take_along_dim(right[..., None], dim=-1)[..., 0]
    losses = z.logsumexp(-1) - torch.lerp(chosen, z.mean(-1), smoothing)
    return (losses * weight).sum() / weight.sum().clamp(min=1)


def in_float64(logits, targets, smoothing=0.1, pad_id=0):
    """More digits than asked for, up to the loss that is returned."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing {smoothing} is outside [0, 1)")
    log_p, real = logits.double().log_softmax(-1), (targets != pad_id).double()
    chosen = log_p.gather(-1, targets[..., None])[..., 0]
    each = (1 - smoothing) * chosen + smoothing * log_p.mean(-1)
    return -(each * real).sum() / max(real.sum().item(), 1)


# 04.3a


def the_lower_of_two(step, d_model, warmup_steps):
    """The rising branch or the falling one."""
    if step < 1 or warmup_steps < 1:
        raise ValueError(f"step={step}, warmup_steps={warmup_steps}: both count from 1")
    if step < warmup_steps:
        return step / (warmup_steps * math.sqrt(warmup_steps * d_model))
    return 1 / math.sqrt(step * d_model)


def by_logarithms(step, d_model, warmup_steps):
    """Powers as sums of logarithms."""
    for name, value in (("step", step), ("warmup_steps", warmup_steps)):
        if value <= 0:
            raise ValueError(f"{name} must be at least 1, not {value}")
    rising = math.log(step) - 1.5 * math.log(warmup_steps)
    return math.exp(min(rising, -0.5 * math.log(step)) - 0.5 * math.log(d_model))


# 04.3b


def clamped_progress(step, warmup_steps, total_steps, peak, floor=0.0):
    """No early return: both parts are clamped, and half a cosine is a squared one."""
    if step < 1 or total_steps <= warmup_steps:
        raise ValueError(f"step {step}, warmup_steps {warmup_steps}, total_steps {total_steps}")
    done = max(0.0, min(1.0, (step - warmup_steps) / (total_steps - warmup_steps)))
    fallen = floor + (peak - floor) * math.cos(math.pi / 2 * done) ** 2
    return fallen * step / warmup_steps if step < warmup_steps else fallen


def three_pieces(step, warmup_steps, total_steps, peak, floor=0.0):
    """One line for each part of the curve, the cosine from a complex number."""
    if not step >= 1:
        raise ValueError(f"step is {step}; it counts from 1")
    if not warmup_steps < total_steps:
        raise ValueError(f"total_steps={total_steps} leaves nothing after {warmup_steps}")
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if step >= total_steps:
        return float(floor)
    turn = complex(-1) ** ((step - warmup_steps) / (total_steps - warmup_steps))
    return (peak + floor) / 2 + (peak - floor) / 2 * turn.real


# 04.4


@torch.inference_mode()
def row_by_row(model, src, max_len, bos_id=1, eos_id=2, pad_id=0):
    """Python's lists, a model in eval mode, its own device and number of words."""
    was_training, device = model.training, next(model.parameters()).device
    words = [word for word in range(model.config.vocab_size) if word != pad_id]
    model.eval()
    try:
        mask = src.ne(pad_id)[:, None, None]
        cache = model.start_cache(model.encode(src, mask), mask)
        made = [[] for _ in range(len(src))]
        last, open_rows = [bos_id] * len(src), set(range(len(src)))
        for _ in range(max_len):
            if not open_rows:
                break
            logits = model.step(torch.tensor(last, device=device), cache)[:, words]
            best = [words[i] for i in logits.max(dim=-1).indices.tolist()]
            last = [word if b in open_rows else pad_id for b, word in enumerate(best)]
            for row, word in zip(made, last, strict=True):
                row.append(word)
            open_rows = {b for b in open_rows if last[b] != eos_id}
    finally:
        model.train(was_training)
    return torch.tensor(made, dtype=src.dtype, device=src.device).reshape(len(src), -1)


def finished_rows_leave(model, src, max_len, bos_id=1, eos_id=2, pad_id=0):
    """A row that has ended is taken out of the cache."""
    out = src.new_full((len(src), max_len), pad_id)
    with torch.no_grad():
        mask = (src != pad_id).unsqueeze(1).unsqueeze(1)
        cache = model.start_cache(model.encode(src, mask), mask)
        rows, token, length = torch.arange(len(src)), src.new_full((len(src),), bos_id), 0
        while len(rows) and length < max_len:
            scores = model.step(token, cache).index_fill(1, torch.tensor(pad_id), -math.inf)
            token = scores.topk(1).indices.flatten()
            out[rows, length] = token
            length += 1
            alive = (token != eos_id).nonzero().flatten()
            if len(alive) < len(rows):
                rows, token, cache = rows[alive], token[alive], cache.select(alive)
    return out[:, :length]


ALTERNATIVES = {
    "04.1": [padded_by_torch, written_into_full],
    "04.2": [against_soft_targets, by_logsumexp, in_float64],
    "04.3a": [the_lower_of_two, by_logarithms],
    "04.3b": [clamped_progress, three_pieces],
    "04.4": [row_by_row, finished_rows_leave],
    "04.5": [hypotheses_in_heaps, sorted_tables, ending_and_living_apart],
}
