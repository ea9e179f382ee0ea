"""A process that dies at a named place, or finds its disk full there: the same command resumes to the same bytes."""

from __future__ import annotations

import signal

import pytest
from small_job import FIT, INGEST, LEARN, NIGHTLY

from kme_dist.failpoints import PLACES

# The command that passes each place, the command before it, what it takes from a run without a fault, and its results.
STAGES = {
    "ingest": (INGEST, None, (), ("new.zarr",)),
    "learn": (LEARN, None, (), ("model/learned.zarr",)),
    "fit": (FIT, LEARN, (), ("model/model.zarr",)),
    "night": (NIGHTLY, None, ("model",), ("scores.zarr",)),
}
# Where a process of that stage is when the fault comes. Places of leases are passed by every stage.
PASSED = [
    ("ingest", "ingest.before_shard"),
    ("ingest", "ingest.after_shard"),
    ("ingest", "commit.before_data_set"),
    ("ingest", "lease.after_claim"),
    ("learn", "learn.before_batch@3"),
    ("learn", "learn.after_step@3"),
    ("learn", "commit.before_arrays@2"),
    ("learn", "commit.after_arrays@2"),
    ("learn", "lease.before_release"),
    ("fit", "fit.before_part"),
    ("fit", "commit.before_arrays"),
    ("fit", "commit.after_arrays"),
    ("night", "predict.before_chunk@3"),
    ("night", "predict.after_chunk@3"),
    ("night", "predict.after_receipt@3"),
    ("night", "predict.after_publish@3"),
    ("night", "commit.before_manifest"),
    ("night", "commit.before_state"),
    ("night", "commit.after_state"),
    ("night", "job.before_run"),
    ("night", "job.before_result"),
    ("night", "job.after_result"),
]
ROWS = {"ingest": 1, "learn": 2, "fit": 3, "night": 4}


CASES = [
    pytest.param(stage, place, marks=pytest.mark.chaos(ROWS[stage], 7), id=f"{stage}-{place}")
    for stage, place in PASSED
]


def prepared(folder, quiet, stage):
    command, before, taken, results = STAGES[stage]
    assert before is None or folder.run(*before) == 0, folder.output
    folder.take_over(quiet, *taken)
    return command, results


@pytest.mark.parametrize(("stage", "place"), CASES)
def test_a_process_killed_there_is_resumed_to_the_same_bytes(folder, quiet, stage, place):
    command, results = prepared(folder, quiet, stage)
    assert folder.run(*command, faults=f"{place}:kill") == -signal.SIGKILL, folder.output
    assert folder.happened(place)
    assert folder.run(*command) == 0, folder.output
    assert folder.bytes_below(*results) == quiet.bytes_below(*results)
    leftovers = [path.name for path in folder.path.rglob("*.partial")]
    assert not leftovers, "what a dead process had begun is swept by the next"


WRITES = [
    (stage, place)
    for stage, place in PASSED
    if place.startswith(("ingest", "commit", "predict.after", "job.after")) and place != "commit.after_state"
]


@pytest.mark.slow
@pytest.mark.chaos(8, 11)
@pytest.mark.parametrize(("stage", "place"), WRITES, ids=lambda value: value)
def test_a_disk_that_is_full_there_means_try_again(folder, quiet, stage, place):
    command, results = prepared(folder, quiet, stage)
    code = folder.run(*command, faults=f"{place}:raise=ENOSPC")
    assert folder.happened(place)
    if code:  # a job tries again by itself, and may have succeeded
        assert code == 75, folder.output
        assert "no space left" in folder.output
        assert folder.run(*command) == 0, folder.output
    assert folder.bytes_below(*results) == quiet.bytes_below(*results)


@pytest.mark.chaos(4, 7)
def test_a_process_killed_in_the_thread_of_its_heartbeats_is_resumed_to_the_same_bytes(folder, quiet):
    command, results = prepared(folder, quiet, "night")
    faults = "predict.before_chunk@2:hang=100,lease.before_beat:kill"
    assert folder.run(*command, faults=faults) == -signal.SIGKILL, folder.output
    assert folder.happened("lease.before_beat")
    assert folder.run(*command) == 0, folder.output
    assert folder.bytes_below(*results) == quiet.bytes_below(*results)


def test_all_places_that_one_process_passes_are_here():
    """The others need workers, or an object store."""
    here = {place.partition("@")[0] for _, place in PASSED}
    assert set(PLACES) - here == {"fit.before_combine", "lease.before_beat"}
