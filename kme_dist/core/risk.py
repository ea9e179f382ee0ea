"""What rows contribute to a fit: their weights, their labels, and the risk that an objective minimises.

A row of weight 2 counts as the row twice, a row of weight 0 as no row:

    A = K + Wλ diag(1/w),  V = A⁻¹ Y,  risk Σ w_i L_i,  W = Σ w_i
    G = Zᵀ diag(w) Z + WλI,  B = Zᵀ diag(w) Y          explicit features, centres

Multiplying all weights by a number changes neither V nor B, but it changes a summed risk against the complexity term.
None stands for weights of 1 everywhere; functions of weights then return what leaves the arithmetic as it is. A solver
whose code needs a constant shift uses the same system in another form, √w K √w + WλI, with u = V / √w.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kme_dist.backend import Array, astype, is_sparse, like, namespace_of, precision, to_host
from kme_dist.core.kernels.base import select
from kme_dist.errors import ConfigError, DataError

COMPLEXITY_WEIGHT = 4 * math.e
LOSS_FLOOR = 1e-15
# Rows are equal by nature, not as copies, if there are so many to a different one, or if labels contradict each other
# in so large a share of them.
_REPEATED, _CONTRADICTED = 5, 0.1
_MOST_PARTS, _MOST_SPLIT = 10, 2_000  # of equal rows; rows that splitting makes at most, if there were fewer


# --- weights ----------------------------------------------------------------------------------------


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
        raise DataError(f"the weight of row {row} is {w[row]}; weights must be finite numbers >= 0")
    if not w.any():
        raise DataError(f"all {rows} weights are zero; at least one row must have a positive weight")
    return w


def positive_rows(X: Any, y: np.ndarray, weights: Any) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """The rows with a positive weight."""
    w = checked_weights(weights, len(y))
    if w is None or w.all():
        return X, y, w
    kept = np.flatnonzero(w)
    return select(X, kept), y[kept], w[kept]


class Merged(NamedTuple):
    """Rows as leave-one-out leaves them out."""

    X: Any
    y: np.ndarray
    weights: np.ndarray | None  # None if there were neither weights nor repetitions
    place: np.ndarray | None  # of each given row among these (of several parts the first); None if they are the same
    first: np.ndarray | None  # the given row that each of these is equal to; None if they are the same


def merge_equal_rows(X: Any, y: np.ndarray, weights: np.ndarray | None) -> Merged:
    """Equal rows with equal labels as one row with the sum of their weights: the same fit, to rounding.

    For leave-one-out, which would otherwise leave their copies in and be far too optimistic. In tables of few
    different rows, such as categories, rows are equal without being copies. Leaving all with one label out would leave
    the others as the only evidence: of p = 0.9 nothing would remain. There, the sum is split into equal parts, a tenth
    or more, and at least a weight of 1, which are left out one at a time.
    """
    groups = _groups(X, y, weights)
    if groups is None:
        return Merged(X, y, weights, None, None)
    parts = np.where(groups.natural, np.clip(np.floor(groups.weights), 1, _MOST_PARTS), 1).astype(np.int64)
    while parts.sum() > max(len(y), _MOST_SPLIT) and parts.max() > 1:
        parts = np.minimum(parts, parts.max() - 1)
    if len(parts) == len(y) and parts.max() == 1:
        return Merged(X, y, weights, None, None)
    first = np.repeat(groups.first, parts)
    place = (np.cumsum(parts) - parts)[groups.index]
    return Merged(select(X, first), y[first], np.repeat(groups.weights / parts, parts), place, first)


def without_copies(X: Any, y: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    """The first of all equal rows with equal labels, and the sums of their weights.

    None if there is nothing to sum, and in tables of few different rows, whose equal rows are no copies.
    """
    groups = _groups(X, y, weights)
    if groups is None:
        return None if weights is None else (np.arange(len(y)), weights)
    return None if groups.natural.any() else (groups.first, groups.weights)


def shared_by_copies(V: np.ndarray, weights: np.ndarray, place: np.ndarray, given: np.ndarray | None) -> np.ndarray:
    """Rows of V, of merged rows, as those of the given rows: each has its share, by weight, of the sum over the parts.

    The parts of equal rows have equal V, but only their sum is exact where the shift is small.
    """
    starts, group = np.unique(place, return_inverse=True)  # the parts of a group are neighbours
    share = (1.0 if given is None else given) / np.add.reduceat(weights, starts)[group]
    return np.asarray(np.add.reduceat(V, starts)[group] * share.astype(V.dtype)[:, None])


@dataclass(frozen=True)
class _Groups:
    """Equal rows with equal labels, in the order of their first row."""

    first: np.ndarray  # of each group
    index: np.ndarray  # the group of each row
    weights: np.ndarray  # of each group
    natural: np.ndarray  # whether its rows are equal because there are few different ones, not because they are copies


def _groups(X: Any, y: np.ndarray, weights: np.ndarray | None) -> _Groups | None:
    """None if no two rows are equal."""
    rows = _comparable(X) if len(y) > 1 else None
    if rows is None:
        return None
    _, cell = np.unique(rows, axis=0, return_inverse=True)
    cell = np.asarray(cell).reshape(-1)
    cells = int(cell.max()) + 1
    if cells == len(y):
        return None
    _, first, index = np.unique(np.stack([cell, y], axis=1), axis=0, return_index=True, return_inverse=True)
    index, order = np.asarray(index).reshape(-1), np.argsort(first)
    place = np.empty(len(first), np.int64)
    place[order] = np.arange(len(first))
    index, first = place[index], first[order]
    sums = np.bincount(index, np.ones(len(y)) if weights is None else weights, minlength=len(first))
    # Copies have the label of their original.
    contradicted = np.bincount(cell[first], minlength=cells)[cell[first]] > 1
    few = len(y) >= _REPEATED * cells or sums[contradicted].sum() >= _CONTRADICTED * sums.sum()
    return _Groups(first, index, sums, contradicted | few)


def _comparable(X: Any) -> np.ndarray | None:
    """Numbers that are equal for equal rows; None if all rows differ, or cannot be compared."""
    if _is_texts(X):
        return _numbers_of(X)[:, None]
    if getattr(X, "ndim", 0) != 2:
        return None
    host = to_host(X) if is_sparse(X) else np.ascontiguousarray(to_host(X)) + 0.0  # -0.0 equals 0.0
    # Sums of a row are the same for equal rows: where all differ there is nothing to merge.
    factors = np.random.default_rng(0).uniform(1, 2, host.shape[1])  # double: few sums are equal by rounding
    sums = host @ factors if is_sparse(host) else np.sum(host * factors, axis=1)
    if len(np.unique(sums)) == len(sums):
        return None
    return _numbers_of_rows(host)[:, None] if is_sparse(host) else host


def _numbers_of_rows(X: Any) -> np.ndarray:
    """A number for every sparse row, the same for equal rows."""
    spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(X.indptr)]
    return _numbers_of([(X.indices[s].tobytes(), X.data[s].tobytes()) for s in spans])


def row_keys(X: Any, Y: np.ndarray) -> np.ndarray:
    """A number for every row of numbers with its targets, to count copies over many tasks: two random sums of its
    values as one complex number. Those of equal rows are equal; of different rows both would have to round alike."""
    width = int(X.shape[1])
    factors = np.random.default_rng(0).uniform(1, 2, (2, width + Y.shape[1]))

    def sums(own: np.ndarray) -> np.ndarray:
        # Row by row in the same order, whatever the number of rows: a matrix product would round differently.
        rows = X @ own[:width] if is_sparse(X) else np.sum(np.ascontiguousarray(X) * own[:width], axis=1)
        return np.asarray(rows + np.sum(np.ascontiguousarray(Y) * own[width:], axis=1))

    return np.asarray(sums(factors[0]) + 1j * sums(factors[1]))


def weight_of_copies(keys: np.ndarray, among: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """For each of the keys the weight (without weights the number) of the rows `among` which have it."""
    known, place = np.unique(keys, return_inverse=True)
    at = np.minimum(np.searchsorted(known, among), len(known) - 1)
    same = known[at] == among
    found = np.bincount(at[same], None if weights is None else weights[same], minlength=len(known))
    return np.asarray(found.astype(np.float64)[place.reshape(-1)])


def _is_texts(X: Any) -> bool:
    return isinstance(X, list) and all(isinstance(row, str) for row in X)


def _numbers_of(keys: list[Any]) -> np.ndarray:
    """A number for every key, the same for equal keys."""
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], np.float64)


def with_copies(X: Any, y: np.ndarray, weights: np.ndarray | None, count: int, seed: int) -> np.ndarray:
    """Which rows to hold out: `count` random ones of positive weight, at most a tenth, and all their copies."""
    groups, place = _groups(X, y, weights), np.arange(len(y))
    if groups is not None:
        place = np.where(groups.natural[groups.index], place, groups.first[groups.index])
    chosen = np.unique(place if weights is None else place[weights > 0])
    chosen = np.random.default_rng([seed, 6]).permutation(chosen)[: min(count, len(chosen) // 10)]
    found = np.isin(place, chosen)
    return np.asarray(found if weights is None else found & (weights > 0))


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


# --- labels and losses -------------------------------------------------------------------------------


def one_hot(y: Any, n_classes: int, reference: Array) -> Array:
    """Labels 0..m-1 as an n x m matrix, on the device and in the precision of `reference`."""
    if not isinstance(n_classes, int | np.integer) or n_classes < 1:
        raise ConfigError(f"n_classes={n_classes!r}: must be an integer >= 1")
    labels = to_host(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"labels must be integers 0..{n_classes - 1}, got {labels.dtype} of shape {labels.shape}")
    if labels.size and (labels.min() < 0 or labels.max() >= n_classes):
        raise DataError(f"labels must be in 0..{n_classes - 1}, got {labels.min()}..{labels.max()}")
    return like(labels[:, None] == np.arange(n_classes)[None, :], reference)


def clipped_loss(Y: Array, P: Array, floor: float, weights: np.ndarray | None = None) -> tuple[Array, Array]:
    """Σ_i w_i L_i with L_i = -log clip(P_i,y_i, floor, 1), and its derivative S by P.   [HNR, equation 7]"""
    xp = namespace_of(P)
    p = xp.sum(Y * P, axis=1, keepdims=True)
    inside = (p > floor) & (p < 1)
    safe = xp.where(inside, p, p * 0 + 1)
    # below the floor the loss is -log(floor), above one it is 0; `safe` = 1 covers the latter
    loss = xp.where(p > floor, -xp.log(safe), p * 0 - math.log(floor))
    S = xp.where(inside, -1 / safe, p * 0) * Y
    if weights is None:
        return xp.sum(loss), S
    w = column(weights, P)
    return xp.sum(loss * w), S * w


def hits(Y: Array, P: Array, weights: np.ndarray | None = None) -> Array:
    """The number (or weight) of the rows whose true class has the largest probability."""
    xp = namespace_of(P)
    best = xp.max(P, axis=1, keepdims=True)
    return xp.sum(astype(xp.sum(Y * P, axis=1, keepdims=True) >= best, precision(P)) * column(weights, P))


@dataclass(frozen=True)
class Terms:
    """How the parts of the objective are combined."""

    risk: str
    tau: float
    floor: float

    def __post_init__(self) -> None:
        if self.risk not in ("sum", "mean"):
            raise ConfigError(f"risk={self.risk!r} is unknown; choose 'sum' or 'mean'")
        if not self.tau >= 0:
            raise ConfigError(f"complexity_weight={self.tau!r}: must be a number >= 0")
        if not 0 < self.floor < 1:
            raise ConfigError(f"loss_floor={self.floor!r}: must be a number between 0 and 1")

    def per_row(self, n: float) -> float:
        return 1.0 if self.risk == "sum" else 1.0 / n


def _number(name: str, value: Any) -> float:
    """A plain float: a NumPy scalar of double precision would turn single-precision arrays into double ones."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r}: must be a number") from None


def terms_of(risk: str, complexity_weight: Any, loss_floor: Any, regularization: Any) -> tuple[Terms, float]:
    """How the parts of an objective are combined, and λ, checked."""
    terms = Terms(risk, _number("complexity_weight", complexity_weight), _number("loss_floor", loss_floor))
    lam = _number("regularization", regularization)
    if not 0 < lam < math.inf:
        raise ConfigError(f"regularization={regularization!r}: must be a positive number")
    return terms, lam


def ratio(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, 0 where the denominator is not positive."""
    xp = namespace_of(denominator)
    positive = denominator > 0
    return xp.where(positive, numerator / xp.where(positive, denominator, denominator * 0 + 1), denominator * 0)


def complexity_term(terms: Terms, alpha: Array, t: Array) -> tuple[Array, Array, Array]:
    """r = α sqrt(t), c = τ α / (2 sqrt t), and the direct derivative dq/dα = τ sqrt(t); all 0 where t vanishes."""
    xp = namespace_of(t)
    root = xp.sqrt(xp.where(t > 0, t, t * 0))
    return alpha * root, ratio(terms.tau * alpha, 2 * root), terms.tau * root
