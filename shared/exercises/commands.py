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
TIMED = re.compile(r"%time[ \t]+(?![-%!])(.+)")  # a statement that does its work


def as_python(
    source: str, parse: Callable[[str], ast.Module] = ast.parse
) -> tuple[str, ast.Module]:
    """A cell as Python, with its tree: Jupyter's own lines commented out, so that the rest stays.

    They change nothing of what a cell defines, but for what %time runs. What they give a name is
    None. Raises what `parse` raises.
    """
    try:
        return source, parse(source)
    except SyntaxError:
        plain = HARMLESS.sub(_without_effect, source)
        if plain == source:
            raise
        return plain, parse(plain)


def _without_effect(line: re.Match[str]) -> str:
    indent, name, command = line.groups()
    if timed := TIMED.fullmatch(command):
        return f"{indent}{name + ' = ' if name else ''}{timed[1]}"
    if name:
        return f"{indent}{name} = None  # {command}"
    return f"{indent}pass  # {command}" if indent else f"# {command}"
