"""Weights of rows: weight 2 is the row twice, weight 0 no row, and gradients are those of the weighted objective."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_table import ARD, labels, vectors

from kme_dist.core.calibration import Calibration
from kme_dist.core.embedding import Embedding, exact_solution, leave_one_out, log_loss
from kme_dist.core.kernels import Gaussian, Laplace, Linear
from kme_dist.core.masked import masked_objective
from kme_dist.core.nystrom import System
from kme_dist.core.objective import feature_objective, loo_objective, one_hot, rcb_objective, validation_objective
from kme_dist.core.regularization import leave_one_out_loss, retune_regularization
from kme_dist.core.risk import checked_weights, merge_equal_rows
from kme_dist.core.sums import Centres, OneHot, sum_rows
from kme_dist.errors import DataError

N, M, LAM, T = 18, 3, 0.02, 11
KERNELS = {"gaussian": Gaussian(length_scale=ARD), "laplace + linear": Laplace() + Linear(length_scale=ARD)}
OBJECTIVES = {
    "rcb": (rcb_objective, {}),
    "rcb, mean risk": (rcb_objective, {"risk": "mean", "complexity_weight": 0.7}),
    "erm": (rcb_objective, {"complexity_weight": 0.0}),
    "validation": (validation_objective, {"train_rows": T}),
    "validation, mean risk": (validation_objective, {"train_rows": T, "risk": "mean", "complexity_weight": 4.0}),
    "leave one out": (loo_objective, {}),
}
COUNTS = np.array([1, 2, 1, 3, 1, 1, 2, 1, 1, 1, 4, 1, 2, 1, 1, 3, 1, 1])
AGREE = 1e-9  # two ways to the same numbers in double precision, at condition numbers of 1e3


def uneven(n=N, seed=5):
    return np.random.default_rng(seed).uniform(0.2, 3.0, n)


def repeated(*arrays, counts=COUNTS):
    return tuple(np.repeat(array, counts, axis=0) for array in arrays)


def close(a, b, tolerance=AGREE):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * (1 + np.abs(b).max(initial=0.0)))


def central(value, point, step=1e-5):
    """dvalue/dpoint by central differences."""
    out = np.zeros(np.shape(point))
    for i in np.ndindex(np.shape(point)):
        up, down = (np.array(point, dtype=float) for _ in range(2))
        up[i] += step
        down[i] -= step
        out[i] = (value(up) - value(down)) / (2 * step)
    return out


# Truncation (1e-10) and rounding (1e-16 |q| / 1e-5) of central differences, with room for large third derivatives.
DIFFERENCES = 1e-5


# --- objectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_gradients_with_weights_match_central_differences(objective, kernel):
    function, settings = OBJECTIVES[objective]
    X, y, w = vectors(N), labels(N), uneven()

    def value(name, logs):
        changed, lam = kernel, LAM
        if name == "regularization":
            lam = float(np.exp(logs))
        else:
            changed = kernel.replace({name: np.exp(logs)})
        return function(changed, X, y, regularization=lam, n_classes=M, weights=w, **settings).value

    found = function(kernel, X, y, regularization=LAM, n_classes=M, weights=w, **settings).gradient
    start = {**kernel.parameters, "regularization": np.asarray(LAM)}
    for name, here in start.items():
        expected = central(lambda logs, name=name: value(name, logs), np.log(here))
        close(found[name], expected, DIFFERENCES)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "leave one out"])
def test_integer_weights_are_repeated_rows(objective):
    function, settings = OBJECTIVES[objective]
    X, y, kernel = vectors(N), labels(N), KERNELS["gaussian"]
    one = function(kernel, X, y, regularization=LAM, n_classes=M, weights=COUNTS, **settings)
    more = {**settings, "train_rows": int(COUNTS[:T].sum())} if "train_rows" in settings else settings
    X2, y2 = repeated(X, y)
    two = function(kernel, X2, y2, regularization=LAM, n_classes=M, **more)
    for name in ("value", "risk", "complexity", "bound", "accuracy"):
        close(getattr(one, name), getattr(two, name))
    for name in two.gradient:
        close(one.gradient[name], two.gradient[name])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rows_of_weight_zero_are_no_rows(objective):
    function, settings = OBJECTIVES[objective]
    X, y, w = vectors(N), labels(N), uneven()
    w[[0, 4, 12]] = 0
    X[4] = 1e3  # would be the supremum of an unbounded kernel
    kept = w > 0
    more = {**settings, "train_rows": int(kept[:T].sum())} if "train_rows" in settings else settings
    common = {"regularization": LAM, "n_classes": M}
    one = function(KERNELS["laplace + linear"], X, y, weights=w, **common, **settings)
    two = function(KERNELS["laplace + linear"], X[kept], y[kept], weights=w[kept], **common, **more)
    assert one.value == two.value
    for name in two.gradient:
        np.testing.assert_array_equal(one.gradient[name], two.gradient[name])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equal_weights_change_a_summed_risk_only(objective):
    function, settings = OBJECTIVES[objective]
    X, y = vectors(N), labels(N)
    common = {"regularization": LAM, "n_classes": M, **settings}
    plain = function(KERNELS["gaussian"], X, y, **common)
    heavy = function(KERNELS["gaussian"], X, y, weights=np.full(N, 2.0), **common)
    close(heavy.complexity, plain.complexity)
    close(heavy.accuracy, plain.accuracy)
    close(heavy.risk, plain.risk * (1 if settings.get("risk") == "mean" else 2))


@pytest.mark.parametrize("alpha", [1.0, None])
@pytest.mark.parametrize("risk", ["sum", "mean"])
def test_feature_gradients_with_weights_match_central_differences(risk, alpha, rng):
    Z, y, w = rng.normal(size=(12, 5)), labels(12), uneven(12)
    common = {"n_classes": M, "risk": risk, "alpha": alpha, "weights": w}

    def value(Z, lam=0.05):
        return feature_objective(Z, y, regularization=lam, **common).value

    found = feature_objective(Z, y, regularization=0.05, **common)
    close(found.feature_gradient, central(value, Z), DIFFERENCES)
    by_log = central(lambda log: value(Z, float(np.exp(log))), np.log(0.05))
    close(found.gradient["regularization"], by_log, DIFFERENCES)


@pytest.mark.parametrize("loss", ["log", "softmax"])
@pytest.mark.parametrize("risk", ["sum", "mean"])
def test_gradients_of_two_views_with_weights_match_central_differences(risk, loss, rng):
    Z1, Z2 = rng.normal(size=(9, 4)), rng.normal(size=(7, 4))
    y1, y2 = labels(9), labels(7)

    def value(Z1, Z2, lam=0.05):
        return masked_objective(
            Z1, Z2, y1, y2, regularization=lam, n_classes=M, risk=risk, loss=loss, alpha=None,
            weights=uneven(9), weights_eval=uneven(7),
        )  # fmt: skip

    found = value(Z1, Z2)
    close(found.feature_gradient[0], central(lambda Z: value(Z, Z2).value, Z1), DIFFERENCES)
    close(found.feature_gradient[1], central(lambda Z: value(Z1, Z).value, Z2), DIFFERENCES)
    by_log = central(lambda log: value(Z1, Z2, float(np.exp(log))).value, np.log(0.05))
    close(found.gradient["regularization"], by_log, DIFFERENCES)


def test_features_with_integer_weights_are_repeated_rows(rng):
    Z, y = rng.normal(size=(N, 5)), labels(N)
    Z2, y2 = repeated(Z, y)
    common = {"regularization": LAM, "n_classes": M, "alpha": None}
    first = np.concatenate([[0], np.cumsum(COUNTS)[:-1]])
    for one, two in [
        (feature_objective(Z, y, weights=COUNTS, **common), feature_objective(Z2, y2, **common)),
        (masked_objective(Z, Z, y, weights=COUNTS, **common), masked_objective(Z2, Z2, y2, **common)),
    ]:
        close(one.value, two.value)
        close(one.bound, two.bound)
        close(one.accuracy, two.accuracy)
        close(one.gradient["regularization"], two.gradient["regularization"])
        single = not isinstance(one.feature_gradient, tuple)
        for a, b in (
            [(one.feature_gradient, two.feature_gradient)]
            if single
            else zip(one.feature_gradient, two.feature_gradient, strict=True)
        ):
            close(a, np.add.reduceat(b, first))


# --- the exact fit, leave-one-out, calibration --------------------------------------------------------


def test_exact_weights_of_integer_weights_give_the_function_of_repeated_rows():
    X, y, kernel, new = vectors(N), labels(N), KERNELS["gaussian"], vectors(30)[N:]
    X2, y2 = repeated(X, y)
    one = Embedding(kernel, X, exact_solution(kernel, X, y, M, LAM, row_weights=COUNTS.astype(float)).weights, LAM)
    two = Embedding(kernel, X2, exact_solution(kernel, X2, y2, M, LAM).weights, LAM)
    close(one.decision(new), two.decision(new))


def test_leave_one_out_is_a_refit_without_the_row():
    X, y, w, kernel = vectors(N), labels(N), uneven(), KERNELS["gaussian"]
    Y, K = one_hot(y, M, X), kernel.gram(X)
    P, V = leave_one_out(kernel, X, Y, LAM, weights=w)
    shift = w.sum() * LAM / w
    close(V, np.linalg.solve(K + np.diag(shift), Y))
    for i in range(N):
        rest = np.arange(N) != i
        V_i = np.linalg.solve(K[np.ix_(rest, rest)] + np.diag(shift[rest]), Y[rest])
        close(P[i], K[i, rest] @ V_i)


def test_leave_one_out_loss_is_the_weighted_mean_and_ignores_weight_zero():
    X, y, w, kernel = vectors(N), labels(N), uneven(), KERNELS["gaussian"]
    w[[1, 7]] = 0
    kept = w > 0
    P, _ = leave_one_out(kernel, X[kept], one_hot(y[kept], M, X), LAM, weights=w[kept])
    own = np.maximum(P, 0.01)
    own = (own / own.sum(axis=1, keepdims=True))[np.arange(kept.sum()), y[kept]]
    expected = -np.average(np.log(own), weights=w[kept])
    close(leave_one_out_loss(kernel, X, y, M, LAM, w.sum(), 1.0, 0.01, weights=w), expected)


def test_retuned_regularization_does_not_depend_on_the_unit_of_the_weights():
    X, y, w, kernel = vectors(60), labels(60), uneven(60), KERNELS["gaussian"]
    found = [retune_regularization(kernel, X, y, M, start=LAM, floor=0.01, weights=c * w)[:2] for c in (1.0, 1024.0)]
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def test_retuned_regularization_with_integer_weights_is_that_of_repeated_rows():
    X, y, kernel, counts = vectors(60), labels(60), KERNELS["gaussian"], np.resize(COUNTS, 60)
    X2, y2 = repeated(X, y, counts=counts)
    one = retune_regularization(kernel, X, y, M, start=LAM, floor=0.01, weights=counts.astype(float))
    two = retune_regularization(kernel, X2, y2, M, start=LAM, floor=0.01)
    close(one[0], two[0])
    close(one[1], two[1])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sums_and_their_system_with_integer_weights_are_those_of_repeated_rows(dtype):
    X, y = vectors(40).astype(dtype), labels(40)
    counts = np.resize(COUNTS, 40)
    X2, y2 = repeated(X, y, counts=counts)
    basis = Centres(KERNELS["gaussian"], X[::2])
    one, two = sum_rows(basis, X, y, OneHot(M), weights=counts.astype(float)), sum_rows(basis, X2, y2, OneHot(M))
    assert one.weight == two.weight == counts.sum()
    tolerance = {"float64": 1e-12, "float32": 1e-5}[dtype]
    close(np.tril(one.G), np.tril(two.G), tolerance)
    close(one.B, two.B, tolerance)
    np.testing.assert_array_equal(one.totals, two.totals)
    if dtype == "float64":
        first, second = (System(s.G, s.B, basis.metric(), s.weight, s.noise).solve(0.01) for s in (one, two))
        new = basis.rows(vectors(50)[40:])
        close(new @ first, new @ second, 1e-6)  # G squares the condition number


def test_leave_one_out_of_a_system_of_sums_is_a_refit_without_the_row():
    X, y, w = vectors(30), labels(30), uneven(30)
    basis = Centres(KERNELS["gaussian"], X[::3])
    sums, lam = sum_rows(basis, X, y, OneHot(M), weights=w), 0.01
    Z, Y, metric = basis.rows(X), one_hot(y, M, X), basis.metric()
    loss, leverage = System(sums.G, sums.B, metric, sums.weight, 0.0).leave_one_out(lam, Z, Y, 0.01, w)
    P = np.empty_like(Y)
    A = (Z.T * w) @ Z + w.sum() * lam * metric
    for i in range(30):
        rest = np.arange(30) != i
        A_i = A - w[i] * np.outer(Z[i], Z[i])
        P[i] = Z[i] @ np.linalg.solve(A_i, (Z[rest].T * w[rest]) @ Y[rest])
    close(loss, log_loss(Y, P, 0.01, w), 1e-6)  # G squares the condition number
    close(leverage, np.sum(w * np.einsum("ij,ji->i", Z, np.linalg.solve(A, Z.T))), 1e-6)


def test_left_out_with_every_row_a_centre_is_that_of_the_exact_fit():
    X, y, w, kernel = vectors(N), labels(N), uneven(), Gaussian(length_scale=0.5)
    Y, K = one_hot(y, M, X), kernel.gram(X)
    system = System(np.asfortranarray(K.T @ (w[:, None] * K)), K.T @ (w[:, None] * Y), K, w.sum(), 0.0)
    close(system.left_out(system.factor(LAM), K, Y, w)[0], leave_one_out(kernel, X, Y, LAM, weights=w)[0], 1e-6)


@pytest.mark.parametrize("count", [1, 5, N])
def test_the_last_rows_of_an_exact_solution_are_left_out_with_their_weights(count):
    X, y, w, kernel = vectors(N), labels(N), uneven(), Gaussian(length_scale=0.5)
    found = exact_solution(kernel, X, y, M, LAM, row_weights=w, leave_out=count)
    Y, K = one_hot(y, M, X), kernel.gram(X)
    A = K + np.diag(w.sum() * LAM / w)
    for i in range(N - count, N):
        rest = np.arange(N) != i
        close(found.left_out[i - N], K[i, rest] @ np.linalg.solve(A[np.ix_(rest, rest)], Y[rest]))
    fitted = K @ found.weights
    close(found.risk, -np.average(np.log(np.clip(fitted[np.arange(N), y], 1e-15, 1)), weights=w))
    close(found.squared_norm, np.sum(found.weights * fitted))


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_calibration_with_integer_weights_is_that_of_repeated_rows(kind, rng):
    p = rng.dirichlet(np.ones(M), size=60)
    codes = np.array([rng.choice(M, p=row) for row in p])
    counts = np.resize([1, 2, 0, 3], 60)
    one = Calibration.fit(kind, p, codes, 0.01, weights=counts.astype(float))
    two = Calibration.fit(kind, *repeated(p, codes, counts=counts), 0.01)
    close(one.apply(p), two.apply(p), 1e-4 if kind == "temperature" else AGREE)  # T is searched to 1e-5


def test_log_loss_is_a_weighted_mean(rng):
    P, y = rng.dirichlet(np.ones(M), size=N), labels(N)
    one = log_loss(one_hot(y, M, P), P, 0.0, COUNTS.astype(float))
    P2, y2 = repeated(P, y)
    close(one, log_loss(one_hot(y2, M, P2), P2))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.ones(3), r"shape \(3,\) for 4 rows"),
        ([1, 1, -2, 1], r"row 2 is -2\.0"),
        ([1, np.nan, 1, 1], "row 1 is nan"),
        ([1, 1, 1, np.inf], "row 3 is inf"),
        (np.zeros(4), "all 4 weights are zero"),
    ],
)
def test_impossible_weights_are_refused_by_row(weights, words):
    with pytest.raises(DataError, match=words):
        checked_weights(weights, 4)


def test_equal_rows_are_merged_in_the_order_of_their_first_copy():
    X = np.array([[1.0, 2.0], [0.0, 5.0], [1.0, 2.0], [-0.0, 5.0], [1.0, 1.0], [3.0, 3.0]])
    y = np.array([0, 1, 0, 1, 2, 0])
    merged = merge_equal_rows(X, y, None)
    np.testing.assert_array_equal(merged.X, X[[0, 1, 4, 5]])
    np.testing.assert_array_equal(merged.y, [0, 1, 2, 0])
    np.testing.assert_array_equal(merged.weights, [2, 2, 1, 1])
    np.testing.assert_array_equal(merged.place, [0, 1, 0, 1, 2, 3])
    np.testing.assert_array_equal(merged.first, [0, 1, 4, 5])
    np.testing.assert_array_equal(merge_equal_rows(X, y, np.arange(1.0, 7.0)).weights, [4, 6, 5, 6])


def test_equal_rows_with_contradicting_labels_are_left_out_in_parts():
    cells, codes, counts = np.array([[0.0], [0.0], [1.0]]), np.array([0, 1, 1]), np.array([25, 3, 2])
    X, y = np.repeat(cells, counts, axis=0), np.repeat(codes, counts)
    merged, weighted = merge_equal_rows(X, y, None), merge_equal_rows(cells, codes, counts.astype(float))
    np.testing.assert_allclose(merged.weights, [2.5] * 10 + [1.0] * 5)
    np.testing.assert_array_equal(merged.y, [0] * 10 + [1] * 5)
    np.testing.assert_array_equal(np.unique(merged.place), [0, 10, 13])
    np.testing.assert_array_equal(X[merged.first], merged.X)
    for one, two in zip(merged[:3], weighted[:3], strict=True):
        np.testing.assert_array_equal(one, two)


def test_copies_that_contradict_nothing_are_left_out_together_unless_rows_are_few():
    X, y = vectors(40), labels(40)
    assert merge_equal_rows(np.repeat(X, 4, axis=0), np.repeat(y, 4), None).weights.tolist() == [4.0] * 40
    assert merge_equal_rows(X, y, np.full(40, 900.0)).weights.tolist() == [900.0] * 40, "weights alone are no copies"
    assert merge_equal_rows(np.repeat(X, 5, axis=0), np.repeat(y, 5), None).weights.tolist() == [1.0] * 200


def test_parts_are_no_more_rows_than_there_were_or_a_few_thousand():
    cells = np.repeat(np.arange(1000.0)[:, None], 2, axis=0)
    merged = merge_equal_rows(cells, np.tile([0, 1], 1000), np.full(2000, 50.0))
    assert merged.place is None, "one part each"
    merged = merge_equal_rows(cells[:600], np.tile([0, 1], 300), np.full(600, 50.0))
    assert merged.weights.tolist() == [50 / 3] * 1800


def test_rows_that_all_differ_are_left_as_they_are():
    X, y = vectors(30), labels(30)
    merged = merge_equal_rows(X, y, None)
    assert merged.X is X
    assert merged.weights is None
    assert merged.place is None
    assert merge_equal_rows(["a", "b"], np.array([0, 0]), None).place is None
