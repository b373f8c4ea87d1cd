"""Wrong answers to lesson 22, each with the words that the check must say to it."""

from itertools import combinations
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared.ecosystem.defaults import DEFAULTS
from shared.errors import InputError
from shared.exercises.mistakes import mistake
from solutions import lesson22_ecosystem as right

# 22.1 explain_difference


def same(a, b, tolerance):
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) <= tolerance


def with_theirs(ours, theirs, names):
    return {**ours, **{name: theirs[name] for name in names}}


def search(
    keys=lambda ours, theirs: [n for n in theirs if ours[n] != theirs[n]],
    alike=same,
    sizes=lambda names: range(len(names) + 1),
):
    """The search, with what is to go wrong."""

    def explain(run, ours, theirs, tolerance):
        goal = run(dict(theirs))
        names = keys(ours, theirs)
        for size in sizes(names):
            for some in combinations(names, size):
                if size == len(names) or alike(
                    run(with_theirs(ours, theirs, some)), goal, tolerance
                ):
                    return some
        return tuple(names)

    return explain


@mistake("22.1", says="every setting that differs is named, and not those that matter")
def explain_difference(run, ours, theirs, tolerance):
    return tuple(name for name in theirs if ours[name] != theirs[name])


@mistake("22.1", says="two settings that matter only together are not found")
def explain_difference(run, ours, theirs, tolerance):
    base = run(dict(ours))
    return tuple(
        name
        for name in theirs
        if ours[name] != theirs[name]
        and not same(run(with_theirs(ours, theirs, [name])), base, tolerance)
    )


@mistake("22.1", says="only one setting is named, and two are needed")
def explain_difference(run, ours, theirs, tolerance):
    base, goal = run(dict(ours)), run(dict(theirs))
    if same(base, goal, tolerance):
        return ()
    for name in theirs:
        alone = run(with_theirs(ours, theirs, [name]))
        if ours[name] != theirs[name] and not same(alone, base, tolerance):
            return (name,)
    return ()


@mistake("22.1", says="settings are named for curves that are the same")
def explain_difference(run, ours, theirs, tolerance):
    return search(sizes=lambda names: range(1, len(names) + 1))(run, ours, theirs, tolerance)


@mistake("22.1", says="a training is run twice with the same settings")
def explain_difference(run, ours, theirs, tolerance):
    names = [name for name in theirs if ours[name] != theirs[name]]
    for size in range(len(names) + 1):
        for some in combinations(names, size):
            curve = run(with_theirs(ours, theirs, some))
            if same(curve, run(dict(theirs)), tolerance):
                return some


@mistake("22.1", says="more settings than needed")
def explain_difference(run, ours, theirs, tolerance):
    goal, names = run(dict(theirs)), [name for name in theirs if ours[name] != theirs[name]]
    enough = [n for n in names if same(run(with_theirs(ours, theirs, [n])), goal, tolerance)]
    if enough and not same(run(dict(ours)), goal, tolerance):
        return tuple(enough)
    return search()(run, ours, theirs, tolerance)


# 22.2 deepspeed_config


def edited(edit):
    """The configuration, changed in place by `edit(config, arguments)`."""

    def config_of(arguments, hidden_size):
        config = right.deepspeed_config(arguments, hidden_size)
        edit(config, arguments)
        return config

    return config_of


@mistake("22.2", says="`auto` is left standing")
def deepspeed_config(arguments, hidden_size):
    return edited(lambda c, a: c.update(train_micro_batch_size_per_gpu="auto"))(
        arguments, hidden_size
    )


@mistake("22.2", says="gradient_clipping is not the Trainer's")
def deepspeed_config(arguments, hidden_size):
    return edited(lambda c, a: c.pop("gradient_clipping"))(arguments, hidden_size)


@mistake("22.2", says="a scheduler is in it")
def deepspeed_config(arguments, hidden_size):
    params = {"warmup_max_lr": arguments.get("learning_rate", 5e-5), "warmup_num_steps": 5}
    params["total_num_steps"] = arguments["max_steps"]
    section = {"type": "WarmupDecayLR", "params": params | {"warmup_type": "linear"}}
    return edited(lambda c, a: c.update(scheduler=section))(arguments, hidden_size)


@mistake("22.2", says="a default of torch's AdamW")
def deepspeed_config(arguments, hidden_size):
    return edited(lambda c, a: c["optimizer"]["params"].pop("weight_decay"))(arguments, hidden_size)


@mistake("22.2", says="the bucket is DeepSpeed's default")
def deepspeed_config(arguments, hidden_size):
    return edited(lambda c, a: c["zero_optimization"].pop("reduce_bucket_size"))(
        arguments, hidden_size
    )


@mistake(
    "22.2", says="a weight_decay, which the Trainer applies to some parameters only is accepted"
)
def deepspeed_config(arguments, hidden_size):
    config = right.deepspeed_config({**arguments, "weight_decay": 0.0}, hidden_size)
    decay = arguments.get("weight_decay", DEFAULTS["weight_decay"])
    config["optimizer"]["params"]["weight_decay"] = decay
    return config


# 22.3 shard_as_trainer


def shard(
    root=True, blocks=True, policy=None, reshard=True, to=torch.float32, check=True, too=False
):
    """The call, with what is to go wrong."""

    def sharded(arguments, model):
        options = arguments["fsdp_config"]
        names = options.get("transformer_layer_cls_to_wrap", [])
        names = [names] if isinstance(names, str) else names
        for name in names if check else []:
            if name not in {type(m).__name__ for m in model.modules()}:
                raise InputError(f"no {name}")
        half = torch.bfloat16 if arguments.get("bf16") else None
        given: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(*(policy or (half, half, half)))}
        if half is None:
            given = {}
        if reshard:
            given["reshard_after_forward"] = options.get("reshard_after_forward", True)
        if to is not None:
            model.to(to)
        for module in model.modules():
            if blocks and type(module).__name__ in names:
                fully_shard(module, **given)
        if not too:
            given.pop("reshard_after_forward", None)
        if root:
            fully_shard(model, **given)
        return model

    return sharded


@mistake("22.3", says="parameters outside the named classes are whole")
def shard_as_trainer(arguments, model):
    return shard(root=False)(arguments, model)


@mistake("22.3", says="the model itself is told to reshard")
def shard_as_trainer(arguments, model):
    return shard(too=True)(arguments, model)


@mistake("22.3", says="the model is one unit")
def shard_as_trainer(arguments, model):
    return shard(blocks=False)(arguments, model)


@mistake("22.3", says="bf16 is not passed on")
def shard_as_trainer(arguments, model):
    return shard(policy=(None, None, None))(arguments, model)


@mistake("22.3", says="gradients are reduced in float32")
def shard_as_trainer(arguments, model):
    half = torch.bfloat16
    return shard(policy=(half, torch.float32, half))(arguments, model)


@mistake(
    "22.3", says="a class that the model lacks (the wrap would silently be another) is accepted"
)
def shard_as_trainer(arguments, model):
    return shard(check=False)(arguments, model)
