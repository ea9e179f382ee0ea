"""The exact gradient over all rows for explicit features, in three map-reduce passes.   [HNR, algorithm 2]

    out = full_gradient(data, features, 0.01, executor=executor)       # an Objective; out.gradient["features.NAME"]
    learned = learn_features(data, features, 0.01, LearnSettings(steps=100), executor=executor)

With Z = φ_θ(X), n x p, nothing of size n ever leaves a chunk:

    pass 1   ZᵀZ, ZᵀY, n         -> G = ZᵀZ + nλI, W = G⁻¹ ZᵀY                  on the driver
    pass 2   loss, ZᵀS           -> U = G⁻¹ (ZᵀS + 2c W), dq/dλ = -n Σ U W     on the driver
    pass 3   dq/dZ = (S - Z U) Wᵀ + (Y - P) Uᵀ, pushed through φ's vjp -> dq/dθ

Rows may have weights: ZᵀZ and ZᵀY get diag(w) in the middle, S and the other rows of dq/dZ the factor w, n is Σ w.

Sums run over chunks in row order by a fixed tree, in double precision. `features` is any object with `parameters`,
`replace(**values)`, `forward(X)` and `vjp(X, Z_bar)`; its parameters may have any sign and are named "features.NAME".

A worker caches the features of its chunks from the first pass to the third, up to `cache_bytes`; what does not fit, or
runs on another worker, is recomputed with the same result. Memory is bounded by the cache, one chunk and p x p.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads, cholesky
from kme_dist.core import optim
from kme_dist.core.features import Identity
from kme_dist.core.kernels.base import FeatureMap
from kme_dist.core.objective import LOSS_FLOOR, Objective, clipped_loss, generalisation_bound, one_hot
from kme_dist.core.risk import column
from kme_dist.core.sums import FeatureBasis, OneHot, Sums, sum_rows
from kme_dist.data.dataset import RowSource
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor, Started
from kme_dist.run.learners import LearnSettings, Record, log_parameters
from kme_dist.run.trainer import Round, Trainer, run_identity

PREFIX = "features."
CACHE_BYTES = 256 << 20
Spans = tuple[tuple[int, int], ...]
Parts = dict[str, np.ndarray]


@dataclass(frozen=True)
class _Chunks:
    """Rows in spans, one per task."""

    rows: RowsRef
    spans: Spans
    cache_bytes: int

    def read(self, number: int) -> tuple[Any, Any]:
        return dataclasses.replace(self.rows, ranges=(self.spans[number],)).read()

    def weights(self, number: int) -> np.ndarray | None:
        return dataclasses.replace(self.rows, ranges=(self.spans[number],)).weights()


@dataclass(frozen=True)
class _Version:
    """A feature map with the key under which workers cache its features."""

    features: FeatureMap
    name: str


class _Cache:
    """The features of one version, chunk by chunk, up to a number of bytes; earlier versions are evicted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version, self._bytes = "", 0
        self._chunks: dict[int, tuple[np.ndarray, ...]] = {}

    def get(self, version: str, number: int) -> tuple[np.ndarray, ...] | None:
        with self._lock:
            return self._chunks.get(number) if version == self._version else None

    def put(self, version: str, number: int, arrays: tuple[np.ndarray, ...], limit: int) -> None:
        with self._lock:
            if version != self._version:
                self._version, self._bytes, self._chunks = version, 0, {}
            size = sum(array.nbytes for array in arrays)
            if number not in self._chunks and self._bytes + size <= limit:
                self._chunks[number] = arrays
                self._bytes += size


_cache = _Cache()


