"""Lesson 01: what tells a right answer from a wrong one. The oracle is a loop over the formula."""

import itertools
import math

import torch
from torch import Tensor

from lessons.lesson01_positional_encoding.laboratory import (
    codes,
    pair_angles,
    turn,
    turned,
    turned_in_sequence,
    turned_unevenly,
)
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
    wrong,
)
from shared.exercises.properties import expect_device, expect_gradients, expect_new
from shared.exercises.seeds import fresh_generator

exercise_01_1 = checks_for(
    "01.1",
    name="sinusoidal_encoding",
    difficulty=2,
    minutes=15,
    hint=(
        "make the d_model / 2 frequencies 10000^(-2i / d_model) first, then one outer product "
        "with the positions gives all angles"
    ),
)


def random_int(low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=fresh_generator()))


@exercise_01_1.check("the formula's values")
def formula(sinusoidal_encoding) -> None:
    want = codes(range(7), 6)
    expect_close(
        sinusoidal_encoding(7, 6),
        want,
        what="sinusoidal_encoding(7, 6)",
        looks_like={
            "sine and cosine are swapped: even columns hold the sine, odd columns the cosine": (
                want.unflatten(1, (-1, 2)).flip(-1).flatten(1)
            ),
            "both columns of a pair hold the sine: the odd one holds the cosine": (
                want[:, 0::2].repeat_interleave(2, dim=1)
            ),
            "the first pair turns slowest: its frequency is 1, and the later ones are lower": codes(
                range(7), 6, rule=lambda p, column, dim: p / 10_000 ** (2 * (2 - column // 2) / dim)
            ),
            "the sines fill the first half and the cosines the second: they must alternate": (
                torch.cat([want[:, 0::2], want[:, 1::2]], dim=1)
            ),
            "the exponent is i / d_model; pair i needs 2i / d_model": codes(
                range(7), 6, rule=lambda p, column, dim: p / 10_000 ** (column // 2 / dim)
            ),
            "the exponent is 4i / d_model: a column's number is the formula's 2i already": codes(
                range(7), 6, rule=lambda p, column, dim: p / 10_000 ** (4 * (column // 2) / dim)
            ),
            "each column has its own exponent: a sine and the cosine beside it share one, 2i": (
                codes(range(7), 6, rule=lambda p, column, dim: p / 10_000 ** (column / dim))
            ),
            "the first row is position 1: positions start at 0": codes(range(1, 8), 6),
            "the frequencies end at 1/10000, as linspace makes them: pair i needs 2i / d_model": (
                codes(range(7), 6, rule=lambda p, column, dim: p / 10_000 ** (column // 2 / 2))
            ),
            "the position is multiplied by 10000^(2i / d_model) where it is divided": codes(
                range(7), 6, rule=lambda p, column, dim: p * 10_000 ** ((column - column % 2) / dim)
            ),
        },
    )


@exercise_01_1.check("other sizes")
def other_sizes(sinusoidal_encoding) -> None:
    for length, dim in ((1, 2), *((random_int(2, 40), 2 * random_int(1, 20)) for _ in range(3))):
        want, what = codes(range(length), dim), f"sinusoidal_encoding({length}, {dim})"
        expect_close(sinusoidal_encoding(length, dim), want, what=what)
    expect_new(sinusoidal_encoding, 7, 6, what="sinusoidal_encoding(7, 6)")
    expect_constant(sinusoidal_encoding(7, 6), what="sinusoidal_encoding(7, 6)")


def expect_constant(got: Tensor, what: str) -> None:
    """Nobody trains a formula."""
    expect(
        not got.requires_grad,
        mistake=f"{what} asks for a gradient: it is a constant, and nobody trains it",
        expected="a tensor with requires_grad=False",
        seen=f"a {type(got).__name__} with requires_grad=True",
    )


@exercise_01_1.check("precision at far positions")
def far_positions(sinusoidal_encoding) -> None:
    error = float((sinusoidal_encoding(5000, 64)[-1] - codes([4999], 64)[0]).abs().max())
    recognise(
        {
            "the angles were computed in float32, which has only seven digits for a number near "
            "5000": not error < 1e-5
        },
        expected="position 4999 within 1e-5 of the formula",
        seen=f"an error of {error:.0e}",
        hint="compute positions, frequencies and angles in float64, convert the result at the end",
    )
    want, last = codes([11_999], 4)[0], sinusoidal_encoding(12_000, 4)[-1]
    again = {"the codes begin again after 10000 positions, or end": codes([1999], 4)[0]}
    expect_close(last, want, what="position 11,999 at d_model 4", looks_like=again, atol=1e-5)


@exercise_01_1.check("d_model odd, or below 2")
def odd_width(sinusoidal_encoding) -> None:
    hint = "a sine without its cosine: refuse it before anything is computed"
    for dim, what in ((7, "an odd d_model (7)"), (0, "a d_model of 0")):
        expect_raises(ValueError, sinusoidal_encoding, 8, dim, what=what, mentions=[dim], hint=hint)


exercise_01_2 = checks_for(
    "01.2",
    name="PositionalEncoding",
    difficulty=2,
    minutes=15,
    hint=(
        'self.register_buffer("encoding", sinusoidal_encoding(max_len, d_model)) makes a tensor '
        "that belongs to the module without being trained"
    ),
)


def embeddings(*shape: int) -> Tensor:
    """Random vectors, as an embedding gives them."""
    return torch.randn(*shape, generator=fresh_generator())


@exercise_01_2.check("the sum")
def adds_codes(module_class) -> None:
    x, want = embeddings(3, 5, 6), codes(range(5), 6)
    expect_close(
        module_class(6, max_len=9).eval()(x),
        x + want,
        what="the output",
        looks_like={
            "the rows were chosen by the batch index: x is (batch, length, d_model), and the "
            "position is the second dimension": x + codes(range(3), 6)[:, None],
            "every position got the code of position 0": x + want[:1],
            "the rows are one position too far: the first word stands at start": (
                x + codes(range(1, 6), 6)
            ),
            "the encoding is taken off: it is to be added": x - want,
            "x was multiplied by sqrt(d_model): scaling is the embedding's business": (
                x * math.sqrt(6) + want
            ),
        },
    )


@exercise_01_2.check("start")
def continues(module_class) -> None:
    expect_start(module_class(6, max_len=9).eval())


def expect_start(module) -> None:
    x, last = embeddings(2, 3, 6), 0
    for start in (6, 2, 0):
        what, hint = f"start={start} with a length of 3 and max_len=9", "refuse with >, not >="
        got = accepted(module, x, start=start, what=what, hint=hint)
        expect_close(
            got,
            x + codes(range(start, start + 3), 6),
            what=f"the output with start={start}, training={module.training}",
            looks_like={
                "start is ignored: the rows are those of positions 0 to 2": x + codes(range(3), 6),
                "the rows of the call before are added again": x + codes(range(last, last + 3), 6),
                "the module remembers where the call before ended and goes on from there: "
                "positions come from start alone": x + codes(range(last + 3, last + 6), 6),
            },
        )
        last = start


@exercise_01_2.check("a constant that belongs to the module")
def is_a_buffer(module_class) -> None:
    module = module_class(6, max_len=9)
    num_parameters = sum(each.numel() for each in module.parameters())
    buffers = {name: tuple(each.shape) for name, each in module.named_buffers()}
    saved = list(module.state_dict())
    recognise(
        {
            "the encoding is a Parameter: the optimizer is handed a constant": num_parameters > 0,
            "the encoding is a plain attribute: .to(device) leaves it behind and state_dict() "
            "does not know it": not buffers,
            "the buffer is not persistent: a checkpoint would not hold it": (
                "encoding" in buffers and "encoding" not in saved
            ),
        },
        expected="one buffer, in state_dict(), and no parameters",
        seen=f"buffers {list(buffers)}, state_dict() with {saved}, {num_parameters} numbers in "
        "parameters()",
        hint="register_buffer, without persistent=False",
    )
    expect_equal(buffers, {"encoding": (9, 6)}, what="the names and shapes of the buffers")
    expect_equal(len(module_class(6).encoding), 5000, what="the number of rows by default")
    x, module.encoding = embeddings(2, 4, 6), torch.zeros(9, 6)
    expect_close(
        module.eval()(x),
        x,
        what="x plus a buffer that was set to 0",
        looks_like={"forward does not add the buffer, which .to() moves": x + codes(range(4), 6)},
    )


@exercise_01_2.check("dropout")
def drops(module_class) -> None:
    x = embeddings(8, 50, 16)
    module = module_class(16, max_len=60, dropout=0.2)
    places = codes(range(50), 16)
    total = x + places
    hint = "dropout acts in training only: nn.Dropout knows, F.dropout must be told"
    expect_close(module.eval()(x), total, what="the output in eval mode", hint=hint)
    got = module.train()(x)
    zero = got == 0
    share = zero.float().mean().item()
    recognise(
        {
            "dropout acts on x, before the encoding is added: it belongs on the sum": (
                bool((got == places).float().mean() > 0.1)
            ),
            "dropout acts on the encoding alone: it belongs on the sum": (
                bool((got == x).float().mean() > 0.1)
            ),
            "dropout does not reach the output: no value of the sum is zero": share == 0,
            "the rate is 0.5 whatever `dropout` says": 0.45 < share < 0.55,
            "all sentences lose the same values: each is to draw its own": (
                bool((zero == zero[:1]).all())
            ),
            "whole positions are dropped: each value is to be drawn": bool(zero.all(-1).any()),
        },
        expected="a fifth of the sum zero in training mode with dropout=0.2",
        seen=f"{100 * share:.0f} % zero",
        hint="apply it to the sum of x and encoding",
    )
    expect_close(got, torch.where(zero, got, total / 0.8), what="what dropout left of the sum")
    expect_start(module_class(6, max_len=9).train())  # only now: here a fixed rate has its words


@exercise_01_2.check("gradients")
def trains_embeddings(module_class) -> None:
    for training in (True, False):
        x = embeddings(2, 4, 6).requires_grad_()
        got = module_class(6, max_len=9).train(training)(x)
        what = f"the sum, training={training}"
        expect_gradients(got, x + codes(range(4), 6), {"x": x}, what=what)


@exercise_01_2.check("x's dtype")
def keeps_dtype(module_class) -> None:
    module, x, want = module_class(6, max_len=9), embeddings(2, 3, 6), codes(range(3), 6)
    expect_equal(
        module(x.bfloat16()).dtype,
        torch.bfloat16,
        what="the dtype of the output for x in bfloat16",
        mistake="bfloat16 plus float32 is float32: every layer after this one would run in float32",
        hint="convert the rows to x.dtype before the sum",
    )
    hint = "convert the rows, not the table"
    expect_close(module(x), x + want, what="the sum in float32 after one in bfloat16", hint=hint)
    large = 1e4 * x.double()
    expect_close(module(large), large + want, what="x in float64 plus its codes", atol=1e-5, rtol=0)


@exercise_01_2.check("a sequence longer than the encoding")
def too_long(module_class) -> None:
    module = module_class(6, max_len=9)
    hint = "compare before you slice, and name both lengths in the message"
    for length, start in ((12, 0), (5, 6), (1, 9)):
        x = torch.zeros(2, length, 6)
        what = f"length {length} from start={start} with max_len=9"
        mentions = [start + length, 9]
        expect_raises(ValueError, module, x, start=start, what=what, mentions=mentions, hint=hint)


exercise_01_3 = checks_for(
    "01.3",
    name="shift_matrix",
    difficulty=3,
    minutes=20,
    hint=(
        "sin(a + b) = sin a cos b + cos a sin b: with a for the position and b for the offset, "
        "the factors of sin a and cos a are a row of a 2 x 2 block"
    ),
)


@exercise_01_3.check("a shift by 3")
def shift_by_three(shift_matrix) -> None:
    angles, here = pair_angles(3, 6), codes([4], 6)[0]
    matrix, right = shift_matrix(3, 6), turn(angles).float()
    expect_equal(matrix.dtype, torch.float32, what="the dtype of shift_matrix(3, 6)")
    expect_close(
        matrix @ here,
        codes([7], 6)[0],
        what="shift_matrix(3, 6) @ PE(4), which is PE(7)",
        looks_like={
            "the matrix moves backwards, from PE(4) to PE(1): it is the transpose": (
                codes([1], 6)[0]
            ),
            "the blocks are built for sines in the first half and cosines in the second; in 01.1 "
            "they alternate": turn(angles, halves=True).float() @ here,
            "both sines of a block have a plus: a turn has one minus": (
                (right.triu() + right.triu(1).T) @ here
            ),
            "the exponent is i / d_model; pair i needs 2i / d_model": (
                turn([3 / 10_000 ** (i / 6) for i in range(3)]).float() @ here
            ),
            "the exponent is 4i / d_model: a column's number is the formula's 2i already": (
                turn([3 / 10_000 ** (4 * i / 6) for i in range(3)]).float() @ here
            ),
            "every pair turns by the same angle: pair i turns by offset / 10000^(2i / d_model)": (
                turn([3.0] * 3).float() @ here
            ),
            "the blocks hold 1 and the angle, which turns by small angles only: cos and sin": (
                torch.block_diag(*(torch.tensor([[1, b], [-b, 1]]) for b in angles)).float() @ here
            ),
            "the angle is 1 / 10000^(2i / d_model) for every offset: multiply it by the offset": (
                turn(pair_angles(1, 6)).float() @ here
            ),
        },
    )


@exercise_01_3.check("any position, any offset, forwards and back")
def any_shift(shift_matrix) -> None:
    hint = "a matrix that is fitted to some positions is right for them alone: build it from angles"
    still = torch.eye(16)
    expect_close(shift_matrix(0, 16), still, what="shift_matrix(0, 16), no shift", hint=hint)
    for sign in (0, 1, -1):
        dim, offset, first = 2 * random_int(1, 20), sign * random_int(1, 60), random_int(60, 200)
        expect_close(
            codes(range(first, first + 5), dim) @ shift_matrix(offset, dim).T,
            codes(range(first + offset, first + offset + 5), dim),
            what=f"five codes shifted by {offset} at d_model {dim}",
            looks_like={
                "a negative offset moves forwards, as if it were positive": (
                    codes(range(first - offset, first - offset + 5), dim)
                )
            },
            atol=1e-4,
        )
    far, hint = turn(pair_angles(4999, 64)).float(), "angles in float64, straight from the offset"
    expect_close(shift_matrix(4999, 64), far, what="shift_matrix(4999, 64)", hint=hint)
    expect_new(shift_matrix, 3, 6, what="shift_matrix(3, 6)")
    expect_constant(shift_matrix(3, 6), what="shift_matrix(3, 6)")


@exercise_01_3.check("d_model odd, or below 2")
def odd_shift(shift_matrix) -> None:
    for dim, what in ((5, "an odd d_model (5)"), (0, "a d_model of 0")):
        expect_raises(ValueError, shift_matrix, 2, dim, what=what, mentions=[dim])


exercise_01_4 = checks_for(
    "01.4",
    name="rotary",
    difficulty=4,
    minutes=25,
    hint=(
        "split x into its even and odd features, x[..., 0::2] and x[..., 1::2]; angles are "
        "positions[..., None] * frequencies"
    ),
)


@exercise_01_4.check("pairs turned by their position")
def turns_pairs(rotary) -> None:
    x, positions = embeddings(4, 6), [2, 5, 0, 9]
    want = turned(x, positions)
    expect_close(
        rotary(x, torch.tensor(positions)),
        want,
        what="the turned rows",
        looks_like={
            "the pairs are (i, i + K / 2), as in GPT-NeoX; here a pair is two neighbours": (
                turned(x, positions, halves=True)
            ),
            "the pairs turn the other way: check the two signs": (
                turned(x, positions, backwards=True)
            ),
            "the rows were turned by 0, 1, 2, 3: use the positions that are given": (
                turned(x, range(4))
            ),
            "the rows were turned by one position more than given": (
                turned(x, [p + 1 for p in positions])
            ),
            "positions are counted from the first that is given: each is a place in the text": (
                turned(x, [p - positions[0] for p in positions])
            ),
            "the turned pairs were put together half after half: neighbours must stay neighbours": (
                torch.cat([want[:, 0::2], want[:, 1::2]], dim=1)
            ),
            "the code of the position was added; rotary turns and adds nothing": (
                x + codes(positions, 6)
            ),
            "the second feature is computed from the first one already turned: keep the old": (
                turned_in_sequence(x, positions)
            ),
            "the angles lie as for pairs (i, i + K / 2), the features as neighbours: the two of a "
            "pair must share one angle": turned_unevenly(x, positions),
            "the exponent is 4i / head_dim: pair i turns by p / 10000^(2i / head_dim)": (
                turned(x, positions, base=10_000**2)
            ),
            "the exponent is i / head_dim: pair i turns by p / 10000^(2i / head_dim)": (
                turned(x, positions, base=100)
            ),
        },
    )
    expect_close(
        rotary(x, torch.tensor(positions[::-1])),
        turned(x, positions[::-1]),
        what="the rows turned by other positions than those of the call before",
    )


@exercise_01_4.check("dot products that know the distance alone")
def relative(rotary) -> None:
    # No feature is near zero, so that a pair that turns wrongly is seen.
    word = 1 + torch.rand(1, 64, generator=fresh_generator(), dtype=torch.float64)
    first, distance = random_int(0, 50), random_int(1, 50)

    def score(shift: int) -> Tensor:
        at = torch.tensor([first + shift])
        return (rotary(word, at) * rotary(word, at + distance)).sum()

    near = score(0)
    change = max(float((score(shift) - near).abs()) for shift in (1000, 2345, 4999))
    rounded = float((rotary(word, torch.tensor([0])) - word).abs().max())
    recognise(
        {
            "the score depends on where the two words stand, not on their distance alone: each "
            "pair turns at one rate, by an angle proportional to its position": change > 0.1,
            "x was turned in float32: a float64 x keeps all its digits": (
                change > 1e-8 and rounded > 1e-8
            ),
            "the angles were computed in float32, whose seven digits go into the position: "
            "positions and frequencies in float64, whatever x is": not change < 1e-8,
        },
        expected="the same score, to 1e-8, when both words move by thousands of positions "
        "(x is float64)",
        seen=f"a change of {change:.1g}",
    )
    still = float(rotary(word, torch.tensor([first])).square().sum())
    expect(
        abs(float(near) - still) > 0.1,
        expected=f"a score that the distance of {distance} changes, from {still:.4g} at 0",
        seen=f"{float(near):.4g}",
    )


@exercise_01_4.check("heads and batches")
def broadcasts(rotary) -> None:
    shapes = {
        "one position a row, (L,)": (5,),
        "positions of each sentence, (B, 1, L)": (2, 1, 5),
        "one position a head, (H, 1)": (3, 1),
    }
    for (what, shape), K in itertools.product(shapes.items(), (4, 2)):
        x = embeddings(2, 3, 5, K)
        positions = torch.randint(50, shape, generator=fresh_generator())
        rows = positions.expand(2, 3, 5).flatten().tolist()
        want, first = turned(x.reshape(-1, K), rows).view_as(x), positions.expand(2, 3, 5)[0, 0]
        expect_close(
            broadcast(rotary, x, positions, f"positions of shape {shape} with x of {(*x.shape,)}"),
            want,
            what=f"(B, H, L, {K}) with {what}",
            looks_like={
                "all sentences are turned by the positions of the first": turned(x, first.tolist())
            },
        )


def broadcast(rotary, x: Tensor, positions: Tensor, what: str) -> Tensor:
    """The turned x; an answer that one row of positions suited must take more of them as well."""
    try:
        return rotary(x, positions)
    except (RuntimeError, IndexError) as error:
        if positions.dim() == 1:
            raise
        wrong(
            "positions of more than one dim are refused: outer and a view suit a single row",
            expected=f"{what}, broadcast",
            seen=f"{type(error).__name__}: {error}",
            hint="positions[..., None] * frequencies keeps every dim of positions",
        )


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
    far, at = x.float(), [100_000, 54_321]
    far_error = float((rotary(far, torch.tensor(at)) - turned(far, at)).abs().max())
    recognise(
        {
            "the angles were computed in x's dtype: bfloat16 takes position 1001 for 1000": (
                not error < 0.05
            ),
            "the angles were computed in float32: at position 100,000 two digits are left": (
                not far_error < 1e-4
            ),
        },
        expected="errors below 0.05 at position 1001 in bfloat16, 1e-4 at 100,000 in float32",
        seen=f"errors of {error:.2g} and {far_error:.2g}",
        hint="compute angles, cosine and sine in float64 whatever x is",
    )


@exercise_01_4.check("odd head_dim")
def odd_head(rotary) -> None:
    x, positions = torch.zeros(2, 5), torch.arange(2)
    expect_raises(ValueError, rotary, x, positions, what="an odd head_dim (5)", mentions=[5])


@exercise_01_4.check("gradients, and x's device")
def carries_gradients(rotary) -> None:
    x, positions = embeddings(4, 6).requires_grad_(), torch.arange(4)
    expect_gradients(rotary(x, positions), turned(x, range(4)), {"x": x}, what="the turned rows")
    expect_device(rotary, x, positions, what="rotary")
