"""Kernel means: shrinkage in closed form against slow sums, leave-one-out against n refits."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.means import (
    Mean,
    Spectrum,
    ThinSpectrum,
    centred_gram,
    centred_moments,
    gram_weights,
    joined,
    leave_one_out_score,
    mixed,
    shrinkage,
    tile_sums,
    weighted_features,
)
from kme_dist.errors import ConfigError, DataError
from kme_dist.kernels import Gaussian, Laplace, Linear, Polynomial
from kme_dist.kernels import Spectrum as SpectrumKernel

KERNEL = Gaussian(length_scale=1.3, scale=1.2)


@pytest.fixture
def K(rng):
    return KERNEL.gram(rng.normal(0.4, 1.0, size=(11, 3)))


def naive_spectral_score(K, lam):
    n, total = len(K), 0.0
    for i in range(n):
        rest = np.arange(n) != i
        inner = K[np.ix_(rest, rest)]
        beta = np.linalg.solve(inner + (n - 1) * lam * np.eye(n - 1), inner @ np.full(n - 1, 1 / (n - 1)))
        total += K[i, i] - 2 * K[i, rest] @ beta + beta @ inner @ beta
    return total / n


def naive_common_score(K, alpha):
    n, total = len(K), 0.0
    for i in range(n):
        rest = np.arange(n) != i
        beta = np.full(n - 1, (1 - alpha) / (n - 1))
        total += K[i, i] - 2 * K[i, rest] @ beta + beta @ K[np.ix_(rest, rest)] @ beta
    return total / n


@pytest.mark.parametrize("kernel", [KERNEL, Laplace(0.7), Linear(), Polynomial(degree=3)], ids=repr)
def test_sums_by_tiles_are_the_sums_of_the_gram_matrix(kernel, rng, monkeypatch):
    monkeypatch.setattr("kme_dist.core.means.TILE_ROWS", 7)
    X, Z = rng.normal(size=(23, 3)), rng.normal(size=(16, 3))
    A, B = rng.normal(size=(23, 4)), rng.normal(size=(16, 4))
    total, forms = tile_sums(kernel, X, left=A)
    naive = np.array([[float(kernel.gram(a[None], b[None])[0, 0]) for b in X] for a in X])
    assert total == pytest.approx(naive.sum(), rel=1e-10)
    np.testing.assert_allclose(forms, np.diag(A.T @ naive @ A), rtol=1e-10)
    total, forms = tile_sums(kernel, X, Z, A, B)
    cross = np.array([[float(kernel.gram(a[None], b[None])[0, 0]) for b in Z] for a in X])
    assert total == pytest.approx(cross.sum(), rel=1e-10)
    np.testing.assert_allclose(forms, np.diag(A.T @ cross @ B), rtol=1e-10)
    np.testing.assert_allclose(weighted_features(kernel, X, Z, B), cross @ B, rtol=1e-10)


def test_sums_run_on_every_array_library(arrays, rng, monkeypatch):
    monkeypatch.setattr("kme_dist.core.means.TILE_ROWS", 8)
    X, A = rng.normal(size=(20, 2)), rng.normal(size=(20, 3))
    total, forms = tile_sums(KERNEL, arrays(X), left=arrays(A))
    expected = KERNEL.gram(X)
    assert total == pytest.approx(expected.sum(), rel=1e-10)
    np.testing.assert_allclose(forms, np.diag(A.T @ expected @ A), rtol=1e-10)
    values = Mean(KERNEL, arrays(X), arrays(A[:, 0])).evaluate(arrays(X[:5]))
    np.testing.assert_allclose(arrays.host(values), expected[:5] @ A[:, 0], rtol=1e-10)


def test_spectral_shrinkage_runs_on_every_array_library(arrays, K):
    weights = gram_weights("s-kmse", arrays(K), regularization=0.05).weights
    expected = np.linalg.solve(K + len(K) * 0.05 * np.eye(len(K)), K.mean(axis=1))
    np.testing.assert_allclose(arrays.host(weights), expected, rtol=1e-9)
    assert Spectrum.of(arrays(K)).loo_scores([0.05])[0] == pytest.approx(naive_spectral_score(K, 0.05), rel=1e-10)


def test_leave_one_out_scores_of_spectral_shrinkage_equal_n_refits(K):
    lams = [1e-8, 1e-4, 1e-2, 1.0, 100.0]
    expected = [naive_spectral_score(K, lam) for lam in lams]
    np.testing.assert_allclose(Spectrum.of(K).loo_scores(lams), expected, rtol=1e-10)


def test_a_thin_spectrum_says_what_the_whole_one_says(arrays, rng):
    Z = rng.normal(0.3, 1.0, size=(12, 4))
    K, lams = Z @ Z.T, [1e-3, 0.1, 3.0]
    thin = ThinSpectrum.of(arrays(Z.T @ Z), arrays(Z.sum(axis=0)), 12)
    parts = thin.loo_sums(arrays(Z[:5]), lams) + thin.loo_sums(arrays(Z[5:]), lams)
    np.testing.assert_allclose(parts / 12, [naive_spectral_score(K, lam) for lam in lams], rtol=1e-10)
    expected = np.linalg.solve(K + 12 * 0.1 * np.eye(12), K.mean(axis=1))
    np.testing.assert_allclose(Z @ arrays.host(thin.weights(0.1)), expected, rtol=1e-9)


def test_spectral_regularization_is_where_the_refits_are_least(K):
    best, tried = Spectrum.of(K).best()
    grid = [naive_spectral_score(K, lam) for lam in 10.0 ** np.arange(-6, 3, 0.1)]
    assert tried[best] <= min(grid) + 1e-4 * abs(min(grid))


def test_b_kmse_is_the_estimated_share_of_variance(K):
    n = len(K)
    rho = sum(K[i, j] for i in range(n) for j in range(n)) / n**2
    varrho = sum(K[i, i] for i in range(n)) / n
    apart = sum(K[i, j] for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    delta = (varrho - apart) / n  # estimate of E|μ̂ - μ|²
    assert shrinkage("b-kmse", rho, varrho, n) == pytest.approx(delta / (delta + rho), rel=1e-10)
    assert shrinkage("b-kmse", rho, varrho, n) == pytest.approx((varrho - rho) / (varrho + (n - 2) * rho), rel=1e-10)
    assert shrinkage("b-kmse", rho, varrho, n, positive_part=True) == pytest.approx(delta / rho, rel=1e-10)


def test_r_kmse_minimises_the_leave_one_out_score(K):
    n, rho, varrho = len(K), K.mean(), np.diag(K).mean()
    alpha = shrinkage("r-kmse", rho, varrho, n)
    lam = n * (varrho - rho) / ((n - 1) * (n * rho - varrho))
    assert alpha == pytest.approx(lam / (1 + lam), rel=1e-10)
    assert leave_one_out_score(K, alpha) == pytest.approx(naive_common_score(K, alpha), rel=1e-10)
    for other in (alpha - 1e-3, alpha + 1e-3):
        assert naive_common_score(K, other) > naive_common_score(K, alpha)


def test_a_sample_that_says_nothing_is_shrunk_wholly():
    K = np.eye(5) - 0.1  # nρ < ϱ
    rho, varrho = K.mean(), 0.9
    assert shrinkage("r-kmse", rho, varrho, 5) == 1.0
    assert shrinkage("b-kmse", rho, varrho, 5, positive_part=True) == pytest.approx(
        min(1.0, (varrho - rho) / 4 / rho), rel=1e-12
    )
    assert naive_common_score(K, 1.0) < naive_common_score(K, 0.9)


@pytest.mark.parametrize("estimator", ["b-kmse", "r-kmse"])
def test_equal_rows_are_not_shrunk(estimator):
    K = np.ones((4, 4))
    assert shrinkage(estimator, 1.0, 1.0, 4) == 0.0
    np.testing.assert_allclose(gram_weights(estimator, K).weights, 0.25)


@pytest.mark.parametrize("estimator", ["b-kmse", "r-kmse"])
def test_shrinking_towards_a_target_is_shrinking_the_differences_from_it(estimator, rng):
    X, Z, c = rng.normal(size=(9, 2)), rng.normal(size=(4, 2)), rng.normal(size=4)
    target = Mean(KERNEL, Z, c)
    K, at_rows = KERNEL.gram(X), target.evaluate(X)
    centred = centred_gram(K, at_rows, target.norm_squared())
    rho, varrho = centred_moments(K.mean(), np.diag(K).mean(), at_rows.mean(), target.norm_squared())
    assert (rho, varrho) == (
        pytest.approx(centred.mean(), rel=1e-10),
        pytest.approx(np.diag(centred).mean(), rel=1e-10),
    )
    alpha = shrinkage(estimator, rho, varrho, 9)
    assert alpha == pytest.approx(gram_weights(estimator, centred).alpha, rel=1e-10)
    shrunk = mixed(alpha, target, Mean(KERNEL, X, np.full(9, 1 / 9)))
    expected = alpha * at_rows + (1 - alpha) * K.mean(axis=1)
    np.testing.assert_allclose(shrunk.evaluate(X), expected, rtol=1e-10)


def test_inner_products_and_distances_are_those_of_the_feature_space(rng):
    X, Z, a, b = rng.normal(size=(6, 3)), rng.normal(size=(5, 3)), rng.normal(size=6), rng.normal(size=5)
    first, second = Mean(Linear(), X, a), Mean(Linear(), Z, b)  # the feature space is R³ itself
    assert first.inner(second) == pytest.approx((a @ X) @ (b @ Z), rel=1e-10)
    assert first.distance(second) == pytest.approx(np.linalg.norm(a @ X - b @ Z), rel=1e-10)
    assert joined(first, second).norm_squared() == pytest.approx(np.sum((a @ X + b @ Z) ** 2), rel=1e-10)


def test_texts_have_means_too():
    kernel = SpectrumKernel(p=2)
    mean = Mean(kernel, ["abab", "cdcd"], np.array([0.5, 0.5]))
    assert mean.evaluate(["abab"])[0] == pytest.approx(0.5)
    assert joined(mean, mean).norm_squared() == pytest.approx(4 * mean.norm_squared())


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="different kernels"):
        Mean(KERNEL, np.zeros((1, 1)), np.ones(1)).inner(Mean(Linear(), np.zeros((1, 1)), np.ones(1)))
    with pytest.raises(DataError, match="at least two rows"):
        shrinkage("r-kmse", 1.0, 1.0, 1)
    with pytest.raises(ConfigError, match="unknown"):
        gram_weights("kmse", np.eye(2))
