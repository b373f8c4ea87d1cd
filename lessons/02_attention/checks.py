"""What tells a right answer of lesson 02 from a wrong one; the oracle is PyTorch's attention."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, expect_raises, wrong
from shared.exercises.seeds import fresh_generator
from shared.measuring.memory import saved_bytes

exercise_02_1 = checks_for(
    "02.1",
    name="scaled_dot_product_attention",
    difficulty=3,
    minutes=20,
    hints=[
        "Four lines: scores (B, H, T, S), scale, softmax over the keys, product with the values. "
        "The mask goes between scale and softmax.",
        "For a row without keys: decide which rows those are with mask.any(dim=-1, keepdim=True), "
        "and set their output and weights to 0 after the softmax.",
    ],
)
exercise_02_2 = checks_for(
    "02.2",
    name="padding_mask",
    difficulty=1,
    minutes=5,
    hints=["tokens != pad_id is (B, S). Which two dims of (B, H, T, S) are missing?"],
)
exercise_02_3 = checks_for(
    "02.3",
    name="causal_mask",
    difficulty=1,
    minutes=5,
    hints=["Row: query, column: key. Draw length 3 on paper; torch has tril and triu."],
)
exercise_02_4a = checks_for(
    "02.4a",
    name="split_heads",
    difficulty=2,
    minutes=10,
    hints=["First cut the last dim in two, (B, L, H, K), then swap two dims. Two steps, not one."],
)
exercise_02_4b = checks_for(
    "02.4b",
    name="combine_heads",
    difficulty=1,
    minutes=5,
    hints=["The same two steps backwards: swap first, then join the last two dims."],
)
exercise_02_5 = checks_for(
    "02.5",
    name="MultiHeadAttention",
    difficulty=5,
    minutes=35,
    hints=[
        "forward: project query, key, value; split each; attend; combine; w_o. The functions of "
        "the exercises before do all but the projections.",
        "causal=True and a mask: a key must pass both, so combine them with &.",
        "fused: F.scaled_dot_product_attention takes attn_mask or is_causal, not both.",
    ],
)
EMPTY_HINT = "which rows have no key: mask.any(dim=-1, keepdim=True); their output is 0"


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random query, key and value for (B, H, T, S, K)."""
    b, h, t, s, k = shape
    generator = fresh_generator()
    shapes = [(b, h, t, k), (b, h, s, k), (b, h, s, k)]
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in shapes
    ]


def open_mask(b: int, t: int, s: int) -> Tensor:
    """A random mask with at least one key in each row, and at least one hidden."""
    mask = torch.rand(b, 1, t, s, generator=fresh_generator()) < 0.5
    mask[..., 0], mask[..., -1] = True, False
    return mask


def attend(candidate: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Call a candidate for 02.1; it must return two tensors."""
    got = candidate(*args)
    expect(
        isinstance(got, tuple) and len(got) == 2,
        mistake="it returns the output alone, without the weights",
        expected="a tuple (output, weights)",
        seen=type(got).__name__,
    )
    return got


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float, dim: int = -1) -> Tensor:
    """The formula with a scale and a softmax dim of one's choice, to recognise mistakes."""
    return (q @ k.transpose(-2, -1) * scale).softmax(dim) @ v


@exercise_02_1.check("values without a mask")
def no_mask(scaled_dot_product_attention: Any) -> None:
    for shape in [(2, 3, 5, 7, 4), (1, 1, 3, 3, 16)]:
        q, k, v = inputs(shape)
        root = math.sqrt(shape[-1])
        output, weights = attend(scaled_dot_product_attention, q, k, v)
        expect_close(
            output,
            F.scaled_dot_product_attention(q, k, v),
            what="the output",
            looks_like={
                "the scores are not scaled": formula(q, k, v, 1.0),
                "the scores are divided by K, not by its square root": formula(q, k, v, root**-2),
                "the scores are multiplied by sqrt(K)": formula(q, k, v, root),
                "the scale is 1/sqrt(H K), the whole vector's, not one head's": formula(
                    q, k, v, (shape[1] * shape[-1]) ** -0.5
                ),
                "the softmax runs over the queries, not over the keys": formula(
                    q, k, v, 1 / root, dim=-2
                ),
            },
            hint="softmax(Q K^T / sqrt(K)) V; K is the last dim of the query",
        )
        expect_close(weights, (q @ k.mT / root).softmax(-1), what="the weights")


@exercise_02_1.check("values with a mask")
def with_mask(scaled_dot_product_attention: Any) -> None:
    q, k, v = inputs((2, 3, 5, 7, 4))
    for mask in (open_mask(2, 5, 7), open_mask(1, 1, 7)):
        before = mask.clone()
        output, weights = attend(scaled_dot_product_attention, q, k, v, mask)
        soft = (q @ k.mT / 2).softmax(-1)
        expect_close(
            output,
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
            what="the output",
            looks_like={
                "the mask is not used": soft @ v,
                "the mask is read the wrong way round: True must mean 'may be looked at'": (
                    lambda mask=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)
                ),
                "the weights are masked after the softmax: the rest no longer adds up to 1": (
                    soft.where(mask, 0.0) @ v
                ),
                "masked scores are set to 0, which is a score like any other": (
                    (q @ k.mT / 2).where(mask, 0.0).softmax(-1) @ v
                ),
                "the mask is added to the scores as 0 and 1": (q @ k.mT / 2 + mask).softmax(-1) @ v,
            },
            hint="a masked key must get the weight exp(-inf) = 0 before the row is normalised",
        )
        expect_close(weights.sum(-1), torch.ones(2, 3, 5).double(), what="the sums of the weights")
        expect(torch.equal(mask, before), expected="the mask left as it was", seen="it is changed")


