"""A Hugging Face config.json in the planner: the parameters of transformers' own models."""

import json

import pytest
import torch

from shared.errors import InputError
from shared.planner.hugging_face import KINDS, from_config
from shared.planner.units import read_model

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 130,
    "max_position_embeddings": 64,
}
MORE = {
    "gemma": {"head_dim": 32},
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 64},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 96},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "starcoder2": {"sliding_window": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | MORE.get(kind, {})
    if kind in ("gpt2", "gpt_neox", "opt"):  # whose classes would keep these and not use them
        unused = {"num_key_value_heads"} | ({"intermediate_size"} if kind != "gpt_neox" else set())
        sizes = {name: size for name, size in sizes.items() if name not in unused}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    written = json.loads(config.to_json_string())  # as save_pretrained writes it
    spec = from_config(written)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert spec.seq_len == 64


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        ((28, 3072, 16, 24_576, 256_000, 16, 256, True, "gemma"), 8.537680896),
        ((28, 1024, 16, 3072, 151_936, 8, 128, True, "qwen3"), 0.59604992),
    ],
)
def test_heads_wider_than_their_share_count(sizes, billions):
    """Gemma-7B and Qwen3-0.6B."""
    *values, kind = sizes
    names = ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"]
    names += ["vocab_size", "num_key_value_heads", "head_dim", "tie_word_embeddings"]
    config = dict(zip(names, values, strict=True)) | {"model_type": kind}
    assert from_config(config, 4096).num_parameters == round(billions * 1e9)


def test_a_token_goes_through_as_many_experts_as_are_chosen():
    config = SIZES | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    moe, dense = from_config(config), from_config(SIZES | {"model_type": "mistral"})
    expert, router = 3 * 96 * 160, 8 * 96
    assert moe.num_parameters - dense.num_parameters == 3 * (7 * expert + router)
    assert moe.layer_flops - dense.layer_flops == 2 * (expert + router)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "deepseek_v3"}, "m.json: model_type 'deepseek_v3' is not known: gemma, "),
        ({"model_type": "mistral", "sliding_window": 32}, "sliding_window 32 is shorter than 64"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias True is not counted"),
        ({"model_type": "llama", "hidden_size": None}, "m.json: hidden_size must be given"),
        ({"model_type": "llama", "intermediate_size": None}, "intermediate_size must be given"),
        (
            {"model_type": "mixtral"},
            "num_experts, num_experts_per_tok must be given",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
            "json: moe_intermediate_size must be given",
        ),
    ],
)
def test_what_is_not_counted_is_refused_by_its_name(tmp_path, values, words):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(SIZES | values), encoding="utf-8")
    with pytest.raises(InputError, match=words) as caught:
        read_model(path)
    assert "\n" not in str(caught.value)


def test_a_sequence_of_0_tokens_is_refused():
    with pytest.raises(InputError, match="seq_len must be a whole number, 1 or more, got 0"):
        from_config(SIZES | {"model_type": "llama"}, 0)


def test_a_window_as_long_as_the_sequence_changes_nothing(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(SIZES | {"model_type": "mistral", "sliding_window": 32}))
    assert read_model(path, 32).seq_len == 32
