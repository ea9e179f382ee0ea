"""Fewer centres: the best weights on them, an error that is stated truly, and a choice that beats chance."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_table import labels, vectors

from kme_dist.core import embedding as mce
from kme_dist.core.compression import METHODS, compress
from kme_dist.core.kernels import Gaussian, Matern
from kme_dist.errors import ConfigError

N, M = 80, 3
KERNEL = Gaussian(length_scale=1.5)


@pytest.fixture(scope="module")
def fitted():
    X, y = vectors(N), labels(N)
    return mce.Embedding(KERNEL, X, mce.solve_dual(KERNEL, X, np.eye(M)[y], 0.01), 0.01)


def rkhs_distance(a, b, kernel=KERNEL):
    """|f_a - f_b| from the definition: the norm of a sum of kernels with the weights of both."""
    points = np.concatenate([a.centres, b.centres])
    weights = np.concatenate([a.weights, -b.weights])
    return np.sqrt(max(0.0, float(np.trace(weights.T @ kernel.gram(points) @ weights))))


def norm(a):
    return np.sqrt(float(np.trace(a.weights.T @ KERNEL.gram(a.centres) @ a.weights)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 5, 20])
def test_the_stated_error_is_the_true_one(fitted, method, size):
    found = compress(fitted, centres=size, method=method)
    assert found.embedding.weights.shape == (size, M)
    assert found.error == pytest.approx(rkhs_distance(fitted, found.embedding) / norm(fitted), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_the_best_on_their_centres(fitted, method, rng):
    found = compress(fitted, centres=10, method=method)
    C, K_cc = found.embedding.centres, KERNEL.gram(found.embedding.centres)
    best = np.linalg.solve(K_cc, KERNEL.gram(C, fitted.centres) @ fitted.weights)
    np.testing.assert_allclose(found.embedding.weights, best, rtol=1e-5, atol=1e-6)


def test_errors_fall_and_vanish_with_all_centres():
    X, y, kernel = vectors(40), labels(40), Matern(nu=0.5)
    whole = mce.Embedding(kernel, X, mce.solve_dual(kernel, X, np.eye(M)[y], 0.01), 0.01)
    found = compress(whole, centres=40)
    assert (np.diff(found.errors) <= 1e-12).all()
    assert found.error < 1e-6
    queries = vectors(20, seed=3)
    np.testing.assert_allclose(found.embedding.decision(queries), whole.decision(queries), atol=1e-8)


def test_every_prediction_stays_within_the_bound(fitted):
    found = compress(fitted, centres=15)
    queries = 2 * vectors(200, seed=8)
    change = np.abs(found.embedding.decision(queries) - fitted.decision(queries)).max()
    assert change <= found.error * norm(fitted) * KERNEL.alpha(queries)


def test_chosen_centres_beat_random_ones(fitted, rng):
    for method in METHODS:
        chosen = compress(fitted, centres=8, method=method).error
        F = fitted.decision(fitted.centres)
        for _ in range(10):
            rows = rng.choice(N, 8, replace=False)
            C = fitted.centres[rows]
            W = np.linalg.solve(KERNEL.gram(C), F[rows])
            random = rkhs_distance(fitted, mce.Embedding(KERNEL, C, W, 0.01)) / norm(fitted)
            assert chosen < random


def test_a_tolerance_is_met_with_no_more_than_needed(fitted):
    found = compress(fitted, tolerance=0.3)
    assert found.error <= 0.3
    assert found.errors[-2] > 0.3
    assert len(found.kept) < N


def test_twins_are_not_taken_twice():
    X = np.repeat(vectors(10), 3, axis=0)
    whole = mce.Embedding(KERNEL, X, np.random.default_rng(0).normal(size=(30, M)), 0.01)
    found = compress(whole, centres=30)
    assert len(found.kept) == 10
    assert found.error < 1e-6


def test_on_any_array_library_in_the_precision_of_the_model(arrays, fitted):
    whole = mce.Embedding(KERNEL, arrays(fitted.centres, "float32"), arrays(fitted.weights, "float32"), 0.01)
    found = compress(whole, centres=12)
    assert arrays.host(found.embedding.weights).dtype == np.float32
    assert arrays.host(found.embedding.centres).shape == (12, fitted.centres.shape[1])
    assert found.error == pytest.approx(compress(fitted, centres=12).error, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either"),
        ({"centres": 3, "tolerance": 0.1}, "either"),
        ({"centres": 0}, "0 centres"),
        ({"tolerance": 1.5}, "1.5"),
        ({"centres": 3, "method": "luck"}, "luck"),
    ],
)
def test_mistakes_are_named(fitted, options, words):
    with pytest.raises(ConfigError, match=words):
        compress(fitted, **options)
