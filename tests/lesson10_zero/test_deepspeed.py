"""DeepSpeed on the course's model: offloading, checkpoints, configurations."""

from pathlib import Path

import pytest

from lessons.lesson10_zero.experiments.asking_deepspeed import (
    OFFLOAD,
    ask_deepspeed,
    parity_config,
    read_file,
)
from lessons.lesson10_zero.experiments.config_files import (
    compiled_kernel,
    compiling_words,
    read_config,
)
from shared.exercises.lessons import ROOT
from shared.training.reference_run import read_record

ROUNDING = 5e-6  # what another order of additions does to these losses, at most


def test_offloading_changes_no_loss():
    section = read_file(OFFLOAD)["zero_optimization"]
    config = parity_config(section.pop("stage"), **section)
    config["zero_force_ds_cpu_optimizer"] = False
    losses = ask_deepspeed("curve", 2, config=config, steps=4)[0]
    assert losses == pytest.approx(read_record()["losses"][:4], abs=ROUNDING)


def test_a_universal_checkpoint_moves_between_numbers_of_ranks(tmp_path):
    config = parity_config(3) | {"train_micro_batch_size_per_gpu": 8}
    given = {"config": config, "folder": str(tmp_path)}
    saved = ask_deepspeed("save", 2, **given)[0]
    for ranks in (1, 4):
        forms = ask_deepspeed("loads", ranks, **given)[0]
        assert forms["universal"]["losses"] == pytest.approx(saved["losses"], rel=1e-5)
        error = forms["sharded"]["error"]
        assert f"world size of 2 but the current world size is {ranks}" in error


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
