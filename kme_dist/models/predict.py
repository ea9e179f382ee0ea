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
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import expectation, with_argmax
from kme_dist.core.kernels.base import row_blocks
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import Dataset, open_dataset, short_digest
from kme_dist.data.encode import Encoder
from kme_dist.data.frames import Unseen, is_table, unseen_words
from kme_dist.data.lazy import ParquetRows, open_rows
from kme_dist.data.new_rows import ModelColumns, StagedRows, needs_staging, staged
from kme_dist.data.places import Place
from kme_dist.data.predictions import Field, OutputLayout, Receipt, join_as_csv, parquet_table
from kme_dist.data.readers import Source, open_source
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import Estimator, load, model_place
from kme_dist.models.expressions import class_values
from kme_dist.run.predict import (
    PredictionOutcome,
    Progress,
    Watch,
    recorded_chunk,
    run_chunks,
    store_chunk,
)
from kme_dist.run.workers import executor_for

OUTPUTS = ("label", "probability", "decision", "entropy", "rkhs_entropy")
REGRESSION_OUTPUTS = ("mean", "std", "interval")  # of a CMERegressor
FORMATS = ("zarr", "parquet", "csv")
MODELS = ("MCEClassifier", "CENClassifier", "ASKLClassifier", "CMERegressor")  # what batch inference can apply
PROCESS_BYTES = 300 << 20  # of a worker with Python and all libraries, before any data


@dataclass(frozen=True)
class Outputs:
    """The outputs to compute for every row."""

    names: tuple[str, ...]
    expectations: tuple[tuple[str, tuple[float, ...]], ...]
    raw_expectations: bool
    top_k: int
    coverage: float = 0.0  # of the intervals of a regressor

    @classmethod
    def of(
        cls,
        outputs: Sequence[str],
        expectations: Mapping[str, Any] | None,
        raw_expectations: bool,
        top_k: int | None,
        classes: np.ndarray,
    ) -> Outputs:
        unknown = [name for name in outputs if name not in OUTPUTS]
        if unknown:
            raise ConfigError(f"outputs: {unknown[0]!r} is unknown; choose from {', '.join(OUTPUTS)}")
        for name in expectations or {}:
            if not re.fullmatch(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-]", name) or name == "c":
                raise ConfigError(f"invalid expectation name: {name!r}; use letters, digits, '_', '-' and '.'")
        k = 0 if top_k is None else top_k
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 0:
            raise ConfigError(f"top_k={top_k!r}: must be an integer >= 0")
        labels = classes.tolist()
        values = tuple((name, tuple(class_values(g, labels).tolist())) for name, g in (expectations or {}).items())
        if not (outputs or values or k):
            raise ConfigError(f"outputs: empty; choose from {', '.join(OUTPUTS)}")
        names = tuple(name for name in OUTPUTS if name in outputs)
        return cls(names, values, bool(raw_expectations), min(int(k), len(classes)))

    def fields(self, m: int, ids: tuple[str, str] | None) -> tuple[Field, ...]:
        """Of a model with m classes, or of a regressor: its numbers are in double, since targets may be far from 0, and
        an interval is its lower and its upper end."""
        found = [Field(*ids)] if ids is not None else []
        if self.coverage:
            return (*found, *(Field(name, "float64", (2,) if name == "interval" else ()) for name in self.names))
        shapes = {"label": ("int32", ()), "probability": ("float32", (m,)), "decision": ("float32", (m,))}
        found += [Field(name, *shapes.get(name, ("float32", ()))) for name in self.names]
        found += [Field(f"expectation/{name}", "float32") for name, _ in self.expectations]
        if self.top_k:
            found += [Field("top_label", "int32", (self.top_k,)), Field("top_probability", "float32", (self.top_k,))]
        return tuple(found)


@dataclass(frozen=True)
class Asked:
    """The outputs as a user names them; which are possible depends on the model."""

    outputs: Sequence[str] | None = None
    expectations: Mapping[str, Any] | None = None
    raw_expectations: bool = False
    top_k: int | None = None
    coverage: float = 0.9

    def of(self, fitted: Any) -> Outputs:
        """The outputs of this model; None: label and probability, or all of a regressor."""
        names = (self.outputs,) if isinstance(self.outputs, str) else self.outputs
        if hasattr(fitted, "classes_"):
            names = ("label", "probability") if names is None else names
            return Outputs.of(names, self.expectations, self.raw_expectations, self.top_k, fitted.classes_)
        _check_one_output(fitted)
        return self._of_regressor(REGRESSION_OUTPUTS if names is None else names)

    def _of_regressor(self, names: Sequence[str]) -> Outputs:
        for name in ("expectations", "top_k"):
            if getattr(self, name):
                raise ConfigError(f"{name} requires a model of classes; remove it for a regressor")
        unknown = [name for name in names if name not in REGRESSION_OUTPUTS]
        if unknown or not names:
            seen = repr(unknown[0]) + " is not an output of a regressor" if unknown else "empty"
            raise ConfigError(f"outputs: {seen}; choose from {', '.join(REGRESSION_OUTPUTS)}")
        if not 0 < self.coverage < 1:
            raise ConfigError(f"coverage={self.coverage!r}: must be a number between 0 and 1")
        return Outputs(tuple(n for n in REGRESSION_OUTPUTS if n in names), (), False, 0, float(self.coverage))


