"""Softmax over keys that come in tiles, none of which is seen twice.

What a tile leaves behind is small: for each query the output so far, and one number, the logsumexp
of its scores. Two such pairs, of any two sets of keys, can be merged into that of both.
Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (arXiv 2205.14135), 3.1.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

Partial = tuple[Float[Tensor, "*batch queries d"], Float[Tensor, "*batch queries"]]
Tile = tuple[Float[Tensor, "*batch queries keys"], Float[Tensor, "*batch keys d"]]


def online_softmax(tiles: Iterable[Tile]) -> Partial:
    """Return softmax(scores) @ values and the scores' logsumexp, over the keys of all tiles.

    A tile is (scores, values) of some keys; scores of -inf hide a key. A query that sees no key
    has output 0 and logsumexp -inf. Each tile is read once, in the order in which it comes, and
    may be freed before the next is asked for. The results have the scores' dtype.

    Raises ValueError where there is no tile at all.
    """
    top = total = output = None
    for scores, values in tiles:
        best = scores.amax(-1, keepdim=True)  # (..., T, 1)
        new_top = best if top is None else torch.maximum(top, best)
        # A query without any key so far has a maximum of -inf, and -inf less -inf is no number.
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights = (scores - safe).exp()
        here, weighted = weights.sum(-1, keepdim=True), weights @ values.to(weights.dtype)
        if top is None or total is None or output is None:
            total, output = here, weighted
        else:
            shrink = (top - safe).exp()  # what has been added up was relative to a lower maximum
            total, output = total * shrink + here, output * shrink + weighted
        top = new_top
        del scores, values, weights  # while the next tile is made, this one is gone
    if top is None or total is None or output is None:
        raise ValueError("there is no tile: a softmax needs at least one key")
    unseen = total == 0
    logsumexp = torch.where(unseen, -torch.inf, top + total.log())
    return output / total.masked_fill(unseen, 1.0), logsumexp.squeeze(-1)


def merge(first: Partial, second: Partial) -> Partial:
    """Return output and logsumexp over the keys of both, from those over each set of keys.

    A softmax's sum over both sets is e^l1 + e^l2, so each output counts by its share of it.
    """
    (output1, l1), (output2, l2) = first, second
    logsumexp = torch.logaddexp(l1, l2)
    safe = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)
    share1, share2 = (l1 - safe).exp().unsqueeze(-1), (l2 - safe).exp().unsqueeze(-1)
    return output1 * share1 + output2 * share2, logsumexp
