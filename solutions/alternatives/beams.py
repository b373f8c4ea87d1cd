"""Right answers to 04.5, the beam search, in another style."""

import heapq
import math

import torch
import torch.nn.functional as F


def hypotheses_in_heaps(
    model,
    src,
    max_len,
    beam_size=5,
    length_penalty=0.6,
    bos_id=1,
    eos_id=2,
    pad_id=0,
):
    """Prefixes are tuples of Python's numbers; a heap gives the likeliest continuations."""
    if beam_size < 1 or length_penalty < 0:
        raise ValueError(f"beam_size={beam_size}, length_penalty={length_penalty}")
    B, k = len(src), beam_size
    with torch.no_grad():
        mask = (src != pad_id)[:, None, None, :]
        cache = model.start_cache(model.encode(src, mask), mask)
        cache = cache.select(torch.tensor([b for b in range(B) for _ in range(k)]))
        living = [[(0.0, ())] + [(-math.inf, ())] * (k - 1) for _ in range(B)]
        done, over = [[] for _ in range(B)], [False] * B
        for n in range(1, max_len + 1):
            last = [words[-1] if words else bos_id for beam in living for _, words in beam]
            logits = model.step(torch.tensor(last), cache)
            log_p = F.log_softmax(logits.double(), dim=-1).view(B, k, -1).tolist()
            rows = []
            for b in range(B):
                parents = range(k)
                if not over[b]:
                    living[b], parents = grown(living[b], done[b], log_p[b], k, eos_id, pad_id)
                    over[b] = decided(living[b], done[b], k, n, max_len, length_penalty)
                rows += [b * k + parent for parent in parents]
            if all(over):
                break
            cache = cache.select(torch.tensor(rows))
    best = [chosen(living[b], done[b], length_penalty) for b in range(B)]
    width = max(map(len, best), default=0)
    filled = [[*words, *[pad_id] * (width - len(words))] for words in best]
    return torch.tensor(filled, dtype=src.dtype).reshape(B, width)


def grown(beam, done, log_p, k, eos_id, pad_id):
    """The next beam and each prefix's parent; finished translations go into `done`."""
    candidates = (
        (total + more, parent, word)
        for parent, (total, _) in enumerate(beam)
        for word, more in enumerate(log_p[parent])
        if word != pad_id and total > -math.inf
    )
    kept, parents = [], []
    for rank, (total, parent, word) in enumerate(heapq.nlargest(2 * k, candidates)):
        words = (*beam[parent][1], word)
        if word != eos_id and len(kept) < k:
            kept.append((total, words))
            parents.append(parent)
        elif word == eos_id and rank < k:
            done.append((total, words))
    missing = k - len(kept)
    return kept + [(-math.inf, (eos_id,))] * missing, parents + [0] * missing


def decided(beam, done, k, n, max_len, length_penalty):
    """Whether nothing that lives can win any more."""
    if len(done) >= k:
        return True
    if not done:
        return False
    hope = max(total for total, _ in beam) / divisor(max_len, length_penalty)
    return hope <= max(total / divisor(len(words), length_penalty) for total, words in done)


def divisor(n, length_penalty):
    """What the log-probability of n tokens is divided by."""
    return math.pow((5 + n) / 6, length_penalty)


def chosen(beam, done, length_penalty):
    """The best finished translation, or else the best living prefix."""
    if not done:
        return max(beam, key=lambda each: each[0])[1]
    return max(done, key=lambda each: each[0] / divisor(len(each[1]), length_penalty))[1]


