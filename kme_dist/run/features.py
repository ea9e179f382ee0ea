"""Learning feature maps by batches: one loop for networks and spectral kernels, in memory or over a cluster.

    settings = LearnSettings(steps=500, batch_size=1000)
    source = ArraySource(X, y, batch_size=1000, seed=0)               # or Source.of(dataset, ...)
    found = learn_task(NetworkTask(features, settings, n_classes=10), source, start_of(features, 1.0), settings)
    with_parameters(features, found.parameters)                       # the learned map

A task says what one batch is worth: `evaluate(parameters, X, y, number)` returns an Objective whose gradient has the
names of the parameters. A source says where batch `number` comes from. Batches are a function of seed and number,
gradients are averaged in that order, so what is learned does not depend on who did the work.

The weights of a linear head on a learned map are the business of `kme_dist.run.fit`, solver "features".
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kme_dist.backend import (
    Array,
    resolve,
    to_device,
    to_host,
)
from kme_dist.core import features as maps
from kme_dist.core import optim
from kme_dist.core.objective import Objective
from kme_dist.data.batches import plan_batches, read_batch
from kme_dist.data.dataset import RowSource
from kme_dist.data.plan import BatchPlan
from kme_dist.data.scaling import Scaling
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor, SerialExecutor
from kme_dist.run.learn import LearnSettings, mean_objectives
from kme_dist.run.trainer import Callback, Outcome, Round, Trainer

PREFIX = "features."


class Task(Protocol):
    """What one batch is worth, and its slope."""

    def evaluate(self, parameters: optim.Named, X: Array, y: np.ndarray, number: int) -> Objective: ...


def start_of(features: Any, regularization: float | None = None) -> optim.Named:
    """Parameters as loops know them: those of the map by "features.NAME", λ by its logarithm."""
    own = {PREFIX + name: np.array(value) for name, value in features.parameters.items()}
    return own if regularization is None else {**own, "regularization": np.asarray(np.log(regularization))}


def with_parameters(features: Any, parameters: optim.Named) -> Any:
    """The map with the values that a loop has reached."""
    return features.replace(**{n.removeprefix(PREFIX): v for n, v in parameters.items() if n.startswith(PREFIX)})


# --- where batches come from ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Source:
    """Rows, in memory or stored, cut into batches: whoever computes one reads it by the plan and its number."""

    token: str
    dataset: RowSource
    plan: BatchPlan
    scale: Scaling
    dtype: str
    target: tuple[float, float] | None = None  # shift and factor of numbers to be predicted
    backend: str = "numpy"  # "auto" is decided by each worker for itself

    @classmethod
    def of(
        cls,
        dataset: RowSource,
        *,
        split: str | None,
        scaling: Scaling,
        dtype: str,
        batch_size: int,
        seed: int,
        target: tuple[float, float] | None = None,
        backend: str = "numpy",
    ) -> Source:
        batch = max(1, min(batch_size, dataset.split_rows(split)))
        plan = plan_batches(dataset, batch_size=batch, seed=seed, split=split)
        return cls(os.urandom(8).hex(), dataset, plan, scaling, dtype, target, backend)

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and other.token == self.token

    @property
    def rows(self) -> int:
        return self.plan.rows

    @property
    def batch(self) -> int:
        return self.plan.batch_size

    @property
    def digest(self) -> str:
        """Of the rows, their labels and the plan that cuts them into batches (but for its seed, which is a setting)."""
        plan = {**self.plan.to_json(), "seed": None, "scaling": [self.scale.shift.tolist(), self.scale.factor.tolist()]}
        return hashlib.sha256((self.dataset.digest + json.dumps(plan, sort_keys=True)).encode()).hexdigest()

    def call(
        self, task: Task, number: int, parameters: optim.Named
    ) -> tuple[Callable[..., Objective], tuple[Any, ...]]:
        return _evaluate_batch, (task, number, parameters, self)

    def prepared(self, X: np.ndarray, y: np.ndarray) -> tuple[Array, np.ndarray]:
        rows = to_device(self.scale.apply(X, self.dtype), resolve(self.backend))
        return rows, y if self.target is None else (np.asarray(y, np.float64) - self.target[0]) * self.target[1]

    def all_rows(self) -> tuple[Array, np.ndarray]:
        """Every row, for what needs them at once."""
        parts = [self.dataset.read_rows(*span) for span in self.plan.ranges]
        X, y = np.concatenate([X for X, _ in parts]), np.concatenate([np.asarray(y) for _, y in parts])
        return self.prepared(X, y)

    def chunks(self) -> list[tuple[int, int]]:
        size = self.dataset.chunk_rows
        return [
            (at, min(at + size, stop)) for start, stop in self.plan.ranges for at in range(start, stop, size)
        ]  # fmt: skip


def _batch(source: Source, number: int) -> tuple[Array, np.ndarray]:
    batch = read_batch(source.dataset, source.plan, number)
    if batch.y is None:
        raise DataError(f"{source.dataset.path} has no labels; ingest it again with the column named by `label`")
    return source.prepared(batch.X, np.asarray(batch.y))


@functools.lru_cache(maxsize=1)
def _every_row(source: Source) -> tuple[Array, np.ndarray]:
    """Where every batch holds all rows, they are prepared once."""
    return _batch(source, 0)


def _evaluate_batch(task: Task, number: int, parameters: optim.Named, source: Source) -> Objective:
    whole = source.plan.rows_per_batch == source.plan.rows
    X, y = _every_row(source) if whole else _batch(source, number)
    return task.evaluate(parameters, X, y, number)


# --- the rounds -------------------------------------------------------------------------------------


def learn_task(
    task: Task,
    source: Source,
    start: Mapping[str, np.ndarray],
    settings: LearnSettings,
    *,
    executor: Executor | None = None,
    batches_per_step: int = 1,
    callback: Callback | None = None,
    after: Callable[[optim.Named, float], optim.Named] | None = None,
    phase: str = "rcb",
    checkpoints: Checkpoints | None = None,
    average: float = 0.0,
) -> Outcome:
    """Step after step: batches judged where the executor works, gradients averaged in order, one update here.

    `start` holds parameters as they are learned (λ as a logarithm). Without an executor everything happens in this
    process. See `Trainer` for the rest.
    """
    if batches_per_step < 1:
        raise ConfigError(f"batches_per_step={batches_per_step}: must be an integer >= 1")
    identity = {} if checkpoints is None else _identity(task, source, start, settings, batches_per_step)
    if average:
        identity = {**identity, "average": average}
    workers = executor or SerialExecutor()

    def play(step: int, parameters: optim.Named) -> Round:
        out = _evaluate_step(task, source, parameters, step, batches_per_step, workers)
        return Round(out, source.batch, {})

    trainer = Trainer(start, settings, after=after, average=average, phase=phase, remember=True)
    return trainer.run(play, identity, checkpoints, callback)


def _identity(
    task: Task, source: Source, start: Mapping[str, np.ndarray], settings: LearnSettings, batches_per_step: int
) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued; where no rate depends on the end, a run may be made longer."""
    chosen = {name: value for name, value in vars(settings).items() if name != "schedule"}
    if settings.schedule is None:
        del chosen["steps"]
    else:
        chosen["schedule"] = getattr(settings.schedule, "__qualname__", type(settings.schedule).__name__)
    given = {name: value for name, value in vars(task).items() if name not in ("features", "kernel", "settings")}
    tree = {
        "learn": {**chosen, "batch_size": source.batch, "batches_per_step": batches_per_step},
        "model": {"kind": type(task).__name__, **given, **_map_of(task)},
        "start": {name: _short(value) for name, value in start.items()},
        "data": source.digest,
    }
    plain: dict[str, Any] = json.loads(json.dumps(tree, default=vars))
    return plain


