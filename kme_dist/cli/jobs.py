"""Commands for what goes on by itself: cluster, submit, jobs, schedule, certs.

    kme-dist cluster --tls certs --listen 10.0.0.5:8786
    kme-dist submit configs/covtype.yaml --scheduler tls://cluster:8786 --tls certs
    kme-dist jobs status covtype-20260301-101500-4f2a1c
    kme-dist schedule nightly.yaml --pipeline predict --cron "0 2 * * *"
    kme-dist certs certs

`jobs` reads the job's folder first and asks the scheduler only where an address is given. `logs` needs none: all
drivers write into the folder.
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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kme_dist.config import ClusterConfig, load_config
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError

if TYPE_CHECKING:
    from kme_dist.ops.jobs import Job

jobs_app = typer.Typer(name="jobs", help="Jobs under the root folder: list, status, logs, wait, cancel, resume.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no messages, errors only.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the config.")
]
Root = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder of jobs and data; else KME_ROOT, else the current folder.")
]
Scheduler = Annotated[str | None, typer.Option(metavar="ADDRESS", help="The Dask scheduler, e.g. tls://host:8786.")]
Tls = Annotated[str | None, typer.Option(metavar="DIR", help="Folder of `kme-dist certs`; else KME_TLS.")]
Insecure = Annotated[bool, typer.Option("--allow-insecure", help="Reach another machine without TLS.")]
Pipeline = Annotated[str, typer.Option(help="run, learn, fit, predict or evaluate.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="Name of the job, as `submit` printed it.")]


def add_commands(app: typer.Typer) -> None:
    for command in (cluster, submit, schedule, certs):
        app.command()(command)
    app.add_typer(jobs_app)


def cluster(
    workers: Annotated[int | None, typer.Option(help="Worker processes; one for each core when absent.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of a worker, e.g. 2GiB.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve other machines there; needs --tls.")
    ] = None,
    tls: Annotated[
        str | None, typer.Option(metavar="DIR", help="Encrypt with the certificates in DIR; made if they are missing.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--allow-insecure", help="Serve other machines without TLS.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Start a cluster on this machine and keep it up until interrupted, which ends it with exit code 0."""
    from kme_dist.config import ClusterConfig
    from kme_dist.ops.certs import make_certificates, tls_files
    from kme_dist.ops.cluster import dashboard_of, open_client

    if workers is not None and workers < 1:
        raise typer.BadParameter(f"--workers is {workers}; at least 1 is needed.")
    if tls is not None:
        make_certificates(tls)
    settings = ClusterConfig(
        workers=workers,
        memory=memory,
        address=None if listen is None else f"{'tls' if tls else 'tcp'}://{listen}",
        tls=None if tls is None else tls_files(tls, "cluster"),
        insecure=insecure,
    )
    with _signals_only_end() as wait_for_one, open_client(settings) as client:
        facts = {"scheduler": client.scheduler.address, "dashboard": dashboard_of(client)}
        if as_json:
            _print_json(facts)
        else:
            print(f"scheduler {facts['scheduler']}  dashboard {facts['dashboard']}")
        sys.stdout.flush()
        _stderr_printer(quiet)("Ctrl-C stops it")
        wait_for_one()


@contextlib.contextmanager
def _signals_only_end() -> Iterator[Callable[[], None]]:
    """A function that waits for SIGINT or SIGTERM, which from here on do nothing else, however many come and whenever:
    a cluster that is being started or closed is not torn apart."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        asked.set()

    def wait() -> None:
        while not asked.is_set() and signal.sigtimedwait({signal.SIGINT}, 0.5) is None:
            pass

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    # Workers inherit that it is blocked: Ctrl-C in a terminal is sent to them too, and they are to end in order.
    # Python's own helper for child processes unblocks it when it is started, so it is started first.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield wait
    except BaseException:  # without one the process is about to end, and stays deaf until it has
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
        raise


def submit(
    config: Annotated[Path, typer.Argument(help="YAML file; its paths are counted from the root.")],
    scheduler: Scheduler = None,
    pipeline: Pipeline = "run",
    root: Root = None,
    tls: Tls = None,
    insecure: Insecure = False,
    name: Annotated[str | None, typer.Option("--id", help="Name of the job; made up when absent.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a pipeline on a running cluster and detach; prints the name of the job."""
    from kme_dist.ops.jobs import create_job, job_root
    from kme_dist.ops.submit import submit as hand_over

    settings = load_config(config, overrides or [])
    job = create_job(job_root(root), pipeline=pipeline, config=settings, name=config.stem, job_id=name)
    try:
        hand_over(job, _cluster(scheduler or settings.cluster.address, tls, insecure, settings.cluster))
    except KMEError:
        if name is None and not job.events():  # nobody has heard of it: as if it had never been
            shutil.rmtree(job.folder)
        raise
    if as_json:
        _print_json({"id": job.id, "folder": str(job.folder)})
        return
    print(job.id)
    if not quiet:
        print(f"it keeps running; see `kme-dist jobs status {job.id}`", file=sys.stderr)


