"""A fitted embedding reduced to fewer centres, as close to the original as the budget allows.

f = Σ_i k(c_i, ·) V_iᵀ is an element of the kernel's Hilbert space, so the distance has a closed form: on chosen centres
S the best weights solve K_SS W = F_S with F = K V, and the error is |f - f_S|² = tr(Vᵀ F) - tr(F_Sᵀ W). It bounds every
prediction: |f_c(x) - f_S,c(x)| ≤ α |f - f_S|.

    greedy    repeatedly the centre that lowers the error most: |residual|² / (norm² of k(c, ·) outside the span)
    herding   repeatedly the centre where the residual is largest: kernel herding towards f, with all weights re-solved

Both are a pivoted Cholesky factorisation that stops at the budget, O(centres · budget²) and no n x n matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import astype, is_cupy, like, namespace_of, to_host
from kme_dist.core.embedding import Embedding
from kme_dist.core.kernels.base import row_count, take
from kme_dist.errors import ConfigError

METHODS = ("greedy", "herding")
_EXHAUSTED = 1e-10  # fraction of k(x, x) below which a centre is in the span of the others


@dataclass(frozen=True)
class Compressed:
    """The smaller embedding, the centres kept, and |f - f_S| / |f| after each of them."""

    embedding: Embedding
    kept: np.ndarray
    errors: np.ndarray

    @property
    def error(self) -> float:
        return float(self.errors[-1])


def compress(
    embedding: Embedding, *, centres: int | None = None, tolerance: float | None = None, method: str = "greedy"
) -> Compressed:
    """Keep at most `centres` centres, or as few as reach a relative error of `tolerance` in the kernel's norm."""
    p = row_count(embedding.centres)
    if (centres is None) == (tolerance is None):
        raise ConfigError("compress: give either a number of centres or a tolerance")
    if centres is not None and (isinstance(centres, bool) or not isinstance(centres, int | np.integer) or centres < 1):
        raise ConfigError(f"compress: {centres!r} centres: must be an integer >= 1")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ConfigError(f"compress: tolerance={tolerance!r}: must be a number between 0 and 1")
    if method not in METHODS:
        raise ConfigError(f"compress: method={method!r} is unknown; choose 'greedy' or 'herding'")
    chosen, A, L, errors = _pursue(embedding, min(int(centres or p), p), tolerance or 0.0, method)
    # From the Newton basis back to kernels: f_S = Σ_j A_j v_j and k(S, ·) = L_S v.
    W = np.linalg.solve(L[chosen].T, A)
    weights = like(W, embedding.weights)
    small = Embedding(embedding.kernel, _select(embedding.centres, chosen), weights, embedding.regularization)
    return Compressed(small, chosen, errors)


def _pursue(
    embedding: Embedding, budget: int, tolerance: float, method: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Choose centres one by one: their indices, their Newton coefficients, the Newton basis at all centres, errors."""
    kernel, C = embedding.kernel, embedding.centres
    C = astype(C, "float64") if hasattr(C, "dtype") else C
    wide = Embedding(kernel, C, astype(embedding.weights, "float64"), embedding.regularization)
    residual = np.array(to_host(wide.decision(C)), np.float64)  # F, then F minus its approximation
    total = float(np.sum(to_host(wide.weights) * residual))
    left = np.array(to_host(kernel.diag(C)), np.float64)
    floor, prepared = _EXHAUSTED * float(left.max()), kernel.prepare(C)
    p, m = residual.shape
    L = np.zeros((p, min(budget, 256)))
    A = np.zeros((budget, m))
    chosen: list[int] = []
    errors: list[float] = []
    explained, free = 0.0, np.ones(p, bool)
    for step in range(budget):
        strength = np.sum(residual * residual, axis=1)
        if method == "greedy":
            strength = strength / np.maximum(left, floor)
        strength[~free | (left <= floor)] = -1.0
        pivot = int(np.argmax(strength))
        if strength[pivot] <= 0:
            break
        if step == L.shape[1]:
            L = np.concatenate([L, np.zeros((p, min(step, budget - step)))], axis=1)
        column = to_host(kernel.evaluate(prepared, take(prepared, slice(pivot, pivot + 1))))[:, 0]
        root = math.sqrt(left[pivot])
        v = (column - L[:, :step] @ L[pivot, :step]) / root
        A[step] = residual[pivot] / root
        residual -= v[:, None] * A[step]
        left -= v * v
        L[:, step] = v
        free[pivot] = False
        chosen.append(pivot)
        explained += float(A[step] @ A[step])
        errors.append(math.sqrt(max(0.0, 1.0 - explained / total)) if total > 0 else 0.0)
        if errors[-1] <= tolerance:
            break
    s = len(chosen)
    return np.array(chosen), A[:s], L[:, :s], np.array(errors)


def _select(centres: Any, rows: np.ndarray) -> Any:
    if not hasattr(centres, "dtype"):
        return [centres[int(i)] for i in rows]
    index = like(rows, centres, "int64")
    if isinstance(centres, np.ndarray) or is_cupy(centres):
        return centres[index]
    return namespace_of(centres).take(centres, index, axis=0)
