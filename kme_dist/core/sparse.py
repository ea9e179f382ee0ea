"""Conditional embeddings with few entries: the LASSO of embeddings, and incomplete Cholesky.   [CME, section 5]

A dense embedding has weights W between all targets (rows) and all inputs (columns). A sparse one, M, is near it in the
Hilbert-Schmidt norm of operators and has few nonzero entries, rows or columns:

    min_M  tr (M - W)ᵀ L (M - W) K + γ penalty(M),     penalty = Σ|M_ij|, Σ|row i|₂ or Σ|column j|₂

by FISTA with C = 2 |K|₂ |L|₂ (the listing in the paper has typos; these steps descend):

    Z' = prox_{γ/C}(Q - 2 L (Q - W) K / C),   θ' = (1 + √(1 + 4θ²))/2,   Q' = Z' + (θ - 1)/θ' (Z' - Z)

with a restart of θ where momentum points uphill. A path of γ runs from the largest, at which the solution is zero,
downwards, with warm starts. The penalty also shrinks the entries it keeps; `refit` solves for those entries again
without it.

The alternative keeps whole rows and columns: pivots of an incomplete Cholesky factorisation of L and K, and the
projection of the dense embedding on them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kme_dist.backend import Array, cholesky, like, namespace_of, set_diagonal
from kme_dist.errors import ConfigError
from kme_dist.meter import metered

PENALTIES = ("element", "row", "column")


@dataclass(frozen=True)
class SparseStep:
    """One point of a path: the weights, the number of nonzero entries, the distance to the dense weights."""

    gamma: float
    weights: Array
    nonzero: int
    distance: float  # in the Hilbert-Schmidt norm of operators
    steps: int


def operator_distance(M: Array, W: Array, K: Array, L: Array) -> float:
    """|Σ (M - W)_ij L(y_i, ·) ⊗ K(x_j, ·)|: the distance between two embeddings."""
    D = M - W
    return math.sqrt(max(float(namespace_of(D).sum(D * (L @ D @ K))), 0.0))


def prox(M: Array, threshold: float, penalty: str) -> Array:
    """Soft thresholding of entries, rows or columns."""
    xp = namespace_of(M)
    if penalty == "element":
        size = xp.abs(M)
    elif penalty in ("row", "column"):
        size = xp.sqrt(xp.sum(M * M, axis=1 if penalty == "row" else 0, keepdims=True))
    else:
        raise ConfigError(f"penalty={penalty!r} is unknown; choose one of {', '.join(PENALTIES)}")
    keep = size > threshold
    return xp.where(keep, M * (1 - threshold / xp.where(keep, size, size * 0 + 1)), M * 0)


def _penalty(M: Array, penalty: str) -> Array:
    xp = namespace_of(M)
    if penalty == "element":
        return xp.sum(xp.abs(M))
    return xp.sum(xp.sqrt(xp.sum(M * M, axis=1 if penalty == "row" else 0)))


def largest_gamma(W: Array, K: Array, L: Array, penalty: str = "element") -> float:
    """The smallest γ whose solution is zero: the dual norm of the gradient at zero."""
    xp = namespace_of(W)
    G = 2 * (L @ W @ K)
    if penalty == "element":
        return float(xp.max(xp.abs(G)))
    return float(xp.max(xp.sqrt(xp.sum(G * G, axis=1 if penalty == "row" else 0))))


def spectral_norm(A: Array) -> float:
    """The largest eigenvalue of a Gram matrix."""
    with metered("factorise"):
        values = namespace_of(A).linalg.eigh(A)[0]
    return float(values[-1])


def fista(
    W: Array,
    K: Array,
    L: Array,
    gamma: float,
    *,
    penalty: str = "element",
    start: Array | None = None,
    steps: int = 2000,
    tolerance: float = 1e-7,
    lipschitz: float | None = None,
) -> SparseStep:
    """One solution. Stops when a step changes M by less than `tolerance` relative to its norm."""
    xp = namespace_of(W)
    C = lipschitz or 2 * spectral_norm(K) * spectral_norm(L)
    Z = W * 0 if start is None else start
    Q, theta, taken = Z, 1.0, 0
    LWK = L @ W @ K
    for taken in range(1, steps + 1):
        Z_next = prox(Q - (2 / C) * (L @ Q @ K - LWK), gamma / C, penalty)
        # Momentum that points uphill is dropped (O'Donoghue and Candès): the path stays monotone where K is flat.
        uphill = float(xp.sum((Q - Z_next) * (Z_next - Z))) > 0
        theta_next = (1 + (1 + 4 * theta * theta) ** 0.5) / 2
        Q = Z_next if uphill else Z_next + ((theta - 1) / theta_next) * (Z_next - Z)
        moved, size = float(xp.sum((Z_next - Z) ** 2)), float(xp.sum(Z_next * Z_next))
        Z, theta = Z_next, 1.0 if uphill else theta_next
        if moved <= tolerance**2 * max(size, 1e-300) and (taken > 1 or size == 0):
            break
    return SparseStep(gamma, Z, int(xp.sum(xp.where(Z != 0, Z * 0 + 1, Z * 0))), operator_distance(Z, W, K, L), taken)


class Splitting:
    """The same minimum by splitting (ADMM): the quadratic part is solved exactly in the eigenvectors of K and L.

    FISTA needs more steps the worse K and L are conditioned; ADMM does not. Iterates are sparse (the thresholded
    half), and a few steps of FISTA from there decide the entries near the threshold.
    """

    def __init__(self, W: Array, K: Array, L: Array) -> None:
        xp = namespace_of(W)
        with metered("factorise"):
            k, self._Q = xp.linalg.eigh(K)
            l, self._P = xp.linalg.eigh(L)
        self.lipschitz = 2 * float(k[-1]) * float(l[-1])
        self._H = 2 * xp.where(l > 0, l, l * 0)[:, None] * xp.where(k > 0, k, k * 0)[None, :]
        self._HW = self._H * (self._P.T @ W @ self._Q)

    def solve(
        self, gamma: float, penalty: str, start: Array, steps: int = 400, tolerance: float = 1e-4
    ) -> tuple[Array, int]:
        """A solution near `start`, and the steps taken. The penalty parameter balances the two residuals."""
        xp = namespace_of(start)
        Z, U, stiff, taken = start, start * 0, 1e-3 * self.lipschitz, 0
        for taken in range(1, steps + 1):
            M = self._P @ ((self._HW + stiff * (self._P.T @ (Z - U) @ self._Q)) / (self._H + stiff)) @ self._Q.T
            Z_next = prox(M + U, gamma / stiff, penalty)
            U = U + M - Z_next
            apart, moved = float(xp.sum((M - Z_next) ** 2)) ** 0.5, float(xp.sum((Z_next - Z) ** 2)) ** 0.5
            Z = Z_next
            size = float(xp.sum(M * M)) ** 0.5
            if max(apart, moved) <= tolerance * size:
                break
            if taken % 20 == 0 and apart > 5 * moved:
                stiff, U = 2 * stiff, U / 2
            elif taken % 20 == 0 and moved > 5 * apart:
                stiff, U = stiff / 2, 2 * U
        return Z, taken


def objective(M: Array, W: Array, K: Array, L: Array, gamma: float, penalty: str = "element") -> float:
    """The quantity that `fista` minimises."""
    return operator_distance(M, W, K, L) ** 2 + gamma * float(_penalty(M, penalty))


def path(
    W: Array,
    K: Array,
    L: Array,
    *,
    penalty: str = "element",
    gammas: Sequence[float] | int = 20,
    steps: int = 200,
    tolerance: float = 1e-6,
    split: bool = True,
) -> Iterator[SparseStep]:
    """Solutions for decreasing γ, each started at the previous one; an integer `gammas` spaces that many evenly in log.

    With `split`, `Splitting` computes an approximate solution that FISTA refines; without it FISTA needs many more
    `steps`.
    """
    if isinstance(gammas, int):
        top = largest_gamma(W, K, L, penalty)
        gammas = [float(g) for g in top * 10.0 ** np.linspace(-0.25, -3.0, gammas)]
    splitting = Splitting(W, K, L) if split else None
    lipschitz = 2 * spectral_norm(K) * spectral_norm(L) if splitting is None else splitting.lipschitz
    start = W * 0
    for gamma in sorted(gammas, reverse=True):
        before = 0
        if splitting is not None:
            start, before = splitting.solve(gamma, penalty, start)
        found = fista(
            W, K, L, gamma, penalty=penalty, start=start, steps=steps, tolerance=tolerance, lipschitz=lipschitz
        )
        start = found.weights
        yield dataclasses.replace(found, steps=before + found.steps)


def refit(found: SparseStep, W: Array, K: Array, L: Array, steps: int = 500, tolerance: float = 1e-8) -> SparseStep:
    """The nearest weights to W with the sparsity pattern of the given ones, by conjugate gradients.

    Minimises tr (M - W)ᵀL(M - W)K over M of that pattern, starting from the given M, so the distance never grows.
    """
    xp = namespace_of(W)
    mask = xp.where(found.weights != 0, W * 0 + 1, W * 0)
    M = found.weights
    R = mask * (L @ (W - M) @ K)
    P, size = R, float(xp.sum(R * R))
    first = size
    for _ in range(steps):
        if size <= tolerance**2 * first or size == 0:
            break
        AP = mask * (L @ P @ K)
        curvature = float(xp.sum(P * AP))
        if curvature <= 0:
            break
        M, R = M + (size / curvature) * P, R - (size / curvature) * AP
        last, size = size, float(xp.sum(R * R))
        P = R + (size / last) * P
    distance = operator_distance(M, W, K, L)
    if distance > found.distance:
        return found
    return SparseStep(found.gamma, M, found.nonzero, distance, found.steps)


# --- incomplete Cholesky ---------------------------------------------------------------------------------------


def pivots(K: Array, count: int) -> np.ndarray:
    """The pivots of a Cholesky factorisation: each has the largest residual given those before it."""
    K = np.asarray(K)
    left, F = np.diagonal(K).astype(np.float64).copy(), np.zeros((len(K), min(count, len(K))))
    floor, chosen = 1e-12 * float(left.max(initial=0.0)), []
    for j in range(F.shape[1]):
        i = int(np.argmax(left))
        if left[i] <= floor:
            break
        chosen.append(i)
        F[:, j] = (K[:, i] - F[:, :j] @ F[i, :j]) / np.sqrt(left[i])
        left = np.maximum(left - F[:, j] ** 2, 0.0)
        left[chosen] = -1.0
    return np.array(chosen, dtype=np.int64)


def project(W: Array, K: Array, L: Array, rows: np.ndarray, columns: np.ndarray) -> SparseStep:
    """The nearest embedding on the given targets and inputs only: L_RR⁻¹ L_R: W K_:C K_CC⁻¹."""
    r, c = like(rows, W, dtype=np.int64), like(columns, W, dtype=np.int64)
    inner = _solve(L, r, L[r, :] @ W @ K[:, c])
    block = _solve(K, c, inner.T).T
    M = np.zeros(W.shape)
    M[np.ix_(rows, columns)] = np.asarray(block)
    weights = like(M, W)
    return SparseStep(0.0, weights, len(rows) * len(columns), operator_distance(weights, W, K, L), 0)


def _solve(K: Array, index: Array, B: Array) -> Array:
    """K_II⁻¹ B with a small jitter that keeps K_II positive definite."""
    block = K[index, :][:, index]
    A = block + 0
    diag = namespace_of(A).sum(A * like(np.eye(A.shape[0]), A), axis=1)
    set_diagonal(A, diag * (1 + 1e-10))
    return cholesky(A).solve(B)


def incomplete_cholesky(W: Array, K: Array, L: Array, count: int) -> SparseStep:
    """The dense embedding projected on `count` pivots of L (targets) and of K (inputs)."""
    return project(W, K, L, pivots(L, count), pivots(K, count))
