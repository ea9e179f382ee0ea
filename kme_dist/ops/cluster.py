"""Clusters: started for one command and closed after it, or found at an address.

    with open_executor(config.cluster) as executor:
        learn_on_dataset(..., executor=executor)

    kind         what it is
    serial       no cluster: this process does everything
    local        worker processes on this machine, one thread and one BLAS thread each (the default)
    local-cuda   one worker for each GPU of this machine, by dask-cuda
    address      a scheduler that is running already, with TLS where its files are given
    slurm        workers as jobs of a Slurm queue, by dask-jobqueue
    kubernetes   a cluster of the Dask operator, by dask-kubernetes
    gateway      a cluster of a Dask gateway, by dask-gateway

Workers never use more threads than there are cores: every worker has one thread, and a local cluster at most one worker
for each core. Client and workers at an address must have the same versions of what the results depend on.

Workers with a device carry the resource `GPU` (`dask worker --resources GPU=1`). Where there are any, the tasks that
compute ask for it; workers without one then read for the others.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import os
import platform
import signal
import socket
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from kme_dist.backend import resolve
from kme_dist.config import ClusterConfig
from kme_dist.errors import ConfigError, RetryError
from kme_dist.ops.certs import tls_files
from kme_dist.run.executors import GPU, DaskExecutor, Executor, SerialExecutor

PACKAGES = ("kme-dist", "dask", "distributed", "numpy", "scipy", "zarr")
DRIVER = "kme_driver"  # the resource of workers that may run the driver of a submitted job
DASHBOARD_PORT = 8787
CONNECT_S = 20.0
START_S = 600.0  # until the first worker of a queue or an orchestrator is there
# Dask has its workers give every freed array back to the system, which then clears each page again before the next one
# gets it. Arrays of tiles and batches are kept instead, up to the first of these in a worker.
_WORKER_MEMORY = {"MALLOC_TRIM_THRESHOLD_": 256 << 20, "MALLOC_MMAP_THRESHOLD_": 64 << 20}
# Long loops: short logs, patience with workers that die, and hung ones noticed within a minute.
DASK_SETTINGS = {
    "distributed.admin.log-length": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.scheduler.allowed-failures": 10,
    "distributed.scheduler.worker-ttl": "60s",
    "distributed.comm.retry.count": 3,
    **{f"distributed.nanny.pre-spawn-environ.{name}": value for name, value in _WORKER_MEMORY.items()},
}


@contextlib.contextmanager
def open_executor(settings: ClusterConfig) -> Iterator[Executor]:
    """Whoever does the work, for as long as the block lasts."""
    if settings.kind == "serial":
        yield SerialExecutor()
        return
    with open_client(settings) as client:
        local = settings.kind == "local"
        threads = worker_count(settings) if local else 1
        yield DaskExecutor(client, patience_s=settings.patience_s, direct=local, solo_threads=threads)


def backend_of(executor: Executor, wanted: str) -> str:
    """Where the workers of an executor compute, when "auto" | "numpy" | "cupy" is wanted."""
    if isinstance(executor, SerialExecutor):
        return resolve(wanted)
    gpus = executor.gpus if isinstance(executor, DaskExecutor) else 0
    if wanted == "cupy" and not gpus:
        raise ConfigError(
            "model.backend is cupy, but no worker carries the resource GPU; start workers with `--resources GPU=1` on "
            "machines that have one, use cluster.kind: local-cuda, or choose backend: numpy"
        )
    return "cupy" if wanted in ("auto", "cupy") and gpus else "numpy"


@contextlib.contextmanager
def open_client(settings: ClusterConfig) -> Iterator[Any]:
    """A connected `distributed.Client` with at least one worker."""
    if settings.kind == "address":
        with open_unchecked(settings) as client:
            check_versions(client)
            _show_runs(client)
            yield client
        return
    import dask
    from distributed import Client

    with (
        dask.config.set(DASK_SETTINGS),
        _closed_in_any_case(_start(settings)) as cluster,
        Client(cluster, timeout=CONNECT_S) as client,
    ):
        if settings.kind not in ("local", "local-cuda"):
            check_versions(client, timeout_s=START_S)
        _show_runs(client)
        yield client


@contextlib.contextmanager
def _closed_in_any_case(cluster: Any) -> Iterator[Any]:
    """A cluster whose workers do not end in time fails no command: local ones end with this process."""
    opened = cluster.__enter__()
    try:
        yield opened
    finally:
        try:
            cluster.__exit__(None, None, None)
        except (OSError, RuntimeError, TimeoutError) as error:
            logging.getLogger("kme_dist").warning(f"the cluster did not close in time ({type(error).__name__})")


def _show_runs(client: Any) -> None:
    """The page `/kme` on the dashboard, and meters on the workers; a cluster that cannot show a run can still do it."""
    from kme_dist.ops.dashboard import install

    trouble = install(client)
    if trouble is not None:
        logging.getLogger("kme_dist").warning(trouble)


def dashboard_of(client: Any) -> str | None:
    """Where to watch: the page of runs, or Dask's own where a cluster does not have it."""
    link: str | None = client.dashboard_link
    if not link or not link.endswith("/status"):
        return link or None
    from kme_dist.ops.dashboard import has_page

    try:
        there = client.run_on_scheduler(has_page)
    except Exception as error:  # as raised by a scheduler that does not know kme-dist
        logging.getLogger("kme_dist").debug(f"{link}: {error}")
        return link
    return link.removesuffix("/status") + "/kme" if there else link


