"""What a batch is worth: the softmax layer that embedding networks are compared with, its slope, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core import features as maps
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.rows import Scaling
from kme_dist.run.learn import Batches, learn_softmax
from kme_dist.run.learners import LearnSettings, SoftmaxLearner


@pytest.fixture
def task():
    return SoftmaxLearner(maps.dense_network(4, (6, 5), "tanh", seed=1), LearnSettings(steps=1), 3)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_slope_is_that_of_finite_differences(arrays, rng, task, dropout):
    task = SoftmaxLearner(task.features, task.settings, 3, dropout)
    X, y = rng.normal(size=(20, 4)), rng.integers(0, 3, size=20)
    start = {name: np.asarray(value, np.float64) for name, value in task.start(5).items()}

    def value(parameters):
        return task.evaluate(parameters, arrays(X), y, number=7).value

    found = task.evaluate(start, arrays(X), y, number=7).gradient
    assert found.keys() == start.keys()
    for name, held in start.items():
        for place in list(np.ndindex(held.shape))[::5]:
            up, down = (np.array(held) for _ in range(2))
            up[place] += 1e-6
            down[place] -= 1e-6
            slope = (value({**start, name: up}) - value({**start, name: down})) / 2e-6
            assert found[name][place] == pytest.approx(slope, abs=2e-8), f"{name} {place}"


def test_huge_scores_overflow_nothing(rng, task):
    start = task.start(5)
    start["softmax.bias"] = np.array([1e4, 0.0, -1e4])
    out = task.evaluate(start, rng.normal(size=(9, 4)), np.repeat([0, 1, 2], 3), number=0)
    assert out.value == pytest.approx((0 + 1e4 + 2e4) / 3, rel=1e-3)
    assert all(np.isfinite(value).all() for value in out.gradient.values())


def test_it_learns_and_tells_the_accuracy_of_every_epoch(rng):
    X = rng.normal(size=(200, 4))
    y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
    settings = LearnSettings(steps=80, batch_size=50, learning_rate=0.03)
    task = SoftmaxLearner(maps.dense_network(4, (12,), seed=0), settings, 3)
    plain = {"split": None, "scaling": Scaling(np.zeros(4), np.ones(4)), "dtype": "float64"}
    source = Batches.of(ArrayRows(X, y), batch_size=50, seed=0, **plain)
    history = learn_softmax(task, source, width=12, per_epoch=4, watch=(X, y))
    curve = [record["watched_accuracy"] for record in history if "watched_accuracy" in record]
    assert len(curve) == 20
    assert curve[-1] > 0.9 > curve[0]
    assert history[-1]["objective"] < 0.5 * history[0]["objective"]
