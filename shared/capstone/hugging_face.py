"""A language model's weights as Hugging Face's transformers has them, and back: safetensors.

python -m shared.capstone.hugging_face CHECKPOINT FOLDER writes a checkpoint of any mode so.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shared.capstone.config import ModelTable
from shared.capstone.resuming import RUN, saved_in
from shared.capstone.tasks import build_model
from shared.errors import InputError
from shared.model.language_model import LanguageModel
from shared.model.modern import ModernConfig
from shared.training.named_checkpoint import ModuleLayout, load_named

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# By kind: their names of the sizes, by ours; and what else has to be so.
SIZES = {
    "gpt": {"d_model": "n_embd", "d_ff": "n_inner", "num_layers": "n_layer",
            "num_heads": "n_head", "vocab_size": "vocab_size", "length": "n_positions"},
    "modern": {"d_model": "hidden_size", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
               "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
               "num_kv_heads": "num_key_value_heads", "length": "max_position_embeddings"},
}  # fmt: skip
FIXED: dict[str, dict[str, Any]] = {
    "gpt": {"model_type": "gpt2", "activation_function": "relu", "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    "modern": {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
               "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip
OTHER = {  # no dropout, no special tokens; ours is tied but for a factor
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
DEFAULTS = {"activation_function": "gelu_new", "rms_norm_eps": 1e-6}  # theirs, which are not ours
How = Literal["", "turned", "pairs", "scaled"]
Rows = Iterator[tuple[str, list[str], How]]  # their name, ours one below the other, how it lies


def _rows(kind: str, num_layers: int) -> Rows:
    yield "lm_head.weight", ["output.weight"], ""
    if kind == "gpt":
        yield "transformer.wte.weight", ["embedding.weight"], "scaled"
        yield "transformer.wpe.weight", ["positions.table.weight"], ""
        for end in ("weight", "bias"):
            yield f"transformer.ln_f.{end}", [f"norm.{end}"], ""
            turned: How = "turned" if end == "weight" else ""  # their Conv1D is (in, out)
            for i in range(num_layers):
                at, own = f"transformer.h.{i}", f"layers.{i}"
                qkv = [f"{own}.self_attention.w_{letter}.{end}" for letter in "qkv"]
                yield f"{at}.attn.c_attn.{end}", qkv, turned
                yield f"{at}.attn.c_proj.{end}", [f"{own}.self_attention.w_o.{end}"], turned
                yield f"{at}.mlp.c_fc.{end}", [f"{own}.feed_forward.linear1.{end}"], turned
                yield f"{at}.mlp.c_proj.{end}", [f"{own}.feed_forward.linear2.{end}"], turned
                yield f"{at}.ln_1.{end}", [f"{own}.norm1.{end}"], ""
                yield f"{at}.ln_2.{end}", [f"{own}.norm2.{end}"], ""
        return
    yield "model.embed_tokens.weight", ["embedding.weight"], "scaled"
    yield "model.norm.weight", ["norm.weight"], ""
    parts = {"self_attn.q_proj": "self_attention.w_q", "self_attn.k_proj": "self_attention.w_k",
             "self_attn.v_proj": "self_attention.w_v", "self_attn.o_proj": "self_attention.w_o",
             "mlp.up_proj": "feed_forward.linear1", "mlp.gate_proj": "feed_forward.gate",
             "mlp.down_proj": "feed_forward.linear2", "input_layernorm": "norm1",
             "post_attention_layernorm": "norm2"}  # fmt: skip
    for i in range(num_layers):
        for theirs, ours in parts.items():
            how: How = "pairs" if ours[-3:] in ("w_q", "w_k") else ""
            yield f"model.layers.{i}.{theirs}.weight", [f"layers.{i}.{ours}.weight"], how


def _theirs(ours: list[Tensor], how: How, model: LanguageModel) -> Tensor:
    whole = torch.cat(ours)
    if how == "pairs":  # rotary positions turn neighbours here, the two halves of a head there
        half = model.config.d_model // model.config.num_heads // 2
        whole = whole.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2)
    if how == "scaled":  # in float32, where they are bfloat16
        wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
        whole = (wide * math.sqrt(model.config.d_model)).to(whole.dtype)
    return (whole.T if how == "turned" else whole).detach().clone().contiguous()


def _ours(theirs: Tensor, how: How, count: int, model: LanguageModel) -> list[Tensor]:
    theirs = theirs.T if how == "turned" else theirs
    if how == "pairs":
        half = model.config.d_model // model.config.num_heads // 2
        theirs = theirs.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)
    theirs = theirs.float() / math.sqrt(model.config.d_model) if how == "scaled" else theirs
    return list(theirs.chunk(count))


def write_hugging_face(model: LanguageModel, folder: Path) -> None:
    """Write config.json and model.safetensors, which `AutoModelForCausalLM` reads.

    A model of kind "gpt" is a GPT-2 with a ReLU, a "modern" one a Llama. Their embedding is ours
    times sqrt(D), with which ours is multiplied in forward; the output matrix is not tied to it.
    """
    from safetensors.torch import save_file  # imported where it is asked for

    config, state = model.config, model.state_dict()
    kind = "modern" if isinstance(config, ModernConfig) else "gpt"
    ours = {**vars(config), "length": config.max_len}
    sizes = {theirs: ours[name] for name, theirs in SIZES[kind].items()}
    rows = _rows(kind, config.num_layers)
    tensors = {name: _theirs([state[part] for part in own], how, model) for name, own, how in rows}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**FIXED[kind], **OTHER, **sizes}, indent=1)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def read_hugging_face(folder: Path, fused: bool = True) -> LanguageModel:
    """The capstone's model, not tied, of a GPT-2 with a ReLU or a Llama, with its weights.

    Raises InputError for files that are none, and for what the course's models do not compute.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _object(folder / CONFIG)
    try:
        theirs = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be read: {error}") from None
    kind, table = _table(config, folder)
    model = build_model(replace(table, fused=fused), table.vocab_size)
    assert isinstance(model, LanguageModel), "the tables have no translator"
    embedding = next(name for name, _, how in _rows(kind, 0) if how == "scaled")
    if config.get("tie_word_embeddings", kind == "gpt") and embedding in theirs:
        theirs.setdefault("lm_head.weight", theirs[embedding])
    state = dict[str, Tensor]()
    shapes = {name: value.to("meta") for name, value in model.state_dict().items()}
    for name, own, how in _rows(kind, model.config.num_layers):
        if name not in theirs:
            raise InputError(f"{folder / WEIGHTS} has no {name}")
        there, here = theirs[name].shape, _theirs([shapes[part] for part in own], how, model).shape
        if there != here:
            words = f"{name} is {tuple(there)}, and {tuple(here)} by {CONFIG}"
            raise InputError(f"{folder / WEIGHTS}: {words}")
        state |= zip(own, _ours(theirs[name], how, len(own), model), strict=True)
    model.load_state_dict(state)
    return model


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no object {{...}}, but {found!r:.40}")
    return found


