"""What the checks observe answers in: runs that are made up, ranks that shard, three frameworks."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lessons.lesson22_ecosystem.asking import HOST, ask
from shared.ecosystem.task import Task, WithLoss
from shared.exercises.on_ranks import on_ranks
from shared.exercises.remembered import once_an_answer
from shared.measuring.traffic import count_traffic
from shared.training.reference_run import CONFIG, learning_rate, reference_model
from shared.training.schedules import set_learning_rate

APART = "the ranks do not shard the same modules: some wait for others"
Settings = dict[str, Any]


class Runs:
    """A training that is made up: what each setting adds to a curve; every call is kept."""

    def __init__(self, curve: Callable[[Mapping[str, Any]], list[float]]) -> None:
        self.curve = curve
        self.asked: list[Settings] = []

    def __call__(self, settings: Mapping[str, Any]) -> list[float]:
        self.asked.append(dict(settings))
        return self.curve(settings)

    @property
    def repeated(self) -> int:
        """How many runs had been made before."""
        return len(self.asked) - len({str(sorted(each.items())) for each in self.asked})


class Sharded(NamedTuple):
    """What a rank saw of a model that an answer sharded."""

    whole: list[str]  # names of parameters that are not sharded
    dtypes: list[str]
    calls: list[tuple[str, int]]  # of one forward and backward
    losses: list[float]
    returned: bool  # the answer returned the model
    numbers: int  # parameters on this rank
    states: int  # bytes of weights, gradients and optimizer states after the last backward


class Order(NamedTuple):
    """Arguments as the Trainer takes them, and what the model is beforehand."""

    names: Any = ("EncoderLayer", "DecoderLayer")
    reshard: bool | None = None
    bf16: bool = False
    half_model: bool = False

    @property
    def arguments(self) -> Settings:
        """As a dict for the answer."""
        options: Settings = {}
        if self.names is not None:
            options["transformer_layer_cls_to_wrap"] = (
                self.names if isinstance(self.names, str) else list(self.names)
            )
        if self.reshard is not None:
            options["reshard_after_forward"] = self.reshard
        given = {"fsdp": True, "fsdp_config": options, "per_device_train_batch_size": 16}
        return given | ({"bf16": True} if self.bf16 else {})


def model_for(order: Order) -> WithLoss:
    """A fresh model of the reference run's shape."""
    model = WithLoss(reference_model())
    return model.bfloat16() if order.half_model else model


def sharded(rank: int, shard: Callable[..., Any], order: Order, steps: int = 2) -> Sharded:
    """Train some steps with what an answer made of a model."""
    bare = model_for(order)
    task = Task(steps, model=bare)
    model = shard(order.arguments, bare)
    returned = model is bare
    parameters = dict(bare.named_parameters())
    whole = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    dtypes = sorted({str(p.dtype) for p in parameters.values()})
    optimizer = task.optimizer(parameters.values())
    calls: list[tuple[str, int]] = []
    states = 0
    for step, (_, batch, num_tokens) in enumerate(task.batches(), start=1):
        set_learning_rate(optimizer, learning_rate(step))
        with count_traffic() as traffic:
            loss = bare(**batch, num_items_in_batch=num_tokens)["loss"]
            (loss * dist.get_world_size()).backward()
        calls = [(call.op, call.num_bytes) for call in traffic.calls]
        states = state_bytes(parameters, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    numbers = sum(local(p).numel() for p in parameters.values())
    return Sharded(whole, dtypes, calls, task.losses(), returned, numbers, states)


def local(x: Any) -> torch.Tensor:
    """What this rank has of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def state_bytes(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and moments on this rank."""
    total = 0
    for p in parameters.values():
        moments = [x for key, x in optimizer.state[p].items() if key != "step"]
        total += sum(local(x).nbytes for x in [p, p.grad, *moments] if x is not None)
    return total


def by_torch(
    arguments: Mapping[str, Any],
    model: nn.Module,
    *,
    roots: bool = False,
    policy: MixedPrecisionPolicy | None = None,
    reshard: bool | None = None,
    root_too: bool = False,
) -> nn.Module:
    """`fully_shard` called by what an order says, or with one thing done as a mistake does it."""
    options = arguments["fsdp_config"]
    names = options.get("transformer_layer_cls_to_wrap", [])
    names = {names} if isinstance(names, str) else set(names)
    half = torch.bfloat16 if arguments.get("bf16") else None
    given: Settings = {
        "mp_policy": policy or MixedPrecisionPolicy(half, half, half),
        "reshard_after_forward": options.get("reshard_after_forward", True),
    }
    if reshard is not None:
        given["reshard_after_forward"] = reshard
    for module in [] if roots else list(model.float().modules()):
        if type(module).__name__ in names:
            fully_shard(module, **given)
    if not root_too:
        del given["reshard_after_forward"]
    fully_shard(model.float(), **given)
    return model


@cache
def oracle(order: Order, **wrong: Any) -> Sharded:
    """What rank 0 sees of torch's own calls."""
    return on_ranks(sharded, 2, partial(by_torch, **wrong), order, apart=APART, timeout=120)[0]


@once_an_answer
def sharded_by(shard: Callable[..., Any], order: Order) -> list[Sharded]:
    """What both ranks see of an answer."""
    return on_ranks(sharded, 2, shard, order, apart=APART, timeout=120)


ARGUMENTS: Settings = {
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "adam_epsilon": 1e-3,  # so that the size of a gradient matters, and with it clipping
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "max_steps": 5,
}


@cache
def trainers_curve() -> list[float]:
    """The Trainer's losses for ARGUMENTS, on two ranks."""
    return ask("with_arguments_alone", arguments=ARGUMENTS)[0]


def three_ways(config_for: Callable[..., Settings]) -> tuple[list[float], Settings, Settings]:
    """The Trainer's losses; what DeepSpeed does by an answer, in both precisions."""
    full = config_for(ARGUMENTS, CONFIG.d_model)
    half = config_for(ARGUMENTS | {"bf16": True}, CONFIG.d_model)
    with HOST.ended():
        wanted = trainers_curve()
        found = ask("by_config", config=full, arguments=ARGUMENTS)[0]
        short = ARGUMENTS | {"max_steps": 3}
        return wanted, found, ask("by_config", config=half, arguments=short)[0]
