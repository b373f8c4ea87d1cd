"""Lesson 02: what tells a right answer from a wrong one. The oracle is PyTorch's attention."""

import math
from collections.abc import Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from lessons.lesson02_attention import laboratory as lab
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, expect_raises, recognise
from shared.exercises.properties import expect_by_hand, expect_device, expect_gradients, expect_new
from shared.measuring.memory import saved_bytes

ENGINE = "scaled_dot_product_attention"
LAST_DIGITS = "an epsilon is added to a sum of weights, or a step runs in float32: digits are lost"
EMPTY_HINT = "which rows have no key: mask.any(dim=-1, keepdim=True); their output is 0"

exercise_02_1 = checks_for(
    "02.1",
    name="scaled_dot_product_attention",
    difficulty=3,
    minutes=20,
    hint=(
        "Four lines: scores (B, H, T, S), scale, softmax over the keys, product with the values. "
        "The mask goes between scale and softmax."
    ),
    forbidden=(
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.nn.functional.multi_head_attention_forward",
        "torch.nn.MultiheadAttention",
    ),
)


def attend(attention, *args) -> tuple[Tensor, Tensor]:
    """The output and the weights that an answer to 02.1 returns."""
    got, pair = attention(*args), "a tuple (output, weights)"
    alone = {"it returns the output alone, without the weights": isinstance(got, Tensor)}
    recognise(alone, expected=pair, seen=type(got).__name__)
    expect(isinstance(got, tuple) and len(got) == 2, expected=pair, seen=type(got).__name__)
    return got


@exercise_02_1.check("values without a mask")
def no_mask(attention) -> None:
    for b, h, t, s, size in [(2, 3, 5, 7, 4), (1, 1, 3, 3, 16)]:
        q, k, v = lab.query_key_value(b, h, t, s, size)
        root, whole = math.sqrt(size), math.sqrt(h * size)
        scaled = partial(lab.formula, q, k, v)
        output, weights = attend(attention, q, k, v)
        want = torch_attention(q, k, v)
        expect_close(
            output,
            want,
            what="the output",
            looks_like={
                "the scores are not scaled": scaled(1.0),
                "the scores are divided by K, not by its square root": scaled(1 / size),
                "the scores are multiplied by sqrt(K)": scaled(root),
                "the scale is 1/sqrt(H K), the whole vector's, not one head's": scaled(1 / whole),
                "the scale is 1/sqrt(S), of the number of keys: K is what a product sums over": (
                    scaled(s**-0.5)
                ),
                "the softmax runs over the queries, not over the keys": scaled(1 / root, dim=-2),
                "the weights are scaled, after the softmax: it is the scores that grow with K": (
                    scaled(1.0) / root
                ),
                "the softmax is computed in float32: float64 inputs keep their digits": (
                    (q @ k.mT / root).float().softmax(-1).double() @ v
                ),
                LAST_DIGITS: lab.nearly(output, want),
            },
            hint="softmax(Q K^T / sqrt(K)) V; K is the last dim of the query",
        )
        expect_close(weights, (q @ k.mT / root).softmax(-1), what="the weights")


