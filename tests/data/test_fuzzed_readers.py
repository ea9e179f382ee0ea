"""Files of any content: every reader returns rows or raises an error of ours, runs nothing, and takes bounded memory.

A good file of each format is damaged by hypothesis: bytes changed, cut out, repeated, inserted, the end cut off, or
replaced as a whole. `make fuzz MINUTES=60` does so for an hour; the tests of every day for seconds.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import shutil
import struct
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import kme_dist as kme
from kme_dist.config import load_config
from kme_dist.data.append import append
from kme_dist.data.reading import read_table
from kme_dist.errors import KMEError

ROOM = 2 << 30  # bytes of addresses beyond those in use before
EXAMPLES = 25  # of each format in the tests of every day
CANARY = Path(os.environ.get("TMPDIR", "/tmp")) / f"kme-fuzz-{os.getpid()}"


class Payload:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (str(CANARY),)


CONFIG = {
    "data": {"source": "rows.csv", "label": "y", "missing": "mean", "decimal": ","},
    "model": {"kernel": {"name": "gaussian", "ard": True}, "objective": "rcb"},
    "learn": {"steps": 3, "batch_size": 10},
    "cluster": {"kind": "serial"},
}
TABLE = pa.table(
    {
        "size": [1.5, None, 3.25, -4.0] * 5,
        "count": pa.array([1, 2, 3, 2**40] * 5),
        "city": ["Rome", "Oslo", None, "Paris"] * 5,
        "day": pa.array(["2024-01-01", "2024-02-01", "2025-01-01", "2024-05-06"] * 5).cast(pa.date32()),
        "y": ["a", "b"] * 10,
    }
)
CSV = "size;count;city;day;y\n" + "".join(
    f"{a};{i};{city};2024-0{1 + i % 9}-11 10:00;{'ab'[i % 2]}\n"
    for i, (a, city) in enumerate([("1,5", "Rome"), ("", '"Oslo; ""N"""'), ("007", " Rome"), ("10%", "x\ty")] * 3)
)


def _npy(values) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def _npz(**arrays) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def _objects() -> bytes:
    """An npy file of Python objects, which would run code if it was loaded."""
    plain = _npy(np.zeros(2))
    return (
        plain[: plain.index(b"{")] + plain[plain.index(b"{") :].replace(b"'<f8'", b"'|O'  ") + pickle.dumps(Payload())
    )


def _parquet(**options) -> bytes:
    stream = io.BytesIO()
    pq.write_table(TABLE, stream, row_group_size=7, **options)
    return stream.getvalue()


