"""Predictions on disk: arrays aligned with the rows of the input, and a receipt for every finished chunk.

    found = open_predictions("scores.zarr")
    found.status, found.rows, found.quarantined      # "complete", 581012, []
    found.labels(0, 1000)                            # the classes themselves
    found.read("probability", 0, 1000)               # compared with the digest of the receipt
    found.verify()                                   # every chunk

A chunk is stored (one object for each array, or one Parquet file), then a receipt with its digests is written; only
then is it complete (see `kme_dist.data.receipts`). Quarantined chunks and skipped rows have no predictions: label -1,
NaN elsewhere (null in Parquet).

    label/ probability/ ...            the arrays (or part-00000000.parquet, ...)
    _chunks/EPOCH/00000000-ATTEMPT/    objects of a chunk until the driver publishes them, on local disks

Workers never write to the names that readers see: a worker that stalls and wakes up after its predictions were replaced
would overwrite the new ones. On a local disk it writes to names of its own, and the driver, who holds the writer's
lock, renames them; in an object store, where a driver can lose its lease, objects are replaced only if unchanged.

`label` and `top_label` are codes into `classes`, as in a data set.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from kme_dist.data.chunks import StoredArray, encode_shard, read_layout, read_metadata, write_attributes
from kme_dist.data.dataset import joined
from kme_dist.data.places import METADATA_KEY, Place, store_errors
from kme_dist.data.receipts import MOST_SHOWN, Receipt, read_receipts, read_state, write_final
from kme_dist.data.store import create_array
from kme_dist.errors import CorruptError, DataError, counted

PARTS = "_chunks"
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
        return np.full((rows, *self.row_shape), self.missing, self.dtype)

    @property
    def missing(self) -> Any:
        return np.nan if np.dtype(self.dtype).kind == "f" else NO_LABEL


@dataclass(frozen=True)
class OutputLayout:
    """Where and how chunks are stored; small, sent to every worker."""

    address: str
    format: str  # zarr, parquet
    chunk_rows: int
    fields: tuple[Field, ...]
    classes: tuple[Any, ...]
    epoch: str = ""

    @property
    def place(self) -> Place:
        return Place.of(self.address)

    def keys(self, chunk: int) -> list[str]:
        """The objects of a chunk, as readers see them."""
        if self.format == "parquet":
            return [f"part-{chunk:08d}.parquet"]
        return ["/".join([f.name, "c", str(chunk), *["0"] * len(f.row_shape)]) for f in self.fields]

    def files(self, chunk: int, attempt: str = "") -> list[Path]:
        """The files of an attempt that is not published, or the published ones; on a local disk."""
        keys = self._unpublished(chunk, attempt) if attempt else self.keys(chunk)
        return [self.place.path / key for key in keys]

    def _unpublished(self, chunk: int, attempt: str) -> list[str]:
        """Files side by side: a folder of its own would cost the driver more than their new names."""
        return [f"{PARTS}/{self.epoch}/{chunk:08d}-{attempt}.{number}" for number in range(len(self.keys(chunk)))]

    def write(
        self, chunk: int, arrays: Mapping[str, Any], before: Receipt | None = None
    ) -> tuple[str, dict[str, str], int]:
        """Store a chunk, after the rows of `before` if there are any; returns the name of the attempt, the digests and
        the bytes stored."""
        attempt = uuid.uuid4().hex[:12] if self.place.is_local else ""
        if self.format == "parquet":
            table = parquet_table(self.fields, self.classes, arrays)
            if before is not None:
                table = pa.concat_tables([self.read_table(chunk, before.digests[""]), table])
            body = _parquet_bytes(table)
            self._write_object(chunk, attempt, 0, [body])
            return attempt, {"": _digest(body)}, len(body)
        digests, stored = {}, 0
        for number, field in enumerate(self.fields):
            values = np.ascontiguousarray(arrays[field.name], field.dtype)
            if before is not None:
                values = joined([self.read_array(chunk, field, before), values])
            digests[field.name] = _digest(values.data)
            if len(values) < self.chunk_rows:
                padded = np.zeros((self.chunk_rows, *field.row_shape), field.dtype)
                padded[: len(values)] = values
                values = padded
            parts = encode_shard([values], 1, compressed=False)
            stored += sum(memoryview(part).nbytes for part in parts)
            self._write_object(chunk, attempt, number, parts)
        return attempt, digests, stored

    def _write_object(self, chunk: int, attempt: str, number: int, parts: list[Any]) -> None:
        if attempt:
            self.place.write(self._unpublished(chunk, attempt)[number], parts, sync=False)
        else:
            write_final(self.place, self.keys(chunk)[number], parts, self.epoch, sync=False)

    def publish(self, chunk: int, attempt: str) -> None:
        """Give the objects of a chunk the names that readers see. For the holder of the writer's lock."""
        if not attempt:
            return
        for own, key in zip(self._unpublished(chunk, attempt), self.keys(chunk), strict=True):
            self.place.move(own, key)  # without an effect where it has been done before

    def read_array(self, chunk: int, field: Field, receipt: Receipt) -> np.ndarray:
        """The rows of a receipt in one array of its chunk, verified."""
        first = chunk * self.chunk_rows
        try:
            values = StoredArray(self.place, field.name, cache_bytes=0).read(first, first + receipt.rows)
        except FileNotFoundError:
            raise CorruptError(f"{self.place}: the array {field.name!r} is missing; predict again.") from None
        if field.name in receipt.digests and _digest(values.data) != receipt.digests[field.name]:
            raise self.damaged(chunk)
        return values

    def read_table(self, chunk: int, digest: str | None) -> pa.Table:
        """The Parquet file of a chunk, compared with its digest (None: that of a quarantined chunk of version 1)."""
        key = self.keys(chunk)[0]
        try:
            body = self.place.read(key)
            if digest is not None and _digest(body) != digest:
                raise self.damaged(chunk)
            return pq.read_table(pa.BufferReader(body), page_checksum_verification=True)
        except CorruptError:
            raise
        except (FileNotFoundError, pa.ArrowInvalid, OSError) as error:
            raise CorruptError(f"{self.place}/{key}: missing or damaged ({error}); predict again.") from error

    def damaged(self, chunk: int) -> CorruptError:
        return CorruptError(
            f"{self.place}: chunk {chunk} (rows from {chunk * self.chunk_rows}) is missing or does not match its "
            "digest; run the same `kme-dist predict` with --from-scratch"
        )

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
            key = f"{field.name}/{METADATA_KEY}"
            try:
                fits = self.fits(field)
            except (FileNotFoundError, CorruptError, DataError):
                fits = False
            if not fits:  # nothing, or what is left of predictions that were being replaced
                place.delete(key)
                create_array(
                    place,
                    field.name,
                    (rows, *field.row_shape),
                    np.dtype(field.dtype),
                    chunk_rows=self.chunk_rows,
                    shard_rows=self.chunk_rows,
                )
                continue
            metadata = read_metadata(place, field.name)
            if metadata["shape"][0] != rows:
                metadata["shape"][0] = rows
                place.write(key, json.dumps(metadata).encode())

    def fits(self, field: Field, rows: int | None = None) -> bool:
        """Whether the metadata of an array are those of its field (and of that number of rows)."""
        found = read_layout(self.place, field.name)
        chunks = (found.chunk_rows, found.shard_rows, found.codecs)
        return (
            found.row_shape == field.row_shape
            and found.dtype == np.dtype(field.dtype)
            and chunks == (self.chunk_rows, self.chunk_rows, ("bytes", "crc32c"))
            and found.sharded
            and found.ours
            and rows in (None, found.shape[0])
        )


