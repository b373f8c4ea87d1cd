"""Attention as in "Attention Is All You Need" (Vaswani et al. 2017, section 3.2), by hand.

One mask convention for the whole course: a boolean tensor that broadcasts to (B, H, T, S), in
which True means "this query may look at this key". PyTorch's
`F.scaled_dot_product_attention` reads a boolean mask the same way; `nn.MultiheadAttention` reads
it the other way round, which is worth remembering.

Shapes: B batch, T queries (target length), S keys (source length), D d_model, H heads,
K head_dim = D / H.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from shared.errors import InputError

Rotation = Callable[[Tensor, Tensor], Tensor]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]  # q, k, v, mask, causal


def scaled_dot_product_attention(
    query: Float[Tensor, "batch heads target head_dim"],
    key: Float[Tensor, "batch heads source head_dim"],
    value: Float[Tensor, "batch heads source head_dim"],
    mask: Bool[Tensor, "#batch #heads #target #source"] | None = None,
) -> tuple[
    Float[Tensor, "batch heads target head_dim"], Float[Tensor, "batch heads target source"]
]:
    """Weigh the values by how well their keys match each query: softmax(Q K^T / sqrt(K)) V.

    Returns the output and the weights. Each row of the weights sums to 1; a row whose keys are
    all masked is 0, and so are its output and its gradients.
    """
    weights, empty = _open_weights(query, key, mask)
    output = weights @ value
    if empty is None:
        return output, weights
    return output.masked_fill(empty, 0.0), weights.masked_fill(empty, 0.0)


def padding_mask(
    tokens: Int[Tensor, "batch source"], pad_id: int = 0
) -> Bool[Tensor, "batch 1 1 source"]:
    """True where a token is not padding, for every head and every query: (B, 1, 1, S)."""
    return (tokens != pad_id)[:, None, None, :]


def causal_mask(
    length: int, device: torch.device | str | None = None
) -> Bool[Tensor, "1 1 length length"]:
    """True where the key is not after the query: the lower triangle, with its diagonal."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


def split_heads(
    x: Float[Tensor, "batch length d_model"], num_heads: int
) -> Float[Tensor, "batch num_heads length head_dim"]:
    """Cut each vector into `num_heads` consecutive parts; a view, no copy.

    Raises InputError (a ValueError) when d_model cannot be divided by num_heads.
    """
    _head_dim(x.shape[-1], num_heads)
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, H, L, K)


