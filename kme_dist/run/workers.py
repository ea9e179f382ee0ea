"""The workers of one fit: those of a client, or processes of this machine, which `n_jobs` opens.

    with local_workers(4) as client:
        executor = executor_for(client)

Processes are started as commands, not forked or spawned, so that a script needs no `if __name__ == "__main__"`. Rows in
memory are shared with workers: written once to a local folder that all of them memory-map.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from kme_dist.backend import available_cores, thread_count
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, DataError, RetryError
from kme_dist.run.executors import DaskExecutor, Executor, SerialExecutor

_START_S = 120.0


def job_count(n_jobs: int | None) -> int:
    """Number of processes, as in joblib: None is one, -1 one for each core, -2 all cores but one."""
    if n_jobs is None:
        return 1
    return int(n_jobs) if n_jobs > 0 else max(1, available_cores() + 1 + int(n_jobs))


@contextlib.contextmanager
def local_workers(count: int) -> Iterator[Any]:
    """A connected `distributed.Client` with `count` workers of one thread each, closed at the end."""
    from distributed import Client
    from distributed.deploy.subprocess import SubprocessCluster

    # Modules that this process can import: a kernel of the user may be in one of them.
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    cluster = SubprocessCluster(
        host="127.0.0.1",
        n_workers=count,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        worker_kwargs={"env": environment, "dashboard_address": "127.0.0.1:0"},
    )
    with cluster, Client(cluster, timeout=_START_S) as client:
        try:
            client.wait_for_workers(count, timeout=_START_S)
        except TimeoutError:
            raise RetryError(
                f"n_jobs={count}: the workers did not start in {_START_S:.0f} s; try again when the machine is less "
                "busy, or set n_jobs=None"
            ) from None
        yield client


def executor_for(client: Any, threads: int | None = None) -> Executor:
    """An executor for a client; without one for this process, with all its cores or `threads` of them."""
    if client is not None and not hasattr(client, "scheduler_info"):
        raise ConfigError(
            f"client={client!r}: must be a dask.distributed.Client or None; connect first: Client({client!r})"
        )
    if getattr(client, "status", "running") in ("closing", "closed"):
        raise ConfigError("client: it is closed; connect again with dask.distributed.Client(address), or pass None")
    return SerialExecutor(threads or thread_count()) if client is None else DaskExecutor(client)


def share(rows: ArrayRows, client: Any, stack: contextlib.ExitStack) -> str | None:
    """Store rows where `client`'s workers can read them, until `stack` closes; returns the folder (None: no client)."""
    executor_for(client)
    if client is None:
        return None
    workers = client.scheduler_info(n_workers=-1)["workers"]
    hosts = {worker["host"] for address, worker in workers.items() if not address.startswith("inproc://")}
    if not hosts <= {"127.0.0.1", "::1", "localhost"}:
        raise DataError(
            f"fit: rows in memory cannot be read by workers at {', '.join(sorted(hosts))}; store them where all can "
            "read them (kme_dist.ingest((X, y), path)) and pass fit(kme_dist.open_dataset(path))"
        )
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kme-dist-"))
    rows.spill(folder)
    return folder


def scratch_for(rows: RowSource, folder: str | None, client: Any, stack: contextlib.ExitStack) -> str | Place | None:
    """Where tasks of a fit exchange arrays until `stack` closes: `folder`, that of `share`, or beside a data set, since
    workers on other hosts cannot reach a folder of this machine."""
    if client is None or not isinstance(rows, Dataset):
        return folder
    place = rows.place.sibling(f".{rows.place.name}.fit-{os.getpid()}")
    stack.callback(place.delete_all)
    return place
