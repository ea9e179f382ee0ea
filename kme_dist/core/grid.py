"""The baseline of the paper: one common length scale and λ by k-fold cross-validation over a grid."""

from __future__ import annotations

from typing import Any

import numpy as np

from kme_dist.backend import to_host
from kme_dist.core.embedding import Embedding, exact_solution
from kme_dist.core.kernels.base import Kernel, length_scale_names, select
from kme_dist.errors import ConfigError


def with_length_scale(kernel: Kernel, width: float) -> Kernel:
    names = list(length_scale_names(kernel))
    if not names:
        raise ConfigError(f"{kernel!r} has no length scale to set; objectives 'median' and 'cv' require one")
    return kernel.replace({name: np.full(kernel.parameters[name].shape, width) for name in names})


def cross_validate(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    width: float,
    seed: int,
    weights: np.ndarray | None = None,
) -> tuple[Kernel, float]:
    """k-fold search over one common length scale and λ: the baseline of the paper."""
    from sklearn.model_selection import StratifiedKFold

    counts = np.bincount(y)
    strata = np.where(counts[y] < 2, counts.argmax(), y)  # a class of one row cannot be in every fold
    folds = int(max(2, min(5, np.bincount(strata)[np.unique(strata)].min())))
    splits = list(StratifiedKFold(folds, shuffle=True, random_state=seed % 2**32).split(np.zeros(len(y)), strata))
    grid = [(width * factor, float(lam)) for factor in (0.1, 0.3, 1.0, 3.0) for lam in 10.0 ** np.arange(-6.0, 1.0)]
    scores = []
    for scale, lam in grid:
        trial, hits = with_length_scale(kernel, scale), 0.0
        for train, test in splits:
            rows = select(X, train)
            own = None if weights is None else weights[train]
            V = exact_solution(trial, rows, y[train], n_classes, lam, row_weights=own).weights
            fitted = Embedding(trial, rows, V, lam)
            decided = to_host(fitted.decision(select(X, test))).argmax(axis=1)
            hits += float(((decided == y[test]) * (1 if weights is None else weights[test])).sum())
        scores.append(hits)
    scale, lam = grid[int(np.argmax(scores))]
    return with_length_scale(kernel, scale), lam