@exercise_02_1.check("values with a mask")
def with_mask(attention) -> None:
    q, k, v = lab.query_key_value(2, 3, 5, 7, 4)
    scores = q @ k.mT / 2
    each_head = lab.random_mask(6, 5, 7).view(2, 3, 5, 7)
    for mask in (lab.random_mask(2, 5, 7), lab.random_mask(1, 1, 7), each_head):
        output, weights = attend(attention, q, k, v, mask)
        want = torch_attention(q, k, v, mask)
        expect_close(
            output,
            want,
            what="the output",
            looks_like={
                "the mask is not used": scores.softmax(-1) @ v,
                "the mask is read the wrong way round: True must mean 'may be looked at'": (
                    torch_attention(q, k, v, ~mask)
                ),
                "the weights are masked after the softmax: the rest no longer adds up to 1": (
                    scores.softmax(-1).where(mask, 0.0) @ v
                ),
                "masked scores are set to 0, which is a score like any other": (
                    scores.where(mask, 0.0).softmax(-1) @ v
                ),
                "the mask is added to the scores as 0 and 1": (scores + mask).softmax(-1) @ v,
                "one head's mask serves all heads": torch_attention(q, k, v, mask[:, :1]),
                "a row with some masked key is taken for a row without any: mask.any, not all": (
                    torch.zeros_like(q)
                ),
                LAST_DIGITS: lab.nearly(output, want),
            },
            hint="a masked key must get the weight exp(-inf) = 0 before the row is normalised",
        )
        want = scores.where(mask, -math.inf).softmax(-1)
        near = {LAST_DIGITS: lab.nearly(weights, want)}
        expect_close(weights, want, what="the weights", looks_like=near)
    q, k, v = lab.query_key_value(2, 3, 5, 5, 4)
    past = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    columns = "a square mask is read by columns: a row is a query, a column a key"
    expect_close(
        attend(attention, q, k, v, past)[0],
        torch_attention(q, k, v, past),
        what="the output with as many queries as keys, and a causal mask",
        looks_like={columns: torch_attention(q, k, v, past.mT)},
    )


@exercise_02_1.check("a row without any key")
def empty_row(attention) -> None:
    q, k, v = lab.query_key_value(2, 3, 5, 7, 4)
    mask = lab.random_mask(2, 5, 7)
    mask[0, :, 2] = False
    output, weights = attend(attention, q, k, v, mask)
    row, its_weights = output[0, :, 2], weights[0, :, 2]
    nan = "a row without any key gives NaN in the {}: softmax over nothing but -inf"
    recognise(
        {
            nan.format("output"): bool(row.isnan().any()),
            nan.format("weights"): bool(its_weights.isnan().any()),
            "a row without any key returns the mean of all values, padding and all": (
                torch.allclose(row, v[0].mean(-2))
            ),
        },
        expected="zeros: nothing to look at, nothing seen",
        seen=f"{int(output.isnan().sum())} NaN in the output, and weights of "
        f"{float(its_weights[0, 0]):.2g} in that row",
        hint=EMPTY_HINT,
    )
    want = torch_attention(q, k, v, mask)
    looks_like = {
        LAST_DIGITS: lab.nearly(output, want),
        "a row without any key looks at all of them alike: its output is to be 0": (
            want.where(mask.any(-1, keepdim=True), output)
        ),
    }
    what = "the output with one empty row"
    expect_close(output, want, what=what, looks_like=looks_like, hint=EMPTY_HINT)
    expect(
        not its_weights.any(),
        mistake="a row without any key keeps its weights: only its output is set to 0",
        expected="weights of 0 in that row",
        seen=f"weights up to {float(its_weights.max()):.2g}",
        hint=EMPTY_HINT,
    )


@exercise_02_1.check("large scores, by hand")
def large_scores(attention) -> None:
    q, k, v = lab.query_key_value(2, 3, 5, 7, 4)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None]  # of all of a query's scores
    q, k, mask = 1e5 * sign * q.abs(), k.abs(), lab.random_mask(2, 5, 7)
    output, _ = attend(attention, q, k, v, mask)
    seen = mask.expand(2, 3, 5, 7).gather(-1, (q @ k.mT).argmax(-1, keepdim=True)).squeeze(-1)
    lost = ~(output.abs().sum(-1) > 0)  # a row of zeros, or with NaN
    recognise(
        {
            "the weights are masked and normalised anew: where a hidden key has by far the largest "
            "score, nothing is left": bool(lost.any() and not (lost & seen).any()),
            "large scores overflow: softmax subtracts a row's maximum": (
                bool(lost.all() or not output.isfinite().all())
            ),
        },
        expected="numbers for scores of a hundred thousand",
        seen=f"{int(lost.sum())} of 30 rows are 0 or NaN",
    )
    expect_close(
        output,
        torch_attention(q, k, v, mask),
        what="the output",
        hint="a masked key's score is -inf: any number, -1e4 say, is more than some score",
    )
    expect_by_hand(lambda: attention(q, k, v), ENGINE, what="the formula")


