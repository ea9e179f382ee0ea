"""Which precision a solve is done in: what the condition of the matrix asks for, and the same for the same rows."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_table import ARD, DIFFERENTIABLE, STRING_KERNELS, labels, strings, vectors

from kme_dist import errors
from kme_dist.core import precision
from kme_dist.core.embedding import (
    Decision,
    Embedding,
    exact_solution,
    leave_one_out,
    log_loss,
    sufficient_precision,
)
from kme_dist.core.kernels import Gaussian, Laplace, Linear, Matern
from kme_dist.core.masked import masked_objective
from kme_dist.core.objective import feature_objective, loo_objective, rcb_objective, validation_objective
from kme_dist.core.precision import Need, gram_norm, is_sufficient, need_of_features, need_of_solve, smallest_shift
from kme_dist.core.regularization import retune_regularization

M = 3


def separable(n, dtype="float32", seed=0):
    """Classes that a smooth function tells apart without noise: the less regularisation, the better."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    return X.astype(dtype), (X[:, 0] > 0).astype(int) + (X[:, 1] + X[:, 2] > 0.5)


def fit(kernel, X, y, lam):
    return Embedding(kernel, X, exact_solution(kernel, X, y, M, lam).weights, lam)


# --- the rule ----------------------------------------------------------------------------------------


def test_three_digits_are_what_is_asked_of_a_precision():
    for dtype, unit in (("float32", 2.0**-24), ("float64", 2.0**-53)):
        assert is_sufficient(dtype, norm=0.0, shift=1.0)
        assert not is_sufficient(dtype, norm=1.0, shift=0.0)
        least = smallest_shift(dtype, 50.0)
        assert is_sufficient(dtype, 50.0, least * 1.001)
        assert not is_sufficient(dtype, 50.0, least * 0.999)
        assert least == pytest.approx(50 * 10 * unit / 1e-3, rel=1e-2)


@pytest.mark.parametrize("n", [1, 7, 64, 65, 500])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_norm_is_estimated_from_few_rows(name, n):
    """The largest eigenvalue of K lies below all sums of rows of |K|; a sample of them is hardly ever far below it."""
    kernel, X = DIFFERENTIABLE[name], vectors(n)
    largest = np.linalg.norm(kernel.gram(X), 2)
    sums = np.abs(kernel.gram(X)).sum(axis=1)
    found = gram_norm(kernel, X)
    assert 0.5 * largest < found <= sums.max() * (1 + 1e-12)
    assert found == gram_norm(kernel, X)


def test_single_precision_is_kept_exactly_as_long_as_it_serves():
    X = vectors(300).astype(np.float32)
    norm = gram_norm(Gaussian(), X)
    least = smallest_shift("float32", norm)
    assert need_of_solve(Gaussian(), X, 1.01 * least).dtype == "float32"
    assert need_of_solve(Gaussian(), X, 0.99 * least).dtype == "float64"
    assert need_of_solve(Gaussian(), X.astype(np.float64), 1.01 * least) == Need("float64", 0.0, 300.0)
    scaled = Gaussian(scale=10.0)  # only the shift beside the kernel counts
    assert need_of_solve(scaled, X, 101 * least).dtype == "float32"
    assert need_of_solve(scaled, X, 99 * least).dtype == "float64"


def test_the_largest_diagonal_entry_settles_what_it_can(monkeypatch):
    """No tile of K is computed where n k(x, x) says yes or k(x, x) says no."""
    monkeypatch.setattr(precision, "gram_norm", lambda kernel, X: pytest.fail("asked for a tile"))
    X = vectors(300).astype(np.float32)
    assert need_of_solve(Gaussian(), X, 300 * 1e-3).dtype == "float32"
    assert need_of_solve(Gaussian(), X, 1e-5).dtype == "float64"
    assert need_of_solve(Gaussian(), X.astype(np.float64), 1e-8).missing == 0


def test_what_double_precision_cannot_carry_is_missing_from_the_shift():
    X = np.ones((50, 2))
    need = need_of_solve(Gaussian(), X, 1e-15)
    assert need.dtype == "float64"
    assert need.missing == pytest.approx(smallest_shift("float64", 50.0) - 1e-15)
    assert need_of_solve(Gaussian(), X, 1e-15 + need.missing * 1.01).missing == 0


def test_strings_and_missing_values_and_overflow_have_their_precision():
    assert need_of_solve(STRING_KERNELS["spectrum"], strings(20), 0.1).dtype == "float64"
    X = vectors(20).astype(np.float32)
    for bad in (np.nan, np.inf, 1e30):
        X[3, 1] = bad
        assert need_of_solve(Linear(), X, 0.1) == Need("float64")


def test_features_are_judged_by_their_own_products():
    Z = np.random.default_rng(0).normal(size=(400, 5)).astype(np.float32)
    norm = np.linalg.norm(Z.T @ Z, 2)
    assert need_of_features(Z, norm / 1e2).dtype == "float32"
    assert need_of_features(Z, norm / 1e5).dtype == "float64"


