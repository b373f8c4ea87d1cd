"""A confined process: what it cannot do, layer by layer, and what it still can."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from solutions.grading.results import Limits, Stop
from solutions.grading.sandbox.confine import (
    INSIDE,
    Layers,
    find_layers,
    interpreter_folders,
    make_plan,
)
from solutions.grading.sandbox.folders import remove
from solutions.grading.sandbox.watch import MAX_FILES, Watch, end_all, folder_use

LAYERS = find_layers()
LIMITS = Limits(memory=1 << 30, num_processes=8, file_size=1 << 20)
needs_landlock = pytest.mark.skipif(not LAYERS.landlock, reason="no Landlock here")
needs_namespaces = pytest.mark.skipif(not LAYERS.namespaces, reason="no namespaces here")
needs_proc = pytest.mark.skipif(not LAYERS.own_proc, reason="no /proc of its own here")
needs_user = pytest.mark.skipif(not LAYERS.own_user, reason="only root can become another user")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path):
    """A folder that another user may pass through, as the grader's is."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == Path.home().owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "home").mkdir()
    (tmp_path / "course").mkdir()
    return tmp_path


@pytest.fixture
def confined(place):
    """Run Python code in all layers of this machine; returns (status, what it printed)."""

    def run(code: str, layers: Layers = LAYERS) -> tuple[int, str]:
        command = [sys.executable, "-I", "-c", code]
        home = place / "home"
        plan = make_plan(layers, home, place / "course", command, {"A": "1"}, LIMITS, slot=3)
        (place / "plan.json").write_text(json.dumps(plan))
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(INSIDE / "enter.py"), str(place / "plan.json")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout.strip() or done.stderr.strip().split("\n")[-1]

    return run


def test_an_ordinary_program_runs(confined):
    code = "import os; open('f', 'w').write('x'); print(open('f').read(), sorted(os.environ))"
    status, said = confined(code)
    assert status == 0, said
    assert said.startswith("x ['A'")


def test_statuses_and_signals_come_through(confined):
    assert confined("import os; os._exit(7)")[0] == 7
    expected = 128 + 11 if LAYERS.namespaces else -11
    assert confined("import os; os.kill(os.getpid(), 11)")[0] == expected


@needs_landlock
@pytest.mark.parametrize(
    "path", [ROOT / "solutions" / "__init__.py", ROOT / "README.md", Path("/etc/shadow")]
)
def test_files_of_others_cannot_be_read(confined, path):
    status, said = confined(f"open({str(path)!r}).read()")
    assert status == 1
    assert "Permission" in said or "No such file" in said


@needs_landlock
@pytest.mark.parametrize("where", ["course/f", "f", "/tmp/f", "/dev/f"])
def test_nothing_is_written_elsewhere(confined, place, where):
    status, said = confined(f"open({str(place / where)!r}, 'w')")
    assert status == 1
    assert "Error" in said
    assert not (place / where).exists()


@needs_namespaces
def test_the_machine_s_servers_are_out_of_reach_and_loopback_is_there(confined):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, said = confined(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
    assert (status, said.split(":")[0]) == (1, "ConnectionRefusedError")
    code = """import socket
server = socket.create_server(('127.0.0.1', 0))
socket.create_connection(server.getsockname()).close()
print([name for _, name in socket.if_nameindex()][0])"""
    assert confined(code) == (0, "lo")


@needs_namespaces
def test_what_it_starts_ends_with_it(confined, place):
    code = """import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for _ in range(600):
            open('alive', 'w').write(str(time.time()))
            time.sleep(0.05)
    os._exit(0)
while not os.path.exists('alive'):
    time.sleep(0.05)"""
    assert confined(code)[0] == 0
    written = (place / "home" / "alive").stat().st_mtime_ns
    time.sleep(0.3)
    assert (place / "home" / "alive").stat().st_mtime_ns == written


@needs_namespaces
def test_it_has_few_processes_and_cannot_signal_others(confined):
    code = """import os, time
count = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        count += 1
except BlockingIOError:
    print(count < 3 * 8)"""
    assert confined(code) == (0, "True")
    assert confined(f"import os; os.kill({os.getpid()}, 0)")[0] == 1


def test_memory_file_sizes_and_core_dumps_are_limited(confined):
    assert "MemoryError" in confined("bytearray(2 << 30)")[1]
    assert "File too large" in confined("open('f', 'wb').write(bytes(2 << 20))")[1]
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
    assert confined(code) == (0, "(0, 0)")


@needs_user
def test_it_is_another_user_with_no_rights(confined):
    code = """import os
status = open('/proc/self/status').read()
print(os.getuid() != 0, os.getgroups(), 'CapEff:\\t0000000000000000' in status)"""
    assert confined(code) == (0, "True [] True")
    assert confined("import os; os.setuid(0)")[0] == 1


@needs_proc
def test_proc_shows_its_own_processes_by_the_numbers_that_it_knows(confined):
    code = """import os
processes = sorted(filter(str.isdigit, os.listdir('/proc')))
print(os.readlink('/proc/self') == str(os.getpid()), processes)
"""
    assert confined(code) == (0, "True ['1', '2']")


@pytest.mark.parametrize(
    "layers",
    [
        Layers(),
        Layers(landlock=LAYERS.landlock),
        Layers(LAYERS.landlock, LAYERS.namespaces),
        Layers(LAYERS.landlock, LAYERS.namespaces, LAYERS.mounts, LAYERS.own_user, own_proc=False),
    ],
)
def test_each_layer_can_be_missing(confined, layers):
    assert confined("print(1)", layers) == (0, "1")


def test_the_terminal_hears_what_holds_and_what_is_missing():
    lines = Layers().lines()
    assert sum("MISSING" in line for line in lines) >= 2
    assert any("the network is open" in line for line in lines)
    assert not any("MISSING" in line for line in Layers(7, True, True, True).lines())


def test_the_interpreter_s_folders_never_hold_the_course():
    assert not any(ROOT.is_relative_to(folder) for folder in interpreter_folders())
    assert str(ROOT / "solutions") not in interpreter_folders()


def test_the_watch_names_the_limit(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; x = bytes(99); time.sleep(60)"])
    own = os.getpid()
    try:
        assert Watch(tmp_path, Limits(), count=True)(own) is None
        assert Watch(tmp_path, Limits(num_processes=0), count=True)(own) is Stop.PROCESSES
        assert Watch(tmp_path, Limits(num_processes=0), count=False)(own) is None
        assert Watch(tmp_path, Limits(memory=1), count=False)(own) is Stop.MEMORY
        (tmp_path / "f").write_bytes(bytes(1 << 20))
        assert Watch(tmp_path, Limits(folder_size=1 << 19), count=False)(own) is Stop.FOLDER
        assert folder_use(tmp_path)[0] >= 1 << 20
        assert MAX_FILES > 1000
    finally:
        child.kill()
        child.wait()


def test_end_all_finds_what_left_the_tree(tmp_path):
    code = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(60)"
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    left = [p for p in psutil.process_iter() if _home(p) == str(tmp_path)]
    assert len(left) == 1
    end_all(os.getpid(), tmp_path, search=True)
    gone, alive = psutil.wait_procs(left, timeout=5)
    assert (len(gone), alive) == (1, [])


def _home(process: psutil.Process) -> str:
    try:
        return process.environ().get("HOME", "")
    except psutil.Error:
        return ""


def test_removing_a_run_s_folder_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").touch()
    folder = tmp_path / "run"
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "closed").chmod(0)
    remove(folder)
    assert not folder.exists()
    assert (outside / "kept").exists()
    assert outside.stat().st_mode & 0o777 == 0o755
