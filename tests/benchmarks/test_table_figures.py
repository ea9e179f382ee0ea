"""Figures of class probabilities, against values computed by hand and by scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import log_loss as reference

from benchmarks.defaults import figures


@pytest.fixture
def predicted():
    rng = np.random.default_rng(0)
    P = rng.dirichlet(np.ones(3), size=300)
    truth = np.array([rng.choice(3, p=p) for p in P])
    return P, truth


def test_log_loss_is_that_of_scikit_learn(predicted):
    P, truth = predicted
    assert figures.log_loss(P, truth) == pytest.approx(reference(truth, P), rel=1e-12)


def test_a_class_missing_in_training_costs_the_floor():
    P = figures.on_all_classes(np.array([[0.25, 0.75], [0.5, 0.5]]), known=[0, 2], classes=3)
    np.testing.assert_array_equal(P, [[0.25, 0, 0.75], [0.5, 0, 0.5]])
    assert figures.log_loss(P, np.array([1, 0])) == pytest.approx((-np.log(1e-15) - np.log(0.5)) / 2)


def test_single_precision_is_normalised():
    P = figures.on_all_classes(np.array([[0.2, 0.6]], np.float32), known=[0, 1], classes=2)
    assert P.dtype == np.float64
    assert P.sum() == pytest.approx(1, abs=1e-15)


def test_brier_score_is_the_sum_of_squares(predicted):
    P, truth = predicted
    assert figures.brier(P, truth) == pytest.approx(np.square(P - np.eye(3)[truth]).sum(axis=1).mean(), rel=1e-12)
    assert figures.brier(np.eye(3)[truth], (truth + 1) % 3) == 2


def test_calibration_error_of_two_bins_by_hand():
    # confidences 0.6, 0.6 with one correct; 0.9, 0.9 with both correct: (2 * 0.1 + 2 * 0.1) / 4
    P = np.array([[0.6, 0.4], [0.6, 0.4], [0.9, 0.1], [0.9, 0.1]])
    truth = np.array([0, 1, 0, 0])
    assert figures.calibration_error(P, truth, bins=2) == pytest.approx(0.1)


def test_calibration_error_does_not_depend_on_the_order_of_rows(predicted):
    P, truth = predicted
    P = P.round(1) + 1e-3 * np.arange(3)  # many ties
    order = np.random.default_rng(1).permutation(len(truth))
    first, second = figures.calibration_error(P, truth), figures.calibration_error(P[order], truth[order])
    assert first == pytest.approx(second, rel=1e-12)


def test_bins_have_equally_many_rows_without_ties(predicted):
    P, truth = predicted
    top, correct = P.max(axis=1), P.argmax(axis=1) == truth
    order = np.argsort(top)
    expected = sum(abs((correct - top)[part].sum()) for part in np.array_split(order, 15)) / 300
    assert figures.calibration_error(P, truth) == pytest.approx(expected, rel=1e-12)


def test_reliability_counts_every_row_once(predicted):
    P, truth = predicted
    sums = figures.reliability(P, truth)
    np.testing.assert_allclose(
        sums.sum(axis=0), [300, P.max(axis=1).sum(), (P.argmax(axis=1) == truth).sum()], rtol=1e-12
    )
    assert figures.reliability(np.array([[1.0, 0.0]]), np.array([0]))[-1].tolist() == [1, 1, 1]
