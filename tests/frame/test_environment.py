"""pyproject.toml is the one list of what the course needs; environment.yml and the hooks use it."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from shared.cli.setup import CONSTRAINTS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
AT_SET_UP = [each for each in EXTRAS if each != "book"]  # which comes with ./run_all.sh book


def test_environment_yml_names_only_python_pip_and_this_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    assert pip == "pip"
    constraints, ours = packages["pip"]
    assert constraints == f"-c {CONSTRAINTS}"
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", ours).group(1).split(",")
    assert set(extras) == set(AT_SET_UP), "conda's way in installs all that ./run_all.sh installs"
    assert python == f"python{PROJECT['requires-python']}"


def test_set_up_installs_the_same_extras():
    assert f'".[{",".join(AT_SET_UP)}]"' in (ROOT / "shared/cli/setup.py").read_text()


def test_the_environment_of_set_up_is_what_the_constraints_say():
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("an environment of somebody's own")
    pinned = [Requirement(each) for each in (ROOT / CONSTRAINTS).read_text().splitlines()[2:]]
    wanted = {canonicalize_name(p.name): p for p in pinned if not p.marker or p.marker.evaluate()}
    other = []
    for name in brought_by("torch-handle", {"dev"}):  # whatever else somebody has put beside it
        version = Version(importlib.metadata.version(name)).public  # without "+cpu"
        if name not in wanted or version not in wanted[name].specifier:
            other.append(f"{name}=={version}: {wanted.get(name, 'not in the list')}")
    assert not other, "./run_all.sh setup, or the list anew: CONTRIBUTING.md, " + "; ".join(other)


def brought_by(name: str, extras: set[str]) -> set[str]:
    """The packages that a package needs here, and those that these need."""
    found, left, seen = set[str](), [(name, frozenset(extras))], set[tuple[str, frozenset[str]]]()
    while left:
        name, extras = left.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in importlib.metadata.requires(name) or ():
            need = Requirement(text)
            marks = [{"extra": extra} for extra in {*extras, ""}]
            if need.marker is None or any(need.marker.evaluate(mark) for mark in marks):
                found.add(canonicalize_name(need.name))
                left.append((canonicalize_name(need.name), frozenset(need.extras)))
    return found


def test_every_requirement_is_pinned_and_named_once():
    requirements = [
        *PROJECT["dependencies"],
        *(name for extra in EXTRAS.values() for name in extra),
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", each) for each in requirements)
    names = [each.split("==")[0] for each in requirements]
    assert len(names) == len(set(names))


def test_the_oldest_python_is_the_same_everywhere():
    oldest = PROJECT["requires-python"].removeprefix(">=").partition(",")[0]
    assert oldest == "3.11"
    assert "version#*.}" in (ROOT / "run_all.sh").read_text()
    assert f"-ge {oldest.split('.')[1]}" in (ROOT / "run_all.sh").read_text()
    assert f"Python {oldest}" in (ROOT / "README.md").read_text()


def test_the_commit_hooks_call_the_environments_own_tools():
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = configuration["repos"]
    assert repository["repo"] == "local", "nothing to download, one version of each tool"
    entries = {hook["entry"] for hook in repository["hooks"]}
    tools = {re.match(r"python -m (\w+)", entry).group(1) for entry in entries}
    assert tools == {"ruff", "ty", "codespell_lib"}
    assert all(hook["language"] == "system" for hook in repository["hooks"])
