"""Lesson 01, positional encoding: the answers, with notes for whoever teaches it.

What later lessons use lives in `shared.model.embeddings` and is re-exported here; read it there.
Only this lesson needs `shift_matrix`, so it is written out below.

The thread through the four exercises is one picture: every pair of features is the hand of a
clock. 01.1 sets the hands for each position, 01.2 registers them in a model, 01.3 turns all
hands by the same number of steps, and 01.4 applies that turn to queries and keys in place of
adding a code. A class that sees `x @ shift_matrix(p, K) == rotary(x, p)` has seen the lesson.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from shared.model.embeddings import PositionalEncoding as PositionalEncoding
from shared.model.embeddings import pair_frequencies
from shared.model.embeddings import rotary as rotary
from shared.model.embeddings import sinusoidal_encoding as sinusoidal_encoding

__all__ = ["PositionalEncoding", "rotary", "shift_matrix", "sinusoidal_encoding"]

# NOTES 01.1 sinusoidal_encoding (2 points, 15 minutes)
# Look for: one vector of d_model / 2 frequencies, an outer product, sine and cosine interleaved.
#   A loop over columns is right too, and slow; it deserves the points and a remark.
# Weigh: layout and exponent are the exercise. Precision is a point of craft: float32 angles are
#   harmless for training and visible in a comparison (2e-4 near position 5000).
# Common mistakes: exponent i / d_model where the paper has 2i / d_model; each column given its own
#   frequency, so that a sine and its cosine no longer belong together and 01.3 has no solution;
#   sines in the first half and cosines in the second (a permutation: some libraries do it, a model
#   trained with one layout cannot use the other); odd d_model that fails in an assignment of
#   mismatched slices, or that silently drops a column.

# NOTES 01.2 PositionalEncoding (2 points, 15 minutes)
# Look for: register_buffer, a slice from `start`, the length checked before anything is added.
# Weigh: the buffer is the exercise. nn.Parameter(requires_grad=False) moves and saves as well,
#   but is counted as a parameter, and weight decay or DDP would meet it.
# Common mistakes: a plain attribute (stays behind on `.to()`); slicing by x.shape[0], from the
#   days when the batch was the second dimension; float32 rows added to bfloat16 activations, which
#   turns everything after them into float32; dropout on the encoding alone.
#   Ask: what does x + encoding[9:10] give when the encoding has 9 rows? Zero rows, no error.

# NOTES 01.3 shift_matrix (3 points, 20 minutes)
# Look for: the two addition theorems written as 2 x 2 blocks on the diagonal.
# Weigh: a least-squares fit through many positions passes if it is accurate; ask for the blocks.
# Common mistakes: the transpose, which moves backwards (worth a minute: the inverse of a turn is
#   its transpose); blocks laid out for the first-half/second-half encoding.


def shift_matrix(offset: int, d_model: int) -> Float[Tensor, "d_model d_model"]:
    """The matrix M with PE(p + offset) = M @ PE(p) for every position p, float32.

    Block-diagonal: pair i is turned by offset / 10000^(2i / d_model), by the addition theorems
    sin(a + b) = sin a cos b + cos a sin b and cos(a + b) = cos a cos b - sin a sin b. It does not
    depend on p, its inverse is its transpose, and a negative offset goes back.
    Raises InputError (a ValueError) if `d_model` is odd or below 2.
    """
    angles = offset * pair_frequencies(d_model)  # (D / 2,)
    cos, sin = angles.cos(), angles.sin()
    even = torch.arange(0, d_model, 2)
    matrix = torch.zeros(d_model, d_model, dtype=torch.float64)
    matrix[even, even], matrix[even, even + 1] = cos, sin
    matrix[even + 1, even], matrix[even + 1, even + 1] = -sin, cos
    return matrix.float()


# NOTES 01.4 rotary (4 points, 25 minutes)
# Look for: even and odd features turned with one cos and one sin per pair, stacked back so that
#   neighbours stay neighbours, angles made from `positions` and not from x's own length.
# Weigh: broadcasting over heads and batches is half of the difficulty; a right rotation that
#   accepts only (L, K) is worth two of the four points when grading by hand.
# Common mistakes: the pairing (i, i + K / 2) of many checkpoints' code (Llama's among them): equal
#   up to a permutation of features, so it has all the properties and fits no weights trained with
#   the other; values turned as well (only queries and keys are); angles in bfloat16, which cannot
#   tell position 257 from 256.
