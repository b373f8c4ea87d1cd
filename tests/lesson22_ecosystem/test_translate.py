"""Every argument of the installed Trainer is translated, without effect, or refused by name."""

import dataclasses
import json

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shared.ecosystem import arguments as lists
from shared.ecosystem.fsdp_files import with_files
from shared.ecosystem.fsdp_options import fsdp_options
from shared.ecosystem.translate import deepspeed_config, shard_as_trainer
from shared.errors import InputError
from shared.ranks.forked import run_ranks

BASE = {"per_device_train_batch_size": 4, "learning_rate": 2e-5}


def test_every_argument_of_the_installed_trainer_has_its_place():
    transformers = pytest.importorskip("transformers")
    there = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    places = [lists.TRANSLATED | {"lr_scheduler_type", "warmup_steps"}, set(lists.REFUSED)]
    places += [lists.OPTIMIZER, lists.WITHOUT_EFFECT]
    assert set().union(*places) == there
    assert sum(map(len, places)) == len(there), "each has one place"
    assert not lists.OLDER & there
    whole = transformers.TrainingArguments(output_dir="out", use_cpu=True).to_dict()
    assert deepspeed_config(whole, 24) == deepspeed_config({}, 24)


@pytest.mark.parametrize(
    ("given", "key", "right"),
    [
        ({"learning_rate": "2e-5"}, ("optimizer", "params", "lr"), 2e-5),
        ({"per_device_train_batch_size": "16"}, ("train_micro_batch_size_per_gpu",), 16),
        ({"max_grad_norm": None}, ("gradient_clipping",), 0.0),
        (
            {"bf16": "True", "torch_compile": "False", "label_smoothing_factor": "0.0"},
            ("bf16", "enabled"),
            True,
        ),
        ({"fp16": True}, ("fp16", "enabled"), True),
        ({"optim": "adamw_torch", "evaluation_strategy": "no"}, ("optimizer", "type"), "AdamW"),
        ({"bf16": "y"}, ("bf16", "enabled"), True),
        ({"bf16": "off", "torch_compile": "n"}, ("bf16", "enabled"), False),
        ({"include_tokens_per_second": False, "past_index": -1}, ("optimizer", "type"), "AdamW"),
        ({"half_precision_backend": "auto"}, ("optimizer", "type"), "AdamW"),
        ({"gradient_accumulation_steps": 2.0}, ("gradient_accumulation_steps",), 2),
    ],
)
def test_what_an_argument_becomes(given, key, right):
    found = deepspeed_config({**BASE, **given}, 24)
    for each in key:
        found = found[each]
    assert found == right
    assert type(found) is type(right)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optim": "adafactor"}, "optim 'adafactor' is not translated"),
        ({"optim_args": "a=1"}, "optim_args 'a=1'"),
        ({"learning_rates": 1e-3}, "no argument 'learning_rates': did you mean 'learning_rate'"),
        ({"per_gpu_train_batch_size": 2}, "did you mean 'per_device_train_batch_size'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor 0.1 is not translated"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing_enable"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices False"),
        ({"learning_rate": "inf"}, "learning_rate must be a number, got 'inf'"),
        ({"learning_rate": True}, "learning_rate must be a number, got True"),
        ({"per_device_train_batch_size": 2.5}, "batch_size must be a whole number from 1 up, got"),
        ({"gradient_accumulation_steps": 0}, "steps must be a whole number from 1 up, got 0"),
        ({"past_index": 2}, "past_index 2 is not translated"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, got 'fast'"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16"),
        ({"weight_decay": "0.1"}, "weight_decay 0.1"),
        ({"fsdp": "full_shard offload"}, "offload_param"),
        ({"fsdp_config": {"activation_checkpointing": True}}, "activation_checkpointing"),
    ],
)
def test_what_has_an_effect_and_no_place_in_a_json_is_refused_by_name(given, words):
    with pytest.raises(InputError, match=words):
        deepspeed_config({**BASE, **given}, 24)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fsdp": "full_shard ofload"}, "fsdp has no option 'ofload': did you mean 'offload'"),
        ({"fsdp": "full_shard shard_grad_op"}, "fsdp is full_shard and shard_grad_op at once"),
        (
            {"fsdp": ["full_shard"], "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
            "fsdp is SHARD_GRAD_OP and full_shard at once",
        ),
        ({"fsdp": 1}, "fsdp must be true or words such as full_shard, got 1"),
        ({"fsdp_config": {"min_num_params": True}}, "min_num_params must be a number, got True"),
    ],
)
def test_ways_to_shard_that_are_none_or_two_are_refused(given, words):
    with pytest.raises(InputError, match=words):
        fsdp_options(given)


