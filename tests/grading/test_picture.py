"""The picture of a class: its bytes, its sizes, and its headline."""

import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib.image
import pytest

from solutions.grading.reports.picture import draw_class, headline
from solutions.grading.results import Outcome, Verdict

ROOT = Path(__file__).resolve().parents[2]


def verdict(student, id, outcome, mistake="", name="function"):
    """A verdict with what the picture reads."""
    points = {Outcome.RIGHT: 4.0, Outcome.PARTLY: 1.0}.get(outcome, 0.0)
    return Verdict(student, id[:2], id, name, points, 4, outcome, "", mistake=mistake)


def a_class(num_students, num_lessons, num_exercises):
    """Every outcome somewhere."""
    outcomes = list(Outcome)
    return [
        verdict(f"s{s}", f"{n:02}.{k}", outcomes[(s * 5 + n * 3 + k) % 7], f"mistake {(s + k) % 9}")
        for s in range(num_students)
        for n in range(1, num_lessons + 1)
        for k in range(1, num_exercises + 1)
    ]


@pytest.mark.parametrize("size", [(12, 2, 5), (30, 8, 6), (1, 2, 5), (1, 1, 1), (200, 1, 1)])
def test_it_is_drawn_twice_the_same_and_without_a_warning(tmp_path, size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_class(tmp_path / "a.png", a_class(*size))
        draw_class(tmp_path / "b.png", a_class(*size))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    height, width, _ = matplotlib.image.imread(tmp_path / "a.png").shape
    assert width == 1200
    assert height > 31 * size[1] * size[2], "every exercise has a line of its own"


def test_a_class_without_verdicts_still_has_a_picture(tmp_path):
    draw_class(tmp_path / "none.png", [])
    assert (tmp_path / "none.png").stat().st_size > 1000
    assert headline([]) == "Nothing was graded"


def test_the_reader_of_a_file_in_another_process_finds_the_same_bytes(tmp_path):
    """Whatever matplotlibrc says, and with other hashes."""
    (tmp_path / "matplotlibrc").write_text("figure.facecolor: red\nfont.size: 30\n")
    code = (
        "import sys; from pathlib import Path; "
        "from solutions.grading.reports.picture import draw_class; "
        "from solutions.grading.results import Outcome, Verdict; "
        "draw_class(Path(sys.argv[1]), "
        "[Verdict('s', '01', f'01.{i}', 'f', i, 9, o, '', mistake='m') "
        "for i, o in enumerate(Outcome)])"
    )
    for number, folder in enumerate((tmp_path, ROOT)):
        environment = {
            "PYTHONHASHSEED": str(number),
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
        }
        command = [sys.executable, "-c", code, str(tmp_path / f"{number}.png")]
        subprocess.run(command, cwd=folder, env=environment, check=True)
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()


def test_odd_words_do_not_stop_it(tmp_path):
    odd = r"$\frac{1}{$ \unknown ^_ <b> " + "\x1b[2J\u202e" + "x" * 400
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_class(tmp_path / "odd.png", [verdict("s", "01.1", Outcome.WRONG, odd, name=odd)])
    assert (tmp_path / "odd.png").exists()


def test_the_headline_names_the_hardest():
    right, wrong = Outcome.RIGHT, Outcome.WRONG
    two = [verdict("a", "01.1", right), verdict("b", "01.1", right)]
    assert headline(two) == "All 2 students have every exercise right"
    two += [verdict("a", "01.2", right, name="f"), verdict("b", "01.2", wrong, name="f")]
    assert headline(two) == "Hardest: 01.2 f, which 1 of 2 have right"
    two += [verdict("a", "01.3", wrong), verdict("b", "01.3", right)]
    assert headline(two) == "Hardest: 01.2, 01.3; 1 of 2 have each right"
    assert headline(two[::2]) == "One student: 2 of 3 exercises right"


def test_nothing_of_it_loads_torch():
    """The grader has to stay small: everything but the kernel's guard does without torch."""
    code = (
        "import sys, solutions.grading.reports.picture, solutions.grading.reports.feedback, "
        "solutions.grading.reports.summary, solutions.grading.selftest; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
