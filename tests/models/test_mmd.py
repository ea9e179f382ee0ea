"""The two-sample test: statistics against slow sums, levels and power, in memory and out of core."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import kme_dist as kme
from kme_dist.core.mmd import block_values, linear_values, spectral_null, unbiased_of_gram
from kme_dist.data.rows import rows_of
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.mmd import _labels, _relabelled
from kme_dist.run.executors import SerialExecutor

KERNEL = kme.kernels.Gaussian(length_scale=1.1)


def naive_unbiased(X, Y):
    k = lambda a, b: float(np.exp(-0.5 * np.sum((a - b) ** 2) / 1.21))  # noqa: E731
    m, n = len(X), len(Y)
    xx = sum(k(X[i], X[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    yy = sum(k(Y[i], Y[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return xx + yy - 2 * sum(k(x, y) for x in X for y in Y) / (m * n)


@pytest.fixture
def samples(rng):
    return rng.normal(size=(21, 2)), rng.normal(0.5, 1.0, size=(16, 2))


def test_the_statistic_is_the_sum_over_all_pairs(samples):
    X, Y = samples
    found = kme.mmd_test(X, Y, KERNEL, permutations=10)
    assert found.statistic == pytest.approx(naive_unbiased(X, Y), rel=1e-9)
    assert unbiased_of_gram(KERNEL.gram(X), KERNEL.gram(Y), KERNEL.gram(X, Y)) == pytest.approx(found.statistic)


def test_every_relabelling_is_the_statistic_of_the_relabelled_samples(samples, monkeypatch):
    monkeypatch.setattr("kme_dist.models.mmd._BLOCK_ROWS", 6)
    X, Y = samples
    bits = _labels(21, 16, 5, np.random.default_rng(0))
    values = _relabelled(KERNEL, rows_of(X), rows_of(Y), bits, SerialExecutor())
    pooled, labels = np.concatenate([X, Y]), np.unpackbits(bits, axis=1).astype(bool)
    assert len(values) == 6
    for b, value in enumerate(values):
        assert value == pytest.approx(naive_unbiased(pooled[labels[:, b]], pooled[~labels[:, b]]), rel=1e-9)


def test_block_and_linear_values_are_those_of_their_rows(samples):
    X, Y = samples
    found = block_values(KERNEL, X, Y, 5)
    expected = [naive_unbiased(X[i : i + 5], Y[i : i + 5]) for i in (0, 5, 10)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    k = lambda a, b: float(KERNEL.gram(a[None], b[None])[0, 0])  # noqa: E731
    pairs = [k(X[i], X[i + 1]) + k(Y[i], Y[i + 1]) - k(X[i], Y[i + 1]) - k(X[i + 1], Y[i]) for i in range(0, 16, 2)]
    np.testing.assert_allclose(linear_values(KERNEL, X, Y), pairs, rtol=1e-9)


def test_the_statistics_are_the_same_on_every_array_library(arrays, samples):
    X, Y = (arrays(rows) for rows in samples)
    np.testing.assert_allclose(block_values(KERNEL, X, Y, 5), block_values(KERNEL, *samples, 5), rtol=1e-9)
    np.testing.assert_allclose(linear_values(KERNEL, X, Y), linear_values(KERNEL, *samples), rtol=1e-9)
    null = [spectral_null(KERNEL.gram(rows), 21, 16, 50, np.random.default_rng(0)) for rows in (X, samples[0])]
    np.testing.assert_allclose(null[0], null[1], rtol=1e-8)


METHODS = [
    {"method": "unbiased", "null": "permutation"},
    {"method": "unbiased", "null": "spectral"},
    {"method": "block"},
    {"method": "linear"},
]


@pytest.mark.parametrize("settings", METHODS, ids=lambda s: "-".join(s.values()))
def test_it_keeps_its_level_and_has_power(settings, rng):
    rejected, found = 0, 0
    for _ in range(25):
        X, Y, Z = rng.normal(size=(60, 2)), rng.normal(size=(60, 2)), rng.normal(2.0, 1.0, size=(60, 2))
        rejected += kme.mmd_test(X, Y, KERNEL, permutations=60, **settings).rejects(0.1)
        found += kme.mmd_test(X, Z, KERNEL, permutations=60, **settings).rejects(0.1)
    assert rejected <= 8  # of 25; 2.5 are expected, and more than 8 have probability 0.0005
    assert found >= 23


def test_the_spectral_null_is_the_law_of_the_statistic(rng):
    draws = [
        unbiased_of_gram(KERNEL.gram(X), KERNEL.gram(Y), KERNEL.gram(X, Y))
        for X, Y in (rng.normal(size=(2, 50, 2)) for _ in range(600))
    ]
    null = spectral_null(KERNEL.gram(rng.normal(size=(300, 2))), 50, 50, 4000, rng)
    assert np.mean(null) == pytest.approx(0.0, abs=1e-3)
    assert np.std(null) == pytest.approx(np.std(draws), rel=0.15)
    assert np.quantile(null, 0.9) == pytest.approx(np.quantile(draws, 0.9), rel=0.25)


@pytest.mark.parametrize("method", ["unbiased", "block", "linear"])
def test_data_sets_on_disk_give_what_arrays_give(method, samples, tmp_path):
    stored = []
    for i, rows in enumerate(samples):
        np.save(tmp_path / f"{i}.npy", rows)
        stored.append(kme.ingest(tmp_path / f"{i}.npy", tmp_path / f"{i}.zarr", dtype="float64"))
    memory = kme.mmd_test(*samples, KERNEL, method=method, permutations=20)
    disk = kme.mmd_test(*stored, KERNEL, method=method, permutations=20)
    assert (disk.statistic, disk.p_value) == (pytest.approx(memory.statistic), pytest.approx(memory.p_value))


def test_texts_can_be_compared():
    found = kme.mmd_test(["abab", "abba"] * 6, ["xyxy", "yxxy"] * 6, kme.kernels.Spectrum(p=2), permutations=50)
    assert found.rejects(0.05)


def test_mistakes_are_named(samples):
    X, Y = samples
    with pytest.raises(ConfigError, match="method='quick'"):
        kme.mmd_test(X, Y, method="quick")
    with pytest.raises(ConfigError, match="null='normal'"):
        kme.mmd_test(X, Y, null="normal")
    with pytest.raises(DataError, match="at least two rows"):
        kme.mmd_test(X[:1], Y)
    with pytest.raises(ConfigError, match="block_size=99"):
        kme.mmd_test(X, Y, method="block", block_size=99)


@pytest.mark.parametrize("kind", [pd.DataFrame, pa.table], ids=["pandas", "arrow"])
def test_tables_of_numbers_are_tested_and_texts_are_named(kind):
    a, b = np.random.default_rng(0).normal(size=(2, 20))
    given = kme.mmd_test(kind({"a": a[:10], "b": b[:10]}), kind({"a": a[10:], "b": b[10:]}))
    rows = np.column_stack([a, b])
    assert given.p_value == kme.mmd_test(rows[:10], rows[10:]).p_value
    table = kind({"b": b, "a": ["u", "v"] * 10})
    with pytest.raises(DataError, match=r"column 'a' holds 'u' \(str\) in row 0, .* encode the column"):
        kme.mmd_test(table, table)
    texts = pd.DataFrame({"a": ["u", "v"] * 10})
    with pytest.raises(DataError, match=r"the first sample: rows are sequences .*\(row 0 is \['u'\]\).* Gaussian does"):
        kme.mmd_test(texts, texts)


@pytest.mark.parametrize("method", ["unbiased", "block", "linear"])
@pytest.mark.parametrize("value", [1e160, 1e300])
def test_a_sample_whose_squares_overflow_is_named_in_place_of_a_p_value_of_nan(method, value):
    rows = np.random.default_rng(0).normal(size=(50, 1))
    wrong = np.r_[[[value]], rows]
    with pytest.raises(DataError, match=r"the first sample: column 'x0' has values up to .*squares exceed float64"):
        kme.mmd_test(wrong, rows, method=method)
    with pytest.raises(DataError, match="the second sample: column 'x0'"):
        kme.mmd_test(rows, np.full((50, 1), value), method=method)  # equal values have a variance, 0
    assert np.isfinite(kme.mmd_test(np.r_[[[1e140]], rows], rows, method=method).statistic)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_that_overflows_gives_no_p_value():
    rows = np.r_[[[1e140]], np.random.default_rng(0).normal(size=(50, 1))]
    for method in ("unbiased", "block"):
        with pytest.raises(DataError, match=r"the statistic is not finite: Polynomial.* overflows on these rows"):
            kme.mmd_test(rows, rows + 1, kme.kernels.Polynomial(degree=3), method=method)
