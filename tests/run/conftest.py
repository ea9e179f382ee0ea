"""A cluster for tests that kill workers."""

from __future__ import annotations

import contextlib
import time

import pytest
from distributed import Client, LocalCluster
from distributed.core import Status


@pytest.fixture(scope="module")
def killable():
    """A function: a client of two workers that are both well, whatever the tests before did to them.

    A nanny whose worker is killed at the very moment it starts does not start another one [Nanny._on_worker_exit], and
    the next test would wait for its workers for ever. So all nannies are asked first, and the cluster is made anew
    where one has given up.
    """
    held = []

    def well(cluster, client, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            running = [nanny.status == Status.running for nanny in cluster.workers.values()]
            if all(running) and len(client.scheduler_info(n_workers=-1)["workers"]) == len(running) == 2:
                return True
            time.sleep(0.05)
        return False

    def end():
        while held:
            with contextlib.suppress(TimeoutError):  # a nanny that has given up may not find the end of its worker
                held.pop().close()

    def find():
        if not held or not well(*held, seconds=60):
            end()
            held.append(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0"))
            held.append(Client(held[0]))
            assert well(*held, seconds=240)
        return held[1]

    yield find
    end()
