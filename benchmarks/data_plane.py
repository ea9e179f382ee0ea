"""The cost of the data layer, as ratios within one run on one machine.

    python benchmarks/data_plane.py [ingest memory batches prefetch] [--rows 1000000] [--folder DIR]

ingest     rows/s from CSV and Parquet, against pyarrow reading the file plus zarr writing the same array
memory     peak memory of an ingest process from 100 thousand to 10 million rows
batches    2000 rows of 2 million x 64 by each mode, against a bare zarr slice of the same layout
prefetch   time that a learning step waits for its data

The table is covtype where the shared data sets are present (KME_DATA, or ../shared/data), otherwise random numbers of
the same shape. Alternating runs, medians; the machine need not be idle, because other load affects both sides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from benchmarks.machine import figure
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import RowsRef

ROOT = Path(__file__).resolve().parents[1]


def covtype(rows: int) -> pa.Table:
    """Covtype, repeated or cut to `rows` rows."""
    path = Path(os.environ.get("KME_DATA", ROOT.parent / "shared" / "data")) / "covtype.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as stored:
            X, y = stored["X"], stored["y"]
    else:
        random = np.random.default_rng(0)
        X = np.concatenate(
            [random.integers(0, 4000, (100_000, 10)), random.integers(0, 2, (100_000, 44))], axis=1
        ).astype(np.float32)
        y = random.integers(0, 7, 100_000)
    index = np.arange(rows) % len(X)
    return pa.table({**{f"f{j}": X[index, j] for j in range(X.shape[1])}, "label": y[index]})


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bare_write(table: pa.Table, path: Path, layout: dict[str, int], compressed: bool) -> float:
    """Seconds for a plain zarr write of the array, which is prepared before the timing."""
    X = np.column_stack([table.column(j).to_numpy() for j in range(table.num_columns - 1)]).astype(np.float32)
    y = table.column(table.num_columns - 1).to_numpy()
    codecs = [ZstdCodec(level=1)] if compressed else []
    shutil.rmtree(path, ignore_errors=True)

    def write() -> None:
        group = zarr.open_group(path, mode="w")
        rows = {"chunks": layout["chunk_rows"], "shards": layout["shard_rows"]}
        for name, array in (("X", X), ("y", y)):
            cut = {key: (value, *array.shape[1:]) for key, value in rows.items()}
            target = group.create_array(
                name, shape=array.shape, dtype=array.dtype, compressors=[*codecs, Crc32cCodec()], **cut
            )
            target[...] = array

    return timed(write)


def ingest_rates(folder: Path, rows: int, repeats: int = 5) -> None:
    table = covtype(rows)
    pa.csv.write_csv(table, folder / "t.csv")
    pq.write_table(table, folder / "t.parquet")
    readers = {"csv": lambda: pa.csv.read_csv(folder / "t.csv"), "parquet": lambda: pq.read_table(folder / "t.parquet")}
    for kind, reader in readers.items():
        source, dest = folder / f"t.{kind}", folder / "d.zarr"
        ours, bare = [], []
        for _ in range(repeats):
            ours.append(timed(lambda: ingest(source, dest, label="label", overwrite=True)))  # noqa: B023
            a = open_dataset(dest).attributes
            layout = {"chunk_rows": a["chunk_rows"], "shard_rows": a["shard_rows"]}
            write = bare_write(table, folder / "bare.zarr", layout, a["compression"] == "zstd")
            bare.append(timed(reader) + write)
        mine, theirs = float(np.median(ours)), float(np.median(bare))
        for method, seconds in (("kme-dist", mine), ("pyarrow and bare Zarr", theirs)):
            figure("ingest of a million rows, seconds", method, kind, seconds)
        print(
            f"ingest {kind}: {rows / mine:,.0f} rows/s ({mine:.2f} s); pyarrow read + bare zarr write {theirs:.2f} s; "
            f"rate {theirs / mine:.0%} of it (target: at least 60 %)"
        )


CHILD = """
import re, sys
from kme_dist.data.ingest import ingest

def peak():  # of this program alone; getrusage would count the parent it was forked from
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

