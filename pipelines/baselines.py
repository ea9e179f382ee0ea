"""What simple models reach on the same rows, so that readers of the report can compare.

    beside(run.data, seed=0)         # [Baseline("majority class", 0.1, 2.3), ...]

The most frequent class (or the mean), a linear model and gradient boosting, with the defaults of scikit-learn, learn
from a sample of the training rows as they are stored, and are tested on a sample of the test rows. They are no
competition: nothing of them is tuned, and large data are sampled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.core.metrics import NumericTally, Tally
from kme_dist.data.dataset import Dataset
from kme_dist.data.rows import RowsRef

MOST_ROWS, MOST_TEST_ROWS = 2_000, 20_000
_MOST_CLASSES = 30  # beyond these, boosting would take as long as the run


@dataclass(frozen=True)
class Baseline:
    """A simple model, and its figures on test rows: accuracy and log loss, or RMSE and R²."""

    name: str
    figures: dict[str, float]


def beside(data: Dataset, seed: int) -> tuple[list[Baseline], str]:
    """The baselines of a data set with the splits `train` and `test`, and what they learned from, in words."""
    train, test = (RowsRef.of(data, split=split) for split in ("train", "test"))
    (X, y), (X_test, y_test) = train.sample(MOST_ROWS, seed), test.sample(MOST_TEST_ROWS, seed)
    if not len(y_test) or not isinstance(X, np.ndarray) or len(np.unique(y)) < 2:  # sparse rows, or texts
        return [], ""
    rows = (_flat(X), np.asarray(y), _flat(X_test), np.asarray(y_test))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a linear model that has not converged is still a baseline
        found = list(_of_numbers(*rows) if data.classes is None else _of_classes(*rows, len(data.classes)))
    few = f"{len(y):,} of {train.count:,} training rows" if len(y) < train.count else f"{len(y):,} training rows"
    tested = f", {len(y_test):,} of {test.count:,} test rows" if len(y_test) < test.count else ""
    return found, few + tested


def _flat(X: Any) -> np.ndarray:
    return np.asarray(X, np.float64).reshape(len(X), -1)


def _of_classes(X: Any, y: Any, X_test: Any, y_test: Any, m: int) -> Iterator[Baseline]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def measured(name: str, columns: np.ndarray, P: np.ndarray) -> Baseline:
        wide = np.zeros((len(y_test), m))  # classes that the sample does not have
        wide[:, columns] = P
        floor = 1 / (len(y) + m)  # as of our own probabilities: none is exactly 0
        wide = (wide + floor) / (wide + floor).sum(axis=1, keepdims=True)
        found = Tally.of(y_test, wide).metrics([str(i) for i in range(m)])
        return Baseline(name, {"accuracy": found["accuracy"], "log_loss": found["log_loss"]})

    share = np.bincount(y, minlength=m) / len(y)
    yield measured("most frequent class", np.arange(m), np.tile(share, (len(y_test), 1)))
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)).fit(X, y)
    yield measured("logistic regression", linear.classes_, linear.predict_proba(X_test))
    if m <= _MOST_CLASSES:
        boosted = HistGradientBoostingClassifier(random_state=0).fit(X, y)
        yield measured("gradient boosting", boosted.classes_, boosted.predict_proba(X_test))


def _of_numbers(X: Any, y: Any, X_test: Any, y_test: Any) -> Iterator[Baseline]:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def measured(name: str, means: np.ndarray) -> Baseline:
        found = NumericTally.of(y_test.astype(np.float64), means, None, None, float(y.mean())).metrics(None)
        return Baseline(name, {"rmse": found["rmse"], "r2": found["r2"]})

    yield measured("mean of the training rows", np.full(len(y_test), y.mean(dtype=np.float64)))
    yield measured("ridge regression", make_pipeline(StandardScaler(), RidgeCV()).fit(X, y).predict(X_test))
    yield measured("gradient boosting", HistGradientBoostingRegressor(random_state=0).fit(X, y).predict(X_test))


def table(
    found: Sequence[Baseline], rows: str, own: dict[str, Any], name: str
) -> list[tuple[str, list[str], list[list[str]]]]:
    """A table of the report: this model, then the baselines; empty without any."""
    if not found:
        return []
    forms = {"accuracy": "{:.2%}", "log_loss": "{:.4f}", "rmse": "{:.4g}", "r2": "{:.3f}"}
    words = {"accuracy": "accuracy", "log_loss": "log loss", "rmse": "RMSE", "r2": "R²"}
    keys = list(found[0].figures)
    lines = [
        [model, *(forms[key].format(figures[key]) for key in keys), learned]
        for model, figures, learned in [
            (name, own, "all training rows"),
            *((baseline.name, baseline.figures, rows) for baseline in found),
        ]
    ]
    return [("Beside simple models", ["model", *(words[key] for key in keys), "learned from"], lines)]
