"""What tells a right answer of lesson 03 from a wrong one; the oracle is torch.nn's Transformer.

The answer's weights are made random and copied into torch's own layers, which must give the same
output and the same gradients. What a mistake would give is wired from the same parts.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.lesson03_transformer.laboratory import layers as lab
from lessons.lesson03_transformer.laboratory import mistaken_layers as mistaken
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.properties import expect_by_hand, expect_gradients, functions_called
from shared.exercises.seeds import fresh_generator, fresh_seed, seed_all
from shared.model.config import Norm, TransformerConfig

exercise_03_1 = checks_for(
    "03.1",
    name="LayerNorm",
    difficulty=2,
    minutes=15,
    hint=(
        "mean(dim=-1, keepdim=True) keeps the dim, so that x - mean broadcasts. The variance "
        "divides by d_model, not by d_model - 1."
    ),
    forbidden=(
        *(f"torch.nn.{kind}Norm" for kind in ("Layer", "Batch", "Group", "Instance", "RMS")),
        *(f"torch.nn.functional.{kind}_norm" for kind in ("layer", "batch", "group", "instance")),
        "torch.nn.functional.rms_norm",
    ),
)
exercise_03_2 = checks_for(
    "03.2",
    name="PositionwiseFeedForward",
    difficulty=1,
    minutes=10,
    hint="linear1 goes from d_model to d_ff, linear2 back. Where is d_ff wide? Drop out there.",
    forbidden=("torch.nn.Transformer",),
)
exercise_03_3 = checks_for(
    "03.3",
    name="EncoderLayer",
    difficulty=3,
    minutes=20,
    hint=(
        "Write the post-LN forward first: x = norm1(x + attention(x)), x = norm2(x + ffn(x)). "
        "Then move the norms to where the sub-layers read, and leave x itself alone."
    ),
    forbidden=("torch.nn.TransformerEncoderLayer",),
)
exercise_03_4 = checks_for(
    "03.4",
    name="DecoderLayer",
    difficulty=3,
    minutes=20,
    hint=(
        "Three sub-layers now. Ask of each attention: where do the queries come from, where do "
        "the keys come from, and what must not be seen?"
    ),
    forbidden=("torch.nn.TransformerDecoderLayer",),
)
exercise_03_5 = checks_for(
    "03.5",
    name="Transformer",
    difficulty=4,
    minutes=40,
    hint=(
        "Embed (times sqrt(d_model)), add positions, go through the layers, norm if the layers "
        "are pre-LN, project. encode and decode are those lines; forward is one line."
    ),
    forbidden=("torch.nn.Transformer",),
)
exercise_03_6 = checks_for(
    "03.6",
    name="count_parameters",
    difficulty=2,
    minutes=15,
    hint="Write down one attention, one feed-forward and one norm; then count how many of each.",
)

Rows = dict[str, Tensor | Callable[[], Tensor]]  # what a mistake is called, and what it gives

# 03.1


@exercise_03_1.check("the parameters")
def norm_parameters(answer) -> None:
    norm = answer(7)
    names = {name: tuple(each.shape) for name, each in norm.named_parameters()}
    expect(
        names == {"weight": (7,), "bias": (7,)},
        mistake="weight and bias are not the two trained parameters of the layer",
        expected="parameters weight (7,) and bias (7,)",
        seen=f"{names}",
        hint="self.weight = nn.Parameter(torch.ones(d_model)); a plain tensor is not trained.",
    )
    expect_close(norm.weight, torch.ones(7), what="weight at the start")
    expect_close(norm.bias, torch.zeros(7), what="bias at the start")


@exercise_03_1.check("values on random inputs")
def norm_values(answer) -> None:
    for shape, eps in [((2, 5, 12), 1e-5), ((3, 7), 0.5), ((2, 3, 4, 6), 1e-3)]:
        norm, x = lab.randomised(answer(shape[-1], eps=eps)), lab.wide(*shape)
        weight, bias = (each.detach().clone() for each in (norm.weight, norm.bias))
        expect_close(
            norm(x),
            F.layer_norm(x, shape[-1:], weight, bias, eps),
            what=f"LayerNorm of {shape}",
            looks_like=mistaken.norm_mistakes(x, weight, bias, eps),
        )
        other = lab.wide(*shape)
        want = F.layer_norm(other, shape[-1:], weight, bias, eps)
        what, hint = "another input in eval()", "nothing is kept from one call to the next"
        expect_close(norm.eval()(other), want, what=what, hint=hint)


@exercise_03_1.check("edges, gradients, by hand")
def norm_edges(answer) -> None:
    got = answer(6)(torch.full((2, 6), 3.0))
    expect_close(got, torch.zeros(2, 6), what="LayerNorm of a constant vector")
    vector, far = lab.wide(5), lab.wide(3, 5) + 1e8
    want = F.layer_norm(vector, (5,))
    expect_close(answer(5).double()(vector), want, what="LayerNorm of one vector, (d_model,)")
    want, hint = (
        F.layer_norm(far, (5,)),
        "E[x^2] - E[x]^2 loses all digits: take the mean off first",
    )
    what = "values near 1e8"
    expect_close(answer(5).double()(far), want, what=what, hint=hint, atol=1e-4, rtol=0)
    x, hint = (
        lab.wide(3, 5).requires_grad_(),
        "Mean and variance depend on x, too: no detach there.",
    )
    for training in (True, False):
        norm = lab.randomised(answer(5, eps=1e-3)).train(training)
        want = F.layer_norm(x, (5,), norm.weight, norm.bias, 1e-3)
        leaves = {"x": x, **dict(norm.named_parameters())}
        expect_gradients(norm(x), want, leaves, "the normed x", hint)
    expect_by_hand(lambda: norm(x), "layer_norm", what="LayerNorm")


# 03.2


@exercise_03_2.check("the two projections")
def ffn_parts(answer) -> None:
    ffn = answer(6, 10)
    for name, up, down in [("linear1", 6, 10), ("linear2", 10, 6)]:
        linear = lab.part(ffn, name, nn.Linear)
        expect_equal(
            (linear.in_features, linear.out_features),
            (up, down),
            what=f"sizes of {name}",
            mistake=f"{name} does not go from {up} to {down} features",
        )
    count = 2 * 6 * 10 + 10 + 6
    expect_equal(
        lab.num_parameters(ffn), count, what="number of parameters", mistake="a bias is off"
    )


@exercise_03_2.check("values on random inputs")
def ffn_values(answer) -> None:
    for shape, d_ff in [((2, 5, 6), 11), ((3, 4), 4)]:
        ffn, x = lab.randomised(answer(shape[-1], d_ff)), lab.wide(*shape)
        up, down = copy.deepcopy(ffn.linear1), copy.deepcopy(ffn.linear2)
        want, got = down(F.relu(up(x))), ffn(x)
        recognise(
            {
                "values are dropped although dropout is 0: its rate is not used": bool(
                    (got - ffn(x)).any()
                )
            },
            expected="two calls that agree, with dropout=0",
            seen="they differ",
        )
        expect_close(
            got,
            want,
            what=f"feed-forward of {shape}",
            looks_like={
                "there is no ReLU between the projections: two linear maps are one": down(up(x)),
                "the ReLU comes after the second projection": F.relu(down(up(x))),
                "there is a ReLU after the second projection as well": F.relu(want),
                "the activation is GELU; the paper's is ReLU": down(F.gelu(up(x))),
                "the activation is a leaky ReLU; the paper's is ReLU": down(F.leaky_relu(up(x))),
                "the ReLU comes first, before linear1": down(up(F.relu(x))),
                "the residual connection is the layer's business, not this module's": x + want,
            },
        )
        ffn.train(d_ff == 4)
        want = ffn.linear2(F.relu(ffn.linear1(x.requires_grad_())))
        expect_gradients(ffn(x), want, {"x": x, **dict(ffn.named_parameters())}, "the output")


@exercise_03_2.check("where dropout acts")
def ffn_dropout(answer) -> None:
    ffn = lab.network_of_ones(answer)
    seed_all(fresh_seed())
    levels = {round(value, 3) for value in ffn(torch.ones(1, 400)).flatten().tolist()}
    recognise(
        {
            "dropout acts on the output, after linear2; here it belongs after the ReLU": (
                levels == {0.0, 2.5}
            ),
            "dropout acts on the input, before linear1; here it belongs after the ReLU": (
                levels == {1.5, 2.125}
            ),
            "dropout is not used": levels == {2.0},
            "the rate is 0.5 whatever `dropout` says": levels == {1.0, 3.0},
            "what is kept is not divided by 1 - p": levels == {1.0, 2.0},
            "whole positions are dropped: each number is to be drawn": levels in ({1.0}, {2.25}),
            "dropout does not act once, on the hidden units": levels != {1.0, 2.25},
        },
        expected="with dropout=0.2 hidden units of 1 become 0 or 1.25, outputs 1 or 2.25",
        seen=f"outputs {sorted(levels)[:5]}",
        hint="nn.Dropout(dropout) after the ReLU; the layer drops its sub-layers' outputs (03.3).",
    )
    several = ffn(torch.ones(2, 3, 400)).flatten(0, 1)
    recognise(
        {
            "all positions lose the same hidden units: each number is to be drawn": (
                torch.equal(several[0], several[1]) or torch.equal(several[0], several[3])
            ),
        },
        expected="other hidden units at each position",
        seen="the same",
        hint="nn.Dropout draws for every number; do not give it a smaller tensor",
    )
    out, hint = ffn.eval()(torch.ones(1, 400)), "F.dropout must be told: training=self.training"
    expect_close(out, torch.full((1, 400), 2.0), what="output in eval mode", hint=hint)


# 03.3

LAYER = TransformerConfig(11, d_model=12, num_heads=3, num_layers=1, d_ff=20, dropout=0.0)
ATTENTION, NETWORK, NORM = 4 * (12 * 12 + 12), 2 * 12 * 20 + 20 + 12, 2 * 12


def expect_size(layer, others: int, incomplete: str) -> None:
    """So many parameters as its parts have: the network's, and the others'."""
    four = 2 * 12 * 48 + 48 + 12
    got = lab.num_parameters(layer)
    expect_equal(
        got,
        others + NETWORK,
        what="number of parameters",
        mistake=incomplete if got < others + NETWORK else "",
        looks_like={"the network is 4 d_model wide: config.d_ff is its width": others + four},
    )


@exercise_03_3.check("the parts")
def encoder_parts(answer) -> None:
    layer = answer(LAYER)
    for name in ("self_attention", "feed_forward", "norm1", "norm2"):
        lab.part(layer, name)
    expect_size(
        layer,
        ATTENTION + 2 * NORM,
        "the layer has not one attention, one feed-forward and two norms",
    )


def expect_encoder(answer, norm: Norm) -> None:
    config = replace(LAYER, norm=norm)
    layer = lab.randomised(answer(config)).train(norm == "pre")
    twin, x, padding = lab.LayerTwin(layer, config), lab.wide(2, 5, 12), lab.real_tokens([5, 3])
    cases = {
        "no mask": (None, False),
        "a padding mask": (padding, False),
        "causal=True": (None, True),
        "causal=True and a padding mask": (padding, True),
        "a mask of each query": (lab.all_but_one(5), False),
    }
    for words, (mask, causal) in cases.items():
        expect_close(
            layer(x, mask, causal),
            twin.encoded(x, lab.both(mask, causal, 5)),
            what=f"{norm}-LN encoder layer with {words}, training={layer.training}",
            looks_like=encoder_mistakes(twin, x, mask, causal),
        )


@exercise_03_3.check("post-LN, the paper's order")
def encoder_post(answer) -> None:
    expect_encoder(answer, "post")


@exercise_03_3.check("pre-LN")
def encoder_pre(answer) -> None:
    expect_encoder(answer, "pre")


def encoder_mistakes(twin: lab.LayerTwin, x: Tensor, mask: Tensor | None, causal: bool) -> Rows:
    wired, (first, second, _) = partial(twin.wired, x), twin.norms
    seen = lab.both(mask, causal, 5)

    def look(h: Tensor) -> Tensor:
        return twin.own(h, h, seen)

    def through(other: Tensor | None) -> Tensor:
        return wired(lambda h: twin.own(h, h, other))

    beside = second(first(x + look(x)) + twin.network(x))
    if twin.kind == "pre":
        beside = x + look(first(x)) + twin.network(second(x))
    return {
        f"config.norm is {twin.kind!r}, and the layer computes the other kind": (
            wired(look, wrap=twin.other_kind)
        ),
        "causal=True does not reach the attention": through(mask if causal else seen),
        "the mask is dropped where causal=True": through(lab.triangle(5) if causal else seen),
        "the mask is not passed to the attention": through(None),
        "the attention is causal, whatever `causal` says": through(lab.both(mask, True, 5)),
        "the mask is turned round: True marks what may be looked at": through(
            lab.both(mask if mask is None else ~mask, causal, 5)
        ),
        "the layer's output is normed once more: a pre-LN stack has its norm at the end": (
            second(wired(look))
        ),
        "one query's mask serves all queries": through(mask if mask is None else mask[:, :, :1]),
        "the residual adds norm(x): in pre-LN it adds x itself": (
            wired(look, wrap=lambda h, norm, sublayer: norm(h) + sublayer(norm(h)))
        ),
        "the sub-layer's output is normed before it is added: x + norm(sublayer(x))": (
            wired(look, wrap=lambda h, norm, sublayer: h + norm(sublayer(h)))
        ),
        "the residual connections are missing": wired(look, wrap=twin.no_residual),
        "norm1 is used for both sub-layers": wired(look, norms=[first, first]),
        "norm1 and norm2 are exchanged: they stand in the order of use": (
            wired(look, norms=[second, first])
        ),
        "the feed-forward reads the layer's input: attention has not been added to it": beside,
        "in pre-LN only the queries are normed: keys and values are, too": (
            wired(lambda h: twin.own(first(h), h, seen), norms=[nn.Identity(), second])
        ),
        **mistaken.one_sublayer(twin, x, {"attention": look, "feed-forward": twin.network}),
    }


@exercise_03_3.check("gradients")
def encoder_gradients(answer) -> None:
    for norm in ("pre", "post"):
        config = replace(LAYER, norm=norm)
        layer, x = lab.randomised(answer(config)), lab.wide(2, 4, 12).requires_grad_()
        want, leaves = (
            lab.through_engine(layer, config, x),
            {"x": x, **dict(layer.named_parameters())},
        )
        expect_gradients(layer.train(norm == "post")(x), want, leaves, "the output")


@exercise_03_3.check("where dropout acts, and what the parts are given")
def encoder_dropout(answer) -> None:
    expect_dropout(answer, sublayers=2)


def expect_dropout(answer, sublayers: int) -> None:
    """In pre-LN a value that every sub-layer drops comes out as it went in: chance p each."""
    want = 0.3**sublayers
    for pre in (True, False):
        config = replace(LAYER, norm="pre" if pre else "post", dropout=0.3, d_ff=8)
        layer = answer(config)
        inputs = lab.layer_inputs(layer)
        out, again = layer.train()(*inputs), layer(*inputs)
        passed = (out == inputs[0]).float().mean().item()
        first, second = layer.eval()(*inputs), layer(*inputs)
        expect_close(first, second, what="a second call in eval mode", hint="use nn.Dropout")
        silent = lab.silenced(layer)
        touched = not torch.allclose(silent(*inputs), silent.train()(*inputs))
        recognise(
            {
                "dropout acts on the sum x + sublayer(x): the stream must stay whole": touched,
                "dropout is missing on a sub-layer's output": (
                    pre and (torch.equal(out, again) or passed < want / 4)
                ),
                "with post-LN no sub-layer's output is dropped": torch.equal(out, again),
                "the rate is 0.5 whatever config.dropout says": (
                    pre and abs(passed - 0.5**sublayers) < 0.03
                ),
                "dropout does not act once on each sub-layer's output": (
                    pre and abs(passed - want) > want / 4
                ),
            },
            expected=f"with dropout=0.3, {100 * want:.1f} % of values pass a pre-LN layer as is"
            if pre
            else "dropout on each sub-layer's output, and never on the sum",
            seen=f"{100 * passed:.1f} % do" if pre else "something else in post-LN",
        )
        for name in ("self_attention", "cross_attention", "feed_forward"):
            expect_dropped(answer(config), name, inputs)
    expect_settings(answer)


def expect_dropped(layer: nn.Module, name: str, inputs: tuple[Tensor, ...]) -> None:
    """Two calls in training differ where this sub-layer alone gives anything but zeros."""
    if not hasattr(layer, name):
        return
    alone = lab.silenced(layer, but=name).train()
    expect(
        not torch.equal(alone(*inputs), alone(*inputs)),
        mistake="dropout is missing on the output of one sub-layer",
        expected=f"dropout on the output of {name}",
        seen="two calls in training that agree, where it alone adds anything",
    )


def expect_settings(answer) -> None:
    """The parts drop out at inner_dropout, and attention is fused where the configuration says."""
    x = torch.randn(2, 5, 12)
    for draws, config in enumerate(
        (replace(LAYER, dropout=0.3), replace(LAYER, inner_dropout=0.3))
    ):
        layer, given = answer(config).train(), {"feed_forward": 1, "self_attention": 3}
        given |= {"cross_attention": 3} if hasattr(layer, "cross_attention") else {}
        for name, number in given.items():
            part, args = getattr(layer, name), [x] * number
            expect(
                torch.equal(part(*args), part(*args)) != bool(draws),
                mistake=f"{name} does not take its dropout from config.inner_dropout",
                expected=f"with dropout={config.dropout} and inner_dropout={config.inner_dropout} "
                f"two calls of {name} that {'differ' if draws else 'agree'}",
                seen="they agree" if draws else "they differ",
            )
    for fused in (True, False):
        layer = answer(replace(LAYER, fused=fused))
        called = functions_called(partial(layer, *lab.layer_inputs(layer)))
        expect(
            ("scaled_dot_product_attention" in called) == fused,
            mistake="config.fused does not reach the attention",
            expected=f"with fused={fused} the kernel is {'' if fused else 'not '}called",
            seen=f"it is {'not ' if fused else ''}called",
        )


# 03.4


@exercise_03_4.check("the parts")
def decoder_parts(answer) -> None:
    layer = answer(LAYER)
    for name in ("self_attention", "cross_attention", "feed_forward", "norm1", "norm2", "norm3"):
        lab.part(layer, name)
    expect(
        layer.self_attention is not layer.cross_attention,
        mistake="both attentions are one module, and share their weights",
        expected="two attentions",
        seen="self_attention is cross_attention",
    )
    expect_size(
        layer,
        2 * ATTENTION + 3 * NORM,
        "the layer has not two attentions, one feed-forward and three norms",
    )


def expect_decoder(answer, norm: Norm) -> None:
    config = replace(LAYER, norm=norm)
    layer = lab.randomised(answer(config)).train(norm == "pre")
    twin, x, padded = lab.LayerTwin(layer, config), lab.wide(2, 5, 12), lab.real_tokens([5, 2])
    each = lab.all_but_one(5)
    cases = {"no mask": None, "a padded memory": padded, "a mask of each target": each}
    memory = lab.wide(2, 5, 12)
    for words, mask in cases.items():
        earlier, memory = memory, lab.wide(2, 5, 12)
        expect_close(
            layer(x, memory, mask),
            twin.decoded(x, memory, mask),
            what=f"{norm}-LN decoder layer with {words}, training={layer.training}",
            looks_like={
                "the memory of an earlier call is used again": (
                    partial(twin.decoded, x, earlier, mask)
                ),
                **decoder_mistakes(twin, x, memory, mask),
            },
        )
    short = memory[:, :3]
    want = twin.decoded(x, short)
    expect_close(layer(x, short), want, what="decoder layer with a memory of another length")


@exercise_03_4.check("post-LN, the paper's order")
def decoder_post(answer) -> None:
    expect_decoder(answer, "post")


@exercise_03_4.check("pre-LN")
def decoder_pre(answer) -> None:
    expect_decoder(answer, "pre")


def decoder_mistakes(twin: lab.LayerTwin, x: Tensor, memory: Tensor, mask: Tensor | None) -> Rows:
    wired, own, cross, past = partial(twin.wired, x), twin.own, twin.cross, lab.triangle(5)
    first, second, third = twin.norms
    both = past if mask is None else past & mask

    def back(h: Tensor) -> Tensor:
        return own(h, h, past)

    def look(h: Tensor) -> Tensor:
        return cross(h, memory, mask)

    def blind(h: Tensor) -> Tensor:
        return cross(h, memory)

    parts = {"self-attention": back, "cross-attention": look, "feed-forward": twin.network}

    return {
        f"config.norm is {twin.kind!r}, and the layer computes the other kind": (
            wired(back, look, wrap=twin.other_kind)
        ),
        "self-attention is not causal: it sees the words that it is to predict": (
            wired(lambda h: own(h, h), look)
        ),
        "memory_mask is not passed to the cross-attention: padding is attended": (
            wired(back, blind)
        ),
        "memory_mask went to the self-attention, where the keys are targets": (
            wired(lambda h: own(h, h, both), blind)
        ),
        "memory_mask is used in the self-attention as well, where the keys are targets": (
            wired(lambda h: own(h, h, both), look)
        ),
        "the cross-attention is causal: every target position may see the whole source": (
            wired(back, lambda h: cross(h, memory, both))
        ),
        "one target's memory_mask serves all targets": (
            wired(back, lambda h: cross(h, memory, mask if mask is None else mask[:, :, :1]))
        ),
        "the cross-attention looks at x, not at the memory": wired(back, lambda h: cross(h, h)),
        "the memory is normed again with norm2": (
            wired(back, lambda h: cross(h, twin.norms[1](memory), mask))
        ),
        "the memory comes first: self-attention is the first sub-layer": wired(look, back),
        "the memory comes first, with norm2: self-attention, with norm1, belongs before it": (
            wired(look, back, norms=[second, first, third])
        ),
        "the cross-attention's queries come from the memory, its keys from x": (
            wired(back, lambda h: cross(memory, h))
        ),
        "the mask is turned round: True marks what may be looked at": (
            wired(back, lambda h: cross(h, memory, mask if mask is None else ~mask))
        ),
        **decoder_norm_mistakes(twin, x, back, look),
        **mistaken.one_sublayer(twin, x, parts),
    }


def decoder_norm_mistakes(
    twin: lab.LayerTwin, x: Tensor, back: lab.Sublayer, look: lab.Sublayer
) -> Rows:
    """The decoder layer with right sub-layers, and a norm in the wrong place."""
    wired, (first, second, third) = partial(twin.wired, x, back, look), twin.norms
    return {
        "norm2 and norm3 are exchanged: they stand in the order of use": (
            wired(norms=[first, third, second])
        ),
        "norm2 serves the feed-forward as well, in norm3's place": (
            wired(norms=[first, second, second])
        ),
        "the layer's output is normed once more: a pre-LN stack has its norm at the end": (
            third(wired())
        ),
        "norm1 serves all three sub-layers": wired(norms=[first] * 3),
    }


@exercise_03_4.check("gradients, none of them from later positions")
def decoder_gradients(answer) -> None:
    for norm in ("pre", "post"):
        config = replace(LAYER, norm=norm)
        layer = lab.randomised(answer(config)).train(norm == "post")
        x, memory = lab.wide(1, 6, 12).requires_grad_(), lab.wide(1, 4, 12).requires_grad_()
        want = lab.through_engine(layer, config, x, memory, tgt_mask=~lab.triangle(6)[0, 0])
        leaves = {"x": x, "memory": memory, **dict(layer.named_parameters())}
        expect_gradients(layer(x, memory), want, leaves, "the output")


@exercise_03_4.check("where dropout acts, and what the parts are given")
def decoder_dropout(answer) -> None:
    expect_dropout(answer, sublayers=3)


# 03.5

MODEL = TransformerConfig(23, 12, num_heads=3, num_layers=2, d_ff=20, dropout=0.0, max_len=16)
MATRICES = ("src_embedding", "tgt_embedding", "output")


@exercise_03_5.check("the parts")
def transformer_parts(answer) -> None:
    for norm in ("pre", "post"):
        for tied in (True, False):
            config = replace(MODEL, norm=norm, tie_embeddings=tied, dropout=0.1)
            model = answer(config)
            expect_parts(model, config)
            expect_equal(
                lab.num_parameters(model),
                mistaken.expected_count(config),
                what=f"number of parameters ({norm}-LN, tied: {tied})",
                mistake="the model has parameters too many or too few",
            )


def expect_parts(model: nn.Module, config: TransformerConfig) -> None:
    for name in ("encoder_layers", "decoder_layers"):
        expect_equal(
            len({id(each) for each in lab.part(model, name, nn.ModuleList)}),
            2,
            what=f"number of different {name}",
            mistake=f"the layers in {name} are not num_layers different modules",
            hint="[layer] * n holds one layer n times: build each.",
        )
    expect_equal(
        len({id(lab.part(model, name).weight) for name in MATRICES}),
        1 if config.tie_embeddings else 3,
        what="number of different weights of both embeddings and the output projection",
        mistake="tie_embeddings=True, and the three matrices are not one parameter"
        if config.tie_embeddings
        else "tie_embeddings=False, and matrices are shared",
        hint="self.src_embedding.weight = self.tgt_embedding.weight = self.output.weight",
    )
    for name in ("encoder_norm", "decoder_norm"):
        expect_equal(
            lab.num_parameters(lab.part(model, name)),
            2 * config.d_model if config.norm == "pre" else 0,
            what=f"parameters of {name} with norm={config.norm!r}",
            mistake="pre-LN needs a last norm after each stack: nothing has normed the sum"
            if config.norm == "pre"
            else "post-LN layers end in a norm: a second one after the stack is not in the paper",
            hint="LayerNorm(config.d_model) if config.norm == 'pre' else nn.Identity()",
        )
    expect(
        getattr(model, "config", None) == config,
        mistake="self.config is missing, or not the configuration that was given",
        expected="the configuration in self.config",
        seen=f"{getattr(model, 'config', 'no such attribute')}",
        hint="Who decodes or saves a model later asks it for its sizes.",
    )


MODEL_MISTAKES = {
    "the embeddings are not multiplied by sqrt(d_model)": ["src scale", "tgt scale"],
    "the source's embeddings alone are not multiplied by sqrt(d_model)": ["src scale"],
    "the target's embeddings alone are not multiplied by sqrt(d_model)": ["tgt scale"],
    "no positions are added": ["src positions", "tgt positions"],
    "positions are added to the source alone": ["tgt positions"],
    "positions are added to the target alone": ["src positions"],
    "positions are multiplied by sqrt(d_model), too": [
        "src positions scaled",
        "tgt positions scaled",
    ],
    "the source's positions are multiplied by sqrt(d_model), the target's are not": [
        "src positions scaled"
    ],
    "the target's positions are multiplied by sqrt(d_model), the source's are not": [
        "tgt positions scaled"
    ],
    "the source's padding is not masked anywhere": ["encoder mask", "decoder mask"],
    "the encoder does not mask the source's padding": ["encoder mask"],
    "the decoder does not mask the memory's padding": ["decoder mask"],
    "the last norms of a pre-LN model are not applied": ["final norm"],
    "the encoder's last norm comes after each of its layers": ["encoder norm each"],
    "the decoder's last norm comes after each of its layers": ["decoder norm each"],
    "the last norm of a stack comes after each of its layers": [
        "encoder norm each",
        "decoder norm each",
    ],
    "softmax is applied: the loss wants logits": ["softmax"],
    "the encoder is causal: a source is read in both directions": ["encoder causal"],
    "positions are counted from 1": ["positions from 1"],
}


@exercise_03_5.check("logits equal to torch's, both norms")
def transformer_logits(answer) -> None:
    for norm in ("pre", "post"):
        pre = norm == "pre"
        config = replace(MODEL, norm=norm, tie_embeddings=pre, pad_id=0 if pre else 5)
        model = lab.randomised(answer(config)).train(pre)
        src, tgt = lab.random_pair(config.vocab_size, config.pad_id)
        changed = partial(lab.logits, model, src, tgt, config)
        want = lab.logits(model, src, tgt, config)
        zero = {
            "padding is looked for as id 0, whatever config.pad_id is": (
                partial(lab.logits, model, src, tgt, replace(config, pad_id=0))
            )
        }
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        got = model(src, tgt)
        written = [n for n, each in model.named_parameters() if not torch.equal(each, before[n])]
        expect(
            not written,
            mistake="forward writes into the weights: it reads them, the optimizer writes",
            expected="the weights of before",
            seen=f"other numbers in {', '.join(written[:3])}",
        )
        expect_close(
            got,
            want,
            what=f"logits of the {norm}-LN model",
            looks_like={
                **zero,
                **{words: partial(changed, c) for words, c in MODEL_MISTAKES.items()},
                **mistaken.whole_mistakes(model, src, tgt, config),
            },
            atol=1e-6,
            rtol=1e-6,
        )
        expect_second_source(model, tgt, config)


def expect_second_source(model: nn.Module, tgt: Tensor, config: TransformerConfig) -> None:
    """Sources as long as the target, one after the other, the last one padded."""
    first, second = torch.randint(6, 23, (2, 3, 5), generator=fresh_generator())
    padded = second.clone()
    padded[1, 3:] = config.pad_id
    logits = partial(lab.logits, model, tgt=tgt, config=config)
    again = {"the memory of the source before is used again": logits(first)}
    aimed = {
        "where source and target have one shape, the memory's padding is looked for in the "
        "target": logits(padded, change=["decoder mask"])
    }
    with torch.no_grad():
        model(first, tgt)
        for what, src, rows in (("second source", second, again), ("padded source", padded, aimed)):
            what = f"logits of a {what}, as long as the target, without gradients"
            got, want = model(src, tgt), logits(src)
            expect_close(got, want, what=what, looks_like=rows, atol=1e-6, rtol=1e-6)
        stale = {"a source's memory is kept, and the weights have moved since": logits(padded)}
        next(model.encoder_layers.parameters()).mul_(1.5)
        got, want = model(padded, tgt), logits(padded)
        what = "logits of a source that comes again after a step"
        expect_close(got, want, what=what, looks_like=stale, atol=1e-6, rtol=1e-6)


@exercise_03_5.check("gradients equal to torch's, both norms")
def transformer_gradients(answer) -> None:
    for norm in ("pre", "post"):
        config = replace(MODEL, norm=norm)
        model, pair = lab.randomised(answer(config)), lab.random_pair(config.vocab_size)
        want, leaves = lab.logits(model, *pair, config), dict(model.named_parameters())
        expect_gradients(model.train(norm == "post")(*pair), want, leaves, "the logits")


@exercise_03_5.check("encode and decode")
def transformer_halves(answer) -> None:
    model, (src, tgt) = lab.randomised(answer(MODEL)), lab.random_pair(MODEL.vocab_size)
    seen = (src != 0)[:, None, None, :]
    memory = model.encode(src, seen)
    expect_equal(tuple(memory.shape), (3, 7, 12), what="shape of encode(src, mask)")
    hidden = model.decode(tgt, memory, seen)
    expect_equal(
        tuple(hidden.shape),
        (3, 5, 12),
        what="shape of decode(tgt, memory, mask)",
        looks_like={
            "decode returns logits: the projection is left to forward": (3, 5, MODEL.vocab_size)
        },
    )
    logits, rows = model(src, tgt), model.output.weight.T
    normed = model.decode(tgt, model.encoder_norm(memory), seen) @ rows
    recognise(
        {"encode returns the memory before its last norm, encoder_norm": normed.allclose(logits)},
        expected="the memory, normed: decode takes what encode returns",
        seen="forward applies encoder_norm between the two",
    )
    expect_close(
        hidden @ rows,
        logits,
        what="encode, decode, project in turn",
        hint="decode returns the hidden vectors, after the last norm and before the projection.",
    )
    want = lab.logits(model, src, tgt, MODEL, ["encoder mask", "decoder mask"])
    got = model.decode(tgt, model.encode(src)) @ model.output.weight.T
    expect_close(got, want, what="encode and decode without a mask, projected")
    src, tgt, hint = src.repeat(1, 3), tgt.repeat(1, 4), "give max_len to the positions"
    accepted(model, src[:, :16], tgt[:, :16], what="a pair as long as max_len=16", hint=hint)
    for what, pair in (("a source", (src[:, :17], tgt[:, :5])), ("a target", (src[:, :7], tgt))):
        what = f"{what} longer than max_len=16"
        expect_raises(ValueError, model, *(each[:, :17] for each in pair), what=what, hint=hint)


@exercise_03_5.check("dropout on the embeddings")
def transformer_dropout(answer) -> None:
    model, (src, tgt) = lab.silenced(answer(replace(MODEL, dropout=0.3))), lab.random_pair(23)
    model.encoder_norm = model.decoder_norm = nn.Identity()
    src, tgt = src.repeat(40, 1), tgt.repeat(40, 1)
    encoded = model.train().encode(src)
    for side, out in (("source", encoded), ("target", model.decode(tgt, encoded))):
        share = (out == 0).float().mean().item()
        expect(
            0.25 < share < 0.35,
            mistake=f"dropout does not act once on the {side}'s embeddings",
            expected="with dropout=0.3, 30 % zeros in front of the first layer",
            seen=f"{100 * share:.0f} %",
            hint="PositionalEncoding(d_model, max_len, dropout) drops the sum",
        )


@exercise_03_5.check("the start of training")
def transformer_start(answer) -> None:
    config = TransformerConfig(97, d_model=32, num_heads=4, num_layers=2, d_ff=64, dropout=0.0)
    losses = []
    for _ in range(3):
        seed_all(fresh_seed())
        model = answer(config)
        ids = torch.randint(4, 97, (8, 12))
        losses.append(F.cross_entropy(model(ids, ids.flip(1)).flatten(0, 1), ids.flatten()).item())
        loose = [n for n, each in model.named_parameters() if n.endswith("bias") and each.any()]
        expect(
            not loose,
            mistake="initialise is not called, or before all parts were there",
            expected="initialise(self) has set every bias to 0",
            seen=f"other numbers in {', '.join(loose[:3])}",
        )
    mean, chance = sum(losses) / 3, math.log(97)
    expect(
        chance - 0.5 < mean < chance + 1.5,
        mistake="the start values are off: the first loss is far from that of a guess",
        expected=f"a loss near ln 97 = {chance:.2f} before training",
        seen=f"{mean:.2f}",
        hint="Call initialise(self) before tying; nn.Embedding starts with variance 1.",
    )
    spread = model.output.weight.std().item() * config.d_model**0.5
    expect(
        0.9 < spread < 1.1,
        mistake="output.weight has other start values than initialise's: it was made or filled "
        "after that call",
        expected="output.weight with a standard deviation of d_model^-0.5",
        seen=f"{spread:.2f} times that",
    )


# 03.6


@exercise_03_6.check("three models on paper")
def count_fixed(count_parameters) -> None:
    small = TransformerConfig(9, 4, num_heads=1, num_layers=1, d_ff=3, norm="post", max_len=11)
    deep = replace(small, num_layers=3, d_ff=7)
    for config in (small, deep, replace(deep, norm="pre")):
        expect_count(count_parameters, config)
    made = functions_called(partial(count_parameters, deep)) & {"empty", "zeros", "ones", "randn"}
    expect(
        not made,
        mistake="a model is built in order to be counted",
        expected="sums and products of the sizes",
        seen=f"tensors made by torch.{', torch.'.join(made)}",
    )


@exercise_03_6.check("random configurations against torch's count")
def count_random(count_parameters) -> None:
    for _ in range(40):
        expect_count(count_parameters, mistaken.random_config())


def expect_count(count_parameters, config: TransformerConfig) -> None:
    got, want = count_parameters(config), mistaken.expected_count(config)
    expect(isinstance(got, int), expected="a whole number, an int", seen=type(got).__name__)
    names = "vocab_size d_model num_heads num_layers d_ff norm positions max_len tie_embeddings"
    fields = ", ".join(f"{name}={getattr(config, name)!r}" for name in names.split())
    looks_like = {words: want + off for words, off in mistaken.count_mistakes(config).items()}
    expect_equal(got, want, what=f"parameters of ({fields})", looks_like=looks_like)
