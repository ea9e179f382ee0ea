"""Sources of rows: data sets on disk or in an object store, and the interface that they share with arrays.

    data = open_dataset("covtype.zarr")
    X, y = data.read_rows(0, 2000)
    data.splits["train"]                 # row ranges, ((0, 464809),)
    data.verify()                        # every chunk against its digest

A data set is a Zarr v3 group: X (rows, features), y (rows,) if there are labels, weight (rows,) if rows have weights,
row (rows,) with the position in the source if rows were moved or dropped; all chunked at the same rows. Only the
group's attributes define the number of rows, so an append becomes visible atomically when they are replaced. Classes
are stored as codes 0, 1, 2, ... into `classes`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from kme_dist.data.chunks import StoredArray, check_size, read_attributes
from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.data.schema import Schema
from kme_dist.data.sparse import is_sparse, joined_sparse
from kme_dist.data.statistics import Statistics
from kme_dist.data.store import check_name, check_seal
from kme_dist.data.writer import digest
from kme_dist.errors import ConfigError, CorruptError, DataError, counted

DATASET_FORMAT = "kme-dist/dataset"
DATASET_VERSION = 1
CACHE_BYTES = 64 << 20
Span = tuple[int, int]  # rows [start, stop)

# Format version n -> a function that converts attributes of version n to version n + 1. Opening a data set applies
# them in sequence, so that every older version can be read. Version 1 is the first.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def spans_within(ranges: Iterable[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Rows [start, stop) of the concatenated `ranges`, as row ranges."""
    found, before = [], 0
    for low, high in ranges:
        first, last = max(start - before, 0), min(stop - before, high - low)
        if first < last:
            found.append((low + first, low + last))
        before += high - low
    return tuple(found)


@dataclass(frozen=True)
class _DigestCheck:
    """Compares decoded chunks with the digests in the attributes."""

    digests: tuple[str, ...]
    rows: int
    chunk_rows: int

    def __call__(self, number: int, chunk: np.ndarray) -> bool:
        used = min(self.chunk_rows, self.rows - number * self.chunk_rows)
        return number < len(self.digests) and digest(chunk[:used]) == self.digests[number]


