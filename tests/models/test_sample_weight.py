"""Weights in the estimators: `sample_weight`, `class_weight`, a stored column of weights."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_iris, make_moons
from sklearn.metrics import log_loss
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_dense_data

import kme_dist as kme
from kme_dist import ASKLClassifier, ASKLRegressor, CENClassifier, MCEClassifier
from kme_dist.data.reading import Table
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, DataError

DOUBLE = {"dtype": "float64"}
# Leave-one-out is by row: without it a row of weight 2 is the row twice.
GIVEN = {"objective": "rcb", "refit_regularization": False, "calibration": "none", **DOUBLE}
ESTIMATORS = {
    "mce": MCEClassifier(steps=15, **GIVEN),
    "mce, balanced": MCEClassifier(steps=15, class_weight="balanced", **GIVEN),
    "mce, empirical risk, mean": MCEClassifier(
        steps=15, risk="mean", scaling="standard", **{**GIVEN, "objective": "erm"}
    ),
    "mce, as given": MCEClassifier(steps=0, regularization=1e-3, **GIVEN),
    "mce, tiled": MCEClassifier(steps=0, regularization=1e-2, solver="tiled", **GIVEN),
    "mce, linear": MCEClassifier(kernel="linear", steps=5, **GIVEN),
    "cen": CENClassifier(hidden=(16,), regularization=1e-3, steps=20, **DOUBLE),
    "cen, kernel head": CENClassifier(hidden=(8,), head="gaussian", steps=15, **DOUBLE),
    "askl": ASKLClassifier(features=60, epochs=8, batch_size=1000, **DOUBLE),
    "askl, regression": ASKLRegressor(features=60, epochs=8, batch_size=1000, **DOUBLE),
}
CLASSIFIERS = {name: model for name, model in ESTIMATORS.items() if "regression" not in name}


@pytest.fixture(scope="module")
def rows():
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    return X[order], np.array(["red", "green", "blue"])[y[order]]


@pytest.fixture(scope="module")
def weights(rows):
    return np.random.default_rng(1).uniform(0.2, 5.0, len(rows[0]))


def clone(model, **settings):
    return type(model)(**{**model.get_params(), **settings})


def outputs(model, X):
    return model.decision_function(X).tobytes(), model.predict(X).tolist()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_weights_are_repeated_and_removed_rows_as_scikit_learn_checks_it(name):
    model = ESTIMATORS[name]
    check_sample_weight_equivalence_on_dense_data(type(model).__name__, model)


SMALL_TABLES = {  # at default settings, besides the number of steps
    "mce": (MCEClassifier(steps=8), 150),
    "mce, batches": (MCEClassifier(steps=4, batch_size=60), 300),
    "mce, validation": (MCEClassifier(steps=4, objective="validation", batch_size=60), 100),
    "mce, leave-one-out": (MCEClassifier(steps=4, objective="loo"), 100),
    "cen": (CENClassifier(steps=20), 150),
    "cen, halves": (CENClassifier(steps=10, objective="validation", dropout=0.2, learning_rate=0.01), 100),
    "askl": (ASKLClassifier(features=200, epochs=5), 12),
    "askl, regression": (ASKLRegressor(features=200, epochs=5), 12),
}


def counted_rows(count, numbers=False):
    """Rows, labels and counts, of which some are 0; and the repeated rows in random order, with their labels."""
    rng = np.random.default_rng(8)
    X, y = make_moons(count, noise=0.3, random_state=1)
    counts, y = np.resize([3, 1, 0, 4, 2], count), y + rng.normal(size=count) if numbers else y
    order = rng.permutation(counts.sum())
    return X, y, counts, np.repeat(X, counts, axis=0)[order], np.repeat(y, counts)[order]


def decided(model, X):
    """The bytes of everything that scikit-learn compares."""
    methods = ("decision_function", "predict_proba", "predict")
    return [np.asarray(getattr(model, method)(X)).tobytes() for method in methods if hasattr(model, method)]


@pytest.mark.parametrize("name", SMALL_TABLES)
def test_integer_weights_of_a_small_table_are_repeated_rows_to_the_bit(name):
    model, count = SMALL_TABLES[name]
    X, y, counts, X_repeated, y_repeated = counted_rows(count, "regression" in name)
    order = np.random.default_rng(2).permutation(count)
    found = [
        clone(model).fit(X, y, counts),
        clone(model).fit(X[order], y[order], counts[order]),
        clone(model).fit(X_repeated, y_repeated),
    ]
    first, *others = [decided(one, X) for one in found]
    for other in others:
        assert other == first
    assert decided(clone(model).fit(X, y), X) != first, "the weights count"


@pytest.mark.parametrize("name", ["mce", "cen", "askl", "askl, regression"])
def test_repeated_rows_of_a_small_table_have_the_bits_of_weights_in_data_sets_and_with_a_client(name, client, tmp_path):
    model, count = SMALL_TABLES[name]
    X, y, counts, X_repeated, y_repeated = counted_rows(count, "regression" in name)
    expected = decided(clone(model).fit(X, y, counts), X)
    task = "regression" if "regression" in name else "classification"
    stored = [
        kme.ingest(
            Table(X, y, ["a", "b"], None if task == "regression" else [0, 1], weights=counts.astype(float)),
            tmp_path / "weights.zarr", task=task, dtype="float64",
        ),
        kme.ingest((X_repeated, y_repeated), tmp_path / "repeated.zarr", task=task, dtype="float64"),
    ]  # fmt: skip
    for settings in ({}, {"client": client}):
        models = [clone(model, **settings).fit(data) for data in stored]
        models += [clone(model, **settings).fit(X_repeated, y_repeated)]
        for found in models:
            assert decided(found, X) == expected


@pytest.mark.parametrize("calibration", ["temperature", "isotonic"])
def test_a_whole_model_with_integer_weights_is_that_of_repeated_rows(calibration, rows):
    X, y = rows
    counts = np.resize([1, 3, 2], len(X))
    model = MCEClassifier(steps=6, batch_size=1000, **GIVEN)
    one, two = (
        clone(model).fit(X, y, sample_weight=counts),
        clone(model).fit(np.repeat(X, counts, axis=0), np.repeat(y, counts)),
    )
    np.testing.assert_allclose(one.kernel_.length_scale, two.kernel_.length_scale, rtol=1e-6)
    assert one.regularization_ == pytest.approx(two.regularization_, rel=1e-6)
    assert one.probability_floor_ == pytest.approx(two.probability_floor_, rel=1e-12)
    assert one.bound_ == pytest.approx(two.bound_, rel=1e-6)
    for a, b in zip(one.history_, two.history_, strict=True):
        assert a["accuracy"] == pytest.approx(b["accuracy"])
    np.testing.assert_allclose(one.predict_proba(X), two.predict_proba(X), atol=1e-6)
    one.calibrate(X, y, calibration, sample_weight=counts)
    two.calibrate(np.repeat(X, counts, axis=0), np.repeat(y, counts), calibration)
    np.testing.assert_allclose(one.predict_proba(X), two.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_stored_column_of_weights_is_sample_weight_to_the_bit(name, rows, weights, tmp_path):
    X, y = rows
    names, codes = np.unique(y, return_inverse=True)
    table = Table(X, codes, [f"x{i}" for i in range(4)], names.tolist(), weights=weights)
    data = kme.ingest(table, tmp_path / "rows.zarr", task="classification", dtype="float64")
    model = CLASSIFIERS[name]
    assert outputs(clone(model).fit(data), X) == outputs(clone(model).fit(X, y, weights), X)
    assert outputs(clone(model).fit(data), X) != outputs(clone(model).fit(X, y), X), "the weights count"
    with pytest.raises(DataError, match="its own weights"):
        clone(model).fit(data, sample_weight=weights)


def test_rows_of_weight_zero_in_a_data_set_are_as_no_rows(tmp_path):
    rng = np.random.default_rng(3)
    X, y = make_moons(1300, noise=0.2, random_state=0)
    weights = np.where(rng.random(len(X)) < 0.4, 0.0, rng.uniform(0.5, 2.0, len(X)))
    X[weights == 0] *= 50  # far away: they must count in nothing
    table = Table(X, y, ["a", "b"], [0, 1], weights=weights)
    data = kme.ingest(table, tmp_path / "rows.zarr", task="classification", dtype="float64")
    here, there = MCEClassifier(steps=5).fit(X, y, weights), MCEClassifier(steps=5).fit(data)
    assert [record["objective"] for record in there.history_] == [record["objective"] for record in here.history_]
    assert outputs(there, X[:50]) == outputs(here, X[:50])


def test_rows_in_too_many_ranges_stay_in_the_batches(tmp_path, monkeypatch):
    X, y = make_moons(400, noise=0.2, random_state=0)
    table = Table(X, y, ["a", "b"], [0, 1], weights=np.tile([0.0, 1.0], 200))
    data = kme.ingest(table, tmp_path / "rows.zarr", task="classification", dtype="float64")
    whole = RowsRef.of(data, classes=True)
    kept = whole.with_positive_weight()
    assert (kept.count, kept.positive, kept.weight) == (200, 200, whole.weight)
    np.testing.assert_array_equal(kept.read()[0], X[1::2])
    monkeypatch.setattr("kme_dist.data.rows._MOST_RANGES", 100)
    assert whole.with_positive_weight() is whole


def test_a_closed_client_is_refused(rows):
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        client = Client(cluster)
        client.close()
        with pytest.raises(ConfigError, match="client: it is closed; connect again"):
            MCEClassifier(client=client).fit(*rows)


@pytest.fixture(scope="module")
def client():
    workers = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**workers) as cluster, Client(cluster) as found:
        yield found


@pytest.mark.parametrize("name", [*CLASSIFIERS, "default"])
def test_weights_give_the_same_bits_with_a_client(name, rows, weights, client):
    X, y = rows
    default = MCEClassifier(steps=8, class_weight={"red": 2.0}, calibration="temperature")
    model = default if name == "default" else CLASSIFIERS[name]
    alone = clone(model).fit(X, y, weights / 50)
    assert outputs(clone(model, client=client).fit(X, y, weights / 50), X) == outputs(alone, X)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_model_with_weights_comes_back_from_disk(name, rows, weights, tmp_path):
    X, y = rows
    model = clone(CLASSIFIERS[name], class_weight={"red": 2.0, "blue": 0.5}).fit(X, y, weights)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert outputs(again, X) == outputs(model, X)
    assert again.class_weight == {"red": 2.0, "blue": 0.5}


def test_numeric_labels_of_class_weight_come_back_as_numbers(tmp_path):
    X, y = load_iris(return_X_y=True)
    model = MCEClassifier(steps=0, class_weight={0: 3.0, 2: 0.5}).fit(X, y)
    model.save(tmp_path / "model.zarr")
    assert kme.load(tmp_path / "model.zarr").class_weight == {0: 3.0, 2: 0.5}


# --- class_weight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mce", "mce, as given", "cen", "askl"])
def test_class_weight_multiplies_sample_weight(name, rows, weights):
    X, y = rows
    model = clone(CLASSIFIERS[name], scaling="unit")  # moments are those of `sample_weight` alone
    factors = {"red": 3.0, "green": 1.5, "blue": 1.0}
    one = clone(model, class_weight=factors).fit(X, y, weights)
    two = clone(model).fit(X, y, weights * [factors[label] for label in y])
    np.testing.assert_allclose(one.decision_function(X), two.decision_function(X), rtol=1e-6, atol=1e-7)


def test_balanced_classes_are_as_important_as_each_other(rows, tmp_path):
    X, y = rows
    kept = (y != "red") | (np.arange(len(y)) % 7 == 0)
    X, y = X[kept], y[kept]
    names, counts = np.unique(y, return_counts=True)
    factors = dict(zip(names.tolist(), len(y) / (3 * counts), strict=True))
    model = MCEClassifier(steps=10, **GIVEN)
    balanced = clone(model, class_weight="balanced").fit(X, y)
    np.testing.assert_allclose(
        balanced.decision_function(X), clone(model, class_weight=factors).fit(X, y).decision_function(X), atol=1e-9
    )
    data = kme.ingest((X, y), tmp_path / "rows.zarr", dtype="float64")
    assert outputs(clone(model, class_weight="balanced").fit(data), X) == outputs(balanced, X)
    heavier = clone(model, class_weight={"red": 20.0}).fit(X, y)
    rare = y == "red"
    assert heavier.predict_proba(X)[rare, 2].mean() > clone(model).fit(X, y).predict_proba(X)[rare, 2].mean()


def test_the_unit_of_the_weights_does_not_matter_below_one(rows, weights):
    """Weights that sum to 1 are not one row."""
    X, y = rows
    model = MCEClassifier(steps=8, dtype="float64")
    one, two = (clone(model).fit(X, y, w) for w in (weights / weights.mean(), weights / weights.sum()))
    assert one.probability_floor_ == pytest.approx(two.probability_floor_) == pytest.approx(1 / 153)
    np.testing.assert_allclose(one.predict_proba(X), two.predict_proba(X), atol=1e-6)


@pytest.mark.parametrize("objective", ["auto", "rcb", "validation", "loo", "erm", "cv", "median"])
def test_every_objective_learns_with_weights(objective, rows, weights):
    X, y = rows
    clf = MCEClassifier(objective=objective, steps=10, batch_size=60).fit(X, y, weights)
    assert clf.score(X, y, weights) > 0.9
    kept = np.arange(len(y)) % 3 > 0
    one, two = clone(clf).fit(X, y, weights * kept), clone(clf).fit(X[kept], y[kept], weights[kept])
    assert outputs(one, X) == outputs(two, X), "weight 0 is no row"


def test_weights_choose_between_contradictory_rows():
    X = np.repeat(np.linspace(0, 1, 20)[:, None], 2, axis=0)
    y = np.tile([0, 1], 20)
    heavy = np.where((y == 1) == (X[:, 0] > 0.5), 5.0, 1.0)
    clf = MCEClassifier(steps=30).fit(X, y, heavy)
    assert clf.score(X, y, heavy) == pytest.approx(5 / 6)
    assert clf.score(X, y) == pytest.approx(0.5)
    p = clf.predict_proba([[0.9]])[0, 1]
    assert 0.6 < p < 0.95


# --- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w[:-1], "shape"),
        (lambda w: -w, "row 0 is .* must be finite numbers >= 0"),
        (lambda w: w * np.nan, "(?i)row 0 is nan"),
        (lambda w: 0 * w, "(?i)zero|are 0"),
    ],
)
@pytest.mark.parametrize("name", ["mce, as given", "cen", "askl", "askl, regression"])
def test_impossible_weights_are_refused(name, change, words, rows, weights):
    X, y = rows
    with pytest.raises(ValueError, match=words):
        clone(ESTIMATORS[name]).fit(X, X[:, 0] if "regression" in name else y, change(weights))


def test_weights_that_leave_one_class_are_refused(rows, weights):
    X, y = rows
    with pytest.raises(DataError, match="only one class"):
        MCEClassifier(steps=0).fit(X, y, np.where(y == "red", weights, 0))


@pytest.mark.parametrize("given", ["equal", {"red": -1}, {}, 2.0])
def test_impossible_class_weights_are_refused(given, rows):
    with pytest.raises(ConfigError, match=r"class_weight=.*'balanced'"):
        MCEClassifier(steps=0, class_weight=given).fit(*rows)


def test_class_weights_of_unknown_labels_are_refused(rows):
    with pytest.raises(DataError, match="'pink', which no row has; the labels are 'blue', 'green', 'red'"):
        MCEClassifier(steps=0, class_weight={"pink": 1.0}).fit(*rows)


def test_labels_of_class_weights_may_be_texts_as_in_json(rows):
    X, y = rows[0], np.unique(rows[1], return_inverse=True)[1]
    one, two = (MCEClassifier(steps=0, class_weight=given).fit(X, y) for given in ({0: 3.0}, {"0": 3.0}))
    assert one.decision_function(X).tobytes() == two.decision_function(X).tobytes()


def test_repeated_rows_do_not_fool_leave_one_out():
    """A copy of a row tells its label: without care λ falls to nothing and probabilities to 0 and 1."""
    X, y = make_moons(900, noise=0.3, random_state=0)
    X, y, Xq, yq = X[:150], y[:150], X[150:], y[150:]
    once, twice = MCEClassifier().fit(X, y), MCEClassifier().fit(np.repeat(X, 2, axis=0), np.repeat(y, 2))
    losses = [log_loss(yq, model.predict_proba(Xq)) for model in (once, twice)]
    assert losses[1] <= 1.15 * losses[0]
    assert twice.regularization_ > 0.05 * once.regularization_


@pytest.mark.parametrize("build", [kme.MCEClassifier, kme.CMERegressor])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lambda n: [np.nan] * n, "the weight of row 0 is nan; weights must be finite"),
        (lambda n: [1.0] * (n - 1) + [np.inf], "the weight of row 29 is inf; weights must be finite"),
        (np.zeros, "all 30 weights are zero"),
        (lambda n: np.ones(n - 1), r"weights of shape \(29,\) for 30 rows"),
        (lambda n: ["a"] * n, "sample_weight must be real numbers"),
        (lambda n: [1j] * n, "sample_weight must be real numbers"),
        (lambda n: np.full(n, 5e-324), r"the weight of row 0 is 4.94e-324; positive weights must be from 1e-150"),
        (lambda n: np.full(n, 1e308), r"the weight of row 0 is 1e\+308; positive weights must be from 1e-150"),
    ],
)
def test_weights_of_no_use_are_errors_of_ours_by_row(build, weights, words):
    X, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) % 2
    with pytest.raises(DataError, match=words):
        build(steps=2).fit(X, y, sample_weight=weights(30))
