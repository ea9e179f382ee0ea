"""Saved arrays: all of it or none of it, checked before it is believed, never code."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import zarr

import kme_dist
from kme_dist.data import store
from kme_dist.data.append import append
from kme_dist.data.places import Place
from kme_dist.data.store import check_replaceable, create_array, load_arrays, save_arrays, sweep
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError

ARRAYS = {
    "weights": np.linspace(0, 1, 30, dtype=np.float32).reshape(10, 3),
    "part/0": np.arange(7),
    "part/1": np.array([True, False]),
    "scalar": np.float64(3.5),
    "empty": np.zeros((0, 4), np.float32),
    "codes": np.array([0, 255], np.uint8),
}


def same(left, right):
    assert set(left) == set(right)
    for name, array in left.items():
        other = np.asarray(right[name])
        assert array.dtype == other.dtype
        assert array.shape == other.shape
        np.testing.assert_array_equal(array, other)


def test_what_was_saved_is_loaded(tmp_path):
    save_arrays(tmp_path / "m.zarr", ARRAYS, {"kind": "model", "numbers": np.arange(3), "score": np.float32(0.5)})
    arrays, attributes = load_arrays(tmp_path / "m.zarr")
    same(arrays, ARRAYS)
    assert attributes == {"format": "kme-dist/arrays", "kind": "model", "numbers": [0, 1, 2], "score": 0.5}
    assert os.listdir(tmp_path) == ["m.zarr"], "nothing but the group may stay behind"


def test_arrays_come_back_in_the_memory_order_they_had(tmp_path):
    rows = np.arange(12.0).reshape(3, 4)
    saved = {
        "rows": rows,
        "columns": np.asfortranarray(rows),
        "part/columns": np.arange(24, dtype=np.int32).reshape(2, 3, 4, order="F"),
        "one": np.ones((5, 1)),
        "line": np.arange(3.0),
        "number": np.float64(2),
        "steps": rows[:, ::2],
    }
    save_arrays(tmp_path / "a.zarr", saved, {"kind": "test"})
    found, attributes = load_arrays(tmp_path / "a.zarr")
    assert attributes == {"format": "kme-dist/arrays", "kind": "test"}
    for name, array in saved.items():
        np.testing.assert_array_equal(found[name], array)
        by_columns = name.endswith("columns")
        assert found[name].flags.f_contiguous or not by_columns
        assert found[name].flags.c_contiguous != by_columns
    # A group of before, without a note of the order, differs in nothing else.
    save_arrays(tmp_path / "b.zarr", {"rows": rows}, {})
    assert "by_columns" not in json.loads((tmp_path / "b.zarr" / "zarr.json").read_text())["attributes"]
    assert load_arrays(tmp_path / "b.zarr")[0]["rows"].flags.c_contiguous
    with pytest.raises(ConfigError, match="by_columns"):
        save_arrays(tmp_path / "c.zarr", {"rows": rows}, {"by_columns": []})


def test_any_zarr_library_reads_it(tmp_path):
    save_arrays(tmp_path / "m.zarr", ARRAYS, {})
    group = zarr.open_group(tmp_path / "m.zarr", mode="r")
    np.testing.assert_array_equal(group["weights"][:], ARRAYS["weights"])
    np.testing.assert_array_equal(group["part/0"][:], ARRAYS["part/0"])


def test_saving_again_replaces_the_whole(tmp_path):
    save_arrays(tmp_path / "m.zarr", ARRAYS, {})
    save_arrays(tmp_path / "m.zarr", {"one": np.ones(2)}, {})
    assert set(load_arrays(tmp_path / "m.zarr")[0]) == {"one"}
    assert not (tmp_path / "m.zarr" / "weights").exists()
    assert os.listdir(tmp_path) == ["m.zarr"]


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ConfigError, match="is not overwritten"):
        save_arrays(tmp_path / "photos", ARRAYS, {})
    save_arrays(tmp_path / "m.zarr", ARRAYS, {"format": "kme-dist/model"})
    with pytest.raises(ConfigError, match="kme-dist/model"):
        save_arrays(tmp_path / "m.zarr", ARRAYS, {"format": "kme-dist/checkpoint"})
    assert (tmp_path / "photos" / "cat.jpg").exists()
    load_arrays(tmp_path / "m.zarr")


def test_a_missing_path_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.zarr/zarr\.json"):
        load_arrays(tmp_path / "nowhere.zarr")


@pytest.mark.parametrize("name", ["a/b/c", "../a", "", "a/", "c", "x/.."])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="invalid array name"):
        save_arrays(tmp_path / "m.zarr", {name: np.ones(2)}, {})


def test_texts_and_objects_are_refused(tmp_path):
    for bad in (np.array(["a"]), np.array([{}], dtype=object)):
        with pytest.raises(ConfigError, match="numbers and booleans"):
            save_arrays(tmp_path / "m.zarr", {"a": bad}, {})
    with pytest.raises(ConfigError, match="JSON"):
        save_arrays(tmp_path / "m.zarr", {}, {"score": float("nan")})
    assert os.listdir(tmp_path) == []


def test_every_single_flipped_byte_is_noticed(tmp_path):
    save_arrays(tmp_path / "m.zarr", {"a": np.arange(16, dtype=np.float32)}, {})
    path = tmp_path / "m.zarr" / "a" / "c" / "0"
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CorruptError, match="chunk 0 of a"):
            load_arrays(tmp_path / "m.zarr")
    path.write_bytes(good[:-3])
    with pytest.raises(CorruptError):
        load_arrays(tmp_path / "m.zarr")
    path.unlink()
    with pytest.raises(CorruptError, match="declare 64 bytes but 0 are stored"):
        load_arrays(tmp_path / "m.zarr")


def test_swapped_values_with_a_valid_checksum_are_noticed_by_the_digest(tmp_path):
    save_arrays(tmp_path / "m.zarr", {"a": np.arange(4.0)}, {})
    zarr.open_array(tmp_path / "m.zarr" / "a", mode="r+")[0] = 9.0
    with pytest.raises(CorruptError, match="digest"):
        load_arrays(tmp_path / "m.zarr")


def edit_metadata(path: Path, change) -> None:
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m.update(zarr_format=2), CorruptError, "format 3"),
        (lambda m: m.update(data_type="r16"), CorruptError, "r16"),
        (lambda m: m.update(codecs=[{"name": "pickle"}]), CorruptError, "pickle"),
        (lambda m: m.update(codecs=[*m["codecs"], {"name": "numcodecs.pickle"}]), CorruptError, "pickle"),
        (lambda m: m.update(shape=[10**12, 3]), CorruptError, "declare"),
        (lambda m: m["chunk_grid"]["configuration"].update(chunk_shape=[10**12, 3]), CorruptError, "declare"),
        (lambda m: m.update(shape=[-1, 3]), CorruptError, "incomplete"),
        (lambda m: m.pop("codecs"), CorruptError, "incomplete"),
    ],
)
def test_metadata_outside_the_allow_list_are_refused_before_reading(tmp_path, change, error, message):
    save_arrays(tmp_path / "m.zarr", ARRAYS, {})
    edit_metadata(tmp_path / "m.zarr" / "weights" / "zarr.json", change)
    with pytest.raises(error, match=message):
        load_arrays(tmp_path / "m.zarr")


def test_a_changed_attribute_is_damage(tmp_path):
    attributes = {"length_scale": [0.5, 2.0], 2: "b", 10: "a"}
    save_arrays(tmp_path / "m.zarr", ARRAYS, attributes)
    load_arrays(tmp_path / "m.zarr")
    edit_metadata(tmp_path / "m.zarr" / "zarr.json", lambda m: m["attributes"].update(length_scale=[9.5, 2.0]))
    with pytest.raises(CorruptError, match="do not match their digest"):
        load_arrays(tmp_path / "m.zarr")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"kme-dist/', '"kmd-dist/'), ('"format"', '"fprmat"'), ('"attributes":', '"attributfs":'), ('"group"', '"grouq"'),
     ('"zarr_format": 3', '"zarr_format": 2'), ('"zarr_format"', '"zarr_fprmat"')],
)  # fmt: skip
def test_a_damaged_name_in_metadata_of_ours_is_damage(tmp_path, old, new):
    save_arrays(tmp_path / "a.zarr", {"x": np.arange(5.0)}, {"note": "this"})
    kme_dist.ingest((np.ones((4, 2)), np.array([0, 1, 0, 1])), tmp_path / "rows.zarr")
    for name, opened in (("a.zarr", load_arrays), ("rows.zarr", kme_dist.open_dataset)):
        path = tmp_path / name / "zarr.json"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(CorruptError):
            opened(tmp_path / name)


def test_groups_of_somebody_else_are_not_damaged(tmp_path):
    zarr.create_group(tmp_path / "other.zarr", zarr_format=3, attributes={"format": "kmd-dist/arrays", "digests": {}})
    save_arrays(tmp_path / "a.zarr", {"x": np.arange(5.0)}, {})
    with pytest.raises(DataError):
        load_arrays(tmp_path / "other.zarr")
    for name in ("other.zarr", "a.zarr"):
        with pytest.raises(DataError, match="not a data set"):
            kme_dist.open_dataset(tmp_path / name)


def test_without_the_store_client_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kme-dist\[s3\]'"):
        Place.of("s3://bucket/table.zarr")


def test_newer_and_foreign_groups_are_refused(tmp_path):
    save_arrays(tmp_path / "m.zarr", ARRAYS, {})
    edit_metadata(tmp_path / "m.zarr" / "zarr.json", lambda m: m["attributes"].update(format_version=99))
    with pytest.raises(DataError, match="version 99"):
        load_arrays(tmp_path / "m.zarr")
    zarr.open_group(tmp_path / "foreign.zarr", mode="w")
    with pytest.raises(DataError, match="not written by kme-dist"):
        load_arrays(tmp_path / "foreign.zarr")


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path, monkeypatch):
    from kme_dist.data.leases import writer_lease

    place = Place.of(tmp_path / "m.zarr")
    with writer_lease(place), pytest.raises(RetryError, match=f"process {os.getpid()}"), writer_lease(place):
        raise AssertionError("two writers at once")
    with writer_lease(place):
        pass
    assert os.listdir(tmp_path) == []


def test_a_killed_writer_leaves_the_old_group_and_no_lock(tmp_path):
    save_arrays(tmp_path / "m.zarr", {"a": np.zeros(4)}, {})
    code = textwrap.dedent(
        f"""
        import numpy as np
        from kme_dist.data import store
        def die(path):
            print("synced", flush=True)
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        store._sync_tree = die
        store.save_arrays({str(tmp_path / "m.zarr")!r}, {{"a": np.ones(4)}}, {{}})
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    np.testing.assert_array_equal(load_arrays(tmp_path / "m.zarr")[0]["a"], 0)
    save_arrays(tmp_path / "m.zarr", {"a": np.full(4, 2.0)}, {})
    np.testing.assert_array_equal(load_arrays(tmp_path / "m.zarr")[0]["a"], 2)
    assert os.listdir(tmp_path) == ["m.zarr"], "what the dead writer left is swept"