# --- who follows it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [rcb_objective, validation_objective, loo_objective])
@pytest.mark.parametrize("kernel", [Gaussian(length_scale=ARD), Matern(nu=1.5), Laplace()])
def test_objectives_are_promoted_before_single_precision_loses_their_digits(function, kernel):
    """Single precision does not fail here; it would only be wrong."""
    X, y = separable(120)
    more = {"train_rows": 80} if function is validation_objective else {}
    for lam, dtype in ((1e-2, "float32"), (1e-6, "float64")):
        out = function(kernel, X, y, regularization=lam, n_classes=M, **more)
        assert (out.dtype, out.jitter) == (dtype, 0.0)
        exact = function(kernel, X.astype(np.float64), y, regularization=lam, n_classes=M, **more)
        assert out.value == pytest.approx(exact.value, rel=1e-3 if dtype == "float32" else 1e-12)


def test_features_are_promoted_and_their_gradient_comes_back_as_they_came():
    rng = np.random.default_rng(0)
    Z, y = rng.normal(size=(90, 6)), labels(90)
    Z[:, 5] = Z[:, 4] + 1e-3 * rng.normal(size=90)
    Z = Z.astype(np.float32)
    for objective in (feature_objective, lambda Z, y, **more: masked_objective(Z, Z, y, **more)):
        found, exact = (objective(rows, y, regularization=1e-7, n_classes=M) for rows in (Z, Z.astype(np.float64)))
        assert found.dtype == "float64"
        assert found.value == pytest.approx(exact.value, rel=1e-12)
        gradient = found.feature_gradient
        assert {part.dtype for part in (gradient if isinstance(gradient, tuple) else (gradient,))} == {Z.dtype}


def test_the_same_rows_are_treated_the_same_whatever_came_before():
    """Nothing is remembered from batch to batch."""
    X, y = separable(100)
    first = rcb_objective(Gaussian(), X, y, regularization=1e-4, n_classes=M)
    rcb_objective(Gaussian(), X, y, regularization=1e-12, n_classes=M)
    again = rcb_objective(Gaussian(), X, y, regularization=1e-4, n_classes=M)
    assert (first.dtype, first.value) == (again.dtype, again.value)


# --- weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [1e-2, 1e-5, 1e-8, 1e-11])
def test_single_precision_rows_are_fitted_as_well_as_double_ones(lam):
    X, y = separable(150)
    queries, _ = separable(60, seed=1)
    narrow, wide = (fit(Gaussian(), rows, y, lam) for rows in (X, X.astype(np.float64)))
    exact = wide.decision(queries.astype(np.float64))
    for found in (narrow.decision(queries.astype(np.float64)), narrow.decision(queries)):
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-3 * np.abs(exact).max())
    assert narrow.decision(queries).dtype == np.float32


def test_weights_of_a_promoted_fit_stay_in_double_precision():
    X, y = separable(150)
    assert fit(Gaussian(), X, y, 1e-2).weights.dtype == np.float32
    fitted = fit(Gaussian(), X, y, 1e-8)
    assert (fitted.centres.dtype, fitted.weights.dtype) == (np.float32, np.float64)


def test_a_sum_that_single_precision_would_lose_is_done_in_double(arrays):
    """Weights of 1e8 and both signs, which cancel."""
    X = np.repeat(vectors(20), 2, axis=0)
    V = np.random.default_rng(0).normal(size=(40, M))
    V[::2] += 1e8
    V[1::2] -= 1e8
    fitted = Embedding(Gaussian(), arrays(X, "float32"), arrays(V), 0.1)
    narrow = X.astype(np.float32).astype(np.float64)
    expected = Gaussian().gram(narrow, narrow) @ V
    found = arrays.host(Decision(fitted, "float32")(arrays(X, "float32")))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    assert sufficient_precision(fitted) == "float64"
    small = Embedding(Gaussian(), arrays(X, "float32"), arrays(V * 1e-8), 0.1)
    assert sufficient_precision(small) == "float32"


def test_regularisation_is_judged_by_what_the_fit_will_be():
    """Leave-one-out, which chooses λ, and the fit that follows see the same precision."""
    X, y = separable(200)
    for rows in (X, X.astype(np.float64)):
        kernel = Gaussian(length_scale=3.0)
        lam, loss, _ = retune_regularization(kernel, rows, y, M, start=1e-3, floor=1e-3)
        P, _ = leave_one_out(kernel, X.astype(np.float64), np.eye(M)[y], lam)
        assert loss == pytest.approx(float(log_loss(np.eye(M)[y], P, 1e-3)), rel=1e-3)


# --- beyond double precision -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_regularisation_below_double_precision_is_raised_with_a_warning(dtype):
    X, y = separable(150, dtype)
    with pytest.warns(
        errors.PrecisionWarning, match=r"regularization 1.0e-18 is too small for double precision"
    ) as seen:
        fitted = fit(Gaussian(length_scale=3.0), X, y, 1e-18)
    message = str(seen[0].message)
    for fact in ("150 rows", "1.5e-16", "The fit uses regularization"):
        assert fact in message
    right = np.mean(fitted.decision(X).argmax(axis=1) == y)
    assert right > 0.97  # not chance


def test_without_need_there_is_no_warning(recwarn):
    X, y = separable(150)
    for lam in (1e-2, 1e-6, 1e-10):
        fit(Gaussian(), X, y, lam)
    assert not recwarn.list
