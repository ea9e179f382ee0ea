"""Objects on a local disk: whole or absent, and on the disk before anything relies on them."""

from __future__ import annotations

import os

import pytest

from kme_dist.data.places import Place


@pytest.fixture
def synced(monkeypatch):
    """What was synced, in order, each with the names in the folder at that moment."""
    calls, real = [], os.fsync

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        calls.append((os.path.isdir(path), sorted(name for name in os.listdir(folder) if not name.startswith("."))))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files are read from /proc")
@pytest.mark.parametrize("only_if_absent", [False, True])
def test_an_object_is_on_the_disk_before_it_has_its_name_and_its_name_before_we_return(
    tmp_path, synced, only_if_absent
):
    assert Place.of(tmp_path).write("key", b"content", only_if_absent=only_if_absent)
    assert synced == [(False, []), (True, ["key"])]
    assert (tmp_path / "key").read_bytes() == b"content"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files are read from /proc")
def test_objects_that_may_be_lost_by_a_power_failure_are_not_waited_for(tmp_path, synced):
    Place.of(tmp_path).write("key", b"content", sync=False)
    assert synced == []


def test_an_object_that_exists_is_kept_on_request(tmp_path):
    place = Place.of(tmp_path)
    assert place.write("key", b"first", only_if_absent=True)
    assert not place.write("key", b"second", only_if_absent=True)
    assert place.read("key") == b"first"
    assert os.listdir(tmp_path) == ["key"]


def test_a_moved_object_has_its_new_name_only_and_moving_it_again_does_nothing(tmp_path):
    place = Place.of(tmp_path)
    place.write("a/b", b"content")
    assert place.move("a/b", "c/d/e")
    assert not place.move("a/b", "c/d/e")
    assert place.sizes() == {"c/d/e": 7}


def test_everything_but_one_object_is_removed(tmp_path, bucket):
    for place in (Place.of(tmp_path / "x"), Place.of(f"{bucket}/x")):
        for key in ("kept", "other", "folder/kept", "folder/deep/other"):
            place.write(key, b"content")
        place.delete_below("folder/deep")
        assert sorted(place.sizes()) == ["folder/kept", "kept", "other"]
        place.delete_others("kept")
        assert sorted(place.sizes()) == ["kept"]


def test_a_version_is_compared_when_an_object_is_replaced(bucket):
    place = Place.of(bucket)
    first = place.compare_and_write("key", b"first", None)
    assert first == place.version("key")
    assert place.compare_and_write("key", b"another", None) is None, "it exists by now"
    second = place.compare_and_write("key", b"second", first)
    assert second not in (None, first)
    assert place.compare_and_write("key", b"late", first) is None
    place.delete("key")
    assert place.compare_and_write("key", b"late", second) is None, "it is gone"
    assert place.sizes() == {}
