"""Automated spectral kernel learning: loss, penalties and gradients of f(x) = Wᵀ φ_Ω(x), and the proximal step.

    q(W, Ω) = (1/n) Σ_i loss(Wᵀφ(x_i), y_i) + λ₁ R(W) + λ₂ (1/n) |φ(X)|²_F

R is the trace norm |W|_* for ASKL, handled by singular value thresholding after each gradient step (`shrink`), and
|W|²_F for the four variants it is compared with, where λ₂ is 0.   [ASKL, algorithm 1]

    hinge           max(0, 1 + max_{j≠y} f_j - f_y)       multiclass margin, as in the paper
    cross_entropy   log Σ_j exp f_j - f_y                 gives probabilities
    squared         |f - y|²                              regression (as in the paper), or one-hot classes

ASKL: Li, Liu, Wang, "Automated Spectral Kernel Learning".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, like, namespace_of, precision, to_host
from kme_dist.core.objective import Objective, one_hot
from kme_dist.core.risk import column, total_weight
from kme_dist.errors import ConfigError

LOSSES = ("hinge", "cross_entropy", "squared")
# In the 2-norm of the scores: the slope is e_j - e_y for the hinge and p - e_y for cross entropy, p on the simplex.
LIPSCHITZ = {"hinge": math.sqrt(2), "cross_entropy": math.sqrt(2)}


@dataclass(frozen=True)
class Variant:
    """What is learned and what is penalised.   [ASKL, table 1]"""

    stationary: bool
    learned: bool
    trace_norm: bool


VARIANTS = {
    "sk": Variant(stationary=True, learned=False, trace_norm=False),
    "nsk": Variant(stationary=False, learned=False, trace_norm=False),
    "skl": Variant(stationary=True, learned=True, trace_norm=False),
    "nskl": Variant(stationary=False, learned=True, trace_norm=False),
    "askl": Variant(stationary=False, learned=True, trace_norm=True),
}


def losses(kind: str, F: Array, T: Array) -> tuple[Array, Array]:
    """The loss of each row of scores F against targets T (one-hot, or numbers), and its derivative by F."""
    xp = namespace_of(F)
    if kind == "squared":
        return xp.sum((F - T) ** 2, axis=1), 2 * (F - T)
    own = xp.sum(F * T, axis=1, keepdims=True)
    if kind == "cross_entropy":
        shifted = F - xp.max(F, axis=1, keepdims=True)
        E = xp.exp(shifted)
        total = xp.sum(E, axis=1, keepdims=True)
        return xp.log(total[:, 0]) - xp.sum(shifted * T, axis=1), E / total - T
    if kind != "hinge":
        raise ConfigError(f"loss={kind!r} is unknown; choose one of {', '.join(LOSSES)}")
    others = F + 1 - T * (1 + 1e9)  # excludes the true class
    best = xp.max(others, axis=1, keepdims=True)
    loss = best - own
    wrong = loss > 0
    rival = astype((others == best) & wrong, precision(F))
    rival = rival / xp.where(wrong, xp.sum(rival, axis=1, keepdims=True), loss * 0 + 1)  # ties share the slope
    return xp.where(wrong, loss, loss * 0)[:, 0], rival - xp.where(wrong, loss * 0 + 1, loss * 0) * T


def lipschitz_constant(kind: str, slope: Array) -> float:
    """L of |loss(f, y) - loss(f', y)| <= L |f - f'|_2.

    The squared loss has none; instead the largest slope 2 |f - y| among these rows is returned.
    """
    if kind in LIPSCHITZ:
        return LIPSCHITZ[kind]
    xp = namespace_of(slope)
    return math.sqrt(float(to_host(xp.max(xp.sum(slope * slope, axis=1)))))


def spectral_objective(
    features: Any,
    W: np.ndarray,
    X: Array,
    y: Any,
    *,
    loss: str,
    n_classes: int | None,
    ridge: float = 0.0,
    feature_penalty: float = 0.0,
    learn_features: bool = True,
    row_weights: np.ndarray | None = None,
) -> Objective:
    """The smooth part of the objective at a batch; gradients by "W" and "features.NAME".

    `ridge` multiplies |W|²_F, `feature_penalty` the mean of |φ(x)|². `n_classes` None means regression.
    `complexity` is |W|_*; for `bound` see `generalisation_bound`. With weights of rows all means are weighted.
    """
    Z, pull = features.linearise(X) if learn_features else (features.forward(X), None)
    xp, n = namespace_of(Z), total_weight(row_weights, Z.shape[0])
    own = column(row_weights, Z)
    weights = like(W, Z)
    T = one_hot(y, n_classes, Z) if n_classes is not None else like(np.asarray(y).reshape(Z.shape[0], -1), Z)
    F = Z @ weights
    each, slope = losses(loss, F, T)
    lipschitz = lipschitz_constant(loss, slope)
    slope = slope / n if row_weights is None else slope * (own / n)
    W_bar = Z.T @ slope + 2 * ridge * weights
    hit = astype(xp.sum(F * T, axis=1) >= xp.max(F, axis=1), precision(F))
    if row_weights is None:
        sums = xp.mean(each), xp.sum(Z * Z), xp.sum(hit)
    else:
        sums = xp.sum(each * own[:, 0]) / n, xp.sum(Z * Z * own), xp.sum(hit * own[:, 0])
    mean, size, right = (float(to_host(v)) for v in sums)
    trace = nuclear_norm(W)
    gradient: dict[str, np.ndarray] = {"W": np.asarray(to_host(W_bar), np.float64)}
    if pull is not None:
        Z_bar = slope @ weights.T + (2 * feature_penalty / n) * (Z if row_weights is None else Z * own)
        gradient.update({f"features.{name}": to_host(value) for name, value in pull(Z_bar)[0].items()})
    value = mean + ridge * float(np.sum(np.square(W))) + feature_penalty * size / n
    return Objective(
        value=value,
        risk=mean,
        complexity=trace,
        bound=generalisation_bound(mean, trace, size, n, W.shape[1], lipschitz),
        gradient=gradient,
        accuracy=right / n if n_classes is not None else math.nan,
        dtype=precision(Z),
    )


def shrink(W: np.ndarray, threshold: float) -> np.ndarray:
    """argmin_V ½|V - W|²_F + threshold |V|_*: singular values reduced by `threshold`, not below 0.

    Uses the eigenvectors of the small matrix WᵀW, one for each class, instead of a decomposition of W.
    """
    if threshold <= 0:
        return W
    values, Q = np.linalg.eigh(W.T @ W)
    sigma = np.sqrt(np.maximum(values, 0.0))
    kept = np.where(sigma > threshold, 1 - threshold / np.where(sigma > threshold, sigma, 1.0), 0.0)
    return np.asarray(W @ ((Q * kept) @ Q.T))


def nuclear_norm(W: np.ndarray) -> float:
    """|W|_*, the sum of the singular values."""
    return float(np.sum(np.sqrt(np.maximum(np.linalg.eigvalsh(W.T @ W), 0.0))))


def generalisation_bound(
    mean_risk: float,
    trace_norm: float,
    squares: float,
    n: float,
    outputs: int,
    lipschitz: float,
    confidence: float = 0.95,
) -> float:
    """mean risk + 4√2 L R + 3 sqrt(log(2/δ)/2n), R = |W|_* sqrt(K Σ_i |φ(x_i)|²) / n.   [ASKL, (10) and (11)]

    Bound (10) has 4√2 L R + O(sqrt(log(1/δ)/n)) for the excess of the risk over that of the best W of the same trace
    norm, L the Lipschitz constant of the loss (`lipschitz_constant`) and R, by (11), a bound on the Rademacher
    complexity of all Wᵀφ with that trace norm and K outputs: the supremum is |W|_* times the spectral norm of
    Σ_i φ(x_i) ε_iᵀ, which its Frobenius norm bounds. The vector contraction inequality adds a factor √2 L for the loss,
    symmetrisation a factor 2, and the excess another 2. The last term is the O(·) term for losses within [0, 1]. Here φ
    and |W|_* come from the same rows, and the losses are not bounded by one: a diagnostic, not a guarantee.
    """
    complexity = trace_norm * math.sqrt(outputs * max(squares, 0.0)) / max(n, 1)
    tail = 3 * math.sqrt(math.log(2 / (1 - confidence)) / (2 * max(n, 1)))
    return mean_risk + 4 * math.sqrt(2) * lipschitz * complexity + tail
