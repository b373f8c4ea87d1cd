"""Build the course as a web site from its stored notebooks: nothing is executed.

    ./run_all.sh book [--serve] [--port N] [--out DIR]

The pages are copies of what the repository holds, laid out as there, so that links keep working:
lessons' notebooks, the pages beside them, and every file that one of them links to. The landing
page and the tables in it come from README.md and lessons/README.md, the glossary from
`glossary.toml`. Warnings fail the build: a broken link or a missing picture is one.
"""

import argparse
import functools
import http.server
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.book.chinese import (
    MOVED,
    chinese_landing,
    chinese_note,
    chinese_pictures,
    po_file,
    translated,
    with_blocks,
)
from shared.book.explorables import EXPLORABLES
from shared.book.explore import CONTROLS, SHOWN, as_element, explore_pages, script, viewer
from shared.book.glossary import glossary_page, link_first_uses, read_glossary
from shared.book.labels import Translate, chinese
from shared.book.landing import landing_page
from shared.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PAGES = (
    "first_lines.md",
    "copy_from_here.md",
    "on_a_gpu.md",
    "when_something_does_not_work.md",
    "README.md",
)
OFFERED = {"train.py": "the script", "checks.py": "the checks"}
LINK = re.compile(r"\]\(\s*<?([^)\s>#]+)[^)]*\)")


def lesson_folders(root: Path) -> list[Path]:
    """The folders of lessons that have a notebook, in order."""
    return sorted(path.parent for path in (root / "lessons").glob("lesson*/lesson.ipynb"))


def _begin(source: Path) -> None:
    """An empty tree for Sphinx, with what all pages share."""
    shutil.rmtree(source, ignore_errors=True)
    (source / "_static").mkdir(parents=True)
    shutil.copy(HERE / "conf.py", source)
    shutil.copy(HERE / "book.css", source / "_static")
    (source / "_static" / "explorable.js").write_text(viewer(), "utf-8")


def lay_out(root: Path, source: Path) -> None:
    """Write the tree that Sphinx reads: pages, notebooks, and the files that they link to."""
    _begin(source)
    lessons = lesson_folders(root)
    terms = read_glossary(HERE / "glossary.toml")
    for folder in lessons:
        target = source / "lessons" / folder.name
        target.mkdir(parents=True)
        text = with_note((folder / "lesson.ipynb").read_text("utf-8"), english_note(folder))
        (target / "lesson.ipynb").write_text(link_first_uses(text, folder.name, terms), "utf-8")
        for name in its_files(folder):
            shutil.copy(folder / name, target)
    for name in PAGES:
        shutil.copy(root / "lessons" / name, source / "lessons")
    (source / "index.md").write_text(landing_page(root, [each.name for each in lessons]), "utf-8")
    (source / "lessons" / "glossary.md").write_text(
        glossary_page(terms, [each.name for each in lessons], in_book=True), "utf-8"
    )
    (source / "zh.md").write_text("# 中文\n", "utf-8")  # see MOVED
    (source / "explore").mkdir()
    for name, text in explore_pages([each.name for each in lessons]).items():
        (source / "explore" / name).write_text(text, "utf-8")
    for page in sorted(source.rglob("*.md")):
        copy_linked(page, source, root)


def its_files(folder: Path) -> list[str]:
    """What a lesson's page offers beside its text."""
    return [name for name in OFFERED if (folder / name).exists()]


def pictures_of(folder: Path) -> list[tuple[str, str]]:
    """Title and name of the explorables that belong to a lesson."""
    number = folder.name.removeprefix("lesson")[:2]
    return [(each.title, each.name) for each in EXPLORABLES if each.lesson == number]


def english_note(folder: Path) -> str:
    """What one can take away from a lesson's page, and where else to look."""
    links = " and ".join(f"[{OFFERED[name]}]({name})" for name in its_files(folder))
    note = f"This page is `lessons/{folder.name}/lesson.ipynb` with the outputs of one run;"
    note += f" beside it lie {links}."
    pictures = [f"[{title}](../../explore/{name}.md)" for title, name in pictures_of(folder)]
    if pictures:
        note += f" A picture that answers: {', '.join(pictures)}."
    if po_file(folder.name).exists():
        page = f"../../zh/lessons/{folder.name}/lesson.html"  # of Sphinx's second run
        note += f' In Chinese: <a href="{page}">中文</a>.'
    return note


