"""Fits whose size is the number of centres or features, not of rows: sums over the rows, then a p x p system.

With z(x) = k(centres, x), or any explicit features φ(x), the model f(x) = Vᵀ z(x) is

    (G + nλM) V = B,     G = Σ z zᵀ,  B = Σ z yᵀ,     M = K(centres, centres), or I for features

    rows = Accumulator(basis, n_classes, reference=X)
    rows.add(X, y)                                         # one pass, chunk by chunk
    sums = rows.sums()                                     # sums of chunks can be added and subtracted
    system = System(sums.G, sums.B, basis.metric(), rows=sums.rows, noise=sums.noise)
    V = system.solve(lam)
    system.leave_one_out(lam, Z, y, floor)                 # log loss of sampled rows under fits without them

Rows are multiplied in the precision of the data, tile by tile, and added up in double; everything p x p is in double.
The sums carry rounding errors of single precision: `noise` is a bound on their spectral norm, and is added to the
diagonal, so that directions which hold nothing else do not enter the fit. Leave-one-out needs the leverage of a row,
z (G + nλM)⁻¹ z; it is exact for each row and costs p², so with many rows a sample of them is judged.

G holds squares: of directions in which the kernel is below √u |K|, u = 1.1e-16, sums in double precision know nothing,
and predictions are off by about u (|K|/nλ)², 1e-8 at nλ = 1e-4 |K| and percents at 1e-8 |K|. No way to solve the p x p
system mends that (in the coordinates of a factor of M the same digits are missing). Where every row is a centre nothing
need be squared: such fits are solved exactly, without sums (`kme_dist.run.fitting`, `kme_dist.run.solve`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.linalg import blas

from kme_dist.backend import (
    Array,
    astype,
    cholesky,
    empty_square,
    like,
    namespace_of,
    precision,
    to_host,
)
from kme_dist.core.embedding import log_loss
from kme_dist.core.kernels.base import FeatureMap, Kernel, row_blocks, row_count, take
from kme_dist.core.objective import one_hot
from kme_dist.errors import NumericalError
from kme_dist.meter import metered

SAMPLE_ROWS = 4_000  # kept to be judged by leave-one-out
_JUDGED = (1_000, 2**34)  # at least so many of them, or as many as this number of products allows
_TILE_ROWS = 4_096  # of one product zᵀz: many enough that adding it to the sum costs little
_CACHED_ROWS = 256  # of which the exponential is taken while they are in cache
_STRIPE = 256  # columns added at a time, so that only the lower triangle is touched
_LEADING, _POWER_STEPS = 64, 3


class Basis(Protocol):
    """What a row is turned into, the norm of its weights, and directions that most of it lies in (None: no such)."""

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
        if out is None:
            return self.kernel.evaluate(self.kernel.prepare(X), prepared)
        queries = self.kernel.prepare(X)
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
class Features:
    """z(x) = φ(x)."""

    features: FeatureMap
    size: int
    leading: None = None

    @property
    def wide(self) -> Features:
        return self

    def rows(self, X: Any, out: Array = None) -> Array:
        # Multiplied in double: features have no known directions to be split off (see `Accumulator`).
        return astype(self.features.forward(X), "float64")

    def metric(self) -> None:
        return None


# --- sums over rows ---------------------------------------------------------------------------------


@dataclass
class Sample:
    """Rows drawn for leave-one-out: those with the smallest keys, which are drawn by what the chunk holds.

    The sample of two parts is the sample of both together, in whatever order they come.
    """

    X: np.ndarray
    y: np.ndarray
    keys: np.ndarray  # (rows, 2): random key, and the chunk's own number

    @classmethod
    def of(cls, X: np.ndarray, y: np.ndarray, digest: str, size: int = SAMPLE_ROWS) -> Sample:
        number = int(digest[:15], 16)
        drawn = np.random.default_rng([number, 5]).integers(0, 2**62, size=len(X))
        keys = np.stack([drawn, np.full(len(X), number)], axis=1)
        return cls(X, y.astype(np.int64), keys)._smallest(size)

    def _smallest(self, size: int) -> Sample:
        order = np.lexsort((self.keys[:, 1], self.keys[:, 0]))[:size]
        return Sample(self.X[order], self.y[order], self.keys[order])

    def __add__(self, other: Sample) -> Sample:
        joined = Sample(
            np.concatenate([self.X, other.X]),
            np.concatenate([self.y, other.y]),
            np.concatenate([self.keys, other.keys]),
        )
        return joined._smallest(SAMPLE_ROWS)

    def without(self, digests: list[str]) -> Sample:
        gone = np.array([int(digest[:15], 16) for digest in digests], dtype=np.int64)
        kept = ~np.isin(self.keys[:, 1], gone)
        return Sample(self.X[kept], self.y[kept], self.keys[kept])


@dataclass
class Sums:
    """Σ z zᵀ (its lower triangle), Σ z yᵀ, the rows of each class, and the rounding of the first."""

    G: Array
    B: Array
    counts: np.ndarray
    variance: float = 0.0  # of an entry of G, by rounding in the precision of the rows

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def add_packed(self, triangle: np.ndarray, B: np.ndarray, counts: np.ndarray, variance: float) -> None:
        """Add sums of which G comes as `packed` made it."""
        for part, values in _stripes(self.G, triangle):
            part += values
        self.B += B
        self.counts += counts
        self.variance += variance

    @property
    def noise(self) -> float:
        """Spectral norm of a random symmetric matrix with entries of this variance."""
        return 2.0 * math.sqrt(self.variance * self.B.shape[0])

    def __iadd__(self, other: Sums) -> Sums:
        self.G += other.G
        self.B += other.B
        self.counts += other.counts
        self.variance += other.variance
        return self

    def __isub__(self, other: Sums) -> Sums:
        self.G -= other.G
        self.B -= other.B
        self.counts -= other.counts
        self.variance = max(self.variance - other.variance, 0.0)
        return self


def packed(G: np.ndarray) -> np.ndarray:
    """The lower triangle, in stripes of columns."""
    return np.concatenate([G[left:, left : left + _STRIPE].ravel(order="F") for left in range(0, len(G), _STRIPE)])


def unpacked(triangle: np.ndarray, size: int) -> np.ndarray:
    G = np.zeros((size, size), order="F")
    for part, values in _stripes(G, triangle):
        part[...] = values
    return G


def _stripes(G: np.ndarray, triangle: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Stripes of columns of G beside what `packed` holds of them."""
    at = 0
    for left in range(0, len(G), _STRIPE):
        part = G[left:, left : left + _STRIPE]
        yield part, triangle[at : at + part.size].reshape(part.shape, order="F")
        at += part.size


