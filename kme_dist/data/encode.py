"""From blocks of a source to numbers, by a schema: X, labels and the rows kept.

Missing values, unknown categories and classes, and values that are not finite are found here, and every error names the
file, the row (counted from 0; of a text file also the line) and the column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kme_dist.data.columns import DAY, as_text, days_of, decoded, is_number, parsed_days, texts_of
from kme_dist.data.notation import Notation, in_other_notation, long_integer_among, suggestion, unreadable
from kme_dist.data.readers import LEAVE_OUT, Block, MatrixSource, Source, TableSource, kind_of
from kme_dist.data.schema import PERIODS, Column, Schema, finder
from kme_dist.data.statistics import Statistics
from kme_dist.data.validation import LARGEST_INTEGER, long_integer_words, not_finite_rows
from kme_dist.errors import ConfigError, DataError

UNSEEN = ("zeros", "error")
FEW_TARGETS = 10  # different numbers that may be classes
LARGEST_WEIGHT = 1e100  # of a row: with larger ones, sums of weighted squares overflow


class MissingValueError(DataError):
    """A value is missing, and there is no rule for it."""


@dataclass(frozen=True)
class Encoded:
    """Rows ready to store. `rows` are positions in the whole source, from 0."""

    X: np.ndarray
    y: np.ndarray | None  # codes in order of first occurrence, or targets
    rows: np.ndarray
    extras: dict[str, pa.Array] = field(default_factory=dict)
    weights: np.ndarray | None = None
    seen: int = 0  # rows of the source up to the end of this block, including dropped ones
    rejected: dict[int, str] = field(default_factory=dict)  # rows of X that cannot be used, where they are skipped


class Encoder:
    """Converts blocks to rows. Its only growing state are the classes found so far, in order of first occurrence.

    `unseen` is the rule for a category that the schema does not have: "error", or "zeros": it is none of the known
    categories (all zeros; -1 if ordinal), and counted in `self.unseen`, by column, with the first of them. So are
    values that are missing in columns without a feature NAME:missing, as "NAME:missing".

    Where the schema is one of rows to predict (`Schema.skips`), a value that is missing without a rule, or not finite,
    is no error: its row has a NaN or infinity, and the reason is in `Encoded.rejected`. With `skip_texts` the same
    holds for texts that are not a number or a date.
    """

    def __init__(
        self,
        source: Source,
        schema: Schema,
        extras: Sequence[str | int] = (),
        max_classes: int = 10_000,
        first_row: int = 0,
        unseen: str = "error",
    ) -> None:
        if unseen not in UNSEEN:
            raise ConfigError(f"unseen is {unseen!r}; it must be one of {', '.join(UNSEEN)}.")
        self.skip_texts = False
        self._rejected: dict[int, str] = {}  # of the block that is being encoded
        self.refuse_unseen, self.unseen = unseen == "error", dict[str, tuple[int, str]]()
        self.source, self.schema, self.max_classes, self.first_row = source, schema, max_classes, first_row
        names = list(source.kinds) if isinstance(source, TableSource) else list(source.feature_names)
        self.extras = [finder(source.name, names)(name) for name in extras]
        self.few_targets: set[float] | None = set()  # the different ones; None: more than a few
        self.codes: dict[Any, int] = {value: i for i, value in enumerate(schema.classes or ())}
        self.fixed_classes = schema.classes is not None
        # A category such as city=Paris is a feature, but the column of the file is city.
        self._columns_of_features = [c.name for c in schema.columns for _ in c.outputs]
        self._fills = np.array([fill for c in schema.columns for fill in c.fills])

    def encoded(self) -> Iterator[Encoded]:
        """The whole source, block by block."""
        start = self.first_row
        for block in self._blocks():
            encoded = self._encode(block, start)
            start += encoded.seen
            yield encoded

    def numbers(self) -> Iterator[tuple[Block, np.ndarray]]:
        """Only the features, missing values as NaN."""
        for block in self._blocks():
            yield block, self._features(block)

    def targets(self) -> Iterator[np.ndarray]:
        """Only the labels, as numbers, without missing ones."""
        for block in self._blocks():
            labels, _ = self._labels(block)
            assert labels is not None
            values = labels.to_numpy(zero_copy_only=False)
            yield values[~np.isnan(values)]

    def _blocks(self) -> Iterator[Block]:
        if isinstance(self.source, MatrixSource):
            return self.source.blocks()
        number = pa.float64() if self.schema.dtype == "float64" else pa.float32()
        number = number if self.schema.notation is None else pa.string()
        kinds = self.source.kinds
        wanted: dict[str, pa.DataType] = {}
        for column in self.schema.columns:
            if column.name not in kinds:
                raise DataError(f"{self.source.name}: the column {column.name!r} is missing; found {', '.join(kinds)}.")
            plain = pa.bool_() if kinds[column.name] == "boolean" else number
            wanted[column.name] = plain if column.kind == "number" else pa.string()
        if self.schema.label is not None:
            if self.schema.label not in kinds:
                raise DataError(
                    f"{self.source.name}: the label {self.schema.label!r} is missing; found {', '.join(kinds)}."
                )
            label_types = {"integer": pa.int64(), "boolean": pa.bool_()}
            label_types["number"] = pa.float64() if self.schema.notation is None else pa.string()
            wanted[self.schema.label] = label_types.get(self.schema.label_kind, pa.string())
        if self.schema.weight is not None:
            if self.schema.weight not in kinds:
                raise DataError(
                    f"{self.source.name}: the weight {self.schema.weight!r} is missing; found {', '.join(kinds)}."
                )
            wanted[self.schema.weight] = pa.float64() if self.schema.notation is None else pa.string()
        for name in self.extras:
            wanted.setdefault(name, pa.string())
        return self.source.blocks(wanted)

    def _encode(self, block: Block, start: int) -> Encoded:
        self._rejected = {}
        X = self._features(block)
        labels, no_label = self._labels(block)
        weights = self._weights(block)
        count = len(X)
        keep = np.ones(count, bool)
        with np.errstate(over="ignore", invalid="ignore"):
            suspicious = X.dtype.kind == "f" and not np.isfinite(X.sum(dtype=X.dtype))  # cheap, and rarely wrong
        if suspicious:
            X = self._treat(block, X, keep)
        if self._rejected:  # a fill value must not hide them
            X = np.array(X, np.promote_types(X.dtype, np.float32))
            X[list(self._rejected), 0] = np.nan
        if self.schema.skips and (suspicious or self._rejected):
            self._rejected = not_finite_rows(X) | self._rejected
        if no_label is not None:
            if self.schema.missing != "drop":
                row = int(np.argmax(no_label))
                raise DataError(
                    f"{block.place(row)}, column {self.schema.label!r}: the label is missing. Correct it, or set "
                    "`missing` to drop, which drops such rows."
                )
            keep &= ~no_label
        if weights is not None:
            self._check_weights(block, weights, keep)
        rows = np.arange(start, start + count)
        extras = {name: self._extra(block, name) for name in self.extras}
        if keep.all():
            y = None if labels is None else self._codes(block, labels, rows - start)
            return Encoded(X, y, rows, extras, weights, count, self._rejected)
        kept = np.flatnonzero(keep)
        y = None if labels is None else self._codes(block, labels.take(pa.array(kept)), kept)
        extras = {k: v.take(pa.array(kept)) for k, v in extras.items()}
        return Encoded(X[kept], y, rows[kept], extras, None if weights is None else weights[kept], count)

    # features

    def _features(self, block: Block) -> np.ndarray:
        if block.matrix is not None:
            return self._from_matrix(block, block.matrix)
        assert block.table is not None
        columns = self.schema.columns
        if all(c.kind == "number" and not c.indicator for c in columns) and self.schema.dtype != "uint8":
            target = pa.float64() if self.schema.dtype == "float64" else pa.float32()
            arrays = [self._as_number(block, c.name, block.table.column(i), target) for i, c in enumerate(columns)]
            batch = pa.RecordBatch.from_arrays(arrays, names=[str(i) for i in range(len(arrays))])
            return batch.to_tensor(null_to_nan=True, row_major=True).to_numpy()  # type: ignore[no-any-return]
        parts = [self._column_values(block, c, block.table.column(i)) for i, c in enumerate(columns)]
        return np.concatenate(parts, axis=1)

    def _from_matrix(self, block: Block, matrix: np.ndarray) -> np.ndarray:
        columns = self.schema.columns
        if columns[-1].position >= matrix.shape[1]:
            raise DataError(
                f"{block.origin} has {matrix.shape[1]} columns; at least {columns[-1].position + 1} are required."
            )
        if all(c.kind == "number" and not c.indicator for c in columns):
            positions = [c.position for c in columns]
            whole = positions == list(range(matrix.shape[1]))
            return self._typed(block, matrix if whole else matrix[:, positions])
        parts = []
        for column in columns:
            values = matrix[:, column.position]
            texts = column.kind in ("one_hot", "ordinal")
            parts.append(self._column_values(block, column, pa.array(texts_of(values) if texts else values)))
        return np.concatenate(parts, axis=1)

    def _typed(self, block: Block, X: np.ndarray) -> np.ndarray:
        if self.schema.dtype == "uint8" and X.dtype not in (np.uint8, bool):
            wrong = ~((X >= 0) & (X <= 255) & (np.round(X) == X))
            if wrong.any():
                row, j = (int(v) for v in np.argwhere(wrong)[0])
                if not self.schema.skips:
                    what = f"{X[row, j]!r} is not an integer from 0 to 255; choose dtype float32"
                    raise self._bad(block, row, j, what)
                for row, j in np.argwhere(wrong)[::-1].tolist():
                    self._rejected.setdefault(row, f"{X[row, j]:g} is not an integer from 0 to 255")
                X = np.where(wrong, 0, X)
        if X.dtype.kind in "iu" and X.dtype.itemsize == 8 and X.size:
            least, most = X.min(axis=0), X.max(axis=0)
            for j in np.flatnonzero((least < -LARGEST_INTEGER) | (most > LARGEST_INTEGER))[:1].tolist():
                row = int(np.argmax((X[:, j] > LARGEST_INTEGER) | (X[:, j] < -LARGEST_INTEGER)))
                raise self._long(block, row, j, int(X[row, j]))
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(X, dtype=self.schema.dtype)

    def _long(self, block: Block, row: int, column: int | str, value: int) -> DataError:
        words = f"{long_integer_words(value, value)}; subtract an offset, or {LEAVE_OUT} if it is an identifier"
        return self._bad(block, row, column, words)

    def _column_values(self, block: Block, column: Column, array: pa.Array) -> np.ndarray:
        if column.kind in ("number", "date"):
            return self._typed(block, self._numbers(block, column, array))
        dtype = np.dtype(self.schema.dtype)
        texts = self._stripped(as_text(array, column.name))
        codes = pc.index_in(texts, value_set=pa.array(column.categories, pa.string()))
        indices = pc.fill_null(codes, -1).to_numpy(zero_copy_only=False)
        missing = texts.is_null().to_numpy(zero_copy_only=False)
        strange = (indices < 0) & ~missing
        if strange.any():
            self._note_unseen(block, column, texts, strange)
        filled = self.schema.missing == "fill"
        if filled:
            self._note_filled(column, missing)
        if column.kind == "ordinal":
            out: np.ndarray = indices.astype(dtype)[:, None]
            if missing.any() and dtype.kind == "f" and not filled:
                out[missing] = np.nan
        else:
            out = np.zeros((len(indices), len(column.categories)), dtype)
            known = np.flatnonzero(indices >= 0)
            out[known, indices[known]] = 1
            if missing.any() and not filled and out.shape[1]:
                if dtype.kind != "f" and not self.schema.skips:
                    raise self._bad(block, int(np.argmax(missing)), column.name, "the category is missing")
                if dtype.kind == "f":
                    out[missing, 0] = np.nan  # reported by _treat
                else:
                    self._rejected |= dict.fromkeys(np.flatnonzero(missing).tolist(), f"{column.name!r} is missing")
        return np.concatenate([out, missing[:, None].astype(dtype)], axis=1) if column.indicator else out

    def _numbers(self, block: Block, column: Column, array: pa.Array) -> np.ndarray:
        """A number; or the days of a date since 1970, its place in each period, and whether it is missing."""
        if column.kind == "number":
            values = self._as_number(block, column.name, array).to_numpy(zero_copy_only=False)
        else:
            values = self._days(block, column, array)
        parts = [values]
        for period in column.periods:
            angle = 2 * np.pi * (values / PERIODS[period])
            parts += [np.sin(angle), np.cos(angle)]
        return np.stack(parts + ([np.isnan(values)] if column.indicator else []), axis=1)

    def _as_number(self, block: Block, column: str, array: pa.Array, target: pa.DataType | None = None) -> pa.Array:
        target = target or pa.float64()
        if array.type == target:
            return array
        array = decoded(array)
        if pa.types.is_duration(array.type):
            ticks = array.cast(pa.int64()).cast(pa.float64(), safe=False)
            return pc.divide(ticks, DAY[array.type.unit] / DAY["s"]).cast(target, safe=False)
        texts = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        notation = self.schema.notation
        if texts and notation is not None:
            return pa.array(self._in_notation(block, column, array, notation)).cast(target)
        if (
            texts
            and pc.all(pc.is_in(pc.utf8_lower(array.drop_null()), pa.array(["true", "false"], array.type))).as_py()
        ):
            array = array.cast(pa.bool_())
        if pa.types.is_decimal(array.type) or pa.types.is_boolean(array.type):
            self._check_long(block, column, array)
            array = array.cast(pa.uint8() if pa.types.is_boolean(array.type) else pa.float64())
        self._check_long(block, column, array)
        try:
            return array.cast(target, safe=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if texts and self.skip_texts:
                return self._readable(array, column, target)
            values = array.to_pylist()
        row = next((i for i, value in enumerate(values) if value is not None and not is_number(value)), 0)
        raise self._bad(block, row, column, f"{str(values[row])[:60]!r} is not a number")

    def _check_long(self, block: Block, column: str, array: pa.Array) -> None:
        """Refuse integers, also as decimals or texts, of which several would become one floating point number."""
        kind = array.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            row = long_integer_among(array)
        elif (pa.types.is_integer(kind) and kind.bit_width == 64) or (pa.types.is_decimal(kind) and kind.scale <= 0):
            ends = pc.min_max(array)
            wrong = next(
                (end for end in ends.values() if end.is_valid and long_integer_words(*2 * [int(end.as_py())])), None
            )
            row = None if wrong is None else pc.index(array, wrong).as_py()
        else:
            return
        if row is not None:
            raise self._long(block, row, column, int(array[row].as_py()))

    def _readable(self, texts: pa.Array, column: str, target: pa.DataType) -> pa.Array:
        """The numbers among texts; or, if there are none, true and false. Rows with any other text are rejected."""
        read, wrong = texts, unreadable(texts)
        if not pc.any(pc.invert(wrong)).as_py():
            lower, one, zero = pc.utf8_lower(texts), pa.scalar("1", texts.type), pa.scalar("0", texts.type)
            read = pc.if_else(pc.equal(lower, "true"), one, pc.if_else(pc.equal(lower, "false"), zero, texts))
            wrong = unreadable(read)
        wrong = pc.fill_null(wrong, False)
        self._reject(wrong.to_numpy(zero_copy_only=False), column, texts, "a number")
        return pc.if_else(wrong, pa.scalar(None, texts.type), read).cast(target)

    def _reject(self, wrong: np.ndarray, column: str, texts: pa.Array, kind: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            self._rejected.setdefault(row, f"column {column!r}: {str(texts[row].as_py())[:60]!r} is not {kind}")

    def _in_notation(self, block: Block, column: str, texts: pa.Array, notation: Notation) -> np.ndarray:
        values, wrong = notation.numbers(texts)
        if wrong.any() and self.skip_texts:
            self._reject(wrong, column, texts, "a number")
        elif wrong.any():
            row = int(np.argmax(wrong))
            shown = repr(texts[row].as_py()[:60])
            how = str(notation).removeprefix("set ").replace("` to ", "` ")
            raise self._bad(block, row, column, f"{shown} is not a number with {how}")
        if (np.abs(values) >= LARGEST_INTEGER).any():
            joined = notation.without_thousands(texts)
            if (long := long_integer_among(joined)) is not None:
                raise self._long(block, long, column, int(joined[long].as_py()))
        return values

    def _stripped(self, texts: pa.Array) -> pa.Array:
        return pc.utf8_trim_whitespace(texts) if self.schema.strip else texts

    def _days(self, block: Block, column: Column, array: pa.Array) -> np.ndarray:
        array = decoded(array)
        # Durations were dates, in days, before they were numbers.
        if kind_of(array.type) == "date" or pa.types.is_null(array.type) or pa.types.is_duration(array.type):
            return days_of(array)
        if kind_of(array.type) != "text":
            raise self._bad(block, 0, column.name, f"{array[0]} is not a date like those of the training rows")
        if (found := parsed_days(array)) is not None:
            return found
        parsed = [parsed_days(array.slice(row, 1)) for row in range(len(array))]  # several formats, or a bad value
        if self.skip_texts:
            wrong = np.array([value is None for value in parsed])
            self._reject(wrong, column.name, array, "a date or time")
            parsed = [np.full(1, np.nan) if value is None else value for value in parsed]
        for row, value in enumerate(parsed):
            if value is None:
                what = f"{array[row].as_py()[:60]!r} is not a date or time (as 2026-01-31, 2026-01-31 12:00 or 12:00)"
                raise self._bad(block, row, column.name, what)
        return np.concatenate([value for value in parsed if value is not None])

    def _note_unseen(self, block: Block, column: Column, texts: pa.Array, strange: np.ndarray) -> None:
        row = int(np.argmax(strange))
        value = texts[row].as_py()
        if self.refuse_unseen:
            known = ", ".join(column.categories[:20])
            raise self._bad(block, row, column.name, f"the category {value!r} is unknown; known: {known}")
        count, first = self.unseen.get(column.name, (0, value))
        self.unseen[column.name] = (count + int(strange.sum()), first)

    def _note_filled(self, column: Column, missing: np.ndarray) -> None:
        """Of new rows: values that are missing where no row of the fit had to do without."""
        if missing.any() and not (self.refuse_unseen or column.indicator):
            name = f"{column.name}:missing"
            self.unseen[name] = (self.unseen.get(name, (0, ""))[0] + int(missing.sum()), "")

    def _treat(self, block: Block, X: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Missing and infinite values, by the policy. Marks rows to drop in `keep`."""
        infinite = np.isinf(X)
        if infinite.any() and not self.schema.skips:
            row, j = (int(v) for v in np.argwhere(infinite)[0])
            raise self._bad(block, row, j, f"the value is infinite, or too large for {self.schema.dtype}")
        missing = np.isnan(X)
        if not missing.any():
            return X
        if self.schema.missing == "drop":
            keep &= ~missing.any(axis=1)
            return X
        if self.schema.missing == "error" and self.schema.skips:
            return X
        if self.schema.missing == "error":
            row, j = (int(v) for v in np.argwhere(missing)[0])
            hint = "correct it, or set `missing` to indicator, drop, mean, median or a number"
            raise MissingValueError(str(self._bad(block, row, j, f"the value is missing; {hint}")))
        features = np.cumsum([0, *(len(column.outputs) for column in self.schema.columns)])
        for column, first in zip(self.schema.columns, features.tolist(), strict=False):
            if column.kind in ("number", "date"):
                self._note_filled(column, missing[:, first])
        return np.where(missing, self._fills.astype(X.dtype), X)

    def _bad(self, block: Block, row: int, column: int | str, what: str) -> DataError:
        name = column if isinstance(column, str) else self._columns_of_features[column]
        return DataError(f"{block.place(row)}, column {name!r}: {what}.")

    # labels

    def _extra(self, block: Block, name: str) -> pa.Array:
        if block.table is not None:
            return as_text(block.table.column(name), name)
        assert isinstance(self.source, MatrixSource)
        assert block.matrix is not None
        return pa.array(texts_of(block.matrix[:, self.source.feature_names.index(name)]))

    def _weights(self, block: Block) -> np.ndarray | None:
        if self.schema.weight is None:
            return None
        if block.table is not None:
            array = self._as_number(block, self.schema.weight, block.table.column(self.schema.weight))
            return np.array(array.to_numpy(zero_copy_only=False), np.float64)
        if self.schema.weight_position is not None and block.matrix is not None:
            return np.asarray(block.matrix[:, self.schema.weight_position], np.float64)
        if block.weights is None:
            raise DataError(f"{block.origin} has no weights, the data set has {self.schema.weight!r}.")
        return np.asarray(block.weights, np.float64)

    def _check_weights(self, block: Block, weights: np.ndarray, keep: np.ndarray) -> None:
        """Numbers >= 0. Rows without one are dropped where missing values are dropped, otherwise an error."""
        missing = np.isnan(weights)
        if self.schema.missing == "drop":
            keep &= ~missing
        wrong = ~((weights <= LARGEST_WEIGHT) & (weights >= 0)) & keep
        if wrong.any():
            row = int(np.argmax(wrong))
            if weights[row] > LARGEST_WEIGHT:
                what = f"the weight is {weights[row]:g}, it must be at most {LARGEST_WEIGHT:g}"
                raise self._bad(block, row, str(self.schema.weight), f"{what}; divide all weights by a constant")
            what = "missing" if missing[row] else f"{weights[row]:g}"
            hint = "; correct it, or set `missing` to drop" if missing[row] else ""
            raise self._bad(block, row, str(self.schema.weight), f"the weight is {what}, it must be >= 0{hint}")

    def _labels(self, block: Block) -> tuple[pa.Array | None, np.ndarray | None]:
        """The labels as an Arrow array, and where they are missing (None: nowhere)."""
        if self.schema.label is None:
            return None, None
        if block.table is not None:
            array = block.table.column(self.schema.label)
            array = decoded(array)
        else:
            values = block.target
            if values is None:
                assert block.matrix is not None
                values = block.matrix[:, self.schema.label_position]
            whole = self.schema.label_kind == "integer" and values.dtype.kind == "f"
            array = pa.array(np.ascontiguousarray(values.astype(np.int64) if whole else values))
        if self.schema.task == "regression" or pa.types.is_duration(array.type):
            array = self._as_number(block, str(self.schema.label), array)
        elif self.schema.strip and (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            array = self._stripped(array)
        missing = array.is_null(nan_is_null=pa.types.is_floating(array.type))
        return array, missing.to_numpy(zero_copy_only=False) if pc.any(missing).as_py() else None

    def _codes(self, block: Block, labels: pa.Array, offsets: np.ndarray) -> np.ndarray:
        if self.schema.task == "regression":
            values: np.ndarray = labels.to_numpy(zero_copy_only=False)
            if not np.isfinite(values).all():
                row = int(offsets[np.argmin(np.isfinite(values))])
                raise self._bad(block, row, str(self.schema.label), "the target is not finite")
            if self.few_targets is not None:
                self.few_targets.update(np.unique(values).tolist())
                self.few_targets = self.few_targets if len(self.few_targets) <= FEW_TARGETS else None
            return values
        encoded = labels.dictionary_encode()
        found = encoded.dictionary.to_pylist()
        if self.schema.class_names is not None and not self.fixed_classes:
            found = [self._named_class(block, value) for value in found]
        for value in found:
            if value not in self.codes:
                if self.fixed_classes:
                    row = int(offsets[found_index(encoded, found.index(value))])
                    what = f"the class {value!r} is unknown; known: {list(self.codes)[:20]}"
                    raise self._bad(block, row, str(self.schema.label), what)
                self.codes[value] = len(self.codes)
                if len(self.codes) > self.max_classes:
                    raise DataError(
                        f"{block.origin}: the label {self.schema.label!r} has more than {self.max_classes} different "
                        "values; choose a column of classes as label, or the task regression for numeric targets."
                    )
        table = np.array([self.codes[value] for value in found], np.int64)
        indices = encoded.indices.to_numpy(zero_copy_only=False)
        return np.asarray(table[indices]) if len(table) else np.zeros(0, np.int64)

    def _named_class(self, block: Block, value: Any) -> Any:
        names = self.schema.class_names or ()
        if not isinstance(value, int) or not 0 <= value < len(names):
            raise DataError(
                f"{block.origin}: the label {value!r} has no name; class_names has {len(names)}, for 0, 1, 2, ..."
            )
        return names[value]

    def sorted_classes(self) -> tuple[list[Any], np.ndarray]:
        """The classes in their final order, and the final code of each code of first occurrence."""
        if self.fixed_classes:
            return list(self.codes), np.arange(len(self.codes))
        names = self.schema.class_names
        key = names.index if names is not None else None
        ordered = list(names) if names is not None else sorted(self.codes, key=key)
        place = {value: i for i, value in enumerate(ordered)}
        return ordered, np.array([place[value] for value in self.codes], np.int64)


def check_single(source: Source, schema: Schema, found: Statistics) -> None:
    """Refuse rows that single precision, as requested, has merged."""
    if schema.dtype != "float32" or (isinstance(source, MatrixSource) and source.dtype == np.float32):
        return
    largest = np.maximum(np.abs(found.minimum), np.abs(found.maximum))
    constant = (found.squares == 0) & (largest >= 2**24)  # or values that have become equal
    for name, bad, value in zip(schema.feature_names, found.merged_in_single | constant, largest, strict=True):
        if bad and found.count > 1:
            raise DataError(
                f"{source.name}: float32 cannot tell the values of the feature {name!r} apart, which are about "
                f"{value:.6g}; set `dtype` to float64 or auto."
            )


def check_class_names(where: str, schema: Schema, names: Sequence[Any], *, asked: bool) -> None:
    """Refuse classes that may be numbers in another notation (unless asked for classes) or differ by spaces only."""
    texts = [name for name in names if isinstance(name, str)]
    words = {text.strip().lower(): text for text in texts}
    if not asked and words.keys() & {"true", "false"} and words.keys() <= {"true", "false", "0", "1"}:
        both = next((words[digit] for digit in ("0", "1") if digit in words), None)
        if both is not None:
            raise DataError(
                f"{where}: the labels {schema.label!r} mix true and false with {both!r}; write them in one way, or set "
                "`task` to classification if each is a class of its own."
            )
    if not asked and (marked := in_other_notation(texts)) is not None:
        raise DataError(
            f"{where}: the labels {schema.label!r} such as {marked!r} may be numbers in another notation: "
            f"{suggestion(texts)} and `task` to regression, or set `task` to classification if they are classes."
        )
    if schema.strip is None:
        refuse_spaces(where, str(schema.label), texts)


def refuse_spaces(where: str, column: str, texts: Sequence[str]) -> None:
    """Refuse texts that differ only by the spaces around them, unless it was said what is right."""
    known: dict[str, str] = {}
    for text in texts:
        other = known.setdefault(text.strip(), text)
        if other != text:
            raise DataError(
                f"{where}: column {column!r} holds {other!r} and {text!r}, which differ by spaces only; set `strip` to "
                "true to remove them, or to false to keep both."
            )


def found_index(encoded: Any, code: int) -> int:
    return int(np.argmax(encoded.indices.to_numpy(zero_copy_only=False) == code))
