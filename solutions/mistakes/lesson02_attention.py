"""Wrong answers to lesson 02 that people really give, and what the check must say to each."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shared.exercises.mistakes import mistake
from shared.model import attention as right

# 02.1 scaled_dot_product_attention


def attention_with(scores, value, mask=None, dim=-1):
    """The part after the scores, as most people write it."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim)
    return weights @ value, weights


@mistake("02.1", says="the scores are not scaled")
def scaled_dot_product_attention(query, key, value, mask=None):
    return attention_with(query @ key.mT, value, mask)


@mistake("02.1", says="divided by K, not by its square root")
def scaled_dot_product_attention(query, key, value, mask=None):
    return attention_with(query @ key.mT / query.shape[-1], value, mask)


@mistake("02.1", says="the whole vector's, not one head's")
def scaled_dot_product_attention(query, key, value, mask=None):
    d_model = query.shape[1] * query.shape[-1]
    return attention_with(query @ key.mT / math.sqrt(d_model), value, mask)


@mistake("02.1", says="the scale is 1/sqrt(S), of the number of keys")
def scaled_dot_product_attention(query, key, value, mask=None):
    return attention_with(query @ key.mT / math.sqrt(key.shape[2]), value, mask)


@mistake("02.1", says="the softmax runs over the queries")
def scaled_dot_product_attention(query, key, value, mask=None):
    return attention_with(query @ key.mT / math.sqrt(query.shape[-1]), value, mask, dim=-2)


@mistake("02.1", says="without the weights")
def scaled_dot_product_attention(query, key, value, mask=None):
    return right.scaled_dot_product_attention(query, key, value, mask)[0]


@mistake("02.1", says="the mask is read the wrong way round")
def scaled_dot_product_attention(query, key, value, mask=None):
    mask = None if mask is None else ~mask
    return right.scaled_dot_product_attention(query, key, value, mask)


@mistake("02.1", says="masked after the softmax")
def scaled_dot_product_attention(query, key, value, mask=None):
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    if mask is not None:
        weights = weights * mask
    return weights @ value, weights


@mistake("02.1", says="masked scores are set to 0")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores * mask
    return attention_with(scores, value)


@mistake("02.1", says="added to the scores as 0 and 1")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return attention_with(scores if mask is None else scores + mask, value)


@mistake("02.1", says="gives NaN in the output")
def scaled_dot_product_attention(query, key, value, mask=None):
    return attention_with(query @ key.mT / math.sqrt(query.shape[-1]), value, mask)


@mistake("02.1", says="the mean of all values, padding and all")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return attention_with(scores, value)


@mistake("02.1", says="comes back in the backward pass")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores + torch.zeros_like(scores).masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return weights @ value, weights


@mistake("02.1", says="the output carries gradients back to query")
def scaled_dot_product_attention(query, key, value, mask=None):
    _, weights = right.scaled_dot_product_attention(query.detach(), key.detach(), value, mask)
    return weights @ value, weights


@mistake("02.1", says="the output's dtype")
def scaled_dot_product_attention(query, key, value, mask=None):
    output, weights = right.scaled_dot_product_attention(query, key, value, mask)
    wide = torch.promote_types(query.dtype, torch.float32)
    return output.to(wide), weights.to(wide)


@mistake("02.1", says="torch's scaled_dot_product_attention does the work")
def scaled_dot_product_attention(query, key, value, mask=None):
    _, weights = right.scaled_dot_product_attention(query, key, value, mask)
    return F.scaled_dot_product_attention(query, key, value, mask), weights


@mistake("02.1", says="large scores overflow")
def scaled_dot_product_attention(query, key, value, mask=None):
    powers = (query @ key.mT / math.sqrt(query.shape[-1])).exp()
    powers = powers if mask is None else powers * mask
    total = powers.sum(-1, keepdim=True)
    weights = powers / total.where(total > 0, 1.0)
    return weights @ value, weights


@mistake("02.1", says="any number, -1e4 say, is more than some score")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is None:
        return attention_with(scores, value)
    weights = scores.masked_fill(~mask, -1e4).softmax(-1) * mask.any(-1, keepdim=True)
    return weights @ value, weights


@mistake("02.1", says="one head's mask serves all heads")
def scaled_dot_product_attention(query, key, value, mask=None):
    mask = None if mask is None else mask[:, :1]
    return right.scaled_dot_product_attention(query, key, value, mask)


