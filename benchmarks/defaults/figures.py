"""Figures of one prediction of class probabilities: log loss, Brier score, calibration error, reliability.

`P` has a column for every class of the table; `truth` the number of the true class of every row.
"""

from __future__ import annotations

import numpy as np

FLOOR = 1e-15
BINS = 15
WIDTHS = 20


def on_all_classes(P, known, classes):
    """Probabilities of the classes `known` in training as rows over all classes; the missing ones have 0."""
    P = np.asarray(P, np.float64)
    full = np.zeros((len(P), classes))
    full[:, known] = P / P.sum(axis=1, keepdims=True)  # sums of single precision are 1 to seven digits only
    return full


def log_loss(P, truth):
    """Mean of -log p(true class), with p no smaller than 1e-15: also for a class that training did not have."""
    return float(-np.log(np.clip(P[np.arange(len(truth)), truth], FLOOR, 1.0)).mean())


def brier(P, truth):
    """Mean over rows of the sum over classes of (p - [class is true])²: between 0 and 2."""
    return float((np.square(P).sum(axis=1) - 2 * P[np.arange(len(truth)), truth] + 1).mean())


def _top(P, truth):
    return P.max(axis=1), P.argmax(axis=1) == truth


def calibration_error(P, truth, bins=BINS):
    """Mean |accuracy - confidence| of the most probable class, over bins of equally many rows.

    Equal confidences are in the same bin, so that the order of rows plays no part.
    """
    confidence, correct = _top(P, truth)
    edges = np.unique(np.quantile(confidence, np.arange(1, bins) / bins, method="inverted_cdf"))
    place = np.searchsorted(edges, confidence)
    gaps = np.bincount(place, weights=correct - confidence)
    return float(np.abs(gaps).sum() / len(truth))


def reliability(P, truth, widths=WIDTHS):
    """(rows, sum of confidences, correct rows) for equally wide ranges of confidence: these can be added."""
    confidence, correct = _top(P, truth)
    place = np.minimum((confidence * widths).astype(int), widths - 1)
    sums = (np.bincount(place, weights=w, minlength=widths) for w in (np.ones(len(truth)), confidence, correct))
    return np.stack(list(sums), axis=1)
