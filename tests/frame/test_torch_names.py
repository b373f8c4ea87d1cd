"""What the course takes from torch that another version may not have: all listed, and guarded."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shared.cli import torch_names
from shared.cli.finding import GOOD, NOTE
from shared.cli.torch_names import NEWER, PRIVATE, files, look_at_names, users
from shared.errors import InputError
from shared.exercises.answers import Cells
from shared.exercises.cells import code_of
from tests.benchmarks import older_torch

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTAL = "torch.distributed.tensor.experimental"
OLD_PLACES = (f"{EXPERIMENTAL}._attention._templated_ring_attention",)  # asked where NEWER fails


def is_private(name: str) -> bool:
    return any(word.startswith("_") and not word.startswith("__") for word in name.split("."))


def private_names(text: str) -> set[str]:
    """The dotted private names of torch that a text imports or reaches by what it imported."""
    nodes = list(ast.walk(ast.parse(text)))
    meant, found = {}, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                found.add(each.name)
                first = each.name.partition(".")[0]
                meant[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                found.add(f"{node.module}.{each.name}")
                meant[each.asname or each.name] = f"{node.module}.{each.name}"
    seen = set()
    for node in nodes:  # outer attributes come before those that they are of
        words: list[str] = []
        while isinstance(node, ast.Attribute) and node not in seen:
            seen.add(node)
            words.append(node.attr)
            node = node.value
        if words and isinstance(node, ast.Name) and node.id in meant:
            found.add(".".join([meant[node.id], *reversed(words)]))
    return {name for name in found if name.startswith("torch.") and is_private(name)}


def test_private_names_are_found_however_they_are_imported():
    text = """
import torch._dynamo
import torch.distributed as dist
from torch.utils._pytree import tree_leaves as leaves
def f():
    from torch import cuda
    return leaves(dist.distributed_c10d._world.pg_map), cuda.memory._dump(), torch.ones(1)._base
"""
    assert private_names(text) == {
        "torch._dynamo",
        "torch.distributed.distributed_c10d._world.pg_map",
        "torch.utils._pytree.tree_leaves",
        "torch.cuda.memory._dump",
    }


def test_the_list_has_every_private_name_that_the_course_uses_and_no_other():
    texts = {path: code_of(path) for path in files()}
    used = {name: path for path, text in texts.items() for name in private_names(text)}
    listed = {*PRIVATE, *(name for name in NEWER if is_private(name))}
    known = "\n".join(f"{name}." for name in [*listed, *OLD_PLACES])
    assert {name: path for name, path in used.items() if f"{name}." not in known} == {}
    whole = "\n".join(texts.values())
    assert [name for name in listed if name.rpartition(".")[2] not in whole] == []


def test_the_pinned_torch_has_them_all():
    finding = look_at_names()
    assert finding.state == GOOD, finding


def test_a_name_that_is_gone_is_told_with_what_uses_it(monkeypatch):
    monkeypatch.setattr(torch_names, "PRIVATE", ("torch.utils._pytree.gone", "torch._dynamo"))
    monkeypatch.setattr(torch_names, "users", lambda name: [f"uses {name}"])
    newer = {"torch.nn.Linear(bias)": "z", "torch.split(x)": "y", "torch.nothing_is_lost": ""}
    monkeypatch.setattr(torch_names, "NEWER", newer)
    finding = look_at_names()
    assert finding.state == NOTE
    assert finding.found == "not in this torch: torch.split(x), torch.utils._pytree.gone"
    assert finding.advice == "split(x): y; gone: fails: uses torch.utils._pytree.gone"


def test_the_files_that_use_a_name():
    assert users("torch.distributed._compute_bucket_assignment_by_size") == [
        "lessons/lesson06_ddp/experiments/pictures.py",
        "lessons/lesson06_ddp/laboratory/messages.py",
    ]


@pytest.mark.parametrize(
    "path",
    [
        "lessons/lesson17_long_context/experiments/torch_ring.py",
        "lessons/lesson21_clusters/experiments.py",
    ],
)
def test_what_a_notebook_s_first_cell_imports_needs_no_module_newer_than_torch_2_9(
    path, monkeypatch
):
    importlib.import_module(EXPERIMENTAL)  # the real one, whose __init__ wants the real modules
    newer = (f"{EXPERIMENTAL}._context_parallel", "torch.distributed.flight_recorder")
    for name in [*newer, *(each for each in sys.modules if each.startswith(newer))]:
        monkeypatch.setitem(sys.modules, name, None)
    theirs = ModuleType(f"{EXPERIMENTAL}._attention")  # where 2.9 has its ring
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    spec = importlib.util.spec_from_file_location("as_in_torch_2_9", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_an_environment_of_an_older_torch_has_the_other_pins_and_no_cuda():
    torch, *others = older_torch.requirements("2.9.1")
    assert torch == "torch==2.9.1"
    assert "numpy" in {each.partition("==")[0] for each in others}
    assert not any(each.startswith("torch==") for each in others)
    named = [{"metadata": {"name": name}} for name in ("torch", "nvidia-nccl-cu13", "networkx")]
    older_torch.refuse_cuda("2.9.1", {"install": named[::2]})
    with pytest.raises(InputError, match=r"torch 2.9.1 is a CUDA .* such as nvidia-nccl-cu13"):
        older_torch.refuse_cuda("2.9.1", {"install": named})


def test_what_a_first_cell_ends_on_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(older_torch, "read_cells", lambda path: Cells("import gone", {}, []))
    lesson = "lesson01_positional_encoding"
    told = older_torch.try_first_cell(Path(sys.executable), lesson, tmp_path)
    assert told == "ModuleNotFoundError: No module named 'gone'"
