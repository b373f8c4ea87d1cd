"""The course's words: one file of terms, a page of them, and a link at a lesson's first use.

    python -m shared.book.glossary

writes lessons/glossary.md from glossary.toml; a test holds the one to the other.
"""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from shared.errors import InputError


@dataclass(frozen=True)
class Term:
    """A word of the field: what it means, in one sentence, and where the course builds it."""

    name: str
    says: str
    lesson: str  # its two digits
    zh: str  # as Chinese engineers write it
    words: tuple[str, ...]  # what in the other lessons' text links to it
    section: str = ""  # the heading in its lesson under which it is used or explained
    also: tuple[str, ...] = ()  # words that lead to it
    tools: tuple[tuple[str, str], ...] = ()  # tool, and what it calls it


def read_glossary(path: Path) -> list[Term]:
    """The terms in the order of the alphabet. InputError names an entry that is not whole."""
    terms = []
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        missing = {"says", "lesson", "section", "zh"} - entry.keys()
        if missing:
            raise InputError(f"{path.name}: {name!r} lacks {', '.join(sorted(missing))}")
        words, also = (tuple(entry.get(key, [])) for key in ("words", "also"))
        given = (entry[key] for key in ("says", "lesson", "zh"))
        tools = tuple(entry.get("tools", {}).items())
        terms.append(Term(name, *given, words, entry["section"], also, tools))
    return sorted(terms, key=lambda term: term.name.lower())


HEAD = """\
# Glossary

The field's words, one sentence each, the words by which people look for it (not all of them mean
the same), and the lesson and section in which the course uses, builds or measures it."""


def anchor(term: Term) -> str:
    """The name by which a page links to a term."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.name.lower()).strip("-")


def glossary_page(terms: list[Term], lessons: list[str], *, in_book: bool = False) -> str:
    """The page of all terms, each linked to the lesson that builds it, in English and Chinese.

    In the book each has an anchor, to which the lessons' pages link, and its words are entries of
    the index, which the book's search shows before the pages that only have the word.
    """
    pages = {name.removeprefix("lesson")[:2]: f"{name}/lesson.ipynb" for name in lessons}
    lines = [HEAD]
    for term in terms:
        where = f"[Lesson {term.lesson}]({pages[term.lesson]})"
        also = (
            f" Look here for: {', '.join(f'`{word}`' for word in term.also)}." if term.also else ""
        )
        also += "".join(f" {tool}: `{called}`." for tool, called in term.tools)
        mark = f"{_entries(term)}({anchor(term)})=\n" if in_book else ""
        section = term.section.replace("_", r"\_")
        lines.append(f"{mark}**{term.name}** ({term.zh}): {term.says}{also} {where}, *{section}*.")
    return "\n\n".join(lines) + "\n"


def _entries(term: Term) -> str:
    """A term's words for Sphinx's index, each a main entry (the "!"): others come last."""
    called = [name for _, names in term.tools for name in names.split(", ")]
    words = {word.lower(): word for word in (*called, *term.also, term.name)}
    return "".join(f"```{{index}} ! single: {word}\n```\n\n" for word in words.values())


def link_first_uses(notebook: str, folder: str, terms: list[Term]) -> str:
    """A notebook whose first use of each term in running text links to the glossary.

    Headings, tables, code, mathematics, links and the lesson that builds the term stay as they are.
    """
    content = json.loads(notebook)
    open_terms = [term for term in terms if term.lesson != folder.removeprefix("lesson")[:2]]
    for cell in content["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        lines = "".join(cell["source"]).split("\n")
        for number, line in enumerate(lines):
            if re.match(r"\s*(#|\||<|\$\$|```|>)", line) or "$$" in line:
                continue
            for term in list(open_terms):
                linked = _link(line, term)
                if linked != line:
                    line = lines[number] = linked
                    open_terms.remove(term)
        cell["source"] = "\n".join(lines)
    return json.dumps(content, ensure_ascii=False)


# What is not running text: code, mathematics, links, emphasis of a claim in quotes, tags.
APART = re.compile(r"(`[^`]*`|\$[^$]*\$|\[[^]]*\]\([^)]*\)|\*\*[^*]*\*\*|<[^>]*>|\"[^\"]*\")")


def _link(line: str, term: Term) -> str:
    pieces = APART.split(line)
    for place in range(0, len(pieces), 2):
        for word in term.words:
            found = re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", pieces[place])
            if found:
                link = f"[{found.group()}](#{anchor(term)})"
                pieces[place] = pieces[place][: found.start()] + link + pieces[place][found.end() :]
                return "".join(pieces)
    return line


if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[2] / "lessons"
    names = sorted(path.parent.name for path in folder.glob("lesson*/lesson.ipynb"))
    own_terms = read_glossary(Path(__file__).with_name("glossary.toml"))
    (folder / "glossary.md").write_text(glossary_page(own_terms, names), encoding="utf-8")
