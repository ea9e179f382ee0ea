"""Jobs that outlive the process that started them: all state of a job is in its folder.

    job = create_job(root, pipeline="learn", config=config, name="nightly")
    drive(job, run_pipeline)        # see kme_dist.ops.driver; on a cluster see kme_dist.ops.submit
    job.status()["state"]           # waiting, running, retrying, lost, succeeded, failed or cancelled

    ROOT/runs/<id>/job.json         the request, with a digest of config.yaml; never changes
                   config.yaml      the configuration, with paths relative to ROOT
                   lease/<epoch>    who drives the job: whoever creates the next epoch does, all earlier ones stop
                   events.jsonl     changes of state
                   log.jsonl        messages and progress
                   cancel           exists once the job has been asked to stop
                   done.json        the result; created once and never replaced
                   output/          the run folder of the pipeline: run.json, checkpoints, model, report; the runs
                                    of a schedule share ROOT/runs/<name> instead, and so compute only what is new

A job names a pipeline of the installed package and carries a configuration, never code. Paths in the configuration
stay under ROOT, which is `--root`, else the environment variable KME_ROOT, else the current folder. What looks like a
secret in the environment is never written to these files.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import getpass
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kme_dist.config import Config, dump_yaml, parse_config, parse_yaml
from kme_dist.data.leases import beat_age, latest_epoch
from kme_dist.data.places import Place, store_errors
from kme_dist.data.seals import read_sealed, seal, unseal
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError

JOB_FORMAT = "kme-dist job 1"
PIPELINES = ("run", "learn", "fit", "predict", "evaluate")
# A job is lost when its driver has not renewed the lease for as long as another driver would wait to take over.
STATES = ("waiting", "running", "retrying", "lost", "succeeded", "failed", "cancelled")
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
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|PRIVATE|ACCESS_KEY|API_KEY", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """One job, by its root and id. Nothing is cached: every method reads the folder."""

    root: Path
    id: str

    @property
    def folder(self) -> Path:
        return self.root / "runs" / self.id

    @property
    def place(self) -> Place:
        return Place.of(self.folder)

    def request(self) -> dict[str, Any]:
        """job.json: the pipeline and the name that were submitted."""
        found = read_sealed(self.folder / "job.json", "delete the job's folder and submit it again")
        if found is None:
            raise DataError(
                f"there is no job {self.id} in {self.root / 'runs'}; list the jobs with `kme-dist jobs list`"
            )
        if found.get("format") != JOB_FORMAT:
            raise CorruptError(
                f"{self.folder / 'job.json'} was written by another version of kme-dist; submit the job again"
            )
        for key in ("pipeline", "name", "submitted"):
            if not isinstance(found.get(key), str):
                raise CorruptError(f"{self.folder / 'job.json'} has no valid {key!r}; delete the folder, submit again")
        if not isinstance(found.get("priority", 0), int):
            raise CorruptError(f"{self.folder / 'job.json'} has no valid 'priority'; delete the folder, submit again")
        return found

    def config(self) -> Config:
        """The configuration, validated again: a file is not trusted because we once wrote it."""
        where = str(self.folder / "config.yaml")
        return confined(parse_config(parse_yaml(self.config_text(), where), where), self.root)

    def config_text(self) -> str:
        """config.yaml, compared with its digest in job.json."""
        where = self.folder / "config.yaml"
        try:
            content = where.read_bytes()
        except FileNotFoundError:
            raise CorruptError(f"{where} is missing; submit the job again") from None
        known = self.request().get("config") if (self.folder / "job.json").exists() else None  # killed before that
        try:
            if known in (None, _digest(content)):
                return content.decode()
        except UnicodeDecodeError:
            pass
        raise CorruptError(
            f"{where} was damaged or edited since the job was submitted; restore it from a copy, or remove "
            f"{self.folder} and submit the job again"
        )

    def result(self) -> dict[str, Any] | None:
        """done.json: the result of a job that succeeded; None before that."""
        return read_sealed(
            self.folder / "done.json", f"delete that file and resume the job with `kme-dist jobs resume {self.id}`"
        )

    def commit(self, result: Mapping[str, Any]) -> bool:
        """Store the result of the job. False when there is one already, which is kept."""
        kept = seal(json.loads(redact(json.dumps(result, default=str))))
        return self.place.write("done.json", json.dumps(kept).encode(), only_if_absent=True)

    def request_stop(self, reason: str) -> None:
        self.place.write("cancel", redact(json.dumps({"time": now(), "reason": reason})).encode())

    @property
    def stop_requested(self) -> bool:
        return (self.folder / "cancel").exists()

    def event(self, state: str, **facts: Any) -> None:
        line = json.loads(redact(json.dumps({"time": now(), "state": state, **facts}, default=str)))
        self._append("events.jsonl", seal(line))

    def log(self, message: str, level: str = "info", **facts: Any) -> None:
        line = {"time": now(), "level": level, "job": self.id, "message": message, **facts}
        self._append("log.jsonl", seal(json.loads(redact(json.dumps(line, default=str)))))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        # One write of a whole line: lines of two processes never mix.
        content = (redact(json.dumps(line, default=str)) + "\n").encode()
        with store_errors(self.place):
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    content = b"\n" + content  # after part of a line that a full disk or a kill left
                if os.write(descriptor, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)

    def events(self) -> list[dict[str, Any]]:
        """Changes of state, in order; lines that are damaged are left out."""
        kinds = {"time": str, "state": str}
        lines = filter(None, (unseal(_json_object(line)) for line in _lines(self.folder / "events.jsonl")))
        whole = (line for line in lines if all(isinstance(line.get(key), kind) for key, kind in kinds.items()))
        return [line for line in whole if isinstance(line.get("epoch", 0), int)]

    def logs(self) -> list[dict[str, Any]]:
        """The messages, in order; for a line that is damaged, one that says so."""
        kinds = ("time", "level", "message")
        found: list[dict[str, Any]] = []
        for number, line in enumerate(_lines(self.folder / "log.jsonl"), 1):
            whole = unseal(_json_object(line))
            if whole is not None and all(isinstance(whole.get(key), str) for key in kinds):
                found.append(whole)
            else:
                found.append(dict(zip(kinds, ("", "damaged", f"line {number} of log.jsonl is damaged"), strict=True)))
        return found

    def status(self) -> dict[str, Any]:
        """State, times, driver and progress, read from the folder."""
        request, done = self.request(), self.result()
        epoch, lease = latest_epoch(self.place)
        # A driver that lost its lease may still write a line; its epoch identifies it.
        events = self.events()
        current = [event for event in events if event.get("epoch", epoch) >= epoch]
        last = current[-1] if current else {"state": "waiting", "time": request["submitted"]}
        state = "succeeded" if done is not None else last["state"]
        submitted = any("scheduler" in event for event in events)
        facts = {
            "id": self.id,
            "pipeline": request["pipeline"],
            "name": request["name"],
            "state": state,
            "owner": request.get("owner"),
            "priority": request.get("priority", 0),
            "scheduled": request.get("scheduled"),
            "submitted": request["submitted"],
            "queued": submitted and not last.get("left_queue", False) if state == "waiting" else None,
            "started": next((event["time"] for event in events if event["state"] == "running"), None),
            "ended": last["time"] if state in ENDED else None,
            "drivers": epoch,
            "folder": str(self.folder),
        }
        if state in ("running", "retrying") and lease is not None:
            age, limit = beat_age(self.place)
            if age is not None and age > limit:
                facts["state"] = state = "lost"
                facts["advice"] = f"resume it with `kme-dist jobs resume {self.id}`, or let `kme-dist jobs keep` do so"
            facts["driver"] = lease.get("holder")
            facts["seconds_since_beat"] = age
            facts["progress"] = lease.get("progress")
        if self.stop_requested and state not in ENDED:
            facts["stopping"] = True
        for key in ("exit_code", "error", "given_up"):
            if state in ("failed", "retrying") and key in last:
                facts[key] = last[key]
        if state == "succeeded":
            facts["exit_code"] = 0
            facts["result"] = (done or {}).get("result")
        return facts


# -------------------------------------------------------------------------------------------------
# Where jobs are stored, and which paths they may use


def job_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder of jobs and their data: as given, else KME_ROOT, else the current folder."""
    text = os.fspath(given or os.environ.get("KME_ROOT") or ".")
    if "://" in text:
        raise ConfigError(f"the root {text} is not a folder; run folders must be on a disk that all hosts share")
    root = Path(text).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"the root {root} is not a folder; create it, or set --root or KME_ROOT to another")
    return root