@exercise_02_1.check("gradients, also next to a row without any key")
def gradients(attention) -> None:
    mask = lab.random_mask(2, 5, 7)
    mask[0, :, 2] = False
    tensors = [each.requires_grad_() for each in lab.query_key_value(2, 3, 5, 7, 4)]
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True))
    hint = "the empty row comes back in the backward pass: masked_fill stops it, + -inf does not"
    want = torch_attention(*tensors, attn_mask=mask)
    expect_gradients(attend(attention, *tensors, mask)[0], want, leaves, "the output", hint)
    q, k, _ = tensors
    open_rows = mask.any(-1, keepdim=True)
    hidden = (q @ k.mT / 2).masked_fill(~mask & open_rows, -math.inf).softmax(-1) * open_rows
    for given, want, what in (
        (None, (q @ k.mT / 2).softmax(-1), ""),
        (mask, hidden, ", with a mask"),
    ):
        weights = attend(attention, *tensors, given)[1]
        what = f"the tensor of weights{what}"
        expect_gradients(weights, want, {"query": q, "key": k}, what)


@exercise_02_1.check("dtypes")
def dtypes(attention) -> None:
    for dtype, mask in product((torch.float32, torch.bfloat16), (lab.random_mask(1, 3, 5), None)):
        q, k, v = lab.query_key_value(1, 2, 3, 5, 8, dtype)
        output, _ = attend(attention, q, k, v, mask)
        expect_equal(output.dtype, dtype, what="the output's dtype")
        expect_close(output, torch_attention(q, k, v, mask), what=f"the output in {dtype}")


exercise_02_2 = checks_for(
    "02.2",
    name="padding_mask",
    difficulty=1,
    minutes=5,
    hint="tokens != pad_id is (B, S). Which two dims of (B, H, T, S) are missing?",
)
exercise_02_3 = checks_for(
    "02.3",
    name="causal_mask",
    difficulty=1,
    minutes=5,
    hint="Row: query, column: key. Draw length 3 on paper; torch has tril and triu.",
)


def expect_mask(got: Tensor, want: Tensor, what: str, looks_like: Mapping[str, Tensor]) -> None:
    """Equal masks, of bools; a recognised wrong one is named."""
    recognise(
        {"the mask is not boolean": isinstance(got, Tensor) and got.dtype != torch.bool},
        expected=f"{what} in torch.bool",
        seen=f"{getattr(got, 'dtype', None)}",
        hint="True = may be looked at; no 0 and -inf, no 0 and 1",
    )
    hint = "True = may be looked at; four dims, to broadcast to (B, H, T, S)"
    expect_close(got, want, what=what, looks_like=looks_like, hint=hint)


@exercise_02_2.check("tokens with padding")
def padding_values(padding_mask) -> None:
    for pad_id in (0, 3):
        tokens = lab.padded_tokens(pad_id, other=3 - pad_id)
        keep = tokens != pad_id
        expect_mask(
            padding_mask(tokens, pad_id) if pad_id else padding_mask(tokens),
            keep[:, None, None],
            f"the mask with pad_id {pad_id}",
            looks_like={
                "True marks the padding: it must mark what may be looked at": ~keep[:, None, None],
                "padding is masked as a query, not as a key": keep[:, None, :, None],
                "the mask is (B, S): it must broadcast to (B, H, T, S)": keep,
                "the mask is (B, 1, S): one dim short for (B, H, T, S)": keep[:, None],
                "the mask is (B, 1, S, S), a row for each query: a dim of 1 serves them all": (
                    keep[:, None, None].expand(5, 1, 5, 5)
                ),
                "padding is masked as query and as key, which leaves rows without any key": (
                    keep[:, None, None] & keep[:, None, :, None]
                ),
                "padding is counted and taken to come last: it may stand anywhere": (
                    torch.arange(5) < keep.sum(-1, keepdim=True)
                )[:, None, None],
                "all that stands behind a padding token is hidden: padding may stand anywhere": (
                    keep.cumprod(-1).bool()[:, None, None]
                ),
                "pad_id is not used: padding is looked for as 0": (tokens != 0)[:, None, None],
                "ids below pad_id are taken for padding: ask !=, not >": (
                    (tokens > pad_id)[:, None, None]
                ),
                "a sentence of padding alone is opened: nothing in it may be looked at, and 02.1 "
                "gives its rows 0": (keep | ~keep.any(-1, keepdim=True))[:, None, None],
            },
        )
    tokens = torch.ones(2, 3, dtype=torch.long)
    expect_device(padding_mask, tokens, what="padding_mask")
    expect(
        not lab.made_on_cpu(padding_mask, tokens),
        mistake="the mask is made on the CPU, wherever the tokens lie",
        expected="the mask on the tokens' device",
        seen="a tensor that is made without a look at tokens.device",
        hint="device=tokens.device, or no new tensor at all: tokens != pad_id",
    )