@exercise_02_1.check("a row without any key")
def empty_row(scaled_dot_product_attention: Any) -> None:
    q, k, v = inputs((2, 3, 5, 7, 4))
    mask = open_mask(2, 5, 7)
    mask[0, :, 2] = False
    output, weights = attend(scaled_dot_product_attention, q, k, v, mask)
    for what, got in (("output", output), ("weights", weights)):
        row = got[0, :, 2]
        if row.isnan().any():
            wrong(
                f"a row without any key gives NaN in the {what}: softmax over nothing but -inf",
                expected="zeros",
                seen=f"{int(got.isnan().sum())} NaN",
                hint=EMPTY_HINT,
            )
        if what == "output" and torch.allclose(row, v[0].mean(-2)):
            wrong(
                "a row without any key returns the mean of all values, padding and all",
                expected="zeros: nothing to look at, nothing seen",
                seen="equal weights",
                hint=EMPTY_HINT,
            )
        expect_close(row, torch.zeros_like(row), what=f"the {what} of a row without any key")
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expect_close(output, want, what="the output with one empty row")


@exercise_02_1.check("gradients, also next to a row without any key")
def gradients(scaled_dot_product_attention: Any) -> None:
    mask = open_mask(2, 5, 7)
    mask[0, :, 2] = False
    ours = [each.requires_grad_() for each in inputs((2, 3, 5, 7, 4))]
    theirs = [each.detach().clone().requires_grad_() for each in ours]
    upstream = inputs((2, 3, 5, 1, 4))[0]
    attend(scaled_dot_product_attention, *ours, mask)[0].backward(upstream)
    F.scaled_dot_product_attention(*theirs, attn_mask=mask).backward(upstream)
    for name, mine, other in zip(("query", "key", "value"), ours, theirs, strict=True):
        expect(
            mine.grad is not None,
            mistake=f"no gradient reaches the {name}",
            expected="a gradient",
            seen="None",
            hint="no .detach(), .data, .item() or torch.no_grad() on the way",
        )
        if not mine.grad.isfinite().all():
            wrong(
                f"the output is right, but the gradient of the {name} holds NaN: the empty row "
                "comes back in the backward pass",
                expected="finite gradients",
                seen=f"{int(mine.grad.isnan().sum())} of {mine.grad.numel()} are NaN",
                hint="masked_fill stops a gradient; adding -inf passes it on",
            )
        expect_close(mine.grad, other.grad, what=f"the gradient of the {name}")


