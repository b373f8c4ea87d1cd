"""Right answers to lesson 02 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

# 02.1


def softmax_by_hand(query, key, value, mask=None):
    """einsum, and a softmax of exponentials, a factor 0 or 1 and a sum."""
    scores = torch.einsum("bhtk,bhsk->bhts", query, key) * query.shape[-1] ** -0.5
    lowest = torch.finfo(scores.dtype).min
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    scores = torch.where(seen, scores, lowest)
    powers = (scores - scores.amax(dim=-1, keepdim=True).detach()).exp() * seen
    total = powers.sum(dim=-1, keepdim=True)
    weights = powers / total.where(total > 0, 1.0)
    return torch.einsum("bhts,bhsk->bhtk", weights, value), weights


def query_by_query(query, key, value, mask=None):
    """One query at a time, and of its keys only those that it may see."""
    (B, H, T, K), S = query.shape, key.shape[2]
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    seen = seen.expand(B, H, T, S)
    rows = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                places = seen[b, h, t].nonzero().flatten()
                scores = key[b, h, places] @ query[b, h, t] / math.sqrt(K)
                shares = (scores - scores.logsumexp(0)).exp() if len(places) else scores
                rows.append(key.new_zeros(S).index_add(0, places, shares))
    weights = torch.stack(rows).view(B, H, T, S)
    return weights.matmul(value), weights


# 02.2


def unequal_and_unsqueezed(tokens, pad_id=0):
    """The method, and two dims put in one by one."""
    return tokens.ne(pad_id).unsqueeze(1).unsqueeze(1)


def token_by_token(tokens, pad_id=0):
    """A nested list of Python's bools."""
    rows = [[[[token != pad_id for token in row]]] for row in tokens.tolist()]
    return torch.tensor(rows, dtype=torch.bool, device=tokens.device)


def by_way_of_numpy(tokens, pad_id=0):
    """Compared by numpy, and brought back to where the tokens lie."""
    return torch.from_numpy(tokens.cpu().numpy() != pad_id).to(tokens.device)[:, None, None]


def kept_one_by_one(tokens, pad_id=0):
    """Looked at one token after another, in a tensor that the tokens make."""
    mask = tokens.new_zeros(len(tokens), 1, 1, tokens.shape[1], dtype=torch.bool)
    for b, row in enumerate(tokens.tolist()):
        for s, token in enumerate(row):
            mask[b, 0, 0, s] = token != pad_id
    return mask


# 02.3


def compared_places(length, device=None):
    """Queries' places against keys' places."""
    places = torch.arange(length, device=device)
    return (places.view(1, 1, -1, 1) >= places.view(1, 1, 1, -1)).contiguous()


def filled_below_the_diagonal(length, device=None):
    """A one stays on in all rows below it."""
    return torch.eye(length, device=device).cumsum(dim=0).bool()[None, None]


# 02.4a


def stacked_parts(x, num_heads):
    """torch's own cut, stacked as a new dim."""
    width = x.size(-1)
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"{num_heads} heads cannot share {width} features")
    return torch.stack(x.chunk(num_heads, dim=-1), dim=1)


def reordered_by_einsum(x, num_heads):
    """The last dim in two; einsum, which multiplies nothing here, puts the dims in order."""
    D = x.shape[-1]
    if D % num_heads != 0:
        raise ValueError(f"d_model {D} is not a multiple of num_heads {num_heads}")
    return torch.einsum("blhk->bhlk", x.unflatten(-1, (num_heads, -1)))


# 02.4b


def concatenated(x):
    """One head after the other, side by side."""
    return torch.cat(list(x.unbind(dim=1)), dim=-1)


def written_into_place(x):
    """An empty tensor, filled head by head."""
    B, H, L, K = x.shape
    out = x.new_empty(B, L, H * K)
    for head in range(H):
        out[:, :, head * K : (head + 1) * K] = x[:, head]
    return out


# 02.5


