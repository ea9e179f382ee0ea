"""Learning from batches: which rows, where they are evaluated, and the rounds of the trainer.

    batches = Batches.of(data, split="train", scaling="unit", dtype="float32", batch_size=2000, seed=0)
    outcome = learn(KernelLearner(kernel, settings, 10), batches, log_parameters(kernel, 1.0), settings,
                    executor=DaskExecutor(client), batches_per_step=4, checkpoints=Checkpoints("run/checkpoints"))

One step is one round: `batches_per_step` calls of `batch_gradient`, each of which reads its batch by plan and number
and returns a small record; the records are averaged in plan order; the `Trainer` makes one update.

With `local_steps=H` a round is H steps: each of `batches_per_step` replicas makes H steps on batches of its own, then
their parameters and optimiser states are averaged. Rounds are fewer and longer, which pays if the network is slow; the
result differs and is in general slightly worse. Parameters that were `joined` from several starts are not averaged:
each start is a replica of its own, and all of them are learned at the same time.

With `LearnSettings(delay=1)` a round is sent before the one in progress is collected, so that workers do not wait for
the driver; gradients are then one update old (see `trainer`).

The result depends on data, settings, `batches_per_step` and `local_steps`, never on the executor: this process, any
number of workers, and a run that was killed and resumed give the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kme_dist.backend import Array, is_cupy, moved_ahead, precision, resolve, to_device, to_host
from kme_dist.core import optim
from kme_dist.core.kernels.base import Kernel, row_count
from kme_dist.core.objective import Objective
from kme_dist.core.risk import positive_rows
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import RowSource
from kme_dist.data.plan import BatchPlan
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.errors import ConfigError, DataError, memory_errors
from kme_dist.failpoints import passing
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor, Feed, SerialExecutor, Started
from kme_dist.run.learners import (
    KernelLearner,
    Learner,
    LearnSettings,
    Record,
    SoftmaxLearner,
    assemble,
    joined,
    kernel_start,
    learner_without_schedule,
    mean_named,
    mean_objectives,
    parted,
    replicas_in,
    within_limits,
)
from kme_dist.run.trainer import (
    Callback,
    LengthScalePrior,
    Round,
    RoundFn,
    Stepper,
    Trainer,
    TrainingOutcome,
    run_identity,
)

BATCH_ROWS = 1000  # default batch size
KEPT_BYTES = 64 << 20  # limit for keeping rows between steps when every batch has all of them
GRADIENT, READ, REPLICA = "batch-gradient", "read-batch", "local-steps"  # task names on the dashboard


# --- sent to the workers ----------------------------------------------------------------------------


Weighted = tuple[Any, np.ndarray, np.ndarray | None]  # X, y and the weights of rows, None if they have none
_local = threading.local()  # rows that a thread keeps between steps


@dataclass(frozen=True)
class Batches:
    """Rows divided into batches; a worker reads a batch by the plan and its number."""

    rows: RowsRef
    plan: BatchPlan
    target: tuple[float, float] | None = None  # shift and factor of numeric targets
    backend: str = "numpy"  # "auto" is resolved by each worker
    per_read: int = 1  # small batches in one batch of the plan, which is read once and shuffled

    @classmethod
    def of(
        cls,
        source: RowSource,
        *,
        batch_size: int,
        seed: int,
        split: str | None = "auto",
        scaling: Scaling | str | None = None,
        dtype: str = "float32",
        target: tuple[float, float] | None = None,
        backend: str = "numpy",
    ) -> Batches:
        if dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype={dtype!r} is unknown; choose 'float32' or 'float64'")
        rows = RowsRef.of(source, split=split, scaling=scaling, dtype=dtype, classes=source.classes is not None)
        rows = rows.with_positive_weight()
        return cls(rows, rows.plan(batch_size, seed), target, backend)

    @property
    def count(self) -> int:
        return self.plan.rows

    @property
    def size(self) -> int:
        """Rows of one batch."""
        return self.plan.rows_per_batch // self.per_read

    @property
    def digest(self) -> str:
        """Of the rows, their labels and their division into batches (without the seed, which is a setting)."""
        plan = {**self.plan.to_json(), "seed": None} | ({} if self.per_read == 1 else {"per_read": self.per_read})
        return hashlib.sha256((self.rows.digest() + json.dumps(plan, sort_keys=True)).encode()).hexdigest()

    def read(self, number: int) -> Weighted:
        """Batch `number`, scaled, on the host; without rows of weight 0."""
        if self.per_read == 1:
            return self._planned(number)
        block, part = divmod(number, self.per_read)
        if (held := getattr(_local, "block", None)) is None or held[:2] != (self.rows, block):
            planned = self._planned(block)
            order = np.random.default_rng([self.plan.seed, block, 6]).permutation(len(planned[1]))
            held = _local.block = self.rows, block, planned, order
        (X, y, weights), order = held[2:]
        first = min(len(order) * part // self.per_read, len(order) - 1)
        few = order[first : max(first + 1, len(order) * (part + 1) // self.per_read)]  # a row, if most have weight 0
        return X[few], y[few], None if weights is None else weights[few]

    def _planned(self, number: int) -> Weighted:
        """Batch `number` of the plan."""
        X, y = self.rows.batch(self.plan, number)
        if y is None:
            raise DataError(f"{self.rows.path} has no labels; ingest it again with the column named by `label`")
        weights = self.rows.batch_weights(self.plan, number)
        if weights is not None and not weights.any():
            raise DataError(
                f"{self.rows.path}: all {len(weights)} rows of batch {number} have weight 0; raise `batch_size`, or "
                "drop rows of weight 0"
            )
        return positive_rows(X, self._targets(y), weights)

    def all_rows(self) -> Weighted:
        """All rows of positive weight, on the device."""
        X, y = self.rows.read()
        X, y, weights = positive_rows(X, self._targets(y), self.rows.weights())
        return self.on_device(X), y, weights

    def first_chunk(self) -> Weighted:
        span = self.rows.chunks()[0]
        X, y = self.rows.read(*span)
        X, y, weights = positive_rows(X, self._targets(y), self.rows.weights(*span))
        return self.on_device(X), y, weights

    def on_device(self, X: Any) -> Any:
        return to_device(X, resolve(self.backend)) if hasattr(X, "dtype") else X

    def _targets(self, y: Any) -> np.ndarray:
        values: np.ndarray = np.asarray(y)
        return values if self.target is None else (values.astype(np.float64) - self.target[0]) * self.target[1]


HostBatch = tuple[Any, np.ndarray, np.ndarray | None, float]  # X, y, weights and seconds spent reading


def read_batch(batches: Batches, number: int) -> HostBatch:
    """Read a batch. A task of its own if some workers read and others compute."""
    began = time.perf_counter()
    X, y, weights = batches.read(number)
    return X, y, weights, time.perf_counter() - began


def _batch_on_device(batches: Batches, number: int) -> HostBatch:
    """Read a batch to the device. If every batch has all rows, the thread keeps them between steps."""
    if (held := getattr(_local, "batch", None)) is not None and held[0] == batches.rows:
        kept: HostBatch = held[1]
        return kept
    _local.batch = None  # free the rows of an earlier run first
    X, y, weights, seconds = read_batch(batches, number)
    X = batches.on_device(X)
    if batches.size == batches.count and getattr(X, "nbytes", KEPT_BYTES + 1) <= KEPT_BYTES:
        _local.batch = batches.rows, (X, y, weights, 0.0)
    return X, y, weights, seconds


def _batches_ahead(batches: Batches, numbers: range) -> Iterator[HostBatch | None]:
    """On a GPU: batches whose rows move to the device while the batch before is computed. None: read it when needed."""
    if resolve(batches.backend) != "cupy" or batches.size == batches.count:
        yield from (None for _ in numbers)
        return
    read = ((X, more) for X, *more in (read_batch(batches, number) for number in numbers))
    yield from ((X, *more) for X, more in moved_ahead(read, "cupy"))


@dataclass(frozen=True)
class BatchRecord:
    """The result of one batch, or the mean over several in one call."""

    objective: Objective
    rows: int
    read_s: float
    compute_s: float
    worker: str


def batch_gradient(
    learner: Learner, batches: Batches, number: int, parameters: optim.Named, rows: HostBatch | None = None
) -> BatchRecord:
    """Objective and gradient of batch `number`, read here unless `rows` are given. Runs on a worker."""
    passing("learn.before_batch")
    batch = _batch_on_device(batches, number) if rows is None else (batches.on_device(rows[0]), *rows[1:])
    X, y, weights, read_s = batch
    began, more = time.perf_counter(), {} if weights is None else {"weights": weights}
    with memory_errors(f"a batch of {row_count(X)} rows", "set `batch_size` lower"):
        out = learner.evaluate(parameters, X, y, number, **more)
    return BatchRecord(out, row_count(X), read_s, time.perf_counter() - began, f"{socket.gethostname()}:{os.getpid()}")


@dataclass(frozen=True)
class ReplicaRecord:
    """The state of a replica after its local steps."""

    parameters: optim.Named
    state: optim.State
    record: BatchRecord  # the mean over its batches


def local_steps(
    learner: Learner,
    batches: Batches,
    first: int,
    stepper: Stepper,
    rates: list[float],
    reached: tuple[optim.Named, optim.State],
) -> ReplicaRecord:
    """One step for each of `rates`, on consecutive batches from number `first`. Runs on a worker."""
    (parameters, state), records = reached, []
    given = _batches_ahead(batches, range(first, first + len(rates)))
    for number, rate, rows in zip(range(first, first + len(rates)), rates, given, strict=True):
        record = batch_gradient(learner, batches, number, parameters, rows)
        gradient = stepper.gradient(record.objective, parameters, record.rows)
        parameters, state = stepper.move(gradient, parameters, state, rate)
        records.append(record)
    last = records[-1].objective.gradient  # those of all steps together may be larger than the rows
    together = BatchRecord(
        objective=replace(
            mean_objectives([replace(record.objective, gradient={}) for record in records]), gradient=last
        ),
        rows=sum(record.rows for record in records),
        read_s=sum(record.read_s for record in records),
        compute_s=sum(record.compute_s for record in records),
        worker=records[0].worker,
    )
    return ReplicaRecord(parameters, state, together)


# --- rounds -----------------------------------------------------------------------------------------


def learn(
    learner: Learner,
    batches: Batches,
    start: Mapping[str, np.ndarray],
    settings: LearnSettings,
    *,
    executor: Executor | None = None,
    batches_per_step: int = 1,
    local_steps: int | None = None,
    checkpoints: Checkpoints | None = None,
    callback: Callback | None = None,
    prior: LengthScalePrior | None = None,
    after: Callable[[optim.Named, float], optim.Named] | None = None,
    average: float = 0.0,
    phase: str | None = None,
    keep_history: bool = True,
) -> TrainingOutcome:
    """Learn by steps: batches are evaluated by the executor, gradients averaged in order, updates made here.

    Parameters
    ----------
    learner, batches : evaluates a batch; provides it
    start : parameters as they are learned (positive ones as logarithms)
    executor : None: this process
    batches_per_step : gradients averaged in one step, or replicas; it affects the result, unlike the number of workers
    local_steps : None averages gradients in every step; H averages replicas after H local steps
    checkpoints : where to save, and to resume from if settings and data are the same
    callback : receives the record of every round, and the parameters after it
    prior, after, average, phase, keep_history : see `Trainer`
    """
    if batches_per_step < 1:
        raise ConfigError(f"batches_per_step={batches_per_step}: must be an integer >= 1")
    if local_steps is not None and (local_steps < 1 or settings.steps % local_steps):
        raise ConfigError(
            f"local_steps={local_steps}: must be an integer >= 1 that divides steps={settings.steps}, since "
            "replicas are averaged after whole rounds"
        )
    if local_steps is not None and settings.delay:
        raise ConfigError(f"delay={settings.delay}: replicas support only delay=0; raise local_steps for fewer rounds")
    learner = learner_without_schedule(learner)
    executor = executor or SerialExecutor()
    trainer = Trainer(
        start, settings, prior=prior, after=after, average=average, phase=phase, keep_history=keep_history
    )
    if replicas_in(start):
        if local_steps is None:
            raise ConfigError("parameters joined from several starts require local_steps")
        run_round = _separate_replicas(learner, batches, trainer, local_steps, executor)
    elif local_steps is None:
        run_round = _averaged_gradients(learner, batches, batches_per_step, executor)
    else:
        run_round = _averaged_replicas(learner, batches, trainer, batches_per_step, local_steps, executor)
    identity: dict[str, Any] = {}
    if checkpoints is not None:
        own: dict[str, Any] = {"batch_size": batches.plan.batch_size, "batches_per_step": batches_per_step}
        own |= {} if local_steps is None else {"mode": "local", "local_steps": local_steps}
        own |= {"average": average} if average else {}
        form = {"dtype": batches.rows.dtype, "scaling": batches.rows.scale and batches.rows.scale.to_plain()}
        identity = run_identity(settings, own, {**learner.describe(), **form}, start, batches.digest)
    return trainer.run(run_round, identity, checkpoints, callback)


class _Pace:
    """Throughput of rounds, and the share of the workers' time spent waiting."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._collected = executor, 0.0

    def of(self, records: list[BatchRecord], began: float) -> Record:
        """Of a round that has just been collected; its time starts when the round before it was."""
        began, self._collected = max(began, self._collected), time.perf_counter()
        seconds, workers = self._collected - began, self._executor.workers
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


