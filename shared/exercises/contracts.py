"""What parameters the contracts name, from the references: `python -m shared.exercises.contracts`.

They go to signatures.json. signatures.py, which judges by it, cannot make it: the checks import it.
"""

import ast
import json
import sys

from shared.exercises.answers import read_cells
from shared.exercises.lessons import ROOT, solution_module
from shared.exercises.signatures import TABLE, in_short, signature_of


def table() -> dict[str, dict[str, str]]:
    """Return what signatures.json must hold: of each reference, the methods that its stub has."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(ROOT.glob("lessons/lesson[0-9][0-9]_*/lesson.ipynb")):
        references = solution_module(path.parent.name.removeprefix("lesson")[:2])
        for id, source in read_cells(path).exercises.items():
            (stub,) = (node for node in ast.parse(source).body if "exercise(" in ast.unparse(node))
            answer, methods = getattr(references, stub.name), [""]  # ty: ignore
            if isinstance(stub, ast.ClassDef):
                methods = [node.name for node in stub.body if isinstance(node, ast.FunctionDef)]
            own = {method: signature_of(answer, method) for method in methods}
            found[id] = {
                f"{stub.name}.{method}".rstrip("."): in_short(signature)  # ty: ignore
                for method, signature in own.items()
                if signature is not None
            }
    return found


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
    print(f"{TABLE} is written", file=sys.stderr)
