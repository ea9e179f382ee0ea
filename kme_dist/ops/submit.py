"""Jobs on a running Dask cluster: hand one over and leave, ask about it, stop it.

    job = create_job(job_root(), pipeline="run", config=config, name="digits")
    submit(job, config.cluster)          # returns once the scheduler has it; the caller may go
    cancel(job, config.cluster)          # asks the driver to stop, and after a while makes it

What travels to the cluster is the root folder and the name of the job. A task on a worker that offers the resource
`kme_driver` reads the rest from the job's folder and runs the pipeline there; its own tasks go to the same
cluster. Dask holds no state of ours: when the driver's worker dies, Dask starts the task again elsewhere and it goes
on from checkpoints and receipts; when the scheduler dies, submitting the job again does the same.
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
from kme_dist.ops.cluster import DRIVER, open_client, open_unchecked
from kme_dist.ops.jobs import ENDED, Cancelled, Job, drive, job_at, job_root

ACCEPT_S = 30.0
RESTART_S = 300.0  # a nanny that is interrupted between the end of the old process and the new one starts none
POLL_S = 0.5
ASK_S = 15.0  # between two questions to a scheduler whether it still has a job


def task_key(job: Job) -> str:
    return f"kme-driver-{job.id}"


def submit(job: Job, cluster: ClusterConfig) -> None:
    """Hand the job to the scheduler at `cluster.address` and leave; harmless where it runs or is done already."""
    with open_client(cluster) as client:
        workers = _driver_workers(client)
        _check_folder(client, job, workers)
        (job.folder / "cancel").unlink(missing_ok=True)
        if job.result() is not None:
            return
        job.event("waiting", scheduler=client.scheduler.address)
        job.log(f"handed to the scheduler at {client.scheduler.address}")
        _send(client, job)
        _await_acceptance(client, job)


def _send(client: Any, job: Job) -> None:
    from distributed import fire_and_forget

    # By name and in text: nothing of the user's machine is run on the cluster.
    future = client.submit(
        drive_job, str(job.root), job.id, key=task_key(job), pure=False, resources={DRIVER: 1}, priority=100
    )
    fire_and_forget(future)


def _await_acceptance(client: Any, job: Job) -> None:
    """Return when the scheduler has the task, or the driver has begun: messages still in our buffers would be lost."""
    deadline = time.monotonic() + ACCEPT_S
    while client.run_on_scheduler(_find_tasks, job.id)["state"] is None:
        if job.status()["state"] != "waiting":
            return
        if time.monotonic() > deadline:
            raise RetryError(f"the scheduler at {client.scheduler.address} did not take the job in {ACCEPT_S:.0f} s")
        time.sleep(0.05)


def _driver_workers(client: Any) -> list[str]:
    info = client.scheduler_info(n_workers=-1)["workers"]
    found = [address for address, facts in info.items() if facts.get("resources", {}).get(DRIVER, 0) >= 1]
    if not found:
        raise RetryError(
            f"none of the {len(info)} workers at {client.scheduler.address} offers the resource {DRIVER}, which the "
            f"driver of a job needs; start one with `dask worker ADDRESS --resources {DRIVER}=1`"
        )
    return found


def _check_folder(client: Any, job: Job, workers: list[str]) -> None:
    for worker, problem in client.run(_problem_with, str(job.root), job.id, workers=workers).items():
        if problem:
            raise ConfigError(f"worker {worker} does not see the job's folder {job.folder} ({problem})")


def _problem_with(root: str, job_id: str) -> str | None:
    """On a worker: what keeps the driver from its job there."""
    try:
        job_at(_root_here(root), job_id).request()
    except (KMEError, OSError) as error:
        return f"{error}; give all hosts the same disk, and set KME_ROOT where it is mounted elsewhere"
    return None


def _root_here(root: str) -> Any:
    """The root as this host sees it: its own KME_ROOT is the operator's word and comes first."""
    return job_root(os.environ.get("KME_ROOT") or root)


def drive_job(root: str, job_id: str) -> str:
    """The task on the cluster. What it returns is for the dashboard; the job's folder has the truth."""
    import dask
    from distributed import Reschedule, Status, get_worker, secede

    worker = get_worker()
    secede()  # the thread is free for other tasks while this one waits for them
    job = job_at(_root_here(root), job_id)

    def leaving() -> bool:
        return worker.status not in (Status.running, Status.paused)

    try:
        # One driver a process (the resource says so), so its client can be told from others by name.
        with dask.config.set({"client-name": task_key(job)}):
            drive(
                job,
                cluster=_cluster_of(worker, job),
                wait_s=math.inf,
                holder=f"worker {worker.address}",
                stopping=leaving,
            )
    except Cancelled:
        return "cancelled"
    except LeaseLost:
        if leaving():
            raise Reschedule from None
        return "another driver took over"
    except Exception as error:  # written down by drive, with its traceback; raising it would only tell Dask
        return f"failed: {type(error).__name__}"
    return "succeeded"


