"""A plan in other tools' words: Megatron-LM's flags, files of torchtitan, DeepSpeed, Accelerate.

Names from their sources, none of them run with these files: Megatron-LM at d98e8a6,
megatron/training/arguments.py; torchtitan 0.2.2 (the last release that reads TOML), its job
configuration; DeepSpeed 0.19.8; Accelerate 1.15. They say how a step is laid out, not what is
trained.
"""

import json
from collections.abc import Callable

from shared.errors import InputError
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.variants import shorter_ends

AGAIN = "checkpoint each layer in the model"


def megatron(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Flags; raises InputError for stages that they do not make."""
    flags = [
        f"--tensor-model-parallel-size {plan.tp}",
        f"--pipeline-model-parallel-size {plan.pp}",
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {plan.batch}",
        f"--seq-length {model.seq_len}",
    ]
    if plan.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}")
    counts = plan.stages(model)
    if len(set(counts)) > 1:
        if counts != shorter_ends(model.num_layers, plan.num_stages):
            raise _other_stages("Megatron-LM", model, plan)
        flags += [f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss")]
    flags += ["--sequence-parallel"] if plan.sequence_parallel else []
    # Without the second it accumulates gradients in float32; the plan counts 2 bytes.
    flags += ["--bf16", "--grad-reduce-in-bf16"] if plan.precision == "mixed" else []
    if plan.checkpoint == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform"]
        flags += ["--recompute-num-layers 1"]
    elif plan.checkpoint == "selective":
        flags.append("--recompute-granularity selective")
    flags += ["--use-distributed-optimizer"] if plan.zero == 1 else []
    if plan.zero > 1:
        cut = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {cut}"]
        flags += ["--ckpt-format fsdp_dtensor"]
    return "\n".join([*_megatron_notes(plan), " \\\n".join(flags)])


def _megatron_notes(plan: Plan) -> list[str]:
    if plan.zero > 1:
        return ["# unset CUDA_DEVICE_MAX_CONNECTIONS"]
    return ["# CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell"] if plan.tp > 1 else []


def torchtitan(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """TOML. Its FSDP cuts gradients wherever it cuts states: ZeRO-1 is 2 there.

    Raises InputError for DDP beside other axes, and for stages that it does not make.
    """
    sharded = plan.zero > 0
    if plan.dp > 1 and plan.tp * plan.pp > 1 and not sharded:
        raise InputError("torchtitan has no DDP beside tp or pp: plan with --zero 1")
    lines = [
        "# torchtitan 0.2.2 (the last release that reads TOML)",
        "[training]",
        f"local_batch_size = {plan.batch // plan.dp if plan.pp > 1 else plan.micro_batch}",
        f"global_batch_size = {plan.batch}",
        f"seq_len = {model.seq_len}",
        f'mixed_precision_param = "{"bfloat16" if plan.precision == "mixed" else "float32"}"',
        "[parallelism]",
        f"data_parallel_shard_degree = {plan.dp if sharded else 1}",
        f"data_parallel_replicate_degree = {1 if sharded else plan.dp}",
        f"tensor_parallel_degree = {plan.tp}",
        f"pipeline_parallel_degree = {plan.pp}",
    ]
    lines += _titan_pipeline(model, plan) if plan.pp > 1 else []
    if sharded:
        again = "always" if plan.zero == 3 else "never"
        lines.append(f'fsdp_reshard_after_forward = "{again}"')
    return "\n".join([*lines, "[activation_checkpoint]", f'mode = "{plan.checkpoint}"'])


def _titan_pipeline(model: ModelSpec, plan: Plan) -> list[str]:
    counts, size = plan.stages(model), plan.num_stages
    less = int(len(set(counts)) > 1)  # left to itself, one layer less at both ends
    layers, over = divmod(model.num_layers + 2 * less, size)
    made = [layers + (stage < over) for stage in range(size)]
    made[0] -= less
    made[-1] -= less
    if counts != tuple(made):
        raise _other_stages("torchtitan", model, plan)
    lines = [
        f'pipeline_parallel_schedule = "{"1F1B" if plan.chunks == 1 else "Interleaved1F1B"}"',
        f"pipeline_parallel_microbatch_size = {plan.micro_batch}",
        f"pipeline_parallel_first_stage_less_layers = {less}",
        f"pipeline_parallel_last_stage_less_layers = {less}",
    ]
    if plan.chunks > 1:  # with one chunk it need not be said, and rounded up may give fewer stages
        lines.append(f"pipeline_parallel_layers_per_stage = {layers}")
    return lines


def deepspeed(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """JSON with comments; raises InputError for what a pipeline of DeepSpeed's cannot be."""
    if plan.pp > 1 < plan.zero:
        raise InputError(f"DeepSpeed refuses ZeRO-{plan.zero} in a pipeline: plan with --deepspeed")
    if plan.chunks > 1:
        raise InputError("DeepSpeed's PipelineModule has one stage a rank: plan with --deepspeed")
    if plan.pp > 1 < plan.tp:
        raise InputError("AutoTP does not go with PipelineModule: plan with --tp 1 or --pp 1")
    config = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "zero_optimization": {"stage": plan.zero},
        "bf16": {"enabled": plan.precision == "mixed"},
    }
    if plan.tp > 1:  # whose ranks DeepSpeed would count among those that share out a batch
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    else:
        config = {"train_batch_size": plan.batch, **config}
    lines = [json.dumps(config, indent=2)]
    full = plan.checkpoint == "full"
    if plan.pp > 1:
        more = ", activation_checkpoint_interval=1" if full else ""
        lines.append(
            f"// PipelineModule(layers, num_stages={plan.pp}{more}, "
            'partition_method="type:CLASS"): CLASS is that of a layer'
        )
        counts = plan.stages(model)
        if counts != tuple(sorted(counts, reverse=True)):
            lines.append(f"// it makes its last stages shorter; by the plan they have {counts}")
    elif full:
        lines.append(f"// {AGAIN}")
    return "\n".join(lines)