@exercise_02_1.check("dtypes")
def dtypes(scaled_dot_product_attention: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs((1, 2, 3, 5, 8), dtype)
        output, _ = attend(scaled_dot_product_attention, q, k, v, open_mask(1, 3, 5))
        expect_equal(output.dtype, dtype, what="the output's dtype")
        expect_close(
            attend(scaled_dot_product_attention, q, k, v)[0],
            F.scaled_dot_product_attention(q, k, v),
            what=f"the output in {dtype}",
        )


def expect_mask(got: Any, want: Tensor, what: str, looks_like: Mapping[str, Tensor]) -> None:
    """Equal masks; a recognised wrong one is named."""
    expect(isinstance(got, Tensor), expected=f"{what} is a tensor", seen=type(got).__name__)
    expect_equal(
        got.dtype,
        torch.bool,
        what=f"{what}'s dtype",
        mistake="the mask is not boolean",
        hint="True = may be looked at; no 0 and -inf, no 0 and 1",
    )
    for words, mask in looks_like.items():
        if got.shape == mask.shape and torch.equal(got, mask):
            wrong(
                words,
                expected=f"{what} of shape {tuple(want.shape)}",
                seen=_apart(got, want),
            )
    expect_equal(
        tuple(got.shape),
        tuple(want.shape),
        what=f"{what}'s shape",
        mistake="the mask does not have the four dims of the scores",
    )
    expect(
        torch.equal(got, want),
        expected=f"{what} with {int(want.sum())} True at their places",
        seen=_apart(got, want),
    )


def _apart(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}"
    return f"{int((got != want).sum())} of {want.numel()} entries differ"


@exercise_02_2.check("tokens with padding")
def padding_values(padding_mask: Any) -> None:
    for pad_id, args in ((0, ()), (3, (3,))):
        tokens = torch.randint(1, 9, (3, 5), generator=fresh_generator())
        tokens[tokens == pad_id] = 8
        tokens[1, 3:], tokens[2, 1:], tokens[0, 0] = pad_id, pad_id, 3 - pad_id
        keep = tokens != pad_id
        looks_like = {
            "True marks the padding: it must mark what may be looked at": ~keep[:, None, None],
            "padding is masked as a query, not as a key": keep[:, None, :, None],
            "the mask is (B, S): it must broadcast to (B, H, T, S)": keep,
            "the mask is (B, 1, S): one dim short for (B, H, T, S)": keep[:, None],
            "padding is masked as query and as key, which leaves rows without any key": (
                keep[:, None, None] & keep[:, None, :, None]
            ),
        }
        if pad_id:
            looks_like["pad_id is not used: padding is looked for as 0"] = (tokens != 0)[
                :, None, None
            ]
        expect_mask(padding_mask(tokens, *args), keep[:, None, None], "the mask", looks_like)


@exercise_02_3.check("the lower triangle")
def triangle(causal_mask: Any) -> None:
    for length in (4, 1, 7):
        index = torch.arange(length)
        past = (index[None, :] <= index[:, None])[None, None]  # key <= query
        looks_like = {
            "it is the wrong way round: each word sees the words after it": past.mT,
            "True marks what is hidden: it must mark what may be looked at": ~past,
            "a word does not see itself: the diagonal belongs to it": past & ~past.mT,
            "the mask is (T, T): it must have the scores' four dims": past[0, 0],
        }
        if length == 1:  # a single word: right and wrong way round are the same
            looks_like = {}
        expect_mask(causal_mask(length), past, f"the mask of length {length}", looks_like)


@exercise_02_3.check("the device that is asked for")
def device(causal_mask: Any) -> None:
    # torch's "meta" device exists on every machine, and holds shapes without data.
    expect_equal(
        str(causal_mask(3, device="meta").device),
        "meta",
        what="the mask's device",
        mistake="the device argument is not used: on a GPU the mask would stay on the CPU",
    )


@exercise_02_4a.check("consecutive parts, position by position")
def split_values(split_heads: Any) -> None:
    for b, length, heads, k in ((2, 5, 3, 4), (1, 4, 4, 2), (3, 1, 2, 1)):
        x = torch.randn(b, length, heads * k, generator=fresh_generator())
        want = torch.stack(x.split(k, dim=-1), dim=1)
        expect_close(
            split_heads(x, heads),
            want,
            what=f"{(b, length, heads * k)} in {heads} heads",
            looks_like={
                "the right shape, but positions are mixed: reshape to (B, H, L, K) does not "
                "swap L and H": x.reshape(b, heads, length, k),
                "each head takes every H-th number instead of K consecutive ones": (
                    x.unflatten(-1, (k, heads)).permute(0, 3, 1, 2)
                ),
                "heads stand after positions: (B, L, H, K)": x.unflatten(-1, (heads, k)),
            },
        )


@exercise_02_4a.check("a d_model that cannot be split")
def split_error(split_heads: Any) -> None:
    expect_raises(
        ValueError,
        split_heads,
        torch.zeros(1, 2, 10),
        4,
        mentions=[10, 4],
        what="d_model 10 with 4 heads",
    )


@exercise_02_4b.check("the way back")
def combine_values(combine_heads: Any) -> None:
    for b, length, heads, k in ((2, 5, 3, 4), (1, 4, 4, 2), (3, 1, 2, 1)):
        x = torch.randn(b, heads, length, k, generator=fresh_generator())
        want = torch.cat(x.unbind(1), dim=-1)
        expect_close(
            combine_heads(x),
            want,
            what=f"{heads} heads of {k} side by side",
            looks_like={
                "the right shape, but positions are mixed: swap the dims before joining": (
                    x.reshape(b, length, heads * k)
                ),
                "the heads' numbers are interleaved: first numbers first, then second ones": (
                    x.permute(0, 2, 3, 1).reshape(b, length, heads * k)
                ),
            },
        )


def built(candidate: Any, d_model: int, heads: int, **options: Any) -> nn.Module:
    """The learner's module in float64, with the four projections that the contract names."""
    module = candidate(d_model, heads, **options)
    for name in ("w_q", "w_k", "w_v", "w_o"):
        part = getattr(module, name, None)
        expect(
            isinstance(part, nn.Linear),
            expected=f"{name} = nn.Linear({d_model}, {d_model})",
            seen=f"{name} is {type(part).__name__}",
            mistake=f"the projection {name} is missing",
        )
    total = sum(each.numel() for each in module.parameters())
    expect_equal(
        total,
        4 * (d_model**2 + d_model),
        what="the number of parameters",
        mistake="the parameters are not four projections of D x D with a bias each",
        hint="all heads share one nn.Linear(D, D) for each of w_q, w_k, w_v and w_o",
    )
    return module.double()


def twin_output(
    module: Any,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocked: Tensor | None = None,
) -> Tensor:
    """What nn.MultiheadAttention makes of the learner's weights; True in `blocked` hides a key."""
    d_model = query.shape[-1]
    twin = nn.MultiheadAttention(d_model, heads, batch_first=True, dtype=torch.float64)
    parts = [module.w_q, module.w_k, module.w_v]
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([each.weight for each in parts]))
        twin.in_proj_bias.copy_(torch.cat([each.bias for each in parts]))
        twin.out_proj.load_state_dict(module.w_o.state_dict())
        if blocked is not None:
            blocked = blocked.expand(-1, heads, -1, -1).flatten(0, 1)
        return twin(query, key, value, attn_mask=blocked)[0]


