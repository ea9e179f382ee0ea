"""Every learner and every fit: on arrays, on a data set, and on 1, 2 and 8 workers the same bits, with no tolerance."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist import kernels
from kme_dist.core.features import from_config
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.models.askl import VARIANTS, SpectralLearner
from kme_dist.run.conditional import ConditionalLearner
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.fit import fit_on_dataset
from kme_dist.run.full import learn_features
from kme_dist.run.learn import Batches, learn
from kme_dist.run.learners import KernelLearner, LearnSettings, NetworkLearner, SoftmaxLearner, log_parameters, start_of

N, D, M = 700, 4, 3
SETTINGS = LearnSettings(steps=4, batch_size=90, learning_rate=0.05, seed=2)
KERNEL = kernels.Gaussian(length_scale=np.linspace(0.5, 1.5, D))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(N, D)) * [1, 10, 0.1, 5] + [0, 0, 3, 1000]
    y = (np.argsort(np.argsort(X[:, 0] + 0.1 * rng.normal(size=N))) * M // N).astype(np.int64)
    place = tmp_path_factory.mktemp("rows") / "d.zarr"
    return {
        "classes": (ArrayRows(X, y, np.arange(M)), ingest((X, y), place, dtype="float64", task="classification")),
        "numbers": (
            ArrayRows(X, X[:, 0] ** 2),
            ingest((X, X[:, 0] ** 2), place.with_name("r.zarr"), dtype="float64", task="regression"),
        ),
    }


@pytest.fixture(scope="module")
def executors():
    """One, two and eight workers; they share this process, since what is tested is the order of the work."""
    clusters = [
        LocalCluster(n_workers=count, threads_per_worker=1, processes=False, dashboard_address=":0")
        for count in (1, 2, 8)
    ]
    clients = [Client(cluster) for cluster in clusters]
    yield [SerialExecutor(), SerialExecutor(threads=2), *(DaskExecutor(client) for client in clients)]
    for client, cluster in zip(clients, clusters, strict=True):
        client.close()
        cluster.close()


def network():
    return from_config({"name": "dense_network", "hidden": [8, 5]}, n_features=D, seed=3)


def spectral():
    start = from_config({"name": "spectral", "features": 12}, n_features=D, seed=3)
    learner = SpectralLearner(start, VARIANTS["askl"], "hinge", M, 1e-3, 1e-3)
    width = start.forward(np.zeros((1, D))).shape[1]
    return learner, {**start_of(start), "W": np.zeros((width, M))}


LEARNERS = {
    "kernel": lambda: (KernelLearner(KERNEL, SETTINGS, M), log_parameters(KERNEL, 0.1)),
    "network": lambda: (NetworkLearner(network(), SETTINGS, M, dropout=0.2), start_of(network(), 0.1)),
    "softmax": lambda: (learner := SoftmaxLearner(network(), SETTINGS, M), learner.start(5)),
    "spectral": spectral,
    "conditional mean": lambda: (
        ConditionalLearner(KERNEL, kernels.Gaussian(length_scale=np.ones(1)), seed=2),
        log_parameters(KERNEL, 0.1),
    ),
}


def bits(parameters):
    return {name: np.asarray(value).tobytes() for name, value in parameters.items()}


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("local_steps", [None, 2])
def test_a_learner_learns_the_same_bits_everywhere(name, local_steps, sources, executors):
    learner, start = LEARNERS[name]()
    rows, stored = sources["numbers" if name == "conditional mean" else "classes"]
    scaling = Scaling.of(stored.split_statistics(None), "standard")

    def learned(source, executor):
        batches = Batches.of(source, batch_size=90, seed=2, scaling=scaling, dtype="float64")
        if name == "conditional mean":
            learner_rows = batches  # targets as one column, for a kernel of vectors
            found = learn(_Columns(learner), learner_rows, start, SETTINGS, executor=executor, batches_per_step=3,
                          local_steps=local_steps)  # fmt: skip
        else:
            found = learn(learner, batches, start, SETTINGS, executor=executor, batches_per_step=3,
                          local_steps=local_steps)  # fmt: skip
        return bits(found.parameters)

    alone = learned(rows, executors[0])
    assert alone != bits(start), "something was learned"
    for executor in executors:
        assert learned(stored, executor) == alone


class _Columns:
    """A learner whose targets are one column of numbers."""

    def __init__(self, learner):
        self.learner = learner

    def evaluate(self, parameters, X, y, number):
        return self.learner.evaluate(parameters, X, y[:, None], number)

    def describe(self):
        return self.learner.describe()


def test_exact_gradients_of_all_rows_learn_the_same_bits_everywhere(sources, executors):
    rows, stored = sources["classes"]
    start = from_config({"name": "random_fourier", "features": 6}, n_features=D, seed=3)
    settings = LearnSettings(steps=3, learning_rate=0.05)

    def learned(source, executor):
        found = learn_features(source, start, 0.1, settings, executor=executor, scaling="standard")
        return bits({**found.features.parameters, "regularization": found.regularization})

    alone = learned(rows, executors[0])
    for executor in executors:
        assert learned(stored, executor) == alone


@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg", "nystrom", "falkon", "features"])
def test_a_fit_gives_the_same_bits_everywhere(solver, sources, executors, tmp_path):
    rows, stored = sources["classes"]
    options = {"scaling": "standard", "dtype": "float64", "solver": solver, "tile_rows": 200}
    if solver in ("nystrom", "falkon"):
        options["centres"] = 60
    if solver == "features":
        options["features"] = from_config({"name": "random_fourier", "features": 20}, n_features=D, seed=3)

    def fitted(source, executor, scratch):
        found = fit_on_dataset(source, KERNEL, 1e-3, executor=executor, scratch=scratch, **options)
        return bits({"weights": found.embedding.weights, "lam": found.regularization, "loss": found.loss})

    alone = fitted(rows, executors[0], None)
    for number, executor in enumerate(executors):
        assert fitted(stored, executor, tmp_path / str(number)) == alone
