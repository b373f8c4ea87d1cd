"""Lesson 17: what tells a right answer from a wrong one.

The oracle is softmax in one piece, or torch's own attention, in one process. Sizes of tensors,
FLOPs and messages are counted below Python.
"""

import itertools

import torch
import torch.nn.functional as F

from lessons.lesson17_long_context import laboratory as lab
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    alike,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
    wrong,
)
from shared.exercises.on_ranks import on_ranks
from shared.exercises.seeds import fresh_generator

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
ENGINE = ("torch.nn.functional.scaled_dot_product_attention",)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def expect_pair(got, names, what):
    """A tuple of tensors of that many."""
    expect(
        isinstance(got, tuple | list) and len(got) == len(names),
        expected=f"{what} returns {', '.join(names)}",
        seen=f"{type(got).__name__}" + (f" of {len(got)}" if isinstance(got, tuple | list) else ""),
    )
    return got


def is_nan(*tensors) -> bool:
    """Whether any number is none."""
    return any(isinstance(x, torch.Tensor) and bool(x.isnan().any()) for x in tensors)


# 17.1

exercise_17_1 = checks_for(
    "17.1",
    name="online_softmax",
    difficulty=3,
    minutes=25,
    hint=(
        "Keep three things a query: the highest score so far, the sum of exp(score - highest), and "
        "the sum of exp(score - highest) * value. If a tile brings a higher score, multiply both "
        "sums by exp(old highest - new highest) before you add to them."
    ),
    forbidden=ENGINE,
)

OVERFLOW = "exp of a large score overflows: the highest score is not subtracted first"
UNDERFLOW = "exp of a low score is 0: the highest score so far begins at a number, not at -inf"
ONE_HIGHEST = "all queries share one highest score: beside it, lower rows vanish"
UNSEEN = "-inf less -inf: a tile, or a row, in which every key is hidden gives no number"


def tiles_of(keys, batch=(), queries=3, d=4, dtype=F64, shift=0.0):
    """Random tiles of so many keys; `shift` raises each tile's scores above those before."""
    make = fresh_generator()
    tiles = []
    for number, n in enumerate(keys):
        scores = torch.randn(*batch, queries, n, generator=make, dtype=F64) * 3 + shift * number
        values = torch.randn(*batch, n, d, generator=make, dtype=F64)
        tiles.append((scores.to(dtype), values.to(dtype)))
    return tiles


def whole(tiles):
    """Output and logsumexp over all tiles at once."""
    scores = torch.cat([s for s, _ in tiles], -1).double()
    values = torch.cat([v for _, v in tiles], -2).double()
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0).unsqueeze(-1)).exp()
    return weights @ values, logsumexp


def mistaken(tiles):
    """What mistakes make of tiles without a hidden key: outputs, logsumexps."""
    tops = [s.amax(-1, keepdim=True) for s, _ in tiles]
    tops = list(torch.stack(tops).cummax(0).values)  # the highest so far
    last = tops[-1]
    sums = [(s - t).exp().sum(-1, keepdim=True) for (s, _), t in zip(tiles, tops, strict=True)]
    parts = [(s - t).exp() @ v for (s, v), t in zip(tiles, tops, strict=True)]
    high = torch.stack(tops).amax(0)
    shrink = [(t - high).exp() for t in tops]
    right = sum(n * k for n, k in zip(sums, shrink, strict=True))
    scaled = sum(p * k for p, k in zip(parts, shrink, strict=True))
    total = sum(sums)
    means = [p / n for p, n in zip(parts, sums, strict=True)]
    outputs = {
        "each tile's softmax is averaged, whatever its share of the whole": sum(means) / len(means),
        "nothing is rescaled when a tile brings a higher score": sum(parts) / total,
        "the sum is rescaled and the output is not": sum(parts) / right,
        "the output is rescaled and the sum is not": scaled / total,
        "the output is a sum: it is never divided by the weights' sum": scaled,
        "only the last tile counts": means[-1],
    }
    logs = {
        "the logsumexp lacks the highest score, relative to which the sum was taken": right.log(),
        "the logsumexp is that of the last tile alone": sums[-1].log() + last,
        "the sum itself is returned, not its logarithm": right,
        "the highest score is returned in place of the logsumexp": high,
    }
    return outputs, {words: x.squeeze(-1) for words, x in logs.items()}


