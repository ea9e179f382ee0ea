"""Append rows to an existing data set, e.g. in a nightly job.

New rows follow the old ones, with the same encoding; statistics are merged, digests kept, and splits get further row
ranges by the data set's own rule. The last shard, if it is not full, is rewritten with the new rows after the old ones.
Readers see nothing of this until the group's attributes are replaced, atomically, at the end: until then the old row
count is valid, and data beyond it is ignored. An append that fails can be run again.

So can one that was killed after that moment: the attributes also keep a digest of what was appended. The same rows of
the same source, directly after one another, are then appended once, unless it is said that they are meant twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.data.chunks import read_metadata, write_attributes
from kme_dist.data.dataset import Dataset, open_dataset, short_digest
from kme_dist.data.encode import Encoded, Encoder
from kme_dist.data.ingest import (
    DEFAULT_MEMORY,
    IngestPlan,
    Progress,
    parse_bytes,
    silent,
)
from kme_dist.data.leases import Check, writer_lease
from kme_dist.data.places import METADATA_KEY, Place, store_errors
from kme_dist.data.readers import MatrixSource, open_source
from kme_dist.data.reading import sort_options
from kme_dist.data.schema import announce
from kme_dist.data.splits import Split
from kme_dist.data.statistics import Statistics
from kme_dist.data.store import sealed, sweep
from kme_dist.data.writer import ChunkLayout, ShardWriter, padded_sum, split_entry, weight_entry
from kme_dist.errors import ConfigError, DataError, counted

_FIXED = (
    *("label", "weight", "features", "exclude", "task", "one_hot", "ordinal", "categories", "missing", "dtype"),
    *("class_names", "decimal", "thousands", "percent", "strip"),
)


def append(
    dest: str | Path,
    source: Any,
    *,
    split: str | None = None,
    again: bool = False,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress | None = None,
    **options: Any,
) -> Dataset:
    """Add the rows of `source` to the data set at `dest`.

    `split` puts all of them into one split; None applies the rule by which the data set was split. `options` are those
    of FileOptions; columns, label and encoding are those of the data set. A new category or class is an error that
    names its row. Afterwards the data set no longer counts as shuffled, because new rows follow the old ones.

    If the last append was that of the same rows of the same source into the same split, nothing is appended, which is
    said in a warning: it is taken for a repetition after an interruption. `again` appends them nevertheless.
    """
    place = Place.of(dest)
    for name in _FIXED:
        if name in options:
            raise ConfigError(f"{name} cannot be set when appending; it is fixed by the data set.")
    budget = parse_bytes(memory)
    options.setdefault("block_bytes", min(4 << 20, budget // 64))
    with store_errors(place), writer_lease(place) as still_held:
        if place.is_local:
            sweep(place.path)
        data = open_dataset(place)
        target = (
            data.label
            if isinstance(source, (str, Path)) and str(source).rstrip("/").endswith((".npz", ".zarr"))
            else None
        )
        files, _ = sort_options(source, {**options, "label": target})
        files = data.schema.file_options(files)
        opened = open_source(source, files)
        if isinstance(opened, MatrixSource):
            needed = 1 + max(data.schema.positions)
            if len(opened.feature_names) < needed:
                raise DataError(
                    f"{opened.name} has {len(opened.feature_names)} columns, the data set requires {needed}."
                )
            if data.schema.label is not None and data.schema.label_position is None and opened.target_dtype is None:
                raise DataError(f"{opened.name} has no labels, the data set has {data.schema.label!r}.")
        rule = data.attributes["split_rule"]
        division = Split.from_json(rule) if rule is not None and split is None else None
        if division is not None and division.ranges:
            raise ConfigError(f"{place} was split by row ranges; pass split=NAME for the new rows.")
        if split is not None and split not in data.splits:
            raise ConfigError(f"{place} has no split {split!r}; its splits: {', '.join(data.splits) or 'none'}.")
        extras = [] if division is None or division.extra_column is None else [division.extra_column]
        seed = data.shuffled if data.shuffled is not None else division.seed if division and division.by_rank else None
        rows = _RowsDigest()
        job = IngestPlan(
            opened,
            Encoder(opened, data.schema, extras, first_row=int(data.attributes["source"]["rows"])),
            data.schema,
            division,
            seed,
            budget,
            progress or silent,
            part=split or "all",
            watch=rows.add,
        )
        writer = _reopen_writer(data, still_held)
        with tempfile.TemporaryDirectory(prefix="kme-") as scratch:
            writer.begin(job.part)
            job.run(writer, Path(scratch))
        where = (
            os.path.abspath(opened.name)
            if isinstance(source, (str, Path)) and "://" not in opened.name
            else opened.name
        )
        found = short_digest([where, split, *rows.digests()])
        last = (data.attributes.get("appended") or [{}])[-1]
        if writer.total > data.rows and found == last.get("digest") and not again:
            announce(
                [
                    f"{opened.name}: its {counted(int(last['rows']), 'row')} were already appended to {place}, at "
                    f"{last['at']}; nothing was appended now; set `again` to true (--again) to have them twice"
                ]
            )
        elif writer.total > data.rows:
            for name in writer.digests:
                still_held()
                _grow(place, name, writer.total)
            still_held()
            write_attributes(place, sealed(place, _merged(data, writer, job, found)))
    return open_dataset(place)


class _RowsDigest:
    """Digests of encoded rows in the order of their source, whatever the blocks in which they come."""

    def __init__(self) -> None:
        self._parts = {name: hashlib.sha256() for name in ("X", "y", "weight")}

    def add(self, block: Encoded) -> None:
        for name, values in (("X", block.X), ("y", block.y), ("weight", block.weights)):
            if values is not None:
                self._parts[name].update(np.ascontiguousarray(values).data)

    def digests(self) -> list[str]:
        return [part.hexdigest() for part in self._parts.values()]


def _reopen_writer(data: Dataset, still_held: Check) -> ShardWriter:
    """A writer that continues in the last shard, after the rows already stored."""
    first = data.rows // data.shard_rows * data.shard_rows
    compressed = data.attributes["compression"] == "zstd"
    writer = ShardWriter(
        data.place,
        data.features,
        np.dtype(data.dtype),
        None if data.y is None else data.y.layout.dtype,
        data.row is not None,
        ChunkLayout(data.chunk_rows, data.shard_rows, compressed),
        first_row=first,
        settled=True,
        segments=[(None, first)],
        with_weights=data.has_weights,
        still_held=still_held,
    )
    if first < data.rows:
        X, y = data.read_rows(first, data.rows)
        row = None if data.row is None else data.row.read(first, data.rows)
        writer.add(X, y, row, data.read_weights(first, data.rows))
    return writer


def _grow(place: Place, name: str, rows: int) -> None:
    metadata = read_metadata(place, name)
    metadata["shape"][0] = rows
    place.write(f"{name}/{METADATA_KEY}", json.dumps(metadata).encode())


def _merged(data: Dataset, writer: ShardWriter, job: IngestPlan, digest: str) -> dict[str, Any]:
    """The old attributes, updated with the new rows and their digest."""
    new = dict(data.attributes)
    kept = writer.first_row // data.chunk_rows
    new["digests"] = {
        name: [*data.attributes["digests"][name][:kept], *found] for name, found in writer.digests.items()
    }
    new["digests"]["algorithm"] = data.attributes["digests"]["algorithm"]
    total, target = data.statistics, None
    if data.task == "regression":
        target = Statistics.from_json(data.attributes["target_statistics"], 1)
    counts = None if data.class_counts is None else np.array(data.class_counts)
    weights = np.array(data.attributes.get("weight_totals", np.zeros((0, 2))))
    splits = {name: dict(entry) for name, entry in data.attributes["splits"].items()}
    for name, span, (features, targets, found, own) in writer.measured():
        weights = padded_sum(weights, own)
        total = total + features
        target = target + targets if target is not None and targets is not None else target
        found = np.pad(found, (0, len(counts) - len(found))) if counts is not None else found
        counts = counts + found if counts is not None else None
        if name != "all":
            old = splits.get(name, split_entry([], Statistics.empty(data.features), 0 * found))
            merged = Statistics.from_json(old["statistics"], data.features) + features
            classes = None if counts is None else np.array(old["class_counts"], np.int64) + found
            own = padded_sum(np.array(old.get("weight_totals", np.zeros((0, 2)))), own)
            splits[name] = split_entry([*old["ranges"], span], merged, classes, own)
    source = data.attributes["source"]
    new.update(
        rows=writer.total,
        statistics=total.to_json(),
        target_statistics=None if target is None else target.to_json(),
        class_counts=None if counts is None else counts.tolist(),
        **weight_entry(weights),
        splits=splits,
        shuffled=None,
        source={
            **source,
            "rows": source["rows"] + job.seen,
            "dropped": source["dropped"] + job.seen - (writer.total - data.rows),
        },
        appended=[
            *data.attributes.get("appended", []),
            {
                "source": job.source.name,
                "rows": writer.total - data.rows,
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "digest": digest,
            },
        ],
    )
    return new
