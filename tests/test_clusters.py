"""Clusters: started with one core for each worker, found at an address, refused with one clear line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from kme_dist import cluster
from kme_dist.cluster import available_cores, open_client, open_executor, worker_count
from kme_dist.config import ClusterConfig, TlsConfig
from kme_dist.errors import ConfigError, RetryError
from kme_dist.run.executors import SerialExecutor

# A scheduler and one worker in a process of their own; their address is the first line of its output.
ELSEWHERE = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=int(sys.argv[1]), threads_per_worker=1, processes=False, protocol="tcp",
                      dashboard_address=":0") as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def elsewhere():
    """A function that starts a cluster in another process and returns (address, process)."""
    started = []

    def start(workers=1):
        command = [sys.executable, "-c", ELSEWHERE, str(workers)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append(process)
        return process.stdout.readline().strip(), process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_serial_means_no_cluster():
    with open_executor(ClusterConfig(kind="serial")) as executor:
        assert isinstance(executor, SerialExecutor)


def test_a_local_cluster_never_has_more_threads_than_there_are_cores():
    assert worker_count(ClusterConfig()) == available_cores()
    assert worker_count(ClusterConfig(workers=1)) == 1
    with pytest.raises(ConfigError, match=r"cluster\.workers is 1000, but there are \d+ cores"):
        worker_count(ClusterConfig(workers=1000))
    with open_executor(ClusterConfig(workers=1, dashboard=False, memory="1GiB")) as executor:
        workers = executor.client.scheduler_info(n_workers=-1)["workers"].values()
        assert [(worker["nthreads"], worker["memory_limit"]) for worker in workers] == [(1, 2**30)]
        assert executor.map(os.getpid, [()], name="pid") != [os.getpid()]


def test_a_running_cluster_is_found_and_left_running(elsewhere):
    address, process = elsewhere()
    for _ in range(2):
        with open_executor(ClusterConfig(kind="address", address=address)) as executor:
            assert executor.map(os.getpid, [()], name="pid") == [process.pid]


def test_a_scheduler_that_dies_in_a_round_is_a_reason_to_try_again(elsewhere):
    address, process = elsewhere()
    with open_executor(ClusterConfig(kind="address", address=address, patience_s=0.5)) as executor:
        pid = executor.map(os.getpid, [()], name="pid")[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert pid == process.pid
        with pytest.raises(RetryError, match="scheduler"):
            executor.map(os.getpid, [()], name="pid")


def test_other_versions_are_refused(elsewhere, monkeypatch):
    address, _ = elsewhere()
    real = cluster.versions()
    monkeypatch.setattr(cluster, "versions", lambda: real)
    with open_client(ClusterConfig(kind="address", address=address)) as client:
        # The workers report what they have; this process claims something else.
        monkeypatch.setattr(client, "run", lambda *a, **k: {"tcp://w:1": {**real, "numpy": "1.0"}})
        with pytest.raises(ConfigError, match=r"worker tcp://w:1 has numpy 1\.0, this process has"):
            cluster.check_versions(client)
        monkeypatch.setattr(client, "run", lambda *a, **k: {"tcp://w:1": ModuleNotFoundError("no kme_dist")})
        with pytest.raises(ConfigError, match="cannot run kme-dist"):
            cluster.check_versions(client)


def test_a_cluster_without_workers_is_not_waited_for_in_vain(elsewhere, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1.0)
    address, _ = elsewhere(workers=0)
    with pytest.raises(RetryError, match="has no worker"), open_client(ClusterConfig(kind="address", address=address)):
        pass


@pytest.mark.parametrize(
    ("settings", "error", "line"),
    [
        ({}, ConfigError, r"cluster\.address is missing"),
        ({"address": "nonsense://here"}, ConfigError, "is no address of a scheduler"),
        ({"address": "tcp://127.0.0.1:1"}, RetryError, "no scheduler answers at tcp://127.0.0.1:1"),
        ({"address": "tls://127.0.0.1:1"}, ConfigError, r"set cluster\.tls"),
        (
            {"address": "tls://127.0.0.1:1", "tls": TlsConfig(authority="absent.pem", certificate="c", key="k")},
            ConfigError,
            r"cluster\.tls\.authority: there is no file absent\.pem",
        ),
    ],
)
def test_what_cannot_be_reached_is_named(settings, error, line, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1.0)
    with pytest.raises(error, match=line), open_client(ClusterConfig(kind="address", **settings)):
        pass


def test_the_command_keeps_a_cluster_up_until_it_is_told_to_stop():
    command = [sys.executable, "-m", "kme_dist", "cluster", "--workers", "1", "--json", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        printed = ""
        while not printed.rstrip().endswith("}") and process.poll() is None:
            printed += process.stdout.readline()
        address = json.loads(printed)["scheduler"]
        with open_executor(ClusterConfig(kind="address", address=address)) as executor:
            assert executor.map(os.getpid, [()], name="pid") != [process.pid], "a worker process did it"
        process.terminate()
        assert process.wait(timeout=60) == 0
