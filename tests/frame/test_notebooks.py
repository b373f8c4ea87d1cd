"""Every lesson's notebook as a learner meets it: its shape, reading mode, the strict form.

Each runs in full once in the tests, under nbval in solution mode: `./run_all.sh test` adds that. In
reading mode an open exercise is bound to the same object, which is tested for all of them, so that
every other cell runs alike. Two notebooks run in full in reading mode as well, and strict.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from shared.cli.notebooks import execute, normalise
from shared.exercises import notebook as exercises
from shared.exercises.answers import CHECK, new_module, read_cells, run_cell
from shared.exercises.commands import as_python
from shared.exercises.lessons import ROOT, load_checks, solution_module

PATHS = sorted((ROOT / "lessons").glob("*/lesson.ipynb"))
BY_NAME = [pytest.param(path, id=path.parent.name) for path in PATHS]
# In full, one without ranks and one with: what is right in one way of running is in the other.
READ, STRICT = (
    [each for each in BY_NAME if each.id.startswith(n)] for n in ("lesson07", "lesson01")
)
SECTIONS = [
    "The question",
    "The idea",
    "Build it",
    "Prove it",
    "Measure it",
    "What people get wrong",
    "Run it",
    "When would I use this?",
    "Where this goes",
]
DECISION = "When would I use this?"  # from lesson 05 on: 01 to 04 are what every model has
IGNORED = "nbval-ignore-output"


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def test_every_notebook_has_the_courses_shape():
    assert PATHS
    offenders = [f"{path.parent.name}: {what}" for path in PATHS for what in misshapen(path)]
    assert not offenders, "\n".join(offenders)


def misshapen(path: Path) -> Iterator[str]:
    """In what a notebook differs from the shape that all have."""
    notebook = nbformat.read(path, as_version=4)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    headings = re.findall(r"^## (.+)$", "\n".join(prose), re.MULTILINE)
    wanted = [name for name in SECTIONS if name != DECISION or path.parent.name >= "lesson05"]
    if headings != wanted:
        yield f"its sections are {headings}"
    if not prose[0].startswith(f"# Lesson {path.parent.name.removeprefix('lesson')[:2]}: "):
        yield f"it begins {prose[0][:40]!r}"
    if path.stat().st_size >= 1_000_000:
        yield f"it has {path.stat().st_size:,} bytes"
    cells = code_cells(notebook)
    if [cell for cell in cells if "setup" in tags(cell)] != cells[:1]:
        yield "the first code cell, and no other, is the setup"
    if not all(cell.execution_count for cell in cells):
        yield "a cell was never run: nbval compares nothing there"
    ignored = [cell for cell in cells if IGNORED in tags(cell)]
    if len(ignored) > len(cells) / 3:
        yield f"{len(ignored)} of {len(cells)} cells are not compared"
    if unknown := {tag for cell in cells for tag in tags(cell)} - {"setup", IGNORED}:
        yield f"tags that could hide a failure: {unknown}"
    if not cells[0].metadata.get("jupyter", {}).get("source_hidden"):
        yield "its imports are not folded: ./run_all.sh notebooks NN"
    yield from imported_for_nothing([cell.source for cell in cells])


def imported_for_nothing(sources: list[str]) -> Iterator[str]:
    """What ruff's F401 would say, which a reader should not see silenced in the imports."""
    trees = [as_python(source)[1] for source in sources]
    used = {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}
    lines = sources[0].splitlines()
    for node in trees[0].body:
        for name in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            marked = "# for your answer" in lines[node.lineno - 1] + lines[name.lineno - 1]
            if not marked and (name.asname or name.name).split(".")[0] not in used:
                yield f"{name.name} is imported, not used, and not marked as for answers"
    if "# noqa" in "\n".join(sources):
        yield "a cell tells ruff something, where readers see it"


def test_a_name_that_is_imported_for_nothing_is_named():
    setup = "import math\nfrom a import (\n    b,  # for your answers\n    c as d,\n)\nimport e.f"
    (found,) = imported_for_nothing([setup, "math.pi + e.f.g"])
    assert found.startswith("c is imported")


@pytest.mark.parametrize("path", BY_NAME[2:])
def test_a_long_lesson_names_a_way_through_in_an_hour(path):
    prose = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"]
    number = path.parent.name.removeprefix("lesson")[:2]
    (way,) = re.findall(r"\b[Ii]n one hour: (.+)", prose[0])
    found = re.findall(r"^### Exercise (\S+) · .* (\d+) minutes$", "\n".join(prose), re.MULTILINE)
    minutes = {id: int(number) for id, number in found}
    exercises = re.findall(rf"\b{number}\.\d\w?", way)
    assert exercises and sum(minutes[each] for each in exercises) <= 45
    for place in re.findall(r"\*(.+?)\*", way):
        marked = re.compile(rf"^(#+ |\*\*){re.escape(place)}", re.MULTILINE)
        assert any(map(marked.search, prose)), f"there is no {place!r}"


# 05's prints no sum of a GPU's, and takes none where they are too few; 21's is always on the CPU.
ANY_DEVICE = ('launch_nodes("train.py"', '"--fault", "batches"')


