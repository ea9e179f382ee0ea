"""Kernel means: the mean of k(x, ·) over a sample, shrunk or not.   [KMSE]

    μ̂ = (1/n) Σ k(x_i, ·)                                 the empirical mean ("kme")
    μ = α f* + (1 - α) μ̂                                  shrunk towards a fixed f* ("b-kmse", "r-kmse")
    μ = f* + (Ĉ + λI)⁻¹ Ĉ (μ̂ - f*)                        shrunk more in directions of low variance ("s-kmse")

With ρ the mean of all K_ij and ϱ the mean of K_ii, taken of the features k(x_i, ·) - f* (`centred_moments`):

    b-kmse    α = Δ / (Δ + ρ),  Δ = (ϱ - ρ)/(n - 1)       = (ϱ - ρ) / (ϱ + (n - 2) ρ)
    r-kmse    α = λ/(1 + λ),  λ = n(ϱ - ρ) / ((n - 1)(nρ - ϱ)) minimises the leave-one-out score
    s-kmse    β = (K + nλI)⁻¹ K 1/n,  λ by the leave-one-out score, for many λ after one eigendecomposition;
              with K ≈ Z Zᵀ of p columns that is one of ZᵀZ, and sums over rows (`ThinSpectrum`)

Any mean is a record of points and weights:

>>> import numpy as np
>>> from kme_dist.core.kernels import Gaussian
>>> mean = Mean(Gaussian(), np.array([[0.0], [1.0]]), np.array([0.5, 0.5]))
>>> bool(np.isclose(mean.evaluate(np.array([[0.5]]))[0], np.exp(-0.125)))
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, like, namespace_of, to_host
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take
from kme_dist.errors import ConfigError, DataError

ESTIMATORS = ("kme", "b-kmse", "r-kmse", "s-kmse")
TILE_ROWS = 512  # rows and columns of a tile, which stays in a core's cache between product, exponential and sum
_DEVICE_TILE_ROWS = 4096
SPECTRAL_GRID = 10.0 ** np.arange(-10.0, 4.1, 0.5)  # λ of s-kmse, times the mean of k(x, x)


# --- sums over Gram matrices, tile by tile -------------------------------------------------------------


def tile_sums(
    kernel: Kernel, X: Any, X2: Any = None, left: Array | None = None, right: Array | None = None
) -> tuple[float, np.ndarray]:
    """Σ_ij K_ij and, for each column b of weights, Σ_ij left_ib K_ij right_jb; no Gram matrix is held.

    Without X2 the Gram matrix is symmetric: half of the tiles are computed, and `left` is used on both sides.
    """
    symmetric = X2 is None
    columns = kernel.prepare(X if symmetric else X2)
    rows = columns if symmetric else kernel.prepare_beside(X, columns)
    n, m = row_count(X), row_count(X if symmetric else X2)
    if not n or not m:
        return 0.0, np.zeros(0 if left is None else left.shape[1])
    other = left if symmetric else right
    total, forms = 0.0, np.zeros(0 if left is None else left.shape[1])
    side = TILE_ROWS if isinstance(kernel.diag(take(X, slice(0, 1))), np.ndarray) else _DEVICE_TILE_ROWS
    scratch = _Scratch()
    for J in row_blocks(m, side):
        part = take(columns, J)
        for I in row_blocks(n, side):
            if symmetric and I.start < J.start:
                continue
            twice = 2.0 if symmetric and I.start > J.start else 1.0
            tile = kernel.evaluate(take(rows, I), part, out=scratch.like(I.stop - I.start, J.stop - J.start, part))
            xp = namespace_of(tile)
            total += twice * float(xp.sum(tile))
            if left is not None and other is not None:
                forms = forms + twice * np.asarray(
                    [float(v) for v in xp.sum(left[I, :] * (tile @ other[J, :]), axis=0)]
                )
    return total, forms


class _Scratch:
    """One block of host memory that every tile is written to."""

    def __init__(self) -> None:
        self._memory: np.ndarray | None = None

    def like(self, n: int, m: int, prepared: Any) -> np.ndarray | None:
        reference = prepared[0] if isinstance(prepared, tuple) else prepared
        if not isinstance(reference, np.ndarray) or reference.dtype.kind != "f":
            return None
        if self._memory is None or self._memory.dtype != reference.dtype or self._memory.size < n * m:
            self._memory = np.empty(max(n * m, TILE_ROWS * TILE_ROWS), reference.dtype)
        return self._memory[: n * m].reshape(n, m)


def weighted_features(kernel: Kernel, X: Any, points: Any, weights: Array) -> Array:
    """Σ_j k(x_i, points_j) weights_j for every row x_i, tile by tile; weights may have several columns."""
    centres = kernel.prepare(points)
    queries = kernel.prepare_beside(X, centres)
    n, m = row_count(X), row_count(points)
    parts = []
    for I in row_blocks(n, TILE_ROWS):
        part: Any = 0.0
        for J in row_blocks(m, 4 * TILE_ROWS):
            part = part + kernel.evaluate(take(queries, I), take(centres, J)) @ weights[J, ...]
        parts.append(part)
    return namespace_of(weights).concat(parts, axis=0) if parts and m else weights[:0, ...]


def orthonormal(kernel: Kernel, points: Any) -> np.ndarray:
    """T such that Tᵀ k(points, x) are coordinates of k(x, ·) along an orthonormal basis of the span of the points."""
    values, vectors = np.linalg.eigh(np.asarray(kernel.gram(points), dtype=np.float64))
    kept = values > 1e-12 * values[-1]  # the rest is rounding error
    return np.asarray(vectors[:, kept] / np.sqrt(values[kept]))


# --- means ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """Σ_j weights_j k(points_j, ·), an element of the kernel's Hilbert space."""

    kernel: Kernel
    points: Any
    weights: Array

    def evaluate(self, X: Any) -> Array:
        """The value at every row of X; for a kernel that is a density, a density estimate."""
        return weighted_features(self.kernel, X, self.points, self.weights)

    def expectation(self, f: Callable[[Any], Any]) -> Any:
        """Σ_j weights_j f(points_j); `f` takes all points and returns a value (or row) for each."""
        return self.weights @ np.asarray(f(self.points), dtype=np.float64)

    def inner(self, other: Mean) -> float:
        """<μ, ν> = Σ_ij a_i b_j k(x_i, z_j)"""
        self._check_kernel(other)
        if other is self:
            return float(tile_sums(self.kernel, self.points, left=self.weights[:, None])[1][0])
        forms = tile_sums(self.kernel, self.points, other.points, self.weights[:, None], other.weights[:, None])[1]
        return float(forms[0])

    def norm_squared(self) -> float:
        return max(self.inner(self), 0.0)

    def distance(self, other: Mean) -> float:
        """|μ - ν|: the maximum mean discrepancy of the two."""
        squared = self.norm_squared() - 2 * self.inner(other) + other.norm_squared()
        return math.sqrt(max(squared, 0.0))

    def _check_kernel(self, other: Mean) -> None:
        if self.kernel != other.kernel:
            raise ConfigError(f"means of different kernels cannot be compared: {self.kernel!r} and {other.kernel!r}")


