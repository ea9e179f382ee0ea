"""The name under which Dask preloads the dashboard: `dask scheduler --preload kme_dist.dashboard`, likewise workers."""

from __future__ import annotations

from kme_dist.ops.dashboard import dask_setup, install

__all__ = ["dask_setup", "install"]
