"""The book's first page, from the tables that README.md and lessons/README.md have."""

import re
from pathlib import Path

ROW = re.compile(r"^\| \[(?P<title>[^]]+)\]\((?P<link>[^)]+)\) \| (?P<cells>.+) \|$", re.MULTILINE)
PART = re.compile(r"^\| \*\*(?P<part>Part [^*]+)\*\* \|", re.MULTILINE)


def parts(readme: str) -> dict[str, list[tuple[str, str, str]]]:
    """Part to its lessons: title, folder and the number that surprises."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    part = ""
    for line in readme.splitlines():
        if match := PART.match(line):
            part = match["part"]
        elif (match := ROW.match(line)) and part:
            folder = match["link"].split("/")[1]
            found.setdefault(part, []).append(
                (match["title"], folder, match["cells"].split(" | ")[1])
            )
    return found


def long_rows(page: str) -> dict[str, list[str]]:
    """Folder to what is built, proved equal to, and measured."""
    return {m["link"].split("/")[0]: m["cells"].split(" | ") for m in ROW.finditer(page)}


def landing_page(root: Path, lessons: list[str]) -> str:
    """The first page in Markdown: what the course is, then each part with its lessons.

    `lessons` are the folders that have a page; a row of README without one is left out.
    """
    readme = (root / "README.md").read_text(encoding="utf-8")
    more = long_rows((root / "lessons" / "README.md").read_text(encoding="utf-8"))
    intro = readme.split("## Two commands")[0].split("\n", 1)[1]
    intro = intro.replace("](README.zh-CN.md)", "](zh.md)")  # the book has a page of its own
    page = ["# Torch-Handle", intro.strip(), START]
    trees = []
    for part, rows in parts(readme).items():
        page.append(f"## {part}")
        there = [row for row in rows if row[1] in lessons]
        for title, folder, number in there:
            built, proved, measured = more[folder]
            page.append(
                f"**[{title}](lessons/{folder}/lesson.ipynb).** *You build* {built}. *Proved equal"
                f" to* {proved}. *Measured:* {measured}. One number: {number}."
            )
        entries = "\n".join(f"{title} <lessons/{folder}/lesson>" for title, folder, _ in there)
        trees.append(f"```{{toctree}}\n:caption: '{part}'\n:hidden:\n\n{entries}\n```")
    page += [*trees, BESIDE]
    return "\n\n".join(page) + "\n"


START = """\
## Begin

Python 3.11 to 3.13, Linux or macOS; you know Python and have trained a small network. In a clone
of the course:

```bash
./run_all.sh 01      # makes .venv on first use, then runs lesson 01's script
./run_all.sh test    # tests the course; to learn you need not
.venv/bin/jupyter lab  # and there lessons/lesson01_positional_encoding/lesson.ipynb
```

These pages show each notebook with the outputs of one run. The exercises are done in the notebook:
a cell with a signature, a docstring that says what is asked, and a check that names the mistake."""

BESIDE = """\
```{toctree}
:caption: Beside the lessons
:hidden:

explore/index
lessons/README
lessons/first_lines
lessons/copy_from_here
lessons/on_a_gpu
lessons/when_something_does_not_work
lessons/glossary
zh
```"""
