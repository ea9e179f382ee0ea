"""Jobs on a running Dask cluster: submit, status, wait, cancel.

    job = create_job(job_root(), pipeline="run", config=config, name="digits")
    submit(job, config.cluster, run_pipeline)   # returns once the scheduler has the job; the caller may exit
    cancel(job, config.cluster)                 # asks the driver to stop, and forces it after a grace period

Only the root folder, the id of the job and the name of `run_pipeline` are sent to the cluster. A task on a worker that
offers the resource `kme_driver` reads the rest from the job's folder and runs the pipeline there; its own tasks go to
the same cluster. Dask holds no state of ours: when the driver's worker dies, Dask starts the task on another worker and
it resumes from checkpoints and receipts; when the scheduler dies, submitting the job again does the same.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from kme_dist.config import ClusterConfig
from kme_dist.data.leases import LeaseLost, begin_epoch, latest_epoch
from kme_dist.errors import ConfigError, KMEError, RetryError
from kme_dist.ops.cluster import DRIVER, check_versions, open_unchecked
from kme_dist.ops.driver import Cancelled, DriverHost, RunPipeline, drive
from kme_dist.ops.jobs import ENDED, Job, job_at, job_root

ACCEPT_S = 30.0
RESTART_S = 300.0  # a nanny interrupted between the end of the old process and the start of the new one starts none
POLL_S = 0.5
ANSWER_S = 5.0  # how long a scheduler may take to answer a question about jobs
GONE = (None, "erred", "memory")  # states of the task of a driver that does not run and is not going to
QUERY_S = 15.0  # how often a scheduler is asked whether it still has a job


def task_key(job: Job) -> str:
    return f"kme-driver-{job.id}"


def submit(job: Job, cluster: ClusterConfig, run_pipeline: RunPipeline, resubmission: int | None = None) -> None:
    """Submit the job to the scheduler at `cluster.address` and return; no effect when it is running or done.

    `resubmission` counts those that no person asked for, see `kme_dist.ops.supervisor`.
    """
    with open_unchecked(cluster) as client:
        check_versions(client)
        workers = _driver_workers(client)
        _check_folder(client, job, workers)
        (job.folder / "cancel").unlink(missing_ok=True)
        if job.result() is not None:
            return
        counted: dict[str, Any] = {} if resubmission is None else {"resubmission": resubmission}
        job.event("waiting", scheduler=client.scheduler.address, **counted)
        job.log(f"submitted to the scheduler at {client.scheduler.address}", **counted)
        _send(client, job, run_pipeline)
        _await_acceptance(client, job)


def _send(client: Any, job: Job, run_pipeline: RunPipeline) -> None:
    from distributed import Future, fire_and_forget

    if client.run_on_scheduler(_find_tasks, job.id)["state"] in GONE[1:]:
        # Dask keeps the outcome of a task whose workers died too often, and would not run it again.
        client.cancel([Future(task_key(job), client=client)], force=True)
    # Functions of the installed package travel by name: no code of the user's machine runs on the cluster.
    options = {"key": task_key(job), "pure": False, "resources": {DRIVER: 1}, "priority": 100}
    future = client.submit(drive_job, str(job.root), job.id, run_pipeline, **options)
    fire_and_forget(future)


def _await_acceptance(client: Any, job: Job) -> None:
    """Return when the scheduler has the task or the driver has started: messages still in our buffers would be lost."""
    deadline = time.monotonic() + ACCEPT_S
    while client.run_on_scheduler(_find_tasks, job.id)["state"] is None:
        if job.status()["state"] != "waiting":
            return
        if time.monotonic() > deadline:
            raise RetryError(
                f"the scheduler at {client.scheduler.address} did not accept the job within {ACCEPT_S:.0f} s"
            )
        time.sleep(0.05)


def _driver_workers(client: Any) -> list[str]:
    info = client.scheduler_info(n_workers=-1)["workers"]
    found = [address for address, facts in info.items() if facts.get("resources", {}).get(DRIVER, 0) >= 1]
    if not found:
        raise RetryError(
            f"no worker at {client.scheduler.address} ({len(info)} connected) offers the resource {DRIVER}, which the "
            f"driver of a job requires; start one with `dask worker ADDRESS --resources {DRIVER}=1`"
        )
    return found


def _check_folder(client: Any, job: Job, workers: list[str]) -> None:
    for worker, problem in client.run(_problem_with, str(job.root), job.id, workers=workers).items():
        if problem:
            raise ConfigError(f"worker {worker} cannot read the job's folder {job.folder} ({problem})")


def _problem_with(root: str, job_id: str) -> str | None:
    """On a worker: why a driver could not run the job there; None when it could."""
    try:
        job_at(_root_here(root), job_id).request()
    except (KMEError, OSError) as error:
        return f"{error}; mount the same disk on all hosts, and set KME_ROOT where its path differs"
    return None


def _root_here(root: str) -> Any:
    """The root on this host: its own KME_ROOT, set by the operator, takes precedence."""
    return job_root(os.environ.get("KME_ROOT") or root)


def drive_job(root: str, job_id: str, run_pipeline: RunPipeline) -> str:
    """The task on the cluster. Its return value is for the dashboard; the state of the job is in its folder."""
    import dask
    from distributed import Reschedule, Status, get_worker, secede

    worker = get_worker()
    secede()  # frees the thread for other tasks while this one waits for them
    job = job_at(_root_here(root), job_id)

    def shutting_down() -> bool:
        return worker.status not in (Status.running, Status.paused)

    try:
        host = DriverHost(f"worker {worker.address}", _cluster_of(worker, job), shutting_down)
        # One driver per process (by the resource), so its client is identified by its name.
        with dask.config.set({"client-name": task_key(job)}):
            drive(job, run_pipeline, host=host, wait_s=math.inf)
    except Cancelled:
        return "cancelled"
    except LeaseLost:
        if shutting_down():
            raise Reschedule from None
        return "another driver took over"
    except Exception as error:  # recorded by drive, with its traceback; raising it would inform Dask only
        return f"failed: {type(error).__name__}"
    return "succeeded"


def _cluster_of(worker: Any, job: Job) -> dict[str, Any]:
    """Section `cluster` for a pipeline on this worker: the worker's scheduler and certificate."""
    address = str(worker.scheduler.address)
    patience = job.config().cluster.patience_s
    section: dict[str, Any] = {"kind": "address", "address": address, "patience_s": patience}
    if address.startswith("tls://"):
        security = worker.security
        section["tls"] = {
            "authority": security.tls_ca_file,
            "certificate": security.tls_worker_cert,
            "key": security.tls_worker_key,
        }
    else:
        section["insecure"] = True  # decided by whoever started this cluster
    return section


