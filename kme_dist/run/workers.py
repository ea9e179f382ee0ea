"""Worker processes of this machine for the duration of one fit: what `n_jobs` opens.

    with local_workers(4) as client:
        executor = DaskExecutor(client)

They are started as commands, not forked or spawned, so that a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from kme_dist.backend import available_cores
from kme_dist.errors import RetryError

_START_S = 120.0


def job_count(n_jobs: int | None) -> int:
    """Number of processes, as in joblib: None is one, -1 one for each core, -2 all cores but one."""
    if n_jobs is None:
        return 1
    cores = available_cores()
    return int(n_jobs) if n_jobs > 0 else max(1, cores + 1 + int(n_jobs))


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
