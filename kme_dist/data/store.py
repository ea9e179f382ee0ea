"""Zarr v3 groups and arrays: the only module that imports zarr.

    create_array   a new array, chunked along its first axis, sharded, every chunk with a checksum
    save_arrays    a few arrays and JSON attributes as one group, published atomically
    load_arrays    reads them, with every digest checked
    foreign_array  a Zarr array of other software, checked against the same allow-list

The format is plain Zarr v3 that any Zarr library can read. Chunks of fill values are stored too, so a missing chunk
always means damage.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import LocalStore, ObjectStore

from kme_dist.data.chunks import (
    DTYPES,
    StoredArray,
    attributes_json,
    check_size,
    read_attributes,
    read_layout,
    write_attributes,
)
from kme_dist.data.leases import Check, writer_lease
from kme_dist.data.places import METADATA_KEY, Place, store_errors
from kme_dist.errors import ConfigError, CorruptError, DataError
from kme_dist.failpoints import passing

ARRAYS_FORMAT = "kme-dist/arrays"
ARRAYS_VERSION = 1
_BY_COLUMNS = "by_columns"
_ASIDE = ".aside.partial"  # ends the name of an older version that is being replaced
CHUNK_BYTES = 32 << 20  # for save_arrays; data sets choose their own


def zarr_store(place: Place, *, read_only: bool = False) -> Any:
    return (
        LocalStore(place.path, read_only=read_only)
        if place.is_local
        else ObjectStore(place.client(), read_only=read_only)
    )


def create_array(
    place: Place,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    chunk_rows: int,
    shard_rows: int | None = None,
    compressed: bool = False,
) -> Any:
    """A new, empty Zarr array; write it with `array[start:stop] = block`, grow it with `array.resize`."""
    row_shape = tuple(max(1, size) for size in shape[1:])
    codecs: list[Any] = [ZstdCodec(level=1, checksum=False)] if compressed else []
    with store_errors(place):
        return zarr.create_array(
            zarr_store(place.child(name)),  # by its name, zarr would write metadata of the group, which come last
            shape=shape,
            dtype=np.dtype(dtype),
            chunks=(chunk_rows, *row_shape) if shape else (),
            shards=(shard_rows, *row_shape) if shard_rows and shape else None,
            compressors=[*codecs, Crc32cCodec()],
            fill_value=0,
            config={"write_empty_chunks": True},
        )


def foreign_array(place: Place, name: str = "") -> Any:
    """A Zarr array of any layout on the allow-list, opened by zarr to read slices."""
    try:
        layout = read_layout(place, name)
    except FileNotFoundError:
        raise DataError(f"{place}/{name}: no Zarr array exists here.") from None
    stored = sum(size for key, size in place.sizes(name).items() if not key.endswith(METADATA_KEY))
    check_size(place, name, layout, stored)
    with store_errors(place):
        try:
            return zarr.open_array(zarr_store(place, read_only=True), path=name, mode="r", zarr_format=3)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # what zarr raises for damaged metadata
            seen = " ".join(str(error).split())[:200]
            raise CorruptError(f"{place}/{name}: its {METADATA_KEY} is not valid ({seen}); write it again.") from error


def publish(staging: Path, target: Path) -> None:
    """Rename a finished folder to its target atomically; an existing folder is exchanged, then removed."""
    if not target.exists():
        os.rename(staging, target)
        return
    if _exchange(staging, target):
        shutil.rmtree(staging, ignore_errors=True)
        return
    # A kill between the two leaves nothing under the name: `sweep` then puts the older version back.
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}{_ASIDE}")
    os.rename(target, aside)
    try:
        os.rename(staging, target)
    except BaseException:
        if not target.exists():
            os.rename(aside, target)
        raise
    os.rename(aside, staging)  # from here on it is litter
    shutil.rmtree(staging, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically, if the kernel can, so that a folder exists under the name at any time."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    at_fdcwd, exchange = -100, 2
    return bool(call(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), exchange) == 0)


def sweep(target: Path) -> None:
    """Put back the older version that a dead writer had renamed, then remove what dead writers left next to `target`.
    Call it with the lease held, before anything is looked up there."""
    left = [folder for folder in target.parent.glob(".*.partial") if is_staging(folder.name, target.name)]
    aside = [folder for folder in left if folder.name.endswith(_ASIDE)]
    if aside and not target.exists():
        os.rename(aside[0], target)
        left.remove(aside[0])
    for litter in left:
        shutil.rmtree(litter, ignore_errors=True)


def is_staging(name: str, target: str) -> bool:
    """Whether a folder of this name is one in which the target of that name is, or was, built."""
    return re.fullmatch(rf"\.{re.escape(target)}\.([0-9a-f]+|new)(\.scratch|\.aside)?\.partial", name) is not None


def check_replaceable(place: Place, format_name: str) -> bool:
    """True if `place` holds the same format, False if nothing exists there; an error for anything else."""
    if place.is_local and not place.path.exists():
        return False
    if place.is_local and place.path.is_dir() and not any(place.path.iterdir()):
        return True
    try:
        found = read_attributes(place).get("format")
    except FileNotFoundError:
        if not place.is_local:
            return False
        found = None
    except (DataError, CorruptError):
        found = None
    if found != format_name:
        raise ConfigError(
            f"{place}: the path exists and is not a {format_name} ({found or 'no kme-dist format'}); it is not "
            "overwritten. Choose another path or remove it."
        )
    return True


def save_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> None:
    """Write arrays and JSON attributes as one Zarr v3 group.

    Locally it is written to a temporary folder, synced and renamed, replacing an older group of the same format; in an
    object store the object that makes it readable is written last. Names may have one level ("part/0"). The format is
    `attributes["format"]`, by default "kme-dist/arrays".

    Arrays are stored in C order. The attributes record which of them were Fortran-ordered in memory, and `load_arrays`
    restores that: a matrix product rounds differently in either order, so a model gives the same bits after loading
    only if its arrays have the same memory order.
    """
    place = Place.of(path)
    for reserved in ("digests", "attributes_digest", "format_version", _BY_COLUMNS):
        if reserved in attributes:
            raise ConfigError(f"{place}: the attribute {reserved!r} is reserved for save_arrays; rename yours.")
    ready = {name: _storable(place, name, array) for name, array in arrays.items()}
    complete = {
        "format": ARRAYS_FORMAT,
        **attributes,
        "format_version": ARRAYS_VERSION,
        "digests": {name: hashlib.sha256(array.data).hexdigest() for name, array in ready.items()},
    }
    by_columns = [name for name, array in arrays.items() if _is_fortran_ordered(array)]
    if by_columns:
        complete[_BY_COLUMNS] = by_columns
    complete = sealed(place, complete)
    with store_errors(place), writer_lease(place, wait_s=30.0) as still_held:
        if place.is_local:
            sweep(place.path)
        replacing = check_replaceable(place, complete["format"])
        if not place.is_local:
            still_held()
            if replacing:
                place.delete(METADATA_KEY)
            place.delete_all()
            _write_group(place, ready, complete, still_held)
            passing("commit.after_arrays")
            return
        staging = Place.of(place.path.with_name(f".{place.name}.{uuid.uuid4().hex}.partial"))
        try:
            _write_group(staging, ready, complete, still_held)
            _sync_tree(staging.path)
            publish(staging.path, place.path)
            passing("commit.after_arrays", lambda: [place.path])
        finally:
            shutil.rmtree(staging.path, ignore_errors=True)


def attributes_digest(place: Place, attributes: Mapping[str, Any]) -> str:
    """SHA-256 of JSON attributes, since they contain learned parameters like the arrays do."""
    as_read_back = json.loads(attributes_json(place, attributes))
    return hashlib.sha256(json.dumps(as_read_back, sort_keys=True).encode()).hexdigest()


def sealed(place: Place, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with their digest added; `check_seal` verifies it."""
    return {**attributes, "attributes_digest": attributes_digest(place, attributes)}


