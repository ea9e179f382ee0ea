"""Conjugate gradients for many centres: products by tiles, and steps that solve the equations."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.falkon import advance, begin, kernel_product, normal_product, right_side
from kme_dist.core.kernels import Gaussian, Matern
from kme_dist.core.pivots import by_leverage
from kme_dist.core.sums import Centres

RNG = np.random.default_rng(0)
X = RNG.normal(size=(700, 3))  # more than two tiles of rows
Y = np.eye(3)[RNG.integers(0, 3, 700)]
W = RNG.integers(1, 4, 700).astype(float)


def plain(product):
    return product


def solve(A, B, precondition, steps):
    state = begin(B, precondition)
    for _ in range(steps):
        state, _ = advance(state, A @ state.P, precondition)
    return state


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weights", [None, W])
def test_products_by_tiles_are_those_of_the_whole_matrix(dtype, weights):
    kernel = Matern(length_scale=np.ones(3), nu=1.5)
    basis = Centres(kernel, X[:90].astype(dtype))
    Z, S = kernel.gram(X, X[:90]), RNG.normal(size=(90, 5))
    w = np.ones(len(X)) if weights is None else weights
    rounding = 700 * np.finfo(dtype).eps
    found = normal_product(basis, X.astype(dtype), S, weights)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, Z.T @ (w[:, None] * (Z @ S)), atol=rounding * np.abs(Z).sum() * np.abs(S).max())
    np.testing.assert_allclose(
        right_side(basis, X.astype(dtype), Y, weights), Z.T @ (w[:, None] * Y), atol=rounding * w.sum()
    )
    np.testing.assert_allclose(
        kernel_product(basis, X.astype(dtype), S), Z @ S, atol=rounding * np.abs(S).sum(axis=0).max()
    )


def test_products_with_no_rows_are_zero():
    basis, S = Centres(Gaussian(length_scale=np.ones(3)), X[:5]), np.ones((5, 2))
    assert not normal_product(basis, X[:0], S).any()
    assert kernel_product(basis, X[:0], S).shape == (0, 2)


def test_as_many_steps_as_unknowns_solve_the_system():
    A = (root := RNG.normal(size=(12, 12))) @ root.T + np.eye(12)
    B = RNG.normal(size=(12, 4))
    state = solve(A, B, plain, 14)
    np.testing.assert_allclose(state.V, np.linalg.solve(A, B), atol=1e-9)
    assert state.residuals.max() < 1e-8


def test_the_inverse_as_preconditioner_takes_one_step():
    A = (root := RNG.normal(size=(12, 12))) @ root.T + np.eye(12)
    B, inverse = RNG.normal(size=(12, 4)), np.linalg.inv(A)
    np.testing.assert_allclose(solve(A, B, lambda R: inverse @ R, 1).V, inverse @ B, atol=1e-9)


def test_columns_that_are_zero_or_solved_stay_as_they_are():
    A, B = np.diag([1.0, 2.0, 3.0]), np.array([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    state = solve(A, B, plain, 3)  # the second column is solved after one step
    np.testing.assert_allclose(state.V, np.linalg.solve(A, B), atol=1e-15)
    assert np.isfinite(state.P).all()
    assert state.residuals.tolist() == [0.0, 0.0]


def test_the_step_is_the_change_of_the_solution():
    A = np.diag(np.arange(1.0, 7.0))
    state = begin(RNG.normal(size=(6, 2)), plain)
    after, step = advance(state, A @ state.P, plain)
    np.testing.assert_array_equal(after.V, state.V + step * state.P)


def test_leverage_scores_prefer_rows_that_few_others_resemble():
    crowd, rare = 0.01 * RNG.normal(size=(950, 2)), 8 * RNG.normal(size=(50, 2))
    chosen, rates = by_leverage(Gaussian(length_scale=np.ones(2)), np.concatenate([crowd, rare]), 60, seed=0)
    assert len(np.unique(chosen)) == 60
    assert np.mean(chosen >= 950) > 0.5, "uniform sampling would take 5 % of them"
    assert rates[chosen >= 950].min() > rates[chosen < 950].max()


def test_leverage_sampling_of_all_rows_takes_each_once():
    chosen, rates = by_leverage(Gaussian(length_scale=np.ones(3)), X[:40], 50, seed=0)
    np.testing.assert_array_equal(chosen, np.arange(40))
    np.testing.assert_array_equal(rates, np.ones(40))
