"""Rows in memory with the interface of a data set.

    rows = ArrayRows(X, codes, classes=["cat", "dog"])
    rows.read_rows(0, 100); rows.take(np.array([5, 3])); rows.split_statistics()
    rows.spill(folder)                   # then it pickles as two files that workers on this machine memory-map

Everything that affects a result (chunk boundaries, ranges and moments, batches) is the same as for a data set that
`ingest` creates from the same rows in double precision, so a model does not depend on where its rows are stored.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.data.dataset import RowSource, Span, generated_names, joined
from kme_dist.data.sparse import from_parts, is_sparse, sparse_parts
from kme_dist.data.statistics import Statistics
from kme_dist.data.writer import CHUNK_BYTES, SHARD_BYTES, ChunkLayout, digest, padded_sum, weight_totals
from kme_dist.errors import DataError, counted

OUTPUT_ROWS = 8192  # rows of a chunk of predictions, where the rows have no chunks


class ArrayRows(RowSource):
    """Rows and labels in memory. X is a matrix (also a sparse one), or a list that a kernel accepts; y holds codes into
    `classes`."""

    kind = "array"
    output_rows = OUTPUT_ROWS

    def __init__(
        self,
        X: Any,
        y: np.ndarray | None,
        classes: Sequence[Any] | np.ndarray | None = None,
        feature_names: Sequence[str] | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        # C-ordered, as a data set returns them: sums in another memory order would round differently.
        self._X, self._y = np.ascontiguousarray(X) if isinstance(X, np.ndarray) else X, y
        self.path, self.splits, self.shuffled = "the rows in memory", {}, None
        self.rows = int(X.shape[0]) if hasattr(X, "shape") else len(X)
        self.features = int(np.prod(X.shape[1:])) if hasattr(X, "shape") else 0
        given = range(self.features) if feature_names is None else feature_names
        self.feature_names = [f"x{name}" if feature_names is None else str(name) for name in given]
        self.named = not generated_names(self.feature_names)
        # An array keeps its type: the labels of a model have the type that the user passed.
        self.classes = classes if classes is None or isinstance(classes, np.ndarray) else list(classes)
        layout = ChunkLayout.choose(8 * max(1, self.features), CHUNK_BYTES, SHARD_BYTES, "none")
        self.chunk_rows, self._shard_rows = layout.chunk_rows, layout.shard_rows
        self._files: tuple[str, ...] = ()
        if y is not None and len(y) != self.rows:
            raise DataError(f"got {counted(self.rows, 'row')} but {counted(len(y), 'label')}; give one label per row")
        self._weights, self.has_weights = weights, weights is not None
        if weights is not None and len(weights) != self.rows:
            raise DataError(
                f"got {counted(self.rows, 'row')} but {counted(len(weights), 'weight')}; give one weight per row"
            )

    def __repr__(self) -> str:
        return f"ArrayRows({counted(self.rows, 'row')}, {counted(self.features, 'feature')})"

    def __len__(self) -> int:
        return self.rows

    def whereabouts(self, split: str | None) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        about = (self.classes, self.feature_names)
        weighted = (self.class_factors, self._factors) if self.weighted else None
        if not self._files:
            return (_restored, (self._X, self._y, self._weights, *about, weighted))
        return (_mapped, (self._files, *about, weighted))

    def spill(self, folder: str | Path) -> ArrayRows:
        """Write the arrays to `folder`; afterwards it is pickled as the file names. Returns itself."""
        if not isinstance(self._X, np.ndarray) and not is_sparse(self._X):
            return self  # texts and other rows are sent with the tasks
        if self._y is None:
            raise DataError("only numeric matrices with labels can be shared with workers; ingest other rows first")
        parts = sparse_parts(self._X) if is_sparse(self._X) else {"X": self._X}
        arrays = {**parts, "y": self._y} | ({} if self._weights is None else {"weight": self._weights})
        files = {name: os.path.join(folder, f"{name}.npy") for name in arrays}
        for name, file in files.items():
            np.save(file, arrays[name], allow_pickle=False)
        self._files = tuple(files.values())
        return self

    @functools.cached_property
    def statistics(self) -> Statistics:  # type: ignore[override]
        if is_sparse(self._X):
            return self._measured_from_zero()
        numbers = isinstance(self._X, np.ndarray)
        return self._measured(self._X.reshape(self.rows, -1)) if numbers else Statistics.empty(self.features)

    @functools.cached_property
    def target_statistics(self) -> Statistics:
        if self._y is None or self._y.dtype.kind != "f":
            raise DataError("the rows have no numeric targets")
        return self._measured(self._y.reshape(self.rows, -1))

    def _measured(self, values: np.ndarray) -> Statistics:
        """As `ingest` computes them, shard by shard, and as they are restored from its record: divided and multiplied
        by the count."""
        total = Statistics.empty(values.shape[1])
        for start in range(0, self.rows, self._shard_rows):
            part = slice(start, start + self._shard_rows)
            total = total + Statistics.of(values[part], None if self._weights is None else self._weights[part])
        return Statistics.from_json(total.to_json(), values.shape[1])

    def _measured_from_zero(self) -> Statistics:
        """Of sparse rows: the range from 0 to the largest absolute value, squares around 0: a scaling by them does not
        shift, and 0 stays 0."""
        X, w = self._X, np.ones(self.rows) if self._weights is None else self._weights
        used = X if self._weights is None else X[np.flatnonzero(w)]
        largest = np.asarray(abs(used).max(axis=0).toarray()).ravel() if used.shape[0] else np.zeros(self.features)
        zeros, squares = np.zeros(self.features), np.asarray(w @ (X * X))
        return Statistics(self.rows, zeros, largest, zeros, squares, None if self._weights is None else float(w.sum()))

    def split_statistics(self, split: str | None = None) -> Statistics:
        self.ranges(split)
        return self.statistics

    def read_weights(self, start: int, stop: int) -> np.ndarray | None:
        return None if self._weights is None else self._weights[start:stop]

    def take_weights(self, rows: np.ndarray) -> np.ndarray | None:
        return None if self._weights is None else self._weights[rows]

    def weight_totals(self, split: str | None = None) -> np.ndarray:
        self.ranges(split)
        return self._weight_totals

    @functools.cached_property
    def _weight_totals(self) -> np.ndarray:
        """As `ingest` computes them, shard by shard."""
        total = np.zeros((self.n_classes or 1, 2))
        for start in range(0, self.rows, self._shard_rows):
            part = slice(start, min(start + self._shard_rows, self.rows))
            own = np.ones(part.stop - start) if self._weights is None else self._weights[part]
            total = padded_sum(
                total, weight_totals(own, self._y[part] if self.n_classes and self._y is not None else None)
            )
        return total

    def read_rows(self, start: int, stop: int) -> tuple[Any, np.ndarray | None]:
        if not 0 <= start <= stop <= self.rows:
            raise DataError(f"rows {start} to {stop} are out of range; there are {self.rows}")
        return self._X[start:stop], None if self._y is None else self._y[start:stop]

    def take(self, rows: np.ndarray) -> tuple[Any, np.ndarray | None]:
        X = self._X[rows] if hasattr(self._X, "shape") else [self._X[i] for i in rows.tolist()]
        return X, None if self._y is None else self._y[rows]

    def narrowed(self, ranges: tuple[Span, ...]) -> tuple[RowSource, tuple[Span, ...]]:
        if self._files:
            return self, ranges  # memory-mapped, read on access
        X = joined([self._X[start:stop] for start, stop in ranges])
        y = None if self._y is None else joined([self._y[start:stop] for start, stop in ranges])
        w = None if self._weights is None else joined([self._weights[start:stop] for start, stop in ranges])
        rows = ArrayRows(X, y, self.classes, self.feature_names if self.features else None, w)
        if self.weighted:  # the factors are those of all rows
            rows.class_factors, rows._factors = self.class_factors, self._factors
        return rows, ((0, rows.rows),)

    def identity(self, ranges: tuple[Span, ...], rows: int = 0) -> str:
        sha = hashlib.sha256()
        for start, stop in ranges:
            for part in _bytes_of(self._X[start:stop]):
                sha.update(part)
        return sha.hexdigest()[:32]

    def span_digests(self, start: int, stop: int) -> tuple[str, ...]:
        X, y = self.read_rows(start, stop)
        own = digest(np.asarray(X, np.float64)) if isinstance(X, np.ndarray) else _digest_of(X)
        return own, digest(np.asarray(y)), *(() if self._weights is None else (digest(self._weights[start:stop]),))

    @functools.cached_property
    def digest(self) -> str:
        sha = hashlib.sha256(
            repr((self.rows, None if self.classes is None else list(self.classes), self.feature_names)).encode()
        )
        for part in _bytes_of(self._X):
            sha.update(part)
        if self._y is not None:
            sha.update(np.ascontiguousarray(self._y).data)
        if self._weights is not None:
            sha.update(np.ascontiguousarray(self._weights).data)
        if self.class_factors is not None:
            sha.update(repr(self.class_factors).encode())
        return sha.hexdigest()


def _bytes_of(X: Any) -> list[Any]:
    """What identifies rows of any kind."""
    if is_sparse(X):
        return [np.ascontiguousarray(part).data for part in sparse_parts(X).values()]
    return [np.ascontiguousarray(X).data if isinstance(X, np.ndarray) else repr(X).encode()]


def _digest_of(X: Any) -> str:
    sha = hashlib.sha256()
    for part in _bytes_of(X):
        sha.update(part)
    return sha.hexdigest()[:32]


@functools.lru_cache(maxsize=2)
def _mapped_arrays(files: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.load(file, mmap_mode="r", allow_pickle=False) for file in files)


def _mapped(files: tuple[str, ...], classes: Any, feature_names: list[str], weighted: Any = None) -> ArrayRows:
    first, *rest = _mapped_arrays(files)
    if os.path.basename(files[0]) == "data.npy":
        indices, indptr, shape, *rest = rest
        first = from_parts((first, indices, indptr), shape.tolist())
    X, y, *weights = first, *rest
    return _restored(X, y, weights[0] if weights else None, classes, feature_names, weighted)


def _restored(
    X: Any, y: Any, weights: np.ndarray | None, classes: Any, feature_names: list[str], weighted: Any
) -> ArrayRows:
    rows = ArrayRows(X, y, classes, feature_names, weights)
    if weighted is not None:  # not computed again by every task
        rows.class_factors, rows._factors = weighted
    return rows
