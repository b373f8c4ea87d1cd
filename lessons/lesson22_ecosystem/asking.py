"""Frameworks in a process of their own, which imports them once and forks ranks for each question.

Importing four frameworks takes seconds, and each leaves global state behind: so they stay out of
the notebook's process, and every question has fresh ranks.
"""

import os
from typing import Any

import torch.distributed as dist

from shared.ranks.hosts import Host, serve

HOST = Host(__name__, "the frameworks'")


def ask(task: str, world_size: int = 2, timeout: float = 480.0, **given: Any) -> list[Any]:
    """What each rank returned: a function of `tasks`, called with its rank and `given`, as JSON.

    Raises RuntimeError with the rank's error, when one raised.
    """
    return HOST.ask(task, world_size, timeout, given)


def _tasks() -> dict[str, Any]:
    from lessons.lesson22_ecosystem import tasks  # imports the frameworks

    tasks.warm_up()
    return vars(tasks)


def _in_rank(rank: int, work: Any, given: dict[str, Any]) -> Any:
    """Frameworks read their place from the variables that torchrun sets."""
    n = dist.get_world_size()
    place: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
    }
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # looked at; the group is there
    os.environ |= {name: str(value) for name, value in place.items()}
    return work(rank, **given)


if __name__ == "__main__":
    serve(_tasks, _in_rank)
