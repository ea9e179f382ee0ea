"""Base classes of classifiers: labelled rows for `fit`; labels, probabilities, entropies and expectations.

Classifier             has `_decide(X)`, one column per class, the largest of which is the label, and
                       `probabilities(P)`, which turns such columns into probabilities
EmbeddingClassifier    uses an embedding: `decision_probabilities`, clip-normalised and calibrated
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from kme_dist.backend import blas_threads, precision, to_host
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import Calibration, class_probabilities, expectation
from kme_dist.core.importance import exchange_relevance, sample_rows
from kme_dist.core.importance import shares as as_shares
from kme_dist.core.kernels import Kernel
from kme_dist.core.kernels.base import row_blocks, row_count
from kme_dist.core.risk import checked_weights, positive_rows
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.frames import split_target
from kme_dist.data.rows import RowsRef
from kme_dist.data.validation import as_numbers, unknown_label_words
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import (
    DTYPES,
    Arrays,
    Estimator,
    Facts,
    Own,
    get_labels,
    get_rows,
    has_rows,
    put_labels,
    put_rows,
    scaling_arrays,
    stored_scaling,
)
from kme_dist.models.expressions import names_of
from kme_dist.models.settings import Rule, below_one, class_weights, integer, jobs, one_of, positive, seed
from kme_dist.run.workers import executor_for, share

_WEIGHTS = 1e-150, 1e150  # beyond, ratios of weights overflow
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
            self._record_dataset(X)
            return with_class_weight(X, self.class_weight), None
        X, y = self._fit_rows(*(in_memory(part) for part in (X, y)))
        X, y, weights = positive_rows(X, y, sample_weights(in_memory(sample_weight), X))
        classes, codes = classes_of(y)
        data = ArrayRows(X, codes, classes, self._names_of_rows(), weights)
        data = with_class_weight(data, self.class_weight)
        return data, share(data, self._client, stack)

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

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy; y may be the name of a column of X, as in `fit`."""
        X, y = split_target(X, y)
        return float(super().score(X, y, sample_weight))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`; -inf only where a probability is exactly 0."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

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
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "class_weight": class_weights(),
        "dtype": one_of(*DTYPES),
        "steps": integer(0),
        "batch_size": integer(1, optional=True),
        "regularization": positive(),
        "learning_rate": positive(),
        "probability_floor": below_one(optional=True),
        "random_state": seed(),
        "verbose": integer(0),
        "n_jobs": jobs(),
    }
    embedding_: Any
    probability_floor: float | None
    probability_floor_: float
    calibration_: Calibration = Calibration()
    sample_: tuple[np.ndarray, np.ndarray] | None = None  # raw rows of the fit and their labels
    _importances: np.ndarray | None = None
    _groups: Mapping[str, Sequence[int]] = MappingProxyType({})

    def _floor(self, n: float) -> float:
        """The least probability of a label after n rows (or rows of weight n): 1/(n + m) unless set."""
        self._check_settings("probability_floor")
        return 1.0 / (n + len(self.classes_)) if self.probability_floor is None else float(self.probability_floor)

    def decision_probabilities(self, X: Any) -> np.ndarray:
        """f(x), one column per class; rows need not add up to one and entries may leave [0, 1]."""
        rows, embedding = self._query_rows(X), self.embedding_
        if not (isinstance(rows, np.ndarray) and isinstance(embedding, mce.Embedding)):
            return to_host(embedding.decision(rows))
        # Tiles of rows by all cores: the same bits on any number of them.
        decide = mce.Decision(embedding, precision(rows))
        calls = [(rows[part],) for part in row_blocks(max(1, len(rows)), mce.HOST_TILE[0])]
        executor = executor_for(None, threads=1 if self.n_jobs == 1 else None)
        return np.concatenate([to_host(part) for part in executor.map(decide, calls, name="decide")])

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

    # --- relevance -------------------------------------------------------------------------------

    @property
    def feature_importances_(self) -> np.ndarray:
        """The relevance of every feature, measured on a sample of the training rows: >= 0, of sum 1.

        In the order of `feature_names_in_`, also of a table whose columns were encoded as several. Computed at the
        first use, in seconds; see `feature_importances`. As everywhere in scikit-learn these are shares: those of
        features that are all noise have the sum 1, too. `feature_importances(shares=False)` has the losses.
        """
        self._check_fitted()
        if self._importances is None:
            found = self.feature_importances(None if self.encoding_ is None else "columns")
            if self.encoding_ is not None:  # a column without features, such as an empty one, has no relevance
                own = dict(zip(self.feature_groups_, found.tolist(), strict=True))
                found = np.array([own.get(str(name), 0.0) for name in self.feature_names_in_])
            self._importances = found
        return self._importances

    def feature_importances(
        self, groups: str | Mapping[str, Sequence[Any]] | Sequence[Any] | None = None, *, shares: bool = True
    ) -> np.ndarray:
        """How much worse rows are predicted, by the model without them, if a feature has the values of other rows.

        `groups` are features that are exchanged together, as lists of names or positions: one share for each, in
        their order. "columns" takes all features of a categorical column together, see `feature_groups_`; None takes
        every feature for itself. Without `shares` these are the measured increases of the Brier score (between 0 and
        2): where all of them are small, no feature matters.
        """
        self._check_fitted()
        if self.sample_ is None:  # an AttributeError, so that hasattr(model, "feature_importances_") is False
            raise AttributeError(
                f"this {type(self).__name__} was saved without a sample of its rows, which the relevance of features "
                "is measured on; fit it again"
            )
        if isinstance(groups, str) and groups != "columns":
            raise ConfigError(f"groups={groups!r} is unknown; pass 'columns', None or lists of features")
        if isinstance(groups, str):
            groups = self.feature_groups_
        chosen: Any = range(self._width) if groups is None else groups
        members = list(chosen.values()) if isinstance(chosen, Mapping) else list(chosen)
        kernel, lam, inputs = self._kernel_of_rows()
        rows, labels = self.sample_
        with blas_threads(1):
            found = exchange_relevance(
                kernel,
                np.asarray(rows),
                labels,
                len(self.classes_),
                lam,
                [self._positions(group) for group in members],
                inputs=inputs,
                floor=self.probability_floor_,
                seed=self._seed(),
            )
        return as_shares(found) if shares else found

    @property
    def feature_groups_(self) -> dict[str, list[int]]:
        """Positions of the features that each column was encoded as; one each, unless a data set says otherwise."""
        self._check_fitted()
        if self._groups:
            return {name: list(group) for name, group in self._groups.items()}
        return {name: [i] for i, name in enumerate(self.encoded_feature_names_)}

    def _kernel_of_rows(self) -> tuple[Kernel, float, Callable[[np.ndarray], np.ndarray]]:
        """The kernel of the fit, its λ, and what makes its inputs of raw rows."""
        raise TypeError(f"{type(self).__name__} must define _kernel_of_rows")

    def _positions(self, group: Any) -> list[int]:
        names = self._names_of_rows() or []
        found = []
        for feature in [group] if isinstance(group, str | int | np.integer) else group:
            if isinstance(feature, str) and feature in names:
                found.append(names.index(feature))
            elif not isinstance(feature, str) and 0 <= int(feature) < self._width:
                found.append(int(feature))
            else:
                raise DataError(
                    f"feature_importances: {feature!r} is not a feature; pass names of encoded_feature_names_ or "
                    f"positions from 0 to {self._width - 1}"
                )
        return found

    def _keep_sample(self, data: RowSource, split: str | None) -> None:
        """Keep what relevance is measured on: raw rows, their labels, and the columns that features come from."""
        most = sample_rows(data.features)
        rows = RowsRef.of(data, split=split)
        self._record_data(rows)
        X, y = rows.sample(most, self._seed())
        self._importances, self._groups, self.sample_ = None, {}, None
        if hasattr(X, "dtype"):  # other rows have no features
            self.sample_ = X[:most].copy(), np.asarray(y)[:most].copy()
        if self.encoding_ is not None:
            self._groups = self.encoding_.groups

    # --- storing ---------------------------------------------------------------------------------

    def _pack(self) -> tuple[Arrays, Facts]:
        """What all of them store: scaling, labels, floor and the sample; subclasses add their embedding."""
        arrays = scaling_arrays(self.scaling_)
        facts: Facts = {"feature_groups": self._groups, "probability_floor": self.probability_floor_}
        if self.sample_ is not None:
            arrays["sample/labels"] = self.sample_[1]
            put_rows(arrays, facts, "sample/rows", self.sample_[0])
        return arrays, {**facts, **put_labels(self.classes_)}

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.scaling_, self.classes_ = stored_scaling(arrays), get_labels(facts)
        self.probability_floor_ = float(facts["probability_floor"])
        self._importances, self._groups = None, dict(facts.get("feature_groups") or {})
        self.sample_ = None  # of models of older versions
        if has_rows(arrays, facts, "sample/rows"):
            self.sample_ = get_rows(arrays, facts, "sample/rows"), np.asarray(arrays["sample/labels"])


def with_class_weight(data: Source, class_weight: Any) -> Source:
    """The rows, with weights multiplied by those of their classes: None, "balanced", or a mapping from label to number.

    "balanced" gives all classes the same total weight. Labels of a mapping may be written as texts, as in JSON.
    """
    if class_weight is None:
        return data
    if isinstance(class_weight, str):
        totals = data.weight_totals(data.training_split())[:, 0]
        present = totals > 0
        factors = np.where(present, totals.sum() / (present.sum() * np.where(present, totals, 1.0)), 1.0)
        return data.with_class_factors(factors.tolist())
    classes = np.asarray(data.classes).tolist()
    written = names_of(classes)
    given = {written.get(str(label)): float(number) for label, number in class_weight.items()}
    unknown = [label for label in class_weight if str(label) not in written]
    if unknown:
        raise DataError(
            f"class_weight has the label {unknown[0]!r}, which no row has; the labels are "
            f"{', '.join(map(repr, classes[:12]))}"
        )
    if not any(given.get(label, 1.0) for label in classes):
        raise DataError("class_weight gives every class the weight 0; at least two classes need a positive one")
    return data.with_class_factors([given.get(label, 1.0) for label in classes])


def sample_weights(given: Any, X: Any) -> np.ndarray | None:
    """Weights as scikit-learn accepts them (a list, a series, one number for all rows); None stays None."""
    if given is None:
        return None
    numbers = as_numbers(given, "sample_weight")
    found = checked_weights(np.full(row_count(X), float(numbers)) if numbers.ndim == 0 else numbers, row_count(X))
    assert found is not None
    least, most = _WEIGHTS
    wrong = (found > most) | ((found < least) & (found > 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"the weight of row {row} is {found[row]:.3g}; positive weights must be from {least:g} to {most:g}; "
            "multiply all of them by one number"
        )
    return found


def in_memory(part: Any) -> Any:
    """A Dask array or data frame, computed; anything else unchanged."""
    return part.compute() if hasattr(part, "dask") and hasattr(part, "compute") else part


def classes_of(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted classes, and the class number of every row."""
    try:
        check_classification_targets(y)
    except (TypeError, ValueError) as error:
        raise DataError(unknown_label_words(y) or str(error)) from None
    classes, codes = np.unique(y, return_inverse=True)
    _check_classes(classes)
    return classes, codes


def _check_classes(classes: Any) -> None:
    if len(classes) < 2:
        only = np.asarray(classes).tolist()[0]
        raise DataError(f"y has only one class ({only!r}); a classifier requires at least two")


def _values_per_class(g: Any, classes: np.ndarray) -> np.ndarray:
    if callable(g):
        return as_numbers([g(label) for label in classes], "the values of g")
    if isinstance(g, Mapping):
        missing = [label for label in classes.tolist() if label not in g]
        if missing:
            raise DataError(f"expectation: the mapping has no value for label {missing[0]!r}")
        return as_numbers([g[label] for label in classes.tolist()], "the values of g")
    values = as_numbers(g, "the values of g")
    if values.shape[:1] != classes.shape:
        raise DataError(f"expectation: expected one value for each of {len(classes)} classes, got shape {values.shape}")
    return values
