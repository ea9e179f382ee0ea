"""The page of a reproduced table: published and own figures side by side, coloured by agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kme_dist.pipelines.progress import duration
from kme_dist.pipelines.reproduce import pictures
from kme_dist.pipelines.reproduce.published import Table
from kme_dist.pipelines.reproduce.results import Cell, cell_names, sentences
from kme_dist.report import page as draw

TONES = {"agrees": "good", "better": "good", "differs": "warn", "failed": "bad"}
GOOD = ("agrees", "better")


def render(
    name: str,
    table: Table,
    found: Sequence[Cell],
    records: Mapping[tuple[str, str], list[dict[str, Any]]],
    facts: dict[str, Any],
) -> str:
    """The page; `facts` has quick, seconds, versions, data, computed and reused."""
    counts = {what: sum(cell.status == what for cell in found) for what in {cell.status for cell in found}}
    compared = sum(counts.get(what, 0) for what in TONES)
    good = sum(counts.get(what, 0) for what in GOOD)
    by = {(cell.row, cell.method): cell for cell in found}
    rows = [
        [row, *(_cell(table, by[row, method]) if (row, method) in by else "" for method in table.methods)]
        for row in table.rows
    ]
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str | draw.Tinted]]]] = [
        (f"{table.measure}: own figure, below it the published one", ["", *table.methods], rows)
    ]
    if said := _sentences(table, found):
        tables.append(("Where they differ, and what else is to be known", ["cells", "published", "own", ""], said))
    tables.append(("How", ["", ""], [[label, draw.Tinted(text, "text")] for label, text in _how(table, facts)]))
    work = sum(cell.seconds for cell in found)
    return draw.render_html(
        f"{name}: {table.title}",
        subtitle=table.source + (" · quick: not all folds, see below" if facts["quick"] else ""),
        headline=[
            ("Agree", f"{good} of {compared}", "within one published deviation, or better"),
            ("Differ", str(counts.get("differs", 0)), "each with a sentence below"),
            ("Failed", str(counts.get("failed", 0)), f"{counts.get('skipped', 0)} skipped"),
            ("Work", duration(work), f"of one core, {sum(cell.folds for cell in found)} folds"),
        ],
        figures=pictures.of(name, table, records),
        tables=tables,
        footer=f"{facts['versions']} · {facts['computed']} folds computed now, {facts['reused']} reused",
    )


def _cell(table: Table, cell: Cell) -> draw.Tinted:
    published = printed(table, cell)
    if cell.status == "skipped":
        return draw.Tinted("skipped", "off", published)
    if cell.mean is None:
        return draw.Tinted("failed", "bad", published)
    own = f"{own_figure(table, cell)}{' failed' if cell.status == 'failed' else ''}"
    return draw.Tinted(own, TONES.get(cell.status, "off"), f"{published} · {duration(cell.seconds)}")


def printed(table: Table, cell: Cell) -> str:
    """The published figure as text."""
    if cell.published is None:
        return "no number"
    if table.claim is not None:
        return table.claim
    spread = "" if not cell.deviation else f" ± {cell.deviation:.{table.digits}f}"
    return f"{cell.published:.{table.digits}f}{spread}"


def own_figure(table: Table, cell: Cell) -> str:
    if cell.mean is None:
        return "-"
    spread = f" ± {cell.spread:.{table.digits}f}" if cell.folds > 1 else ""
    return f"{cell.mean:.{table.digits}f}{spread}"


def _sentences(table: Table, found: Sequence[Cell]) -> list[list[str | draw.Tinted]]:
    """A line for every sentence, with the figures if it is about one cell: first of cells that were computed."""
    lines: list[list[str | draw.Tinted]] = []
    for text, about in sorted(sentences(found).items(), key=lambda item: item[1][0].status == "skipped"):
        tones = {TONES.get(cell.status, "off") for cell in about}
        own = own_figure(table, about[0]) if len(about) == 1 and about[0].status not in ("failed", "skipped") else ""
        own = own or ", ".join(sorted({cell.status for cell in about}))
        tinted = draw.Tinted(own, tones.pop() if len(tones) == 1 else "off")
        figure = printed(table, about[0]) if len(about) == 1 else ""
        lines.append([cell_names(table, about), figure, tinted, draw.Tinted(text, "text")])
    return lines


def _how(table: Table, facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("protocol", table.protocol),
        ("settings chosen", table.chosen),
        ("seeds", table.seeds),
        ("folds", table.quick.text if facts["quick"] else f"{table.folds} for every cell"),
        ("data", "synthetic, see the protocol" if table.data is None else facts["data"]),
        ("colours", "green: within one published deviation, or better (of our own folds where none is printed); amber: "
                    "differs; red: failed; uncoloured: skipped, or nothing to compare with"),
    ]  # fmt: skip
