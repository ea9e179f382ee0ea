"""The driver of a job: holds its lease, runs its pipeline, retries, and writes down how it ended.

    drive(job, run_pipeline)        # here, or on a worker of a cluster (see kme_dist.ops.submit)

Any number of processes may drive the same job: one of them holds the lease, and another resumes when that one died.
What a pipeline is, the driver does not know: `run_pipeline` (of kme_dist.pipelines.job) is passed down to it.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kme_dist.config import Config, parse_config
from kme_dist.data.leases import EpochLease, LeaseLost
from kme_dist.data.places import store_errors
from kme_dist.errors import ConfigError, CorruptError, KMEError, RetryError, counted
from kme_dist.failpoints import passing
from kme_dist.ops.jobs import PIPELINES, Job, now

ATTEMPTS = 3  # of one driver, when the infrastructure fails
PAUSE_S = 5.0  # before its second attempt; twice as long before the third
CHECK_EVERY_S = 0.5  # how often a driver checks whether it should stop
LOG_EVERY_S = 2.0  # how often progress goes to the log


class Cancelled(BaseException):
    """The job was asked to stop. Not an Exception: only the driver may catch it."""


class RunPipeline(Protocol):
    """Runs the pipeline of that name and returns its result; reports to `listener` while it does."""

    def __call__(
        self, pipeline: str, config: Config, *, name: str, command: str, listener: JobListener
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class DriverHost:
    """The process that drives a job."""

    holder: str | None = None  # its name in the lease; the process id and host by default
    cluster: Mapping[str, Any] | None = None  # section `cluster` to use instead of the configuration's own
    shutting_down: Callable[[], bool] = lambda: False  # polled: when true, the driver stops so that another can resume


def orphaned() -> Callable[[], bool]:
    """Whether the process that started this one is gone, and with it whoever would start the driver again."""
    parent = os.getppid()
    return lambda: os.getppid() != parent


def drive(
    job: Job,
    run_pipeline: RunPipeline,
    *,
    host: DriverHost | None = None,
    wait_s: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the job's pipeline, or wait for its current driver and take over when that one dies; returns done.json.

    RetryError when another living driver holds the lease for longer than `wait_s`.
    """
    host = host or DriverHost()
    request = job.request()
    lease = EpochLease.take(job.place, holder=host.holder, wait_s=wait_s, finished=lambda: job.result() is not None)
    if lease is None:
        return _finished(job)
    with lease:
        if (done := job.result()) is not None:
            return done
        listener = JobListener(job, lease, host.shutting_down, say, bool(request.get("scheduled")))
        try:
            with store_errors(job.place):  # a full disk is an infrastructure failure wherever it is noticed
                passing("job.before_run")
                listener.check()
                result = _attempts(job, request, run_pipeline, host, listener)
                passing("job.before_result")
                lease.check()
                done = {"id": job.id, "state": "succeeded", "ended": now(), "epoch": lease.epoch, "result": result}
                committed = job.commit(done)
                passing("job.after_result")
        except Cancelled:
            job.event("cancelled", epoch=lease.epoch)
            raise
        except LeaseLost as error:
            job.log(f"{error}; this driver stops", level="warning", epoch=lease.epoch)
            raise
        except BaseException as error:
            _record_failure(job, lease.epoch, error)
            raise
        if not committed:
            return _finished(job)
        job.event("succeeded", epoch=lease.epoch)
        job.log("succeeded", epoch=lease.epoch)
        return done


