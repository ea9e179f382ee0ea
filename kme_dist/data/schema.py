"""How each column is encoded: plain data, decided once, stored with the data set.

`draft_schema` reads headers and options; `kme_dist.data.survey.plan_schema` completes it where rows must be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from kme_dist.data.notation import Notation
from kme_dist.data.readers import LEAVE_OUT, UTF8, FileOptions, Kind, MatrixSource, Source, TableSource
from kme_dist.errors import AssumptionWarning, ConfigError, DataError, counted, warn

Task = Literal["classification", "regression", "none"]
MISSING = ("auto", "error", "drop", "mean", "median", "indicator")
PERIODS = {"year": 365.2425, "week": 7.0, "day": 1.0}  # of dates, in days
DTYPES = ("auto", "float32", "float64", "uint8")


@dataclass(frozen=True)
class TableOptions:
    """What to read from a source. Columns are given by name, or by position from 0 (negative: from the end)."""

    label: str | int | None = None
    features: tuple[str | int, ...] | None = None  # None: all except the label and reserved columns
    exclude: tuple[str | int, ...] = ()
    task: str = "auto"
    one_hot: tuple[str | int, ...] | Literal["auto"] = "auto"  # "auto": every text column not in `ordinal`
    ordinal: tuple[str | int, ...] = ()
    missing: str | float = "auto"  # "error", "drop", "mean", "median", "indicator", or a number to fill in
    dtype: str = "auto"  # the narrowest of uint8, float32 and float64 that holds every value of the source's type
    max_categories: int = 256
    max_classes: int = 10_000
    class_names: tuple[str, ...] | None = None  # for labels 0, 1, 2, ...
    feature_names: tuple[str, ...] | None = None  # for sources without names
    weight: str | int | None = None  # column of the weights of rows
    categories: tuple[str | int, ...] = ()  # columns that are categories whatever their values look like (007, 1,5)
    decimal: str = "."  # of numbers that are texts
    thousands: str = ""  # the separator between thousands
    percent: bool = False  # 10% is 0.1
    strip: bool | None = None  # spaces around texts; None: texts that differ by them only are an error

    @property
    def notation(self) -> Notation:
        return Notation(self.decimal, self.thousands, self.percent)

    def __post_init__(self) -> None:
        _ = self.notation  # which checks its parts
        if self.task not in ("auto", "classification", "regression"):
            raise ConfigError(f"task is {self.task!r}; it must be auto, classification or regression.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if isinstance(self.missing, str) and self.missing not in MISSING:
            raise ConfigError(f"missing is {self.missing!r}; it must be {', '.join(MISSING)} or a number.")


@dataclass(frozen=True)
class Column:
    """One source column among the features."""

    name: str
    kind: str  # number, one_hot, ordinal, date
    position: int = 0  # of a matrix
    categories: tuple[str, ...] = ()
    fill: float | None = None  # fill value of missing numbers; None: see Schema.missing
    periods: tuple[str, ...] = ()  # of a date: its place in the year, week or day, as sine and cosine
    indicator: bool = False  # whether a further feature is 1 where the value is missing
    duration: bool = False  # of numbers: whether they are the seconds of durations

    @property
    def is_plain(self) -> bool:
        """Whether the feature is the number in the column, which has to be there."""
        return self.kind == "number" and self.fill is None and not (self.indicator or self.duration)

    @property
    def outputs(self) -> list[str]:
        """The names of its features."""
        values = [f"{self.name}={c}" for c in self.categories] if self.kind == "one_hot" else [self.name]
        waves = [f"{self.name}:{wave}({period})" for period in self.periods for wave in ("sin", "cos")]
        return [*values, *waves, *([f"{self.name}:missing"] if self.indicator else [])]

    @property
    def fills(self) -> list[float]:
        """What each feature is where the value is missing; NaN: not known."""
        first = [0.0] * len(self.categories) if self.kind == "one_hot" else [np.nan if self.fill is None else self.fill]
        return [*first, *[0.0] * (2 * len(self.periods)), *([1.0] if self.indicator else [])]

    def to_json(self) -> dict[str, Any]:
        found = {"name": self.name, "kind": self.kind, "position": self.position}
        found |= {"categories": list(self.categories), "fill": self.fill}
        further = {"periods": list(self.periods), "indicator": self.indicator, "duration": self.duration}
        return found | {key: value for key, value in further.items() if value}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Column:
        names = (stored["name"], stored["kind"], int(stored["position"]), tuple(stored["categories"]))
        marks = (bool(stored.get(name, False)) for name in ("indicator", "duration"))
        return cls(*names, stored["fill"], tuple(stored.get("periods", ())), *marks)


@dataclass(frozen=True)
class Schema:
    """How rows of a source become rows of X and y."""

    columns: tuple[Column, ...]
    label: str | None
    label_kind: str  # text, integer, number, boolean; "none" without a label
    label_position: int | None
    task: Task
    dtype: str
    missing: str  # error, drop, fill
    sample_shape: tuple[int, ...]
    classes: tuple[Any, ...] | None = None  # once known
    class_names: tuple[Any, ...] | None = None
    weight: str | None = None  # column of the weights of rows
    weight_position: int | None = None  # of a matrix
    notation: Notation | None = None  # of numbers that are texts; None: as 1234.5
    strip: bool | None = None  # spaces around texts
    delimiter: str | None = None  # of text files, where it was given
    charset: str | None = None  # of text files, where it is not utf-8
    # How the source was read, where it could be read in another way; only until it is read.
    holes: Mapping[str, int] = field(default_factory=dict, compare=False)  # rows with missing values, by column
    notes: tuple[str, ...] = field(default=(), compare=False)
    skips: bool = field(default=False, compare=False)  # rows to predict: those that cannot be used are no error

    @property
    def feature_names(self) -> list[str]:
        return [name for column in self.columns for name in column.outputs]

    @property
    def target_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int64 if self.task == "classification" else np.float64)

    def to_json(self) -> dict[str, Any]:
        return {
            # If all are plain, feature names and their order say it all.
            "columns": [column.to_json() for column in self.columns] if self.encodes else [],
            "label": self.label,
            "label_kind": self.label_kind,
            "label_position": self.label_position,
            "missing": self.missing,
            **({} if self.weight is None else {"weight": self.weight, "weight_position": self.weight_position}),
            **({} if self.notation is None else {"notation": self.notation.to_json()}),
            **({} if self.strip is None else {"strip": self.strip}),
            **({} if self.delimiter is None else {"delimiter": self.delimiter}),
            **({} if self.charset is None else {"charset": self.charset}),
        }

    @classmethod
    def from_json(cls, attributes: Mapping[str, Any]) -> Schema:
        stored = attributes["schema"]
        columns = tuple(map(Column.from_json, stored["columns"])) or plain_columns(attributes["feature_names"])
        return cls(
            columns,
            stored["label"],
            stored["label_kind"],
            stored["label_position"],
            attributes["task"],
            attributes["dtype"],
            stored["missing"],
            tuple(attributes["sample_shape"]),
            None if attributes.get("classes") is None else tuple(attributes["classes"]),
            None if attributes.get("class_names") is None else tuple(attributes["class_names"]),
            stored.get("weight"),
            stored.get("weight_position"),
            Notation.from_json(stored["notation"]) if stored.get("notation") else None,
            stored.get("strip"),
            stored.get("delimiter"),
            stored.get("charset"),
        )

    @property
    def encodes(self) -> bool:
        """Whether features differ from the columns that they are read from, or files must be read in a given way."""
        given = (self.notation, self.delimiter, self.charset) != (None, None, None)
        return given or not all(column.is_plain for column in self.columns)

    def file_options(self, given: FileOptions) -> FileOptions:
        """How to read a file of further rows: as the first one, where nothing else is given."""
        charset = self.charset if given.encoding == UTF8 else None
        return replace(given, delimiter=given.delimiter or self.delimiter, encoding=charset or given.encoding)

    def encoding_json(self) -> dict[str, Any]:
        """Only how features are encoded, as a model keeps it; `from_json` restores it."""
        plain = self.without_label()
        about = {"task": plain.task, "dtype": plain.dtype, "sample_shape": list(plain.sample_shape)}
        return {"schema": plain.to_json(), "feature_names": plain.feature_names, **about}

    @property
    def groups(self) -> dict[str, list[int]]:
        """The positions of the features of each column."""
        ends = np.cumsum([0, *(len(column.outputs) for column in self.columns)]).tolist()
        return {column.name: list(range(ends[i], ends[i + 1])) for i, column in enumerate(self.columns)}

    @property
    def positions(self) -> list[int]:
        """Columns of a matrix that are read."""
        others = [at for at in (self.label_position, self.weight_position) if at is not None]
        return [column.position for column in self.columns] + others

    def without_label(self) -> Schema:
        """For rows to predict, which need no labels and no weights."""
        names: dict[str, Any] = {"label": None, "label_position": None, "weight": None, "weight_position": None}
        return replace(self, label_kind="none", task="none", classes=None, class_names=None, **names)


def plain_columns(names: Sequence[str]) -> tuple[Column, ...]:
    """Columns of numbers, used as they are."""
    return tuple(Column(str(name), "number", i) for i, name in enumerate(names))


def draft_schema(source: Source, options: TableOptions, reserved: Sequence[str | int] = ()) -> Schema:
    """The part of the schema that headers and options determine; categories and fill values are still empty."""
    names, kinds = _names_and_kinds(source, options)
    find = finder(source.name, names)
    label = None if options.label is None else _label_name(source, options, find)
    taken = {find(name) for name in reserved} | {find(name) for name in options.exclude}
    if label is not None:
        taken.add(label)
    weight = None if options.weight is None else _weight_name(source, find(options.weight), label, kinds)
    if weight is not None:
        taken.add(weight)
    if options.features is None:
        features = [name for name in names if name not in taken]
    else:
        features = [find(name) for name in options.features]
        for what, name in (("label", label), ("weight", weight)):
            if name in features:
                raise ConfigError(
                    f"{source.name}: the {what} {name!r} is also listed in features; remove it from one of them."
                )
    if not features:
        raise DataError(f"{source.name}: no feature columns; found columns {names}.")
    schema = Schema(
        tuple(_column(source.name, name, names.index(name), kinds[name], options, find) for name in features),
        *_label_plan(source, options, label, names, kinds),
        dtype=_dtype(source, options, features, kinds),
        missing={"auto": "error", "error": "error", "drop": "drop"}.get(str(options.missing), "fill"),
        sample_shape=source.sample_shape if isinstance(source, MatrixSource) and len(features) == len(names) else (),
        class_names=options.class_names or (source.class_names if isinstance(source, MatrixSource) else None),
        weight=weight,
        weight_position=names.index(weight) if weight is not None and isinstance(source, MatrixSource) else None,
        notation=None if options.notation.is_plain or isinstance(source, MatrixSource) else options.notation,
        strip=options.strip,
    )
    if isinstance(source, TableSource) and (read := source.options) is not None:
        schema = replace(schema, delimiter=read.delimiter, charset=None if read.encoding == UTF8 else read.encoding)
    if isinstance(source, TableSource):
        notes = (*source.notes, *_index_words(source, schema), *codes_read_as_numbers(source, schema))
        schema = replace(schema, notes=notes)
        lasting = {name for name, stored in source.types.items() if pa.types.is_duration(stored)}
        marked = (replace(c, duration=c.kind == "number" and c.name in lasting) for c in schema.columns)
        schema = replace(schema, columns=tuple(marked))
    if not schema.sample_shape:
        schema = replace(schema, sample_shape=(len(schema.feature_names),))
    return schema


def _names_and_kinds(source: Source, options: TableOptions) -> tuple[list[str], dict[str, Kind]]:
    if isinstance(source, TableSource):
        return list(source.kinds), source.kinds
    names = list(options.feature_names or source.feature_names)
    if len(names) != len(source.feature_names):
        raise ConfigError(f"{source.name}: {len(names)} feature_names for {len(source.feature_names)} columns.")
    return names, {name: "number" for name in names}


def finder(where: str, names: list[str]) -> Callable[[str | int], str]:
    known = set(names)

    def find(wanted: str | int) -> str:
        if isinstance(wanted, str) and wanted in known:
            return wanted
        try:
            position = int(wanted)
        except ValueError:
            import difflib

            near = difflib.get_close_matches(str(wanted), names, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Its columns: {', '.join(map(repr, names[:20]))}."
            raise DataError(f"{where} has no column {wanted!r}.{hint}") from None
        if not -len(names) <= position < len(names):
            raise DataError(f"{where} has no column {position}; it has {len(names)} columns, counted from 0.")
        return names[position]

    return find


def _index_words(source: TableSource, schema: Schema) -> list[str]:
    """One line on every feature that pandas may have written as the index of a table, which says where a row was."""
    return [
        f"{source.name}: the column {column.name!r}, which has no name of its own, is a feature; if it is the index of "
        f"a data frame, {LEAVE_OUT} (or write without it: index=False)"
        for column in schema.columns
        if column.name in source.unnamed or re.fullmatch(r"__index_level_\d+__|Unnamed: \d+", column.name)
    ]


def codes_read_as_numbers(source: Source, schema: Schema) -> list[str]:
    """One line on every column of integers such as 007, which are more than the numbers that they are read as; there
    may be more of them once the source is read to its end."""
    if isinstance(source, MatrixSource):
        return []
    used = {column.name for column in schema.columns if column.kind == "number"}
    lines = [
        f"{source.name}: the column {name!r} is read as numbers, so that {text!r} is {float(text):.16g}; list it in "
        "`categories` to keep such codes as they are"
        for name, text in source.codes.items()
        if name in used
    ]
    if schema.label is not None and schema.label in source.codes and schema.label_kind == "text":
        lines.append(
            f"{source.name}: the labels {schema.label!r} are texts, since integers such as "
            f"{source.codes[schema.label]!r} are not the numbers that they would be read as"
            + ("; set `task` to regression for numbers" if len(source.codes[schema.label]) < 17 else "")
        )
    return lines


def few_targets_words(where: str, schema: Schema, found: Collection[float] | None, rows: int) -> list[str]:
    """One line if the targets of a regression that nobody asked for are so few that they may be classes."""
    if schema.task != "regression" or not found or rows < 5 * len(found):
        return []
    shown = ", ".join(f"{value:g}" for value in sorted(found)[:4]) + (", ..." if len(found) > 4 else "")
    return [
        f"{where}: the labels {schema.label!r} are numbers with a decimal point, and so targets of a regression, but "
        f"only {counted(len(found), 'different value')} ({shown}); set `task` to classification if they are classes"
    ]


def announce(lines: Sequence[str]) -> None:
    """Say how a source was read, as warnings, which the command line shows as notes."""
    for line in dict.fromkeys(lines):
        warn(line, AssumptionWarning)


OTHER_RULES = "`missing` is indicator by default; others are error, drop, mean, median or a number"


def missing_words(where: str, schema: Schema, others: str = OTHER_RULES) -> list[str]:
    """One line on missing values that were filled by default, and on other rules; none if there are none."""
    if not schema.holes:
        return []
    shown = [f"{name!r} ({counted(count, 'row')})" for name, count in list(schema.holes.items())[:8]]
    more = f" and {len(schema.holes) - 8} more columns" if len(schema.holes) > 8 else ""
    return [
        f"{where}: missing values in {', '.join(shown)}{more} are the mean or no category, and marked by a feature "
        f"NAME:missing ({others})"
    ]


def _label_name(source: Source, options: TableOptions, find: Callable[[str | int], str]) -> str | None:
    if isinstance(source, MatrixSource) and source.target_dtype is not None:
        return None  # the target of the matrix is the label
    return find(options.label)  # type: ignore[arg-type]


def _weight_name(source: Source, name: str, label: str | None, kinds: Mapping[str, Kind]) -> str:
    if name == label:
        raise ConfigError(f"{source.name}: the column {name!r} is both label and weight; choose one of them.")
    if kinds[name] not in ("number", "integer", "boolean"):
        raise DataError(f"{source.name}: the weight {name!r} holds {kinds[name]} values; it must hold numbers >= 0.")
    return name


def _label_plan(
    source: Source, options: TableOptions, label: str | None, names: list[str], kinds: dict[str, Kind]
) -> tuple[str | None, str, int | None, Task]:
    """label, label_kind, label_position, task"""
    position: int | None = None
    if isinstance(source, MatrixSource):
        if label is not None:
            position = names.index(label)
            kind = "integer" if source.dtype.kind in "iub" else "number"
        elif source.target_dtype is not None:
            label = options.label if isinstance(options.label, str) else "y"
            letter = source.target_dtype.kind
            kind = "text" if letter == "U" else "integer" if letter in "iub" or source.whole_targets else "number"
        else:
            return None, "none", None, "none"
    elif label is None:
        return None, "none", None, "none"
    else:
        coded = label in source.codes or label in map(finder(source.name, names), options.categories)
        kind = "text" if coded and options.task != "regression" else kinds[label]
    if kind == "category":
        return label, "integer", position, "classification"
    if kind in ("date", "other"):
        raise DataError(f"{source.name}: the label {label!r} holds {kind} values; it must be a class or a number.")
    task: Task = "regression" if kind == "number" else "classification"
    if options.task != "auto":
        task = options.task  # type: ignore[assignment]
    if task == "regression":
        if kind == "text" and options.notation.is_plain:
            raise DataError(f"{source.name}: the label {label!r} holds text; regression requires numbers.")
        kind = "number"
    return label, kind, position, task


def _column(
    where: str, name: str, position: int, kind: Kind, options: TableOptions, find: Callable[[str | int], str]
) -> Column:
    if name in {find(c) for c in options.ordinal}:
        return Column(name, "ordinal", position)
    if name in {find(c) for c in options.categories}:
        return Column(name, "one_hot", position)
    if options.one_hot != "auto" and name in {find(c) for c in options.one_hot}:
        return Column(name, "one_hot", position)
    if kind == "date":
        return Column(name, "date", position)
    if kind == "other":
        raise DataError(f"{where}: the column {name!r} holds neither numbers nor text; {LEAVE_OUT}.")
    if kind in ("text", "category"):
        if options.one_hot != "auto":
            raise DataError(f"{where}: the column {name!r} holds text and is not in one_hot; add it, or {LEAVE_OUT}.")
        return Column(name, "one_hot", position)
    return Column(name, "number", position)


def _dtype(source: Source, options: TableOptions, features: list[str], kinds: dict[str, Kind]) -> str:
    if options.dtype != "auto":
        return options.dtype
    if isinstance(source, MatrixSource) and source.dtype in (np.dtype(np.uint8), np.dtype(bool)):
        return "uint8"
    # Lossless: in single precision neighbouring timestamps would become equal.
    narrow = isinstance(source, MatrixSource) and np.can_cast(source.dtype, np.float32, "safe")
    return "float32" if narrow else "float64"
