"""Learned features survive a kill: the same call resumes from the last checkpoint and ends at the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_iris

from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError
from kme_dist.models.askl import ASKLClassifier, ASKLRegressor
from kme_dist.models.cen import CENClassifier
from kme_dist.run.checkpoints import Checkpoints

STEPS = 40
NETWORK = CENClassifier(hidden=(8, 4), steps=STEPS, batch_size=30, dropout=0.2, schedule="cosine", regularization=0.01)
MODELS = {
    "network": NETWORK,
    "all rows": CENClassifier(hidden=(8,), steps=STEPS, regularization=0.01),
    "kernel head": CENClassifier(hidden=(6,), head=Gaussian(length_scale=1.0), steps=STEPS, batch_size=50),
    "spectral": ASKLClassifier(features=20, epochs=8, batch_size=30),
    "regression": ASKLRegressor(features=20, epochs=3, batch_size=32),
}
# The process ends itself: in the middle of everything, at a step that only the test knows.
CHILD = """
import os, signal, sys
import test_feature_checkpoints as tests

def end_at(record):
    if record["step"] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

tests.fitted(sys.argv[1], sys.argv[2], callback=end_at)
"""


def rows_of(name):
    return load_diabetes(return_X_y=True) if name == "regression" else load_iris(return_X_y=True)


def fitted(name, folder=None, **further):
    """The call that is repeated after the kill."""
    X, y = rows_of(name)
    if name == "network":
        further["watch"] = (X[::5], y[::5])
    saved = None if folder is None else Checkpoints(folder, every_steps=3)
    return MODELS[name].__sklearn_clone__().fit(X, y, checkpoints=saved, **further)


def bits(model):
    arrays = {**model.features_.arrays, "weights": np.asarray(model.weights_)}
    return {name: value.tobytes() for name, value in arrays.items()}


def figures(records):
    """What a record says, apart from the clock."""
    clock = {"waiting_share", "rows_per_second"}
    return [
        {name: value for name, value in record.items() if "seconds" not in name and name not in clock}
        for record in records
    ]


@pytest.mark.parametrize("name", ["network", "spectral"])
def test_a_killed_fit_resumes_to_the_same_bits(name, tmp_path):
    whole, step = fitted(name), int(np.random.default_rng().integers(4, STEPS))
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", CHILD, name, str(tmp_path / "saved"), str(step)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    seen = []
    again = fitted(name, tmp_path / "saved", callback=lambda record: seen.append(record["step"]))
    assert seen[0] == (step - 1) // 3 * 3 + 1, f"killed at step {step}"
    assert bits(again) == bits(whole), f"killed at step {step}"
    assert figures(again.history_) == figures(whole.history_)
    assert figures(getattr(again, "curve_", [])) == figures(getattr(whole, "curve_", []))


@pytest.mark.parametrize("name", list(MODELS))
def test_an_interrupted_fit_loses_no_whole_step(name, tmp_path):
    def interrupt(record):
        if record["step"] == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(name, tmp_path / "saved", callback=interrupt)
    seen = []
    again = fitted(name, tmp_path / "saved", callback=lambda record: seen.append(record["step"]))
    assert seen[0] == 17
    assert bits(again) == bits(fitted(name))
    seen.clear()
    assert bits(fitted(name, tmp_path / "saved", callback=lambda record: seen.append(record))) == bits(again)
    assert not seen  # a finished fit is not learned again


@pytest.mark.parametrize("batch_size", [30, None], ids=["batches", "all rows"])
def test_a_fit_of_a_stored_data_set_goes_on(batch_size, tmp_path):
    data = ingest(load_iris(return_X_y=True), tmp_path / "rows.zarr", shuffle=0)

    def fit(**further):
        return CENClassifier(hidden=(8,), steps=12, batch_size=batch_size).fit(data, **further)

    def interrupt(record):
        if record["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(checkpoints=tmp_path / "saved", callback=interrupt)
    seen = []
    again = fit(checkpoints=tmp_path / "saved", callback=lambda record: seen.append(record["step"]))
    assert seen[0] > 1
    assert bits(again) == bits(fit())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"learning_rate": 0.02}, "learn.learning_rate"),
        ({"hidden": (8, 5)}, "model.arrays.1.bias"),
        ({"dropout": 0.3}, "model.dropout"),
        ({"regularization": 0.02}, "start.regularization"),
        ({"random_state": 1}, "learn.seed"),
        ({"steps": STEPS + 1}, "learn.steps"),  # the schedule ends elsewhere
    ],
    ids=str,
)
def test_checkpoints_of_another_fit_are_refused(change, word, tmp_path):
    X, y = load_iris(return_X_y=True)
    NETWORK.__sklearn_clone__().fit(X, y, checkpoints=tmp_path)
    with pytest.raises(ConfigError, match=f"another run: .*{word}"):
        NETWORK.__sklearn_clone__().set_params(**change).fit(X, y, checkpoints=tmp_path)


def test_checkpoints_of_other_rows_are_refused(tmp_path):
    X, y = load_iris(return_X_y=True)
    NETWORK.__sklearn_clone__().fit(X, y, checkpoints=tmp_path)
    X[3, 1] += 0.01
    with pytest.raises(ConfigError, match="another run: data"):
        NETWORK.__sklearn_clone__().fit(X, y, checkpoints=tmp_path)


def test_a_constant_rate_may_be_continued_for_longer(tmp_path):
    X, y = load_iris(return_X_y=True)
    short, long = (CENClassifier(hidden=(8,), batch_size=30, steps=steps) for steps in (10, 25))
    short.fit(X, y, checkpoints=tmp_path)
    seen = []
    continued = long.fit(X, y, checkpoints=tmp_path, callback=lambda record: seen.append(record["step"]))
    assert seen == list(range(11, 26))
    assert bits(continued) == bits(CENClassifier(hidden=(8,), batch_size=30, steps=25).fit(X, y))
    again = CENClassifier(hidden=(8,), batch_size=30, steps=25).fit(X, y, checkpoints=tmp_path)
    assert bits(again) == bits(continued)
    with pytest.raises(ConfigError, match=r"learned 25 steps, and 10 are requested: raise learn\.steps to 25 or"):
        short.fit(X, y, checkpoints=tmp_path)
