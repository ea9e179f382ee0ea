"""The first pass over a source, only if it is needed: categories of text columns, means, medians, periods of dates."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kme_dist.data.encode import Encoder, as_text, is_number, texts_of
from kme_dist.data.readers import LEAVE_OUT, Block, MatrixSource, Source
from kme_dist.data.schema import PERIODS, Column, Schema, TableOptions, draft_schema
from kme_dist.errors import DataError

# Numbers with a decimal comma, separators between thousands, a percent sign or a currency.
_OTHER_NOTATION = re.compile(r"[$€£]?\s*[+-]?\d[\d.,_' ]*\s*[%$€£]?")
_MARKS = re.compile(r"[,_'%$€£ ]")


def plan_schema(source: Source, options: TableOptions, reserved: Sequence[str | int] = ()) -> Schema:
    """Decide columns, label, categories, fill values and type; `reserved` columns (keys, splits) are not features."""
    return _survey(source, draft_schema(source, options, reserved), options)


def _survey(source: Source, schema: Schema, options: TableOptions) -> Schema:
    """Stream the source for categories, dates, and means or medians if they are needed."""
    marked = options.missing == "indicator"
    columns = {c.name: c for c in schema.columns}
    categorical = [c.name for c in schema.columns if c.kind in ("one_hot", "ordinal")]
    if categorical:
        found, holes = _find_categories(source, schema, categorical, options)
        for name, categories in found.items():
            if options.one_hot == "auto" and columns[name].kind == "one_hot":  # not declared as categories
                _refuse_mixed(source, schema, name, categories)
                _warn_of_notation(source, name, categories)
            columns[name] = replace(columns[name], categories=categories, indicator=marked and name in holes)
    numbers = [c for c in schema.columns if c.kind in ("number", "date")]
    dated = [c for c in numbers if c.kind == "date"]
    if not isinstance(options.missing, str):
        columns |= {c.name: replace(c, fill=float(options.missing)) for c in numbers}
    measured = numbers if options.missing in ("mean", "median", "indicator") else dated
    if measured:
        found_values = _measure(source, schema, measured)
        how = options.missing if options.missing in ("mean", "median") else "mean"
        if measured is numbers:
            for column, fill in zip(numbers, _find_fills(source, schema, numbers, how, found_values), strict=True):
                columns[column.name] = replace(column, fill=fill)
        for i, column in enumerate(measured):
            known = columns[column.name]
            holes_here = int(found_values.count[i]) < found_values.rows
            columns[column.name] = replace(
                known,
                indicator=marked and holes_here,
                periods=found_values.periods(i) if column.kind == "date" else (),
            )
    done = replace(schema, columns=tuple(columns.values()))
    widened = len(done.feature_names) != len(schema.columns)
    if (not options.features and done.sample_shape != schema.sample_shape) or categorical or widened:
        done = replace(done, sample_shape=(len(done.feature_names),))
    return done


def _find_categories(
    source: Source, schema: Schema, names: list[str], options: TableOptions
) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """The categories of these columns, and those of them that have missing values."""
    found: dict[str, set[str]] = {name: set() for name in names}
    holes: set[str] = set()
    guessed = {c.name for c in schema.columns if options.one_hot == "auto" and c.kind == "one_hot"}
    for _, columns in _texts(source, schema, names):
        for name, array in columns.items():
            found[name].update(value for value in pc.unique(array).to_pylist() if value is not None)
            if array.null_count:
                holes.add(name)
            if len(found[name]) > options.max_categories:
                if name in guessed:
                    _refuse_mixed(source, schema, name, found[name])
                raise DataError(
                    f"{source.name}: the text column {name!r} has more than {options.max_categories} different "
                    f"values; it looks like free text or an identifier. Encode it as numbers, or {LEAVE_OUT}."
                )
    return {name: tuple(_sorted_texts(values)) for name, values in found.items()}, holes


def _texts(source: Source, schema: Schema, names: Sequence[str]) -> Iterator[tuple[Block, dict[str, pa.Array]]]:
    """The blocks of a source, with these columns as texts."""
    if isinstance(source, MatrixSource):
        positions = {c.name: c.position for c in schema.columns}
        for block in source.blocks():
            assert block.matrix is not None
            yield block, {name: pa.array(texts_of(block.matrix[:, positions[name]])) for name in names}
        return
    for block in source.blocks(dict.fromkeys(names, pa.string())):
        assert block.table is not None
        yield block, {name: as_text(block.table.column(i)) for i, name in enumerate(names)}


def _refuse_mixed(source: Source, schema: Schema, column: str, values: Collection[str]) -> None:
    """Reject a column of numbers with a word in it, which is a mistake in the file, not a column of categories."""
    words = sum(not is_number(value) for value in values)
    if 2 * words > len(values):
        return
    for block, columns in _texts(source, schema, [column]):
        for row, value in enumerate(columns[column].to_pylist()):
            if value is not None and not is_number(value):
                raise DataError(
                    f"{block.origin}: row {block.first_row + row + 1}, column {column!r}: {value[:60]!r} is text "
                    f"among numbers. Correct it in the file, or {LEAVE_OUT}."
                )


def _warn_of_notation(source: Source, column: str, values: Collection[str]) -> None:
    """Say that texts such as 1,5 or 10% or 1_000 are not read as numbers."""
    marked = next((value for value in values if _MARKS.search(value.strip())), None)
    if marked is not None and all(_OTHER_NOTATION.fullmatch(value.strip()) for value in values):
        warnings.warn(
            f"{source.name}: the column {column!r} holds texts such as {marked!r}, which are used as "
            f"categories, not as numbers; write numbers as 1234.5, or {LEAVE_OUT}",
            stacklevel=2,
        )


def _sorted_texts(values: set[str]) -> list[str]:
    """Numbers by value, words alphabetically."""
    try:
        return sorted(values, key=lambda text: (float(text), text))
    except ValueError:
        return sorted(values)


@dataclass(frozen=True)
class _Measured:
    """Of the values of each column that are not missing."""

    rows: int
    count: np.ndarray
    total: np.ndarray
    low: np.ndarray
    high: np.ndarray
    clocks: np.ndarray  # whether times of the day differ

    def periods(self, column: int) -> tuple[str, ...]:
        """The periods of which the dates cover two or more: below that, the day itself says as much."""
        width = self.high[column] - self.low[column]
        found = [name for name, days in PERIODS.items() if width >= 2 * days and name != "day"]
        if self.clocks[column] and (width >= 2 or self.high[column] <= 1):  # days, or times of the day
            found.append("day")
        return tuple(found)


def _probe(source: Source, schema: Schema, columns: list[Column]) -> Encoder:
    """Reads these columns as numbers, missing ones as NaN."""
    return Encoder(source, replace(schema.without_label(), columns=tuple(columns), missing="fill", dtype="float64"))


def _measure(source: Source, schema: Schema, columns: list[Column]) -> _Measured:
    width = len(columns)
    total, count, rows = np.zeros(width), np.zeros(width, np.int64), 0
    low, high, clocks = np.full(width, np.inf), np.full(width, -np.inf), np.zeros(width, bool)
    first = np.full(width, np.nan)
    for _, X in _probe(source, schema, columns).numbers():
        rows += len(X)
        there = ~np.isnan(X)
        count += there.sum(axis=0)
        total += np.where(there, X, 0).sum(axis=0, dtype=np.float64)
        low = np.minimum(low, np.where(there, X, np.inf).min(axis=0, initial=np.inf))
        high = np.maximum(high, np.where(there, X, -np.inf).max(axis=0, initial=-np.inf))
        for j, column in enumerate(columns):
            if column.kind == "date" and there[:, j].any():
                clock = X[there[:, j], j] % 1.0
                first[j] = clock[0] if np.isnan(first[j]) else first[j]
                clocks[j] |= bool((np.abs(clock - first[j]) > 1e-6).any())
    return _Measured(rows, count, total, low, high, clocks)


def _find_fills(source: Source, schema: Schema, columns: list[Column], how: str, found: _Measured) -> list[float]:
    """Mean, or exact median, of each column over the values that are not missing."""
    width, count = len(columns), found.count
    if not found.rows and width:
        raise DataError(f"{source.name} has no rows, so no column has a {how}; at least one row is required.")
    if (count == 0).any():
        name = columns[int(np.argmin(count))].name
        raise DataError(f"{source.name}: all values of the column {name!r} are missing; {LEAVE_OUT}.")
    if how == "mean":
        return [float(v) for v in found.total / count]
    probe = _probe(source, schema, columns)
    # Float32 bits, mapped to sort like numbers, in two halves: 65,536 counters per column find the upper half of the
    # median's bits, a second pass the lower one. Exact, with memory independent of the number of rows.
    ranks = (count - 1) // 2
    high, below = _count_halves(probe, width, ranks, None)
    low, _ = _count_halves(probe, width, ranks - below, high)
    keys = (high.astype(np.uint32) << np.uint32(16)) | low.astype(np.uint32)
    bits = np.where(keys >> np.uint32(31), keys ^ np.uint32(1 << 31), ~keys).astype(np.uint32)
    return [float(v) for v in bits.view(np.float32)]


def _count_halves(
    probe: Encoder, width: int, ranks: np.ndarray, high: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    counts = np.zeros((width, 1 << 16), np.int64)
    for _, X in probe.numbers():
        bits = np.ascontiguousarray(X.T, np.float32).view(np.uint32)
        keys = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))
        for j in range(width):
            mine = keys[j][~np.isnan(X[:, j])]
            if high is not None:
                mine = mine[(mine >> np.uint32(16)) == high[j]] & np.uint32(0xFFFF)
            else:
                mine = mine >> np.uint32(16)
            counts[j] += np.bincount(mine, minlength=1 << 16)
    running = np.cumsum(counts, axis=1)
    found = np.array([int(np.searchsorted(running[j], ranks[j], side="right")) for j in range(width)])
    below = np.array([int(running[j, f - 1]) if f else 0 for j, f in enumerate(found)])
    return found, below
