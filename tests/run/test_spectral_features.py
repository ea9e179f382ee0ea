"""Spectral features learned on all rows: which rows, the same bits everywhere, after a stop, and against autograd."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist.core.calibration import calibrated_loss
from kme_dist.core.kernels import Gaussian
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError
from kme_dist.run import learn as learning
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.fit import fit_on_dataset
from kme_dist.run.learn import Batches, learn
from kme_dist.run.learners import LearnSettings, SoftmaxLearner, joined, parted, replicas_in
from kme_dist.run.spectral import (
    LearnedMap,
    SpectralSettings,
    SpectralWork,
    _start,
    held_out,
    learn_spectral,
    rising_and_falling,
    within_reach,
)
from kme_dist.run.train import Recipe, learn_candidates

N, D, M = 900, 4, 3
SMALL = SpectralSettings(
    frequencies=12, hidden=(10, 6), epochs=4, batch_size=32, local_steps=9, learning_rate=0.01, seed=4
)


def table(n=N, seed=1):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, D)) * [1, 10, 0.1, 5] + [0, 0, 3, 1000]
    return X, (X[:, 0] * X[:, 1] > 0).astype(np.int64) + (X[:, 2] > 3)


@pytest.fixture(scope="module")
def rows():
    return ArrayRows(*table(), np.arange(M))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    place = tmp_path_factory.mktemp("rows") / "d.zarr"
    return ingest(table(), place, dtype="float64", task="classification")


@pytest.fixture(scope="module")
def clients():
    clusters = [
        LocalCluster(n_workers=count, threads_per_worker=1, processes=False, dashboard_address=":0") for count in (1, 3)
    ]
    found = [Client(cluster) for cluster in clusters]
    yield found
    for client, cluster in zip(found, clusters, strict=True):
        client.close()
        cluster.close()


def bits(learned):
    return {name: (np.asarray(v).dtype.str, np.asarray(v).tobytes()) for name, v in learned.arrays.items()}


def run(source, executor=None, settings=SMALL, **more):
    return learn_spectral(source, settings, executor=executor or SerialExecutor(), **more)


class TestHeldOutRows:
    def test_blocks_are_spread_over_all_rows(self):
        held = held_out(((0, 50_000), (70_000, 120_000)))
        assert sum(stop - start for start, stop in held) == 4_000
        assert all(start >= 50_000 or stop <= 50_000 for start, stop in held)
        assert not any(50_000 <= start < 70_000 for start, _ in held)
        starts = np.array([start for start, _ in held])
        assert np.all(np.diff(starts) > 0)
        assert np.diff(starts).min() > 1_400

    def test_few_rows_are_a_share(self):
        assert sum(stop - start for start, stop in held_out(((0, 1_000),))) == 40
        assert held_out(((0, 3),)) == ((0, 1),)

    def test_no_network_reads_them(self, rows, monkeypatch):
        seen, real = [], Batches._planned

        def planned(batches, number):
            seen.append(batches.plan.batch(number).rows)
            return real(batches, number)

        monkeypatch.setattr(Batches, "_planned", planned)
        held = run(rows).held
        out = {number for start, stop in held for number in range(start, stop)}
        drawn = set(np.concatenate(seen).tolist())
        assert len(out) == 36
        assert not out & drawn
        assert len(drawn) > 0.9 * (N - len(out)), "all others are used"

    def test_they_are_what_leave_one_out_is_measured_on(self, rows):
        found = run(rows)
        fit = fit_on_dataset(
            rows, None, 1e-6, executor=SerialExecutor(), split=None, scaling=found.scaling, solver="features",
            features=_identity(), sampled=found.held,
        )  # fmt: skip
        numbers = np.concatenate([np.arange(*span) for span in found.held])
        expected = found.scaling.apply(table()[0][numbers], "float32")
        sample = fit.statistics.sample
        assert sorted(map(bytes, sample.X)) == sorted(map(bytes, expected))
        assert len(fit.left_out.codes) == len(numbers)
        assert fit.statistics.rows == N, "the fit itself uses every row"


class TestRowsOfWeightZero:
    """As many rows as they are, wherever they are: what is learned is what is learned without them."""

    @pytest.mark.parametrize("kept", [np.arange(N) >= 500, np.arange(N) % 4 == 0, np.arange(N) // 45 % 20 == 3])
    def test_they_are_neither_learned_from_nor_held_out(self, kept):
        X, y = table()
        X[~kept] = X[kept].mean(axis=0)  # no other ranges and no other scaling
        one = ArrayRows(X, y, np.arange(M), weights=kept.astype(float))
        seen: set[int] = set()
        work = SpectralWork.of(one, SMALL, None)
        numbers = np.concatenate([np.arange(*span) for span in work.held])
        assert kept[numbers].all()
        for number in range(40):
            rows = work.batches.plan.batch(number // work.batches.per_read).rows
            seen |= set(rows.tolist())
            assert len(work.batches.read(number)[1])
        assert kept[list(seen)].all()
        assert not seen & set(numbers.tolist())
        assert np.isfinite([record["objective"] for record in run(one).history]).all()

    def test_weights_that_alternate_too_often_to_be_left_out_still_give_batches(self, monkeypatch):
        monkeypatch.setattr("kme_dist.data.rows._MOST_RANGES", 5)
        weights = (np.arange(N) % 60 == 0).astype(float)  # fewer in a block than it has batches
        work = SpectralWork.of(ArrayRows(*table(), np.arange(M), weights=weights), SMALL, None)
        assert work.batches.per_read > 1
        sizes = [len(work.batches.read(number)[1]) for number in range(work.batches.per_read)]
        assert min(sizes) >= 1

    def test_epochs_are_those_of_the_other_rows(self, monkeypatch):
        asked = []
        monkeypatch.setattr(Recipe, "spectral", lambda self, rows: asked.append(rows) or SMALL)
        rows = ArrayRows(*table(), np.arange(M), weights=(np.arange(N) < 700).astype(float))
        recipe = Recipe(Gaussian(), features="spectral")
        learn_candidates(rows, recipe, executor=SerialExecutor())
        assert asked == [700]


def _identity():
    from kme_dist.core.features import Identity

    return Identity()


class TestScaling:
    def test_rare_values_stay_within_reach(self):
        X = np.zeros((1_000, 2))
        X[:3, 0] = 1.0  # a standard deviation of 0.055
        X[:, 1] = np.linspace(-1, 1, 1_000)
        scaled = within_reach(ArrayRows(X, np.arange(1_000) % 2, range(2)), None).apply(X, "float64")
        assert np.abs(scaled[:, 0]).max() == pytest.approx(4.0)
        assert scaled[:, 1].std() == pytest.approx(1.0)

    def test_constant_columns_become_zero(self):
        X = np.full((10, 1), 7.0)
        assert not within_reach(ArrayRows(X, np.arange(10) % 2, range(2)), None).apply(X, "float64").any()


class TestLearning:
    def test_the_same_bits_everywhere(self, rows, stored, clients):
        alone = bits(run(rows))
        assert bits(run(stored)) == alone
        for client in clients:
            assert bits(run(stored, DaskExecutor(client))) == alone
        assert bits(run(rows, settings=dataclasses.replace(SMALL, seed=5))) != alone

    def test_a_stop_and_a_resumed_run_learn_the_same_bits(self, rows, tmp_path):
        whole, steps = bits(run(rows)), []

        def stop(record):
            steps.append(record["step"])
            if len(steps) == 4:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            run(rows, checkpoints=Checkpoints(tmp_path), callback=stop)
        seen = []
        assert bits(run(rows, checkpoints=Checkpoints(tmp_path), callback=seen.append)) == whole
        assert seen[0]["step"] == 5 * SMALL.local_steps, "what was done before the stop is not done again"

    def test_a_network_does_not_depend_on_how_many_there_are_beside_it(self, rows):
        """Each is a run of its own: that of replica r over the batches of replica r."""
        own = SMALL.learning(864)
        scaling = within_reach(rows, None)
        batches = Batches.of(rows, batch_size=32, seed=4, scaling=scaling, split=None)
        starts = [_start(D, M, SMALL, 0.5, r) for r in range(2)]
        learner = SoftmaxLearner(starts[0][0], own, M)
        both = learn(learner, batches, joined([p for _, p in starts]), own, local_steps=own.steps, batches_per_step=2)
        alone = learn(learner, batches, starts[0][1], own, local_steps=own.steps)
        for name, value in parted(both.parameters)[0].items():
            np.testing.assert_array_equal(value, alone.parameters[name])

    def test_parameters_stay_in_the_precision_of_learning(self, rows):
        found = run(rows).scaling.features
        assert {value.dtype.name for value in found.parameters.values()} == {"float32"}

    def test_features_are_probabilities_of_each_network(self, rows):
        Z = run(rows).scaling.apply(table()[0], "float32")
        assert Z.shape == (N, 2 * M)
        np.testing.assert_allclose(Z.reshape(N, 2, M).sum(axis=2), 1, rtol=1e-5)

    def test_learning_predicts_new_rows(self, rows):
        longer = dataclasses.replace(SMALL, epochs=40, frequencies=48, hidden=(32, 32))
        X, y = table(600, seed=9)
        Z = run(rows, settings=longer).scaling.apply(X, "float32").reshape(-1, 2, M).mean(axis=1)
        assert np.mean(Z.argmax(axis=1) == y) > 0.85

    def test_it_is_restored_from_plain_data(self, rows):
        found = run(rows)
        again = LearnedMap.restored(found.to_plain(), found.arrays)
        assert bits(again) == bits(found)
        assert again.held == found.held
        assert again.to_plain() == found.to_plain()


class TestStep:
    def test_the_gradient_is_that_of_autograd(self, rows):
        torch = pytest.importorskip("torch")
        hidden, start = _start(D, M, dataclasses.replace(SMALL, dtype="float64"), 0.5, 0)
        rng = np.random.default_rng(0)
        start["softmax.weights"] = rng.normal(size=start["softmax.weights"].shape)
        X, y = rng.normal(size=(20, D)), rng.integers(0, M, 20)
        found = SoftmaxLearner(hidden, LearnSettings(), M).evaluate(start, X, y, 0)
        held = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
        Z = torch.cos(torch.tensor(X) @ held["features.0.weight"] + held["features.0.bias"])
        for layer in "12":
            Z = torch.relu(Z @ held[f"features.{layer}.weight"] + held[f"features.{layer}.bias"])
        loss = torch.nn.functional.cross_entropy(Z @ held["softmax.weights"] + held["softmax.bias"], torch.tensor(y))
        loss.backward()
        assert found.value == pytest.approx(loss.item(), rel=1e-12)
        for name, value in held.items():
            np.testing.assert_allclose(found.gradient[name], value.grad.numpy(), rtol=1e-9, atol=1e-12)

    def test_the_rate_rises_and_falls_to_zero(self):
        rate = rising_and_falling(0.01, 200)
        assert [rate(step) for step in (0, 1, 2)] == pytest.approx([0.0025, 0.005, 0.0075], rel=1e-3)
        assert rate(4) > rate(100) > rate(199) > 0
        assert rate(199) < 1e-6

    def test_all_steps_together_decay_by_the_same_factor(self):
        for rows in (500, 20_000, 10**6):
            own = SpectralSettings.of(rows).learning(rows)
            rate = own.schedule(own.learning_rate, own.steps)
            left = np.prod([1 - rate(step) * own.weight_decay for step in range(own.steps)])
            assert left == pytest.approx(np.exp(-1), rel=0.05)

    def test_decay_shrinks_parameters_by_the_rate(self):
        stepper = learning.Stepper.of({"w": np.ones(2)}, LearnSettings(weight_decay=0.5, optimizer="sgd"))
        moved, _ = stepper.move(
            {"w": np.array([0.0, 1.0])}, {"w": np.array([4.0, 4.0])}, {"velocity": {"w": np.zeros(2)}}, 0.1
        )
        np.testing.assert_allclose(moved["w"], [4 * 0.95, 4 * 0.95 - 0.1])


class TestSmallBatches:
    def test_one_read_holds_each_of_its_rows_once(self, rows):
        ref = Batches.of(rows, batch_size=64, seed=3, split=None, scaling=None, dtype="float64")
        few = dataclasses.replace(ref, per_read=4)
        assert few.size == 16
        together = np.concatenate([few.read(number)[0] for number in range(4, 8)])
        planned = ref.read(1)[0]
        assert sorted(map(bytes, together)) == sorted(map(bytes, np.ascontiguousarray(planned)))
        assert not np.array_equal(together, planned), "shuffled"
        np.testing.assert_array_equal(few.read(5)[0], few.read(5)[0])

    def test_epochs_and_rounds_follow_from_the_rows(self):
        assert SMALL.learning(864).steps == 12 * 9  # 4 x 864 / 32, in whole rounds
        epochs = [SpectralSettings.of(n).epochs for n in (1_000, 500_000, 2_000_000, 10**9)]
        assert epochs == pytest.approx([40.0, 15.0, 7.5, 1.0])


def test_replicas_are_joined_and_parted():
    own = [{"features.a": np.array(1.0), "b": np.array(2.0)}, {"features.a": np.array(3.0), "b": np.array(4.0)}]
    assert parted(joined(own)) == own
    assert (replicas_in(joined(own)), replicas_in(own[0])) == (2, 0)


def test_replicas_that_never_meet_need_rounds_of_several_steps(rows):
    hidden, start = _start(D, M, SMALL, 0.5, 0)
    batches = Batches.of(rows, batch_size=32, seed=4, split=None)
    with pytest.raises(ConfigError, match="require local_steps"):
        learn(SoftmaxLearner(hidden, LearnSettings(steps=2), M), batches, joined([start]), LearnSettings(steps=2))


def test_the_calibrated_loss_is_that_of_the_best_map():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 600)
    codes = np.array([rng.choice(3, p=row) for row in p])
    honest = -np.log(p[np.arange(600), codes]).mean()
    sharp = p**3 / (p**3).sum(axis=1, keepdims=True)  # overconfident, which a temperature mends
    assert calibrated_loss(sharp, codes) == pytest.approx(honest, rel=0.03)
    assert -np.log(sharp[np.arange(600), codes]).mean() > 1.3 * honest
