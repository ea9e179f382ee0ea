"""Rows in, Zarr shards out: the part of ingest that writes the destination.

A ShardWriter collects rows until a shard is full, then hashes, measures and stores it on a separate thread while the
next one fills. Chunk rows are chosen by bytes, and a shard holds several chunks in one object. A Spool is the scratch
space of shuffles and splits: rows are written to one file per bucket and read back bucket by bucket.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kme_dist.data.chunks import encode_shard
from kme_dist.data.leases import Check, always_held
from kme_dist.data.places import Place, store_errors
from kme_dist.data.statistics import Statistics
from kme_dist.data.store import create_array
from kme_dist.errors import ConfigError, DataError
from kme_dist.failpoints import passing

CHUNK_BYTES = 2 << 20
SHARD_BYTES = 16 << 20
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 1024, 1 << 16
COMPRESSIONS = ("auto", "zstd", "none")


@dataclass(frozen=True)
class ChunkLayout:
    """Chunk and shard sizes. `chunk_rows` is a power of two; a shard is an integer number of chunks."""

    chunk_rows: int
    shard_rows: int
    compressed: bool | None  # None: not measured yet

    def __post_init__(self) -> None:
        if self.chunk_rows < 1 or self.shard_rows < 1 or self.shard_rows % self.chunk_rows:
            raise DataError(
                f"chunks of {self.chunk_rows} rows in shards of {self.shard_rows}: a shard must be an integer number "
                "of chunks"
            )

    def windows(self, rows: int) -> list[tuple[int, int]]:
        """The rows of each shard: what one task may write, since two writers of one stored object undo each other."""
        return [(start, min(rows, start + self.shard_rows)) for start in range(0, rows, self.shard_rows)]

    @classmethod
    def choose(cls, row_bytes: int, chunk_bytes: int, shard_bytes: int, compression: str) -> ChunkLayout:
        if compression not in COMPRESSIONS:
            raise ConfigError(f"compression is {compression!r}; it must be one of {', '.join(COMPRESSIONS)}.")
        fitting = max(1, chunk_bytes // max(1, row_bytes))
        rows = min(MAX_CHUNK_ROWS, 1 << (fitting.bit_length() - 1))
        per_shard = max(1, shard_bytes // max(1, rows * row_bytes))
        return cls(rows, rows * per_shard, {"auto": None, "zstd": True, "none": False}[compression])


def pays_off(chunk: np.ndarray) -> bool:
    """Whether zstd halves a chunk: with less, decompression costs more than the bytes it saves."""
    raw = np.ascontiguousarray(chunk)
    return raw.nbytes > 0 and len(pa.compress(raw.data.cast("B"), codec="zstd", asbytes=True)) < raw.nbytes // 2


def digest(array: np.ndarray) -> str:
    """The first 128 bits of SHA-256 over the values, little endian, row by row."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()[:32]


# Of one split: statistics of features and targets, rows of each class, and for weights their sum and the number of
# positive ones in each class (one row without classes, none without weights).
Measured = tuple[Statistics, Statistics | None, np.ndarray, np.ndarray]


@dataclass
class _Written:
    """The digests and statistics of one stored shard."""

    digests: dict[str, list[str]]
    statistics: dict[str, Measured]


