"""Automated spectral kernel learning: a classifier and a regressor that learn their own frequencies.

>>> from sklearn.datasets import load_iris
>>> X, y = load_iris(return_X_y=True)
>>> model = ASKLClassifier(features=100, epochs=20, random_state=0).fit(X, y)
>>> model.predict(X[:3]).shape
(3,)

    variant     kernel            frequencies      penalty on W     on the features
    "sk"        stationary        as drawn         |W|²_F           -
    "nsk"       non-stationary    as drawn         |W|²_F           -
    "skl"       stationary        learned          |W|²_F           -
    "nskl"      non-stationary    learned          |W|²_F           -
    "askl"      non-stationary    learned          |W|_*            |φ(X)|²_F

The learned map is `features_`: `MCEClassifier(features=model.features_)` makes an embedding with probabilities of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from kme_dist import backend as devices
from kme_dist.core import features as maps
from kme_dist.core import optim
from kme_dist.core.embedding import FeatureEmbedding, rkhs_entropy
from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.objective import Objective
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
from kme_dist.data import store
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.scaling import Scaling
from kme_dist.data.store import labels_from_json, labels_to_json, plain
from kme_dist.data.validation import remember_names, restore_names, rows_and_labels, rows_asked, stored_names
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.cen import FORMAT
from kme_dist.run.checkpoints import Checkpoints, as_checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.features import (
    Source,
    learn_task,
    restore_features,
    start_of,
    with_parameters,
)
from kme_dist.run.learn import LearnSettings, Record
from kme_dist.run.sharing import executor_for, share

_CHUNK_ROWS = 4_096


@dataclass(frozen=True)
class SpectralTask:
    """One batch of the spectral objective."""

    features: Any
    variant: Variant
    loss: str
    n_classes: int | None
    weight_penalty: float
    feature_penalty: float

    def evaluate(self, parameters: optim.Named, X: Any, y: np.ndarray, number: int) -> Objective:
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
        )

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


class _ASKL(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share; see `ASKLClassifier` for the parameters."""

    features_: Any
    weights_: np.ndarray
    scaling_: Scaling
    history_: list[Record]
    bound_: float

    # --- fitting ---------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        if self.variant not in VARIANTS:
            raise ConfigError(f"variant={self.variant!r} is unknown; choose one of {', '.join(VARIANTS)}")
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r} is unknown; choose one of {', '.join(LOSSES)}")
        for name in ("features", "batch_size", "batches_per_step"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be an integer >= 1")
        if not isinstance(self.epochs, int | np.integer) or self.epochs < 0:
            raise ConfigError(f"epochs={self.epochs!r}: must be an integer >= 0")
        for name in ("deviation", "learning_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}: must be a positive number")
        for name in ("weight_penalty", "feature_penalty"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: must be a number >= 0")
        if self.schedule not in ("constant", "cosine"):
            raise ConfigError(f"schedule={self.schedule!r} is unknown; choose 'constant' or 'cosine'")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype={self.dtype!r} is unknown; choose 'float32' or 'float64'")

    def _seed(self) -> int:
        if self.random_state is None:
            return int(np.random.SeedSequence().generate_state(1)[0])
        if not isinstance(self.random_state, int | np.integer) or self.random_state < 0:
            raise ConfigError(f"random_state={self.random_state!r}: must be an integer >= 0, or None")
        return int(self.random_state)

    def _executor(self) -> Executor:
        return executor_for(self.client)

    def _source(self, data: RowSource, target: tuple[float, float] | None = None) -> Source:
        split = data.training_split()
        self.scaling_ = Scaling.of(data.split_statistics(split), self.scaling)
        return Source.of(
            data,
            split=split,
            scaling=self.scaling_,
            dtype=self.dtype,
            batch_size=int(self.batch_size),
            seed=self._seed(),
            target=target,
            backend=self.backend,
        )

    def _learn(
        self,
        source: Source,
        n_classes: int | None,
        outputs: int,
        callback: Callable[[Record], None] | None,
        checkpoints: str | Path | Checkpoints | None,
    ) -> None:
        variant, start = VARIANTS[self.variant], self._start()
        width = start.first.shape[1] * (2 if self.form == "2D" else 1)
        task = SpectralTask(
            start, variant, self.loss, n_classes, float(self.weight_penalty), float(self.feature_penalty)
        )
        per_epoch = -(-source.rows // (source.batch * int(self.batches_per_step)))
        settings = LearnSettings(
            steps=int(self.epochs) * per_epoch,
            batch_size=source.batch,
            learning_rate=float(self.learning_rate),
            schedule=optim.cosine_decay if self.schedule == "cosine" else None,
            optimizer=self.optimizer,
            seed=self._seed(),
        )
        features = start_of(start) if variant.learned else {}
        found = learn_task(
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
        """The map that learning begins with."""
        return maps.spectral(
            self.n_features_in_,
            int(self.features),
            deviation=float(self.deviation),
            stationary=VARIANTS[self.variant].stationary,
            form=self.form,
            seed=self._seed(),
        )

    def _bound(self, source: Source, n_classes: int | None) -> float:
        """The bound at the training rows (at those of the first chunk, where there are many)."""
        X, y = source.prepared(*(np.asarray(part) for part in source.dataset.read_rows(*source.chunks()[0])))
        total, squares, lipschitz = 0.0, 0.0, 0.0
        for rows in row_blocks(len(y), _CHUNK_ROWS):
            Z = devices.to_host(self.features_.forward(X[rows, :]))
            part = y[rows]
            T = (part[:, None] == np.arange(n_classes)).astype(float) if n_classes else part.reshape(len(part), -1)
            each, slope = losses_of(self.loss, Z @ self.weights_, T)
            total += float(np.sum(each))
            lipschitz = max(lipschitz, lipschitz_constant(self.loss, slope))
            squares += float(np.sum(Z.astype(np.float64) ** 2))
        n = len(y)
        outputs = self.weights_.shape[1]
        return generalisation_bound(total / n, nuclear_norm(self.weights_), squares, n, outputs, lipschitz)

    # --- using -----------------------------------------------------------------------------------

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "features_")
        X = rows_asked(self, X, dtype=[np.float64, np.float32])
        rows = devices.to_device(self.scaling_.apply(X, "float64"), devices.resolve(self.backend))
        return devices.to_host(FeatureEmbedding(self.features_, self.weights_).decision(rows))

    def embed(self, X: Any) -> np.ndarray:
        """The learned features φ(x)."""
        check_is_fitted(self, "features_")
        X = rows_asked(self, X, dtype=[np.float64, np.float32])
        return np.asarray(self.features_.forward(self.scaling_.apply(X, "float64")))

    def save(self, path: str | Path) -> None:
        """Write the fitted model as Zarr arrays and JSON; `kme_dist.load` brings it back without running code."""
        check_is_fitted(self, "features_")
        arrays = {
            "weights": self.weights_,
            "scaling/shift": self.scaling_.shift,
            "scaling/factor": self.scaling_.factor,
            **{f"features/{name}": value for name, value in self.features_.arrays.items()},
        }
        settings = {name: plain(value) for name, value in self.get_params(deep=False).items()}
        attributes = {
            "model": type(self).__name__,
            "model_format": FORMAT,
            "settings": {**settings, "client": None},
            "features": self.features_.to_config(),
            "inputs": self.n_features_in_,
            **stored_names(self),
            "bound": self.bound_,
            "history": self.history_,
            **self._own_attributes(),
        }
        store.save_arrays(path, arrays, attributes)

    def _own_attributes(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _restore(cls, arrays: Mapping[str, np.ndarray], found: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        model = cls(**found["settings"])
        model.features_ = restore_features(found["features"], arrays, own)
        if getattr(model.features_, "second_phases", None) is not None:
            model.form = "independent"  # in older models this was form="D"
        model.weights_ = arrays["weights"]
        model.scaling_ = Scaling(arrays["scaling/shift"], arrays["scaling/factor"])
        restore_names(model, found, found["inputs"])
        model.bound_, model.history_ = found["bound"], found["history"]
        model._restore_own(found)
        return model

    def _restore_own(self, found: Mapping[str, Any]) -> None:
        pass


class ASKLClassifier(ClassifierMixin, _ASKL):  # type: ignore[misc]
    """Spectral kernel learning for classes.

    Parameters
    ----------
    variant : {"askl", "nskl", "skl", "nsk", "sk"}
    features, form, deviation : D frequencies, normal with this deviation; "D" (cosines, one phase for both sets of
        frequencies), "2D" (cosines and sines), or "independent": phases of their own for each set, as the paper prints
        it, which makes the kernel of drawn frequencies a stationary one.
    loss : {"hinge", "cross_entropy", "squared"}; the paper's is the hinge, probabilities come with cross entropy.
    weight_penalty, feature_penalty : λ₁ and λ₂.
    batch_size, batches_per_step, epochs, learning_rate, schedule, optimizer : stochastic learning.
    scaling, backend, dtype, client, random_state : as in `CENClassifier`.

    Attributes
    ----------
    features_ : the learned map.   weights_ : W.   classes_, history_.   bound_ : the bound at the training rows.
    """

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
        random_state: int | None = 0,
    ) -> None:
        self.variant = variant
        self.features = features
        self.form = form
        self.deviation = deviation
        self.loss = loss
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

    def fit(
        self,
        X: Any,
        y: Any = None,
        callback: Callable[[Record], None] | None = None,
        checkpoints: str | Path | Checkpoints | None = None,
    ) -> Self:
        """Learn frequencies and weights from a table with labels, or from an open `Dataset`.

        `callback` receives the record of every step; `checkpoints` is a folder to save to and, after a kill, to go on
        from.
        """
        self._check_settings()
        with contextlib.ExitStack() as stack:
            data: RowSource
            if isinstance(X, Dataset):
                if X.classes is None or y is not None:
                    raise DataError(f"{X.path}: fit(dataset) takes a data set with class labels, and no y")
                remember_names(self, X.feature_names)
                data, self.classes_ = X, np.asarray(X.classes)
            else:
                X, y = rows_and_labels(self, X, y, dtype=[np.float64, np.float32])
                check_classification_targets(y)
                self.classes_, codes = np.unique(y, return_inverse=True)
                data = ArrayRows(X, codes, self.classes_)
                share(data, self.client, stack)
            if len(self.classes_) < 2:
                raise DataError(
                    f"y holds one class only ({self.classes_[0]!r}); a classifier needs rows of at least two classes"
                )
            self._learn(self._source(data), len(self.classes_), len(self.classes_), callback, checkpoints)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores Wᵀφ(x); with two classes, how far the second leads the first."""
        scores = self._scores(X)
        return scores if len(self.classes_) > 2 else scores[:, 1] - scores[:, 0]

    def predict(self, X: Any) -> np.ndarray:
        """The class with the largest score; where there are probabilities, with the largest of `predict_proba`."""
        scores = self._scores(X)
        best = (_softmax(scores) if self.loss == "cross_entropy" else scores).argmax(axis=1)
        return np.asarray(self.classes_[best])

    @available_if(lambda self: self.loss == "cross_entropy")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities, where the loss was cross entropy."""
        return np.asarray(_softmax(self._scores(X)))

    @available_if(lambda self: self.loss == "cross_entropy")  # type: ignore[untyped-decorator]
    def entropy(self, X: Any) -> np.ndarray:
        """Uncertainty of the probabilities, in nats."""
        return np.asarray(rkhs_entropy(self.predict_proba(X)))

    @property
    def embedding_(self) -> SoftmaxEmbedding:
        """What batch inference asks: f(x) are the probabilities themselves."""
        check_is_fitted(self, "features_")
        if self.loss != "cross_entropy":
            raise ConfigError(f"loss={self.loss!r} gives no probabilities to store; fit with loss='cross_entropy'")
        return SoftmaxEmbedding(self.features_, self.weights_)

    def probabilities(self, P: np.ndarray) -> np.ndarray:
        """Class probabilities from what `embedding_` decides: the same."""
        return P

    def _own_attributes(self) -> dict[str, Any]:
        return labels_to_json(self.classes_)

    def _restore_own(self, found: Mapping[str, Any]) -> None:
        self.classes_ = labels_from_json(found)


class ASKLRegressor(RegressorMixin, _ASKL):  # type: ignore[misc]
    """Spectral kernel learning for numbers, centred and scaled inside; parameters as in `ASKLClassifier`."""

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
        random_state: int | None = 0,
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

    loss = "squared"

    def fit(
        self,
        X: Any,
        y: Any = None,
        callback: Callable[[Record], None] | None = None,
        checkpoints: str | Path | Checkpoints | None = None,
    ) -> Self:
        """Learn frequencies and weights from a table with numbers to predict, or from an open `Dataset`.

        `callback` receives the record of every step; `checkpoints` is a folder to save to and, after a kill, to go on
        from.
        """
        self._check_settings()
        with contextlib.ExitStack() as stack:
            data: RowSource
            if isinstance(X, Dataset):
                if X.classes is not None or X.y is None or y is not None:
                    raise DataError(f"{X.path}: fit(dataset) takes a data set with numbers to predict, and no y")
                remember_names(self, X.feature_names)
                data = X
            else:
                X, y = rows_and_labels(self, X, y, dtype=[np.float64, np.float32], y_numeric=True)
                data = ArrayRows(X, np.asarray(y, np.float64))
                share(data, self.client, stack)
            found = data.target_statistics
            self.target_ = _centre_and_width(float(found.mean[0]), float(found.variance[0]))
            self._learn(self._source(data, (self.target_[0], 1 / self.target_[1])), None, 1, callback, checkpoints)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The conditional mean."""
        scores = self._scores(X)[:, 0]
        return np.asarray(scores * self.target_[1] + self.target_[0])

    def _own_attributes(self) -> dict[str, Any]:
        return {"target": list(self.target_)}

    def _restore_own(self, found: Mapping[str, Any]) -> None:
        self.target_ = (float(found["target"][0]), float(found["target"][1]))


def _centre_and_width(mean: float, variance: float) -> tuple[float, float]:
    return mean, math.sqrt(variance) if variance > 0 else 1.0
