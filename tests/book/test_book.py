"""The book: all lessons have their page, nothing is fetched from elsewhere, and faults are seen."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest

from shared.book.build import build, lay_out, lesson_folders
from shared.book.explorables import EXPLORABLES
from shared.book.explore import explore_pages
from shared.book.glossary import Term, anchor, link_first_uses, read_glossary
from shared.book.landing import parts
from shared.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
LESSONS = [folder.name for folder in lesson_folders(ROOT)]
RANK = Term("rank", "A process.", "05", "进程", ("rank", "ranks"))


def notebook(*lines: str) -> str:
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "\n".join(lines)}]})


def linked(*lines: str, folder: str = "lesson06_ddp") -> list[str]:
    content = json.loads(link_first_uses(notebook(*lines), folder, [RANK]))
    return content["cells"][0]["source"].split("\n")


def test_a_lesson_s_first_use_of_a_term_is_linked_and_no_other():
    seen = linked(
        "## A rank", "`rank`, $rank$, **rank** and [a rank](x).", "one rank, two ranks", "rank"
    )
    assert seen[:2] == ["## A rank", "`rank`, $rank$, **rank** and [a rank](x)."]
    assert seen[2:] == ["one [rank](#term-rank), two ranks", "rank"]


def test_the_lesson_that_builds_a_term_and_words_that_only_hold_it_are_left_alone():
    assert linked("a rank", folder="lesson05_collectives") == ["a rank"]
    assert linked("cranky, rank-one and low_rank") == ["cranky, rank-one and low_rank"]


def test_every_term_is_whole_has_a_lesson_and_an_anchor_of_its_own(tmp_path):
    terms = read_glossary(ROOT / "shared" / "book" / "glossary.toml")
    numbers = {folder.name.removeprefix("lesson")[:2] for folder in lesson_folders(ROOT)}
    assert {term.lesson for term in terms} <= numbers
    assert len({anchor(term) for term in terms}) == len(terms)
    (tmp_path / "glossary.toml").write_text('["x"]\nsays = "y"\n', encoding="utf-8")
    with pytest.raises(InputError, match="'x' lacks lesson, zh"):
        read_glossary(tmp_path / "glossary.toml")


def test_every_lesson_of_readme_has_its_page():
    rows = [row for each in parts((ROOT / "README.md").read_text("utf-8")).values() for row in each]
    assert [row[1] for row in rows] == [folder.name for folder in lesson_folders(ROOT)]


def test_the_chinese_page_has_every_lesson():
    page = (ROOT / "shared" / "book" / "zh.md").read_text("utf-8")
    linked_to = re.findall(r"\(lessons/([^/]+)/lesson\.ipynb\)", page)
    assert linked_to == [folder.name for folder in lesson_folders(ROOT)]


@pytest.mark.full
@pytest.mark.timeout(280)
def test_the_book_builds_without_a_warning_and_needs_no_network(tmp_path, capfd):
    pytest.importorskip("sphinx_book_theme", reason="./run_all.sh book installs what builds it")
    assert build(ROOT, tmp_path) == 0, capfd.readouterr().err
    html = tmp_path / "html"
    for folder in lesson_folders(ROOT):
        page = (html / "lessons" / folder.name / "lesson.html").read_text("utf-8")
        assert "When would I use this?" in page or folder.name < "lesson05"
        fetched = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"', page)
        assert fetched == []
        assert "_static/mathjax/" in page
    assert (html / "_static" / "mathjax").is_dir()
    assert not list(html.rglob("*solutions*"))


@pytest.mark.full
def test_a_broken_link_fails_the_build(tmp_path):
    pytest.importorskip("sphinx_book_theme", reason="./run_all.sh book installs what builds it")
    lay_out(ROOT, tmp_path / "source")
    for folder in (tmp_path / "source" / "lessons").glob("lesson*/"):
        shutil.rmtree(folder)
    (tmp_path / "source" / "index.md").write_text("# x\n\n[gone](nowhere.md)\n", "utf-8")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html"]
    command += [str(tmp_path / "source"), str(tmp_path / "html")]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode != 0
    assert "nowhere.md" in outcome.stderr


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
QUIET += " --disable-background-networking --disable-component-update --virtual-time-budget=5000"


def shown_by_a_browser(page: Path, choice: dict[str, str], profile: Path) -> str:
    """The page's document after its script ran, with the controls set by the address."""
    command = [str(CHROMIUM), *QUIET.split(), "--allow-file-access-from-files", "--dump-dom"]
    command += [f"--user-data-dir={profile}", f"{page.as_uri()}?{urlencode(choice)}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.full
@pytest.mark.parametrize("each", EXPLORABLES, ids=lambda each: each.name)
def test_a_browser_shows_what_python_computes_for_every_control(each, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no Chromium here: what the pages show in a browser is not tried")
    _, text = next(item for item in explore_pages(LESSONS).items() if item[0] == f"{each.name}.md")
    html = text.split("```{raw} html\n")[1].split("\n```")[0].replace("../_static/", "")
    (tmp_path / "page.html").write_text(f"<!doctype html><body>{html}</body>", "utf-8")
    shutil.copy(ROOT / "shared" / "book" / "explorable.js", tmp_path)
    first = {name: str(values[0]) for name, values in each.controls.items()}
    last = {name: str(values[-1]) for name, values in each.controls.items()}
    moved = [first | {name: last[name]} for name in each.controls]
    for number, choice in enumerate([first, *moved]):
        page = shown_by_a_browser(tmp_path / "page.html", choice, tmp_path / str(number))
        state = each.states()["|".join(choice.values())]
        says = state["says"] if isinstance(state["says"], str) else state["says"][-1]
        seen = unescape(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
        assert f'aria-live="polite">{says}</p>' in seen, choice
        for name, value in state.get("numbers", {}).items():
            assert f"<dt>{name}</dt><dd>{value}</dd>" in seen, choice


@pytest.mark.parametrize("each", EXPLORABLES, ids=lambda each: each.name)
def test_an_explorable_is_small_and_refuses_in_words(each):
    assert len(each.as_json().encode()) <= 100_000
    assert all(state["says"] for state in each.states().values())


def test_the_viewer_computes_nothing_and_is_short():
    text = (ROOT / "shared" / "book" / "explorable.js").read_text("utf-8")
    assert len(text.splitlines()) <= 200
    assert "http" not in text
