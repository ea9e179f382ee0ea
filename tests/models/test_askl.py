"""Spectral kernel learning as estimators: the common checks, the variants, workers, storing, refusing."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import RidgeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

import kme_dist as kme
from kme_dist.core.spectral import losses
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.askl import ASKLClassifier, ASKLRegressor

SMALL = {"features": 100, "batch_size": 32, "epochs": 8, "learning_rate": 0.03}


@parametrize_with_checks([ASKLClassifier(**SMALL), ASKLRegressor(**SMALL)])
def test_scikit_learn_common_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


@pytest.fixture(scope="module")
def diabetes():
    return load_diabetes(return_X_y=True)


@pytest.mark.parametrize("variant", ["sk", "nsk", "skl", "nskl", "askl"])
@pytest.mark.parametrize("loss", ["hinge", "cross_entropy", "squared"])
def test_every_variant_learns_iris_with_every_loss(variant, loss, iris):
    X, y = iris
    model = ASKLClassifier(variant=variant, loss=loss, **SMALL).fit(X[::2], y[::2])
    assert model.score(X[1::2], y[1::2]) > 0.85
    assert np.isfinite(model.bound_)


@pytest.mark.parametrize("variant", ["sk", "nskl", "askl"])
def test_every_variant_regresses(variant, diabetes):
    X, y = diabetes
    model = ASKLRegressor(variant=variant, deviation=0.2, **SMALL).fit(X[::2], y[::2])
    assert model.score(X[1::2], y[1::2]) > 0.35


# --- several outputs ----------------------------------------------------------------------------


def several(n=400, seed=0):
    """Outputs of very different units, one of them constant."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(n, 3))
    Y = np.stack([np.sin(3 * X[:, 0]), 1e6 * (5 + X[:, 1] * X[:, 2]), 1e-6 * X[:, 1], np.full(n, 7.0)], axis=1)
    return X, Y * (1 + 0.01 * rng.normal(size=(n, 4)) * [1, 0.1, 1, 0])


OUTPUTS = {**SMALL, "epochs": 20, "deviation": 1.0}


@pytest.mark.parametrize("variant", ["sk", "nskl", "askl"])
def test_every_output_is_predicted_in_its_own_unit(variant):
    X, Y = several()
    model = ASKLRegressor(variant=variant, **OUTPUTS).fit(X[:300], Y[:300])
    found = model.predict(X[300:])
    assert found.shape == (100, 4)
    errors = np.mean((found - Y[300:]) ** 2, axis=0)[:3] / np.var(Y[300:], axis=0)[:3]
    assert (errors < 0.2).all(), errors
    np.testing.assert_allclose(found[:, 3], 7.0, rtol=1e-6)
    assert model.score(X[300:], Y[300:]) > 0.5
    assert np.isfinite(model.bound_)


def test_outputs_are_those_of_the_columns_in_any_order():
    X, Y = several(200)
    order = [2, 0, 3, 1]
    settings = {**OUTPUTS, "variant": "sk", "dtype": "float64"}  # frequencies are drawn, not learned from the outputs
    model, other = ASKLRegressor(**settings).fit(X, Y), ASKLRegressor(**settings).fit(X, Y[:, order])
    np.testing.assert_allclose(other.predict(X), model.predict(X)[:, order], rtol=1e-6)
    alone = ASKLRegressor(**settings).fit(X, Y[:, 1])
    assert alone.predict(X).shape == (200,)
    np.testing.assert_allclose(alone.predict(X), model.predict(X)[:, 1], rtol=1e-6)
    column = ASKLRegressor(**settings).fit(X, Y[:, [1]])
    np.testing.assert_array_equal(column.predict(X), alone.predict(X)[:, None])


def test_several_outputs_weighted_stored_and_on_workers(tmp_path):
    X, Y = several(120)
    w = np.random.default_rng(1).integers(0, 3, 120)
    options = {"features": 20, "batch_size": 30, "batches_per_step": 2, "epochs": 2, "dtype": "float64"}
    model = ASKLRegressor(**options).fit(X, Y, sample_weight=w)
    without = ASKLRegressor(**options).fit(X[w > 0], Y[w > 0], sample_weight=w[w > 0])
    np.testing.assert_array_equal(model.predict(X), without.predict(X))
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        remote = ASKLRegressor(client=client, **options).fit(X, Y, sample_weight=w)
    assert remote.weights_.tobytes() == model.weights_.tobytes()


