"""Lesson 02, attention: the answers, with notes for whoever teaches it.

All answers are used by later lessons, so they live in `shared/model/attention.py` and are
re-exported here; read them there. The lesson's one idea: a word's new vector is a weighted mean of
other words' vectors, and the weights are computed from the words. All the rest is shapes and masks,
and there the mistakes are made.

Points are the difficulty at the exercise (13 in all). Ask for the sentence behind a right answer,
not for the code again: "why sqrt(d_k) and not d_k", "what does a row of the weights add up to",
"which axis is a batch of heads".
"""

from shared.model.attention import MultiHeadAttention as MultiHeadAttention
from shared.model.attention import causal_mask as causal_mask
from shared.model.attention import combine_heads as combine_heads
from shared.model.attention import padding_mask as padding_mask
from shared.model.attention import scaled_dot_product_attention as scaled_dot_product_attention
from shared.model.attention import split_heads as split_heads

__all__ = [
    "MultiHeadAttention",
    "causal_mask",
    "combine_heads",
    "padding_mask",
    "scaled_dot_product_attention",
    "split_heads",
]

NOTES = {
    "02.1": """
scaled_dot_product_attention: 3 points, 20 minutes.
Look for: softmax over the keys (the last dim); the scale from the query's own last dim, not from
d_model; a row without keys.
Weigh it: the formula alone is half of the points, the empty row the other half. The reference
opens an empty row before the softmax and closes the output after it, so that no NaN ever exists.
Filling with 0 after the softmax (`nan_to_num`, `where`) is accepted as long as the gradients are
finite, which they are with masked_fill and are not with an added -inf: ask a learner who passes
which of the two they have, and why it matters (backward of masked_fill writes 0 over the NaN,
backward of + passes it on).
Common mistakes: softmax over dim=-2 (each key hands out a total of 1); dividing by d_k; a large
negative number instead of -inf, which turns "nothing to look at" into "look at all the padding";
weights set to 0 after the softmax, so that the rest no longer sums to 1.
""",
    "02.2": """
padding_mask: 1 point, 5 minutes.
Look for: (B, 1, 1, S), so that it broadcasts over heads and queries. Padding is masked as a key.
Masking it as a query too makes rows without keys for no gain: what comes out at a padding position
is never read.
Common mistakes: True for padding, which is nn.MultiheadAttention's convention and the opposite of
F.scaled_dot_product_attention's; pad_id written as 0; (B, S), which broadcasts against (T, S) when
B happens to equal T and then is silently wrong.
""",
    "02.3": """
causal_mask: 1 point, 5 minutes.
Look for: the diagonal is True (a position sees itself), a bool, the device that was asked for.
Common mistakes: triu for tril; diagonal=-1, which leaves the first row empty and gives NaN or a
silent zero at the first token; a float mask of 0 and -inf, which is added and is not our
convention.
""",
    "02.4a": """
split_heads: 2 points, 10 minutes.
Look for: two steps, cut then transpose. Ask for the shape after each.
Common mistakes: one reshape to (B, H, L, K), which has the right shape and mixes positions: the
most frequent silent error of the whole lesson, since a network trains with it, a bit worse; heads
that take every H-th number, which is a permutation and would be harmless in training, but does not
load anybody else's weights; integer division that loses the rest.
""",
    "02.4b": """
combine_heads: 1 point, 5 minutes.
Look for: the transpose comes first. Afterwards the tensor is not contiguous, so `view` refuses and
`reshape`, `flatten` or `contiguous()` copies.
Common mistakes: reshape without the transpose, as above.
""",
    "02.5": """
MultiHeadAttention: 5 points, 35 minutes.
Look for: projections first, then heads; all H heads in one batched product, no loop; w_o last;
`causal` together with `mask`, not instead of it; fused=True keeps no T x S tensor.
Weigh it: self-attention without masks 2, cross-attention 1, masks 1, fused 1. A loop over heads is
right and slow: point at the batch dimension.
Common mistakes: keys and values projected from the query (self-attention passes, cross-attention
does not); the scale from d_model; a forgotten w_o, which trains and loses the mixing of heads;
`is_causal=True` and `attn_mask=` both given to F.scaled_dot_product_attention, which promises an
error and on a CPU computes it; dropout on in eval.
""",
}
