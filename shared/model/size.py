"""How many parameters a configuration means, by formula: no model has to be built to know it."""

from shared.model.config import TransformerConfig


def count_parameters(config: TransformerConfig) -> int:
    """Number of trained parameters of `Transformer(config)`, from the sizes alone.

    A parameter that is used in several places (tied embeddings) counts once.
    """
    encoder_layer = attention_parameters(config) + feed_forward_parameters(config)
    encoder_layer += 2 * norm_parameters(config)
    decoder_layer = 2 * attention_parameters(config) + feed_forward_parameters(config)
    decoder_layer += 3 * norm_parameters(config)
    final_norms = 2 * norm_parameters(config) if config.norm == "pre" else 0
    matrices = 1 if config.tie_embeddings else 3  # source, target, output
    return (
        matrices * config.vocab_size * config.d_model
        + 2 * position_parameters(config)
        + config.num_layers * (encoder_layer + decoder_layer)
        + final_norms
    )


def attention_parameters(config: TransformerConfig) -> int:
    """Four square projections with bias; the number of heads does not matter."""
    return 4 * (config.d_model**2 + config.d_model)


def feed_forward_parameters(config: TransformerConfig) -> int:
    """One projection up to d_ff, one back, both with bias."""
    return 2 * config.d_model * config.d_ff + config.d_ff + config.d_model


def norm_parameters(config: TransformerConfig) -> int:
    """A gain and a shift for each feature."""
    return 2 * config.d_model


def position_parameters(config: TransformerConfig) -> int:
    """A learned table has max_len rows; every other kind of position is free."""
    return config.max_len * config.d_model if config.positions == "learned" else 0
