"""Means and intervals of ConditionalMeanEmbedding: drawn to the mean, covering what they promise, with every solver."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

import kme_dist as kme
from kme_dist.core.features import random_fourier
from kme_dist.errors import ConfigError, DataError

SOLVERS = ["cholesky", "tiled", "pcg", "nystrom", "features"]
KERNEL = kme.kernels.Gaussian(length_scale=0.4)
TARGET = kme.kernels.Gaussian(length_scale=5.0)
LAM = 1e-4


def wave(n, seed):
    """y = 2000 + 10 sin 6x + noise."""
    rng = np.random.default_rng([n, seed])
    x = rng.uniform(-1, 1, size=(n, 1))
    return x, 2000 + 10 * np.sin(6 * x[:, 0]), rng.normal(size=n)


@pytest.fixture(params=["memory", "stored"])
def fit(request, tmp_path):
    """A fit to rows in memory, or to the same rows on disk."""

    def fitted(model, x, y):
        if request.param == "memory":
            return model.fit(x, y)
        data = kme.ingest((x, y), tmp_path / "rows.zarr", task="regression", dtype="float64", overwrite=True)
        return model.fit(data)

    return fitted


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr("kme_dist.run.fit.tiled._SMALLEST", 32)
    monkeypatch.setattr("kme_dist.run.fit.panels._SMALLEST", 32)


def settings_of(solver):
    waves = random_fourier(1, 60, length_scale=0.4, seed=2)
    return {"nystrom": {"centres": 60, "centre_choice": "uniform"}, "features": {"features": waves}}.get(solver, {})


# --- means -------------------------------------------------------------------------------------------------------


def test_predictions_are_drawn_to_the_mean_and_not_to_zero():
    x, f, noise = wave(100, 0)
    x_new, f_new, _ = wave(200, 1)
    y = f + 2 * noise
    model = kme.ConditionalMeanEmbedding().fit(x, y)
    assert np.sqrt(np.mean((model.predict(x_new) - f_new) ** 2)) < 1.5  # 15 to 20 without centring
    assert model.predict([[1e3]])[0] == pytest.approx(y.mean(), rel=1e-12)  # far from every row
    np.testing.assert_allclose(model.expectation(x_new, lambda y: 0 * y + 7), 7.0, rtol=1e-12)


@pytest.mark.parametrize("target_centres", [None, 30])
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_centres_by_the_mean_of_the_training_rows(solver, target_centres, fit, small_tiles, tmp_path):
    x, f, noise = wave(120, 2)
    y = f + 0.3 * noise + 20 * (x[:, 0] > 0.9)  # skewed, so that other means are other numbers
    model = kme.ConditionalMeanEmbedding(
        KERNEL, TARGET, LAM, solver=solver, scaling=None, target_centres=target_centres, **settings_of(solver)
    )
    model = fit(model, x, y)
    assert model.solver_ == solver
    embedding = model.embedding_
    assert float(embedding.mean(np.asarray(embedding.targets)[:, 0])) == pytest.approx(y.mean(), rel=1e-12)
    z = embedding.basis(x[:7])
    if solver in ("cholesky", "tiled", "pcg"):
        expected = z.T @ np.linalg.solve(KERNEL.gram(x) + 120 * LAM * np.eye(120), y - y.mean())
    else:
        Z = np.asarray(embedding.basis(x))
        M = KERNEL.gram(embedding.centres) if solver == "nystrom" else np.eye(len(Z))
        expected = z.T @ np.linalg.solve(Z @ Z.T + 120 * LAM * M, Z @ (y - y.mean()))
    # Thirty target centres express y - ȳ to 1e-3 or so of its spread of 10; kept targets leave only rounding.
    precise = 1e-6 if embedding.base is None else 0.1
    np.testing.assert_allclose(model.predict(x[:7]), y.mean() + expected, atol=precise)
    model.save(tmp_path / "model.zarr")
    np.testing.assert_allclose(kme.load(tmp_path / "model.zarr").predict(x), model.predict(x), rtol=1e-12)


def test_labels_keep_their_decision_probabilities():
    x, f, noise = wave(80, 3)
    y = np.where(f + noise > 2000, 1, 0)
    model = kme.ConditionalMeanEmbedding(KERNEL, "delta", 0.01).fit(x, y)
    plain = model.evaluate(x[:5], np.array([1]))[:, 0]
    np.testing.assert_allclose(model.expectation(x[:5], lambda y: y), plain, rtol=1e-12)
    np.testing.assert_allclose(model.predict(x[:5]), plain, rtol=1e-12)
    a = model.coefficients(x[:5])
    np.testing.assert_allclose(
        model.expectation(x[:5], lambda y: y, centred=True), y.mean() + a @ (y - y.mean()), rtol=1e-9
    )
    assert set(model.quantiles(x[:5], [0.2, 0.8]).ravel()) <= {0, 1}
    with pytest.raises(DataError, match="numeric targets"):
        model.interval(x[:5])


# --- coverage ----------------------------------------------------------------------------------------------------

NOISE = {
    "even": lambda x, rng: 0.05 * rng.normal(size=len(x)),
    "growing": lambda x, rng: (0.02 + 0.1 * (x[:, 0] + 1)) * rng.normal(size=len(x)),
    "heavy tails": lambda x, rng: 0.05 * rng.standard_t(3, size=len(x)),
}
# Mean width of the true 90 % interval.
WIDTH = {"even": 3.29 * 0.05, "growing": 3.29 * 0.12, "heavy tails": 4.706 * 0.05}
LEVELS = (0.5, 0.8, 0.9, 0.95)


def drawn(noise, n, seed):
    rng = np.random.default_rng([n, seed])
    x = rng.uniform(-1, 1, size=(n, 1))
    return x, np.sin(6 * x[:, 0]) + NOISE[noise](x, rng)


def asked(model, x, coverage, how):
    if how == "interval":
        return model.interval(x, coverage)
    return model.quantiles(x, [(1 - coverage) / 2, (1 + coverage) / 2]).T


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(("n", "repeats", "wide"), [(200, 4, 1.35), (1000, 1, 1.2)])
def test_intervals_cover_what_they_promise_and_no_more(noise, n, repeats, wide):
    found = []
    for seed in range(repeats):
        model = kme.ConditionalMeanEmbedding().fit(*drawn(noise, n, seed))
        x, y = drawn(noise, 1500, 100 + seed)
        left = x[:, 0] < 0
        for how in ("interval", "quantiles"):
            ends = [asked(model, x, coverage, how) for coverage in LEVELS]
            inside = np.array([(y > low) & (y < high) for low, high in ends])
            sides = [part.mean(axis=1) for part in (inside, inside[:, left], inside[:, ~left])]
            found.append([*sides, [np.mean(high - low) for low, high in ends]])
    for part in (found[::2], found[1::2]):
        coverage, on_left, on_right, width = np.mean(part, axis=0)
        np.testing.assert_allclose(coverage, LEVELS, atol=0.05)
        # Where the noise grows, both halves are covered; a width that is the same everywhere covers 69 and 31 % of 50.
        np.testing.assert_allclose(on_left, LEVELS, atol=0.11)
        np.testing.assert_allclose(on_right, LEVELS, atol=0.11)
        assert 0.9 * WIDTH[noise] < width[2] < wide * WIDTH[noise]


@pytest.mark.parametrize("target_centres", [None, 40])
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_has_intervals(solver, target_centres, fit, small_tiles, tmp_path):
    x, f, noise = wave(200, 5)
    x_new, f_new, noise_new = wave(500, 6)
    y, y_new = f + 0.3 * noise, f_new + 0.3 * noise_new
    model = kme.ConditionalMeanEmbedding(
        KERNEL, TARGET, LAM, solver=solver, scaling=None, target_centres=target_centres, **settings_of(solver)
    )
    model = fit(model, x, y)
    low, high = model.interval(x_new)
    assert 0.85 < np.mean((y_new > low) & (y_new < high)) < 0.96
    assert 0.9 < np.mean(high - low) / (3.29 * 0.3) < 1.25
    q = model.quantiles(x_new, [0.1, 0.9])
    assert 0.74 < np.mean((y_new > q[:, 0]) & (y_new < q[:, 1])) < 0.9
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    # Stored residuals come back as they were; those of "cholesky" are computed anew by the same steps.
    for one, other in zip(again.interval(x_new), (low, high), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    if solver in ("tiled", "pcg") and target_centres is None:
        exact = kme.ConditionalMeanEmbedding(KERNEL, TARGET, LAM, scaling=None).fit(x, y)
        np.testing.assert_allclose(low, exact.interval(x_new)[0], rtol=1e-8)


def test_a_sample_of_rows_serves_where_there_are_many(monkeypatch):
    x, y = drawn("even", 400, 7)
    x_new, y_new = drawn("even", 1000, 8)
    monkeypatch.setattr("kme_dist.run.conditional._RESIDUAL_ROWS", 100)
    for settings in ({}, {"centres": 50}):
        model = kme.ConditionalMeanEmbedding(KERNEL, regularization=1e-5, **settings).fit(x, y)
        low, high = model.interval(x_new)
        assert model._left.count == 100
        assert 0.8 < np.mean((y_new > low) & (y_new < high)) < 0.97


def test_several_outputs_each_have_their_interval():
    x, f, noise = wave(200, 9)
    Y = np.stack([f + 0.3 * noise, -0.1 * f + 0.05 * noise[::-1]], axis=1)
    model = kme.ConditionalMeanEmbedding(KERNEL, TARGET, LAM, scaling=None).fit(x, Y)
    low, high = model.interval(x[:20], 0.8)
    assert low.shape == high.shape == (20, 2)
    for j in range(2):
        alone = kme.ConditionalMeanEmbedding(KERNEL, TARGET, LAM, scaling=None).fit(x, Y[:, j])
        np.testing.assert_allclose(low[:, j], alone.interval(x[:20], 0.8)[0], rtol=1e-9)
        np.testing.assert_allclose(high[:, j], alone.interval(x[:20], 0.8)[1], rtol=1e-9)
    with pytest.raises(DataError, match="scalar targets"):
        model.quantiles(x, [0.5])


def test_sparse_forms_have_intervals_where_rows_are_at_hand():
    x, y = drawn("even", 60, 10)
    x_new, y_new = drawn("even", 500, 11)
    model = kme.ConditionalMeanEmbedding(kme.kernels.Gaussian(0.3), regularization=0.01, scaling=None).fit(x, y)
    for form in model.sparsify(gammas=4)[1:]:
        low, high = form.interval(x_new)
        assert 0.75 < np.mean((y_new > low) & (y_new < high)) <= 1
    near = kme.ConditionalMeanEmbedding(KERNEL, regularization=1e-4, centres=30).fit(x, y)
    with pytest.raises(ConfigError, match="has no residuals"):
        near.sparsify(gammas=[1e-6], steps=20)[0].interval(x)
    with pytest.raises(ConfigError, match=r"coverage=1\.5"):
        model.interval(x, 1.5)
    texts = kme.ConditionalMeanEmbedding(kme.kernels.Spectrum(p=2), kme.kernels.Spectrum(p=2), 0.01)
    with pytest.raises(DataError, match="numeric targets"):
        texts.fit(["abab", "xyxy"], ["oo", "ii"]).interval(["abab"])


# --- the same bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", [False, True])  # the columns of a frame lie in memory one after the other
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"target_centres": 20}, {"centres": 30}, {"centres": 30, "target_centres": 20}, {"features": 40},
        {"features": 40, "target_centres": 20}, {"solver": "tiled"}, {"solver": "tiled", "target_centres": 20},
    ],
    ids=str,
)  # fmt: skip
def test_a_model_from_disk_predicts_the_same_bits(settings, frame, tmp_path):
    rng = np.random.default_rng(11)
    X = rng.normal(size=(150, 4))
    y = X[:, 0] * X[:, 1] + 0.1 * rng.normal(size=150)
    rows = pd.DataFrame(X, columns=list("abcd")) if frame else X
    model = kme.ConditionalMeanEmbedding(kme.kernels.Gaussian(np.ones(4)), regularization=0.001, **settings)
    model.fit(rows, y)
    asked = [model.predict(rows), model.evaluate(rows, y[:3]), *model.interval(rows), model.quantiles(rows, [0.3])]
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    found = [again.predict(rows), again.evaluate(rows, y[:3]), *again.interval(rows), again.quantiles(rows, [0.3])]
    for one, other in zip(found, asked, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_number_of_blas_threads_does_not_show():
    from threadpoolctl import threadpool_limits

    rng = np.random.default_rng(12)
    X = rng.normal(size=(1500, 3))
    y = X[:, 0] + 0.1 * rng.normal(size=1500)
    found = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads, user_api="blas"), warnings.catch_warnings():
            model = kme.ConditionalMeanEmbedding(kme.kernels.Gaussian(np.ones(3)), regularization=1e-4).fit(X, y)
            found.append((model.predict(X[:50]), model.interval(X[:50])[0]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
