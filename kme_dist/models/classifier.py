"""Base classes of classifiers: labelled rows for `fit`; labels, probabilities, entropies and expectations.

Classifier             has `_decide(X)`, one column per class, the largest of which is the label, and
                       `probabilities(P)`, which turns such columns into probabilities
EmbeddingClassifier    uses an embedding: `decision_probabilities`, clip-normalised and calibrated
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight

from kme_dist.backend import to_host
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import Calibration, class_probabilities, expectation
from kme_dist.core.weights import checked_weights, positive_rows
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import Estimator
from kme_dist.run.sharing import share

Source = TypeVar("Source", bound=RowSource)


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """Base of all classifiers of rows."""

    classes_: np.ndarray
    class_weight: Any = None

    # --- fitting ---------------------------------------------------------------------------------

    def _labelled_rows(
        self, X: Any, y: Any, stack: contextlib.ExitStack, sample_weight: Any = None
    ) -> tuple[RowSource, str | None]:
        """Rows with class codes and weights, from a table and y or from a data set; and the folder from which local
        workers read rows in memory (until `stack` closes)."""
        if isinstance(X, Dataset):
            if sample_weight is not None:
                raise DataError(
                    f"{X.path}: a data set has its own weights; ingest it with the column named by `weight`"
                )
            if y is not None:
                raise DataError(f"{X.path} has its own labels; call fit(dataset) without y")
            if X.classes is None:
                raise DataError(f"{X.path} has no class labels; ingest it again with the column named by `label`")
            _check_classes(X.classes)
            self._record_names(X.feature_names)
            return self._class_weighted(X), None
        X, y = self._fit_rows(*(in_memory(part) for part in (X, y)))
        X, y, weights = positive_rows(X, y, sample_weights(in_memory(sample_weight), X))
        classes, codes = classes_of(y)
        data = ArrayRows(X, codes, classes, getattr(self, "feature_names_in_", None), weights)
        data = self._class_weighted(data)
        return data, share(data, self.client, stack)

    def _class_weighted(self, data: Source) -> Source:
        """The rows, with weights multiplied by those of `class_weight`."""
        if self.class_weight is None:
            return data
        if isinstance(self.class_weight, str):  # "balanced": all classes have the same total weight
            totals = data.weight_totals(data.training_split())[:, 0]
            present = totals > 0
            factors = np.where(present, totals.sum() / (present.sum() * np.where(present, totals, 1.0)), 1.0)
        else:
            classes = np.asarray(data.classes)
            unknown = [label for label in self.class_weight if label not in classes.tolist()]
            if unknown:
                raise DataError(
                    f"class_weight has the label {unknown[0]!r}, which no row has; the labels are "
                    f"{', '.join(map(repr, classes.tolist()[:12]))}"
                )
            factors = np.array([self.class_weight.get(label, 1.0) for label in classes.tolist()], np.float64)
        return data.with_class_factors(factors.tolist())

    # --- predicting ------------------------------------------------------------------------------

    def _decide(self, X: Any) -> np.ndarray:
        """One column per class; the largest of a row is its label."""
        raise TypeError(f"{type(self).__name__} must define _decide")

    def probabilities(self, P: np.ndarray) -> np.ndarray:
        """Class probabilities from the result of `_decide`; the label has the largest one."""
        raise TypeError(f"{type(self).__name__} must define probabilities")

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of every row, by the decision as well as by `predict_proba`."""
        best = self._decide(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities, columns in the order of `classes_`."""
        return self.probabilities(self._decide(X))

    def entropy(self, X: Any) -> np.ndarray:
        """Uncertainty of the probabilities, in nats."""
        return np.asarray(mce.rkhs_entropy(self.predict_proba(X)))  # already normalised

    def expectation(self, X: Any, g: Any) -> np.ndarray:
        """E[g(Y) | x] under `predict_proba`: never outside the values of g.

        `g` is a function of the label, a mapping from label to value, or one value (or row of values) per class.
        """
        self._check_fitted()
        values = _values_per_class(g, self.classes_)
        return np.asarray(expectation(self.predict_proba(X), values))


class EmbeddingClassifier(Classifier):
    """A classifier with decision probabilities f(x) of `embedding_`, clip-normalised above `probability_floor_`."""

    _BATCHED: ClassVar[bool] = True
    embedding_: Any
    probability_floor: float | None
    probability_floor_: float
    calibration_: Calibration = Calibration()

    def _floor(self, n: float) -> float:
        """The least probability of a label after n rows (or rows of weight n): 1/(n + m) unless set."""
        self._check_settings("probability_floor")
        return 1.0 / (n + len(self.classes_)) if self.probability_floor is None else float(self.probability_floor)

    def decision_probabilities(self, X: Any) -> np.ndarray:
        """f(x), one column per class; rows need not add up to one and entries may leave [0, 1]."""
        rows = self._query_rows(X)
        return to_host(self.embedding_.decision(rows))

    def _decide(self, X: Any) -> np.ndarray:
        return self.decision_probabilities(X)

    def probabilities(self, P: np.ndarray) -> np.ndarray:
        """Class probabilities from decision probabilities: clip-normalised, then calibrated if requested. The label,
        the class with the largest decision probability, also has the largest probability."""
        return class_probabilities(P, self.probability_floor_, self.calibration_)

    def decision_function(self, X: Any) -> np.ndarray:
        """Decision probabilities; with two classes, as scikit-learn requires, second minus first.

        The difference is that of the probabilities, so that it ranks rows as `predict_proba` does; ties (both at the
        floor) are broken by the decision probabilities.
        """
        P = self.decision_probabilities(X)
        if len(self.classes_) > 2:
            return P
        p = self.probabilities(P)
        return np.asarray(p[:, 1] - p[:, 0] + 1e-12 * (P[:, 1] - P[:, 0]))

    def entropy(self, X: Any, kind: str = "clip") -> np.ndarray:
        """Uncertainty in nats: of the probabilities ("clip"), or the embedding's own estimate ("rkhs")."""
        if kind not in ("clip", "rkhs"):
            raise ConfigError(f"kind={kind!r} is unknown; choose 'clip' or 'rkhs'")
        return super().entropy(X) if kind == "clip" else np.asarray(mce.rkhs_entropy(self.decision_probabilities(X)))

    def expectation(self, X: Any, g: Any, raw: bool = False) -> np.ndarray:
        """E[g(Y) | x] under `predict_proba`, or `raw`: Σ_c g(c) f_c(x), which may leave the values of g.

        `g` is a function of the label, a mapping from label to value, or one value (or row of values) per class.
        """
        if not raw:
            return super().expectation(X, g)
        self._check_fitted()
        return np.asarray(mce.expectation(self.decision_probabilities(X), _values_per_class(g, self.classes_)))


def sample_weights(given: Any, X: Any) -> np.ndarray | None:
    """Weights as scikit-learn accepts them (a list, a series, one number for all rows); None stays None."""
    if given is None:
        return None
    return checked_weights(_check_sample_weight(given, X, dtype=np.float64, ensure_non_negative=False), len(X))


def in_memory(part: Any) -> Any:
    """A Dask array or data frame, computed; anything else unchanged."""
    return part.compute() if hasattr(part, "dask") and hasattr(part, "compute") else part


def classes_of(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted classes, and the class number of every row."""
    check_classification_targets(y)
    classes, codes = np.unique(y, return_inverse=True)
    _check_classes(classes)
    return classes, codes


def _check_classes(classes: Any) -> None:
    if len(classes) < 2:
        only = np.asarray(classes).tolist()[0]
        raise DataError(f"y has only one class ({only!r}); a classifier requires at least two")


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
        raise DataError(f"expectation: expected one value for each of {len(classes)} classes, got shape {values.shape}")
    return values
