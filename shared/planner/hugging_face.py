"""A model from the config.json of a Hugging Face model."""

from typing import Any

from shared.errors import InputError
from shared.planner.specs import ModelSpec

LLAMA = {"gated": True, "bias": False, "norm": "rms", "tied": False}
# By model_type, what its classes have; `tied` where the file does not say.
KINDS: dict[str, dict[str, Any]] = {
    "gemma": LLAMA | {"tied": True},
    "gpt2": {"tied": True},
    "gpt_neox": {"tied": False},
    "granite": LLAMA,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "opt": {"tied": True},
    "qwen2": LLAMA | {"qkv_bias": True},
    "qwen3": LLAMA | {"qk_norm": True},
    "qwen3_moe": LLAMA | {"qk_norm": True},
    "starcoder2": {"tied": True},
}
NAMES = {  # ours: theirs, the first that is there
    "num_layers": ("num_hidden_layers", "n_layer"),
    "d_model": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "d_ff": ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "tied": ("tie_word_embeddings",),
    "num_experts": ("num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
}
EXPERTS = ("num_local_experts or num_experts", "num_experts_per_tok")
SIZES = {  # what else a file has to say, by model_type; the others have the first kind's
    "llama": ("intermediate_size",),
    "gpt2": (),
    "opt": ("ffn_dim",),
    "mixtral": ("intermediate_size", *EXPERTS),
    "qwen3_moe": ("moe_intermediate_size", *EXPERTS),
}
LONGEST = 8192  # tokens of a sequence where nobody says


def from_config(config: dict[str, Any], seq_len: int | None = None) -> ModelSpec:
    """The model of a config.json, trained on sequences of `seq_len` tokens.

    None: as many as it has positions, 8,192 at most. Raises InputError for a model_type that is not
    in KINDS, and by its name for what the planner does not count: a window of attention shorter
    than the sequence, layers that differ, biases here and not there.
    """
    kind = str(config["model_type"])
    if kind not in KINDS:
        raise InputError(f"model_type {kind!r} is not known: {', '.join(KINDS)} are")
    found = dict(KINDS[kind])
    for ours, theirs in NAMES.items():
        values = [config[name] for name in theirs if config.get(name) is not None]
        found |= {ours: values[0]} if values else {}
    missing = [NAMES[name][0] for name in list(NAMES)[:5] if name not in found and name != "d_ff"]
    for names in SIZES.get(kind, SIZES["llama"]):
        if all(config.get(name) is None for name in names.split(" or ")):
            missing.append(names)
    if missing:
        raise InputError(f"{', '.join(missing)} must be given")
    found.setdefault("d_ff", 4 * found["d_model"])  # GPT-2's, which may not say
    positions = config.get("max_position_embeddings") or config.get("n_positions") or LONGEST
    found["seq_len"] = min(positions, LONGEST) if seq_len is None else seq_len
    if kind in ("gpt2", "opt"):  # learned ones; OPT has two more
        found["num_positions"] = positions + 2 * (kind == "opt")
    refuse(config, found["seq_len"])
    if config.get("mlp_bias"):
        found["bias"] = True
    return ModelSpec(**found)


def refuse(config: dict[str, Any], seq_len: int) -> None:
    """Raise InputError for what would be counted wrongly."""
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True) and window < seq_len:
        raise InputError(
            f"sliding_window {window} is shorter than {seq_len} tokens, and the planner counts "
            f"attention over all of them: plan for --sequence {window} or less"
        )
    same = {
        "attention_bias": bool(config.get("mlp_bias", config["model_type"] == "gpt_neox")),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "do_layer_norm_before": True,
        "word_embed_proj_dim": config.get("hidden_size"),
        "use_bias": True,
        "enable_bias": True,
        "add_cross_attention": False,
    }
    for name, value in same.items():
        if config.get(name) not in (None, value):
            raise InputError(f"{name} {config[name]!r} is not counted: only {value!r} is")
