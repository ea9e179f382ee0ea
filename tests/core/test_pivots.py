"""Centres that stand for all rows: pivots drawn by what is left unexplained."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.kernels import Gaussian, Linear
from kme_dist.core.pivots import CHOICES, accept, choose_centres, propose, rpcholesky, unexplained


@pytest.fixture
def uneven(rng):
    """A crowd in one place and a few rows far from it: what uniform choice misses."""
    return np.concatenate([0.05 * rng.normal(size=(450, 2)), 4 * rng.normal(size=(50, 2))])


KERNEL = Gaussian(length_scale=0.5)


def test_the_factor_is_exact_at_its_pivots_and_never_too_large(uneven):
    pivots, F = rpcholesky(KERNEL, uneven, 40, seed=0)
    K = KERNEL.gram(uneven)
    np.testing.assert_allclose(F @ F[pivots].T, K[:, pivots], atol=1e-8)
    assert np.linalg.eigvalsh(K - F @ F.T).min() > -1e-8
    C = K[:, pivots]
    np.testing.assert_allclose(F @ F.T, C @ np.linalg.solve(K[np.ix_(pivots, pivots)], C.T), atol=1e-6)


def test_pivoted_centres_leave_less_than_uniform_ones(uneven):
    left = {
        how: np.mean(
            [unexplained(KERNEL, uneven, uneven[choose_centres(KERNEL, uneven, 40, how, s)]) for s in range(5)]
        )
        for how in CHOICES
    }
    assert left["rpcholesky"] < 0.5 * left["uniform"]
    assert left["kmeans++"] < 0.7 * left["uniform"]


def test_what_centres_leave_is_the_trace_of_the_residual(uneven):
    C = uneven[455:485]
    K, K_nc, K_cc = KERNEL.gram(uneven), KERNEL.gram(uneven, C), KERNEL.gram(C)
    wanted = np.trace(K - K_nc @ np.linalg.solve(K_cc + 1e-12 * np.eye(30), K_nc.T)) / np.trace(K)
    assert unexplained(KERNEL, uneven, C) == pytest.approx(wanted, rel=1e-5)


def test_an_exhausted_kernel_ends_early(rng):
    """A linear kernel of three features has rank three, whatever is asked for."""
    X = rng.normal(size=(100, 3))
    pivots, F = rpcholesky(Linear(), X, 20, seed=0)
    assert len(pivots) == 3
    np.testing.assert_allclose(F @ F.T, Linear().gram(X), atol=1e-8)
    assert len(choose_centres(KERNEL, np.zeros((50, 2)), 10, "kmeans++", 0)) == 1


def test_proposals_go_by_what_is_left(rng):
    drawn = propose(np.array([0.0, 1.0, 3.0, 0.0]), 4000, rng)
    assert set(drawn.tolist()) == {1, 2}
    assert np.mean(drawn == 2) == pytest.approx(0.75, abs=0.03)


def test_a_row_that_is_proposed_twice_is_kept_once(rng):
    K = KERNEL.gram(np.array([[0.0], [0.0], [5.0]]))
    kept, L = accept(K.copy(), rng)
    assert kept.tolist() == [0, 2]
    np.testing.assert_allclose(L @ L.T, K[np.ix_(kept, kept)], atol=1e-12)


def test_rejection_keeps_a_neighbour_as_often_as_drawing_one_by_one_would(rng):
    K = KERNEL.gram(np.array([[0.0], [0.4]]))
    left = 1 - K[0, 1] ** 2
    kept = np.mean([len(accept(K.copy(), rng)[0]) == 2 for _ in range(4000)])
    assert kept == pytest.approx(left, abs=0.03)


@pytest.mark.parametrize("how", CHOICES)
def test_a_seed_decides(how, uneven):
    first, again, other = (choose_centres(KERNEL, uneven, 20, how, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert len(np.unique(first)) == 20


def test_threads_change_no_bit(uneven):
    many = np.concatenate([uneven + shift for shift in range(12)])
    alone, shared = (rpcholesky(KERNEL, many, 60, seed=0, threads=threads) for threads in (1, 3))
    assert len(many) > 2048, "more than one tile"
    np.testing.assert_array_equal(alone[0], shared[0])
    np.testing.assert_array_equal(alone[1], shared[1])


def test_what_goes_wrong_in_a_thread_is_told(uneven):
    class Broken(Gaussian):
        def evaluate(self, X, Y, out=None):
            if len(X[0] if isinstance(X, tuple) else X) > 64:
                raise ZeroDivisionError("in a tile")
            return super().evaluate(X, Y, out=out)

    with pytest.raises(ZeroDivisionError, match="in a tile"):
        rpcholesky(Broken(length_scale=KERNEL.length_scale), uneven, 10, seed=0, threads=2)
