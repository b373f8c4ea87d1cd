"""In the place of the interpreter: have the warm one run a script, or start a cold one.

Standard library only, since this must start in milliseconds. See server.py.
"""

import array
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

EARLY = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "MPL", "LD_", "PYTHON", "TORCH_CPP", "TORCH_LOGS")
SEEN_TO = ("PYTHONUNBUFFERED", "PYTHONPATH", "MPLBACKEND")  # by the server, see become()
TORCHRUN, KERNEL = ["-m", "torch.distributed.run"], ["-m", "ipykernel_launcher"]
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def surroundings() -> dict[str, object]:
    """What a process has from its start and a fork of another would not have."""
    early = {name: value for name, value in os.environ.items() if name.startswith(EARLY)}
    for name in ("PYTHON_EXEC", *SEEN_TO):  # the first led here
        early.pop(name, None)
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid", "user")]
    limits = Path("/proc/self/limits").read_text()
    return {"environment": early, "spaces": spaces, "limits": limits, "user": os.getuid()}


def forward(connection: socket.socket, number: int) -> None:
    """Pass a signal on, unless the fork has just ended by itself."""
    try:
        connection.send(bytes([number]))
    except OSError:
        return  # the status is there to be read


def main(address: str, python: str, arguments: list[str]) -> int:
    """Return the exit status of `python *arguments`; end by the signal that ended it."""
    words = [word for word in arguments if word != "-u"]
    parent = os.getppid()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Only a program of the course, torchrun itself or a kernel: no option, no command.
        if not words or (words[0].startswith("-") and words[:2] not in (TORCHRUN, KERNEL)):
            raise OSError
        if json.loads(Path(f"{address}.json").read_text()) != surroundings():
            raise OSError
        connection.connect(address)
    except OSError:
        os.execv(python, [python, *arguments])
    for number in FORWARDED:
        signal.signal(number, lambda number, _frame: forward(connection, number))
    request = {"arguments": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    request |= {"umask": os.umask(0), "executable": python}
    os.umask(request["umask"])
    data = json.dumps(request).encode()
    streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    connection.sendmsg([len(data).to_bytes(4, "big")], [streams])
    connection.sendall(data)
    while words[:2] == KERNEL and not select.select([connection], [], [], 1.0)[0]:
        if os.getppid() != parent:  # of which a kernel ends
            return 1
    answer = connection.recv(4, socket.MSG_WAITALL)
    if not answer:
        print("the warm interpreter of the tests ended", file=sys.stderr)
        return 1
    status = int.from_bytes(answer, "big", signed=True)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
