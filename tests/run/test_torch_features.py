"""PyTorch networks as feature maps: the numbers of the native path, no copies, no pickles, the user's own classes."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from sklearn.datasets import load_iris

import kme_dist as kme
from kme_dist.core import features as maps
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.cen import CENClassifier

torch = pytest.importorskip("torch")
from kme_dist.run import torch_features  # noqa: E402
from kme_dist.run.torch_features import TorchFeatures, named  # noqa: E402

INPUTS, HIDDEN = 4, (9, 5)


def pair(activation="relu", dtype="float64"):
    """The same network twice: native, and in torch."""
    native = maps.dense_network(INPUTS, HIDDEN, activation, seed=4, deviation=0.6)
    theirs = named("dense", {"inputs": INPUTS, "hidden": list(HIDDEN), "activation": activation})
    values = {}
    for i in range(len(HIDDEN)):
        values[f"{2 * i}.weight"] = native.parameters[f"{i}.weight"].T
        values[f"{2 * i}.bias"] = native.parameters[f"{i}.bias"]
    theirs = TorchFeatures(theirs._module, {n: v.astype(dtype) for n, v in values.items()}, theirs.to_config())
    return native, theirs


@pytest.fixture
def X(rng):
    return rng.normal(size=(12, INPUTS))


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_equals_the_native_dense_path(activation, X, rng):
    native, theirs = pair(activation)
    np.testing.assert_allclose(theirs.forward(X), native.forward(X), rtol=1e-6, atol=1e-9)
    Z_bar = rng.normal(size=(12, HIDDEN[-1]))
    expected, found = native.vjp(X, Z_bar), theirs.vjp(X, Z_bar)
    for i in range(len(HIDDEN)):
        np.testing.assert_allclose(found[f"{2 * i}.weight"].T, expected[f"{i}.weight"], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found[f"{2 * i}.bias"], expected[f"{i}.bias"], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(theirs.input_vjp(X, Z_bar), native.input_vjp(X, Z_bar), rtol=1e-6, atol=1e-9)


def test_learning_equals_the_native_path():
    X, y = load_iris(return_X_y=True)
    native, theirs = pair()
    options = {"steps": 10, "dtype": "float64", "batch_size": 60, "dropout": 0.2}
    models = [CENClassifier(network=phi, **options).fit(X, y) for phi in (native, theirs)]
    np.testing.assert_allclose(models[1].decision_probabilities(X), models[0].decision_probabilities(X), atol=1e-6)
    assert models[1].history_[-1]["objective"] == pytest.approx(models[0].history_[-1]["objective"], rel=1e-6)


def test_derivatives_of_the_convolutional_network_match_finite_differences(rng):
    phi = named("hnr_cnn", {"side": 8, "channels": [2, 3], "features": 4}, seed=1)
    X = rng.uniform(size=(3, 64))
    Z_bar = rng.normal(size=(3, 4))
    found = phi.vjp(X, Z_bar)
    wide = TorchFeatures(phi._module, {n: v.astype(np.float64) for n, v in phi.arrays.items()}, phi.to_config())
    for name, value in wide.parameters.items():
        direction = rng.normal(size=value.shape)
        ends = [np.sum(Z_bar * wide.replace(**{name: value + s * 1e-6 * direction}).forward(X)) for s in (1, -1)]
        np.testing.assert_allclose(np.sum(found[name] * direction), (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_the_published_architecture_has_its_shapes_and_its_start():
    phi = named("hnr_cnn")
    shapes = {name: value.shape for name, value in phi.parameters.items()}
    assert shapes["1.weight"] == (32, 1, 5, 5)
    assert shapes["4.weight"] == (64, 32, 5, 5)
    assert shapes["8.weight"] == (1024, 3136)
    assert np.abs(phi.parameters["8.weight"]).max() <= 0.2 + 1e-6
    assert (phi.parameters["8.bias"] == np.float32(0.1)).all()
    assert phi.forward(np.zeros((2, 784), np.float32)).shape == (2, 1024)


def test_rows_and_features_cross_without_a_copy(X):
    class Same(torch.nn.Module):
        def forward(self, rows):
            return rows

    phi = TorchFeatures.of(Same())
    assert np.shares_memory(phi.forward(X), X)
    assert np.shares_memory(phi.forward(X.astype(np.float32)), X) is False
    assert phi.forward(X.astype(np.float32)).dtype == np.float32


def test_the_users_module_is_never_changed(X):
    module = torch.nn.Linear(INPUTS, 3)
    before = module.weight.detach().clone()
    phi = TorchFeatures.of(module)
    changed = phi.replace(weight=phi.parameters["weight"] + 1)
    changed.forward(X)
    assert torch.equal(module.weight, before)
    assert (changed.forward(X) != phi.forward(X)).any()
    with pytest.raises(ConfigError, match="no parameter 'wrong'"):
        phi.replace(wrong=1.0)


def test_dropout_of_the_module_is_decided_by_the_key(X):
    phi = TorchFeatures.of(torch.nn.Sequential(torch.nn.Linear(INPUTS, 50), torch.nn.Dropout(0.5)))
    state = torch.random.get_rng_state()
    one, again, other = (phi.sampled(key).forward(X) for key in ((1, 2), (1, 2), (1, 3)))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    np.testing.assert_array_equal(phi.forward(X), phi.forward(X))
    assert torch.equal(torch.random.get_rng_state(), state)


class Counting(torch.nn.Module):
    """Changes a buffer in place, as layers with running statistics do."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(INPUTS, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, rows):
        self.calls += 1
        return self.layer(rows) + self.calls.to(rows.dtype)


