"""The exact fit by preconditioned block conjugate gradients: exact to a tolerance, no factorisation of size n.

All m right sides are solved at once and share one Krylov space (`kme_dist.core.cg`): a step costs one product K S with
an n x m matrix S, in panels, by tasks that compute the tiles of K they need or load them from the scratch folder if
they fit there. The preconditioner is F Fᵀ + nλI with F from randomly pivoted Cholesky, built block by block over the
cluster: each round chooses pivots on the driver and adds their columns to every block of F on the workers.

Recurrences are in double precision; tiles are in single precision only if λ and the tolerance allow it. λ is chosen by
leave-one-out, as for the other exact fits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from kme_dist.backend import blas_threads, cholesky
from kme_dist.core import cg
from kme_dist.core.cg import MAX_STEPS, Product, Start, block_cg
from kme_dist.core.embedding import Embedding
from kme_dist.core.kernels.sparse import as_rows_of
from kme_dist.core.pivots import accept, block_size, columns, propose
from kme_dist.core.precision import Need, refines, warn_of_padding
from kme_dist.core.regularization import LOO_ROWS
from kme_dist.core.risk import with_copies
from kme_dist.errors import NumericalError
from kme_dist.run.fit.exact import LEFT_OUT_ROWS, Exact, precision_for
from kme_dist.run.fit.panels import Panels, all_roots, labels, make_panels, multiply_panel, panel_rows
from kme_dist.run.fit.problem import EXPONENTIAL, Cost, LeftOut, Problem, Size, Solved, between, scaled, with_weight
from kme_dist.run.scaling_model import Pass

_THIN = 0.5  # of the rate of a factorisation: products with a few columns wait for memory
_TYPICAL_STEPS = 20  # with those for the rows held out
_HELD_OUT_TOLERANCE = 1e-1  # of the fit that calibration uses: an error of its decisions far below their own


# --- on a worker ------------------------------------------------------------------------------------


def extend_factor(panels: Panels, i: int, number: int) -> np.ndarray:
    """Add the columns of one round of pivots to block i of F; returns how much of each row they explain."""
    where = panels.scratch
    pivots, beside, L = (np.array(where.load(f"{key}-{number}")) for key in ("pivots", "beside", "corner"))
    F = np.concatenate([where.load(f"F-{i}-{r}") for r in range(number)], axis=1) if number else None
    X = panels.X(i)
    F = np.zeros((len(X), 0), X.dtype) if F is None else F
    root = panels.root(i)
    both = (None, None) if root is None else (root, np.array(where.load(f"roots-{number}")))
    prepared = panels.kernel.prepare(as_rows_of(X, pivots))
    added = columns(panels.kernel, panels.kernel.prepare(X), prepared, F, beside, L, both)
    where.save(f"F-{i}-{number}", np.ascontiguousarray(added), copy=False)
    return np.asarray(np.sum(added.astype(np.float64) ** 2, axis=1))


def join_factor(panels: Panels, i: int, rounds: int) -> np.ndarray:
    """F of block i as one array; returns FᵀF."""
    F = np.concatenate([panels.scratch.load(f"F-{i}-{r}") for r in range(rounds)], axis=1)
    panels.scratch.save(f"F-{i}", F, copy=False)
    return np.asarray(F.T @ F, np.float64)


def project(panels: Panels, i: int, name: str) -> np.ndarray:
    """Fᵀ R for block i."""
    F = panels.scratch.load(f"F-{i}")
    return np.asarray(F.T @ panels.part(name, i), np.float64)


def correct(panels: Panels, i: int, name: str, weights: str) -> np.ndarray:
    """R - F W for block i."""
    return np.asarray(panels.part(name, i) - panels.scratch.load(f"F-{i}") @ panels.scratch.load(weights))


# --- the fit ----------------------------------------------------------------------------------------


def cost(size: Size) -> Cost:
    """A tile, a panel of the preconditioner and all right sides per task; flops for a typical number of steps.

    The scratch folder holds the tiles and the rows, if kept, and the preconditioner, in parts and as a whole.
    """
    n, rows, rank = size.rows, size.tile_rows or panel_rows(size.rows), default_rank(size.rows)
    return Cost(
        memory=(rows**2 + rows * rank) * size.item + 2 * n * size.columns * 8,
        scratch=((n * n + n * rows) // 2 + n * size.width + 2 * n * rank) * size.item,
        flops=2.0 * n * rank**2
        + float(n) ** 2 * (size.width + EXPONENTIAL / 2 + 2 * _TYPICAL_STEPS * size.columns / _THIN),
    )


def passes(size: Size) -> tuple[Pass, ...]:
    """The preconditioner, then a product with the Gram matrix in every step."""
    n, panels = float(size.rows), -(-size.rows // (size.tile_rows or panel_rows(size.rows)))
    rank = default_rank(size.rows)
    return (
        Pass(panels, n * size.width * size.item, n * rank**2, exps=n * rank),
        Pass(
            panels,
            0.5 * n**2 * size.item,
            2 * n**2 * size.columns,
            result_bytes=8 * n * size.columns,
            repeats=_TYPICAL_STEPS,
        ),
    )


def prepare(problem: Problem) -> ConjugateGradients:
    return ConjugateGradients(problem)


def converges(problem: Problem, lam: float) -> bool:
    """Whether a few dozen steps are enough: at a λ that single precision cannot resolve it takes hundreds, in whatever
    precision the steps are made."""
    scale, need = precision_for(replace(problem, rows=problem.rows.in_precision("float32")), lam)
    return _resolves(problem, lam, scale, need)


def _resolves(problem: Problem, lam: float, scale: float, need: Need) -> bool:
    """Whether single precision tells λ from rounding, at least in a system that is refined."""
    enough = need.dtype == "float32" or refines(problem.rows.count, scale, need.norm, problem.weight * lam)
    return enough and not need.missing


class ConjugateGradients(Exact):
    def solve(self, lam: float) -> Solved:
        """Weights to a relative residual of `tolerance` for every class."""
        scale, need = precision_for(self.problem, lam)
        if need.missing:
            warn_of_padding(self.problem.weight, lam, need)
        first, *more = self.precisions(lam, scale, need)
        try:
            return self._solve(lam, need, first)
        except NumericalError:
            if not more:
                raise
            return self._solve(lam, need, more[0])

    def precisions(self, lam: float, scale: float, need: Need) -> list[str]:
        """Of the tiles. Products in single precision cannot bring the residual below 1e-5 or so."""
        problem = self.problem
        if problem.tolerance < 1e-4 or problem.rows.dtype != "float32":
            return ["float64"]
        return ["float32", "float64"] if _resolves(problem, lam, scale, need) else ["float64"]

    def _solve(self, lam: float, need: Need, dtype: str) -> Solved:
        problem, solved = self.problem, lam + need.missing / self.problem.weight
        panels = make_panels(problem, dtype)
        try:
            F = Preconditioner.build(panels, problem, rank=default_rank(problem.rows.count))
            system = GramSystem(panels, problem, F, solved)
            left_out, start = self._left_out(system, lam)
            V, steps, residual = system.solve(labels(panels), problem.tolerance, start)
            V = scaled(V, system.root)
            stored = panels.scratch.bytes()
        finally:
            panels.scratch.clear()
        if not residual <= problem.tolerance:
            raise NumericalError(
                f"solver='pcg' reached a residual of {residual:.1e} in {steps} steps at regularization "
                f"{lam:.1e}, above the tolerance of {problem.tolerance:.1e}; raise `regularization` or "
                "`tolerance`, or use solver='tiled' or 'nystrom'",
                rows=problem.rows.count, regularization=lam, dtype=panels.rows.dtype,
            )  # fmt: skip
        X, _ = panels.rows.read()  # in the precision of the weights
        X, kept = with_weight(panels.rows, X, V)
        facts = {"rank": F.rank, "unexplained": F.unexplained, "cached": panels.cached, "dtype": panels.rows.dtype}
        embedding = Embedding(problem.kernel, X, kept.astype(panels.rows.dtype), lam)
        found = Solved(V, embedding, steps, stored, facts, residual, left_out=left_out)
        return replace(found, training=self.training(found, lam))

    def _left_out(self, system: GramSystem, lam: float) -> tuple[LeftOut, Start | None]:
        """Of few rows each is left out by itself; of many some are, together: there is no factor of the system."""
        few = self.problem.rows.positive <= LOO_ROWS
        return (self.sampled_left_out(lam), None) if few else _held_out(system)

    def residual(self, solved: Solved, lam: float) -> float:
        """The true residual of the worst class, measured after the last step."""
        return super().residual(solved, lam) if solved.residual is None else solved.residual


def _held_out(system: GramSystem) -> tuple[LeftOut, Start]:
    """Decisions of some rows under a fit without any of them, for calibration; and that fit with its product with the
    matrix of the system, to start the next from."""
    rows, tolerance = system.panels.rows, max(_HELD_OUT_TOLERANCE, system.problem.tolerance)
    (X, y), w = rows.read(), rows.weights()
    held = with_copies(X, y, w, LEFT_OUT_ROWS, system.problem.seed)
    Y = labels(system.panels)
    V = replace(system, kept=~held).solve(np.where(held[:, None], 0.0, Y), tolerance).solution
    P = system.gram_product(V)
    F = P[held] if system.root is None else P[held] / system.root[held, None]
    return LeftOut(F, y[held], None if w is None else w[held]), (V, P + system.shift * V)


def default_rank(n: int) -> int:
    """Rank of the preconditioner: its cost n r² stays below that of a few products with K."""
    return int(min(n // 2 or 1, max(200, 7 * math.sqrt(n))))


@dataclass(frozen=True, eq=False)
class GramSystem:
    """(K + nλI) V = Y, in panels; with weights (√w K √w + WλI) u = √w Y, and without the rows not `kept`."""

    panels: Panels
    problem: Problem
    factor: Preconditioner | None
    lam: float
    kept: np.ndarray | None = None

    @functools.cached_property
    def root(self) -> np.ndarray | None:
        return all_roots(self.panels)

    @property
    def shift(self) -> float:
        return (self.panels.blocks[-1][1] if self.root is None else float(self.root @ self.root)) * self.lam

    def gram_product(self, S: np.ndarray) -> np.ndarray:
        self.panels.scratch.save("S", S.astype(self.panels.rows.dtype))
        calls = [(self.panels, i, "S") for i in range(len(self.panels.blocks))]
        return self.problem.executor.map_reduce(multiply_panel, calls, np.add, name="gram-product")

    def solve(self, Y: np.ndarray, tolerance: float, start: Start | None = None, most: int = MAX_STEPS) -> cg.CGResult:
        """All columns at once; the search directions are 0 in rows that are not kept, like Y."""

        def product(S: np.ndarray) -> np.ndarray:
            return self._masked(self.gram_product(S)) + self.shift * S

        inverse = None if self.factor is None else self.factor.at(self.shift, self.problem)
        precondition = None if inverse is None else lambda R: self._masked(inverse(R))
        with blas_threads(1):
            return block_cg(product, Y, tolerance, precondition, start, most)

    def _masked(self, A: np.ndarray) -> np.ndarray:
        return A if self.kept is None else A * self.kept[:, None]


# --- the preconditioner -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Preconditioner:
    """M = F Fᵀ + shift I; F is in the scratch folder, in blocks of rows."""

    panels: Panels
    grams: tuple[np.ndarray, ...]  # FᵀF of each block
    unexplained: float  # share of the trace of K that F leaves out

    @property
    def rank(self) -> int:
        return int(self.grams[0].shape[0])

    @classmethod
    def build(cls, panels: Panels, problem: Problem, rank: int) -> Preconditioner:
        """Randomly pivoted Cholesky: pivots are chosen on the driver, columns computed on the workers."""
        rng = np.random.default_rng([problem.seed, 7])
        everything, kernel = range(len(panels.blocks)), panels.kernel
        residual = np.concatenate([kernel.diag(panels.X(i)).astype(np.float64) for i in everything])
        root = all_roots(panels)
        residual = residual if root is None else residual * root**2
        trace, floor = residual.sum(), 1e-12 if panels.rows.dtype == "float64" else 1e-6
        done = rounds = 0
        while done < rank and residual.sum() > floor * trace:
            proposed = propose(residual, min(block_size(rank), rank - done), rng)
            (X, _), beside = panels.rows.take(proposed), cls._rows_of(panels, proposed, rounds)
            own = None if root is None else root[proposed]
            H = between(kernel.gram(X, X.copy()).astype(np.float64), own, own)
            H -= beside.astype(np.float64) @ beside.T
            kept, L = accept(H, rng)
            if not len(kept):
                residual[proposed] = 0.0
                continue
            for key, array in (("pivots", np.asarray(X[kept])), ("beside", beside[kept]), ("corner", L)):
                panels.scratch.save(f"{key}-{rounds}", array)
            if own is not None:
                panels.scratch.save(f"roots-{rounds}", own[kept])
            calls = [(panels, i, rounds) for i in everything]
            explained = np.concatenate(problem.executor.map(extend_factor, calls, name="pivoted-cholesky"))
            residual = np.maximum(residual - explained, 0.0)
            residual[proposed[kept]] = 0.0
            done, rounds = done + len(kept), rounds + 1
        grams = problem.executor.map(join_factor, [(panels, i, rounds) for i in everything], name="pivoted-cholesky")
        return cls(panels, tuple(grams), float(residual.sum() / trace))

    @staticmethod
    def _rows_of(panels: Panels, numbers: np.ndarray, rounds: int) -> np.ndarray:
        """Rows of F, as built so far, by row number."""
        if not rounds:
            return np.zeros((len(numbers), 0), panels.rows.dtype)
        size = panels.blocks[0][1]
        found = np.empty((len(numbers), 0), panels.rows.dtype)
        for r in range(rounds):
            held = {i: panels.scratch.load(f"F-{i}-{r}") for i in sorted(set((numbers // size).tolist()))}
            part = np.stack([held[number // size][number % size] for number in numbers.tolist()])
            found = np.concatenate([found, part], axis=1)
        return found

    def at(self, shift: float, problem: Problem) -> Product:
        """M⁻¹ for one shift, by the Woodbury identity."""
        H = np.asfortranarray(sum(self.grams) + shift * np.eye(self.rank))
        factor, panels, run = cholesky(H), self.panels, problem.executor.map
        everything = range(len(panels.blocks))

        def apply(R: np.ndarray) -> np.ndarray:
            panels.scratch.save("R", R.astype(panels.rows.dtype))
            W = factor.solve(sum(run(project, [(panels, i, "R") for i in everything], name="precondition")))
            panels.scratch.save("W", W.astype(panels.rows.dtype))
            parts = run(correct, [(panels, i, "R", "W") for i in everything], name="precondition")
            return np.concatenate(parts).astype(np.float64) / shift

        return apply
