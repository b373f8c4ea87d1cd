"""What a plan is about: the model, the plan itself, the cluster."""

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

from shared.errors import InputError
from shared.planner.checking import at_least, one_of, yes_or_no
from shared.planner.machines import Cluster as Cluster

Checkpoint = Literal["none", "selective", "full"]
Precision = Literal["mixed", "float32"]
Norm = Literal["layer", "rms"]

# Bytes a parameter of weights, gradients and optimizer. Mixed: 16-bit weights and gradients, and
# float32 weights and two moments with the optimizer (Rajbhandari et al. 2020, section 3.1).
STATE_BYTES = {"mixed": (2, 2, 12), "float32": (4, 4, 8)}


class Parameters(NamedTuple):
    """Parameters of a part of the model: those that tensor parallelism cuts, and the others."""

    cut: int
    whole: int

    def on(self, tp: int) -> int:
        """Parameters on one of `tp` ranks."""
        return self.cut // tp + self.whole


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only Transformer with pre-norm layers and a norm before the output matrix.

    `d_ff` is the inner width; a gated feed-forward (SwiGLU) has three matrices of it and a plain
    one two. `num_kv_heads` None: as many as heads. `norm` "layer" has a gain and a shift, "rms" a
    gain. `tied`: embedding and output matrix are one. `num_positions`: rows of learned positions,
    0 for sinusoidal or rotary ones. `dropout`: whether masks are kept for backward.
    `fused_attention`: the kernel keeps no matrix of scores and skips what a causal mask hides.
    `head_dim` None: d_model / num_heads. `qkv_bias`: biases of queries, keys and values alone;
    `qk_norm`: an RMS norm over each head of queries and of keys. `num_experts`: feed-forwards of
    `d_ff` in place of one, with a router (lesson 18), of which a token goes through `top_k`.

    Raises InputError, naming the field and the value, for anything that cannot be built.
    """

    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    vocab_size: int
    seq_len: int
    num_kv_heads: int | None = None
    gated: bool = False
    bias: bool = True
    norm: Norm = "layer"
    tied: bool = True
    num_positions: int = 0
    dropout: bool = False
    fused_attention: bool = True
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        names = (
            "num_experts",
            "top_k",
            "num_layers",
            "d_model",
            "num_heads",
            "d_ff",
            "vocab_size",
            "seq_len",
        )
        at_least(self, names, 1)
        at_least(self, ("num_positions",), 0)
        if self.top_k > self.num_experts:
            raise InputError(f"top_k {self.top_k} is more than {self.num_experts} experts")
        one_of(self, "norm", get_args(Norm))
        yes_or_no(
            self, ("gated", "bias", "tied", "dropout", "fused_attention", "qkv_bias", "qk_norm")
        )
        if self.head_dim is not None:
            at_least(self, ("head_dim",), 1)
        elif self.d_model % self.num_heads:
            raise InputError(
                f"d_model {self.d_model} cannot be shared out evenly over {self.num_heads} heads"
            )
        if self.num_kv_heads is not None:
            at_least(self, ("num_kv_heads",), 1)
            if self.num_heads % self.num_kv_heads:
                raise InputError(
                    f"{self.num_heads} heads cannot share {self.num_kv_heads} kv heads evenly"
                )
        if 0 < self.num_positions < self.seq_len:
            raise InputError(f"seq_len {self.seq_len} is more than {self.num_positions} positions")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.width // self.num_heads * self.kv_heads

    @property
    def width(self) -> int:
        """Width of all queries of a token, which is the residual stream's but for `head_dim`."""
        return self.d_model if self.head_dim is None else self.head_dim * self.num_heads

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return (2 if self.norm == "layer" else 1) * self.d_model

    @property
    def layer(self) -> Parameters:
        """Parameters of one layer. Whole are the norms and the biases of the row-parallel parts."""
        queries = self.width + 2 * self.kv_width
        inner = (2 if self.gated else 1) * self.d_ff
        cut = self.layer_matrices + (self.bias or self.qkv_bias) * queries + self.bias * inner
        cut += (self.num_experts - 1) * self.feed_forward
        norms = 2 * self.norm_parameters + self.qk_norm * 2 * self.width // self.num_heads
        return Parameters(cut, norms + self.router + self.bias * 2 * self.d_model)

    @property
    def embeddings(self) -> Parameters:
        """Parameters before the first layer: tokens (cut by the vocabulary) and positions."""
        return Parameters(self.vocab_size * self.d_model, self.num_positions * self.d_model)

    @property
    def head(self) -> Parameters:
        """Parameters behind the last layer: the norm, and the output matrix, tied or not."""
        return Parameters(self.vocab_size * self.d_model, self.norm_parameters)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        total = self.num_layers * sum(self.layer) + sum(self.embeddings) + sum(self.head)
        return total - self.tied * self.vocab_size * self.d_model

    @property
    def router(self) -> int:
        """Numbers of a layer's router, where there are experts."""
        return self.num_experts * self.d_model if self.num_experts > 1 else 0

    @property
    def feed_forward(self) -> int:
        """Weights of the matrices of one feed-forward."""
        return (3 if self.gated else 2) * self.d_model * self.d_ff

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA's two factors beside each matrix of one layer (lesson 19)."""
        d, inner = self.d_model, (2 if self.gated else 1) * (self.d_model + self.d_ff)
        attention = 2 * (d + self.width) + 2 * (d + self.kv_width)
        return rank * (attention + self.num_experts * (inner + self.d_ff + d))

    @property
    def layer_matrices(self) -> int:
        """Weights of a layer's matrices, without biases, of one expert where there are several."""
        return 2 * self.d_model * (self.width + self.kv_width) + self.feed_forward

    @property
    def layer_flops(self) -> int:
        """FLOPs of one layer's forward, a token: matrix products, an addition counts as one.

        A fused attention skips the upper triangle, half of the products of queries and keys and
        of weights and values.
        """
        weights = self.layer_matrices + (self.top_k - 1) * self.feed_forward + self.router
        return 2 * weights + self.attention_flops

    @property
    def attention_flops(self) -> int:
        """The part of `layer_flops` that grows with the sequence."""
        return (2 if self.fused_attention else 4) * self.seq_len * self.width

    @property
    def head_flops(self) -> int:
        """FLOPs of the output matrix in forward, a token."""
        return 2 * self.vocab_size * self.d_model

    @property
    def flops(self) -> int:
        """FLOPs of a token in a training step, forward and twice that backward; no recomputation.

        For Megatron's models this is 72 l h^2 (1 + s / (6 h) + V / (12 l h)) (Korthikanti et al.
        2022, appendix A).
        """
        return 3 * (self.num_layers * self.layer_flops + self.head_flops)


