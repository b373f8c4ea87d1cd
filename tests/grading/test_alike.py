"""Cells that are the same but for names and comments are named, short and untouched ones not."""

import re
from pathlib import Path

from solutions.grading.alike import equal_answers, similar_answers
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_exercises
from solutions.grading.results import Answers

ROOT = Path(__file__).resolve().parents[2]
LESSON = read_exercises(ROOT, ["02"])["02"]
KNOWN = KnownAnswers(ROOT, LESSON)
OWN = {each.exercise: KNOWN.cell(each) for each in KNOWN.references()}
OTHERS = [KNOWN.cell(each) for each in KNOWN.alternatives() if each.exercise == "02.5"]


def handed_in(**cells):
    return [(Answers(who, "02", {**LESSON.stubs, **own}, {}), LESSON) for who, own in cells.items()]


def renamed(cell):
    """Other names for what the answer calls its own, a comment, a docstring and an annotation."""
    cell = re.sub(r"\b(query|batch|heads)\b", r"my_\1", cell)
    return cell.replace("self):", "self) -> None:").replace(
        "    def forward", '    """Mine."""\n\n    # attention\n    def forward', 1
    )


def test_names_and_comments_make_no_other_answer():
    first, other = OTHERS[:2]
    given = handed_in(
        Ada={"02.5": first},
        Bo={"02.5": renamed(first)},
        Cy={"02.5": other},
        Di={"02.5": other},
        Ed={"02.2": OWN["02.2"]},
        Fe={"02.2": renamed(OWN["02.2"]) + "# mine"},
    )
    assert renamed(first) != first
    assert similar_answers(given, ROOT) == ["02.5: Ada; Bo"]
    assert equal_answers(given) == ["02.5: Cy; Di"]


def test_an_answer_typed_over_from_the_course_is_named():
    source = (ROOT / "shared/model/attention.py").read_text()
    _, _, own = source.partition("class MultiHeadAttention")
    own = '@exercise("02.5")\nclass MultiHeadAttention' + own.partition("\n\n\n")[0]
    given = handed_in(Ada={"02.5": renamed(own)}, Bo={"02.5": OTHERS[0]})
    assert similar_answers(given, ROOT) == ["02.5: Ada; the course's own"]


def test_what_is_too_deep_to_be_walked_is_left_out():
    deep = '@exercise("02.5")\ndef f():\n    return ' + "a" + ".b" * 5000
    assert similar_answers(handed_in(Ada={"02.5": deep}, Bo={"02.5": deep + "c"}), ROOT) == []
