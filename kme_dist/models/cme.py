"""Conditional mean embeddings: the distribution of anything with a kernel, given anything with a kernel.   [CME]

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x = rng.uniform(-3, 3, size=(200, 1))
>>> y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=200)
>>> model = ConditionalMeanEmbedding().fit(x, y)             # kernel and λ by leave-one-out, in closed form
>>> mean = model.expectation(np.array([[1.0]]), lambda y: y)
>>> bool(abs(mean[0] - np.sin(1.0)) < 0.1)
True
>>> low, high = model.interval(np.array([[1.0]]), coverage=0.9)
>>> bool(low[0] < np.sin(1.0) < high[0])
True

Targets are vectors, labels (`target_kernel="delta"`, equal to the multiclass conditional embedding), strings, or any
objects that the target kernel accepts. Exact solvers keep the weights implicit: E[h(Y) | x] is solved on demand. A data
set on disk is fitted in place, by centres or features in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from kme_dist.backend import blas_threads, free_bytes
from kme_dist.core.conditional import (
    ConditionalEmbedding,
    Delta,
    Explicit,
    Weights,
    conditional_quantiles,
    drawn_targets,
    herd,
    solve_embedding,
)
from kme_dist.core.features import SAMPLERS
from kme_dist.core.intervals import LeftOut
from kme_dist.core.kernels import Kernel
from kme_dist.core.kernels.base import FeatureMap, row_blocks, row_count, select, take
from kme_dist.core.pivots import choose_centres
from kme_dist.core.sums import Basis, Centres, FeatureBasis
from kme_dist.data.dataset import Dataset
from kme_dist.data.rows import Scaling, check_magnitude, rows_of, warn_of_squeezed
from kme_dist.data.validation import as_numbers, check_matrix, check_not_path
from kme_dist.errors import ConfigError, DataError, warn
from kme_dist.models.base import Arrays, Estimator, Facts, Own, on_workers, scaling_arrays, stored_scaling
from kme_dist.models.cme_choice import Score, input_kernels, score_kernels, target_kernel
from kme_dist.models.cme_forms import SparseForm, dense_weights, pack, sparse_forms, unpack
from kme_dist.models.objects import check_objects, targets_of
from kme_dist.models.settings import RandomState, Rule, drawn_seed, fraction, integer, jobs, one_of, positive, seed
from kme_dist.run.conditional import (
    ConditionalLearner,
    Inverse,
    Pairs,
    are_numbers,
    as_targets,
    fit_sums,
    learn_kernel,
    left_out,
    project,
)
from kme_dist.run.fit import SOLVERS, Room, Size, choose
from kme_dist.run.maps import as_features
from kme_dist.run.means import random_features
from kme_dist.run.scratch import Scratch

_SELECTION_ROWS = 1_200  # pairs used to choose kernel and λ
_CENTRES, _TARGET_CENTRES, _FEATURES = 1_000, 500, 1_000
_CHOICE_ROWS, _QUERY_ROWS = 20_000, 1_024  # rows to choose centres from, and to compute quantiles of at a time


class ConditionalMeanEmbedding(Estimator):
    """μ(x) = E[L(Y, ·) | x], estimated by regression in the target kernel's Hilbert space.

    Parameters
    ----------
    kernel : of the inputs: a name (length scale by cross-validation), a kernel, or a list of kernels to choose from.
    target_kernel : of the targets: a name (length scale is the median distance), "delta" for labels, or a kernel.
    regularization : λ, or None to choose it by cross-validation.
    folds : number of folds; None: leave-one-out. In closed form either way.
    learn_steps : number of gradient steps of the held-out loss that learn the input kernel and λ (0: none).
        The loss is |L(y, ·) - μ(x)|² over held-out pairs plus `complexity_weight` times the Hilbert-Schmidt norm of the
        embedding: for arbitrary targets a heuristic counterpart of the complexity bound for classes (no generalisation
        bound is known). The target kernel is never learned, since the loss is measured in it.
    complexity_weight, learning_rate : of that learning.
    solver : "cholesky" (exact, n x n in memory), "tiled" and "pcg" (exact, out of core), "nystrom" (centres) and
        "features" (explicit features; one pass over the rows for either), or "auto".
    features : for solver "features": a feature map, or the number of random frequencies of the kernel.
    tolerance : for solver "pcg": relative residual.
    centres, centre_choice : their number, and "rpcholesky", "uniform" or "kmeans++".
    target_centres : number of targets to project on, so that the model's size does not grow with the rows; None keeps
        all targets, if they are in memory.
    scaling : {"standard", "unit", None} of numeric inputs.
    client : a distributed.Client.   random_state, n_jobs : as in MCEClassifier.

    Attributes
    ----------
    embedding_ : kernel, centres, targets and weights.   kernel_, target_kernel_, regularization_ : what was chosen.
    solver_, solver_reason_ : the solver, and the reason for it.
    scores_ : (kernel, λ, held-out error) of every candidate, on a sample.   history_ : one record per learning step.
    retuned_ : error of each λ that "pcg", "nystrom" and "features" tried on all rows, after choosing the kernel.
    n_features_in_, feature_names_in_ : of numeric inputs; names if a data frame or data set has them.
    """

    _RULES: ClassVar[Mapping[str, Rule]] = {
        "solver": one_of("auto", *SOLVERS),
        "tolerance": positive(),
        "regularization": positive(optional=True),
        "learn_steps": integer(0),
        "centres": integer(1, optional=True),
        "target_centres": integer(1, optional=True),
        "folds": integer(2, optional=True),
        "random_state": seed(),
        "n_jobs": jobs(),
    }
    _IN_FACTS: ClassVar[tuple[str, ...]] = ("kernel", "target_kernel", "regularization", "solver", "scaling")
    _left: LeftOut | None = None

    def __init__(
        self,
        kernel: Any = "gaussian",
        target_kernel: Any = "gaussian",
        regularization: float | None = None,
        folds: int | None = None,
        learn_steps: int = 0,
        complexity_weight: float = 0.1,
        learning_rate: float = 0.1,
        solver: str = "auto",
        centres: int | None = None,
        centre_choice: str = "rpcholesky",
        target_centres: int | None = None,
        features: Any = None,
        tolerance: float = 1e-8,
        scaling: str | None = "standard",
        client: Any = None,
        random_state: RandomState = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.target_kernel = target_kernel
        self.regularization = regularization
        self.folds = folds
        self.learn_steps = learn_steps
        self.complexity_weight = complexity_weight
        self.learning_rate = learning_rate
        self.solver = solver
        self.centres = centres
        self.centre_choice = centre_choice
        self.target_centres = target_centres
        self.features = features
        self.tolerance = tolerance
        self.scaling = scaling
        self.client = client
        self.random_state = random_state
        self.n_jobs = n_jobs

    # --- fitting ---------------------------------------------------------------------------------

    @on_workers
    def fit(self, X: Any, Y: Any = None) -> Self:
        """Fit to pairs of rows, or to a data set whose labels (or columns, named by Y) are the targets."""
        self._begin_fit()
        with blas_threads(1):  # the same bits on any number of cores
            return self._fit(self._pairs(X, Y))

    def _fit(self, pairs: Pairs) -> Self:
        self._left = None
        self._record_data(pairs.inputs)
        some_X, some_Y = pairs.sample(_SELECTION_ROWS, self._seed())
        self.target_kernel_ = target_kernel(self.target_kernel, some_Y, self._seed())
        some_Y = as_targets(some_Y, self.target_kernel_)
        kernel, lam = self._choose(some_X, some_Y, pairs.count)
        self.history_: list[dict[str, Any]] = []
        if self.learn_steps:
            learner = ConditionalLearner(
                kernel, self.target_kernel_, complexity_weight=self.complexity_weight, seed=self._seed()
            )
            kernel, lam, self.history_ = learn_kernel(
                learner, some_X, some_Y, lam, steps=self.learn_steps, learning_rate=self.learning_rate
            )
            if self.regularization is None:  # λ learned on batches does not suit all rows
                kernel, lam = self._choose(some_X, some_Y, pairs.count, [kernel])
            else:
                lam = float(self.regularization)
        self.kernel_, self.regularization_ = kernel, lam
        features = self._feature_map(some_X, kernel)
        self.solver_, self.solver_reason_ = self._choose_solver(pairs, features)
        every = self.solver_ == "nystrom" and (self.centres or _CENTRES) >= pairs.count  # a centre: the exact solve
        self.retuned_ = {at: error for chosen, at, error in self.scores_ if every and chosen is kernel}
        sums = self.solver_ in ("nystrom", "features") and not every
        self.embedding_ = self._fit_sums(pairs, features) if sums else self._fit_exact(pairs)
        return self

    def _check_together(self) -> None:
        if self.solver == "falkon":
            raise ConfigError(
                "solver='falkon' is for class labels and numbers (MCEClassifier, CMERegressor); choose 'nystrom' with "
                "`centres` here, or 'pcg', which is exact"
            )
        if self.features is not None and self.solver not in ("auto", "features"):
            raise ConfigError(f"features require solver='features', not {self.solver!r}; remove one of them")

    def _pairs(self, X: Any, Y: Any) -> Pairs:
        if isinstance(X, Dataset):
            pairs = Pairs.of(X, Y, self.scaling)
            self.scaling_ = pairs.inputs.scale
            self._record_names([X.feature_names[i] for i in pairs.inputs.columns])
            return pairs
        check_not_path(X)
        check_matrix(X, type(self).__name__)
        (rows, _), targets = rows_of(X).read(), targets_of(self.target_kernel, Y)
        if self.features is None:
            for kernel in self.kernel if isinstance(self.kernel, list | tuple) else [self.kernel]:
                check_objects(kernel, rows, labels=True)
        if row_count(targets) != row_count(rows):
            raise DataError(f"{row_count(rows)} inputs but {row_count(targets)} targets; the numbers must be equal")
        self._record_columns(X, rows)
        self.scaling_ = Scaling.learn(rows, self.scaling) if isinstance(rows, np.ndarray) else None
        if self.scaling_ is not None:
            warn_of_squeezed(rows_of(X), self.scaling_, self._seed())
        return Pairs.in_tables(self._scaled(rows), targets)

    def _scaled(self, rows: Any) -> Any:
        return rows if self.scaling_ is None else self.scaling_.apply(rows, "float64")

    def _query_rows(self, X: Any) -> Any:
        """Inputs to predict, with the columns and scaling of the fit."""
        self._check_fitted()
        check_matrix(X, type(self).__name__)
        rows, _ = rows_of(X).read()
        self._check_columns(X, rows)
        if self.embedding_.centres is not None:
            check_objects(self.kernel_, rows, like=self.embedding_.centres)
        check_magnitude(scaled := self._scaled(rows))
        return scaled

    def _query_targets(self, Y: Any, name: str = "targets") -> Any:
        """Targets to evaluate, checked against those of the fit."""
        found, own = as_targets(targets_of(self.target_kernel, Y, name), self.target_kernel_), self.embedding_.targets
        shapes = [getattr(part, "shape", ()) for part in (found, own)]
        if shapes[0][1:] != shapes[1][1:]:
            raise DataError(f"targets have shape {shapes[0]}, those of the fit {shapes[1]}; the widths must be equal")
        return found

    def _choose(self, X: Any, Y: Any, rows: int, candidates: Sequence[Kernel] | None = None) -> tuple[Kernel, float]:
        """The kernel and λ with the least held-out error of (at most) _SELECTION_ROWS pairs, at the same shift nλ."""
        if candidates is None:
            candidates = input_kernels(self.kernel, self.features, X, self._seed())
        self.scores_: list[Score] = []
        if len(candidates) == 1 and self.regularization is not None:
            return candidates[0], float(self.regularization)
        self.scores_ = score_kernels(
            candidates, self.target_kernel_, X, Y,
            rows=rows, regularization=self.regularization, folds=self.folds, seed=self._seed(),
        )  # fmt: skip
        kernel, lam, _ = min(self.scores_, key=lambda found: found[2])
        return kernel, lam

    def _choose_solver(self, pairs: Pairs, features: FeatureMap | None) -> tuple[str, str]:
        room = Room.of(self._executor(), Scratch())
        centres = self.centres or self.target_centres
        found = choose(self.solver, Size(pairs.count, dtype="float64", labelled=False), centres, features, room)
        if self.solver == "auto" and found.solver == "tiled" and not pairs.inputs.source.features:
            return "nystrom", "non-numeric inputs cannot be stored in tiles"
        return found.solver, found.reason

    def _feature_map(self, X: Any, kernel: Kernel) -> FeatureMap | None:
        """The given map, or random Fourier features of the kernel if features are requested."""
        if self.solver != "features" and self.features is None:
            return None
        if self.features is not None and not isinstance(self.features, int | np.integer):
            return as_features(self.features, np.shape(X)[1], self._seed())  # type: ignore[no-any-return]
        if kernel.name not in SAMPLERS:
            raise ConfigError(
                f"{kernel!r} has no random features; choose one of {', '.join(SAMPLERS)}, set `features` to a feature "
                "map, or use another solver"
            )
        return random_features(kernel, np.shape(X)[1], int(self.features or _FEATURES), self._seed())

    def _fit_exact(self, pairs: Pairs) -> ConditionalEmbedding:
        """By one factorisation here, or by tiles or conjugate gradients over the stored rows."""
        X, Y = pairs.read()
        Y = as_targets(Y, self.target_kernel_)
        labels = isinstance(self.target_kernel_, Delta)
        weights: Weights
        if self.solver_ in ("cholesky", "nystrom"):
            found = solve_embedding(self.kernel_, self.target_kernel_, X, Y, self.regularization_)
            if self.target_centres is None or labels:
                return found
            weights = found.weights
        else:
            weights = self._inverse(pairs)
            if self.solver_ == "pcg" and self.regularization is None:
                D = self._target_centres(pairs)
                self.retuned_ = weights.retune(self.target_kernel_, Y, D)
                self.regularization_ = weights.regularization
            if self.target_centres is None and not labels:
                weights.prepare()
                return ConditionalEmbedding(
                    self.kernel_, self.target_kernel_, X, Y, weights, self.regularization_
                )  # fmt: skip
        D = self._target_centres(pairs)
        small, base = project(weights, self.target_kernel_, Y, D)
        projected = ConditionalEmbedding(
            self.kernel_, self.target_kernel_, X, D, small, self.regularization_, None, base
        )  # fmt: skip
        if are_numbers(Y, self.target_kernel_):
            self._left = left_out(projected, weights, Y, self._seed())
        return projected

    def _inverse(self, pairs: Pairs) -> Inverse:
        if self._client is not None and pairs.in_memory:
            hosts = {worker["host"] for worker in self._client.scheduler_info(n_workers=-1)["workers"].values()}
            if not hosts <= {"127.0.0.1", "::1", "localhost"}:
                raise DataError(
                    f"rows in memory cannot be read by workers at {', '.join(sorted(hosts))}; store them where all can "
                    "read them (kme_dist.ingest((X, y), path)) and pass fit(kme_dist.open_dataset(path))"
                )
        return Inverse(
            pairs, self.kernel_, self.regularization_, self.solver_, executor=self._executor(),
            tolerance=self.tolerance, seed=self._seed(),
        )  # fmt: skip

    def _target_centres(self, pairs: Pairs) -> Any:
        labels = isinstance(self.target_kernel_, Delta)
        if labels and pairs.targets is not None and pairs.in_memory:
            return np.unique(pairs.targets.read()[0])
        if labels and pairs.targets is None and (classes := pairs.inputs.source.classes) is not None:
            return np.asarray(classes)  # a sample may miss a rare class
        Y = as_targets(pairs.sample(_CHOICE_ROWS, self._seed())[1], self.target_kernel_)
        if labels:
            return np.unique(Y)
        count = min(self.target_centres or _TARGET_CENTRES, row_count(Y))
        return select(Y, choose_centres(self.target_kernel_, Y, count, "rpcholesky", self._seed()))

    def _fit_sums(self, pairs: Pairs, features: FeatureMap | None) -> ConditionalEmbedding:
        """Centres or features of the inputs; targets projected, or all kept if requested and in memory."""
        X, _ = pairs.sample(_CHOICE_ROWS, self._seed())
        basis: Basis
        if features is not None:
            basis = FeatureBasis(features, int(features.forward(X[:1]).shape[1]))
        else:
            count = min(self.centres or _CENTRES, row_count(X))
            chosen = choose_centres(self.kernel_, X, count, self.centre_choice, self._seed())
            basis = Centres(self.kernel_, select(X, chosen))
        keep = self.target_centres is None and pairs.in_memory and not isinstance(self.target_kernel_, Delta)
        needed = 3 * 8 * pairs.count * basis.size
        if keep and needed > free_bytes("numpy"):
            raise ConfigError(
                f"keeping all {pairs.count} targets needs {needed / 1e9:.1f} GB; set target_centres, e.g. 500"
            )
        own = features is not None and not isinstance(self.features, int | np.integer | None)
        variance = 1.0 if features is None or own else float(self.kernel_.scale) ** 2  # type: ignore[attr-defined]
        found, self.retuned_, self._left = fit_sums(
            self.kernel_, self.target_kernel_, pairs, self.regularization_, basis, self._target_centres(pairs),
            executor=self._executor(), keep_targets=keep, retune=self.regularization is None,
            seed=self._seed(), variance=variance,
        )  # fmt: skip
        self.regularization_ = found.regularization
        return found

    # --- predicting ------------------------------------------------------------------------------

    def coefficients(self, X: Any) -> np.ndarray:
        """a(x), one row for each row of X and one column for each target of the model."""
        model, rows = self._fitted(), self._query_rows(X)
        with blas_threads(1):
            return np.asarray(model.coefficients(rows)).T

    def expectation(self, X: Any, h: Callable[[Any], Any] | Any, centred: bool | None = None) -> np.ndarray:
        """E[h(Y) | x]: `h` maps the targets to a value (or row of values) each, or is an array of those values.

        The weights a(x) do not add up to one (λ shrinks them towards 0, and far from all rows they are 0), so h is
        centred by its mean h̄ over the training rows: h̄ + Σ_i a_i(x) (h(y_i) - h̄), which shrinks towards h̄. With
        `centred=False` it is Σ_i a_i(x) h(y_i), the inner product of h and μ(x). None centres for all targets except
        labels (`target_kernel="delta"`), where the plain sum is that of the decision probabilities of the multiclass
        embedding. With target centres h̄ is the mean of h projected on them, exact for E[Y | x] itself.
        """
        model, rows = self._fitted(), self._query_rows(X)
        targets = model.targets
        if isinstance(targets, np.ndarray) and targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]  # scalar targets, as given
        values = np.ascontiguousarray(as_numbers(h(targets) if callable(h) else h, "the values of h"))
        if centred is None:
            centred = not isinstance(self.target_kernel_, Delta)
        with blas_threads(1):
            return np.asarray((model.centred_expectation if centred else model.expectation)(rows, values))

    def predict(self, X: Any) -> np.ndarray:
        """E[Y | x] of numeric targets; far from all training rows it is their mean."""
        targets = self._fitted().targets
        if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "biuf":
            raise DataError(
                "the targets are not numeric and have no mean; use expectation(X, h) with a numeric function h"
            )
        return self.expectation(X, lambda y: y)

    def evaluate(self, X: Any, Y: Any) -> np.ndarray:
        """μ(x)(y) for every row of X (rows) and every target of Y (columns)."""
        model, rows = self._fitted(), self._query_rows(X)
        with blas_threads(1):
            return np.asarray(model.evaluate(rows, self._query_targets(Y)))

    def quantiles(self, X: Any, levels: Sequence[float]) -> np.ndarray:
        """Conditional quantiles of scalar targets, one row for each row of X.

        They are quantiles of the leave-one-out residuals of the training rows around the prediction at x, weighted
        towards rows near x (see `kme_dist.core.intervals`). For labels (`target_kernel="delta"`) they are the quantiles
        of the labels under the weights a(x), with negative weights set to 0.
        """
        targets = self._fitted().targets
        if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "biuf" or targets.size != len(targets):
            raise DataError("quantiles require scalar targets; use expectation(X, h) for others")
        wanted = as_numbers(levels, "levels").reshape(-1)
        if not ((wanted >= 0) & (wanted <= 1)).all():
            raise ConfigError(f"levels={levels!r}: must be numbers from 0 to 1")
        if isinstance(self.target_kernel_, Delta):
            return conditional_quantiles(targets.reshape(-1), self.coefficients(X).T, wanted)
        return np.concatenate([left.quantiles(f[:, 0], Z, wanted) for left, f, Z in self._around(X)])

    def interval(self, X: Any, coverage: float = 0.9, local: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of a prediction interval at every row of X, for every output, by jackknife+.

        It covers a new target with about this probability (without `local` with at least 2 coverage - 1, whatever the
        distribution). With `local` the width follows the size of the residuals near x, without it is nearly constant.
        Residuals are leave-one-out, of at most 1,000 rows ("tiled" and "pcg": 512); too few of them give infinite ends.
        """
        model = self._fitted()
        if not are_numbers(model.targets, self.target_kernel_):
            raise DataError("intervals require numeric targets; use expectation(X, h) for others")
        fraction().check("coverage", coverage)
        parts = [left.interval(f, Z, float(coverage), local) for left, f, Z in self._around(X)]
        if self._left is not None and (words := self._left.too_few(coverage)):
            warn(words)
        low, high = (np.concatenate([part[end] for part in parts]) for end in (0, 1))
        return (low[:, 0], high[:, 0]) if low.shape[1] == 1 else (low, high)

    def _around(self, X: Any) -> Iterator[tuple[LeftOut, np.ndarray, np.ndarray]]:
        """For quantiles and intervals, in blocks of rows: residuals, predictions, and z(x) as rows."""
        model, rows = self._fitted(), self._query_rows(X)
        with blas_threads(1):
            if self._left is None:
                if isinstance(model.weights, Explicit):
                    raise ConfigError(
                        "this embedding has no residuals (a sparse form of centres, or stored by an older version); "
                        "use the embedding it was made from, or fit again"
                    )
                self._left = left_out(model, model.weights, model.targets, self._seed())
            assert self._left is not None
            predicted = np.asarray(model.centred_expectation(rows, model.targets))
            for part in row_blocks(row_count(rows), _QUERY_ROWS):
                Z = np.asarray(model.basis(take(rows, part)), dtype=np.float64).T
                yield self._left, predicted[part], Z

    def sample(
        self,
        X: Any,
        size: int,
        candidates: Any = None,
        random_state: RandomState = None,
        method: str = "random",
    ) -> list[Any]:
        """For every row of X, `size` targets of the model: a list with an array (or a list) of them for each row.

        "random" draws them with the weights a(x), negative ones set to 0 and the rest normalised; `random_state` is
        that of the model if None. "herding" chooses an evenly weighted sample whose mean is close to μ(x), the same in
        every call, from `candidates` (by default the targets of the model); it takes a Gram matrix of them.
        """
        one_of("random", "herding").check("method", method)
        integer(1).check("size", size)
        if method == "random" and candidates is not None:
            raise ConfigError("candidates are for method='herding': weights of other targets are not known")
        model, rows = self._fitted(), self._query_rows(X)
        if method == "random":
            seed().check("random_state", random_state)
            rng = np.random.default_rng([self._seed() if random_state is None else drawn_seed(random_state), 10])
            found = []
            with blas_threads(1):
                for part in row_blocks(row_count(rows), _QUERY_ROWS):
                    drawn = drawn_targets(np.asarray(model.coefficients(take(rows, part))), int(size), rng)
                    found += [select(model.targets, own) for own in drawn]
            return found
        pool = model.targets if candidates is None else self._query_targets(candidates)
        with blas_threads(1):
            L = np.asarray(self.target_kernel_.gram(pool), dtype=np.float64)
            values = np.asarray(model.evaluate(rows, pool))
        return [select(pool, herd(row, L, size)) for row in values]

    def errors(self, X: Any, Y: Any) -> np.ndarray:
        """|L(y, ·) - μ(x)|² of every pair, in the target kernel's Hilbert space."""
        model, rows, targets = self._fitted(), self._query_rows(X), self._query_targets(Y)
        if row_count(rows) != row_count(targets):
            raise DataError(f"{row_count(rows)} inputs but {row_count(targets)} targets; the numbers must be equal")
        with blas_threads(1):
            return np.asarray(model.errors(rows, targets))

    def score(self, X: Any, y: Any) -> float:
        """The negative mean of `errors`: larger is better. (`CMERegressor.score` is R².)"""
        return -float(np.mean(self.errors(X, y)))

    def _fitted(self) -> ConditionalEmbedding:
        self._check_fitted()
        weights = self.embedding_.weights
        if isinstance(weights, Inverse) and getattr(weights.executor, "client", None) is not self._client:
            weights.executor = self._executor()  # the client was closed, or another one was set
        return self.embedding_

    # --- other forms -----------------------------------------------------------------------------

    def sparsify(
        self,
        penalty: str = "element",
        gammas: Sequence[float] | int = 20,
        method: str = "fista",
        refit: bool = True,
        steps: int = 200,
    ) -> list[SparseEmbedding]:
        """Embeddings with fewer and fewer zeros, one for each γ (method "fista") or number of pivots ("cholesky").

        penalty : "element" | "row" (targets) | "column" (inputs) | "pair" (observed pairs, on both sides)
        gammas : their number, or a list; for method "cholesky" numbers of pivots
        refit : solve again for the kept entries (which the penalty shrinks)
        steps : of FISTA, which refines the solution of a splitting method
        """
        forms = sparse_forms(self._fitted(), penalty, gammas, method, refit, steps)
        return [SparseEmbedding(**self.get_params(deep=False))._adopt(self, form) for form in forms]

    def dense_weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """W, K of the centres and L of the targets."""
        return dense_weights(self._fitted())

    def _pack(self) -> tuple[Arrays, Facts]:
        """A loaded model predicts the same bits on the same machine: its arrays are the saved ones, in the same order,
        and an exact one ("cholesky") is factorised again at loading, from the same rows by the same steps. "tiled" and
        "pcg" solve again for right sides that were not solved before saving; results agree to the precision of the
        solve ("pcg": `tolerance`)."""
        arrays, facts = pack(self._fitted(), self._left)
        if self.scaling_ is not None:
            arrays |= scaling_arrays(self.scaling_, at="")
        return arrays, {**facts, "solver": self.solver_, "scaling": self.scaling, "random_state": self._seed()}

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.solver = self.solver_ = facts["solver"]
        self.scaling, self.random_state = facts["scaling"], int(facts.get("random_state", 0))
        self.scaling_ = stored_scaling(arrays, at="") if "shift" in arrays else None

        def inverse(kernel: Kernel, lam: float, X: Any, Y: Any) -> Inverse:
            self.kernel_, self.regularization_ = kernel, lam
            return self._inverse(Pairs.in_tables(X, Y))

        with blas_threads(1):
            self.embedding_, self._left = unpack(arrays, facts, own, inverse)
        fitted = self.embedding_
        self.kernel = self.kernel_ = fitted.kernel
        self.target_kernel = self.target_kernel_ = fitted.target_kernel
        self.regularization = self.regularization_ = fitted.regularization
        if isinstance(fitted.weights, Inverse):
            self.tolerance = fitted.weights.tolerance
        if self.scaling_ is not None:
            self.n_features_in_ = int(self.scaling_.shift.size)