def test_buffers_are_kept_and_frozen_parameters_stay(X):
    module = Counting()
    module.layer.bias.requires_grad_(False)
    phi = TorchFeatures.of(module)
    assert set(phi.arrays) == {"layer.weight", "layer.bias", "calls"}
    assert set(phi.parameters) == {"layer.weight"}
    assert set(phi.vjp(X, np.ones((12, 3)))) == set(phi.parameters)
    for rows in (X, X.astype(np.float32)):
        np.testing.assert_array_equal(phi.sampled((1, 2)).forward(rows), phi.forward(rows))
    assert phi.arrays["calls"] == 0


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.BatchNorm1d(3),
        torch.nn.BatchNorm1d(3, track_running_stats=False),
        torch.nn.InstanceNorm1d(3, track_running_stats=True),
    ],
)
def test_statistics_of_batches_are_refused(layer):
    """Features would depend on the other rows of a batch, or on the batches that a process has seen."""
    X, y = load_iris(return_X_y=True)
    model = CENClassifier(network=torch.nn.Sequential(torch.nn.Linear(INPUTS, 3), layer), steps=1)
    with pytest.raises(ConfigError, match=f"has a layer {type(layer).__name__}, .* use LayerNorm, GroupNorm, or"):
        model.fit(X, y)


def test_layers_that_normalise_single_rows_learn():
    X, y = load_iris(return_X_y=True)
    layers = [torch.nn.Linear(INPUTS, 6), torch.nn.GroupNorm(2, 6), torch.nn.LayerNorm(6)]
    assert CENClassifier(network=torch.nn.Sequential(*layers), steps=5, regularization=0.01).fit(X, y).score(X, y) > 0.5


@pytest.fixture
def threads_of_torch():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_bits_do_not_depend_on_the_threads_of_torch(threads_of_torch, rng):
    phi = named("hnr_cnn", {"side": 12, "channels": [8, 16], "features": 32})
    X, Z_bar = rng.random((100, 144)).astype(np.float32), rng.random((100, 32)).astype(np.float32)
    found = []
    for threads in (1, 2):
        threads_of_torch(threads)
        found.append({"Z": phi.forward(X), **phi.vjp(X, Z_bar)})
        assert torch.get_num_threads() == threads
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value)


