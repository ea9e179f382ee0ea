"""The exact fit by preconditioned block conjugate gradients: exact to a tolerance, no factorisation of size n.

All m right sides are solved at once and share one Krylov space (`kme_dist.core.cg`): a step costs one product K S with
n x m numbers S, done in panels by tasks that compute the tiles of K they need, or find them in the scratch place where
they fit. The preconditioner is F Fᵀ + nλI with F from randomly pivoted Cholesky, built block by block over the cluster:
each round chooses some pivots here and adds their columns to every block of F there.

Recurrences are in double precision; tiles are in single precision only where λ and the tolerance allow it. λ is chosen
by leave-one-out, as for the other exact fits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kme_dist.backend import blas_threads, cholesky
from kme_dist.core.cg import MOST_STEPS, Product, Solved, block_cg
from kme_dist.core.embedding import Embedding
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.objective import one_hot
from kme_dist.core.pivots import accept, block_size, columns, propose
from kme_dist.data.plan import Span
from kme_dist.data.rows import RowsRef
from kme_dist.errors import NumericalError
from kme_dist.run import solve
from kme_dist.run.blocks import Found, Task
from kme_dist.run.scratch import Scratch
from kme_dist.run.tuning import precision_for, solve_on_sample

_SMALLEST, _LARGEST = 256, 4_096


@dataclass(frozen=True, eq=False)
class Panels:
    """The Gram matrix in panels of rows, and the factor of its preconditioner."""

    token: str
    rows: RowsRef
    kernel: Kernel
    blocks: tuple[Span, ...]
    scratch: Scratch
    cached: bool  # tiles are kept in the scratch place

    def X(self, i: int) -> np.ndarray:
        return np.asarray(self.rows.read(*self.blocks[i])[0])

    def tile(self, i: int, j: int) -> np.ndarray:
        """K(block i, block j)."""
        if j > i:
            return self.tile(j, i).T
        name = f"K-{i}-{j}"
        if self.cached and self.scratch.has(name):
            return self.scratch.load(name)
        K = self.kernel.gram(self.X(i)) if i == j else self.kernel.gram(self.X(i), self.X(j))
        if self.cached:
            self.scratch.save(name, K)
        return np.asarray(K)


# --- what workers do --------------------------------------------------------------------------------


def multiply_panel(panels: Panels, i: int, over: tuple[int, ...], name: str) -> np.ndarray:
    """K(block i, blocks `over`) S."""
    S = panels.scratch.load(name)
    total, at = 0.0, 0
    for j in over:
        tile = panels.tile(i, j)
        part = S[at : at + tile.shape[1]]
        total = total + (tile @ part.astype(tile.dtype)).astype(np.float64)
        at += tile.shape[1]
    return np.asarray(total)


def extend_factor(panels: Panels, i: int, turn: int) -> np.ndarray:
    """Add the columns of one round of pivots to block i of F; returns what they explain of each row."""
    where = panels.scratch
    pivots, beside, L = (np.array(where.load(f"{key}-{turn}")) for key in ("pivots", "beside", "corner"))
    F = np.concatenate([where.load(f"F-{i}-{r}") for r in range(turn)], axis=1) if turn else None
    X = panels.X(i)
    F = np.zeros((len(X), 0), X.dtype) if F is None else F
    added = columns(panels.kernel, panels.kernel.prepare(X), panels.kernel.prepare(pivots), F, beside, L)
    where.save(f"F-{i}-{turn}", np.ascontiguousarray(added))
    return np.asarray(np.sum(added.astype(np.float64) ** 2, axis=1))


def join_factor(panels: Panels, i: int, turns: int) -> np.ndarray:
    """F of block i as one array; returns FᵀF."""
    F = np.concatenate([panels.scratch.load(f"F-{i}-{r}") for r in range(turns)], axis=1)
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


def fit_pcg(task: Task) -> Found:
    """Weights to a relative residual of `tolerance` for every class; λ by leave-one-out, like the other exact fits."""
    lam, loss, tried = solve_on_sample(task)
    _, need = precision_for(task, lam)
    if need.missing:
        solve.warn_of_padding(task.rows.count, lam, need)
    solved = lam + need.missing / task.rows.count
    # Products in single precision cannot bring the residual below 1e-5 or so.
    panels = make_panels(task, need.dtype if task.tolerance >= 1e-4 else "float64")
    try:
        F = Preconditioner.build(panels, task, rank=default_rank(task.rows.count))
        everything = tuple(range(len(panels.blocks)))
        Y = labels(panels, everything)
        V, steps, residual = solve_blocks(panels, task, everything, Y, solved, task.tolerance, F, most_steps=MOST_STEPS)
        stored = panels.scratch.bytes()
    finally:
        panels.scratch.clear()
    if not residual <= task.tolerance:
        raise NumericalError(
            f"solver='pcg' reached a residual of {residual:.1e} in {steps} steps, {task.tolerance:.1e} was asked for, "
            f"at regularization {lam:.1e}; raise `regularization` or `tolerance`, or use solver='tiled' or 'nystrom'",
            rows=task.rows.count, regularization=lam, dtype=panels.rows.dtype,
        )  # fmt: skip
    X, _ = panels.rows.read(0, task.rows.count)  # in the precision that the weights were found in, and are kept in
    facts = {"rank": F.rank, "unexplained": F.unexplained, "cached": panels.cached, "dtype": panels.rows.dtype}
    if tried:
        facts["leave_one_out_rows"] = min(task.rows.count, solve.LOO_ROWS)
    embedding = Embedding(task.kernel, X, V.astype(panels.rows.dtype), lam)
    return Found(embedding, loss, tried, residual, steps, stored, facts)


def default_rank(n: int) -> int:
    """Of the preconditioner: its cost n r² stays below that of a few products with K."""
    return int(min(n // 2 or 1, max(200, 10 * math.sqrt(n))))


def make_panels(task: Task, dtype: str) -> Panels:
    n = task.rows.count
    size = task.tile_rows or int(min(max(-(-n // 16), _SMALLEST), _LARGEST))
    rows = task.rows.in_precision(dtype)
    token = os.urandom(6).hex()
    # Kept tiles lie in the page cache of the workers' machines, so what counts is the memory of all of them.
    cached = n * n // 2 * np.dtype(dtype).itemsize < 0.5 * task.memory * task.executor.workers
    return Panels(token, rows, task.kernel, tuple(rows.blocks(size)), task.scratch.child(f"pcg-{token}"), cached)


def labels(panels: Panels, blocks: Sequence[int]) -> np.ndarray:
    y = np.concatenate([panels.rows.read(*panels.blocks[i])[1] for i in blocks])
    return np.asarray(one_hot(y, panels.rows.n_classes, np.zeros(0)))


def solve_blocks(
    panels: Panels,
    task: Task,
    blocks: tuple[int, ...],
    Y: np.ndarray,
    lam: float,
    tolerance: float,
    factor: Preconditioner | None,
    start: np.ndarray | None = None,
    most_steps: int = MOST_STEPS,
) -> Solved:
    """(K + nλI)⁻¹ Y over some blocks of rows; without `factor` nothing is preconditioned."""
    shift = len(Y) * lam
    run = task.executor.map

    def product(S: np.ndarray) -> np.ndarray:
        panels.scratch.save("S", S)
        parts = run(multiply_panel, [(panels, i, blocks, "S") for i in blocks], name="gram-product")
        return np.concatenate(parts) + shift * S

    precondition = factor.at(shift, blocks, task) if factor is not None else None
    with blas_threads(1):
        return block_cg(product, Y, tolerance, precondition, start, most_steps)


def relative_residual(task: Task, V: np.ndarray, lam: float) -> float:
    """|(K + nλI) V - Y| / |Y| with a freshly computed K in double precision, panel by panel."""
    panels = make_panels(task, "float64")
    panels = Panels(panels.token, panels.rows, panels.kernel, panels.blocks, panels.scratch, cached=False)
    everything = tuple(range(len(panels.blocks)))
    panels.scratch.save("S", V)
    try:
        calls = [(panels, i, everything, "S") for i in everything]
        P = np.concatenate(task.executor.map(multiply_panel, calls, name="gram-product"))
    finally:
        panels.scratch.clear()
    Y = labels(panels, everything)
    return float(np.linalg.norm(P + task.rows.count * lam * V - Y) / np.linalg.norm(Y))


# --- the preconditioner -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Preconditioner:
    """M = F Fᵀ + shift I; F lies in blocks of rows in the scratch place."""

    panels: Panels
    grams: tuple[np.ndarray, ...]  # FᵀF of each block
    unexplained: float  # share of the trace of K that F leaves out

    @property
    def rank(self) -> int:
        return int(self.grams[0].shape[0])

    @classmethod
    def build(cls, panels: Panels, task: Task, rank: int) -> Preconditioner:
        """Randomly pivoted Cholesky: pivots are chosen here, columns computed there."""
        rng = np.random.default_rng([task.seed, 7])
        everything, kernel = range(len(panels.blocks)), panels.kernel
        residual = np.concatenate([kernel.diag(panels.X(i)).astype(np.float64) for i in everything])
        trace, floor = residual.sum(), 1e-12 if panels.rows.dtype == "float64" else 1e-6
        done = turn = 0
        while done < rank and residual.sum() > floor * trace:
            proposed = propose(residual, min(block_size(rank), rank - done), rng)
            (X, _), beside = panels.rows.take(proposed), cls._rows_of(panels, proposed, turn)
            H = kernel.gram(X, X.copy()).astype(np.float64) - beside.astype(np.float64) @ beside.T
            kept, L = accept(H, rng)
            if not len(kept):
                residual[proposed] = 0.0
                continue
            for key, array in (("pivots", X[kept]), ("beside", beside[kept]), ("corner", L)):
                panels.scratch.save(f"{key}-{turn}", array)
            calls = [(panels, i, turn) for i in everything]
            explained = np.concatenate(task.executor.map(extend_factor, calls, name="pivoted-cholesky"))
            residual = np.maximum(residual - explained, 0.0)
            residual[proposed[kept]] = 0.0
            done, turn = done + len(kept), turn + 1
        grams = task.executor.map(join_factor, [(panels, i, turn) for i in everything], name="pivoted-cholesky")
        return cls(panels, tuple(grams), float(residual.sum() / trace))

    @staticmethod
    def _rows_of(panels: Panels, numbers: np.ndarray, turns: int) -> np.ndarray:
        """Rows of F, as far as it goes, by their numbers."""
        if not turns:
            return np.zeros((len(numbers), 0), panels.rows.dtype)
        size = panels.blocks[0][1]
        found = np.empty((len(numbers), 0), panels.rows.dtype)
        for r in range(turns):
            held = {i: panels.scratch.load(f"F-{i}-{r}") for i in sorted(set((numbers // size).tolist()))}
            part = np.stack([held[number // size][number % size] for number in numbers.tolist()])
            found = np.concatenate([found, part], axis=1)
        return found

    def at(self, shift: float, blocks: tuple[int, ...], task: Task) -> Product:
        """M⁻¹ for some blocks of rows and one shift, by the Woodbury identity."""
        H = np.asfortranarray(sum(self.grams[i] for i in blocks) + shift * np.eye(self.rank))
        factor, panels, run = cholesky(H), self.panels, task.executor.map
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
