"""A plan in other tools' words: their own classes read it, where they install here."""

import itertools
import json
import tomllib

import pytest
import yaml

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.planner.models import MODELS
from shared.planner.specs import Plan
from shared.planner.spoken import spoken

MODEL = MODELS["8b"]
DEEP = Plan(
    2, 4, 8, micro_batch=1, num_micro_batches=32, zero=1, checkpoint="full", sequence_parallel=True
)
FLAT = Plan(8, micro_batch=2, num_micro_batches=4, zero=3, checkpoint="full")


def test_megatron_gets_flags():
    flags = spoken("megatron", MODEL, DEEP).replace("\\\n", "").split()
    values = dict(itertools.pairwise(flags))
    assert values["--tensor-model-parallel-size"] == "4"
    assert values["--pipeline-model-parallel-size"] == "8"
    assert (values["--micro-batch-size"], values["--global-batch-size"]) == ("1", "64")
    assert {"--use-distributed-optimizer", "--sequence-parallel", "--bf16"} <= set(flags)
    assert "optim_grads_params" in spoken("megatron", MODEL, FLAT)


def test_torchtitan_gets_toml():
    deep, flat = (tomllib.loads(spoken("torchtitan", MODEL, plan)) for plan in (DEEP, FLAT))
    assert deep["training"] == {"local_batch_size": 32, "global_batch_size": 64, "seq_len": 8192}
    assert flat["training"]["local_batch_size"] == 2  # four of them are accumulated
    assert deep["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    ranks = {name: size for name, size in deep["parallelism"].items() if name.endswith("degree")}
    assert sorted(ranks.values()) == [1, 2, 4, 8]


def test_deepspeed_reads_its_json():
    config = json.loads(spoken("deepspeed", MODEL, FLAT))
    whole = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 8
    assert whole == config["train_batch_size"] == 64
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    assert zero.DeepSpeedZeroConfig(**config["zero_optimization"]).stage == 3
    assert "num_stages=8" in spoken("deepspeed", MODEL, DEEP)


def test_accelerate_reads_its_yaml():
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    config = yaml.safe_load(spoken("accelerate", MODEL, FLAT))
    config |= {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False}
    read = arguments.ClusterConfig(**config)
    assert read.num_processes == 8
    assert read.fsdp_config["fsdp_reshard_after_forward"] is True


@pytest.mark.parametrize(
    ("tool", "plan", "words"),
    [
        ("deepspeed", Plan(2, pp=4, num_micro_batches=8, zero=3), "refuses ZeRO-3 in a pipeline"),
        ("accelerate", DEEP, "tp 1, pp 1 and ZeRO 2 or 3"),
        ("megatron", Plan(lora=8), "adapters are the model's"),
    ],
)
def test_what_a_tool_has_no_words_for_is_said(tool, plan, words):
    with pytest.raises(InputError, match=words):
        spoken(tool, MODEL, plan)


def test_the_script_prints_them(run_script):
    script = ROOT / "lessons" / "lesson16_parallelism_3d" / "plan.py"
    ended = run_script(script, "--model", "8b", "--gpus", "8", "--as", "torchtitan")
    assert "plan 1 for torchtitan:\n[training]\n" in ended.out, ended.err
