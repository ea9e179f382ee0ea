"""Helpers of the benchmarks: path of the data, load of the machine, timing, figures for the page."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path

FIGURES = "KME_BENCH_FIGURES"  # the file that `make bench` collects figures in


def shared_data() -> Path | None:
    """The folder of the shared data sets: KME_DATA, or ../shared/data beside the repository."""
    place = Path(os.environ.get("KME_DATA", Path(__file__).parents[2] / "shared" / "data"))
    return place if place.is_dir() else None


def load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def best_time(function, repeats: int = 9) -> float:
    """Seconds of the fastest of several calls: the most stable number on a shared machine."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def figure(picture: str, series: str, at: str | float, value: float) -> None:
    """A bar (or, if `at` is a number, a point) of a picture of docs/benchmarks.md; without `make bench` nothing."""
    if path := os.environ.get(FIGURES):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"picture": picture, "series": series, "at": at, "value": value}) + "\n")


def revision() -> str:
    """The commit that is checked out, with `-dirty` if files of the package or the benchmarks were changed."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", "kme_dist", "benchmarks"], capture_output=True)
    return commit + ("-dirty" if changed.stdout else "")


def described() -> str:
    """Processor, cores, memory and versions, in one line."""
    from importlib.metadata import version

    cpu, memory = platform.processor() or platform.machine(), 0.0
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
        memory = int(Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]) / 2**20
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "dask", "zarr"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu}, {cores} cores, {memory:.0f} GiB; Python {platform.python_version()}, {versions}"
