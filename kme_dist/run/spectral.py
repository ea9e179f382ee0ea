"""Spectral features learned on all rows, for an embedding on them: what `features="spectral"` means.

    learned = learn_spectral(data, SpectralSettings(seed=0), executor=executor, checkpoints=Checkpoints(...))
    learned.scaling                    # scaled rows followed by the learned map, for the fit of the embedding
    learned.held                       # the ranges of rows that it was not learned from

Several networks are learned at the same time from different starts and batches, each by stochastic steps on the cross
entropy of its softmax layer: cosines of learned frequencies, then dense layers. The features of a row are the class
probabilities of all networks, so the embedding is solved on a few columns, in one pass over the rows. (The embedding on
the last hidden layer loses three points of accuracy on covtype: the squared loss of the embedding and cross entropy
agree about probabilities, not about what they are computed from.)

The networks fit the rows they were learned from better than new rows. So a few rows, in blocks spread over all of
them, are not learned from; λ and the calibration are chosen on these, each left out of the fit in closed form.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kme_dist.core import features as maps
from kme_dist.core import optim
from kme_dist.data.dataset import RowSource, Span, spans_within
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.learn import Batches, learn
from kme_dist.run.learners import (
    BIAS,
    WEIGHTS,
    LearnSettings,
    Record,
    SoftmaxLearner,
    joined,
    parted,
    start_of,
    with_parameters,
)
from kme_dist.run.maps import features_of, restore_features, with_features

NAME = "spectral"
_BLOCKS = 64  # of held-out rows, spread evenly: rows may be sorted
_HELD_ROWS, _HELD_SHARE = 4_000, 0.04
_PER_READ = 16  # batches: drawing 256 rows of a plan takes a quarter as long as a step
_EPOCHS, _ROWS = (1.0, 15.0, 40.0), 500_000  # least epochs, those at this number of rows, and most
_REACH = 4.0  # no scaled value is further from the mean than this: rare values of binary columns would be


@dataclass(frozen=True)
class SpectralSettings:
    """What is learned, and how long: chosen on training rows of covtype, checked on those of digits and pendigits."""

    networks: int = 2
    frequencies: int = 384
    hidden: tuple[int, ...] = (384, 384)
    spread: float = 2.0  # of the angles under the initial frequencies: their standard deviation over rows
    epochs: float = 15.0  # of each network
    batch_size: int = 256
    learning_rate: float = 0.003
    decay: float = 1.0  # all steps together multiply a parameter without gradient by exp(-decay)
    local_steps: int = 64  # steps of a network in one call
    dtype: str = "float32"
    backend: str = "numpy"
    seed: int = 0

    @classmethod
    def of(cls, rows: int, **others: Any) -> SpectralSettings:
        """Settings for a number of rows: the more there are, the fewer times each is needed."""
        few, usual, most = _EPOCHS
        return cls(epochs=min(most, max(few, usual * math.sqrt(_ROWS / rows))), **others)

    def learning(self, rows: int) -> LearnSettings:
        """Settings of the trainer: whole rounds, a rate that rises in the first steps and falls to zero."""
        rounds = max(1, round(self.epochs * rows / (min(self.batch_size, rows) * self.local_steps)))
        return LearnSettings(
            steps=rounds * self.local_steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            schedule=rising_and_falling,
            weight_decay=self.decay / (0.5 * self.learning_rate * rounds * self.local_steps),  # the mean rate is half
            seed=self.seed,
        )


@dataclass(frozen=True)
class LearnedMap:
    """Scaling followed by the learned map, the rows that were not used, and the records of learning."""

    scaling: Scaling
    held: tuple[Span, ...]
    history: list[Record] = field(default_factory=list, repr=False)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """For storing, together with `to_plain`."""
        return {**features_of(self.scaling)[0], **self.scaling.stored()}

    def to_plain(self) -> dict[str, Any]:
        """`at` is a name that changes with the arrays."""
        sha = hashlib.sha256()
        for _, value in sorted(self.arrays.items()):
            sha.update(np.ascontiguousarray(value).data)
        return {"features": features_of(self.scaling)[1], "held": list(self.held), "at": f"map-{sha.hexdigest()[:16]}-"}

    @classmethod
    def restored(cls, stored: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> LearnedMap:
        found = restore_features(stored["features"], arrays, {})
        held = tuple((int(start), int(stop)) for start, stop in stored["held"])
        return cls(with_features(Scaling.restored(arrays), found), held)


def rising_and_falling(rate: float, steps: int) -> optim.Schedule:
    """A cosine decay to zero, after a linear rise over the first fiftieth of the steps."""
    rise, falling = max(1, steps // 50), optim.cosine_decay(rate, steps)
    return lambda step: falling(step) * min(1.0, (step + 1) / rise)


@dataclass(frozen=True)
class SpectralWork:
    """What the trainer needs, prepared: the learner, its batches, and a start for each network."""

    learner: SoftmaxLearner
    batches: Batches
    starts: list[optim.Named]
    scaling: Scaling
    held: tuple[Span, ...]

    @classmethod
    def of(cls, dataset: RowSource, settings: SpectralSettings, split: str | None) -> SpectralWork:
        scaling = within_reach(dataset, split)
        rows = RowsRef.of(dataset, split=split, scaling=scaling, dtype=settings.dtype, classes=True)
        rows = rows.with_positive_weight()  # before blocks are held out and batches are divided
        held = held_out(rows.ranges)
        learned_from = replace(rows, ranges=_without(rows.ranges, held), token=f"{rows.token}-learned")
        size = min(settings.batch_size, learned_from.count)
        per_read = max(1, min(_PER_READ, learned_from.count // (4 * size)))
        plan = learned_from.plan(size * per_read, settings.seed)
        variance = float((dataset.split_statistics(split).variance * scaling.factor**2).sum())
        deviation = settings.spread / math.sqrt(variance or 1.0)
        starts = [_start(dataset.features, dataset.n_classes, settings, deviation, r) for r in range(settings.networks)]
        learner = SoftmaxLearner(starts[0][0], settings.learning(learned_from.count), dataset.n_classes)
        batches = Batches(learned_from, plan, backend=settings.backend, per_read=per_read)
        return cls(learner, batches, [parameters for _, parameters in starts], scaling, held)


def learn_spectral(
    dataset: RowSource,
    settings: SpectralSettings,
    *,
    executor: Executor,
    split: str | None = "auto",
    checkpoints: Checkpoints | None = None,
    callback: Callable[[Record], None] | None = None,
) -> LearnedMap:
    """Learn the networks on all rows of a split but the held-out ones."""
    work = SpectralWork.of(dataset, settings, dataset.training_split(split))
    found = learn(
        work.learner,
        work.batches,
        joined(work.starts),
        work.learner.settings,
        executor=executor,
        batches_per_step=settings.networks,
        local_steps=settings.local_steps,
        checkpoints=checkpoints,
        callback=None if callback is None else lambda record, _: callback(record),
        phase=NAME,
        keep_history=False,
    )
    networks = [_network(work.learner.features, parameters) for parameters in parted(found.parameters)]
    return LearnedMap(with_features(work.scaling, maps.Joint(tuple(networks))), work.held, found.history)


def within_reach(dataset: RowSource, split: str | None) -> Scaling:
    """Standard scaling, except that no value gets further than `_REACH` from the mean."""
    found = dataset.split_statistics(split)
    far = np.maximum(found.maximum - found.mean, found.mean - found.minimum)
    width = np.maximum(np.sqrt(found.variance), far / _REACH)
    return Scaling(found.mean, np.where(width > 0, 1 / np.where(width > 0, width, 1.0), 0.0))


def held_out(ranges: tuple[Span, ...]) -> tuple[Span, ...]:
    """Blocks of rows, spread evenly over the ranges."""
    rows = sum(stop - start for start, stop in ranges)
    wanted = min(_HELD_ROWS, math.ceil(_HELD_SHARE * rows))
    blocks = min(_BLOCKS, wanted)
    edges = [(rows * b // blocks, wanted * (b + 1) // blocks - wanted * b // blocks) for b in range(blocks)]
    return tuple(span for start, size in edges for span in spans_within(ranges, start, start + size))


def _without(ranges: tuple[Span, ...], held: tuple[Span, ...]) -> tuple[Span, ...]:
    found = []
    for start, stop in ranges:
        for low, high in held:
            if start <= low < stop:
                found.append((start, low))
                start = high
        found.append((start, stop))
    return tuple(span for span in found if span[0] < span[1])


def _start(
    inputs: int, n_classes: int, settings: SpectralSettings, deviation: float, number: int
) -> tuple[maps.Stack, optim.Named]:
    """The hidden layers of a network, and all of its parameters, in the precision of learning."""
    rng = np.random.default_rng([settings.seed, number, 9])
    frequencies = rng.normal(size=(inputs, settings.frequencies)) * deviation
    phases = rng.uniform(0, 2 * math.pi, settings.frequencies)
    parts, width = [_layer(frequencies, phases, "cosine", settings.dtype)], settings.frequencies
    for units in settings.hidden:
        weight = rng.normal(size=(width, units)) * math.sqrt(2 / width)
        parts.append(_layer(weight, np.zeros(units), "relu", settings.dtype))
        width = units
    hidden = maps.Stack(tuple(parts))
    layer = {WEIGHTS: np.zeros((width, n_classes), settings.dtype), BIAS: np.zeros(n_classes, settings.dtype)}
    return hidden, {**start_of(hidden), **layer}


def _layer(weight: np.ndarray, bias: np.ndarray, activation: str, dtype: str) -> maps.Dense:
    return maps.Dense(weight.astype(dtype), bias.astype(dtype), activation)


def _network(hidden: maps.Stack, parameters: optim.Named) -> Any:
    own = with_parameters(hidden, parameters)
    return maps.Stack((*own.parts, maps.Dense(parameters[WEIGHTS], parameters[BIAS], "softmax")))
