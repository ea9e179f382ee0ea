"""A real Dask scheduler with many workers that only sleep, for `python -m benchmarks.scale simulate`.

The scheduler has a process of its own, the workers share a few: each is a real `distributed.Worker` with one thread,
and its tasks sleep as long as the modelled work takes. What is measured is therefore the scheduler, the driver and the
messages between them, with the executor that predict and fit use.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dask
import psutil

# The profiler and the monitors of a worker would run once per worker in the shared processes, which no real one does.
QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.comm.timeouts.connect": "120s",
}


SETTINGS = Path(__file__).parents[1] / "deploy" / "dask.yaml"


def sleep(seconds, result_bytes=0):
    """The task of a simulated worker."""
    time.sleep(seconds)
    return bytes(result_bytes)


def add(left, right):
    return left


@contextlib.contextmanager
def simulated_cluster(workers, processes=2):
    """A client of `workers` sleeping workers; the process of the scheduler, and those of the workers."""
    from distributed import Client

    with contextlib.ExitStack() as stack, dask.config.set(QUIET):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = str(folder / "scheduler.json")
        scheduler = stack.enter_context(_started("scheduler", file))
        while not Path(file).exists():
            time.sleep(0.1)
        shares = [workers * (i + 1) // processes - workers * i // processes for i in range(processes)]
        started = [stack.enter_context(_started("workers", file, str(share))) for share in shares]
        client = stack.enter_context(Client(scheduler_file=file, set_as_default=False, timeout=120))
        client.wait_for_workers(workers, timeout=600)
        yield client, psutil.Process(scheduler.pid), [psutil.Process(process.pid) for process in started]


@contextlib.contextmanager
def _started(*arguments):
    # The settings of a real cluster, without a line for each worker that vanishes at the end.
    silent = {**os.environ, "DASK_CONFIG": str(SETTINGS), "DASK_LOGGING__DISTRIBUTED": "critical"}
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.simulation", *arguments], env=silent)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


async def _scheduler(file):
    from distributed import Scheduler

    async with Scheduler(
        host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0", scheduler_file=file
    ) as scheduler:
        await scheduler.finished()


async def _workers(file, count):
    from distributed import Worker

    async with contextlib.AsyncExitStack() as stack:
        started = []
        for i in range(count):
            worker = Worker(scheduler_file=file, nthreads=1, name=None, dashboard=False, memory_limit=0)
            started.append(await stack.enter_async_context(worker))
            if i % 50 == 49:
                await asyncio.sleep(0)
        await asyncio.gather(*(worker.finished() for worker in started))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["scheduler", "workers"])
    parser.add_argument("file")
    parser.add_argument("count", type=int, nargs="?", default=1)
    given = parser.parse_args(arguments)
    with dask.config.set(QUIET), contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_scheduler(given.file) if given.role == "scheduler" else _workers(given.file, given.count))


if __name__ == "__main__":
    main()
