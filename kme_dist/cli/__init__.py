"""The command line: parse, call a pipeline, print."""

from __future__ import annotations

from kme_dist.cli.app import main

__all__ = ["main"]