# -------------------------------------------------------------------------------------------------
# Status and cancellation


def _find_tasks(job_id: str, dask_scheduler: Any = None) -> dict[str, Any]:
    """On the scheduler: the driver's task, and the workers that run its tasks."""
    key = f"kme-driver-{job_id}"
    task = dask_scheduler.tasks.get(key)
    driver = task.processing_on.address if task is not None and task.processing_on is not None else None
    clients = [client for name, client in dask_scheduler.clients.items() if key in name]
    wanted = {task for client in clients for task in client.wants_what if task.processing_on is not None}
    busy = {task.processing_on.address for task in wanted} - {driver}
    state = task.state if task is not None else None
    return {"state": state, "driver": driver, "connected": bool(clients), "busy": sorted(busy)}


def on_scheduler(jobs: Sequence[Job], cluster: ClusterConfig) -> list[dict[str, Any]]:
    """What the scheduler knows of each job: the state of its driver, its worker, and the workers that run its tasks."""
    with open_unchecked(cluster, timeout_s=ANSWER_S) as client:
        return [client.run_on_scheduler(_find_tasks, job.id) for job in jobs]


def wait(
    job: Job,
    timeout_s: float = math.inf,
    tell: Callable[[dict[str, Any]], None] | None = None,
    cluster: ClusterConfig | None = None,
) -> dict[str, Any]:
    """The status of the job once it has ended, read from its folder; RetryError after `timeout_s`.

    RetryError as well when the job is lost: no driver has shown for a while that it lives. With `cluster` the scheduler
    is asked every QUERY_S, and the wait also ends when it does not answer, or does not know a job that has stalled.
    """
    deadline, next_query = time.monotonic() + timeout_s, time.monotonic()
    seen: Any = None  # the last lease record of a job that the scheduler does not know
    while True:
        status = job.status()
        if status["state"] in ENDED:
            return status
        if status["state"] == "lost":
            raise RetryError(
                f"the job {job.id} is lost: its driver ({status['driver']}) has not reported for "
                f"{status['seconds_since_beat']:.0f} s; {status['advice']}"
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
    if job.status()["state"] in ENDED:
        return job.status()
    job.request_stop("jobs cancel")
    job.log("asked to stop")
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and job.status()["state"] != "waiting":
        if job.status()["state"] in ENDED:
            return job.status()
        time.sleep(POLL_S)
    begin_epoch(job.place, "jobs cancel")  # from here on the driver can no longer commit
    if cluster is not None:
        _stop_tasks(job, cluster)
    if job.result() is None:
        job.event("cancelled")
        job.log("cancelled; the lease of its driver was revoked")
    return job.status()


def _stop_tasks(job: Job, cluster: ClusterConfig) -> None:
    from distributed import Future

    with open_unchecked(cluster) as client:
        found = client.run_on_scheduler(_find_tasks, job.id)
        if found["state"] is not None:
            client.cancel([Future(task_key(job), client=client)], force=True)
        workers = [address for address in [found["driver"], *found["busy"]] if address is not None]
        if not workers:
            return
        # Cancelling a task does not stop a function that is running: only a new process does.
        try:
            outcome = client.restart_workers(workers, timeout=RESTART_S, raise_for_error=False)
        except (OSError, ValueError, RuntimeError, TimeoutError) as error:
            raise RetryError(f"the workers {', '.join(workers)} could not be restarted: {error}") from error
        stuck = sorted(worker for worker, how in outcome.items() if how == "timed out")
        if stuck:
            raise RetryError(f"the workers {', '.join(stuck)} did not restart in time; check them, then try again")
