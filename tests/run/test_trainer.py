"""The learning loop: steps as the optimiser says, a prior that fades, honest stops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kme_dist import errors
from kme_dist.core import optim
from kme_dist.core.kernels import Gaussian, Linear, Spectrum
from kme_dist.core.kernels.base import median_length_scale
from kme_dist.core.objective import Workspace, rcb_objective
from kme_dist.run.learn import learn_in_memory as learn
from kme_dist.run.learners import OBJECTIVES, LearnSettings, batch_objective
from kme_dist.run.trainer import LengthScalePrior, PlateauWatch

M = 3


def blobs(n=60, d=3, seed=0, dtype="float64"):
    """Three classes that the first feature tells apart; the others are noise."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % M
    X = rng.normal(size=(n, d))
    X[:, 0] = y + 0.2 * rng.normal(size=n)
    return X.astype(dtype), y


def run(X, y, kernel=None, regularization=1.0, **settings):
    kernel = kernel or Gaussian(length_scale=np.ones(3))
    return learn(kernel, regularization, X, y, M, LearnSettings(**{"steps": 12, **settings}))


# --- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("risk", ["sum", "mean"])
def test_learning_lowers_every_objective(objective, risk):
    X, y = blobs()
    history = run(X, y, objective=objective, risk=risk, steps=60, complexity_weight=0.1).history
    assert np.mean([r["objective"] for r in history[-5:]]) < np.mean([r["objective"] for r in history[:5]])


def test_learning_finds_the_feature_that_matters():
    X, y = blobs(n=90)
    scales = run(X, y, steps=150).kernel.parameters["length_scale"]
    assert scales[0] < 0.5 * min(scales[1:])


def test_one_plain_step_is_minus_rate_times_gradient():
    X, y = blobs()
    kernel = Gaussian(length_scale=[1.0, 2.0, 3.0], scale=1.5)
    out = rcb_objective(kernel, X, y, regularization=0.5, n_classes=M)
    learned = run(X, y, kernel, regularization=0.5, steps=1, optimizer="sgd", learning_rate=1e-3)
    for name, value in kernel.parameters.items():
        np.testing.assert_allclose(learned.kernel.parameters[name], value * np.exp(-1e-3 * out.gradient[name]))
    assert learned.regularization == pytest.approx(0.5 * math.exp(-1e-3 * out.gradient["regularization"]))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_same_seed_same_bits(objective):
    X, y = blobs()
    first, second = (run(X, y, objective=objective, batch_size=17, seed=4) for _ in range(2))
    assert first.regularization == second.regularization
    for name, value in first.kernel.parameters.items():
        assert (value == second.kernel.parameters[name]).all()
    assert run(X, y, objective=objective, batch_size=17, seed=5).regularization != first.regularization


@pytest.mark.parametrize("frozen", [("scale",), ("length_scale", "regularization")])
def test_frozen_parameters_do_not_move(frozen):
    X, y = blobs()
    learned = run(X, y, Gaussian(length_scale=[1.0, 2.0, 3.0], scale=1.5), 0.25, frozen=frozen)
    before = {"length_scale": [1.0, 2.0, 3.0], "scale": 1.5, "regularization": 0.25}
    after = {**learned.kernel.parameters, "regularization": learned.regularization}
    for name, value in before.items():
        stayed = np.allclose(after[name], value, rtol=1e-14, atol=0)
        assert stayed == (name in frozen), name


def test_clipping_bounds_the_step():
    X, y = blobs()
    learned = run(X, y, steps=1, optimizer="sgd", learning_rate=1.0, clip_norm=0.01)
    logs = optim.to_log({**learned.kernel.parameters, "regularization": np.asarray(learned.regularization)})
    assert optim.norm(logs) == pytest.approx(0.01)


def test_schedule_sets_the_rate_of_every_step():
    X, y = blobs()
    seen = []

    def schedule(rate, steps):
        assert (rate, steps) == (0.1, 12)
        return lambda step: seen.append(step) or 0.0

    learned = run(X, y, schedule=schedule)
    assert seen == list(range(12))
    assert learned.regularization == 1.0


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "momentum", "adadelta"])
def test_every_optimiser_serves(optimizer):
    X, y = blobs()
    history = run(X, y, optimizer=optimizer, learning_rate=0.01, steps=30).history
    assert history[-1]["objective"] < history[0]["objective"]


def test_records_tell_the_whole_step():
    X, y = blobs()
    heard = []
    learned = learn(Gaussian(), 1.0, X, y, M, LearnSettings(steps=3, batch_size=20), callback=heard.append)
    assert heard == learned.history
    assert [r["step"] for r in heard] == [1, 2, 3]
    first = heard[0]
    assert first["rows"] == 20
    assert first["objective"] == pytest.approx(first["risk"] + 4 * math.e * first["complexity"])
    assert {"bound", "accuracy", "regularization", "gradient_norm", "seconds", "phase", "steps"} <= set(first)


def test_no_steps_change_nothing():
    X, y = blobs()
    learned = run(X, y, steps=0)
    assert learned.history == []
    assert learned.regularization == 1.0


def test_rows_may_be_anything_that_the_kernel_takes():
    texts = ["acgt" * 3, "ttta" * 2, "acga", "ttat", "cgta", "tata"] * 3
    y = np.array([0, 1] * 9)
    learned = learn(Spectrum(p=2), 1.0, texts, y, 2, LearnSettings(steps=10, batch_size=8))
    assert len(learned.history) == 10
    assert learned.history[-1]["accuracy"] > 0.7


