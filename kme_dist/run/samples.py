"""What objective "auto" does on a sample of the rows, on one worker: a start, curves for heavy tails, tuned kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from kme_dist.core.kernels.base import Kernel, length_scale_names
from kme_dist.core.kernels.sparse import deviations_of
from kme_dist.core.risk import positive_rows
from kme_dist.core.tuning import COARSE, START_SHIFT, Tuned, at_median_distance, raise_shift, tune
from kme_dist.data.curves import Curves
from kme_dist.data.rows import RowsRef
from kme_dist.data.statistics import Statistics
from kme_dist.run.fit.exact import shuffled_sample
from kme_dist.run.learners import STEP_TOLERANCE

# Rows on which candidates are compared and the best one is tuned, and how many of them are left out; trials.
COMPARED_ROWS, _TUNED_ROWS = (1_000, 1_000), (2_000, 1_500)
_START_TRIALS, _TUNED_TRIALS = 8, 5
_CURVE_ROWS = 4_000  # for quantiles of features with heavy tails


def curves_of_sample(rows: RowsRef, seed: int, base: str) -> Curves | None:
    """Curves for features with heavy tails, if there are any, of rows in their own units; to unit range, or with `base`
    "standard" to unit deviation, as the other features.

    Not of scaled rows, nor in single precision: scaled by one wrong cell of 1e100, all others are equal.
    """
    own = rows.unscaled()
    plan = own.plan(_CURVE_ROWS, seed)
    X, _, w = positive_rows(*own.batch(plan, 0), own.batch_weights(plan, 0))
    if not isinstance(X, np.ndarray):
        return None
    X = X.reshape(len(X), -1)
    curves = Curves.of(X, w)
    if curves is None or base != "standard":
        return curves
    return curves.weighted(1 / np.sqrt(np.maximum(Statistics.of(curves.apply(X), w).variance, 1e-300)))


def lowers_loss(flat: Tuned, plain: Tuned) -> bool:
    """Whether curves lower the loss of the rows left out, by more than two standard errors.

    Also of squared errors with heavy tails: k rows that have all of the gain are √k standard errors, so it takes more
    than four of them, and a few large errors make the standard error large and curves are left out.
    """
    return flat.lead(plain) > 2


def start_on_sample(rows: RowsRef, kernel: Kernel, spread: bool, floor: float, seed: int) -> Tuned | None:
    """The best common factor of the length scales. With `spread` they start in proportion to the deviation of their
    feature; None if that makes no difference to the kernel."""
    size, evaluated = COMPARED_ROWS
    X, y, w = shuffled_sample(rows, size, seed)
    if spread:
        deviations = deviations_of(X) if getattr(X, "ndim", 0) == 2 else np.empty(0)
        names = [n for n in length_scale_names(kernel) if kernel.parameters[n].shape == deviations.shape]
        if not names or not np.any(deviations > 0):
            return None
        widths = np.where(deviations > 0, deviations, 1.0)
        kernel = kernel.replace({name: kernel.parameters[name] * widths for name in names})
    kernel = at_median_distance(kernel, X, seed)
    shift = START_SHIFT * (kernel.alpha(X) ** 2 or 1.0)
    return tune(
        kernel, X, y, rows.n_classes, shift=shift, steps=COARSE, trials=_START_TRIALS, evaluated=evaluated,
        floor=floor, weights=w, tolerance=STEP_TOLERANCE,
    )  # fmt: skip


def tune_on_sample(
    rows: RowsRef,
    kernel: Kernel,
    shift: float,
    steps: tuple[float, float],
    size: tuple[int, int],
    trials: int,
    floor: float,
    seed: int,
) -> Tuned:
    """The kernel tuned on `size[0]` rows, of which `size[1]` are left out."""
    X, y, w = shuffled_sample(rows, size[0], seed)
    return tune(
        kernel, X, y, rows.n_classes, shift=shift, steps=steps, trials=trials, evaluated=size[1], floor=floor,
        weights=w, tolerance=STEP_TOLERANCE,
    )  # fmt: skip


def settle_on_sample(rows: RowsRef, tuned: Tuned, steps: tuple[float, float], floor: float, seed: int) -> Tuned:
    """Tuned once more on more rows, if there are more; of few rows the largest shift that is about as good. Runs on a
    worker."""
    size, evaluated = COMPARED_ROWS
    if rows.positive > size:
        return tune_on_sample(rows, tuned.kernel, tuned.shift, steps, _TUNED_ROWS, _TUNED_TRIALS, floor, seed)
    X, y, w = shuffled_sample(rows, size, seed)
    sample: dict[str, Any] = {"evaluated": evaluated, "floor": floor, "weights": w, "tolerance": STEP_TOLERANCE}
    return raise_shift(tuned, X, y, rows.n_classes, **sample)
