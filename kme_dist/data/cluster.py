"""The only use of Dask in the data layer: its collections as sources, and ingest by the workers of a cluster.

Workers write whole shards: a task reads its window of rows, encodes it and stores the shards that cover it, and returns
digests and statistics. A task is a function of its window, so one that runs twice (a worker died, or was considered
dead) stores the same bytes twice. The driver merges the results in row order and writes the metadata.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kme_dist.data.encode import Encoder
from kme_dist.data.leases import Check
from kme_dist.data.places import Place
from kme_dist.data.readers import (
    Block,
    FileOptions,
    MatrixSource,
    Source,
    TableSource,
    check_names,
    kind_of,
    open_source,
)
from kme_dist.data.schema import Schema
from kme_dist.data.writer import ChunkLayout, ShardWriter, joined, pays_off
from kme_dist.errors import DataError

if TYPE_CHECKING:
    from kme_dist.data.ingest import IngestPlan


# ----------------------------------------------------------------------------------------- collections


def open_dask(source: Any, options: FileOptions) -> Source:
    """A Dask array, a pair of them, or a Dask data frame; one block or partition is computed at a time."""
    if hasattr(source, "npartitions") and hasattr(source, "get_partition"):
        return _open_frame(source)
    X, y = source if isinstance(source, tuple) else (source, None)
    if not hasattr(X, "blocks"):
        raise DataError(f"a Dask object of type {type(X).__name__} is not supported; give an array or a data frame.")
    return _open_array(X, y)


def _open_array(X: Any, y: Any) -> MatrixSource:
    if X.ndim > 1:
        X = X.rechunk({axis: -1 for axis in range(1, X.ndim)})
    sizes = X.chunks[0]
    if any(size != size for size in sizes):
        X = X.compute_chunk_sizes()
        sizes = X.chunks[0]
    rows, width = int(sum(sizes)), int(np.prod(X.shape[1:], dtype=np.int64))
    if y is not None:
        if any(size != size for size in y.chunks[0]):
            y = y.compute_chunk_sizes()
        if y.shape[0] != rows:
            raise DataError(f"Dask arrays: got {rows} rows but {y.shape[0]} labels.")

    def blocks() -> Iterator[Block]:
        at = 0
        for i, size in enumerate(sizes):
            matrix = np.asarray(X.blocks[i].compute()).reshape(int(size), width)
            target = None if y is None else np.asarray(y[at : at + int(size)].compute()).reshape(-1)
            yield Block("Dask array", at, matrix=matrix, target=target)
            at += int(size)

    names = [f"x{i}" for i in range(width)]
    target_dtype = None if y is None else np.dtype(y.dtype)
    return MatrixSource("Dask array", names, np.dtype(X.dtype), target_dtype, rows, tuple(X.shape[1:]), blocks)


def _open_frame(frame: Any) -> TableSource:
    names = [str(name) for name in frame.columns]
    check_names("Dask data frame", names)

    def partition(i: int) -> pa.Table:
        part = frame.get_partition(i).compute().rename(columns=str)
        try:
            return pa.Table.from_pandas(part, preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"Dask data frame: partition {i} mixes types of values ({error}).") from error

    schema = next((t.schema for t in map(partition, range(frame.npartitions)) if t.num_rows), partition(0).schema)

    def blocks(columns: Mapping[str, pa.DataType]) -> Iterator[Block]:
        at = 0
        for i in range(frame.npartitions):
            table = partition(i).select(list(columns))
            for batch in table.to_batches():
                yield Block("Dask data frame", at, table=batch)
                at += batch.num_rows

    return TableSource("Dask data frame", {f.name: kind_of(f.type) for f in schema}, None, blocks)


# ------------------------------------------------------------------------------------ ingest by workers


def write_in_parallel(client: Any, job: IngestPlan, writer: ShardWriter) -> bool:
    """Encode and store with the workers of `client`. Returns False, with nothing done, if the source must be streamed.

    Possible for files that can be read from any row (Parquet, npy, IDX, Zarr), in their original order, with every row
    kept.
    """
    rows, origin = job.source.rows, job.origin
    if rows is None or origin is None or job.reorders or job.schema.missing == "drop":
        return False
    if rows <= writer.layout.shard_rows or not _starts_anywhere(job.source, origin[0]):
        return False
    windows = writer.layout.windows(rows)
    token = uuid.uuid4().hex[:8]
    schema = job.schema
    if schema.task == "classification" and schema.classes is None:
        found = client.gather(_submit(client, f"kme-classes-{token}", _find_classes, windows, (origin, schema)))
        for value in sorted({value for part in found for value in part}):
            job.encoder.codes.setdefault(value, len(job.encoder.codes))
        classes, _ = job.encoder.sorted_classes()
        job.encoder.codes = {value: i for i, value in enumerate(classes)}
        schema = replace(schema, classes=tuple(classes))
    layout = writer.layout
    if layout.compressed is None:
        unlabelled = replace(schema, label=None, task="none", weight=None)
        first = next(iter(_encoder(origin, unlabelled, (0, layout.chunk_rows)).encoded()))
        layout = ChunkLayout(layout.chunk_rows, layout.shard_rows, pays_off(first.X))
    shared = (origin, schema, writer.place.address, layout, writer.still_held)
    futures = _submit(client, f"kme-ingest-{token}", _store_window, windows, shared)
    for (_, stop), future in zip(windows, futures, strict=True):
        digests, statistics = future.result()
        for name, values in digests.items():
            writer.digests[name] += values
        for split, part in statistics.items():
            writer.statistics[split] = joined(writer.statistics.get(split), part)
        job.progress("rows", stop, rows)
    writer.layout, writer.settled, writer.total = layout, True, rows
    job.seen = job.kept = rows
    writer.abandon()
    return True


def _starts_anywhere(source: Source, path: str) -> bool:
    """Whether a worker can start at its window without reading the rows before it."""
    if isinstance(source, TableSource):  # Parquet, by row groups: the only tables on disk with known row counts
        return Path(path).is_dir() or pq.read_metadata(path).num_row_groups > 1
    return path.rstrip("/").endswith((".npy", ".zarr", "-ubyte"))


Origin = tuple[str, FileOptions]
Window = tuple[int, int]


def _submit(client: Any, name: str, function: Any, windows: list[Window], shared: tuple[Any, ...]) -> list[Any]:
    return [
        client.submit(function, *shared, window, key=f"{name}-{i}", pure=False, retries=2)
        for i, window in enumerate(windows)
    ]


def _encoder(origin: Origin, schema: Schema, window: Window) -> Encoder:
    path, options = origin
    source = open_source(path, replace(options, window=window))
    return Encoder(source, schema, first_row=window[0])


def _find_classes(origin: Origin, schema: Schema, window: Window) -> list[Any]:
    encoder = _encoder(origin, replace(schema, columns=schema.columns[:1], missing="fill", weight=None), window)
    for _ in encoder.encoded():
        continue
    return list(encoder.codes)


def _store_window(
    origin: Origin, schema: Schema, address: str, layout: ChunkLayout, still_held: Check, window: Window
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    if window[1] - window[0] > layout.shard_rows:
        raise DataError(
            f"{address}: a task for rows {window[0]} to {window[1]} would share a shard of {layout.shard_rows} rows "
            "with another task; a task must write whole shards"
        )
    writer = ShardWriter(
        Place.of(address),
        len(schema.feature_names),
        np.dtype(schema.dtype),
        schema.target_dtype if schema.task != "none" else None,
        with_rows=False,
        layout=layout,
        first_row=window[0],
        stop_row=window[1],
        settled=True,
        with_weights=schema.weight is not None,
        still_held=still_held,
    )
    try:
        for block in _encoder(origin, schema, window).encoded():
            writer.add(block.X, block.y, None, block.weights)
        writer.finish()
    finally:
        writer.abandon()
    return writer.digests, writer.statistics
