"""A plan in other tools' words: their own classes read it, where they install here."""

import itertools
import json
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.planner.models import MODELS, h100
from shared.planner.specs import Plan
from shared.planner.spoken import spoken
from shared.planner.variants import shorter_ends

MODEL = MODELS["8b"]
DEEP = Plan(
    2, 4, 8, micro_batch=1, num_micro_batches=32, zero=1, checkpoint="full", sequence_parallel=True
)
FLAT = Plan(8, micro_batch=2, num_micro_batches=4, zero=3, checkpoint="full")
PIPED = replace(DEEP, tp=1, sequence_parallel=False)
CHUNKS = replace(PIPED, pp=4, chunks=4)
TENSOR = Plan(4, 2, num_micro_batches=8, zero=1)
UNEVEN = replace(MODEL, num_layers=30)  # over 8 stages: 3, 4, 4, 4, 4, 4, 4, 3
RAGGED = replace(MODEL, num_layers=29)  # 3, 4, 4, 4, 4, 4, 3, 3
ENDS = replace(CHUNKS, cut=shorter_ends(30, 16))


def said(tool, plan, model=MODEL):
    return spoken(tool, model, plan, h100(plan.num_gpus))


def flags_of(plan, model=MODEL):
    return said("megatron", plan, model).replace("\\\n", "").split()


def test_megatron_gets_flags():
    flags = flags_of(DEEP)
    values = dict(itertools.pairwise(flags))
    assert values["--tensor-model-parallel-size"] == "4"
    assert values["--pipeline-model-parallel-size"] == "8"
    assert (values["--micro-batch-size"], values["--global-batch-size"]) == ("1", "64")
    assert {"--use-distributed-optimizer", "--sequence-parallel", "--bf16"} <= set(flags)


def test_megatron_keeps_gradients_as_the_plan_counts_them():
    assert "--grad-reduce-in-bf16" in flags_of(FLAT)
    assert "--grad-reduce-in-bf16" not in flags_of(replace(FLAT, precision="float32"))


def test_megatrons_fsdp_gets_what_it_asserts():
    whole = said("megatron", FLAT)
    assert "optim_grads_params \\\n--ckpt-format fsdp_dtensor" in whole
    assert whole.startswith("# unset CUDA_DEVICE_MAX_CONNECTIONS\n--tensor")
    assert said("megatron", TENSOR).startswith("# CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell\n")
    assert "CUDA_DEVICE" not in said("megatron", PIPED)


def test_megatrons_stages_are_the_plans():
    """Its own count: an embedding and a loss are a layer each, and stages are equal then."""
    split = {f"--account-for-{each}-in-pipeline-split" for each in ("embedding", "loss")}
    assert not split & set(flags_of(PIPED))
    assert split <= set(flags_of(PIPED, UNEVEN))
    assert split <= set(flags_of(ENDS, UNEVEN))
    flags = flags_of(CHUNKS)
    assert dict(itertools.pairwise(flags))["--num-virtual-stages-per-pipeline-rank"] == "4"


def titan(plan, model=MODEL):
    return tomllib.loads(said("torchtitan", plan, model))


