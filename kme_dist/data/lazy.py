"""Rows that are read on demand: Parquet files, Dask arrays; and `open_rows` for any source.

rows = open_rows("new.parquet", ModelColumns(54, names, encoding))
rows.part(0, 8192)                   # sent to a worker as file names and a window, or as a small Dask graph
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kme_dist.data.arrays import OUTPUT_ROWS, ArrayRows
from kme_dist.data.dataset import Dataset, RowSource, Span, joined, open_dataset, short_digest
from kme_dist.data.encode import Encoded, Encoder
from kme_dist.data.frames import Unseen, encode_table, is_table
from kme_dist.data.new_rows import ModelColumns
from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.data.readers import FileOptions, TableSource, open_source
from kme_dist.data.rows import RowsRef
from kme_dist.data.sparse import as_sparse_rows, is_sparse
from kme_dist.data.validation import check_columns, check_only_texts, object_rows
from kme_dist.errors import ConfigError, DataError

# The same columns in another order: the way out for a data set; other columns are found by name.
_REORDER = "ingest its source again with `like`, the data set of the fit, whose order of columns is then used"
_CACHE_BYTES = 8 << 20  # of a data set that is read once, sequentially


class ParquetRows(RowSource):
    """A Parquet file or a folder of them, in order of their names; columns are found by feature name."""

    kind = "parquet"

    def __init__(self, path: str, columns: ModelColumns, id_column: str | None = None, unseen: str = "error") -> None:
        source = open_source(path, FileOptions(format="parquet"))
        assert isinstance(source, TableSource)
        root = Path(path)
        files = sorted(root.rglob("*.parquet")) if root.is_dir() else [root]
        files = [f for f in files if not any(p.startswith(("_", ".")) for p in f.relative_to(root).parts)]
        self._stamps = []
        for file in files:
            facts, rows = file.stat(), pq.read_metadata(file).num_rows
            self._stamps.append((str(file), rows, facts.st_size, facts.st_mtime_ns))
        self._schema = columns.schema_for(source, id_column)
        self._id_column, self._unseen = id_column, unseen
        self.ignored = columns.ignored(source, self._schema, id_column)
        if id_column is not None:
            if id_column not in source.kinds:
                raise ConfigError(f"{path} has no column {id_column!r}; its columns: {', '.join(source.kinds)}")
            self.id_field = ("id", "int64" if source.kinds[id_column] == "integer" else "text")
        self._begin(str(root))

    def _begin(self, path: str) -> None:
        self._begins = np.cumsum([0, *(rows for _, rows, _, _ in self._stamps)])
        self.path, self.rows, self.chunk_rows = path, int(self._begins[-1]), OUTPUT_ROWS
        self.feature_names = self._schema.feature_names
        self.features, self.named = len(self.feature_names), True
        self.classes, self.splits, self.shuffled = None, {}, None

    def _files(self, start: int, stop: int) -> slice:
        """The files with rows [start, stop)."""
        first = int(np.searchsorted(self._begins, start, side="right")) - 1
        return slice(first, int(np.searchsorted(self._begins, stop, side="left")))

    @functools.lru_cache(maxsize=1)  # noqa: B019  (a task asks for rows, then for the ids of the same rows)
    def _blocks(self, start: int, stop: int) -> tuple[list[Encoded], Unseen]:
        files = self._files(start, stop)
        begin = int(self._begins[files.start])
        names = [file for file, *_ in self._stamps[files]]
        source = open_source(names, FileOptions(window=(start - begin, stop - begin)))
        ids = [] if self._id_column is None else [self._id_column]
        encoder = Encoder(source, self._schema, ids, unseen=self._unseen)
        encoder.skip_texts = True
        return list(encoder.encoded()), encoder.unseen

    def unseen_in(self, start: int, stop: int) -> Unseen:
        return self._blocks(start, stop)[1]

    def rejected_in(self, start: int, stop: int) -> dict[int, str]:
        blocks = self._blocks(start, stop)[0]
        return {int(block.rows[0]) + row: why for block in blocks for row, why in block.rejected.items()}

    def read_rows(self, start: int, stop: int) -> tuple[np.ndarray, None]:
        return np.concatenate([block.X for block in self._blocks(start, stop)[0]]), None

    def read_ids(self, start: int, stop: int) -> Any:
        assert self._id_column is not None
        parts = [block.extras[self._id_column] for block in self._blocks(start, stop)[0]]
        ids = joined([part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part for part in parts])
        assert self.id_field is not None
        return ids if self.id_field[1] == "text" else ids.cast(self.id_field[1]).to_numpy(zero_copy_only=False)

    def narrowed(self, ranges: tuple[Span, ...]) -> tuple[RowSource, tuple[Span, ...]]:
        files = self._files(ranges[0][0], ranges[-1][1])
        begin = int(self._begins[files.start])
        few = object.__new__(ParquetRows)
        few._stamps, few._schema, few._id_column = self._stamps[files], self._schema, self._id_column
        few.id_field, few._unseen, few.ignored = self.id_field, self._unseen, self.ignored
        few._begin(self.path)
        return few, tuple((start - begin, stop - begin) for start, stop in ranges)

    def identity(self, ranges: tuple[Span, ...], rows: int = 0) -> str:
        start, stop = ranges[0][0], ranges[-1][1]
        stamps = [[Path(file).name, *facts] for file, *facts in self._stamps[self._files(start, stop)]]
        return short_digest([stamps, start, stop])


class DaskRows(RowSource):
    """A Dask array whose blocks are computed by the task that uses them."""

    kind = "dask"

    def __init__(self, X: Any) -> None:
        if any(type(task).__name__ == "Future" for task in dict(X.dask).values()):
            raise DataError(
                "this Dask array was persisted, so its rows are in the memory of a cluster; pass the array "
                "before persist(), so that each task computes its rows, or store it with kme_dist.ingest first"
            )
        self.rows, self.features = (int(size) for size in X.shape)
        self.chunk_rows = min(max(1, *(int(size) for size in X.chunks[0])), 1 << 16)
        self._X = X.rechunk((self.chunk_rows, self.features))
        self.path, self.feature_names, self.named = "a Dask array", [f"x{i}" for i in range(self.features)], False
        self.classes, self.splits, self.shuffled = None, {}, None

    def whereabouts(self, split: str | None) -> dict[str, Any]:
        return {}

    def read_rows(self, start: int, stop: int) -> tuple[np.ndarray, None]:
        X = np.asarray(self._X[start:stop].compute(scheduler="synchronous"))
        check_columns(X)
        return X, None

    def narrowed(self, ranges: tuple[Span, ...]) -> tuple[RowSource, tuple[Span, ...]]:
        import dask

        start, stop = ranges[0][0], ranges[-1][1]
        few = object.__new__(DaskRows)
        few.__dict__.update(self.__dict__)
        few.rows, few._X = stop - start, dask.optimize(self._X[start:stop])[0]  # only what these rows need
        return few, tuple((low - start, high - start) for low, high in ranges)

    def identity(self, ranges: tuple[Span, ...], rows: int = 0) -> str:
        from dask.base import tokenize

        return short_digest([tokenize(self._X), ranges[0][0] // self.chunk_rows])


def open_rows(
    data: Any,
    columns: ModelColumns,
    *,
    split: str | None = None,
    id_column: str | None = None,
    unseen: str = "error",
) -> RowsRef:
    """The rows to predict: a data set or its path, Parquet, a NumPy or Dask array, or a table in memory.

    Raises an error if the features differ from those of the model.
    """
    source = _source_of(data, columns, id_column, unseen)
    if split is not None and not isinstance(source, Dataset):
        raise ConfigError(f"split={split!r}: only data sets have splits; {source.path} is not a data set")
    if id_column is not None and (source.id_field is None or isinstance(source, Dataset)):
        raise ConfigError(f"id_column={id_column!r}: only supported for Parquet and CSV; data sets use row numbers")
    if source.features and not columns.features:
        raise DataError(f"{source.path}: numbers, but the model was fitted to texts, sequences or bags; pass such rows")
    if source.features != columns.features:
        found = f"{source.features} feature{'' if source.features == 1 else 's'}"
        raise DataError(
            f"{source.path}: {found}, the model was fitted with {columns.features}; pass the columns of the fit"
        )
    known = source.feature_names if source.named or isinstance(source, Dataset) else None
    if columns.names and known and list(columns.names) != known:
        pairs = zip(columns.names, known, strict=True)
        at, (wanted, seen) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        same = sorted(columns.names) == sorted(known)
        raise DataError(
            f"{source.path}: feature {at} is {seen!r}, the model was fitted with {wanted!r} there; "
            + (_REORDER if same else "pass the columns of the fit")
        )
    if isinstance(source, Dataset):
        columns.check_encoding_of(source)
    ranges = tuple(span for span in source.ranges(split) if span[0] < span[1])
    return RowsRef(os.urandom(8).hex(), source, ranges, split=split)


def _source_of(data: Any, columns: ModelColumns, id_column: str | None, unseen: str) -> RowSource:
    if isinstance(data, str | Path | Place):
        place = Place.of(data)
        if place.exists(METADATA_KEY):
            return open_dataset(place, cache_bytes=_CACHE_BYTES)
        if place.is_local and place.path.exists():
            return ParquetRows(str(place.path), columns, id_column, unseen)
        if place.is_local:
            raise DataError(f"{place}: the path does not exist.")
        raise DataError(f"{place} is neither a data set nor a Parquet, CSV or npy file.")
    if isinstance(data, Dataset):
        return open_dataset(data.place, verify=data.verify_reads, cache_bytes=_CACHE_BYTES)
    if isinstance(data, RowSource):
        return data
    if hasattr(data, "dask"):
        _check_numbers(data)
        return DaskRows(data)
    if is_table(data):
        return TableRows(data, columns, unseen)
    if is_sparse(data) or hasattr(data, "tocsr"):
        return ArrayRows(as_sparse_rows(data.tocsr()), None)
    if not columns.features and (objects := object_rows(data)) is not None:  # of a model of texts, sequences or bags
        return ArrayRows(objects, None)
    if not columns.features:
        check_only_texts(data)
    X = np.asarray(data)
    _check_numbers(X)
    check_columns(X)
    return ArrayRows(X, None)


class TableRows(ArrayRows):
    """The encoded rows of a table in memory."""

    def __init__(self, table: Any, columns: ModelColumns, unseen: str) -> None:
        source = open_source(table)
        schema = columns.schema_for(source)
        X, self.unseen = encode_table(table, schema, unseen)
        self.ignored = columns.ignored(source, schema, None)
        super().__init__(X, None, feature_names=schema.feature_names if columns.names else None)


def _check_numbers(X: Any) -> None:
    if X.ndim != 2 or X.dtype.kind not in "fiub":
        raise DataError(f"expected a numeric matrix, got {X.dtype} of shape {X.shape}")
