"""Published training runs as data: what was trained, how it was laid out, how fast it went.

Narayanan et al. 2021 and Korthikanti et al. 2022 used the same machines. Micro-batches and chunks
of the first are those of its authors' scripts (NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh):
interleaved from 76 B on, but for the largest; those of the second stand in its section 6 and table
3. By the same scripts the first's runs without a pipeline reduce gradients while backward goes on
(`--DDP-impl torch`) and the others after it (`local`), as in the second, which says so. Of Llama 3
the paper says that the first and last stage have a layer less, so that one chunk has the embedding
alone: stages of one layer, 8 on a rank. Micro-batches of one sequence are our reading of its batch
sizes. It shards gradients as well; when they travel it does not say, and they are planned for once
a step (ZeRO-1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shared.planner.models import MODELS, a100, h100, llama3, megatron
from shared.planner.specs import Checkpoint, Cluster, ModelSpec, Plan

Source = Literal["Narayanan 2021", "Korthikanti 2022", "Llama 3 2024", "torchtitan", "NeMo 2025"]


@dataclass(frozen=True)
class Run:
    """A row of a published table.

    `flops` are those of a step and a GPU as the source counts them; `seconds` of a step, as printed
    or from the FLOP/s that are printed.
    """

    source: Source
    name: str
    model: ModelSpec
    plan: Plan
    cluster: Cluster
    flops: float
    seconds: float

    @property
    def published(self) -> float:
        """FLOP/s of a GPU as the source counts them."""
        return self.flops / self.seconds


# 10^9 parameters as printed, layers, width, heads, tp, pp, GPUs, batch, micro-batch, chunks,
# 10^12 FLOP/s a GPU
NARAYANAN = [
    ("1.7", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    ("3.6", 30, 3072, 32, 2, 1, 64, 512, 16, 1, 138),
    ("7.5", 36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
    ("18.4", 40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135),
    ("39.1", 48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138),
    ("76.1", 60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 140),
    ("145.6", 80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
    ("310.1", 96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155),
    ("529.6", 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163),
    ("1008.0", 128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163),
]

# name, layers, width, heads, pp, GPUs, batch, micro-batch, chunks, seconds with full recomputation,
# seconds with selective recomputation and sequence parallelism
KORTHIKANTI = [
    ("22B", 48, 6144, 64, 1, 8, 4, 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 64, 64, 1, 3, 18.13, 13.75),
    ("530B", 105, 20480, 128, 35, 280, 280, 1, 3, 49.05, 37.83),
    ("1T", 128, 25600, 160, 64, 512, 512, 1, 1, 94.42, 71.49),
]

# GPUs, cp, dp, sequence, 10^12 FLOP/s a GPU; 2^24 tokens a batch
LLAMA = [(8192, 1, 64, 8192, 430), (16384, 1, 128, 8192, 400), (16384, 16, 8, 131072, 380)]


def narayanan() -> list[Run]:
    """Table 1 of arXiv 2104.04473; FLOPs with those of full recomputation (section 5.1)."""
    runs = []
    for name, layers, width, heads, tp, pp, gpus, batch, micro, chunks, tera in NARAYANAN:
        model, dp = megatron(layers, width, heads), gpus // (tp * pp)
        plan = Plan(
            dp=dp,
            tp=tp,
            pp=pp,
            chunks=chunks,
            micro_batch=micro,
            num_micro_batches=batch // (dp * micro),
            checkpoint="full",
            overlap=pp == 1,  # torch's DDP
        )
        each = model.flops + layers * model.layer_flops
        flops = each * batch * model.seq_len / gpus
        run = Run(
            "Narayanan 2021", f"{name}B", model, plan, a100(gpus), flops, flops / (tera * 1e12)
        )
        runs.append(run)
    return runs


def korthikanti() -> list[Run]:
    """Table 5 of arXiv 2205.05198, tp 8, no data parallelism; model FLOPs (appendix A)."""
    runs = []
    for name, layers, width, heads, pp, gpus, batch, micro, chunks, full, present in KORTHIKANTI:
        model = megatron(layers, width, heads)
        flops = model.flops * batch * model.seq_len / gpus
        plan = Plan(
            tp=8,
            pp=pp,
            chunks=chunks,
            micro_batch=micro,
            num_micro_batches=batch // micro,
            checkpoint="full",
            overlap=False,
        )
        present_plan = replace(plan, checkpoint="selective", sequence_parallel=True)
        for word, each, seconds in (("full", plan, full), ("present", present_plan, present)):
            run = Run("Korthikanti 2022", f"{name} {word}", model, each, a100(gpus), flops, seconds)
            runs.append(run)
    return runs


def llama() -> list[Run]:
    """Table 4 of Grattafiori et al. 2024 (arXiv 2407.21783), Llama 3 405B.

    How its FLOPs are counted is not said; here half of attention's square counts, as is computed.
    """
    runs = []
    for gpus, cp, dp, length, tera in LLAMA:
        model, rows = llama3(126, 16_384, 128, 53_248, length), 2**24 // length
        plan = Plan(
            dp=dp,
            tp=8,
            pp=16,
            chunks=8,
            num_micro_batches=rows // dp,
            zero=1,
            sequence_parallel=True,
            cp=cp,
            cut=(0, *[1] * 126, 0),
        )
        flops = model.flops * 2**24 / gpus
        name = f"405B {gpus} x {length}"
        run = Run("Llama 3 2024", name, model, plan, h100(gpus), flops, flops / (tera * 1e12))
        runs.append(run)
    return runs


def published_runs() -> list[Run]:
    """All rows, 10 + 8 + 3."""
    return [*narayanan(), *korthikanti(), *llama()]


# Model, machines, GPUs, tp, sequences of a micro-batch, recomputation, tokens/s of a GPU
TORCHTITAN: list[tuple[str, str, int, int, int, Checkpoint, float]] = [
    ("70b", "a100", 64, 1, 1, "full", 331),
    ("70b", "h100", 256, 8, 16, "full", 597.3),
    ("405b", "h100", 128, 8, 2, "full", 109),
    ("llama2-70b", "a100", 64, 1, 2, "full", 353),
    ("llama2-13b", "a100", 64, 1, 2, "none", 2162),
]
TORCHTITAN_SELECTIVE: list[tuple[str, str, int, int, int, Checkpoint, float]] = [
    ("8b", "a100", 64, 1, 1, "full", 2973),
    ("8b", "h100", 8, 1, 2, "full", 6667),
    ("8b", "h100", 128, 1, 2, "full", 6514),
]
LLAMA_2 = {  # Touvron et al. 2023; the 13B has as many heads of keys and values as of queries
    "llama2-13b": replace(llama3(40, 5120, 40, 13_824, 4096), num_kv_heads=None, vocab_size=32_000),
    "llama2-70b": replace(llama3(80, 8192, 64, 28_672, 4096), vocab_size=32_000),
}


def torchtitan(
    rows: Sequence[tuple[str, str, int, int, int, Checkpoint, float]] = TORCHTITAN,
) -> list[Run]:
    """Llama 2 and 3 under FSDP, with tp or without, no float8.

    pytorch/torchtitan, docs/performance.md as it was with the 405B (an older version has 323 for
    the first row) and benchmarks/asyncTP_llama3_h100_2025-06. The 13B recomputes nothing, the
    others all. Its H100s have 94 to 96 GB of slower memory, which the cluster says, and less power
    than 700 W (500 W for the 70B), of which the planner knows nothing. For its runs with selective
    recomputation see `torchtitan_selective`.
    """
    runs = []
    for name, gpu, gpus, tp, micro, checkpoint, speed in rows:
        model, slower = (
            (MODELS | LLAMA_2)[name],
            replace(h100(gpus), memory=96e9, memory_bandwidth=2.4e12),
        )
        plan = Plan(
            dp=gpus // tp,
            tp=tp,
            micro_batch=micro,
            zero=3,
            checkpoint=checkpoint,
            sequence_parallel=tp > 1,
        )
        cluster, tokens = a100(gpus) if gpu == "a100" else slower, plan.batch * model.seq_len
        flops = model.flops * tokens / gpus
        run = Run(
            "torchtitan",
            f"{name} {gpus} {gpu}",
            model,
            plan,
            cluster,
            flops,
            tokens / (gpus * speed),
        )
        runs.append(run)
    return runs


def torchtitan_selective() -> list[Run]:
    """Llama 3 8B, planned with full recomputation, which is more than its operators' own.

    The planner has nothing between "none" and "full" for fused attention. So what it says of these
    is a bound: without its error it would be slower than what was published.
    """
    return torchtitan(TORCHTITAN_SELECTIVE)


def with_replicas() -> Run:
    """Korthikanti et al., section 6.3: the 530B model on eight replicas, 2,240 GPUs, 39.15 s."""
    one = next(run for run in korthikanti() if run.name == "530B present")
    plan = replace(one.plan, dp=8)
    return replace(one, name="530B x 8", plan=plan, cluster=a100(2240), seconds=39.15)


def runs_not_fitted() -> list[Run]:
    """Published runs that the fit does not see; `nemo` has more."""
    return [*torchtitan(), with_replicas()]


# Model, its plan but for dp (tp, pp, chunks, cp, micro-batches), GPUs and seconds of a step
NEMO = [
    ("8b", (1, 1, 1, 2, 32), ((8, 12.91), (128, 13.10))),
    ("70b", (4, 4, 5, 2, 64), ((64, 14.72), (256, 14.80), (2048, 14.98))),
    ("405b", (8, 9, 7, 2, 63), ((576, 17.20), (2304, 17.62))),
    ("gpt3-175b", (4, 8, 12, 1, 64), ((128, 8.309), (2048, 8.49))),
    ("340b", (8, 8, 12, 1, 16), ((128, 4.61), (2048, 4.84))),
]
# As the recipes have them: dropout, 16 heads of keys and values; and Nemotron 4, whose
# feed-forward is plain.
NEMO_MODELS = MODELS | {
    "gpt3-175b": replace(MODELS["gpt3-175b"], dropout=True),
    "405b": replace(MODELS["405b"], num_kv_heads=16),
    "340b": ModelSpec(
        96, 18_432, 96, 73_728, 256_000, 4096, num_kv_heads=8, bias=False, tied=False
    ),
}


def nemo() -> list[Run]:
    """NVIDIA's own runs of five models in bf16, in micro-batches of one sequence, on H100.

    NVIDIA/dgxc-benchmarking at 143b90d, the READMEs of llama3.1, nemo_megatron and nemotron: step
    times that a well-kept cluster should reach. Nothing is computed again, the optimizer is shared
    out (ZeRO-1), and its messages overlap with compute. So do those of tp in all but the 8B
    (`ub_tp_comm_overlap` in NVIDIA/NeMo-Framework-Launcher), of which the planner knows nothing.
    """
    runs = []
    for name, (tp, pp, chunks, cp, count), rows in NEMO:
        model = NEMO_MODELS[name]
        plan = Plan(
            tp=tp,
            pp=pp,
            chunks=chunks,
            cp=cp,
            num_micro_batches=count,
            zero=1,
            sequence_parallel=tp > 1,
        )
        for gpus, seconds in rows:
            each = replace(plan, dp=gpus // plan.num_gpus)
            flops = model.flops * each.batch * model.seq_len / gpus
            run = Run("NeMo 2025", f"{name} {gpus}", model, each, h100(gpus), flops, seconds)
            runs.append(run)
    return runs
