"""Lesson 19: what tells a right answer from a wrong one.

The oracle is the whole matrix in one product, and weights whose codes are known beforehand.
"""

import gc
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from lessons.lesson19_lora.laboratory import four_bits, layers
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, recognise
from shared.exercises.properties import expect_no_hooks
from shared.lora.adapter import Adapter
from shared.measuring.live import count_live_bytes

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def expect_refusal(said: str, mistake: str, mentions: str, hint: str = "") -> None:
    """A ValueError that names what was given."""
    recognise(
        {
            mistake: said == "",
            "the error is of the wrong kind": said.startswith("!"),
            "the error does not say what was given": mentions not in said,
        },
        expected=f"a ValueError that says {mentions}",
        seen=said or "no error",
        hint=hint,
    )


exercise_19_1 = checks_for(
    "19.1",
    name="LoRALinear",
    difficulty=1,
    minutes=10,
    hint="check_rank first; start_factors makes A and B; forward: F.linear twice, then scale.",
    forbidden=("peft.",),
)


@exercise_19_1.check("what is trained, how it starts, what is kept")
def parts(kind) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        linear = layers.make_linear(7, 5, dtype)
        before = linear.weight.detach().clone()
        layer = kind(linear, 3, 6.0)
        trained = {n for n, p in layer.named_parameters() if p.requires_grad}
        wanted = torch.promote_types(dtype, torch.float32)
        a, b = getattr(layer, "lora_a", None), getattr(layer, "lora_b", None)
        recognise(
            {
                "the layer is no Adapter: merge would not find it": not isinstance(layer, Adapter),
                "the frozen layer is trained as well": any("base" in n for n in trained),
                "the layer given is copied: base is that very layer": layer.base is not linear,
                "A or B is missing among what is trained": trained != {"lora_a", "lora_b"},
            },
            expected="an Adapter with base = linear, of which lora_a and lora_b are trained",
            seen=f"trained: {', '.join(sorted(trained))}",
        )
        expect_equal(tuple(a.shape), (3, 7), what="the shape of lora_a")
        expect_equal(tuple(b.shape), (5, 3), what="the shape of lora_b")
        recognise(
            {
                "A and B both begin at zero: neither ever gets a gradient": not a.any()
                and not b.any(),
                "A begins at zero and B is drawn: it is the other way round": not a.any(),
                "B does not begin at zero: the model has changed before a step": bool(b.any()),
                "A and B are in 16 bits: small steps of Adam are lost there": a.dtype != wanted,
                "the weight was written to": not torch.equal(linear.weight, before),
            },
            expected=f"A drawn, B zero, both in {wanted}",
            seen=f"largest |A| {a.abs().max():.2g}, |B| {b.abs().max():.2g}, {a.dtype}",
            hint="start_factors(weight, rank)",
        )


@exercise_19_1.check("values, gradients and dtypes")
def values(kind) -> None:
    for bias, alpha in ((True, 6.0), (False, 8.0)):
        linear = layers.make_linear(7, 5, torch.float64, bias)
        layer = kind(linear, 3, alpha)
        a, b = layers.fill(layer)
        x = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
        y, base = layer(x), linear(x)
        update = F.linear(F.linear(x, a), b)
        looks_like = {
            "the update lacks its scale alpha / rank": base + update,
            "the update is scaled by alpha alone": base + alpha * update,
            "the update is scaled by rank / alpha": base + 3 / alpha * update,
            "the scale is rsLoRA's: alpha / sqrt(rank), not alpha / rank": base
            + alpha / 3**0.5 * update,
            "the scale is a whole number: alpha 8 and rank 16 would be 0": base
            + alpha // 3 * update,
            "the frozen layer's own output is missing": alpha / 3 * update,
            "the update is missing": base,
        }
        want = base + alpha / 3 * update
        expect_close(y, want, what="the output", looks_like=looks_like, **EXACT)
        expect_no_hooks({"x": x, "lora_a": a, "lora_b": b})
        ours = torch.autograd.grad(y.square().sum(), [x, a, b], allow_unused=True)
        theirs = torch.autograd.grad(want.square().sum(), [x, a, b])
        for name, own, want in zip(("x", "lora_a", "lora_b"), ours, theirs, strict=True):
            recognise(
                {f"no gradient reaches {name}": own is None}, expected="a gradient", seen="None"
            )
            expect_close(own, want, what=f"the gradient of {name}", rtol=1e-10, atol=1e-10)
    layer = kind(layers.make_linear(7, 5, torch.bfloat16), 3, 6.0)
    layers.fill(layer)
    y = layer(torch.randn(2, 7, dtype=torch.bfloat16))
    expect_equal(y.dtype, torch.bfloat16, what="the output's dtype on a bf16 layer")
    y.float().square().sum().backward()
    expect_wide([layer.lora_a.grad, layer.lora_b.grad])


