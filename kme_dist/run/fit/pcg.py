"""The exact fit by preconditioned block conjugate gradients: exact to a tolerance, no factorisation of size n.

All m right sides are solved at once and share one Krylov space (`kme_dist.core.cg`): a step costs one product K S with
an n x m matrix S, in panels, by tasks that compute the tiles of K they need or load them from the scratch folder if
they fit there. The preconditioner is F Fᵀ + nλI with F from randomly pivoted Cholesky, built block by block over the
cluster: each round chooses pivots on the driver and adds their columns to every block of F on the workers.

Recurrences are in double precision; tiles are in single precision only if λ and the tolerance allow it. λ is chosen by
leave-one-out, as for the other exact fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kme_dist.backend import blas_threads, cholesky
from kme_dist.core import cg
from kme_dist.core.cg import MAX_STEPS, Product, block_cg
from kme_dist.core.embedding import Embedding
from kme_dist.core.pivots import accept, block_size, columns, propose
from kme_dist.core.precision import warn_of_padding
from kme_dist.errors import NumericalError
from kme_dist.run.fit.exact import Exact, precision_for
from kme_dist.run.fit.panels import Panels, all_roots, labels, make_panels, multiply_panel, panel_rows
from kme_dist.run.fit.problem import Cost, Problem, Size, Solved, between, scaled, with_weight
from kme_dist.run.scaling_model import Pass

_TYPICAL_STEPS = 50


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
    added = columns(panels.kernel, panels.kernel.prepare(X), panels.kernel.prepare(pivots), F, beside, L, both)
    where.save(f"F-{i}-{number}", np.ascontiguousarray(added))
    return np.asarray(np.sum(added.astype(np.float64) ** 2, axis=1))


def join_factor(panels: Panels, i: int, rounds: int) -> np.ndarray:
    """F of block i as one array; returns FᵀF."""
    F = np.concatenate([panels.scratch.load(f"F-{i}-{r}") for r in range(rounds)], axis=1)
    panels.scratch.save(f"F-{i}", F)
    wide = F.astype(np.float64)
    return np.asarray(wide.T @ wide)


def project(panels: Panels, i: int, start: int, name: str) -> np.ndarray:
    """Fᵀ R for block i, whose rows begin at `start` in R."""
    F = panels.scratch.load(f"F-{i}")
    return np.asarray(F.T @ panels.scratch.load(name)[start : start + len(F)])


def correct(panels: Panels, i: int, start: int, name: str, W: np.ndarray) -> np.ndarray:
    """R - F W for block i."""
    F = panels.scratch.load(f"F-{i}")
    return np.asarray(panels.scratch.load(name)[start : start + len(F)] - F @ W)


# --- the fit ----------------------------------------------------------------------------------------


def cost(size: Size) -> Cost:
    """A tile, a panel of the preconditioner and all right sides per task; flops for a typical number of steps.

    The scratch folder holds the tiles, if kept, and the preconditioner, in parts and as a whole.
    """
    n, rows, rank = size.rows, size.tile_rows or panel_rows(size.rows), default_rank(size.rows)
    return Cost(
        memory=(rows**2 + rows * rank) * size.item + 2 * n * size.columns * 8,
        scratch=((n * n + n * rows) // 2 + 2 * n * rank) * size.item,
        flops=float(n) * rank**2 + _TYPICAL_STEPS * 2.0 * n**2 * size.columns,
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


class ConjugateGradients(Exact):
    def solve(self, lam: float) -> Solved:
        """Weights to a relative residual of `tolerance` for every class."""
        problem, n = self.problem, self.problem.weight
        _, need = precision_for(problem, lam)
        if need.missing:
            warn_of_padding(n, lam, need)
        solved = lam + need.missing / n
        # Products in single precision cannot bring the residual below 1e-5 or so.
        panels = make_panels(problem, need.dtype if problem.tolerance >= 1e-4 else "float64")
        try:
            F = Preconditioner.build(panels, problem, rank=default_rank(problem.rows.count))
            everything = tuple(range(len(panels.blocks)))
            Y = labels(panels, everything)
            V, steps, residual = solve_blocks(
                panels, problem, everything, Y, solved, problem.tolerance, F, max_steps=MAX_STEPS
            )
            V = scaled(V, all_roots(panels, everything))
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
        return self.evaluated(Solved(V, embedding, steps, stored, facts, residual), lam)

    def residual(self, solved: Solved, lam: float) -> float:
        """The true residual of the worst class, measured after the last step."""
        return super().residual(solved, lam) if solved.residual is None else solved.residual


def default_rank(n: int) -> int:
    """Rank of the preconditioner: its cost n r² stays below that of a few products with K."""
    return int(min(n // 2 or 1, max(200, 10 * math.sqrt(n))))


def solve_blocks(
    panels: Panels,
    problem: Problem,
    blocks: tuple[int, ...],
    Y: np.ndarray,
    lam: float,
    tolerance: float,
    factor: Preconditioner | None,
    start: np.ndarray | None = None,
    max_steps: int = MAX_STEPS,
) -> cg.CGResult:
    """(K + nλI)⁻¹ Y over some blocks of rows; not preconditioned without `factor`.

    With weights (√w K √w + WλI)⁻¹ Y.
    """
    root = all_roots(panels, blocks)
    shift = (len(Y) if root is None else float(root @ root)) * lam
    run = problem.executor.map

    def product(S: np.ndarray) -> np.ndarray:
        panels.scratch.save("S", S)
        parts = run(multiply_panel, [(panels, i, blocks, "S") for i in blocks], name="gram-product")
        return np.concatenate(parts) + shift * S

    precondition = factor.at(shift, blocks, problem) if factor is not None else None
    with blas_threads(1):
        return block_cg(product, Y, tolerance, precondition, start, max_steps)


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
        root = all_roots(panels, everything)
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
            for key, array in (("pivots", X[kept]), ("beside", beside[kept]), ("corner", L)):
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

    def at(self, shift: float, blocks: tuple[int, ...], problem: Problem) -> Product:
        """M⁻¹ for some blocks of rows and one shift, by the Woodbury identity."""
        H = np.asfortranarray(sum(self.grams[i] for i in blocks) + shift * np.eye(self.rank))
        factor, panels, run = cholesky(H), self.panels, problem.executor.map
        sizes = [panels.blocks[i][1] - panels.blocks[i][0] for i in blocks]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int).tolist()

        def apply(R: np.ndarray) -> np.ndarray:
            panels.scratch.save("R", R)
            where = list(zip(blocks, starts, strict=True))
            parts = run(project, [(panels, i, start, "R") for i, start in where], name="precondition")
            W = factor.solve(sum(parts))
            return (
                np.concatenate(run(correct, [(panels, i, start, "R", W) for i, start in where], name="precondition"))
                / shift
            )

        return apply
