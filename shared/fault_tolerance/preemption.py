"""SIGTERM, a scheduler's notice that it takes the machine away: the ranks agree to stop.

The handler only notes it. To save inside it would be to save in the middle of a step; to save and
leave on the rank that was told alone would leave the others in the next all-reduce.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from shared.ranks.group import Rank

# Grid Engine requeues a job that ends with it, LSF does with bsub -Q 99. Slurm has no such status
# of its own (RequeueExit is the cluster's), and torchrun ends with 1 whatever its ranks said: a
# batch script looks for a file.
REQUEUE = 99
NOTE = "requeue"


class Preempted(Exception):
    """The run was told to stop, and has saved."""

    def __init__(self, step: int, num_steps: int, folder: Path) -> None:
        super().__init__(f"stopped by SIGTERM after step {step} of {num_steps}, saved in {folder}")


class Notice:
    """Whether SIGTERM has come to a rank."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.come = device, False
        self._asked: Callable[[], bool] = lambda: False

    def to_anyone(self) -> bool:
        """Return whether any rank was told; every rank calls it, and all get the same answer.

        It waits for all that a GPU has to do: see `to_anyone_before`.
        """
        return self._ask()()

    def to_anyone_before(self) -> bool:
        """Return what `to_anyone` would have, where this was called last; at first, False.

        The answer to a step's question is read in the next step: by then a GPU has it ready, and
        goes on with what it has been given since. So up to two steps pass before the save.
        """
        asked, self._asked = self._asked, self._ask()
        return asked()

    def _ask(self) -> Callable[[], bool]:
        told = torch.full((), float(self.come), device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if self.device.type != "cuda":
            return lambda: bool(told)
        answer, there = told.to("cpu", non_blocking=True), torch.cuda.Event()
        there.record()

        def read() -> bool:
            there.synchronize()  # for what came before the answer, and no more
            return bool(answer)

        return read


@contextlib.contextmanager
def notice_of_sigterm(device: torch.device) -> Generator[Notice]:
    """Within, SIGTERM no longer ends this process: the notice tells of it. Main thread only.

    It may come twice, from the scheduler and from torchrun, which hands its own on to the ranks
    and kills what is left after --shutdown-timeout, 30 s. The price: Python runs a handler between
    two of its instructions, so a rank that waits within NCCL for a dead one, whom torchrun's
    SIGTERM used to end at once, may now last until that SIGKILL. Under gloo the wait is an error.
    """
    notice = Notice(device)

    def note(number: int, frame: FrameType | None) -> None:
        notice.come = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield notice
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def asking_to_requeue(
    out: Path, rank: Rank, advice: str = "the same command resumes there"
) -> Generator[None]:
    """Turn `Preempted` into exit status 99 and, on rank 0, a file for a batch script to find."""
    note = out / NOTE
    if rank.is_main:
        note.unlink(missing_ok=True)  # of an earlier start
    try:
        yield
    except Preempted as stop:
        if rank.is_main:
            words = f"{stop}: {advice}"
            print(words, flush=True)
            note.write_text(words + "\n", encoding="utf-8")
        sys.exit(REQUEUE)
