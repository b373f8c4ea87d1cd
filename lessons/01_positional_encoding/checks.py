"""Lesson 01: what tells a right answer from a wrong one. Oracles: loops over the formulas."""

import math

import torch
from torch import Tensor

from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, expect_raises
from shared.exercises.seeds import fresh_generator


def angle(position: float, i: int, dim: int) -> float:
    """The angle of pair i at a position, by the formula."""
    return position / 10_000 ** (2 * i / dim)


def code(position: float, dim: int) -> list[float]:
    """PE(position), one number after the other."""
    pairs = (angle(position, i, dim) for i in range(dim // 2))
    return [value for a in pairs for value in (math.sin(a), math.cos(a))]


def codes(positions: range, dim: int) -> Tensor:
    """The codes of several positions, one a row, float32."""
    return torch.tensor([code(p, dim) for p in positions], dtype=torch.float64).float()


def from_angles(max_len: int, dim: int, rule) -> Tensor:
    """A table like the encoding whose columns follow another rule(position, column)."""
    rows = [[rule(p, column) for column in range(dim)] for p in range(max_len)]
    return torch.tensor(rows, dtype=torch.float64).float()


def sine_or_cosine(column: int):
    return math.cos if column % 2 else math.sin


def random_int(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


# 01.1 ---------------------------------------------------------------------------------------

exercise_01_1 = checks_for(
    "01.1",
    name="sinusoidal_encoding",
    difficulty=2,
    minutes=15,
    hints=[
        "make the d_model / 2 frequencies 10000^(-2i / d_model) first, then one outer product "
        "with the positions gives all angles",
        "torch.stack([sin, cos], dim=-1).flatten(1) interleaves the two",
    ],
)


@exercise_01_1.check("the formula's values")
def formula(sinusoidal_encoding) -> None:
    length, dim = 7, 6
    want = codes(range(length), dim)
    halves = torch.cat([want[:, 0::2], want[:, 1::2]], dim=1)

    def with_exponent(exponent) -> Tensor:
        return from_angles(
            length, dim, lambda p, c: sine_or_cosine(c)(p / 10_000 ** (exponent(c) / dim))
        )

    expect_close(
        sinusoidal_encoding(length, dim),
        want,
        what="sinusoidal_encoding(7, 6)",
        looks_like={
            "sine and cosine are swapped: even columns hold the sine, odd columns the cosine": (
                want.unflatten(1, (-1, 2)).flip(-1).flatten(1)
            ),
            "the sines fill the first half and the cosines the second: they must alternate": halves,
            "the exponent is i / d_model; pair i needs 2i / d_model": with_exponent(
                lambda c: c // 2
            ),
            "each column has its own exponent: a sine and the cosine beside it share one, 2i": (
                with_exponent(lambda c: c)
            ),
            "the first row is position 1: positions start at 0": codes(range(1, length + 1), dim),
            "the position is multiplied by 10000^(2i / d_model) where it is divided": from_angles(
                length,
                dim,
                lambda p, c: sine_or_cosine(c)(p * 10_000 ** ((c - c % 2) / dim)),
            ),
        },
    )


@exercise_01_1.check("other sizes")
def other_sizes(sinusoidal_encoding) -> None:
    generator = fresh_generator()
    for _ in range(3):
        length, dim = random_int(1, 40, generator), 2 * random_int(1, 20, generator)
        expect_close(
            sinusoidal_encoding(length, dim),
            codes(range(length), dim),
            what=f"sinusoidal_encoding({length}, {dim})",
        )


@exercise_01_1.check("precision at far positions")
def far_positions(sinusoidal_encoding) -> None:
    want = codes(range(4999, 5000), 64)
    error = float((sinusoidal_encoding(5000, 64)[-1:] - want).abs().max())
    expect(
        error < 1e-5,
        mistake="the angles were computed in float32, which has only seven digits for a number "
        "near 5000",
        expected="position 4999 within 1e-5 of the formula",
        seen=f"an error of {error:.0e}",
        hint="compute positions, frequencies and angles in float64, convert the result at the end",
    )


@exercise_01_1.check("odd d_model")
def odd_width(sinusoidal_encoding) -> None:
    expect_raises(
        ValueError,
        sinusoidal_encoding,
        8,
        7,
        what="an odd d_model (7)",
        mentions=[7],
        hint="a sine without its cosine: refuse it before anything is computed",
    )


# 01.2 ---------------------------------------------------------------------------------------

exercise_01_2 = checks_for(
    "01.2",
    name="PositionalEncoding",
    difficulty=2,
    minutes=15,
    hints=[
        'self.register_buffer("encoding", sinusoidal_encoding(max_len, d_model)) makes a tensor '
        "that belongs to the module without being trained",
        "compare start + x.shape[1] with max_len before you slice",
    ],
)


@exercise_01_2.check("the sum")
def adds_codes(module_class) -> None:
    generator = fresh_generator()
    x = torch.randn(3, 5, 6, generator=generator)
    before = x.clone()
    got = module_class(6, max_len=9).eval()(x)
    expect(
        torch.equal(x, before),
        mistake="x was changed in place: the caller's embeddings are overwritten",
        expected="x as it was",
        seen="other values in x after the call",
        hint="x + rows makes a new tensor, x += rows does not",
    )
    want = codes(range(5), 6)
    expect_close(
        got,
        x + want,
        what="the output",
        looks_like={
            "the rows were chosen by the batch index: x is (batch, length, d_model), and the "
            "position is the second dimension": x + codes(range(3), 6)[:, None],
            "every position got the code of position 0": x + want[:1],
            "x was multiplied by sqrt(d_model): scaling is the embedding's business": (
                x * math.sqrt(6) + want
            ),
        },
    )


@exercise_01_2.check("start")
def continues(module_class) -> None:
    x = torch.randn(2, 4, 6, generator=fresh_generator())
    expect_close(
        module_class(6, max_len=9).eval()(x, start=5),
        x + codes(range(5, 9), 6),
        what="the output with start=5",
        looks_like={
            "start is ignored: the rows are those of positions 0 to 3": x + codes(range(4), 6)
        },
    )


@exercise_01_2.check("a constant that belongs to the module")
def is_a_buffer(module_class) -> None:
    module = module_class(6, max_len=9)
    parameters = sum(each.numel() for each in module.parameters())
    expect(
        parameters == 0,
        mistake="the encoding is a Parameter: the optimizer is handed a constant",
        expected="no parameters",
        seen=f"{parameters} numbers in parameters()",
        hint="register_buffer",
    )
    buffers = {name: tuple(each.shape) for name, each in module.named_buffers()}
    expect(
        bool(buffers),
        mistake="the encoding is a plain attribute: .to(device) leaves it behind and state_dict() "
        "does not know it",
        expected="a buffer",
        seen="no buffers",
        hint="register_buffer",
    )
    expect_equal(buffers, {"encoding": (9, 6)}, what="the names and shapes of the buffers")
    expect(
        "encoding" in module.state_dict(),
        mistake="the buffer is not persistent: a checkpoint would not hold it",
        expected="'encoding' in state_dict()",
        seen=f"{list(module.state_dict())}",
        hint="leave out persistent=False",
    )


@exercise_01_2.check("dropout")
def drops(module_class) -> None:
    x = torch.randn(4, 50, 6, generator=fresh_generator())
    module = module_class(6, max_len=60, dropout=0.5)
    total = x + codes(range(50), 6)
    expect_close(
        module.eval()(x),
        total,
        what="the output in eval mode",
        hint="dropout acts in training only: nn.Dropout knows, F.dropout must be told",
    )
    got = module.train()(x)
    share = float((got == 0).float().mean())
    expect(
        0.4 < share < 0.6,
        mistake="" if share else "dropout does not reach the output: no value of the sum is zero",
        expected="about half of the sum zero in training mode with dropout=0.5",
        seen=f"{100 * share:.0f} % zero",
        hint="apply it to the sum of x and encoding",
    )
    expect_close(got, torch.where(got == 0, got, 2 * total), what="what dropout left of the sum")


@exercise_01_2.check("x's dtype")
def keeps_dtype(module_class) -> None:
    x = torch.randn(2, 3, 6, generator=fresh_generator()).bfloat16()
    expect_equal(
        module_class(6, max_len=9)(x).dtype,
        torch.bfloat16,
        what="the dtype of the output for x in bfloat16",
        mistake="bfloat16 plus float32 is float32: every layer after this one would run in float32",
        hint="convert the rows to x.dtype before the sum",
    )


@exercise_01_2.check("a sequence longer than the encoding")
def too_long(module_class) -> None:
    module = module_class(6, max_len=9)
    hint = "compare before you slice, and name both lengths in the message"
    for length, start in ((12, 0), (5, 6), (1, 9)):
        x = torch.zeros(2, length, 6)
        what = f"length {length} from start={start} with max_len=9"
        mentions = [start + length, 9]
        expect_raises(ValueError, module, x, start=start, what=what, mentions=mentions, hint=hint)


# 01.3 ---------------------------------------------------------------------------------------


def turn(angles: list[float], *, halves: bool = False) -> Tensor:
    """A matrix that turns each pair (sin, cos) by its angle; pairs side by side or in halves."""
    n = len(angles)
    matrix = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    for i, a in enumerate(angles):
        s, c = (i, n + i) if halves else (2 * i, 2 * i + 1)
        matrix[s, s] = matrix[c, c] = math.cos(a)
        matrix[s, c], matrix[c, s] = math.sin(a), -math.sin(a)
    return matrix.float()


exercise_01_3 = checks_for(
    "01.3",
    name="shift_matrix",
    difficulty=3,
    minutes=20,
    hints=[
        "sin(a + b) = sin a cos b + cos a sin b: with a for the position and b for the offset, "
        "the factors of sin a and cos a are a row of a 2 x 2 block",
        "one block a pair, on the diagonal; b = offset / 10000^(2i / d_model)",
    ],
)


@exercise_01_3.check("a shift by 3")
def shift_by_three(shift_matrix) -> None:
    offset, dim, position = 3, 6, 4
    angles = [angle(offset, i, dim) for i in range(dim // 2)]
    here = codes(range(position, position + 1), dim)[0]
    matrix = shift_matrix(offset, dim)
    expect_equal(tuple(matrix.shape), (dim, dim), what="the shape of shift_matrix(3, 6)")
    wrong_turns = {
        "the blocks are built for sines in the first half and cosines in the second; in 01.1 "
        "they alternate": turn(angles, halves=True),
        "both sines of a block have a plus: a turn has one minus": torch.block_diag(
            *[
                torch.tensor([[math.cos(a), math.sin(a)], [math.sin(a), math.cos(a)]])
                for a in angles
            ]
        ),
        "every pair turns by the same angle: pair i turns by offset / 10000^(2i / d_model)": turn(
            [float(offset)] * (dim // 2)
        ),
        "the angle is 1 / 10000^(2i / d_model) for every offset: multiply it by the offset": turn(
            [a / offset for a in angles]
        ),
    }
    expect_close(
        matrix.to(here.dtype) @ here,
        codes(range(position + offset, position + offset + 1), dim)[0],
        what="shift_matrix(3, 6) @ PE(4), which is PE(7)",
        looks_like={
            "the matrix moves backwards, from PE(4) to PE(1): it is the transpose": codes(
                range(1, 2), dim
            )[0],
            **{words: matrix @ here for words, matrix in wrong_turns.items()},
        },
    )


@exercise_01_3.check("any position, any offset, forwards and back")
def any_shift(shift_matrix) -> None:
    generator = fresh_generator()
    for sign in (1, -1, 1):
        dim, offset = 2 * random_int(1, 20, generator), sign * random_int(1, 60, generator)
        first = random_int(60, 200, generator)
        matrix = shift_matrix(offset, dim)
        expect_close(
            codes(range(first, first + 5), dim) @ matrix.T,
            codes(range(first + offset, first + offset + 5), dim),
            what=f"five codes shifted by {offset} at d_model {dim}",
            atol=1e-4,
        )


@exercise_01_3.check("one matrix for all positions: a rotation")
def is_a_rotation(shift_matrix) -> None:
    expect_close(shift_matrix(0, 8), torch.eye(8), what="shift_matrix(0, 8)")
    product = shift_matrix(5, 8) @ shift_matrix(7, 8)
    expect_close(product, shift_matrix(12, 8), what="a shift by 7, then by 5", atol=1e-5)
    matrix = shift_matrix(5, 8)
    expect_close(
        matrix.T @ matrix,
        torch.eye(8),
        what="M^T M for a shift by 5",
        hint="a turn keeps lengths, so its inverse is its transpose",
    )


@exercise_01_3.check("odd d_model")
def odd_shift(shift_matrix) -> None:
    expect_raises(ValueError, shift_matrix, 2, 5, what="an odd d_model (5)", mentions=[5])


# 01.4 ---------------------------------------------------------------------------------------


def turned(x: Tensor, positions: list[float], *, halves: bool = False, sign: int = 1) -> Tensor:
    """Rotary embedding of x (L, K) row by row, in float64, by the 2 x 2 matrices of `turn`."""
    dim = x.shape[-1]
    rows = []
    for row, position in zip(x, positions, strict=True):
        angles = [sign * angle(position, i, dim) for i in range(dim // 2)]
        rows.append(row.double() @ turn(angles, halves=halves).double())
    return torch.stack(rows).to(x.dtype)


exercise_01_4 = checks_for(
    "01.4",
    name="rotary",
    difficulty=4,
    minutes=25,
    hints=[
        "split x into its even and odd features, x[..., 0::2] and x[..., 1::2]; angles are "
        "positions[..., None] * frequencies",
        "(a, b) turned by t is (a cos t - b sin t, a sin t + b cos t); stack and flatten the pairs",
    ],
)


@exercise_01_4.check("pairs turned by their position")
def turns_pairs(rotary) -> None:
    x = torch.randn(4, 6, generator=fresh_generator())
    positions = [2, 5, 0, 9]
    before = x.clone()
    got = rotary(x, torch.tensor(positions))
    expect(
        torch.equal(x, before),
        mistake="x was changed in place: the caller's queries are overwritten",
        expected="x as it was",
        seen="other values in x after the call",
        hint="compute both new features of a pair from the old ones, then stack them",
    )
    want = turned(x, positions)
    expect_close(
        got,
        want,
        what="the turned rows",
        looks_like={
            "the pairs are (i, i + K / 2), as in Llama's code; here a pair is two neighbours": (
                turned(x, positions, halves=True)
            ),
            "the pairs turn the other way: check the two signs": turned(x, positions, sign=-1),
            "the rows were turned by 0, 1, 2, 3: use the positions that are given": turned(
                x, list(range(4))
            ),
            "the turned pairs were put together half after half: neighbours must stay neighbours": (
                torch.cat([want[:, 0::2], want[:, 1::2]], dim=1)
            ),
            "the code of the position was added; rotary turns and adds nothing": x
            + torch.tensor([code(p, 6) for p in positions]),
        },
    )


@exercise_01_4.check("dot products that know the distance alone")
def relative(rotary) -> None:
    generator = fresh_generator()
    word = 1 + torch.rand(1, 64, generator=generator, dtype=torch.float64)  # no pair is short
    first, distance = random_int(0, 50, generator), random_int(1, 50, generator)

    def score(shift: int) -> Tensor:
        at = torch.tensor([first + shift])
        return (rotary(word, at) * rotary(word, at + distance)).sum()

    near = score(0)
    change = max(float((score(shift) - near).abs()) for shift in (1000, 2345, 4999))
    far_off = change > 0.1
    expect(
        change < 1e-8,
        mistake="the score depends on where the two words stand, not on their distance alone"
        if far_off
        else "the angles were computed in float32, whose seven digits go into the position",
        expected="the same score, to 1e-8, when both words move by thousands of positions "
        "(x is float64)",
        seen=f"a change of {change:.1g}",
        hint="each pair turns at one rate, by an angle proportional to its position"
        if far_off
        else "positions and frequencies in float64, whatever x is",
    )
    want = (word * turned(word, [distance])).sum()
    expect_close(near, want, what="the score of two words at that distance", atol=1e-4)


@exercise_01_4.check("heads and batches")
def broadcasts(rotary) -> None:
    generator = fresh_generator()
    x = torch.randn(2, 3, 5, 4, generator=generator)
    positions = [3, 1, 4, 1, 5]
    want = torch.stack([torch.stack([turned(head, positions) for head in b]) for b in x])
    got = rotary(x, torch.tensor(positions))
    expect_close(got, want, what="(B, H, L, K) with one position a row, (L,)")
    each = [positions, [0, 1, 2, 3, 4]]
    want = torch.stack(
        [torch.stack([turned(head, p) for head in b]) for b, p in zip(x, each, strict=True)]
    )
    got = rotary(x, torch.tensor(each)[:, None])
    expect_close(got, want, what="(B, H, L, K) with positions of each sentence, (B, 1, L)")


@exercise_01_4.check("x's dtype, and angles that stay exact")
def rotary_dtype(rotary) -> None:
    x = 1 + torch.rand(2, 8, generator=fresh_generator()).bfloat16()  # no pair is short
    positions = [1000, 1001]
    got = rotary(x, torch.tensor(positions))
    expect_equal(
        got.dtype,
        torch.bfloat16,
        what="the dtype of the result for x in bfloat16",
        mistake="the result is no longer in x's dtype",
        hint="end with .to(x.dtype)",
    )
    error = float((got.float() - turned(x.float(), positions)).abs().max())
    expect(
        error < 0.05,
        mistake="the angles were computed in x's dtype: bfloat16 takes position 1001 for 1000",
        expected="positions 1000 and 1001 in bfloat16 within 0.05 of the formula",
        seen=f"an error of {error:.2g}",
        hint="compute angles, cosine and sine in float64 whatever x is",
    )


@exercise_01_4.check("odd head_dim")
def odd_head(rotary) -> None:
    expect_raises(
        ValueError,
        rotary,
        torch.zeros(2, 5),
        torch.arange(2),
        what="an odd head_dim (5)",
        mentions=[5],
    )
