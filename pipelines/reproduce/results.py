"""Finished folds on disk, the cells of a table, and whether they agree with what was published.

Every finished fold is a file OUT/cells/NAME.json with the fold itself, so that a killed run resumes, and a fold of
other settings or other data is recomputed. Failed folds are not stored: the next run tries them again.

A cell agrees if its mean is within one published deviation of the published figure, or better than it; a figure that
was printed without deviation is compared by the deviation of our own folds. What was printed is rounded, so half of
the last printed digit is allowed, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kme_dist.data.places import Place
from kme_dist.pipelines.reproduce.folds import Fold
from kme_dist.pipelines.reproduce.published import Table

UNEXPLAINED = "The cause of the difference is not known."


class Store:
    """The finished folds of a run folder."""

    def __init__(self, place: Place) -> None:
        self.place = place.child("cells")

    def write(self, fold: Fold, record: Mapping[str, Any]) -> None:
        self.place.write(fold.name, json.dumps({"fold": asdict(fold), **record}).encode())

    def read(self, fold: Fold) -> dict[str, Any] | None:
        """The record of exactly this fold; None if it is not finished, or its file is damaged or of other settings."""
        try:
            record = json.loads(self.place.read(fold.name))
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(record, dict) or record.get("fold") != asdict(fold) or "value" not in record:
            return None
        return record


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what was published, what was found, and how they compare."""

    row: str
    method: str
    published: float | None
    deviation: float | None
    status: str  # agrees, better, differs, failed, skipped, unpublished, other data
    mean: float | None = None
    spread: float | None = None
    folds: int = 0
    seconds: float = 0.0
    reason: str = ""  # of a failure or of a skipped cell
    notes: tuple[str, ...] = ()


def status(table: Table, row: str, published: list[float], mean: float, spread: float) -> str:
    """How a mean compares with a published figure."""
    better = table.better_in(row)
    if not published:
        return "unpublished"
    if not table.comparable:
        return "other data"
    gain = mean - published[0]
    if table.claim is not None:
        return "agrees" if (gain if better == "higher" else -gain) > 0 else "differs"
    width = (published[1] if len(published) > 1 else spread) + 0.5 * 10.0**-table.digits + 1e-9
    if abs(gain) <= width:
        return "agrees"
    if better == "same":
        return "differs"
    return "better" if (gain > 0) == (better == "higher") else "differs"


def cells(
    table: Table,
    records: Mapping[tuple[str, str], list[dict[str, Any]]],
    problems: Mapping[tuple[str, str], tuple[str, str]],
) -> Iterator[Cell]:
    """Every cell of a table; `problems` has status and reason of those that failed or were skipped."""
    for row, figures in table.rows.items():
        for method in table.methods:
            if method not in figures:
                continue
            published = figures[method]
            printed = (published[0] if published else None, published[1] if len(published) > 1 else None)
            found = records.get((row, method), [])
            values = np.array([record["value"] for record in found])
            facts: dict[str, Any] = {"folds": len(found), "seconds": sum(record["seconds"] for record in found)}
            if len(values):
                facts |= {"mean": float(values.mean()), "spread": float(values.std())}
            if (row, method) in problems:
                what, reason = problems[row, method]
                yield Cell(row, method, *printed, what, reason=reason, **facts)
                continue
            what = status(table, row, published, facts["mean"], facts["spread"])
            yield Cell(row, method, *printed, what, notes=tuple(_notes(table, row, method, what)), **facts)


def _notes(table: Table, row: str, method: str, what: str) -> Iterable[str]:
    notes = table.notes_of(row, method)
    shown = [note.note for note in notes if note.always or what == "differs"]
    return [UNEXPLAINED] if what == "differs" and not shown else shown


def sentences(found: Iterable[Cell]) -> dict[str, list[Cell]]:
    """What is to be said, each sentence once, with the cells that it is about."""
    said: dict[str, list[Cell]] = {}
    for cell in found:
        for text in (cell.reason,) if cell.reason else cell.notes:
            said.setdefault(text, []).append(cell)
    return said


def cell_names(table: Table, about: Iterable[Cell]) -> str:
    """Cells by row and method; a row alone is all of its cells."""
    rows: dict[str, list[str]] = {}
    for cell in about:
        rows.setdefault(cell.row, []).append(cell.method)
    every = {row: len(figures) for row, figures in table.rows.items()}
    return "; ".join(row if len(m) == every[row] > 1 else f"{row}, {', '.join(m)}" for row, m in rows.items())
