"""`kme-dist plan CONFIG`: what `kme-dist learn` would do, before it does it.

Prints batches and steps, the memory of one worker, and the time it will take, estimated from a few batches that are
read and computed here. Refuses what cannot fit the memory of a worker.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from kme_dist.backend import free_bytes
from kme_dist.config import ClusterConfig, Config
from kme_dist.core import optim
from kme_dist.data.dataset import CACHE_BYTES
from kme_dist.data.ingest import parse_bytes
from kme_dist.errors import ConfigError
from kme_dist.ops.cluster import worker_count
from kme_dist.pipelines.learn import Task, prepare
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.learn import Batches, batch_gradient, kernel_batches
from kme_dist.run.learners import KernelLearner

PROCESS_BYTES = 260 << 20  # a worker with NumPy, SciPy, Zarr and Dask loaded, before it has any work
ROUND_S = 0.02  # what a round costs beyond its batches, on a local cluster
MATRICES = {"rcb": 1, "erm": 1, "validation": 2, "loo": 4}  # n x n at a time, by objective
CALIBRATION_BATCHES = 3


def run(config: Config, *, calibrate: bool = True) -> dict[str, Any]:
    """The plan as plain facts. ConfigError where one batch does not fit a worker."""
    task = prepare(config)
    workers, limit = _workers(config.cluster)
    if task.features is not None:
        return _full(task, workers, limit, calibrate)
    job = kernel_batches(task.data, task.settings, **task.common)
    needed = worker_bytes(job, task)
    if limit is not None and needed > limit:
        raise ConfigError(
            f"learn.batch_size {job.plan.batch_size} needs {needed / 1e9:.2f} GB on a worker, which has "
            f"{limit / 1e9:.2f} GB: take batches of {_largest_batch(limit, job, task)} rows or fewer, or fewer workers "
            "with more memory (cluster.workers, cluster.memory)"
        )
    steps, per_step = task.settings.steps, task.batches_per_step
    facts: dict[str, Any] = {
        "data": task.data.path,
        "rows": job.plan.rows,
        "features": task.data.features,
        "classes": task.data.n_classes,
        "batch_size": job.plan.rows_per_batch,
        "reading": job.plan.mode,
        "batches_per_epoch": job.plan.steps_per_epoch,
        "mode": task.mode,
        "steps": steps,
        "batches_per_step": per_step,
        "rounds": steps // (task.local_steps or 1),
        "tasks": steps * per_step,
        "epochs": round(steps * per_step / job.plan.steps_per_epoch, 2),
        "workers": workers,
        "worker_bytes": needed,
        "worker_limit_bytes": limit,
        "bytes_read": steps * per_step * job.plan.rows_per_batch * task.data.features * task.data.dtype.itemsize,
    }
    if calibrate and steps:
        batch_s = _calibrated(job, task)
        turns = -(-per_step // workers)  # batches that one worker goes through in a step
        round_s = ROUND_S if config.cluster.kind != "serial" else 0.0
        rounds_s = steps * turns * batch_s + facts["rounds"] * round_s
        facts |= {"seconds_per_batch": _two_digits(batch_s), "estimated_seconds": _two_digits(rounds_s)}
    return facts


def worker_bytes(job: Batches, task: Task) -> int:
    """The most that one worker holds: itself, its chunk caches, and one batch with its Gram matrices.

    A batch that fails in single precision is done again in double, which is the worst case counted here.
    """
    return PROCESS_BYTES + 2 * CACHE_BYTES + _batch_bytes(job.plan.rows_per_batch, job, task)


def _batch_bytes(rows: int, job: Batches, task: Task) -> int:
    size = np.dtype(job.rows.dtype).itemsize
    square = size * MATRICES[task.settings.objective] + (8 if size < 8 else 0)
    return int(rows * rows * square + rows * task.data.features * 4 * 8 + rows * task.data.n_classes * 8 * 8)


def _largest_batch(limit: int, job: Batches, task: Task) -> int:
    low, high = 1, job.plan.rows_per_batch
    while low < high:
        middle = (low + high + 1) // 2
        fits = PROCESS_BYTES + 2 * CACHE_BYTES + _batch_bytes(middle, job, task) <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _workers(settings: ClusterConfig) -> tuple[int, int | None]:
    """How many workers there will be and the memory of each; None where only the running cluster knows."""
    workers = worker_count(settings) if settings.kind in ("serial", "local") else settings.workers or 1
    if settings.memory is not None:
        try:
            return workers, parse_bytes(settings.memory)
        except ValueError:
            raise ConfigError(f"cluster.memory is {settings.memory!r}; give bytes such as 2GiB") from None
    return workers, free_bytes("numpy") // workers if settings.kind in ("serial", "local") else None


def _full(task: Task, workers: int, limit: int | None, calibrate: bool) -> dict[str, Any]:
    """Of exact gradients: three passes over all rows in every step."""
    assert task.features is not None  # what the mode is about
    rows, chunk = task.data.split_rows(task.split), task.data.chunk_rows
    began = time.perf_counter()
    X = np.zeros((min(chunk, rows), task.data.features), task.dtype)
    Z = np.asarray(task.features.forward(X), np.float64)
    Z.T @ Z
    chunk_s = 6 * (time.perf_counter() - began)  # three passes, the last of them about as long as the others together
    width, chunks = Z.shape[1], -(-rows // chunk)
    needed = PROCESS_BYTES + 2 * CACHE_BYTES + task.cache_bytes + 4 * Z.nbytes + 4 * 8 * width * width
    if limit is not None and needed > limit:
        raise ConfigError(
            f"{width} features need {needed / 1e9:.2f} GB on a worker, which has {limit / 1e9:.2f} GB: take fewer, "
            "lower learn.feature_cache, or give workers more memory (cluster.memory)"
        )
    facts = {
        "data": task.data.path,
        "rows": rows,
        "features": width,
        "classes": task.data.n_classes,
        "mode": task.mode,
        "steps": task.settings.steps,
        "tasks": 3 * chunks * task.settings.steps,
        "workers": workers,
        "worker_bytes": needed,
        "worker_limit_bytes": limit,
        "features_cached": bool(task.cache_bytes >= rows * width * 8 / workers),
    }
    if calibrate:
        facts["estimated_seconds"] = _two_digits(task.settings.steps * (-(-chunks // workers) * chunk_s + 3 * ROUND_S))
    return facts


def _two_digits(seconds: float) -> float:
    """An estimate promises no more digits; and no work takes 0.0 seconds, however fast the machine."""
    return float(f"{seconds:.2g}")


def _calibrated(job: Batches, task: Task) -> float:
    """Seconds of one batch, read and computed: the median of a few, after one to warm up."""
    start = {**task.kernel.parameters, "regularization": np.asarray(task.regularization)}
    parameters = optim.to_log(start)
    learner, times = KernelLearner(task.kernel, task.settings, task.data.n_classes), []
    for number in range(1 + CALIBRATION_BATCHES):
        began = time.perf_counter()
        SerialExecutor().map(batch_gradient, [(learner, job, number, parameters)], name="calibration")
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["plan", *sys.argv[1:]])
