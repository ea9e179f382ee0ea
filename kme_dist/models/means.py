"""Kernel means of samples, and a Parzen-window classifier based on them.   [KMSE]

>>> import numpy as np
>>> X = np.random.default_rng(0).normal(size=(30, 2))
>>> mean = KernelMean("r-kmse").fit(X)                     # shrunk towards 0, by leave-one-out
>>> bool(0 < mean.shrinkage_ < 1)
True
>>> mean.evaluate(X[:3]).shape
(3,)
>>> round(mean.distance(KernelMean("kme", mean.kernel_).fit(X)), 3) > 0
True

Samples are arrays, lists of objects that the kernel accepts, or data sets on disk, which are read block by block, also
when the mean is evaluated, with only a few numbers kept. With a `client` the blocks are read by the workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.sparse import issparse
from scipy.special import log_softmax, softmax
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import check_array

from kme_dist.core import kernels
from kme_dist.core.kernels import Kernel
from kme_dist.core.kernels.base import length_scale_names, median_length_scale
from kme_dist.core.means import ESTIMATORS, Mean, gram_weights, weighted_features
from kme_dist.data.dataset import open_dataset
from kme_dist.data.rows import RowsRef, Scaling, check_magnitude, rows_of, warn_of_squeezed
from kme_dist.data.validation import as_numbers
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import (
    DTYPES,
    Arrays,
    Estimator,
    Facts,
    Own,
    get_labels,
    get_rows,
    on_workers,
    put_labels,
    put_rows,
    scaling_arrays,
    stored_scaling,
)
from kme_dist.models.classifier import Classifier, classes_of
from kme_dist.models.objects import check_objects
from kme_dist.models.settings import RandomState, Rule, integer, jobs, one_of, positive, seed
from kme_dist.run.means import BLOCK_ROWS, FittedMean, fit_mean, gram_moments, mean_inner, spectrum_sample

_MEDIAN_ROWS = 2_000
_SELECTION_ROWS = 2_000  # rows used to choose a length scale


def checked_matrix(X: Any) -> Any:
    """A matrix that cannot be one of numbers (sparse, complex, without columns, of other objects than texts) is refused
    as by scikit-learn's own estimators; all else is returned as it is."""
    dense = isinstance(X, np.ndarray) and X.ndim == 2
    if issparse(X) or (dense and not any(isinstance(value, str) for value in X.ravel()[:1_000])):
        return check_array(X, dtype="numeric", ensure_all_finite=False)
    return X


def kernel_for(kernel: str | Mapping[str, Any] | Kernel, rows: RowsRef, seed: int) -> Kernel:
    """The kernel; one given by name gets the median distance between rows as its length scale."""
    rows.check_squares()
    if rows.in_memory:
        check_objects(kernel, rows.read()[0])
    if not isinstance(kernel, str):
        return kernels.from_config(kernel)
    found = kernels.from_config({"name": kernel})
    names = length_scale_names(found)
    if not names:
        return found
    width = median_length_scale(np.asarray(rows.sample(_MEDIAN_ROWS, seed)[0]), seed)
    return found.replace({name: width for name in names})


def check_finite(values: Any, kernel: Any, what: str) -> None:
    """DataError for results that are not finite, where a kernel overflows on rows that are: a test would count NaN."""
    if not np.isfinite(values).all():
        raise DataError(
            f"{what} is not finite: {kernel!r} overflows on these rows; divide the columns by a constant, or choose a "
            "kernel that is bounded, or of a larger length scale"
        )


