"""The record of predictions: what was computed from what, and a receipt for every finished chunk.

    state = read_state(place)            # None if nothing exists; an error for anything that is not predictions
    write_state(place, state, seen)      # in an object store only if nobody else has written it since
    write_receipt(place, receipt); read_receipts(place, job, epoch); gather_receipts(place, epoch, receipts)

Whoever replaces predictions begins a new epoch, a random name in the state. Receipts are kept by epoch, so one that a
stalled writer of replaced predictions leaves behind does not count. All these objects carry a digest of their content.

    zarr.json (or _predictions.json)    the state: model, data, outputs, status, epoch
    _receipts/EPOCH/00000000.json       one for each chunk finished since the last manifest
    _manifest.json                      the receipts of all chunks of a finished job

Format version 1 had no epochs, no digest of the state, and one digest for all arrays of a chunk. It is read, and
converted by the next job that writes there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kme_dist.data.chunks import read_attributes, write_attributes
from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.data.store import check_name, check_seal, sealed
from kme_dist.errors import ConfigError, CorruptError, DataError, RetryError

PREDICTIONS_FORMAT = "kme-dist/predictions"
PREDICTIONS_VERSION = 2
PARQUET_STATE = "_predictions.json"  # Parquet readers ignore names that start with an underscore
MANIFEST, RECEIPTS = "_manifest.json", "_receipts"
FINISHED = ("complete", "incomplete")  # the status of a job that has ended; else it is "running"
MOST_SHOWN = 20  # skipped rows of a chunk that are on record with their reasons; all of them are counted


@dataclass(frozen=True)
class RowSpan:
    """Consecutive rows of a chunk that were computed together."""

    rows: int
    input: str  # the identity of the input rows
    source_rows: int = 0  # the rows that the source had then; 0: not known
    samples: tuple[tuple[int, str], ...] = ()  # some of the rows, by their numbers, with a digest of their features


@dataclass(frozen=True)
class Receipt:
    """The record of a finished chunk: its input rows and its output."""

    job: str
    chunk: int
    epoch: str
    attempt: str  # names the objects until they are published; empty: they were written to their final names
    spans: tuple[RowSpan, ...]
    digests: dict[str, str]  # of the values of each array; of a Parquet file (or, in version 1, of all arrays) as ""
    bytes: int
    # Unknown categories: their number and the first of them, by column.
    unseen: dict[str, Any] = field(default_factory=dict)
    # Rows without a prediction, since their input or their output is not finite: all are counted, the first ones named.
    skipped: int = 0
    first_skipped: tuple[tuple[int, str], ...] = ()

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)


# --- the state -------------------------------------------------------------------------------------


def state_key(layout: str) -> str:
    return PARQUET_STATE if layout == "parquet" else METADATA_KEY


def read_state(place: Place, *, damaged_too: bool = False) -> dict[str, Any] | None:
    """The stored state of the predictions at `place`; None if nothing exists; an error for anything else. With
    `damaged_too` the state of predictions that are known to be such, but damaged, is empty."""
    try:
        return _read_state(place)
    except CorruptError:
        known = (MANIFEST, PARQUET_STATE, RECEIPTS)
        if damaged_too and any(key.startswith(known) for key in place.sizes()):
            return {}
        raise


def _read_state(place: Place) -> dict[str, Any] | None:
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
        if isinstance(attributes, dict):
            check_name(place, attributes)
        raise _not_predictions(place, str(attributes.get("format") if isinstance(attributes, dict) else "no format"))
    version = attributes.get("format_version")
    if version not in (1, PREDICTIONS_VERSION):
        raise DataError(
            f"{place}: predictions of format version {version}; this kme-dist reads versions 1 to "
            f"{PREDICTIONS_VERSION}. Update kme-dist."
        )
    try:
        check_seal(place, attributes, required=version > 1)
    except CorruptError:
        raise CorruptError(
            f"{place}: the record of the predictions does not match its digest; predict again with --from-scratch"
        ) from None
    return attributes


def _not_predictions(place: Place, found: str) -> ConfigError:
    return ConfigError(
        f"{place}: the path exists and does not hold predictions ({found}). Predictions that can be read again are a "
        "Zarr or Parquet folder written by `kme-dist predict`, not CSV. It is not overwritten: to write, choose "
        "another path or remove it."
    )


def state_version(place: Place, layout: str) -> str | None:
    """The version of the state in an object store, to be compared when it is replaced; None on a local disk."""
    return None if place.is_local else place.version(state_key(layout))


def write_state(place: Place, state: Mapping[str, Any], seen: str | None) -> str | None:
    """Replace the state, and return its new version; in an object store only if its version is still `seen`."""
    complete = sealed(place, {**state, "format": PREDICTIONS_FORMAT, "format_version": PREDICTIONS_VERSION})
    if place.is_local:
        if state["layout"] == "parquet":
            place.write(PARQUET_STATE, json.dumps(complete, indent=2).encode())
        else:
            write_attributes(place, complete)
        return None
    group = {"zarr_format": 3, "node_type": "group", "attributes": complete}
    body = json.dumps(complete if state["layout"] == "parquet" else group).encode()
    written = place.compare_and_write(state_key(state["layout"]), body, seen)
    if written is None:
        raise replaced(place)
    return written


def replaced(place: Place) -> RetryError:
    return RetryError(f"{place}: another job has replaced this one; nothing was written. Run this one again if needed.")


# --- receipts --------------------------------------------------------------------------------------


def write_receipt(place: Place, receipt: Receipt) -> None:
    body = json.dumps(sealed(place, asdict(receipt))).encode()
    place.write(_receipt_key(receipt.epoch, receipt.chunk), body, sync=False)


def read_receipt(place: Place, epoch: str, chunk: int) -> Receipt | None:
    """The receipt of one chunk, if it was written since the last manifest."""
    try:
        found = _parse(place, _receipt_key(epoch, chunk))
    except FileNotFoundError:
        return None
    return found[0] if found else None


def _receipt_key(epoch: str, chunk: int) -> str:
    return f"{RECEIPTS}/{epoch}/{chunk:08d}.json"


def read_receipts(place: Place, job: str, epoch: str, *, since: bool = True) -> dict[int, Receipt]:
    """The receipts of a job by chunk: those of the manifest, and with `since` the ones written after it, which count
    as long as the job has not ended."""
    found: list[Receipt] = []
    for key in [MANIFEST, *(sorted(place.sizes(RECEIPTS)) if since else ())]:
        if key.endswith(".json") and "/." not in key:
            try:
                found += _parse(place, key)
            except FileNotFoundError:
                continue
    # Receipts of version 1 have no epoch; they are removed with the predictions they belong to.
    kept = {receipt.chunk: receipt for receipt in found if receipt.job == job and receipt.epoch in (epoch, "")}
    return dict(sorted(kept.items()))


def gather_receipts(place: Place, epoch: str, receipts: Sequence[Receipt]) -> None:
    """Write one manifest with all receipts, then delete the single ones."""
    manifest = sealed(place, {"epoch": epoch, "chunks": [asdict(receipt) for receipt in receipts]})
    write_final(place, MANIFEST, [json.dumps(manifest).encode()], epoch)
    place.delete_below(RECEIPTS)


def check_epoch(place: Place, epoch: str) -> None:
    """RetryError if the predictions there are those of a later epoch."""
    state = read_state(place)
    if state is None or state.get("epoch") != epoch:
        raise replaced(place)


def write_final(place: Place, key: str, parts: list[Any], epoch: str, *, sync: bool = True) -> None:
    """Store an object under a name that does not carry the epoch, unless another epoch has begun.

    On a local disk only the holder of the writer's lock does this, and nobody can take that away. In an object store a
    writer may stall at any moment: the version is read before the epoch is checked, so an object of a later epoch has
    another version, and is not replaced.
    """
    if place.is_local:
        place.write(key, parts, sync=sync)
        return
    written = None
    while written is None:
        seen = place.version(key)
        check_epoch(place, epoch)
        written = place.compare_and_write(key, parts, seen)


def _parse(place: Place, key: str) -> list[Receipt]:
    """Receipts that are damaged are left out: their chunks are recomputed, and readers miss them."""
    try:
        known = json.loads(place.read(key))
        read = _receipt if "attributes_digest" in known else _from_version_1
        check_seal(place, known, required=False)
        return [read(entry) for entry in (known["chunks"] if key == MANIFEST else [known])]
    except (CorruptError, ValueError, KeyError, TypeError, AttributeError):
        return []


_NAMES = {part.name for part in fields(Receipt)}


def _receipt(entry: Mapping[str, Any]) -> Receipt:
    spans = tuple(
        RowSpan(**{**span, "samples": tuple((int(row), str(seen)) for row, seen in span["samples"])})
        for span in entry["spans"]
    )
    first = tuple((int(row), str(why)) for row, why in entry["first_skipped"])
    known = {name: value for name, value in entry.items() if name in _NAMES}
    return Receipt(**{**known, "spans": spans, "first_skipped": first})


def _from_version_1(entry: Mapping[str, Any]) -> Receipt:
    spans = (RowSpan(int(entry["rows"]), str(entry["input"])),)
    digests, unseen = {"": str(entry["digest"])}, dict(entry.get("unseen", {}))
    return Receipt(str(entry["job"]), int(entry["chunk"]), "", "", spans, digests, int(entry["bytes"]), unseen)
