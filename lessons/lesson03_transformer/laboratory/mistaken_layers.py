"""What mistakes give in 03.1 and 03.3 to 03.5, and count in 03.6."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lessons.lesson03_transformer.laboratory.layers import (
    LayerTwin,
    Sublayer,
    Wrap,
    logits,
    num_parameters,
)
from shared.exercises.seeds import fresh_generator
from shared.model.config import TransformerConfig


def norm_mistakes(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> dict[str, Tensor]:
    """LayerNorm of x as each mistake computes it."""
    centred, biased = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    unbiased = x.var(-1, keepdim=True)
    column, columns = x.mean(-2, keepdim=True), x.var(-2, keepdim=True, correction=0)
    sentence = tuple(range(1, x.dim()))
    whole = x.var(sentence, keepdim=True, correction=0)
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
        "eps is 1e-5 whatever is given": centred / (biased + 1e-5).sqrt(),
        "it divides by the variance, not by its square root": centred / (biased + eps),
        "the mean is not taken off": x / (biased + eps).sqrt(),
        "the mean is taken off nowhere, as in RMSNorm": (
            x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        ),
        "statistics run over the positions, not over the features of one token": (
            (x - column) / (columns + eps).sqrt()
        ),
        "statistics run over all tokens of a sentence, not over the features of one": (
            (x - x.mean(sentence, keepdim=True)) / (whole + eps).sqrt()
        ),
        "statistics run over the whole batch, not over the features of one token": (
            (x - x.mean()) / (x.var(correction=0) + eps).sqrt()
        ),
    }
    mistakes = {words: value * weight + bias for words, value in normed.items()}
    alone = centred / (biased + eps).sqrt()
    mistakes["bias is added before the gain: x * weight + bias"] = (alone + bias) * weight
    mistakes["the gain is 1 + weight: weight starts as 1"] = alone * (1 + weight) + bias
    return mistakes | {"weight and bias are not applied": alone}


def one_sublayer(
    twin: LayerTwin, x: Tensor, parts: Mapping[str, Sublayer]
) -> dict[str, Callable[[], Tensor]]:
    """A layer, of these sub-layers, in which one of them is wrapped wrongly and the others right.

    A row is made when it is asked for.
    """
    wrong: dict[str, Wrap] = {
        "what the {} gives replaces x: it is to be added": twin.no_residual,
        "around the {} the residual is the normed vector: in pre-LN it is x itself": (
            lambda h, norm, each: norm(h) + each(norm(h))
        ),
        "the norm of the {} stands inside the sum, on what the sub-layer gives": (
            lambda h, norm, each: h + norm(each(h))
        ),
        f"config.norm is {twin.kind!r}, and the {{}} is wrapped in the other way": twin.other_kind,
        "the norm of the {} is left out": lambda h, norm, each: h + each(h),
    }
    return {
        words.format(part): partial(wrap_one, twin, x, list(parts.values()), place, wrap)
        for words, wrap in wrong.items()
        for place, part in enumerate(parts)
    }


def wrap_one(
    twin: LayerTwin, x: Tensor, sublayers: Sequence[Sublayer], place: int, wrap: Wrap
) -> Tensor:
    """x after the sub-layers, of which the one at `place` has a wrap of its own."""
    for i, (sublayer, norm) in enumerate(zip(sublayers, twin.norms, strict=False)):
        x = (wrap if i == place else twin.own_kind)(x, norm, sublayer)
    return x


def whole_mistakes(
    model: Any, src: Tensor, tgt: Tensor, config: TransformerConfig
) -> dict[str, Callable[[], Tensor]]:
    """Logits of the model with some of its parts in the wrong place, by the words for it."""
    names = "src_embedding tgt_embedding encoder_layers decoder_layers encoder_norm decoder_norm"
    parts = {name: getattr(model, name) for name in (*names.split(), "output")}
    source, target = model.src_embedding, model.tgt_embedding
    ahead, back = model.encoder_layers, model.decoder_layers

    def times(factor: float) -> dict[str, Any]:
        sides = {"src_embedding": source, "tgt_embedding": target}
        return {name: SimpleNamespace(weight=each.weight * factor) for name, each in sides.items()}

    changes: dict[str, dict[str, Any]] = {
        "the encoder's last norm is not applied: the memory is the bare sum": {
            "encoder_norm": None
        },
        "the decoder's last norm is not applied: the output reads the bare sum": {
            "decoder_norm": None
        },
        "encoder_norm and decoder_norm are exchanged": {
            "encoder_norm": model.decoder_norm,
            "decoder_norm": model.encoder_norm,
        },
        "the target is read through src_embedding": {"tgt_embedding": source},
        "the source is read through tgt_embedding": {"src_embedding": target},
        "source and target are read through each other's embedding": {
            "src_embedding": target,
            "tgt_embedding": source,
        },
        "the embeddings are multiplied by d_model, not by its root": times(config.d_model**0.5),
        "the embeddings are divided by sqrt(d_model)": times(1 / config.d_model),
        "the encoder's last layer is left out": {"encoder_layers": ahead[:-1]},
        "the decoder's last layer is left out": {"decoder_layers": back[:-1]},
        "the encoder's layers are gone through backwards": {"encoder_layers": ahead[::-1]},
        "the decoder's layers are gone through backwards": {"decoder_layers": back[::-1]},
    }
    return {
        words: partial(logits, SimpleNamespace(**{**parts, **change}), src, tgt, config)
        for words, change in changes.items()
    }


def expected_count(config: TransformerConfig) -> int:
    """The parameters of torch's own modules, counted on the meta device, which holds no data."""
    matrices = 1 if config.tie_embeddings else 3
    tables = 2 * config.max_len if config.positions == "learned" else 0
    outside = (matrices * config.vocab_size + tables) * config.d_model
    depth, heads = config.num_layers, 2  # any number of heads has the same matrices
    sizes = (config.d_model, heads, depth, depth, config.d_ff)
    engine = nn.Transformer(*sizes, batch_first=True, device="meta")
    # Torch ends in norms with post-LN, too; the paper does not.
    return outside + num_parameters(engine) - (4 * config.d_model if config.norm == "post" else 0)


