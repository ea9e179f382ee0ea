"""The exact gradient over all rows, for explicit features: three passes of map and reduce.   [HNR, algorithm 2]

    out = full_gradient(data, features, 0.01, executor=executor)       # an Objective; out.gradient["features.NAME"]
    learned = learn_features(data, features, 0.01, LearnSettings(steps=100), executor=executor)

With Z = φ_θ(X), n x p, nothing of size n ever leaves a chunk:

    pass 1   ZᵀZ, ZᵀY, n         -> G = ZᵀZ + nλI, W = G⁻¹ ZᵀY                  on the driver
    pass 2   loss, ZᵀS           -> U = G⁻¹ (ZᵀS + 2c W), dq/dλ = -n Σ U W     on the driver
    pass 3   dq/dZ = (S - Z U) Wᵀ + (Y - P) Uᵀ, pushed through φ's vjp -> dq/dθ

Sums run over chunks in row order by a fixed tree, in double precision. `features` is any object with `parameters`,
`replace(**values)`, `forward(X)` and `vjp(X, Z_bar)`; its parameters may have any sign, and go by "features.NAME".
Features are computed anew in every pass, so memory is bounded by one chunk and p x p.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads, cholesky
from kme_dist.core import optim
from kme_dist.core.kernels.base import FeatureMap
from kme_dist.core.objective import LOSS_FLOOR, Objective, clipped_loss, generalisation_bound, one_hot
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.plan import BatchPlan
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.learn import LearnSettings, Record
from kme_dist.run.rounds import Loop, run_identity
from kme_dist.run.scaling import Scaling

PREFIX = "features."
Spans = tuple[tuple[int, int], ...]
Sums = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class _Job:
    """What every call has in common; recognised by its token on a worker that has met it."""

    token: str
    path: str
    spans: Spans
    scale: Scaling
    dtype: str
    n_classes: int

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Job) and other.token == self.token


@functools.lru_cache(maxsize=2)
def _opened(job: _Job) -> tuple[_Job, Dataset]:
    return job, open_dataset(job.path)


def _read(job: _Job, number: int) -> tuple[np.ndarray, np.ndarray]:
    job, data = _opened(job)
    X, y = data.read_rows(*job.spans[number])
    return job.scale.apply(X, job.dtype), np.asarray(y)


def _features(features: FeatureMap, X: np.ndarray) -> np.ndarray:
    return np.asarray(features.forward(X), dtype=np.float64)


def _moments(job: _Job, number: int, features: FeatureMap) -> Sums:
    X, y = _read(job, number)
    Z = _features(features, X)
    Y = one_hot(y, job.n_classes, Z)
    return {"G": Z.T @ Z, "B": Z.T @ Y, "n": np.asarray(float(len(Z)))}


def _losses(job: _Job, number: int, features: FeatureMap, W: np.ndarray, floor: float) -> Sums:
    X, y = _read(job, number)
    Z = _features(features, X)
    Y = one_hot(y, job.n_classes, Z)
    P = Z @ W
    loss, S = clipped_loss(Y, P, floor)
    hits = np.sum(P[np.arange(len(y)), y] >= P.max(axis=1, initial=-np.inf))
    return {"loss": np.asarray(loss), "ZS": Z.T @ S, "hits": np.asarray(float(hits))}


def _pullback(
    job: _Job, number: int, features: FeatureMap, W: np.ndarray, U: np.ndarray, weight: float, floor: float
) -> Sums:
    X, y = _read(job, number)
    if not len(X):
        return {name: np.zeros(np.shape(value)) for name, value in features.parameters.items()}
    Z = _features(features, X)
    Y = one_hot(y, job.n_classes, Z)
    P = Z @ W
    S = clipped_loss(Y, P, floor)[1] * weight
    Z_bar = (S - Z @ U) @ W.T + (Y - P) @ U.T
    return {name: np.asarray(value, np.float64) for name, value in features.vjp(X, Z_bar.astype(job.dtype)).items()}


def _add(left: Sums, right: Sums) -> Sums:
    return {name: left[name] + right[name] for name in left}


# --- one gradient -----------------------------------------------------------------------------------


def full_gradient(
    dataset: Dataset,
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
) -> Objective:
    """Objective and gradient over every row of a split, exact up to rounding.

    `spans` are the row ranges of the tasks (a chunk each by default); they may be uneven or empty, and decide the
    rounding alone.
    """
    job = _make_job(dataset, split, scaling, dtype, spans)
    tau = LearnSettings(complexity_weight=complexity_weight).tau
    return _judge(job, features, regularization, executor, risk, tau, loss_floor, alpha)


def _judge(
    job: _Job,
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
        raise ConfigError(f"regularization={lam!r}: needs a positive number")
    numbers = range(len(job.spans))
    sums = executor.map_reduce(_moments, [(job, i, features) for i in numbers], _add, name="feature-moments")
    n = float(sums["n"])
    if not n:
        raise DataError(f"{job.path}: there are no rows to learn from; the split is empty")
    with blas_threads(1):
        factor = cholesky(np.asfortranarray(sums["G"] + n * lam * np.eye(len(sums["G"]))))
        W = np.ascontiguousarray(factor.solve(sums["B"]))
    weight = 1.0 if risk == "sum" else 1.0 / n
    found = executor.map_reduce(_losses, [(job, i, features, W, floor) for i in numbers], _add, name="feature-losses")
    size = float(np.sqrt(np.sum(W * W)))
    c = tau * alpha / (2 * size) if size > 0 else 0.0
    with blas_threads(1):
        U = np.ascontiguousarray(factor.solve(weight * found["ZS"] + 2 * c * W))
    inner = executor.map_reduce(
        _pullback, [(job, i, features, W, U, weight, floor) for i in numbers], _add, name="feature-gradient"
    )
    loss, complexity = float(found["loss"]), alpha * size
    gradient = {PREFIX + name: value for name, value in inner.items()}
    gradient["regularization"] = np.asarray(-n * lam * np.sum(U * W))
    return Objective(
        value=weight * loss + tau * complexity,
        risk=weight * loss,
        complexity=complexity,
        bound=generalisation_bound(loss / n, complexity, int(n)),
        gradient=gradient,
        accuracy=float(found["hits"]) / n,
        dtype=job.dtype,
    )


def _make_job(dataset: Dataset, split: str | None, scaling: str | None, dtype: str, spans: Spans | None = None) -> _Job:
    if dataset.classes is None:
        raise DataError(f"{dataset.path} has no class labels; ingest it again with the column named by `label`")
    if split == "auto":
        split = "train" if "train" in dataset.splits else None
    if spans is None:
        rows = dataset.chunk_rows
        spans = tuple(
            (at, min(at + rows, stop))
            for start, stop in dataset.ranges(split)
            for at in range(start, stop, rows)
        )  # fmt: skip
    scale = Scaling.of(dataset.split_statistics(split), scaling)
    return _Job(os.urandom(8).hex(), dataset.path, spans or ((0, 0),), scale, dtype, len(dataset.classes))


# --- learning by it ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnedFeatures:
    """Where learning ended."""

    features: FeatureMap
    regularization: float
    history: list[Record] = dataclasses.field(repr=False)


@dataclass(frozen=True)
class _Named:
    """The parameters of a feature map under the names that the loop knows them by."""

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
    dataset: Dataset,
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
) -> LearnedFeatures:
    """Gradient descent with the exact gradient of all rows in every step; resumes as `learn_on_dataset` does."""
    if settings.objective not in ("rcb", "erm"):
        raise ConfigError(f"objective={settings.objective!r}: full gradients are of 'rcb' and 'erm'")
    job = _make_job(dataset, split, scaling, dtype)
    rows = sum(stop - start for start, stop in job.spans)
    plan = BatchPlan(job.spans, max(rows, 1), settings.seed, chunk_rows=dataset.chunk_rows)
    start: dict[str, Any] = {name: value.tolist() for name, value in _Named(features).parameters.items()}
    model = {"start": start, "regularization": regularization, "dtype": dtype, "scaling": scaling, "alpha": alpha}

    def judge(step: int, parameters: optim.Named) -> tuple[Objective, int, Record]:
        began = time.perf_counter()
        changed, lam = _replaced(features, parameters)
        out = _judge(job, changed, lam, executor, settings.risk, settings.tau, LOSS_FLOOR, alpha)
        seconds = time.perf_counter() - began
        pace = {"round_seconds": seconds, "rows_per_second": rows / seconds, "workers": executor.workers}
        return out, rows, pace

    loop = Loop(_Named(features), regularization, settings, rows)
    history = loop.run(judge, run_identity(dataset, settings, plan, model, 1), checkpoints, callback)
    return LearnedFeatures(*_replaced(features, loop.result()), history)
