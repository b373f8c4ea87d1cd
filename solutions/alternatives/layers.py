"""The layers of lesson 03 in another style, of which its alternatives are built."""

import collections
import functools

import torch
import torch.nn.functional as F
from torch import nn

from shared.model.attention import MultiHeadAttention
from shared.model.layers import PositionwiseFeedForward

# 03.1


class NormByVarMean(nn.Module):
    """torch.var_mean, and the gain folded into one factor."""

    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))
        self.bias = nn.Parameter(torch.empty(d_model))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self):
        """Ones and zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x):
        """One factor and one sum."""
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return torch.addcmul(self.bias, x - mean, self.weight * torch.rsqrt(variance + self.eps))


class NormByLengths(nn.Module):
    """The standard deviation is the length of the centred vector, over the root of d_model."""

    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.d_model, self.eps = d_model, eps
        self.weight = nn.Parameter(torch.full((d_model,), 1.0))
        self.bias = nn.Parameter(torch.full((d_model,), 0.0))

    def forward(self, x):
        """Row by row, of a matrix."""
        rows = x.reshape(-1, self.d_model)
        rows = rows - rows.sum(dim=1, keepdim=True) / self.d_model
        squares = torch.einsum("ij,ij->i", rows, rows) / self.d_model
        rows = rows / torch.sqrt(squares + self.eps)[:, None]
        return (rows @ torch.diag(self.weight) + self.bias).view_as(x)


# 03.2


class FeedForwardInOrder(nn.Sequential):
    """A Sequential with names."""

    def __init__(self, d_model, d_ff, dropout=0.0):
        parts = collections.OrderedDict[str, nn.Module](linear1=nn.Linear(d_model, d_ff))
        parts["relu"], parts["drop"] = nn.ReLU(), nn.Dropout(dropout)
        parts["linear2"] = nn.Linear(d_ff, d_model)
        super().__init__(parts)


class FeedForwardByFunctions(nn.Module):
    """Products of matrices, a clamp and the function for dropout."""

    def __init__(self, d_model, d_ff, dropout=0.0):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.rate = dropout

    def forward(self, x):
        """Return (max(0, x W1 + b1)) W2 + b2."""
        hidden = torch.clamp(x @ self.linear1.weight.mT + self.linear1.bias, min=0)
        hidden = F.dropout(hidden, self.rate, self.training)
        return hidden @ self.linear2.weight.mT + self.linear2.bias


# 03.3 and 03.4


class _Around(nn.Module):
    """What goes around a sub-layer, as a method that both layers inherit."""

    def __init__(self, config, *names):
        super().__init__()
        self.config = config
        inner, width = config.inner_dropout, config.d_model
        for number, name in enumerate(names, 1):
            if name == "feed_forward":
                part = PositionwiseFeedForward(width, config.d_ff, inner)
            else:
                part = MultiHeadAttention(width, config.num_heads, inner, fused=config.fused)
            self.add_module(name, part)
            self.add_module(f"norm{number}", nn.LayerNorm(width))
        self.dropout = nn.Dropout(config.dropout)

    def around(self, x, number, sublayer):
        """Add what the sub-layer makes of x."""
        norm = self.get_submodule(f"norm{number}")
        if self.config.norm == "pre":
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


class EncoderLayerOfClosures(_Around):
    """Each sub-layer is a function of one argument."""

    def __init__(self, config):
        super().__init__(config, "self_attention", "feed_forward")

    def forward(self, x, mask=None, causal=False):
        """Attention, then feed-forward."""

        def attend(y):
            return self.get_submodule("self_attention")(y, y, y, mask=mask, causal=causal)

        return self.around(self.around(x, 1, attend), 2, self.get_submodule("feed_forward"))


class DecoderLayerOfClosures(_Around):
    """The same with three sub-layers, folded by reduce."""

    def __init__(self, config):
        super().__init__(config, "self_attention", "cross_attention", "feed_forward")

    def forward(self, x, memory, memory_mask=None):
        """Fold x through the sub-layers."""

        def look_back(y):
            return self.get_submodule("self_attention")(y, y, y, None, True)

        def look_across(y):
            return self.get_submodule("cross_attention")(y, memory, memory, memory_mask)

        sublayers = look_back, look_across, self.get_submodule("feed_forward")
        return functools.reduce(
            lambda y, numbered: self.around(y, *numbered), enumerate(sublayers, 1), x
        )


class EncoderLayerInLine(nn.Module):
    """No helper: the norms that do not apply are left out by `if`, and a mask for the causal."""

    def __init__(self, config):
        super().__init__()
        D, inner = config.d_model, config.inner_dropout
        self.self_attention = MultiHeadAttention(D, config.num_heads, inner, config.fused)
        self.feed_forward = PositionwiseFeedForward(D, config.d_ff, dropout=inner)
        self.norm1, self.norm2 = NormByVarMean(D), NormByVarMean(D)
        self.rate, self.pre = config.dropout, config.norm == "pre"

    def forward(self, x, mask=None, causal=False):
        """Return x after both."""
        y = self.norm1(x) if self.pre else x
        y = self.self_attention(query=y, key=y, value=y, mask=mask, causal=causal)
        x = x + F.dropout(y, self.rate, training=self.training)
        x = x if self.pre else self.norm1(x)
        y = self.feed_forward(self.norm2(x) if self.pre else x)
        x = x + F.dropout(y, self.rate, training=self.training)
        return x if self.pre else self.norm2(x)


class DecoderLayerInLine(nn.Module):
    """Causality as a mask that is made at each call; dropout modules of its own."""

    def __init__(self, config):
        super().__init__()
        self.pre, inner = config.norm != "post", config.inner_dropout
        self.norm1, self.norm2, self.norm3 = (NormByLengths(config.d_model) for _ in range(3))
        self.self_attention, self.cross_attention = (
            MultiHeadAttention(config.d_model, config.num_heads, inner, config.fused)
            for _ in range(2)
        )
        self.feed_forward = PositionwiseFeedForward(config.d_model, config.d_ff, inner)
        self.drops = nn.ModuleList(nn.Dropout(config.dropout) for _ in range(3))

    def forward(self, x, memory, memory_mask=None):
        """Three sub-layers, each read before or normed after."""
        places = torch.arange(x.shape[1], device=x.device)
        past = (places[:, None] >= places)[None, None]
        for number, (norm, drop) in enumerate(
            zip((self.norm1, self.norm2, self.norm3), self.drops, strict=True)
        ):
            y = norm(x) if self.pre else x
            if number == 0:
                y = self.self_attention(y, y, y, past)
            elif number == 1:
                y = self.cross_attention(y, memory, memory, memory_mask)
            else:
                y = self.feed_forward(y)
            x = x + drop(y) if self.pre else norm(x + drop(y))
        return x