@exercise_17_1.check("values over tiles, ascending and descending, in several shapes")
def online_values(online_softmax) -> None:
    cases = [
        tiles_of([5]),
        tiles_of([4, 3, 6], shift=4.0),
        tiles_of([1, 7], (2,), shift=-5.0),
        tiles_of([3, 3, 1], (2, 3), queries=1),
        tiles_of([64, 64, 9], dtype=F32),
    ]
    for tiles in cases:
        output, logsumexp = whole(tiles)
        got = expect_pair(online_softmax(list(tiles)), ("output", "logsumexp"), "online_softmax")
        wrongs = mistaken([(s.double(), v.double()) for s, v in tiles])
        sizes = [s.shape[-1] for s, _ in tiles]
        dtype = tiles[0][0].dtype
        what = f"the output over tiles of {sizes} keys"
        expect_close(got[0], output.to(dtype), what=what, looks_like=wrongs[0])
        expect_close(got[1], logsumexp.to(dtype), what="the logsumexp", looks_like=wrongs[1])


@exercise_17_1.check("large scores and hidden keys")
def online_edges(online_softmax) -> None:
    large = [(s + 1000, v) for s, v in tiles_of([3, 4])]
    got = expect_pair(online_softmax(list(large)), ("output", "logsumexp"), "online_softmax")
    infinite = not all(bool(torch.isfinite(x).all()) for x in got)
    recognise({OVERFLOW: infinite}, expected="scores of 1000 give numbers", seen="inf or nan")
    for each, want in zip(got, whole(large), strict=True):
        expect_close(each, want, what="output and logsumexp at scores of 1000")
    low = [(s - 1000, v) for s, v in tiles_of([3, 4])]
    got = expect_pair(online_softmax(list(low)), ("output", "logsumexp"), "online_softmax")
    gone = is_nan(*got) or bool((got[0] == 0).all())
    recognise({UNDERFLOW: gone}, expected="scores of -1000 give numbers", seen="0 or nan")
    for each, want in zip(got, whole(low), strict=True):
        expect_close(each, want, what="output and logsumexp at scores of -1000")
    apart = torch.tensor([[1000.0], [0.0], [-1000.0]], dtype=F64)
    mixed = [(s + apart, v) for s, v in tiles_of([3, 4])]
    got = expect_pair(online_softmax(list(mixed)), ("output", "logsumexp"), "online_softmax")
    gone = is_nan(*got) or bool((got[0][2] == 0).all())
    recognise({ONE_HIGHEST: gone}, expected="numbers for a query at -1000", seen="0 or nan")
    for each, want in zip(got, whole(mixed), strict=True):
        expect_close(each, want, what="output and logsumexp of queries at 1000, 0 and -1000")
    for hidden in ((0,), (1,), (0, 1), (0, 1, 2)):
        tiles = tiles_of([3, 2, 4])
        for number in hidden:
            tiles[number][0][1] = -torch.inf  # the second query sees nothing of this tile
        got = expect_pair(online_softmax(list(tiles)), ("output", "logsumexp"), "online_softmax")
        what = f"a query that sees no key of the tiles {[n + 1 for n in hidden]} of 3"
        recognise({UNSEEN: is_nan(*got)}, expected=f"numbers for {what}", seen="nan")
        output, logsumexp = whole(tiles)
        expect_close(got[0], output, what=f"the output of {what}")
        expect_close(got[1], logsumexp, what=f"the logsumexp of {what}")


@exercise_17_1.check("one tile at a time")
def online_memory(online_softmax) -> None:
    tiles, alive = tiles_of([2] * 6), list[int]()
    want = whole(tiles)
    got = online_softmax(lab.handed_out(list(tiles), alive))
    del tiles
    expect_close(got[0], want[0], what="the output over tiles that come from a generator")
    tiles, alive = tiles_of([2] * 6), list[int]()
    stream = lab.handed_out(tiles, alive)
    online_softmax(stream)
    recognise(
        {
            "all tiles are collected first: then the whole row is in memory after all": (
                max(alive) > 2
            )
        },
        expected="at most two tiles' scores alive when the next one is asked for",
        seen=f"{max(alive)} of 6",
        hint="use a tile in the loop that takes it from the iterable",
    )
    expect_raises(ValueError, online_softmax, [], what="no tile at all")


# 17.2

exercise_17_2 = checks_for(
    "17.2",
    name="tiled_forward",
    difficulty=3,
    minutes=30,
    hint=(
        "For each tile of queries a generator of (scores, values) for its tiles of keys, handed to "
        "online_softmax; join the results with torch.cat. With is_causal the generator ends where "
        "the first key of a tile lies after the last query."
    ),
    forbidden=ENGINE,
)

LATER_THAN = "the positions are counted inside of the tile: each tile is masked as if it came first"
STRIP = (
    "a tile of queries meets all keys at once: such a strip grows with the length, as does the "
    "time until it is read again"
)
SQUARE = "all scores exist at once: the L x L that tiles are to avoid"


