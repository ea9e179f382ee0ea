"""Ranges and moments of columns in one pass: stable, mergeable, independent of the order of merging up to rounding.

Each piece is centred on its own mean in double precision before it is squared, and pieces are merged by the pairwise
update of Chan, Golub and LeVeque, so the variance of a column around 1e9 with a spread of 1 is accurate.

With weights of rows moments are weighted, and rows of weight 0 have no influence, not on the range either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist.errors import DataError

LARGEST = {"": np.inf, "float64": 1e150, "float32": 1e18}  # of rows of a kernel: sums of squares stay finite
_PIECE_BYTES = 1 << 20  # doubles that fit the processor's cache, since they are used three times


@dataclass(frozen=True)
class Statistics:
    """Count, ranges and moments of each column; `+` merges two."""

    count: int
    minimum: np.ndarray
    maximum: np.ndarray
    mean: np.ndarray
    squares: np.ndarray  # sum of squared deviations from the mean
    weight: float | None = None  # sum of the weights; None: every row has weight 1

    @property
    def total(self) -> float:
        """The sum of the weights, by default the count."""
        return self.count if self.weight is None else self.weight

    @property
    def variance(self) -> np.ndarray:
        """Population variance (divided by the count, or the sum of the weights)."""
        return self.squares / (self.total or 1)

    @property
    def merged_in_single(self) -> np.ndarray:
        """The columns whose values single precision cannot tell apart: its spacing at the largest of them, 1.2e-7 |x|,
        exceeds a thousandth of their deviation, or its squares overflow."""
        spread, largest = np.sqrt(self.variance), np.maximum(np.abs(self.minimum), np.abs(self.maximum))
        merged = (spread > 0) & (largest * np.finfo(np.float32).eps > 1e-3 * spread)
        return np.asarray((merged | (largest > LARGEST["float32"])) & (self.count > 0))

    def check_squares(self, source: str, names: Sequence[str], remedy: str, dtype: str = "") -> None:
        """DataError for values whose squares overflow, and so have no variance, by the name of their column.

        With `dtype`, of rows that are used in this precision without a scaling: equal values have a variance, but their
        squares overflow all the same.
        """
        sizes = np.maximum(np.abs(self.minimum), np.abs(self.maximum))
        too_large = np.flatnonzero((~np.isfinite(self.variance) | (sizes > LARGEST[dtype])) & (self.total > 0))
        if len(too_large):
            j = int(too_large[0])
            name = names[j] if j < len(names) else f"number {j}"
            raise DataError(
                f"{source}: column {name!r} has values up to {sizes[j]:.3g}, whose squares exceed "
                f"{dtype or 'float64'}; correct them (they may stand for a missing value), or {remedy}"
            )

    @classmethod
    def empty(cls, width: int) -> Statistics:
        zeros = np.zeros(width)
        return cls(0, np.full(width, np.inf), np.full(width, -np.inf), zeros, zeros)

    @classmethod
    def of(cls, X: np.ndarray, weights: np.ndarray | None = None) -> Statistics:
        """Statistics of the rows of X (a vector counts as one column)."""
        if X.ndim == 1:
            X = X[:, None]
        result = cls.empty(X.shape[1])
        step = max(64, _PIECE_BYTES // max(1, 8 * X.shape[1]))
        with np.errstate(over="ignore", invalid="ignore"):  # `check_squares` says what overflows
            for start in range(0, len(X), step):
                part = slice(start, start + step)
                result = result + cls._of_piece(X[part], None if weights is None else weights[part])
        return result

    @classmethod
    def _of_piece(cls, X: np.ndarray, weights: np.ndarray | None) -> Statistics:
        count = len(X)
        if weights is not None and not weights.all():
            X, weights = X[weights > 0], weights[weights > 0]
            if not len(X):
                return replace(cls.empty(X.shape[1]), count=count, weight=0.0)
        low, high = X.min(axis=0).astype(np.float64), X.max(axis=0).astype(np.float64)
        values = X.astype(np.float64)
        if weights is None:
            mean = np.ones(len(X)) @ values / len(X)
            values -= mean
            return cls(count, low, high, mean, np.einsum("ij,ij->j", values, values))
        total = float(weights.sum())
        mean = weights @ values / total
        values -= mean
        return cls(count, low, high, mean, np.einsum("ij,ij,i->j", values, values, weights), total)

    def __add__(self, other: Statistics) -> Statistics:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        unweighted = self.weight is None and other.weight is None
        total = self.total + other.total
        if not self.total or not other.total:
            return replace(self if self.total else other, count=count, weight=total)
        difference = other.mean - self.mean
        return Statistics(
            count,
            np.minimum(self.minimum, other.minimum),
            np.maximum(self.maximum, other.maximum),
            self.mean + difference * (other.total / total),
            self.squares + other.squares + difference**2 * (self.total * other.total / total),
            None if unweighted else total,
        )

    def to_json(self) -> dict[str, Any]:
        if not self.count:
            return {"count": 0, "minimum": [], "maximum": [], "mean": [], "variance": []}
        names = ("minimum", "maximum", "mean", "variance")
        weight = {} if self.weight is None else {"weight": self.weight}
        return {"count": self.count, **weight, **{name: getattr(self, name).tolist() for name in names}}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], width: int) -> Statistics:
        count = int(stored["count"])
        if not count:
            return cls.empty(width)
        low, high, mean, variance = (np.asarray(stored[n], float) for n in ("minimum", "maximum", "mean", "variance"))
        weight = None if stored.get("weight") is None else float(stored["weight"])
        return cls(count, low, high, mean, variance * (count if weight is None else weight), weight)
