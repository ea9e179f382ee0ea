"""The scikit-learn face: constructors store, `fit` calls `run`, prediction calls `core`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import StratifiedKFold
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core import kernels
from kme_dist.core.kernels import Kernel
from kme_dist.core.objective import generalisation_bound
from kme_dist.data import store
from kme_dist.data.dataset import Dataset
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError
from kme_dist.run import learn as learning
from kme_dist.run import solve
from kme_dist.run.learn import LearnSettings, Record
from kme_dist.run.scaling import Scaling

_SELECTED = ("rcb", "validation")  # what objective="auto" chooses between
_FORMAT = 1
_ONE_THREAD_ROWS = 4_000


class MCEClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
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
    solver, centres : the final fit: "auto", "cholesky" (exact) or "nystrom" with so many centres.
    backend, dtype : "auto" | "numpy" | "cupy", "float32" | "float64". Raw rows (scaling=None) so far from the origin
        that float32 cannot tell them apart are learned in float64 all the same.
    random_state : whole number; decides batches, splits and centres.
    probability_floor : no label gets less probability than this before normalising. None: 1/(n + m), since n rows
        cannot prove anything rarer; 0 is the published clip-normalisation.

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

    # --- fitting ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, callback: Callable[[Record], None] | None = None) -> Self:
        """Learn the kernel and λ, then solve for the embedding on all rows.

        X is a table of numbers with y its labels, or an open `Dataset` (its "train" split where it has one), which
        brings its own labels. `callback` receives the record of every learning step (see `history_`).
        """
        self._check_settings()
        if isinstance(X, Dataset):
            X, y = _read_dataset(X, y)
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"y holds one class only ({self.classes_[0]!r}); a classifier needs rows of at least two classes"
            )
        seed = self._seed()
        self.scaling_ = Scaling.learn(X, self.scaling)
        rows = devices.to_device(self.scaling_.apply(X, self._working_dtype(X)), self._device())
        self.probability_floor_ = self._floor(len(X))
        start = kernels.from_config(self.kernel, n_features=X.shape[1])
        report = callback or (_print_record if self.verbose else None)
        choose = {"cv": self._fit_cv, "median": self._fit_median}.get(self.objective, self._fit_learned)
        # Small factorisations gain nothing from a second BLAS thread and stall when the other core is busy.
        with devices.blas_threads(1 if len(rows) <= _ONE_THREAD_ROWS else None):
            choose(start, rows, codes, seed, report)
        self.kernel_ = self.embedding_.kernel
        self.regularization_ = self.embedding_.regularization
        self.bound_ = self._bound(rows, codes)
        return self

    def _check_settings(self) -> None:
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
        if self.client is not None:
            raise ConfigError(
                "client: the estimator learns in one process in this version; leave client=None, "
                "or learn over a cluster with `kme-dist learn`"
            )

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

    def _settings(self, objective: str, n: int, seed: int) -> LearnSettings:
        batch = self.batch_size if self.batch_size is not None else _default_batch(n)
        auto, as_published = self.objective == "auto", self.objective in ("rcb", "erm")
        return LearnSettings(
            objective=objective,
            risk=self.risk,
            complexity_weight=self.complexity_weight,
            steps=int(self.steps),
            batch_size=batch,
            learning_rate=self.learning_rate * (0.5 if auto else 1.0),
            optimizer=self.optimizer,
            train_share=0.8 if auto else 0.5,
            prior_width=1.0 if auto else None,
            patience=None if as_published else 50 if auto else 100,
            seed=seed,
        )

    def _fit_learned(
        self, start: Kernel, rows: Any, codes: np.ndarray, seed: int, report: Callable[[Record], None] | None
    ) -> None:
        if self.steps == 0:
            candidates = {"given": learning.Learned(start, float(self.regularization), [])}
        else:
            names: tuple[str, ...] = (self.objective,)
            lam = float(self.regularization)
            if self.objective == "auto":
                names = _SELECTED
                start, lam = solve.scale_to_data(
                    start, rows, codes, len(self.classes_), floor=self.probability_floor_, seed=seed
                )
            candidates = {
                name: learning.learn(
                    start,
                    lam,
                    rows,
                    codes,
                    len(self.classes_),
                    self._settings(name, len(rows), seed),
                    report,
                )
                for name in names
            }
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
        kernel = _with_length_scale(start, width)
        solution = self._solve(
            kernel, float(self.regularization), rows, codes, seed, retune=bool(self.refit_regularization)
        )
        self.history_ = []
        self._keep("median", solution, {"median": solution.loo_log_loss})

    def _fit_cv(
        self, start: Kernel, rows: Any, codes: np.ndarray, seed: int, report: Callable[[Record], None] | None
    ) -> None:
        """k-fold search over one common length scale and λ: the baseline of the paper."""
        width = learning.median_length_scale(devices.to_host(rows), seed)
        folds = int(max(2, min(5, np.bincount(codes).min())))
        splits = list(
            StratifiedKFold(folds, shuffle=True, random_state=seed % 2**32).split(np.zeros(len(codes)), codes)
        )
        grid = [(width * factor, lam) for factor in (0.1, 0.3, 1.0, 3.0) for lam in 10.0 ** np.arange(-6.0, 1.0)]
        scores = []
        for scale, lam in grid:
            kernel = _with_length_scale(start, scale)
            hits = 0
            for train, test in splits:
                fitted = self._solve(
                    kernel, float(lam), learning.select(rows, train), codes[train], seed, retune=False
                ).embedding
                decided = devices.to_host(fitted.decision(learning.select(rows, test))).argmax(axis=1)
                hits += int((decided == codes[test]).sum())
            scores.append(hits / len(codes))
        scale, lam = grid[int(np.argmax(scores))]
        self.history_ = []
        solution = self._solve(_with_length_scale(start, scale), float(lam), rows, codes, seed, retune=False)
        self._keep("cv", solution, {})

    def _bound(self, rows: Any, codes: np.ndarray) -> float:
        """The right-hand side of the generalisation bound at (a sample of) the training rows."""
        sample = slice(0, 20_000)
        P = devices.to_host(self.embedding_.decision(rows[sample])).astype(np.float64)
        own = np.clip(P[np.arange(len(P)), codes[sample]], 1e-15, 1)
        V = devices.to_host(self.embedding_.weights).astype(np.float64)
        centres = devices.to_host(self.embedding_.decision(self.embedding_.centres)).astype(np.float64)
        complexity = self.embedding_.kernel.alpha(rows[sample]) * np.sqrt(max(float((V * centres).sum()), 0.0))
        return generalisation_bound(float(-np.log(own).mean()), complexity, len(codes))

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

        That lead is of the normalised probabilities, so that it ranks rows as `predict_proba` does; ties (both at the
        floor) go by the decision probabilities.
        """
        P = self.decision_probabilities(X)
        if len(self.classes_) > 2:
            return P
        p = mce.clip_normalise(P, self.probability_floor_)
        return np.asarray(p[:, 1] - p[:, 0] + 1e-12 * (P[:, 1] - P[:, 0]))

    def predict(self, X: Any) -> np.ndarray:
        """The class with the largest decision probability."""
        best = self.decision_probabilities(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Clip-normalised probabilities (see `probability_floor`), columns in the order of `classes_`."""
        return np.asarray(mce.clip_normalise(self.decision_probabilities(X), self.probability_floor_))

    def entropy(self, X: Any, kind: str = "clip") -> np.ndarray:
        """Uncertainty in nats: of the clip-normalised probabilities ("clip"), or the embedding's own ("rkhs")."""
        if kind not in ("clip", "rkhs"):
            raise ConfigError(f"kind={kind!r} is unknown; choose 'clip' or 'rkhs'")
        P = self.decision_probabilities(X)
        return np.asarray(mce.entropy(P, self.probability_floor_) if kind == "clip" else mce.rkhs_entropy(P))

    def expectation(self, X: Any, g: Any) -> np.ndarray:
        """E[g(Y) | x]: `g` is a function of the label, a mapping from label to value, or one value per class."""
        values = _values_per_class(g, self.classes_)
        return np.asarray(mce.expectation(self.decision_probabilities(X), values))

    # --- storing ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted model as Zarr arrays and JSON; `kme_dist.load` brings it back without running code."""
        check_is_fitted(self, "embedding_")
        settings = {**self.get_params(deep=False), "client": None}
        if isinstance(settings["kernel"], Kernel):
            settings["kernel"] = settings["kernel"].to_config()
        arrays = {
            "centres": devices.to_host(self.embedding_.centres),
            "weights": devices.to_host(self.embedding_.weights),
            "scaling/shift": self.scaling_.shift,
            "scaling/factor": self.scaling_.factor,
        }
        labels = self.classes_.tolist()
        if not all(isinstance(label, str | int | float | bool) for label in labels):
            raise DataError(f"labels of type {type(labels[0]).__name__} cannot be stored; use strings or numbers")
        attributes = {
            "model": "MCEClassifier",
            "model_format": _FORMAT,
            "settings": {name: _plain(value) for name, value in settings.items()},
            "kernel": self.kernel_.to_config(),
            "regularization": self.regularization_,
            "probability_floor": self.probability_floor_,
            "classes": labels,
            "classes_dtype": self.classes_.dtype.str,
            "features": self.n_features_in_,
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
            "objective": self.objective_,
            "solver": self.solver_,
            "solver_reason": self.solver_reason_,
            "bound": self.bound_,
            "loo_log_loss": self.loo_log_loss_,
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
        model.scaling_ = Scaling(arrays["scaling/shift"], arrays["scaling/factor"])
        dtype = np.dtype(found["classes_dtype"])
        if dtype.kind not in "biufUO":
            raise CorruptError(f"labels of type {dtype} do not belong in a model")
        model.classes_ = np.array(found["classes"], dtype=dtype)
        model.n_features_in_ = int(found["features"])
        if found["feature_names"]:
            model.feature_names_in_ = np.array(found["feature_names"], dtype=object)
        model.objective_, model.bound_ = found["objective"], found["bound"]
        model.solver_, model.solver_reason_ = found["solver"], found["solver_reason"]
        model.loo_log_loss_, model.history_ = found["loo_log_loss"], found["history"]
        return model


def load(path: str | Path, kernels: Mapping[str, type[Kernel]] | None = None) -> MCEClassifier:
    """Load a saved model. Arrays and JSON only: nothing in the folder is ever run.

    A model with a kernel class of your own needs it back: `load(path, kernels={"Tanimoto": Tanimoto})`.
    """
    arrays, found = store.load_arrays(path)
    if found.get("model") != "MCEClassifier":
        raise DataError(f"{path} holds {found.get('model') or found.get('format')!r}, not a kme-dist model")
    if found.get("model_format") != _FORMAT:
        raise DataError(f"{path} has model format {found.get('model_format')!r}; this version reads format {_FORMAT}")
    try:
        return MCEClassifier._restore(arrays, found, kernels or {})
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
            f"{data.path} takes {needed / 1e9:.1f} GB in memory, {available / 1e9:.1f} GB are free; fit a smaller split"
        )
    X, codes = data.read(split)
    return X.reshape(len(X), -1).astype(np.float64), np.asarray(data.classes)[codes]


def _default_batch(n: int) -> int | None:
    return None if n <= 1000 else 1000


def _with_length_scale(kernel: Kernel, width: float) -> Kernel:
    names = list(learning.length_scale_names(kernel))
    if not names:
        raise ConfigError(f"{kernel!r} has no length scale: objective 'median' and 'cv' cannot set one")
    return kernel.replace({name: np.full(kernel.parameters[name].shape, width) for name in names})


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
