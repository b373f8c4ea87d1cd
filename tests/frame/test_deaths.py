"""A rank that dies behind the results costs a warning; one that dies before them, the lesson."""

import pytest

from shared.cli import runner
from shared.cli.report import write_report

SCRIPT = """
import os, sys, time
import torch.distributed as dist
from shared.ranks.group import process_group
from shared.results import write_results
from shared.script import lesson_parser, run_script

def end(when):
    if when == WHEN and os.environ["RANK"] == "1":
        ENDS

def main():
    args = lesson_parser(__file__, "").parse_args()
    args.answers = {}
    with process_group("cpu") as rank:
        end("before the last collective")
        dist.barrier()
        if rank.is_main:
            time.sleep(3)  # it draws, and the other rank has nothing more to do
            write_results(args, rank, headline="all is well", table=[{"loss": 1.0}])
    end("after its group")

run_script(main)
"""


@pytest.fixture
def run_lesson(tmp_path, monkeypatch):
    """Run a script of two ranks, of which one ends so, as ./run_all.sh does."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    folder = tmp_path / "lessons" / "lesson01_stub"
    folder.mkdir(parents=True)
    (tmp_path / "runs").mkdir()

    def run(when: str, ends: str) -> runner.Result:
        script = SCRIPT.replace("WHEN", repr(when)).replace("ENDS", ends)
        (folder / "train.py").write_text(script)
        settings = runner.Settings(2, 120.0, ("--preset=tiny",), tmp_path / "runs", "a run")
        (result,) = runner.run_lessons(["lesson01_stub"], settings)
        return result

    return run


def test_a_rank_that_dies_behind_the_results_costs_a_warning(run_lesson, tmp_path, capsys):
    result = run_lesson("after its group", "os.abort()")
    assert result.passed, result.problem
    assert result.warning == "rank 1 was ended by SIGABRT after the results had been written"
    assert runner.say_count([result], 1, 9.0) == (
        "1 of 1 lessons passed in 9 s, 1 of them with a warning."
    )
    line = capsys.readouterr().out
    assert "pass" in line
    assert f"all is well (warning: {result.warning}; see" in line
    page = write_report(tmp_path / "runs", [vars(result)], "a run").read_text()
    assert page.count('class="chip pass"') == 2
    assert page.count(result.warning) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("when", "ends", "problem"),
    [
        ("before the last collective", "os.abort()", "rank 1 was ended by SIGABRT"),
        ("after its group", "sys.exit(3)", "rank 1: exit status 3"),
    ],
)
def test_other_ends_fail_the_lesson(run_lesson, when, ends, problem):
    result = run_lesson(when, ends)
    assert not result.passed
    assert (result.problem, result.warning) == (problem, "")
