"""Lanes: short rounds straight to the workers, with nothing lost when those die, hang or fail."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from distributed import Client, LocalCluster
from threadpoolctl import threadpool_info

from kme_dist.errors import DataError
from kme_dist.run import executors
from kme_dist.run.executors import DaskExecutor
from kme_dist.run.lanes import Lanes


def square(x):
    return x * x


def slow_square(x):
    time.sleep(0.02)
    return threading.current_thread().name, x * x


def refuse(x):
    raise DataError(f"row {x} is empty") if x == 2 else FileNotFoundError("no such chunk")


def where_it_runs():
    import scipy.linalg  # noqa: F401

    threads = {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}
    return "Dask-Default-Threads" in threading.current_thread().name, threads


def busy_together(marker):
    """How many calls of this kind the process is in at this moment."""
    here = getattr(os, marker, 0) + 1
    setattr(os, marker, here)
    time.sleep(0.02)
    setattr(os, marker, getattr(os, marker) - 1)
    return here


def thread_name():
    time.sleep(0.01)
    return threading.current_thread().name


@pytest.fixture(scope="module")
def client():
    """Two workers of one thread each, one of them with a GPU as far as anybody knows."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", resources={"GPU": 1}
        ) as cluster,
        Client(cluster) as client,
    ):
        options = {k: v for k, v in cluster.worker_spec[0]["options"].items() if k != "resources"}
        cluster.worker_spec["plain"] = {**cluster.worker_spec[0], "options": options}
        cluster.sync(cluster._correct_state)
        client.wait_for_workers(2, timeout=30)
        yield client


@pytest.fixture
def always(monkeypatch):
    """Every quick round after the first goes by the lanes, however slow the machine."""
    monkeypatch.setattr(executors, "_QUICK_S", 1e9)
    monkeypatch.setattr(executors, "_SHOWN_EVERY_S", 1e9)


def tasks_seen(client, name):
    prefixes = client.run_on_scheduler(
        lambda dask_scheduler: {k: v.state_counts["memory"] for k, v in dask_scheduler.task_prefixes.items()}
    )
    return prefixes.get(name, 0)


def test_results_come_in_the_order_of_the_calls_and_all_workers_take_part(client):
    found = Lanes(client).start(slow_square, [(i,) for i in range(9)], resource=None).results(deadline_s=30)
    assert [found[i][1] for i in range(9)] == [i * i for i in range(9)]
    assert len({thread for thread, _ in found.values()}) == 2


def test_an_error_of_the_function_comes_home_as_it_is(client):
    for call, error in ((2, DataError), (3, FileNotFoundError)):
        lanes = Lanes(client)
        with pytest.raises(error):
            lanes.start(refuse, [(call,)], resource=None).results(deadline_s=30)
        assert lanes.available, "nothing is wrong with the way"


def test_calls_run_on_the_threads_of_the_worker_with_one_blas_thread(client):
    assert Lanes(client).start(where_it_runs, [()], resource=None).results(deadline_s=30) == {0: (True, {1})}


def test_no_worker_computes_with_more_threads_than_it_has(client):
    calls = [("_kme_test_counter",)] * 12
    counts = set(Lanes(client).start(busy_together, calls, resource=None).results(deadline_s=30).values())
    assert counts <= {1, 2}, "two workers of one thread each, here in one process"


def test_a_quick_round_leaves_the_scheduler_alone(client, always):
    executor = DaskExecutor(client)
    for i in range(5):
        assert executor.map(square, [(i,), (i + 1,)], name="hidden-square", quick=True) == [i * i, (i + 1) ** 2]
    assert tasks_seen(client, "hidden-square") == 2, "the first round, by which the others are judged"


def test_long_rounds_and_one_in_a_while_are_shown_as_tasks(client, monkeypatch):
    executor = DaskExecutor(client)
    monkeypatch.setattr(executors, "_QUICK_S", 0.0)
    for _ in range(3):
        executor.map(square, [(1,)], name="long-square", quick=True)
    assert tasks_seen(client, "long-square") == 3
    monkeypatch.setattr(executors, "_QUICK_S", 1e9)
    monkeypatch.setattr(executors, "_SHOWN_EVERY_S", 0.0)
    executor.map(square, [(1,)], name="long-square", quick=True)
    assert tasks_seen(client, "long-square") == 4


def test_what_a_dead_worker_took_with_it_is_done_by_tasks(always):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        executor = DaskExecutor(client)
        calls = [(i,) for i in range(6)]
        executor.map(slow_square, calls, name="slow", quick=True)
        assert executor._lanes.available
        victim = sorted(client.run(os.getpid).values())[0]
        threading.Timer(0.03, os.kill, (victim, signal.SIGKILL)).start()
        for _ in range(8):
            found = executor.map(slow_square, calls, name="slow", quick=True)
            assert [square for _, square in found] == [0, 1, 4, 9, 16, 25]
        # On a busy machine so much time may pass before the loss is noticed that lanes are tried again by now.
        assert executor._lanes._retry_at > 0, "it was noticed, and lanes are not used for a while"


def test_a_call_that_is_not_answered_in_time_is_missing(client):
    lanes = Lanes(client)
    assert lanes.start(square, [(3,)], resource=None).results(deadline_s=30) == {0: 9}
    assert lanes.start(time.sleep, [(1,)], resource=None).results(deadline_s=0.1) == {}
    assert not lanes.available


def test_workers_without_the_resource_are_passed_over(client):
    lanes = Lanes(client)
    assert len(set(lanes.start(thread_name, [()] * 6, resource=None).results(deadline_s=30).values())) == 2
    assert len(set(lanes.start(thread_name, [()] * 6, resource="GPU").results(deadline_s=30).values())) == 1
    assert lanes.start(square, [(3,)], resource="no such thing").results(deadline_s=30) == {}, "nobody may do it"
