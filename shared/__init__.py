"""What earlier lessons built and later lessons import."""

import os
import sys
from pathlib import Path


def _refuse_the_script_of_a_different_clone() -> None:
    """End a lesson's script that the environment gives the `shared` of a different clone.

    It would run, or fail far from the cause, with mechanisms that are not beside it. Here, because
    this comes before everything that the script imports of the course.
    """
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    clone, mine = script.parent.parent.parent, Path(__file__).resolve()
    if script.parent.parent.name != "lessons" or not (clone / "shared" / "__init__.py").is_file():
        return
    if clone / "shared" / "__init__.py" != mine:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"error: {script} is run with the environment of {mine.parents[1]}, whose `shared`"
                f" it would import: use that of {clone} (./run_all.sh setup makes it)",
                file=sys.stderr,
            )
        sys.exit(2)


_refuse_the_script_of_a_different_clone()
