"""The largest model that one GPU holds, for each of lesson 10's files of DeepSpeed."""

import argparse
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lessons.lesson10_zero.experiments.results import Run
from shared.errors import InputError
from shared.measuring.largest import largest_that_fits, until
from shared.model.language_model import LanguageModel
from shared.ranks.group import LAUNCHER_VARIABLES, Rank, process_group
from shared.results import write_results
from shared.training.language_recipes import Recipe
from shared.training.quiet_deepspeed import import_deepspeed

Build = Callable[[Path, LanguageModel, Recipe, Rank], Run]
WIDE = {"d_model": 2048, "num_heads": 16, "batch": 8}


def search(
    args: argparse.Namespace, rank: Rank, folder: Path, recipe: Recipe, build: Build
) -> None:
    """The most layers of width 2048 that train on one GPU, for each of the lesson's files.

    Raises InputError on a CPU: it swaps or is stopped where a GPU says that it is full.
    """
    if rank.device.type != "cuda" or rank.world_size > 1:
        raise InputError(
            "--search fills the memory of one GPU until it says that it is full; "
            f"here {'are several ranks' if rank.world_size > 1 else 'is none'}, "
            "and a CPU without memory does not say so but stops the process"
        )
    table: list[dict[str, Any]] = []
    for file in sorted(folder.glob("ds_zero*.json")):

        def layers_fit(number: int, file: Path = file) -> None:
            train_alone(build, file, replace(recipe, **WIDE, num_layers=number))

        (layers, full), width = largest_that_fits(layers_fit), WIDE["d_model"]
        size = (12 * width**2 * layers + width * recipe.vocab_size) / 1e9
        row = {"file": file.name, "layers": layers, "billion parameters": size, "full": full}
        table.append(row)
    best = max(table, key=lambda row: row["layers"])
    words = f"{best['billion parameters']:.1f} billion parameters fit with {best['file']}"
    write_results(args, rank, headline=words + until(best["full"]), table=table)


def train_alone(build: Build, file: Path, recipe: Recipe) -> None:
    """Train a model with a file for two steps in a process of its own; raises like that one.

    In one process each try would begin with what is left of those before: of stage 3 DeepSpeed
    keeps all, destroyed or not. A process that was killed has filled the CPU's memory: MemoryError;
    RuntimeError for one that died in another way.
    """
    before = multiprocessing.active_children()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        trying = alone.submit(_train, build, file, recipe)
        (child,) = (each for each in multiprocessing.active_children() if each not in before)
        died = isinstance(trying.exception(), BrokenProcessPool)
    if died and child.exitcode == -signal.SIGKILL:
        raise MemoryError(f"the process that tried {file} was killed")
    if died:
        raise RuntimeError(f"the process that tried {file} ended with code {child.exitcode}")
    trying.result()


def _train(build: Build, file: Path, recipe: Recipe) -> None:
    for name in LAUNCHER_VARIABLES:  # no rank of torchrun's: that one waits
        os.environ.pop(name, None)
    import_deepspeed("cuda")
    with process_group("cuda") as rank:
        with torch.device(rank.device):
            model = LanguageModel(recipe.config(recipe.vocab_size))
        run = build(file, model, recipe, rank)
        tokens = torch.zeros(1, recipe.length, dtype=torch.long, device=rank.device)
        # Two steps: the first makes Adam's states.
        for _ in range(2 * run.deepspeed.gradient_accumulation_steps()):
            logits = run.deepspeed(tokens)
            run.deepspeed.backward(logits.float().mean())
            run.deepspeed.step()
        run.deepspeed.destroy()
