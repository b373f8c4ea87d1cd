"""What tells a right answer of lesson 03 from a wrong one; the oracle is torch.nn's Transformer.

The answer's weights are made random and copied into torch's own layers, which must give the same
output and the same gradients. What a mistake would give is wired from the same parts.
"""

import copy
import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared.laboratories.lesson03 as lab
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, recognise
from shared.exercises.seeds import fresh_generator, fresh_seed, seed_all
from shared.model.config import TransformerConfig

exercise_03_1 = checks_for(
    "03.1",
    name="LayerNorm",
    difficulty=2,
    minutes=15,
    hints=[
        "mean(dim=-1, keepdim=True) keeps the dim, so that x - mean broadcasts. The variance "
        "divides by d_model, not by d_model - 1.",
        "weight starts as ones and bias as zeros; both are nn.Parameter. eps stands inside the "
        "square root.",
    ],
)
exercise_03_2 = checks_for(
    "03.2",
    name="PositionwiseFeedForward",
    difficulty=1,
    minutes=10,
    hints=["linear1 goes from d_model to d_ff, linear2 back. Where is d_ff wide? Drop out there."],
)
exercise_03_3 = checks_for(
    "03.3",
    name="EncoderLayer",
    difficulty=3,
    minutes=20,
    hints=[
        "Write the post-LN forward first: x = norm1(x + attention(x)), x = norm2(x + ffn(x)). "
        "Then move the norms to where the sub-layers read, and leave x itself alone.",
        "Dropout goes around the sub-layer's output, before it is added.",
    ],
)
exercise_03_4 = checks_for(
    "03.4",
    name="DecoderLayer",
    difficulty=3,
    minutes=20,
    hints=[
        "Three sub-layers now. Ask of each attention: where do the queries come from, where do "
        "the keys come from, and what must not be seen?",
        "The memory has been normed by the encoder: only x is normed here.",
    ],
)
exercise_03_5 = checks_for(
    "03.5",
    name="Transformer",
    difficulty=4,
    minutes=40,
    hints=[
        "Embed (times sqrt(d_model)), add positions, go through the layers, norm if the layers "
        "are pre-LN, project. encode and decode are those lines; forward is one line.",
        "Tying is an assignment of one nn.Parameter to three places, after initialise().",
    ],
)
exercise_03_6 = checks_for(
    "03.6",
    name="count_parameters",
    difficulty=2,
    minutes=15,
    hints=["Write down one attention, one feed-forward and one norm; then count how many of each."],
)

Rows = dict[str, Tensor]  # what a mistake is called, and what it gives

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
            looks_like=norm_mistakes(x, weight, bias, eps),
        )


