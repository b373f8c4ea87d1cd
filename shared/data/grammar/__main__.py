"""Write datasets/grammar_en_de, or compare it with what the grammar makes (--check)."""

import argparse
import sys
from pathlib import Path

from shared.data.grammar.generator import Splits, generate

FOLDER = Path(__file__).resolve().parents[3] / "datasets" / "grammar_en_de"


def contents(splits: Splits) -> dict[str, str]:
    """The text of every file of the corpus, by file name."""
    files = {}
    for name, pairs in zip(Splits._fields, splits, strict=True):
        files[f"{name}.en"] = "".join(f"{pair.src}\n" for pair in pairs)
        files[f"{name}.de"] = "".join(f"{pair.tgt}\n" for pair in pairs)
    return files


def main() -> int:
    """Write or compare the files; the exit status is 1 if a comparison finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m shared.data.grammar", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = parser.parse_args()
    status = 0
    for name, text in contents(generate()).items():
        path = FOLDER / name
        if args.check:
            same = path.is_file() and path.read_bytes() == text.encode()
            print(f"{name}: {'same' if same else 'DIFFERENT'}")
            status |= not same
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            print(f"{name}: {len(text.splitlines())} lines")
    return status


if __name__ == "__main__":
    sys.exit(main())
