"""Describe a path: `kme-dist inspect PATH [--verify]`, or `python pipelines/describe.py PATH`.

`describe` returns plain data (for --json and for other programs), `render` prints it for people.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kme_dist.data.chunks import read_attributes, read_layout
from kme_dist.data.dataset import DATASET_FORMAT, describe_dataset, open_dataset
from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.data.predictions import PARQUET_STATE, PREDICTIONS_FORMAT, open_predictions
from kme_dist.data.store import load_arrays
from kme_dist.errors import DataError, KMEError

MAX_COLUMNS = 40


def describe(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """The facts about a data set or a group of saved arrays; with `verify` every stored byte is read and checked.

    A damaged, truncated or missing chunk raises CorruptError, which names it.
    """
    place = Place.of(path)
    if place.exists(PARQUET_STATE):
        return {**_sizes(place), **_predictions(place, verify), "verified": verify}
    try:
        attributes = read_attributes(place)
    except FileNotFoundError:
        raise DataError(
            f"{place}: not a kme-dist data set, model or run (looked for {place}/{METADATA_KEY})."
        ) from None
    format_name = str(attributes.get("format", ""))
    if not format_name.startswith("kme-dist/"):
        raise DataError(f"{place}: a Zarr group that was not written by kme-dist.")
    facts = _sizes(place)
    if format_name == DATASET_FORMAT:
        data = open_dataset(place)
        if verify:
            data.verify()
        facts.update(describe_dataset(data.attributes))
    elif format_name == PREDICTIONS_FORMAT:
        facts.update(_predictions(place, verify))
    else:
        if verify:
            load_arrays(place.address)
        facts.update({key: value for key, value in attributes.items() if key != "digests"})
        facts["arrays"] = {name: _shape(place, name) for name in attributes.get("digests", {})}
    facts["verified"] = verify
    return facts


def _sizes(place: Place) -> dict[str, Any]:
    sizes = place.sizes()
    return {"path": place.address, "objects": len(sizes), "bytes": sum(sizes.values())}


def _predictions(place: Place, verify: bool) -> dict[str, Any]:
    found = open_predictions(place)
    if verify:
        found.verify()
    hidden = ("fields", "classes", "computed_from", "chunk_rows", "quarantined")
    return {
        **{key: value for key, value in found.state.items() if key not in hidden},
        "data": found.state["computed_from"]["data"],
        "precision": found.state["computed_from"]["precision"],
        "class_names": [str(label) for label in found.classes],
        "chunks": found.chunks,
        "chunks_done": len(found.receipts()),
        "quarantined": [f"chunk {entry['chunk']}: {entry['error']}" for entry in found.quarantined],
        "arrays": {
            field.name: f"{' x '.join(map(str, (found.rows, *field.row_shape)))} {field.dtype}"
            for field in found.layout.fields
        },
    }


def _shape(place: Place, name: str) -> str:
    layout = read_layout(place, name)
    return f"{' x '.join(map(str, layout.shape)) or 'a number'} {layout.dtype}"


def render(facts: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the facts of `describe` as tables."""
    console = console or Console()
    table = Table(title=str(facts["path"]), show_header=False, title_justify="left")
    for key, value in facts.items():
        if key not in ("path", "columns", "classes", "splits", "arrays"):
            table.add_row(key.replace("_", " "), _short(value))
    console.print(table)
    if facts.get("arrays"):
        _print(console, "Arrays", ("name", "content"), list(facts["arrays"].items()))
    if facts.get("classes"):
        total = max(1, sum(facts["classes"].values()))
        rows = [(name, f"{count:,}", f"{count / total:.2%}") for name, count in facts["classes"].items()]
        _print(console, "Classes", ("class", "rows", "share"), rows)
    if facts.get("splits"):
        rows = [(name, f"{s['rows']:,}", _short(s["ranges"])) for name, s in facts["splits"].items()]
        _print(console, "Splits", ("split", "rows", "row ranges"), rows)
    if facts.get("columns"):
        keys = ("name", "minimum", "maximum", "mean", "deviation")
        lines = [[c["name"], *(f"{c[k]:.6g}" for k in keys[1:])] for c in facts["columns"]]
        _print(console, "Features", keys, lines)


def _print(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*header, title=title, title_justify="left")
    for row in rows[:MAX_COLUMNS]:
        table.add_row(*map(str, row))
    console.print(table)
    if len(rows) > MAX_COLUMNS:
        console.print(f"... and {len(rows) - MAX_COLUMNS} more (all with --json)")


def _short(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    verify = "--verify" in given
    paths = [value for value in given if value != "--verify"]
    if len(paths) != 1:
        print("usage: describe.py PATH [--verify]", file=sys.stderr)
        return 2
    try:
        render(describe(paths[0], verify))
    except KMEError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