@mistake("02.1", says="the tensor of weights carries gradients")
def scaled_dot_product_attention(query, key, value, mask=None):
    output, weights = right.scaled_dot_product_attention(query, key, value, mask)
    return output, weights.detach()


@mistake("02.1", says="the softmax is computed in float32")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights @ value, weights


@mistake("02.1", says="the weights are masked and normalised anew")
def scaled_dot_product_attention(query, key, value, mask=None):
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    if mask is not None:
        weights = weights * mask
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return weights @ value, weights


@mistake("02.1", says="an epsilon is added to a sum of weights")
def scaled_dot_product_attention(query, key, value, mask=None):
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    if mask is not None:
        weights = weights * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    return weights @ value, weights


@mistake("02.1", says="a row without any key looks at all of them alike")
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores + torch.where(mask, 0.0, -1e6)
    weights = scores.softmax(-1)
    return weights @ value, weights


@mistake("02.1", says="a row without any key keeps its weights")
def scaled_dot_product_attention(query, key, value, mask=None):
    output, weights = right.scaled_dot_product_attention(query, key, value, mask)
    if mask is not None:
        weights = weights.where(mask.any(-1, keepdim=True), 1 / key.shape[-2])
    return output, weights


@mistake("02.1", says="the weights are scaled, after the softmax")
def scaled_dot_product_attention(query, key, value, mask=None):
    output, weights = attention_with(query @ key.mT, value, mask)
    return output / math.sqrt(query.shape[-1]), weights / math.sqrt(query.shape[-1])


@mistake("02.1", says="a row with some masked key is taken for a row without any")
def scaled_dot_product_attention(query, key, value, mask=None):
    output, weights = right.scaled_dot_product_attention(query, key, value, mask)
    if mask is None:
        return output, weights
    empty = ~mask.all(dim=-1, keepdim=True)
    return output.masked_fill(empty, 0.0), weights.masked_fill(empty, 0.0)


@mistake("02.1", says="a square mask is read by columns")
def scaled_dot_product_attention(query, key, value, mask=None):
    if mask is not None and mask.shape[-1] == mask.shape[-2]:
        mask = mask.mT
    return right.scaled_dot_product_attention(query, key, value, mask)


# 02.2 padding_mask


@mistake("02.2", says="True marks the padding")
def padding_mask(tokens, pad_id=0):
    return (tokens == pad_id)[:, None, None, :]


@mistake("02.2", says="the mask is (B, S)")
def padding_mask(tokens, pad_id=0):
    return tokens != pad_id


@mistake("02.2", says="one dim short")
def padding_mask(tokens, pad_id=0):
    return (tokens != pad_id).unsqueeze(1)


@mistake("02.2", says="masked as a query, not as a key")
def padding_mask(tokens, pad_id=0):
    return (tokens != pad_id)[:, None, :, None]


@mistake("02.2", says="leaves rows without any key")
def padding_mask(tokens, pad_id=0):
    keep = tokens != pad_id
    return keep[:, None, None, :] & keep[:, None, :, None]


@mistake("02.2", says="pad_id is not used")
def padding_mask(tokens, pad_id=0):
    return (tokens != 0)[:, None, None, :]


@mistake("02.2", says="ids below pad_id are taken for padding")
def padding_mask(tokens, pad_id=0):
    return (tokens > pad_id)[:, None, None]


@mistake("02.2", says="all that stands behind a padding token is hidden")
def padding_mask(tokens, pad_id=0):
    return (tokens != pad_id).cumprod(-1).bool()[:, None, None]


@mistake("02.2", says="the mask is not boolean")
def padding_mask(tokens, pad_id=0):
    return (tokens != pad_id)[:, None, None, :].float()


@mistake("02.2", says="taken to come last")
def padding_mask(tokens, pad_id=0):
    lengths = (tokens != pad_id).sum(dim=1, keepdim=True)
    return (torch.arange(tokens.shape[1]) < lengths)[:, None, None]


@mistake("02.2", says="a tensor is made on the CPU")
def padding_mask(tokens, pad_id=0):
    return (tokens != torch.full(tokens.shape, pad_id))[:, None, None]


@mistake("02.2", says="the mask is made on the CPU, wherever the tokens lie")
def padding_mask(tokens, pad_id=0):
    return torch.from_numpy(tokens.cpu().numpy() != pad_id)[:, None, None]


