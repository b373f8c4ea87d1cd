"""The course's words: one file of terms, a page of them, and a link at a lesson's first use."""

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
    words: tuple[str, ...]  # how the lessons write it


def read_glossary(path: Path) -> list[Term]:
    """The terms in the order of the alphabet. InputError names an entry that is not whole."""
    terms = []
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        missing = {"says", "lesson", "zh"} - entry.keys()
        if missing:
            raise InputError(f"{path.name}: {name!r} lacks {', '.join(sorted(missing))}")
        words = tuple(entry.get("words", [name]))
        terms.append(Term(name, entry["says"], entry["lesson"], entry["zh"], words))
    return sorted(terms, key=lambda term: term.name.lower())


def anchor(term: Term) -> str:
    """The name by which a page links to a term."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.name.lower()).strip("-")


def glossary_page(terms: list[Term], lessons: list[str]) -> str:
    """The page of all terms, each linked to the lesson that builds it, in English and Chinese."""
    pages = {name.removeprefix("lesson")[:2]: f"lessons/{name}/lesson.ipynb" for name in lessons}
    lines = ["# Glossary", "One sentence each, and the lesson in which the course builds it."]
    for term in terms:
        where = f"[Lesson {term.lesson}]({pages[term.lesson]})."
        lines.append(f"({anchor(term)})=\n**{term.name}** ({term.zh}): {term.says} {where}")
    return "\n\n".join(lines) + "\n"


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
