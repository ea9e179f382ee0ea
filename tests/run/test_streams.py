"""Streams: how many calls a task makes, and that the results do not depend on it."""

from __future__ import annotations

import heapq
import time

import pytest

from kme_dist.errors import DataError
from kme_dist.run import streams
from kme_dist.run.executors import DaskExecutor
from kme_dist.run.streams import TASKS_PER_S, calls_per_task


def odd_only(x):
    if x % 10 == 4:
        raise DataError(f"row {x} is empty")
    return 2 * x


def short(x):
    time.sleep(0.01)
    return x


class Counted:
    """Calls that are made one by one."""

    def __init__(self, count):
        self.count, self.made = count, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        for i in range(self.count):
            self.made += 1
            yield (i,)


def test_a_task_makes_one_call_while_the_scheduler_keeps_up():
    assert calls_per_task(workers=2, call_s=0.1, left=10**6, before=1) == 1
    assert calls_per_task(workers=int(TASKS_PER_S), call_s=1.0, left=10**6, before=1) == 1
    assert calls_per_task(workers=500, call_s=0.0, left=10**6, before=1) == 1, "nothing is known yet"


def test_many_workers_with_short_calls_get_several_per_task_in_steps():
    found = [1]
    while len(found) < 10:
        found.append(calls_per_task(workers=1000, call_s=0.5, left=10**6, before=found[-1]))
    assert found[:4] == [1, 2, 4, 8]
    assert found[-1] == 40, "1,000 workers with tasks of 20 s finish 50 tasks a second"


def test_towards_the_end_tasks_make_fewer_calls_so_that_no_worker_ends_late():
    """Workers take the next task as they become free: none is late by more than its last task."""
    left, free_at, sizes = 15_000, [0.0] * 500, []
    while left:
        sizes.append(min(left, calls_per_task(workers=500, call_s=2.0, left=left, before=64)))
        left -= sizes[-1]
        heapq.heapreplace(free_at, free_at[0] + 2.0 * sizes[-1])
    assert sizes[0] == 5
    assert sizes[-500:] == [1] * 500
    assert sizes == sorted(sizes, reverse=True)
    assert max(free_at) - min(free_at) <= 2.0


@pytest.mark.parametrize("per_task", [1, 4])
def test_every_call_has_its_own_result_or_error_however_they_are_grouped(killable, monkeypatch, per_task):
    made = []
    monkeypatch.setattr(streams, "calls_per_task", lambda *_: made.append(per_task) or per_task)
    found = dict(DaskExecutor(killable()).stream(odd_only, [(i,) for i in range(41)], name="odd"))
    assert made, "the rule was asked"
    assert sorted(found) == list(range(41))
    for i, result in found.items():
        if i % 10 == 4:
            assert isinstance(result, DataError)
            assert str(result) == f"row {i} is empty"
        else:
            assert result == 2 * i


def test_a_run_of_many_short_calls_sends_few_tasks_and_takes_calls_as_it_sends_them(killable, monkeypatch):
    """With a scheduler that manages four tasks a second, calls of 10 ms are sent many at a time, to the last one."""
    monkeypatch.setattr(streams, "TASKS_PER_S", 4.0)
    executor, calls, sent = DaskExecutor(killable()), Counted(600), []
    submit = executor.submit_calls

    def submitted(function, groups, name):
        sent.extend(map(len, groups))
        assert calls.made == sum(sent), "none is made before it is sent"
        return submit(function, groups, name)

    monkeypatch.setattr(executor, "submit_calls", submitted)
    found = dict(executor.stream(short, calls, name="short"))
    assert found == {i: i for i in range(600)}
    assert sum(sent) == 600
    assert max(sent) > 1
    assert sent[-1] == 1
