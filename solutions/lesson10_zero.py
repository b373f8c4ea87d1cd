"""Lesson 10, the instructor's side: ZeRO's three stages by hand, and DeepSpeed's configuration.

The lesson's one idea: between the two halves of an all-reduce every rank has a finished sum of one
part. Whoever stops there owns a part: of the updates (stage 1), of the gradients (stage 2), of the
parameters (stage 3). The classes live in shared/zero, since later lessons train with them: flat.py
has a bucket (one flat tensor, this rank's part, the way of a gradient through it), stages.py the
optimizer around it, stage3.py what gathers and frees.

Points are the difficulty at the exercise (17 in all). What to ask behind a right answer: which byte
of the 16 is divided by which stage; what is alive at the worst moment, and why two units; why
stages 1 and 2 send no more than DDP; what a rank may not decide alone (to leave out a bucket); why
dropping the flat tensor would free nothing in stage 3.
"""

from typing import Any

from shared.errors import InputError
from shared.zero.flat import partition
from shared.zero.stage3 import ZeroStage3
from shared.zero.stages import ZeroStage1, ZeroStage2

__all__ = ["ZeroStage1", "ZeroStage2", "ZeroStage3", "partition", "zero_config"]


def zero_config(
    num_params: int, num_ranks: int, budget: int, batch_size: int, micro_batch: int
) -> dict[str, Any]:
    """DeepSpeed's configuration with the lowest ZeRO stage whose bytes a rank fit the budget.

    bf16 weights with float32 masters, no clipping, the optimizer is the caller's. The states may
    take nine tenths of `budget` bytes at a step's worst moment (20; the larger of 4 + 12/D and
    2 + 16/D; 2 + 16/D; 20/D bytes a parameter): the rest is for buckets, each at most a fiftieth
    of the parameters. Raises ValueError where no stage fits, or the batch cannot be cut.
    """
    times, left = divmod(batch_size, micro_batch * num_ranks)
    if left or not times:
        raise InputError(f"{batch_size} rows are no multiple of {micro_batch} x {num_ranks} ranks")
    D = num_ranks
    worst = [20, max(4 + 12 / D, 2 + 16 / D), 2 + 16 / D, 20 / D]
    fitting = [stage for stage, size in enumerate(worst) if size * num_params <= 0.9 * budget]
    if not fitting:
        raise InputError(f"{num_params} parameters on {D} ranks fit {budget} bytes in no stage")
    bucket = num_params // 100 * 2  # DeepSpeed wants an even number
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": times,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": fitting[0],
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": bucket,
            "stage3_param_persistence_threshold": 0,
        },
    }


NOTES = {
    "10.1": """
partition: 1 point, 10 minutes. Views, not copies; detached; the least padding.
Common mistakes: chunk() without padding (unequal parts); a whole part of zeros where it divides.
""",
    "10.2": """
ZeroStage1: 4 points, 45 minutes. Right numbers 1, bytes 1, messages 1, an optimizer like torch's 1.
Look for: an inner AdamW over the part alone; param_groups of the model's parameters outside and
of parts inside, settings copied in every step; zeros where a rank has no gradient; masters in the
state_dict. Ask where rank 0's weights come from, and what happens without that.
Common mistakes: AdamW over everything and then "sharding" it; gradients all-reduced; the rate
read once; parts updated by one rank's gradients; masters made again from the rounded weights;
views in state_dict(): torch.save writes all the memory behind them, whole weights on every rank.
""",
    "10.3": """
ZeroStage2: 4 points, 40 minutes. Freed bucket by bucket 2, one order 1, the end of backward 1.
Look for: parameter.grad = None in the hook, after the copy; buckets from the last parameter; what
is sent when a gradient never comes. Ask for the bytes alive when the second bucket is sent.
Common mistakes: everything sent at the end of backward (right numbers, nothing saved at the worst
moment); the second backward's part in place of the sum.
""",
    "10.4": """
ZeroStage3: 5 points, 60 minutes. Right numbers 1, freed after forward 1, two units at most 2, tied
and frozen parameters 1.
Look for: resize_(0) on the storage, or an explanation of what else frees saved views; a second
gather in backward; freeing by count of users. Ask what a model does that reads a weight outside of
its unit's forward, and what DeepSpeed does about it (external parameters).
Common mistakes: all units gathered at once; weights kept for backward; freed in a hook of the
input, which residual connections hold back.
""",
    "10.5": """
zero_config: 3 points, 25 minutes. Batch sizes that multiply, the stage from the budget, the keys
whose defaults hide the saving. Ask which key they would change first if the count is too high.
""",
}
