"""Kernels of the difference x - x': Gaussian, Matérn, rational quadratic, periodic, Laplace, cosine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kme_dist.backend import (
    Array,
    astype,
    clamp_min,
    inplace,
    is_cupy,
    is_sparse,
    like,
    matmul,
    namespace_of,
    precision,
)
from kme_dist.core.kernels import fused
from kme_dist.core.kernels.base import (
    Differences,
    Frame,
    Gradients,
    by_shape,
    check_vectors,
    row_blocks,
)
from kme_dist.core.kernels.sparse import Bordered, beside, cross_sums, divided, squared_norms
from kme_dist.errors import ConfigError
from kme_dist.meter import metered

# |z|² + |z'|² - 2 z·z' is off by the unit roundoff times |z|² + |z'|². Where rows are so far from their origin that
# this is not small compared with 1, distances below this fraction of |z|² + |z'|² are computed from differences.
_NEAR = 2.0**-7
_CACHED = 2**17  # entries of a tile that stay in a core's cache
_FAR_REACH = {"float32": 2.0**12, "float64": 2.0**41}  # 2^-12 / unit roundoff


def clamp_max(A: Array, bound: float, X: Any, X2: Any) -> Array:
    """min(A, bound), over A itself where possible; A is a tile of prepared rows."""
    if isinstance(A, np.ndarray):
        # In tiles on the diagonal some entries exceed the bound by rounding; elsewhere hardly any do, and the largest
        # entry is the cheapest test.
        head = min(A.shape) if isinstance(X[1], Bordered) or np.may_share_memory(X[1], X2[1]) else 0
        if head:
            _lower(A[:head, :head], bound)
        for rest in (A[head:, :], A[:head, head:]):
            if rest.size and not rest.max() <= bound:
                _lower(rest, bound)
        return A
    if is_cupy(A):
        return namespace_of(A).minimum(A, A.dtype.type(bound), out=A)
    return namespace_of(A).clip(A, max=bound)


def _lower(A: np.ndarray, bound: float) -> None:
    # Against a contiguous vector: with a scalar NumPy takes two to five times as long.
    along = (A.shape[0], 1) if A.strides[0] < A.strides[1] else (1, A.shape[1])
    np.minimum(A, np.full(along, bound, A.dtype), out=A)


def exact_where_near(s: Array, X: Any, X2: Any) -> Array:
    """Squared distances of prepared rows; those much smaller than |z|² + |z'|² are computed from differences."""
    xp, near = namespace_of(s), _near(s, X, X2)
    differences = _near_differences(near, X, X2)
    if xp is not np:
        return xp.where(near, sum(difference**2 for difference in differences), s)
    s[near] = sum(difference**2 for difference in differences)
    return s


def _near(s: Array, X: Any, X2: Any) -> Array:
    xp, d = namespace_of(s), X[1].shape[1] - 2
    Z, Z2 = X[1][:, :d], X2[1][:, :d]
    return s < _NEAR * (xp.sum(Z * Z, axis=1)[:, None] + xp.sum(Z2 * Z2, axis=1)[None, :])


def _near_differences(near: Array, X: Any, X2: Any) -> Iterator[Array]:
    """z_d - z'_d for one feature after the other; on the host only for near pairs, which are usually few."""
    d = X[1].shape[1] - 2
    if isinstance(near, np.ndarray):
        rows, columns = np.nonzero(near)
        yield from (X[1][rows, j] - X2[1][columns, j] for j in range(d))
    else:
        yield from (X[1][:, j][:, None] - X2[1][:, j][None, :] for j in range(d))


def weighted_spread(N: Array, X: Any, X2: Any, steep: bool = False) -> tuple[Array, Array]:
    """Σ_ij N_ij (z_id - z'_jd)² for every feature d, and Σ_ij N_ij; `steep` where N grows without bound as s vanishes.

    Expanded, so that the only work on the scale of the tile is one matrix product and two products with ones. Shapes
    matter here: on the host this orientation with d columns runs three times as fast as N Z' with a column of ones.
    """
    xp = namespace_of(N)
    d = X[1].shape[1] - 2
    Z, Z2 = X[1][:, :d], X2[1][:, :d]
    total, apart = None, None
    if not is_sparse(Z) and (steep or _reach_far(N, X, X2)):
        # Near pairs from differences, as in `exact_where_near`, the others expanded.
        total, near = xp.sum(N), _near(_expanded(Z, Z2), X, X2)
        weights = N[near] if xp is np else xp.where(near, N, N * 0)
        apart = xp.stack([xp.sum(weights * difference**2) for difference in _near_differences(near, X, X2)])
        N = xp.where(near, N * 0, N)
    rows, columns = N @ X2[1][:, d], X[1][:, d] @ N  # column d of prepared rows holds ones
    crossed = cross_sums(N, Z, Z2)
    spread = rows @ (Z * Z) + columns @ (Z2 * Z2) - 2 * crossed
    return (spread, xp.sum(rows)) if apart is None else (spread + apart, total)