def in_words(executor: Executor) -> str:
    """Who does the work, and where to watch it."""
    client = getattr(executor, "client", None)
    if client is None:
        return "this process alone"
    link = dashboard_of(client)
    return f"{executor.workers} workers at {client.scheduler.address}" + (f", dashboard {link}" if link else "")


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


# --- clusters that are started ----------------------------------------------------------------------


def _start(settings: ClusterConfig) -> Any:
    match settings.kind:
        case "local-cuda":
            return _local_cuda(settings)
        case "slurm":
            return _slurm(settings)
        case "kubernetes":
            return _kubernetes(settings)
        case "gateway":
            return _gateway(settings)
    from distributed import LocalCluster

    # What Dask's own setting left in the environment of a process that had another cluster before would outweigh ours.
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == "65536":
        del os.environ["MALLOC_TRIM_THRESHOLD_"]
    with warnings.catch_warnings():
        # Another dashboard has the usual port: ours takes a free one, and its address is printed anyway.
        warnings.filterwarnings("ignore", message="Port .* is already in use")
        return LocalCluster(
            n_workers=worker_count(settings),
            threads_per_worker=1,
            processes=True,
            memory_limit=settings.memory or "auto",
            dashboard_address=_dashboard(settings),
            worker_dashboard_address="127.0.0.1:0",
            resources={DRIVER: 1},
            **_listen(settings),
        )


def _dashboard(settings: ClusterConfig) -> str:
    """On this machine alone; the usual port where it is free, any other where another dashboard has it."""
    if not settings.dashboard:
        return "127.0.0.1:0"  # None would take the usual port too
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            return "127.0.0.1:0"
    return f"127.0.0.1:{DASHBOARD_PORT}"


def _listen(settings: ClusterConfig) -> dict[str, Any]:
    """Where the scheduler of a local cluster listens: nowhere but on this machine, unless it is told."""
    if settings.address is None:
        return {} if settings.tls is None else {"security": _security(settings), "protocol": "tls://"}
    refuse_plain(settings.address, settings.insecure)
    scheme, _, rest = settings.address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("tls", "tcp") or not host or not port.isdecimal():
        raise ConfigError(f"cluster.address {settings.address}: give where to listen as tls://HOST:PORT")
    if (scheme == "tls") != (settings.tls is not None):
        raise ConfigError(f"cluster.address {settings.address}: tls:// and cluster.tls go together")
    return {"host": f"{scheme}://{host}", "scheduler_port": int(port), "security": _security(settings)}


def _needed(module: str, package: str, extra: str) -> Any:
    """A library that only one kind of cluster needs."""
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this kind of cluster needs {package}, which cannot be imported here ({error}); "
            f"install it: pip install 'kme-dist[{extra}]'"
        ) from error
    finally:
        # dask-jobqueue makes ctrl-C a success as soon as it is imported: exit code 0, and no word on how to go on.
        if interrupted is not None and signal.getsignal(signal.SIGINT) is not interrupted:
            signal.signal(signal.SIGINT, interrupted)


