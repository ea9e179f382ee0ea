"""Choice of representative rows: randomly pivoted Cholesky, k-means++ and uniform sampling.

    chosen, F = rpcholesky(kernel, X, rank=500, seed=0)     # K ≈ F Fᵀ, exact at the chosen rows
    C = X[choose_centres(kernel, X, 500, "rpcholesky", seed=0)]

RPCholesky draws pivots in proportion to the diagonal of K - F Fᵀ, the part that earlier pivots leave unexplained.
Pivots are proposed in blocks, and a proposal is accepted with the probability it has given those accepted before it:
the same distribution as one by one, at the speed of matrix products.
[Diaz, Epperly, Frangella, Tropp, Webber, arXiv 2304.12465; blocks: Epperly, Tropp, Webber, arXiv 2410.03969]
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kme_dist.backend import cholesky
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take
from kme_dist.errors import ConfigError

CHOICES = ("rpcholesky", "leverage", "kmeans++", "uniform")
TILE_ROWS = 2_048  # of a tile
SCORE_RANK = 500  # pivots from which leverage scores are computed
_EXHAUSTED = {"float32": 1e-5, "float64": 1e-12}  # share of the trace that is rounding, not kernel


def propose(residual: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Row numbers drawn in proportion to the residual diagonal; a row may be proposed twice."""
    edges = np.cumsum(residual)
    found = np.searchsorted(edges, rng.random(count) * edges[-1], side="right")
    return np.asarray(np.minimum(found, len(residual) - 1))


