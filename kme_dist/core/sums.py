"""Sums over rows: the one place where G = Σ z zᵀ and B = Σ z t(y)ᵀ are computed.

    sums = sum_rows(Centres(kernel, C), X, y, OneHot(n_classes))      # G, B, Σ t(y), the number of rows
    sums + others                                                     # of other rows: sums of chunks add up

    rows = Accumulator(basis, targets, reference=X)                   # the same, chunk after chunk
    rows.add(X, y)
    rows.sums()

z is the image of a row under a basis: k(centres, x), explicit features φ(x), or a projection. t is the right-hand side
of the equations: a one-hot label (`OneHot`), l(D, y) for target centres D (`TargetCentres`), or 1 for Σ z (`Ones`).
Fits with centres and features, exact gradients of feature maps, conditional embeddings and spectral means all use these
sums; each solves its own system (`kme_dist.core.nystrom.System` for classes).

With weights of rows G = Σ w z zᵀ, B = Σ w z t(y)ᵀ: rows of z and t are multiplied by √w before the products.

Rows are multiplied in the precision of the data, tile by tile, and summed in double. The sums have rounding errors of
the precision of the rows: `Sums.noise` is a bound on the spectral norm of those in G.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kme_dist import lapack
from kme_dist.backend import Array, astype, empty_square, like, namespace_of, precision, to_host
from kme_dist.core.kernels.base import FeatureMap, Kernel, row_blocks, row_count, take, tiles_that_fit
from kme_dist.core.objective import one_hot
from kme_dist.core.risk import column
from kme_dist.meter import metered

TILE_ROWS = 4_096  # rows of one product zᵀz: enough to make adding it to the sum cheap
_CACHED_ROWS = 256  # rows whose exponential is taken while they are in cache
_STRIPE = 256  # columns added at a time, so that only the lower triangle is touched
_LEADING, _POWER_STEPS = 64, 3


# --- left-hand sides: the features of a row -----------------------------------------------------------


class Basis(Protocol):
    """z(x), the metric of its weights, and its leading directions (None: unknown)."""

    @property
    def size(self) -> int: ...
    @property
    def leading(self) -> Array | None: ...
    @property
    def wide(self) -> Basis: ...
    def rows(self, X: Any, out: Array = None) -> Array: ...
    def metric(self) -> Array | None: ...


@dataclass(frozen=True)
class Centres:
    """z(x) = k(centres, x)."""

    kernel: Kernel
    points: Any

    @property
    def size(self) -> int:
        return row_count(self.points)

    @functools.cached_property
    def _prepared(self) -> Any:
        return self.kernel.prepare(self.points)

    @functools.cached_property
    def leading(self) -> Array:
        """Orthonormal directions near the first eigenvectors of K(centres, centres), by a few power steps."""
        M = self.metric()
        xp = namespace_of(M)
        count = min(_LEADING, self.size // 4)
        Q = like(np.random.default_rng(0).normal(size=(self.size, count)), M)
        for _ in range(_POWER_STEPS if count else 0):
            Q = xp.linalg.qr(M @ Q)[0]
        return Q

    @functools.cached_property
    def wide(self) -> Centres:
        """The same in double precision."""
        return Centres(self.kernel, astype(self.points, "float64")) if hasattr(self.points, "dtype") else self

    def rows(self, X: Any, out: Array = None) -> Array:
        prepared = self._prepared
        queries = self.kernel.prepare_beside(X, prepared)
        if out is None:
            return self.kernel.evaluate(queries, prepared)
        for part in row_blocks(row_count(X), _CACHED_ROWS):
            tile = out[part]
            value = self.kernel.evaluate(take(queries, part), prepared, out=tile)
            if value is not tile:
                out[part] = value
        return out

    def metric(self) -> Array:
        points = astype(self.points, "float64") if hasattr(self.points, "dtype") else self.points
        return self.kernel.gram(points)


@dataclass(frozen=True)
class FeatureBasis:
    """z(x) = φ(x)."""

    features: FeatureMap
    size: int
    leading: None = None

    @property
    def wide(self) -> FeatureBasis:
        return self

    def rows(self, X: Any, out: Array = None) -> Array:
        # Multiplied in double: features have no known leading directions to split off (see `Accumulator`).
        return astype(self.features.forward(X), "float64")

    def metric(self) -> None:
        return None


# --- right-hand sides: the values of a label or target ------------------------------------------------


class Targets(Protocol):
    """t(y), a row of `size` numbers for each target, in the array library and precision of a reference."""

    @property
    def size(self) -> int: ...
    def rows(self, y: Any, reference: Array) -> Array: ...


@dataclass(frozen=True)
class OneHot:
    """One-hot labels: Σ t(y) counts the rows of each class."""

    size: int

    def rows(self, y: Any, reference: Array) -> Array:
        return one_hot(y, self.size, reference)


@dataclass(frozen=True)
class TargetCentres:
    """t(y) = l(D, y) for a kernel l of targets and target centres D."""

    kernel: Kernel
    points: Any

    @property
    def size(self) -> int:
        return row_count(self.points)

    def rows(self, y: Any, reference: Array) -> Array:
        return astype(self.kernel.gram(y, self.points), "float64")


@dataclass(frozen=True)
class Values:
    """t(y) = y: numeric targets, a row of `size` numbers each."""

    size: int

    def rows(self, y: Any, reference: Array) -> Array:
        return like(y, reference)


@dataclass(frozen=True)
class Ones:
    """t = 1: B is Σ z."""

    size: int = 1

    def rows(self, y: Any, reference: Array) -> Array:
        return like(np.ones((row_count(y), 1)), reference)


# --- sums ---------------------------------------------------------------------------------------------


@dataclass
class Sums:
    """G = Σ z zᵀ (its lower triangle), B = Σ z t(y)ᵀ, Σ t(y), the number of rows, and the rounding of G."""

    G: Array
    B: Array
    totals: np.ndarray  # Σ t(y): for labels, the rows of each class
    rows: int
    variance: float = 0.0  # of the rounding error of an entry of G
    excess: float = 0.0  # Σ w - rows; 0 without weights

    @property
    def weight(self) -> float:
        """Σ w: what stands for the number of rows in nλ."""
        return self.rows + self.excess

    def copy(self) -> Sums:
        return replace(self, G=self.G.copy(order="K"), B=self.B.copy(), totals=self.totals.copy())

    def symmetric(self) -> Array:
        """The full G; code that reads only the lower triangle, such as a Cholesky factorisation, takes `G`."""
        xp = namespace_of(self.G)
        return xp.tril(self.G) + xp.tril(self.G, k=-1).T

    def add_packed(self, other: Sums) -> None:
        """Add sums whose G was packed by `packed`."""
        for part, values in _stripes(self.G, other.G):
            part += values
        self._add_rest(other)

    @property
    def noise(self) -> float:
        """Spectral norm of a random symmetric matrix with entries of this variance."""
        return 2.0 * math.sqrt(self.variance * self.B.shape[0])

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.G + other.G, self.B + other.B, self.totals + other.totals, self.rows + other.rows,
            self.variance + other.variance, self.excess + other.excess,
        )  # fmt: skip

    def __iadd__(self, other: Sums) -> Sums:
        self.G += other.G
        self._add_rest(other)
        return self

    def __isub__(self, other: Sums) -> Sums:
        self.G -= other.G
        self.B -= other.B
        self.totals -= other.totals
        self.rows -= other.rows
        self.excess -= other.excess
        self.variance = max(self.variance - other.variance, 0.0)
        return self

    def _add_rest(self, other: Sums) -> None:
        self.B += other.B
        self.totals += other.totals
        self.rows += other.rows
        self.excess += other.excess
        self.variance += other.variance


def packed(G: np.ndarray) -> np.ndarray:
    """The lower triangle, in stripes of columns."""
    return np.concatenate([G[left:, left : left + _STRIPE].ravel(order="F") for left in range(0, len(G), _STRIPE)])


def unpacked(triangle: np.ndarray, size: int) -> np.ndarray:
    G = np.zeros((size, size), order="F")
    for part, values in _stripes(G, triangle):
        part[...] = values
    return G


def _stripes(G: np.ndarray, triangle: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Stripes of columns of G, each with its values in the packed triangle."""
    at = 0
    for left in range(0, len(G), _STRIPE):
        part = G[left:, left : left + _STRIPE]
        yield part, triangle[at : at + part.size].reshape(part.shape, order="F")
        at += part.size