@jobs_app.command("list")
def list_all(
    root: Root = None,
    scheduler: Scheduler = None,
    tls: Tls = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """All jobs, the oldest first; with --scheduler also which of them it does not know any more."""
    from kme_dist.ops.jobs import ENDED, job_root, list_jobs

    jobs = list_jobs(job_root(root))
    found = [status for job in jobs if (status := _status_or_damage(job)) is not None]
    if scheduler is not None:
        from kme_dist.ops.submit import on_scheduler

        at = _cluster(scheduler, tls, insecure)
        going_on = [status for status in found if status["state"] not in (*ENDED, "damaged")]
        wanted = {status["id"] for status in going_on}
        known = on_scheduler([job for job in jobs if job.id in wanted], at)
        for status, there in zip(going_on, known, strict=True):
            status["scheduler"] = there
    if as_json:
        _print_json({"jobs": found})
        return
    width = max((len(status["id"]) for status in found), default=0)
    for status in found:
        unknown = "  not on the scheduler" if status.get("scheduler", {"state": ""})["state"] is None else ""
        line = f"{status['id']:{width}}  {status['pipeline']:8}  {status['state']:9}  {_progress(status)}"
        print(f"{line.rstrip()}{unknown}")
    if not found and not quiet:
        print("no jobs yet", file=sys.stderr)


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
    """How a job stands, from its folder; with --scheduler also where its driver runs."""
    job = _job(root, job_id)
    facts = job.status()
    if scheduler is not None:
        from kme_dist.ops.submit import on_scheduler

        (found,) = on_scheduler([job], _cluster(scheduler, tls, insecure))
        facts["scheduler"] = found
        if found["state"] is None and facts["state"] in ("waiting", "running", "retrying"):
            facts["advice"] = f"the scheduler does not know it; resume it with `kme-dist jobs resume {job.id}`"
    if as_json:
        _print_json(facts)
    else:
        _print_facts(facts)


@jobs_app.command()
def logs(
    job_id: JobId,
    root: Root = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job has ended.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What the job's drivers wrote, a line each."""
    from kme_dist.ops.jobs import ENDED

    job, shown = _job(root, job_id), 0
    while True:
        ended = job.status()["state"] in ENDED
        lines = job.logs()
        if as_json and not follow:
            _print_json({"id": job.id, "lines": lines})
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
    timeout: Annotated[float | None, typer.Option(help="Seconds after which to give up with exit code 75.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Wait for a job; the exit code is the job's own (130 when it was cancelled). With --scheduler the wait is over,
    with exit code 75, when that is gone or does not know the job."""
    from kme_dist.ops.submit import wait as wait_for

    told: list[str] = []

    def tell(status: Mapping[str, Any]) -> None:
        line = f"{status['state']} {_progress(status)}".rstrip()
        if not quiet and told[-1:] != [line]:
            told.append(line)
            print(line, file=sys.stderr, flush=True)

    cluster = None if scheduler is None else _cluster(scheduler, tls, insecure)
    facts = wait_for(_job(root, job_id), math.inf if timeout is None else timeout, tell, cluster)
    _end_with(facts, as_json)


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
    """Ask a job to stop; when it does not, restart the workers that work for it (with --scheduler)."""
    from kme_dist.ops.submit import cancel as stop

    cluster = None if scheduler is None else _cluster(scheduler, tls, insecure)
    facts = stop(_job(root, job_id), cluster, grace_s=grace)
    if as_json:
        _print_json(facts)
    else:
        print(f"{facts['id']} {facts['state']}")


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
    """Go on with a job that failed, was cancelled or lost its scheduler; in this process without --scheduler."""
    from kme_dist.ops.submit import submit as hand_over

    job = _job(root, job_id)
    if scheduler is not None:
        hand_over(job, _cluster(scheduler, tls, insecure))
    else:
        job.request()
        (job.folder / "cancel").unlink(missing_ok=True)
        _drive_here(job, 0.0, _stderr_printer(quiet))
    if as_json:
        _print_json(job.status())
    else:
        print(f"{job.id} {job.status()['state']}")


def schedule(
    config: Annotated[Path, typer.Argument(help="YAML file; its paths are counted from the root.")],
    cron: Annotated[str | None, typer.Option(help="When: minute hour day month weekday, e.g. '0 2 * * *'.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Do the run of one time (--at) now, and end.")] = False,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="The scheduled time of --once; now if absent.")] = None,
    pipeline: Pipeline = "predict",
    timezone: Annotated[str, typer.Option(help="Of the cron expression, e.g. Europe/Berlin.")] = "UTC",
    patience: Annotated[
        float, typer.Option(help="Seconds that a second start of the same run waits for the first one's result.")
    ] = 60.0,
    scheduler: Scheduler = None,
    root: Root = None,
    tls: Tls = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a pipeline at the times of a cron expression, once for each time however often it is started."""
    if once:
        cluster = None if scheduler is None else _cluster(scheduler, tls, insecure)
        facts = _scheduled_run(config, at, pipeline, root, cluster, overrides or [], patience, _stderr_printer(quiet))
        if as_json:
            _print_json(facts)
        else:
            print(f"{facts['id']} {facts['state']}")
        return
    if cron is None or at is not None:
        raise ConfigError("--cron is missing; or use --once (with --at TIME) to do one run of a schedule")
    from kme_dist.ops.jobs import job_root
    from kme_dist.ops.schedule import fire_times, keep_schedule, stamp

    load_config(config, overrides or [])  # mistakes are told now, not at night
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
        say=_stderr_printer(quiet),
    )


def _scheduled_run(
    config: Path,
    at: str | None,
    pipeline: str,
    root: str | None,
    cluster: ClusterConfig | None,
    overrides: list[str],
    patience_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    from kme_dist.ops.jobs import create_job, job_root, scheduled_id
    from kme_dist.ops.schedule import parse_time, stamp, utc_now
    from kme_dist.ops.submit import submit as hand_over
    from kme_dist.ops.submit import wait as wait_for

    when = parse_time(at) if at is not None else utc_now().replace(second=0)
    settings = load_config(config, overrides)
    job = create_job(
        job_root(root),
        pipeline=pipeline,
        config=settings,
        name=config.stem,
        job_id=scheduled_id(config.stem, when),
        scheduled=stamp(when),
    )
    if job.result() is not None:
        say(f"{job.id} is done already")
    elif cluster is not None:
        hand_over(job, cluster)
        _end_with(wait_for(job), as_json=False, silent=True)
    else:
        _drive_here(job, patience_s, say)
    return job.status()


def certs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder for the certificates.")],
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Make the certificates anew, by the same authority.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make a private authority and certificates for one cluster; what is there stays."""
    from kme_dist.ops.certs import make_certificates

    facts = make_certificates(folder, days=days, renew=renew)
    if as_json:
        _print_json(facts)
    else:
        _print_facts(facts)


# -------------------------------------------------------------------------------------------------


def _job(root: str | None, job_id: str) -> Job:
    from kme_dist.ops.jobs import job_at, job_root

    return job_at(job_root(root), job_id)


def _status_or_damage(job: Job) -> dict[str, Any] | None:
    """How a job of a list stands; None for one that was removed meanwhile. One that is damaged hides no other."""
    try:
        return job.status()
    except CorruptError as error:
        return {"id": job.id, "pipeline": "", "state": "damaged", "error": str(error)}
    except DataError:
        return None


def _drive_here(job: Job, wait_s: float, say: Callable[[str], None]) -> None:
    from kme_dist.data.leases import LeaseLost
    from kme_dist.ops.jobs import Cancelled, drive

    try:
        drive(job, wait_s=wait_s, say=say)
    except Cancelled:
        say(f"{job.id} was cancelled")
        raise typer.Exit(130) from None
    except LeaseLost as error:
        raise RetryError(f"another process took over while this one made no progress ({error})") from None


def _cluster(
    scheduler: str | None, tls: str | None, insecure: bool, settings: ClusterConfig | None = None
) -> ClusterConfig:
    """How to reach the scheduler: the command line first, then the configuration."""
    from kme_dist.ops.certs import tls_files

    if scheduler is None:
        raise ConfigError("which cluster? give --scheduler ADDRESS, or cluster.address in the config")
    known = settings or ClusterConfig()
    return ClusterConfig(
        kind="address",
        address=scheduler,
        tls=tls_files(tls) if tls is not None else known.tls,
        insecure=insecure or known.insecure,
    )


def _end_with(facts: dict[str, Any], as_json: bool, silent: bool = False) -> None:
    """Print how a job ended, and end as it did."""
    if as_json:
        _print_json(facts)
    elif not silent:
        print(f"{facts['id']} {facts['state']}")
    if facts["state"] == "failed":
        print(f"error: {facts.get('error', 'the job failed')}", file=sys.stderr)
    code = {"succeeded": 0, "cancelled": 130}.get(facts["state"], facts.get("exit_code", 1))
    if code:
        raise typer.Exit(code)


def _progress(status: Mapping[str, Any]) -> str:
    progress = status.get("progress")
    if not progress:
        return str(status.get("error", ""))
    of = f"/{progress['total']}" if progress.get("total") is not None else ""
    return f"{progress['stage']} {progress['done']}{of}"


def _stderr_printer(quiet: bool) -> Callable[[str], None]:
    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def _print_facts(facts: Mapping[str, Any]) -> None:
    shown = {key: value for key, value in facts.items() if value is not None}
    width = max(len(key) for key in shown)
    for key, value in shown.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        print(f"{key:{width}}  {text if len(text) <= 400 else text[:397] + '...'}")
