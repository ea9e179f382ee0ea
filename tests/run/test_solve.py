"""The final fit: exact weights, a regularisation chosen by leave-one-out, centres that stand for all rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kme_dist import errors
from kme_dist.core.embedding import clip_normalise
from kme_dist.core.kernels import Gaussian, Kernel, Linear, Matern
from kme_dist.run import solve

M = 3


def blobs(n=80, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % M
    X = rng.normal(size=(n, 2)) * 0.6
    X[:, 0] += y
    return X.astype(dtype), y


def fit(X, y, kernel=None, regularization=0.01, retune=False, **more):
    return solve.fit(kernel or Gaussian(), X, y, M, regularization=regularization, retune=retune, **more)


def plain_log_loss(P, y, floor=0.0):
    p = np.maximum(P, floor)
    total = p.sum(axis=1, keepdims=True)
    p = np.where(total > 0, p / np.where(total > 0, total, 1), 1 / M)
    return float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-15)).mean())


def test_cholesky_gives_the_formula(dtype):
    X, y = blobs(dtype=dtype)
    found = fit(X, y).embedding
    K = Gaussian().gram(X.astype(float))
    exact = np.linalg.solve(K + 80 * 0.01 * np.eye(80), np.eye(M)[y])
    assert found.weights.dtype == dtype
    np.testing.assert_allclose(found.weights, exact, atol={"float64": 1e-10, "float32": 1e-3}[dtype])
    assert found.regularization == 0.01


@pytest.mark.parametrize("floor", [0.0, 0.02])
def test_retuned_regularisation_is_the_best_by_real_refits(floor):
    X, y = blobs()
    n, solution = len(X), fit(X, y, retune=True, floor=floor)
    K, Y = Gaussian().gram(X), np.eye(M)[y]

    def refit_loss(lam):
        P = np.empty((n, M))
        for i in range(n):
            rest = np.arange(n) != i
            P[i] = K[i, rest] @ np.linalg.solve(K[np.ix_(rest, rest)] + n * lam * np.eye(n - 1), Y[rest])
        return plain_log_loss(P, y, floor)

    lam = solution.embedding.regularization
    assert solution.loo_log_loss == pytest.approx(refit_loss(lam), rel=1e-8)
    assert dict(solution.tried)[lam] == min(loss for _, loss in solution.tried)
    grid = [refit_loss(10.0**e) for e in np.arange(-6, 1.1, 0.5)]
    assert solution.loo_log_loss < min(grid) + 0.01


def test_search_walks_downhill_to_the_valley():
    for valley in (-3.2, -0.4):
        lam, loss, tried = solve.search_regularization(
            lambda lams, v=valley: [(math.log10(lam) - v) ** 2 for lam in lams], scale=1.0, start=1.0
        )
        assert abs(math.log10(lam) - valley) < 0.3
        assert loss == min(tried.values())
        assert len(tried) < 16


def test_search_without_a_finite_value_is_an_error():
    with pytest.raises(errors.NumericalError, match="not finite"):
        solve.search_regularization(lambda lams: [math.inf] * len(lams), scale=1.0, start=1.0)


def test_single_precision_that_fails_is_solved_in_double():
    X, y = np.ones((60, 2), dtype=np.float32), np.arange(60) % M
    found = fit(X, y, regularization=1e-11).embedding
    assert found.weights.dtype == np.float64
    assert (found.weights == fit(X.astype(np.float64), y, regularization=1e-11).embedding.weights).all()


class Indefinite(Kernel):
    def evaluate(self, X, X2, out=None):
        return -(X[:, :1] * 0 + 1) @ (X2[:, :1] * 0 + 1).T

    def diag(self, X):
        return X[:, 0] * 0 + 1


def test_hopeless_matrix_is_a_clear_error():
    X, y = blobs()
    with pytest.raises(errors.NumericalError, match="all 80 rows stays singular in float64") as caught:
        fit(X, y, kernel=Indefinite())
    assert (caught.value.rows, caught.value.regularization, caught.value.dtype) == (80, 0.01, "float64")


def test_one_row_and_duplicate_rows():
    X, y = blobs(n=4)
    assert fit(X[:1], y[:1], retune=True).embedding.weights.shape == (1, M)
    twice = np.repeat(X, 5, axis=0).astype(np.float32)
    solution = fit(twice, np.repeat(y, 5), retune=True)
    assert math.isfinite(solution.loo_log_loss)


# --- Nystrom ---------------------------------------------------------------------------------------


def test_all_rows_as_centres_are_exact():
    X, y = blobs()
    exact, found = fit(X, y), fit(X, y, solver="nystrom", centres=80)
    queries = np.random.default_rng(3).normal(size=(30, 2))
    np.testing.assert_allclose(found.embedding.decision(queries), exact.embedding.decision(queries), atol=1e-5)


def test_centres_solve_the_projected_problem():
    """With p centres the weights minimise |Y - K_nc V|² + nλ trace(Vᵀ K_cc V)."""
    X, y = blobs()
    found = fit(X, y, kernel=Matern(nu=1.5), solver="nystrom", centres=15, seed=2).embedding
    C = found.centres
    K_nc, K_cc = Matern(nu=1.5).gram(X, C), Matern(nu=1.5).gram(C)
    V = np.linalg.solve(K_nc.T @ K_nc + 80 * 0.01 * K_cc, K_nc.T @ np.eye(M)[y])
    np.testing.assert_allclose(found.decision(X), K_nc @ V, atol=1e-6)
    assert len(C) == 15


def test_leave_one_out_with_centres_equals_refits():
    X, y = blobs(n=40)
    solution = fit(X, y, kernel=Matern(nu=1.5), retune=True, solver="nystrom", centres=8)
    C, lam = solution.embedding.centres, solution.embedding.regularization
    K_nc, K_cc, Y = Matern(nu=1.5).gram(X, C), Matern(nu=1.5).gram(C), np.eye(M)[y]
    P = np.empty((40, M))
    for i in range(40):
        rest = np.arange(40) != i
        V = np.linalg.solve(K_nc[rest].T @ K_nc[rest] + 40 * lam * K_cc, K_nc[rest].T @ Y[rest])
        P[i] = K_nc[i] @ V
    assert solution.loo_log_loss == pytest.approx(plain_log_loss(P, y), rel=1e-5)
    assert dict(solution.tried)[lam] == min(loss for _, loss in solution.tried)


def test_centres_are_a_function_of_the_seed():
    X, y = blobs()
    first, second, other = (fit(X, y, solver="nystrom", centres=10, seed=s).embedding.centres for s in (1, 1, 2))
    assert (first == second).all()
    assert not (first == other).all()


@pytest.mark.parametrize("solver", ["cholesky", "nystrom"])
@pytest.mark.parametrize("retune", [False, True])
def test_a_device_gives_what_the_host_gives(solver, retune, device):
    X, y = blobs()
    kernel = Gaussian(length_scale=[0.8, 1.5]) + 0.1 * Linear()
    host, gpu = (fit(rows, y, kernel, retune=retune, solver=solver, centres=20) for rows in (X, device(X)))
    assert gpu.embedding.regularization == pytest.approx(host.embedding.regularization, rel=1e-9)
    queries = np.random.default_rng(3).normal(size=(30, 2))
    found = device.host(gpu.embedding.decision(device(queries)))
    np.testing.assert_allclose(found, host.embedding.decision(queries), atol=1e-7)


# --- choosing --------------------------------------------------------------------------------------


def test_the_solver_is_chosen_by_size_and_says_why(monkeypatch):
    assert solve.choose_solver("auto", 500, None, "float32", "numpy")[0] == "cholesky"
    assert solve.choose_solver("auto", 500, 100, "float32", "numpy") == ("nystrom", "100 centres were asked for")
    assert solve.choose_solver("nystrom", 500, None, "float32", "numpy") == ("nystrom", "asked for")
    monkeypatch.setattr(solve, "free_bytes", lambda backend: 1_000_000)
    name, reason = solve.choose_solver("auto", 5000, None, "float32", "numpy")
    assert name == "nystrom"
    assert "5000 rows" in reason
    with pytest.raises(errors.ConfigError, match=r"needs 0.1 GB for 5000 rows, 0.0 GB are free; use solver='nystrom'"):
        solve.choose_solver("cholesky", 5000, None, "float32", "numpy")
    with pytest.raises(errors.ConfigError, match="solver='lu' is unknown"):
        solve.choose_solver("lu", 10, None, "float32", "numpy")


def test_features_that_never_vary_leave_the_frequencies_of_the_classes():
    """A singular Gram matrix and a loss that is flat in λ: rounding must not decide."""
    X, y = np.zeros((90, 3), np.float32), np.repeat([0, 1, 2], 30)
    kernel = Gaussian(length_scale=np.ones(3))
    found = solve.fit(kernel, X, y, 3, regularization=1e-9, retune=True)
    np.testing.assert_allclose(clip_normalise(found.embedding.decision(X[:1])), [[1 / 3] * 3], atol=0.01)