def test_every_launch_cell_has_its_two_ranks_beside_one_gpu():
    launching = [
        (path.parent.name, cell.source)
        for path in PATHS
        for cell in code_cells(nbformat.read(path, as_version=4))
        if re.search(r"\blaunch(_nodes)?\(", cell.source)
    ]
    assert len({name for name, _ in launching}) == len(PATHS)
    offenders = [
        name
        for name, source in launching
        if '"--device", "cpu"' not in source and not any(each in source for each in ANY_DEVICE)
    ]
    assert not offenders, "a launch without --device cpu fails beside one GPU, or adds in its order"


def test_a_figure_below_a_check_is_no_obstacle():
    figure = nbformat.v4.new_output("display_data", {"text/plain": "<Figure>"})
    cell = nbformat.v4.new_code_cell('check("01.1", f)', outputs=[figure])
    (kept,) = normalise(nbformat.v4.new_notebook(cells=[cell])).cells
    assert kept.outputs == [figure]


def test_every_stored_notebook_is_normalised_and_clean():
    offenders = [f"{path.parent.name}: {what}" for path in PATHS for what in unclean(path)]
    assert not offenders, "\n".join(offenders)


def unclean(path: Path) -> Iterator[str]:
    """What must not stand in a stored notebook."""
    again = normalise(nbformat.read(path, as_version=4))
    if nbformat.writes(again, version=4).strip() != path.read_text(encoding="utf-8").strip():
        yield "it is not normalised: ./run_all.sh notebooks NN"
    for cell in code_cells(nbformat.read(path, as_version=4)):
        begin = f"{cell.source[:80]!r}"
        plain = re.sub(r"\A%%ranks \d.*\n", "", cell.source)  # it raises what its ranks raise
        if re.search(r"^\s*[!%]|get_ipython\(", plain, re.MULTILINE):
            yield f"a magic or shell command: {begin}"
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"a stored error under {begin}"
        if any(output.get("name") == "stderr" for output in cell.outputs):
            yield f"something on stderr under {begin}"
        if str(ROOT) in str(cell.outputs):
            yield f"a path of this machine under {begin}"
    for place in re.findall(r"@[A-Z]+@", path.read_text(encoding="utf-8")):
        yield f"a number that was never filled in: {place}"


def test_run_it_says_which_answers_the_script_takes_from_a_notebook():
    offenders = []
    for path in PATHS:
        checks = load_checks(path.parent.name.removeprefix("lesson")[:2])
        tree = ast.parse(path.with_name("train.py").read_text(encoding="utf-8"))
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        names = {each.asname or each.name for node in imports for each in node.names}
        taken = {id for id, each in checks.items() if each.name in names}
        prose = (c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type != "code")
        lines = [line for source in prose for line in source.splitlines() if "--mine" in line]
        said = {id for id in checks if re.search(rf"\b{re.escape(id)}\b", "\n".join(lines))}
        if said != taken and not (taken == checks.keys() and "all your answers" in "".join(lines)):
            offenders.append(f"{path.parent.name}: the script takes {sorted(taken)}, said {said}")
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize("path", BY_NAME)
def test_an_open_exercise_is_the_object_that_solution_mode_binds(path, monkeypatch, capsys):
    number = path.parent.name.removeprefix("lesson")[:2]
    monkeypatch.delenv("TORCH_HANDLE_IMPLEMENTATION", raising=False)
    monkeypatch.setenv("TORCH_HANDLE_STRICT", "0")
    monkeypatch.setattr(exercises, "defined", {})
    monkeypatch.chdir(path.parent)
    cells, module = read_cells(path), new_module(number)
    for label, source in {"setup": cells.setup, **cells.exercises}.items():
        run_cell(source, f"{number} {label}", module)
    for id, checks in load_checks(number).items():
        assert vars(module)[checks.name] is getattr(solution_module(number), checks.name), id
    check_cells = [source for source in cells.others if CHECK.search(source)]
    assert len(check_cells) == len(cells.exercises)
    for source in check_cells:
        exec(source, vars(module))
        assert "not solved yet" in capsys.readouterr().out, source


@pytest.mark.full
@pytest.mark.parametrize("path", READ)
def test_reading_mode_runs_to_the_end_with_nothing_solved_and_shows_what_is_stored(path):
    stored = code_cells(nbformat.read(path, as_version=4))
    notebook = normalise(execute(nbformat.read(path, as_version=4), path.parent, "reading"))
    checks = 0
    for before, cell in zip(stored, code_cells(notebook), strict=True):
        if CHECK.search(cell.source):
            checks += 1
            said = "".join(output.get("text", "") for output in cell.outputs)
            assert "not solved yet" in said, f"{cell.source}: {said}"
        elif IGNORED not in tags(cell):
            assert texts(cell) == texts(before), cell.source
    assert checks


def texts(cell: NotebookNode) -> list[str]:
    """What a cell shows as text."""
    plain = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return [text for text in plain if text]


@pytest.mark.full
@pytest.mark.parametrize("path", STRICT)
def test_under_nbval_exactly_the_checks_of_unsolved_exercises_fail(path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_HANDLE_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", str(path), "-rA", "-q"],
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1", "TORCH_HANDLE_QUICK": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = re.findall(r"^(PASSED|FAILED) .*::Cell (\d+)", done.stdout, re.MULTILINE)
    failed = {int(number) for result, number in lines if result == "FAILED"}
    cells = code_cells(nbformat.read(path, as_version=4))
    to_do = {n for n, cell in enumerate(cells) if CHECK.search(cell.source)}
    assert len(lines) == len(cells), done.stdout[-6000:] + done.stderr
    assert failed == to_do, done.stdout[-6000:]