@dataclass(frozen=True)
class PredictionPlan:
    """What a worker needs to predict a chunk: plain data, the same for all workers."""

    job: str
    model: str
    digest: str
    dtype: str
    layout: OutputLayout
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
        `out`, Zarr if it ends in neither
    split : of a data set; None takes all rows
    like : a data set whose encoding is used instead of the model's; id_column : a column to copy to the output
    unseen : for categories that training rows did not have: "zeros" encodes them as none of the known ones and counts
        them in `notes`, "error" refuses them
    dtype : "float32", "float64", or "auto": double for files and tables, for data sets and Dask arrays single precision
        if it gives the same probabilities to 1e-3
    overwrite : replace the predictions of another model, or of data that changed
    from_scratch : recompute every chunk, also finished ones
    progress : called with the rows done and the total rows
    watch : called with the chunks done, failed and in total; the rows done; and `retried`

    Returns
    -------
    PredictionOutcome : counts, seconds, and chunks that could not be computed (`quarantined`), which have no outputs
    """
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
    format, classes = layout.format, _classes_of(fitted)
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
        "classes": classes,
        "fields": [{"name": f.name, "dtype": f.dtype, "row_shape": list(f.row_shape)} for f in fields],
    }
    plan = PredictionPlan(job, address, digest, working, layout, wanted)
    return run_chunks(state, layout, source, predict_chunk, (plan,), **how)


def _format_of(place: Place, format: str | None) -> str:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format={format!r} is unknown; choose 'zarr', 'parquet' or 'csv'")
    suffix = place.name.rpartition(".")[2].lower()
    return format or {"parquet": "parquet", "pq": "parquet", "csv": "csv"}.get(suffix, "zarr")


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
        self._scorer, self._wanted = _Scorer(fitted, dtype), wanted

    def tables(self) -> Iterator[pa.Table]:
        """One for each block of the source; without rows a single one, with its columns."""
        empty = True
        for block in self._encoder.encoded():
            yield self._scorer.table(block.X, self._wanted, *block.extras.values())
            empty = False
        if empty:
            ids = [pa.array([], pa.string()) for _ in self._encoder.extras]
            yield self._scorer.table(np.zeros((0, 0)), self._wanted, *ids)

    @property
    def unseen(self) -> Unseen:
        """Unknown categories in the tables so far."""
        return self._encoder.unseen

    @property
    def notes(self) -> tuple[str, ...]:
        return _notes(self._ignored, None, self.unseen)


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
        if tables.unseen:
            warnings.warn(unseen_words(tables.unseen), stacklevel=3)
        return table.to_pandas().set_axis(data.index) if hasattr(data, "isna") else table
    _check_rows(fitted, data)
    rows = open_rows(data, columns_of(fitted, like), split=split, id_column=id_column, unseen=unseen)
    X = _flat(rows.read()[0])
    _check_finite(X, 0)
    ids = [] if rows.id_field is None else [pa.array(rows.read_ids(0, rows.count))]
    return _Scorer(fitted, dtype).table(X, wanted, *ids)


def predict_chunk(plan: PredictionPlan, chunk: int, identity: str, rows: RowsRef) -> Receipt:
    """On a worker: read, compute, store, write the receipt."""
    if (receipt := recorded_chunk(plan.layout, plan.job, chunk, identity)) is not None:
        return receipt
    return compute_chunk(plan, chunk, identity, rows)


def compute_chunk(plan: PredictionPlan, chunk: int, identity: str, rows: RowsRef) -> Receipt:
    scorer = _scorer(plan.model, plan.digest, plan.dtype)
    X, _ = rows.read()
    ids = None if rows.id_field is None else rows.read_ids(0, rows.count)
    X = _flat(X)
    if len(X) != rows.count:
        raise DataError(f"chunk {chunk} has {len(X)} rows, expected {rows.count}")
    _check_finite(X, chunk * plan.layout.chunk_rows)
    arrays = scorer.outputs(X, plan.wanted)
    unseen = rows.source.unseen_in(*rows.ranges[0]) if isinstance(rows.source, ParquetRows) else None
    if ids is not None:
        arrays["row" if "row" in {f.name for f in plan.layout.fields} else "id"] = ids
    return store_chunk(plan.layout, plan.job, chunk, identity, arrays, rows.count, unseen)


class _Scorer:
    """A model, loaded and prepared once per worker."""

    def __init__(self, model: Any, dtype: str) -> None:
        self.model, self.dtype = model, dtype
        embedding = model.embedding_
        self._decide = mce.Decision(embedding, dtype) if isinstance(embedding, mce.Embedding) else embedding.decision
        self._device = "cupy" if devices.is_cupy(embedding.weights) else "numpy"

    def decision(self, X: np.ndarray) -> np.ndarray:
        """f at the rows of a chunk; on a GPU in blocks, so that the next one moves while this one is computed."""
        block = mce.DEVICE_TILE[0] if self._device == "cupy" else max(1, len(X))
        scaled = ((self.model.scaling_.apply(X[part], self.dtype), None) for part in row_blocks(len(X), block))
        found = [devices.to_host(self._decide(rows)) for rows, _ in devices.moved_ahead(scaled, self._device)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def table(self, X: np.ndarray, wanted: Outputs, ids: Any = None) -> pa.Table:
        """The outputs as a table, with the columns of a Parquet file of predictions."""
        classes = _classes_of(self.model)
        fields = wanted.fields(len(classes), None)
        arrays = self.outputs(X, wanted) if len(X) else {field.name: field.empty(0) for field in fields}
        table = parquet_table(fields, classes, arrays)
        return table if ids is None else table.add_column(0, "id", ids)

    def outputs(self, X: np.ndarray, wanted: Outputs) -> dict[str, Any]:
        if wanted.coverage:
            return _regressed(self.model, X, wanted)
        f = self.decision(X)
        p, label = self.model.probabilities(f), f.argmax(axis=1)
        stored = with_argmax(p.astype(np.float32), label)  # rounding may create ties with the first class
        arrays: dict[str, Any] = {"label": label, "probability": stored, "decision": f}
        if "entropy" in wanted.names:
            arrays["entropy"] = mce.rkhs_entropy(p)  # p is already normalised
        if "rkhs_entropy" in wanted.names:
            arrays["rkhs_entropy"] = mce.rkhs_entropy(f)
        for name, g in wanted.expectations:
            arrays[f"expectation/{name}"] = mce.expectation(f, g) if wanted.raw_expectations else expectation(p, g)
        if wanted.top_k:
            order = np.argsort(-stored, axis=1, kind="stable")[:, : wanted.top_k]
            arrays["top_label"] = order
            arrays["top_probability"] = np.take_along_axis(stored, order, axis=1)
        return arrays


def _regressed(model: Any, X: np.ndarray, wanted: Outputs) -> dict[str, Any]:
    found = model.outputs(model.scaling_.apply(X, "float64"), wanted.names, wanted.coverage)
    return {name: np.concatenate(found[name], axis=1) if name == "interval" else found[name][:, 0] for name in found}


def _classes_of(model: Any) -> list[Any]:
    """Empty for a regressor."""
    return model.classes_.tolist() if hasattr(model, "classes_") else []


def _check_one_output(model: Any) -> None:
    if model.n_outputs_ > 1:
        raise ConfigError(
            f"model: batch inference takes regressors of one target, this one has {model.n_outputs_}; use its own "
            "predict: model.predict(X)"
        )


@devices.computed_once(2)
def _scorer(address: str, digest: str, dtype: str) -> _Scorer:
    found = _model_digest(Place.of(address))
    if found != digest:
        raise ConfigError(f"the model {address} has changed since this job started; restart with --from-scratch")
    return _Scorer(load(address), dtype)


def _locate(model: Any, out: Place) -> tuple[str, str, Any]:
    """Address, digest and the model; a model in memory is saved beside the output first."""
    if isinstance(model, str | Path):
        place = model_place(model)
    else:
        _check_model(model)
        place = out.sibling(f"{out.name}.model")
        model.save(place.address)
    digest, fitted = _model_digest(place), load(place.address)
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


def _model_digest(place: Place) -> str:
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
    """Refuse sparse rows for models that do not take them; texts are refused where rows are opened."""
    if hasattr(data, "tocsr") and not model._SPARSE:
        raise DataError(f"{type(model).__name__} does not take sparse rows; pass dense ones: X.toarray()")


def _flat(X: Any) -> Any:
    """Rows that are arrays (images) as vectors; sparse rows, texts and bags as they are."""
    return X.reshape(len(X), -1) if isinstance(X, np.ndarray) else X


def _check_finite(X: Any, first_row: int) -> None:
    if devices.is_sparse(X):
        if not np.isfinite(X.data).all():
            at = int(np.flatnonzero(~np.isfinite(X.data))[0])
            row = first_row + int(np.searchsorted(X.indptr, at, side="right")) - 1
            raise DataError(f"row {row}, feature {X.indices[at]}: the value is {X.data[at]}, must be finite")
        return
    if not hasattr(X, "dtype") or X.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(X.sum(dtype=np.float64)):
            return
    bad = np.argwhere(~np.isfinite(X))
    if len(bad):
        row, column = (int(index) for index in bad[0])
        raise DataError(f"row {first_row + row}, feature {column}: the value is {X[row, column]}, must be finite")
