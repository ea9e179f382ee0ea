"""The scikit-learn face: constructors store, `fit` calls `run`, prediction calls `core`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core import kernels
from kme_dist.core.calibration import Calibration, expectation
from kme_dist.core.embedding import FeatureEmbedding
from kme_dist.core.features import SAMPLERS, Identity
from kme_dist.core.kernels import Kernel
from kme_dist.core.objective import generalisation_bound
from kme_dist.data import store
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.batches import plan_batches, read_batch
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.places import Place
from kme_dist.data.scaling import Scaling
from kme_dist.data.validation import remember_names, restore_names, rows_and_labels, rows_asked, stored_names
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError
from kme_dist.models.refining import Refinable
from kme_dist.run.executors import Executor
from kme_dist.run.features import as_features, features_of, restore_features, with_features
from kme_dist.run.learn import OBJECTIVES, Record
from kme_dist.run.sharing import executor_for, share
from kme_dist.run.train import Recipe, Trained, fit_candidates, learn_candidates

_FORMAT = 1
_SAMPLE_ROWS = 20_000  # of a data set that are looked at here: for the bound, and for the calibration


class MCEClassifier(Refinable, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Multiclass conditional embedding: a probabilistic kernel classifier that learns its own kernel.

    Parameters
    ----------
    kernel : str or Kernel
        A name ("gaussian" and other stationary kernels get one length scale per feature) or a kernel object; where
        learning starts.
    objective : {"auto", "rcb", "validation", "loo", "erm", "cv", "median"}
        What is learned from. "auto" starts from the best common length scale, learns by the complexity bound and by
        batch validation with length scales held near that start, and keeps the one whose full fit has the lower
        leave-one-out log loss. "cv" is a k-fold grid search over one length scale and λ, "median" the median-distance
        heuristic.
    refit_regularization : bool
        Choose λ again on all rows by leave-one-out after learning; False keeps the learned one, as published.
    risk, complexity_weight : the loss summed ("sum") or averaged ("mean"), and the multiplier τ of the complexity term
        (None: 4e for rcb, 1 for validation and loo).
    regularization : where λ starts; with steps=0 kernel and λ are used as given.
    batch_size, steps, learning_rate, optimizer : stochastic learning; batch_size=None chooses by the number of rows.
    scaling : {"unit", "standard", None}; learned inside the model and applied to queries too.
    solver, centres : the final fit: "auto", "cholesky", "tiled" or "pcg" (exact), "nystrom" with so many centres.
    backend, dtype : "auto" | "numpy" | "cupy", "float32" | "float64". "float32" is used where it carries three digits;
        solves that need more, and raw rows (scaling=None) that it cannot tell apart, are done in float64 all the same.
    random_state : whole number; decides batches, splits and centres.
    probability_floor : no label gets less probability than this before normalising. None: 1/(n + m), since n rows
        cannot prove anything rarer; 0 is the published clip-normalisation.
    calibration : {"none", "temperature", "isotonic"}
        A map from clip-normalised to calibrated probabilities, fitted to leave-one-out predictions; see `calibrate`,
        too. Labels do not depend on it.
    features : a feature map (or its config) that scaled rows are taken through first; the kernel stands on it. With
        solver="features", or a linear kernel, the fit solves for the weights of the features themselves: p x p
        equations instead of n x n. A number stands for so many random features of the learned kernel.

    Attributes
    ----------
    kernel_, regularization_ : what was learned.   classes_ : the labels.   objective_ : the objective that was kept.
    history_ : one record per step.   bound_ : the generalisation bound at the training rows, a diagnostic.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = MCEClassifier(steps=50).fit(X, y)
    >>> clf.predict_proba(X[:2]).shape
    (2, 3)
    """

    def __init__(
        self,
        kernel: str | Kernel = "gaussian",
        objective: str = "auto",
        refit_regularization: bool = True,
        risk: str = "sum",
        complexity_weight: float | None = None,
        regularization: float = 1.0,
        batch_size: int | None = None,
        steps: int = 1000,
        learning_rate: float = 0.1,
        optimizer: str = "adam",
        scaling: str | None = "unit",
        solver: str = "auto",
        centres: int | None = None,
        backend: str = "auto",
        dtype: str = "float32",
        client: Any = None,
        random_state: int | None = 0,
        verbose: bool = False,
        probability_floor: float | None = None,
        calibration: str = "none",
        features: Any = None,
    ) -> None:
        self.kernel = kernel
        self.objective = objective
        self.refit_regularization = refit_regularization
        self.risk = risk
        self.complexity_weight = complexity_weight
        self.regularization = regularization
        self.batch_size = batch_size
        self.steps = steps
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.scaling = scaling
        self.solver = solver
        self.centres = centres
        self.backend = backend
        self.dtype = dtype
        self.client = client
        self.random_state = random_state
        self.verbose = verbose
        self.probability_floor = probability_floor
        self.calibration = calibration
        self.features = features

    # --- fitting ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, callback: Callable[[Record], None] | None = None) -> Self:
        """Learn the kernel and λ, then solve for the embedding on all rows.

        X is a table of numbers with y its labels, or an open `Dataset` (its "train" split where it has one), which
        brings its own labels. `callback` receives the record of every learning step (see `history_`).

        Here and over a `client` the same work is done in the same order: what comes out has the same bits.
        """
        self._check_settings()
        report = callback or (_print_record if self.verbose else None)
        records: list[Record] = []

        def step(record: Record) -> None:
            records.append(record)
            if report is not None:
                report(record)

        with contextlib.ExitStack() as stack:
            data, executor, scratch = self._source(X, y, stack)
            recipe = self.recipe(data)
            candidates = learn_candidates(data, recipe, executor=executor, callback=step)
            trained = fit_candidates(data, recipe, candidates, executor=executor, scratch=scratch)
            self.adopt(data, recipe, trained)
        self.history_ = records
        return self

    def _source(
        self, X: Any, y: Any, stack: contextlib.ExitStack
    ) -> tuple[RowSource, Executor, str | Path | Place | None]:
        """The rows, who works on them, and where tasks leave arrays for each other."""
        executor = executor_for(self.client)
        if isinstance(X, Dataset):
            if y is not None:
                raise DataError(f"{X.path} brings its own labels; call fit(dataset) without y")
            if self.client is None:
                return X, executor, None
            # Workers elsewhere reach the data set, but not a folder of this machine.
            place = X.place.sibling(f".{X.place.name}.fit-{os.getpid()}")
            stack.callback(place.delete_all)
            return X, executor, place
        X, y = (in_memory(part) for part in (X, y))
        X, y = rows_and_labels(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise DataError(f"y holds one class only ({classes[0]!r}); a classifier needs rows of at least two classes")
        data = ArrayRows(X, codes, classes, getattr(self, "feature_names_in_", None))
        folder = share(data, self.client, stack)
        return data, executor, folder

    def _check_settings(self) -> None:
        Calibration(self.calibration)
        known = ("auto", *OBJECTIVES, "cv", "median")
        if self.objective not in known:
            raise ConfigError(f"objective={self.objective!r} is unknown; choose one of {', '.join(known)}")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype={self.dtype!r} is unknown; choose 'float32' or 'float64'")
        if not isinstance(self.steps, int | np.integer) or self.steps < 0:
            raise ConfigError(f"steps={self.steps!r}: must be an integer >= 0")
        if self.batch_size is not None and (not isinstance(self.batch_size, int | np.integer) or self.batch_size < 1):
            raise ConfigError(f"batch_size={self.batch_size!r}: must be an integer >= 1, or None")
        if self.centres is not None and (not isinstance(self.centres, int | np.integer) or self.centres < 1):
            raise ConfigError(f"centres={self.centres!r}: must be an integer >= 1, or None")
        for name in ("regularization", "learning_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}: must be a positive number")
        self._check_features()

    def _check_features(self) -> None:
        count = isinstance(self.features, int | np.integer)
        if isinstance(self.features, bool | float | np.floating) or (count and self.features < 1):
            raise ConfigError(f"features={self.features!r}: must be a feature map or an integer >= 1")
        name = self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "name", "")
        if count and name not in SAMPLERS:
            raise ConfigError(
                f"features={self.features}: kernel={self.kernel!r} has no random features; choose a kernel of "
                f"{', '.join(SAMPLERS)}, or give a feature map"
            )
        if count and self.solver not in ("auto", "features"):
            raise ConfigError(
                f"features={self.features} random features are solved for by solver='features', not {self.solver!r}; "
                "leave one of them out"
            )
        if self.solver != "features":
            return
        if self.features is None and name != "linear":
            raise ConfigError(
                "solver='features' needs explicit features: give `features` (a feature map, or how many random "
                "features of the kernel), or kernel='linear'"
            )
        if not count and name != "linear" and self.kernel != "gaussian":  # the default stands for no choice
            raise ConfigError(
                f"solver='features' solves for weights of the features themselves, and kernel={self.kernel!r} on top "
                "of them has none; leave the kernel out, or use another solver"
            )

    def _floor(self, n: int) -> float:
        if self.probability_floor is None:
            return 1.0 / (n + len(self.classes_))
        if not isinstance(self.probability_floor, int | float | np.number) or not 0 <= self.probability_floor < 1:
            raise ConfigError(f"probability_floor={self.probability_floor!r}: must be a number >= 0 and < 1")
        return float(self.probability_floor)

    def _seed(self) -> int:
        if self.random_state is None:
            return int(np.random.SeedSequence().generate_state(1)[0])
        if not isinstance(self.random_state, int | np.integer) or self.random_state < 0:
            raise ConfigError(f"random_state={self.random_state!r}: must be an integer >= 0, or None")
        return int(self.random_state)

    def _device(self) -> str:
        return devices.resolve(self.backend)

    def recipe(self, data: RowSource) -> Recipe:
        """The settings for whoever learns and fits with them."""
        width, seed = data.features, self._seed()
        if self.features is not None and not isinstance(self.features, int | np.integer):
            width = int(np.shape(as_features(self.features, width, seed).forward(np.zeros((1, width))))[1])
        linear = self.solver == "features" and not isinstance(self.features, int | np.integer)
        chosen = "linear" if linear and isinstance(self.kernel, str) else self.kernel
        start = kernels.from_config(chosen, n_features=width)
        return Recipe(
            kernel=start,
            objective=self.objective,
            refit_regularization=bool(self.refit_regularization),
            risk=self.risk,
            complexity_weight=self.complexity_weight,
            regularization=float(self.regularization),
            batch_size=None if self.batch_size is None else int(self.batch_size),
            steps=int(self.steps),
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,
            scaling=self.scaling,
            solver=self.solver,
            centres=None if self.centres is None else int(self.centres),
            dtype=self.dtype,
            seed=seed,
            probability_floor=None if self.probability_floor is None else self._floor(0),
            features=int(self.features) if isinstance(self.features, np.integer) else self.features,
            backend=self._device(),
        )

    def adopt(self, data: RowSource, recipe: Recipe, trained: Trained, split: str | None = "auto") -> Self:
        """Become the model that was trained on (a split of) `data`."""
        assert data.classes is not None
        split, fit = data.training_split(split), trained.fit
        self.classes_ = np.asarray(data.classes)
        if isinstance(data, Dataset):
            remember_names(self, data.feature_names)
        self.scaling_, self.embedding_ = fit.scaling, self._on_device(fit.embedding)
        self.probability_floor_ = recipe.floor(fit.rows, len(self.classes_))
        self.objective_, self.loo_log_loss_ = trained.best.name, dict(trained.losses)
        self.history_ = [record for candidate in trained.candidates for record in candidate.history]
        self.solver_, self.solver_reason_ = fit.solver, fit.reason
        self.kernel_, self.regularization_ = trained.best.kernel, fit.regularization
        sample = plan_batches(data, batch_size=min(_SAMPLE_ROWS, fit.rows), seed=recipe.seed, split=split)
        batch = read_batch(data, sample, 0)
        rows = devices.to_device(self.scaling_.apply(batch.X, devices.precision(fit.embedding.weights)), self._device())
        with devices.blas_threads(1):
            self.bound_ = self._bound(rows, np.asarray(batch.y), fit.rows)
            self.calibration_ = self._leave_one_out_calibration(rows, np.asarray(batch.y), recipe.seed, fit.rows)
        return self

    def _on_device(self, embedding: Any) -> Any:
        device = self._device()
        if isinstance(embedding, FeatureEmbedding):
            return dataclasses.replace(embedding, weights=devices.to_device(embedding.weights, device))
        moved = {name: devices.to_device(getattr(embedding, name), device) for name in ("centres", "weights")}
        return dataclasses.replace(embedding, **moved)

    def _bound(self, rows: Any, codes: np.ndarray, total: int) -> float:
        """The right-hand side of the generalisation bound at (a sample of) the training rows."""
        P = devices.to_host(self.embedding_.decision(rows)).astype(np.float64)
        own = np.clip(P[np.arange(len(P)), codes], 1e-15, 1)
        V = devices.to_host(self.embedding_.weights).astype(np.float64)
        if isinstance(self.embedding_, FeatureEmbedding):
            alpha, norm = float(np.sqrt(np.max(np.sum(devices.to_host(rows).astype(np.float64) ** 2, axis=1)))), V
        else:
            norm = devices.to_host(self.embedding_.decision(self.embedding_.centres)).astype(np.float64)
            alpha = self.embedding_.kernel.alpha(rows)
        complexity = alpha * np.sqrt(max(float((V * norm).sum()), 0.0))
        return generalisation_bound(float(-np.log(own).mean()), complexity, total)

    # --- predicting ------------------------------------------------------------------------------

    def decision_probabilities(self, X: Any) -> np.ndarray:
        """f(x), one column per class; rows need not add up to one and entries may leave [0, 1]."""
        check_is_fitted(self, "embedding_")
        X = rows_asked(self, X, dtype=[np.float64, np.float32])
        # In double whatever the model's precision: weights can be large, and single precision would make a row's result
        # depend on the rows that come with it (matrix products of other shapes add up in other orders).
        rows = devices.to_device(self.scaling_.apply(X, "float64"), self._device())
        return devices.to_host(self.embedding_.decision(rows))

    def decision_function(self, X: Any) -> np.ndarray:
        """Decision probabilities; with two classes, as scikit-learn wants it, how far the second leads the first.

        That lead is of the probabilities, so that it ranks rows as `predict_proba` does; ties (both at the floor) go by
        the decision probabilities.
        """
        P = self.decision_probabilities(X)
        if len(self.classes_) > 2:
            return P
        p = self.probabilities(P)
        return np.asarray(p[:, 1] - p[:, 0] + 1e-12 * (P[:, 1] - P[:, 0]))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class: that with the largest decision probability, and of `predict_proba`, in every row."""
        best = self.decision_probabilities(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities, clip-normalised (see `probability_floor`, `calibration`), in the order of `classes_`."""
        return self.probabilities(self.decision_probabilities(X))

    def entropy(self, X: Any, kind: str = "clip") -> np.ndarray:
        """Uncertainty in nats: of the probabilities ("clip"), or the embedding's own estimate ("rkhs")."""
        if kind not in ("clip", "rkhs"):
            raise ConfigError(f"kind={kind!r} is unknown; choose 'clip' or 'rkhs'")
        P = self.decision_probabilities(X)
        return np.asarray(mce.rkhs_entropy(self.probabilities(P) if kind == "clip" else P))

    def expectation(self, X: Any, g: Any, raw: bool = False) -> np.ndarray:
        """E[g(Y) | x] under `predict_proba`, or `raw`: Σ_c g(c) f_c(x), which may leave the values of g.

        `g` is a function of the label, a mapping from label to value, or one value per class."""
        values, P = _values_per_class(g, self.classes_), self.decision_probabilities(X)
        return np.asarray(mce.expectation(P, values) if raw else expectation(self.probabilities(P), values))

    # --- storing ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted model as Zarr arrays and JSON; `kme_dist.load` brings it back without running code."""
        check_is_fitted(self, "embedding_")
        settings = {**self.get_params(deep=False), "client": None, "features": None}
        map_arrays, map_config = features_of(self.scaling_)
        if isinstance(settings["kernel"], Kernel):
            settings["kernel"] = settings["kernel"].to_config()
        explicit = isinstance(self.embedding_, FeatureEmbedding)
        arrays = {
            **({} if explicit else {"centres": devices.to_host(self.embedding_.centres)}),
            "weights": devices.to_host(self.embedding_.weights),
            "scaling/shift": self.scaling_.shift,
            "scaling/factor": self.scaling_.factor,
            **map_arrays,
        }
        labels = self.classes_.tolist()
        if not all(isinstance(label, str | int | float | bool) for label in labels):
            raise DataError(f"labels of type {type(labels[0]).__name__} cannot be stored; use strings or numbers")
        attributes = {
            "model": "MCEClassifier",
            "model_format": _FORMAT,
            "settings": {name: _plain(value) for name, value in settings.items()},
            "kernel": self.kernel_.to_config(),
            "feature_map": map_config,
            "regularization": self.regularization_,
            "embedding_regularization": self.embedding_.regularization,
            "probability_floor": self.probability_floor_,
            "classes": labels,
            "classes_dtype": self.classes_.dtype.str,
            "features": self.n_features_in_,
            **stored_names(self),
            "objective": self.objective_,
            "solver": self.solver_,
            "solver_reason": self.solver_reason_,
            "bound": self.bound_,
            "loo_log_loss": self.loo_log_loss_,
            "calibration": self.calibration_.to_plain(),
            "compression": getattr(self, "compression_", None),
            "history": self.history_,
        }
        store.save_arrays(path, arrays, attributes)

    @classmethod
    def _restore(
        cls, arrays: Mapping[str, np.ndarray], found: Mapping[str, Any], own: Mapping[str, type[Kernel]]
    ) -> MCEClassifier:
        settings = dict(found["settings"])
        if isinstance(settings["kernel"], Mapping):
            settings["kernel"] = kernels.from_config(settings["kernel"], own=own)
        model = cls(**settings)
        kernel = kernels.from_config(found["kernel"], own=own)
        device = model._device()
        weights = devices.to_device(arrays["weights"], device)
        lam = float(found.get("embedding_regularization", found["regularization"]))
        if "centres" in arrays:
            model.embedding_ = mce.Embedding(kernel, devices.to_device(arrays["centres"], device), weights, lam)
        else:
            model.embedding_ = FeatureEmbedding(Identity(), weights, regularization=lam)
        model.kernel_, model.regularization_ = kernel, float(found["regularization"])
        model.probability_floor_ = float(found["probability_floor"])
        stored = restore_features(found["feature_map"], arrays, own) if found.get("feature_map") else None
        plain = Scaling(arrays["scaling/shift"], arrays["scaling/factor"])
        model.scaling_ = with_features(plain, stored, after=arrays.get("scaling/after"))
        dtype = np.dtype(found["classes_dtype"])
        if dtype.kind not in "biufUO":
            raise CorruptError(f"labels of type {dtype} do not belong in a model")
        model.classes_ = np.array(found["classes"], dtype=dtype)
        restore_names(model, found, int(found["features"]))
        if found.get("columns"):  # how runs stored names before models had them
            remember_names(model, found["columns"])
        model.objective_, model.bound_ = found["objective"], found["bound"]
        model.solver_, model.solver_reason_ = found["solver"], found["solver_reason"]
        model.loo_log_loss_, model.history_ = found["loo_log_loss"], found["history"]
        model.calibration_ = Calibration.from_plain(found["calibration"]) if "calibration" in found else Calibration()
        if found.get("compression"):
            model.compression_ = found["compression"]
        return model


