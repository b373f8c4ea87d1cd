"""runs/report.html: complete, self-contained, and safe against what is written into it."""

import base64
import json
import os
import re
import time

import pytest

from shared.cli.report import MAX_ROWS, write_report

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


@pytest.fixture
def runs(tmp_path):
    """A runs/ folder with one lesson in it."""
    folder = tmp_path / "runs" / "01_positions"
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
    (runs / "01_positions" / "accuracy_by_step.png").write_bytes(PIXEL)
    page = write_report(runs, [result("01_positions")]).read_text()
    for text in ("rotary 99.1 % accuracy", "12.35", "12,000", "variant", "2 ranks", "torch 2.13.0"):
        assert text in page
    assert 'class="chip pass">passed' in page
    for key in ("processor", "cores", "memory", "Python"):
        assert f"<dt>{key}</dt>" in page
    assert "<figcaption>accuracy by step</figcaption>" in page
    assert base64.b64encode(PIXEL).decode() in page


def test_the_page_needs_no_other_file(runs):
    (runs / "01_positions" / "a.png").write_bytes(PIXEL)
    page = write_report(runs).read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert "<script" not in page
    assert "url(" not in page


def test_a_failure_shows_its_words_and_log(runs):
    folder = runs / "02_attention"
    folder.mkdir()
    (folder / "run.log").write_text("RuntimeError: <boom> & more\n")
    page = write_report(runs, [result("02_attention", "exit status 1")]).read_text()
    assert "RuntimeError: &lt;boom&gt; &amp; more" in page
    assert 'class="chip fail">failed' in page


def test_a_lesson_run_by_hand_is_shown_and_an_earlier_result_remembered(runs):
    assert "not by run_all.sh" in write_report(runs).read_text()
    write_report(runs, [result("01_positions")])
    assert "2026-01-01 10:00" in write_report(runs).read_text()


def test_a_picture_of_an_earlier_run_is_left_out(runs):
    picture = runs / "01_positions" / "old_name.png"
    picture.write_bytes(PIXEL)
    os.utime(picture, (time.time() - 3600,) * 2)
    assert "old name" not in write_report(runs).read_text()


def test_strange_values_and_long_tables(runs):
    rows = [{"x": number, "y": None, "z": True} for number in range(MAX_ROWS + 5)]
    write_metrics(runs / "01_positions", table=rows, second=[{"only": "<i>"}], recipe="adam")
    page = write_report(runs).read_text()
    assert "5 more rows" in page
    assert ">–</td>" in page
    assert "<td>yes</td>" in page
    assert "&lt;i&gt;" in page
    assert "<dt>recipe</dt><dd>adam</dd>" in page


def test_torn_files_do_not_stop_it(runs):
    (runs / "01_positions" / "metrics.json").write_text('{"half": ')
    (runs / "summary.json").write_text("[]")
    assert "01 positions" in write_report(runs).read_text()