@mistake("02.2", says="the mask is (B, 1, S, S), a row for each query")
def padding_mask(tokens, pad_id=0):
    return (tokens != pad_id)[:, None, None].repeat(1, 1, tokens.shape[1], 1)


@mistake("02.2", says="a sentence of padding alone is opened")
def padding_mask(tokens, pad_id=0):
    keep = tokens != pad_id
    return (keep | ~keep.any(dim=-1, keepdim=True))[:, None, None]


# 02.3 causal_mask


@mistake("02.3", says="each word sees the words after it")
def causal_mask(length, device=None):
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu()


@mistake("02.3", says="True marks what is hidden")
def causal_mask(length, device=None):
    return ~right.causal_mask(length, device)


@mistake("02.3", says="a word does not see itself")
def causal_mask(length, device=None):
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril(-1)


@mistake("02.3", says="a word sees the one after it")
def causal_mask(length, device=None):
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril(1)


@mistake("02.3", says="the mask is (T, T)")
def causal_mask(length, device=None):
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


@mistake("02.3", says="the mask is not boolean")
def causal_mask(length, device=None):
    return nn.Transformer.generate_square_subsequent_mask(length, device=device)[None, None]


@mistake("02.3", says="the device argument is not used")
def causal_mask(length, device=None):
    return right.causal_mask(length)


@mistake("02.3", says="one tensor is handed out at every call")
@functools.cache
def causal_mask(length, device=None):
    return right.causal_mask(length, device)


_table = right.causal_mask(512)


@mistake("02.3", says="a stored mask is cut out, and ends at its own length")
def causal_mask(length, device=None):
    return _table[..., :length, :length].to(device or "cpu")


@mistake("02.3", says="the first word sees all words")
def causal_mask(length, device=None):
    mask = right.causal_mask(length, device)
    mask[..., 0, :] = True
    return mask


@mistake("02.3", says="only the first word sees itself")
def causal_mask(length, device=None):
    place = torch.arange(length, device=device)
    mask = place[None, :] < place[:, None]
    mask[0, 0] = True
    return mask[None, None]


_kept: dict[int, Any] = {}


# 02.4a split_heads


