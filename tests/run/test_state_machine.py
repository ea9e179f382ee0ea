"""A data set and its predictions under any order of appends, jobs, kills, cancels and replacements, beside a model in
plain Python: rows in a list, finished chunks in a dict.

A kill is simulated at the k-th change of the disk: that change is made or not, and none after it, whatever the code
attempts to tidy up. Always: the rows are those of the list; what is read of predictions is what the model says of these
rows, or an error of ours; a chunk that was not computed is never read; a finished chunk is not computed again.
`make fuzz MINUTES=60` looks for other orders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kme_dist as kme
from kme_dist.core.kernels import Gaussian
from kme_dist.data.places import Place
from kme_dist.data.receipts import read_state
from kme_dist.errors import ConfigError, DataError, KMEError
from kme_dist.models import predict as inference
from kme_dist.run.executors import SerialExecutor

D, CHUNK = 2, 4
CHANGES = ("write", "move", "delete", "delete_below", "delete_others", "delete_all", "move_objects")
EXAMPLES, STEPS = 8, 10  # in the tests of every day
KILLS = st.none() | st.tuples(st.integers(0, 25), st.booleans())


class Killed(BaseException):
    """Not an Exception: no handler of the code under test takes it for an error."""


class Disk:
    """Counts the changes of the disk; from the chosen one on there are no more."""

    def __init__(self, monkeypatch):
        self.revive()
        for name in CHANGES:
            monkeypatch.setattr(Place, name, self._counted(getattr(Place, name)))

    def revive(self):
        self.left, self.made, self.dead = None, False, False

    def kill_at(self, when):
        self.left, self.made = when or (None, False)

    def _counted(self, real):
        def change(place, *arguments, **options):
            if self.dead:
                raise Killed
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    if self.made:
                        real(place, *arguments, **options)
                    self.dead = True
                    raise Killed
            return real(place, *arguments, **options)

        return change


@dataclass
class Held:
    """What the predictions must be."""

    model: str
    rows: np.ndarray  # the input of the job
    finished: bool = False
    done: dict[int, int] = field(default_factory=dict)  # rows of each chunk whose call has returned
    begun: set[int] = field(default_factory=set)  # chunks whose call was interrupted: they may be done


class Store(RuleBasedStateMachine):
    models: dict
    disk: Disk
    calls: list
    returned: dict

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kme-store-"))
        self.data, self.out = self.folder / "rows.zarr", self.folder / "scores.zarr"
        self.held, self.drawn = None, 0

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_rows(self, count):
        self.drawn += 1
        return np.random.default_rng(self.drawn).normal(size=(count, D)).astype(np.float32)

    # --- the data set

    @initialize(count=st.integers(1, 9))
    def create(self, count):
        self.rows = self.new_rows(count)
        kme.ingest(self.rows, self.data, chunk_bytes=CHUNK * D * 4)

    @rule(count=st.integers(1, 7), kill=KILLS)
    def append(self, count, kill):
        grown = np.concatenate([self.rows, self.new_rows(count)])
        self.disk.kill_at(kill)
        try:
            kme.open_dataset(self.data).append(grown[len(self.rows) :])
        except Killed:
            self.disk.revive()
            assert len(kme.open_dataset(self.data)) in (len(self.rows), len(grown))
            self.rows = grown[: len(kme.open_dataset(self.data))]
        else:
            self.rows = grown
        self.disk.revive()

    @rule(count=st.integers(1, 9))
    def replace_rows(self, count):
        self.rows = self.new_rows(count)
        kme.ingest(self.rows, self.data, chunk_bytes=CHUNK * D * 4, overwrite=True)

    @invariant()
    def rows_are_those_of_the_list(self):
        if not hasattr(self, "rows"):
            return
        found = kme.open_dataset(self.data)
        np.testing.assert_array_equal(found.read()[0], self.rows)
        np.testing.assert_allclose(found.statistics.mean, self.rows.mean(axis=0), atol=1e-5)
        np.testing.assert_array_equal(found.statistics.minimum, self.rows.min(axis=0))
        found.verify()

    # --- predictions

    @rule(name=st.sampled_from(["a", "b"]), kill=KILLS, overwrite=st.booleans(), scratch=st.integers(0, 4))
    def predict(self, name, kill, overwrite, scratch):
        self._predict(name, overwrite=overwrite, from_scratch=scratch == 0, kill=kill)

    @precondition(lambda self: self.held is not None)
    @rule(kill=KILLS)
    def resume(self, kill):
        self._predict(self.held.model, kill=kill)

    @rule(name=st.sampled_from(["a", "b"]), after=st.integers(0, 3))
    def cancel(self, name, after):
        left = [after]

        def progress(done, total):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        self._predict(name, progress=progress)

    def _predict(self, name, *, kill=None, overwrite=False, from_scratch=False, progress=None):
        before, number = self.held, len(self.rows)
        same_model = before is None or before.model == name
        same_rows = before is None or np.array_equal(self.rows[: len(before.rows)], before.rows)
        must_refuse = before is not None and not (same_model and (same_rows or not (before.done or before.begun)))
        unsure = before is not None and same_model and not same_rows and not before.done
        replaces = from_scratch or (overwrite and not (same_model and same_rows))
        earlier = None if before is None else read_state(Place.of(self.out))
        epoch = None if earlier is None else earlier["epoch"]
        self.calls.clear()
        self.returned.clear()
        self.disk.kill_at(kill)
        outcome = refused = None
        try:
            outcome = kme.predict(
                self.models[name].path, self.data, self.out, dtype="float64", executor=SerialExecutor(1),
                overwrite=overwrite, from_scratch=from_scratch, progress=progress,
            )  # fmt: skip
        except ConfigError as error:
            refused = error
        except (Killed, KeyboardInterrupt):
            pass
        self.disk.revive()
        if refused is not None:
            assert must_refuse, refused
            assert not replaces, refused
            assert not self.calls
            return
        kept = {} if before is None or replaces else before.done
        for chunk, start in self.calls:
            assert start >= chunk * CHUNK + kept.get(chunk, 0) or unsure, "a finished chunk was computed again"
        state = read_state(Place.of(self.out))
        if outcome is not None:
            assert replaces or unsure or not must_refuse, "other predictions were replaced without a request"
            assert (outcome.rows, outcome.complete) == (number, True)
            assert state["status"] == "complete"
            full = {chunk: min(CHUNK, number - chunk * CHUNK) for chunk in range(-(-number // CHUNK))}
            self.held = Held(name, self.rows.copy(), True, full)
        elif state is None or (
            before is not None and state["epoch"] == epoch and not self.calls and not self._running()
        ):
            return  # interrupted before it began: what was there is there
        elif state == earlier and not self.calls:
            return  # killed while it published chunks of the job before
        else:
            fresh = before is None or state["epoch"] != epoch
            held = Held(name, self.rows.copy()) if fresh else dataclasses.replace(before, rows=self.rows.copy())
            held.done = {**({} if fresh else before.done), **self.returned}
            held.begun = {chunk for chunk, _ in self.calls} | (set() if fresh else before.begun)
            held.finished = state["status"] == "complete"
            assert not held.finished or sum(held.done.values()) == number, "unfinished chunks count as done"
            self.held = held

    def _running(self):
        return read_state(Place.of(self.out))["status"] == "running"

    @invariant()
    def predictions_are_those_of_the_model(self):
        if self.held is None:
            return
        found, held = kme.open_predictions(self.out), self.held
        expected = self.models[held.model].predict_proba(held.rows)
        if held.finished:
            assert (found.status, found.rows) == ("complete", len(held.rows))
            np.testing.assert_allclose(found.read("probability"), expected, atol=1e-6)
            np.testing.assert_array_equal(found.read("label"), found.read("probability").argmax(axis=1))
            found.verify()
            return
        assert found.status == "running"
        for start in range(0, found.rows, CHUNK):
            stop, chunk = min(start + CHUNK, found.rows), start // CHUNK
            with contextlib.suppress(KMEError):
                values = found.read("probability", start, stop)
                np.testing.assert_allclose(values, expected[start:stop], atol=1e-6)
                assert chunk in held.done or chunk in held.begun, "a chunk that was not computed is read"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found, X = {}, np.random.default_rng(5).normal(size=(12, D)).astype(np.float32)
    for name, scale in (("a", 1.0), ("b", 0.4)):
        fitted = kme.MCEClassifier(kernel=Gaussian(length_scale=np.full(D, scale)), steps=0, regularization=1e-2)
        found[name] = fitted.fit(X, np.arange(12) % 3)
        fitted.path = str(tmp_path_factory.mktemp("models") / f"{name}.zarr")
        fitted.save(fitted.path)
    return found


@pytest.fixture
def machine(models, monkeypatch):
    """The machine with its models, and a record of the calls that began and of those that returned."""
    calls, returned, real = [], {}, inference.predict_chunk

    def compute(plan, task, rows):
        calls.append((task.chunk, task.start))
        receipt = real(plan, task, rows)
        returned[task.chunk] = receipt.rows
        return receipt

    monkeypatch.setattr(inference, "predict_chunk", compute)
    own = {"models": models, "disk": Disk(monkeypatch), "calls": calls, "returned": returned}
    return type("BoundStore", (Store,), own)


def quiet(**options):
    return settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), **options)


def test_any_order_of_appends_jobs_and_kills_keeps_rows_and_predictions(machine):
    run_state_machine_as_test(machine, settings=quiet(max_examples=EXAMPLES, stateful_step_count=STEPS))


def test_rows_that_are_not_predicted_yet_cannot_be_read(machine):
    store = machine()
    store.create(9)
    store.cancel("a", 2)
    store.predictions_are_those_of_the_model()
    with pytest.raises(DataError, match="not predicted yet"):
        kme.open_predictions(store.out).read("label", 8, 9)
    store.resume(None)
    assert store.calls == [(1, 4), (2, 8)] or store.calls == [(2, 8)]
    store.teardown()


@pytest.mark.slow
def test_for_minutes(machine):
    """`make fuzz MINUTES=60`; other examples in every run."""
    until = time.monotonic() + 60 * float(os.environ.get("KME_FUZZ_MINUTES", "1"))
    while time.monotonic() < until:
        run_state_machine_as_test(machine, settings=quiet(max_examples=20, stateful_step_count=30, derandomize=False))
