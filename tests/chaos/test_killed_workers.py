"""Workers that die at a named place, in processes of their own: the job finishes by itself, with the same bytes."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from distributed import Client, LocalCluster

import kme_dist as kme
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.failpoints import VARIABLE
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.learn import learn_on_dataset
from kme_dist.run.learners import LearnSettings

X = np.random.default_rng(0).normal(size=(4000, 3))
y = (X[:, 0] > X[:, 1]).astype(int)
SIZES = {"chunk_bytes": "8KiB", "shard_bytes": "16KiB"}


def store(folder, client):
    np.save(folder / "X.npy", X)
    found = ingest(folder / "X.npy", folder / "X.zarr", client=client, **SIZES)
    return found.read()[0].tobytes()


def learn(folder, client):
    data = ingest((X, y), folder / "rows.zarr", shuffle=0, **SIZES)
    executor = SerialExecutor() if client is None else DaskExecutor(client)
    settings = LearnSettings(steps=5, batch_size=200)
    kernel = Gaussian(length_scale=np.ones(3))
    found = learn_on_dataset(data, kernel, 0.1, settings, executor=executor)
    return repr(found.kernel), repr(found.regularization)


def fit(solver, folder, client):
    data = ingest((X, y), folder / "rows.zarr", shuffle=0, **SIZES)
    kernel = Gaussian(length_scale=np.ones(3))
    model = kme.MCEClassifier(kernel=kernel, steps=0, regularization=1e-3, solver=solver, centres=40, client=client)
    return model.fit(data).predict_proba(X[:200]).tobytes()


def predict(folder, client):
    data = ingest(X, folder / "rows.zarr", **SIZES)
    kernel = Gaussian(length_scale=np.ones(3))
    kme.MCEClassifier(kernel=kernel, steps=0, regularization=1e-3).fit(X[:100], y[:100]).save(folder / "model.zarr")
    kme.predict(folder / "model.zarr", data, folder / "out.zarr", executor=client)
    found = kme.open_predictions(folder / "out.zarr")
    found.verify()
    assert sorted(found.receipts()) == list(range(found.chunks))
    return {name: found.read(name).tobytes() for name in found.names}


def fit_centres(folder, client):
    return fit("nystrom", folder, client)


def fit_gradients(folder, client):
    return fit("pcg", folder, client)


CASES = [
    pytest.param("ingest.before_shard@2", store, marks=pytest.mark.chaos(1)),
    pytest.param("ingest.after_shard@2", store, marks=pytest.mark.chaos(1)),
    pytest.param("learn.before_batch@2", learn, marks=pytest.mark.chaos(2)),
    pytest.param("fit.before_part", fit_centres, marks=pytest.mark.chaos(3)),
    pytest.param("fit.before_combine", fit_gradients, marks=pytest.mark.chaos(3)),
    pytest.param("predict.before_chunk@2", predict, marks=pytest.mark.chaos(4)),
    pytest.param("predict.after_chunk@2", predict, marks=pytest.mark.chaos(4)),
    pytest.param("predict.after_receipt@2", predict, marks=pytest.mark.chaos(4)),
]


@pytest.fixture
def cluster(monkeypatch):
    """A function: two workers with this setting of failpoints, which their nannies start again, and their client."""
    held = []

    def start(setting):
        monkeypatch.setenv(VARIABLE, setting)  # the workers inherit it; this process has imported its own, empty one
        held.append(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0"))
        held.append(Client(held[0]))
        held[1].wait_for_workers(2, timeout=120)
        return held[1]

    yield start
    while held:
        held.pop().close()


@pytest.mark.slow
@pytest.mark.parametrize(("place", "job"), CASES)
def test_a_worker_killed_there_does_not_show(tmp_path, cluster, place, job):
    for name in ("markers", "quiet", "killed"):
        (tmp_path / name).mkdir()
    client = cluster(f"once={tmp_path / 'markers'},{place}:kill")
    quiet = job(tmp_path / "quiet", None)
    began = time.monotonic()
    found = job(tmp_path / "killed", client)
    marker = tmp_path / "markers" / place.partition("@")[0]
    assert int(marker.read_text()) not in (os.getpid(), 0)
    print(f"{place}: the job ended {time.time() - marker.stat().st_mtime:.1f} s after the kill", end=" ")
    print(f"and {time.monotonic() - began:.1f} s after its start")
    assert found == quiet
