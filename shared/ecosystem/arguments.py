"""The Trainer's arguments, every one: what a translation takes, leaves to the loop, or refuses."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from shared.ecosystem.defaults import DEFAULTS
from shared.errors import InputError

Arguments = Mapping[str, Any]

TRANSLATED = {*DEFAULTS, "optim", "fp16", "fsdp", "fsdp_config"}
# What changes a step and has no place in a JSON or in a call: refused where it is given.
REFUSED = {
    "activation_checkpointing": 'fsdp_config has an "activation_checkpointing" of its own',
    "activation_checkpointing_kwargs": "checkpoint the layers by hand (lesson 11)",
    "auto_find_batch_size": "give per_device_train_batch_size the number that it finds",
    "average_tokens_across_devices": "how losses are averaged is the loop's",
    "deepspeed": "this run has a JSON of its own: complete its `auto`s",
    "gradient_checkpointing": "call model.gradient_checkpointing_enable()",
    "gradient_checkpointing_kwargs": "call model.gradient_checkpointing_enable(...)",
    "label_smoothing_factor": "the loss is the loop's: smooth it there",
    "liger_kernel_config": "patch the model before",
    "neftune_noise_alpha": "the noise is the Trainer's own: add it to the embedding",
    "parallelism_config": "make the mesh by hand (lesson 16)",
    "tf32": "set torch.backends.cuda.matmul.allow_tf32",
    "torch_compile": "call torch.compile",
    "torch_compile_backend": "call torch.compile",
    "torch_compile_mode": "call torch.compile",
    "use_liger_kernel": "patch the model before",
}
OPTIMIZER = {"optim_args", "optim_target_modules"}  # of optimizers that are no AdamW
NOTHING = {"", "none", "null", "false", "0", "0.0", "no", "n", "f", "off", "[]", "{}"}
COUNTS = {"per_device_train_batch_size", "gradient_accumulation_steps"}
ADAMW = {"adamw_torch", "adamw_torch_fused"}
# Of the loop, its data and its schedule, and what is only shown, evaluated or kept.
_WORDS = """
    output_dir num_train_epochs max_steps lr_scheduler_kwargs seed data_seed full_determinism
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_in_order
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    remove_unused_columns label_names train_sampling_strategy length_column_name ignore_data_skip
    accelerator_config resume_from_checkpoint restore_callback_states_from_checkpoint use_cpu
    bf16_full_eval fp16_full_eval use_cache torch_empty_cache_steps logging_strategy logging_steps
    logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen
    log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start
    per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object
    eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy
    save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token
    hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end
    metric_for_best_model greater_is_better ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics
    do_train do_eval do_predict local_rank
"""
_OLDER = """
    evaluation_strategy group_by_length logging_dir no_cuda overwrite_output_dir save_safetensors
    use_mps_device warmup_ratio
"""
WITHOUT_EFFECT, OLDER = set(_WORDS.split()), set(_OLDER.split())  # the latter: some before 5
# And of those what changes nothing at its default alone.
AT_DEFAULT = {
    "half_precision_backend": "auto", "include_tokens_per_second": False, "past_index": -1
}  # fmt: skip


def checked(arguments: Arguments, of_optimizer: bool) -> dict[str, Any]:
    """The arguments with their defaults, text as the numbers that it spells.

    Raises InputError for a name that the Trainer does not have, and for what has an effect and
    no translation; `of_optimizer`: the translation has the optimizer in it.
    """
    known = TRANSLATED | REFUSED.keys() | OPTIMIZER | WITHOUT_EFFECT | OLDER | AT_DEFAULT.keys()
    for name, value in arguments.items():
        expect_known("the Trainer has no argument", name, known)
        asked = (str(value).lower() not in NOTHING) != (name == "average_tokens_across_devices")
        if name in REFUSED and asked:
            raise InputError(
                f"{name} {value!r} is not translated: {REFUSED[name]}, and leave it out"
            )
        if str(value) != str(AT_DEFAULT.get(name, value)):
            raise InputError(f"{name} {value!r} is not translated: leave it out")
        if of_optimizer and name in OPTIMIZER and value:
            raise InputError(f"{name} {value!r} is not translated: the JSON's optimizer is AdamW")
    optimizer = arguments.get("optim", "adamw_torch")
    if of_optimizer and getattr(optimizer, "value", optimizer) not in ADAMW:
        raise InputError(f"optim {optimizer!r} is not translated: {' or '.join(sorted(ADAMW))} is")
    found = {**DEFAULTS, "fp16": False, **arguments}
    for name in found.keys() & {*DEFAULTS, "fp16"} - {"lr_scheduler_type"}:
        found[name] = spelled(name, found[name], DEFAULTS.get(name, False))
        if name in COUNTS and not (isinstance(found[name], int) and found[name] >= 1):
            raise InputError(f"{name} must be a whole number from 1 up, got {arguments[name]!r}")
    if found["bf16"] and found["fp16"]:
        raise InputError("bf16 and fp16 are both set: the Trainer takes one of them")
    return found


def expect_known(words: str, name: str, known: Iterable[str]) -> None:
    """InputError for a name that is none of these, with the nearest that is."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise InputError(f"{words} {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def spelled(name: str, value: Any, like: bool | float) -> Any:
    """A value of the kind of `like`, out of the text that YAML or a command line makes of it."""
    if value is None and name == "max_grad_norm":
        return 0.0  # the Trainer clips nothing then
    yes, no = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
    try:
        if isinstance(like, bool):
            return {**dict.fromkeys(yes, True), **dict.fromkeys(no, False)}[str(value).lower()]
        if isinstance(value, bool) or not math.isfinite(number := float(value)):
            raise ValueError
        return int(number) if isinstance(like, int) and number == int(number) else number
    except (KeyError, TypeError, ValueError, OverflowError):
        kind = "true or false" if isinstance(like, bool) else "a number"
        raise InputError(f"{name} must be {kind}, got {value!r}") from None