def test_a_kill_between_two_renames_loses_neither_version(tmp_path):
    """On file systems that cannot exchange two names, such as NFS."""
    save_arrays(tmp_path / "m.zarr", {"a": np.zeros(4)}, {})
    save_arrays(tmp_path / "m.zarr.b", {"a": np.ones(4)}, {})  # its staging area begins with the same name
    code = textwrap.dedent(
        f"""
        import os, signal
        import numpy as np
        from kme_dist.data import store
        store._exchange = lambda first, second: False
        rename = os.rename
        def die_at_the_second(old, new):
            if str(new).endswith("m.zarr"):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(old, new)
        os.rename = die_at_the_second
        store.save_arrays({str(tmp_path / "m.zarr")!r}, {{"a": np.ones(4)}}, {{}})
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "m.zarr").exists()
    shutil.copytree(tmp_path / "m.zarr.b", tmp_path / ".m.zarr.b.0123.partial")
    with pytest.raises(ConfigError, match="is not overwritten"):  # the next writer, whatever comes of it
        save_arrays(tmp_path / "m.zarr", ARRAYS, {"format": "kme-dist/model"})
    np.testing.assert_array_equal(load_arrays(tmp_path / "m.zarr")[0]["a"], 0)
    assert sorted(os.listdir(tmp_path)) == [".m.zarr.b.0123.partial", "m.zarr", "m.zarr.b"]


def test_a_refused_exchange_replaces_all_the_same_and_one_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_exchange", lambda first, second: False)
    save_arrays(tmp_path / "m.zarr", {"a": np.zeros(4)}, {})
    save_arrays(tmp_path / "m.zarr", {"b": np.ones(4)}, {})
    assert set(load_arrays(tmp_path / "m.zarr")[0]) == {"b"}
    assert os.listdir(tmp_path) == ["m.zarr"]
    rename, renamed = os.rename, []

    def fail_at_the_second(old, new):
        renamed.append(new)
        if len(renamed) == 2:
            raise OSError(errno.ESTALE, "stale file handle")
        rename(old, new)

    monkeypatch.setattr(store.os, "rename", fail_at_the_second)
    with pytest.raises(KMEError, match="stale file handle"):
        save_arrays(tmp_path / "m.zarr", {"other": np.ones(4)}, {})
    assert set(load_arrays(tmp_path / "m.zarr")[0]) == {"b"}
    assert os.listdir(tmp_path) == ["m.zarr"]


def test_what_was_set_aside_comes_back_only_where_nothing_is(tmp_path):
    (tmp_path / ".d.zarr.0a.aside.partial").mkdir()
    (tmp_path / ".d.zarr.0b.partial").mkdir()
    (tmp_path / "d.zarr").mkdir()
    (tmp_path / "d.zarr" / "new").touch()
    sweep(tmp_path / "d.zarr")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["d.zarr", "d.zarr/new"]


@pytest.mark.parametrize("how", ["ingest", "append"])
def test_an_ingest_and_an_append_find_the_data_set_that_was_set_aside(tmp_path, how):
    X = np.arange(20.0).reshape(10, 2)
    kme_dist.ingest(X, tmp_path / "d.zarr")
    os.rename(tmp_path / "d.zarr", tmp_path / ".d.zarr.0a.aside.partial")
    if how == "append":
        assert append(tmp_path / "d.zarr", X).rows == 20
        return
    with pytest.raises(ConfigError, match="a data set already exists"):
        kme_dist.ingest(X, tmp_path / "d.zarr")
    assert kme_dist.open_dataset(tmp_path / "d.zarr").rows == 10


def test_a_place_that_may_not_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, RetryError, DataError)) as caught:
        save_arrays(tmp_path / "file" / "m.zarr", ARRAYS, {})
    assert "file" in str(caught.value)


@pytest.mark.parametrize("address", ["ftp://x/y", "s3://", ""])
def test_unknown_addresses_are_refused(address):
    with pytest.raises(ConfigError):
        Place.of(address)


def test_file_addresses_are_local_paths(tmp_path):
    save_arrays(f"file://{tmp_path}/m.zarr", ARRAYS, {})
    same(load_arrays(tmp_path / "m.zarr")[0], ARRAYS)


class TestObjectStore:
    def test_what_was_saved_is_loaded(self, bucket):
        save_arrays(f"{bucket}/deep/m.zarr", ARRAYS, {"kind": "model"})
        arrays, attributes = load_arrays(f"{bucket}/deep/m.zarr")
        same(arrays, ARRAYS)
        assert attributes["kind"] == "model"
        save_arrays(f"{bucket}/deep/m.zarr", {"a": np.ones(3)}, {})
        assert set(load_arrays(f"{bucket}/deep/m.zarr")[0]) == {"a"}
        assert not any("weights" in key or "lease" in key for key in Place.of(f"{bucket}/deep").sizes())

    def test_a_cut_object_is_named(self, bucket):
        save_arrays(f"{bucket}/m.zarr", {"a": np.arange(8.0)}, {})
        place = Place.of(f"{bucket}/m.zarr")
        place.write("a/c/0", place.read("a/c/0")[:-1] + b"!")
        with pytest.raises(CorruptError, match="chunk 0 of a"):
            load_arrays(f"{bucket}/m.zarr")

    def test_nothing_there_and_no_bucket(self, bucket):
        with pytest.raises(DataError, match="nothing to load"):
            load_arrays(f"{bucket}/none.zarr")
        with pytest.raises(DataError, match="bucket"):
            save_arrays("s3://no-such-bucket-here/m.zarr", ARRAYS, {})

    def test_a_whole_bucket_is_no_group(self, bucket):
        with pytest.raises(ConfigError, match="name a path in it"):
            save_arrays(bucket, ARRAYS, {})

    def test_an_unreachable_store_says_try_again(self, bucket, monkeypatch):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("KME_STORE_RETRIES", "0")
        with pytest.raises(RetryError, match="could not be reached"):
            load_arrays(f"{bucket}/m.zarr")

    def test_arrays_of_a_writer_that_died_before_the_attributes_are_replaced(self, bucket):
        create_array(Place.of(f"{bucket}/m.zarr"), "old", (3,), np.dtype(np.float64), chunk_rows=3)
        save_arrays(f"{bucket}/m.zarr", {"new": np.ones(3)}, {})
        assert set(load_arrays(f"{bucket}/m.zarr")[0]) == {"new"}
        assert not Place.of(f"{bucket}/m.zarr").sizes("old")

    def test_a_live_lease_refuses_and_a_dead_one_is_taken_over(self, bucket):
        from kme_dist.data.leases import writer_lease

        place = Place.of(f"{bucket}/m.zarr")
        first, second = writer_lease(place, beat_s=0.05), writer_lease(place, beat_s=0.2)
        with first, pytest.raises(RetryError, match="another writer"), second:
            raise AssertionError("two writers at once")
        home = Place.of(bucket)
        home.write("m.zarr.lease", json.dumps({"holder": "the dead"}).encode())
        with writer_lease(place, beat_s=0.02):
            pass
        assert home.sizes() == {}


def test_files_that_go_while_a_folder_is_listed_are_left_out(tmp_path):
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "000001.json").write_text("{}")
    (tmp_path / "lease" / "gone").symlink_to(tmp_path / "nowhere")  # listed, and not there when its size is asked for
    assert Place.of(tmp_path).sizes("lease") == {"lease/000001.json": 2}


def test_nothing_is_there_to_be_replaced_in_an_absent_folder_and_an_empty_one_may_be(tmp_path):
    (tmp_path / "empty").mkdir()
    assert check_replaceable(Place.of(tmp_path / "empty"), "kme-dist/arrays") is True
    assert check_replaceable(Place.of(tmp_path / "absent"), "kme-dist/arrays") is False
