"""A class's edition through a lesson: no answer of the week in it, and everything else works."""

import ast
import json
import re
import shutil
import subprocess
import sys
from functools import cache

import pytest

from shared.errors import InputError
from shared.exercises import notebook
from shared.exercises.cells import code_of
from shared.exercises.lessons import ROOT
from shared.exercises.notebook import Exercise, NotSolved
from shared.exercises.withheld import withheld
from solutions import student_edition
from solutions.answers_held import answers_in
from solutions.built import NEEDED_BEFORE
from solutions.grading.intake.class_edition import ClassEdition
from solutions.grading.intake.known import KnownAnswers, hand_in
from tests.grading.course import course
from tests.grading.test_student_edition import STOPPED, Learner

WEEKS = [10, 13, 21]
IMPORT_ALL = """
import importlib, pathlib, sys
for top in ("shared", "lessons"):
    for path in sorted(pathlib.Path(top).rglob("*.py")):
        if path.name not in ("__init__.py", "train.py", "proven.py", "triton_kernel.py"):
            importlib.import_module(".".join(path.with_suffix("").parts))
assert "torch" in sys.modules
"""


@pytest.fixture(scope="module", params=WEEKS, ids="through {:02}".format)
def week(request, tmp_path_factory):
    """A lesson and the edition through it, written once and left alone."""
    folder = tmp_path_factory.mktemp("class") / "edition"
    student_edition.write_edition(folder, through=request.param)
    return request.param, folder


compiled, code = cache(compile), cache(code_of)


def references(number):
    return list(KnownAnswers(ROOT, course()[number]).references())


def problems(folder, **more):
    return {what: bad for what, bad in student_edition.read_over(folder, **more) if bad}


@pytest.mark.full
def test_no_file_holds_an_answer_of_the_week(week):
    number, folder = week
    assert problems(folder, through=number) == {}
    lessons = {path.name[6:8] for path in folder.glob("lessons/lesson*")}
    assert lessons == {f"{n:02}" for n in range(1, number + 1)}
    sources = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    said = (folder / "README.md").read_text()[:700]
    for each in references(f"{number:02}"):
        found = re.search(rf"^(?:class|def) {each.node.name}\b", sources, re.MULTILINE) is not None
        early = each.exercise in NEEDED_BEFORE, each.exercise in said
        assert early == (found, found), each.exercise
    earlier = [r for n in range(1, number) for r in references(f"{n:02}")]
    places = {r.module.replace(".", "/") + ".py" for r in earlier if r.module.startswith("shared")}
    assert [each for each in sorted(places) if not (folder / each).exists()] == []


@pytest.mark.full
def test_all_modules_of_the_edition_can_be_imported(week, tmp_path):
    _, folder = week
    learner = Learner(folder, tmp_path)
    (tmp_path / "all.py").write_text(IMPORT_ALL)
    learner.run(f"PYTHONPATH=. python {tmp_path}/all.py", 0)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_its_last_notebook_runs_to_its_first_open_exercise(week, tmp_path):
    number, folder = week
    learner = Learner(folder, tmp_path)
    line = f"python -m shared.cli.notebooks {number:02} --mode reading --no-write"
    assert STOPPED.findall(learner.run(line, 1))[:1] == [f"{number:02}"]


# What is read before its week, and by which lesson's week on: the guide names them.
EARLY = {"04.1": {3}, "08.1a": {4, 5, 6, 7}, "13.1": {11, 12, 13}}


@pytest.mark.full
@pytest.mark.parametrize("through", range(1, 24))
def test_every_week_can_be_given_out(through):
    """By the sources alone, which take seconds: notebooks run for some of the weeks."""
    edition = ClassEdition(ROOT, through, lessons=course())
    sources = {name: text for name, text in edition.files() if text is not None}
    for number, lesson in course().items():
        if int(number) <= through:
            folder = ROOT / "lessons" / lesson.folder
            for path in (*folder.rglob("*.py"), folder / "lesson.ipynb"):
                sources[path.relative_to(ROOT).as_posix()] = code(path)
    for name, source in sources.items():
        compiled(source, name, "exec")
    week = [r for r in references(f"{through:02}") if r.exercise not in NEEDED_BEFORE]
    assert list(answers_in(sources, week)) == []
    assert edition.early == sorted(id for id, weeks in EARLY.items() if through in weeks)


def test_the_guide_names_what_is_read_early():
    guide = (ROOT / "solutions" / "README.md").read_text(encoding="utf-8")
    assert [id for id in EARLY if id not in guide] == []


@pytest.fixture(scope="module")
def fifth(tmp_path_factory):
    """The edition through lesson 05, and over it that through 06, with work done in between."""
    folder = tmp_path_factory.mktemp("weeks") / "edition"
    student_edition.write_edition(folder, through=5)
    (path,) = folder.glob("lessons/lesson05_*/lesson.ipynb")
    path.write_bytes(path.read_bytes() + b"\n")
    (folder / "shared/script.py").write_text("pass\n")
    (folder / "notes.txt").write_text("mine")
    first = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    written = student_edition.write_edition(folder, through=6)
    return folder, path, first, written


