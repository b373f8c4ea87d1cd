"""pyproject.toml is the one list of what the course needs; environment.yml and the hooks use it."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
AT_SET_UP = [each for each in EXTRAS if each != "book"]  # which comes with ./run_all.sh book


def test_environment_yml_names_only_python_pip_and_this_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    assert pip == "pip"
    (ours,) = packages["pip"]
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", ours).group(1).split(",")
    assert set(extras) == set(AT_SET_UP), "conda's way in installs all that ./run_all.sh installs"
    assert python == f"python{PROJECT['requires-python']}"


def test_set_up_installs_the_same_extras():
    assert f'".[{",".join(AT_SET_UP)}]"' in (ROOT / "shared/cli/setup.py").read_text()


def test_every_requirement_is_pinned_and_named_once():
    requirements = [
        *PROJECT["dependencies"],
        *(name for extra in EXTRAS.values() for name in extra),
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", each) for each in requirements)
    names = [each.split("==")[0] for each in requirements]
    assert len(names) == len(set(names))


def test_the_oldest_python_is_the_same_everywhere():
    oldest = PROJECT["requires-python"].removeprefix(">=")
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
