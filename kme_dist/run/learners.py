"""Learners evaluate a batch: objective and gradient of its rows, by parameter name; and the settings of learning.

    KernelLearner(kernel, settings, n_classes=10)        algorithm 1: a kernel and λ
    NetworkLearner(features, settings, n_classes=10)     algorithm 2: explicit features and λ
    SoftmaxLearner(features, settings, n_classes=10)     the same features under a softmax layer, as a baseline

A learner is a small record that is sent to the workers; `evaluate(parameters, X, y, number)` depends on nothing else,
except the positive `weights` of rows that have some.
Kernel parameters and "regularization" are given as logarithms, those of a feature map unchanged, as "features.NAME". A
new learner defines `evaluate`, and `describe` for the identity of its checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kme_dist.backend import Array, astype, like, namespace_of, precision, to_host
from kme_dist.core import optim
from kme_dist.core.calibrated import SHARPNESS, START_SHARPNESS, calibrated_objective
from kme_dist.core.features import dropout_mask, truncated_normal
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, select
from kme_dist.core.masked import masked_objective
from kme_dist.core.objective import (
    LOSS_FLOOR,
    Objective,
    Workspace,
    feature_objective,
    loo_objective,
    one_hot,
    rcb_objective,
    validation_objective,
)
from kme_dist.core.risk import COMPLEXITY_WEIGHT, column, merge_equal_rows
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.executors import tree_combine

OBJECTIVES = ("rcb", "validation", "loo", "erm", "calibrated")
Record = dict[str, Any]  # of one step: values by name
PREFIX = "features."
# Of a step under the calibrated objective: far below the noise of a batch, and what is learned is tuned afterwards.
STEP_TOLERANCE = 0.02
SHIFTS, SHARPNESSES = (1e-6, 30.0), (1.0, 60.0)  # limits of nλ (of a batch) and β under the calibrated objective
WEIGHTS, BIAS = "softmax.weights", "softmax.bias"
_ROWS = 4_096
_JOINT = "/"  # between the number of a replica and the name of its parameter
_FULL_CONFIG = 10_000  # longest kernel config stored in full in a checkpoint
_local = threading.local()  # memory for a Gram matrix, kept between batches by each thread


@dataclass(frozen=True)
class LearnSettings:
    """Settings of a learning run, except data and starting point."""

    objective: str = "rcb"
    risk: str = "sum"
    complexity_weight: float | None = None  # None: 4e for rcb, 1 for validation and leave-one-out, 0 for erm
    steps: int = 1000
    batch_size: int | None = None  # None: all rows in every step
    learning_rate: float = 0.1
    schedule: Callable[[float, int], optim.Schedule] | None = None  # (rate, steps) -> schedule; None: constant
    optimizer: str = "adam"
    clip_norm: float | None = None
    weight_decay: float = 0.0  # a step also multiplies every parameter by 1 - rate x this
    frozen: tuple[str, ...] = ()
    train_share: float = 0.5  # of a batch, for the validation objective
    evaluated: int | None = None  # rows of a batch left out one at a time by the calibrated objective; None: all
    # Prior on length scales: deviation from their start in e-folds (of the calibrated objective: from their start times
    # a common factor); None: no prior.
    prior_width: float | None = None
    patience: int | None = None  # steps without improvement of the smoothed objective; None: run all steps
    seed: int = 0
    delay: int = 0  # updates by which a gradient is behind: 0, or 1 to send a round before the last one is collected

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective={self.objective!r} cannot be learned; choose one of {', '.join(OBJECTIVES)}")
        if self.steps < 0:
            raise ConfigError(f"steps={self.steps}: must be an integer >= 0")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate={self.learning_rate!r}: must be a positive number")
        if self.delay not in (0, 1):
            raise ConfigError(f"delay={self.delay!r}: must be 0 or 1, the number of updates a gradient is behind")

    @property
    def tau(self) -> float:
        if self.objective in ("erm", "calibrated"):
            return 0.0
        if self.complexity_weight is not None:
            return self.complexity_weight
        return COMPLEXITY_WEIGHT if self.objective == "rcb" else 1.0


def without_schedule(settings: LearnSettings) -> LearnSettings:
    """For workers: the schedule is a function that only the driver calls, and need not pickle."""
    return replace(settings, schedule=None)


class Learner(Protocol):
    """Evaluates one batch."""

    def evaluate(
        self, parameters: optim.Named, X: Any, y: np.ndarray, number: int, weights: np.ndarray | None = None
    ) -> Objective: ...
    def describe(self) -> dict[str, Any]: ...


def learner_without_schedule(learner: Learner) -> Learner:
    """The same learner for workers."""
    settings = getattr(learner, "settings", None)
    return learner if settings is None else replace(learner, settings=without_schedule(settings))  # type: ignore[type-var]


# --- parameters -------------------------------------------------------------------------------------


def assemble(kernel: Kernel, log_parameters: dict[str, np.ndarray]) -> tuple[Kernel, float]:
    """Kernel and λ from their logarithms."""
    values = optim.from_log(log_parameters)
    lam = float(values.pop("regularization"))
    values.pop(SHARPNESS, None)
    return kernel.replace(values), lam


def log_parameters(start: Any, regularization: float) -> optim.Named:
    """Parameters of a kernel (or of any object with `parameters`) and λ, as logarithms."""
    return optim.to_log({**start.parameters, "regularization": np.asarray(regularization, dtype=np.float64)})


def kernel_start(kernel: Kernel, regularization: float, objective: str) -> optim.Named:
    """Where learning a kernel starts: its parameters and λ, for the calibrated objective also the sharpness."""
    start = log_parameters(kernel, regularization)
    return {**start, SHARPNESS: np.asarray(np.log(START_SHARPNESS))} if objective == "calibrated" else start


def within_limits(rows: int, parameters: optim.Named, rate: float) -> optim.Named:
    """After a step of the calibrated objective: nλ and β do not run away where the loss is flat in them."""
    limits = {"regularization": np.log(np.array(SHIFTS) / rows), SHARPNESS: np.log(SHARPNESSES)}
    return {name: np.clip(v, *limits[name]) if name in limits else v for name, v in parameters.items()}


def start_of(features: Any, regularization: float | None = None) -> optim.Named:
    """Parameters as the trainer names them: "features.NAME" for the map, and the logarithm of λ."""
    own = {PREFIX + name: np.array(value) for name, value in features.parameters.items()}
    return own if regularization is None else {**own, "regularization": np.asarray(np.log(regularization))}


def with_parameters(features: Any, parameters: optim.Named) -> Any:
    """The map with the given parameter values."""
    return features.replace(**{n.removeprefix(PREFIX): v for n, v in parameters.items() if n.startswith(PREFIX)})


def short_digest(value: np.ndarray) -> float | str:
    """A number unchanged, an array as a digest."""
    array = np.ascontiguousarray(value)
    return float(array) if array.ndim == 0 else hashlib.sha256(array.data).hexdigest()[:16]


def _settings_of(learner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(learner).items() if name not in ("features", "settings")}


def describe_map(features: Any) -> dict[str, Any]:
    """A feature map: its config, and digests of its arrays."""
    return {"features": features.to_config(), "arrays": {n: short_digest(a) for n, a in features.arrays.items()}}


# --- kernels ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelLearner:
    """Algorithm 1: any kernel, with λ, under the objective of the settings.   [HNR]"""

    kernel: Kernel
    settings: LearnSettings
    n_classes: int

    def evaluate(
        self, parameters: optim.Named, X: Any, y: np.ndarray, number: int, weights: np.ndarray | None = None
    ) -> Objective:
        kernel, lam = assemble(self.kernel, parameters)
        workspace = _local.__dict__.setdefault("workspace", Workspace())
        if self.settings.objective == "calibrated":
            return self._calibrated(kernel, lam, parameters, X, y, number, workspace, weights)
        return batch_objective(self.settings, kernel, lam, X, y, self.n_classes, number, workspace, weights)

    def _calibrated(
        self,
        kernel: Kernel,
        lam: float,
        parameters: optim.Named,
        X: Any,
        y: np.ndarray,
        number: int,
        workspace: Workspace,
        weights: np.ndarray | None,
    ) -> Objective:
        X, y, weights, *_ = merge_equal_rows(X, y, weights)
        # Other rows are left out in every step, also if every batch has all rows.
        order = np.random.default_rng([self.settings.seed, number, 1]).permutation(len(y))
        return calibrated_objective(
            kernel,
            select(X, order),
            y[order],
            regularization=lam,
            sharpness=float(np.exp(parameters[SHARPNESS])),
            n_classes=self.n_classes,
            evaluated=self.settings.evaluated,
            risk=self.settings.risk,
            workspace=workspace,
            weights=None if weights is None else weights[order],
            tolerance=STEP_TOLERANCE,
        )

    def describe(self) -> dict[str, Any]:
        config = json.dumps(self.kernel.to_config(), sort_keys=True)
        if len(config) < _FULL_CONFIG:
            return {"kernel": json.loads(config)}
        return {"kernel": repr(self.kernel), "arrays": hashlib.sha256(config.encode()).hexdigest()[:16]}


def batch_objective(
    settings: LearnSettings,
    kernel: Kernel,
    regularization: float,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    step: int,
    workspace: Workspace,
    weights: np.ndarray | None = None,
) -> Objective:
    """The objective of one batch."""
    common: dict[str, Any] = {
        "regularization": regularization,
        "n_classes": n_classes,
        "risk": settings.risk,
        "complexity_weight": settings.tau,
        "workspace": workspace,
        "weights": weights,
    }
    if settings.objective == "validation" and row_count(X) > 1:
        # A new split in every step: if the batch has all rows, this is what prevents overfitting.
        order = np.random.default_rng([settings.seed, step, 1]).permutation(row_count(X))
        train = min(max(round(settings.train_share * row_count(X)), 1), row_count(X) - 1)
        common["weights"] = None if weights is None else weights[order]
        return validation_objective(kernel, select(X, order), y[order], train_rows=train, **common)
    if settings.objective == "loo":
        return loo_objective(kernel, X, y, **common)
    return rcb_objective(kernel, X, y, **common)


# --- features ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkLearner:
    """Algorithm 2 on the features of a batch.   [HNR]

    `dropout` drops features of the last layer; with `independent_masks` W is solved under one mask and evaluated under
    another. With `halves` each half of the batch is evaluated with the W of the other half, under masks of its own.
    `alpha` 1 is the published choice, None the supremum over the rows that W is solved on.
    """

    features: Any
    settings: LearnSettings
    n_classes: int
    alpha: float | None = 1.0
    dropout: float = 0.0
    independent_masks: bool = False
    clip_above: bool = True
    loss_floor: float = LOSS_FLOOR
    halves: bool = False
    loss: str = "log"

    def describe(self) -> dict[str, Any]:
        return {"kind": "network", **_settings_of(self), **describe_map(self.features)}

    def evaluate(
        self, parameters: optim.Named, X: Array, y: np.ndarray, number: int, weights: np.ndarray | None = None
    ) -> Objective:
        features, lam = with_parameters(self.features, parameters), float(np.exp(parameters["regularization"]))
        key = (self.settings.seed, number)
        if self.halves:  # rows may be sorted by class
            order = np.random.default_rng([*key, 1]).permutation(len(y))
            X, y, weights = select(X, order), y[order], None if weights is None else weights[order]
        Z, pull = features.sampled((*key, 2)).linearise(X)
        options: dict[str, Any] = {
            "regularization": lam,
            "n_classes": self.n_classes,
            "risk": self.settings.risk,
            "complexity_weight": self.settings.tau,
            "loss_floor": self.loss_floor,
            "alpha": self.alpha,
            "weights": weights,
        }
        own = dropout_mask(self.dropout, (*key, 3), Z) if self.dropout else None
        other = dropout_mask(self.dropout, (*key, 4), Z) if own is not None and self.independent_masks else own
        first, second = (Z if mask is None else Z * mask for mask in (own, other))
        if self.halves or self.loss != "log" or other is not own:
            options |= {"clip_above": self.clip_above, "loss": self.loss}
            out = (
                _by_halves(first, second, y, options) if self.halves else masked_objective(first, second, y, **options)
            )
            bars = [astype(bar, precision(Z)) for bar in out.feature_gradient]
        else:
            out = feature_objective(first, y, **options)
            bars = [astype(out.feature_gradient, precision(Z))]
        bars = [bar if mask is None else bar * mask for bar, mask in zip(bars, (own, other), strict=False)]
        inner = pull(bars[0] if len(bars) == 1 else bars[0] + bars[1])[0]
        gradient = {PREFIX + name: to_host(value) for name, value in inner.items()}
        return replace(out, gradient={**gradient, **out.gradient}, feature_gradient=None)


def _by_halves(Z_solve: Array, Z_evaluate: Array, y: np.ndarray, options: dict[str, Any]) -> Objective:
    """The mean over both halves, each evaluated with the W of the other; gradients by rows solved on and evaluated."""
    half = len(y) // 2
    if not half:
        raise DataError(f"a batch of {len(y)} rows cannot be halved; objective='validation' requires larger batches")
    parts = slice(None, half), slice(half, None)
    w = options["weights"]
    outs = []
    for one, two in (parts, parts[::-1]):
        own = {} if w is None else {"weights": w[one], "weights_eval": w[two]}
        outs.append(masked_objective(Z_solve[one, :], Z_evaluate[two, :], y[one], y[two], **{**options, **own}))
    concat = namespace_of(Z_solve).concat
    solved = concat([out.feature_gradient[0] for out in outs], axis=0) / 2
    evaluated = concat([out.feature_gradient[1] for out in outs[::-1]], axis=0) / 2
    return replace(mean_objectives(outs), feature_gradient=(solved, evaluated))


@dataclass(frozen=True)
class SoftmaxLearner:
    """The same network under a softmax layer: mean cross entropy of softmax(φ(x) W + b)."""

    features: Any
    settings: LearnSettings
    n_classes: int
    dropout: float = 0.0

    def start(self, width: int) -> optim.Named:
        """The layer starts like the published networks: deviation 0.1, biases 0.1."""
        rng = np.random.default_rng([self.settings.seed, 8])
        weights = truncated_normal(rng, (width, self.n_classes), 0.1)
        return {**start_of(self.features), WEIGHTS: weights, BIAS: np.full(self.n_classes, 0.1)}

    def describe(self) -> dict[str, Any]:
        return {"kind": "softmax", **_settings_of(self), **describe_map(self.features)}

    def evaluate(
        self, parameters: optim.Named, X: Array, y: np.ndarray, number: int, weights: np.ndarray | None = None
    ) -> Objective:
        key = (self.settings.seed, number)
        Z, pull = with_parameters(self.features, parameters).sampled((*key, 2)).linearise(X)
        mask = dropout_mask(self.dropout, (*key, 3), Z) if self.dropout else None
        Z = Z if mask is None else Z * mask
        xp, Y = namespace_of(Z), one_hot(y, self.n_classes, Z)
        W, scores = like(parameters[WEIGHTS], Z), self._scores(parameters, Z)
        shifted = scores - xp.max(scores, axis=1, keepdims=True)
        total = xp.sum(xp.exp(shifted), axis=1, keepdims=True)
        own = xp.sum(Y * shifted, axis=1, keepdims=True)
        losses, slope = xp.log(total) - own, xp.exp(shifted) / total - Y
        if weights is None:
            loss, slope = float(to_host(xp.mean(losses))), slope / len(y)
        else:
            share = column(weights / weights.sum(), Z)
            loss, slope = float(to_host(xp.sum(losses * share))), slope * share
        Z_bar = slope @ W.T
        inner = pull(Z_bar if mask is None else Z_bar * mask)[0]
        gradient = {PREFIX + name: to_host(value) for name, value in inner.items()}
        gradient |= {WEIGHTS: to_host(Z.T @ slope), BIAS: to_host(xp.sum(slope, axis=0))}
        right = float(np.average(to_host(xp.argmax(scores, axis=1)) == y, weights=weights))
        return Objective(loss, loss, 0.0, float("nan"), gradient, right, precision(Z))

    def decide(self, parameters: optim.Named, X: Array) -> np.ndarray:
        """Predicted class numbers."""
        network, found = with_parameters(self.features, parameters), []
        for rows in row_blocks(len(X), _ROWS):
            scores = self._scores(parameters, network.forward(X[rows, :]))
            found.append(to_host(namespace_of(scores).argmax(scores, axis=1)))
        return np.concatenate(found)

    @staticmethod
    def _scores(parameters: optim.Named, Z: Array) -> Array:
        return Z @ like(parameters[WEIGHTS], Z) + like(parameters[BIAS], Z)


# --- means over batches -----------------------------------------------------------------------------


def mean_objectives(outs: list[Objective]) -> Objective:
    """The mean over batches, summed in order by a fixed tree."""
    names = ("value", "risk", "complexity", "bound", "accuracy")
    numbers = tree_combine([np.array([getattr(out, name) for name in names]) for out in outs], np.add) / len(outs)
    return Objective(
        **dict(zip(names, numbers.tolist(), strict=True)),
        gradient=mean_named([out.gradient for out in outs]),
        dtype=max(out.dtype for out in outs),
        jitter=max(out.jitter for out in outs),
    )


def mean_named(items: list[optim.Named]) -> optim.Named:
    """The mean of dictionaries of arrays, summed in order by a fixed tree."""
    total = tree_combine(items, lambda a, b: {name: a[name] + b[name] for name in a})
    return {name: value / len(items) for name, value in total.items()}


# --- several replicas -------------------------------------------------------------------------------


def joined(replicas: Sequence[optim.Named]) -> optim.Named:
    """The parameters of several replicas as those of one run; `parted` is the reverse."""
    return {f"{r}{_JOINT}{name}": value for r, own in enumerate(replicas) for name, value in own.items()}


def parted(parameters: optim.Named) -> list[optim.Named]:
    """The parameters of each replica."""
    found: list[optim.Named] = [{} for _ in range(replicas_in(parameters))]
    for name, value in parameters.items():
        number, _, own = name.partition(_JOINT)
        found[int(number)][own] = value
    return found


def replicas_in(parameters: Mapping[str, Any]) -> int:
    """How many replicas were joined; 0 if these are the parameters of one."""
    return len({name.partition(_JOINT)[0] for name in parameters if _JOINT in name})
