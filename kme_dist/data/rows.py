"""The rows of a split as a task is told of them: one small record that reads the same rows on any worker.

    rows = RowsRef.of(data, split="train", scaling=scaling, dtype="float32")
    X, y = rows.read(0, 2048)            # scaled rows and labels
    rows.part(0, 2048)                   # a record of these rows alone, for one task
    rows.sample(1000, seed=0)            # random rows, read in few pieces
    rows.blocks(4096), rows.chunks()     # spans to make tasks of

Rows are counted within the split, from 0 to `rows.count`, whatever lies between its ranges. Of a data set only the
address travels, and a process opens it once; rows in memory travel themselves, or as files that all workers map (see
`kme_dist.data.arrays`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import CACHE_BYTES, RowSource, joined
from kme_dist.data.plan import BatchPlan, BatchRef, Span, spans_within
from kme_dist.data.prefetch import Prefetched
from kme_dist.data.scaling import Scaling
from kme_dist.data.validation import as_rows
from kme_dist.errors import ConfigError, DataError
from kme_dist.meter import metered

_SAMPLED_CHUNKS = 64  # of rows that are neither in random order nor few enough for the cache


@dataclass(frozen=True)
class Batch:
    """The rows of one batch."""

    number: int
    X: Any
    y: Any


@dataclass(frozen=True, eq=False)
class RowsRef:
    """Rows of a source: which of them, which columns, and how they are scaled."""

    token: str  # tells a worker whether it has met these rows before
    source: RowSource
    ranges: tuple[Span, ...]
    scale: Scaling | None = None  # None: as they are
    dtype: str = ""  # empty: that of the source
    n_classes: int = 0  # 0: whatever labels there are, they are no classes
    columns: tuple[int, ...] = ()  # of the source that count as features; none named: all of them
    split: str | None = None  # whose ranges these are

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
        """`split` "auto" is "train" where there is one, None all rows; `classes` says that labels must be classes."""
        if classes and source.classes is None:
            raise DataError(f"{source.path} has no class labels; ingest it again with the column named by `label`")
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
        """Name and type of what names a row outside; None where that is its number among all rows."""
        return self.source.id_field or (None if self.split is None else ("row", "int64"))

    def describe(self) -> dict[str, Any]:
        """Where they are, in plain data: the same for the same place."""
        return {"kind": self.source.kind, **self.source.whereabouts(self.split)}

    @property
    def in_memory(self) -> bool:
        return isinstance(self.source, ArrayRows)

    # --- spans -------------------------------------------------------------------------------------

    def stored(self, start: int, stop: int) -> tuple[Span, ...]:
        """Where rows [start, stop) of the split lie in the source."""
        return spans_within(self.ranges, start, stop)

    def blocks(self, size: int) -> list[Span]:
        """The split in pieces of `size` rows, the last one smaller."""
        return [(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def chunks(self) -> list[Span]:
        """The split cut where the source is cut, so that a span never reaches over two chunks."""
        size, spans, before = self.source.chunk_rows, [], 0
        for low, high in self.ranges:
            cuts = [low, *range((low // size + 1) * size, high, size), high]
            spans += [(before + a - low, before + b - low) for a, b in itertools.pairwise(cuts)]
            before += high - low
        return spans

    def part(self, start: int, stop: int) -> RowsRef:
        """Rows [start, stop) alone: of rows in memory no others travel along."""
        source, ranges = self.source.narrowed(self.stored(start, stop))
        return replace(self, source=source, ranges=ranges, token=f"{self.token}-{start}-{stop}")

    def parts(self, size: int) -> list[RowsRef]:
        """All rows in order, in parts of `size` rows and a last one of fewer."""
        return [self.part(*span) for span in self.blocks(size)]

    def in_precision(self, dtype: str) -> RowsRef:
        return self if dtype == self.dtype else replace(self, dtype=dtype, token=f"{self.token}-{dtype}")

    # --- rows --------------------------------------------------------------------------------------

    def read(self, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """Scaled rows [start, stop) of the split (all of them by default), and their labels."""
        spans = self.stored(start, self.count if stop is None else stop)
        with metered("read"):
            parts = [self.source.read_rows(*span) for span in spans or ((0, 0),)]
        return self._scaled(joined([X for X, _ in parts])), _labels(y for _, y in parts)

    def read_labels(self, start: int, stop: int) -> Any:
        """Labels alone, without the rows."""
        return _labels(self.source.read_labels(*span) for span in self.stored(start, stop))

    def read_ids(self, start: int, stop: int) -> Any:
        """What names rows [start, stop) outside: their place in the source, or a column of it."""
        return joined([self.source.read_ids(*span) for span in self.stored(start, stop)])

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

        `mode` "rows" gathers exact random rows, which is what "auto" takes where the cache of an open data set holds
        all of them; beyond that it is about a hundred times slower to read than "contiguous", which rows that were
        shuffled at ingest get. Others get "blocks": random rows from `blocks` random chunks a batch. "contiguous" on
        rows that were not shuffled makes batches of neighbours, and has to be asked for by name.
        """
        if mode == "auto":
            # In double precision whatever the stored one is: the same rows make the same batches however they are kept.
            cached = 8 * self.source.features * self.count <= CACHE_BYTES
            mode = "rows" if cached else "contiguous" if self.source.shuffled is not None else "blocks"
        size = min(batch_size, self.count)
        return BatchPlan(self.ranges, size, seed, mode, order, self.source.chunk_rows, blocks)

    def batch(self, plan: BatchPlan, number: int) -> tuple[Any, Any]:
        """Batch `number` of a plan for these rows, scaled."""
        ref = plan.batch(number)
        if any(stop > self.source.rows for _, stop in ref.spans):
            raise ConfigError(
                f"{self.path}: the plan reaches beyond its {self.source.rows} rows; it was made for other data."
            )
        return self.read_drawn(ref)

    def batches(
        self,
        plan: BatchPlan,
        numbers: Iterable[int],
        *,
        prefetch: int = 2,
        transfer: Callable[[np.ndarray], Any] | None = None,
    ) -> Prefetched[Batch]:
        """The batches of these numbers, in order, up to `prefetch` of them ready before they are asked for.

        `transfer` is applied to X and to y on the reading thread: the place to copy to a device through pinned memory,
        so that the copy overlaps with the work on the batch before. The result counts `waited_s`, the time its consumer
        stood idle.
        """

        def produce() -> Iterator[Batch]:
            for number in numbers:
                X, y = self.batch(plan, number)
                if transfer is not None:
                    X, y = transfer(X), None if y is None else transfer(y)
                yield Batch(number, X, y)

        return Prefetched(produce, prefetch)

    def sample(self, size: int, seed: int) -> tuple[Any, Any]:
        """About `size` random rows (all, where there are no more), read in few pieces; scaled, with labels.

        Rows that were shuffled at ingest are one run of neighbours; others come from up to 64 chunks.
        """
        return self.read_drawn(self.draw(size, seed))

    def draw(self, size: int, seed: int) -> BatchRef:
        """Which rows `sample` takes, for those who read the same ones of another source beside this one."""
        if size >= self.count:
            return BatchRef(0, self.ranges)
        drawn = self.plan(size, seed, order="sampling", blocks=_SAMPLED_CHUNKS).batch(0)
        return drawn if drawn.rows is None else BatchRef(0, (), np.sort(drawn.rows))

    def read_drawn(self, drawn: BatchRef) -> tuple[Any, Any]:
        """Rows that `draw` has chosen, scaled, with labels."""
        with metered("read"):
            if drawn.rows is not None:
                X, y = self.source.take(drawn.rows)
                return self._scaled(X), y
            parts = [self.source.read_rows(*span) for span in drawn.spans]
        return self._scaled(joined([X for X, _ in parts])), _labels(y for _, y in parts)

    def _scaled(self, X: Any) -> Any:
        if self.columns:
            X = X[:, list(self.columns)]
        if self.scale is not None:
            return self.scale.apply(X, self.dtype or "float64")
        return X.astype(self.dtype, copy=False) if self.dtype and hasattr(X, "dtype") else X

    # --- what they are -----------------------------------------------------------------------------

    def digest(self) -> str:
        """Of the stored rows and labels, whatever split is taken of them."""
        return self.source.digest

    def identity(self, start: int, stop: int) -> str:
        """Changes when rows [start, stop) do; without reading them."""
        return self.source.identity(self.stored(start, stop))


def _labels(parts: Iterable[np.ndarray | None]) -> np.ndarray | None:
    found = [y for y in parts if y is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else np.concatenate(found)


def rows_of(X: Any, dtype: str = "float64", split: str | None = "auto") -> RowsRef:
    """The rows of a table (an array, a data frame, a list of anything) or of a source of rows, without labels.

    Numbers become `dtype`; what is no table of numbers stays as it is, for the kernel to check.
    """
    if isinstance(X, RowsRef):
        return X
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype={dtype!r} is unknown; choose 'float32' or 'float64'")
    if isinstance(X, RowSource):
        return RowsRef.of(X, split=split, dtype=dtype)
    source = ArrayRows(as_rows(X, dtype), None)
    if not source.rows:
        raise DataError("the table has no rows; at least one is needed")
    return RowsRef.of(source, dtype=dtype)
