"""Optimisers against their published recursions, written out here entry by entry; schedules, clipping, freezing."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest

from kme_dist import errors
from kme_dist.core import optim

START = {"length_scale": np.array([0.3, -0.7]), "scale": np.array(0.2)}


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    return [{name: rng.normal(size=value.shape) for name, value in START.items()} for _ in range(steps)]


def walk(optimizer, steps=6, rate=0.1):
    state, position = optimizer.init(START), dict(START)
    for gradient in gradients(steps):
        step, state = optimizer.update(gradient, state, rate)
        position = {name: position[name] + step[name] for name in position}
    return position


def by_hand(update, steps=6):
    """Run a recursion for a single number over every entry of every parameter."""
    found = {}
    for name, value in START.items():
        entries = [g[name].reshape(-1) for g in gradients(steps)]
        result = [update(x, [float(g[i]) for g in entries]) for i, x in enumerate(value.reshape(-1))]
        found[name] = np.array(result).reshape(value.shape)
    return found


def adam_by_hand(x, slopes, rate=0.1):
    m = v = 0.0
    for t, g in enumerate(slopes, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        # epsilon beside the uncorrected root: the form of the published experiments
        x -= rate * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (math.sqrt(v) + 1e-8)
    return x


def sgd_by_hand(x, slopes, rate=0.1):
    return x - rate * sum(slopes)


def momentum_by_hand(x, slopes, rate=0.1):
    velocity = 0.0
    for g in slopes:
        velocity = 0.9 * velocity - rate * g
        x += velocity
    return x


def adadelta_by_hand(x, slopes, rate=0.1):
    square = moved = 0.0
    for g in slopes:
        square = 0.95 * square + 0.05 * g * g
        step = -math.sqrt(moved + 1e-6) / math.sqrt(square + 1e-6) * g
        moved = 0.95 * moved + 0.05 * step * step
        x += rate * step
    return x


@pytest.mark.parametrize(
    ("name", "recursion"),
    [("adam", adam_by_hand), ("sgd", sgd_by_hand), ("momentum", momentum_by_hand), ("adadelta", adadelta_by_hand)],
)
def test_steps_follow_the_published_recursion(name, recursion):
    found, expected = walk(optim.optimizer_by_name(name)), by_hand(recursion)
    for parameter in START:
        np.testing.assert_allclose(found[parameter], expected[parameter], rtol=1e-12)


@pytest.mark.parametrize("name", ["adam", "sgd", "momentum", "adadelta"])
def test_optimisers_are_pure(name):
    """The state is the checkpoint: stored as plain numbers half-way, it resumes to the last bit."""
    optimizer = optim.optimizer_by_name(name)
    state, first, last = optimizer.init(START), *gradients(2)
    _, half = optimizer.update(first, state, 0.1)
    kept = pickle.dumps((state, half, first))
    straight, _ = optimizer.update(last, half, 0.1)
    assert pickle.dumps((state, half, first)) == kept
    plain = json.loads(json.dumps({k: {n: v.tolist() for n, v in part.items()} for k, part in half.items()}))
    restored = {k: {n: np.array(v) for n, v in part.items()} for k, part in plain.items()}
    resumed, _ = optimizer.update(last, restored, 0.1)
    assert all((resumed[k] == straight[k]).all() for k in START)


@pytest.mark.parametrize("name", ["adam", "sgd", "momentum"])
def test_a_valley_is_found(name):
    optimizer = optim.optimizer_by_name(name)
    x = {"x": np.array([3.0, -2.0])}
    state = optimizer.init(x)
    for _ in range(400):
        step, state = optimizer.update({"x": 2 * (x["x"] - 1)}, state, 0.05)
        x = {"x": x["x"] + step["x"]}
    np.testing.assert_allclose(x["x"], 1.0, atol=1e-2)


def test_unknown_optimiser_is_refused():
    with pytest.raises(errors.ConfigError, match="optimizer='lbfgs' is unknown; choose one of adadelta, adam"):
        optim.optimizer_by_name("lbfgs")


def test_schedules():
    assert optim.constant(0.1)(0) == optim.constant(0.1)(999) == 0.1
    halving = optim.exponential_decay(0.8, half_life=10)
    assert [halving(t) for t in (0, 10, 20)] == pytest.approx([0.8, 0.4, 0.2])
    cosine = optim.cosine_decay(2.0, steps=100, floor=0.1)
    assert [cosine(t) for t in (0, 50, 100, 500)] == pytest.approx([2.0, 1.1, 0.2, 0.2])
    assert optim.cosine_decay(1.0, steps=0)(0) == pytest.approx(1.0)


def test_clipping_keeps_the_direction():
    gradient = {"a": np.array([3.0, 0.0]), "b": np.array(4.0)}
    assert optim.norm(gradient) == pytest.approx(5.0)
    assert optim.clip(gradient, None) is gradient
    assert optim.clip(gradient, 6.0) is gradient
    clipped = optim.clip(gradient, 1.0)
    assert optim.norm(clipped) == pytest.approx(1.0)
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0])


def test_freezing_by_name_and_pattern():
    names = ["0.length_scale", "0.scale", "1.scale", "regularization"]
    assert optim.learnable(names, []) == names
    assert optim.learnable(names, ["*.scale"]) == ["0.length_scale", "regularization"]
    assert optim.learnable(names, ["regularization", "0.*"]) == ["1.scale"]
    with pytest.raises(errors.ConfigError, match="frozen parameter 'scael' does not exist"):
        optim.learnable(names, ["scael"])


def test_logarithms_are_for_positive_parameters_only():
    values = {"scale": np.array(2.0), "features.weight": np.array([-1.0, 3.0])}
    logs = optim.to_log(values)
    assert logs["scale"] == pytest.approx(math.log(2))
    assert (logs["features.weight"] == values["features.weight"]).all()
    back = optim.from_log(logs)
    assert back["scale"] == pytest.approx(2.0)
    assert (back["features.weight"] == values["features.weight"]).all()


def test_runaway_logarithms_stay_numbers():
    found = optim.from_log({"scale": np.array(1e6), "length_scale": np.array([-1e6])})
    assert np.isfinite(found["scale"])
    assert (found["length_scale"] > 0).all()
