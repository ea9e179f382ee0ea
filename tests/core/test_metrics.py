"""Figures from sums: equal to scikit-learn's on all rows, whatever chunks they came in."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from kme_dist.core.metrics import Tally

M = 4
NAMES = ["a", "b", "c", "d"]


def judged(n=400, seed=0, sharp=1.5):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, M, n)
    scores = rng.normal(size=(n, M)) + sharp * np.eye(M)[codes]
    p = np.exp(scores)
    return codes, p / p.sum(axis=1, keepdims=True)


def test_figures_are_those_of_scikit_learn():
    codes, p = judged()
    found, guess = Tally.of(codes, p).metrics(NAMES), p.argmax(axis=1)
    assert found["rows"] == 400
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(codes, guess))
    assert found["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(codes, guess))
    assert found["log_loss"] == pytest.approx(reference.log_loss(codes, p))
    assert found["brier"] == pytest.approx(((p - np.eye(M)[codes]) ** 2).sum(axis=1).mean())
    assert found["confusion"] == reference.confusion_matrix(codes, guess).tolist()
    for k in (2, 3):
        assert found["top_k_accuracy"][str(k)] == pytest.approx(reference.top_k_accuracy_score(codes, p, k=k))
    precision, recall, f1, rows = reference.precision_recall_fscore_support(codes, guess)
    for c, row in enumerate(found["per_class"]):
        assert (row["class"], row["rows"]) == (NAMES[c], rows[c])
        assert (row["precision"], row["recall"], row["f1"]) == pytest.approx((precision[c], recall[c], f1[c]))


def test_weighted_figures_are_those_of_scikit_learn_and_add_up():
    codes, p = judged()
    w = np.random.default_rng(3).uniform(0, 4, len(codes))
    guess = p.argmax(axis=1)
    whole = Tally.of(codes, p, weights=w)
    halves = Tally.of(codes[:150], p[:150], weights=w[:150]) + Tally.of(codes[150:], p[150:], weights=w[150:])
    for tally in (whole, halves):
        found = tally.metrics(NAMES)
        assert found["weight"] == pytest.approx(w.sum())
        assert found["weighted_accuracy"] == pytest.approx(reference.accuracy_score(codes, guess, sample_weight=w))
        assert found["weighted_log_loss"] == pytest.approx(reference.log_loss(codes, p, sample_weight=w))
        assert found["accuracy"] == pytest.approx(reference.accuracy_score(codes, guess))
    only = Tally.of_labels(codes, guess, M, w).metrics(NAMES)
    assert only["weighted_accuracy"] == pytest.approx(reference.accuracy_score(codes, guess, sample_weight=w))
    assert "weighted_accuracy" not in Tally.of(codes, p).metrics(NAMES)


def test_calibration_error_is_the_gap_in_bins_of_confidence():
    codes, p = judged()
    confidence, right = p.max(axis=1), p.argmax(axis=1) == codes
    gaps = [
        abs(confidence[inside].mean() - right[inside].mean()) * inside.mean()
        for low in np.arange(10) / 10
        if (inside := (confidence >= low) & (confidence < low + 0.1)).any()
    ]
    assert Tally.of(codes, p).metrics(NAMES)["calibration_error"] == pytest.approx(sum(gaps))


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=5))
def test_chunks_add_up_to_the_whole(cuts):
    codes, p = judged()
    edges = [0, *sorted(cuts), 400]
    parts = [Tally.of(codes[a:b], p[a:b]) for a, b in pairwise(edges)]
    total = Tally.empty(M)
    for part in parts:
        total = total + part
    found, whole = total.metrics(NAMES), Tally.of(codes, p).metrics(NAMES)
    assert found["confusion"] == whole["confusion"]
    assert found["risk_coverage"] == whole["risk_coverage"]
    assert found["log_loss"] == pytest.approx(whole["log_loss"], rel=1e-12)


def test_risk_falls_as_fewer_rows_are_answered_where_the_entropy_knows():
    found = Tally.of(*judged(20_000)).metrics(NAMES)
    curve = found["risk_coverage"]
    assert curve[-1]["coverage"] == 1
    assert curve[-1]["risk"] == pytest.approx(1 - found["accuracy"])
    assert [point["coverage"] for point in curve] == sorted(point["coverage"] for point in curve)
    at_half = next(point for point in curve if point["coverage"] >= 0.5)
    assert at_half["risk"] < 0.7 * curve[-1]["risk"]
    assert found["risk_coverage_area"] < 1 - found["accuracy"]


def test_the_curve_is_that_of_sorted_rows():
    codes, p = judged(3000)
    entropy = -(p * np.log(p)).sum(axis=1)
    wrong = (p.argmax(axis=1) != codes)[np.argsort(entropy)]
    for point in Tally.of(codes, p).metrics(NAMES)["risk_coverage"][20::20]:
        kept = round(point["coverage"] * 3000)
        assert point["risk"] == pytest.approx(wrong[:kept].mean(), abs=1e-9)


def test_rows_without_an_answer_are_counted_apart():
    codes, p = judged(10)
    q = p.copy()
    q[3] = np.nan
    labels = np.where(np.isnan(q[:, 0]), -1, p.argmax(axis=1))
    for tally in (Tally.of(codes, q, labels), Tally.of_labels(codes, labels, M)):
        assert (tally.rows, tally.missing) == (9, 1)
    assert "log_loss" not in Tally.of_labels(codes, labels, M).metrics(NAMES)


def test_no_rows_give_figures_all_the_same():
    found = Tally.empty(M).metrics(NAMES)
    assert (found["rows"], found["accuracy"]) == (0, 0.0)
