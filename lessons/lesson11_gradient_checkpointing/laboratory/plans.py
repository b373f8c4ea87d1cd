"""Lesson 11: layers and budgets that tell plans apart, the best plan, what other rules choose."""

import itertools
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shared.measuring.activations import LayerCost, peak_bytes

Choice = tuple[bool, ...]
FEWEST = "the fewest layers are recomputed, not the fewest FLOPs"


def flops_of(costs: Sequence[LayerCost], choice: Sequence[bool]) -> int:
    """FLOPs that a choice computes a second time."""
    return sum(cost.flops for cost, again in zip(costs, choice, strict=True) if again)


def held_bytes(costs: Sequence[LayerCost], choice: Sequence[bool]) -> int:
    """Bytes at the end of forward."""
    pairs = zip(costs, choice, strict=True)
    return sum(cost.inputs if again else cost.saved for cost, again in pairs)


def best_of_all(
    costs: Sequence[LayerCost],
    budget: int,
    price: Callable[[Sequence[LayerCost], Choice], int] = flops_of,
    size: Callable[[Sequence[LayerCost], Choice], int] = peak_bytes,
) -> Choice | None:
    """The cheapest of all 2^n choices within the budget; None where there is none."""
    every = itertools.product((False, True), repeat=len(costs))
    fitting = [choice for choice in every if size(costs, choice) <= budget]
    return min(fitting, key=lambda choice: price(costs, choice), default=None)


def greedy(costs: Sequence[LayerCost], budget: int, by: Callable[[LayerCost], float]) -> Choice:
    """Layers in the order of `by`, largest first, until the peak fits."""
    choice = [False] * len(costs)
    for number in sorted(range(len(costs)), key=lambda i: -by(costs[i])):
        if peak_bytes(costs, choice) > budget:
            choice[number] = True
    return tuple(choice)


def freed_bytes(cost: LayerCost) -> int:
    """What checkpointing a layer frees at the end of forward."""
    return cost.saved - cost.inputs


def greedy_plans(costs: Sequence[LayerCost], budget: int) -> list[tuple[str, Choice]]:
    """What a greedy choice would be, after the words for it."""
    rules: dict[str, Callable[[LayerCost], float]] = {
        "the layers that free most": freed_bytes,
        "the layers that free most for a FLOP": lambda cost: freed_bytes(cost) / cost.flops,
        "the cheapest layers": lambda cost: -cost.flops,
    }
    return [
        (f"a greedy choice: {words} come first", greedy(costs, budget, by))
        for words, by in rules.items()
    ]


def wrong_plans(costs: Sequence[LayerCost], budget: int) -> dict[str, Choice | None]:
    """What other rules would choose, by the words for them."""
    return {
        **dict(greedy_plans(costs, budget)),
        "the first layers are checkpointed until it fits, whatever they cost": greedy(
            costs, budget, lambda cost: -costs.index(cost)
        ),
        FEWEST: best_of_all(costs, budget, lambda _, choice: sum(choice)),
        "the fewest bytes are looked for: within the budget only FLOPs count": best_of_all(
            costs, budget, peak_bytes
        ),
        "too much is recomputed: bytes are added up as if input and activations of a layer were "
        "two, but `saved` has the input among it": best_of_all(costs, budget, size=inputs_twice),
    }


def inputs_twice(costs: Sequence[LayerCost], choice: Sequence[bool]) -> int:
    """The peak where a checkpointed layer's input counts beside what it saves."""
    again = zip(costs, choice, strict=True)
    return peak_bytes(
        [replace(cost, saved=cost.saved + redo * cost.inputs) for cost, redo in again], choice
    )


def random_costs(draw: random.Random, num_layers: int) -> list[LayerCost]:
    """Layers of which no two are alike."""
    return [
        LayerCost(draw.randrange(40, 400), draw.randrange(1, 40), draw.randrange(10, 200))
        for _ in range(num_layers)
    ]


# Costs of six layers and a budget for which the plans of all rules above cost different FLOPs.
RULES_DIFFER = (
    (((68, 1, 13), (58, 9, 32), (86, 3, 46), (83, 3, 36), (69, 5, 21), (75, 4, 18)), 228),
    (((83, 8, 47), (98, 7, 54), (47, 4, 5), (92, 12, 39), (68, 6, 30), (79, 6, 20)), 251),
)
# (saved, inputs) of layers whose FLOPs are what they free, and a budget. A greedy choice is not the
# best here, nor is what changing layers for cheaper ones, one at a time, makes of it.
NO_SWAP_HELPS = (
    (((63, 3), (80, 6), (89, 4), (93, 4), (70, 3)), 313),
    (((90, 8), (86, 6), (69, 6), (21, 8), (81, 4), (94, 1)), 349),
    (((70, 4), (68, 9), (22, 5), (56, 4), (29, 6)), 168),
)


def exact_case(seed: int) -> tuple[list[LayerCost], int]:
    """Layers whose FLOPs are nearly what they free, and a budget with no byte to spare."""
    draw = random.Random(seed)
    sizes = [(draw.randrange(40_000, 400_000), draw.randrange(1, 40_000)) for _ in range(9)]
    costs = [LayerCost(saved, inputs, (saved - inputs) // 1000 + 1) for saved, inputs in sizes]
    best = best_of_all(costs, peak_bytes(costs, [draw.random() < 0.5 for _ in costs]))
    assert best is not None, "the choice that the budget is from fits"
    return costs, peak_bytes(costs, best)


def least_flops(costs: Sequence[LayerCost], budget: int) -> int:
    """The fewest FLOPs computed again, for many layers of a few kinds, which hold few sums."""
    states = {0: 0}  # bytes held: FLOPs
    for cost in costs:
        grown: dict[int, int] = {}
        for held, flops in states.items():
            if held + cost.saved <= budget:
                keep, drop = held + cost.saved, held + cost.inputs
                grown[keep] = min(grown.get(keep, flops), flops)
                grown[drop] = min(grown.get(drop, flops + cost.flops), flops + cost.flops)
        states = grown
    return min(states.values())


def kinds_of_layers(seed: int) -> tuple[list[LayerCost], int]:
    """Forty layers of three kinds, as large as real ones: no greedy choice is right, or another."""
    draw, case = random.Random(seed), (list[LayerCost](), 0)
    for _ in range(300):
        kinds = [
            LayerCost(draw.randrange(200_000, 900_000), 24_576, draw.randrange(20, 90))
            for _ in range(3)
        ]
        costs = draw.choices(kinds, k=40)
        full = sum(cost.saved for cost in costs)
        case = costs, full // 2 + draw.randrange(full // 4)
        found = [flops_of(costs, other) for _, other in greedy_plans(*case)]
        if len({*found, least_flops(*case)}) > len(found):
            break
    return case


def in_processor_time(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function in a process of its own, which ends after so much of the processor's time.

    A busy machine makes no difference, and a call that is inside of C is ended as well.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
