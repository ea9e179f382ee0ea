"""Sums over rows: the same matrices for every basis and every right side, in parts, on a device, packed or whole."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.conditional import Delta
from kme_dist.core.features import Identity
from kme_dist.core.kernels import Gaussian, Linear, Matern
from kme_dist.core.nystrom import System
from kme_dist.core.sums import (
    Accumulator,
    Centres,
    FeatureBasis,
    OneHot,
    Ones,
    Sums,
    TargetCentres,
    packed,
    sum_rows,
    unpacked,
)

M, KERNEL = 3, Matern(nu=1.5)


@pytest.fixture
def table(rng):
    return rng.normal(size=(300, 2)), rng.integers(0, M, size=300)


@pytest.fixture
def basis(table):
    return Centres(KERNEL, table[0][:20])


@pytest.mark.parametrize("tile_rows", [4096, 64])
def test_labels_on_the_right_side(table, basis, tile_rows):
    X, y = table
    Z = KERNEL.gram(X, X[:20])
    found = sum_rows(basis, X, y, OneHot(M), tile_rows)
    np.testing.assert_allclose(found.symmetric(), Z.T @ Z, rtol=1e-12)
    np.testing.assert_allclose(found.B, Z.T @ np.eye(M)[y], rtol=1e-12)
    np.testing.assert_array_equal(found.totals, np.bincount(y))
    assert found.rows == 300


def test_target_features_on_the_right_side(table, basis):
    X, y = table
    Z, targets, D = KERNEL.gram(X, X[:20]), X[:, :1] ** 2, X[:7, :1]
    found = sum_rows(basis, X, targets, TargetCentres(Gaussian(), D))
    L = Gaussian().gram(targets, D)
    np.testing.assert_allclose(found.B, Z.T @ L, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.totals, L.sum(axis=0), rtol=1e-12)
    labels = sum_rows(basis, X, y, TargetCentres(Delta(), np.arange(M)))
    np.testing.assert_array_equal(labels.B, sum_rows(basis, X, y, OneHot(M)).B)


def test_ones_on_the_right_side_give_the_sum_of_the_rows(table):
    X, _ = table
    found = sum_rows(FeatureBasis(Identity(), 2), X, X, Ones())
    np.testing.assert_allclose(found.B[:, 0], X.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.symmetric(), X.T @ X, rtol=1e-12)
    assert (found.totals, found.rows) == (300, 300)


def test_rows_that_are_no_numbers(table, basis):
    """A kernel of lists: nothing is known of a row but what the kernel says."""
    X, y = table

    class OfLists(Matern):
        def prepare(self, rows):
            return super().prepare(np.asarray(rows))

    listed = sum_rows(Centres(OfLists(nu=1.5), X[:20].tolist()), X.tolist(), y, OneHot(M))
    np.testing.assert_allclose(listed.G, sum_rows(basis, X, y, OneHot(M)).G, rtol=1e-12)


def test_no_rows_are_a_sum_of_nothing(table, basis):
    X, y = table
    found = sum_rows(basis, X[:0], y[:0], OneHot(M))
    assert not found.G.any()
    assert found.rows == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parts_add_up(table, dtype):
    X, y = table[0].astype(dtype), table[1]
    basis = Centres(KERNEL, X[:20])
    whole = sum_rows(basis, X, y, OneHot(M))
    chunks = Accumulator(basis, OneHot(M), X)
    chunks.add(X[:130], y[:130])
    chunks.add(X[130:], y[130:])
    first, second = sum_rows(basis, X[:130], y[:130], OneHot(M)), sum_rows(basis, X[130:], y[130:], OneHot(M))
    added, together = first.copy(), first + second
    added += second
    shipped = first.copy()
    shipped.add_packed(Sums(packed(second.G), second.B, second.totals, second.rows, second.variance))
    for found in (chunks.sums(), added, together, shipped):
        # An entry is rounded by the size of the largest sums, not by its own.
        bound = 8 * np.finfo(dtype).eps * whole.G.max()
        np.testing.assert_allclose(np.tril(found.G), np.tril(whole.G), rtol=0, atol=bound)
        np.testing.assert_allclose(found.B, whole.B, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found.totals, whole.totals)
        assert found.rows == 300
    added -= second
    np.testing.assert_allclose(np.tril(added.G), np.tril(first.G), rtol=1e-9)
    assert added.rows == 130


def test_a_triangle_is_packed_and_brought_back(rng):
    G = np.asfortranarray(np.tril(rng.normal(size=(600, 600))))
    np.testing.assert_array_equal(unpacked(packed(G), 600), G)


def test_a_device_gives_what_the_host_gives(table, device):
    X, y = table
    kernel = Gaussian(length_scale=[0.8, 1.5]) + 0.1 * Linear()
    weights, losses = [], []
    for rows, host in ((X, np.asarray), (device(X), device.host)):
        basis = Centres(kernel, rows[:20, ...])
        sums = sum_rows(basis, rows, y, OneHot(M))
        system = System(sums.G, sums.B, basis.metric(), sums.rows, sums.noise)
        Z = basis.wide.rows(rows)
        losses.append(system.leave_one_out(1e-3, Z, OneHot(M).rows(y, Z), 1e-3)[0])
        weights.append(host(system.solve(1e-3)))
    K = kernel.gram(X, X[:20])
    np.testing.assert_allclose(K @ weights[1], K @ weights[0], atol=1e-7)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
