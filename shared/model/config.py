"""The frozen description of a model."""

from dataclasses import dataclass
from typing import Literal, get_args

from shared.errors import InputError

Norm = Literal["pre", "post"]
Positions = Literal["sinusoidal", "learned", "rotary", "none"]


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that fixes the shape of a Transformer; the defaults train on two cores.

    One vocabulary serves source and target, so `tie_embeddings` shares a single matrix between
    both embeddings and the output projection (Vaswani et al. 2017, section 3.4).

    `dropout` acts where the paper puts it: on each sub-layer's output and on the embeddings.
    `inner_dropout` acts inside the sub-layers, on attention weights and after the ReLU, where the
    paper has none and torch.nn.Transformer applies the same rate.

    Raises InputError, naming the field and the value, for anything that cannot be built.
    """

    vocab_size: int
    d_model: int = 256
    num_heads: int = 4
    num_layers: int = 3
    d_ff: int = 1024
    dropout: float = 0.1
    norm: Norm = "pre"
    fused: bool = True
    positions: Positions = "sinusoidal"
    tie_embeddings: bool = True
    max_len: int = 512
    pad_id: int = 0
    inner_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_heads", "num_layers", "d_ff", "max_len"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise InputError(f"{name} must be an integer, not {value!r}")
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        for name in ("dropout", "inner_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.norm not in get_args(Norm):
            raise InputError(f"norm must be 'pre' or 'post', not {self.norm!r}")
        if self.positions not in get_args(Positions):
            kinds = ", ".join(get_args(Positions))
            raise InputError(f"positions must be one of {kinds}, not {self.positions!r}")
        if not 0 <= self.pad_id < self.vocab_size:
            raise InputError(f"pad_id must be in [0, {self.vocab_size}), not {self.pad_id}")
        self._check_width()

    def _check_width(self) -> None:
        """Raise InputError unless d_model can be split into heads and hold the positions."""
        if self.d_model % self.num_heads:
            raise InputError(
                f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: "
                f"every head needs the same width"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise InputError(
                f"d_model={self.d_model} is odd: sinusoidal positions need an even width"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise InputError(
                f"d_model={self.d_model} with num_heads={self.num_heads} gives head_dim="
                f"{self.head_dim}, which is odd: rotary positions turn pairs of features"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head, K = D / H."""
        return self.d_model // self.num_heads
