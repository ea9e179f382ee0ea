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


def size_of(M, penalty):
    """The penalty, as a sum over groups."""
    if penalty == "element":
        return np.abs(M).sum()
    if penalty == "pair":
        return sum(np.sqrt(sum(M[i] ** 2) + sum(M[:, i] ** 2) - M[i, i] ** 2) for i in range(len(M)))
    return np.sqrt((M * M).sum(axis=1 if penalty == "row" else 0)).sum()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_proximal_step_minimises_what_it_should(penalty, rng):
    M = rng.normal(size=(4, 4))
    M[0], M[:, 0] = 0.3 * M[0], 0.2 * M[:, 0]

    def cost(Z):
        return 0.5 * np.sum((Z - M) ** 2) + 0.8 * size_of(Z, penalty)

    Z = prox(M, 0.8, penalty)
    assert all(cost(Z + 1e-3 * rng.normal(size=M.shape)) > cost(Z) for _ in range(200))
    assert (Z == 0).any()


@pytest.mark.parametrize("penalty", ["element", "row", "column"])
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


FACTORS = np.linspace(0.3, 3.0, 8)


def plain_proximal_gradient(W, K, L, gammas, rounds):
    """Pairs by plain steps without momentum; the proximal step by cyclic steps on the groups of its dual."""
    n, C = len(W), 2 * np.linalg.norm(K, 2) * np.linalg.norm(L, 2)
    groups = [np.zeros((n, n), dtype=bool) for _ in range(n)]
    for i, group in enumerate(groups):
        group[i, :] = group[:, i] = True
    Z, duals = 0 * W, np.zeros((n, n, n))
    for _ in range(rounds):
        target = Z - 2 * L @ (Z - W) @ K / C
        for _ in range(20):
            for i, group in enumerate(groups):
                own = (target - duals.sum(axis=0) + duals[i]) * group
                duals[i] = own * min(1.0, gammas[i] / C / max(np.linalg.norm(own), 1e-300))
        Z = target - duals.sum(axis=0)
    return Z


def pair_sizes(M):
    return np.sqrt((M**2).sum(axis=1) + (M**2).sum(axis=0) - np.diag(M) ** 2)


def test_pairs_are_dropped_on_both_sides_as_by_a_plain_proximal_solver(problem):
    W, K, L = (part[:8, :8] for part in problem)
    gamma = 0.5 * largest_gamma(W, K, L, "pair")
    M = fista(W, K, L, gamma, penalty="pair", steps=20_000, tolerance=1e-12, factors=FACTORS).weights
    kept = M.any(axis=1)
    assert 0 < kept.sum() < 8
    np.testing.assert_array_equal(M.any(axis=0), kept)
    plain = plain_proximal_gradient(W, K, L, gamma * FACTORS, 200)
    np.testing.assert_allclose(M, plain, atol=1e-6 * np.abs(plain).max())

    def cost(Z):
        return operator_distance(Z, W, K, L) ** 2 + gamma * FACTORS @ pair_sizes(Z)

    quick, _ = Splitting(W, K, L).solve(gamma, "pair", 0 * W, tolerance=1e-8, factors=FACTORS)
    assert cost(quick) == pytest.approx(cost(M), rel=1e-6)
    assert min(cost(0 * W), cost(W), cost(1.01 * M)) > cost(M)
    assert objective(M, W, K, L, gamma, "pair") == pytest.approx(cost(M) + gamma * (1 - FACTORS) @ pair_sizes(M))


def test_solutions_for_pairs_meet_the_conditions_of_optimality(problem):
    """Minus the gradient is Σ_i γ_i u_i with u_i on pair i: the direction of a kept pair."""
    W, K, L = (part[:8, :8] for part in problem)
    gamma = 0.5 * largest_gamma(W, K, L, "pair")
    M = fista(W, K, L, gamma, penalty="pair", steps=20_000, tolerance=1e-12, factors=FACTORS).weights
    kept = np.flatnonzero(M.any(axis=1))
    G, direction = -2 * L @ (M - W) @ K, M[np.ix_(kept, kept)]
    pull = gamma * FACTORS[kept] / pair_sizes(M)[kept]
    expected = direction * (pull[:, None] + pull[None, :])
    expected[np.diag_indices(len(kept))] = np.diag(direction) * pull  # the diagonal is counted once
    np.testing.assert_allclose(G[np.ix_(kept, kept)], expected, rtol=1e-4, atol=1e-6)


def test_a_path_of_pairs_keeps_few_of_them_and_stays_near(rng):
    X = rng.normal(size=(40, 1))
    Y = np.sin(X) + 0.1 * rng.normal(size=(40, 1))
    K, L = Gaussian(0.7).gram(X), Gaussian(0.5).gram(Y)
    W = np.linalg.inv(K + 0.5 * np.eye(40))
    (found,) = path(W, K, L, gammas=[0.03 * largest_gamma(W, K, L, "pair")], penalty="pair")
    kept = np.asarray(found.weights).any(axis=1)
    np.testing.assert_array_equal(np.asarray(found.weights).any(axis=0), kept)
    assert 3 < kept.sum() < 25
    assert refit(found, W, K, L).distance < 0.1 * operator_distance(0 * W, W, K, L)


def test_pairs_require_the_same_rows_on_both_sides(problem):
    W, K, L = problem
    with pytest.raises(ConfigError, match="same rows"):
        fista(W[:7], K, L[:7, :7], 0.1, penalty="pair")


@pytest.mark.parametrize("penalty", PENALTIES)
def test_from_the_largest_gamma_on_all_is_zero(penalty, problem):
    W, K, L = problem
    top = largest_gamma(W, K, L, penalty)
    above = fista(W, K, L, top * 1.0001, penalty=penalty)
    if penalty == "pair":  # its proximal step is iterative, and exact far from the threshold only
        assert np.abs(above.weights).max() < 1e-6 * np.abs(W).max()
        assert np.abs(fista(W, K, L, top * 0.99, penalty=penalty).weights).max() > 1e-3 * np.abs(W).max()
    else:
        assert above.nonzero == 0
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


@pytest.mark.parametrize("penalty", ["element", "row", "column"])
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
    assert largest_gamma(W, K, L, "pair") == pytest.approx(largest_gamma(*problem, "pair"))
    (found,) = path(W, K, L, gammas=[0.2], penalty="pair", steps=5)
    (own,) = path(*problem, gammas=[0.2], penalty="pair", steps=5)
    np.testing.assert_allclose(arrays.host(found.weights), own.weights, atol=1e-6)


def test_unknown_penalties_are_named(problem):
    with pytest.raises(ConfigError, match="penalty='entry'"):
        fista(*problem, 0.1, penalty="entry")
