"""The fit on centres that represent all rows (solver "nystrom"): any number of rows, in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kme_dist.core.kernels.base import Kernel
from kme_dist.core.pivots import SCORE_RANK, TILE_ROWS, by_leverage, choose_centres
from kme_dist.core.sums import Centres
from kme_dist.data.rows import RowsRef
from kme_dist.run.fit import equations
from kme_dist.run.fit.additive import gather
from kme_dist.run.fit.cholesky import Cholesky
from kme_dist.run.fit.exact import sampled
from kme_dist.run.fit.problem import CENTRES, Cost, Prepared, Problem, Size
from kme_dist.run.scaling_model import Pass

MOST_PIVOTS = 4_000  # above that, pivoted Cholesky costs more than the fit
_SAMPLE = (5_000, 3)  # rows to choose centres from: at least the first, or the second times the number of centres


def cost(size: Size) -> Cost:
    found = equations.cost(size)
    return replace(found, memory=max(found.memory, choice_bytes(size)))


def choice_bytes(size: Size) -> int:
    """Of the worker that chooses the centres: the sample, read, scaled and prepared, its factor, and tiles."""
    few = size.basis <= MOST_PIVOTS
    rank, item = (size.basis, 8) if few else (min(SCORE_RANK, size.basis), size.item)
    return (
        _sample_rows(size.rows, size.basis) * (rank + 4 * size.width) * item + 3 * TILE_ROWS * min(rank, SCORE_RANK) * 8
    )


def choice_pass(size: Size) -> Pass:
    # Pivots are products of a matrix with vectors, which move twice as many numbers as a factorisation computes.
    sample = _sample_rows(size.rows, size.basis)
    rank = size.basis if size.basis <= MOST_PIVOTS else min(SCORE_RANK, size.basis)
    values = float(sample) * rank
    return Pass(1, sample * size.width * size.item, factor_flops=2.0 * values * rank, exps=values)


def _sample_rows(rows: int, centres: int) -> int:
    return min(rows, max(_SAMPLE[0], _SAMPLE[1] * centres))


def passes(size: Size) -> tuple[Pass, ...]:
    return choice_pass(size), *equations.passes(size, kernel=True)


def prepare(problem: Problem) -> Prepared:
    """Choose the centres and sum over the rows."""
    rows, chosen = problem.rows, choose_points(problem)
    statistics = gather(
        rows,
        Centres(problem.kernel, chosen.points),
        executor=problem.executor,
        scratch=problem.scratch,
        backend=problem.backend,
        sampled=problem.sampled,
    )
    if (problem.centres or CENTRES) < rows.positive:
        return equations.Equations(statistics, problem.floor, problem.executor, problem.scratch, chosen.facts)
    # With every row a centre the problem is exact. Sums of squares keep half its digits, so they serve updates only.
    return Cholesky(problem, {**chosen.facts, "centres": rows.positive}, statistics)


class Chosen(NamedTuple):
    """Centres, the relative rates at which a row like each of them was sampled (None: all the same), and facts."""

    points: np.ndarray
    rates: np.ndarray | None
    facts: dict[str, Any]


def choose_points(problem: Problem) -> Chosen:
    """Centres from a sample of the rows, chosen on one worker."""
    rows, centres, how = problem.rows, problem.centres or CENTRES, problem.centre_choice
    if how == "auto":
        how = "rpcholesky" if centres <= MOST_PIVOTS else "leverage"
    size = _sample_rows(rows.count, centres)
    call = (
        rows, problem.kernel, min(centres, rows.count), how, size, problem.seed, problem.executor.solo_threads,
    )  # fmt: skip
    points, rates = problem.executor.map(centres_on_worker, [call], name="choose-centres")[0]
    return Chosen(points, rates, {"centres": len(points), "centre_choice": how, "centre_sample_rows": size})


def centres_on_worker(
    rows: RowsRef, kernel: Kernel, count: int, how: str, size: int, seed: int, threads: int
) -> tuple[np.ndarray, np.ndarray | None]:
    # In double: with many centres of a smooth kernel the remainder is below the rounding of single precision.
    X, _, _ = sampled(rows, size, seed)
    if how == "leverage":
        chosen, rates = by_leverage(kernel, X, count, seed, threads)
        return X[chosen], rates
    return X[choose_centres(kernel, X.astype(np.float64), count, how, seed, threads)], None
