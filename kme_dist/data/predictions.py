"""Predictions on disk: arrays aligned with the rows of the input, and a receipt for every finished chunk.

    found = open_predictions("scores.zarr")
    found.status, found.rows, found.quarantined      # "complete", 581012, []
    found.labels(0, 1000)                            # the classes themselves
    found.read("probability", 0, 1000)
    found.verify()                                   # every chunk against its digest

A chunk is stored (one object for each array, or one Parquet file), then a receipt with its digest is written; only then
is it complete. When a job ends, its receipts are collected in one manifest. Quarantined chunks have no predictions:
label -1, NaN elsewhere (null in Parquet).

    zarr.json (or _predictions.json)   model, data, outputs and status
    label/ probability/ ...            the arrays (or part-00000000.parquet, ...)
    _receipts/00000000.json            one for each chunk finished since the last manifest
    _manifest.json                     the receipts of all chunks of a finished job

`label` and `top_label` are codes into `classes`, as in a data set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from kme_dist.data.chunks import StoredArray, encode_shard, read_attributes, read_metadata, write_attributes
from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.data.store import create_array
from kme_dist.errors import ConfigError, CorruptError, DataError, counted

PREDICTIONS_FORMAT = "kme-dist/predictions"
PREDICTIONS_VERSION = 1
PARQUET_STATE = "_predictions.json"  # Parquet readers ignore names that start with an underscore
MANIFEST, RECEIPTS = "_manifest.json", "_receipts"
NO_LABEL = -1


@dataclass(frozen=True)
class Field:
    """One array: a name (or two joined by "/"), a type, and the shape of a row."""

    name: str
    dtype: str
    row_shape: tuple[int, ...] = ()

    def empty(self, rows: int) -> Any:
        """The values of rows without a prediction."""
        if self.dtype == "text":  # ids; only in Parquet
            return pa.nulls(rows, pa.string())
        missing: Any = np.nan if np.dtype(self.dtype).kind == "f" else NO_LABEL
        return np.full((rows, *self.row_shape), missing, self.dtype)


@dataclass(frozen=True)
class Receipt:
    """The record of a finished chunk: its input rows and its output."""

    job: str
    chunk: int
    rows: int
    input: str
    digest: str
    bytes: int
    # Unknown categories: their number and the first of them, by column.
    unseen: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class OutputLayout:
    """Where and how chunks are stored; small, sent to every worker."""

    address: str
    format: str  # zarr, parquet
    chunk_rows: int
    fields: tuple[Field, ...]
    classes: tuple[Any, ...]

    @property
    def place(self) -> Place:
        return Place.of(self.address)

    def keys(self, chunk: int) -> list[str]:
        """The objects of a chunk."""
        if self.format == "parquet":
            return [f"part-{chunk:08d}.parquet"]
        return ["/".join([f.name, "c", str(chunk), *["0"] * len(f.row_shape)]) for f in self.fields]

    def write(self, chunk: int, arrays: Mapping[str, Any]) -> tuple[str, int]:
        """Store a chunk; returns its digest and the bytes stored."""
        place, stored = self.place, 0
        if self.format == "parquet":
            table = parquet_table(self.fields, self.classes, arrays)
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink, compression="zstd")
            body = sink.getvalue().to_pybytes()
            place.write(self.keys(chunk)[0], body, sync=False)
            return hashlib.sha256(body).hexdigest()[:32], len(body)
        sha = hashlib.sha256()
        for field, key in zip(self.fields, self.keys(chunk), strict=True):
            values = np.ascontiguousarray(arrays[field.name], field.dtype)
            sha.update(values.data)
            if len(values) < self.chunk_rows:
                padded = np.zeros((self.chunk_rows, *field.row_shape), field.dtype)
                padded[: len(values)] = values
                values = padded
            parts = encode_shard([values], 1, compressed=False)
            stored += sum(memoryview(part).nbytes for part in parts)
            place.write(key, parts, sync=False)
        return sha.hexdigest()[:32], stored

    def write_nothing(self, chunk: int, rows: int) -> None:
        """Store a quarantined chunk as missing values, for readers that ignore the receipts."""
        self.write(chunk, {field.name: field.empty(rows) for field in self.fields})

    def stored_bytes(self, sizes: Mapping[str, int], chunk: int) -> int:
        """Total bytes of a chunk's objects in `sizes`; -1 if one of them is missing."""
        found = [sizes.get(key, -1) for key in self.keys(chunk)]
        return -1 if min(found) < 0 else sum(found)

    def declare(self, rows: int) -> None:
        """Create (or extend) the metadata of the arrays."""
        place = self.place
        if self.format == "parquet":
            return
        for parent in {f.name.split("/")[0] for f in self.fields if "/" in f.name}:
            write_attributes(place.child(parent), {})
        for field in self.fields:
            try:
                metadata = read_metadata(place, field.name)
            except FileNotFoundError:
                create_array(
                    place,
                    field.name,
                    (rows, *field.row_shape),
                    np.dtype(field.dtype),
                    chunk_rows=self.chunk_rows,
                    shard_rows=self.chunk_rows,
                )
                continue
            if metadata["shape"][0] != rows:
                metadata["shape"][0] = rows
                place.write(f"{field.name}/{METADATA_KEY}", json.dumps(metadata).encode())


