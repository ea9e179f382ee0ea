"""MixtureMatching: mixtures are found again, from memory and from disk."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans

import kme_dist as kme
from kme_dist.core.density import Gaussians, matching_loss, overlap
from kme_dist.data.rows import rows_of
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.means import fit_mean


@pytest.fixture
def mixed(rng):
    return np.concatenate([rng.normal(-3, 0.6, size=(150, 2)), rng.normal(3, 1.2, size=(150, 2))])


@pytest.mark.parametrize("estimator", ["kme", "b-kmse", "s-kmse"])
def test_two_clouds_are_found_again(estimator, mixed):
    fit = kme.MixtureMatching(2, kme.kernels.Gaussian(2.0), estimator, starts=1).fit(mixed)
    order = np.argsort(fit.means_[:, 0])
    np.testing.assert_allclose(fit.means_[order], [[-3, -3], [3, 3]], atol=0.3)
    np.testing.assert_allclose(np.sqrt(fit.variances_[order]), [[0.6, 0.6], [1.2, 1.2]], atol=0.3)
    np.testing.assert_allclose(fit.shares_[order], [0.5, 0.5], atol=0.1)


def test_isotropic_components_have_one_variance_each(mixed, rng, tmp_path):
    kernel = kme.kernels.Gaussian(2.0)
    fit = kme.MixtureMatching(2, kernel, starts=1, covariance="isotropic").fit(mixed)
    np.testing.assert_array_equal(fit.variances_[:, 0], fit.variances_[:, 1])
    np.testing.assert_allclose(np.sort(np.sqrt(fit.variances_[:, 0])), [0.6, 1.2], atol=0.3)
    stretched = mixed * [1.0, 3.0]
    round_, free = (
        kme.MixtureMatching(2, kernel, starts=1, covariance=kind).fit(stretched) for kind in ("isotropic", "diagonal")
    )
    assert free.loss_ < round_.loss_  # it has more freedom
    h, target = 1e-5, fit_mean(kernel, rows_of(mixed), "kme", executor=SerialExecutor())

    def loss(variance):  # of one component, in closed form
        one = Gaussians(mixed.mean(axis=0)[None], np.full((1, 2), variance))
        found = overlap(kernel, one, mixed, np.full(len(mixed), target.weights))
        return matching_loss(kernel, np.ones(1), one, found)[0]

    single = kme.MixtureMatching(1, kernel, starts=1, covariance="isotropic").fit(mixed)
    best = single.variances_[0, 0]
    assert single.loss_ <= min(loss(best * (1 - h)), loss(best * (1 + h))) + 1e-12
    fit.save(tmp_path / "round.zarr")
    again = kme.load(tmp_path / "round.zarr")
    assert again.covariance == "isotropic"
    np.testing.assert_array_equal(again.score_samples(mixed), fit.score_samples(mixed))


@pytest.mark.parametrize("covariance", ["diagonal", "isotropic"])
def test_matched_shares_are_the_best_for_the_clusters_as_they_are(covariance, mixed, tmp_path):
    kernel = kme.kernels.Gaussian(2.0)
    fit = kme.MixtureMatching(4, kernel, starts=1, covariance=covariance, matched="shares").fit(mixed)
    clusters = Gaussians(fit.means_, fit.variances_)
    means = KMeans(4, n_init=1, random_state=0).fit(mixed).cluster_centers_
    np.testing.assert_allclose(fit.means_, means, rtol=1e-12)
    h = overlap(kernel, clusters, mixed, np.full(len(mixed), 1 / len(mixed)))
    assert fit.loss_ == pytest.approx(matching_loss(kernel, fit.shares_, clusters, h)[0], rel=1e-10)
    # The problem is convex: no share may be moved to another component at a gain (beyond the tolerance of the search).
    _, (by_share, _, _) = matching_loss(kernel, fit.shares_, clusters, h)
    inside = fit.shares_ > 1e-3
    assert np.ptp(by_share[inside]) < 1e-3
    assert by_share[~inside].min(initial=np.inf) > by_share[inside].mean() - 1e-3
    fit.save(tmp_path / "shares.zarr")
    assert kme.load(tmp_path / "shares.zarr").matched == "shares"
    everything = kme.MixtureMatching(4, kernel, starts=1, covariance=covariance).fit(mixed)
    assert everything.loss_ < fit.loss_


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_polynomial_kernels_match_moments(degree, mixed):
    kernel = kme.kernels.Linear() if degree == 1 else kme.kernels.Polynomial(degree=degree)
    fit = kme.MixtureMatching(3, kernel, starts=1).fit(mixed)
    mean = fit.shares_ @ fit.means_
    np.testing.assert_allclose(mean, mixed.mean(axis=0), atol=1e-2)
    if degree > 1:
        second = fit.shares_ @ (fit.variances_ + fit.means_**2)
        np.testing.assert_allclose(second, (mixed**2).mean(axis=0), rtol=1e-2)


def test_matching_improves_on_the_clusters_it_starts_from(mixed, rng):
    fresh = np.concatenate([rng.normal(-3, 0.6, size=(100, 2)), rng.normal(3, 1.2, size=(100, 2))])
    one = kme.MixtureMatching(1, starts=1).fit(mixed)
    four = kme.MixtureMatching(4, starts=2).fit(mixed)
    assert four.loss_ < one.loss_
    assert four.score(fresh) > one.score(fresh)
    assert four.sample(50).shape == (50, 2)


def test_a_data_set_on_disk_and_back(mixed, tmp_path):
    np.save(tmp_path / "rows.npy", mixed)
    data = kme.ingest(tmp_path / "rows.npy", tmp_path / "rows.zarr", dtype="float64")
    kernel = kme.kernels.Gaussian(2.0)
    stored, memory = (kme.MixtureMatching(2, kernel, starts=1).fit(rows) for rows in (data, mixed))
    assert stored.loss_ == pytest.approx(memory.loss_, rel=1e-8)
    stored.save(tmp_path / "mixture.zarr")
    np.testing.assert_array_equal(kme.load(tmp_path / "mixture.zarr").score_samples(mixed), stored.score_samples(mixed))


def test_mistakes_are_named(mixed):
    with pytest.raises(ConfigError, match=r"Laplace.*closed form"):
        kme.MixtureMatching(2, "laplace").fit(mixed)
    with pytest.raises(ConfigError, match="covariance='full'"):
        kme.MixtureMatching(2, covariance="full").fit(mixed)
    with pytest.raises(ConfigError, match="n_components=0"):
        kme.MixtureMatching(0).fit(mixed)
    with pytest.raises(DataError, match="features"):
        kme.MixtureMatching(1, starts=1).fit(mixed).score_samples(mixed[:, :1])
