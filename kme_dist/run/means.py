"""Sums over all pairs of rows, by tiles, over any executor: exact, O(n²) work, flat memory.

    rows = rows_of(dataset, dtype="float32")                 # or an array, or a list of strings
    moments = gram_moments(kernel, rows, executor=SerialExecutor())
    moments.rho, moments.varrho                              # means of all K_ij and of K_ii

A task is a pair of blocks of rows; it reads both, walks over tiles that fit a core's cache, and returns a few numbers.
Pairs of blocks below the diagonal also count for those above it. A task holds two blocks and one tile, whatever n.

With `feature_moments` ρ comes from random features instead, in O(nD): |mean φ(x)|², with its standard error.
Each random frequency is an estimate of ρ by itself, so their spread gives the error of the mean of D of them.

`spectral_by_centres` is s-kmse without the n x n spectrum: rows are projected on p centres, one pass gives the p x p
covariance, two more the leave-one-out scores of all rows for many λ, and the result is p weighted centres, with a
bound on the distance to the exact mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import free_bytes
from kme_dist.core.features import SAMPLERS, Spectral, sample_frequencies
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take
from kme_dist.core.means import (
    ESTIMATORS,
    SPECTRAL_GRID,
    Mean,
    ThinSpectrum,
    centred_gram,
    centred_moments,
    gram_weights,
    joined,
    orthonormal,
    shrinkage,
    tile_sums,
    weighted_features,
)
from kme_dist.core.pivots import choose_centres
from kme_dist.core.sums import Ones, Sums, sum_rows
from kme_dist.data.rows import RowsRef, rows_of
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.executors import Executor

BLOCK_ROWS = 8_192
SPECTRAL_ROWS, SPECTRAL_CENTRES = 5_000, 1_000  # s-kmse: exact up to this many rows; default centres beyond
_CHOICE_ROWS, _SLAB_ROWS = 20_000, 1_024  # rows to choose centres from; rows projected at a time


# --- ρ and ϱ ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GramMoments:
    """ρ, the mean of all K_ij, and ϱ, the mean of K_ii, over n rows."""

    rho: float
    varrho: float
    n: int
    error: float = 0.0  # standard error of ρ; 0 if summed exactly


def block_pairs(count: int) -> list[tuple[int, int]]:
    """Every pair of blocks on and below the diagonal."""
    return [(i, j) for i in range(count) for j in range(i + 1)]


def _pair(kernel: Kernel, left: RowsRef, right: RowsRef | None) -> np.ndarray:
    X = left.read()[0]
    total, _ = tile_sums(kernel, X, None if right is None else right.read()[0])
    diagonal = float(np.sum(_host(kernel.diag(X)))) if right is None else 0.0
    return np.asarray([total if right is None else 2 * total, diagonal])


def _host(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _add(left: Any, right: Any) -> Any:
    return left + right


def gram_moments(kernel: Kernel, rows: RowsRef, *, executor: Executor, block_rows: int = BLOCK_ROWS) -> GramMoments:
    """ρ and ϱ, exactly, from every pair of rows."""
    blocks = rows.parts(block_rows)
    calls = [(kernel, blocks[i], None if i == j else blocks[j]) for i, j in block_pairs(len(blocks))]
    total, diagonal = executor.map_reduce(_pair, calls, _add, name="gram-sum")
    return GramMoments(float(total) / rows.count**2, float(diagonal) / rows.count, rows.count)


def _evaluate(mean_kernel: Kernel, X: Any, block: RowsRef, weights: np.ndarray) -> np.ndarray:
    return np.asarray(weighted_features(mean_kernel, X, block.read()[0], weights))


def evaluate_mean(
    kernel: Kernel,
    rows: RowsRef,
    weights: np.ndarray | float,
    X: Any,
    *,
    executor: Executor,
    block_rows: int = BLOCK_ROWS,
) -> np.ndarray:
    """Σ_j weights_j k(x_j, ·) at the rows of X; a single weight applies to all rows."""
    at, calls = 0, []
    for block in rows.parts(BLOCK_ROWS):
        own = np.full(len(block), weights) if np.ndim(weights) == 0 else np.asarray(weights)[at : at + len(block)]
        calls.append((kernel, X, block, own))
        at += len(block)
    found: np.ndarray = executor.map_reduce(_evaluate, calls, _add, name="mean-values")
    return found


def _cross(kernel: Kernel, left: RowsRef, right: RowsRef) -> float:
    return tile_sums(kernel, left.read()[0], right.read()[0])[0]


def mean_inner(
    kernel: Kernel, left: RowsRef, right: RowsRef, *, executor: Executor, block_rows: int = BLOCK_ROWS
) -> float:
    """<μ̂_X, μ̂_Y>, the mean of all k(x_i, y_j)."""
    calls = [(kernel, a, b) for a in left.parts(block_rows) for b in right.parts(block_rows)]
    total: float = executor.map_reduce(_cross, calls, _add, name="gram-cross")
    return total / (left.count * right.count)


def target_moments(target: Mean | None, rows: RowsRef, kernel: Kernel, *, executor: Executor) -> tuple[float, float]:
    """<f*, μ̂> and |f*|²."""
    if target is None:
        return 0.0, 0.0
    _check_target(target, kernel)
    at_rows = evaluate_mean(kernel, rows, 1.0 / rows.count, target.points, executor=executor)
    return float(np.asarray(target.weights) @ at_rows), target.norm_squared()


def _check_target(target: Mean, kernel: Kernel) -> None:
    if target.kernel != kernel:
        raise ConfigError(f"the target has kernel {target.kernel!r}, the mean has {kernel!r}; they must be the same")


# --- ρ by random features ---------------------------------------------------------------------------------


def _angles(block: RowsRef, frequencies: np.ndarray) -> np.ndarray:
    X = np.asarray(block.read()[0], dtype=np.float64)
    total = np.zeros((2, frequencies.shape[1]))
    for part in row_blocks(len(X), 1024):  # memory bounded by a slab, whatever the block
        angle = X[part] @ frequencies
        total += np.stack([np.cos(angle).sum(axis=0), np.sin(angle).sum(axis=0)])
    return total


def feature_moments(
    kernel: Kernel, rows: RowsRef, frequencies: np.ndarray, *, executor: Executor, block_rows: int = BLOCK_ROWS
) -> GramMoments:
    """ρ of a stationary kernel from D frequencies (columns) drawn from its spectrum, with its standard error."""
    calls = [(block, frequencies) for block in rows.parts(block_rows)]
    sums = executor.map_reduce(_angles, calls, _add, name="random-features")
    variance = float(np.mean(_host(kernel.diag(rows.sample(1, 0)[0]))))
    single = variance * (sums[0] ** 2 + sums[1] ** 2) / rows.count**2
    count = len(single)
    error = float(single.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    return GramMoments(float(single.mean()), variance, rows.count, error)


def spectrum_sample(kernel: Kernel, n_features: int, count: int, seed: int) -> np.ndarray:
    """Frequencies from the spectral density of a Gaussian, Laplace or Matérn kernel."""
    if kernel.name not in SAMPLERS:
        raise ConfigError(f"{kernel!r} has no random features; choose {', '.join(SAMPLERS)}, or sums='exact'")
    nu = float(getattr(kernel, "nu", 1.5))
    width = getattr(kernel, "length_scale", 1.0)
    return sample_frequencies(n_features, count, kernel.name, width, nu, rng=np.random.default_rng([seed, 5]))


def random_features(kernel: Kernel, n_features: int, count: int, seed: int) -> Spectral:
    """φ with φ(x)·φ(x') near k(x, x'), from `count` random frequencies of the kernel."""
    frequencies = spectrum_sample(kernel, n_features, count, seed)
    return Spectral(frequencies)


# --- the four estimators, for any number of rows ------------------------------------------------------------


@dataclass(frozen=True)
class FittedMean:
    """(1 - α) μ̂ + α f* ("s-kmse": Σ β_i k(x_i, ·) + (1 - Σβ) f*), without copying the rows."""

    kernel: Kernel
    rows: RowsRef
    weights: np.ndarray | float  # one number if all rows have the same weight
    alpha: float
    target: Mean | None
    moments: GramMoments | None  # None if not needed by the estimator
    regularization: float | None = None
    unexplained: float = 0.0  # share of Σ k(x, x) orthogonal to the centres, if any
    error_bound: float = 0.0  # on the distance to the mean without centres, at the same λ

    def evaluate(self, X: Any, *, executor: Executor) -> np.ndarray:
        found = evaluate_mean(self.kernel, self.rows, self.weights, X, executor=executor)
        if self.target is not None and self.alpha:
            found = found + self.alpha * np.asarray(self.target.evaluate(X))
        return found

    def in_memory(self) -> Mean:
        """Points and weights as one record; reads all rows."""
        n = self.rows.count
        weights = np.full(n, self.weights) if np.ndim(self.weights) == 0 else np.asarray(self.weights)
        own = Mean(self.kernel, self.rows.read()[0], weights)
        if self.target is None or not self.alpha:
            return own
        return joined(own, Mean(self.kernel, self.target.points, np.asarray(self.target.weights) * self.alpha))


def fit_mean(
    kernel: Kernel,
    rows: RowsRef,
    estimator: str,
    *,
    executor: Executor,
    regularization: float | None = None,
    positive_part: bool = False,
    target: Mean | None = None,
    frequencies: np.ndarray | None = None,
    centres: int | None = None,
    seed: int = 0,
) -> FittedMean:
    """Any of the four estimators. "s-kmse" needs the Gram matrix in memory, or centres; the others at most sums."""
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator={estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    n = rows.count
    if estimator == "s-kmse":
        if centres is not None or n > SPECTRAL_ROWS or 3 * 8 * n * n > free_bytes("numpy"):
            return spectral_by_centres(
                kernel, rows, min(centres or SPECTRAL_CENTRES, n), executor=executor, regularization=regularization,
                target=target, seed=seed,
            )  # fmt: skip
        X = rows.read()[0]
        K = _host(kernel.gram(X))
        moments = GramMoments(float(K.mean()), float(np.trace(K)) / n, n)
        if target is not None:
            _check_target(target, kernel)
            K = centred_gram(K, _host(target.evaluate(X)), target.norm_squared())
        found = gram_weights(estimator, K, regularization, positive_part)
        return FittedMean(kernel, rows, found.weights, found.alpha, target, moments, found.regularization)
    if estimator == "kme":
        return FittedMean(kernel, rows, 1.0 / n, 0.0, None, None)
    if frequencies is not None:
        moments = feature_moments(kernel, rows, frequencies, executor=executor)
    else:
        moments = gram_moments(kernel, rows, executor=executor)
    cross, norm = target_moments(target, rows, kernel, executor=executor)
    rho, varrho = centred_moments(moments.rho, moments.varrho, cross, norm)
    alpha = shrinkage(estimator, rho, varrho, n, positive_part)
    return FittedMean(kernel, rows, (1 - alpha) / n, alpha, target, moments)


# --- spectral shrinkage with centres ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Projection:
    """z(x) = Tᵀ k(C, x) - shift: coordinates of k(x, ·) - f* along an orthonormal basis of the span of the centres."""

    kernel: Kernel
    points: Any
    T: np.ndarray
    shift: np.ndarray

    @classmethod
    def on(cls, kernel: Kernel, points: Any) -> _Projection:
        T = orthonormal(kernel, points)
        return cls(kernel, points, T, np.zeros(T.shape[1]))

    @property
    def size(self) -> int:
        return int(self.T.shape[1])

    @property
    def leading(self) -> None:
        """None: sums are in double precision, whatever the dtype of the rows."""

    @property
    def wide(self) -> _Projection:
        return self

    def metric(self) -> None:
        """None: the basis is orthonormal."""

    def rows(self, X: Any, out: Any = None) -> np.ndarray:
        return np.asarray(_host(self.kernel.gram(X, self.points)) @ self.T - self.shift)

    def slabs(self, X: Any) -> Any:
        for part in row_blocks(row_count(X), _SLAB_ROWS):
            yield self.rows(take(X, part))


def _thin_moments(projection: _Projection, block: RowsRef) -> tuple[Sums, float]:
    """Σ z zᵀ and Σ z, and the trace of the Gram matrix."""
    X, _ = block.read()
    return sum_rows(projection, X, X, Ones(), _SLAB_ROWS), float(np.sum(_host(projection.kernel.diag(X))))


def _add_each(left: Any, right: Any) -> Any:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _thin_scores(projection: _Projection, spectrum: ThinSpectrum, block: RowsRef, lams: np.ndarray) -> np.ndarray:
    return np.asarray(sum(spectrum.loo_sums(Z, lams) for Z in projection.slabs(block.read()[0])))


def spectral_by_centres(
    kernel: Kernel,
    rows: RowsRef,
    centres: int,
    *,
    executor: Executor,
    regularization: float | None = None,
    target: Mean | None = None,
    seed: int = 0,
    block_rows: int = BLOCK_ROWS,
) -> FittedMean:
    """S-KMSE of the rows projected on centres, in passes over the rows.

    With P the projection, Q = I - P, C the covariance of the features, C' = PCP and g = μ̂ - μ', the distance of this
    mean μ' to the exact one is |(C + λ)⁻¹ (C - C') g|, C - C' = QC + CQ - QCQ. With ε = mean |Q k(x, ·)|², which bounds
    |QCQ| and |Qμ̂|², that is at most √ε (1 + (2ε + c)/λ), c² = <g, C' g>; all of these are known after one pass.
    """
    n = rows.count
    if n < 2 and regularization is None:
        raise DataError("'s-kmse' requires at least two rows to choose its regularization, got one")
    candidates = rows.sample(_CHOICE_ROWS, seed)[0]
    chosen = choose_centres(kernel, candidates, min(centres, row_count(candidates)), "rpcholesky", seed)
    points = candidates[chosen] if hasattr(candidates, "shape") else [candidates[i] for i in chosen]
    projection, cross, norm = _Projection.on(kernel, points), 0.0, 0.0
    if target is not None:
        cross, norm = target_moments(target, rows, kernel, executor=executor)
        shift = projection.T.T @ _host(target.evaluate(points))
        projection = _Projection(kernel, points, projection.T, shift)
    blocks = rows.parts(block_rows)
    calls = [(projection, block) for block in blocks]
    sums, trace = executor.map_reduce(_thin_moments, calls, _add_each, name="spectral-moments")
    G, total = sums.symmetric(), sums.B[:, 0]
    spectrum = ThinSpectrum.of(G, total, n)
    trace += n * (norm - 2 * cross)  # of the features k(x, ·) - f*
    lam = regularization
    if lam is None:
        tried: dict[float, float] = {}
        grid = (trace / n or 1.0) * SPECTRAL_GRID
        for widths in (np.linspace(-0.4, 0.4, 9), None):
            scored = [(projection, spectrum, block, grid) for block in blocks]
            scores = executor.map_reduce(_thin_scores, scored, _add, name="spectral-scores")
            tried |= dict(zip(map(float, grid), map(float, scores), strict=True))
            lam = min(tried, key=lambda lam: tried[lam])
            grid = lam * 10.0**widths if widths is not None else grid
    assert lam is not None
    w = spectrum.weights(lam)
    kept = float(total @ w)  # Σβ
    along = G @ w + projection.shift * kept  # Σ β_i (z_i + shift)
    gap = total / n - G @ w  # of the projected mean to the shrunk one: g along the centres
    epsilon = max(trace - float(np.trace(G)), 0.0) / n
    c = math.sqrt(max(float(gap @ G @ gap) / n, 0.0))
    bound = math.sqrt(epsilon) * (1 + (2 * epsilon + c) / lam)
    if target is not None:
        bound += abs(kept) * math.sqrt(max(norm - float(projection.shift @ projection.shift), 0.0))
    return FittedMean(
        kernel, rows_of(points, rows.dtype), projection.T @ along, 1.0 - kept, target, None, lam,
        epsilon * n / trace if trace else 0.0, bound,
    )  # fmt: skip