def attended(queries, keys, d=8, batch=(2, 3), dtype=F64):
    """Random q, k, v."""
    make = fresh_generator()
    shapes = [(*batch, n, d) for n in (queries, keys, keys)]
    return [torch.randn(*shape, generator=make, dtype=F64).to(dtype) for shape in shapes]


def causal_from(queries, keys, shift=0):
    """True where key <= query + shift."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(shift)


def mistaken_attention(q, k, v, is_causal, tile):
    """Outputs of mistakes, by their words."""
    queries, keys = q.shape[-2], k.shape[-2]
    places = torch.arange(queries)[:, None] % tile >= torch.arange(keys) % tile
    earlier = torch.arange(queries)[:, None] // tile > torch.arange(keys) // tile
    d = q.shape[-1]
    mask = causal_from(queries, keys) if is_causal else None
    table = {
        "the scores are not divided by the root of d": lab.attention(q * d**0.5, k, v, mask)[0],
        "the scores are divided by the root of d twice": lab.attention(q / d**0.5, k, v, mask)[0],
    }
    if not is_causal:
        return table
    same = torch.arange(queries)[:, None] // tile == torch.arange(keys) // tile
    table |= {
        "later keys are seen: is_causal changes nothing": lab.attention(q, k, v)[0],
        LATER_THAN: lab.attention(q, k, v, places)[0],
        "the diagonal's tiles are not masked: a query sees later keys of its tile": (
            lab.attention(q, k, v, earlier | same)[0]
        ),
        "a query does not see its own key": lab.attention(q, k, v, causal_from(queries, keys, -1))[
            0
        ],
        "causal is counted from the last key; torch counts from the first": (
            lab.attention(q, k, v, causal_from(queries, keys, keys - queries))[0]
        ),
    }
    return table


def tiled_cases():
    """Queries, keys, causal, tile, dtype: lengths that no tile divides."""
    return [
        (10, 10, False, 4, F64),
        (10, 10, True, 4, F64),
        (7, 13, True, 4, F64),
        (13, 7, False, 3, F64),
        (1, 9, True, 4, F64),
        (9, 20, True, 7, F32),
        (70, 70, True, 64, F32),
    ]


@exercise_17_2.check("torch's attention, lengths that no tile divides")
def tiled_values(tiled_forward) -> None:
    for queries, keys, is_causal, tile, dtype in tiled_cases():
        q, k, v = attended(queries, keys, dtype=dtype)
        want = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        mask = causal_from(queries, keys) if is_causal else None
        double = [x.double() for x in (q, k, v)]
        logsumexp = lab.attention(*double, mask)[1].to(dtype)
        got = expect_pair(
            tiled_forward(q, k, v, is_causal, tile), ("output", "logsumexp"), "tiled_forward"
        )
        what = f"{queries} queries, {keys} keys, tiles of {tile}{', causal' * is_causal}"
        recognise(
            {
                "the last tile, which is shorter, is left out": (
                    got[0].shape[-2] == queries - queries % tile != queries
                ),
                UNSEEN: is_nan(got[0]),
            },
            expected=f"an output of {tuple(q.shape)} for {what}",
            seen=f"{tuple(got[0].shape)}" + ", with nan" * is_nan(got[0]),
        )
        table = mistaken_attention(*double, is_causal, tile)
        expect_close(got[0], want, what=f"the output of {what}", looks_like=table)
        scaled = {"the logsumexp is that of scores that are not scaled": (logsumexp * 0)}
        expect_close(got[1], logsumexp, what=f"the logsumexp of {what}", looks_like=scaled)
    one = attended(5, 6, batch=(2,))
    flat = tiled_forward(*one)
    expect_close(flat[0], F.scaled_dot_product_attention(*one), what="one batch dim, no heads")


@exercise_17_2.check("16 bits")
def tiled_dtypes(tiled_forward) -> None:
    q, k, v = attended(5, 500, dtype=BF16, batch=(1,))
    output, logsumexp = tiled_forward(q, k, v, False, 4)
    want = lab.attention(q.double(), k.double(), v.double())
    recognise(
        {
            "the output has a different dtype than q": output.dtype != BF16,
            "the logsumexp of 16-bit numbers is rounded to 16 bits": logsumexp.dtype == BF16,
        },
        expected="an output in bfloat16, a logsumexp in float32",
        seen=f"{output.dtype}, {logsumexp.dtype}",
    )
    one = attended(5, 1, dtype=BF16, batch=(1,))  # one key: the logsumexp is the score
    score = lab.attention(*(x.double() for x in one))[1]
    off = (tiled_forward(*one, False, 4)[1].double() - score).abs().max().item()
    recognise(
        {"q k^T is rounded to 16 bits before it becomes float32": off > 2e-5},
        expected="scores in float32, off by less than 2e-5",
        seen=f"{off:.1e}",
        hint="cast q and k first, then multiply",
    )
    off = (output.double() - want[0]).abs().max().item()
    recognise(
        {"sums over many keys are rounded to 16 bits in between": off > 4e-3},
        expected="the output of 500 keys off by less than 4e-3",
        seen=f"{off:.1e}",
        hint="scores and sums in torch.promote_types(q.dtype, torch.float32)",
    )
    expect_close(logsumexp.double(), want[1], what="the logsumexp", rtol=1e-4, atol=1e-4)


@exercise_17_2.check("no more than a tile, and no tile that nobody sees")
def tiled_cost(tiled_forward) -> None:
    q, k, v = attended(48, 48, d=2, batch=(1,))
    with lab.watched() as seen:
        tiled_forward(q, k, v, True, 8)
    recognise(
        {
            SQUARE: seen.largest >= 48 * 48,
            STRIP: seen.largest >= 8 * 48 > 2 * 48 * 2,
        },
        expected="no tensor above 8 x 8 scores, or q's size",
        seen=f"one of {seen.shape}",
    )
    tiles = 6 * 7 // 2
    each = 2 * 2 * 8 * 8 * 2  # two products of 8 x 8 x d, two FLOPs a term
    recognise(
        {
            "tiles above the diagonal are computed, though no query sees them": (
                seen.flops > tiles * each
            )
        },
        expected=f"{tiles} of 36 tiles, {tiles * each} FLOPs in products",
        seen=f"{seen.flops}",
    )


# 17.2b

exercise_17_2b = checks_for(
    "17.2b",
    name="TiledAttention",
    difficulty=4,
    minutes=40,
    hint=(
        "For one tile: weights = exp(scores - logsumexp); the values' gradient is weights^T @ "
        "gradient. The weights' gradient is gradient @ values^T; through a softmax it becomes "
        "weights * (that - mean), mean = (gradient * output).sum(-1) for each query, times "
        "1 / sqrt(d) for the scores. Products of it with keys and with queries are the rest."
    ),
    forbidden=(*ENGINE, "shared.long_context.tiles.tiled_backward"),
)


def tiled_run(function, q, k, v, is_causal):
    """Output, gradients, what was kept and what ran, in forward and backward."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with lab.kept_for_backward() as kept, lab.watched() as forward:
        output = function.apply(*leaves, is_causal)
    pull = torch.randn(output.shape, generator=fresh_generator(), dtype=F64).to(output.dtype)
    beside = lab.tensors_on(output.grad_fn)
    strided = pull.transpose(-3, -2).contiguous().transpose(-3, -2)  # as it comes from heads
    with lab.watched() as backward:
        try:
            output.backward(strided)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            wrong(
                "the incoming gradient is taken to lie in one piece",
                expected="any strides: the heads' dims are exchanged after attention",
                seen=str(error),
                hint="reshape copies where a view cannot be",
            )
    return leaves, output, pull, kept, beside, forward, backward


