"""The pieces of learning: settings, the objective of one batch, the prior, the stopping rule, records.

The loop that puts them together is in `rounds`. The batch of step t is a function of the seed and t alone, so a run can
be repeated, split and resumed; the parameters are logarithms; every step leaves a record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kme_dist.backend import like
from kme_dist.core import optim
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.objective import (
    COMPLEXITY_WEIGHT,
    Objective,
    Workspace,
    loo_objective,
    rcb_objective,
    validation_objective,
)
from kme_dist.errors import ConfigError
from kme_dist.run.executors import tree_combine

OBJECTIVES = ("rcb", "validation", "loo", "erm")
Record = dict[str, Any]


@dataclass(frozen=True)
class LearnSettings:
    """Everything that decides a learning run, apart from data and starting point."""

    objective: str = "rcb"
    risk: str = "sum"
    complexity_weight: float | None = None  # None: 4e for rcb, 1 for validation and leave-one-out, 0 for erm
    steps: int = 1000
    batch_size: int | None = None  # None: all rows in every step
    learning_rate: float = 0.1
    schedule: Callable[[float, int], optim.Schedule] | None = None  # (rate, steps) -> schedule; None: constant
    optimizer: str = "adam"
    clip_norm: float | None = None
    frozen: tuple[str, ...] = ()
    train_share: float = 0.5  # of a batch, for the validation objective
    prior_width: float | None = None  # how far, in e-folds, length scales may stray from their start; None: freely
    patience: int | None = None  # steps without improvement of the smoothed objective; None: run all steps
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective={self.objective!r} cannot be learned; choose one of {', '.join(OBJECTIVES)}")
        if self.steps < 0:
            raise ConfigError(f"steps={self.steps}: must be an integer >= 0")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate={self.learning_rate!r}: must be a positive number")

    @property
    def tau(self) -> float:
        if self.objective == "erm":
            return 0.0
        if self.complexity_weight is not None:
            return self.complexity_weight
        return COMPLEXITY_WEIGHT if self.objective == "rcb" else 1.0


@dataclass(frozen=True)
class Learned:
    """Where learning ended: the last iterate, or the best where a stopping rule watched."""

    kernel: Kernel
    regularization: float
    history: list[Record] = field(repr=False)
    stopped_early: bool = False


def batch_rows(n: int, batch_size: int | None, step: int, seed: int) -> np.ndarray | None:
    """The rows of batch `step`, None standing for all of them.

    Batches walk through one permutation of the rows after another, a new one for every epoch. A batch that begins in
    one epoch and ends in the next takes its first rows from the old permutation and the others from the new.
    """
    if batch_size is None or batch_size >= n:
        return None
    epoch, place = divmod(step * batch_size, n)
    rows = _epoch_order(n, epoch, seed)[place : place + batch_size]
    if len(rows) < batch_size:
        rows = np.concatenate([rows, _epoch_order(n, epoch + 1, seed)[: batch_size - len(rows)]])
    return rows


@functools.lru_cache(maxsize=2)
def _epoch_order(n: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


def batch_objective(
    settings: LearnSettings,
    kernel: Kernel,
    regularization: float,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    step: int,
    workspace: Workspace,
) -> Objective:
    """The objective of one batch: the one function that runs wherever the batch is."""
    common: dict[str, Any] = {
        "regularization": regularization,
        "n_classes": n_classes,
        "risk": settings.risk,
        "complexity_weight": settings.tau,
        "workspace": workspace,
    }
    if settings.objective == "validation" and len(X) > 1:
        # A fresh split in every step: with all rows in the batch this is what keeps it from being learned by heart.
        order = np.random.default_rng([settings.seed, step, 1]).permutation(len(X))
        train = min(max(round(settings.train_share * len(X)), 1), len(X) - 1)
        return validation_objective(kernel, select(X, order), y[order], train_rows=train, **common)
    if settings.objective == "loo":
        return loo_objective(kernel, X, y, **common)
    return rcb_objective(kernel, X, y, **common)


def select(X: Any, rows: np.ndarray) -> Any:
    """Rows of an array on any device, or of a list."""
    return X[like(rows, X, dtype=np.int64)] if hasattr(X, "dtype") else [X[i] for i in rows]


def assemble(kernel: Kernel, log_parameters: dict[str, np.ndarray]) -> tuple[Kernel, float]:
    """Kernel and λ from the vector of logarithms."""
    values = optim.from_log(log_parameters)
    lam = float(values.pop("regularization"))
    return kernel.replace(values), lam


def log_parameters(start: Any, regularization: float) -> optim.Named:
    """Parameters of a kernel (or of whatever else has some by name) and λ, as they are learned."""
    return optim.to_log({**start.parameters, "regularization": np.asarray(regularization, dtype=np.float64)})


def mean_objectives(outs: list[Objective]) -> Objective:
    """The mean over batches, added up in their order by a fixed tree."""
    names = ("value", "risk", "complexity", "bound", "accuracy")
    numbers = tree_combine([np.array([getattr(out, name) for name in names]) for out in outs], np.add) / len(outs)
    return Objective(
        **dict(zip(names, numbers.tolist(), strict=True)),
        gradient=mean_named([out.gradient for out in outs]),
        dtype=max(out.dtype for out in outs),
        jitter=max(out.jitter for out in outs),
    )


def mean_named(items: list[optim.Named]) -> optim.Named:
    """The mean of dictionaries of arrays, added up in their order by a fixed tree."""
    total = tree_combine(items, lambda a, b: {name: a[name] + b[name] for name in a})
    return {name: value / len(items) for name, value in total.items()}


def step_record(
    settings: LearnSettings, step: int, out: Objective, lam: float, gradient_norm: float, rows: int, seconds: float
) -> Record:
    return {
        "step": step + 1,
        "steps": settings.steps,
        "phase": settings.objective,
        "objective": out.value,
        "risk": out.risk,
        "complexity": out.complexity,
        "bound": out.bound,
        "accuracy": out.accuracy,
        "regularization": lam,
        "gradient_norm": gradient_norm,
        "rows": rows,
        "seconds": seconds,
    }


class LengthScalePrior:
    """½ Σ_d (log ℓ_d - log ℓ_d⁰)² / width²: keeps length scales near their start unless the data say otherwise.

    With one length scale per feature and few rows, features look relevant by chance. Losses are summed over rows and
    the prior is not, so it fades as rows are added; a batch carries its share of it.
    """

    def __init__(self, kernel: Kernel, start: dict[str, np.ndarray], settings: LearnSettings, rows: int) -> None:
        self._names = length_scale_names(kernel) if settings.prior_width else []
        self._start = {name: start[name] for name in self._names}
        judged = 1 - settings.train_share if settings.objective == "validation" else 1.0
        per_row = 1.0 if settings.risk == "sum" else 1.0 / max(rows, 1)
        self._weight = per_row * judged / (rows * settings.prior_width**2) if settings.prior_width else 0.0

    def value(self, parameters: dict[str, np.ndarray], batch: int) -> float:
        squares = (np.sum((parameters[name] - self._start[name]) ** 2) for name in self._names)
        return 0.5 * self._weight * batch * float(sum(squares))

    def add_to(self, gradient: optim.Named, parameters: dict[str, np.ndarray], batch: int) -> optim.Named:
        pull = {name: self._weight * batch * (parameters[name] - self._start[name]) for name in self._names}
        return {name: g + pull.get(name, 0.0) for name, g in gradient.items()}


@dataclass(frozen=True)
class Stepper:
    """From gradients to parameters: the same wherever the step is made."""

    settings: LearnSettings
    names: tuple[str, ...]  # of the parameters that are learned
    prior: LengthScalePrior | None = None

    @classmethod
    def of(cls, parameters: optim.Named, settings: LearnSettings, prior: LengthScalePrior | None = None) -> Stepper:
        return cls(without_schedule(settings), tuple(optim.learnable(parameters, settings.frozen)), prior)

    def start(self, parameters: optim.Named) -> optim.State:
        return self._optimizer.init({name: parameters[name] for name in self.names})

    def gradient(self, out: Objective, parameters: optim.Named, rows: int) -> optim.Named:
        """With the share of the prior that a batch of `rows` carries."""
        own = {name: _finite(out.gradient[name]) for name in self.names}
        return own if self.prior is None else self.prior.add_to(own, parameters, rows)

    def penalty(self, parameters: optim.Named, rows: int) -> float:
        """The value of that share."""
        return 0.0 if self.prior is None else self.prior.value(parameters, rows)

    def move(
        self, gradient: optim.Named, parameters: optim.Named, state: optim.State, rate: float
    ) -> tuple[optim.Named, optim.State]:
        delta, state = self._optimizer.update(optim.clip(gradient, self.settings.clip_norm), state, rate)
        return {name: value + delta[name] if name in delta else value for name, value in parameters.items()}, state

    @property
    def _optimizer(self) -> optim.Optimizer:
        return optim.optimizer_by_name(self.settings.optimizer)


def without_schedule(settings: LearnSettings) -> LearnSettings:
    """As settings travel to workers: the schedule is a function, and the driver's business."""
    return replace(settings, schedule=None)


