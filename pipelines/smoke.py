"""`kme-dist smoke`: an end-to-end test of a deployment, in seconds.

    kme-dist smoke                                                     # on this machine
    kme-dist smoke nightly.yaml --folder s3://bucket/smoke             # on the cluster that a config names

Three well-separated clusters of points are stored as a data set; the workers learn a few steps, fit the model and
predict unseen rows. Three things are checked: the workers learn the same parameters as a single process, probabilities
sum to 1, and nearly all unseen rows are classified correctly. The folder is removed at the end.

With workers on other machines, `--folder` must be a place that all of them can reach.
"""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kme_dist import MCEClassifier, ingest, kernels, open_predictions, predict
from kme_dist.config import ClusterConfig
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, NumericalError
from kme_dist.ops.cluster import open_executor
from kme_dist.run.executors import Executor, SerialExecutor
from kme_dist.run.learn import Learned, learn_on_dataset
from kme_dist.run.learners import LearnSettings

ROWS, CLASSES, FEATURES = 360, 3, 4
SETTINGS = LearnSettings(objective="validation", steps=4, batch_size=60, learning_rate=0.1, seed=0)
ENOUGH = 0.95  # the clusters are six widths apart: a correct model misclassifies none
SAME = 1e-4  # other processors round differently; a larger difference is an error
ON_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def run(cluster: ClusterConfig, folder: str | None = None) -> dict[str, Any]:
    """Run the test on `cluster` and return the output of `kme-dist smoke --json`; raises on failure."""
    began = time.perf_counter()
    if folder is not None:
        return _in(Place.of(folder).child(f"smoke-{uuid.uuid4().hex[:12]}"), cluster, began)
    if _is_elsewhere(cluster):
        raise ConfigError(
            f"the workers of {cluster.address or cluster.kind} may run on other machines; pass a place that they and "
            "this process can reach with --folder, e.g. --folder s3://bucket/smoke or a shared folder"
        )
    with tempfile.TemporaryDirectory(prefix="kme-dist-smoke-") as own:
        return _in(Place.of(own).child("smoke"), cluster, began)


def _in(place: Place, cluster: ClusterConfig, began: float) -> dict[str, Any]:
    try:
        with open_executor(cluster) as executor:
            facts = _try_all(place, executor)
            workers = executor.workers
    finally:
        place.delete_all()
    return {"status": "succeeded", "workers": workers, **facts, "seconds": round(time.perf_counter() - began, 3)}


def _try_all(place: Place, executor: Executor) -> dict[str, Any]:
    data = ingest(_clouds(), str(place.child("data.zarr")), shuffle=0, split="train=0.7,test=0.3", stratify=True)
    learned, alone = (_learn(data, who) for who in (executor, SerialExecutor()))
    _expect_same(learned, alone)
    model = MCEClassifier(
        kernel=learned.kernel,
        regularization=learned.regularization,
        objective=SETTINGS.objective,
        steps=0,
        refit_regularization=False,
        client=getattr(executor, "client", None),
    )
    model.fit(data).save(str(place.child("model.zarr")))
    out = str(place.child("predictions.zarr"))
    predict(str(place.child("model.zarr")), data, out, executor=executor, split="test")
    _, y = data.read("test")
    accuracy = _check_predictions(open_predictions(out).read("probability"), y)
    return {"rows": len(data), "steps": SETTINGS.steps, "accuracy": accuracy, "regularization": learned.regularization}


def _check_predictions(probabilities: np.ndarray, y: Any) -> float:
    if not (np.isfinite(probabilities).all() and np.allclose(probabilities.sum(axis=1), 1.0, atol=1e-4)):
        raise NumericalError("smoke: the probabilities of some rows do not sum to 1; run `kme-dist doctor`")
    accuracy = float(np.mean(np.argmax(probabilities, axis=1) == y))
    if accuracy < ENOUGH:
        raise NumericalError(
            f"smoke: {100 * accuracy:.1f} % of the unseen rows are classified correctly, {100 * ENOUGH:.0f} % are "
            "required; run `kme-dist doctor`"
        )
    return accuracy


def _clouds() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(ROWS) % CLASSES
    X = rng.standard_normal((ROWS, FEATURES))
    X[np.arange(ROWS), y] += 6.0
    return X.astype(np.float32), y


def _learn(data: Any, executor: Executor) -> Learned:
    start = kernels.Gaussian(length_scale=np.full(FEATURES, 0.5))
    return learn_on_dataset(data, start, 0.1, SETTINGS, batches_per_step=2, executor=executor, dtype="float64")


def _expect_same(learned: Learned, alone: Learned) -> None:
    """Workers and a single process must learn the same numbers, else versions are mixed or a machine is faulty."""
    ours, theirs = (
        {"regularization": np.asarray(result.regularization), **result.kernel.parameters} for result in (alone, learned)
    )
    for name, value in ours.items():
        found = theirs[name]
        if not np.allclose(found, value, rtol=SAME, atol=0.0):
            raise NumericalError(
                f"smoke: the workers learned {name} = {found}, this process {value}; check for mixed machines or "
                "versions with `kme-dist doctor` on each of them"
            )


def _is_elsewhere(cluster: ClusterConfig) -> bool:
    if cluster.kind == "address":
        return urlsplit(cluster.address or "").hostname not in ON_THIS_MACHINE
    return cluster.kind not in ("serial", "local", "local-cuda")


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["smoke", *sys.argv[1:]])
