"""Tests of independence: statistics against plain formulas, levels and power, in memory, out of core and on workers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed import Client, LocalCluster

import kme_dist as kme
from kme_dist.core.independence import RowSums, gamma_law
from kme_dist.data import rows
from kme_dist.errors import ConfigError, DataError
from kme_dist.models import independence as models
from kme_dist.run import independence as run
from kme_dist.run.executors import SerialExecutor

KERNELS = kme.kernels.Gaussian(length_scale=0.9), kme.kernels.Gaussian(length_scale=1.2)


def naive_biased(K, L):
    H = np.eye(len(K)) - 1 / len(K)
    return np.trace(K @ H @ L @ H) / len(K) ** 2


def naive_unbiased(K, L):
    n, one = len(K), np.ones(len(K))
    K, L = K - np.diag(np.diag(K)), L - np.diag(np.diag(L))
    both = (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
    return (np.trace(K @ L) + both - 2 / (n - 2) * one @ K @ L @ one) / (n * (n - 3))


NAIVE = {"biased": naive_biased, "unbiased": naive_unbiased}


@pytest.fixture
def pair(rng):
    X = rng.normal(size=(37, 2))
    return X, X[:, 0] ** 2 + rng.normal(size=37)


@pytest.mark.parametrize("method", NAIVE)
def test_every_permutation_is_the_statistic_of_the_permuted_rows(method, pair, monkeypatch):
    monkeypatch.setattr(run, "TILE_ROWS", 8)
    X, y = pair[0], pair[1][:, None]
    K, L = KERNELS[0].gram(X), KERNELS[1].gram(y)
    x, v = (models._variable(part, None, None) for part in (X, y))
    sums = run.hsic_sums(KERNELS, x, v, permutations=4, seed=3, executor=SerialExecutor())
    values = models.statistics(sums.K, sums.L, sums.forms, sums.orders, method)
    expected = [NAIVE[method](K, L[np.ix_(order, order)]) for order in sums.orders]
    np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-14)
    assert values[0] == pytest.approx(NAIVE[method](K, L))
    assert len({tuple(order) for order in sums.orders}) == 5
    assert kme.hsic_test(X, y, *KERNELS, method=method, permutations=5).statistic == pytest.approx(values[0])


def test_the_gamma_law_has_the_moments_of_the_statistic_under_independence(rng):
    x, y = rng.normal(size=(2, 400, 60, 1))
    draws = [naive_biased(KERNELS[0].gram(a), KERNELS[1].gram(b)) for a, b in zip(x, y, strict=True)]
    laws = []
    for a, b in zip(x[:50], y[:50], strict=True):
        K, L = KERNELS[0].gram(a), KERNELS[1].gram(b)
        H = np.eye(60) - 1 / 60
        products = ((H @ K @ H) * (H @ L @ H)) ** 2
        parts = [RowSums(G.sum(axis=1), np.diag(G)) for G in (K, L)]
        laws.append(gamma_law(*parts, products.sum() - np.trace(products)))
    assert np.mean([law.mean for law in laws]) == pytest.approx(np.mean(draws), rel=0.05)
    assert np.mean([law.variance for law in laws]) == pytest.approx(np.var(draws), rel=0.3)
    assert np.mean([laws[0].p_value(draw) <= 0.1 for draw in draws]) < 0.2


def test_the_second_pass_over_tiles_is_the_sum_over_all_pairs(pair, monkeypatch):
    monkeypatch.setattr(run, "TILE_ROWS", 8)
    K, L = KERNELS[0].gram(pair[0]), KERNELS[1].gram(pair[1][:, None])
    H = np.eye(37) - 1 / 37
    products = ((H @ K @ H) * (H @ L @ H)) ** 2
    v = [models._variable(part, None, None) for part in pair]
    sums = run.hsic_sums(KERNELS, *v, permutations=0, seed=0, executor=SerialExecutor())
    found = run.squared_sum(KERNELS, *v, sums, executor=SerialExecutor())
    assert found == pytest.approx(products.sum() - np.trace(products), rel=1e-9)


@pytest.mark.parametrize("settings", [{}, {"method": "biased"}, {"method": "biased", "null": "gamma"}], ids=str)
def test_hsic_keeps_its_level_and_has_power(settings, rng):
    rejected, found = 0, 0
    for _ in range(25):
        x, noise, other = rng.normal(size=(3, 60, 1))
        rejected += kme.hsic_test(x, other, permutations=60, **settings).rejects(0.1)
        found += kme.hsic_test(x, x**2 + 0.3 * noise, permutations=60, **settings).rejects(0.1)
    assert rejected <= 8  # of 25; 2.5 are expected, and more than 8 have probability 0.0005
    assert found >= 23


def test_a_constant_is_independent_of_everything(pair):
    for settings in ({}, {"method": "biased", "null": "gamma"}):
        assert kme.hsic_test(pair[0], np.ones(37), **settings).p_value == 1.0


def test_labels_and_texts_can_be_tested(pair, rng):
    words = ["left" if value > 0 else "right" for value in pair[0][:, 0]]
    assert kme.hsic_test(pair[0], words, target_kernel="delta").rejects(0.01)
    texts = ["abab" if word == "left" else "baxx" for word in words]
    assert kme.hsic_test(texts, words, kme.kernels.Spectrum(p=2), "delta").rejects(0.01)
    assert not kme.hsic_test(rng.permutation(37), words, target_kernel="delta").rejects(0.01)


@pytest.fixture
def stored(rng, tmp_path):
    table = rng.normal(size=(70, 3))
    table[:, 1] += table[:, 0]
    labels = np.where(table[:, 0] > 0, "b", "a")
    np.savez(tmp_path / "t.npz", X=table, y=labels)
    return table, labels, kme.ingest(tmp_path / "t.npz", tmp_path / "t.zarr", dtype="float64", shuffle=None)


def test_columns_of_a_data_set_give_what_arrays_give(stored, monkeypatch):
    monkeypatch.setattr(run, "TILE_ROWS", 16)
    table, labels, data = stored
    names = data.feature_names
    memory = kme.hsic_test(table[:, :1], table[:, 1:], permutations=20)
    disk = kme.hsic_test([names[0]], names[1:], data=data, permutations=20)
    assert (disk.statistic, disk.p_value) == (memory.statistic, memory.p_value)
    memory = kme.hsic_test(table[:, 0], labels, target_kernel="delta", permutations=20)
    disk = kme.hsic_test(names[0], None, target_kernel="delta", data=data, permutations=20)
    assert (disk.statistic, disk.p_value) == (pytest.approx(memory.statistic), memory.p_value)
    memory = kme.conditional_independence_test(table[:, 0], table[:, 1], table[:, 2], draws=20)
    disk = kme.conditional_independence_test(*names, data=data, draws=20)
    assert (disk.statistic, disk.p_value) == (pytest.approx(memory.statistic), memory.p_value)


@pytest.mark.parametrize("shuffled", ["both", "x", "y", "neither"])
def test_pairs_stay_pairs_wherever_each_variable_is(shuffled, rng, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TILE_ROWS", 16)
    x = rng.normal(size=(90, 1))
    y = x + 0.1 * rng.normal(size=(90, 1))

    def stored(name, values):
        data = kme.ingest((values, values[:, 0]), tmp_path / name, dtype="float64", shuffle=3)
        return data, data.read()[0]

    (x_stored, x_read), (y_stored, y_read) = stored("x.zarr", x), stored("y.zarr", y)  # both in the same order
    given = x_stored if shuffled in ("both", "x") else x_read, y_stored if shuffled in ("both", "y") else y_read
    found, expected = kme.hsic_test(*given, *KERNELS, permutations=50), kme.hsic_test(x, y, *KERNELS, permutations=50)
    assert found.statistic == pytest.approx(expected.statistic, rel=1e-9)
    assert found.rejects(0.05)


@pytest.mark.parametrize("shuffle", [None, 3])
def test_rows_to_choose_from_are_the_same_of_every_variable_however_large(shuffle, rng, tmp_path, monkeypatch):
    narrow = rng.normal(size=(3_000, 1))
    wide = kme.ingest((narrow.repeat(9, axis=1), narrow[:, 0]), tmp_path / "w.zarr", dtype="float64", shuffle=shuffle)
    monkeypatch.setattr(rows, "CACHE_BYTES", 100_000)  # which the wide variable exceeds, and the narrow one does not
    x, y = (models._variable(part, None, None) for part in (wide, wide.read()[0][:, :1]))
    for size in (500, 3_000):
        np.testing.assert_array_equal(x.sample(size, 1)[:, :1], y.sample(size, 1))
    assert len(np.unique(y.sample(500, 1))) == 500


@pytest.mark.parametrize("test", ["hsic", "conditional"])
def test_threads_and_workers_give_the_same_bits(test, rng, monkeypatch):
    monkeypatch.setattr(run, "TILE_ROWS", 16)
    monkeypatch.setattr(run, "_SIGNED_ROWS", 16)
    monkeypatch.setattr(run, "BLOCK_ROWS", 16)
    x, y, z = rng.normal(size=(3, 70, 1))

    def values(client=None):
        done = (
            kme.hsic_test(x, y, client=client)
            if test == "hsic"
            else kme.conditional_independence_test(x, y, z, draws=50, client=client)
        )
        return done.statistic, done.p_value, done.null_values.tolist()

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        on_workers = values(client)
    for threads in (1, 3):
        monkeypatch.setattr(models, "executor_for", lambda client, threads=threads: SerialExecutor(threads))
        assert values() == on_workers


# --- given a third variable ---------------------------------------------------------------------------------


def test_residuals_are_those_of_a_kernel_ridge_regression_of_features(rng):
    z, y = rng.normal(size=(30, 1)), rng.normal(size=(30, 1))
    kernel, by = KERNELS
    v = [models._variable(part, None, None) for part in (y, z)]
    features = run.residual_features(kernel, z, by, y, *v, 0.01, executor=SerialExecutor())
    R = features.rows(y, z)
    H, A = np.eye(30) - 1 / 30, 0.3 * np.linalg.inv(kernel.gram(z) + 0.3 * np.eye(30))
    np.testing.assert_allclose(R @ R.T, A @ H @ by.gram(y) @ H @ A.T, atol=1e-6)


def test_the_statistic_is_the_sum_over_all_pairs_with_their_signs(rng, monkeypatch):
    monkeypatch.setattr(run, "_SIGNED_ROWS", 16)
    monkeypatch.setattr("kme_dist.core.independence.TILE_ROWS", 5)
    x, y, z = rng.normal(size=(3, 40, 1))
    v = [models._variable(part, None, None) for part in (x, y, z)]
    residuals = tuple(
        run.residual_features(KERNELS[0], z, KERNELS[1], own, u, v[2], 0.01, executor=SerialExecutor())
        for own, u in ((x, v[0]), (y, v[1]))
    )
    found = run.signed_draws(residuals, KERNELS[0], tuple(v), draws=3, seed=5, executor=SerialExecutor())
    A, B = (residual.rows(own, z) for residual, own in zip(residuals, (x, y), strict=True))
    M = (A @ A.T) * (B @ B.T) * KERNELS[0].gram(z)
    np.fill_diagonal(M, 0.0)
    E = np.concatenate([run.random_signs(5, b, size, 3) for b, size in ((0, 16), (1, 16), (2, 8))])
    expected = np.einsum("ib,ij,jb->b", E, M, E)
    expected[0] -= shared_by_chance(KERNELS[0].gram(z), 0.4, KERNELS[0].gram(z), A, B)
    np.testing.assert_allclose(found, expected / (40 * 39), rtol=1e-6)


def shared_by_chance(K, shift, w, *residuals):
    """Σ_{i≠j} C_ij C'_ij w_ij, with the residual operator as a matrix."""
    n, found = len(K), w - np.diag(np.diag(w))
    A = shift * np.linalg.solve(K + shift * np.eye(n), np.eye(n) - 1 / n)
    for R in residuals:
        d = np.sum(R * R, axis=1) / np.sum(A * A, axis=1)
        found = found * ((A * d) @ A.T)
    return found.sum()


