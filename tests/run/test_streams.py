"""Streams: how many calls a task makes, and that the results do not depend on it."""

from __future__ import annotations

import pytest

from kme_dist.errors import DataError
from kme_dist.run import streams
from kme_dist.run.executors import DaskExecutor
from kme_dist.run.streams import TASKS_PER_S, calls_per_task


def odd_only(x):
    if x % 10 == 4:
        raise DataError(f"row {x} is empty")
    return 2 * x


def test_a_task_makes_one_call_while_the_scheduler_keeps_up():
    assert calls_per_task(workers=2, call_s=0.1, elapsed_s=1e4, before=1) == 1
    assert calls_per_task(workers=int(TASKS_PER_S), call_s=1.0, elapsed_s=1e4, before=1) == 1
    assert calls_per_task(workers=500, call_s=0.0, elapsed_s=0.0, before=1) == 1, "nothing is known yet"


def test_many_workers_with_short_calls_get_several_per_task_in_steps():
    found = [1]
    while len(found) < 10:
        found.append(calls_per_task(workers=1000, call_s=0.5, elapsed_s=1e4, before=found[-1]))
    assert found[:4] == [1, 2, 4, 8]
    assert found[-1] == 40, "1,000 workers with tasks of 20 s finish 50 tasks a second"


def test_a_task_of_several_calls_is_short_against_the_run():
    assert calls_per_task(workers=1000, call_s=0.5, elapsed_s=10.0, before=64) == 1
    assert calls_per_task(workers=1000, call_s=0.5, elapsed_s=100.0, before=64) == 10


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
