"""What a run writes down while it goes on: lines of JSON, TensorBoard, speed, MFU, a trace."""

import contextlib
import json
import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.measuring.trace import file_alone, quiet_stderr
from shared.ranks.agreement import refused_by_any
from shared.ranks.group import Rank
from shared.training.checkpoint_files import cause_of
from shared.training.engine import Engine

LINES = "metrics.jsonl"
PROFILED = 3  # the step that is traced: the first ones differ


class Record:
    """The losses and seconds of a run; on rank 0 lines in `out`, and TensorBoard where asked for.

    Losses stay on the device until `every` steps have come: to read one waits for a GPU, and to
    add it up over the ranks is a message.
    """

    def __init__(
        self, out: Path, rank: Rank, every: int, first: int, tensorboard: bool = False
    ) -> None:
        self.out, self.rank, self.every = out, rank, every
        self.losses: list[float] = []
        self.held_out: list[tuple[int, float]] = []
        self.speeds: list[float] = []  # tokens a second, of each interval
        self._waiting: list[tuple[int, Tensor, Tensor | None, float]] = []
        self.restart()
        self.board: Any = None
        with self._told_to_all():
            if rank.is_main:
                self.board = _board(out) if tensorboard else None
                _keep_lines_before(out / LINES, first)

    def add(
        self, engine: Engine, step: int, part: Tensor, norm: Tensor | None, tokens: int
    ) -> None:
        """A step that was made, with its rate; all ranks call it."""
        rate = engine.optimizer.param_groups[0]["lr"]
        self._waiting.append((step, part, norm, rate))
        self._tokens += tokens
        if len(self._waiting) == self.every:
            self.flush(engine)

    def flush(self, engine: Engine) -> None:
        """Write what has come; all ranks call it, and get InputError where the disk refuses."""
        if not self._waiting:
            return
        now = synchronized_now(self.rank.device)
        self.speeds.append(self._tokens / (now - self._began))
        losses = engine.global_loss(torch.stack([part for _, part, _, _ in self._waiting]))
        with self._told_to_all():
            for (step, _, norm, rate), loss in zip(self._waiting, losses.tolist(), strict=True):
                line = {"step": step, "loss": loss, "rate": rate}
                line |= {"tokens/s": round(self.speeds[-1])}
                line |= {} if norm is None else {"norm": float(norm)}
                self.write(line)
        self.losses += losses.tolist()
        self._waiting = []
        self.restart()

    def evaluated(self, step: int, loss: float) -> None:
        """The loss of what is held out, after a step."""
        self.held_out.append((step, loss))
        with self._told_to_all():
            self.write({"step": step, "held-out loss": loss})
        self.restart()

    def restart(self) -> None:
        """Begin to time and to count anew: what was done meanwhile is no training."""
        self._tokens, self._began = 0, synchronized_now(self.rank.device)

    def write(self, line: dict[str, Any]) -> None:
        """A line on rank 0; OSError where the disk refuses."""
        if not self.rank.is_main:
            return
        with (self.out / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name, value in line.items():
                if name != "step":
                    self.board.add_scalar(name, value, line["step"])

    @contextlib.contextmanager
    def _told_to_all(self) -> Generator[None]:
        """An OSError of rank 0 within is InputError on every rank: the others would wait for it."""
        with refused_by_any():
            try:
                yield
            except OSError as error:
                words = f"--out {self.out}: {LINES} cannot be written ({cause_of(error)})"
                raise InputError(words) from None

    def tokens_per_second(self) -> float:
        """The median interval; the first one, with what torch prepares, is left out if it can."""
        return median(self.speeds[1:] or self.speeds or [0.0])

    def close(self) -> None:
        """Let TensorBoard write what it has."""
        if self.board is not None:
            self.board.close()


def _board(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # imported where it is asked for
    except ImportError:
        raise InputError("--tensorboard needs its package: pip install tensorboard") from None
    return SummaryWriter(str(out / "tensorboard"))


def _keep_lines_before(path: Path, first: int) -> None:
    """Of an earlier run keep the steps before this one's first, as a checkpoint has them."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in lines if _step_of(line) < first]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that a full disk tore, or that is nobody's."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


@contextlib.contextmanager
def tracing(
    wanted: int, out: Path, rank: Rank, steps: Sequence[int]
) -> Generator[Callable[[], object]]:
    """Trace so many steps of each rank to out/trace_rank_N.json; yields what each step calls last.

    Perfetto and lesson 12's report read the file.
    """
    if not wanted:
        yield lambda: None
        return
    before = min(PROFILED, len(steps)) - 1
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if rank.device.type == "cuda" else []
    active = min(wanted, len(steps) - before)
    when = schedule(wait=max(0, before - 1), warmup=min(1, before), active=active, repeat=1)
    file = out / f"trace_rank_{rank.rank}.json"
    with quiet_stderr(), profile(activities=activities, schedule=when, **file_alone()) as profiler:
        profiler.on_trace_ready = lambda done: done.export_chrome_trace(str(file))
        yield profiler.step


def mfu(tokens_per_second: float, flops_per_token: float, peak: float, ranks: int) -> float:
    """Model FLOPs utilization: the arithmetic that the model needs over what the ranks could do."""
    return tokens_per_second * flops_per_token / (peak * ranks)