def with_note(notebook: str, note: str, translate: Translate | None = None) -> str:
    """The notebook, a note at the end of its first cell, imports folded, pictures alive."""
    import nbformat

    named = {each.name: each for each in EXPLORABLES}
    read = nbformat.reads(notebook, as_version=4)
    read.cells[0].source += f"\n\n{note}"
    for cell in read.cells:
        if cell.cell_type == "markdown" and translate is None:  # a translation is of all of it
            cell.source = re.sub(CONTROLS, "", cell.source)
        for name in SHOWN.findall(cell.source) if cell.cell_type == "code" else ():
            html = f"{as_element(named[name], translate)}{script('../..')}"
            cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": html})]
        if "setup" in cell.metadata.get("tags", []):  # imports: for who runs it, not who reads it
            cell.metadata["tags"] = [*cell.metadata["tags"], "hide-input"]
    return nbformat.writes(read, version=4)


def copy_linked(page: Path, source: Path, root: Path) -> None:
    """Copy the files that a page links to from the repository into the same place of the book."""
    for link in LINK.findall(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / link).resolve()
        original = root / target.relative_to(source.resolve())
        if original.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(original, target)


def lay_out_chinese(root: Path, source: Path) -> None:
    """Write the tree of Sphinx's second run: the lessons that have a translation, and it."""
    _begin(source)
    folders = [root / "lessons" / name for name in translated(root)]
    for folder in folders:
        target = source / "lessons" / folder.name
        target.mkdir(parents=True)
        text = with_note(
            (folder / "lesson.ipynb").read_text("utf-8"),
            chinese_note(folder.name, its_files(folder), pictures_of(folder)),
            chinese,
        )
        (target / "lesson.ipynb").write_text(with_blocks(text, folder.name), "utf-8")
        for name in its_files(folder):
            shutil.copy(folder / name, target)
    shutil.copytree(HERE / "locale", source / "locale")
    names = [folder.name for folder in folders]
    pictures = chinese_pictures(names)
    first = chinese_landing((HERE / "zh.md").read_text("utf-8"), names, pictures)
    (source / "index.md").write_text(first, "utf-8")
    (source / "explore").mkdir()
    for name, text in pictures.items():
        (source / "explore" / name).write_text(text, "utf-8")


def build(root: Path, out: Path) -> int:
    """Build the site into `out`/html; return Sphinx's exit status, 0 where nothing was odd."""
    lay_out(root, out / "source")
    lay_out_chinese(root, out / "source_zh")
    html = out / "html"
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    english = ["-d", str(out / "doctrees"), str(out / "source"), str(html)]
    chinese = ["-d", str(out / "doctrees_zh"), str(out / "source_zh"), str(html / "zh")]
    chinese += ["-D", "language=zh_CN", "-D", "extensions=myst_nb,sphinx.ext.mathjax"]
    chinese += ["-D", "mathjax_path=../../_static/mathjax/tex-chtml.js"]  # the English pages' copy
    chinese += ["-D", "nb_code_prompt_show=显示代码", "-D", "nb_code_prompt_hide=隐藏代码"]
    runs = [subprocess.run([*sphinx, *each], check=False) for each in (english, chinese)]
    (html / "zh.html").write_text(MOVED, "utf-8")
    return max(run.returncode for run in runs)


def size_and_pages(html: Path) -> Iterator[tuple[str, Any]]:
    """What was built, in numbers."""
    files = [path for path in html.rglob("*") if path.is_file()]
    yield "pages", sum(path.suffix == ".html" for path in files)
    yield "MB", round(sum(path.stat().st_size for path in files) / 1e6, 1)


def serve(html: Path, port: int) -> None:
    """Serve the site on this machine alone, until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(html))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "there are 0 to 65535"
        raise InputError(f"port {port} cannot be opened ({why}): give another, --port N") from None
    with server:
        print(
            f"the book: http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True
        )
        server.serve_forever()


def main() -> int:
    """Build, say what was built, and serve it where asked."""
    parser = argparse.ArgumentParser(
        prog="run_all.sh book", description="Build the course as a web site."
    )
    parser.add_argument("--serve", action="store_true", help="serve it on this machine")
    parser.add_argument("--port", type=int, default=8000, help="for --serve (8000)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "book", help="runs/book")
    args = parser.parse_args()
    began = time.monotonic()
    status = build(ROOT, args.out)
    if status:
        print(f"run_all.sh book: the pages above have faults (Sphinx: {status})", file=sys.stderr)
        return 1
    html = args.out / "html"
    what = ", ".join(f"{value} {name}" for name, value in size_and_pages(html))
    print(f"{html / 'index.html'}: {what}, {time.monotonic() - began:.0f} s", flush=True)
    if args.serve:
        try:
            serve(html, args.port)
        except InputError as error:
            print(f"run_all.sh book: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
