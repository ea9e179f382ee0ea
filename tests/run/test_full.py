"""Full gradients by map and reduce: equal to those of one process that holds everything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist.core.objective import feature_objective
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.full import full_gradient, learn_features
from kme_dist.run.learn import LearnSettings
from kme_dist.run.scaling import Scaling

CLASSES = 3


@dataclass(frozen=True)
class Tanh:
    """φ(x) = tanh(x A + b): the smallest feature map with two parameters."""

    A: np.ndarray
    b: np.ndarray

    @property
    def parameters(self):
        return {"A": self.A, "b": self.b}

    def replace(self, **values):
        return replace(self, **values)

    def forward(self, X):
        return np.tanh(X @ self.A + self.b)

    def vjp(self, X, Z_bar):
        inner = Z_bar * (1 - self.forward(X) ** 2)
        return {"A": X.T @ inner, "b": inner.sum(axis=0)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(1237, 4)).astype(np.float64)
    y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
    place = tmp_path_factory.mktemp("full") / "d.zarr"
    return ingest((X, y), place, shuffle=1, split="train=0.9,test=0.1", chunk_bytes="4KiB", shard_bytes="16KiB")


@pytest.fixture(scope="module")
def features():
    rng = np.random.default_rng(3)
    return Tanh(rng.normal(size=(4, 6)), rng.normal(size=6))


def in_one_process(data, features, lam, risk, tau):
    X, y = data.read("train")
    rows = Scaling.of(data.split_statistics("train"), "unit").apply(X, "float64")
    out = feature_objective(
        features.forward(rows), y, regularization=lam, n_classes=CLASSES, risk=risk, complexity_weight=tau
    )
    gradient = {f"features.{name}": value for name, value in features.vjp(rows, out.feature_gradient).items()}
    return out, {**gradient, "regularization": out.gradient["regularization"]}


def assert_same(found, expected, gradient):
    for name in ("value", "risk", "complexity", "bound", "accuracy"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-11)
    assert set(found.gradient) == set(gradient)
    for name, value in gradient.items():
        np.testing.assert_allclose(found.gradient[name], value, rtol=1e-10, atol=1e-10 * np.abs(value).max())


@pytest.mark.parametrize("risk", ["sum", "mean"])
@pytest.mark.parametrize("tau", [0.0, 4 * np.e])
def test_three_passes_give_the_gradient_of_one_process(data, features, risk, tau):
    found = full_gradient(data, features, 0.02, executor=SerialExecutor(), risk=risk, complexity_weight=tau)
    assert_same(found, *in_one_process(data, features, 0.02, risk, tau))


def test_uneven_and_empty_chunks_change_nothing_but_rounding(data, features):
    (start, stop), *_ = data.ranges("train")
    spans = ((start, start + 1), (start + 1, start + 1), (start + 1, start + 700), (start + 700, stop))
    spans += tuple(data.ranges("train")[1:])
    found = full_gradient(data, features, 0.02, executor=SerialExecutor(), spans=spans)
    assert_same(found, *in_one_process(data, features, 0.02, "sum", 4 * np.e))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bits(data, features, workers):
    one = full_gradient(data, features, 0.02, executor=SerialExecutor())
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        many = full_gradient(data, features, 0.02, executor=DaskExecutor(client))
    for name, value in one.gradient.items():
        assert value.tobytes() == many.gradient[name].tobytes()
    assert one.value == many.value


def test_the_gradient_is_the_slope(data, features):
    out = full_gradient(data, features, 0.02, executor=SerialExecutor())
    step, direction = 1e-6, np.random.default_rng(0).normal(size=features.A.shape)
    values = [
        full_gradient(
            data, features.replace(A=features.A + s * step * direction), 0.02, executor=SerialExecutor()
        ).value
        for s in (1, -1)
    ]
    np.testing.assert_allclose(
        (values[0] - values[1]) / (2 * step), np.sum(out.gradient["features.A"] * direction), rtol=1e-5
    )
    values = [full_gradient(data, features, 0.02 * np.exp(s * step), executor=SerialExecutor()).value for s in (1, -1)]
    np.testing.assert_allclose((values[0] - values[1]) / (2 * step), out.gradient["regularization"], rtol=1e-5)


def test_learning_by_it_goes_down_and_resumes_to_the_same_bits(data, features, tmp_path):
    settings = LearnSettings(steps=15, learning_rate=0.05)
    whole = learn_features(data, features, 0.1, settings, executor=SerialExecutor())
    assert whole.history[-1]["objective"] < whole.history[0]["objective"]

    def stop(record):
        if record["step"] == 6:
            raise KeyboardInterrupt

    options = {"executor": SerialExecutor(), "checkpoints": Checkpoints(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        learn_features(data, features, 0.1, settings, callback=stop, **options)
    again = learn_features(data, features, 0.1, settings, **options)
    assert len(again.history) == 9
    assert again.features.A.tobytes() == whole.features.A.tobytes()
    assert again.regularization == whole.regularization


def test_what_has_no_full_gradient_is_refused(data, features):
    with pytest.raises(ConfigError, match="full gradients are of 'rcb' and 'erm'"):
        learn_features(data, features, 0.1, LearnSettings(objective="validation"), executor=SerialExecutor())
    with pytest.raises(ConfigError, match="risk='median'"):
        full_gradient(data, features, 0.1, executor=SerialExecutor(), risk="median")
    with pytest.raises(DataError, match="no rows"):
        full_gradient(data, features, 0.1, executor=SerialExecutor(), spans=((5, 5),))
