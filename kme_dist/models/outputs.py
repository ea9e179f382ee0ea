"""What batch inference computes for every row: the names of outputs, their arrays, and their values.

    wanted = Asked(("label", "entropy"), top_k=3).of(model)
    arrays, skipped = Scorer(model, "float32").checked_outputs(X, wanted)

Rows whose features or outputs are not finite have no outputs: they are in `skipped`, each with the reason. Rows that
overflow in single precision are computed in double.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import expectation, with_argmax
from kme_dist.core.kernels.base import row_blocks
from kme_dist.data.predictions import Field, parquet_table
from kme_dist.data.validation import not_finite_rows
from kme_dist.errors import ConfigError, counted, warn
from kme_dist.models.expressions import class_values
from kme_dist.models.settings import fraction

OUTPUTS = ("label", "probability", "decision", "entropy", "rkhs_entropy")
REGRESSION_OUTPUTS = ("mean", "std", "interval")  # of a CMERegressor
_SAFE_IN_SINGLE = 1e15  # scaled features up to this have squared distances that single precision can hold


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
        wanted = self._of_regressor(REGRESSION_OUTPUTS if names is None else names)
        if "interval" in wanted.names and (words := fitted.left_out_.too_few(wanted.coverage)):
            warn(words)
        return wanted

    def _of_regressor(self, names: Sequence[str]) -> Outputs:
        for name in ("expectations", "top_k"):
            if getattr(self, name):
                raise ConfigError(f"{name} requires a model of classes; remove it for a regressor")
        unknown = [name for name in names if name not in REGRESSION_OUTPUTS]
        if unknown or not names:
            seen = repr(unknown[0]) + " is not an output of a regressor" if unknown else "empty"
            raise ConfigError(f"outputs: {seen}; choose from {', '.join(REGRESSION_OUTPUTS)}")
        fraction().check("coverage", self.coverage)
        return Outputs(tuple(n for n in REGRESSION_OUTPUTS if n in names), (), False, 0, float(self.coverage))


class Scorer:
    """A model, loaded and prepared once per worker."""

    def __init__(self, model: Any, dtype: str) -> None:
        self.model, self.dtype = model, dtype
        embedding = model.embedding_
        self._decide = mce.Decision(embedding, dtype) if isinstance(embedding, mce.Embedding) else embedding.decision
        self._device = "cupy" if devices.is_cupy(embedding.weights) else "numpy"
        self.skipped: dict[int, str] = {}  # rows of the tables so far that have no prediction, with the reasons
        self._tabled = 0

    def decision(self, X: np.ndarray) -> np.ndarray:
        """f at the rows of a chunk; rows that single precision cannot hold in double precision."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dtype == "float64":
                return self._decision(X)
            large, rows = np.zeros(len(X), bool), X
            if self._may_be_large(X):
                scaled = self.model.scaling_.apply(X, "float64")
                large = np.abs(scaled).max(axis=1, initial=0.0) > _SAFE_IN_SINGLE
                rows = np.where(large[:, None], 0, X)  # distances between the other rows must not be rounded to theirs
            f = self._decision(rows)
            large |= ~np.isfinite(f).all(axis=1)
            if large.any():
                f[large] = self._in_double._decision(X[large])
        return f

    def _may_be_large(self, X: np.ndarray) -> bool:
        """False if no feature can be large after scaling, by bounds that cost little."""
        scaling = self.model.scaling_
        shift, factor = (np.abs(part).max(initial=0.0) for part in (scaling.shift, scaling.factor))
        largest = max(float(X.max(initial=0)), -float(X.min(initial=0)))
        return bool((largest + shift) * factor > _SAFE_IN_SINGLE)

    @functools.cached_property
    def _in_double(self) -> Scorer:
        return Scorer(self.model, "float64")

    def _decision(self, X: np.ndarray) -> np.ndarray:
        """On a GPU in blocks, so that the next one moves while this one is computed."""
        block = mce.DEVICE_TILE[0] if self._device == "cupy" else max(1, len(X))
        scaled = ((self.model.scaling_.apply(X[part], self.dtype), None) for part in row_blocks(len(X), block))
        found = [devices.to_host(self._decide(rows)) for rows, _ in devices.moved_ahead(scaled, self._device)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def table(
        self, X: np.ndarray, wanted: Outputs, ids: Any = None, rejected: Mapping[int, str] | None = None
    ) -> pa.Table:
        """The outputs as a table, with the columns of a Parquet file of predictions."""
        classes = classes_of(self.model)
        fields = wanted.fields(len(classes), None)
        arrays = {field.name: field.empty(0) for field in fields}
        if len(X):
            arrays, skipped = self.checked_outputs(X, wanted, rejected)
            self.skipped |= {self._tabled + row: why for row, why in skipped.items()}
            self._tabled += len(X)
        table = parquet_table(fields, classes, arrays)
        return table if ids is None else table.add_column(0, "id", ids)

    def checked_outputs(
        self, X: np.ndarray, wanted: Outputs, rejected: Mapping[int, str] | None = None
    ) -> tuple[dict[str, Any], dict[int, str]]:
        """The outputs, and the rows without any, because their features or their outputs are not finite, or because
        they are among the `rejected` ones, which have their own reasons: these have missing values."""
        skipped = not_finite(X) | dict(rejected or {})
        if skipped:  # in their place, so that the other rows have the bits they would have had
            X = _zeroed(X, list(skipped))
        with np.errstate(over="ignore", invalid="ignore"):
            arrays, wrong = self._outputs(X, wanted)
            for field in wanted.fields(len(classes_of(self.model)), None):
                if np.dtype(field.dtype).kind == "f":  # in single precision they may be infinite
                    stored = np.asarray(arrays[field.name]).astype(field.dtype).reshape(len(X), -1)
                    unknown = np.isnan(stored) if field.name == "interval" else ~np.isfinite(stored)  # it may be open
                    wrong |= unknown.any(axis=1)
        for row in np.flatnonzero(wrong).tolist():
            largest = float(np.abs(X[row]).max())
            skipped.setdefault(row, f"the output is not finite; the largest feature is {largest:.3g}")
        if skipped:
            rows = sorted(skipped)
            for field in wanted.fields(len(classes_of(self.model)), None):
                arrays[field.name] = np.array(arrays[field.name])
                arrays[field.name][rows] = field.missing
        return arrays, skipped

    def _outputs(self, X: np.ndarray, wanted: Outputs) -> tuple[dict[str, Any], np.ndarray]:
        """The outputs, and for which rows they mean nothing."""
        if wanted.coverage:
            return _regressed(self.model, X, wanted), np.zeros(len(X), bool)
        f = self.decision(X)
        wrong = ~np.isfinite(f).all(axis=1)
        if wrong.any():
            f = np.where(wrong[:, None], 0, f)
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
        return arrays, wrong


def _regressed(model: Any, X: np.ndarray, wanted: Outputs) -> dict[str, Any]:
    found = model.outputs(model.scaling_.apply(X, "float64"), wanted.names, wanted.coverage)
    return {name: np.concatenate(found[name], axis=1) if name == "interval" else found[name][:, 0] for name in found}


def classes_of(model: Any) -> list[Any]:
    """Empty for a regressor."""
    return model.classes_.tolist() if hasattr(model, "classes_") else []


def _check_one_output(model: Any) -> None:
    if model.n_outputs_ > 1:
        raise ConfigError(
            f"model: batch inference takes regressors of one target, this one has {model.n_outputs_}; use its own "
            "predict: model.predict(X)"
        )


def not_finite(X: Any) -> dict[int, str]:
    """Rows with a feature that is not finite, with the first of them; a bag is a row; texts have none."""
    if isinstance(X, list):
        return _bags_not_finite(X)
    if devices.is_sparse(X):
        at = np.flatnonzero(~np.isfinite(X.data))[::-1]
        rows = np.searchsorted(X.indptr, at, side="right") - 1
        found = {int(row): f"feature {X.indices[i]}: the value is {X.data[i]}" for row, i in zip(rows, at, strict=True)}
        return {row: f"{found[row]}, must be finite" for row in sorted(found)}
    if not isinstance(X, np.ndarray) or X.dtype.kind != "f":
        return {}
    return not_finite_rows(X)


def _bags_not_finite(rows: list[Any]) -> dict[int, str]:
    found = {}
    for row, bag in enumerate(rows):
        if isinstance(bag, np.ndarray) and bag.dtype.kind == "f" and not np.isfinite(bag).all():
            at = tuple(np.argwhere(~np.isfinite(bag))[0].tolist())
            found[row] = f"member {at[0]} of the bag: the value is {bag[at]}, must be finite"
    return found


def _zeroed(X: Any, rows: list[int]) -> Any:
    """A copy with zeros in these rows."""
    if isinstance(X, list):
        chosen = set(rows)
        return [np.zeros_like(row) if i in chosen else row for i, row in enumerate(X)]
    X = X.copy()
    if devices.is_sparse(X):  # which keeps its structure
        X.data[np.isin(np.repeat(np.arange(X.shape[0]), np.diff(X.indptr)), rows)] = 0
    else:
        X[rows] = 0
    return X


def skipped_words(skipped: Mapping[int, str]) -> str:
    """One line on rows without a prediction; empty if there are none."""
    first = next(iter(skipped.items()), None)
    if first is None:
        return ""
    return f"no prediction for {counted(len(skipped), 'row', ',')}; the first is row {first[0]}: {first[1]}"