def variant(
    module: Any,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mixed: bool = False,
    scale: float | None = None,
    last: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    """The same computation with a mistake of one's choice."""
    size = query.shape[-1] // heads

    def split(x: Tensor) -> Tensor:
        if mixed:
            return x.reshape(len(x), heads, -1, size)
        return x.unflatten(-1, (heads, size)).transpose(1, 2)

    q, k, v = split(module.w_q(query)), split(module.w_k(key)), split(module.w_v(value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    joined = out.reshape(query.shape) if mixed else out.transpose(1, 2).flatten(2)
    return module.w_o(joined) if last else joined


def vectors(*shape: int) -> Tensor:
    """Random vectors in float64."""
    return torch.randn(*shape, generator=fresh_generator(), dtype=torch.float64)


@exercise_02_5.check("self-attention against nn.MultiheadAttention")
def self_attention(candidate: Any) -> None:
    for d_model, heads in ((12, 3), (8, 1), (6, 6)):
        module, x = built(candidate, d_model, heads), vectors(2, 5, d_model)
        args = (module, heads, x, x, x)
        expect_close(
            module(x, x, x),
            twin_output(*args),
            what=f"{heads} heads of {d_model}",
            looks_like={
                "w_o is not applied: the heads stand side by side and never mix": (
                    lambda args=args: variant(*args, last=False)
                ),
                "the scale is 1/sqrt(d_model): each head has only K = d_model / H numbers": (
                    lambda args=args, d=d_model: variant(*args, scale=d**-0.5)
                ),
                "there is one head over the whole vector": (
                    lambda args=args, x=x: variant(args[0], 1, x, x, x)
                ),
                "heads are cut and joined without a transpose: positions are mixed": (
                    lambda args=args: variant(*args, mixed=True)
                ),
            },
        )


@exercise_02_5.check("cross-attention: keys and values from elsewhere")
def cross_attention(candidate: Any) -> None:
    module = built(candidate, 12, 3)
    x, key, value = vectors(2, 5, 12), vectors(2, 5, 12), vectors(2, 5, 12)
    args = (module, 3)
    expect_close(
        module(x, key, value),
        twin_output(*args, x, key, value),
        what="cross-attention",
        looks_like={
            "keys and values are taken from the query": lambda: variant(*args, x, x, x),
            "the values are taken from the key": lambda: variant(*args, x, key, key),
            "the values are taken from the query": lambda: variant(*args, x, key, x),
        },
    )
    memory = vectors(2, 7, 12)
    expect_close(
        module(x, memory, memory),
        twin_output(*args, x, memory, memory),
        what="5 queries and 7 keys",
    )


@exercise_02_5.check("masks: padding, causal, both")
def masks(candidate: Any) -> None:
    x = vectors(2, 5, 12)
    keep = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
    past = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    for fused in (False, True):
        module = built(candidate, 12, 3, fused=fused)
        args = (module, 3, x, x, x)
        which = f"fused={fused}"
        got = module(x, x, x, keep)
        expect_close(
            got,
            twin_output(*args, ~keep.expand(2, 1, 5, 5)),
            what=f"padding, {which}",
            looks_like={"the mask is not used": lambda args=args: variant(*args)},
        )
        got = module(x, x, x, causal=True)
        expect_close(
            got,
            twin_output(*args, ~past.expand(2, 1, 5, 5)),
            what=f"causal, {which}",
            looks_like={"causal=True is not used": lambda args=args: variant(*args)},
        )
        got = module(x, x, x, keep, causal=True)
        expect_close(
            got,
            twin_output(*args, ~(past & keep)),
            what=f"both masks, {which}",
            looks_like={
                "with causal=True the mask is dropped: a key must pass both": (
                    lambda args=args: variant(*args, mask=past)
                ),
                "with a mask causal=True is dropped: a key must pass both": (
                    lambda args=args: variant(*args, mask=keep)
                ),
                "a key that passes one of the two masks is let through: use &, not |": (
                    lambda args=args: variant(*args, mask=past | keep)
                ),
            },
        )


@exercise_02_5.check("a sentence that is all padding")
def all_padding(candidate: Any) -> None:
    x = vectors(2, 4, 8)
    mask = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 4)
    for fused in (False, True):
        module = built(candidate, 8, 2, fused=fused)
        output = module(x, x, x, mask)
        expect(
            bool(output.isfinite().all()),
            mistake="a sentence without any key gives NaN",
            expected="w_o of zeros, which is its bias",
            seen=f"NaN, fused={fused}",
            hint=EMPTY_HINT,
        )
        expect_close(output[1], module.w_o.bias.expand(4, 8), what="the output of that sentence")


@exercise_02_5.check("dropout")
def dropout(candidate: Any) -> None:
    x = vectors(2, 6, 8)
    for fused in (False, True):
        module = built(candidate, 8, 2, dropout=0.5, fused=fused)
        expect(
            not torch.equal(module(x, x, x), module(x, x, x)),
            seen="no difference",
            expected="two calls in training that differ",
            mistake="dropout is not used",
        )
        module.eval()
        expect_close(
            module(x, x, x),
            twin_output(module, 2, x, x, x),
            what="the output in eval()",
            hint="dropout_p must be 0 unless self.training",
        )


@exercise_02_5.check("what the fused kernel keeps")
def cost(candidate: Any) -> None:
    module = built(candidate, 8, 2, fused=True)

    def kept(length: int, causal: bool) -> int:
        x = vectors(1, length, 8)
        parameters = tuple(module.parameters())
        return saved_bytes(lambda: module(x, x, x, causal=causal), ignore=parameters)

    for causal in (False, True):
        short, long = kept(128, causal), kept(256, causal)
        expect(
            long < 2.2 * short,
            mistake="with fused=True causal=True still puts a T x S mask in memory"
            if causal
            else "fused=True still keeps the T x S weights",
            expected="twice the saved bytes for twice the length",
            seen=f"{long / short:.2f} times, causal={causal}",
            hint="F.scaled_dot_product_attention; is_causal=True instead of a mask in memory",
        )


@exercise_02_5.check("a d_model that the heads cannot share")
def heads_error(candidate: Any) -> None:
    expect_raises(ValueError, candidate, 10, 4, mentions=[10, 4], what="d_model 10 with 4 heads")
