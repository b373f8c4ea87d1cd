"""What a picture asks its reader to guess before it shows the answer.

Each guess is about a choice that the picture does not begin with; its answer is read from the state
of that choice, as the page shows it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.book.planned import State, short

Answer = float | Mapping[str, float]  # a number, or the options by number: the largest is right


@dataclass(frozen=True)
class Guess:
    """A question, the choice that answers it, and how the answer stands in its state."""

    asks: str
    choice: tuple[Any, ...]
    answer: Callable[[State], Answer]
    unit: str = ""

    def as_data(self, states: Mapping[str, State]) -> dict[str, Any]:
        """What the page carries."""
        answer = self.answer(states["|".join(map(str, self.choice))])
        data = {"asks": self.asks, "unit": self.unit, "choice": list(map(str, self.choice))}
        if isinstance(answer, Mapping):
            return {**data, "options": answer, "is": max(answer, key=lambda each: answer[each])}
        return {**data, "is": float(short(answer).replace(",", ""))}


def _number(name: str) -> Callable[[State], float]:
    """The number of a state whose name begins so; of several in it the first."""

    def read(state: State) -> float:
        text = next(str(v) for key, v in state["numbers"].items() if key.startswith(name))
        return float(re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))[0])

    return read


def _bar(panel: int, row: int) -> Callable[[State], float]:
    """The length of a bar."""
    return lambda state: sum(state["panels"][panel]["rows"][row][1])


def _parts(state: State) -> dict[str, float]:
    """The only bar's parts by name."""
    (panel,) = state["panels"]
    ((_, sizes),) = panel["rows"]
    return {kind: size for (kind, _), size in zip(panel["kinds"], sizes, strict=True)}


GUESSES = {
    "one_gpu": Guess(
        "Guess: what is the largest part of the 8B with one sequence in place of four?",
        ("8b", "mixed", 1, "all activations"),
        _parts,
        "GB",
    ),
    "ring": Guess(
        "Guess: with eight ranks, how many tensors has a rank sent at the end?",
        (8,),
        _number("each rank sends"),
    ),
    "collectives": Guess(
        "Guess: a tree's all-reduce among 8 ranks, in rounds (the ring's takes 14)?",
        ("all_reduce", "tree", 8),
        _number("tree"),
    ),
    "zero_stages": Guess(
        "Guess: what does stage 1 keep of a 7B on each of 64 ranks, in place of 8?",
        (64, 7),
        _bar(0, 1),
        "GB",
    ),
    "pipeline": Guess(
        "Guess: with 16 micro-batches in place of 8, what share of the step is waited?",
        ("1F1B", 4, 16, "planned"),
        _number("waiting, counted"),
        "%",
    ),
    "mesh": Guess(
        "Guess: with tp 8 in place of 4, how many of the 16 groups along dp reach across nodes?",
        (2, 8, 2, 8, "dp"),
        lambda state: float(re.findall(r"(\d+) of them reach", state["says"])[0]),
    ),
    "strategies": Guess(
        "Guess: the 70B on 64 H100s, everything kept for backward: how many of the 8 ways fit?",
        ("70b", "h100", 64, "all activations"),
        _number("ways that fit"),
    ),
    "ddp_step": Guess(
        "Guess: 8 layers of 4 KiB, buckets of 16 KiB: how many gradients are there when the first"
        " bucket leaves?",
        (2, 8, 16, "fast"),
        _number("gradients that are there"),
    ),
    "fsdp_step": Guess(
        "Guess: four units, the next one fetched ahead: how many are whole at once, at most?",
        (2, 4, "freed", "yes", "fast"),
        _number("units whole"),
    ),
    "tensor_parallel": Guess(
        "Guess: 64 tokens in place of 4, d_model 8: what does a rank send?",
        (2, 64, 8),
        _number("a rank sends"),
        "KiB",
    ),
    "offload": Guess(
        "Guess: all states in host memory: what comes up over the bus for each of 4 GPUs in a"
        " step?",
        ("all states", 4, 7, 16),
        _number("over the bus"),
        "GB",
    ),
    "accelerate": Guess(
        "Guess: on three ranks, by how many steps does one schedule.step() move the schedule?",
        (3, "no", 1),
        _number("steps of the schedule"),
    ),
}
