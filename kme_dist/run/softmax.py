"""The same network under a softmax layer, from the same start and in the same batches: what an embedding network is
measured against.

    task = SoftmaxTask(features, settings, n_classes=10)
    history = learn_softmax(task, source, width=1024, per_epoch=60, watch=(X, y))   # "watched_accuracy" of every epoch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, like, namespace_of, precision, to_host
from kme_dist.core import optim
from kme_dist.core.features import dropout_mask, truncated_normal
from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.objective import Objective, one_hot
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.features import PREFIX, Source, learn_task, start_of, with_parameters
from kme_dist.run.learn import LearnSettings, Record

WEIGHTS, BIAS = "softmax.weights", "softmax.bias"
_ROWS = 4_096


@dataclass(frozen=True)
class SoftmaxTask:
    """Mean cross entropy of softmax(φ(x) W + b), by the weights of the network, W and b."""

    features: Any
    settings: LearnSettings
    n_classes: int
    dropout: float = 0.0

    def start(self, width: int) -> optim.Named:
        """The layer begins as those of the published networks do: deviation 0.1, biases 0.1."""
        rng = np.random.default_rng([self.settings.seed, 8])
        weights = truncated_normal(rng, (width, self.n_classes), 0.1)
        return {**start_of(self.features), WEIGHTS: weights, BIAS: np.full(self.n_classes, 0.1)}

    def judge(self, parameters: optim.Named, X: Array, y: np.ndarray, number: int) -> Objective:
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
