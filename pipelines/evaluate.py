"""How good are the predictions? Numbers for `metrics.json` and for the report.

    measure(y_test, clf.predict_proba(X_test), clf.classes_)["accuracy"]

Probabilities are taken as they are after normalisation; the log loss clips zeros the way
scikit-learn does, so one confident mistake costs much but not infinitely much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    log_loss,
    precision_recall_fscore_support,
)

RELIABILITY_BINS = 10


def measure(labels: np.ndarray, probabilities: np.ndarray, classes: np.ndarray) -> dict[str, Any]:
    """Accuracy, calibration and confusion of class probabilities.

    Parameters
    ----------
    labels : (n,) array           true classes, each one of `classes`
    probabilities : (n, m) array  non-negative rows in the order of `classes`
    classes : (m,) array          sorted, as in `classes_` of an estimator
    """
    probabilities = np.asarray(probabilities, dtype=np.float64)
    probabilities = probabilities / probabilities.sum(axis=1, keepdims=True)
    true = np.searchsorted(classes, labels)
    guess = probabilities.argmax(axis=1)
    indices = np.arange(len(classes))
    precision, recall, f1, rows = precision_recall_fscore_support(true, guess, labels=indices, zero_division=0.0)
    bins = _reliability(probabilities.max(axis=1), guess == true)
    return {
        "rows": len(true),
        "accuracy": float(accuracy_score(true, guess)),
        # scikit-learn's function gives the same and warns when a class is predicted but absent.
        "balanced_accuracy": float(recall[rows > 0].mean()),
        "log_loss": float(log_loss(true, probabilities, labels=indices)),
        "brier": float(((probabilities - np.eye(len(classes))[true]) ** 2).sum(axis=1).mean()),
        "calibration_error": float(sum(b["rows"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / len(true)),
        "per_class": [
            {
                "class": str(classes[index]),
                "rows": int(rows[index]),
                "precision": float(precision[index]),
                "recall": float(recall[index]),
                "f1": float(f1[index]),
            }
            for index in indices
        ],
        "confusion": confusion_matrix(true, guess, labels=indices).tolist(),
        "reliability": bins,
    }


def _reliability(confidence: np.ndarray, correct: np.ndarray) -> list[dict[str, Any]]:
    """Rows grouped by the probability of the predicted class, in bins of equal width."""
    index = np.minimum((confidence * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    return [
        {
            "low": b / RELIABILITY_BINS,
            "high": (b + 1) / RELIABILITY_BINS,
            "rows": int((index == b).sum()),
            "confidence": float(confidence[index == b].mean()),
            "accuracy": float(correct[index == b].mean()),
        }
        for b in range(RELIABILITY_BINS)
        if (index == b).any()
    ]
