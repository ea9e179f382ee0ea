"""The parts of every objective: one-hot labels, the clipped loss, the complexity term, and how they are combined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, like, namespace_of, precision, to_host
from kme_dist.core.weights import column
from kme_dist.errors import ConfigError, DataError

COMPLEXITY_WEIGHT = 4 * math.e
LOSS_FLOOR = 1e-15


def one_hot(y: Any, n_classes: int, reference: Array) -> Array:
    """Labels 0..m-1 as an n x m matrix, on the device and in the precision of `reference`."""
    if not isinstance(n_classes, int | np.integer) or n_classes < 1:
        raise ConfigError(f"n_classes={n_classes!r}: must be an integer >= 1")
    labels = to_host(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"labels must be integers 0..{n_classes - 1}, got {labels.dtype} of shape {labels.shape}")
    if labels.size and (labels.min() < 0 or labels.max() >= n_classes):
        raise DataError(f"labels must be in 0..{n_classes - 1}, got {labels.min()}..{labels.max()}")
    return like(labels[:, None] == np.arange(n_classes)[None, :], reference)


def clipped_loss(Y: Array, P: Array, floor: float, weights: np.ndarray | None = None) -> tuple[Array, Array]:
    """Σ_i w_i L_i with L_i = -log clip(P_i,y_i, floor, 1), and its derivative S by P.   [HNR, equation 7]"""
    xp = namespace_of(P)
    p = xp.sum(Y * P, axis=1, keepdims=True)
    inside = (p > floor) & (p < 1)
    safe = xp.where(inside, p, p * 0 + 1)
    # below the floor the loss is -log(floor), above one it is 0; `safe` = 1 covers the latter
    loss = xp.where(p > floor, -xp.log(safe), p * 0 - math.log(floor))
    S = xp.where(inside, -1 / safe, p * 0) * Y
    if weights is None:
        return xp.sum(loss), S
    w = column(weights, P)
    return xp.sum(loss * w), S * w


def hits(Y: Array, P: Array, weights: np.ndarray | None = None) -> Array:
    """The number (or weight) of the rows whose true class has the largest probability."""
    xp = namespace_of(P)
    best = xp.max(P, axis=1, keepdims=True)
    return xp.sum(astype(xp.sum(Y * P, axis=1, keepdims=True) >= best, precision(P)) * column(weights, P))


@dataclass(frozen=True)
class Terms:
    """How the parts of the objective are combined."""

    risk: str
    tau: float
    floor: float

    def __post_init__(self) -> None:
        if self.risk not in ("sum", "mean"):
            raise ConfigError(f"risk={self.risk!r} is unknown; choose 'sum' or 'mean'")
        if not self.tau >= 0:
            raise ConfigError(f"complexity_weight={self.tau!r}: must be a number >= 0")
        if not 0 < self.floor < 1:
            raise ConfigError(f"loss_floor={self.floor!r}: must be a number between 0 and 1")

    def per_row(self, n: float) -> float:
        return 1.0 if self.risk == "sum" else 1.0 / n


def _number(name: str, value: Any) -> float:
    """A plain float: a NumPy scalar of double precision would turn single-precision arrays into double ones."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r}: must be a number") from None


def terms_of(risk: str, complexity_weight: Any, loss_floor: Any, regularization: Any) -> tuple[Terms, float]:
    """How the parts of an objective are combined, and λ, checked."""
    terms = Terms(risk, _number("complexity_weight", complexity_weight), _number("loss_floor", loss_floor))
    lam = _number("regularization", regularization)
    if not 0 < lam < math.inf:
        raise ConfigError(f"regularization={regularization!r}: must be a positive number")
    return terms, lam


def ratio(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, 0 where the denominator is not positive."""
    xp = namespace_of(denominator)
    positive = denominator > 0
    return xp.where(positive, numerator / xp.where(positive, denominator, denominator * 0 + 1), denominator * 0)


def complexity_term(terms: Terms, alpha: Array, t: Array) -> tuple[Array, Array, Array]:
    """r = α sqrt(t), c = τ α / (2 sqrt t), and the direct derivative dq/dα = τ sqrt(t); all 0 where t vanishes."""
    xp = namespace_of(t)
    root = xp.sqrt(xp.where(t > 0, t, t * 0))
    return alpha * root, ratio(terms.tau * alpha, 2 * root), terms.tau * root
