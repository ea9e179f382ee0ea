"""Clusters: started for one command and closed after it, or running at an address.

    with open_executor(config.cluster) as executor:
        learn_on_dataset(..., executor=executor)

    kind         meaning
    serial       no cluster: everything runs in this process
    local        worker processes on this machine, one thread and one BLAS thread each (the default)
    local-cuda   one worker for each GPU of this machine, by dask-cuda
    address      a running scheduler, with TLS if its files are given
    slurm        workers as jobs of a Slurm queue, by dask-jobqueue
    kubernetes   a cluster of the Dask operator, by dask-kubernetes
    gateway      a cluster of a Dask gateway, by dask-gateway

Workers never use more threads than there are cores: every worker has one thread, and a local cluster at most one worker
per core. Client and workers at an address must have the same versions of the packages that results depend on.

Workers with a GPU have the resource `GPU` (`dask worker --resources GPU=1`). If there are any, compute tasks require
it; workers without one then read data for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import platform
import signal
import socket
import ssl
import time
import urllib.parse
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from kme_dist.backend import available_cores, resolve
from kme_dist.config import ClusterConfig
from kme_dist.errors import ConfigError, RetryError, counted, plural
from kme_dist.ops.certs import tls_files
from kme_dist.run.executors import GPU, DaskExecutor, Executor, SerialExecutor

PACKAGES = ("kme-dist", "dask", "distributed", "numpy", "scipy", "zarr")
DASHBOARD_PORT = 8787
_OWN = "kme_dist_own"  # attribute of the clusters that are started here
CONNECT_S = 20.0
REFUSED_S = 3.0  # for something to listen at an address where nothing does
START_S = 600.0  # timeout for the first worker of a queue or an orchestrator
# By default Dask's workers return every freed array to the system, which clears each page before its next use. Arrays
# of tiles and batches are kept in the process instead, up to the first of these sizes per worker.
_WORKER_MEMORY = {"MALLOC_TRIM_THRESHOLD_": 256 << 20, "MALLOC_MMAP_THRESHOLD_": 64 << 20}
# Long loops: short logs, tolerance of workers that die, and hung workers detected within a minute. The address of a
# worker that died is tried for ten seconds, no longer: other workers wait for its results meanwhile.
DASK_SETTINGS = {
    "distributed.admin.log-length": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.system-monitor.log-length": 600,  # five minutes
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.scheduler.allowed-failures": 10,
    "distributed.scheduler.worker-ttl": "60s",
    "distributed.scheduler.events-cleanup-delay": "10m",  # of notes about workers and clients that have left
    "distributed.comm.retry.count": 1,
    "distributed.comm.timeouts.connect": "10s",
    **{f"distributed.nanny.pre-spawn-environ.{name}": value for name, value in _WORKER_MEMORY.items()},
}


@contextlib.contextmanager
def open_executor(settings: ClusterConfig) -> Iterator[Executor]:
    """The executor of the settings, open for the duration of the block."""
    if settings.kind == "serial":
        yield SerialExecutor()
        return
    with open_client(settings) as client:
        local = settings.kind == "local"
        threads = worker_count(settings) if local else 1
        yield DaskExecutor(client, patience_s=settings.patience_s, direct=local, solo_threads=threads)


def backend_of(executor: Executor, wanted: str) -> str:
    """The backend of an executor's workers for the setting "auto" | "numpy" | "cupy"."""
    if isinstance(executor, SerialExecutor):
        return resolve(wanted)
    gpus = executor.gpus if isinstance(executor, DaskExecutor) else 0
    if wanted == "cupy" and not gpus:
        raise ConfigError(
            "model.backend is cupy, but no worker has the resource GPU; start workers with `--resources GPU=1` on "
            "machines with a GPU, use cluster.kind: local-cuda, or choose backend: numpy"
        )
    return "cupy" if wanted in ("auto", "cupy") and gpus else "numpy"


