"""What torch.compile fuses on a CPU, read from the code that it wrote."""

import math
import re
import shutil
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.lesson17_long_context.experiments.counting import moved_bytes
from shared.measuring.timing import fastest_seconds

HEADS, LENGTH = 8, 384


def weights(scores: Tensor, seen: Tensor) -> Tensor:
    """What lies between attention's two products: scale, mask, softmax."""
    return (scores * 0.125).masked_fill(~seen, -math.inf).softmax(-1)


@dataclass
class Fused:
    """Kernels that were written, their bytes and time beside those of the operators."""

    kernels: list[str]
    bytes_before: int
    bytes_after: int
    ratio: float  # seconds of the operators over those of the compiled function


def why_no_compiler() -> str:
    """Why nothing can be compiled here; empty where it can."""
    if any(shutil.which(name) for name in ("g++", "clang++")):
        return ""
    return "no C++ compiler (g++ or clang++) was found: torch.compile needs one on a CPU"


def fused_weights() -> Fused:
    """Compile `weights`, which takes some ten seconds where its cache is empty; one thread."""
    from torch._inductor.utils import run_and_get_code

    make = torch.Generator().manual_seed(0)
    scores = torch.randn(HEADS, LENGTH, LENGTH, generator=make)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    compiled = torch.compile(weights)
    result, codes = run_and_get_code(compiled, scores, seen)
    assert torch.allclose(result, weights(scores, seen), atol=1e-6)
    kernels = re.findall(r"^ +(cpp_fused\w+)\(", codes[0], flags=re.MULTILINE)
    before = moved_bytes(lambda: weights(scores, seen))
    # The one kernel's arguments: it reads scores and mask, writes weights; rows' numbers are small.
    after = 2 * scores.nbytes + seen.nbytes + 2 * 4 * HEADS * LENGTH
    seconds = [fastest_seconds(lambda f=f: f(scores, seen), 15, "cpu") for f in (weights, compiled)]
    return Fused(kernels, before, after, seconds[0] / seconds[1])
