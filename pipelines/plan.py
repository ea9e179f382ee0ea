"""`kme-dist plan CONFIG`: what `kme-dist learn` would do, and what learn, fit and predict cost.

Prints batches and steps, the memory of one worker, and the time, estimated from a few batches that are read and
computed here; then seconds, bytes, tasks and the bottleneck of every stage, also for other numbers of rows and workers
(`--rows 1e9 --workers 1000`; see `kme_dist.pipelines.scaling`). An error if a stage does not fit the memory of a
worker.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import free_bytes
from kme_dist.config import ClusterConfig, Config
from kme_dist.core.optim import Named
from kme_dist.data.dataset import CACHE_BYTES, Dataset
from kme_dist.data.ingest import parse_bytes
from kme_dist.errors import ConfigError, DataError
from kme_dist.ops.cluster import open_unchecked, worker_count
from kme_dist.pipelines import recipes, scaling, tables
from kme_dist.pipelines.scaling import MATRICES, Scenario, batch_bytes
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.learn import Batches, batch_gradient, kernel_batches
from kme_dist.run.learners import KernelLearner, Learner, kernel_start
from kme_dist.run.scaling_model import PROCESS_BYTES, Machine
from kme_dist.run.spectral import NAME as SPECTRAL
from kme_dist.run.spectral import SpectralWork
from kme_dist.run.train import Recipe

ROUND_S = 0.02  # overhead of a round, on a local cluster
OVERHEAD_SHARE = 0.1  # of a round, from which on the plan says how to lower it
CALIBRATION_BATCHES = 3


@dataclass(frozen=True)
class LearnPlan:
    """The recipe and data of `kme-dist learn`."""

    data: Dataset
    split: str | None
    mode: str
    recipe: Recipe
    features: Any = None  # the explicit map learned in mode "full"
    cache_bytes: int = 0

    @classmethod
    def of(cls, config: Config) -> LearnPlan:
        """Open the data set and check the settings."""
        recipes.check(config)
        data = _opened(config.data.source)
        recipe = recipes.recipe_of(config, recipes.starts_of(config, data.features)[0].settings, data)
        if not recipe.objectives:
            raise ConfigError(f"model.objective is {recipe.objective!r}, which takes no gradient steps")
        features = recipes.feature_map_of(config, data.features)
        split, mode = data.training_split(), config.learn.mode
        return cls(data, split, mode, recipe, features, recipes.cache_bytes_of(config))

    def work(self, objective: str) -> tuple[KernelLearner, Batches]:
        """The learner sent to workers with this objective."""
        recipe = self.recipe
        settings = recipe.settings(objective, self.data.split_positive(self.split))
        form = {"split": self.split, "scaling": recipe.scaling, "dtype": recipe.dtype}
        learner = KernelLearner(recipe.kernel, settings, self.data.n_classes)
        return learner, kernel_batches(self.data, settings, **form)


def run(config: Config, scenario: Scenario | None = None, *, calibrate: bool = True) -> dict[str, Any]:
    """The plan as plain data. ConfigError if a stage does not fit a worker.

    Without a scenario: what `learn` of a kernel would do with the data set, in detail, and the cost of all stages.
    """
    scenario = scenario or Scenario()
    data: Any = _found(config.data.source)
    facts: dict[str, Any] = {}
    if data is None and scenario.rows is None:
        data = _opened(config.data.source)
    rows = scenario.rows or data.split_rows(data.training_split())
    if data is None or scenario.features or scenario.classes:
        facts["data"] = f"made up; {config.data.source} is not a data set" if data is None else "made up, as asked for"
        data = scaling.made_up(scenario, data)
    workers, limit = _workers(config.cluster, ask=scenario.workers is None)
    count = scenario.workers or workers
    limit = limit if scenario.workers is None or config.cluster.memory is not None else None
    if config.model.kind == "mce" and scenario == Scenario(machine=scenario.machine):
        facts = _learning(config, calibrate, workers, limit)
    facts |= {"rows": rows, "workers": count, "features": data.features, "classes": data.n_classes}
    if not calibrate:
        return facts
    # With given constants the plan is the same everywhere: a batch is counted, not measured.
    found = scaling.stages(config, data, rows, limit, batch_seconds if scenario.machine is None else None)
    return facts | {"stages": scaling.estimates(found, scenario.constants(), count, limit)}


def _learning(config: Config, calibrate: bool, workers: int, limit: int | None) -> dict[str, Any]:
    plan = LearnPlan.of(config)
    if plan.features is not None:
        return _full(plan, workers, limit, calibrate)
    if plan.recipe.learns_features:
        return _spectral(plan, workers, limit, calibrate)
    objectives, recipe, data = plan.recipe.objectives, plan.recipe, plan.data
    hardest = max(objectives, key=lambda objective: MATRICES[objective])
    learner, batches = plan.work(hardest)
    needed = worker_bytes(batches, hardest)
    if limit is not None and needed > limit:
        most = _largest_batch(limit, batches, hardest)
        if most is None:
            raise ConfigError(
                f"a worker has {limit / 1e9:.2f} GB, and needs {_worker_bytes(1, batches, hardest) / 1e9:.2f} GB for "
                "itself, its chunk caches and a batch of one row, so that no learn.batch_size fits; learn.batch_size "
                f"{batches.plan.batch_size} needs {needed / 1e9:.2f} GB: use fewer workers with that much memory "
                "(cluster.workers, cluster.memory)"
            )
        raise ConfigError(
            f"learn.batch_size {batches.plan.batch_size} needs {needed / 1e9:.2f} GB on a worker, which has "
            f"{limit / 1e9:.2f} GB; use batches of at most {most} rows, or fewer workers with more memory "
            "(cluster.workers, cluster.memory)"
        )
    steps, per_step = learner.settings.steps * len(objectives), recipe.batches_per_step
    facts: dict[str, Any] = {
        "data": data.path,
        "rows": batches.plan.rows,
        "features": data.features,
        "classes": data.n_classes,
        "objectives": list(objectives),
        "batch_size": batches.plan.rows_per_batch,
        "reading": batches.plan.mode,
        "batches_per_epoch": batches.plan.steps_per_epoch,
        "mode": plan.mode,
        "steps": steps,
        "batches_per_step": per_step,
        "rounds": steps // (recipe.local_steps or 1),
        "tasks": steps * per_step,
        "epochs": round(steps * per_step / batches.plan.steps_per_epoch, 2),
        "workers": workers,
        "worker_bytes": needed,
        "worker_limit_bytes": limit,
        "bytes_read": steps * per_step * batches.plan.rows_per_batch * data.features * data.dtype.itemsize,
    }
    if calibrate and steps:
        batch_s = float(
            np.mean([batch_seconds(*plan.work(objective), recipe.regularization) for objective in objectives])
        )
        turns = -(-per_step // workers)  # batches per worker and step
        waits = config.cluster.kind != "serial" and not recipe.delay
        rounds_s = steps * turns * batch_s + facts["rounds"] * (ROUND_S if waits else 0.0)
        facts |= {"seconds_per_batch": _two_digits(batch_s), "estimated_seconds": _two_digits(rounds_s)}
        if waits and (advice := _shorter_waits(turns * batch_s, per_step, recipe.local_steps or 1)):
            facts["advice"] = advice
    return facts


def _shorter_waits(step_s: float, per_step: int, local_steps: int) -> str:
    """How to lower the overhead of rounds of short batches; empty if it is low.

    o seconds per round of H steps of s seconds are a share o / (o + H s), at most a if H >= o (1 - a) / (a s).
    """
    speeds = Machine()
    overhead_s = speeds.round_s + per_step * speeds.message_s
    if overhead_s <= OVERHEAD_SHARE * (overhead_s + local_steps * step_s):
        return ""
    enough = math.ceil(overhead_s * (1 - OVERHEAD_SHARE) / (OVERHEAD_SHARE * step_s))
    other = "" if local_steps > 1 else "learn.delay: 1 (gradients one update old), or "
    return (
        f"a round computes for {1e3 * local_steps * step_s:.2g} ms and waits for about {1e3 * overhead_s:.2g} ms; to "
        f"wait less: {other}learn.mode: local with learn.local_steps: {enough} or more (another result either way)"
    )


def _found(source: str) -> Dataset | None:
    try:
        return tables.dataset_at(source)
    except (DataError, NotADirectoryError, FileNotFoundError):
        return None


def _opened(source: str) -> Dataset:
    data = _found(source)
    if data is None:
        raise ConfigError(
            f"data.source {source} is not a data set; create one first: "
            f"kme-dist ingest {source} DEST.zarr --label COLUMN --shuffle 0 --split train=0.8,test=0.2, or set --rows "
            "(with --features and --classes) to plan without one"
        )
    return data


def worker_bytes(batches: Batches, objective: str) -> int:
    """Peak memory of one worker: the process, its chunk caches, and one batch with its Gram matrices."""
    return _worker_bytes(batches.plan.rows_per_batch, batches, objective)


def _worker_bytes(rows: int, batches: Batches, objective: str) -> int:
    return PROCESS_BYTES + 2 * CACHE_BYTES + batch_bytes(rows, batches, objective)


def _largest_batch(limit: int, batches: Batches, objective: str) -> int | None:
    """How many rows a batch may have; None if not even one row fits."""
    low, high = 0, batches.plan.rows_per_batch
    while low < high:
        middle = (low + high + 1) // 2
        fits = _worker_bytes(middle, batches, objective) <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low or None


def _workers(settings: ClusterConfig, ask: bool) -> tuple[int, int | None]:
    """The number of workers and the memory of each; None where it is not known. A running cluster is asked."""
    if ask and settings.kind == "address":
        with open_unchecked(settings) as client:
            found = client.scheduler_info(n_workers=-1)["workers"].values()
        limits = [worker["memory_limit"] for worker in found if worker["memory_limit"]]
        if found:
            return len(found), min(limits, default=None)
    workers = worker_count(settings) if settings.kind in ("serial", "local") else settings.workers or 1
    if settings.memory is not None:
        try:
            return workers, parse_bytes(settings.memory)
        except ValueError:
            raise ConfigError(f"cluster.memory is {settings.memory!r}; it must be a size such as 2GiB") from None
    return workers, free_bytes("numpy") // workers if settings.kind in ("serial", "local") else None


def _full(plan: LearnPlan, workers: int, limit: int | None, calibrate: bool) -> dict[str, Any]:
    """The plan of exact gradients: three passes over all rows in every step."""
    rows, chunk = plan.data.split_rows(plan.split), plan.data.chunk_rows
    began = time.perf_counter()
    X = np.zeros((min(chunk, rows), plan.data.features), plan.recipe.dtype)
    Z = np.asarray(plan.features.forward(X), np.float64)
    Z.T @ Z
    chunk_s = 6 * (time.perf_counter() - began)  # three passes, the last of them about as long as the others together
    width, chunks = Z.shape[1], -(-rows // chunk)
    needed = PROCESS_BYTES + 2 * CACHE_BYTES + plan.cache_bytes + 4 * Z.nbytes + 4 * 8 * width * width
    if limit is not None and needed > limit:
        raise ConfigError(
            f"{width} features need {needed / 1e9:.2f} GB on a worker, which has {limit / 1e9:.2f} GB; use fewer, "
            "lower learn.feature_cache, or give workers more memory (cluster.memory)"
        )
    facts = {
        "data": plan.data.path,
        "rows": rows,
        "features": width,
        "classes": plan.data.n_classes,
        "mode": plan.mode,
        "steps": plan.recipe.steps,
        "tasks": 3 * chunks * plan.recipe.steps,
        "workers": workers,
        "worker_bytes": needed,
        "worker_limit_bytes": limit,
        "features_cached": bool(plan.cache_bytes >= rows * width * 8 / workers),
    }
    if calibrate:
        facts["estimated_seconds"] = _two_digits(plan.recipe.steps * (-(-chunks // workers) * chunk_s + 3 * ROUND_S))
    return facts


def _spectral(plan: LearnPlan, workers: int, limit: int | None, calibrate: bool) -> dict[str, Any]:
    """The plan of spectral features: several networks, each with its own steps."""
    settings = plan.recipe.spectral(plan.data.split_positive(plan.split))
    work = SpectralWork.of(plan.data, settings, plan.split)
    steps, batches = work.learner.settings.steps, work.batches
    held = sum(int(value.nbytes) for start in work.starts for value in start.values())
    facts: dict[str, Any] = {
        "data": plan.data.path,
        "rows": batches.plan.rows,
        "features": plan.data.features,
        "classes": plan.data.n_classes,
        "objectives": [SPECTRAL],
        "batch_size": batches.size,
        "reading": batches.plan.mode,
        "batches_per_epoch": batches.plan.steps_per_epoch * batches.per_read,
        "mode": "local",
        "steps": steps,
        "batches_per_step": settings.networks,
        "rounds": steps // settings.local_steps,
        "tasks": steps // settings.local_steps * settings.networks,
        "epochs": round(settings.epochs, 2),
        "workers": workers,
        # Parameters, gradient and the state of the optimiser of a network, sent and received; rows of one read.
        "worker_bytes": PROCESS_BYTES + 2 * CACHE_BYTES + 8 * held + 16 * batches.plan.rows_per_batch * 1_024,
        "worker_limit_bytes": limit,
        "bytes_read": steps * settings.networks * batches.size * plan.data.features * plan.data.dtype.itemsize,
    }
    if calibrate:
        batch_s = _median_seconds(work.learner, batches, work.starts[0])
        turns = -(-settings.networks // workers)
        facts["seconds_per_batch"] = _two_digits(batch_s)
        facts["estimated_seconds"] = _two_digits(steps * turns * batch_s + facts["rounds"] * ROUND_S)
    return facts


def _two_digits(seconds: float) -> float:
    """Rounded to the precision of the estimate, but never 0.0."""
    return float(f"{seconds:.2g}")


def batch_seconds(learner: KernelLearner, batches: Batches, regularization: float) -> float:
    """Seconds of one batch, read and computed."""
    return _median_seconds(learner, batches, kernel_start(learner.kernel, regularization, learner.settings.objective))


def _median_seconds(learner: Learner, batches: Batches, parameters: Named) -> float:
    """The median of a few, after one to warm up."""
    times = []
    for number in range(1 + CALIBRATION_BATCHES):
        began = time.perf_counter()
        SerialExecutor().map(batch_gradient, [(learner, batches, number, parameters)], name="calibration")
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["plan", *sys.argv[1:]])