before = peak()
options = {"shuffle": 1} if sys.argv[3] == "shuffle" else {}
ingest(sys.argv[1], sys.argv[2], label="label", overwrite=True, **options)
print(before, peak())
"""


def peak_memory(folder: Path, rows: int) -> None:
    for kind in ("csv", "parquet", "shuffle"):
        for count in (rows // 10, rows, rows * 10):
            path = folder / ("m.csv" if kind == "csv" else "m.parquet")
            _write_repeated(path, count)
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(path), str(folder / "m.zarr"), kind],
                capture_output=True,
                text=True,
                check=True,
            )
            before, peak = map(int, done.stdout.split())
            figure("memory of ingest, MiB", kind, count, peak)
            print(f"memory {kind}: {count:,} rows: peak {peak} MiB, including {before} MiB for imports", flush=True)
            path.unlink()


def _write_repeated(path: Path, rows: int) -> None:
    part = covtype(min(rows, 200_000))
    if path.suffix == ".csv":
        with open(path, "wb") as file:
            pa.csv.write_csv(part, file)
            for start in range(part.num_rows, rows, part.num_rows):
                piece = part.slice(0, min(part.num_rows, rows - start))
                pa.csv.write_csv(piece, file, pa.csv.WriteOptions(include_header=False))
        return
    with pq.ParquetWriter(path, part.schema) as writer:
        for start in range(0, rows, part.num_rows):
            writer.write_table(part.slice(0, min(part.num_rows, rows - start)))


def _random_set(folder: Path, rows: int) -> Path:
    path = folder / "random.zarr"
    if not path.exists():
        random = np.random.default_rng(0)
        X = random.standard_normal((rows, 64), dtype=np.float32)
        ingest((X, random.integers(0, 10, rows)), path)
    return path


def batch_reads(folder: Path, rows: int, repeats: int = 150) -> None:
    path = _random_set(folder, rows)
    data = open_dataset(path, cache_bytes=0)  # every read decodes its chunks
    X = zarr.open_array(path / "X", mode="r")
    ref = RowsRef.of(data, split=None)
    plans = {mode: ref.plan(2000, mode=mode) for mode in ("contiguous", "blocks", "rows")}
    times: dict[str, list[float]] = {"bare": [], **{mode: [] for mode in plans}}
    for step in range(repeats):
        start, stop = plans["contiguous"].batch(step).spans[0]
        times["bare"].append(timed(lambda: X[start:stop]))  # noqa: B023
        for mode, plan in plans.items():
            if mode != "rows" or step < 5:
                times[mode].append(timed(lambda: ref.batch(plan, step)))  # noqa: B023
    bare = float(np.median(times["bare"]))
    print(f"batches: bare zarr slice of 2000 rows of X {1e3 * bare:.2f} ms; ours read X and y")
    for mode, wanted in (("contiguous", "1.3"), ("blocks", "6"), ("rows", "any")):
        mine = float(np.median(times[mode]))
        print(f"batches {mode}: {1e3 * mine:.2f} ms, {mine / bare:.2f} times the bare slice (target: at most {wanted})")


def prefetch_waits(folder: Path, rows: int, steps: int = 40) -> None:
    data = open_dataset(_random_set(folder, rows))
    for mode in ("contiguous", "blocks"):
        ref = RowsRef.of(data, split=None)
        with ref.batches(ref.plan(2000, mode=mode), range(steps)) as batches:
            next(batches)
            batches.waited_s, begin = 0.0, time.perf_counter()
            for batch in batches:
                squares = np.sum(batch.X**2, axis=1)
                gram = np.exp(-0.01 * (squares[:, None] + squares - 2 * batch.X @ batch.X.T))
                np.linalg.cholesky(gram + 0.1 * np.eye(len(gram), dtype=gram.dtype))
            total = time.perf_counter() - begin
        share = batches.waited_s / total
        step_ms = 1e3 * total / (steps - 1)
        print(f"prefetch {mode}: a step of {step_ms:.0f} ms waits {share:.2%} of its time for data (target: below 5 %)")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["ingest", "memory", "batches", "prefetch"])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the ingested table")
    parser.add_argument("--folder", help="working folder; default: a temporary folder")
    given = parser.parse_args(argv)
    folder = Path(given.folder or tempfile.mkdtemp(prefix="kme-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for section in given.sections:
            match section:
                case "ingest":
                    ingest_rates(folder, given.rows)
                case "memory":
                    peak_memory(folder, given.rows)
                case "batches":
                    batch_reads(folder, 2 * given.rows)
                case "prefetch":
                    prefetch_waits(folder, 2 * given.rows)
                case _:
                    parser.error(f"unknown section {section!r}")
    finally:
        if not given.folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
