"""New rows in files and tables, encoded like the rows that a model was fitted to.

    columns = ModelColumns(features=4, names=["height", "colour=red", ...], encoding=schema)
    schema = columns.schema_for(open_source("new.csv"))           # columns by name, in any order
    columns.ignored(source)                                       # those that the model does not use
    with staged("new.csv", beside, columns, unseen="zeros", id_column="id") as rows: ...

Files that cannot be read from any row (CSV, LIBSVM, npz, ...) are first stored as a data set next to the predictions,
in bounded memory, which is removed when they are done, also after an error. A killed job leaves it, under a name that
starts with a dot; the next one replaces it.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kme_dist.data.dataset import Dataset, RowSource, Span, joined, short_digest
from kme_dist.data.frames import Unseen, check_columns_of, check_types, for_new_rows
from kme_dist.data.ingest import ingest
from kme_dist.data.places import METADATA_KEY, Place, store_errors
from kme_dist.data.readers import FileOptions, MatrixSource, Source, TableSource, format_of, open_source
from kme_dist.data.schema import Schema, plain_columns
from kme_dist.errors import ConfigError, DataError

_LIKE = "ingest its source again with `like`, the data set of the fit, so that its encoding is reused"


@dataclass(frozen=True)
class ModelColumns:
    """The columns of the rows of a model: encoded features, and the encoding that made them."""

    features: int
    names: tuple[str, ...] | None = None  # of the features; None: they have none
    encoding: Schema | None = None

    @property
    def file_options(self) -> FileOptions:
        """How to read a text file of new rows: like that of the fit; its first line is the header if it names the
        columns of the model."""
        if self.encoding is None:
            return FileOptions(names=self.names or ())
        columns = tuple(column.name for column in self.encoding.columns)
        return self.encoding.file_options(FileOptions(names=columns or self.names or ()))

    def schema_for(self, source: Source, id_column: str | None = None) -> Schema:
        """How to read the rows of a source; an error names the columns that it lacks, or that hold something else."""
        schema = for_new_rows(self._schema_for(source, id_column))
        if isinstance(source, TableSource):
            check_types(source, schema)
        return schema

    def _schema_for(self, source: Source, id_column: str | None) -> Schema:
        encoding = self.encoding
        if isinstance(source, MatrixSource):
            if len(source.feature_names) != self.features:
                raise DataError(
                    f"{source.name} has {len(source.feature_names)} columns, the model was fitted with "
                    f"{self.features} features; pass the columns of the fit"
                )
            return _plain_schema(source.feature_names)
        encoded = self.names is not None and all(name in source.kinds for name in self.names)
        if encoding is not None and not (encoded and any(c.name not in source.kinds for c in encoding.columns)):
            check_columns_of(source.name, source.kinds, encoding)
            return encoding
        if self.names:
            schema = _plain_schema(self.names)
            check_columns_of(source.name, source.kinds, schema)
            return schema
        wanted = [name for name, kind in source.kinds.items() if name != id_column and kind != "text"]
        if len(wanted) != self.features:
            raise DataError(
                f"{source.name}: the model has {self.features} features, but {len(wanted)} columns are numeric; pass "
                "the columns of the fit, or the data set it was learned from as `like`, so that its encoding is reused"
            )
        return _plain_schema(wanted)

    def check_encoding_of(self, data: Dataset) -> None:
        """Refuse a data set whose features have the names of the model's but another meaning: its own codes of
        categories, or its own fill values where values were missing."""
        own = {column.name: column for column in data.schema.columns}
        means = dict(zip(data.feature_names, data.statistics.mean, strict=True))
        for column in self.encoding.columns if self.encoding is not None else ():
            found = own.get(column.name, column)
            if (found.kind, found.categories, found.periods) != (column.kind, column.categories, column.periods):
                raise DataError(f"{data.path}: {column.name!r} is encoded in another way than by the model; {_LIKE}")
            # Where no feature marks missing values, whether there were any is not recorded: fill values without use.
            if found.indicator and found.fill != column.fill and means[f"{column.name}:missing"] > 0:
                raise DataError(
                    f"{data.path}: missing values of {column.name!r} were filled with {found.fill:.6g}, the model "
                    f"fills them with {column.fill:.6g}; {_LIKE}"
                )

    def ignored(self, source: Source, schema: Schema, id_column: str | None) -> list[str]:
        """The columns of a table that are not read."""
        if isinstance(source, MatrixSource):
            return []
        used = {column.name for column in schema.columns} | {id_column}
        return [name for name in source.kinds if name not in used]


def _plain_schema(names: Sequence[str]) -> Schema:
    return Schema(plain_columns(names), None, "none", None, "none", "float64", "error", (len(names),))


def needs_staging(data: Any) -> bool:
    """Whether `data` is the path of files that can only be read from the start."""
    if not isinstance(data, str | Path | Place):
        return False
    place = Place.of(data)
    if not place.is_local or place.exists(METADATA_KEY) or not place.path.exists():
        return False
    path = place.path
    if path.is_dir():
        return not any(path.rglob("*.parquet")) and not any(path.rglob("*.pq"))
    return format_of(path, FileOptions()) != "parquet"


class StagedRows(RowSource):
    """A data set made of a file, with the ids of its rows: their numbers, or a column of the file."""

    kind = "dataset"

    def __init__(self, data: Dataset, source: str, ids: str | None, dtype: str) -> None:
        self.data, self.path, self._ids = data, source, ids
        self.id_field = ("row" if ids is None else "id", dtype)
        self.rows, self.features, self.feature_names = data.rows, data.features, data.feature_names
        self.named, self.classes, self.splits, self.shuffled = data.named, None, {}, None
        self.chunk_rows = data.chunk_rows

    @property
    def unseen(self) -> Unseen:
        found = self.data.attributes["source"].get("unseen", {})
        return {name: (int(count), str(first)) for name, (count, first) in found.items()}

    def read_rows(self, start: int, stop: int) -> tuple[np.ndarray, None]:
        return self.data.read_rows(start, stop)[0], None

    def rejected_in(self, start: int, stop: int) -> dict[int, str]:
        found = self.data.attributes["source"].get("rejected", [])
        low, high = (bisect.bisect_left(found, at, key=lambda entry: entry[0]) for at in (start, stop))
        return {row - start: why for row, why in found[low:high]}

    def read_ids(self, start: int, stop: int) -> Any:
        if self._ids is None:
            return super().read_ids(start, stop)
        source = open_source(self._ids, FileOptions(format="parquet", window=(start, stop)))
        assert isinstance(source, TableSource)
        assert self.id_field is not None
        column = joined(
            [block.table.column(0) for block in source.blocks({"id": pa.string()}) if block.table is not None]
        )
        return column if self.id_field[1] == "text" else column.to_numpy(zero_copy_only=False)

    def identity(self, ranges: tuple[Span, ...], rows: int = 0) -> str:
        stored, rejected = self.data.identity(ranges, rows), [self.rejected_in(*span) for span in ranges]
        return short_digest([stored, rejected]) if any(rejected) else stored

    @property
    def identified_by(self) -> str | None:
        return None if "rejected" in self.data.attributes["source"] else self.data.identified_by


@contextlib.contextmanager
def staged(
    path: str | Path | Place, beside: Place, columns: ModelColumns, *, unseen: str = "zeros", id_column: str | None
) -> Iterator[tuple[StagedRows, list[str]]]:
    """The rows of a file as a data set next to `beside`, and the columns that are ignored, while the block runs."""
    source = open_source(Place.of(path).address, columns.file_options)
    schema = columns.schema_for(source, id_column)
    target = beside.sibling(f".{beside.name}.rows")
    ids = beside.sibling(f".{beside.name}.ids")
    try:
        dtype = _store_ids(source, ids, id_column) if id_column is not None else "int64"
        data = ingest(source, target.address, like=schema, unseen=unseen, overwrite=True)
        rows = StagedRows(data, source.name, None if id_column is None else str(ids.path / "ids.parquet"), dtype)
        yield rows, columns.ignored(source, schema, id_column)
    finally:
        target.delete_all()
        ids.delete_all()


def _store_ids(source: Source, place: Place, column: str) -> str:
    """Store a column of ids as a Parquet file; returns its type."""
    if not isinstance(source, TableSource) or column not in source.kinds:
        found = ", ".join(source.kinds) if isinstance(source, TableSource) else "without names"
        raise ConfigError(f"{source.name} has no column {column!r}; its columns: {found}")
    if not place.is_local:
        raise ConfigError(f"id_column={column!r}: ids of a file are supported for predictions on a local disk only")
    whole = source.kinds[column] == "integer"
    kind = pa.int64() if whole else pa.string()
    with store_errors(place):
        place.path.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(place.path / "ids.parquet", pa.schema([("id", kind)])) as writer:
            for block in source.blocks({column: kind}):
                assert block.table is not None
                writer.write_batch(pa.record_batch([block.table.column(0).cast(kind)], names=["id"]))
    return "int64" if whole else "text"
