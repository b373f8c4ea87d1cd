"""Set-up's build of torch: the CPU's where no NVIDIA driver is, and what overrides that."""

import contextlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shared.cli import setup, torch_build
from shared.cli.torch_build import VARIABLE, choose_build

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / setup.CONSTRAINTS
PIN = "torch==2.13.0"
NO_CONFIG = {"PIP_CONFIG_FILE": os.devnull}  # pip reads none of this machine's


@pytest.fixture
def chosen(monkeypatch):
    def choose(env, nvidia=False, system="linux", cuda=False):
        monkeypatch.setattr(torch_build, "has_nvidia", lambda: nvidia)
        monkeypatch.setattr(torch_build, "_has_cuda", lambda _: cuda)
        return choose_build(Path(sys.executable), CONSTRAINTS, env, system)

    return choose


def test_the_build_is_the_machine_s_or_the_one_that_is_asked_for(chosen):
    cpu = chosen(NO_CONFIG)
    assert "for the CPU alone: there is no NVIDIA driver here" in cpu.says and not cpu.asked_for
    assert cpu.commands[-1][-4:] == ["--no-deps", "--torch-backend", "cpu", PIN]
    cuda = chosen({}, nvidia=True)
    assert (cuda.says, cuda.commands) == ("torch with CUDA: there is an NVIDIA driver here", ())
    kept = chosen(NO_CONFIG, cuda=True)
    assert (kept.says, kept.commands) == ("torch with CUDA, as .venv has it", ())
    for env, system in (({VARIABLE: ""}, "linux"), ({}, "darwin")):  # a cluster's login node; a Mac
        assert chosen(env, system=system).commands == ()
    for nvidia in (True, False):
        asked = chosen({VARIABLE: "file:///x"}, nvidia)
        assert asked.says == f"torch from {VARIABLE}" and asked.asked_for
        assert asked.commands[0][-4:] == ["--no-deps", "--index-url", "file:///x", PIN]


@pytest.mark.parametrize(
    "told",
    [
        "PIP_NO_INDEX",
        "[global]\nindex-url = x\n",
        "[install]\nextra-index-url =\n    x\n    y\n",
    ],
)
def test_a_mirror_of_pip_s_is_asked_before_pytorch_s_index(told, tmp_path, chosen):
    env = {**NO_CONFIG, told: "1"}
    if "\n" in told:
        (tmp_path / "pip.conf").write_text(told)
        env = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    build = chosen(env)
    assert build.says.startswith("torch as pip finds it, by its ") and build.commands == ()


def test_an_index_in_a_local_folder_is_taken(tmp_path, chosen):
    """pip itself, from a stand-in of PyTorch's index, whose builds end in "+cpu"."""
    name = "torch-2.13.0+cpu-py3-none-any.whl"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "index.html").write_text(f'<a href="{name}">{name}</a>')
    with zipfile.ZipFile(tmp_path / "torch" / name, "w") as wheel:
        info = "torch-2.13.0+cpu.dist-info"
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (command,) = chosen({VARIABLE: tmp_path.as_uri()}).commands
    target = tmp_path / "installed"
    subprocess.run([*command, "--target", target], check=True, capture_output=True)
    assert (target / "torch-2.13.0+cpu.dist-info").is_dir()


@pytest.mark.parametrize("asked_for", [False, True])
def test_an_index_that_cannot_be_reached_ends_set_up_where_it_was_asked_for(
    asked_for, tmp_path, monkeypatch, capsys
):
    failing = torch_build.Build("torch from nowhere", ([sys.executable, "-c", "1 / 0"],), asked_for)
    monkeypatch.setattr(setup, "choose_build", lambda *_: failing)
    (tmp_path / "runs").mkdir()
    refused = pytest.raises(setup.SetupFailed, match="ZeroDivisionError")
    with refused if asked_for else contextlib.nullcontext():
        setup._take_torch(tmp_path, {})
    said = capsys.readouterr().out
    assert said.startswith("set-up: torch from nowhere\n")
    falls_back = "(ZeroDivisionError: division by zero): pip's own, with CUDA\n"
    assert said.endswith(falls_back) is not asked_for


def test_the_build_that_was_asked_for_is_remembered_until_another_is(tmp_path, monkeypatch):
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(setup, "find_need", lambda *_, **__: setup.Need("", False))
    monkeypatch.setattr(setup, "_imports_torch", lambda _: True)
    monkeypatch.setattr(setup, "_stamp", lambda _: {"pins": "x"})
    seen = []
    monkeypatch.setattr(setup, "_install", lambda root, scratch, asked: seen.append({**asked}))
    for said in (None, "", None, "file:///x", None):
        if said is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, said)
        setup.ensure_environment(tmp_path)
    assert [each.get(VARIABLE) for each in seen] == [None, "", "", "file:///x", "file:///x"]
    assert setup._stored(tmp_path) == {"pins": "x", VARIABLE: "file:///x"}
