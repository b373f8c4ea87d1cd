"""The same model on PyTorch's own engine, `torch.nn.Transformer`, with our weights copied into it.

Every proof that ours is right, and every measurement that compares the two, starts here.
Two things differ in the engine and are taken into account: it keeps the three input projections of
an attention in one stacked matrix, and it ends both stacks in a norm even when each layer has
normed its output already (post-LN), which the paper does not; the twin leaves that one out.
Rotary positions, which it does not have, are refused.
"""

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from shared.errors import InputError
from shared.model.attention import MultiHeadAttention
from shared.model.layers import DecoderLayer, EncoderLayer
from shared.model.transformer import Transformer, embed, make_positions

# By these names parameters are copied; a model may hold them under other names as well.
OUTSIDE = ("src_embedding.", "tgt_embedding.", "src_positions.", "tgt_positions.", "output.")
INSIDE = ("norm1.", "norm2.", "norm3.", "feed_forward.linear1.", "feed_forward.linear2.")


class TorchTwin(nn.Module):
    """Embeddings and output projection like ours, and `torch.nn.Transformer` between them."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        config = self.config = model.config
        if config.positions == "rotary":
            raise InputError("torch.nn.Transformer has no rotary positions: take another kind")
        self.src_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.tgt_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.src_positions = make_positions(config)
        self.tgt_positions = make_positions(config)
        self.engine = make_engine(model)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.src_embedding.weight = self.output.weight
            self.tgt_embedding.weight = self.output.weight
        self.load_state_dict(twin_tensors(model, lambda parameter: parameter), strict=False)

    def forward(
        self, src: Int[Tensor, "batch source"], tgt: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocab_size"]:
        """Logits, as from `Transformer.forward`. In the engine's masks True means "not seen"."""
        padding = src == self.config.pad_id
        later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        hidden = self.engine(
            embed(src, self.src_embedding, self.src_positions, self.config),
            embed(tgt, self.tgt_embedding, self.tgt_positions, self.config),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,  # lets the engine drop the mask for its kernel's own causal mode
        )
        return self.output(hidden)


def make_engine(model: Transformer) -> nn.Transformer:
    """A `torch.nn.Transformer` of the model's sizes, norm and dropout; weights still its own."""
    config = model.config
    pre = config.norm == "pre"
    sizes = (config.d_model, config.num_heads, config.d_ff, config.dropout)
    norms = [nn.LayerNorm(config.d_model) if pre else None for _ in range(2)]
    engine = nn.Transformer(
        config.d_model,
        config.num_heads,
        custom_encoder=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=pre),
            config.num_layers,
            norms[0],
            enable_nested_tensor=False,
        ),
        custom_decoder=nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, batch_first=True, norm_first=pre),
            config.num_layers,
            norms[1],
        ),
        batch_first=True,
    )
    for module in engine.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = config.inner_dropout
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            module.dropout.p = config.inner_dropout  # the one after the ReLU
    return engine


def twin_tensors(
    model: Transformer, part: Callable[[nn.Parameter], Tensor | None]
) -> dict[str, Tensor]:
    """`part` of every parameter of ours, under the name and in the shape that the twin uses.

    With `lambda p: p` the result is a state dict, with `lambda p: p.grad` it is the gradients.
    """
    tensors = {
        name: _part_of(parameter, part)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.startswith(OUTSIDE)
    }
    for stack in ("encoder", "decoder"):
        for kind, parameter in getattr(model, f"{stack}_norm").named_parameters():
            tensors[f"engine.{stack}.norm.{kind}"] = _part_of(parameter, part)
        for number, layer in enumerate(getattr(model, f"{stack}_layers")):
            for name, tensor in layer_tensors(layer, part).items():
                tensors[f"engine.{stack}.layers.{number}.{name}"] = tensor
    return tensors


def layer_tensors(
    layer: EncoderLayer | DecoderLayer, part: Callable[[nn.Parameter], Tensor | None]
) -> dict[str, Tensor]:
    """`part` of one layer's parameters under the names of `nn.TransformerEncoderLayer`/`Decoder`.

    The engine stacks query, key and value projection into `in_proj_weight`, in that order.
    """
    tensors = {}
    for ours, theirs in [("self_attention", "self_attn"), ("cross_attention", "multihead_attn")]:
        attention = getattr(layer, ours, None)
        if attention is None:
            continue
        attention = cast(MultiHeadAttention, attention)
        for kind in ("weight", "bias"):
            stacked = [
                _part_of(getattr(projection, kind), part)
                for projection in (attention.w_q, attention.w_k, attention.w_v)
            ]
            tensors[f"{theirs}.in_proj_{kind}"] = torch.cat(stacked)
            tensors[f"{theirs}.out_proj.{kind}"] = _part_of(getattr(attention.w_o, kind), part)
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        if name.startswith(INSIDE):
            tensors[name.removeprefix("feed_forward.")] = _part_of(parameter, part)
    return tensors


def _part_of(parameter: nn.Parameter, part: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
    tensor = part(parameter)
    assert tensor is not None, "a parameter lacks what was asked for: was backward() called?"
    return tensor.detach()
