"""Counting on workers: every task, every kind of work, and next to nothing where nobody counts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kme_dist import kernels, meter
from kme_dist.backend import cholesky
from kme_dist.errors import NumericalError
from kme_dist.meter import metered, observed
from kme_dist.run import executors


class Counting:
    def __init__(self):
        self.calls, self.stages = [], []

    def call(self, name, seconds, result, *, failed):
        self.calls.append((name, result, failed))

    def stage(self, name, seconds):
        self.stages.append((name, seconds))


@pytest.fixture
def counting():
    counts = Counting()
    meter.register(counts)
    yield counts
    meter.unregister(counts)


def halved(x):
    with metered("reduce"):
        return 1 / x


def test_calls_are_counted_where_somebody_counts(counting):
    assert observed(halved, (2,)) == 0.5
    with pytest.raises(ZeroDivisionError):
        observed(halved, (0,))
    meter.unregister(counting)
    assert observed(halved, (4,)) == 0.25
    assert counting.calls == [("halved", 0.5, False), ("halved", None, True)]
    assert [name for name, _ in counting.stages] == ["reduce"], "failed stages are not reported"


def test_every_task_of_an_executor_is_counted(counting):
    assert executors.run_call(halved, (), 2) == 0.5, "also with what it is fed"
    executors._combine_task(max, [1, 2])
    assert counting.calls == [("halved", 0.5, False), ("reduced", None, False)], "rows that are joined are not new"
    assert [name for name, _ in counting.stages] == ["reduce", "reduce"]


def test_a_block_inside_another_counts_for_itself_alone(counting):
    with metered("reduce"):
        with metered("gram"):
            time.sleep(0.05)
        with pytest.raises(KeyError), metered("write"):
            raise KeyError
    seconds = dict(counting.stages)
    assert list(seconds) == ["gram", "reduce"]
    assert seconds["gram"] >= 0.05
    with metered("read"):
        pass
    assert counting.stages[-1][0] == "read", "a block that failed leaves nothing behind"


def test_the_time_of_a_block_is_without_that_of_the_blocks_inside_it(counting, monkeypatch):
    ticks = iter([0.0, 1.0, 4.0, 5.0])
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(ticks))
    with metered("reduce"), metered("gram"):
        pass
    monkeypatch.undo()
    assert counting.stages == [("gram", 3.0), ("reduce", 2.0)]


def test_where_nobody_counts_nothing_is_kept():
    assert metered("gram") is metered("read"), "no object is made"
    assert observed(halved, (2,)) == 0.5


def test_gram_tiles_of_every_kernel_and_factorisations_are_told_apart(counting):
    class Own(kernels.Kernel):
        def evaluate(self, X, X2, out=None):
            return X @ X2.T

        def diag(self, X):
            return (X * X).sum(axis=1)

    X = np.eye(3)
    for kernel in (kernels.Gaussian(length_scale=1.0), kernels.Gaussian() + kernels.Linear(), Own()):
        counting.stages.clear()
        kernel.gram(X, X + 1)
        assert {name for name, _ in counting.stages} == {"gram"}, kernel
    counting.stages.clear()
    cholesky(np.asfortranarray(X)).inverse_diagonal()
    with pytest.raises(NumericalError):
        cholesky(-np.asfortranarray(X))
    assert [name for name, _ in counting.stages] == ["factorise", "factorise"]
