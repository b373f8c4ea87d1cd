"""The warm interpreter that the tests give torchrun and Jupyter does what a cold one does."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from tests.warm.server import interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are watched by pidfd")

SCRIPT = """
import os, signal, sys, time
if sys.argv[1] == "tell":
    print(sys.argv[2:], os.getcwd(), os.environ.get("WORD"), "PATH" in os.environ, __name__)
    print(sys.path[0], sys.executable, sys.flags.isolated, "shared" in sys.modules)
    print("to stderr", file=sys.stderr)
elif sys.argv[1] == "wait":
    print(os.getpid(), flush=True)
    time.sleep(60)
else:
    exec(sys.argv[1])
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    with (
        pytest.MonkeyPatch.context() as patch,
        interpreter(tmp_path_factory.mktemp("warm")) as program,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")  # as the server has it, whoever runs this
        until = time.monotonic() + 120
        while not (program.parent / "socket").exists() and time.monotonic() < until:
            time.sleep(0.1)
        yield program


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def run(*command, **keywords):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **keywords)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_it_has_the_arguments_folder_environment_and_streams(warm, script, tmp_path, options):
    def told(python):
        words = (*options, "script.py", "tell", "a b", "")
        return run(python, *words, cwd=tmp_path, env={"WORD": "x", "OMP_NUM_THREADS": "1"})

    assert told(warm) == told(sys.executable)


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "sys.exit(7)",
        "sys.exit('in words')",
        "1 / 0",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.abort()",
        "import atexit; atexit.register(print, 'at the end')",
    ],
)
def test_it_ends_as_the_script_ends(warm, script, code):
    status, out, err = run(warm, script, code)
    cold_status, cold_out, cold_err = run(sys.executable, script, code)
    assert (status, out) == (cold_status, cold_out)
    assert err.splitlines()[-1:] == cold_err.splitlines()[-1:] or code == "os.abort()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_script_and_nothing_is_left(warm, script, number):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([warm, script, "wait"], start_new_session=True, **pipes) as process:
        pid = int(process.stdout.readline())
        assert pid != process.pid  # a fork of the server, not the program that was started
        os.killpg(process.pid, number)
        assert process.wait(timeout=20) == -number
    expect_gone(pid)


@pytest.mark.parametrize("late", ["server", "client"])
def test_a_signal_that_comes_with_the_end_ends_neither_server_nor_client(warm, script, late):
    pids = "print(os.getpid(), os.getppid(), flush=True); time.sleep(60)"
    with subprocess.Popen([warm, script, pids], stdout=subprocess.PIPE, text=True) as process:
        pid, server = map(int, process.stdout.readline().split())
        late = server if late == "server" else process.pid  # it will learn of both at once
        os.kill(late, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            while runs(pid):
                time.sleep(0.01)
            time.sleep(0.3)
            process.terminate()
            time.sleep(0.3)
        finally:
            os.kill(late, signal.SIGCONT)
        assert process.wait(timeout=20) == -signal.SIGKILL
    assert run(warm, script, "print('torch' in sys.modules)")[1] == "True\n"


def runs(pid):
    """Whether it is there, and more than a status that nobody has asked for."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


def expect_gone(pid):
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["-c", "import sys; print('torch' in sys.modules)"], {}),
        (["script.py", "print('torch' in sys.modules)"], {"OMP_NUM_THREADS": "2"}),
        (["script.py", "print('torch' in sys.modules)"], {"PYTHONHASHSEED": "0"}),
    ],
)
def test_what_a_fork_could_not_have_gets_a_cold_interpreter(
    warm, script, tmp_path, arguments, environment
):
    assert run(warm, "script.py", "print('torch' in sys.modules)", cwd=tmp_path)[1] == "True\n"
    environment = os.environ | environment
    assert run(warm, *arguments, cwd=tmp_path, env=environment) == (0, "False\n", "")


def seen(client, expression, code=""):
    """What a kernel's expression is after this cell."""
    wanted = {"user_expressions": {"it": expression}, "output_hook": str}
    content = client.execute_interactive(code, timeout=60, **wanted)["content"]
    assert content["status"] == "ok", content
    return ast.literal_eval(content["user_expressions"]["it"]["data"]["text/plain"])


STATE = """
import os, sys
modules = {name for name in ("torch", "shared", "matplotlib.pyplot") if name in sys.modules}
"""
RANKS = """
from shared.ranks.forked import run_ranks
ranks = run_ranks(lambda rank: 10 * rank, 2)
"""


@pytest.fixture
def kernel(warm, tmp_path, monkeypatch):
    """A kernel's manager and client; started as nbclient and nbval start it."""
    monkeypatch.setenv("JUPYTER_PATH", str(warm.parent))
    manager, client = start_new_kernel(cwd=str(tmp_path), env=os.environ | {"WORD": "x"})
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_kernel_is_warm_runs_cells_and_ranks_and_is_interrupted(kernel, tmp_path):
    manager, client = kernel
    assert seen(client, "modules", STATE) == {"torch", "matplotlib.pyplot"}
    assert seen(client, "os.getcwd(), os.environ['WORD']") == (str(tmp_path), "x")
    assert "backend_inline" in seen(client, "plt.get_backend()", "import matplotlib.pyplot as plt")
    assert seen(client, "ranks", RANKS) == [0, 10]
    client.execute("print(1, flush=True)\nimport time\ntime.sleep(60)")
    while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
        pass
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=20)["content"]["ename"] == "KeyboardInterrupt"
    pid = seen(client, "os.getpid()")
    assert pid != manager.provisioner.pid
    manager.shutdown_kernel(now=True)
    expect_gone(pid)


def test_a_kernel_ends_with_whoever_started_it(warm):
    code = """
from jupyter_client.manager import start_new_kernel
_, client = start_new_kernel()
code = {"user_expressions": {"it": "__import__('os').getpid()"}, "timeout": 60}
it = client.execute_interactive("", **code)["content"]["user_expressions"]["it"]
print(it["data"]["text/plain"], flush=True)
__import__("os")._exit(0)
"""
    environment = os.environ | {"JUPYTER_PATH": str(warm.parent)}
    status, out, err = run(sys.executable, "-c", code, env=environment)
    assert status == 0, err
    expect_gone(int(out))
