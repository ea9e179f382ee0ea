"""`kme-dist learn CONFIG`: the kernel and the regularisation from a stored data set, over a cluster.

The run folder holds

    config.yaml     the configuration with every default spelled out
    run.json        status (running, succeeded, failed, interrupted), timings, versions
    metrics.jsonl   one line per step, written while learning goes on
    checkpoints/    where the run stands; the same command goes on from there
    learned.zarr    what was learned: kernel, regularisation, scaling

What is learned depends on data and settings, never on the cluster: a run may be killed, resumed elsewhere and resumed
again. Checkpoints of other settings or data are refused; `--fresh` starts over.

`learn.mode` says how: `sync` averages gradients in every step, `local` averages replicas after `learn.local_steps`
steps of their own, `full` learns the explicit features of `model.features` by the exact gradient of all rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kme_dist import MCEClassifier, kernels
from kme_dist.config import Config
from kme_dist.core import features
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.optim import cosine_decay
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import DATASET_FORMAT, Dataset, open_dataset
from kme_dist.data.ingest import parse_bytes
from kme_dist.data.places import Place
from kme_dist.data.scaling import Scaling
from kme_dist.data.store import save_arrays
from kme_dist.errors import ConfigError, DataError
from kme_dist.ops.cluster import backend_of, in_words, open_executor
from kme_dist.ops.telemetry import performance_report, telemetry
from kme_dist.pipelines import features as features_of_runs
from kme_dist.pipelines.folder import Listener, MetricsFile, RunFolder, to_yaml
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.full import LearnedFeatures, learn_features
from kme_dist.run.learn import Learned, learn_on_dataset
from kme_dist.run.trainer import OBJECTIVES, LearnSettings

LEARNED_FORMAT = "kme-dist/learned"


@dataclass(frozen=True)
class Task:
    """A configuration turned into what the loop takes."""

    data: Dataset
    split: str | None
    mode: str
    kernel: Kernel
    features: features.Features | None  # in mode "full", instead of the kernel
    regularization: float
    settings: LearnSettings
    batches_per_step: int
    local_steps: int | None  # in mode "local"
    scaling: str | None
    dtype: str
    backend: str
    cache_bytes: int

    @property
    def common(self) -> dict[str, Any]:
        """What every mode is told."""
        return {"split": self.split, "scaling": self.scaling, "dtype": self.dtype}


def prepare(config: Config) -> Task:
    """Open the data set and check the settings; whatever is wrong with either is said here."""
    features_of_runs.refuse(config, "learn")
    data = _open(config.data.source)
    given = {**MCEClassifier().get_params(), **config.estimator_arguments()}
    objective = given["objective"] if "objective" in config.model.model_fields_set else "rcb"
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"model.objective is {objective!r}; `kme-dist learn` makes gradient steps and takes {', '.join(OBJECTIVES)}"
        )
    mode = config.learn.mode
    if mode == "full" and objective not in ("rcb", "erm"):
        raise ConfigError(f"learn.mode is full: model.objective is {objective!r}, full gradients are of rcb and erm")
    if mode == "full" and config.model.features is None:
        raise ConfigError(
            "learn.mode is full: model.features is missing, e.g. {name: random_fourier, features: 512}; it learns "
            "explicit features, kernels are learned with sync and local"
        )
    if mode != "full" and config.model.features is not None:
        raise ConfigError(f"model.features is set and learn.mode is {mode}; explicit features are learned with full")
    if mode == "local" and given["steps"] % config.learn.local_steps:
        raise ConfigError(
            f"learn.steps is {given['steps']}, which is no multiple of learn.local_steps {config.learn.local_steps}: "
            "averages are taken after whole rounds"
        )
    settings = LearnSettings(
        objective=objective,
        risk=given["risk"],
        complexity_weight=given["complexity_weight"],
        steps=given["steps"],
        batch_size=given["batch_size"],
        learning_rate=given["learning_rate"],
        schedule=cosine_decay if config.learn.schedule == "cosine" else None,
        train_share=0.5 if config.learn.train_share is None else config.learn.train_share,
        optimizer=given["optimizer"],
        seed=given["random_state"] or 0,
    )
    return Task(
        data=data,
        split="train" if config.data.stored_split and "train" in data.splits else None,
        mode=mode,
        kernel=kernels.from_config(given["kernel"] or "gaussian", n_features=data.features),
        features=_features(config, data, settings) if mode == "full" else None,
        regularization=float(given["regularization"]),
        settings=settings,
        batches_per_step=config.learn.batches_per_step,
        local_steps=config.learn.local_steps if mode == "local" else None,
        scaling=given["scaling"],
        dtype=given["dtype"],
        backend=given["backend"],
        cache_bytes=_bytes(config.learn.feature_cache),
    )


def _features(config: Config, data: Dataset, settings: LearnSettings) -> Any:
    chosen = features.from_config(config.model.features or "", n_features=data.features, seed=settings.seed)
    if not chosen.parameters:
        raise ConfigError(f"model.features {config.model.features!r} have no parameters: there is nothing to learn")
    return chosen


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ConfigError(f"learn.feature_cache is {text!r}; give bytes such as 256MiB") from None


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


def image_shape(data: Dataset, config: Config) -> tuple[int, ...] | None:
    """Of one row, where rows are images: as the data set says, else as the config does."""
    return data.sample_shape if len(data.sample_shape) > 1 else config.data.image_shape


def run(
    config: Config,
    *,
    name: str,
    fresh: bool = False,
    listener: Listener | None = None,
    command: str = "",
    performance: Path | None = None,
) -> dict[str, Any]:
    """Learn as `config` says, or resume an earlier call; returns what `kme-dist learn --json` prints.

    `performance` is a file for Dask's report of what the cluster did.
    """
    listener = listener or Listener()
    task = prepare(config)
    with RunFolder.open(config, name=name, command=command, fresh=fresh, listener=listener) as folder:
        checkpoints = Checkpoints(
            folder.path / "checkpoints",
            every_steps=config.learn.checkpoint_steps,
            every_s=config.learn.checkpoint_seconds,
            keep=config.learn.checkpoints_kept,
        )
        if fresh:
            checkpoints.clear()
        folder.write(stage="learn")
        folder.place.write("config.yaml", to_yaml(config.resolved(MCEClassifier().get_params())).encode())
        began = time.monotonic()
        learned, steps, now = _learn(task, config, name, folder.path, checkpoints, listener, performance)
        summary = _summary(learned, steps, now, folder.path, time.monotonic() - began)
        save_learned(folder.path / "learned.zarr", task, learned, steps)
        folder.write(summary=summary)
    return summary


def _learn(
    task: Task,
    config: Config,
    name: str,
    folder: Path,
    checkpoints: Checkpoints,
    listener: Listener,
    performance: Path | None,
) -> tuple[Learned | LearnedFeatures, int, int]:
    """What was learned, after how many steps, and how many of them were made now."""
    with (
        open_executor(config.cluster) as executor,
        telemetry(executor, run=name, stage="learn", pipeline=name, log=folder / "log.jsonl") as told,
        performance_report(executor, performance),
        MetricsFile(folder / "metrics.jsonl") as lines,
    ):
        listener.say(f"{task.data}: {in_words(executor)}")

        def step(record: dict[str, Any]) -> None:
            lines.write(record)
            listener.step(record)
            told.step(record)

        learned = learn(task, executor, told.watching(checkpoints, image_shape(task.data, config)), step)
        for damaged in checkpoints.passed_over:
            listener.say(f"passed over a damaged checkpoint: {damaged}")
        return learned, lines.last_step, lines.written * (task.local_steps or 1)


def learn(
    task: Task, executor: Executor, checkpoints: Checkpoints | None, step: Callable[[dict[str, Any]], None]
) -> Learned | LearnedFeatures:
    """In the mode that the task names."""
    start: tuple[Any, ...] = (task.regularization, task.settings)
    common: dict[str, Any] = {**task.common, "executor": executor, "checkpoints": checkpoints, "callback": step}
    if task.features is not None:
        return learn_features(task.data, task.features, *start, **common, cache_bytes=task.cache_bytes)
    return learn_on_dataset(
        task.data,
        task.kernel,
        *start,
        **common,
        batches_per_step=task.batches_per_step,
        local_steps=task.local_steps,
        backend=backend_of(executor, task.backend),
    )


def save_learned(path: Path, task: Task, learned: Learned | LearnedFeatures, steps: int) -> None:
    """Kernel or features, and regularisation, for rows scaled by `(x - shift) * factor`, as arrays and JSON."""
    scale = Scaling.of(task.data.split_statistics(task.split), task.scaling)
    arrays = {"scaling/shift": scale.shift, "scaling/factor": scale.factor}
    attributes = {
        "format": LEARNED_FORMAT,
        **_what(learned),
        "regularization": learned.regularization,
        "objective": task.settings.objective,
        "mode": task.mode,
        "local_steps": task.local_steps,
        "batch_size": task.settings.batch_size,
        "batches_per_step": task.batches_per_step,
        "steps": steps,
        "data": task.data.path,
        "feature_names": task.data.feature_names,
        "classes": task.data.class_names,
    }
    if isinstance(learned, LearnedFeatures):
        arrays |= {f"features/{name}": value for name, value in learned.features.arrays.items()}  # type: ignore[attr-defined]
    save_arrays(path, arrays, attributes)


def _what(learned: Learned | LearnedFeatures) -> dict[str, Any]:
    if isinstance(learned, LearnedFeatures):
        return {"features": learned.features.to_config()}  # type: ignore[attr-defined]
    return {"kernel": learned.kernel.to_config()}


def _summary(
    learned: Learned | LearnedFeatures, steps: int, steps_now: int, folder: Path, seconds: float
) -> dict[str, Any]:
    last = learned.history[-1] if learned.history else {}
    wanted = ("objective", "risk", "complexity", "accuracy", "rows_per_second", "waiting_share", "workers")
    return {
        "status": "succeeded",
        "folder": str(folder),
        "learned": str(folder / "learned.zarr"),
        "steps": steps,
        "steps_now": steps_now,
        "seconds": round(seconds, 3),
        **_what(learned),
        "regularization": learned.regularization,
        **{key: last[key] for key in wanted if key in last},
    }


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["learn", *sys.argv[1:]])
