"""The lessons that have a Chinese page, translated message by message with gettext.

    .venv/bin/python -m shared.book.chinese lesson10_zero

makes a lesson's .po under `locale/`, or brings it up to date with the notebook, and says what is
left to translate. Sphinx reads the .po when it builds the page. It cannot put back a block of raw
HTML (a folded hint), so `with_blocks` does that when the pages are laid out.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.book.explorables import EXPLORABLES
from shared.book.explore import as_element, asked_above, picture_page, timed
from shared.book.labels import NUMBER, chinese
from shared.errors import InputError

if TYPE_CHECKING:
    from babel.messages import Catalog

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCALE = HERE / "locale" / "zh_CN" / "LC_MESSAGES" / "lessons"
# What a translation must leave as it is, and as often.
KEPT = {
    "code": re.compile(r"`[^`]*`|<code>.*?</code>"),
    "formulas": re.compile(r"\$[^$]*\$"),
    "links": re.compile(r"\]\([^)]*\)"),
    "numbers": NUMBER,
}
HEADER: dict[str, Any] = {
    "header_comment": "# Changed by hand, message by message: see CONTRIBUTING.md.",
    "project": "Torch-Handle",
    "version": "the lessons",
    "last_translator": "the course",
    "language_team": "the course",
    "msgid_bugs_address": "none",
    "fuzzy": False,
}
# What stands before a question in the lesson and is said by its page's title.
LEADS = re.compile(r"^(?:\*\*[^*]*\*\* 在 Jupyter .*?`）。|以及)")
HOW_CHINESE = "选择设置，图和数字随之改变。所有数字都由本课程自己的代码在生成本页时算出。"
KEYS_CHINESE = "左右方向键逐步移动。"
# The page where the Chinese part began, and to which the English side bar leads.
MOVED = """<!doctype html><html lang="zh-CN"><head><meta charset="utf-8"><title>中文导读</title>
<meta http-equiv="refresh" content="0; url=zh/index.html"></head>
<body><a href="zh/index.html">中文导读</a></body></html>
"""
NOT_PROSE = re.compile(r"(`[^`]*`|\$[^$]*\$|[^A-Za-z])*")


def po_file(lesson: str) -> Path:
    """Where a lesson's translation lies, or would."""
    return LOCALE / lesson / "lesson.po"


def translated(root: Path) -> list[str]:
    """The folders of lessons that have a translation, in order."""
    folders = sorted(path.parent.name for path in LOCALE.glob("*/lesson.po"))
    return [name for name in folders if (root / "lessons" / name / "lesson.ipynb").exists()]


def read_po_file(path: Path) -> "Catalog":
    """A .po or .pot as babel's catalogue, which has a message for each id."""
    from babel.messages.pofile import read_po

    with path.open("rb") as file:
        return read_po(file, locale="zh_CN" if path.suffix == ".po" else None)


def messages(notebook: str) -> "Catalog":
    """What Sphinx's gettext finds to translate in a notebook, in order; blocks of HTML too."""
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "source", Path(name) / "out"
        source.mkdir()
        (source / "lesson.ipynb").write_text(notebook, "utf-8")
        command = [sys.executable, "-m", "sphinx", "-q", "-b", "gettext", "-c", str(HERE)]
        for setting in ("root_doc=lesson", "extensions=myst_nb", "gettext_additional_targets=raw"):
            command += ["-D", setting]
        command += [str(source), str(out)]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, outcome.stderr
        return read_po_file(out / "lesson.pot")


def faults(now: "Catalog", catalog: "Catalog") -> Iterator[str]:
    """Where a translation and the messages of `now` part, in a line each."""
    known = {message.id for message in now}
    for message in catalog:
        if message.id not in known:
            yield f"the notebook no longer says: {message.id}"
    for message in now:
        found = catalog.get(message.id) if message.id else None
        if not message.id:
            continue  # the header
        if found is None or not found.string:
            yield f"not translated: {message.id}"
        elif found.fuzzy:
            yield f"marked fuzzy, to be looked at: {message.id}"
        else:
            for what, pattern in KEPT.items():
                said = (str(found.id), str(found.string))
                one, other = (sorted(pattern.findall(text)) for text in said)
                if one != other:
                    yield f"other {what} ({one}, {other}): {message.id}"


