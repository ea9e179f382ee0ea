"""The fit on centres that represent all rows (solver "nystrom"): any number of rows, in one pass."""

from __future__ import annotations

import numpy as np

from kme_dist.core.kernels.base import Kernel
from kme_dist.core.pivots import choose_centres
from kme_dist.core.sums import Centres
from kme_dist.data.rows import RowsRef
from kme_dist.run.fit import equations
from kme_dist.run.fit.additive import gather
from kme_dist.run.fit.cholesky import Cholesky
from kme_dist.run.fit.exact import sampled
from kme_dist.run.fit.problem import CENTRES, Cost, Prepared, Problem, Size

_SAMPLE = (10_000, 3)  # rows to choose centres from: at least the first, or the second times the number of centres


def cost(size: Size) -> Cost:
    return equations.cost(size)


def prepare(problem: Problem) -> Prepared:
    """Choose the centres and sum over the rows."""
    rows, centres = problem.rows, problem.centres or CENTRES
    size = min(rows.count, max(_SAMPLE[0], _SAMPLE[1] * centres))
    call = (
        rows, problem.kernel, min(centres, rows.count), problem.centre_choice, size, problem.seed,
        problem.executor.solo_threads,
    )  # fmt: skip
    points = problem.executor.map(centres_on_worker, [call], name="choose-centres")[0]
    statistics = gather(
        rows,
        Centres(problem.kernel, points),
        executor=problem.executor,
        scratch=problem.scratch,
        backend=problem.backend,
        sampled=problem.sampled,
    )
    facts = {"centre_choice": problem.centre_choice, "centre_sample_rows": size}
    if centres < rows.positive:
        facts = {"centres": len(points), **facts}
        return equations.Equations(statistics, problem.floor, problem.executor, problem.scratch, facts)
    # With every row a centre the problem is exact. Sums of squares keep half its digits, so they serve updates only.
    return Cholesky(problem, {"centres": rows.positive, **facts}, statistics)


def centres_on_worker(
    rows: RowsRef, kernel: Kernel, count: int, how: str, size: int, seed: int, threads: int
) -> np.ndarray:
    # In double: with many centres of a smooth kernel the remainder is below the rounding of single precision.
    X, _, _ = sampled(rows, size, seed)
    return np.asarray(X[choose_centres(kernel, X.astype(np.float64), count, how, seed, threads)])
