"""The precision that a solve needs: one rule for every objective and every solver.

With u the unit roundoff, V = (K + sI)⁻¹ Y computed in that precision has a relative error of about

    c u (|K| + s) / s,      s = nλ,  |K| the largest eigenvalue of the Gram matrix,  c = 10

Measured over seven kinds of kernels, 2 to 30 features, 60 and 300 rows, with and without near-duplicates, with length
scales from 0.3 to 3 times the typical distance and s from 1e-2 to 1e-5 of |K|, c was at most 6 for V, 2 for decisions
and for the value of `rcb_objective`, and, except for near-duplicates at an s too small for single precision, 9 for its
gradient. (The logarithm of a probability near 0 is ill-conditioned by itself, whatever the solve.)

Three digits are required. Single precision has them down to s = |K| / 1,700; below that, rows are promoted before they
are multiplied. Double precision has them down to s = 1.1e-12 |K|; below that, the missing shift is added and reported.

|K| is estimated by the largest absolute row sum of K among at most 64 rows spread over the given rows: the same rows
give the same precision, on any worker. It is an estimate: a cluster of less than a few percent of the rows may be
missed by all 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, like, namespace_of, precision
from kme_dist.core.kernels.base import Kernel, row_count
from kme_dist.core.risk import column, total_weight
from kme_dist.errors import PrecisionWarning, warn

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
ERROR_FACTOR = 10.0  # c
TOLERANCE = 1e-3
_NORM_ROWS = 64


@dataclass(frozen=True)
class Need:
    """What a solve needs: its precision, and the amount to add to a shift too small for double precision (usually 0).
    `norm` is the estimate of |K|, or a bound where that was sufficient."""

    dtype: str
    missing: float = 0.0
    norm: float = 0.0

    def promoted(self, X: Any) -> Any:
        """The rows in that precision; anything but an array is returned as it is."""
        return astype(X, self.dtype) if hasattr(X, "dtype") else X


def solve_error(dtype: str, norm: float, shift: float) -> float:
    """The expected relative error of (K + shift I)⁻¹ Y in this precision."""
    return ERROR_FACTOR * UNIT_ROUNDOFF[dtype] * (norm + shift) / shift if shift > 0 else math.inf


def is_sufficient(dtype: str, norm: float, shift: float, tolerance: float = TOLERANCE) -> bool:
    """Whether this precision leaves three digits, or an error of at most `tolerance`."""
    return solve_error(dtype, norm, shift) <= tolerance


def refines(n: int, top: float, norm: float, shift: float) -> bool:
    """Whether a solve in single precision can be refined to three digits.

    The factor must be good enough for the refinement to converge, and entries of K rounded to single precision must be
    good enough for the result: their errors are independent, so together they amount to about u √n top in norm.
    """
    u = UNIT_ROUNDOFF["float32"]
    return ERROR_FACTOR * u * (norm + shift) <= 0.1 * shift and 2 * u * math.sqrt(n) * top <= TOLERANCE * shift


def smallest_shift(dtype: str, norm: float) -> float:
    """The smallest shift that leaves three digits."""
    worst = ERROR_FACTOR * UNIT_ROUNDOFF[dtype]
    return worst * norm / (TOLERANCE - worst)


def need_of_solve(
    kernel: Kernel,
    X: Any,
    shift: float,
    top: float | None = None,
    weights: np.ndarray | None = None,
    tolerance: float = TOLERANCE,
) -> Need:
    """What solving with K + shift I of these rows needs; `top` is the largest k(x, x), if the caller knows it.

    With weights the matrix is √w K √w: as if each row were there w times. `tolerance` is the error that single
    precision may have.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        diag = kernel.diag(X) if top is None or not hasattr(X, "dtype") else X
        largest = float(namespace_of(diag).max(diag)) if top is None else top
        n = total_weight(weights, row_count(X))
        return decide(precision(diag), n, largest, shift, lambda: gram_norm(kernel, X, weights), tolerance)


def need_of_features(Z: Array, shift: float, weights: np.ndarray | None = None) -> Need:
    """The same for ZᵀZ + shift I, whose eigenvalues are those of Z Zᵀ."""
    xp, n = namespace_of(Z), Z.shape[0]
    with np.errstate(over="ignore", invalid="ignore"):
        w = column(weights, Z)
        squares = xp.sum(Z * Z * w, axis=1)
        total = float(xp.sum(squares))  # the trace: no eigenvalue is larger

        def norm() -> float:
            return float(xp.max(xp.sum(xp.abs(_some_rows(Z, n) @ (Z * w).T), axis=1)))

        return decide(precision(Z), 1, total, shift, norm)


def decide(
    dtype: str, n: float, top: float, shift: float, norm: Callable[[], float], tolerance: float = TOLERANCE
) -> Need:
    """The precision for n rows whose largest k(x, x) is `top`; `norm` is called only where n · top does not decide."""
    bound = n * top
    if is_sufficient(dtype, bound, shift, tolerance if dtype == "float32" else TOLERANCE):
        return Need(dtype, norm=bound)
    if not math.isfinite(bound):  # overflow or missing values: double precision, and the error that results
        return Need("float64")
    # |K| is at least its largest diagonal entry.
    enough = is_sufficient("float32", top, shift, tolerance)
    if dtype == "float32" and not enough and is_sufficient("float64", bound, shift):
        return Need("float64", norm=bound)
    found = norm()
    if not math.isfinite(found):
        return Need("float64")
    found = min(max(found, top), bound)
    if dtype == "float32" and is_sufficient("float32", found, shift, tolerance):
        return Need("float32", norm=found)
    return Need("float64", max(smallest_shift("float64", found) - shift, 0.0), found)


def warn_of_padding(n: float, lam: float, need: Need) -> None:
    """Warn that λ is too small for double precision, and say which λ was used instead."""
    least = lam + need.missing / n
    warn(
        f"regularization {lam:.1e} is too small for double precision: n x regularization is {n * lam:.1e} for {n:g} "
        f"rows against a Gram matrix of norm {need.norm:.1e}, and digits are lost below {n * least:.1e}. The fit uses "
        f"regularization {least:.1e}; set it to at least that, or keep `refit_regularization=True`",
        PrecisionWarning,
    )


def gram_norm(kernel: Kernel, X: Any, weights: np.ndarray | None = None) -> float:
    """Estimate of the largest eigenvalue of K (of √w K √w): the largest Σ_j |K_ij| w_j among at most 64 rows i."""
    n = row_count(X)
    prepared = kernel.prepare(X)
    tile = kernel.evaluate(kernel.prepare_beside(_some_rows(X, n), prepared), prepared)
    xp = namespace_of(tile)
    sizes = xp.abs(tile) if weights is None else xp.abs(tile) * like(weights, tile)[None, :]
    return float(xp.max(xp.sum(sizes, axis=1)))


def _some_rows(X: Any, n: int) -> Any:
    """At most 64 rows, spaced by the golden ratio so that no periodic order of the rows biases them."""
    if n <= _NORM_ROWS:
        return X
    chosen = np.unique((np.arange(1, _NORM_ROWS + 1) * 0.6180339887498949 % 1.0 * n).astype(np.int64))
    return X[like(chosen, X, dtype=np.int64)] if hasattr(X, "dtype") else [X[i] for i in chosen.tolist()]
