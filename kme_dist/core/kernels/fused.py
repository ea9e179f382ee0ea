"""Tiles finished on a GPU by CUDA kernels of our own (`kme_dist/tiles.cu`).

Profile, scale and clamps take one pass over the tile, and the product with V does not write the tile back.
`stationary.py` makes a `Tile` where arrays are CuPy's and the source compiles, else it evaluates the plain expression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, compiled, namespace_of, precision

SOURCE = "tiles.cu"
PROFILES = ("gaussian", "matern_12", "matern_32", "matern_52", "laplace")  # numbered as in tiles.cu
THREADS, ROWS = 128, 8  # of a block, as in tiles.cu
MAX_CLASSES = 32  # for more columns of V two passes over the tile cost less than reading it for every 16 columns
_PASSES = (4, 8, 16)  # columns of V in one pass
_REAL = {"float32": "float", "float64": "double"}


def defines(dtype: str, profile: str, near: bool, classes: int) -> tuple[str, ...]:
    """The options that select a variant of the source."""
    values = {"REAL": _REAL[dtype], "PROFILE": PROFILES.index(profile), "NEAR": int(near), "CLASSES": classes}
    return tuple(f"-D{name}={value}" for name, value in values.items())


def multiplies(V: Array, reference: Array) -> bool:
    """Whether V is multiplied by tiles whose columns are the rows of `reference`, without writing the tiles back."""
    if V.ndim != 2 or V.dtype != reference.dtype or V.shape[0] != reference.shape[0]:
        return False  # for what does not fit, the plain expression has the error
    return 0 < int(V.shape[1]) <= MAX_CLASSES


def _writable(out: Array, dtype: Any) -> bool:
    """Whether the source can write there: entries of a row are neighbours."""
    return out is not None and bool(out.dtype == dtype and out.strides[1] == out.itemsize)


@dataclass(frozen=True)
class Tile:
    """A tile before its profile is applied: the product of prepared rows, and the rows themselves; see tiles.cu.

    Its methods return None where the source does not compile.
    """

    profile: str
    variance: float
    rows: Array  # (rows, width)
    columns: Array  # (columns, width)
    product: Array = None  # (rows, columns); None for the Laplace kernel
    near: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.rows.shape[0]), int(self.columns.shape[0])

    def finish(self, out: Array = None) -> Array | None:
        """The tile of kernel values: into `out`, else over the product."""
        if not _writable(out, self.rows.dtype):
            out = namespace_of(self.rows).empty(self.shape, self.rows.dtype) if self.product is None else self.product
        n, m = self.shape
        return self._launch("finish", 4, (-(-n // ROWS), -(-m // THREADS)), out, self.rows, 0)

    def times(self, V: Array, total: Array = None) -> Array | None:
        """`total` (overwritten; None: zeros) plus the tile times V; quickest for a V that is stored by columns."""
        xp, (n, _), classes = namespace_of(V), self.shape, int(V.shape[1])
        if total is not None and not _writable(total, V.dtype):
            return None if (part := self.times(V)) is None else total + part
        total = xp.zeros((n, classes), V.dtype) if total is None else total
        wide = next((size for size in _PASSES if size >= classes), _PASSES[-1])
        grid = (-(-n // (ROWS // 2 if wide > 8 else ROWS)), -(-classes // wide))
        return self._launch("times", wide, grid, total, xp.asfortranarray(V), classes)

    def _launch(self, name: str, wide: int, grid: tuple[int, int], out: Array, V: Array, classes: int) -> Array | None:
        module = compiled(SOURCE, defines(precision(self.rows), self.profile, self.near, wide))
        if module is None:
            return None
        xp = namespace_of(self.rows)
        product = self.rows if self.product is None else self.product  # a pointer that is not read
        rows, columns = self.rows, self.columns.T if self.product is None else self.columns
        steps = [np.int64(array.strides[0] // array.itemsize) for array in (product, out)]
        sizes = [np.int32(size) for size in (*self.shape, classes, rows.shape[1])]
        scale = [np.float64(self.variance), np.float64(math.log(self.variance))]
        rows, columns = xp.ascontiguousarray(rows), xp.ascontiguousarray(columns)
        arguments = (product, steps[0], out, steps[1], V, rows, columns, *sizes, *scale)
        module.get_function(name)(grid, (THREADS,), arguments)
        return out
