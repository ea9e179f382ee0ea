"""A worker whose network is cut in the middle of a prediction and comes back later, in a namespace of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from distributed import Client

import kme_dist as kme
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.failpoints import VARIABLE

pytestmark = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(4000, 3))
LOST_S = 12  # without an answer for this long, Dask gives up a connection; it accepts no less than 11


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network():
    """The name of a namespace, the address of this side of its link, that of the other side, and the link."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (Debian: apt-get install iproute2)")
    number = os.getpid() % 60_000
    name, link = f"kme-{number}", f"kme{number}"
    ours, theirs = (f"198.18.{number // 250}.{number % 250 + end}" for end in (1, 2))
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", f"{link}b", "netns", name)
        ip("addr", "add", f"{ours}/32", "peer", theirs, "dev", link)
        ip("-n", name, "addr", "add", f"{theirs}/32", "peer", ours, "dev", f"{link}b")
        ip("link", "set", link, "up")
        for device in (f"{link}b", "lo"):
            ip("-n", name, "link", "set", device, "up")
        yield name, ours, theirs, link
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", link)
        ip("netns", "del", name)


@pytest.fixture
def start(tmp_path):
    """A function that starts a process of Dask, with failpoints, in a namespace or here; all end with the test."""
    started = []

    def begin(program, *words, faults="", prefix=()):
        timeouts = {f"DASK_DISTRIBUTED__COMM__TIMEOUTS__{name}": f"{LOST_S}s" for name in ("TCP", "CONNECT")}
        with open(tmp_path / f"output-{len(started)}.txt", "w") as output:
            started.append(
                subprocess.Popen(
                    [*prefix, sys.executable, "-m", f"distributed.cli.dask_{program}", "--no-dashboard", *words],
                    env={**os.environ, **timeouts, "OMP_NUM_THREADS": "1", VARIABLE: faults},
                    cwd=tmp_path,
                    stdout=output,
                    stderr=output,
                )
            )
        return started[-1]

    yield begin
    for process in reversed(started):
        process.kill()
        process.wait()


def wait_until(happened, seconds=120):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def predict(folder, name, executor=None):
    kme.predict(folder / "model.zarr", kme.open_dataset(folder / "rows.zarr"), folder / name, executor=executor)


def values(path):
    found = kme.open_predictions(path)
    found.verify()
    assert found.status == "complete"
    return {name: found.read(name).tobytes() for name in found.names}


@pytest.mark.chaos(18, 24)
@pytest.mark.parametrize("back", ["while the job runs", "after the job"])
def test_a_worker_that_was_cut_off_and_writes_late_does_not_show(tmp_path, network, start, back):
    name, ours, theirs, link = network
    ingest(X, tmp_path / "rows.zarr", chunk_bytes="4KiB", shard_bytes="8KiB")
    model = kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(3)), steps=0, regularization=1e-3)
    model.fit(X[:100], (X[:100, 0] > X[:100, 1]).astype(int)).save(tmp_path / "model.zarr")
    predict(tmp_path, "quiet.zarr")
    markers = tmp_path / "markers"
    markers.mkdir()
    start("scheduler", "--host", ours, "--port", "0", "--scheduler-file", "scheduler.json")
    wait_until((tmp_path / "scheduler.json").exists)
    address = json.loads((tmp_path / "scheduler.json").read_text())["address"]
    worker = ("worker", address, "--no-nanny", "--nthreads", "1", "--host")
    # The cut-off worker waits inside a chunk until its marker is removed; another marker tells that it then stored it.
    late = f"once={markers},predict.before_chunk@2:hang,predict.after_chunk@2:slow=0"
    lost = start(*worker, theirs, faults=late, prefix=("ip", "netns", "exec", name))
    start(*worker, ours, faults="predict.before_chunk:slow=0.5" if back == "while the job runs" else "")
    with Client(address) as client:
        client.wait_for_workers(2, timeout=120)
        job = threading.Thread(target=predict, args=(tmp_path, "cut.zarr", client))
        job.start()
        wait_until((markers / "predict.before_chunk").exists)
        ip("link", "set", link, "down")
        began = time.monotonic()
        wait_until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 1)
        print(f"the worker was given up {time.monotonic() - began:.1f} s after the cut", end=" ")
        if back == "after the job":
            job.join(timeout=200)
        assert job.is_alive() == (back == "while the job runs")
        (markers / "predict.before_chunk").unlink()
        wait_until((markers / "predict.after_chunk").exists)
        ip("link", "set", link, "up")
        job.join(timeout=200)
        assert not job.is_alive()
        assert lost.wait(timeout=200) == 0, "it does not join again by itself"
        print(f"and the job ended {time.monotonic() - began:.1f} s after it")
    assert values(tmp_path / "cut.zarr") == values(tmp_path / "quiet.zarr")
    before = kme.open_predictions(tmp_path / "cut.zarr").receipts()
    predict(tmp_path, "cut.zarr")
    assert kme.open_predictions(tmp_path / "cut.zarr").receipts() == before, "nothing is repeated"
