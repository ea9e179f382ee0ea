"""Relevance by exchange: the closed form equals refits, noise has none, what is exchanged together counts together."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core import importance
from kme_dist.core.embedding import clip_normalise
from kme_dist.core.importance import exchange_relevance, sample_rows, shares
from kme_dist.core.kernels import Gaussian, Linear


def as_they_are(rows):
    return rows


def test_the_closed_form_is_that_of_a_refit_without_each_row():
    rng = np.random.default_rng(0)
    n, lam, kernel = 14, 0.05, Gaussian(length_scale=[0.7, 1.5, 1.0])
    X, codes = rng.normal(size=(n, 3)), np.arange(n) % 3
    Y = np.eye(3)[codes]

    def without(i, x):
        rest = np.arange(n) != i
        V = np.linalg.solve(kernel.gram(X[rest]) + n * lam * np.eye(n - 1), Y[rest])
        return kernel.gram(x[None], X[rest]) @ V

    def brier(rows):
        f = np.concatenate([without(i, row) for i, row in enumerate(rows)])
        return np.mean(np.sum((Y - clip_normalise(f, 0.01)) ** 2, axis=1))

    draws = np.random.default_rng(5)
    orders = [draws.permutation(n) for _ in range(-(-importance._PREDICTIONS // n))]
    expected = []
    for group in ([0], [1, 2]):
        scores = []
        for order in orders:
            exchanged = X.copy()
            exchanged[:, group] = X[order][:, group]
            scores.append(brier(exchanged))
        expected.append(np.mean(scores) - brier(X))
    found = exchange_relevance(kernel, X, codes, 3, lam, [[0], [1, 2]], inputs=as_they_are, floor=0.01, seed=5)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


def made_up(n=500, seed=1):
    """A relevant number, a weak one, a relevant category of three values, a category of noise, a number of noise."""
    rng = np.random.default_rng(seed)
    x, first, second = rng.normal(size=(n, 3)), rng.integers(0, 3, n), rng.integers(0, 3, n)
    score = x[:, 0] + 0.3 * x[:, 1] + np.array([1.5, 0.0, -1.5])[first] + 0.3 * rng.normal(size=n)
    return np.column_stack([x, np.eye(3)[first], np.eye(3)[second]]), (score > 0).astype(int)


GROUPS = [[0], [1], [2], [3, 4, 5], [6, 7, 8]]


def relevance(kernel, X, codes, groups, lam=1e-3):
    return shares(exchange_relevance(kernel, X, codes, 2, lam, groups, inputs=as_they_are, floor=1e-3))


@pytest.mark.parametrize("noise_scale", [1.0, 3.0])
def test_noise_has_no_relevance_however_short_its_length_scale(noise_scale):
    X, codes = made_up()
    kernel = Gaussian(length_scale=[2.0, 2.0, noise_scale, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    number, weak, noise, category, category_of_noise = relevance(kernel, X, codes, GROUPS)
    assert max(noise, category_of_noise) < 0.03 < weak < min(number, category)
    assert number + category > 0.85


def test_a_category_counts_as_a_whole():
    X, codes = made_up()
    kernel = Gaussian(length_scale=[2.0] * 9)
    whole = relevance(kernel, X, codes, GROUPS)
    single = relevance(kernel, X, codes, [[j] for j in range(9)])
    assert single[4] < single[3] / 3  # the middle value decides nothing, its column by itself little
    assert whole[3] > 0.3


def test_a_copy_shares_the_relevance_and_both_together_have_it_all():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(400, 2))
    X, codes = np.column_stack([x[:, 0], x[:, 0], x[:, 1]]), (x[:, 0] > 0).astype(int)
    first, second, noise = relevance(Gaussian(length_scale=1.0), X, codes, [[0], [1], [2]])
    assert first == pytest.approx(second, rel=0.2)
    assert noise < 0.02
    assert relevance(Gaussian(length_scale=1.0), X, codes, [[0, 1], [2]])[0] > 0.98


def test_nothing_is_relevant_to_labels_of_chance_and_shares_stay_finite():
    rng = np.random.default_rng(3)
    X, codes = np.zeros((40, 2)), rng.integers(0, 2, 40)
    found = relevance(Gaussian(), X, codes, [[0], [1]])
    assert found.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(shares(np.array([3.0, -1.0, 1.0])), [0.75, 0.0, 0.25])


def test_a_singular_gram_matrix_is_padded():
    X, codes = made_up(60)
    found = relevance(Linear(), np.repeat(X, 2, axis=0), np.repeat(codes, 2), GROUPS, lam=1e-300)
    assert np.isfinite(found).all()


def test_many_features_are_measured_on_fewer_rows():
    assert sample_rows(4) == importance.MOST_ROWS
    assert sample_rows(400) == 300
    assert sample_rows(100_000) == 150


def test_wide_tables_are_exchanged_fewer_times(monkeypatch):
    X, codes = np.random.default_rng(0).normal(size=(30, 80)), np.arange(30) % 2
    X[:, 1] = 3.0
    calls = []

    def inputs(rows):
        calls.append(len(rows))
        return rows

    def measured():
        calls.clear()
        groups = [[j] for j in range(80)]
        return importance.exchange_relevance(Gaussian(length_scale=3.0), X, codes, 2, 0.01, groups, inputs=inputs)

    found = measured()
    assert len(calls) == 1 + 50 * 79, "fifty times, without the feature that is constant"
    assert found[1] == 0
    monkeypatch.setattr(importance, "_EXCHANGED", 4 * 80 * 30 * 80)
    measured()
    assert len(calls) == 1 + 4 * 79
    monkeypatch.setattr(importance, "_EXCHANGED", 1)
    measured()
    assert len(calls) == 1 + 79, "at least once"
