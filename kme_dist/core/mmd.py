"""The maximum mean discrepancy of two samples: its unbiased, block and linear-time estimates, and their null laws.

MMD² = E k(x, x') + E k(y, y') - 2 E k(x, y)

unbiased   all pairs but the diagonal; under the null N MMD² tends to Σ_l λ_l (z_l² - 1)/(ρ_x ρ_y), λ_l the eigenvalues
           of the centred kernel, ρ the shares of the samples; or by permuting the rows of both samples
block      the mean of unbiased estimates of blocks of rows: asymptotically normal, variance from the blocks
linear     k(x, x') + k(y, y') - k(x, y') - k(x', y) averaged over disjoint pairs of rows: normal, O(n)

Rows and Gram matrices may be of any array library; the results, a number per block or draw, are on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, diagonal, namespace_of, to_host
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take

_PAIR_ROWS = 32  # rows of a tile whose diagonal is used


def unbiased(S_xx: Any, S_yy: Any, S_xy: Any, m: int, n: int) -> Any:
    """From sums over pairs (without the diagonal in S_xx and S_yy)."""
    return S_xx / (m * (m - 1)) + S_yy / (n * (n - 1)) - 2 * S_xy / (m * n)


def unbiased_of_gram(K_xx: Array, K_yy: Array, K_xy: Array) -> float:
    xp, (m, n) = namespace_of(K_xy), K_xy.shape
    S_xx, S_yy = (xp.sum(K) - xp.sum(diagonal(K)) for K in (K_xx, K_yy))
    return float(unbiased(S_xx, S_yy, xp.sum(K_xy), m, n))


def block_values(kernel: Kernel, X: Any, Y: Any, size: int) -> np.ndarray:
    """Unbiased estimates of consecutive blocks of `size` rows of either sample; a smaller last block is dropped."""
    n = min(row_count(X), row_count(Y)) // size * size
    found = []
    for rows in row_blocks(n, size):
        x, y = take(X, rows), take(Y, rows)
        found.append(unbiased_of_gram(kernel.gram(x), kernel.gram(y), kernel.gram(x, y)))
    return np.asarray(found)


def linear_values(kernel: Kernel, X: Any, Y: Any) -> np.ndarray:
    """k(x, x') + k(y, y') - k(x, y') - k(x', y) of consecutive pairs of rows."""
    n = min(row_count(X), row_count(Y)) // 2 * 2
    even, odd = slice(0, n, 2), slice(1, n, 2)
    x2 = kernel.prepare(take(X, odd))
    x, y, y2 = (kernel.prepare_beside(take(*part), x2) for part in ((X, even), (Y, even), (Y, odd)))
    within = _along(kernel, x, x2, n // 2) + _along(kernel, y, y2, n // 2)
    return to_host(within - _along(kernel, x, y2, n // 2) - _along(kernel, x2, y, n // 2))


def _along(kernel: Kernel, left: Any, right: Any, count: int) -> Array:
    """k(left_i, right_i) for prepared rows, by small tiles."""
    parts = [diagonal(kernel.evaluate(take(left, rows), take(right, rows))) for rows in row_blocks(count, _PAIR_ROWS)]
    return namespace_of(parts[0]).concat(parts, axis=0) if parts else np.zeros(0)


def spectral_null(K: Array, m: int, n: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Draws of the unbiased statistic under the null, from the eigenvalues of the pooled rows' centred Gram matrix."""
    xp, size, total = namespace_of(K), K.shape[0], m + n
    K = astype(K, "float64")
    along = xp.mean(K, axis=0)
    centred = K - along[None, :] - along[:, None] + xp.mean(K)
    values = to_host(xp.linalg.eigh(centred)[0]) / size
    values = values[values > 1e-12 * max(values.max(initial=0.0), 0.0)]
    shares = m * n / total**2
    z = rng.standard_normal((draws, len(values)))
    return np.asarray((z * z - 1) @ values / (shares * total))
