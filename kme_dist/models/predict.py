"""Batch inference: apply a model to every chunk of an input exactly once, in this process or on a cluster.

    import kme_dist as kme
    kme.predict("model.zarr", "rows.zarr", "scores.zarr")                              # label and probability
    kme.predict(model, "parquet-folder", "scores", executor=client, format="parquet",
                outputs=("label", "entropy"), expectations={"cost": [0, 1, 5]}, top_k=3)
    kme.open_predictions("scores.zarr").labels(0, 10)
    kme.predict("runs/x", "new.csv", "scores.csv")              # columns by name, encoded like the training rows
    kme.predict(model, data_frame)                              # without a path: a table of the same columns

A second call computes only what is missing: chunks left by an interruption, or rows appended since. Workers open model
and data by their paths, so both must be where every worker can read them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import Dataset, open_dataset, short_digest
from kme_dist.data.encode import Encoder
from kme_dist.data.frames import Unseen, is_table, unseen_words
from kme_dist.data.lazy import ParquetRows, open_rows
from kme_dist.data.new_rows import ModelColumns, StagedRows, needs_staging, staged
from kme_dist.data.places import Place
from kme_dist.data.predictions import OutputLayout, join_as_csv
from kme_dist.data.readers import Source, open_source
from kme_dist.data.receipts import Receipt
from kme_dist.data.rows import RowsRef
from kme_dist.data.validation import object_rows
from kme_dist.errors import ConfigError, DataError, warn
from kme_dist.failpoints import passing
from kme_dist.models.base import Estimator, load, model_place
from kme_dist.models.objects import check_objects
from kme_dist.models.outputs import Asked, Outputs, Scorer, classes_of, skipped_words
from kme_dist.run.predict import (
    ChunkTask,
    PredictionOutcome,
    Progress,
    Watch,
    recorded_chunk,
    run_chunks,
    store_chunk,
)
from kme_dist.run.scaling_model import PROCESS_BYTES
from kme_dist.run.workers import executor_for

FORMATS = ("zarr", "parquet", "csv")
_SUFFIXES = {"zarr": "zarr", "parquet": "parquet", "pq": "parquet", "csv": "csv"}
MODEL_CHANGES = ("refuse", "recompute")
MODELS = ("MCEClassifier", "CENClassifier", "ASKLClassifier", "CMERegressor")  # what batch inference can apply


@dataclass(frozen=True)
class PredictionPlan:
    """What a worker needs to predict a chunk: plain data, the same for all workers."""

    model: str
    digest: str
    dtype: str
    wanted: Outputs


def predict(
    model: Any,
    data: Any,
    out: str | Path | None = None,
    *,
    executor: Any = None,
    outputs: Sequence[str] | None = None,
    coverage: float = 0.9,
    expectations: Mapping[str, Any] | None = None,
    raw_expectations: bool = False,
    top_k: int | None = None,
    format: str | None = None,
    split: str | None = None,
    like: Any = None,
    id_column: str | None = None,
    unseen: str = "zeros",
    dtype: str = "auto",
    overwrite: bool = False,
    from_scratch: bool = False,
    on_model_change: str = "refuse",
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Any:
    """Predict every row of `data` and store the result at `out`, chunk by chunk, each exactly once.

    Columns of files and tables are found by name, in any order, and encoded like the rows of the fit; other columns are
    ignored, missing ones an error. Without `out` the predictions are returned as a table.

    Parameters
    ----------
    model : path of a saved model or of a run folder, or a fitted model (which is saved beside `out`, for the workers)
    data : a data set or its path, a Parquet file or folder, a CSV or npy file (and others that `ingest` reads), a data
        frame or an Arrow table, a NumPy or Dask array; sparse rows, or texts, sequences and bags, where the model takes
        them
    out : path of the predictions; None returns them, as a data frame for a data frame, else as an Arrow table
    executor : None (this process), a `distributed.Client`, or an executor of `kme_dist.run.executors`
    outputs : any of "label", "probability", "decision" (raw f), "entropy", "rkhs_entropy"; of a regressor "mean",
        "std", "interval" (None: label and probability, or all three)
    coverage : of the intervals of a regressor
    expectations : name -> g, for E[g(Y) | x] under the probabilities; forms of g: `models.expressions`
    raw_expectations : Σ_c g(c) f_c(x) instead, of the decision probabilities: may exceed the values of g
    top_k : number of top classes, as `top_label` and `top_probability`
    format : "zarr" (arrays in one group), "parquet" (one file for each chunk) or "csv" (one file); None: by the name of
        `out`, Zarr without a suffix
    split : of a data set; None takes all rows
    like : a data set whose encoding is used instead of the model's; id_column : a column to copy to the output
    unseen : for categories that training rows did not have: "zeros" encodes them as none of the known ones and counts
        them in `notes`, "error" refuses them
    dtype : "float32", "float64", or "auto": double for files and tables, for data sets and Dask arrays single precision
        if it gives the same probabilities to 1e-3
    overwrite : replace the predictions of another model, or of data that changed
    from_scratch : recompute every chunk, also finished ones
    on_model_change : "refuse", or "recompute": replace predictions that differ in nothing but the model
    progress : called with the rows done and the total rows
    watch : called with the chunks done, failed and in total; the rows done; `retried` and `rejected` (rows skipped)

    Returns
    -------
    PredictionOutcome : counts, seconds, chunks that could not be read (`quarantined`) and the number of rows whose
        input or output is not finite (`skipped_rows`); neither have outputs
    """
    if on_model_change not in MODEL_CHANGES:
        raise ConfigError(f"on_model_change={on_model_change!r} is unknown; choose {' or '.join(MODEL_CHANGES)}")
    asked = Asked(outputs, expectations, raw_expectations, top_k, coverage)
    if out is None:
        return _as_table(model, data, asked, split=split, like=like, id_column=id_column, unseen=unseen, dtype=dtype)
    place = Place.of(out)
    format = _format_of(place, format)
    parts = _csv_parts(place, overwrite) if format == "csv" else place
    with contextlib.ExitStack() as stack:
        address, digest, fitted = _locate(model, parts)
        wanted = asked.of(fitted)
        columns, ignored = columns_of(fitted, like), list[str]()
        if needs_staging(data):
            rows = staged(data, parts, columns, unseen=unseen, id_column=id_column)
            data, ignored = stack.enter_context(rows)
        _check_rows(fitted, data)
        source = open_rows(data, columns, split=split, id_column=id_column, unseen=unseen)
        if source.id_field is not None and source.id_field[1] == "text" and format == "zarr":
            raise ConfigError(
                f"id_column={id_column!r} is text, which Zarr arrays cannot hold; choose format='parquet'"
            )
        outcome = _predict_rows(
            (address, digest, fitted),
            source,
            wanted,
            OutputLayout(parts.address, "parquet" if format == "csv" else format, source.source.output_rows, (), ()),
            dtype=dtype,
            executor=executor if hasattr(executor, "stream") else executor_for(executor),
            overwrite=overwrite or format == "csv",
            from_scratch=from_scratch,
            on_model_change=on_model_change,
            progress=progress,
            watch=watch,
        )
        if format == "csv":
            join_as_csv(parts, place)
            if not outcome.quarantined:
                parts.delete_all()
            outcome = dataclasses.replace(outcome, path=place.address)
        found = getattr(source.source, "unseen", {}) | outcome.unseen
        return dataclasses.replace(outcome, unseen=found, notes=_notes(ignored, source.source, found))


def _predict_rows(
    model: tuple[str, str, Any], source: RowsRef, wanted: Outputs, layout: OutputLayout, *, dtype: str, **how: Any
) -> PredictionOutcome:
    address, digest, fitted = model
    format, classes = layout.format, classes_of(fitted)
    exact = source.source.kind in ("parquet", "array") or isinstance(source.source, StagedRows)
    working = "float64" if dtype == "auto" and exact else _precision(fitted, dtype)
    fields = wanted.fields(len(classes), source.id_field)
    layout = dataclasses.replace(layout, fields=fields, classes=tuple(classes))
    computed_from = {
        "model": digest,
        "outputs": [[field.name, field.dtype, list(field.row_shape)] for field in fields],
        "expectations": [[name, list(values)] for name, values in wanted.expectations],
        "precision": working,
        "format": format,
        "chunk_rows": source.source.output_rows,
        "data": source.describe(),
    }
    if wanted.expectations:  # older records have no such entry and only raw expectations
        computed_from["expected_under"] = "decisions" if wanted.raw_expectations else "probabilities"
    if "interval" in wanted.names:
        computed_from["coverage"] = wanted.coverage
    job = short_digest(computed_from)
    state = {
        "job": job,
        "computed_from": computed_from,
        "model": address,
        "rows": source.count,
        "chunk_rows": source.source.output_rows,
        "layout": format,
        "identified_by": source.identified_by,
        "classes": classes,
        "fields": [{"name": f.name, "dtype": f.dtype, "row_shape": list(f.row_shape)} for f in fields],
    }
    plan = PredictionPlan(address, digest, working, wanted)
    return run_chunks(state, layout, source, predict_chunk, (plan,), **how)


def _format_of(place: Place, format: str | None) -> str:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format={format!r} is unknown; choose 'zarr', 'parquet' or 'csv'")
    stem, _, suffix = place.name.rpartition(".")
    if format is not None or not stem:
        return format or "zarr"
    if suffix.lower() not in _SUFFIXES:
        raise ConfigError(
            f"{place}: predictions are not written as .{suffix}; choose a name in .csv, .parquet or .zarr, or give the "
            "format: zarr, parquet or csv"
        )
    return _SUFFIXES[suffix.lower()]


def _csv_parts(place: Place, overwrite: bool) -> Place:
    """Where the chunks of a CSV file are stored until it is complete."""
    if not place.is_local:
        raise ConfigError(f"{place}: CSV is written to a local disk only; choose format='parquet'")
    parts = place.sibling(f".{place.name}.parts")
    if place.path.is_dir() or (place.path.exists() and not overwrite and not parts.path.exists()):
        raise ConfigError(f"{place} exists; choose another path, or replace the file with --overwrite")
    return parts


def columns_of(fitted: Any, like: Any = None) -> ModelColumns:
    """The columns of the rows of a model, with the encoding of the data set `like` instead of its own."""
    names, encoding = fitted._names_of_rows(), fitted.encoding_
    if like is not None:
        encoding = (like if isinstance(like, Dataset) else open_dataset(like)).schema
    return ModelColumns(fitted._width, None if names is None else tuple(names), encoding)


def _notes(ignored: Sequence[str], source: Any, unseen: Unseen) -> tuple[str, ...]:
    """One line on columns that were not used, one on unknown categories."""
    ignored = ignored or getattr(source, "ignored", [])
    shown = ", ".join(map(repr, ignored[:12])) + (f" and {len(ignored) - 12} more" if len(ignored) > 12 else "")
    lines = [f"ignored columns that the model does not use: {shown}" if ignored else "", unseen_words(unseen)]
    return tuple(line for line in lines if line)


# --- tables in, tables out ------------------------------------------------------------------------------------


class TableScorer:
    """Predictions of a table, block by block, in this process: what `kme-dist score` writes."""

    def __init__(
        self,
        fitted: Any,
        source: Source,
        wanted: Outputs,
        *,
        like: Any = None,
        id_column: str | None = None,
        unseen: str = "zeros",
        dtype: str = "float64",
    ) -> None:
        columns = columns_of(fitted, like)
        schema = columns.schema_for(source, id_column)
        self._encoder = Encoder(source, schema, [] if id_column is None else [id_column], unseen=unseen)
        self._ignored = columns.ignored(source, schema, id_column)
        self._scorer, self._wanted = Scorer(fitted, dtype), wanted

    def tables(self) -> Iterator[pa.Table]:
        """One for each block of the source; without rows a single one, with its columns."""
        empty = True
        for block in self._encoder.encoded():
            ids = next(iter(block.extras.values()), None)
            yield self._scorer.table(block.X, self._wanted, ids, block.rejected)
            empty = False
        if empty:
            none = [pa.array([], pa.string()) for _ in self._encoder.extras]
            yield self._scorer.table(np.zeros((0, 0)), self._wanted, *none)

    @property
    def unseen(self) -> Unseen:
        """Unknown categories in the tables so far."""
        return self._encoder.unseen

    @property
    def skipped(self) -> dict[int, str]:
        """Rows of the tables so far that have no prediction, with the reasons."""
        return self._scorer.skipped

    @property
    def notes(self) -> tuple[str, ...]:
        words = skipped_words(self.skipped)
        return _notes(self._ignored, None, self.unseen) + ((words,) if words else ())


def _as_table(
    model: Any,
    data: Any,
    asked: Asked,
    *,
    split: str | None,
    like: Any,
    id_column: str | None,
    unseen: str,
    dtype: str,
) -> Any:
    """The predictions of rows that fit in memory."""
    fitted = load(model) if isinstance(model, str | Path) else model
    _check_model(fitted)
    wanted = asked.of(fitted)
    dtype = "float64" if dtype == "auto" else _precision(fitted, dtype)
    if needs_staging(data) or is_table(data):
        columns = columns_of(fitted, like)
        opened = open_source(Place.of(data).address if isinstance(data, str | Path) else data, columns.file_options)
        tables = TableScorer(fitted, opened, wanted, like=like, id_column=id_column, unseen=unseen, dtype=dtype)
        table = pa.concat_tables(tables.tables())
        _warn(tables.unseen, tables.skipped)
        return table.to_pandas().set_axis(data.index) if hasattr(data, "isna") else table
    _check_rows(fitted, data)
    rows = open_rows(data, columns_of(fitted, like), split=split, id_column=id_column, unseen=unseen)
    X = _flat(rows.read()[0])
    ids = None if rows.id_field is None else pa.array(rows.read_ids(0, rows.count))
    scorer = Scorer(fitted, dtype)
    table = scorer.table(X, wanted, ids, rows.rejected())
    _warn(rows.source.unseen_in(*rows.ranges[0]) if isinstance(rows.source, ParquetRows) else {}, scorer.skipped)
    return table


def _warn(unseen: Unseen, skipped: dict[int, str]) -> None:
    """Warn of rows in memory with unknown categories, and of those without a prediction."""
    for words in (unseen_words(unseen), skipped_words(skipped)):
        if words:
            warn(words)


def predict_chunk(plan: PredictionPlan, task: ChunkTask, rows: RowsRef) -> Receipt:
    """On a worker: read, compute, store, write the receipt."""
    if (receipt := recorded_chunk(task)) is not None:
        return receipt
    return compute_chunk(plan, task, rows)


def compute_chunk(plan: PredictionPlan, task: ChunkTask, rows: RowsRef) -> Receipt:
    passing("predict.before_chunk")
    scorer = _scorer(plan.model, plan.digest, plan.dtype)
    X, _ = rows.read()
    ids = None if rows.id_field is None else rows.read_ids(0, rows.count)
    X = _flat(X)
    if len(X) != rows.count:
        raise DataError(f"chunk {task.chunk} has {len(X)} rows, expected {rows.count}")
    arrays, skipped = scorer.checked_outputs(X, plan.wanted, rows.rejected())
    unseen = rows.source.unseen_in(*rows.ranges[0]) if isinstance(rows.source, ParquetRows) else None
    if ids is not None:
        arrays["row" if "row" in {f.name for f in task.layout.fields} else "id"] = ids
    return store_chunk(task, arrays, features=X, skipped=skipped, unseen=unseen)


@devices.computed_once(2)
def _scorer(address: str, digest: str, dtype: str) -> Scorer:
    found = model_digest(Place.of(address))
    if found != digest:
        raise ConfigError(f"the model {address} has changed since this job started; restart with --from-scratch")
    return Scorer(load(address), dtype)


def _locate(model: Any, out: Place) -> tuple[str, str, Any]:
    """Address, digest and the model; a model in memory is saved beside the output first."""
    if isinstance(model, str | Path):
        place = model_place(model)
    else:
        _check_model(model)
        place = out.sibling(f"{out.name}.model")
        model.save(place.address)
    digest, fitted = model_digest(place), load(place.address)
    _check_model(fitted)
    return place.address, digest, fitted


def _check_model(model: Any) -> None:
    """Raise an error for an object without class probabilities from an embedding: only those are computed by chunk."""
    kind = type(model).__name__
    if not isinstance(model, Estimator):
        raise ConfigError(f"model: must be a fitted model or the path of a saved one, got {kind}")
    if not model._BATCHED:
        own = next((name for name in ("predict", "evaluate") if hasattr(model, name)), None)
        instead = f"; use its own {own}: model.{own}(X)" if own else ""
        raise ConfigError(f"model: batch inference takes {', '.join(MODELS)}, not {kind}{instead}")
    if not hasattr(model, "embedding_"):
        raise ConfigError(f"model: this {kind} is not fitted; call fit first")


def model_digest(place: Place) -> str:
    """Identifies the content of a saved model."""
    try:
        attributes = read_attributes(place)
    except FileNotFoundError:
        raise DataError(f"{place}: no model found; create one with `kme-dist run` or `model.save(path)`") from None
    return str(attributes.get("attributes_digest"))


def _precision(model: Any, dtype: str) -> str:
    if dtype not in ("auto", "float32", "float64"):
        raise ConfigError(f"dtype={dtype!r} is unknown; choose 'auto', 'float32' or 'float64'")
    if dtype != "auto":
        return dtype
    if not isinstance(model.embedding_, mce.Embedding) or not hasattr(model, "classes_"):
        return "float64"
    return mce.sufficient_precision(model.embedding_, probabilities=model.probabilities)


def planned_bytes(model: str | Path, data: Any, *, split: str | None = None) -> int:
    """Peak memory of prediction on a worker: Python with its libraries, the model twice (as stored and as prepared),
    one chunk of rows as read, scaled and prepared, its outputs, and a tile."""
    fitted = load(model)
    source = open_rows(data, columns_of(fitted, None), split=split)
    dtype = _precision(fitted, "auto")
    wide, d, m = np.dtype(dtype).itemsize, source.source.features, len(getattr(fitted, "classes_", (0, 1)))
    centres = int(fitted.embedding_.weights.shape[0])
    held = centres * (d + m) * 4 + centres * (2 * (d + 2) + m) * wide
    chunk = source.source.output_rows * (3 * 4 * d + 2 * 8 * d + wide * d + 8 * 4 * m)
    tile = mce.HOST_TILE[0] * (mce.HOST_TILE[1] + 4 * (d + 2)) * wide
    return PROCESS_BYTES + held + chunk + tile


def _check_rows(model: Any, data: Any) -> None:
    """Refuse sparse rows, texts and bags for models that do not take them; other rows are checked where they are
    opened. Bags that are not finite are no error: they have no prediction."""
    if not model._width and (objects := object_rows(data)) is not None:
        check_objects(model.kernel_, objects, like=model.embedding_.centres, finite=False)
    if hasattr(data, "tocsr") and not model._SPARSE:
        raise DataError(f"{type(model).__name__} does not take sparse rows; pass dense ones: X.toarray()")


def _flat(X: Any) -> Any:
    """Rows that are arrays (images) as vectors; sparse rows, texts and bags as they are."""
    return X.reshape(len(X), -1) if isinstance(X, np.ndarray) else X
