"""`kme-dist reproduce TABLE`: compute a published table again, and show both side by side.

    kme-dist reproduce hnr-table-1 --quick
    kme-dist reproduce askl-table-2 --data /data --scheduler tls://host:8786 --tls certs

The folds of all cells are independent calls of one stream over the workers. Each finished fold is stored at once, so
that a killed command resumes. report.html, result.json and cells/ are in the output folder.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist import __version__
from kme_dist.config import ClusterConfig
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, DataError, RetryError
from kme_dist.ops.cluster import open_executor
from kme_dist.pipelines.folder import Listener
from kme_dist.pipelines.reproduce import page
from kme_dist.pipelines.reproduce.folds import Fold, compute_fold, data_digest
from kme_dist.pipelines.reproduce.published import Table, read_table
from kme_dist.pipelines.reproduce.results import Cell, Store, cell_names, cells, sentences

LONGEST_FOLD_S = 48 * 3600.0  # a worker that is silent for this long is considered hung
Problems = dict[tuple[str, str], tuple[str, str]]


def run(
    name: str,
    *,
    quick: bool = False,
    data: str | None = None,
    out: str | None = None,
    only: list[str] | None = None,
    cluster: ClusterConfig | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Compute what is missing, write the page, return the content of result.json."""
    began, listener = time.perf_counter(), listener or Listener()
    table, folder = read_table(name), data_folder(data)
    place = Place.of(out or f"runs/reproduce/{name}{'-quick' if quick else ''}")
    store = Store(place)
    folds, problems = plan(name, table, quick, folder, only)
    if not folds:
        reasons = sorted({reason for _, reason in problems.values()})
        raise ConfigError(f"nothing of {name} can be computed: {'; '.join(reasons)}")
    records: dict[tuple[str, str], list[dict[str, Any]]] = {}
    missing = []
    for fold in folds:
        if (record := store.read(fold)) is None:
            missing.append(fold)
        else:
            records.setdefault((fold.row, fold.method), []).append(record)
    listener.progress(f"folds of {name}", len(folds) - len(missing), len(folds))
    computed = 0
    if missing:
        computed = _compute(missing, store, folder, cluster or ClusterConfig(), records, problems, listener, len(folds))
    for found in records.values():
        found.sort(key=lambda record: int(record["fold"]["fold"]))
    facts = {
        "quick": quick,
        "computed": computed,
        "reused": len(folds) - len(missing),
        "data": folder or "scikit-learn",
        "versions": f"kme-dist {__version__}, NumPy {np.__version__}, Python {platform.python_version()}",
    }
    found_cells = list(cells(table, records, problems))
    place.write("report.html", page.render(name, table, found_cells, records, facts).encode())
    result = {
        "table": name,
        **facts,
        "cells": [asdict(cell) for cell in found_cells],
        "seconds": time.perf_counter() - began,
        "report": f"{place}/report.html",
    }
    place.write("result.json", (json.dumps(result, indent=2) + "\n").encode())
    return result


def plan(
    name: str, table: Table, quick: bool, folder: str, only: list[str] | None = None
) -> tuple[list[Fold], Problems]:
    """All folds to have, cheap to repeat, and the cells that cannot be computed, with the reason."""
    for row in only or []:
        if row not in table.rows:
            raise ConfigError(f"{name} has no row {row}; its rows: {', '.join(table.rows)}")
    settings = {**table.settings, **(table.quick.settings if quick else {})}
    count = table.quick.folds if quick else table.folds
    numbers = np.unique(np.linspace(0, table.folds - 1, count).round().astype(int)).tolist()  # spread over all of them
    folds, problems, digests = list[Fold](), Problems(), dict[str, str | DataError]()
    for row, figures in table.rows.items():
        data_set = table.data_set(row)
        if data_set is not None and data_set not in digests:
            try:
                digests[data_set] = data_digest(folder, data_set)
            except DataError as error:
                digests[data_set] = error
        digest = None if data_set is None else digests[data_set]
        for method in figures:
            if only and row not in only:
                problems[row, method] = ("skipped", "not requested")
            elif isinstance(digest, DataError):
                problems[row, method] = ("skipped", str(digest))
            elif quick and table.is_left_out(row, method):
                problems[row, method] = ("skipped", "left out by --quick")
            else:
                folds += [Fold(name, row, method, k, quick, settings, data_set, digest) for k in numbers]
    folds.sort(key=lambda fold: fold.fold)  # a first figure for every cell soon
    return folds, problems


def _compute(
    missing: list[Fold],
    store: Store,
    folder: str,
    cluster: ClusterConfig,
    records: dict[tuple[str, str], list[dict[str, Any]]],
    problems: Problems,
    listener: Listener,
    total: int,
) -> int:
    """Compute and store folds; returns how many were stored."""
    done, stored = total - len(missing), 0
    with open_executor(cluster.model_copy(update={"patience_s": LONGEST_FOLD_S})) as executor:
        calls = [(asdict(fold), folder) for fold in missing]
        for index, record in executor.stream(compute_fold, calls, name="reproduce-fold", ahead=executor.workers):
            fold = missing[index]
            if isinstance(record, RetryError):
                raise record
            if isinstance(record, Exception):
                reason = f"fold {fold.fold}: {type(record).__name__}: {' '.join(str(record).split())}"
                problems.setdefault((fold.row, fold.method), ("failed", reason))
                listener.say(f"{fold.row}, {fold.method}: failed: {reason}")
            elif not np.isfinite(record["value"]):
                reason = f"fold {fold.fold}: the figure is {record['value']}"
                problems.setdefault((fold.row, fold.method), ("failed", reason))
            else:
                store.write(fold, record)
                records.setdefault((fold.row, fold.method), []).append({"fold": asdict(fold), **record})
                stored += 1
            done += 1
            listener.progress(f"folds of {fold.table}", done, total)
    return stored


def data_folder(given: str | None) -> str:
    """The folder of the data sets: as given, KME_DATA, or ../shared/data beside the repository; empty if there is
    none, for the sets of scikit-learn."""
    if given is not None:
        place = Place.of(given)
        if place.is_local and not place.path.is_dir():
            raise ConfigError(f"--data {given}: not a folder; it must contain files NAME.npz with arrays X and y")
        return str(place)
    beside = Path(os.environ.get("KME_DATA") or Path(__file__).parents[3] / "shared" / "data")
    return str(beside) if beside.is_dir() else ""


def lines(name: str, result: dict[str, Any]) -> list[str]:
    """The result for a person: a line for every cell that was computed, what is said of them, and where the page is."""
    table = read_table(name)
    width, wide = (max(map(len, names)) for names in (table.rows, table.methods))
    found = [Cell(**{**fields, "notes": tuple(fields["notes"])}) for fields in result["cells"]]
    computed = [cell for cell in found if cell.status != "skipped"]
    shown = [
        f"{cell.row:{width}} {cell.method:{wide}} {page.own_figure(table, cell):>16}  published "
        f"{page.printed(table, cell):>16}  {cell.status}"
        for cell in computed
    ]
    shown += [f"{cell_names(table, about)}: {text}" for text, about in sentences(computed).items()]
    skipped = len(found) - len(computed)
    return [*shown, *([f"{skipped} cells skipped, see the page"] if skipped else []), f"report: {result['report']}"]


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["reproduce", *sys.argv[1:]])
