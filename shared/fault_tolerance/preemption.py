"""SIGTERM, a scheduler's notice that it takes the machine away, or Ctrl-C: the ranks stop together.

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
SIGNS = ("", "Ctrl-C", "SIGTERM")  # where ranks were told different ones the later counts


class Preempted(Exception):
    """The run was told to stop, and has saved."""

    def __init__(self, step: int, num_steps: int, folder: Path, by: str = "SIGTERM") -> None:
        super().__init__(f"stopped by {by} after step {step} of {num_steps}, saved in {folder}")
        self.by = by


class Notice:
    """What has come to a rank, by its place in `SIGNS`; `by` is what all of them have heard."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.come, self.by = device, 0, ""
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
        answer, there = told, None
        if self.device.type == "cuda":
            answer, there = told.to("cpu", non_blocking=True), torch.cuda.Event()
            there.record()

        def read() -> bool:
            if there is not None:
                there.synchronize()  # for what came before the answer, and no more
            self.by = SIGNS[int(answer)]
            return bool(self.by)

        return read


@contextlib.contextmanager
def notice_of_sigterm(device: torch.device) -> Generator[Notice]:
    """Within, SIGTERM and Ctrl-C no longer end this process: the notice tells. Main thread only.

    A second Ctrl-C does, at once; SIGTERM after the first makes it no scheduler's notice. SIGTERM
    may come twice, from the scheduler and from torchrun, which hands its own on to the ranks and
    kills what is left after --shutdown-timeout, 30 s. The price: Python runs a handler between two
    of its instructions, so a rank that waits within NCCL for a dead one, whom torchrun's SIGTERM
    used to end at once, may now last until that SIGKILL. Under gloo the wait is an error.
    """
    notice = Notice(device)

    def note(number: int, frame: FrameType | None) -> None:
        notice.come = notice.come or (2 if number == signal.SIGTERM else 1)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield notice
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def asking_to_requeue(
    out: Path, rank: Rank, advice: str = "the same command resumes there"
) -> Generator[None]:
    """Turn `Preempted` into exit status 99 and, on rank 0, a file for a batch script to find.

    After Ctrl-C somebody is there: status 130, and no file.
    """
    note = out / NOTE
    if rank.is_main:
        note.unlink(missing_ok=True)  # of an earlier start
    try:
        yield
    except Preempted as stop:
        if rank.is_main:
            words = f"{stop}: {advice}"
            print(words, flush=True)
            if stop.by == SIGNS[2]:
                note.write_text(words + "\n", encoding="utf-8")
        sys.exit(REQUEUE if stop.by == SIGNS[2] else 130)
