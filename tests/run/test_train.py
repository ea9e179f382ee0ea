"""From a data set to a fitted embedding: the same choices as in memory, whoever does the work."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_iris, make_blobs
from threadpoolctl import threadpool_info, threadpool_limits

import kme_dist
from kme_dist import kernels
from kme_dist.core import embedding
from kme_dist.data.ingest import ingest
from kme_dist.errors import DataError
from kme_dist.run import learners
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.train import Recipe, fit_candidates, learn_candidates


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def iris(tmp_path_factory):
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    path = tmp_path_factory.mktemp("train") / "iris.zarr"
    return ingest((X[order], y[order]), path, task="classification", split="train=0:120,test=120:150", dtype="float64")


def recipe(**changes):
    return Recipe(kernels.from_config("gaussian", n_features=4), steps=20, **changes)


def train(data, chosen, executor, scratch):
    candidates = learn_candidates(data, chosen, executor=executor)
    return fit_candidates(data, chosen, candidates, executor=executor, scratch=scratch)


@pytest.mark.parametrize("objective", ["auto", "calibrated", "rcb", "validation", "loo", "erm", "median", "cv"])
def test_every_objective_ends_in_a_model_that_knows_iris(iris, tmp_path, objective):
    trained = train(iris, recipe(objective=objective), SerialExecutor(), tmp_path / "scratch")
    X, y = iris.read("test")
    decided = trained.fit.embedding.decision(trained.fit.scaling.apply(X, "float64")).argmax(axis=1)
    assert (decided == y).mean() >= 0.9
    if objective == "auto":
        assert set(trained.losses) == {"learned", "common"}
        assert trained.best == trained.candidates[0]
        assert trained.fit.regularization == trained.best.regularization, "tuned on a sample, fitted as it is"
    elif objective != "cv":
        assert set(trained.losses) == {objective}


def test_workers_and_one_process_find_the_same_bits(iris, client, tmp_path):
    alone = train(iris, recipe(), SerialExecutor(), tmp_path / "a")
    together = train(iris, recipe(), DaskExecutor(client), tmp_path / "b")
    assert together.best.name == alone.best.name
    assert together.losses == alone.losses
    np.testing.assert_array_equal(together.fit.embedding.weights, alone.fit.embedding.weights)


def test_the_regularisation_stays_as_learned_where_that_is_asked_for(iris, tmp_path):
    for objective in ("auto", "rcb"):
        chosen = recipe(objective=objective, refit_regularization=False)
        trained = train(iris, chosen, SerialExecutor(), tmp_path / "scratch")
        assert trained.fit.regularization == trained.best.regularization
        assert trained.losses == {}, "nothing is tuned or compared"
        assert isinstance(trained.fit.embedding.kernel, kernels.Gaussian)


def test_without_steps_the_kernel_is_used_as_given(iris, tmp_path):
    given = Recipe(kernels.from_config("gaussian", n_features=4), steps=0, regularization=0.01)
    trained = train(iris, given, SerialExecutor(), tmp_path / "scratch")
    assert trained.fit.regularization == 0.01
    np.testing.assert_array_equal(
        trained.fit.embedding.kernel.parameters["length_scale"], given.kernel.parameters["length_scale"]
    )


def same_model(one, other, Xq):
    """To the last bit: what was learned, how it was judged, and what it says."""
    assert one.kernel_ == other.kernel_
    for name in ("regularization_", "bound_", "loo_log_loss_", "objective_", "solver_", "probability_floor_"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.calibration_.to_plain() == other.calibration_.to_plain()
    np.testing.assert_array_equal(one.embedding_.weights, other.embedding_.weights)
    many = np.tile(Xq, (-(-700 // len(Xq)), 1))  # enough rows for every path that a matrix product may take
    np.testing.assert_array_equal(one.predict_proba(many), other.predict_proba(many))
    for a, b in zip(one.history_, other.history_, strict=True):
        for name in ("step", "phase", "objective", "risk", "complexity", "accuracy", "regularization", "gradient_norm"):
            assert a[name] == b[name], name


SETTINGS = [
    {},
    {"kernel": "gaussian"},
    {"kernel": kernels.Matern(nu=2.5) + kernels.Linear(), "calibration": "softmax"},
    {"refit_regularization": False},
    {"class_weight": {0: 3.0}, "batch_size": 40},
    {"objective": "calibrated", "batch_size": 50},
    {"objective": "rcb", "batch_size": 30, "scaling": "standard"},
    {"objective": "validation", "batch_size": 50, "refit_regularization": False},
    {"objective": "loo", "steps": 3},
    {"objective": "cv"},
    {"objective": "median", "calibration": "temperature"},
    {"steps": 0, "regularization": 1e-3},
    {"solver": "nystrom", "centres": 30},
    {"solver": "tiled"},
    {"solver": "pcg"},
    {"features": 40},
    {"features": "polynomial", "solver": "features", "objective": "rcb"},
    {"kernel": "linear", "objective": "rcb"},
    {"scaling": None, "dtype": "float64", "calibration": "isotonic"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_estimator_learns_over_a_client_what_it_learns_alone(iris, client, settings):
    X, y = iris.read("train")
    Xq, yq = iris.read("test")
    chosen = {"steps": 6, **settings}
    alone = kme_dist.MCEClassifier(**chosen).fit(X, y)
    same_model(kme_dist.MCEClassifier(**chosen, client=client).fit(X, y), alone, Xq)
    same_model(kme_dist.MCEClassifier(**chosen, client=client).fit(iris), alone, Xq)
    same_model(kme_dist.MCEClassifier(**chosen).fit(iris), alone, Xq)
    assert alone.score(Xq, yq) > 0.5, "better than chance, which is a third"


@pytest.mark.parametrize("workers", [1, 8])
def test_the_number_of_workers_does_not_show(workers):
    X, y = make_blobs(240, 4, centers=4, cluster_std=3.0, random_state=1)
    chosen = {"steps": 10, "batch_size": 60}
    options = {"threads_per_worker": 1, "dashboard_address": ":0", "processes": workers == 1}
    with LocalCluster(n_workers=workers, **options) as cluster, Client(cluster) as client:
        over = kme_dist.MCEClassifier(**chosen, client=client).fit(X, y)
    same_model(over, kme_dist.MCEClassifier(**chosen).fit(X, y), X)


def test_the_layout_of_a_table_in_memory_does_not_show():
    X, y = make_blobs(90, 3, centers=3, cluster_std=2.0, random_state=3)
    by_rows = kme_dist.MCEClassifier(steps=5, scaling="standard").fit(X, y)
    by_columns = kme_dist.MCEClassifier(steps=5, scaling="standard").fit(np.asfortranarray(X), y)
    same_model(by_columns, by_rows, np.asfortranarray(X))
    np.testing.assert_array_equal(by_rows.predict_proba(X), by_rows.predict_proba(np.asfortranarray(X)))


def test_rows_far_from_the_origin_are_learned_in_the_same_precision_everywhere(client):
    X, y = make_blobs(120, 3, centers=3, cluster_std=2.0, random_state=2)
    far = (X + 20_000).astype(np.float64)
    chosen = {"scaling": None, "steps": 5, "objective": "rcb"}
    alone = kme_dist.MCEClassifier(**chosen).fit(far, y)
    same_model(kme_dist.MCEClassifier(**chosen, client=client).fit(far, y), alone, far)
    assert alone.score(far, y) == kme_dist.MCEClassifier(**chosen).fit(X, y).score(X, y)


def test_rows_in_memory_are_stored_for_the_workers_first(client):
    X, y = make_blobs(90, 3, centers=3, random_state=0)
    labels = np.array(["red", "green", "blue"])[y]
    over = kme_dist.MCEClassifier(steps=5, client=client).fit(X, labels)
    assert over.score(X, labels) > 0.95
    assert over.classes_.tolist() == ["blue", "green", "red"]
    assert over.n_features_in_ == 3


def test_a_model_made_over_a_client_is_stored_and_loaded_like_any_other(iris, client, tmp_path):
    over = kme_dist.MCEClassifier(steps=2, client=client).fit(iris)
    over.save(tmp_path / "model.zarr")
    Xq, _ = iris.read("test")
    np.testing.assert_array_equal(kme_dist.load(tmp_path / "model.zarr").predict_proba(Xq), over.predict_proba(Xq))


def test_dask_arrays_are_rows_like_any_other():
    import dask.array as da

    X, y = make_blobs(60, 2, centers=2, random_state=0)
    model = kme_dist.MCEClassifier(steps=2).fit(da.from_array(X, chunks=20), da.from_array(y, chunks=20))
    np.testing.assert_array_equal(model.predict(X), kme_dist.MCEClassifier(steps=2).fit(X, y).predict(X))


def test_data_without_classes_are_refused_before_any_work(tmp_path, client):
    data = ingest(np.eye(4), tmp_path / "plain.zarr")
    with pytest.raises(DataError, match="no class labels"):
        kme_dist.MCEClassifier(client=client).fit(data)


def test_a_fit_holds_blas_to_one_thread_whatever_the_size_of_the_table(monkeypatch):
    """Two threads for the factorisation of a batch gain nothing, and stall where the other core is busy."""
    seen = set()

    def spied(original):
        def call(*arguments, **options):
            seen.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(learners, "rcb_objective", spied(learners.rcb_objective))
    monkeypatch.setattr(embedding, "solve_dual", spied(embedding.solve_dual))
    X, y = make_blobs(5_000, 2, centers=2, random_state=0)
    with threadpool_limits(2, user_api="blas"):
        kme_dist.MCEClassifier(objective="rcb", steps=2, batch_size=50, refit_regularization=False).fit(X, y)
    assert seen == {1}


def test_a_linear_kernel_is_solved_for_its_features_and_is_the_same_model(iris):
    X, y = iris.read("train")
    chosen = {"kernel": "linear", "steps": 0, "regularization": 1e-3, "dtype": "float64"}
    primal = kme_dist.MCEClassifier(**chosen).fit(X, y)
    dual = kme_dist.MCEClassifier(**chosen, solver="cholesky").fit(X, y)
    assert (primal.solver_, primal.embedding_.weights.shape) == ("features", (4, 3))
    np.testing.assert_allclose(primal.decision_probabilities(X), dual.decision_probabilities(X), atol=1e-10)


def test_explicit_features_are_stored_and_loaded_with_the_model(iris, tmp_path):
    X, y = iris.read("train")
    for number, settings in enumerate(({"features": 60}, {"features": "polynomial", "kernel": "linear"})):
        model = kme_dist.MCEClassifier(steps=5, objective="rcb", calibration="temperature", **settings).fit(X, y)
        assert model.solver_ == "features"
        model.save(tmp_path / f"{number}.zarr")
        again = kme_dist.load(tmp_path / f"{number}.zarr")
        np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
        assert again.score(X, y) > 0.9


LEARNERS = {
    "network": lambda **more: kme_dist.CENClassifier(hidden=(8, 4), steps=8, batch_size=40, **more),
    "network, exact gradient": lambda **more: kme_dist.CENClassifier(hidden=(6,), steps=4, **more),
    "network, two batches a step": lambda **more: kme_dist.CENClassifier(
        hidden=(6,), steps=4, batch_size=30, batches_per_step=2, refit_regularization=True, **more
    ),
    "kernel on a network": lambda **more: kme_dist.CENClassifier(hidden=(5,), head="gaussian", steps=4, **more),
    "spectral": lambda **more: kme_dist.ASKLClassifier(features=30, epochs=2, loss="cross_entropy", **more),
}


@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
def test_learned_features_have_the_same_bits_alone_over_a_client_and_from_disk(iris, client, learner):
    X, y = iris.read("train")
    Xq, _ = iris.read("test")
    alone = learner().fit(X, y)
    for other in (learner(client=client).fit(X, y), learner(client=client).fit(iris), learner().fit(iris)):
        np.testing.assert_array_equal(other.weights_, alone.weights_)
        np.testing.assert_array_equal(other.decision_function(Xq), alone.decision_function(Xq))
        assert other.bound_ == alone.bound_


def test_spectral_regression_has_the_same_bits_alone_over_a_client_and_from_disk(client, tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3))
    y = 1e3 + np.sin(X[:, 0]) + 0.1 * rng.normal(size=150)
    data = ingest((X, y), tmp_path / "numbers.zarr", task="regression", dtype="float64")
    alone = kme_dist.ASKLRegressor(features=30, epochs=2).fit(X, y)
    for other in (
        kme_dist.ASKLRegressor(features=30, epochs=2, client=client).fit(X, y),
        kme_dist.ASKLRegressor(features=30, epochs=2, client=client).fit(data),
        kme_dist.ASKLRegressor(features=30, epochs=2).fit(data),
    ):
        np.testing.assert_array_equal(other.predict(X), alone.predict(X))


@pytest.mark.parametrize("settings", [{"centres": 60}, {"centres": 119}, {"centres": 60, "steps": 0}], ids=str)
def test_centres_in_single_precision_are_as_good_as_in_double(settings):
    """Without noise the best λ is tiny, and the sums over rows must bear it."""
    rng = np.random.default_rng(0)
    X, Xq = rng.uniform(-1, 1, size=(120, 2)), rng.uniform(-1, 1, size=(500, 2))
    y, yq = (np.sin(3 * Z[:, 0]) + Z[:, 1] > 0 for Z in (X, Xq))
    chosen = {"objective": "rcb", "steps": 20, "regularization": 1e-6, "solver": "nystrom", **settings}
    narrow, wide = (kme_dist.MCEClassifier(dtype=dtype, **chosen).fit(X, y) for dtype in ("float32", "float64"))
    assert narrow.score(Xq, yq) >= wide.score(Xq, yq) - 0.004
    np.testing.assert_allclose(narrow.predict_proba(Xq), wide.predict_proba(Xq), atol=0.02)


def test_conjugate_gradients_choose_the_regularisation_that_the_other_exact_solvers_choose(iris):
    X, y = iris.read("train")
    by = {
        solver: kme_dist.MCEClassifier(objective="median", solver=solver, dtype="float64").fit(X, y)
        for solver in ("cholesky", "tiled", "pcg")
    }
    assert len({model.regularization_ for model in by.values()}) == 1
    assert len({model.loo_log_loss_["median"] for model in by.values()}) == 1


def test_a_linear_kernel_counts_the_rows_of_its_own_split(tmp_path):
    X, y = make_blobs(100, 85, centers=3, cluster_std=8.0, random_state=0)
    data = ingest(
        (X, y), tmp_path / "wide.zarr", task="classification", split="train=0:80,test=80:100", dtype="float64"
    )
    chosen = {"kernel": "linear", "objective": "rcb", "steps": 3}
    same_model(kme_dist.MCEClassifier(**chosen).fit(data), kme_dist.MCEClassifier(**chosen).fit(X[:80], y[:80]), X)
