"""The reference run of lesson 04, through a framework: the curve, the messages, what is kept.

--engine ddp (torch alone, as in lesson 06), accelerate, trainer (the Hugging Face Trainer's own
loop), trainer_fsdp and trainer_deepspeed (the same by configuration), deepspeed (ZeRO-3), fsdp2,
fabric (Lightning Fabric). On a CPU some of them become something else than was asked for, without
a word: the table says what came of the model. loops.py has a function for each.
"""

import importlib.util
import os
import warnings
from functools import partial

import torch

from lessons.lesson22_ecosystem.loops import LOOPS, deepspeed, fsdp2
from lessons.lesson22_ecosystem.results import NEEDS, SIZES, checked, conclude
from shared.ecosystem.task import Loop, Task, one_process
from shared.measuring.traffic import count_traffic
from shared.ranks.group import process_group
from shared.script import choose_preset, lesson_parser, prepare, run_script
from shared.training.quiet_deepspeed import import_deepspeed
from solutions.lesson22_ecosystem import deepspeed_config, shard_as_trainer


def loop_of(engine: str) -> Loop:
    """The function that trains; two of them take the lesson's own translations."""
    if engine == "deepspeed":
        return partial(deepspeed, configure=deepspeed_config)
    if engine == "fsdp2":
        return partial(fsdp2, shard=shard_as_trainer)
    return LOOPS[engine]


def main() -> None:
    parser = lesson_parser(__file__, __doc__)
    parser.add_argument("--engine", choices=LOOPS, default="accelerate", help="(accelerate)")
    args = checked(parser.parse_args())
    warnings.simplefilter("ignore", FutureWarning)
    # Accelerate and the Trainer import DeepSpeed as well, where it is installed.
    if args.engine in NEEDS and importlib.util.find_spec("deepspeed"):
        import_deepspeed(args.device)
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        if rank.device.type == "cpu" and args.engine != "trainer_deepspeed":  # it would be DDP
            os.environ["ACCELERATE_USE_CPU"] = "true"
        size = choose_preset(args, rank.device, SIZES)
        steps = args.steps or size.steps
        for name, value in vars(rank).items():  # frameworks read what torchrun sets
            if name in ("rank", "local_rank", "world_size"):
                os.environ.setdefault(name.upper(), str(value))
        torch.manual_seed(args.seed)
        alone = one_process(steps, rank.device)
        with count_traffic() as traffic:
            task = Task(steps, traffic, rank.device)
            loop_of(args.engine)(task)
        losses = task.losses()
        if rank.is_main:
            conclude(args, rank, task, losses, alone)


if __name__ == "__main__":
    run_script(main)
