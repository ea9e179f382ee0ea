"""Calibrated probabilities: from decision probabilities f to clip-normalised p̃ to calibrated p.

    temperature   p_c ∝ p̃_c^(1/T)             one number T
    softmax       p_c ∝ p̃_c^(1/T) exp(β f_c)  two numbers; where classes overlap f is a probability by itself (β = 0),
                                               where they are apart only the order of f tells, and how clear it is
    isotonic      p_c ∝ m_c(p̃_c)               a non-decreasing function for each class; then, where two functions
                                               would reverse the order of p̃ in a row, the nearest that keep it

"auto" takes the one with the lowest log loss by cross-validation over the decisions given. Every model computes its
probabilities with `class_probabilities`. No map changes the order of the classes in a row
(it may create ties), so no label depends on calibration, and ties at the top go to the class with the largest f: the
label is the argmax of f and the argmax of the probabilities, in every row.

All are fitted to decisions made without the label: on held-out rows, or in closed form on rows of the fit. A regression
on labels is underconfident with many classes, where clipping leaves a little mass on each: then T is below 1. The floor
under every probability also holds after the map.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression, minimize, minimize_scalar

from kme_dist.core.embedding import clip_normalise
from kme_dist.errors import ConfigError

KINDS = ("none", "temperature", "isotonic", "softmax")
_COMPARED = ("softmax", "temperature", "none", "isotonic")  # by "auto"; the first of equals is kept
_FOLDS = 3
_LEAST_ROWS = 200  # fewer do not tell maps apart
_TINY = 1e-15
_LOG_TEMPERATURES = (-3.0, 3.0)
_POWERS = ((0.0, 5.0), (0.0, 150.0))  # limits of 1/T and β


@dataclass(frozen=True)
class Calibration:
    """A fitted map; `Calibration()` is the identity."""

    kind: str = "none"
    temperature: float = 1.0
    floor: float = 0.0
    sharpness: float = 0.0  # β
    knots: tuple[tuple[np.ndarray, np.ndarray], ...] = field(default=())  # isotonic: (p̃, p) for each class

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"calibration={self.kind!r} is unknown; choose one of {', '.join(KINDS)}")

    @classmethod
    def fit(
        cls, kind: str, f: np.ndarray, codes: np.ndarray, floor: float = 0.0, weights: np.ndarray | None = None
    ) -> Calibration:
        """Fit to decision (or clip-normalised) probabilities that were computed without the labels (codes) of their
        rows; `kind` may be "auto"."""
        f = np.asarray(f, np.float64)
        if not len(codes):  # no row could be left out: all are equal
            return cls()
        if kind == "auto":
            return cls._best(f, codes, floor, weights)
        p = np.asarray(clip_normalise(f, floor))
        if kind == "softmax":
            power, sharpness = softmax_map(p, f, codes, weights)
            return cls(kind, 1 / max(power, _TINY), floor, sharpness)
        if kind == "temperature":

            def loss(log_temperature: float) -> float:
                own = cls(kind, float(np.exp(log_temperature)), floor).apply(p)[np.arange(len(codes)), codes]
                return float(-np.average(np.log(np.maximum(own, _TINY)), weights=weights))

            best = minimize_scalar(loss, bounds=_LOG_TEMPERATURES, method="bounded")
            return cls(kind, float(np.exp(best.x)), floor)
        if kind == "isotonic":
            knots = tuple(_isotonic(p[:, c], codes == c, weights) for c in range(p.shape[1]))
            return cls(kind, floor=floor, knots=knots)
        return cls(kind)

    @classmethod
    def _best(cls, f: np.ndarray, codes: np.ndarray, floor: float, weights: np.ndarray | None) -> Calibration:
        """The map with the lowest log loss on rows that it was not fitted to."""
        if len(codes) < _LEAST_ROWS:
            return cls.fit("softmax", f, codes, floor, weights)
        losses = _calibrated_losses(f, codes, floor, weights)
        return cls.fit(min(_COMPARED, key=lambda kind: losses[kind]), f, codes, floor, weights)

    def apply(self, p: np.ndarray, label: np.ndarray | None = None, f: np.ndarray | None = None) -> np.ndarray:
        """Calibrated probabilities: rows sum to one, dtype of p, and within a row the order of p.

        `label` is the class that wins a tie for the largest p of a row; by default the first one. `f` are the decision
        probabilities that p was clipped from (default: p), which "softmax" looks at.
        """
        if self.kind == "none":
            return p
        if self.kind == "temperature":
            logs = np.log(np.maximum(p, _TINY, dtype=np.float64)) / self.temperature
            q = np.exp(logs - logs.max(axis=1, keepdims=True))
        elif self.kind == "softmax":
            q = _softmax(1 / self.temperature, self.sharpness, p, p if f is None else f)
        else:
            q = np.stack([np.interp(p[:, c], x, y) for c, (x, y) in enumerate(self.knots)], axis=1)
            q = np.where(q.sum(axis=1, keepdims=True) > 0, q, p)
        q = np.maximum(q / q.sum(axis=1, keepdims=True), self.floor)
        q = q / q.sum(axis=1, keepdims=True)
        if self.kind == "isotonic":
            q = _order_preserving(q, p, p.argmax(axis=1) if label is None else label)
        return np.asarray(q, p.dtype)

    def to_plain(self) -> dict[str, Any]:
        """Numbers and lists, from which `from_plain` builds an equal map."""
        knots = [[x.tolist(), y.tolist()] for x, y in self.knots]
        numbers = {"temperature": self.temperature, "floor": self.floor, "sharpness": self.sharpness}
        return {"kind": self.kind, **numbers, "knots": knots}

    @classmethod
    def from_plain(cls, stored: dict[str, Any]) -> Calibration:
        knots = tuple((np.array(x, np.float64), np.array(y, np.float64)) for x, y in stored["knots"])
        return cls(
            str(stored["kind"]),
            float(stored["temperature"]),
            float(stored["floor"]),
            float(stored.get("sharpness", 0.0)),
            knots,
        )


def calibrated_loss(f: np.ndarray, codes: np.ndarray, floor: float = 0.0, weights: np.ndarray | None = None) -> float:
    """The log loss of decisions that were computed without the labels (codes) of their rows, under the best map."""
    return min(_calibrated_losses(np.asarray(f, np.float64), codes, floor, weights).values())


def _calibrated_losses(f: np.ndarray, codes: np.ndarray, floor: float, weights: np.ndarray | None) -> dict[str, float]:
    """The log loss of every map on rows that it was not fitted to."""
    fold = np.random.default_rng(0).permutation(len(codes)) % _FOLDS
    losses = {}
    for kind in _COMPARED:
        logs = np.empty(len(codes))
        for k in range(_FOLDS):
            held, rest = fold == k, fold != k
            fitted = Calibration.fit(kind, f[rest], codes[rest], floor, None if weights is None else weights[rest])
            p = class_probabilities(f[held], floor, fitted)
            logs[held] = np.log(np.maximum(p[np.arange(len(p)), codes[held]], _TINY))
        losses[kind] = -float(np.average(logs, weights=weights))
    return losses


def class_probabilities(f: np.ndarray, floor: float = 0.0, calibration: Calibration | None = None) -> np.ndarray:
    """Probabilities from decision probabilities f: clip-normalised, calibrated, with the argmax of f."""
    f = np.asarray(f)
    label = f.argmax(axis=1)
    p = np.asarray(clip_normalise(f, floor))
    return with_argmax(p if calibration is None else calibration.apply(p, label, f), label)


def calibrated_losses(
    f: np.ndarray, codes: np.ndarray, floor: float = 0.0, weights: np.ndarray | None = None
) -> np.ndarray:
    """-log p of the labels, with the decisions calibrated by "softmax" to these very rows: what is left when only the
    sharpness of the decisions is off. For comparing kernels and λ on the same rows."""
    fitted = Calibration.fit("softmax", f, codes, floor, weights)
    own = class_probabilities(f, floor, fitted)[np.arange(len(codes)), codes]
    return np.asarray(-np.log(np.maximum(own, 1e-15)))


def _softmax(power: float, sharpness: float, p: np.ndarray, f: np.ndarray) -> np.ndarray:
    scores = power * np.log(np.maximum(p, _TINY, dtype=np.float64)) + sharpness * np.asarray(f, np.float64)
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def softmax_map(
    p: np.ndarray, f: np.ndarray, codes: np.ndarray, weights: np.ndarray | None = None
) -> tuple[float, float]:
    """The power 1/T and the sharpness β >= 0 with the lowest log loss: a convex problem in two numbers.

    Every class of every row also gets 1/n of a label (Laplace's rule: m labels in all), since n rows do not establish
    anything rarer; without it β would be infinite for classes that are apart.
    """
    n, m = f.shape
    w = np.full(n, 1.0) if weights is None else np.asarray(weights, np.float64)
    w = w / w.sum()
    targets = np.full((n, m), 1.0 / n) * w[:, None]
    targets[np.arange(n), codes] += w
    mass = targets.sum(axis=1, keepdims=True)
    logs, scale = np.log(np.maximum(p, _TINY)), 1 + 1 / n * m

    def loss(powers: np.ndarray) -> tuple[float, np.ndarray]:
        scores = powers[0] * logs + powers[1] * f
        scores = scores - scores.max(axis=1, keepdims=True)
        e = np.exp(scores)
        total = e.sum(axis=1, keepdims=True)
        slope = e / total * mass - targets
        value = float((targets * (np.log(total) - scores)).sum())
        return value / scale, np.array([(slope * logs).sum(), (slope * f).sum()]) / scale

    best = minimize(loss, np.array([0.5, 2.0]), jac=True, method="L-BFGS-B", bounds=_POWERS)
    return float(best.x[0]), float(best.x[1])


def with_argmax(p: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The same probabilities with `label` as their argmax: where it is tied (all below the floor, or equal after
    rounding), it is raised to the next floating-point number."""
    first = p.argmax(axis=1)
    rows = np.flatnonzero(first != label)
    if not len(rows):
        return p
    p = p.copy()
    p[rows, label[rows]] = np.nextafter(p[rows, first[rows]], p.dtype.type(np.inf))
    return p


def expectation(p: np.ndarray, g: Any) -> np.ndarray:
    """E[g(Y) | x] = Σ_c g(c) p_c(x) under probabilities p, within the range of g even after rounding."""
    values = np.asarray(g, np.float64)
    return np.clip(p @ values, values.min(axis=0), values.max(axis=0))


def _order_preserving(q: np.ndarray, p: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The nearest rows to q in the order of p; ties of p may come in any order, with `label` last."""
    leads = np.arange(p.shape[1]) == label[:, None]
    order = np.lexsort((q, leads, p), axis=1)
    rising = np.take_along_axis(q, order, axis=1)
    falls = (np.diff(rising, axis=1) < 0).any(axis=1)
    rising[falls] = _rising(rising[falls])
    found = np.empty_like(q)
    np.put_along_axis(found, order, rising, axis=1)
    return found


def _rising(q: np.ndarray) -> np.ndarray:
    """The nearest non-decreasing rows: neighbours that fall are replaced by their mean, in all rows at a time."""
    sums, counts, first = q.ravel(), np.ones(q.size, np.intp), np.arange(q.size) % q.shape[1] == 0
    while True:
        means = sums / counts
        heads = np.flatnonzero(np.concatenate([[True], (means[1:] >= means[:-1]) | first[1:]])[: len(means)])
        if len(heads) == len(means):
            return np.repeat(means, counts).reshape(q.shape)
        sums, counts, first = np.add.reduceat(sums, heads), np.add.reduceat(counts, heads), first[heads]


def _isotonic(p: np.ndarray, hits: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The non-decreasing step function nearest to the hits, as knots to interpolate between.

    Two pseudo-rows, one at each end (Laplace's rule), keep it away from 0 and 1, which no finite sample can establish.
    """
    if weights is not None:  # the regression requires positive ones
        p, hits, weights = p[weights > 0], hits[weights > 0], weights[weights > 0]
    order = np.argsort(p, kind="stable")
    x = np.concatenate([[0.0], p[order], [1.0]])
    y = np.concatenate([[0.5], hits[order].astype(np.float64), [0.5]])
    own = None if weights is None else np.concatenate([[1.0], weights[order], [1.0]])
    levels = isotonic_regression(y, weights=own).x
    keep = np.concatenate([[True], (levels[1:-1] != levels[:-2]) | (levels[1:-1] != levels[2:]), [True]])
    return x[keep], levels[keep]
