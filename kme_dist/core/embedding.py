"""The multiclass conditional embedding itself: what is computed once the kernel and λ are known.

    f(x) = Vᵀ k(x),  V = (K + nλI)⁻¹ Y        decision probabilities; may leave [0, 1]     [HNR, equation 5]
    p̃_c(x) = max(f_c, 0) / Σ_j max(f_j, 0)    clip-normalised probabilities                 [HNR, equation 6]

Whatever solver found them, a fitted embedding is a kernel, centres and weights: f(x) = Vᵀ k(centres, x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kme_dist.backend import Array, cholesky, like, namespace_of, set_diagonal
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take
from kme_dist.core.objective import Workspace

# Rows of queries in one tile: wide enough for the matrix products, small enough to stay in cache.
_QUERY_ROWS = 512


@dataclass(frozen=True)
class Embedding:
    """f(x) = Vᵀ k(centres, x): `weights` V has one row per centre and one column per class."""

    kernel: Kernel
    centres: Any
    weights: Array
    regularization: float

    def decision(self, X: Any) -> Array:
        """Decision probabilities at the rows of X, tile by tile: no (rows x centres) matrix is ever held."""
        centres, queries = self.kernel.prepare(self.centres), self.kernel.prepare(X)
        V = self.weights
        tiles = [
            self.kernel.evaluate(take(queries, rows), centres) @ V for rows in row_blocks(row_count(X), _QUERY_ROWS)
        ]
        return namespace_of(V).concat(tiles, axis=0) if tiles else V[:0, :]


def solve_dual(
    kernel: Kernel, X: Any, Y: Array, regularization: float, jitter: float = 0.0, workspace: Workspace | None = None
) -> Array:
    """V = (K + nλI)⁻¹ Y by one Cholesky factorisation in place."""
    n, diag = row_count(X), kernel.diag(X)
    K = kernel.gram(X, out=(workspace or Workspace()).square(n, diag))
    set_diagonal(K, diag + (n * regularization + jitter))
    return cholesky(K).solve(Y)


def leave_one_out(
    kernel: Kernel, X: Any, Y: Array, regularization: float, workspace: Workspace | None = None
) -> tuple[Array, Array]:
    """Decision probabilities of every row under the model fitted without it, and V.

    P_i = Y_i - V_i / [A⁻¹]_ii, exactly what n refits would give (with the same shift nλ).
    """
    n, diag = row_count(X), kernel.diag(X)
    K = kernel.gram(X, out=(workspace or Workspace()).square(n, diag))
    set_diagonal(K, diag + n * regularization)
    factor = cholesky(K)
    V = factor.solve(Y)
    return Y - V / factor.inverse_diagonal()[:, None], V


def clip_normalise(P: Array, floor: float = 0.0) -> Array:
    """Clip from below and divide by the sum; rows without a positive entry become uniform.   [HNR, equation 6]

    The paper clips at zero, and so calls some labels impossible that do occur. A small positive floor does not.
    """
    xp = namespace_of(P)
    clipped = xp.where(floor < P, P, P * 0 + floor)
    total = xp.sum(clipped, axis=1, keepdims=True)
    uniform = P * 0 + 1 / P.shape[1]
    return xp.where(total > 0, clipped / xp.where(total > 0, total, total * 0 + 1), uniform)


def entropy(P: Array, floor: float = 0.0) -> Array:
    """Entropy of the clip-normalised probabilities, in nats."""
    return _self_information(clip_normalise(P, floor))


def rkhs_entropy(P: Array) -> Array:
    """Σ_c f_c u_c with u_c = -log f_c where f_c > 0, else 0: the embedding's own estimate of E[-log p(Y|x)]."""
    return _self_information(P)


def _self_information(P: Array) -> Array:
    xp = namespace_of(P)
    safe = xp.where(P > 0, P, P * 0 + 1)
    return -xp.sum(P * xp.log(safe), axis=1)


def expectation(P: Array, g: Any) -> Array:
    """E[g(Y) | x] = Σ_c g(c) f_c(x); `g` holds one value (or one row of values) per class."""
    return P @ like(g, P)


def log_loss(Y: Array, P: Array, floor: float = 0.0) -> Array:
    """Mean of -log p̃_y over the rows, p̃ clip-normalised with `floor`; a label called impossible costs -log 1e-15."""
    xp = namespace_of(P)
    p = xp.sum(Y * clip_normalise(P, floor), axis=1)
    return -xp.mean(xp.log(xp.where(p > 1e-15, p, p * 0 + 1e-15)))