def _averaged_gradients(learner: Learner, batches: Batches, per_step: int, executor: Executor) -> RoundFn:
    gpu, pace = batches.backend == "cupy", _Pace(executor)

    def run_round(step: int, parameters: optim.Named) -> Started[Round]:
        began, first = time.perf_counter(), step * per_step
        numbers = range(first, first + per_step)
        calls = [(learner, batches, number, parameters) for number in numbers]
        feed: Feed | None = None
        if gpu and executor.has_readers:
            # The batches of the next round are known, so they are read while this one is computed.
            ahead = [(batches, number) for number in range(first + per_step, first + 2 * per_step)]
            feed = (read_batch, [(batches, number) for number in numbers], ahead, READ)

        def averaged(found: list[BatchRecord]) -> Round:
            return Round(mean_objectives([record.objective for record in found]), batches.size, pace.of(found, began))

        started = executor.start(batch_gradient, calls, name=GRADIENT, gpu=gpu, quick=feed is None, feed=feed)
        return started.then(averaged)

    return run_round


def _averaged_replicas(
    learner: Learner, batches: Batches, trainer: Trainer, replicas: int, steps: int, executor: Executor
) -> RoundFn:
    """Replica r of the round that starts at step s uses the batches from s · replicas + r · steps."""
    gpu, pace = batches.backend == "cupy", _Pace(executor)

    def run_round(step: int, parameters: optim.Named) -> Started[Round]:
        began, first = time.perf_counter(), step * replicas
        rates = [trainer.rate(number) for number in range(step, step + steps)]
        reached = parameters, trainer.state
        calls = [(learner, batches, first + r * steps, trainer.stepper, rates, reached) for r in range(replicas)]

        def averaged(found: list[ReplicaRecord]) -> Round:
            records = [replica.record for replica in found]
            states = [replica.state for replica in found]
            state = {slot: mean_named([own[slot] for own in states]) for slot in states[0]}
            return Round(
                mean_objectives([record.objective for record in records]),
                batches.size,
                {**pace.of(records, began), "batches": replicas * steps},
                steps=steps,
                reached=(mean_named([replica.parameters for replica in found]), state),
            )

        return executor.start(local_steps, calls, name=REPLICA, gpu=gpu, quick=True).then(averaged)

    return run_round


