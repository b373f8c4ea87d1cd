"""The pytest side of one grading: starts the kernel confined, hands on what its cells said.

Loaded with `-p solutions.grading.sandbox.nbval_plugin`. This process is the grader's own: the
learner's code runs in the kernel, which cannot reach the pipe that this writes to.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any, ClassVar

import nbval.kernel
import nbval.plugin
import pytest
import zmq
from jupyter_client.manager import KernelManager
from nbval.kernel import RunningKernel

from solutions.grading.results import Stop
from solutions.grading.sandbox.assemble import PART
from solutions.grading.sandbox.inside.guard import MIME

MAX_MESSAGE = 8 << 20  # bytes; a larger message from the kernel closes the connection
MAX_WORDS = 2000
SETUP_SECONDS = 120.0


class ConfinedKernelManager(KernelManager):
    """Starts the kernel with the command that the grader gave, over sockets in the sandbox."""

    plan: ClassVar[dict[str, Any]] = {}

    def __init__(self, **kwargs: Any) -> None:
        context = zmq.Context()
        context.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        context.setsockopt(zmq.RCVHWM, 64)
        super().__init__(
            transport="ipc", connection_file=self.plan["connection"], context=context, **kwargs
        )

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        return list(self.plan["command"])


class WatchedKernel(RunningKernel):
    """Notices at once that the kernel is gone; nbval would wait for the cell's whole timeout.

    `late` says that a cell did not end in its time. nbval reports by the same words that the
    outputs of a cell did not come, as happens when a large one closes the connection.
    """

    late = False

    def await_reply(self, msg_id: str, timeout: float | None = None) -> Any:
        try:
            return super().await_reply(msg_id, timeout)
        except Empty:
            self.late = True
            raise

    def get_message(self, stream: str, timeout: float | None = None) -> Any:
        deadline = time.monotonic() + (timeout or 0.0)
        while True:
            alive = self.is_alive()
            try:
                return super().get_message(stream, timeout=0.25)
            except Empty:
                if not alive:
                    raise KernelGone("the kernel is gone") from None
                if timeout is not None and time.monotonic() > deadline:
                    raise


class KernelGone(RuntimeError):
    """The kernel's process ended while a cell ran."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--grading-plan", help="what to start and where to report, as JSON")


def die_with_grader() -> None:
    """Should the grader be killed, its runs end too: this process, and the kernel with it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def pytest_configure(config: pytest.Config) -> None:
    die_with_grader()
    plan = json.loads(Path(config.getoption("--grading-plan")).read_text())
    os.set_inheritable(plan["pipe"], False)
    ConfinedKernelManager.plan = plan
    # nbval has no setting for either.
    vars(nbval.kernel)["KernelManager"] = ConfinedKernelManager
    vars(nbval.plugin)["RunningKernel"] = WatchedKernel
    config.pluginmanager.register(Reporter(plan["pipe"], config.getoption("nbval_cell_timeout")))


class Reporter:
    """Writes one line of JSON to the grader for each cell."""

    def __init__(self, pipe: int, exercise_seconds: float) -> None:
        self.pipe, self.exercise_seconds = pipe, exercise_seconds

    def tell(self, **event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(self.pipe, data) :]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        about = item.cell.metadata[PART]
        # The limit is for the learner's code; importing torch takes what it takes.
        own = bool(about["exercise"])
        item.config.option.nbval_cell_timeout = self.exercise_seconds if own else SETUP_SECONDS
        self.tell(event="begins", **about)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: pytest.CallInfo) -> Any:
        outcome = yield
        if call.when != "call":
            if call.when == "setup" and call.excinfo is not None:
                self.tell(event="broken", why=str(call.excinfo.value)[:MAX_WORDS])
            return
        report = outcome.get_result()
        stop = why_stopped(item.parent)
        self.tell(
            event="done",
            **item.cell.metadata[PART],
            passed=report.outcome == "passed",
            stop=stop,
            status=exit_status(item.parent.kernel) if stop is Stop.DIED else None,
            **said(item.test_outputs or []),
        )
        if stop is not None:
            item.session.shouldstop = "the kernel is gone or busy"


def why_stopped(notebook: Any) -> Stop | None:
    """Why no further cell of nbval's notebook can run; None when the next one can."""
    if notebook.timed_out:
        return Stop.EXERCISE_TIME if notebook.kernel.late else Stop.OUTPUT
    alive = notebook.kernel is not None and notebook.kernel.is_alive()
    return None if alive else Stop.DIED


def exit_status(kernel: Any) -> int | None:
    """The status that the kernel's process ended with, as far as it is known."""
    process = getattr(getattr(getattr(kernel, "km", None), "provisioner", None), "process", None)
    return getattr(process, "returncode", None)


def said(outputs: list[Any]) -> dict[str, Any]:
    """The verdicts among a cell's outputs, and the error it ended with."""
    verdicts, error = [], ""
    for output in outputs:
        data = output.get("data", {})
        if MIME in data and isinstance(data[MIME], dict):
            verdicts.append(data[MIME])
        if output.get("output_type") == "error":
            error = f"{output.get('ename', '')}: {output.get('evalue', '')}"[:MAX_WORDS]
    return {"verdicts": verdicts[:4], "error": error}
