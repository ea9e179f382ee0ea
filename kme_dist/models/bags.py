"""Support measure machines: classify bags of rows, each represented by its kernel mean.   [KMSE, 6.2.3]

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> bags = [rng.normal(0.0, 1.0 + i % 2, size=(30, 2)) for i in range(40)]      # narrow and wide clouds
>>> kinds = ["narrow" if i % 2 == 0 else "wide" for i in range(40)]
>>> clf = SupportMeasureClassifier(estimator="r-kmse").fit(bags[:30], kinds[:30])
>>> float(clf.score(bags[30:], kinds[30:]))
1.0

A bag is an array of rows (or a list of objects that the kernel accepts); bags may differ in size. The kernel between
bags is <μ_i, μ_j> ("linear") or exp(-|μ_i - μ_j|²/2σ²) ("gaussian"; the paper's formula lacks the minus sign).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import ClassifierMixin, OutlierMixin
from sklearn.svm import SVC, OneClassSVM

from kme_dist.core.kernels import Kernel
from kme_dist.core.kernels.base import row_count, take
from kme_dist.core.means import ESTIMATORS, gram_weights, weighted_features
from kme_dist.data.rows import check_magnitude, rows_of
from kme_dist.data.validation import check_labels, check_only_texts
from kme_dist.errors import DataError
from kme_dist.models.base import Arrays, Estimator, Facts, Own, get_labels, get_rows, put_labels, put_rows
from kme_dist.models.means import kernel_for
from kme_dist.models.settings import RandomState, Rule, one_of, positive, seed, up_to_one


class _BagMachine(Estimator):
    """Base of both machines: kernel means of bags and the Gram matrix between them."""

    _FITTED: ClassVar[str] = "machine_"
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "estimator": one_of(*ESTIMATORS),
        "level": one_of("linear", "gaussian"),
        "width": positive(optional=True),
        "random_state": seed(),
    }

    kernel: Any
    estimator: str
    level: str
    width: float | None
    positive_part: bool
    machine_: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False  # a list of bags
        return tags

    def _bags(self, bags: Sequence[Any], reset: bool = False) -> list[Any]:
        """Rows of every bag, checked to have the same columns as those of the fit."""
        if not len(bags):
            raise DataError("bags is empty; pass a list of arrays, one for each example")
        found = []
        for number, bag in enumerate(bags):
            try:
                check_only_texts(bag)
                found.append(rows_of(np.asarray(bag) if isinstance(bag, np.ndarray) else bag).read()[0])
            except DataError as error:
                raise DataError(f"bag {number}: {error}") from error
        widths = {bag.shape[1] for bag in found if isinstance(bag, np.ndarray)}
        if len(widths) > 1:
            raise DataError(f"bags differ in their number of features: {sorted(widths)}")
        if reset:
            self._record_columns(bags[0], found[0])
        for number, (bag, rows) in enumerate(zip(bags, found, strict=True)):
            try:
                self._check_columns(bag, rows)
                if not reset:
                    check_magnitude(rows, scaled=False)
            except ValueError as error:  # ours, and scikit-learn's on feature names
                raise DataError(f"bag {number}: {error}") from error
        return found

    def _prepare(self, bags: Sequence[Any]) -> np.ndarray:
        """Keep the bags with their weights; returns the Gram matrix between them, scaled to a mean diagonal of 1, so
        that C and nu do not depend on the magnitude of the kernel."""
        found = self._bags(bags, reset=True)
        self.kernel_ = kernel_for(self.kernel, rows_of(_stacked(found)), self._seed())
        self._keep(found)
        G = self._inner(self.points_, self.weights_, self.sizes_)
        self.norms_ = np.diagonal(G).copy()
        self.width_ = self.width
        if self.level == "gaussian" and self.width is None:
            distances = np.sqrt(np.maximum(self.norms_[:, None] + self.norms_[None, :] - 2 * G, 0.0))
            nonzero = distances[distances > 0]
            self.width_ = float(np.median(nonzero)) if nonzero.size else 1.0
        G = self._second_level(G, self.norms_)
        self.unit_ = float(np.mean(np.diagonal(G))) or 1.0
        return np.asarray(G / self.unit_)

    def _keep(self, bags: list[Any]) -> None:
        self.points_, self.sizes_ = _stacked(bags), np.array([row_count(bag) for bag in bags])
        self.weights_ = np.concatenate([self._weigh(bag) for bag in bags])

    def _weigh(self, bag: Any) -> np.ndarray:
        """Weights of the rows of a bag; a single row is not shrunk, since its shrinkage cannot be estimated."""
        if self.estimator == "kme" or row_count(bag) < 2:
            return np.full(row_count(bag), 1.0 / row_count(bag))
        K = np.asarray(self.kernel_.gram(bag), dtype=np.float64)
        return np.asarray(gram_weights(self.estimator, K, positive_part=self.positive_part).weights)

    def _inner(self, points: Any, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """<μ_i, μ_j> of the given bags (rows) and the kept ones (columns), one bag at a time."""
        ends = np.cumsum(sizes)
        across = np.zeros((len(self.weights_), len(self.sizes_)))
        starts = np.cumsum(self.sizes_) - self.sizes_
        for j, (start, size) in enumerate(zip(starts, self.sizes_, strict=True)):
            across[start : start + size, j] = self.weights_[start : start + size]
        rows = []
        for start, end in zip(ends - sizes, ends, strict=True):
            values = weighted_features(self.kernel_, take(points, slice(int(start), int(end))), self.points_, across)
            rows.append(weights[start:end] @ np.asarray(values))
        return np.stack(rows)

    def _second_level(self, G: np.ndarray, norms: np.ndarray) -> np.ndarray:
        if self.level == "linear":
            return G
        distances = np.maximum(norms[:, None] + self.norms_[None, :] - 2 * G, 0.0)
        return np.asarray(np.exp(-0.5 * distances / self.width_**2))  # type: ignore[operator]

    def gram(self, bags: Sequence[Any]) -> np.ndarray:
        """The kernel between the given bags (rows) and those of the fit (columns)."""
        self._check_fitted()
        found = self._bags(bags)
        points, sizes = _stacked(found), np.array([row_count(bag) for bag in found])
        weights = [self._weigh(bag) for bag in found]
        G = self._inner(points, np.concatenate(weights), sizes)
        norms = np.array([w @ self.kernel_.gram(bag) @ w for w, bag in zip(weights, found, strict=True)])
        return self._second_level(G, norms)

    def decision_function(self, bags: Sequence[Any]) -> np.ndarray:
        """The decision function of the support vector machine; for one class, positive for inliers."""
        G = self.gram(bags)
        return np.asarray(self.machine_.decision_function(G / self.unit_))

    def _stored_settings(self) -> dict[str, Any]:
        return {**super()._stored_settings(), "kernel": self.kernel_.to_config()}

    def _pack(self) -> tuple[Arrays, Facts]:
        """Bags and chosen settings; the support vector machine is solved again at loading."""
        arrays, facts = {"sizes": self.sizes_}, {"width": self.width_}
        if hasattr(self, "labels_"):
            facts |= put_labels(self.labels_, "labels")
        put_rows(arrays, facts, "points", self.points_)
        return arrays, facts

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        if self.level == "gaussian":
            self.width = facts["width"]
        points, sizes = get_rows(arrays, facts, "points"), arrays["sizes"]
        ends = np.cumsum(sizes)
        bags = [take(points, slice(int(end - size), int(end))) for end, size in zip(ends, sizes, strict=True)]
        self.fit(bags, get_labels(facts, "labels") if "labels" in facts else None)


class SupportMeasureClassifier(ClassifierMixin, _BagMachine):  # type: ignore[misc]
    """A support vector machine on kernel means: examples are bags of rows.

    Parameters
    ----------
    kernel : of the rows; a name gets the median distance between them as its length scale.
    estimator : of the mean of a bag: "kme", "b-kmse", "r-kmse" or "s-kmse".
    level : kernel between the means: "linear" or "gaussian".   width : σ of the latter; None: the median distance.
    C : cost of a misclassified bag.   positive_part, random_state : as in KernelMean.

    Bags are not rows of a table, so the calls are `fit(bags, y)` and `predict(bags)`.
    """

    _RULES: ClassVar[Mapping[str, Rule]] = {**_BagMachine._RULES, "C": positive()}

    def __init__(
        self,
        kernel: str | Kernel = "gaussian",
        estimator: str = "kme",
        level: str = "gaussian",
        width: float | None = None,
        C: float = 1.0,
        positive_part: bool = False,
        random_state: RandomState = 0,
    ) -> None:
        self.kernel = kernel
        self.estimator = estimator
        self.level = level
        self.width = width
        self.C = C
        self.positive_part = positive_part
        self.random_state = random_state

    def fit(self, bags: Sequence[Any], y: Any) -> Self:
        """Kernel means of the bags, then a support vector machine on them."""
        self._begin_fit()
        check_labels(y)
        self.labels_ = np.asarray(y)
        if len(self.labels_) != len(bags):
            raise DataError(f"{len(bags)} bags but {len(self.labels_)} labels; the numbers must be equal")
        if len(np.unique(self.labels_)) < 2:
            raise DataError("y has only one class; a classifier requires at least two")
        self.machine_ = SVC(C=self.C, kernel="precomputed").fit(self._prepare(bags), self.labels_)
        self.classes_ = self.machine_.classes_
        return self

    def predict(self, bags: Sequence[Any]) -> np.ndarray:
        """The class of every bag."""
        G = self.gram(bags)
        return np.asarray(self.machine_.predict(G / self.unit_))


class OneClassSupportMeasure(OutlierMixin, _BagMachine):  # type: ignore[misc]
    """Outliers among bags: the one-class support measure machine.

    `nu` bounds the share of outliers among the training bags; other parameters as in SupportMeasureClassifier.
    `predict` gives 1 for bags like those of the fit and -1 for outliers, by the sign of `decision_function`.
    """

    _RULES: ClassVar[Mapping[str, Rule]] = {**_BagMachine._RULES, "nu": up_to_one()}

    def __init__(
        self,
        kernel: str | Kernel = "gaussian",
        estimator: str = "kme",
        level: str = "gaussian",
        width: float | None = None,
        nu: float = 0.1,
        positive_part: bool = False,
        random_state: RandomState = 0,
    ) -> None:
        self.kernel = kernel
        self.estimator = estimator
        self.level = level
        self.width = width
        self.nu = nu
        self.positive_part = positive_part
        self.random_state = random_state

    def fit(self, bags: Sequence[Any], y: Any = None) -> Self:
        """Kernel means of the bags, then the smallest region that contains them."""
        self._begin_fit()
        self.machine_ = OneClassSVM(kernel="precomputed", nu=self.nu).fit(self._prepare(bags))
        return self

    def predict(self, bags: Sequence[Any]) -> np.ndarray:
        """1 for bags like those of the fit, -1 for outliers."""
        return np.where(self.decision_function(bags) >= 0, 1, -1)


def _stacked(bags: list[Any]) -> Any:
    return np.concatenate(bags) if isinstance(bags[0], np.ndarray) else [row for bag in bags for row in bag]
