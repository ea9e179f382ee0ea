"""What a solver is asked, what it costs, and what it brings back: the interface of all solvers.

A solver is a module with two functions, `cost(size)` and `prepare(problem)`. What `prepare` returns knows the rows and
the kernel but not λ: it evaluates values of λ by leave-one-out, solves for one of them, and measures what the solution
leaves of the equations. The driver (`kme_dist.run.fit.driver`) does all five in this order, for whatever solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kme_dist.core.kernels.base import FeatureMap, Kernel
from kme_dist.data.rows import RowsRef
from kme_dist.data.scaling import Scaling
from kme_dist.run.executors import Executor
from kme_dist.run.fit.additive import Statistics
from kme_dist.run.scratch import Scratch

CENTRES = 2_000  # where nobody says how many


def _silent(line: str) -> None:
    pass


@dataclass(frozen=True)
class Problem:
    """What is to be fitted, where, and by whom."""

    rows: RowsRef
    kernel: Kernel
    executor: Executor
    scratch: Scratch
    memory: int  # bytes that one worker may use
    floor: float = 0.0  # the probability floor that losses are measured with
    seed: int = 0
    tolerance: float = 1e-6  # of an iteration: relative residual
    tile_rows: int | None = None
    backend: str = "numpy"  # where a whole Gram matrix is factorised
    centres: int | None = None
    centre_choice: str = "rpcholesky"
    features: FeatureMap | None = None
    say: Callable[[str], None] = _silent


@dataclass(frozen=True)
class Size:
    """What the cost of a fit depends on."""

    rows: int
    columns: int = 1  # classes
    basis: int = CENTRES  # centres or features
    dtype: str = "float32"
    tile_rows: int | None = None

    @property
    def item(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Cost:
    """Of one solve, by formula; leave-one-out costs about as much again for each λ tried, on its sample of rows."""

    memory: int  # bytes in one worker
    scratch: int  # bytes in the scratch place
    flops: float  # of all workers together


@dataclass(frozen=True)
class Solved:
    """The solution at one λ."""

    weights: np.ndarray  # V as it was solved for; the embedding may keep it in less precision
    embedding: Any  # Embedding, or FeatureEmbedding for explicit features
    iterations: int
    bytes: int  # of the largest things that were held or stored on the way
    facts: dict[str, Any] = field(default_factory=dict)
    residual: float | None = None  # where solving has measured it anyway


class Prepared(Protocol):
    """A problem made ready to be solved for any λ."""

    @property
    def evaluated_rows(self) -> int: ...  # rows that leave-one-out looks at; 0 where it cannot
    @property
    def scale(self) -> float: ...  # of the function values over the rows: what λ is measured against
    @property
    def facts(self) -> dict[str, Any]: ...
    @property
    def statistics(self) -> Statistics | None: ...
    def leave_one_out(self, lams: list[float]) -> list[float]: ...  # log losses
    def solve(self, lam: float) -> Solved: ...
    def residual(self, solved: Solved, lam: float) -> float: ...  # |A V - Y| / |Y|
    def close(self) -> None: ...  # removes what it left in the scratch place


class Solver(Protocol):
    """A module of this package."""

    def cost(self, size: Size) -> Cost: ...
    def prepare(self, problem: Problem) -> Prepared: ...


@dataclass(frozen=True)
class Fit:
    """A fitted embedding and how it came about."""

    embedding: Any  # Embedding, or FeatureEmbedding for explicit features
    solver: str
    reason: str
    regularization: float
    loss: float | None  # leave-one-out log loss; None where λ was taken as given
    tried: tuple[tuple[float, float], ...]  # (λ, loss)
    residual: float  # |A V - Y| / |Y|, or that of the p x p system
    iterations: int
    seconds: float
    bytes: int  # of the largest things that were held or stored on the way
    rows: int
    scaling: Scaling
    facts: dict[str, Any] = field(default_factory=dict)  # what else is worth knowing, in words and numbers
    statistics: Statistics | None = None  # of solvers that sum over rows
