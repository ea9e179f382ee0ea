"""Weights of rows: a row of weight 2 counts as the row twice, a row of weight 0 as no row.

    A = K + Wλ diag(1/w),  V = A⁻¹ Y,  risk Σ w_i L_i,  W = Σ w_i
    G = Zᵀ diag(w) Z + WλI,  B = Zᵀ diag(w) Y          explicit features, centres

Multiplying all weights by a number changes neither V nor B, but it changes a summed risk against the complexity term.
None stands for weights of 1 everywhere; every function here then returns what leaves the arithmetic as it is. A solver
whose code needs a constant shift uses the same system in another form, √w K √w + WλI, with u = V / √w.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kme_dist.backend import Array, like, to_host
from kme_dist.core.kernels.base import select
from kme_dist.errors import DataError


def checked_weights(weights: Any, rows: int) -> np.ndarray | None:
    """One finite number >= 0 per row, not all of them 0, in double precision; None stays None."""
    if weights is None:
        return None
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != (rows,):
        raise DataError(f"got weights of shape {w.shape} for {rows} rows; give one number per row")
    bad = ~(np.isfinite(w) & (w >= 0))
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(f"the weight of row {row} (counted from 0) is {w[row]}; weights must be finite numbers >= 0")
    if not w.any():
        raise DataError(f"all {rows} weights are 0; at least one row must have a positive weight")
    return w


def positive_rows(X: Any, y: np.ndarray, weights: Any) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """The rows with a positive weight."""
    w = checked_weights(weights, len(y))
    if w is None or w.all():
        return X, y, w
    kept = np.flatnonzero(w)
    return select(X, kept), y[kept], w[kept]


class Merged(NamedTuple):
    """Rows without repetition."""

    X: Any
    y: np.ndarray
    weights: np.ndarray | None  # sums over equal rows; None if there were neither weights nor repetitions
    place: np.ndarray | None  # of each given row among these; None if they are the same


def merge_equal_rows(X: Any, y: np.ndarray, weights: np.ndarray | None) -> Merged:
    """Equal rows with equal labels as one row with the sum of their weights: the same fit, to rounding.

    For leave-one-out, which would otherwise leave their copies in and be far too optimistic.
    """
    if getattr(X, "ndim", 0) != 2 or len(y) < 2:
        return Merged(X, y, weights, None)
    host = np.ascontiguousarray(to_host(X)) + 0.0  # -0.0 equals 0.0
    # Sums of a row are the same for equal rows: where all differ there is nothing to merge.
    factors = np.random.default_rng(0).uniform(1, 2, host.shape[1])  # double: few sums are equal by rounding
    sums = np.sum(host * factors, axis=1)
    if len(np.unique(sums)) == len(sums):
        return Merged(X, y, weights, None)
    keys = np.concatenate([host.astype(np.float64), y[:, None].astype(np.float64)], axis=1)
    _, first, index = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    index = np.asarray(index).reshape(-1)
    if len(first) == len(y):
        return Merged(X, y, weights, None)
    order = np.argsort(first)  # in the order of their first row
    place = np.empty(len(first), np.int64)
    place[order] = np.arange(len(first))
    index, first = place[index], first[order]
    own = np.ones(len(y)) if weights is None else weights
    return Merged(select(X, first), y[first], np.bincount(index, own, minlength=len(first)), index)


def total_weight(weights: np.ndarray | None, rows: int) -> float:
    """W; the number of rows without weights."""
    return rows if weights is None else float(np.sum(weights))


def column(weights: np.ndarray | None, reference: Array) -> Any:
    """The weights as a column like `reference`; 1.0 without weights."""
    return 1.0 if weights is None else like(weights, reference)[:, None]


def per_row_shift(shift: float, weights: np.ndarray | None, reference: Array) -> Any:
    """What to add to the diagonal of K: shift / w_i as a column, or the number itself."""
    return shift if weights is None else like(shift / weights, reference)[:, None]


def flat(shift: Any) -> Any:
    """A shift of the diagonal as a vector; a number stays a number."""
    return shift[:, 0] if hasattr(shift, "ndim") and shift.ndim == 2 else shift
