"""Automated spectral kernel learning: a classifier and a regressor that learn their own frequencies.

>>> from sklearn.datasets import load_iris
>>> X, y = load_iris(return_X_y=True)
>>> model = ASKLClassifier(features=100, epochs=20, random_state=0).fit(X, y)
>>> model.predict(X[:3]).shape
(3,)

    variant     kernel            frequencies      penalty on W     penalty on features
    "sk"        stationary        random           |W|²_F           -
    "nsk"       non-stationary    random           |W|²_F           -
    "skl"       stationary        learned          |W|²_F           -
    "nskl"      non-stationary    learned          |W|²_F           -
    "askl"      non-stationary    learned          |W|_*            |φ(X)|²_F

The learned map is `features_`; `MCEClassifier(features=model.features_)` is an embedding on it, with probabilities.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.metaestimators import available_if

from kme_dist import backend as devices
from kme_dist.core import features as maps
from kme_dist.core import optim
from kme_dist.core.embedding import FeatureEmbedding
from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.objective import Objective
from kme_dist.core.risk import positive_rows, total_weight
from kme_dist.core.spectral import (
    LOSSES,
    VARIANTS,
    Variant,
    generalisation_bound,
    lipschitz_constant,
    nuclear_norm,
    shrink,
    spectral_objective,
)
from kme_dist.core.spectral import losses as losses_of
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.frames import split_target
from kme_dist.data.rows import RowsRef, Scaling, resolving_dtype, warn_of_squeezed
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import (
    DTYPES,
    Arrays,
    Estimator,
    Facts,
    Own,
    get_labels,
    on_workers,
    put_labels,
    scaling_arrays,
    stored_scaling,
)
from kme_dist.models.classifier import Classifier, sample_weights
from kme_dist.models.settings import (
    RandomState,
    Rule,
    class_weights,
    integer,
    jobs,
    non_negative,
    one_of,
    positive,
    seed,
)
from kme_dist.run.checkpoints import Checkpoints, as_checkpoints
from kme_dist.run.distinct import as_distinct_rows
from kme_dist.run.learn import Batches, learn
from kme_dist.run.learners import LearnSettings, Record, describe_map, start_of, with_parameters
from kme_dist.run.maps import restore_features
from kme_dist.run.regression import target_from
from kme_dist.run.workers import share

_CHUNK_ROWS = 4_096
Targets = tuple[Batches, int | None, int]  # batches, the number of classes (None: numbers), columns of W


@dataclass(frozen=True)
class SpectralLearner:
    """Evaluates a batch by the spectral objective."""

    features: Any
    variant: Variant
    loss: str
    n_classes: int | None
    weight_penalty: float
    feature_penalty: float

    def evaluate(
        self, parameters: optim.Named, X: Any, y: np.ndarray, number: int, weights: np.ndarray | None = None
    ) -> Objective:
        return spectral_objective(
            with_parameters(self.features, parameters),
            parameters["W"],
            X,
            y,
            loss=self.loss,
            n_classes=self.n_classes,
            ridge=0.0 if self.variant.trace_norm else self.weight_penalty,
            feature_penalty=self.feature_penalty if self.variant.trace_norm else 0.0,
            learn_features=self.variant.learned,
            row_weights=weights,
        )

    def describe(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("features", "variant")}
        return {"kind": "spectral", **own, "variant": vars(self.variant), **describe_map(self.features)}

    def after(self, parameters: optim.Named, rate: float) -> optim.Named:
        """The proximal step of the trace norm."""
        if not self.variant.trace_norm:
            return parameters
        return {**parameters, "W": shrink(parameters["W"], rate * self.weight_penalty)}


@dataclass(frozen=True)
class SoftmaxEmbedding(FeatureEmbedding):
    """f(x) = softmax(Wᵀ φ(x))."""

    def decision(self, X: Any) -> Any:
        return _softmax(super().decision(X))


def _softmax(scores: Any) -> Any:
    xp = devices.namespace_of(scores)
    E = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
    return E / xp.sum(E, axis=1, keepdims=True)


class _ASKL(Estimator):
    """Base of classifier and regressor; see `ASKLClassifier` for the parameters."""

    features_: Any
    weights_: np.ndarray
    scaling_: Scaling
    history_: list[Record]
    bound_: float

    _FITTED: ClassVar[str] = "features_"
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "variant": one_of(*VARIANTS),
        "loss": one_of(*LOSSES),
        "features": integer(1),
        "batch_size": integer(1),
        "batches_per_step": integer(1),
        "epochs": integer(0),
        "deviation": positive(),
        "learning_rate": positive(),
        "weight_penalty": non_negative(),
        "feature_penalty": non_negative(),
        "schedule": one_of("constant", "cosine"),
        "dtype": one_of(*DTYPES),
        "random_state": seed(),
        "n_jobs": jobs(),
    }

    def __init__(
        self,
        variant: str = "askl",
        features: int = 2000,
        form: str = "D",
        deviation: float = 0.5,
        weight_penalty: float = 1e-4,
        feature_penalty: float = 1e-4,
        batch_size: int = 32,
        batches_per_step: int = 1,
        epochs: int = 10,
        learning_rate: float = 0.01,
        schedule: str = "cosine",
        optimizer: str = "adam",
        scaling: str | None = "standard",
        backend: str = "auto",
        dtype: str = "float32",
        client: Any = None,
        random_state: RandomState = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.variant = variant
        self.features = features
        self.form = form
        self.deviation = deviation
        self.weight_penalty = weight_penalty
        self.feature_penalty = feature_penalty
        self.batch_size = batch_size
        self.batches_per_step = batches_per_step
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.optimizer = optimizer
        self.scaling = scaling
        self.backend = backend
        self.dtype = dtype
        self.client = client
        self.random_state = random_state
        self.n_jobs = n_jobs

    # --- fitting ---------------------------------------------------------------------------------

    @on_workers
    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        callback: Callable[[Record], None] | None = None,
        checkpoints: str | Path | Checkpoints | None = None,
    ) -> Self:
        """Learn frequencies and weights from a table and its labels (a regressor: numbers), or from an open `Dataset`.

        `sample_weight` has a number >= 0 for each row: weight 2 counts as the row twice, 0 as no row; to the last bit
        if all rows are one batch, since larger tables have more steps in an epoch with more rows. `callback`
        receives the record of every step; `checkpoints` is a folder to save to and to resume from after an
        interruption.
        """
        self._begin_fit()
        with contextlib.ExitStack() as stack:
            self._learn(*self._targets(X, y, sample_weight, stack), callback, checkpoints)
        return self

    def _targets(self, X: Any, y: Any, sample_weight: Any, stack: contextlib.ExitStack) -> Targets:
        """Rows with their targets; until `stack` closes, workers can read them."""
        raise TypeError(f"{type(self).__name__} must define _targets")

    def _as_learned(self, data: RowSource) -> RowSource:
        """Records the rows, and returns them in the form in which they are learned from."""
        split = data.training_split()
        self._record_data(RowsRef.of(data, split=split))
        return as_distinct_rows(data, split, int(self.batch_size))[0]

    def _source(self, data: RowSource, target: tuple[float, float] | None = None) -> Batches:
        split = data.training_split()
        self.scaling_ = Scaling.of(data.split_statistics(split), self.scaling)
        warn_of_squeezed(RowsRef.of(data, split=split), self.scaling_, self._seed())
        return Batches.of(
            data,
            split=split,
            scaling=self.scaling_,
            dtype=resolving_dtype(self.dtype, data, split, self.scaling),
            batch_size=int(self.batch_size),
            seed=self._seed(),
            target=target,
            backend=self.backend,
        )

    def _learn(
        self,
        source: Batches,
        n_classes: int | None,
        outputs: int,
        callback: Callable[[Record], None] | None,
        checkpoints: str | Path | Checkpoints | None,
    ) -> None:
        variant, start = VARIANTS[self.variant], self._start()
        width = start.first.shape[1] * (2 if self.form == "2D" else 1)
        task = SpectralLearner(
            start, variant, self.loss, n_classes, float(self.weight_penalty), float(self.feature_penalty)
        )
        per_epoch = -(-source.count // (source.size * int(self.batches_per_step)))
        settings = LearnSettings(
            steps=int(self.epochs) * per_epoch,
            batch_size=source.size,
            learning_rate=float(self.learning_rate),
            schedule=optim.cosine_decay if self.schedule == "cosine" else None,
            optimizer=self.optimizer,
            seed=self._seed(),
        )
        features = start_of(start) if variant.learned else {}
        found = learn(
            task,
            source,
            {**features, "W": np.zeros((width, outputs))},
            settings,
            executor=self._executor(),
            batches_per_step=int(self.batches_per_step),
            callback=(lambda record, _: callback(record)) if callback is not None else None,
            after=task.after,
            phase=self.variant,
            checkpoints=as_checkpoints(checkpoints),
        )
        self.features_ = with_parameters(start, found.parameters)
        self.weights_, self.history_ = found.parameters["W"], found.history
        self.bound_ = self._bound(source, n_classes)

    def _start(self) -> maps.Spectral:
        """The initial feature map."""
        return maps.spectral(
            self._width,
            int(self.features),
            deviation=float(self.deviation),
            stationary=VARIANTS[self.variant].stationary,
            form=self.form,
            seed=self._seed(),
        )

    def _bound(self, source: Batches, n_classes: int | None) -> float:
        """The bound at the training rows (of the first chunk, if there are several)."""
        X, y, w = source.first_chunk()
        total, squares, lipschitz = 0.0, 0.0, 0.0
        for rows in row_blocks(len(y), _CHUNK_ROWS):
            Z = devices.to_host(self.features_.forward(X[rows, :]))
            part = y[rows]
            T = (part[:, None] == np.arange(n_classes)).astype(float) if n_classes else part.reshape(len(part), -1)
            each, slope = losses_of(self.loss, Z @ self.weights_, T)
            own = 1.0 if w is None else w[rows]
            total += float(np.sum(each * own))
            lipschitz = max(lipschitz, lipschitz_constant(self.loss, slope))
            squares += float(np.sum(np.sum(Z.astype(np.float64) ** 2, axis=1) * own))
        n = total_weight(w, len(y))
        outputs = self.weights_.shape[1]
        return generalisation_bound(total / n, nuclear_norm(self.weights_), squares, n, outputs, lipschitz)

    # --- predicting, storing --------------------------------------------------------------------

    def _scores(self, X: Any) -> np.ndarray:
        """Wᵀφ(x)."""
        rows = self._query_rows(X)
        return devices.to_host(FeatureEmbedding(self.features_, self.weights_).decision(rows))

    def embed(self, X: Any) -> np.ndarray:
        """The learned features φ(x)."""
        rows = self._query_rows(X)
        return devices.to_host(self.features_.forward(rows))

    def _pack(self) -> tuple[Arrays, Facts]:
        features = {f"features/{name}": value for name, value in self.features_.arrays.items()}
        return {"weights": self.weights_, **scaling_arrays(self.scaling_), **features}, {
            "features": self.features_.to_config(),
            "inputs": self.n_features_in_,
            "bound": self.bound_,
            "history": self.history_,
        }

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.features_ = restore_features(facts["features"], arrays, own)
        if getattr(self.features_, "second_phases", None) is not None:
            self.form = "independent"  # in older models this was form="D"
        self.weights_, self.scaling_ = arrays["weights"], stored_scaling(arrays)
        self.n_features_in_ = int(facts["inputs"])
        self.bound_, self.history_ = facts["bound"], facts["history"]


def _has_probabilities(model: Any) -> bool:
    return bool(model.loss == "cross_entropy")


class ASKLClassifier(Classifier, _ASKL):
    """Spectral kernel learning for classification.

    Parameters
    ----------
    variant : {"askl", "nskl", "skl", "nsk", "sk"}
    features, form, deviation : D frequencies, normal with this deviation; "D" (cosines, one phase for both sets of
        frequencies), "2D" (cosines and sines), or "independent": separate phases for each set, as printed in the paper,
        which makes the kernel of random frequencies stationary.
    loss : {"hinge", "cross_entropy", "squared"}; the paper uses hinge; probabilities require cross entropy.
    weight_penalty, feature_penalty : λ₁ and λ₂.
    batch_size, batches_per_step, epochs, learning_rate, schedule, optimizer : stochastic learning.
    scaling, backend, dtype, client, random_state, n_jobs, class_weight : as in `CENClassifier`.

    Attributes
    ----------
    features_ : the learned map.   weights_ : W.   classes_, history_.   bound_ : the bound at the training rows.
    """

    _BATCHED: ClassVar[bool] = True
    _RULES: ClassVar[Mapping[str, Rule]] = {**_ASKL._RULES, "class_weight": class_weights()}

    def __init__(
        self,
        variant: str = "askl",
        features: int = 2000,
        form: str = "D",
        deviation: float = 0.5,
        loss: str = "hinge",
        weight_penalty: float = 1e-4,
        feature_penalty: float = 1e-4,
        batch_size: int = 32,
        batches_per_step: int = 1,
        epochs: int = 10,
        learning_rate: float = 0.01,
        schedule: str = "cosine",
        optimizer: str = "adam",
        scaling: str | None = "standard",
        backend: str = "auto",
        dtype: str = "float32",
        client: Any = None,
        random_state: RandomState = 0,
        n_jobs: int | None = None,
        class_weight: Any = None,
    ) -> None:
        super().__init__(
            variant=variant,
            features=features,
            form=form,
            deviation=deviation,
            weight_penalty=weight_penalty,
            feature_penalty=feature_penalty,
            batch_size=batch_size,
            batches_per_step=batches_per_step,
            epochs=epochs,
            learning_rate=learning_rate,
            schedule=schedule,
            optimizer=optimizer,
            scaling=scaling,
            backend=backend,
            dtype=dtype,
            client=client,
            random_state=random_state,
            n_jobs=n_jobs,
        )
        self.loss = loss
        self.class_weight = class_weight

    def _targets(self, X: Any, y: Any, sample_weight: Any, stack: contextlib.ExitStack) -> Targets:
        data, _ = self._labelled_rows(X, y, stack, sample_weight)
        self.classes_ = np.asarray(data.classes)
        return self._source(self._as_learned(data)), len(self.classes_), len(self.classes_)

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores Wᵀφ(x); with two classes, second minus first."""
        scores = self._scores(X)
        return scores if len(self.classes_) > 2 else scores[:, 1] - scores[:, 0]

    def _decide(self, X: Any) -> np.ndarray:
        """Probabilities for cross entropy, else scores; the label is the largest."""
        scores = self._scores(X)
        return np.asarray(_softmax(scores)) if self.loss == "cross_entropy" else scores

    def probabilities(self, P: np.ndarray) -> np.ndarray:
        """Class probabilities from the decisions of `embedding_`, which are the same."""
        return P

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities; only for loss="cross_entropy"."""
        return super().predict_proba(X)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`; only for loss="cross_entropy"."""
        return super().predict_log_proba(X)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def entropy(self, X: Any) -> np.ndarray:
        """Uncertainty of the probabilities, in nats."""
        return super().entropy(X)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def expectation(self, X: Any, g: Any) -> np.ndarray:
        """E[g(Y) | x] under `predict_proba`; `g` is a function of the label, a mapping, or one value per class."""
        return super().expectation(X, g)

    @property
    def embedding_(self) -> SoftmaxEmbedding:
        """For batch inference: f(x) are the probabilities."""
        self._check_fitted()
        if not _has_probabilities(self):
            raise ConfigError(f"loss={self.loss!r} gives no probabilities; fit with loss='cross_entropy'")
        return SoftmaxEmbedding(self.features_, self.weights_)

    def _pack(self) -> tuple[Arrays, Facts]:
        arrays, facts = super()._pack()
        return arrays, {**facts, **put_labels(self.classes_)}

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        super()._unpack(arrays, facts, own)
        self.classes_ = get_labels(facts)


