"""Tables with few different rows, such as categories: probabilities are the shares of the labels among equal rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import log_loss

from kme_dist import CMERegressor, MCEClassifier
from kme_dist.run.fit import pcg

LEVELS = list("abc")
SHARES = {"a": 0.9, "b": 0.5, "c": 0.1}
LEVEL = np.random.default_rng(0).choice(LEVELS, 800)
IS_YES = np.random.default_rng(1).random(800) < np.vectorize(SHARES.get)(LEVEL)
OBSERVED = [IS_YES[level == LEVEL].mean() for level in LEVELS]
FRAME, NEW = pd.DataFrame({"level": LEVEL}), pd.DataFrame({"level": LEVELS})
SETTINGS = {
    "default": {},
    "uncalibrated": {"calibration": "none"},
    **{objective: {"objective": objective, "steps": 20} for objective in ("rcb", "validation", "loo", "median")},
    **{solver: {"solver": solver} for solver in ("tiled", "pcg")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_one_column_of_categories_has_the_shares_of_its_levels(name):
    model = MCEClassifier(**SETTINGS[name]).fit(FRAME, IS_YES)
    np.testing.assert_allclose(model.predict_proba(NEW)[:, 1], OBSERVED, atol=0.04)


def test_categories_that_tell_the_label_are_certain():
    model = MCEClassifier().fit(FRAME, LEVEL == "b")
    assert (model.predict_proba(NEW)[[0, 1, 2], [0, 1, 0]] > 0.95).all()


def test_constant_features_give_the_shares_of_the_classes():
    y = np.repeat(["a", "b"], [90, 10])
    found = MCEClassifier().fit(np.ones((100, 3)), y).predict_proba(np.ones((1, 3)))
    np.testing.assert_allclose(found, [[0.9, 0.1]], atol=0.06)


def test_counts_as_weights_are_as_good_as_rows():
    cells = np.array([[a, b] for a in (0.0, 1.0) for b in (0.0, 1.0)]).repeat(2, axis=0)
    labels, counts = np.tile([0, 1], 4), np.array([90, 10, 50, 50, 20, 80, 5, 95])
    found = [
        MCEClassifier().fit(cells, labels, sample_weight=counts.astype(float)),
        MCEClassifier().fit(cells.repeat(counts, axis=0), labels.repeat(counts)),
    ]
    for model in found:
        np.testing.assert_allclose(model.predict_proba(cells[::2])[:, 1], counts[1::2] / 100, atol=0.06)


@pytest.mark.parametrize(("columns", "rows"), [(2, 600), (3, 600), (4, 1500), (6, 600)])
def test_binary_columns_are_nearly_as_good_as_the_true_probabilities(columns, rows):
    rng = np.random.default_rng(columns)
    X = rng.integers(0, 2, (rows + 4000, columns)).astype(float)
    true = 1 / (1 + np.exp(-((X - 0.5) @ rng.normal(scale=2, size=columns) + 2 * (X[:, 0] != X[:, 1]) - 1)))
    y = rng.random(len(X)) < true
    found = MCEClassifier().fit(X[:rows], y[:rows]).predict_proba(X[rows:])
    assert log_loss(y[rows:], found) < log_loss(y[rows:], true[rows:]) + 0.03


def test_ratings_of_few_products_have_their_means_and_intervals_that_cover():
    rng = np.random.default_rng(2)
    ratings = np.vectorize({"a": 4, "b": 2, "c": 0}.get)(LEVEL) + rng.integers(0, 3, 800).astype(float)
    model = CMERegressor().fit(FRAME, ratings)
    np.testing.assert_allclose(model.predict(NEW), [ratings[level == LEVEL].mean() for level in LEVELS], atol=0.1)
    low, high = model.predict_interval(FRAME, 0.9)
    assert np.mean((low <= ratings) & (ratings <= high)) > 0.85
    assert (high - low).max() < 4, "two ratings up or down at most"


def test_rows_that_are_no_copies_are_held_out_one_at_a_time(monkeypatch):
    monkeypatch.setattr(pcg, "LOO_ROWS", 100)
    model = MCEClassifier(solver="pcg").fit(FRAME, IS_YES)
    np.testing.assert_allclose(model.predict_proba(NEW)[:, 1], OBSERVED, atol=0.08)  # 80 rows
