"""The rows of a run: read, checked, split into training and test rows, and stored as a data set.

    data = stored(config.data, folder / "data.zarr", checked(config.data))   # with the splits `train` and `test`
    tables = load(config.data)                            # the same rows in memory
    tables.X_train, tables.y_train, tables.X_test, tables.y_test, tables.feature_names

The data set stores the encoding (categories of text columns, fill values), like one of `kme-dist ingest`, so that new
rows can be encoded in the same way.

A data set with both splits is used in place. Errors in the data are raised here, before any computation: the row and
column of a missing value, a label without training rows, a column that does not exist.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.model_selection import train_test_split

from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import DATASET_FORMAT, Dataset, open_dataset
from kme_dist.data.encode import Encoder
from kme_dist.data.ingest import ingest
from kme_dist.data.matrix_readers import dataset_source
from kme_dist.data.places import Place
from kme_dist.data.readers import FileOptions, MatrixSource, Source, TableSource, open_source
from kme_dist.data.reading import Table, read_table, sort_options
from kme_dist.data.schema import Schema, TableOptions, draft_schema
from kme_dist.data.store import check_name
from kme_dist.errors import ConfigError, DataError, counted

if TYPE_CHECKING:
    from kme_dist.config import DataConfig


IN_MEMORY_BYTES = 512 << 20  # larger sources are streamed, and split during ingest
WHOLE_FILE_BYTES = 256 << 20  # larger files are identified by size and time, not by content
PARTS = frozenset({"train", "test"})
# How a file is written, where its content does not determine it.
WRITTEN = ("categories", "delimiter", "header", "encoding", "decimal", "thousands", "percent", "strip")
FEW_VALUES, MANY_VALUES = 20, 100  # of a label: whole numbers with a decimal point are classes, integers are numbers


def fingerprint(settings: DataConfig) -> str:
    """Changes with the settings and with the content of the sources."""
    sha = hashlib.sha256(settings.model_dump_json().encode())
    for source in filter(None, (settings.source, settings.test_source)):
        if not source.startswith("sklearn:"):
            sha.update(_fingerprint(source).encode())
    return sha.hexdigest()


def _fingerprint(source: str) -> str:
    if (data := dataset_at(source)) is not None:
        return hashlib.sha256(str(data.attributes["digests"]).encode()).hexdigest()
    place = Place.of(source)
    if not place.is_local:
        return ""
    sha = hashlib.sha256()
    for file in sorted(place.path.rglob("*")) if place.path.is_dir() else [place.path]:
        if file.is_file():
            facts = file.stat()
            sha.update(f"{file.relative_to(place.path)} {facts.st_size}".encode())
            if facts.st_size > WHOLE_FILE_BYTES:
                sha.update(f"{facts.st_mtime_ns}".encode())
            else:
                with file.open("rb") as stream:
                    sha.update(hashlib.file_digest(stream, "sha256").digest())
    return sha.hexdigest()


@dataclass(frozen=True)
class Large:
    """A source that is not held in memory, and what is known of it before it is stored."""

    label: str
    numeric: bool  # the label is a number to predict, not a class
    data: Dataset | None = None
    task: str = "auto"  # of a file: how to read the label


def checked(settings: DataConfig, *, test_rows: bool = True) -> Dataset | Tables | Large:
    """What can be checked before anything is stored: the data set that is used in place, or the rows of a table; of a
    large source only the label. Without `test_rows` a data set need not have the splits `train` and `test`.
    """
    data = dataset_at(settings.source)
    if data is not None and in_place(settings, data, test_rows=test_rows):
        return data
    return _large(settings, data) if _bytes(settings.source, data) > IN_MEMORY_BYTES else load(settings)


def stored(
    settings: DataConfig,
    dest: Path,
    found: Dataset | Tables | Large,
    *,
    client: Any = None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> Dataset:
    """The data set of a run, with the splits `train` and `test`: the source itself, or a copy at `dest`.

    `found` is the result of `checked`.
    """
    if isinstance(found, Dataset):
        return found
    if isinstance(found, Large):
        return _streamed(settings, found, dest, client, progress)
    train, total = len(found.y_train), len(found.y_train) + len(found.y_test)
    y = np.concatenate([found.y_train, found.y_test])
    classes, codes = (None, y) if found.numeric else np.unique(y, return_inverse=True)
    X = np.concatenate([found.X_train, found.X_test])
    weights = None
    if found.w_train is not None:
        weights = np.concatenate([found.w_train, _weights_of(found.w_test, found.X_test)])
    names = (found.feature_names, None if classes is None else classes.tolist())
    return ingest(
        Table(X, codes, *names, rows=found.rows, schema=found.schema, weights=weights, weight=found.weight),
        dest,
        label=found.label,
        split=f"train=0:{train},test={train}:{total}",
        task="regression" if found.numeric else "classification",
        dtype="float64",
        overwrite=True,
        progress=progress,
    )


def sample(data: Dataset, limit: int) -> Tables:
    """The first rows of either split, at most `limit`, for plots."""
    X_test, y_test = _first_rows(data, data.splits.get("test", ()), limit)
    return Tables(
        *_first_rows(data, data.ranges(data.training_split()), limit), X_test, y_test, list(data.feature_names)
    )


def _first_rows(data: Dataset, ranges: Iterable[tuple[int, int]], limit: int) -> tuple[np.ndarray, np.ndarray]:
    X, codes = [np.zeros((0, data.features))], [np.zeros(0, np.int64)]
    for start, stop in ranges:
        rows, y = data.read_rows(start, min(stop, start + limit))
        limit -= len(rows)
        X.append(rows.reshape(len(rows), -1).astype(np.float64))
        codes.append(np.asarray(y))
    found = np.concatenate(codes)
    return np.concatenate(X), found if data.classes is None else np.asarray(data.classes)[found]


def in_place(settings: DataConfig, data: Dataset, *, test_rows: bool = True) -> bool:
    """Whether a data set is used in place: it has the required splits, and the settings do not change it."""
    own_label = settings.label is None or settings.label == data.label
    changing = ("test_source", "features", "exclude", "missing", *WRITTEN)
    plain = all(getattr(settings, key) is None for key in changing)
    parts = is_divided(data) or not test_rows
    own_weight = settings.weight is None or settings.weight == data.schema.weight
    return settings.stored_split and parts and plain and own_label and own_weight and data.y is not None


def is_divided(data: Dataset) -> bool:
    return set(data.splits) >= PARTS


def _bytes(source: str, data: Dataset | None) -> int:
    if data is not None:
        return data.rows * data.features * 8
    place = Place.of(source)
    if source.startswith("sklearn:") or not place.is_local:
        return 0
    files = place.path.rglob("*") if place.path.is_dir() else [place.path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _large(settings: DataConfig, data: Dataset | None) -> Large:
    source = settings.source
    if settings.test_source is not None:
        raise ConfigError(
            f"data.test_source is for tables that fit in memory, and {source} is larger than "
            f"{IN_MEMORY_BYTES >> 20} MiB; put both into one data set with `kme-dist ingest --split-column`"
        )
    if data is not None:
        if data.y is None:
            raise _without_labels(data)
        weight = (data.schema.weight or "weight") if data.has_weights else None
        _check_own_columns(settings, source, data.label or "target", weight)
        return Large(data.label or "target", data.classes is None, data)
    files, options = sort_options(source, _reading(settings))
    opened = open_source(source, files)
    schema = draft_schema(opened, options)
    if schema.label is None:
        names = opened.kinds if isinstance(opened, TableSource) else opened.feature_names
        raise _without_label(source, names)
    task = _task_of(opened, options)
    return Large(schema.label, (task or schema.task) == "regression", None, task or settings.task)


def _streamed(settings: DataConfig, found: Large, dest: Path, client: Any, progress: Any) -> Dataset:
    """A source larger than memory: read, divided into training and test rows, and stored in one pass."""
    data, share = found.data, settings.test_fraction
    by_chance = {
        "shuffle": settings.split_seed,
        "split": {"train": 1 - share, "test": share},
        "stratify": settings.stratify and not found.numeric,
    }
    stored: dict[str, Any] = {"overwrite": True, "progress": progress}
    if data is None:
        reading = {**_reading(settings), "task": found.task}
        return ingest(settings.source, dest, client=client, **stored, **reading, **by_chance)
    features = None
    if settings.features is not None or settings.exclude is not None:
        features = tuple(data.feature_names[i] for i in _chosen(settings, data.feature_names, settings.source))
    if not (settings.stored_split and is_divided(data)):
        return ingest(dataset_source(data, FileOptions()), dest, features=features, **stored, **by_chance)
    train, test = data.split_rows("train"), data.split_rows("test")
    rows = dataset_source(data, FileOptions(), ("train", "test"))
    return ingest(rows, dest, features=features, split=f"train=0:{train},test={train}:{train + test}", **stored)


@dataclass(frozen=True)
class Tables:
    """Training and test rows. X: (n, d) float array, y: (n,) original labels, or numeric targets."""

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    feature_names: list[str]
    label: str = "target"
    schema: Schema | None = None  # the encoding of the source, if its columns are not plain numbers
    w_train: np.ndarray | None = None  # weights of the rows
    w_test: np.ndarray | None = None
    weight: str = "weight"  # their column
    numeric: bool = False  # y are numbers to predict, not classes
    # Positions in the source, of training and then of test rows.
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def digest(self) -> str:
        """Changes when any value, label, weight or column name changes."""
        sha = hashlib.sha256("\0".join(self.feature_names).encode())
        weights = [w for w in (self.w_train, self.w_test) if w is not None]
        for array in (self.X_train, self.y_train, self.X_test, self.y_test, *weights):
            plain = np.ascontiguousarray(array.astype(str) if array.dtype == object else array)
            sha.update(f"{plain.dtype.str}{plain.shape}".encode())
            sha.update(plain.tobytes())
        return sha.hexdigest()


@dataclass(frozen=True)
class _Source:
    """Rows of one source: features as numbers, original labels."""

    X: np.ndarray
    y: np.ndarray
    feature_names: list[str]
    label: str = "target"
    schema: Schema | None = None
    weights: np.ndarray | None = None
    weight: str = "weight"
    numeric: bool = False
    rows: np.ndarray | None = None  # positions in the source; None: all of them

    @property
    def positions(self) -> np.ndarray:
        return np.arange(len(self.X)) if self.rows is None else self.rows


def load(settings: DataConfig) -> Tables:
    """Read the source (and the test source, if given) and split."""
    data = dataset_at(settings.source)
    parts_known = data is not None and settings.stored_split and set(data.splits) >= PARTS
    part = "train" if parts_known and settings.test_source is None else None
    rows = _read(settings, settings.source, part)
    X, y = rows.X, rows.y
    if settings.image_shape is not None:
        height, width = settings.image_shape
        if height * width != X.shape[1]:
            raise ConfigError(
                f"data.image_shape is [{height}, {width}], {height * width} pixels, but "
                f"{settings.source} has {X.shape[1]} features; make the two agree"
            )
    if settings.test_source is not None:
        test = _read(settings, settings.test_source, like=rows.schema)
        if test.feature_names != rows.feature_names:
            raise DataError(
                f"the columns of {settings.test_source} differ from those of {settings.source}: "
                f"{_first_difference(test.feature_names, rows.feature_names)}"
            )
        X_train, X_test, y_train, y_test, *weights = X, test.X, y, test.y, rows.weights, test.weights
        own = rows.positions, test.positions
    elif part is not None:
        test = _read(settings, settings.source, "test")
        X_train, X_test, y_train, y_test, *weights = X, test.X, y, test.y, rows.weights, test.weights
        own = rows.positions, test.positions
    else:
        X_train, X_test, y_train, y_test, *others = _split(settings, rows)
        own, weights = tuple(others[:2]), others[2:]
    names = (rows.feature_names, rows.label, rows.schema)
    facts = (*(weights or (None, None)), rows.weight, rows.numeric, np.concatenate(own))
    tables = Tables(X_train, y_train, X_test, y_test, *names, *facts)
    if not rows.numeric:
        _check_classes(settings, y_train, y_test)
    return tables


def _check_classes(settings: DataConfig, y_train: np.ndarray, y_test: np.ndarray) -> None:
    if len(np.unique(y_train)) < 2:
        raise DataError(
            f"{settings.source}: the training rows have only one class ({y_train[0]!s}); "
            f"at least two are required, check data.label"
        )
    unknown = np.setdiff1d(y_test, y_train)
    if len(unknown):
        row = int(np.flatnonzero(y_test == unknown[0])[0])
        raise DataError(
            f"test row {row} has the label {str(unknown[0])!r}, which no training row has; "
            f"correct the label, or give the class training rows"
        )


def _weights_of(weights: np.ndarray | None, X: np.ndarray) -> np.ndarray:
    """The weights of test rows, which may come without."""
    return np.ones(len(X)) if weights is None else weights


def _read(settings: DataConfig, source: str, part: str | None = None, like: Schema | None = None) -> _Source:
    """The rows of a source, or of one split of a data set; those of a file encoded by the schema `like`."""
    data = dataset_at(source)
    if data is None and not source.startswith("sklearn:"):
        rows = _from_file(settings, source, like)
    else:
        rows = _built_in(source, settings.task) if data is None else _from_dataset(data, part)
        _check_own_columns(settings, source, rows.label, None if rows.weights is None else rows.weight)
        if settings.features is not None or settings.exclude is not None:
            names = rows.feature_names
            columns = _chosen(settings, names, source)
            rows = replace(rows, X=rows.X[:, columns], feature_names=[names[i] for i in columns], schema=None)
    X = np.ascontiguousarray(rows.X, dtype=np.float64)
    bad = np.argwhere(~np.isfinite(X))
    if len(bad):
        row, column = (int(index) for index in bad[0])
        raise DataError(
            f"{source} row {row}, column {rows.feature_names[column]!r}: value is {X[row, column]}, "
            f"it must be finite; drop or fill such rows "
            f"({len(np.unique(bad[:, 0]))} of {len(X)} rows are affected)"
        )
    return replace(rows, X=X)


def _check_own_columns(settings: DataConfig, source: str, label: str, weight: str | None) -> None:
    """The columns of a source that has its own label, and weights or not (None), cannot be chosen."""
    if settings.label is not None and settings.label != label:
        raise ConfigError(f"data.label is {settings.label!r}, but {source} has its own labels; remove data.label")
    if settings.weight is not None and settings.weight != weight:
        raise ConfigError(
            f"data.weight is {settings.weight!r}, but {source} "
            + ("has no weights" if weight is None else f"has its own, {weight!r}")
            + "; remove data.weight, or ingest the table with --weight"
        )


def _chosen(settings: DataConfig, names: list[str], source: str) -> list[int]:
    """The positions of the features that a config chooses."""
    chosen = range(len(names)) if settings.features is None else settings.features
    without = {_position(column, names, source, "exclude") for column in settings.exclude or ()}
    return [i for i in (_position(column, names, source) for column in chosen) if i not in without]


def _built_in(source: str, task: str) -> _Source:
    """The small tables that ship with scikit-learn; nothing is downloaded."""
    from sklearn import datasets

    name = source.removeprefix("sklearn:")
    table = getattr(datasets, "load_" + name)()
    names = [str(column) for column in table.feature_names]
    if not hasattr(table, "target_names"):  # diabetes
        if task == "classification":
            raise ConfigError(f"data.task is classification, but the label of {source} is a number; remove data.task")
        return _Source(table.data, np.asarray(table.target, np.float64), names, numeric=True)
    if task == "regression":
        raise ConfigError(f"data.task is regression, but {source} has classes; choose sklearn:diabetes")
    return _Source(table.data, np.asarray(table.target_names)[table.target], names)


def dataset_at(source: str) -> Dataset | None:
    """The data set at a path or address; None for anything else, including other Zarr groups."""
    if source.startswith("sklearn:"):
        return None
    place = Place.of(source)
    if not place.exists():
        return None
    if (attributes := read_attributes(place)).get("format") != DATASET_FORMAT:
        check_name(place, attributes)
        return None
    return open_dataset(place)


def _from_dataset(data: Dataset, part: str | None) -> _Source:
    X, codes = data.read(part)
    if codes is None:
        raise _without_labels(data)
    labels = codes if data.classes is None else np.asarray(data.classes)[codes]
    names = (data.feature_names, data.label or "target")
    weights = data.weights(part)
    weighted = (weights, data.schema.weight or "weight")
    positions = np.concatenate([np.arange(*span) for span in data.ranges(part)])
    return _Source(X.reshape(len(X), -1), labels, *names, data.schema, *weighted, data.classes is None, positions)


def _without_labels(data: Dataset) -> DataError:
    return DataError(f"{data.path} has no labels; ingest it with the column of the classes or targets as label")


def _without_label(source: str, names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"data.label is missing: name the column of {source} that holds the classes or targets; "
        f"its columns are {', '.join(map(repr, list(names)[:12]))}"
    )


def _from_file(settings: DataConfig, source: str, like: Schema | None) -> _Source:
    reading = _reading(settings)
    if like is not None:  # columns are those of the other table
        reading.pop("weight", None)
    else:
        files, options = sort_options(source, reading)
        reading["task"] = _task_of(open_source(source, files), options) or settings.task
    table = read_table(source, schema=like, dtype="float64", **reading)
    if table.y is None:
        columns = table.schema.columns
        raise _without_label(source, [column.name for column in columns] if columns else table.feature_names)
    if not len(table.y):
        raise DataError(f"{source} has no rows; at least two rows of two classes are required")
    names = (list(table.feature_names), table.label or "target")
    known = (table.schema, table.weights, table.weight)
    if table.class_names is None:
        return _Source(table.X, np.asarray(table.y, np.float64), *names, *known, True, table.rows)
    if len(table.y) > 10 and 2 * len(table.class_names) > len(table.y):
        raise DataError(
            f"{source}: the label column {table.label!r} holds {len(table.class_names)} different values in "
            f"{len(table.y)} rows; it must hold classes with several rows each, check data.label"
        )
    return _Source(table.X, np.asarray(table.class_names)[table.y], *names, *known, rows=table.rows)


def _task_of(source: Source, options: TableOptions) -> str | None:
    """The task by the values of the label column, which are read until they tell; None if its type does.

    Fractions are numbers. Whole numbers are classes if they have few values: integers up to 100, those with a decimal
    point up to 20.
    """
    schema = draft_schema(source, options)
    named = isinstance(source, MatrixSource) and source.class_names is not None
    if options.task != "auto" or schema.label_kind not in ("integer", "number") or named:
        return None
    most = MANY_VALUES if schema.label_kind == "integer" else FEW_VALUES
    of_label = replace(schema, columns=(), label_kind="number", task="regression", weight=None, weight_position=None)
    known: set[float] = set()
    for values in Encoder(source, of_label).targets():
        found = np.unique(values)
        known.update(found[: most + 1].tolist())
        if len(known) > most or (found != np.round(found)).any():
            return "regression"
    return "classification" if known else None


def _reading(settings: DataConfig) -> dict[str, Any]:
    """The options of `ingest` that a config sets."""
    options: dict[str, Any] = {"label": settings.label, "task": settings.task}
    if settings.weight is not None:
        options["weight"] = settings.weight
    if settings.features is not None:
        options["features"] = tuple(settings.features)
    if settings.exclude is not None:
        options["exclude"] = tuple(settings.exclude)
    for key in ("missing", *WRITTEN):
        if (value := getattr(settings, key)) is not None:
            options[key] = tuple(value) if isinstance(value, list) else value
    return options


def _split(settings: DataConfig, rows: _Source) -> list[np.ndarray]:
    """Features, labels, positions and, if there are any, weights: each of the training and of the test rows."""
    X, y, weights = rows.X, rows.y, rows.weights
    if len(X) < (least := _fewest_rows(settings.test_fraction)):
        raise DataError(
            f"{settings.source} has {counted(len(X), 'row')}, and data.test_fraction {settings.test_fraction:g} needs "
            f"at least {least}, two of them to train; add rows, or give test rows of their own as data.test_source"
        )
    classes, counts = np.unique(y, return_counts=True)
    stratify = settings.stratify and not rows.numeric
    if stratify and len(classes) > 1 and counts.min() < 2:
        raise DataError(
            f"{settings.source}: class {classes[counts.argmin()]!s} has one row, so it cannot be in "
            f"both the training and the test set; set data.stratify: false, or give data.test_source"
        )
    try:
        parts: list[np.ndarray] = train_test_split(
            X,
            y,
            rows.positions,
            *(() if weights is None else (weights,)),
            test_size=settings.test_fraction,
            random_state=settings.split_seed,
            stratify=y if stratify else None,
        )
    except ValueError as error:  # too few rows for this fraction
        raise DataError(
            f"{settings.source}: {len(X)} rows cannot be split with data.test_fraction "
            f"{settings.test_fraction:g}: {error}"
        ) from None
    return parts


def _fewest_rows(test_fraction: float) -> int:
    """Of which at least one is a test row, and at least two remain."""
    return next(rows for rows in itertools.count(3) if rows - math.ceil(test_fraction * rows) >= 2)


def _position(column: int | str, names: list[str], source: str, key: str = "features") -> int:
    if isinstance(column, int):
        if column < len(names):
            return column
        raise ConfigError(f"data.{key}: {source} has no column {column}; it has {len(names)} features, counted from 0")
    if column in names:
        return names.index(column)
    near = difflib.get_close_matches(column, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, names[:12]))}"
    raise ConfigError(f"data.{key}: {source} has no column {column!r}; {hint}")


def _first_difference(seen: list[str], wanted: list[str]) -> str:
    if len(seen) != len(wanted):
        return f"{len(seen)} features instead of {len(wanted)}"
    position = next(i for i, (a, b) in enumerate(zip(seen, wanted, strict=True)) if a != b)
    return f"column {position} is {seen[position]!r} instead of {wanted[position]!r}"
