"""Conditional embedding networks: the common checks, the published recipe, any number of workers, storing, refusing."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_iris
from sklearn.utils.estimator_checks import parametrize_with_checks

import kme_dist as kme
from kme_dist.core import features as maps
from kme_dist.core.kernels import Gaussian, OnFeatures
from kme_dist.core.objective import feature_objective, rcb_objective
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.cen import CENClassifier
from kme_dist.run.learners import LearnSettings, NetworkLearner, start_of

EXPLICIT = CENClassifier(hidden=(16,), steps=60, regularization=0.001)
IMPLICIT = CENClassifier(hidden=(8,), head="gaussian", steps=15)


@parametrize_with_checks([EXPLICIT, IMPLICIT])
def test_scikit_learn_common_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, iris):
    place = tmp_path_factory.mktemp("networks") / "iris.zarr"
    return ingest(iris, place, shuffle=1, split="train=0.8,test=0.2", chunk_bytes="1KiB", shard_bytes="4KiB")


# --- learning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 40},
        {"batch_size": 20, "batches_per_step": 3, "schedule": "cosine"},
        {"activation": "tanh", "dropout": 0.3},
        {"dropout": 0.5, "independent_masks": True, "risk": "mean", "complexity_weight": 0.01},
        {"refit_regularization": True},
        {"head": Gaussian(length_scale=1.0), "hidden": (8,)},
        {"head": "matern", "batch_size": 40, "hidden": (8,)},
        {"network": {"name": "random_fourier", "features": 30}},
    ],
    ids=str,
)
def test_every_way_of_learning_learns_iris(options, iris):
    X, y = iris
    model = CENClassifier(**{"hidden": (64, 32), "steps": 200, **options}).fit(X[::2], y[::2])
    assert model.score(X[1::2], y[1::2]) > 0.9
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1)
    assert len(model.history_) == 200


def test_no_steps_give_the_closed_form_on_the_starting_features(iris):
    X, y = iris
    phi = maps.dense_network(4, (10, 6), seed=3)
    model = CENClassifier(network=phi, steps=0, regularization=0.02, scaling=None, dtype="float64").fit(X, y)
    Z = phi.forward(X)
    W = np.linalg.solve(Z.T @ Z + 150 * 0.02 * np.eye(6), Z.T @ np.eye(3)[y])
    np.testing.assert_allclose(model.decision_probabilities(X), Z @ W, atol=1e-9)
    np.testing.assert_allclose(model.embed(X), Z)


def test_the_first_step_is_the_published_objective(iris):
    X, y = iris
    model = CENClassifier(hidden=(10, 6), steps=1, dtype="float64").fit(X, y)
    rows = model.scaling_.apply(X, "float64")
    phi = maps.dense_network(4, (10, 6), seed=0)
    out = feature_objective(phi.forward(rows), y, regularization=1.0, n_classes=3)
    record = model.history_[0]
    assert record["objective"] == pytest.approx(out.value)
    assert record["complexity"] == pytest.approx(out.complexity)
    moved = model.features_.parameters["1.weight"] - phi.parameters["1.weight"]
    slope = phi.vjp(rows, out.feature_gradient)["1.weight"]
    np.testing.assert_allclose(moved, -0.1 * np.sign(slope) * (np.abs(slope) > 0), atol=1e-5)  # Adam's first step


def test_the_supremum_of_the_batch_is_an_option(iris):
    X, y = iris
    model = CENClassifier(hidden=(10, 6), steps=1, alpha="batch", dtype="float64").fit(X, y)
    Z = maps.dense_network(4, (10, 6), seed=0).forward(model.scaling_.apply(X, "float64"))
    out = feature_objective(Z, y, regularization=1.0, n_classes=3, alpha=None)
    assert model.history_[0]["objective"] == pytest.approx(out.value)
    assert out.complexity < 0.9 * feature_objective(Z, y, regularization=1.0, n_classes=3).complexity  # |φ| < 1 here


def test_a_kernel_head_is_algorithm_1_on_features(iris):
    X, y = iris
    head = Gaussian(length_scale=1.0)
    model = CENClassifier(hidden=(10, 6), head=head, steps=1, dtype="float64").fit(X, y)
    kernel = OnFeatures(head, maps.dense_network(4, (10, 6), seed=0))
    out = rcb_objective(kernel, model.scaling_.apply(X, "float64"), y, regularization=1.0, n_classes=3)
    assert model.history_[0]["objective"] == pytest.approx(out.value)


def test_retuning_finds_the_leave_one_out_optimum_of_the_weights(iris):
    X, y = iris
    phi = maps.random_fourier(4, 20, seed=1)
    options = {"network": phi, "steps": 0, "scaling": None, "dtype": "float64", "regularization": 1.0}
    model = CENClassifier(refit_regularization=True, **options).fit(X, y)

    def left_out(lam):
        Z, Y, loss = phi.forward(X), np.eye(3)[y], 0.0
        for i in range(0, 150, 5):
            keep = np.arange(150) != i
            W = np.linalg.solve(Z[keep].T @ Z[keep] + 150 * lam * np.eye(40), Z[keep].T @ Y[keep])
            p = np.maximum(Z[i] @ W, model.probability_floor_)
            loss -= np.log(p[y[i]] / p.sum())
        return loss

    assert left_out(model.regularization_) < 0.7 * left_out(1.0)
    assert left_out(model.regularization_) < 1.05 * left_out(model.regularization_ / 10)


@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.3}, {"dropout": 0.3, "independent_masks": True}])
@pytest.mark.parametrize("loss", ["log", "softmax"])
def test_halves_of_a_batch_are_judged_by_each_other(iris, loss, dropout):
    """The slope of the whole task, by finite differences in a weight of the network."""
    X, y = iris
    rows, features = X[::5].astype(float), maps.dense_network(4, (7, 5), "tanh", seed=2)
    settings = LearnSettings(risk="mean", complexity_weight=0.5, seed=3)
    task = NetworkLearner(features, settings, 3, halves=True, loss=loss, **dropout)
    start = {name: np.asarray(value, np.float64) for name, value in start_of(features, 0.1).items()}
    out = task.evaluate(start, rows, y[::5], number=4)
    for name, place in (("features.0.weight", (1, 2)), ("features.1.bias", (3,)), ("regularization", ())):
        values = []
        for sign in (1, -1):
            moved = np.array(start[name])
            moved[place] += sign * 1e-6
            values.append(task.evaluate({**start, name: moved}, rows, y[::5], number=4).value)
        assert out.gradient[name][place] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-8), name


def test_halves_are_the_mean_of_both_ways_round(iris):
    X, y = iris
    features = maps.dense_network(4, (5,), seed=2)
    task = NetworkLearner(features, LearnSettings(risk="mean", complexity_weight=0.0), 3, halves=True)
    found = task.evaluate(start_of(features, 0.1), X, y, number=6).value
    order = np.random.default_rng([0, 6, 1]).permutation(150)  # the rows come in the order of their classes
    rows, labels = X[order], y[order]
    Z, Y = features.forward(rows), np.eye(3)[labels]
    both = []
    for solve, judge in ((slice(0, 75), slice(75, None)), (slice(75, None), slice(0, 75))):
        W = np.linalg.solve(Z[solve].T @ Z[solve] + 75 * 0.1 * np.eye(5), Z[solve].T @ Y[solve])
        both.append(-np.log(np.clip((Z[judge] @ W)[np.arange(75), labels[judge]], 1e-15, 1)).mean())
    assert found == pytest.approx(np.mean(both), rel=1e-6)


def test_a_network_learns_by_validation(iris):
    X, y = iris
    options = {"hidden": (16, 8), "steps": 100, "batch_size": 60, "learning_rate": 0.02, "risk": "mean"}
    model = CENClassifier(objective="validation", loss="softmax", complexity_weight=0.0, regularization=0.1, **options)
    assert model.fit(X, y).score(X, y) > 0.95
    assert model.history_[-1]["risk"] < 0.5 * model.history_[0]["risk"]


def test_halves_of_rows_sorted_by_class_know_every_class(iris):
    X, y = iris
    assert (np.diff(y) >= 0).all()
    options = {"objective": "validation", "loss": "softmax", "risk": "mean", "complexity_weight": 0.0}
    model = CENClassifier(hidden=(16, 8), steps=1, regularization=0.001, **options).fit(X, y)
    assert model.history_[0]["accuracy"] > 0.6, "of each half by the weights of the other, before any step"


def test_the_average_of_the_last_steps_is_kept(iris, tmp_path):
    X, y = iris
    options = {"hidden": (6,), "steps": 12, "batch_size": 40, "learning_rate": 0.05}
    seen = []

    def remember(record):
        seen.append(record["step"])
        if record["step"] == 7 and len(seen) == 7:
            raise KeyboardInterrupt

    whole = CENClassifier(average=0.6, **options).fit(X, y)
    weights = [CENClassifier(**{**options, "steps": k}).fit(X, y).features_.parts[0].weight for k in range(13)]
    mean = weights[0]
    for step, value in enumerate(weights[1:]):
        kept = min(0.6, (1 + step) / (10 + step))
        mean = kept * mean + (1 - kept) * value
    np.testing.assert_allclose(whole.features_.parts[0].weight, mean, rtol=1e-5)
    with pytest.raises(KeyboardInterrupt):
        CENClassifier(average=0.6, **options).fit(X, y, callback=remember, checkpoints=tmp_path)
    again = CENClassifier(average=0.6, **options).fit(X, y, callback=remember, checkpoints=tmp_path)
    assert len(seen) < 19, "it went on where it was"
    np.testing.assert_array_equal(again.weights_, whole.weights_)
    with pytest.raises(ConfigError, match="average"):
        CENClassifier(average=0.9, **options).fit(X, y, checkpoints=tmp_path)


def test_the_curve_holds_one_point_for_every_epoch(iris):
    X, y = iris
    model = CENClassifier(hidden=(8,), steps=9, batch_size=50).fit(X, y, watch=(X, y))
    assert [point["epoch"] for point in model.curve_] == [1, 2, 3]
    assert model.curve_[-1]["accuracy"] == model.score(X, y)


def test_the_softmax_network_starts_where_this_one_does_and_has_a_curve_of_its_own(iris, tmp_path):
    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    options = {"hidden": (8,), "steps": 60, "batch_size": 50, "learning_rate": 0.03, "compare_softmax": True}
    records = []
    model = CENClassifier(**options).fit(
        X, names, watch=(X, names), callback=records.append, checkpoints=tmp_path / "c"
    )
    plain = CENClassifier(**{**options, "compare_softmax": False}).fit(X, names, watch=(X, names))
    np.testing.assert_array_equal(model.weights_, plain.weights_)
    assert plain.softmax_curve_ == []
    assert [point["epoch"] for point in model.softmax_curve_] == list(range(1, 21))
    assert model.softmax_curve_[-1]["accuracy"] > 0.9
    assert [record["phase"] for record in records] == ["rcb"] * 60 + ["softmax"] * 60
    model.save(tmp_path / "model.zarr")
    assert kme.load(tmp_path / "model.zarr").softmax_curve_ == model.softmax_curve_
    again = CENClassifier(**options).fit(X, names, checkpoints=tmp_path / "c")
    assert again.softmax_curve_ == model.softmax_curve_, "both are found where they were left"


# --- over a cluster --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clients():
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as one,
        LocalCluster(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=":0") as four,
        Client(one) as first,
        Client(four) as second,
    ):
        yield first, second


@pytest.mark.parametrize("batch_size", [None, 25])
def test_workers_never_show_in_what_is_learned(stored, clients, batch_size):
    options = {"hidden": (6, 4), "steps": 4, "batch_size": batch_size, "batches_per_step": 2, "dtype": "float64"}
    alone = CENClassifier(**options).fit(stored)
    for client in clients:
        model = CENClassifier(client=client, **options).fit(stored)
        for name, value in alone.features_.parameters.items():
            assert value.tobytes() == model.features_.parameters[name].tobytes()
        assert model.weights_.tobytes() == alone.weights_.tobytes()


def test_full_gradients_over_workers_are_those_of_one_process_that_holds_everything(stored, clients):
    X, codes = stored.read("train")
    options = {"hidden": (6, 4), "steps": 5, "dtype": "float64"}
    memory = CENClassifier(**options).fit(X.astype(float), codes)
    model = CENClassifier(client=clients[1], **options).fit(stored)
    for name, value in memory.features_.parameters.items():
        np.testing.assert_allclose(model.features_.parameters[name], value, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(model.weights_, memory.weights_, rtol=1e-6, atol=1e-9)


def test_batches_of_arrays_travel_to_the_workers(iris, clients):
    options = {"hidden": (6, 4), "steps": 4, "batch_size": 30, "batches_per_step": 2, "dtype": "float64"}
    alone, model = CENClassifier(**options).fit(*iris), CENClassifier(client=clients[1], **options).fit(*iris)
    for name, value in alone.features_.parameters.items():
        assert value.tobytes() == model.features_.parameters[name].tobytes()


# --- storing and refusing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"head": Gaussian(length_scale=0.7)}, {"network": {"name": "spectral", "features": 12}}],
    ids=["linear", "kernel", "spectral"],
)
def test_a_stored_model_predicts_the_same(options, iris, tmp_path):
    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = CENClassifier(hidden=(8, 4), steps=10, **options).fit(X, names)
    model.save(tmp_path / "m.zarr")
    again = kme.load(tmp_path / "m.zarr")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.regularization_ == model.regularization_
    assert again.history_ == model.history_


@pytest.mark.parametrize("head", ["linear", "gaussian"])
def test_a_data_set_is_scored_like_any_model_scores_it(head, stored, tmp_path):
    model = CENClassifier(hidden=(8, 4), head=head, steps=10).fit(stored)
    kme.predict(model, stored, tmp_path / "scores.zarr")
    scores = kme.open_predictions(tmp_path / "scores.zarr")
    X, _ = stored.read()
    np.testing.assert_allclose(scores.read("probability"), model.predict_proba(X.astype(float)), atol=1e-6)


def test_expectations_and_entropies(iris):
    X, y = iris
    model = CENClassifier(hidden=(8,), steps=20).fit(X, y)
    f, p = model.decision_probabilities(X), model.predict_proba(X)
    for raw, P in ((False, p), (True, f)):
        np.testing.assert_allclose(model.expectation(X, [0.0, 1.0, 5.0], raw=raw), P @ [0, 1, 5])
        np.testing.assert_allclose(model.expectation(X, lambda label: 2 * label, raw=raw), P @ [0, 2, 4])
    found = model.expectation(X, lambda label: float(label == 1))
    np.testing.assert_allclose(found, p[:, 1])
    assert found.min() >= 0
    assert found.max() <= 1
    far = np.concatenate([X, 1e6 + X, -1e6 - X])
    np.testing.assert_array_equal(model.classes_[model.predict_proba(far).argmax(axis=1)], model.predict(far))
    assert (model.entropy(X) <= np.log(3) + 1e-9).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"independent_masks": True}, "requires dropout > 0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"alpha": "sup"}, "alpha='sup'"),
        ({"schedule": "linear"}, "schedule='linear'"),
        ({"steps": -1}, "steps=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"head": "gausian"}, "did you mean 'gaussian'"),
        ({"head": "gaussian", "dropout": 0.5}, "require head='linear'"),
        ({"network": "fourrier"}, "is unknown"),
        ({"hidden": ()}, "must be the sizes"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(options, message, iris):
    with pytest.raises(ConfigError, match=message):
        CENClassifier(**options).fit(*iris)


def test_one_class_is_refused(iris):
    X, y = iris
    with pytest.raises(DataError, match="only one class"):
        CENClassifier().fit(X[:20], y[:20])


# --- a kernel on a fixed map -----------------------------------------------------------------------


def test_an_embedding_stands_on_a_learned_spectral_map(iris, tmp_path):
    X, y = iris
    # Rows of width one want frequencies of this spread; with smaller ones the kernel is nearly constant over them.
    spectral = kme.ASKLClassifier(features=40, epochs=5, scaling="unit", deviation=2.0).fit(X, y)
    options = {"kernel": "linear", "objective": "rcb", "refit_regularization": False, "steps": 30, "dtype": "float64"}
    model = kme.MCEClassifier(features=spectral.features_, **options).fit(X, y)
    assert model.score(X, y) > 0.95
    Z = spectral.embed(X)
    plain = kme.MCEClassifier(scaling=None, **options).fit(Z, y)
    np.testing.assert_allclose(model.predict_proba(X), plain.predict_proba(Z), atol=1e-6)
    model.save(tmp_path / "m.zarr")
    np.testing.assert_array_equal(kme.load(tmp_path / "m.zarr").predict_proba(X), model.predict_proba(X))


def test_features_by_name_are_drawn_by_the_seed(iris):
    X, y = iris
    config = {"name": "random_fourier", "features": 60, "length_scale": 0.5}
    models = [kme.MCEClassifier(kernel="linear", features=config, steps=5, random_state=s).fit(X, y) for s in (0, 0, 1)]
    np.testing.assert_array_equal(models[0].predict_proba(X), models[1].predict_proba(X))
    assert (models[0].predict_proba(X) != models[2].predict_proba(X)).any()


# --- on a device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"batch_size": 40, "dropout": 0.5, "independent_masks": True}], ids=str)
def test_a_device_learns_what_the_host_learns(options, iris, stored, device):
    for source in (iris, (stored,)):
        if not options and len(source) == 1:
            continue  # exact full gradients of stored rows are taken on the host
        settings = {"hidden": (6, 4), "steps": 5, "dtype": "float64", **options}
        host, gpu = (CENClassifier(backend=backend, **settings).fit(*source) for backend in ("numpy", "cupy"))
        X = np.asarray(iris[0])
        np.testing.assert_allclose(gpu.decision_probabilities(X), host.decision_probabilities(X), atol=1e-9)
