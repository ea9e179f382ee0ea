"""Exactly once over the chunks of any input: what is done is kept, what fails is quarantined, the rest continues.

    source = open_input(dataset_or_path_or_array, features=54)
    outcome = run_chunks(state, layout, source, predict_chunk, (model_path, ...), executor=SerialExecutor())

Every chunk of the input becomes one task, which reads its rows by path (rows in memory travel with the task), computes,
stores the output chunk whole and then its receipt. So it does not matter when whom a kill hits: a chunk with a receipt
is never computed again, one without is. The record says what was computed from what; a model or an input that changed
under a job is refused. Rows that were appended to the input are new chunks, and the last one anew if it was not full.

This module knows chunks and receipts, not models.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.encode import Encoder
from kme_dist.data.leases import Check, writer_lease
from kme_dist.data.places import METADATA_KEY, Place, store_errors
from kme_dist.data.predictions import (
    PREDICTIONS_FORMAT,
    PREDICTIONS_VERSION,
    Layout,
    Receipt,
    gather_receipts,
    read_receipt,
    read_receipts,
    read_state,
    write_receipt,
    write_state,
)
from kme_dist.data.readers import FileOptions, TableSource, open_source
from kme_dist.data.schema import Column, Schema
from kme_dist.errors import ConfigError, CorruptError, DataError, NumericalError, RetryError
from kme_dist.meter import metered
from kme_dist.run.executors import Executor

ATTEMPTS = 3  # before a chunk that fails is quarantined
CHUNK_ROWS = 8192  # of inputs that have no chunks of their own
_CACHE_BYTES = 8 << 20
_POISON = (CorruptError, DataError, NumericalError)
Rows = tuple[np.ndarray, Any]  # features, ids or None
Progress = Callable[[int, int], None]  # rows done, rows altogether


class Watch(Protocol):
    """Told of chunks: done and failed by now, altogether, the rows of those done, and how many were repeated."""

    def __call__(self, done: int, failed: int, total: int, rows: int, *, retried: int) -> None: ...


class Reader(Protocol):
    """Reads the rows of one chunk, wherever it is called; small enough to travel with its task."""

    def __call__(self) -> Rows: ...


class Input:
    """Rows in chunks of `chunk_rows`, the last one perhaps shorter. `identity` changes when the rows of a chunk do."""

    name: str
    rows: int
    chunk_rows: int
    features: int
    feature_names: list[str] | None
    ids: tuple[str, str] | None  # name and type of what is carried through

    def identity(self, chunk: int) -> str:
        raise TypeError(f"{type(self).__name__} must define identity")

    def reader(self, chunk: int) -> Reader:
        raise TypeError(f"{type(self).__name__} must define reader")

    def describe(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} must define describe")


# --- inputs ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _opened(path: str, token: str) -> Dataset:
    """A data set in this process; `token` changes when its rows do."""
    return open_dataset(path, cache_bytes=_CACHE_BYTES)


@dataclass(frozen=True)
class _DatasetReader:
    path: str
    token: str
    spans: tuple[tuple[int, int], ...]
    ids: bool

    def __call__(self) -> Rows:
        data = _opened(self.path, self.token)
        X = np.concatenate([data.X.read(*span) for span in self.spans])
        if not self.ids:
            return X, None
        if data.row is not None:
            return X, np.concatenate([data.row.read(*span) for span in self.spans])
        return X, np.concatenate([np.arange(*span, dtype=np.int64) for span in self.spans])


class DatasetInput(Input):
    """A data set, or one split of it; ids are the rows' positions in the source, where they differ from their own."""

    def __init__(self, data: Dataset, split: str | None) -> None:
        self._data, self._split = data, split
        self._ranges = tuple(span for span in data.ranges(split) if span[0] < span[1])
        self.name, self.rows, self.chunk_rows = data.path, data.split_rows(split), data.chunk_rows
        self.features, self.feature_names = data.features, list(data.feature_names)
        self.ids = ("row", "int64") if split is not None or data.row is not None else None
        self._digests = data.attributes["digests"]["X"]
        self._token = f"{data.rows}-{self._digests[-1] if self._digests else ''}"

    def _spans(self, chunk: int) -> tuple[tuple[int, int], ...]:
        start, stop = chunk * self.chunk_rows, min(self.rows, (chunk + 1) * self.chunk_rows)
        found, before = [], 0
        for low, high in self._ranges:
            a, b = max(start - before, 0), min(stop - before, high - low)
            if a < b:
                found.append((low + a, low + b))
            before += high - low
        return tuple(found)

    def identity(self, chunk: int) -> str:
        known = [
            (low, high, self._digests[low // self.chunk_rows : -(-high // self.chunk_rows)])
            for low, high in self._spans(chunk)
        ]
        return short_digest(known)

    def reader(self, chunk: int) -> Reader:
        return _DatasetReader(self._data.path, self._token, self._spans(chunk), self.ids is not None)

    def describe(self) -> dict[str, Any]:
        return {"kind": "dataset", "path": self._data.path, "split": self._split}


@dataclass(frozen=True)
class _ParquetReader:
    files: tuple[str, ...]
    window: tuple[int, int]
    schema: Schema
    id_column: str | None
    id_type: str

    def __call__(self) -> Rows:
        source = open_source(list(self.files), FileOptions(window=self.window))
        extras = [] if self.id_column is None else [self.id_column]
        blocks = list(Encoder(source, self.schema, extras).encoded())
        X = np.concatenate([block.X for block in blocks])
        if self.id_column is None:
            return X, None
        ids = pa.concat_arrays([_flat(block.extras[self.id_column]) for block in blocks])
        return X, ids if self.id_type == "text" else ids.cast(self.id_type).to_numpy(zero_copy_only=False)


def _flat(array: Any) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


class ParquetInput(Input):
    """A Parquet file or a folder of them, in the order of their names; columns by the names of the features."""

    def __init__(
        self, path: str, names: Sequence[str] | None, features: int, like: Dataset | None, id_column: str | None
    ) -> None:
        source = open_source(path, FileOptions(format="parquet"))
        assert isinstance(source, TableSource)
        root = Path(path)
        self._files = sorted(root.rglob("*.parquet")) if root.is_dir() else [root]
        self._files = [f for f in self._files if not any(p.startswith(("_", ".")) for p in f.relative_to(root).parts)]
        metadata = [pq.read_metadata(file) for file in self._files]
        self._begins = np.cumsum([0, *(m.num_rows for m in metadata)])
        self.name, self.rows, self.chunk_rows = str(root), int(self._begins[-1]), CHUNK_ROWS
        self._schema = _parquet_schema(source, names, features, like, id_column)
        self.features, self.feature_names = len(self._schema.feature_names), self._schema.feature_names
        self._id_column, self.ids = id_column, None
        if id_column is not None:
            if id_column not in source.kinds:
                raise ConfigError(f"{path}: there is no column {id_column!r}; there are {', '.join(source.kinds)}")
            self.ids = ("id", "int64" if source.kinds[id_column] == "integer" else "text")
        self._stamps = []
        for file, found in zip(self._files, metadata, strict=True):
            facts = file.stat()
            self._stamps.append([file.name, found.num_rows, facts.st_size, facts.st_mtime_ns])

    def _overlapping(self, chunk: int) -> tuple[int, int, int, int]:
        start, stop = chunk * self.chunk_rows, min(self.rows, (chunk + 1) * self.chunk_rows)
        first = int(np.searchsorted(self._begins, start, side="right")) - 1
        last = int(np.searchsorted(self._begins, stop, side="left"))
        return first, last, start, stop

    def identity(self, chunk: int) -> str:
        first, last, start, stop = self._overlapping(chunk)
        return short_digest([self._stamps[first:last], start, stop])

    def reader(self, chunk: int) -> Reader:
        first, last, start, stop = self._overlapping(chunk)
        begin = int(self._begins[first])
        files = tuple(str(file) for file in self._files[first:last])
        id_type = self.ids[1] if self.ids else ""
        return _ParquetReader(files, (start - begin, stop - begin), self._schema, self._id_column, id_type)

    def describe(self) -> dict[str, Any]:
        return {"kind": "parquet", "path": self.name}


def _parquet_schema(
    source: TableSource, names: Sequence[str] | None, features: int, like: Dataset | None, id_column: str | None
) -> Schema:
    if like is not None:
        missing = "error" if like.schema.missing == "drop" else like.schema.missing
        return replace(like.schema, label=None, label_kind="none", task="none", classes=None, missing=missing)
    wanted = list(names) if names else [c for c, kind in source.kinds.items() if c != id_column and kind != "text"]
    absent = [name for name in wanted if name not in source.kinds]
    if absent or len(wanted) != features:
        raise DataError(
            f"{source.name}: the model has {features} features"
            + (f", and there is no column {absent[0]!r}" if absent else f", and {len(wanted)} columns hold numbers")
            + "; give the data set it was learned from as `like`, so that its encoding is reused"
        )
    columns = tuple(Column(name, "number", i) for i, name in enumerate(wanted))
    return Schema(columns, None, "none", None, "none", "float64", "error", (features,))


@dataclass(frozen=True)
class _ArrayReader:
    rows: Any  # a NumPy block, or a Dask one with its own small graph

    def __call__(self) -> Rows:
        block = self.rows
        if hasattr(block, "compute"):
            block = block.compute(scheduler="synchronous")
        return np.asarray(block), None


class ArrayInput(Input):
    """A NumPy array (or a data frame of numbers), or a Dask array whose blocks are computed where they are used."""

    def __init__(self, X: Any) -> None:
        self.feature_names = [str(name) for name in X.columns] if hasattr(X, "columns") else None
        self._lazy = hasattr(X, "dask")
        self._X: Any = X
        if self._lazy and any(type(task).__name__ == "Future" for task in dict(X.dask).values()):
            raise DataError(
                "the rows of this Dask array are held by a cluster (it was persisted); hand over the array as it was "
                "before, so that each task computes its own rows, or store it with kme_dist.ingest first"
            )
        if not self._lazy:
            self._X = np.asarray(X)
        if self._X.ndim != 2 or self._X.dtype.kind not in "fiub":
            raise DataError(f"rows and columns of numbers are needed, got {self._X.dtype} of shape {self._X.shape}")
        self.name, self.ids = f"a {'Dask' if self._lazy else 'NumPy'} array", None
        self.rows, self.features = (int(size) for size in self._X.shape)
        self.chunk_rows = CHUNK_ROWS
        if self._lazy:
            largest = max(int(size) for size in self._X.chunks[0])
            self.chunk_rows = min(max(1, largest), 1 << 16)
            self._X = self._X.rechunk((self.chunk_rows, self.features))

    def _block(self, chunk: int) -> Any:
        if not self._lazy:
            return self._X[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows]
        import dask

        return dask.optimize(self._X.blocks[chunk])[0]  # only what this block needs

    def identity(self, chunk: int) -> str:
        if not self._lazy:
            return hashlib.sha256(np.ascontiguousarray(self._block(chunk)).data).hexdigest()[:32]
        from dask.base import tokenize

        return short_digest([tokenize(self._X), chunk])

    def reader(self, chunk: int) -> Reader:
        return _ArrayReader(self._block(chunk))

    def describe(self) -> dict[str, Any]:
        return {"kind": "dask" if self._lazy else "array"}


def open_input(
    data: Any,
    *,
    features: int,
    feature_names: Sequence[str] | None = None,
    split: str | None = None,
    like: str | Path | Dataset | None = None,
    id_column: str | None = None,
) -> Input:
    """Whatever holds rows: a data set or its path, a Parquet file or folder, a NumPy or Dask array."""
    found: Input
    if isinstance(data, str | Path | Place):
        place = Place.of(data)
        if place.exists(METADATA_KEY):
            data = open_dataset(place)
        elif place.is_local and place.path.suffix.lower() in (".csv", ".tsv", ".txt", ".npy", ".npz"):
            raise DataError(
                f"{place}: predictions are made of data sets, Parquet files and arrays; make a data set of it first: "
                f"kme-dist ingest {place} {place.path.with_suffix('.zarr')}"
            )
        elif place.is_local and place.path.exists():
            example = open_dataset(like) if isinstance(like, str | Path) else like
            found = ParquetInput(str(place.path), feature_names, features, example, id_column)
        else:
            raise DataError(f"{place}: there is no data set and no Parquet folder here.")
    if isinstance(data, Dataset):
        found = DatasetInput(data, split)
    elif not isinstance(data, str | Path | Place):
        found = ArrayInput(data)
    if split is not None and not isinstance(found, DatasetInput):
        raise ConfigError(f"split={split!r}: only data sets have splits; {found.name} is none")
    if id_column is not None and not isinstance(found, ParquetInput):
        raise ConfigError(f"id_column={id_column!r}: only Parquet has one; data sets carry their row numbers through")
    if found.features != features:
        raise DataError(f"{found.name} has {found.features} features, the model was fitted with {features}")
    if feature_names and found.feature_names and list(feature_names) != found.feature_names:
        pairs = zip(feature_names, found.feature_names, strict=True)
        at, (wanted, seen) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise DataError(f"{found.name}: feature {at} is {seen!r}, the model was fitted with {wanted!r} there")
    return found


def short_digest(value: Any) -> str:
    """Of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


# --- the job ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    path: str
    rows: int
    chunks: int
    computed: int  # chunks of this run
    skipped: int  # that were done before
    retried: int
    quarantined: list[dict[str, Any]]
    seconds: float
    rows_per_second: float


Compute = Callable[..., Receipt]


def run_chunks(
    state: Mapping[str, Any],
    layout: Layout,
    source: Input,
    compute: Compute,
    arguments: tuple[Any, ...],
    *,
    executor: Executor,
    overwrite: bool = False,
    from_scratch: bool = False,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Bring the predictions at `layout.place` up to date with `source`; calls `compute(*arguments, chunk, rows, input,
    reader)` for every chunk that is missing. `state["job"]` says what is computed: model, outputs, precision."""
    place, began = layout.place, time.monotonic()
    with store_errors(place), writer_lease(place) as still_held:
        done = _known(place, state, layout, source, overwrite, from_scratch)
        record = {"format": PREDICTIONS_FORMAT, "format_version": PREDICTIONS_VERSION, **state}
        record |= {"status": "running", "quarantined": [], "started": _now()}
        write_state(place, record)
        layout.declare(source.rows)
        job = _Job(layout, source, compute, arguments, executor, progress, watch, done)
        skipped = len(done)
        failed = job.run()
        return _finish(job, record, failed, skipped, began, still_held)


def _known(
    place: Place, state: Mapping[str, Any], layout: Layout, source: Input, overwrite: bool, from_scratch: bool
) -> dict[int, Receipt]:
    """The chunks that need not be computed again; refuses to mix the work of two jobs."""
    earlier = read_state(place)
    if earlier is None:
        return {}
    if from_scratch:
        place.delete_all()
        return {}
    finished = earlier.get("status") == "complete"
    way_out = "--overwrite replaces them" if finished else "--from-scratch begins anew, or finish it as it was begun"
    held = "finished predictions" if finished else "a half-done job"
    if earlier.get("job") != state["job"]:
        if overwrite:
            place.delete_all()
            return {}
        known = earlier.get("computed_from", {})
        differing = [key for key, value in state["computed_from"].items() if known.get(key) != value]
        raise ConfigError(
            f"{place} holds {held} of something else ({', '.join(differing) or 'another version'} differ); {way_out}"
        )
    done = read_receipts(place, state["job"], place.sizes(), layout)
    chunks = -(-source.rows // layout.chunk_rows)
    last = max(done, default=-1)
    for chunk, receipt in list(done.items()):
        if chunk < chunks and receipt.input == source.identity(chunk):
            continue
        grown = chunk == last and receipt.rows < min(source.rows - chunk * layout.chunk_rows, layout.chunk_rows)
        if grown:
            del done[chunk]
        elif overwrite:
            place.delete_all()
            return {}
        else:
            seen = "has fewer rows" if chunk >= chunks else f"has changed (chunk {chunk}, already predicted, differs)"
            raise ConfigError(f"{place} holds {held} of {source.name}, which {seen} since; {way_out}")
    return done


class _Job:
    """Chunks on their way, and what has come back."""

    def __init__(
        self,
        layout: Layout,
        source: Input,
        compute: Compute,
        arguments: tuple[Any, ...],
        executor: Executor,
        progress: Progress | None,
        watch: Watch | None,
        done: dict[int, Receipt],
    ) -> None:
        self.layout, self.source, self.compute, self.arguments = layout, source, compute, arguments
        self.executor, self.progress, self.watch, self.done = executor, progress, watch, done
        self.chunks = -(-source.rows // layout.chunk_rows)
        self.retried = self.computed_rows = 0
        self.rows_done = sum(receipt.rows for receipt in done.values())
        self._lost_before = self._lost

    def rows_of(self, chunk: int) -> int:
        return min(self.layout.chunk_rows, self.source.rows - chunk * self.layout.chunk_rows)

    def run(self) -> dict[int, Exception]:
        """Compute what is missing; returns the chunks that failed for good."""
        self._tell(0)
        todo = [chunk for chunk in range(self.chunks) if chunk not in self.done]
        failed: dict[int, Exception] = {}
        for attempt in range(ATTEMPTS):
            failed = {}
            for chunk, result in self._stream(todo):
                if isinstance(result, Receipt):
                    self.done[chunk] = result
                    self.rows_done += result.rows
                    self.computed_rows += result.rows
                elif isinstance(result, _POISON) or type(result).__name__ == "KilledWorker":
                    failed[chunk] = result
                else:
                    raise result
                self._tell(len(failed))
            todo = sorted(failed)
            if not todo:
                break
            self.retried += len(todo) if attempt + 1 < ATTEMPTS else 0
        return failed

    def _tell(self, failed: int) -> None:
        if self.progress is not None:
            self.progress(self.rows_done, self.source.rows)
        if self.watch is not None:
            retried = self.retried + self._lost - self._lost_before
            self.watch(len(self.done), failed, self.chunks, self.rows_done, retried=retried)

    @property
    def _lost(self) -> int:
        """Calls that an executor had to make again, since their worker died or hung."""
        return int(getattr(self.executor, "retried", 0))

    def _stream(self, todo: list[int]) -> Iterator[tuple[int, Receipt | Exception]]:
        results = self.executor.stream(self.compute, self._calls(todo), name="predict-chunk")
        for place, result in results:
            yield todo[place], result

    def _calls(self, todo: list[int]) -> Iterator[tuple[Any, ...]]:
        for chunk in todo:
            identity, reader = self.source.identity(chunk), self.source.reader(chunk)
            yield (*self.arguments, chunk, self.rows_of(chunk), identity, reader)


def _finish(
    job: _Job, record: dict[str, Any], failed: dict[int, Exception], skipped: int, began: float, still_held: Check
) -> Outcome:
    place, layout = job.layout.place, job.layout
    for chunk in failed:
        layout.write_nothing(chunk, job.rows_of(chunk))
    quarantined = [
        {
            "chunk": chunk,
            "first_row": chunk * layout.chunk_rows,
            "rows": job.rows_of(chunk),
            "error": " ".join(f"{type(error).__name__}: {error}".split())[:500],
        }
        for chunk, error in sorted(failed.items())
    ]
    seconds = time.monotonic() - began
    outcome = Outcome(
        path=place.address,
        rows=job.source.rows,
        chunks=job.chunks,
        computed=len(job.done) - skipped,
        skipped=skipped,
        retried=job.retried,
        quarantined=quarantined,
        seconds=round(seconds, 3),
        rows_per_second=round(job.computed_rows / seconds, 1) if seconds else 0.0,
    )
    still_held()
    gather_receipts(place, [job.done[chunk] for chunk in sorted(job.done)])
    record |= {
        "status": "incomplete" if quarantined else "complete",
        "quarantined": quarantined,
        "ended": _now(),
        "seconds": outcome.seconds,
    }
    write_state(place, record)
    return outcome


def recorded_chunk(layout: Layout, job: str, chunk: int, identity: str) -> Receipt | None:
    """On a worker: the receipt, where the chunk is done already. A worker may die between storing a chunk and handing
    its receipt over; the call is then repeated, but not the work."""
    found = read_receipt(layout.place, chunk)
    return found if found is not None and (found.job, found.input) == (job, identity) else None


def store_chunk(layout: Layout, job: str, chunk: int, identity: str, arrays: Mapping[str, Any], rows: int) -> Receipt:
    """On a worker: the chunk, whole; then its receipt. A job that was replaced meanwhile is not written into."""
    place = layout.place
    state = read_state(place)
    if state is None or state["job"] != job:
        raise RetryError(f"{place}: another job has taken the place of this one; its chunks are left alone")
    with metered("write"):
        digest, stored = layout.write(chunk, arrays)
        receipt = Receipt(job, chunk, rows, identity, digest, stored)
        write_receipt(place, receipt)
    return receipt


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
