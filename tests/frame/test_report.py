"""runs/report.html: complete, self-contained, and safe against what is written into it."""

import base64
import json
import re
import tomllib

import pytest

from shared.cli.report import MAX_ROWS, NOISE, ROOT, _column, write_report

RUN = "2026-01-01_10-00-00_1"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


@pytest.fixture
def runs(tmp_path):
    """A runs/ folder with one lesson in it."""
    folder = tmp_path / "runs" / "lesson01_positions"
    folder.mkdir(parents=True)
    write_metrics(folder)
    return tmp_path / "runs"


def write_metrics(folder, **extra):
    record = {
        "lesson": folder.name,
        "world_size": 2,
        "device": "cpu",
        "backend": "gloo",
        "torch": "2.13.0",
        "seconds": 3.25,
        "headline": "rotary 99.1 % accuracy",
        "run": RUN,
        "preset": "small",
        "seed": 3,
        "commit": "abc123+",
        "table": [{"variant": "none", "accuracy %": 12.34567, "steps": 12000}],
        **extra,
    }
    (folder / "metrics.json").write_text(json.dumps(record))


def result(lesson, problem=""):
    return {
        "lesson": lesson,
        "seconds": 4.0,
        "headline": "",
        "problem": problem,
        "log": f"runs/{lesson}/run.log",
        "when": "2026-01-01 10:00",
    }


def test_tables_pictures_and_machine_are_on_the_page(runs):
    (runs / "lesson01_positions" / "accuracy_by_step.png").write_bytes(PIXEL)
    (runs / "lesson01_positions" / "of_an_earlier_run.png").write_bytes(PIXEL)
    write_metrics(runs / "lesson01_positions", figures=["accuracy_by_step.png"])
    page = write_report(runs, [result("lesson01_positions")], RUN).read_text()
    for text in ("rotary 99.1 % accuracy", "12.35", "12,000", "variant", "2 ranks", "torch 2.13.0"):
        assert text in page
    assert 'class="chip pass">passed' in page
    for key in ("processor", "cores", "memory", "Python"):
        assert f"<dt>{key}</dt>" in page
    assert "<figcaption>accuracy by step</figcaption>" in page
    assert page.count(base64.b64encode(PIXEL).decode()) == 1


def test_the_page_needs_no_other_file(runs):
    (runs / "lesson01_positions" / "a.png").write_bytes(PIXEL)
    write_metrics(runs / "lesson01_positions", figures=["a.png"])
    page = write_report(runs, [result("lesson01_positions")], RUN).read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith(("data:", "#")) for source in sources)  # no such lesson's notebook
    assert "<script" not in page
    assert "url(" not in page


def test_a_row_leads_to_its_lesson_and_its_page_where_there_is_one(runs, monkeypatch):
    monkeypatch.setattr("shared.cli.report.ROOT", runs.parent)
    notebook = runs.parent / "lessons" / "lesson01_positions" / "lesson.ipynb"
    page = runs / "book" / "html" / "lessons" / "lesson01_positions" / "lesson.html"
    for file, link in (
        (notebook, '<a href="../lessons/lesson01_positions/lesson.ipynb">notebook</a>'),
        (page, '<a href="book/html/lessons/lesson01_positions/lesson.html">page</a>'),
    ):
        file.parent.mkdir(parents=True)
        file.touch()
        text = write_report(runs, [result("lesson01_positions")], RUN).read_text()
        assert text.count(link) == 2  # in the table, and above the lesson's own


def test_columns_are_explained_and_times_are_marked_and_kept_to_two_digits(runs):
    table = [{"L": 64, "time ratio": 0.2247, "tokens/s": 67727, "ms a step": 11.6, "own": 1.2345}]
    write_metrics(runs / "lesson01_positions", table=table)
    page = write_report(runs, [result("lesson01_positions")], RUN).read_text()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page.split("<section")[1])
    assert cells == ["64", "0.22", "68,000", "12", "1.234"]
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", page.split("<section")[1])
    assert heads == ["L", "≈ time ratio", "≈ tokens/s", "≈ ms a step", "own"]
    assert "<dt>L</dt><dd>tokens in a sequence</dd>" in page
    assert "<dt>own</dt>" not in page
    assert page.count(NOISE) == 1
    write_metrics(runs / "lesson01_positions", table=[{"L": 64}])
    assert NOISE not in write_report(runs, [result("lesson01_positions")], RUN).read_text()


def test_every_column_that_is_explained_is_one_of_a_script():
    written = "".join(
        path.read_text("utf-8")
        for folder in ("lessons", "shared")
        for path in (ROOT / folder).rglob("*.py")
    )
    known = {re.sub(r"\{[^}]*\}", "#", each) for each in re.findall(r'"([^"\n]+)"', written)}
    table = tomllib.loads((ROOT / "shared/cli/columns.toml").read_text("utf-8"))
    names = [name for part in table.values() for name in part]
    assert [name for name in names if name not in known] == []
    assert [name for name in names if not _column(name.replace("#", "16"))[0]] == []


def test_a_failure_shows_its_words_and_log(runs):
    folder = runs / "lesson02_attention"
    folder.mkdir()
    (folder / "run.log").write_text("RuntimeError: <boom> & more\n")
    page = write_report(runs, [result("lesson02_attention", "exit status 1")], RUN).read_text()
    assert "RuntimeError: &lt;boom&gt; &amp; more" in page
    assert 'class="chip fail">failed' in page
    words = "exercise 01.2 (PositionalEncoding) is not solved yet"
    page = write_report(runs, [result("lesson02_attention", words)], RUN).read_text()
    assert 'class="chip open">open' in page and words in page and "boom" not in page


def test_numbers_of_another_run_are_not_shown(runs):
    write_metrics(runs / "lesson01_positions", run="by hand or of yesterday")
    page = write_report(runs, [result("lesson01_positions")], RUN).read_text()
    assert "99.1" not in page
    assert "01 positions" in page


def test_a_page_shows_the_lessons_of_its_run_and_no_others(runs):
    assert "01 positions" not in write_report(runs, [result("lesson02_attention")], RUN).read_text()


def test_settings_stand_beside_the_numbers(runs):
    page = write_report(runs, [result("lesson01_positions")], RUN).read_text()
    assert "preset small · seed 3 · commit abc123+" in page


def test_strange_values_and_long_tables(runs):
    rows = [{"x": number, "y": None, "z": True} for number in range(MAX_ROWS + 5)]
    write_metrics(runs / "lesson01_positions", table=rows, second=[{"only": "<i>"}], recipe="adam")
    page = write_report(runs, [result("lesson01_positions")], RUN).read_text()
    assert "5 more rows" in page
    assert ">–</td>" in page
    assert "<td>yes</td>" in page
    assert "&lt;i&gt;" in page
    assert "<dt>recipe</dt><dd>adam</dd>" in page


def test_torn_files_do_not_stop_it(runs):
    (runs / "lesson01_positions" / "metrics.json").write_text('{"half": ')
    assert "01 positions" in write_report(runs, [result("lesson01_positions")], RUN).read_text()
