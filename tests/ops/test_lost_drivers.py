"""A driver that has lost its job to another, or to a person who cancelled it, commits nothing."""

from __future__ import annotations

import pytest

from kme_dist.config import parse_config
from kme_dist.data.leases import EpochLease, LeaseLost, begin_epoch, latest_epoch
from kme_dist.ops import driver, jobs, submit


@pytest.fixture
def job(tmp_path):
    config = parse_config({"data": {"source": "table.zarr"}})
    return jobs.create_job(tmp_path, pipeline="evaluate", config=config, name="nightly", job_id="nightly-1")


def test_the_result_of_a_driver_that_was_replaced_at_the_last_moment_does_not_count(job, monkeypatch):
    """Nothing else checks the lease in time: the pipeline reports no progress after that moment."""
    monkeypatch.setattr(driver, "CHECK_EVERY_S", 3600.0)

    def run_pipeline(pipeline, config, **rest):
        begin_epoch(job.place, "another")
        return {"accuracy": 1.0}

    with pytest.raises(LeaseLost, match="epoch 2 has begun"):
        driver.drive(job, run_pipeline)
    assert job.result() is None
    assert "succeeded" not in [event["state"] for event in job.events()]


@pytest.mark.chaos(26)
def test_cancelling_takes_the_lease_from_a_driver_that_does_not_stop(job):
    with EpochLease.take(job.place) as lease:
        job.event("running", epoch=lease.epoch)
        assert submit.cancel(job, None, grace_s=0.0)["state"] == "cancelled"
        with pytest.raises(LeaseLost):
            lease.check()
        assert latest_epoch(job.place)[0] == lease.epoch + 1


@pytest.mark.chaos(26)
def test_a_driver_that_is_cancelled_while_it_computes_commits_nothing(job, monkeypatch):
    monkeypatch.setattr(driver, "CHECK_EVERY_S", 3600.0)

    def run_pipeline(pipeline, config, **rest):
        submit.cancel(job, None, grace_s=0.0)
        return {}

    with pytest.raises(LeaseLost):
        driver.drive(job, run_pipeline)
    assert job.result() is None
    assert job.status()["state"] == "cancelled"