def _separate_replicas(learner: Learner, batches: Batches, trainer: Trainer, steps: int, executor: Executor) -> RoundFn:
    """Replicas that never meet; batches as in `_averaged_replicas`."""
    gpu, pace = batches.backend == "cupy", _Pace(executor)
    count = replicas_in(trainer.parameters)
    steppers = [Stepper.of(own, trainer.settings) for own in parted(trainer.parameters)]

    def run_round(step: int, parameters: optim.Named) -> Started[Round]:
        began, first = time.perf_counter(), step * count
        rates = [trainer.rate(number) for number in range(step, step + steps)]
        shared = {slot: own for slot, own in trainer.state.items() if not replicas_in(own)}
        slots = {slot: parted(own) for slot, own in trainer.state.items() if slot not in shared}
        calls = []
        for r, own in enumerate(parted(parameters)):
            reached = own, {**shared, **{slot: values[r] for slot, values in slots.items()}}
            calls.append((learner, batches, first + r * steps, steppers[r], rates, reached))

        def together(found: list[ReplicaRecord]) -> Round:
            records = [replica.record for replica in found]
            state = {slot: joined([replica.state[slot] for replica in found]) for slot in slots}
            outs = [record.objective for record in records]
            return Round(
                replace(
                    mean_objectives([replace(out, gradient={}) for out in outs]),
                    gradient=joined([out.gradient for out in outs]),
                ),
                batches.size,
                {**pace.of(records, began), "batches": count * steps},
                steps=steps,
                reached=(
                    joined([replica.parameters for replica in found]),
                    {**state, **{slot: found[0].state[slot] for slot in shared}},
                ),
            )

        return executor.start(local_steps, calls, name=REPLICA, gpu=gpu, quick=True).then(together)

    return run_round


