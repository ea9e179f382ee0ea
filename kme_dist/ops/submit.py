"""Jobs on a running Dask cluster: submit, status, wait, cancel.

    job = create_job(job_root(), pipeline="run", config=config, name="digits")
    submit(job, config.cluster)         # returns once the job is in the queue; the caller may exit
    cancel(job, config.cluster)         # asks the driver to stop, and forces it after a grace period

Only the root folder, the id of the job, its owner and its priority are sent to the cluster, where they wait in a queue
(kme_dist.ops.queue). A driver host (kme_dist.ops.drivers) takes the job from there and starts a process that reads the
rest from the job's folder and runs the pipeline (`drive_for_host`); its tasks go to the workers of the same cluster.
Neither the scheduler nor the host has state of its own: when either dies, the job is resumed from checkpoints and
receipts.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kme_dist.config import ClusterConfig
from kme_dist.data.leases import LeaseLost, begin_epoch, latest_epoch
from kme_dist.errors import ConfigError, KMEError, RetryError
from kme_dist.ops.cluster import check_versions, open_unchecked, scheduler_id
from kme_dist.ops.driver import DriverHost, RunPipeline, drive, orphaned
from kme_dist.ops.jobs import ENDED, Job
from kme_dist.ops.queue import Entry, driver_name, enqueue, find_jobs, forget, hosts_for, job_key

ACCEPT_S = 15.0  # for a driver host to answer, or to connect
RESTART_S = 300.0  # a nanny interrupted between the end of the old process and the start of the new one starts none
POLL_S = 0.5
ANSWER_S = 5.0  # how long a scheduler may take to answer a question about jobs
GONE = (None,)  # states of a job on a scheduler that is not going to run it
UNCLAIMED_S = 60.0  # between the creation of a job and its submission, at most
QUERY_S = 15.0  # how often a scheduler is asked whether it still has a job
RESUBMITTED_S = 30.0  # within which a supervisor resubmits a job that failed because of the infrastructure


def submit(job: Job, cluster: ClusterConfig, resubmission: int | None = None) -> None:
    """Submit the job to the scheduler at `cluster.address` and return; no effect when it is running there or done.

    `resubmission` counts those that no person asked for, see `kme_dist.ops.supervisor`; they withdraw no cancellation.
    """
    with open_unchecked(cluster) as client:
        check_versions(client)
        entry = Entry.of(job)
        _find_host(client, job, entry)
        epoch, state = latest_epoch(job.place)[0], job.status()["state"]
        if resubmission is None and state in ("running", "retrying"):
            # Its driver writes down how it ends. One that has just died is followed by that of the queue.
            if _ask(client, find_jobs, [entry.key])[0]["state"] is None:
                _ask(client, enqueue, entry)
            return
        if resubmission is None:
            (job.folder / "cancel").unlink(missing_ok=True)
        if state == "succeeded":
            return
        counted: dict[str, Any] = {} if resubmission is None else {"resubmission": resubmission}
        # With the epoch, so that it does not count if a driver begins right now.
        job.event("waiting", epoch=epoch, scheduler=client.scheduler.address, **counted)
        job.log(f"submitted to the scheduler at {client.scheduler.address}", **counted)
        _ask(client, enqueue, entry)


def withdraw(job: Job, dry_run: bool = False) -> bool:
    """Delete a job that nobody has taken up: no scheduler has accepted it, no driver has begun. False if one has."""
    if not _untouched(job.folder):
        return False
    if dry_run:
        return True
    # Renamed before it is deleted, so that another submission of the job finds all of it or nothing.
    gone = job.folder.with_name(f".{job.id}-{uuid.uuid4().hex[:8]}")
    job.folder.rename(gone)
    if not _untouched(gone):  # it was just accepted
        gone.rename(job.folder)
        return False
    shutil.rmtree(gone)
    return True


def _untouched(folder: Path) -> bool:
    return set(os.listdir(folder)) <= {"job.json", "config.yaml"}


def _find_host(client: Any, job: Job, entry: Entry) -> None:
    """Return when a driver host has said that it can read the job's folder."""
    deadline, address = time.monotonic() + ACCEPT_S, client.scheduler.address
    try:
        while not (hosts := _ask(client, hosts_for, entry)).able:
            if hosts.count and len(hosts.problems) == hosts.count:
                raise ConfigError(f"no driver host can read the job's folder {job.folder} ({hosts.problems[0]})")
            if time.monotonic() > deadline:
                raise RetryError(
                    f"no driver host serves the scheduler at {address}, so nobody would run the job; start one with "
                    f"`kme-dist drivers --scheduler {address}`"
                )
            time.sleep(0.05)
    except KMEError:
        _ask(client, forget, entry.key)
        raise