def mixed(alpha: float, target: Mean | None, mean: Mean) -> Mean:
    """α f* + (1 - α) μ̂; f* = 0 without a target."""
    weights = mean.weights * (1 - alpha)
    if target is None or alpha == 0:
        return Mean(mean.kernel, mean.points, weights)
    return joined(Mean(mean.kernel, mean.points, weights), Mean(target.kernel, target.points, target.weights * alpha))


def joined(first: Mean, second: Mean) -> Mean:
    """The sum of two means, as one record."""
    first._check_kernel(second)
    xp = namespace_of(first.weights)
    points = (
        namespace_of(first.points).concat([first.points, second.points], axis=0)
        if hasattr(first.points, "shape")
        else [*first.points, *second.points]
    )
    return Mean(first.kernel, points, xp.concat([first.weights, second.weights], axis=0))


# --- how much to shrink ------------------------------------------------------------------------------


def centred_moments(rho: float, varrho: float, cross: float, target_norm: float) -> tuple[float, float]:
    """ρ and ϱ of the features k(x_i, ·) - f*, from those of k(x_i, ·), <f*, μ̂> and |f*|²."""
    shift = target_norm - 2 * cross
    return rho + shift, varrho + shift


def shrinkage(estimator: str, rho: float, varrho: float, n: int, positive_part: bool = False) -> float:
    """α of "kme", "b-kmse" or "r-kmse": the weight of f*.

    `positive_part` estimates |μ - f*|² of b-kmse without bias, by ρ - Δ instead of ρ: the positive-part form of James
    and Stein, α = min(1, Δ/ρ), which shrinks more, and completely where the sample carries no information about μ. The
    weight of r-kmse is its own positive part: where nρ <= ϱ the leave-one-out score decreases in λ, and α is 1.
    """
    if estimator == "kme":
        return 0.0
    if n < 2:
        raise DataError(f"{estimator!r} requires at least two rows, got {n}")
    spread = max(varrho - rho, 0.0)
    if spread == 0.0:  # all rows are the same point
        return 0.0
    delta = spread / (n - 1)
    if estimator == "b-kmse":
        if positive_part:
            return 1.0 if delta >= rho else delta / rho
        return delta / (delta + max(rho, 0.0))
    if estimator == "r-kmse":
        room = (n - 1) * (n * rho - varrho)
        return 1.0 if room <= 0 else n * spread / (n * spread + room)
    raise ConfigError(f"estimator={estimator!r} has no single shrinkage weight; choose 'kme', 'b-kmse' or 'r-kmse'")


