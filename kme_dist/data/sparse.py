"""Sparse rows in memory: scipy's CSR arrays, with a length, that become dense only where a computation has to.

Kernels of inner products and differences, scaling without a shift and random features use them as they are. Whatever
needs a matrix (`np.asarray`) gets a dense copy of the rows it holds, a batch or a sample, up to a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack

from kme_dist.errors import DataError

DENSE_BYTES = 512 << 20  # of a dense copy


class SparseRows(csr_array):  # type: ignore[misc]
    """Rows in CSR format."""

    def __len__(self) -> int:
        return int(self.shape[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        kind = np.dtype(dtype or self.dtype)
        rows, width = self.shape
        if rows * width * kind.itemsize > DENSE_BYTES:
            raise DataError(
                f"{rows:,} sparse rows of {width:,} features would take {rows * width * kind.itemsize >> 20:,} MiB as "
                "dense rows, which this computation needs; use a gaussian, matern, linear or polynomial kernel with "
                "solver='cholesky', 'tiled' or 'pcg', a smaller batch_size, or fewer features"
            )
        return np.asarray(self.toarray(), kind)


def is_sparse(X: Any) -> bool:
    return hasattr(X, "indptr")


def as_sparse_rows(X: Any) -> SparseRows:
    """Sparse rows of any kind, entries sorted and without repetitions and zeros, so that equal rows are equal bytes."""
    found = SparseRows(X, copy=not isinstance(X, SparseRows))
    found.sum_duplicates()
    found.eliminate_zeros()
    return found


def joined_sparse(parts: Sequence[Any]) -> SparseRows:
    return SparseRows(vstack([csr_array(part) for part in parts], format="csr"))


def sparse_parts(X: Any) -> dict[str, np.ndarray]:
    """The arrays that sparse rows consist of."""
    return {"data": X.data, "indices": X.indices, "indptr": X.indptr, "shape": np.array(X.shape)}


def from_parts(parts: Sequence[np.ndarray], shape: Sequence[int]) -> SparseRows:
    """Rows from data, indices and indptr."""
    return SparseRows(tuple(parts), shape=tuple(int(size) for size in shape))
