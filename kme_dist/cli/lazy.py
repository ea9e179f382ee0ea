"""Modules that are loaded when a command needs them: `kme-dist --help` waits neither for NumPy nor for Dask."""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """A module of the package by its path below kme_dist, e.g. `load("pipelines.learn")`."""
    return importlib.import_module(f"kme_dist.{name}")
