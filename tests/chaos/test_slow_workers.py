"""A worker that is slow in every task: the job takes at most a deadline and a task longer than without it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from distributed import Client, LocalCluster

import kme_dist as kme
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.failpoints import VARIABLE
from kme_dist.run.executors import DaskExecutor

pytestmark = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(4000, 3))
PATIENCE_S, SLOW_S = 5.0, 1000.0
MARGIN_S = 45.0  # for a worker that is started again, on a machine with other work


@pytest.mark.chaos(17)
def test_a_slow_worker_costs_a_deadline_and_not_its_own_time(tmp_path, monkeypatch):
    (tmp_path / "markers").mkdir()
    data = ingest(X, tmp_path / "rows.zarr", chunk_bytes="4KiB", shard_bytes="8KiB")
    model = kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(3)), steps=0, regularization=1e-3)
    model.fit(X[:100], (X[:100, 0] > X[:100, 1]).astype(int)).save(tmp_path / "model.zarr")
    seconds, stored = {}, {}
    for name in ("even", "slow"):
        # One of the workers, the first that gets there, is slow from its second chunk on.
        faults = f"once={tmp_path / 'markers'},predict.before_chunk@2:slow={SLOW_S}" if name == "slow" else ""
        monkeypatch.setenv(VARIABLE, faults)
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
            Client(cluster) as client,
        ):
            client.wait_for_workers(2, timeout=120)
            executor = DaskExecutor(client, patience_s=PATIENCE_S)
            executor.map(np.sqrt, [(1.0,), (2.0,)], name="warm-up")
            began = time.monotonic()
            kme.predict(tmp_path / "model.zarr", data, tmp_path / f"{name}.zarr", executor=executor)
            seconds[name] = time.monotonic() - began
        found = kme.open_predictions(tmp_path / f"{name}.zarr")
        found.verify()
        stored[name] = {output: found.read(output).tobytes() for output in found.names}
    print({name: round(value, 1) for name, value in seconds.items()})
    assert (tmp_path / "markers" / "predict.before_chunk").exists(), "one worker was slow"
    # The deadline follows the longest task before, and no task takes longer than the whole job without the slow worker.
    deadline, task = max(PATIENCE_S, 10 * seconds["even"]), seconds["even"]
    assert seconds["slow"] < seconds["even"] + deadline + task + MARGIN_S < SLOW_S
    assert stored["slow"] == stored["even"]
