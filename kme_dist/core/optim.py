"""Gradient steps on named parameters, as pure functions of plain data.

An optimiser is a pair: `init(parameters) -> state` and `update(gradient, state, rate) -> (step, state)`, where
parameters, gradients, steps and state are dictionaries of host arrays. There is no hidden state, so a checkpoint is
the state, and the same state and gradient give the same step on any machine.

Positive parameters are learned as logarithms; `to_log` and `from_log` convert. Parameters of a feature map (names that
contain "features.") may have any sign and are not converted.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kme_dist.errors import ConfigError

Named = dict[str, np.ndarray]
State = dict[str, Named]


@dataclass(frozen=True)
class Optimizer:
    """An (init, update) pair; `update` returns the step to be added to the parameters."""

    init: Callable[[Named], State]
    update: Callable[[Named, State, float], tuple[Named, State]]


def _zeros(parameters: Named) -> Named:
    return {name: np.zeros_like(value) for name, value in parameters.items()}


def adam(beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> Optimizer:
    """Adam: steps by the running mean of the gradient over the root of its running square."""

    def init(parameters: Named) -> State:
        return {"mean": _zeros(parameters), "square": _zeros(parameters), "count": {"steps": np.zeros(())}}

    def update(gradient: Named, state: State, rate: float) -> tuple[Named, State]:
        count = float(state["count"]["steps"]) + 1
        size = rate * math.sqrt(1 - beta2**count) / (1 - beta1**count)
        step, mean, square = {}, {}, {}
        for k, g in gradient.items():
            mean[k], square[k] = beta1 * state["mean"][k], beta2 * state["square"][k]
            part = np.asarray((1 - beta1) * g)  # reused: with millions of parameters a step waits for memory
            mean[k] += part
            np.multiply(1 - beta2, g, out=part)
            part *= g
            square[k] += part
            root = np.sqrt(square[k], out=part if part.dtype == square[k].dtype else None)
            root += epsilon
            step[k] = -size * mean[k]
            step[k] /= root
        return step, {"mean": mean, "square": square, "count": {"steps": np.asarray(count)}}

    return Optimizer(init, update)


def sgd(momentum: float = 0.0) -> Optimizer:
    """Plain gradient descent, optionally with (heavy-ball) momentum."""

    def init(parameters: Named) -> State:
        return {"velocity": _zeros(parameters)}

    def update(gradient: Named, state: State, rate: float) -> tuple[Named, State]:
        velocity = {k: momentum * state["velocity"][k] - rate * g for k, g in gradient.items()}
        return velocity, {"velocity": velocity}

    return Optimizer(init, update)


def adadelta(decay: float = 0.95, epsilon: float = 1e-6) -> Optimizer:
    """Adadelta: steps in the units of the parameters; `rate` is only a factor (usually 1)."""

    def init(parameters: Named) -> State:
        return {"square": _zeros(parameters), "moved": _zeros(parameters)}

    def update(gradient: Named, state: State, rate: float) -> tuple[Named, State]:
        square = {k: decay * state["square"][k] + (1 - decay) * g * g for k, g in gradient.items()}
        raw = {k: -np.sqrt(state["moved"][k] + epsilon) / np.sqrt(square[k] + epsilon) * g for k, g in gradient.items()}
        moved = {k: decay * state["moved"][k] + (1 - decay) * raw[k] ** 2 for k in gradient}
        return {k: rate * raw[k] for k in gradient}, {"square": square, "moved": moved}

    return Optimizer(init, update)


def optimizer_by_name(name: str) -> Optimizer:
    """ "adam" | "sgd" | "momentum" | "adadelta" """
    makers: dict[str, Callable[[], Optimizer]] = {
        "adam": adam,
        "sgd": sgd,
        "momentum": lambda: sgd(momentum=0.9),
        "adadelta": adadelta,
    }
    if name not in makers:
        raise ConfigError(f"optimizer={name!r} is unknown; choose one of {', '.join(sorted(makers))}")
    return makers[name]()


Schedule = Callable[[int], float]


def constant(rate: float) -> Schedule:
    return lambda step: rate


def exponential_decay(rate: float, half_life: float) -> Schedule:
    """rate · 2^(-step / half_life)"""
    return lambda step: rate * 2.0 ** (-step / half_life)


def cosine_decay(rate: float, steps: int, floor: float = 0.0) -> Schedule:
    """From `rate` down to `floor` x rate over `steps`, along half a cosine."""

    def at(step: int) -> float:
        progress = min(step / max(steps, 1), 1.0)
        return rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    return at


def norm(gradient: Mapping[str, np.ndarray]) -> float:
    """The Euclidean norm over all entries."""
    return math.sqrt(sum(float(np.sum(np.square(value))) for value in gradient.values()))


def clip(gradient: Named, largest: float | None) -> Named:
    """Scale the gradient down to norm `largest` if it is larger."""
    if largest is None:
        return gradient
    length = norm(gradient)
    return gradient if length <= largest else {k: g * (largest / length) for k, g in gradient.items()}


def learnable(names: Iterable[str], frozen: Iterable[str]) -> list[str]:
    """The names that no pattern of `frozen` matches ("scale", "*.scale", "features.*", ...)."""
    every, patterns = list(names), list(frozen)
    for pattern in patterns:
        if not fnmatch.filter(every, pattern):
            raise ConfigError(f"frozen parameter {pattern!r} does not exist; there are {every}")
    return [name for name in every if not any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def _takes_log(name: str) -> bool:
    return "features." not in name


def to_log(parameters: Mapping[str, np.ndarray]) -> Named:
    return {k: np.log(v) if _takes_log(k) else np.array(v, dtype=np.float64) for k, v in parameters.items()}


def from_log(parameters: Mapping[str, np.ndarray]) -> Named:
    """Back to positive values, clipped to the range of double precision."""
    return {k: np.exp(np.clip(v, -300, 300)) if _takes_log(k) else np.array(v) for k, v in parameters.items()}
