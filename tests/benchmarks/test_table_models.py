"""The other classifiers are prepared so that rare classes do them no harm that their defaults do not."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.defaults import models


@pytest.fixture
def rare():
    """Two classes of 40 rows and one of a single row."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [40, 40, 1])
    return rng.normal(size=(81, 2)) + 2 * y[:, None], y


def test_a_class_of_one_row_has_its_frequency_in_calibrated_probabilities(rare):
    X, y = rare
    model = models.Calibrated(models.MODELS["svc"].build(X, y).fit(X, y), X, y)
    P = model.predict_proba(X)
    np.testing.assert_allclose(P.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(P[:, 2], 1 / 81, rtol=1e-12)
    assert (P[:40, 0] > P[:40, 1]).mean() > 0.8


def test_calibration_has_as_many_folds_as_the_smallest_class_allows(rare):
    X, y = rare
    y = np.where(np.arange(81) >= 78, 2, y)  # three rows
    model = models.Calibrated(models.MODELS["svc"].build(X, y).fit(X, y), X, y)
    assert model.inner.cv == 3
    assert not model.rare.any()


def test_early_stopping_of_boosting_is_kept_by_leaving_out_classes_of_one_row():
    y = np.append(np.arange(10_001) % 2, 2)
    boosting = models.MODELS["boosting"]
    assert models.fit_rows(boosting, y).tolist() == [True] * 10_001 + [False]
    assert models.fit_rows(boosting, y[-100:]).all()  # small: it does not stop early
    assert models.fit_rows(models.MODELS["mce"], y).all()


def test_the_grid_is_five_by_five_around_the_default():
    X = np.zeros((10, 4))
    grid = models.MODELS["svc-grid"].build(X, None).param_grid
    np.testing.assert_allclose(grid["svc__C"], [0.1, 1, 10, 100, 1000])
    np.testing.assert_allclose(grid["svc__gamma"], np.array([0.001, 0.01, 0.1, 1, 10]) / 4)


def test_models_without_figures_say_why():
    assert models.why_empty(models.MODELS["gp"], 2000) is None
    assert models.why_empty(models.MODELS["gp"], 2001) == "> 2,000 rows"
    missing = models.Entry("none", lambda X, y: None, "", library="no_such_library")
    assert models.why_empty(missing, 10) == "not installed"
