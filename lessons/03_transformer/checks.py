"""What tells a right answer of lesson 03 from a wrong one; the oracle is torch.nn's Transformer.

The layers' weights are made random, copied into the engine's layer, and both must give the same
output and the same gradients. What a mistake would give is composed from the engine's own parts.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, wrong
from shared.exercises.seeds import fresh_generator, seed_all
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

Attend = Callable[[Tensor, Tensor], Tensor]


def wide(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random float64 inputs, far from mean 0 and variance 1."""
    return 3 * torch.randn(*shape, generator=generator, dtype=torch.float64) + 1.5


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Give every parameter random values, in float64: ones and zeros hide mistakes."""
    module.double()
    with torch.no_grad():
        for name, each in module.named_parameters():
            noise = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            scale = each.shape[-1] ** -0.5 if each.dim() > 1 else 0.3
            each.copy_(scale * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def part(module: nn.Module, name: str, kind: type = nn.Module, inside: str = "") -> Any:
    """An attribute that the contract names, of the kind that it asks for."""
    found = getattr(module, name, None)
    hint = "The names are in the exercise's contract: proofs copy weights by name."
    if inside:
        hint = "The part comes from an earlier exercise: mend that one first."
    expect(
        isinstance(found, kind),
        expected=f"self.{inside}{name}, an nn.{kind.__name__}",
        seen="no such attribute" if found is None else f"a {type(found).__name__}",
        mistake=f"self.{inside}{name} is missing or of another kind",
        hint=hint,
    )
    return found


# --- 03.1 -------------------------------------------------------------------------------------


@exercise_03_1.check("the parameters")
def norm_parameters(answer) -> None:
    norm = answer(7)
    names = {name: tuple(each.shape) for name, each in norm.named_parameters()}
    expect(
        names == {"weight": (7,), "bias": (7,)},
        expected="parameters weight (7,) and bias (7,)",
        seen=f"{names}",
        mistake="weight and bias are not the two trained parameters of the layer",
        hint="self.weight = nn.Parameter(torch.ones(d_model)); a plain tensor is not trained.",
    )
    expect_close(norm.weight, torch.ones(7), what="weight at the start")
    expect_close(norm.bias, torch.zeros(7), what="bias at the start")


@exercise_03_1.check("values on random inputs")
def norm_values(answer) -> None:
    generator = fresh_generator()
    for shape, eps in [((2, 5, 12), 1e-5), ((3, 7), 0.5), ((2, 3, 4, 6), 1e-3)]:
        norm = answer(shape[-1], eps=eps)
        randomise(norm, generator)
        weight, bias = norm.weight.detach(), norm.bias.detach()
        x = wide(shape, generator)
        got = norm(x)
        want = F.layer_norm(x, shape[-1:], weight, bias, eps)
        expect_close(
            got,
            want,
            what=f"LayerNorm of {shape}",
            looks_like=norm_mistakes(x, weight, bias, eps),
        )


def norm_mistakes(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Mapping[str, Any]:
    centred = x - x.mean(-1, keepdim=True)
    biased, unbiased = x.var(-1, keepdim=True, correction=0), x.var(-1, keepdim=True)
    token = x.mean(-2, keepdim=True), x.var(-2, keepdim=True, correction=0)
    return {
        "the variance divides by d_model - 1: torch's var() does, unless correction=0": (
            centred / (unbiased + eps).sqrt() * weight + bias
        ),
        "eps is added to the standard deviation, not to the variance": (
            centred / (biased.sqrt() + eps) * weight + bias
        ),
        "eps is added to an unbiased standard deviation; both differ from the contract": (
            centred / (unbiased.sqrt() + eps) * weight + bias
        ),
        "eps is not used": centred / biased.sqrt() * weight + bias,
        "it divides by the variance, not by its square root": (
            centred / (biased + eps) * weight + bias
        ),
        "weight and bias are not applied": centred / (biased + eps).sqrt(),
        "the mean is not taken off": x / (biased + eps).sqrt() * weight + bias,
        "statistics run over the positions, not over the features of one token": (
            (x - token[0]) / (token[1] + eps).sqrt() * weight + bias
        ),
        "statistics run over the whole batch, not over the features of one token": (
            (x - x.mean()) / (x.var(correction=0) + eps).sqrt() * weight + bias
        ),
    }


@exercise_03_1.check("a constant vector, and gradients")
def norm_edges(answer) -> None:
    norm = answer(6)
    got = norm(torch.full((2, 6), 3.0))
    expect_close(got, torch.zeros(2, 6), what="LayerNorm of a constant vector")
    generator = fresh_generator()
    norm = answer(5)
    randomise(norm, generator)
    x = wide((3, 5), generator).requires_grad_()
    out = norm(x)
    pull = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    got = torch.autograd.grad(out, [x, norm.weight, norm.bias], pull)
    same = F.layer_norm(x, (5,), norm.weight, norm.bias, norm.eps if hasattr(norm, "eps") else 1e-5)
    want = torch.autograd.grad(same, [x, norm.weight, norm.bias], pull)
    for name, a, b in zip(("x", "weight", "bias"), got, want, strict=True):
        expect_close(
            a,
            b,
            what=f"gradient of {name}",
            hint="Mean and variance depend on x, too: no detach, no torch.no_grad around them.",
        )


# --- 03.2 -------------------------------------------------------------------------------------


@exercise_03_2.check("the two projections")
def ffn_parts(answer) -> None:
    ffn = answer(6, 10)
    for name, sizes in [("linear1", (6, 10)), ("linear2", (10, 6))]:
        linear = part(ffn, name, nn.Linear)
        expect_equal(
            (linear.in_features, linear.out_features),
            sizes,
            what=f"sizes of {name}",
            mistake=f"{name} does not go from {sizes[0]} to {sizes[1]} features",
        )
    count = sum(each.numel() for each in ffn.parameters())
    expect_equal(count, 2 * 6 * 10 + 10 + 6, what="number of parameters", mistake="a bias is off")


@exercise_03_2.check("values on random inputs")
def ffn_values(answer) -> None:
    generator = fresh_generator()
    for shape, d_ff in [((2, 5, 6), 11), ((3, 4), 4)]:
        ffn = answer(shape[-1], d_ff)
        randomise(ffn, generator)
        x = wide(shape, generator)
        hidden = ffn.linear1(x)
        expect_close(
            ffn(x),
            ffn.linear2(F.relu(hidden)),
            what=f"feed-forward of {shape}",
            looks_like={
                "there is no ReLU between the projections: two linear maps are one": ffn.linear2(
                    hidden
                ),
                "the ReLU comes after the second projection": F.relu(ffn.linear2(hidden)),
                "there is a ReLU after the second projection as well": F.relu(
                    ffn.linear2(F.relu(hidden))
                ),
                "the activation is GELU; the paper's is ReLU": ffn.linear2(F.gelu(hidden)),
                "the residual connection is the layer's business, not this module's": x
                + ffn.linear2(F.relu(hidden)),
            },
        )


@exercise_03_2.check("where dropout acts")
def ffn_dropout(answer) -> None:
    # Hidden units are all 1, each goes to its own output, the bias is 1: what is dropped shows.
    ffn = answer(400, 400, dropout=0.5)
    with torch.no_grad():
        ffn.linear1.weight.zero_(), ffn.linear1.bias.fill_(1.0)
        ffn.linear2.weight.copy_(torch.eye(400)), ffn.linear2.bias.fill_(1.0)
    seed_all(0)
    levels = {round(value, 3) for value in ffn(torch.zeros(1, 400)).flatten().tolist()}
    if levels == {0.0, 4.0}:
        wrong(
            "dropout acts on the output, after linear2; here it belongs after the ReLU",
            expected="hidden units dropped",
            seen="outputs dropped",
            hint="The layer drops its sub-layers' outputs itself (03.3).",
        )
    expect(
        levels == {1.0, 3.0},
        expected="with dropout=0.5 hidden units of 1 become 0 or 2, outputs 1 or 3",
        seen=f"outputs {sorted(levels)[:5]}",
        mistake="dropout does not act once, on the hidden units" if levels != {2.0} else "",
        hint="nn.Dropout(dropout) after the ReLU.",
    )
    ffn.eval()
    expect_close(ffn(torch.zeros(1, 400)), torch.full((1, 400), 2.0), what="output in eval mode")


# --- 03.3 -------------------------------------------------------------------------------------

LAYER = TransformerConfig(11, d_model=12, num_heads=3, num_layers=1, d_ff=20, dropout=0.0)


def attention_state(attention: Any, name: str) -> dict[str, Tensor]:
    """A MultiHeadAttention's weights under the names of nn.MultiheadAttention."""
    stacked = [attention.w_q, attention.w_k, attention.w_v]
    return {
        f"{name}.in_proj_weight": torch.cat([each.weight for each in stacked]),
        f"{name}.in_proj_bias": torch.cat([each.bias for each in stacked]),
        f"{name}.out_proj.weight": attention.w_o.weight,
        f"{name}.out_proj.bias": attention.w_o.bias,
    }