def _table(config: dict[str, Any], folder: Path) -> tuple[Literal["gpt", "modern"], ModelTable]:
    """The model that their config.json describes; what it leaves out is as transformers has it."""
    kind: Any = {"gpt2": "gpt", "llama": "modern"}.get(str(config.get("model_type")))
    if kind is None:
        raise InputError(f"{folder}: model_type {config.get('model_type')!r}, not gpt2 or llama")
    rope = config.get("rope_parameters") or {}
    if kind == "modern" and isinstance(rope, dict):  # transformers 4 has theta at the top
        theta = config.get("rope_theta", 10000.0)
        rope = {"rope_type": "default", "rope_theta": theta, **rope}
        config = {**config, "rope_parameters": rope}
    for key, value in FIXED[kind].items():
        if (found := config.get(key, DEFAULTS.get(key, value))) != value:
            raise InputError(f"{folder}: {key} {found!r}, where the course has {value!r}")
    sizes: dict[str, Any] = {name: config.get(key) for name, key in SIZES[kind].items()}
    if kind == "modern":
        sizes["num_kv_heads"] = sizes["num_kv_heads"] or sizes["num_heads"]
    elif isinstance(sizes["d_model"], int):
        sizes["d_ff"] = sizes["d_ff"] or 4 * sizes["d_model"]
    for name, key in SIZES[kind].items():
        if type(sizes[name]) is not int or sizes[name] < 1:
            raise InputError(
                f"{folder}: {key} must be a whole number from 1 up, got {sizes[name]!r}"
            )
    head_dim, own = config.get("head_dim"), sizes["d_model"] // sizes["num_heads"]
    if kind == "modern" and head_dim not in (None, own):
        raise InputError(f"{folder}: head_dim {head_dim!r}, where the course has {own}")
    return kind, ModelTable(kind, **sizes, tied=False)


def main(checkpoint: str, folder: str) -> None:
    """Write a run's newest checkpoint, or the one that is named, for transformers."""
    place = Path(checkpoint)
    place = place if (place / RUN).is_file() else (saved_in(place) or [place])[-1]
    notes = _object(place / RUN)
    model = build_model(ModelTable(**notes["model"]), notes["vocab_size"])
    if not isinstance(model, LanguageModel):
        raise InputError(f"{place} is a translator's, which transformers does not have")
    load_named(ModuleLayout(model), None, place)
    write_hugging_face(model, Path(folder))
    print(f"{place} is {folder}: AutoModelForCausalLM.from_pretrained reads it")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a run's newest checkpoint for transformers")
    parser.add_argument("checkpoint", help="a run's folder, or that of one of its checkpoints")
    parser.add_argument("folder", help=f"where {CONFIG} and {WEIGHTS} are to be")
    given = parser.parse_args()
    try:
        main(given.checkpoint, given.folder)
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
