"""The interface of all solvers: problem, cost, solution, fit.

A solver is a module with three functions, `cost(size)`, `passes(size)` and `prepare(problem)`. `prepare` returns an
object that depends on the rows and the kernel but not on λ: it evaluates values of λ by leave-one-out, solves for one
of them, and measures the residual. The driver (`kme_dist.run.fit.driver`) does all five in this order, for any solver.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from kme_dist.core.kernels.base import FeatureMap, Kernel
from kme_dist.data.dataset import Span
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.run.executors import USABLE, Executor
from kme_dist.run.fit.additive import FitStatistics
from kme_dist.run.scaling_model import Pass
from kme_dist.run.scratch import Scratch

CENTRES = 2_000  # default number of centres
EXPONENTIAL = 40  # products that one value of a kernel is worth, in costs


def silent(line: str) -> None:
    pass


class ProgressLine(str):
    """A line of a report that says how far the fit is: `done` of `total` units."""

    __slots__ = ("done", "total")

    def __new__(cls, line: str, done: int, total: int) -> ProgressLine:
        made = super().__new__(cls, line)
        made.done, made.total = done, total  # type: ignore[attr-defined]
        return made


class Standardises(Protocol):
    """Numeric targets in units of their deviation."""

    @property
    def mean(self) -> np.ndarray: ...  # of every output
    def standardised(self, y: Any) -> np.ndarray: ...  # (rows, outputs)


@dataclass(frozen=True)
class Problem:
    """What to fit, and on what."""

    rows: RowsRef
    kernel: Kernel
    executor: Executor
    scratch: Scratch
    memory: int  # bytes that one task may use
    floor: float = 0.0  # the probability floor used in the losses
    seed: int = 0
    tolerance: float = 1e-6  # of an iteration: relative residual
    tile_rows: int | None = None
    backend: str = "numpy"  # for the factorisation of a whole Gram matrix
    centres: int | None = None
    centre_choice: str = "rpcholesky"
    features: FeatureMap | None = None
    sampled: tuple[Span, ...] = ()  # of the source: rows to leave out one at a time, or to hold out; empty: any
    retune: bool = False  # λ may be changed by a solver that compares values of it at little cost
    target: Standardises | None = None  # of numbers instead of classes; only for solver "falkon"
    report: Callable[[str], None] = silent

    @property
    def weight(self) -> float:
        """Σ w, what stands for n in nλ: the number of rows without weights, or without classes."""
        return self.rows.weight if self.rows.n_classes else self.rows.count

    @property
    def columns(self) -> int:
        """Columns of Y: classes, or outputs."""
        return self.rows.n_classes if self.target is None else len(self.target.mean)


class Room(NamedTuple):
    """Bytes that a fit may use."""

    task: int = 2**63  # by each of the tasks that run at the same time
    alone: int = 2**63  # by a task that runs by itself on a worker
    scratch: int = 2**63  # by what tasks exchange

    @classmethod
    def of_workers(cls, limit: int | None) -> Room:
        """Workers of one thread with this memory limit, and a scratch folder that is large enough."""
        return cls() if limit is None else cls(int(USABLE * limit), int(USABLE * limit))

    @classmethod
    def of(cls, executor: Executor, scratch: Scratch, memory: int | None = None) -> Room:
        """What the workers have, and the scratch folder; `memory` is what one worker may use at most, if given."""
        task, alone = executor.memory if memory is None else (memory, memory)
        return cls(task, alone, alone if scratch.in_memory else scratch.free_bytes())


@dataclass(frozen=True)
class Size:
    """What the cost of a fit depends on."""

    rows: int
    columns: int = 1  # classes
    basis: int = CENTRES  # centres or features
    width: int = 50  # features of a row
    labelled: bool = True  # every row has its class or its numbers, which many centres require
    dtype: str = "float32"
    tile_rows: int | None = None

    @property
    def item(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Cost:
    """Of one solve, by formula; leave-one-out costs about the same for each λ tried, on its sample of rows."""

    memory: int  # bytes per worker
    scratch: int  # bytes in the scratch folder
    flops: float  # of all workers together


@dataclass(frozen=True)
class LeftOut:
    """Decisions of some rows under the fits without them, for calibration."""

    decisions: np.ndarray
    codes: np.ndarray  # labels, as class numbers; numeric targets as they were read
    weights: np.ndarray | None = None
    rows: Any = None  # the rows themselves, scaled, if their targets are numbers


@dataclass(frozen=True)
class Solved:
    """The solution at one λ."""

    weights: np.ndarray  # V as it was solved for; the embedding may keep it in less precision
    embedding: Any  # Embedding, or FeatureEmbedding for explicit features
    iterations: int
    bytes: int  # of the largest arrays held or stored
    facts: dict[str, Any] = field(default_factory=dict)
    residual: float | None = None  # if the solver measured it
    left_out: LeftOut | None = None  # where the factorisation gives it at little cost
    training: tuple[float, float] | None = None  # risk at the rows of the fit and |f|², where known
    regularization: float | None = None  # if the solver chose another λ
    loss: float | None = None  # at that λ, of rows that were not fitted


class Prepared(Protocol):
    """A problem prepared for any λ."""

    @property
    def evaluated_rows(self) -> int: ...  # rows used by leave-one-out; 0 if it is not possible
    @property
    def scale(self) -> float: ...  # natural unit of λ: mean k(x, x) / n
    @property
    def facts(self) -> dict[str, Any]: ...
    @property
    def statistics(self) -> FitStatistics | None: ...
    def leave_one_out(self, lams: list[float]) -> list[float]: ...  # log losses
    def solve(self, lam: float) -> Solved: ...
    def residual(self, solved: Solved, lam: float) -> float: ...  # |A V - Y| / |Y|
    def close(self) -> None: ...  # removes its files from the scratch folder


class Solver(Protocol):
    """A module of this package."""

    def cost(self, size: Size) -> Cost: ...
    def passes(self, size: Size) -> tuple[Pass, ...]: ...  # the same work in tasks, for estimates of time
    def prepare(self, problem: Problem) -> Prepared: ...


@dataclass(frozen=True)
class Fit:
    """A fitted embedding and how it was computed."""

    embedding: Any  # Embedding, or FeatureEmbedding for explicit features
    solver: str
    reason: str
    regularization: float
    loss: float | None  # leave-one-out log loss; None if λ was not tuned
    tried: tuple[tuple[float, float], ...]  # (λ, loss)
    residual: float  # |A V - Y| / |Y|, or that of the p x p system
    iterations: int
    seconds: float
    bytes: int  # of the largest arrays held or stored
    rows: int
    scaling: Scaling
    facts: dict[str, Any] = field(default_factory=dict)  # further diagnostics
    statistics: FitStatistics | None = None  # only for solvers that sum over rows
    weight: float = 0.0  # the sum of the weights of the rows; their number without weights
    left_out: LeftOut | None = field(default=None, repr=False)
    training: tuple[float, float] | None = None


def fingerprint(problem: Problem, **more: Any) -> str:
    """Identifies rows, kernel and whatever else the arrays of a fit depend on, so that only they are reused."""
    rows = problem.rows
    known = {
        "path": rows.path,
        "ranges": rows.ranges,
        "scaling": None if rows.scale is None else rows.scale.to_plain(),
        "dtype": rows.dtype,
        "kernel": problem.kernel.to_config(),
        "data": rows.digest(),
        **more,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]


def roots(rows: RowsRef, start: int, stop: int) -> np.ndarray | None:
    """√w of rows with classes; None without weights.

    Solvers that need a constant shift solve (√w K √w + WλI) u = √w Y, which is the same as (K + Wλ diag(1/w)) V = Y
    with V = √w u, and rows of weight 0 get V = 0.
    """
    found = rows.weights(start, stop) if rows.n_classes else None
    return None if found is None else np.sqrt(found)


def between(K: np.ndarray, left: np.ndarray | None, right: np.ndarray | None) -> np.ndarray:
    """√w K √w for a block of K, in its precision."""
    if left is None or right is None:
        return K
    return np.asarray(K * left.astype(K.dtype)[:, None] * right.astype(K.dtype)[None, :])


def scaled(A: np.ndarray, root: np.ndarray | None) -> np.ndarray:
    """√w A, in the precision of A."""
    return A if root is None else np.asarray(A * root.astype(A.dtype)[:, None])


def with_weight(rows: RowsRef, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Those entries of arrays over all rows whose weight is positive."""
    if not rows.n_classes or rows.positive == rows.count:
        return arrays
    found = rows.weights()
    return arrays if found is None else tuple(array[found > 0] for array in arrays)
