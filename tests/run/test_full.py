"""Full gradients by map and reduce: equal to those of one process that holds everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from distributed import Client, LocalCluster, get_task_stream

from kme_dist.core.objective import feature_objective
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.full import full_gradient, learn_features
from kme_dist.run.learners import LearnSettings

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


@pytest.mark.chaos(21)
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


@dataclass(frozen=True)
class Counting(Tanh):
    """Counts how often features are computed in this process."""

    calls: ClassVar[list[int]] = []

    def forward(self, X):
        self.calls.append(len(X))
        return super().forward(X)

    def vjp(self, X, Z_bar):
        return Tanh(self.A, self.b).vjp(X, Z_bar)


def test_features_are_kept_between_the_passes_as_far_as_memory_goes(data, features):
    counting = Counting(features.A, features.b)
    chunks = sum(-(-(stop - start) // data.chunk_rows) for start, stop in data.ranges("train"))
    row_bytes = 8 * (4 + 1 + features.b.size)
    found = {}
    for name, limit in (("all", 1 << 30), ("some", row_bytes * data.chunk_rows * 4), ("none", 0)):
        counting.calls.clear()
        found[name] = full_gradient(data, counting, 0.02, executor=SerialExecutor(), cache_bytes=limit)
        found[name + " calls"] = len(counting.calls)
    assert found["all calls"] == chunks
    assert found["none calls"] == 3 * chunks
    assert chunks < found["some calls"] < 3 * chunks
    for name in ("some", "none"):
        assert found[name].value == found["all"].value
        for key, value in found["all"].gradient.items():
            assert found[name].gradient[key].tobytes() == value.tobytes()


def test_other_parameters_are_never_answered_from_memory(data, features):
    first = full_gradient(data, features, 0.02, executor=SerialExecutor())
    moved = features.replace(A=features.A * 1.1)
    second = full_gradient(data, moved, 0.02, executor=SerialExecutor())
    assert second.value == full_gradient(data, moved, 0.02, executor=SerialExecutor(), cache_bytes=0).value
    assert second.value != first.value


def test_a_chunk_goes_to_the_same_worker_in_every_pass(data, features):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        get_task_stream(client) as tasks,
    ):
        full_gradient(data, features, 0.02, executor=DaskExecutor(client))
    passes = ("feature-moments", "feature-losses", "feature-gradient")
    workers = {name: {} for name in passes}
    for task in tasks.data:
        name = next((name for name in passes if task["key"].startswith(name)), None)
        if name is not None:
            workers[name][task["key"].split("-")[3]] = task["worker"]
    assert {len(set(places.values())) for places in workers.values()} == {2}, "both take part"
    alike = [workers[passes[0]][place] == workers[passes[2]][place] for place in workers[passes[0]]]
    assert np.mean(alike) > 0.5, "a preference, which an idle worker may overrule"


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
    with pytest.raises(ConfigError, match="full gradients support only 'rcb' and 'erm'"):
        learn_features(data, features, 0.1, LearnSettings(objective="validation"), executor=SerialExecutor())
    with pytest.raises(ConfigError, match="risk='median'"):
        full_gradient(data, features, 0.1, executor=SerialExecutor(), risk="median")
    with pytest.raises(DataError, match="no rows"):
        full_gradient(data, features, 0.1, executor=SerialExecutor(), spans=((5, 5),))
