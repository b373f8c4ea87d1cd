"""The warm interpreter that the tests give torchrun does what a cold one does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    with interpreter(tmp_path_factory.mktemp("warm")) as program:
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