@exercise_02_3.check("the lower triangle")
def triangle(causal_mask) -> None:
    for length in (4, 1, 600):
        index = torch.arange(length)
        past = (index[None, :] <= index[:, None])[None, None]  # key <= query
        first = (index == 0)[:, None]
        got = causal_mask(length)
        expect_mask(
            got,
            past,
            f"the mask of length {length}",
            looks_like={
                "it is the wrong way round: each word sees the words after it": past.mT,
                "True marks what is hidden: it must mark what may be looked at": ~past,
                "a word does not see itself: the diagonal belongs to it": past & ~past.mT,
                "the mask is (T, T): it must have the scores' four dims": past[0, 0],
                "a word sees the one after it: the diagonal is the last that is open": (
                    torch.ones(1, 1, length, length, dtype=torch.bool).tril(1)
                ),
                "the first word sees all words: it has itself to look at": past | first,
                "only the first word sees itself: the diagonal belongs to every word": (
                    past & ~past.mT | first & past
                ),
                "a stored mask is cut out, and ends at its own length: make one of any length": (
                    lab.cut_to(past, got)
                ),
            },
        )


@exercise_02_3.check("the device that is asked for, a new mask each time")
def device(causal_mask) -> None:
    # torch's "meta" device exists on every machine, and holds shapes without data.
    # No check has asked for length 7 before: what is kept by its length is told by the next one.
    expect_equal(
        str(causal_mask(7, device="meta").device),
        "meta",
        what="the mask's device",
        mistake="the device argument is not used: on a GPU the mask would stay on the CPU",
    )
    alone = causal_mask(1, device="cpu")
    expect(bool(alone.all()), expected="True: a word sees itself", seen=f"{alone}")  # zeros do not
    expect_new(causal_mask, 4, what="causal_mask(4)")


exercise_02_4a = checks_for(
    "02.4a",
    name="split_heads",
    difficulty=2,
    minutes=10,
    hint="First cut the last dim in two, (B, L, H, K), then swap two dims. Two steps, not one.",
)
exercise_02_4b = checks_for(
    "02.4b",
    name="combine_heads",
    difficulty=1,
    minutes=5,
    hint="The same two steps backwards: swap first, then join the last two dims.",
)
SIZES = ((2, 5, 3, 4), (1, 4, 4, 2), (3, 1, 2, 1))  # B, L, H, K


@exercise_02_4a.check("consecutive parts, position by position")
def split_values(split_heads) -> None:
    for b, length, heads, k in SIZES:
        x = lab.vectors(b, length, heads * k).requires_grad_()
        got, want = split_heads(x, heads), torch.stack(x.split(k, dim=-1), dim=1)
        expect_close(
            got,
            want,
            what=f"{(b, length, heads * k)} in {heads} heads",
            looks_like={
                "the right shape, but positions are mixed: reshape to (B, H, L, K) does not "
                "swap L and H": x.reshape(b, heads, length, k),
                "each head takes every H-th number instead of K consecutive ones": (
                    x.unflatten(-1, (k, heads)).permute(0, 3, 1, 2)
                ),
                "heads stand after positions: (B, L, H, K)": x.unflatten(-1, (heads, k)),
                "heads stand before the batch: (H, B, L, K)": torch.stack(x.split(k, dim=-1)),
                "positions stand before the batch: (L, H, B, K)": want.transpose(0, 2),
                "num_heads is taken for a head's width, K": (
                    x.unflatten(-1, (k, heads)).transpose(1, 2)
                ),
            },
        )
        expect_gradients(got, want, {"x": x}, "the tensor of heads")