def _local_cuda(settings: ClusterConfig) -> Any:
    pool = {}
    if settings.memory_pool is not None:
        # CuPy allocates from the pool too, or the two would compete for the device.
        pool = {"rmm_pool_size": settings.memory_pool, "rmm_allocator_external_lib_list": "cupy"}
    limit = {} if settings.device_memory is None else {"device_memory_limit": settings.device_memory}
    return _needed("dask_cuda", "dask-cuda", "gpu").LocalCUDACluster(
        n_workers=settings.workers,
        threads_per_worker=1,
        memory_limit=settings.memory or "auto",
        dashboard_address=_dashboard(settings),
        resources={GPU: 1},
        **limit,
        **pool,
    )


def _slurm(settings: ClusterConfig) -> Any:
    cluster = _slurm_cluster(settings)
    cluster.scale(settings.workers or 1)
    return cluster


def _slurm_cluster(settings: ClusterConfig) -> Any:
    """A cluster of which no job has been submitted yet."""
    directives, worker_arguments = list(settings.directives), []
    if settings.gpus:
        directives.append(f"--gres=gpu:{settings.gpus}")
        worker_arguments = ["--resources", f"{GPU}=1"]
    return _needed("dask_jobqueue", "dask-jobqueue", "jobqueue").SLURMCluster(
        cores=1,
        processes=1,
        memory=_memory(settings),
        queue=settings.queue,
        account=settings.account,
        walltime=settings.walltime,
        job_extra_directives=directives,
        job_script_prologue=[*(f"export {name}={value}" for name, value in _WORKER.items()), *settings.prologue],
        worker_extra_args=worker_arguments,
        scheduler_options={"dashboard_address": _dashboard(settings)},
    )


_WORKER = {f"{name}_NUM_THREADS": 1 for name in ("OMP", "OPENBLAS", "MKL")} | _WORKER_MEMORY  # its environment


def _kubernetes(settings: ClusterConfig) -> Any:
    operator = _needed("dask_kubernetes.operator", "dask-kubernetes", "k8s")
    return operator.KubeCluster(
        namespace=settings.namespace, custom_cluster_spec=kubernetes_resource(settings), resource_timeout=START_S
    )


def kubernetes_resource(settings: ClusterConfig) -> dict[str, Any]:
    """The `DaskCluster` that the operator is asked for."""
    if settings.image is None:
        raise ConfigError("cluster.kind is kubernetes: cluster.image is missing, the container image with kme-dist")
    operator = _needed("dask_kubernetes.operator", "dask-kubernetes", "k8s")
    limits = {"cpu": "1", "memory": _kubernetes_bytes(_memory(settings))}
    command = ["dask-worker", "--nthreads", "1"]
    if settings.gpus:
        limits["nvidia.com/gpu"] = str(settings.gpus)
        command = ["dask-cuda-worker", "--resources", f"{GPU}=1"]
    resource: dict[str, Any] = operator.make_cluster_spec(
        name=f"kme-dist-{os.urandom(3).hex()}",
        image=settings.image,
        n_workers=settings.workers or 1,
        resources={"limits": limits, "requests": {"cpu": "1", "memory": limits["memory"]}},
        env={name: str(value) for name, value in _WORKER.items()},
        worker_command=command,
    )
    # The scheduler computes nothing: it gets no GPU.
    resource["spec"]["scheduler"]["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "1", "memory": "1Gi"},
        "limits": {"memory": "4Gi"},
    }
    return resource


def _memory(settings: ClusterConfig) -> str:
    if settings.memory is None:
        raise ConfigError(f"cluster.kind is {settings.kind}: cluster.memory is missing, that of one worker, e.g. 4GiB")
    return settings.memory


def _kubernetes_bytes(text: str) -> str:
    from dask.utils import parse_bytes

    try:
        return str(int(parse_bytes(text)))
    except ValueError:
        raise ConfigError(f"cluster.memory is {text!r}; give bytes such as 2GiB") from None


def _gateway(settings: ClusterConfig) -> Any:
    if settings.address is None:
        raise ConfigError("cluster.kind is gateway: cluster.address is missing, e.g. https://gateway.example.org")
    if not settings.address.startswith("https://"):
        refuse_plain(settings.address, settings.insecure)
    cluster = _needed("dask_gateway", "dask-gateway", "k8s").Gateway(settings.address).new_cluster(**settings.options)
    cluster.scale(settings.workers or 1)
    return cluster