def softmaxless(q, k, v, pull, mask):
    """Gradients of q, k without the weighted mean; the scores', unscaled; and by tiles."""
    output, logsumexp = lab.attention(q, k, v, mask)
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    plain = weights * (pull @ v.mT)
    change = weights * (pull @ v.mT - (pull * output).sum(-1, keepdim=True))
    means = torch.cat([x.sum(-1, keepdim=True).expand_as(x) for x in plain.split(64, -1)], -1)
    by_tile = plain - weights * means
    return plain @ k * scale, plain.mT @ q * scale, change, by_tile * scale


@exercise_17_2b.check("torch's attention and its three gradients")
def tiled_gradients(TiledAttention) -> None:
    for queries, keys, is_causal, _, dtype in [*tiled_cases(), (130, 100, True, 64, F64)]:
        q, k, v = attended(queries, keys, dtype=dtype)
        leaves, output, pull, *_ = tiled_run(TiledAttention, q, k, v, is_causal)
        theirs = [x.clone().requires_grad_() for x in (q, k, v)]
        want = F.scaled_dot_product_attention(*theirs, is_causal=is_causal)
        want.backward(pull)
        double = [x.double() for x in (q, k, v)]
        what = f"{queries} queries, {keys} keys{', causal' * is_causal}, {dtype}"
        table = mistaken_attention(*double, is_causal, 64)
        expect_close(output, want, what=f"the output of {what}", looks_like=table)
        mask = causal_from(queries, keys) if is_causal else None
        dq, dk, change, by_tile = softmaxless(*double, pull.double(), mask)
        scale = q.shape[-1] ** 0.5
        words = "the weighted mean of the weights' gradients is not subtracted"
        twice = "the scores' scale is missing in backward"
        alone = "the weighted mean is that of one tile's keys, not of all keys"
        looks = (
            {words: dq, twice: change @ double[1], alone: by_tile @ double[1]},
            {words: dk, twice: change.mT @ double[0], alone: by_tile.mT @ double[0]},
            {},
        )
        for name, ours, right, known in zip("qkv", leaves, theirs, looks, strict=True):
            recognise(
                {f"no gradient reaches {name}": ours.grad is None},
                expected="three gradients, and None for is_causal",
                seen="None",
            )
            known = {said: x.to(dtype) for said, x in known.items()} | {
                f"the gradient of {name} is divided by the scale twice": right.grad / scale
            }
            expect_close(
                ours.grad, right.grad, what=f"the gradient of {name}, {what}", looks_like=known
            )