def test_frequencies_move_only_where_they_are_learned(iris):
    for variant in ("sk", "nsk", "skl", "nskl", "askl"):
        model = ASKLClassifier(variant=variant, **SMALL).fit(*iris)
        start = ASKLClassifier(variant=variant, **{**SMALL, "epochs": 0}).fit(*iris)
        moved = any((model.features_.arrays[n] != v).any() for n, v in start.features_.parameters.items())
        assert moved == (variant in ("skl", "nskl", "askl"))
        assert (model.features_.second is None) == (variant in ("sk", "skl"))


def test_learned_frequencies_see_what_drawn_ones_miss(rng):
    """A class decided by a high frequency of one feature among ten: the drawn kernel is blind to it."""
    X = rng.uniform(-1, 1, size=(600, 10))
    y = (np.sin(4 * X[:, 0]) > 0).astype(int)
    options = {"features": 100, "batch_size": 16, "epochs": 25, "deviation": 0.3, "scaling": None, "loss": "hinge"}
    drawn, learned = (ASKLClassifier(variant=v, **options).fit(X[:400], y[:400]) for v in ("nsk", "askl"))
    assert learned.score(X[400:], y[400:]) > drawn.score(X[400:], y[400:]) + 0.05


def test_the_trace_norm_shrinks_to_low_rank(iris):
    strong = ASKLClassifier(weight_penalty=2.0, **SMALL).fit(*iris)
    weak = ASKLClassifier(weight_penalty=0.0, **SMALL).fit(*iris)
    assert np.linalg.norm(strong.weights_, "nuc") < 0.8 * np.linalg.norm(weak.weights_, "nuc")
    assert np.linalg.matrix_rank(strong.weights_, tol=1e-8) < np.linalg.matrix_rank(weak.weights_, tol=1e-8)


def test_squared_loss_with_drawn_features_tends_to_ridge_regression(iris):
    X, y = iris
    model = ASKLClassifier(variant="sk", loss="squared", weight_penalty=1e-3, features=30, batch_size=150, epochs=1500)
    model.set_params(learning_rate=0.05, dtype="float64").fit(X, y)
    Z = model.embed(X)
    W = np.linalg.solve(Z.T @ Z / 150 + 1e-3 * np.eye(30), Z.T @ np.eye(3)[y] / 150)
    np.testing.assert_allclose(Z @ model.weights_, Z @ W, atol=0.02)
    assert abs(model.score(X, y) - RidgeClassifier().fit(Z, y).score(Z, y)) < 0.05


def test_probabilities_come_with_cross_entropy_alone(iris):
    X, y = iris
    model = ASKLClassifier(loss="cross_entropy", **SMALL).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1)
    assert (model.classes_[model.predict_proba(X).argmax(axis=1)] == model.predict(X)).all()
    assert not hasattr(ASKLClassifier(loss="hinge"), "predict_proba")


def test_both_sets_of_frequencies_share_their_phases_unless_asked_otherwise(iris, tmp_path):
    X, y = iris
    options = {**SMALL, "epochs": 2}
    model = ASKLClassifier(**options).fit(X, y)
    assert set(model.features_.arrays) == {"first", "second", "phases"}
    Z = model.scaling_.apply(X, "float64")
    a, b = (Z @ omega + model.features_.phases for omega in (model.features_.first, model.features_.second))
    np.testing.assert_allclose(model.embed(X), (np.cos(a) + np.cos(b)) / np.sqrt(200), rtol=1e-12, atol=1e-15)
    printed = ASKLClassifier(form="independent", **options).fit(X, y)
    assert set(printed.features_.arrays) == {"first", "second", "phases", "second_phases"}
    printed.form = "D"  # the name it had before phases were shared
    printed.save(tmp_path / "old.zarr")
    again = kme.load(tmp_path / "old.zarr")
    assert again.form == "independent"
    np.testing.assert_array_equal(again.decision_function(X), printed.decision_function(X))