def test_travels_between_processes(X):
    phi = named("dense", {"inputs": INPUTS})
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(phi)).forward(X), phi.forward(X))


class Own(torch.nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layer = torch.nn.Linear(INPUTS, width)

    def forward(self, rows):
        return torch.nn.functional.silu(self.layer(rows))


def test_a_stored_network_is_arrays_and_a_name(tmp_path):
    X, y = load_iris(return_X_y=True)
    network = {"name": "torch", "architecture": "dense", "arguments": {"inputs": 4, "hidden": [8, 6]}}
    model = CENClassifier(network=network, steps=15).fit(X, y)
    model.save(tmp_path / "m.zarr")
    again = kme.load(tmp_path / "m.zarr")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert json.loads(json.dumps(again.features_.to_config())) == network
    assert not [p for p in (tmp_path / "m.zarr").rglob("*") if p.suffix in (".pt", ".pth", ".pkl")]


def test_ones_own_class_is_handed_over_at_load(tmp_path):
    X, y = load_iris(return_X_y=True)
    torch.manual_seed(0)
    model = CENClassifier(network=Own(), steps=60, regularization=0.01).fit(X, y)
    assert model.score(X, y) > 0.9
    model.save(tmp_path / "m.zarr")
    with pytest.raises(ConfigError, match="networks="):
        kme.load(tmp_path / "m.zarr")
    again = kme.load(tmp_path / "m.zarr", networks={"Own": Own})
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


class Wide(Own):
    def __init__(self, width):
        super().__init__(width)


def test_a_class_that_requires_arguments_is_handed_over_as_a_function(tmp_path):
    X, y = load_iris(return_X_y=True)
    model = CENClassifier(network=Wide(5), steps=1).fit(X, y)
    model.save(tmp_path / "m.zarr")
    with pytest.raises(ConfigError, match=r"'width'; pass a function .* networks={'Wide': lambda: Wide\(\.\.\.\)}"):
        kme.load(tmp_path / "m.zarr", networks={"Wide": Wide})
    again = kme.load(tmp_path / "m.zarr", networks={"Wide": lambda: Wide(5)})
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


def test_over_workers_as_in_one_process(tmp_path):
    from distributed import Client, LocalCluster

    from kme_dist.data.ingest import ingest

    data = ingest(load_iris(return_X_y=True), tmp_path / "iris.zarr", shuffle=1, chunk_bytes="1KiB", shard_bytes="4KiB")
    network = {"name": "torch", "architecture": "dense", "arguments": {"inputs": 4, "hidden": [6, 4]}}
    for batch_size in (None, 40):
        options = {"network": network, "steps": 3, "batch_size": batch_size, "batches_per_step": 2, "dtype": "float64"}
        alone = CENClassifier(**options).fit(data)
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            model = CENClassifier(client=client, **options).fit(data)
        for name, value in alone.features_.parameters.items():
            np.testing.assert_array_equal(model.features_.parameters[name], value)


def test_what_is_no_network_is_refused(X):
    with pytest.raises(ConfigError, match="architecture 'resnet' is unknown"):
        named("resnet")
    with pytest.raises(ConfigError, match="does not accept its arguments"):
        named("hnr_cnn", {"depth": 3})
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        torch_features.as_features(3)
    with pytest.raises(DataError, match="expected one feature row each"):
        TorchFeatures.of(torch.nn.Flatten(0)).forward(X)
    with pytest.raises(ConfigError, match="missing on one side"):
        TorchFeatures(torch.nn.Linear(2, 2), {}, {"name": "torch"})


def test_features_of_many_rows_are_those_of_each():
    X = np.random.default_rng(0).normal(size=(2_500, 64))
    features = named("hnr_cnn", {"side": 8})
    few = np.concatenate([features.forward(X[i : i + 250]) for i in range(0, 2_500, 250)])
    np.testing.assert_allclose(features.forward(X), few, rtol=1e-12, atol=1e-12)