@exercise_17_2b.check("what is kept: linear in the length, to the byte")
def tiled_kept(TiledAttention) -> None:
    for length, dtype in ((96, F64), (192, F64), (96, BF16)):
        q, k, v = attended(length, length, d=4, batch=(2,), dtype=dtype)
        kept, beside, forward, backward = tiled_run(TiledAttention, q, k, v, True)[3:]
        different = {x.data_ptr(): x for x in kept}.values()
        numel = sum(x.numel() for x in different)
        wide = sum(x.dtype != dtype for x in different)
        want = 2 * (4 * length * 4 + length)
        recognise(
            {
                "tensors are kept as attributes of ctx: no hook sees them, none frees them": (
                    bool(beside)
                ),
                "the weights or the scores are kept, which grow with the square of the length": (
                    numel >= 2 * length * length
                ),
                "autograd records the tiles: what forward does in a Function needs no graph": (
                    len(kept) > 12
                ),
                "the logsumexp is kept for each feature": numel == want + 2 * length * 3,
                "the highest score and the sum are kept: one number, the logsumexp, is enough": (
                    numel == want + 2 * length
                ),
                "output or logsumexp are not kept: forward has to run again in backward": (
                    numel < want
                ),
            },
            expected=f"q, k, v, the output and one number a query: {want} numbers",
            seen=f"{numel} in {len(kept)} tensors; beside of it {beside or 'nothing'}",
        )
        expect_equal(numel, want, what="the numbers kept")
        recognise(
            {"copies in more bits are kept in place of q, k, v and the output": wide > 1},
            expected=f"all but the logsumexp kept in {dtype}, as they came",
            seen=f"{wide} tensors of another dtype",
        )
        for where, seen in (("forward", forward), ("backward", backward)):
            most = max(2 * 64 * 64, 2 * length * 4)
            recognise(
                {
                    f"{where} makes all scores at once": seen.largest >= 2 * length * length,
                    f"{where} makes a strip of a tile against all positions": seen.largest > most,
                },
                expected=f"no tensor above 64 x 64 scores a row of the batch in {where}",
                seen=f"one of {seen.shape}",
            )


# 17.3

exercise_17_3 = checks_for(
    "17.3",
    name="balanced_order",
    difficulty=1,
    minutes=5,
    hint="What an early chunk is short of in work, a late one has too much of.",
)


def chunk_work(mine, theirs) -> int:
    """Half-tiles that a rank computes with these keys: a full pair is 2, one on the diagonal 1."""
    return sum(2 * (b < a) + (a == b) for a, b in itertools.product(mine, theirs))


