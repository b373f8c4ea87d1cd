"""The script: every mode, interrupted and resumed, and what it says to bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from lessons.lesson23_capstone.results import kept
from shared.capstone.config import TABLES, read_config
from shared.capstone.modes import check_mode
from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.torchrun import python

FOLDER = ROOT / "lessons" / "lesson23_capstone"
SCRIPT = FOLDER / "train.py"
TEXT = ROOT / "shared" / "data"  # quickly read: the course's own sources


def config_file(folder: Path, **changed: str) -> Path:
    """tiny.toml with that text, and lines put at the end of its tables."""
    text = (FOLDER / "configs" / "tiny.toml").read_text()
    text = text.replace("[data]", f'[data]\ndataset = "{TEXT}"')
    for table, lines in changed.items():
        text = text.replace(f"[{table}]", f"[{table}]\n{lines}")
    path = folder / "run.toml"
    path.write_text(text)
    return path


def arguments(folder: Path, *args: object, **changed: str) -> list[str]:
    file = config_file(folder, **changed)
    given = ("--preset", "tiny", "--device", "cpu", "--config", file)
    return [str(each) for each in (*given, "--out", folder / "out", *args)]


def without_out(args: list[str]) -> list[str]:
    """For torchrun's runs, which have a folder of their own."""
    at = args.index("--out")
    return args[:at] + args[at + 2 :]


def refused(ended, folder: Path) -> str:
    assert ended.status == 2, ended
    assert not (folder / "out" / "metrics.json").exists()
    lines = ended.err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert "Traceback" not in ended.err
    return lines[-1]


def metrics(folder: Path) -> dict:
    return json.loads((folder / "out" / "metrics.json").read_text())


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 150