def _digest(values: Any) -> str:
    return hashlib.sha256(values).hexdigest()[:32]


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


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
            self.epoch = str(state.get("epoch", ""))
            fields = tuple(Field(f["name"], f["dtype"], tuple(f["row_shape"])) for f in state["fields"])
            self.layout = OutputLayout(
                place.address, state["layout"], int(state["chunk_rows"]), fields, tuple(state["classes"]), self.epoch
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
        if start == stop:
            return np.asarray(self._fields[name].empty(0))
        size = self.layout.chunk_rows
        for chunk in range(start // size, -(-stop // size)):
            self._recorded(chunk, min(size, stop - chunk * size))
        if self.layout.format == "parquet":
            return self._from_parquet(name, start, stop)
        return self._array(name).read(start, stop)

    def _array(self, name: str) -> StoredArray:
        if name not in self._arrays:
            field = self._fields[name]
            try:
                # A job that was interrupted may not have extended the arrays yet.
                if not self.layout.fits(field, None if self.status == "running" else self.rows):
                    raise CorruptError(f"{self.place}/{name}: {METADATA_KEY} does not match the record; predict again.")
                check = functools.partial(self._matches, name)
                self._arrays[name] = StoredArray(self.place, name, cache_bytes=0, check=check)
            except FileNotFoundError:
                raise CorruptError(f"{self.place}: the array {name!r} is missing; predict again.") from None
            except DataError as error:
                raise CorruptError(f"{str(error).rstrip('.')}: damaged or edited; predict again.") from None
        return self._arrays[name]

    def _matches(self, name: str, chunk: int, values: np.ndarray) -> bool:
        """Whether a decoded chunk of an array is the one that its receipt describes."""
        rows, digests = self._recorded(chunk)
        return name not in digests or _digest(np.ascontiguousarray(values[:rows]).data) == digests[name]

    def _recorded(self, chunk: int, needed: int = 0) -> tuple[int, Mapping[str, str]]:
        """The rows and the digests of a chunk on record; an error if its first `needed` rows are not finished."""
        found: tuple[int, Mapping[str, str]] = (-1, {})
        if (receipt := self._receipts.get(chunk)) is not None:
            found = receipt.rows, receipt.digests
        for entry in self.quarantined:
            if int(entry["chunk"]) == chunk:
                found = int(entry["rows"]), entry.get("digests", {})  # version 1 has none
        if found[0] >= needed:
            return found
        if self.status == "running":
            first = chunk * self.layout.chunk_rows + max(0, found[0])
            raise DataError(
                f"{self.place}: chunk {chunk} (rows from {first}) is not predicted yet; the job runs or was "
                "interrupted: resume it with the same `kme-dist predict`"
            )
        raise self.layout.damaged(chunk)

    @functools.cached_property
    def _receipts(self) -> dict[int, Receipt]:
        return read_receipts(self.place, self.job, self.epoch, since=self.status == "running")

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The predicted classes; None for rows without a prediction."""
        codes = self.read("label", start, stop)
        if (codes >= 0).all():
            return np.asarray(self.classes[codes])
        named = np.array([*self.layout.classes, None], dtype=object)
        return np.asarray(named[codes])

    def _from_parquet(self, name: str, start: int, stop: int) -> np.ndarray:
        size, field = self.layout.chunk_rows, self._fields[name]
        parts = []
        for chunk in range(start // size, -(-stop // size)):
            values = parquet_values(self.table(chunk), field, self.layout.classes)
            parts.append(values[max(0, start - chunk * size) : stop - chunk * size])
        return np.concatenate(parts) if parts else field.empty(0)

    def table(self, chunk: int) -> pa.Table:
        """The Parquet file of a chunk."""
        rows, digests = self._recorded(chunk)
        found = self.layout.read_table(chunk, digests.get(""))
        if found.num_rows != rows:
            raise self.layout.damaged(chunk)
        return found

    def receipts(self) -> dict[int, Receipt]:
        """The receipts of all finished chunks whose objects exist, in full length."""
        return finished_receipts(self.layout, self.job, since=self.status == "running")

    @property
    def skipped_rows(self) -> int:
        """The number of rows that were skipped because their input or their output is not finite."""
        return sum(receipt.skipped for receipt in self._receipts.values())

    @property
    def first_skipped(self) -> list[tuple[int, str]]:
        """Some of them, with the reasons."""
        return [entry for receipt in self._receipts.values() for entry in receipt.first_skipped][:MOST_SHOWN]

    def verify(self) -> None:
        """Read every finished chunk and compare it with its digest; CorruptError names the first that differs."""
        done = self.receipts()
        without = {int(entry["chunk"]) for entry in self.quarantined}
        for chunk in range(self.chunks):
            if chunk not in done and (chunk in without or self.status == "running"):
                continue
            if chunk not in done or not self._is_whole(chunk, done[chunk]):
                raise self.layout.damaged(chunk)

    def _is_whole(self, chunk: int, receipt: Receipt) -> bool:
        first = chunk * self.layout.chunk_rows
        if self.layout.format == "parquet":
            return bool(self.table(chunk).num_rows == receipt.rows)
        whole = hashlib.sha256()  # version 1 has one digest for all arrays
        for name in self._fields:
            whole.update(np.ascontiguousarray(self.read(name, first, first + receipt.rows)).data)
        return "" not in receipt.digests or whole.hexdigest()[:32] == receipt.digests[""]


def finished_receipts(layout: OutputLayout, job: str, *, since: bool) -> dict[int, Receipt]:
    """Every finished chunk of a job whose objects all exist, in full length; `since`: see `read_receipts`."""
    found, sizes = read_receipts(layout.place, job, layout.epoch, since=since), layout.place.sizes()
    return {chunk: receipt for chunk, receipt in found.items() if layout.stored_bytes(sizes, chunk) == receipt.bytes}


def open_predictions(path: str | Path | Place) -> Predictions:
    """Open the predictions at a local folder, or a file://, s3:// or gs:// address."""
    return Predictions(Place.of(path))


def join_as_csv(parts: Place, target: Place) -> None:
    """Write predictions stored as Parquet to one CSV file, with a column `row` if they have no ids; atomically."""
    found = open_predictions(parts)
    partial = target.sibling(f".{target.name}.partial").path
    named = {"row", "id"} & {field.name for field in found.layout.fields}
    header, first = True, 0
    with store_errors(target), _removed_after_error(partial), open(partial, "wb") as sink:
        for chunk in range(found.chunks):
            table = found.table(chunk)
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


@contextlib.contextmanager
def _removed_after_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


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
