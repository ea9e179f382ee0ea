"""Kernels of the difference x - x': Gaussian, Matérn, rational quadratic, periodic, Laplace, cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from kme_dist.backend import (
    Array,
    clamp_min,
    inplace,
    like,
    matmul,
    namespace_of,
    precision,
)
from kme_dist.core.kernels.base import (
    Gradients,
    Kernel,
    by_shape,
    check_vectors,
)
from kme_dist.errors import ConfigError


def weighted_spread(N: Array, X: Any, X2: Any) -> tuple[Array, Array]:
    """Σ_ij N_ij (z_id - z'_jd)² for every feature d, and Σ_ij N_ij.

    Expanded, so that the only work on the scale of the tile is one matrix product and two products with ones. Shapes
    matter here: on the host this orientation with d columns runs three times as fast as N Z' with a column of ones.
    """
    xp = namespace_of(N)
    d = X[1].shape[1] - 2
    Z, Z2 = X[1][:, :d], X2[1][:, :d]
    rows, columns = N @ X2[1][:, d], X[1][:, d] @ N  # column d of prepared rows holds ones
    crossed = xp.sum(Z2 * (N.T @ Z), axis=0)
    return rows @ (Z * Z) + columns @ (Z2 * Z2) - 2 * crossed, xp.sum(rows)


@dataclass(frozen=True, eq=False, repr=False)
class Stationary(Kernel):
    """k(x, x') = scale² f(s),  s = Σ_d (x_d - x'_d)² / length_scale_d².

    A vector of length scales is automatic relevance determination (ARD): one per feature.
    """

    length_scale: Any = 1.0
    scale: Any = 1.0
    learned: ClassVar[tuple[str, ...]] = ("length_scale", "scale")

    def profile(self, s: Array) -> Array:
        """f(s) for a tile of squared distances, over s itself where possible."""
        raise ConfigError(f"{type(self).__name__} must define profile(s)")

    def profile_slope(self, s: Array) -> Array:
        """df/ds."""
        raise ConfigError(f"{type(self).__name__} must define profile_slope(s)")

    def embed(self, X: Array) -> Array:
        """Rows z whose plain squared distances are s."""
        return check_vectors(X, self, self.length_scale) / like(self.length_scale, X)

    def prepare(self, X: Array) -> Any:
        # s_ij = [-2 z_i, |z_i|², 1] · [z_j, 1, |z_j|²]: one matrix product yields squared distances.
        Z = self.embed(X)
        xp = namespace_of(Z)
        squares = xp.sum(Z * Z, axis=1, keepdims=True)
        ones = squares * 0 + 1
        return xp.concat([-2 * Z, squares, ones], axis=1), xp.concat([Z, ones, squares], axis=1)

    def squared_distances(self, X: Any, X2: Any, out: Array = None) -> Array:
        """s for a tile of prepared rows."""
        return clamp_min(matmul(X[0], X2[1].T, out), 0.0)

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        K = self.profile(self.squared_distances(X, X2, out))
        variance = float(self.scale) ** 2
        if variance != 1.0:
            K *= variance
        return K

    def diag(self, X: Array) -> Array:
        return check_vectors(X, self, self.length_scale)[:, 0] * 0 + float(self.scale) ** 2

    def slope_tile(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> tuple[Array, Array]:
        """K_bar_ij scale² f'(s_ij), and sum(K_bar * K) for the derivative by the scale."""
        xp = namespace_of(K_bar)
        K = self.evaluate(X, X2) if K is None else K
        total = xp.sum(K_bar * K)
        N = K_bar
        N *= self.profile_slope(self.squared_distances(X, X2))
        N *= float(self.scale) ** 2
        return N, total

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        N, total = self.slope_tile(X, X2, K, K_bar)
        spread, _ = weighted_spread(N, X, X2)
        return {"length_scale": by_shape(-2 * spread, self.length_scale), "scale": 2 * total}

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        xp = namespace_of(K_bar)
        N, _ = self.slope_tile(X, X2, None, K_bar)
        d = X[1].shape[1] - 2
        Z, Z2 = X[1][:, :d], X2[1][:, :d]
        ell = like(self.length_scale, Z)
        X_bar = 2 * (xp.sum(N, axis=1)[:, None] * Z - N @ Z2) / ell
        X2_bar = 2 * (xp.sum(N, axis=0)[:, None] * Z2 - N.T @ Z) / ell
        return X_bar, X2_bar


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Stationary):
    """k(x, x') = scale² exp(-s/2)."""

    name = "gaussian"

    def prepare(self, X: Array) -> Any:
        # The exponent log scale² - s/2 straight from the matrix product; one exponential finishes the tile.
        Z = self.embed(X)
        xp = namespace_of(Z)
        halves = -0.5 * xp.sum(Z * Z, axis=1, keepdims=True)
        ones = halves * 0 + 1
        shifted = halves + 2 * math.log(float(self.scale))
        return xp.concat([Z, shifted, ones], axis=1), xp.concat([Z, ones, halves], axis=1)

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        # Rounding may leave the exponent of near-duplicates a hair above its maximum. A clamp would cost another pass
        # over the tile to mend an error that is already below the precision of the result.
        return inplace("exp", matmul(X[0], X2[1].T, out))

    def slope_tile(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> tuple[Array, Array]:
        N = K_bar
        N *= self.evaluate(X, X2) if K is None else K
        total = namespace_of(N).sum(N)
        N *= -0.5
        return N, total

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        # As in the base class, without the passes over the tile that the most used kernel can do without.
        N = K_bar
        N *= self.evaluate(X, X2) if K is None else K
        spread, total = weighted_spread(N, X, X2)
        return {"length_scale": by_shape(spread, self.length_scale), "scale": 2 * total}


@dataclass(frozen=True, eq=False, repr=False)
class Matern(Stationary):
    """Matérn kernels of smoothness ν = 1/2, 3/2 or 5/2, with r = sqrt(s).

    ν = 1/2: exp(-r);  3/2: (1 + √3 r) exp(-√3 r);  5/2: (1 + √5 r + 5 s/3) exp(-√5 r)
    """

    name = "matern"
    nu: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nu not in (0.5, 1.5, 2.5):
            raise ConfigError(f"Matern(nu={self.nu!r}): nu is 0.5, 1.5 or 2.5")

    def squared_distances(self, X: Any, X2: Any, out: Array = None) -> Array:
        s = super().squared_distances(X, X2, out)
        if self.nu != 0.5:
            return s
        # Rounding leaves 1e-16 between equal rows, the root makes 1e-8 of it, and the slope divides by that: what is
        # below the rounding error of |z|² + |z'|² is no distance. (The smoother profiles are flat at 0.)
        xp = namespace_of(s)
        noise = (X[1][:, -1:] + X2[1][:, -1:].T) * (1e-6 if precision(s) == "float32" else 2e-15)
        return xp.where(s > noise, s, s * 0)

    def profile(self, s: Array) -> Array:
        xp = namespace_of(s)
        a = xp.sqrt(2 * self.nu * s)
        if self.nu == 0.5:
            return xp.exp(-a)
        polynomial = 1 + a if self.nu == 1.5 else 1 + a + a * a / 3
        return polynomial * xp.exp(-a)

    def profile_slope(self, s: Array) -> Array:
        xp = namespace_of(s)
        a = xp.sqrt(2 * self.nu * s)
        if self.nu == 1.5:
            return -1.5 * xp.exp(-a)
        if self.nu == 2.5:
            return -5 / 6 * (1 + a) * xp.exp(-a)
        # f'(s) = -exp(-r)/(2r) has a pole at r = 0, which the factor (z - z')² = 0 cancels
        return xp.where(s > 0, -0.5 * xp.exp(-a) / xp.where(s > 0, a, a * 0 + 1), s * 0)


@dataclass(frozen=True, eq=False, repr=False)
class RationalQuadratic(Stationary):
    """k(x, x') = scale² (1 + s / (2 shape))^(-shape): a mixture of Gaussians of many length scales."""

    name = "rational_quadratic"
    shape: Any = 1.0
    learned = ("length_scale", "scale", "shape")

    def profile(self, s: Array) -> Array:
        a = float(self.shape)
        return (1 + s / (2 * a)) ** (-a)

    def profile_slope(self, s: Array) -> Array:
        a = float(self.shape)
        return -0.5 * (1 + s / (2 * a)) ** (-a - 1)

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        xp = namespace_of(K_bar)
        a = float(self.shape)
        ratio = self.squared_distances(X, X2) / (2 * a)
        K = self.evaluate(X, X2) if K is None else K
        by_shape = a * xp.sum(K_bar * K * (ratio / (1 + ratio) - xp.log(1 + ratio)))
        return {**super().pullback(X, X2, K, K_bar), "shape": by_shape}


@dataclass(frozen=True, eq=False, repr=False)
class Periodic(Gaussian):
    """k(x, x') = scale² exp(-2 Σ_d sin²(π (x_d - x'_d) / period_d) / length_scale_d²).

    The same thing as a Gaussian kernel on the circle (cos, sin)(2π x / period) / length_scale, and computed as such.
    """

    name = "periodic"
    period: Any = 1.0
    learned = ("length_scale", "scale", "period")

    def embed(self, X: Array) -> Array:
        xp = namespace_of(X)
        check_vectors(X, self, self.period)
        angle = 2 * math.pi * check_vectors(X, self, self.length_scale) / like(self.period, X)
        ell = like(self.length_scale, X)
        return xp.concat([xp.cos(angle) / ell, xp.sin(angle) / ell], axis=1)

    def prepare(self, X: Array) -> Any:
        return (*super().prepare(X), X)

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        xp = namespace_of(K_bar)
        Z_bar, Z2_bar, by_scale = self._embedding_pullback(X, X2, K, K_bar)
        by_ell, by_period = 0, 0
        for side, bar in ((X, Z_bar), (X2, Z2_bar)):
            source, d = side[2], side[2].shape[1]
            Z = side[1][:, : 2 * d]
            # dz/d log ell = -z;  d angle/d log period = -angle
            by_ell = by_ell - xp.sum(bar[:, :d] * Z[:, :d] + bar[:, d:] * Z[:, d:], axis=0)
            turn = Z[:, :d] * bar[:, d:] - Z[:, d:] * bar[:, :d]
            by_period = by_period - xp.sum(turn * (2 * math.pi * source / like(self.period, source)), axis=0)
        return {
            "length_scale": by_shape(by_ell, self.length_scale),
            "scale": by_scale,
            "period": by_shape(by_period, self.period),
        }

    def _embedding_pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> tuple[Array, Array, Array]:
        xp = namespace_of(K_bar)
        N, total = self.slope_tile(X, X2, K, K_bar)
        width = X[1].shape[1] - 2
        Z, Z2 = X[1][:, :width], X2[1][:, :width]
        Z_bar = 2 * (xp.sum(N, axis=1)[:, None] * Z - N @ Z2)
        Z2_bar = 2 * (xp.sum(N, axis=0)[:, None] * Z2 - N.T @ Z)
        return Z_bar, Z2_bar, 2 * total

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        Z_bar, Z2_bar, _ = self._embedding_pullback(X, X2, None, K_bar)
        rate = 2 * math.pi / like(self.period, X[2])
        bars = []
        for side, bar in ((X, Z_bar), (X2, Z2_bar)):
            d = side[2].shape[1]
            Z = side[1][:, : 2 * d]
            bars.append((-Z[:, d:] * bar[:, :d] + Z[:, :d] * bar[:, d:]) * rate)
        return bars[0], bars[1]


@dataclass(frozen=True, eq=False, repr=False)
class Laplace(Kernel):
    """k(x, x') = scale² exp(-Σ_d |x_d - x'_d| / length_scale_d): city-block distance, rough functions."""

    name = "laplace"
    length_scale: Any = 1.0
    scale: Any = 1.0
    learned = ("length_scale", "scale")

    def prepare(self, X: Array) -> Array:
        return check_vectors(X, self, self.length_scale) / like(self.length_scale, X)

    def evaluate(self, X: Array, X2: Array, out: Array = None) -> Array:
        # No matrix product yields absolute differences: one pass over the tile per feature, no (n, n, d) array.
        xp = namespace_of(X)
        distance = X[:, :1] * 0 + X2[:, :1].T * 0
        for j in range(X.shape[1]):
            distance += xp.abs(X[:, j : j + 1] - X2[:, j : j + 1].T)
        distance *= -1
        K = inplace("exp", distance)
        K *= float(self.scale) ** 2
        return K

    def diag(self, X: Array) -> Array:
        return check_vectors(X, self, self.length_scale)[:, 0] * 0 + float(self.scale) ** 2

    def pullback(self, X: Array, X2: Array, K: Array | None, K_bar: Array) -> Gradients:
        xp = namespace_of(K_bar)
        M = K_bar
        M *= self.evaluate(X, X2) if K is None else K
        by_feature = [xp.sum(M * xp.abs(X[:, j : j + 1] - X2[:, j : j + 1].T)) for j in range(X.shape[1])]
        return {
            "length_scale": by_shape(xp.stack(by_feature), self.length_scale),
            "scale": 2 * xp.sum(M),
        }

    def input_pullback(self, X: Array, X2: Array, K_bar: Array) -> tuple[Array, Array]:
        xp = namespace_of(K_bar)
        M = K_bar * self.evaluate(X, X2)
        signs = [xp.sign(X[:, j : j + 1] - X2[:, j : j + 1].T) for j in range(X.shape[1])]
        ell = like(self.length_scale, X)
        X_bar = -xp.stack([xp.sum(M * sign, axis=1) for sign in signs], axis=1) / ell
        X2_bar = xp.stack([xp.sum(M * sign, axis=0) for sign in signs], axis=1) / ell
        return X_bar, X2_bar


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Kernel):
    """k(x, x') = scale² cos(Σ_d frequency_d (x_d - x'_d)): one frequency of a spectral kernel.

    Times a Gaussian it is one component of a spectral mixture; see `spectral_mixture`.
    """

    name = "cosine"
    frequency: Any = 1.0
    scale: Any = 1.0
    learned = ("frequency", "scale")

    def prepare(self, X: Array) -> Any:
        xp = namespace_of(X)
        angle = xp.sum(check_vectors(X, self, self.frequency) * like(self.frequency, X), axis=1)[:, None]
        return xp.concat([xp.cos(angle), xp.sin(angle)], axis=1), X

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        K = matmul(X[0], X2[0].T, out)
        K *= float(self.scale) ** 2
        return K

    def diag(self, X: Array) -> Array:
        return check_vectors(X, self, self.frequency)[:, 0] * 0 + float(self.scale) ** 2

    def _sine_sums(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        # sin(a - b) = sin a cos b - cos a sin b, weighted by -scale² K_bar and summed over rows and columns
        xp = namespace_of(K_bar)
        swapped = xp.concat([-X2[0][:, 1:], X2[0][:, :1]], axis=1)
        B = K_bar * (X[0] @ swapped.T)
        B *= -(float(self.scale) ** 2)
        return xp.sum(B, axis=1), xp.sum(B, axis=0)

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        xp = namespace_of(K_bar)
        K = self.evaluate(X, X2) if K is None else K
        rows, columns = self._sine_sums(X, X2, K_bar)
        by_feature = (rows @ X[1] - columns @ X2[1]) * like(self.frequency, X[1])
        return {
            "frequency": by_shape(by_feature, self.frequency),
            "scale": 2 * xp.sum(K_bar * K),
        }

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        rows, columns = self._sine_sums(X, X2, K_bar)
        w = like(self.frequency, X[1]) + X[1][:1, :] * 0
        return rows[:, None] * w, -columns[:, None] * w