@pytest.mark.full
def test_a_run_is_stopped_resumed_in_another_mode_and_ends_as_if_it_had_not_been(
    run_script, launch_on, tmp_path
):
    whole = run_script(SCRIPT, *arguments(tmp_path, "--steps", 4))
    assert whole.status == 0, whole.err
    losses = metrics(tmp_path)["losses"]
    save = tmp_path / "kept"
    args = arguments(
        tmp_path, "--mode", "fsdp2", "--steps", 4, "--save", save, training="save_every = 2"
    )
    seen = launch_on(SCRIPT, (2,), *without_out(args))[2][1]
    assert seen["losses"] == pytest.approx(losses, abs=1e-4)
    assert sorted(path.name for path in save.iterdir()) == ["step_00000002", "step_00000004"]
    again = arguments(tmp_path, "--steps", 4, "--resume", save / "step_00000002")
    with (tmp_path / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # as a full disk leaves it
    words = "learning rates from here on are not those of the run that was saved"
    with warnings.catch_warnings(record=True) as told:
        assert run_script(SCRIPT, *again, "--checkpointing", "--profile").status == 0
    assert words not in str([each.message for each in told])
    assert metrics(tmp_path)["losses"] == pytest.approx(losses[2:], abs=1e-4)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    # two of the whole run, whose losses are the checkpoint's, and those after it
    assert [json.loads(line)["step"] for line in lines if '"loss"' in line] == [1, 2, 3, 4]
    trace = json.loads((tmp_path / "out" / "trace_rank_0.json").read_text())
    assert trace["traceEvents"]
    with pytest.warns(UserWarning, match=f"{words}: steps 4, here 5"):
        assert run_script(SCRIPT, *arguments(tmp_path, "--steps", 5, "--resume", save)).status == 0


def test_the_table_has_predicted_bytes_and_they_are_those_counted(run_script, tmp_path):
    asked = ("--tensorboard", "--profile", 2)
    assert run_script(SCRIPT, *arguments(tmp_path, *asked)).status == 0
    found = metrics(tmp_path)
    assert found["bytes_kept"]["predicted"] == found["bytes_kept"]["measured"]
    assert found["preset"] == "run"  # by its file
    assert {"tokens/s", "MFU, %", "peak MiB", "held-out"} <= found["table"][0].keys()
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))
    trace = json.loads((tmp_path / "out" / "trace_rank_0.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {name for name in names if "Step#" in name} == {"ProfilerStep#2", "ProfilerStep#3"}


@pytest.mark.parametrize(
    ("mode", "steps", "most", "words"),
    [
        ("ddp", 1, 8, "8 bytes, predicted 16, which counts the optimizer's"),
        ("ddp", 1, 16, "16 bytes, predicted 16"),  # resumed: they were there
        ("deepspeed", 9, 20, "predicted 16, which leaves out DeepSpeed's float32 copy (lesson"),
        ("fsdp2", 9, 20, "20 bytes, predicted 16"),
    ],
)
def test_what_was_not_predicted_is_named(mode, steps, most, words):
    said = kept(mode, steps, most, 16)
    assert words in said
    assert ("DeepSpeed" in said, "optimizer" in said) == ("Deep" in words, "optimizer" in words)
    assert kept(mode, steps, most, None) == f"states of the fullest rank {most} bytes"


@pytest.mark.full
def test_tensorboard_and_deepspeed_are_imported_where_they_are_asked_for(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        f"import runpy, sys\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "assert not {'tensorboard', 'deepspeed'} & set(sys.modules), 'imported'"
    )
    command = [python(), program, *arguments(tmp_path, "--steps", "2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")
def test_sigterm_saves_and_the_run_goes_on(run_script, tmp_path):
    args = arguments(tmp_path, "--steps", 5000)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_HANDLE_IMPLEMENTATION": "solution"}
    child = subprocess.Popen(
        [python(), str(SCRIPT), *args], stdout=subprocess.PIPE, text=True, env=environment
    )
    lines, deadline = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 200
    while time.monotonic() < deadline and not (lines.exists() and lines.stat().st_size):
        time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=100)
    assert child.returncode == 99
    assert "stopped by SIGTERM after step" in out
    assert "--resume that folder goes on" in out
    (saved,) = (tmp_path / "out" / "checkpoints").glob("step_*")
    done = int(saved.name.removeprefix("step_"))
    more = arguments(tmp_path, "--steps", done + 1, "--resume", saved.parent)
    assert run_script(SCRIPT, *more).status == 0
    assert len(metrics(tmp_path)["losses"]) == 1


# Bad input


@pytest.mark.parametrize(
    ("table", "line", "words"),
    [
        ("training", "stpes = 5", "unknown key training.stpes: did you mean training.steps?"),
        ("model", "micro_batch = 5", "did you mean parallel.micro_batches?"),
        ("model", 'kinds = "gpt"', "did you mean model.kind?"),
        ("training", 'peak = "high"', "training.peak must be float, got 'high'"),
        ("training", "keep = 0", "training.keep must be 1 or more, got 0"),
        ("parallel", "tp = true", "parallel.tp must be int, got True"),
        ("parallel", "schedule = 'zb'", "must be one of gpipe, 1f1b, not 'zb'"),
        ("training", "max_norm = 0", "training.max_norm must be above 0"),
        ("training", "weight_decay = -1", "training.weight_decay must be 0 or more, got -1"),
    ],
)
def test_a_file_with_something_unknown_is_refused(table, line, words, run_script, tmp_path):
    ended = run_script(SCRIPT, *arguments(tmp_path, **{table: line}))
    assert words in refused(ended, tmp_path)


def test_a_text_that_is_too_short_for_a_row_names_the_key_to_raise(run_script, tmp_path):
    given = arguments(tmp_path)
    file = Path(given[given.index("--config") + 1])
    file.write_text(file.read_text().replace("size = 60_000", "size = 60"))
    words = "tokens, held-out ones included; 68 are needed: raise data.size or shorten model.length"
    assert words in refused(run_script(SCRIPT, *given), tmp_path)


def test_other_files_that_are_none(tmp_path):
    for text, words in {
        "[modl]": r"did you mean model\?",
        "a = ": "is no TOML",
        "model = 3": "table",
        "[training]\npeak = inf": r"training\.peak must be finite, got inf",
        "[training]\npeak = nan": r"training\.peak must be 0 or more, got nan",
    }.items():
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(InputError, match=words):
            read_config(tmp_path / "bad.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "nothing.toml")
    for path in (FOLDER / "configs").glob("*.toml"):
        assert read_config(path)
    (tmp_path / "windows.toml").write_text("\ufeff[training]\nmax_norm = inf\n", encoding="utf-8")
    assert read_config(tmp_path / "windows.toml").training.max_norm == float("inf")
    bare = read_config(config_file(tmp_path, training="weight_decay = 0"))
    assert bare.training.weight_decay == 0
    assert len(TABLES) == 5


@pytest.mark.parametrize(
    ("args", "lines", "words"),
    [
        (("--mode", "3d"), "tp = 2", "tp 2 x pp 1 are 2 ranks a copy, and 1 ranks are no"),
        (("--mode", "3d", "--compile"), "", "--compile goes with --mode single, ddp, fsdp2"),
        (("--device", "cuda"), "", "torch sees no CUDA device here"),
        (("--config", "nothing"), "", "no name in configs/ (124m, 7b, small, tiny"),
    ],
)
def test_what_this_machine_or_mode_cannot_do_is_said(args, lines, words, run_script, tmp_path):
    given = [*arguments(tmp_path, parallel=lines), *args]
    assert words in refused(run_script(SCRIPT, *given), tmp_path)


def test_one_process_is_not_two():
    with pytest.raises(InputError, match="--mode single is one process, 2 were started"):
        check_mode("single", read_config(FOLDER / "configs" / "tiny.toml"), 2)


def test_a_mode_whose_package_is_missing_is_said(run_script, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    ended = run_script(SCRIPT, *arguments(tmp_path, "--mode", "deepspeed"))
    assert "DeepSpeed is not installed here" in refused(ended, tmp_path)


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused_and_kept(run_script, tmp_path):
    save = tmp_path / "kept"
    done = run_script(SCRIPT, *arguments(tmp_path, "--steps", 3, "--save", save))
    assert done.status == 0, done.err
    before = sorted((p.name, p.read_bytes()) for p in save.rglob("*") if p.is_file())
    (tmp_path / "out" / "metrics.json").unlink()
    for lines, words in (
        ({"model": "num_kv_heads = 0\nfused = false\ntied = false"}, "another model: tied True"),
        ({"data": "", "training": ""}, "is of seed 0, here 1"),
    ):
        seed = ("--seed", 1) if "seed" in words else ()
        args = arguments(tmp_path, "--resume", save, "--save", save, *seed, **lines)
        assert words in refused(run_script(SCRIPT, *args), tmp_path)
    finished = arguments(tmp_path, "--steps", 3, "--resume", save)
    words = "step_00000003 has made 3 steps of 3: give more --steps"
    assert words in refused(run_script(SCRIPT, *finished), tmp_path)
    shutil.copytree(save, tmp_path / "torn")
    for part in (tmp_path / "torn").rglob("*.distcp"):
        part.write_bytes(part.read_bytes()[:1000])
    torn = arguments(tmp_path, "--steps", 4, "--resume", tmp_path / "torn")
    assert "step_00000003 is cut short: " in refused(run_script(SCRIPT, *torn), tmp_path)
    nothing = arguments(tmp_path, "--resume", tmp_path / "nothing")
    assert "no folder of a run's checkpoint" in refused(run_script(SCRIPT, *nothing), tmp_path)
    after = sorted((p.name, p.read_bytes()) for p in save.rglob("*") if p.is_file())
    assert after == before


def test_one_command_starts_and_starts_again_after_a_full_disk_and_names_what_is_whole(
    run_script, tmp_path, monkeypatch
):
    from shared.training import named_checkpoint

    save = tmp_path / "kept"
    kept = ("--save", save, "--resume", save)
    args = arguments(tmp_path, "--steps", 4, *kept, training="save_every = 2")
    writes, plain = [], named_checkpoint.dcp.save

    def full(*given, **named):
        writes.append(1)
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        return plain(*given, **named)

    monkeypatch.setattr(named_checkpoint.dcp, "save", full)
    said = refused(run_script(SCRIPT, *args), tmp_path)
    assert "cannot be written: No space left on device" in said
    assert [path.name for path in save.iterdir()] == ["step_00000002"]
    monkeypatch.setattr(named_checkpoint.dcp, "save", plain)
    assert run_script(SCRIPT, *args).status == 0
    assert len(metrics(tmp_path)["losses"]) == 2
    (tmp_path / "out" / "metrics.json").unlink()
    (file,) = (save / "step_00000004").glob("*.distcp")
    content = bytearray(file.read_bytes())
    # Many: what lies between two values has no checksum, and no meaning.
    for at in range(len(content) // 2, len(content) // 2 + 4000, 50):
        content[at] ^= 1
    file.write_bytes(content)
    said = refused(run_script(SCRIPT, *args, "--steps", 6), tmp_path)
    assert "step_00000004 is damaged: " in said
    assert said.endswith(f"; step_00000002 beside it is whole: --resume {save}/step_00000002")


def test_a_run_that_is_planned_is_not_run(run_script, tmp_path):
    given = ("--config", "7b", "--device", "cpu", "--out", tmp_path / "out")
    ended = run_script(SCRIPT, *given)
    assert ended.status == 0, ended.err
    assert "planned, not run: dp 64 x tp 1 x pp 1" in ended.out
    assert "losses" not in metrics(tmp_path)
