"""CMERegressor: learns its kernel, predicts means, deviations, intervals, quantiles and samples, keeps its promises."""

from __future__ import annotations

import contextlib
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression

import kme_dist as kme
from kme_dist import CMERegressor
from kme_dist.errors import ConfigError, DataError
from kme_dist.kernels import Gaussian
from kme_dist.run import regression


def wave(n, seed=0, noise=0.1):
    """One relevant feature of three; noise that grows along it."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, size=(n, 3))
    return X, 50 + 10 * np.sin(2 * X[:, 0]) + noise * 10 * (1 + (X[:, 0] > 0)) * rng.normal(size=n)


@pytest.fixture(scope="module")
def fitted():
    return CMERegressor().fit(*wave(600))


def test_it_finds_the_feature_that_matters_and_the_noise(fitted):
    X, y = wave(400, seed=1)
    scales = fitted.kernel_.length_scale
    assert scales[0] < 0.5 * scales[1:].min()
    assert fitted.score(X, y) == pytest.approx(1 - np.var(y - fitted.predict(X)) / np.var(y), abs=0.01)  # R²
    trees = HistGradientBoostingRegressor(random_state=0).fit(*wave(600))
    assert fitted.score(X, y) > max(trees.score(X, y), LinearRegression().fit(*wave(600)).score(X, y))
    assert fitted.loo_rmse_ == pytest.approx(np.sqrt(np.mean((y - fitted.predict(X)) ** 2)), rel=0.15)


def test_intervals_cover_and_follow_the_noise(fitted):
    X, y = wave(2_000, seed=2)
    for coverage in (0.5, 0.9):
        low, high = fitted.predict_interval(X, coverage)
        assert np.mean((low <= y) & (y <= high)) == pytest.approx(coverage, abs=0.05)
    right = X[:, 0] > 0.3
    assert np.mean((high - low)[right]) > 1.4 * np.mean((high - low)[X[:, 0] < -0.3])
    _, std = fitted.predict(X, return_std=True)
    assert np.sqrt(np.mean(((y - fitted.predict(X)) / std) ** 2)) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("solver", ["cholesky", "tiled", "nystrom", "falkon"])
def test_far_from_all_rows_the_targets_are_as_uncertain_as_without_inputs(solver):
    X, y = wave(300)
    centres = 100 if solver in ("nystrom", "falkon") else None
    model = CMERegressor(Gaussian(length_scale=0.6), 1e-4, steps=0, solver=solver, centres=centres).fit(X, y)
    there = np.array([[60.0, 0, 0], [600.0, 0, 0]])
    mean, std = model.predict(there, return_std=True)
    np.testing.assert_allclose(mean, y.mean())
    assert (std > 0.7 * y.std()).all()
    low, high = model.predict_interval(there, 0.8)
    assert (high - low > 0.7 * np.ptp(np.quantile(y, [0.1, 0.9]))).all()
    low, high = model.predict_interval(X, 0.8)
    assert np.mean(high - low) < 0.4 * np.ptp(np.quantile(y, [0.1, 0.9]))


def test_quantiles_samples_and_expectations_are_those_of_one_distribution(fitted):
    X, _ = wave(20, seed=3)
    mean, std = fitted.predict(X, return_std=True)
    drawn = fitted.sample(X, 4_000, random_state=5)
    assert drawn.shape == (20, 4_000)
    np.testing.assert_allclose(drawn.mean(axis=1), mean, atol=5 * std.max() / np.sqrt(4_000))
    np.testing.assert_allclose(drawn.std(axis=1), std, rtol=0.1)
    levels = [0.1, 0.5, 0.9]
    quantiles = fitted.predict_quantiles(X, levels)
    assert np.abs((drawn[:, :, None] <= quantiles[:, None]).mean(axis=1) - levels).max() < 0.04
    np.testing.assert_allclose(fitted.predict_quantiles(X, 0.5), quantiles[:, 1])
    np.testing.assert_allclose(fitted.expectation(X, lambda y: y), mean, rtol=1e-9)
    np.testing.assert_allclose(fitted.expectation(X, lambda y: y**2), mean**2 + std**2, rtol=1e-9)


def test_samples_depend_on_the_seed_only(fitted):
    X, _ = wave(20, seed=3)
    first = fitted.sample(X, 7, random_state=1)
    np.testing.assert_array_equal(first, fitted.sample(X, 7, random_state=1))
    assert (first != fitted.sample(X, 7, random_state=2)).any()


def test_several_outputs_are_each_predicted_and_drawn_together():
    X, y = wave(300)
    rng = np.random.default_rng(4)
    noise = rng.normal(size=300)
    Y = np.stack([y, 1e6 + 1e3 * (X[:, 1] + 0.3 * noise), X[:, 1] - 0.3 * noise], axis=1)
    model = CMERegressor(steps=30).fit(X, Y)
    mean, std = model.predict(X[:8], return_std=True)
    low, high = model.predict_interval(X[:8])
    assert mean.shape == std.shape == low.shape == high.shape == (8, 3)
    assert model.predict_quantiles(X[:8], [0.2, 0.8]).shape == (8, 3, 2)
    assert model.score(X, Y) > 0.5
    drawn = model.sample(X[:1], 2_000, random_state=0)[0]
    assert drawn.shape == (2_000, 3)
    assert np.corrcoef(drawn[:, 1], drawn[:, 2])[0, 1] < -0.8  # one noise, of opposite signs


def test_targets_may_be_of_any_unit_and_far_from_zero():
    X, y = wave(200)
    one, other = (CMERegressor(steps=20).fit(X, target) for target in (y, 1e9 + 1e-3 * y))
    np.testing.assert_allclose(other.predict(X), 1e9 + 1e-3 * one.predict(X), rtol=1e-12)
    assert np.isfinite(CMERegressor(steps=5).fit(X, np.full(200, 3.0)).predict(X)).all()
    with pytest.raises(DataError, match="the variance of the targets overflows"):
        CMERegressor(steps=5).fit(X, 1e200 * y)


def test_weights_count_rows():
    X, y = wave(120)
    w = np.random.default_rng(0).integers(0, 4, 120)
    weighted = CMERegressor(kernel=Gaussian(length_scale=0.5), regularization=1e-3, steps=0)
    np.testing.assert_allclose(
        clone(weighted).fit(X, y, sample_weight=w).predict(X),
        clone(weighted).fit(X.repeat(w, axis=0), y.repeat(w)).predict(X),
        rtol=1e-8,
    )


@pytest.mark.parametrize("solver", ["tiled", "pcg", "nystrom"])
def test_solvers_agree(solver):
    X, y = wave(400)
    common = {"kernel": Gaussian(length_scale=0.7), "regularization": 1e-3, "steps": 0}
    exact = CMERegressor(solver="cholesky", **common).fit(X, y)
    other = CMERegressor(solver=solver, centres=300 if solver == "nystrom" else None, **common).fit(X, y)
    assert other.solver_ == solver
    tolerance = 0.02 if solver == "nystrom" else 1e-3
    np.testing.assert_allclose(other.predict(X), exact.predict(X), rtol=tolerance)
    for one, two in zip(other.predict_interval(X), exact.predict_interval(X), strict=True):
        assert np.mean(np.abs(one - two)) < 0.3 * np.mean(exact.predict(X, return_std=True)[1])


def test_with_centres_intervals_come_from_the_whole_table():
    rng = np.random.default_rng(0)
    x, noise = np.linspace(0, 1, 2_000)[:, None], rng.normal(size=2_000)  # sorted, and twice as many as are left out
    right = x[:, 0] > 0.5
    y = x[:, 0] + np.where(right, 1, 0.01) * noise
    model = CMERegressor(Gaussian(length_scale=0.3), 1e-3, steps=0, solver="nystrom", centres=100).fit(x, y)
    fresh = x[:, 0] + np.where(right, 1, 0.01) * rng.normal(size=2_000)
    low, high = model.predict_interval(x, 0.9)
    inside = (low <= fresh) & (fresh <= high)
    assert inside[right].mean() > 0.8
    assert inside[~right].mean() > 0.8
    assert model.loo_rmse_ == pytest.approx(np.sqrt(0.5), rel=0.15)
    weighted = clone(model).fit(x, y, sample_weight=np.where(right, 1e-3, 1.0))  # the right half hardly counts
    assert weighted.loo_rmse_ < 0.2


@pytest.mark.parametrize("kind", ["copies", "few different rows"])
@pytest.mark.parametrize("solver", ["nystrom", "pcg", "tiled"])
def test_every_solver_leaves_out_the_same_copies_together(solver, kind):
    rng = np.random.default_rng(0)
    if kind == "copies":
        X = rng.normal(size=(60, 2)).repeat(rng.integers(1, 4, 60), axis=0)
        y = X[:, 0] * (1 + X[:, 1])
    else:
        X = rng.integers(0, 3, (120, 2)).astype(float)
        y = X[:, 0] + rng.integers(0, 2, 120)
    common = {"kernel": Gaussian(length_scale=1.0), "regularization": 1e-2, "steps": 0}
    exact = CMERegressor(solver="cholesky", **common).fit(X, y)
    other = CMERegressor(solver=solver, centres=59 if solver == "nystrom" else None, **common).fit(X, y)
    assert other.solver_ == solver
    assert other.loo_rmse_ == pytest.approx(exact.loo_rmse_, rel=1e-3)
    queries = rng.normal(size=(9, 2))
    np.testing.assert_allclose(other.predict_interval(queries), exact.predict_interval(queries), atol=2e-2)


def test_copies_outside_the_rows_left_out_count_too(monkeypatch):
    monkeypatch.setattr(regression, "_LEVERAGE_ROWS", 100)
    monkeypatch.setattr(regression, "BLOCK_ROWS", 64)  # copies of a row are in several tasks
    rng = np.random.default_rng(0)
    X, y = np.tile(rng.normal(size=(70, 3)), (4, 1)), np.tile(rng.normal(size=70), 4)
    w = rng.integers(1, 3, 280)
    common = {"kernel": Gaussian(length_scale=0.5), "regularization": 1e-3, "steps": 0}
    for weights in (None, w):
        exact = CMERegressor(solver="cholesky", **common).fit(X, y, sample_weight=weights)
        model = CMERegressor(solver="nystrom", centres=69, **common).fit(X, y, sample_weight=weights)
        few = len(model.left_out_.residuals)
        assert 40 < few < 70  # of the 70 different rows, most of their copies not among the 100
        assert model.loo_rmse_ == pytest.approx(exact.loo_rmse_, rel=0.15)  # without: a tenth of it


def test_with_centres_weights_count_rows_too():
    X, y = wave(300)
    w = np.random.default_rng(0).integers(1, 4, 300)
    common = {"kernel": Gaussian(length_scale=0.7), "regularization": 1e-3, "steps": 0}
    exact = CMERegressor(**common).fit(X, y, sample_weight=w)
    few = CMERegressor(solver="nystrom", centres=250, **common).fit(X, y, sample_weight=w)
    np.testing.assert_allclose(few.predict(X), exact.predict(X), rtol=0.02)


@pytest.fixture(scope="module")
def many_centres():
    return CMERegressor(solver="falkon", centres=120, steps=12).fit(*wave(2_400))


def test_with_many_centres_intervals_come_from_rows_held_out(many_centres):
    X, y = wave(2_000, seed=2)
    assert many_centres.solver_ == "falkon"
    assert many_centres.left_out_.held_out.shape == (120, 3)  # a twentieth of the rows
    low, high = many_centres.predict_interval(X, 0.9)
    assert np.mean((low <= y) & (y <= high)) == pytest.approx(0.9, abs=0.07)
    assert np.mean((high - low)[X[:, 0] > 0.3]) > 1.3 * np.mean((high - low)[X[:, 0] < -0.3])
    mean, std = many_centres.predict(X, return_std=True)
    assert np.sqrt(np.mean((y - mean) ** 2)) < 1.1 * np.sqrt(np.mean((10 * 0.1 * (1 + (X[:, 0] > 0))) ** 2))
    assert np.sqrt(np.mean(((y - mean) / std) ** 2)) == pytest.approx(1.0, abs=0.2)
    assert many_centres.loo_rmse_ == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)), rel=0.2)


def test_with_many_centres_bits_are_the_same_on_workers_from_a_data_set_and_once_saved(many_centres, tmp_path):
    rows, (X, _) = wave(2_400), wave(50, seed=6)
    data = kme.ingest(rows, tmp_path / "rows.zarr", dtype="float64")
    settings = {"solver": "falkon", "centres": 120, "steps": 12}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0")
        )
        client = stack.enter_context(Client(cluster))
        others = [CMERegressor(client=client, **settings).fit(*given) for given in (rows, (data,))]
    many_centres.save(tmp_path / "model.zarr")
    for other in (*others, kme.load(tmp_path / "model.zarr")):
        np.testing.assert_array_equal(other.predict(X), many_centres.predict(X))
        np.testing.assert_array_equal(other.predict_interval(X), many_centres.predict_interval(X))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.zarr", "rows.zarr"]


def test_a_saved_model_predicts_the_same_bits(fitted, tmp_path):
    X, _ = wave(50, seed=6)
    fitted.save(tmp_path / "model.zarr")
    for other in (kme.load(tmp_path / "model.zarr"), pickle.loads(pickle.dumps(fitted))):
        np.testing.assert_array_equal(other.predict(X), fitted.predict(X))
        np.testing.assert_array_equal(other.predict_interval(X), fitted.predict_interval(X))
        np.testing.assert_array_equal(other.sample(X, 3, 0), fitted.sample(X, 3, 0))
        assert other.kernel_ == fitted.kernel_
        assert other.loo_errors_ == fitted.loo_errors_


def test_the_same_bits_on_workers_and_from_a_data_set(tmp_path):
    X, y = wave(300)
    alone = CMERegressor(steps=6).fit(X, y)
    data = kme.ingest((X, y), tmp_path / "rows.zarr", dtype="float64")
    stored = CMERegressor(steps=6).fit(data)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0")
        )
        client = stack.enter_context(Client(cluster))
        remote = CMERegressor(steps=6, client=client).fit(X, y)
    for other in (stored, remote):
        assert other.kernel_ == alone.kernel_
        np.testing.assert_array_equal(other.predict(X), alone.predict(X))
        np.testing.assert_array_equal(other.predict_interval(X), alone.predict_interval(X))


def test_a_stored_model_says_what_it_was_trained_on(fitted, tmp_path):
    fitted.save(tmp_path / "model.zarr")
    assert kme.load(tmp_path / "model.zarr").trained_on_["rows"] == 600
    data = kme.ingest(wave(90), tmp_path / "rows.zarr", dtype="float64", split="train=0.8,test=0.2")
    CMERegressor(steps=0).fit(data).save(tmp_path / "stored.zarr")
    again = kme.load(tmp_path / "stored.zarr")
    assert again.trained_on_ == {"data": "rows.zarr", "split": "train", "rows": 72, "digest": data.digest}


def test_names_of_columns_travel_with_the_model(tmp_path):
    table, y = load_diabetes(return_X_y=True, as_frame=True)
    model = CMERegressor(steps=3).fit(table, y)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert again.feature_names_in_.tolist() == list(table.columns)
    np.testing.assert_array_equal(again.predict(table), model.predict(table))
    with pytest.raises(ValueError, match="feature names"):
        again.predict(pd.DataFrame(table.to_numpy(), columns=[f"c{i}" for i in range(10)]))


def test_a_warm_start_continues_from_what_was_learned(fitted):
    model = clone(fitted).set_params(warm_start=True, steps=5)
    model.fit(*wave(200))
    first = model.kernel_
    model.set_params(steps=0).fit(*wave(300))
    assert model.kernel_ == first


def test_verbose_tells_what_was_kept(capsys):
    CMERegressor(steps=5, verbose=1).fit(*wave(60))
    told = capsys.readouterr().err
    assert "60 rows, 3 features" in told
    assert "kept" in told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "features"}, "solver='features' is unknown"),
        ({"steps": -1}, "steps=-1: must be an integer >= 0"),
        ({"scaling": "range"}, "scaling='range' is unknown"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        CMERegressor(**settings).fit(*wave(30))


@pytest.mark.parametrize("convert", [list, np.array, lambda y: np.array(y, object), lambda y: np.stack([y, y], 1)])
@pytest.mark.parametrize("kind", [CMERegressor, kme.ASKLRegressor])
def test_texts_as_targets_are_named(kind, convert):
    X, _ = wave(30)
    with pytest.raises(DataError, match=r"among its targets is the text 'low' in row 0.*MCEClassifier"):
        kind().fit(X, convert(["low", "high"] * 15))


def test_wrong_queries_are_named(fitted):
    X, _ = wave(5)
    with pytest.raises(ConfigError, match=r"coverage=1\.5: must be a number between 0 and 1"):
        fitted.predict_interval(X, 1.5)
    with pytest.raises(ConfigError, match="q=2"):
        fitted.predict_quantiles(X, 2)
    with pytest.raises(DataError, match="one value for each"):
        fitted.expectation(X, lambda y: 1.0)
    for given in (None, "0.9", 0, 1, np.nan):
        with pytest.raises(ConfigError, match=r"coverage=.*: must be a number between 0 and 1"):
            fitted.predict_interval(X, given)
        with pytest.raises(ConfigError, match=r"coverage=.*: must be a number between 0 and 1"):
            kme.predict(fitted, X, outputs=["interval"], coverage=given)


@pytest.mark.parametrize(("rows", "coverage", "needed", "most"), [(8, 0.9, 9, 0.8888), (60, 0.999, 999, 0.9836)])
def test_infinite_intervals_are_told_with_the_rows_that_they_need(rows, coverage, needed, most):
    X, y = wave(rows)
    model, words = CMERegressor(steps=0).fit(X, y), f"at least {needed} rows, .* those of {rows}; .* at most {most}"
    embedding = kme.ConditionalMeanEmbedding(regularization=0.01).fit(X, y)
    for ask in (
        lambda c: model.predict_interval(X[:3], coverage=c)[1],
        lambda c: embedding.interval(X[:3], coverage=c)[1],
        lambda c: kme.predict(model, X[:3], coverage=c)["interval_high"].to_numpy(),
    ):
        with pytest.warns(UserWarning, match=words) as told:
            assert np.isinf(ask(coverage)).all()
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.isfinite(ask(most)).all()
            kme.predict(model, X[:3], outputs=["mean"], coverage=coverage)


@pytest.mark.parametrize("rows", [9, 99])
def test_intervals_of_just_enough_rows_are_finite_without_a_warning(rows):
    X, y = wave(rows)
    model = CMERegressor(steps=0).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(model.predict_interval(X[:3], coverage=rows / (rows + 1))).all()


DAYS = np.datetime64("2020-01-01") + np.arange(30)


@pytest.mark.parametrize("convert", [np.asarray, pd.Series, lambda y: y.tolist(), lambda y: y.astype(object)])
@pytest.mark.parametrize("kind", [CMERegressor, kme.ASKLRegressor])
def test_dates_as_targets_are_told_the_way_to_numbers(kind, convert):
    X, _ = wave(30)
    with pytest.raises(
        DataError, match=r"its targets are dates or times; pass numbers as y, e\.g\. days: \(y - y\.min"
    ):
        kind().fit(X, convert(DAYS))
    with pytest.raises(DataError, match=r"its targets are durations; .* seconds: y / numpy\.timedelta64\(1, 's'\)"):
        kind().fit(X, convert(DAYS - DAYS[0]))
    numbers = (DAYS - DAYS.min()) / np.timedelta64(1, "D")  # the way out that the message shows
    assert CMERegressor(steps=0).fit(X, numbers).n_outputs_ == 1


@pytest.mark.parametrize("make", [CMERegressor, kme.MCEClassifier, kme.ASKLRegressor])
@pytest.mark.parametrize("value", [7, 7.0, np.int64(7), np.array(7), True])
def test_a_single_value_as_targets_is_told_what_to_pass(make, value):
    X, _ = wave(30)
    with pytest.raises(DataError, match=r"is a single value; pass the name of a column of X \(a text\) or an array"):
        make().fit(pd.DataFrame({"a": X[:, 0], "b": X[:, 0]}), value)
    with pytest.raises(DataError, match=r"is a single value; pass an array or a list with one value for each row"):
        make().fit(X, value)
    with pytest.raises(DataError, match=r"y='a' is a single value; .* only the columns of a table have names"):
        make().fit(X, "a")
    for Y in (value, "a"):
        with pytest.raises(DataError, match=r"Y is .*; pass an array or a list with one target for each row of X"):
            kme.ConditionalMeanEmbedding().fit(X, Y)


@pytest.mark.parametrize(
    "given",
    [
        lambda y: y,
        lambda y: y.tolist(),
        lambda y: [y.tolist()[0], *[0.5] * (len(y) - 1)],
        lambda y: np.array(y.tolist(), object),
        pd.Series,
        lambda y: pd.DataFrame({"a": y, "b": 0.5}),
    ],
    ids=["array", "list", "list with fractions", "objects", "series", "frame"],
)
@pytest.mark.parametrize("build", [CMERegressor, kme.ASKLRegressor])
def test_integer_targets_that_doubles_merge_are_refused(build, given):
    X, y = np.random.default_rng(0).normal(size=(40, 2)), 2**60 + np.arange(40)
    with pytest.raises(DataError, match=r"integer 11529215\d+, and beyond 2\*\*53 integers cannot be told apart"):
        build().fit(X, given(y))
    with pytest.raises(DataError, match="beyond 2"):
        build().fit(pd.DataFrame({"a": X[:, 0], "t": -y}), "t")


def test_levels_and_functions_that_give_no_numbers_are_errors_of_ours():
    X = np.random.default_rng(0).normal(size=(40, 2))
    model = CMERegressor(steps=2).fit(X, X[:, 0])
    for q in ("a", [0.5, "x"], [[0.5], [0.1, 0.2]], 1j):
        with pytest.raises(DataError, match="q must be real numbers"):
            model.predict_quantiles(X[:2], q)
    for h in (lambda v: "x", lambda v: v * 1j, lambda v: [[1], [1, 2]]):
        with pytest.raises(DataError, match="the values of h must be real numbers"):
            model.expectation(X[:2], h)
    with pytest.raises(DataError, match="h must be a function of the targets"):
        model.expectation(X[:2], "x")


def test_more_draws_than_fit_the_memory_are_refused_with_their_size():
    X = np.random.default_rng(0).normal(size=(40, 2))
    model = CMERegressor(steps=2).fit(X, X[:, 0])
    with pytest.raises(ConfigError, match=r"n=1000000000000: .* targets for 3 rows need .* GB of memory; draw fewer"):
        model.sample(X[:3], 10**12)
    assert model.sample(X[:3], 10).shape == (3, 10)
