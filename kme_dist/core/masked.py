"""Algorithm 2 with two views: the weights are solved under one, the loss is evaluated under the other.

    out = masked_objective(Z * mask, Z * other, y, regularization=1.0, n_classes=10)
    Z_bar = out.feature_gradient[0] * mask + out.feature_gradient[1] * other
    out = masked_objective(Z[:half], Z[half:], y[:half], y[half:], loss="softmax", ...)      # other rows

With two dropout masks this is how the published convolutional network was learned: in effect a validation inside the
batch, since the loss is never evaluated on the features that W was fitted to. With equal views it is
`feature_objective`. The views may also be of different rows: plain validation.

    G = Z₁ᵀZ₁ + nλI,  W = G⁻¹ Z₁ᵀY₁,  P = Z₂ W,  r = α |W|_F,  U = G⁻¹ (Z₂ᵀS + τ α W / |W|_F),  S = d risk / dP
    dq/dZ₂ = S Wᵀ,    dq/dZ₁ = (Y₁ - Z₁W) Uᵀ - Z₁U Wᵀ,        dq/dλ = -n Σ U W

With weights of rows G and Z₁ᵀY₁ have diag(w₁) in the middle, dq/dZ₁ has it in front, S has w₂, and n is Σ w₁.

The loss of a row is -log P_y, as published, or with loss="softmax" the cross entropy of softmax(10 P), which still
separates the classes where P_y is already large: networks learn faster with it. It is a way to learn features, not an
estimate of log loss: the probabilities of the embedding are P itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, cholesky, diagonal, like, namespace_of, precision, set_diagonal, to_host
from kme_dist.core.objective import COMPLEXITY_WEIGHT, LOSS_FLOOR, Objective, generalisation_bound, one_hot
from kme_dist.core.precision import need_of_features
from kme_dist.core.risk import checked_weights, column, total_weight
from kme_dist.errors import ConfigError, DataError, NumericalError

LOSSES = ("log", "softmax")
SHARPNESS = 10.0  # P is between 0 and 1, where a softmax is nearly uniform


def masked_objective(
    Z_solve: Array,
    Z_eval: Array,
    y: Any,
    y_eval: Any = None,
    *,
    regularization: float,
    n_classes: int,
    risk: str = "mean",
    complexity_weight: float = COMPLEXITY_WEIGHT,
    loss_floor: float = LOSS_FLOOR,
    alpha: float | None = 1.0,
    clip_above: bool = False,
    loss: str = "log",
    weights: Any = None,
    weights_eval: Any = None,
) -> Objective:
    """q = risk of Z₂W + τ α |W|_F with W solved from Z₁; `feature_gradient` is the pair (dq/dZ₁, dq/dZ₂).

    `y_eval` are the labels of Z₂ where its rows differ from those of Z₁. With `clip_above=False`, as published, the
    loss still falls for probabilities above one; True is the loss of `feature_objective`. `alpha=None` takes
    max_i |z_i| over the rows of Z₁. `weights` are those of the rows of Z₁, `weights_eval` those of Z₂ where its rows
    differ.
    """
    same = y_eval is None
    compared = 0 if same else 1
    if not (Z_solve.shape[0] and Z_eval.shape[0]) or Z_solve.shape[compared:] != Z_eval.shape[compared:]:
        raise DataError(f"the two views do not match: shapes {Z_solve.shape} and {Z_eval.shape}")
    if loss not in LOSSES:
        raise ConfigError(f"loss={loss!r} is unknown; choose one of {', '.join(LOSSES)}")
    if risk not in ("sum", "mean"):
        raise ConfigError(f"risk={risk!r} is unknown; choose 'sum' or 'mean'")
    if not 0 < regularization < math.inf:
        raise ConfigError(f"regularization={regularization!r}: must be a positive number")
    labels = (y, y if same else y_eval)
    w1 = checked_weights(weights, Z_solve.shape[0])
    w2 = w1 if same else checked_weights(weights_eval, Z_eval.shape[0])
    options = (*labels, float(regularization), n_classes, risk, float(complexity_weight), loss_floor, alpha, clip_above,
               loss, w1, w2)  # fmt: skip
    shift = total_weight(w1, Z_solve.shape[0]) * float(regularization)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        need = need_of_features(Z_solve, shift, w1)
        try:
            out = _evaluate(need.promoted(Z_solve), need.promoted(Z_eval), *options)
        except NumericalError:
            if need.dtype == "float64":
                raise
            out = _evaluate(astype(Z_solve, "float64"), astype(Z_eval, "float64"), *options)
    pair = tuple(astype(Z_bar, precision(Z_solve)) for Z_bar in out.feature_gradient)
    return Objective(**{**vars(out), "feature_gradient": pair})


def _evaluate(
    Z1: Array,
    Z2: Array,
    y1: Any,
    y2: Any,
    lam: float,
    n_classes: int,
    risk: str,
    tau: float,
    floor: float,
    alpha: float | None,
    clip_above: bool,
    loss: str,
    w1: np.ndarray | None,
    w2: np.ndarray | None,
) -> Objective:
    xp, n, evaluated = namespace_of(Z1), total_weight(w1, Z1.shape[0]), total_weight(w2, Z2.shape[0])
    own1, own2 = column(w1, Z1), column(w2, Z1)
    Y1, Y2 = (one_hot(y, n_classes, Z1) for y in (y1, y2))
    for Y, rows in ((Y1, Z1.shape[0]), (Y2, Z2.shape[0])):
        if Y.shape[0] != rows:
            raise DataError(f"got {rows} rows but {Y.shape[0]} labels; give one label per row")
    Zw = Z1 if w1 is None else Z1 * own1
    G = Zw.T @ Z1
    G = np.asfortranarray(G) if isinstance(G, np.ndarray) else G
    set_diagonal(G, diagonal(G) + n * lam)
    factor = cholesky(G)
    W = factor.solve(Zw.T @ Y1)
    P = Z2 @ W
    weight = 1.0 if risk == "sum" else 1.0 / evaluated
    losses, S = _softmax(Y2, P) if loss == "softmax" else _log(Y2, P, floor, clip_above)
    losses, S = losses * own2, S * (own2 * weight)
    size = xp.sqrt(xp.sum(W * W))
    squares = xp.sum(Z1 * Z1, axis=1) if w1 is None else xp.sum(Z1 * Z1 * (own1 > 0), axis=1)
    row = int(xp.argmax(squares)) if alpha is None else None
    sup = xp.sqrt(squares[row]) if row is not None else like(alpha, Z1)
    U = factor.solve(Z2.T @ S + tau * sup * W / xp.where(size > 0, size, size * 0 + 1))
    solve_bar = (own1 * (Y1 - Z1 @ W)) @ U.T - (Zw @ U) @ W.T
    if row is not None:
        solve_bar[row, :] = solve_bar[row, :] + tau * size / xp.where(sup > 0, sup, sup * 0 + 1) * Z1[row, :]
    own = xp.sum(Y2 * P, axis=1, keepdims=True)
    hits = xp.sum(astype(own >= xp.max(P, axis=1, keepdims=True), precision(P)) * own2)
    scalars = [xp.sum(losses), sup * size, hits, -n * lam * xp.sum(U * W)]
    total, r, right, by_log_lam = (float(v) for v in to_host(xp.stack([astype(v, "float64") for v in scalars])))
    if not all(math.isfinite(value) for value in (total, r, by_log_lam)):
        raise NumericalError("the objective or its gradient is not finite")
    return Objective(
        value=weight * total + tau * r,
        risk=weight * total,
        complexity=r,
        bound=generalisation_bound(total / evaluated, r, n),
        gradient={"regularization": np.asarray(by_log_lam)},
        accuracy=right / evaluated,
        dtype=precision(Z1),
        feature_gradient=(solve_bar, S @ W.T),
    )


def _log(Y: Array, P: Array, floor: float, clip_above: bool) -> tuple[Array, Array]:
    """-log of the probability of each row's own class, and its slope by P."""
    xp = namespace_of(P)
    own = xp.sum(Y * P, axis=1, keepdims=True)
    inside = (own > floor) & (own < 1) if clip_above else own > floor
    safe = xp.where(inside, own, own * 0 + 1)
    losses = xp.where(own > floor, -xp.log(safe), own * 0 - math.log(floor))
    return losses, xp.where(inside, -1.0 / safe, own * 0) * Y


def _softmax(Y: Array, P: Array) -> tuple[Array, Array]:
    """Cross entropy of softmax(10 P), and its slope by P."""
    xp = namespace_of(P)
    scores = SHARPNESS * (P - xp.max(P, axis=1, keepdims=True))
    total = xp.sum(xp.exp(scores), axis=1, keepdims=True)
    losses = xp.log(total) - xp.sum(Y * scores, axis=1, keepdims=True)
    return losses, SHARPNESS * (xp.exp(scores) / total - Y)