def test_what_is_subtracted_is_the_mean_of_the_statistic_for_independent_noise(rng):
    """Residuals of pure noise: their inner products are those of A diag(d) Aᵀ on average."""
    z = rng.normal(size=(30, 1))
    K, w = KERNELS[0].gram(z), KERNELS[1].gram(z)
    A = 0.1 * np.linalg.solve(K + 0.1 * np.eye(30), np.eye(30) - 1 / 30)
    hollow = w - np.diag(np.diag(w))
    values, means = [], []
    for _ in range(600):
        x, y = (A @ rng.normal(size=(30, 4)) for _ in range(2))
        values.append(np.sum(hollow * (x @ x.T) * (y @ y.T)))
        means.append(shared_by_chance(K, 0.1, w, x, y))
    error = np.std(values) / np.sqrt(600)
    assert np.mean(values) > 5 * error, "the mean is not zero"
    assert np.mean(means) == pytest.approx(np.mean(values), abs=3 * error)


def given_z(rng, kind, n=150):
    z, a, b, c = rng.normal(size=(4, n, 1))
    if kind == "confounded":  # dependent, but not given z
        return np.sin(2 * z) + 0.3 * a, z**2 + z + 0.5 * b, z
    if kind == "dependent":
        return np.sin(2 * z) + 0.3 * a + 0.5 * c, z**2 + z + 0.5 * b + c, z
    return a, np.sign(z) * a + 0.5 * b, z  # the sign of the dependence changes with z: no covariance on average


