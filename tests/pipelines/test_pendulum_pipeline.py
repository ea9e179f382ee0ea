"""The pendulum example: the dynamics, the policy, the claims of the report, and the command."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from kme_dist import ConditionalMeanEmbedding, kernels
from kme_dist.cli.app import execute
from kme_dist.errors import ConfigError
from kme_dist.pipelines import pendulum
from kme_dist.pipelines.pendulum import PendulumConfig, Policy, Trial, advance, attempt, transitions

DEFAULT = PendulumConfig()


def embedded(c):
    X, Y = transitions(c.samples, c, np.random.default_rng([c.seed, 0]))
    kernel, target = kernels.Gaussian(c.length_scale), kernels.Gaussian(c.target_length_scale)
    return ConditionalMeanEmbedding(kernel, target, c.regularization, solver="cholesky", scaling=None).fit(X, Y)


def test_energy_is_kept_but_for_friction_and_torque():
    free = PendulumConfig(friction=1e-12)
    angle, velocity = np.array([1.0, -2.0]), np.array([3.0, 0.5])
    energy = 0.5 * velocity**2 + 9.81 * np.cos(angle)
    a, w = advance(angle, velocity, np.zeros(2), free)
    np.testing.assert_allclose(0.5 * w**2 + 9.81 * np.cos(a), energy, rtol=1e-7)
    a, w = advance(angle, velocity, np.zeros(2), DEFAULT)
    assert (0.5 * w**2 + 9.81 * np.cos(a) < energy).all()


def test_the_motor_is_too_weak_to_lift_it_at_once():
    angle, velocity = np.array([np.pi]), np.array([0.0])
    for _ in range(100):
        angle, velocity = advance(angle, velocity, np.array([5.0]), DEFAULT)
        assert abs(angle[0] - np.pi) < 2.0


def test_inputs_and_next_states_are_as_published():
    X, Y = transitions(500, DEFAULT, np.random.default_rng(0))
    assert (X.shape, Y.shape) == ((500, 4), (500, 3))
    np.testing.assert_allclose(X[:, 0] ** 2 + X[:, 1] ** 2, 1.0)
    assert np.abs(X[:, 2]).max() <= 7.0
    assert np.abs(X[:, 3]).max() <= 5.0


def test_the_policy_from_200_transitions_swings_the_pendulum_up():
    model = embedded(DEFAULT)
    policy = Policy(model, DEFAULT)
    assert policy.changes[-1] < 0.01  # the values have settled
    trial = attempt(policy, DEFAULT)
    assert trial.swing_up_seconds is not None
    assert trial.swing_up_seconds < 4.0
    assert abs(trial.angles[0]) == pytest.approx(np.pi)


def test_upright_means_to_stay_upright():
    assert Trial(np.array([3.0, 1.0, *[0.1] * 10]), np.zeros(12), 0.2).swing_up_seconds == pytest.approx(0.4)
    assert Trial(np.array([3.0, *[0.1] * 10, 1.0]), np.zeros(12), 0.2).swing_up_seconds is None
    assert Trial(np.array([0.1] * 5), np.zeros(5), 0.2).swing_up_seconds is None


def test_at_every_level_fista_is_nearer_to_the_dense_embedding_than_incomplete_cholesky(tmp_path):
    config = pendulum.PendulumFile(
        pendulum=PendulumConfig(samples=40, levels=3, test_samples=50, seconds=2.0, sweeps=10, torques=5),
        output={"folder": str(tmp_path)},
    )
    said = []
    result = pendulum.run(config, name="small", say=said.append)
    assert result["sparse_never_farther"]
    assert len(result["levels"]) == 3
    for level in result["levels"]:
        assert level["relative_distance_refitted"] <= level["relative_distance"]
    densities = [level["density"] for level in result["levels"]]
    assert densities == sorted(densities)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5
    assert page.count("animateTransform") == 2
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert json.loads((tmp_path / "result.json").read_text())["samples"] == 40
    assert len(said) == 5


@pytest.mark.slow
def test_the_shipped_config_keeps_its_promises(tmp_path):
    config = pendulum.load("configs/pendulum.yaml", [f"output.folder={tmp_path}"])
    result = pendulum.run(config)
    assert result["swing_up_seconds"] is not None
    assert result["sparse_never_farther"]
    held = [v["density"] for v in result["levels"] if v["swing_up_seconds"] is not None]
    assert min(held) < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pendulum.sample=3", "pendulum.sample.*known: samples"),
        ("pendulum.samples=3", "pendulum.samples"),
        ("output.place=x", "output.place"),
        ("samples=3", "must be pendulum.key=value"),
    ],
)
def test_mistakes_are_one_line(change, message, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("pendulum: {}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        pendulum.load(path, [change])
    assert "\n" not in str(caught.value)


def test_the_command_refuses_other_configs(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("data: {source: 'sklearn:iris'}\n")
    assert execute(["pendulum", str(path)]) == 2
    assert "section `pendulum`" in capsys.readouterr().err
    assert execute(["pendulum", str(tmp_path / "none.yaml")]) == 2
