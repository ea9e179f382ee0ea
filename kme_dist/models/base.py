"""The base class of all estimators: constructors store, `fit` learns, `save` writes arrays and JSON, `load` reads them.

A subclass defines:

    _RULES              rules for its settings (see `models.settings`), checked at `fit`
    _check_together     rules for combinations of settings
    _FITTED             the attribute set by `fit`
    _pack, _unpack      a fitted model to arrays and facts, and back

`fit` records the columns (`feature_names_in_`, `n_features_in_`), every later call checks them, and they are stored
with the model. Generated names of a data set (x0, x1, ...) are positions, not names. If rows come from a table with
categories, dates or missing values, the model also keeps their encoding (`encoding_`) and applies it to new tables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from kme_dist import backend as devices
from kme_dist.core.kernels import Kernel, from_config
from kme_dist.data import store
from kme_dist.data.dataset import Dataset, generated_names
from kme_dist.data.frames import (
    column_names,
    encode_table,
    for_new_rows,
    is_table,
    needs_encoding,
    split_target,
    table_schema,
    unseen_words,
    with_names,
)
from kme_dist.data.places import Place
from kme_dist.data.rows import RowsRef, Scaling, check_magnitude
from kme_dist.data.schema import Schema
from kme_dist.data.sparse import as_sparse_rows, from_parts
from kme_dist.data.validation import (
    check_collected,
    check_columns,
    check_labels,
    check_long_integers,
    check_not_path,
    check_numeric_targets,
    check_targets_given,
    not_finite_words,
    one_line,
    text_among,
)
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, warn
from kme_dist.models.objects import TEXT_ESTIMATORS, refuse_objects
from kme_dist.models.settings import RandomState, Rule, drawn_seed, plain, to_json
from kme_dist.run.executors import Executor
from kme_dist.run.workers import executor_for, job_count, local_workers

Arrays = dict[str, Any]  # NumPy arrays, or those of the model's device
Facts = dict[str, Any]
Own = Mapping[str, Any]  # user-defined classes by name: kernels and torch networks
Fit = TypeVar("Fit", bound=Callable[..., Any])

FORMAT = 1
_RUN_RECORD, _RUN_MODEL = "run.json", "model.zarr"  # of a run folder
_PACKAGES = ("kme-dist", "numpy", "scipy", "scikit-learn")  # whose versions are stored with a model
DTYPES = ("float32", "float64")
_NUMBERS: Any = [np.float64, np.float32]  # dtypes that are not converted
_SPARSE_PARTS = ("data", "indices", "indptr")
_KERNELS = ("kernel", "head", "target_kernel")  # settings that may be kernels
# What `load` opens: each class, and its module, imported on demand.
_MODULES = {
    "ASKLClassifier": "kme_dist.models.askl",
    "ASKLRegressor": "kme_dist.models.askl",
    "CENClassifier": "kme_dist.models.cen",
    "CMERegressor": "kme_dist.models.regressor",
    "ConditionalMeanEmbedding": "kme_dist.models.cme",
    "KernelBayesFilter": "kme_dist.models.bayes",
    "KernelMean": "kme_dist.models.means",
    "MCEClassifier": "kme_dist.models.mce",
    "MixtureMatching": "kme_dist.models.density",
    "OneClassSupportMeasure": "kme_dist.models.bags",
    "ParzenClassifier": "kme_dist.models.means",
    "SupportMeasureClassifier": "kme_dist.models.bags",
}


def on_workers(fit: Fit) -> Fit:
    """For `fit` of an estimator with `n_jobs`: it runs while the workers are open."""

    @functools.wraps(fit)
    def fit_on_workers(self: Estimator, *arguments: Any, **settings: Any) -> Any:
        with self._workers():
            return fit(self, *arguments, **settings)

    return cast(Fit, fit_on_workers)


class Estimator(BaseEstimator):  # type: ignore[misc]
    """The base of all estimators: settings, columns, seeds, workers, devices, saving and loading."""

    _RULES: ClassVar[Mapping[str, Rule]] = {}
    _FITTED: ClassVar[str] = "embedding_"
    _SPARSE: ClassVar[bool] = False  # whether rows may be scipy's sparse ones
    _BATCHED: ClassVar[bool] = False  # whether `kme_dist.predict` applies it to data sets, chunk by chunk
    _IN_FACTS: ClassVar[tuple[str, ...]] = ()  # settings that `_unpack` restores, with their learned values

    client: Any = None  # for estimators without a client: this process
    n_jobs: int | None = None
    _job_workers: Any = None
    backend: str = "numpy"
    random_state: RandomState
    seed_: int
    scaling_: Any
    n_features_in_: int
    feature_names_in_: np.ndarray
    fitted_to_dataset_: bool
    encoding_: Schema | None = None  # how rows are encoded; None: they are numbers
    trained_on_: dict[str, Any]

    # --- settings --------------------------------------------------------------------------------

    def set_params(self, **params: Any) -> Self:
        """Set parameters as in scikit-learn; settings of kernels too: `set_params(kernel__length_scale=0.5)`."""
        own: dict[str, Any] = {}
        within: dict[str, dict[str, Any]] = {}
        for key, value in params.items():
            name, nested, inner = key.partition("__")
            kernel = params.get(name, getattr(self, name, None)) if nested and name in _KERNELS else None
            if isinstance(kernel, str):
                raise ConfigError(
                    f"{key}={value!r}: {name}={kernel!r} is a name without settings; pass a kernel first, e.g. "
                    f"{name}=kme_dist.kernels.Gaussian()"
                )
            if isinstance(kernel, Kernel):
                within.setdefault(name, {})[inner] = value
            else:
                own[key] = value
        super().set_params(**own)
        for name, changes in within.items():  # kernels never change: the estimator gets another one
            setattr(self, name, getattr(self, name).with_params(**changes))
        return self

    def _check_settings(self, *names: str) -> None:
        """Check settings (all, or those named): ConfigError for the first invalid one."""
        for name in names or self._RULES:
            self._RULES[name].check(name, getattr(self, name))
        if not names:
            self._check_together()

    def _check_together(self) -> None:
        """Check combinations of settings; none by default."""

    def _begin_fit(self) -> None:
        """Check all settings and draw the seed of this fit."""
        self._check_settings()
        self.seed_ = drawn_seed(self.random_state)

    def _seed(self) -> int:
        """The given seed, or the one that was drawn for the last fit."""
        if isinstance(self.random_state, int | np.integer) or not hasattr(self, "seed_"):
            self._check_settings("random_state")
            self.seed_ = drawn_seed(self.random_state)
        return self.seed_

    @property
    def _client(self) -> Any:
        """The workers of a fit: those of `n_jobs` while it runs, else the given client."""
        return self.client if self._job_workers is None else self._job_workers

    @contextlib.contextmanager
    def _workers(self) -> Iterator[None]:
        """For the duration of a fit: the worker processes that `n_jobs` asks for."""
        self._check_settings()
        count = job_count(self.n_jobs)
        if self.client is not None and self.n_jobs not in (None, 1):
            raise ConfigError(
                f"n_jobs={self.n_jobs} and a client exclude each other: the client has its own workers; remove one"
            )
        if count == 1:
            yield
            return
        with local_workers(count) as client:
            self._job_workers = client
            try:
                yield
            finally:
                del self._job_workers

    def _executor(self) -> Executor:
        return executor_for(self._client, threads=1 if self.n_jobs == 1 else None)

    def _device(self) -> str:
        return devices.resolve(self.backend)

    # --- columns ---------------------------------------------------------------------------------

    def _record_columns(self, X: Any, rows: Any) -> None:
        """At fit: set `feature_names_in_` if X has names, `n_features_in_` if its rows are a matrix."""
        if isinstance(X, Dataset):
            self._record_dataset(X)
            return
        self.fitted_to_dataset_, self.encoding_ = False, None
        validate_data(self, X, "no_validation", reset=True, skip_check_array=True, ensure_2d=False)
        if isinstance(rows, np.ndarray) and rows.ndim == 2:
            self.n_features_in_ = int(rows.shape[1])
        elif hasattr(self, "n_features_in_"):
            del self.n_features_in_

    def _record_dataset(self, data: Dataset) -> None:
        """The same for a data set, with its encoding."""
        self._record_names(data.feature_names)
        if data.schema.encodes and data.schema.feature_names == data.feature_names:
            self.encoding_ = for_new_rows(data.schema)

    def _record_data(self, rows: RowsRef) -> None:
        """At fit: what a model card says of the rows. A data set is identified by its digest, whatever its address."""
        stored = isinstance(rows.source, Dataset)
        self.trained_on_ = {
            "data": Place.of(rows.path).name if stored else rows.path,
            "split": rows.split,
            "rows": rows.count,
            "digest": rows.digest() if stored else None,
        }

    def _record_names(self, names: Sequence[Any]) -> None:
        """The names of the features of a data set.

        Its rows are read as plain arrays, so plain arrays may be predicted without scikit-learn's warning for a model
        with feature names; names of tables are checked.
        """
        self.fitted_to_dataset_, self.encoding_ = True, None
        self.n_features_in_ = len(names)
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        given = [str(name) for name in names]
        if not generated_names(given):
            self.feature_names_in_ = np.array(given, dtype=object)

    def _check_columns(self, X: Any, rows: Any) -> None:
        """At prediction: check names as scikit-learn does (the order matters) and the number of features."""
        if not getattr(self, "fitted_to_dataset_", False) or hasattr(X, "columns"):
            with self._explained(X):
                validate_data(self, X, "no_validation", reset=False, skip_check_array=True, ensure_2d=False)
        wanted = getattr(self, "n_features_in_", None)
        if wanted is None:
            return
        if not isinstance(rows, np.ndarray) and not devices.is_sparse(rows):
            raise DataError(
                f"{type(self).__name__} was fitted to rows of {wanted} numbers, got a {type(rows).__name__}; "
                "pass a table of numbers with the same columns"
            )
        if rows.shape[1] != wanted:
            raise DataError(
                f"X has {rows.shape[1]} features, but {type(self).__name__} is expecting {wanted} features as "
                "input; pass the columns of the fit"
            )

    @property
    def encoded_feature_names_(self) -> list[str]:
        """The names of the features that the kernel gets: several for a category or a date of `feature_names_in_`."""
        self._check_fitted()
        return self._names_of_rows() or [f"x{i}" for i in range(self._width)]

    def _names_of_rows(self) -> list[str] | None:
        """The names of encoded rows; None if they have none."""
        if self.encoding_ is not None:
            return self.encoding_.feature_names
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else [str(name) for name in names]

    @property
    def _width(self) -> int:
        """The number of features of encoded rows."""
        return int(getattr(self, "n_features_in_", 0)) if self.encoding_ is None else len(self.encoding_.feature_names)

    def _check_same_width(self, X: Any) -> None:
        """Before a warm start: X has the number of features of the fit before."""
        known, width = getattr(self, "n_features_in_", None), None
        with contextlib.suppress(ValueError, IndexError):  # ragged and flat lists are refused later, with a reason
            width = X.features if isinstance(X, Dataset) else int(np.shape(X)[1])
        if None not in (known, width) and width != known:
            raise DataError(
                f"warm_start=True: X has {width} features, but {type(self).__name__} learned from {known}; pass the "
                "same columns, or set warm_start=False to restart"
            )

    # --- rows ------------------------------------------------------------------------------------

    def _fit_rows(self, X: Any, y: Any, **settings: Any) -> tuple[Any, np.ndarray]:
        """At fit: scikit-learn's `validate_data`, after encoding tables and refusing paths, dates in arrays and labels
        of mixed types. y may be the name of a column of a table."""
        if isinstance(X, Dataset):
            raise DataError(f"{type(self).__name__} is fitted to rows in memory; read them: X, y = dataset.read()")
        check_not_path(X)
        if (objects := self._object_rows(X)) is not None:
            return self._fit_objects(objects, y)
        check_collected(y)
        X, y = split_target(X, y)
        encoding, names = None, None
        if needs_encoding(X):
            encoding, names = table_schema(X), column_names(X)
            X, _ = encode_table(X, encoding)
        check_columns(X)
        check_targets_given(X, y)
        if settings.get("y_numeric"):
            check_long_integers(y, "the targets")
            check_numeric_targets(y, type(self).__name__)
        check_labels(y)
        self.fitted_to_dataset_, self.encoding_ = False, None
        with self._explained(X, y):
            rows, labels = validate_data(
                self, X, y, ensure_min_samples=2, dtype=_NUMBERS, accept_sparse=self._formats, **settings
            )
        if encoding is not None and names is not None:
            self.encoding_, self.n_features_in_ = encoding, len(names)
            self.feature_names_in_ = np.array(names, dtype=object)
        return _as_csr(rows), labels

    def _object_rows(self, X: Any, new: bool = False) -> list[Any] | None:
        """Texts, sequences or bags that the kernel takes (`new`: like those of the fit); None for other rows, and for
        estimators of numbers only."""
        return None

    def _fit_objects(self, rows: list[Any], y: Any) -> tuple[list[Any], np.ndarray]:
        check_labels(y)
        with self._explained(rows, y):
            labels = column_or_1d(y, warn=True)
            check_consistent_length(rows, labels)
        self.fitted_to_dataset_, self.encoding_ = False, None
        for name in ("feature_names_in_", "n_features_in_"):
            if hasattr(self, name):
                delattr(self, name)
        return rows, labels

    @property
    def _formats(self) -> list[str] | bool:
        return ["csr"] if self._SPARSE else False

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self._SPARSE
        return tags

    def _encoded_query(self, X: Any) -> np.ndarray | None:
        """At prediction: the rows of a table, encoded like those of the fit; None for rows of numbers."""
        encoding = self.encoding_
        if encoding is None:
            return None
        if is_table(X):
            names, columns = column_names(X), {column.name for column in encoding.columns}
            if self.fitted_to_dataset_ and names == encoding.feature_names and not columns <= set(names):
                return None  # encoded already
        elif self.fitted_to_dataset_:
            return None
        else:
            if np.ndim(X) != 2 or np.shape(X)[1] != self.n_features_in_:
                raise DataError(
                    f"{type(self).__name__} was fitted to a table with the columns "
                    f"{', '.join(map(repr, self.feature_names_in_.tolist()[:12]))}; pass a table with these columns"
                )
            warn(f"X does not have valid feature names, but {type(self).__name__} was fitted with feature names")
            X = with_names(X, [str(name) for name in self.feature_names_in_])
        rows, unseen = encode_table(X, encoding)
        if unseen:
            warn(unseen_words(unseen))
        return check_array(rows, input_name="X", estimator=self, dtype=_NUMBERS)  # type: ignore[no-any-return]

    def _query_rows(self, X: Any) -> Any:
        """At prediction: rows with the columns of the fit, scaled, on the device, in double precision.

        Double whatever the model's precision: weights can be large, and in single precision the result of a row would
        depend on the other rows of the call (matrix products of different shapes sum in different orders).
        """
        self._check_fitted()
        if isinstance(X, Dataset | str | Path):
            what, read = ("data set", "data") if isinstance(X, Dataset) else ("path", "kme_dist.open_dataset(data)")
            raise DataError(
                f"{type(self).__name__} predicts rows in memory, got the {what} "
                f"{X.path if isinstance(X, Dataset) else X}; read its rows: X, y = {read}.read()"
                + ("; or predict it chunk by chunk: kme_dist.predict(model, data, out)" if self._BATCHED else "")
            )
        if not hasattr(self, "n_features_in_") and hasattr(self, "classes_"):  # fitted to texts, sequences or bags
            objects = self._object_rows(X, new=True)
            if objects is None:
                raise DataError(
                    f"{type(self).__name__} was fitted to texts, sequences or bags; pass a list of rows like those"
                )
            return objects
        rows = self._encoded_query(X)
        if rows is None:
            check_columns(X)
            with self._explained(X):
                if not getattr(self, "fitted_to_dataset_", False) or hasattr(X, "columns"):
                    rows = validate_data(self, X, reset=False, dtype=_NUMBERS, accept_sparse=self._formats)
                else:
                    rows = check_array(X, input_name="X", estimator=self, dtype=_NUMBERS, accept_sparse=self._formats)
                    self._check_columns(X, rows)
        scaled = self.scaling_.apply(_as_csr(rows), "float64")
        check_magnitude(scaled)
        return devices.to_device(scaled, self._device())

    @contextlib.contextmanager
    def _explained(self, X: Any, y: Any = None) -> Iterator[None]:
        """Adds to the errors of scikit-learn: which value is missing or not a number, which estimators take bags, and
        how to put columns into order. `y` are the targets of a fit."""
        try:
            yield
        except ValueError as error:
            if "must be in the same order" in str(error):
                raise DataError(f"{error}Pass the columns in that order: X[model.feature_names_in_]") from None
            if "contains NaN" in str(error) or "contains infinity" in str(error):
                raise DataError(not_finite_words(str(error), X, y)) from None
            if "inhomogeneous" in str(error) or "array with dim 3" in str(error):
                refuse_objects(type(self).__name__, X)
            if "could not convert" not in str(error) or (found := text_among(X)) is None:
                raise (error if isinstance(error, KMEError) else DataError(one_line(str(error)))) from None
            hint = TEXT_ESTIMATORS if found.whole else "encode that column as numbers, or drop it"
            raise DataError(f"{type(self).__name__} takes rows of numbers, got {found.words}; {hint}") from None

    def _check_fitted(self) -> None:
        check_is_fitted(self, self._FITTED)

    # --- saving and loading ----------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted model as Zarr arrays and JSON; `kme_dist.load` restores it without running code."""
        self._check_fitted()
        arrays, facts = self._pack()
        names = [str(name) for name in getattr(self, "feature_names_in_", [])]
        attributes = {
            "model": next(kind.__name__ for kind in type(self).__mro__ if kind.__name__ in _MODULES),
            "model_format": FORMAT,
            "settings": self._stored_settings(),
            "feature_names": names,
            "n_features_in": getattr(self, "n_features_in_", None),
            "fitted_to_dataset": bool(getattr(self, "fitted_to_dataset_", False)),
            **({} if self.encoding_ is None else {"encoding": self.encoding_.encoding_json()}),
            "trained_on": getattr(self, "trained_on_", None),
            "versions": {name: metadata.version(name) for name in _PACKAGES},
            **facts,
        }
        store.save_arrays(path, {name: devices.to_host(array) for name, array in arrays.items()}, attributes)

    def _pack(self) -> tuple[Arrays, Facts]:
        """Arrays and facts of a fitted model, besides settings and columns."""
        raise TypeError(f"{type(self).__name__} must define _pack")

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        """Restore a model that has its settings from the result of `_pack`. Models stored by versions that did not keep
        the number of features derive `n_features_in_` from their arrays."""
        raise TypeError(f"{type(self).__name__} must define _unpack")

    def _stored_settings(self) -> dict[str, Any]:
        """Settings as JSON; None for what JSON cannot represent (clients, networks, feature maps)."""
        chosen = {name: value for name, value in self.get_params(deep=False).items() if name not in self._IN_FACTS}
        if "random_state" in chosen and not isinstance(chosen["random_state"], int | np.integer):
            chosen["random_state"] = getattr(self, "seed_", None)  # so that a loaded model can be fitted again
        if isinstance(chosen.get("class_weight"), Mapping):  # labels may be numbers, keys of JSON are texts
            chosen["class_weight"] = [list(pair) for pair in chosen["class_weight"].items()]
        return {name: to_json(value) for name, value in chosen.items()}

    @classmethod
    def _restored(cls, arrays: Mapping[str, np.ndarray], found: Mapping[str, Any], own: Own) -> Self:
        settings = dict(found.get("settings", {}))  # older versions stored only facts for some models
        for name in _KERNELS:
            if isinstance(settings.get(name), Mapping):
                settings[name] = from_config(settings[name], own=own)
        if isinstance(settings.get("class_weight"), list):
            settings["class_weight"] = {label: weight for label, weight in settings["class_weight"]}
        model = cls(**settings)
        if isinstance(settings.get("random_state"), int):
            model.seed_ = settings["random_state"]
        model._unpack(arrays, found, own)
        model._restore_columns(found)
        return model

    def _restore_columns(self, found: Mapping[str, Any]) -> None:
        """Names and number of features as stored; models of older versions have none."""
        self.fitted_to_dataset_ = bool(found.get("fitted_to_dataset", False))
        if found.get("trained_on"):
            self.trained_on_ = dict(found["trained_on"])
        if found.get("feature_names"):
            self.feature_names_in_ = np.array(found["feature_names"], dtype=object)
        if found.get("n_features_in") is not None:
            self.n_features_in_ = int(found["n_features_in"])
        elif "n_features_in" in found and hasattr(self, "n_features_in_"):
            del self.n_features_in_
        self.encoding_ = Schema.from_json(found["encoding"]) if found.get("encoding") else None


