"""Feature maps: every derivative against differences, every approximation against its kernel, on all libraries."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from kme_dist.core import features as maps
from kme_dist.core import kernels
from kme_dist.errors import ConfigError, DataError

D = 3
MAPS = {
    "identity": maps.Identity(),
    "quadratic": maps.Polynomial(degree=2, offset=0.7),
    "cubic": maps.Polynomial(degree=3),
    "fourier, sines and cosines": maps.random_fourier(D, 5, length_scale=0.8, seed=1),
    "fourier, phases": maps.random_fourier(D, 5, form="D", seed=2),
    "fourier, orthogonal": maps.random_fourier(D, 5, orthogonal=True, seed=3),
    "fourier, laplace": maps.random_fourier(D, 5, kernel="laplace", length_scale=(3.0, 2.0, 4.0), seed=4),
    "fourier, matern": maps.random_fourier(D, 5, kernel="matern", nu=2.5, seed=5),
    "spectral, D": maps.spectral(D, 6, seed=6),
    "spectral, 2D": maps.spectral(D, 6, form="2D", deviation=0.5, seed=7),
    "spectral, stationary": maps.spectral(D, 6, stationary=True, seed=8),
    "spectral, independent phases": maps.spectral(D, 6, form="independent", seed=14),
    **{
        f"dense, {f}": maps.dense_network(D, (4,), f, seed=9, deviation=0.6).parts[0]
        for f in ("tanh", "gelu", "cosine", "softmax", "identity")
    },
    "network": maps.dense_network(D, (6, 4), "relu", seed=10, deviation=0.7),
    "network with dropout": maps.dense_network(D, (6, 4, 2), "tanh", dropout=0.4, seed=11, deviation=0.7).sampled(
        (1, 2)
    ),
    "stack": maps.Stack((maps.spectral(D, 4, seed=12), maps.Polynomial(), maps.spectral(15, 5, seed=13))),
    "joint": maps.Joint((maps.spectral(D, 4, seed=15), maps.dense_network(D, (5, 2), "softmax", seed=16))),
}
UNIT = {"float64": 1e-14, "float32": 2e-6}
SLOPE = {"float64": 1e-7, "float32": 1e-3}


@pytest.fixture(params=MAPS)
def phi(request):
    return MAPS[request.param]


def rows(n, seed=0):
    return np.random.default_rng(seed).uniform(0.1, 1.5, size=(n, D))


def slope(function, value, direction, step=1e-6):
    return (function(value + step * direction) - function(value - step * direction)) / (2 * step)


class TestEveryMap:
    def test_parameter_gradients_match_finite_differences(self, phi, arrays, dtype, rng):
        X = rows(7)
        Z_bar = rng.normal(size=phi.forward(X).shape)
        found = phi.vjp(arrays(X, dtype), arrays(Z_bar, dtype))
        assert set(found) == set(phi.parameters)
        for name, value in phi.parameters.items():
            direction = rng.normal(size=value.shape)
            expected = slope(lambda v, name=name: np.sum(Z_bar * phi.replace(**{name: v}).forward(X)), value, direction)
            gradient = arrays.host(found[name])
            assert gradient.shape == value.shape
            np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=SLOPE[dtype], atol=SLOPE[dtype])

    def test_input_gradients_match_finite_differences(self, phi, arrays, dtype, rng):
        X, direction = rows(7), rng.normal(size=(7, D))
        Z_bar = rng.normal(size=phi.forward(X).shape)
        found = arrays.host(phi.input_vjp(arrays(X, dtype), arrays(Z_bar, dtype)))
        expected = slope(lambda v: np.sum(Z_bar * phi.forward(v)), X, direction)
        np.testing.assert_allclose(np.sum(found * direction), expected, rtol=SLOPE[dtype], atol=SLOPE[dtype])

    def test_features_stay_where_the_rows_are_in_their_precision(self, phi, arrays, dtype):
        Z = arrays.host(phi.forward(arrays(rows(4), dtype)))
        assert Z.dtype == dtype
        np.testing.assert_allclose(Z, phi.forward(rows(4)), rtol=100 * UNIT[dtype], atol=100 * UNIT[dtype])

    def test_one_pass_gives_what_single_calls_give(self, phi, rng):
        X = rows(5)
        Z, pull = phi.linearise(X)
        Z_bar = rng.normal(size=Z.shape)
        gradients, X_bar = pull(Z_bar, inputs=True)
        np.testing.assert_array_equal(Z, phi.forward(X))
        np.testing.assert_array_equal(X_bar, phi.input_vjp(X, Z_bar))
        for name, value in phi.vjp(X, Z_bar).items():
            np.testing.assert_array_equal(gradients[name], value)

    def test_comes_back_from_plain_data_and_arrays(self, phi):
        config = json.loads(json.dumps(phi.to_config()))
        again = maps.from_config(config, arrays=phi.arrays)
        plain = phi.sampled(()) if phi is not MAPS["network with dropout"] else again
        np.testing.assert_array_equal(again.forward(rows(6)), plain.forward(rows(6)))
        assert again.to_config() == phi.to_config()

    def test_travels(self, phi):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(phi)).forward(rows(3)), phi.forward(rows(3)))

    def test_is_a_value(self, phi):
        for name, value in phi.parameters.items():
            changed = phi.replace(**{name: value + 1})
            np.testing.assert_array_equal(changed.parameters[name], value + 1)
            np.testing.assert_array_equal(phi.parameters[name], value)
            with pytest.raises(ValueError, match="read-only"):
                value[...] = 0
        with pytest.raises(ConfigError, match="has no parameter 'wrong'"):
            phi.replace(wrong=1.0)


def test_polynomial_features_are_those_of_the_polynomial_kernel():
    X, X2 = rows(6), rows(5, 1)
    for degree in (1, 2, 3, 4):
        phi = maps.Polynomial(degree=degree, offset=0.6)
        np.testing.assert_allclose(phi.forward(X) @ phi.forward(X2).T, (X @ X2.T + 0.6) ** degree, rtol=1e-12)


@pytest.mark.parametrize("form", ["2D", "D"])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (kernels.Gaussian(length_scale=(0.5, 1.0, 2.0)), {"kernel": "gaussian"}),
        (kernels.Gaussian(length_scale=(0.5, 1.0, 2.0)), {"kernel": "gaussian", "orthogonal": True}),
        (kernels.Laplace(length_scale=(0.5, 1.0, 2.0)), {"kernel": "laplace"}),
        (kernels.Matern(nu=1.5, length_scale=(0.5, 1.0, 2.0)), {"kernel": "matern", "nu": 1.5}),
        (kernels.Matern(nu=0.5, length_scale=(0.5, 1.0, 2.0)), {"kernel": "matern", "nu": 0.5, "orthogonal": True}),
    ],
    ids=["gaussian", "gaussian orthogonal", "laplace", "matern 3/2", "matern 1/2 orthogonal"],
)
def test_random_fourier_features_tend_to_their_kernel(kernel, options, form):
    X, features = rows(8), 40_000
    phi = maps.random_fourier(D, features, length_scale=(0.5, 1.0, 2.0), form=form, seed=3, **options)
    Z = phi.forward(X)
    assert np.abs(Z @ Z.T - kernel.gram(X)).max() < 4 / np.sqrt(features)


def test_orthogonal_frequencies_have_less_noise():
    X = rows(10)
    K = kernels.Gaussian().gram(X)

    def error(orthogonal, seed):
        Z = maps.random_fourier(D, 30, orthogonal=orthogonal, seed=seed).forward(X)
        return np.mean((Z @ Z.T - K) ** 2)

    means = [np.mean([error(orthogonal, seed) for seed in range(60)]) for orthogonal in (True, False)]
    assert means[0] < 0.8 * means[1]


def products(phi, X, D_form):
    """What each frequency adds to the inner products of all pairs of rows, times the number of frequencies."""
    Z = phi.forward(X)
    if not D_form:
        Z = Z.reshape(len(X), 2, -1)
        return np.einsum("icf,jcf->ijf", Z, Z) * Z.shape[2]
    return Z[:, None] * Z[None] * Z.shape[1]


@pytest.mark.parametrize("form", ["2D", "D", "independent"])
def test_the_map_of_askl_tends_to_the_nonstationary_spectral_kernel(form):
    """With normal frequencies of deviation s the kernel meant is ½ [exp(-s²|x - y|²/2) + exp(-s²(|x|² + |y|²)/2)].

    The inner product is a mean over independent frequencies, so it is taken to be within five standard errors, which
    are known from the sample: the chance that one of 21 pairs is beyond them is 1e-5, and the seed is fixed. With
    requires `second` the second term, which is not stationary, is lost.
    """
    X, s, features = 0.7 * rows(6), 0.9, 50_000
    phi = maps.spectral(D, features, form=form, deviation=s, seed=4)
    each = products(phi, X, form != "2D")
    Z = phi.forward(X)
    assert Z.shape[1] == features * (2 if form == "2D" else 1)
    np.testing.assert_allclose(each.mean(axis=2), Z @ Z.T, rtol=1e-10)
    squares = np.sum(X**2, axis=1)
    stationary = np.exp(-(s**2) * np.sum((X[:, None] - X[None]) ** 2, axis=2) / 2) / 2
    meant = stationary + np.exp(-(s**2) * (squares[:, None] + squares[None]) / 2) / 2
    error = 5 * each.std(axis=2) / np.sqrt(features)
    assert error.max() < 0.03
    expected = stationary if form == "independent" else meant
    assert (np.abs(Z @ Z.T - expected) < error + 1e-12).all()
    assert (meant - stationary).max() > 3 * error.max(), "the two kernels can be told apart"


def test_one_phase_for_both_sets_keeps_what_the_frequencies_say():
    """The error of the phases alone, at the same frequencies: each of them adds four cosines of an angle that the
    phase makes uniform, at most 1 together, so the standard error is at most 1 / √(2D)."""
    X, features = rows(6), 40_000
    bound = 5 / np.sqrt(2 * features)
    phi = maps.spectral(D, features, deviation=0.9, seed=4)
    Z, exact = phi.forward(X), maps.Spectral(phi.first, phi.second).forward(X)
    assert np.abs(Z @ Z.T - exact @ exact.T).max() < bound
    apart = maps.spectral(D, features, form="independent", deviation=0.9, seed=4)
    np.testing.assert_array_equal(apart.first, phi.first)
    Z = apart.forward(X)
    assert np.abs(Z @ Z.T - exact @ exact.T).max() > 3 * bound


def test_maps_stored_with_two_sets_of_phases_give_what_they_gave():
    """Before phases were shared, form "D" had two sets of them: the arrays decide, whatever the config calls it."""
    rng = np.random.default_rng(0)
    arrays = {"first": rng.normal(size=(D, 4)), "second": rng.normal(size=(D, 4))}
    arrays |= {"phases": rng.uniform(0, 6, 4), "second_phases": rng.uniform(0, 6, 4)}
    old = {"name": "spectral", "features": 4, "stationary": False, "form": "D"}
    phi, X = maps.from_config(old, arrays=arrays), rows(5)
    a, b = X @ arrays["first"] + arrays["phases"], X @ arrays["second"] + arrays["second_phases"]
    np.testing.assert_allclose(phi.forward(X), (np.cos(a) + np.cos(b)) / np.sqrt(8), rtol=1e-14)
    assert phi.to_config()["form"] == "independent"
    with pytest.raises(ConfigError, match="requires `second`"):
        maps.Spectral(arrays["first"], second_phases=arrays["phases"])


def test_the_spectral_kernel_is_not_stationary():
    phi = maps.spectral(D, 2000, form="2D", seed=5)
    near, far = 0.2 * rows(2), 0.2 * rows(2) + 3.0
    inner = [float(Z[0] @ Z[1]) for Z in (phi.forward(near), phi.forward(far))]
    assert abs(inner[0] - inner[1]) > 0.05
    stationary = maps.spectral(D, 2000, form="2D", stationary=True, seed=5)
    inner = [float(Z[0] @ Z[1]) for Z in (stationary.forward(near), stationary.forward(far))]
    assert inner[0] == pytest.approx(inner[1], abs=1e-9)


def test_networks_start_as_published():
    phi = maps.dense_network(200, (300, 100), seed=0)
    weight, bias = phi.parameters["0.weight"], phi.parameters["0.bias"]
    assert np.abs(weight).max() <= 0.2
    assert weight.std() == pytest.approx(0.1 * 0.8796, rel=0.01)  # the deviation of a normal cut at two deviations
    assert (bias == 0.1).all()
    assert (phi.forward(np.random.default_rng(0).normal(size=(50, 200))) >= 0).all()  # ReLU on the last layer too


def test_dropout_is_off_until_sampled_and_decided_by_its_key():
    phi, X = maps.Dropout(0.25), np.ones((200, 50))
    assert phi.forward(X) is X
    one, again, other = (phi.sampled(key).forward(X) for key in ((1, 2), (1, 2), (1, 3)))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    np.testing.assert_allclose(np.unique(one), [0, 1 / 0.75])
    assert one.mean() == pytest.approx(1, abs=0.02)
    inside = maps.dense_network(50, (20, 20, 20), dropout=0.5, seed=1)
    assert [type(part).__name__ for part in inside.parts] == ["Dense", "Dropout", "Dense", "Dropout", "Dense"]
    masks = [part.key for part in inside.sampled((7,)).parts if isinstance(part, maps.Dropout)]
    assert masks == [(7, 1), (7, 3)]


def test_seeds_decide_what_is_drawn():
    for name, settings in {
        "dense_network": {"hidden": [4, 2]},
        "random_fourier": {"features": 7},
        "spectral": {"features": 7},
    }.items():
        one, same, other = (maps.from_config({"name": name, **settings}, D, seed) for seed in (1, 1, 2))
        np.testing.assert_array_equal(one.forward(rows(3)), same.forward(rows(3)))
        assert (one.forward(rows(3)) != other.forward(rows(3))).any()


def test_stacks_are_drawn_with_the_widths_of_their_parts():
    config = {
        "name": "stack",
        "parts": ["polynomial", {"name": "random_fourier", "features": 6}, {"name": "dense", "units": 2}],
    }
    phi = maps.from_config(config, n_features=D, seed=1)
    assert [part.arrays[name].shape for part, name in zip(phi.parts[1:], ("first", "weight"), strict=True)] == [
        (10, 6),
        (12, 2),
    ]
    assert maps.from_config(phi) is phi


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fourrier", "is unknown"),
        ("spectrl", "did you mean 'spectral'"),
        ({"name": "random_fourier", "kernel": "cauchy"}, "no sampler"),
        ({"name": "random_fourier", "kernel": "laplace", "orthogonal": True}, "'gaussian' or 'matern'"),
        ({"name": "random_fourier", "form": "3D"}, "form='3D'"),
        ({"name": "random_fourier", "form": "independent"}, "form='independent' is unknown; choose '2D'"),
        ({"name": "spectral", "form": "3D"}, "or 'independent'"),
        ({"name": "random_fourier", "features": 0}, "features=0"),
        ({"name": "dense_network", "hidden": []}, "must be the sizes"),
        ({"name": "dense", "activation": "swish"}, "activation='swish'"),
        ({"name": "dropout", "rate": 1.0}, "rate=1.0"),
        ({"name": "polynomial", "degree": 0}, "degree must be an integer from 1"),
        ({"name": "dense", "size": 3}, "invalid settings"),
        ({"name": "stack"}, "invalid settings"),
        ({"name": "stack", "parts": []}, "at least one"),
    ],
)
def test_a_wrong_config_is_one_clear_error(config, message):
    with pytest.raises(ConfigError, match=message):
        maps.from_config(config, n_features=D)


def test_rows_of_another_width_are_refused():
    for phi in (maps.random_fourier(D, 4), maps.dense_network(D, (2,))):
        with pytest.raises(DataError, match=r"expects shape \(rows, 3\), got \(4, 5\)"):
            phi.forward(np.ones((4, 5)))
    with pytest.raises(ConfigError, match="shape"):
        maps.random_fourier(D, 4).replace(first=np.ones((2, 2)))
    with pytest.raises(ConfigError, match="n_features is required"):
        maps.from_config("spectral")
