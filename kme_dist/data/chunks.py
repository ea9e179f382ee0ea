"""Zarr arrays read by chunk, after their metadata passed an allow-list. Does not use a Zarr library.

    read_layout    the checked metadata of an array: format 3, numbers, known codecs, valid chunks
    StoredArray    an array of our layout, by rows: decoded here, so errors name the damaged chunk and calls are cheap

Stored data may come from anywhere, so an array is not trusted before `read_layout` has checked its metadata, and no
memory is allocated before `check_size` found enough stored bytes to account for it.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.errors import ConfigError, CorruptError, DataError

MAX_EXPANSION = 20_000  # about that of zstd for constant data; above it a decompression bomb
DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"] + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
CODECS = frozenset(["bytes", "crc32c", "zstd", "blosc", "gzip", "transpose", "sharding_indexed"])
_ABSENT = 2**64 - 1  # offset and length of a chunk missing from its shard


@dataclass(frozen=True)
class Layout:
    """The metadata of an array, checked against the allow-list."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    shard_rows: int  # equal to chunk_rows if the array is not sharded
    codecs: tuple[str, ...]  # of a chunk
    sharded: bool
    ours: bool  # cut along the first axis only, with codecs that StoredArray decodes
    compressed: bool

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_metadata(place: Place, name: str = "") -> dict[str, Any]:
    """The zarr.json of a node; FileNotFoundError if it does not exist."""
    where = f"{place}/{name}" if name else str(place)
    raw = place.read(f"{name}/{METADATA_KEY}" if name else METADATA_KEY)
    try:
        metadata = json.loads(raw)
    except ValueError as error:
        raise CorruptError(
            f"{where}: {METADATA_KEY} is not valid JSON ({error}); restore it or write it again."
        ) from error
    if not isinstance(metadata, dict) or metadata.get("zarr_format") != 3:
        _check_ours(where, metadata)
        seen = metadata.get("zarr_format") if isinstance(metadata, dict) else type(metadata).__name__
        raise DataError(f"{where}: expected Zarr format 3, found {seen!r}.")
    return metadata


def read_attributes(place: Place) -> dict[str, Any]:
    """The JSON attributes of a group; FileNotFoundError if it does not exist."""
    metadata = read_metadata(place)
    attributes = metadata.get("attributes", {})
    if metadata.get("node_type") != "group" or not isinstance(attributes, dict) or "attributes" not in metadata:
        _check_ours(str(place), metadata)
    if metadata.get("node_type") != "group" or not isinstance(attributes, dict):
        raise DataError(f"{place}: expected a Zarr group, found {metadata.get('node_type')!r}.")
    return attributes


def _check_ours(where: str, metadata: Any) -> None:
    """CorruptError if metadata that are not those of a group carry a digest as only ours do."""
    if '"attributes_digest"' in json.dumps(metadata):
        raise CorruptError(f"{where}: {METADATA_KEY} is damaged; restore it from a copy or write it again.")


def write_attributes(place: Place, attributes: Mapping[str, Any]) -> None:
    """Write a group's metadata in one object; before that nobody can open the group."""
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    place.write(METADATA_KEY, attributes_json(place, metadata).encode())


