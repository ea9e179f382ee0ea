"""The multiclass conditional embedding for a given kernel and λ.

    f(x) = Vᵀ k(x),  V = (K + nλI)⁻¹ Y        decision probabilities; may leave [0, 1]     [HNR, equation 5]
    p̃_c(x) = max(f_c, 0) / Σ_j max(f_j, 0)    clip-normalised probabilities                 [HNR, equation 6]

With every solver a fitted embedding is a kernel, centres and weights: f(x) = Vᵀ k(centres, x). `Decision` evaluates it
at many rows: centres are prepared once, then tiles stay in a core's cache.

    decide = Decision(embedding, "float32")
    decide(X)                                 # (rows, classes), two matrix products and one exponential for each tile
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import (
    Array,
    Factor,
    astype,
    by_columns,
    cholesky,
    like,
    namespace_of,
    precision,
    set_diagonal,
    to_host,
)
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take, tiles_that_fit
from kme_dist.core.objective import Workspace, one_hot
from kme_dist.core.precision import TOLERANCE, UNIT_ROUNDOFF, Need, need_of_solve, refines, warn_of_padding
from kme_dist.core.risk import flat, per_row_shift, total_weight
from kme_dist.errors import NumericalError

# Rows and centres of a tile: wide enough for the matrix products, small enough to stay in a core's cache; on a device
# large enough to be worth a launch.
HOST_TILE = (512, 512)
DEVICE_TILE = (4096, 8192)
_FEATURE_ROWS = 4_096  # rows per call of a feature map
REFINED_ROWS = 4_000  # fewer are solved in double precision at once
_REFINEMENTS, _REFINED_RESIDUAL = 8, 1e-6


@dataclass(frozen=True)
class Embedding:
    """f(x) = Vᵀ k(centres, x): `weights` V has one row per centre and one column per class."""

    kernel: Kernel
    centres: Any
    weights: Array
    regularization: float

    def decision(self, X: Any) -> Array:
        """Decision probabilities at the rows of X, in the precision of X; see `Decision` for many calls."""
        return Decision(self, precision(X) if hasattr(X, "dtype") else None)(X)


class Decision:
    """f at any number of rows in one precision, tile by tile: no (rows x centres) matrix is ever held.

    `dtype` is the precision of the result. It is also the working precision, unless that is single and would lose the
    sum of weights kept in double; `working` overrides this choice.
    """

    def __init__(self, embedding: Embedding, dtype: str | None = None, working: str | None = None) -> None:
        self.kernel, weights, centres = embedding.kernel, embedding.weights, embedding.centres
        self._dtype: str | None = None
        self._working: str | None = None
        if dtype is not None and hasattr(centres, "dtype"):
            self._dtype, self._working = dtype, working or _working_precision(embedding, dtype)
            centres, weights = astype(centres, self._working), astype(weights, self._working)
        self._none = weights[:0, :]
        self._on_host = isinstance(weights, np.ndarray)
        self._rows, columns = HOST_TILE if self._on_host else DEVICE_TILE
        self._prepared = prepared = self.kernel.prepare(centres)
        blocks = row_blocks(row_count(centres), columns)
        self._blocks = [(take(prepared, block), by_columns(weights[block, :])) for block in blocks]

    def __call__(self, X: Any) -> Array:
        n = row_count(X)
        if not n:
            return self._out(self._none)
        # One buffer per call, reused for all its tiles: threads may share a model.
        tile = np.empty(min(n, self._rows) * self._widest, self._none.dtype) if self._on_host else None
        found = [f for _, f in tiles_that_fit(lambda rows: self._decide(take(X, rows), tile), n, self._rows)]
        return self._out(found[0] if len(found) == 1 else namespace_of(found[0]).concat(found, axis=0))

    def _out(self, f: Array) -> Array:
        return f if self._dtype in (None, self._working) else astype(f, str(self._dtype))

    @property
    def _widest(self) -> int:
        return max(int(V.shape[0]) for _, V in self._blocks)

    def _decide(self, X: Any, tile: np.ndarray | None) -> Array:
        if self._dtype != self._working and precision(X) != self._working:
            X = astype(X, str(self._working))
        queries, q = self.kernel.prepare_beside(X, self._prepared), row_count(X)
        total: Array = None
        for centres, V in self._blocks:
            c = int(V.shape[0])
            out = None if tile is None else tile[: q * c].reshape(q, c)
            total = self.kernel.times(queries, centres, V, total, out)
        return total


@dataclass(frozen=True)
class FeatureEmbedding:
    """f(x) = Wᵀ φ(x); or, with `on_features`, an embedding whose inputs are the features."""

    features: Any
    weights: Array
    on_features: Embedding | None = None
    regularization: float = math.nan

    def decision(self, X: Array) -> Array:
        """Decision probabilities (or scores) at the rows of X, chunk by chunk."""

        def decide(rows: slice) -> Array:
            Z = self.features.forward(X[rows, :])
            return Z @ like(to_host(self.weights), Z) if self.on_features is None else self.on_features.decision(Z)

        parts = [f for _, f in tiles_that_fit(decide, max(1, row_count(X)), _FEATURE_ROWS)]
        return parts[0] if len(parts) == 1 else namespace_of(parts[0]).concat(parts, axis=0)


def _working_precision(embedding: Embedding, dtype: str) -> str:
    """`dtype`, or double where single precision would lose the sum of weights kept in double."""
    V, centres = embedding.weights, embedding.centres
    if dtype != "float32" or precision(V) == "float32" or not row_count(centres):
        return dtype
    xp = namespace_of(V)
    largest = float(xp.max(xp.sum(xp.abs(V), axis=0))) * embedding.kernel.alpha(centres) ** 2
    if UNIT_ROUNDOFF["float32"] * largest <= TOLERANCE:  # a bound on the rounding error of the sum
        return dtype
    return sufficient_precision(Embedding(embedding.kernel, astype(centres, "float32"), V, embedding.regularization))


def sufficient_precision(
    embedding: Embedding,
    tolerance: float = 1e-3,
    sample: int = 256,
    probabilities: Callable[[np.ndarray], np.ndarray] | None = None,
) -> str:
    """ "float32" where its decisions equal those of double precision, to `tolerance`, at a sample of the centres.

    With a small λ weights are large and of both signs, and single precision loses their sum. The map from decisions to
    probabilities may be steep (calibration): with `probabilities` those have to agree as well.
    """
    centres = embedding.centres
    if not hasattr(centres, "dtype") or precision(centres) == "float64":
        return "float64"
    rows = centres[:: max(1, row_count(centres) // sample), ...]
    exact = to_host(Decision(embedding, "float64")(astype(rows, "float64")))
    narrow = to_host(Decision(embedding, "float32", "float32")(rows))
    error = np.abs(exact - narrow).max()
    if probabilities is not None:
        error = max(error, np.abs(probabilities(exact) - probabilities(narrow)).max())
    return "float32" if error <= tolerance else "float64"


def solve_dual(
    kernel: Kernel,
    X: Any,
    Y: Array,
    regularization: float,
    jitter: float = 0.0,
    workspace: Workspace | None = None,
    weights: np.ndarray | None = None,
) -> Array:
    """V = (K + nλI)⁻¹ Y, with weights (K + Wλ diag(1/w))⁻¹ Y, by one Cholesky factorisation in place."""
    return _factorised(kernel, X, Y, regularization, jitter, workspace, weights)[0]


def _factorised(
    kernel: Kernel,
    X: Any,
    Y: Array,
    regularization: float,
    jitter: float,
    workspace: Workspace | None,
    weights: np.ndarray | None,
) -> tuple[Array, Any]:
    """V and the Cholesky factor."""
    n, diag = row_count(X), kernel.diag(X)
    K = kernel.gram(X, out=(workspace or Workspace()).square(n, diag))
    shift = total_weight(weights, n) * regularization + jitter
    set_diagonal(K, diag + flat(per_row_shift(shift, weights, diag)))
    factor = cholesky(K)
    return factor.solve(Y), factor


@dataclass(frozen=True)
class ExactSolution:
    """V, and what its factorisation tells about the rows of the fit."""

    weights: Array
    left_out: Array | None  # decisions of the last rows under the fits without them
    risk: float  # mean -log of the label's decision probability at the rows of the fit
    squared_norm: float  # |f|² in the space of the kernel


def exact_solution(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    lam: float,
    workspace: Workspace | None = None,
    row_weights: np.ndarray | None = None,
    leave_out: int = 0,
) -> ExactSolution:
    """V = (K + nλI)⁻¹ Y in the precision that the solve needs; with jitter where a factorisation still fails.

    The last `leave_out` rows are also left out, one at a time. V keeps the precision it was computed in: rounding large
    entries of both signs would lose their sum. With weights of rows V = (K + Wλ diag(1/w))⁻¹ Y; all of them must be
    positive.
    """
    n, space, w = row_count(X), workspace or Workspace(), row_weights
    total = total_weight(w, n)
    need = need_of_solve(kernel, X, total * lam, weights=w)
    if need.missing:
        warn_of_padding(total, lam, need)
    diag = kernel.diag(X)
    scale = float(namespace_of(diag).mean(astype(diag, "float64"))) * (total / n)
    wide = Need("float64").promoted(X)
    if (
        need.dtype == "float64"
        and n >= REFINED_ROWS
        and isinstance(X, np.ndarray)
        and X.dtype == np.float32
        and w is None
        and not need.missing
        and refines(n, kernel.alpha(X) ** 2, need.norm, total * lam)
    ):
        with contextlib.suppress(NumericalError):
            return _refined(kernel, X, y, n_classes, total * lam, space, leave_out)
    attempts = [(need.promoted(X), need.missing)]
    attempts += [(wide, need.missing)] if need.dtype == "float32" else []
    attempts += [(wide, need.missing + jitter * scale) for jitter in (1e-10, 1e-8, 1e-6, 1e-4)]
    for rows, jitter in attempts:
        Y = one_hot(y, n_classes, kernel.diag(rows))
        try:
            V, factor = _factorised(kernel, rows, Y, lam, jitter, space, w)
            without = left_out(factor, V, Y, leave_out) if leave_out else None
        except NumericalError:
            continue
        P = to_host(Y - per_row_shift(total * lam + jitter, w, V) * V).astype(np.float64)  # = K V
        own = np.clip(P[np.arange(n), y], 1e-15, 1.0)
        risk = float(-np.average(np.log(own), weights=w))
        return ExactSolution(V, without, risk, float(np.sum(to_host(V).astype(np.float64) * P)))
    raise NumericalError(
        f"the Gram matrix of all {n} rows is singular in float64 at regularization {lam:.1e}; "
        "raise `regularization`, or keep `refit_regularization=True`",
        rows=n,
        regularization=lam,
        dtype="float64",
    )


def _refined(
    kernel: Kernel, X: np.ndarray, y: np.ndarray, n_classes: int, shift: float, space: Workspace, leave_out: int
) -> ExactSolution:
    """A factorisation in single precision, half the time and memory of double, with residuals in double until they are
    small. The factor lies below the diagonal; K itself is still above it."""
    diag = kernel.diag(X)
    K = kernel.gram(X, out=space.square(row_count(X), diag))
    set_diagonal(K, diag + np.float32(shift))
    factor = cholesky(K)
    Y = np.asarray(one_hot(y, n_classes, np.zeros(0)))
    V = refined_solution(factor, K, diag.astype(np.float64) + shift, Y)
    without = left_out(factor, V.astype(np.float32), Y.astype(np.float32), leave_out) if leave_out else None
    P = Y - shift * V
    own = np.clip(P[np.arange(len(y)), y], 1e-15, 1.0)
    return ExactSolution(V, without, float(-np.log(own).mean()), float(np.sum(V * P)))


def refined_solution(factor: Factor, K: np.ndarray, diag: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """V with A V = Y in double precision, from a factor in single; A has this diagonal and the upper triangle of K."""
    V, R, last = np.zeros_like(Y), Y, math.inf
    for _ in range(_REFINEMENTS):
        V = V + np.asarray(factor.solve(R.astype(np.float32)), np.float64)
        R = Y - upper_product(K, diag, V)
        size = float(np.linalg.norm(R) / np.linalg.norm(Y))
        if size <= _REFINED_RESIDUAL or not size < 0.5 * last:
            break
        if size**2 <= _REFINED_RESIDUAL and math.isinf(last):  # each step shrinks the residual by that factor
            V, size = V + np.asarray(factor.solve(R.astype(np.float32)), np.float64), size**2
            break
        last = size
    if not size <= _REFINED_RESIDUAL:
        raise NumericalError(f"refinement stopped at a relative residual of {size:.1e}")
    return V


def upper_product(K: np.ndarray, diag: np.ndarray, V: np.ndarray) -> np.ndarray:
    """A V in double precision, for a symmetric A with the given diagonal and the strict upper triangle of K."""
    out: np.ndarray = diag[:, None] * V
    for block in row_blocks(len(V), HOST_TILE[0]):  # of columns, which are contiguous
        for rows in row_blocks(block.start, HOST_TILE[0]):
            above = K[rows, block].astype(np.float64)
            out[rows] += above @ V[block]
            out[block] += above.T @ V[rows]
        corner = np.triu(K[block, block].astype(np.float64), k=1)
        out[block] += corner @ V[block] + corner.T @ V[block]
    return out


def leave_one_out(
    kernel: Kernel,
    X: Any,
    Y: Array,
    regularization: float,
    workspace: Workspace | None = None,
    weights: np.ndarray | None = None,
) -> tuple[Array, Array]:
    """Decision probabilities of every row under the model fitted without it, and V.

    P_i = Y_i - V_i / [A⁻¹]_ii, equal to n refits with the same shift nλ (with weights, the same shifts Wλ/w). A row of
    weight 2 is left out as a whole; of two equal rows one stays.
    """
    n, diag = row_count(X), kernel.diag(X)
    K = kernel.gram(X, out=(workspace or Workspace()).square(n, diag))
    set_diagonal(K, diag + flat(per_row_shift(total_weight(weights, n) * regularization, weights, diag)))
    factor = cholesky(K)
    V = factor.solve(Y)
    return Y - V / factor.inverse_diagonal()[:, None], V


def left_out(factor: Any, V: Array, Y: Array, count: int) -> Array:
    """Decision probabilities of the last rows under the models fitted without them, one at a time.

    From the factor of A and V = A⁻¹ Y. It is the last rows because their entries of diag(A⁻¹) cost next to nothing.
    """
    half = factor.last_columns(count)
    return Y[-count:, :] - V[-count:, :] / namespace_of(V).sum(half * half, axis=0)[:, None]


def clip_normalise(P: Array, floor: float = 0.0) -> Array:
    """Clip from below and divide by the sum; rows without a positive entry become uniform.   [HNR, equation 6]

    The paper clips at zero, which gives probability 0 to some labels that do occur. A small positive floor avoids that.
    """
    xp = namespace_of(P)
    clipped = xp.where(floor < P, P, P * 0 + floor)
    total = xp.sum(clipped, axis=1, keepdims=True)
    uniform = P * 0 + 1 / P.shape[1]
    return xp.where(total > 0, clipped / xp.where(total > 0, total, total * 0 + 1), uniform)


def entropy(P: Array, floor: float = 0.0) -> Array:
    """Entropy of the clip-normalised probabilities, in nats."""
    return _self_information(clip_normalise(P, floor))


def rkhs_entropy(P: Array) -> Array:
    """Σ_c f_c u_c with u_c = -log f_c where f_c > 0, else 0: the embedding's estimate of E[-log p(Y|x)]."""
    return _self_information(P)


def _self_information(P: Array) -> Array:
    xp = namespace_of(P)
    safe = xp.where(P > 0, P, P * 0 + 1)
    return -xp.sum(P * xp.log(safe), axis=1)


def expectation(P: Array, g: Any) -> Array:
    """E[g(Y) | x] = Σ_c g(c) f_c(x); `g` holds one value (or one row of values) per class."""
    return P @ like(g, P)


def log_loss(Y: Array, P: Array, floor: float = 0.0, weights: np.ndarray | None = None) -> Array:
    """(Weighted) mean of -log p̃_y over the rows, p̃ clip-normalised with `floor` and never below 1e-15."""
    xp = namespace_of(P)
    p = xp.sum(Y * clip_normalise(P, floor), axis=1)
    logs = xp.log(xp.where(p > 1e-15, p, p * 0 + 1e-15))
    if weights is None:
        return -xp.mean(logs)
    w = like(weights, P)
    return -xp.sum(logs * w) / xp.sum(w)