class SparseEmbedding(ConditionalMeanEmbedding):
    """A sparse form of a fitted embedding: predicts like it, from fewer inputs and targets.

    Attributes
    ----------
    gamma_ : the penalty's weight.   density_ : share of nonzero entries of the dense weights.
    distance_, relative_distance_ : to the dense embedding in the Hilbert-Schmidt norm, and relative to its norm.
    penalised_distance_ : the relative distance before refitting the kept entries.
    """

    gamma_: float
    density_: float
    distance_: float
    relative_distance_: float
    penalised_distance_: float

    def _adopt(self, dense: ConditionalMeanEmbedding, form: SparseForm) -> SparseEmbedding:
        """Take over a sparse form of a fitted embedding, with the columns and scaling of the dense one."""
        for name in ("scaling_", "n_features_in_", "feature_names_in_", "fitted_to_dataset_"):
            if hasattr(dense, name):
                setattr(self, name, getattr(dense, name))
        self.embedding_, self._left, self.solver_ = form.embedding, form.left_out, "sparse"
        self.kernel_, self.target_kernel_ = form.embedding.kernel, form.embedding.target_kernel
        self.regularization_ = form.embedding.regularization
        self.gamma_, self.density_, self.distance_ = form.gamma, form.density, form.distance
        self.relative_distance_, self.penalised_distance_ = form.relative_distance, form.penalised_distance
        return self

    @property
    def inputs_kept_(self) -> int:
        return row_count(self.embedding_.centres)

    @property
    def targets_kept_(self) -> int:
        return row_count(self.embedding_.targets)