class KernelMean(Estimator):
    """The mean of k(x, ·) over a sample, with or without shrinkage.

    Parameters
    ----------
    estimator : {"kme", "b-kmse", "r-kmse", "s-kmse"}
        The plain mean; shrunk by an estimate of its risk; by leave-one-out; or along the eigenvectors of the covariance
        with the regularisation chosen by leave-one-out ("s-kmse", n³ work, or passes over the rows with centres).
    kernel : str or Kernel
        A kernel, or a name, with the median distance between rows as length scale.
    regularization : λ of "s-kmse"; None chooses by leave-one-out.
    target : a fitted KernelMean or a `Mean` f* to shrink towards; None is 0.
    positive_part : for "b-kmse", the positive-part form of James and Stein, which shrinks more.
    sums : {"exact", "features"}
        Sums over all pairs of rows by tiles, O(n²), or estimated with random features, O(n · features); the standard
        error of the estimate is `rho_error_`.
    features : number of random frequencies.
    centres : of "s-kmse": number of rows to project on; None: exact up to 5,000 rows, else 1,000 centres.
    dtype : precision of the tiles.   client : a distributed.Client.   random_state, n_jobs : as in MCEClassifier.

    Attributes
    ----------
    weights_ : one weight per row (a single number for a data set on disk, whose rows have equal weights), or per centre
    shrinkage_ : α, the weight that f* gets.   rho_, varrho_ : means of all K_ij and of K_ii (not for "kme" or with
        centres).   regularization_ : λ of "s-kmse".   kernel_ : the kernel.
    unexplained_, error_bound_ : the share of the kernel not explained by the centres, and a bound on the distance to
        the mean without centres at the same λ, in the kernel's Hilbert space; 0 without centres.
    """

    _FITTED: ClassVar[str] = "fitted_"
    _IN_FACTS: ClassVar[tuple[str, ...]] = ("estimator", "kernel", "regularization", "dtype")
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "estimator": one_of(*ESTIMATORS),
        "sums": one_of("exact", "features"),
        "regularization": positive(optional=True),
        "features": integer(1),
        "centres": integer(1, optional=True),
        "dtype": one_of(*DTYPES),
        "random_state": seed(),
        "n_jobs": jobs(),
    }

    def __init__(
        self,
        estimator: str = "kme",
        kernel: str | Kernel = "gaussian",
        regularization: float | None = None,
        target: Any = None,
        positive_part: bool = False,
        sums: str = "exact",
        features: int = 2000,
        centres: int | None = None,
        dtype: str = "float64",
        client: Any = None,
        random_state: RandomState = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.estimator = estimator
        self.kernel = kernel
        self.regularization = regularization
        self.target = target
        self.positive_part = positive_part
        self.sums = sums
        self.features = features
        self.centres = centres
        self.dtype = dtype
        self.client = client
        self.random_state = random_state
        self.n_jobs = n_jobs

    @on_workers
    def fit(self, X: Any, y: Any = None) -> Self:
        """Estimate the mean from the rows of an array, a list, or a data set (its "train" split if it has one)."""
        self._begin_fit()
        sample = rows_of(checked_matrix(X), self.dtype)
        self._record_columns(X, sample.read()[0] if sample.in_memory else None)
        self._record_data(sample)
        kernel = kernel_for(self.kernel, sample, self._seed())
        target = self.target.mean_ if isinstance(self.target, KernelMean) else self.target
        frequencies = None
        if self.sums == "features":
            width = np.asarray(sample.sample(1, 0)[0]).shape[-1]
            frequencies = spectrum_sample(kernel, width, self.features, self._seed())
        found = fit_mean(
            kernel,
            sample,
            self.estimator,
            executor=self._executor(),
            regularization=self.regularization,
            positive_part=self.positive_part,
            target=target,
            frequencies=frequencies,
            centres=self.centres,
            seed=self._seed(),
        )
        check_finite(found.weights, kernel, "a weight of the mean")
        self._keep(found)
        return self

    def _check_together(self) -> None:
        if self.centres is not None and self.estimator != "s-kmse":
            raise ConfigError(f"centres={self.centres!r} requires estimator='s-kmse', not {self.estimator!r}")

    def _keep(self, fitted: FittedMean) -> None:
        self.fitted_ = fitted
        self.kernel_ = fitted.kernel
        self.shrinkage_ = fitted.alpha
        self.regularization_ = fitted.regularization
        self.unexplained_, self.error_bound_ = fitted.unexplained, fitted.error_bound
        on_disk = not fitted.rows.in_memory
        self.weights_ = fitted.weights if on_disk else np.broadcast_to(fitted.weights, (fitted.rows.count,)).copy()
        if fitted.moments is not None:
            self.rho_, self.varrho_ = fitted.moments.rho, fitted.moments.varrho
            self.rho_error_ = fitted.moments.error

    @property
    def mean_(self) -> Mean:
        """Points and weights as one record (reads a data set into memory)."""
        self._check_fitted()
        return self.fitted_.in_memory()

    def evaluate(self, X: Any) -> np.ndarray:
        """μ(x) at every row of X."""
        self._check_fitted()
        rows, _ = rows_of(X, self.dtype).read()
        self._check_columns(X, rows)
        if not self.fitted_.rows.source.features:
            check_objects(self.kernel_, rows, like=self.fitted_.rows.read(0, 1)[0])
        check_magnitude(rows, self.dtype, scaled=False)
        values = self.fitted_.evaluate(rows, executor=self._executor())
        check_finite(values, self.kernel_, "the mean at a row")
        return values

    def inner(self, other: KernelMean) -> float:
        """<μ, ν>; both means must have the same kernel."""
        found = self._inner(other)
        check_finite(found, self.kernel_, "the inner product of the means")
        return found

    def _inner(self, other: KernelMean) -> float:
        _check_mean(other)
        self._check_fitted()
        other._check_fitted()
        a, b = self.fitted_, other.fitted_
        widths = [getattr(mean, "n_features_in_", None) for mean in (self, other)]
        if widths[0] != widths[1]:
            raise DataError(
                f"one mean has {widths[0]} features, the other {widths[1]}; they must have the same columns"
            )
        if a.kernel != b.kernel:
            raise ConfigError(f"means of different kernels cannot be compared: {a.kernel!r} and {b.kernel!r}")
        plain = all(np.ndim(f.weights) == 0 and (f.target is None or not f.alpha) for f in (a, b))
        if not plain:
            return self.mean_.inner(other.mean_)
        executor = self._executor()
        scale = a.rows.count * float(a.weights) * b.rows.count * float(b.weights)
        if a is b:
            return scale * (a.moments or gram_moments(a.kernel, a.rows, executor=executor)).rho
        return scale * mean_inner(a.kernel, a.rows, b.rows, executor=executor)

    def norm(self) -> float:
        """|μ| in the kernel's Hilbert space."""
        return math.sqrt(max(self.inner(self), 0.0))

    def distance(self, other: KernelMean) -> float:
        """|μ - ν| in the kernel's Hilbert space: the maximum mean discrepancy."""
        _check_mean(other)
        return math.sqrt(max(self.inner(self) - 2 * self.inner(other) + other.inner(other), 0.0))

    def expectation(self, f: Callable[[Any], Any]) -> Any:
        """Σ β_i f(x_i): the expectation of f under the estimate. `f` takes rows and returns a value (or row) for each.

        Exact for functions of the kernel's Hilbert space; for others it is the weighted average of the sample, and
        the weights of shrunk means do not add up to one.
        """
        self._check_fitted()
        if not callable(f):
            raise DataError(f"f must be a function of rows, got {str(f)[:60]!r}")
        fitted, at = self.fitted_, 0
        total: Any = 0.0
        for block in fitted.rows.parts(BLOCK_ROWS):
            own = fitted.weights if np.ndim(fitted.weights) == 0 else fitted.weights[at : at + len(block)]  # type: ignore[index]
            values = as_numbers(f(block.read()[0]), "the values of f")
            if values.shape[:1] != (len(block),):
                raise DataError(f"f must return one value for each of {len(block)} rows, got shape {values.shape}")
            total = total + np.broadcast_to(own, (len(block),)) @ values
            at += len(block)
        if fitted.target is not None and fitted.alpha:
            total = total + fitted.alpha * np.asarray(fitted.target.weights) @ np.asarray(f(fitted.target.points))
        return total

    # --- storing ---------------------------------------------------------------------------------

    def _pack(self) -> tuple[Arrays, Facts]:
        """A mean of a data set stores only its address, and requires the data set at loading."""
        fitted = self.fitted_
        arrays: Arrays = {"weights": np.asarray(fitted.weights)}
        facts: Facts = {
            "estimator": self.estimator,
            "dtype": self.dtype,
            "kernel": fitted.kernel.to_config(),
            "shrinkage": fitted.alpha,
            "regularization": fitted.regularization,
            "unexplained": fitted.unexplained,
            "error_bound": fitted.error_bound,
        }
        if fitted.rows.in_memory:
            put_rows(arrays, facts, "points", fitted.rows.read()[0])
        else:
            facts |= {"dataset": fitted.rows.path, "ranges": [list(part) for part in fitted.rows.ranges]}
        if fitted.target is not None and fitted.alpha:
            put_rows(arrays, facts, "target_points", fitted.target.points)
            arrays["target_weights"] = np.asarray(fitted.target.weights)
        return arrays, facts

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.estimator, self.dtype, self.regularization = (
            facts[name] for name in ("estimator", "dtype", "regularization")
        )
        self.kernel = kernel = kernels.from_config(facts["kernel"], own=own)
        if "dataset" in facts:
            data = open_dataset(facts["dataset"])
            ranges = tuple((int(start), int(stop)) for start, stop in facts["ranges"])
            rows = RowsRef("saved", data, ranges, dtype=self.dtype)
            self.n_features_in_ = data.features
        else:
            rows = rows_of(get_rows(arrays, facts, "points"), self.dtype)
            if rows.source.features:
                self.n_features_in_ = rows.source.features
        target = None
        if "target_weights" in arrays:
            target = Mean(kernel, get_rows(arrays, facts, "target_points"), arrays["target_weights"])
        weights: np.ndarray | float = arrays["weights"] if arrays["weights"].ndim else float(arrays["weights"])
        errors = float(facts.get("unexplained", 0.0)), float(facts.get("error_bound", 0.0))
        alpha, lam = float(facts["shrinkage"]), self.regularization
        self._keep(FittedMean(kernel, rows, weights, alpha, target, None, lam, *errors))


def _check_mean(other: Any) -> None:
    if not isinstance(other, KernelMean):
        raise DataError(
            f"other must be a fitted KernelMean, got a {type(other).__name__}; fit one to the rows with the same "
            "kernel: KernelMean(kernel=mean.kernel_).fit(X)"
        )


class ParzenClassifier(Classifier):
    """The class whose kernel mean is nearest: a Parzen-window classifier on any of the four estimators.

    With f_c(x) = <μ_c, k(x, ·)> - |μ_c|²/2 class a is preferred to class b where f_a(x) > f_b(x), which is the sign
    of <μ_a - μ_b, k(x, ·)> + (|μ_b|² - |μ_a|²)/2. Pairs are coupled into probabilities: with one slope s for all,
    P(a | a or b, x) = 1/(1 + exp(-s (f_a - f_b))) couples exactly to softmax(s f), and the majority of the pairwise
    votes is its arg max. s is fitted to held-out training rows.

    Parameters
    ----------
    estimator : {"kme", "b-kmse", "r-kmse", "s-kmse"}; see KernelMean.
    kernel : a kernel, or a name whose length scale is chosen by cross-validation.
    length_scales : the length scales to choose from (only for a kernel given by name); None: 20 values up to twice the
        median distance between rows.
    folds : of that cross-validation.
    scaling : {"standard", "unit", None}, learned from the training rows.
    positive_part, random_state : as in KernelMean.
    """

    _FITTED: ClassVar[str] = "weights_"
    _IN_FACTS: ClassVar[tuple[str, ...]] = ("estimator", "kernel", "length_scales", "scaling")
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "estimator": one_of(*ESTIMATORS),
        "folds": integer(1),
        "random_state": seed(),
    }

    def __init__(
        self,
        estimator: str = "kme",
        kernel: str | Kernel = "gaussian",
        length_scales: Sequence[float] | None = None,
        folds: int = 5,
        scaling: str | None = "standard",
        positive_part: bool = False,
        random_state: RandomState = 0,
    ) -> None:
        self.estimator = estimator
        self.kernel = kernel
        self.length_scales = length_scales
        self.folds = folds
        self.scaling = scaling
        self.positive_part = positive_part
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose length scale and slope by cross-validation, then compute the means of all rows."""
        self._begin_fit()
        X, y = self._fit_rows(X, y)
        self.classes_, codes = classes_of(y)
        self.scaling_ = Scaling.learn(X, self.scaling)
        warn_of_squeezed(rows_of(X), self.scaling_, self._seed())
        rows = self.scaling_.apply(X, "float64")
        candidates = self._candidates(rows)
        some, labels = self._selection_rows(rows, codes)
        splits = self._splits(labels)
        held_out = [self._held_out(kernel, some, labels, splits) for kernel in candidates]
        errors = [int(np.sum(scores.argmax(axis=1) != labels)) for scores in held_out]
        best = int(np.argmin(errors))
        self.kernel_, self.cv_errors_ = candidates[best], np.asarray(errors) / len(labels)
        self.slope_ = _fit_slope(held_out[best], labels)
        self.points_ = rows
        self.weights_, self.halves_ = self._means(self.kernel_, rows, codes)
        return self

    def _candidates(self, rows: np.ndarray) -> list[Kernel]:
        if not isinstance(self.kernel, str):
            if self.length_scales is not None:
                raise ConfigError("length_scales require a kernel given by name; remove one of them")
            return [kernels.from_config(self.kernel)]
        kernel = kernels.from_config({"name": self.kernel})
        names = length_scale_names(kernel)
        if not names:
            return [kernel]
        if self.length_scales is None:
            scales = median_length_scale(rows, self._seed()) * np.linspace(0.1, 2.0, 20)
        else:
            scales = np.asarray(self.length_scales, dtype=np.float64)
        return [kernel.replace({name: float(scale) for name in names}) for scale in scales]

    def _selection_rows(self, rows: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(rows) <= _SELECTION_ROWS:
            return rows, codes
        chosen = np.random.default_rng(self._seed()).choice(len(rows), _SELECTION_ROWS, replace=False)
        return rows[chosen], codes[chosen]

    def _splits(self, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        counts = np.bincount(labels, minlength=len(self.classes_))
        folds = int(min(self.folds, counts.min()))
        # Shrinkage requires two training rows of every class in every fold.
        if folds < 2 or (self.estimator != "kme" and counts.min() - -(-counts.min() // folds) < 2):
            every = np.arange(len(labels))
            return [(every, every)]
        shuffled = StratifiedKFold(folds, shuffle=True, random_state=self._seed())
        return list(shuffled.split(np.zeros(len(labels)), labels))

    def _held_out(
        self, kernel: Kernel, rows: np.ndarray, labels: np.ndarray, splits: list[tuple[np.ndarray, np.ndarray]]
    ) -> np.ndarray:
        """f_c of every row under the means of the folds without it."""
        K = kernel.gram(rows)
        scores = np.zeros((len(rows), len(self.classes_)))
        for train, test in splits:
            weights, halves = self._weigh(K[np.ix_(train, train)], labels[train])
            scores[test] = K[np.ix_(test, train)] @ weights - halves
        return scores

    def _means(self, kernel: Kernel, rows: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights (n, m) and |μ_c|²/2, one class at a time: the largest Gram matrix is that of the largest class."""
        weights, halves = np.zeros((len(rows), len(self.classes_))), np.zeros(len(self.classes_))
        for c in range(len(self.classes_)):
            own = np.flatnonzero(codes == c)
            weights[own, c], halves[c] = self._one(kernel.gram(rows[own]))
        return weights, halves

    def _weigh(self, K: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights, halves = np.zeros((len(K), len(self.classes_))), np.zeros(len(self.classes_))
        for c in range(len(self.classes_)):
            own = np.flatnonzero(labels == c)
            if len(own):
                weights[own, c], halves[c] = self._one(K[np.ix_(own, own)])
        return weights, halves

    def _one(self, K: np.ndarray) -> tuple[np.ndarray, float]:
        """Weights and |μ|²/2 of one class; a single row is not shrunk, since its shrinkage cannot be estimated."""
        estimator = self.estimator if len(K) > 1 else "kme"
        weights = np.asarray(gram_weights(estimator, K, positive_part=self.positive_part).weights)
        return weights, 0.5 * float(weights @ K @ weights)

    def class_scores(self, X: Any) -> np.ndarray:
        """f_c(x), one column per class: the largest is the nearest mean, and the majority of the pairwise votes."""
        rows = self._query_rows(X)
        found: np.ndarray = weighted_features(self.kernel_, rows, self.points_, self.weights_) - self.halves_
        return found

    def _decide(self, X: Any) -> np.ndarray:
        return self.class_scores(X)

    def probabilities(self, P: np.ndarray) -> np.ndarray:
        """Coupled pairwise probabilities from the scores of the classes."""
        return np.asarray(softmax(P * self.slope_, axis=1))

    def decision_function(self, X: Any) -> np.ndarray:
        """s f_c(x); with two classes the difference of the second and the first, the log odds."""
        scores: np.ndarray = self.class_scores(X) * self.slope_
        return np.asarray(scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores)

    def _pack(self) -> tuple[Arrays, Facts]:
        means = {"points": self.points_, "weights": self.weights_, "halves": self.halves_}
        return {**means, **scaling_arrays(self.scaling_, at="")}, {
            "estimator": self.estimator,
            "scaling": self.scaling,
            "kernel": self.kernel_.to_config(),
            "slope": self.slope_,
            **put_labels(self.classes_),
        }

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.estimator, self.scaling = facts["estimator"], facts["scaling"]
        self.kernel = self.kernel_ = kernels.from_config(facts["kernel"], own=own)
        self.slope_, self.classes_ = float(facts["slope"]), get_labels(facts)
        self.points_, self.weights_, self.halves_ = (arrays[name] for name in ("points", "weights", "halves"))
        self.scaling_, self.n_features_in_ = stored_scaling(arrays, at=""), int(self.points_.shape[1])


def _fit_slope(scores: np.ndarray, labels: np.ndarray) -> float:
    """s that minimises the log loss of the held-out rows under softmax(s f)."""
    spread = float(np.std(scores[:, :1] - scores)) or 1.0

    def loss(log_slope: float) -> float:
        logits = log_softmax(math.exp(log_slope) / spread * scores, axis=1)
        return -float(logits[np.arange(len(labels)), labels].mean())

    found = minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded")
    return math.exp(float(found.x)) / spread
