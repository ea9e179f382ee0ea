"""Measured relevance of features: how much worse rows are predicted when a feature's values are exchanged.

A row i gets the values of another row in one feature (or in a group of features, such as those of one categorical
column), and is predicted by the model fitted without row i, in closed form:

    f_-i(x') = f(x') - a_i(x') e_i,    a(x') = A⁻¹ k(x'),  e_i = V_i / [A⁻¹]_ii,  A = K + nλI

The relevance is the increase of the Brier score of the clip-normalised probabilities. Since no row is predicted with
the help of its own label, features that are only noise get about 0, however short their length scales are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kme_dist.backend import cholesky
from kme_dist.core.embedding import clip_normalise
from kme_dist.core.kernels.base import Kernel
from kme_dist.errors import NumericalError

MOST_ROWS = 1_500
_LEAST_ROWS = 150
_NUMBERS = 120_000  # in the sample: one Gram matrix per feature, so that time grows with the square of this
_PREDICTED = 500  # rows of the sample that are predicted with exchanged values
_PREDICTIONS = 1_500  # per feature: with few rows each one is predicted several times,
_EXCHANGED = 100_000_000  # unless all features of all rows, for every feature, would be more numbers than these
_ROUNDING = 1e-9  # of a difference of Brier scores
_JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)  # of the mean diagonal, if A is singular


def sample_rows(features: int) -> int:
    """How many rows the relevance of this many features is measured on."""
    return max(_LEAST_ROWS, min(MOST_ROWS, _NUMBERS // max(1, features)))


def exchange_relevance(
    kernel: Kernel,
    rows: np.ndarray,
    codes: np.ndarray,
    n_classes: int,
    regularization: float,
    groups: Sequence[Sequence[int]],
    *,
    inputs: Callable[[np.ndarray], np.ndarray],
    floor: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """The increase of the Brier score for every group of features; below 0 by chance only.

    `rows` are raw; `inputs` makes of them what the kernel takes (scaled, or features) in double precision.
    """
    rng, n = np.random.default_rng(seed), len(rows)
    Z, Y = inputs(rows), np.eye(n_classes)[codes]
    inverse = _inverse(np.asarray(kernel.gram(Z), np.float64), n * regularization)
    V = inverse @ Y
    chosen = np.arange(n) if n <= _PREDICTED else np.sort(rng.choice(n, _PREDICTED, replace=False))
    residuals, own, truth = (V / np.diagonal(inverse)[:, None])[chosen], inverse[chosen], Y[chosen]
    before = _brier(truth - residuals, truth, floor)
    found = np.zeros(len(groups))
    once = len(groups) * len(chosen) * rows.shape[1]
    repeats = max(1, min(-(-_PREDICTIONS // len(chosen)), _EXCHANGED // max(1, once)))
    for _ in range(repeats):
        # The same exchange for all groups: a difference between two of them is not one between two draws.
        others = rng.permutation(n)[: len(chosen)]
        for g, group in enumerate(groups):
            exchanged, columns = rows[chosen], list(group)
            if np.array_equal(exchanged[:, columns], rows[others][:, columns]):
                continue  # nothing changes: a constant feature
            exchanged[:, columns] = rows[others][:, columns]
            K = np.asarray(kernel.gram(inputs(exchanged), Z), np.float64)
            f = K @ V - np.einsum("ij,ij->i", K, own)[:, None] * residuals
            found[g] += (_brier(f, truth, floor) - before) / repeats
    return found


def shares(relevance: np.ndarray) -> np.ndarray:
    """Non-negative and of sum one; zeros if nothing is relevant, that is no more than rounding."""
    clipped = np.where(relevance > _ROUNDING, relevance, 0.0)
    total = float(clipped.sum())
    return np.asarray(clipped / total) if total > 0 else clipped


def _inverse(K: np.ndarray, shift: float) -> np.ndarray:
    n, typical = len(K), float(np.mean(np.diagonal(K)))
    for jitter in _JITTERS:
        try:
            return np.asarray(cholesky(K + (shift + jitter * typical) * np.eye(n)).solve(np.eye(n)))
        except NumericalError:
            continue
    raise NumericalError(f"the Gram matrix of {n} sampled rows is singular; raise `regularization`")


def _brier(f: np.ndarray, Y: np.ndarray, floor: float) -> float:
    return float(np.mean(np.sum((Y - np.asarray(clip_normalise(f, floor))) ** 2, axis=1)))