def check_seal(place: Place, attributes: dict[str, Any], *, required: bool) -> None:
    """Remove the digest from the attributes and compare it; without `required` it may be missing."""
    expected = attributes.pop("attributes_digest", None)
    if (expected is not None or required) and attributes_digest(place, attributes) != expected:
        raise CorruptError(
            f"{place}: the attributes in {METADATA_KEY} do not match their digest; "
            "restore it from a copy or write it again."
        )


def check_name(place: Place, attributes: Mapping[str, Any]) -> None:
    """CorruptError if attributes without a format of ours have a digest, as ours do, and do not match it: then the name
    of the format was damaged. Those of somebody else pass."""
    if "attributes_digest" in attributes:
        check_seal(place, dict(attributes), required=True)


def _storable(place: Place, name: str, array: np.ndarray) -> np.ndarray:
    parts = name.split("/")
    if not 1 <= len(parts) <= 2 or not all(
        p and p not in (".", "..", "c", METADATA_KEY) and "\\" not in p for p in parts
    ):
        raise ConfigError(f"{place}: invalid array name {name!r}: use a word, or two joined by one '/'.")
    array = np.asarray(array)
    if array.dtype.name not in DTYPES:
        raise ConfigError(
            f"{place}: array {name!r} has type {array.dtype}; only numbers and booleans can be stored. "
            "Put texts in the attributes."
        )
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)


