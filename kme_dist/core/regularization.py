"""Choice of the regularisation: λ by leave-one-out log loss, in closed form.

A kernel learned on batches suits the full data far more often than the λ learned with it: the best λ decreases with the
number of rows. So λ is re-tuned on all rows.

    search_regularization(evaluate, scale=1 / n, start=lam)      # for any losses, computed anywhere
    leave_one_out_loss(kernel, X, y, n_classes, ...)             # of the exact fit, at one λ
    retune_regularization(kernel, X, y, n_classes, start=lam)    # both, for rows in memory, on the host or a device
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kme_dist.core.embedding import leave_one_out, log_loss
from kme_dist.core.kernels.base import Kernel, row_count, select
from kme_dist.core.objective import Workspace, one_hot
from kme_dist.core.precision import Need, need_of_solve
from kme_dist.core.risk import merge_equal_rows, positive_rows, total_weight
from kme_dist.errors import NumericalError

# The search range of n λ / α²: from interpolating every label to averaging over all rows.
_SHIFTS = 10.0 ** np.arange(-6.0, 2.5, 1.0)
_REFINEMENTS = (0.5, 0.25)  # decades to either side of the best so far
_PATIENCE = 1  # decades uphill before a search direction ends
LOO_ROWS = 2_000  # leave-one-out on more rows than this uses a sample


def retune_regularization(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    *,
    start: float,
    floor: float = 0.0,
    seed: int = 0,
    workspace: Workspace | None = None,
    weights: np.ndarray | None = None,
) -> tuple[float, float, dict[float, float]]:
    """The λ with the lowest leave-one-out log loss, that loss, and the loss of every λ tried (λ in terms of all rows).

    Leave-one-out costs n³ for each λ. Beyond `LOO_ROWS` rows a random sample of that size is evaluated, at the same
    shift nλ: the shift acts as a noise variance, which does not depend on the number of rows. Equal rows are left out
    together, and count as one row in the range that is searched, so that repeated rows are rows of larger weight.
    """
    space, n, total = workspace or Workspace(), row_count(X), total_weight(weights, row_count(X))
    if n > LOO_ROWS:
        rows = np.sort(np.random.default_rng(seed).choice(n, LOO_ROWS, replace=False))
        X, y, weights = select(X, rows), y[rows], None if weights is None else weights[rows]
    given = len(y)
    X, y, weights, *_ = merge_equal_rows(X, y, weights)
    distinct = n * len(y) / given
    variance = kernel.alpha(X) ** 2 or 1.0

    def evaluate(lams: list[float]) -> list[float]:
        return [
            leave_one_out_loss(kernel, X, y, n_classes, lam, total, variance, floor, space, weights) for lam in lams
        ]

    return search_regularization(evaluate, scale=variance / distinct, start=start)


def leave_one_out_loss(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    lam: float,
    n: float,
    variance: float,
    floor: float,
    workspace: Workspace | None = None,
    weights: np.ndarray | None = None,
) -> float:
    """Leave-one-out log loss of a sample of `n` rows, at the shift nλ; infinite where no precision is sufficient.

    `variance` is the largest k(x, x). With weights `n` is their sum over all rows, and the shifts are nλ/w.
    """
    X, y, weights = positive_rows(X, y, weights)
    need = need_of_solve(kernel, X, lam * n, variance, weights)
    for rows in (need.promoted(X), Need("float64").promoted(X)):
        Y = one_hot(y, n_classes, kernel.diag(rows))
        try:
            P, _ = leave_one_out(kernel, rows, Y, lam * n / total_weight(weights, len(y)), workspace, weights)
        except NumericalError:
            continue
        return math.inf if need.missing else float(log_loss(Y, P, floor, weights))
    return math.inf


def search_regularization(
    evaluate: Callable[[list[float]], list[float]], *, scale: float, start: float
) -> tuple[float, float, dict[float, float]]:
    """Minimise a smooth, mostly unimodal function of log λ with few evaluations.

    Searches a decade grid from the value nearest to `start` in both directions while the loss falls, then refines
    around the best point. `evaluate` gets all λ that can be evaluated in parallel.
    """
    tried: dict[float, float] = {}

    def extend(lams: list[float]) -> None:
        wanted = [lam for lam in dict.fromkeys(lams) if lam not in tried]
        if wanted:
            tried.update(zip(wanted, evaluate(wanted), strict=True))

    grid = [float(shift * scale) for shift in _SHIFTS]
    here = min(range(len(grid)), key=lambda i: abs(math.log(grid[i] / start)))
    walkers = [_Walker(direction, here) for direction in (-1, 1)]
    extend([grid[i] for i in range(here - 1, here + 2) if 0 <= i < len(grid)])
    while walkers:
        walkers = [walker for walker in walkers if walker.step(grid, tried)]
        extend([grid[walker.at + walker.direction] for walker in walkers])
    for width in _REFINEMENTS:
        centre = min(tried, key=lambda lam: tried[lam])
        extend([centre * 10.0 ** (sign * width) for sign in (-1, 1)])
    if not math.isfinite(min(tried.values())):
        raise NumericalError(
            "the Gram matrix is not positive definite at any regularization tried; check that all rows are finite"
        )
    lam = _best(tried)
    return lam, tried[lam], tried


class _Walker:
    """Moves in one direction along the grid while the loss falls."""

    def __init__(self, direction: int, at: int) -> None:
        self.direction, self.at, self.best = direction, at, math.inf
        self.patience = _PATIENCE

    def step(self, grid: list[float], tried: dict[float, float]) -> bool:
        """Move to the next point, already evaluated; returns whether the one after it should be evaluated."""
        self.best = min(self.best, tried[grid[self.at]])
        if not 0 <= self.at + self.direction < len(grid):
            return False
        self.at += self.direction
        value = tried[grid[self.at]]
        # Upwards a tie counts as a gain, since the larger λ is preferred; downwards only a gain counts.
        gains = value <= _nearly(self.best) if self.direction > 0 else value < self.best
        self.patience = _PATIENCE if gains else self.patience - 1
        return self.patience > 0 and 0 <= self.at + self.direction < len(grid)


def _best(tried: dict[float, float]) -> float:
    """The largest λ whose loss is minimal up to rounding: among equal losses the best-conditioned system."""
    least = min(tried.values())
    return max(lam for lam, loss in tried.items() if loss <= _nearly(least))


def _nearly(loss: float) -> float:
    return loss + 1e-4 * abs(loss) + 1e-7