def _map_of(task: Any) -> dict[str, Any]:
    """The map (or kernel) of a task: its config, and its arrays by digest."""
    if hasattr(task, "kernel"):
        config = json.dumps(task.kernel.to_config(), sort_keys=True).encode()
        return {"kernel": repr(task.kernel), "arrays": hashlib.sha256(config).hexdigest()[:16]}
    return {"features": task.features.to_config(), "arrays": {n: _short(a) for n, a in task.features.arrays.items()}}


def _short(value: np.ndarray) -> float | str:
    """A number as it is, an array by its digest."""
    array = np.ascontiguousarray(value)
    return float(array) if array.ndim == 0 else hashlib.sha256(array.data).hexdigest()[:16]


def _evaluate_step(
    task: Task, source: Source, parameters: optim.Named, step: int, batches: int, executor: Executor
) -> Objective:
    calls = [source.call(task, step * batches + i, parameters) for i in range(batches)]
    function, arguments = calls[0][0], [call[1] for call in calls]
    outs = executor.map(function, arguments, name="feature-gradient")
    return outs[0] if batches == 1 else mean_objectives(outs)


# --- maps given, stored and brought back --------------------------------------------------------------


def as_features(network: Any, n_features: int, seed: int = 0) -> Any:
    """A map as it is, one drawn from a config or a name, or a torch network."""
    if hasattr(network, "linearise"):
        return network
    if isinstance(network, str | Mapping) and not _wants_torch(network):
        return maps.from_config(network, n_features=n_features, seed=seed)
    return _torch().as_features(network, seed=seed)


def restore_features(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], own: Mapping[str, Any]) -> Any:
    """A feature map from its config and the arrays "features/NAME"; `own` holds the user's torch classes by name."""
    stored = {name.removeprefix("features/"): value for name, value in arrays.items() if name.startswith("features/")}
    if _wants_torch(config):
        return _torch().from_config(config, stored, own)
    return maps.from_config(config, arrays=stored)


def _wants_torch(config: Any) -> bool:
    return isinstance(config, Mapping) and config.get("name") == "torch"


def _torch() -> Any:
    # Only here, and only for those who hand over a torch network: torch takes seconds to import.
    return importlib.import_module("kme_dist.run.torch_features")


@dataclass(frozen=True)
class FeatureScaling(Scaling):
    """Rows scaled, then taken through a fixed feature map: for a kernel that stands on features."""

    features: Any = None
    after: np.ndarray | None = None  # factors of the features

    def apply(self, X: np.ndarray, dtype: str) -> np.ndarray:
        Z = to_host(self.features.forward(super().apply(X, dtype)))
        return np.asarray(Z if self.after is None else Z * self.after, dtype)

    def weighted(self, weights: np.ndarray) -> Scaling:
        return replace(self, after=weights if self.after is None else self.after * weights)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        own = {f"features/{name}": value for name, value in self.features.arrays.items()}
        return own if self.after is None else {**own, "scaling/after": self.after}


def with_features(scaling: Scaling, features: Any, seed: int = 0, after: np.ndarray | None = None) -> Scaling:
    """`scaling` followed by a feature map; alone where there is none."""
    if features is None:
        return scaling
    return FeatureScaling(scaling.shift, scaling.factor, as_features(features, scaling.shift.size, seed), after)


def features_of(scaling: Scaling) -> tuple[dict[str, np.ndarray], dict[str, Any] | None]:
    """What there is to store of the map behind a scaling: arrays, and a config (None without a map)."""
    return (scaling.arrays, scaling.features.to_config()) if isinstance(scaling, FeatureScaling) else ({}, None)
