"""Jobs that outlive whoever started them: everything there is to know about one lies in its folder.

    job = create_job(root, pipeline="learn", config=config, name="nightly")
    drive(job)                      # here, or on a worker of a cluster (see kme_dist.ops.submit)
    job.status()["state"]           # waiting, running, retrying, succeeded, failed or cancelled

    ROOT/runs/<id>/job.json         what was asked for; never changes
                   config.yaml      the configuration, its paths counted from ROOT
                   lease/<epoch>    who drives the job: whoever creates the next epoch does, all earlier ones stop
                   events.jsonl     changes of state
                   log.jsonl        messages and progress
                   cancel           there once somebody wants the job stopped
                   done.json        the result; created once and never replaced
                   output/          the run folder of the pipeline: run.json, checkpoints, model, report; the runs
                                    of a schedule share ROOT/runs/<name> instead, and so do only what is new

Any number of processes may start the same job: one of them drives it, and a later one goes on when that one died. A
job names a pipeline of the installed package and carries a configuration, never code. Paths in the configuration
stay under ROOT, which is `--root`, else the environment variable KME_ROOT, else the current folder. What looks like a
secret in the environment never gets into these files.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from kme_dist.config import Config, parse_config, parse_yaml
from kme_dist.data.leases import EpochLease, LeaseLost, latest_epoch
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError

JOB_FORMAT = "kme-dist job 1"
PIPELINES = ("run", "learn", "fit", "predict", "evaluate")
STATES = ("waiting", "running", "retrying", "succeeded", "failed", "cancelled")
ENDED = ("succeeded", "failed", "cancelled")
# The keys of a configuration that name files; a test knows every other key that holds text.
PATH_KEYS = (
    ("data", "source"),
    ("data", "test_source"),
    ("predict", "data"),
    ("predict", "model"),
    ("predict", "out"),
    ("predict", "like"),
    ("predict", "expectations"),  # names, each with a file or with values
    ("output", "folder"),
)
ATTEMPTS = 3  # of one driver, when the infrastructure fails
PAUSE_S = 5.0  # before its second attempt; twice as long before the third
LOOK_EVERY_S = 0.5  # how often a driver looks whether it should stop
SAY_EVERY_S = 2.0  # how often progress goes to the log
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|PRIVATE|ACCESS_KEY|API_KEY", re.IGNORECASE)


class Cancelled(BaseException):
    """Somebody asked for the job to stop. Not an Exception: only the driver may catch it."""


@dataclass(frozen=True)
class Job:
    """One job, by where it lies. Nothing is remembered here: every question reads the folder."""

    root: Path
    id: str

    @property
    def folder(self) -> Path:
        return self.root / "runs" / self.id

    @property
    def place(self) -> Place:
        return Place.of(self.folder)

    def request(self) -> dict[str, Any]:
        """What was asked for: job.json."""
        found = _json_file(self.folder / "job.json")
        if found is None:
            raise DataError(
                f"there is no job {self.id} in {self.root / 'runs'}; `kme-dist jobs list` shows those there"
            )
        if found.get("format") != JOB_FORMAT:
            raise CorruptError(
                f"{self.folder / 'job.json'} is not of a job of this version of kme-dist; submit it again"
            )
        return found

    def config(self) -> Config:
        """The configuration, checked again: nothing in a file is believed because we once wrote it."""
        where = self.folder / "config.yaml"
        try:
            tree = parse_yaml(where.read_text(encoding="utf-8"), str(where))
        except FileNotFoundError:
            raise CorruptError(f"{where} is missing; submit the job again") from None
        return confined(parse_config(tree, str(where)), self.root)

    def result(self) -> dict[str, Any] | None:
        """done.json: how the job ended well; None before that."""
        return _json_file(self.folder / "done.json")

    def commit(self, result: Mapping[str, Any]) -> bool:
        """Make a result the job's result. False when there is one already, which then stays."""
        return self.place.write("done.json", redact(json.dumps(result, default=str)).encode(), only_if_absent=True)

    def ask_to_stop(self, reason: str) -> None:
        self.place.write("cancel", redact(json.dumps({"time": now(), "reason": reason})).encode())

    @property
    def asked_to_stop(self) -> bool:
        return (self.folder / "cancel").exists()

    def event(self, state: str, **facts: Any) -> None:
        self._append("events.jsonl", {"time": now(), "state": state, **facts})

    def log(self, message: str, level: str = "info", **facts: Any) -> None:
        self._append("log.jsonl", {"time": now(), "level": level, "job": self.id, "message": message, **facts})

    def _append(self, name: str, line: dict[str, Any]) -> None:
        # One write of a whole line: lines of two processes never mix.
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, (redact(json.dumps(line, default=str)) + "\n").encode())
        finally:
            os.close(descriptor)

    def events(self) -> list[dict[str, Any]]:
        return list(_json_lines(self.folder / "events.jsonl"))

    def logs(self) -> list[dict[str, Any]]:
        return list(_json_lines(self.folder / "log.jsonl"))

    def status(self) -> dict[str, Any]:
        """State, times, driver and progress, from the folder alone."""
        asked, done = self.request(), self.result()
        epoch, lease = latest_epoch(self.place)
        # A driver that lost its lease may still write a line; its epoch gives it away.
        events = self.events()
        told = [event for event in events if event.get("epoch", epoch) >= epoch]
        last = told[-1] if told else {"state": "waiting", "time": asked["submitted"]}
        state = "succeeded" if done is not None else last["state"]
        facts = {
            "id": self.id,
            "pipeline": asked["pipeline"],
            "name": asked["name"],
            "state": state,
            "scheduled": asked.get("scheduled"),
            "submitted": asked["submitted"],
            "started": next((event["time"] for event in events if event["state"] == "running"), None),
            "ended": last["time"] if state in ENDED else None,
            "drivers": epoch,
            "folder": str(self.folder),
        }
        if state in ("running", "retrying") and lease is not None:
            facts["driver"] = lease.get("holder")
            facts["seconds_since_beat"] = self._beat_age(epoch)
            facts["progress"] = lease.get("progress")
        if self.asked_to_stop and state not in ENDED:
            facts["stopping"] = True
        for key in ("exit_code", "error"):
            if state in ("failed", "retrying") and key in last:
                facts[key] = last[key]
        if state == "succeeded":
            facts["exit_code"] = 0
            facts["result"] = (done or {}).get("result")
        return facts

    def _beat_age(self, epoch: int) -> float | None:
        """For people to look at; nothing is decided by a clock."""
        try:
            return round(max(0.0, time.time() - (self.folder / "lease" / f"{epoch:06d}.json").stat().st_mtime), 1)
        except FileNotFoundError:
            return None