@exercise_02_4a.check("a d_model that cannot be split")
def split_error(split_heads) -> None:
    x, what = torch.zeros(1, 2, 10), "d_model 10 with 4 heads"
    expect_raises(ValueError, split_heads, x, 4, mentions=[10, 4], what=what)


@exercise_02_4b.check("the way back")
def combine_values(combine_heads) -> None:
    for b, length, heads, k in SIZES:
        x = lab.vectors(b, heads, length, k).requires_grad_()
        combine_heads(x.detach().clone())  # without a graph: what is changed in place is told
        got, want = combine_heads(x), torch.cat(x.unbind(1), dim=-1)
        recognise(
            {
                "the result is made in another dtype than that of x": (
                    isinstance(got, torch.Tensor) and got.dtype != x.dtype
                )
            },
            expected=f"{x.dtype}, as x has it",
            seen=f"{getattr(got, 'dtype', got)}",
            hint="x.new_empty(...), where memory is made for it",
        )
        expect_close(
            got,
            want,
            what=f"{heads} heads of {k} side by side",
            looks_like={
                "the right shape, but positions are mixed: swap the dims before joining": (
                    x.reshape(b, length, heads * k)
                ),
                "the heads' numbers are interleaved: first numbers first, then second ones": (
                    x.permute(0, 2, 3, 1).reshape(b, length, heads * k)
                ),
                "the heads stand in reverse order": torch.cat(x.flip(1).unbind(1), dim=-1),
                "the heads are added up, in place of standing side by side": x.sum(1),
                "the mean of the heads is taken: they are to stand side by side": x.mean(1),
                "the mean of the heads stands in the place of each: each keeps its own numbers": (
                    x.mean(1).repeat(1, 1, heads)
                ),
            },
        )
        expect_gradients(got, want, {"x": x}, "the joined tensor")


exercise_02_5 = checks_for(
    "02.5",
    name="MultiHeadAttention",
    difficulty=5,
    minutes=35,
    hint=(
        "forward: project query, key, value; split each; attend; combine; w_o. The functions of "
        "the exercises before do all but the projections."
    ),
    forbidden=(
        "torch.nn.MultiheadAttention",
        "torch.nn.functional.multi_head_attention_forward",
    ),
)


@exercise_02_5.check("self-attention against nn.MultiheadAttention")
def self_attention(module_class) -> None:
    for d_model, heads in ((12, 3), (8, 1), (6, 6)):
        module, x = lab.built(module_class, d_model, heads), lab.vectors(2, 5, d_model)
        mistaken = partial(lab.mistaken_output, module, heads, x, x, x)
        expect_close(
            module(x, x, x),
            lab.twin_output(module, heads, x, x, x),
            what=f"{heads} heads of {d_model}",
            looks_like={
                "w_o is not applied: the heads stand side by side and never mix": (
                    mistaken(last=False)
                ),
                "the scale is 1/sqrt(d_model): each head has only K = d_model / H numbers": (
                    mistaken(scale=d_model**-0.5)
                ),
                "the scores are divided by sqrt(K) twice, or by K": mistaken(scale=heads / d_model),
                "there is one head over the whole vector": lab.mistaken_output(module, 1, x, x, x),
                "heads are cut and joined without a transpose: positions are mixed": (
                    mistaken(cut=False, joined=False)
                ),
                "heads are joined without a transpose: positions are mixed": (
                    mistaken(joined=False)
                ),
                **lab.exchanged(module, heads, x),
            },
        )


