"""Jupyter's own lines in a cell: `%%time`, `!pip install x`, `causal_mask?`."""

import ast
import re
from collections.abc import Callable

# What times or shows things, a command of the system, a question; maybe with a name for what it
# gives. `!= b` and `% n` go on with the line above.
HARMLESS = re.compile(
    r"^([ \t]*)(?:(\w+)[ \t]*=[ \t]*)?"
    r"(%%(?:time|capture|ranks)\b.*|%(?![%\s]).*|!(?!=).*|"
    r"\?{1,2}[\w.]+[ \t]*|[\w.]+\?{1,2}[ \t]*)$",
    re.MULTILINE,
)
MOST = 20  # lines that are looked for one by one
TIMED = re.compile(r"%time[ \t]+(?![-%!])(.+)")  # a statement that does its work


def as_python(
    source: str, parse: Callable[[str], ast.Module] = ast.parse
) -> tuple[str, ast.Module]:
    """A cell as Python, with its tree: Jupyter's own lines commented out, so that the rest stays.

    They change nothing of what a cell defines, but for what %time runs. What they give a name is
    None. Raises what `parse` raises.
    """
    for _ in range(MOST):
        try:
            return source, parse(source)
        except SyntaxError as error:  # of the line that it names alone: another can be of a text
            lines, number = source.split("\n"), error.lineno or 0
            named = "\n".join(lines[number - 1 : number])
            plain = HARMLESS.sub(_without_effect, named)
            if plain == named:
                break
            source = "\n".join((*lines[: number - 1], plain, *lines[number:]))
    source = HARMLESS.sub(_without_effect, source)
    return source, parse(source)


def _without_effect(line: re.Match[str]) -> str:
    indent, name, command = line.groups()
    if timed := TIMED.fullmatch(command):
        return f"{indent}{name + ' = ' if name else ''}{timed[1]}"
    if name:
        return f"{indent}{name} = None  # {command}"
    return f"{indent}pass  # {command}" if indent else f"# {command}"