def random_config() -> TransformerConfig:
    """A configuration by chance, of sizes for which no two mistakes give one count."""
    generator = fresh_generator()

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    heads = pick(1, 2, 3, 5)
    return TransformerConfig(
        vocab_size=pick(101, 199, 307),
        d_model=heads * pick(4, 6, 8),
        num_heads=heads,
        num_layers=pick(3, 4, 5),
        d_ff=pick(7, 19, 33),
        norm=pick("pre", "post"),
        positions=pick("sinusoidal", "learned", "rotary", "none"),
        tie_embeddings=pick(True, False),
        max_len=pick(29, 31),
    )


def count_mistakes(config: TransformerConfig) -> dict[str, int]:
    """What each mistake adds to the right count; 0 where the configuration hides it."""
    D, F, L = config.d_model, config.d_ff, config.num_layers
    attention, network = 4 * (D * D + D), 2 * D * F + F + D
    matrix, table = config.vocab_size * D, config.max_len * D
    tied, learned = config.tie_embeddings, config.positions == "learned"
    last = 4 * D if config.norm == "pre" else 0
    return {
        **bias_mistakes(D, F, L),
        "a tied matrix is one parameter, and is counted more than once": 2 * matrix * tied,
        "a tied matrix is counted twice, as embedding and as output": matrix * tied,
        "the tied matrix is not counted: in three places it is still one of V x D": -matrix * tied,
        "untied models have three matrices of V x D": -2 * matrix * (not tied),
        "one matrix of V x D is missing in untied models (source, target, output)": (
            -matrix * (not tied)
        ),
        "the layers' norms have a shift as well as a gain": -L * 5 * D,
        "the decoder's cross-attention is not counted": -L * attention,
        "the decoder layer has three norms; or both networks lack the bias of linear2": -L * 2 * D,
        "an attention has four projections, w_o among them": -L * 3 * (D * D + D),
        "only pre-LN ends in a norm, one after each stack": -last or 4 * D,
        "one last norm is missing: encoder and decoder each end in one": -last // 2,
        "sinusoidal positions are a constant, rotary ones have no table: neither are parameters": (
            2 * table * (not learned)
        ),
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
        "w_o has one bias of d_model numbers, whatever the number of heads": (
            (config.num_heads - 1) * L * 3 * D
        ),
        "d_ff is taken as 4 d_model, whatever the configuration says": (
            L * 2 * (2 * D + 1) * (4 * D - F)
        ),
    }


def bias_mistakes(D: int, F: int, L: int) -> dict[str, int]:
    """What mistakes about biases add to the right count."""
    return {
        "the biases are not counted": -L * (3 * 4 * D + 2 * (F + D)),
        "the attentions' biases are not counted": -L * 3 * 4 * D,
        "the feed-forward networks' biases are not counted": -L * 2 * (F + D),
        "the bias of linear1 is not counted: it has d_ff numbers": -L * 2 * F,
        "both biases of a network are taken as d_ff long: linear2's has d_model": L * 2 * (F - D),
        "both biases of a network are taken as d_model long: linear1's has d_ff": L * 2 * (D - F),
    }
