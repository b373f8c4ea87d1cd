"""Exercises, checks and modes, on a toy lesson in real kernels and under real nbval."""

import inspect
import json
import shutil
from types import SimpleNamespace

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shared.errors import InputError
from shared.exercises import mine, notebook
from shared.exercises.notebook import COURSES_OWN
from shared.exercises.stubs import is_stub, signature_difference
from shared.exercises.wrong import Fault
from shared.model.attention import MultiHeadAttention
from tests.frame.toy_course import RIGHT, STUBS, WRONG


def test_nbval_fails_exactly_the_checks_of_unsolved_exercises(toy):
    toy.replace("01.1", RIGHT["01.1"])
    assert [n for n, ok in toy.nbval().items() if not ok] == [4]


def test_solution_mode_passes_everything_and_compares_the_stored_outputs(toy):
    stored = nbformat.read(toy.notebook, as_version=4)
    stored.cells[-1].outputs[0].data["text/plain"] = "(9, 9)"
    nbformat.write(stored, toy.notebook)
    results = toy.nbval(TORCH_HANDLE_IMPLEMENTATION="solution")
    assert [n for n, ok in results.items() if not ok] == [5]


@pytest.mark.full
def test_a_wrong_answer_under_a_stored_green_output_still_fails(toy):
    toy.replace("01.1", WRONG["01.1"])
    assert toy.outputs()[2] == f"01.1 double: right (2 checks passed){COURSES_OWN}\n"
    assert not toy.nbval()[2]


@pytest.mark.full
def test_a_signature_that_differs_fails_in_solution_mode(toy):
    toy.replace("01.1", STUBS["01.1"].replace("x: int", "y: int"))
    done = toy.run("-m", "shared.cli.notebooks", "--no-write")
    assert done.returncode == 1
    assert "SignatureDiffers: 01.1: the notebook has double(y: int)" in done.stdout


def test_a_class_with_an_empty_method_beside_its_stubs_is_not_solved():
    class Open:
        def __init__(self) -> None:
            raise NotImplementedError

        def hook(self) -> None:
            """Does nothing here: for a class that derives."""

    class Begun(Open):
        def __init__(self) -> None:
            self.done = True

        def hook(self) -> None:
            raise NotImplementedError

    class Empty:
        def hook(self) -> None: ...

    assert is_stub(Open)
    assert not is_stub(Begun)
    assert not is_stub(Empty)
    assert not is_stub(Empty.hook)


def test_signatures_are_compared_method_by_method():
    class Reference:
        def __init__(self, amount: int = 1) -> None: ...

        def __call__(self, x: int) -> int: ...

    class Own:
        def __init__(self, amount: int = 2) -> None: ...

    assert "__init__(self, amount: int = 2)" in signature_difference(Own, Reference)
    assert signature_difference(Reference, Reference) == ""
    assert "is a class" in signature_difference(Own, Reference.__call__)


def test_reading_mode_runs_to_the_end_and_says_what_is_to_do(toy):
    done = toy.run("-c", reading(toy))
    assert done.returncode == 0, done.stderr
    assert "01.1 double: not solved yet; the cells below use the reference" in done.stdout
    assert "x + x" not in done.stdout, "the hint is folded away until the learner wants it"
    assert "(8, 7)" in done.stdout


@pytest.mark.full
def test_reading_mode_names_the_mistake_and_keeps_the_learners_answer(toy):
    half = RIGHT["01.2"].replace("return x + self.amount", "raise NotImplementedError")
    toy.write({"01.1": WRONG["01.1"], "01.2": half}, after="double(4)")
    done = toy.run("-c", reading(toy))
    assert "looks like: you squared it" in done.stdout
    assert "\n16\n" in done.stdout, "the learner's own function stays in use"
    assert "01.2 Adder: not right yet, at the check of one" in done.stdout
    assert "a part of the stub is still there" in done.stdout, "half a class is an attempt"


def test_a_placeholder_has_the_parameters_of_its_stub(monkeypatch):
    """torch's DDP looks at those of a hook when it is registered, before it is called."""

    def fp16_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    class Adder:
        def __init__(self, amount=1):
            raise NotImplementedError

    monkeypatch.setattr(notebook, "solution_module", lambda number: None)
    placeholders = [mine.Unsolved("20", "fp16_hook", fp16_hook)]
    placeholders.append(notebook.substitute_reference("20.1", "fp16_hook", fp16_hook))
    for each in placeholders:
        DistributedDataParallel._check_comm_hook(SimpleNamespace(), each)
        with pytest.raises((InputError, notebook.NotSolved), match=r"20\.1 .* is not solved yet"):
            each(None, None)
    adder = notebook.substitute_reference("01.2", "Adder", Adder)
    assert str(inspect.signature(adder)) == "(amount=1)"
    with pytest.raises(notebook.NotSolved):
        adder()


