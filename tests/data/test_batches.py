"""Batches: the rows of a step follow from plan and step alone, reads match the plan, prefetch keeps order and
errors."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.plan import MODES, ORDERS, BatchPlan, permuted
from kme_dist.data.prefetch import Prefetched
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, DataError

RANGES = ((5, 20_000), (30_000, 41_001))


def rows_of(plan: BatchPlan, step: int) -> np.ndarray:
    ref = plan.batch(step)
    return ref.rows if ref.rows is not None else np.concatenate([np.arange(a, b) for a, b in ref.spans])


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_the_permutation_is_one(count, key):
    np.testing.assert_array_equal(np.sort(permuted(np.arange(count), count, key)), np.arange(count))


def test_the_permutation_mixes():
    places = permuted(np.arange(100_000), 100_000, 7)
    assert abs(np.corrcoef(np.arange(100_000), places)[0, 1]) < 0.02
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.02
    assert (permuted(np.arange(1000), 1000, 1) == permuted(np.arange(1000), 1000, 2)).mean() < 0.02


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_meets_each_row_once_and_nearly_all(mode):
    plan = BatchPlan(RANGES, 500, seed=1, mode=mode, chunk_rows=1024)
    for epoch in range(2):
        first = epoch * plan.steps_per_epoch
        seen = np.concatenate([rows_of(plan, first + s) for s in range(plan.steps_per_epoch)])
        assert len(np.unique(seen)) == len(seen)
        assert len(seen) > 0.95 * plan.rows
        inside = ((seen >= 5) & (seen < 20_000)) | ((seen >= 30_000) & (seen < 41_001))
        assert inside.all()


@pytest.mark.parametrize("mode", MODES)
def test_every_row_has_its_turn_within_some_epochs(mode):
    plan = BatchPlan(((3, 2050), (4000, 4010)), 100, seed=0, mode=mode, chunk_rows=256)
    seen = np.unique(np.concatenate([rows_of(plan, s) for s in range(20 * plan.steps_per_epoch)]))
    np.testing.assert_array_equal(seen, np.r_[3:2050, 4000:4010])


def test_a_step_has_the_same_rows_in_another_process():
    plans = [BatchPlan(RANGES, 300, seed=9, mode=m, order=o, chunk_rows=1000) for m in MODES for o in ORDERS]
    code = (
        "import json, sys; from kme_dist.data.plan import BatchPlan\n"
        "refs = [BatchPlan.from_json(stored).batch(123) for stored in json.loads(sys.argv[1])]\n"
        "print(json.dumps([r.rows.tolist() if r.rows is not None else r.spans for r in refs]))"
    )
    given = json.dumps([plan.to_json() for plan in plans])
    there = subprocess.run([sys.executable, "-c", code, given], capture_output=True, check=True)
    for plan, rows in zip(plans, json.loads(there.stdout), strict=True):
        ref = plan.batch(123)
        assert rows == (ref.rows.tolist() if ref.rows is not None else [list(span) for span in ref.spans])
        assert len(ref) == 300
        assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("mode", MODES)
def test_steps_and_seeds_differ(mode):
    plan = BatchPlan(RANGES, 300, seed=9, mode=mode, order="sampling", chunk_rows=1000)
    other = BatchPlan(RANGES, 300, seed=10, mode=mode, order="sampling", chunk_rows=1000)
    assert not np.array_equal(rows_of(plan, 0), rows_of(plan, 1))
    assert not np.array_equal(rows_of(plan, 0), rows_of(other, 0))


def test_blocks_touch_few_chunks():
    plan = BatchPlan(((0, 100_000),), 2000, seed=0, mode="blocks", chunk_rows=8192, blocks=4)
    for step in range(30):
        rows = rows_of(plan, step)
        assert len(np.unique(rows // 8192)) <= 5
        assert len(np.unique(rows)) == 2000


def test_fewer_rows_than_a_batch_are_one_batch():
    for mode in MODES:
        plan = BatchPlan(((10, 60),), 500, seed=0, mode=mode)
        np.testing.assert_array_equal(np.sort(rows_of(plan, 3)), np.arange(10, 60))
    with pytest.raises(DataError, match="no rows"):
        BatchPlan(((5, 5),), 10, seed=0)


@pytest.mark.parametrize("wrong", [{"mode": "fast"}, {"order": "up"}, {"batch_size": 0}, {"ranges": ((5, 1),)}])
def test_a_wrong_plan_is_refused(wrong):
    with pytest.raises(ConfigError):
        BatchPlan(**{"ranges": RANGES, "batch_size": 10, "seed": 0, **wrong})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    X = np.arange(60_000, dtype=np.float32).reshape(-1, 3)
    path = tmp_path_factory.mktemp("batches") / "d.zarr"
    return ingest(
        (X, np.arange(20_000) % 7),
        path,
        chunk_bytes="16KiB",
        shard_bytes="64KiB",
        split="train=0:15000,test=15000:20000",
    )


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_batches_hold_the_rows_of_the_plan(data, mode):
    train = RowsRef.of(data, split="train")
    plan = train.plan(700, 3, mode=mode)
    with train.batches(plan, range(30)) as batches:
        for step, batch in enumerate(batches):
            rows = rows_of(plan, step)
            assert batch.number == step
            assert rows.max() < 15_000
            np.testing.assert_array_equal(batch.X[:, 0], 3 * rows)
            np.testing.assert_array_equal(batch.y, rows % 7)
    assert batches.items == 30


def test_the_mode_follows_from_the_size_of_the_rows_and_their_order(data, tmp_path, monkeypatch):
    X = np.zeros((3000, 2), np.float32)
    shuffled, ordered = ingest(X, tmp_path / "a.zarr", shuffle=0), ingest(X, tmp_path / "b.zarr")
    for kept in (shuffled, ordered, ArrayRows(X, None), data):
        assert RowsRef.of(kept, split=None).plan(100).mode == "rows", "the cache holds all of them"
    monkeypatch.setattr("kme_dist.data.rows.CACHE_BYTES", 3000 * 2 * 8 - 1)
    assert RowsRef.of(shuffled).plan(100).mode == "contiguous"
    for kept in (ordered, ArrayRows(X, None)):
        assert RowsRef.of(kept).plan(100).mode == "blocks"
    assert RowsRef.of(ordered).plan(100) == RowsRef.of(ordered).plan(100, mode="blocks")
    with pytest.raises(ConfigError, match="no split 'dev'; its splits: train, test"):
        RowsRef.of(data, split="dev")


def test_transfer_runs_on_the_reading_thread(data):
    threads = set()

    def transfer(array):
        threads.add(threading.current_thread().name)
        return array.sum()

    rows = RowsRef.of(data, split=None)
    plan = rows.plan(100)
    with rows.batches(plan, [4, 2], transfer=transfer) as batches:
        got = [(batch.number, float(batch.X)) for batch in batches]
    assert got == [(s, float(rows.batch(plan, s)[0].sum())) for s in (4, 2)]
    assert threads == {"kme-prefetch"}


def test_prefetch_runs_ahead_but_not_away():
    made = []

    def produce():
        for i in range(10):
            made.append(i)
            yield i

    with Prefetched(produce, depth=2) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 60
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3], "one taken, two ready, one in the making"
        assert list(ahead) == list(range(1, 10))
    assert threading.active_count() < 50


def test_an_error_arrives_where_it_happened():
    def produce():
        yield 1
        raise DataError("row 2 is bad")

    with Prefetched(produce) as ahead:
        assert next(ahead) == 1
        with pytest.raises(DataError, match="row 2"):
            next(ahead)


def test_closing_early_stops_the_producer():
    ahead = Prefetched(lambda: iter(range(10**9)))
    next(ahead)
    ahead.close()
    assert not ahead._thread.is_alive()
    assert list(ahead) == []
