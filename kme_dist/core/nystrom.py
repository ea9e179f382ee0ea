"""Fits whose size is the number of centres or features, not of rows: a p x p system from sums over the rows.

With z(x) = k(centres, x), or any explicit features φ(x), the model f(x) = Vᵀ z(x) is

    (G + nλM) V = B,     G = Σ z zᵀ,  B = Σ z yᵀ,     M = K(centres, centres), or I for features

    sums = sum_rows(basis, X, y, OneHot(n_classes))        # one pass, chunk by chunk (kme_dist.core.sums)
    system = System(sums.G, sums.B, basis.metric(), rows=sums.weight, noise=sums.noise)
    V = system.solve(lam)
    system.leave_one_out(lam, Z, y, floor)                 # log loss of sampled rows under fits without them

Everything p x p is in double. `noise`, a bound on the rounding errors of the sums, is added to the diagonal, so that
directions of pure rounding do not enter the fit. Leave-one-out needs the leverage of a row, z (G + nλM)⁻¹ z; it is
exact for each row and costs p², so with many rows a sample of them is evaluated.

G holds squares: sums in double precision lose directions in which the kernel is below √u |K|, u = 1.1e-16, and
predictions are off by about u (|K|/nλ)², 1e-8 at nλ = 1e-4 |K| and percents at 1e-8 |K|. No solver of the p x p system
can recover that (in the coordinates of a factor of M the same digits are missing). Where every row is a centre nothing
has to be squared: such fits are solved exactly, without sums (`kme_dist.run.fit.centres`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist import lapack
from kme_dist.backend import Array, cholesky, empty_square, like, namespace_of
from kme_dist.core.embedding import log_loss
from kme_dist.core.risk import column
from kme_dist.errors import NumericalError

SAMPLE_ROWS = 4_000  # rows kept for leave-one-out
_EVALUATED = (1_000, 2**34)  # smallest number of rows evaluated, and the number of products that allows more


@dataclass
class Sample:
    """Rows drawn for leave-one-out: those with the smallest random keys, seeded by the content of their chunk.

    The sum of the samples of two parts is the sample of both together, in any order.
    """

    X: np.ndarray
    y: np.ndarray
    keys: np.ndarray  # (rows, 2): random key, and the chunk's own number
    weights: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        X: np.ndarray,
        y: np.ndarray,
        digest: str,
        size: int = SAMPLE_ROWS,
        weights: np.ndarray | None = None,
    ) -> Sample:
        number = int(digest[:15], 16)
        drawn = np.random.default_rng([number, 5]).integers(0, 2**62, size=len(X))
        keys = np.stack([drawn, np.full(len(X), number)], axis=1)
        return cls(X, y.astype(np.int64), keys, weights)._smallest(size)

    def _smallest(self, size: int) -> Sample:
        order = np.lexsort((self.keys[:, 1], self.keys[:, 0]))[:size]
        return self._some(order)

    def _some(self, rows: np.ndarray) -> Sample:
        weights = None if self.weights is None else self.weights[rows]
        return Sample(self.X[rows], self.y[rows], self.keys[rows], weights)

    def __add__(self, other: Sample) -> Sample:
        weights = None
        if self.weights is not None or other.weights is not None:
            weights = np.concatenate([np.ones(len(s.y)) if s.weights is None else s.weights for s in (self, other)])
        joined = Sample(
            np.concatenate([self.X, other.X]),
            np.concatenate([self.y, other.y]),
            np.concatenate([self.keys, other.keys]),
            weights,
        )
        return joined._smallest(SAMPLE_ROWS)

    def without(self, digests: list[str]) -> Sample:
        gone = np.array([int(digest[:15], 16) for digest in digests], dtype=np.int64)
        kept = ~np.isin(self.keys[:, 1], gone)
        return self._some(kept)


# --- the p x p system -------------------------------------------------------------------------------


def evaluated_rows(centres: int) -> int:
    """Number of rows for leave-one-out: each costs p², and all together no more than one or two factorisations."""
    least, products = _EVALUATED
    return int(min(SAMPLE_ROWS, max(least, products // centres**2)))


@dataclass
class System:
    """(G + nλM + noise I) V = B; G and M by their lower triangles. `rows` is n, the sum of the weights if there are
    any."""

    G: Array
    B: Array
    M: Array | None
    rows: float
    noise: float

    def factor(self, lam: float) -> Any:
        """The Cholesky factor; the noise is raised until the factorisation succeeds."""
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
            f"the system of {self.B.shape[0]} centres or features is singular at regularization {lam:.1e}; raise "
            "`regularization`, use fewer centres, or dtype='float64'",
            rows=round(self.rows),
            regularization=lam,
            dtype="float64",
        )

    def solve(self, lam: float) -> Array:
        return self.factor(lam).solve(self.B)

    def leave_one_out(
        self, lam: float, Z: Array, Y: Array, floor: float, weights: np.ndarray | None = None
    ) -> tuple[float, float]:
        """Log loss of rows Z (in double) under the fits without them, and the sum of their leverages.

        A λ at which the system is singular has an infinite loss.
        """
        try:
            P, leverage = self.left_out(self.factor(lam), Z, Y, weights)
        except NumericalError:
            return math.inf, math.nan
        return float(log_loss(Y, P, floor, weights)), leverage

    def left_out(self, factor: Any, Z: Array, Y: Array, weights: np.ndarray | None = None) -> tuple[Array, float]:
        """Decisions of rows Z (in double) under the fits without them, and the sum of their leverages."""
        xp = namespace_of(Z)
        V, half = factor.solve(self.B), factor.half_solve(Z.T)
        leverage = xp.sum(half * half, axis=0)[:, None] * column(weights, Z)
        room = xp.where(leverage < 1 - 1e-6, 1 - leverage, leverage * 0 + 1e-6)
        return Y - (Y - Z @ V) / room, float(xp.sum(leverage))

    def residual(self, lam: float, V: Array) -> float:
        """|(G + nλM) V - B| / |B|, without the noise on the diagonal."""
        xp = namespace_of(V)
        AV = _symmetric_product(self.G, V)
        AV = AV + self.rows * lam * (V if self.M is None else _symmetric_product(self.M, V))
        size = float(xp.sqrt(xp.sum(self.B**2)))  # 0 if all features are: then V is, too
        return float(xp.sqrt(xp.sum((AV - self.B) ** 2))) / (size or 1.0)


def _add_to_diagonal(A: Array, value: float) -> None:
    if isinstance(A, np.ndarray):
        np.einsum("ii->i", A)[...] += value
    else:
        A += value * like(np.eye(A.shape[0]), A)


def _symmetric_product(A: Array, V: Array) -> Array:
    """A V from the lower triangle of A."""
    xp = namespace_of(A)
    if isinstance(A, np.ndarray):
        found = np.empty(V.shape, order="F")
        lapack.symm(A, V, found)
        return found
    lower = xp.tril(A, k=-1)
    return (xp.tril(A) + lower.T) @ V