@dataclass
class ShardWriter:
    """Append rows to arrays X, y, row and weight (the last three optional) of a group, shard by shard."""

    place: Place
    width: int
    dtype: np.dtype[Any]
    target_dtype: np.dtype[Any] | None
    with_rows: bool
    layout: ChunkLayout
    first_row: int = 0  # first row to write, at a shard boundary
    stop_row: int | None = None  # of a task: its last row, plus 1; the shards after it belong to others
    settled: bool = False  # the layout is given by an existing data set
    total: int = 0
    segments: list[tuple[str | None, int]] = field(default_factory=list)  # (split, first row) in order
    digests: dict[str, list[str]] = field(default_factory=dict)
    statistics: dict[str, Measured] = field(default_factory=dict)
    with_weights: bool = False
    still_held: Check = always_held  # called before each stored object: in a store, another writer may have taken over

    def __post_init__(self) -> None:
        if self.first_row % self.layout.shard_rows:
            raise DataError(
                f"{self.place}: writing from row {self.first_row} would share a shard of {self.layout.shard_rows} rows "
                "with another task; a task must write whole shards"
            )
        self.total = self.first_row
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kme-writer")
        self._pending: Future[_Written] | None = None
        self._buffers = self._new_buffers()
        self._filled = 0
        self.digests = {name: [] for name in self._buffers}
        if not self.segments:
            self.segments = [("all", self.first_row)]

    def _new_buffers(self) -> dict[str, np.ndarray]:
        rows = self.layout.shard_rows
        buffers = {"X": np.zeros((rows, self.width), self.dtype)}
        if self.target_dtype is not None:
            buffers["y"] = np.zeros(rows, self.target_dtype)
        if self.with_rows:
            buffers["row"] = np.zeros(rows, np.int64)
        if self.with_weights:
            buffers["weight"] = np.zeros(rows)
        return buffers

    def begin(self, split: str | None) -> None:
        """Rows added from now on belong to `split`; None: they are already in the statistics."""
        if self.segments and self.segments[-1][1] == self.total:
            self.segments[-1] = (split, self.total)
        else:
            self.segments.append((split, self.total))

    def add(
        self, X: np.ndarray, y: np.ndarray | None, rows: np.ndarray | None, weights: np.ndarray | None = None
    ) -> None:
        given = {"X": X, "y": y, "row": rows, "weight": weights}
        at = 0
        if self.stop_row is not None and self.total + len(X) > self.stop_row:
            raise DataError(
                f"{self.place}: rows from {self.stop_row} belong to another task, but the source has more rows than "
                "when the tasks were planned; do not change it, then run the same command again"
            )
        while at < len(X):
            count = min(self.layout.shard_rows - self._filled, len(X) - at)
            for name, buffer in self._buffers.items():
                values = given[name]
                assert values is not None
                buffer[self._filled : self._filled + count] = values[at : at + count]
            self._filled += count
            self.total += count
            at += count
            if self._filled == self.layout.shard_rows:
                self._flush()

    def finish(self) -> None:
        """Store the remaining rows and wait until everything is stored."""
        if not self.settled:  # everything fits in one shard: small data get small chunks
            needed = 1 << max(0, math.ceil(math.log2(max(1, self._filled))))
            rows = min(self.layout.chunk_rows, max(MIN_CHUNK_ROWS, needed))
            # The index of a shard has an entry per chunk: few, unless small chunks were requested.
            shard_rows = min(self.layout.shard_rows, rows * max(64, -(-self._filled // rows)))
            self.layout = ChunkLayout(rows, shard_rows, self.layout.compressed)
        if self._filled:
            self._flush(last=True)
        self._settle(self._buffers["X"][:0])
        self._collect()
        self._pool.shutdown()

    def abandon(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _settle(self, first_chunk: np.ndarray) -> None:
        if self.layout.compressed is None:
            compressed = pays_off(first_chunk)
            self.layout = ChunkLayout(self.layout.chunk_rows, self.layout.shard_rows, compressed)
        self.settled = True

    def _flush(self, last: bool = False) -> None:
        self._settle(self._buffers["X"][: min(self._filled, self.layout.chunk_rows)])
        self._collect()
        start = self.total - self._filled
        self._pending = self._pool.submit(self._write, self._buffers, start, self._filled)
        self._filled = 0
        if not last:
            self._buffers = self._new_buffers()

    def _collect(self) -> None:
        if self._pending is None:
            return
        written, self._pending = self._pending.result(), None
        for name, values in written.digests.items():
            self.digests[name] += values
        for split, found in written.statistics.items():
            self.statistics[split] = joined(self.statistics.get(split), found)

    def _write(self, buffers: dict[str, np.ndarray], start: int, count: int) -> _Written:
        shard = start // self.layout.shard_rows
        result = _Written({}, {})
        with store_errors(self.place):
            for name, buffer in buffers.items():
                self.still_held()
                result.digests[name] = write_shard(self.place, name, shard, buffer, count, self.layout)
        for split, low, high in self._pieces(start, start + count):
            chunk = slice(low - start, high - start)
            y, w = (buffers[name][chunk] if name in buffers else None for name in ("y", "weight"))
            target = Statistics.of(y, w) if y is not None and y.dtype.kind == "f" else None
            codes = y if y is not None and y.dtype.kind == "i" else None
            classes = np.zeros(0, np.int64) if codes is None else np.bincount(codes)
            piece = (Statistics.of(buffers["X"][chunk], w), target, classes, weight_totals(w, codes))
            result.statistics[split] = joined(result.statistics.get(split), piece)
        return result

    def measured(self) -> Iterator[tuple[str, list[int], Measured]]:
        """The splits that were written: name, row range, and statistics."""
        stops = [start for _, start in self.segments[1:]] + [self.total]
        for (split, start), stop in zip(self.segments, stops, strict=True):
            if split is not None and split in self.statistics:
                yield split, [start, stop], self.statistics[split]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        bounds = [*self.segments, (None, 2**62)]
        for (split, low), (_, high) in pairwise(bounds):
            low, high = max(low, start), min(high, stop)
            if split is not None and low < high:
                yield split, low, high


def joined(old: Measured | None, new: Measured) -> Measured:
    if old is None:
        return new
    target = None if new[1] is None or old[1] is None else old[1] + new[1]
    return old[0] + new[0], target, padded_sum(old[2], new[2]), padded_sum(old[3], new[3])


def weight_totals(weights: np.ndarray | None, codes: np.ndarray | None) -> np.ndarray:
    """Σ w and the number of positive weights, in one row for each class (in one row without classes)."""
    if weights is None:
        return np.zeros((0, 2))
    labels = np.zeros(len(weights), np.int64) if codes is None else codes
    return np.stack([np.bincount(labels, values) for values in (weights, (weights > 0).astype(np.float64))], axis=1)


def padded_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b along the first axis, as if the shorter one ended in zeros."""
    total = np.zeros((max(len(a), len(b)), *a.shape[1:]), a.dtype)
    total[: len(a)] += a
    total[: len(b)] += b
    return total


def weight_entry(totals: np.ndarray | None) -> dict[str, Any]:
    """Sum and number of positive weights for each class; nothing without weights."""
    return {} if totals is None or not len(totals) else {"weight_totals": totals.tolist()}


def split_entry(
    ranges: list[list[int]], features: Statistics, classes: np.ndarray | None, weights: np.ndarray | None = None
) -> dict[str, Any]:
    return {
        "ranges": ranges,
        "rows": features.count,
        "class_counts": None if classes is None else classes.tolist(),
        "statistics": features.to_json(),
        **weight_entry(weights),
    }


def write_shard(place: Place, name: str, shard: int, buffer: np.ndarray, count: int, layout: ChunkLayout) -> list[str]:
    """Store the first `count` rows of a shard's buffer (padded with zeros); returns a digest per chunk."""
    passing("ingest.before_shard")
    rows = layout.chunk_rows
    chunks = [buffer[i : i + rows] for i in range(0, count, rows)]
    tail = len(chunks[-1])
    if tail < rows:  # only if the buffer is not a multiple of the chunk size
        padded = np.zeros((rows, *buffer.shape[1:]), buffer.dtype)
        padded[:tail] = chunks[-1]
        chunks[-1] = padded
    parts = encode_shard(chunks, layout.shard_rows // rows, compressed=bool(layout.compressed))
    key = "/".join([name, "c", str(shard), *["0"] * (buffer.ndim - 1)])
    place.write(key, parts, sync=False)
    passing("ingest.after_shard", lambda: [place.path / key])
    return [digest(buffer[i : min(i + rows, count)]) for i in range(0, count, rows)]


def declare_arrays(place: Place, writer: ShardWriter, rows: int) -> None:
    """Write the metadata of arrays whose shards are already stored."""
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {"X": ((rows, writer.width), writer.dtype)}
    if writer.target_dtype is not None:
        shapes["y"] = ((rows,), writer.target_dtype)
    if writer.with_rows:
        shapes["row"] = ((rows,), np.dtype(np.int64))
    if writer.with_weights:
        shapes["weight"] = ((rows,), np.dtype(np.float64))
    for name, (shape, dtype) in shapes.items():
        create_array(
            place,
            name,
            shape,
            dtype,
            chunk_rows=writer.layout.chunk_rows,
            shard_rows=writer.layout.shard_rows,
            compressed=bool(writer.layout.compressed),
        )


class Spool:
    """Scratch files by bucket. Records keep the order in which they were added."""

    FAN_OUT_BITS = 6

    def __init__(
        self, folder: Path, width: int, dtype: np.dtype[Any], target_dtype: np.dtype[Any], weighted: bool = False
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        weight: list[Any] = [("weight", "<f8")] if weighted else []
        self.record = np.dtype([("key", "<u8"), ("row", "<i8"), ("y", target_dtype), *weight, ("X", dtype, (width,))])
        self._files: dict[str, Any] = {}

    def add(self, bucket_of: np.ndarray, names: list[str], records: np.ndarray) -> None:
        """Append each record to the file of its bucket; `names[b]` is the file of bucket b."""
        order = np.argsort(bucket_of, kind="stable")
        sorted_buckets = bucket_of[order]
        edges = np.flatnonzero(np.diff(sorted_buckets)) + 1
        records = records[order]
        with store_errors(str(self.folder)):
            for part in np.split(np.arange(len(order)), edges):
                if len(part):
                    data = records[part[0] : part[-1] + 1].data.cast("B")
                    file = self._file(names[int(sorted_buckets[part[0]])])
                    while len(data):  # an unbuffered file may write fewer bytes than given
                        data = data[file.write(data) :]

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = open(self.folder / name, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        return self._files[name]

    def close(self) -> None:
        """Close the files; they are kept, and records can still be added."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str, max_records: int | None = None) -> Iterator[np.ndarray]:
        """The records of one file, in pieces of `max_records`."""
        path = self.folder / name
        if not path.exists():
            return
        total = path.stat().st_size // self.record.itemsize
        step = max_records or max(1, total)
        with open(path, "rb") as file:
            for start in range(0, total, step):
                yield np.fromfile(file, self.record, min(step, total - start))

    def sorted(self, name: str, max_bytes: int, bits_used: int) -> Iterator[np.ndarray]:
        """The records of one file, sorted by key. A file that is too large is split by the next bits of the key."""
        path = self.folder / name
        if not path.exists():
            return
        if path.stat().st_size <= max_bytes or bits_used + self.FAN_OUT_BITS > 60:
            for records in self.read(name):
                yield records[np.argsort(records["key"], kind="stable")]
            os.unlink(path)
            return
        fan = 1 << self.FAN_OUT_BITS
        names = [f"{name}-{i:02x}" for i in range(fan)]
        shift = np.uint64(64 - bits_used - self.FAN_OUT_BITS)
        for records in self.read(name, max(1, max_bytes // 4 // self.record.itemsize)):
            buckets = (records["key"] >> shift).astype(np.int64) & (fan - 1)
            self.add(buckets, names, records)
        self.close()
        os.unlink(path)
        for part in names:
            yield from self.sorted(part, max_bytes, bits_used + self.FAN_OUT_BITS)
