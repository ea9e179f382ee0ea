"""The multiclass conditional embedding: a classifier that learns its kernel and can be calibrated and compressed.

clf = MCEClassifier().fit(X, y)                                 # calibrated by leave-one-out, without held-out rows
clf.calibrate(X_held_out, y_held_out, method="isotonic")
small = clf.compress(n_centres=200)
small.compression_                                              # the loss of accuracy
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core import kernels
from kme_dist.core.calibration import KINDS, Calibration
from kme_dist.core.compression import compress
from kme_dist.core.embedding import FeatureEmbedding
from kme_dist.core.features import SAMPLERS, Identity
from kme_dist.core.kernels import Kernel, Linear, Matern
from kme_dist.core.metrics import class_codes
from kme_dist.core.objective import generalisation_bound
from kme_dist.core.risk import positive_rows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.ingest import positive_bytes
from kme_dist.data.rows import RowsRef, warn_of_squeezed
from kme_dist.errors import ConfigError, counted
from kme_dist.models.account import Account
from kme_dist.models.base import Arrays, Facts, Own, get_rows, has_rows, on_workers, put_rows
from kme_dist.models.classifier import EmbeddingClassifier, sample_weights
from kme_dist.models.objects import check_objects, objects_of
from kme_dist.models.settings import RandomState, Rule, integer, non_negative, one_of, positive, truth, truth_or
from kme_dist.run.fit import Fit
from kme_dist.run.learners import OBJECTIVES, Record
from kme_dist.run.maps import as_features, features_of, restore_features, with_features
from kme_dist.run.spectral import NAME as SPECTRAL
from kme_dist.run.train import Recipe, Trained, fit_candidates, gaussian_of, learn_candidates
from kme_dist.run.workers import scratch_for

_SAMPLE_ROWS = 2_000  # of the fit, sampled for the bound


class MCEClassifier(EmbeddingClassifier):
    """Multiclass conditional embedding: a probabilistic kernel classifier that learns its own kernel.

    Parameters
    ----------
    kernel : str or Kernel
        A name ("gaussian" and other stationary kernels get one length scale per feature) or a kernel object;
        the start of learning. "auto" learns Gaussian length scales, and with objective="auto" also tries them in Matérn
        kernels.
    objective : {"auto", "calibrated", "rcb", "validation", "loo", "erm", "cv", "median"}
        The quantity minimised. "auto" starts from the best common length scale, learns by the leave-one-out log loss of
        calibrated decisions ("calibrated") in at most 100 steps, and keeps the best of several kernels, tuned and
        compared by that loss on a sample of rows; with 40,000 rows or more also learned features
        (`features="spectral"`). "cv" is a k-fold grid search over one length scale and λ, "median" the median-distance
        heuristic.
    refit_regularization : bool
        Retune λ by leave-one-out after learning; False keeps what was learned, as published.
    risk, complexity_weight : the loss summed ("sum") or averaged ("mean"), and the multiplier τ of the complexity term
        (None: 4e for rcb, 1 for validation and loo).
    regularization : initial λ; with steps=0 kernel and λ are used as given.
    batch_size, steps, learning_rate, optimizer : stochastic learning; batch_size=None depends on the number of rows.
    scaling : {"auto", "unit", "standard", None}; learned by the model and applied to all rows. "auto" is "unit", and
        with objective="auto" features with heavy tails get normal scores if that lowers the leave-one-out log loss.
    solver, centres : the final fit: "auto", "cholesky", "tiled" or "pcg" (exact), "nystrom" with a number of centres
        or "falkon" with more than 4,000.
    backend, dtype : "auto" | "numpy" | "cupy", "float32" | "float64". "float32" is used where it gives three digits;
        solves that need more, and unscaled rows whose differences it cannot resolve, use float64.
    random_state : an integer >= 0, a RandomState or Generator (each fit draws its seed from it) or None (random);
        determines batches, splits and centres. The seed of the fit is `seed_`.
    verbose : 0 is silent, 1 prints a short account of the fit to stderr, 2 also every step.
    probability_floor : no label gets less probability than this before normalising. None: 1/(n + m), since n rows
        cannot support anything rarer; 0 is the published clip-normalisation.
    calibration : {"auto", "none", "temperature", "softmax", "isotonic"}
        A map from decision to calibrated probabilities, fitted to training rows that were left out; see also
        `calibrate`. "auto" takes the one with the lowest log loss. Labels do not depend on it.
    class_weight : None, "balanced" (all classes have the same total weight), or a mapping of labels to numbers >= 0
        (1 for labels not in it); multiplied with the weights of rows.
    features : a feature map (or its config) applied to scaled rows before the kernel. With solver="features" or a
        linear kernel, the fit solves for the weights of the features: p x p equations instead of n x n. An integer is
        the number of random features of the learned kernel. "spectral" learns features on all rows instead of a kernel
        (cosines of learned frequencies, dense layers, class probabilities): for tens of thousands of rows and more,
        where objective="auto" with kernel="auto" tries it too and keeps what has the lower loss on held-out rows.
    early_stopping, n_iter_no_change : stop learning when the smoothed objective has not decreased by 0.1 % for this
        many steps (None: 50 for objective="auto", else 100), and keep the best kernel. "auto" stops all but "rcb" and
        "erm", which run all steps as published, and objective="auto", whose rate falls to the last step.
    warm_start : `fit` of a fitted model starts from the learned kernel and λ instead of `kernel` and `regularization`;
        with steps=0 it uses them as they are. A kernel of another form is learned from its own start.
    fit_seconds, memory : what the final solve may take under solver="auto", processor seconds of this machine and bytes
        (or "4GiB") of one worker. Exact if it fits, else as many centres as do. None: an amount of work that does not
        depend on the machine (all rows up to 32,000, 16,000 centres for 100,000 rows), and 60 % of the free memory, or
        of the memory limit of a worker.
    client, n_jobs : a dask.distributed.Client, or a number of worker processes of this machine that `fit` opens and
        closes (None: this process with a thread for each core, or for OMP_NUM_THREADS of them; 1: one thread; -1: a
        process for each core). The same bits in any case; pays from minutes on.

    Attributes
    ----------
    kernel_, regularization_ : what was learned.   classes_ : the labels.   objective_ : that of the best candidate.
    history_ : one record per step.   n_iter_ : their number.
    bound_ : the generalisation bound at the training rows, a diagnostic.
    feature_importances_ : measured relevance of the features; `feature_importances(groups)` for several together.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = MCEClassifier(steps=50).fit(X, y)
    >>> clf.predict_proba(X[:2]).shape
    (2, 3)
    """

    _SPARSE: ClassVar[bool] = True
    _RULES: ClassVar[Mapping[str, Rule]] = {
        **EmbeddingClassifier._RULES,
        "calibration": one_of("auto", *KINDS),
        "objective": one_of("auto", *OBJECTIVES, "cv", "median"),
        "complexity_weight": non_negative(optional=True),
        "centres": integer(1, optional=True),
        "early_stopping": truth_or("auto"),
        "n_iter_no_change": integer(1, optional=True),
        "warm_start": truth(),
        "fit_seconds": positive(optional=True),
    }

    def __init__(
        self,
        kernel: str | Kernel = "auto",
        objective: str = "auto",
        refit_regularization: bool = True,
        risk: str = "sum",
        complexity_weight: float | None = None,
        regularization: float = 1.0,
        batch_size: int | None = None,
        steps: int = 1000,
        learning_rate: float = 0.1,
        optimizer: str = "adam",
        scaling: str | None = "auto",
        solver: str = "auto",
        centres: int | None = None,
        backend: str = "auto",
        dtype: str = "float32",
        client: Any = None,
        random_state: RandomState = 0,
        verbose: int = 0,
        probability_floor: float | None = None,
        calibration: str = "auto",
        features: Any = None,
        early_stopping: bool | str = "auto",
        n_iter_no_change: int | None = None,
        warm_start: bool = False,
        n_jobs: int | None = None,
        fit_seconds: float | None = None,
        memory: int | str | None = None,
        class_weight: Any = None,
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
        self.early_stopping = early_stopping
        self.n_iter_no_change = n_iter_no_change
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.fit_seconds = fit_seconds
        self.memory = memory
        self.class_weight = class_weight

    # --- fitting ---------------------------------------------------------------------------------

    @on_workers
    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        callback: Callable[[Record], None] | None = None,
    ) -> Self:
        """Learn the kernel and λ, then solve for the embedding on all rows.

        X is a table of numbers with y its labels, or an open `Dataset` (its "train" split if it has one), which
        has its own labels and weights. `callback` receives the record of every learning step (see `history_`).

        `sample_weight` has a number >= 0 for each row. A row of weight 2 counts as the row twice, a row of weight 0 as
        no row: to the last bit with up to 1,000 rows (and a million numbers), unless the equal rows of the table are no
        copies, as in a few columns of categories. With more rows, what is drawn row by row depends on it (batches,
        samples, halves), and so does leave-one-out under objective "loo", which leaves out a row of weight 2 as a whole
        but only one of two equal rows; with any number, leave-one-out by centres.
        Weights below 1 on average are multiplied to be 1 on average; larger ones count as numbers of rows where rows
        are counted, as in a summed risk (`risk="sum"`): doubling all of them is the table twice.

        The result has the same bits in this process and with a `client`.
        """
        self._begin_fit()
        records: list[Record] = []
        if self.warm_start:
            self._check_same_width(X)
        with contextlib.ExitStack() as stack:
            data, folder = self._labelled_rows(X, y, stack, sample_weight)
            executor, scratch = self._executor(), scratch_for(data, folder, self._client, stack)
            recipe, rows = self.recipe(data), data.split_positive(data.training_split())
            account = Account(self.verbose, type(self).__name__, lambda name: recipe.patience(name, rows))
            account.begin(
                f"{counted(rows, 'row', ',')}, {counted(data.features, 'feature')}, "
                f"{counted(data.n_classes, 'class')}, objective {self.objective}"
            )
            if recipe.warm:
                account.say(f"starts from what was learned before: {recipe.kernel!r}")

            def step(record: Record) -> None:
                records.append(record)
                account.step(record)
                if callback is not None:
                    callback(record)

            candidates = learn_candidates(data, recipe, executor=executor, callback=step)
            account.finish_learning()
            trained = fit_candidates(
                data, recipe, candidates, executor=executor, scratch=scratch, report=account.say_once
            )
            self.adopt(data, recipe, trained)
        self.history_ = records
        self._tell_result(account)
        return self

    def _object_rows(self, X: Any, new: bool = False) -> list[Any] | None:
        if not isinstance(self.kernel, Kernel) or self.features is not None:
            return None
        found = objects_of(self.kernel, X)
        if new and found is not None:
            check_objects(self.kernel_, found, like=self.embedding_.centres)
        return found

    def _tell_result(self, account: Account) -> None:
        if self.loo_log_loss_:
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.loo_log_loss_.items())
            kept = f"; kept {self.objective_}" if len(self.loo_log_loss_) > 1 else ""
            account.say(f"leave-one-out log loss: {losses}{kept}")
        rows = "rows held out" if self.solver_ == "falkon" else "leave-one-out"
        tuned = f" (by {rows})" if self.loo_log_loss_ and self.refit_regularization else ""
        if (curves := self.scaling_.curves) is not None:
            account.say(f"{counted(len(curves.columns), 'feature')} with heavy tails: normal scores")
        account.say(f"lambda {self.regularization_:.3g}{tuned}, kernel {self.kernel_!r}")
        kind = self.calibration_.kind
        shown = f" {self.calibration_.temperature:.3g}" if kind == "temperature" else ""
        account.say(f"calibration {kind}{shown}")
        account.done()

    @property
    def n_iter_(self) -> int:
        """Steps of learning made, by all candidates together."""
        self._check_fitted()
        return sum({record["phase"]: int(record["step"]) for record in self.history_}.values())

    @property
    def _learns_features(self) -> bool:
        return isinstance(self.features, str) and self.features == SPECTRAL

    def _check_learned_features(self) -> None:
        if self.solver not in ("auto", "features") or self.centres is not None:
            raise ConfigError("features='spectral' solves for weights of the features; remove `solver` and `centres`")
        if not isinstance(self.kernel, str) or self.kernel not in ("auto", "linear"):
            raise ConfigError(f"features='spectral' replaces the kernel; remove kernel={self.kernel!r}")

    def _check_together(self) -> None:
        if self._learns_features:
            self._check_learned_features()
            return
        count = isinstance(self.features, int | np.integer)
        if isinstance(self.features, bool | float | np.floating) or (count and self.features < 1):
            raise ConfigError(f"features={self.features!r}: must be a feature map or an integer >= 1")
        name = self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "name", "")
        name = "gaussian" if name == "auto" else name
        if count and name not in SAMPLERS:
            raise ConfigError(
                f"features={self.features}: kernel={self.kernel!r} has no random features; choose one of "
                f"{', '.join(SAMPLERS)}, or pass a feature map"
            )
        if count and self.solver not in ("auto", "features"):
            raise ConfigError(
                f"features={self.features} random features require solver='features', not {self.solver!r}; "
                "remove one of them"
            )
        if self.solver != "features":
            return
        if self.features is None and name != "linear":
            raise ConfigError(
                "solver='features' requires explicit features: set `features` (a feature map, or a number of random "
                "features of the kernel), or kernel='linear'"
            )
        if not count and name not in ("linear", "gaussian", "auto"):  # the default counts as not set
            raise ConfigError(
                f"solver='features' does not support kernel={self.kernel!r} on top of the features; "
                "remove the kernel, or use another solver"
            )

    def recipe(self, data: RowSource) -> Recipe:
        """The settings as a recipe for learning and fitting."""
        width, seed = data.features, self._seed()
        if self.features is not None and not isinstance(self.features, int | np.integer) and not self._learns_features:
            width = int(np.shape(as_features(self.features, width, seed).forward(np.zeros((1, width))))[1])
        linear = self.solver == "features" and not isinstance(self.features, int | np.integer)
        chosen = "linear" if linear and isinstance(self.kernel, str) else self.kernel
        any_profile = isinstance(chosen, str) and chosen == "auto"
        chosen = "gaussian" if any_profile else chosen
        start, lam = kernels.from_config(chosen, n_features=width), float(self.regularization)
        learned: Any = getattr(self, "kernel_", None) if self.warm_start else None
        before = learned
        if any_profile and isinstance(before, Matern):  # a profile of the length scales that were learned
            before = gaussian_of(before)
        warm = before is not None and _form(before) == _form(start)
        if warm:
            start, lam = (before if self.steps else learned), float(self.regularization_)
        return Recipe(
            kernel=start,
            objective=self.objective,
            refit_regularization=bool(self.refit_regularization),
            risk=self.risk,
            complexity_weight=self.complexity_weight,
            regularization=lam,
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
            early_stopping=self.early_stopping,
            n_iter_no_change=None if self.n_iter_no_change is None else int(self.n_iter_no_change),
            warm=warm,
            curves=self.scaling_.curves if warm else None,
            fit_seconds=None if self.fit_seconds is None else float(self.fit_seconds),
            memory=None if self.memory is None else positive_bytes("memory", self.memory),
            profiles=any_profile and not isinstance(self.features, int | np.integer),
        )

    def adopt(self, data: RowSource, recipe: Recipe, trained: Trained, split: str | None = "auto") -> Self:
        """Take over the result of training on (a split of) `data`."""
        assert data.classes is not None
        split, fit = data.training_split(split), trained.fit
        self.classes_ = np.asarray(data.classes)
        if isinstance(data, Dataset):
            self._record_dataset(data)
        self.scaling_, self.embedding_ = fit.scaling, self._on_device(fit.embedding)
        self.probability_floor_ = recipe.floor(fit.weight, len(self.classes_))
        self.objective_, self.loo_log_loss_ = trained.best.name, dict(trained.losses)
        self.history_ = [record for candidate in trained.candidates for record in candidate.history]
        self.solver_, self.solver_reason_ = fit.solver, fit.reason
        self.kernel_, self.regularization_ = trained.best.kernel, fit.regularization
        self._keep_sample(data, split)
        warn_of_squeezed(RowsRef.of(data, split=split), self.scaling_, self._seed())
        with devices.blas_threads(1):
            self.bound_ = self._bound(fit, data, split)
            self.calibration_ = self._calibration(fit)
        return self

    def _on_device(self, embedding: Any) -> Any:
        device = self._device()
        if isinstance(embedding, FeatureEmbedding):
            return dataclasses.replace(embedding, weights=devices.to_device(embedding.weights, device))
        moved = {"weights": devices.to_device(embedding.weights, device)}
        if hasattr(embedding.centres, "dtype"):
            moved["centres"] = devices.to_device(embedding.centres, device)
        return dataclasses.replace(embedding, **moved)

    def _bound(self, fit: Fit, data: RowSource, split: str | None) -> float:
        """The right-hand side of the generalisation bound at the training rows, or at a sample of them."""
        ref = RowsRef.of(data, split=split, scaling=self.scaling_, dtype="float64")
        plan = ref.plan(_SAMPLE_ROWS, self._seed())
        X, y = ref.batch(plan, 0)
        X, y, w = positive_rows(X, np.asarray(y), ref.batch_weights(plan, 0))
        linear = isinstance(self.embedding_, FeatureEmbedding)
        alpha = float(np.sqrt(np.max(np.sum(X**2, axis=1)))) if linear else self.embedding_.kernel.alpha(X)
        if fit.training is not None:
            risk, norm = fit.training
        else:
            P = devices.to_host(self.embedding_.decision(devices.to_device(X, self._device())))
            risk = float(-np.average(np.log(np.clip(P[np.arange(len(P)), y], 1e-15, 1)), weights=w))
            V = devices.to_host(self.embedding_.weights).astype(np.float64)
            KV = V if linear else devices.to_host(self.embedding_.decision(self.embedding_.centres))
            norm = float((V * KV).sum())
        return generalisation_bound(risk, alpha * np.sqrt(max(norm, 0.0)), fit.weight)

    # --- refining --------------------------------------------------------------------------------

    def calibrate(self, X: Any, y: Any, method: str = "auto", sample_weight: Any = None) -> Self:
        """Fit the calibration to held-out rows: "auto", "softmax", "temperature", "isotonic", or "none" to undo it."""
        codes = class_codes(y, self.classes_)
        f = self.decision_probabilities(X)
        weights = sample_weights(sample_weight, f)
        self.calibration_ = Calibration.fit(method, f, codes, self.probability_floor_, weights)
        return self

    def _calibration(self, fit: Fit) -> Calibration:
        """Fitted to decisions of training rows that were left out."""
        found = fit.left_out
        if self.calibration == "none" or found is None:
            return Calibration()
        return Calibration.fit(self.calibration, found.decisions, found.codes, self.probability_floor_, found.weights)

    def _with_centres(self) -> mce.Embedding:
        """The embedding; explicit features become a linear kernel with the unit vectors as centres."""
        found = self.embedding_
        if isinstance(found, mce.Embedding):
            return found
        unit = devices.like(np.eye(found.weights.shape[0]), found.weights)
        return mce.Embedding(Linear(), unit, found.weights, found.regularization)

    def compress(
        self,
        n_centres: int | None = None,
        tolerance: float | None = None,
        *,
        method: str = "greedy",
        X: Any = None,
        y: Any = None,
    ) -> Self:
        """A copy with fewer centres: `n_centres`, or the fewest within a relative error of `tolerance`.

        `compression_` of the copy reports the loss: the relative error in the kernel's norm, the share of unchanged
        labels and the largest change of a decision on the rows of X (default: the centres), and with y the accuracy
        before and after. `method` is "greedy" or "herding".
        """
        if not isinstance(self.embedding_, mce.Embedding):
            raise ConfigError("compress selects centres, and solver='features' has none; fit with fewer features")
        found = compress(self.embedding_, centres=n_centres, tolerance=tolerance, method=method)
        small = copy.copy(self)
        small.embedding_ = found.embedding
        if X is None:
            before, after = (
                devices.to_host(e.decision(self.embedding_.centres)) for e in (self.embedding_, found.embedding)
            )
        else:
            before, after = self.decision_probabilities(X), small.decision_probabilities(X)
        facts: dict[str, Any] = {
            "method": method,
            "centres_before": len(self.embedding_.weights),
            "centres": len(found.kept),
            "rkhs_error": found.error,
            "rows": len(before),
            "same_labels": float(np.mean(before.argmax(axis=1) == after.argmax(axis=1))),
            "largest_change": float(np.abs(before - after).max()),
        }
        if y is not None and X is not None:
            facts["accuracy_before"], facts["accuracy"] = (
                float(np.mean(self.classes_[f.argmax(axis=1)] == np.asarray(y))) for f in (before, after)
            )
        small.compression_ = facts
        return small

    def _kernel_of_rows(self) -> tuple[Kernel, float, Callable[[np.ndarray], np.ndarray]]:
        found = self.embedding_  # features of a map are part of the scaling
        kernel = Linear() if isinstance(found, FeatureEmbedding) else found.kernel
        return kernel, found.regularization, functools.partial(self.scaling_.apply, dtype="float64")

    # --- storing ---------------------------------------------------------------------------------

    def _pack(self) -> tuple[Arrays, Facts]:
        arrays, facts = super()._pack()
        map_arrays, map_config = features_of(self.scaling_)
        arrays |= {"weights": self.embedding_.weights, **map_arrays}
        if not isinstance(self.embedding_, FeatureEmbedding):
            put_rows(arrays, facts, "centres", self.embedding_.centres)
        return arrays, {
            **facts,
            "kernel": self.kernel_.to_config(),
            "feature_map": map_config,
            "regularization": self.regularization_,
            "embedding_regularization": self.embedding_.regularization,
            "features": getattr(self, "n_features_in_", None),
            "objective": self.objective_,
            "solver": self.solver_,
            "solver_reason": self.solver_reason_,
            "bound": self.bound_,
            "loo_log_loss": self.loo_log_loss_,
            "calibration": self.calibration_.to_plain(),
            "compression": getattr(self, "compression_", None),
            "history": self.history_,
        }

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        super()._unpack(arrays, facts, own)
        self.kernel_ = kernels.from_config(facts["kernel"], own=own)
        self.regularization_ = float(facts["regularization"])
        weights = arrays["weights"]
        lam = float(facts.get("embedding_regularization", facts["regularization"]))
        if has_rows(arrays, facts, "centres"):
            centres = get_rows(arrays, facts, "centres")
            self.embedding_ = self._on_device(mce.Embedding(self.kernel_, centres, weights, lam))
        else:
            self.embedding_ = self._on_device(FeatureEmbedding(Identity(), weights, regularization=lam))
        stored = restore_features(facts["feature_map"], arrays, own) if facts.get("feature_map") else None
        self.scaling_ = with_features(self.scaling_, stored, after=arrays.get("scaling/after"))
        if facts["features"] is not None:
            self.n_features_in_ = int(facts["features"])
        self.objective_, self.bound_ = facts["objective"], facts["bound"]
        self.solver_, self.solver_reason_ = facts["solver"], facts["solver_reason"]
        self.loo_log_loss_, self.history_ = facts["loo_log_loss"], facts["history"]
        self.calibration_ = Calibration.from_plain(facts["calibration"]) if "calibration" in facts else Calibration()
        if facts.get("compression"):
            self.compression_ = facts["compression"]

    def _restore_columns(self, found: Mapping[str, Any]) -> None:
        super()._restore_columns(found)
        if found.get("columns"):  # where older versions stored the names
            self._record_names(found["columns"])


def _form(kernel: Kernel) -> Kernel:
    """The kernel with every parameter 1: equal for two kernels if one may be learned from the other."""
    return kernel.replace({name: np.ones(value.shape) for name, value in kernel.parameters.items()})
