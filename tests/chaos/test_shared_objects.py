"""Two tasks that wrote to one chunk or shard would undo each other: no plan has such tasks, and they are refused."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kme_dist.data.arrays import ArrayRows
from kme_dist.data.cluster import _store_window
from kme_dist.data.ingest import ingest
from kme_dist.data.leases import always_held
from kme_dist.data.new_rows import _plain_schema
from kme_dist.data.places import Place
from kme_dist.data.predictions import Field, OutputLayout, open_predictions
from kme_dist.data.readers import FileOptions
from kme_dist.data.rows import RowsRef
from kme_dist.data.writer import ChunkLayout, ShardWriter
from kme_dist.errors import DataError
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.predict import ChunkTask, run_chunks, store_chunk

X = np.random.default_rng(0).normal(size=(400, 2))
SCHEMA = _plain_schema(["a", "b"])
FIELDS = (Field("label", "int64"), Field("probability", "float64", (2,)))
# Bytes of chunks and shards around those of a few rows, of 16 bytes each; shards may be requested smaller than chunks.
ROWS, BYTES = st.integers(1, 400), st.integers(100, 3000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("objects")


def files_below(path):
    return {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}


def owner_of_each(parts):
    """The one task that has written each object."""
    owners = {}
    for task, names in parts.items():
        for name in names:
            assert name not in owners, f"{name} belongs to {owners[name]} and to {task}"
            owners[name] = task
    return owners


@pytest.mark.chaos(25)
@settings(max_examples=20, deadline=None)
@given(rows=ROWS, chunk_bytes=BYTES, shard_bytes=BYTES)
def test_no_two_tasks_of_ingest_write_to_one_object(folder, rows, chunk_bytes, shard_bytes):
    layout = ChunkLayout.choose(16, chunk_bytes, shard_bytes, "none")
    windows = layout.windows(rows)
    assert [row for start, stop in windows for row in range(start, stop)] == list(range(rows))
    with tempfile.TemporaryDirectory(dir=folder) as here:
        np.save(Path(here) / "X.npy", X[:rows])
        parts = {}
        for window in windows:  # each into a folder of its own, to see what is its own
            place = Path(here) / str(window[0])
            _store_window((f"{here}/X.npy", FileOptions()), SCHEMA, str(place), layout, always_held, window)
            parts[window] = files_below(place)
        owners = owner_of_each(parts)
        one = ShardWriter(Place.of(f"{here}/one"), 2, np.dtype("float64"), None, False, layout, settled=True)
        one.add(X[:rows], None, None)
        one.finish()
        expected = files_below(Path(here) / "one")
        assert set(owners) == set(expected)
        for name, window in owners.items():
            assert parts[window][name].read_bytes() == expected[name].read_bytes()


@pytest.mark.chaos(25)
@settings(max_examples=15, deadline=None)
@given(old=ROWS, new=ROWS, chunk_bytes=BYTES, shard_bytes=BYTES)
def test_append_writes_no_object_of_full_shards(folder, old, new, chunk_bytes, shard_bytes):
    with tempfile.TemporaryDirectory(dir=folder) as here:
        data = ingest(X[:old], f"{here}/rows.zarr", chunk_bytes=chunk_bytes, shard_bytes=shard_bytes, dtype="float64")
        before = {name: file.stat().st_ino for name, file in files_below(Path(here) / "rows.zarr/X/c").items()}
        data = data.append(X[:new])
        after = {name: file.stat().st_ino for name, file in files_below(Path(here) / "rows.zarr/X/c").items()}
        full = old // data.shard_rows
        kept = [name for name in before if int(name.split("/")[0]) < full]
        assert len(kept) == full
        assert all(after[name] == before[name] for name in kept)
        assert len(after) == -(-data.rows // data.shard_rows)
        np.testing.assert_array_equal(data.read()[0], np.concatenate([X[:old], X[:new]]))


def predict(address, rows, chunk_rows, format):
    """Predict with real storage and no model; the objects and rows of every task, by its chunk and first row."""
    layout = OutputLayout(address, format, chunk_rows, FIELDS, ("no", "yes"))
    tasks = {}

    def compute(task, part):
        tasks[task.chunk, task.start] = task
        values = part.read(0, part.count)[0]
        return store_chunk(task, {"label": (values[:, 0] > 0).astype(int), "probability": values}, features=values)

    state = {
        "job": "job",
        "computed_from": {},
        "model": "none",
        "rows": rows,
        "chunk_rows": chunk_rows,
        "layout": format,
        "classes": ["no", "yes"],
        "fields": [dataclasses.asdict(field) for field in FIELDS],
    }
    source = RowsRef.of(ArrayRows(X[:rows], None), split=None)
    run_chunks(state, layout, source, compute, (), executor=SerialExecutor(threads=2))
    return layout, tasks


@pytest.mark.chaos(25)
@settings(max_examples=15, deadline=None)
@given(old=ROWS, more=ROWS, chunk_rows=st.integers(10, 150), format=st.sampled_from(["zarr", "parquet"]))
def test_no_two_tasks_of_predict_write_to_one_object(folder, old, more, chunk_rows, format):
    address = tempfile.mkdtemp(dir=folder) + "/scores.zarr"
    done = 0
    for rows in (old, max(old, more)):  # the second time after rows were appended
        layout, tasks = predict(address, rows, chunk_rows, format)
        owner_of_each({key: layout.keys(task.chunk) for key, task in tasks.items()})
        owned = sorted((task.start, task.stop) for task in tasks.values())
        assert [row for start, stop in owned for row in range(start, stop)] == list(range(done, rows))
        done = rows
    found = open_predictions(address)
    stored = {name for name in files_below(Path(address)) if "/c/" in name or name.startswith("part-")}
    assert stored == set(itertools.chain.from_iterable(layout.keys(chunk) for chunk in range(found.chunks)))
    np.testing.assert_array_equal(found.read("probability"), X[:done])
    shutil.rmtree(address)


@pytest.mark.chaos(25)
@pytest.mark.parametrize("window", [(1, 8), (4, 12), (12, 20), (0, 9), (8, 24)])
def test_a_task_that_would_share_an_object_is_refused(tmp_path, window):
    """Shards and chunks of predictions of 8 rows; windows that begin inside one, or reach into the next."""
    np.save(tmp_path / "X.npy", X)
    origin = (str(tmp_path / "X.npy"), FileOptions())
    with pytest.raises(DataError, match="would share a shard of 8 rows with another task"):
        _store_window(origin, SCHEMA, str(tmp_path / "out"), ChunkLayout(4, 8, False), always_held, window)
    layout = OutputLayout(str(tmp_path / "out"), "zarr", 8, FIELDS, ("no", "yes"))
    with pytest.raises(DataError, match=rf"does not write chunk {window[0] // 8} alone"):
        ChunkTask(layout, "job", window[0] // 8, *window, "", 400)
    assert not files_below(tmp_path / "out")


@pytest.mark.chaos(25)
def test_a_source_that_grew_after_the_plan_does_not_reach_the_shard_of_another_task(tmp_path):
    """The writer of a task refuses rows beyond its own before it stores them."""
    layout, place = ChunkLayout(4, 8, False), Place.of(tmp_path / "out")
    writer = ShardWriter(place, 2, X.dtype, None, False, layout, first_row=8, stop_row=16, settled=True)
    writer.add(X[8:12], None, None)
    with pytest.raises(DataError, match="rows from 16 belong to another task"):
        writer.add(X[12:17], None, None)
    writer.abandon()
    assert not files_below(tmp_path / "out")


@pytest.mark.chaos(25)
@pytest.mark.parametrize(("chunk_rows", "shard_rows"), [(4, 6), (8, 4), (0, 8), (4, 0)])
def test_chunks_that_two_shards_would_share_are_refused(chunk_rows, shard_rows):
    with pytest.raises(DataError, match="a shard must be an integer number of chunks"):
        ChunkLayout(chunk_rows, shard_rows, False)
