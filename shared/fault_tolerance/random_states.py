"""The random generators of a process, written down and put back."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states of this process's random generators, in plain values and tensors.

    "python" (random), "numpy" (its global generator: the tuple of get_state, with its array as an
    int64 tensor), "torch", and "cuda" (the current device's) once CUDA is in use.
    """
    numbers = np.random.get_state()
    assert isinstance(numbers, tuple), f"numpy described its state as {type(numbers)}"
    name, keys, *rest = numbers
    states = {
        "python": random.getstate(),
        # A tensor in place of the array: a checkpoint is read without running pickled code.
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put the generators back to what `random_states` returned, here or in another process."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