def test_the_test_given_z_keeps_its_level_and_has_power(rng):
    rejected = sum(
        kme.conditional_independence_test(*given_z(rng, "confounded"), draws=100).rejects(0.1) for _ in range(30)
    )
    assert rejected <= 9  # of 30; 3 are expected, and more than 9 have probability 0.0005
    assert kme.hsic_test(*given_z(rng, "confounded")[:2]).rejects(0.01)
    for kind in ("dependent", "opposite"):
        found = sum(kme.conditional_independence_test(*given_z(rng, kind), draws=100).rejects(0.1) for _ in range(6))
        assert found >= 5, kind


@pytest.mark.parametrize(
    "rows", [50, pytest.param(100, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["alike", pytest.param("linear", marks=pytest.mark.slow)])
def test_the_level_holds_with_few_rows(rows, kind):
    """Regressions of x and y that are alike share their degrees of freedom, which must not count as dependence."""
    rejected = 0
    for seed in range(80):
        z, a, b = np.random.default_rng([seed, rows]).normal(size=(3, rows, 1))
        f, noise = (np.sin(3 * z), 0.1) if kind == "alike" else (z, 1.0)
        rejected += kme.conditional_independence_test(f + noise * a, f + noise * b, z, draws=100).rejects(0.1)
    assert rejected <= 16  # 8 are expected, and more than 16 have probability 0.002


def test_fewer_centres_than_rows_give_nearly_the_same(rng):
    x, y, z = given_z(rng, "dependent", 300)
    exact = kme.conditional_independence_test(x, y, z, draws=50)
    few = kme.conditional_independence_test(x, y, z, draws=50, centres=60, target_centres=30)
    assert few.statistic == pytest.approx(exact.statistic, rel=0.02)
    assert few.p_value == exact.p_value == 1 / 51


def test_a_label_may_be_given(rng):
    group = rng.integers(0, 3, size=200)
    x, y = group + 0.3 * rng.normal(size=(2, 200))
    labels = np.array(["a", "b", "c"])[group]
    assert kme.hsic_test(x, y).rejects(0.01)
    assert not kme.conditional_independence_test(x, y, labels, "delta").rejects(0.01)


def test_mistakes_are_named(pair, stored):
    X, y = pair
    with pytest.raises(ConfigError, match="method='quick'"):
        kme.hsic_test(X, y, method="quick")
    with pytest.raises(ConfigError, match="null='gamma'"):
        kme.hsic_test(X, y, null="gamma")
    with pytest.raises(DataError, match="X 37, Y 36"):
        kme.hsic_test(X, y[1:])
    with pytest.raises(DataError, match="at least 6 rows"):
        kme.hsic_test(X[:5], y[:5])
    with pytest.raises(ConfigError, match="no column 'q'"):
        kme.hsic_test("q", None, data=stored[2])
    with pytest.raises(DataError, match=r"the text '[ab]' in row 0; choose 'delta' for labels"):
        kme.hsic_test(stored[2].feature_names[0], None, data=stored[2])
    with pytest.raises(DataError, match=r"the text '[ab]' in row 0; choose 'delta' for labels"):
        kme.conditional_independence_test(stored[0], stored[0], stored[1])
    with pytest.raises(ConfigError, match="named by texts or numbers, got float values"):
        kme.hsic_test(1.5, None, data=stored[2])
    with pytest.raises(ConfigError, match="centres=0"):
        kme.conditional_independence_test(X, y, y, centres=0)


@pytest.mark.parametrize("kind", [pd.DataFrame, pa.table], ids=["pandas", "arrow"])
def test_variables_may_be_columns_of_a_table(kind):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 40))
    c = np.where(a > 0, "high", "low")
    table = kind({"a": a, "b": b, "c": c})
    by_name = kme.hsic_test(["a", "b"], "c", target_kernel="delta", data=table)
    given = kme.hsic_test(np.column_stack([a, b]), c.tolist(), target_kernel="delta")
    assert (by_name.statistic, by_name.p_value) == (given.statistic, given.p_value)
    named = kme.conditional_independence_test("a", "b", "c", kernel="delta", data=table)
    assert named.p_value == kme.conditional_independence_test(a, b, c.tolist(), kernel="delta").p_value
    for wrong in ("d", 0, None, []):
        with pytest.raises(ConfigError, match=r"Y=.* pass the name of a column or a list of names; it has a, b, c"):
            kme.hsic_test("a", wrong, data=table)


