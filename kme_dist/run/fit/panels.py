"""The Gram matrix in panels of rows: products K S in tasks that compute the tiles they need or load them if stored."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist.core.kernels.base import Kernel
from kme_dist.core.objective import one_hot
from kme_dist.data.dataset import Span
from kme_dist.data.rows import RowsRef
from kme_dist.run.fit.problem import Problem, between, roots, scaled
from kme_dist.run.scratch import Scratch

_SMALLEST, _LARGEST = 256, 4_096
_MEASURED_ROWS, _MEASURED_PARTS = 1_024, 4  # the residual is measured at this many rows, in several places


@dataclass(frozen=True, eq=False)
class Panels:
    """Which rows, cut into which blocks, and whether tiles are kept in the scratch folder."""

    token: str
    rows: RowsRef
    kernel: Kernel
    blocks: tuple[Span, ...]
    scratch: Scratch
    cached: bool

    def X(self, i: int) -> Any:
        """The scaled rows of block i, kept with the tiles if they are an array: every block is beside every other."""
        name = f"X-{i}"
        if self.cached and self.scratch.has(name):
            return self.scratch.load(name)
        X = self.rows.read(*self.blocks[i])[0]
        if self.cached and isinstance(X, np.ndarray):
            self.scratch.save(name, X, copy=False)
        return X

    def root(self, i: int) -> np.ndarray | None:
        return roots(self.rows, *self.blocks[i])

    def part(self, name: str, i: int) -> np.ndarray:
        """The rows of block i of a matrix over all rows."""
        start, stop = self.blocks[i]
        return self.scratch.load(name)[start:stop]

    def tile(self, i: int, j: int) -> np.ndarray:
        """K(block i, block j) for j <= i, with weights √w K √w."""
        name = f"K-{i}-{j}"
        if self.cached and self.scratch.has(name):
            return self.scratch.load(name)
        K = self.kernel.gram(self.X(i)) if i == j else self.kernel.gram(self.X(i), self.X(j))
        K = between(K, self.root(i), self.root(j))
        if self.cached:
            self.scratch.save(name, K, copy=False)
        return np.asarray(K)


def panel_rows(n: int) -> int:
    """A sixteenth of the rows, within bounds. A function of n only, since the block size affects rounding."""
    return int(min(max(-(-n // 16), _SMALLEST), _LARGEST))


def make_panels(problem: Problem, dtype: str) -> Panels:
    n = problem.rows.count
    rows = problem.rows.in_precision(dtype)
    token = os.urandom(6).hex()
    # Kept tiles are in the page cache of the workers' hosts, so the memory of all workers counts.
    cached = n * n // 2 * np.dtype(dtype).itemsize < 0.5 * problem.memory * problem.executor.workers
    blocks = tuple(rows.blocks(problem.tile_rows or panel_rows(n)))
    return Panels(token, rows, problem.kernel, blocks, problem.scratch.child(f"pcg-{token}"), cached)


def labels(panels: Panels) -> np.ndarray:
    Y = np.asarray(one_hot(panels.rows.read_labels(0, panels.rows.count), panels.rows.n_classes, np.zeros(0)))
    return scaled(Y, all_roots(panels))


def all_roots(panels: Panels) -> np.ndarray | None:
    """√w of all rows; None without weights."""
    return roots(panels.rows, 0, panels.rows.count)


def multiply_panel(panels: Panels, i: int, name: str) -> np.ndarray:
    """What the tiles of panel i, left of the diagonal and on it, contribute to K S; K is symmetric, so that each tile
    is used twice while it is in cache. Sums in double; tiles and S in the precision of the rows. Runs on a worker."""
    own, total = panels.part(name, i), np.zeros(panels.scratch.load(name).shape)
    rows = slice(*panels.blocks[i])
    for j in range(i + 1):
        tile = panels.tile(i, j)
        total[rows] += tile @ panels.part(name, j)
        if j < i:
            total[slice(*panels.blocks[j])] += (own.T @ tile).T  # quicker than tile.T @ own
    return total


def multiply_rows(panels: Panels, span: Span, name: str) -> np.ndarray:
    """K(rows of a span, all rows) S. Runs on a worker."""
    S = panels.scratch.load(name)
    X, own, total = panels.rows.read(*span)[0], roots(panels.rows, *span), 0.0
    for j, (start, stop) in enumerate(panels.blocks):
        tile = between(panels.kernel.gram(X, panels.X(j)), own, panels.root(j))
        total = total + np.asarray(tile) @ S[start:stop]
    return np.asarray(total)


def measured_spans(n: int) -> list[Span]:
    """All rows, or of many some stretches at equal distances."""
    if n <= _MEASURED_ROWS:
        return [(0, n)]
    size = _MEASURED_ROWS // _MEASURED_PARTS
    starts = [(n - size) * i // (_MEASURED_PARTS - 1) for i in range(_MEASURED_PARTS)]
    return [(start, start + size) for start in starts]


def relative_residual(problem: Problem, V: np.ndarray, lam: float) -> float:
    """|(K + nλI) V - Y| / |Y| with K recomputed in double precision; of many rows, at a thousand of them.

    With weights that of the equations for u = V / √w.
    """
    panels = replace(make_panels(problem, "float64"), cached=False)
    root = all_roots(panels)
    if root is not None:
        V = V / np.where(root > 0, root, 1.0)[:, None]  # rows of weight 0 have V = 0
    panels.scratch.save("S", V)
    spans = measured_spans(len(V))
    try:
        P = np.concatenate(problem.executor.map(multiply_rows, [(panels, s, "S") for s in spans], name="gram-product"))
    finally:
        panels.scratch.clear()
    some = np.concatenate([np.arange(*span) for span in spans])
    Y = labels(panels)[some]
    return float(np.linalg.norm(P + problem.weight * lam * V[some] - Y) / np.linalg.norm(Y))
