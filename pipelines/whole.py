"""Whether what a run folder holds is whole: stored bytes are compared with their digests.

    check_stored(folder / "model.zarr", None)              # CorruptError if it is damaged
    check_stored(folder / "metrics.json", digest)          # files have their digest in run.json, under "files"
    verify_run(folder)                                     # everything: `kme-dist inspect RUN --verify`

A run checks the results that it reuses, and computes damaged ones again. It reads all of them but the rows of the data
set, whose chunks are compared whenever a stage reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import DATASET_FORMAT, open_dataset
from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.data.predictions import open_predictions
from kme_dist.data.receipts import PARQUET_STATE, PREDICTIONS_FORMAT
from kme_dist.data.seals import unseal
from kme_dist.data.store import load_arrays
from kme_dist.errors import CorruptError, KMEError

ADVICE = "the command that wrote it, `kme-dist run` or the stage, computes it again"
ADVICE_DATA = "remove it, then `kme-dist run` writes it again from data.source"
ADVICE_FRESH = "restore it from a copy, or compute the results again with --fresh"


def file_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_stored(path: Path, recorded: str | None, *, rows: bool = True) -> None:
    """CorruptError if a folder of ours, or a file whose digest is `recorded`, is damaged; `rows`: also read those of a
    data set. A file without a recorded digest is accepted: earlier versions recorded none."""
    if not path.is_dir():
        if recorded is not None and file_digest(path.read_bytes()) != recorded:
            raise CorruptError(f"{path} does not match its digest in run.json, so it was damaged or edited")
        return
    try:
        _check_folder(Place.of(path), rows)
    except CorruptError:
        raise
    except (KMEError, FileNotFoundError) as error:  # a name or a number of a record: in a run folder it was ours
        raise CorruptError(f"{path} is damaged ({error})") from None


def _check_folder(place: Place, rows: bool) -> None:
    found = None if place.exists(PARQUET_STATE) else read_attributes(place).get("format")
    if found == DATASET_FORMAT:
        data = open_dataset(place)
        if rows:
            data.verify()
    elif found in (None, PREDICTIONS_FORMAT):
        open_predictions(place).verify()
    else:
        load_arrays(place.address)


def verify_run(folder: Path, facts: Mapping[str, Any]) -> None:
    """Read every stored byte of a run folder, whose run.json is `facts`; CorruptError names what is damaged and says
    what to do."""
    files = facts.get("files", {})
    stages = facts.get("stages", {}).values()
    needed = {*files, *(name for stage in stages for name in stage.get("outputs", ()))}
    missing = sorted(name for name in needed if not (folder / name).exists())
    if missing and facts.get("status") == "succeeded":
        raise CorruptError(f"{folder / missing[0]} is missing; {ADVICE}")
    for name, digest in files.items():
        if (folder / name).is_file():
            _checked(folder / name, digest, ADVICE_FRESH if name.endswith(".yaml") else ADVICE)
    _check_lines(folder / "metrics.jsonl")
    for parent, folders, names in os.walk(folder):
        path = Path(parent)
        if METADATA_KEY in names or PARQUET_STATE in names:
            folders.clear()
            _checked(path, None, _advice(path.relative_to(folder)))
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _checked(path: Path, digest: str | None, advice: str) -> None:
    try:
        check_stored(path, digest)
    except CorruptError as error:
        raise CorruptError(f"{str(error).rstrip('.')}; {advice}") from None


def _advice(path: Path) -> str:
    match path.parts:
        case ("data.zarr",):
            return ADVICE_DATA
        case ("checkpoints", *_):
            return "remove it: learning resumes from the checkpoint before it"
        case ("previous", *_):
            return "it is of an earlier run: restore it from a copy, or remove it"
        case ("statistics.zarr",):
            return ADVICE_FRESH
    return ADVICE


def _check_lines(path: Path) -> None:
    """Every line of metrics.jsonl carries its digest; a kill may leave a part of the last one."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            whole = unseal(json.loads(line.decode())) is not None
        except ValueError:
            whole = False
        if not whole:
            raise CorruptError(f"{path}, line {number} is damaged; other lines are read, or learn again with --fresh")