def expect_wide(grads) -> None:
    """Gradients of A and B that hold more than 16 bits."""
    recognise(
        {
            "A and B compute in 16 bits: cast x to their dtype, not them to that of x": all(
                each is not None and torch.equal(each, each.bfloat16().float()) for each in grads
            )
        },
        expected="gradients of A and B in float32",
        seen="float32 tensors of 16-bit numbers",
    )


@exercise_19_1.check("nothing of the weight's size is made; ranks that no update has")
def thin(kind) -> None:
    layer = kind(layers.make_linear(23, 19, torch.float32), 2, 4.0)
    layers.fill(layer)
    with layers.Largest() as seen:
        layer(torch.randn(3, 23, requires_grad=True)).sum().backward()
    made = {(19, 23), (23, 19)} & seen.shapes
    recognise(
        {"B A is made whole: a tensor of the weight's size, and its gradient": bool(made)},
        expected="two thin products: (x A^T) B^T",
        seen=f"a tensor of shape {made}",
    )
    for rank in (0, 20):
        linear = layers.make_linear(23, 19, torch.float32)
        said = layers.refused(lambda rank=rank, linear=linear: kind(linear, rank, 4.0))
        expect_refusal(said, f"a rank of {rank} on a layer of 19 x 23 is accepted", str(rank))
    said = layers.refused(lambda: kind(layers.make_linear(23, 19, torch.float32), 19, 4.0))
    recognise(
        {"a rank of min(d_in, d_out) is refused: it is the largest that will do": bool(said)},
        expected="rank 19 on a layer of 19 x 23",
        seen=said,
    )


exercise_19_2a = checks_for(
    "19.2a",
    name="add_lora",
    difficulty=3,
    minutes=25,
    hint=(
        "List the places first: [(n, m) for n, m in model.named_modules(remove_duplicate=False) if "
        "isinstance(m, nn.Linear) and (n == name or n.endswith('.' + name))]."
    ),
    forbidden=("peft.",),
)
MEANT = ["blocks.0.w_q", "blocks.1.w_q", "w_q"]


@exercise_19_2a.check("which layers, and what is trained")
def places(add_lora) -> None:
    model, tokens = layers.make_model(), torch.randint(10, (2, 4))
    before = model(tokens)
    wanted = [model.get_submodule(n) for n in MEANT]
    made = layers.Made([])
    names = add_lora(model, ["w_q"], 2, 3.0, made)
    found = [n for n, m in model.named_modules() if isinstance(m, layers.Plain)]
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    factors = {f"{n}.lora_{x}" for n in found for x in "ab"}
    recognise(
        {
            "the layers are not made by kind": not made.calls,
            "a part of a name counts as the name": any("new_w_q" in n for n in found)
            or any("w_q2" in n for n in found),
            "a layer at the top of the model is passed over": "w_q" not in found,
            "layers inside of others are passed over": "blocks.1.w_q" not in found,
            "what is not adapted is trained still": bool(trained - factors),
            "the adapters themselves are frozen": trained != factors,
        },
        expected=f"adapters at {MEANT}, and nothing else trained",
        seen=f"adapters at {found}; trained {len(trained)} parameters",
    )
    expect_equal(found, MEANT, what="the adapted layers")
    expect_equal(names, MEANT, what="what add_lora returns")
    expect_equal([c[1:] for c in made.calls], [(2, 3.0)] * 3, what="rank and alpha of each")
    same = all(c[0] is w for c, w in zip(made.calls, wanted, strict=True))
    expect(same, expected="kind is given the model's own layers, in order", seen="others")
    expect_close(model(tokens), before, what="the model's output before a step", **EXACT)