def job_at(root: Path, job_id: str) -> Job:
    """The job with that id, which must not be a path."""
    if not _ID.fullmatch(job_id):
        raise ConfigError(f"invalid job id {job_id!r}: use letters, digits, -, _ and .")
    return Job(root, job_id)


def list_jobs(root: Path) -> list[Job]:
    """All jobs under a root that this user may see, the oldest first."""
    try:
        with store_errors(str(root / "runs")):
            # Not Path.is_file, which raises where the folder belongs to somebody else.
            names = sorted(
                name for name in os.listdir(root / "runs") if os.path.isfile(root / "runs" / name / "job.json")
            )
    except FileNotFoundError:
        return []
    jobs = [Job(root, name) for name in names if _ID.fullmatch(name)]
    return sorted(jobs, key=submitted_at)


def submitted_at(job: Job) -> datetime.datetime:
    """When the job was submitted; the beginning of time if its request is damaged or cannot be read."""
    try:
        return datetime.datetime.fromisoformat(str(job.request()["submitted"]))
    except (KMEError, OSError, ValueError):
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)


def confined(config: Config, root: Path, *, relative: bool = False) -> Config:
    """The configuration with all its paths absolute, or relative to `root`; paths outside of it are refused."""
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
            raise ConfigError(f"{key} {text}: a job accepts paths under its root, s3:// and gs:// addresses")
        if allowed and not any(f"{address}/".startswith(f"{prefix.rstrip('/')}/") for prefix in allowed):
            raise ConfigError(f"{key} {text} is not allowed by KME_STORES: {', '.join(allowed)}")
        return address
    # Links are resolved before the comparison, so that none of them leads out of the root.
    path = (root / Path(text).expanduser()).resolve()
    if not path.is_relative_to(root):
        raise ConfigError(f"{key} {text} is outside of the root {root}; move it there, or set --root or KME_ROOT")
    return str(path.relative_to(root)) if relative else str(path)


