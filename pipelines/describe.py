"""Describe a path: `kme-dist inspect PATH [--verify]`, or `python pipelines/describe.py PATH`.

`describe` returns plain data (for --json and for other programs), `render` prints it for people.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kme_dist.data.chunks import read_attributes, read_layout
from kme_dist.data.dataset import DATASET_FORMAT, describe_dataset, open_dataset
from kme_dist.data.places import METADATA_KEY, Place
from kme_dist.data.predictions import open_predictions
from kme_dist.data.receipts import PARQUET_STATE, PREDICTIONS_FORMAT
from kme_dist.data.store import check_name, load_arrays
from kme_dist.errors import DataError, KMEError
from kme_dist.pipelines.folder import recorded_run
from kme_dist.run.checkpoints import FORMAT as CHECKPOINT_FORMAT

MAX_COLUMNS = 40
MAX_NAMED = 3  # paths in a message


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
        raise DataError(_nothing_at(place)) from None
    format_name = str(attributes.get("format", ""))
    if not format_name.startswith("kme-dist/"):
        check_name(place, attributes)
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
        if format_name == CHECKPOINT_FORMAT:
            facts["watch"] = {name: _decimal(value) for name, value in facts["watch"].items()}
        facts["arrays"] = {name: _shape(place, name) for name in attributes.get("digests", {})}
        if "model" in attributes:
            facts["array_digests"] = attributes["digests"]
    facts["verified"] = verify
    return facts


FIGURES = {"loo_log_loss": "leave-one-out log loss", "loss": "loss", "bound": "generalisation bound"}
LEARNED = ("objective", "kernel", "target_kernel", "observation_kernel", "feature_map", "regularization", "shrinkage",
           "solver", "solver_reason", "calibration", "compression")  # fmt: skip


def model_card(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a model in the order in which a reader asks: what it is, of which data, how good, with which
    settings and versions, and which bytes."""
    known, shapes = facts.get("trained_on") or {}, facts.get("arrays", {})
    data = {
        "source": known.get("data"),
        **{key: known.get(key) for key in ("split", "rows", "digest")},
        "features": facts.get("n_features_in"),
        "feature_names": facts.get("feature_names"),
        "classes": facts.get("classes"),
    }
    history = facts.get("history") or []
    figures: dict[str, Any] = {}
    for key, title in FIGURES.items():
        value = facts.get(key)
        if isinstance(value, Mapping) and value:
            best = min(value, key=lambda name: math.inf if value[name] is None else value[name])
            figures[title] = f"{value[best]:.6g} ({best}; the best of {len(value)})" if len(value) > 1 else value[best]
        elif isinstance(value, int | float):
            figures[title] = value
    figures |= _run_figures(Path(str(facts["path"])).parent) if "://" not in str(facts["path"]) else {}
    if history:
        figures["steps"] = len(history)
    digests = facts.get("array_digests", {})
    card = {
        "model": facts["model"],
        "path": facts["path"],
        "bytes": facts["bytes"],
        "data": {key: value for key, value in data.items() if value not in (None, [])},
        "figures": figures,
        "learned": {key: facts[key] for key in LEARNED if facts.get(key) is not None},
        "settings": {key: value for key, value in facts.get("settings", {}).items() if value is not None},
        "versions": {**facts.get("versions", {}), "model format": facts.get("model_format")},
        "digests": {
            "attributes": facts.get("attributes_digest"),
            **{name: f"{digest}  {shapes.get(name, '')}" for name, digest in digests.items()},
        },
        "verified": facts["verified"],
    }
    return {key: value for key, value in card.items() if value not in ({}, None)}


def _run_figures(folder: Path) -> dict[str, Any]:
    """What the run that a model belongs to measured on its test rows."""
    summary = (recorded_run(folder) or {}).get("summary") or {}
    names = ("accuracy", "log_loss", "calibration_error", "rmse", "mae", "r2", "test_rows")
    return {f"test {name.removeprefix('test_').replace('_', ' ')}": summary[name] for name in names if name in summary}


def _nothing_at(place: Place) -> str:
    """Why a path cannot be described, and what can be instead."""
    if not (place.path.exists() if place.is_local else place.sizes()):
        return f"{place} does not exist."
    if not place.is_local:
        return f"{place}: not a kme-dist data set, model or run (looked for {place}/{METADATA_KEY})."
    if place.path.is_file():
        return f"{place} is a file; a kme-dist data set, model, checkpoint, predictions or run is a folder."
    inside = _inspectable_below(place.path)
    more = f" and {len(inside) - MAX_NAMED} more" if len(inside) > MAX_NAMED else ""
    found = f"{', '.join(str(place.path / path) for path in inside[:MAX_NAMED])}{more}"
    if (place.path / "job.json").is_file():
        advice = f"see `kme-dist jobs status {place.name} --root {place.path.parent.parent}`"
        return f"{place} is the folder of a job; {advice}{f', or inspect {found}' if inside else ''}."
    problem = f"{place}: not a kme-dist data set, model or run"
    return (
        f"{problem}, but a folder with some; inspect {found}." if inside else f"{problem} (looked for {METADATA_KEY})."
    )


def _inspectable_below(folder: Path, depth: int = 3) -> list[Path]:
    """Data sets, models, checkpoints, predictions and runs in a folder, relative to it.

    The last by name come first: of checkpoints and of dated jobs these are the newest.
    """
    found = []
    for path in sorted(folder.iterdir(), reverse=True):
        if path.name.startswith(".") or not path.is_dir():
            continue
        if any((path / key).is_file() for key in (METADATA_KEY, PARQUET_STATE, "run.json")):
            found.append(Path(path.name))
        elif depth > 1:
            found += [path.name / below for below in _inspectable_below(path, depth - 1)]
    return found


def _decimal(value: float | str) -> float | str:
    """A number of a checkpoint, stored in hexadecimal to keep every bit. Infinity stays text, which JSON has."""
    number = float.fromhex(value) if isinstance(value, str) else value
    return number if math.isfinite(number) else str(number)


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
        "first_skipped": [f"row {row}: {why}" for row, why in found.first_skipped],
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
