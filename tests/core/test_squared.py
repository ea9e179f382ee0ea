"""The leave-one-out squared error: closed forms against refits and finite differences, weights as rows."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.squared import distinct_rows, solve_rows, squared_objective, tune_squared
from kme_dist.kernels import Gaussian, Matern

N, EVALUATED, LAM = 40, 17, 0.01


@pytest.fixture
def data(rng):
    X = rng.normal(size=(N, 3))
    Y = np.stack([np.sin(X[:, 0]) + 0.1 * rng.normal(size=N), X[:, 1] ** 2 - 1], axis=1)
    return X, Y, rng.uniform(0.5, 2.0, N)


def refit_errors(kernel, X, Y, shifts):
    """y_i - f₋ᵢ(x_i), by solving n times."""
    errors = np.empty_like(Y)
    for i in range(len(X)):
        rest = np.arange(len(X)) != i
        V = np.linalg.solve(kernel.gram(X[rest]) + np.diag(shifts[rest]), Y[rest])
        errors[i] = Y[i] - kernel.gram(X[i : i + 1], X[rest])[0] @ V
    return errors


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "kernel", [Gaussian(length_scale=[1.0, 2.0, 0.7]), Matern(nu=1.5, length_scale=[1.0, 2.0, 3.0])]
)
def test_the_value_is_that_of_refits_and_the_gradient_that_of_finite_differences(kernel, weighted, data):
    X, Y, w = data
    w = w if weighted else None
    own = np.ones(N) if w is None else w

    def at(kernel, lam):
        return squared_objective(kernel, X, Y, regularization=lam, evaluated=EVALUATED, weights=w)

    out = at(kernel, LAM)
    errors = refit_errors(kernel, X, Y, own.sum() * LAM / own)[-EVALUATED:]
    squares = np.average(errors**2, axis=0, weights=own[-EVALUATED:])
    assert out.value == pytest.approx(N * 0.5 * np.log(squares).mean(), rel=1e-8)
    assert out.risk == pytest.approx(squares.mean(), rel=1e-8)
    h = 1e-5
    slope = (at(kernel, LAM * np.exp(h)).value - at(kernel, LAM * np.exp(-h)).value) / (2 * h)
    assert out.gradient["regularization"] == pytest.approx(slope, rel=1e-5)
    for d, step in enumerate(h * np.eye(3)):
        up, down = (kernel.replace({"length_scale": kernel.length_scale * np.exp(s)}) for s in (step, -step))
        slope = (at(up, LAM).value - at(down, LAM).value) / (2 * h)
        assert out.gradient["length_scale"][d] == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_solved_rows_predict_and_leave_out_like_refits(data):
    X, Y, w = data
    kernel, shift, w = Gaussian(length_scale=1.3), 0.4, w / w.mean()
    solved = solve_rows(kernel, X, Y, shift, w, 10, seed=0)
    A = kernel.gram(X) + np.diag(shift / w)
    np.testing.assert_allclose(solved.weights, np.linalg.solve(A, Y), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(solved.columns, np.linalg.inv(A)[:, solved.chosen], rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(solved.residuals, refit_errors(kernel, X, Y, shift / w)[solved.chosen], rtol=1e-8)


def test_a_row_twice_is_a_row_of_weight_two(data):
    X, Y, _ = data
    kernel, w = Matern(nu=2.5, length_scale=1.5), np.where(np.arange(N) < 5, 2.0, 1.0)
    twice = np.concatenate([np.arange(N), np.arange(5)])
    one = solve_rows(kernel, X, Y, 0.3, w, N, seed=0)
    two = solve_rows(kernel, X[twice], Y[twice], 0.3, None, N, seed=0)
    K = kernel.gram(X)
    np.testing.assert_allclose(kernel.gram(X, X[twice]) @ two.weights, K @ one.weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(two.residuals, one.residuals, rtol=1e-9)
    assert distinct_rows(X[twice], Y[twice], None)[2].tolist() == w.tolist()


def test_tuning_finds_the_length_scale_of_a_smooth_function(rng):
    X = rng.uniform(-3, 3, size=(300, 1))
    Y = np.sin(2 * X) + 0.1 * rng.normal(size=(300, 1))
    found = tune_squared(Gaussian(length_scale=0.05), X, Y, shift=1.0, trials=30, evaluated=200)
    assert found.loss == pytest.approx(0.01, rel=0.3)
    assert 0.3 < float(found.kernel.length_scale) < 2.0
    assert found.trials <= 33