def _is_fortran_ordered(array: np.ndarray) -> bool:
    flags = np.asarray(array).flags
    return bool(flags.f_contiguous and not flags.c_contiguous)


def _write_group(
    place: Place, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any], still_held: Check
) -> None:
    for parent in {name.split("/")[0] for name in arrays if "/" in name}:
        write_attributes(place.child(parent), {})
    for name, array in arrays.items():
        still_held()
        row_bytes = max(1, math.prod(array.shape[1:]) * array.dtype.itemsize)
        rows = max(1, min(array.shape[0] if array.shape else 1, CHUNK_BYTES // row_bytes))
        target = create_array(place, name, array.shape, array.dtype, chunk_rows=rows)
        if array.size:
            target[...] = array
    passing("commit.before_arrays")
    still_held()
    write_attributes(place, attributes)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root, topdown=False):
        for entry in [*(os.path.join(folder, name) for name in names), folder]:
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def load_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and attributes that `save_arrays` wrote, in their original memory order. No code is executed; every
    digest is verified."""
    place = Place.of(path)
    try:
        attributes = read_attributes(place)
    except FileNotFoundError:
        raise DataError(f"{place}: nothing to load here (looked for {place}/{METADATA_KEY}).") from None
    found = attributes.get("format")
    if found == "kme-dist/dataset":
        raise DataError(f"{place}: this is a data set, not saved arrays; open it with open_dataset.")
    digests, version = attributes.get("digests"), attributes.get("format_version")
    if not isinstance(digests, dict) or not str(found or "").startswith("kme-dist/"):
        check_name(place, attributes)
        raise DataError(
            f"{place}: this Zarr group was not written by kme-dist (no format or digests in its attributes)."
        )
    if version != ARRAYS_VERSION:
        raise DataError(
            f"{place}: written in format version {version}; this kme-dist reads {ARRAYS_VERSION}. Update kme-dist."
        )
    check_seal(place, attributes, required=True)
    del attributes["digests"], attributes["format_version"]
    by_columns = attributes.pop(_BY_COLUMNS, [])  # not recorded in older groups: all in C order
    arrays: dict[str, np.ndarray] = {}
    for name, expected in digests.items():
        try:
            _storable(place, name, np.zeros(0))  # rejects a name that leads out of the group
        except ConfigError as error:
            raise CorruptError(str(error)) from None
        arrays[name] = _load_array(place, name)
        if hashlib.sha256(arrays[name].data).hexdigest() != expected:
            raise CorruptError(
                f"{place}: array {name!r} does not match its digest; restore it from a copy or write it again."
            )
        if isinstance(by_columns, list) and name in by_columns:
            arrays[name] = np.asfortranarray(arrays[name])
    return arrays, attributes


def _load_array(place: Place, name: str) -> np.ndarray:
    try:
        stored = StoredArray(place, name)
    except FileNotFoundError:
        raise CorruptError(f"{place}: array {name!r} is missing; restore it from a copy or write it again.") from None
    total = sum(size for key, size in place.sizes(name).items() if not key.endswith(METADATA_KEY))
    check_size(place, name, stored.layout, total)
    if not stored.layout.shape:
        return stored.chunk(0).copy()
    return stored.read(0, stored.layout.shape[0])
