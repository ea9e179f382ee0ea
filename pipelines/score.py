"""`kme-dist score --model M < rows.csv > scores.csv`: small tables from stdin to stdout, without a cluster.

Input is CSV with a header, or JSON lines (one object for each row) if its first character is `{`. Columns are found by
name and encoded like the training rows.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.json as pj

from kme_dist import load
from kme_dist.data.predictions import write_csv
from kme_dist.data.readers import FileOptions, open_source
from kme_dist.errors import ConfigError, DataError, KMEError
from kme_dist.models.outputs import Asked
from kme_dist.models.predict import TableScorer, columns_of

FORMATS = ("csv", "jsonl")


class Scored(NamedTuple):
    """What was ignored, assumed or skipped, in lines, and the number of rows without a prediction."""

    notes: tuple[str, ...]
    skipped: int


def run(
    model: str,
    rows: IO[bytes],
    sink: IO[bytes],
    *,
    format: str = "csv",
    outputs: Sequence[str] | None = None,
    coverage: float = 0.9,
    id_column: str | None = None,
    unseen: str = "zeros",
) -> Scored:
    """Predict the rows of a stream and write them to `sink`."""
    if format not in FORMATS:
        raise ConfigError(f"format={format!r} is unknown; choose 'csv' or 'jsonl'")
    fitted = load(model)
    wanted = Asked(outputs, coverage=coverage).of(fitted)
    with tempfile.TemporaryDirectory(prefix="kme-score-") as folder:
        file = Path(folder) / "stdin.csv"
        with open(file, "wb") as copy:  # the reader looks at the first rows before it reads all of them
            shutil.copyfileobj(rows, copy)
        try:
            source = _opened(file, columns_of(fitted).file_options)
            scorer = TableScorer(fitted, source, wanted, id_column=id_column, unseen=unseen)
            header = True
            for table in scorer.tables():
                if format == "csv":
                    write_csv(table, sink, header=header)
                else:
                    sink.writelines(json.dumps(row).encode() + b"\n" for row in table.to_pylist())
                header = False
            sink.flush()
            return Scored(tuple(note.replace(str(file), "stdin") for note in scorer.notes), len(scorer.skipped))
        except KMEError as error:  # the copy is gone when its name is read
            error.args = (str(error).replace(str(file), "stdin"), *error.args[1:])
            raise


def _opened(file: Path, options: FileOptions) -> Any:
    with open(file, "rb") as stream:
        first = stream.read(4096).lstrip(b"\xef\xbb\xbf \r\n\t")[:1]
    if not first:
        raise DataError("stdin is empty; pass rows as CSV with a header, or as JSON lines")
    if first != b"{":
        return open_source(file, replace(options, format="csv"))
    try:
        return open_source(pj.read_json(file))
    except pa.ArrowInvalid as error:
        raise DataError(f"stdin: not valid JSON lines ({error}).") from None


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["score", *sys.argv[1:]])
