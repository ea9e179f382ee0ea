"""The objective of `auto`: leave-one-out log loss of softmax(β f); its value by refits, its gradient by differences."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_table import ARD, DIFFERENTIABLE, STRING_KERNELS, labels, strings, vectors

from kme_dist.core.calibrated import SHARPNESS, calibrated_objective, softmax_loss
from kme_dist.core.kernels import Gaussian, Linear, Matern
from kme_dist.core.objective import Workspace
from kme_dist.errors import ConfigError, DataError

N, M, LAM, BETA = 16, 3, 0.02, 4.0
# Truncation and rounding of central differences at steps of 1e-5: 1e-10 third derivatives + 1e-16 |q| / 1e-5.
DIFFERENCES = 1e-5
AGREE = 1e-9  # two ways to the same numbers in double precision, at condition numbers of 1e3
SINGLE = 2e-3  # three digits is what float32 is used for


def uneven(n=N):
    return np.random.default_rng(5).uniform(0.2, 3.0, n)


def objective(kernel, X, y, lam=LAM, beta=BETA, **options):
    return calibrated_objective(kernel, X, y, regularization=lam, sharpness=beta, n_classes=M, **options)


def refitted(kernel, X, y, lam, beta, weights, q):
    """Mean loss and accuracy at the last q rows, each under a fit without it that keeps the shifts of the others."""
    n, Y = len(y), np.eye(M)[y]
    w = np.ones(n) if weights is None else weights
    A = np.asarray(kernel.gram(X), float) + np.diag(w.sum() * lam / w)
    K, losses, right = np.asarray(kernel.gram(X), float), [], []
    for i in range(n - q, n):
        rest = np.arange(n) != i
        f = K[i, rest] @ np.linalg.solve(A[np.ix_(rest, rest)], Y[rest])
        losses.append(np.log(np.exp(beta * f).sum()) - beta * f[y[i]])
        right.append(f.argmax() == y[i])
    return np.average(losses, weights=w[-q:]), np.average(right, weights=w[-q:])


CASES = {"all": None, "one": 1, "some": 5}
WEIGHTS = {"plain": None, "weights": uneven()}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("evaluated", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kernel", [Gaussian(length_scale=ARD), Matern(nu=1.5) + Linear(scale=0.5)], ids=repr)
def test_the_value_is_that_of_refits_without_the_row(kernel, evaluated, weights):
    X, y = vectors(N), labels(N)
    q = N if evaluated is None else evaluated
    loss, accuracy = refitted(kernel, X, y, LAM, BETA, weights, q)
    for risk, factor in (("mean", 1.0), ("sum", N if weights is None else np.count_nonzero(weights))):
        found = objective(kernel, X, y, evaluated=evaluated, weights=weights, risk=risk)
        assert found.value == pytest.approx(factor * loss, rel=AGREE)
        assert found.accuracy == pytest.approx(accuracy, rel=1e-12)
    assert (found.risk, found.complexity) == (found.value, 0.0)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("evaluated", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_gradient_is_that_of_central_differences(name, evaluated, weights):
    """By the logarithms of the kernel's parameters and of λ, and by the logarithm of the sharpness."""
    kernel, X, y, step = DIFFERENTIABLE[name], vectors(N), labels(N), 1e-5
    found = objective(kernel, X, y, evaluated=evaluated, weights=weights)
    logs = {"regularization": np.log(LAM), SHARPNESS: np.log(BETA)}
    logs |= {p: np.log(v) for p, v in kernel.parameters.items() if "features." not in p}

    def value(changed):
        moved = dict(logs) | changed
        own = {p: np.exp(v) for p, v in moved.items() if p not in ("regularization", SHARPNESS)}
        lam, beta = float(np.exp(moved["regularization"])), float(np.exp(moved[SHARPNESS]))
        return objective(kernel.replace(own), X, y, lam, beta, evaluated=evaluated, weights=weights).value

    for parameter, at in logs.items():
        at, differences = np.asarray(at, float), np.zeros(np.shape(at))
        for i in np.ndindex(at.shape):
            up, down = at.copy(), at.copy()
            up[i] += step
            down[i] -= step
            differences[i] = (value({parameter: up}) - value({parameter: down})) / (2 * step)
        scale = 1 + abs(found.value) + np.abs(differences).max(initial=0.0)
        np.testing.assert_allclose(found.gradient[parameter], differences, rtol=0, atol=DIFFERENCES * scale)


@pytest.mark.parametrize("name", STRING_KERNELS)
def test_kernels_of_strings_have_a_value_and_a_gradient(name):
    kernel, X, y, step = STRING_KERNELS[name], strings(N), labels(N), 1e-5
    found = objective(kernel, X, y, evaluated=6)
    assert found.value == pytest.approx(N * refitted(kernel, X, y, LAM, BETA, None, 6)[0], rel=1e-7)
    up, down = (objective(kernel, X, y, LAM * np.exp(h), evaluated=6).value for h in (step, -step))
    assert found.gradient["regularization"] == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("evaluated", [None, 5])
