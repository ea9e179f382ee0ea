"""Sparse embeddings: the steps descend to the minimum that the conditions of optimality describe."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.sparse import (
    PENALTIES,
    Splitting,
    fista,
    incomplete_cholesky,
    largest_gamma,
    objective,
    operator_distance,
    path,
    pivots,
    project,
    prox,
    refit,
)
from kme_dist.errors import ConfigError
from kme_dist.kernels import Gaussian


@pytest.fixture
def problem(rng):
    X, Y = rng.normal(size=(15, 2)), rng.normal(size=(15, 1))
    K, L = Gaussian(0.7).gram(X), Gaussian(0.3).gram(Y)
    return np.linalg.inv(K + 0.5 * np.eye(15)), K, L


def test_distance_is_the_sum_over_all_pairs_of_pairs(problem):
    W, K, L = problem
    D = W[:4, :5]
    naive = sum(
        D[i, j] * D[p, q] * L[i, p] * K[j, q] for i in range(4) for j in range(5) for p in range(4) for q in range(5)
    )
    assert operator_distance(D, 0 * D, K[:5, :5], L[:4, :4]) ** 2 == pytest.approx(naive, rel=1e-10)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_proximal_step_minimises_what_it_should(penalty, rng):
    M = rng.normal(size=(4, 3))
    M[0], M[:, 0] = 0.3 * M[0], 0.2 * M[:, 0]
    axis = {"element": None, "row": 1, "column": 0}[penalty]

    def cost(Z):
        size = np.abs(Z).sum() if axis is None else np.sqrt((Z * Z).sum(axis=axis)).sum()
        return 0.5 * np.sum((Z - M) ** 2) + 0.8 * size

    Z = prox(M, 0.8, penalty)
    assert all(cost(Z + 1e-3 * rng.normal(size=M.shape)) > cost(Z) for _ in range(200))
    assert (Z == 0).any()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_solutions_meet_the_conditions_of_optimality(penalty, problem):
    W, K, L = problem
    gamma = 0.1 * largest_gamma(W, K, L, penalty)
    M = fista(W, K, L, gamma, penalty=penalty, steps=20_000, tolerance=1e-12).weights
    G = 2 * L @ (M - W) @ K  # minus a subgradient of the penalty
    if penalty == "element":
        on = M != 0
        np.testing.assert_allclose(G[on], -gamma * np.sign(M[on]), rtol=1e-5)
        assert (np.abs(G[~on]) <= gamma * (1 + 1e-6)).all()
    else:
        axis = 1 if penalty == "row" else 0
        G, M = (G, M) if axis else (G.T, M.T)
        on = M.any(axis=1)
        directions = M[on] / np.linalg.norm(M[on], axis=1, keepdims=True)
        np.testing.assert_allclose(G[on], -gamma * directions, rtol=1e-4, atol=1e-6)
        assert (np.linalg.norm(G[~on], axis=1) <= gamma * (1 + 1e-6)).all()
        assert 0 < on.sum() < len(on)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_from_the_largest_gamma_on_all_is_zero(penalty, problem):
    W, K, L = problem
    top = largest_gamma(W, K, L, penalty)
    assert fista(W, K, L, top * 1.0001, penalty=penalty).nonzero == 0
    assert fista(W, K, L, top * 0.99, penalty=penalty).nonzero > 0


def test_a_path_goes_from_nothing_towards_the_dense_embedding(problem):
    W, K, L = problem
    found = list(path(W, K, L, gammas=8))
    assert [step.gamma for step in found] == sorted((step.gamma for step in found), reverse=True)
    distances = [step.distance for step in found]
    assert distances == sorted(distances, reverse=True)
    assert found[0].nonzero < found[-1].nonzero
    for step in found:
        assert step.distance**2 <= objective(step.weights, W, K, L, step.gamma)
        assert objective(step.weights, W, K, L, step.gamma) <= objective(W, W, K, L, step.gamma) + 1e-9


@pytest.mark.parametrize("penalty", PENALTIES)
def test_splitting_and_plain_steps_find_the_same_minimum(penalty, problem):
    W, K, L = problem
    gammas = [0.3 * largest_gamma(W, K, L, penalty)]
    (quick,) = path(W, K, L, gammas=gammas, penalty=penalty)
    (plain,) = path(W, K, L, gammas=gammas, penalty=penalty, split=False, steps=20_000, tolerance=1e-10)
    best = objective(plain.weights, W, K, L, gammas[0], penalty)
    assert objective(quick.weights, W, K, L, gammas[0], penalty) == pytest.approx(best, rel=1e-4)


def test_refitting_keeps_the_pattern_and_comes_nearer(problem):
    W, K, L = problem
    lasso = fista(W, K, L, 0.05 * largest_gamma(W, K, L), steps=3000)
    again = refit(lasso, W, K, L)
    assert ((np.asarray(again.weights) != 0) <= (np.asarray(lasso.weights) != 0)).all()
    assert again.distance < lasso.distance
    G = 2 * L @ (again.weights - W) @ K
    np.testing.assert_allclose(G[lasso.weights != 0], 0.0, atol=1e-5)


def test_pivots_are_those_of_a_pivoted_factorisation(problem):
    from scipy.linalg.lapack import dpstrf

    K = problem[1]
    _, order, rank, _ = dpstrf(K, lower=1)
    np.testing.assert_array_equal(pivots(K, 6), order[:6] - 1)
    assert len(set(pivots(K, 15).tolist())) == min(rank, 15)


def test_projection_is_the_nearest_embedding_on_its_rows_and_columns(problem, rng):
    W, K, L = problem
    rows, columns = np.array([1, 4, 7]), np.array([0, 2, 9, 11])
    found = project(W, K, L, rows, columns)
    assert found.nonzero == 12
    for _ in range(50):
        other = found.weights.copy()
        other[np.ix_(rows, columns)] += 0.01 * rng.normal(size=(3, 4))
        assert operator_distance(other, W, K, L) > found.distance
    assert incomplete_cholesky(W, K, L, 15).distance == pytest.approx(0.0, abs=1e-5)


def test_sparse_steps_run_on_every_array_library(arrays, problem):
    W, K, L = (arrays(part) for part in problem)
    step = fista(W, K, L, 0.1, steps=50)
    expected = fista(*problem, 0.1, steps=50)
    np.testing.assert_allclose(arrays.host(step.weights), expected.weights, rtol=1e-9, atol=1e-12)
    quick, _ = Splitting(W, K, L).solve(0.1, "row", W * 0, steps=30)
    np.testing.assert_allclose(
        arrays.host(quick), Splitting(*problem).solve(0.1, "row", 0 * problem[0], steps=30)[0], atol=1e-9
    )
    np.testing.assert_allclose(
        arrays.host(refit(step, W, K, L, steps=20).weights), refit(expected, *problem, steps=20).weights, atol=1e-9
    )


def test_unknown_penalties_are_named(problem):
    with pytest.raises(ConfigError, match="penalty='entry'"):
        fista(*problem, 0.1, penalty="entry")
