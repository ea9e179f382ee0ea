"""What the exact fits ask before they solve: which λ, and which precision."""

from __future__ import annotations

import numpy as np

from kme_dist.backend import to_device
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.precision import Need, decide, gram_norm
from kme_dist.data.rows import RowsRef
from kme_dist.run import solve
from kme_dist.run.blocks import Task

_SAMPLED = 1_000  # rows that stand for all where the size of K is estimated


def precision_for(task: Task, lam: float) -> tuple[float, Need]:
    """Mean of k(x, x), and what a solve at this λ needs (see `kme_dist.core.precision`)."""
    n = task.rows.count
    few, _ = task.rows.sample(_SAMPLED, task.seed)
    diag = task.kernel.diag(few)
    scale = float(np.mean(diag, dtype=np.float64)) or 1.0
    # |K| grows with the number of rows: so many times that of the few.
    need = decide(task.rows.dtype, n, float(np.max(diag)), n * lam, lambda: gram_norm(task.kernel, few) * n / len(few))
    return scale, need


def solve_on_sample(task: Task) -> tuple[float, float | None, dict[float, float]]:
    """λ by leave-one-out, one task for each λ that is tried; rows beyond a few thousand are sampled."""
    n, lam = task.rows.count, task.regularization
    if not task.retune or n < 2:
        return lam, None, {}
    few, _ = task.rows.sample(_SAMPLED, task.seed)
    variance = task.kernel.alpha(few) ** 2 or 1.0

    def evaluate(lams: list[float]) -> list[float]:
        calls = [(task.rows, task.kernel, lam, variance, task.floor, task.seed, task.backend) for lam in lams]
        return task.executor.map(leave_one_out_on_worker, calls, name="leave-one-out", gpu=task.backend == "cupy")

    return solve.search_regularization(evaluate, scale=variance / n, start=lam)


def leave_one_out_on_worker(
    rows: RowsRef, kernel: Kernel, lam: float, variance: float, floor: float, seed: int, backend: str = "numpy"
) -> float:
    """Leave-one-out log loss of (a sample of) the rows at one λ."""
    X, y = rows.sample(solve.LOO_ROWS, seed)
    return solve.leave_one_out_loss(kernel, to_device(X, backend), y, rows.n_classes, lam, rows.count, variance, floor)