@exercise_19_2a.check("a layer at two places, whole names, refusals")
def edges(add_lora) -> None:
    model = layers.make_model()
    made = layers.Made([])
    names = add_lora(model, ["mlp.0", "shared"], 2, 3.0, made)
    one, two = (model.blocks[i].shared for i in (0, 1))
    recognise(
        {
            "a layer at two places gets an adapter at one alone": type(one) is not type(two),
            "a layer at two places gets two adapters": one is not two,
        },
        expected="one adapter at both places",
        seen=f"{type(one).__name__} and {type(two).__name__}, {len(made.calls)} made",
    )
    wanted = ["blocks.0.shared", "blocks.1.shared", "mlp.0"]
    recognise(
        {"they are in the order of the names": names == [wanted[2], *wanted[:2]]},
        expected="the layers in the model's order",
        seen=f"{names}",
    )
    expect_equal(names, wanted, what="the places")
    expect(len(made.calls) == 2, expected="two adapters made", seen=f"{len(made.calls)}")
    for what, names, rank, mentions in (
        ("a name that matches nothing", ["w_q", "q_proj"], 2, "q_proj"),
        ("a name that only an embedding has", ["w_q", "embedding"], 2, "embedding"),
        ("a name of what layers lie in", ["w_q", "blocks.0"], 2, "blocks.0"),
        ("a rank that one layer cannot have", ["w_q", "shared"], 7, "7"),
        ("a rank of 0", ["w_q"], 0, "0"),
    ):
        model = layers.make_model()
        before = layers.state(model)
        said = layers.refused(lambda m=model, n=names, r=rank: add_lora(m, n, r, 3.0, layers.Plain))
        hint = "look at all layers first: kind comes too late, and may not look at the rank at all"
        expect_refusal(said, f"{what} is accepted", mentions, hint)
        recognise(
            {"the model is changed before the refusal": layers.state(model) != before},
            expected="a model as it was",
            seen="other layers, or others that are trained",
        )


exercise_19_2b = checks_for(
    "19.2b",
    name="merge",
    difficulty=2,
    minutes=20,
    hint=(
        "Under torch.no_grad(): W.to(B.dtype) + scale * B @ A, then .to(W.dtype); a new nn.Linear "
        "gets it as nn.Parameter."
    ),
    forbidden=("peft.",),
)


@exercise_19_2b.check("the same outputs from plain layers")
def merges(merge) -> None:
    model, twin, tokens = layers.tuned_by_hand(lambda n: n.endswith(("w_q", "shared", "mlp.0")))
    want = twin(tokens)
    result = merge(model)
    left = [n for n, m in model.named_modules() if isinstance(m, Adapter)]
    recognise(
        {
            "merge returns another thing than the model": result is not model,
            "adapters are left in the model": bool(left),
        },
        expected="the model, with nn.Linear in the place of each adapter",
        seen=f"adapters at {left}, {type(result).__name__}",
    )

    def with_update(change):
        other = twin
        for each in {m for m in other.modules() if isinstance(m, Adapter)}:
            each.scale_before, each.scale = each.scale, change(each)
        y = other(tokens)
        for each in {m for m in other.modules() if isinstance(m, Adapter)}:
            each.scale = each.scale_before
        return y

    looks_like = {
        "the update is added without its scale": lambda: with_update(lambda m: 1.0),
        "the update is left out": lambda: with_update(lambda m: 0.0),
        "a layer at two places gets its update twice": lambda: torch.full_like(want, torch.nan),
    }
    expect_close(model(tokens), want, what="the merged output", looks_like=looks_like, **EXACT)
    expect_equal(
        model.blocks[0].shared is model.blocks[1].shared, True, what="one layer at two places"
    )
    kinds = {type(model.get_submodule(n)) for n in ("w_q", "mlp.0", "blocks.1.w_q")}
    expect_equal(kinds, {nn.Linear}, what="the types of the merged layers")
    expect_equal(list(model.state_dict()), list(layers.make_model().state_dict()), what="names")


