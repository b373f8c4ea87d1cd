"""Exercises, checks and modes, on a toy lesson in real kernels and under real nbval."""

import nbformat

CHECK_CELLS = {2, 4}


def test_learner_mode_fails_exactly_the_checks_of_unsolved_exercises(toy, toy_module):
    toy.build()
    assert {n for n, ok in toy.nbval().items() if not ok} == CHECK_CELLS
    toy.write({**toy_module.STUBS, "01.1": toy_module.RIGHT["01.1"]})
    assert {n for n, ok in toy.nbval().items() if not ok} == {4}


def test_solution_mode_passes_everything_and_compares_the_stored_outputs(toy):
    toy.build()
    assert all(toy.nbval(TORCH_HANDLE_IMPLEMENTATION="solution").values())
    stored = nbformat.read(toy.notebook, as_version=4)
    stored.cells[-1].outputs[0].data["text/plain"] = "(9, 9)"
    nbformat.write(stored, toy.notebook)
    results = toy.nbval(TORCH_HANDLE_IMPLEMENTATION="solution")
    assert [n for n, ok in results.items() if not ok] == [5]


def test_a_wrong_answer_under_a_stored_green_output_still_fails(toy, toy_module):
    toy.build()
    notebook = nbformat.read(toy.notebook, as_version=4)
    for cell in notebook.cells:
        if '@exercise("01.1")' in cell.source:
            cell.source = toy_module.WRONG["01.1"]
    nbformat.write(notebook, toy.notebook)
    green = "01.1 double: right (2 checks passed)\n"
    assert toy.outputs()[2] == green
    assert not toy.nbval()[2]


def test_a_signature_that_differs_fails_in_solution_mode(toy, toy_module):
    toy.build()
    other = toy_module.STUBS["01.1"].replace("x: int", "y: int")
    toy.write({**toy_module.STUBS, "01.1": other})
    results = toy.nbval(TORCH_HANDLE_IMPLEMENTATION="solution")
    assert not results[1]
    done = toy.run("-m", "shared.cli.notebooks", "--no-write")
    assert done.returncode == 1
    assert "the notebook has (y: int)" in done.stdout
    method = toy_module.STUBS["01.2"].replace("amount: int = 1", "amount: int = 2")
    toy.write({**toy_module.STUBS, "01.2": method})
    assert "SignatureDiffers: 01.2 __init__" in toy.run("-m", "shared.cli.notebooks").stdout


def test_reading_mode_runs_to_the_end_and_says_what_is_to_do(toy):
    done = toy.run("-c", reading(toy))
    assert done.returncode == 0, done.stderr
    assert "01.1 double: not solved yet; the cells below use the reference" in done.stdout
    assert "hint:       x + x" in done.stdout
    assert "(8, 7)" in done.stdout


def test_reading_mode_names_the_mistake_and_keeps_the_learners_answer(toy, toy_module):
    toy.write({"01.1": toy_module.WRONG["01.1"], "01.2": toy_module.WRONG["01.2"]})
    done = toy.run("-c", reading(toy))
    assert "looks like: you squared it" in done.stdout
    assert "01.2 Adder: not right yet, at the check of one" in done.stdout
    assert "(16, 3)" in done.stdout, "the learner's own functions stay in use"


def test_without_solutions_an_unsolved_stub_stops_at_its_first_use(toy):
    toy.run("-c", "import shutil; shutil.rmtree('solutions')")
    done = toy.run("-m", "shared.cli.notebooks", "--mode", "reading", "--no-write")
    assert done.returncode == 1
    assert "exercise 01.1 (double) is not solved yet, and this cell uses it" in done.stdout


def test_a_half_written_class_is_an_attempt_not_a_stub(toy, toy_module):
    half = toy_module.RIGHT["01.2"].replace("return x + self.amount", "raise NotImplementedError")
    toy.write({**toy_module.STUBS, "01.2": half}, after="1")
    assert "a part of the stub is still there" in toy.run("-c", reading(toy)).stdout


def test_rebuilding_twice_changes_no_byte(toy):
    toy.build()
    first = toy.notebook.read_bytes()
    toy.build()
    assert toy.notebook.read_bytes() == first


def test_the_cells_carry_nbgrader_metadata(toy):
    toy.build()
    found = [c.metadata.get("nbgrader") for c in nbformat.read(toy.notebook, as_version=4).cells]
    grades = [(m["grade_id"], m["solution"], m["grade"], m.get("points")) for m in found if m]
    assert grades == [
        ("exercise-01-1", True, False, None),
        ("check-01-1", False, True, 1),
        ("exercise-01-2", True, False, None),
        ("check-01-2", False, True, 3),
    ]


LAUNCH = (
    "from shared.exercises.notebook import launch; print(launch('lessons/01_toy/train.py', {}, {}))"
)


def test_mine_runs_the_script_with_the_learners_answer(toy, toy_module):
    mine = toy_module.RIGHT["01.1"].replace("2 * x", "2 * x + 100")
    toy.write({**toy_module.STUBS, "01.1": mine})
    done = toy.run("-c", LAUNCH.format(2, ["--mine"]))
    assert "'world_size': 2, 'double': 142, 'own': ['01.1']" in done.stdout, done.stderr
    assert "'double': 42, 'own': []" in toy.run("-c", LAUNCH.format(1, [])).stdout


def test_mine_with_nothing_solved_says_so(toy):
    done = toy.run("-c", LAUNCH.format(1, ["--mine"]))
    assert done.returncode != 0
    assert "no exercise of" in done.stderr


def test_launch_fails_when_the_script_saw_another_world_size(toy):
    script = toy.lesson / "train.py"
    script.write_text(script.read_text().replace('int(os.environ["WORLD_SIZE"])', "1"))
    done = toy.run("-c", LAUNCH.format(2, []))
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
