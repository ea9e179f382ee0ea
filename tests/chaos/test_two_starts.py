"""The same job started twice, or taken over from a process that only seemed dead; in processes of their own."""

from __future__ import annotations

import os
import signal
import time

import pytest

import kme_dist as kme

pytestmark = pytest.mark.slow
COMMAND = ("predict", "--model", "model", "--data", "rows.zarr", "--quiet", "--out")


def wait_for(folder, place, process):
    while not folder.happened(place):
        assert process.poll() is None, folder.output
        time.sleep(0.05)


def values(path):
    found = kme.open_predictions(path)
    found.verify()
    assert found.status == "complete"
    return {name: found.read(name).tobytes() for name in found.names}


@pytest.fixture
def out(folder, quiet, bucket):
    folder.take_over(quiet, "model")
    return f"{bucket}/scores.zarr"


@pytest.fixture
def expected(folder, out):
    assert folder.run(*COMMAND, "alone.zarr") == 0, folder.output
    return values(folder.path / "alone.zarr")


@pytest.mark.chaos(15)
def test_a_second_start_in_an_object_store_is_told_to_try_again(folder, out, expected):
    first = folder.start(*COMMAND, out, faults="predict.before_chunk@2:hang")
    wait_for(folder, "predict.before_chunk", first)
    second = folder.start(*COMMAND, out)
    assert second.wait(timeout=200) == 75, folder.output
    assert "writer" in folder.output
    (folder.path / "markers" / "predict.before_chunk").unlink()
    assert first.wait(timeout=200) == 0
    assert values(out) == expected


@pytest.mark.chaos(15, 24)
def test_a_process_that_was_stopped_and_replaced_in_an_object_store_commits_nothing(folder, out, expected):
    first = folder.start(*COMMAND, out, faults="commit.before_manifest:hang")
    wait_for(folder, "commit.before_manifest", first)
    os.kill(first.pid, signal.SIGSTOP)
    began = time.monotonic()
    second = folder.start(*COMMAND, out)
    assert second.wait(timeout=250) == 0, folder.output
    print(f"taken over and completed {time.monotonic() - began:.1f} s after the first was stopped")
    before = values(out)
    (folder.path / "markers" / "commit.before_manifest").unlink()
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(timeout=100) == 75, folder.output
    assert values(out) == before == expected