def combine_heads(
    x: Float[Tensor, "batch heads length head_dim"],
) -> Float[Tensor, "batch length d_model"]:
    """Undo `split_heads`: put the heads' parts side by side again."""
    return x.transpose(1, 2).flatten(start_dim=2)  # (B, L, D)


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each in its own part of the vector (section 3.2.2).

    Self-attention when query, key and value are one tensor, cross-attention otherwise. `mask`
    broadcasts to (B, H, T, S), True = may be looked at; `causal=True` hides later keys without a
    mask in memory. Queries are taken to be the last T of S positions, so that a decoder with a
    cache may ask for one position at a time.

    fused=True computes the same through `F.scaled_dot_product_attention`, which does not keep
    the T x S weights. `keep_weights = True` stores the weights of the last call in `weights`
    (by hand, whatever `fused` says), for maps. `rotate`, when set, is applied to queries and keys
    with their positions (rotary encoding; the language models set it). `kernel`, when set, takes
    the place of what attends in the heads (lesson 17 sets one that asks other ranks).
    """

    def __init__(
        self, d_model: int, num_heads: int, dropout: float = 0.0, fused: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = _head_dim(d_model, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.fused = fused
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
        self.rotate: Rotation | None = None
        self.kernel: Kernel | None = None
        self.keep_weights = False
        self.weights: Tensor | None = None

    def forward(
        self,
        query: Float[Tensor, "batch target d_model"],
        key: Float[Tensor, "batch source d_model"],
        value: Float[Tensor, "batch source d_model"],
        mask: Bool[Tensor, "#batch #heads #target #source"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "batch target d_model"]:
        """Project, attend in every head, put the heads together, project once more."""
        return self.attend(query, *self.project(key, value), mask, causal)

    def project(
        self,
        key: Float[Tensor, "batch source d_model"],
        value: Float[Tensor, "batch source d_model"],
    ) -> tuple[
        Float[Tensor, "batch heads source head_dim"], Float[Tensor, "batch heads source head_dim"]
    ]:
        """Return keys and values, projected and split: what a decoder may keep between steps."""
        return (
            split_heads(self.w_k(key), self.num_heads),
            split_heads(self.w_v(value), self.num_heads),
        )

    def attend(
        self,
        query: Float[Tensor, "batch target d_model"],
        k: Float[Tensor, "batch heads source head_dim"],
        v: Float[Tensor, "batch heads source head_dim"],
        mask: Bool[Tensor, "#batch #heads #target #source"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "batch target d_model"]:
        """Return the output for raw queries, with keys and values that `project` has made."""
        q = split_heads(self.w_q(query), self.num_heads)
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        if self.rotate is not None:
            positions = torch.arange(num_keys, device=k.device)
            q = self.rotate(q, positions[num_keys - num_queries :])
            k = self.rotate(k, positions)
        heads = self._fused if self.fused and not self.keep_weights else self._by_hand
        heads = self.kernel or heads
        return self.w_o(combine_heads(heads(q, k, v, mask, causal)))

    def _by_hand(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Float[Tensor, "batch heads target head_dim"]:
        mask = with_causal(mask, q, k) if causal else mask
        weights, empty = _open_weights(q, k, mask)
        if self.keep_weights:
            self.weights = (weights if empty is None else weights.masked_fill(empty, 0.0)).detach()
        output = F.dropout(weights, self.dropout, self.training) @ v
        return output if empty is None else output.masked_fill(empty, 0.0)

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Float[Tensor, "batch heads target head_dim"]:
        # is_causal lets the kernel skip the upper triangle; a mask has to be read, and costs
        # T x S bytes. The kernel counts from the first key, we from the last: same if T == S.
        in_kernel = causal and mask is None and q.shape[-2] == k.shape[-2]
        if causal and not in_kernel:
            mask = with_causal(mask, q, k)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=in_kernel,
        )


def _open_weights(
    query: Tensor, key: Tensor, mask: Tensor | None
) -> tuple[
    Float[Tensor, "batch heads target source"], Bool[Tensor, "#batch #heads #target 1"] | None
]:
    """Return the weights with empty rows left open, and which rows those are (None: no mask).

    Softmax over nothing but -inf is 0/0. A row without any key therefore looks at every key here,
    and the caller closes it after the product with the values: no NaN exists at any point,
    forward or backward, and closing the (T, K) output rather than the (T, S) weights keeps
    autograd from saving a second T x S tensor.
    """
    # The query is scaled, not the scores: T x K products instead of T x S, and the same result.
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # (B, H, T, S)
    if mask is None:
        return scores.softmax(dim=-1), None
    empty = ~mask.any(dim=-1, keepdim=True)
    return scores.masked_fill(~(mask | empty), -math.inf).softmax(dim=-1), empty


def _head_dim(d_model: int, num_heads: int) -> int:
    """Return d_model / num_heads; raise InputError, naming both, unless it is whole."""
    if num_heads < 1 or d_model % num_heads != 0:
        fits = ", ".join(str(n) for n in range(1, min(d_model, 64) + 1) if d_model % n == 0)
        raise InputError(
            f"d_model ({d_model}) is not divisible by num_heads ({num_heads}); "
            f"numbers of heads that would do: {fits}"
        )
    return d_model // num_heads


def with_causal(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the mask, closed also for keys after the query (the last query sees every key)."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    assert num_queries <= num_keys, f"{num_queries} queries cannot be the last of {num_keys} keys"
    if num_queries == 1:
        return mask
    past = causal_mask(num_keys, q.device)[:, :, num_keys - num_queries :]
    return past if mask is None else mask & past
