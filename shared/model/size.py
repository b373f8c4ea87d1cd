"""The number of parameters of a configuration, by formula: no model has to be built."""

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
    """Parameters of an attention: four square projections with bias, for any number of heads."""
    return 4 * (config.d_model**2 + config.d_model)


def feed_forward_parameters(config: TransformerConfig) -> int:
    """Parameters of a feed-forward network: a projection up to d_ff and one back, with bias."""
    return 2 * config.d_model * config.d_ff + config.d_ff + config.d_model


def norm_parameters(config: TransformerConfig) -> int:
    """Parameters of a layer norm: a gain and a shift for each feature."""
    return 2 * config.d_model


def position_parameters(config: TransformerConfig) -> int:
    """Parameters of one side's positions: max_len rows where they are learned, else none."""
    return config.max_len * config.d_model if config.positions == "learned" else 0