@dataclass(frozen=True)
class Plan:
    """How a training step is laid over dp x tp x pp x cp GPUs.

    Each pipeline rank has `chunks` stages (above 1: interleaved). A step takes
    `num_micro_batches` micro-batches of `micro_batch` sequences through each of the dp pipelines.
    `zero` is the stage of ZeRO over the data-parallel ranks, `checkpoint` what is computed again
    in backward ("selective": attention's scores alone, Korthikanti et al. 2022), `precision` what
    the states are kept in (`STATE_BYTES`). `cp` cuts the sequence over ranks that otherwise are
    data-parallel (lesson 17). `cut`: the layers of each of the pp x chunks stages in order, None
    for `stage_layers`. `overlap`: messages over dp travel while something computes, not after it;
    `tp_overlap`: so do tp's, behind the products of their layer. `fused`: what is no product runs
    in fused operations (torch.compile, Megatron's kernels), not one by one. `lora`: the rank of
    adapters on all matrices of the layers (lesson 19), the only weights that are trained; 0: all.

    Raises InputError, naming the field and the value, for what no model could be trained by.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    micro_batch: int = 1
    num_micro_batches: int = 1
    zero: int = 0
    checkpoint: Checkpoint = "none"
    sequence_parallel: bool = False
    precision: Precision = "mixed"
    cp: int = 1
    cut: tuple[int, ...] | None = None
    overlap: bool = True
    tp_overlap: bool = False
    fused: bool = True
    lora: int = 0

    def __post_init__(self) -> None:
        sizes = ("dp", "tp", "pp", "chunks", "micro_batch", "num_micro_batches", "cp")
        at_least(self, sizes, 1)
        at_least(self, ("lora",), 0)
        yes_or_no(self, ("sequence_parallel", "overlap", "tp_overlap", "fused"))
        one_of(self, "zero", (0, 1, 2, 3))
        one_of(self, "checkpoint", get_args(Checkpoint))
        one_of(self, "precision", get_args(Precision))
        if self.chunks > 1 and self.pp == 1:
            raise InputError(f"chunks {self.chunks} need a pipeline: pp is 1")
        if self.chunks > 1 and self.num_micro_batches % self.pp:
            raise InputError(
                f"interleaving needs a multiple of pp = {self.pp} micro-batches, "
                f"got {self.num_micro_batches}"
            )
        if self.cut is not None and (len(self.cut) != self.num_stages or min(self.cut) < 0):
            raise InputError(f"cut {self.cut} does not name the layers of {self.num_stages} stages")

    @property
    def num_stages(self) -> int:
        """Stages of all pipeline ranks together."""
        return self.pp * self.chunks

    @property
    def num_gpus(self) -> int:
        """Ranks of the plan."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def batch(self) -> int:
        """Sequences of a step, all pipelines together."""
        return self.dp * self.micro_batch * self.num_micro_batches

    @property
    def bubble(self) -> float:
        """Waiting of a pipeline rank as a share of its work, (p - 1) / (v m)."""
        return (self.pp - 1) / (self.chunks * self.num_micro_batches)

    def stages(self, model: ModelSpec) -> tuple[int, ...]:
        """Layers of each stage, in order; raises InputError for more stages than layers."""
        return self.cut or stage_layers(model.num_layers, self.num_stages)

    def layers(self, model: ModelSpec) -> tuple[tuple[int, ...], ...]:
        """The same by pipeline rank: rank r has stages r, r + pp, ..."""
        return _by_rank(self.stages(model), self.pp)


@cache
def stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Share layers out over stages: the numbers differ by one at the most.

    Where some stages get one layer less, these are the last stage, the first, the last but one,
    and so on: the last has the output matrix as well, the first the embedding (Llama 3 does so).
    Raises InputError for more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise InputError(f"{num_layers} layers make 1 to {num_layers} stages, got {num_stages}")
    counts = [-(-num_layers // num_stages)] * num_stages
    for i in range(-num_layers % num_stages):
        counts[i // 2 if i % 2 else -1 - i // 2] -= 1
    return tuple(counts)


@cache
def _by_rank(counts: tuple[int, ...], pp: int) -> tuple[tuple[int, ...], ...]:
    return tuple(counts[rank::pp] for rank in range(pp))
