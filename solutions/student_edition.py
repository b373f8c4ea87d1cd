"""Write the course as a class gets it: without the answers and whatever points to them.

    python -m solutions.student_edition DIR [--no-check] [--try 02,03]

DIR is made, or must be empty. What was written is then tried out in a copy, in an environment that
knows the edition alone: about a minute a lesson. The status is 1 when something is not as it
should be.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.errors import InputError
from solutions.edition.files import ROOT, write_edition
from solutions.edition.proof import prove
from solutions.edition.reading import Finding, lesson_numbers, read_over


def lessons_to_try(text: str, course: Path = ROOT) -> list[str]:
    """The lesson numbers of "02,03", or all for ""; raises InputError for one that is not there."""
    known = lesson_numbers(course)
    numbers = [part.strip().zfill(2) for part in text.split(",")] if text else known
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise InputError(f"no lesson {', '.join(unknown)}; there are {', '.join(known)}")
    return numbers


def show(findings: Iterator[Finding]) -> bool:
    """Print findings as they come; return whether all was as it should be."""
    good = True
    for each in findings:
        good &= not each.problem
        print(f"{'WRONG' if each.problem else 'ok   '}  {each.what}", flush=True)
        print("".join(f"       {line}\n" for line in each.problem.splitlines()), end="")
    return good


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m solutions.student_edition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--no-check", action="store_true", help="write only, try nothing out")
    parser.add_argument("--try", dest="numbers", default="", help="such as 02,03 (all lessons)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when the edition is written and holds, 1 when not, 2 for bad input."""
    args = make_parser().parse_args(arguments)
    try:
        numbers = lessons_to_try(args.numbers)
        count = write_edition(args.folder)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} files written to {args.folder}", flush=True)
    if args.no_check:
        print("not tried out (--no-check)")
        return 0
    good = show(read_over(args.folder, ROOT)) and show(prove(args.folder, ROOT, numbers))
    print("the edition holds" if good else "the edition is not fit to be given to a class")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
