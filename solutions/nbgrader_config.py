"""nbgrader's settings for a class that lives on it; README.md beside this file says how.

Copy it into the folder where nbgrader is run. `c` is what nbgrader gives to such a file.
"""

import os
from typing import Any

from nbgrader.preprocessors import (  # ty: ignore[import-not-found]  # not one of the course's pins
    CheckCellMetadata,
    ClearHiddenTests,
    ClearMarkScheme,
    ClearSolutions,
    ComputeChecksums,
    IncludeHeaderFooter,
    LockCells,
    SaveCells,
)

# A check raises only in strict mode; without it nbgrader would give every unsolved cell its points.
os.environ["TORCH_HANDLE_STRICT"] = "1"
# And with this one, set in some shell, every exercise would be the reference.
os.environ.pop("TORCH_HANDLE_IMPLEMENTATION", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")


class ClearMarkedSolutions(ClearSolutions):
    """Clears what stands between BEGIN SOLUTION and END SOLUTION; other exercise cells are stubs.

    nbgrader's own would replace a cell without markers as a whole: signature, contract and all.
    """

    def preprocess_cell(self, cell: Any, resources: Any, cell_index: int) -> tuple[Any, Any]:
        """Raises RuntimeError for an exercise that is solved and not marked: it would get out."""
        source = cell.source
        cell, resources = super().preprocess_cell(cell, resources, cell_index)
        if self.begin_solution_delimeter not in source:
            if "@exercise" in source and "raise NotImplementedError" not in source:
                raise RuntimeError(f"an answer not marked BEGIN SOLUTION would get out:\n{source}")
            cell.source = source
        return cell, resources


c = get_config()  # ty: ignore[unresolved-reference]
c.ClearSolutions.code_stub = {"python": "raise NotImplementedError"}
# As nbgrader has them, but for ClearOutput: the stored outputs are part of the page.
c.GenerateAssignment.preprocessors = [
    IncludeHeaderFooter,
    LockCells,
    ClearMarkedSolutions,
    CheckCellMetadata,
    ComputeChecksums,
    SaveCells,
    ClearHiddenTests,
    ClearMarkScheme,
    ComputeChecksums,
    CheckCellMetadata,
]
c.Execute.timeout = 280  # seconds a cell; a notebook takes half a minute