# --- kernels ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """The result of learning: the last iterate, or the best one if a stopping rule is set."""

    kernel: Kernel
    regularization: float
    history: list[Record] = field(repr=False)
    stopped_early: bool = False


def kernel_batches(
    dataset: RowSource,
    settings: LearnSettings,
    *,
    split: str | None = "auto",
    scaling: str | Scaling | None = "unit",
    dtype: str = "float32",
    backend: str = "numpy",
    plan: BatchPlan | None = None,
) -> Batches:
    """The batches of a data set with classes, according to the settings."""
    if dataset.classes is None:
        raise DataError(f"{dataset.path} has no class labels; ingest it again with the column named by `label`")
    if not dataset.features:
        scaling = None  # rows are not vectors
    size = settings.batch_size or BATCH_ROWS
    found = Batches.of(
        dataset, batch_size=size, seed=settings.seed, split=split, scaling=scaling, dtype=dtype, backend=backend
    )
    return found if plan is None else replace(found, plan=plan)


def learn_on_dataset(
    dataset: RowSource,
    kernel: Kernel,
    regularization: float,
    settings: LearnSettings,
    *,
    executor: Executor,
    batches_per_step: int = 1,
    local_steps: int | None = None,
    checkpoints: Checkpoints | None = None,
    callback: Callable[[Record], None] | None = None,
    **options: Any,
) -> Learned:
    """Stochastic gradient descent on log θ and log λ over the batches of a data set.   [HNR, algorithm 1]

    Parameters
    ----------
    dataset : with class labels
    kernel, regularization : start of learning; the kernel acts on scaled rows
    executor, batches_per_step, local_steps, checkpoints : see `learn`
    callback : receives the record of every round; `history` keeps only the last ones
    **options : split, scaling, dtype, backend and plan for `kernel_batches`

    Returns
    -------
    Learned : the last iterate, or the best one if `settings.patience` is set
    """
    batches = kernel_batches(dataset, settings, **options)
    start = kernel_start(kernel, regularization, settings.objective)
    found = learn(
        KernelLearner(kernel, settings, dataset.n_classes),
        batches,
        start,
        settings,
        executor=executor,
        batches_per_step=batches_per_step,
        local_steps=local_steps,
        checkpoints=checkpoints,
        callback=None if callback is None else lambda record, _: callback(record),
        prior=LengthScalePrior(kernel, start, settings, batches.count, batches.rows.weight),
        after=functools.partial(within_limits, batches.size) if settings.objective == "calibrated" else None,
        keep_history=False,
    )
    return Learned(*assemble(kernel, found.parameters), found.history, stopped_early=found.stopped_early)