def norm_mistakes(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Rows:
    centred, biased = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    unbiased = x.var(-1, keepdim=True)
    column, columns = x.mean(-2, keepdim=True), x.var(-2, keepdim=True, correction=0)
    normed = {
        "the variance divides by d_model - 1: torch's var() does, unless correction=0": (
            centred / (unbiased + eps).sqrt()
        ),
        "eps is added to the standard deviation, not to the variance": (
            centred / (biased.sqrt() + eps)
        ),
        "eps is added to an unbiased standard deviation; both differ from the contract": (
            centred / (unbiased.sqrt() + eps)
        ),
        "eps is not used": centred / biased.sqrt(),
        "it divides by the variance, not by its square root": centred / (biased + eps),
        "the mean is not taken off": x / (biased + eps).sqrt(),
        "statistics run over the positions, not over the features of one token": (
            (x - column) / (columns + eps).sqrt()
        ),
        "statistics run over the whole batch, not over the features of one token": (
            (x - x.mean()) / (x.var(correction=0) + eps).sqrt()
        ),
    }
    mistakes = {words: value * weight + bias for words, value in normed.items()}
    return mistakes | {"weight and bias are not applied": centred / (biased + eps).sqrt()}


@exercise_03_1.check("a constant vector, and gradients")
def norm_edges(answer) -> None:
    got = answer(6)(torch.full((2, 6), 3.0))
    expect_close(got, torch.zeros(2, 6), what="LayerNorm of a constant vector")
    norm, x = lab.randomised(answer(5, eps=1e-3)), lab.wide(3, 5).requires_grad_()
    want = F.layer_norm(x, (5,), norm.weight, norm.bias, 1e-3)
    hint = "Mean and variance depend on x, too: no detach, no torch.no_grad around them."
    expect_gradients(norm, norm(x), want, hint, x=x)


def expect_gradients(module, got: Tensor, want: Tensor, hint="", **inputs: Tensor) -> None:
    """The same random gradient of both outputs must reach inputs and parameters alike."""
    leaves = {**inputs, **dict(module.named_parameters())}
    pull = torch.randn(got.shape, generator=fresh_generator(), dtype=got.dtype)

    mine, theirs = (
        torch.autograd.grad(out, list(leaves.values()), pull, allow_unused=True)
        for out in (got, want)
    )
    recognise(
        {
            f"{name} takes no part in the output, or the graph is cut before it": each is None
            for name, each in zip(leaves, mine, strict=True)
        },
        expected="a gradient for each input and each parameter",
        seen="none",
        hint="No detach, .data, .item or torch.no_grad in forward; every part is used.",
    )
    for name, a, b in zip(leaves, mine, theirs, strict=True):
        expect_close(a, b, what=f"gradient of {name}", atol=1e-5, rtol=1e-4, hint=hint)


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
        want = down(F.relu(up(x)))
        expect_close(
            ffn(x),
            want,
            what=f"feed-forward of {shape}",
            looks_like={
                "there is no ReLU between the projections: two linear maps are one": down(up(x)),
                "the ReLU comes after the second projection": F.relu(down(up(x))),
                "there is a ReLU after the second projection as well": F.relu(want),
                "the activation is GELU; the paper's is ReLU": down(F.gelu(up(x))),
                "the residual connection is the layer's business, not this module's": x + want,
            },
        )


@exercise_03_2.check("where dropout acts")
def ffn_dropout(answer) -> None:
    ffn = lab.network_of_ones(answer)
    seed_all(fresh_seed())
    levels = {round(value, 3) for value in ffn(torch.zeros(1, 400)).flatten().tolist()}
    recognise(
        {
            "dropout acts on the output, after linear2; here it belongs after the ReLU": (
                levels == {0.0, 4.0}
            ),
            "dropout is not used": levels == {2.0},
            "dropout does not act once, on the hidden units": levels != {1.0, 3.0},
        },
        expected="with dropout=0.5 hidden units of 1 become 0 or 2, outputs 1 or 3",
        seen=f"outputs {sorted(levels)[:5]}",
        hint="nn.Dropout(dropout) after the ReLU; the layer drops its sub-layers' outputs (03.3).",
    )
    out = ffn.eval()(torch.zeros(1, 400))
    expect_close(out, torch.full((1, 400), 2.0), what="output in eval mode")


# 03.3

LAYER = TransformerConfig(11, d_model=12, num_heads=3, num_layers=1, d_ff=20, dropout=0.0)
ATTENTION, NETWORK, NORM = 4 * (12 * 12 + 12), 2 * 12 * 20 + 20 + 12, 2 * 12


@exercise_03_3.check("the parts")
def encoder_parts(answer) -> None:
    layer = answer(LAYER)
    for name in ("self_attention", "feed_forward", "norm1", "norm2"):
        lab.part(layer, name)
    expect_equal(
        lab.num_parameters(layer),
        ATTENTION + NETWORK + 2 * NORM,
        what="number of parameters",
        mistake="the layer has not one attention, one feed-forward and two norms",
    )


@exercise_03_3.check("post-LN, the paper's order")
def encoder_post(answer) -> None:
    expect_encoder(answer, replace(LAYER, norm="post"))


@exercise_03_3.check("pre-LN")
def encoder_pre(answer) -> None:
    expect_encoder(answer, replace(LAYER, norm="pre"))


def expect_encoder(answer, config: TransformerConfig) -> None:
    layer = lab.randomised(answer(config))
    twin, x, padding = lab.LayerTwin(layer, config), lab.wide(2, 5, 12), lab.real_tokens([5, 3])
    masks = {"no mask": None, "a padding mask": padding, "a causal mask": lab.triangle(5)}
    for words, seen in masks.items():
        causal = words == "a causal mask"
        expect_close(
            layer(x, None if causal else seen, causal),
            twin.encoded(x, seen),
            what=f"{config.norm}-LN encoder layer with {words}",
            looks_like=encoder_mistakes(twin, x, seen),
        )


def encoder_mistakes(twin: lab.LayerTwin, x: Tensor, seen: Tensor | None) -> Rows:
    wired, (first, second, _) = partial(twin.wired, x), twin.norms

    def look(h: Tensor) -> Tensor:
        return twin.own(h, h, seen)

    return {
        f"config.norm is {twin.kind!r}, and the layer computes the other kind": (
            wired(look, wrap=twin.other_kind)
        ),
        "the mask is not passed to the attention": wired(lambda h: twin.own(h, h)),
        "the residual adds norm(x): in pre-LN it adds x itself": (
            wired(look, wrap=lambda h, norm, sublayer: norm(h) + sublayer(norm(h)))
        ),
        "the residual connections are missing": wired(look, wrap=twin.no_residual),
        "norm1 is used for both sub-layers": wired(look, norms=[first, first]),
        "in pre-LN only the queries are normed: keys and values are, too": (
            wired(lambda h: twin.own(first(h), h, seen), norms=[nn.Identity(), second])
        ),
    }


@exercise_03_3.check("gradients")
def encoder_gradients(answer) -> None:
    for norm in ("pre", "post"):
        config = replace(LAYER, norm=norm)
        layer, x = lab.randomised(answer(config)), lab.wide(2, 4, 12).requires_grad_()
        expect_gradients(layer, layer(x), lab.through_engine(layer, config, x), x=x)


@exercise_03_3.check("where dropout acts")
def encoder_dropout(answer) -> None:
    expect_dropout(answer(replace(LAYER, norm="pre", dropout=0.5, d_ff=8)), sublayers=2)


def expect_dropout(layer: nn.Module, sublayers: int) -> None:
    """In pre-LN a value that every sub-layer drops comes out as it went in: chance p each."""
    inputs, want = lab.layer_inputs(layer), 0.5**sublayers
    out = layer.train()(*inputs)
    passed, zeros = ((out == each).float().mean().item() for each in (inputs[0], 0))
    recognise(
        {
            "dropout acts on the sum x + sublayer(x): the residual path must stay whole": (
                zeros > 0.1
            ),
            "dropout is missing on a sub-layer's output": passed < 0.01,
            "dropout does not act once on each sub-layer's output": abs(passed - want) > 0.03,
        },
        expected=f"with dropout=0.5, {100 * want:.0f} % of the values pass a pre-LN layer as is",
        seen=f"{100 * passed:.0f} % do, {100 * zeros:.0f} % are 0",
    )
    first, second = layer.eval()(*inputs), layer(*inputs)
    expect_close(first, second, what="a second call in eval mode", hint="use nn.Dropout")


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
    expect_equal(
        lab.num_parameters(layer),
        2 * ATTENTION + NETWORK + 3 * NORM,
        what="number of parameters",
        mistake="the layer has not two attentions, one feed-forward and three norms",
    )


@exercise_03_4.check("post-LN, the paper's order")
def decoder_post(answer) -> None:
    expect_decoder(answer, replace(LAYER, norm="post"))


@exercise_03_4.check("pre-LN")
def decoder_pre(answer) -> None:
    expect_decoder(answer, replace(LAYER, norm="pre"))


def expect_decoder(answer, config: TransformerConfig) -> None:
    layer = lab.randomised(answer(config))
    twin, x, memory = lab.LayerTwin(layer, config), lab.wide(2, 5, 12), lab.wide(2, 5, 12)
    for words, mask in [("no mask", None), ("a padded memory", lab.real_tokens([5, 2]))]:
        expect_close(
            layer(x, memory, mask),
            twin.decoded(x, memory, mask),
            what=f"{config.norm}-LN decoder layer with {words}",
            looks_like=decoder_mistakes(twin, x, memory, mask),
        )
    short = memory[:, :3]
    want = twin.decoded(x, short)
    expect_close(layer(x, short), want, what="decoder layer with a memory of another length")


def decoder_mistakes(twin: lab.LayerTwin, x: Tensor, memory: Tensor, mask: Tensor | None) -> Rows:
    wired, own, cross, past = partial(twin.wired, x), twin.own, twin.cross, lab.triangle(5)
    both = past if mask is None else past & mask

    def back(h: Tensor) -> Tensor:
        return own(h, h, past)

    def look(h: Tensor) -> Tensor:
        return cross(h, memory, mask)

    def blind(h: Tensor) -> Tensor:
        return cross(h, memory)

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
        "the cross-attention is causal: every target position may see the whole source": (
            wired(back, lambda h: cross(h, memory, both))
        ),
        "the cross-attention looks at x, not at the memory": wired(back, lambda h: cross(h, h)),
        "the memory is normed again with norm2": (
            wired(back, lambda h: cross(h, twin.norms[1](memory), mask))
        ),
        "the memory comes first: self-attention is the first sub-layer": wired(look, back),
        "the cross-attention's queries come from the memory, its keys from x": (
            wired(back, lambda h: cross(memory, h))
        ),
    }


