"""The model of cost: more rows cost more, more workers less, and the bottleneck moves where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kme_dist.errors import ConfigError
from kme_dist.run.fit import SOLVERS, Size
from kme_dist.run.scaling_model import (
    TERMS,
    Machine,
    Pass,
    Stage,
    estimate,
    reduction_depth,
    reduction_tasks,
    scheduled_tasks,
)

MACHINE = Machine()


def stage(*passes, rows=10**6):
    return Stage("fit", rows, passes, worker_bytes=10**9)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_every_solver_costs_more_with_more_rows_and_no_more_time_with_more_workers(solver):
    def seconds(rows, workers):
        return estimate(stage(*SOLVERS[solver].passes(Size(rows, 7, 2_000))), MACHINE, workers).seconds

    by_rows = [seconds(rows, 4) for rows in (10**4, 10**5, 10**6, 10**7)]
    assert by_rows == sorted(by_rows)
    assert by_rows[0] < by_rows[-1]
    by_workers = [seconds(10**6, workers) for workers in (1, 2, 8, 64, 1024)]
    assert by_workers == sorted(by_workers, reverse=True)


@pytest.mark.parametrize("solver", ["nystrom", "falkon", "features"])
def test_a_fit_over_all_rows_reads_them_as_often_as_it_passes_over_them(solver):
    size = Size(10**6, 7, 5_000, width=54)
    found = estimate(stage(*SOLVERS[solver].passes(size)), MACHINE, 8)
    once = 10**6 * 54 * 4
    passes = {"falkon": 13.015, "nystrom": 1.015, "features": 1}[solver]  # centres are chosen from a sample
    assert found.bytes_read == pytest.approx(passes * once, rel=1e-6)


def test_each_term_can_be_the_bottleneck():
    works = {
        "reading": Pass(1000, read_bytes=1e13),
        "compute": Pass(1000, flops=1e16),
        "scheduler": Pass(10**6),
        "reduction": Pass(1000, result_bytes=1e10),
        "driver": Pass(1000, driver_bytes=1e13),
    }
    for name, work in works.items():
        assert estimate(stage(work), MACHINE, 100).bottleneck == name
    assert set(works) == set(TERMS)


def test_the_scheduler_becomes_the_bottleneck_when_workers_are_many_and_tasks_short():
    work = Pass(10**6, flops=10**6 * 0.5 * MACHINE.product_flops_per_s)  # tasks of half a second
    names = [estimate(stage(work), MACHINE, workers).bottleneck for workers in (1, 100, 10_000)]
    assert names == ["compute", "compute", "scheduler"]
    assert estimate(stage(replace(work, streamed=True)), MACHINE, 10_000).bottleneck == "compute", "fewer, larger tasks"


def test_short_calls_of_a_stream_share_tasks():
    work = Pass(10_000, streamed=True)
    assert scheduled_tasks(work, seconds=1e4) == 10_000
    assert scheduled_tasks(work, seconds=10.0) == 500
    assert scheduled_tasks(replace(work, streamed=False), seconds=10.0) == 10_000


def test_the_driver_becomes_the_bottleneck_of_predictions_when_workers_are_many():
    work = Pass(10**6, compute_s=10**6 * 0.5, streamed=True, published=10**6)
    found = [estimate(stage(work), replace(MACHINE, publish_s=1e-3), workers) for workers in (100, 10_000)]
    assert [one.bottleneck for one in found] == ["compute", "driver"]
    assert found[1].seconds == pytest.approx(1e3, rel=0.1), "the workers go on meanwhile"


def test_time_falls_in_whole_turns():
    work = Pass(10, compute_s=10.0)
    ideal = replace(MACHINE, task_s=1e-12, scheduler_task_s=1e-12, driver_task_s=1e-12)
    found = [estimate(stage(work), ideal, workers).seconds for workers in (1, 5, 6, 9, 10, 100)]
    assert found == pytest.approx([10, 2, 2, 2, 1, 1])


@pytest.mark.parametrize(("tasks", "depth", "joins"), [(1, 0, 0), (4, 1, 1), (5, 2, 3), (16, 2, 5), (17, 3, 8)])
def test_the_reduction_is_that_of_the_executor(tasks, depth, joins):
    assert (reduction_depth(tasks), reduction_tasks(tasks)) == (depth, joins)


def test_constants_are_checked():
    assert Machine.from_mapping({"exp_s": 1e-9}).exp_s == 1e-9
    with pytest.raises(ConfigError, match="'exp' is unknown"):
        Machine.from_mapping({"exp": 1e-9})
    with pytest.raises(ConfigError, match="must be a positive number"):
        Machine.from_mapping({"exp_s": 0})
    with pytest.raises(ConfigError, match="workers=0"):
        estimate(stage(Pass(1)), MACHINE, 0)