class Accumulator:
    """Adds up rows, chunk after chunk; `sums()` is the result.

    Values of a smooth kernel are large and nearly the same for all rows, and what tells rows apart is far below them:
    in single precision it would drown. So rows in single precision are evaluated in double and split into the part
    a = Qᵀ z along a few leading directions Q of the kernel and the rest, z = Q a + z'. The rest is small, so that its
    rounding is too, and its square, which is nearly all the work, can be taken in single precision:
    Σ z zᵀ = Q (Σ a aᵀ) Qᵀ + Q (Σ a z'ᵀ) + (Σ z' aᵀ) Qᵀ + Σ z' z'ᵀ.
    """

    def __init__(self, basis: Basis, n_classes: int, reference: Array) -> None:
        self._basis, self._n_classes = basis, n_classes
        self._Q = basis.leading if precision(reference) == "float32" else None
        wide = astype(reference, "float64")
        size, lead = basis.size, 0 if self._Q is None else self._Q.shape[1]
        self._G = empty_square(size, wide)
        self._G[...] = like(np.zeros((1, 1)), wide)
        self._B, self._B_lead = (like(np.zeros((rows, n_classes)), wide) for rows in (size, lead))
        self._cross, self._square = like(np.zeros((size, lead)), wide), like(np.zeros((lead, lead)), wide)
        self._counts, self._variance = np.zeros(n_classes), 0.0
        self._held: dict[str, np.ndarray] = {}
        self._product: np.ndarray | None = None

    def add(self, X: Any, y: np.ndarray) -> None:
        with metered("reduce"):  # but for the tiles, which count as such
            self._add(X, y)

    def _add(self, X: Any, y: np.ndarray) -> None:
        for part in row_blocks(len(y), _TILE_ROWS):
            Z, A = self._split(X[part])
            Y = one_hot(y[part], self._n_classes, Z)
            if A is not None:
                self._square += A.T @ A
                # The part along the leading directions is large, and double precision rounds it, too.
                self._variance += (2 * 1e-16 * float(namespace_of(A).sum(A * A)) / self._basis.size) ** 2
                self._cross += astype(Z.T @ astype(A, precision(Z)), "float64")
                self._B_lead += A.T @ astype(Y, "float64")
            self._add_square(Z)
            self._B += astype(Z.T @ Y, "float64")
        self._counts += np.bincount(y, minlength=self._n_classes)

    def _split(self, X: Any) -> tuple[Array, Array | None]:
        """z', and a in double precision; z itself and None where there is nothing to split off."""
        if self._Q is None:
            return self._basis.rows(X, self._room(X, row_count(X), "_tile")), None
        if not isinstance(X, np.ndarray):
            Z = self._basis.wide.rows(astype(X, "float64"))
            A = Z @ self._Q
            return astype(Z - A @ self._Q.T, precision(X)), A
        rest, parts = self._room(X, len(X), "_tile"), []
        for few in row_blocks(len(X), _CACHED_ROWS):
            rows = X[few].astype(np.float64)
            Z = self._basis.wide.rows(rows, self._room(rows, len(rows), "_wide"))
            parts.append(Z @ self._Q)
            # Z -= A Qᵀ in place; to Fortran's eyes everything here is transposed
            blas.dgemm(-1.0, self._Q.T, parts[-1].T, beta=1.0, c=Z.T, trans_a=1, overwrite_c=1)
            rest[few] = Z
        return rest, np.concatenate(parts)

    def _room(self, X: Any, rows: int, name: str) -> Array:
        """Memory for rows of z, kept from tile to tile."""
        if not isinstance(X, np.ndarray):
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
            (syrk,) = blas.get_blas_funcs(("syrk",), (product,))
            syrk(1.0, Z.T, beta=0.0, c=product, trans=0, lower=1, overwrite_c=1)
            for left in range(0, len(product), _STRIPE):
                stripe = (slice(left, None), slice(left, left + _STRIPE))
                self._G[stripe] += product[stripe]
            typical = float(np.mean(np.einsum("ii->i", product), dtype=np.float64))
        else:
            self._G += astype(Z.T @ Z, "float64")
            typical = float(to_host(namespace_of(Z).sum(Z * Z))) / Z.shape[1]
        # Each entry is a sum of so many products: its error grows with the root of their number.
        self._variance += (2 * unit * typical) ** 2

    def sums(self) -> Sums:
        """What was added; the accumulator is spent."""
        if self._Q is not None:
            Q = self._Q
            half = Q @ (0.5 * self._square) + self._cross
            for stripe in row_blocks(self._basis.size, _STRIPE):
                below = slice(stripe.start, None)
                self._G[below, stripe] += half[below, ...] @ Q[stripe, ...].T + Q[below, ...] @ half[stripe, ...].T
            self._B += Q @ self._B_lead
        return Sums(self._G, self._B, self._counts, self._variance)


