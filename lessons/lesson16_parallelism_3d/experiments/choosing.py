"""Lesson 16's script: sizes of the model, and the mesh that is chosen where flags leave it open."""

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace

from shared.errors import InputError
from shared.parallel3d.engine import Parallel3D
from shared.planner.peak import CUT_LOGITS
from shared.planner.specs import Plan
from shared.tensor_parallel.vocabulary import padded_vocabulary
from shared.training.language_recipes import Recipe

AXES = ("dp", "tp", "pp")
# 12 heads, six layers or more, and rows that 1 to 6 and 8 replicas share evenly.
RECIPES = {
    "tiny": Recipe(48, 6, 12, 400, 16, 120, 5, 60_000),
    "small": Recipe(96, 6, 12, 2000, 24, 120, 40, 1_000_000),
    "large": Recipe(768, 12, 12, 16_384, 1024, 120, 500, 50_000_000),
}


def choose_plan(args: argparse.Namespace, recipe: Recipe, world_size: int) -> Plan:
    """The mesh and the micro-batches of the flags; what they leave open is chosen.

    Ranks that are left over go to the axes that are -1, a prime factor at a time, to tp, pp and dp
    in turn where the model allows it. Raises InputError for what no schedule fits.
    """
    sizes = {axis: getattr(args, axis) for axis in AXES}
    chunks = 2 if args.schedule == "interleaved" else 1
    free = [axis for axis in ("tp", "pp", "dp") if sizes[axis] == -1]
    sizes |= dict.fromkeys(free, 1)
    left, rest = divmod(world_size, math.prod(sizes.values()))

    def fits(axis: str, size: int) -> bool:
        if axis == "tp":
            return recipe.num_heads % size == 0
        return axis == "dp" or size * chunks <= recipe.num_layers

    for turn, prime in enumerate(_primes(left) if free and not rest else ()):
        order = free[turn % len(free) :] + free[: turn % len(free)]
        axis = next((x for x in order if fits(x, sizes[x] * prime)), order[0])
        sizes[axis] *= prime
    most = recipe.batch // sizes["dp"]
    if args.micro_batches and args.micro_batches > most > 0:
        raise InputError(
            f"--micro-batches {args.micro_batches}: a copy has {most} of the {recipe.batch} rows "
            f"of a step, take {most} at most"
        )
    count = args.micro_batches or _micro_batches(most, sizes["pp"])
    return Plan(
        **sizes,
        chunks=chunks if sizes["pp"] > 1 else 1,
        micro_batch=math.ceil(recipe.batch / (sizes["dp"] * count)),
        num_micro_batches=count,
        zero=args.zero,
        checkpoint="full" if args.checkpointing else "none",
        precision="float32",
    )


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on a rank: see `check_room`."""
    plan = choose_plan(args, recipe, ranks)
    return recipe.most_bytes(plan, half, padded_vocabulary(recipe.vocab_size), CUT_LOGITS[half])


def idle_flags(args: argparse.Namespace, plan: Plan) -> list[str]:
    """What was asked for and does nothing on this mesh, in words."""
    words = []
    if plan.zero and plan.dp == 1:
        words.append(f"--zero {plan.zero} shares nothing out on dp 1: ZeRO needs copies")
    if args.schedule != "1f1b" and plan.pp == 1:
        words.append(f"--schedule {args.schedule} orders nothing on pp 1: there is one stage")
    return words


def _primes(number: int) -> Iterable[int]:
    prime = 2
    while number > 1:
        while number % prime == 0:
            yield prime
            number //= prime
        prime += 1


def _micro_batches(num_rows: int, pp: int) -> int:
    """Two or more for each stage, all of as many rows where that can be; 1 without a pipeline."""
    if pp == 1:
        return 1
    counts = range(2 * pp, num_rows + 1, pp)
    return next((count for count in counts if num_rows % count == 0), 2 * pp)


def as_cut(plan: Plan, engine: Parallel3D, num_layers: int) -> Plan:
    """The plan with the engine's own cut: how many layers each stage has."""
    layers = range(1, num_layers + 1)  # the parts between embedding and head
    return replace(plan, cut=tuple(sum(i in layers for i in cut) for cut in engine.cuts))
