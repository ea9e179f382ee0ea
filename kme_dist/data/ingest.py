"""Ingest of any source into a data set, in bounded memory; and append.

    ingest("covtype.csv", "covtype.zarr", label="Cover_Type", shuffle=0, split="train=0.8,test=0.2")
    append("covtype.zarr", "today.csv")

`kme_dist.data.reading.read_table` reads and encodes in the same way, into memory.

Rows stream from the readers through the encoder to the writer. A shuffle or a split uses scratch files: rows are
distributed to buckets by the leading bits of their order key, then each bucket is sorted in memory and stored. This is
an exact global permutation at the cost of writing and reading the rows once more.

Nothing is visible before it is complete: locally the data set is built in a folder next to its destination and
renamed; in an object store the metadata that make it readable are written last. An interrupted ingest restarts.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.data.chunks import write_attributes
from kme_dist.data.dataset import DATASET_FORMAT, DATASET_VERSION, Dataset, open_dataset
from kme_dist.data.encode import Encoded, Encoder, MissingValueError, check_class_names, check_single
from kme_dist.data.leases import Check, writer_lease
from kme_dist.data.places import METADATA_KEY, Place, store_errors
from kme_dist.data.prefetch import Prefetched
from kme_dist.data.readers import FileOptions, MatrixSource, Source, open_source
from kme_dist.data.reading import Table, check_width, sort_options, table_source
from kme_dist.data.schema import Schema, TableOptions, announce, codes_read_as_numbers, few_targets_words, missing_words
from kme_dist.data.splits import Split, cut_points, order_keys
from kme_dist.data.statistics import Statistics
from kme_dist.data.store import check_replaceable, is_staging, publish, sealed, sweep
from kme_dist.data.survey import plan_schema, with_indicators
from kme_dist.data.writer import (
    CHUNK_BYTES,
    SHARD_BYTES,
    ChunkLayout,
    ShardWriter,
    Spool,
    declare_arrays,
    padded_sum,
    split_entry,
    weight_entry,
    write_shard,
)
from kme_dist.errors import ConfigError, DataError, KMEError
from kme_dist.failpoints import passing

Progress = Callable[[str, int, int | None], None]  # (stage, rows done, total rows if known)
DEFAULT_MEMORY = 512 << 20


def _schema_like(example: Dataset | Schema, source: Source, options: TableOptions) -> Schema:
    """The encoding of another data set, for rows that may have no labels."""
    schema = example if isinstance(example, Schema) else example.schema
    if options.label is not None or options.features is not None or options.weight is not None:
        path = "the model" if isinstance(example, Schema) else example.path
        raise ConfigError(f"like: label, weight and features are those of {path}; do not pass them.")
    if isinstance(source, MatrixSource):
        check_width(source, schema, options)
        labelled = source.target_dtype is not None or schema.label_position is not None
        weighted = schema.weight_position is not None
    else:
        labelled, weighted = schema.label in source.kinds, schema.weight in source.kinds
    schema = schema if weighted else replace(schema, weight=None, weight_position=None)
    return schema if labelled else replace(schema, label=None, label_kind="none", task="none", classes=None)


def parse_bytes(value: int | str) -> int:
    """A number of bytes, or a text such as "512MB" or "2GiB"."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not a size; use an integer number of bytes, or a text such as 512MB or 2GiB.")
    units = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    text = value.strip().upper()
    binary = text.endswith("IB")
    text = text.removesuffix("IB").removesuffix("B")
    unit = text[-1] if text and text[-1] in units else ""
    try:
        factor = units[unit] if not binary else 1024 ** ("KMGT".index(unit) + 1)
        return int(float(text.removesuffix(unit) if unit else text) * factor)
    except (ValueError, OverflowError):
        raise ConfigError(f"{value!r} is not a size; use e.g. 512MB or 2GiB.") from None


def positive_bytes(name: str, value: int | str) -> int:
    """The bytes of a setting; ConfigError if they are not at least one."""
    with contextlib.suppress(ConfigError):
        if (found := parse_bytes(value)) >= 1:
            return found
    raise ConfigError(
        f"{name}={value!r}: must be at least 1 byte, an integer or a text such as '512MB' or '2GiB', or None"
    )