def layer_state(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's weights under the names of torch's layer; by name, as the contract gives them."""
    state = attention_state(part(layer, "self_attention"), "self_attn")
    if hasattr(layer, "cross_attention"):
        state |= attention_state(layer.cross_attention, "multihead_attn")
    norms = 3 if hasattr(layer, "cross_attention") else 2
    for name in [f"norm{number + 1}" for number in range(norms)]:
        norm = part(layer, name)
        for kind in ("weight", "bias"):
            state[f"{name}.{kind}"] = part(norm, kind, nn.Parameter, f"{name}.")
    ffn = part(layer, "feed_forward")
    for name in ("linear1", "linear2"):
        linear = part(ffn, name, nn.Linear, "feed_forward.")
        state |= {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
    return state


def engine_layer(layer: nn.Module, config: TransformerConfig) -> Any:
    """Torch's own layer with a copy of the same weights."""
    engine = blank_engine(layer, config)
    engine.load_state_dict({name: each.detach() for name, each in layer_state(layer).items()})
    return engine


def through_engine(
    layer: nn.Module, config: TransformerConfig, *args: Any, **kwargs: Any
) -> Tensor:
    """Torch's own layer run on the very weights of ours, so that gradients arrive there."""
    return functional_call(blank_engine(layer, config), layer_state(layer), args, kwargs)


def blank_engine(layer: nn.Module, config: TransformerConfig) -> Any:
    """Torch's own layer of the same sizes."""
    decoder = hasattr(layer, "cross_attention")
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    return kind(
        config.d_model,
        config.num_heads,
        config.d_ff,
        dropout=0.0,
        batch_first=True,
        norm_first=config.norm == "pre",
        dtype=torch.float64,
    )


def attend(attention: nn.MultiheadAttention, seen: Tensor | None) -> Attend:
    """Torch's attention as a function of queries and keys; True in `seen` may be looked at."""
    heads = attention.num_heads

    def run(query: Tensor, key: Tensor) -> Tensor:
        hidden = None
        if seen is not None:
            shape = (query.shape[0], heads, query.shape[1], key.shape[1])
            hidden = ~seen.expand(shape).flatten(0, 1)
        return attention(query, key, key, attn_mask=hidden, need_weights=False)[0]

    return run


def lower(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def last_hidden(lengths: list[int]) -> Tensor:
    """A padding mask (B, 1, 1, L) for sequences of these lengths."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None, :]


@exercise_03_3.check("the parts")
def encoder_parts(answer) -> None:
    layer = answer(LAYER)
    for name in ("self_attention", "feed_forward", "norm1", "norm2"):
        part(layer, name)
    sizes = {"attention": 4 * (12 * 12 + 12), "ffn": 2 * 12 * 20 + 32, "norms": 4 * 12}
    expect_equal(
        sum(each.numel() for each in layer.parameters()),
        sum(sizes.values()),
        what="number of parameters",
        mistake="the layer has not one attention, one feed-forward and two norms",
    )


@exercise_03_3.check("post-LN, the paper's order")
def encoder_post(answer) -> None:
    compare_encoder(answer, replace(LAYER, norm="post"))


@exercise_03_3.check("pre-LN")
def encoder_pre(answer) -> None:
    compare_encoder(answer, replace(LAYER, norm="pre"))


def compare_encoder(answer, config: TransformerConfig) -> None:
    generator = fresh_generator()
    layer = answer(config)
    randomise(layer, generator)
    engine = engine_layer(layer, config)
    x = wide((2, 5, 12), generator)
    for mask, causal in [(None, False), (last_hidden([5, 3]), False), (None, True)]:
        seen = lower(5) if causal else mask
        want = engine(x, src_mask=None if seen is None else hidden_for(engine, seen, x))
        words = "a causal mask" if causal else "no mask" if mask is None else "a padding mask"
        expect_close(
            layer(x, mask, causal),
            want,
            what=f"{config.norm}-LN encoder layer with {words}",
            looks_like=encoder_mistakes(engine, x, seen, config),
        )


def hidden_for(engine: Any, seen: Tensor, x: Tensor) -> Tensor:
    shape = (x.shape[0], engine.self_attn.num_heads, x.shape[1], x.shape[1])
    return ~seen.expand(shape).flatten(0, 1)


def encoder_mistakes(
    engine: Any, x: Tensor, seen: Tensor | None, config: TransformerConfig
) -> Mapping[str, Any]:
    look, blind = attend(engine.self_attn, seen), attend(engine.self_attn, None)
    n1, n2 = engine.norm1, engine.norm2

    def ffn(h: Tensor) -> Tensor:
        return engine.linear2(F.relu(engine.linear1(h)))

    def post(see: Attend = look) -> Tensor:
        h = n1(x + see(x, x))
        return n2(h + ffn(h))

    def pre(see: Attend = look) -> Tensor:
        h = x + see(n1(x), n1(x))
        return h + ffn(n2(h))

    def normed_path() -> Tensor:
        h = n1(x) + look(n1(x), n1(x))
        return n2(h) + ffn(n2(h))

    def no_residual() -> Tensor:
        if config.norm == "pre":
            return ffn(n2(look(n1(x), n1(x))))
        return n2(ffn(n1(look(x, x))))

    def one_norm() -> Tensor:
        if config.norm == "pre":
            h = x + look(n1(x), n1(x))
            return h + ffn(n1(h))
        h = n1(x + look(x, x))
        return n1(h + ffn(h))

    def queries_alone() -> Tensor:
        h = x + look(n1(x), x)
        return h + ffn(n2(h))

    other = post if config.norm == "pre" else pre
    same = pre if config.norm == "pre" else post
    return {
        f"config.norm is {config.norm!r}, and the layer computes the other kind": other,
        "the mask is not passed to the attention": lambda: same(blind),
        "the residual adds norm(x): in pre-LN it adds x itself": normed_path,
        "the residual connections are missing": no_residual,
        "norm1 is used for both sub-layers": one_norm,
        "in pre-LN only the queries are normed: keys and values are, too": queries_alone,
    }


@exercise_03_3.check("gradients")
def encoder_gradients(answer) -> None:
    for norm in ("pre", "post"):
        config = replace(LAYER, norm=norm)
        generator = fresh_generator()
        layer = answer(config)
        randomise(layer, generator)
        x = wide((2, 4, 12), generator).requires_grad_()
        compare_gradients(layer, layer(x), through_engine(layer, config, x), {"x": x}, generator)


def compare_gradients(
    module: nn.Module,
    got: Tensor,
    want: Tensor,
    inputs: Mapping[str, Tensor],
    generator: torch.Generator,
) -> None:
    """The same random pull on both outputs must arrive alike at inputs and parameters."""
    leaves = {**inputs, **dict(module.named_parameters())}
    pull = torch.randn(got.shape, generator=generator, dtype=got.dtype)
    pairs = [
        torch.autograd.grad(out, list(leaves.values()), pull, allow_unused=True)
        for out in (got, want)
    ]
    for name, a in zip(leaves, pairs[0], strict=True):
        expect(
            a is not None,
            expected=f"a gradient for {name}",
            seen="none",
            mistake=f"{name} takes no part in the output, or the graph is cut before it",
            hint="No detach, .data, .item or torch.no_grad in forward; every part is used.",
        )
    for name, a, b in zip(leaves, *pairs, strict=True):
        expect_close(a, b, what=f"gradient of {name}", atol=1e-5, rtol=1e-4)


@exercise_03_3.check("where dropout acts")
def encoder_dropout(answer) -> None:
    compare_dropout(answer(replace(LAYER, norm="pre", dropout=0.5, d_ff=8)), sublayers=2)


def compare_dropout(layer: nn.Module, sublayers: int) -> None:
    """In pre-LN a value that every sub-layer drops comes out as it went in: chance p each."""
    seed_all(0)
    x = 5 + torch.randn(40, 25, 12)
    inputs = (x,) if sublayers == 2 else (x, torch.randn(40, 3, 12))
    layer.train()
    share = (layer(*inputs) == x).float().mean().item()
    zeros = (layer(*inputs) == 0).float().mean().item()
    want = 0.5**sublayers
    mistake = ""
    if zeros > 0.1:
        mistake = "dropout acts on the sum x + sublayer(x): the residual path must stay whole"
    elif share < 0.01:
        mistake = "dropout is missing on a sub-layer's output"
    elif abs(share - want) > 0.03:
        mistake = "dropout does not act once on each sub-layer's output"
    expect(
        abs(share - want) < 0.03,
        expected=f"with dropout=0.5, {100 * want:.0f} % of the values pass a pre-LN layer as is",
        seen=f"{100 * share:.0f} % do, {100 * zeros:.0f} % are 0",
        mistake=mistake,
    )
    layer.eval()
    first, second = layer(*inputs), layer(*inputs)
    expect_close(first, second, what="a second call in eval mode", hint="use nn.Dropout")


# --- 03.4 -------------------------------------------------------------------------------------


@exercise_03_4.check("the parts")
def decoder_parts(answer) -> None:
    layer = answer(LAYER)
    names = ("self_attention", "cross_attention", "feed_forward", "norm1", "norm2", "norm3")
    for name in names:
        part(layer, name)
    expect(
        layer.self_attention is not layer.cross_attention,
        expected="two attentions",
        seen="self_attention is cross_attention",
        mistake="both attentions are one module, and share their weights",
    )
    expect_equal(
        sum(each.numel() for each in layer.parameters()),
        8 * (12 * 12 + 12) + 2 * 12 * 20 + 32 + 6 * 12,
        what="number of parameters",
        mistake="the layer has not two attentions, one feed-forward and three norms",
    )


@exercise_03_4.check("post-LN, the paper's order")
def decoder_post(answer) -> None:
    compare_decoder(answer, replace(LAYER, norm="post"))


@exercise_03_4.check("pre-LN")
def decoder_pre(answer) -> None:
    compare_decoder(answer, replace(LAYER, norm="pre"))


def compare_decoder(answer, config: TransformerConfig) -> None:
    generator = fresh_generator()
    layer = answer(config)
    randomise(layer, generator)
    engine = engine_layer(layer, config)
    x, memory = wide((2, 5, 12), generator), wide((2, 5, 12), generator)
    for mask in (None, last_hidden([5, 2])):
        padding = None if mask is None else ~mask[:, 0, 0]
        want = engine(x, memory, tgt_mask=~lower(5)[0, 0], memory_key_padding_mask=padding)
        words = "no mask" if mask is None else "a padded memory"
        expect_close(
            layer(x, memory, mask),
            want,
            what=f"{config.norm}-LN decoder layer with {words}",
            looks_like=decoder_mistakes(engine, x, memory, mask, config),
        )
    short = memory[:, :3]
    want = engine(x, short, tgt_mask=~lower(5)[0, 0])
    expect_close(layer(x, short), want, what="decoder layer with a memory of another length")


def decoder_mistakes(
    engine: Any, x: Tensor, memory: Tensor, mask: Tensor | None, config: TransformerConfig
) -> Mapping[str, Any]:
    norms = [engine.norm1, engine.norm2, engine.norm3]
    back = attend(engine.self_attn, lower(x.shape[1]))
    free = attend(engine.self_attn, None)
    look, blind = attend(engine.multihead_attn, mask), attend(engine.multihead_attn, None)
    later = attend(engine.multihead_attn, lower(5) if mask is None else lower(5) & mask)
    padded = attend(engine.self_attn, lower(5) if mask is None else lower(5) & mask)

    def ffn(h: Tensor) -> Tensor:
        return engine.linear2(F.relu(engine.linear1(h)))

    def chain(*steps: Callable[[Tensor], Tensor], kind: str = config.norm) -> Tensor:
        h = x
        for norm, step in zip(norms, steps, strict=True):
            h = h + step(norm(h)) if kind == "pre" else norm(h + step(h))
        return h

    def itself(see: Attend) -> Callable[[Tensor], Tensor]:
        return lambda h: see(h, h)

    def from_memory(see: Attend) -> Callable[[Tensor], Tensor]:
        return lambda h: see(h, memory)

    right = (itself(back), from_memory(look), ffn)
    other = "post" if config.norm == "pre" else "pre"
    return {
        f"config.norm is {config.norm!r}, and the layer computes the other kind": (
            lambda: chain(*right, kind=other)
        ),
        "self-attention is not causal: it sees the words that it is to predict": (
            lambda: chain(itself(free), *right[1:])
        ),
        "memory_mask is not passed to the cross-attention: padding is attended": (
            lambda: chain(right[0], from_memory(blind), ffn)
        ),
        "memory_mask went to the self-attention, where the keys are targets": (
            lambda: chain(itself(padded), from_memory(blind), ffn)
        ),
        "the cross-attention is causal: every target position may see the whole source": (
            lambda: chain(right[0], from_memory(later), ffn)
        ),
        "the cross-attention looks at x, not at the memory": (
            lambda: chain(right[0], itself(attend(engine.multihead_attn, None)), ffn)
        ),
        "the memory is normed again with norm2": (
            lambda: chain(right[0], lambda h: look(h, engine.norm2(memory)), ffn)
        ),
        "the memory comes first: self-attention is the first sub-layer": (
            lambda: chain(right[1], right[0], ffn)
        ),
        "the cross-attention's queries come from the memory, its keys from x": (
            lambda: chain(right[0], lambda h: blind(memory, h), ffn)
        ),
    }


@exercise_03_4.check("causality, by gradient")
def decoder_causality(answer) -> None:
    layer = answer(LAYER)
    generator = fresh_generator()
    randomise(layer, generator)
    x, memory = wide((1, 6, 12), generator).requires_grad_(), wide((1, 4, 12), generator)
    layer(x, memory)[0, 2].square().sum().backward()
    reached = x.grad[0].abs().sum(dim=-1)
    expect(
        bool((reached[3:] == 0).all()),
        expected="position 2 does not depend on positions 3, 4, 5",
        seen=f"gradients of size {reached[3:].max().item():.2g} reach them",
        mistake="self-attention is not causal: it sees the words that it is to predict",
    )


@exercise_03_4.check("where dropout acts")
def decoder_dropout(answer) -> None:
    compare_dropout(answer(replace(LAYER, norm="pre", dropout=0.5, d_ff=8)), sublayers=3)


# --- 03.5 -------------------------------------------------------------------------------------

MODEL = TransformerConfig(
    23, d_model=12, num_heads=3, num_layers=2, d_ff=20, dropout=0.0, max_len=16
)


def expected_count(config: TransformerConfig) -> int:
    """Parameters counted on torch's own modules (on the meta device, which holds no data)."""
    matrices = 1 if config.tie_embeddings else 3
    tables = 2 * config.max_len if config.positions == "learned" else 0
    outside = (matrices * config.vocab_size + tables) * config.d_model
    engine = nn.Transformer(
        config.d_model,
        2,  # any number of heads has the same matrices
        config.num_layers,
        config.num_layers,
        config.d_ff,
        batch_first=True,
        device="meta",
    )
    inside = sum(each.numel() for each in engine.parameters())
    if config.norm == "post":  # torch ends in norms all the same; the paper does not
        inside -= 4 * config.d_model
    return outside + inside


@exercise_03_5.check("the parts")
def transformer_parts(answer) -> None:
    for norm in ("pre", "post"):
        for tied in (True, False):
            config = replace(MODEL, norm=norm, tie_embeddings=tied)
            model = answer(config)
            expect(
                hasattr(model, "config"),
                expected="the configuration in self.config",
                seen="no such attribute",
                mistake="self.config is missing",
                hint="Who decodes or saves a model later asks it for its sizes.",
            )
            for name in ("encoder_layers", "decoder_layers"):
                layers = part(model, name, nn.ModuleList)
                expect_equal(
                    len({id(each) for each in layers}),
                    2,
                    what=f"number of different {name}",
                    mistake=f"the layers in {name} are not num_layers different modules",
                    hint="[layer] * n holds one layer n times: build each.",
                )
            compare_tying(model, config)
            compare_final_norms(model, config)
            expect_equal(
                sum(each.numel() for each in model.parameters()),
                expected_count(config),
                what=f"number of parameters ({norm}-LN, tied: {tied})",
                mistake="the model has parameters too many or too few",
            )


def compare_tying(model: nn.Module, config: TransformerConfig) -> None:
    names = ("src_embedding", "tgt_embedding", "output")
    weights = [part(model, name).weight for name in names]
    distinct = len({id(each) for each in weights})
    want = 1 if config.tie_embeddings else 3
    expect_equal(
        distinct,
        want,
        what="number of different weights of both embeddings and the output projection",
        mistake="tie_embeddings=True, and the three matrices are not one parameter"
        if config.tie_embeddings
        else "tie_embeddings=False, and matrices are shared",
        hint="self.src_embedding.weight = self.tgt_embedding.weight = self.output.weight",
    )


def compare_final_norms(model: nn.Module, config: TransformerConfig) -> None:
    for name in ("encoder_norm", "decoder_norm"):
        found = part(model, name)
        size = sum(each.numel() for each in found.parameters())
        want = 2 * config.d_model if config.norm == "pre" else 0
        expect_equal(
            size,
            want,
            what=f"parameters of {name} with norm={config.norm!r}",
            mistake="pre-LN needs a last norm after each stack: nothing has normed the sum"
            if config.norm == "pre"
            else "post-LN layers end in a norm: a second one after the stack is not in the paper",
            hint="LayerNorm(config.d_model) if config.norm == 'pre' else nn.Identity()",
        )


def oracle(
    model: Any, src: Tensor, tgt: Tensor, config: TransformerConfig, change: Collection[str] = ()
) -> Tensor:
    """Logits from torch.nn's layers with the model's weights; `change` names mistakes to make."""
    pad = src == config.pad_id
    encoder_pad = None if "encoder mask" in change else pad
    memory_pad = None if "decoder mask" in change else pad
    x, y = (table(model, ids, each, change) for ids, each in [(src, "src"), (tgt, "tgt")])
    for layer in model.encoder_layers:
        x = through_engine(layer, config, x, src_key_padding_mask=encoder_pad)
    if config.norm == "pre" and "final norm" not in change:
        norm = model.encoder_norm
        x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)
    for layer in model.decoder_layers:
        hidden = {"tgt_mask": ~lower(tgt.shape[1])[0, 0], "memory_key_padding_mask": memory_pad}
        y = through_engine(layer, config, y, x, **hidden)
    if config.norm == "pre" and "final norm" not in change:
        norm = model.decoder_norm
        y = F.layer_norm(y, y.shape[-1:], norm.weight, norm.bias)
    logits = y @ model.output.weight.T
    return logits.softmax(-1) if "softmax" in change else logits


def table(model: Any, ids: Tensor, side: str, change: Collection[str]) -> Tensor:
    """Embeddings and positions from the formulas."""
    weight = getattr(model, f"{side}_embedding").weight
    width = weight.shape[1]
    x = weight[ids] * (1.0 if "scale" in change else math.sqrt(width))
    angles = torch.arange(ids.shape[1], dtype=torch.float64)[:, None] * 10_000.0 ** (
        -torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    places = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    if f"{side} positions" in change or "positions" in change:
        return x
    if "positions scaled" in change:
        return (weight[ids] + places) * math.sqrt(width)
    return x + places.float().to(x.dtype)


MODEL_MISTAKES = {
    "the embeddings are not multiplied by sqrt(d_model)": "scale",
    "no positions are added": "positions",
    "positions are added to the source alone": "tgt positions",
    "positions are added to the target alone": "src positions",
    "positions are multiplied by sqrt(d_model), too": "positions scaled",
    "the source's padding is not masked anywhere": "both masks",
    "the encoder does not mask the source's padding": "encoder mask",
    "the decoder does not mask the memory's padding": "decoder mask",
    "the last norms of a pre-LN model are not applied": "final norm",
    "softmax is applied: the loss wants logits": "softmax",
}


def random_pair(generator: torch.Generator, vocab_size: int) -> tuple[Tensor, Tensor]:
    src = torch.randint(1, vocab_size, (3, 7), generator=generator)
    src[1, 4:] = 0
    src[2, 6:] = 0
    return src, torch.randint(1, vocab_size, (3, 5), generator=generator)


@exercise_03_5.check("logits equal to torch's, both norms")
def transformer_logits(answer) -> None:
    for norm in ("pre", "post"):
        generator = fresh_generator()
        config = replace(MODEL, norm=norm, tie_embeddings=norm == "pre")
        model = answer(config)
        randomise(model, generator)
        src, tgt = random_pair(generator, config.vocab_size)

        def made(change: str, model=model, src=src, tgt=tgt, config=config) -> Tensor:
            names = ["encoder mask", "decoder mask"] if change == "both masks" else [change]
            return oracle(model, src, tgt, config, names)

        expect_close(
            model(src, tgt),
            oracle(model, src, tgt, config),
            what=f"logits of the {norm}-LN model",
            looks_like={
                words: (lambda change=change, made=made: made(change))
                for words, change in MODEL_MISTAKES.items()
            },
            atol=1e-6,
            rtol=1e-6,
        )


@exercise_03_5.check("gradients equal to torch's, both norms")
def transformer_gradients(answer) -> None:
    for norm in ("pre", "post"):
        generator = fresh_generator()
        config = replace(MODEL, norm=norm)
        model = answer(config)
        randomise(model, generator)
        src, tgt = random_pair(generator, config.vocab_size)
        compare_gradients(model, model(src, tgt), oracle(model, src, tgt, config), {}, generator)


@exercise_03_5.check("encode and decode")
def transformer_halves(answer) -> None:
    generator = fresh_generator()
    model = answer(MODEL)
    randomise(model, generator)
    src, tgt = random_pair(generator, MODEL.vocab_size)
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
    for seed in range(3):
        seed_all(seed)
        model = answer(config)
        ids = torch.randint(4, 97, (8, 12))
        logits = model(ids, ids.flip(1))
        losses.append(F.cross_entropy(logits.flatten(0, 1), ids.flatten()).item())
    mean = sum(losses) / 3
    chance = math.log(97)
    expect(
        chance - 0.5 < mean < chance + 1.5,
        expected=f"a loss near ln 97 = {chance:.2f} before training",
        seen=f"{mean:.2f}",
        mistake="the start values are off: the first loss is far from that of a guess",
        hint="Call initialise(self) before tying; nn.Embedding starts with variance 1.",
    )


# --- 03.6 -------------------------------------------------------------------------------------


def random_config(generator: torch.Generator) -> TransformerConfig:
    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    heads = pick(1, 2, 3, 5)
    return TransformerConfig(
        vocab_size=pick(11, 40, 131),
        d_model=heads * pick(4, 6, 8),
        num_heads=heads,
        num_layers=pick(1, 2, 4),
        d_ff=pick(7, 20, 33),
        norm=pick("pre", "post"),
        positions=pick("sinusoidal", "learned", "none"),
        tie_embeddings=pick(True, False),
        max_len=pick(9, 30),
    )


def count_mistakes(config: TransformerConfig, want: int) -> Mapping[str, int]:
    D, layers, rows = config.d_model, config.num_layers, config.vocab_size
    biases = layers * (3 * 4 * D + 2 * (config.d_ff + D))
    table_size = config.max_len * D
    learned = config.positions == "learned"
    last = 4 * D if config.norm == "pre" else -4 * D
    return {
        "the biases are not counted": want - biases,
        "a tied matrix is one parameter, and is counted more than once": (
            want + 2 * rows * D if config.tie_embeddings else want
        ),
        "untied models have three matrices of V x D": want
        - (0 if config.tie_embeddings else 2 * rows * D),
        "one matrix of V x D is missing in untied models (source, target, output)": want
        - (0 if config.tie_embeddings else rows * D),
        "the layers' norms have a shift as well as a gain": want - layers * 5 * D,
        "the decoder's cross-attention is not counted": want - layers * 4 * (D * D + D),
        "the decoder layer has three norms": want - layers * 2 * D,
        "only pre-LN ends in a norm, one after each stack": want - last,
        "one last norm is missing: encoder and decoder each end in one": want
        - (2 * D if config.norm == "pre" else 0),
        "sinusoidal positions are a constant, not parameters": want
        + (0 if learned else 2 * table_size),
        "a sinusoidal encoding is a constant, not parameters": want
        + (0 if learned else table_size),
        "learned positions are parameters": want - (2 * table_size if learned else 0),
        "source and target have a table of learned positions each": want
        - (table_size if learned else 0),
        "every head is counted with full-width matrices: heads share d_model": want
        + (config.num_heads - 1) * layers * 3 * 4 * (D * D + D),
        "num_layers is the depth of each stack: encoder and decoder both have that many": want
        - layers * (12 * (D * D + D) + 2 * (2 * D * config.d_ff + config.d_ff + D) + 10 * D) // 2,
        "the output projection has no bias": want + rows,
    }


@exercise_03_6.check("three models on paper")
def count_fixed(count_parameters) -> None:
    base = TransformerConfig(1, d_model=2, num_heads=1, num_layers=1, d_ff=1, norm="post")
    for config in (base, replace(base, norm="pre"), replace(base, num_layers=3, d_ff=5)):
        compare_count(count_parameters, config)


@exercise_03_6.check("random configurations against torch's count")
def count_random(count_parameters) -> None:
    generator = fresh_generator()
    for _ in range(40):
        compare_count(count_parameters, random_config(generator))


def compare_count(count_parameters, config: TransformerConfig) -> None:
    got, want = count_parameters(config), expected_count(config)
    if not isinstance(got, int):
        wrong("the count is a whole number", expected="an int", seen=type(got).__name__)
    if got == want:
        return
    named = {words: value for words, value in count_mistakes(config, want).items() if value != want}
    mistake = next((words for words, value in named.items() if value == got), "")
    what = f"parameters of {fields(config)}"
    expect_equal(got, want, what=what, mistake=mistake)


def fields(config: TransformerConfig) -> str:
    """The fields that the count depends on."""
    names = ("vocab_size", "d_model", "num_heads", "num_layers", "d_ff", "norm", "positions")
    names += ("max_len", "tie_embeddings")
    return "(" + ", ".join(f"{name}={getattr(config, name)!r}" for name in names) + ")"