MATRIX = np.arange(24.0).reshape(12, 2)
FILES = {  # the name of the file and its content
    "csv": [("t.csv", CSV.encode()), ("t.tsv", CSV.replace(";", "\t").encode())],
    "csv.gz": [("t.csv.gz", gzip.compress(CSV.encode()))],
    "libsvm": [("t.libsvm", b"1 1:0.5 7:2 # first\n-1 qid:3 2:1e3\n\n2 1:1700000001\n" * 4)],
    "idx": [("t-images-idx3-ubyte", struct.pack(">HBB3I", 0, 8, 3, 4, 2, 2) + bytes(range(16)))],
    "npy": [("t.npy", _npy(MATRIX)), ("t.npy", _npy(MATRIX.astype(np.int16).T)), ("t.npy", _objects())],
    "npz": [("t.npz", _npz(X=MATRIX, y=np.array(["u", "v"] * 6))), ("t.npz", _npz(X=np.asfortranarray(MATRIX)))],
    "parquet": [("t.parquet", _parquet()), ("t.parquet", _parquet(compression="zstd", write_page_checksum=True))],
}


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """A file with up to four wounds."""
    raw = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw)))
        end = min(len(raw), at + draw(st.integers(1, 16)))
        wound = draw(st.sampled_from(["change", "insert", "remove", "repeat", "cut", "number"]))
        if wound == "change":
            raw[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
        elif wound == "insert":
            raw[at:at] = draw(st.binary(max_size=16) | st.sampled_from(TOKENS))
        elif wound == "remove":
            del raw[at:end]
        elif wound == "repeat":
            raw[at:at] = raw[at:end] * draw(st.integers(1, 50))
        elif wound == "cut":
            del raw[at:]
        else:
            raw[at : at + 8] = draw(st.sampled_from(NUMBERS))
    return bytes(raw)


TOKENS = [b"\0", b'"', b"\n", b"\r", b";", b",", b"1e999", b"nan", b"inf", b"9" * 5000, b"-", b"\xff\xfe", b"\xc2\xb2"]
TOKENS += [b"!!python/object/apply:os.mkdir [x]", b"&a [*a]", b"{", b"}", b"[" * 200, b"1:", b"-1:1", b"99999999999:1"]
TOKENS += ["٣".encode(), b"0x10", b"1_0", b"\\", b"null", b"true", b'": {"', b"<M8[s]", b"|O", b"V9", b"(1, 2)", b"-1,"]
NUMBERS = [struct.pack(order + kind, value) for order in "<>" for kind, value in [("q", -1), ("q", 2**62), ("q", 0)]]
NUMBERS += [struct.pack("<II", 0x7FFFFFFF, 0xFFFFFFFF), struct.pack(">II", 0x7FFFFFFF, 0x10000)]


def survive(call, *arguments, **options) -> None:
    """A result or an error of ours; nothing was run."""
    with contextlib.suppress(KMEError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(*arguments, **options)
    assert not CANARY.exists(), "the file was executed"


def read_file(folder: Path, name: str, content: bytes, options: dict) -> None:
    (folder / name).write_bytes(content)
    survive(read_table, folder / name, **options)


def read_config(folder: Path, content: bytes) -> None:
    (folder / "c.yaml").write_bytes(content)
    survive(load_config, folder / "c.yaml")


def open_stored(folder: Path, path: str, content: bytes, kind: str) -> None:
    """A data set or model with one file replaced: opened, read, used."""
    shutil.rmtree(folder / "copy", ignore_errors=True)
    shutil.copytree(folder / kind, folder / "copy")
    (folder / "copy" / path).write_bytes(content)
    if kind == "model.zarr":
        survive(lambda: kme.load(folder / "copy").predict(MATRIX))
    elif kind == "foreign.zarr":
        survive(read_table, folder / "copy")
    else:
        survive(lambda: kme.open_dataset(folder / "copy").read())
        survive(read_table, folder / "copy")
        survive(append, folder / "copy", TABLE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import zarr

    place = tmp_path_factory.mktemp("fuzzed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kme.ingest(TABLE, place / "data.zarr", label="y", split="train=0.5,test=0.5")
        kme.MCEClassifier(steps=0).fit(MATRIX, np.arange(12) % 2).save(place / "model.zarr")
    group = zarr.open_group(place / "foreign.zarr", mode="w")
    group.create_array("X", data=MATRIX, chunks=(5, 2))
    group.create_array("y", data=np.arange(12) % 2, chunks=(5,))
    return place


@pytest.fixture(autouse=True)
def little_memory():
    """An allocation of gigabytes, as a wrong number in a header asks for, is a MemoryError: not one of our errors."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


READING = st.fixed_dictionaries(
    {},
    optional={
        "label": st.sampled_from(["y", "city", -1, 0]),
        "missing": st.sampled_from(["auto", "error", "drop", "mean", "median", "indicator", 0.0]),
        "header": st.booleans(),
        "decimal": st.just(","),
        "thousands": st.sampled_from([".", " ", "_"]),
        "percent": st.booleans(),
        "strip": st.booleans(),
        "categories": st.just((0,)),
        "weight": st.just(1),
        "task": st.sampled_from(["classification", "regression"]),
        "dtype": st.sampled_from(["float32", "uint8"]),
        "block_bytes": st.sampled_from([64, 1000]),
    },
)
STORED = [
    *(("data.zarr", name) for name in ("zarr.json", "X/zarr.json", "y/zarr.json", "X/c/0/0")),
    *(("model.zarr", name) for name in ("zarr.json",)),
    *(("foreign.zarr", name) for name in ("zarr.json", "X/zarr.json", "X/c/0/0")),
]


def wounded_json(draw, content: bytes) -> bytes:
    """JSON with one value replaced by another, so that it parses: the damage that no parser finds."""
    tree = json.loads(content)
    node = tree
    for _ in range(draw(st.integers(1, 6))):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        inner = node[key]
        if not isinstance(inner, dict | list) or draw(st.integers(0, 4)) == 0:
            node[key] = draw(
                st.sampled_from([None, -1, 0, 2**70, 1e300, "", "x", [], {}, [[]], True, "../../x", "|O", 7])
            )
            break
        node = inner
    return json.dumps(tree).encode()


def examples_of(kind: str, folder: Path):
    """A function of hypothesis' data that reads one damaged file of a kind."""
    if kind == "config":
        return lambda data: read_config(folder, data.draw(damaged(yaml.safe_dump(CONFIG).encode())))
    if kind in FILES:

        def read(data):
            name, content = data.draw(st.sampled_from(FILES[kind]))
            raw = data.draw(damaged(content))
            if kind == "csv.gz" and data.draw(st.booleans()):
                raw = gzip.compress(data.draw(damaged(CSV.encode())))
            read_file(folder, name, raw, data.draw(READING))

        return read
    place, name = kind.split(":")
    content = (folder / place / name).read_bytes()

    def open_it(data):
        plain = name.endswith(".json") and data.draw(st.booleans())
        raw = wounded_json(data.draw, content) if plain else data.draw(damaged(content))
        open_stored(folder, name, raw, place)

    return open_it


KINDS = ["config", *FILES, *(f"{place}:{name}" for place, name in STORED)]


def fuzz(kind: str, folder: Path, examples: int, start: int) -> None:
    read = examples_of(kind, folder)

    @seed(start)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    @given(st.data())
    def run(data):
        read(data)

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_our_words(kind, folder):
    fuzz(kind, folder, EXAMPLES, zlib.crc32(kind.encode()))


def test_a_file_of_python_objects_is_never_loaded(folder):
    (folder / "evil.npy").write_bytes(_objects())
    with pytest.raises(KMEError):
        read_table(folder / "evil.npy")
    (folder / "evil.yaml").write_text(f"data: !!python/object/apply:os.mkdir [{CANARY}]\n")
    with pytest.raises(KMEError):
        load_config(folder / "evil.yaml")
    assert not CANARY.exists()


@pytest.mark.slow
def test_for_minutes(folder):
    """`make fuzz MINUTES=60`; other examples in every run."""
    until = time.monotonic() + 60 * float(os.environ.get("KME_FUZZ_MINUTES", "1"))
    start = time.time_ns() % 2**32
    while time.monotonic() < until:
        for kind in KINDS:
            fuzz(kind, folder, 200, start)
            if time.monotonic() > until:
                break
        start += 1
