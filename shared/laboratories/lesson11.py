"""Lesson 11: functions that note how they are called, segments read off a log, plans by force."""

import copy
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from shared.exercises.seeds import fresh_generator, fresh_seed, seed_all
from shared.measuring.activations import LayerCost, peak_bytes

ENGINE = torch.utils.checkpoint.__file__


def engine_at_work() -> bool:
    """Whether torch.utils.checkpoint is among the functions that lead to this call."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == ENGINE:
            return True
        frame = frame.f_back
    return False


class Block(nn.Module):
    """Two linear layers with a dropout between them, which notes each of its calls."""

    def __init__(self, rate: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.rate = rate
        self.first, self.second = nn.Linear(6, 14, dtype=dtype), nn.Linear(14, 6, dtype=dtype)
        self.masks: list[Tensor] = []
        self.by_engine = False

    @property
    def calls(self) -> int:
        """How often it has been called."""
        return len(self.masks)

    def forward(self, x: Tensor) -> Tensor:
        """Return second(mask * tanh(first(x))) / (1 - rate)."""
        self.by_engine |= engine_at_work()
        hidden = self.first(x).tanh()
        mask = torch.rand(hidden.shape, dtype=hidden.dtype) >= self.rate
        self.masks.append(mask)
        return self.second(hidden * mask / (1 - self.rate))


def block_and_twin(rate: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[Block, Block]:
    """Two equal blocks with weights of their own."""
    seed_all(fresh_seed())
    block = Block(rate, dtype)
    return block, copy.deepcopy(block)


def batch(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """A leaf of random numbers."""
    made = torch.randn(*shape, generator=fresh_generator(), dtype=torch.float64).to(dtype)
    return made.requires_grad_(grad)


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradient of each parameter, None where there is none."""
    return [p.grad for p in module.parameters()]


class Noting:
    """A function of any arguments that notes what `look` sees at each call."""

    def __init__(self, function: Callable[..., Any], look: Callable[..., Any]) -> None:
        self.function, self.look = function, look
        self.seen: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        """Look, then compute."""
        self.seen.append(self.look(*args))
        return self.function(*args)


def autocast_now(*args: Any) -> tuple[bool, torch.dtype]:
    """Whether autocast is on for the CPU, and its dtype."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def needs_of(*args: Any) -> list[bool | None]:
    """Which arguments need a gradient; None for those that are no tensors."""
    return [x.requires_grad if isinstance(x, Tensor) else None for x in args]


class Chain:
    """Layers whose calls are written into one log, each a linear map, tanh and dropout."""

    def __init__(self, num_layers: int, rate: float = 0.0) -> None:
        seed_all(fresh_seed())
        self.modules = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), nn.Tanh(), nn.Dropout(rate))
            for _ in range(num_layers)
        )
        self.log: list[int] = []
        self.by_engine = False
        self.layers = [self._noting(number) for number in range(num_layers)]

    def _noting(self, number: int) -> Callable[[Tensor], Tensor]:
        def layer(x: Tensor) -> Tensor:
            self.log.append(number)
            self.by_engine |= engine_at_work()
            return self.modules[number](x)

        return layer

    def run(self, x: Tensor) -> Tensor:
        """All layers in turn, plainly."""
        for module in self.modules:
            x = module(x)
        return x

    def passes(self) -> tuple[list[int], list[int]]:
        """The layers called in forward, and those called again in backward, in their order."""
        return self.log[: len(self.layers)], self.log[len(self.layers) :]


def segments_of(again: Sequence[int], num_layers: int) -> list[int]:
    """Sizes of the segments, first to last, from the calls in backward: the last is the rest."""
    sizes: list[int] = []
    for before, number in zip([None, *again], again, strict=False):
        if before is None or number != before + 1:
            sizes.insert(0, 0)
        sizes[0] += 1
    return [*sizes, num_layers - len(again)]


Choice = tuple[bool, ...]


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
        "the fewest layers are recomputed, not the fewest FLOPs": best_of_all(
            costs, budget, lambda _, choice: sum(choice)
        ),
        "the fewest bytes are looked for: within the budget only FLOPs count": best_of_all(
            costs, budget, peak_bytes
        ),
        "too much is recomputed: bytes are added up as if all layers' were alive in one moment, "
        "input and recomputed activations of each": best_of_all(costs, budget, size=all_at_once),
    }


def all_at_once(costs: Sequence[LayerCost], choice: Sequence[bool]) -> int:
    """A bound that is too high: what is held at the end of forward, and the largest layer again."""
    again = [cost.saved for cost, redone in zip(costs, choice, strict=True) if redone]
    return held_bytes(costs, choice) + max(again, default=0)


def random_costs(draw: random.Random, num_layers: int) -> list[LayerCost]:
    """Layers of which no two are alike."""
    return [
        LayerCost(draw.randrange(40, 400), draw.randrange(1, 40), draw.randrange(10, 200))
        for _ in range(num_layers)
    ]


def telling_case(seed: int, num_layers: int) -> tuple[list[LayerCost], int]:
    """Costs and a budget for which every other rule's FLOPs differ from the least, and mostly."""
    draw, found = random.Random(seed), (0, list[LayerCost](), 0)
    for _ in range(400):  # one in sixty tells all rules apart
        costs = random_costs(draw, num_layers)
        least = max(c.saved + sum(d.inputs for d in costs[:i]) for i, c in enumerate(costs))
        budget = least + draw.randrange(sum(c.saved for c in costs) - least) * 2 // 3
        best = best_of_all(costs, budget)
        assert best is not None, "every layer checkpointed fits"
        prices = [flops_of(costs, other) for other in wrong_plans(costs, budget).values() if other]
        different = len({*prices} - {flops_of(costs, best)})
        found = max(found, (different, costs, budget), key=lambda case: case[0])
        if different == len(prices):
            break
    return found[1], found[2]


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
    """Forty layers of three kinds, as large as real ones, for which no greedy choice is right."""
    draw, case = random.Random(seed), (list[LayerCost](), 0)
    for _ in range(60):
        kinds = [
            LayerCost(draw.randrange(200_000, 900_000), 24_576, draw.randrange(20, 90))
            for _ in range(3)
        ]
        costs = draw.choices(kinds, k=40)
        full = sum(cost.saved for cost in costs)
        case = costs, full // 2 + draw.randrange(full // 4)
        least = least_flops(*case)
        if all(flops_of(costs, other) != least for _, other in greedy_plans(*case)):
            break
    return case
