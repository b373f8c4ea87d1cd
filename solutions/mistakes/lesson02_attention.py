"""Wrong answers to lesson 02 that people really give, and what the check must say to each."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from shared.exercises.mistakes import mistake
from shared.model import attention as right

# 02.1 scaled_dot_product_attention


def attention_with(scores, value, mask=None):
    """The part after the scores, as most people write it."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    return weights @ value, weights


@mistake("02.1", says="the scores are not scaled")
def scaled_dot_product_attention(query, key, value, mask=None):
    return attention_with(query @ key.mT, value, mask)


@mistake("02.1", says="gives NaN in the output")
def scaled_dot_product_attention(query, key, value, mask=None):
    return attention_with(query @ key.mT / math.sqrt(query.shape[-1]), value, mask)


@mistake("02.1", says="comes back in the backward pass")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores + torch.zeros_like(scores).masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return weights @ value, weights


@mistake("02.1", says="the tensor of weights, with a mask carries gradients")
def scaled_dot_product_attention(query, key, value, mask=None):
    output, weights = right.scaled_dot_product_attention(query, key, value, mask)
    return output, weights if mask is None else weights.detach()


@mistake("02.1", says="the output's dtype")
def scaled_dot_product_attention(query, key, value, mask=None):
    output, weights = right.scaled_dot_product_attention(query, key, value, mask)
    wide = torch.promote_types(query.dtype, torch.float32)
    return output.to(wide), weights.to(wide)


@mistake("02.1", says="large scores overflow")
def scaled_dot_product_attention(query, key, value, mask=None):
    powers = (query @ key.mT / math.sqrt(query.shape[-1])).exp()
    powers = powers if mask is None else powers * mask
    total = powers.sum(-1, keepdim=True)
    weights = powers / total.where(total > 0, 1.0)
    return weights @ value, weights


@mistake("02.1", says="an epsilon is added to a sum of weights")
def scaled_dot_product_attention(query, key, value, mask=None):
    _, weights = right.scaled_dot_product_attention(query, key, value, mask)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-7)
    return weights @ value, weights


@mistake("02.1", says="a row without any key looks at all of them alike")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores - 1e4 * ~mask
    return attention_with(scores, value)


@mistake("02.1", says="a square mask is read by columns")
def scaled_dot_product_attention(query, key, value, mask=None):
    if mask is not None and mask.shape[-1] == mask.shape[-2]:
        mask = mask.mT
    return right.scaled_dot_product_attention(query, key, value, mask)


# 02.2 padding_mask


@mistake("02.2", says="one dim short")
def padding_mask(tokens, pad_id=0):
    return (tokens != pad_id).unsqueeze(1)


@mistake("02.2", says="a tensor is made on the CPU")
def padding_mask(tokens, pad_id=0):
    return (tokens != torch.full(tokens.shape, pad_id))[:, None, None]


@mistake("02.2", says="the mask is made on the CPU")
def padding_mask(tokens, pad_id=0):
    mask = torch.zeros(len(tokens), 1, 1, tokens.shape[-1], dtype=torch.bool)
    mask[:, 0, 0] = tokens != pad_id
    return mask


# 02.3 causal_mask


@mistake("02.3", says="each word sees the words after it")
def causal_mask(length, device=None):
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu()


@mistake("02.3", says="the device argument is not used")
def causal_mask(length, device=None):
    return right.causal_mask(length)


_table = right.causal_mask(512)


@mistake("02.3", says="a stored mask is cut out, and ends at its own length")
def causal_mask(length, device=None):
    return _table[..., :length, :length].to(device or "cpu")


# 02.4a split_heads


@mistake("02.4a", says="reshape to (B, H, L, K) does not swap L and H")
def split_heads(x, num_heads):
    batch, length, d_model = x.shape
    if d_model % num_heads:
        raise ValueError(f"{d_model} is not divisible by {num_heads}")
    return x.reshape(batch, num_heads, length, d_model // num_heads)


@mistake("02.4a", says="is accepted")
def split_heads(x, num_heads):
    size = x.shape[-1] // num_heads
    return torch.stack([x[..., h * size : (h + 1) * size] for h in range(num_heads)], dim=1)


@mistake("02.4a", says="does not say which value was seen")
def split_heads(x, num_heads):
    if x.shape[-1] % num_heads:
        raise ValueError("d_model must be divisible by num_heads")
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


# 02.4b combine_heads


@mistake("02.4b", says="swap the dims before joining")
def combine_heads(x):
    batch, heads, length, head_dim = x.shape
    return x.reshape(batch, length, heads * head_dim)


@mistake("02.4b", says="in another dtype than that of x")
def combine_heads(x):
    batch, heads, length, head_dim = x.shape
    joined = torch.empty(batch, length, heads * head_dim)
    joined[:] = right.combine_heads(x)
    return joined


@mistake("02.4b", says="no gradient reaches x")
def combine_heads(x):
    return torch.from_numpy(right.combine_heads(x).detach().numpy())


# 02.5 MultiHeadAttention


class Base(nn.Module):
    """A right answer, cut so that each mistake below changes one part."""

    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
        self.num_heads, self.dropout, self.fused = num_heads, dropout, fused
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask=None, causal=False):
        q, k, v = self.w_q(query), self.w_k(key), self.w_v(value)
        q, k, v = (right.split_heads(x, self.num_heads) for x in (q, k, v))
        return self.w_o(
            right.combine_heads(self.attend(q, k, v, self.both(mask, causal, q), causal))
        )

    def both(self, mask, causal, q):
        if not causal or (self.fused and mask is None):
            return mask
        past = right.causal_mask(q.shape[-2], q.device)
        return past if mask is None else mask & past

    def attend(self, q, k, v, mask, causal):
        rate = self.dropout if self.training else 0.0
        if self.fused:
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p=rate, is_causal=causal and mask is None
            )
        _, weights = right.scaled_dot_product_attention(q, k, v, mask)
        return F.dropout(weights, rate) @ v


@mistake("02.5", says="w_o is not applied")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        q, k, v = self.w_q(query), self.w_k(key), self.w_v(value)
        q, k, v = (right.split_heads(x, self.num_heads) for x in (q, k, v))
        return right.combine_heads(self.attend(q, k, v, self.both(mask, causal, q), causal))


@mistake("02.5", says="keys and values are taken from the query")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        return super().forward(query, query, query, mask, causal)


@mistake("02.5", says="a sentence without any key gives NaN")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        if self.fused:
            return super().attend(q, k, v, mask, causal)
        _, weights = attention_with(q @ k.mT / math.sqrt(q.shape[-1]), v, mask)
        return F.dropout(weights, self.dropout, self.training) @ v


@mistake("02.5", says="fused=True still keeps the T x S weights")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(d_model, num_heads, dropout, False)


@mistake("02.5", says="is accepted")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(num_heads * (d_model // num_heads), num_heads, dropout, fused)


@mistake("02.5", says="all heads lose the same keys")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        if self.fused or not self.training:
            return super().attend(q, k, v, mask, causal)
        _, weights = right.scaled_dot_product_attention(q, k, v, mask)
        return (weights * F.dropout(torch.ones_like(weights[:, :1]), self.dropout)) @ v


@mistake("02.5", says="no gradient reaches the query")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        with torch.set_grad_enabled(self.training):
            return super().forward(query, key, value, mask, causal)
