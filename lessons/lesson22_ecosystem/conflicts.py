"""What two places that say something come to: JSON and arguments, JSON and `PipelineModule`.

Tasks for `ask`, which imports this module after DeepSpeed was made quiet.
"""

from typing import Any

import torch
import transformers
from deepspeed import initialize
from deepspeed.comm import init_distributed
from deepspeed.pipe import PipelineModule
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from lessons.lesson22_ecosystem.loops import QUIET


def resolved(rank: int, config: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration with what the Trainer puts in the place of its `auto` values."""
    model = nn.Linear(1, 1)
    model.config = transformers.PretrainedConfig(hidden_size=64)  # ty: ignore
    given = TrainingArguments(use_cpu=True, deepspeed=None, **QUIET, **arguments)
    both = HfTrainerDeepSpeedConfig(config)
    both.trainer_config_process(given)
    both.trainer_config_finalize(given, model, given.max_steps)
    return both.config


def conflicts(rank: int, config: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    """What the Trainer says to a JSON and arguments that are both given, line by line."""
    try:
        resolved(rank, config, arguments)
    except ValueError as error:
        return str(error).splitlines()
    return []


def cuts(rank: int, section: dict[str, Any], methods: list[str]) -> dict[str, list[Any]]:
    """For each partition_method: the first layer of each stage, stages, micro-batches of a step.

    Five layers on as many stages as ranks, beside a JSON whose `pipeline` section is `section`.
    """
    init_distributed("gloo")
    found = {}
    for method in methods:
        sizes = (64, 256), (256, 64), (64, 8)
        first, second, third = (nn.Linear(*size) for size in sizes)
        layers = [first, nn.ReLU(), second, nn.ReLU(), third]
        stages = torch.distributed.get_world_size()
        net = PipelineModule(layers, stages, loss_fn=nn.MSELoss(), partition_method=method)
        config = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "pipeline": section}
        optimizer = torch.optim.AdamW(net.parameters())
        engine, *_ = initialize(model=net, optimizer=optimizer, config=config)
        parts = [int(layer) for layer in net.parts]  # some are numpy's
        found[method] = [parts, engine.num_stages, engine.micro_batches]
    return found
