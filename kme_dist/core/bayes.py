"""Sum rule, chain rule and Bayes' rule on embeddings: linear algebra on the weights of a sample of pairs.

A sample (x_i, y_i) carries a conditional embedding with weights W = (K + nλI)⁻¹, and a distribution of x is
Σ_j α_j k(x̃_j, ·), its prior π. With w = W K(X, X̃) α (Song, Fukumizu and Gretton 2013),

    sum rule      the distribution of y:  Σ_i w_i l(y_i, ·)
    chain rule    the joint distribution:  Σ_i w_i k(x_i, ·) ⊗ l(y_i, ·)
    Bayes' rule   x given y:  C_xy (C_yy² + δI)⁻¹ C_yy l(y, ·),   C_yy = Σ_i w_i l(y_i, ·) ⊗ l(y_i, ·)

(Fukumizu, Song and Gretton 2013; some w_i are negative, so C_yy is squared before it is regularised.) With L = F Fᵀ,
Λ = diag w, M = FᵀΛF and l(Y, y) = F f(y), the posterior is Σ_i v_i k(x_i, ·) with

    v = Λ F (M² + δI)⁻¹ M f(y)  =  Λ L ((Λ L)² + δI)⁻¹ Λ l(Y, y)

where F has n columns, or r if targets are projected on r centres: n r² + r³ work instead of n³.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.core.kernels.base import Kernel, row_count
from kme_dist.core.means import Mean, orthonormal, weighted_features
from kme_dist.errors import DataError


@dataclass(frozen=True)
class JointMean:
    """Σ_i w_i k(x_i, ·) ⊗ l(y_i, ·): the embedding of a joint distribution, on a sample of pairs."""

    first: Mean  # the distribution of x; both have the weights w
    second: Mean

    @property
    def weights(self) -> np.ndarray:
        return np.asarray(self.first.weights)

    def evaluate(self, X: Any, Y: Any) -> np.ndarray:
        """The value at every pair of rows (x, y)."""
        if row_count(X) != row_count(Y):
            raise DataError(f"{row_count(X)} rows of X but {row_count(Y)} of Y; the numbers must be equal")
        by_second = np.asarray(self.second.kernel.gram(self.second.points, Y), dtype=np.float64)
        by_first = np.asarray(self.first.kernel.gram(self.first.points, X), dtype=np.float64)
        return np.asarray(self.weights @ (by_first * by_second))

    def expectation(self, f: Callable[[Any, Any], Any]) -> Any:
        """Σ_i w_i f(x_i, y_i); `f` takes the rows of both and returns a value (or row) for each pair."""
        return self.weights @ np.asarray(f(self.first.points, self.second.points), dtype=np.float64)


@dataclass(frozen=True)
class TargetFeatures:
    """F: coordinates of l(y, ·) along an orthonormal basis of the span of points D; exact if D are all targets."""

    kernel: Kernel
    points: Any
    T: np.ndarray

    @classmethod
    def on(cls, kernel: Kernel, points: Any) -> TargetFeatures:
        return cls(kernel, points, orthonormal(kernel, points))

    def rows(self, Y: Any) -> np.ndarray:
        return np.asarray(weighted_features(self.kernel, Y, self.points, self.T))


def posterior_weights(w: np.ndarray, F: np.ndarray, f: np.ndarray, delta: float) -> np.ndarray:
    """v = ΛF (M² + δI)⁻¹ M f(y) for every row of f, as columns: (sample, observations)."""
    values, Q = np.linalg.eigh(F.T @ (w[:, None] * F))
    inner = Q @ ((values / (values**2 + delta))[:, None] * (Q.T @ f.T))
    return np.asarray(w[:, None] * (F @ inner))


def normalised(weights: np.ndarray, least: float = 1e-6) -> np.ndarray | None:
    """Weights (or columns of weights) that sum to one; None where a sum is below `least`, as far from all data."""
    total = weights.sum(axis=0)
    return weights / total if np.all(total > least) else None