@exercise_02_5.check("cross-attention: keys and values from elsewhere")
def cross_attention(module_class) -> None:
    module = lab.built(module_class, 12, 3)
    x, key, value = (lab.vectors(2, 5, 12) for _ in range(3))
    expect_close(
        module(x, key, value),
        lab.twin_output(module, 3, x, key, value),
        what="cross-attention",
        looks_like={
            "keys and values are taken from the query": lab.mistaken_output(module, 3, x, x, x),
            "the values are taken from the key": lab.mistaken_output(module, 3, x, key, key),
            "the values are taken from the query": lab.mistaken_output(module, 3, x, key, x),
        },
    )


@exercise_02_5.check("masks: padding, causal, both")
def masks(module_class) -> None:
    x = lab.vectors(2, 5, 12)
    keep = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
    past = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    each = lab.random_mask(6, 5, 5).view(2, 3, 5, 5)
    for fused, training in product((False, True), (True, False)):
        module = lab.built(module_class, 12, 3, fused=fused).train(training)
        mistaken = partial(lab.mistaken_output, module, 3, x, x, x)
        looks_like_one = {
            "with causal=True the mask is dropped: a key must pass both": mistaken(mask=past),
            "with a mask causal=True is dropped: a key must pass both": mistaken(mask=keep),
            "a key that passes one of the two masks is let through: use &, not |": (
                mistaken(mask=past | keep)
            ),
        }
        looks_like_causal = {
            "causal=True is not used": mistaken(),
            "a word does not see itself: query t may look at the keys 0 to t": (
                mistaken(mask=past.tril(-1))
            ),
        }
        looks_like_padding = {
            "the mask is not used": mistaken(),
            "the mask is read the wrong way round: True must mean 'may be looked at'": (
                mistaken(mask=~keep)
            ),
            "the scores are divided by sqrt(K) twice, or by K": mistaken(mask=keep, scale=1 / 4),
        }
        looks_like_each = {
            "one head's mask serves all heads": mistaken(mask=each[:, :1]),
            "one query's mask serves all queries": mistaken(mask=each[:, :, :1]),
            "the mask of an earlier call is used again": mistaken(mask=keep),
        }
        for what, given, mask, looks_like in (
            ("padding", {"mask": keep}, keep, looks_like_padding),
            ("causal", {"causal": True}, past, looks_like_causal),
            ("both masks", {"mask": keep, "causal": True}, past & keep, looks_like_one),
            ("no mask after others", {}, None, {"causal=True stays on": mistaken(mask=past)}),
            ("a mask of each head", {"mask": each}, each, looks_like_each),
        ):
            got, want = module(x, x, x, **given), lab.twin_output(module, 3, x, x, x, mask)
            where = f"{what}, fused={fused}, training={training}"
            expect_close(got, want, what=where, looks_like=looks_like)
        y, longer = lab.vectors(2, 7, 12), torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
        want, hint = lab.twin_output(module, 3, y, y, y, longer), "a kept mask has one length"
        got = lab.longer(module, y)
        expect_close(got, want, what="a longer causal sentence", hint=hint)


@exercise_02_5.check("a sentence that is all padding")
def all_padding(module_class) -> None:
    x = lab.vectors(2, 4, 8)
    mask = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 4)
    for fused in (False, True):
        module = lab.built(module_class, 8, 2, fused=fused)
        output = module(x, x, x, mask)
        recognise(
            {"a sentence without any key gives NaN": not output.isfinite().all()},
            expected="w_o of zeros, which is its bias",
            seen=f"NaN, fused={fused}",
            hint=EMPTY_HINT,
        )
        mean = module.w_o(module.w_v(x[1]).mean(0)).expand(4, 8)
        expect_close(
            output[1],
            module.w_o.bias.expand(4, 8),
            what=f"the output of that sentence, fused={fused}",
            looks_like={
                "a sentence without any key gets the mean of its values, padding and all": mean
            },
            hint=EMPTY_HINT,
        )