def _finite(value: np.ndarray) -> np.ndarray:
    return value if np.isfinite(value).all() else np.nan_to_num(value)


class PlateauWatch:
    """Early stopping: watches a noisy value and remembers the parameters at its best.

    The value is smoothed over about twenty steps; when the smoothed value has not fallen by one part in a thousand for
    `patience` steps, it is time to stop. With patience None it never asks to stop.
    """

    def __init__(self, patience: int | None, smoothing: float = 0.95, tolerance: float = 1e-3) -> None:
        self._patience, self._smoothing, self._tolerance = patience, smoothing, tolerance
        self._mean, self._weight = 0.0, 0.0
        self._best, self._since = math.inf, 0
        self._parameters: dict[str, np.ndarray] | None = None

    def should_stop(self, value: float, parameters: dict[str, np.ndarray]) -> bool:
        if self._patience is None:
            return False
        self._mean = self._smoothing * self._mean + (1 - self._smoothing) * value
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        smooth = self._mean / self._weight
        if smooth < self._best:
            if smooth < self._best - self._tolerance * abs(self._best) or math.isinf(self._best):
                self._since = 0
            self._best, self._parameters = smooth, parameters
        self._since += 1
        return self._since > self._patience

    def state(self) -> dict[str, Any]:
        """Everything it remembers, for a checkpoint."""
        numbers = {"mean": self._mean, "weight": self._weight, "least": self._best, "since": self._since}
        return {**numbers, "best": self._parameters}

    def restore(self, state: dict[str, Any]) -> None:
        self._mean, self._weight = state["mean"], state["weight"]
        self._best, self._since, self._parameters = state["least"], state["since"], state.get("best")

    def best_parameters(self, otherwise: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return otherwise if self._parameters is None else self._parameters


def median_length_scale(X: np.ndarray, seed: int, pairs: int = 10_000) -> float:
    """The median distance between rows, over random pairs: the heuristic for one common length scale."""
    rng = np.random.default_rng(seed)
    i, j = rng.integers(0, len(X), size=(2, pairs))
    distances = np.sqrt(np.sum((X[i[i != j]] - X[j[i != j]]).astype(np.float64) ** 2, axis=1))
    distances = distances[distances > 0]
    return float(np.median(distances)) if distances.size else 1.0


def length_scale_names(kernel: Kernel) -> list[str]:
    """Parameters that measure distance, in a kernel and its parts."""
    return [name for name in kernel.parameters if name.rsplit(".", 1)[-1] == "length_scale"]
