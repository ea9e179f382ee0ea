"""Conditional embeddings: closed forms against refits and slow sums, gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.conditional import (
    ConditionalEmbedding,
    Delta,
    Explicit,
    conditional_quantiles,
    held_out_objective,
    held_out_scores,
    herd,
    solve_embedding,
)
from kme_dist.errors import DataError
from kme_dist.kernels import Gaussian, Linear, Matern, Polynomial

KERNEL, TARGET = Gaussian(length_scale=[0.9, 1.4], scale=1.1), Gaussian(length_scale=0.8)


@pytest.fixture
def pairs(rng):
    X = rng.normal(size=(14, 2))
    return X, np.sin(X[:, :1]) + 0.2 * rng.normal(size=(14, 1))


def refit_error(K, L, shift, out):
    """Σ |L(y) - μ(x)|² of the rows `out` under the fit without them, with the same shift."""
    rest = np.setdiff1d(np.arange(len(K)), out)
    a = np.linalg.solve(K[np.ix_(rest, rest)] + shift * np.eye(len(rest)), K[np.ix_(rest, out)])
    total = 0.0
    for j, o in enumerate(out):
        total += L[o, o] - 2 * L[rest, o] @ a[:, j] + a[:, j] @ L[np.ix_(rest, rest)] @ a[:, j]
    return total


def test_held_out_scores_equal_refits(pairs):
    K, L, shifts = KERNEL.gram(pairs[0]), TARGET.gram(pairs[1]), [1e-3, 0.1, 5.0]
    alone = [sum(refit_error(K, L, s, np.array([i])) for i in range(14)) / 14 for s in shifts]
    np.testing.assert_allclose(held_out_scores(K, L, shifts), alone, rtol=1e-10)
    folds = [np.array([0, 3, 5]), np.array([1, 2, 4, 13]), np.arange(6, 13)]
    together = [sum(refit_error(K, L, s, fold) for fold in folds) / 14 for s in shifts]
    np.testing.assert_allclose(held_out_scores(K, L, shifts, folds), together, rtol=1e-10)


def test_the_embedding_runs_on_every_array_library(arrays, pairs):
    X, Y = pairs
    model = solve_embedding(KERNEL, TARGET, arrays(X), arrays(Y), 0.05)
    K, L = KERNEL.gram(X), TARGET.gram(Y)
    W = np.linalg.inv(K + 14 * 0.05 * np.eye(14))
    np.testing.assert_allclose(arrays.host(model.expectation(arrays(X), arrays(Y))), K @ W @ Y, rtol=1e-9, atol=1e-12)
    naive = [L[j, j] - 2 * L[j] @ W @ K[:, j] + (W @ K[:, j]) @ L @ (W @ K[:, j]) for j in range(14)]
    np.testing.assert_allclose(arrays.host(model.errors(arrays(X), arrays(Y))), naive, rtol=1e-8, atol=1e-12)
    scores = held_out_scores(arrays(K), arrays(L), [0.1])
    np.testing.assert_allclose(scores, held_out_scores(K, L, [0.1]), rtol=1e-9)


def test_explicit_and_factored_weights_say_the_same(pairs):
    X, Y = pairs
    model = solve_embedding(KERNEL, TARGET, X, Y, 0.05)
    W = np.linalg.inv(KERNEL.gram(X) + 14 * 0.05 * np.eye(14))
    other = ConditionalEmbedding(KERNEL, TARGET, X, Y, Explicit(W), 0.05)
    np.testing.assert_allclose(model.coefficients(X[:4]), other.coefficients(X[:4]), rtol=1e-9)
    np.testing.assert_allclose(model.evaluate(X[:4], Y[:3]), other.evaluate(X[:4], Y[:3]), rtol=1e-9)
    with pytest.raises(DataError, match=r"one value per target \(14\)"):
        model.expectation(X, np.zeros(3))


def test_with_a_linear_target_kernel_the_errors_are_euclidean(pairs):
    X, Y = pairs
    model = solve_embedding(KERNEL, Linear(), X, Y, 0.05)
    expected = (Y - model.expectation(X, Y))[:, 0] ** 2
    np.testing.assert_allclose(model.errors(X, Y), expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("tau", [0.0, 0.7])
@pytest.mark.parametrize(
    "kernel",
    [KERNEL, Matern(length_scale=[0.9, 1.4], nu=2.5), Gaussian(0.7) + 0.3 * Polynomial(degree=2)],
    ids=["ard gaussian", "matern", "sum"],
)
def test_gradient_of_the_held_out_objective_matches_finite_differences(kernel, tau, pairs):
    X, Y = pairs
    grams = TARGET.gram(Y[:9]), TARGET.gram(Y[:9], Y[9:]), TARGET.diag(Y[9:])

    def value(kernel, lam):
        return held_out_objective(kernel, X[:9], X[9:], grams, lam, tau)

    found = value(kernel, 0.03)
    h = 1e-6
    slope = (value(kernel, 0.03 * np.exp(h)).value - value(kernel, 0.03 * np.exp(-h)).value) / (2 * h)
    assert found.gradient["regularization"] == pytest.approx(slope, rel=1e-6, abs=1e-8)
    for name, parameter in kernel.parameters.items():
        for index in np.ndindex(parameter.shape):
            step = np.zeros(parameter.shape)
            step[index] = h
            up = value(kernel.replace({name: parameter * np.exp(step)}), 0.03).value
            down = value(kernel.replace({name: parameter * np.exp(-step)}), 0.03).value
            assert found.gradient[name][index] == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-7)


def test_the_norm_is_that_of_the_operator(pairs):
    X, Y = pairs
    grams = TARGET.gram(Y[:9]), TARGET.gram(Y[:9], Y[9:]), TARGET.diag(Y[9:])
    found = held_out_objective(KERNEL, X[:9], X[9:], grams, 0.03, 0.5)
    K, L = KERNEL.gram(X[:9]), grams[0]
    W = np.linalg.inv(K + 9 * 0.03 * np.eye(9))
    assert found.norm**2 == pytest.approx(np.trace(W @ K @ W @ L), rel=1e-9)
    a = W @ KERNEL.gram(X[:9], X[9:])
    loss = sum(1 - 2 * grams[1][:, j] @ a[:, j] + a[:, j] @ L @ a[:, j] for j in range(5))
    assert found.loss == pytest.approx(loss, rel=1e-9)
    assert found.value == pytest.approx(loss + 0.5 * found.norm, rel=1e-9)


def test_quantiles_are_those_of_the_clipped_weights():
    values = np.array([3.0, 1.0, 2.0])
    weights = np.array([[0.25, -1.0], [0.25, 0.5], [0.5, 0.0]])
    found = conditional_quantiles(values, weights, np.array([0.0, 0.25, 0.5, 0.76, 1.0]))
    np.testing.assert_array_equal(found, [[1.0, 1.0, 2.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    uniform = conditional_quantiles(values, -weights[:, :1] - 9, np.array([0.3, 0.5, 0.9]))
    np.testing.assert_array_equal(uniform, [[1.0, 2.0, 3.0]])


def test_herding_approaches_the_mean(rng):
    Y = rng.normal(size=(60, 1))
    L = TARGET.gram(Y)
    weights = rng.dirichlet(np.ones(60))
    distances = []
    for size in (5, 50):
        chosen = herd(L @ weights, L, size)
        even = np.bincount(chosen, minlength=60) / size
        distances.append(np.sqrt((even - weights) @ L @ (even - weights)))
    drawn = [np.bincount(rng.choice(60, 50, p=weights), minlength=60) / 50 for _ in range(50)]
    random = np.mean([np.sqrt((even - weights) @ L @ (even - weights)) for even in drawn])
    assert distances[1] < distances[0] / 4
    assert distances[1] < random / 3


def test_herding_takes_the_candidate_that_the_sample_so_far_lacks_most(rng):
    L = TARGET.gram(rng.normal(size=(12, 1)))
    mu = L @ rng.dirichlet(np.ones(12))
    chosen = []
    for t in range(8):
        gaps = [mu[j] - sum(L[j, s] for s in chosen) / (t + 1) for j in range(12)]
        chosen.append(int(np.argmax(gaps)))
    np.testing.assert_array_equal(herd(mu, L, 8), chosen)


def test_the_delta_kernel_compares_labels():
    assert Delta(scale=2.0).gram(["a", "b", "a"]).tolist() == [[4, 0, 4], [0, 4, 0], [4, 0, 4]]
    assert Delta().gram(np.array([1, 2]), np.array([[2], [1], [2]])).tolist() == [[0, 1, 0], [1, 0, 1]]