@exercise_17_3.check("every chunk once, equal work in every step, for 1 to 6 ranks")
def order_balances(balanced_order) -> None:
    for ranks in (2, 3, 4, 5, 6, 1):
        order = balanced_order(ranks)
        try:
            order = [[int(chunk) for chunk in each] for each in order]
        except TypeError:
            wrong("", expected="two chunks for each rank", seen=f"{order!r}")
        flat = sorted(chunk for each in order for chunk in each)
        recognise(
            {
                "one chunk a rank: then the work grows with the rank": (
                    [len(each) for each in order] == [1] * ranks
                ),
                "chunks are counted from 1": flat == list(range(1, 2 * ranks + 1)),
                "a chunk is held twice, and a different one by nobody": (
                    len(flat) == 2 * ranks and len(set(flat)) < len(flat)
                ),
            },
            expected=f"two of the chunks 0 to {2 * ranks - 1} for each of {ranks} ranks",
            seen=f"{order}",
        )
        expect(
            flat == list(range(2 * ranks)) and [len(each) for each in order] == [2] * ranks,
            expected=f"two of the chunks 0 to {2 * ranks - 1} for each of {ranks} ranks",
            seen=f"{order}",
        )
        work = [
            [chunk_work(order[r], order[(r - step) % ranks]) for r in range(ranks)]
            for step in range(ranks)
        ]
        sums = [sum(each) for each in zip(*work, strict=True)]
        recognise(
            {
                "neighbouring chunks: the last rank has the most to do": (
                    order == [[2 * r, 2 * r + 1] for r in range(ranks)] and ranks > 1
                ),
                "every n-th chunk: nearer, and still the last rank has more to do": (
                    order == [[r, r + ranks] for r in range(ranks)] and ranks > 1
                ),
            },
            expected="as much work on every rank",
            seen=f"{sums} half pairs of chunks by rank, for the order {order}",
        )
        expect(
            len(set(sums)) == 1,
            expected="as much work on every rank",
            seen=f"{sums} half pairs of chunks by rank, for the order {order}",
        )
        expect(
            all(len(set(step)) == 1 for step in work[1:]),
            expected="as much work on every rank in each step of the ring",
            seen=f"{work} half pairs by step and rank, for the order {order}",
        )


# 17.3b and 17.3c

exercise_17_3b = checks_for(
    "17.3b",
    name="ring_forward",
    difficulty=3,
    minutes=30,
    hint=(
        "n steps. In each, start PassedOn for the keys and values that are here (not in the last "
        "step), compute with them, wait. In step s the chunks that are here are those of rank "
        "(rank - s) % n. For each chunk of queries merge what each visible chunk of keys gives."
    ),
    forbidden=(*ENGINE, "shared.long_context.ring.ring_"),
)

RING_OPS = ("send", "recv")


def sent(calls) -> int:
    """Bytes of all sends."""
    return sum(call.num_bytes for call in calls if call.op == "send")


def expect_ring(world, one, wanted, where, table) -> None:
    """Only sends and receives, of so many bytes."""
    n = world.size
    ops = sorted({call.op for call in one.calls})
    recognise(
        {
            "the keys of all ranks are gathered: each rank then holds the whole sequence": (
                any("gather" in op for op in ops)
            ),
            "the ranks reduce among all: a ring has neighbours alone": any(
                "reduce" in op for op in ops
            ),
            "a group of one rank sends to itself": n == 1 and bool(ops),
        }
        | (alike(sent(one.calls), table) if n > 1 else {}),
        expected=f"{wanted} bytes sent to the next rank in {where} ({world})",
        seen=f"{sent(one.calls)} bytes by {', '.join(ops) or 'nothing'}",
    )
    expect(
        set(ops) <= set(RING_OPS) and sent(one.calls) == wanted,
        expected=f"{wanted} bytes sent to the next rank in {where} ({world})",
        seen=f"{sent(one.calls)} bytes by {', '.join(ops) or 'nothing'}",
    )


def tolerance(world) -> dict:
    """Exact mathematics in float64; 16 bits have their own rounding."""
    return EXACT if world.dtype == F64 else {"rtol": 2e-2, "atol": 2e-2}


def expect_skipped(world, one, flops, where) -> None:
    """Pairs of chunks that nobody sees cost nothing."""
    recognise(
        {"chunks that lie after all of a rank's queries are computed": one.watched.flops > flops},
        expected=f"at most {flops} FLOPs in {where} ({world})",
        seen=f"{one.watched.flops}",
    )


@exercise_17_3b.check("one process, on 1, 2, 3, 4 and 2 x 2 ranks, in several orders")
def ring_forwards(ring_forward) -> None:
    for world in lab.RINGS:
        seen = lab.forwards(ring_forward)(world)
        for rank, one in enumerate(seen):
            expect_pair(one.got, ("output", "logsumexp"), "ring_forward")
            what = f"rank {rank} ({world})"
            n, size = world.size, one.part * torch.empty(0, dtype=world.dtype).element_size()
            table = looks(one, 0)
            output, logsumexp = (x.dtype for x in one.got)
            wide = torch.promote_types(world.dtype, F32)
            expect(output == world.dtype, expected=f"the output of {what} in {world.dtype}",
                   seen=f"{output}")  # fmt: skip
            expect(logsumexp.itemsize >= wide.itemsize, expected=f"the logsumexp of {what} in "
                   f"{wide}", seen=f"{logsumexp}")  # fmt: skip
            recognise({UNSEEN: is_nan(*one.got)}, expected=f"numbers on {what}", seen="nan")
            expect_close(
                one.got[0].double(),
                one.want[0],
                what=f"the output of {what}",
                looks_like=table,
                **tolerance(world),
            )
            expect_close(
                one.got[1].double(), one.want[1], what=f"the logsumexp of {what}",
                looks_like=looks(one, 1), **tolerance(world),
            )  # fmt: skip
            hops = {"one hop too many: the keys come back to where they began": 2 * n * size}
            expect_ring(world, one, 2 * (n - 1) * size, "forward", hops)
            expect_skipped(world, one, 4 * 2 * 2 * 5 * one.pairs, "forward")