def test_the_next_week_s_edition_leaves_notebooks_alone(fifth):
    folder, path, first, written = fifth
    assert path.read_bytes().endswith(b"}\n\n")
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "shared/script.py").read_text() == (ROOT / "shared/script.py").read_text()
    new = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {"shared/ddp/engines.py", "lessons/lesson06_ddp/lesson.ipynb"} <= new - first
    assert written == len(new - {"notes.txt"}) - 5, "all but the notebooks of lessons 01 to 05"
    mark = json.loads((folder / ".edition.json").read_text())
    assert mark["through"] == 6
    assert mark["answers"]["02.5"] == "shared.model.attention.MultiHeadAttention"
    assert {id[:2] for id in mark["answers"]} == {"01", "02", "03", "04"}  # 05's are not in shared/
    assert "through lesson 06" in (folder / "README.md").read_text()[:200]


def test_the_whole_edition_goes_over_a_week_s(fifth, tmp_path):
    folder = shutil.copytree(fifth[0], tmp_path / "edition")
    student_edition.write_edition(folder)
    assert not (folder / ".edition.json").exists()
    assert "This is the student edition" in (folder / "README.md").read_text()[:100]
    assert "withheld(" not in (folder / "shared/sharding/stages.py").read_text()
    assert (folder / fifth[1].relative_to(fifth[0])).read_bytes().endswith(b"}\n\n")


@pytest.mark.full
def test_an_answer_that_got_into_a_class_s_edition_is_found(fifth):
    folder, path, *_ = fifth
    copied = folder / "shared/model/copied.py"
    copied.write_text("\n".join(ast.unparse(each.node) for each in references("06")))
    left = [path.relative_to(folder).as_posix()]
    ((what, held),) = problems(folder, through=6, left=left).items()
    copied.unlink()
    assert what == "no file holds the source of an answer of lesson 06"
    assert re.findall(r"06\.\d\w?", held) == ["06.1", "06.2", "06.2b", "06.3", "06.4", "06.5"]
    assert problems(folder, through=6, left=left) == {}


def test_weeks_that_cannot_be_are_named_in_one_line(fifth, tmp_path, capsys):
    folder, *_ = fifth
    for words, said in (
        ([folder, "--through", "4"], "holds the edition through lesson 06: --through 04 would"),
        ([tmp_path / "new", "--through", "99"], "--through 99: there is no such lesson"),
    ):
        assert student_edition.main([str(each) for each in words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert said in line
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="is not empty: name a new folder"):
        student_edition.write_edition(tmp_path, through=6)


@pytest.fixture
def solve(monkeypatch):
    """Give the answer to an exercise as a notebook's cell does."""
    monkeypatch.setattr(notebook, "defined", {"10.9": Exercise("10.9", None, None, solved=False)})

    def put(answer):
        notebook.defined["10.9"] = Exercise("10.9", answer, answer, solved=True)

    return put


def test_what_stands_for_an_answer_is_the_learner_s_once_it_is_written(solve):
    engine = withheld("10.9", "Engine")
    with pytest.raises(NotSolved, match=r"exercise 10\.9 \(Engine\) is not solved yet"):
        engine(3)
    solve(lambda x: 2 * x)
    assert engine(3) == 6


def test_a_class_of_the_course_derives_from_the_learner_s(solve):
    engine = withheld("10.9", "Engine")

    class Fast(engine):
        def __init__(self, n):
            super().__init__(n)
            self.fast = True

    class Faster(Fast):
        pass

    with pytest.raises(NotSolved):
        Faster(3)

    class Engine:
        kind = "mine"

        def __init__(self, n):
            self.n = n

    solve(Engine)
    made = Faster(3)
    assert (made.n, made.fast, Faster.kind, engine.kind) == (3, True, "mine", "mine")
    assert isinstance(made, engine)
    assert isinstance(made, Fast)
    assert not isinstance(Engine(1), Fast)
    assert isinstance(engine(1), Engine)


def test_an_answer_that_is_taken_from_its_own_placeholder_is_named(solve):
    engine = withheld("10.9", "Engine")
    solve(type("Engine", (engine,), {}))
    with pytest.raises(NotSolved, match="is taken from shared/, which takes it from your cell"):
        engine(3)


def test_a_placeholder_loads_no_torch():
    code = "import sys, shared.exercises.withheld; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_solved_week_runs_what_is_built_on_its_answers(tmp_path):
    """The planner of lesson 16 and the meshes of its script, on the answers in the notebook."""
    folder, number = tmp_path / "edition", "16"
    student_edition.write_edition(folder, through=16)
    lesson = course()[number]
    known, path = KnownAnswers(ROOT, lesson), folder / "lessons" / lesson.folder / "lesson.ipynb"
    cells = {each.exercise: known.cell(each) for each in known.references()}
    learner = Learner(folder, tmp_path)
    script = f"lessons/{lesson.folder}"
    assert STOPPED.findall(learner.run(f"python {script}/train.py --preset tiny", 2)) == ["16"]
    path.write_bytes(hand_in(path.read_bytes(), cells))
    learner.run(f"python {script}/train.py --preset tiny --out runs/mine", 0)
