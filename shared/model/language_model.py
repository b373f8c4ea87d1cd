"""A decoder-only language model from the Transformer's own blocks."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from shared.model.config import TransformerConfig
from shared.model.layers import EncoderLayer, make_norm
from shared.model.transformer import embed, initialise, make_positions


class LanguageModel(nn.Module):
    """Encoder layers that look back only: every position predicts the token after it.

    This is what "decoder-only" means: the Transformer's decoder without the attention to a memory,
    which is its encoder with a causal mask. Padding needs no mask as long as it comes last.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = make_positions(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.norm = make_norm(config) if config.norm == "pre" else nn.Identity()
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialise(self)
        if config.tie_embeddings:
            self.embedding.weight = self.output.weight

    def forward(
        self, tokens: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length vocab_size"]:
        """Logits of the token that follows each position, from that position and those before it.

        Raises InputError for a token id outside the vocabulary (on the CPU) and for a sequence
        longer than `max_len`.
        """
        x = embed(tokens, self.embedding, self.positions, self.config)
        for layer in self.layers:
            x = layer(x, causal=True)
        return self.output(self.norm(x))
