"""From a data set to a fitted embedding: the same choices as in memory, whoever does the work."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_iris, make_blobs

import kme_dist
from kme_dist import kernels
from kme_dist.data.ingest import ingest
from kme_dist.errors import DataError
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


@pytest.mark.parametrize("objective", ["auto", "rcb", "validation", "loo", "erm", "median", "cv"])
def test_every_objective_ends_in_a_model_that_knows_iris(iris, tmp_path, objective):
    trained = train(iris, recipe(objective=objective), SerialExecutor(), tmp_path / "scratch")
    X, y = iris.read("test")
    decided = trained.fit.embedding.decision(trained.fit.scaling.apply(X, "float64")).argmax(axis=1)
    assert (decided == y).mean() >= 0.9
    if objective == "auto":
        assert set(trained.losses) == {"rcb", "validation"}
        assert trained.losses[trained.best.name] == min(trained.losses.values())
    elif objective != "cv":
        assert set(trained.losses) == {objective}


def test_workers_and_one_process_find_the_same_bits(iris, client, tmp_path):
    alone = train(iris, recipe(), SerialExecutor(), tmp_path / "a")
    together = train(iris, recipe(), DaskExecutor(client), tmp_path / "b")
    assert together.best.name == alone.best.name
    assert together.losses == alone.losses
    np.testing.assert_array_equal(together.fit.embedding.weights, alone.fit.embedding.weights)


def test_the_regularisation_stays_as_learned_where_that_is_asked_for(iris, tmp_path):
    trained = train(iris, recipe(refit_regularization=False), SerialExecutor(), tmp_path / "scratch")
    assert trained.fit.regularization == trained.best.regularization
    assert len(trained.losses) == 2, "the objectives are compared all the same"


def test_without_steps_the_kernel_is_used_as_given(iris, tmp_path):
    given = Recipe(kernels.from_config("gaussian", n_features=4), steps=0, regularization=0.01)
    trained = train(iris, given, SerialExecutor(), tmp_path / "scratch")
    assert trained.fit.regularization == 0.01
    np.testing.assert_array_equal(
        trained.fit.embedding.kernel.parameters["length_scale"], given.kernel.parameters["length_scale"]
    )


def test_the_estimator_learns_over_a_client_what_it_learns_alone(iris, client):
    X, y = iris.read("train")
    Xq, yq = iris.read("test")
    over = kme_dist.MCEClassifier(steps=20, client=client).fit(iris)
    alone = kme_dist.MCEClassifier(steps=20).fit(X, y)
    assert over.score(Xq, yq) >= 0.9
    assert over.objective_ in ("rcb", "validation")
    np.testing.assert_allclose(over.predict_proba(Xq), alone.predict_proba(Xq), atol=0.2)
    assert over.classes_.tolist() == [0, 1, 2]
    assert len(over.history_) == len(alone.history_)


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