@mistake("02.4a", says="reshape to (B, H, L, K) does not swap L and H")
def split_heads(x, num_heads):
    batch, length, d_model = x.shape
    if d_model % num_heads:
        raise ValueError(f"{d_model} is not divisible by {num_heads}")
    return x.reshape(batch, num_heads, length, d_model // num_heads)


@mistake("02.4a", says="every H-th number")
def split_heads(x, num_heads):
    return x.unflatten(-1, (-1, num_heads)).permute(0, 3, 1, 2)


@mistake("02.4a", says="heads stand after positions")
def split_heads(x, num_heads):
    return x.unflatten(-1, (num_heads, -1))


@mistake("02.4a", says="is accepted")
def split_heads(x, num_heads):
    size = x.shape[-1] // num_heads
    return torch.stack([x[..., h * size : (h + 1) * size] for h in range(num_heads)], dim=1)


@mistake("02.4a", says="raises the wrong kind of error")
def split_heads(x, num_heads):
    assert x.shape[-1] % num_heads == 0
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


@mistake("02.4a", says="does not say which value was seen")
def split_heads(x, num_heads):
    if x.shape[-1] % num_heads:
        raise ValueError("d_model must be divisible by num_heads")
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


@mistake("02.4a", says="no gradient reaches x")
def split_heads(x, num_heads):
    return right.split_heads(x.data, num_heads)


@mistake("02.4a", says="heads stand before the batch")
def split_heads(x, num_heads):
    return right.split_heads(x, num_heads).transpose(0, 1)


@mistake("02.4a", says="positions stand before the batch")
def split_heads(x, num_heads):
    return right.split_heads(x, num_heads).permute(2, 1, 0, 3)


@mistake("02.4a", says="num_heads is taken for a head's width")
def split_heads(x, num_heads):
    return right.split_heads(x, x.shape[-1] // num_heads)


# 02.4b combine_heads


@mistake("02.4b", says="swap the dims before joining")
def combine_heads(x):
    batch, heads, length, head_dim = x.shape
    return x.reshape(batch, length, heads * head_dim)


@mistake("02.4b", says="the heads' numbers are interleaved")
def combine_heads(x):
    return x.permute(0, 2, 3, 1).flatten(2)


@mistake("02.4b", says="the heads stand in reverse order")
def combine_heads(x):
    return torch.cat([*reversed(x.unbind(1))], dim=-1)


@mistake("02.4b", says="the heads are added up")
def combine_heads(x):
    return x.sum(dim=1)


@mistake("02.4b", says="the mean of the heads is taken")
def combine_heads(x):
    return x.mean(dim=1)


@mistake("02.4b", says="the mean of the heads stands in the place of each")
def combine_heads(x):
    return right.combine_heads(x.mean(dim=1, keepdim=True).expand_as(x))


@mistake("02.4b", says="view size is not compatible")
def combine_heads(x):
    batch, heads, length, head_dim = x.shape
    return x.transpose(1, 2).view(batch, length, heads * head_dim)


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


@mistake("02.5", says="the projection w_q is missing")
class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, query, key, value, mask=None, causal=False):
        return self.attention(query, key, value)[0]


@mistake("02.5", says="the parameters are not four projections")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(d_model, num_heads, dropout, fused)
        self.w_v = self.w_k


@mistake("02.5", says="the values go through w_k")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        q, k, v = self.w_q(query), self.w_k(key), self.w_k(value)
        q, k, v = (right.split_heads(x, self.num_heads) for x in (q, k, v))
        return self.w_o(
            right.combine_heads(self.attend(q, k, v, self.both(mask, causal, q), causal))
        )


@mistake("02.5", says="queries and keys are exchanged")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        q, k, v = self.w_k(query), self.w_q(key), self.w_v(value)
        q, k, v = (right.split_heads(x, self.num_heads) for x in (q, k, v))
        return self.w_o(
            right.combine_heads(self.attend(q, k, v, self.both(mask, causal, q), causal))
        )


@mistake("02.5", says="the scale is 1/sqrt(d_model)")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        return super().attend(q / math.sqrt(self.num_heads), k, v, mask, causal)


@mistake("02.5", says="there is one head over the whole vector")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        q, k, v = (x[:, None] for x in (self.w_q(query), self.w_k(key), self.w_v(value)))
        return self.w_o(self.attend(q, k, v, self.both(mask, causal, q), causal)[:, 0])


@mistake("02.5", says="cut and joined without a transpose")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        q, k, v = (
            x.reshape(x.shape[0], self.num_heads, x.shape[1], -1)
            for x in (self.w_q(query), self.w_k(key), self.w_v(value))
        )
        return self.w_o(self.attend(q, k, v, mask, causal).reshape(query.shape))


@mistake("02.5", says="keys and values are taken from the query")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        return super().forward(query, query, query, mask, causal)


@mistake("02.5", says="the values are taken from the key")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        return super().forward(query, key, key, mask, causal)


@mistake("02.5", says="the mask is read the wrong way round")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        mask = super().both(mask, causal, q)
        return ~mask if self.fused and mask is not None else mask


@mistake("02.5", says="the causal mask of an earlier call is used again")
class MultiHeadAttention(Base):
    past = None

    def both(self, mask, causal, q):
        if causal and self.past is None:
            self.past = right.causal_mask(q.shape[-2], q.device)
        if not causal or (self.fused and mask is None):
            return mask
        return self.past if mask is None else mask & self.past


@mistake("02.5", says="the mask is not used")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        return super().both(None, causal, q)


@mistake("02.5", says="causal, fused=False, training=True")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        return super().forward(query, key, value, mask)


@mistake("02.5", says="with causal=True the mask is dropped")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        return super().both(None if causal else mask, causal, q)


@mistake("02.5", says="with a mask causal=True is dropped")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        return super().both(mask, causal and mask is None, q)


@mistake("02.5", says="use &, not |")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        past = super().both(None, causal, q)
        return past if mask is None else mask if not causal else mask | right.causal_mask(5)


@mistake("02.5", says="a sentence without any key gives NaN")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        if self.fused:
            return super().attend(q, k, v, mask, causal)
        _, weights = attention_with(q @ k.mT / math.sqrt(q.shape[-1]), v, mask)
        return F.dropout(weights, self.dropout, self.training) @ v


@mistake("02.5", says="dropout is not used")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(d_model, num_heads, 0.0, fused)


@mistake("02.5", says="it acts in eval() as well")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        self.training = True
        return super().attend(q, k, v, mask, causal)


@mistake("02.5", says="fused=True still keeps the T x S weights")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(d_model, num_heads, dropout, False)


@mistake("02.5", says="still puts a T x S mask in memory")
class MultiHeadAttention(Base):
    """A causal mask in memory, where the kernel has is_causal."""

    def both(self, mask, causal, q):
        if not causal:
            return mask
        past = right.causal_mask(q.shape[-2], q.device)
        return past if mask is None else mask & past


@mistake("02.5", says="is accepted")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(num_heads * (d_model // num_heads), num_heads, dropout, fused)


@mistake("02.5", says="one head's mask serves all heads")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        return super().both(None if mask is None else mask[:, :1], causal, q)


@mistake("02.5", says="one query's mask serves all queries")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        return super().both(None if mask is None else mask[:, :, :1], causal, q)


@mistake("02.5", says="the mask of an earlier call is used again")
class MultiHeadAttention(Base):
    kept = None

    def both(self, mask, causal, q):
        if mask is not None and self.kept is None:
            self.kept = mask
        return super().both(None if mask is None else self.kept, causal, q)


@mistake("02.5", says="causal=True stays on")
class MultiHeadAttention(Base):
    seen = False

    def forward(self, query, key, value, mask=None, causal=False):
        self.seen = self.seen or causal
        return super().forward(query, key, value, mask, self.seen)


@mistake("02.5", says="causal, fused=False, training=False")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        return super().forward(query, key, value, mask, causal and self.training)


@mistake("02.5", says="dropout acts on the output")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        rate, self.dropout = self.dropout, 0.0
        output = super().attend(q, k, v, mask, causal)
        self.dropout = rate
        return F.dropout(output, rate, self.training)


@mistake("02.5", says="dropout acts on the values")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        v = F.dropout(v, self.dropout if self.training else 0.0)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None)
        return right.scaled_dot_product_attention(q, k, v, mask)[0]


@mistake("02.5", says="all heads lose the same keys")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        if self.fused or not self.training:
            return super().attend(q, k, v, mask, causal)
        _, weights = right.scaled_dot_product_attention(q, k, v, mask)
        return (weights * F.dropout(torch.ones_like(weights[:, :1]), self.dropout)) @ v


@mistake("02.5", says="the scores are divided by sqrt(K) twice")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        return super().attend(q / math.sqrt(q.shape[-1]), k, v, mask, causal)


@mistake("02.5", says="the rate is 0.5 whatever")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(d_model, num_heads, 0.5 if dropout else 0.0, fused)


@mistake("02.5", says="the rate or the scale of the rest is wrong")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        if self.fused or not self.training:
            return super().attend(q, k, v, mask, causal)
        _, weights = right.scaled_dot_product_attention(q, k, v, mask)
        return (weights * (torch.rand_like(weights) >= self.dropout)) @ v


@mistake("02.5", says="dropout acts twice, on the weights and on what they make")
class MultiHeadAttention(Base):
    def attend(self, q, k, v, mask, causal):
        return F.dropout(super().attend(q, k, v, mask, causal), self.dropout, self.training)


@mistake("02.5", says="no gradient reaches the query")
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None, causal=False):
        with torch.set_grad_enabled(self.training):
            return super().forward(query, key, value, mask, causal)


@mistake("02.5", says="torch's scaled_dot_product_attention does the work")
class MultiHeadAttention(Base):
    def __init__(self, d_model, num_heads, dropout=0.0, fused=False):
        super().__init__(d_model, num_heads, dropout, True)


@mistake("02.5", says="a tensor is made on the CPU")
class MultiHeadAttention(Base):
    def both(self, mask, causal, q):
        if not causal or (self.fused and mask is None):
            return mask
        past = right.causal_mask(q.shape[-2])
        return past if mask is None else mask & past


@mistake("02.5", says="a kept mask has one length")
class MultiHeadAttention(right.MultiHeadAttention):
    kept: Any = None

    def forward(self, query, key, value, mask=None, causal=False):
        length = query.shape[1]
        if causal and self.kept is None:
            self.kept = right.causal_mask(length, query.device)
        if causal:
            more = length - min(length, self.kept.shape[-1])
            past = F.pad(self.kept, (0, more, 0, more), value=True)[..., :length, :length]
            mask = past if mask is None else mask & past
        return super().forward(query, key, value, mask)