# -------------------------------------------------------------------------------------------------
# Where jobs lie, and what they may name


def job_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder under which jobs and their data lie: as given, else KME_ROOT, else the current folder."""
    text = os.fspath(given or os.environ.get("KME_ROOT") or ".")
    if "://" in text:
        raise ConfigError(f"the root {text} is not a folder; run folders lie on a disk that all hosts see")
    root = Path(text).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"the root {root} is not a folder; make it, or set --root or KME_ROOT to another")
    return root


def job_at(root: Path, job_id: str) -> Job:
    """The job of that name, which must be a name and no path."""
    if not _ID.fullmatch(job_id):
        raise ConfigError(f"{job_id!r} is an invalid job id: use letters, digits, dots, dashes and underscores")
    return Job(root, job_id)


def list_jobs(root: Path) -> list[Job]:
    """All jobs under a root, the oldest first."""
    try:
        names = sorted(entry.name for entry in (root / "runs").iterdir() if (entry / "job.json").is_file())
    except FileNotFoundError:
        return []
    jobs = [Job(root, name) for name in names if _ID.fullmatch(name)]
    return sorted(jobs, key=_submitted)


def _submitted(job: Job) -> str:
    try:
        return str((_json_file(job.folder / "job.json") or {}).get("submitted"))
    except CorruptError:
        return ""


def confined(config: Config, root: Path, *, relative: bool = False) -> Config:
    """The configuration with all its paths made absolute, or counted from `root`; refuses those that lead out of it."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    for section, key in PATH_KEYS:
        given = (tree.get(section) or {}).get(key)
        if isinstance(given, dict):
            paths = {name: path for name, path in given.items() if isinstance(path, str)}
            given |= {name: _confined_path(p, root, f"{section}.{key}", relative) for name, p in paths.items()}
        elif isinstance(given, str) and not given.startswith("sklearn:"):
            tree[section][key] = _confined_path(given, root, f"{section}.{key}", relative)
    return parse_config(tree, "the configuration")


def _confined_path(text: str, root: Path, key: str, relative: bool) -> str:
    if "://" in text:
        allowed = [prefix for prefix in os.environ.get("KME_STORES", "").replace(",", " ").split() if prefix]
        address = Place.of(text).address
        if not text.startswith(("s3://", "gs://")) or ".." in address.split("/"):
            raise ConfigError(f"{key} {text}: a job takes paths under its root, s3:// and gs:// addresses")
        if allowed and not any(f"{address}/".startswith(f"{prefix.rstrip('/')}/") for prefix in allowed):
            raise ConfigError(f"{key} {text} lies outside of what KME_STORES allows: {', '.join(allowed)}")
        return address
    # Links are followed before the comparison, so that none of them leads out.
    path = (root / Path(text).expanduser()).resolve()
    if not path.is_relative_to(root):
        raise ConfigError(f"{key} {text} lies outside of the root {root}; move it there, or set --root or KME_ROOT")
    return str(path.relative_to(root)) if relative else str(path)


