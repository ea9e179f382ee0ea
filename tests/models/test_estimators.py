"""The scikit-learn face: the common checks, labels and tables of all kinds, identities, storing, refusing."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pandas as pd
import pytest
from kernel_table import Tanimoto
from sklearn.base import clone
from sklearn.datasets import load_iris, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import kme_dist as kme
from kme_dist import CMERegressor, MCEClassifier, backend, errors
from kme_dist.core.kernels import Gaussian, Linear, Matern

STEPS = 15


@parametrize_with_checks([MCEClassifier(steps=STEPS)])
def test_scikit_learn_common_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


@pytest.fixture(scope="module")
def fitted(iris):
    return MCEClassifier(steps=STEPS).fit(*iris)


# --- learning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["auto", "calibrated", "rcb", "validation", "loo", "erm", "cv", "median"])
def test_every_objective_learns_iris(objective, iris):
    X, y = iris
    clf = MCEClassifier(objective=objective, steps=40).fit(X[::2], y[::2])
    assert clf.score(X[1::2], y[1::2]) > 0.9
    if objective == "auto":
        assert set(clf.loo_log_loss_) == {
            "learned matern-3/2", "learned gaussian", "learned matern-1/2", "common matern-3/2"
        }  # fmt: skip
        assert clf.objective_ in clf.loo_log_loss_
        assert type(clf.kernel_).__name__.lower() in clf.objective_
    else:
        assert clf.objective_ == objective


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg", "nystrom"])
def test_every_solver_and_precision(dtype, solver, iris):
    X, y = iris
    clf = MCEClassifier(steps=STEPS, dtype=dtype, solver=solver, centres=40 if solver == "nystrom" else None)
    clf.fit(X[::2], y[::2])
    assert clf.solver_ == solver
    assert clf.score(X[1::2], y[1::2]) > 0.9
    # Weights may be large and cancel: they stay in the precision of the solve, which is double where single cannot
    # carry it, and always for centres.
    assert str(backend.to_host(clf.embedding_.weights).dtype) in (
        ("float64",) if solver == "nystrom" else (dtype, "float64")
    )


def test_exact_solvers_are_the_same_model(iris):
    X, y = iris
    one, *others = (
        MCEClassifier(objective="median", solver=s, dtype="float64", refit_regularization=False, regularization=1e-3)
        .fit(X, y).decision_probabilities(X[:20])
        for s in ("cholesky", "tiled", "pcg")
    )  # fmt: skip
    for other in others:
        np.testing.assert_allclose(other, one, atol=1e-5)


def test_dask_collections_are_rows_like_any_other(iris):
    import dask.array as da

    X, y = iris
    plain = MCEClassifier(objective="median").fit(X, y)
    lazy = MCEClassifier(objective="median").fit(da.from_array(X, chunks=(40, 2)), da.from_array(y, chunks=70))
    np.testing.assert_array_equal(lazy.predict_proba(X), plain.predict_proba(X))


def test_no_steps_use_kernel_and_regularisation_as_given(iris):
    X, y = iris
    kernel = Gaussian(length_scale=[0.3, 0.4, 0.5, 0.6], scale=1.2)
    clf = MCEClassifier(kernel=kernel, regularization=0.03, steps=0, scaling=None, dtype="float64").fit(X, y)
    assert clf.kernel_ == kernel
    assert clf.regularization_ == 0.03
    V = np.linalg.solve(kernel.gram(X) + 150 * 0.03 * np.eye(150), np.eye(3)[y])
    np.testing.assert_allclose(clf.decision_probabilities(X), kernel.gram(X) @ V, atol=1e-9)


def test_published_way_keeps_the_learned_regularisation(iris):
    clf = MCEClassifier(objective="rcb", refit_regularization=False, steps=STEPS).fit(*iris)
    assert len(clf.history_) == STEPS
    last = clf.history_[-1]["regularization"]
    assert clf.regularization_ == pytest.approx(last, rel=0.3)  # one more step was made
    assert clf.loo_log_loss_ == {}


def test_same_seed_same_bits(iris):
    X, y = iris
    first, second = (MCEClassifier(steps=STEPS, batch_size=40, random_state=3).fit(X, y) for _ in range(2))
    assert (first.predict_proba(X) == second.predict_proba(X)).all()
    assert first.regularization_ == second.regularization_


def test_a_device_gives_what_the_host_gives(iris, device):
    X, y = iris
    for settings in ({}, {"solver": "nystrom", "centres": 30}, {"objective": "median"}, {"batch_size": 50}):
        host, gpu = (
            MCEClassifier(steps=STEPS, dtype="float64", backend=name, **settings).fit(X, y)
            for name in ("numpy", "cupy")
        )
        assert backend.is_cupy(gpu.embedding_.weights)
        np.testing.assert_allclose(gpu.predict_proba(X), host.predict_proba(X), atol=1e-6)


def test_a_model_from_a_device_is_stored_for_any_machine(iris, device, tmp_path):
    X, y = iris
    clf = MCEClassifier(steps=STEPS, dtype="float64", backend="cupy").fit(X, y)
    clf.save(tmp_path / "model.zarr")
    assert (kme.load(tmp_path / "model.zarr").predict_proba(X) == clf.predict_proba(X)).all()


def test_kernel_objects_and_compositions(iris):
    X, y = iris
    for kernel in (Matern(nu=2.5), Gaussian(length_scale=np.ones(4)) + 0.1 * Linear(), Tanimoto()):
        assert MCEClassifier(kernel=kernel, steps=STEPS).fit(X, y).score(X, y) > 0.85


def test_bound_is_finite_and_above_the_risk(fitted, iris):
    X, y = iris
    own = fitted.decision_probabilities(X)[np.arange(150), y]
    assert fitted.bound_ > -np.log(np.clip(own, 1e-15, 1)).mean()
    assert math.isfinite(fitted.bound_)


def test_callback_hears_every_step(iris):
    heard = []
    clf = MCEClassifier(steps=STEPS, objective="rcb").fit(*iris, callback=heard.append)
    assert heard == clf.history_


# --- labels and tables -----------------------------------------------------------------------------

LABELS = {
    "strings": np.array(["setosa", "versicolor", "virginica"]),
    "objects": np.array(["setosa", "versicolor", "virginica"], dtype=object),
    "integers": np.array([-5, 0, 70]),
    "large integers": np.array([2**40, 2**41, 2**42]),
    "floats": np.array([0.0, 1.0, 2.0]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_any_type_come_back(kind, iris, tmp_path):
    X, y = iris
    labels = LABELS[kind][y]
    clf = MCEClassifier(steps=STEPS).fit(X, labels)
    assert clf.classes_.tolist() == sorted(LABELS[kind].tolist())
    assert clf.predict(X).dtype == labels.dtype
    assert (clf.predict(X) == labels).mean() > 0.9
    clf.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert again.predict(X).dtype == labels.dtype
    assert (again.predict(X) == clf.predict(X)).all()


def test_two_classes_of_truth_values(iris):
    X, y = iris
    clf = MCEClassifier(steps=STEPS).fit(X, y == 0)
    assert clf.predict(X).dtype == bool
    score = clf.decision_function(X)
    assert score.shape == (150,)
    assert ((score > 0) == clf.predict(X)).all()


def test_data_frames_keep_their_names(iris):
    X, y = iris
    frame = pd.DataFrame(X, columns=["sepal length", "sepal width", "petal length", "petal width"])
    clf = MCEClassifier(steps=STEPS).fit(frame, pd.Series(y, name="species").map({0: "a", 1: "b", 2: "c"}))
    assert clf.feature_names_in_.tolist() == list(frame.columns)
    assert set(clf.predict(frame)) <= {"a", "b", "c"}
    with pytest.raises(ValueError, match="feature names"):
        clf.predict(frame[frame.columns[::-1]])


def test_integer_features_are_numbers_too():
    X = np.array([[0, 1], [1, 0], [10, 11], [11, 10]] * 5)
    y = np.array([0, 0, 1, 1] * 5)
    assert MCEClassifier(steps=STEPS).fit(X, y).score(X, y) == 1.0


def test_constant_features_and_duplicate_rows(iris):
    X, y = iris
    X = np.repeat(np.column_stack([X, np.full(150, 7.0)]), 2, axis=0)
    assert MCEClassifier(steps=STEPS).fit(X, np.repeat(y, 2)).score(X, np.repeat(y, 2)) > 0.9


def test_works_inside_pipelines_and_searches(iris):
    X, y = iris
    pipeline = make_pipeline(StandardScaler(), MCEClassifier(steps=5, objective="rcb", scaling=None))
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.85
    search = GridSearchCV(MCEClassifier(steps=0), {"regularization": [1e-3, 1.0]}, cv=2).fit(X, y)
    assert search.best_params_["regularization"] in (1e-3, 1.0)


def test_clone_and_settings_round_trip():
    clf = MCEClassifier(kernel=Matern(nu=0.5), steps=3, random_state=7)
    assert clone(clf).get_params() == clf.get_params()


# --- identities ------------------------------------------------------------------------------------


def test_probabilities_entropy_and_expectation_agree(fitted, iris):
    X, _ = iris
    p = fitted.predict_proba(X)
    assert p.shape == (150, 3)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(fitted.entropy(X), -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1), atol=1e-12)
    f = fitted.decision_probabilities(X)
    np.testing.assert_allclose(fitted.decision_function(X), f)
    np.testing.assert_allclose(fitted.expectation(X, [1.0, 1.0, 1.0]), 1, rtol=0)
    for kind, q in (({}, p), ({"raw": True}, f)):
        np.testing.assert_allclose(fitted.expectation(X, lambda label: float(label == 2), **kind), q[:, 2], atol=1e-12)
        np.testing.assert_allclose(fitted.expectation(X, {0: 1, 1: 0, 2: -1}, **kind), q[:, 0] - q[:, 2], atol=1e-12)
        np.testing.assert_allclose(fitted.expectation(X, np.eye(3), **kind), q, atol=1e-12)
    np.testing.assert_allclose(fitted.expectation(X, [1.0, 1.0, 1.0], raw=True), f.sum(axis=1), rtol=1e-10)
    assert (fitted.predict(X) == fitted.classes_[f.argmax(axis=1)]).all()
    raw = fitted.entropy(X, kind="rkhs")
    np.testing.assert_allclose(raw, -(f * np.log(np.where(f > 0, f, 1))).sum(axis=1), atol=1e-12)


def test_rows_are_judged_one_by_one(fitted, iris):
    X, _ = iris
    np.testing.assert_allclose(
        np.vstack([fitted.predict_proba(X[i : i + 1]) for i in range(5)]), fitted.predict_proba(X[:5]), atol=1e-5
    )


def test_raw_rows_far_from_the_origin_are_told_apart(iris):
    X, y = iris
    near = MCEClassifier(scaling=None, steps=STEPS).fit(X, y)
    far = MCEClassifier(scaling=None, steps=STEPS).fit(X + 10_000, y)
    assert abs(far.score(X + 10_000, y) - near.score(X, y)) < 0.02


@pytest.mark.parametrize(
    "setting",
    [
        {"learning_rate": "fast"},
        {"regularization": float("inf")},
        {"random_state": -1},
        {"probability_floor": "low"},
        {"kernel": 5},
    ],
)
def test_settings_of_the_wrong_kind_are_named(iris, setting):
    with pytest.raises(errors.ConfigError, match=next(iter(setting))):
        MCEClassifier(steps=1, **setting).fit(*iris)


# --- storing ---------------------------------------------------------------------------------------


def test_saved_and_loaded_to_the_bit(fitted, iris, tmp_path):
    X, _ = iris
    fitted.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert (again.predict_proba(X) == fitted.predict_proba(X)).all()
    assert (again.entropy(X) == fitted.entropy(X)).all()
    assert again.get_params() == fitted.get_params()
    assert again.kernel_ == fitted.kernel_
    for name in ("regularization_", "objective_", "solver_", "bound_", "history_", "n_features_in_"):
        assert getattr(again, name) == getattr(fitted, name)


def test_names_of_features_are_stored(iris, tmp_path):
    X, y = iris
    frame = pd.DataFrame(X, columns=list("abcd"))
    clf = MCEClassifier(steps=STEPS).fit(frame, y)
    clf.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert (again.predict(frame) == clf.predict(frame)).all()
    with pytest.raises(ValueError, match="feature names"):
        again.predict(frame.rename(columns={"a": "z"}))


def test_a_data_set_is_not_taken_for_a_damaged_model(iris, tmp_path):
    kme.ingest(iris, tmp_path / "iris.zarr")
    with pytest.raises(errors.DataError, match="this is a data set"):
        kme.load(tmp_path / "iris.zarr")


def test_own_kernel_is_handed_back_at_loading(iris, tmp_path):
    X, y = iris
    clf = MCEClassifier(kernel=Tanimoto(), steps=STEPS).fit(X, y)
    clf.save(tmp_path / "model.zarr")
    with pytest.raises(errors.ConfigError, match="kernel 'Tanimoto' is unknown"):
        kme.load(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr", kernels={"Tanimoto": Tanimoto})
    assert (again.predict_proba(X) == clf.predict_proba(X)).all()


def test_models_survive_pickling(fitted, iris):
    X, _ = iris
    assert (pickle.loads(pickle.dumps(fitted)).predict_proba(X) == fitted.predict_proba(X)).all()


def test_what_is_not_fitted_cannot_be_used(iris, tmp_path):
    X, _ = iris
    with pytest.raises(NotFittedError):
        MCEClassifier().predict(X)
    with pytest.raises(NotFittedError):
        MCEClassifier().save(tmp_path / "model.zarr")


# --- refusing --------------------------------------------------------------------------------------

X4 = np.arange(40.0).reshape(20, 2)
Y4 = np.arange(20) % 2


def with_nan(X):
    X = X.copy()
    X[3, 1] = np.nan
    return X


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (with_nan(X4), Y4, "NaN"),
        (X4 * np.where(np.arange(40).reshape(20, 2) == 7, np.inf, 1), Y4, "infinity|too large"),
        (X4[:, 0], Y4, "2D array"),
        (X4[None], Y4, "got bags: row 0 has 20 rows itself"),
        (X4, Y4[:-1], "inconsistent numbers of samples"),
        (X4, np.zeros(20), "one class"),
        (X4[:1], Y4[:1], "minimum of 2|one class"),
        (np.full((20, 2), "high"), Y4, "takes rows of numbers, got the text"),
        (X4, np.linspace(0, 1, 20), "Unknown label type"),
        (X4[:, :0], Y4, "0 feature"),
    ],
)
def test_bad_input_is_a_value_error_with_a_reason(X, y, message):
    with pytest.raises(ValueError, match=message):
        MCEClassifier(steps=2).fit(X, y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "best"}, "objective='best' is unknown"),
        ({"kernel": "gausian"}, "did you mean 'gaussian'"),
        ({"optimizer": "lbfgs"}, "optimizer='lbfgs'"),
        ({"scaling": "robust"}, "scaling='robust'"),
        ({"solver": "lu"}, "solver='lu'"),
        ({"solver": "features"}, "solver='features' requires explicit features"),
        ({"backend": "torch"}, "backend 'torch'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"steps": -1}, "steps=-1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"centres": 0}, "centres=0"),
        ({"regularization": 0.0}, "regularization=0.0"),
        ({"risk": "median"}, "risk='median'"),
        ({"random_state": "seed"}, "random_state='seed'"),
        ({"kernel": Gaussian(length_scale=[1.0, 2.0, 3.0])}, "3 length scales, the data have 2 features"),
        ({"kernel": Linear(), "objective": "median"}, "has no length scale"),
    ],
)
def test_bad_settings_are_refused_with_a_reason(settings, message):
    with pytest.raises((errors.ConfigError, errors.DataError), match=message):
        MCEClassifier(**{"steps": 2, **settings}).fit(X4, Y4)


def test_queries_must_fit(fitted):
    with pytest.raises(ValueError, match="3 features"):
        fitted.predict(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="NaN"):
        fitted.predict(np.full((2, 4), np.nan))
    with pytest.raises(errors.ConfigError, match="kind='shannon'"):
        fitted.entropy(np.zeros((2, 4)), kind="shannon")
    with pytest.raises(errors.DataError, match="one value for each of 3 classes"):
        fitted.expectation(np.zeros((2, 4)), [1.0, 2.0])
    with pytest.raises(errors.DataError, match="no value for label 2"):
        fitted.expectation(np.zeros((2, 4)), {0: 1.0, 1: 2.0})


# --- the published figure --------------------------------------------------------------------------


@pytest.mark.slow
def test_wine_gives_the_published_accuracy():
    """Full gradient, ten folds: 97.2 ± 3.7 is printed in the paper."""
    X, y = load_wine(return_X_y=True)
    X = (X - X.min(axis=0)) / np.ptp(X, axis=0)
    order = np.random.RandomState(0).permutation(len(X))
    X, y = X[order], y[order]
    scores = []
    with backend.blas_threads(1):
        for train, test in KFold(10).split(X):
            clf = MCEClassifier(
                objective="rcb", refit_regularization=False, scaling=None, steps=1000, batch_size=len(train)
            )
            scores.append(100 * clf.fit(X[train], y[train]).score(X[test], y[test]))
    assert np.mean(scores) == pytest.approx(97.2, abs=0.6)  # one row is 0.56
    assert np.std(scores) == pytest.approx(3.7, abs=1.0)


@pytest.mark.parametrize("settings", [{"steps": 20}, {"steps": 0, "regularization": 1e-10}], ids=str)
@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg"])
def test_single_precision_is_a_wish_about_speed_never_a_licence_to_be_wrong(solver, settings):
    """Rows without noise want a λ that float32 cannot carry: it is solved for in float64 then."""
    rng = np.random.default_rng(3)
    X, Xq = rng.uniform(-1, 1, size=(150, 3)), rng.uniform(-1, 1, size=(600, 3))
    y, yq = (np.sin(4 * Z[:, 0]) + Z[:, 1] * Z[:, 2] > 0 for Z in (X, Xq))
    chosen = {"objective": "rcb", "solver": solver, **settings}
    narrow, wide = (MCEClassifier(dtype=dtype, **chosen).fit(X, y) for dtype in ("float32", "float64"))
    assert narrow.score(Xq, yq) == pytest.approx(wide.score(Xq, yq), abs=0.004)
    losses = [-np.log(m.predict_proba(Xq)[np.arange(600), yq.astype(int)]).mean() for m in (narrow, wide)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert narrow.loo_log_loss_ == pytest.approx(wide.loo_log_loss_, rel=1e-2)
    assert wide.score(Xq, yq) > 0.8


@pytest.mark.parametrize("large", [1e200, -1e200, 1.7e308])
def test_a_row_whose_squares_overflow_is_refused_by_its_number(large):
    X = np.random.default_rng(0).normal(size=(40, 3))
    clf = MCEClassifier(steps=0).fit(X, X[:, 0] > 0)
    query = X.copy()
    query[7, 1] = large
    for method in (clf.predict, clf.predict_proba, clf.entropy):
        with pytest.raises(errors.DataError, match=r"row 7 has a value .* whose square overflows"):
            method(query)


@pytest.mark.parametrize("memory", [0, -1, "0MB", 2e9, "inf", "lots", True, [1]], ids=str)
@pytest.mark.parametrize("kind", [MCEClassifier, CMERegressor])
def test_memory_is_at_least_one_byte(kind, memory):
    X = np.random.default_rng(0).normal(size=(40, 3))
    with pytest.raises(errors.ConfigError, match=r"memory=.*: must be at least 1 byte, an integer or a text"):
        kind(memory=memory).fit(X, X[:, 0] > 0)


def test_memory_is_an_integer_of_any_kind():
    X = np.random.default_rng(0).normal(size=(40, 3))
    assert CMERegressor(memory=np.int64(10**9), steps=0).fit(X, X[:, 0]).solver_ == "cholesky"


def test_an_unknown_label_of_calibrate_is_named_as_it_is():
    X = np.random.default_rng(0).normal(size=(40, 3))
    clf = MCEClassifier(steps=0).fit(X, X[:, 0] > 0)
    with pytest.raises(errors.DataError, match=r"label 5 is not among the classes False, True \(40 rows\)"):
        clf.calibrate(X, np.full(40, 5))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (lambda y: [2**64 + int(v) for v in y], "does not fit 64 bits; use texts"),
        (lambda y: np.array([True if v else 3 for v in y], object), "labels mix types: bool, int"),
        (lambda y: [b"a" if v else b"b" for v in y], "decode it to a text"),
        (lambda y: y[:-1], "inconsistent numbers of samples"),
        (lambda y: y + 0.5 * np.arange(len(y)), "Unknown label type: continuous"),
        (lambda y: None, "requires y to be passed"),
    ],
)
def test_labels_of_no_use_are_errors_of_ours(rng, labels, words):
    X, y = rng.normal(size=(30, 3)), np.arange(30) % 2
    with pytest.raises(errors.DataError, match=words):
        MCEClassifier(steps=2).fit(X, labels(y))


@pytest.mark.parametrize("build", [MCEClassifier, CMERegressor])
def test_shapes_of_no_use_are_errors_of_ours_in_one_line(rng, build):
    X, y = rng.normal(size=(30, 3)), np.arange(30) % 2
    model = build(steps=2).fit(X, y)
    for rows, words in (
        (X[:1], "a minimum of 2 is required"),
        (X[:, :0], "a minimum of 1 is required"),
        (X[:, 0], "Reshape your data"),
        (X * 1j, "Complex data not supported"),
    ):
        with pytest.raises(errors.DataError, match=words) as found:
            build(steps=2).fit(rows, y[: len(rows)])
        assert "\n" not in str(found.value)
    for rows in (X[:, :2], X[:, 0], X[:0]):
        with pytest.raises(errors.DataError):
            model.predict(rows)


@pytest.mark.parametrize("g", ["x", ["x", "y"], [1j, 2], [[1], [1, 2]], {0: "x", 1: 2}, lambda label: "x"])
def test_values_of_an_expectation_that_are_no_numbers_are_errors_of_ours(rng, g):
    model = MCEClassifier(steps=2).fit(rng.normal(size=(30, 3)), np.arange(30) % 2)
    with pytest.raises(errors.DataError, match="the values of g must be real numbers"):
        model.expectation(np.zeros((2, 3)), g)


@pytest.mark.parametrize("objective", ["auto", "rcb"])
def test_learning_that_diverges_says_so_and_a_complexity_weight_is_a_number(rng, objective):
    X, y = rng.normal(size=(30, 3)), np.arange(30) % 2
    with pytest.raises(errors.NumericalError, match=r"learning diverged: .* lower learning_rate=1e\+300"):
        MCEClassifier(steps=5, learning_rate=1e300, objective=objective).fit(X, y)
    with pytest.raises(errors.ConfigError, match="complexity_weight=nan: must be a number >= 0, or None"):
        MCEClassifier(steps=2, complexity_weight=np.nan, objective=objective).fit(X, y)
