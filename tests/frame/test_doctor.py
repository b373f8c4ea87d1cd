"""The doctor says what is missing and what to do, also where almost everything is missing."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared.cli import accelerators, doctor, machine
from shared.cli.finding import GOOD, MISSING, NOTE, Finding

ROOT = Path(__file__).resolve().parents[2]


def test_this_environment_lacks_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "shared.cli.doctor", "--no-setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for word in ("Python", "cores", "memory", "disk", "torch", "gloo", "CUDA", "C++", "ninja"):
        assert f"\n{word}" in f"\n{done.stdout}"
    assert "can be built here" in done.stdout
    assert "kernel python3" in done.stdout
    findings, commands = done.stdout.split("\nneeded and missing: nothing\nto begin with,")
    assert "torch names" in findings
    assert len(commands.splitlines()) in (3, 4)


def test_the_exit_status_says_that_something_needed_is_missing(capsys):
    found = [
        Finding("a", GOOD, "x"),
        Finding("b", NOTE, "y", "do"),
        Finding("c", MISSING, "z", "fix"),
    ]
    assert doctor.show(found) == 1
    assert capsys.readouterr().out.endswith("needed and missing: c\n")
    assert doctor.show(found[:2]) == 0


@pytest.mark.parametrize(
    ("gpus", "memory", "commands"),
    [
        ([], 8.0, ["./run_all.sh 01"]),
        ([], 3.0, ["./run_all.sh 01 --preset tiny"]),
        ([15.0], 8.0, ["./run_all.sh --nproc 1 --preset small", "./run_all.sh --device cpu"]),
        (
            [15.0],
            3.0,
            ["./run_all.sh --nproc 1 --preset small", "./run_all.sh --device cpu --preset tiny"],
        ),
        (
            [80.0] * 8,
            99.0,
            ["./run_all.sh --nproc 4", ".venv/bin/torchrun --nproc_per_node=gpu"],
        ),
        ([80.0, 15.0], 9.0, ["./run_all.sh --nproc 2 --preset small", ".venv/bin/torchrun"]),
    ],
)
def test_it_ends_with_commands_that_fit_the_machine(gpus, memory, commands):
    *found, notebook = [text for text, _ in doctor.what_to_type(gpus, memory, no_setup=False)]
    assert notebook == ".venv/bin/jupyter lab"
    assert len(found) == len(commands)
    shortened = [re.sub(r"lessons/\S+", "LESSON", text) for text in found]
    assert all(text.startswith(begin) for text, begin in zip(shortened, commands, strict=True))
    assert shortened[0] == commands[0]


def test_its_commands_are_those_of_the_environment_that_is_active():
    found = doctor.what_to_type([80.0], 99.0, no_setup=True)
    assert [text.split(" lessons")[0] for text, _ in found] == [
        "./run_all.sh --no-setup --nproc 1",
        "./run_all.sh --no-setup --device cpu",
        "jupyter lab",
    ]


def test_without_set_up_it_says_how_to(tmp_path):
    finding = doctor.look_at_set_up(tmp_path)
    assert finding.state == MISSING
    assert "setup" in finding.advice


def findings_of(tmp_path, needed, dev=""):
    """What the doctor says of a course that pins these."""
    (tmp_path / "pyproject.toml").write_text(
        f"[project]\ndependencies = [{needed}]\n[project.optional-dependencies]\ndev = [{dev}]\n"
    )
    return list(doctor.look_at_pins(tmp_path))


def test_packages_that_differ_from_the_pins(tmp_path):
    (finding,) = findings_of(tmp_path, '"nosuchpackage==1"')
    assert (finding.state, finding.found) == (MISSING, "not installed: nosuchpackage==1")
    (finding,) = findings_of(tmp_path, '"pytest==0.1"')
    assert finding.state == NOTE
    assert "pinned: 0.1" in finding.found


def test_a_missing_package_is_advised_by_name_so_that_pip_leaves_torch_alone(tmp_path):
    missing, other = findings_of(tmp_path, '"torch==0.1", "nosuchpackage==1"')
    assert missing.advice.endswith("of your own: pip install nosuchpackage==1")
    assert other.found.startswith("torch ")


def test_what_only_changing_the_course_needs_is_a_note(tmp_path):
    pins, dev = findings_of(tmp_path, '"deepspeed==0.1"', '"nosuchpackage==1", "ruff==0.1"')
    assert (pins.state, dev.state) == (GOOD, NOTE)  # DeepSpeed has a line of its own
    assert dev.found.startswith("nosuchpackage==1 (not installed), ruff ")


def test_a_cpu_wheel_fits_the_pin(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    (finding,) = findings_of(tmp_path, '"torch==2.13.0"')
    assert finding.state == GOOD


def test_a_shell_left_in_solution_mode_is_noticed(monkeypatch):
    monkeypatch.setenv("TORCH_HANDLE_IMPLEMENTATION", "solution")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = [finding.found for finding in doctor.look_at_variables(ROOT)]
    assert found == ["TORCH_HANDLE_IMPLEMENTATION is set", "PYTHONPATH names this folder"]


def test_no_compiler_is_a_note_with_advice(monkeypatch):
    monkeypatch.setattr(accelerators.shutil, "which", lambda *args, **options: None)
    findings = list(accelerators.look_at_compiler())
    assert [finding.state for finding in findings] == [NOTE, NOTE]
    assert all(finding.advice for finding in findings)


def test_no_torch_and_no_deepspeed_do_not_stop_it(monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(accelerators.importlib, "import_module", refuse)
    assert [finding.state for finding in accelerators.look_at_torch()] == [MISSING]
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda name: None)
    assert accelerators.look_at_deepspeed().state == NOTE


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_a_containers_quota_counts(tmp_path, monkeypatch, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "memory.max").write_text(str(2**30))
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert machine.num_cores() == cores
    assert machine.memory_gib() == 1.0


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        ("", "CUDA_VISIBLE_DEVICES= hides them all"),
        ("7", "CUDA_VISIBLE_DEVICES=7 names none"),
        ("0,1", "or the driver is too old for this torch"),
    ],
)
def test_gpus_that_are_hidden_or_perhaps_named_wrong(visible, words, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(accelerators.shutil, "which", lambda name: name)  # nvidia-smi
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    (cuda,) = [each for each in accelerators.look_at_torch() if each.name == "CUDA"]
    assert words in cuda.advice


@pytest.mark.parametrize(
    ("built", "free", "state", "words", "advice"),
    [
        ("sm_90", 60, GOOD, "H100, 80 GiB, bf16", ""),
        ("sm_100", 60, MISSING, "has compute capability 9.0", "a torch that has code for it"),
        ("sm_90", 3, NOTE, "3.0 GiB free", "nvidia-smi"),
        ("sm_90", None, MISSING, "CUDA error: all CUDA-capable devices are busy", "nvidia-smi"),
    ],
)
def test_a_gpu_that_is_there_and_of_no_use(built, free, state, words, advice, monkeypatch):
    def free_and_total(device):
        if free is None:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nMore")
        return free * 2**30, 80 * 2**30

    known = {
        "get_device_properties": lambda device: SimpleNamespace(name="H100", total_memory=80 << 30),
        "get_device_name": lambda device: "H100",
        "get_device_capability": lambda device: (9, 0),
        "get_arch_list": lambda: [built],
        "is_bf16_supported": lambda including_emulation: True,
        "mem_get_info": free_and_total,
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, value)
    finding = accelerators.look_at_gpu(0)
    assert finding.state == state
    assert words in finding.found
    assert advice in finding.advice