@exercise_02_5.check("dropout")
def dropout(module_class) -> None:
    for fused in (False, True):
        module = lab.built(module_class, 8, 2, dropout=0.2, fused=fused)
        kept, always = lab.kept_weights(module, 0.2), lab.kept_weights(module.eval(), 0.0)
        whole, share = torch.allclose(kept, kept.round()), kept.mean().item() / 50
        heads = kept.unflatten(-1, (2, 4))
        expect(
            torch.allclose(always, torch.tensor(50.0).double()),
            mistake="it acts in eval() as well: the rate must be 0 unless self.training",
            expected=f"in eval() each weight as it is, with fused={fused}",
            seen=f"sums of a row's weights from {always.min() / 50:.3g} to {always.max() / 50:.3g}",
        )
        recognise(
            {
                "dropout is not used, or a row's weights add up to 1 after it: it acts on the "
                "scores, before the softmax, or the rest is normalised anew": (
                    torch.allclose(kept, kept[0, 0, 0])
                ),
                "dropout acts on the output, not on the weights": bool(
                    ((kept.round() == 0) | (kept.round() == 50)).all()
                ),
                "dropout acts twice, on the weights and on what they make": (
                    bool((kept == 0).any())
                ),
                "dropout acts on the values: a weight that is dropped is so for a whole value": (
                    not torch.allclose(heads, heads[..., :1])
                ),
                "all heads lose the same keys: each weight is to be drawn": (
                    torch.allclose(heads[..., 0, :], heads[..., 1, :])
                ),
                "all queries lose the same keys: each weight is to be drawn": (
                    torch.allclose(kept, kept[:, :1])
                ),
                "all sentences lose the same keys: each weight is to be drawn": (
                    torch.allclose(kept, kept[:1])
                ),
                "the rate is 0.5 whatever `dropout` says": (
                    torch.allclose(kept / 1.6, (kept / 1.6).round())
                ),
                "the rate or the scale of the rest is wrong": not (whole and 0.75 < share < 0.85),
            },
            expected="in training a fifth of the weights 0 and the others divided by 0.8",
            seen=f"sums of a row's weights from {kept.min() / 40:.3g} to {kept.max() / 40:.3g}, "
            f"with fused={fused}",
        )


@exercise_02_5.check("gradients, device, and by hand or fused")
def carries_gradients(module_class) -> None:
    x, memory = (lab.vectors(2, length, 12).requires_grad_() for length in (5, 7))
    for fused in (False, True):
        module = lab.built(module_class, 12, 3, fused=fused).train(fused)
        leaves = {"the query": x, "the memory": memory, **dict(module.named_parameters())}
        want = lab.mistaken_output(module, 3, x, memory, memory)
        expect_gradients(module(x, memory, memory), want, leaves, f"the output, fused={fused}")
        if not fused:
            expect_by_hand(partial(module, x, x, x), ENGINE, what="fused=False")
        mask, there = torch.ones(2, 1, 1, 5, dtype=torch.bool), partial(module, causal=True)
        module.to("meta")
        expect_device(there, x, x, x, mask, what="causal=True with a mask")


@exercise_02_5.check("what the fused kernel keeps")
def cost(module_class) -> None:
    module = lab.built(module_class, 8, 2, fused=True)

    def kept(length: int, causal: bool) -> int:
        x = lab.vectors(1, length, 8)
        parameters = tuple(module.parameters())
        return saved_bytes(lambda: module(x, x, x, causal=causal), ignore=parameters)

    plain, causal = (kept(256, causal) / kept(128, causal) for causal in (False, True))
    recognise(
        {
            "fused=True still keeps the T x S weights": plain > 2.2,
            "with fused=True causal=True still puts a T x S mask in memory": causal > 2.2,
        },
        expected="twice the saved bytes for twice the length",
        seen=f"{plain:.2f} times, with causal=True {causal:.2f} times",
        hint="F.scaled_dot_product_attention; is_causal=True instead of a mask in memory",
    )


@exercise_02_5.check("a d_model that the heads cannot share")
def heads_error(module_class) -> None:
    expect_raises(ValueError, module_class, 10, 4, mentions=[10, 4], what="d_model 10 with 4 heads")
