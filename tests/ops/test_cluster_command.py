"""`kme-dist cluster`: up until it is asked to stop, and then it stops without a fuss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from distributed import Client

from kme_dist.errors import RetryError
from kme_dist.ops import cluster


@pytest.fixture
def start():
    """Starts the command as a terminal does, in a process group of its own."""
    running = []

    def command():
        arguments = [sys.executable, "-m", "kme_dist", "cluster", "--workers", "1", "--quiet"]
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        running.append(process)
        return process

    yield command
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended_well(process):
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in err, err
    assert process.returncode == 0, err
    return out


def test_ctrl_c_twice_while_its_worker_computes_ends_it_quietly(start):
    process = start()
    _, scheduler, _, dashboard = process.stdout.readline().split()
    assert dashboard.endswith("/kme")
    with Client(scheduler, set_as_default=False) as client:
        futures = client.map(eval, ["sum(i for i in range(10**12))"] * 3, pure=False)
        deadline = time.monotonic() + 240
        while not any(client.processing().values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C goes to the workers too
        time.sleep(0.1)
    ended_well(process)
    del futures


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_while_it_starts_it_is_up_first_and_then_ends(start, number):
    process = start()
    deadline = time.monotonic() + 240
    while not psutil.Process(process.pid).children():  # of its worker, or of what multiprocessing needs for one
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(3):
        os.kill(process.pid, number)
    assert ended_well(process).startswith("scheduler tcp://127.0.0.1:")


# --- what the command stands on ---------------------------------------------------------------------


class Answers:
    """A client whose workers answer as they are told to."""

    scheduler = SimpleNamespace(address="tcp://127.0.0.1:1")

    def __init__(self, *answers):
        self.answers = list(answers)

    def wait_for_workers(self, count, timeout):
        pass

    def run_on_scheduler(self, function):
        return function()

    def run(self, function, on_error):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_worker_that_ends_while_it_is_asked_is_asked_for_again():
    ours = cluster.versions()
    client = Answers(OSError("closed"), {"tcp://w:1": OSError("closed"), "tcp://w:2": ours}, {"tcp://w:2": ours})
    cluster.check_versions(client)
    assert client.answers == []


def test_workers_that_never_answer_are_a_reason_to_try_again():
    with pytest.raises(RetryError, match="do not answer: closed"):
        cluster.check_versions(Answers(*[{"tcp://w:1": OSError("closed")}] * 3))


def test_a_cluster_that_does_not_close_in_time_fails_no_command(caplog):
    class Stuck:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            raise TimeoutError

    with cluster._always_closed(Stuck()):
        pass
    assert "did not close in time" in caplog.text
    with pytest.raises(KeyError, match="own"), cluster._always_closed(Stuck()):
        raise KeyError("own")
