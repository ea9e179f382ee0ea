"""Kernels of differences far from the origin: what holds near 0 holds anywhere, to the rounding of the rows themselves.

Rows at an offset are taken as they are stored. Subtracting the offset from them again is exact, so the oracle may look
at the same rows near 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracles
import pytest
from kernel_table import ARD, VECTOR_KERNELS, tanh_layer, vectors

from kme_dist.core import kernels
from kme_dist.core.embedding import Decision, Embedding
from kme_dist.core.kernels import Gaussian, Laplace, Linear, Matern, OnFeatures, Periodic, RationalQuadratic, Stationary
from kme_dist.core.kernels.base import Frame, origin_of, take
from kme_dist.core.means import Mean, tile_sums
from kme_dist.core.mmd import block_values, linear_values
from kme_dist.core.objective import loo_objective, rcb_objective, validation_objective

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}
OFFSETS = [("float32", 3e3), ("float32", 1e4), ("float64", 1e4), ("float64", 1e8), ("float64", 1.7e9)]
OF_DIFFERENCES = {
    name: kernel
    for name, kernel in VECTOR_KERNELS.items()
    if not name.startswith(("linear", "quadratic", "cubic", "sum", "product", "convex", "nested"))
}


def far(n, seed, dtype, offset):
    """Rows at the offset, and the same rows near 0."""
    X = (vectors(n, seed) + offset).astype(dtype)
    return X, X.astype(np.float64) - offset


def formula(kernel, X, X2):
    return oracles.gram(kernel, dict(kernel.parameters), X, X2)


@pytest.mark.parametrize(("dtype", "offset"), OFFSETS)
@pytest.mark.parametrize("name", OF_DIFFERENCES)
class TestOffset:
    def test_gram_is_the_one_near_the_origin(self, name, dtype, offset, arrays):
        kernel = OF_DIFFERENCES[name]
        (X, near), (X2, near2) = far(30, 1, dtype, offset), far(20, 2, dtype, offset)
        bound = 60 * UNIT[dtype] * kernel.alpha(near) ** 2
        for right, near_right in ((None, near), (X2, near2)):
            found = arrays.host(kernel.gram(arrays(X), None if right is None else arrays(right)))
            assert found.dtype == dtype
            np.testing.assert_allclose(found, formula(kernel, near, near_right), rtol=0, atol=bound)

    def test_rows_may_be_prepared_apart(self, name, dtype, offset):
        """Whoever prepares either side, and in whatever pieces: the tile is the same to the bit."""
        kernel = OF_DIFFERENCES[name]
        (X, near), (X2, near2) = far(30, 1, dtype, offset), far(20, 2, dtype, offset)
        columns = kernel.prepare(X2)
        beside = kernel.evaluate(kernel.prepare_beside(X[:7], columns), columns)
        assert (kernel.evaluate(kernel.prepare(X[:7]), columns) == beside).all()
        assert (kernel.evaluate(take(kernel.prepare(X), slice(0, 7)), columns) == beside).all()
        np.testing.assert_allclose(
            beside, formula(kernel, near[:7], near2), rtol=0, atol=60 * UNIT[dtype] * kernel.alpha(near) ** 2
        )

    def test_gradients_are_those_near_the_origin(self, name, dtype, offset, rng):
        kernel = OF_DIFFERENCES[name]
        (X, near), (X2, near2) = far(12, 1, dtype, offset), far(9, 2, dtype, offset)
        K_bar = rng.normal(size=(12, 9))
        expected = oracles.kernel_gradient(kernel, near, near2, K_bar)
        found = kernel.vjp(X, X2, K_bar.astype(dtype))
        assert oracles.relative_error(found, expected) < 100 * UNIT[dtype]
        apart = kernel.collect(kernel.pullback(kernel.prepare(X), kernel.prepare(X2), None, K_bar.astype(dtype)))
        assert oracles.relative_error(apart, expected) < 100 * UNIT[dtype]
        here = kernel.input_pullback(kernel.prepare(near), kernel.prepare(near2), K_bar + 0)
        there = kernel.input_pullback(kernel.prepare(X), kernel.prepare(X2), K_bar.astype(dtype))
        for found, expected in zip(there, here, strict=True):
            assert oracles.relative_error(found, expected) < 100 * UNIT[dtype]


@pytest.mark.parametrize("objective", [rcb_objective, validation_objective, loo_objective])
@pytest.mark.parametrize("kernel", [Gaussian(length_scale=ARD), Matern(nu=0.5), RationalQuadratic() + Laplace()])
def test_objectives_do_not_depend_on_the_offset(objective, kernel):
    X, near = far(200, 1, "float64", 1e8)
    y = np.arange(200) % 3
    more = {"train_rows": 120} if objective is validation_objective else {}
    here, there = (objective(kernel, rows, y, regularization=0.01, n_classes=3, **more) for rows in (near, X))
    assert there.value == pytest.approx(here.value, rel=1e-11)
    assert oracles.relative_error(there.gradient, here.gradient) < 1e-10


def test_decisions_do_not_depend_on_the_offset_nor_on_the_rows_beside():
    X, near = far(60, 1, "float64", 1e8)
    queries, near_queries = far(40, 2, "float64", 1e8)
    V = np.random.default_rng(0).normal(size=(60, 3))
    decide = Decision(Embedding(Gaussian(), X, V, 0.1))
    np.testing.assert_allclose(decide(queries), formula(Gaussian(), near_queries, near) @ V, rtol=0, atol=1e-13)
    queries[20:] *= -1  # others that came along, far from here
    np.testing.assert_allclose(decide(queries)[:20], decide(queries[:20]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", [Gaussian(scale=0.3), Matern(nu=0.5), Matern(nu=2.5), RationalQuadratic()])
def test_single_and_double_precision_may_meet(kernel):
    """The origin of double-precision rows is as a rule no single-precision number, and must be the same for both."""
    wide, narrow = vectors(20) * 1e-4 + 1e5, (vectors(15, 2) + 1e5).astype(np.float32)
    origin = origin_of(wide)
    assert (origin.astype(np.float32) != origin).any()
    expected = formula(kernel, wide - 1e5, narrow.astype(float) - 1e5)
    for found in (kernel.gram(wide, narrow), kernel.gram(narrow, wide).T):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", OF_DIFFERENCES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_entry_exceeds_the_diagonal(name, dtype):
    kernel = OF_DIFFERENCES[name]
    X, _ = far(150, 1, dtype, 500.0)
    X[50:] = X[:100] * (1 + np.array([0, 1, -2], dtype) * np.finfo(dtype).eps)  # neighbours by a rounding
    top = kernel.diag(X)[0]
    slack = 4 * UNIT[dtype] * top if "cosine" in name or "mixture" in name else 0.0  # a cosine is rounded like a sine
    assert kernel.gram(X).max() <= top + slack
    assert kernel.gram(X[:60], X[60:]).max() <= top + slack


@pytest.mark.parametrize("kernel", [Gaussian(), Gaussian(scale=3.0), Matern(nu=0.5), Matern(), RationalQuadratic()])
def test_neighbours_keep_their_distance_however_wide_the_rows_spread(kernel, arrays):
    """Features that nobody scaled: pairs at distance 1 among rows that spread over 1e5 length scales."""
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(60, 4)) * 1e5).astype(np.float32)
    X[30:] = X[:30] + rng.normal(size=(30, 4)).astype(np.float32)
    wide = X.astype(np.float64)
    found = arrays.host(kernel.gram(arrays(X)))
    np.testing.assert_allclose(found, formula(kernel, wide, wide), rtol=0, atol=1e-6 * kernel.alpha(X) ** 2)
    K_bar = rng.normal(size=(60, 60))
    expected = oracles.kernel_gradient(kernel, wide, wide, K_bar)
    found = kernel.vjp(arrays(X), None, arrays(K_bar, "float32"))
    assert oracles.relative_error({k: arrays.host(v) for k, v in found.items()}, expected) < 1e-4


def test_near_neighbours_under_a_rough_kernel_are_told_apart():
    """A root makes 1e-8 of a rounding error of 1e-16: the distance of neighbours comes from their difference."""
    X = vectors(20)
    X[10:] = X[:10] + 1e-9
    K, exact = Matern(nu=0.5).gram(X), formula(Matern(nu=0.5), X, X)
    np.testing.assert_allclose(1 - K, 1 - exact, rtol=1e-12, atol=2e-16)


def test_period_and_phase_keep_their_digits():
    X, near = far(20, 1, "float32", 2.0**20)
    for kernel in (Periodic(period=0.37), kernels.Cosine(frequency=17.0)):
        np.testing.assert_allclose(kernel.gram(X), formula(kernel, near, near), rtol=0, atol=1e-6)


# --- statistics built on kernels ---------------------------------------------------------------------


def test_discrepancies_and_means_do_not_depend_on_the_offset():
    """Seconds since 1970 are as good as seconds since noon."""
    kernel = Gaussian()
    (X, near), (Y, near2) = far(64, 1, "float64", 1.7e9), far(64, 2, "float64", 1.7e9)
    np.testing.assert_allclose(linear_values(kernel, X, Y), linear_values(kernel, near, near2), rtol=0, atol=1e-13)
    np.testing.assert_allclose(block_values(kernel, X, Y, 8), block_values(kernel, near, near2, 8), rtol=0, atol=1e-13)
    for left, right in (((X, None), (near, None)), ((X, Y), (near, near2))):
        assert tile_sums(kernel, *left)[0] == pytest.approx(tile_sums(kernel, *right)[0], rel=1e-13)
    weights = np.full(64, 1 / 64)
    there, here = Mean(kernel, X, weights), Mean(kernel, near, weights)
    np.testing.assert_allclose(there.evaluate(Y), here.evaluate(near2), rtol=1e-12)
    assert there.norm_squared() == pytest.approx(here.norm_squared(), rel=1e-13)


# --- the origin --------------------------------------------------------------------------------------


def test_rows_near_the_origin_are_counted_from_it(rng):
    assert origin_of(rng.normal(size=(100, 3))) is None
    assert origin_of(rng.random((100, 3))) is None
    assert origin_of(np.zeros((0, 3))) is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [1e2, -3e3, 1e5, -3.3e6])
def test_the_origin_lies_amid_the_rows_and_subtracting_it_is_exact(dtype, offset, rng):
    X = (rng.normal(size=(300, 2)) + offset).astype(dtype)
    X[5] = 1e7  # an outlier moves nothing
    origin = origin_of(X)
    assert (np.abs(origin - np.float64(offset)) < 1.5).all()
    centred = Frame(origin).subtract(X)
    assert centred.dtype == dtype
    assert (centred == X.astype(np.longdouble) - origin).all()


def test_constants_and_missing_values_do_no_harm():
    X = np.full((9, 3), 1e7)
    X[:, 1], X[:, 2] = np.nan, np.inf
    assert origin_of(X).tolist() == [1e7, 0.0, 0.0]
    X = np.ones((40, 1))
    X[7] = np.nan
    K = Gaussian().gram(X, X.copy())
    assert np.isnan(K[7]).all()
    assert (np.delete(np.delete(K, 7, 0), 7, 1) == 1).all()


def test_a_kernel_on_features_counts_features_from_their_own_origin():
    layer = tanh_layer()
    shifted = type(layer)(layer.weight, layer.bias)

    class Far(type(layer)):
        def forward(self, X):
            return super().forward(X) + 1e8

    moved = Far(**shifted.parameters)
    X, X2 = vectors(20), vectors(9, 2)
    near = moved.forward(X) - 1e8, moved.forward(X2) - 1e8
    for kernel in (OnFeatures(Gaussian(), moved), 2.0 * OnFeatures(Gaussian(), moved)):
        inner = Gaussian() if isinstance(kernel, OnFeatures) else Gaussian(scale=2**0.5)
        np.testing.assert_allclose(kernel.gram(X, X2), formula(inner, *near), rtol=0, atol=1e-14)


# --- kernels that users wrote before there were origins ----------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Logarithmic(Stationary):
    """Distances of logarithms: an embedding that no shift of the rows leaves alone."""

    def embed(self, X):
        return np.log(X) / self.length_scale

    def profile(self, s):
        return np.exp(-s)


@dataclass(frozen=True, eq=False, repr=False)
class Remembering(Gaussian):
    """Keeps something beside what its base prepares."""

    def prepare(self, X):
        return (*super().prepare(X), X[:, 0] * 2)

    def evaluate(self, X, X2, out=None):
        return super().evaluate(X, X2, out) * np.cos(X[-1][:, None] - X2[-1][None, :])


def test_an_embedding_of_ones_own_sees_the_rows_as_they_are():
    X = vectors(10) ** 2 + 500
    logs = np.log(X)
    exact = np.exp(-((logs[:, None, :] - logs[None, :, :]) ** 2).sum(axis=2))
    np.testing.assert_allclose(Logarithmic().gram(X), exact, rtol=0, atol=1e-12)
    np.testing.assert_allclose(Logarithmic().gram(X, X[:4].copy()), exact[:, :4], rtol=0, atol=1e-12)


def test_a_prepare_of_ones_own_is_never_passed_by():
    X, X2 = vectors(10) + 1e4, vectors(6, 2) + 1e4
    expected = Gaussian().gram(X, X2) * np.cos(2 * X[:, :1] - 2 * X2[:, :1].T)
    np.testing.assert_allclose(Remembering().gram(X, X2), expected, rtol=0, atol=1e-12)
    both = (Remembering() + Linear(scale=1e-4)).gram(X, X2)
    np.testing.assert_allclose(both, expected + 1e-8 * X @ X2.T, rtol=1e-12)
