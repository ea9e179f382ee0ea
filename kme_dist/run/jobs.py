"""What travels to the workers of a learning run, and the functions that they run.

    job = make_job(data, kernel, settings, split="train", scaling="unit", dtype="float32")
    batch_gradient(job, 17, parameters)                     # a BatchRecord: objective and gradient of batch 17
    local_steps(job, 40, stepper, rates, parameters, state) # a ReplicaRecord: where some steps of its own lead

A job is small plain data with a token; a worker that has met the token has the data set open and memory at hand. A
batch is read on the host, scaled, brought to the device once, and only numbers come back. All functions are free of
side effects: what they return depends on their arguments and on the stored data alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, to_device
from kme_dist.core import optim
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.objective import Objective, Workspace
from kme_dist.data.batches import plan_batches, read_batch
from kme_dist.data.dataset import RowSource
from kme_dist.data.plan import BatchPlan
from kme_dist.data.scaling import Scaling
from kme_dist.errors import ConfigError, DataError
from kme_dist.meter import metered
from kme_dist.run.learn import (
    LearnSettings,
    Stepper,
    assemble,
    batch_objective,
    mean_named,
    mean_objectives,
    without_schedule,
)

BATCH_ROWS = 1000  # where the settings leave the batch size open
KEPT_BYTES = 64 << 20  # rows that are kept from step to step where every batch holds all of them
Rows = tuple[np.ndarray, np.ndarray, float]  # X, y and the seconds that reading took


@dataclass(frozen=True, eq=False)
class Job:
    """What every call of a run has in common."""

    token: str
    source: RowSource
    scale: Scaling | None  # None: rows are taken as they are
    dtype: str
    n_classes: int

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.token == self.token


@dataclass(frozen=True, eq=False)
class BatchJob(Job):
    """A job whose calls are about batches."""

    plan: BatchPlan
    settings: LearnSettings
    kernel: Kernel
    backend: str = "numpy"


@dataclass
class Opened:
    """A job on a worker: memory for the Gram matrix at hand, and the rows where every batch holds all of them."""

    job: Any
    workspace: Workspace
    all_rows: Rows | None = None


_here = threading.local()


def opened(job: Job) -> Opened:
    """Kept from call to call, one for each thread: that of an earlier run goes when another begins."""
    held: Opened | None = getattr(_here, "opened", None)
    if held is None or held.job != job:
        _here.opened = None  # its matrix is given back before a new one is asked for
        held = _here.opened = Opened(job, Workspace())
    return held


def job_basis(
    dataset: RowSource, split: str | None, scaling: str | Scaling | None, dtype: str
) -> tuple[dict[str, Any], str | None]:
    """The fields of a `Job` and the split that "auto" stands for; refuses what cannot be learned from."""
    if dataset.classes is None:
        raise DataError(f"{dataset.path} has no class labels; ingest it again with the column named by `label`")
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype={dtype!r} is unknown; choose 'float32' or 'float64'")
    split = dataset.training_split(split)
    if not isinstance(scaling, Scaling):
        scaling = Scaling.of(dataset.split_statistics(split), scaling) if dataset.features else None
    basis = {
        "token": os.urandom(8).hex(),
        "source": dataset,
        "scale": scaling,
        "dtype": dtype,
        "n_classes": len(dataset.classes),
    }
    return basis, split


def make_job(
    dataset: RowSource,
    kernel: Kernel,
    settings: LearnSettings,
    *,
    split: str | None,
    scaling: str | Scaling | None,
    dtype: str,
    backend: str = "numpy",
    plan: BatchPlan | None = None,
) -> BatchJob:
    """Plan the batches and check that they can be learned from."""
    basis, split = job_basis(dataset, split, scaling, dtype)
    if plan is None:
        batch = min(settings.batch_size or BATCH_ROWS, dataset.split_rows(split))
        plan = plan_batches(dataset, batch_size=max(batch, 1), seed=settings.seed, split=split)
    return BatchJob(**basis, plan=plan, settings=without_schedule(settings), kernel=kernel, backend=backend)


# --- one batch --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchRecord:
    """What comes home from one batch, or from several that one call went through."""

    objective: Objective
    rows: int
    read_s: float
    compute_s: float
    worker: str


def read_rows(job: BatchJob, number: int) -> Rows:
    """Batch `number`, scaled, on the host: a call of its own where those who read are not those who compute."""
    began, here = time.perf_counter(), opened(job)
    if here.all_rows is not None:
        return here.all_rows
    with metered("read"):
        batch = read_batch(job.source, job.plan, number)
        X, y = batch.X if job.scale is None else job.scale.apply(batch.X, job.dtype), np.asarray(batch.y)
    if job.plan.rows_per_batch == job.plan.rows and hasattr(X, "nbytes") and X.nbytes <= KEPT_BYTES:
        here.all_rows = X, y, 0.0
    return X, y, time.perf_counter() - began


def batch_gradient(job: BatchJob, number: int, parameters: optim.Named, rows: Rows | None = None) -> BatchRecord:
    """Objective and gradient of batch `number`, read here unless `rows` are given: the function that workers run."""
    X, y, read_s = rows or read_rows(job, number)
    began = time.perf_counter()
    here = opened(job)
    kernel, lam = assemble(here.job.kernel, parameters)
    on_device: Array = to_device(X, job.backend) if hasattr(X, "dtype") else X
    out = batch_objective(job.settings, kernel, lam, on_device, y, job.n_classes, number, here.workspace)
    return BatchRecord(out, len(X), read_s, time.perf_counter() - began, _who())


def _who() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


# --- steps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaRecord:
    """Where a replica has come by steps of its own."""

    parameters: optim.Named
    state: optim.State
    record: BatchRecord  # the mean over its batches


def local_steps(
    job: BatchJob, first: int, stepper: Stepper, rates: list[float], parameters: optim.Named, state: optim.State
) -> ReplicaRecord:
    """One step for each of `rates`, on the batches from number `first`, each from where the one before has led."""
    records = []
    for number, rate in enumerate(rates, first):
        record = batch_gradient(job, number, parameters)
        gradient = stepper.gradient(record.objective, parameters, record.rows)
        parameters, state = stepper.move(gradient, parameters, state, rate)
        records.append(record)
    return ReplicaRecord(parameters, state, together(records))


def together(records: list[BatchRecord]) -> BatchRecord:
    """Batches that one worker went through one after the other."""
    return BatchRecord(
        objective=mean_objective(records),
        rows=sum(record.rows for record in records),
        read_s=sum(record.read_s for record in records),
        compute_s=sum(record.compute_s for record in records),
        worker=records[0].worker,
    )


# --- means, in plan order ---------------------------------------------------------------------------


def mean_objective(records: list[BatchRecord]) -> Objective:
    """The mean over batches, in plan order."""
    return mean_objectives([record.objective for record in records])


def mean_state(states: list[optim.State]) -> optim.State:
    """The mean of optimiser states, slot by slot; what counts steps is the same in all of them, and stays."""
    return {slot: mean_named([state[slot] for state in states]) for slot in states[0]}