def _chunk(chunks: _Chunks, number: int, version: _Version) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled rows, labels and features of a span."""
    key = f"{chunks.rows.token}/{version.name}"
    if (held := _cache.get(key, number)) is not None:
        return held  # type: ignore[return-value]
    X, y = chunks.read(number)
    found = X, np.asarray(y), np.asarray(version.features.forward(X), dtype=np.float64)
    _cache.put(key, number, found, chunks.cache_bytes)
    return found


def _moments(chunks: _Chunks, number: int, version: _Version) -> Sums:
    _, y, Z = _chunk(chunks, number, version)
    basis = FeatureBasis(Identity(), Z.shape[1])
    return sum_rows(basis, Z, y, OneHot(chunks.rows.n_classes), weights=chunks.weights(number))


def _losses(chunks: _Chunks, number: int, version: _Version, W: np.ndarray, floor: float) -> Parts:
    _, y, Z = _chunk(chunks, number, version)
    Y = one_hot(y, chunks.rows.n_classes, Z)
    P = Z @ W
    w = chunks.weights(number)
    loss, S = clipped_loss(Y, P, floor, w)
    right = P[np.arange(len(y)), y] >= P.max(axis=1, initial=-np.inf)
    hits = np.sum(right if w is None else right * w)
    return {"loss": np.asarray(loss), "ZS": Z.T @ S, "hits": np.asarray(float(hits))}


def _pullback(
    chunks: _Chunks, number: int, version: _Version, W: np.ndarray, U: np.ndarray, weight: float, floor: float
) -> Parts:
    X, y, Z = _chunk(chunks, number, version)
    if not len(X):
        return {name: np.zeros(np.shape(value)) for name, value in version.features.parameters.items()}
    Y = one_hot(y, chunks.rows.n_classes, Z)
    P = Z @ W
    w = chunks.weights(number)
    own = column(w, Z)
    S = clipped_loss(Y, P, floor, w)[1] * weight
    Z_bar = ((S - own * (Z @ U)) @ W.T + (own * (Y - P)) @ U.T).astype(chunks.rows.dtype)
    return {name: np.asarray(value, np.float64) for name, value in version.features.vjp(X, Z_bar).items()}


def _add(left: Parts, right: Parts) -> Parts:
    return {name: left[name] + right[name] for name in left}


# --- one gradient -----------------------------------------------------------------------------------


def full_gradient(
    dataset: RowSource,
    features: FeatureMap,
    regularization: float,
    *,
    executor: Executor,
    risk: str = "sum",
    complexity_weight: float | None = None,
    loss_floor: float = LOSS_FLOOR,
    alpha: float = 1.0,
    split: str | None = "auto",
    scaling: str | None = "unit",
    dtype: str = "float64",
    spans: Spans | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> Objective:
    """Objective and gradient over every row of a split, exact up to rounding.

    `spans` are the row ranges of the tasks (a chunk each by default); they may be uneven or empty, and only affect
    rounding. `cache_bytes` is the memory per worker for features that a later pass needs again.
    """
    chunks = _chunks_of(dataset, split, scaling, dtype, cache_bytes, spans)
    tau = LearnSettings(complexity_weight=complexity_weight).tau
    return _evaluate(chunks, features, regularization, executor, risk, tau, loss_floor, alpha)


def _evaluate(
    chunks: _Chunks,
    features: FeatureMap,
    lam: float,
    executor: Executor,
    risk: str,
    tau: float,
    floor: float,
    alpha: float,
) -> Objective:
    if risk not in ("sum", "mean"):
        raise ConfigError(f"risk={risk!r} is unknown; choose 'sum' or 'mean'")
    if not lam > 0:
        raise ConfigError(f"regularization={lam!r}: must be a positive number")
    version = _Version(features, os.urandom(6).hex())
    fixed = [(chunks, i, version) for i in range(len(chunks.spans))]
    sums: Sums = executor.map_reduce(_moments, fixed, operator.add, name="feature-moments", sticky=True)
    n = float(sums.weight)
    if not n:
        raise DataError(f"{chunks.rows.path}: the split has no rows to learn from")
    with blas_threads(1):
        factor = cholesky(np.asfortranarray(sums.G + n * lam * np.eye(len(sums.G))))
        W = np.ascontiguousarray(factor.solve(sums.B))
    weight = 1.0 if risk == "sum" else 1.0 / n
    calls: list[tuple[Any, ...]] = [(*call, W, floor) for call in fixed]
    found = executor.map_reduce(_losses, calls, _add, name="feature-losses", sticky=True)
    size = float(np.sqrt(np.sum(W * W)))
    c = tau * alpha / (2 * size) if size > 0 else 0.0
    with blas_threads(1):
        U = np.ascontiguousarray(factor.solve(weight * found["ZS"] + 2 * c * W))
    calls = [(*call, W, U, weight, floor) for call in fixed]
    inner = executor.map_reduce(_pullback, calls, _add, name="feature-gradient", sticky=True)
    loss, complexity = float(found["loss"]), alpha * size
    gradient = {PREFIX + name: value for name, value in inner.items()}
    gradient["regularization"] = np.asarray(-n * lam * np.sum(U * W))
    return Objective(
        value=weight * loss + tau * complexity,
        risk=weight * loss,
        complexity=complexity,
        bound=generalisation_bound(loss / n, complexity, n),
        gradient=gradient,
        accuracy=float(found["hits"]) / n,
        dtype=chunks.rows.dtype,
    )


def _chunks_of(
    dataset: RowSource,
    split: str | None,
    scaling: str | None,
    dtype: str,
    cache_bytes: int,
    spans: Spans | None = None,
) -> _Chunks:
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype={dtype!r} is unknown; choose 'float32' or 'float64'")
    rows = RowsRef.of(dataset, split=split, scaling=scaling, dtype=dtype, classes=True)
    if spans is None:
        size = dataset.chunk_rows
        spans = tuple(
            (at, min(at + size, stop)) for start, stop in rows.ranges for at in range(start, stop, size)
        )  # fmt: skip
    return _Chunks(rows, spans, cache_bytes)


# --- learning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnedFeatures:
    """The result of learning."""

    features: FeatureMap
    regularization: float
    history: list[Record] = dataclasses.field(repr=False)


@dataclass(frozen=True)
class _Named:
    """The parameters of a feature map, by the names used in the trainer."""

    features: FeatureMap

    @property
    def parameters(self) -> Mapping[str, np.ndarray]:
        return {PREFIX + name: np.asarray(value, np.float64) for name, value in self.features.parameters.items()}


def _replaced(features: FeatureMap, parameters: optim.Named) -> tuple[FeatureMap, float]:
    values = optim.from_log(parameters)
    lam = float(values.pop("regularization"))
    changed: FeatureMap = features.replace(**{name.removeprefix(PREFIX): value for name, value in values.items()})
    return changed, lam


def learn_features(
    dataset: RowSource,
    features: FeatureMap,
    regularization: float,
    settings: LearnSettings,
    *,
    executor: Executor,
    checkpoints: Checkpoints | None = None,
    callback: Callable[[Record], None] | None = None,
    split: str | None = "auto",
    scaling: str | None = "unit",
    dtype: str = "float64",
    alpha: float = 1.0,
    cache_bytes: int = CACHE_BYTES,
) -> LearnedFeatures:
    """Gradient descent with the exact gradient of all rows in every step; resumes like `learn_on_dataset`."""
    if settings.objective not in ("rcb", "erm"):
        raise ConfigError(f"objective={settings.objective!r}: full gradients support only 'rcb' and 'erm'")
    if settings.delay:
        raise ConfigError(f"delay={settings.delay}: full gradients support only delay=0")
    chunks = _chunks_of(dataset, split, scaling, dtype, cache_bytes)
    rows = chunks.rows.count
    start = log_parameters(_Named(features), regularization)
    trainer = Trainer(start, settings)

    def evaluate(parameters: optim.Named) -> Round:
        began = time.perf_counter()
        changed, lam = _replaced(features, parameters)
        out = _evaluate(chunks, changed, lam, executor, settings.risk, settings.tau, LOSS_FLOOR, alpha)
        seconds = time.perf_counter() - began
        pace = {"round_seconds": seconds, "rows_per_second": rows / seconds, "workers": executor.workers}
        return Round(out, rows, pace)

    model = {"kind": "full", "dtype": dtype, "scaling": scaling, "alpha": alpha, "split": chunks.rows.ranges}
    identity = run_identity(settings, {}, model, start, dataset.digest)
    found = trainer.run(
        lambda step, parameters: Started(lambda: evaluate(parameters)),
        identity,
        checkpoints,
        None if callback is None else lambda record, _: callback(record),
    )
    return LearnedFeatures(*_replaced(features, found.parameters), found.history)