def update(lesson: str) -> list[str]:
    """Bring a lesson's .po up to date with its notebook; return what is left to do."""
    from babel.messages import Catalog
    from babel.messages.pofile import write_po

    notebook = ROOT / "lessons" / lesson / "lesson.ipynb"
    if not notebook.exists():
        raise InputError(f"{lesson!r} is no lesson's folder: give one such as lesson10_zero")
    now, path = messages(notebook.read_text("utf-8")), po_file(lesson)
    catalog = read_po_file(path) if path.exists() else Catalog("zh_CN", **HEADER)
    catalog.update(now, update_creation_date=False)
    for message in catalog:
        message.flags.discard("python-format")  # babel's guess, from a percent sign in a sentence
        if message.id and not message.string and NOT_PROSE.fullmatch(str(message.id)):
            message.string = message.id
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        write_po(file, catalog, width=0, no_location=True, ignore_obsolete=True)
    return list(faults(now, catalog))


def with_blocks(notebook: str, lesson: str) -> str:
    """The notebook, its blocks of raw HTML (folded hints) translated."""
    content = json.loads(notebook)
    blocks = [message for message in read_po_file(po_file(lesson)) if message.id[:1] == "<"]
    for cell in content["cells"]:
        for message in blocks:
            if cell["cell_type"] == "markdown" and message.string and not message.fuzzy:
                text = "".join(cell["source"])
                cell["source"] = text.replace(message.id, message.string)
    return json.dumps(content, ensure_ascii=False)


def chinese_note(lesson: str, files: list[str], pictures: list[tuple[str, str]]) -> str:
    """What stands at the end of a Chinese page's first cell: where the rest is."""
    names = {"train.py": "脚本", "checks.py": "检查程序"}
    links = "、".join(f"[{names[file]}]({file})" for file in files)
    shown = "、".join(f"[{chinese(title)}](../../explore/{name}.md)" for title, name in pictures)
    return (
        f"本页是 `lessons/{lesson}/lesson.ipynb` 的中文译文；代码和一次运行的输出保持原样。"
        f"旁边有{links}。"
        + (f"可交互的图：{shown}。" if shown else "")
        + f'<a href="../../../lessons/{lesson}/lesson.html">英文原文</a>，'
        '<a href="../../../lessons/glossary.html">词汇表</a>，'
        "[中文导读](../../index.md)。"
    )


def chinese_question(picture: str, lesson: str) -> str:
    """What the translated lesson asks above its picture, and the folded answer."""
    catalog = read_po_file(po_file(lesson))
    asked = asked_above(picture, lesson).split("\n\n")
    said = (catalog.get(each) for each in asked)
    return LEADS.sub("", "\n\n".join(str(each.string) for each in said if each))


def chinese_pictures(lessons: list[str]) -> dict[str, str]:
    """File name to Markdown: a page for each picture of a lesson that is in Chinese."""
    pages, folders = {}, {name.removeprefix("lesson")[:2]: name for name in lessons}
    for each in EXPLORABLES:
        if lesson := folders.get(each.lesson):
            keys = KEYS_CHINESE if timed(each) else ""
            built = f"实现它的是[第 {each.lesson} 课](../lessons/{lesson}/lesson.ipynb)。"
            pages[f"{each.name}.md"] = picture_page(
                chinese(each.title),
                chinese_question(each.name, lesson),
                as_element(each, chinese),
                f"{HOW_CHINESE}{keys}{built}",
            )
    return pages


def chinese_landing(page: str, lessons: list[str], pictures: Collection[str]) -> str:
    """The first page of the Chinese run: zh.md, its lines joined without a space.

    A lesson's title leads to its Chinese page where there is one, else to the English.
    """
    page = re.sub(r"(?<!\n)\n(?![\n#])", "", page)

    def link(found: re.Match[str]) -> str:
        title, target = found.groups()
        if target.split("/")[1] in lessons:
            return f"[{title}]({target})（全文中文版）"
        return f'<a href="../{target.rpartition(".")[0]}.html">{title}</a>'

    page = re.sub(r"\[([^]]*)\]\((lessons/[^)]*)\)", link, page)
    shown = "\n".join(f"explore/{name[:-3]}" for name in pictures)
    trees = {"已译成中文的课": "\n".join(f"lessons/{each}/lesson" for each in lessons)}
    trees |= {"可交互的图": shown} if pictures else {}
    for caption, entries in trees.items():
        page += f"\n\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{entries}\n```\n"
    return page


def main() -> int:
    """Update the .po of the lessons that are named; 1 where something is left to translate."""
    count = 0
    for lesson in sys.argv[1:] or translated(ROOT):
        try:
            left = update(lesson)
        except InputError as error:
            print(f"shared.book.chinese: {error}", file=sys.stderr)
            return 2
        print(f"{po_file(lesson).relative_to(ROOT)}: {len(left)} left")
        for line in left:
            print(f"  {line}")
        count += len(left)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
