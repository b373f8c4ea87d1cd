"""A plan in other tools' words: Megatron-LM's flags, files of torchtitan, DeepSpeed, Accelerate.

Names from their sources: Megatron-LM, megatron/training/arguments.py; torchtitan, its job
configuration; DeepSpeed 0.19.8; Accelerate 1.15. They say how a step is laid out, not what is
trained.
"""

import json
from collections.abc import Callable

from shared.errors import InputError
from shared.planner.specs import ModelSpec, Plan


def megatron(model: ModelSpec, plan: Plan) -> str:
    """Flags."""
    flags = [
        f"--tensor-model-parallel-size {plan.tp}",
        f"--pipeline-model-parallel-size {plan.pp}",
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {plan.batch}",
        f"--seq-length {model.seq_len}",
    ]
    if plan.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}")
    if plan.cut:  # the first and the last stage have a layer less
        flags += ["--account-for-embedding-in-pipeline-split"]
        flags += ["--account-for-loss-in-pipeline-split"]
    flags += ["--sequence-parallel"] if plan.sequence_parallel else []
    flags += ["--bf16"] if plan.precision == "mixed" else []
    if plan.checkpoint == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform"]
        flags += ["--recompute-num-layers 1"]
    elif plan.checkpoint == "selective":
        flags.append("--recompute-granularity selective")
    if plan.zero == 1:
        flags.append("--use-distributed-optimizer")
    elif plan.zero:
        cut = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {cut}"]
    return " \\\n".join(flags)


def torchtitan(model: ModelSpec, plan: Plan) -> str:
    """TOML. Its FSDP cuts gradients wherever it cuts states: ZeRO-1 is 2 there."""
    sharded = plan.zero > 0
    lines = [
        "[training]",
        f"local_batch_size = {plan.batch // plan.dp if plan.pp > 1 else plan.micro_batch}",
        f"global_batch_size = {plan.batch}",
        f"seq_len = {model.seq_len}",
        "[parallelism]",
        f"data_parallel_shard_degree = {plan.dp if sharded else 1}",
        f"data_parallel_replicate_degree = {1 if sharded else plan.dp}",
        f"tensor_parallel_degree = {plan.tp}",
        f"pipeline_parallel_degree = {plan.pp}",
    ]
    if plan.pp > 1:
        schedule = "1F1B" if plan.chunks == 1 else "Interleaved1F1B"
        lines.append(f'pipeline_parallel_schedule = "{schedule}"')
        lines.append(f"pipeline_parallel_microbatch_size = {plan.micro_batch}")
    if sharded:
        again = "always" if plan.zero == 3 else "never"
        lines.append(f'fsdp_reshard_after_forward = "{again}"')
    return "\n".join([*lines, "[activation_checkpoint]", f'mode = "{plan.checkpoint}"'])


def deepspeed(model: ModelSpec, plan: Plan) -> str:
    """JSON; raises InputError for ZeRO-2 and 3 in a pipeline."""
    if plan.pp > 1 < plan.zero:
        raise InputError(f"DeepSpeed refuses ZeRO-{plan.zero} in a pipeline: plan with --deepspeed")
    config = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "zero_optimization": {"stage": plan.zero},
        "bf16": {"enabled": plan.precision == "mixed"},
    }
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    pipeline = f"\n// PipelineModule(layers, num_stages={plan.pp})" if plan.pp > 1 else ""
    return json.dumps(config, indent=2) + pipeline


def accelerate(model: ModelSpec, plan: Plan) -> str:
    """The yaml file of a run by FSDP2 or DDP; raises InputError for what it does not lay out."""
    if plan.tp * plan.pp > 1 or plan.zero == 1:
        raise InputError(
            "Accelerate's FSDP2 is tp 1, pp 1 and ZeRO 2 or 3: plan with --tp 1 --pp 1 --zero 3"
        )
    lines = [f"num_processes: {plan.dp}"]
    lines += [f"mixed_precision: {'bf16' if plan.precision == 'mixed' else 'no'}"]
    lines += [f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU'}"]
    if plan.zero:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {str(plan.zero == 3).lower()}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {str(plan.checkpoint == 'full').lower()}",
        ]
    return "\n".join(
        [*lines, f"# Accelerator(gradient_accumulation_steps={plan.num_micro_batches})"]
    )


TOOLS: dict[str, Callable[[ModelSpec, Plan], str]] = {
    each.__name__: each for each in (megatron, torchtitan, deepspeed, accelerate)
}


def spoken(tool: str, model: ModelSpec, plan: Plan) -> str:
    """A plan as a tool wants it; raises InputError for what that tool has no words for."""
    if plan.lora:
        raise InputError(f"--as {tool}: adapters are the model's, not the layout's: --lora 0")
    return TOOLS[tool](model, plan)
