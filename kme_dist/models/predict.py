"""Batch inference: apply a model to every chunk of an input exactly once, in this process or on a cluster.

    import kme_dist as kme
    kme.predict("model.zarr", "rows.zarr", "scores.zarr")                              # label and probability
    kme.predict(model, "parquet-folder", "scores", executor=client, format="parquet",
                outputs=("label", "entropy"), expectations={"cost": [0, 1, 5]}, top_k=3)
    kme.open_predictions("scores.zarr").labels(0, 10)

A second call computes only what is missing: chunks left by an interruption, or rows appended since. Workers open model
and data by their paths, so both must be where every worker can read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import expectation, with_argmax
from kme_dist.core.kernels.base import row_blocks
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import short_digest
from kme_dist.data.lazy import open_rows
from kme_dist.data.places import Place
from kme_dist.data.predictions import Field, OutputLayout, Receipt
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
FORMATS = ("zarr", "parquet")
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
    def of_regressor(cls, outputs: Sequence[str], coverage: float, only_classes: Mapping[str, Any]) -> Outputs:
        """`only_classes` are settings that require classes, by name."""
        for name in (name for name, value in only_classes.items() if value):
            raise ConfigError(f"{name} requires a model of classes; remove it for a regressor")
        unknown = [name for name in outputs if name not in REGRESSION_OUTPUTS]
        if unknown or not outputs:
            seen = repr(unknown[0]) + " is not an output of a regressor" if unknown else "empty"
            raise ConfigError(f"outputs: {seen}; choose from {', '.join(REGRESSION_OUTPUTS)}")
        if not 0 < coverage < 1:
            raise ConfigError(f"coverage={coverage!r}: must be a number between 0 and 1")
        return cls(tuple(n for n in REGRESSION_OUTPUTS if n in outputs), (), False, 0, float(coverage))

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

    def numeric_fields(self, ids: tuple[str, str] | None) -> tuple[Field, ...]:
        """Of a regressor; intervals are lower and upper ends. Double: targets may be far from 0."""
        found = [Field(*ids)] if ids is not None else []
        return (*found, *(Field(name, "float64", (2,) if name == "interval" else ()) for name in self.names))

    def fields(self, m: int, ids: tuple[str, str] | None) -> tuple[Field, ...]:
        shapes = {"label": ("int32", ()), "probability": ("float32", (m,)), "decision": ("float32", (m,))}
        found = [Field(*ids)] if ids is not None else []
        found += [Field(name, *shapes.get(name, ("float32", ()))) for name in self.names]
        found += [Field(f"expectation/{name}", "float32") for name, _ in self.expectations]
        if self.top_k:
            found += [Field("top_label", "int32", (self.top_k,)), Field("top_probability", "float32", (self.top_k,))]
        return tuple(found)


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
    out: str | Path,
    *,
    executor: Any = None,
    outputs: Sequence[str] | None = None,
    coverage: float = 0.9,
    expectations: Mapping[str, Any] | None = None,
    raw_expectations: bool = False,
    top_k: int | None = None,
    format: str = "zarr",
    split: str | None = None,
    like: Any = None,
    id_column: str | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    from_scratch: bool = False,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> PredictionOutcome:
    """Predict every row of `data` and store the result at `out`, chunk by chunk, each exactly once.

    Parameters
    ----------
    model : path of a saved model or of a run folder, or a fitted model (which is saved beside `out`, for the workers)
    data : a data set or its path, a Parquet file or folder, a NumPy or Dask array
    executor : None (this process), a `distributed.Client`, or an executor of `kme_dist.run.executors`
    outputs : any of "label", "probability", "decision" (raw f), "entropy", "rkhs_entropy"; of a regressor "mean",
        "std", "interval" (None: label and probability, or all three)
    coverage : of the intervals of a regressor
    expectations : name -> g, for E[g(Y) | x] under the probabilities; forms of g: `models.expressions`
    raw_expectations : Σ_c g(c) f_c(x) instead, of the decision probabilities: may exceed the values of g
    top_k : number of top classes, as `top_label` and `top_probability`
    format : "zarr" (arrays in one group) or "parquet" (one file for each chunk)
    split : of a data set; None takes all rows
    like : a data set whose encoding is used for Parquet; id_column : a column to copy to the output
    dtype : "float32", "float64", or "auto": single precision if it gives the same probabilities to 1e-3
    overwrite : replace the predictions of another model, or of data that changed
    from_scratch : recompute every chunk, also finished ones
    progress : called with the rows done and the total rows
    watch : called with the chunks done, failed and in total; the rows done; and `retried`

    Returns
    -------
    PredictionOutcome : counts, seconds, and chunks that could not be computed (`quarantined`), which have no outputs
    """
    place = Place.of(out)
    address, digest, fitted = _locate(model, place)
    numeric = not hasattr(fitted, "classes_")
    if isinstance(outputs, str):
        outputs = (outputs,)
    if numeric:
        _check_one_output(fitted)
        of_classes = {"expectations": expectations, "top_k": top_k}
        wanted = Outputs.of_regressor(REGRESSION_OUTPUTS if outputs is None else outputs, coverage, of_classes)
    else:
        given = ("label", "probability") if outputs is None else outputs
        wanted = Outputs.of(given, expectations, raw_expectations, top_k, fitted.classes_)
    if format not in FORMATS:
        raise ConfigError(f"format={format!r} is unknown; choose 'zarr' or 'parquet'")
    names = getattr(fitted, "feature_names_in_", None)
    source = open_rows(
        data,
        features=int(fitted.n_features_in_),
        feature_names=None if names is None else [str(name) for name in names],
        split=split,
        like=like,
        id_column=id_column,
    )
    if source.id_field is not None and source.id_field[1] == "text" and format == "zarr":
        raise ConfigError(f"id_column={id_column!r} is text, which Zarr arrays cannot hold; choose format='parquet'")
    working = _precision(fitted, dtype)
    classes = [] if numeric else fitted.classes_.tolist()
    fields = wanted.numeric_fields(source.id_field) if numeric else wanted.fields(len(classes), source.id_field)
    layout = OutputLayout(place.address, format, source.source.output_rows, fields, tuple(classes))
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
        computed_from["expected_under"] = "decisions" if raw_expectations else "probabilities"
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
    return run_chunks(
        state,
        layout,
        source,
        predict_chunk,
        (plan,),
        executor=executor if hasattr(executor, "stream") else executor_for(executor),
        overwrite=overwrite,
        from_scratch=from_scratch,
        progress=progress,
        watch=watch,
    )


def predict_chunk(plan: PredictionPlan, chunk: int, identity: str, rows: RowsRef) -> Receipt:
    """On a worker: read, compute, store, write the receipt."""
    if (receipt := recorded_chunk(plan.layout, plan.job, chunk, identity)) is not None:
        return receipt
    return compute_chunk(plan, chunk, identity, rows)


def compute_chunk(plan: PredictionPlan, chunk: int, identity: str, rows: RowsRef) -> Receipt:
    scorer = _scorer(plan.model, plan.digest, plan.dtype)
    X, _ = rows.read()
    ids = None if rows.id_field is None else rows.read_ids(0, rows.count)
    X = X.reshape(len(X), -1)
    if len(X) != rows.count:
        raise DataError(f"chunk {chunk} has {len(X)} rows, expected {rows.count}")
    _check_finite(X, chunk * plan.layout.chunk_rows)
    arrays = scorer.outputs(X, plan.wanted)
    if ids is not None:
        arrays["row" if "row" in {f.name for f in plan.layout.fields} else "id"] = ids
    return store_chunk(plan.layout, plan.job, chunk, identity, arrays, rows.count)


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
    source = open_rows(data, features=int(fitted.n_features_in_), split=split)
    dtype = _precision(fitted, "auto")
    wide, d, m = np.dtype(dtype).itemsize, source.source.features, len(getattr(fitted, "classes_", (0, 1)))
    centres = int(fitted.embedding_.weights.shape[0])
    held = centres * (d + m) * 4 + centres * (2 * (d + 2) + m) * wide
    chunk = source.source.output_rows * (3 * 4 * d + 2 * 8 * d + wide * d + 8 * 4 * m)
    tile = mce.HOST_TILE[0] * (mce.HOST_TILE[1] + 4 * (d + 2)) * wide
    return PROCESS_BYTES + held + chunk + tile


def _check_finite(X: np.ndarray, first_row: int) -> None:
    if X.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(X.sum(dtype=np.float64)):
            return
    bad = np.argwhere(~np.isfinite(X))
    if len(bad):
        row, column = (int(index) for index in bad[0])
        raise DataError(f"row {first_row + row}, feature {column}: the value is {X[row, column]}, must be finite")