def test_the_bound_has_the_constant_of_the_loss(iris):
    X, y = iris
    for loss in ("hinge", "cross_entropy", "squared"):
        model = ASKLClassifier(loss=loss, **SMALL).fit(X, y)
        Z, T = model.embed(X), np.eye(3)[y]
        each, slope = losses(loss, Z @ model.weights_, T)
        L = np.sqrt(2) if loss != "squared" else np.linalg.norm(slope, axis=1).max()
        R = np.linalg.norm(model.weights_, "nuc") * np.sqrt(3 * np.sum(Z**2)) / 150
        expected = each.mean() + 4 * np.sqrt(2) * L * R + 3 * np.sqrt(np.log(40) / 300)
        assert model.bound_ == pytest.approx(expected, rel=1e-4)  # it was learned in single precision


@pytest.mark.parametrize("form", ["D", "2D", "independent"])
def test_a_stored_model_predicts_the_same(form, iris, diabetes, tmp_path):
    for kind, (X, y) in ((ASKLClassifier, iris), (ASKLRegressor, diabetes)):
        model = kind(form=form, **{**SMALL, "epochs": 1}).fit(X, y)
        model.save(tmp_path / f"{kind.__name__}.zarr")
        again = kme.load(tmp_path / f"{kind.__name__}.zarr")
        assert type(again) is kind
        np.testing.assert_array_equal(again.predict(X), model.predict(X))
        assert again.bound_ == model.bound_


def test_workers_never_show_in_what_is_learned(iris, diabetes, tmp_path):
    options = {"features": 20, "batch_size": 30, "batches_per_step": 2, "epochs": 1, "dtype": "float64"}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for kind, rows in ((ASKLClassifier, iris), (ASKLRegressor, diabetes)):
            task = "classification" if kind is ASKLClassifier else "regression"
            place = tmp_path / f"{kind.__name__}.zarr"
            data = ingest(rows, place, shuffle=1, task=task, chunk_bytes="2KiB", shard_bytes="8KiB")
            for source in ((data,), rows):
                alone, many = (kind(client=c, **options).fit(*source) for c in (None, client))
                assert alone.weights_.tobytes() == many.weights_.tobytes()
                assert alone.features_.first.tobytes() == many.features_.first.tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "asklr"}, "variant='asklr'"),
        ({"loss": "log"}, "loss='log'"),
        ({"features": 0}, "features=0"),
        ({"epochs": -1}, "epochs=-1"),
        ({"deviation": 0.0}, "deviation=0.0"),
        ({"weight_penalty": -1.0}, "weight_penalty=-1.0"),
        ({"schedule": "step"}, "schedule='step'"),
        ({"form": "3D"}, "form='3D'"),
        ({"dtype": "half"}, "dtype='half'"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(options, message, iris):
    with pytest.raises(ConfigError, match=message):
        ASKLClassifier(**{**SMALL, **options}).fit(*iris)


def test_one_class_is_refused(iris):
    X, y = iris
    with pytest.raises(DataError, match="only one class"):
        ASKLClassifier(**SMALL).fit(X[:20], y[:20])


def test_a_device_learns_what_the_host_learns(iris, diabetes, device):
    for kind, rows in ((ASKLClassifier, iris), (ASKLRegressor, diabetes)):
        settings = {"features": 20, "epochs": 1, "dtype": "float64"}
        host, gpu = (kind(backend=backend, **settings).fit(*rows) for backend in ("numpy", "cupy"))
        np.testing.assert_allclose(gpu.weights_, host.weights_, atol=1e-9)
        np.testing.assert_array_equal(gpu.predict(rows[0]), host.predict(rows[0]))


@pytest.mark.parametrize("factor", [1e155, 1e160, 1e300])
def test_targets_whose_squares_overflow_are_refused_as_those_of_cmeregressor(factor):
    X = np.random.default_rng(0).normal(size=(60, 2))
    for y in (X[:, 0] * factor, np.r_[factor, X[1:, 0]], X * factor):
        for model in (ASKLRegressor(features=10, epochs=1), kme.CMERegressor(steps=1)):
            with pytest.raises(DataError, match="the variance of the targets overflows; they must be below 1e150"):
                model.fit(X, y)
    assert np.isfinite(ASKLRegressor(features=10, epochs=1).fit(X, X[:, 0] * 1e100).predict(X)).all()
