"""Leave-one-out residuals, jackknife+ and weighted quantiles: closed forms against refits and plain definitions."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.conditional import marginal_weights
from kme_dist.core.intervals import LeftOut, normalised
from kme_dist.kernels import Gaussian

KERNEL = Gaussian(length_scale=0.7)
N, SHIFT = 25, 0.3


@pytest.fixture
def fit(rng):
    """X, centred y, W, queries, and the residuals that go with them."""
    X, Q = rng.normal(size=(N, 2)), rng.normal(size=(6, 2))
    y = np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=N)
    y -= y.mean()
    K = KERNEL.gram(X)
    W = np.linalg.inv(K + SHIFT * np.eye(N))
    left = LeftOut.of(W, K, ((W @ y) / np.diag(W))[:, None])
    return X, y, W, Q, left


def refits(X, y, Q):
    """f₋ᵢ at the queries and at row i, by solving n times."""
    at_queries, own = np.empty((N, len(Q))), np.empty(N)
    for i in range(N):
        rest = np.arange(N) != i
        v = np.linalg.solve(KERNEL.gram(X[rest]) + SHIFT * np.eye(N - 1), y[rest])
        at_queries[i], own[i] = KERNEL.gram(Q, X[rest]) @ v, (KERNEL.gram(X[i : i + 1], X[rest]) @ v)[0]
    return at_queries, own


def test_the_interval_is_that_of_n_refits(fit):
    X, y, W, Q, left = fit
    at_queries, own = refits(X, y, Q)
    np.testing.assert_allclose(left.residuals[:, 0], y - own, rtol=1e-9, atol=1e-12)
    f = KERNEL.gram(Q, X) @ W @ y
    reach = np.abs(y - own)[:, None]
    for coverage, under, over in ((0.9, 2, 24), (0.5, 13, 13), (0.8, 5, 21)):  # of n + 1 = 26, downwards and upwards
        low, high = left.interval(f[:, None], KERNEL.gram(Q, X), coverage, local=False)
        np.testing.assert_allclose(low[:, 0], np.sort(at_queries - reach, axis=0)[under - 1], rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(high[:, 0], np.sort(at_queries + reach, axis=0)[over - 1], rtol=1e-9, atol=1e-10)
    low, high = left.interval(f[:, None], KERNEL.gram(Q, X), 0.99, local=False)  # 25 rows cannot say
    assert np.isinf(low).all()
    assert np.isinf(high).all()


def test_local_sizes_leave_the_row_itself_out(fit):
    X, _, _, _, left = fit
    K, e = KERNEL.gram(X), left.residuals[:, 0]
    for i in range(3):
        rest = np.arange(N) != i
        a = np.linalg.solve(K[np.ix_(rest, rest)] + SHIFT * np.eye(N - 1), K[rest, i])  # the fit without row i
        w = np.maximum(a, 0) / np.maximum(a, 0).sum()
        m = 1 / np.sum(w**2)
        expected = (m * w @ np.abs(e[rest]) + 5 * np.abs(e).mean()) / (m + 5)
        assert left.sizes[i, 0] == pytest.approx(expected, rel=1e-9)


def test_intervals_grow_with_the_noise_nearby():
    near = 1e-3 * np.kron(np.eye(2), np.ones((20, 20)))  # two groups of rows, ten times the noise in the second
    e = np.concatenate([np.linspace(-0.1, 0.1, 20), np.linspace(-1, 1, 20)])[:, None]
    left = LeftOut.of(np.eye(40), near, e)
    low, high = left.interval(np.zeros((2, 1)), near[[0, -1]], 0.8)
    assert (high - low)[1, 0] > 3 * (high - low)[0, 0]
    q = left.quantiles(np.zeros(2), near[[0, -1]], np.array([0.1, 0.9]))
    assert q[1, 1] - q[1, 0] > 3 * (q[0, 1] - q[0, 0])
    low, high = left.interval(np.zeros((2, 1)), near[[0, -1]], 0.8, local=False)
    assert (high - low)[1, 0] == pytest.approx((high - low)[0, 0], rel=0.01)


def test_equal_weights_give_the_usual_quantiles(rng):
    e, levels = rng.normal(size=(19, 1)), np.array([0.05, 0.25, 0.5, 0.9])
    left = LeftOut(np.zeros((2, 19)), e, np.full((19, 1), np.abs(e).mean()))
    found = left.quantiles(np.array([10.0]), np.ones((1, 2)), levels)
    np.testing.assert_allclose(found[0], 10 + np.quantile(e, levels, method="weibull"), rtol=1e-12)
    assert np.isfinite(left.quantiles(np.zeros(1), np.ones((1, 2)), np.array([0.0, 1.0]))).all()


def test_rows_without_residuals_have_intervals_of_no_width():
    left = LeftOut.of(np.eye(30), np.eye(30), np.zeros((30, 1)))
    low, high = left.interval(np.full((2, 1), 3.0), np.ones((2, 30)), 0.9)
    np.testing.assert_array_equal(low, high)
    np.testing.assert_array_equal(normalised(np.full((4, 1), -1.0)), np.full((4, 1), 0.25))


def test_weights_of_target_centres_have_the_mean_of_the_rows(rng):
    Y = 1e3 + rng.normal(size=(200, 2)) * [1.0, 30.0]
    kernel, D = Gaussian(length_scale=np.array([1.0, 30.0])), Y[:40]
    b = marginal_weights(kernel.gram(D), kernel.gram(D, Y).mean(axis=1), D, Y.mean(axis=0))
    assert b.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(b @ D, Y.mean(axis=0), rtol=1e-12)
    h = np.cos((Y[:, 0] - 1e3) / 2)
    assert b @ h[:40] == pytest.approx(h.mean(), abs=0.02)
    assert marginal_weights(np.ones((1, 1)), np.array([0.4])) == pytest.approx([1.0])
