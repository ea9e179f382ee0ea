"""The smoke command: silent success where all is well, the right exit code where the cluster or the maths is not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kme_dist.cli import app as cli
from kme_dist.config import ClusterConfig
from kme_dist.errors import ConfigError, NumericalError
from kme_dist.pipelines import smoke

HERE = ClusterConfig(kind="serial")


def test_all_is_well_in_a_single_process(tmp_path):
    facts = smoke.run(HERE, str(tmp_path / "shared"))
    assert facts["status"] == "succeeded"
    assert facts["workers"] == 1
    assert facts["accuracy"] >= smoke.ENOUGH
    assert list((tmp_path / "shared").iterdir()) == [], "what a trial stores must be gone after it"


def test_all_is_well_on_real_workers():
    """As an operator starts it, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "kme_dist", "smoke", "--json"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    facts = json.loads(done.stdout)
    assert facts["status"] == "succeeded"
    assert facts["steps"] == smoke.SETTINGS.steps


def test_the_cluster_of_a_config_is_the_one_that_is_tried(tmp_path, capsys):
    config = tmp_path / "nightly.yaml"
    config.write_text("data: {source: 'sklearn:iris'}\ncluster: {kind: local, workers: 1}\n")
    assert cli.execute(["smoke", str(config), "--set", "cluster.kind=serial", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == 1
    assert cli.execute(["smoke", "--set", "cluster.kind=serial"]) == 2


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(kind="address", address="tls://scheduler.example:8786"),
        ClusterConfig(kind="slurm", workers=2),
    ],
    ids=lambda cluster: cluster.kind,
)
def test_workers_on_other_machines_need_a_place_that_they_can_reach(cluster):
    with pytest.raises(ConfigError, match="--folder"):
        smoke.run(cluster)


@pytest.mark.parametrize("name", ["length_scale", "regularization"])
def test_workers_that_learn_other_numbers_are_reported(monkeypatch, name):
    honest, calls = smoke._learn, []

    def learn(data, executor):
        learned = honest(data, executor)
        calls.append(executor)
        if len(calls) > 1:  # the second one is the single process that the workers are compared with
            return learned
        if name == "regularization":
            return replace(learned, regularization=learned.regularization * 1.01)
        return replace(learned, kernel=replace(learned.kernel, length_scale=learned.kernel.length_scale * 1.01))

    monkeypatch.setattr(smoke, "_learn", learn)
    with pytest.raises(NumericalError, match=f"the workers learned {name}"):
        smoke.run(HERE)


@pytest.fixture
def answer(monkeypatch):
    """A function that makes the stored predictions be the given probabilities."""

    def give(probabilities):
        class Predictions:
            def read(self, name):
                return probabilities(round(0.3 * smoke.ROWS))

        monkeypatch.setattr(smoke, "open_predictions", lambda path: Predictions())

    return give


def test_a_model_that_guesses_is_reported(answer):
    answer(lambda rows: np.full((rows, 3), 1 / 3))
    with pytest.raises(NumericalError, match="classified correctly"):
        smoke.run(HERE)


@pytest.mark.parametrize("value", [np.nan, 0.5])
def test_numbers_that_are_no_probabilities_are_reported(answer, value):
    answer(lambda rows: np.full((rows, 3), value))
    with pytest.raises(NumericalError, match="sum to 1"):
        smoke.run(HERE)


def test_a_failed_trial_leaves_nothing_behind(answer, tmp_path):
    answer(lambda rows: np.full((rows, 3), 1 / 3))
    with pytest.raises(NumericalError):
        smoke.run(HERE, str(tmp_path / "shared"))
    assert list((tmp_path / "shared").iterdir()) == []
