"""Random weights, torch's own layers on copies of them, and those layers wired in other ways.

`LayerTwin` is a layer and `logits` a model made of torch's parts, with the weights of the answer
that is checked. Both can also be put together in the ways that mistakes put them together.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shared.exercises.expecting import expect
from shared.exercises.seeds import fresh_generator, fresh_seed, seed_all
from shared.model.config import TransformerConfig

Sublayer = Callable[[Tensor], Tensor]
Wrap = Callable[[Tensor, Sublayer, Sublayer], Tensor]  # of x, its norm, its sub-layer


def wide(*shape: int) -> Tensor:
    """Random float64 inputs, far from mean 0 and variance 1."""
    return 3 * torch.randn(*shape, generator=fresh_generator(), dtype=torch.float64) + 1.5


def randomised(module: nn.Module) -> Any:
    """The module in float64, every parameter random: ones and zeros would hide mistakes."""
    generator = fresh_generator()
    with torch.no_grad():
        for name, each in module.double().named_parameters():
            noise = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            scale = each.shape[-1] ** -0.5 if each.dim() > 1 else 0.3
            each.copy_(scale * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return module


def part(module: nn.Module, name: str, kind: type = nn.Module, inside: str = "") -> Any:
    """The attribute that the contract names; raises `Wrong` unless it is of the kind asked for."""
    found = getattr(module, name, None)
    expect(
        isinstance(found, kind),
        mistake=f"self.{inside}{name} is missing or of another kind",
        expected=f"self.{inside}{name}, an nn.{kind.__name__}",
        seen="no such attribute" if found is None else f"a {type(found).__name__}",
        hint="The part comes from an earlier exercise: mend that one first."
        if inside
        else "The names are in the exercise's contract: proofs copy weights by name.",
    )
    return found


def num_parameters(module: nn.Module) -> int:
    """How many numbers are trained, each shared one counted once."""
    return sum(each.numel() for each in module.parameters())


def triangle(length: int) -> Tensor:
    """The causal mask (1, 1, length, length), True where a position may look."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def real_tokens(lengths: Sequence[int]) -> Tensor:
    """The padding mask (B, 1, 1, L) of sequences of these lengths."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None, :]


# 03.2: a network in which each dropped value shows


def network_of_ones(answer: Any) -> Any:
    """A feed-forward network of 400 hidden units that are all 1 where all inputs are 1.

    Input and bias have a half of unit i each, and output i is unit i plus 1.
    """
    network = answer(400, 400, dropout=0.2)
    with torch.no_grad():
        network.linear1.weight.copy_(torch.eye(400) / 2), network.linear1.bias.fill_(0.5)
        network.linear2.weight.copy_(torch.eye(400)), network.linear2.bias.fill_(1.0)
    return network


# 03.3, 03.4: one layer


def silenced(module: Any, but: str = "nothing") -> Any:
    """The module, whose sub-layers now give zeros alone; `but` names one that still speaks."""
    with torch.no_grad():
        for name, each in module.named_parameters():
            if (".w_o." in name or ".linear2." in name) and not name.startswith(but):
                each.zero_()
    return module


def all_but_one(length: int) -> Tensor:
    """A mask (1, 1, length, length) that hides one key from each query, each time another."""
    return ~torch.eye(length, dtype=torch.bool).roll(1, dims=0)[None, None]


def both(mask: Tensor | None, causal: bool, length: int) -> Tensor | None:
    """What a position may look at where both masks hold."""
    if not causal:
        return mask
    return triangle(length) if mask is None else mask & triangle(length)


def layer_state(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's weights, found by the contract's names, under the names of torch's layer."""
    state = attention_state(part(layer, "self_attention"), "self_attn")
    crosses = hasattr(layer, "cross_attention")
    if crosses:
        state |= attention_state(layer.cross_attention, "multihead_attn")
    for name in ("norm1", "norm2", "norm3")[: 3 if crosses else 2]:
        norm = part(layer, name)
        for kind in ("weight", "bias"):
            state[f"{name}.{kind}"] = part(norm, kind, nn.Parameter, f"{name}.")
    network = part(layer, "feed_forward")
    for name in ("linear1", "linear2"):
        linear = part(network, name, nn.Linear, "feed_forward.")
        state |= {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
    return state


def attention_state(attention: Any, name: str) -> dict[str, Tensor]:
    """A MultiHeadAttention's weights under the names of nn.MultiheadAttention."""
    stacked = [attention.w_q, attention.w_k, attention.w_v]
    return {
        f"{name}.in_proj_weight": torch.cat([each.weight for each in stacked]),
        f"{name}.in_proj_bias": torch.cat([each.bias for each in stacked]),
        f"{name}.out_proj.weight": attention.w_o.weight,
        f"{name}.out_proj.bias": attention.w_o.bias,
    }


def blank_engine(layer: nn.Module, config: TransformerConfig) -> Any:
    """Torch's own layer of the same sizes, with weights of its own."""
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


def through_engine(
    layer: nn.Module, config: TransformerConfig, *args: Any, **masks: Tensor | None
) -> Tensor:
    """Torch's own layer run on the very weights of the answer, so that gradients arrive there."""
    return functional_call(blank_engine(layer, config), layer_state(layer), args, masks)


class LayerTwin:
    """Torch's own layer with a copy of an answer's weights, and its parts to be wired anew."""

    def __init__(self, layer: nn.Module, config: TransformerConfig) -> None:
        self.engine = blank_engine(layer, config).requires_grad_(False)
        self.engine.load_state_dict({name: w.detach() for name, w in layer_state(layer).items()})
        self.kind = config.norm
        self.norms = [getattr(self.engine, f"norm{n}", nn.Identity()) for n in (1, 2, 3)]

    def encoded(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """The output of torch's encoder layer; True in `seen` may be looked at."""
        heads = self.engine.self_attn.num_heads
        return self.engine(x, src_mask=hidden(seen, heads, x, x))

    def decoded(self, x: Tensor, memory: Tensor, seen: Tensor | None = None) -> Tensor:
        """The output of torch's decoder layer; True in `seen` may be looked at."""
        closed = hidden(seen, self.engine.self_attn.num_heads, x, memory)
        later = ~triangle(x.shape[1])[0, 0]
        return self.engine(x, memory, tgt_mask=later, memory_mask=closed)

    def own(self, query: Tensor, key: Tensor, seen: Tensor | None = None) -> Tensor:
        """The self-attention's weights at work on any queries and keys."""
        return attend(self.engine.self_attn, query, key, seen)

    def cross(self, query: Tensor, key: Tensor, seen: Tensor | None = None) -> Tensor:
        """The cross-attention's weights at work on any queries and keys."""
        return attend(self.engine.multihead_attn, query, key, seen)

    def network(self, x: Tensor) -> Tensor:
        """The feed-forward network."""
        return self.engine.linear2(F.relu(self.engine.linear1(x)))

    def wired(
        self,
        x: Tensor,
        *attentions: Sublayer,
        wrap: Wrap | None = None,
        norms: Sequence[Sublayer] | None = None,
    ) -> Tensor:
        """x after these attentions and the network; `wrap` and `norms` replace the layer's own."""
        for sublayer, norm in zip((*attentions, self.network), norms or self.norms, strict=False):
            x = (wrap or self.own_kind)(x, norm, sublayer)
        return x

    def own_kind(self, x: Tensor, norm: Sublayer, sublayer: Sublayer) -> Tensor:
        """x after one sub-layer, normed where the configuration says."""
        return x + sublayer(norm(x)) if self.kind == "pre" else norm(x + sublayer(x))

    def other_kind(self, x: Tensor, norm: Sublayer, sublayer: Sublayer) -> Tensor:
        """x after one sub-layer, post-LN where the configuration says pre-LN and vice versa."""
        return norm(x + sublayer(x)) if self.kind == "pre" else x + sublayer(norm(x))

    def no_residual(self, x: Tensor, norm: Sublayer, sublayer: Sublayer) -> Tensor:
        """The sub-layer's output alone, normed where the configuration says."""
        return sublayer(norm(x)) if self.kind == "pre" else norm(sublayer(x))


def attend(
    attention: nn.MultiheadAttention, query: Tensor, key: Tensor, seen: Tensor | None
) -> Tensor:
    """Torch's attention; True in `seen` may be looked at."""
    mask = hidden(seen, attention.num_heads, query, key)
    return attention(query, key, key, attn_mask=mask, need_weights=False)[0]


def hidden(seen: Tensor | None, heads: int, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask in torch's form, (B * H, T, S) and True where nothing may look."""
    if seen is None:
        return None
    return ~seen.expand(query.shape[0], heads, query.shape[1], key.shape[1]).flatten(0, 1)


def layer_inputs(layer: nn.Module) -> tuple[Tensor, ...]:
    """A large x (40, 25, 12), and a memory where the layer has a cross-attention."""
    seed_all(fresh_seed())  # dropout draws from torch's global generator
    x, memory = 5 + torch.randn(40, 25, 12), torch.randn(40, 3, 12)
    return (x, memory) if hasattr(layer, "cross_attention") else (x,)


# 03.5: the whole model


def random_pair(vocab_size: int, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Source tokens (3, 7), of which two rows end in padding, and target tokens (3, 5) without."""
    generator = fresh_generator()
    src = torch.randint(1, vocab_size, (3, 7), generator=generator)
    src[0, 1] = 0  # padding only where pad_id says so
    src[1, 4:] = pad_id
    src[2, 6:] = pad_id
    tgt = torch.randint(1, vocab_size, (3, 5), generator=generator)
    return src, tgt.where(tgt != pad_id, pad_id + 1)  # what stands at padding is nobody's business


def logits(
    model: Any, src: Tensor, tgt: Tensor, config: TransformerConfig, change: Collection[str] = ()
) -> Tensor:
    """Logits from torch's layers on the model's own weights; `change` names mistakes to make."""
    pad = src == config.pad_id
    later = ~triangle(tgt.shape[1])[0, 0]
    x, y = (embedded(model, ids, side, change) for ids, side in [(src, "src"), (tgt, "tgt")])
    for layer in model.encoder_layers:
        mask = None if "encoder mask" in change else pad
        past = {"src_mask": ~triangle(x.shape[1])[0, 0]} if "encoder causal" in change else {}
        x = through_engine(layer, config, x, src_key_padding_mask=mask, **past)
        x = normed(x, model.encoder_norm, config, change) if "encoder norm each" in change else x
    x = x if "encoder norm each" in change else normed(x, model.encoder_norm, config, change)
    for layer in model.decoder_layers:
        mask = None if "decoder mask" in change else pad
        y = through_engine(layer, config, y, x, tgt_mask=later, memory_key_padding_mask=mask)
        y = normed(y, model.decoder_norm, config, change) if "decoder norm each" in change else y
    y = y if "decoder norm each" in change else normed(y, model.decoder_norm, config, change)
    out = y @ model.output.weight.T
    return out.softmax(-1) if "softmax" in change else out


def normed(x: Tensor, norm: Any, config: TransformerConfig, change: Collection[str]) -> Tensor:
    """x after the norm that ends a pre-LN stack."""
    if config.norm == "post" or norm is None or "final norm" in change:
        return x
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def embedded(model: Any, ids: Tensor, side: str, change: Collection[str]) -> Tensor:
    """Embeddings times sqrt(D) plus sinusoidal positions, from the formulas."""
    weight = getattr(model, f"{side}_embedding").weight
    width = weight.shape[1]
    x = weight[ids] * (1.0 if f"{side} scale" in change else math.sqrt(width))
    first = int("positions from 1" in change)
    at = torch.arange(first, first + ids.shape[1], dtype=torch.float64)
    angles = at[:, None] * 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    places = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    if f"{side} positions" in change:
        return x
    if f"{side} positions scaled" in change:
        return (weight[ids] + places) * math.sqrt(width)
    return x + places.float().to(x.dtype)
