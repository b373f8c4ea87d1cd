"""Lesson 17, the instructor's side: attention over contexts that no rank has whole.

The lesson's one idea: a softmax needs all of a row's scores only for two numbers, its maximum and
its sum, and these can be kept while the keys come in tiles. So nothing of size L x L has to exist,
neither on a chip (FlashAttention) nor on a rank (the ring): what a set of keys leaves behind is an
output and a logsumexp, and two of these merge. All-to-all attention is the other way out: the
ranks swap parts of the sequence for heads and attend as in one process.

Points are the difficulty at the exercise (20 in all). What to ask behind a right answer: what is
exact here and what would be an approximation; what grows with L and what with L squared; why
backward can do with one number a row; who holds which gradient at which moment of the ring's
backward; which of the two ways ends first when ranks are added, and by what.
"""

from shared.long_context.exchange import all_to_all_attention
from shared.long_context.online import online_softmax
from shared.long_context.orders import balanced_order
from shared.long_context.ring import ring_backward, ring_forward
from shared.long_context.tiles import TiledAttention, tiled_forward

__all__ = [
    "TiledAttention",
    "all_to_all_attention",
    "balanced_order",
    "online_softmax",
    "ring_backward",
    "ring_forward",
    "tiled_forward",
]

NOTES = {
    "17.1": """
online_softmax: 3 points, 25 minutes. Rescaling of sum and output 2, hidden keys 1. Ask for the
three numbers a row that have to be kept, and by what they are multiplied when a higher score comes.
Common mistakes: each tile's softmax averaged; the output rescaled and the sum not; -inf less -inf
where a first tile is hidden whole.
""",
    "17.2": """
tiled_forward: 3 points, 30 minutes. Tiles 1, the causal mask by whole positions 1, tiles above the
diagonal left out 1. Ask how many of the tiles are left out as L grows (half), and of the bytes.
Common mistakes: positions counted inside of the tile; a strip of queries against all keys, which
needs no online softmax and grows with the length; sums in 16 bits.
""",
    "17.2b": """
TiledAttention: 4 points, 40 minutes. What is kept 1, weights from the logsumexp 1, the gradient
through the softmax 2. Ask why the weighted mean of the weights' gradients is gradient . output.
Common mistakes: a softmax inside of each tile; the mean left out;
tensors kept in ctx's attributes, where nobody counts or frees them.
""",
    "17.3": """
balanced_order: 1 point, 5 minutes. Any pairing of an early with a late chunk will do. Ask for the
work of the last rank in the plain order, and why equal sums are not enough: a step of the ring
takes as long as its slowest rank.
Common mistakes: neighbours; every n-th chunk, which is better and not equal.
""",
    "17.3b": """
ring_forward: 3 points, 30 minutes. Whose chunks are here 1, what is seen 1, merging 1. Ask what a
rank would hold if the keys were gathered, and what torch's own does by default (it gathers).
Common mistakes: rank + step for rank - step; one hop too many; is_causal handed on for every pair.
""",
    "17.3c": """
ring_backward: 3 points, 20 minutes. The gradients travel 1, and come home 1, keys leave before 1.
Ask why the global logsumexp and output are given to a block's backward, not the block's own.
Common mistakes: n - 1 hops for the gradients, which leave each with a neighbour.
""",
    "17.4": """
all_to_all_attention: 3 points, 30 minutes. Ask what is sent if the ranks double, and where it ends:
at one head a rank, of keys and values as well.
Common mistakes: a reshape where dims have to be exchanged; an exchange without a backward.
""",
}