@exercise_03_4.check("gradients, none of them from later positions")
def decoder_gradients(answer) -> None:
    layer = lab.randomised(answer(LAYER))
    x, memory = lab.wide(1, 6, 12).requires_grad_(), lab.wide(1, 4, 12).requires_grad_()
    want = lab.through_engine(layer, LAYER, x, memory, tgt_mask=~lab.triangle(6)[0, 0])
    got = layer(x, memory)
    (reached,) = torch.autograd.grad(got[0, 2].square().sum(), x, retain_graph=True)
    later = reached[0, 3:].abs().max().item()
    expect(
        later == 0,
        mistake="self-attention is not causal: it sees the words that it is to predict",
        expected="position 2 does not depend on positions 3, 4, 5",
        seen=f"gradients of size {later:.2g} reach them",
    )
    expect_gradients(layer, got, want, x=x, memory=memory)


@exercise_03_4.check("where dropout acts")
def decoder_dropout(answer) -> None:
    expect_dropout(answer(replace(LAYER, norm="pre", dropout=0.5, d_ff=8)), sublayers=3)


# 03.5

MODEL = TransformerConfig(23, 12, num_heads=3, num_layers=2, d_ff=20, dropout=0.0, max_len=16)
MATRICES = ("src_embedding", "tgt_embedding", "output")