def _attempts(
    job: Job, request: Mapping[str, Any], run_pipeline: RunPipeline, host: DriverHost, listener: JobListener
) -> dict[str, Any]:
    epoch, holder = listener.lease.epoch, listener.lease.holder
    for attempt in range(1, ATTEMPTS + 1):
        job.event("running", epoch=epoch, driver=holder)
        job.log(f"{holder} begins", epoch=epoch)
        pipeline, config = _pipeline_name(request), _config_to_run(job, host.cluster)
        try:
            with store_errors(job.place):
                result = run_pipeline(
                    pipeline, config, name=request["name"], command=f"kme-dist jobs resume {job.id}", listener=listener
                )
            _check_nothing_skipped(result)
            return result
        except RetryError as error:
            if attempt == ATTEMPTS:
                raise
            job.event("retrying", epoch=epoch, error=str(error), exit_code=error.exit_code)
            job.log(f"{error}; attempt {attempt + 1} of {ATTEMPTS} follows", level="warning")
            listener.pause(PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _check_nothing_skipped(result: Mapping[str, Any]) -> None:
    chunks, rows = len(result.get("quarantined", ())), result.get("skipped_rows", 0)
    found = [f"{counted(chunks, 'chunk')} that could not be read (quarantined)"] if chunks else []
    found += [f"{counted(rows, 'row', ',')} that are not finite"] if rows else []
    if found:
        predictions = result.get("data_predictions", result).get("predictions")
        raise CorruptError(f"skipped {' and '.join(found)}, the others are done; see `kme-dist inspect {predictions}`")


def _pipeline_name(request: Mapping[str, Any]) -> str:
    if request["pipeline"] not in PIPELINES:
        raise ConfigError(f"job.json names the pipeline {request['pipeline']!r}; known are {', '.join(PIPELINES)}")
    return str(request["pipeline"])


def _config_to_run(job: Job, cluster: Mapping[str, Any] | None) -> Config:
    tree = job.config().model_dump(mode="json", exclude_unset=True)
    if cluster is not None:
        tree["cluster"] = dict(cluster)
    if not (tree.get("output") or {}).get("folder"):
        # The runs of a schedule share one run folder, like the same command typed every night.
        request = job.request()
        folder = job.root / "runs" / request["name"] if request.get("scheduled") else job.folder / "output"
        tree["output"] = {**(tree.get("output") or {}), "folder": str(folder)}
    return parse_config(tree, str(job.folder / "config.yaml"))


def _record_failure(job: Job, epoch: int, error: BaseException) -> None:
    ours = isinstance(error, KMEError)
    code = error.exit_code if isinstance(error, KMEError) else 1 if isinstance(error, Exception) else 130
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    with contextlib.suppress(KMEError, OSError):  # a full disk: the first error is the one to report
        job.event("failed", epoch=epoch, exit_code=code, error=" ".join(text.split()))
        trace = {} if ours else {"traceback": "".join(traceback.format_exception(error))}
        job.log(f"failed: {text}", level="error", epoch=epoch, **trace)


def _finished(job: Job) -> dict[str, Any]:
    done = job.result()
    if done is None:
        raise CorruptError(f"{job.folder / 'done.json'} was there and is gone; start the job again")
    return done


@dataclass
class JobListener:
    """Writes what a pipeline reports to the job's log, and checks at the same moments whether the driver must stop."""

    job: Job
    lease: EpochLease
    shutting_down: Callable[[], bool]
    tell: Callable[[str], None]
    scheduled: bool = False  # started by a schedule
    _checked: float = field(default=0.0, repr=False)
    _logged: float = field(default=0.0, repr=False)

    def start(self, name: str) -> None:
        if name:
            self.say(f"starting from {name}")

    def step(self, record: dict[str, Any]) -> None:
        done, total = record.get("step"), record.get("steps")
        wanted = ("objective", "risk", "complexity", "accuracy")
        numbers: dict[str, Any] = {key: record[key] for key in wanted if key in record}
        self._progress({"stage": str(record.get("phase") or "learn"), "done": done, "total": total, **numbers})

    def progress(self, stage: str, done: int, total: int | None) -> None:
        self._progress({"stage": stage, "done": done, "total": total})

    def begin(self, stage: str) -> None:
        """A stage that may say nothing until it ends."""
        self.lease.progress = {"stage": stage, "done": 0, "total": None}

    def say(self, line: str) -> None:
        self.check()
        done, total = getattr(line, "done", None), getattr(line, "total", None)
        if done is not None and total is not None:
            self.lease.progress = {"stage": line.partition(":")[0], "done": done, "total": total}
        self.job.log(line, epoch=self.lease.epoch)
        self.tell(line)

    def _progress(self, facts: dict[str, Any]) -> None:
        self.lease.progress = facts
        if time.monotonic() - self._logged >= LOG_EVERY_S or facts["done"] == facts["total"]:
            self._logged = time.monotonic()
            of = f" of {facts['total']}" if facts["total"] is not None else ""
            self.job.log(f"{facts['stage']}: {facts['done']}{of}", epoch=self.lease.epoch, progress=facts)
        self.check()

    def check(self) -> None:
        """Stop here when the job was cancelled, another driver took over, or this process is shutting down."""
        if time.monotonic() - self._checked < CHECK_EVERY_S:
            return
        self._checked = time.monotonic()
        if self.shutting_down():
            raise LeaseLost(f"{self.lease.holder} is shutting down")
        self.lease.check()
        if self.job.stop_requested:
            raise Cancelled(self.job.id)

    def pause(self, seconds: float) -> None:
        """Wait, but stop when asked to."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(CHECK_EVERY_S, seconds))
            self.check()
