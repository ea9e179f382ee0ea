"""The first pass over a source, only if it is needed: categories of text columns, means, medians, periods of dates."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kme_dist.data.columns import as_text, is_number, texts_of
from kme_dist.data.encode import Encoder, refuse_spaces
from kme_dist.data.notation import Notation, in_other_notation, like_numbers, suggestion, unit_of
from kme_dist.data.readers import LEAVE_OUT, Block, MatrixSource, Source
from kme_dist.data.schema import PERIODS, Column, Schema, TableOptions, draft_schema
from kme_dist.errors import DataError

FEW_WITH_UNIT = 10  # different values such as "1 kg", which may be categories
_SIGN = np.uint64(1 << 63)
_DAY_OR_MONTH_FIRST = re.compile(r"\d{1,2}([/.-])\d{1,2}\1(\d{4}|\d{2})( \d{1,2}:\d{2}(:\d{2})?)?", re.ASCII)


def plan_schema(source: Source, options: TableOptions, reserved: Sequence[str | int] = ()) -> Schema:
    """Decide columns, label, categories, fill values and type; `reserved` columns (keys, splits) are not features.

    With `missing` "auto", a table with texts or dates is read as with "indicator". A table of numbers is not read here:
    the encoder raises a MissingValueError where one is missing, and `with_indicators` gives the schema to use instead.
    """
    schema = draft_schema(source, options, reserved)
    if schema.notation is not None:
        schema = _with_notation(source, schema)
    encoded = not isinstance(source, MatrixSource) and any(column.kind != "number" for column in schema.columns)
    if options.missing == "auto" and encoded:
        options, schema = replace(options, missing="indicator"), replace(schema, missing="fill")
    return _survey(source, schema, options)


def with_indicators(source: Source, options: TableOptions, reserved: Sequence[str | int] = ()) -> Schema | None:
    """The schema of a table with missing values, if `missing` is left to us; None: they are an error."""
    if options.missing != "auto" or isinstance(source, MatrixSource):
        return None
    return plan_schema(source, replace(options, missing="indicator"), reserved)


def _with_notation(source: Source, schema: Schema) -> Schema:
    """Columns of texts that are all numbers in the given notation are numbers."""
    notation = schema.notation
    assert notation is not None
    open_ones = {c.name for c in schema.columns if c.kind == "one_hot"}
    seen: set[str] = set()
    for _, columns in _texts(source, schema, sorted(open_ones)) if open_ones else ():
        for name in sorted(open_ones):
            values = columns[name].drop_null()
            if len(values):
                seen.add(name)
                if notation.numbers(values)[1].any():
                    open_ones.discard(name)
    numbers = open_ones & seen
    return replace(schema, columns=tuple(replace(c, kind="number") if c.name in numbers else c for c in schema.columns))


def _survey(source: Source, schema: Schema, options: TableOptions) -> Schema:
    """Stream the source for categories, dates, and means or medians if they are needed."""
    marked = options.missing == "indicator"
    holes: dict[str, int] = {}
    notes = list(schema.notes)
    columns = {c.name: c for c in schema.columns}
    categorical = [c.name for c in schema.columns if c.kind in ("one_hot", "ordinal")]
    if categorical:
        found, holes = _find_categories(source, schema, categorical, options)
        for name, categories in found.items():
            if name in _guessed(schema, options):
                _refuse_notation(source, name, categories, schema.notation)
                _refuse_dates(source, name, categories)
                _refuse_mixed(source, schema, name, categories)
                if (unit := unit_of(categories)) is not None:
                    notes.append(
                        f"{source.name}: the column {name!r} holds numbers with the unit {unit!r} such as "
                        f"{categories[0]!r}, which are categories here; write them as 1234.5, or list the column in "
                        "`categories`"
                    )
            if schema.strip is None:
                refuse_spaces(source.name, name, categories)
            columns[name] = replace(columns[name], categories=categories, indicator=marked and name in holes)
    numbers = [c for c in schema.columns if c.kind in ("number", "date")]
    absent = dict(holes)
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
            if (missing := found_values.rows - int(found_values.count[i])) > 0:
                absent[column.name] = missing
            columns[column.name] = replace(
                known,
                indicator=marked and missing > 0,
                periods=found_values.periods(i) if column.kind == "date" else (),
            )
    ordered = {name: absent[name] for name in columns if name in absent}
    done = replace(schema, columns=tuple(columns.values()), holes=ordered if marked else {}, notes=tuple(notes))
    widened = len(done.feature_names) != len(schema.columns)
    if (not options.features and done.sample_shape != schema.sample_shape) or categorical or widened:
        done = replace(done, sample_shape=(len(done.feature_names),))
    return done


def _find_categories(
    source: Source, schema: Schema, names: list[str], options: TableOptions
) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """The categories of these columns, and the numbers of their missing values."""
    found: dict[str, set[str]] = {name: set() for name in names}
    holes: dict[str, int] = {}
    guessed = _guessed(schema, options)
    for _, columns in _texts(source, schema, names):
        for name, array in columns.items():
            found[name].update(value for value in pc.unique(array).to_pylist() if value is not None)
            if array.null_count:
                holes[name] = holes.get(name, 0) + array.null_count
            if len(found[name]) > options.max_categories:
                if name in guessed:
                    _refuse_notation(source, name, found[name], schema.notation)
                    _refuse_dates(source, name, found[name])
                    _refuse_mixed(source, schema, name, found[name])
                raise DataError(
                    f"{source.name}: the text column {name!r} has more than {options.max_categories} different "
                    f"values; it looks like free text or an identifier. Encode it as numbers, or {LEAVE_OUT}."
                )
    return {name: tuple(_sorted_texts(values)) for name, values in found.items()}, holes


def _guessed(schema: Schema, options: TableOptions) -> set[str]:
    """The columns that are categories because they hold text, not because they were declared to be."""
    declared = set(options.categories)
    return {
        c.name
        for c in schema.columns
        if options.one_hot == "auto" and c.kind == "one_hot" and not declared & {c.name, c.position}
    }


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
        texts = {name: as_text(block.table.column(i), name) for i, name in enumerate(names)}
        yield block, {name: pc.utf8_trim_whitespace(t) if schema.strip else t for name, t in texts.items()}


def _refuse_mixed(source: Source, schema: Schema, column: str, values: Collection[str]) -> None:
    """Reject a column of numbers with a word in it, which is a mistake in the file, not a column of categories."""
    known = is_number if schema.notation is None else schema.notation.accepts
    words = sum(not known(value) for value in values)
    if 2 * words > len(values):
        return
    how = "" if schema.notation is None else " of the given notation"
    for block, columns in _texts(source, schema, [column]):
        for row, value in enumerate(columns[column].to_pylist()):
            if value is not None and not known(value):
                raise DataError(
                    f"{block.place(row)}, column {column!r}: {value[:60]!r} is text among numbers{how}. Correct it in "
                    f"the file, list the column in `categories`, or {LEAVE_OUT}."
                )


def _refuse_notation(source: Source, column: str, values: Collection[str], given: Notation | None) -> None:
    """Reject texts such as 1,5 or 10% or 1_000, which may be numbers or categories, and plain numbers where another
    notation was given."""
    if given is not None and values and all(map(Notation().accepts, values)):
        raise DataError(
            f"{source.name}: the column {column!r} holds numbers such as {next(iter(values))!r}, which are none in the "
            f"given notation ({given}); write all columns in one notation, list the column in `categories`, or "
            f"{LEAVE_OUT}."
        )
    if (marked := in_other_notation(values)) is None:
        strange, unit = like_numbers(values), unit_of(values)
        if strange is not None or (unit is not None and len(values) > FEW_WITH_UNIT):
            shown = f"{strange or next(iter(values))!r}, which look like numbers" + (
                f" with the unit {unit!r}" if unit else ""
            )
            raise DataError(
                f"{source.name}: the column {column!r} holds texts such as {shown}; write them as 1234.5, or list the "
                f"column in `categories`, or {LEAVE_OUT}."
            )
        return
    raise DataError(
        f"{source.name}: the column {column!r} holds texts such as {marked!r}, which may be numbers in another "
        f"notation: {suggestion(values)}; or list the column in `categories`; or {LEAVE_OUT}."
    )


def _refuse_dates(source: Source, column: str, values: Collection[str]) -> None:
    """Reject dates such as 03/04/2024, which one reader takes for March and another for April."""
    if not values or not all(_DAY_OR_MONTH_FIRST.fullmatch(value.strip()) for value in values):
        return
    raise DataError(
        f"{source.name}: the column {column!r} holds dates such as {min(values)!r}, which do not say whether the day "
        f"or the month comes first; write them as 2024-04-03, or list the column in `categories`, or {LEAVE_OUT}."
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
    # The bits of a double, mapped to sort like numbers, in four parts of 16: every pass counts the values that begin
    # like the median by their next part. Exact, with memory independent of the number of rows.
    keys, ranks = np.zeros(width, np.uint64), (count - 1) // 2
    for shift in (48, 32, 16, 0):
        part, below = _count_parts(probe, ranks, keys, shift)
        keys, ranks = (keys << np.uint64(16)) | part, ranks - below
    bits = np.where(keys >> np.uint64(63), keys ^ _SIGN, ~keys)
    return [float(v) for v in bits.view(np.float64)]


def _count_parts(probe: Encoder, ranks: np.ndarray, keys: np.ndarray, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """The next 16 bits of the value of each rank among those that begin with `keys`, and how many are below it."""
    width, low = len(keys), np.uint64(0xFFFF)
    counts = np.zeros((width, 1 << 16), np.int64)
    for _, X in probe.numbers():
        bits = np.ascontiguousarray(X.T, np.float64).view(np.uint64)
        ordered = np.where(bits >> np.uint64(63), ~bits, bits | _SIGN)
        for j in range(width):
            mine = ordered[j][~np.isnan(X[:, j])] >> np.uint64(shift)
            if shift < 48:
                mine = mine[(mine >> np.uint64(16)) == keys[j]]
            counts[j] += np.bincount((mine & low).astype(np.int64), minlength=1 << 16)
    running = np.cumsum(counts, axis=1)
    found = np.array([int(np.searchsorted(running[j], ranks[j], side="right")) for j in range(width)])
    below = np.array([int(running[j, f - 1]) if f else 0 for j, f in enumerate(found)])
    return found.astype(np.uint64), below
