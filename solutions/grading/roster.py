"""Who is in the class: a table with ids and addresses, so that points find their way back."""

import csv
import io
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from shared.errors import InputError
from solutions.grading.intake.submissions import printable
from solutions.grading.texts import decoded

# What Moodle's list of participants and Canvas's gradebook call the columns.
NAMES = {
    **{"student": "name", "full name": "name", "first name": "first", "last name": "last"},
    **{"surname": "last", "id number": "id", "email address": "email", "sis login id": "login"},
}


LINE = " (line "  # behind a name that a roster has twice


class Person(NamedTuple):
    """One of the class; `folder` is what the submission is called, by default the name.

    `login` and `section` are Canvas's: its import wants them back.
    """

    name: str
    id: str = ""
    email: str = ""
    folder: str = ""
    login: str = ""
    section: str = ""


Roster = Mapping[str, Person]  # by what the submission is called


def read_roster(path: Path) -> dict[str, Person]:
    """A CSV file with the column name and, in any order, id, email and folder; others are left.

    Or as Moodle and Canvas export a class; Canvas's row of "Points Possible" is nobody. Of two who
    are called alike, unless Canvas's IDs tell them apart, neither has the name: the line is added.
    Raises InputError, with the line, for a row without a name.
    """
    found = defaultdict[str, list[tuple[int, Person]]](list)
    try:
        text = decoded(path.read_bytes())
        first = text.partition("\n")[0]
        separator = max(",;\t", key=first.count)
        table = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
        given = [each.strip().casefold() for each in next(table, ())]
        heads = [NAMES.get(each, each) for each in given]
        if not {"name", "last"} & {*heads}:
            raise InputError(f"has no column called name, but {', '.join(filter(None, given))!r}")
        gradebook = "sis login id" in given
        for row in table:
            cells = dict[str, str]()
            for head, cell in zip(heads, row, strict=False):
                cells.setdefault(head, cell.strip())
            cells.setdefault("name", f"{cells.get('first', '')} {cells.get('last', '')}".strip())
            gradebook |= (heading := cells["name"] == "Points Possible")
            if heading or not any(map(cells.get, Person._fields)):  # or Canvas's "Manual Posting"
                continue
            kept = Person._fields if gradebook else Person._fields[:4]
            person = Person(**{each: cells.get(each, "") for each in kept})
            called = printable(person.folder or person.name)  # as a submission's name is
            if not person.name:
                raise InputError(f"line {table.line_num}: there is no name")
            if gradebook and any(person.id not in ("", other.id) for _, other in found[called]):
                called = f"{called} {person.id}"
            found[called].append((table.line_num, person))
    except InputError as error:
        raise InputError(f"--roster {path}: {error}") from None
    except (OSError, csv.Error) as error:
        raise InputError(f"--roster {path} cannot be read: {error}") from None
    return {
        called if len(alike) == 1 else f"{called}{LINE}{line})": person
        for called, alike in found.items()
        for line, person in alike
    }


def as_handed_in(roster: Roster, numbers: Mapping[str, str]) -> dict[str, Person]:
    """The roster by what submissions are called: Canvas's files have a user's number, not a name.

    `numbers` says who has which.
    """
    return {
        called if person.folder else numbers.get(person.id, called): person
        for called, person in roster.items()
    }


def differences(roster: Roster, students: Collection[str]) -> list[str]:
    """Who is in the roster and handed in nothing, and the other way round: a line each."""
    missing = [person.name for called, person in roster.items() if called not in students]
    twice = {called.partition(LINE)[0] for called in roster if LINE in called}
    why = ", which has it twice: a column folder says what each one's is called"
    return [f"handed in nothing: {each}" for each in missing] + [
        f"not in the roster{why if each in twice else ''}: {each}"
        for each in students
        if each not in roster
    ]
