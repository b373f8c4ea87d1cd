"""The frameworks themselves: the curve, bytes, what they make of arguments, what they refuse."""

import math
import subprocess
import sys

import pytest

from lessons.lesson22_ecosystem.asking import HOST, ask
from lessons.lesson22_ecosystem.experiments import AUTO, BOTH, flat, gap_of
from lessons.lesson22_ecosystem.laboratory import ARGUMENTS
from lessons.lesson22_ecosystem.loops import LOOPS
from lessons.lesson22_ecosystem.results import count_parameters
from shared.ecosystem.defaults import DEFAULTS
from shared.ecosystem.explain import explain_difference
from shared.ecosystem.translate import deepspeed_config
from shared.exercises.lessons import ROOT
from shared.training.reference_run import read_record

STEPS = 6
N = count_parameters()


@pytest.fixture(scope="module", autouse=True)
def host():
    """One process of the frameworks for all tests of this module."""
    with HOST.ended():
        yield


def gap(losses):
    """How far a curve is from the record."""
    pairs = zip(losses, read_record()["losses"], strict=False)
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("engine", LOOPS)
def test_every_loop_has_the_one_curve(engine):
    ranks = ask("follow", engine=engine, num_steps=STEPS)
    assert gap(ranks[0]["losses"]) < 5e-6
    assert ranks[0]["losses"] == ranks[1]["losses"]
    sent = ranks[0]["bytes"]
    if engine in ("ddp", "accelerate", "fabric", "trainer", "trainer_fsdp"):
        assert ("all_reduce", 4 * N) in [tuple(op) for op in ranks[0]["ops"]]
        assert ranks[0]["wrapped"] == "DistributedDataParallel"
    if engine == "fsdp2":  # gathered twice but for the root, which stays whole until backward
        assert 4 * N < sent < 1.5 * 4 * N + 1024
        assert ranks[0]["kept"] < 6.2 * N
    if "deepspeed" in engine:
        assert abs(sent - 4 * N) < 1024  # the model is small: nothing is gathered a second time


@pytest.mark.full
@pytest.mark.parametrize("engine", ["accelerate", "trainer", "deepspeed"])
def test_all_fifty_steps(engine):
    assert gap(ask("follow", engine=engine, num_steps=50)[0]["losses"]) < 5e-5


def test_one_setting_moves_the_curve_and_another_does_not():
    changes = [[{"seed": 9}, BOTH], [{"max_grad_norm": 1.0}, BOTH]]
    same, clipped = ask("with_arguments", changes=changes, num_steps=STEPS)[0]
    assert gap(same) < 5e-6
    assert gap(clipped) > 1e-2


def test_a_scheduler_that_is_prepared_steps_once_for_each_rank():
    curves = ask("own_loops", names=["", "scheduler prepared"], num_steps=STEPS)[0]
    assert gap(curves[""]) < 5e-6
    assert gap(curves["scheduler prepared"]) > 1e-2


def test_rows_are_repeated_until_all_ranks_have_as_many():
    whole = ask("samples_seen", num_rows=10, settings={})
    assert sorted(row for rank in whole for batch in rank for row in batch) == sorted(
        [*range(10), *range(6)]
    )
    uneven = ask("samples_seen", num_rows=10, settings={"even_batches": False})
    assert [len(rank) for rank in uneven] == [2, 1]


def test_auto_is_filled_in_with_the_trainers_numbers_and_defaults_are_those_of_transformers():
    given = {"per_device_train_batch_size": 16, "max_steps": 50}
    filled = flat(ask("resolved", config=AUTO, arguments=given)[0])
    assert "auto" not in filled.values()
    assert filled["train_batch_size"] == 32
    assert filled["gradient_clipping"] == DEFAULTS["max_grad_norm"]
    assert filled["optimizer.params.lr"] == DEFAULTS["learning_rate"]
    assert filled["zero_optimization.stage3_param_persistence_threshold"] == 640
    theirs = ask("defaults", names=list(DEFAULTS))[0]
    assert {k: v for k, v in theirs.items() if DEFAULTS[k] != v} == {}


def test_deepspeeds_schedule_is_a_step_behind():
    rates = ask("rates", num_steps=4)[0]
    assert rates["Trainer, linear"] == pytest.approx([0, 3e-4, 6e-4, 9e-4])
    assert rates["DeepSpeed, WarmupDecayLR, linear"] == pytest.approx([0, 0, 3e-4, 6e-4])


def test_sixteen_bytes_in_bf16_and_twenty_in_float32():
    for precision, each in (({"bf16": True}, 16), ({}, 20)):
        given = ARGUMENTS | precision | {"max_steps": 3}
        seen = ask("by_config", config=deepspeed_config(given, 64), arguments=given)
        total = sum(sum(rank["kinds"].values()) for rank in seen)
        assert total == pytest.approx(each * N, rel=1e-3)  # vectors of odd length are padded


def test_what_the_engines_refuse_and_what_they_do_not_say():
    words = ask("refusals")[0]
    assert words["DeepSpeed, pipeline of 2, ZeRO-1"] == ""
    assert "ZeRO-2 and ZeRO-3 are incompatible" in words["DeepSpeed, pipeline of 2, ZeRO-2"]
    assert "only available on GPU" in words["Fabric, FSDPStrategy"]
    assert "not supported yet" in words["transformers, FSDP and pipeline"]
    assert "distributed training" in words["Trainer, fsdp, use_cpu=False"]
    became = ask("silent")[0]
    assert became["Accelerator(cpu=True, fsdp_plugin=...)"] == "DistributedDataParallel, 2 ranks"
    assert became["Accelerator(cpu=False, fsdp_plugin=...)"] == "Transformer, 1 ranks"


def test_no_framework_is_imported_by_those_who_need_none():
    code = (
        "import sys; from lessons.lesson22_ecosystem import checks, experiments, loops, train;"
        "print([n for n in ('accelerate', 'transformers', 'deepspeed', 'lightning_fabric')"
        " if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_curve_that_is_no_number_explains_nothing():
    def run(settings):
        return [1.0, math.nan if settings["lr"] else 2.0]

    assert explain_difference(run, {"lr": 1, "wd": 0}, {"lr": 0, "wd": 1}, 0.01) == ("lr",)


def test_an_engine_that_diverged_is_not_0_apart():
    first, *_ = read_record()["losses"]
    assert math.isnan(gap_of([first, math.nan]))
    assert math.isnan(gap_of([math.inf, math.nan]))
