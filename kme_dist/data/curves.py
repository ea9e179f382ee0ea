"""Normal scores for columns with heavy tails: incomes, counts, concentrations, one wrong cell of 10⁹.

    curves = Curves.of(X, weights)          # None if no column has heavy tails
    curves.apply(X)                         # the same rows, these columns by their curves

A kernel of distances sees nothing of a column whose range, or deviation, is that of a few extreme values: all others
are in one point. Each such column gets a curve, piecewise linear through a few quantiles, that makes its values look
normal, from 0 at the least to 1 at the largest. Values beyond both are at the ends of the curve.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy.special import ndtr, ndtri

_ARRAYS = ("columns", "knots", "values")
_KNOTS = 33
_TAILS = 3.0  # kurtosis beyond that of the normal distribution from which a column has heavy tails
_LEAST_ROWS, _LEAST_VALUES = 30, 5
_MOST_OF_ONE_VALUE = 0.5  # share of the rows: mostly empty columns (pixels, words) stay as they are


@dataclass(frozen=True)
class Curves:
    """Curves of the columns `columns`: `values` (columns, knots) at `knots`, both rising."""

    columns: np.ndarray
    knots: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, X: np.ndarray, weights: np.ndarray | None = None) -> Self | None:
        """Curves for the columns of X that have heavy tails, if any; a row of weight 2 counts as the row twice."""
        if len(X) < _LEAST_ROWS:
            return None
        X = np.asarray(X, np.float64)
        w = np.full(len(X), 1 / len(X)) if weights is None else weights / weights.sum()
        found = [(j, curve) for j in _heavy(X, w) if (curve := _curve(X[:, j], w)) is not None]
        if not found:
            return None
        knots, values = (np.array(one) for one in zip(*(curve for _, curve in found), strict=True))
        return cls(np.array([j for j, _ in found]), knots, values)

    def apply(self, X: np.ndarray) -> np.ndarray:
        """A copy of X, in double precision, with these columns by their curves."""
        Z = np.array(X, np.float64)
        for j, knots, values in zip(self.columns, self.knots, self.values, strict=True):
            Z[:, j] = np.interp(Z[:, j], knots, values)
        return Z

    def weighted(self, weights: np.ndarray) -> Self:
        """These curves followed by a factor for each column of X."""
        return replace(self, values=self.values * weights[self.columns][:, None])

    def stored(self, at: str) -> dict[str, np.ndarray]:
        """Arrays to store, with names that start with `at`."""
        return {f"{at}{name}": getattr(self, name) for name in _ARRAYS}

    @property
    def digest(self) -> str:
        """Changes with the curves."""
        return hashlib.sha256(b"".join(getattr(self, name).tobytes() for name in _ARRAYS)).hexdigest()[:16]

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], at: str) -> Self | None:
        """The curves that were stored; None if there are none among the arrays."""
        return cls(*(arrays[at + name] for name in _ARRAYS)) if at + _ARRAYS[0] in arrays else None


def _heavy(X: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Numbers of the columns with a kurtosis far above that of the normal distribution."""
    away = X - w @ X
    away = away / np.maximum(np.abs(away).max(axis=0), np.finfo(np.float64).tiny)  # powers do not overflow
    second, fourth = w @ away**2, w @ away**4
    return np.flatnonzero(fourth > (3 + _TAILS) * second**2)


def _curve(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Knots and values of a column; None if it has too few values, or mostly one of them."""
    distinct, place = np.unique(x, return_inverse=True)
    share = np.bincount(place, w)
    if len(distinct) < _LEAST_VALUES or share.max() > _MOST_OF_ONE_VALUE:
        return None
    below = np.cumsum(share) - share / 2  # half of a value is below it
    scores = np.linspace(ndtri(below[0]), ndtri(below[-1]), _KNOTS)
    knots = np.interp(ndtr(scores), below, distinct)
    knots[0], knots[-1] = distinct[0], distinct[-1]  # whatever rounding says
    # Where one value has the share of several scores, these are one knot; the others repeat the last one.
    first = np.concatenate([[True], np.diff(knots) > 0])
    knots, number = knots[first], np.cumsum(first) - 1
    scores = np.bincount(number, scores) / np.bincount(number)
    if len(knots) < _LEAST_VALUES:
        return None
    values = (scores - scores[0]) / (scores[-1] - scores[0])
    missing = (0, _KNOTS - len(knots))
    return np.pad(knots, missing, mode="edge"), np.pad(values, missing, mode="edge")
