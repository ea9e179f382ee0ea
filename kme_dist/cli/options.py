"""The options that commands share, each defined once, and what they stand for.

A command declares a parameter with one of these types; the functions below turn the values into what pipelines take.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from kme_dist.config import ClusterConfig
from kme_dist.errors import ConfigError
from kme_dist.ops.certs import tls_files

# Of every command
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress and no messages, only errors.")]
# Of commands that read a config
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key of the config.")
]
DatasetConfig = Annotated[Path, typer.Argument(help="YAML file whose data.source is a data set.")]
JobConfig = Annotated[Path, typer.Argument(help="YAML file with paths relative to the root.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Recompute even if an earlier result is up to date.")]
Performance = Annotated[
    Path | None, typer.Option("--performance-report", metavar="FILE", help="Write Dask's performance report (HTML).")
]
# Of commands that use a cluster
Scheduler = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Address of a running Dask scheduler, e.g. tls://host:8786.")
]
Tls = Annotated[str | None, typer.Option(metavar="DIR", help="Folder of `kme-dist certs`; default: KME_TLS.")]
Insecure = Annotated[bool, typer.Option("--allow-insecure", help="Allow connections to other machines without TLS.")]
# Of commands for jobs
Root = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder of jobs and data; default: KME_ROOT, else the current folder."),
]
Pipeline = Annotated[str, typer.Option(help="run, learn, fit, predict or evaluate.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="Job id, as printed by `submit`.")]


def cluster_overrides(scheduler: str | None) -> list[str]:
    """--scheduler as overrides of a config."""
    return [] if scheduler is None else ["cluster.kind=address", f"cluster.address={json.dumps(scheduler)}"]


def cluster_at(
    scheduler: str | None, tls: str | None, insecure: bool, known: ClusterConfig | None = None
) -> ClusterConfig | None:
    """How to reach a scheduler: by the command line first, then by `known`; None without an address."""
    known = known or ClusterConfig()
    address = scheduler or known.address
    if address is None:
        return None
    return ClusterConfig(
        kind="address",
        address=address,
        tls=tls_files(tls) if tls is not None else known.tls,
        insecure=insecure or known.insecure,
    )


def split_names(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def split_pairs(given: list[str] | None, option: str) -> dict[str, str] | None:
    """Repeated NAME=FILE."""
    if not given:
        return None
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"{option} {text}: must be NAME=FILE")
        found[name] = path
    return found


@contextlib.contextmanager
def performance_notice(performance: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Say where the performance report of the block was written, or that there is none."""

    def written() -> float | None:
        return performance.stat().st_mtime if performance is not None and performance.exists() else None

    before = written()
    yield
    if performance is not None:
        nothing = "no performance report: this command did not use a cluster"
        say(nothing if written() == before else f"performance report: {performance}")