@exercise_19_2b.check("tied weights, bf16")
def keeps(merge) -> None:
    model, twin, tokens = layers.tuned_by_hand(lambda n: n == "output")
    before = model.embedding.weight.detach().clone()
    want = twin(tokens)
    merge(model)
    recognise(
        {
            "the weight is changed in place: the tied embedding moves with it": not torch.equal(
                model.embedding.weight, before
            )
        },
        expected="a new tensor for the merged weight",
        seen="an embedding with other numbers",
    )
    expect_close(model(tokens), want, what="the output with a tied weight", **EXACT)
    got = getattr(model.output, "base", model.output).weight  # what is left has the update, too
    expect_close(got, twin.output.weight, what="the merged weight", **EXACT)
    linear = layers.make_linear(64, 64, torch.bfloat16)
    adapter = layers.Plain(linear, 8, 8.0)
    with torch.no_grad():
        for p in (adapter.lora_a, adapter.lora_b):
            p.normal_(std=0.1)
    update = adapter.lora_b @ adapter.lora_a
    want = (linear.weight.float() + update).bfloat16().detach()
    narrow = (linear.weight + update.bfloat16()).detach()
    got = merge(nn.Sequential(adapter))[0].weight
    recognise(
        {"the merged weight has another dtype": got.dtype != torch.bfloat16},
        expected="bf16, as the weight was",
        seen=f"{got.dtype}",
    )
    recognise(
        {
            "the update is rounded to 16 bits before it is added": not torch.equal(got, want)
            and torch.equal(got, narrow)
        },
        expected="the sum in float32, rounded once",
        seen=f"{int((got != want).sum())} of {got.numel()} numbers differ",
    )
    expect_close(got, want, what="the merged bf16 weight", rtol=0.0, atol=0.0)


@exercise_19_2b.check("a base that is no nn.Linear")
def other_base(merge) -> None:
    adapter = layers.Plain(layers.make_linear(6, 8, torch.float32), 2, 3.0)
    adapter.base = layers.Halved(adapter.base)
    got = merge(nn.Sequential(adapter))[0]
    recognise(
        {"an adapter is left whose base is no nn.Linear": isinstance(got, Adapter)},
        expected="an nn.Linear in its place: base has weight and bias, whatever it keeps them as",
        seen=type(got).__name__,
    )
    kind = type(got).__name__
    expect(isinstance(got, nn.Linear), expected="an nn.Linear in its place", seen=kind)


exercise_19_3a = checks_for(
    "19.3a",
    name="quantize_nf4",
    difficulty=3,
    minutes=30,
    hint=(
        "Pad the row with zeros to whole blocks, unflatten, abs().amax(1); divide where the scale "
        "is above zero."
    ),
    forbidden=("bitsandbytes.", "torch.ops.bitsandbytes"),
)