class RowSource:
    """Rows with labels, on disk or in memory: the base of `Dataset` and `ArrayRows`.

    What is learned from a source depends only on its rows, their order and its splits. Two sources with the same rows
    are interchangeable: a plan, a sample or a sum over rows has the same bits with either.
    """

    kind: str = "rows"
    path: str  # location of the rows, for messages
    rows: int
    features: int
    feature_names: list[str]
    named: bool  # whether the names were given by the user, or generated
    classes: Any  # a sequence of labels, or None
    chunk_rows: int
    shuffled: int | None
    splits: dict[str, tuple[tuple[int, int], ...]]
    statistics: Statistics
    id_field: tuple[str, str] | None = None  # name and type of the row ids, if they are not row numbers
    has_weights: bool = False  # whether rows come with weights of their own
    class_factors: tuple[float, ...] | None = None  # further factors of the weights, one for each class

    @property
    def output_rows(self) -> int:
        """Rows of one chunk of predictions."""
        return self.chunk_rows

    def whereabouts(self, split: str | None) -> dict[str, Any]:
        return {"path": self.path}

    def ranges(self, split: str | None = None) -> tuple[tuple[int, int], ...]:
        """The row ranges of a split; of all rows if None."""
        if split is None:
            return ((0, self.rows),)
        if split not in self.splits:
            known = ", ".join(self.splits) or "none; ingest with a split to create some"
            raise ConfigError(f"{self.path} has no split {split!r}; its splits: {known}.")
        return self.splits[split]

    def training_split(self, split: str | None = "auto") -> str | None:
        """The split to learn from: "auto" is "train" if it exists, else all rows (None)."""
        if split == "auto":
            return "train" if "train" in self.splits else None
        self.ranges(split)
        return split

    @property
    def n_classes(self) -> int:
        return 0 if self.classes is None else len(self.classes)

    def split_rows(self, split: str | None = None) -> int:
        return sum(stop - start for start, stop in self.ranges(split))

    # --- weights: those of the rows times the factor of their class, at least 1 on average over the training rows ---

    @property
    def weighted(self) -> bool:
        return self.has_weights or self.class_factors is not None

    def read_weights(self, start: int, stop: int) -> np.ndarray | None:
        """The weights of rows [start, stop) as given; None if there are none."""
        return None

    def take_weights(self, rows: np.ndarray) -> np.ndarray | None:
        """The same for single rows."""
        return None

    def weight_totals(self, split: str | None = None) -> np.ndarray:
        """The sum of the weights as given and the number of positive ones, in one row for each class."""
        raise ConfigError(f"{type(self).__name__} must define weight_totals(split)")

    @functools.cached_property
    def _factors(self) -> np.ndarray:
        """The factor of every class. Weights below 1 on average are scaled up: a table whose weights sum to 1 is not a
        table of one row, and a summed risk would count it as such. Integers >= 1 are never scaled."""
        totals = self.weight_totals(self.training_split())
        given = np.ones(len(totals)) if self.class_factors is None else np.asarray(self.class_factors)
        weight, rows = float(given @ totals[:, 0]), float(totals[given > 0, 1].sum())
        if not weight > 0:
            raise DataError(f"{self.path}: all weights are 0; at least one row must have a positive weight")
        return given * max(1.0, rows / weight)

    def learning_weights(self, given: np.ndarray | None, y: Callable[[], Any], unit: bool = True) -> np.ndarray | None:
        """The weights that rows are learned with, from those given; `y` reads their labels.

        Without `unit` they are not scaled up: sums over rows of a data set that grows need no common unit of their own.
        """
        if not self.weighted:
            return None
        factors = self._factors if unit else np.asarray(self.class_factors or (1.0,))
        own = factors[0] if self.class_factors is None else factors[np.asarray(y())]
        return np.asarray(own if given is None else given * own)

    def split_weight(self, split: str | None = None) -> float:
        """The sum of the weights that the rows of a split are learned with; without weights the number of rows."""
        return float(self._factors @ self.weight_totals(split)[:, 0]) if self.weighted else self.split_rows(split)

    def split_positive(self, split: str | None = None) -> int:
        """The number of rows of a split with a positive weight."""
        return int(self.weight_totals(split)[self._factors > 0, 1].sum()) if self.weighted else self.split_rows(split)

    def with_class_factors(self, factors: Sequence[float] | None) -> Self:
        """The same rows, whose weights have a further factor for each class (None: no more than their own)."""
        other = object.__new__(type(self))  # `copy` would go through pickle, and return an object that tasks share
        other.__dict__.update(self.__dict__)
        for name in ("_factors", "digest"):
            other.__dict__.pop(name, None)
        other.class_factors = None if factors is None else tuple(float(factor) for factor in factors)
        return other

    @property
    def target_statistics(self) -> Statistics:
        """Range and moments of the numeric targets."""
        raise ConfigError(f"{type(self).__name__} must define target_statistics")

    def split_statistics(self, split: str | None = None) -> Statistics:
        """Ranges and moments of the features over one split (over everything when None)."""
        raise ConfigError(f"{type(self).__name__} must define split_statistics(split)")

    def read_rows(self, start: int, stop: int) -> tuple[Any, np.ndarray | None]:
        """X and y of rows [start, stop)."""
        raise ConfigError(f"{type(self).__name__} must define read_rows(start, stop)")

    def take(self, rows: np.ndarray) -> tuple[Any, np.ndarray | None]:
        """X and y of exactly these rows, in this order."""
        raise ConfigError(f"{type(self).__name__} must define take(rows)")

    def read_labels(self, start: int, stop: int) -> np.ndarray | None:
        """y of rows [start, stop)."""
        return self.read_rows(start, stop)[1]

    def read_ids(self, start: int, stop: int) -> Any:
        """The ids of rows [start, stop): by default their numbers."""
        return np.arange(start, stop, dtype=np.int64)

    def rejected_in(self, start: int, stop: int) -> dict[int, str]:
        """Which of rows [start, stop), counted from `start`, cannot be used, with the reasons, where these are other
        than values that are not finite."""
        return {}

    def narrowed(self, ranges: tuple[Span, ...]) -> tuple[RowSource, tuple[Span, ...]]:
        """A source with only these rows, and their ranges in it, for a task that needs no others."""
        return self, ranges

    def identity(self, ranges: tuple[Span, ...], rows: int = 0) -> str:
        """Changes when the features of these rows change; known without reading them if digests are stored.

        `rows`: the identity that they had before rows were appended, when the source had that number of them.
        """
        return short_digest([(*span, self.span_digests(*span)[0]) for span in ranges])

    @property
    def identified_by(self) -> str | None:
        """How rows are stored, as far as their identities depend on it: the same rows in the same ranges of another
        source have the same identities if this is equal. None: the identities of other sources tell nothing."""
        return None

    def span_digests(self, start: int, stop: int) -> tuple[str, ...]:
        """Digests of X and y (and of the weights as given, if there are any) in rows [start, stop)."""
        raise ConfigError(f"{type(self).__name__} must define span_digests(start, stop)")

    @property
    def digest(self) -> str:
        """One digest for the rows, their labels, their names and their order."""
        raise ConfigError(f"{type(self).__name__} must define digest")


