"""What a batch is worth to those who learn features: algorithm 2, algorithm 1 on features, and the softmax layer that
embedding networks are measured against.

    task = NetworkTask(features, settings, n_classes=10)
    found = learn_task(task, source, start_of(features, 1.0), settings)
    history = learn_softmax(SoftmaxTask(features, settings, 10), source, width=1024, per_epoch=60, watch=(X, y))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, like, namespace_of, precision, to_host
from kme_dist.core import optim
from kme_dist.core.features import dropout_mask, truncated_normal
from kme_dist.core.kernels.base import Kernel, row_blocks
from kme_dist.core.masked import masked_objective
from kme_dist.core.objective import LOSS_FLOOR, Objective, Workspace, feature_objective, one_hot
from kme_dist.errors import DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.features import PREFIX, Source, learn_task, start_of, with_parameters
from kme_dist.run.learn import LearnSettings, Record, assemble, batch_objective, mean_objectives, select

WEIGHTS, BIAS = "softmax.weights", "softmax.bias"
_ROWS = 4_096


@dataclass(frozen=True)
class NetworkTask:
    """Algorithm 2 on the features of a batch.   [HNR]

    `dropout` leaves out features of the last layer; with `independent_masks` W is solved under one mask and judged
    under another. With `halves` each half of the batch is judged by the W of the other half, under masks of its own.
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

    def evaluate(self, parameters: optim.Named, X: Array, y: np.ndarray, number: int) -> Objective:
        features, lam = with_parameters(self.features, parameters), float(np.exp(parameters["regularization"]))
        key = (self.settings.seed, number)
        if self.halves:  # of rows that may lie in the order of their classes
            order = np.random.default_rng([*key, 1]).permutation(len(y))
            X, y = select(X, order), y[order]
        Z, pull = features.sampled((*key, 2)).linearise(X)
        options: dict[str, Any] = {
            "regularization": lam,
            "n_classes": self.n_classes,
            "risk": self.settings.risk,
            "complexity_weight": self.settings.tau,
            "loss_floor": self.loss_floor,
            "alpha": self.alpha,
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


def _by_halves(Z_solve: Array, Z_judge: Array, y: np.ndarray, options: dict[str, Any]) -> Objective:
    """The mean of what each half says of the other; `feature_gradient` is by the rows solved on and the rows judged."""
    half = len(y) // 2
    if not half:
        raise DataError(f"a batch of {len(y)} rows has no two halves; objective='validation' needs larger batches")
    parts = slice(None, half), slice(half, None)
    outs = [
        masked_objective(Z_solve[one, :], Z_judge[two, :], y[one], y[two], **options)
        for one, two in (parts, parts[::-1])
    ]
    concat = namespace_of(Z_solve).concat
    solved = concat([out.feature_gradient[0] for out in outs], axis=0) / 2
    judged = concat([out.feature_gradient[1] for out in outs[::-1]], axis=0) / 2
    return replace(mean_objectives(outs), feature_gradient=(solved, judged))


@dataclass(frozen=True)
class KernelTask:
    """Algorithm 1 with any kernel, one that stands on features above all.   [HNR]"""

    kernel: Kernel
    settings: LearnSettings
    n_classes: int

    def evaluate(self, parameters: optim.Named, X: Array, y: np.ndarray, number: int) -> Objective:
        kernel, lam = assemble(self.kernel, parameters)
        return batch_objective(self.settings, kernel, lam, X, y, self.n_classes, number, Workspace())


@dataclass(frozen=True)
class SoftmaxTask:
    """The same network under a softmax layer: mean cross entropy of softmax(φ(x) W + b)."""

    features: Any
    settings: LearnSettings
    n_classes: int
    dropout: float = 0.0

    def start(self, width: int) -> optim.Named:
        """The layer begins as those of the published networks do: deviation 0.1, biases 0.1."""
        rng = np.random.default_rng([self.settings.seed, 8])
        weights = truncated_normal(rng, (width, self.n_classes), 0.1)
        return {**start_of(self.features), WEIGHTS: weights, BIAS: np.full(self.n_classes, 0.1)}

    def evaluate(self, parameters: optim.Named, X: Array, y: np.ndarray, number: int) -> Objective:
        key = (self.settings.seed, number)
        Z, pull = with_parameters(self.features, parameters).sampled((*key, 2)).linearise(X)
        mask = dropout_mask(self.dropout, (*key, 3), Z) if self.dropout else None
        Z = Z if mask is None else Z * mask
        xp, Y = namespace_of(Z), one_hot(y, self.n_classes, Z)
        W, scores = like(parameters[WEIGHTS], Z), self._scores(parameters, Z)
        shifted = scores - xp.max(scores, axis=1, keepdims=True)
        total = xp.sum(xp.exp(shifted), axis=1, keepdims=True)
        own = xp.sum(Y * shifted, axis=1, keepdims=True)
        loss = float(to_host(xp.mean(xp.log(total) - own)))
        slope = (xp.exp(shifted) / total - Y) / len(y)
        Z_bar = slope @ W.T
        inner = pull(Z_bar if mask is None else Z_bar * mask)[0]
        gradient = {PREFIX + name: to_host(value) for name, value in inner.items()}
        gradient |= {WEIGHTS: to_host(Z.T @ slope), BIAS: to_host(xp.sum(slope, axis=0))}
        right = float(np.mean(to_host(xp.argmax(scores, axis=1)) == y))
        return Objective(loss, loss, 0.0, float("nan"), gradient, right, precision(Z))

    def decide(self, parameters: optim.Named, X: Array) -> np.ndarray:
        """Numbers of the classes that rows are taken for."""
        network, found = with_parameters(self.features, parameters), []
        for rows in row_blocks(len(X), _ROWS):
            scores = self._scores(parameters, network.forward(X[rows, :]))
            found.append(to_host(namespace_of(scores).argmax(scores, axis=1)))
        return np.concatenate(found)

    @staticmethod
    def _scores(parameters: optim.Named, Z: Array) -> Array:
        return Z @ like(parameters[WEIGHTS], Z) + like(parameters[BIAS], Z)


def learn_softmax(
    task: SoftmaxTask,
    source: Source,
    *,
    width: int,
    per_epoch: int,
    watch: tuple[Array, np.ndarray] | None,
    executor: Executor | None = None,
    batches_per_step: int = 1,
    callback: Callable[[Record], None] | None = None,
    checkpoints: Checkpoints | None = None,
) -> list[Record]:
    """The records of all steps; those that end an epoch hold the accuracy on the rows and class numbers to watch."""

    def after_step(record: Record, parameters: optim.Named) -> None:
        if watch is not None and record["step"] % per_epoch == 0:
            record["watched_accuracy"] = float(np.mean(task.decide(parameters, watch[0]) == watch[1]))
        if callback is not None:
            callback(record)

    found = learn_task(
        task,
        source,
        task.start(width),
        task.settings,
        executor=executor,
        batches_per_step=batches_per_step,
        callback=after_step,
        phase="softmax",
        checkpoints=checkpoints,
    )
    return found.history
