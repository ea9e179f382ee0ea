"""The command that computes published tables again.

kme-dist reproduce hnr-table-1 --quick
kme-dist reproduce kmse-table-1 --data /data --row wine --row iris
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from kme_dist.cli.options import Connection, Output, expand_options, load
from kme_dist.config import ClusterConfig


def add_commands(app: typer.Typer) -> None:
    app.command()(expand_options(reproduce))


@dataclass(frozen=True)
class ReproduceOptions:
    """What to compute, from which data, where to."""

    quick: Annotated[bool, typer.Option("--quick", help="Fewer folds and smaller settings: minutes.")] = False
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Folder or address of NAME.npz with X and y; default: KME_DATA, ../shared/data."
        ),
    ] = None
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder of the page; default: runs/reproduce/TABLE.")
    ] = None
    row: Annotated[list[str] | None, typer.Option(help="Compute this row only; may be repeated.")] = None
    workers: Annotated[
        int | None, typer.Option(help="Worker processes on this machine; 0: in this process; default: one per core.")
    ] = None


def reproduce(
    table: Annotated[str, typer.Argument(help="Name of a published table or figure, e.g. hnr-table-1.")],
    options: ReproduceOptions,
    connection: Connection,
    output: Output,
) -> None:
    """Compute a published table again and show both side by side; resumes where an earlier command ended."""
    if connection.scheduler is not None and options.workers is not None:
        raise typer.BadParameter("--workers starts processes on this machine, --scheduler uses others: choose one.")
    if options.workers is not None and options.workers < 0:
        raise typer.BadParameter(f"--workers is {options.workers}; must be an integer >= 0.")
    here = ClusterConfig(kind="serial") if options.workers == 0 else ClusterConfig(workers=options.workers)
    with load("pipelines.progress").RunProgress(sys.stderr, quiet=output.quiet) as progress:
        result = load("pipelines.reproduce.run").run(
            table,
            quick=options.quick,
            data=options.data,
            out=options.out,
            only=options.row,
            cluster=connection.cluster() or here,
            listener=progress.listener,
        )
    output.result(result, *load("pipelines.reproduce.run").lines(table, result))
