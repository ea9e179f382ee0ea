"""Batch inference: throughput relative to bare matrix products, and cost per row at different scales.

    python -m benchmarks.predict [throughput] [scale] [--rows 400000] [--sizes 100000 1000000 10000000] [--centres 4096]

    throughput   rows/s of `kme_dist.predict` on two workers, from a data set on disk to predictions on disk, against
                 bare NumPy on the same tiles (two threads, one BLAS thread each: product, exponential, product with
                 the weights) and scikit-learn's `rbf_kernel(X, centres) @ V`; alternating, ratios of each round
    scale        cost per row, memory of the driver and of the workers from 10^5 to 10^7 rows, made chunk by chunk

Every line prints the load of the machine. Ratios are of one round, in which all sides ran one after another, of elapsed
time and of processor time, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from sklearn.metrics.pairwise import rbf_kernel

from benchmarks.machine import figure, load_average
from kme_dist import MCEClassifier, predict
from kme_dist.backend import blas_threads
from kme_dist.config import ClusterConfig
from kme_dist.core.embedding import HOST_TILE, Embedding
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.models.predict import planned_bytes
from kme_dist.ops.cluster import open_client

FEATURES, CLASSES = 54, 7
PIECE = 1 << 18


def make_model(folder: Path, centres: int) -> MCEClassifier:
    """A model of a given size, with arbitrary weights."""
    rng = np.random.default_rng(0)
    X = rng.random((400, FEATURES), dtype=np.float32)
    model = MCEClassifier(kernel=Gaussian(length_scale=np.full(FEATURES, 1.5)), steps=0, scaling="unit")
    model.fit(X, np.arange(400) % CLASSES)
    C = rng.random((centres, FEATURES), dtype=np.float32)
    V = rng.normal(size=(centres, CLASSES)).astype(np.float32) / np.sqrt(centres)
    model.embedding_ = Embedding(model.kernel_, C, V, 1e-3)
    model.save(folder / "model.zarr")
    return model


def make_rows(folder: Path, rows: int) -> str:
    """A data set of random rows, generated and appended in pieces."""
    rng, path = np.random.default_rng(1), folder / f"rows-{rows}.zarr"
    data = None
    for start in range(0, rows, PIECE):
        piece = rng.random((min(PIECE, rows - start), FEATURES), dtype=np.float32)
        data = ingest(piece, path, compression="none") if data is None else data.append(piece)
    return str(path)


def bare(X: np.ndarray, C: np.ndarray, V: np.ndarray, weighted: bool) -> None:
    """The tiles only: the minimum of work for any implementation."""
    q, c = HOST_TILE
    tile = np.empty((q, c), np.float32)
    for i in range(0, len(X) - q + 1, q):
        for j in range(0, len(C), c):
            np.matmul(X[i : i + q], C[j : j + c].T, out=tile)
            np.exp(tile, out=tile)
            if weighted:
                tile @ V[j : j + c]


def bare_rate(X: np.ndarray, C: np.ndarray, V: np.ndarray, weighted: bool = True) -> tuple[float, float]:
    """Rows per second of elapsed time with both cores busy, and of processor time."""
    pieces = [X[i : i + 8192] for i in range(0, len(X), 8192)]
    with blas_threads(1), ThreadPoolExecutor(2) as pool:
        began, used = time.perf_counter(), time.process_time()
        list(pool.map(lambda piece: bare(piece, C, V, weighted), pieces))
        return len(X) / (time.perf_counter() - began), len(X) / (time.process_time() - used)


def sklearn_rate(X: np.ndarray, C: np.ndarray, V: np.ndarray) -> float:
    with blas_threads(2):
        began = time.perf_counter()
        for start in range(0, len(X), 8192):
            rbf_kernel(X[start : start + 8192], C, gamma=0.22) @ V
        return len(X) / (time.perf_counter() - began)


def throughput(rows: int, centres: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = make_model(folder, centres), make_rows(folder, rows)
        C, V = np.asarray(model.embedding_.centres), np.asarray(model.embedding_.weights)
        X = np.random.default_rng(2).random((min(rows, 131_072), FEATURES), dtype=np.float32)
        # The tiles' operands with the two columns that hold the norms, small enough for the exponential.
        left, right = (np.concatenate([A / 10, A[:, :2]], axis=1) for A in (X, C))
        print(f"{rows} rows, {centres} centres, {FEATURES} features, {CLASSES} classes, two workers", flush=True)
        ratios: list[tuple[float, ...]] = []
        with open_client(ClusterConfig(workers=2, dashboard=False)) as client:
            predict(folder / "model.zarr", X[:32768], folder / "warm.zarr", executor=client)
            for number in range(rounds):
                first, first_cpu = bare_rate(left, right, V)
                used = worker_seconds(client)
                outcome = predict(folder / "model.zarr", data, folder / "out.zarr", executor=client, from_scratch=True)
                ours, ours_cpu = outcome.rows_per_second, rows / (worker_seconds(client) - used)
                second, second_cpu = bare_rate(left, right, V)
                unweighted, _ = bare_rate(left, right, V, weighted=False)
                theirs = sklearn_rate(X[:32768], C, V)
                floor, floor_cpu = (first + second) / 2, (first_cpu + second_cpu) / 2
                ratios.append((ours / floor, ours / unweighted, ours / theirs, ours_cpu / floor_cpu))
                print(
                    f"round {number}: kme-dist {ours:,.0f} rows/s, bare {first:,.0f} and {second:,.0f} (without V "
                    f"{unweighted:,.0f}), scikit-learn {theirs:,.0f}; by processor time kme-dist {ours_cpu:,.0f}, "
                    f"bare {floor_cpu:,.0f}; load {load_average()}",
                    flush=True,
                )
        medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
        print(f"of bare NumPy {medians[0]:.0%} (without the product with V {medians[1]:.0%})")
        print(f"of bare NumPy by processor time {medians[3]:.0%}, reading, scaling, storing and Dask included")
        print(f"against scikit-learn {medians[2]:.1f} times")
        for method, rate in (("bare NumPy", floor), ("kme-dist", ours), ("scikit-learn", theirs)):
            figure("prediction, rows per second", method, f"{centres:,} centres", rate)


def worker_seconds(client) -> float:
    """Processor time that the workers have used so far."""
    return sum(client.run(_seconds).values())


def _seconds() -> float:
    return time.process_time()


class Watch:
    """The largest memory of this process and of the workers while the block lasts."""

    def __init__(self, client) -> None:
        self.pids = list(client.run(_pid).values())
        self.driver, self.worker = psutil.Process(), [psutil.Process(pid) for pid in self.pids]
        self.most = [0, 0]
        self._stop = threading.Event()

    def __enter__(self):
        self.before = self.driver.memory_info().rss
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            self.most[0] = max(self.most[0], self.driver.memory_info().rss)
            self.most[1] = max(self.most[1], *(process.memory_info().rss for process in self.worker))


def _pid() -> int:
    import os

    return os.getpid()


def scale(sizes: list[int], centres: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, centres)
        print(f"{centres} centres, {FEATURES} features, two workers, rows made piece by piece", flush=True)
        with open_client(ClusterConfig(workers=2, dashboard=False)) as client:
            warm = np.random.default_rng(0).random((32768, FEATURES), dtype=np.float32)
            predict(folder / "model.zarr", warm, folder / "warm.zarr", executor=client)
            base = max(psutil.Process(pid).memory_info().rss for pid in client.run(_pid).values())
            for rows in sizes:
                data, out = make_rows(folder, rows), folder / f"out-{rows}.zarr"
                plan = planned_bytes(folder / "model.zarr", data)
                with Watch(client) as watch:
                    outcome = predict(folder / "model.zarr", data, out, executor=client)
                figure("prediction, µs per row", "kme-dist", rows, 1e6 / outcome.rows_per_second)
                for series, size in (("worker", watch.most[1]), ("planned", plan), ("driver", watch.most[0])):
                    figure("memory of prediction, MiB", series, rows, size / 2**20)
                print(
                    f"{rows:>9} rows: {1e6 / outcome.rows_per_second:.2f} us/row, {outcome.seconds:.1f} s; driver "
                    f"{watch.most[0] / 2**20:.0f} MiB (before {watch.before / 2**20:.0f}), worker at most "
                    f"{watch.most[1] / 2**20:.0f} MiB (warm {base / 2**20:.0f}), planned {plan / 2**20:.0f}; "
                    f"load {load_average()}",
                    flush=True,
                )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["throughput"], help="throughput, scale")
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--centres", type=int)
    options = parser.parse_args(argv)
    for what in options.what:
        if what == "throughput":
            throughput(options.rows, options.centres or 4096, options.rounds)
        else:
            scale(options.sizes, options.centres or 256)


if __name__ == "__main__":
    main()
