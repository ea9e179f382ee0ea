"""Clusters: started for one command and closed after it, or found at an address.

    with open_executor(config.cluster) as executor:
        learn_on_dataset(..., executor=executor)

    kind      what it is
    serial    no cluster: this process does everything
    local     worker processes on this machine, one thread and one BLAS thread each (the default)
    address   a scheduler that is running already, with TLS where its files are given

Workers never use more threads than there are cores: a local cluster has at most one single-threaded worker for each
core. Client and workers at an address must have the same versions of what the results depend on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from kme_dist.config import ClusterConfig
from kme_dist.errors import ConfigError, RetryError
from kme_dist.run.executors import DaskExecutor, Executor, SerialExecutor

PACKAGES = ("kme-dist", "dask", "distributed", "numpy", "scipy", "zarr")
CONNECT_S = 20.0
# Long loops: short logs, patience with workers that die, and hung ones noticed within a minute.
DASK_SETTINGS = {
    "distributed.admin.log-length": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.scheduler.allowed-failures": 10,
    "distributed.scheduler.worker-ttl": "60s",
    "distributed.comm.retry.count": 3,
}


@contextlib.contextmanager
def open_executor(settings: ClusterConfig) -> Iterator[Executor]:
    """Whoever does the work, for as long as the block lasts."""
    if settings.kind == "serial":
        yield SerialExecutor()
        return
    with open_client(settings) as client:
        yield DaskExecutor(client, patience_s=settings.patience_s, direct=settings.kind == "local")


@contextlib.contextmanager
def open_client(settings: ClusterConfig) -> Iterator[Any]:
    """A connected `distributed.Client` with at least one worker."""
    if settings.kind == "address":
        with _attach(settings) as client:
            check_versions(client)
            yield client
        return
    import dask
    from distributed import Client

    with dask.config.set(DASK_SETTINGS), _start(settings) as cluster, Client(cluster, timeout=CONNECT_S) as client:
        yield client


def worker_count(settings: ClusterConfig) -> int:
    """How many workers a local cluster has: as asked for, never more than there are cores."""
    cores = available_cores()
    if settings.kind == "serial":
        return 1
    if settings.workers is not None and settings.workers > cores and settings.kind == "local":
        raise ConfigError(
            f"cluster.workers is {settings.workers}, but there are {cores} cores; every worker computes on one core, "
            f"so set it to {cores} or less"
        )
    return settings.workers or cores


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(settings: ClusterConfig) -> Any:
    from distributed import LocalCluster

    with warnings.catch_warnings():
        # Another dashboard has the usual port: ours takes a free one, and its address is printed anyway.
        warnings.filterwarnings("ignore", message="Port .* is already in use")
        return LocalCluster(
            n_workers=worker_count(settings),
            threads_per_worker=1,
            processes=True,
            memory_limit=settings.memory or "auto",
            dashboard_address=":8787" if settings.dashboard else ":0",  # None would take the usual port too
        )


def _attach(settings: ClusterConfig) -> Any:
    from distributed import Client
    from distributed.security import Security

    if settings.address is None:
        raise ConfigError("cluster.kind is address: cluster.address is missing, e.g. tcp://scheduler:8786")
    if settings.address.startswith("tls://") and settings.tls is None:
        raise ConfigError(f"cluster.address {settings.address}: set cluster.tls for a tls:// address")
    security = None
    if settings.tls is not None:
        for key in ("authority", "certificate", "key"):
            path = getattr(settings.tls, key)
            if not os.path.isfile(path):
                raise ConfigError(f"cluster.tls.{key}: there is no file {path}")
        security = Security(
            tls_ca_file=settings.tls.authority,
            tls_client_cert=settings.tls.certificate,
            tls_client_key=settings.tls.key,
            require_encryption=True,
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Mismatched versions found")  # told in our own words
            return Client(settings.address, security=security, timeout=CONNECT_S, set_as_default=False)
    except ValueError as error:
        raise ConfigError(f"cluster.address {settings.address!r} is no address of a scheduler: {error}") from error
    except (OSError, TimeoutError) as error:
        raise RetryError(
            f"no scheduler answers at {settings.address} ({type(error).__name__}); is it running, and does it speak "
            f"{'TLS' if security else 'without TLS'}?"
        ) from error


def versions() -> dict[str, str]:
    """Of what results depend on; called here and on every worker."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}


def check_versions(client: Any) -> None:
    """Refuse a cluster without workers, or whose workers have other versions than this process."""
    from distributed import TimeoutError as NoWorkers

    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except NoWorkers:
        raise RetryError(
            f"the scheduler at {client.scheduler.address} has no worker; start some, then run this again"
        ) from None
    try:
        theirs = client.run(versions, on_error="return")
    except (OSError, TimeoutError) as error:
        raise RetryError(f"the workers at {client.scheduler.address} do not answer: {error}") from error
    ours = versions()
    for worker, found in sorted(theirs.items()):
        if not isinstance(found, dict):
            raise ConfigError(f"worker {worker} cannot run kme-dist ({found}); install the same version there")
        for name, version in ours.items():
            if found.get(name) != version:
                raise ConfigError(
                    f"worker {worker} has {name} {found.get(name)}, this process has {version}; "
                    "install the same versions on both sides"
                )
