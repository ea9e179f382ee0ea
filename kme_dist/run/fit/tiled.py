"""The exact fit by a block Cholesky factorisation with tiles in the scratch folder.

    A = K + nλI is cut into tiles of `tile_rows`. Tile (i, j) of the factor is computed by one task from the rows of
    blocks i and j and the finished tiles to its left:

        L_ij = (A_ij - Σ_{k<j} L_ik L_jkᵀ) L_jj⁻ᵀ,        L_jj = chol(A_jj - Σ_{k<j} L_jk L_jkᵀ)

    Columns are computed one after the other, the tiles of a column in parallel. The forward solve for the labels is
    done with the diagonal tiles; the backward solve is one more pass over the tiles. Other right sides take both.

A task holds a few tiles whatever the number of rows, and the disk holds half of an n x n matrix. A tile is written
once, whole, under its own name, so the task of a dead worker is simply run again, and a killed fit resumes from its
tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kme_dist.backend import Factor, cholesky
from kme_dist.core.embedding import Embedding
from kme_dist.core.kernels.base import Kernel
from kme_dist.core.objective import one_hot
from kme_dist.core.precision import warn_of_padding
from kme_dist.data.dataset import Span
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, NumericalError
from kme_dist.run.fit.exact import Exact, precision_for
from kme_dist.run.fit.problem import (
    Cost,
    Problem,
    ProgressLine,
    Size,
    Solved,
    between,
    fingerprint,
    roots,
    scaled,
    with_weight,
)
from kme_dist.run.scaling_model import Pass
from kme_dist.run.scratch import Scratch

_SMALLEST, _LARGEST = 512, 4_096


@dataclass(frozen=True, eq=False)
class Tiles:
    """A factorisation: rows, matrix, and where its tiles are stored."""

    rows: RowsRef
    kernel: Kernel
    shift: float
    blocks: tuple[Span, ...]
    scratch: Scratch

    def X(self, i: int) -> np.ndarray:
        return np.asarray(self.rows.read(*self.blocks[i])[0])

    def root(self, i: int) -> np.ndarray | None:
        return roots(self.rows, *self.blocks[i])


def default_tile_rows(n: int) -> int:
    """A sixteenth of the rows, within bounds. A function of n only, since the tile size affects rounding."""
    return int(min(max(-(-n // 16), _SMALLEST), _LARGEST))


def cost(size: Size) -> Cost:
    """A few tiles per task; half of an n x n matrix in the scratch folder."""
    n, rows = size.rows, size.tile_rows or default_tile_rows(size.rows)
    return Cost(memory=5 * rows**2 * size.item, scratch=(n * n + n * rows) // 2 * size.item, flops=n**3 / 3)


def passes(size: Size) -> tuple[Pass, ...]:
    """The factor, column by column of its tiles."""
    n, rows = size.rows, size.tile_rows or default_tile_rows(size.rows)
    tiles = -(-n // rows)
    products = n**3 / 3 + float(n) ** 2 * size.width
    read = float(n) * n * size.item * tiles / 3  # finished tiles to the left, from the scratch folder
    return (Pass(-(-tiles // 2), read / tiles, products / tiles, exps=0.5 * n * n / tiles, repeats=tiles),)


def prepare(problem: Problem) -> TiledCholesky:
    return TiledCholesky(problem)


class TiledCholesky(Exact):
    def solve(self, lam: float) -> Solved:
        tiles, stored = factorise(self.problem, lam)
        count = len(tiles.blocks)
        V = _backward(tiles, [np.array(tiles.scratch.load(f"z-{j}"), np.float64) for j in range(count)], self.problem)
        V = scaled(V, roots(tiles.rows, 0, tiles.rows.count))
        tiles.scratch.clear()
        X, _ = tiles.rows.read(0, tiles.rows.count)  # in the precision of the weights
        X, kept = with_weight(tiles.rows, X, V)
        facts = {"tile_rows": _tile_rows(self.problem), "tiles": count * (count + 1) // 2, "dtype": tiles.rows.dtype}
        embedding = Embedding(self.problem.kernel, X, kept.astype(tiles.rows.dtype), lam)
        found = Solved(V, embedding, count, stored, facts, left_out=self.sampled_left_out(lam))
        return replace(found, training=self.training(found, lam))


def _tile_rows(problem: Problem) -> int:
    return problem.tile_rows or default_tile_rows(problem.rows.count)


def factorise(problem: Problem, lam: float) -> tuple[Tiles, int]:
    """The tiles of the factor of K + nλI, with jitter on the diagonal if it is singular; and their bytes."""
    n, total, size = problem.rows.count, problem.weight, _tile_rows(problem)
    scale, need = precision_for(problem, lam)
    if need.missing:
        warn_of_padding(total, lam, need)
    attempts = [(dtype, need.missing) for dtype in dict.fromkeys((need.dtype, "float64"))]
    attempts += [("float64", need.missing + jitter * scale) for jitter in (1e-10, 1e-8, 1e-6, 1e-4)]
    for dtype, jitter in attempts:
        stored = _check_room(problem, Size(n, dtype=dtype, tile_rows=size))
        tiles = _tiles(problem, dtype, total * lam + jitter, size)
        try:
            _factor(tiles, problem)
        except NumericalError:
            tiles.scratch.clear()
            continue
        return tiles, stored
    raise NumericalError(
        f"the Gram matrix of all {n} rows is singular in float64 at regularization {lam:.1e}; increase it",
        rows=n, regularization=lam, dtype="float64",
    )  # fmt: skip


def _tiles(problem: Problem, dtype: str, shift: float, size: int) -> Tiles:
    rows = problem.rows.in_precision(dtype)
    name = fingerprint(replace(problem, rows=rows), shift=shift, size=size)
    return Tiles(rows, problem.kernel, shift, tuple(rows.blocks(size)), problem.scratch.child(f"tiles-{name}"))


def _check_room(problem: Problem, size: Size) -> int:
    """Bytes of all tiles; ConfigError if they do not fit on the disk or a task does not fit on a worker."""
    needed = cost(size)
    if needed.memory > problem.memory:
        raise ConfigError(
            f"tiles of {size.tile_rows} rows need {needed.memory / 1e9:.1f} GB on a worker that has "
            f"{problem.memory / 1e9:.1f} GB; set `tile_rows` lower"
        )
    if not problem.scratch.in_memory and problem.scratch.place.is_local:
        free = problem.scratch.free_bytes()
        if needed.scratch > free:
            raise ConfigError(
                f"solver='tiled' needs {needed.scratch / 1e9:.1f} GB of disk for {size.rows} rows, "
                f"{free / 1e9:.1f} GB are free at {problem.scratch.place}; free some, or use solver='pcg' or 'nystrom'"
            )
    return needed.scratch


def _factor(tiles: Tiles, problem: Problem) -> None:
    count, run = len(tiles.blocks), problem.executor.map
    run(factor_diagonal, [(tiles, 0)], name="factor-diagonal")
    for j in range(count - 1):
        run(factor_tile, [(tiles, i, j) for i in range(j + 1, count)], name="factor-tile")
        left = (1 - (j + 2) / count) ** 3  # of the work: a column is as long as there are rows below it, and as wide
        problem.report(ProgressLine(f"fit: column {j + 2} of {count}", round(100 * (1 - left)), 100))


def apply_inverse(tiles: Tiles, B: np.ndarray, problem: Problem) -> np.ndarray:
    """(K + shift I)⁻¹ B for any right sides, from the finished tiles."""
    count, run = len(tiles.blocks), problem.executor.map
    rest = [np.array(B[start:stop], dtype=np.float64) for start, stop in tiles.blocks]
    for j in range(count):
        rest[j] = Factor(np.asfortranarray(tiles.scratch.load(f"L-{j}-{j}"))).half_solve(rest[j])
        below = range(j + 1, count)
        parts = run(forward_substitute, [(tiles, i, j, rest[j]) for i in below], name="forward-substitute")
        for i, part in zip(below, parts, strict=True):
            rest[i] = rest[i] - part
    return _backward(tiles, rest, problem)


def _backward(tiles: Tiles, rest: list[np.ndarray], problem: Problem) -> np.ndarray:
    """L⁻ᵀ times the result of the forward solve, block by block."""
    run = problem.executor.map
    for j in range(len(tiles.blocks) - 1, -1, -1):
        rest[j] = Factor(np.asfortranarray(tiles.scratch.load(f"L-{j}-{j}"))).half_solve(rest[j], transposed=True)
        parts = run(back_substitute, [(tiles, j, k, rest[j]) for k in range(j)], name="back-substitute")
        for k, part in enumerate(parts):
            rest[k] = rest[k] - part
    return np.concatenate(rest)


def factor_tile(tiles: Tiles, i: int, j: int) -> None:
    """L_ij; the task of the first tile below the diagonal also computes the next diagonal tile."""
    if not tiles.scratch.has(f"L-{i}-{j}"):
        A = between(tiles.kernel.gram(tiles.X(i), tiles.X(j)), tiles.root(i), tiles.root(j))
        for k in range(j):
            A -= tiles.scratch.load(f"L-{i}-{k}") @ tiles.scratch.load(f"L-{j}-{k}").T
        corner = Factor(np.asfortranarray(tiles.scratch.load(f"L-{j}-{j}")))
        tiles.scratch.save(f"L-{i}-{j}", np.ascontiguousarray(corner.half_solve(A.T).T))
    if i == j + 1:
        factor_diagonal(tiles, i)


def factor_diagonal(tiles: Tiles, j: int) -> None:
    """L_jj, and block j of the forward solve for the labels, if there are any."""
    labelled = tiles.rows.n_classes > 0
    if tiles.scratch.has(f"z-{j}" if labelled else f"L-{j}-{j}"):  # z is written after the tile
        return
    X, y = tiles.rows.read(*tiles.blocks[j])
    root = tiles.root(j)
    A = np.asfortranarray(between(tiles.kernel.gram(X), root, root))
    A[np.diag_indices(len(A))] += A.dtype.type(tiles.shift)
    for k in range(j):
        L = tiles.scratch.load(f"L-{j}-{k}")
        A -= L @ L.T
    factor = cholesky(A)
    tiles.scratch.save(f"L-{j}-{j}", factor.lower)
    if not labelled:
        return
    b = scaled(one_hot(y, tiles.rows.n_classes, np.zeros(0, A.dtype)), root)
    for k in range(j):
        b -= tiles.scratch.load(f"L-{j}-{k}") @ tiles.scratch.load(f"z-{k}")
    tiles.scratch.save(f"z-{j}", np.ascontiguousarray(factor.half_solve(b)))


def forward_substitute(tiles: Tiles, i: int, j: int, z: np.ndarray) -> np.ndarray:
    """What block j of the forward solve subtracts from block i: L_ij z_j."""
    product: np.ndarray = tiles.scratch.load(f"L-{i}-{j}") @ z
    return product


def back_substitute(tiles: Tiles, j: int, k: int, V: np.ndarray) -> np.ndarray:
    """What block j of the solution subtracts from block k: L_jkᵀ V_j."""
    product: np.ndarray = tiles.scratch.load(f"L-{j}-{k}").T @ V
    return product
