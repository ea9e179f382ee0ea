"""Metrics of class probabilities, and of numeric predictions, from sums over rows that can be added in any order.

    tally = Tally.of(codes, probabilities)          # one chunk: true classes as 0..m-1, (n, m) probabilities
    (tally + other).metrics(classes)["accuracy"]    # equal to that of all rows together

Everything is exact except the risk-coverage curve, whose rows are grouped by entropy into narrow bins (finest at low
entropy). The log loss clips zeros as scikit-learn does, so one confident mistake has a finite cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from kme_dist.core.embedding import rkhs_entropy
from kme_dist.errors import DataError, counted

RELIABILITY_BINS = 10
COVERAGE_BINS = 2000
TOP_K = (2, 3, 5, 10)
_CURVE_POINTS = 200
_TINY = float(np.finfo(np.float64).eps)


def class_codes(labels: Any, classes: Any) -> np.ndarray:
    """The position of every label in `classes`, in whatever order they are; DataError if one of them is not there."""
    given, known = np.asarray(labels), np.asarray(classes)
    order = np.argsort(known)
    # A label that is not there also has a position: that of its neighbour, which would count as its class.
    codes = np.asarray(order[np.minimum(np.searchsorted(known, given, sorter=order), len(known) - 1)])
    strange = known[codes] != given
    if strange.any():
        raise DataError(
            f"label {given[strange].tolist()[0]!r} is not among the classes {', '.join(map(str, known[:20]))} "
            f"({counted(int(strange.sum()), 'row')}); leave such rows out, or fit the model with them"
        )
    return codes


@dataclass(frozen=True)
class Tally:
    """Counts and sums over rows. Those of probabilities are zero where only labels are known."""

    confusion: np.ndarray  # (m, m): true class down, predicted class across
    log_loss: float
    brier: float
    probabilistic: int  # rows with probabilities
    reliability: np.ndarray  # (bins, 3): rows, confidence, hits
    coverage: np.ndarray  # (bins, 2): rows and mistakes by entropy
    ranks: np.ndarray  # (m,): how often the true class came first, second, ...
    missing: int = 0  # rows without a prediction
    weighted: np.ndarray = field(default_factory=lambda: np.zeros(3))  # Σ w, Σ w of hits, Σ w of log losses

    @classmethod
    def empty(cls, m: int) -> Tally:
        return cls(
            np.zeros((m, m), np.int64),
            0.0,
            0.0,
            0,
            np.zeros((RELIABILITY_BINS, 3)),
            np.zeros((COVERAGE_BINS, 2), np.int64),
            np.zeros(m, np.int64),
        )

    @classmethod
    def of_labels(cls, codes: np.ndarray, labels: np.ndarray, m: int, weights: np.ndarray | None = None) -> Tally:
        """Where only predicted labels are known; a negative label is a row without a prediction."""
        answered = labels >= 0
        codes, labels = codes[answered], labels[answered]
        weighted = _weighted_sums(None if weights is None else weights[answered], labels == codes)
        known = {part.name: getattr(cls.empty(m), part.name) for part in fields(cls)}
        counts = np.bincount(codes.astype(np.int64) * m + labels, minlength=m * m).reshape(m, m)
        return cls(**{**known, "confusion": counts, "missing": int((~answered).sum()), "weighted": weighted})

    @classmethod
    def of(
        cls,
        codes: np.ndarray,
        probabilities: np.ndarray,
        labels: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> Tally:
        """Of rows with probabilities (normalised here); `labels` are the predicted classes if they are not the most
        probable ones. Rows of NaN are rows without a prediction."""
        p = np.asarray(probabilities, np.float64)
        m = p.shape[1]
        answered = np.isfinite(p).all(axis=1)
        guess = p.argmax(axis=1) if labels is None else np.asarray(labels)
        if not answered.all():
            codes, p, guess = codes[answered], p[answered], guess[answered]
            weights = None if weights is None else weights[answered]
        p = p / p.sum(axis=1, keepdims=True)
        rows = np.arange(len(p))
        own, confidence, right = p[rows, codes], p[rows, guess], guess == codes
        bins = np.minimum((confidence * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
        reliability = np.stack(
            [np.bincount(bins, weights, RELIABILITY_BINS) for weights in (None, confidence, right.astype(np.float64))],
            axis=1,
        )
        share = np.clip(rkhs_entropy(p) / math.log(max(m, 2)), 0.0, 1.0)
        step = np.minimum((share**0.25 * COVERAGE_BINS).astype(np.int64), COVERAGE_BINS - 1)
        coverage = [np.bincount(step[chosen], minlength=COVERAGE_BINS) for chosen in (slice(None), ~right)]
        ahead = (p > own[:, None]).sum(axis=1) + ((p == own[:, None]) & (np.arange(m) < codes[:, None])).sum(axis=1)
        losses = -np.log(np.clip(own, _TINY, 1.0))
        return cls(
            np.bincount(codes.astype(np.int64) * m + guess, minlength=m * m).reshape(m, m),
            float(losses.sum()),
            float((p * p).sum() - 2 * own.sum() + len(p)),
            len(p),
            reliability,
            np.stack(coverage, axis=1),
            np.bincount(ahead, minlength=m),
            int((~answered).sum()),
            _weighted_sums(weights, right, losses),
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    @property
    def rows(self) -> int:
        return int(self.confusion.sum())

    def metrics(self, classes: Sequence[Any]) -> dict[str, Any]:
        """All metrics as plain data; those of probabilities only where they are known."""
        total, m = max(1, self.rows), len(self.confusion)
        hits, true, guessed = np.diag(self.confusion), self.confusion.sum(axis=1), self.confusion.sum(axis=0)
        precision, recall = hits / np.maximum(guessed, 1), hits / np.maximum(true, 1)
        f1 = 2 * hits / np.maximum(true + guessed, 1)
        found: dict[str, Any] = {
            "rows": self.rows,
            "rows_without_answer": self.missing,
            "accuracy": float(hits.sum() / total),
            "balanced_accuracy": float(recall[true > 0].mean()) if self.rows else 0.0,
        }
        if self.probabilistic:
            n, bins = self.probabilistic, self.reliability
            top = np.cumsum(self.ranks) / n
            found |= {
                "log_loss": self.log_loss / n,
                "brier": self.brier / n,
                "calibration_error": float(np.abs(bins[:, 1] - bins[:, 2]).sum() / n),
                "top_k_accuracy": {str(k): float(top[k - 1]) for k in TOP_K if k < m},
                "risk_coverage_area": self._area(),
            }
        if self.weighted[0] > 0:
            weight, right, loss = self.weighted.tolist()
            found["weight"], found["weighted_accuracy"] = weight, right / weight
            found |= {"weighted_log_loss": loss / weight} if self.probabilistic else {}
        found["per_class"] = [
            {
                "class": str(classes[c]),
                "rows": int(true[c]),
                "precision": float(precision[c]),
                "recall": float(recall[c]),
                "f1": float(f1[c]),
            }
            for c in range(m)
        ]
        found["confusion"] = self.confusion.tolist()
        if self.probabilistic:
            found["reliability"] = [
                {
                    "low": b / RELIABILITY_BINS,
                    "high": (b + 1) / RELIABILITY_BINS,
                    "rows": int(rows),
                    "confidence": float(confidence / rows),
                    "accuracy": float(right / rows),
                }
                for b, (rows, confidence, right) in enumerate(self.reliability)
                if rows
            ]
            found["risk_coverage"] = self._curve()
        return found

    def _area(self) -> float:
        """The mean risk over all coverages: 0 is perfect, the error rate means an uninformative entropy."""
        rows, mistakes = self.coverage[:, 0], np.cumsum(self.coverage[:, 1])
        risk = mistakes / np.maximum(np.cumsum(rows), 1)
        return float((risk * rows).sum() / max(1, rows.sum()))

    def _curve(self) -> list[dict[str, float]]:
        """Error rate among the rows of lowest entropy, against their fraction of all rows."""
        filled = np.flatnonzero(self.coverage[:, 0])
        rows, mistakes = (np.cumsum(self.coverage[filled, i]) for i in (0, 1))
        wanted = np.unique(np.searchsorted(rows, np.linspace(0, rows[-1], _CURVE_POINTS)))
        m = len(self.confusion)
        return [
            {
                "coverage": float(rows[i] / rows[-1]),
                "risk": float(mistakes[i] / rows[i]),
                "entropy": float(((filled[i] + 1) / COVERAGE_BINS) ** 4 * math.log(max(m, 2))),
            }
            for i in wanted
        ]


def _weighted_sums(weights: np.ndarray | None, hits: np.ndarray, losses: np.ndarray | None = None) -> np.ndarray:
    """Σ w, Σ w of the hits and Σ w of the losses; zeros without weights."""
    if weights is None:
        return np.zeros(3)
    return np.array([weights.sum(), weights @ hits, 0.0 if losses is None else weights @ losses])


# --- numeric targets --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NumericTally:
    """Sums over rows with numeric targets; `+` adds those of other rows."""

    rows: int = 0
    missing: int = 0  # rows without a prediction
    weight: float = 0.0  # Σ w; the rows without weights
    absolute: float = 0.0  # Σ w |y - mean|
    squared: float = 0.0
    total: float = 0.0  # Σ w (y - anchor)
    squares: float = 0.0  # Σ w (y - anchor)²
    intervals: float = 0.0  # Σ w of rows with an interval
    inside: float = 0.0  # of those, Σ w of rows inside
    width: float = 0.0  # Σ w (upper - lower)

    @classmethod
    def of(
        cls,
        y: np.ndarray,
        mean: np.ndarray,
        interval: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        anchor: float = 0.0,
    ) -> NumericTally:
        """`anchor` is any number near the targets, the same for all rows: sums of squares around it keep their digits.
        Rows whose mean is NaN are rows without a prediction."""
        known = np.isfinite(mean)
        w = (np.ones(len(y)) if weights is None else np.asarray(weights, np.float64))[known]
        e, near = (y - mean)[known], (y - anchor)[known]
        found = cls(
            int(known.sum()), int((~known).sum()), float(w.sum()), float(w @ np.abs(e)), float(w @ e**2),
            float(w @ near), float(w @ near**2),
        )  # fmt: skip
        if interval is None:
            return found
        low, high = interval[known].T
        inside = (low <= y[known]) & (y[known] <= high)
        return replace(found, intervals=found.weight, inside=float(w @ inside), width=float(w @ (high - low)))

    def __add__(self, other: NumericTally) -> NumericTally:
        return NumericTally(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def metrics(self, coverage: float | None = None) -> dict[str, Any]:
        """RMSE, MAE and R² (of weighted rows: weighted), and of intervals of this coverage the share of targets
        inside and the mean width."""
        W = self.weight or 1.0
        spread = self.squares / W - (self.total / W) ** 2
        found: dict[str, Any] = {
            "rows": self.rows,
            "rows_without_answer": self.missing,
            "rmse": math.sqrt(self.squared / W),
            "mae": self.absolute / W,
            "r2": 1 - self.squared / W / spread if spread > 0 else 0.0,
        }
        if self.intervals:
            found |= {"coverage": self.inside / self.intervals, "interval_width": self.width / self.intervals}
            found |= {} if coverage is None else {"nominal_coverage": coverage}
        return found
