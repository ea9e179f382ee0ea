"""What the exact solvers share: λ by leave-one-out of the rows, the precision of a solve, the residual."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kme_dist.backend import to_device, to_host
from kme_dist.core.embedding import ExactSolution, exact_solution
from kme_dist.core.kernels.base import Kernel, select
from kme_dist.core.objective import one_hot
from kme_dist.core.precision import Need, decide, gram_norm
from kme_dist.core.regularization import LOO_ROWS, leave_one_out_loss
from kme_dist.core.risk import merge_equal_rows, positive_rows, shared_by_copies, total_weight
from kme_dist.core.tuning import raise_shift, tune
from kme_dist.data.rows import RowsRef
from kme_dist.errors import memory_errors
from kme_dist.run.fit.additive import FitStatistics
from kme_dist.run.fit.panels import relative_residual
from kme_dist.run.fit.problem import LeftOut, Problem, Solved
from kme_dist.run.learners import STEP_TOLERANCE

_SAMPLED = 1_000  # rows used to estimate the size of K
LEFT_OUT_ROWS = 1_000  # to calibrate to; each costs n²
_RAISED_ROWS, _SLACK = 1_500, 0.1  # of a sample, left out to see what a larger λ costs; standard errors it may cost


@dataclass(frozen=True)
class Exact:
    """(K + nλI) V = Y, prepared; each exact solver adds its own `solve`."""

    problem: Problem
    facts: dict[str, Any] = field(default_factory=dict)
    statistics: FitStatistics | None = None

    @property
    def evaluated_rows(self) -> int:
        return min(self.problem.rows.positive, LOO_ROWS) if self.problem.rows.positive > 1 else 0

    @property
    def scale(self) -> float:
        """k(x, x) for each row, where repeated rows are one: the range of λ does not depend on weights."""
        X, y, w = sampled(self.problem.rows, LOO_ROWS, self.problem.seed)
        distinct = len(merge_equal_rows(X, y, w).y) / len(y)
        return self._variance / (self.problem.rows.positive * distinct)

    @functools.cached_property
    def _variance(self) -> float:
        few, _, _ = sampled(self.problem.rows, _SAMPLED, self.problem.seed)
        return self.problem.kernel.alpha(few) ** 2 or 1.0

    def leave_one_out(self, lams: list[float]) -> list[float]:
        return leave_one_out_of_sample(self.problem, lams, self._variance)

    def residual(self, solved: Solved, lam: float) -> float:
        return relative_residual(self.problem, solved.weights.astype(np.float64), lam)

    def training(self, solved: Solved, lam: float) -> tuple[float, float]:
        """Risk at the rows of the fit and |f|², from the weights of all rows: K V = Y - nλV."""
        p = self.problem
        y = np.asarray(p.rows.read(0, p.rows.count)[1])
        V, w = solved.weights.astype(np.float64), p.rows.weights()
        Y = np.asarray(one_hot(y, p.rows.n_classes, V))
        P = Y - p.weight * lam * (V if w is None else V / np.where(w > 0, w, 1.0)[:, None])
        own = np.clip(P[np.arange(len(y)), y], 1e-15, 1.0)
        return float(-np.average(np.log(own), weights=w)), float(np.sum(V * P))

    def sampled_left_out(self, lam: float) -> LeftOut:
        """Decisions of a sample of rows, each left out of that sample at the same shift."""
        p = self.problem
        return p.executor.map(left_out_on_worker, [(p.rows, p.kernel, lam, p.seed)], name="leave-one-out")[0]

    def close(self) -> None:
        """Nothing to remove; only an interrupted fit leaves tiles."""


def leave_one_out_of_sample(problem: Problem, lams: list[float], variance: float) -> list[float]:
    """One task for each λ; rows beyond a few thousand are sampled. `variance` is the largest k(x, x)."""
    p = problem
    calls = [(p.rows, p.kernel, lam, variance, p.floor, p.seed, p.backend) for lam in lams]
    return p.executor.map(leave_one_out_on_worker, calls, name="leave-one-out", gpu=p.backend == "cupy")


def leave_one_out_on_worker(
    rows: RowsRef, kernel: Kernel, lam: float, variance: float, floor: float, seed: int, backend: str = "numpy"
) -> float:
    """Leave-one-out log loss of (a sample of) the rows at one λ; equal rows are left out together."""
    X, y, w, *_ = merge_equal_rows(*sampled(rows, LOO_ROWS, seed))
    with memory_errors(f"leave-one-out with {len(y)} rows", "set `refit_regularization` to false"):
        X = to_device(X, backend)
        return leave_one_out_loss(kernel, X, y, rows.n_classes, lam, rows.weight, variance, floor, weights=w)


def left_out_on_worker(rows: RowsRef, kernel: Kernel, lam: float, seed: int) -> LeftOut:
    X, y, w = sampled(rows, LOO_ROWS, seed)
    own = lam * rows.weight / total_weight(w, len(y))
    return solution_and_left_out(kernel, X, y, w, rows.n_classes, own, seed)[1]


def solution_and_left_out(
    kernel: Kernel, X: Any, y: np.ndarray, w: np.ndarray | None, n_classes: int, lam: float, seed: int
) -> tuple[ExactSolution, LeftOut]:
    """The exact solution (weights in the order of X), and random rows of it left out, one at a time.

    Rows are solved in another order, in which those to be left out come last. Equal rows are left out together.
    """
    given, (X, y, w, index, _) = w, merge_equal_rows(X, y, w)
    order = np.random.default_rng([seed, 6]).permutation(len(y))
    order[:-LEFT_OUT_ROWS] = np.sort(order[:-LEFT_OUT_ROWS])
    few = order[-LEFT_OUT_ROWS:]
    own = None if w is None else w[order]
    found = exact_solution(
        kernel, select(X, order), y[order], n_classes, lam, row_weights=own, leave_out=len(few)
    )  # fmt: skip
    V = to_host(found.weights)
    sorted_V = np.empty_like(V)
    sorted_V[order] = V
    if index is not None and w is not None:  # each copy has its share
        sorted_V = shared_by_copies(sorted_V, w, index, given)
    without = LeftOut(to_host(found.left_out).astype(np.float64), y[few], None if w is None else w[few])
    return replace(found, weights=sorted_V, left_out=None), without


def sampled(rows: RowsRef, size: int, seed: int) -> tuple[Any, Any, np.ndarray | None]:
    """Random rows of positive weight, their labels and weights (without classes, no weights)."""
    X, y = rows.sample(size, seed)
    w = rows.sample_weights(size, seed) if rows.n_classes else None
    return (X, y, w) if w is None or w.all() or not w.any() else positive_rows(X, y, w)


def shuffled_sample(rows: RowsRef, size: int, seed: int) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """Random rows of positive weight in random order, equal ones merged; weights have the mean 1 over all rows."""
    plan = rows.plan(size, seed)
    X, y, w = positive_rows(*rows.batch(plan, 0), rows.batch_weights(plan, 0))
    X, y, w, *_ = merge_equal_rows(X, y, w)
    w = None if w is None else w * (rows.positive / rows.weight)
    order = np.random.default_rng([seed, 3]).permutation(len(y))
    return select(X, order), y[order], None if w is None else w[order]


def raised_regularization(problem: Problem, lam: float) -> float:
    """The largest λ whose leave-one-out loss on a sample of rows is above that of `lam` by less than a tenth of its own
    standard error. Without noise in the labels the loss hardly depends on λ, but the work of an iteration does."""
    call = (problem.rows.with_positive_weight(), problem.kernel, lam, problem.floor, problem.seed)
    return problem.executor.map(raise_on_worker, [call], name="leave-one-out")[0]


def raise_on_worker(rows: RowsRef, kernel: Kernel, lam: float, floor: float, seed: int) -> float:
    X, y, w = shuffled_sample(rows, LOO_ROWS, seed)
    sample: dict[str, Any] = {"evaluated": _RAISED_ROWS, "floor": floor, "weights": w, "tolerance": STEP_TOLERANCE}
    tuned = tune(kernel, X, y, rows.n_classes, shift=lam * rows.positive, trials=0, **sample)
    raised = raise_shift(tuned, X, y, rows.n_classes, slack=_SLACK, **sample)
    return lam * (raised.shift / tuned.shift)


def precision_for(problem: Problem, lam: float) -> tuple[float, Need]:
    """Mean of k(x, x), and what a solve at this λ needs (see `kme_dist.core.precision`)."""
    n, kernel = problem.weight, problem.kernel
    few, _, w = sampled(problem.rows, _SAMPLED, problem.seed)
    diag = kernel.diag(few)
    scale = (float(np.mean(diag, dtype=np.float64)) or 1.0) * (n / problem.rows.count)
    # |K| grows with the number of rows: scaled up from that of the sample.
    share = n / total_weight(w, len(few))
    need = decide(problem.rows.dtype, n, float(np.max(diag)), n * lam, lambda: gram_norm(kernel, few, w) * share)
    return scale, need
