"""A warm interpreter for the tests: ranks and kernels are forked from one that has imported torch.

An interpreter that imports torch, what an optimizer's first step imports, and matplotlib uses five
seconds of a processor before it does anything, and the tests start hundreds. torchrun takes another
interpreter from PYTHON_EXEC (docs.pytorch.org/docs/stable/elastic/run.html), Jupyter from the first
kernelspec on JUPYTER_PATH: `interpreter` makes one that asks this server to fork, hands over its
arguments, folder, environment and streams, passes signals on, and ends as the fork ends. Nothing of
the course is imported before the fork, and what differs from its very start (namespaces, limits,
threads, options) gets a cold interpreter.
"""

import array
import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_STREAMS = 3
KERNEL = ["-m", "ipykernel_launcher"]


@contextlib.contextmanager
def interpreter(folder: Path, *, lazily: bool = False, **variables: str) -> Iterator[Path]:
    """Make a program in `folder` that stands for this interpreter; warm until the block ends.

    Beside it lies the kernelspec "python3" that starts it, for JUPYTER_PATH. `lazily` leaves to the
    program what torch imports with the first optimizer, and with it when. `variables` are added to
    the warm one's environment.
    """
    address, program = folder / "socket", folder / "python"
    words = [sys.executable, "-I", "-S", HERE / "client.py", address, sys.executable]
    program.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in words) + ' "$@"\n')
    program.chmod(0o755)
    argv = [str(program), *KERNEL, "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3 (warm)", "language": "python"}
    (folder / "kernels" / "python3").mkdir(parents=True)
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for name in ("PYTHONPATH", "MPLBACKEND"):  # a fork's own hold
        environment.pop(name, None)
    command = [sys.executable, __file__, str(address), *["lazily"] * lazily]
    environment |= variables
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as server:
        try:
            yield program
        finally:
            server.kill()


def serve(address: str) -> dict | None:
    """Fork at each request, until the parent is gone. Return in the forks, with the request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the tests
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    pids: dict[socket.socket, int] = {}
    parent = os.getppid()
    while os.getppid() == parent:
        for key, _ in selector.select(timeout=5.0):
            match key.fileobj, key.data:
                case socket.socket() as readable, None if readable is listener:
                    connection, _ = listener.accept()
                    if not (request := _receive(connection)):
                        connection.close()
                    elif pid := os.fork():
                        for stream in request["streams"]:
                            os.close(stream)
                        pids[connection] = pid
                        selector.register(connection, selectors.EVENT_READ)
                        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, connection)
                    else:
                        _close_all(selector)
                        connection.close()
                        return request
                case socket.socket() as connection, None if connection in pids:  # not just ended
                    if not (said := connection.recv(1)):  # the client was killed
                        selector.unregister(connection)
                    _signal(pids[connection], said[0] if said else signal.SIGKILL)
                case int() as pidfd, connection:
                    _, status = os.waitpid(pids.pop(connection), 0)
                    selector.unregister(pidfd)
                    os.close(pidfd)
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    number = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(OSError):  # the client may be gone
                        connection.sendall(number.to_bytes(4, "big", signed=True))
                    connection.close()
    return None


def _receive(connection: socket.socket) -> dict:
    """The request and its streams; empty where the client ended before it had told all."""
    size = array.array("i").itemsize * NUM_STREAMS
    length, extra, *_ = connection.recvmsg(4, socket.CMSG_SPACE(size))
    if not extra:
        return {}
    streams = array.array("i", extra[0][2])
    data = connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    try:
        return json.loads(data) | {"streams": list(streams)}
    except ValueError:
        return {}


def _signal(pid: int, number: int) -> None:
    """Send a signal to a fork and what it has forked: Jupyter means a kernel's ranks as well."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it does not lead its group yet
        os.kill(pid, number)


def _close_all(selector: selectors.BaseSelector) -> None:
    """Close what a fork has of the server's."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, int):
            os.close(key.fileobj)
        else:
            key.fileobj.close()
    selector.close()


def become(request: dict) -> None:
    """Give this fork what the client has: streams, folder, environment, arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = request["executable"]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    if request["arguments"][:2] == KERNEL:
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        # Which would have been read from the environment; a kernel ends with its parent.
        request["arguments"].append(f"--IPKernelApp.parent_handle={os.getppid()}")
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if backend := os.environ.get("MPLBACKEND"):
        matplotlib.rcParams["backend"] = backend


def die_of(interrupted: list[int]) -> None:
    """End by the signal, if there was one."""
    for number in interrupted:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    sys.path.insert(0, str(HERE))
    from client import surroundings

    sys.path.pop(0)
    import ipykernel.kernelapp  # noqa: F401
    import matplotlib.pyplot
    import torch.distributed.run
    import torch.nn.parallel
    import torch.profiler
    import torch.utils.data

    if "lazily" not in sys.argv[2:]:
        import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()
    Path(f"{sys.argv[1]}.json").write_text(json.dumps(surroundings()))
    if request := serve(sys.argv[1]):
        become(request)
        words = request["arguments"]
        interrupted: list[int] = []
        atexit.register(die_of, interrupted)  # the first to register is the last to be called
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                sys.modules.pop(words[1], None)  # which it is to be again, as __main__
                sys.path.insert(0, os.getcwd())
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                sys.path.insert(0, str(Path(words[0]).resolve().parent))
                runpy.run_path(words[0], run_name="__main__")
        except KeyboardInterrupt:  # of which an interpreter dies after its clean-up
            traceback.print_exc()
            interrupted.append(signal.SIGINT)
