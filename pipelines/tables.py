"""The rows of a run: read, checked, and divided into training and test rows.

    tables = load(config.data)
    tables.X_train, tables.y_train, tables.X_test, tables.y_test, tables.feature_names

Everything that is wrong with the data is said here, before any computing starts: which row and
column holds a missing value, which label the training rows do not have, which column does not exist.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.model_selection import train_test_split

from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import DATASET_FORMAT, Dataset, open_dataset
from kme_dist.data.ingest import read_table
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kme_dist.config import DataConfig


@dataclass(frozen=True)
class Tables:
    """Training and test rows. X: (n, d) float array, y: (n,) labels as the user knows them."""

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    feature_names: list[str]

    @property
    def digest(self) -> str:
        """Changes when any value, label or column name changes."""
        sha = hashlib.sha256("\0".join(self.feature_names).encode())
        for array in (self.X_train, self.y_train, self.X_test, self.y_test):
            plain = np.ascontiguousarray(array.astype(str) if array.dtype == object else array)
            sha.update(f"{plain.dtype.str}{plain.shape}".encode())
            sha.update(plain.tobytes())
        return sha.hexdigest()


def load(settings: DataConfig) -> Tables:
    """Read the source (and the test source, when there is one) and split."""
    data = _dataset(settings.source)
    parts_known = data is not None and settings.stored_split and {"train", "test"} <= set(data.splits)
    part = "train" if parts_known and settings.test_source is None else None
    X, y, names = _read(settings, settings.source, part)
    if settings.image_shape is not None:
        height, width = settings.image_shape
        if height * width != X.shape[1]:
            raise ConfigError(
                f"data.image_shape is [{height}, {width}], {height * width} pixels, but "
                f"{settings.source} has {X.shape[1]} features; make the two agree"
            )
    if settings.test_source is not None:
        X_test, y_test, test_names = _read(settings, settings.test_source)
        if test_names != names:
            raise DataError(
                f"{settings.test_source} has other columns than {settings.source}: "
                f"{_first_difference(test_names, names)}"
            )
        X_train, y_train = X, y
    elif part is not None:
        X_train, y_train = X, y
        X_test, y_test, _ = _read(settings, settings.source, "test")
    else:
        X_train, X_test, y_train, y_test = _split(settings, X, y)
    if len(np.unique(y_train)) < 2:
        raise DataError(
            f"{settings.source}: the training rows hold one class only ({y_train[0]!s}); "
            f"at least two are needed, check data.label"
        )
    unknown = np.setdiff1d(y_test, y_train)
    if len(unknown):
        row = int(np.flatnonzero(y_test == unknown[0])[0])
        raise DataError(
            f"test row {row} has the label {str(unknown[0])!r}, which no training row has; "
            f"correct the label, or give the class training rows"
        )
    return Tables(X_train, y_train, X_test, y_test, names)


def _read(settings: DataConfig, source: str, part: str | None = None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """X, labels and feature names of a source, or of one part of a data set that was stored in parts."""
    data = _dataset(source)
    if data is None and not source.startswith("sklearn:"):
        X, y, names = _from_file(settings, source)
    else:
        X, y, names = _built_in(source) if data is None else _from_dataset(data, part)
        if settings.label is not None and settings.label != ("target" if data is None else data.label):
            raise ConfigError(
                f"data.label is {settings.label!r}, but {source} comes with its own labels; leave data.label out"
            )
        if settings.features is not None:
            columns = [_position(column, names, source) for column in settings.features]
            X, names = X[:, columns], [names[column] for column in columns]
    X = np.ascontiguousarray(X, dtype=np.float64)
    bad = np.argwhere(~np.isfinite(X))
    if len(bad):
        row, column = (int(index) for index in bad[0])
        raise DataError(
            f"{source} row {row}, column {names[column]!r}: value is {X[row, column]}, "
            f"a finite number is needed; drop or fill such rows "
            f"({len(np.unique(bad[:, 0]))} of {len(X)} rows are concerned)"
        )
    return X, y, names


def _built_in(source: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The small tables that ship with scikit-learn; nothing is downloaded."""
    from sklearn import datasets

    table = getattr(datasets, "load_" + source.removeprefix("sklearn:"))()
    classes = np.asarray(table.target_names)
    return table.data, classes[table.target], [str(column) for column in table.feature_names]


def _dataset(source: str) -> Dataset | None:
    """The data set at a path or address; None for everything else, other Zarr groups included."""
    place = Place.of(source)
    if not place.exists() or read_attributes(place).get("format") != DATASET_FORMAT:
        return None
    return open_dataset(place)


def _from_dataset(data: Dataset, part: str | None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    X, codes = data.read(part)
    if codes is None or data.classes is None:
        raise DataError(f"{data.path} holds no classes; ingest it with the column of the classes as label")
    return X, np.asarray(data.classes)[codes], data.feature_names


def _from_file(settings: DataConfig, source: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    options: dict[str, Any] = {"label": settings.label, "task": "classification", "dtype": "float64"}
    if settings.features is not None:
        options["features"] = tuple(settings.features)
    if settings.missing is not None:
        options["missing"] = settings.missing
    table = read_table(source, **options)
    if table.y is None or table.class_names is None:
        columns = dict.fromkeys(name.partition("=")[0] for name in table.feature_names)
        raise ConfigError(
            f"data.label is missing: name the column of {source} that holds the classes; "
            f"its columns are {', '.join(map(repr, list(columns)[:12]))}"
        )
    if not len(table.y):
        raise DataError(f"{source} holds no rows; at least two rows of two classes are needed")
    if len(table.y) > 10 and 2 * len(table.class_names) > len(table.y):
        raise DataError(
            f"{source}: the label column {table.label!r} holds {len(table.class_names)} different values in "
            f"{len(table.y)} rows; classes are needed, each with several rows, check data.label"
        )
    return table.X, np.asarray(table.class_names)[table.y], list(table.feature_names)


def _split(settings: DataConfig, X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    classes, counts = np.unique(y, return_counts=True)
    if settings.stratify and len(classes) > 1 and counts.min() < 2:
        raise DataError(
            f"{settings.source}: class {classes[counts.argmin()]!s} has one row, so it cannot be in "
            f"training and test alike; set data.stratify: false, or give data.test_source"
        )
    try:
        parts: list[np.ndarray] = train_test_split(
            X,
            y,
            test_size=settings.test_fraction,
            random_state=settings.split_seed,
            stratify=y if settings.stratify else None,
        )
    except ValueError as error:  # too few rows for the share asked for
        raise DataError(
            f"{settings.source}: {len(X)} rows cannot be split with data.test_fraction "
            f"{settings.test_fraction:g}: {error}"
        ) from None
    return parts


def _position(column: int | str, names: list[str], source: str) -> int:
    if isinstance(column, int):
        if column < len(names):
            return column
        raise ConfigError(
            f"data.features: there is no column {column} in {source}; its {len(names)} features count from 0"
        )
    if column in names:
        return names.index(column)
    near = difflib.get_close_matches(column, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, names[:12]))}"
    raise ConfigError(f"data.features: there is no column {column!r} in {source}; {hint}")


def _first_difference(seen: list[str], wanted: list[str]) -> str:
    if len(seen) != len(wanted):
        return f"{len(seen)} features instead of {len(wanted)}"
    position = next(i for i, (a, b) in enumerate(zip(seen, wanted, strict=True)) if a != b)
    return f"column {position} is {seen[position]!r} instead of {wanted[position]!r}"
