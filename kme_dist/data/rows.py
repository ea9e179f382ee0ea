"""RowsRef, the rows of a split as sent to a task: a small record that reads the same rows on any worker.

    rows = RowsRef.of(data, split="train", scaling=scaling, dtype="float32")
    X, y = rows.read(0, 2048)            # scaled rows and labels
    rows.part(0, 2048)                   # a record of these rows only, for one task
    rows.sample(1000, seed=0)            # random rows, in few reads
    rows.blocks(4096), rows.chunks()     # row ranges for tasks
    rows.weights(0, 2048)                # weights of the rows that `read` gives; None if rows have none

Rows are numbered within the split, from 0 to `rows.count`, even if its ranges have gaps. Of a data set only the address
is pickled, and a process opens it once; rows in memory are pickled themselves, or as files that all workers memory-map
(see `kme_dist.data.arrays`). `Scaling` is learned from the statistics of a split and applied to every row that is read.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from kme_dist.data.arrays import ArrayRows
from kme_dist.data.curves import Curves
from kme_dist.data.dataset import CACHE_BYTES, RowSource, Span, joined, spans_within
from kme_dist.data.plan import BatchPlan, BatchRef
from kme_dist.data.prefetch import Prefetched
from kme_dist.data.sparse import SparseRows, is_sparse
from kme_dist.data.statistics import LARGEST, Statistics
from kme_dist.data.validation import as_rows
from kme_dist.errors import AssumptionWarning, ConfigError, DataError, warn
from kme_dist.meter import metered

_SQUEEZED, _SQUEEZED_UNITS = 1e-3, 0.05  # of the range, and of the unit of scaled rows: all that most rows have
_FEW, _LEAST_VALUES, _LOOKED_AT = 0.01, 5, 4_000  # share of those rows; different values of the others; rows looked at
_SMALLEST_VARIANCE = 1e-290  # of smaller ones squares lose digits, or underflow
_MOST_RANGES = 10_000  # they are sent with every task
_SAMPLED_CHUNKS = 64  # for rows that are not shuffled and do not fit the cache


def check_magnitude(rows: Any, dtype: str = "float64", *, scaled: bool = True) -> None:
    """DataError if a row to predict, scaled or not, has a number whose square overflows in this precision."""
    values, largest = rows.data if is_sparse(rows) else rows, LARGEST[dtype]
    if not hasattr(values, "dtype") or not values.size or float(np.abs(values).max()) <= largest:
        return
    row = int(np.argmax((abs(rows) > largest).sum(axis=1) > 0))
    raise DataError(
        f"row {row} has a value that is {np.abs(values).max():.0e}{' after scaling' if scaled else ''}, whose square "
        "overflows: it is beyond anything that the model has seen; correct the row, or remove it"
    )


@dataclass(frozen=True)
class Scaling:
    """x -> (x - shift) * factor, feature by feature, then the curves of heavy-tailed features, if any; constant
    features become 0."""

    shift: np.ndarray
    factor: np.ndarray
    curves: Curves | None = None

    @classmethod
    def learn(cls, X: np.ndarray, kind: str | None) -> Scaling:
        """Learned from rows in memory."""
        return cls.of(Statistics.of(X), kind)

    @classmethod
    def of(cls, found: Statistics, kind: str | None, names: Sequence[str] = (), source: str = "the rows") -> Scaling:
        """From the statistics of rows: "unit" range (also under "auto"), "standard" deviation, or none.

        Columns and source are named in the error for values whose squares overflow. Where squares underflow a column
        is divided by its range.
        """
        if kind is None:
            found.check_squares(source, names, "scale the columns by their range: scaling='unit'", "float64")
            return cls(np.zeros(found.mean.size), np.ones(found.mean.size))
        if kind not in ("auto", "unit", "standard"):
            raise ConfigError(f"scaling={kind!r} is unknown; choose 'auto', 'unit', 'standard' or None")
        standard = kind == "standard"
        if standard:
            found.check_squares(source, names, "divide the column by a constant")
        shift = found.mean if standard else found.minimum
        with np.errstate(divide="ignore", over="ignore"):
            width = found.maximum - found.minimum
            if standard:
                width = np.where(found.variance > _SMALLEST_VARIANCE, np.sqrt(found.variance), width)
            factor = np.where(width > 0, 1.0 / width, 0.0)
        return cls(shift, np.where(np.isfinite(factor), factor, 0.0))

    @property
    def is_none(self) -> bool:
        """Whether rows stay as they are."""
        return self.curves is None and not self.shift.any() and bool((self.factor == 1).all())

    def flattened(self, curves: Curves | None) -> Scaling:
        """This scaling, but of the features that have a curve: that is of their own units."""
        if curves is None:
            return self
        own = np.isin(np.arange(self.shift.size), curves.columns)
        return Scaling(np.where(own, 0.0, self.shift), np.where(own, 1.0, self.factor), curves)

    def weighted(self, weights: np.ndarray) -> Scaling:
        """This scaling followed by a factor for each column."""
        if self.curves is None:
            return replace(self, factor=self.factor * weights)
        before = np.where(np.isin(np.arange(len(weights)), self.curves.columns), 1.0, weights)  # a curve's own factor
        return replace(self, factor=self.factor * before, curves=self.curves.weighted(weights))

    def apply(self, X: Any, dtype: str) -> Any:
        if not hasattr(X, "dtype"):  # texts, sequences, bags: for the kernel as they are
            return X
        if is_sparse(X):
            return self._applied_to_sparse(X, dtype)
        # C-ordered whatever the order of X: products in another memory order would round differently.
        scaled: np.ndarray = (X.reshape(len(X), self.shift.size) - self.shift) * self.factor
        return (scaled if self.curves is None else self.curves.apply(scaled)).astype(dtype, order="C")

    def _applied_to_sparse(self, X: Any, dtype: str) -> Any:
        if self.shift.any() or self.curves is not None:  # learned from dense rows: 0 does not stay 0
            return self.apply(X.toarray(), dtype)
        return SparseRows(X.multiply(self.factor)).astype(dtype, copy=False)

    def stored(self, at: str = "scaling/") -> dict[str, np.ndarray]:
        """Arrays to store, with names that start with `at`; `restored` makes an equal scaling of them."""
        curves = {} if self.curves is None else self.curves.stored(f"{at}curve_")
        return {f"{at}shift": self.shift, f"{at}factor": self.factor, **curves}

    @staticmethod
    def restored(arrays: Mapping[str, np.ndarray], at: str = "scaling/") -> Scaling:
        return Scaling(arrays[f"{at}shift"], arrays[f"{at}factor"], Curves.restored(arrays, f"{at}curve_"))

    def to_plain(self) -> list[Any]:
        """Lists of numbers that tell two scalings apart."""
        return [array.tolist() for array in self.stored().values()]


def resolving_dtype(dtype: str, source: RowSource, split: str | None, scaling: str | None) -> str:
    """The precision of scaled rows: `dtype`, or double where single precision cannot tell values of a feature apart.

    Scaling subtracts in double. Rows that are not scaled may be so far from the origin (times in seconds, coordinates)
    that single precision rounds their differences away.
    """
    narrow = dtype == "float32" and scaling is None
    return "float64" if narrow and source.split_statistics(split).merged_in_single.any() else dtype


@dataclass(frozen=True)
class Batch:
    """The rows of one batch."""

    number: int
    X: Any
    y: Any


@dataclass(frozen=True, eq=False)
class RowsRef:
    """Rows of a source: their ranges, columns and scaling."""

    token: str  # identifies these rows in the caches of a worker
    source: RowSource
    ranges: tuple[Span, ...]
    scale: Scaling | None = None  # None: not scaled
    dtype: str = ""  # empty: that of the source
    n_classes: int = 0  # 0: the labels, if any, are not classes
    columns: tuple[int, ...] = ()  # columns of the source used as features; empty: all
    split: str | None = None  # the split of these ranges

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowsRef) and other.token == self.token

    @classmethod
    def of(
        cls,
        source: RowSource,
        *,
        split: str | None = "auto",
        scaling: Scaling | str | None = None,
        dtype: str = "",
        columns: Sequence[int] = (),
        classes: bool = False,
    ) -> Self:
        """`split` "auto" is "train" if it exists, None all rows; with `classes` the labels must be classes."""
        if classes and source.classes is None:
            raise DataError(f"{source.path} has no class labels; ingest it again with the label column as `label`")
        split = source.training_split(split)
        ranges = tuple(span for span in source.ranges(split) if span[0] < span[1])
        if not ranges:
            raise DataError(f"{source.path} has no rows; the split {split!r} is empty")
        if isinstance(scaling, str):
            scaling = Scaling.of(source.split_statistics(split), scaling)
        n_classes = len(source.classes) if classes and source.classes is not None else 0
        return cls(os.urandom(8).hex(), source, ranges, scaling, dtype, n_classes, tuple(columns), split)

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __len__(self) -> int:
        return self.count

    @property
    def id_field(self) -> tuple[str, str] | None:
        """Name and type of the row ids; None if they are row numbers."""
        return self.source.id_field or (None if self.split is None else ("row", "int64"))

    def describe(self) -> dict[str, Any]:
        """The location of the rows as plain data."""
        return {"kind": self.source.kind, **self.source.whereabouts(self.split)}

    @property
    def in_memory(self) -> bool:
        return isinstance(self.source, ArrayRows)

    # --- spans -------------------------------------------------------------------------------------

    def stored(self, start: int, stop: int) -> tuple[Span, ...]:
        """The ranges in the source of rows [start, stop) of the split."""
        return spans_within(self.ranges, start, stop)

    def blocks(self, size: int) -> list[Span]:
        """The split in ranges of `size` rows; the last one may be smaller."""
        return [(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def chunks(self) -> list[Span]:
        """The split cut at the chunk boundaries of the source, so that a range never spans two chunks."""
        size, spans, before = self.source.chunk_rows, [], 0
        for low, high in self.ranges:
            cuts = [low, *range((low // size + 1) * size, high, size), high]
            spans += [(before + a - low, before + b - low) for a, b in itertools.pairwise(cuts)]
            before += high - low
        return spans

    def part(self, start: int, stop: int) -> RowsRef:
        """Rows [start, stop) only: of rows in memory no others are pickled."""
        source, ranges = self.source.narrowed(self.stored(start, stop))
        return replace(self, source=source, ranges=ranges, token=f"{self.token}-{start}-{stop}")

    def parts(self, size: int) -> list[RowsRef]:
        """All rows in order, in parts of `size` rows; the last one may be smaller."""
        return [self.part(*span) for span in self.blocks(size)]

    def in_precision(self, dtype: str) -> RowsRef:
        return self if dtype == self.dtype else replace(self, dtype=dtype, token=f"{self.token}-{dtype}")

    def unscaled(self) -> RowsRef:
        """The same rows as they are stored, in double precision."""
        return replace(self, scale=None, dtype="float64", token=f"{self.token}-unscaled")

    # --- rows --------------------------------------------------------------------------------------

    def read(self, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """Scaled rows [start, stop) of the split (all of them by default), and their labels."""
        spans = self.stored(start, self.count if stop is None else stop)
        with metered("read"):
            parts = [self.source.read_rows(*span) for span in spans or ((0, 0),)]
        return self._scaled(joined([X for X, _ in parts])), _labels(y for _, y in parts)

    def read_labels(self, start: int, stop: int) -> Any:
        """Labels without the rows."""
        return _labels(self.source.read_labels(*span) for span in self.stored(start, stop))

    def read_ids(self, start: int, stop: int) -> Any:
        """The ids of rows [start, stop): their numbers in the source, or a column of it."""
        return joined([self.source.read_ids(*span) for span in self.stored(start, stop)])

    def rejected(self) -> dict[int, str]:
        """The rows that cannot be used, by their numbers here, with the reasons; see `RowSource.rejected_in`."""
        found, before = dict[int, str](), 0
        for low, high in self.ranges:
            found |= {before + row: why for row, why in self.source.rejected_in(low, high).items()}
            before += high - low
        return found

    def take(self, numbers: np.ndarray) -> tuple[Any, Any]:
        """Scaled rows by their numbers in the split, and their labels."""
        edges = np.cumsum([0] + [high - low for low, high in self.ranges])
        part = np.searchsorted(edges, numbers, side="right") - 1
        starts = np.array([low for low, _ in self.ranges])
        X, y = self.source.take(numbers - edges[part] + starts[part])
        return self._scaled(X), y

    def plan(
        self, batch_size: int, seed: int = 0, *, mode: str = "auto", order: str = "permutation", blocks: int = 4
    ) -> BatchPlan:
        """Batches of these rows: a function of their number, the batch size and the seed.

        `mode` "rows" draws exact random rows; "auto" selects it if the cache of an open data set holds all of them.
        Otherwise it reads about a hundred times slower than "contiguous", which "auto" selects for rows that were
        shuffled at ingest. For other rows it selects "blocks": random rows from `blocks` random chunks per batch.
        "contiguous" on rows that were not shuffled gives batches of neighbours, and is never selected by "auto".
        """
        if mode == "auto":
            # Counted in double precision for any stored type: the same rows give the same batches.
            cached = 8 * self.source.features * self.count <= CACHE_BYTES
            mode = "rows" if cached else "contiguous" if self.source.shuffled is not None else "blocks"
        size = min(batch_size, self.count)
        return BatchPlan(self.ranges, size, seed, mode, order, self.source.chunk_rows, blocks)

    def batch(self, plan: BatchPlan, number: int) -> tuple[Any, Any]:
        """Batch `number` of a plan for these rows, scaled."""
        ref = plan.batch(number)
        if any(stop > self.source.rows for _, stop in ref.spans):
            raise ConfigError(f"{self.path}: the plan exceeds its {self.source.rows} rows; it was made for other data.")
        return self.read_drawn(ref)

    def batches(
        self,
        plan: BatchPlan,
        numbers: Iterable[int],
        *,
        prefetch: int = 2,
        transfer: Callable[[np.ndarray], Any] | None = None,
    ) -> Prefetched[Batch]:
        """The batches of these numbers, in order, with up to `prefetch` of them read ahead.

        `transfer` is applied to X and to y on the reading thread, e.g. to copy to a device through pinned memory, so
        that the copy overlaps with the work on the previous batch. `waited_s` of the result is the time that its
        consumer waited.
        """

        def produce() -> Iterator[Batch]:
            for number in numbers:
                X, y = self.batch(plan, number)
                if transfer is not None:
                    X, y = transfer(X), None if y is None else transfer(y)
                yield Batch(number, X, y)

        return Prefetched(produce, prefetch)

    def sample(self, size: int, seed: int) -> tuple[Any, Any]:
        """About `size` random rows (all, if there are fewer), in few reads; scaled, with labels.

        Rows that were shuffled at ingest are one contiguous range; others come from up to 64 chunks.
        """
        return self.read_drawn(self.draw(size, seed))

    def draw(self, size: int, seed: int) -> BatchRef:
        """The rows that `sample` draws, to read the same rows of another source."""
        if size >= self.count:
            return BatchRef(0, self.ranges)
        drawn = self.plan(size, seed, order="sampling", blocks=_SAMPLED_CHUNKS).batch(0)
        return drawn if drawn.rows is None else BatchRef(0, (), np.sort(drawn.rows))

    def read_drawn(self, drawn: BatchRef) -> tuple[Any, Any]:
        """The rows drawn by `draw`, scaled, with labels."""
        with metered("read"):
            if drawn.rows is not None:
                X, y = self.source.take(drawn.rows)
                return self._scaled(X), y
            parts = [self.source.read_rows(*span) for span in drawn.spans]
        return self._scaled(joined([X for X, _ in parts])), _labels(y for _, y in parts)

    # --- weights -----------------------------------------------------------------------------------

    @property
    def weighted(self) -> bool:
        return self.source.weighted

    def check_squares(self, name: str = "") -> None:
        """DataError for numbers whose squares overflow, where rows are used without a scaling."""
        if self.source.features and not self.columns:
            found, names = self.source.split_statistics(self.split), self.source.feature_names
            found.check_squares(name or self.path, names, "divide the column by a constant", self.dtype or "float64")

    @functools.cached_property
    def weight(self) -> float:
        """The sum of the weights; without weights the number of rows."""
        if self._is_whole:
            return self.source.split_weight(self.split)
        found = self.weights()
        return self.count if found is None else float(found.sum())

    @functools.cached_property
    def positive(self) -> int:
        """The number of rows with a positive weight."""
        if self._is_whole:
            return self.source.split_positive(self.split)
        found = self.weights()
        return self.count if found is None else int(np.count_nonzero(found))

    def with_positive_weight(self) -> RowsRef:
        """Without rows of weight 0, so that batches of a data set have the rows that they have in memory.

        Rows whose weights alternate between 0 and more too often stay, with those of weight 0 in the batches.
        """
        if not self.weighted or self.positive == self.count:
            return self
        found: list[Span] = []
        for start, stop in self.ranges:
            kept = np.asarray(self._weights_of(((start, stop),))) > 0
            edges = start + np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
            found += zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        if len(found) > _MOST_RANGES:
            return self
        kept_rows = replace(self, ranges=tuple(found), token=f"{self.token}-positive")
        # The sums are the same; added up in another order they would differ by rounding.
        kept_rows.__dict__.update(weight=self.weight, positive=self.positive)
        return kept_rows

    @property
    def _is_whole(self) -> bool:
        """Whether these are all rows of the split, whose sums are known."""
        return self.weighted and self.ranges == tuple(
            span for span in self.source.ranges(self.split) if span[0] < span[1]
        )

    def weights(self, start: int = 0, stop: int | None = None, *, unit: bool = True) -> np.ndarray | None:
        """The weights of the rows that `read` gives: their own times the factor of their class, None if there are none.

        For `unit` see `RowSource.learning_weights`.
        """
        return self._weights_of(self.stored(start, self.count if stop is None else stop), unit)

    def batch_weights(self, plan: BatchPlan, number: int) -> np.ndarray | None:
        """The weights of the rows of `batch`."""
        return self.drawn_weights(plan.batch(number)) if self.weighted else None

    def sample_weights(self, size: int, seed: int) -> np.ndarray | None:
        """The weights of the rows of `sample`."""
        return self.drawn_weights(self.draw(size, seed)) if self.weighted else None

    def drawn_weights(self, drawn: BatchRef) -> np.ndarray | None:
        """The weights of the rows of `read_drawn`."""
        if drawn.rows is None:
            return self._weights_of(drawn.spans)
        numbers = drawn.rows
        return self.source.learning_weights(self.source.take_weights(numbers), lambda: self.source.take(numbers)[1])

    def _weights_of(self, spans: Sequence[Span], unit: bool = True) -> np.ndarray | None:
        if not self.weighted:
            return None
        if not spans:
            return np.zeros(0)
        given = [self.source.read_weights(*span) for span in spans] if self.source.has_weights else []
        own = np.concatenate([np.zeros(0), *(part for part in given if part is not None)]) if given else None
        labels = lambda: _labels(self.source.read_labels(*span) for span in spans)  # noqa: E731
        return self.source.learning_weights(own, labels, unit)

    def _scaled(self, X: Any) -> Any:
        if self.columns:
            X = X[:, list(self.columns)]
        if self.scale is not None:
            return self.scale.apply(X, self.dtype or "float64")
        return X.astype(self.dtype, copy=False) if self.dtype and hasattr(X, "dtype") else X

    # --- identity ----------------------------------------------------------------------------------

    def digest(self) -> str:
        """Digest of the stored rows and labels, for any split."""
        return self.source.digest

    def identity(self, start: int, stop: int, rows: int = 0) -> str:
        """Changes when rows [start, stop) change; without reading them. `rows`: see `RowSource.identity`."""
        return self.source.identity(self.stored(start, stop), rows)

    @property
    def identified_by(self) -> list[Any] | None:
        """What the identities of two sources must have in common to be compared; None: they cannot be."""
        stored = self.source.identified_by
        return None if stored is None else [stored, [list(span) for span in self.ranges]]

    def is_identified(self, start: int, stop: int) -> bool:
        """Whether the identity of rows [start, stop) depends on rows of these ranges only: it is made of the digests of
        whole chunks, and a range that begins or ends within one shares it with others."""
        size, own = self.source.chunk_rows, self.ranges
        edges = [(a // size * size, min(-(-b // size) * size, self.source.rows)) for a, b in self.stored(start, stop)]
        return all(any(low <= a and b <= high for low, high in own) for a, b in edges)


def _labels(parts: Iterable[np.ndarray | None]) -> np.ndarray | None:
    found = [y for y in parts if y is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else np.concatenate(found)


def warn_of_squeezed(rows: RowsRef, scaling: Scaling, seed: int) -> None:
    """A warning for a column of which a few extreme values, such as 1e37 for a missing one, leave nothing to others.

    Where all but k of n rows are that close together, the variance is at most k/n of the squared range: only for such
    columns some rows are looked at. Few different values, such as flags and counts that are mostly 0, are no mistake.
    """
    source = rows.source
    if not source.features or rows.count < _LEAST_VALUES or scaling.is_none:
        return
    found = source.split_statistics(rows.split)
    width, share = found.maximum - found.minimum, max(_FEW, 1 / rows.count)
    with np.errstate(all="ignore"):
        suspect = (found.variance <= 1.01 * share * width**2) & (scaling.factor > 0)
        limit = np.minimum(_SQUEEZED * width, _SQUEEZED_UNITS / scaling.factor)
    if scaling.curves is not None:
        suspect[scaling.curves.columns] = False
    if not suspect.any() or is_sparse(X := rows.unscaled().sample(_LOOKED_AT, seed)[0]):
        return
    X = np.asarray(X).reshape(len(X), -1)
    for j in np.flatnonzero(suspect).tolist():
        near = X[np.abs(X[:, j] - np.median(X[:, j])) <= limit[j] / 2, j]
        if len(X) - len(near) <= max(1, share * len(X)) and len(np.unique(near)) >= _LEAST_VALUES:
            part = (near.max() - near.min()) / width[j]
            warn(
                f"column {source.feature_names[j]!r} is from {found.minimum[j]:.3g} to {found.maximum[j]:.3g}, but all "
                f"rows except very few lie within {part:.0e} of this range and are nearly equal after scaling; replace "
                "what stands for a missing value, or pass the logarithm of the column",
                AssumptionWarning,
            )


def rows_of(X: Any, dtype: str = "float64", split: str | None = "auto") -> RowsRef:
    """The rows of a table (an array, a data frame, a list) or of a source, without labels.

    Numbers are converted to `dtype`; anything else is passed on for the kernel to check.
    """
    if isinstance(X, RowsRef):
        return X
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype={dtype!r} is unknown; choose 'float32' or 'float64'")
    if isinstance(X, RowSource):
        return RowsRef.of(X, split=split, dtype=dtype)
    source = ArrayRows(as_rows(X, dtype), None)
    if not source.rows:
        raise DataError("the table has no rows")
    return RowsRef.of(source, dtype=dtype)
