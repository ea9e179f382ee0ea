"""Scaling of features: x -> (x - shift) * factor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kme_dist.data.statistics import Statistics
from kme_dist.errors import ConfigError


@dataclass(frozen=True)
class Scaling:
    """x -> (x - shift) * factor, feature by feature; constant features become 0."""

    shift: np.ndarray
    factor: np.ndarray

    @classmethod
    def learn(cls, X: np.ndarray, kind: str | None) -> Scaling:
        """Learned from rows in memory."""
        return cls.of(Statistics.of(X), kind)

    @classmethod
    def of(cls, found: Statistics, kind: str | None) -> Scaling:
        """From the statistics of rows: "unit" range, "standard" deviation, or none."""
        if kind is None:
            return cls(np.zeros(found.mean.size), np.ones(found.mean.size))
        if kind not in ("unit", "standard"):
            raise ConfigError(f"scaling={kind!r} is unknown; choose 'unit', 'standard' or None")
        shift = found.minimum if kind == "unit" else found.mean
        with np.errstate(divide="ignore", over="ignore"):
            width = found.maximum - found.minimum if kind == "unit" else np.sqrt(found.variance)
            factor = np.where(width > 0, 1.0 / width, 0.0)
        return cls(shift, np.where(np.isfinite(factor), factor, 0.0))

    def weighted(self, weights: np.ndarray) -> Scaling:
        """This scaling followed by a factor for each column."""
        return replace(self, factor=self.factor * weights)

    def apply(self, X: np.ndarray, dtype: str) -> np.ndarray:
        # C-ordered whatever the order of X: products in another memory order would round differently.
        scaled: np.ndarray = ((X.reshape(len(X), self.shift.size) - self.shift) * self.factor).astype(dtype, order="C")
        return scaled
