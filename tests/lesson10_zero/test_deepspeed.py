"""DeepSpeed on the course's model: the curve, the bytes, the checkpoints, the configurations."""

from pathlib import Path

import pytest

from lessons.lesson10_zero.experiments.asking_deepspeed import (
    OFFLOAD,
    STACK,
    ask_deepspeed,
    counting_config,
    parity_config,
    read_file,
)
from lessons.lesson10_zero.experiments.config_files import (
    compiled_kernel,
    compiling_words,
    read_config,
)
from lessons.lesson10_zero.laboratory.deepspeed_configs import worst
from shared.exercises.lessons import ROOT
from shared.training.reference_run import read_record

ROUNDING = 5e-6  # what another order of additions does to these losses, at most


@pytest.mark.parametrize("stage", range(4))
def test_the_curve_is_the_one_loss_curve(stage):
    seen = ask_deepspeed("curve", 2, config=parity_config(stage), steps=10)
    assert seen[0] == seen[1]
    assert seen[0] == pytest.approx(read_record()["losses"][:10], abs=ROUNDING)


def test_offloading_changes_no_loss():
    section = read_file(OFFLOAD)["zero_optimization"]
    config = parity_config(section.pop("stage"), **section)
    config["zero_force_ds_cpu_optimizer"] = False
    losses = ask_deepspeed("curve", 2, config=config, steps=4)[0]
    assert losses == pytest.approx(read_record()["losses"][:4], abs=ROUNDING)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_worst_moment_is_the_formula_and_the_buckets(ranks):
    configs = [counting_config(stage) for stage in range(4)]
    for each in ask_deepspeed("count", ranks, configs=configs, **STACK):
        for stage, found in enumerate(each):
            most = max(sum(kinds.values()) for kinds in found["moments"].values())
            assert worst(stage, ranks) - 1e-6 <= most <= worst(stage, ranks) + 0.3


def test_a_universal_checkpoint_moves_between_numbers_of_ranks(tmp_path):
    config = parity_config(3) | {"train_micro_batch_size_per_gpu": 8}
    given = {"config": config, "folder": str(tmp_path)}
    saved = ask_deepspeed("save", 2, **given)[0]
    for ranks in (1, 4):
        loaded = ask_deepspeed("load", ranks, universal=True, **given)[0]
        assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-5)
        refused = ask_deepspeed("load", ranks, universal=False, **given)[0]
        assert f"world size of 2 but the current world size is {ranks}" in refused["error"]


@pytest.mark.parametrize("file", sorted((ROOT / "lessons" / "lesson10_zero").glob("ds_*.json")))
def test_the_script_reads_the_lessons_files(file):
    import torch

    config = read_config(file, torch.device("cpu"), 2, 8, 1e-3)
    counts = "gpu" not in file.name  # and is compared with runs that do not clip
    assert config["gradient_clipping"] == (0.0 if counts else 1.0)
    assert compiling_words(config, file) == ""


def test_what_deepspeed_compiles_is_said_before_it_does(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    file, adam = Path("own.json"), {"type": "AdamW", "params": {"lr": 1e-3}}
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert compiled_kernel({"optimizer": adam}) == "fused_adam"
    assert compiled_kernel({"optimizer": adam} | offload) == "cpu_adam"
    assert compiled_kernel({"optimizer": {"type": "SGD"}}) == compiled_kernel({}) == ""
    words = compiling_words({"optimizer": adam}, file)
    assert "compiles fused_adam for own.json" in words
    assert '"torch_adam": true' in words
    assert "lock" not in words
    folder = tmp_path / "py" / "fused_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    assert f"{folder / 'lock'} is there" in compiling_words({"optimizer": adam}, file)
    (folder / "fused_adam.so").touch()
    assert compiling_words({"optimizer": adam}, file) == ""


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 4), (4, 1)])
def test_deepspeed_all_reduces_and_gathers_unless_it_is_told_otherwise(ranks, micro_batches):
    """Stage 2 reduces in every micro-batch; the setting halves what a reduction sends."""
    more = {"gradient_accumulation_steps": micro_batches}
    to_owner = more | {"use_multi_rank_bucket_allreduce": False}
    configs = [counting_config(stage, **more) for stage in range(4)]
    configs += [counting_config(stage, **to_owner) for stage in (1, 2)]
    seen = ask_deepspeed("sent", ranks, configs=configs, **STACK)[0]
    assert seen == [
        {"all_reduce": pytest.approx(2)},
        {"all_reduce": pytest.approx(2), "all_gather": pytest.approx(1)},
        {"all_reduce": pytest.approx(2 * micro_batches), "all_gather": pytest.approx(1)},
        {
            "reduce_scatter": pytest.approx(micro_batches),
            "all_gather": pytest.approx(2 * micro_batches),
        },
        {"reduce": pytest.approx(1), "all_gather": pytest.approx(1)},
        {"reduce": pytest.approx(micro_batches), "all_gather": pytest.approx(1)},
    ]
