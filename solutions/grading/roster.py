"""Who is in the class: a table with ids and addresses, so that points find their way back."""

import csv
import io
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from shared.errors import InputError
from solutions.grading.intake.submissions import printable
from solutions.grading.texts import decoded

COLUMNS = ("name", "id", "email", "folder")


class Person(NamedTuple):
    """One of the class; `folder` is what the submission is called, by default the name."""

    name: str
    id: str = ""
    email: str = ""
    folder: str = ""


Roster = Mapping[str, Person]  # by what the submission is called


def read_roster(path: Path) -> dict[str, Person]:
    """A CSV file with the column name and, in any order, id, email and folder; others are left.

    Raises InputError, with the line, for a row without a name and for two that are called alike.
    """
    found: dict[str, Person] = {}
    try:
        text = decoded(path.read_bytes())
        first = text.partition("\n")[0]
        separator = max(",;\t", key=first.count)
        table = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
        heads = {(each or "").strip().casefold(): each for each in table.fieldnames or ()}
        if "name" not in heads:
            raise InputError(f"has no column called name, but {', '.join(filter(None, heads))!r}")
        for row in table:
            cells = {each: (row.get(heads.get(each, "")) or "").strip() for each in COLUMNS}
            person = Person(**cells)
            called = printable(person.folder or person.name)  # as a submission's name is
            if not person.name or called in found:
                why = f"{called!r} is there twice" if person.name else "there is no name"
                raise InputError(f"line {table.line_num}: {why}")
            found[called] = person
    except InputError as error:
        raise InputError(f"--roster {path}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--roster {path} cannot be read: {error}") from None
    return found


def differences(roster: Roster, students: Collection[str]) -> list[str]:
    """Who is in the roster and handed in nothing, and the other way round: a line each."""
    missing = [person.name for called, person in roster.items() if called not in students]
    foreign = [each for each in students if each not in roster]
    return [f"handed in nothing: {each}" for each in missing] + [
        f"not in the roster: {each}" for each in foreign
    ]