def accept(H: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The accepted proposals, and the Cholesky factor of their block.

    H is the block of K - F Fᵀ at the proposals (overwritten). Proposal i is accepted with probability (residual of H_ii
    after those accepted before it) / H_ii.
    """
    first, kept = np.diagonal(H).copy(), []
    L = np.zeros_like(H)
    for i in range(len(H)):
        left = H[i, i]
        if left <= 1e-10 * first[i] or rng.random() * first[i] >= left:
            continue
        kept.append(i)
        L[i:, i] = H[i:, i] / np.sqrt(left)
        H[i:, i:] -= np.outer(L[i:, i], L[i:, i])
    chosen = np.array(kept, dtype=np.int64)
    return chosen, L[np.ix_(chosen, chosen)]


def block_size(rank: int) -> int:
    """Proposals per block: few enough to reject little, enough for efficient matrix products."""
    return int(min(max(rank // 8, 16), 256))


def rpcholesky(kernel: Kernel, X: Any, rank: int, seed: int, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Pivots and factor F (n x rank) with K ≈ F Fᵀ; fewer where K has a lower numerical rank.

    Tiles of rows are computed by `threads` threads; the bits are the same for any number of them.
    """
    rng = np.random.default_rng([seed, 3])
    n = row_count(X)
    prepared = kernel.prepare(X)
    diagonal = kernel.diag(X)
    dtype, residual = diagonal.dtype, diagonal.astype(np.float64)
    enough = _EXHAUSTED[dtype.name] * residual.sum()
    F = np.empty((n, min(rank, n)), dtype=dtype)
    pivots, done = np.empty(0, np.int64), 0
    with ThreadPoolExecutor(threads) as pool:
        while done < F.shape[1] and residual.sum() > enough:
            proposed = propose(residual, min(block_size(rank), F.shape[1] - done), rng)
            rows, beside = _rows(prepared, proposed), F[proposed, :done]
            H = kernel.evaluate(rows, rows).astype(np.float64) - beside @ beside.T
            kept, L = accept(np.asarray(H, dtype=np.float64), rng)
            chosen = proposed[kept]
            if not len(chosen):
                residual[proposed] = 0.0  # only rounding is left of them
                continue
            added = slice(done, done + len(chosen))
            there, beside = _rows(prepared, chosen), beside[kept]

            def extend(tile: slice, old: int = done, new: slice = added, there: Any = there, beside: Any = beside,
                       L: np.ndarray = L) -> None:  # fmt: skip
                part = columns(kernel, take(prepared, tile), there, F[tile, :old], beside, L)
                F[tile, new] = part
                residual[tile] -= np.einsum("ij,ij->i", part, part, dtype=np.float64)

            for _ in pool.map(extend, row_blocks(n, TILE_ROWS)):
                pass  # raises the error of a tile
            residual[chosen] = 0.0
            np.maximum(residual, 0.0, out=residual)
            pivots, done = np.concatenate([pivots, chosen]), added.stop
    return pivots, F[:, :done]


def columns(
    kernel: Kernel,
    X: Any,
    chosen: Any,
    F: np.ndarray,
    F_chosen: np.ndarray,
    L: np.ndarray,
    roots: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
) -> np.ndarray:
    """New columns (K(X, chosen) - F F_chosenᵀ) L⁻ᵀ for prepared rows; of √w K √w with the `roots` √w of both sides."""
    residual = kernel.evaluate(X, chosen)
    if roots[0] is not None and roots[1] is not None:
        residual = residual * roots[0].astype(residual.dtype)[:, None] * roots[1].astype(residual.dtype)[None, :]
    residual -= F @ F_chosen.T
    inverse = np.linalg.inv(L).astype(residual.dtype)  # a small, well-scaled triangle: a product beats a solve
    return np.asarray(residual @ inverse.T)


def _rows(prepared: Any, numbers: np.ndarray) -> Any:
    if isinstance(prepared, tuple):
        return tuple(_rows(part, numbers) for part in prepared)
    return prepared[numbers] if hasattr(prepared, "ndim") else [prepared[i] for i in numbers]


def choose_centres(kernel: Kernel, X: Any, count: int, how: str, seed: int, threads: int = 1) -> np.ndarray:
    """Row numbers of (at most) `count` centres among the rows of X, in ascending order."""
    n = row_count(X)
    if how not in CHOICES:
        raise ConfigError(f"centre_choice={how!r} is unknown; choose one of {', '.join(CHOICES)}")
    if count >= n and how == "uniform":
        return np.arange(n)
    if how == "rpcholesky":
        return np.sort(rpcholesky(kernel, X, min(count, n), seed, threads)[0])
    if how == "leverage":
        return by_leverage(kernel, X, min(count, n), seed, threads)[0]
    rng = np.random.default_rng([seed, 4])
    if how == "uniform":
        return np.sort(rng.choice(n, count, replace=False))
    return np.sort(_kmeans_plus_plus(kernel, X, min(count, n), rng))


def by_leverage(kernel: Kernel, X: Any, count: int, seed: int, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers drawn by approximate ridge leverage scores, in ascending order; and the rate of each, with the mean
    1 over all rows.

    RPCholesky costs n count², scores n rank² with a few hundred pivots: K ≈ F Fᵀ + diag(rest), whose leverage at a
    shift μ is about f (FᵀF + μI)⁻¹ f + rest / (rest + μ). At μ = what the pivots leave unexplained, on average, rows
    that they represent well are rarely drawn again.
    """
    n = row_count(X)
    if count >= n:
        return np.arange(n), np.ones(n)
    _, F = rpcholesky(kernel, X, min(SCORE_RANK, count), seed, threads)
    rest = np.maximum(kernel.diag(X) - np.einsum("ij,ij->i", F, F), 0.0).astype(np.float64)
    shift = max(float(rest.mean()), 1e-6 * float(np.mean(kernel.diag(X))))
    H = np.asfortranarray(F.T @ F, dtype=np.float64)
    np.einsum("ii->i", H)[...] += shift
    half, scores = cholesky(H), rest / (rest + shift)
    for part in row_blocks(n, TILE_ROWS):
        scores[part] += np.sum(half.half_solve(F[part].T.astype(np.float64)) ** 2, axis=0)
    rates = scores / scores.mean()
    # The largest log rate + Gumbel noise: a draw without replacement in proportion to the rates.
    noise = np.random.default_rng([seed, 8]).gumbel(size=n)
    chosen = np.sort(np.argpartition(-(np.log(rates) + noise), count)[:count])
    return chosen, rates[chosen]


def _kmeans_plus_plus(kernel: Kernel, X: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Each centre is drawn in proportion to the squared distance, in the kernel's metric, to the nearest one so far."""
    prepared, diagonal = kernel.prepare(X), kernel.diag(X).astype(np.float64)
    chosen = [int(rng.integers(len(diagonal)))]
    nearest = np.full(len(diagonal), np.inf)
    while len(chosen) < count:
        last = np.array(chosen[-1:])
        k = kernel.evaluate(prepared, _rows(prepared, last))[:, 0]
        np.minimum(nearest, diagonal + diagonal[last] - 2 * k, out=nearest)
        nearest[last] = 0.0
        np.maximum(nearest, 0.0, out=nearest)
        if not nearest.sum() > 1e-12 * diagonal.sum():
            break
        chosen.append(int(propose(nearest, 1, rng)[0]))
    return np.array(chosen)


def unexplained(kernel: Kernel, X: Any, centres: Any) -> float:
    """trace(K - K_nc K_cc⁻¹ K_cn) / trace(K): the fraction of the kernel that the centres leave unexplained."""
    diagonal, C = kernel.diag(X), kernel.prepare(centres)
    K_cc = np.asfortranarray(kernel.gram(centres), dtype=np.float64)
    jitter = 1e-14 * len(K_cc) * float(np.trace(K_cc)) / len(K_cc)
    K_cc[np.diag_indices(len(K_cc))] += jitter
    factor, prepared, left = cholesky(K_cc), kernel.prepare(X), 0.0
    for tile in row_blocks(row_count(X), TILE_ROWS):
        half = factor.half_solve(kernel.evaluate(take(prepared, tile), C).T)
        left += float(np.sum(diagonal[tile], dtype=np.float64) - np.sum(half * half))
    return max(left, 0.0) / float(np.sum(diagonal, dtype=np.float64))
