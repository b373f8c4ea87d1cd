"""What the checks observe answers in: runs that are made up, ranks that shard, three frameworks."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lessons.lesson22_ecosystem.asking import HOST, ask
from shared.ecosystem.task import Task, WithLoss
from shared.exercises.on_ranks import on_ranks
from shared.exercises.remembered import once_an_answer
from shared.measuring.traffic import count_traffic
from shared.training.reference_run import CONFIG, learning_rate, reference_model
from shared.training.schedules import set_learning_rate

APART = "the ranks do not shard the same modules: some wait for others"
KNOWN: Mapping[Any, tuple[str, str]] = {
    "have the same dtype, but got": (
        "one unit casts and another does not", "every unit, and the model itself, gets the policy"
    ),
    "Invariant encountered": (
        "an outer module is sharded before one that is inside of it: then the inner one has no "
        "parameters left", "inner modules first, the model last",
    ),
    KeyError: (
        "what the arguments do not have is looked up as if they had it", "arguments.get(...)"
    ),
}  # fmt: skip
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
    tensors: int  # parameters that the model has, a tied one once


class Order(NamedTuple):
    """Arguments as the Trainer takes them, and what the model is beforehand."""

    names: Any = ("EncoderLayer", "DecoderLayer")
    reshard: bool | None = None
    bf16: bool | None = None  # None: not given
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
        return given | ({} if self.bf16 is None else {"bf16": self.bf16})


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
    tensors = len(parameters)
    return Sharded(whole, dtypes, calls, task.losses(), returned, numbers, states, tensors)


class Gate(nn.Linear):
    """A layer inside of a block, and one beside the blocks."""


class GateBlock(nn.Module):
    """A block; the name of its layer's class is a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = Gate(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two layers."""
        return self.out(self.gate(x))


class Gates(nn.Module):
    """Two blocks, a layer beside them, a head whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.lone = GateBlock(), GateBlock(), Gate(4, 4)
        self.into, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32, as a loss is, unless a policy says otherwise."""
        return self.head(self.lone(self.second(self.first(self.into(x))))).float()


class Made(NamedTuple):
    """What an answer made of a small model."""

    units: list[str]
    dtypes: list[str]
    trained: int
    output: str


def made(rank: int, shard: Callable[..., Any], order: Order) -> Made:
    """What becomes of `Gates`; on one rank."""
    model = Gates().bfloat16() if order.half_model else Gates()
    shard(order.arguments, model)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    dtypes = sorted({str(p.dtype) for p in model.parameters()})
    trained = sum(p.requires_grad for p in model.parameters())
    x = torch.ones(2, 4, dtype=next(model.parameters()).dtype)
    return Made(units, dtypes, trained, str(model(x).dtype))


def made_by(shard: Callable[..., Any], order: Order) -> Made:
    """What an answer makes of `Gates`."""
    return on_ranks(made, 1, shard, order, apart=APART, known=KNOWN)[0]


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
    for module in [] if roots else reversed(list(model.float().modules())):
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
    return on_ranks(sharded, 2, shard, order, apart=APART, known=KNOWN, timeout=120)


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