class HeadByHead(nn.Module):
    """Each head has rows of w_q, w_k, w_v and columns of w_o; their outputs are added."""

    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__()
        self.K, rest = divmod(d_model, num_heads)
        if rest:
            raise ValueError(f"num_heads={num_heads} does not divide d_model={d_model}")
        self.fused, self.rate = fused, dropout
        self.w_o, self.w_v, self.w_k, self.w_q = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask=None, causal=False):
        """Sum over heads of attention times w_o's columns."""
        out = self.w_o.bias
        for head in range(query.shape[-1] // self.K):
            part = slice(head * self.K, (head + 1) * self.K)
            q, k, v = (
                F.linear(x, w.weight[part], w.bias[part])
                for x, w in ((query, self.w_q), (key, self.w_k), (value, self.w_v))
            )
            own = None
            if mask is not None:
                own = mask[:, [head if mask.shape[1] > 1 else 0]]
            heads = self.attend(q[:, None], k[:, None], v[:, None], own, causal)
            out = out + heads[:, 0] @ self.w_o.weight[:, part].T
        return out

    def attend(self, q, k, v, mask, causal):
        """One head, (B, 1, T, K)."""
        rate = self.rate if self.training else 0.0
        if self.fused and mask is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=causal)
        if causal:
            earlier = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            mask = earlier if mask is None else mask & earlier
        if mask is None:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
        blind = ~mask.any(-1, keepdim=True)
        if self.fused:
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind, dropout_p=rate)
            return got.masked_fill(blind, 0.0)
        scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * self.K**-0.5
        weights = scores.masked_fill(~(mask | blind), -torch.inf).softmax(-1)
        return F.dropout(weights.masked_fill(blind, 0.0), rate) @ v


class ByEinsum(nn.Module):
    """Weights with a dim for heads, a mask that is added, the fused function by another name."""

    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__()
        if d_model / num_heads != d_model // num_heads:
            raise ValueError(f"d_model {d_model}, num_heads {num_heads}")
        self.num_heads, self.fused = num_heads, fused
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v, self.w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def project(self, linear, x):
        """One projection for all heads, (B, H, L, K)."""
        weight = linear.weight.unflatten(0, (self.num_heads, -1))
        bias = linear.bias.view(1, self.num_heads, 1, -1)
        return torch.einsum("bld,hkd->bhlk", x, weight) + bias

    def forward(self, query, key, value, mask=None, causal=False):
        """Attend with a bias of 0 or of the lowest number."""
        q, k, v = map(self.project, (self.w_q, self.w_k, self.w_v), (query, key, value))
        if mask is None and self.fused:
            heads = sdpa(q, k, v, None, self.drop.p * self.training, causal)
        else:
            heads = self.masked(q, k, v, mask, causal)
        weight = self.w_o.weight.unflatten(1, (self.num_heads, -1))
        return torch.einsum("bhtk,dhk->btd", heads, weight) + self.w_o.bias

    def masked(self, q, k, v, mask, causal):
        """Both masks as one tensor of allowed pairs."""
        T, S = q.shape[2], k.shape[2]
        allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        allowed = allowed if mask is None else allowed & mask
        if causal:
            places = torch.arange(max(T, S), device=q.device)
            allowed = allowed & (places[:T, None] >= places[:S])
        added = q.new_zeros(allowed.shape).masked_fill(~allowed, torch.finfo(q.dtype).min)
        sighted = allowed.any(-1, keepdim=True)
        if self.fused:
            return sdpa(q, k, v, added, self.drop.p if self.training else 0.0) * sighted
        scores = torch.einsum("bhtk,bhsk->bhts", q / q.shape[-1] ** 0.5, k) + added
        return torch.einsum("bhts,bhsk->bhtk", self.drop(scores.softmax(-1) * sighted), v)


ALTERNATIVES = {
    "02.1": [softmax_by_hand, query_by_query],
    "02.2": [unequal_and_unsqueezed, token_by_token, by_way_of_numpy, kept_one_by_one],
    "02.3": [compared_places, filled_below_the_diagonal],
    "02.4a": [stacked_parts, reordered_by_einsum],
    "02.4b": [concatenated, written_into_place],
    "02.5": [HeadByHead, ByEinsum],
}