def ingest(
    source: Any,
    dest: str | Path,
    *,
    label: str | int | None = None,
    weight: str | int | None = None,
    like: str | Path | Dataset | Schema | None = None,
    unseen: str = "error",
    shuffle: int | None = None,
    split: Any = None,
    split_key: str | int | None = None,
    split_column: str | int | None = None,
    stratify: bool = False,
    memory: int | str = DEFAULT_MEMORY,
    chunk_bytes: int | str = CHUNK_BYTES,
    shard_bytes: int | str = SHARD_BYTES,
    compression: str = "auto",
    overwrite: bool = False,
    scratch: str | Path | None = None,
    progress: Progress | None = None,
    client: Any = None,
    **options: Any,
) -> Dataset:
    """Create a data set from a file, a folder, or an object in memory.

    Parameters
    ----------
    source : path of csv/tsv (also .gz, .zst), Parquet (file or folder), npy, npz, LIBSVM, IDX or Zarr; an Arrow table,
        a pandas or Dask data frame, a NumPy or Dask array, a pair of arrays (X, y), or a `Table` of `read_table`
    dest : folder or s3://, gs:// address of the new data set
    label : column of the classes or targets, by name or position; None: no labels (npz, IDX and LIBSVM contain them)
    weight : column of the weights of rows, numbers >= 0, by name or position: weight 2 counts as the row twice, 0 as no
        row; it is not a feature
    like : a data set (or the schema of one) whose encoding is reused: columns, categories, fill values, classes; labels
        and weights may be absent
    unseen : with `like`, for a category that it does not have: "error", or "zeros", which counts them in the attributes
    shuffle : seed of a global random order, so that a batch is one contiguous read; None keeps the order
    split : "train=0.8,test=0.2", or row ranges "train=0:60000,test=60000:70000", or a mapping of the same; with
        `split_key` rows with equal keys stay together, with `stratify` class proportions are kept; `split_column` is a
        column that names the split of each row
    memory : bound on the bytes of rows held at a time, for sources of any size
    compression : "auto" (zstd where it halves the first chunk), "zstd" or "none"
    overwrite : replace an existing data set (never anything else)
    scratch : folder for the files of a shuffle or split; next to `dest` if None
    progress : called with (stage, rows done, total rows or None)
    client : a dask.distributed.Client; its workers then encode and store sources with known row counts
    options : fields of FileOptions (format, delimiter, header, encoding, ...) and TableOptions (features, exclude,
        task, one_hot, ordinal, missing, dtype, class_names, ...)
    """
    place = Place.of(dest)
    budget = parse_bytes(memory)
    if budget < 16 << 20:
        raise ConfigError(f"memory is {budget} bytes; it must be at least 16 MiB.")
    options.setdefault("block_bytes", min(4 << 20, budget // 64))
    files, table = sort_options(source, {**options, "label": label, "weight": weight})
    division = Split.of(split, key=split_key, column=split_column, stratify=stratify, seed=shuffle or 0)
    with store_errors(place), writer_lease(place) as still_held:
        if place.is_local:
            sweep(place.path)
        if check_replaceable(place, DATASET_FORMAT) and not overwrite and place.exists():
            raise ConfigError(
                f"{place}: a data set already exists; replace it with overwrite (--overwrite), or "
                "add rows with append (--append)."
            )
        if like is not None:
            like = like if isinstance(like, Dataset | Schema) else open_dataset(like)
            files = (like if isinstance(like, Schema) else like.schema).file_options(files)
        opened = table_source(source, files) if isinstance(source, Table) else open_source(source, files)
        extras = [] if division is None or division.extra_column is None else [division.extra_column]
        if like is None:
            schema = plan_schema(opened, table, reserved=extras)
            if isinstance(opened, MatrixSource) and table.weight is None:
                schema = replace(schema, weight=opened.weight)
        else:
            schema = _schema_like(like, opened, table)
        if division is not None and division.stratify and schema.task != "classification":
            raise ConfigError("stratify requires classes; this data set has none.")
        sizes = (parse_bytes(chunk_bytes), parse_bytes(shard_bytes), compression)

        def store(schema: Schema) -> None:
            job = IngestPlan(
                opened,
                Encoder(opened, schema, extras, table.max_classes, unseen=unseen),
                schema,
                division,
                shuffle if shuffle is not None or division is None or not division.by_rank else division.seed,
                budget,
                progress or silent,
                (str(source), files) if isinstance(source, (str, Path)) else None,
                encoding=_own_encoding(opened, schema) if like is None else None,
                asked_for_classes=table.task == "classification",
                positions=opened.positions if isinstance(opened, MatrixSource) else None,
            )
            with _staging(place, scratch, still_held) as (target, scratch_folder):
                writer = job.new_writer(target, job.layout(*sizes), still_held)
                alone = client is None or not job.encoder.refuse_unseen  # which counts them
                if alone or not _in_parallel(client, job, writer):
                    job.run(writer, scratch_folder)
                job.finish(writer, target, still_held)
            if table.task == "auto":
                few[:] = few_targets_words(opened.name, schema, job.encoder.few_targets, writer.total)

        few: list[str] = []
        try:
            store(schema)
        except MissingValueError:
            filled = None if like is not None else with_indicators(opened, table, extras)
            if filled is None:
                raise
            schema = filled
            store(schema)
        late = [*codes_read_as_numbers(opened, schema), *few] if like is None else []
        announce([*schema.notes, *late, *(missing_words(opened.name, schema) if table.missing == "auto" else [])])
    return open_dataset(place)


def _own_encoding(source: Source, schema: Schema) -> Schema | None:
    """The encoding of rows that are encoded already and stored as they are."""
    own = source.encoding if isinstance(source, MatrixSource) else None
    if own is None or (schema.feature_names, schema.task) != (own.feature_names, own.task):
        return None
    return own


def silent(stage: str, done: int, total: int | None) -> None:
    """Reports no progress."""


def _in_parallel(client: Any, job: IngestPlan, writer: ShardWriter) -> bool:
    """Ingest with the workers of a Dask cluster; False if the source does not allow it."""
    from kme_dist.data.cluster import write_in_parallel

    return write_in_parallel(client, job, writer)


class _staging:
    """Where a data set is built, and how it is published. Cleans up on failure.

    On a disk, and in an object store with an older data set to keep until the new one is complete, it is built next to
    its destination; in an object store with a free destination, in place, where its last object makes it readable.
    There a process that stalled may wake up when another has taken over: it touches nothing but its own staging area.
    """

    def __init__(self, place: Place, scratch: str | Path | None, still_held: Check) -> None:
        self.place, self.still_held = place, still_held
        self.beside = place.is_local or place.exists()
        token = uuid.uuid4().hex
        self.target = place.sibling(f".{place.name}.{token}.partial") if self.beside else place
        if place.is_local and scratch is None:
            self.scratch = place.path.with_name(f".{place.name}.{token}.scratch.partial")
        else:
            self.scratch = Path(tempfile.mkdtemp(prefix="kme-", dir=scratch))

    def __enter__(self) -> tuple[Place, Path]:
        if not self.place.is_local:
            self.still_held()
            self._sweep_store()
            self.target.delete_all()
        return self.target, self.scratch

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        try:
            if kind is None and self.place.is_local:
                publish(self.target.path, self.place.path)
            elif kind is None and self.beside:
                self.target.move_objects(self.place, METADATA_KEY, self.still_held)
        finally:
            if self.beside or (kind is not None and self._is_still_held()):
                self.target.delete_all()

    def _is_still_held(self) -> bool:
        """False also where the store does not answer: what is left has no metadata, and the next ingest removes it."""
        try:
            self.still_held()
        except KMEError:
            return False
        return True

    def _sweep_store(self) -> None:
        """Remove the staging areas of dead writers."""
        home = Place.of(self.place.sibling("").address)
        for name in home.folders():
            if is_staging(name, self.place.name):
                self.place.sibling(name).delete_all()


@dataclass
class IngestPlan:
    """One ingest, from source to writer."""

    source: Source
    encoder: Encoder
    schema: Schema
    division: Split | None
    seed: int | None
    memory: int
    progress: Progress
    origin: tuple[str, FileOptions] | None = None  # how a worker would open the source
    part: str = "all"  # the split of all rows, without a rule
    encoding: Schema | None = None  # of rows that are already encoded: their encoding
    asked_for_classes: bool = True  # the user said that labels are classes
    positions: Callable[[np.ndarray], np.ndarray] | None = None  # where rows were before they came in another order
    watch: Callable[[Encoded], None] = lambda block: None  # is given every block, in the order of the source
    seen: int = 0  # rows of the source
    kept: int = 0
    rejected: list[tuple[int, str]] = field(default_factory=list)  # rows to predict that cannot be used

    def layout(self, chunk_bytes: int, shard_bytes: int, compression: str) -> ChunkLayout:
        row_bytes = len(self.schema.feature_names) * np.dtype(self.schema.dtype).itemsize
        limit = min(shard_bytes, max(1 << 20, self.memory // 8))
        return ChunkLayout.choose(row_bytes, min(chunk_bytes, limit), limit, compression)

    @property
    def reorders(self) -> bool:
        return self.seed is not None or self.division is not None

    def new_writer(self, target: Place, layout: ChunkLayout, still_held: Check) -> ShardWriter:
        labelled = self.schema.task != "none"
        return ShardWriter(
            target,
            len(self.schema.feature_names),
            np.dtype(self.schema.dtype),
            self.schema.target_dtype if labelled else None,
            self.reorders or self.schema.missing == "drop",
            layout,
            with_weights=self.schema.weight is not None,
            still_held=still_held,
        )

    def run(self, writer: ShardWriter, scratch: Path) -> None:
        """Stream every row into the writer, through the scratch files if rows are reordered."""
        try:
            if self.reorders:
                self._through_spool(writer, scratch)
            else:
                for block in self.blocks("rows"):
                    rows = self._in_source(block.rows) if writer.with_rows else None
                    writer.add(block.X, block.y, rows, block.weights)
            writer.finish()
        finally:
            writer.abandon()

    def _in_source(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.positions is None else self.positions(rows)

    def blocks(self, stage: str) -> Iterator[Encoded]:
        with Prefetched(self.encoder.encoded) as ahead:
            for block in ahead:
                self.seen += block.seen
                self.kept += len(block.X)
                if block.rejected:
                    block = self._without_rejected(block)
                self.watch(block)
                self.progress(stage, self.seen, self.source.rows)
                yield block

    def _without_rejected(self, block: Encoded) -> Encoded:
        """Zeros in the place of rows to predict that cannot be used, and a note which these are, and why."""
        first, X = int(block.rows[0]), np.array(block.X)
        self.rejected += [(first + row, why) for row, why in sorted(block.rejected.items())]
        X[list(block.rejected)] = 0
        return replace(block, X=X.astype(self.schema.dtype))

    def _through_spool(self, writer: ShardWriter, scratch: Path) -> None:
        bits = Spool.FAN_OUT_BITS if self.seed is not None else 0
        target = writer.target_dtype or np.dtype(np.uint8)
        with Spool(scratch, writer.width, writer.dtype, target, writer.with_weights) as spool:
            parts, classes = self._deal(spool, bits)
            spool.close()
            by_rank = self.division is not None and self.division.by_rank
            chosen = self._by_rank(spool, bits, classes) if by_rank else self._by_part(spool, bits, parts)
            for name, records in chosen:
                if name != writer.segments[-1][0]:
                    writer.begin(name)
                y = records["y"] if writer.target_dtype is not None else None
                rows = self._in_source(records["row"])
                writer.add(records["X"], y, rows, records["weight"] if writer.with_weights else None)
                self.progress("storing", writer.total, self.kept)

    def _deal(self, spool: Spool, bits: int) -> tuple[list[str], np.ndarray]:
        """Write rows to the scratch file of their split and bucket; returns the splits and the rows of each class."""
        parts = [self.part] if self.division is None or self.division.by_rank else list(self.division.names)
        classes = np.zeros(0, np.int64)
        for block in self.blocks("reading"):
            records = np.empty(len(block.X), spool.record)
            records["X"], records["row"] = block.X, block.rows
            records["y"] = 0 if block.y is None else block.y
            if block.weights is not None:
                records["weight"] = block.weights
            bucket = np.zeros(len(records), np.int64)
            records["key"] = 0
            if self.seed is not None:
                records["key"] = order_keys(self.seed, block.rows)
                bucket = (records["key"] >> np.uint64(64 - bits)).astype(np.int64)
            if self.division is not None and not self.division.by_rank:
                extra = block.extras[self.encoder.extras[0]] if self.encoder.extras else None
                bucket += self.division.assign(block.rows, extra, parts, self.source.name) << bits
            elif self.division is not None and self.division.stratify and block.y is not None:
                counts = np.bincount(block.y, minlength=len(self.encoder.codes))
                classes = np.pad(classes, (0, len(counts) - len(classes))) + counts
            spool.add(bucket, [f"{i:06x}" for i in range(len(parts) << bits)], records)
        return parts, classes

    def _buckets(self, spool: Spool, bits: int, part: int) -> Iterator[np.ndarray]:
        for bucket in range(1 << bits):
            name = f"{(part << bits) + bucket:06x}"
            if bits:
                yield from spool.sorted(name, self.memory // 4, bits)
            else:
                yield from spool.read(name, max(1, self.memory // 16 // spool.record.itemsize))

    def _by_part(self, spool: Spool, bits: int, parts: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        order = sorted(range(len(parts)), key=lambda i: _usual_order(parts[i], i))
        for i in order:
            for records in self._buckets(spool, bits, i):
                yield parts[i], records

    def _by_rank(self, spool: Spool, bits: int, classes: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Cut the shuffled order at exact fractions; if stratified, at exact fractions of every class."""
        assert self.division is not None
        names = self.division.names
        if not self.division.stratify:
            cuts = cut_points(self.division.fractions, self.kept)
            at = 0
            for records in self._buckets(spool, bits, 0):
                for i, name in enumerate(names):
                    low, high = max(cuts[i] - at, 0), min(cuts[i + 1] - at, len(records))
                    if low < high:
                        yield name, records[low:high]
                at += len(records)
            return
        cuts_of = np.array([cut_points(self.division.fractions, int(n)) for n in classes]).reshape(-1, len(names) + 1)
        # One pass over the sorted buckets for each split; after the first they are stored sorted.
        shape, dtype = spool.record["X"].shape[0], spool.record["X"].base
        weighted = self.schema.weight is not None
        with Spool(spool.folder / "sorted", shape, dtype, spool.record["y"], weighted) as ordered:
            files: list[str] = []
            for records in self._buckets(spool, bits, 0):
                files.append(f"{len(files):08x}")
                ordered.add(np.zeros(len(records), np.int64), files[-1:], records)
                ordered.close()
            for i, name in enumerate(names):
                met = np.zeros(len(classes), np.int64)
                for file in files:
                    for records in ordered.read(file):
                        rank = _rank_in_class(records["y"], met)
                        mine = (rank >= cuts_of[records["y"], i]) & (rank < cuts_of[records["y"], i + 1])
                        yield name, records[mine]

    def finish(self, writer: ShardWriter, target: Place, still_held: Check) -> None:
        """Assign the final codes of classes, then write the metadata, that of the group last."""
        classes = None
        if self.schema.task == "classification":
            classes, places = self.encoder.sorted_classes()
            read_before = isinstance(self.source, MatrixSource) and self.source.class_names is not None
            if not self.encoder.fixed_classes and not read_before:
                check_class_names(self.source.name, self.schema, classes, asked=self.asked_for_classes)
            if not np.array_equal(places, np.arange(len(classes))):
                _recode(writer, target, places)
            _permute_counts(writer, places, len(classes))
        declare_arrays(target, writer, writer.total)
        attributes = dataset_attributes(self, writer, classes)
        check_single(self.source, self.schema, Statistics.from_json(attributes["statistics"], writer.width))
        passing("commit.before_data_set")
        still_held()
        write_attributes(target, sealed(target, attributes))


def _usual_order(name: str, position: int) -> tuple[int, int]:
    usual = ["train", "training", "validation", "valid", "val", "dev", "test"]
    return (usual.index(name) if name in usual else len(usual), position)


def _rank_in_class(labels: np.ndarray, met: np.ndarray) -> np.ndarray:
    """For each row the number of earlier rows of its class; updates the counts in `met`."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=len(met))
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - starts[labels[order]] + met[labels[order]]
    met += counts
    return rank


def _recode(writer: ShardWriter, target: Place, places: np.ndarray) -> None:
    """Replace label codes in order of first occurrence by codes in sorted order. y is small compared with X."""
    from kme_dist.data.chunks import StoredArray
    from kme_dist.data.store import create_array

    layout = writer.layout
    create_array(
        target,
        "y",
        (writer.total,),
        np.dtype(np.int64),
        chunk_rows=layout.chunk_rows,
        shard_rows=layout.shard_rows,
        compressed=bool(layout.compressed),
    )
    stored = StoredArray(target, "y")
    writer.digests["y"] = []
    for start in range(0, writer.total, layout.shard_rows):
        stop = min(writer.total, start + layout.shard_rows)
        buffer = np.zeros(layout.shard_rows, np.int64)
        buffer[: stop - start] = places[stored.read(start, stop)]
        writer.still_held()
        writer.digests["y"] += write_shard(target, "y", start // layout.shard_rows, buffer, stop - start, layout)
    target.delete(f"y/{METADATA_KEY}")


def _permute_counts(writer: ShardWriter, places: np.ndarray, count: int) -> None:
    for split, (features, target, *found) in writer.statistics.items():
        counts, weights = (np.zeros((count, *part.shape[1:]), part.dtype) for part in found)
        for ordered, part in zip((counts, weights), found, strict=True):
            ordered[places[: len(part)]] = part
        writer.statistics[split] = (features, target, counts, weights)


def dataset_attributes(job: IngestPlan, writer: ShardWriter, classes: Sequence[Any] | None) -> dict[str, Any]:
    """The attributes of a data set, as JSON."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        written_by = version("kme-dist")
    except PackageNotFoundError:
        written_by = "unknown"
    width = writer.width
    whole, target, counts = Statistics.empty(width), Statistics.empty(1), np.zeros(len(classes or ()), np.int64)
    weights = np.zeros((0, 2))
    splits = {}
    for name, span, (features, targets, found, own) in writer.measured():
        if features.count and not features.total:
            of = "" if name == "all" else f" in the split {name!r}"
            raise DataError(
                f"{job.source.name}: all weights {job.schema.weight!r}{of} are 0, so no row counts; at least one must "
                "be positive"
            )
        weights = padded_sum(weights, own)
        whole, target = whole + features, target if targets is None else target + targets
        if classes is not None:
            counts = counts + found
        if name != "all":
            found_classes = found if classes is not None else None
            splits[name] = split_entry([span], features, found_classes, own)
    schema = job.schema
    if schema.skips and not np.isfinite(whole.variance).all():  # of rows to predict; huge ones are no error
        whole = Statistics.empty(width)
    whole.check_squares(job.source.name, schema.feature_names, "leave the column out with `exclude`")
    return {
        "format": DATASET_FORMAT,
        "format_version": DATASET_VERSION,
        "rows": writer.total,
        "feature_names": schema.feature_names,
        "sample_shape": list(schema.sample_shape),
        "dtype": schema.dtype,
        "task": schema.task,
        "classes": classes,
        "class_counts": None if classes is None else counts.tolist(),
        **weight_entry(weights if writer.with_weights else None),
        "schema": (job.encoding or schema).to_json(),
        "statistics": whole.to_json(),
        "target_statistics": target.to_json() if schema.task == "regression" else None,
        "splits": splits,
        "split_rule": None if job.division is None else job.division.to_json(),
        "shuffled": job.seed,
        "chunk_rows": writer.layout.chunk_rows,
        "shard_rows": writer.layout.shard_rows,
        "compression": "zstd" if writer.layout.compressed else "none",
        "digests": {"algorithm": "sha256/128", **writer.digests},
        "source": {"name": job.source.name, "rows": job.seen, "dropped": job.seen - writer.total, **_unusual(job)},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "written_by": f"kme-dist {written_by}",
    }


def _unusual(job: IngestPlan) -> dict[str, Any]:
    """Categories that the encoding did not have: their number and the first one, by column; rows that were rejected."""
    found = {"unseen": {name: list(entry) for name, entry in job.encoder.unseen.items()}, "rejected": job.rejected}
    return {name: entries for name, entries in found.items() if entries}
