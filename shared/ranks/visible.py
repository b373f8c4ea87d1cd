"""Which GPUs a process sees: none where ranks are forked, all of them in what `launch` starts."""

import functools
import inspect
import os
import re
import subprocess
import sys
from types import FunctionType

from shared.errors import InputError

VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = "TORCH_HANDLE_HIDDEN_DEVICES"  # what it said before; empty where it was not set
# What torch says of a GPU that somebody else has, up to the end of its first sentence.
TAKEN = re.compile(
    r"^[\w.]+Error: (CUDA (?:out of memory|error: .*(?:busy|out of memory))[^.\n]*)", re.M
)
TAKEN_BEFORE = 3  # the status of a cell's process that failed beside others on its GPU
HIDE_FIRST = (
    "Hide the GPUs first, as a notebook's first cell does (restart the kernel; elsewhere: "
    "shared.ranks.visible.without_gpus), or use launch()."
)


def without_gpus() -> None:
    """See no GPU from now on, here and in what is forked from here; `launch` gives them back.

    One backward on the CPU starts a thread for each visible GPU, and nothing that is forked later
    can do a backward; since torch 2.13 one step of AdamW on the CPU even initialises CUDA.

    Raises InputError where it is too late: torch has counted this process's GPUs, and keeps to it.
    """
    before = os.environ.get(VISIBLE)
    if before != "":
        os.environ |= {HIDDEN: before or "", VISIBLE: ""}
    if torch_sees_gpus():
        raise InputError(
            "torch has looked for GPUs in this process, and keeps what it found: hide them "
            "before (a notebook: restart the kernel, run its first cell first; a script: "
            'CUDA_VISIBLE_DEVICES="" before its command)'
        )


def torch_sees_gpus() -> bool:
    """Whether torch is here and sees a GPU. It counts once in a process, whatever is set later."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def environment_with_gpus() -> dict[str, str]:
    """This process's environment, with the GPUs that `without_gpus` has hidden."""
    own = dict(os.environ)
    before = own.pop(HIDDEN, None)
    if before is not None and own.get(VISIBLE) == "":
        del own[VISIBLE]
        own |= {VISIBLE: before} if before else {}
    return own


@functools.cache
def num_gpus() -> int:
    """How many GPUs `launch`'s scripts can see; asked in a process of its own where hidden here."""
    import torch

    if HIDDEN not in os.environ or not torch.backends.cuda.is_built():
        return torch.cuda.device_count()
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    told = subprocess.run(ask, env=environment_with_gpus(), capture_output=True, check=True)
    return int(told.stdout)


def with_gpus(work: FunctionType) -> None:
    """Run a function of a notebook in a process of its own, which sees the GPUs; print its words.

    Its text travels, so it imports what it uses. Where another process has the GPU for itself, or
    had filled most of it before, one line says so. Raises RuntimeError with what it ended on
    otherwise.
    """
    # No farewell: a thread of a device that is still there ends the interpreter's own end badly.
    program = f"""
import os, sys, traceback
{inspect.getsource(others_have_it)}
{inspect.getsource(work)}
status = {TAKEN_BEFORE}
try:
    status = {TAKEN_BEFORE} if {others_have_it.__name__}() else 1
    {work.__name__}()
    status = 0
except Exception:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment_with_gpus(),
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout, end="")
    if ended.returncode == 0:
        return
    taken = TAKEN.search(ended.stderr)
    if taken and ("out of memory" not in taken[1] or ended.returncode == TAKEN_BEFORE):
        print(f"Not measured: the GPU cannot be used ({taken[1]}). `nvidia-smi` shows who has it.")
    else:
        raise RuntimeError(ended.stderr)


def others_have_it() -> bool:
    """Whether most of the GPU's memory was taken before this process has any."""
    import torch

    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < total / 2


def why_not_fork() -> str:
    """What would keep a process forked from here from computing with torch; "" for nothing."""
    import torch

    if torch.cuda.is_initialized():
        return "CUDA is initialised in this process: a forked child would crash at its first call"
    if not torch.backends.cuda.is_built():
        return ""
    if torch_sees_gpus() if os.environ.get(VISIBLE) == "" else _torch_has_counted():
        return "torch has looked for GPUs in this process: a forked child could do no backward"
    return ""


def _torch_has_counted() -> bool:
    """Whether torch's count of GPUs survives that they are hidden: a child tells, and leaves."""
    import torch

    child = os.fork()
    if child == 0:
        spoiled = True
        try:
            os.environ[VISIBLE] = ""
            torch.ones(1, requires_grad=True).backward()
            spoiled = torch.cuda.is_available()
        finally:
            os._exit(int(spoiled))
    return os.waitpid(child, 0)[1] != 0
