"""Block conjugate gradients: A X = B for all columns at once, where A is only available as a product.

    found = block_cg(product, B, 1e-8, precondition)       # product(S) = A S, precondition(R) = M⁻¹R
    found.solution, found.steps, found.residual            # the true residual, of the worst column

All columns share one Krylov space, so one step with m columns does more than m steps with one. Residual columns become
(or are) linearly dependent, and the plain recurrence then divides by zero. So the residual block is held as a basis
times coefficients, R = Q C (BCGrQ in Dubrulle's notation), and the basis is recomputed in every step by a
rank-revealing QR factorisation:

    T = A P,   X += P α C  and  Q' s = Q - T α  with  α = (PᵀT)⁻¹PᵀQ,   Z = M⁻¹Q',  Q'ᵀZ = I,   P = Z + P sᵀ,  C = s C

s has fewer rows than columns where directions of the residual have vanished: the search block gets narrower, and every
column of X is still updated through C. Orthogonal transformations do not square the condition number of the residuals;
the inner product with M⁻¹ then needs a Cholesky factor of QᵀM⁻¹Q only, with Q orthonormal.

In exact arithmetic the recurrence makes search directions conjugate; rounding brings old ones back and can cost more
steps than the problem has dimensions. So P is made conjugate to earlier directions explicitly, to as many of the latest
as a fixed amount of memory holds. For a few thousand rows that is all of them, which roughly halves the steps and
solves systems with condition numbers of 1e8 and more in about n / m steps.

By rounding, the residual of the recurrence drifts from the true one, eventually by about u |A| |X|. So each run is
followed by a product that computes the true residual, and by another run for the columns that have not converged, for
as long as that helps.
[O'Leary, Linear Algebra Appl. 29, 1980; Dubrulle, ETNA 12, 2001]
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.linalg import lapack, qr, solve_triangular

MAX_STEPS = 1_000
_DEPENDENT = 1e-14  # directions of the residual block below this fraction of the largest are rounding
_KEPT_BYTES = 1 << 28  # of earlier directions and their products with A
_PATIENCE = 200  # steps without progress before a run gives up
_MIN_GAIN = 0.01  # a step or run counts as progress when it adds this fraction of the total gain so far

Product = Callable[[np.ndarray], np.ndarray]
Start = tuple[np.ndarray, np.ndarray]  # X and A X


class CGResult(NamedTuple):
    """Result of block conjugate gradients."""

    solution: np.ndarray
    steps: int  # products with A, without those that computed the true residual
    residual: float  # |A x - b| / |b| of the worst column, computed from a product with A


def block_cg(
    product: Product,
    B: np.ndarray,
    tolerance: float,
    precondition: Product | None = None,
    start: Start | None = None,
    max_steps: int = MAX_STEPS,
) -> CGResult:
    """Solve A X = B, A symmetric and positive definite, to a relative residual of `tolerance` in every column.

    Columns may be linearly dependent, zero, or of very different norms. `start` is a first guess X and A X; columns for
    which it is worse than 0 start at 0. If the tolerance cannot be reached, the best solution found is returned.
    """
    size = np.linalg.norm(B, axis=0)
    X, R = np.zeros_like(B), B.copy()
    if start is not None:
        guessed = B - start[1]
        better = np.linalg.norm(guessed, axis=0) < size
        X[:, better], R[:, better] = start[0][:, better], guessed[:, better]
    left, steps, energy = np.linalg.norm(R, axis=0), 0, np.zeros(B.shape[1])
    nearest, least = X.copy(), left.copy()
    while steps < max_steps:
        todo = np.flatnonzero(~(least <= tolerance * size))
        if not len(todo):
            break
        length, unit = left[todo], R[:, todo] / left[todo]
        change, made = _one_run(product, precondition, unit, tolerance * size[todo] / length, max_steps - steps)
        tried = X.copy()
        tried[:, todo] += change * length
        true = B - product(tried)
        steps += made
        # The decrease of half the squared error in the norm of A, over |b|²: the quantity that the steps minimise. The
        # residual may have grown meanwhile.
        fallen = 0.5 * np.sum(change * (unit + true[:, todo] / length), axis=0) * (length / size[todo]) ** 2
        now, energy[todo] = np.linalg.norm(true[:, todo], axis=0), energy[todo] + np.maximum(fallen, 0.0)
        gained = (now < 0.5 * length) | (fallen > _MIN_GAIN * energy[todo])
        nearer, better = todo[now < least[todo]], todo[fallen > 0]
        nearest[:, nearer], least[nearer] = tried[:, nearer], now[now < least[todo]]
        X[:, better], R[:, better], left[better] = tried[:, better], true[:, better], now[fallen > 0]
        if not gained.any():
            break
    return CGResult(nearest, steps, float(np.max(least / np.where(size > 0, size, 1.0), initial=0.0)))


def _one_run(
    product: Product, precondition: Product | None, R: np.ndarray, wanted: np.ndarray, most: int
) -> tuple[np.ndarray, int]:
    """Reduce columns R of length 1 until each is shorter than `wanted`, or no progress is made; and the steps taken."""
    X, basis, earlier, progress = np.zeros_like(R), _basis(R, precondition), _Earlier(len(R)), _Progress(wanted)
    if basis is None:
        return X, 0
    Q, P, C = basis.Q, basis.Z, basis.s
    for step in range(1, most + 1):
        T = product(P)
        D, AD = _orthonormal(P, T, earlier.room)  # DᵀAD = I
        if not D.shape[1]:
            return X, step
        part = D.T @ Q
        X += D @ (part @ C)
        basis = _basis(Q - AD @ part, precondition)
        if basis is None or not progress.should_continue(np.linalg.norm(basis.lengths @ C, axis=0), part @ C):
            return X, step
        P = basis.Z + P @ basis.s.T
        earlier.keep(D, AD)
        if not earlier.room:  # the whole space has been searched; what is left is rounding
            return X, step
        earlier.remove_from(P)
        Q, C = basis.Q, basis.s @ C
    return X, most


class _Progress:
    """Whether a run is worth another step."""

    def __init__(self, wanted: np.ndarray) -> None:
        self._wanted, self._shortest, self._waited = wanted, math.inf, 0
        self._energy = self._counted = np.zeros(len(wanted))

    def should_continue(self, lengths: np.ndarray, taken: np.ndarray) -> bool:
        """`lengths`: current norms of the residuals; `taken`: step of each column along A-orthonormal directions."""
        worst = float(np.max(lengths / self._wanted))
        # The residual may be constant for long while the error, in the norm of A, still falls: by |taken|² per step.
        self._energy = self._energy + np.sum(taken**2, axis=0)
        further = bool((self._energy > (1 + _MIN_GAIN) * self._counted)[lengths > self._wanted].any())
        if worst < 0.9 * self._shortest or further:
            self._shortest, self._counted, self._waited = min(worst, self._shortest), self._energy, 0
        else:
            self._waited += 1
        return worst > 0.5 and self._waited <= _PATIENCE


class _Earlier:
    """The latest search directions of a run, A-orthonormal, and their products with A."""

    def __init__(self, rows: int) -> None:
        self._rows, self._columns, self._kept = rows, 0, deque[tuple[np.ndarray, np.ndarray]]()

    @property
    def room(self) -> int:
        """Dimensions not spanned by the directions kept."""
        return max(self._rows - self._columns, 0)

    def keep(self, D: np.ndarray, AD: np.ndarray) -> None:
        self._kept.append((D, AD))
        self._columns += D.shape[1]
        while 16 * self._rows * self._columns > _KEPT_BYTES:
            self._columns -= self._kept.popleft()[0].shape[1]

    def remove_from(self, P: np.ndarray) -> None:
        """Make P conjugate to the directions kept."""
        for D, AD in self._kept:
            P -= D @ (AD.T @ P)


class _Basis(NamedTuple):
    """R = Q s with QᵀM⁻¹Q = I, Z = M⁻¹Q; |R C| is |lengths C|, column by column."""

    Q: np.ndarray
    Z: np.ndarray
    s: np.ndarray
    lengths: np.ndarray


def _basis(R: np.ndarray, precondition: Product | None) -> _Basis | None:
    """A basis of the columns of R; None where R is zero or not finite."""
    if not np.isfinite(R).all():
        return None
    Q, upper = np.linalg.qr(R)
    turn, upper, order = qr(upper, mode="economic", pivoting=True)  # of a few columns and as many rows
    sizes = np.abs(np.diagonal(upper))
    rank = int(np.sum(sizes > _DEPENDENT * sizes.max(initial=0.0)))
    if not rank:
        return None
    lengths = np.empty((rank, R.shape[1]))
    lengths[:, order] = upper[:rank]
    Q = Q @ turn[:, :rank]
    if precondition is None:
        return _Basis(Q, Q, lengths, lengths)
    Z = precondition(Q)
    L = _lower(Q.T @ Z)
    if L is None:
        return None
    Q, Z = (solve_triangular(L, columns.T, lower=True).T for columns in (Q, Z))
    return _Basis(Q, Z, L.T @ lengths, lengths)


def _orthonormal(P: np.ndarray, T: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` A-orthonormal directions D that span the columns of P, and A D, given T = A P."""
    G = P.T @ T
    if not (np.isfinite(G).all() and (np.diagonal(G) > 0).all()):
        return P[:, :0], T[:, :0]
    size = np.sqrt(np.diagonal(G))
    L, order, rank, _ = lapack.dpstrf(0.5 * (G + G.T) / size / size[:, None], lower=1, tol=_DEPENDENT)
    rank = min(rank, most)
    chosen, L = order[:rank] - 1, L[:rank, :rank]
    D, AD = (solve_triangular(L, (columns[:, chosen] / size[chosen]).T, lower=True).T for columns in (P, T))
    return D, AD


def _lower(G: np.ndarray) -> np.ndarray | None:
    """L with L Lᵀ = G, or None where rounding has made G indefinite."""
    try:
        L: np.ndarray = np.linalg.cholesky(0.5 * (G + G.T))
    except np.linalg.LinAlgError:
        return None
    return L if np.isfinite(L).all() else None
