"""The objective that regression learns its kernel by: leave-one-out squared error, with its closed-form gradient.

    e_i = V_i / [A⁻¹]_ii,   V = A⁻¹ Y,   A = K + Wλ diag(1/w)         the residual of row i under the fit without it
    q = ½ Σ_k log (mean of w_i e_ik²) / outputs                      times the rows of the batch

The logarithm makes q the negative log likelihood of the residuals, each output with the noise that explains them best:
it has no unit, and it grows with the number of rows as against a prior on the length scales.

Only the last `evaluated` rows of a batch are left out, one at a time; all rows are fitted (see `core.calibrated`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from kme_dist.backend import Factor, cholesky, is_sparse, like, namespace_of, precision, set_diagonal, to_host
from kme_dist.core.embedding import REFINED_ROWS, refined_solution
from kme_dist.core.kernels.base import Kernel, length_scale_names, row_count, select
from kme_dist.core.objective import (
    Objective,
    Workspace,
    gather,
    pair_pullback,
    solve_batch,
    with_positive_weights,
    with_promotion,
)
from kme_dist.core.precision import TOLERANCE, Need, need_of_solve, refines
from kme_dist.core.risk import column, flat, merge_equal_rows, per_row_shift, shared_by_copies, total_weight
from kme_dist.core.tuning import Tuned
from kme_dist.errors import ConfigError, NumericalError

_LEAST = 1e-12  # of a mean square, in units of the targets: residuals of targets that are met exactly


def squared_objective(
    kernel: Kernel,
    X: Any,
    Y: Any,
    *,
    regularization: float,
    evaluated: int | None = None,
    workspace: Workspace | None = None,
    weights: Any = None,
    tolerance: float = TOLERANCE,
) -> Objective:
    """½ n log of the mean squared leave-one-out error of the last `evaluated` rows (None: all), averaged over outputs.

    `Y` is (n, outputs), centred. `risk` of the result is the mean squared error itself; `tolerance` is the relative
    error of a solve that single precision may have.
    """
    lam, space = float(regularization), workspace or Workspace()
    if not 0 < lam < math.inf:
        raise ConfigError(f"regularization={regularization!r}: must be a positive number")
    X, targets, w = with_positive_weights(X, np.asarray(Y), weights)
    n, rows = total_weight(w, row_count(X)), row_count(X)
    q = rows if evaluated is None else max(1, min(int(evaluated), rows))

    def need() -> Need:
        return need_of_solve(kernel, X, n * lam, weights=w, tolerance=tolerance)

    def compute(X: Any, jitter: float) -> Objective:
        diag = kernel.diag(X)
        shift = per_row_shift(n * lam + jitter, w, diag)
        xp = namespace_of(diag)
        solved = solve_batch(kernel, X, diag, like(targets, diag), shift, space)
        V, half = solved.V, solved.factor.last_columns(q)
        padded = xp.concat([like(np.zeros((rows - q, q)), V), half], axis=0)
        B = solved.factor.half_solve(padded, transposed=True)  # the last q columns of A⁻¹
        D = xp.sum(half * half, axis=0)[:, None]
        e = V[-q:, :] / D
        share = 1.0 / q if w is None else column(w[-q:], V) / float(np.sum(w[-q:]))
        squares = xp.sum(share * e * e, axis=0) + _LEAST
        outputs = V.shape[1]
        E_bar = share * e / squares / outputs  # derivative of ½ mean log squares by e
        D_bar = -xp.sum(E_bar * e / D, axis=1)[None, :]
        C = B @ (E_bar / D)
        # dV = -A⁻¹ dA V and d[A⁻¹]_ii = -b_iᵀ dA b_i: twice the symmetric derivative by A is left rightᵀ.
        left, right = xp.concat([-2 * D_bar * B, -C, -V], axis=1), xp.concat([B, V, C], axis=1)
        own_bar = 0.5 * xp.sum(left * right, axis=1)
        by_log_lam = n * lam * xp.sum(own_bar * flat(per_row_shift(1.0, w, V)))
        gradients = pair_pullback(kernel, solved, left, right)
        scalars = {"loss": 0.5 * xp.mean(xp.log(squares)), "squares": xp.mean(squares)}
        gradient, found = gather(gradients, by_log_lam, scalars, kernel)
        return Objective(
            value=rows * found["loss"],
            risk=found["squares"],
            complexity=0.0,
            bound=math.nan,
            gradient={name: rows * g for name, g in gradient.items()},
            accuracy=math.nan,
            dtype=precision(diag),
        )

    return with_promotion(compute, X, kernel.diag, lam, need, w)


# --- a common factor of the length scales, and the shift ---------------------------------------------------------

_FACTORS, _SHIFTS = (-2.5, 2.5), (math.log(1e-7), math.log(300.0))  # logarithms: of the factor, of nλ
_FIRST_STEPS = (0.3, 1.2)


def tune_squared(
    kernel: Kernel,
    X: Any,
    Y: np.ndarray,
    *,
    shift: float,
    trials: int,
    evaluated: int,
    weights: np.ndarray | None = None,
    steps: tuple[float, float] = _FIRST_STEPS,
    tolerance: float = TOLERANCE,
) -> Tuned:
    """The factor of all length scales and the shift nλ with the least leave-one-out error of the last rows.

    Losses of the result are squared errors row by row, mean over outputs; `weights` have the mean 1. A trial costs one
    factorisation; the search is that of Nelder and Mead.
    """
    names, space = length_scale_names(kernel), Workspace()
    tried: dict[tuple[float, ...], tuple[float, np.ndarray, Kernel, float]] = {}

    def loss(at: np.ndarray) -> float:
        factor, log_shift = (float(np.clip(v, *limits)) for v, limits in zip(at, (_FACTORS, _SHIFTS), strict=True))
        key = (factor if names else 0.0, log_shift)
        if key not in tried:
            trial = kernel.replace({name: kernel.parameters[name] * math.exp(key[0]) for name in names})
            e = _left_out_errors(trial, X, Y, math.exp(log_shift), evaluated, weights, space, tolerance)
            squares = np.full(1, math.inf) if e is None else np.mean(e**2, axis=1)
            mean = float(
                np.average(squares, weights=None if weights is None or e is None else weights[-len(squares) :])
            )
            tried[key] = (mean, squares, trial, math.exp(log_shift))
        mean = tried[key][0]
        # Differences that are rounding only must not steer the search.
        return round(math.log(mean + _LEAST), 9) if math.isfinite(mean) else 1e3

    start = np.array([0.0, math.log(shift)])
    simplex = start + np.array([[0.0, 0.0], [0.0, steps[1]], [steps[0], 0.0]])
    minimize(
        loss, start, method="Nelder-Mead",
        options={"initial_simplex": simplex, "maxfev": trials, "xatol": 0.02, "fatol": 1e-4},
    )  # fmt: skip
    mean, squares, found, best = min(tried.values(), key=lambda one: round(one[0], 9))
    if not math.isfinite(mean):
        raise NumericalError(
            f"the Gram matrix of {row_count(X)} rows is not positive definite at any shift tried; check that all rows "
            "are finite"
        )
    own = None if weights is None else weights[-len(squares) :]
    return Tuned(found, best, mean, squares, len(tried), own)


def _left_out_errors(
    kernel: Kernel,
    X: Any,
    Y: np.ndarray,
    shift: float,
    count: int,
    weights: np.ndarray | None,
    space: Workspace,
    tolerance: float,
) -> np.ndarray | None:
    """e_i of the last `count` rows; None if no precision is sufficient."""
    count = min(count, row_count(X))
    need = need_of_solve(kernel, X, shift, weights=weights, tolerance=tolerance)
    if need.missing:
        return None
    for rows in (need.promoted(X), Need("float64").promoted(X)):
        diag = kernel.diag(rows)
        with contextlib.suppress(NumericalError):
            solved = solve_batch(kernel, rows, diag, like(Y, diag), per_row_shift(shift, weights, diag), space)
            half = solved.factor.last_columns(count)
            e = to_host(solved.V[-count:, :] / namespace_of(half).sum(half * half, axis=0)[:, None]).astype(np.float64)
            if np.isfinite(e).all():
                return np.asarray(e)
    return None


class Distinct(NamedTuple):
    """Rows as leave-one-out leaves them out, see `merge_equal_rows`."""

    X: Any
    Y: np.ndarray
    weights: np.ndarray | None
    place: np.ndarray | None
    first: np.ndarray | None


def distinct_rows(X: Any, Y: np.ndarray, weights: np.ndarray | None) -> Distinct:
    """Rows equal in X and Y as one, with the sum of their weights."""
    codes = np.unique(Y, axis=0, return_inverse=True)[1].reshape(-1)
    merged = merge_equal_rows(X, codes, weights)
    return Distinct(merged.X, Y if merged.first is None else Y[merged.first], *merged[2:])


def in_order(X: Any, Y: np.ndarray) -> np.ndarray:
    """Positions of rows sorted by their values, so that results do not depend on the order they come in."""
    if getattr(X, "ndim", 0) != 2:
        return np.arange(len(Y))
    if is_sparse(X):
        return np.lexsort((*Y.T[::-1], _ranks_of_sparse(X)))
    return np.lexsort((*Y.T[::-1], *to_host(X).T[::-1]))


def _ranks_of_sparse(X: Any) -> np.ndarray:
    """The rank of every row in the order of dense rows, equal ones alike, without making any of them dense."""

    def compare(i: int, j: int) -> int:
        a, b = (dict(zip(X.indices[s].tolist(), X.data[s].tolist(), strict=True)) for s in (spans[i], spans[j]))
        first = min((c for c in a.keys() | b.keys() if a.get(c, 0.0) != b.get(c, 0.0)), default=None)
        return 0 if first is None else 1 if a.get(first, 0.0) > b.get(first, 0.0) else -1

    spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(X.indptr)]
    order = sorted(range(len(spans)), key=functools.cmp_to_key(compare))
    ranks = np.zeros(len(order), np.int64)
    for before, after in itertools.pairwise(order):
        ranks[after] = ranks[before] + (compare(before, after) != 0)
    return ranks


# --- the exact fit ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SolvedRows:
    """V = A⁻¹ Y of all rows, and columns of A⁻¹ for rows that are left out, with their residuals."""

    weights: np.ndarray  # (n, outputs)
    columns: np.ndarray  # (n, left out)
    residuals: np.ndarray  # (left out, outputs)
    chosen: np.ndarray  # which rows are left out
    dtype: str  # of the factorisation
    ones: np.ndarray  # A⁻¹ 1: weights of targets that are all 1
    ones_left: np.ndarray  # what they predict at the rows left out


def solve_rows(
    kernel: Kernel, X: Any, Y: np.ndarray, shift: float, weights: np.ndarray | None, leave_out: int, seed: int
) -> SolvedRows:
    """The exact solution with shift nλ (divided by weights of mean 1), and random rows left out one at a time.

    With weights a row is drawn in proportion to its weight. Equal rows are fitted as one and have equal shares of V.
    """
    given, (X, Y, w, place, first) = weights, distinct_rows(X, Y, weights)
    n, rng = row_count(X), np.random.default_rng([seed, 6])
    count = min(leave_out, n)
    drawn = rng.choice(n, count, replace=False, p=None if w is None or count == n else w / w.sum())
    rest = np.setdiff1d(np.arange(n), drawn)
    order = np.concatenate([rest, np.sort(drawn)])  # those that are left out come last, where it costs least
    back = np.empty(n, np.int64)
    back[order] = np.arange(n)
    own = None if w is None else w[order]
    sides = np.concatenate([Y[order], np.ones((n, 1))], axis=1)
    for factor, V in _factorised(kernel, select(X, order), sides, shift, own):
        half = factor.last_columns(count)
        padded = np.concatenate([np.zeros((n - count, count), half.dtype), half])
        B = np.asarray(factor.half_solve(padded, transposed=True))
        D = np.sum(half.astype(np.float64) ** 2, axis=0)
        if np.isfinite(B).all() and (D > 0).all():
            residuals, chosen = V[-count:] / D[:, None], order[-count:]
            V, B = V[back], B[back]
            if place is not None and first is not None and w is not None:
                V, B = (shared_by_copies(matrix, w, place, given) for matrix in (V, B))
                chosen = first[chosen]
            return SolvedRows(V[:, :-1], B, residuals[:, :-1], chosen, str(half.dtype), V[:, -1], 1 - residuals[:, -1])
    raise NumericalError(
        f"the Gram matrix of all {n} rows is singular in float64 at a shift of {shift:.1e}; raise `regularization`",
        rows=n, regularization=shift / n, dtype="float64",
    )  # fmt: skip


def _factorised(
    kernel: Kernel, X: Any, Y: np.ndarray, shift: float, w: np.ndarray | None
) -> Iterator[tuple[Factor, np.ndarray]]:
    """Factor of A and V = A⁻¹ Y in the precision that the solve needs, then in double, then with growing jitter."""
    n, space = row_count(X), Workspace()
    need = need_of_solve(kernel, X, shift, weights=w)
    single = isinstance(X, np.ndarray) and X.dtype == np.float32
    refined = (
        need.dtype == "float64" and single and w is None and n >= REFINED_ROWS and not need.missing
        and refines(n, kernel.alpha(X) ** 2, need.norm, shift)
    )  # fmt: skip
    wide = Need("float64").promoted(X)
    scale = float(np.mean(kernel.diag(X), dtype=np.float64)) or 1.0
    attempts = [(X, 0.0, True)] if refined else []
    attempts += [(need.promoted(X), need.missing, False)] if need.dtype == "float32" else []
    attempts += [(wide, need.missing + jitter * scale, False) for jitter in (0.0, 1e-10, 1e-8, 1e-6, 1e-4)]
    for rows, jitter, refine in attempts:
        diag = kernel.diag(rows)
        K = kernel.gram(rows, out=space.square(n, diag))
        set_diagonal(K, diag + flat(per_row_shift(shift + jitter, w, diag)))
        with contextlib.suppress(NumericalError):
            factor = cholesky(K)
            if refine:
                yield factor, refined_solution(factor, K, diag.astype(np.float64) + shift, Y)
            else:
                yield factor, np.asarray(factor.solve(np.asarray(Y, diag.dtype)), np.float64)
