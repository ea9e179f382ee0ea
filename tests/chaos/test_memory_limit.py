"""A task that takes more memory than its worker may have: the nanny kills the worker, and the task is given up."""

from __future__ import annotations

import time

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist.errors import RetryError
from kme_dist.run.executors import DaskExecutor

pytestmark = pytest.mark.slow
LIMIT = 600 << 20


def take_memory(count):
    held = np.ones(count, np.uint8)
    if count > LIMIT:
        time.sleep(200)  # the nanny looks now and then
    return int(held[-1])


@pytest.mark.chaos(5)
def test_a_task_that_exceeds_the_memory_of_every_worker_is_given_up_by_name():
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(n_workers=1, threads_per_worker=1, memory_limit=LIMIT, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        executor = DaskExecutor(client, attempts=1)
        assert executor.map(take_memory, [(1000,)], name="small") == [1]
        with pytest.raises(RetryError, match="task named too-large died") as caught:
            executor.map(take_memory, [(2 * LIMIT,)], name="too-large")
        said = str(caught.value)
        assert "memory limit, here 600 MiB" in said
        assert "cluster.memory" in said
        assert "smaller chunks" in said
        assert caught.value.exit_code == 75
        client.wait_for_workers(1, timeout=120)
        assert executor.map(take_memory, [(1000,)], name="small") == [1], "the next worker is well"