def learn_in_memory(
    kernel: Kernel,
    regularization: float,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    settings: LearnSettings,
    callback: Callable[[Record], None] | None = None,
    plan: BatchPlan | None = None,
    weights: np.ndarray | None = None,
) -> Learned:
    """The same for rows in memory (an array, or a list of objects that the kernel accepts), in this process."""
    records: list[Record] = []

    def step(record: Record) -> None:
        records.append(record)
        if callback is not None:
            callback(record)

    learned = learn_on_dataset(
        ArrayRows(to_host(X) if hasattr(X, "dtype") else X, np.asarray(y), range(n_classes), weights=weights),
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


# --- softmax baseline for networks ------------------------------------------------------------------


def learn_softmax(
    learner: SoftmaxLearner,
    batches: Batches,
    *,
    width: int,
    per_epoch: int,
    watch: tuple[Array, np.ndarray] | None,
    executor: Executor | None = None,
    batches_per_step: int = 1,
    callback: Callable[[Record], None] | None = None,
    checkpoints: Checkpoints | None = None,
) -> list[Record]:
    """The records of all steps; the last of each epoch has the accuracy on the rows and class numbers in `watch`."""

    def after_step(record: Record, parameters: optim.Named) -> None:
        if watch is not None and record["step"] % per_epoch == 0:
            record["watched_accuracy"] = float(np.mean(learner.decide(parameters, watch[0]) == watch[1]))
        if callback is not None:
            callback(record)

    found = learn(
        learner,
        batches,
        learner.start(width),
        learner.settings,
        executor=executor,
        batches_per_step=batches_per_step,
        callback=after_step,
        phase="softmax",
        checkpoints=checkpoints,
    )
    return found.history
