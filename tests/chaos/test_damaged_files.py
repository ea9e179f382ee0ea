"""Files that a fault has changed: every reader notices, or gives what was stored."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
from small_job import NIGHTLY, ROWS

import kme_dist as kme
from kme_dist.data.store import load_arrays
from kme_dist.errors import KMEError

FLIPS = 300
QUERIES = np.random.default_rng(9).normal(size=(20, 4))


def read_data_set(path):
    found = kme.open_dataset(path)
    X, y = found.read()
    return X.tobytes(), y.tobytes(), [str(name) for name in found.classes], list(found.feature_names)


def read_model(path):
    return kme.load(path).predict_proba(QUERIES).tobytes()


def read_checkpoint(path):
    arrays, attributes = load_arrays(path)
    return {name: array.tobytes() for name, array in arrays.items()}, attributes


def read_predictions(path):
    found = kme.open_predictions(path)
    found.verify()
    return {name: found.read(name).tobytes() for name in found.names}, found.receipts(), found.status


READERS = {
    "data set": ("rows.zarr", read_data_set),
    "model": ("model/model.zarr", read_model),
    "checkpoint": ("model/checkpoints/*/*/step-0000000006.zarr", read_checkpoint),
    "predictions": ("scores.zarr", read_predictions),
}


@pytest.fixture(params=READERS)
def stored(request, quiet, tmp_path):
    """A copy of something stored, its reader, and what the reader gives."""
    pattern, read = READERS[request.param]
    (original,) = quiet.path.glob(pattern)
    copy = tmp_path / "copy.zarr"
    shutil.copytree(original, copy)
    return copy, read, read(copy)


def outcome(read, path, expected):
    try:
        return "same" if read(path) == expected else "silent"
    except KMEError:
        return "refused"


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.chaos(9)
def test_a_bit_that_flips_is_noticed_or_without_effect(stored):
    path, read, expected = stored
    dice, files, found = random.Random(11), files_of(path), []
    for turn in range(FLIPS):
        file = files[turn % len(files)]
        whole = file.read_bytes()
        if not whole:
            continue
        damaged = bytearray(whole)
        damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        found.append((outcome(read, path, expected), str(file.relative_to(path))))
        file.write_bytes(whole)
    kinds = [kind for kind, _ in found]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
    assert not [name for kind, name in found if kind == "silent"]
    assert kinds.count("refused") > FLIPS // 2


@pytest.mark.chaos(8, 10)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_a_file_that_is_not_whole_is_noticed_or_without_effect(stored, damage):
    path, read, expected = stored
    found = {}
    for file in files_of(path):
        whole = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(b"" if damage == "empty" else whole[: len(whole) // 2])
        found[str(file.relative_to(path))] = outcome(read, path, expected)
        file.write_bytes(whole)
    assert "silent" not in found.values(), found
    assert all(found[name] == "refused" for name in found if "/c/" in name), found


@pytest.mark.chaos(9)
@pytest.mark.parametrize("place", ["predict.after_chunk@3", "predict.after_publish@3"])
def test_a_chunk_that_is_damaged_while_a_job_runs_is_found_by_verify(folder, quiet, place):
    folder.take_over(quiet, "model")
    assert folder.run(*NIGHTLY, faults=f"{place}:corrupt") == 0, folder.output
    assert folder.happened(place)
    found = kme.open_predictions(folder.path / "scores.zarr")
    assert found.rows == ROWS
    with pytest.raises(KMEError, match="chunk 2"):
        found.verify()
