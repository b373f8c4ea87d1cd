"""Laboratory of lesson 04: a stand-in that sees whether its encoder was shown padding.

The stand-in's encoder has no weights, so a forgotten mask there would change no translation.
"""

import torch
from torch import Tensor

from shared.exercises.stand_in import Rule, StandIn


class Watched(StandIn):
    """A stand-in for a translator, whose padding is 0."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.padding_encoded = False

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """The source tokens themselves; notes whether any padding among them may be looked at."""
        padding = (src == 0)[:, None, None, :]
        seen = torch.ones_like(padding) if src_mask is None else src_mask.bool()
        self.padding_encoded |= bool((seen & padding).any())
        return super().encode(src, src_mask)
