"""Sums over all pairs of rows: the same from memory, from disk, by any blocks, on any workers."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster

import kme_dist as kme
from kme_dist.data.rows import rows_of
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.means import (
    evaluate_mean,
    feature_moments,
    fit_mean,
    gram_moments,
    mean_inner,
    spectral_by_centres,
    spectrum_sample,
)

KERNEL = kme.kernels.Gaussian(length_scale=[1.0, 2.0, 0.7])
SERIAL = SerialExecutor()


@pytest.fixture
def X(rng):
    return rng.normal(size=(157, 3))


@pytest.fixture
def stored(X, tmp_path):
    np.save(tmp_path / "rows.npy", X)
    return kme.ingest(tmp_path / "rows.npy", tmp_path / "rows.zarr", dtype="float64", split="train=0.8,test=0.2")


@pytest.mark.parametrize("block_rows", [1, 13, 64, 500])
def test_moments_by_blocks_are_those_of_the_gram_matrix(X, block_rows):
    rows = X if block_rows > 1 else X[:9]
    found = gram_moments(KERNEL, rows_of(rows), executor=SERIAL, block_rows=block_rows)
    n = len(rows)
    total = sum(float(np.exp(-0.5 * np.sum(((a - b) / [1.0, 2.0, 0.7]) ** 2))) for a in rows for b in rows)
    assert found.rho == pytest.approx(total / n**2, rel=1e-10)
    assert found.varrho == pytest.approx(1.0, rel=1e-12)
    assert (found.n, found.error) == (n, 0.0)


def test_a_data_set_on_disk_gives_what_its_rows_give(stored):
    train, _ = stored.read("train")
    sample = rows_of(stored)  # its training part
    assert sample.count == len(train)
    np.testing.assert_array_equal(np.concatenate([block.read()[0] for block in sample.parts(17)]), train)
    found = gram_moments(KERNEL, sample, executor=SERIAL, block_rows=31)
    assert found.rho == pytest.approx(KERNEL.gram(train).mean(), rel=1e-10)
    np.testing.assert_allclose(
        evaluate_mean(KERNEL, sample, 1 / len(train), train[:5], executor=SERIAL),
        KERNEL.gram(train[:5], train).mean(axis=1),
        rtol=1e-10,
    )
    other = rows_of(stored, split="test")
    expected = KERNEL.gram(train, stored.read("test")[0]).mean()
    assert mean_inner(KERNEL, sample, other, executor=SERIAL) == pytest.approx(expected, rel=1e-10)


def test_workers_give_the_same_bits_as_one_process(stored):
    sample = rows_of(stored)
    alone = gram_moments(KERNEL, sample, executor=SERIAL, block_rows=40)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        together = gram_moments(KERNEL, sample, executor=DaskExecutor(client), block_rows=40)
    assert (together.rho, together.varrho) == (alone.rho, alone.varrho)


@pytest.mark.parametrize(
    "kernel",
    [kme.kernels.Gaussian(1.5, scale=1.2), kme.kernels.Matern(1.5, nu=1.5), kme.kernels.Laplace(2.0)],
    ids=repr,
)
def test_random_features_estimate_rho_within_their_stated_error(kernel, X):
    frequencies = spectrum_sample(kernel, 3, 4000, seed=1)
    found = feature_moments(kernel, rows_of(X), frequencies, executor=SERIAL, block_rows=50)
    exact = gram_moments(kernel, rows_of(X), executor=SERIAL)
    assert 0 < found.error < 0.02 * exact.rho * 4
    assert abs(found.rho - exact.rho) < 4 * found.error
    assert found.varrho == pytest.approx(exact.varrho)


def distance(fitted, exact):
    return fitted.in_memory().distance(exact.in_memory())


def test_spectral_shrinkage_with_every_row_a_centre_is_the_exact_one(stored):
    sample = rows_of(stored)
    exact = fit_mean(KERNEL, sample, "s-kmse", executor=SERIAL)
    found = spectral_by_centres(KERNEL, sample, sample.count, executor=SERIAL, block_rows=31)
    assert found.regularization == pytest.approx(exact.regularization, rel=0.3)  # grids differ between half decades
    found = spectral_by_centres(
        KERNEL, sample, sample.count, executor=SERIAL, regularization=exact.regularization, block_rows=31
    )
    assert distance(found, exact) < 1e-6
    assert found.alpha == pytest.approx(exact.alpha, abs=1e-6)
    assert found.unexplained < 1e-8


@pytest.mark.parametrize("with_target", [False, True])
def test_spectral_shrinkage_with_centres_keeps_its_bound_and_comes_nearer(with_target, stored, rng):
    sample, smooth = rows_of(stored), kme.kernels.Gaussian(length_scale=3.0)
    target = None
    if with_target:
        target = kme.KernelMean("kme", smooth).fit(rng.normal(0.5, 1.0, size=(20, 3))).mean_
    exact = fit_mean(smooth, sample, "s-kmse", executor=SERIAL, regularization=0.01, target=target)
    distances = []
    for centres in (4, 12, 40):
        found = fit_mean(smooth, sample, "s-kmse", executor=SERIAL, regularization=0.01, target=target, centres=centres)
        assert found.rows.count <= centres
        distances.append(distance(found, exact))
        assert distances[-1] <= found.error_bound
    assert distances[2] < distances[1] < distances[0]
    assert distances[2] < 0.02 * exact.in_memory().norm_squared() ** 0.5


def test_spectral_shrinkage_is_the_same_on_workers(stored):
    sample = rows_of(stored)
    alone = spectral_by_centres(KERNEL, sample, 20, executor=SERIAL, block_rows=40)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        together = spectral_by_centres(KERNEL, sample, 20, executor=DaskExecutor(client), block_rows=40)
    np.testing.assert_array_equal(together.weights, alone.weights)
    assert (together.regularization, together.error_bound) == (alone.regularization, alone.error_bound)


def test_samples_are_rows_of_the_table(stored, X):
    drawn = rows_of(stored, split=None).sample(40, seed=3)[0]
    assert 0 < len(drawn) <= 40
    assert {tuple(row) for row in drawn} <= {tuple(row) for row in X}
    assert len(rows_of(["ab", "cd", "ef"]).sample(2, seed=0)[0]) == 2


def test_mistakes_are_named(X):
    with pytest.raises(DataError, match="no rows"):
        rows_of(X[:0])
    with pytest.raises(DataError, match="NaN"):
        rows_of(np.array([[np.nan]]))
    with pytest.raises(DataError, match="expected an array of shape"):
        rows_of(np.zeros(3))
    with pytest.raises(ConfigError, match="no random features"):
        spectrum_sample(kme.kernels.Linear(), 3, 10, 0)
    with pytest.raises(ConfigError, match="estimator='mean'"):
        fit_mean(KERNEL, rows_of(X), "mean", executor=SERIAL)