# --- the record ------------------------------------------------------------------------------------


def read_state(place: Place) -> dict[str, Any] | None:
    """The stored state of the predictions at `place`; None if nothing exists; an error for anything else."""
    try:
        attributes = read_attributes(place)
    except FileNotFoundError:
        try:
            attributes = json.loads(place.read(PARQUET_STATE))
        except FileNotFoundError:
            if place.is_local and place.path.exists() and (not place.path.is_dir() or any(place.path.iterdir())):
                raise _not_predictions(place, "no kme-dist format") from None
            return None
        except ValueError as error:
            raise CorruptError(
                f"{place}/{PARQUET_STATE} is not valid JSON ({error}); predict again with --from-scratch"
            ) from error
    if not isinstance(attributes, dict) or attributes.get("format") != PREDICTIONS_FORMAT:
        raise _not_predictions(place, str(attributes.get("format") if isinstance(attributes, dict) else "no format"))
    if attributes.get("format_version") != PREDICTIONS_VERSION:
        raise DataError(
            f"{place}: predictions of format version {attributes.get('format_version')}; this kme-dist reads "
            f"{PREDICTIONS_VERSION}. Update kme-dist."
        )
    return attributes


def _not_predictions(place: Place, found: str) -> ConfigError:
    return ConfigError(
        f"{place}: the path exists and does not hold predictions ({found}); it is not overwritten. Choose another path "
        "or remove it."
    )


def write_state(place: Place, state: Mapping[str, Any]) -> None:
    if state["layout"] == "parquet":
        place.write(PARQUET_STATE, json.dumps(dict(state), indent=2).encode())
    else:
        write_attributes(place, state)


def write_receipt(place: Place, receipt: Receipt) -> None:
    place.write(f"{RECEIPTS}/{receipt.chunk:08d}.json", json.dumps(asdict(receipt)).encode(), sync=False)


def read_receipt(place: Place, chunk: int) -> Receipt | None:
    """The receipt of one chunk, if it was written since the last manifest."""
    try:
        found = _parse(place, f"{RECEIPTS}/{chunk:08d}.json")
    except FileNotFoundError:
        return None
    return found[0] if found else None


def read_receipts(place: Place, job: str, sizes: Mapping[str, int], layout: OutputLayout) -> dict[int, Receipt]:
    """Every finished chunk of `job` whose objects all exist, in full length."""
    found: dict[int, Receipt] = {}
    if MANIFEST in sizes:
        for receipt in _parse(place, MANIFEST):
            found[receipt.chunk] = receipt
    for key in sizes:
        if key.startswith(f"{RECEIPTS}/") and key.endswith(".json") and "/." not in key:
            for receipt in _parse(place, key):
                found[receipt.chunk] = receipt
    return {
        chunk: receipt
        for chunk, receipt in sorted(found.items())
        if receipt.job == job and layout.stored_bytes(sizes, chunk) == receipt.bytes
    }


