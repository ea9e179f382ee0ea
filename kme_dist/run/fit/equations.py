"""p x p equations from sums over rows, shared by the solvers `nystrom` and `features`."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads
from kme_dist.core.embedding import Embedding, FeatureEmbedding, log_loss
from kme_dist.core.nystrom import System, evaluated_rows
from kme_dist.core.objective import one_hot
from kme_dist.core.sums import TILE_ROWS, Centres, FeatureBasis
from kme_dist.run.executors import Executor
from kme_dist.run.fit.additive import TASKS, FitStatistics, sum_tasks
from kme_dist.run.fit.problem import Cost, LeftOut, Size, Solved
from kme_dist.run.scaling_model import Pass
from kme_dist.run.scratch import Scratch

LEFT_OUT_ROWS = 2_000
TRIALS = 8  # values of λ that a search typically tries


def cost(size: Size) -> Cost:
    """G in double, one product in the precision of the rows, and a tile of rows; flops of the sums and one solve."""
    p = size.basis
    memory = p * p * (8 + size.item) + TILE_ROWS * p * (8 + size.item)
    return Cost(memory, scratch=TASKS * 4 * p * p, flops=float(size.rows) * p**2 + p**3 / 3)


def passes(size: Size, kernel: bool = False) -> tuple[Pass, ...]:
    """Sums over all rows, of the values of a kernel or of features, values of λ, and the solve."""
    n, p, row = size.rows, size.basis, size.width * size.item
    tasks = sum_tasks(n)
    factor = p**3 / 3 + float(evaluated_rows(p)) * p**2
    return (
        Pass(
            tasks,
            n * row,
            2.0 * n * p * (size.columns + (0 if kernel else size.width)),
            sum_values=float(n) * p if kernel else 0.0,
            sum_flops=float(n) * p * p,
            driver_bytes=tasks * 4.0 * p * p,
            streamed=True,
        ),
        Pass(TRIALS, factor_flops=TRIALS * factor),
        Pass(1, factor_flops=p**3 / 3),
    )


@dataclass(frozen=True)
class Equations:
    """(G + nλM) V = B, prepared: sums are computed; arrays for leave-one-out are shared with workers on first use."""

    statistics: FitStatistics
    floor: float
    executor: Executor
    scratch: Scratch
    facts: dict[str, Any] = field(default_factory=dict)
    leverages: dict[float, float] = field(default_factory=dict)  # summed over the evaluated rows, by λ

    @functools.cached_property
    def system(self) -> System:
        total = self.statistics.total()
        with blas_threads(1):
            return System(total.G, total.B, self.statistics.basis.metric(), total.weight, total.noise)

    @property
    def evaluated_rows(self) -> int:
        # The sample is in random order, so its first rows are as good as any.
        sample = self.statistics.sample
        return 0 if sample is None else min(len(sample.y), evaluated_rows(self.statistics.basis.size))

    @property
    def scale(self) -> float:
        basis, sample = self.statistics.basis, self.statistics.sample
        if isinstance(basis, Centres):
            return (basis.kernel.alpha(basis.points) ** 2 or 1.0) / self.statistics.rows
        assert sample is not None
        Z = np.asarray(basis.rows(sample.X), dtype=np.float64)
        return (float(np.mean(np.sum(Z**2, axis=1))) or 1.0) / self.statistics.rows

    def leave_one_out(self, lams: list[float]) -> list[float]:
        """Losses of the sampled rows, one task for each λ."""
        calls = [(self.scratch, self._shared, self.system.rows, self.system.noise, lam, self.floor) for lam in lams]
        found = self.executor.map(leave_one_out_on_worker, calls, name="leave-one-out")
        self.leverages.update({lam: leverage for lam, (_, leverage) in zip(lams, found, strict=True)})
        return [loss for loss, _ in found]

    def solve(self, lam: float) -> Solved:
        basis, facts = self.statistics.basis, dict[str, Any]()
        with blas_threads(1):
            factor = self.system.factor(lam)
            V = factor.solve(self.system.B)
            left_out = self._left_out(factor, lam, facts)
        if lam in self.leverages:
            facts["effective_dimension"] = self.leverages[lam] / self.evaluated_rows * self.statistics.rows
        embedding: Any
        if isinstance(basis, Centres):
            embedding = Embedding(basis.kernel, basis.points, V, lam)
        else:
            assert isinstance(basis, FeatureBasis)
            embedding = FeatureEmbedding(basis.features, V, regularization=lam)
        return Solved(V, embedding, 1, 8 * basis.size**2, facts, left_out=left_out)

    def _left_out(self, factor: Any, lam: float, facts: dict[str, Any]) -> LeftOut | None:
        """Sampled rows under the fits without them. The first half of the centres is evaluated likewise, so that
        `facts` tell what more of them still bring."""
        sample, basis, system = self.statistics.sample, self.statistics.basis, self.system
        if sample is None or not self.evaluated_rows:
            return None
        few = slice(min(self.evaluated_rows, LEFT_OUT_ROWS))
        Z = np.asarray(basis.wide.rows(sample.X[few].astype(np.float64)), dtype=np.float64)
        y, w = sample.y[few], None if sample.weights is None else sample.weights[few]
        Y = one_hot(y, system.B.shape[1], Z)
        P, _ = system.left_out(factor, Z, Y, w)
        if isinstance(basis, Centres) and (half := basis.size // 2):
            M = None if system.M is None else system.M[:half, :half]
            fewer = System(system.G[:half, :half], system.B[:half], M, system.rows, system.noise)
            facts["loss"] = float(log_loss(Y, P, self.floor, w))
            facts["loss_of_half_the_centres"] = fewer.leave_one_out(lam, Z[:, :half], Y, self.floor, w)[0]
        return LeftOut(np.asarray(P), y, w)

    def residual(self, solved: Solved, lam: float) -> float:
        with blas_threads(1):
            return self.system.residual(lam, solved.weights)

    def close(self) -> None:
        for name in vars(self).get("_shared", {}).values():
            self.scratch.delete(name)

    @functools.cached_property
    def _shared(self) -> dict[str, str]:
        """Scratch names of the arrays that leave-one-out needs."""
        token, sample, basis = os.urandom(6).hex(), self.statistics.sample, self.statistics.basis
        assert sample is not None
        Z = np.asarray(basis.wide.rows(sample.X[: self.evaluated_rows].astype(np.float64)), dtype=np.float64)
        y = sample.y[: self.evaluated_rows]
        w = None if sample.weights is None else sample.weights[: self.evaluated_rows]
        arrays = {"G": self.system.G, "B": self.system.B, "M": self.system.M, "Z": Z, "y": y, "w": w}
        names = {key: f"system-{token}-{key}" for key, array in arrays.items() if array is not None}
        for key, name in names.items():
            self.scratch.save(name, arrays[key])
        return names


def leave_one_out_on_worker(
    scratch: Scratch, names: dict[str, str], rows: float, noise: float, lam: float, floor: float
) -> tuple[float, float]:
    """Leave-one-out log loss of the sampled rows at one λ, and the sum of their leverages."""
    held = {key: scratch.load(name) for key, name in names.items()}
    system = System(held["G"], np.asarray(held["B"]), held.get("M"), rows, noise)
    Z = np.asarray(held["Z"])
    w = np.asarray(held["w"]) if "w" in held else None
    return system.leave_one_out(lam, Z, one_hot(np.asarray(held["y"]), system.B.shape[1], Z), floor, w)
