"""A process that ranks are forked from: its answers belong to the questions that were asked."""

import os
import signal
import threading

import pytest

from shared.ranks import hosts

ECHO = """
import json, sys, time
for line in sys.stdin:
    given = json.loads(line)["given"]
    time.sleep(given.get("sleep", 0))
    print(json.dumps({"results": [given["name"]]}), flush=True)
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    (tmp_path / "echo_host.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    host = hosts.Host("echo_host", "Echo's")
    with host.ended():
        yield host


def ask(host, **given):
    return host.ask("task", 1, 5.0, given)


def test_the_answer_to_an_interrupted_question_is_nobodys(host):
    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, stop)  # SIGALRM is pytest-timeout's
    try:
        assert ask(host, name="first") == ["first"]
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the clock runs from the question
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            ask(host, name="interrupted", sleep=5.0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ask(host, name="second") == ["second"]


def test_after_a_host_that_has_ended_another_is_started(host):
    assert ask(host, name="first") == ["first"]
    process = host._processes[os.getpid()]
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match="Echo's process ended"):
        ask(host, name="lost")
    assert ask(host, name="second") == ["second"]
