"""`kme-dist learn CONFIG`: the kernel and the regularisation from a stored data set, over a cluster.

The run folder holds

    config.yaml     the configuration with every default spelled out
    run.json        status (running, succeeded, failed, interrupted), timings, versions
    metrics.jsonl   one line per step, written while learning goes on
    checkpoints/    where the run stands; the same command goes on from there
    learned.zarr    what was learned: kernel, regularisation, scaling

What is learned depends on data and settings, never on the cluster: a run may be killed, resumed elsewhere and resumed
again. Checkpoints of other settings or data are refused; `--fresh` starts over.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kme_dist import MCEClassifier, kernels
from kme_dist.cluster import open_executor, versions
from kme_dist.config import Config
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.optim import cosine_decay
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import DATASET_FORMAT, Dataset, open_dataset
from kme_dist.data.leases import writer_lease
from kme_dist.data.places import Place
from kme_dist.data.store import save_arrays
from kme_dist.errors import ConfigError, DataError, KMEError
from kme_dist.pipelines import run as runs
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.learn import OBJECTIVES, Learned, LearnSettings
from kme_dist.run.rounds import learn_on_dataset
from kme_dist.run.scaling import Scaling

LEARNED_FORMAT = "kme-dist/learned"


@dataclass(frozen=True)
class Task:
    """A configuration turned into what the loop takes."""

    data: Dataset
    split: str | None
    kernel: Kernel
    regularization: float
    settings: LearnSettings
    batches_per_step: int
    scaling: str | None
    dtype: str


def prepare(config: Config) -> Task:
    """Open the data set and check the settings; whatever is wrong with either is said here."""
    data = _open(config.data.source)
    given = {**MCEClassifier().get_params(), **config.estimator_arguments()}
    objective = given["objective"] if "objective" in config.model.model_fields_set else "rcb"
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"model.objective is {objective!r}; `kme-dist learn` makes gradient steps and takes {', '.join(OBJECTIVES)}"
        )
    settings = LearnSettings(
        objective=objective,
        risk=given["risk"],
        complexity_weight=given["complexity_weight"],
        steps=given["steps"],
        batch_size=given["batch_size"],
        learning_rate=given["learning_rate"],
        schedule=cosine_decay if config.learn.schedule == "cosine" else None,
        train_share=config.learn.train_share,
        optimizer=given["optimizer"],
        seed=given["random_state"] or 0,
    )
    return Task(
        data=data,
        split="train" if config.data.stored_split and "train" in data.splits else None,
        kernel=kernels.from_config(given["kernel"] or "gaussian", n_features=data.features),
        regularization=float(given["regularization"]),
        settings=settings,
        batches_per_step=config.learn.batches_per_step,
        scaling=given["scaling"],
        dtype=given["dtype"],
    )


def _open(source: str) -> Dataset:
    place = None if source.startswith("sklearn:") else Place.of(source)
    try:
        found = None if place is None else read_attributes(place).get("format")
    except (FileNotFoundError, DataError, NotADirectoryError):
        found = None
    if found != DATASET_FORMAT:
        raise ConfigError(
            f"data.source {source} is not a data set; make one first: "
            f"kme-dist ingest {source} DEST.zarr --label COLUMN --shuffle 0 --split train=0.8,test=0.2"
        )
    return open_dataset(source)


def run(
    config: Config, *, name: str, fresh: bool = False, listener: runs.Listener | None = None, command: str = ""
) -> dict[str, Any]:
    """Learn as `config` says, or go on where an earlier call stopped; returns what `kme-dist learn --json` prints."""
    listener = listener or runs.Listener()
    task = prepare(config)
    folder = Path(config.output.folder or f"runs/{name}")
    place = Place.of(runs._made(folder))
    with writer_lease(place):
        runs._earlier(folder)  # refuses a folder of somebody else
        checkpoints = Checkpoints(
            folder / "checkpoints",
            every_steps=config.learn.checkpoint_steps,
            every_s=config.learn.checkpoint_seconds,
            keep=config.learn.checkpoints_kept,
        )
        if fresh:
            checkpoints.clear()
        record = runs.Record(place, _opening(name, command))
        record.write()
        place.write("config.yaml", runs._yaml(config.resolved(MCEClassifier().get_params())).encode())
        try:
            with record.stage("learn"):
                learned, steps = _learn(task, config, folder / "metrics.jsonl", checkpoints, listener)
            summary = _summary(task, learned, steps, folder, record.stages["learn"])
            save_learned(folder / "learned.zarr", task, learned, steps)
        except BaseException as error:
            with contextlib.suppress(KMEError, OSError):  # the first error is the one to report
                status = "failed" if isinstance(error, Exception) else "interrupted"
                record.write(status=status, error=f"{type(error).__name__}: {error}", ended=runs._now())
            raise
        record.write(status="succeeded", stage=None, ended=runs._now(), summary=summary)
    return summary


def _learn(
    task: Task, config: Config, metrics: Path, checkpoints: Checkpoints, listener: runs.Listener
) -> tuple[Learned, int]:
    with open_executor(config.cluster) as executor, MetricsFile(metrics) as lines:
        listener.say(f"{task.data}: {_who(executor)}")

        def step(record: dict[str, Any]) -> None:
            lines.write(record)
            listener.step(record)

        learned = learn_on_dataset(
            task.data,
            task.kernel,
            task.regularization,
            task.settings,
            batches_per_step=task.batches_per_step,
            executor=executor,
            checkpoints=checkpoints,
            callback=step,
            split=task.split,
            scaling=task.scaling,
            dtype=task.dtype,
        )
        for damaged in checkpoints.passed_over:
            listener.say(f"passed over a damaged checkpoint: {damaged}")
        return learned, lines.last_step


class MetricsFile:
    """metrics.jsonl: grows by a line a step; a resumed run first drops the lines of steps it makes again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self.last_step = self._known(before=None)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            self._known(before=record["step"])
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(record, default=float) + "\n")
        self.last_step = record["step"]

    def _known(self, before: int | None) -> int:
        """The last step on file; with `before`, whole lines of earlier steps are kept and the others removed."""
        kept, last = [], 0
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, from a kill
                    step = int(json.loads(line)["step"])
                    if before is None or step < before:
                        kept.append(line)
                        last = step
        if before is not None:
            aside = self._path.with_suffix(".partial")
            aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(aside, self._path)
        return last


