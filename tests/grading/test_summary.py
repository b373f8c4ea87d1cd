"""What the terminal says at the end of a grading."""

from dataclasses import replace

from solutions.grading.reports.summary import summary
from solutions.grading.results import Outcome, Verdict

ADA = Verdict("Ada", "01", "01.1", "double", 2, 2, Outcome.RIGHT, "right")
BEN = replace(ADA, student="Ben", points=0.5, outcome=Outcome.PARTLY)
CEM = replace(ADA, student="Cem", points=0, outcome=Outcome.UNREADABLE, message="not JSON")


def test_it_counts_outcomes_and_points():
    assert summary([ADA, BEN, CEM]).splitlines()[:4] == [
        "exercise     right  partly  wrong  not graded  not solved  mean points",
        "01.1 double      1       1      0           1           0    0.83 of 2",
        "",
        "3 students, 2 points: median 0.5, from 0 to 2",
    ]


def test_it_names_what_an_instructor_has_to_see():
    looked = replace(BEN, flags=("line 3 imports os", "torch.allclose was replaced"))
    text = summary([ADA, looked, CEM, replace(CEM, exercise="01.2")])
    assert "needs a look:\n  Ben, 01.1: line 3 imports os; torch.allclose was replaced" in text
    assert "stopped, or cannot be graded:\n  Cem, 01.1 and 1 more: not JSON" in text
    assert "needs a look" not in summary([ADA])


def test_a_long_list_is_cut_and_says_so():
    many = [replace(CEM, student=f"s{i}") for i in range(30)]
    lines = summary(many).splitlines()
    assert lines[-1] == "  and 18 more, in grades.csv"
    assert sum("not JSON" in line for line in lines) == 12


def test_one_student_and_nobody():
    assert summary([BEN]).endswith("0.5 of 2 points")
    assert summary([]) == "nothing was graded"


def test_a_terminal_is_not_written_to_by_names():
    text = summary([replace(CEM, student="a\x1b[2J\nb", message="c\x07")])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "a\ufffd[2J b, 01.1: c\ufffd" in text