# --- the p x p system -------------------------------------------------------------------------------


def judged_rows(centres: int) -> int:
    """How many rows leave-one-out looks at: each costs p², and all of them no more than a factorisation or two."""
    least, products = _JUDGED
    return int(min(SAMPLE_ROWS, max(least, products // centres**2)))


@dataclass
class System:
    """(G + nλM + noise I) V = B; G and M by their lower triangles."""

    G: Array
    B: Array
    M: Array | None
    rows: int
    noise: float

    def factor(self, lam: float) -> Any:
        """The Cholesky factor; the noise is raised where it was set too low."""
        shift = self.rows * lam
        for more in (1.0, 10.0, 100.0, 1e3, 1e4):
            A = empty_square(self.B.shape[0], self.G)
            A[...] = self.G
            if self.M is not None:
                A += shift * self.M
            _add_to_diagonal(A, self.noise * more + (shift if self.M is None else 0.0))
            try:
                return cholesky(A)
            except NumericalError:
                continue
        raise NumericalError(
            f"the system of {self.B.shape[0]} centres or features stays singular at regularization {lam:.1e}; raise "
            "`regularization`, use fewer centres, or dtype='float64'",
            rows=self.rows,
            regularization=lam,
            dtype="float64",
        )

    def solve(self, lam: float) -> Array:
        return self.factor(lam).solve(self.B)

    def leave_one_out(self, lam: float, Z: Array, Y: Array, floor: float) -> tuple[float, float]:
        """Log loss of rows Z (in double) under the fits without them, and the sum of their leverages.

        A λ at which the system stays singular has an infinite loss.
        """
        try:
            factor = self.factor(lam)
        except NumericalError:
            return math.inf, math.nan
        xp = namespace_of(Z)
        V, half = factor.solve(self.B), factor.half_solve(Z.T)
        leverage = xp.sum(half * half, axis=0)[:, None]
        room = xp.where(leverage < 1 - 1e-6, 1 - leverage, leverage * 0 + 1e-6)
        return float(log_loss(Y, Y - (Y - Z @ V) / room, floor)), float(xp.sum(leverage))

    def residual(self, lam: float, V: Array) -> float:
        """|(G + nλM) V - B| / |B|, without the noise on the diagonal: what the solution leaves of the equations."""
        xp = namespace_of(V)
        AV = _symmetric_product(self.G, V)
        AV = AV + self.rows * lam * (V if self.M is None else _symmetric_product(self.M, V))
        return float(xp.sqrt(xp.sum((AV - self.B) ** 2)) / xp.sqrt(xp.sum(self.B**2)))


def _add_to_diagonal(A: Array, value: float) -> None:
    if isinstance(A, np.ndarray):
        np.einsum("ii->i", A)[...] += value
    else:
        A += value * like(np.eye(A.shape[0]), A)


def _symmetric_product(A: Array, V: Array) -> Array:
    """A V from the lower triangle of A."""
    xp = namespace_of(A)
    if isinstance(A, np.ndarray):
        (symm,) = blas.get_blas_funcs(("symm",), (A, V))
        return symm(1.0, A if A.flags.f_contiguous else np.asfortranarray(A), V, lower=1)
    lower = xp.tril(A, k=-1)
    return (xp.tril(A) + lower.T) @ V
