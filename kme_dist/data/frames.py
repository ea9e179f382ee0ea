"""Tables in memory (pandas, Arrow, polars, ...) as rows of numbers, encoded as `ingest` encodes files.

is_table(X)                        whether X has named columns
needs_encoding(X)                  whether they are more than complete numbers
schema = table_schema(X)           one-hot categories, days of dates, means and indicators for missing values
encode_table(X, schema)            the rows by that schema; columns are found by name, in any order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from kme_dist.data.columns import parsed_days
from kme_dist.data.encode import Encoder
from kme_dist.data.readers import LEAVE_OUT, Source, TableSource, kind_of, open_source
from kme_dist.data.schema import Schema, TableOptions, announce, missing_words
from kme_dist.data.survey import plan_schema
from kme_dist.data.validation import check_collected
from kme_dist.errors import DataError

Unseen = dict[str, tuple[int, str]]  # how many unknown categories, and the first, by column; missing values likewise


def is_table(X: Any) -> bool:
    check_collected(X)
    if isinstance(X, pa.Table | pa.RecordBatch):
        return True
    return hasattr(X, "columns") and not hasattr(X, "dask") and len(getattr(X, "shape", ())) == 2


def column_names(X: Any) -> list[str]:
    return [str(name) for name in (X.schema.names if isinstance(X, pa.Table | pa.RecordBatch) else X.columns)]


def needs_encoding(X: Any) -> bool:
    """Whether the rows of a table have to be encoded: a data frame of complete numbers is a matrix already."""
    if not is_table(X):
        return False
    if not hasattr(X, "isna"):  # not pandas: columns are found by name in any case
        return True
    plain = all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in X.dtypes)
    return not plain or bool(X.isna().to_numpy().any())


def table_schema(X: Any) -> Schema:
    """How to encode the rows of a table: the means of numbers and dates, all zeros for a category, and a further
    feature that is 1 where the value is missing, for every column with missing values."""
    source = _with_dates(open_source(X))
    try:
        schema = plan_schema(source, TableOptions(missing="indicator"))
    except DataError as error:
        raise DataError(_for_frames(str(error))) from None
    announce([*schema.notes, *missing_words("X", schema, "fill them in before, e.g. X.fillna(...), for another rule")])
    return schema


def _for_frames(message: str) -> str:
    """An error of `ingest` with the ways out that estimators have, which take no options of reading."""
    instead = {
        LEAVE_OUT: "leave the column out: X.drop(columns=[...])",
        "list the column in `categories`": "make it a column of categories: X[name].astype('category')",
        "set `strip` to true to remove them, or to false to keep both": "remove them: X[name].str.strip()",
    }
    for words, other in instead.items():
        message = message.replace(words, other)
    return message


def _with_dates(source: Source) -> Source:
    """A table whose columns of texts that are all dates or times are columns of dates, as they are in a CSV file."""
    assert isinstance(source, TableSource)
    dates = [name for name, kind in source.kinds.items() if kind == "text" and _holds_dates(source, name)]
    return replace(source, kinds={**source.kinds, **dict.fromkeys(dates, "date")})


def _holds_dates(source: TableSource, column: str) -> bool:
    """Whether all texts of a column are dates or times for the encoder; a column of categories holds none."""
    found = False
    for block in source.blocks({column: pa.string()}):
        assert block.table is not None
        values = block.table.column(0)
        if pa.types.is_dictionary(values.type):
            return False
        values = values.drop_null()
        if len(values) and parsed_days(values) is None:
            return False
        found = found or len(values) > 0
    return found


def encode_table(X: Any, schema: Schema, unseen: str = "zeros") -> tuple[np.ndarray, Unseen]:
    """The rows of a table by a schema, and the categories that it does not have."""
    source = open_source(X)
    assert isinstance(source, TableSource)
    check_columns_of(source.name, source.kinds, schema)
    check_types(source, schema)
    encoder = Encoder(source, schema, unseen=unseen)
    parts = [block.X for block in encoder.encoded()]
    empty = np.zeros((0, len(schema.feature_names)), schema.dtype)
    return (parts[0] if len(parts) == 1 else np.concatenate([empty, *parts])), encoder.unseen


def for_new_rows(schema: Schema) -> Schema:
    """The encoding of rows to predict: without labels, and none of them is dropped or stops the others."""
    missing = "error" if schema.missing == "drop" else schema.missing
    return replace(schema.without_label(), missing=missing, skips=True)


def check_columns_of(where: str, columns: Mapping[str, Any] | Sequence[str], schema: Schema) -> None:
    """Raise an error that names the columns of a schema that are missing."""
    absent = [column.name for column in schema.columns if column.name not in columns]
    if absent:
        what = f"the columns {', '.join(map(repr, absent[:12]))} are" if absent[1:] else f"the column {absent[0]!r} is"
        raise DataError(f"{where}: {what} missing; found {', '.join(map(repr, columns))}.")


_HOLDS = {"number": "numbers", "date": "dates or times", "one_hot": "categories", "ordinal": "categories"}
_TAKES = {"number": ("number", "integer", "boolean", "text"), "date": ("date", "text")}  # texts may stand for either


def check_types(source: TableSource, schema: Schema) -> None:
    """Raise an error for a column whose stored type cannot be what a model knows, before any row is read."""
    for column in schema.columns:
        stored = source.types.get(column.name)
        if stored is None:  # of a text file, whose values are checked as they are read
            continue
        value = stored.value_type if pa.types.is_dictionary(stored) else stored
        fits = kind_of(value) in _TAKES.get(column.kind, (kind_of(value),))
        if pa.types.is_duration(value):  # they were dates, in days, before they were numbers
            fits = column.duration or column.kind != "number"
        elif pa.types.is_null(value):
            fits = schema.missing == "fill" or not source.rows
        elif kind_of(value) == "other":
            fits = column.kind not in _TAKES and (pa.types.is_binary(value) or pa.types.is_large_binary(value))
        if not fits:
            raise DataError(
                f"{source.name}: column {column.name!r} holds values of type {stored}, the model was fitted to "
                f"{'durations' if column.duration else _HOLDS[column.kind]} there; convert the column to them"
            )


def with_names(X: Any, names: Sequence[str]) -> pa.Table:
    """An array as a table with these names, column by column."""
    values = np.asarray(X, dtype=object) if not isinstance(X, np.ndarray) else X
    try:
        return pa.table({name: pa.array(values[:, i].tolist(), from_pandas=True) for i, name in enumerate(names)})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"a column of X mixes types of values ({error}); pass a data frame") from None


def without_column(X: Any, name: str) -> tuple[Any, Any]:
    """A table without one of its columns, and that column."""
    if isinstance(X, pa.Table | pa.RecordBatch):
        table = pa.table(X) if isinstance(X, pa.RecordBatch) else X
        return table.drop_columns([name]), np.asarray(table.column(name).to_pylist())
    return (X.drop(columns=name) if hasattr(X, "isna") else X.drop(name)), np.asarray(X[name])


def split_target(X: Any, y: Any) -> tuple[Any, Any]:
    """X and y, where y may be the name of a column of the table X."""
    if not isinstance(y, str) or not is_table(X):
        return X, y
    if y not in column_names(X):
        raise DataError(f"y={y!r} is not a column of X; its columns: {', '.join(column_names(X)[:20])}")
    return without_column(X, y)


def unseen_words(unseen: Unseen) -> str:
    """One line on categories and missing values that the training rows did not have; empty without any."""
    found, filled = [], []
    for name, (count, first) in unseen.items():
        rows = f"{count:,} row{'' if count == 1 else 's'} of column"
        if first or not name.endswith(":missing"):
            found.append(f"{rows} {name!r} (first: {first[:60]!r})")
        else:
            filled.append(f"{rows} {name.removesuffix(':missing')!r}")
    lines = [
        f"unknown categories, encoded as none of the known ones: {', '.join(found)}" if found else "",
        f"missing values, filled in with the mean or as no category: {', '.join(filled)}" if filled else "",
    ]
    return "; ".join(filter(None, lines))