def model_place(path: str | Path | Place) -> Place:
    """Where a model is stored: the path itself, or model.zarr of a run folder."""
    place = Place.of(path)
    if place.exists() or not place.exists(_RUN_RECORD):
        return place
    model = place.child(_RUN_MODEL)
    if not model.exists():
        raise DataError(f"the run folder {place} has no {_RUN_MODEL} yet; finish the run first (`kme-dist run`)")
    return model


def load(path: str | Path, kernels: Mapping[str, Any] | None = None, networks: Mapping[str, Any] | None = None) -> Any:
    """Load a saved model, or that of a run folder. Arrays and JSON only: nothing in the folder is ever run.

    For a model with your own kernel or torch network pass its class: `kernels={"Tanimoto": Tanimoto}`,
    `networks={"MyNet": MyNet}`.
    """
    arrays, found = store.load_arrays(model_place(path).address)
    name = found.get("model")
    if not isinstance(name, str) or name not in _MODULES:
        raise DataError(f"{path} is {name or found.get('format')!r}, not a kme-dist model")
    if found.get("model_format") != FORMAT:
        raise DataError(f"{path} has model format {found.get('model_format')!r}; this version reads format {FORMAT}")
    kind = getattr(importlib.import_module(_MODULES[name]), name)
    try:
        return kind._restored(arrays, found, {**(kernels or {}), **(networks or {})})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, KMEError):
            raise
        raise CorruptError(f"{path} is an incomplete model: {error!r}; save it again") from error