# --- spectral shrinkage --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spectrum:
    """One eigendecomposition K = Q Λ Qᵀ, from which weights and leave-one-out scores follow for every λ.

    The eigenvalues are of K, not of K/n; `ones` is Qᵀ1.
    """

    K: Array
    values: Array
    vectors: Array
    ones: Array

    @classmethod
    def of(cls, K: Array) -> Spectrum:
        xp = namespace_of(K)
        K = astype(K, "float64")
        values, vectors = xp.linalg.eigh(K)
        values = xp.where(values > 0, values, values * 0)
        return cls(K, values, vectors, xp.sum(vectors, axis=0))

    def weights(self, lam: float) -> Array:
        """β = (K + nλI)⁻¹ K 1/n"""
        n = self.K.shape[0]
        return self.vectors @ (self.values / (self.values + n * lam) * self.ones) / n

    def loo_scores(self, lams: Sequence[float] | np.ndarray) -> np.ndarray:
        """(1/n) Σ_i |k(x_i, ·) - μ^(-i)|² for every λ, where μ^(-i) is the estimate from the other n - 1 rows.

        With B = (K + sI)⁻¹, s = (n-1)λ, the solution without row i is the full one with one entry corrected,
        u = B1 - (B1)_i/B_ii B_:i, so every term needs only B1, B²1, diag B and diag B².
        """
        xp, n = namespace_of(self.K), self.K.shape[0]
        if n < 2:
            raise DataError("leave-one-out requires at least two rows")
        s = like(np.asarray(lams, dtype=np.float64) * (n - 1), self.K)[None, :]  # a column for each λ
        d = 1 / (self.values[:, None] + s)
        squares = self.vectors * self.vectors
        b, bb = self.vectors @ (d * self.ones[:, None]), self.vectors @ (d * d * self.ones[:, None])
        B_ii, B2_ii = squares @ d, squares @ (d * d)
        ratio = b / B_ii
        sums, diag = xp.sum(self.K, axis=1)[:, None], (squares @ self.values)[:, None]
        along = xp.sum(b, axis=0)[None, :] - ratio * b  # 1ᵀu
        size = xp.sum(b * b, axis=0)[None, :] - 2 * ratio * bb + ratio * ratio * B2_ii  # |u|²
        cross = sums - diag - s * (1 - ratio)  # (n-1) k_iᵀ β
        wKw = xp.sum(sums) - 2 * sums + diag
        norm = wKw - 2 * s * (n - 1 - s * along) + s * s * (along - s * size)  # (n-1)² βᵀKβ
        return np.asarray(to_host(xp.mean(diag - 2 * cross / (n - 1) + norm / (n - 1) ** 2, axis=0)))

    def best(self) -> tuple[float, dict[float, float]]:
        """The λ with the lowest leave-one-out score, and the score of every λ tried: half decades, then refined."""
        scale = float(namespace_of(self.K).sum(self.values)) / self.K.shape[0] or 1.0
        tried: dict[float, float] = {}
        lams = scale * SPECTRAL_GRID
        for width in (0.25, 0.12, 0.06, 0.03, 0.0):
            tried |= dict(zip(map(float, lams), map(float, self.loo_scores(lams)), strict=True))
            lams = min(tried, key=lambda lam: tried[lam]) * 10.0 ** np.array([-width, width])
        return min(tried, key=lambda lam: tried[lam]), tried


