"""What every estimator is: a constructor stores, `fit` learns, `save` writes arrays and JSON, `load` reads them.

An estimator of this package says what is its own; the rest is here.

    _RULES              what its settings must be (see `models.settings`); `_check_settings` compares them at `fit`
    _check_together     settings that are fine one by one but not together
    _FITTED             the attribute that a fit leaves behind
    _pack, _unpack      arrays and facts of a fitted model, and a model filled in from them

Columns are remembered by `fit` (`feature_names_in_`, `n_features_in_`) and compared by every question after it; they
are stored with the model. A data set's generated names (x0, x1, ...) stand for positions, not for names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from kme_dist import backend as devices
from kme_dist.core.kernels import Kernel, from_config
from kme_dist.data import store
from kme_dist.data.dataset import Dataset, generated_names
from kme_dist.data.scaling import Scaling
from kme_dist.data.validation import check_columns, check_labels
from kme_dist.errors import CorruptError, DataError, KMEError
from kme_dist.models.settings import Rule
from kme_dist.run.executors import Executor
from kme_dist.run.sharing import executor_for

Arrays = dict[str, Any]  # of NumPy, or of the device that a model is on
Facts = dict[str, Any]
Own = Mapping[str, Any]  # classes of the user by name: kernels, and torch networks

FORMAT = 1
DTYPES = ("float32", "float64")
_NUMBERS: Any = [np.float64, np.float32]  # types that a table of numbers may keep
# What `load` opens: each class, and the module that is imported when one turns up.
_HOMES = {
    "ASKLClassifier": "kme_dist.models.askl",
    "ASKLRegressor": "kme_dist.models.askl",
    "CENClassifier": "kme_dist.models.cen",
    "ConditionalMeanEmbedding": "kme_dist.models.cme",
    "KernelMean": "kme_dist.models.means",
    "MCEClassifier": "kme_dist.models.mce",
    "MixtureMatching": "kme_dist.models.density",
    "OneClassSupportMeasure": "kme_dist.models.bags",
    "ParzenClassifier": "kme_dist.models.means",
    "SupportMeasureClassifier": "kme_dist.models.bags",
}


class Estimator(BaseEstimator):  # type: ignore[misc]
    """The base of all estimators: settings, columns, seeds, workers, devices, saving and loading."""

    _RULES: ClassVar[Mapping[str, Rule]] = {}
    _FITTED: ClassVar[str] = "embedding_"
    _IN_FACTS: ClassVar[tuple[str, ...]] = ()  # settings that a loaded model has as they were learned, by `_unpack`

    client: Any = None  # of those that take no client: this process
    backend: str = "numpy"
    random_state: Any
    scaling_: Any
    n_features_in_: int
    feature_names_in_: np.ndarray
    fitted_to_dataset_: bool

    # --- settings --------------------------------------------------------------------------------

    def _check_settings(self, *names: str) -> None:
        """Compare settings (all, or those named) with the rules: the first that is wrong is a ConfigError."""
        for name in names or self._RULES:
            self._RULES[name].check(name, getattr(self, name))
        if not names:
            self._check_together()

    def _check_together(self) -> None:
        """Settings that contradict each other; none by default."""

    def _seed(self) -> int:
        """The seed that was given, or a fresh one for None."""
        self._check_settings("random_state")
        if self.random_state is None:
            return int(np.random.SeedSequence().generate_state(1)[0])
        return int(self.random_state)

    def _executor(self) -> Executor:
        return executor_for(self.client)

    def _device(self) -> str:
        return devices.resolve(self.backend)

    # --- columns ---------------------------------------------------------------------------------

    def _remember_columns(self, X: Any, rows: Any) -> None:
        """At fit: `feature_names_in_` where X has names, `n_features_in_` where its rows are a matrix."""
        if isinstance(X, Dataset):
            self._remember_names(X.feature_names)
            return
        self.fitted_to_dataset_ = False
        validate_data(self, X, "no_validation", reset=True, skip_check_array=True, ensure_2d=False)
        if isinstance(rows, np.ndarray) and rows.ndim == 2:
            self.n_features_in_ = int(rows.shape[1])
        elif hasattr(self, "n_features_in_"):
            del self.n_features_in_

    def _remember_names(self, names: Sequence[Any]) -> None:
        """The same for a data set: names and width as it has them.

        Its rows are read as plain arrays, so plain arrays may be asked about without the warning that scikit-learn has
        for a model with names; tables with names are checked by them.
        """
        self.fitted_to_dataset_ = True
        self.n_features_in_ = len(names)
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        given = [str(name) for name in names]
        if not generated_names(given):
            self.feature_names_in_ = np.array(given, dtype=object)

    def _check_columns(self, X: Any, rows: Any) -> None:
        """At a question: names as scikit-learn checks them (another order is refused), as many features as at fit."""
        if not getattr(self, "fitted_to_dataset_", False) or hasattr(X, "columns"):
            validate_data(self, X, "no_validation", reset=False, skip_check_array=True, ensure_2d=False)
        wanted = getattr(self, "n_features_in_", None)
        if wanted is None:
            return
        if not isinstance(rows, np.ndarray):
            raise DataError(
                f"{type(self).__name__} was fitted to rows of {wanted} numbers; got a {type(rows).__name__} of other "
                "things. Pass a table of numbers with the same columns"
            )
        if rows.shape[1] != wanted:
            raise DataError(
                f"X has {rows.shape[1]} features, but {type(self).__name__} is expecting {wanted} features, as many as "
                "it was fitted to; pass the same columns"
            )

    # --- rows ------------------------------------------------------------------------------------

    def _fit_rows(self, X: Any, y: Any, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
        """At fit: scikit-learn's `validate_data`, after dates and labels of mixed types were refused."""
        check_columns(X)
        check_labels(y)
        self.fitted_to_dataset_ = False
        found: tuple[np.ndarray, np.ndarray] = validate_data(
            self, X, y, ensure_min_samples=2, dtype=_NUMBERS, **settings
        )
        return found

    def _query_rows(self, X: Any) -> Any:
        """At a question: rows with the columns of the fit, scaled, on the device, in double precision.

        In double whatever the model's precision: weights can be large, and single precision would make a row's result
        depend on the rows that come with it (matrix products of other shapes add up in other orders).
        """
        self._check_fitted()
        check_columns(X)
        if not getattr(self, "fitted_to_dataset_", False) or hasattr(X, "columns"):
            rows = validate_data(self, X, reset=False, dtype=_NUMBERS)
        else:
            rows = check_array(X, input_name="X", estimator=self, dtype=_NUMBERS)
            self._check_columns(X, rows)
        return devices.to_device(self.scaling_.apply(np.asarray(rows), "float64"), self._device())

    def _check_fitted(self) -> None:
        check_is_fitted(self, self._FITTED)

    # --- storing ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted model as Zarr arrays and JSON; `kme_dist.load` brings it back without running code."""
        self._check_fitted()
        arrays, facts = self._pack()
        names = [str(name) for name in getattr(self, "feature_names_in_", [])]
        attributes = {
            "model": next(kind.__name__ for kind in type(self).__mro__ if kind.__name__ in _HOMES),
            "model_format": FORMAT,
            "settings": self._stored_settings(),
            "feature_names": names,
            "n_features_in": getattr(self, "n_features_in_", None),
            "fitted_to_dataset": bool(getattr(self, "fitted_to_dataset_", False)),
            **facts,
        }
        store.save_arrays(path, {name: devices.to_host(array) for name, array in arrays.items()}, attributes)

    def _pack(self) -> tuple[Arrays, Facts]:
        """What there is to store of a fitted model, beside settings and columns."""
        raise TypeError(f"{type(self).__name__} must define _pack")

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        """Fill in a model that has its settings, from what `_pack` gave. One that was stored before the number of
        features was kept finds `n_features_in_` in its arrays."""
        raise TypeError(f"{type(self).__name__} must define _unpack")

    def _stored_settings(self) -> dict[str, Any]:
        """Settings as JSON holds them; what it cannot hold (clients, networks, feature maps) is None."""
        chosen = {name: value for name, value in self.get_params(deep=False).items() if name not in self._IN_FACTS}
        return {name: _to_json(value) for name, value in chosen.items()}

    @classmethod
    def _restored(cls, arrays: Mapping[str, np.ndarray], found: Mapping[str, Any], own: Own) -> Self:
        settings = dict(found.get("settings", {}))  # of some models older versions kept facts only
        for name in ("kernel", "head"):
            if isinstance(settings.get(name), Mapping):
                settings[name] = from_config(settings[name], own=own)
        model = cls(**settings)
        model._unpack(arrays, found, own)
        model._restore_columns(found)
        return model

    def _restore_columns(self, found: Mapping[str, Any]) -> None:
        """Names and width as stored; models stored before names were kept have none."""
        self.fitted_to_dataset_ = bool(found.get("fitted_to_dataset", False))
        if found.get("feature_names"):
            self.feature_names_in_ = np.array(found["feature_names"], dtype=object)
        if found.get("n_features_in") is not None:
            self.n_features_in_ = int(found["n_features_in"])
        elif "n_features_in" in found and hasattr(self, "n_features_in_"):
            del self.n_features_in_