class Accumulator:
    """Sums over rows, chunk after chunk; `sums()` returns the result.

    Values of a smooth kernel are large and nearly equal for all rows, and their differences are much smaller: single
    precision would lose them. So rows in single precision are evaluated in double and split into the part a = Qᵀ z
    along a few leading directions Q of the kernel and the rest, z = Q a + z'. The rest is small, and so is its
    rounding, so its square, which is nearly all the work, can be computed in single precision:
    Σ z zᵀ = Q (Σ a aᵀ) Qᵀ + Q (Σ a z'ᵀ) + (Σ z' aᵀ) Qᵀ + Σ z' z'ᵀ.

    `tile_rows` is the number of rows of z (and of t) held at a time; it affects rounding only.
    """

    def __init__(self, basis: Basis, targets: Targets, reference: Array, tile_rows: int = TILE_ROWS) -> None:
        self._basis, self._targets, self._tile_rows = basis, targets, tile_rows
        self._Q = basis.leading if precision(reference) == "float32" else None
        wide = astype(reference, "float64")
        size, lead = basis.size, 0 if self._Q is None else self._Q.shape[1]
        self._G = empty_square(size, wide)
        self._G[...] = like(np.zeros((1, 1)), wide)
        self._B, self._B_lead = (like(np.zeros((rows, targets.size)), wide) for rows in (size, lead))
        self._cross, self._square = like(np.zeros((size, lead)), wide), like(np.zeros((lead, lead)), wide)
        self._totals, self._rows, self._variance, self._excess = np.zeros(targets.size), 0, 0.0, 0.0
        self._held: dict[str, np.ndarray] = {}
        self._product: np.ndarray | None = None

    def add(self, X: Any, y: Any, weights: np.ndarray | None = None) -> None:
        """Add rows, their targets, and their weights if they have any."""
        with metered("reduce"):  # without the tiles, which are metered separately
            self._add(X, y, weights)

    def _add(self, X: Any, y: Any, weights: np.ndarray | None) -> None:
        def tile(part: slice) -> tuple[Array, Array | None, Array]:
            Z, A = self._split(take(X, part))
            return Z, A, self._targets.rows(take(y, part), Z)

        for part, (Z, A, T) in tiles_that_fit(tile, row_count(X), self._tile_rows):
            if weights is not None:
                own = weights[part]
                self._excess += float(np.sum(own - 1.0))
                root = np.sqrt(own)
                self._totals += to_host(namespace_of(T).sum(T * column(own, T), axis=0))
                Z, T = Z * column(root, Z), T * column(root, T)
                A = None if A is None else A * column(root, A)
            if A is not None:
                self._square += A.T @ A
                # The part along the leading directions is large, so its rounding in double precision counts too.
                self._variance += (2 * 1e-16 * float(namespace_of(A).sum(A * A)) / self._basis.size) ** 2
                self._cross += astype(Z.T @ astype(A, precision(Z)), "float64")
                self._B_lead += A.T @ astype(T, "float64")
            self._add_square(Z)
            self._B += astype(Z.T @ T, "float64")
            if weights is None:
                self._totals += to_host(namespace_of(T).sum(T, axis=0))
        self._rows += row_count(X)

    def _split(self, X: Any) -> tuple[Array, Array | None]:
        """z', and a in double precision; z itself and None where nothing is split off."""
        if self._Q is None:
            return self._basis.rows(X, self._buffer(X, row_count(X), "_tile")), None
        if not isinstance(X, np.ndarray):
            Z = self._basis.wide.rows(astype(X, "float64"))
            A = Z @ self._Q
            return astype(Z - A @ self._Q.T, precision(X)), A
        rest, parts = self._buffer(X, len(X), "_tile"), []
        for few in row_blocks(len(X), _CACHED_ROWS):
            rows = X[few].astype(np.float64)
            Z = self._basis.wide.rows(rows, self._buffer(rows, len(rows), "_wide"))
            parts.append(Z @ self._Q)
            lapack.subtract_product(parts[-1], self._Q, Z)  # in place
            rest[few] = Z
        return rest, np.concatenate(parts)

    def _buffer(self, X: Any, rows: int, name: str) -> Array:
        """Memory for rows of z, reused for every tile."""
        if not isinstance(X, np.ndarray) or X.dtype.kind != "f":
            return None
        held = self._held.get(name)
        if held is None or len(held) < rows:
            held = self._held[name] = np.empty((rows, self._basis.size), X.dtype)
        return held[:rows]

    def _add_square(self, Z: Array) -> None:
        unit = 6e-8 if precision(Z) == "float32" else 1e-16
        if isinstance(Z, np.ndarray):
            if self._product is None:
                self._product = np.zeros((Z.shape[1], Z.shape[1]), Z.dtype, order="F")
            product = self._product
            lapack.syrk(Z, product)
            for left in range(0, len(product), _STRIPE):
                stripe = (slice(left, None), slice(left, left + _STRIPE))
                self._G[stripe] += product[stripe]
            typical = float(np.mean(np.einsum("ii->i", product), dtype=np.float64))
        else:
            self._G += astype(Z.T @ Z, "float64")
            typical = float(to_host(namespace_of(Z).sum(Z * Z))) / Z.shape[1]
        # Each entry is a sum of many products: its error grows with the square root of their number.
        self._variance += (2 * unit * typical) ** 2

    def sums(self) -> Sums:
        """The result; the accumulator cannot be used afterwards."""
        if self._Q is not None:
            Q = self._Q
            half = Q @ (0.5 * self._square) + self._cross
            for stripe in row_blocks(self._basis.size, _STRIPE):
                below = slice(stripe.start, None)
                self._G[below, stripe] += half[below, ...] @ Q[stripe, ...].T + Q[below, ...] @ half[stripe, ...].T
            self._B += Q @ self._B_lead
        return Sums(self._G, self._B, self._totals, self._rows, self._variance, self._excess)


def sum_rows(
    basis: Basis,
    X: Any,
    y: Any,
    targets: Targets,
    tile_rows: int = TILE_ROWS,
    weights: np.ndarray | None = None,
) -> Sums:
    """The sums over rows in memory, in their precision (double where they are not numeric)."""
    accumulator = Accumulator(basis, targets, X if hasattr(X, "dtype") else np.zeros(0), tile_rows)
    accumulator.add(X, y, weights)
    return accumulator.sums()