@pytest.mark.parametrize("data", ["rows.zarr", np.zeros((9, 2)), {"a": [1.0]}])
def test_data_that_has_no_columns_is_refused(data):
    with pytest.raises(ConfigError, match=r"data must be an open data set, .* or a data frame, got a "):
        kme.hsic_test("a", "b", data=data)


LABELS, NUMBERS = ["u", "v"] * 20, np.random.default_rng(0).normal(size=(40, 1))


@pytest.mark.parametrize(
    ("call", "name", "setting"),
    [
        (lambda: kme.hsic_test(LABELS, NUMBERS), "X", "kernel"),
        (lambda: kme.hsic_test(NUMBERS, LABELS), "Y", "target_kernel"),
        (lambda: kme.conditional_independence_test(NUMBERS, NUMBERS, LABELS), "Z", "kernel"),
        (lambda: kme.conditional_independence_test(LABELS, NUMBERS, NUMBERS), "X", r"target_kernels\[0\]"),
    ],
)
def test_labels_without_delta_are_told_of_it(call, name, setting):
    with pytest.raises(DataError, match=rf"^{name}: .* choose 'delta' for labels, or .*, e\.g\. {setting}=.*Spectrum"):
        call()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_value_that_is_not_finite_is_named_with_its_variable_and_row(value, at):
    variables = [NUMBERS, NUMBERS[::-1], NUMBERS**2]
    variables[at] = np.where(np.arange(40)[:, None] == 17, value, variables[at])
    with pytest.raises(DataError, match=rf"^{'XYZ'[at]}: row 17 has NaN or infinity; remove"):
        kme.conditional_independence_test(*variables)
    if at < 2:
        with pytest.raises(DataError, match=rf"^{'XYZ'[at]}: row 17 has NaN or infinity; remove"):
            kme.hsic_test(*variables[:2])


@pytest.mark.parametrize("level", [5, 0, 1, -0.1, None, np.nan])
def test_a_level_is_between_0_and_1(level):
    for found in (kme.hsic_test(NUMBERS, NUMBERS[::-1]), kme.mmd_test(NUMBERS[:20], NUMBERS[20:])):
        assert found.rejects(0.999)
        with pytest.raises(ConfigError, match=r"level=.*: must be a number between 0 and 1"):
            found.rejects(level)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_that_overflows_gives_no_p_value():
    rows = np.r_[[[1e140]], np.random.default_rng(0).normal(size=(50, 1))]
    with pytest.raises(DataError, match=r"the statistic is not finite: .*Polynomial"):
        kme.hsic_test(rows, rows[::-1], kme.kernels.Polynomial(degree=3))


def test_integers_that_doubles_merge_are_refused_by_the_name_of_their_variable():
    x, y = np.random.default_rng(0).normal(size=20), 2**60 + np.arange(20)
    with pytest.raises(DataError, match=r"Y: found the integer 1152921504606846995, and beyond 2\*\*53"):
        kme.hsic_test(x, y)