def accelerate(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """The yaml file of a run by FSDP2 or DDP; raises InputError for what it does not lay out."""
    if plan.tp * plan.pp > 1 or plan.zero == 1:
        raise InputError(
            "this prints FSDP2 alone, of ZeRO 2 or 3; tp is `parallelism_config`: plan with "
            "--tp 1 --pp 1 --zero 3"
        )
    lines = [f"num_processes: {plan.dp}"]
    if (machines := -(-plan.dp // cluster.gpus_per_node)) > 1:
        lines += [
            f"num_machines: {machines}",
            "# on each: machine_rank; main_process_ip and main_process_port of the first",
        ]
    lines += [f"mixed_precision: '{'bf16' if plan.precision == 'mixed' else 'no'}'"]  # no is False
    lines += [f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU'}"]
    if plan.zero:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {str(plan.zero == 3).lower()}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {str(plan.checkpoint == 'full').lower()}",
        ]
    elif plan.checkpoint == "full":
        lines.append(f"# {AGAIN}")
    return "\n".join(
        [*lines, f"# Accelerator(gradient_accumulation_steps={plan.num_micro_batches})"]
    )


def _other_stages(tool: str, model: ModelSpec, plan: Plan) -> InputError:
    return InputError(
        f"{tool} does not cut {model.num_layers} layers into the plan's {plan.num_stages} stages "
        "by its flags: plan with another --pp"
    )


TOOLS: dict[str, Callable[[ModelSpec, Plan, Cluster], str]] = {
    tool.__name__: tool for tool in (megatron, torchtitan, deepspeed, accelerate)
}


def spoken(tool: str, model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """A plan as a tool wants it; raises InputError for what that tool has no words for."""
    if plan.lora:
        raise InputError(f"--as {tool}: adapters are the model's, not the layout's: --lora 0")
    return TOOLS[tool](model, plan, cluster)