# --- clusters that are found ------------------------------------------------------------------------


def refuse_plain(address: str, insecure: bool) -> None:
    """Whoever reaches the port of a scheduler can run code there, so it is not reached in the clear from afar."""
    scheme, _, rest = (address if "://" in address else f"tcp://{address}").partition("://")
    if insecure or scheme not in ("tcp", "ws", "ucx", "http"):
        return
    place = rest.split("/")[0]
    host = place.rpartition(":")[0] or place
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host.strip("[]")).is_loopback:
            return
    if host != "localhost":
        raise ConfigError(
            f"cluster.address {address} is on another machine and not encrypted: anybody who reaches that port can run "
            "code there. Use tls:// with cluster.tls, or, on a network that only friends can reach, set "
            "cluster.insecure: true"
        )


def open_unchecked(settings: ClusterConfig) -> Any:
    from distributed import Client

    if settings.address is None:
        raise ConfigError("cluster.kind is address: cluster.address is missing, e.g. tcp://scheduler:8786")
    refuse_plain(settings.address, settings.insecure)
    security = _security(settings)
    if settings.address.startswith("tls://") and security is None:
        raise ConfigError(
            f"cluster.address {settings.address}: set cluster.tls for a tls:// address, or KME_TLS to a folder that "
            "`kme-dist certs` made"
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


def _security(settings: ClusterConfig) -> Any:
    """Certificates from the settings, else from the folder that KME_TLS names; None where there are neither."""
    from distributed.security import Security

    tls = settings.tls
    if tls is None and os.environ.get("KME_TLS") and str(settings.address).startswith("tls://"):
        tls = tls_files(os.environ["KME_TLS"])
    if tls is None:
        return None
    for key in ("authority", "certificate", "key"):
        path = getattr(tls, key)
        if not os.path.isfile(path):
            raise ConfigError(f"cluster.tls.{key}: there is no file {path}")
    sides = ("client", "scheduler", "worker")
    certificates = {f"tls_{side}_cert": tls.certificate for side in sides}
    keys = {f"tls_{side}_key": tls.key for side in sides}
    return Security(tls_ca_file=tls.authority, require_encryption=True, **certificates, **keys)


def versions() -> dict[str, str]:
    """Of what results depend on; called here and on every worker."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}


def check_versions(client: Any, timeout_s: float | None = None) -> None:
    """Refuse a cluster without workers, or whose workers have other versions than this process."""
    for worker, difference in worker_differences(client, timeout_s):
        raise ConfigError(f"worker {worker} {difference}")


def _versions_of_workers(client: Any) -> dict[str, Any]:
    """What each worker says, or the error it raised; one that ended while it was asked is no answer."""
    found: dict[str, Any] = {}
    trouble: OSError | TimeoutError | None = None
    for _ in range(3):
        try:
            found = client.run(versions, on_error="return")
        except (OSError, TimeoutError) as error:
            trouble = error
            continue
        gone = [answer for answer in found.values() if isinstance(answer, OSError | TimeoutError)]
        if not gone:
            return found
        trouble = gone[0]
    raise RetryError(f"the workers at {client.scheduler.address} do not answer: {trouble}") from trouble


def worker_differences(client: Any, timeout_s: float | None = None) -> Iterator[tuple[str, str]]:
    """For every worker that cannot be used as it is: its address, and why."""
    from distributed import TimeoutError as NoWorkers

    try:
        client.wait_for_workers(1, timeout=timeout_s or CONNECT_S)
    except NoWorkers:
        raise RetryError(
            f"the scheduler at {client.scheduler.address} has no worker; start some, then run this again"
        ) from None
    theirs = _versions_of_workers(client)
    ours = versions()
    for worker, found in sorted(theirs.items()):
        if not isinstance(found, dict):
            yield worker, f"cannot run kme-dist ({found}); install the same version there"
            continue
        for name, version in ours.items():
            if found.get(name) != version:
                yield (
                    worker,
                    (
                        f"has {name} {found.get(name)}, this process has {version}; "
                        "install the same versions on both sides"
                    ),
                )