@contextlib.contextmanager
def open_client(settings: ClusterConfig) -> Iterator[Any]:
    """A connected `distributed.Client` with at least one worker."""
    if settings.kind == "address":
        with open_unchecked(settings) as client:
            check_versions(client)
            _install_dashboard(client)
            yield client
        return
    import dask
    from distributed import Client

    with (
        dask.config.set(DASK_SETTINGS),
        _always_closed(_start(settings)) as cluster,
        Client(cluster, timeout=CONNECT_S) as client,
    ):
        if settings.kind not in ("local", "local-cuda"):
            check_versions(client, timeout_s=START_S)
        _limit_devices(client, settings)
        _install_dashboard(client)
        yield client


def _limit_devices(client: Any, settings: ClusterConfig) -> None:
    """Limit what CuPy allocates on the workers, unless `memory_pool` makes it use a pool of fixed size."""
    limit = settings.device_memory
    if limit is not None and settings.memory_pool is None:
        from kme_dist.ops.device_memory import DeviceMemory

        client.register_plugin(DeviceMemory(_bytes(limit, "device_memory") if isinstance(limit, str) else limit))


@contextlib.contextmanager
def _always_closed(cluster: Any) -> Iterator[Any]:
    """A cluster that does not close in time must not fail the command: local workers end with this process."""
    opened = cluster.__enter__()
    try:
        yield opened
    finally:
        try:
            cluster.__exit__(None, None, None)
        except (OSError, RuntimeError, TimeoutError) as error:
            logging.getLogger("kme_dist").warning(f"the cluster did not close in time ({type(error).__name__})")


def _install_dashboard(client: Any) -> None:
    """Install the page `/kme` and the meters; a cluster without them can still run everything."""
    from kme_dist.ops.dashboard import install

    problem = install(client)
    if problem is not None:
        logging.getLogger("kme_dist").warning(problem)


def dashboard_of(client: Any) -> str | None:
    """Address of the page `/kme`, or of Dask's own dashboard if the cluster does not have that page."""
    link: str | None = client.dashboard_link
    if link and getattr(getattr(client, "cluster", None), _OWN, False):
        # It listens on this machine only (`_dashboard`), also where the scheduler listens on another address.
        link = urllib.parse.urlsplit(link)._replace(netloc=f"127.0.0.1:{urllib.parse.urlsplit(link).port}").geturl()
    if not link or not link.endswith("/status"):
        return link or None
    from kme_dist.ops.dashboard import has_page

    try:
        there = client.run_on_scheduler(has_page)
    except Exception as error:  # as raised by a scheduler without kme-dist
        logging.getLogger("kme_dist").debug(f"{link}: {error}")
        return link
    return link.removesuffix("/status") + "/kme" if there else link


def in_words(executor: Executor) -> str:
    """The executor for people: number of workers, address, dashboard."""
    client = getattr(executor, "client", None)
    if client is None:
        return "this process only"
    link = dashboard_of(client)
    workers = f"{executor.workers} {plural(executor.workers, 'worker')}"
    return f"{workers} at {client.scheduler.address}" + (f", dashboard {link}" if link else "")


def worker_count(settings: ClusterConfig) -> int:
    """Number of workers of a local cluster: as configured, never more than there are cores."""
    cores = available_cores()
    if settings.kind == "serial":
        return 1
    if settings.workers is not None and settings.workers > cores and settings.kind == "local":
        raise ConfigError(
            f"cluster.workers is {settings.workers}, but there are {counted(cores, 'core')}; every worker uses one "
            f"core: set it to {cores} or less"
        )
    return settings.workers or cores


