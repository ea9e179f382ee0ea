"""Leases of both kinds: alive while the counter advances, taken over when it does not, and the loser is told."""

from __future__ import annotations

import json

import pytest

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
