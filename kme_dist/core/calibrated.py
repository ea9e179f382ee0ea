"""The objective of `objective="auto"`: leave-one-out log loss of calibrated decisions, with its closed-form gradient.

    f₋ᵢ = Y_i - V_i / [A⁻¹]_ii,     p_i ∝ exp(β f₋ᵢ),     q = - mean of w_i log p_i,y_i

The sharpness β is learned together with the kernel and λ, so that a kernel is rated by how well its decisions separate
the classes and not by how near they come to 0 and 1, which a calibration mends afterwards.

Only the last `evaluated` rows of a batch are left out, one at a time; all rows are fitted. With q rows evaluated the
gradient needs q columns of A⁻¹ instead of all of it: n³/3 + n²q operations for the solve, 2n²q for the derivative.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kme_dist.backend import Array, diagonal, like, namespace_of, precision, set_diagonal
from kme_dist.core.kernels.base import Kernel, row_count
from kme_dist.core.objective import Objective, Workspace, gather, solve_batch, with_positive_weights, with_promotion
from kme_dist.core.precision import TOLERANCE, Need, need_of_solve
from kme_dist.core.risk import column, flat, hits, one_hot, per_row_shift, total_weight
from kme_dist.errors import ConfigError

START_SHARPNESS = 6.0
SHARPNESS = "sharpness"  # its name among the parameters


def calibrated_objective(
    kernel: Kernel,
    X: Any,
    y: Any,
    *,
    regularization: float,
    sharpness: float,
    n_classes: int,
    evaluated: int | None = None,
    risk: str = "sum",
    workspace: Workspace | None = None,
    weights: Any = None,
    tolerance: float = TOLERANCE,
) -> Objective:
    """Leave-one-out log loss of softmax(β f₋ᵢ) at the last `evaluated` rows (None: all), times the rows of the batch.

    `risk="mean"` does not multiply. `tolerance` is the relative error of a solve that single precision may have.
    `gradient` has "sharpness" besides the kernel's parameters and "regularization".
    """
    lam, beta, space = float(regularization), float(sharpness), workspace or Workspace()
    if not (0 < lam < math.inf and 0 < beta < math.inf):
        raise ConfigError(f"regularization={regularization!r}, sharpness={sharpness!r}: must be positive numbers")
    if risk not in ("sum", "mean"):
        raise ConfigError(f"risk={risk!r} is unknown; choose 'sum' or 'mean'")
    X, y, w = with_positive_weights(X, y, weights)
    n = total_weight(w, row_count(X))
    q = row_count(X) if evaluated is None else max(1, min(int(evaluated), row_count(X)))
    factor_of_mean = float(row_count(X)) if risk == "sum" else 1.0  # not the weights, of which only ratios matter

    def need() -> Need:
        return need_of_solve(kernel, X, n * lam, weights=w, tolerance=tolerance)

    def compute(X: Any, jitter: float) -> Objective:
        diag = kernel.diag(X)
        shift = per_row_shift(n * lam + jitter, w, diag)
        Y = one_hot(y, n_classes, diag)
        xp = namespace_of(Y)
        solved = solve_batch(kernel, X, diag, Y, shift, space)
        V, half = solved.V, solved.factor.last_columns(q)
        padded = xp.concat([like(np.zeros((row_count(X) - q, q)), Y), half], axis=0)
        B = solved.factor.half_solve(padded, transposed=True)  # the last q columns of A⁻¹
        D = xp.sum(half * half, axis=0)[:, None]
        own, share = Y[-q:, :], _shares(w, q, V)
        left_out = own - V[-q:, :] / D
        loss, p = softmax_loss(own, beta * left_out, share)
        S = beta * share * (p - own)  # derivative by the left-out decisions
        by_beta = xp.sum(S * left_out)
        D_bar = xp.sum(S * V[-q:, :], axis=1)[None, :] / (D * D).T
        C = B @ (S / D)
        A_bar = -2 * ((B * D_bar) @ B.T) + xp.concat([C, V], axis=1) @ xp.concat([V, C], axis=1).T
        own_bar = 0.5 * diagonal(A_bar)
        by_log_lam = n * lam * xp.sum(own_bar * flat(per_row_shift(1.0, w, V)))
        # Each pair of rows once: K is still above the diagonal, the factor is no longer needed.
        set_diagonal(solved.K, diag)
        A_bar = xp.triu(A_bar, k=1)
        set_diagonal(A_bar, own_bar)
        gradients = kernel.pullback(solved.prepared, solved.prepared, solved.K, A_bar)
        scalars = {"loss": loss, "sharpness": by_beta, "hits": hits(own, left_out, _last(w, q))}
        gradient, found = gather(gradients, by_log_lam, scalars, kernel)
        value = factor_of_mean * found["loss"]
        return Objective(
            value=value,
            risk=value,
            complexity=0.0,
            bound=math.nan,
            gradient={name: factor_of_mean * g for name, g in gradient.items()}
            | {SHARPNESS: np.asarray(factor_of_mean * found["sharpness"])},
            accuracy=found["hits"] / total_weight(_last(w, q), q),
            dtype=precision(diag),
        )

    return with_promotion(compute, X, kernel.diag, lam, need, w)


def softmax_loss(Y: Array, scores: Array, share: Any) -> tuple[Array, Array]:
    """Σ_i share_i (-log softmax(scores_i)_{y_i}), and the softmax."""
    xp = namespace_of(scores)
    shifted = scores - xp.max(scores, axis=1, keepdims=True)
    e = xp.exp(shifted)
    total = xp.sum(e, axis=1, keepdims=True)
    loss = xp.sum(share * (xp.log(total) - xp.sum(Y * shifted, axis=1, keepdims=True)))
    return loss, e / total


def _shares(w: np.ndarray | None, q: int, reference: Array) -> Any:
    """Weights of the evaluated rows, which sum to one."""
    return 1.0 / q if w is None else column(w[-q:], reference) / float(np.sum(w[-q:]))


def _last(w: np.ndarray | None, q: int) -> np.ndarray | None:
    return None if w is None else w[-q:]
