"""Data sets on disk: damage is named, older formats open, appends are all or nothing, two writers never meet."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import google_crc32c
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from kme_dist.data.append import append
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.leases import writer_lease
from kme_dist.data.places import Place
from kme_dist.errors import AssumptionWarning, ConfigError, CorruptError, DataError, RetryError

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def stored(tmp_path):
    """20,000 rows in several chunks and shards."""
    random = np.random.default_rng(1)
    X, y = random.standard_normal((20_000, 16), dtype=np.float32), random.integers(0, 4, 20_000)
    return X, y, ingest((X, y), tmp_path / "d.zarr", chunk_bytes="64KiB", shard_bytes="1MiB", shuffle=2)


def test_rows_are_read_by_range_and_by_number(stored):
    X, y, data = stored
    order = data.row.read(0, len(data))
    for start, stop in [(0, 1), (1000, 1100), (1020, 1030), (5, 20_000), (20_000, 20_000)]:
        got_X, got_y = data.read_rows(start, stop)
        np.testing.assert_array_equal(got_X, X[order[start:stop]])
        np.testing.assert_array_equal(got_y, y[order[start:stop]])
    rows = np.array([19_999, 0, 5000, 0, 1023, 1024])
    np.testing.assert_array_equal(data.take(rows)[0], X[order[rows]])
    with pytest.raises(DataError, match="20000"):
        data.read_rows(0, 20_001)
    with pytest.raises(DataError, match="must be from 0 to"):
        data.take(np.array([-1]))


def test_a_data_set_travels_as_its_address(stored):
    copy = pickle.loads(pickle.dumps(stored[2]))
    np.testing.assert_array_equal(copy.read_rows(7, 9)[0], stored[2].read_rows(7, 9)[0])
    assert len(pickle.dumps(stored[2])) < 500


@pytest.mark.chaos(9)
def test_every_kind_of_damage_names_the_chunk(stored):
    _, _, data = stored
    assert data.chunk_rows == 1024
    assert data.shard_rows == 16_384
    shard = data.place.path / "X" / "c" / "1" / "0"
    good = shard.read_bytes()
    flipped = bytearray(good)
    flipped[70_000] ^= 4  # in the second chunk of the second shard
    shard.write_bytes(flipped)
    with pytest.raises(CorruptError, match=r"chunk 17 of X \(rows 17408 to 18431, in X/c/1/0\)"):
        open_dataset(data.path).read_rows(17_500, 17_501)
    with pytest.raises(CorruptError, match="chunk 17 of X"):
        open_dataset(data.path).verify()
    open_dataset(data.path).read_rows(0, 17_000)  # the rest is still there

    shard.write_bytes(good[:-100])
    with pytest.raises(CorruptError, match="truncated"):
        open_dataset(data.path).read_rows(17_500, 17_501)
    shard.unlink()
    with pytest.raises(CorruptError, match=r"chunk 16 of X .*is missing"):
        open_dataset(data.path)
    shard.write_bytes(good)
    open_dataset(data.path).verify()


@pytest.mark.chaos(10)
def test_a_chunk_that_vanishes_after_opening_is_an_error_and_not_zeros(stored):
    data = stored[2]
    (data.place.path / "X" / "c" / "1" / "0").unlink()
    with pytest.raises(CorruptError, match="is missing"):
        data.read_rows(17_000, 17_010)


def test_values_changed_under_a_valid_checksum_are_found_by_digests(stored):
    import zarr

    data = stored[2]
    zarr.open_array(data.place.path / "X", mode="r+")[3000, 2] = 5.0
    data.read_rows(3000, 3001)
    with pytest.raises(CorruptError, match=r"chunk 2 of X .*digest"):
        open_dataset(data.path, verify=True).read_rows(3000, 3001)
    with pytest.raises(CorruptError, match=r"chunk 2 of X .*digest"):
        open_dataset(data.path).verify()


@pytest.mark.chaos(10)
def test_a_chunk_left_out_of_its_shard_is_an_error(stored):
    data = stored[2]
    shard = data.place.path / "X" / "c" / "0" / "0"
    raw = bytearray(shard.read_bytes())
    index = len(raw) - 4 - 16 * 16
    raw[index + 16 : index + 32] = b"\xff" * 16  # how Zarr marks a chunk that was never written
    raw[-4:] = google_crc32c.value(bytes(raw[index:-4])).to_bytes(4, "little")
    shard.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"chunk 1 of X .*is missing from its shard"):
        open_dataset(data.path).read_rows(1500, 1501)


def edit(data, change) -> None:
    path = data.place.path / "zarr.json"
    metadata = json.loads(path.read_text())
    del metadata["attributes"]["attributes_digest"]  # as data sets of the first days, which had none
    change(metadata["attributes"])
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.update(format_version=2), DataError, "version 2; this kme-dist reads versions 1 to 1"),
        (lambda a: a.update(format="else"), DataError, "is not a data set"),
        (lambda a: a.pop("rows"), CorruptError, "incomplete"),
        (lambda a: a.update(rows=10**9), CorruptError, "declare"),
        (lambda a: a["digests"]["X"].pop(), CorruptError, "19 digests for 20 chunks"),
    ],
)
def test_attributes_that_make_no_sense_are_refused(stored, change, error, message):
    edit(stored[2], change)
    with pytest.raises(error, match=message):
        open_dataset(stored[2].path).verify()


def test_a_changed_attribute_is_noticed_when_the_data_set_is_opened(stored):
    path = stored[2].place.path / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"]["feature_names"][0] = "another"
    path.write_text(json.dumps(metadata))
    with pytest.raises(CorruptError, match="do not match their digest"):
        open_dataset(stored[2].path)


def test_nothing_there_says_so(tmp_path):
    with pytest.raises(DataError, match="no data set exists here"):
        open_dataset(tmp_path / "none.zarr")


def test_version_1_still_opens():
    """The folder was written by the first release of the format; it must open for ever."""
    data = open_dataset(GOLDEN / "version-1.zarr")
    data.verify()
    X, y = data.read()
    np.testing.assert_array_equal(X[:, 0], np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(X[:, 1:], [[1, 0], [0, 1], [1, 0], [0, 1], [1, 0], [0, 1]])
    assert data.feature_names == ["size", "colour=blue", "colour=red"]
    assert [data.classes[k] for k in y] == ["no", "yes", "yes", "no", "no", "yes"]
    assert data.splits == {"train": ((0, 4),), "test": ((4, 6),)}


# ------------------------------------------------------------------------------------------------- append


def test_appended_rows_follow_and_everything_is_merged(tmp_path):
    random = np.random.default_rng(2)
    X, y = random.standard_normal((9000, 8), dtype=np.float32), np.arange(9000) % 3
    ingest((X[:3000], y[:3000]), tmp_path / "d.zarr", chunk_bytes="32KiB", shard_bytes="128KiB")
    for start, stop in [(3000, 3001), (3001, 6000), (6000, 9000)]:
        data = append(tmp_path / "d.zarr", (X[start:stop], y[start:stop]))
        assert data.rows == stop
        data.verify()
    whole = ingest((X, y), tmp_path / "whole.zarr", chunk_bytes="32KiB", shard_bytes="128KiB")
    np.testing.assert_array_equal(data.read()[0], X)
    np.testing.assert_array_equal(data.read()[1], y)
    assert data.attributes["digests"] == whole.attributes["digests"]
    assert data.class_counts == whole.class_counts
    np.testing.assert_allclose(data.statistics.variance, whole.statistics.variance, rtol=1e-12)
    np.testing.assert_array_equal(data.statistics.maximum, whole.statistics.maximum)
    assert [entry["rows"] for entry in data.attributes["appended"]] == [1, 2999, 3000]


def test_an_open_reader_survives_an_append(tmp_path):
    X = np.round(np.random.default_rng(0).standard_normal((3000, 8))).astype(np.float32)
    ingest(X, tmp_path / "d.zarr", compression="zstd")
    reader = open_dataset(tmp_path / "d.zarr", cache_bytes=0, verify=True)
    reader.read_rows(2900, 3000)
    append(tmp_path / "d.zarr", X[:500] + 1)
    np.testing.assert_array_equal(reader.read_rows(0, 3000)[0], X)
    assert reader.rows == 3000
    assert open_dataset(tmp_path / "d.zarr").rows == 3500


def test_an_append_that_fails_changes_nothing(tmp_path):
    table = pa.table({"a": [1.0, 2.0, 3.0], "c": ["u", "v", "u"], "y": ["p", "q", "p"]})
    ingest(table, tmp_path / "d.zarr", label="y")
    before = open_dataset(tmp_path / "d.zarr").attributes
    bad_class = pa.table({"a": [4.0, 5.0], "c": ["u", "v"], "y": ["p", "new"]})
    with pytest.raises(DataError, match="row 1, column 'y': the class 'new' is unknown"):
        append(tmp_path / "d.zarr", bad_class)
    with pytest.raises(DataError, match="row 0, column 'c': the category 'w'"):
        append(tmp_path / "d.zarr", pa.table({"a": [4.0], "c": ["w"], "y": ["p"]}))
    with pytest.raises(DataError, match="'c' is missing"):
        append(tmp_path / "d.zarr", pa.table({"a": [4.0], "y": ["p"]}))
    with pytest.raises(ConfigError, match="label cannot be set"):
        append(tmp_path / "d.zarr", table, label="c")
    data = open_dataset(tmp_path / "d.zarr")
    assert data.attributes == before
    data.verify()
    appended = append(tmp_path / "d.zarr", pa.table({"y": ["q"], "c": ["v"], "a": [9.0]}))
    np.testing.assert_array_equal(appended.read_rows(3, 4)[0], [[9, 0, 1]])
    assert appended.read_rows(3, 4)[1] == [1]


@pytest.mark.parametrize("form", ["csv", "parquet", "arrays", "frame"])
@pytest.mark.parametrize("where", ["disk", "store"])
def test_an_append_that_is_repeated_adds_its_rows_once(tmp_path, request, form, where):
    """As after a kill between its commit and its last words."""
    X, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
    new = pd.DataFrame({"a": [9.0, 8.0], "b": [7.0, 6.0], "y": [1, 0]})
    dest = tmp_path / "d.zarr" if where == "disk" else f"{request.getfixturevalue('bucket')}/d.zarr"
    ingest(pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": y}) if form != "arrays" else (X, y), dest, label="y")
    source: object = tmp_path / f"new.{form}"
    if form == "csv":
        new.to_csv(source, index=False)
    elif form == "parquet":
        new.to_parquet(source)
    else:
        source = new if form == "frame" else (new[["a", "b"]].to_numpy(), new["y"].to_numpy())
    first = append(dest, source)
    with pytest.warns(AssumptionWarning, match=r"2 rows were already appended to .*nothing was appended now.*--again"):
        repeated = append(dest, source)
    assert repeated.rows == 6
    assert repeated.attributes == first.attributes
    repeated.verify()
    assert append(dest, source, again=True).rows == 8
    append(dest, (X[:1], y[:1]) if form == "arrays" else pd.DataFrame({"a": [1.0], "b": [2.0], "y": [1]}))
    data = append(dest, source)  # not the last one any more
    assert data.rows == 11
    data.verify()


def test_other_rows_another_source_or_split_are_no_repetition(tmp_path):
    (tmp_path / "a.csv").write_text("a,y\n1,p\n2,q\n")
    data = ingest(tmp_path / "a.csv", tmp_path / "d.zarr", label="y", split="train=0.5,test=0.5")
    assert data.append(tmp_path / "a.csv", split="train").rows == 4  # the ingest was no append
    assert data.append(tmp_path / "a.csv", split="test").rows == 6
    (tmp_path / "b.csv").write_text("a,y\n1,p\n2,q\n")
    assert data.append(tmp_path / "b.csv", split="test").rows == 8
    (tmp_path / "b.csv").write_text("a,y\n1,p\n2,p\n")
    assert data.append(tmp_path / "b.csv", split="test").rows == 10
    open_dataset(tmp_path / "d.zarr").verify()


def test_appended_rows_are_split_by_the_same_rule(tmp_path):
    who = np.arange(2000) % 50
    table = pa.table({"x": np.arange(2000.0), "who": who, "y": who % 2})
    data = ingest(table.slice(0, 1000), tmp_path / "d.zarr", label="y", split="train=0.6,test=0.4", split_key="who")
    data = append(tmp_path / "d.zarr", table.slice(1000))
    rows = data.row.read(0, 2000)
    sides = {name: {who[r] for a, b in ranges for r in rows[a:b]} for name, ranges in data.splits.items()}
    assert sides["train"].isdisjoint(sides["test"])
    assert len(data.splits["train"]) == 2
    assert data.split_rows("train") + data.split_rows("test") == 2000
    train = data.read("train")[0]
    np.testing.assert_allclose(data.split_statistics("train").mean, train.mean(axis=0))
    forced = append(tmp_path / "d.zarr", table.slice(0, 10), split="test")
    assert forced.splits["test"][-1] == (2000, 2010)


def test_shuffled_data_no_longer_count_as_shuffled_after_an_append(stored):
    X, y, data = stored
    assert data.shuffled == 2
    assert data.append((X[:10], y[:10])).shuffled is None


def test_the_second_writer_is_refused(stored):
    data = stored[2]
    with writer_lease(Place.of(data.path)):
        with pytest.raises(RetryError, match="another writer is at work"):
            data.append((stored[0][:10], stored[1][:10]))
        with pytest.raises(RetryError, match="another writer is at work"):
            ingest((stored[0], stored[1]), data.path, overwrite=True)
    data.verify()


@pytest.mark.chaos(8)
def test_leftovers_of_a_dead_writer_are_swept(stored, tmp_path):
    litter = tmp_path / ".e.zarr.0123.partial"
    shutil.copytree(stored[2].place.path, litter)
    ingest((stored[0], stored[1]), tmp_path / "e.zarr")
    assert not litter.exists()


# ------------------------------------------------------------------------------------------ object stores


class TestObjectStore:
    def test_the_same_data_set_as_on_disk(self, bucket, stored):
        X, y, local = stored
        data = ingest((X, y), f"{bucket}/sets/d.zarr", chunk_bytes="64KiB", shard_bytes="1MiB", shuffle=2)
        assert data.attributes["digests"] == local.attributes["digests"]
        data.verify()
        np.testing.assert_array_equal(data.read_rows(900, 2100)[0], local.read_rows(900, 2100)[0])
        copy = pickle.loads(pickle.dumps(data))
        np.testing.assert_array_equal(copy.take(np.array([5, 19_000]))[0], local.take(np.array([5, 19_000]))[0])
        again = ingest(f"{bucket}/sets/d.zarr", f"{bucket}/sets/e.zarr")
        np.testing.assert_array_equal(again.read()[0], local.read()[0])
        more = append(f"{bucket}/sets/d.zarr", (X[:100], y[:100]))
        more.verify()
        assert more.rows == 20_100
        assert not any(key.endswith(".lease") for key in Place.of(f"{bucket}/sets").sizes())

    def test_damage_is_named_there_too(self, bucket, stored):
        data = ingest((stored[0], stored[1]), f"{bucket}/d.zarr", chunk_bytes="64KiB", shard_bytes="1MiB")
        raw = bytearray(data.place.read("X/c/0/0"))
        raw[100] ^= 1
        data.place.write("X/c/0/0", bytes(raw))
        with pytest.raises(CorruptError, match="chunk 0 of X"):
            open_dataset(data.path).read_rows(0, 10)
        data.place.write("X/c/0/0", bytes(raw[:1000]))
        with pytest.raises(CorruptError):
            open_dataset(data.path).read_rows(0, 10)
        data.place.delete("X/c/0/0")
        with pytest.raises(CorruptError, match=r"chunk 0 of X .*missing"):
            open_dataset(data.path)

    def test_a_failed_ingest_leaves_nothing_that_opens(self, bucket):
        X = np.ones((5000, 4), np.float32)
        X[4999, 2] = np.nan
        with pytest.raises(DataError, match="row 4999"):
            ingest(X, f"{bucket}/d.zarr", chunk_bytes="8KiB", shard_bytes="16KiB", block_bytes=1000)
        assert Place.of(bucket).sizes() == {}
        with pytest.raises(DataError, match="no data set exists here"):
            open_dataset(f"{bucket}/d.zarr")

    def test_refused_credentials_are_a_clear_line(self, bucket, monkeypatch):
        ingest(np.ones((10, 2), np.float32), f"{bucket}/d.zarr")
        with monkeypatch.context() as patch:
            # From the first request on the server verifies signatures, and knows no user "testing".
            patch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
            with pytest.raises(ConfigError, match=r"rejected the credentials.*AWS_ACCESS_KEY_ID") as caught:
                open_dataset(f"{bucket}/d.zarr")
        assert "\n" not in str(caught.value)
        open_dataset(f"{bucket}/d.zarr").verify()

    def test_an_overwrite_that_fails_keeps_the_old_one(self, bucket):
        X = np.random.default_rng(0).standard_normal((3000, 4), dtype=np.float32)
        ingest(X, f"{bucket}/d.zarr")
        bad = X.copy()
        bad[2999, 0] = np.nan
        with pytest.raises(DataError, match="row 2999"):
            ingest(bad, f"{bucket}/d.zarr", overwrite=True)
        np.testing.assert_array_equal(open_dataset(f"{bucket}/d.zarr").read()[0], X)
        ingest(X[:100], f"{bucket}/d.zarr", overwrite=True).verify()
        assert open_dataset(f"{bucket}/d.zarr").rows == 100
        assert all(key.startswith("d.zarr/") for key in Place.of(bucket).sizes())
