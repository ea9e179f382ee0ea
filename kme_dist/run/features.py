"""The final fit of a linear head on explicit features, W = (ZᵀZ + nλI)⁻¹ ZᵀY: sums over chunks, any number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, cholesky, like, namespace_of, to_host
from kme_dist.core.embedding import Embedding, log_loss
from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.objective import one_hot
from kme_dist.run.executors import Executor, SerialExecutor
from kme_dist.run.learn import Batches
from kme_dist.run.solve import search_regularization

_CHUNK_ROWS = 4_096
_LOO_ROWS = 20_000


@dataclass(frozen=True)
class Head:
    """W of f(x) = Wᵀ φ(x), with the λ it was solved for."""

    weights: np.ndarray
    regularization: float
    loo_log_loss: float | None = None


def _sums(features: Any, X: Array, y: np.ndarray, n_classes: int) -> dict[str, np.ndarray]:
    Z = astype(features.forward(X), "float64")
    Y = one_hot(y, n_classes, Z)
    return {"G": to_host(Z.T @ Z), "B": to_host(Z.T @ Y), "n": np.asarray(float(len(y)))}


def _stored_sums(source: Batches, span: tuple[int, int], features: Any, n_classes: int) -> dict[str, np.ndarray]:
    X, y = source.rows.read(*span)
    return _sums(features, source.on_device(X), np.asarray(y), n_classes)


def _add(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: left[name] + right[name] for name in left}


def solve_features(
    features: Any,
    source: Batches,
    n_classes: int,
    regularization: float,
    *,
    retune: bool = False,
    floor: float = 0.0,
    executor: Executor | None = None,
) -> Head:
    """W on all rows by sums over chunks, in double precision; with `retune`, λ by leave-one-out log loss.

    Leave-one-out is exact for the weights, P_i -> (P_i - h_i Y_i) / (1 - h_i) with h_i = z_iᵀ G⁻¹ z_i, but the features
    have seen every row: it is a rough guide where the map was learned on few rows. It is taken at the first rows of a
    data set where there are many.
    """
    calls = [(source, span, features, n_classes) for span in source.rows.chunks()]
    sums = (executor or SerialExecutor()).map_reduce(_stored_sums, calls, _add, name="feature-sums")
    n, G, B = float(sums["n"]), sums["G"], sums["B"]
    lam, loss = float(regularization), None
    if retune:
        X, y = _first_rows(source)
        lam, loss = _retuned(features, X, y, n_classes, G, B, n, lam, floor)
    shifted = np.asfortranarray(G + n * lam * np.eye(len(G)))
    return Head(np.ascontiguousarray(cholesky(shifted).solve(B)), lam, loss)


def _first_rows(source: Batches) -> tuple[Array, np.ndarray]:
    spans = source.rows.chunks()
    stop = next((span[1] for span in spans if span[1] >= _LOO_ROWS), spans[-1][1])
    X, y = source.rows.read(0, stop)
    return source.on_device(X), np.asarray(y)


def _retuned(
    features: Any,
    X: Array,
    y: np.ndarray,
    n_classes: int,
    G: np.ndarray,
    B: np.ndarray,
    n: float,
    start: float,
    floor: float,
) -> tuple[float, float]:
    values, Q = np.linalg.eigh(G)
    values = np.maximum(values, 0.0)
    rotated = to_host(astype(features.forward(X), "float64")) @ Q
    Y, B_rotated = one_hot(y, n_classes, rotated), Q.T @ B

    def evaluate(lam: float) -> float:
        scaled = rotated / (values + n * lam)
        leverage = np.sum(scaled * rotated, axis=1, keepdims=True)
        P = scaled @ B_rotated
        left_out = (P - leverage * Y) / np.maximum(1 - leverage, 1e-12)
        return float(log_loss(Y, left_out, floor))

    scale = max(float(values.sum()) / n, 1e-12) / n
    lam, loss, _ = search_regularization(lambda lams: [evaluate(lam) for lam in lams], scale=scale, start=start)
    return lam, loss


@dataclass(frozen=True)
class FeatureEmbedding:
    """f(x) = Wᵀ φ(x); or, with `on_features`, an embedding whose rows are features."""

    features: Any
    weights: Array
    on_features: Embedding | None = None
    regularization: float = math.nan

    def decision(self, X: Array) -> Array:
        """Decision probabilities (or scores) at the rows of X, chunk by chunk."""
        parts = []
        for rows in row_blocks(max(1, len(X)), _CHUNK_ROWS):
            Z = self.features.forward(X[rows, :])
            parts.append(
                Z @ like(to_host(self.weights), Z) if self.on_features is None else self.on_features.decision(Z)
            )
        return parts[0] if len(parts) == 1 else namespace_of(parts[0]).concat(parts, axis=0)
