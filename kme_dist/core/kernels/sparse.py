"""Sparse rows (scipy's CSR arrays) for kernels of inner products and of differences, never converted to dense ones.

    divided(X, length_scale)       x_d / length_scale_d
    squared_norms(Z)               |z|², as a column
    beside(Z, a, b)                [Z, a, b]; for sparse Z a `Bordered`, since the columns a and b are dense
    cross_sums(N, Z, Z2)           Σ_ij N_ij z_id z'_jd for every column d
    deviations_of(X)               the standard deviation of every column
    as_rows_of(X, rows)            rows like those of X, sparse or dense

All of them take dense rows as well, on any device. Products of two sparse tiles cost the pairs of entries that both
rows have, and the result, a tile of the Gram matrix, is dense.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kme_dist.backend import Array, is_sparse, like, namespace_of

_PAIR_COST = 8  # of a pair of entries, in multiplications of a matrix product
_PAIRS = 1 << 22  # of entries at a time


class Bordered:
    """[Z, a, b] for sparse Z. Has what tiles of prepared rows need: slices of rows, Z or a single column, products."""

    ndim = 2

    def __init__(self, Z: Any, ends: np.ndarray) -> None:
        self.Z, self.ends = Z, ends
        self.shape, self.dtype = (Z.shape[0], Z.shape[1] + ends.shape[1]), Z.dtype

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, ...)
        width = self.Z.shape[1]
        if columns is ...:
            return Bordered(self.Z[rows], self.ends[rows])
        if isinstance(columns, slice):
            if columns != slice(None, width):
                raise IndexError(f"columns {columns} of sparse rows")
            return self.Z[rows]
        return self.ends[rows, columns - width]

    @property
    def T(self) -> _Transposed:
        return _Transposed(self)

    def __matmul__(self, other: Any) -> np.ndarray:
        """[Z, a, b] [Z', a', b']ᵀ as a dense tile; the other side may be dense."""
        width = self.Z.shape[1]
        if isinstance(other, _Transposed):
            return np.asarray((self.Z @ other.rows.Z.T).toarray() + self.ends @ other.rows.ends.T)
        return np.asarray(self.Z @ other[:width, :] + self.ends @ other[width:, :])


class _Transposed:
    """The transpose of a `Bordered`, as a factor on the right."""

    __array_ufunc__ = None  # a product with a dense array is ours

    def __init__(self, rows: Bordered) -> None:
        self.rows = rows

    def __rmatmul__(self, other: np.ndarray) -> np.ndarray:
        return np.asarray((self.rows @ other.T).T)


def divided(X: Array, length_scale: Any) -> Array:
    if not is_sparse(X):
        return X / like(length_scale, X)
    return X.multiply(1.0 / np.asarray(length_scale)).tocsr().astype(X.dtype, copy=False)


def squared_norms(Z: Array) -> Array:
    if is_sparse(Z):
        return np.asarray((Z * Z).sum(axis=1)).reshape(-1, 1)
    return namespace_of(Z).sum(Z * Z, axis=1, keepdims=True)


def beside(Z: Array, a: Array, b: Array) -> Any:
    return Bordered(Z, np.concatenate([a, b], axis=1)) if is_sparse(Z) else namespace_of(Z).concat([Z, a, b], axis=1)


def cross_sums(N: Array, Z: Array, Z2: Array) -> Array:
    if is_sparse(Z) and is_sparse(Z2):
        left, right = Z.tocsc(), Z2.tocsc()
        pairs = np.diff(left.indptr).astype(np.int64) * np.diff(right.indptr)
        if _PAIR_COST * int(pairs.sum()) < Z2.shape[0] * (Z.nnz + Z.shape[1]):
            return _by_pairs(N, left, right, pairs).astype(Z.dtype)
    if is_sparse(Z2):
        return np.asarray(Z2.multiply(N.T @ Z).sum(axis=0)).ravel()
    return namespace_of(Z2).sum(Z2 * (N.T @ Z), axis=0)


def _by_pairs(N: np.ndarray, left: Any, right: Any, pairs: np.ndarray) -> np.ndarray:
    """Only over pairs of entries of the same column: few, where columns are nearly empty, as those of words."""
    found, ends = np.zeros(len(pairs)), np.cumsum(pairs)
    start = 0
    while start < len(pairs):  # some columns at a time, so that memory is bounded
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _PAIRS, side="right")))
        own = pairs[start:stop]
        column = np.repeat(np.arange(start, stop), own)
        number = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)  # of the pair within its column
        width = np.diff(right.indptr)[column]
        i, j = left.indptr[column] + number // width, right.indptr[column] + number % width
        values = N[left.indices[i], right.indices[j]] * left.data[i] * right.data[j]
        found[start:stop] = np.bincount(column - start, values, minlength=stop - start)
        start = stop
    return found


def deviations_of(X: Any) -> np.ndarray:
    if not is_sparse(X):
        return np.asarray(np.std(X, axis=0, dtype=np.float64))
    X = X.astype(np.float64, copy=False)
    mean, squares = (np.asarray(part.mean(axis=0)).ravel() for part in (X, X * X))
    return np.asarray(np.sqrt(np.maximum(squares - mean**2, 0.0)))


def as_rows_of(X: Any, rows: np.ndarray) -> Any:
    return type(X)(rows) if is_sparse(X) else rows
