"""Results whose worker dies between the end of a task and the fetch of its result: noticed within seconds.

The settings here are those of a patient cluster: connections are retried for minutes, and the driver would wait just as
long for a worker that is gone. Each test forces the moment: the worker that holds a finished result is stopped, so that
a fetch from it begins and does not end, and then killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import dask
import numpy as np
import pytest
import yaml
from dask.utils import parse_timedelta
from distributed.core import Status

from kme_dist.ops.cluster import DASK_SETTINGS
from kme_dist.run import gathering
from kme_dist.run.executors import DaskExecutor

PATIENT = {
    "distributed.comm.retry.count": 30,
    "distributed.comm.timeouts.connect": "5s",  # workers fetch from each other without retries
    "distributed.scheduler.allowed-failures": 100,
}
NEVER_S = 1e6  # no deadline of a hung worker helps here


def cube(x):
    return x**3


@pytest.fixture(scope="module", autouse=True)
def patience():
    with dask.config.set(PATIENT):
        yield


@pytest.fixture
def client(patience, killable):
    return killable()


def both_are_well(client):
    """A worker that is killed while it starts is not replaced by its nanny."""
    nannies = client.cluster.workers.values()
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return len(workers) == 2 and all(nanny.status == Status.running for nanny in nannies)


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_finished(client, count):
    states = [state.status for state in client.futures.values()]
    return states == ["finished"] * count


def knows(key, dask_scheduler):
    return key in dask_scheduler.tasks


def process_of_a_holder(client):
    """The process of a worker that holds a finished result which nobody has fetched."""
    until(lambda: client.futures and any(state.status == "finished" for state in client.futures.values()))
    holders = []

    def found():  # by one question: results of a reduction are released as soon as they are added up
        holders[:] = [worker for workers in client.who_has().values() for worker in workers]
        return holders

    until(found)
    return client.run(os.getpid, workers=holders[:1])[holders[0]]


def die_during_the_fetch(process, delay=0.3):
    os.kill(process, signal.SIGSTOP)
    timer = threading.Timer(delay, os.kill, (process, signal.SIGKILL))
    timer.start()
    return timer


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_round_survives_the_death_of_a_worker_that_holds_a_result(killable, direct, kills):
    for _ in range(kills):
        client = killable()
        executor = DaskExecutor(client, patience_s=NEVER_S, direct=direct)
        executor.map(cube, [(i,) for i in range(4)], name="warm-up")  # opens the connections
        started = executor.start(cube, [(i,) for i in range(6)], name="cube")
        until(partial(is_finished, client, 6))
        die_during_the_fetch(process_of_a_holder(client))
        assert started.results() == [i**3 for i in range(6)]
        assert executor.retried == 0, "Dask recomputes what was lost; the driver asks for it in the right place"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_stream_survives_it_and_gives_every_result_once(client, direct, kills):
    executor = DaskExecutor(client, patience_s=NEVER_S, direct=direct, attempts=100)
    victims = []
    fetch = executor.fetch

    def fetch_and_die(futures):
        if len(victims) < kills and both_are_well(client):
            victims.append(process_of_a_holder(client))
            die_during_the_fetch(victims[-1])
        return fetch(futures)

    executor.fetch = fetch_and_die
    found = list(executor.stream(slow_cube, [(i,) for i in range(20 if kills == 1 else 400)], name="cube"))
    assert len(victims) == kills
    assert sorted(found) == [(i, i**3) for i in range(len(found))]
    assert len(found) in (20, 400)


def slow_cube(x):
    time.sleep(0.05)
    return x**3


@pytest.mark.chaos(3)
@pytest.mark.parametrize("sticky", [False, True])
def test_a_reduction_has_the_same_bits_when_its_result_dies_with_its_worker(client, sticky):
    numbers = np.random.default_rng(1).normal(size=11) * 10.0 ** np.arange(-5, 6)
    executor = DaskExecutor(client, patience_s=NEVER_S)
    calm = executor.map_reduce(cube, [(x,) for x in numbers], np.add, name="sum", sticky=sticky)
    wait = executor.client.sync
    killed = []

    def sync(function, *arguments, **options):
        if function is gathering.gather_from_live and not killed:
            killed.append(process_of_a_holder(client))
            die_during_the_fetch(killed[0])
        return wait(function, *arguments, **options)

    executor.client.sync = sync
    try:
        assert executor.map_reduce(cube, [(x,) for x in numbers], np.add, name="sum", sticky=sticky) == calm
    finally:
        del executor.client.sync
    assert killed


def test_a_result_that_dask_has_recomputed_in_the_meantime_is_not_waited_for(client, monkeypatch):
    """Lost and there again between two looks of the driver: nobody watches the future any more."""
    executor = DaskExecutor(client, patience_s=NEVER_S)
    real, lost = executor.outcome, []

    def outcome(future, otherwise):
        if not lost:
            lost.append(future)
            future._state.lose()  # as the scheduler tells when a worker dies
            threading.Timer(0.2, client.loop.add_callback, (future._state.finish,)).start()
            return otherwise
        return real(future, otherwise)

    executor.outcome = outcome
    assert dict(executor.stream(cube, [(i,) for i in range(3)], name="cube", ahead=1)) == {0: 0, 1: 1, 2: 8}
    assert lost


def test_a_task_that_the_scheduler_has_forgotten_is_sent_again(client):
    executor = DaskExecutor(client, patience_s=NEVER_S)
    started = executor.start(cube, [(2,), (3,)], name="cube")
    until(partial(is_finished, client, 2))
    key = next(iter(client.futures))
    client._send_to_scheduler({"op": "client-releases-keys", "keys": [key], "client": client.id})
    until(lambda: not client.run_on_scheduler(knows, key=key))
    assert started.results() == [8, 27]
    assert executor.retried >= 1


def test_workers_give_up_the_address_of_a_dead_one_soon_wherever_the_cluster_runs():
    """What one worker fetches from another is not seen by the driver: there it is the settings."""
    deployed = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "dask.yaml").read_text())["distributed"]["comm"]
    started = {name.removeprefix("distributed.comm."): value for name, value in DASK_SETTINGS.items()}
    for connect, retries in (
        (deployed["timeouts"]["connect"], deployed["retry"]["count"]),
        (started["timeouts.connect"], started["retry.count"]),
    ):
        assert parse_timedelta(connect) * (1 + retries) <= 20.0


# --- stalled workers ---------------------------------------------------------------------------------


class Watched:
    """A client whose workers hold what `holding` says when they are looked at for the n-th time; until `looks`."""

    def __init__(self, holding, looks, monkeypatch):
        self.holding, self.looks, self.looked = holding, looks, 0
        self.scheduler = self

        async def gather(client, futures, direct):
            while self.looked < looks:
                await asyncio.sleep(0.001)
            return ["result"]

        monkeypatch.setattr(gathering, "gather", gather)

    async def processing(self, workers):
        self.looked += 1
        return self.holding(self.looked)

    def wait(self, limit_s=0.02):
        return asyncio.run(gathering.gather_from_live(self, [], False, "ours", limit_s))


def test_a_round_lasts_as_long_as_its_workers_get_on(monkeypatch):
    client = Watched(lambda n: {"a": [f"task-{n}-ours"], "b": [f"task-{n}-ours", "of another"]}, 50, monkeypatch)
    assert client.wait() == ["result"], "fifty looks are twelve times the limit"


def test_a_worker_that_holds_the_same_tasks_is_stalled_and_named(monkeypatch):
    client = Watched(lambda n: {"a": [f"task-{n}-ours"], "b": ["task-0-ours"], "c": ["of another"]}, 10**9, monkeypatch)
    with pytest.raises(gathering.Stalled) as caught:
        client.wait()
    assert caught.value.workers == ("b",)


def test_tasks_that_no_worker_takes_are_given_up(monkeypatch):
    with pytest.raises(gathering.Stalled, match="any worker") as caught:
        Watched(lambda n: {"c": ["of another"]}, 10**9, monkeypatch).wait()
    assert caught.value.workers == ()