def attributes_json(place: Place, attributes: Mapping[str, Any]) -> str:
    """Attributes as JSON text; `place` is the prefix of error messages."""
    try:
        return json.dumps(attributes, default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: the attributes cannot be written as JSON ({error}).") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def read_layout(place: Place, name: str) -> Layout:
    """The checked metadata of one array; an error for anything outside the allow-list."""
    where = f"{place}/{name}" if name else str(place)
    metadata = read_metadata(place, name)
    try:
        if metadata["node_type"] != "array":
            raise DataError(f"{where}: expected an array, found a {metadata['node_type']}.")
        shape = tuple(_size(value) for value in metadata["shape"])
        data_type = metadata["data_type"]
        if not isinstance(data_type, str) or data_type not in DTYPES:
            raise DataError(f"{where}: data type {data_type!r} is not supported; only numbers and booleans are.")
        if metadata["chunk_grid"]["name"] != "regular" or metadata.get("storage_transformers"):
            raise DataError(f"{where}: only regular chunk grids without storage transformers are supported.")
        outer = tuple(_size(value) for value in metadata["chunk_grid"]["configuration"]["chunk_shape"])
        keys = metadata["chunk_key_encoding"]
        codecs = metadata["codecs"]
        plain_keys = keys["name"] == "default" and keys.get("configuration", {}).get("separator", "/") == "/"
        _check_codecs(where, codecs)
        inner, sharded = outer, False
        index_ours = True
        if codecs[0]["name"] == "sharding_indexed" and len(codecs) == 1:
            setting = codecs[0]["configuration"]
            _check_codecs(where, setting["index_codecs"])
            index_ours = setting.get("index_location", "end") == "end" and [
                codec["name"] for codec in setting["index_codecs"]
            ] == ["bytes", "crc32c"]
            inner, codecs, sharded = tuple(_size(v) for v in setting["chunk_shape"]), setting["codecs"], True
            _check_codecs(where, codecs)
        if len(outer) != len(shape) or len(inner) != len(shape) or 0 in inner or 0 in outer:
            raise DataError(
                f"{where}: chunks of shape {inner} in shards of {outer} do not match an array of shape {shape}."
            )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise CorruptError(f"{where}: {METADATA_KEY} is incomplete ({type(error).__name__}: {error}).") from error
    names = tuple(codec["name"] for codec in codecs)
    whole_rows = all(a >= b for a, b in zip(inner[1:], shape[1:], strict=True)) and inner[1:] == outer[1:]
    little = codecs[0].get("configuration", {}).get("endian", "little") == "little"
    exact_rows = all(a == max(b, 1) for a, b in zip(inner[1:], shape[1:], strict=True))
    ours = (
        plain_keys
        and whole_rows
        and exact_rows
        and little
        and index_ours
        and names in (("bytes",), ("bytes", "crc32c"), ("bytes", "zstd"), ("bytes", "zstd", "crc32c"))
        and (not shape or outer[0] % inner[0] == 0)
    )
    return Layout(
        shape,
        np.dtype(data_type),
        inner[0] if shape else 1,
        outer[0] if shape else 1,
        names,
        sharded,
        ours,
        bool({"zstd", "gzip", "blosc"} & set(names)),
    )


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is not a valid size")
    return value


def _check_codecs(where: str, codecs: Sequence[Mapping[str, Any]]) -> None:
    for codec in codecs:
        if codec["name"] not in CODECS:
            raise DataError(
                f"{where}: codec {codec['name']!r} is not supported; supported: {', '.join(sorted(CODECS))}."
            )


def check_size(place: Place, name: str, layout: Layout, stored_bytes: int) -> None:
    """Reject metadata that declare more than the stored bytes can hold, before memory is allocated."""
    limit = stored_bytes * (MAX_EXPANSION if layout.compressed else 1)
    chunk_bytes = layout.chunk_rows * math.prod(layout.row_shape) * layout.dtype.itemsize
    if layout.nbytes > limit or (layout.nbytes and chunk_bytes > limit):
        raise CorruptError(
            f"{place}/{name}: the metadata declare {layout.nbytes} bytes but {stored_bytes} are stored. "
            "The copy is incomplete or was tampered with; copy or write it again."
        )


class StoredArray:
    """An array of our layout, read by rows. Thread-safe; pickled as its address.

    Decoded chunks are cached up to `cache_bytes` (least recently used). `check`, if given, is called with every decoded
    chunk.
    """

    def __init__(
        self, place: Place, name: str, *, cache_bytes: int = 0, check: Callable[[int, np.ndarray], bool] | None = None
    ) -> None:
        self.place, self.name, self.cache_bytes, self.check = place, name, cache_bytes, check
        try:
            self.layout = read_layout(place, name)
        except DataError as error:  # never written by kme-dist: changed by other software
            raise CorruptError(f"{error} Restore it from a copy you trust.") from None
        if not self.layout.ours:
            raise CorruptError(
                f"{place}/{name}: not an array as kme-dist writes it, so its {METADATA_KEY} was damaged or edited; "
                "restore it from a copy or write it again."
            )
        self._indexes: OrderedDict[int, np.ndarray] = OrderedDict()
        self._chunks: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen_array, (self.place, self.name, self.cache_bytes, self.check))

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.layout.chunk_rows, *self.layout.row_shape) if self.layout.shape else ()

    def key(self, shard: int) -> str:
        """The key of the object that holds a shard (or a chunk, without shards)."""
        parts = [str(shard)] + ["0"] * (len(self.layout.shape) - 1) if self.layout.shape else []
        return "/".join([self.name, "c", *parts])

    def shard_count(self, rows: int) -> int:
        return -(-rows // self.layout.shard_rows) if self.layout.shape and 0 not in self.layout.row_shape else 0

    def damaged(self, chunk: int, what: str) -> CorruptError:
        rows = self.layout.chunk_rows
        shard = chunk * rows // self.layout.shard_rows
        return CorruptError(
            f"{self.place}: chunk {chunk} of {self.name} (rows {chunk * rows} to {(chunk + 1) * rows - 1}, "
            f"in {self.key(shard)}) {what}. Restore that object from a copy, or write the array again "
            "(a data set: `kme-dist ingest --overwrite`; predictions: `kme-dist predict --from-scratch`)."
        )

    def chunk(self, number: int) -> np.ndarray:
        """One decoded chunk (read-only), checksum verified. The last one may contain padding."""
        with self._lock:
            if (known := self._chunks.get(number)) is not None:
                self._chunks.move_to_end(number)
                return known
        try:
            decoded = self._decode(number, self._raw(number))
        except CorruptError:
            # An append may have rewritten the last shard since its index was read.
            with self._lock:
                stale = self._indexes.pop(number * self.layout.chunk_rows // self.layout.shard_rows, None)
            if stale is None:
                raise
            decoded = self._decode(number, self._raw(number))
        if self.check is not None and not self.check(number, decoded):
            raise self.damaged(number, "does not match its digest")
        if self.cache_bytes >= decoded.nbytes:
            with self._lock:
                self._chunks[number] = decoded
                while len(self._chunks) * decoded.nbytes > self.cache_bytes:
                    self._chunks.popitem(last=False)
        return decoded

    def _raw(self, number: int) -> bytes:
        per_shard = self.layout.shard_rows // self.layout.chunk_rows
        shard, within = divmod(number, per_shard)
        try:
            if not self.layout.sharded:
                return self.place.read(self.key(shard))
            offset, length = (int(v) for v in self._index(shard, number, per_shard)[within])
            if offset == _ABSENT:
                raise self.damaged(number, "is missing from its shard")
            raw = self.place.read(self.key(shard), offset, length)
        except FileNotFoundError:
            raise self.damaged(number, "is missing") from None
        if len(raw) != length:
            raise self.damaged(number, "is truncated")
        return raw

    def _index(self, shard: int, number: int, per_shard: int) -> np.ndarray:
        with self._lock:
            if (known := self._indexes.get(shard)) is not None:
                return known
        size = 16 * per_shard
        raw = self.place.read(self.key(shard), -(size + 4))
        if len(raw) != size + 4 or google_crc32c.value(raw[:size]) != int.from_bytes(raw[size:], "little"):
            raise self.damaged(number, "is in a shard that is truncated or has a damaged index")
        index = np.frombuffer(raw[:size], "<u8").reshape(per_shard, 2)
        with self._lock:
            self._indexes[shard] = index
            if len(self._indexes) > 4096:
                self._indexes.popitem(last=False)
        return index

    def _decode(self, number: int, raw: bytes) -> np.ndarray:
        view = np.frombuffer(raw, np.uint8)
        if self.layout.codecs[-1] == "crc32c":
            if len(raw) < 4 or google_crc32c.value(view[:-4]) != int.from_bytes(raw[-4:], "little"):
                raise self.damaged(number, "is damaged (its checksum does not match)")
            view = view[:-4]
        expected = math.prod(self.chunk_shape) * self.layout.dtype.itemsize
        if "zstd" in self.layout.codecs:
            try:
                view = np.frombuffer(pa.decompress(view, decompressed_size=expected, codec="zstd"), np.uint8)
            except (OSError, ValueError) as error:
                raise self.damaged(number, f"is damaged ({error})") from error
        if len(view) != expected:
            raise self.damaged(number, f"has {len(view)} bytes instead of {expected}")
        array = view.view(self.layout.dtype.newbyteorder("<")).reshape(self.chunk_shape)
        array.flags.writeable = False
        return array

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as a new array."""
        if not 0 <= start <= stop <= self.layout.shape[0]:
            raise DataError(
                f"{self.place}/{self.name}: rows {start} to {stop} are out of range; there are {self.layout.shape[0]}."
            )
        out = np.empty((stop - start, *self.layout.row_shape), self.layout.dtype)
        if not out.size:
            return out
        rows, at = self.layout.chunk_rows, start
        while at < stop:
            number, offset = divmod(at, rows)
            count = min(rows - offset, stop - at)
            out[at - start : at - start + count] = self.chunk(number)[offset : offset + count]
            at += count
        return out

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Exactly these rows, in this order. Decodes every chunk that contains one of them."""
        rows = np.asarray(rows, np.int64)
        out = np.empty((len(rows), *self.layout.row_shape), self.layout.dtype)
        if not out.size:
            return out
        if rows.min() < 0 or rows.max() >= self.layout.shape[0]:
            raise DataError(f"{self.place}/{self.name}: row numbers must be from 0 to {self.layout.shape[0] - 1}.")
        numbers = rows // self.layout.chunk_rows
        order = np.argsort(numbers, kind="stable")
        edges = np.flatnonzero(np.diff(numbers[order])) + 1
        for group in np.split(order, edges):
            number = int(numbers[group[0]])
            out[group] = self.chunk(number)[rows[group] - number * self.layout.chunk_rows]
        return out

    def missing_objects(self, rows: int) -> list[int]:
        """Missing shards among those of the first `rows` rows."""
        present = self.place.sizes(f"{self.name}/c")
        return [shard for shard in range(self.shard_count(rows)) if self.key(shard) not in present]


def _reopen_array(
    place: Place, name: str, cache_bytes: int, check: Callable[[int, np.ndarray], bool] | None
) -> StoredArray:
    return StoredArray(place, name, cache_bytes=cache_bytes, check=check)


def encode_shard(chunks: Sequence[np.ndarray], per_shard: int, *, compressed: bool) -> list[Any]:
    """The bytes of one shard, in parts: its chunks with their checksums, then the index."""
    parts: list[Any] = []
    index = np.full((per_shard, 2), _ABSENT, "<u8")
    offset = 0
    for i, chunk in enumerate(chunks):
        plain = np.ascontiguousarray(chunk, chunk.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        body = np.frombuffer(pa.compress(plain, codec="zstd"), np.uint8) if compressed else plain
        parts += [body.data, google_crc32c.value(body).to_bytes(4, "little")]
        index[i] = offset, len(body) + 4
        offset += len(body) + 4
    return [*parts, index.tobytes(), google_crc32c.value(index.tobytes()).to_bytes(4, "little")]
