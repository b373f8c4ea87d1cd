"""Lesson 19, the instructor's side: a frozen model, an update of low rank, weights in four bits.

The lesson's one idea: what training costs beyond the weights themselves (gradients, two moments,
messages) is paid for *trained* parameters alone. An update B A of low rank makes them few, and what
is left is to hold the frozen weights, for which four bits are enough. Everything else follows from
keeping that true: nothing frozen may get a gradient, be saved for backward at full width, or be
rounded again by a merge. The classes live in shared/lora.

Points are the difficulty at the exercise (14 in all). What to ask behind a right answer: why B and
not A begins at zero, and what would happen if both did; which bytes LoRA hardly saves
(activations: an adapter needs its layer's input as the weight did); what FSDP still sends
for a frozen weight, and in which half of the step; what a merge into 4-bit weights would lose.
"""

from shared.lora.layers import LoRALinear, add_lora, merge
from shared.lora.nf4 import double_quantize, quantize_nf4
from shared.lora.qlora import QLoRALinear

__all__ = [
    "LoRALinear",
    "QLoRALinear",
    "add_lora",
    "double_quantize",
    "merge",
    "quantize_nf4",
]

NOTES = {
    "19.1": """
LoRALinear: 1 point, 10 minutes. The start (A drawn, B zero) and two thin products.
Ask for the FLOPs of B A x in either order of the brackets, for the gradient of A in the first step.
Common mistakes: A and B both zero (no gradient ever); the base left trainable; the scale left out
or alpha alone; B @ A made first, which costs a matrix of the layer's size in memory.
""",
    "19.2a": """
add_lora: 3 points, 25 minutes. Names 1, what is frozen 1, refusals before any change 1.
Ask what `endswith("w_q")` without the dot would also find, and why the list of places has to be
made before the first one is replaced.
Common mistakes: norms and embeddings left trainable; a substring as a match; half a model adapted
when a name matches nothing; two adapters for a layer that stands at two places.
""",
    "19.2b": """
merge: 2 points, 20 minutes. A new weight 1, one rounding 1.
Ask what happens to a tied embedding if the weight is changed in place.
Common mistakes: the update added without its scale, or transposed; added in 16 bits; in place.
""",
    "19.3a": """
quantize_nf4: 3 points, 30 minutes. Blocks and scales 1, nearest level 1, packing and edges 1.
Ask how many bits a weight takes in all (4.5 with float32 scales of 64), and what one weight of 100
among 63 of size 1 does to its block.
Common mistakes: one scale for the whole tensor; 0 / 0 in a block of zeros; halves of a byte
swapped; rounding down to a level in place of the nearest.
""",
    "19.3b": """
double_quantize: 2 points, 20 minutes. The mean 1, the ranges 1.
Ask for the bits a weight before and after (0.5 and 0.127), and what float8 does beyond 448
(in torch it stays at 448).
Common mistakes: the mean left in (the sign bit is never used); one range for all; 0 / 0 where
all scales are equal; the range not divided by 448, so that the larger exponents are never used.
""",
    "19.4": """
QLoRALinear: 3 points, 30 minutes. The Function that saves nothing of the weight's size 2.
Ask what `F.linear(x, base.weight)` keeps for backward although the weight is frozen, and why.
Common mistakes: autograd keeps the dequantized weight; it is made once and kept; no gradient for x.
""",
}
