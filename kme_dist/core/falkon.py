"""Conjugate gradients for tens of thousands of centres: no p x p matrix of sums, one pass over the rows a step.

The model f(x) = Vᵀ k(C, x) with centres C satisfies the equations of `kme_dist.core.nystrom`, divided by W = Σ w:

    (Zᵀ diag(w) Z / W + λK) V = Zᵀ diag(w) Y / W,     Z = k(rows, C),  K = k(C, C)

Centres that are a sample of the rows have K D K / p in place of ZᵀwZ/W, with D = I for a uniform sample and the inverse
of the sampling rates otherwise. With K = L Lᵀ and R Rᵀ = Lᵀ D L / p + λI this gives the preconditioner

    (L R Rᵀ Lᵀ)⁻¹ = L⁻ᵀ R⁻ᵀ R⁻¹ L⁻¹          [Rudi, Carratino, Rosasco, Falkon, 2017]

It affects the number of steps only, not their limit, so it may be in single precision. Every column has its own
recurrence; all columns, of all classes and all λ, share the products with Z, which are nearly all of the work.

    state = begin(B, precondition)
    while ...:
        state, step = advance(state, product(state.P), precondition)    # the change of V is step * P
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.sums import Centres

TILE_ROWS = 256  # rows of Z at a time: both products take a tile while it is in cache
Precondition = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class State:
    """Solution, residual and search direction of every column, and the squared norm of its residual under the
    preconditioner, now and at the start."""

    V: np.ndarray
    R: np.ndarray
    P: np.ndarray
    norms: np.ndarray
    start: np.ndarray

    @property
    def residuals(self) -> np.ndarray:
        """Relative norms of the residuals, by column."""
        return np.sqrt(self.norms / np.where(self.start > 0, self.start, 1.0))


def begin(B: np.ndarray, precondition: Precondition) -> State:
    """At V = 0 for right sides B.

    All arrays of a state are in row order, as when they are stored and loaded again: BLAS may round products of the
    same numbers in column order differently.
    """
    B = np.ascontiguousarray(B)
    Z = np.ascontiguousarray(precondition(B))
    norms = np.sum(B * Z, axis=0)
    return State(np.zeros_like(B), B, Z, norms, norms)


def advance(state: State, product: np.ndarray, precondition: Precondition) -> tuple[State, np.ndarray]:
    """One step, given A P; and its length along P, by column. Columns without a residual stay as they are."""
    curvature = np.sum(state.P * product, axis=0)
    moving = (curvature > 0) & (state.norms > 0)
    step = np.where(moving, state.norms / np.where(moving, curvature, 1.0), 0.0)
    R = np.ascontiguousarray(state.R - step * product)
    Z = np.ascontiguousarray(precondition(R))
    norms = np.where(moving, np.maximum(np.sum(R * Z, axis=0), 0.0), 0.0)
    ratio = norms / np.where(state.norms > 0, state.norms, 1.0)
    return State(state.V + step * state.P, R, Z + ratio * state.P, norms, state.start), step


def normal_product(basis: Centres, X: Any, S: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Zᵀ diag(w) Z S for some rows, in double; tiles are in the precision of the rows and never stored."""
    S = S.astype(basis.points.dtype)
    return _over_tiles(basis, X, S.shape[1], lambda Z, part: _weighted(Z @ S, weights, part))


def right_side(basis: Centres, X: Any, Y: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Zᵀ diag(w) Y for some rows, in double."""
    return _over_tiles(basis, X, Y.shape[1], lambda Z, part: _weighted(Y[part].astype(Z.dtype), weights, part))


def kernel_product(basis: Centres, X: Any, S: np.ndarray) -> np.ndarray:
    """k(X, C) S, in double."""
    out, tile, S = np.empty((len(X), S.shape[1])), _tile(basis, X), S.astype(basis.points.dtype)
    for part in row_blocks(len(X), TILE_ROWS):
        out[part] = _rows(basis, X[part], tile) @ S
    return out


def _over_tiles(basis: Centres, X: Any, columns: int, right: Callable[[np.ndarray, slice], np.ndarray]) -> np.ndarray:
    """Σ Zᵀ T over tiles Z of rows, with T = right(Z, rows)."""
    total, tile = np.zeros((basis.size, columns)), _tile(basis, X)
    for part in row_blocks(len(X), TILE_ROWS):
        Z = _rows(basis, X[part], tile)
        total += Z.T @ right(Z, part)
    return total


def _weighted(T: np.ndarray, weights: np.ndarray | None, part: slice) -> np.ndarray:
    return T if weights is None else T * weights[part].astype(T.dtype)[:, None]


def _tile(basis: Centres, X: Any) -> np.ndarray:
    return np.empty((min(len(X), TILE_ROWS), basis.size), basis.points.dtype)


def _rows(basis: Centres, X: Any, tile: np.ndarray) -> np.ndarray:
    return np.asarray(basis.rows(X, tile[: len(X)]))
