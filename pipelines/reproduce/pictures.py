"""Pictures of a reproduced table, drawn from the records of its folds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kme_dist.pipelines.reproduce.published import Table
from kme_dist.report import page as draw

Records = Mapping[tuple[str, str], list[dict[str, Any]]]


def of(name: str, table: Table, records: Records) -> list[draw.Picture]:
    """The pictures of a table, as far as its folds are finished."""
    return PICTURES[name](table, records) if name in PICTURES and records else []


def _starts(table: Table, records: Records) -> list[draw.Picture]:
    histories = {
        row: found[0]["history"]
        for (row, method), found in records.items()
        if method == "after learning" and found[0]["history"]
    }
    if not histories:
        return []
    caption = "Objective, risk and complexity over 500 full-gradient steps from both starts."
    return [draw.Picture("Learning from two starts", draw.learning_curves(histories), caption, wide=True)]


PICTURES: dict[str, Callable[[Table, Records], list[draw.Picture]]] = {"hnr-figure-1": _starts}
