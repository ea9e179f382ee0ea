"""Dask: its collections as sources, and a cluster's workers storing the very bytes that one process would."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from kme_dist.data.ingest import ingest
from kme_dist.errors import DataError

ROWS = 30_000
SMALL = {"chunk_bytes": "32KiB", "shard_bytes": "256KiB"}


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(0)
    return random.standard_normal((ROWS, 8), dtype=np.float32), np.array(["b", "c", "a"])[random.integers(0, 3, ROWS)]


@pytest.fixture(scope="module")
def client():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def as_table(X, y) -> pa.Table:
    return pa.table({**{f"f{j}": X[:, j] for j in range(X.shape[1])}, "y": y})


def test_dask_arrays_are_sources(tmp_path, rows):
    da = pytest.importorskip("dask.array")
    X, y = rows
    codes = np.searchsorted(["a", "b", "c"], y)
    data = ingest((da.from_array(X, chunks=(7000, 3)), da.from_array(codes, chunks=9000)), tmp_path / "d.zarr")
    np.testing.assert_array_equal(data.read()[0], X)
    np.testing.assert_array_equal(data.read()[1], codes)
    with pytest.raises(DataError, match="got 30000 rows but 10 labels"):
        ingest((da.from_array(X), da.from_array(codes[:10])), tmp_path / "e.zarr")


def test_dask_frames_are_sources(tmp_path, rows):
    dd = pytest.importorskip("dask.dataframe")
    X, y = rows
    frame = dd.from_pandas(as_table(X, y).to_pandas(), npartitions=4)
    data = ingest(frame, tmp_path / "d.zarr", label="y")
    np.testing.assert_array_equal(data.read()[0], X)
    np.testing.assert_array_equal(np.array(data.classes)[data.read()[1]], y)


def test_workers_store_what_one_process_would(tmp_path, rows, client):
    X, y = rows
    parts = tmp_path / "parts"
    parts.mkdir()
    for i in range(3):
        pq.write_table(as_table(X, y).slice(i * 11_000, 11_000), parts / f"{i}.parquet", row_group_size=2500)
    np.save(tmp_path / "X.npy", X)
    for source, options in [
        (parts, {"label": "y"}),
        (tmp_path / "X.npy", {}),
        (parts, {"label": "y", "missing": "mean"}),
    ]:
        seen = []
        one = ingest(source, tmp_path / "one.zarr", overwrite=True, **SMALL, **options)
        many = ingest(
            source,
            tmp_path / "many.zarr",
            overwrite=True,
            client=client,
            progress=lambda *event, seen=seen: seen.append(event),
            **SMALL,
            **options,
        )
        assert len(seen) == -(-ROWS // many.shard_rows), "the workers did it, a window each"
        assert many.attributes["digests"] == one.attributes["digests"]
        assert many.classes == one.classes
        assert many.class_counts == one.class_counts
        np.testing.assert_allclose(many.statistics.variance, one.statistics.variance)
        many.verify()


def test_what_cannot_be_cut_is_streamed(tmp_path, rows, client):
    X, y = rows
    path = tmp_path / "t.csv"
    pa.csv.write_csv(as_table(X[:5000], y[:5000]), path)
    data = ingest(path, tmp_path / "d.zarr", label="y", client=client, shuffle=1, dtype="float32", **SMALL)
    np.testing.assert_array_equal(data.read()[0], X[data.row.read(0, 5000)])


def test_an_error_on_a_worker_names_its_row(tmp_path, rows, client):
    bad = rows[0].copy()
    bad[25_000, 3] = np.nan
    np.save(tmp_path / "X.npy", bad)
    with pytest.raises(DataError, match="row 25000, column 'x3'"):
        ingest(tmp_path / "X.npy", tmp_path / "d.zarr", client=client, **SMALL)
    assert not (tmp_path / "d.zarr").exists()