# --- clusters that we start -------------------------------------------------------------------------


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

    # What Dask set in the environment of a process that had another cluster before would take precedence over ours.
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == "65536":
        del os.environ["MALLOC_TRIM_THRESHOLD_"]
    with warnings.catch_warnings():
        # If another dashboard uses the default port ours takes a free one; its address is printed anyway.
        warnings.filterwarnings("ignore", message="Port .* is already in use")
        cluster = LocalCluster(
            n_workers=worker_count(settings),
            threads_per_worker=1,
            processes=True,
            memory_limit=settings.memory or "auto",
            dashboard_address=_dashboard(settings),
            worker_dashboard_address="127.0.0.1:0",
            **_listen(settings),
        )
    setattr(cluster, _OWN, True)
    return cluster


def _dashboard(settings: ClusterConfig) -> str:
    """On this machine only; the default port if it is free, else any other."""
    if not settings.dashboard:
        return "127.0.0.1:0"  # None would use the default port too
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            return "127.0.0.1:0"
    return f"127.0.0.1:{DASHBOARD_PORT}"


def _listen(settings: ClusterConfig) -> dict[str, Any]:
    """Where the scheduler of a local cluster listens: on this machine only, unless configured otherwise."""
    if settings.address is None:
        return {} if settings.tls is None else {"security": _security(settings), "protocol": "tls://"}
    refuse_plain(settings.address, settings.insecure)
    scheme, _, rest = settings.address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("tls", "tcp") or not host or not port.isdecimal():
        raise ConfigError(f"cluster.address {settings.address}: must be tls://HOST:PORT")
    if (scheme == "tls") != (settings.tls is not None):
        raise ConfigError(f"cluster.address {settings.address}: tls:// requires cluster.tls and vice versa")
    return {"host": f"{scheme}://{host}", "scheduler_port": int(port), "security": _security(settings)}


def _optional_import(module: str, package: str, extra: str) -> Any:
    """A library that only one kind of cluster requires."""
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this kind of cluster requires {package}, which cannot be imported ({error}); "
            f"install it: pip install 'kme-dist[{extra}]'"
        ) from error
    finally:
        # dask-jobqueue changes the handler of Ctrl-C when it is imported: exit code 0, and no hint how to resume.
        if interrupted is not None and signal.getsignal(signal.SIGINT) is not interrupted:
            signal.signal(signal.SIGINT, interrupted)


