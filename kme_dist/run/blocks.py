"""What a solver is asked, and what it brings back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kme_dist.core.kernels.base import Kernel
from kme_dist.data.rows import RowsRef
from kme_dist.run.executors import Executor
from kme_dist.run.scratch import Scratch


@dataclass(frozen=True)
class Task:
    """What is to be fitted, where, and by whom."""

    rows: RowsRef
    kernel: Kernel
    regularization: float
    retune: bool
    floor: float
    seed: int
    tolerance: float
    executor: Executor
    scratch: Scratch
    tile_rows: int | None
    memory: int
    say: Callable[[str], None]
    backend: str = "numpy"  # where a whole Gram matrix is factorised


@dataclass(frozen=True)
class Found:
    """What a solver brings back."""

    embedding: Any
    loss: float | None
    tried: dict[float, float]
    residual: float
    iterations: int
    bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    statistics: Any = None  # of additive solvers
