"""Any source into memory, encoded like the rows of a data set.

table = read_table("iris.csv", label="species")
table.X, table.y, table.feature_names, table.class_names, table.schema
files, columns = sort_options(source, {"header": False, "missing": "mean"})
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.data.encode import Encoder, MissingValueError, check_class_names, check_single
from kme_dist.data.readers import FileOptions, MatrixSource, Source, open_source
from kme_dist.data.schema import Schema, TableOptions, announce, codes_read_as_numbers, few_targets_words, missing_words
from kme_dist.data.statistics import Statistics
from kme_dist.data.survey import plan_schema, with_indicators
from kme_dist.errors import ConfigError, DataError

_FILE_KEYS = frozenset(FileOptions.__dataclass_fields__)
_TABLE_KEYS = frozenset(TableOptions.__dataclass_fields__)


@dataclass(frozen=True)
class Table:
    """Rows in memory, encoded like those of a data set."""

    X: np.ndarray
    y: np.ndarray | None  # int64 codes into class_names, or float targets
    feature_names: list[str]
    class_names: list[Any] | None  # the original labels
    label: str | None = None
    ids: list[str | None] | None = None
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # positions in the source
    schema: Schema | None = None  # the encoding; `ingest` of a table stores it with the rows
    weights: np.ndarray | None = None
    weight: str = "weight"  # the column of the weights

    @property
    def n_classes(self) -> int:
        return 0 if self.class_names is None else len(self.class_names)


def sort_options(source: Any, given: dict[str, Any]) -> tuple[FileOptions, TableOptions]:
    """Assign keyword arguments to the two records; for an unknown one the error suggests the nearest known name."""
    unknown = sorted(set(given) - _FILE_KEYS - _TABLE_KEYS)
    if unknown:
        import difflib

        near = difflib.get_close_matches(unknown[0], sorted(_FILE_KEYS | _TABLE_KEYS), 1)
        raise ConfigError(f"unknown option {unknown[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
    tuples: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    files = FileOptions(**{key: value for key, value in tuples.items() if key in _FILE_KEYS})
    table = TableOptions(**{key: value for key, value in tuples.items() if key in _TABLE_KEYS})
    name = str(source) if isinstance(source, (str, Path)) else ""
    label = table.label
    if name.rstrip("/").endswith((".npz", ".zarr")) and isinstance(label, str) and files.target is None:
        try:
            int(label)
        except ValueError:
            files = replace(files, target=label)  # formats with labels in a separate array
    return files, table


def read_table(source: Any, *, id: str | int | None = None, schema: Schema | None = None, **options: Any) -> Table:
    """Read a source into memory: the options of `ingest` that concern files, columns and missing values.

    With the `schema` of another table the rows are encoded like the rows of that table.

    >>> read_table((np.eye(2), np.array(["a", "b"]))).class_names
    ['a', 'b']
    """
    files, table = sort_options(source, options)
    opened = open_source(source, files)
    extras, given = [] if id is None else [id], schema is not None
    if schema is None:
        schema = plan_schema(opened, table, reserved=extras)
    else:
        check_width(opened, schema, table)
        if not isinstance(opened, MatrixSource) and schema.weight not in opened.kinds:
            schema = replace(schema, weight=None)
    try:
        encoder = Encoder(opened, schema, extras, table.max_classes)
        blocks = list(encoder.encoded())
    except MissingValueError:
        filled = None if given else with_indicators(opened, table, extras)
        if filled is None:
            raise
        schema = filled
        encoder = Encoder(opened, schema, extras, table.max_classes)
        blocks = list(encoder.encoded())
    X = np.concatenate([b.X for b in blocks]) if blocks else np.zeros((0, len(schema.feature_names)), schema.dtype)
    y, classes = None, None
    if schema.task != "none":
        y = np.concatenate([b.y for b in blocks if b.y is not None] or [np.zeros(0, schema.target_dtype)])
    if schema.task == "classification":
        classes, places = encoder.sorted_classes()
        if not given:
            check_class_names(opened.name, schema, classes, asked=table.task == "classification")
        y = places[y] if len(places) else y
    ids = [value for b in blocks for value in b.extras[encoder.extras[0]].to_pylist()] if extras else None
    rows = np.concatenate([b.rows for b in blocks]) if blocks else np.zeros(0, np.int64)
    weights = None
    if schema.weight is not None:
        weights = np.concatenate([np.zeros(0), *(b.weights for b in blocks if b.weights is not None)])
    if not given and schema.dtype == "float32":
        check_single(opened, schema, Statistics.of(X))
    if not given:
        late = codes_read_as_numbers(opened, schema)
        if table.task == "auto":
            late += few_targets_words(opened.name, schema, encoder.few_targets, len(X))
        announce([*schema.notes, *late, *(missing_words(opened.name, schema) if table.missing == "auto" else [])])
    names = (schema.feature_names, classes, schema.label)
    return Table(X, y, *names, ids, rows, schema, weights, schema.weight or "weight")


def check_width(source: Source, schema: Schema, options: TableOptions) -> None:
    """Columns of a matrix are identified by position: a different number of them is a different table."""
    if not isinstance(source, MatrixSource):
        return
    known = 1 + max(schema.positions)
    found = len(source.feature_names)
    if found < known or (found > known and options.features is None):
        raise DataError(f"{source.name} has {found} columns instead of {known}.")


def table_source(table: Table, options: FileOptions) -> MatrixSource:
    """Encoded rows as a source of numbers."""
    from kme_dist.data.matrix_readers import numpy_source, with_weights

    source = numpy_source(table.X, table.y, "table", options)
    source = replace(
        source,
        feature_names=list(table.feature_names),
        class_names=None if table.class_names is None else tuple(table.class_names),
        sample_shape=source.sample_shape if table.schema is None else table.schema.sample_shape,
        encoding=table.schema,
        positions=table.rows.__getitem__ if len(table.rows) == len(table.X) else None,
    )
    if (weights := table.weights) is None:
        return source
    return with_weights(source, table.weight, lambda start, stop: weights[start:stop])