def _local_cuda(settings: ClusterConfig) -> Any:
    pool = {}
    if settings.memory_pool is not None:
        # CuPy allocates from the same pool, or the two would compete for the device.
        pool = {"rmm_pool_size": settings.memory_pool, "rmm_allocator_external_lib_list": "cupy"}
    limit = {} if settings.device_memory is None else {"device_memory_limit": settings.device_memory}
    return _optional_import("dask_cuda", "dask-cuda", "gpu").LocalCUDACluster(
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
    """A cluster before its first job is submitted."""
    directives, worker_arguments = list(settings.directives), []
    if settings.gpus:
        directives.append(f"--gres=gpu:{settings.gpus}")
        worker_arguments = ["--resources", f"{GPU}=1"]
    return _optional_import("dask_jobqueue", "dask-jobqueue", "jobqueue").SLURMCluster(
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
    operator = _optional_import("dask_kubernetes.operator", "dask-kubernetes", "k8s")
    return operator.KubeCluster(
        namespace=settings.namespace, custom_cluster_spec=kubernetes_resource(settings), resource_timeout=START_S
    )


def kubernetes_resource(settings: ClusterConfig) -> dict[str, Any]:
    """The `DaskCluster` resource for the operator."""
    if settings.image is None:
        raise ConfigError("cluster.kind is kubernetes: cluster.image is missing (the container image with kme-dist)")
    operator = _optional_import("dask_kubernetes.operator", "dask-kubernetes", "k8s")
    limits = {"cpu": "1", "memory": str(_bytes(_memory(settings)))}
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
    # The scheduler does not compute: it needs no GPU.
    resource["spec"]["scheduler"]["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "1", "memory": "1Gi"},
        "limits": {"memory": "4Gi"},
    }
    return resource


def _memory(settings: ClusterConfig) -> str:
    if settings.memory is None:
        raise ConfigError(f"cluster.kind is {settings.kind}: cluster.memory is missing (of one worker, e.g. 4GiB)")
    return settings.memory


def _bytes(text: str, name: str = "memory") -> int:
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except ValueError:
        raise ConfigError(f"cluster.{name} is {text!r}; must be a size such as 2GiB") from None


def _gateway(settings: ClusterConfig) -> Any:
    if settings.address is None:
        raise ConfigError("cluster.kind is gateway: cluster.address is missing, e.g. https://gateway.example.org")
    if not settings.address.startswith("https://"):
        refuse_plain(settings.address, settings.insecure)
    gateway = _optional_import("dask_gateway", "dask-gateway", "k8s").Gateway(settings.address)
    cluster = gateway.new_cluster(**settings.options)
    cluster.scale(settings.workers or 1)
    return cluster


# --- clusters that are running ----------------------------------------------------------------------


def refuse_plain(address: str, insecure: bool) -> None:
    """Refuse an unencrypted connection to another machine: anyone who can reach a scheduler's port can run code."""
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
            f"cluster.address {address} is on another machine and not encrypted: anyone who can reach that port can "
            "run code there. Use tls:// with cluster.tls, or, on a trusted network, set cluster.insecure: true"
        )


def open_unchecked(settings: ClusterConfig, timeout_s: float | None = None) -> Any:
    """A client of a running scheduler, whose workers have not been checked."""
    from distributed import Client

    if settings.address is None:
        raise ConfigError("cluster.kind is address: cluster.address is missing, e.g. tcp://scheduler:8786")
    refuse_plain(settings.address, settings.insecure)
    security = _security(settings)
    if settings.address.startswith("tls://") and security is None:
        raise ConfigError(
            f"cluster.address {settings.address}: a tls:// address requires cluster.tls, or KME_TLS set to a folder "
            "created by `kme-dist certs`"
        )
    if security is not None and not settings.address.startswith("tls://"):
        raise ConfigError(
            f"cluster.address {settings.address}: certificates were given (--tls or cluster.tls), which only a "
            f"tls:// address uses; connect to tls://{settings.address.rpartition('://')[2]}, or omit them"
        )
    try:
        _probe(settings.address, min(timeout_s or CONNECT_S, REFUSED_S), security)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Mismatched versions found")  # reported by check_versions
            return Client(settings.address, security=security, timeout=timeout_s or CONNECT_S, set_as_default=False)
    except ssl.SSLError as error:
        raise RetryError(
            f"what answers at {settings.address} cannot be reached with TLS and these certificates ({error.reason}); "
            "is the scheduler running with TLS, and with certificates of the same authority?"
        ) from error
    except ValueError as error:
        raise ConfigError(f"cluster.address {settings.address!r} is not the address of a scheduler: {error}") from error
    except (OSError, TimeoutError) as error:
        raise RetryError(
            f"no scheduler answers at {settings.address} ({type(error).__name__}); is it running, "
            f"{'with' if security else 'without'} TLS?"
        ) from error


def _probe(address: str, patience_s: float, security: Any) -> None:
    """Raise ConnectionRefusedError if nothing listens there and nothing begins to: a client would try for longer. Raise
    SSLError if TLS is wanted and not spoken there: a client would try for longer, too, and fail in several ways."""
    tls = None if security is None else security.get_connection_args("client")["ssl_context"]
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    deadline = time.monotonic() + patience_s
    while port.isdigit() and int(port) < 1 << 16:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as plain:
                if tls is not None:
                    plain.settimeout(patience_s)
                    tls.wrap_socket(plain).close()
            return
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                return  # closed: perhaps it is about to end
            raise
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        except OSError:  # the client says what it is
            return


def scheduler_id(settings: ClusterConfig, timeout_s: float) -> str:
    """Of a running scheduler: another one after every start, the same under all its addresses."""
    from distributed import Security
    from distributed.core import rpc

    address = str(settings.address)
    refuse_plain(address, settings.insecure)
    security = _security(settings) or Security()

    async def ask() -> str:
        async with rpc(address, connection_args=security.get_connection_args("client")) as scheduler:
            return str((await scheduler.identity())["id"])

    async def ask_in_time() -> str:
        return await asyncio.wait_for(ask(), timeout_s)  # a client would wait for ever for what only listens

    return asyncio.run(ask_in_time())


def _security(settings: ClusterConfig) -> Any:
    """Certificates from the settings, else from the folder in KME_TLS; None if there are neither."""
    from distributed.security import Security

    tls = settings.tls
    if tls is None and os.environ.get("KME_TLS") and str(settings.address).startswith("tls://"):
        tls = tls_files(os.environ["KME_TLS"])
    if tls is None:
        return None
    for key in ("authority", "certificate", "key"):
        path = getattr(tls, key)
        if not os.path.isfile(path):
            raise ConfigError(f"cluster.tls.{key}: {path} does not exist")
    sides = ("client", "scheduler", "worker")
    certificates = {f"tls_{side}_cert": tls.certificate for side in sides}
    keys = {f"tls_{side}_key": tls.key for side in sides}
    return Security(tls_ca_file=tls.authority, require_encryption=True, **certificates, **keys)


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on; called here and on every worker."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}


def check_versions(client: Any, timeout_s: float | None = None) -> None:
    """Refuse a cluster without workers, or with a scheduler or workers whose versions differ from this process."""
    for process, difference in differences(client, timeout_s):
        raise ConfigError(f"{process} {difference}")


def _versions_of_workers(client: Any) -> dict[str, Any]:
    """The versions of each worker, or the error it raised; repeated if a worker disappears meanwhile."""
    found: dict[str, Any] = {}
    failure: OSError | TimeoutError | None = None
    for _ in range(3):
        try:
            found = client.run(versions, on_error="return")
        except (OSError, TimeoutError) as error:
            failure = error
            continue
        gone = [answer for answer in found.values() if isinstance(answer, OSError | TimeoutError)]
        if not gone:
            return found
        failure = gone[0]
    raise RetryError(f"the workers at {client.scheduler.address} do not answer: {failure}") from failure


def _versions_of_scheduler(client: Any) -> Any:
    """The versions of the scheduler, or the error it raised: it runs functions of ours for jobs and the dashboard."""
    try:
        return client.run_on_scheduler(versions)
    except (OSError, TimeoutError) as error:
        raise RetryError(f"the scheduler at {client.scheduler.address} does not answer: {error}") from error
    except Exception as error:  # without kme-dist: whatever unpickling raises there
        return error


def differences(client: Any, timeout_s: float | None = None) -> Iterator[tuple[str, str]]:
    """For the scheduler and every worker that cannot be used: which process it is, and why."""
    from distributed import TimeoutError as NoWorkers

    try:
        client.wait_for_workers(1, timeout=timeout_s or CONNECT_S)
    except NoWorkers:
        raise RetryError(
            f"the scheduler at {client.scheduler.address} has no workers; start some, then run this again"
        ) from None
    theirs = {f"worker {address}": found for address, found in sorted(_versions_of_workers(client).items())}
    theirs = {f"the scheduler at {client.scheduler.address}": _versions_of_scheduler(client), **theirs}
    ours = versions()
    for process, found in theirs.items():
        yield from ((process, difference) for difference in _different(found, ours))


def check_scheduler(client: Any) -> None:
    """Refuse a scheduler whose versions differ from this process; workers are not looked at."""
    for difference in _different(_versions_of_scheduler(client), versions()):
        raise ConfigError(f"the scheduler at {client.scheduler.address} {difference}")


def _different(found: Any, ours: dict[str, str]) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"cannot run kme-dist ({found}); install the same version there"
        return
    for name, version in ours.items():
        if found.get(name) != version:
            yield f"has {name} {found.get(name)}, this process has {version}; install the same versions on both sides"
