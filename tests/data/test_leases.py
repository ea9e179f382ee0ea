"""Leases of both kinds: alive while the counter advances, taken over when it does not, and the loser is told."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import types
from contextlib import ExitStack

import numpy as np
import pytest

from kme_dist.data import append as append_module
from kme_dist.data import leases, store
from kme_dist.data.append import append
from kme_dist.data.cluster import _store_window
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import _staging, ingest
from kme_dist.data.leases import EpochLease, LeaseLost, WriterLease, latest_epoch, writer_lease
from kme_dist.data.places import Place
from kme_dist.data.readers import FileOptions
from kme_dist.data.writer import ChunkLayout
from kme_dist.errors import RetryError


def test_a_stalled_writer_is_told_that_another_took_over(bucket):
    place, home = Place.of(f"{bucket}/m.zarr"), Place.of(bucket)
    with writer_lease(place, beat_s=600) as check:  # the next beat never comes: to others it has stalled
        check()
        with writer_lease(place, beat_s=0.02) as second:
            second()
            with pytest.raises(RetryError, match="took over because this process had stalled"):
                check()
        home.write("m.zarr.lease", b"{}")
    assert home.read("m.zarr.lease") == b"{}", "that of a third one, who needs it"


def test_a_writer_that_was_replaced_notices_at_its_next_beat_and_leaves_the_lease_alone(bucket):
    place, home = Place.of(f"{bucket}/m.zarr"), Place.of(bucket)
    lease = WriterLease(place, beat_s=0.05)
    assert lease.acquire(0.0)
    with lease:
        home.write("m.zarr.lease", json.dumps({"holder": "another"}).encode())
        assert lease._renewal_refused.wait(timeout=60)
    assert json.loads(home.read("m.zarr.lease")) == {"holder": "another"}


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_driver_whose_counter_stands_is_replaced_and_one_whose_counter_advances_is_not(bucket, tmp_path, where):
    place = Place.of(tmp_path if where == "disk" else f"{bucket}/job")
    other = {"holder": "another host", "machine": "elsewhere", "process": 1, "counter": 7, "beat_s": 0.02}
    place.write("lease/000003.json", json.dumps(other).encode())
    with EpochLease.take(place, beat_s=0.02) as lease:
        assert lease.epoch == 4
        with pytest.raises(RetryError, match="another driver is at work there"):
            EpochLease.take(place, beat_s=0.02)
    assert latest_epoch(place)[0] == 4
    assert latest_epoch(place)[1]["released"] is True


def test_what_is_on_disk(tmp_path, bucket):
    place = Place.of(tmp_path)
    with EpochLease.take(place, holder="me") as lease:
        _, record = latest_epoch(place)
        assert set(record) == {"holder", "machine", "process", "counter", "beat_s", "progress"}
        lease.begin(2)
        lease.epoch = 1
        with pytest.raises(LeaseLost, match="epoch 2 has begun; me has lost the lease"):
            lease.check()
    store = Place.of(f"{bucket}/m.zarr")
    with writer_lease(store):
        assert set(json.loads(Place.of(bucket).read("m.zarr.lease"))) == {"holder", "token", "counter"}


def test_of_two_that_saw_the_same_expired_lease_one_takes_it_over(bucket):
    place, home = Place.of(f"{bucket}/m.zarr"), Place.of(bucket)
    home.write("m.zarr.lease", json.dumps({"holder": "one that died"}).encode())
    first, second = WriterLease(place, "first"), WriterLease(place, "second")
    seen = first._observe(), second._observe()
    assert seen[0] == seen[1]
    assert [first._claim(seen[0]), second._claim(seen[1])] == [True, False]
    first.check()
    with pytest.raises(RetryError, match="took over"):
        second.check()
    assert not second._renew()
    assert json.loads(home.read("m.zarr.lease"))["holder"] == "first"


def test_a_renewal_does_not_take_the_lease_back_from_another(bucket):
    """Also if the other one came right after the last renewal."""
    place, home = Place.of(f"{bucket}/m.zarr"), Place.of(bucket)
    lease = WriterLease(place)
    assert lease.acquire(0.0)
    assert lease._renew()
    home.write("m.zarr.lease", json.dumps({"holder": "another"}).encode())
    assert not lease._renew()
    assert not lease._renew()
    assert json.loads(home.read("m.zarr.lease")) == {"holder": "another"}


def test_a_lease_that_is_gone_is_lost(bucket):
    lease = WriterLease(Place.of(f"{bucket}/m.zarr"))
    assert lease.acquire(0.0)
    Place.of(bucket).delete("m.zarr.lease")
    with pytest.raises(RetryError, match="took over because this process had stalled"):
        lease.check()


@pytest.mark.parametrize("created_again", [False, True])
def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_a_lock(tmp_path, monkeypatch, created_again):
    """The previous holder removes its file between our opening it and our locking it; another may create the next."""
    place, path = Place.of(tmp_path / "m.zarr"), tmp_path / ".m.zarr.lock"
    calls = []

    def flock(descriptor, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
            if created_again:
                path.touch()
        fcntl.flock(descriptor, how)

    patched = types.SimpleNamespace(flock=flock, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr(leases, "fcntl", patched)
    with writer_lease(place):
        assert len(calls) == 2, "locked again"
        assert str(os.getpid()) in path.read_text()
        with (
            pytest.raises(RetryError, match=f"another writer is at work there .process {os.getpid()}"),
            writer_lease(place),
        ):
            pass
    assert os.listdir(tmp_path) == []


# --- a process that stalls while it writes to an object store, and wakes up when another is at work, or done ----------

SMALL = {"chunk_bytes": 4096, "shard_bytes": 8192, "block_bytes": 4096}


@pytest.fixture
def stalled(monkeypatch):
    """A function: `what()` is done by another process while this one stalls, at the first progress of its work."""
    monkeypatch.setattr(WriterLease, "default_beat_s", 600)  # the next beat never comes

    def while_stalled(what):
        def progress(*_):
            if not happened:
                happened.append(True)
                with monkeypatch.context() as patch:
                    patch.setattr(WriterLease, "default_beat_s", 0.02)
                    what()

        happened = []
        return progress

    return while_stalled


def rows(value, count=3000):
    return np.full((count, 4), value, np.float32)


def check_rows(path, expected):
    found = open_dataset(path)
    found.verify()
    np.testing.assert_array_equal(found.read()[0], expected)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
def test_an_ingest_that_was_replaced_leaves_the_data_set_of_its_successor(bucket, stalled, earlier, interrupted):
    place = f"{bucket}/sets/d.zarr"
    if earlier:
        ingest(rows(0), place, **SMALL)

    def other():
        ingest(rows(2), place, overwrite=True, **SMALL)
        if interrupted:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if interrupted else RetryError):
        ingest(rows(1), place, overwrite=True, progress=stalled(other), **SMALL)
    check_rows(place, rows(2))
    assert all(key.startswith("d.zarr/") for key in Place.of(f"{bucket}/sets").sizes())


def test_an_ingest_that_was_replaced_leaves_what_its_successor_is_writing(bucket, stalled):
    place = Place.of(f"{bucket}/d.zarr")
    ingest(rows(0), place, **SMALL)
    with ExitStack() as second:

        def other():
            held = second.enter_context(writer_lease(place))
            target, _ = second.enter_context(_staging(place, None, held))
            target.write("X/c/0/0", b"of the successor")
            target.write("zarr.json", b"{}")

        with pytest.raises(RetryError, match="took over because this process had stalled"):
            ingest(rows(1), place, overwrite=True, progress=stalled(other), **SMALL)
    assert place.read("X/c/0/0") == b"of the successor"


def test_an_ingest_that_stalls_before_its_first_shard_deletes_nothing(bucket, stalled, monkeypatch):
    place = f"{bucket}/d.zarr"
    first = stalled(lambda: ingest(rows(2), place, **SMALL))
    real = _staging.__init__

    def slowly(self, *arguments):
        real(self, *arguments)
        first()

    monkeypatch.setattr(_staging, "__init__", slowly)
    with pytest.raises(RetryError, match="took over because this process had stalled"):
        ingest(rows(1), place, **SMALL)
    check_rows(place, rows(2))


def test_an_ingest_that_stalls_before_it_moves_the_new_data_set_replaces_nothing(bucket, stalled, monkeypatch):
    place = f"{bucket}/d.zarr"
    ingest(rows(0), place, **SMALL)
    first = stalled(lambda: ingest(rows(2), place, overwrite=True, **SMALL))
    real = Place.move_objects

    def slowly(self, *arguments):
        first()
        real(self, *arguments)

    monkeypatch.setattr(Place, "move_objects", slowly)
    with pytest.raises(RetryError, match="took over because this process had stalled"):
        ingest(rows(1), place, overwrite=True, **SMALL)
    check_rows(place, rows(2))


def test_what_a_dead_writer_left_in_a_store_is_swept(bucket):
    home = Place.of(f"{bucket}/sets")
    home.write(".d.zarr.0123abcd.partial/X/c/0/0", b"left")
    home.write(".d.zarr.e.0123abcd.partial/X/c/0/0", b"of d.zarr.e, whose writer lives")
    ingest(rows(1), f"{bucket}/sets/d.zarr", **SMALL)
    assert {key for key in home.sizes() if not key.startswith("d.zarr/")} == {".d.zarr.e.0123abcd.partial/X/c/0/0"}


def test_an_append_that_was_replaced_leaves_the_rows_of_its_successor(bucket, stalled):
    place = f"{bucket}/d.zarr"
    ingest(rows(0, 1000), place, **SMALL)
    other = stalled(lambda: append(place, rows(2, 700)))
    with pytest.raises(RetryError, match="took over because this process had stalled"):
        append(place, rows(1, 900), progress=other)
    check_rows(place, np.concatenate([rows(0, 1000), rows(2, 700)]))


def test_an_append_that_stalls_before_its_last_step_declares_no_rows(bucket, stalled, monkeypatch):
    place = Place.of(f"{bucket}/d.zarr")
    ingest(rows(0, 1000), place, **SMALL)
    first = stalled(lambda: ingest(rows(2, 100), place, overwrite=True, **SMALL))
    real = append_module.IngestPlan.run

    def slowly(self, *arguments):
        real(self, *arguments)
        if self.source.rows == 900:
            first()

    monkeypatch.setattr(append_module.IngestPlan, "run", slowly)
    with pytest.raises(RetryError, match="took over because this process had stalled"):
        append(place, rows(1, 900))
    assert json.loads(place.read("X/zarr.json"))["shape"] == [100, 4]
    check_rows(place, rows(2, 100))


def test_a_worker_is_told_too(bucket, tmp_path):
    place = Place.of(f"{bucket}/d.zarr")
    np.save(tmp_path / "rows.npy", rows(1, 512))
    with writer_lease(place, beat_s=600) as held:
        sent = pickle.loads(pickle.dumps(held))
        sent()
        schema = ingest(rows(1, 8), tmp_path / "example.zarr").schema
        origin, layout = (str(tmp_path / "rows.npy"), FileOptions()), ChunkLayout(256, 512, False)
        _store_window(origin, schema, place.address, layout, sent, (0, 512))
        Place.of(bucket).delete("d.zarr/X/c/0/0")
        with writer_lease(place, beat_s=0.02), pytest.raises(RetryError, match="took over"):
            _store_window(origin, schema, place.address, layout, sent, (0, 512))
    assert Place.of(bucket).sizes() == {}


def test_saved_arrays_of_a_successor_are_not_overwritten(bucket, stalled, monkeypatch):
    place = f"{bucket}/m.zarr"
    first = stalled(lambda: store.save_arrays(place, {"none": np.zeros(0), "one": np.full(3, 2.0)}, {}))
    real = store.create_array

    def slowly(where, name, *arguments, **options):
        made = real(where, name, *arguments, **options)
        if name == "none":
            first()
        return made

    monkeypatch.setattr(store, "create_array", slowly)
    with pytest.raises(RetryError, match="took over because this process had stalled"):
        store.save_arrays(place, {"none": np.zeros(0), "one": np.full(3, 1.0)}, {})
    np.testing.assert_array_equal(store.load_arrays(place)[0]["one"], np.full(3, 2.0))