def _cluster_of(worker: Any, job: Job) -> dict[str, Any]:
    """Section `cluster` for a pipeline on this worker: its own scheduler, with its own certificate."""
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
        section["insecure"] = True  # whoever started this cluster has decided
    return section


# -------------------------------------------------------------------------------------------------
# Asking and stopping


def _find_tasks(job_id: str, dask_scheduler: Any = None) -> dict[str, Any]:
    """On the scheduler: the driver's task, and the workers that are busy for it."""
    key = f"kme-driver-{job_id}"
    task = dask_scheduler.tasks.get(key)
    driver = task.processing_on.address if task is not None and task.processing_on is not None else None
    clients = [client for name, client in dask_scheduler.clients.items() if key in name]
    wanted = {task for client in clients for task in client.wants_what if task.processing_on is not None}
    busy = {task.processing_on.address for task in wanted} - {driver}
    state = task.state if task is not None else None
    return {"state": state, "driver": driver, "connected": bool(clients), "busy": sorted(busy)}


def on_scheduler(jobs: Sequence[Job], cluster: ClusterConfig) -> list[dict[str, Any]]:
    """What the scheduler knows of each job: the state of its driver, where it runs, which workers work for it."""
    with open_unchecked(cluster) as client:
        return [client.run_on_scheduler(_find_tasks, job.id) for job in jobs]


def wait(
    job: Job,
    timeout_s: float = math.inf,
    tell: Callable[[dict[str, Any]], None] | None = None,
    cluster: ClusterConfig | None = None,
) -> dict[str, Any]:
    """The status of the job once it has ended, read from its folder; RetryError after `timeout_s`.

    A job whose scheduler died stalls for ever, and its folder does not tell. With `cluster` the scheduler is
    asked now and then: RetryError as well when it does not answer, or does not know the job while it is stalled.
    """
    deadline, ask_again = time.monotonic() + timeout_s, time.monotonic()
    seen: Any = None  # what the driver of a job wrote last that the scheduler does not know
    while True:
        status = job.status()
        if status["state"] in ENDED:
            return status
        if cluster is not None and time.monotonic() >= ask_again:
            unknown = on_scheduler([job], cluster)[0]["state"] is None
            before, seen = seen, latest_epoch(job.place) if unknown else None
            if unknown and seen == before and job.status()["state"] not in ENDED:
                raise RetryError(
                    f"the scheduler at {cluster.address} does not know the job {job.id}, which is {status['state']} "
                    f"and has stalled; resume it with `kme-dist jobs resume {job.id}`"
                )
            ask_again = time.monotonic() + ASK_S
        if tell is not None:
            tell(status)
        if time.monotonic() >= deadline:
            raise RetryError(f"the job {job.id} is {status['state']} after {timeout_s:g} s; wait for it again")
        time.sleep(POLL_S)


def cancel(job: Job, cluster: ClusterConfig | None, *, grace_s: float = 30.0) -> dict[str, Any]:
    """Ask the driver to stop; when it has not after `grace_s`, take the job away from it and restart its workers."""
    if job.status()["state"] in ENDED:
        return job.status()
    job.ask_to_stop("jobs cancel")
    job.log("asked to stop")
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and job.status()["state"] != "waiting":
        if job.status()["state"] in ENDED:
            return job.status()
        time.sleep(POLL_S)
    begin_epoch(job.place, "jobs cancel")  # from here on its driver cannot commit any more
    if cluster is not None:
        _stop_tasks(job, cluster)
    if job.result() is None:
        job.event("cancelled")
        job.log("cancelled; its driver was taken off the job")
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
        # Cancelling stops no function that runs: only a new process does.
        try:
            outcome = client.restart_workers(workers, timeout=RESTART_S, raise_for_error=False)
        except (OSError, ValueError, RuntimeError, TimeoutError) as error:
            raise RetryError(f"the workers {', '.join(workers)} could not be restarted: {error}") from error
        stuck = sorted(worker for worker, how in outcome.items() if how == "timed out")
        if stuck:
            raise RetryError(f"the workers {', '.join(stuck)} did not restart in time; look after them, then try again")
