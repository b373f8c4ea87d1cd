"""PowerSGD: a matrix of gradients as the product of two thin ones, which add up over ranks.

Source: Vogels et al. 2019 (arXiv 1905.13727), algorithms 1 and 2.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shared.ddp.averaging import average_flat, sum_flat
from shared.less_communication.packing import orthonormal
from shared.less_communication.states import Group, LowRank, Matrix, ready


def low_rank_mean(
    matrices: Sequence[Matrix], factors: Sequence[Matrix], group: Group = None
) -> list[Matrix]:
    """Overwrite matrices by a low-rank approximation of their mean over the ranks; see below.

    One step of the power iteration: with M the mean of the ranks' matrices and Q, (columns, rank),
    the given factor, P spans M Q at right angles, the new factor is M^T P, and every rank's matrix
    becomes P (M^T P)^T, the same bits on all. Two messages for all matrices together, of rows x
    rank and columns x rank numbers each. `factors` are not written to; the new ones are returned.
    """
    factors = [orthonormal(q) for q in factors]
    lefts = [m @ q for m, q in zip(matrices, factors, strict=True)]
    sum_flat(lefts, group)  # no mean is needed: the next line takes any length away
    lefts = [orthonormal(p) for p in lefts]
    rights = [m.T @ p for m, p in zip(matrices, lefts, strict=True)]
    average_flat(rights, group)
    for matrix, p, q in zip(matrices, lefts, rights, strict=True):
        matrix.copy_(p @ q.T)
    return rights


def power_sgd(state: LowRank, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket's matrices by `low_rank_mean`, with error feedback; vectors as they are.

    A gradient is a matrix of its first dim by all others. Those that `state.pays` names are
    compressed, beginning with the factors of last time (`state.right`), the first time with
    `state.first_factors`; the others are averaged whole, in one message, if there are any. In the
    first `state.start` steps all is. `state.steps` counts steps, not buckets. Source: torch's
    powerSGD_hook, whose numbers these are.
    """
    buffer = bucket.buffer()
    plain = state.steps < state.start
    state.steps += bucket.is_last()
    if plain:
        average_flat([buffer], state.group)
        return ready(buffer)
    buffer += state.recall(bucket)
    whole = buffer.clone()
    pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))  # views of the buffer
    thin = [(p, g.view(g.shape[0], -1)) for p, g in pairs if state.pays(g)]
    average_flat([g for _, g in pairs if not state.pays(g)], state.group)
    matrices = [matrix for _, matrix in thin]
    known = all(p in state.right for p, _ in thin)
    factors = [state.right[p] for p, _ in thin] if known else state.first_factors(matrices)
    for (p, _), new in zip(thin, low_rank_mean(matrices, factors, state.group), strict=True):
        state.right[p] = new
    state.keep(bucket, whole - buffer)
    return ready(buffer)