def this_user() -> str:
    """Whose jobs are created here: KME_USER (several people may use one account), else the user of this process."""
    if found := os.environ.get("KME_USER"):
        return found[:60]
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return f"user {os.getuid()}"


def in_queue(statuses: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that wait in a queue, as far as their folders say, in the order of their start: by priority, by age."""
    waiting = [status for status in statuses if status.get("queued")]
    return sorted(waiting, key=lambda status: (-status["priority"], status["submitted"], status["id"]))


def new_id(name: str) -> str:
    """A unique id for a job."""
    return f"{_word(name)}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def scheduled_id(name: str, when: datetime.datetime) -> str:
    """The job id of the scheduled run at one time: the same for every process that starts it."""
    return f"{_word(name)}-{when.astimezone(datetime.UTC):%Y%m%dT%H%M%SZ}"


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:60] or "job"


def create_job(
    root: Path,
    *,
    pipeline: str,
    config: Config,
    name: str,
    job_id: str | None = None,
    scheduled: str | None = None,
    priority: int = 0,
) -> Job:
    """Create the folder of a job; the same call with the same `job_id` returns the existing job.

    Of the jobs that wait, those of the highest `priority` are started first.
    """
    if pipeline not in PIPELINES:
        raise ConfigError(f"unknown pipeline {pipeline!r}; choose one of {', '.join(PIPELINES)}")
    job = job_at(root, new_id(name) if job_id is None else job_id)
    _check_apart(job, config, name if scheduled else None)
    kept = confined(config, root, relative=True).model_dump(mode="json", exclude_unset=True)
    request = {
        "format": JOB_FORMAT,
        "id": job.id,
        "name": name,
        "pipeline": pipeline,
        "scheduled": scheduled,
        "owner": this_user(),
        "priority": int(priority),
        "submitted": now(),
        "version": metadata.version("kme-dist"),
    }
    text = redact(dump_yaml(kept))
    is_new = job.place.write("config.yaml", text.encode(), only_if_absent=True)
    if not is_new and parse_yaml(job.config_text(), f"{job.folder}/config.yaml") != parse_yaml(text, job.id):
        raise ConfigError(
            f"the job {job.id} already exists with another configuration; choose another id, or, if it has ended "
            f"and is to be run again with this one, remove {job.folder} first"
        )
    request["config"] = _digest(job.place.read("config.yaml"))
    job.place.write("job.json", json.dumps(seal(request), indent=2).encode(), only_if_absent=True)
    if job.request()["pipeline"] != pipeline:
        raise ConfigError(f"the job {job.id} already exists with another pipeline; choose another id")
    return job


def _check_apart(job: Job, config: Config, shared: str | None) -> None:
    """A job's own folder must not be a run folder: each of the two has its own config.yaml and log.jsonl."""
    if not (job.folder / "job.json").exists() and (job.folder / "run.json").exists():
        raise ConfigError(
            f"{job.folder} is the run folder of an earlier command, and the job {job.id} would write its own files "
            "there; choose another id with --id"
        )
    output = config.output.folder or (f"runs/{shared}" if shared else None)
    if output is not None and "://" not in output and (job.root / Path(output).expanduser()).resolve() == job.folder:
        raise ConfigError(
            f"output.folder {output} is the folder of the job {job.id} itself, which has its own config and log "
            f"there; choose another id with --id, or remove output.folder to use runs/{job.id}/output"
        )


# -------------------------------------------------------------------------------------------------
# Files


def redact(text: str) -> str:
    """The text without the values of environment variables whose names look like those of secrets."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name) and not os.path.exists(value):
            text = text.replace(value, f"<{name}>")
    return text


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, without what a kill or a full disk left of one."""
    try:
        found = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [line for line in found if line.endswith(b"}")]


def _json_object(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        found = json.loads(line.decode())
        return found if isinstance(found, dict) else None
    return None
