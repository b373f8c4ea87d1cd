"""The sixteen numbers of NF4, and where they come from."""

import torch
from jaxtyping import Float
from torch import Tensor

# As Dettmers et al. 2023 print them in appendix E (arXiv 2305.14314). bitsandbytes has the same.
NF4_LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def normal_levels() -> Float[Tensor, "16"]:
    """The table to seven digits, from the quantiles of the normal distribution.

    Seven levels below zero, zero, eight above. Each side is evenly spaced in probability, from a
    half to a last one that is the mean of 1 - 1/32 and 1 - 1/30: half a bin from the end with 16
    levels and with 15. The outermost levels are then divided to lie at -1 and 1. Source: the
    authors' code (create_normal_map in bitsandbytes).
    """
    last = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(0.5, last, 9, dtype=torch.float64))
    below = -torch.special.ndtri(torch.linspace(last, 0.5, 8, dtype=torch.float64))
    return (torch.cat([below[:-1], above]) / above[-1]).float()
