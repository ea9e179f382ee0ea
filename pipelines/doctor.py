"""`kme-dist doctor`: installed versions, the resources of the machine, and problems found.

With `--scheduler ADDRESS` also whether that cluster can be reached, and whether its scheduler and its workers have the
versions of this process.
"""

from __future__ import annotations

import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from kme_dist.config import ClusterConfig, TlsConfig
from kme_dist.errors import KMEError, counted
from kme_dist.ops.cluster import differences, open_unchecked

PACKAGES = ("kme-dist", "numpy", "scipy", "dask", "distributed", "zarr", "scikit-learn")


def examine(
    folder: str | Path = ".", scheduler: str | None = None, *, tls: TlsConfig | None = None, insecure: bool = False
) -> dict[str, Any]:
    """Versions, BLAS and threads, cores and memory, GPUs, write access; `problems` lists what is wrong.

    With the address of a scheduler also its workers and how they differ from this process.
    """
    # The libraries must be loaded for threadpoolctl to see their BLAS.
    import numpy as np
    import scipy.linalg
    from threadpoolctl import threadpool_info

    from kme_dist import backend

    problems, code = [], 2
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
            problems.append(f"{package} is not installed; install kme-dist with pip")
    blas = [
        {key: pool.get(key) for key in ("internal_api", "version", "num_threads", "architecture")}
        for pool in threadpool_info()
        if pool.get("user_api") == "blas"
    ]
    matrix = np.eye(8) * 4.0
    if not np.allclose(scipy.linalg.cho_solve(scipy.linalg.cho_factor(matrix), matrix), np.eye(8)):
        problems.append("scipy.linalg gives wrong results; reinstall numpy and scipy")
    cores = _usable_cores()
    threads = max((pool["num_threads"] or 1 for pool in blas), default=1)
    if threads > cores:
        problems.append(
            f"BLAS would use {counted(threads, 'thread')} on {counted(cores, 'core')}; set OPENBLAS_NUM_THREADS={cores}"
        )
    gpu = backend.gpu_report()
    if gpu["self_test"] == "FAILED":
        problems.append("CuPy gives wrong results on this GPU; use backend: numpy")
    writable = _write_error(Path(folder))
    if writable is not None:
        problems.append(writable)
    cluster: dict[str, Any] = {}
    if scheduler is not None:
        cluster = _cluster(ClusterConfig(kind="address", address=scheduler, tls=tls, insecure=insecure))
        code = cluster.pop("exit_code", 2) if not problems else 2  # 75 only if trying again is all that is needed
        problems += cluster.pop("problems")
    return {
        "versions": versions,
        "platform": platform.platform(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_memory_bytes": backend.free_bytes("numpy"),
        "blas": blas,
        "gpu": gpu,
        "folder": {"path": str(Path(folder).resolve()), "writable": writable is None},
        **({"cluster": cluster} if cluster else {}),
        "problems": problems,
        "exit_code": code if problems else 0,
    }


def _cluster(settings: ClusterConfig) -> dict[str, Any]:
    """The cluster at an address, and the workers that differ from this process."""
    found: dict[str, Any] = {"scheduler": settings.address, "problems": []}
    try:
        with open_unchecked(settings) as client:
            different = list(differences(client))
            workers = client.scheduler_info(n_workers=-1)["workers"].values()
            found |= {
                "dashboard": client.dashboard_link,
                "workers": len(workers),
                "threads": sum(worker["nthreads"] for worker in workers),
                "gpus": sum(worker.get("resources", {}).get("GPU", 0) for worker in workers),
                "memory_bytes": sum(worker["memory_limit"] for worker in workers),
                "same_versions": not different,
            }
            found["problems"] += [f"{process} {why}" for process, why in different]
            found["problems"] += [
                f"worker {worker['id']} has {worker['nthreads']} threads; kme-dist uses one thread per worker: "
                "start it with --nthreads 1, and one worker per core"
                for worker in workers
                if worker["nthreads"] > 1
            ]
    except KMEError as error:
        found["problems"].append(str(error))
        found["exit_code"] = error.exit_code
    return found


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _write_error(folder: Path) -> str | None:
    """None if a file can be created in `folder`, else the reason and what to do."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"cannot write to {folder.resolve()} ({error.strerror}); change to another folder, or set output.folder"