def new_id(name: str) -> str:
    """A name for a job that nobody else has."""
    return f"{_word(name)}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def scheduled_id(name: str, when: datetime.datetime) -> str:
    """The name of the run of a schedule at one time: the same for everybody who starts it."""
    return f"{_word(name)}-{when.astimezone(datetime.UTC):%Y%m%dT%H%M%SZ}"


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:60] or "job"


def create_job(
    root: Path, *, pipeline: str, config: Config, name: str, job_id: str | None = None, scheduled: str | None = None
) -> Job:
    """Write down what is wanted; the same call with the same `job_id` finds the job that is there."""
    if pipeline not in PIPELINES:
        raise ConfigError(f"there is no pipeline {pipeline!r}; choose one of {', '.join(PIPELINES)}")
    job = job_at(root, job_id or new_id(name))
    _check_apart(job, config, name if scheduled else None)
    kept = confined(config, root, relative=True).model_dump(mode="json", exclude_unset=True)
    asked = {
        "format": JOB_FORMAT,
        "id": job.id,
        "name": name,
        "pipeline": pipeline,
        "scheduled": scheduled,
        "submitted": now(),
        "version": metadata.version("kme-dist"),
    }
    text = redact(yaml.safe_dump(kept, sort_keys=False))
    if not job.place.write("config.yaml", text.encode(), only_if_absent=True):
        there = parse_yaml((job.folder / "config.yaml").read_text(encoding="utf-8"), str(job.folder / "config.yaml"))
        if there != kept:
            raise ConfigError(f"the job {job.id} is there already, with another configuration; choose another name")
    job.place.write("job.json", json.dumps(asked, indent=2).encode(), only_if_absent=True)
    if job.request()["pipeline"] != pipeline:
        raise ConfigError(f"the job {job.id} is there already, with another pipeline; choose another name")
    return job


def _check_apart(job: Job, config: Config, shared: str | None) -> None:
    """A job's own folder is no run folder: each of the two keeps a config.yaml and a log.jsonl of its own."""
    if not (job.folder / "job.json").exists() and (job.folder / "run.json").exists():
        raise ConfigError(
            f"{job.folder} is the run folder of an earlier command, and the job {job.id} would keep its own files "
            "there; choose another name with --id"
        )
    output = config.output.folder or (f"runs/{shared}" if shared else None)
    if output is not None and "://" not in output and (job.root / Path(output).expanduser()).resolve() == job.folder:
        raise ConfigError(
            f"output.folder {output} is the folder of the job {job.id} itself, which keeps its own config and log "
            f"there; choose another name with --id, or leave output.folder out to have it in runs/{job.id}/output"
        )


# -------------------------------------------------------------------------------------------------
# Doing it


