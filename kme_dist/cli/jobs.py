"""Commands for clusters and jobs: cluster, certs, submit, jobs.

    kme-dist certs certs
    kme-dist cluster --tls certs --listen 10.0.0.5:8786
    kme-dist submit configs/covtype.yaml --scheduler tls://cluster:8786 --tls certs
    kme-dist jobs status covtype-20260301-101500-4f2a1c

`jobs` reads the job's folder, and asks the scheduler only when an address is given. `logs` needs none: all drivers
write to the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import Annotated, Any

import typer

from kme_dist.cli.options import (
    Connection,
    Insecure,
    JobConfig,
    JobOptions,
    Output,
    Overrides,
    Pipeline,
    Root,
    expand_options,
    load,
    print_json,
    print_tree,
)
from kme_dist.config import ClusterConfig, load_config
from kme_dist.data.leases import LeaseLost
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError, counted
from kme_dist.ops import jobs
from kme_dist.ops.certs import make_certificates, tls_files
from kme_dist.ops.driver import Cancelled, drive
from kme_dist.ops.jobs import ENDED, Job, create_job, job_root
from kme_dist.ops.schedule import parse_time, utc_now

jobs_app = typer.Typer(
    name="jobs", help="Jobs under the root folder: list, status, logs, wait, cancel, resume, keep, prune."
)


class JobCancelled(Exception):
    """The job was cancelled: exit code 130, as if the command itself were interrupted, but with other advice."""


def add_commands(app: typer.Typer) -> None:
    for command in (cluster, submit, certs):
        app.command()(expand_options(command))
    app.add_typer(jobs_app)


def cluster(
    output: Output,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes; default: one per core.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of a worker, e.g. 2GiB.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Accept connections from other machines; needs --tls.")
    ] = None,
    tls: Annotated[
        str | None, typer.Option(metavar="DIR", help="Encrypt with the certificates in DIR; created if missing.")
    ] = None,
    insecure: Insecure = False,
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
        output.result(facts, f"scheduler {facts['scheduler']}  dashboard {facts['dashboard']}")
        sys.stdout.flush()
        output.say("stop it with Ctrl-C")
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
    output: Output,
    days: Annotated[int, typer.Option(help="Days until the certificates expire.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Issue new certificates from the existing authority.")] = False,
) -> None:
    """Create a private certificate authority and certificates for one cluster; existing files are kept."""
    _print_facts(make_certificates(folder, days=days, renew=renew), output)


@dataclass(frozen=True)
class SubmitOptions:
    pipeline: Pipeline = "run"
    root: Root = None
    job_id: Annotated[str | None, typer.Option("--id", help="Job id; generated by default.")] = None
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the job; the exit code is that of the job.")] = False


def submit(
    config: JobConfig, wanted: SubmitOptions, connection: Connection, output: Output, overrides: Overrides = None
) -> None:
    """Run a pipeline on a running cluster and detach (or --wait); prints the job id."""
    settings = load_config(config, overrides or [])
    at = connection.cluster(settings.cluster)
    if at is None:
        raise ConfigError("no scheduler address: use --scheduler ADDRESS, or set cluster.address in the config")
    root = job_root(wanted.root)
    job = create_job(root, pipeline=wanted.pipeline, config=settings, name=config.stem, job_id=wanted.job_id)
    before = job.status()["state"] if job.events() or job.result() is not None else None
    try:
        if before != "succeeded":
            submit_job(job, at)
    except KMEError:
        if wanted.job_id is None and not job.events():  # no scheduler has seen it: leave nothing behind
            shutil.rmtree(job.folder)
        raise
    if wanted.wait:
        output.say(f"{job.id}: {_submitted(job, before)}")
        _wait_for(job, at, output)
        return
    output.result({"id": job.id, "folder": str(job.folder)}, job.id)
    if not output.as_json:
        output.say(_submitted(job, before))


def _submitted(job: Job, before: str | None) -> str:
    """What a submission did, by the state of the job before it; None for a job that is new."""
    see = f"see `kme-dist jobs status {job.id}`"
    if before is None:
        return f"submitted; {see}"
    if before == "succeeded":
        return f"job {job.id} has already succeeded; nothing to do"
    if before in ENDED:
        return f"resumes the {before} job {job.id}; {see}"
    return f"job {job.id} was submitted before and is {before}; {see}"


@dataclass(frozen=True)
class Listed:
    """Which jobs to list."""

    state: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help=f"Only jobs that are {', '.join(jobs.STATES)}.")
    ] = None
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only jobs submitted since 2026-03-01T02:00Z, or in the last 7d.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the last N of them.")] = None

    def chosen(self, found: list[Job]) -> list[tuple[Job, dict[str, Any]]]:
        unknown = sorted(set(self.state or []) - {*jobs.STATES, "damaged"})
        if unknown:
            raise ConfigError(f"--state {unknown[0]} is unknown; choose one of {', '.join(jobs.STATES)}")
        since = None if self.since is None else _moment("--since", self.since)
        rows = []
        for job in found:
            if since is not None and jobs.submitted_at(job) < since:
                continue
            status = _status_or_damaged(job)
            if status is not None and (not self.state or status["state"] in self.state):
                rows.append((job, status))
        return rows if self.limit is None else rows[-self.limit :]


@jobs_app.command("list")
@expand_options
def list_all(which: Listed, connection: Connection, output: Output, root: Root = None) -> None:
    """List all jobs, oldest first; with --scheduler also show which of them the scheduler does not know."""
    found = which.chosen(jobs.list_jobs(job_root(root)))
    rows = [status for _, status in found]
    active = [(job, status) for job, status in found if status["state"] not in (*ENDED, "damaged")]
    silent = _ask_scheduler(active, connection)
    width = max((len(status["id"]) for status in rows), default=0)
    output.result({"jobs": rows}, *(_row(status, width) for status in rows))
    if not rows and not output.as_json:
        output.say("no jobs")
    if silent is not None:
        raise silent


def _ask_scheduler(jobs_shown: list[tuple[Job, dict[str, Any]]], connection: Connection) -> RetryError | None:
    """Add to each status what the scheduler knows; the error if it does not answer: what the folders say is shown all
    the same."""
    at = connection.cluster()
    if at is None:
        return None
    try:
        known = load("ops.submit").on_scheduler([job for job, _ in jobs_shown], at)
    except RetryError as error:
        return error
    for (job, status), there in zip(jobs_shown, known, strict=True):
        status["scheduler"] = there
        if there["state"] is None and status["state"] in ("waiting", "running", "retrying"):
            status["advice"] = f"the scheduler does not know the job; resume it with `kme-dist jobs resume {job.id}`"
    return None


@jobs_app.command()
@expand_options
def status(which: JobOptions, connection: Connection, output: Output) -> None:
    """Show the status of a job, from its folder; with --scheduler also where its driver runs."""
    job = which.job()
    facts = job.status()
    silent = _ask_scheduler([(job, facts)], connection)
    _print_facts(facts, output)
    if silent is not None:
        raise silent


@jobs_app.command()
@expand_options
def logs(
    which: JobOptions,
    output: Output,
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing until the job has ended.")] = False,
) -> None:
    """Print the log of a job."""
    job, shown = which.job(), 0
    while True:
        ended = job.status()["state"] in ENDED
        lines = job.logs()
        if output.as_json and not follow:
            print_json({"id": job.id, "lines": lines})
            return
        for line in lines[shown:]:
            text = f"{line['time']}  {line['level']:7}  {line['message']}"
            print(json.dumps(line) if output.as_json else text, flush=True)
        shown = len(lines)
        if ended or not follow:
            return
        time.sleep(0.5)


@jobs_app.command()
@expand_options
def wait(
    which: JobOptions,
    connection: Connection,
    output: Output,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait; then exit code 75.")] = None,
) -> None:
    """Wait for a job; the exit code is that of the job, 130 if it was cancelled, 75 if it is lost. With --scheduler
    the wait ends with 75 as soon as the scheduler is gone or does not know the job."""
    _wait_for(which.job(), connection.cluster(), output, math.inf if timeout is None else timeout)


def _wait_for(job: Job, at: ClusterConfig | None, output: Output, timeout_s: float = math.inf) -> None:
    shown = [""]

    def show(status: Mapping[str, Any]) -> None:
        line = f"{status['state']} {_progress(status)}".rstrip()
        if shown != [line]:
            shown[:] = [line]
            output.say(line)

    facts = load("ops.submit").wait(job, timeout_s, show, at)
    output.result(facts, f"{facts['id']} {facts['state']}")
    exit_like(facts)


@jobs_app.command()
@expand_options
def cancel(
    which: JobOptions,
    connection: Connection,
    output: Output,
    grace: Annotated[float, typer.Option(help="Seconds for the driver to stop by itself.")] = 30.0,
) -> None:
    """Ask a job to stop; if it does not, restart the workers that run its tasks (with --scheduler)."""
    facts = load("ops.submit").cancel(which.job(), connection.cluster(), grace_s=grace)
    output.result(facts, f"{facts['id']} {facts['state']}")


@jobs_app.command()
@expand_options
def resume(which: JobOptions, connection: Connection, output: Output) -> None:
    """Resume a job that failed, was cancelled or lost its scheduler; without --scheduler in this process."""
    job, at = which.job(), connection.cluster()
    if at is not None:
        submit_job(job, at)
    else:
        job.request()
        (job.folder / "cancel").unlink(missing_ok=True)
        drive_here(job, 0.0, output.say)
    facts = job.status()
    output.result(facts, f"{job.id} {facts['state']}")
    if at is None:
        exit_like(facts)


@dataclass(frozen=True)
class KeepOptions:
    """How a supervisor looks after jobs, and whom it tells."""

    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the jobs.")] = 10.0
    limit: Annotated[int, typer.Option(min=0, help="Resubmissions of one job before it is marked as failed.")] = 5
    once: Annotated[bool, typer.Option("--once", help="Look twice, then exit: for cron.")] = False
    command: Annotated[
        str | None,
        typer.Option("--notify-command", metavar="COMMAND", help="Run it, with JSON on stdin, when a job ends."),
    ] = None
    url: Annotated[str | None, typer.Option("--notify-url", help="POST the same JSON to this URL.")] = None


@jobs_app.command()
@expand_options
def keep(wanted: KeepOptions, connection: Connection, output: Output, root: Root = None) -> None:
    """Resubmit jobs that have lost their driver or their scheduler, until interrupted; tell when jobs end."""
    at = connection.cluster()
    if at is None:
        raise ConfigError("no scheduler address: use --scheduler ADDRESS")
    supervisors = load("ops.supervisor")
    supervisor = supervisors.Supervisor(
        job_root(root),
        at,
        load("pipelines.job").run_pipeline,
        say=output.say,
        limit=wanted.limit,
        notices=supervisors.Notices(shlex.split(wanted.command or ""), wanted.url),
    )
    stop = threading.Event()
    if wanted.once:
        supervisor.look()
        stop.wait(wanted.every)
        resubmitted = supervisor.look()
        output.result({"resubmitted": resubmitted}, *resubmitted)
        return
    supervisor.keep(stop, wanted.every)


@jobs_app.command()
@expand_options
def prune(
    output: Output,
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Of the end of a job, e.g. 30d or 12h.")],
    root: Root = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print which jobs would be deleted.")] = False,
) -> None:
    """Delete the folders of jobs that ended long ago, with the run folders inside them (`output/`)."""
    before = _moment("--older-than", older_than)
    gone = []
    for job in jobs.list_jobs(job_root(root)):
        status = _status_or_damaged(job)
        if status is not None and status["state"] in ENDED and parse_time(status["ended"]) < before:
            gone.append(job.id)
            if not dry_run:
                shutil.rmtree(job.folder)
    output.result({"deleted": [] if dry_run else gone, "found": gone}, *gone)
    if not output.as_json:
        output.say(f"{counted(len(gone), 'job')} {'would be deleted' if dry_run else 'deleted'}")


def _moment(option: str, text: str) -> datetime.datetime:
    """A time, or an age before now such as 7d, 12h, 30m."""
    if (match := re.fullmatch(r"(\d+)([dhms])", text)) is not None:
        unit = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}[match[2]]
        return utc_now() - datetime.timedelta(**{unit: int(match[1])})
    try:
        return parse_time(text)
    except ConfigError:
        raise ConfigError(f"{option} {text!r}: must be an age such as 7d, 12h or 30m, or a time in ISO 8601") from None


# -------------------------------------------------------------------------------------------------


def submit_job(job: Job, at: ClusterConfig) -> None:
    load("ops.submit").submit(job, at, load("pipelines.job").run_pipeline)


def drive_here(job: Job, wait_s: float, say: Callable[[str], None]) -> None:
    try:
        with contextlib.suppress(Cancelled):  # the job's folder says so, and the caller reads it
            drive(job, load("pipelines.job").run_pipeline, wait_s=wait_s, say=say)
    except LeaseLost as error:
        raise RetryError(f"another process took over because this one had stalled ({error})") from None


def exit_like(facts: Mapping[str, Any]) -> None:
    """Exit with the code of a job that has ended."""
    if facts["state"] == "cancelled":
        raise JobCancelled(f"the job {facts['id']} was cancelled; resume it with `kme-dist jobs resume {facts['id']}`")
    if facts["state"] == "failed":
        print(f"error: {facts.get('error', 'the job failed')}", file=sys.stderr)
    code = 0 if facts["state"] == "succeeded" else facts.get("exit_code", 1)
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


def _print_facts(facts: Mapping[str, Any], output: Output) -> None:
    if output.as_json:
        print_json(facts)
    else:
        print_tree({key: value for key, value in facts.items() if value is not None}, width=400)
