"""The command `schedule`: a pipeline at the times of a cron expression, or once for each time of a range in the past.

    kme-dist schedule nightly.yaml --pipeline predict --cron "0 2 * * *"
    kme-dist schedule nightly.yaml --once --at 2026-03-01T02:00:00Z
    kme-dist schedule nightly.yaml --cron "0 2 * * *" --backfill 2026-03-01..2026-03-31

Every run is a process of its own, started for one scheduled time. With --scheduler lost jobs are resubmitted meanwhile,
as by `kme-dist jobs keep`.
"""

from __future__ import annotations

import datetime
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from kme_dist.cli.drivers import kept_jobs
from kme_dist.cli.jobs import drive_here, exit_like, submit_job
from kme_dist.cli.options import (
    Connection,
    JobConfig,
    OnModelChange,
    Output,
    Overrides,
    Pipeline,
    Root,
    expand_options,
    load,
)
from kme_dist.config import ClusterConfig, load_config
from kme_dist.errors import ConfigError
from kme_dist.ops import jobs
from kme_dist.ops.jobs import Job, create_job, job_root
from kme_dist.ops.schedule import (
    backfill,
    backfill_times,
    dated,
    fire_times,
    keep_schedule,
    parse_time,
    stamp,
    utc_now,
    zone_of,
)


def add_commands(app: typer.Typer) -> None:
    app.command()(expand_options(schedule))


@dataclass(frozen=True)
class ScheduleOptions:
    """What runs when."""

    cron: Annotated[str | None, typer.Option(help="Minute hour day month weekday, e.g. '0 2 * * *'.")] = None
    once: Annotated[bool, typer.Option("--once", help="Run for one scheduled time (--at) now, then exit.")] = False
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Scheduled time of --once; default: now.")] = None
    backfill: Annotated[
        str | None,
        typer.Option(metavar="FROM..TO", help="Run for each time of --cron in this range, in order, then exit."),
    ] = None
    pipeline: Pipeline = "predict"
    on_model_change: OnModelChange = None
    timezone: Annotated[str, typer.Option(help="Time zone of --cron and of {date}, e.g. Europe/Berlin.")] = "UTC"
    patience: Annotated[
        float, typer.Option(help="Seconds that a second start of the same run waits for the result of the first.")
    ] = 60.0
    root: Root = None


def schedule(
    config: JobConfig, wanted: ScheduleOptions, connection: Connection, output: Output, overrides: Overrides = None
) -> None:
    """Run a pipeline at the times of a cron expression, exactly once for each time however often it is started."""
    changes = list(overrides or [])
    if wanted.on_model_change is not None:
        changes.append(f"predict.on_model_change={wanted.on_model_change}")
    settings = load_config(config, changes)  # also without --once: report mistakes now, not at night
    if wanted.once:
        when = parse_time(wanted.at) if wanted.at is not None else utc_now().replace(second=0)
        job = create_job(
            job_root(wanted.root),
            pipeline=wanted.pipeline,
            config=dated(settings, when, zone_of(wanted.timezone)),
            name=config.stem,
            job_id=jobs.scheduled_id(config.stem, when),
            scheduled=stamp(when),
        )
        _run_once(job, connection.cluster(), wanted.patience, output.say)
        facts = job.status()
        output.result(facts, f"{job.id} {facts['state']}")
        exit_like(facts)
        return
    if wanted.cron is None or wanted.at is not None:
        raise ConfigError("--cron is missing; or use --once (with --at TIME) for a single run")
    root = job_root(wanted.root)
    options = [f"--set={change}" for change in changes]
    options += ["--pipeline", wanted.pipeline, "--root", str(root), f"--patience={wanted.patience}"]
    options += [f"--timezone={wanted.timezone}"]
    options += [f"--scheduler={connection.scheduler}"] if connection.scheduler else []
    options += [f"--tls={connection.tls}"] if connection.tls else []
    flags = {"--allow-insecure": connection.insecure, "--json": output.as_json, "--quiet": output.quiet}
    options += [flag for flag, given in flags.items() if given]
    command = [sys.executable, "-m", "kme_dist", "schedule", str(config), "--once", *options]
    trigger = fire_times(wanted.cron, wanted.timezone)

    def start(when: datetime.datetime) -> list[str]:
        return [*command, "--at", stamp(when)]

    def is_done(when: datetime.datetime) -> bool:
        return jobs.job_at(root, jobs.scheduled_id(config.stem, when)).result() is not None

    times = None if wanted.backfill is None else backfill_times(trigger, wanted.backfill, zone_of(wanted.timezone))
    stop = threading.Event()
    with kept_jobs(root, connection.cluster(), output.say):
        if times is None:
            keep_schedule(trigger, start=start, stop=stop, say=output.say)
            return
        code = backfill(times, start=start, is_done=is_done, stop=stop, say=output.say)
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)


def _run_once(job: Job, at: ClusterConfig | None, patience_s: float, say: Callable[[str], None]) -> None:
    if job.result() is not None:
        say(f"{job.id} is already done")
    elif at is not None:
        begun = bool(job.events()) and job.status()["state"] in ("waiting", "running", "retrying")
        submit_job(job, at)
        load("ops.submit").wait(job, patience_s if begun else math.inf)
    else:
        drive_here(job, patience_s, say)