def test_a_device_gives_what_the_host_gives(device):
    X, y = blobs()
    for objective in OBJECTIVES:
        host, gpu = (run(rows, y, objective=objective, batch_size=25) for rows in (X, device(X)))
        assert gpu.regularization == pytest.approx(host.regularization, rel=1e-9)
        found, expected = gpu.kernel.parameters["length_scale"], host.kernel.parameters["length_scale"]
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_missing_values_stop_the_run():
    X, y = blobs()
    X[5, 2] = np.nan
    with pytest.raises(errors.DataError, match="row 5, column 2"):
        run(X, y)


def test_validation_splits_anew_in_every_step_and_survives_one_row():
    X, y = blobs()
    settings = LearnSettings(objective="validation", complexity_weight=0.0)

    def value(step, X=X, y=y):
        return batch_objective(settings, Gaussian(), 0.1, X, y, M, step, Workspace()).value

    assert value(0) != value(1)
    assert value(1) == value(1)
    assert math.isfinite(value(0, X[:1], y[:1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "accuracy"}, "objective='accuracy' cannot be learned"),
        ({"steps": -1}, "steps=-1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"optimizer": "lbfgs"}, "optimizer='lbfgs'"),
        ({"frozen": ("width",)}, "frozen parameter 'width' does not exist"),
        ({"risk": "median"}, "risk='median'"),
        ({"delay": 2}, "delay=2: must be 0 or 1"),
        ({"delay": -1}, "delay=-1: must be 0 or 1"),
        ({"delay": 0.5}, r"delay=0\.5: must be 0 or 1"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    X, y = blobs(n=9)
    with pytest.raises(errors.ConfigError, match=message):
        run(X, y, **changes)


# --- stopping --------------------------------------------------------------------------------------


def test_without_patience_there_is_no_stop():
    watch = PlateauWatch(None)
    assert not any(watch.should_stop(value, {}) for value in [1.0] * 1000)


def test_plateau_stops_and_the_best_parameters_are_kept():
    watch = PlateauWatch(patience=5, smoothing=0.0)
    values = [10, 8, 6, 5, 5.5, 6, 7, 8, 9, 9, 9, 9]
    stops = [watch.should_stop(value, {"x": np.array(float(i))}) for i, value in enumerate(values)]
    assert stops.index(True) == 8  # five steps after the best
    assert watch.best_parameters({"x": np.array(-1.0)})["x"] == 3
    assert PlateauWatch(5).best_parameters({"x": 1})["x"] == 1


def test_patience_counts_steps_also_if_a_round_is_several():
    values = [10, 8, 6, 5.5, 5.6, 5.7, 5.8, 5.9, 6.0, 6.1]
    for steps, patience, stop in ((1, 4, 7), (4, 4, 4), (4, 12, 6), (100, 12, 4)):
        watch = PlateauWatch(patience, smoothing=0.0)
        assert [watch.should_stop(value, {}, steps) for value in values].index(True) == stop
    by_step, by_round = PlateauWatch(50), PlateauWatch(50)
    for value in values:
        for _ in range(5):
            by_step.should_stop(value, {})
        by_round.should_stop(value, {}, 5)
    assert by_round.state()["mean"] == pytest.approx(by_step.state()["mean"])
    assert by_round.state()["weight"] == pytest.approx(by_step.state()["weight"])


def test_noise_alone_does_not_stop_a_run_that_improves():
    rng = np.random.default_rng(0)
    watch = PlateauWatch(patience=30)
    assert not any(watch.should_stop(100 - 0.3 * t + rng.normal(), {}) for t in range(300))


def test_early_stopping_ends_learning_before_the_last_step():
    X, y = blobs()
    learned = run(X, y, steps=2000, patience=20, learning_rate=0.2)
    assert learned.stopped_early
    assert len(learned.history) < 2000
    best = min(record["objective"] for record in learned.history)
    out = rcb_objective(learned.kernel, X, y, regularization=learned.regularization, n_classes=M)
    assert out.value < best * 1.05 + 0.5


# --- around the loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["rcb", "validation"])
@pytest.mark.parametrize("risk", ["sum", "mean"])
def test_prior_pulls_as_its_value_says(objective, risk):
    kernel = Gaussian(length_scale=[1.0, 2.0]) + Linear()
    start = optim.to_log(kernel.parameters)
    prior = LengthScalePrior(kernel, start, LearnSettings(objective=objective, risk=risk, prior_width=0.7), rows=40)
    here = {name: value + 0.3 for name, value in start.items()}
    zero = {name: np.zeros_like(value) for name, value in start.items()}
    pull = prior.add_to(zero, here, batch=10)
    assert prior.value(start, 10) == 0
    for i in range(2):
        step = np.zeros(2)
        step[i] = 1e-6
        shifted = [prior.value({**here, "0.length_scale": here["0.length_scale"] + s}, 10) for s in (step, -step)]
        assert pull["0.length_scale"][i] == pytest.approx((shifted[0] - shifted[1]) / 2e-6, rel=1e-6)
    assert pull["0.scale"] == pull["1.scale"] == 0


def test_median_distance_survives_equal_rows():
    assert median_length_scale(np.ones((10, 2)), seed=0) == 1.0
    assert median_length_scale(np.ones((1, 2)), seed=0) == 1.0
    assert median_length_scale(np.array([[0.0], [3.0]]), seed=0) == pytest.approx(3.0)