# Models of other modules that `load` opens, imported when one of them turns up.
_MODEL_HOMES = {
    "ASKLClassifier": "kme_dist.models.askl",
    "ASKLRegressor": "kme_dist.models.askl",
    "CENClassifier": "kme_dist.models.cen",
    "ConditionalMeanEmbedding": "kme_dist.models.cme",
    "KernelMean": "kme_dist.models.means",
    "MixtureMatching": "kme_dist.models.density",
    "OneClassSupportMeasure": "kme_dist.models.bags",
    "ParzenClassifier": "kme_dist.models.means",
    "SupportMeasureClassifier": "kme_dist.models.bags",
}


def load(path: str | Path, kernels: Mapping[str, Any] | None = None, networks: Mapping[str, Any] | None = None) -> Any:
    """Load a saved model. Arrays and JSON only: nothing in the folder is ever run.

    A model with a kernel or a torch network of your own needs its class back: `kernels={"Tanimoto": Tanimoto}`,
    `networks={"MyNet": MyNet}`.
    """
    arrays, found = store.load_arrays(path)
    kind: Any = MCEClassifier
    if found.get("model") in _MODEL_HOMES:
        kind = getattr(importlib.import_module(_MODEL_HOMES[found["model"]]), found["model"])
    elif found.get("model") != "MCEClassifier":
        raise DataError(f"{path} holds {found.get('model') or found.get('format')!r}, not a kme-dist model")
    if found.get("model_format") != _FORMAT:
        raise DataError(f"{path} has model format {found.get('model_format')!r}; this version reads format {_FORMAT}")
    try:
        return kind._restore(arrays, found, {**(kernels or {}), **(networks or {})})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, KMEError):
            raise
        raise CorruptError(f"{path} is not a complete model: {error!r}; save it again") from error


def in_memory(part: Any) -> Any:
    """A Dask array or data frame, gathered; anything else as it is."""
    return part.compute() if hasattr(part, "dask") and hasattr(part, "compute") else part


def _values_per_class(g: Any, classes: np.ndarray) -> np.ndarray:
    if callable(g):
        return np.asarray([g(label) for label in classes], dtype=np.float64)
    if isinstance(g, Mapping):
        missing = [label for label in classes.tolist() if label not in g]
        if missing:
            raise DataError(f"expectation: the mapping has no value for label {missing[0]!r}")
        return np.asarray([g[label] for label in classes.tolist()], dtype=np.float64)
    values = np.asarray(g, dtype=np.float64)
    if values.shape[:1] != classes.shape:
        raise DataError(f"expectation: needs one value for each of {len(classes)} classes, got shape {values.shape}")
    return values


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _print_record(record: Record) -> None:
    if record["step"] == 1 or record["step"] % 50 == 0:
        print(
            f"{record['phase']:>10} step {record['step']:>5}/{record['steps']}  q {record['objective']:.4g}  "
            f"risk {record['risk']:.4g}  r {record['complexity']:.4g}  lambda {record['regularization']:.2e}"
        )
