"""Learning a kernel: the rounds that the trainer asks for, their batches read and evaluated where the executor works.

    executor = DaskExecutor(client)
    learned = learn_on_dataset(data, kernel, 1.0, LearnSettings(steps=500, batch_size=2000),
                               batches_per_step=4, executor=executor, checkpoints=Checkpoints("run/checkpoints"))

One step is one round: `batches_per_step` calls of `batch_gradient`, each of which reads its batch by the plan and its
number and returns a small record; the mean of the records, added up in plan order; one update here.

With `local_steps=H` a round is H steps: each of `batches_per_step` replicas goes H steps on batches of its own, then
parameters and optimiser state of all of them are averaged. Rounds are fewer and longer, which pays where the network is
slow; what is learned is another, in general slightly worse, iterate.

What is learned depends on data, settings, `batches_per_step` and `local_steps`, never on who did the work: the same
bits come from one process, from any number of workers, and from a run that was killed and resumed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kme_dist.backend import is_cupy, precision, to_host
from kme_dist.core import optim
from kme_dist.core.kernels.base import Kernel, row_count
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import RowSource
from kme_dist.data.plan import BatchPlan
from kme_dist.data.scaling import Scaling
from kme_dist.errors import ConfigError
from kme_dist.run import jobs
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor, SerialExecutor
from kme_dist.run.jobs import (
    BatchJob,
    BatchRecord,
    batch_gradient,
    make_job,
    mean_objective,
    mean_state,
    read_rows,
)
from kme_dist.run.learn import (
    Learned,
    LearnSettings,
    LengthScalePrior,
    Record,
    assemble,
    log_parameters,
    mean_named,
)
from kme_dist.run.trainer import PlayRound, Round, Trainer

__all__ = [
    "BatchRecord",
    "batch_gradient",
    "learn",
    "learn_on_dataset",
    "make_job",
    "mean_objective",
    "run_identity",
]

GRADIENT, READ, REPLICA = "rcb-gradient", "read-batch", "local-steps"  # as the dashboard shows them


def learn_on_dataset(
    dataset: RowSource,
    kernel: Kernel,
    regularization: float,
    settings: LearnSettings,
    *,
    batches_per_step: int = 1,
    local_steps: int | None = None,
    executor: Executor,
    checkpoints: Checkpoints | None = None,
    callback: Callable[[Record], None] | None = None,
    split: str | None = "auto",
    scaling: str | Scaling | None = "unit",
    dtype: str = "float32",
    backend: str = "numpy",
    plan: BatchPlan | None = None,
) -> Learned:
    """Stochastic gradient descent on log θ and log λ over the batches of a stored data set.   [HNR, algorithm 1]

    Parameters
    ----------
    dataset : with class labels; `split` "auto" stands for its "train" part where it has one, None for all rows
    kernel, regularization : where learning starts; the kernel is of scaled rows
    batches_per_step : gradients averaged in one step, or replicas. Part of what is learned, not of the cluster.
    local_steps : None averages gradients in every step; H averages replicas after H steps of their own
    executor : SerialExecutor() or DaskExecutor(client)
    checkpoints : where to save, and to resume from when settings and data agree
    callback : receives the record of every round; `history` keeps the last ones only
    scaling : "unit", "standard", None, or one that is known already
    backend : "numpy" or "cupy", where the workers compute
    plan : the batches, where they are not to come from the settings

    Returns
    -------
    Learned : the last iterate, or the best where `settings.patience` is set
    """
    if batches_per_step < 1:
        raise ConfigError(f"batches_per_step={batches_per_step}: must be an integer >= 1")
    if local_steps is not None and (local_steps < 1 or settings.steps % local_steps):
        raise ConfigError(
            f"local_steps={local_steps}: must be an integer >= 1 of which steps={settings.steps} is a multiple, "
            "since averages are taken after whole rounds"
        )
    job = make_job(dataset, kernel, settings, split=split, scaling=scaling, dtype=dtype, backend=backend, plan=plan)
    identity: dict[str, Any] = {}
    if checkpoints is not None:
        given = scaling if not isinstance(scaling, Scaling) else [scaling.shift.tolist(), scaling.factor.tolist()]
        model = {
            "kernel": kernel.to_config(),
            "regularization": float(regularization),
            "dtype": dtype,
            "scaling": given,
        }
        identity = run_identity(dataset, settings, job.plan, model, batches_per_step)
        if local_steps is not None:
            identity["learn"] |= {"mode": "local", "local_steps": local_steps}
    start = log_parameters(kernel, regularization)
    trainer = Trainer(start, settings, prior=LengthScalePrior(kernel, start, settings, job.plan.rows))
    if local_steps is None:
        play = _synchronous(job, batches_per_step, executor)
    else:
        play = _local(job, trainer, batches_per_step, local_steps, executor)
    found = trainer.run(play, identity, checkpoints, None if callback is None else lambda record, _: callback(record))
    return Learned(*assemble(kernel, found.parameters), found.history, stopped_early=found.stopped_early)


def learn(
    kernel: Kernel,
    regularization: float,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    settings: LearnSettings,
    callback: Callable[[Record], None] | None = None,
    plan: BatchPlan | None = None,
) -> Learned:
    """The same for rows in memory (an array, or a list of whatever the kernel takes), as they are, in this process."""
    records: list[Record] = []

    def step(record: Record) -> None:
        records.append(record)
        if callback is not None:
            callback(record)

    learned = learn_on_dataset(
        ArrayRows(to_host(X) if hasattr(X, "dtype") else X, np.asarray(y), range(n_classes)),
        kernel,
        regularization,
        replace(settings, batch_size=settings.batch_size or row_count(X)),
        executor=SerialExecutor(),
        callback=step,
        scaling=None,
        dtype=precision(X) if hasattr(X, "dtype") else "float64",
        backend="cupy" if is_cupy(X) else "numpy",
        plan=plan,
    )
    return replace(learned, history=records)


def _synchronous(job: BatchJob, batches: int, executor: Executor) -> PlayRound:
    gpu = job.backend == "cupy"

    def play(step: int, parameters: optim.Named) -> Round:
        began, first = time.perf_counter(), step * batches
        numbers = range(first, first + batches)
        calls = [(job, number, parameters) for number in numbers]
        if gpu and executor.reads_apart:
            # The next round's batches are known: they are read while this one is computed.
            ahead = [(job, number) for number in range(first + batches, first + 2 * batches)]
            feed = (read_rows, [(job, number) for number in numbers], ahead, READ)
            records = executor.map(batch_gradient, calls, name=GRADIENT, gpu=gpu, feed=feed)
        else:
            records = executor.map(batch_gradient, calls, name=GRADIENT, gpu=gpu, quick=True)
        pace = _pace(records, time.perf_counter() - began, executor.workers)
        return Round(mean_objective(records), job.plan.rows_per_batch, pace)

    return play


def _local(job: BatchJob, trainer: Trainer, replicas: int, steps: int, executor: Executor) -> PlayRound:
    """Replica r of the round that begins at step s makes its steps on the batches from s · replicas + r · steps."""

    def play(step: int, parameters: optim.Named) -> Round:
        began, first = time.perf_counter(), step * replicas
        rates = [trainer.rate(number) for number in range(step, step + steps)]
        calls = [(job, first + r * steps, trainer.stepper, rates, parameters, trainer.state) for r in range(replicas)]
        found = executor.map(jobs.local_steps, calls, name=REPLICA, gpu=job.backend == "cupy", quick=True)
        records = [replica.record for replica in found]
        pace = _pace(records, time.perf_counter() - began, executor.workers)
        return Round(
            mean_objective(records),
            job.plan.rows_per_batch,
            {**pace, "batches": replicas * steps},
            steps=steps,
            reached=(mean_named([r.parameters for r in found]), mean_state([r.state for r in found])),
        )

    return play


# --- records ----------------------------------------------------------------------------------------


def _pace(records: list[BatchRecord], seconds: float, workers: int) -> Record:
    """How fast the round went, and which share of the workers' time was spent waiting."""
    busy = sum(record.read_s + record.compute_s for record in records)
    return {
        "batches": len(records),
        "round_seconds": seconds,
        "compute_seconds": max(record.compute_s for record in records),
        "read_seconds": max(record.read_s for record in records),
        "rows_per_second": sum(record.rows for record in records) / max(seconds, 1e-9),
        "waiting_share": min(1.0, max(0.0, 1.0 - busy / max(workers * seconds, 1e-9))),
        "workers": workers,
    }


def run_identity(
    dataset: RowSource, settings: LearnSettings, plan: BatchPlan, model: dict[str, Any], batches_per_step: int
) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued: plain data, named as the configuration names it."""
    chosen = {name: value for name, value in vars(settings).items() if name != "schedule"}
    if settings.schedule is None:
        del chosen["steps"]  # a run may be made longer; only a schedule depends on where it is to end
    else:
        chosen["schedule"] = getattr(settings.schedule, "__qualname__", type(settings.schedule).__name__)
    tree = {
        "learn": {**chosen, "batch_size": plan.batch_size, "batches_per_step": batches_per_step},
        "model": model,
        "data": dataset.digest,
        "plan": _digest(plan.to_json()),
    }
    plain: dict[str, Any] = json.loads(json.dumps(tree))
    return plain


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
