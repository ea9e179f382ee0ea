"""Sharing rows in memory with workers: written once to a local folder that all of them memory-map."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

from kme_dist.backend import thread_count
from kme_dist.data.arrays import ArrayRows
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.executors import DaskExecutor, Executor, SerialExecutor


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
