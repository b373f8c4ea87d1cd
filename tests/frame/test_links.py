"""Every link and path that the pages name exists."""

import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in (
        *("*.md", "datasets/**/*.md", "solutions/*.md"),
        *("lessons/**/*.md", "lessons/*/lesson.ipynb"),
    )
    for path in ROOT.glob(pattern)
    if ".ipynb_checkpoints" not in path.parts
)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
# `shared/model/attention.py`, `lessons/lesson02_attention/` in running text. Names with NN stand
# for any lesson, those with * for many files; runs/ is written by the scripts.
PATH = re.compile(
    r"(?<![\w/.~-])(?:\./)?((?:shared|solutions|lessons|tests|datasets|\.ci)/[\w./*-]*[\w/*])"
)
# Pages are written for the student edition too, which has no solutions/ and not every test: they
# may name what is in the whole course alone, and not link to it.
WHOLE_COURSE = (ROOT / "solutions").is_dir()
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def text_of(page: Path) -> str:
    """The prose of a page: of a notebook, its markdown cells."""
    if page.suffix == ".md":
        return page.read_text(encoding="utf-8")
    notebook = nbformat.read(page, as_version=4)
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def anchors(page: Path) -> set[str]:
    """The names that a code host gives to a page's headings."""
    slugs = set()
    for title in HEADING.findall(text_of(page)):
        words = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        slugs.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return slugs


def broken(page: Path) -> list[str]:
    """What the page names and is not there."""
    text = text_of(page)
    found = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue  # the network's
        place, _, anchor = link.partition("#")
        target = (page.parent / place) if place else page
        has_anchors = anchor and target.suffix == ".md" and target.exists()
        if not target.exists() or (has_anchors and anchor not in anchors(target)):
            found.append(link)
    for name in PATH.findall(text):
        if re.search(r"NN|\*|DIR|CLASS", name):
            continue
        if not WHOLE_COURSE and name.startswith(("solutions/", "tests/")):
            continue
        if not (ROOT / name).exists() and not (page.parent / name).exists():
            found.append(name)
    return found


def test_every_link_and_path_exists():
    found = [f"{page.relative_to(ROOT)}: {name}" for page in PAGES for name in broken(page)]
    assert not found, "\n".join(found)


def test_pages_that_a_class_gets_link_to_nothing_in_solutions():
    pages = [page for page in PAGES if "solutions" not in page.parts]
    links = [(page.name, link) for page in pages for link in LINK.findall(text_of(page))]
    assert [each for each in links if "solutions/" in each[1]] == []


def test_the_pages_that_must_be_there_are_looked_at():
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "AGENTS.md"} <= names
    lessons = {path.parent.name for path in ROOT.glob("lessons/*/train.py")}
    assert {f"lessons/{name}/lesson.ipynb" for name in lessons} <= names


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n[good](page.md#a-title) [bad](gone.md) [worse](#no-title) `shared/nothing.py` "
        "[far](https://example.org/x) `lessons/NN_topic/train.py` `shared/cli/setup.py`"
    )
    assert broken(page) == ["gone.md", "#no-title", "shared/nothing.py"]
