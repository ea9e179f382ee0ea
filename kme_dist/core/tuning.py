"""A common factor of the length scales and the shift nλ, by leave-one-out log loss of calibrated decisions.

    tuned = tune(kernel, X, y, n_classes, shift=0.1)
    tuned.kernel, tuned.shift, tuned.loss
    raise_shift(tuned, X, y, n_classes)       # the largest shift that is about as good

Ratios of length scales are learned on batches; the best common factor and the best shift depend on the number of rows,
so they are tuned on more rows than a batch has. Each trial costs one factorisation, with some of the rows left out one
at a time. A sample of the rows is tuned at the same shift: it acts as a noise variance, whatever the number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kme_dist.backend import Array, cholesky, like, precision, set_diagonal, to_host
from kme_dist.core.calibration import calibrated_losses
from kme_dist.core.embedding import left_out
from kme_dist.core.kernels.base import Kernel, length_scale_names, median_length_scale, row_count
from kme_dist.core.objective import Workspace, one_hot
from kme_dist.core.precision import TOLERANCE, Need, need_of_solve
from kme_dist.errors import NumericalError

FINE, COARSE = (0.7, 1.6), (1.0, 2.3)  # first steps in log factor and log shift
_HALVINGS = 3
_SHIFTS = (1e-7, 300.0)
_GAIN = 1e-5
_RAISE = 1.1  # steps in log shift of `raise_shift`
START_FACTOR, START_SHIFT = 0.6, 0.1  # times the median distance; times k(x, x)


@dataclass(frozen=True)
class Tuned:
    """The best trial; `losses` and weights of its evaluated rows, to compare kernels row by row."""

    kernel: Kernel
    shift: float
    loss: float
    losses: np.ndarray = field(repr=False)
    trials: int
    weights: np.ndarray | None = field(default=None, repr=False)

    def gain(self, other: Tuned) -> tuple[float, float]:
        """By how much the loss of `other` is lower on the same rows, and the standard error of that."""
        gain = self.losses - other.losses
        return float(np.average(gain, weights=self.weights)), _standard_error(gain, self.weights)

    def lead(self, other: Tuned) -> float:
        """By how many standard errors this is better than `other`, row by row; 0 if they are equal."""
        gain, error = other.gain(self)
        return gain / error if error > 0 else 0.0


def tune(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    *,
    shift: float,
    steps: tuple[float, float] = FINE,
    trials: int = 14,
    evaluated: int | None = None,
    floor: float = 0.0,
    weights: np.ndarray | None = None,
    workspace: Workspace | None = None,
    tolerance: float = TOLERANCE,
) -> Tuned:
    """Search for the factor of the length scales and the shift with the lowest loss, from the given ones.

    Moves along each axis while the loss falls, then halves the steps. `evaluated` rows, the last ones, are left out;
    None: all. `weights` have the mean 1, so that the shift of row i is shift / w_i. `tolerance` is the relative error
    of a solve that single precision may have.
    """
    names = length_scale_names(kernel)
    grams, tried = _Grams(X, workspace or Workspace()), dict[tuple[float, float], tuple[float, np.ndarray, Kernel]]()
    low, high = (math.log(limit) for limit in _SHIFTS)

    def loss(at: tuple[float, float]) -> float:
        key = (round(at[0], 9), round(at[1], 9))
        if key not in tried:
            trial = kernel.replace({name: kernel.parameters[name] * math.exp(at[0]) for name in names})
            losses = _losses(trial, grams, y, n_classes, math.exp(at[1]), evaluated, floor, weights, tolerance)
            mean = math.inf if losses is None else float(np.average(losses, weights=_last(weights, len(losses))))
            tried[key] = mean, np.empty(0) if losses is None else losses, trial
        return tried[key][0]

    here = (0.0, min(max(math.log(shift), low), high))
    for halving in range(_HALVINGS):
        width, moved = [step / 2**halving for step in steps], True
        while moved and len(tried) < trials:
            moved = False
            for move in _moves(width, bool(names)):
                there = (here[0] + move[0], here[1] + move[1])
                if low <= there[1] <= high and loss(there) < loss(here) - _GAIN:
                    here, moved = there, True
                    break
    if not math.isfinite(loss(here)):
        here = min(tried, key=lambda at: tried[at][0])
    found = tried[round(here[0], 9), round(here[1], 9)]
    if not math.isfinite(found[0]):
        raise NumericalError(
            f"the Gram matrix of {row_count(X)} rows is not positive definite at any shift tried; check that all rows "
            "are finite"
        )
    return Tuned(found[2], math.exp(here[1]), found[0], found[1], len(tried), _last(weights, len(found[1])))


def raise_shift(
    tuned: Tuned,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    *,
    slack: float = 0.0,
    evaluated: int | None = None,
    floor: float = 0.0,
    weights: np.ndarray | None = None,
    tolerance: float = TOLERANCE,
) -> Tuned:
    """The largest shift that is not worse by more than chance: the one-standard-error rule, for a kernel tuned on the
    same rows.

    The shift grows while the loss is above that of `tuned` by less than one standard error of the difference, row by
    row, or by less than `slack` standard errors of the loss itself. The least of several losses is partly luck, and a
    larger shift is the smoother and better conditioned of two that cannot be told apart. It does not grow beyond the
    largest k(x, x), a variance of the noise as large as that of the signal.
    """
    grams, best, size = _Grams(X, Workspace()), tuned, slack * _standard_error(tuned.losses, tuned.weights)
    most = tuned.kernel.alpha(X) ** 2
    while (shift := best.shift * math.exp(_RAISE)) <= most:
        losses = _losses(tuned.kernel, grams, y, n_classes, shift, evaluated, floor, weights, tolerance)
        if losses is None:
            break
        loss = float(np.average(losses, weights=tuned.weights))
        tried = replace(best, shift=shift, loss=loss, losses=losses, trials=best.trials + 1)
        gain, error = tuned.gain(tried)
        if -gain > max(error, size):
            break
        best = tried
    return best


def _standard_error(values: np.ndarray, weights: np.ndarray | None) -> float:
    """Of the (weighted) mean."""
    share = np.full(len(values), 1 / len(values)) if weights is None else weights / weights.sum()
    return math.sqrt(float(np.sum((share * (values - np.sum(share * values))) ** 2)))


def _moves(width: list[float], scales: bool) -> list[tuple[float, float]]:
    along = [(0.0, width[1]), (0.0, -width[1])]
    return [*along, (width[0], 0.0), (-width[0], 0.0)] if scales else along


def _last(weights: np.ndarray | None, count: int) -> np.ndarray | None:
    return None if weights is None else weights[-count:]


class _Grams:
    """The Gram matrix of the last kernel is kept: a trial of another shift copies it."""

    def __init__(self, X: Any, workspace: Workspace) -> None:
        self.X = X
        self._space, self._kept = workspace, Workspace()
        self._of: tuple[Kernel, str] | None = None

    def matrix(self, kernel: Kernel, rows: Any, diag: Array) -> Array:
        """K of the rows of X in their precision, to be overwritten."""
        n, wanted = row_count(rows), (kernel, precision(diag))
        kept = self._kept.square(n, diag)
        if self._of is None or self._of[1] != wanted[1] or self._of[0] != kernel:
            kernel.gram(rows, out=kept)
            self._of = wanted
        K = self._space.square(n, diag)
        K[...] = kept
        return K


def _losses(
    kernel: Kernel,
    grams: _Grams,
    y: np.ndarray,
    n_classes: int,
    shift: float,
    evaluated: int | None,
    floor: float,
    weights: np.ndarray | None,
    tolerance: float,
) -> np.ndarray | None:
    """-log p of the evaluated rows, each left out, calibrated to all of them; None if no precision is sufficient."""
    X, n = grams.X, row_count(grams.X)
    q = n if evaluated is None else min(evaluated, n)
    need = need_of_solve(kernel, X, shift, weights=weights, tolerance=tolerance)
    if need.missing:
        return None
    for rows in (need.promoted(X), Need("float64").promoted(X)):
        diag = kernel.diag(rows)
        Y = one_hot(y, n_classes, diag)
        K = grams.matrix(kernel, rows, diag)
        set_diagonal(K, diag + (shift if weights is None else like(shift / weights, diag)))
        try:
            factor = cholesky(K)
            P = to_host(left_out(factor, factor.solve(Y), Y, q)).astype(np.float64)
        except NumericalError:
            continue
        if not np.isfinite(P).all():
            continue
        return calibrated_losses(P, y[-q:], floor, _last(weights, q))
    return None


def at_median_distance(kernel: Kernel, X: Any, seed: int, factor: float = START_FACTOR) -> Kernel:
    """The kernel with the geometric mean of its length scales at `factor` times the median distance between rows."""
    names = length_scale_names(kernel)
    if not names or getattr(X, "ndim", 0) != 2:
        return kernel
    logs = np.concatenate([np.log(kernel.parameters[name]).ravel() for name in names])
    change = factor * median_length_scale(to_host(X), seed) / math.exp(float(np.mean(logs)))
    return kernel.replace({name: kernel.parameters[name] * change for name in names})