def _expanded(Z: Array, Z2: Array) -> Array:
    xp = namespace_of(Z)
    return xp.sum(Z * Z, axis=1)[:, None] + xp.sum(Z2 * Z2, axis=1)[None, :] - 2 * (Z @ Z2.T)


@dataclass(frozen=True, eq=False, repr=False)
class Stationary(Differences):
    """k(x, x') = scale² f(s),  s = Σ_d (x_d - x'_d)² / length_scale_d².

    A vector of length scales is automatic relevance determination (ARD): one per feature. A subclass that defines
    `embed` sets `shift_invariant = True` if adding a vector to all rows does not change its distances.
    """

    length_scale: Any = 1.0
    scale: Any = 1.0
    learned: ClassVar[tuple[str, ...]] = ("length_scale", "scale")

    @property
    def steep(self) -> bool:
        """Whether f'(s) has a pole at 0: then small distances must be computed to the last digit."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "embed" in vars(cls) and "shift_invariant" not in vars(cls):
            cls.shift_invariant = False

    def profile(self, s: Array) -> Array:
        """f(s) for a tile of squared distances, over s itself where possible."""
        raise ConfigError(f"{type(self).__name__} must define profile(s)")

    def profile_slope(self, s: Array) -> Array:
        """df/ds."""
        raise ConfigError(f"{type(self).__name__} must define profile_slope(s)")

    def embed(self, X: Array) -> Array:
        """Rows z whose plain squared distances are s."""
        return divided(self.check(X), self.length_scale)

    def check(self, X: Any) -> Array:
        return check_vectors(X, self, self.length_scale)

    def prepared(self, X: Array, frame: Frame) -> tuple[Any, ...]:
        # s_ij = [-2 z_i, |z_i|², 1] · [z_j, 1, |z_j|²]: one matrix product yields squared distances.
        Z, squares = self._centred(X, frame)
        ones = squares * 0 + 1
        left, right = beside(-2 * Z, squares, ones), beside(Z, ones, squares)
        return left, right, X, Frame(frame.origin, _largest(squares))

    def _centred(self, X: Array, frame: Frame) -> tuple[Array, Array]:
        """z and |z|². Subtracts before dividing by length scales: the quotient would lose the digits."""
        Z = self.embed(frame.subtract(X))
        return Z, squared_norms(Z)

    def squared_distances(self, X: Any, X2: Any, out: Array = None) -> Array:
        """s for a tile of prepared rows."""
        X = self.aligned(X, X2)
        s = clamp_min(matmul(X[0], X2[1].T, out), 0.0)
        if isinstance(X[1], Bordered):
            return s
        return exact_where_near(s, X, X2) if self.steep or _reach_far(s, X, X2) else s

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        if (K := _device_values(self, X, X2, out)) is not None:
            return K
        K = self.profile(self.squared_distances(X, X2, out))
        variance = float(self.scale) ** 2
        if variance != 1.0:
            K *= variance
        return clamp_max(K, variance, X, X2)

    def times(self, X: Any, X2: Any, V: Array, total: Array = None, out: Array = None) -> Array:
        found = _device_times(self, X, X2, V, total)
        return Differences.times(self, X, X2, V, total, out) if found is None else found

    def diag(self, X: Array) -> Array:
        if is_sparse(X):
            return np.full(X.shape[0], float(self.scale) ** 2, self.check(X).dtype)
        return self.check(X)[:, 0] * 0 + float(self.scale) ** 2

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
        X = self.aligned(X, X2)
        N, total = self.slope_tile(X, X2, K, K_bar)
        spread, _ = weighted_spread(N, X, X2, self.steep)
        return {"length_scale": by_shape(-2 * spread, self.length_scale), "scale": 2 * total}

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        X, xp = self.aligned(X, X2), namespace_of(K_bar)
        N, _ = self.slope_tile(X, X2, None, K_bar)
        d = X[1].shape[1] - 2
        Z, Z2 = X[1][:, :d], X2[1][:, :d]
        ell = like(self.length_scale, Z)
        X_bar = 2 * (xp.sum(N, axis=1)[:, None] * Z - N @ Z2) / ell
        X2_bar = 2 * (xp.sum(N, axis=0)[:, None] * Z2 - N.T @ Z) / ell
        return X_bar, X2_bar


def _largest(squares: Array) -> float:
    return float(namespace_of(squares).max(squares)) if squares.shape[0] else 0.0


def _reach_far(tile: Array, X: Any, X2: Any) -> bool:
    """Whether expanded squares of prepared rows lose too many digits of the distances in the tile's precision."""
    if not isinstance(X[-1], Frame) or not isinstance(X2[-1], Frame):
        return False
    return max(X[-1].reach, X2[-1].reach) > _FAR_REACH[precision(tile)]


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Stationary):
    """k(x, x') = scale² exp(-s/2)."""

    name = "gaussian"

    def prepared(self, X: Array, frame: Frame) -> tuple[Any, ...]:
        # The exponent log scale² - s/2 straight from the matrix product; one exponential finishes the tile.
        Z, squares = self._centred(X, frame)
        halves = -0.5 * squares
        ones, shifted = halves * 0 + 1, halves + 2 * math.log(float(self.scale))
        left, right = beside(Z, shifted, ones), beside(Z, ones, halves)
        return left, right, X, Frame(frame.origin, _largest(squares))

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        if (K := _device_values(self, X, X2, out)) is not None:
            return K
        X = self.aligned(X, X2)
        exponent = matmul(X[0], X2[1].T, out)
        if _reach_far(exponent, X, X2) and not isinstance(X[1], Bordered):
            top = 2 * math.log(float(self.scale))
            exponent[...] = top - 0.5 * exact_where_near(2 * (top - exponent), X, X2)
        # Rounding may leave near-duplicates slightly above scale², which is the maximum.
        return clamp_max(inplace("exp", exponent), float(self.scale) ** 2, X, X2)

    def slope_tile(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> tuple[Array, Array]:
        N = K_bar
        N *= self.evaluate(X, X2) if K is None else K
        total = namespace_of(N).sum(N)
        N *= -0.5
        return N, total

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        # As in the base class, with fewer passes over the tile, since this is the most used kernel.
        X, N = self.aligned(X, X2), K_bar
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
            raise ConfigError(f"Matern(nu={self.nu!r}): nu must be 0.5, 1.5 or 2.5")

    @property
    def steep(self) -> bool:
        # Rounding leaves 1e-16 between equal rows, the root makes 1e-8 of it, and the slope divides by that. (The
        # smoother profiles are flat at 0.)
        return self.nu == 0.5

    def profile(self, s: Array) -> Array:
        if not isinstance(s, np.ndarray) or s.ndim != 2:
            return self._profile(s)
        # A few rows at a time: five passes over what is in cache cost less than one over memory.
        for part in row_blocks(len(s), max(1, _CACHED // max(1, s.shape[1]))):
            self._profile(s[part])
        return s

    def _profile(self, s: Array) -> Array:
        s *= 2 * self.nu
        a = inplace("sqrt", s)
        if self.nu == 0.5:
            a *= -1
            return inplace("exp", a)
        decay = inplace("exp", -a)
        if self.nu == 2.5:
            a += a * a / 3
        a += 1
        a *= decay
        return a

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
        X = self.aligned(X, X2)
        ratio = self.squared_distances(X, X2) / (2 * a)
        K = self.evaluate(X, X2) if K is None else K
        by_shape = a * xp.sum(K_bar * K * (ratio / (1 + ratio) - xp.log(1 + ratio)))
        return {**super().pullback(X, X2, K, K_bar), "shape": by_shape}


@dataclass(frozen=True, eq=False, repr=False)
class Periodic(Gaussian):
    """k(x, x') = scale² exp(-2 Σ_d sin²(π (x_d - x'_d) / period_d) / length_scale_d²).

    Computed as a Gaussian kernel on the circle (cos, sin)(2π x / period) / length_scale, which is equal.
    """

    name = "periodic"
    period: Any = 1.0
    learned = ("length_scale", "scale", "period")
    shift_invariant = True

    def check(self, X: Any) -> Array:
        check_vectors(X, self, self.period)
        return super().check(X)

    def embed(self, X: Array) -> Array:
        # In double precision: many periods from the origin an angle has few digits left.
        xp, ell = namespace_of(X), like(self.length_scale, X)
        angle = self._angle(X)
        return xp.concat([astype(part, precision(X)) / ell for part in (xp.cos(angle), xp.sin(angle))], axis=1)

    def _angle(self, X: Array) -> Array:
        wide = astype(self.check(X), "float64")
        return 2 * math.pi * wide / like(self.period, wide)

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        X, xp = self.aligned(X, X2), namespace_of(K_bar)
        Z_bar, Z2_bar, by_scale = self._embedding_pullback(X, X2, K, K_bar)
        by_ell, by_period = 0, 0
        for side, bar in ((X, Z_bar), (X2, Z2_bar)):
            d = side[2].shape[1]
            Z, angle = side[1][:, : 2 * d], self._angle(side[3].subtract(side[2]))
            # dz/d log ell = -z;  d angle/d log period = -angle
            by_ell = by_ell - xp.sum(bar[:, :d] * Z[:, :d] + bar[:, d:] * Z[:, d:], axis=0)
            turn = Z[:, :d] * bar[:, d:] - Z[:, d:] * bar[:, :d]
            by_period = by_period - xp.sum(turn * astype(angle, precision(turn)), axis=0)
        return {
            "length_scale": by_shape(by_ell, self.length_scale),
            "scale": by_scale,
            "period": by_shape(by_period, self.period),
        }

    def _embedding_pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> tuple[Array, Array, Array]:
        X, xp = self.aligned(X, X2), namespace_of(K_bar)
        N, total = self.slope_tile(X, X2, K, K_bar)
        width = X[1].shape[1] - 2
        Z, Z2 = X[1][:, :width], X2[1][:, :width]
        Z_bar = 2 * (xp.sum(N, axis=1)[:, None] * Z - N @ Z2)
        Z2_bar = 2 * (xp.sum(N, axis=0)[:, None] * Z2 - N.T @ Z)
        return Z_bar, Z2_bar, 2 * total

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        X = self.aligned(X, X2)
        Z_bar, Z2_bar, _ = self._embedding_pullback(X, X2, None, K_bar)
        rate = 2 * math.pi / like(self.period, X[2])
        bars = []
        for side, bar in ((X, Z_bar), (X2, Z2_bar)):
            d = side[2].shape[1]
            Z = side[1][:, : 2 * d]
            bars.append((-Z[:, d:] * bar[:, :d] + Z[:, :d] * bar[:, d:]) * rate)
        return bars[0], bars[1]


@dataclass(frozen=True, eq=False, repr=False)
class Laplace(Differences):
    """k(x, x') = scale² exp(-Σ_d |x_d - x'_d| / length_scale_d): city-block distance, rough functions."""

    name = "laplace"
    length_scale: Any = 1.0
    scale: Any = 1.0
    learned = ("length_scale", "scale")

    def check(self, X: Any) -> Array:
        return check_vectors(X, self, self.length_scale)

    def prepared(self, X: Array, frame: Frame) -> tuple[Any, ...]:
        return frame.subtract(X) / like(self.length_scale, X), X, Frame(frame.origin)

    def _scaled(self, X: Any, X2: Any) -> tuple[Array, Array]:
        return self.aligned(X, X2)[0], X2[0]

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        if (K := _device_values(self, X, X2, out)) is not None:
            return K
        # No matrix product yields absolute differences: one pass over the tile per feature, no (n, n, d) array.
        X, X2 = self._scaled(X, X2)
        xp = namespace_of(X)
        distance = X[:, :1] * 0 + X2[:, :1].T * 0
        for j in range(X.shape[1]):
            distance += xp.abs(X[:, j : j + 1] - X2[:, j : j + 1].T)
        distance *= -1
        K = inplace("exp", distance)
        K *= float(self.scale) ** 2
        return K

    times = Stationary.times

    def diag(self, X: Array) -> Array:
        return self.check(X)[:, 0] * 0 + float(self.scale) ** 2

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        xp = namespace_of(K_bar)
        M = K_bar
        M *= self.evaluate(X, X2) if K is None else K
        X, X2 = self._scaled(X, X2)
        by_feature = [xp.sum(M * xp.abs(X[:, j : j + 1] - X2[:, j : j + 1].T)) for j in range(X.shape[1])]
        return {
            "length_scale": by_shape(xp.stack(by_feature), self.length_scale),
            "scale": 2 * xp.sum(M),
        }

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        xp = namespace_of(K_bar)
        M = K_bar * self.evaluate(X, X2)
        X, X2 = self._scaled(X, X2)
        signs = [xp.sign(X[:, j : j + 1] - X2[:, j : j + 1].T) for j in range(X.shape[1])]
        ell = like(self.length_scale, X)
        X_bar = -xp.stack([xp.sum(M * sign, axis=1) for sign in signs], axis=1) / ell
        X2_bar = xp.stack([xp.sum(M * sign, axis=0) for sign in signs], axis=1) / ell
        return X_bar, X2_bar


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Differences):
    """k(x, x') = scale² cos(Σ_d frequency_d (x_d - x'_d)): one frequency of a spectral kernel.

    Times a Gaussian it is one component of a spectral mixture; see `spectral_mixture`.
    """

    name = "cosine"
    frequency: Any = 1.0
    scale: Any = 1.0
    learned = ("frequency", "scale")

    def check(self, X: Any) -> Array:
        return check_vectors(X, self, self.frequency)

    def prepared(self, X: Array, frame: Frame) -> tuple[Any, ...]:
        xp, centred = namespace_of(X), frame.subtract(X)
        wide = astype(centred, "float64")  # many turns from the origin an angle has few digits left
        angle = xp.sum(wide * like(self.frequency, wide), axis=1)[:, None]
        circle = astype(xp.concat([xp.cos(angle), xp.sin(angle)], axis=1), precision(centred))
        return circle, centred, X, Frame(frame.origin)

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        K = matmul(self.aligned(X, X2)[0], X2[0].T, out)
        K *= float(self.scale) ** 2
        return K

    def diag(self, X: Array) -> Array:
        return self.check(X)[:, 0] * 0 + float(self.scale) ** 2

    def _sine_sums(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        # sin(a - b) = sin a cos b - cos a sin b, weighted by -scale² K_bar and summed over rows and columns
        xp = namespace_of(K_bar)
        swapped = xp.concat([-X2[0][:, 1:], X2[0][:, :1]], axis=1)
        B = K_bar * (X[0] @ swapped.T)
        B *= -(float(self.scale) ** 2)
        return xp.sum(B, axis=1), xp.sum(B, axis=0)

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        X, xp = self.aligned(X, X2), namespace_of(K_bar)
        K = self.evaluate(X, X2) if K is None else K
        rows, columns = self._sine_sums(X, X2, K_bar)
        by_feature = (rows @ X[1] - columns @ X2[1]) * like(self.frequency, X[1])
        return {
            "frequency": by_shape(by_feature, self.frequency),
            "scale": 2 * xp.sum(K_bar * K),
        }

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        X = self.aligned(X, X2)
        rows, columns = self._sine_sums(X, X2, K_bar)
        w = like(self.frequency, X[1]) + X[1][:1, :] * 0
        return rows[:, None] * w, -columns[:, None] * w


# --- on a device ------------------------------------------------------------------------------------

# By exact type: a subclass may define another profile or `evaluate`.
_PROFILES = {
    (Gaussian, None): "gaussian",
    (Periodic, None): "gaussian",
    (Matern, 0.5): "matern_12",
    (Matern, 1.5): "matern_32",
    (Matern, 2.5): "matern_52",
    (Laplace, None): "laplace",
}


def _device_tile(kernel: Any, X: Any, X2: Any) -> fused.Tile | None:
    """The tile for `fused`, or None: on the host, for other kernels, for empty or mixed-precision tiles."""
    profile = _PROFILES.get((type(kernel), getattr(kernel, "nu", None)))
    if profile is None or not is_cupy(X2[0]):
        return None
    X, variance = kernel.aligned(X, X2), float(kernel.scale) ** 2
    if X[0].dtype != X2[0].dtype or not X[0].shape[0] or not X2[0].shape[0]:
        return None
    if profile == "laplace":
        return fused.Tile(profile, variance, X[0], X2[0])
    product = namespace_of(X[0]).ascontiguousarray(X[0] @ X2[1].T)
    near = kernel.steep or _reach_far(product, X, X2)
    return fused.Tile(profile, variance, X[1], X2[1], product, near)


def _device_values(kernel: Any, X: Any, X2: Any, out: Array) -> Array | None:
    tile = _device_tile(kernel, X, X2)
    return None if tile is None else tile.finish(out)


def _device_times(kernel: Any, X: Any, X2: Any, V: Array, total: Array) -> Array | None:
    if not is_cupy(V) or not fused.multiplies(V, X2[0]):
        return None
    with metered("gram"):
        tile = _device_tile(kernel, X, X2)
        return None if tile is None else tile.times(V, total)
