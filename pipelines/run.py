"""`kme-dist run CONFIG`: read, learn, evaluate, write the run folder. Also `python pipelines/run.py`.

The run folder holds

    config.yaml     the configuration with every default spelled out
    run.json        status (running, succeeded, failed, interrupted), timings, versions, digests
    metrics.jsonl   one line per learning step, written while learning goes on
    metrics.json    the figures of the test rows
    model.zarr      the learned model
    report.html     the same with pictures

`run.json` says "succeeded" only after everything else is in place, so a killed run never looks
finished. A second call with the same configuration, data and version finds the result and returns it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kme_dist import MCEClassifier, kernels
from kme_dist.backend import blas_threads
from kme_dist.config import Config, Start
from kme_dist.data.leases import writer_lease
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError
from kme_dist.pipelines import report, tables
from kme_dist.pipelines.evaluate import measure

RUN_FORMAT = "kme-dist run 1"
ROWS_TO_REHEARSE = 20  # of each class
OUTPUTS = ("config.yaml", "metrics.jsonl", "metrics.json", "model.zarr", "report.html")
HEADLINES = ("accuracy", "balanced_accuracy", "log_loss", "brier", "calibration_error")


@dataclass(frozen=True)
class Listener:
    """Who is told how a run goes on: the name of each starting point, each learning step, lines for people."""

    start: Callable[[str], None] = lambda name: None
    step: Callable[[dict[str, Any]], None] = lambda record: None
    say: Callable[[str], None] = lambda line: None


@dataclass
class Attempt:
    """One starting point: the model as it was given, where that is compared, and the model that is learned."""

    name: str
    given: Any
    model: Any
    metrics: dict[str, Any] = field(default_factory=dict)
    metrics_given: dict[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        history = self.model.history_
        return float(history[-1]["objective"]) if history else float("inf")


@dataclass
class Record:
    """The content of run.json while a run goes on."""

    place: Place
    facts: dict[str, Any]
    stages: dict[str, float] = field(default_factory=dict)

    def write(self, **facts: Any) -> None:
        self.facts |= facts
        self.facts["stages_seconds"] = self.stages
        self.place.write("run.json", _json(self.facts))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        self.write(stage=name)
        yield
        self.stages[name] = round(time.monotonic() - began, 3)


@dataclass(frozen=True)
class Job:
    """Everything that is known before the first step."""

    name: str
    folder: Path
    config: Config
    resolved: dict[str, Any]
    rows: tables.Tables
    attempts: list[Attempt]

    @property
    def digests(self) -> dict[str, str]:
        """The same digests and the same version give the same result; where it is made and put does not matter."""
        return {"config": _digest({**self.resolved, "output": None, "cluster": None}), "data": self.rows.digest}


def run(
    config: Config, *, name: str, fresh: bool = False, listener: Listener | None = None, command: str = ""
) -> dict[str, Any]:
    """Do every stage of `config`; returns the summary that `kme-dist run --json` prints.

    `name` is that of the config file; it names the run folder when `output.folder` is absent. With `fresh` a finished
    result is computed anew. `command` is what the user typed, for the record.
    """
    listener = listener or Listener()
    job = _prepare(config, name)
    rows = job.rows
    listener.say(
        f"{name}: {len(rows.y_train)} training rows, {len(rows.y_test)} test rows, "
        f"{len(rows.feature_names)} features, {len(np.unique(rows.y_train))} classes"
    )
    place = Place.of(_made(job.folder))
    with writer_lease(place), blas_threads(config.model.threads):
        earlier = _earlier(job.folder)
        if earlier is not None and not fresh:
            if _is_current(earlier, job):
                return {**earlier["summary"], "reused": True}
            if not config.output.overwrite:
                raise ConfigError(
                    f"{job.folder} holds the results of other settings or data and output.overwrite is false; "
                    f"choose another output.folder, or use --fresh to replace them"
                )
        _rehearse(job)
        record = Record(place, _opening(job, command))
        record.write()
        _clear(job.folder)
        began = time.monotonic()
        try:
            summary = _stages(job, record, listener)
        except BaseException as error:
            with contextlib.suppress(KMEError, OSError):  # the first error is the one to report
                record.write(
                    status="failed" if isinstance(error, Exception) else "interrupted",
                    error=f"{type(error).__name__}: {error}",
                    ended=_now(),
                )
            raise
        summary["seconds"] = round(time.monotonic() - began, 3)
        record.write(status="succeeded", stage=None, ended=_now(), seconds=summary["seconds"], summary=summary)
    return {**summary, "reused": False}


def _prepare(config: Config, name: str) -> Job:
    """Read and check everything; whatever is wrong with settings or data is said here."""
    folder = Path(config.output.folder or f"runs/{name}")
    if "://" in str(config.output.folder):
        raise ConfigError(f"output.folder {config.output.folder} is not local; a run folder lies on a local disk")
    rows = tables.load(config.data)
    resolved = config.resolved(MCEClassifier().get_params())
    return Job(name, folder, config, resolved, rows, _attempts(config, len(rows.feature_names)))


def _stages(job: Job, record: Record, listener: Listener) -> dict[str, Any]:
    rows, config_text = job.rows, _yaml(job.resolved)
    record.place.write("config.yaml", config_text.encode())
    with record.stage("learn"), (job.folder / "metrics.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for attempt in job.attempts:
            listener.start(attempt.name)
            attempt.model.fit(rows.X_train, rows.y_train, callback=_logger(lines.write, attempt.name, listener))
            if attempt.given is not None:
                attempt.given.fit(rows.X_train, rows.y_train)
    with record.stage("evaluate"):
        for attempt in job.attempts:
            attempt.metrics = _evaluate(attempt.model, rows)
            if attempt.given is not None:
                attempt.metrics_given = _evaluate(attempt.given, rows)
        best = min(job.attempts, key=lambda attempt: attempt.objective)
        summary = _summary(job, best)
        record.place.write("metrics.json", _json({**best.metrics, "starts": summary["starts"]}))
    with record.stage("save"):
        best.model.save(str(job.folder / "model.zarr"))
    with record.stage("report"):
        page = report.build(
            job,
            best,
            config_text=config_text,
            learn_seconds=record.stages["learn"],
            footer=f"kme-dist {metadata.version('kme-dist')} · {record.facts['started']} · "
            f"configuration {record.facts['digests']['config'][:12]}",
        )
        record.place.write("report.html", page.encode())
    return summary


def _attempts(config: Config, n_features: int) -> list[Attempt]:
    """An estimator for every starting point, and the same one without learning to compare it with."""
    arguments = config.estimator_arguments()
    if arguments.get("kernel") is not None:
        arguments["kernel"] = kernels.from_config(arguments["kernel"], n_features=n_features)
    else:
        arguments.pop("kernel", None)
    if not config.learn.starts:
        return [Attempt("", None, MCEClassifier(**arguments))]
    attempts = []
    for start in config.learn.starts:
        own = {**arguments, **_start_arguments(config, start, n_features)}
        as_given = {**own, "steps": 0, "refit_regularization": False}
        attempts.append(Attempt(start.name, MCEClassifier(**as_given), MCEClassifier(**own)))
    return attempts


def _start_arguments(config: Config, start: Start, n_features: int) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if start.regularization is not None:
        changes["regularization"] = start.regularization
    if start.length_scale is not None:
        kernel = config.model.kernel or MCEClassifier().get_params()["kernel"]
        settings = {"name": kernel, "ard": True} if isinstance(kernel, str) else kernel
        changes["kernel"] = kernels.from_config({**settings, "length_scale": start.length_scale}, n_features=n_features)
    return changes


def _rehearse(job: Job) -> None:
    """One step on a few rows: a setting that cannot work is found before anything stored is touched."""
    X, y = job.rows.X_train, job.rows.y_train
    few = np.concatenate([np.flatnonzero(y == label)[:ROWS_TO_REHEARSE] for label in np.unique(y)])
    for attempt in job.attempts:
        settings = attempt.model.get_params()
        MCEClassifier(**{**settings, "steps": min(settings["steps"], 1)}).fit(X[few], y[few])


def _evaluate(model: Any, rows: tables.Tables) -> dict[str, Any]:
    return measure(rows.y_test, model.predict_proba(rows.X_test), model.classes_)


def _summary(job: Job, best: Attempt) -> dict[str, Any]:
    return {
        "status": "succeeded",
        "folder": str(job.folder),
        "report": str(job.folder / "report.html"),
        "model": str(job.folder / "model.zarr"),
        **{key: best.metrics[key] for key in HEADLINES},
        "train_rows": len(job.rows.y_train),
        "test_rows": len(job.rows.y_test),
        "features": len(job.rows.feature_names),
        "classes": len(best.model.classes_),
        "steps": sum(len(attempt.model.history_) for attempt in job.attempts),
        "objective": str(best.model.objective_),
        "regularization": float(best.model.regularization_),
        "starts": [
            {
                "name": attempt.name,
                "accuracy_before": attempt.metrics_given["accuracy"],
                "accuracy": attempt.metrics["accuracy"],
                "objective": attempt.objective,
                "regularization": float(attempt.model.regularization_),
            }
            for attempt in job.attempts
            if attempt.given is not None
        ],
    }


def _logger(write: Callable[[str], Any], start_name: str, listener: Listener) -> Callable[[dict[str, Any]], None]:
    def log(step: dict[str, Any]) -> None:
        line = {"start": start_name, **step} if start_name else step
        write(json.dumps(line, default=float) + "\n")
        listener.step(step)

    return log


# ------------------------------------------------------------------------------------------------
# The run folder


def describe_run(folder: Path) -> dict[str, Any]:
    """What `kme-dist inspect` says about a run folder."""
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptError(f"{folder / 'run.json'} is not readable as JSON ({error}); run it again") from None
    if not isinstance(facts, dict) or facts.get("format") != RUN_FORMAT:
        raise DataError(f"{folder / 'run.json'} does not belong to a run of kme-dist")
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {"path": str(folder), "bytes": sum(path.stat().st_size for path in files), **facts}


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"output.folder {folder} cannot be made ({error.strerror}); choose another") from None
    return folder


def _earlier(folder: Path) -> dict[str, Any] | None:
    """run.json of an earlier run; refuses a folder that holds something else."""
    try:
        known = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if any(folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty and holds no run.json, so it is not a run folder; "
                f"choose another output.folder, or move its content away"
            ) from None
        return None
    except ValueError:
        known = {}
    if not isinstance(known, dict) or known.get("format") != RUN_FORMAT:
        raise ConfigError(f"{folder / 'run.json'} was not written by this kind of run; choose another output.folder")
    return known


def _is_current(earlier: dict[str, Any], job: Job) -> bool:
    return (
        earlier.get("status") == "succeeded"
        and earlier.get("digests") == job.digests
        and earlier.get("versions", {}).get("kme-dist") == metadata.version("kme-dist")
        and all((job.folder / output).exists() for output in OUTPUTS)
    )


def _clear(folder: Path) -> None:
    """Remove the results of an earlier run. run.json already says that a new one is going on."""
    for output in OUTPUTS:
        path = folder / output
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _opening(job: Job, command: str) -> dict[str, Any]:
    packages = ("kme-dist", "numpy", "scipy", "scikit-learn", "dask", "zarr", "matplotlib")
    return {
        "format": RUN_FORMAT,
        "name": job.name,
        "status": "running",
        "command": command,
        "started": _now(),
        "host": platform.node(),
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in packages},
        },
        "seeds": {"split": job.resolved["data"]["split_seed"], "learn": job.resolved["learn"]["seed"]},
        "digests": job.digests,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, default=float) + "\n").encode()


def _yaml(sections: dict[str, dict[str, Any]]) -> str:
    """One key per line, lists and mappings in one line each."""
    lines = []
    for section, keys in sections.items():
        lines.append(f"{section}:")
        for key, value in keys.items():
            text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
            lines.append(f"  {key}: {text.splitlines()[0]}")
    return "\n".join(lines) + "\n"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["run", *sys.argv[1:]])