def drive(
    job: Job,
    *,
    cluster: Mapping[str, Any] | None = None,
    wait_s: float = 0.0,
    holder: str | None = None,
    stopping: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the job's pipeline, or wait for whoever does and take over when that one dies; returns done.json.

    Parameters
    ----------
    cluster : section `cluster` to use instead of the configuration's own
    wait_s : how long to wait for a living driver before RetryError
    stopping : asked now and then; true when this process is about to go, so that another may drive
    """
    asked = job.request()
    lease = EpochLease.take(job.place, holder=holder, wait_s=wait_s, finished=lambda: job.result() is not None)
    if lease is None:
        return _finished(job)
    with lease:
        if (done := job.result()) is not None:
            return done
        listener = JobListener(job, lease, stopping, say)
        try:
            listener.look()
            result = _attempts(job, asked, cluster, listener)
            lease.check()
        except Cancelled:
            job.event("cancelled", epoch=lease.epoch)
            raise
        except LeaseLost as error:
            job.log(f"{error}; this driver stops", level="warning", epoch=lease.epoch)
            raise
        except BaseException as error:
            _record_failure(job, lease.epoch, error)
            raise
        done = {"id": job.id, "state": "succeeded", "ended": now(), "epoch": lease.epoch, "result": result}
        if not job.commit(done):
            return _finished(job)
        job.event("succeeded", epoch=lease.epoch)
        job.log("succeeded", epoch=lease.epoch)
        return done


def _attempts(
    job: Job, asked: Mapping[str, Any], cluster: Mapping[str, Any] | None, listener: JobListener
) -> dict[str, Any]:
    for attempt in range(1, ATTEMPTS + 1):
        job.event("running", epoch=listener.lease.epoch, driver=listener.lease.holder)
        job.log(f"{listener.lease.holder} begins", epoch=listener.lease.epoch)
        pipeline = importlib.import_module(f"kme_dist.pipelines.{_pipeline_name(asked)}")
        config = _config_to_run(job, cluster)
        try:
            command = f"kme-dist jobs resume {job.id}"
            told = listener.for_pipelines()
            result: dict[str, Any] = pipeline.run(config, name=asked["name"], listener=told, command=command)
            if result.get("quarantined"):
                raise CorruptError(
                    f"{len(result['quarantined'])} chunks could not be read and were skipped (quarantined), the others "
                    "are done; "
                    f"see `kme-dist inspect {result.get('predictions')}`"
                )
            return result
        except RetryError as error:
            if attempt == ATTEMPTS:
                raise
            job.event("retrying", epoch=listener.lease.epoch, error=str(error), exit_code=error.exit_code)
            job.log(f"{error}; attempt {attempt + 1} of {ATTEMPTS} follows", level="warning")
            listener.pause(PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _pipeline_name(asked: Mapping[str, Any]) -> str:
    if asked["pipeline"] not in PIPELINES:
        raise ConfigError(f"job.json names the pipeline {asked['pipeline']!r}; known are {', '.join(PIPELINES)}")
    return str(asked["pipeline"])


def _config_to_run(job: Job, cluster: Mapping[str, Any] | None) -> Config:
    tree = job.config().model_dump(mode="json", exclude_unset=True)
    if cluster is not None:
        tree["cluster"] = dict(cluster)
    if not (tree.get("output") or {}).get("folder"):
        # The runs of a schedule go on with one folder, like the same command typed every night.
        asked = job.request()
        folder = job.root / "runs" / asked["name"] if asked.get("scheduled") else job.folder / "output"
        tree["output"] = {**(tree.get("output") or {}), "folder": str(folder)}
    return parse_config(tree, str(job.folder / "config.yaml"))


def _record_failure(job: Job, epoch: int, error: BaseException) -> None:
    ours = isinstance(error, KMEError)
    code = error.exit_code if isinstance(error, KMEError) else 1 if isinstance(error, Exception) else 130
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # a full disk: the first error is the one to report
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
    """What a pipeline tells while it runs goes to the log; whether it must stop is asked at the same moments."""

    job: Job
    lease: EpochLease
    stopping: Callable[[], bool]
    tell: Callable[[str], None]
    _looked: float = field(default=0.0, repr=False)
    _said: float = field(default=0.0, repr=False)

    def for_pipelines(self) -> Any:
        """The same as the record of functions that pipelines pass around and change."""
        folders = importlib.import_module("kme_dist.pipelines.folder")
        return folders.Listener(start=self.start, step=self.step, progress=self.progress, say=self.say)

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

    def say(self, line: str) -> None:
        self.look()
        self.job.log(line, epoch=self.lease.epoch)
        self.tell(line)

    def _progress(self, facts: dict[str, Any]) -> None:
        self.lease.progress = facts
        if time.monotonic() - self._said >= SAY_EVERY_S or facts["done"] == facts["total"]:
            self._said = time.monotonic()
            of = f" of {facts['total']}" if facts["total"] is not None else ""
            self.job.log(f"{facts['stage']}: {facts['done']}{of}", epoch=self.lease.epoch, progress=facts)
        self.look()

    def look(self) -> None:
        """Stop here when the job was cancelled, another driver took over, or this process is about to go."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        if self.stopping():
            raise LeaseLost(f"{self.lease.holder} is shutting down")
        self.lease.check()
        if self.job.asked_to_stop:
            raise Cancelled(self.job.id)

    def pause(self, seconds: float) -> None:
        """Wait, but stop when told to."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(LOOK_EVERY_S, seconds))
            self.look()


# -------------------------------------------------------------------------------------------------
# Files


def redact(text: str) -> str:
    """The text without the values of environment variables that are called like secrets."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name) and not os.path.exists(value):
            text = text.replace(value, f"<{name}>")
    return text


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _json_file(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CorruptError(
            f"{path} is not readable as JSON ({error}); remove the job's folder and submit it again"
        ) from None
    if not isinstance(found, dict):
        raise CorruptError(f"{path} holds no JSON object; remove the job and submit it again")
    return found


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line, from a kill
            found = json.loads(line)
            if isinstance(found, dict):
                yield found
