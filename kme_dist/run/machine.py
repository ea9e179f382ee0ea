"""The constants of `kme_dist.run.scaling_model`, measured here within a few seconds.

measured_machine()                   # products, factorisation, exp, reading; the rest as by default
measured_machine(cluster=True)       # also tasks, messages and reductions, on a small cluster in this process
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads
from kme_dist.core.calibration import Calibration, class_probabilities
from kme_dist.core.embedding import Decision, Embedding
from kme_dist.core.kernels import Gaussian
from kme_dist.core.sums import Accumulator, Centres, OneHot
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.predictions import Field, OutputLayout
from kme_dist.data.receipts import Receipt, RowSpan, write_receipt
from kme_dist.data.rows import Scaling
from kme_dist.data.statistics import Statistics
from kme_dist.run.executors import FAN_IN, DaskExecutor
from kme_dist.run.fit.choose import measured_speed
from kme_dist.run.scaling_model import Machine, reduction_tasks

_TILE, _WIDTH = 1_024, 64
_CHUNK, _CLASSES = 8_192, 8  # rows of a chunk that is predicted
_CENTRES = (250, 2_000)
_STORED = (100_000, 54)  # rows and features of the data set that is read
_TASKS, _ROUNDS, _RESULT, _PUBLISHED = 200, 100, 1 << 20, 5
_NAPS, _NAP_S = 60, 0.03


def measured_machine(*, cluster: bool = False) -> Machine:
    """The constants of this machine, for workers of one thread."""
    with blas_threads(1):
        (value_s, flops), (row_value_s, publish_s) = _sums(), _predicting()
        found = Machine(
            read_bytes_per_s=_reading(),
            product_flops_per_s=_products(),
            factor_flops_per_s=measured_speed(),
            exp_s=_exponentials(),
            sum_value_s=value_s,
            sum_flops_per_s=flops,
            row_value_s=row_value_s,
            publish_s=publish_s,
            scratch_bytes_per_s=_additions(),
        )
    return _with_cluster(found) if cluster else found


def _best(function: Callable[[], Any], repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    for _ in range(repeats):
        began = clock()
        function()
        times.append(clock() - began)
    return max(min(times), 1e-9)


def _products() -> float:
    """As a kernel tile has them: two long sides and a short one."""
    A, B = np.ones((_TILE, _WIDTH), np.float32), np.ones((_WIDTH, 4 * _TILE), np.float32)
    out = np.empty((_TILE, 4 * _TILE), np.float32)
    return 8 * _TILE**2 * _WIDTH / _best(lambda: np.matmul(A, B, out=out), 10, time.process_time)


def _exponentials() -> float:
    """Of one kernel value: the clamp, the exponential and the passes through memory that they are."""
    A = np.full((_TILE, 4 * _TILE), -0.5, np.float32)

    def values() -> None:
        np.minimum(A, 0.0, out=A)
        np.exp(A, out=A)
        np.subtract(A, 1.0, out=A)

    return _best(values, clock=time.process_time) / A.size


def _sums() -> tuple[float, float]:
    """Sums over rows as the fit computes them: seconds per kernel value, and flops per second of their squares.

    Two numbers of centres tell the two apart: t = n p value_s + n p² / flops_per_s.
    """
    (few, first), (many, second) = ((count, _summed_s(count)) for count in _CENTRES)
    square_s = (second / many - first / few) / (many - few)
    value_s = max(first / few - few * square_s, 1e-9 * _TILE) / _TILE
    return value_s, _TILE / max(square_s, 1e-15)


def _summed_s(centres: int) -> float:
    rng = np.random.default_rng(0)
    X = rng.random((_TILE, _WIDTH), dtype=np.float32)
    kernel, y = Gaussian(length_scale=np.ones(_WIDTH)), np.arange(_TILE) % 2
    basis = Centres(kernel, rng.random((centres, _WIDTH), dtype=np.float32))
    accumulator = Accumulator(basis, OneHot(2), np.zeros(0, np.float32))
    accumulator.add(X, y)
    return _best(lambda: accumulator.add(X, y), 7, time.process_time)


def _predicting() -> tuple[float, float]:
    """One number of a row or of its outputs: a chunk through all that surrounds its kernel values. And what the driver
    does for a chunk."""
    rng = np.random.default_rng(0)
    X, y = rng.random((_CHUNK, _WIDTH), dtype=np.float32), np.arange(_CHUNK) % _CLASSES
    scaling, kernel = Scaling.of(Statistics.of(X), "unit"), Gaussian(length_scale=np.ones(_WIDTH))
    decide = Decision(Embedding(kernel, X[:16], rng.random((16, _CLASSES)), 1.0), "float32")
    calibration = Calibration.fit("isotonic", decide(X), y)
    fields = (Field("label", "int64"), Field("probability", "float32", (_CLASSES,)))
    with tempfile.TemporaryDirectory() as folder:
        layout = OutputLayout(folder, "zarr", _CHUNK, fields, tuple(range(_CLASSES)), "measured")

        def chunk() -> str:
            f = decide(scaling.apply(X, "float32"))
            p = class_probabilities(f, 0.0, calibration)
            attempt, digests, stored = layout.write(0, {"label": f.argmax(axis=1), "probability": p})
            spans = (RowSpan(_CHUNK, "rows"),)
            write_receipt(layout.place, Receipt("measured", 0, layout.epoch, attempt, spans, digests, stored))
            return attempt

        attempts = [chunk()]
        chunk_s = _best(lambda: attempts.append(chunk()), _PUBLISHED, time.process_time)
        publish_s = _best(lambda: layout.publish(0, attempts.pop()), _PUBLISHED)
        return chunk_s / (_CHUNK * (_WIDTH + _CLASSES)), publish_s


def _additions() -> float:
    """Arrays from the scratch folder, loaded and added."""
    total = np.zeros(2**20)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "part.npy", total)
        return total.nbytes / _best(
            lambda: np.add(total, np.load(Path(folder) / "part.npy", allow_pickle=False), out=total)
        )


def _reading() -> float:
    rng = np.random.default_rng(0)
    X, y = rng.random(_STORED, dtype=np.float32), rng.integers(0, 2, _STORED[0])
    with tempfile.TemporaryDirectory() as folder:
        ingest((X, y), Path(folder) / "rows.zarr")

        def read() -> None:
            data = open_dataset(Path(folder) / "rows.zarr")
            for start in range(0, data.rows, data.chunk_rows):
                data.read_rows(start, min(data.rows, start + data.chunk_rows))

        return X.nbytes / _best(read, repeats=2)


# --- a cluster ------------------------------------------------------------------------------------------


def _nothing(number: int) -> int:
    return number


def _numbers(number: int) -> np.ndarray:
    return np.ones(_RESULT // 8)


def _nap(number: int) -> int:
    time.sleep(_NAP_S)
    return number


def _with_cluster(machine: Machine) -> Machine:
    """Two worker processes. The scheduler is in this one, whose processor time is shared by it and the driver.

    A task costs them least where many are ready at a time, which is when they are the bottleneck; a worker is measured
    with tasks that last, since it also does what comes up meanwhile.
    """
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        executor = DaskExecutor(client)
        calls = [(i,) for i in range(_TASKS)]
        executor.map(_nothing, calls[:4], name="nothing")
        began = time.process_time()
        executor.map(_nothing, calls, name="nothing")
        task_s = (time.process_time() - began) / _TASKS
        before = sum(client.run(time.process_time).values())
        list(executor.stream(_nap, calls[:_NAPS], name="nap"))
        worker_s = (sum(client.run(time.process_time).values()) - before) / _NAPS
        round_s = _best(lambda: executor.map(_nothing, calls[:1], name="nothing", quick=True), _ROUNDS)
        both_s = _best(lambda: executor.map(_nothing, calls[:2], name="nothing", quick=True), _ROUNDS)
        few = calls[: 4 * FAN_IN]
        added_s = _best(lambda: executor.map_reduce(_numbers, few, np.add, name="numbers"))
        without_s = _best(lambda: executor.map_reduce(_nothing, few, max, name="nothing"))
    moved = (len(few) + reduction_tasks(len(few))) * _RESULT
    message_s = max(both_s - round_s, 0.05 * both_s)
    return replace(
        machine,
        scheduler_task_s=task_s / 2,
        driver_task_s=task_s / 2,
        task_s=worker_s,
        round_s=max(round_s - message_s, 1e-5),
        message_s=message_s,
        reduce_bytes_per_s=moved / max(added_s - without_s, 1e-4),
    )
