"""Laboratory of lesson 04: two sentences of which the first is decided long before the second.

Two translations of source 9 end at the second step, and a beam of 2 is full. A third one that goes
on would win at the sixth step, if the search for its neighbour's translation kept it alive.
"""

import torch
from torch import Tensor

from shared.exercises.stand_in import Tokens, table_rule

EOS = 2
SOURCES = torch.tensor([[9, 9], [8, 8]])
LATE = [4, 3, 3, 3, 3, EOS]
EARLY_TABLE: dict[Tokens, dict[int, float]] = {
    (): {4: 0.5, 5: 0.45, 3: 0.05},
    (4,): {EOS: 0.55, 3: 0.45},
    (5,): {EOS: 0.55, 3: 0.45},
    **{(4, *[3] * n): {3: 1.0} for n in range(1, 4)},
    (4, 3, 3, 3, 3): {EOS: 1.0},
}
SLOW_TABLE: dict[Tokens, dict[int, float]] = {
    **{(4,) * n: {4: 0.9, 5: 0.1} for n in range(9)},
    (4,) * 9: {EOS: 0.9, 3: 0.1},
}


def early_and_slow(source: Tokens, prefix: Tokens) -> Tensor:
    """The logits of the next token: of two tables, the one for this source."""
    return table_rule(6, EARLY_TABLE if 9 in source else SLOW_TABLE)(source, prefix)
