"""Exact weights of rows in memory, and the regularisation that leave-one-out chooses for them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kme_dist import errors
from kme_dist.core.embedding import Embedding, clip_normalise, exact_solution
from kme_dist.core.kernels import Gaussian, Kernel, Linear
from kme_dist.core.regularization import retune_regularization, search_regularization

M = 3


def blobs(n=80, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % M
    X = rng.normal(size=(n, 2)) * 0.6
    X[:, 0] += y
    return X.astype(dtype), y


def fit(X, y, kernel=None, regularization=0.01, retune=False):
    kernel, lam = kernel or Gaussian(), regularization
    if retune:
        lam, _, _ = retune_regularization(kernel, X, y, M, start=lam)
    return Embedding(kernel, X, exact_solution(kernel, X, y, M, lam).weights, lam)


def plain_log_loss(P, y, floor=0.0):
    p = np.maximum(P, floor)
    total = p.sum(axis=1, keepdims=True)
    p = np.where(total > 0, p / np.where(total > 0, total, 1), 1 / M)
    return float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-15)).mean())


def test_cholesky_gives_the_formula(dtype):
    X, y = blobs(dtype=dtype)
    found = fit(X, y)
    K = Gaussian().gram(X.astype(float))
    exact = np.linalg.solve(K + 80 * 0.01 * np.eye(80), np.eye(M)[y])
    assert found.weights.dtype == dtype
    np.testing.assert_allclose(found.weights, exact, atol={"float64": 1e-10, "float32": 1e-3}[dtype])
    assert found.regularization == 0.01


@pytest.mark.parametrize("floor", [0.0, 0.02])
def test_retuned_regularisation_is_the_best_by_real_refits(floor):
    X, y = blobs()
    n, (lam, loss, tried) = len(X), retune_regularization(Gaussian(), X, y, M, start=0.01, floor=floor)
    K, Y = Gaussian().gram(X), np.eye(M)[y]

    def refit_loss(lam):
        P = np.empty((n, M))
        for i in range(n):
            rest = np.arange(n) != i
            P[i] = K[i, rest] @ np.linalg.solve(K[np.ix_(rest, rest)] + n * lam * np.eye(n - 1), Y[rest])
        return plain_log_loss(P, y, floor)

    assert loss == pytest.approx(refit_loss(lam), rel=1e-8)
    assert tried[lam] == loss == min(tried.values())
    grid = [refit_loss(10.0**e) for e in np.arange(-6, 1.1, 0.5)]
    assert loss < min(grid) + 0.01


def test_search_walks_downhill_to_the_valley():
    for valley in (-3.2, -0.4):
        lam, loss, tried = search_regularization(
            lambda lams, v=valley: [(math.log10(lam) - v) ** 2 for lam in lams], scale=1.0, start=1.0
        )
        assert abs(math.log10(lam) - valley) < 0.3
        assert loss == min(tried.values())
        assert len(tried) < 16


def test_search_without_a_finite_value_is_an_error():
    with pytest.raises(errors.NumericalError, match="not positive definite at any"):
        search_regularization(lambda lams: [math.inf] * len(lams), scale=1.0, start=1.0)


def test_single_precision_that_fails_is_solved_in_double():
    X, y = np.ones((60, 2), dtype=np.float32), np.arange(60) % M
    found = fit(X, y, regularization=1e-11)
    assert found.weights.dtype == np.float64
    assert (found.weights == fit(X.astype(np.float64), y, regularization=1e-11).weights).all()


class Indefinite(Kernel):
    def evaluate(self, X, X2, out=None):
        return -(X[:, :1] * 0 + 1) @ (X2[:, :1] * 0 + 1).T

    def diag(self, X):
        return X[:, 0] * 0 + 1


def test_hopeless_matrix_is_a_clear_error():
    X, y = blobs()
    with pytest.raises(errors.NumericalError, match="all 80 rows is singular in float64") as caught:
        fit(X, y, kernel=Indefinite())
    assert (caught.value.rows, caught.value.regularization, caught.value.dtype) == (80, 0.01, "float64")


def test_one_row_and_duplicate_rows():
    X, y = blobs(n=4)
    assert fit(X[:1], y[:1]).weights.shape == (1, M)
    twice = np.repeat(X, 5, axis=0).astype(np.float32)
    _, loss, _ = retune_regularization(Gaussian(), twice, np.repeat(y, 5), M, start=0.01)
    assert math.isfinite(loss)


@pytest.mark.parametrize("retune", [False, True])
def test_a_device_gives_what_the_host_gives(retune, device):
    X, y = blobs()
    kernel = Gaussian(length_scale=[0.8, 1.5]) + 0.1 * Linear()
    host, gpu = (fit(rows, y, kernel, retune=retune) for rows in (X, device(X)))
    assert gpu.regularization == pytest.approx(host.regularization, rel=1e-9)
    queries = np.random.default_rng(3).normal(size=(30, 2))
    np.testing.assert_allclose(device.host(gpu.decision(device(queries))), host.decision(queries), atol=1e-7)


def test_features_that_never_vary_leave_the_frequencies_of_the_classes():
    """A singular Gram matrix and a loss that is flat in λ: rounding must not decide."""
    X, y = np.zeros((90, 3), np.float32), np.repeat([0, 1, 2], 30)
    found = fit(X, y, Gaussian(length_scale=np.ones(3)), regularization=1e-9, retune=True)
    np.testing.assert_allclose(clip_normalise(found.decision(X[:1])), [[1 / 3] * 3], atol=0.01)