def test_a_script_of_an_earlier_week_runs_with_what_the_edition_has_of_it(tmp_path, monkeypatch):
    """Who has not solved lesson 02 can run its script in lesson 05's week."""
    place = "shared.model.attention.MultiHeadAttention"
    (tmp_path / ".edition.json").write_text(json.dumps({"answers": {"02.5": place}}))
    monkeypatch.setattr(mine, "ROOT", tmp_path)
    monkeypatch.setattr(notebook, "defined", {})
    names = dict.fromkeys(("MultiHeadAttention", "causal_mask"))
    whose = mine.put_mine_in_place("02", names, mine=False)
    assert whose == {"02.3": "open", "02.5": "shared/"}
    assert names["MultiHeadAttention"] is MultiHeadAttention
    with pytest.raises(InputError, match=r"02\.3 \(causal_mask\) is not solved yet"):
        names["causal_mask"](3)


@pytest.mark.full
def test_without_solutions_an_unsolved_stub_stops_at_its_first_use(toy):
    shutil.rmtree(toy.root / "solutions")
    done = toy.run("-m", "shared.cli.notebooks", "--mode", "reading", "--no-write")
    assert done.returncode == 1
    assert "exercise 01.1 (double) is not solved yet, and this cell uses it" in done.stdout


@pytest.mark.full
def test_rebuilding_changes_no_byte(toy):
    first = toy.notebook.read_bytes()
    toy.build()
    assert toy.notebook.read_bytes() == first


def test_the_cells_carry_nbgrader_metadata(built_toy):
    cells = nbformat.read(built_toy.notebook, as_version=4).cells
    found = [cell.metadata.get("nbgrader") for cell in cells]
    grades = [(m["grade_id"], m["solution"], m["grade"], m.get("points")) for m in found if m]
    assert grades == [
        ("exercise-01-1", True, False, None),
        ("check-01-1", False, True, 1),
        ("exercise-01-2", True, False, None),
        ("check-01-2", False, True, 3),
    ]


def launching(*args: str) -> str:
    """A program that launches the toy's script on two ranks."""
    return (
        "from shared.ranks.launching import launch\n"
        f"print(launch('lessons/lesson01_toy/train.py', 2, {list(args)}))"
    )


def test_mine_runs_the_script_with_the_learners_answer(toy):
    toy.replace("01.1", RIGHT["01.1"].replace("2 * x", "2 * x + 100"))
    done = toy.run("-c", launching("--mine"))
    ran = "'answers': {'01.1': 'mine', '01.2': 'reference'}"
    assert f"'world_size': 2, 'double': 142, {ran}" in done.stdout, done.stderr


def test_without_mine_the_script_runs_with_the_references(toy):
    toy.replace("01.1", WRONG["01.1"])
    script = str(toy.lesson / "train.py")
    toy.run(script, "--out", str(toy.root), RANK="0", WORLD_SIZE="1")
    record = json.loads((toy.root / "metrics.json").read_text())
    answers = {"01.1": "reference", "01.2": "reference"}
    assert record == {"world_size": 1, "double": 42, "answers": answers}


@pytest.mark.full
def test_without_solutions_the_script_runs_with_what_is_solved(toy):
    shutil.rmtree(toy.root / "solutions")
    script = toy.lesson / "train.py"
    place = {"RANK": "0", "WORLD_SIZE": "1"}
    done = toy.run(str(script), "--out", str(toy.root), **place)
    assert "exercise 01.1 (double) is not solved yet, and this script uses it" in done.stderr
    toy.replace("01.1", RIGHT["01.1"])
    done = toy.run(str(script), "--out", str(toy.root), **place)
    record = json.loads((toy.root / "metrics.json").read_text())
    assert record["double"] == 42, done.stderr
    assert record["answers"] == {"01.1": "mine", "01.2": "open"}


def test_mine_with_nothing_solved_says_so(toy):
    done = toy.run(str(toy.lesson / "train.py"), "--mine", RANK="0", WORLD_SIZE="1")
    assert done.returncode != 0
    assert "no exercise of" in done.stderr


@pytest.mark.full
def test_launch_fails_when_the_script_saw_another_world_size(toy):
    script = toy.lesson / "train.py"
    script.write_text(script.read_text().replace('int(os.environ["WORLD_SIZE"])', "1"))
    done = toy.run("-c", launching())
    assert "LaunchFailed: asked for 2 ranks, train.py saw 1" in done.stderr


def reading(toy) -> str:
    """A program that runs the toy notebook in reading mode and prints what its cells show."""
    return (
        "import nbformat; from pathlib import Path; from shared.cli.notebooks import execute\n"
        f"n = nbformat.read({str(toy.notebook)!r}, 4)\n"
        f"execute(n, Path({str(toy.lesson)!r}), 'reading')\n"
        "for c in n.cells:\n"
        "    for o in c.get('outputs', []):\n"
        "        print(o.get('text') or o['data']['text/plain'])\n"
    )


def test_checks_that_passed_before_are_counted_where_any_has():
    assert Fault("a value", 2, 4).where.endswith(" a value (2 of 4 checks passed before it)")
    assert Fault("a value", 0, 4).where == "at the check of a value"
