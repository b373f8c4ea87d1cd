"""Set-up's build of torch: the CPU's where no NVIDIA driver is, and what overrides that."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shared.cli import setup, torch_build
from shared.cli.torch_build import PIP_IS_TOLD, VARIABLE, choose_build

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / setup.CONSTRAINTS
PIN = "torch==2.13.0"


def chosen(env, nvidia=False, system="linux", monkeypatch=None):
    monkeypatch.setattr(torch_build, "has_nvidia", lambda: nvidia)
    return choose_build(Path(sys.executable), CONSTRAINTS, env, system)


def test_the_build_is_the_machine_s_or_the_one_that_is_asked_for(monkeypatch):
    cpu = chosen({}, monkeypatch=monkeypatch)
    assert "for the CPU alone: there is no NVIDIA driver here" in cpu.says and not cpu.asked_for
    assert cpu.commands[-1][-4:] == ["--no-deps", "--torch-backend", "cpu", PIN]
    cuda = chosen({}, nvidia=True, monkeypatch=monkeypatch)
    assert (cuda.says, cuda.commands) == ("torch with CUDA: there is an NVIDIA driver here", ())
    for env, system in (({VARIABLE: ""}, "linux"), ({}, "darwin")):  # a cluster's login node; a Mac
        assert chosen(env, system=system, monkeypatch=monkeypatch).commands == ()
    for name in PIP_IS_TOLD:  # somebody's own mirror
        told = chosen({name: "x"}, monkeypatch=monkeypatch)
        assert (told.says, told.commands) == (f"torch as pip finds it, by {name}", ())
    for nvidia in (True, False):
        asked = chosen({VARIABLE: "file:///x"}, nvidia, monkeypatch=monkeypatch)
        assert asked.says == f"torch from {VARIABLE}" and asked.asked_for
        assert asked.commands[0][-4:] == ["--no-deps", "--index-url", "file:///x", PIN]


def test_an_index_in_a_local_folder_is_taken(tmp_path, monkeypatch):
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
    (command,) = chosen({VARIABLE: tmp_path.as_uri()}, monkeypatch=monkeypatch).commands
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
    if asked_for:
        with pytest.raises(setup.SetupFailed, match="ZeroDivisionError"):
            setup._take_torch(tmp_path)
    else:
        setup._take_torch(tmp_path)
    said = capsys.readouterr().out
    assert said.startswith("set-up: torch from nowhere\n")
    assert ("that cannot be had from here: pip's own, with CUDA" in said) is not asked_for