def load(path: str | Path, kernels: Mapping[str, Any] | None = None, networks: Mapping[str, Any] | None = None) -> Any:
    """Load a saved model. Arrays and JSON only: nothing in the folder is ever run.

    A model with a kernel or a torch network of your own needs its class back: `kernels={"Tanimoto": Tanimoto}`,
    `networks={"MyNet": MyNet}`.
    """
    arrays, found = store.load_arrays(path)
    name = found.get("model")
    if not isinstance(name, str) or name not in _HOMES:
        raise DataError(f"{path} holds {name or found.get('format')!r}, not a kme-dist model")
    if found.get("model_format") != FORMAT:
        raise DataError(f"{path} has model format {found.get('model_format')!r}; this version reads format {FORMAT}")
    kind = getattr(importlib.import_module(_HOMES[name]), name)
    try:
        return kind._restored(arrays, found, {**(kernels or {}), **(networks or {})})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, KMEError):
            raise
        raise CorruptError(f"{path} is not a complete model: {error!r}; save it again") from error


# --- parts of stored models -----------------------------------------------------------------------------


def scaling_arrays(scaling: Scaling, at: str = "scaling/") -> Arrays:
    return {f"{at}shift": scaling.shift, f"{at}factor": scaling.factor}


def stored_scaling(arrays: Mapping[str, np.ndarray], at: str = "scaling/") -> Scaling:
    return Scaling(arrays[f"{at}shift"], arrays[f"{at}factor"])