@exercise_03_5.check("the parts")
def transformer_parts(answer) -> None:
    for norm in ("pre", "post"):
        for tied in (True, False):
            config = replace(MODEL, norm=norm, tie_embeddings=tied)
            model = answer(config)
            expect_parts(model, config)
            expect_equal(
                lab.num_parameters(model),
                lab.expected_count(config),
                what=f"number of parameters ({norm}-LN, tied: {tied})",
                mistake="the model has parameters too many or too few",
            )


def expect_parts(model: nn.Module, config: TransformerConfig) -> None:
    expect(
        hasattr(model, "config"),
        mistake="self.config is missing",
        expected="the configuration in self.config",
        seen="no such attribute",
        hint="Who decodes or saves a model later asks it for its sizes.",
    )
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


MODEL_MISTAKES = {
    "the embeddings are not multiplied by sqrt(d_model)": ["scale"],
    "no positions are added": ["src positions", "tgt positions"],
    "positions are added to the source alone": ["tgt positions"],
    "positions are added to the target alone": ["src positions"],
    "positions are multiplied by sqrt(d_model), too": ["positions scaled"],
    "the source's padding is not masked anywhere": ["encoder mask", "decoder mask"],
    "the encoder does not mask the source's padding": ["encoder mask"],
    "the decoder does not mask the memory's padding": ["decoder mask"],
    "the last norms of a pre-LN model are not applied": ["final norm"],
    "softmax is applied: the loss wants logits": ["softmax"],
}


@exercise_03_5.check("logits equal to torch's, both norms")
def transformer_logits(answer) -> None:
    for norm in ("pre", "post"):
        config = replace(MODEL, norm=norm, tie_embeddings=norm == "pre")
        model = lab.randomised(answer(config))
        src, tgt = lab.random_pair(config.vocab_size)
        mistaken = partial(lab.logits, model, src, tgt, config)
        want = lab.logits(model, src, tgt, config)
        expect_close(
            model(src, tgt),
            want,
            what=f"logits of the {norm}-LN model",
            looks_like={words: partial(mistaken, c) for words, c in MODEL_MISTAKES.items()},
            atol=1e-6,
            rtol=1e-6,
        )


@exercise_03_5.check("gradients equal to torch's, both norms")
def transformer_gradients(answer) -> None:
    for norm in ("pre", "post"):
        config = replace(MODEL, norm=norm)
        model, pair = lab.randomised(answer(config)), lab.random_pair(config.vocab_size)
        expect_gradients(model, model(*pair), lab.logits(model, *pair, config))


