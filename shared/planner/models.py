"""Models and machines by name."""

from typing import Any

from shared.errors import InputError
from shared.planner.specs import Cluster, ModelSpec


def megatron(num_layers: int, d_model: int, num_heads: int) -> ModelSpec:
    """A GPT of the Megatron papers: 2,048 tokens of 51,200, dropout, attention not fused."""
    return ModelSpec(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        d_ff=4 * d_model,
        vocab_size=51_200,
        seq_len=2048,
        num_positions=2048,
        dropout=True,
        fused_attention=False,
    )


def llama3(
    num_layers: int, d_model: int, num_heads: int, d_ff: int, seq_len: int = 8192
) -> ModelSpec:
    """A Llama 3: 8 heads of keys and values, SwiGLU, RMS norms, untied, no biases."""
    return ModelSpec(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        d_ff=d_ff,
        vocab_size=128_256,
        seq_len=seq_len,
        num_kv_heads=8,
        gated=True,
        bias=False,
        norm="rms",
        tied=False,
    )


# Brown et al. 2020 (its vocabulary of 50,257 padded as by Megatron, its attention fused as today);
# Grattafiori et al. 2024, table 3; Radford et al. 2019.
MODELS = {
    "gpt2": ModelSpec(12, 768, 12, 3072, 50_304, 1024, num_positions=1024),
    "gpt3-175b": ModelSpec(96, 12_288, 96, 49_152, 51_200, 2048, num_positions=2048),
    "8b": llama3(32, 4096, 32, 14_336),
    "70b": llama3(80, 8192, 64, 28_672),
    "405b": llama3(126, 16_384, 128, 53_248),
}


def a100(gpus: int) -> Cluster:
    """A100 80 GB SXM: eight a node with NVLink, one 200 Gbit/s card each."""
    return Cluster(gpus, 80e9, 312e12, 8, 300e9, 25e9, 2.0e12, achievable=271.2 / 312)


def h100(gpus: int) -> Cluster:
    """H100 80 GB SXM: eight a node with NVLink, one 400 Gbit/s card each."""
    return Cluster(gpus, 80e9, 989e12, 8, 450e9, 50e9, 3.35e12, 5e-6, 794.5 / 989, throttled=True)


def h200(gpus: int) -> Cluster:
    """H200: an H100 with 141 GB of faster memory."""
    return Cluster(gpus, 141e9, 989e12, 8, 450e9, 50e9, 4.8e12, 5e-6, 794.5 / 989, throttled=True)


# Peaks are NVIDIA's dense bf16, `achievable` what large products reach at best (stas00,
# ml-engineering, compute/accelerator).
GPUS = {"a100": a100, "h100": h100, "h200": h200}


def spec_of(config: Any, seq_len: int) -> ModelSpec:
    """The course's `LanguageModel(config)`, trained on sequences of `seq_len` tokens.

    `config` is a `shared.model.config.TransformerConfig`, or lesson 23's `ModernConfig` for its
    `ModernModel`; this room imports none of that one. Raises InputError for post-norm layers.
    """
    modern = hasattr(config, "num_kv_heads")
    if config.norm != "pre":
        raise InputError(f"the planner counts pre-norm layers, got norm {config.norm!r}")
    return ModelSpec(
        num_layers=config.num_layers,
        d_model=config.d_model,
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        vocab_size=config.vocab_size,
        seq_len=seq_len,
        tied=config.tie_embeddings,
        num_positions=config.max_len if config.positions == "learned" else 0,
        dropout=config.dropout > 0,
        fused_attention=config.fused,
        num_kv_heads=config.num_kv_heads if modern else None,
        gated=modern,
        bias=not modern,
        norm="rms" if modern else "layer",
    )
