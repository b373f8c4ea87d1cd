"""Checkpoints written while training continues: it stops for a copy, not for the disk."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from shared.fault_tolerance.checkpoints import (
    checkpoint_content,
    checkpoint_path,
    from_rank_0,
    store,
)
from shared.fault_tolerance.state import TrainingState
from shared.ranks.group import current_rank


class BackgroundSaver:
    """`save_checkpoint`, with the writing left to a thread of rank 0.

    The copy is the point: without it the thread would write tensors that the next step is
    changing, a file of two steps, with nothing in it to tell. It costs the memory of one more
    state, and if the process dies before the thread is done, one interval more of work.

        saver = BackgroundSaver(folder)
        resume_training(..., save=saver.save, ...)
        saver.wait()
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def save(self, state: TrainingState) -> Path:
        """Copy the state and return; every rank calls it.

        Waits first for the checkpoint before this one: a disk slower than the interval would
        otherwise fill the memory with copies. Raises InputError, on every rank, if that one
        could not be written.
        """
        self.wait()
        content = checkpoint_content(state)
        path = checkpoint_path(self.folder, state.step)
        if current_rank() == 0:
            self._pending = self._thread.submit(store, path, copied(content), self.keep)
        return path

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk; raises InputError as `save` does."""
        said: list[Exception | None] = [None]
        if self._pending is not None:
            try:
                self._pending.result()
            except Exception as error:  # of any kind: the others wait for a word of it
                said = [error]
            self._pending = None
        said = from_rank_0(said)
        if said[0] is not None:
            raise said[0]


def copied(content: Any) -> Any:
    """Return the same containers with copies of all tensors, in the memory of the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), content)
