"""SIGKILL of workers and of the driver at random times: the output is that of a quiet run, and little is done twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from distributed import Client, LocalCluster

import kme_dist as kme
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest

COUNTING = """
import os, time
from kme_dist.models import predict as inference

real, once = inference.compute_chunk, inference.predict_chunk

def compute_chunk(plan, task, *rest):
    with open(os.environ["KILLS_LOG"], "a") as log:
        log.write(f"{task.chunk}\\n")
    time.sleep(float(os.environ["KILLS_SLEEP"]))
    return real(plan, task, *rest)

def predict_chunk(*arguments):
    inference.compute_chunk = compute_chunk
    return once(*arguments)
"""

DRIVER = """
import sys
import counting
import kme_dist as kme
from distributed import Client
from kme_dist.models import predict as inference

model, data, out, address = sys.argv[1:]
inference.predict_chunk = counting.predict_chunk
with Client(address, set_as_default=False) as client:
    kme.predict(model, data, out, executor=client)
"""


class Job:
    """A driver in a process of its own, and two workers that a nanny starts again."""

    def __init__(self, folder, model, data, client):
        self.client, self.log = client, folder / "computed.txt"
        address = client.scheduler.address
        self.command = [sys.executable, str(folder / "driver.py"), model, data, str(folder / "out.zarr"), address]
        self.start()

    def start(self):
        with open(self.log.with_name("stderr.txt"), "w") as errors:
            self.process = subprocess.Popen(self.command, stderr=errors)

    def computed(self):
        return [int(line) for line in self.log.read_text().split()]

    def wait_for_progress(self, more, seconds=200):
        """Until so many more chunks were begun, or the driver has ended."""
        goal, deadline = len(self.computed()) + more, time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None and len(self.computed()) < goal:
            time.sleep(0.02)

    def kill_worker(self, rng):
        pids = sorted(self.client.run(os.getpid, on_error="ignore").values())
        if pids:
            os.kill(rng.choice(pids), signal.SIGKILL)
        return bool(pids)

    def kill_driver(self):
        self.process.kill()
        self.process.wait()


def disturb(folder, monkeypatch, *, chunks, kills, sleep):
    X = np.random.default_rng(0).normal(size=(1024 * chunks - 300, 2)).astype(np.float32)
    data = ingest(X, folder / "rows.zarr", chunk_bytes=1024 * 8, shard_bytes=1024 * 8 * 8)
    model = kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(2)), steps=0, regularization=1e-3)
    model.fit(X[:100], np.arange(100) % 2)
    model.save(folder / "model.zarr")
    (folder / "counting.py").write_text(COUNTING)
    (folder / "driver.py").write_text(DRIVER)
    (folder / "computed.txt").touch()
    monkeypatch.syspath_prepend(folder)
    for name, value in {"PYTHONPATH": folder, "KILLS_LOG": folder / "computed.txt", "KILLS_SLEEP": sleep}.items():
        monkeypatch.setenv(name, str(value))
    rng, killed = random.Random(7), Counter()
    settings = {"distributed.scheduler.allowed-failures": 20}
    import dask

    with (
        dask.config.set(settings),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        job = Job(folder, str(folder / "model.zarr"), data.path, client)
        while sum(killed.values()) < kills:
            job.wait_for_progress(rng.randint(1, 4))
            if job.process.poll() is not None:
                break
            time.sleep(rng.random() * sleep)
            if rng.random() < 0.5 and job.kill_worker(rng):
                killed["worker"] += 1
            else:
                job.kill_driver()
                killed["driver"] += 1
                job.start()
        assert job.process.wait(timeout=300) == 0, (folder / "stderr.txt").read_text()
        assert sum(killed.values()) == kills, f"the job was over after {killed}"
    kme.predict(folder / "model.zarr", data, folder / "quiet.zarr")
    found, quiet = kme.open_predictions(folder / "out.zarr"), kme.open_predictions(folder / "quiet.zarr")
    assert found.status == "complete"
    for name in quiet.names:
        np.testing.assert_array_equal(found.read(name), quiet.read(name))
    found.verify()
    times = Counter(job.computed())
    assert set(times) == set(range(chunks))
    # A worker that dies takes along the chunk it was at; a driver the calls that were out, two for each worker.
    explained = killed["worker"] + 4 * killed["driver"]
    again = sum(times.values()) - chunks
    print(f"{dict(killed)} killed, {again} of {chunks} chunks computed again, {explained} explained")
    assert again <= explained


@pytest.mark.chaos(4, 7)
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_leave_no_trace(tmp_path, monkeypatch):
    disturb(tmp_path, monkeypatch, chunks=120, kills=20, sleep=0.15)
