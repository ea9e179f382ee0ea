"""Tables with heavy tails: default models flatten them where that helps, the same on every path."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

import kme_dist as kme
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.rows import RowsRef, Scaling, warn_of_squeezed
from kme_dist.errors import AssumptionWarning

QUICK = {"steps": 10, "n_jobs": 1}


def table(n=400, seed=0, power=3.0):
    """Classes that depend on normal numbers, of which the table has the exponentials; one column is normal."""
    rng = np.random.default_rng(seed)
    Z = rng.normal(size=(n, 4))
    y = (Z[:, 0] * Z[:, 1] + 0.3 * Z[:, 2] > 0).astype(int)
    return np.concatenate([np.exp(power * Z[:, :3]), Z[:, 3:]], axis=1), y


def accuracy(model, seed=1):
    X, y = table(600, seed)
    return model.score(X, y)


def test_heavy_tails_are_flattened_by_default():
    X, y = table()
    flat, plain = (kme.MCEClassifier(scaling=kind, **QUICK).fit(X, y) for kind in ("auto", "unit"))
    assert flat.scaling_.curves.columns.tolist() == [0, 1, 2]
    assert plain.scaling_.curves is None
    assert accuracy(flat) > accuracy(plain) + 0.05


def test_tables_without_them_are_scaled_to_unit_range():
    X, y = table(power=0.1)
    one, two = (kme.MCEClassifier(scaling=kind, **QUICK).fit(X, y) for kind in ("auto", "unit"))
    assert one.scaling_.curves is None
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


@pytest.mark.parametrize("settings", [{"objective": "rcb"}, {"kernel": "linear"}, {"features": {"name": "identity"}}])
def test_published_objectives_and_given_maps_see_rows_of_unit_range(settings):
    X, y = table(120)
    model = kme.MCEClassifier(**settings, **QUICK).fit(X, y)
    assert model.scaling_.curves is None


def test_curves_are_stored_with_the_model(tmp_path):
    X, y = table()
    model = kme.MCEClassifier(**QUICK).fit(X, y)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.scaling_.curves is not None


def test_a_row_of_weight_two_is_the_row_twice():
    X, y = table(150)
    counts = np.random.default_rng(5).integers(1, 3, len(y))
    one = kme.MCEClassifier(dtype="float64", **QUICK).fit(X, y, sample_weight=counts)
    two = kme.MCEClassifier(dtype="float64", **QUICK).fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
    np.testing.assert_allclose(one.scaling_.curves.values, two.scaling_.curves.values, atol=1e-12)


def test_a_warm_start_keeps_the_curves_its_kernel_was_learned_with():
    X, y = table()
    model = kme.MCEClassifier(warm_start=True, **QUICK).fit(X, y)
    before = model.scaling_.curves.digest
    assert model.fit(X, y).scaling_.curves.digest == before


def test_the_same_bits_alone_and_on_workers():
    X, y = table(200)
    alone, far = (kme.MCEClassifier(steps=5, n_jobs=n_jobs).fit(X, y) for n_jobs in (1, 2))
    assert far.scaling_.curves.columns.tolist() == [0, 1, 2]
    assert far.predict_proba(X).tobytes() == alone.predict_proba(X).tobytes()


# --- regression -------------------------------------------------------------------------------------------------------

SHORT = {"steps": 10, "n_jobs": 1}


def numbers(n=400, seed=0, power=3.0):
    """Targets that depend on normal numbers, of which the table has the exponentials; and the normal numbers."""
    rng = np.random.default_rng(seed)
    Z = rng.normal(size=(n, 3))
    y = Z[:, 0] * Z[:, 1] + np.sin(2 * Z[:, 2]) + 0.05 * rng.normal(size=n)
    return np.exp(power * Z), y, Z


def with_wrong_cell(value, n=300):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 4))
    y = X[:, 0] ** 2 + np.sin(X[:, 1]) + 0.1 * rng.normal(size=n)
    spoiled = X.copy()
    spoiled[3, 0] = value
    return spoiled, y, X


def half_score(X, y, cut, within=np.inf, **settings):
    """R² of the rows from `cut` on, in the model of those before; of those whose first feature is within a range."""
    model = kme.CMERegressor(**{**SHORT, **settings}).fit(X[:cut], y[:cut])
    kept = cut + np.flatnonzero(np.abs(X[cut:, 0]) < within)
    return model.score(X[kept], y[kept])


def test_regression_on_heavy_tails_is_close_to_that_on_normal_numbers():
    X, y, Z = numbers(800)
    flat, straight = half_score(X, y, 400), half_score(Z, y, 400)
    assert straight > 0.97
    assert flat > straight - 0.03
    assert half_score(X, y, 400, scaling="standard") < 0.5


@pytest.mark.parametrize("value", [1e9, -1e9, 1e100, -1e100])
def test_one_wrong_cell_does_not_spoil_a_regression(value):
    """A curve is flat beyond the values it was made from, all but a few: near these the square is too small."""
    spoiled, y, X = with_wrong_cell(value)
    assert half_score(spoiled, y, 200) > 0.9
    assert half_score(spoiled, y, 200, within=2) > half_score(X, y, 200, within=2) - 0.05
    with pytest.warns(AssumptionWarning, match="column 'x0' is from"):
        assert half_score(spoiled, y, 200, scaling="standard") < 0.1


@pytest.mark.parametrize("value", [1e9, -1e9, 1e60, 1e100, -1e100])
def test_one_wrong_cell_does_not_spoil_a_classifier(value):
    spoiled, y, X = with_wrong_cell(value, 500)
    labels = (y > 1).astype(int)
    right, wrong = (kme.MCEClassifier(**QUICK).fit(T[:250], labels[:250]) for T in (X, spoiled))
    assert wrong.score(X[250:], labels[250:]) > right.score(X[250:], labels[250:]) - 0.03


def test_a_wrong_cell_among_more_rows_than_are_kept_in_double_precision():
    spoiled, y, X = with_wrong_cell(1e100, 1_500)
    assert half_score(spoiled, y, 1_200) > 0.9
    assert half_score(spoiled, y, 1_200, within=2) > half_score(X, y, 1_200, within=2) - 0.02


def test_regression_without_heavy_tails_is_that_of_standard_scaling():
    X, y, _ = numbers(200, power=0.1)
    one, two = (kme.CMERegressor(scaling=kind, **SHORT).fit(X, y) for kind in ("auto", "standard"))
    assert one.scaling_.curves is None
    assert one.predict(X).tobytes() == two.predict(X).tobytes()


def test_heavy_tails_that_the_target_is_linear_in_stay():
    rng = np.random.default_rng(2)
    X = np.exp(rng.normal(size=(300, 3)))
    y = X[:, 0] + 0.5 * X[:, 1] + 0.3 * rng.normal(size=300)
    one, two = (kme.CMERegressor(scaling=kind, **SHORT).fit(X, y) for kind in ("auto", "standard"))
    assert one.scaling_.curves is None
    assert one.predict(X).tobytes() == two.predict(X).tobytes()


def test_normal_scores_have_the_deviation_of_the_other_features():
    X, y, _ = numbers()
    model = kme.CMERegressor(**SHORT).fit(X, y)
    np.testing.assert_allclose(model.scaling_.apply(X, "float64").std(axis=0), 1.0, atol=1e-9)


@pytest.mark.parametrize("settings", [{"kernel": "linear"}, {"scaling": "unit"}, {"steps": 0}])
def test_only_distances_that_are_learned_are_flattened(settings):
    X, y, _ = numbers(100)
    assert kme.CMERegressor(**{**SHORT, **settings}).fit(X, y).scaling_.curves is None


def test_sparse_rows_have_no_curves():
    X, y, _ = numbers(100)
    X[X < 1] = 0
    assert kme.CMERegressor(**SHORT).fit(scipy.sparse.csr_matrix(X), y).scaling_.curves is None


def test_a_regressor_is_the_same_stored_and_in_batches_and_from_a_data_set(tmp_path):
    X, y, _ = numbers(150)
    model = kme.CMERegressor(**SHORT).fit(X, y)
    assert model.scaling_.curves.columns.tolist() == [0, 1, 2]
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert again.predict(X).tobytes() == model.predict(X).tobytes()
    assert again.scaling == "auto"
    data = kme.ingest((X, y), tmp_path / "d.zarr", task="regression")
    stored = kme.CMERegressor(**SHORT).fit(data)
    assert stored.predict(X).tobytes() == model.predict(X).tobytes()
    kme.predict(again, data, tmp_path / "scores.zarr")
    scores = kme.open_predictions(tmp_path / "scores.zarr").read("mean")
    np.testing.assert_allclose(scores, model.predict(X), atol=1e-9)


def test_a_regressor_has_the_same_bits_alone_and_on_workers():
    X, y, _ = numbers(150)
    alone, far = (kme.CMERegressor(steps=5, n_jobs=n_jobs).fit(X, y) for n_jobs in (1, 2))
    assert far.scaling_.curves.digest == alone.scaling_.curves.digest
    assert far.predict(X).tobytes() == alone.predict(X).tobytes()


@pytest.mark.parametrize("build", [kme.CMERegressor, kme.MCEClassifier])
@pytest.mark.parametrize("steps", [0, 10])
def test_a_warm_start_keeps_the_curves(build, steps):
    X, y, _ = numbers(200)
    model = build(warm_start=True, **SHORT).fit(X, y if build is kme.CMERegressor else y > 0)
    before = model.scaling_.curves.digest
    model.steps = steps
    assert model.fit(X, y if build is kme.CMERegressor else y > 0).scaling_.curves.digest == before


def test_weights_of_a_regression_are_counts_of_rows_in_the_curves():
    X, y, _ = numbers(150)
    counts = np.random.default_rng(5).integers(1, 3, len(y))
    one = kme.CMERegressor(**SHORT).fit(X, y, sample_weight=counts)
    two = kme.CMERegressor(**SHORT).fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
    np.testing.assert_allclose(one.scaling_.curves.values, two.scaling_.curves.values, atol=1e-12)


def filled(value, n=300):
    """A table one cell of which is a fill value, with class labels."""
    X = np.random.default_rng(0).normal(size=(n, 3))
    y = (X[:, 0] + X[:, 1] > 0).astype(int)
    X[5, 1] = value
    return X, y


SCALED = {
    "MCEClassifier": lambda: kme.MCEClassifier(steps=2, scaling="unit"),
    "CMERegressor": lambda: kme.CMERegressor(steps=2, scaling="standard"),
    "ASKLRegressor": lambda: kme.ASKLRegressor(features=10, epochs=1),
    "CENClassifier": lambda: kme.CENClassifier(steps=2),
    "ParzenClassifier": lambda: kme.ParzenClassifier(),
    "ConditionalMeanEmbedding": lambda: kme.ConditionalMeanEmbedding(regularization=1e-3),
}


@pytest.mark.parametrize("build", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("value", [-9999, 9.97e36])
def test_one_fill_value_that_squeezes_its_column_is_named_once(build, value):
    X, y = filled(value)
    with pytest.warns(AssumptionWarning, match=r"column 'x1' is from .* all rows except very few lie within") as found:
        build().fit(X, y)
    assert len(found) == 1


@pytest.mark.parametrize("build", [kme.MCEClassifier, kme.CMERegressor])
def test_nothing_is_said_of_fill_values_that_normal_scores_or_no_scaling_leave_harmless(build):
    for value in (-9999, 1e30, 1e100):
        X, y = filled(value)
        build(steps=2).fit(X, y)  # warnings are errors here
        build(steps=2, scaling=None).fit(X, y)


def test_a_fill_value_that_no_sample_has_is_still_found():
    X, _ = filled(1e30, n=20_000)
    rows = RowsRef.of(ArrayRows(X, None, feature_names=["a", "b", "c"]))
    scaling = Scaling.of(rows.source.split_statistics(), "unit")
    with pytest.warns(AssumptionWarning, match=r"column 'b' is from -4.* to 1e\+30"):
        warn_of_squeezed(rows, scaling, 0)


def test_rare_flags_counts_and_long_tails_are_no_fill_values():
    rng = np.random.default_rng(0)
    flag, count = np.arange(3_000) == 7, np.where(rng.random(3_000) < 0.004, rng.integers(1, 9_000, 3_000), 0)
    X = np.column_stack([flag, flag * 1e30, count, rng.lognormal(sigma=2, size=3_000), rng.standard_t(2, 3_000)])
    rows = RowsRef.of(ArrayRows(X.astype(float), None))
    for kind in ("unit", "standard"):
        warn_of_squeezed(rows, Scaling.of(rows.source.split_statistics(), kind), 0)