def looks(one, number) -> dict:
    """The words for what mistaken visibility gives."""
    words = {
        "own keys": "a rank sees its own keys alone, or ranks are compared where chunks decide",
        "all": "later keys are seen: is_causal changes nothing between ranks",
        "diagonal": "every pair of chunks is masked as the diagonal's: earlier ones are seen whole",
        "backwards": "keys are taken for those of rank + step: they come from the rank before",
        "average": "what the keys of each rank give is averaged, whatever its share of the sum",
        "as they lie": "positions are counted as the chunks lie on the ranks, not by the order",
        "own as diagonal": "a rank's own chunks are all masked as if each met itself",
    }
    return {words[name]: each[number] for name, each in one.wrong.items()}


exercise_17_3c = checks_for(
    "17.3c",
    name="ring_backward",
    difficulty=3,
    minutes=20,
    hint=(
        "Keys and values go round as in forward. A second pair, their gradients, begins as zeros, "
        "is added to in every step and then passed on: n times, so that the last hop brings it "
        "home. tiled_backward takes the whole output and logsumexp of a chunk of queries."
    ),
    forbidden=(*ENGINE, "shared.long_context.ring.ring_"),
)

OWN_SOFTMAX = "each pair of chunks has a softmax of its own, not its part of the whole row's"
WHOSE = (
    "in step s, rank r of the group has the keys and values of rank (r - s) % n of the group, and "
    "their chunks are order[(r - s) % n]"
)
HOME = "the gradients of keys and values end on a neighbour: one hop more brings them home"


@exercise_17_3c.check("one process, on 1, 2, 3, 4 and 2 x 2 ranks, in several orders")
def ring_backwards(ring_backward) -> None:
    for world in lab.RINGS:
        seen = lab.backwards(ring_backward)(world)
        for rank, one in enumerate(seen):
            expect_pair(one.got, ("dq", "dk", "dv"), "ring_backward")
            n = world.size
            bytes_a_number = torch.empty(0, dtype=world.dtype).element_size()
            wide = torch.promote_types(world.dtype, F32).itemsize
            for number, name in enumerate(("q", "k", "v")):
                what = f"the gradient of {name} on rank {rank} ({world})"
                table = {OWN_SOFTMAX: one.wrong["apart"][number]}
                if n > 1 and number:
                    table |= {
                        "each rank has what its own queries give: nothing of the others comes": (
                            one.wrong["own"][number]
                        ),
                        HOME: one.wrong["next"][number],
                        "the gradients travel against the keys, or one hop too far": (
                            one.wrong["previous"][number]
                        ),
                    }
                got = one.got[number]
                expect(
                    isinstance(got, torch.Tensor) and got.dtype == world.dtype,
                    expected=f"{what} in {world.dtype}",
                    seen=f"{getattr(got, 'dtype', type(got).__name__)}",
                )
                expect_close(
                    got.double(),
                    one.want[number],
                    what=what,
                    looks_like=table,
                    hint=WHOSE,
                    **tolerance(world),
                )
            part = one.part
            right = 2 * (n - 1) * part * bytes_a_number + 2 * n * part * wide
            narrow = 2 * (n - 1) * part * bytes_a_number + 2 * n * part * bytes_a_number
            table = {
                "the keys make a hop too many": right + 2 * part * bytes_a_number,
            }
            if wide != bytes_a_number:
                table["the gradients are summed in 16 bits on their way"] = narrow
            expect_ring(world, one, right if n > 1 else 0, "backward", table)
            expect_skipped(world, one, 10 * 2 * 2 * 5 * one.pairs, "backward")


# 17.4

exercise_17_4 = checks_for(
    "17.4",
    name="all_to_all_attention",
    difficulty=3,
    minutes=30,
    hint=(
        "A torch.autograd.Function that cuts along one dim, stacks the pieces, calls "
        "dist.all_to_all_single and joins what came along the other dim; its backward is itself "
        "with the dims swapped. Heads to sequence three times, torch's attention, and back once."
    ),
    forbidden=("torch.distributed.nn.", "shared.long_context.exchange."),
)