@pytest.mark.parametrize("name", ["gaussian ARD", "matern 3/2", "sum", "linear"])
def test_every_array_library_gives_the_same(name, evaluated, arrays, dtype):
    kernel, X, y = DIFFERENTIABLE[name], vectors(N).astype(dtype), labels(N)
    exact = objective(kernel, X.astype(float), y, evaluated=evaluated, weights=uneven())
    found = objective(kernel, arrays(X), y, evaluated=evaluated, weights=uneven())
    tolerance = AGREE if dtype == "float64" else SINGLE
    assert found.value == pytest.approx(exact.value, rel=tolerance)
    largest = max(np.abs(g).max() for g in exact.gradient.values())
    for parameter, g in exact.gradient.items():
        np.testing.assert_allclose(found.gradient[parameter], g, rtol=0, atol=5 * tolerance * largest)


def test_a_factor_of_all_weights_changes_nothing():
    kernel, X, y, w = Gaussian(length_scale=ARD), vectors(N), labels(N), uneven()
    one = objective(kernel, X, y, evaluated=7, weights=w)
    two = objective(kernel, X, y, evaluated=7, weights=10 * w)
    assert two.value == pytest.approx(one.value, rel=AGREE)
    for name, g in one.gradient.items():
        np.testing.assert_allclose(two.gradient[name], g, rtol=1e-7, atol=1e-7 * one.value)
    same = objective(kernel, X, y, evaluated=7, weights=10 * w, risk="mean")
    assert same.value == pytest.approx(objective(kernel, X, y, evaluated=7, weights=w, risk="mean").value, rel=AGREE)


def test_equal_weights_are_no_weights_and_rows_of_weight_0_are_no_rows():
    kernel, X, y = Gaussian(length_scale=ARD), vectors(N), labels(N)
    plain, ones = objective(kernel, X, y, evaluated=5), objective(kernel, X, y, evaluated=5, weights=np.ones(N))
    assert ones.value == pytest.approx(plain.value, rel=AGREE)
    w = uneven()
    w[[2, N - 2]] = 0.0
    some, kept = objective(kernel, X, y, evaluated=5, weights=w), w > 0
    fewer = objective(kernel, X[kept], y[kept], evaluated=5, weights=w[kept])
    assert some.value == fewer.value


def test_only_the_last_rows_are_evaluated_but_all_are_fitted():
    kernel, X, y = Gaussian(length_scale=ARD), vectors(N), labels(N)
    order = np.r_[np.random.default_rng(0).permutation(N - 5), N - 5 : N]
    assert objective(kernel, X[order], y[order], evaluated=5).value == pytest.approx(
        objective(kernel, X, y, evaluated=5).value, rel=AGREE
    )
    fewer = objective(kernel, X[3:], y[3:], evaluated=5, risk="mean").value
    assert abs(fewer - objective(kernel, X, y, evaluated=5, risk="mean").value) > 1e-4
    assert objective(kernel, X, y, evaluated=1000).value == objective(kernel, X, y).value


def test_rows_far_from_the_origin_have_the_loss_of_rows_near_it():
    """At 1e8 rows have eight digits less: differences of 1e-8."""
    kernel, X, y = Gaussian(length_scale=ARD), np.round(vectors(N) * 2**20) / 2**20, labels(N)
    near, far = objective(kernel, X, y, evaluated=6), objective(kernel, X + 2.0**27, y, evaluated=6)
    assert far.value == pytest.approx(near.value, rel=1e-6)
    for name, g in near.gradient.items():
        np.testing.assert_allclose(far.gradient[name], g, rtol=1e-5, atol=1e-5 * near.value)


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_constant_features_and_equal_rows_leave_finite_numbers(offset, dtype):
    X, y = np.full((N, 3), 0.7) + offset, labels(N)
    found = objective(Gaussian(length_scale=ARD), X.astype(dtype), y)
    # Every row is decided by the frequencies of the others.
    assert np.isfinite(found.value)
    assert all(np.isfinite(g).all() for g in found.gradient.values())
    assert found.gradient["length_scale"] == pytest.approx(np.zeros(3), abs=1e-3)


def test_a_memory_that_was_used_before_changes_nothing(arrays, dtype):
    kernel, y, space = Gaussian(length_scale=ARD), labels(N), Workspace()
    X = arrays(vectors(N).astype(dtype))
    fresh = objective(kernel, X, y, evaluated=5)
    for _ in range(2):
        again = objective(kernel, X, y, evaluated=5, workspace=space)
        assert again.value == fresh.value


def test_one_row_per_class_and_two_rows():
    X = vectors(3)
    assert np.isfinite(objective(Gaussian(), X, np.arange(3)).value)
    assert np.isfinite(objective(Gaussian(), X[:2], np.array([0, 1])).value)
    assert np.isfinite(objective(Gaussian(), X[:1], np.array([2])).value)


def test_scores_of_any_size_have_a_finite_loss():
    Y, scores = np.eye(3), np.diag([1e4, -1e4, 0.0])
    loss, p = softmax_loss(Y, scores, 1 / 3)
    assert loss == pytest.approx((1e4 + np.log(2) + np.log(3)) / 3, rel=1e-12)
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-12)


@pytest.mark.parametrize("wrong", [{"lam": 0.0}, {"lam": -1.0}, {"lam": np.nan}, {"beta": 0.0}, {"beta": np.inf}])
def test_numbers_that_are_not_positive_are_refused(wrong):
    with pytest.raises(ConfigError, match="positive"):
        objective(Gaussian(), vectors(5), labels(5), **wrong)


def test_a_missing_value_is_named():
    X = vectors(N)
    X[4, 1] = np.nan
    with pytest.raises(DataError, match="row 4, column 1"):
        objective(Gaussian(), X, labels(N))