# --- parts of stored models -----------------------------------------------------------------------------


def scaling_arrays(scaling: Scaling, at: str = "scaling/") -> Arrays:
    return scaling.stored(at)


def stored_scaling(arrays: Mapping[str, np.ndarray], at: str = "scaling/") -> Scaling:
    return Scaling.restored(arrays, at)


def put_rows(arrays: Arrays, facts: Facts, name: str, rows: Any) -> None:
    """Put rows into the arrays of a model; rows that are not numeric (strings) into its facts."""
    if devices.is_sparse(rows):
        arrays |= {f"{name}_{part}": getattr(rows, part) for part in _SPARSE_PARTS}
        facts[f"{name}_shape"] = [int(size) for size in rows.shape]
    elif hasattr(rows, "shape"):
        arrays[name] = devices.to_host(rows)
    elif all(isinstance(row, str | int | float | bool) for row in rows):
        facts[name] = list(rows)
    else:
        try:
            facts[name] = [plain(row.tolist() if isinstance(row, np.ndarray) else row) for row in rows]
        except TypeError:
            kind = type(rows[0]).__name__
            raise DataError(
                f"rows of type {kind} cannot be stored; use arrays, strings, numbers, or lists of them"
            ) from None


def get_rows(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str) -> Any:
    if f"{name}_{_SPARSE_PARTS[0]}" in arrays:
        return from_parts([arrays[f"{name}_{part}"] for part in _SPARSE_PARTS], facts[f"{name}_shape"])
    return arrays[name] if name in arrays else facts[name]


def has_rows(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str) -> bool:
    return name in arrays or name in facts or f"{name}_{_SPARSE_PARTS[0]}" in arrays


def _as_csr(rows: Any) -> Any:
    """Sparse rows of any kind as a CSR array; others as they are."""
    return as_sparse_rows(rows) if devices.is_sparse(rows) else np.asarray(rows)


def put_labels(labels: np.ndarray, name: str = "classes") -> Facts:
    """Labels and their dtype as facts of a model."""
    values = labels.tolist()
    if not all(isinstance(value, str | int | float | bool) for value in values):
        raise DataError(f"labels of type {type(values[0]).__name__} cannot be stored; use strings or numbers")
    return {name: values, f"{name}_dtype": labels.dtype.str}


def get_labels(facts: Mapping[str, Any], name: str = "classes") -> np.ndarray:
    dtype = np.dtype(facts[f"{name}_dtype"])
    if dtype.kind not in "biufUO":
        raise CorruptError(f"labels of dtype {dtype} are not valid in a model")
    return np.array(facts[name], dtype=dtype)
