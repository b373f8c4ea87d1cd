"""The student edition: what is in it, what is not, and that it works on its own."""

import itertools
import json
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from solutions import student_edition
from solutions.edition import files, pages, proof, reading
from solutions.grading.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.lesson import read_lessons

FILES = list(files.course_files(ROOT))
NUMBERS = [name.split("/")[1][:2] for name in FILES if name.endswith("/lesson.ipynb")]


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The edition of this course, written once and left alone."""
    folder = tmp_path_factory.mktemp("class") / "edition"
    assert files.write_edition(folder) > 100
    return folder


@pytest.fixture(scope="module")
def findings(edition):
    """What reading the edition over comes to."""
    return list(reading.read_over(edition, ROOT))


@pytest.fixture
def copy(edition, tmp_path):
    """An edition to spoil."""
    return shutil.copytree(edition, tmp_path / "edition")


def problems(folder):
    """What reading the edition over finds wrong, by what was looked for."""
    return {each.what: each.problem for each in reading.read_over(folder, ROOT) if each.problem}


def test_no_answers_and_nothing_that_points_to_them(edition, findings):
    assert [each for each in findings if each.problem] == []
    assert not (edition / "solutions").exists()
    assert not (edition / "tests" / "grading").exists()
    assert not list(edition.rglob("__pycache__"))
    readme = (edition / "README.md").read_text()
    assert "To teach" not in readme
    assert "repeat_tests" not in readme, "it repeats tests that a class does not have"
    assert "The answers are not part of this edition." in readme


def test_what_later_lessons_need_stays_and_is_named(edition, findings):
    told = findings[-1].what
    assert "shared/model/attention.py (02.1 02.2 02.3 02.4a 02.4b 02.5)" in told
    assert (edition / "shared/model/attention.py").exists()
    assert "01.3" not in told, "only its own lesson needs the shift matrix"


def test_no_test_that_stays_needs_answers(edition):
    """Scripts do, and so do whole lessons; benchmarks say so in the README."""
    tests = [path for path in (edition / "tests").rglob("test_*.py") if path.stem != "test_links"]
    needy = [p.name for p in tests if re.search(r"train\.py|solutions|load_checks", p.read_text())]
    assert tests
    assert not needy


@pytest.mark.parametrize("number", NUMBERS)
def test_the_notebooks_code_and_stored_outputs_stay(edition, number):
    path = next(ROOT.glob(f"lessons/{number}_*/lesson.ipynb"))
    ours, theirs = (
        nbformat.read(root / path.relative_to(ROOT), as_version=4) for root in (ROOT, edition)
    )
    assert len(ours.cells) == len(theirs.cells)
    for mine, given in zip(ours.cells, theirs.cells, strict=True):
        if mine.cell_type == "code":
            assert mine == given
        else:
            assert mine.metadata == given.metadata


def test_files_of_the_instructors_own_do_not_get_out(tmp_path):
    course = tmp_path / "course"
    (course / "lessons/01_first").mkdir(parents=True)
    for name in ("lessons/01_first/checks.py", "lessons/01_first/grades.csv", "README.md"):
        (course / name).write_text("")
    (course / "lessons/01_first/__pycache__").mkdir()
    (course / "lessons/01_first/__pycache__/checks.pyc").write_text("")
    everything = ["README.md", "lessons/01_first/checks.py", "lessons/01_first/grades.csv"]
    assert list(files.course_files(course)) == everything, "no git: all but litter"
    for words in (["init", "-q"], ["add", "README.md", "lessons/01_first/checks.py"]):
        subprocess.run(["git", "-C", str(course), *words], check=True)
    assert list(files.course_files(course)) == everything[:2]


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for folder, words in {
        tmp_path: "is not empty",
        tmp_path / "notes.txt": "is a file",
        ROOT / "runs" / "edition": "lies inside the course",
        ROOT: "lies inside the course",
    }.items():
        with pytest.raises(InputError, match=words):
            files.write_edition(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    assert student_edition.main([str(ROOT / "edition")]) == 2
    assert student_edition.main([str(tmp_path / "x"), "--try", "77"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "lies inside the course" in said[0]
    assert said[1].startswith("error: no lesson 77; there are 01")
    assert not (tmp_path / "x").exists()


def test_a_passage_that_changed_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    passage = pages.Passage("a sentence that is not in README")
    monkeypatch.setattr(pages, "read_passages", lambda: {"README.md": [passage]})
    with pytest.raises(InputError, match=r"README\.md holds 'a sentence that is not in README'"):
        files.write_edition(tmp_path / "edition")
    assert not (tmp_path / "edition").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("One. The answer is in `solutions/`. Three.", "One. Three."),
        ("- a\n- Look at solutions/x.py: it is there.\n- c\n", "- a\n- c\n"),
        ("End.\n\nOnly `from solutions.lesson09_x import f`.\n\n## Next\n", "End.\n\n\n## Next\n"),
        ("An equation has two solutions.", "An equation has two solutions."),
        ("| a | b |\n| c | `solutions.grade` |\n| e | f |\n", "| a | b |\n| e | f |\n"),
        ("| a | b |\n| tests of the grader | 3 |\n", "| a | b |\n"),
        ("```\nls solutions/\n```\n", "```\nls solutions/\n```\n"),
    ],
)  # fmt: skip
def test_sentences_that_point_to_answers_go(before, after):
    assert pages.change_page(before, "page.md") == after


def test_sentences_about_tests_that_are_not_given_out_go():
    gone = ["tests/benchmarks/race.py"]
    page = "Ours is slower. `python tests/benchmarks/race.py` repeats it.\n\n| race | `race.py` |\n"
    assert pages.change_page(page, "page.md", gone) == page.replace(
        " `python tests/benchmarks/race.py` repeats it.", ""
    )


def test_an_answer_that_got_in_is_found(copy):
    lesson = read_lessons(ROOT, ["01"])["01"]
    answers = AnswerCells(ROOT, lesson).references
    path = next(copy.glob("lessons/01_*/lesson.ipynb"))
    path.write_bytes(hand_in(path.read_bytes(), {"01.3": answers["01.3"]}))
    text = (ROOT / "solutions/lesson01_positional_encoding.py").read_text()
    leak = text[text.index("def shift_matrix") :].partition("\n\n\n")[0]
    with (copy / "shared/measuring/timing.py").open("a") as module:
        module.write(f"\nfrom solutions import grade\n{leak}\n")
    with (copy / "AGENTS.md").open("a") as page:
        page.write("\nSee solutions/README.md.\n")
    (copy / "shared/extra").mkdir()
    (copy / "shared/extra/module.py").touch()
    assert problems(copy) == {
        "no page speaks of answers that are not there": "AGENTS.md: See solutions/README.md.",
        "nothing but the scripts imports solutions": "shared/measuring/timing.py",
        "pip finds shared/ and nothing else": "shared/extra has no __init__.py",
        "every exercise cell is an empty stub": "01.3 in 01_positional_encoding/lesson.ipynb",
        "answers that only solutions/ holds are in no file": "01.3 in shared/measuring/timing.py",
    }


@pytest.mark.timeout(600)
def test_the_edition_works_on_its_own(copy):
    """Lesson 02 a little beyond its last check, unsolved and then solved."""
    path = next(copy.glob("lessons/02_*/lesson.ipynb"))
    notebook = json.loads(path.read_text())
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    last = max(n for n, source in enumerate(sources) if source.startswith("check("))
    notebook["cells"] = notebook["cells"][: last + 5]  # with two that use what is unsolved
    path.write_text(json.dumps(notebook))
    found = list(itertools.islice(proof.prove(copy, ROOT, ["02"]), 7))
    assert [each.problem for each in found] == [""] * 7
    said = [each.what for each in found]
    assert "02: ./run_all.sh names the exercise that the script needs first (02.5)" in said
    assert any(re.match(r"02: Run All stops at the first use .* \(02\.\d", each) for each in said)
    assert "02: ./run_all.sh todo lists 6 exercises as open" in said
    strict = next(each for each in said if "nbval lists" in each)
    assert strict.startswith("02: nbval lists 6 checks, 2 cells that use unsolved exercises and 0")
    assert "02: ./run_all.sh todo lists 6 exercises as right" in said
    assert said[-1] == "02: the script runs with --mine"


def test_a_fault_of_the_edition_is_seen_in_the_trial(copy, tmp_path):
    """A cell that fails for a reason of its own is no item of a to-do list."""
    path = next(copy.glob("lessons/02_*/lesson.ipynb"))
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kept = [cell for cell in code if "@exercise" in "".join(cell["source"])][:1]
    kept += [cell for cell in code if "".join(cell["source"]).startswith("check(")][:1]
    broken = {**code[0], "id": "c-00000000", "source": ["1 / 0"], "metadata": {}}
    notebook["cells"] = [code[0], *kept, broken]
    path.write_text(json.dumps(notebook))
    lesson = read_lessons(ROOT, ["02"])["02"]
    finding = proof.strict_form(proof.EditionCopy(copy, tmp_path / "trial"), lesson)
    assert finding.what.startswith("02: nbval lists 1 checks, 0 cells that use")
    assert finding.problem.startswith("cell 3 fails:")
    assert "ZeroDivisionError" in finding.problem


def test_the_modules_read_without_torch():
    """Writing and reading over needs none of the course's heavy packages."""
    code = "import sys, solutions.student_edition; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