def test_what_fsdp_config_says_outright_wins():
    given = {"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}}
    assert fsdp_options(given).reshard
    assert not fsdp_options({"fsdp": "shard_grad_op"}).reshard
    assert fsdp_options({"fsdp_config": {"transformer_layer_cls_to_wrap": []}}).classes is None


class Block(nn.Linear):
    """What is to be a unit."""


class Model(nn.Sequential):
    _no_split_modules = ("Block",)


FSDP = [
    ({"fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}}, 3),
    ({"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block, Linear"}}, 4),
    ({"fsdp": "full_shard auto_wrap"}, 3),
    ({"fsdp": ["shard_grad_op"], "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}, 1),
    ({"fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "10"}}, 3),
    ({"fsdp_config": {"fsdp_sharding_strategy": 2, "fsdp_state_dict_type": "FULL"}}, 3),
    ({"fsdp_config": {"activation_checkpointing": "true"}}, 3),
    ({"fsdp_config": "PATH"}, 3),
]
NOT_FSDP2 = [
    ({"fp16": True}, "fp16 True"),
    ({"fsdp": "hybrid_shard"}, "'hybrid_shard', version 2: translated are"),
    ({"fsdp_config": {"fsdp_version": 1}}, "version 1"),
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 10}}, "SIZE_BASED_WRAP"),
    ({"fsdp_config": {"xla": True}}, "xla True"),
    ({"fsdp_config": {"transformer_layer_cls_to_warp": "Block"}}, "did you mean 'transformer_"),
    ({"fsdp": "full_shard offload"}, "no accelerator here"),
    ({"fsdp_config": "no_such.json"}, "no_such.json"),
    ({"fsdp_config": "YAML"}, "accelerate.yaml is no JSON: .* has under fsdp_config, as JSON"),
    ({"fsdp_config": {"activation_checkpointing": "perhaps"}}, "must be true or false"),
    ({"gradient_checkpointing": True}, "gradient_checkpointing True"),
]


def model() -> Model:
    torch.manual_seed(0)
    return Model(Block(4, 4), Block(4, 4), nn.Linear(4, 1))


def test_the_call_takes_the_spellings_of_accelerate_and_of_older_trainers(tmp_path):
    path, yaml = tmp_path / "fsdp.json", tmp_path / "accelerate.yaml"
    yaml.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 1\n")
    path.write_text("\ufeff" + json.dumps({"fsdp_transformer_layer_cls_to_wrap": ["Block"]}))

    def sharded(rank):
        counts, x = [], torch.ones(2, 4)
        right = model()
        right(x).sum().backward()
        for given, _ in FSDP:
            given = json.loads(json.dumps(given).replace("PATH", str(path)))
            net = shard_as_trainer(with_files(given), model())
            counts.append(sum(isinstance(each, FSDPModule) for each in net.modules()))
            net(x).sum().backward()
            mine = [p.grad.full_tensor() for p in net.parameters()]
            assert list(net.state_dict()) == list(right.state_dict())
            for p, grad in zip(right.parameters(), mine, strict=True):
                assert torch.allclose(grad, p.grad)
        for given, words in NOT_FSDP2:
            given = {k: str(yaml) if v == "YAML" else v for k, v in given.items()}
            with pytest.raises(InputError, match=words):
                shard_as_trainer(with_files(given), model())
        with pytest.raises(InputError, match="with_files reads a path"):
            shard_as_trainer({"fsdp_config": "fsdp.json"}, model())
        return counts

    assert run_ranks(sharded, 1) == [[units for _, units in FSDP]]
