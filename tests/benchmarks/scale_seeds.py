"""Lesson 02 from other seeds: gradients with and without scale, the reader four ways, its looks.

python tests/benchmarks/scale_seeds.py     about six minutes on two cores

The reader is the notebook's own: its setup cell and the cells that define it run here.
"""

import math
from pathlib import Path
from typing import Any

import nbformat
import torch

from shared.exercises.mine import put_mine_in_place
from shared.results import format_table
from solutions.lesson02_attention import (
    MultiHeadAttention,
    scaled_dot_product_attention,
    split_heads,
)

KINDS = ("median row of scores", "scores", "queries")
NOTEBOOK = Path(__file__).parents[2] / "lessons" / "lesson02_attention" / "lesson.ipynb"


def gradient_ratios(head_dim: int, seed: int) -> tuple[float, float, float]:
    """Gradient norms without the scale over with it: scores, median row and all; all queries."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(n, head_dim, generator=generator) for n in (512, 64))
    upstream = torch.randn(512, 64, generator=generator)
    norms = []
    for scale in (1.0, head_dim**-0.5):
        leaf = query.clone().requires_grad_()
        scores = leaf @ key.T * scale
        of_scores, of_queries = torch.autograd.grad(
            scores.softmax(dim=-1), (scores, leaf), upstream
        )
        found = of_scores.norm(dim=-1).median(), of_scores.norm(), of_queries.norm()
        norms.append([x.item() for x in found])
    row, scores, queries = (a / b for a, b in zip(*norms, strict=True))
    return row, scores, queries


def reader_cells() -> dict[str, Any]:
    """The names that the notebook's cells about the reader define."""
    own: dict[str, Any] = {
        "MultiHeadAttention": MultiHeadAttention,
        "scaled_dot_product_attention": scaled_dot_product_attention,
        "split_heads": split_heads,
    }
    names = dict(own)
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        setup = "setup" in cell.metadata.get("tags", ())
        if setup or cell.source.startswith(("ANIMALS =", "class Reader")):
            exec(cell.source, names)
        elif cell.source.startswith("def forbid"):  # the function alone, not the table below it
            exec(cell.source.split("\n\n\n")[0], names)
    return names | own


def show_looks(notebook: dict[str, Any]) -> None:
    """Print what readers of 24 seeds reach, and what they lose when "it" may not see a noun."""
    accuracy, unseen, rows = notebook["accuracy"], notebook["unseen"], []
    for seed in range(3, 27):
        one, two = (notebook["train"](seed, depth) for depth in (1, 2))
        reached = accuracy(two, unseen)
        masks = [notebook["forbid"](unseen, which) for which in (2, 3)]
        lost = [reached - accuracy(two, unseen, mask) for mask in masks]
        found = (accuracy(one, unseen), accuracy(two, notebook["seen"]), reached, *lost)
        rows.append([seed, *(round(each, 1) for each in found)])
    names = ("seed", "1 layer, unseen %", "2 layers, seen %", "unseen %")
    names += ("lost without the right noun", "without the other")
    print(format_table([dict(zip(names, row, strict=True)) for row in rows]))


def main() -> None:
    """Print ratios of 24 seeds, the readers of 24 seeds, and the looks of 24 more."""
    torch.set_num_threads(1)
    put_mine_in_place("02", globals(), mine=False)  # in a course without solutions/
    rows = []
    for head_dim in (4, 16, 32, 64, 256, 1024):
        ratios = [gradient_ratios(head_dim, seed) for seed in range(100, 124)]
        row: dict[str, Any] = {"d_k": head_dim}
        for name, values in zip(KINDS, zip(*ratios, strict=True), strict=True):
            row[f"{name}, unscaled / scaled"] = f"{min(values):.2g} to {max(values):.2g}"
        rows.append(row)
    print(format_table(rows))
    notebook = reader_cells()
    root = math.sqrt(32)
    versions = {
        "with the scale": {},
        "without": {"stretch": root},
        "without, w_q starts smaller": {"stretch": root, "start_q": 1 / root},
        "without, w_q's rate smaller": {"stretch": root, "rate_q": 1 / root},
        "both smaller": {"stretch": root, "start_q": 1 / root, "rate_q": 1 / root},
    }
    for name, change in versions.items():
        models = [notebook["train"](seed, 2, **change) for seed in range(10, 34)]
        known = sorted(round(notebook["accuracy"](model, notebook["seen"]), 1) for model in models)
        print(
            f"{name:28} learned 91 % or more: {sum(k >= 91 for k in known)} of {len(known)};",
            *known,
        )
    show_looks(notebook)


if __name__ == "__main__":
    main()
