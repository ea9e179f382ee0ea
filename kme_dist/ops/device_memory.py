"""The limit of device memory on the workers of a cluster: `cluster.device_memory`."""

from __future__ import annotations

from typing import Any

from distributed.diagnostics.plugin import WorkerPlugin

from kme_dist.backend import gpu_available, limit_device_memory


class DeviceMemory(WorkerPlugin):  # type: ignore[misc]
    """Lets CuPy allocate at most `limit` bytes, or that fraction of the device, on every worker with a GPU."""

    name = "kme-device-memory"

    def __init__(self, limit: int | float) -> None:
        self.limit = limit

    def setup(self, worker: Any) -> None:
        if gpu_available():
            limit_device_memory(self.limit)
