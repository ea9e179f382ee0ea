"""Learning feature maps by batches: one loop for networks and spectral kernels, in memory or over a cluster.

    settings = LearnSettings(steps=500, batch_size=1000)
    source = ArraySource(X, y, batch_size=1000, seed=0)               # or Source.of(dataset, ...)
    found = learn_task(NetworkTask(features, settings, n_classes=10), source, start_of(features, 1.0), settings)
    head = solve_features(with_parameters(features, found.parameters), source, 10, regularization=1.0)

A task says what one batch is worth: `evaluate(parameters, X, y, number)` returns an Objective whose gradient has the
names of the parameters. A source says where batch `number` comes from. Batches are a function of seed and number,
gradients are averaged in that order, so what is learned does not depend on who did the work.

`solve_features` is the final fit of a linear head, W = (ZᵀZ + nλI)⁻¹ ZᵀY: sums over chunks, for any number of rows.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kme_dist.backend import (
    Array,
    astype,
    cholesky,
    like,
    namespace_of,
    resolve,
    to_device,
    to_host,
)
from kme_dist.core import features as maps
from kme_dist.core import optim
from kme_dist.core.embedding import Embedding, log_loss
from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.objective import Objective, one_hot
from kme_dist.data.batches import plan_batches, read_batch
from kme_dist.data.dataset import RowSource
from kme_dist.data.plan import BatchPlan
from kme_dist.data.scaling import Scaling
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor, SerialExecutor
from kme_dist.run.learn import LearnSettings, mean_objectives
from kme_dist.run.solve import search_regularization
from kme_dist.run.trainer import Callback, Outcome, Round, Trainer

PREFIX = "features."
_CHUNK_ROWS = 4_096
_LOO_ROWS = 20_000


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


# --- the final fit of a linear head -----------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """W of f(x) = Wᵀ φ(x), with the λ it was solved for."""

    weights: np.ndarray
    regularization: float
    loo_log_loss: float | None = None


def _sums(features: Any, X: Array, y: np.ndarray, n_classes: int) -> dict[str, np.ndarray]:
    Z = astype(features.forward(X), "float64")
    Y = one_hot(y, n_classes, Z)
    return {"G": to_host(Z.T @ Z), "B": to_host(Z.T @ Y), "n": np.asarray(float(len(y)))}


def _stored_sums(source: Source, span: tuple[int, int], features: Any, n_classes: int) -> dict[str, np.ndarray]:
    X, y = source.dataset.read_rows(*span)
    return _sums(features, *source.prepared(X, np.asarray(y)), n_classes)


def _add(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: left[name] + right[name] for name in left}


def solve_features(
    features: Any,
    source: Source,
    n_classes: int,
    regularization: float,
    *,
    retune: bool = False,
    floor: float = 0.0,
    executor: Executor | None = None,
) -> Head:
    """W on all rows by sums over chunks, in double precision; with `retune`, λ by leave-one-out log loss.

    Leave-one-out is exact for the weights, P_i -> (P_i - h_i Y_i) / (1 - h_i) with h_i = z_iᵀ G⁻¹ z_i, but the features
    have seen every row: it is a rough guide where the map was learned on few rows. It is taken at the first rows of a
    data set where there are many.
    """
    calls = [(source, span, features, n_classes) for span in source.chunks()]
    sums = (executor or SerialExecutor()).map_reduce(_stored_sums, calls, _add, name="feature-sums")
    n, G, B = float(sums["n"]), sums["G"], sums["B"]
    lam, loss = float(regularization), None
    if retune:
        X, y = _first_rows(source)
        lam, loss = _retuned(features, X, y, n_classes, G, B, n, lam, floor)
    shifted = np.asfortranarray(G + n * lam * np.eye(len(G)))
    return Head(np.ascontiguousarray(cholesky(shifted).solve(B)), lam, loss)


def _first_rows(source: Source) -> tuple[Array, np.ndarray]:
    parts, count = [], 0
    for span in source.chunks():
        X, y = source.dataset.read_rows(*span)
        parts.append(source.prepared(X, np.asarray(y)))
        count += len(y) if y is not None else 0
        if count >= _LOO_ROWS:
            break
    X = parts[0][0] if len(parts) == 1 else namespace_of(parts[0][0]).concat([X for X, _ in parts], axis=0)
    return X, np.concatenate([y for _, y in parts])


def _retuned(
    features: Any,
    X: Array,
    y: np.ndarray,
    n_classes: int,
    G: np.ndarray,
    B: np.ndarray,
    n: float,
    start: float,
    floor: float,
) -> tuple[float, float]:
    values, Q = np.linalg.eigh(G)
    values = np.maximum(values, 0.0)
    rotated = to_host(astype(features.forward(X), "float64")) @ Q
    Y, B_rotated = one_hot(y, n_classes, rotated), Q.T @ B

    def evaluate(lam: float) -> float:
        scaled = rotated / (values + n * lam)
        leverage = np.sum(scaled * rotated, axis=1, keepdims=True)
        P = scaled @ B_rotated
        left_out = (P - leverage * Y) / np.maximum(1 - leverage, 1e-12)
        return float(log_loss(Y, left_out, floor))

    scale = max(float(values.sum()) / n, 1e-12) / n
    lam, loss, _ = search_regularization(lambda lams: [evaluate(lam) for lam in lams], scale=scale, start=start)
    return lam, loss


@dataclass(frozen=True)
class FeatureEmbedding:
    """f(x) = Wᵀ φ(x); or, with `on_features`, an embedding whose rows are features."""

    features: Any
    weights: Array
    on_features: Embedding | None = None
    regularization: float = math.nan

    def decision(self, X: Array) -> Array:
        """Decision probabilities (or scores) at the rows of X, chunk by chunk."""
        parts = []
        for rows in row_blocks(max(1, len(X)), _CHUNK_ROWS):
            Z = self.features.forward(X[rows, :])
            parts.append(
                Z @ like(to_host(self.weights), Z) if self.on_features is None else self.on_features.decision(Z)
            )
        return parts[0] if len(parts) == 1 else namespace_of(parts[0]).concat(parts, axis=0)


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