@exercise_17_4.check("one process, values and gradients, on 1, 2, 3, 4 and 2 x 2 ranks")
def exchanged_values(all_to_all_attention) -> None:
    for world in lab.EXCHANGES:
        for rank, one in enumerate(lab.exchanges(all_to_all_attention)(world)):
            words = {
                "own keys": "each rank attends to its own part of the sequence alone",
                "all": "later keys are seen: is_causal changes nothing",
                "in place": "causal is counted from the rank's first key, not the sequence's",
            }
            table = {words[name]: each[0] for name, each in one.wrong.items()}
            widest = max((call.group_size for call in one.calls), default=0)
            recognise(
                {"the exchange goes over all ranks, not over the group": widest > world.size},
                expected=f"messages among {world.size} ranks ({world})",
                seen=f"among {widest}",
                hint="group= of the collective; None means all ranks",
            )
            expect(
                isinstance(one.got[0], torch.Tensor),
                expected="a tensor",
                seen=type(one.got[0]).__name__,
            )
            recognise(
                {
                    "the output has the whole sequence of some heads: it is not given back": (
                        one.got[0].shape != one.want[0].shape
                        and one.got[0].numel() == one.want[0].numel()
                    ),
                },
                expected=f"{tuple(one.want[0].shape)} on rank {rank} ({world})",
                seen=f"{tuple(one.got[0].shape)}",
            )
            recognise(
                {
                    "heads or positions come back in a different order": (
                        one.got[0].shape == one.want[0].shape
                        and not close(one.got[0], one.want[0])
                        and close(*(x.flatten().sort().values for x in (one.got[0], one.want[0])))
                    ),
                },
                expected=f"each number in its place on rank {rank} ({world})",
                seen="the same numbers in other places",
            )
            what = f"the output on rank {rank} ({world})"
            expect_close(one.got[0], one.want[0], what=what, looks_like=table, **EXACT)
            for name, ours, right in zip("qkv", one.got[1:], one.want[1:], strict=True):
                recognise(
                    {
                        f"no gradient comes back through the exchange to {name}": ours is None,
                        "backward sends nothing: gradients have to travel back": (
                            world.size > 1 and not one.backward
                        ),
                    },
                    expected=f"a gradient of {name}, by all_to_all in backward",
                    seen="None" if ours is None else f"{len(one.backward)} messages in backward",
                    hint="torch's all_to_all_single has no gradient: a Function has to bring one",
                )
                back = {"the exchange's backward is not its way back": right * 0 + 1}
                what = f"the gradient of {name} on rank {rank} ({world})"
                expect_close(ours, right, what=what, looks_like=back, **EXACT)
            expect_exchanges(world, one)


def close(a, b) -> bool:
    """Equal within rounding."""
    return torch.allclose(a, b, rtol=1e-9, atol=1e-10)


def expect_exchanges(world, one) -> None:
    """Four parts handed in, in forward as in backward, and nothing else."""
    ours = one.want[0].numel() * 8
    wanted = (2 * ours + 2 * one.part * 8) * (world.size > 1)
    for where, calls in (("forward", one.calls), ("backward", one.backward)):
        ops = sorted({call.op for call in calls})
        handed = sum(call.num_bytes for call in calls)
        recognise(
            {
                "a group of one rank sends to itself": world.size == 1 and bool(ops),
                "the sequence is gathered: each rank then has all heads of it": any(
                    "gather" in op for op in ops
                ),
            },
            expected=f"{wanted} bytes handed in to all_to_all in {where} ({world})",
            seen=f"{handed} bytes by {', '.join(ops) or 'nothing'}",
        )
        expect(
            ops == ["all_to_all"] * (world.size > 1) and handed == wanted,
            expected=f"{wanted} bytes handed in to all_to_all in {where} ({world})",
            seen=f"{handed} bytes by {', '.join(ops) or 'nothing'}",
        )


@exercise_17_4.check("heads that the ranks cannot share")
def exchange_refuses(all_to_all_attention) -> None:
    def refused(rank: int) -> None:
        q = torch.ones(1, 3, 4, 2)
        what = "3 heads on 2 ranks"
        expect_raises(ValueError, all_to_all_attention, q, q, q, what=what, mentions=[3])
        ones = torch.ones(1, 2, 4, 2)
        accepted(all_to_all_attention, ones, ones, ones, what="2 heads on 2 ranks")

    on_ranks(refused, 2, apart=lab.HANG)