def _parse(place: Place, key: str) -> list[Receipt]:
    try:
        known = json.loads(place.read(key))
        entries = known["chunks"] if key == MANIFEST else [known]
        return [Receipt(**entry) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return []  # truncated by a power failure: the chunk is recomputed


def gather_receipts(place: Place, receipts: Sequence[Receipt], sizes: Mapping[str, int] | None = None) -> None:
    """Write one manifest with all receipts, then delete the single receipts."""
    place.write(MANIFEST, json.dumps({"chunks": [asdict(receipt) for receipt in receipts]}).encode())
    for key in place.sizes(RECEIPTS) if sizes is None else sizes:
        if key.startswith(f"{RECEIPTS}/"):
            place.delete(key)


# --- reading ---------------------------------------------------------------------------------------


class Predictions:
    """Open predictions; see the top of this module."""

    def __init__(self, place: Place) -> None:
        self.place = place
        state = read_state(place)
        if state is None:
            raise DataError(f"{place}: no predictions exist here; create them with `kme-dist predict`.")
        self.state = state
        try:
            self.rows, self.status, self.job = int(state["rows"]), str(state["status"]), str(state["job"])
            fields = tuple(Field(f["name"], f["dtype"], tuple(f["row_shape"])) for f in state["fields"])
            self.layout = OutputLayout(
                place.address, state["layout"], int(state["chunk_rows"]), fields, tuple(state["classes"])
            )
            self.quarantined: list[dict[str, Any]] = list(state["quarantined"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{place}: the record is incomplete ({error!r}); predict again.") from error
        self._fields = {field.name: field for field in fields}
        self._arrays: dict[str, StoredArray] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (Predictions, (self.place,))

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"Predictions({self.path!r}, {counted(self.rows, 'row')}, {', '.join(self._fields)}, {self.status})"

    @property
    def path(self) -> str:
        return self.place.address

    @property
    def names(self) -> list[str]:
        return list(self._fields)

    @property
    def classes(self) -> np.ndarray:
        return np.asarray(self.layout.classes)

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.layout.chunk_rows)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of one array; codes for labels."""
        stop = self.rows if stop is None else stop
        if name not in self._fields:
            raise DataError(f"{self.place} has no output {name!r}; its outputs: {self.names}.")
        if not 0 <= start <= stop <= self.rows:
            raise DataError(f"{self.place}: rows {start} to {stop} are out of range; there are {self.rows}.")
        if self.layout.format == "parquet":
            return self._from_parquet(name, start, stop)
        if name not in self._arrays:
            try:
                self._arrays[name] = StoredArray(self.place, name, cache_bytes=0)
            except FileNotFoundError:
                raise CorruptError(f"{self.place}: the array {name!r} is missing; predict again.") from None
        return self._arrays[name].read(start, stop)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The predicted classes; None for rows of quarantined chunks."""
        codes = self.read("label", start, stop)
        if (codes >= 0).all():
            return np.asarray(self.classes[codes])
        named = np.array([*self.layout.classes, None], dtype=object)
        return np.asarray(named[codes])

    def _from_parquet(self, name: str, start: int, stop: int) -> np.ndarray:
        size, field = self.layout.chunk_rows, self._fields[name]
        parts = []
        for chunk in range(start // size, -(-stop // size)):
            table = self._part(chunk)
            values = parquet_values(table, field, self.layout.classes)
            parts.append(values[max(0, start - chunk * size) : stop - chunk * size])
        return np.concatenate(parts) if parts else field.empty(0)

    def _part(self, chunk: int) -> pa.Table:
        key = self.layout.keys(chunk)[0]
        try:
            return pq.read_table(pa.BufferReader(self.place.read(key)))
        except (FileNotFoundError, pa.ArrowInvalid, OSError) as error:
            raise CorruptError(f"{self.place}/{key}: missing or damaged ({error}); predict again.") from error

    def receipts(self) -> dict[int, Receipt]:
        """The receipts of all finished chunks."""
        return read_receipts(self.place, self.job, self.place.sizes(), self.layout)

    def verify(self) -> None:
        """Read every finished chunk and compare it with its digest; CorruptError names the first that differs."""
        done = self.receipts()
        without = {int(entry["chunk"]) for entry in self.quarantined}
        for chunk in range(self.chunks):
            if chunk in done and self._digest(chunk, done[chunk].rows) == done[chunk].digest:
                continue
            if chunk in without or (chunk not in done and self.status == "running"):
                continue
            raise CorruptError(
                f"{self.place}: chunk {chunk} (rows from {chunk * self.layout.chunk_rows}) is missing or does not "
                "match its digest; run the same `kme-dist predict` with --from-scratch"
            )

    def _digest(self, chunk: int, rows: int) -> str:
        if self.layout.format == "parquet":
            return hashlib.sha256(self.place.read(self.layout.keys(chunk)[0])).hexdigest()[:32]
        sha, first = hashlib.sha256(), chunk * self.layout.chunk_rows
        for name in self._fields:
            sha.update(np.ascontiguousarray(self.read(name, first, first + rows)).data)
        return sha.hexdigest()[:32]


def open_predictions(path: str | Path | Place) -> Predictions:
    """Open the predictions at a local folder, or a file://, s3:// or gs:// address."""
    return Predictions(Place.of(path))


def join_as_csv(parts: Place, target: Place) -> None:
    """Write predictions stored as Parquet to one CSV file, with a column `row` if they have no ids; atomically."""
    found = open_predictions(parts)
    partial = target.sibling(f".{target.name}.partial").path
    named = {"row", "id"} & {field.name for field in found.layout.fields}
    header, first = True, 0
    with open(partial, "wb") as sink:
        for chunk in range(found.chunks):
            table = found._part(chunk)
            if not named:
                table = table.add_column(0, "row", pa.array(np.arange(first, first + table.num_rows)))
            write_csv(table, sink, header=header)
            header, first = False, first + table.num_rows
        if not found.chunks:
            names = [name for field in found.layout.fields for name, _ in _columns(field, found.layout.classes)]
            sink.write((",".join([*([] if named else ["row"]), *names]) + "\n").encode())
        sink.flush()
        os.fsync(sink.fileno())
    os.replace(partial, target.path)


def write_csv(table: pa.Table, sink: Any, *, header: bool) -> None:
    """Append the rows of a table to an open file; missing values are empty fields."""
    csv.write_csv(table, sink, csv.WriteOptions(include_header=header, quoting_style="needed"))


# --- Parquet ---------------------------------------------------------------------------------------


def _columns(field: Field, classes: Sequence[Any]) -> Iterator[tuple[str, int | None]]:
    """The Parquet columns of an array, with their positions in a row."""
    if not field.row_shape:
        yield field.name.replace("/", "_"), None
        return
    named = {"probability": classes, "decision": classes, "interval": ("low", "high")}.get(field.name)
    for i in range(field.row_shape[0]):
        yield f"{field.name.replace('/', '_')}_{i + 1 if named is None else named[i]}", i


def parquet_table(fields: Sequence[Field], classes: Sequence[Any], arrays: Mapping[str, Any]) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    named = pa.array(list(classes))
    for field in fields:
        values = arrays[field.name]
        for name, i in _columns(field, classes):
            if isinstance(values, pa.Array | pa.ChunkedArray):
                columns[name] = values
                continue
            column = np.ascontiguousarray(values if i is None else values[:, i])
            if field.name in ("label", "top_label"):
                columns[name] = named.take(pa.array(column, mask=column < 0))
            else:
                columns[name] = pa.array(column, from_pandas=True)
    return pa.table(columns)


def parquet_values(table: pa.Table, field: Field, classes: Sequence[Any]) -> np.ndarray:
    """The array of `field` from its Parquet columns."""
    found = []
    for name, _ in _columns(field, classes):
        column = table.column(name).combine_chunks()
        if field.name in ("label", "top_label"):
            codes = {value: i for i, value in enumerate(classes)}
            found.append(np.array([codes.get(value, NO_LABEL) for value in column.to_pylist()], field.dtype))
        else:
            found.append(column.to_numpy(zero_copy_only=False))
    return np.stack(found, axis=1) if field.row_shape else found[0]
