"""Conditional embeddings with few entries: the LASSO of embeddings, and incomplete Cholesky.   [CME, section 5]

A dense embedding has weights W between all targets (rows) and all inputs (columns). A sparse one, M, is near it in the
Hilbert-Schmidt norm of operators and has few nonzero entries, rows or columns:

    min_M  tr (M - W)ᵀ L (M - W) K + γ penalty(M),     penalty = Σ|M_ij|, Σ|row i|₂, Σ|column j|₂ or Σ|row i, column i|₂

The last one, "pair", is for weights between the two sides of the same rows: row i and column i of M are one group, so
an observed pair (x_i, y_i) is kept or dropped as a whole, and the nonzero entries are a square M_SS. Groups overlap:
entry ij belongs to i and j. Because s pairs share s² entries, the sum of norms is smallest, for the same effect, if all
pairs are kept (of a constant M_SS it grows as s^1.5). So a path solves it with factors ω_i that fall with the size of a
pair in the last solution: steps of majorising Σ log(|row i, column i| + ε), which has no such preference (Candès, Wakin
and Boyd 2008).

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
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, cholesky, diagonal, like, namespace_of, set_diagonal
from kme_dist.errors import ConfigError
from kme_dist.meter import metered

PENALTIES = ("element", "row", "column", "pair")
_DUAL_STEPS, _DUAL_TOLERANCE = 2_000, 1e-12  # of the proximal step of overlapping groups
_NORM_STEPS = 2_000
_PAIR_ROUNDS = 6  # of factors, the first one equal


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
    """Soft thresholding of entries, rows, columns or pairs: the minimum of |Z - M|²/2 + threshold penalty(Z)."""
    if penalty == "pair":
        return _PairProx()(M, _thresholds(M, threshold, None))
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
    if penalty == "pair":
        return xp.sum(_pair_sizes(M, M))
    return xp.sum(xp.sqrt(xp.sum(M * M, axis=1 if penalty == "row" else 0)))


def largest_gamma(W: Array, K: Array, L: Array, penalty: str = "element") -> float:
    """The smallest γ whose solution is zero: the dual norm of the gradient at zero."""
    xp = namespace_of(W)
    G = 2 * (L @ W @ K)
    if penalty == "element":
        return float(xp.max(xp.abs(G)))
    if penalty == "pair":
        _thresholds(G, 0.0, None)
        return _pair_dual_norm(G)
    return float(xp.max(xp.sqrt(xp.sum(G * G, axis=1 if penalty == "row" else 0))))


# --- pairs: overlapping groups ---------------------------------------------------------------------------------


def _pair_sizes(A: Array, B: Array) -> Array:
    """|row i of A, column i of B|, the diagonal counted once, in A."""
    xp, diag = namespace_of(A), diagonal(B)
    return xp.sqrt(xp.sum(A * A, axis=1) + xp.sum(B * B, axis=0) - diag * diag)


def _pair_shrunk(A: Array, B: Array, threshold: Array) -> tuple[Array, Array]:
    """Row i of A and column i of B as one group: soft thresholding. The diagonal of B is in no group."""
    xp, size = namespace_of(A), _pair_sizes(A, B)
    keep = size > threshold
    factor = xp.where(keep, 1 - threshold / xp.where(keep, size, size * 0 + 1), size * 0)
    shrunk = B * factor[None, :]
    set_diagonal(shrunk, diagonal(B))
    return A * factor[:, None], shrunk


def _kept_pairs(M: Array, kept: Array) -> Array:
    """M with the rows and columns of dropped pairs set to exact zeros."""
    xp = namespace_of(M)
    return xp.where(kept[:, None] & kept[None, :], M, M * 0)


class _PairProx:
    """The proximal step of overlapping groups, by accelerated projected gradients on its dual.

    min_Z |Z - M|²/2 + t Σ|row i, column i|  =  max over A, B with |row i of A, column i of B| <= t of the same with
    Z = M - A - B; pairs whose bound is not attained are zero. A call starts from the dual solution of the last one.
    """

    def __init__(self) -> None:
        self._dual: tuple[Array, Array] | None = None

    def __call__(self, M: Array, threshold: Array) -> Array:
        """`threshold` has one value for each pair."""
        xp = namespace_of(M)
        A, B = (M * 0, M * 0) if self._dual is None else self._dual
        A_next, B_next, theta = A, B, 1.0
        limit = _DUAL_TOLERANCE * float(xp.sum(threshold * threshold))
        for _ in range(_DUAL_STEPS):
            rest = 0.5 * (M - A_next - B_next)  # the gradient has Lipschitz constant 2: every entry is in two groups
            P, Q = _within(A_next + rest, B_next + rest, threshold)
            theta_next = (1 + (1 + 4 * theta * theta) ** 0.5) / 2
            dA, dB = P - A, Q - B
            uphill = float(xp.sum((A_next - P) * dA) + xp.sum((B_next - Q) * dB)) > 0
            step = 0.0 if uphill else (theta - 1) / theta_next
            A, B, theta = P, Q, 1.0 if uphill else theta_next
            A_next, B_next = A + step * dA, B + step * dB
            if float(xp.sum(dA * dA) + xp.sum(dB * dB)) <= limit:
                break
        self._dual = A, B
        return _kept_pairs(M - A - B, _pair_sizes(A, B) > threshold * (1 - 1e-6))


def _thresholds(M: Array, value: float, factors: Array | None) -> Array:
    """One for each pair."""
    if M.shape[0] != M.shape[1]:
        raise ConfigError(f"penalty='pair' requires weights between the same rows, got shape {M.shape}")
    return diagonal(M) * 0 + value if factors is None else value * factors


def pair_factors(M: Array) -> Array:
    """ω_i = (m + ε) / (size of pair i + ε), m the mean size of the kept pairs, ε a tenth of it."""
    xp, sizes = namespace_of(M), _pair_sizes(M, M)
    kept = xp.where(sizes > 0, sizes * 0 + 1, sizes * 0)
    mean = float(xp.sum(sizes)) / max(float(xp.sum(kept)), 1.0) or 1.0
    return 1.1 * mean / (sizes + 0.1 * mean)


def _within(A: Array, B: Array, bound: Array) -> tuple[Array, Array]:
    """Groups longer than the bound are shortened to it; the diagonal of B is zero."""
    set_diagonal(B, diagonal(B) * 0)
    xp, size = namespace_of(A), _pair_sizes(A, B)
    factor = xp.where(size > bound, bound / xp.where(size > bound, size, size * 0 + 1), size * 0 + 1)
    return A * factor[:, None], B * factor[None, :]


def _pair_dual_norm(G: Array) -> float:
    """min over G = A + B of max_i |row i of A, column i of B|, to 0.1 % from above.

    For weights μ of the groups the best split is A_ij = G_ij μ_j / (μ_i + μ_j), and the squared sizes q_i(μ) are the
    gradient of a concave function whose maximum over Σμ = 1 is the squared norm: Σ μ_i q_i <= norm² <= max q_i.
    """
    xp = namespace_of(G)
    square = G * G
    diag = diagonal(square)
    both = square + square.T
    set_diagonal(both, diag * 0)
    mu, best = diag * 0 + 1 / G.shape[0], math.inf
    for _ in range(_NORM_STEPS):
        share = mu[None, :] / (mu[:, None] + mu[None, :])
        q = diag + xp.sum(both * share * share, axis=1)
        best = min(best, float(xp.max(q)))
        if best <= 1.002 * float(xp.sum(mu * q)):
            break
        mu = mu * q + 1e-12 * float(xp.sum(mu * q))
        mu = mu / xp.sum(mu)
    return math.sqrt(best)


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
    factors: Array | None = None,
) -> SparseStep:
    """One solution. Stops when a step changes M by less than `tolerance` relative to its norm.

    `factors` of "pair" multiply γ, one for each pair; None: 1.
    """
    xp = namespace_of(W)
    C = lipschitz or 2 * spectral_norm(K) * spectral_norm(L)
    Z = W * 0 if start is None else start
    Q, theta, taken = Z, 1.0, 0
    LWK = L @ W @ K
    shrink: Callable[[Array, Any], Array] = functools.partial(prox, penalty=penalty)
    threshold: Any = gamma / C
    if penalty == "pair":
        shrink, threshold = _PairProx(), _thresholds(W, threshold, factors)
    for taken in range(1, steps + 1):
        Z_next = shrink(Q - (2 / C) * (L @ Q @ K - LWK), threshold)
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
    half), and a few steps of FISTA from there decide the entries near the threshold. Overlapping groups have two
    thresholded halves, one for rows and one for columns, and each step is as cheap as for the others.
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
        self,
        gamma: float,
        penalty: str,
        start: Array,
        steps: int = 400,
        tolerance: float = 1e-4,
        factors: Array | None = None,
    ) -> tuple[Array, int]:
        """A solution near `start`, and the steps taken. The penalty parameter balances the two residuals."""
        xp = namespace_of(start)
        copies = 2 if penalty == "pair" else 1
        Z, U, stiff, taken = [start] * copies, [start * 0] * copies, 1e-3 * self.lipschitz, 0
        for taken in range(1, steps + 1):
            target = sum(self._P.T @ (z - u) @ self._Q for z, u in zip(Z, U, strict=True))
            M = self._P @ ((self._HW + stiff * target) / (self._H + copies * stiff)) @ self._Q.T
            if penalty == "pair":
                Z_next = list(_pair_shrunk(M + U[0], M + U[1], _thresholds(M, gamma / stiff, factors)))
            else:
                Z_next = [prox(M + U[0], gamma / stiff, penalty)]
            U = [u + M - z for u, z in zip(U, Z_next, strict=True)]
            apart = sum(float(xp.sum((M - z) ** 2)) for z in Z_next) ** 0.5
            moved = sum(float(xp.sum((z - last) ** 2)) for z, last in zip(Z_next, Z, strict=True)) ** 0.5
            Z = Z_next
            size = float(xp.sum(M * M)) ** 0.5
            if max(apart, moved) <= tolerance * size:
                break
            if taken % 20 == 0 and apart > 5 * moved:
                stiff, U = 2 * stiff, [u / 2 for u in U]
            elif taken % 20 == 0 and moved > 5 * apart:
                stiff, U = stiff / 2, [2 * u for u in U]
        if penalty == "pair":
            return _kept_pairs(Z[0], xp.any(Z[0] != 0, axis=1)), taken
        return Z[0], taken


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
    rounds = _PAIR_ROUNDS if penalty == "pair" else 1
    start = W * 0
    for gamma in sorted(gammas, reverse=True):
        taken, factors = 0, None
        for _ in range(rounds):
            before = 0
            if splitting is not None:
                start, before = splitting.solve(gamma, penalty, start, factors=factors)
            found = fista(
                W, K, L, gamma, penalty=penalty, start=start, steps=steps, tolerance=tolerance, lipschitz=lipschitz,
                factors=factors,
            )  # fmt: skip
            start, taken = found.weights, taken + before + found.steps
            factors = pair_factors(start) if rounds > 1 else None
        yield dataclasses.replace(found, steps=taken)


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
