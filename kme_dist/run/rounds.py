"""Learning from a data set that no process holds: the loop of `learn`, its batches read and judged by workers.

    executor = DaskExecutor(client)
    learned = learn_on_dataset(data, kernel, 1.0, LearnSettings(steps=500, batch_size=2000),
                               batches_per_step=4, executor=executor, checkpoints=Checkpoints("run/checkpoints"))

One step is one round: `batches_per_step` calls of `batch_gradient`, each of which reads its batch by the plan and its
number and returns a small record; the mean of the records, added up in plan order; one update here. What is learned
depends on data, settings and `batches_per_step`, never on who did the work: the same bits come from one process, from
any number of workers, and from a run that was killed and resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kme_dist.core import optim
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.objective import Objective, Workspace
from kme_dist.data.batches import plan_batches, read_batch
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.plan import BatchPlan
from kme_dist.errors import ConfigError, DataError, KMEError
from kme_dist.run.checkpoints import Checkpoints, Snapshot
from kme_dist.run.executors import Executor, tree_combine
from kme_dist.run.learn import (
    Learned,
    LearnSettings,
    LengthScalePrior,
    PlateauWatch,
    Record,
    assemble,
    batch_objective,
    step_record,
)
from kme_dist.run.scaling import Scaling

BATCH_ROWS = 1000  # where the settings leave the batch size open
HISTORY_RECORDS = 1000  # kept in memory; the callback sees every one


# --- what travels to the workers --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Job:
    """What every call of a run has in common; small, and recognised by its token on a worker that has met it."""

    token: str
    path: str
    plan: BatchPlan
    scale: Scaling
    dtype: str
    settings: LearnSettings
    kernel: Kernel
    n_classes: int

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.token == self.token


@dataclass(frozen=True)
class BatchRecord:
    """What comes home from one batch."""

    objective: Objective
    rows: int
    read_s: float
    compute_s: float
    worker: str


@dataclass
class _Opened:
    """A job on a worker: the data set open, memory for the Gram matrix at hand."""

    job: Job
    data: Dataset
    workspace: Workspace

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        batch = read_batch(self.data, self.job.plan, number)
        return self.job.scale.apply(batch.X, self.job.dtype), np.asarray(batch.y)


_here = threading.local()


def _opened(job: Job) -> _Opened:
    """Kept from call to call, one for each thread: that of an earlier run goes when another begins."""
    held: _Opened | None = getattr(_here, "opened", None)
    if held is None or held.job != job:
        _here.opened = None  # its matrix is given back before a new one is asked for
        held = _here.opened = _Opened(job, open_dataset(job.path), Workspace())
    return held


def batch_gradient(job: Job, number: int, parameters: optim.Named) -> BatchRecord:
    """Read batch `number`, take its objective and gradient: the function that workers run."""
    began = time.perf_counter()
    here = _opened(job)
    X, y = here.read(number)
    read = time.perf_counter()
    kernel, lam = assemble(here.job.kernel, parameters)
    out = batch_objective(job.settings, kernel, lam, X, y, job.n_classes, number, here.workspace)
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return BatchRecord(out, len(X), read - began, time.perf_counter() - read, worker)


# --- the loop ---------------------------------------------------------------------------------------


def learn_on_dataset(
    dataset: Dataset,
    kernel: Kernel,
    regularization: float,
    settings: LearnSettings,
    *,
    batches_per_step: int = 1,
    executor: Executor,
    checkpoints: Checkpoints | None = None,
    callback: Callable[[Record], None] | None = None,
    split: str | None = "auto",
    scaling: str | None = "unit",
    dtype: str = "float32",
) -> Learned:
    """Stochastic gradient descent on log θ and log λ over the batches of a stored data set.   [HNR, algorithm 1]

    Parameters
    ----------
    dataset : with class labels; `split` "auto" stands for its "train" part where it has one, None for all rows
    kernel, regularization : where learning starts; the kernel is of scaled rows
    batches_per_step : gradients averaged in one step. Part of what is learned, not of the cluster.
    executor : SerialExecutor() or DaskExecutor(client)
    checkpoints : where to save, and to resume from when settings and data agree
    callback : receives the record of every step; `history` keeps the last ones only

    Returns
    -------
    Learned : the last iterate, or the best where `settings.patience` is set
    """
    if batches_per_step < 1:
        raise ConfigError(f"batches_per_step={batches_per_step}: needs a whole number from 1")
    job = make_job(dataset, kernel, settings, split=split, scaling=scaling, dtype=dtype)
    model = {"kernel": kernel.to_config(), "regularization": float(regularization), "dtype": dtype, "scaling": scaling}
    identity = run_identity(dataset, settings, job.plan, model, batches_per_step)

    def judge(step: int, parameters: optim.Named) -> tuple[Objective, int, Record]:
        began, first = time.perf_counter(), step * batches_per_step
        calls = [(job, first + i, parameters) for i in range(batches_per_step)]
        records = executor.map(batch_gradient, calls, name="rcb-gradient")
        pace = _pace(records, time.perf_counter() - began, executor.workers)
        return mean_objective(records), records[0].rows, pace  # all batches of a plan have as many rows

    loop = Loop(kernel, regularization, settings, job.plan.rows)
    history = loop.run(judge, identity, checkpoints, callback)
    learned_kernel, lam = assemble(kernel, loop.result())
    return Learned(learned_kernel, lam, history, stopped_early=loop.stopped)


def make_job(
    dataset: Dataset, kernel: Kernel, settings: LearnSettings, *, split: str | None, scaling: str | None, dtype: str
) -> Job:
    """Plan the batches and check that they can be learned from."""
    if dataset.classes is None:
        raise DataError(f"{dataset.path} has no class labels; ingest it again with the column named by `label`")
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype={dtype!r} is unknown; choose 'float32' or 'float64'")
    if split == "auto":
        split = "train" if "train" in dataset.splits else None
    rows = dataset.split_rows(split)
    batch = min(settings.batch_size or BATCH_ROWS, rows)
    plan = plan_batches(dataset, batch_size=max(batch, 1), seed=settings.seed, split=split)
    return Job(
        token=os.urandom(8).hex(),
        path=dataset.path,
        plan=plan,
        scale=Scaling.of(dataset.split_statistics(split), scaling),
        dtype=dtype,
        settings=dataclasses.replace(settings, schedule=None),  # a function, and the driver's business
        kernel=kernel,
        n_classes=len(dataset.classes),
    )


class Parametrised(Protocol):
    """What a loop learns: a kernel, or whatever else has parameters by name."""

    @property
    def parameters(self) -> Mapping[str, np.ndarray]: ...


# From the step's number and the parameters: the objective with its gradient, the rows of one batch, how fast it went.
Judge = Callable[[int, optim.Named], tuple[Objective, int, Record]]


class Loop:
    """Parameters, optimiser and stopping rule: all that changes from step to step."""

    def __init__(self, start: Parametrised, regularization: float, settings: LearnSettings, rows: int) -> None:
        self.settings = settings
        self.parameters = optim.to_log(
            {**start.parameters, "regularization": np.asarray(regularization, dtype=np.float64)}
        )
        self.names = optim.learnable(self.parameters, settings.frozen)
        self.optimizer = optim.optimizer_by_name(settings.optimizer)
        self.state = self.optimizer.init({name: self.parameters[name] for name in self.names})
        schedule = settings.schedule or (lambda rate, steps: optim.constant(rate))
        self.rate = schedule(settings.learning_rate, settings.steps)
        self.watch = PlateauWatch(settings.patience)
        self.prior = LengthScalePrior(start, self.parameters, settings, rows)  # type: ignore[arg-type]
        self.step, self.stopped = 0, False
        self._began, self._earlier = time.perf_counter(), 0.0
        self._snapshot = self._take()

    def run(
        self,
        judge: Judge,
        identity: dict[str, Any],
        checkpoints: Checkpoints | None = None,
        callback: Callable[[Record], None] | None = None,
    ) -> list[Record]:
        """Step after step to the end, from the last checkpoint where there is one; the last records."""
        if checkpoints is not None and (found := checkpoints.resume(identity)) is not None:
            self.restore(found)
        history: deque[Record] = deque(maxlen=HISTORY_RECORDS)
        with self._saved_on_the_way_out(checkpoints, identity):
            while self.step < self.settings.steps and not self.stopped:
                out, rows, pace = judge(self.step, dict(self.parameters))
                history.append({**self.advance(out, rows), **pace})
                if callback:
                    callback(history[-1])
                if checkpoints is not None:
                    checkpoints.offer(self._snapshot, identity)
        return list(history)

    def advance(self, out: Objective, rows: int) -> Record:
        """One update with the mean gradient of the step; `rows` are those of one batch."""
        gradient = {name: np.nan_to_num(out.gradient[name]) for name in self.names}
        gradient = self.prior.add_to(gradient, self.parameters, rows)
        lam = float(optim.from_log({"regularization": self.parameters["regularization"]})["regularization"])
        record = step_record(self.settings, self.step, out, lam, optim.norm(gradient), rows, self.seconds)
        if self.watch.should_stop(out.value + self.prior.value(self.parameters, rows), self.parameters):
            self.stopped = True
        else:
            clipped = optim.clip(gradient, self.settings.clip_norm)
            delta, self.state = self.optimizer.update(clipped, self.state, self.rate(self.step))
            self.parameters = {name: value + delta.get(name, 0.0) for name, value in self.parameters.items()}
        self.step += 1
        self._snapshot = self._take()
        return record

    def result(self) -> optim.Named:
        return self.parameters if self.settings.patience is None else self.watch.best_parameters(self.parameters)

    @property
    def seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._began

    def _take(self) -> Snapshot:
        watch = {**self.watch.state(), "stopped": int(self.stopped)}
        return Snapshot(self.step, self.parameters, self.state, watch, self.seconds)

    def restore(self, snapshot: Snapshot) -> None:
        self.step, self.parameters, self.state = snapshot.step, snapshot.parameters, snapshot.optimizer
        self.watch.restore(snapshot.watch)
        self.stopped = bool(snapshot.watch["stopped"])
        self._earlier, self._began = snapshot.seconds, time.perf_counter()
        self._snapshot = self._take()

    @contextlib.contextmanager
    def _saved_on_the_way_out(self, checkpoints: Checkpoints | None, identity: dict[str, Any]) -> Iterator[None]:
        """Save the last whole step, whether the run ends well or is interrupted in the middle of the next one."""
        start = self.step
        try:
            yield
        except BaseException:
            if checkpoints is not None and self._snapshot.step > start:
                with contextlib.suppress(KMEError, OSError):  # the first error is the one to report
                    checkpoints.save(self._snapshot, identity)
            raise
        if checkpoints is not None and self.step > start:
            checkpoints.save(self._snapshot, identity)


# --- records ----------------------------------------------------------------------------------------


def mean_objective(records: list[BatchRecord]) -> Objective:
    """The mean over batches, added up in plan order by a fixed tree."""
    outs = [record.objective for record in records]
    names = ("value", "risk", "complexity", "bound", "accuracy")
    numbers = tree_combine([np.array([getattr(out, name) for name in names]) for out in outs], np.add) / len(outs)
    gradient = tree_combine([out.gradient for out in outs], _add)
    return Objective(
        **dict(zip(names, numbers.tolist(), strict=True)),
        gradient={name: value / len(outs) for name, value in gradient.items()},
        dtype=max(out.dtype for out in outs),
        jitter=max(out.jitter for out in outs),
    )


def _add(a: optim.Named, b: optim.Named) -> optim.Named:
    return {name: a[name] + b[name] for name in a}


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
    dataset: Dataset, settings: LearnSettings, plan: BatchPlan, model: dict[str, Any], batches_per_step: int
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
        "data": data_digest(dataset),
        "plan": _digest(plan.to_json()),
    }
    plain: dict[str, Any] = json.loads(json.dumps(tree))
    return plain


def data_digest(dataset: Dataset) -> str:
    """One digest for the rows, their labels and their order."""
    names = ("digests", "rows", "classes", "feature_names")
    return _digest({name: dataset.attributes[name] for name in names})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