@exercise_03_5.check("encode and decode")
def transformer_halves(answer) -> None:
    model, (src, tgt) = lab.randomised(answer(MODEL)), lab.random_pair(MODEL.vocab_size)
    seen = (src != 0)[:, None, None, :]
    memory = model.encode(src, seen)
    expect_equal(tuple(memory.shape), (3, 7, 12), what="shape of encode(src, mask)")
    hidden = model.decode(tgt, memory, seen)
    expect_equal(tuple(hidden.shape), (3, 5, 12), what="shape of decode(tgt, memory, mask)")
    expect_close(
        hidden @ model.output.weight.T,
        model(src, tgt),
        what="encode, decode, project in turn",
        hint="decode returns the hidden vectors, after the last norm and before the projection.",
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
    mean, chance = sum(losses) / 3, math.log(97)
    expect(
        chance - 0.5 < mean < chance + 1.5,
        mistake="the start values are off: the first loss is far from that of a guess",
        expected=f"a loss near ln 97 = {chance:.2f} before training",
        seen=f"{mean:.2f}",
        hint="Call initialise(self) before tying; nn.Embedding starts with variance 1.",
    )


# 03.6


@exercise_03_6.check("three models on paper")
def count_fixed(count_parameters) -> None:
    small = TransformerConfig(5, 4, num_heads=1, num_layers=1, d_ff=3, norm="post", max_len=11)
    deep = replace(small, num_layers=3, d_ff=7)
    for config in (small, deep, replace(deep, norm="pre")):
        expect_count(count_parameters, config)


@exercise_03_6.check("random configurations against torch's count")
def count_random(count_parameters) -> None:
    for _ in range(40):
        expect_count(count_parameters, lab.random_config())


def expect_count(count_parameters, config: TransformerConfig) -> None:
    got, want = count_parameters(config), lab.expected_count(config)
    expect(isinstance(got, int), expected="a whole number, an int", seen=type(got).__name__)
    names = "vocab_size d_model num_heads num_layers d_ff norm positions max_len tie_embeddings"
    fields = ", ".join(f"{name}={getattr(config, name)!r}" for name in names.split())
    looks_like = {words: want + off for words, off in count_mistakes(config).items()}
    expect_equal(got, want, what=f"parameters of ({fields})", looks_like=looks_like)


def count_mistakes(config: TransformerConfig) -> dict[str, int]:
    """What each mistake adds to the right count; 0 where the configuration hides it."""
    D, F, L = config.d_model, config.d_ff, config.num_layers
    attention, network = 4 * (D * D + D), 2 * D * F + F + D
    matrix, table = config.vocab_size * D, config.max_len * D
    tied, learned = config.tie_embeddings, config.positions == "learned"
    last = 4 * D if config.norm == "pre" else 0
    return {
        "the biases are not counted": -L * (3 * 4 * D + 2 * (F + D)),
        "the attentions' biases are not counted": -L * 3 * 4 * D,
        "the feed-forward networks' biases are not counted": -L * 2 * (F + D),
        "a tied matrix is one parameter, and is counted more than once": 2 * matrix * tied,
        "untied models have three matrices of V x D": -2 * matrix * (not tied),
        "one matrix of V x D is missing in untied models (source, target, output)": (
            -matrix * (not tied)
        ),
        "the layers' norms have a shift as well as a gain": -L * 5 * D,
        "the decoder's cross-attention is not counted": -L * attention,
        "the decoder layer has three norms": -L * 2 * D,
        "only pre-LN ends in a norm, one after each stack": -last or 4 * D,
        "one last norm is missing: encoder and decoder each end in one": -last // 2,
        "sinusoidal positions are a constant, not parameters": 2 * table * (not learned),
        "a sinusoidal encoding is a constant, not parameters": table * (not learned),
        "learned positions are parameters": -2 * table * learned,
        "source and target have a table of learned positions each": -table * learned,
        "every head is counted with full-width matrices: heads share d_model": (
            (config.num_heads - 1) * L * 3 * attention
        ),
        "num_layers is the depth of each stack: encoder and decoder both have that many": (
            -L * (3 * attention + 2 * network + 10 * D) // 2
        ),
        "the output projection has no bias": config.vocab_size,
    }
