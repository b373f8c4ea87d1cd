"""Pictures that answer: every state of each is made here, by what the lessons built.

An explorable has controls, and for each choice of them a state: frames (a grid of cells, seen one
after the other), panels of bars, numbers and a sentence. The page holds all states;
`explorable.js` shows the chosen one and computes nothing. States come by arithmetic (`planned`),
message by message (`moved`), or from a run on forked ranks, made when the book is built
(`recorded`).
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.book.clock import LINKS
from shared.book.guesses import GUESSES
from shared.book.labels import VIEWER, Translate, translated_guess, translated_state
from shared.book.moved import COLLECTIVES, WAYS, collective, ring
from shared.book.nodes import mesh
from shared.book.offloading import offload
from shared.book.planned import KEPT, State, one_gpu, pale, zero
from shared.book.recorded import ddp_step, tensor_parallel_step
from shared.book.recorded_accelerate import accelerate_step
from shared.book.recorded_fsdp import fsdp_step
from shared.book.recorded_pipeline import pipeline_picture
from shared.book.strategies import strategies
from shared.plots import VARIANTS

ONCE = ("groups", "links", "legend", "lanes", "fills", "places", "shapes")
PALE = [pale(colour) for colour in VARIANTS]


@dataclass(frozen=True)
class Explorable:
    """One picture: its name, the lesson it belongs to, what can be chosen, and how it answers."""

    name: str
    title: str
    controls: Mapping[str, Sequence[Any]]
    state: Callable[..., State]
    first: tuple[Any, ...] = ()  # what is chosen at first, a value a control; else the first ones
    lesson: str = field(kw_only=True)  # two digits; an edition of an earlier week leaves it out

    @functools.cached_property
    def states(self) -> dict[str, State]:
        """Every choice of the controls, "a|b|c", and its state."""
        choices = itertools.product(*self.controls.values())
        return {"|".join(map(str, each)): self.state(*each) for each in choices}

    @property
    def first_choice(self) -> tuple[Any, ...]:
        """What is chosen when the page opens."""
        return self.first or tuple(values[0] for values in self.controls.values())

    def as_json(self, translate: Translate | None = None) -> str:
        """What the page carries, its words translated."""
        controls = {name: list(map(str, values)) for name, values in self.controls.items()}
        shown, guess = self.states, GUESSES[self.name].as_data(self.states)
        if translate:
            shown = {each: translated_state(state, translate) for each, state in shown.items()}
            guess = translated_guess(guess, translate)
        numbered = _Numbered(shown.values())
        states = {choice: numbered.state(state) for choice, state in shown.items()}
        first = list(map(str, self.first_choice))
        content: dict[str, Any] = {"name": self.name, "controls": controls, "first": first}
        content |= {"states": states, "cells": [list(cell) for cell in numbered.cells]}
        content |= {"once": list(map(json.loads, numbered.once)), "named": ONCE}
        content |= {"palette": VARIANTS, "pale": PALE}
        content["guess"] = guess
        if translate:
            named = itertools.chain(controls, *controls.values())
            content["words"] = VIEWER | {text: translate(text) for text in named}
        return _packed(content)


class _Numbered:
    """States whose cells and longer parts stand once in a list; elsewhere is their place."""

    def __init__(self, states: Iterable[State]) -> None:
        rows = itertools.chain(
            *(f for s in states if "groups" not in s for f in s.get("frames", ()))
        )
        counted = Counter((str(text), colour) for row in rows for text, colour in row)
        self.cells = {cell: place for place, (cell, _) in enumerate(counted.most_common())}
        self.once: dict[str, int] = {}

    def state(self, state: State) -> State:
        state = dict(state)
        if "groups" in state:  # a still's cells are made of them
            del state["frames"]
            state["groups"] = "|".join(",".join(map(str, ranks)) for ranks in state["groups"])
        if "grid" in state:  # a text has no comma
            state["grid"] = [",".join(row) for row in state["grid"]]
        if isinstance(state["says"], list):
            state["says"] = [self._once(says) for says in state["says"]]
        if "lanes" in state:
            bars = [(*bar, self._cell(cell)) for *bar, cell in state["lanes"]["bars"]]
            state["lanes"] = state["lanes"] | {"bars": bars}
        if "frames" in state:
            frames = [
                [[self._cell(cell) for cell in row] for row in frame] for frame in state["frames"]
            ]
            state["frames"] = frames
            if len({tuple(map(len, frame)) for frame in frames}) == 1:
                changes = [_changed(*pair) for pair in itertools.pairwise(frames)]
                state["frames"] = [frames[0], *changes]
        return state | {key: self._once(state[key]) for key in ONCE if key in state}

    def _cell(self, cell: Sequence[str]) -> int:
        return self.cells.setdefault((str(cell[0]), cell[1]), len(self.cells))

    def _once(self, part: Any) -> int:
        return self.once.setdefault(_packed(part), len(self.once))


def _packed(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _changed(before: list[list[int]], now: list[list[int]]) -> list[int]:
    """The places of a frame that changed, each with its cell."""
    old, new = (itertools.chain(*frame) for frame in (before, now))
    pairs = enumerate(zip(old, new, strict=True))
    return [number for place, (was, cell) in pairs if was != cell for number in (place, cell)]


EXPLORABLES = (
    Explorable(
        "one_gpu",
        "Why one GPU is not enough",
        {
            "model": ("gpt2", "8b", "70b", "405b"),
            "precision": ("mixed", "float32"),
            "sequences": (1, 4, 16),
            "kept for backward": tuple(KEPT),
        },
        one_gpu,
        ("8b", "mixed", 4, "all activations"),
        lesson="09",
    ),
    Explorable(
        "ring",
        "An all-reduce around a ring",
        {"ranks": (2, 3, 4, 5, 6, 8)},
        ring,
        (4,),
        lesson="05",
    ),
    Explorable(
        "collectives",
        "All collectives, in three ways",
        {"operation": COLLECTIVES, "way": WAYS, "ranks": (2, 4, 8)},
        collective,
        ("all_reduce", "tree", 4),
        lesson="05",
    ),
    Explorable(
        "zero_stages",
        "ZeRO's stages",
        {
            "ranks": (1, 2, 4, 8, 16, 64),
            "billions of parameters": (0.1, 1, 7, 13, 70),
        },
        zero,
        (8, 7),
        lesson="10",
    ),
    Explorable(
        "pipeline",
        "Pipeline schedules",
        {
            "schedule": ("GPipe", "1F1B", "interleaved, v = 2"),
            "ranks": (2, 3, 4, 8),
            "micro-batches": (1, 2, 4, 8, 16),
            "shown": ("planned", "as it ran"),
        },
        pipeline_picture,
        ("1F1B", 4, 8, "planned"),
        lesson="15",
    ),
    Explorable(
        "mesh",
        "The mesh of three dimensions",
        {
            "dp": (1, 2, 4, 8),
            "tp": (1, 2, 4, 8),
            "pp": (1, 2, 4),
            "GPUs a node": (4, 8),
            "groups along": ("dp", "tp", "pp"),
        },
        mesh,
        (2, 4, 2, 8, "pp"),
        lesson="16",
    ),
    Explorable(
        "strategies",
        "The strategies compared",
        {
            "model": ("gpt2", "8b", "70b"),
            "GPU": ("a100", "h100"),
            "GPUs": (8, 16, 64),
            "kept for backward": tuple(KEPT),
        },
        strategies,
        ("8b", "h100", 16, "inputs of layers"),
        lesson="16",
    ),
    Explorable(
        "ddp_step",
        "A step under DDP",
        {
            "ranks": (2, 4),
            "layers": (4, 6, 8),
            "bucket, KiB": (4, 8, 16, 1024),
            "link": tuple(LINKS),
        },
        ddp_step,
        lesson="06",
    ),
    Explorable(
        "fsdp_step",
        "FSDP: who has which unit, and when",
        {
            "ranks": (2, 4),
            "units": (2, 4),
            "after forward": ("freed", "kept"),
            "fetched ahead": ("no", "yes"),
            "link": tuple(LINKS),
        },
        fsdp_step,
        lesson="13",
    ),
    Explorable(
        "tensor_parallel",
        "Tensor parallelism: columns, then rows",
        {"ranks": (2, 4), "tokens": (4, 64, 1024), "d_model": (8, 32, 128)},
        tensor_parallel_step,
        lesson="14",
    ),
    Explorable(
        "offload",
        "Offloading's flow",
        {
            "in host memory": ("all on the GPU", "optimizer", "all states"),
            "ranks": (1, 2, 4, 8),
            "billions of parameters": (1, 7, 13, 70),
            "bus, GB/s": (16, 64),
        },
        offload,
        ("optimizer", 4, 7, 16),
        lesson="10",
    ),
    Explorable(
        "accelerate",
        "What Accelerate does, step by step",
        {"ranks": (2, 3), "split_batches": ("no", "yes"), "accumulation": (1, 2)},
        accelerate_step,
        lesson="22",
    ),
)
