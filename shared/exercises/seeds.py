"""Random numbers for checks: fresh in every run, repeatable when a seed is given."""

import contextlib
import os
import random
import sys
from collections.abc import Generator

import torch

from shared.ranks.group import current_rank

# Of the check that runs: its first seed and those that follow from it; those of seed_all.
_drawn: list[int] = []
_chosen: set[int] = set()
# Where torch's generator stands when a check begins: no answer sets it, so that setting is seen.
_UNUSUAL = 1_618_033_988


def forget_seeds() -> None:
    """Begin a new check: its first seed is drawn anew."""
    _drawn.clear()
    _chosen.clear()


def first_seed() -> int | None:
    """The seed from which all of this check's follow; None where it has drawn none."""
    return _drawn[0] if _drawn else None


def fresh_seed() -> int:
    """A new seed at every call and in every run, so that no answer fits the numbers of one.

    The first number of a check is drawn, or TORCH_HANDLE_SEED, and is shown on failure; seeds
    follow from it, from the place of the call in the check and from the rank.
    """
    if not _drawn:
        given = os.environ.get("TORCH_HANDLE_SEED")
        _drawn.append(int(given) if given else random.SystemRandom().randrange(2**31))
    _drawn.append(random.Random(f"{_drawn[0]} {len(_drawn)} {current_rank()}").randrange(2**31))
    return _drawn[-1]


def fresh_generator() -> torch.Generator:
    """A torch generator on a fresh seed."""
    return torch.Generator().manual_seed(fresh_seed())


def seed_all(seed: int) -> None:
    """Start python's, numpy's and torch's generators at `seed`; the runner puts them back."""
    _chosen.add(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def seed_was_set_by_answer(seed_before: int) -> bool:
    """Whether torch's global generator has been seeded by anybody but this check."""
    return torch.initial_seed() not in {seed_before, *_chosen}


@contextlib.contextmanager
def kept_random_states() -> Generator[None]:
    """Put the random states of python, numpy and torch back afterwards, whatever was drawn.

    Inside, torch's generator has a seed that nobody else uses: whoever sets one has changed it.
    """
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_UNUSUAL)
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)
