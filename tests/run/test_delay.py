"""Delayed gradients: a round is sent before the last one is collected; who computes it does not show in the bits."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_digits

from kme_dist.core import optim
from kme_dist.core.kernels import Gaussian
from kme_dist.core.objective import Objective
from kme_dist.data.arrays import ArrayRows
from kme_dist.errors import ConfigError, DataError
from kme_dist.run import executors as running
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import DaskExecutor, SerialExecutor, Started
from kme_dist.run.full import learn_features
from kme_dist.run.learn import batch_gradient, kernel_batches, learn, learn_on_dataset
from kme_dist.run.learners import KernelLearner, LearnSettings, kernel_start, mean_objectives
from kme_dist.run.trainer import LengthScalePrior, Round, Trainer

KERNEL = Gaussian(length_scale=np.full(64, 1.5))
SETTINGS = LearnSettings(steps=7, batch_size=60, learning_rate=0.1, seed=3, prior_width=1.0)
DELAYED = replace(SETTINGS, delay=1)


class Stop(BaseException):
    """As Ctrl-C: not an Exception."""


@pytest.fixture(scope="module")
def rows():
    X, y = load_digits(return_X_y=True)
    return ArrayRows(X[:600].astype(np.float32), y[:600], range(10))


@pytest.fixture(scope="module", params=[1, 2, 8])
def client(request):
    """Workers that share this process, since what is tested is the order of the work."""
    with (
        LocalCluster(n_workers=request.param, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def always_lanes(monkeypatch):
    monkeypatch.setattr(running, "_QUICK_S", 1e9)
    monkeypatch.setattr(running, "_SHOWN_EVERY_S", 1e9)


def run(rows, settings=DELAYED, executor=None, batches_per_step=3, **options):
    executor = executor or SerialExecutor()
    return learn_on_dataset(
        rows, KERNEL, 0.1, settings, executor=executor, batches_per_step=batches_per_step, **options
    )


def bits(learned):
    values = [*learned.kernel.parameters.values(), learned.regularization]
    return b"".join(np.asarray(value, np.float64).tobytes() for value in values)


def by_hand(rows, settings, batches_per_step=3):
    """θ_{t+1} = θ_t + step(g(θ_{max(t - delay, 0)}; t)), in a plain loop."""
    batches = kernel_batches(rows, settings)
    start = kernel_start(KERNEL, 0.1, settings.objective)
    learner, prior = KernelLearner(KERNEL, settings, 10), LengthScalePrior(KERNEL, start, settings, batches.count)
    optimizer = optim.optimizer_by_name(settings.optimizer)
    iterates, state = [start], optimizer.init(start)
    for t in range(settings.steps):
        at = iterates[max(t - settings.delay, 0)]
        numbers = range(t * batches_per_step, (t + 1) * batches_per_step)
        outs = [batch_gradient(learner, batches, number, at).objective for number in numbers]
        gradient = prior.add_to(mean_objectives(outs).gradient, at, batches.size)
        step, state = optimizer.update(gradient, state, settings.learning_rate)
        iterates.append({name: value + step[name] for name, value in iterates[-1].items()})
    return [optim.from_log(found) for found in iterates]


@pytest.mark.parametrize("settings", [SETTINGS, DELAYED], ids=["delay 0", "delay 1"])
def test_the_gradient_of_a_round_is_taken_delay_updates_ago(rows, settings):
    learned, expected = run(rows, settings), by_hand(rows, settings)
    assert learned.regularization == float(expected[-1]["regularization"])
    np.testing.assert_array_equal(learned.kernel.parameters["length_scale"], expected[-1]["length_scale"])
    # The record of a round describes the parameters that its batches were evaluated at.
    at = [expected[max(t - settings.delay, 0)] for t in range(settings.steps)]
    assert [record["regularization"] for record in learned.history] == [float(p["regularization"]) for p in at]


def test_delay_changes_the_iterates_from_the_second_step_on(rows):
    for steps in (1, 2):
        plain, delayed = (bits(run(rows, replace(settings, steps=steps))) for settings in (SETTINGS, DELAYED))
        assert (plain == delayed) == (steps == 1)


def test_delayed_gradients_learn_the_same_bits_with_threads(rows):
    assert bits(run(rows, executor=SerialExecutor(threads=2))) == bits(run(rows))


@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_delayed_gradients_learn_the_same_bits_on_workers(rows, client, batches_per_step):
    expected = bits(run(rows, batches_per_step=batches_per_step))
    assert bits(run(rows, executor=DaskExecutor(client), batches_per_step=batches_per_step)) == expected


def test_delayed_gradients_learn_the_same_bits_over_lanes(rows, client, always_lanes):
    executor = DaskExecutor(client)
    assert bits(run(rows, executor=executor)) == bits(run(rows))
    assert executor._lanes.available, "there was no need for tasks"


@pytest.mark.parametrize("kept", [True, False])
def test_a_delayed_run_interrupted_after_any_round_resumes_to_the_same_bits(rows, tmp_path, kept):
    batches, start = kernel_batches(rows, DELAYED), kernel_start(KERNEL, 0.1, "rcb")
    options = {"batches_per_step": 2, "average": 0.5, "keep_history": kept}

    def learned(**more):
        return learn(KernelLearner(KERNEL, DELAYED, 10), batches, start, DELAYED, **options, **more).parameters

    whole = learned()
    for step in range(1, DELAYED.steps + 1):

        def stop(record, parameters, step=step):
            if record["step"] == step:
                raise Stop

        with pytest.raises(Stop):
            learned(checkpoints=Checkpoints(tmp_path / str(step)), callback=stop)
        resumed = learned(checkpoints=Checkpoints(tmp_path / str(step)))
        assert all(resumed[name].tobytes() == whole[name].tobytes() for name in whole), step


def test_a_delayed_run_may_be_extended(rows, tmp_path):
    run(rows, replace(DELAYED, steps=4), checkpoints=Checkpoints(tmp_path))
    assert bits(run(rows, checkpoints=Checkpoints(tmp_path))) == bits(run(rows))


def test_a_checkpoint_of_another_delay_is_refused_by_name(rows, tmp_path):
    run(rows, checkpoints=Checkpoints(tmp_path / "1"))
    run(rows, SETTINGS, checkpoints=Checkpoints(tmp_path / "0"))
    with pytest.raises(ConfigError, match=r"learn\.delay is missing"):
        run(rows, SETTINGS, checkpoints=Checkpoints(tmp_path / "1"))
    with pytest.raises(ConfigError, match=r"learn\.delay is new"):
        run(rows, checkpoints=Checkpoints(tmp_path / "0"))


def test_the_best_iterate_is_the_one_that_was_evaluated(rows):
    """With patience the outcome is an iterate at which a batch was evaluated, not the one after it."""
    settings = replace(DELAYED, steps=60, learning_rate=0.5, patience=5)
    learned = run(rows, settings)
    assert learned.stopped_early
    iterates = by_hand(rows, replace(settings, steps=len(learned.history)))
    values = [float(found["regularization"]) for found in iterates[: len(learned.history) - 1]]
    assert learned.regularization in values


def test_what_cannot_be_delayed_is_refused_by_name(rows):
    with pytest.raises(ConfigError, match="delay=1: replicas support only delay=0; raise local_steps"):
        run(rows, replace(DELAYED, steps=8), local_steps=2)
    with pytest.raises(ConfigError, match="delay=1: full gradients support only delay=0"):
        learn_features(rows, None, 0.1, DELAYED, executor=SerialExecutor())


# --- rounds in flight -----------------------------------------------------------------------------------------


class Watched:
    """Rounds of a made-up learner, with a list of what happens to them."""

    def __init__(self, fails_at=None):
        self.events, self.fails_at = [], fails_at

    def __call__(self, step, parameters):
        self.events.append(("sent", step))

        def results():
            if step == self.fails_at:
                raise DataError("a batch is empty")
            self.events.append(("collected", step))
            objective = Objective(1.0, 1.0, 0.0, 0.0, {"regularization": np.array(1.0)}, 0.5, "float64")
            return Round(objective, 10, {})

        return Started(results, lambda: self.events.append(("cancelled", step)))


def trained(rounds, delay, steps=3, callback=None, **settings):
    start = {"regularization": np.array(0.0)}
    trainer = Trainer(start, LearnSettings(steps=steps, optimizer="sgd", delay=delay, **settings))
    return trainer.run(rounds, {}, None, callback)


def test_a_round_is_sent_before_the_one_in_progress_is_collected():
    rounds = Watched()
    trained(rounds, delay=1)
    assert rounds.events == [
        ("sent", 0), ("sent", 1), ("collected", 0), ("sent", 2), ("collected", 1), ("collected", 2)
    ]  # fmt: skip


def test_without_delay_the_next_round_is_sent_before_the_record_is_written():
    rounds = Watched()
    trained(rounds, delay=0, steps=2, callback=lambda record, _: rounds.events.append(("record", record["step"] - 1)))
    assert rounds.events == [
        ("sent", 0), ("collected", 0), ("sent", 1), ("record", 0), ("collected", 1), ("record", 1)
    ]  # fmt: skip


def test_a_round_that_nobody_waits_for_is_cancelled():
    rounds = Watched(fails_at=1)
    with pytest.raises(DataError):
        trained(rounds, delay=1)
    assert rounds.events[-1] == ("cancelled", 2)
    early = Watched()
    assert trained(early, delay=1, steps=50, patience=2, learning_rate=1e-9).stopped_early
    assert early.events[-1][0] == "cancelled"


# --- the executor ---------------------------------------------------------------------------------------------


def napping(seconds, value):
    time.sleep(seconds)
    return value


def thread_of(seconds):
    time.sleep(seconds)
    return threading.get_ident()


def failing(value):
    raise DataError(f"row {value} is empty")


@pytest.fixture(scope="module")
def two():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("lanes", [False, True])
def test_calls_run_before_their_results_are_asked_for(two, lanes, always_lanes):
    executor = DaskExecutor(two)
    executor.map(napping, [(0.0, 0)], name="nap", quick=lanes)
    first = executor.start(napping, [(0.3, 1)], name="nap", quick=lanes)
    second = executor.start(napping, [(0.3, 2), (0.0, 3)], name="nap", quick=lanes)
    time.sleep(1.0)
    began = time.perf_counter()
    assert second.results() == [2, 3], "rounds may be collected in any order"
    assert first.results() == [1]
    assert time.perf_counter() - began < 0.6, "both were computed meanwhile"


@pytest.mark.parametrize("lanes", [False, True])
def test_a_round_of_one_call_goes_to_the_worker_that_is_free(two, lanes, always_lanes):
    """So two workers are busy with one batch per step, if gradients are delayed."""
    executor = DaskExecutor(two)
    executor.map(napping, [(0.0, 0)] * 4, name="nap", quick=lanes)
    for _ in range(3):
        started = [executor.start(thread_of, [(0.3,)], name="nap", quick=lanes) for _ in range(2)]
        assert len({one.results()[0] for one in started}) == 2


@pytest.mark.parametrize("lanes", [False, True])
def test_an_error_is_raised_when_collected_and_a_cancelled_round_leaves_nothing(two, lanes, always_lanes):
    executor = DaskExecutor(two)
    executor.map(napping, [(0.0, 0)], name="nap", quick=lanes)
    started = executor.start(failing, [(4,)], name="fail", quick=lanes)
    with pytest.raises(DataError, match="row 4 is empty"):
        started.results()
    executor.start(napping, [(0.1, 0)], name="nap", quick=lanes).cancel()
    assert executor.map(napping, [(0.0, 5)], name="nap", quick=lanes) == [5]
    deadline = time.monotonic() + 10
    while two.futures and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not two.futures


def noted(dask_scheduler):
    """Submissions of a span, and messages to a worker, that the scheduler keeps: at most."""
    spans = dask_scheduler.extensions["spans"].spans.values()
    comms = dask_scheduler.stream_comms.values()
    return max(len(span._metadata["collections"]) for span in spans), max(len(c.recent_message_log) for c in comms)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_dask_notes_of_rounds_and_streams_is_bounded(two, monkeypatch, streamed):
    monkeypatch.setattr(running, "_TRIM_EVERY", 5)
    executor = DaskExecutor(two)
    if streamed:
        found = dict(executor.stream(napping, [(0.0, i) for i in range(40)], name="nap", ahead=1))
        assert found == {i: i for i in range(40)}
    else:
        assert [executor.map(napping, [(0.0, i)], name="nap") for i in range(23)] == [[i] for i in range(23)]
    submissions, messages = two.run_on_scheduler(noted)
    assert 0 < submissions <= 10
    assert 0 < messages <= 4
    assert 0 < len(two.scheduler_comm.recent_message_log) <= 4


def test_calls_that_were_not_answered_are_repeated_as_tasks(two, always_lanes):
    executor = DaskExecutor(two)
    executor.map(napping, [(0.0, 0)], name="nap", quick=True)
    lost = executor.start(napping, [(0.5, 3)], name="nap", quick=True)
    lost.cancel()  # as if the connection was lost
    assert lost.results() == [3]
    assert executor.retried == 1
    assert not executor._lanes.available
