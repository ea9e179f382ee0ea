"""What learning, fitting and predicting cost on any number of workers: arithmetic on counts and measured constants.

    machine = Machine()                                        # or as measured: `kme_dist.run.machine`
    stage = Stage("predict", rows, (Pass(tasks=4000, read_bytes=2e11, flops=1e15, exps=1e12),), worker_bytes=2e9)
    estimate(stage, machine, workers=100).bottleneck           # "compute"

A stage is a sequence of passes. A pass is a number of tasks that do not depend on each other, and then a reduction of
their results by the tree of `kme_dist.run.executors`; it may be repeated. Its time is

    max(reading + compute, scheduler, driver per task and chunk) + reduction + driver

where reading and compute are divided by the workers (in whole turns), the scheduler spends a fixed time on each task,
and what is done once is not divided by anything. The largest of the five terms is the bottleneck.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kme_dist.errors import ConfigError
from kme_dist.run.executors import FAN_IN
from kme_dist.run.streams import MOST_CALLS, TASKS_PER_S

PROCESS_BYTES = 300 << 20  # of a worker with Python and all libraries, before any data
TERMS = ("reading", "compute", "scheduler", "reduction", "driver")


@dataclass(frozen=True)
class Machine:
    """Speed of one worker with one thread, of the scheduler and of the driver. The defaults were measured on one core
    of a server with AVX2; `kme-dist plan --measure` prints those of this machine."""

    read_bytes_per_s: float = 4e8  # stored rows, decoded and verified
    product_flops_per_s: float = 6e10  # matrix products in single precision
    factor_flops_per_s: float = 2e10  # Cholesky factorisation in double precision
    exp_s: float = 2e-9  # one kernel value from its exponent
    sum_value_s: float = 1e-8  # one kernel value of a sum over rows, in double precision
    sum_flops_per_s: float = 5e10  # products of kernel values in a sum over rows
    row_value_s: float = 2e-8  # one number of a row that is predicted, or of its outputs: scaled, calibrated, stored
    scheduler_task_s: float = 1.3e-3  # of the scheduler's core, for one task
    driver_task_s: float = 0.5e-3
    publish_s: float = 1e-3  # of the driver, which gives the files of a predicted chunk their names
    task_s: float = 3e-3  # of the worker's core, for one task
    round_s: float = 2e-3  # a round of learning, beyond its batches
    message_s: float = 1e-3  # and for every batch in it
    reduce_bytes_per_s: float = 2e8  # results moved to another worker and added
    scratch_bytes_per_s: float = 5e8  # arrays that the driver fetches from the scratch folder and adds

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Machine:
        """From a JSON file: any of the constants; ConfigError for unknown or impossible ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key, value in given.items():
            if key not in known:
                raise ConfigError(f"machine: {key!r} is unknown; constants: {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"machine: {key} is {value!r}; it must be a positive number")
        return cls(**{key: float(value) for key, value in given.items()})


@dataclass(frozen=True)
class Pass:
    """Tasks that run at the same time, all counts of all of them together; `repeats` times one after the other."""

    tasks: int
    read_bytes: float = 0.0
    flops: float = 0.0  # of matrix products
    factor_flops: float = 0.0
    exps: float = 0.0
    sum_values: float = 0.0  # kernel values of sums over rows
    sum_flops: float = 0.0
    row_values: float = 0.0  # numbers of rows that are predicted, and of their outputs
    compute_s: float = 0.0  # measured instead of counted
    result_bytes: float = 0.0  # of one task, reduced by the tree
    driver_bytes: float = 0.0  # fetched by the driver from the scratch folder
    driver_s: float = 0.0  # done by the driver alone
    published: int = 0  # chunks that the driver makes visible while the workers go on
    repeats: int = 1
    streamed: bool = False  # by `kme_dist.run.streams`, which makes several calls per task if they are short
    messages: bool = False  # sent straight to the workers: no tasks of the scheduler


@dataclass(frozen=True)
class Stage:
    """A stage of a run, in passes."""

    name: str
    rows: int
    passes: tuple[Pass, ...]
    worker_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a stage costs on some number of workers."""

    stage: str
    seconds: float
    bottleneck: str
    terms: dict[str, float]  # seconds by name: see TERMS
    bytes_read: int
    worker_bytes: int
    tasks: int
    scheduler_seconds: float
    reduction_depth: int
    worker_hours: float
    worker_hours_per_billion_rows: float
    note: str = ""


def reduction_depth(tasks: int) -> int:
    """Tasks one after the other from a result to the total."""
    depth = 0
    while tasks > 1:
        tasks, depth = -(-tasks // FAN_IN), depth + 1
    return depth


def reduction_tasks(tasks: int) -> int:
    total = 0
    while tasks > 1:
        tasks = -(-tasks // FAN_IN)
        total += tasks
    return total


def reduction_s(tasks: int, result_bytes: float, machine: Machine, workers: int) -> float:
    """Level by level: a task of it receives and adds up to `FAN_IN` - 1 results of other workers."""
    total, level = 0.0, tasks
    while level > 1:
        joined = min(FAN_IN, level) - 1
        level = -(-level // FAN_IN)
        total += -(-level // workers) * (joined * result_bytes / machine.reduce_bytes_per_s + machine.task_s)
    return total


def scheduled_tasks(work: Pass, seconds: float) -> int:
    """Tasks of one repeat, with those of the reduction, if the workers are busy for `seconds`."""
    tree = reduction_tasks(work.tasks) if work.result_bytes else 0
    if not work.streamed or not seconds:
        return work.tasks + tree
    together = min(MOST_CALLS, math.ceil(work.tasks / (seconds * TASKS_PER_S)))
    return -(-work.tasks // max(1, together)) + tree


def pass_terms(work: Pass, machine: Machine, workers: int) -> dict[str, float]:
    """Seconds of one repeat, by name."""
    # Tasks are equal: the slowest worker runs one more than the others.
    share = -(-work.tasks // workers) / max(1, work.tasks)
    computed = (
        work.flops / machine.product_flops_per_s
        + work.factor_flops / machine.factor_flops_per_s
        + work.exps * machine.exp_s
        + work.sum_values * machine.sum_value_s
        + work.sum_flops / machine.sum_flops_per_s
        + work.row_values * machine.row_value_s
        + work.compute_s
        + work.tasks * machine.task_s * (not work.messages)
    )
    reading = share * work.read_bytes / machine.read_bytes_per_s
    tasks = scheduled_tasks(work, reading + share * computed)
    sent = machine.round_s + work.tasks * machine.message_s if work.messages else tasks * machine.driver_task_s
    sent += work.published * machine.publish_s
    reduced = reduction_s(work.tasks, work.result_bytes, machine, workers) if work.result_bytes else 0.0
    return {
        "reading": reading,
        "compute": share * computed,
        "scheduler": 0.0 if work.messages else tasks * machine.scheduler_task_s,
        "reduction": reduced,
        "driver": sent + work.driver_bytes / machine.scratch_bytes_per_s + work.driver_s,
    }


def pass_seconds(work: Pass, terms: Mapping[str, float]) -> float:
    """One repeat: sending tasks overlaps with their work, except the messages of a round, which is waited for."""
    overlapping = max(terms["reading"] + terms["compute"], terms["scheduler"])
    if work.messages:
        return overlapping + terms["reduction"] + terms["driver"]
    alone = work.driver_s
    return max(overlapping, terms["driver"] - alone) + terms["reduction"] + alone


def estimate(stage: Stage, machine: Machine, workers: int) -> Estimate:
    """The cost of a stage on `workers` workers of one thread each."""
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be an integer >= 1")
    totals, seconds, tasks = dict.fromkeys(TERMS, 0.0), 0.0, 0
    for work in stage.passes:
        found = pass_terms(work, machine, workers)
        totals = {name: totals[name] + work.repeats * found[name] for name in TERMS}
        seconds += work.repeats * pass_seconds(work, found)
        tasks += work.repeats * scheduled_tasks(work, found["reading"] + found["compute"])
    hours = seconds * workers / 3600
    return Estimate(
        stage=stage.name,
        seconds=seconds,
        bottleneck=max(TERMS, key=lambda name: totals[name]) if any(totals.values()) else "none",
        terms=totals,
        bytes_read=int(sum(work.repeats * work.read_bytes for work in stage.passes)),
        worker_bytes=stage.worker_bytes,
        tasks=tasks,
        scheduler_seconds=totals["scheduler"],
        reduction_depth=max((reduction_depth(w.tasks) for w in stage.passes if w.result_bytes), default=0),
        worker_hours=hours,
        worker_hours_per_billion_rows=hours * 1e9 / max(1, stage.rows),
        note=stage.note,
    )