@torch.inference_mode()
def sorted_tables(
    model, src, max_len, beam_size=5, length_penalty=0.6, bos_id=1, eos_id=2, pad_id=0
):
    """All continuations sorted, and gone through from the best on until the beam is full."""
    if not (beam_size >= 1 and length_penalty >= 0):
        raise ValueError(f"beam_size is {beam_size}, length_penalty is {length_penalty}")
    B, k = src.shape[0], beam_size
    seen = src.ne(pad_id).view(B, 1, 1, -1)
    cache = model.start_cache(model.encode(src, seen), seen)
    order = torch.arange(B).repeat_interleave(k)
    words, total = src.new_full((B * k, 1), bos_id), torch.full((B * k,), -math.inf)
    total[::k] = 0.0
    best, count = [(-math.inf, None)] * B, [0] * B
    for n in range(1, max_len + 1):
        cache = cache.select(order)
        log_p = model.step(words[:, -1], cache).float().log_softmax(dim=-1)
        V = log_p.shape[1]
        log_p[:, pad_id] = -math.inf
        sums, flat = (total[:, None] + log_p).view(B, -1).sort(dim=-1, descending=True, stable=True)
        parents, tokens, totals = [], [], []
        for b in range(B):
            living, over = 0, count[b] >= k
            ranked = zip(sums[b].tolist(), flat[b].tolist(), strict=True)
            for rank, (value, place) in enumerate(ranked):
                parent, token = b * k + place // V, place % V
                if token == eos_id and rank < k and value > -math.inf and not over:
                    score, count[b] = value / ((5 + n) / 6) ** length_penalty, count[b] + 1
                    if score > best[b][0]:
                        best[b] = score, [*words[parent, 1:].tolist(), eos_id]
                elif token != eos_id:
                    parents, tokens = [*parents, parent], [*tokens, token]
                    totals, living = [*totals, value], living + 1
                if living == k:
                    break
        order, total = torch.tensor(parents), torch.tensor(totals)
        words = torch.cat([words[order], torch.tensor(tokens)[:, None]], dim=1)
        hopes = total.view(B, k).amax(dim=1) / ((5 + max_len) / 6) ** length_penalty
        if all(count[b] >= k or best[b][0] >= float(hopes[b]) for b in range(B)):
            break
    rows = [found or words[b * k, 1:].tolist() for b, (_, found) in enumerate(best)]
    width = max(len(row) for row in rows)
    return torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])


@torch.no_grad()
def ending_and_living_apart(
    model, src, max_len, beam_size=5, length_penalty=0.6, bos_id=1, eos_id=2, pad_id=0
):
    """Two tables: what ends is held against the beam_size-th best of all, what lives is chosen."""
    for name, value, least in (("beam_size", beam_size, 1), ("length_penalty", length_penalty, 0)):
        if value < least:
            raise ValueError(f"{name}={value} is below {least}")
    B, k, see = len(src), beam_size, (src != pad_id)[:, None, None]
    cache = model.start_cache(model.encode(src, see), see).select(torch.arange(B * k) // k)
    text, total = torch.full((B, k, max_len), pad_id), torch.full((B, k), -math.inf)
    best, best_text = torch.full((B,), -math.inf), text[:, 0].clone()
    last, count, over = torch.full((B * k,), bos_id), torch.zeros(B).long(), torch.zeros(B).bool()
    total[:, 0], rows = 0.0, torch.arange(B)
    for n in range(max_len):
        log_p = model.step(last, cache).float().log_softmax(-1).view(B, k, -1)
        V = log_p.shape[-1]
        log_p[:, :, pad_id] = -math.inf
        sums = total[:, :, None] + log_p
        ends = sums[:, :, eos_id].clone()
        counts = (ends >= kth_best(sums, k)) & ends.isfinite() & ~over[:, None]
        scores = (ends / ((6 + n) / 6) ** length_penalty).masked_fill(~counts, -math.inf)
        score, which = scores.max(1)
        ended = text[rows, which].index_fill(1, torch.tensor([n]), eos_id)
        best_text = torch.where((score > best)[:, None], ended, best_text)
        best, count = torch.maximum(score, best), count + counts.sum(1)
        sums[:, :, eos_id] = -math.inf
        total, places = sums.flatten(1).topk(k)
        parents, last = places // V, (places % V).flatten()
        text = text[rows[:, None], parents]
        text[:, :, n] = last.view(B, k)
        over |= (count >= k) | (best >= total[:, 0] / ((5 + max_len) / 6) ** length_penalty)
        if over.all():
            break
        cache = cache.select((rows[:, None] * k + parents).flatten())
    out = torch.where(best.isinf()[:, None], text[:, 0], best_text)
    return out[:, : int((out != pad_id).sum(1).amax())]


def kth_best(sums, k):
    """The k-th largest of each sentence's sums, as a column."""
    flat = sums.flatten(1)
    return flat.topk(min(k, flat.shape[1])).values[:, -1:]
