"""Conditional embedding networks: features and regularisation learned together, the classifier on top in closed form.

>>> from sklearn.datasets import load_iris
>>> X, y = load_iris(return_X_y=True)
>>> model = CENClassifier(hidden=(16, 8), steps=100).fit(X, y)
>>> model.predict_proba(X[:2]).shape
(2, 3)

    CENClassifier(hidden=(96, 32))                       the explicit network of the paper: algorithm 2, full gradients
    CENClassifier(head="gaussian", hidden=(16, 8))       the implicit one: any kernel on the features, algorithm 1
    CENClassifier(network=torch_module, batch_size=1000) any PyTorch module as the feature map
    CENClassifier(client=client, ...).fit(dataset)       batches (or exact full gradients) over the workers of a cluster

The networks of Hsu, Nock and Ramos; see `kme_dist.core.objective` for the paper and the objective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core import features as maps
from kme_dist.core import kernels, optim
from kme_dist.core.calibration import class_probabilities, expectation
from kme_dist.core.kernels import Kernel, Linear, OnFeatures
from kme_dist.core.masked import LOSSES
from kme_dist.core.regularization import retune_regularization
from kme_dist.data import store
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.scaling import Scaling
from kme_dist.data.store import labels_from_json, labels_to_json, plain
from kme_dist.data.validation import remember_names, restore_names, rows_and_labels, rows_asked, stored_names
from kme_dist.errors import ConfigError, DataError
from kme_dist.run import features as learning
from kme_dist.run import full
from kme_dist.run.checkpoints import Checkpoints, as_checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.fit import fit_on_dataset
from kme_dist.run.learn import LearnSettings, Record, assemble
from kme_dist.run.sharing import executor_for, share
from kme_dist.run.tasks import KernelTask, NetworkTask, SoftmaxTask, learn_softmax

FORMAT = 1
_WHOLE_ROWS = 20_000  # up to so many rows an exact gradient is one batch; beyond, three passes over the chunks


class CENClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A conditional embedding whose features are a network.

    Parameters
    ----------
    hidden, activation : sizes of the dense layers, and what each of them (the last too) applies: "relu", "tanh",
        "gelu", "cosine". Weights start truncated normal with deviation 0.1, biases at 0.1, as published.
    head : "linear" (W in closed form, algorithm 2), or a kernel by name or value (algorithm 1 on the features).
    network : instead of dense layers: a feature map of `kme_dist.core.features`, a config of one, a `torch.nn.Module`,
        or {"name": "torch", "architecture": NAME, ...} (see `kme_dist.run.torch_features`).
    dropout, independent_masks : features of the last layer left out while learning; with `independent_masks` W is
        solved under one mask and judged under another (the published convolutional network): in truth a validation
        inside the batch.
    alpha : 1 as published, or "batch": the supremum of |φ(x)| over the batch. (With the supremum the published networks
        collapse.)
    objective : "rcb": a batch is judged by its own W, as published. "validation": each half of a batch by the W of the
        other half, which needs no bound to tell learning from memory (and larger batches).
    loss : "log" of the decision probability of a row's class, as published, or "softmax": cross entropy of the softmax
        of ten times the decision probabilities, by which networks learn faster.
    risk, complexity_weight : the loss summed or averaged, and τ (None: 4e).
    regularization : where λ starts.   refit_regularization : choose λ again by leave-one-out on the learned features.
    batch_size : rows of a step; None takes all of them: the exact gradient.
    batches_per_step : batches averaged in a step; what a cluster does side by side.
    steps, learning_rate, schedule, optimizer : "constant" (as published) or "cosine" decay of the rate.
    average : what is kept is the mean of the parameters over about 1/(1 - average) steps; 0 keeps the last ones.
    scaling, backend, dtype, random_state, verbose, probability_floor : as in `MCEClassifier`.
    client : a dask.distributed.Client. The workers read the rows of a stored data set, or of a copy of rows in memory.
    compare_softmax : where `fit` is given rows to watch, the same network is learned under a softmax layer too, from
        the same start, by the same batches, rate and dropout; its curve is `softmax_curve_`. Takes as long again.

    Attributes
    ----------
    features_ : the learned map.   weights_ : W of the linear head.   regularization_, classes_, history_, bound_.
    curve_, softmax_curve_ : one record per epoch where `fit` was given rows to watch.
    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (96, 32),
        head: str | Kernel = "linear",
        network: Any = None,
        activation: str = "relu",
        dropout: float = 0.0,
        independent_masks: bool = False,
        alpha: float | str = 1.0,
        risk: str = "sum",
        complexity_weight: float | None = None,
        regularization: float = 1.0,
        refit_regularization: bool = False,
        batch_size: int | None = None,
        batches_per_step: int = 1,
        steps: int = 1000,
        learning_rate: float = 0.1,
        schedule: str = "constant",
        optimizer: str = "adam",
        scaling: str | None = "unit",
        backend: str = "auto",
        dtype: str = "float32",
        client: Any = None,
        random_state: int | None = 0,
        verbose: bool = False,
        probability_floor: float | None = None,
        compare_softmax: bool = False,
        objective: str = "rcb",
        loss: str = "log",
        average: float = 0.0,
    ) -> None:
        self.hidden = hidden
        self.head = head
        self.network = network
        self.activation = activation
        self.dropout = dropout
        self.independent_masks = independent_masks
        self.alpha = alpha
        self.risk = risk
        self.complexity_weight = complexity_weight
        self.regularization = regularization
        self.refit_regularization = refit_regularization
        self.batch_size = batch_size
        self.batches_per_step = batches_per_step
        self.steps = steps
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.optimizer = optimizer
        self.scaling = scaling
        self.backend = backend
        self.dtype = dtype
        self.client = client
        self.random_state = random_state
        self.verbose = verbose
        self.probability_floor = probability_floor
        self.compare_softmax = compare_softmax
        self.objective = objective
        self.loss = loss
        self.average = average

    # --- fitting ---------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        callback: Callable[[Record], None] | None = None,
        watch: tuple[Any, Any] | None = None,
        checkpoints: str | Path | Checkpoints | None = None,
    ) -> Self:
        """Learn the features and λ, then solve for the weights on all rows.

        X is a table with y its labels, or an open `Dataset`. `callback` receives the record of every step. `watch` is a
        pair of rows and labels: after every epoch W is solved on all training rows and judged there, see `curve_`.
        `checkpoints` is a folder to save to while learning; after a kill the same call goes on from there, to the same
        bits. Checkpoints of other settings or rows are refused.
        """
        self._check_settings()
        report = callback or (_print_record if self.verbose else None)
        saved = as_checkpoints(checkpoints)
        with contextlib.ExitStack() as stack:
            data = self._source_of(X, y, stack)
            self._fit_rows(data, report, watch, saved)
        return self

    def _source_of(self, X: Any, y: Any, stack: contextlib.ExitStack) -> RowSource:
        if isinstance(X, Dataset):
            if y is not None:
                raise DataError(f"{X.path} brings its own labels; call fit(dataset) without y")
            if X.classes is None:
                raise DataError(f"{X.path} has no class labels; ingest it again with the column named by `label`")
            remember_names(self, X.feature_names)
            return X
        X, y = rows_and_labels(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        data = ArrayRows(X, codes, classes, getattr(self, "feature_names_in_", None))
        share(data, self.client, stack)
        return data

    def _fit_rows(
        self, data: RowSource, report: Callable[[Record], None] | None, watch: Any, saved: Checkpoints | None
    ) -> None:
        split = data.training_split()
        self.classes_ = np.asarray(data.classes)
        self._check_classes()
        self.scaling_ = Scaling.of(data.split_statistics(split), self.scaling)
        rows = data.split_rows(split)
        source = learning.Source.of(
            data,
            split=split,
            scaling=self.scaling_,
            dtype=self.dtype,
            batch_size=self._batch_size(rows) or rows,
            seed=self._seed(),
            backend=self.backend,
        )
        if self._batch_size(rows) is None and rows > _WHOLE_ROWS and self._kernel_head() is None:
            self._learn_full(data, split, source, report, saved)
        else:
            self._learn(source, report, watch, saved)

    def _learn(
        self,
        source: learning.Source,
        report: Callable[[Record], None] | None,
        watch: Any,
        saved: Checkpoints | None,
    ) -> None:
        features, settings = self._start(), self._settings(source.rows)
        head = self._kernel_head()
        self.curve_: list[Record] = []
        self.softmax_curve_: list[Record] = []
        self.history_: list[Record] = []
        if head is not None:
            self._learn_kernel(OnFeatures(head, features), source, settings, report, saved)
            return
        task = NetworkTask(
            features,
            settings,
            len(self.classes_),
            alpha=None if self.alpha == "batch" else float(self.alpha),
            dropout=self.dropout,
            independent_masks=self.independent_masks,
            clip_above=not self.independent_masks,
            halves=self.objective == "validation",
            loss=self.loss,
        )
        per_epoch = max(1, source.rows // (source.batch * self.batches_per_step))

        def after_step(record: Record, parameters: optim.Named) -> None:
            if watch is not None and record["step"] % per_epoch == 0:
                self._solve(features, parameters, source, settings)
                record["watched_accuracy"] = float(self.score(*watch))
                self.curve_.append(_point(record, per_epoch))
            if report is not None:
                report(record)

        found = learning.learn_task(
            task,
            source,
            learning.start_of(features, self.regularization),
            settings,
            executor=self._executor(),
            batches_per_step=self.batches_per_step,
            callback=after_step,
            checkpoints=saved,
            average=self.average,
        )
        self.history_ = found.history
        self.curve_ = [_point(record, per_epoch) for record in found.history if "watched_accuracy" in record]
        self._solve(features, found.parameters, source, settings)
        if self.compare_softmax and (watch is not None or self.curve_):
            numbers = {label: number for number, label in enumerate(self.classes_.tolist())}
            rows = None
            if watch is not None:
                codes = [numbers.get(label, -1) for label in np.asarray(watch[1]).tolist()]
                rows = self._rows(watch[0]), np.array(codes)
            history = learn_softmax(
                SoftmaxTask(features, settings, len(self.classes_), self.dropout),
                source,
                width=len(self.weights_),
                per_epoch=per_epoch,
                watch=rows,
                executor=self._executor(),
                batches_per_step=self.batches_per_step,
                callback=report,
                checkpoints=None if saved is None else saved.beside("softmax"),
            )
            self.softmax_curve_ = [_point(record, per_epoch) for record in history if "watched_accuracy" in record]

    def _solve(self, start: Any, parameters: optim.Named, source: learning.Source, settings: LearnSettings) -> None:
        """W on all rows, for the features that `parameters` stand for."""
        self.features_ = learning.with_parameters(start, parameters)
        self._fit_head(source, float(np.exp(parameters["regularization"])))

    def _fit_head(self, source: learning.Source, regularization: float) -> None:
        floor = self._floor(source.rows)
        head = fit_on_dataset(
            source.dataset,
            Linear(),  # on the features
            regularization,
            executor=self._executor(),
            scaling=source.scale,
            dtype=source.dtype,
            solver="features",
            features=self.features_,
            retune=self.refit_regularization,
            floor=floor,
        )
        self.probability_floor_, self.regularization_ = floor, head.regularization
        self.weights_ = np.ascontiguousarray(head.embedding.weights)
        self.embedding_ = mce.FeatureEmbedding(self.features_, self.weights_)
        self.bound_ = self.history_[-1]["bound"] if getattr(self, "history_", None) else math.nan

    def _learn_full(
        self,
        data: RowSource,
        split: str | None,
        source: learning.Source,
        report: Callable[[Record], None] | None,
        saved: Checkpoints | None,
    ) -> None:
        """The exact gradient of all rows in every step, by three passes over the chunks."""
        if self.alpha == "batch" or self.dropout or (self.objective, self.loss, self.average) != ("rcb", "log", 0):
            raise ConfigError(
                "exact full gradients have alpha=1, no dropout, objective='rcb', loss='log' and no average; set "
                "batch_size to have anything else"
            )
        learned = full.learn_features(
            data,
            self._start(),
            self.regularization,
            self._settings(source.rows),
            executor=self._executor(),
            callback=report,
            checkpoints=saved,
            split=split,
            scaling=self.scaling,
            dtype=self.dtype,
            alpha=float(self.alpha),
        )
        self.history_, self.features_, self.curve_ = learned.history, learned.features, []
        self.softmax_curve_ = []
        self._fit_head(source, learned.regularization)

    def _learn_kernel(
        self,
        start: OnFeatures,
        source: learning.Source,
        settings: LearnSettings,
        report: Callable[[Record], None] | None,
        saved: Checkpoints | None,
    ) -> None:
        """Algorithm 1 with a kernel on the features."""
        lam = np.asarray(self.regularization, np.float64)
        with devices.blas_threads(1):
            found = learning.learn_task(
                KernelTask(start, settings, len(self.classes_)),
                source,
                optim.to_log({**start.parameters, "regularization": lam}),
                settings,
                callback=None if report is None else lambda record, _: report(record),
                checkpoints=saved,
            )
            self.history_ = found.history
            kernel, learned_lam = assemble(start, found.parameters)
            if not isinstance(kernel, OnFeatures):
                raise ConfigError(f"learning turned {start!r} into {kernel!r}")
            self.features_ = kernel.features
            X, codes = source.all_rows()
            Z = self.features_.forward(X)
            floor = self._floor(source.rows)
            classes = len(self.classes_)
            if self.refit_regularization and len(codes) > 1:
                learned_lam, _, _ = retune_regularization(
                    kernel.kernel, Z, codes, classes, start=learned_lam, floor=floor
                )
            self.weights_ = mce.exact_weights(kernel.kernel, Z, codes, classes, learned_lam)
        head = mce.Embedding(kernel.kernel, Z, self.weights_, learned_lam)
        self.embedding_ = mce.FeatureEmbedding(self.features_, self.weights_, head)
        self.probability_floor_, self.regularization_ = floor, learned_lam
        self.bound_ = self.history_[-1]["bound"] if self.history_ else math.nan

    # --- settings --------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        for name in ("dropout", "average"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 <= value < 1:
                raise ConfigError(f"{name}={value!r}: must be a number >= 0 and < 1")
        for name in ("regularization", "learning_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}: must be a positive number")
        for name in ("steps", "batches_per_step"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < (name != "steps"):
                raise ConfigError(f"{name}={value!r}: must be an integer >= {int(name != 'steps')}")
        if self.batch_size is not None and (not isinstance(self.batch_size, int | np.integer) or self.batch_size < 1):
            raise ConfigError(f"batch_size={self.batch_size!r}: must be an integer >= 1, or None")
        if self.alpha != "batch" and not (isinstance(self.alpha, int | float) and self.alpha > 0):
            raise ConfigError(f"alpha={self.alpha!r}: must be a positive number or 'batch'")
        if self.schedule not in ("constant", "cosine"):
            raise ConfigError(f"schedule={self.schedule!r} is unknown; choose 'constant' or 'cosine'")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype={self.dtype!r} is unknown; choose 'float32' or 'float64'")
        for name, known in (("objective", ("rcb", "validation")), ("loss", LOSSES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; choose {' or '.join(map(repr, known))}")
        if self._kernel_head() is not None and (self.objective, self.loss, self.average) != ("rcb", "log", 0):
            raise ConfigError("objective='validation', loss='softmax' and average go with head='linear'")
        if self.independent_masks and not self.dropout:
            raise ConfigError("independent_masks needs dropout above 0: there is nothing to mask")
        if self._kernel_head() is not None and (self.dropout or self.alpha == "batch"):
            raise ConfigError("a kernel head takes no dropout and finds its own supremum; use head='linear'")

    def _check_classes(self) -> None:
        if len(self.classes_) < 2:
            raise DataError(
                f"y holds one class only ({self.classes_[0]!r}); a classifier needs rows of at least two classes"
            )

    def _kernel_head(self) -> Kernel | None:
        if isinstance(self.head, str) and self.head == "linear":
            return None
        if isinstance(self.head, str):
            return kernels.from_config({"name": self.head})
        return kernels.from_config(self.head)

    def _seed(self) -> int:
        if self.random_state is None:
            return int(np.random.SeedSequence().generate_state(1)[0])
        if not isinstance(self.random_state, int | np.integer) or self.random_state < 0:
            raise ConfigError(f"random_state={self.random_state!r}: must be an integer >= 0, or None")
        return int(self.random_state)

    def _batch_size(self, n: int) -> int | None:
        return None if self.batch_size is None or self.batch_size >= n else int(self.batch_size)

    def _floor(self, n: int) -> float:
        if self.probability_floor is None:
            return 1.0 / (n + len(self.classes_))
        if not isinstance(self.probability_floor, int | float | np.number) or not 0 <= self.probability_floor < 1:
            raise ConfigError(f"probability_floor={self.probability_floor!r}: must be a number >= 0 and < 1")
        return float(self.probability_floor)

    def _executor(self) -> Executor:
        return executor_for(self.client)

    def _settings(self, n: int) -> LearnSettings:
        return LearnSettings(
            objective="rcb",
            risk=self.risk,
            complexity_weight=self.complexity_weight,
            steps=int(self.steps),
            batch_size=self._batch_size(n),
            learning_rate=float(self.learning_rate),
            schedule=optim.cosine_decay if self.schedule == "cosine" else None,
            optimizer=self.optimizer,
            seed=self._seed(),
        )

    def _start(self) -> Any:
        d, network = self.n_features_in_, self.network
        if network is None:
            return maps.dense_network(d, tuple(self.hidden), self.activation, seed=self._seed())
        return learning.as_features(network, d, self._seed())

    # --- predicting ------------------------------------------------------------------------------

    def embed(self, X: Any) -> np.ndarray:
        """The learned features φ(x), in double precision."""
        return devices.to_host(self.features_.forward(self._rows(X)))

    def _rows(self, X: Any) -> Any:
        check_is_fitted(self, "features_")
        X = rows_asked(self, X, dtype=[np.float64, np.float32])
        # In double: a row's result must not depend on the rows that come with it.
        return devices.to_device(self.scaling_.apply(X, "float64"), devices.resolve(self.backend))

    def decision_probabilities(self, X: Any) -> np.ndarray:
        """f(x), one column per class; rows need not add up to one and entries may leave [0, 1]."""
        rows = self._rows(X)
        return devices.to_host(self.embedding_.decision(rows))

    def probabilities(self, P: np.ndarray) -> np.ndarray:
        """Class probabilities from decision probabilities: clip-normalised, led by the largest of them."""
        return class_probabilities(P, self.probability_floor_)

    def decision_function(self, X: Any) -> np.ndarray:
        """Decision probabilities; with two classes, how far the second leads the first once normalised."""
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
        """Clip-normalised probabilities, columns in the order of `classes_`."""
        return self.probabilities(self.decision_probabilities(X))

    def entropy(self, X: Any) -> np.ndarray:
        """Uncertainty of the clip-normalised probabilities, in nats."""
        return np.asarray(mce.entropy(self.decision_probabilities(X), self.probability_floor_))

    def expectation(self, X: Any, g: Any, raw: bool = False) -> np.ndarray:
        """E[g(Y) | x]: `g` is a function of the label, or one value (or one row of values) per class.

        Under the probabilities of `predict_proba`, so it stays within the values of g; `raw` gives Σ_c g(c) f_c(x),
        linear in the decision probabilities, which may leave them.
        """
        check_is_fitted(self, "classes_")
        values = np.asarray([g(label) for label in self.classes_] if callable(g) else g, dtype=np.float64)
        if values.shape[:1] != self.classes_.shape:
            raise DataError(f"expectation: needs one value for each of {len(self.classes_)} classes")
        P = self.decision_probabilities(X)
        return np.asarray(mce.expectation(P, values) if raw else expectation(self.probabilities(P), values))

    # --- storing ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted model as Zarr arrays and JSON; `kme_dist.load` brings it back without running code."""
        check_is_fitted(self, "features_")
        settings = {**self.get_params(deep=False), "client": None, "network": None}
        if isinstance(self.head, Kernel):
            settings["head"] = self.head.to_config()
        arrays = {
            "weights": devices.to_host(self.weights_),
            "scaling/shift": self.scaling_.shift,
            "scaling/factor": self.scaling_.factor,
            **{f"features/{name}": value for name, value in self.features_.arrays.items()},
        }
        found = self.embedding_.on_features
        if found is not None:
            arrays["centres"] = devices.to_host(found.centres)
        attributes = {
            "model": type(self).__name__,
            "model_format": FORMAT,
            "settings": {name: plain(value) for name, value in settings.items()},
            "features": self.features_.to_config(),
            "kernel": None if found is None else found.kernel.to_config(),
            "regularization": self.regularization_,
            "probability_floor": self.probability_floor_,
            **labels_to_json(self.classes_),
            "inputs": self.n_features_in_,
            **stored_names(self),
            "bound": None if math.isnan(self.bound_) else self.bound_,
            "history": self.history_,
            "curve": self.curve_,
            "softmax_curve": self.softmax_curve_,
        }
        store.save_arrays(path, arrays, attributes)

    @classmethod
    def _restore(
        cls, arrays: Mapping[str, np.ndarray], found: Mapping[str, Any], own: Mapping[str, Any]
    ) -> CENClassifier:
        model = cls(**{**found["settings"], "hidden": tuple(found["settings"]["hidden"])})
        model.features_ = learning.restore_features(found["features"], arrays, own)
        model.scaling_ = Scaling(arrays["scaling/shift"], arrays["scaling/factor"])
        model.classes_ = labels_from_json(found)
        restore_names(model, found, found["inputs"])
        model.weights_, inner = arrays["weights"], None
        model.regularization_ = float(found["regularization"])
        if found["kernel"] is not None:
            device = devices.resolve(model.backend)
            kernel = kernels.from_config(found["kernel"], own=own)
            centres, weights = (devices.to_device(arrays[name], device) for name in ("centres", "weights"))
            inner = mce.Embedding(kernel, centres, weights, model.regularization_)
        model.embedding_ = mce.FeatureEmbedding(model.features_, model.weights_, inner)
        model.probability_floor_ = float(found["probability_floor"])
        model.bound_ = math.nan if found["bound"] is None else float(found["bound"])
        model.history_, model.curve_ = found["history"], found["curve"]
        model.softmax_curve_ = found.get("softmax_curve", [])  # older models have none
        return model


def _point(record: Record, per_epoch: int) -> Record:
    """Of the curve: what the rows to watch said after an epoch."""
    kept = {"step": record["step"], "seconds": record["seconds"]}
    return {"epoch": record["step"] // per_epoch, "accuracy": record["watched_accuracy"], **kept}


def _print_record(record: Record) -> None:
    if record["step"] == 1 or record["step"] % 50 == 0 or "watched_accuracy" in record:
        watched = f"  watched {100 * record['watched_accuracy']:.2f} %" if "watched_accuracy" in record else ""
        print(
            f"step {record['step']:>5}/{record['steps']}  q {record['objective']:.4g}  accuracy "
            f"{record['accuracy']:.4f}  lambda {record['regularization']:.2e}{watched}"
        )
