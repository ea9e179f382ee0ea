"""The fit of weights for explicit features: ridge regression on φ(x), any number of rows, in one pass."""

from __future__ import annotations

from kme_dist.core.sums import FeatureBasis
from kme_dist.run.fit import equations
from kme_dist.run.fit.additive import gather
from kme_dist.run.fit.problem import Cost, Problem, Size
from kme_dist.run.scaling_model import Pass


def cost(size: Size) -> Cost:
    return equations.cost(size)


def passes(size: Size) -> tuple[Pass, ...]:
    return equations.passes(size)


def prepare(problem: Problem) -> equations.Equations:
    """Sum over the rows."""
    assert problem.features is not None
    few, _ = problem.rows.read(0, 1)
    basis = FeatureBasis(problem.features, int(problem.features.forward(few).shape[1]))
    statistics = gather(
        problem.rows,
        basis,
        executor=problem.executor,
        scratch=problem.scratch,
        backend=problem.backend,
        sampled=problem.sampled,
    )
    return equations.Equations(statistics, problem.floor, problem.executor, problem.scratch)
