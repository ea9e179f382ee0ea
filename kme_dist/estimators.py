"""The scikit-learn face: constructors store, `fit` calls `run`, prediction calls `core`."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core import kernels
from kme_dist.core.calibration import Calibration, expectation
from kme_dist.core.kernels import Kernel
from kme_dist.core.objective import generalisation_bound
from kme_dist.data import store
from kme_dist.data.batches import plan_batches, read_batch
from kme_dist.data.dataset import Dataset
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError
from kme_dist.run import learn as learning
from kme_dist.run import solve
from kme_dist.run.executors import DaskExecutor
from kme_dist.run.features import features_of, restore_features, with_features
from kme_dist.run.fitting import fit_arrays
from kme_dist.run.learn import Record
from kme_dist.run.refining import Refinable
from kme_dist.run.scaling import Scaling
from kme_dist.run.train import (
    SELECTED,
    Recipe,
    Trained,
    cross_validate,
    fit_candidates,
    learn_candidates,
    with_length_scale,
)

_FORMAT = 1
_ONE_THREAD_ROWS = 4_000
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
    backend, dtype : "auto" | "numpy" | "cupy", "float32" | "float64". Raw rows (scaling=None) so far from the origin
        that float32 cannot tell them apart are learned in float64 all the same.
    random_state : whole number; decides batches, splits and centres.
    probability_floor : no label gets less probability than this before normalising. None: 1/(n + m), since n rows
        cannot prove anything rarer; 0 is the published clip-normalisation.
    calibration : {"none", "temperature", "isotonic"}
        A map from clip-normalised to calibrated probabilities, fitted to leave-one-out predictions; see `calibrate`,
        too. Labels do not depend on it.
    features : a feature map (or its config) that scaled rows are taken through first; the kernel stands on it.

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
        """
        self._check_settings()
        report = callback or (_print_record if self.verbose else None)
        if self.client is not None:
            return self._fit_over_client(X, y, report)
        if isinstance(X, Dataset):
            X, y = _read_dataset(X, y)
        X, y = (in_memory(part) for part in (X, y))
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"y holds one class only ({self.classes_[0]!r}); a classifier needs rows of at least two classes"
            )
        seed = self._seed()
        self.scaling_ = with_features(Scaling.learn(X, self.scaling), self.features, seed)
        rows = devices.to_device(self.scaling_.apply(X, self._working_dtype(X)), self._device())
        self.probability_floor_ = self._floor(len(X))
        start = kernels.from_config(self.kernel, n_features=rows.shape[1])
        choose = {"cv": self._fit_cv, "median": self._fit_median}.get(self.objective, self._fit_learned)
        # Small factorisations gain nothing from a second BLAS thread and stall when the other core is busy.
        with devices.blas_threads(1 if len(rows) <= _ONE_THREAD_ROWS else None):
            choose(start, rows, codes, seed, report)
        self.kernel_ = self.embedding_.kernel
        self.regularization_ = self.embedding_.regularization
        self.bound_ = self._bound(rows, codes)
        self.calibration_ = self._leave_one_out_calibration(rows, codes, seed)
        return self

    def _check_settings(self) -> None:
        Calibration(self.calibration)
        known = ("auto", *learning.OBJECTIVES, "cv", "median")
        if self.objective not in known:
            raise ConfigError(f"objective={self.objective!r} is unknown; choose one of {', '.join(known)}")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype={self.dtype!r} is unknown; choose 'float32' or 'float64'")
        if not isinstance(self.steps, int | np.integer) or self.steps < 0:
            raise ConfigError(f"steps={self.steps!r}: needs a whole number from 0")
        if self.batch_size is not None and (not isinstance(self.batch_size, int | np.integer) or self.batch_size < 1):
            raise ConfigError(f"batch_size={self.batch_size!r}: needs a whole number from 1, or None")
        if self.centres is not None and (not isinstance(self.centres, int | np.integer) or self.centres < 1):
            raise ConfigError(f"centres={self.centres!r}: needs a whole number from 1, or None")
        for name in ("regularization", "learning_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}: needs a positive number")

    def _working_dtype(self, X: np.ndarray) -> str:
        """The precision to learn in: double where single cannot tell the rows apart.

        Squared distances come from |x|² + |x'|² - 2 x·x', whose rounding error is that of |x|². Scaled rows lie near
        the origin; rows taken as they are may be far from it (years, coordinates).
        """
        if self.scaling is None and self.dtype == "float32":
            variance = X.var(axis=0, dtype=np.float64)
            varying = variance[variance > 0]
            far = float(np.sum(X.mean(axis=0, dtype=np.float64) ** 2))
            if varying.size and far * np.finfo(np.float32).eps > 1e-3 * float(varying.min()):
                return "float64"
        return self.dtype

    def _floor(self, n: int) -> float:
        if self.probability_floor is None:
            return 1.0 / (n + len(self.classes_))
        if not isinstance(self.probability_floor, int | float | np.number) or not 0 <= self.probability_floor < 1:
            raise ConfigError(f"probability_floor={self.probability_floor!r}: needs a number from 0 to below 1")
        return float(self.probability_floor)

    def _seed(self) -> int:
        if self.random_state is None:
            return int(np.random.SeedSequence().generate_state(1)[0])
        if not isinstance(self.random_state, int | np.integer) or self.random_state < 0:
            raise ConfigError(f"random_state={self.random_state!r}: needs a whole number from 0, or None")
        return int(self.random_state)

    def _device(self) -> str:
        return devices.resolve(self.backend)

    def _recipe(self, start: Kernel, seed: int) -> Recipe:
        """The same settings, for whoever learns and fits with them."""
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
        )

    def _fit_over_client(self, X: Any, y: Any, report: Callable[[Record], None] | None) -> Self:
        """Learn and fit on the workers of `client`; rows that are not stored yet are stored for them first."""
        if self.features is not None:
            raise ConfigError("features with a client: learn over a cluster with CENClassifier(network=features)")
        executor = DaskExecutor(self.client)
        with tempfile.TemporaryDirectory(prefix="kme-dist-") as scratch:
            if isinstance(X, Dataset):
                if y is not None:
                    raise DataError(f"{X.path} brings its own labels; call fit(dataset) without y")
                data = X
            else:
                _check_one_machine(self.client)
                data = ingest((X, y), Path(scratch) / "rows.zarr", task="classification", dtype="float64")
            seed = self._seed()
            start = kernels.from_config(self.kernel, n_features=data.features)
            recipe = self._recipe(start, seed)
            # Workers elsewhere reach the data set, but not a folder of this machine.
            place = data.place.sibling(f".{data.place.name}.fit-{os.getpid()}") if X is data else Path(scratch) / "fit"
            candidates = learn_candidates(data, recipe, executor=executor, callback=report)
            trained = fit_candidates(data, recipe, candidates, executor=executor, scratch=place)
            return self.adopt(data, recipe, trained)

    def adopt(self, data: Dataset, recipe: Recipe, trained: Trained, split: str | None = "auto") -> Self:
        """Become the model that was trained on (a split of) `data` elsewhere."""
        assert data.classes is not None
        split = ("train" if "train" in data.splits else None) if split == "auto" else split
        fit = trained.fit
        self.classes_ = np.asarray(data.classes)
        self.n_features_in_ = data.features
        self.columns_ = list(data.feature_names)
        self.scaling_, self.embedding_ = fit.scaling, fit.embedding
        self.probability_floor_ = recipe.floor(fit.rows, len(self.classes_))
        self.objective_, self.loo_log_loss_ = trained.best.name, dict(trained.losses)
        self.history_ = [record for candidate in trained.candidates for record in candidate.history]
        self.solver_, self.solver_reason_ = fit.solver, fit.reason
        self.kernel_, self.regularization_ = trained.best.kernel, fit.regularization
        sample = plan_batches(data, batch_size=min(_SAMPLE_ROWS, fit.rows), seed=recipe.seed, split=split)
        batch = read_batch(data, sample, 0)
        rows = devices.to_device(self.scaling_.apply(batch.X, devices.precision(fit.embedding.weights)), self._device())
        self.bound_ = self._bound(rows, batch.y, fit.rows)
        self.calibration_ = self._leave_one_out_calibration(rows, batch.y, recipe.seed, fit.rows)
        return self

    def _fit_learned(
        self, start: Kernel, rows: Any, codes: np.ndarray, seed: int, report: Callable[[Record], None] | None
    ) -> None:
        if self.steps == 0:
            candidates = {"given": learning.Learned(start, float(self.regularization), [])}
        else:
            names: tuple[str, ...] = (self.objective,)
            recipe, lam = self._recipe(start, seed), float(self.regularization)
            if self.objective == "auto":
                names = SELECTED
                start, lam = solve.scale_to_data(
                    start, rows, codes, len(self.classes_), floor=self.probability_floor_, seed=seed
                )
            settings = {name: recipe.settings(name, len(rows)) for name in names}
            m = len(self.classes_)
            candidates = {name: learning.learn(start, lam, rows, codes, m, settings[name], report) for name in names}
        retune = self.steps > 0 and (self.refit_regularization or len(candidates) > 1)
        solutions = {
            name: self._solve(learned.kernel, learned.regularization, rows, codes, seed, retune)
            for name, learned in candidates.items()
        }
        losses = {name: solution.loo_log_loss for name, solution in solutions.items()}
        best = min(losses, key=lambda name: math.inf if (loss := losses[name]) is None else loss)
        if not self.refit_regularization and retune:
            learned = candidates[best]
            solutions[best] = self._solve(learned.kernel, learned.regularization, rows, codes, seed, retune=False)
        self.history_ = [record for learned in candidates.values() for record in learned.history]
        self._keep(best, solutions[best], losses)

    def _keep(self, objective: str, solution: solve.Solution, losses: Mapping[str, float | None]) -> None:
        self.objective_ = objective
        self.solver_ = solution.solver
        self.solver_reason_ = solution.reason
        self.loo_log_loss_ = {name: loss for name, loss in losses.items() if loss is not None}
        self.embedding_ = solution.embedding

    def _solve(
        self, kernel: Kernel, lam: float, rows: Any, codes: np.ndarray, seed: int, retune: bool
    ) -> solve.Solution:
        dtype = devices.precision(rows)
        solver, reason = solve.choose_solver(self.solver, len(rows), self.centres, dtype, self._device())
        if solver in ("tiled", "pcg"):
            return fit_arrays(
                kernel, devices.to_host(rows), codes, regularization=lam, retune=retune, solver=solver,
                floor=self.probability_floor_, seed=seed,
            )  # fmt: skip
        return solve.fit(
            kernel,
            rows,
            codes,
            len(self.classes_),
            regularization=lam,
            retune=retune,
            solver=solver,
            reason=reason,
            centres=self.centres,
            floor=self.probability_floor_,
            seed=seed,
        )

    def _fit_median(
        self, start: Kernel, rows: Any, codes: np.ndarray, seed: int, report: Callable[[Record], None] | None
    ) -> None:
        width = learning.median_length_scale(devices.to_host(rows), seed)
        kernel = with_length_scale(start, width)
        solution = self._solve(
            kernel, float(self.regularization), rows, codes, seed, retune=bool(self.refit_regularization)
        )
        self.history_ = []
        self._keep("median", solution, {"median": solution.loo_log_loss})

    def _fit_cv(
        self, start: Kernel, rows: Any, codes: np.ndarray, seed: int, report: Callable[[Record], None] | None
    ) -> None:
        width = learning.median_length_scale(devices.to_host(rows), seed)
        kernel, lam = cross_validate(start, rows, codes, len(self.classes_), width, seed)
        self.history_ = []
        self._keep("cv", self._solve(kernel, lam, rows, codes, seed, retune=False), {})

    def _bound(self, rows: Any, codes: np.ndarray, total: int | None = None) -> float:
        """The right-hand side of the generalisation bound at (a sample of) the training rows."""
        sample = slice(0, 20_000)
        P = devices.to_host(self.embedding_.decision(rows[sample])).astype(np.float64)
        own = np.clip(P[np.arange(len(P)), codes[sample]], 1e-15, 1)
        V = devices.to_host(self.embedding_.weights).astype(np.float64)
        centres = devices.to_host(self.embedding_.decision(self.embedding_.centres)).astype(np.float64)
        complexity = self.embedding_.kernel.alpha(rows[sample]) * np.sqrt(max(float((V * centres).sum()), 0.0))
        return generalisation_bound(float(-np.log(own).mean()), complexity, total or len(codes))

    # --- predicting ------------------------------------------------------------------------------

    def decision_probabilities(self, X: Any) -> np.ndarray:
        """f(x), one column per class; rows need not add up to one and entries may leave [0, 1]."""
        check_is_fitted(self, "embedding_")
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
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
        arrays = {
            "centres": devices.to_host(self.embedding_.centres),
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
            "probability_floor": self.probability_floor_,
            "classes": labels,
            "classes_dtype": self.classes_.dtype.str,
            "features": self.n_features_in_,
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
            "columns": getattr(self, "columns_", []),
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
        model.embedding_ = mce.Embedding(
            kernel,
            devices.to_device(arrays["centres"], device),
            devices.to_device(arrays["weights"], device),
            float(found["regularization"]),
        )
        model.kernel_, model.regularization_ = kernel, float(found["regularization"])
        model.probability_floor_ = float(found["probability_floor"])
        stored = restore_features(found["feature_map"], arrays, own) if found.get("feature_map") else None
        model.scaling_ = with_features(Scaling(arrays["scaling/shift"], arrays["scaling/factor"]), stored)
        dtype = np.dtype(found["classes_dtype"])
        if dtype.kind not in "biufUO":
            raise CorruptError(f"labels of type {dtype} do not belong in a model")
        model.classes_ = np.array(found["classes"], dtype=dtype)
        model.n_features_in_ = int(found["features"])
        if found["feature_names"]:
            model.feature_names_in_ = np.array(found["feature_names"], dtype=object)
        if found.get("columns"):
            model.columns_ = [str(name) for name in found["columns"]]
        model.objective_, model.bound_ = found["objective"], found["bound"]
        model.solver_, model.solver_reason_ = found["solver"], found["solver_reason"]
        model.loo_log_loss_, model.history_ = found["loo_log_loss"], found["history"]
        model.calibration_ = Calibration.from_plain(found["calibration"]) if "calibration" in found else Calibration()
        if found.get("compression"):
            model.compression_ = found["compression"]
        return model


# Models of other modules that `load` opens, imported when one of them turns up.
_MODEL_HOMES = {
    "ASKLClassifier": "kme_dist.askl",
    "ASKLRegressor": "kme_dist.askl",
    "CENClassifier": "kme_dist.networks",
    "ConditionalMeanEmbedding": "kme_dist.conditional",
    "KernelMean": "kme_dist.means",
    "MixtureMatching": "kme_dist.density",
    "OneClassSupportMeasure": "kme_dist.bags",
    "ParzenClassifier": "kme_dist.means",
    "SupportMeasureClassifier": "kme_dist.bags",
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


def _read_dataset(data: Dataset, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels of a data set that fits in memory, the labels under their own names."""
    if y is not None:
        raise DataError(f"{data.path} brings its own labels; call fit(dataset) without y")
    if data.classes is None:
        raise DataError(f"{data.path} has no class labels; ingest it again with the column named by `label`")
    split = "train" if "train" in data.splits else None
    needed, available = data.split_rows(split) * data.features * 8, devices.free_bytes("numpy")
    if needed > 0.5 * available:
        raise DataError(
            f"{data.path} takes {needed / 1e9:.1f} GB in memory, {available / 1e9:.1f} GB are free; pass a client"
        )
    X, codes = data.read(split)
    return X.reshape(len(X), -1).astype(np.float64), np.asarray(data.classes)[codes]


def in_memory(part: Any) -> Any:
    """A Dask array or data frame, gathered; anything else as it is."""
    return part.compute() if hasattr(part, "dask") and hasattr(part, "compute") else part


def _check_one_machine(client: Any) -> None:
    hosts = {worker["host"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()}
    if not hosts <= {"127.0.0.1", "::1", "localhost"}:
        raise DataError(
            f"fit: rows in memory cannot be read by workers at {', '.join(sorted(hosts))}; store them where all can "
            "(kme_dist.ingest((X, y), place)) and pass fit(kme_dist.open_dataset(place))"
        )


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
