"""Helpers of the benchmarks: path of the data, load of the machine, timing."""

from __future__ import annotations

import os
import time
from pathlib import Path


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
