"""Leases of both kinds: alive while the counter advances, taken over when it does not, and the loser is told."""

from __future__ import annotations

import fcntl
import json
import os
import types

import pytest

from kme_dist.data import leases
from kme_dist.data.leases import EpochLease, LeaseLost, WriterLease, latest_epoch, writer_lease
from kme_dist.data.places import Place
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
    assert "m.zarr.lease" not in home.sizes()


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
