"""Ingest a table: `kme-dist ingest SOURCE DEST`, or `python pipelines/ingest.py SOURCE DEST --label COL`.

`run` takes plain values (as from a command line or a config file), shows progress, and returns the data set. `STAGE` is
the first stage of a run: the rows of `data.source`, split into `train` and `test`, in data.zarr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kme_dist.config import Config
from kme_dist.data.append import append
from kme_dist.data.dataset import Dataset
from kme_dist.data.frames import unseen_words
from kme_dist.data.ingest import ingest
from kme_dist.data.schema import announce
from kme_dist.errors import ConfigError, KMEError, plural
from kme_dist.pipelines import tables
from kme_dist.pipelines.folder import digest, recorded_stages
from kme_dist.pipelines.progress import RunProgress
from kme_dist.pipelines.stages import Run, Stage

DATA = "data.zarr"


def run(
    source: Any,
    dest: str | Path,
    *,
    label: str | int | None = None,
    weight: str | int | None = None,
    like: str | None = None,
    unseen: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    task: str = "auto",
    one_hot: Sequence[str] | None = None,
    ordinal: Sequence[str] = (),
    categories: Sequence[str] = (),
    missing: str | float = "auto",
    dtype: str = "auto",
    shuffle: int | None = None,
    split: str | None = None,
    split_key: str | None = None,
    split_column: str | None = None,
    stratify: bool = False,
    format: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    encoding: str = "utf-8",
    decimal: str = ".",
    thousands: str = "",
    percent: bool = False,
    strip: bool | None = None,
    compression: str = "auto",
    memory: int | str = "512MiB",
    overwrite: bool = False,
    add: bool = False,
    again: bool = False,
    quiet: bool = False,
    client: Any = None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> Dataset:
    """Ingest `source` into `dest`, or with `add` append its rows to the existing data set; `again` appends them also if
    they are those of the last append.

    `missing` is auto, error, drop, mean, median, indicator or a number, also as text. The other options are those of
    `kme_dist.data.ingest.ingest`.
    """
    files: dict[str, Any] = {"format": format, "delimiter": delimiter, "header": header, "encoding": encoding}
    written: dict[str, Any] = {"decimal": decimal, "thousands": thousands, "percent": percent, "strip": strip}
    if unseen is not None and (like is None or add):
        raise ConfigError("--unseen requires --like: categories are unknown to the encoding of another data set")
    if again and not add:
        raise ConfigError("--again requires --append: it appends rows that are those of the last append")
    with RunProgress(sys.stderr, quiet=quiet or progress is not None) as shown:
        if add:
            count = progress or shown.count
            return append(dest, source, split=split, again=again, memory=memory, progress=count, **files)
        data = ingest(
            source,
            dest,
            label=label,
            weight=weight,
            like=like,
            unseen=unseen or "error",
            features=None if features is None else tuple(features),
            exclude=tuple(exclude),
            task=task,
            one_hot="auto" if one_hot is None else tuple(one_hot),
            ordinal=tuple(ordinal),
            categories=tuple(categories),
            missing=_number_or_word(missing),
            dtype=dtype,
            shuffle=shuffle,
            split=split,
            split_key=split_key,
            split_column=split_column,
            stratify=stratify,
            compression=compression,
            memory=memory,
            overwrite=overwrite,
            client=client,
            progress=progress or shown.count,
            **files,
            **written,
        )
    if found := unseen_words(data.attributes["source"].get("unseen", {})):
        announce([f"{source}: {found}"])
    return data


def _number_or_word(value: str | float) -> str | float:
    try:
        return float(value)
    except ValueError:
        return value


def _work(run: Run) -> dict[str, Any]:
    client = getattr(run.executor, "client", None) if isinstance(run.source, tables.Large) else None
    dest = run.folder.path / DATA
    data = tables.stored(run.config.data, dest, run.source, client=client, progress=run.listener.progress)
    divided = tables.is_divided(data)
    facts = {
        "path": data.path,
        "digest": data.digest,
        "train_rows": data.split_rows("train" if divided else None),
        "test_rows": data.split_rows("test") if divided else 0,
        "features": data.features,
        "classes": len(data.classes or ()),
    }
    nouns = {"train_rows": "training row", "test_rows": "test row", "features": "feature"}
    nouns |= {"classes": "class"} if data.classes is not None else {}
    counts = [f"{facts[key]:,} {plural(facts[key], noun)}" for key, noun in nouns.items()]
    run.listener.say(f"{run.name}: {', '.join(counts)}{', numeric targets' if data.classes is None else ''}")
    return facts


def _inputs(run: Run) -> dict[str, Any]:
    divided = {"data": tables.fingerprint(run.config.data)}
    if not isinstance(run.source, Dataset) or tables.is_divided(run.source):
        return divided
    # A data set without splits is learned from as a whole, unless `kme-dist run` has split it here before.
    return divided if run.folder.is_current("ingest", divided, [DATA]) else {**divided, "whole": True}


def _outputs(run: Run) -> list[str]:
    return [] if isinstance(run.source, Dataset) else [DATA]


STAGE = Stage("ingest", _work, _inputs, _outputs, over_workers=False)


def check_source(config: Config, folder: Path) -> None:
    """ConfigError if the rows stored in a run folder come from another source than the one that the config names.

    A data set that is used in place may grow: it is not copied, and results of its rows know which they are of.
    """
    known = recorded_stages(folder).get(STAGE.name)
    if known is None or not (folder / DATA).exists():
        return
    inputs = {"data": tables.fingerprint(config.data)}
    if known["inputs"] not in (digest(inputs), digest({**inputs, "whole": True})):
        raise ConfigError(
            f"{folder} was made from other rows: data.source {config.data.source}, its content, or another setting "
            "of the section data has changed since; restore them, choose another output.folder, or run "
            "`kme-dist run`, which replaces the results"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Create a data set from a file, a folder or a Zarr array.")
    parser.add_argument("source")
    parser.add_argument("dest")
    parser.add_argument("--label", help="column of the classes or targets, by name or position")
    parser.add_argument("--weight", help="column of the weights of rows, by name or position")
    parser.add_argument("--like", metavar="DATA", help="data set whose encoding is reused")
    parser.add_argument("--missing", default="auto", help="auto, error, drop, mean, median, indicator, or a number")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="store the rows in a random order")
    parser.add_argument("--split", help="for example train=0.8,test=0.2")
    parser.add_argument("--split-key", help="column whose equal values stay in one split")
    parser.add_argument("--split-column", help="column that names the split")
    parser.add_argument("--stratify", action="store_true")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--append", dest="add", action="store_true", help="add the rows to the data set at DEST")
    parser.add_argument("--again", action="store_true", help="append rows also if they are those of the last append")
    parser.add_argument("--quiet", action="store_true")
    options = vars(parser.parse_args(arguments))
    try:
        data = run(options.pop("source"), options.pop("dest"), **options)
    except KMEError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
