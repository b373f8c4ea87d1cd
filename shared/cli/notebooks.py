"""Rebuild notebooks: run in solution mode, normalise, store the outputs of this one execution.

python -m shared.cli.notebooks [NN ...] [--mode solution|reading] [--no-write] [--no-run]

A notebook whose run fails stays as it was, and the next one follows.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode, from_dict

from shared.cli.command import ROOT, UsageError, all_lessons, find_lesson
from shared.exercises.answers import CHECK, EXERCISE
from shared.exercises.cells import COURSE_ID, METADATA
from shared.exercises.lessons import load_checks

EXECUTED = "executed"  # in a notebook's metadata: the digests of what ran as a whole
# The last: DeadKernelError, and jupyter_client's of a kernel that dies before its first reply.
FAILURES = (CellExecutionError, CellTimeoutError, RuntimeError)


def execute(notebook: NotebookNode, folder: Path, mode: str, timeout: int = 300) -> NotebookNode:
    """Run all cells in a fresh kernel whose working folder is the lesson's; return the notebook.

    Outputs are stored in place. `mode` is "solution", "reading" or "strict". Raises
    CellExecutionError at the first cell that raises. The course's variables in this process's
    environment do not count.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_HANDLE_")}
    environment["TORCH_HANDLE_STRICT"] = "1" if mode == "strict" else "0"
    environment.setdefault("OMP_NUM_THREADS", "1")
    if mode == "solution":
        environment["TORCH_HANDLE_IMPLEMENTATION"] = "solution"
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    client.execute(env=environment)
    return notebook


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Drop what differs from run to run, and return the notebook; idempotent.

    Cell ids come from the first text of the cell and stay, so that a diff shows what changed. So do
    the digests of the execution, which are made by `rebuild` alone.
    """
    executed = {k: v for k, v in notebook.metadata.items() if k == EXECUTED}
    notebook.metadata = from_dict({**METADATA, **executed})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: set[str] = set()
    for count, cell in enumerate(notebook.cells):
        cell.id = _cell_id(cell, seen)
        seen.add(cell.id)
        cell.metadata = _cell_metadata(cell)
        cell.source = cell.source.rstrip("\n")
        if cell.cell_type == "code":
            cell.outputs = [_output(output) for output in _merged(cell.outputs)]
            if cell.execution_count is not None:
                before = [c for c in notebook.cells[:count] if c.cell_type == "code"]
                cell.execution_count = len(before) + 1
                for output in cell.outputs:
                    if "execution_count" in output:
                        output.execution_count = cell.execution_count
    return notebook


def _cell_id(cell: NotebookNode, seen: set[str]) -> str:
    id = cell.get("id", "")
    if COURSE_ID.match(id) and id not in seen:
        return id
    digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
    id, count = f"c-{digest}", 1
    while id in seen:
        id, count = f"c-{digest}-{count}", count + 1
    return id


def _cell_metadata(cell: NotebookNode) -> NotebookNode:
    metadata = NotebookNode()
    tags = sorted(cell.metadata.get("tags", []))
    if tags:
        metadata.tags = tags
    if "setup" in tags:  # imports: for who runs them, not who reads
        metadata.jupyter = {"source_hidden": True}
    if cell.cell_type == "code":
        nbgrader = _nbgrader(cell.source)
        if nbgrader:
            metadata.nbgrader = nbgrader
    return metadata


def _nbgrader(source: str) -> dict[str, Any] | None:
    """Return nbgrader's metadata (its documentation, "Format changes": schema version 3)."""
    exercise, check = EXERCISE.search(source), CHECK.search(source)
    found = exercise or check
    if found is None:
        return None
    id = found.group(1)
    common = {"schema_version": 3, "task": False, "cell_type": "code"}
    if exercise:
        mine = {"grade_id": f"exercise-{id}", "solution": True, "grade": False, "locked": False}
    else:
        points = load_checks(id[:2])[id].difficulty
        mine = {"grade_id": f"check-{id}", "solution": False, "grade": True, "locked": True}
        mine["points"] = points
    mine["grade_id"] = mine["grade_id"].replace(".", "-")
    return dict(sorted({**common, **mine}.items()))


def _merged(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring pieces of one stream: where a kernel cuts them depends on timing."""
    merged: list[NotebookNode] = []
    for output in outputs:
        stream = output.output_type == "stream" and merged and merged[-1].output_type == "stream"
        if stream and merged[-1].name == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _output(output: NotebookNode) -> NotebookNode:
    output.pop("transient", None)
    if "metadata" in output:
        output.metadata = NotebookNode()
    return output


def digests(notebook: NotebookNode) -> dict[str, str]:
    """Digests of a normalised notebook's code and of its outputs.

    A learner's answers and cells do not count: outputs of solution mode do not come from them.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ours = [cell for cell in code if COURSE_ID.match(cell.id)]
    sources = [cell.source for cell in ours if not EXERCISE.search(cell.source)]
    whole = {"sources": sources, "outputs": [cell.outputs for cell in ours]}
    texts = {name: json.dumps(part, sort_keys=True) for name, part in whole.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def rebuild(path: Path, mode: str, *, run: bool, write: bool) -> float:
    """Run one notebook and store it, unless told not to; return the seconds it took."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    if run:
        execute(notebook, path.parent, mode)
    seconds = time.perf_counter() - start
    if write:
        normalise(notebook)
        if run:
            notebook.metadata[EXECUTED] = digests(notebook)
        text = nbformat.writes(notebook, version=4)
        aside = path.with_suffix(".part")
        aside.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
        aside.replace(path)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Rebuild the notebooks that are named; return 1 when one could not be run, else 0."""
    parser = argparse.ArgumentParser(prog="run_all.sh notebooks", description=__doc__)
    parser.add_argument("lessons", nargs="*", metavar="NN", help="lesson numbers (all)")
    parser.add_argument("--mode", choices=("solution", "reading", "strict"), default="solution")
    parser.add_argument("--no-write", action="store_true", help="run only, leave the file alone")
    parser.add_argument("--no-run", action="store_true", help="normalise alone: outputs stay")
    args = parser.parse_args(arguments)
    if args.mode != "solution" and not args.no_write:
        parser.error("only outputs of solution mode are stored: add --no-write")
    try:
        lessons = [find_lesson(name) for name in args.lessons] or all_lessons()
    except UsageError as error:
        parser.error(str(error))
    failed = []
    for path in (ROOT / "lessons" / lesson / "lesson.ipynb" for lesson in lessons):
        try:
            seconds = rebuild(path, args.mode, run=not args.no_run, write=not args.no_write)
        except FAILURES as error:
            failed.append(path.parent.name)
            print(f"{path.parent.name}: failed, and left as it was\n{error}", flush=True)
        else:
            size = path.stat().st_size / 1024
            print(f"{path.parent.name}: {seconds:.0f} s, {size:.0f} KiB", flush=True)
    if failed:
        print(f"{len(failed)} of {len(lessons)} failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