def _ask(client: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of the queue on the scheduler; RetryError if that is lost meanwhile."""
    from distributed.client import ClosedClientError

    try:
        return client.run_on_scheduler(function, *arguments)
    except (OSError, TimeoutError, ClosedClientError) as error:
        raise RetryError(f"the scheduler was lost ({type(error).__name__}: {error}); try again") from error


def drive_for_host(job: Job, cluster: ClusterConfig, run_pipeline: RunPipeline) -> None:
    """In the process that a driver host has started for this job: drive it, with its tasks on the cluster."""
    import dask

    section: dict[str, Any] = {"kind": "address", "address": cluster.address, "insecure": cluster.insecure}
    section["patience_s"] = job.config().cluster.patience_s
    if cluster.tls is not None:
        section["tls"] = cluster.tls.model_dump(mode="json")
    host = DriverHost(cluster=section, shutting_down=orphaned())

    def stop(signum: int, frame: FrameType | None) -> None:
        raise LeaseLost("the driver host is shutting down")

    # Ctrl-C in the terminal of the host reaches this process too, and is no failure of the job: the host decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with dask.config.set({"client-name": driver_name(job_key(job))}):  # by which its tasks are found
            drive(job, run_pipeline, host=host, wait_s=math.inf)
    finally:
        signal.signal(signal.SIGTERM, before)


# -------------------------------------------------------------------------------------------------
# Status and cancellation


def on_scheduler(jobs: Sequence[Job], cluster: ClusterConfig) -> list[dict[str, Any]]:
    """What the scheduler knows of each job: its state there, its place in the queue or the host of its driver, and the
    workers that run its tasks."""
    with open_unchecked(cluster, timeout_s=ANSWER_S) as client:
        found: list[dict[str, Any]] = _ask(client, find_jobs, [_known_key(job) for job in jobs])
        return found


def _known_key(job: Job) -> str:
    try:
        return job_key(job)
    except OSError:  # deleted since it was listed: no scheduler knows this key
        return f"{job.id}-deleted"


def belongs_elsewhere(address: str, cluster: ClusterConfig) -> str | None:
    """Why a job that was submitted to the scheduler at `address` is left to that one and its supervisors.

    None when it is the scheduler of `cluster`, also under another name, or when nothing listens there any more: a
    scheduler that came back under another address has left its jobs behind.
    """
    ours, theirs = (text.rpartition("://")[2].rstrip("/") for text in (str(cluster.address), address))
    if ours == theirs or not _listens(theirs):
        return None
    tls = cluster.tls if address.startswith("tls://") else None
    try:
        there = scheduler_id(cluster.model_copy(update={"address": address, "tls": tls}), ANSWER_S)
        if there == scheduler_id(cluster, ANSWER_S):
            return None
    except Exception as error:  # whatever a connection to something else raises, or one that is not allowed
        return (
            f"it was submitted to the scheduler at {address}, where something listens that "
            f"cannot be asked ({type(error).__name__} {error}); "
            "if that is no scheduler any more, resume the job with `kme-dist jobs resume ID`"
        )
    return f"it was submitted to the scheduler at {address}, which is another one and answers"


def _listens(host_and_port: str) -> bool:
    host, _, port = host_and_port.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def wait(
    job: Job,
    timeout_s: float = math.inf,
    tell: Callable[[dict[str, Any]], None] | None = None,
    cluster: ClusterConfig | None = None,
) -> dict[str, Any]:
    """The status of the job once it has ended, read from its folder; RetryError after `timeout_s`.

    RetryError as well when the job is lost: no driver has shown for a while that it lives; and after UNCLAIMED_S when
    no scheduler and no driver has taken it up. With `cluster` the scheduler is asked every QUERY_S, and the wait also
    ends when it does not answer, or does not know a job that has stalled; a job that failed because of the
    infrastructure (exit code 75) is given RESUBMITTED_S to be resubmitted by a supervisor.
    """
    began = next_query = time.monotonic()
    deadline, failed = began + timeout_s, math.inf
    seen: Any = None  # the last lease record of a job that the scheduler does not know
    while True:
        status = job.status()
        if status["state"] in ENDED:
            transient = status.get("exit_code") == RetryError.exit_code and not status.get("given_up")
            failed = min(failed, time.monotonic())
            if cluster is None or not transient or time.monotonic() >= min(failed + RESUBMITTED_S, deadline):
                return status
            time.sleep(POLL_S)
            continue
        failed = math.inf
        if status["state"] == "lost":
            raise RetryError(
                f"the job {job.id} is lost: its driver ({status['driver']}) has not reported for "
                f"{status['seconds_since_beat']:.0f} s; {status['advice']}"
            )
        if time.monotonic() - began > UNCLAIMED_S and status["state"] == "waiting" and _untouched(job.folder):
            raise RetryError(
                f"the job {job.id} was created, but never accepted by a scheduler, and nobody runs it; submit it "
                f"again, or run it with `kme-dist jobs resume {job.id}`"
            )
        if cluster is not None and time.monotonic() >= next_query:
            unknown = on_scheduler([job], cluster)[0]["state"] is None
            before, seen = seen, latest_epoch(job.place) if unknown else None
            if unknown and seen == before and job.status()["state"] not in ENDED:
                raise RetryError(
                    f"the scheduler at {cluster.address} does not know the job {job.id}, which is {status['state']} "
                    f"and has stalled; resume it with `kme-dist jobs resume {job.id}`"
                )
            next_query = time.monotonic() + QUERY_S
        if tell is not None:
            tell(status)
        if time.monotonic() >= deadline:
            raise RetryError(f"the job {job.id} is {status['state']} after {timeout_s:g} s; wait for it again")
        time.sleep(POLL_S)


def cancel(job: Job, cluster: ClusterConfig | None, *, grace_s: float = 30.0) -> dict[str, Any]:
    """Ask the driver to stop; if it has not after `grace_s`, revoke its lease and restart its workers."""
    status = job.status()
    if status["state"] in ENDED:
        if status["state"] == "cancelled" and cluster is not None:
            _stop_tasks(job, cluster)  # what an earlier call could not stop
        return status
    job.request_stop("jobs cancel")
    job.log("asked to stop")
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and job.status()["state"] != "waiting":
        if job.status()["state"] in ENDED:
            return job.status()
        time.sleep(POLL_S)
    begin_epoch(job.place, "jobs cancel")  # from here on the driver can no longer commit
    if job.result() is None:
        job.event("cancelled")
        job.log("cancelled; the lease of its driver was revoked")
    if cluster is not None:
        _stop_tasks(job, cluster)
    return job.status()


def _stop_tasks(job: Job, cluster: ClusterConfig) -> None:
    with open_unchecked(cluster) as client:
        key = job_key(job)
        workers = _ask(client, find_jobs, [key])[0]["busy"]
        _ask(client, forget, key)  # its host ends the driver
        if not workers:
            return
        # Cancelling a task does not stop a function that is running: only a new process does.
        try:
            outcome = client.restart_workers(workers, timeout=RESTART_S, raise_for_error=False)
        except (OSError, ValueError, RuntimeError, TimeoutError) as error:
            raise RetryError(
                f"the job {job.id} is cancelled, but the workers that compute for it could not be restarted, and do so "
                f"until their tasks end ({', '.join(workers)}: {error}); restart them by hand if that takes too long"
            ) from error
        stuck = sorted(worker for worker, how in outcome.items() if how == "timed out")
        if stuck:
            raise RetryError(
                f"the job {job.id} is cancelled, but the workers {', '.join(stuck)} did not restart in time; check "
                "them, then run this again"
            )