class Dataset(RowSource):
    """An open data set. Thread-safe; pickled as its address and opened again in the receiving process."""

    kind = "dataset"

    def __init__(self, place: Place, *, verify: bool = False, cache_bytes: int = CACHE_BYTES) -> None:
        self.place, self.verify_reads, self._cache_bytes = place, verify, cache_bytes
        self.attributes = read_dataset_attributes(place)
        try:
            self._read_attributes()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise CorruptError(
                f"{place}: the attributes are incomplete ({type(error).__name__}: {error}). Ingest it again."
            ) from error
        self._check_objects()

    def _read_attributes(self) -> None:
        a = self.attributes
        self.rows = int(a["rows"])
        self.feature_names: list[str] = list(a["feature_names"])
        self.features = len(self.feature_names)
        self.named = not generated_names(self.feature_names)
        self.sample_shape: tuple[int, ...] = tuple(a["sample_shape"])
        self.task: str = a["task"]
        self.label: str | None = a["schema"]["label"]
        self.classes = a["classes"]
        self.class_counts: list[int] | None = a["class_counts"]
        self.chunk_rows, self.shard_rows = int(a["chunk_rows"]), int(a["shard_rows"])
        self.shuffled: int | None = a["shuffled"]
        self.statistics = Statistics.from_json(a["statistics"], self.features)
        self.splits: dict[str, tuple[tuple[int, int], ...]] = {
            name: tuple((int(start), int(stop)) for start, stop in split["ranges"])
            for name, split in a["splits"].items()
        }
        self.schema = Schema.from_json(a)
        self.X = self._array("X")
        self.y = self._array("y") if self.task != "none" else None
        self.row = self._array("row") if "row" in a["digests"] else None
        self.id_field = None if self.row is None else ("row", "int64")
        self.weight = self._array("weight") if "weight" in a["digests"] else None
        self.has_weights = self.weight is not None
        self.dtype = self.X.layout.dtype

    def _array(self, name: str) -> StoredArray:
        check = None
        if self.verify_reads:
            digests = tuple(self.attributes["digests"][name])
            check = _DigestCheck(digests, self.rows, int(self.attributes["chunk_rows"]))
        try:
            array = StoredArray(self.place, name, cache_bytes=self._cache_bytes, check=check)
        except FileNotFoundError:
            raise CorruptError(
                f"{self.place}: the array {name!r} is missing. Restore it from a copy, or ingest again."
            ) from None
        layout = array.layout
        row_shape = (self.features,) if name == "X" else ()
        if layout.shape[0] < self.rows or layout.row_shape != row_shape:
            raise CorruptError(
                f"{self.place}: {name} has shape {layout.shape}, the attributes declare {counted(self.rows, 'row')} of "
                f"{row_shape}."
            )
        return array

    def _check_objects(self) -> None:
        """Check that every object exists: Zarr itself would read a missing one as zeros."""
        for array in self._arrays():
            sizes = self.place.sizes(f"{array.name}/c")
            for shard in range(array.shard_count(self.rows)):
                if array.key(shard) not in sizes:
                    raise array.damaged(shard * self.shard_rows // self.chunk_rows, "is missing")
            check_size(self.place, array.name, array.layout, sum(sizes.values()) + self._padding(array))

    def _padding(self, array: StoredArray) -> int:
        # An interrupted append may have added rows to the array's metadata that the attributes do not count yet.
        row_bytes = array.layout.nbytes // max(1, array.layout.shape[0])
        return (array.layout.shape[0] - self.rows) * row_bytes

    def _arrays(self) -> Iterator[StoredArray]:
        yield from (array for array in (self.X, self.y, self.row, self.weight) if array is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.place, self.verify_reads, self._cache_bytes, self.digest, self.class_factors))

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        labels = f", {counted(len(self.classes), 'class')}" if self.classes is not None else ""
        size = f"{counted(self.rows, 'row')}, {counted(self.features, 'feature')}"
        return f"Dataset({self.path!r}, {size} {self.dtype}{labels})"

    @property
    def path(self) -> str:  # type: ignore[override]
        return self.place.address

    def whereabouts(self, split: str | None) -> dict[str, Any]:
        return {"path": self.path, "split": split}

    @functools.cached_property
    def digest(self) -> str:
        names = ("digests", "rows", "classes", "feature_names")
        known = json.dumps({name: self.attributes[name] for name in names}, sort_keys=True, default=str)
        known += "" if self.class_factors is None else repr(self.class_factors)
        if "rejected" in self.attributes["source"]:  # rows that are stored as zeros
            known += json.dumps(self.attributes["source"]["rejected"])
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def target_statistics(self) -> Statistics:
        found = self.attributes["target_statistics"]
        if found is None:
            raise DataError(f"{self.path} has no numeric targets; ingest it with the task regression")
        return Statistics.from_json(found, 1)

    def read_labels(self, start: int, stop: int) -> np.ndarray | None:
        return None if self.y is None else self.y.read(start, stop)

    def read_ids(self, start: int, stop: int) -> np.ndarray:
        """The position of every row in the source, if rows were moved or dropped."""
        return super().read_ids(start, stop) if self.row is None else self.row.read(start, stop)

    def weights(self, split: str | None = None) -> np.ndarray | None:
        """The weights of all rows of a split, as given; None if there are none."""
        if self.weight is None:
            return None
        return np.concatenate([np.zeros(0), *(self.weight.read(*span) for span in self.ranges(split))])

    def read_weights(self, start: int, stop: int) -> np.ndarray | None:
        return None if self.weight is None else self.weight.read(start, stop)

    def take_weights(self, rows: np.ndarray) -> np.ndarray | None:
        return None if self.weight is None else self.weight.take(np.asarray(rows, np.int64))

    def weight_totals(self, split: str | None = None) -> np.ndarray:
        self.ranges(split)
        found = self.attributes if split is None else self.attributes["splits"][split]
        if self.weight is not None:
            return np.array(found["weight_totals"], np.float64)
        counts = [self.split_rows(split)] if found["class_counts"] is None else found["class_counts"]
        return np.stack([np.asarray(counts, np.float64)] * 2, axis=1)

    def identity(self, ranges: tuple[Span, ...], rows: int = 0) -> str:
        digests, size = self.attributes["digests"]["X"], self.chunk_rows
        last, begun = divmod(rows, size)
        if begun and rows < self.rows and any(high > last * size for _, high in ranges):
            # The digest of the chunk that was the last one, and not full, is that of other rows now.
            digests = [*digests[:last], digest(self.X.read(last * size, rows))]
        return short_digest([(low, high, digests[low // size : -(-high // size)]) for low, high in ranges])

    @property
    def identified_by(self) -> str | None:
        return short_digest([str(self.dtype), self.feature_names, self.chunk_rows])

    def span_digests(self, start: int, stop: int) -> tuple[str, ...]:
        number, begun = divmod(start, self.chunk_rows)
        if not begun and stop == min(start + self.chunk_rows, self.rows):  # a whole chunk: its digest is stored
            names = ("X", "y", "weight") if self.has_weights else ("X", "y")
            found = tuple(self.attributes["digests"][name][number] for name in names)
        else:
            X, y = self.read_rows(start, stop)
            w = self.read_weights(start, stop)
            found = (digest(X), digest(np.asarray(y)), *(() if w is None else (digest(w),)))
        return found

    @property
    def class_names(self) -> list[str] | None:
        return None if self.classes is None else [str(value) for value in self.classes]

    def split_statistics(self, split: str | None = None) -> Statistics:
        """Ranges and moments of the features over one split (over everything when None)."""
        if split is None:
            return self.statistics
        self.ranges(split)
        return Statistics.from_json(self.attributes["splits"][split]["statistics"], self.features)

    def read_rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """X and y of rows [start, stop)."""
        if not 0 <= start <= stop <= self.rows:
            raise DataError(f"{self.path}: rows {start} to {stop} are out of range; there are {self.rows}.")
        return self.X.read(start, stop), None if self.y is None else self.y.read(start, stop)

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """X and y of exactly these rows, in this order.

        Every chunk that contains one of them is decoded, so scattered rows cost about a hundred times as much as
        contiguous ones. If that matters, shuffle at ingest and read ranges, or sample blocks.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.rows):
            raise DataError(f"{self.path}: row numbers must be from 0 to {self.rows - 1}.")
        return self.X.take(rows), None if self.y is None else self.y.take(rows)

    def read(self, split: str | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """All rows of a split, in memory."""
        parts = [self.read_rows(start, stop) for start, stop in self.ranges(split)]
        X = np.concatenate([part[0] for part in parts]) if parts else self.X.read(0, 0)
        if self.y is None:
            return X, None
        return X, np.concatenate([part[1] for part in parts if part[1] is not None])

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every chunk and compare it with its digest; CorruptError names the first that differs."""
        for array in self._arrays():
            digests = self.attributes["digests"][array.name]
            chunks = -(-self.rows // self.chunk_rows)
            if len(digests) != chunks:
                raise CorruptError(f"{self.path}: {len(digests)} digests for {chunks} chunks of {array.name}.")
            check = _DigestCheck(tuple(digests), self.rows, self.chunk_rows)
            plain = StoredArray(self.place, array.name)
            for number in range(chunks):
                if not check(number, plain.chunk(number)):
                    raise plain.damaged(number, "does not match its digest")
                if progress is not None and array.name == "X":
                    progress(number + 1, chunks)

    def append(self, source: Any, **options: Any) -> Dataset:
        """Append the rows of `source` and return the updated data set; see `kme_dist.data.append.append`."""
        from kme_dist.data.append import append

        return append(self.path, source, **options)


@functools.lru_cache(maxsize=1)  # one, as `kme-dist plan` counts
def _reopen(
    place: Place, verify: bool, cache_bytes: int, content: str, factors: tuple[float, ...] | None = None
) -> Dataset:
    """Opened once per process for all tasks, which share its cache.

    `content` is the expected digest, so that a data set that has changed is opened again.
    """
    found = Dataset(place, verify=verify, cache_bytes=cache_bytes)
    return found if factors is None else found.with_class_factors(factors)


def joined(parts: Sequence[Any]) -> Any:
    """Arrays, Arrow columns or lists of rows, concatenated; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    if is_sparse(parts[0]):
        return joined_sparse(parts)
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else pa.concat_arrays(parts)


def short_digest(value: Any) -> str:
    """A short digest of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def generated_names(names: list[str]) -> bool:
    """Whether these are the generated names of sources without names: x0, x1, ..."""
    return all(name == f"x{i}" for i, name in enumerate(names))


def read_dataset_attributes(place: Place) -> dict[str, Any]:
    """The attributes of a data set, converted to the current format version."""
    try:
        attributes = read_attributes(place)
    except FileNotFoundError:
        if place.is_local and place.path.is_file():
            raise DataError(
                f"{place} is a file, not a data set; create one with `kme-dist ingest {place.name} DEST.zarr` (and "
                "--like with the data set of the fit, for rows that a model has predicted)."
            ) from None
        raise DataError(
            f"{place}: no data set exists here (looked for {place}/{METADATA_KEY}); "
            "create one with `kme-dist ingest SOURCE DEST.zarr`."
        ) from None
    found = attributes.get("format")
    if found != DATASET_FORMAT:
        check_name(place, attributes)
        raise DataError(
            f"{place} is not a data set (found {found or 'a Zarr group of other software'!r}); ingest it first."
        )
    version = attributes.get("format_version")
    if not isinstance(version, int) or not 1 <= version <= DATASET_VERSION:
        raise DataError(
            f"{place}: data set format version {version}; this kme-dist reads versions 1 to "
            f"{DATASET_VERSION}. Update kme-dist."
        )
    check_seal(place, attributes, required=False)  # the first data sets have none
    while version < DATASET_VERSION:
        attributes = UPGRADES[version](attributes)
        version += 1
    return attributes


def open_dataset(path: str | Path | Place, *, verify: bool = False, cache_bytes: int = CACHE_BYTES) -> Dataset:
    """Open a data set for reading.

    Parameters
    ----------
    path : a local folder, file://, s3:// or gs:// address
    verify : compare every chunk with its digest when it is read (checksums are always verified)
    cache_bytes : size of the cache of decoded chunks, for each of X and y
    """
    return Dataset(Place.of(path), verify=verify, cache_bytes=cache_bytes)


def describe_dataset(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes to show to people, without the long lists."""
    hidden = (
        "digests",
        "schema",
        "feature_names",
        "statistics",
        "target_statistics",
        "splits",
        "classes",
        "class_counts",
        "weight_totals",
    )
    shown = {key: value for key, value in attributes.items() if key not in hidden}
    names, stats = attributes["feature_names"], attributes["statistics"]
    shown["features"] = len(names)
    shown["label"] = attributes["schema"]["label"]
    if attributes["classes"] is not None:
        shown["classes"] = dict(zip(map(str, attributes["classes"]), attributes["class_counts"], strict=True))
    if attributes.get("weight_totals"):
        totals = np.array(attributes["weight_totals"])
        positive = int(totals[:, 1].sum())
        shown["weight"] = {
            "column": attributes["schema"].get("weight", "weight"), "sum": float(totals[:, 0].sum()),
            "rows_of_weight_zero": attributes["rows"] - positive,
        }  # fmt: skip
    if attributes.get("target_statistics"):
        shown["target"] = {
            key: value[0] for key, value in attributes["target_statistics"].items() if key != "count" and value
        }
    shown["splits"] = {name: {"rows": s["rows"], "ranges": s["ranges"]} for name, s in attributes["splits"].items()}
    if stats["count"]:
        columns = zip(names, stats["minimum"], stats["maximum"], stats["mean"], stats["variance"], strict=True)
        shown["columns"] = [
            {"name": name, "minimum": low, "maximum": high, "mean": mean, "deviation": variance**0.5}
            for name, low, high, mean, variance in columns
        ]
    return shown
