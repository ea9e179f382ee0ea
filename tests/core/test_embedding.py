"""The embedding once the kernel and λ are known: weights, probabilities, entropies, expectations."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_table import ARD, STRING_KERNELS, labels, strings, vectors

from kme_dist.core import embedding as mce
from kme_dist.core.kernels import Gaussian, Linear, Matern
from kme_dist.core.objective import Workspace

M, LAM = 3, 0.05
TOLERANCE = {"float64": 1e-10, "float32": 2e-3}


def plain_weights(kernel, X, y):
    K = oracles.gram(kernel, dict(kernel.parameters), X, X)
    return np.linalg.solve(K + len(y) * LAM * np.eye(len(y)), np.eye(M)[y])


@pytest.mark.parametrize("kernel", [Gaussian(length_scale=ARD), Matern(nu=0.5), Gaussian() + Linear()])
def test_weights_and_decisions_match_the_formula(kernel, arrays, dtype):
    host, queries, y = vectors(20).astype(dtype), vectors(7, seed=9).astype(dtype), labels(20)
    X, Y = arrays(host), arrays(np.eye(M)[y], dtype)
    V = mce.solve_dual(kernel, X, Y, LAM)
    exact = plain_weights(kernel, host.astype(float), y)
    np.testing.assert_allclose(arrays.host(V), exact, rtol=0, atol=TOLERANCE[dtype] * abs(exact).max())
    found = mce.Embedding(kernel, X, V, LAM).decision(arrays(queries))
    K = oracles.gram(kernel, dict(kernel.parameters), queries.astype(float), host.astype(float))
    np.testing.assert_allclose(arrays.host(found), K @ exact, rtol=0, atol=5 * TOLERANCE[dtype])


def test_decisions_do_not_depend_on_tiles(rng):
    X, V = vectors(50), rng.normal(size=(50, M))
    queries = vectors(1300, seed=4)
    fitted = mce.Embedding(Gaussian(), X, V, LAM)
    np.testing.assert_allclose(fitted.decision(queries), Gaussian().gram(queries, X) @ V, rtol=1e-12, atol=1e-13)
    assert fitted.decision(queries[:0]).shape == (0, M)


def test_training_rows_are_fitted_as_the_regularisation_vanishes():
    X, y = vectors(15), labels(15)
    V = mce.solve_dual(Matern(nu=0.5), X, np.eye(M)[y], 1e-12)
    np.testing.assert_allclose(mce.Embedding(Matern(nu=0.5), X, V, 1e-12).decision(X), np.eye(M)[y], atol=1e-6)


def test_strings_can_be_embedded():
    texts, y = strings(20), labels(20)
    kernel = STRING_KERNELS["spectrum"]
    V = mce.solve_dual(kernel, texts, np.eye(M)[y], LAM)
    np.testing.assert_allclose(V, plain_weights(kernel, texts, y), rtol=1e-9)
    assert mce.Embedding(kernel, texts, V, LAM).decision(["acgt", "tt"]).shape == (2, M)


def test_leave_one_out_equals_refits_with_the_same_shift(arrays, dtype):
    n, kernel = 12, Gaussian(length_scale=ARD)
    host, y = vectors(n).astype(dtype), labels(n)
    Y = np.eye(M)[y]
    space = Workspace()
    for _ in range(2):  # the second time in used memory
        P, V = mce.leave_one_out(kernel, arrays(host), arrays(Y, dtype), LAM, space)
    K = oracles.gram(kernel, dict(kernel.parameters), host.astype(float), host.astype(float))
    for i in range(n):
        rest = np.arange(n) != i
        V_i = np.linalg.solve(K[np.ix_(rest, rest)] + n * LAM * np.eye(n - 1), Y[rest])
        np.testing.assert_allclose(arrays.host(P)[i], K[i, rest] @ V_i, rtol=0, atol=TOLERANCE[dtype])
    exact = plain_weights(kernel, host.astype(float), y)
    np.testing.assert_allclose(arrays.host(V), exact, rtol=0, atol=TOLERANCE[dtype] * abs(exact).max())


@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_last_rows_are_left_out_at_the_cost_of_the_factor(arrays, dtype, count):
    """The same as refits without each of them; of the other rows nothing more is computed."""
    n, kernel = 12, Gaussian(length_scale=ARD)
    host, y = vectors(n).astype(dtype), labels(n)
    found = mce.exact_solution(kernel, arrays(host), y, M, LAM, leave_out=count)
    every, _ = mce.leave_one_out(kernel, arrays(host), arrays(np.eye(M)[y], dtype), LAM)
    left_out = arrays.host(found.left_out)
    assert left_out.shape == (count, M)
    np.testing.assert_allclose(left_out, arrays.host(every)[-count:], rtol=0, atol=TOLERANCE[dtype])
    exact = plain_weights(kernel, host.astype(float), y)
    np.testing.assert_allclose(arrays.host(found.weights), exact, rtol=0, atol=TOLERANCE[dtype] * abs(exact).max())


def test_an_exact_solution_knows_the_risk_and_the_norm_of_its_function():
    X, y, kernel = vectors(15), labels(15), Matern(nu=1.5, length_scale=ARD)
    found = mce.exact_solution(kernel, X, y, M, LAM)
    assert found.left_out is None
    P = mce.Embedding(kernel, X, found.weights, LAM).decision(X)
    assert found.risk == pytest.approx(-np.log(np.clip(P[np.arange(15), y], 1e-15, 1)).mean(), rel=1e-10)
    assert found.squared_norm == pytest.approx(np.sum(found.weights * P), rel=1e-10)


# --- probabilities ---------------------------------------------------------------------------------

decisions = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
    elements=st.floats(-2, 3, allow_subnormal=False),
)


@given(P=decisions, floor=st.sampled_from([0.0, 0.01]))
def test_clip_normalised_rows_are_distributions(P, floor):
    p = mce.clip_normalise(P, floor)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(axis=1), 1.0, rtol=1e-12)
    m = P.shape[1]
    np.testing.assert_allclose(p[(P <= 0).all(axis=1)], 1 / m, rtol=1e-12)
    h = mce.entropy(P, floor)
    assert (h >= -1e-12).all()
    assert (h <= math.log(m) + 1e-12).all()


@given(P=decisions)
def test_clip_normalising_twice_changes_nothing(P):
    p = mce.clip_normalise(P)
    np.testing.assert_allclose(mce.clip_normalise(p), p, rtol=1e-12)


def test_probabilities_entropies_and_expectations(arrays, dtype):
    P = arrays([[0.5, 0.7, -0.2], [-1.0, -1.0, 0.0], [0.25, 0.25, 0.5]], dtype)
    expected = [[5 / 12, 7 / 12, 0], [1 / 3, 1 / 3, 1 / 3], [0.25, 0.25, 0.5]]
    np.testing.assert_allclose(arrays.host(mce.clip_normalise(P)), expected, rtol=1e-6)
    h = [-(5 / 12) * math.log(5 / 12) - (7 / 12) * math.log(7 / 12), math.log(3), 1.5 * math.log(2)]
    np.testing.assert_allclose(arrays.host(mce.entropy(P)), h, rtol=1e-6)
    raw = [-0.5 * math.log(0.5) - 0.7 * math.log(0.7), 0.0, 1.5 * math.log(2)]
    np.testing.assert_allclose(arrays.host(mce.rkhs_entropy(P)), raw, rtol=1e-6, atol=1e-7)
    g = [1.0, 10.0, 100.0]
    np.testing.assert_allclose(arrays.host(mce.expectation(P, g)), [-12.5, -11.0, 52.75], rtol=1e-6)
    assert arrays.host(mce.expectation(P, np.eye(3))).shape == (3, 3)


def test_floor_keeps_labels_possible(arrays, dtype):
    p = arrays.host(mce.clip_normalise(arrays([[0.5, 0.4, -0.2]], dtype), floor=0.1))
    np.testing.assert_allclose(p, [[0.5, 0.4, 0.1]], rtol=1e-6)


def test_log_loss_is_of_clip_normalised_probabilities(arrays, dtype):
    P = arrays([[0.5, 0.7, -0.2], [0.25, 0.25, 0.5], [0.2, 0.3, -0.5]], dtype)
    Y = arrays([[1, 0, 0], [0, 0, 1], [0, 0, 1]], dtype)
    first_two = math.log(5 / 12) + math.log(0.5)
    assert float(mce.log_loss(Y, P)) == pytest.approx(-(first_two + math.log(1e-15)) / 3, rel=1e-6)
    first_two = math.log(0.5 / 1.3) + math.log(0.5)
    assert float(mce.log_loss(Y, P, floor=0.1)) == pytest.approx(-(first_two + math.log(0.1 / 0.6)) / 3, rel=1e-6)


def test_a_product_from_the_upper_triangle_is_the_product(rng):
    A = rng.normal(size=(1_100, 1_100))
    A = A + A.T
    stored = np.asfortranarray(A.astype(np.float32))
    stored[np.tril_indices(1_100)] = np.nan  # where a factor lies
    wide = np.triu(A.astype(np.float32).astype(np.float64), k=1)
    V = rng.normal(size=(1_100, 3))
    expected = (wide + wide.T) @ V + np.diag(A)[:, None] * V
    np.testing.assert_allclose(mce.upper_product(stored, np.diag(A), V), expected, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("shift", [1.0, 0.05, 0.01])
def test_single_precision_is_refined_to_what_double_precision_gives(monkeypatch, shift):
    """At these shifts single precision alone has too few digits (and is not used), but its factor is good enough."""
    monkeypatch.setattr(mce, "REFINED_ROWS", 100)
    rng = np.random.default_rng(3)
    n, kernel = 700, Gaussian(length_scale=3.0)
    X = rng.normal(size=(n, 4)).astype(np.float32)
    y = rng.integers(0, M, n)
    called = []
    whole = mce._refined
    monkeypatch.setattr(mce, "_refined", lambda *arguments: called.append(1) or whole(*arguments))
    found = mce.exact_solution(kernel, X, y, M, shift / n, leave_out=50)
    expected = mce.exact_solution(kernel, X.astype(np.float64), y, M, shift / n, leave_out=50)
    assert called == ([1] if shift < 0.5 else [])
    scale = np.abs(expected.weights).max()
    assert np.abs(found.weights - expected.weights).max() <= 1e-3 * scale
    assert np.abs(np.asarray(found.left_out) - np.asarray(expected.left_out)).max() <= 5e-3
    assert found.risk == pytest.approx(expected.risk, rel=1e-3)
    assert found.squared_norm == pytest.approx(expected.squared_norm, rel=1e-3)


def test_a_shift_that_refinement_cannot_serve_is_solved_in_double(monkeypatch):
    monkeypatch.setattr(mce, "REFINED_ROWS", 100)
    rng = np.random.default_rng(4)
    X = rng.normal(size=(300, 2)).astype(np.float32)
    y = rng.integers(0, M, 300)
    kernel = Gaussian(length_scale=2.0)
    found = mce.exact_solution(kernel, X, y, M, 1e-7 / 300)
    expected = mce.exact_solution(kernel, X.astype(np.float64), y, M, 1e-7 / 300)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)