def put_rows(arrays: Arrays, facts: Facts, name: str, rows: Any) -> None:
    """Rows among the arrays of a model; rows that are not numbers (texts) among its facts."""
    if hasattr(rows, "shape"):
        arrays[name] = np.asarray(rows)
    elif all(isinstance(row, str | int | float | bool) for row in rows):
        facts[name] = list(rows)
    else:
        raise DataError(f"rows of type {type(rows[0]).__name__} cannot be stored; arrays, texts and numbers can")


def get_rows(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str) -> Any:
    return arrays[name] if name in arrays else facts[name]


def put_labels(labels: np.ndarray, name: str = "classes") -> Facts:
    """Labels, and their type, among the facts of a model."""
    values = labels.tolist()
    if not all(isinstance(value, str | int | float | bool) for value in values):
        raise DataError(f"labels of type {type(values[0]).__name__} cannot be stored; use strings or numbers")
    return {name: values, f"{name}_dtype": labels.dtype.str}


def get_labels(facts: Mapping[str, Any], name: str = "classes") -> np.ndarray:
    dtype = np.dtype(facts[f"{name}_dtype"])
    if dtype.kind not in "biufUO":
        raise CorruptError(f"labels of type {dtype} do not belong in a model")
    return np.array(facts[name], dtype=dtype)


def _to_json(setting: Any) -> Any:
    """A setting as JSON holds it; None for what JSON cannot hold."""
    try:
        return _plain(setting)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Kernel):
        return value.to_config()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    raise TypeError(f"{type(value).__name__} is not JSON")
