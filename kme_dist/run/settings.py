"""Settings of a learning run, except data and starting point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kme_dist.core import optim
from kme_dist.core.objective import COMPLEXITY_WEIGHT
from kme_dist.errors import ConfigError

OBJECTIVES = ("rcb", "validation", "loo", "erm", "calibrated")
Record = dict[str, Any]  # of one step: values by name


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

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective={self.objective!r} cannot be learned; choose one of {', '.join(OBJECTIVES)}")
        if self.steps < 0:
            raise ConfigError(f"steps={self.steps}: must be an integer >= 0")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate={self.learning_rate!r}: must be a positive number")

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
