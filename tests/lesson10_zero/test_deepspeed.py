"""DeepSpeed on the course's model: one loss, worst moments, checkpoints, configurations."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

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
    notes_on,
    read_config,
)
from lessons.lesson10_zero.experiments.search import train_alone
from lessons.lesson10_zero.laboratory.deepspeed_configs import worst
from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.forked import run_ranks
from shared.training.deepspeed_engine import DeepSpeedEngine
from shared.training.reference_run import read_record, reference_batches

ROUNDING = 5e-6  # what another order of additions does to these losses, at most


def test_offloading_changes_no_loss():
    section = read_file(OFFLOAD)["zero_optimization"]
    config = parity_config(section.pop("stage"), **section)
    config["zero_force_ds_cpu_optimizer"] = False
    first, second = ask_deepspeed("curve", 2, config=config, steps=4)
    assert first == second
    assert first == pytest.approx(read_record()["losses"][:4], abs=ROUNDING)


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_the_worst_moment_of_every_rank_is_the_formula_and_the_buckets(ranks):
    """The notebook has rank 0's, of two ranks and four; check 10.5 asks about one as well."""
    configs = [counting_config(stage) for stage in range(4)]
    for each in ask_deepspeed("count", ranks, configs=configs, **STACK):
        for stage, found in enumerate(each):
            most = max(found["peaks"].values())
            assert (
                worst(stage, ranks) - 1e-6 <= most <= worst(stage, ranks) + (0.1 if stage else 0.6)
            )


@pytest.mark.full
def test_messages_of_four_ranks_to_the_digit():
    """The notebook rounds those of two."""
    more = {"gradient_accumulation_steps": 2}
    to_owner = more | {"use_multi_rank_bucket_allreduce": False}
    configs = [counting_config(stage, **more) for stage in range(4)]
    configs += [counting_config(stage, **to_owner) for stage in (1, 2)]
    seen = ask_deepspeed("sent", 4, configs=configs, **STACK)[0]
    assert seen == [
        {"all_reduce": pytest.approx(2)},
        {"all_reduce": pytest.approx(2), "all_gather": pytest.approx(1)},
        {"all_reduce": pytest.approx(4), "all_gather": pytest.approx(1)},
        {"reduce_scatter": pytest.approx(2), "all_gather": pytest.approx(4)},
        {"reduce": pytest.approx(1), "all_gather": pytest.approx(1)},
        {"reduce": pytest.approx(2), "all_gather": pytest.approx(1)},
    ]


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


def read(text: str, folder: Path, hidden_size: int = 0) -> dict:
    file = folder / "own.json"
    file.write_text(text, encoding="utf-8")
    return read_config(file, torch.device("cpu"), 2, 8, 1e-3, hidden_size)


def test_a_file_is_read_as_deepspeed_reads_it(tmp_path):
    """A byte order mark, comments, no comma at a line's end, DeepSpeed's other name of bf16."""
    text = """\ufeff{
      // sixteen rows on two ranks
      "train_batch_size": 16
      "gradient_clipping": 1.0,  # of the whole gradient
      "bfloat16": {"enabled": true}
    }"""
    assert read(text, tmp_path) == {
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }


def test_a_files_schedule_is_left_to_the_script(tmp_path):
    """DeepSpeed #4024, LLaMA-Factory #768: an `auto` that only the Trainer can fill in."""
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    config = read(json.dumps({"train_batch_size": 16, "scheduler": schedule}), tmp_path)
    notes = notes_on(config, Path("own.json"))
    assert [note.startswith("own.json's scheduler is left out") for note in notes] == [True]
    assert config == {"train_batch_size": 16}
    assert notes_on(config, Path("own.json")) == []


def test_auto_buckets_are_the_trainers(tmp_path):
    """transformers 5.24, integrations/deepspeed.py: the last two under stage 3 alone."""
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    names += ("stage3_param_persistence_threshold",)
    for stage, right in ((2, [1024]), (3, [1024, 921, 320])):
        section = {"stage": stage, **dict.fromkeys(names, "auto")}
        found = read(json.dumps({"zero_optimization": section}), tmp_path, hidden_size=32)
        assert found["zero_optimization"] == {
            "stage": stage,
            **dict(zip(names, right, strict=False)),
        }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"compile": {"disable": false}}', "this run makes no use of DeepSpeed's 'compile'"),
        ('{"fp8": {}}', "DeepSpeed has no key 'fp8' at the top level"),
        ('{"zero_optimization": {"stage": 3, "stage": 0}}', "has 'stage' twice"),
        ('{"zero_optimization": {"reduce_bucket_size": 0}}', "reduce_bucket_size is 0; it must be"),
        ('{"gradient_clipping": "1.0"}', "gradient_clipping is the text '1.0'"),
        ('{"fp16": {"enabled": "False"}}', "fp16.enabled is the text 'False'; write true or false"),
        ('{"fp16": {\n"enabled": True,\n}}', "fp16.enabled is the text 'True,'; write true or"),
        ('{"wall_clock_breakdown": "true"}', "wall_clock_breakdown is the text 'true'"),
        ('{"bfloat16": true}', "bf16 is True; it must be an object"),
        ('{"bf16": {}, "bfloat16": {}}', "'bf16' and 'bfloat16', which are one"),
        ('{"optimizer": {"params": {"lr": "1e-3"}}}', "optimizer.params.lr is the text '1e-3'"),
    ],
)
def test_what_would_be_another_run_is_said_with_its_key(text, words, tmp_path):
    with pytest.raises(InputError, match=re.escape(words)):
        read(text, tmp_path)


class Dies:
    """Ends the process that unpickles it."""

    def __init__(self, function, *args):
        self.way = function, args

    def __reduce__(self):
        return self.way


@pytest.mark.full
def test_only_a_process_that_was_killed_says_that_a_model_does_not_fit():
    tried = partial(train_alone, file=Path("own.json"), recipe=None)
    with pytest.raises(MemoryError):
        tried(Dies(signal.raise_signal, signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"that tried own.json ended with code 3"):
        tried(Dies(os._exit, 3))


class CountsMicroSteps:
    """Of DeepSpeed's engine what its step counts: it updates in every second call."""

    def __init__(self) -> None:
        self.micro_steps, self.fails = 0, True

    def backward(self, loss) -> None:
        if self.fails and self.micro_steps == 1:
            raise RuntimeError("out of memory")

    def step(self) -> None:
        self.micro_steps += 1


def test_a_step_that_failed_between_micro_batches_is_not_gone_on_with():
    def work(rank):
        inner = CountsMicroSteps()
        engine = DeepSpeedEngine(inner, num_micro_batches=2)
        engine.loss = lambda model, rows, tokens: torch.zeros(())
        batch = reference_batches()[0]
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.forward_backward(batch)
        inner.fails = False
        engine.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="start the run again, from a checkpoint"):
            engine.forward_backward(batch)

    run_ranks(work, 1)
