"""Round trips of the shared data sets: value for value, label for label, through every format that can hold them."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from kme_dist.data.ingest import ingest
from kme_dist.data.reading import read_table

NAMES = ["abalone", "banknote", "cadata", "ecoli", "ionosphere", "iris", "parkinsons", "pendigits", "pima", "poker"]
NAMES += ["satimage", "segment", "space_ga", "wine"]
LARGE = ["covtype", "mnist"]

pytestmark = pytest.mark.shared_data


def load(folder, name):
    with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
        return stored["X"], stored["y"], json.loads((folder / f"{name}.json").read_text())


def check(data, X, y, facts) -> None:
    order = data.row.read(0, data.rows) if data.row is not None else np.arange(data.rows)
    got_X, got_y = data.read()
    assert len(got_X) == len(X)
    np.testing.assert_array_equal(got_X, X[order])
    if facts["task"] == "classification":
        np.testing.assert_array_equal(np.array(data.classes)[got_y], y[order])
        assert data.class_counts == facts["class_counts"]
    else:
        np.testing.assert_array_equal(got_y.astype(y.dtype), y[order])  # text has the shortest form of a float32
    data.verify()


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(shared_data, tmp_path, name):
    X, y, facts = load(shared_data, name)
    data = ingest(shared_data / f"{name}.npz", tmp_path / "npz.zarr", shuffle=1, split="train=0.7,test=0.3")
    check(data, X, y, facts)
    columns = {f"x{j}": X[:, j] for j in range(X.shape[1])}
    table = pa.table({**columns, "label": y})
    pa.csv.write_csv(table, tmp_path / "t.csv")
    pq.write_table(table, tmp_path / "t.parquet")
    task = facts["task"]
    for source in (tmp_path / "t.csv", tmp_path / "t.parquet", table):
        stored = ingest(source, tmp_path / "d.zarr", label="label", task=task, overwrite=True, dtype=str(X.dtype))
        check(stored, X, y, facts)
    read = read_table(shared_data / f"{name}.npz")
    np.testing.assert_array_equal(read.X, X)
    assert read.X.dtype == X.dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_round_trip_of_the_large_ones(shared_data, tmp_path, name):
    X, y, facts = load(shared_data, name)
    data = ingest(shared_data / f"{name}.npz", tmp_path / "d.zarr", shuffle=1)
    check(data, X, y, facts)
    assert data.dtype == X.dtype, "bytes stay bytes"
    check(ingest(shared_data / f"{name}.npz", tmp_path / "e.zarr"), X, y, facts)