@exercise_19_3a.check("codes and scales of weights whose codes are known")
def codes(quantize_nf4) -> None:
    for numel, block in ((5 * 64, 64), (3 * 64 + 21, 64), (10 * 16, 16), (9, 64)):
        one = four_bits.planted(numel, block)
        weight = one.weight
        packed, scales = quantize_nf4(weight, block)
        num_blocks = -(-numel // block)
        recognise(
            {
                "one scale serves all blocks": scales.numel() == 1 and num_blocks > 1,
                "block is not looked at, but 64 is taken": block != 64
                and scales.numel() == -(-numel // 64),
                "codes are not two to a byte": packed.numel() == numel and numel > 1,
                "a block of zeros becomes NaN": bool(scales.isnan().any()),
            },
            expected=f"{-(-numel // 2)} bytes and {num_blocks} scales",
            seen=f"{packed.numel()} and {scales.numel()}",
        )
        looks_like = {
            "the scale is the largest weight, whatever its sign": four_bits.signed(weight, block),
            "the scale is a root mean square": four_bits.rms(weight, block),
        }
        expect_close(scales, one.scales, what="the scales", looks_like=looks_like)
        expect_equal(packed.dtype, torch.uint8, what="the codes' dtype")
        expect_equal(packed.numel(), -(-numel // 2), what="the number of bytes")
        got = four_bits.unpack(packed, numel)
        floor, others = one.floor(block), torch.ones(numel, dtype=torch.bool)
        others[block : 2 * block] = num_blocks < 3
        recognise(
            {
                "the halves of a byte are swapped": torch.equal(packed, one.packed(swapped=True))
                and not torch.equal(got, one.codes),
                "a block of zeros gets another level than 0": num_blocks > 2
                and bool((got[~others] != 7).any())
                and torch.equal(got[others], one.codes[others]),
                "weights are rounded down to a level, not to the nearest": not torch.equal(
                    got, one.codes
                )
                and torch.equal(got, floor),
                "levels are taken as evenly spaced": torch.equal(got, one.even(block))
                and not torch.equal(got, one.codes),
            },
            expected="the number of the nearest level",
            seen=f"{int((got != one.codes).sum())} of {numel} codes differ",
        )
        expect(
            torch.equal(got, one.codes),
            expected="the number of the nearest level for each weight",
            seen=f"{int((got != one.codes).sum())} of {numel} codes differ",
        )


@exercise_19_3a.check("matrices, dtypes")
def dtypes(quantize_nf4) -> None:
    one = four_bits.planted(6 * 32, 64)
    flat, matrix = quantize_nf4(one.weight), quantize_nf4(one.weight.view(6, 32))
    same = all(torch.equal(a, b) for a, b in zip(flat, matrix, strict=True))
    expect(
        same,
        expected="a matrix row by row, as one row, in blocks of 64",
        seen="other codes or scales",
        mistake="the rows of a matrix are quantized apart",
    )
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(130).to(dtype)
        for got, want in zip(quantize_nf4(weight), quantize_nf4(weight.float()), strict=True):
            recognise(
                {
                    "scales of 16-bit weights are kept in 16 bits": got.dtype != want.dtype,
                    "16-bit weights are divided in 16 bits": not torch.equal(got, want),
                },
                expected="what the same weights in float32 give",
                seen=f"other {'codes' if want.dtype == torch.uint8 else 'scales'}, in {got.dtype}",
            )
    for dtype in (torch.float64, torch.int32):
        said = layers.refused(lambda dtype=dtype: quantize_nf4(torch.ones(64).to(dtype)))
        expect_refusal(said, f"{dtype} is accepted", str(dtype))


exercise_19_3b = checks_for(
    "19.3b",
    name="double_quantize",
    difficulty=2,
    minutes=20,
    hint=(
        "scales - mean, padded to whole blocks of 256; a block's largest absolute value / 448 is "
        "its range. Divide where it is above zero, .to(torch.float8_e4m3fn)."
    ),
    forbidden=("bitsandbytes.",),
)


@exercise_19_3b.check("ranges, mean and what comes back")
def doubles(double_quantize) -> None:
    for numel, block in ((1024, 256), (600, 256), (40, 256), (600, 32)):
        scales = four_bits.scales_like(numel)
        given = () if block == 256 else (block,)
        eighths, ranges, mean = double_quantize(scales, *given)
        centred = scales - scales.mean()
        want = four_bits.ranges_of(centred, block)
        right = bool(((mean - scales.mean()).abs() < 1e-4).all())
        recognise(
            {
                "the scales are not kept in torch.float8_e4m3fn": eighths.dtype
                != torch.float8_e4m3fn,
                "the mean is not subtracted: half of all 8-bit floats are never used": (
                    not mean.any() or (right and bool((eighths.float() >= 0).all()))
                ),
                "one range serves all blocks": ranges.numel() == 1 and numel > block,
                "block is not looked at, but 256 is taken": block != 256
                and ranges.numel() == -(-numel // 256),
            },
            expected=f"8-bit floats of both signs, a range for each block of {block}",
            seen=f"{eighths.dtype}, {ranges.numel()} ranges",
        )
        expect_equal(tuple(mean.shape), (1,), what="the mean's shape")
        filled = scales.sum().reshape(1) / (-(-numel // block) * block)
        looks_like = {"the zeros that fill up the last block are averaged as well": filled}
        looks_like = looks_like if numel % block else {}
        expect_close(mean, scales.mean().reshape(1), what="the mean", looks_like=looks_like)
        looks_like = {
            "the range is not divided by 448: 8 bits hold numbers up to 1 alone": 448 * want,
            "the range is of signed numbers, not of absolute values": four_bits.ranges_of(
                centred.clamp(min=0), block
            ),
            "filled up with zeros before the mean is subtracted: they count as -mean": (
                four_bits.ranges_of(F.pad(scales, (0, -numel % block)) - scales.mean(), block)
            ),
        }
        expect_close(ranges, want, what="the ranges", looks_like=looks_like, rtol=1e-5, atol=1e-9)
        expect_equal(eighths.numel(), numel, what="the number of 8-bit floats")
        back = eighths.float() * ranges.repeat_interleave(block)[:numel] + mean
        bound = (centred.abs() / 16 + want.repeat_interleave(block)[:numel] / 512 + 1e-5).amax()
        expect(
            bool((back - scales).abs().amax() <= bound),
            expected="each scale within a sixteenth of its distance from the mean",
            seen=f"off by {(back - scales).abs().amax():.3g}",
        )


@exercise_19_3b.check("scales that are all the same")
def equal(double_quantize) -> None:
    for scales in (torch.full((3,), 0.5), torch.tensor([2.0]), torch.zeros(4)):
        eighths, ranges, mean = double_quantize(scales)
        recognise(
            {"where all scales are the mean, 0 / 0 is NaN": bool(eighths.float().isnan().any())},
            expected="zeros, and a range of 0",
            seen=f"{eighths.float().tolist()}",
        )
        back = eighths.float() * ranges.repeat_interleave(256)[: len(scales)] + mean
        expect_close(back, scales, what="equal scales, back again")


exercise_19_4 = checks_for(
    "19.4",
    name="QLoRALinear",
    difficulty=3,
    minutes=30,
    hint=(
        "A torch.autograd.Function with forward(ctx, x, base): ctx.base = base (a module, no "
        "tensor), F.linear(x, base.dequantize(x.dtype))."
    ),
    forbidden=("bitsandbytes.", "peft."),
)


@exercise_19_4.check("values and gradients")
def quantized(kind) -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    for bias, held_in, dtype in (
        (True, f32, f32), (False, f32, f32), (True, bf16, bf16), (False, bf16, f32)
    ):  # fmt: skip
        linear = layers.make_linear(64, 40, held_in, bias)
        layer = kind(linear, 3, 6.0)
        trained = {n for n, p in layer.named_parameters() if p.requires_grad}
        held = {x.data_ptr() for x in [*layer.parameters(), *layer.buffers()]}
        recognise(
            {
                "the layer is no Adapter: merge would not find it": not isinstance(layer, Adapter),
                "the whole weight is kept beside its codes": linear.weight.data_ptr() in held,
                "something frozen is trained": trained != {"lora_a", "lora_b"},
            },
            expected="an Adapter: base = NF4Weight(linear), and lora_a, lora_b trained",
            seen=f"trained: {sorted(trained)}",
        )
        a, b = layers.fill(layer)
        x = torch.randn(2, 4, 64, dtype=dtype, requires_grad=True)
        y = layer(x)
        expect_no_hooks({"x": x, "lora_a": a, "lora_b": b})
        pull = torch.randn(y.shape).to(dtype)
        ours = torch.autograd.grad(y, [x, a, b], pull, allow_unused=True)
        if dtype == bf16:
            expect_wide(ours[1:])
        whole, true = layer.base.dequantize(dtype), linear.weight.to(dtype)
        own = torch.zeros(40, dtype=dtype) if linear.bias is None else linear.bias.to(dtype)
        update = F.linear(F.linear(x.to(a.dtype), a), b)
        want = (F.linear(x, whole) + own + 2 * update).to(dtype)
        looks_like = {
            "the update lacks its scale alpha / rank": (F.linear(x, whole) + own + update),
            "the bias is missing": (want - own).to(dtype),
            "the weight is not the four-bit one": F.linear(x, true) + own + 2 * update,
        }
        if held_in != dtype:
            rounded = F.linear(x, layer.base.weight.to(dtype)) + own + 2 * update
            looks_like["the weight is rounded to the dtype that it had, not to x's"] = rounded
        loose = {"rtol": 3e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
        expect_close(y, want, what="the output", looks_like=looks_like, **loose)
        theirs = torch.autograd.grad(want, [x, a, b], pull)
        through_b = torch.autograd.grad(
            (2 * F.linear(F.linear(x.to(a.dtype), a), b)).to(dtype), x, pull
        )
        for name, mine, right in zip(("x", "lora_a", "lora_b"), ours, theirs, strict=True):
            recognise(
                {f"no gradient reaches {name}": mine is None}, expected="a gradient", seen="None"
            )
            words = {}
            if name == "x":
                words["x gets the adapter's gradient alone: layers below learn from a part"] = (
                    through_b[0]
                )
            bounds = {"rtol": 5e-2, "atol": 0.3} if dtype == torch.bfloat16 else {"atol": 1e-4}
            what = f"the gradient of {name}"
            expect_close(mine, right, what=what, looks_like=words, **bounds)


@exercise_19_4.check("what is kept between forward and backward, and ranks that no update has")
def keeps_little(kind) -> None:
    linear = layers.make_linear(256, 192, torch.float32)
    layer = kind(linear, 2, 4.0)
    layers.fill(layer)
    x = torch.randn(3, 256, requires_grad=True)
    size, given = linear.weight.nbytes, weakref.ref(linear.weight)
    numel = linear.weight.numel()
    del linear
    with count_live_bytes() as live:
        y = layer(x)
        gc.collect()  # a node of autograd may be in a circle
        kept = live.now() - y.nbytes
    own = sum(t.nbytes for t in [*layer.parameters(), *layer.buffers()])
    extra = [
        t for m in layer.modules() for t in vars(m).values()
        if isinstance(t, torch.Tensor) and t.numel() >= numel
    ]  # fmt: skip
    recognise(
        {
            "the dequantized weight is made once and kept": bool(extra) or own > size / 2,
            "autograd keeps the dequantized weight until backward, or B A": kept > size / 2,
            "the layer given is kept, with its whole weight": given() is not None,
        },
        expected="inputs and thin products kept: a hundredth of the weight's bytes or two",
        seen=f"{kept} bytes for backward, {own} in the layer, {size} of the weight",
        hint="a torch.autograd.Function that keeps `base` in ctx and dequantizes in backward again",
    )
    for rank in (0, 193):
        said = layers.refused(
            lambda rank=rank: kind(layers.make_linear(256, 192, torch.float32), rank, 4.0)
        )
        expect_refusal(said, f"a rank of {rank} on a layer of 192 x 256 is accepted", str(rank))