def save_learned(path: Path, task: Task, learned: Learned, steps: int) -> None:
    """Kernel and regularisation for rows scaled by `(x - shift) * factor`, as arrays and JSON."""
    scale = Scaling.of(task.data.split_statistics(task.split), task.scaling)
    arrays = {"scaling/shift": scale.shift, "scaling/factor": scale.factor}
    attributes = {
        "format": LEARNED_FORMAT,
        "kernel": learned.kernel.to_config(),
        "regularization": learned.regularization,
        "objective": task.settings.objective,
        "batch_size": task.settings.batch_size,
        "batches_per_step": task.batches_per_step,
        "steps": steps,
        "data": task.data.path,
        "feature_names": task.data.feature_names,
        "classes": task.data.class_names,
    }
    save_arrays(path, arrays, attributes)


def _summary(task: Task, learned: Learned, steps: int, folder: Path, seconds: float) -> dict[str, Any]:
    last = learned.history[-1] if learned.history else {}
    wanted = ("objective", "risk", "complexity", "accuracy", "rows_per_second", "waiting_share", "workers")
    return {
        "status": "succeeded",
        "folder": str(folder),
        "learned": str(folder / "learned.zarr"),
        "steps": steps,
        "steps_now": len(learned.history),
        "seconds": round(seconds, 3),
        "kernel": learned.kernel.to_config(),
        "regularization": learned.regularization,
        **{key: last[key] for key in wanted if key in last},
    }


def _who(executor: Any) -> str:
    client = getattr(executor, "client", None)
    if client is None:
        return "this process alone"
    shown = f", dashboard {client.dashboard_link}" if client.dashboard_link else ""
    return f"{executor.workers} workers at {client.scheduler.address}{shown}"


def _opening(name: str, command: str) -> dict[str, Any]:
    return {
        "format": runs.RUN_FORMAT,
        "name": name,
        "status": "running",
        "command": command,
        "started": runs._now(),
        "started_unix": time.time(),
        "versions": versions(),
    }


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["learn", *sys.argv[1:]])
