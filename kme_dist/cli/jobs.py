"""Commands for clusters and jobs: cluster, certs, submit, jobs, schedule.

    kme-dist certs certs
    kme-dist cluster --tls certs --listen 10.0.0.5:8786
    kme-dist submit configs/covtype.yaml --scheduler tls://cluster:8786 --tls certs
    kme-dist jobs status covtype-20260301-101500-4f2a1c
    kme-dist schedule nightly.yaml --pipeline predict --cron "0 2 * * *"

`jobs` reads the job's folder, and asks the scheduler only when an address is given. `logs` needs none: all drivers
write to the folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from types import FrameType
from typing import Annotated, Any

import typer

from kme_dist.cli.lazy import load
from kme_dist.cli.options import (
    AsJson,
    Insecure,
    JobConfig,
    JobId,
    Overrides,
    Pipeline,
    Quiet,
    Root,
    Scheduler,
    Tls,
    cluster_at,
)
from kme_dist.cli.output import print_json, print_result, print_tree, stderr_printer
from kme_dist.config import ClusterConfig, load_config
from kme_dist.data.leases import LeaseLost
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError
from kme_dist.ops import jobs
from kme_dist.ops.certs import make_certificates, tls_files
from kme_dist.ops.driver import Cancelled, drive
from kme_dist.ops.jobs import ENDED, Job, create_job, job_root
from kme_dist.ops.schedule import fire_times, keep_schedule, parse_time, stamp, utc_now

jobs_app = typer.Typer(name="jobs", help="Jobs under the root folder: list, status, logs, wait, cancel, resume.")


def add_commands(app: typer.Typer) -> None:
    for command in (cluster, submit, schedule, certs):
        app.command()(command)
    app.add_typer(jobs_app)


def cluster(
    workers: Annotated[int | None, typer.Option(help="Number of worker processes; default: one per core.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of a worker, e.g. 2GiB.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Accept connections from other machines; needs --tls.")
    ] = None,
    tls: Annotated[
        str | None, typer.Option(metavar="DIR", help="Encrypt with the certificates in DIR; created if missing.")
    ] = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Start a cluster on this machine and keep it running until interrupted (then exit code 0)."""
    if workers is not None and workers < 1:
        raise typer.BadParameter(f"--workers is {workers}; must be an integer >= 1.")
    if tls is not None:
        make_certificates(tls)
    settings = ClusterConfig(
        workers=workers,
        memory=memory,
        address=None if listen is None else f"{'tls' if tls else 'tcp'}://{listen}",
        tls=None if tls is None else tls_files(tls, "cluster"),
        insecure=insecure,
    )
    clusters = load("ops.cluster")
    with _deferred_signals() as wait_for_signal, clusters.open_client(settings) as client:
        facts = {"scheduler": client.scheduler.address, "dashboard": clusters.dashboard_of(client)}
        print_result(facts, as_json, f"scheduler {facts['scheduler']}  dashboard {facts['dashboard']}")
        sys.stdout.flush()
        stderr_printer(quiet)("stop it with Ctrl-C")
        wait_for_signal()


@contextlib.contextmanager
def _deferred_signals() -> Iterator[Callable[[], None]]:
    """A function that waits for SIGINT or SIGTERM. Inside the block these signals do nothing else, however many
    arrive and whenever: a cluster that is starting or closing is never interrupted halfway."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received = threading.Event()

    def receive(signum: int, frame: FrameType | None) -> None:
        received.set()

    def wait() -> None:
        while not received.is_set() and signal.sigtimedwait({signal.SIGINT}, 0.5) is None:
            pass

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    # Workers inherit the blocked signal: Ctrl-C in a terminal is sent to them too, and they must shut down in order.
    # Python's own helper for child processes unblocks it when it starts, so it is started first.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield wait
    except BaseException:  # without an error the process is about to end, and keeps ignoring signals until it has
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
        raise


def certs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder for the certificates.")],
    days: Annotated[int, typer.Option(help="Days until the certificates expire.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Issue new certificates from the existing authority.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Create a private certificate authority and certificates for one cluster; existing files are kept."""
    facts = make_certificates(folder, days=days, renew=renew)
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)


