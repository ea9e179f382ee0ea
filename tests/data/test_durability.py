"""Sudden ends: kill -9 at any moment, a full disk, a failing source. Never a data set that opens and is wrong."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from kme_dist.data import ingest as ingest_module
from kme_dist.data.append import append
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.errors import DataError, RetryError

OLD, NEW = 3000, 120_000


def make_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    X = np.arange(count * 10, dtype=np.float32).reshape(count, 10)
    return X, np.arange(count) % 5


def check_whole(path, allowed_rows: set[int]) -> int | None:
    """Nothing there (None), or a data set that is entirely right."""
    try:
        data = open_dataset(path)
    except DataError:
        return None
    assert data.rows in allowed_rows
    data.verify()
    X, y = data.read()
    rows = data.row.read(0, data.rows) if data.row is not None else np.arange(data.rows)
    source = rows % NEW if data.rows in (OLD, NEW) else np.where(rows < OLD, rows, rows - OLD)
    np.testing.assert_array_equal(X, make_rows(NEW)[0][source])
    np.testing.assert_array_equal(np.array(data.classes)[y], source % 5)
    return data.rows


CHILD = """
    import sys, numpy as np
    from kme_dist.data.ingest import ingest
    from kme_dist.data.append import append
    X, y = np.load(sys.argv[1]), np.load(sys.argv[2])
    print("ready", flush=True)
    small = {"chunk_bytes": "64KiB", "shard_bytes": "256KiB", "memory": 16 << 20}
    if sys.argv[4] == "append":
        append(sys.argv[3], (X, y), memory=16 << 20)
    else:
        ingest((X, y), sys.argv[3], overwrite=True, shuffle=3 if sys.argv[4] == "shuffle" else None, **small)
    print("done", flush=True)
"""


@pytest.mark.chaos(1)
@pytest.mark.slow
def test_kill_at_random_moments_twenty_times(tmp_path):
    X, y = make_rows(NEW)
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", y)
    dest = tmp_path / "d.zarr"
    dice = random.Random(7)
    outcomes = []
    longest = 0.5  # how long an undisturbed child takes, learned on the way
    for turn in range(20):
        way = ("plain", "shuffle", "append", "over old")[turn % 4]
        shutil.rmtree(dest, ignore_errors=True)
        if way in ("append", "over old"):
            ingest((X[:OLD], y[:OLD]), dest, chunk_bytes="64KiB", shard_bytes="256KiB")
        arguments = [str(tmp_path / "X.npy"), str(tmp_path / "y.npy"), str(dest), way]
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), *arguments], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline().strip() == "ready"
        begin = time.monotonic()
        time.sleep(dice.uniform(0, longest))
        child.send_signal(signal.SIGKILL)
        finished = "done" in child.stdout.read()
        child.wait()
        child.stdout.close()
        if finished:
            longest = min(longest, time.monotonic() - begin)
        allowed = {"append": {OLD, OLD + NEW}, "over old": {OLD, NEW}}.get(way, {NEW})
        found = check_whole(dest, allowed)
        if way in ("append", "over old"):
            assert found is not None, "what was there before must still be there"
        if finished:
            assert found == max(allowed)
        outcomes.append((way, found, finished))
    assert sum(not finished for _, _, finished in outcomes) >= 8, f"too few kills hit the work: {outcomes}"
    # The same command, run again, cleans up and completes.
    shutil.rmtree(dest, ignore_errors=True)
    ingest((X, y), dest)
    assert check_whole(dest, {NEW}) == NEW
    assert sorted(os.listdir(tmp_path)) == ["X.npy", "d.zarr", "y.npy"]


@contextlib.contextmanager
def file_size_limit(limit: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("options", [{}, {"shuffle": 1}])
def test_a_disk_that_takes_no_more_is_one_clear_line(tmp_path, options):
    X, y = make_rows(50_000)
    with file_size_limit(100_000), pytest.raises(RetryError, match="no space left") as caught:
        ingest((X, y), tmp_path / "d.zarr", compression="none", **options)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []
    ingest((X, y), tmp_path / "d.zarr", **options).verify()


@pytest.mark.chaos(11)
def test_a_full_disk_during_append_keeps_the_old_rows(tmp_path):
    X, y = make_rows(50_000)
    ingest((X[:OLD], y[:OLD]), tmp_path / "d.zarr", compression="none")
    with file_size_limit(200_000), pytest.raises(RetryError, match="no space left"):
        append(tmp_path / "d.zarr", (X, y))
    assert check_whole(tmp_path / "d.zarr", {OLD}) == OLD
    assert append(tmp_path / "d.zarr", (X, y)).rows == OLD + 50_000


@pytest.mark.chaos(11)
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        X, y = make_rows(NEW)
        for options in ({}, {"shuffle": 1}):
            with pytest.raises(RetryError, match="no space left"):
                ingest((X, y), disk / "d.zarr", compression="none", **options)
            assert os.listdir(disk) == []
        ingest((X[:1000], y[:1000]), disk / "d.zarr").verify()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.chaos(8)
def test_nothing_is_visible_before_the_last_step(tmp_path, monkeypatch):
    X, y = make_rows(10_000)

    def fail(*_):
        assert not (tmp_path / "d.zarr").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(ingest_module, "write_attributes", fail)
    with pytest.raises(KeyboardInterrupt):
        ingest((X, y), tmp_path / "d.zarr")
    assert os.listdir(tmp_path) == []


def test_a_failing_old_data_set_is_not_lost_to_a_failed_overwrite(tmp_path):
    X, y = make_rows(OLD)
    ingest((X, y), tmp_path / "d.zarr")
    bad = X.copy()
    bad[-1, 0] = np.nan
    with pytest.raises(DataError, match=f"row {OLD - 1}"):
        ingest((bad, y), tmp_path / "d.zarr", overwrite=True)
    assert check_whole(tmp_path / "d.zarr", {OLD}) == OLD


PEAK = """
    import re, sys
    from kme_dist.data.ingest import ingest
    ingest(sys.argv[1], sys.argv[2], memory="64MiB", overwrite=True)
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_peak_memory_does_not_grow_with_the_file(tmp_path):
    line = ",".join(f"0.{i}" for i in range(20)) + "\n"
    peaks = []
    for rows in (200_000, 4_000_000):  # 16 MB and 320 MB of float32
        with open(tmp_path / "t.csv", "w") as file:
            for _ in range(rows // 10_000):
                file.write(line * 10_000)
        arguments = [str(tmp_path / "t.csv"), str(tmp_path / "d.zarr")]
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PEAK), *arguments], capture_output=True, check=True
        )
        peaks.append(int(done.stdout) // 1024)
    assert peaks[1] < peaks[0] + 64, f"peaks in MiB: {peaks}"