@dataclass(frozen=True)
class ThinSpectrum:
    """The same for K ≈ Z Zᵀ with few columns: rows z_i represent k(x_i, ·), and only p x p arrays are kept.

    `values` and `vectors` are those of G = ZᵀZ, `sums` is Qᵀ Zᵀ1.
    """

    n: int
    values: Array
    vectors: Array
    sums: Array

    @classmethod
    def of(cls, G: Array, total: Array, n: int) -> ThinSpectrum:
        """From Σ z zᵀ and Σ z over n rows."""
        xp = namespace_of(G)
        values, vectors = xp.linalg.eigh(astype(G, "float64"))
        return cls(n, xp.where(values > 0, values, values * 0), vectors, vectors.T @ total)

    def weights(self, lam: float) -> Array:
        """w with β_i = z_iᵀ w: (G + nλI)⁻¹ Zᵀ1/n"""
        return self.vectors @ (self.sums / (self.values + self.n * lam)) / self.n

    def loo_sums(self, Z: Array, lams: Sequence[float] | np.ndarray) -> np.ndarray:
        """Σ_i |z_i - μ^(-i)|² over the given rows (some of the n), for every λ; sums over blocks of rows can be added.

        With m the mean of the other rows, s = (n-1)λ and H = (G + sI)⁻¹, μ^(-i) = m - su, where
        u = Hm + c Hz, c = zᵀHm / (1 - zᵀHz), solves the system without row i.
        """
        xp = namespace_of(Z)
        s = like(np.asarray(lams, dtype=np.float64) * (self.n - 1), self.values)[None, :]
        d = 1 / (self.values[:, None] + s)
        z = astype(Z, "float64") @ self.vectors
        m = (self.sums[None, :] - z) / (self.n - 1)
        q = z - m
        c = (z * m) @ d / (1 - (z * z) @ d)
        along = (q * m) @ d + c * ((q * z) @ d)  # qᵀu
        size = (m * m) @ (d * d) + 2 * c * ((m * z) @ (d * d)) + c * c * ((z * z) @ (d * d))  # |u|²
        found = xp.sum(q * q) + xp.sum(2 * s * along + s * s * size, axis=0)
        return np.asarray(to_host(found))


def centred_gram(K: Array, at_points: Array, target_norm: float) -> Array:
    """Gram matrix of k(x_i, ·) - f*: K_ij - f*(x_i) - f*(x_j) + |f*|²."""
    return K - at_points[:, None] - at_points[None, :] + target_norm


def leave_one_out_score(K: Array, alpha: float) -> float:
    """(1/n) Σ_i |k(x_i, ·) - (1 - α) μ̂^(-i)|², f* = 0: minimised over α by the weight of r-kmse."""
    xp, n = namespace_of(K), K.shape[0]
    sums, diag = xp.sum(K, axis=1), xp.sum(K * like(np.eye(n), K), axis=1)
    keep = (1 - alpha) / (n - 1)
    norm = xp.sum(sums) - 2 * sums + diag
    return float(xp.mean(diag - 2 * keep * (sums - diag) + keep * keep * norm))


@dataclass(frozen=True)
class Weighting:
    """Result of an estimator for n rows: weights β, the weight α of f* (s-kmse: 1 - Σβ), and λ of s-kmse."""

    weights: Array
    alpha: float
    regularization: float | None = None


def gram_weights(
    estimator: str, K: Array, regularization: float | None = None, positive_part: bool = False
) -> Weighting:
    """The weights of any of the four estimators from a Gram matrix in memory (of k(x_i, ·) - f* where f* is not 0)."""
    xp, n = namespace_of(K), K.shape[0]
    if estimator == "s-kmse":
        spectrum = Spectrum.of(K)
        if n < 2 and regularization is None:
            raise DataError("'s-kmse' requires at least two rows to choose its regularization, got one")
        lam = spectrum.best()[0] if regularization is None else float(regularization)
        beta = spectrum.weights(lam)
        return Weighting(beta, 1.0 - float(xp.sum(beta)), lam)
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator={estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    varrho = float(xp.sum(K * like(np.eye(n), K))) / n
    alpha = shrinkage(estimator, float(xp.mean(K)), varrho, n, positive_part)
    return Weighting(astype(K[:, 0] * 0 + (1 - alpha) / n, "float64"), alpha)
