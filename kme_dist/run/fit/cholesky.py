"""The exact fit by one factorisation of the whole Gram matrix, on one worker."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kme_dist.backend import to_device
from kme_dist.core.embedding import Embedding
from kme_dist.core.kernels.base import Kernel, row_count
from kme_dist.core.risk import positive_rows
from kme_dist.data.rows import RowsRef
from kme_dist.errors import memory_errors
from kme_dist.run.fit.exact import Exact, solution_and_left_out
from kme_dist.run.fit.problem import Cost, LeftOut, Problem, Size, Solved, with_weight
from kme_dist.run.scaling_model import Pass


def cost(size: Size) -> Cost:
    """The matrix, and a copy in case single precision fails."""
    return Cost(memory=2 * size.rows**2 * size.item, scratch=0, flops=size.rows**3 / 3)


def passes(size: Size) -> tuple[Pass, ...]:
    """Everything in one task."""
    n = float(size.rows)
    return (Pass(1, n * size.width * size.item, 2 * n**2 * size.width, n**3 / 3, exps=n**2),)


def prepare(problem: Problem) -> Cholesky:
    return Cholesky(problem)


class Cholesky(Exact):
    def solve(self, lam: float) -> Solved:
        p = self.problem
        call = (p.rows, p.kernel, lam, p.seed, p.backend)
        solution = p.executor.map(solve_on_worker, [call], name="fit-cholesky", gpu=p.backend == "cupy")[0]
        found = solution.weights
        X, _ = p.rows.read(0, p.rows.count)
        held = p.rows.count**2 * np.dtype(p.rows.dtype).itemsize
        V = found
        if len(found) < row_count(X):
            V = np.zeros((row_count(X), found.shape[1]), found.dtype)
            V[np.asarray(p.rows.weights()) > 0] = found
        (X,) = with_weight(p.rows, X)
        return Solved(
            V,
            Embedding(p.kernel, X, found, lam),
            1,
            held,
            left_out=solution.left_out,
            training=(solution.risk, solution.squared_norm),
        )


class WorkerSolution(NamedTuple):
    weights: np.ndarray
    left_out: LeftOut
    risk: float
    squared_norm: float


def solve_on_worker(rows: RowsRef, kernel: Kernel, lam: float, seed: int, backend: str = "numpy") -> WorkerSolution:
    """The exact weights V of all rows with a positive weight of their own; some rows are left out, one at a time."""
    X, y, w = positive_rows(*rows.read(0, rows.count), rows.weights())
    with memory_errors(f"solver 'cholesky' with {len(y)} rows", "choose solver 'pcg' or 'nystrom'"):
        found, without = solution_and_left_out(kernel, to_device(X, backend), y, w, rows.n_classes, lam, seed)
    return WorkerSolution(found.weights, without, found.risk, found.squared_norm)