def submit(
    config: JobConfig,
    scheduler: Scheduler = None,
    pipeline: Pipeline = "run",
    root: Root = None,
    tls: Tls = None,
    insecure: Insecure = False,
    job_id: Annotated[str | None, typer.Option("--id", help="Job id; generated by default.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a pipeline on a running cluster and detach; prints the job id."""
    settings = load_config(config, overrides or [])
    at = cluster_at(scheduler, tls, insecure, settings.cluster)
    if at is None:
        raise ConfigError("no scheduler address: use --scheduler ADDRESS, or set cluster.address in the config")
    job = create_job(job_root(root), pipeline=pipeline, config=settings, name=config.stem, job_id=job_id)
    try:
        _submit(job, at)
    except KMEError:
        if job_id is None and not job.events():  # no scheduler has seen it: leave nothing behind
            shutil.rmtree(job.folder)
        raise
    print_result({"id": job.id, "folder": str(job.folder)}, as_json, job.id)
    if not as_json:
        stderr_printer(quiet)(f"submitted; see `kme-dist jobs status {job.id}`")


@jobs_app.command("list")
def list_all(
    root: Root = None,
    scheduler: Scheduler = None,
    tls: Tls = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """List all jobs, oldest first; with --scheduler also show which of them the scheduler does not know."""
    found = jobs.list_jobs(job_root(root))
    rows = [status for job in found if (status := _status_or_damaged(job)) is not None]
    if (at := cluster_at(scheduler, tls, insecure)) is not None:
        active = [status for status in rows if status["state"] not in (*ENDED, "damaged")]
        wanted = {status["id"] for status in active}
        known = load("ops.submit").on_scheduler([job for job in found if job.id in wanted], at)
        for status, there in zip(active, known, strict=True):
            status["scheduler"] = there
    width = max((len(status["id"]) for status in rows), default=0)
    print_result({"jobs": rows}, as_json, *(_row(status, width) for status in rows))
    if not rows and not as_json:
        stderr_printer(quiet)("no jobs")


@jobs_app.command()
def status(
    job_id: JobId,
    root: Root = None,
    scheduler: Scheduler = None,
    tls: Tls = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the status of a job, from its folder; with --scheduler also where its driver runs."""
    job = _job(root, job_id)
    facts = job.status()
    if (at := cluster_at(scheduler, tls, insecure)) is not None:
        (found,) = load("ops.submit").on_scheduler([job], at)
        facts["scheduler"] = found
        if found["state"] is None and facts["state"] in ("waiting", "running", "retrying"):
            facts["advice"] = f"the scheduler does not know the job; resume it with `kme-dist jobs resume {job.id}`"
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)


@jobs_app.command()
def logs(
    job_id: JobId,
    root: Root = None,
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing until the job has ended.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Print the log of a job."""
    job, shown = _job(root, job_id), 0
    while True:
        ended = job.status()["state"] in ENDED
        lines = job.logs()
        if as_json and not follow:
            print_json({"id": job.id, "lines": lines})
            return
        for line in lines[shown:]:
            print(json.dumps(line) if as_json else f"{line['time']}  {line['level']:7}  {line['message']}", flush=True)
        shown = len(lines)
        if ended or not follow:
            return
        time.sleep(0.5)


@jobs_app.command()
def wait(
    job_id: JobId,
    root: Root = None,
    scheduler: Scheduler = None,
    tls: Tls = None,
    insecure: Insecure = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait; then exit code 75.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Wait for a job; the exit code is that of the job (130 if it was cancelled). With --scheduler the wait ends with
    exit code 75 when the scheduler is gone or does not know the job."""
    say, shown = stderr_printer(quiet), [""]

    def show(status: Mapping[str, Any]) -> None:
        line = f"{status['state']} {_progress(status)}".rstrip()
        if shown != [line]:
            shown[:] = [line]
            say(line)

    at, timeout_s = cluster_at(scheduler, tls, insecure), math.inf if timeout is None else timeout
    facts = load("ops.submit").wait(_job(root, job_id), timeout_s, show, at)
    print_result(facts, as_json, f"{facts['id']} {facts['state']}")
    _exit_like(facts)


@jobs_app.command()
def cancel(
    job_id: JobId,
    root: Root = None,
    scheduler: Scheduler = None,
    tls: Tls = None,
    insecure: Insecure = False,
    grace: Annotated[float, typer.Option(help="Seconds for the driver to stop by itself.")] = 30.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask a job to stop; if it does not, restart the workers that run its tasks (with --scheduler)."""
    at = cluster_at(scheduler, tls, insecure)
    facts = load("ops.submit").cancel(_job(root, job_id), at, grace_s=grace)
    print_result(facts, as_json, f"{facts['id']} {facts['state']}")


@jobs_app.command()
def resume(
    job_id: JobId,
    scheduler: Scheduler = None,
    root: Root = None,
    tls: Tls = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Resume a job that failed, was cancelled or lost its scheduler; without --scheduler in this process."""
    job = _job(root, job_id)
    if (at := cluster_at(scheduler, tls, insecure)) is not None:
        _submit(job, at)
    else:
        job.request()
        (job.folder / "cancel").unlink(missing_ok=True)
        _drive_here(job, 0.0, stderr_printer(quiet))
    facts = job.status()
    print_result(facts, as_json, f"{job.id} {facts['state']}")


def schedule(
    config: JobConfig,
    cron: Annotated[str | None, typer.Option(help="Minute hour day month weekday, e.g. '0 2 * * *'.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Run for one scheduled time (--at) now, then exit.")] = False,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Scheduled time of --once; default: now.")] = None,
    pipeline: Pipeline = "predict",
    timezone: Annotated[str, typer.Option(help="Time zone of --cron, e.g. Europe/Berlin.")] = "UTC",
    patience: Annotated[
        float, typer.Option(help="Seconds that a second start of the same run waits for the result of the first.")
    ] = 60.0,
    scheduler: Scheduler = None,
    root: Root = None,
    tls: Tls = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a pipeline at the times of a cron expression, exactly once for each time however often it is started."""
    say = stderr_printer(quiet)
    if once:
        when = parse_time(at) if at is not None else utc_now().replace(second=0)
        job = create_job(
            job_root(root),
            pipeline=pipeline,
            config=load_config(config, overrides or []),
            name=config.stem,
            job_id=jobs.scheduled_id(config.stem, when),
            scheduled=stamp(when),
        )
        _run_scheduled(job, cluster_at(scheduler, tls, insecure), patience, say)
        facts = job.status()
        print_result(facts, as_json, f"{job.id} {facts['state']}")
        return
    if cron is None or at is not None:
        raise ConfigError("--cron is missing; or use --once (with --at TIME) for a single run")
    load_config(config, overrides or [])  # report mistakes now, not at night
    home = job_root(root)
    options = [f"--set={change}" for change in overrides or []] + ["--pipeline", pipeline, "--root", str(home)]
    options += [f"--patience={patience}"] + ([f"--scheduler={scheduler}"] if scheduler else [])
    options += ([f"--tls={tls}"] if tls else []) + (["--allow-insecure"] if insecure else [])
    options += (["--json"] if as_json else []) + (["--quiet"] if quiet else [])
    command = [sys.executable, "-m", "kme_dist", "schedule", str(config), "--once", *options]
    keep_schedule(
        fire_times(cron, timezone),
        start=lambda when: [*command, "--at", stamp(when)],
        stop=threading.Event(),
        say=say,
    )


def _run_scheduled(job: Job, at: ClusterConfig | None, patience_s: float, say: Callable[[str], None]) -> None:
    if job.result() is not None:
        say(f"{job.id} is already done")
    elif at is not None:
        _submit(job, at)
        _exit_like(load("ops.submit").wait(job))
    else:
        _drive_here(job, patience_s, say)


# -------------------------------------------------------------------------------------------------


def _job(root: str | None, job_id: str) -> Job:
    return jobs.job_at(job_root(root), job_id)


def _submit(job: Job, at: ClusterConfig) -> None:
    load("ops.submit").submit(job, at, load("pipelines.job").run_pipeline)


def _drive_here(job: Job, wait_s: float, say: Callable[[str], None]) -> None:
    try:
        drive(job, load("pipelines.job").run_pipeline, wait_s=wait_s, say=say)
    except Cancelled:
        say(f"{job.id} was cancelled")
        raise typer.Exit(130) from None
    except LeaseLost as error:
        raise RetryError(f"another process took over because this one had stalled ({error})") from None


def _exit_like(facts: Mapping[str, Any]) -> None:
    """Exit with the code of a job that has ended."""
    if facts["state"] == "failed":
        print(f"error: {facts.get('error', 'the job failed')}", file=sys.stderr)
    code = {"succeeded": 0, "cancelled": 130}.get(facts["state"], facts.get("exit_code", 1))
    if code:
        raise typer.Exit(code)


def _status_or_damaged(job: Job) -> dict[str, Any] | None:
    """The status of a listed job; None if it was deleted meanwhile. A damaged job must not hide the others."""
    try:
        return job.status()
    except CorruptError as error:
        return {"id": job.id, "pipeline": "", "state": "damaged", "error": str(error)}
    except DataError:
        return None


def _row(status: Mapping[str, Any], width: int) -> str:
    unknown = "  not on the scheduler" if status.get("scheduler", {"state": ""})["state"] is None else ""
    line = f"{status['id']:{width}}  {status['pipeline']:8}  {status['state']:9}  {_progress(status)}"
    return f"{line.rstrip()}{unknown}"


def _progress(status: Mapping[str, Any]) -> str:
    progress = status.get("progress")
    if not progress:
        return str(status.get("error", ""))
    of = f"/{progress['total']}" if progress.get("total") is not None else ""
    return f"{progress['stage']} {progress['done']}{of}"


def _print_facts(facts: Mapping[str, Any]) -> None:
    print_tree({key: value for key, value in facts.items() if value is not None}, width=400)