def test_torchtitan_gets_toml():
    assert said("torchtitan", FLAT).startswith("# torchtitan 0.2.2 (the last release that reads TO")
    deep, flat = titan(DEEP), titan(replace(FLAT, precision="float32"))
    parts = "local_batch_size", "global_batch_size", "seq_len"
    assert [deep["training"][part] for part in parts] == [32, 64, 8192]
    assert flat["training"]["local_batch_size"] == 2  # four of them are accumulated
    kinds = [each["training"]["mixed_precision_param"] for each in (deep, flat)]
    assert kinds == ["bfloat16", "float32"]
    assert deep["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    ranks = {name: size for name, size in deep["parallelism"].items() if name.endswith("degree")}
    assert sorted(ranks.values()) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("plan", "model", "less", "each"),
    [
        (PIPED, MODEL, 0, None),
        (PIPED, UNEVEN, 1, None),
        (CHUNKS, MODEL, 0, 2),
        (ENDS, UNEVEN, 1, 2),
    ],
)
def test_torchtitans_stages_are_the_plans(plan, model, less, each):
    """Of itself it takes a layer from both ends, and gives a rank of Interleaved1F1B two stages."""
    axes = titan(plan, model)["parallelism"]
    ends = [axes[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last")]
    assert ends == [less, less]
    assert axes.get("pipeline_parallel_layers_per_stage") == each
    if each:  # torchtitan's own count of stages
        assert -(-(model.num_layers + sum(ends)) // each) == plan.num_stages


def json_of(plan, monkeypatch, model=MODEL):
    """What DeepSpeed reads of the file, on as many ranks as the plan has."""
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: plan.num_gpus)
    pipeline = SimpleNamespace(get_data_parallel_world_size=lambda: plan.dp)  # PipelineModule.mpu()
    given = dict(config.hjson.loads(said("deepspeed", plan, model)))
    return config.DeepSpeedConfig(given, pipeline if plan.pp > 1 else None)


def test_deepspeed_reads_its_json(monkeypatch):
    read = json_of(FLAT, monkeypatch)
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (64, 4)
    assert read.zero_config.stage == 3
    assert read.bfloat16_config.enabled
    assert json_of(PIPED, monkeypatch, UNEVEN).train_batch_size == 64


def test_deepspeed_takes_a_batch_of_ranks_that_share_a_layer(monkeypatch):
    """It counts all ranks before AutoTP's groups are there: a whole batch would not be 4 x 2."""
    read = json_of(TENSOR, monkeypatch)
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (1, 8)
    assert read.tensor_parallel_config.autotp_size == 2


def test_what_deepspeeds_json_has_no_key_for_is_a_comment():
    assert json.loads(said("deepspeed", replace(FLAT, checkpoint="none")))
    assert said("deepspeed", FLAT).endswith("}\n// checkpoint each layer in the model")
    deep = said("deepspeed", PIPED)
    assert "// PipelineModule(layers, num_stages=8" in deep
    assert "activation_checkpoint_interval=1" in deep
    assert "shorter" not in deep
    uneven = said("deepspeed", PIPED, UNEVEN)
    assert uneven.endswith("shorter; by the plan they have (3, 4, 4, 4, 4, 4, 4, 3)")


@pytest.fixture
def launch():
    return pytest.importorskip("accelerate.commands.launch")


@pytest.mark.parametrize(("precision", "kind"), [("mixed", "bf16"), ("float32", "no")])
def test_accelerate_launches_by_its_yaml(precision, kind, launch, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(said("accelerate", replace(FLAT, precision=precision)))
    given = ["--config_file", str(file), "--cpu", "--main_process_port", "0", "train.py"]
    args, read, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(given)
    )
    env = launch.prepare_multi_gpu_env(args)
    assert (read.num_processes, read.num_machines) == (8, 1)
    assert env["ACCELERATE_MIXED_PRECISION"] == kind
    assert (env["FSDP_VERSION"], env["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", "true")
    assert env["FSDP_ACTIVATION_CHECKPOINTING"] == "true"


def test_accelerate_is_told_of_several_machines_and_of_what_it_cannot_do(launch, tmp_path):
    (tmp_path / "ddp.yaml").write_text(text := said("accelerate", replace(FLAT, dp=32, zero=0)))
    read = launch.load_config_from_file(str(tmp_path / "ddp.yaml"))
    assert (read.num_processes, read.num_machines) == (32, 4)
    assert "# on each: machine_rank; main_process_ip and main_process_port of the first" in text
    assert "\n# checkpoint each layer in the model\n" in text


@pytest.mark.parametrize(
    ("tool", "plan", "words"),
    [
        ("deepspeed", Plan(2, pp=4, num_micro_batches=8, zero=3), "refuses ZeRO-3 in a pipeline"),
        ("deepspeed", DEEP, "AutoTP does not go with PipelineModule: plan with --tp 1 or --pp 1"),
        ("deepspeed", CHUNKS, "one stage a rank: plan with --deepspeed"),
        ("accelerate", DEEP, "FSDP2 alone, of ZeRO 2 or 3; tp is `parallelism_config`"),
        ("accelerate", CHUNKS, "plan with --tp 1 --pp 1 --zero 3"),
        ("torchtitan", replace(TENSOR, zero=0), "no DDP beside tp or pp: plan with --zero 1"),
        ("megatron", Plan(lora=8), "adapters are the model's"),
    ],
)
def test_what_a_tool_has_no_words_for_is_said(tool, plan, words):
    with pytest.raises(InputError, match=words):
        said(tool, plan)


@pytest.mark.parametrize("tool", ["megatron", "torchtitan"])
def test_stages_that_no_flag_makes_are_refused(tool):
    with pytest.raises(InputError, match="29 layers into the plan's 8 stages"):
        said(tool, PIPED, RAGGED)


def test_the_script_prints_them(run_script):
    script = ROOT / "lessons" / "lesson16_parallelism_3d" / "plan.py"
    ended = run_script(script, "--model", "8b", "--gpus", "8", "--as", "torchtitan")
    assert "plan 1 for torchtitan:\n# torchtitan 0.2.2 (" in ended.out, ended.err
    assert "\n[training]\n" in ended.out