class ASKLRegressor(RegressorMixin, _ASKL):  # type: ignore[misc]
    """Spectral kernel learning for regression, of one target or several; they are scaled internally.

    Parameters as in `ASKLClassifier`.
    """

    loss = "squared"
    target_: Any  # mean and deviation of the targets

    def _targets(self, X: Any, y: Any, sample_weight: Any, stack: contextlib.ExitStack) -> Targets:
        data: RowSource
        if isinstance(X, Dataset):
            if X.classes is not None or X.y is None or y is not None or sample_weight is not None:
                raise DataError(
                    f"{X.path}: fit(dataset) requires a data set with numeric targets, no y and no sample_weight"
                )
            self._record_dataset(X)
            data = X
        else:
            X, y = self._fit_rows(X, y, y_numeric=True, multi_output=True)
            X, y, weights = positive_rows(X, np.asarray(y, np.float64), sample_weights(sample_weight, X))
            data = ArrayRows(X, y, weights=weights)
            share(data, self._client, stack)
        data = self._as_learned(data)
        found = target_from(data.target_statistics, data.path)
        width = found.width
        single = isinstance(X, Dataset) or y.ndim == 1
        # Numbers for one target, arrays with one entry for each of several.
        self.target_ = (float(found.mean[0]), float(width[0])) if single else (found.mean, width)
        return self._source(data, (self.target_[0], 1 / self.target_[1])), None, len(width)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R²; y may be the name of a column of X, as in `fit`."""
        X, y = split_target(X, y)
        return float(super().score(X, y, sample_weight))

    def predict(self, X: Any) -> np.ndarray:
        """The conditional mean."""
        scores = self._scores(X)
        scores = scores[:, 0] if np.ndim(self.target_[0]) == 0 else scores
        return np.asarray(scores * self.target_[1] + self.target_[0])

    def _pack(self) -> tuple[Arrays, Facts]:
        arrays, facts = super()._pack()
        return arrays, {**facts, "target": [np.asarray(part).tolist() for part in self.target_]}

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        super()._unpack(arrays, facts, own)
        mean, width = facts["target"]
        self.target_ = (np.array(mean), np.array(width)) if isinstance(mean, list) else (float(mean), float(width))
