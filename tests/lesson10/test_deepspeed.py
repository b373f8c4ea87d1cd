"""DeepSpeed on the course's model: the curve, the bytes, the checkpoints, the configurations."""

import pytest

from shared.exercises.lessons import ROOT
from shared.experiments.lesson10_deepspeed import (
    OFFLOAD,
    STACK,
    ask_deepspeed,
    counting_config,
    parity_config,
    read_file,
)
from shared.experiments.lesson10_files import read_config
from shared.laboratories.lesson10_deepspeed import worst
from shared.training.reference_run import read_record

ROUNDING = 5e-6  # what another order of additions does to these losses, at most


@pytest.mark.parametrize("stage", range(4))
def test_the_curve_is_the_one_loss_curve(stage):
    seen = ask_deepspeed("curve", 2, config=parity_config(stage), steps=10)
    assert seen[0]["losses"] == seen[1]["losses"]
    assert seen[0]["losses"] == pytest.approx(read_record()["losses"][:10], abs=ROUNDING)


def test_offloading_changes_no_loss():
    section = read_file(OFFLOAD)["zero_optimization"]
    config = parity_config(section.pop("stage"), **section)
    config["zero_force_ds_cpu_optimizer"] = False
    losses = ask_deepspeed("curve", 2, config=config, steps=4)[0]["losses"]
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


@pytest.mark.parametrize("file", sorted((ROOT / "lessons" / "10_zero").glob("ds_*.json")))
def test_the_script_reads_the_lessons_files(file):
    import torch

    config = read_config(file, torch.device("cpu"), 2, 8, 1e-3)
    assert config["gradient_clipping"] == 0.0
