"""Conditional embedding networks: features and regularisation learned together, with the classifier in closed form.

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
from typing import Any, ClassVar, Self

import numpy as np

from kme_dist import backend as devices
from kme_dist.core import embedding as mce
from kme_dist.core import features as maps
from kme_dist.core import kernels, optim
from kme_dist.core.kernels import Kernel, Linear, OnFeatures
from kme_dist.core.masked import LOSSES
from kme_dist.core.regularization import retune_regularization
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.rows import RowsRef, Scaling, resolving_dtype, warn_of_squeezed
from kme_dist.errors import ConfigError, counted
from kme_dist.models.account import Account
from kme_dist.models.base import Arrays, Facts, Own, on_workers
from kme_dist.models.classifier import EmbeddingClassifier
from kme_dist.models.settings import RandomState, Rule, below_one, integer, one_of
from kme_dist.run import full
from kme_dist.run.checkpoints import Checkpoints, as_checkpoints
from kme_dist.run.distinct import as_distinct_rows
from kme_dist.run.fit import Fit, fit_on_dataset
from kme_dist.run.learn import Batches, learn, learn_softmax
from kme_dist.run.learners import (
    KernelLearner,
    LearnSettings,
    NetworkLearner,
    Record,
    SoftmaxLearner,
    assemble,
    start_of,
    with_parameters,
)
from kme_dist.run.maps import as_features, restore_features

_WHOLE_ROWS = 20_000  # up to this many rows an exact gradient is one batch; above, three passes over the chunks


class CENClassifier(EmbeddingClassifier):
    """A conditional embedding whose features are a network.

    Parameters
    ----------
    hidden, activation : sizes of the dense layers, and their activation (also of the last one): "relu", "tanh",
        "gelu", "cosine". Weights start truncated normal with deviation 0.1, biases at 0.1, as published.
    head : "linear" (W in closed form, algorithm 2), or a kernel or its name (algorithm 1 on the features).
    network : instead of dense layers: a feature map of `kme_dist.core.features`, a config of one, a `torch.nn.Module`,
        or {"name": "torch", "architecture": NAME, ...} (see `kme_dist.run.torch_features`).
    dropout, independent_masks : rate of features of the last layer dropped while learning; with `independent_masks`
        W is solved under one mask and evaluated under another (the published convolutional network), in effect a
        validation within the batch.
    alpha : 1 as published, or "batch": the supremum of |φ(x)| over the batch. (With the supremum the published networks
        collapse.)
    objective : "rcb": a batch is evaluated by its own W, as published. "validation": each half of a batch by the W of
        the other half, which needs no bound against overfitting, but larger batches.
    loss : "log" of the decision probability of a row's class, as published, or "softmax": cross entropy of the softmax
        of ten times the decision probabilities, with which networks learn faster.
    risk, complexity_weight : the loss summed or averaged, and τ (None: 4e).
    regularization : initial λ.   refit_regularization : retune λ by leave-one-out on the learned features.
    batch_size : rows per batch; None: all rows, the exact gradient.
    batches_per_step : batches averaged in a step; evaluated in parallel on a cluster.
    steps, learning_rate, schedule, optimizer : "constant" (as published) or "cosine" decay of the rate.
    average : keep the mean of the parameters over about 1/(1 - average) steps; 0 keeps the last ones.
    scaling, backend, dtype, random_state, verbose, probability_floor, n_jobs : as in `MCEClassifier`.
    class_weight : None, "balanced" (all classes have the same total weight), or a mapping of labels to numbers >= 0
        (1 for labels not in it); multiplied with the weights of rows.
    client : a dask.distributed.Client. Workers read the rows of a stored data set, or a shared copy of rows in memory.
    compare_softmax : if `fit` gets `watch`, the same network is also learned with a softmax layer, from the same start
        with the same batches, rate and dropout; its curve is `softmax_curve_`. Doubles the time.

    Attributes
    ----------
    features_ : the learned map.   weights_ : W of the linear head.   regularization_, classes_, history_, bound_.
    curve_, softmax_curve_ : one record per epoch if `fit` got `watch`.
    """

    _FITTED: ClassVar[str] = "features_"
    _RULES: ClassVar[Mapping[str, Rule]] = {
        **EmbeddingClassifier._RULES,
        "dropout": below_one(),
        "average": below_one(),
        "batches_per_step": integer(1),
        "schedule": one_of("constant", "cosine"),
        "objective": one_of("rcb", "validation"),
        "loss": one_of(*LOSSES),
    }

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
        random_state: RandomState = 0,
        verbose: int = 0,
        probability_floor: float | None = None,
        compare_softmax: bool = False,
        objective: str = "rcb",
        loss: str = "log",
        average: float = 0.0,
        n_jobs: int | None = None,
        class_weight: Any = None,
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
        self.n_jobs = n_jobs
        self.class_weight = class_weight

    # --- fitting ---------------------------------------------------------------------------------

    @on_workers
    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        callback: Callable[[Record], None] | None = None,
        watch: tuple[Any, Any] | None = None,
        checkpoints: str | Path | Checkpoints | None = None,
    ) -> Self:
        """Learn the features and λ, then solve for the weights on all rows.

        X is a table with y its labels, or an open `Dataset`. `sample_weight` has a number >= 0 for each row: weight 2
        counts as the row twice, 0 as no row (see `MCEClassifier.fit`; here to the last bit if all rows are one batch).
        `callback` receives the record of every step. `watch` is a pair of rows and labels: after every epoch W is
        solved on all training rows and evaluated on them, see `curve_`. `checkpoints` is a folder to save to while
        learning; after an interruption the same call resumes from there, to the same bits. Checkpoints of other
        settings or rows are refused.
        """
        self._begin_fit()
        account, saved = Account(self.verbose, type(self).__name__), as_checkpoints(checkpoints)

        def report(record: Record) -> None:
            account.step(record)
            if callback is not None:
                callback(record)

        with contextlib.ExitStack() as stack:
            data, _ = self._labelled_rows(X, y, stack, sample_weight)
            rows = data.split_positive(data.training_split())
            account.begin(
                f"{counted(rows, 'row', ',')}, {counted(data.features, 'feature')}, "
                f"{counted(data.n_classes, 'class')}, objective {self.objective}"
            )
            self._learn_rows(data, report, watch, saved)
        account.finish_learning()
        tuned = " (by leave-one-out on the learned features)" if self.refit_regularization else ""
        account.say(f"lambda {self.regularization_:.3g}{tuned}, {len(self.weights_)} weights for each class")
        account.done()
        return self

    def _learn_rows(
        self, data: RowSource, report: Callable[[Record], None] | None, watch: Any, saved: Checkpoints | None
    ) -> None:
        self._keep_sample(data, data.training_split())
        self.classes_ = np.asarray(data.classes)
        data, split = as_distinct_rows(data, data.training_split(), self.batch_size)
        self.scaling_ = Scaling.of(data.split_statistics(split), self.scaling)
        warn_of_squeezed(RowsRef.of(data, split=split), self.scaling_, self._seed())
        rows = data.split_positive(split)
        source = Batches.of(
            data,
            split=split,
            scaling=self.scaling_,
            dtype=resolving_dtype(self.dtype, data, split, self.scaling),
            batch_size=self._batch_size(rows) or rows,
            seed=self._seed(),
            backend=self.backend,
        )
        if self._batch_size(rows) is None and rows > _WHOLE_ROWS and self._kernel_head() is None:
            self._learn_full(data, split, source, report, saved)
        else:
            self._learn(source, report, watch, saved)

    def adopt(self, data: RowSource, features: Any, fit: Fit, floor: float) -> Self:
        """Take over a fit with explicit features to `data`."""
        self.features_, self.weights_ = features, fit.embedding.weights
        self.embedding_ = mce.FeatureEmbedding(features, self.weights_)
        self.scaling_, self.regularization_, self.probability_floor_ = fit.scaling, fit.regularization, floor
        self.classes_ = np.asarray(data.classes)
        if isinstance(data, Dataset):
            self._record_dataset(data)
        else:
            self._record_names(data.feature_names)
        self._keep_sample(data, data.training_split())
        self.bound_ = math.nan
        self._reset_curves()
        return self

    def _reset_curves(self) -> None:
        self.curve_: list[Record] = []
        self.softmax_curve_: list[Record] = []
        self.history_: list[Record] = []

    def _learn(
        self,
        source: Batches,
        report: Callable[[Record], None] | None,
        watch: Any,
        saved: Checkpoints | None,
    ) -> None:
        features, settings = self._start(), self._settings(source.count)
        head = self._kernel_head()
        self._reset_curves()
        if head is not None:
            self._learn_kernel(OnFeatures(head, features), source, settings, report, saved)
            return
        task = NetworkLearner(
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
        per_epoch = max(1, source.count // (source.size * self.batches_per_step))

        def after_step(record: Record, parameters: optim.Named) -> None:
            if watch is not None and record["step"] % per_epoch == 0:
                self._solve(features, parameters, source, settings)
                record["watched_accuracy"] = float(self.score(*watch))
                self.curve_.append(_point(record, per_epoch))
            if report is not None:
                report(record)

        found = learn(
            task,
            source,
            start_of(features, self.regularization),
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
                rows = self._query_rows(watch[0]), np.array(codes)
            history = learn_softmax(
                SoftmaxLearner(features, settings, len(self.classes_), self.dropout),
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

    def _solve(self, start: Any, parameters: optim.Named, source: Batches, settings: LearnSettings) -> None:
        """W on all rows, for the features with `parameters`."""
        self.features_ = with_parameters(start, parameters)
        self._fit_head(source, float(np.exp(parameters["regularization"])))

    def _fit_head(self, source: Batches, regularization: float) -> None:
        floor = self._floor(source.rows.weight)
        head = fit_on_dataset(
            source.rows.source,
            Linear(),  # on the features
            regularization,
            executor=self._executor(),
            scaling=source.rows.scale,
            dtype=source.rows.dtype,
            solver="features",
            features=self.features_,
            retune=self.refit_regularization,
            floor=floor,
            backend=self.backend,
        )
        self.probability_floor_, self.regularization_ = floor, head.regularization
        self.weights_ = np.ascontiguousarray(head.embedding.weights)
        self.embedding_ = mce.FeatureEmbedding(self.features_, self.weights_)
        self.bound_ = self.history_[-1]["bound"] if getattr(self, "history_", None) else math.nan

    def _learn_full(
        self,
        data: RowSource,
        split: str | None,
        source: Batches,
        report: Callable[[Record], None] | None,
        saved: Checkpoints | None,
    ) -> None:
        """The exact gradient of all rows in every step, in three passes over the chunks."""
        if self.alpha == "batch" or self.dropout or (self.objective, self.loss, self.average) != ("rcb", "log", 0):
            raise ConfigError(
                "exact full gradients require a numeric alpha, no dropout, objective='rcb', loss='log' and no average; "
                "set batch_size for anything else"
            )
        learned = full.learn_features(
            data,
            self._start(),
            self.regularization,
            self._settings(source.count),
            executor=self._executor(),
            callback=report,
            checkpoints=saved,
            split=split,
            scaling=self.scaling,
            dtype=source.rows.dtype,
            alpha=float(self.alpha),
        )
        self.history_, self.features_, self.curve_ = learned.history, learned.features, []
        self.softmax_curve_ = []
        self._fit_head(source, learned.regularization)

    def _learn_kernel(
        self,
        start: OnFeatures,
        source: Batches,
        settings: LearnSettings,
        report: Callable[[Record], None] | None,
        saved: Checkpoints | None,
    ) -> None:
        """Algorithm 1 with a kernel on the features."""
        lam = np.asarray(self.regularization, np.float64)
        with devices.blas_threads(1):
            found = learn(
                KernelLearner(start, settings, len(self.classes_)),
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
            X, codes, w = source.all_rows()
            Z = self.features_.forward(X)
            floor = self._floor(source.rows.weight)
            head, classes = kernel.kernel, len(self.classes_)
            if self.refit_regularization and len(codes) > 1:
                learned_lam, _, _ = retune_regularization(
                    head, Z, codes, classes, start=learned_lam, floor=floor, weights=w
                )
            self.weights_ = mce.exact_solution(head, Z, codes, classes, learned_lam, row_weights=w).weights
        inner = mce.Embedding(head, Z, self.weights_, learned_lam)
        self.embedding_ = mce.FeatureEmbedding(self.features_, self.weights_, inner)
        self.probability_floor_, self.regularization_ = floor, learned_lam
        self.bound_ = self.history_[-1]["bound"] if self.history_ else math.nan

    # --- settings --------------------------------------------------------------------------------

    def _check_together(self) -> None:
        if self.alpha != "batch" and not (isinstance(self.alpha, int | float) and self.alpha > 0):
            raise ConfigError(f"alpha={self.alpha!r}: must be a positive number or 'batch'")
        if self._kernel_head() is not None and (self.objective, self.loss, self.average) != ("rcb", "log", 0):
            raise ConfigError("objective='validation', loss='softmax' and average require head='linear'")
        if self.independent_masks and not self.dropout:
            raise ConfigError("independent_masks requires dropout > 0")
        if self._kernel_head() is not None and (self.dropout or self.alpha == "batch"):
            raise ConfigError("dropout and alpha='batch' require head='linear'")

    def _kernel_head(self) -> Kernel | None:
        if isinstance(self.head, str) and self.head == "linear":
            return None
        if isinstance(self.head, str):
            return kernels.from_config({"name": self.head})
        return kernels.from_config(self.head)

    def _batch_size(self, n: int) -> int | None:
        return None if self.batch_size is None or self.batch_size >= n else int(self.batch_size)

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
        d, network = self._width, self.network
        if network is None:
            return maps.dense_network(d, tuple(self.hidden), self.activation, seed=self._seed())
        return as_features(network, d, self._seed())

    def _kernel_of_rows(self) -> tuple[Kernel, float, Callable[[np.ndarray], np.ndarray]]:
        on_features = self.embedding_.on_features

        def features(rows: np.ndarray) -> np.ndarray:
            return np.asarray(devices.to_host(self.features_.forward(self.scaling_.apply(rows, "float64"))), np.float64)

        return Linear() if on_features is None else on_features.kernel, self.regularization_, features

    # --- predicting and storing ------------------------------------------------------------------

    def embed(self, X: Any) -> np.ndarray:
        """The learned features φ(x), in double precision."""
        rows = self._query_rows(X)
        return devices.to_host(self.features_.forward(rows))

    def _pack(self) -> tuple[Arrays, Facts]:
        arrays, facts = super()._pack()
        arrays |= {f"features/{name}": value for name, value in self.features_.arrays.items()}
        arrays["weights"] = self.weights_
        found = self.embedding_.on_features
        if found is not None:
            arrays["centres"] = found.centres
        return arrays, {
            **facts,
            "features": self.features_.to_config(),
            "kernel": None if found is None else found.kernel.to_config(),
            "regularization": self.regularization_,
            "inputs": self.n_features_in_,
            "bound": None if math.isnan(self.bound_) else self.bound_,
            "history": self.history_,
            "curve": self.curve_,
            "softmax_curve": self.softmax_curve_,
        }

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        super()._unpack(arrays, facts, own)
        self.hidden = tuple(self.hidden)
        self.features_ = restore_features(facts["features"], arrays, own)
        self.n_features_in_ = int(facts["inputs"])
        self.weights_, inner = arrays["weights"], None
        self.regularization_ = float(facts["regularization"])
        if facts["kernel"] is not None:
            kernel = kernels.from_config(facts["kernel"], own=own)
            centres, weights = (devices.to_device(arrays[name], self._device()) for name in ("centres", "weights"))
            inner = mce.Embedding(kernel, centres, weights, self.regularization_)
        self.embedding_ = mce.FeatureEmbedding(self.features_, self.weights_, inner)
        self.bound_ = math.nan if facts["bound"] is None else float(facts["bound"])
        self.history_, self.curve_ = facts["history"], facts["curve"]
        self.softmax_curve_ = facts.get("softmax_curve", [])  # older models have none


def _point(record: Record, per_epoch: int) -> Record:
    """A point of the curve: the accuracy on the rows of `watch` after an epoch."""
    kept = {"step": record["step"], "seconds": record["seconds"]}
    return {"epoch": record["step"] // per_epoch, "accuracy": record["watched_accuracy"], **kept}
