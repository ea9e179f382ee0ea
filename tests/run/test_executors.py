"""Executors: the same results in the same order, whoever works and whatever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from distributed import Client, LocalCluster
from threadpoolctl import threadpool_info

from kme_dist.backend import available_cores, thread_count
from kme_dist.errors import DataError, RetryError
from kme_dist.run.executors import FAN_IN, DaskExecutor, SerialExecutor, aligned, tree_combine
from kme_dist.run.fit.additive import ordered


def square(x):
    return x * x


def nap(seconds, x):
    time.sleep(seconds)
    return x


def process_and_square(x):
    return os.getpid(), x * x


def refuse(x):
    if x == 3:
        raise DataError("row 3 is empty")
    return x


def unreadable(x):
    raise FileNotFoundError("no such chunk")


def blas_thread_counts():
    import scipy.linalg  # noqa: F401

    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def die_once(marker):
    """Kills its worker the first time, and works the second time."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang_once(marker):
    """Stops its whole process the first time, network and all, and works the second time."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    return os.getpid()


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


@pytest.fixture
def client(killable):
    return killable()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_the_tree_has_one_shape_for_each_count(count):
    shape = tree_combine([str(i) for i in range(count)], lambda a, b: f"({a}{b})" if count < 10 else f"({a} {b})")
    expected = {1: "0", 2: "(01)", 3: "((01)2)", 5: "(((01)(23))4)", 8: "(((01)(23))((45)(67)))"}
    assert shape == expected.get(count, shape)
    assert all(str(i) in shape for i in range(count)), "nothing is left out"


@pytest.mark.parametrize("direct", [False, True])
def test_results_come_in_the_order_of_the_calls(client, direct):
    calls = [(i,) for i in range(20)]
    expected = [i * i for i in range(20)]
    assert SerialExecutor().map(square, calls, name="square") == expected
    assert SerialExecutor(threads=3).map(square, calls, name="square") == expected
    assert DaskExecutor(client, direct=direct).map(square, calls, name="square") == expected


def test_arrays_that_came_by_wire_begin_where_their_type_wants_to():
    """NumPy multiplies unaligned arrays by another path, which rounds otherwise."""

    @dataclass(frozen=True)
    class Record:
        weights: np.ndarray
        parts: tuple

    bytes_of = np.zeros(81, np.uint8)
    crooked = bytes_of[1:].view(np.float64)
    assert not crooked.flags.aligned
    straight = np.ones(3)
    held = aligned([{"a": crooked}, (straight, Record(crooked, (crooked, 3))), "text"])
    assert held[0]["a"].flags.aligned
    assert held[1][0] is straight, "what is well is left alone"
    assert held[1][1].weights.flags.aligned
    assert held[1][1].parts[0].flags.aligned


def products_of(seed):
    return np.random.default_rng(seed).normal(size=(301, 7))


def test_results_of_workers_are_aligned(client):
    for found in DaskExecutor(client).map(products_of, [(i,) for i in range(8)], name="products"):
        assert found.flags.aligned


def meet(barrier, number):
    barrier.wait(timeout=60)  # passes only when as many calls as it waits for run at once
    return number, set(blas_thread_counts())


def test_threads_run_calls_at_once_each_with_one_thread_of_blas():
    barrier = threading.Barrier(3)
    calls = [(barrier, i) for i in range(6)]
    found = SerialExecutor(threads=3).map(meet, calls, name="meet")
    assert found == [(i, {1}) for i in range(6)]
    assert dict(SerialExecutor(threads=3).stream(meet, calls, name="meet")) == dict(enumerate(found))


def test_an_error_in_a_thread_is_raised_like_any_other():
    with pytest.raises(DataError):
        SerialExecutor(threads=2).map(refuse, [(i,) for i in range(6)], name="refuse")


@pytest.mark.parametrize(("limit", "expected"), [("", None), ("1", 1), ("1,2", 1), ("100000", None), ("none", None)])
def test_threads_follow_the_cores_and_the_usual_limit(limit, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert thread_count() == (expected or available_cores())


def test_both_executors_add_up_in_the_same_order(client):
    numbers = np.random.default_rng(0).normal(size=11) * 10.0 ** np.arange(11)
    calls = [(x,) for x in numbers]
    serial = SerialExecutor().map_reduce(square, calls, np.add, name="sum")
    assert SerialExecutor(threads=2).map_reduce(square, calls, np.add, name="sum") == serial
    assert DaskExecutor(client).map_reduce(square, calls, np.add, name="sum") == serial
    assert serial != sum(reversed([x * x for x in numbers])), "numbers for which the order shows"


def test_tasks_say_on_the_dashboard_what_they_do(client):
    executor = DaskExecutor(client)
    executor.map(square, [(1,), (2,)], name="rcb-gradient")
    executor.map_reduce(square, [(1,), (2,)], np.add, name="moments")
    prefixes = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.task_prefixes))
    assert {"rcb-gradient", "moments", "reduce-moments"} <= set(prefixes)


def test_a_round_leaves_nothing_behind(client):
    executor = DaskExecutor(client)
    for _ in range(3):
        executor.map(square, [(i,) for i in range(4)], name="square")
        executor.map_reduce(square, [(i,) for i in range(4)], np.add, name="sum")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
        if not left:
            break
        time.sleep(0.05)
    assert left == 0
    assert not client.futures


def test_an_error_of_the_function_comes_home_as_it_is(client):
    executor = DaskExecutor(client)
    with pytest.raises(DataError, match="row 3 is empty"):
        executor.map(refuse, [(i,) for i in range(5)], name="refuse")
    with pytest.raises(FileNotFoundError, match="no such chunk"):
        executor.map(unreadable, [(0,)], name="unreadable")
    assert executor.retried == 0, "it would fail again"


def test_blas_has_one_thread_on_workers_that_nobody_told(monkeypatch):
    import dask

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    two = {"OPENBLAS_NUM_THREADS": 2, "OMP_NUM_THREADS": 2, "MKL_NUM_THREADS": 2}
    with (
        dask.config.set({"distributed.nanny.pre-spawn-environ": two}),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        before = client.submit(blas_thread_counts).result()
        inside = DaskExecutor(client).map(blas_thread_counts, [()], name="threads")[0]
        assert set(inside) == {1}
        assert set(before) == {2}, "the test would show nothing"
    assert set(SerialExecutor().map(blas_thread_counts, [()], name="threads")[0]) == {1}


def test_a_killed_worker_is_replaced_and_its_call_made_again(client, tmp_path):
    calls = [(str(tmp_path / "marker"),)] * 3
    assert DaskExecutor(client).map(die_once, calls, name="die") == ["alive"] * 3


@pytest.mark.chaos(17, 19)
@pytest.mark.slow
def test_a_worker_that_hangs_is_noticed_and_its_call_made_elsewhere(client, tmp_path):
    client.wait_for_workers(2, timeout=30)
    executor = DaskExecutor(client, patience_s=1.0, attempts=30)
    executor.map(square, [(1,), (2,)], name="square")
    found = executor.map(hang_once, [(str(tmp_path / "marker"),)], name="hang")
    assert executor.retried == 1
    assert found[0] in client.run(os.getpid).values(), "a worker that is well answered"


@pytest.mark.chaos(17, 19)
@pytest.mark.slow
def test_a_round_of_many_tasks_may_take_longer_than_a_worker_may_be_silent(client):
    """See test_gathering.py for the same without a clock."""
    client.wait_for_workers(2, timeout=30)
    executor = DaskExecutor(client, patience_s=5.0, attempts=1)
    pids = client.run(os.getpid)
    for wanted in (executor.map, lambda *of, **named: executor.map_reduce(*of, max, **named)):
        executor.map(nap, [(0.0, 1)], name="nap")
        began = time.monotonic()
        wanted(nap, [(1.0, i) for i in range(20)], name="nap")
        assert time.monotonic() - began > 9.0, "twice as long as that"
    assert executor.retried == 0
    assert client.run(os.getpid) == pids, "nobody was restarted"


def test_how_long_a_task_may_take_is_known_by_its_name(client):
    executor = DaskExecutor(client, patience_s=1.0, attempts=1)
    executor.map(nap, [(0.0, 1)], name="quick")
    assert executor.map(nap, [(1.5, 1)], name="slow") == [1], "the first of its name has ten times as long"


@pytest.mark.parametrize("who", ["serial", "threads", "dask"])
def test_a_stream_gives_every_result_with_its_place_and_errors_as_results(client, who):
    executor = {"serial": SerialExecutor(), "threads": SerialExecutor(threads=3)}.get(who) or DaskExecutor(client)
    found = dict(executor.stream(refuse, [(i,) for i in range(30)], name="refuse"))
    assert isinstance(found.pop(3), DataError), "a failed call does not stop the others"
    assert found == {i: i for i in range(30) if i != 3}
    assert list(executor.stream(refuse, [], name="refuse")) == []


def test_a_stream_takes_no_more_calls_than_it_may_have_out(client):
    taken = []

    class Calls(list):
        def __iter__(self):
            for call in super().__iter__():
                taken.append(call)
                yield call

    calls = Calls((i,) for i in range(40))
    for count, (_, value) in enumerate(DaskExecutor(client).stream(square, calls, name="square", ahead=3), 1):
        assert value == int(value**0.5) ** 2
        assert len(taken) <= count + 3


@pytest.mark.chaos(17, 19)
@pytest.mark.parametrize("accident", [die_once, hang_once])
def test_a_stream_goes_on_when_a_worker_dies_or_hangs(client, tmp_path, accident):
    executor = DaskExecutor(client, patience_s=1.0, attempts=100)  # a busy machine is slow to start another worker
    list(executor.stream(square, [(1,)], name="square"))
    calls = [(str(tmp_path / f"marker{min(i, 1)}"),) for i in range(4)]
    for marker, *_ in calls[1:]:
        open(marker, "w").close()
    executor.patience_s = 0.2  # before anything has landed the wait is ten times as long
    found = dict(executor.stream(accident, calls, name="accident"))
    assert sorted(found) == [0, 1, 2, 3]
    assert not any(isinstance(value, Exception) for value in found.values())


def test_a_stream_that_is_left_early_leaves_nothing_behind(client):
    stream = DaskExecutor(client).stream(square, [(i,) for i in range(100)], name="square")
    next(stream)
    stream.close()
    wait_until(lambda: not client.processing() or not any(client.processing().values()))


@pytest.mark.chaos(5)
def test_a_call_that_kills_every_worker_is_given_up(client):
    executor = DaskExecutor(client, patience_s=10.0, attempts=1)
    for made in (executor.map, lambda *of, **named: list(ordered(executor, *of, **named))):
        with pytest.raises(RetryError, match="1 attempts") as caught:
            made(os.abort, [()], name="abort")
        assert caught.value.exit_code == 75


@pytest.mark.chaos(6)
def test_a_lost_scheduler_is_named():
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        executor = DaskExecutor(client, patience_s=0.1)
        executor.map(square, [(1,)], name="square")
        cluster.close()
        with pytest.raises(RetryError, match=r"scheduler at .* was lost"):
            executor.map(square, [(1,)], name="square")


@pytest.mark.parametrize("count", range(1, 70))
def test_tasks_of_several_neighbours_build_the_tree_of_pairs(count):
    def join(left, right):
        return f"({left} {right})"

    level = [str(i) for i in range(count)]
    expected = tree_combine(level, join)
    while len(level) > 1:
        level = [tree_combine(level[i : i + FAN_IN], join) for i in range(0, len(level), FAN_IN)]
    assert level == [expected]


def test_a_reduction_on_workers_has_the_bits_of_the_tree(client):
    numbers = np.random.default_rng(1).normal(size=37) * 10.0 ** np.random.default_rng(2).integers(-8, 8, 37)
    calls = [(x,) for x in numbers]
    assert DaskExecutor(client).map_reduce(square, calls, np.add, name="sum") == tree_combine(numbers**2, np.add)
