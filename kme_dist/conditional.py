"""Conditional mean embeddings: the distribution of anything with a kernel, given anything with a kernel.   [CME]

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x = rng.uniform(-3, 3, size=(200, 1))
>>> y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=200)
>>> model = ConditionalMeanEmbedding().fit(x, y)             # kernel and λ by leave-one-out, in closed form
>>> mean = model.expectation(np.array([[1.0]]), lambda y: y)
>>> bool(abs(mean[0] - np.sin(1.0)) < 0.1)
True
>>> low, high = model.quantiles(np.array([[1.0]]), [0.05, 0.95])[0]
>>> bool(low < np.sin(1.0) < high)
True

Targets are vectors, labels (`target_kernel="delta"`, when it equals the multiclass conditional embedding), texts, or
whatever the target kernel takes. Exact solvers keep the weights implicit: E[h(Y) | x] is solved for when it is asked.
A data set on disk is fitted where it lies, by centres or features in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from kme_dist.backend import blas_threads, free_bytes, to_host
from kme_dist.core import kernels, sparse
from kme_dist.core.conditional import (
    ConditionalEmbedding,
    Delta,
    Explicit,
    Weights,
    conditional_quantiles,
    held_out_scores,
    herd,
    solve_embedding,
)
from kme_dist.core.features import SAMPLERS, Spectral
from kme_dist.core.kernels import Kernel, Linear, OnFeatures
from kme_dist.core.kernels.base import FeatureMap, row_count, take
from kme_dist.data import store
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.errors import ConfigError, DataError
from kme_dist.means import FORMAT, executor_of, get_rows, put_rows
from kme_dist.run.conditional import Inverse, KernelLearning, Pairs, as_targets, fit_sums, learn_kernel, project
from kme_dist.run.features import as_features, restore_features
from kme_dist.run.fitting import SOLVERS, choose
from kme_dist.run.learn import length_scale_names, median_length_scale, select
from kme_dist.run.means import Sample, spectrum_sample
from kme_dist.run.nystrom import Basis, Centres, Features
from kme_dist.run.pivots import choose_centres
from kme_dist.run.scaling import Scaling

_JUDGED_ROWS = 1_200  # pairs by which kernel and λ are chosen
_CENTRES, _TARGET_CENTRES, _FEATURES = 1_000, 500, 1_000
_CHOICE_ROWS = 20_000  # rows that centres are chosen among
_WIDTHS = (0.25, 0.5, 1.0, 2.0)  # times the median distance
_SHIFTS = 10.0 ** np.arange(-6.0, 2.1, 0.5)  # n λ / mean k(x, x)


class ConditionalMeanEmbedding(BaseEstimator):  # type: ignore[misc]
    """μ(x) = E[L(Y, ·) | x], estimated by regression in the target kernel's Hilbert space.

    Parameters
    ----------
    kernel : of the inputs: a name (length scale by cross-validation around the median distance), a kernel, or a list of
        kernels to choose from.
    target_kernel : of the targets: a name (length scale is the median distance), "delta" for labels, or a kernel.
    regularization : λ, or None to choose it by cross-validation.
    folds : None leaves out one pair at a time; a number makes so many folds. In closed form either way.
    learn_steps : learn the input kernel's parameters and λ by so many gradient steps of the held-out loss (0: do not).
        The loss is |L(y, ·) - μ(x)|² over held-out pairs plus `complexity_weight` times the Hilbert-Schmidt norm of the
        embedding: for arbitrary targets what the complexity bound is for classes, but as a heuristic; no generalisation
        bound is known for it, and the target kernel is never learned, since the loss is measured in it.
    complexity_weight, learning_rate : of that learning.
    solver : "cholesky" (exact, n x n in memory), "tiled" and "pcg" (exact, out of core), "nystrom" (centres) and
        "features" (explicit features; one pass over the rows for either), or "auto".
    features : of solver "features": a feature map, or how many random frequencies of the kernel.
    tolerance : of solver "pcg": relative residual.
    centres, centre_choice : how many, and "rpcholesky", "uniform" or "kmeans++".
    target_centres : project on so many targets, so that the model's size does not grow with the rows; None keeps all
        targets, where they are in memory.
    scaling : {"standard", "unit", None} of numeric inputs.
    client : a distributed.Client.   random_state : whole number.

    Attributes
    ----------
    embedding_ : kernel, centres, targets and weights.   kernel_, target_kernel_, regularization_ : what was chosen.
    solver_, solver_reason_ : which solver, and why.
    scores_ : (kernel, λ, held-out error) of every candidate, on a sample.   history_ : one record per learning step.
    retuned_ : errors of the λ that "pcg", "nystrom" and "features" tried on all rows, after the kernel was chosen.
    """

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
        random_state: int = 0,
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

    # --- fitting ---------------------------------------------------------------------------------

    def fit(self, X: Any, Y: Any = None) -> Self:
        """Fit to pairs of rows, or to a data set whose labels (or columns, named by Y) are the targets."""
        self._check_settings()
        pairs = self._pairs(X, Y)
        some_X, some_Y = pairs.some(_JUDGED_ROWS, self.random_state)
        self.target_kernel_ = self._target_kernel(some_Y)
        some_Y = as_targets(some_Y, self.target_kernel_)
        with _threads(some_X):
            kernel, lam = self._choose(some_X, some_Y, pairs.count)
        self.history_: list[dict[str, Any]] = []
        if self.learn_steps:
            settings = KernelLearning(
                steps=self.learn_steps,
                learning_rate=self.learning_rate,
                complexity_weight=self.complexity_weight,
                seed=self.random_state,
            )
            kernel, lam, self.history_ = learn_kernel(kernel, self.target_kernel_, some_X, some_Y, lam, settings)
            if self.regularization is None:  # λ learned on batches is not right for all rows
                kernel, lam = self._choose(some_X, some_Y, pairs.count, [kernel])
            else:
                lam = float(self.regularization)
        self.kernel_, self.regularization_ = kernel, lam
        features = self._feature_map(some_X, kernel)
        self.solver_, self.solver_reason_ = self._solver(pairs, features)
        self.retuned_: dict[float, float] = {}
        sums = self.solver_ in ("nystrom", "features")
        self.embedding_ = self._with_sums(pairs, features) if sums else self._exact(pairs)
        return self

    def _check_settings(self) -> None:
        if self.solver not in ("auto", *SOLVERS):
            raise ConfigError(f"solver={self.solver!r} is unknown; choose 'auto', {', '.join(map(repr, SOLVERS))}")
        if self.features is not None and self.solver not in ("auto", "features"):
            raise ConfigError(f"features are for solver='features', not {self.solver!r}; leave one of them out")
        if not self.tolerance > 0:
            raise ConfigError(f"tolerance={self.tolerance!r}: needs a positive number")
        if self.regularization is not None and not self.regularization > 0:
            raise ConfigError(f"regularization={self.regularization!r}: needs a positive number, or None")
        for name in ("centres", "target_centres", "folds"):
            value, least = getattr(self, name), 2 if name == "folds" else 1
            if value is not None and (not isinstance(value, int | np.integer) or value < least):
                raise ConfigError(f"{name}={value!r}: needs a whole number from {least}, or None")

    def _pairs(self, X: Any, Y: Any) -> Pairs:
        if isinstance(X, Dataset):
            pairs = Pairs.of(X, Y, self.scaling)
            self.scaling_ = pairs.scale
            return pairs
        if Y is None:
            raise DataError("fit needs targets: fit(X, Y), or a data set that brings them")
        rows, targets = Sample.of(X), Y.to_numpy() if hasattr(Y, "to_numpy") else Y
        if row_count(targets) != rows.count:
            raise DataError(f"{rows.count} inputs and {row_count(targets)} targets; they come in pairs")
        if isinstance(targets, np.ndarray) and targets.dtype.kind == "f" and not np.isfinite(targets).all():
            raise DataError("targets hold NaN or infinity; remove those pairs first")
        numeric = isinstance(rows.memory, np.ndarray)
        self.scaling_ = Scaling.learn(rows.memory, self.scaling) if numeric else None
        return Pairs(Sample.of(self._scaled(rows.memory)), targets)

    def _scaled(self, X: Any) -> Any:
        rows = Sample.of(X).memory
        return rows if self.scaling_ is None else self.scaling_.apply(rows, "float64")

    def _target_kernel(self, Y: Any) -> Kernel:
        if isinstance(self.target_kernel, str) and self.target_kernel == "delta":
            return Delta()
        if not isinstance(self.target_kernel, str):
            return kernels.from_config(self.target_kernel, own={"delta": Delta})
        found = kernels.from_config({"name": self.target_kernel})
        return _with_median(found, as_targets(Y, found), 1.0, self.random_state)

    def _choose(self, X: Any, Y: Any, rows: int, candidates: Sequence[Kernel] | None = None) -> tuple[Kernel, float]:
        """The kernel and λ with the least held-out error of (at most) _JUDGED_ROWS pairs, at the same shift nλ."""
        if candidates is None:
            candidates = self._candidates(X)
        n = row_count(X)
        if len(candidates) == 1 and self.regularization is not None:
            self.scores_: list[tuple[Kernel, float, float]] = []
            return candidates[0], float(self.regularization)
        L = np.asarray(self.target_kernel_.gram(Y), dtype=np.float64)
        folds = None
        if self.folds is not None:
            order = np.random.default_rng([self.random_state, 1]).permutation(n)
            folds = [np.sort(part) for part in np.array_split(order, min(self.folds, n))]
        self.scores_ = []
        for kernel in candidates:
            scale = float(np.mean(to_host(kernel.diag(X)))) or 1.0
            shifts = _SHIFTS * scale if self.regularization is None else np.array([n * self.regularization])
            scores = held_out_scores(np.asarray(kernel.gram(X)), L, [float(s) for s in shifts], folds)
            lams = shifts / rows if self.regularization is None else shifts / n
            self.scores_ += [(kernel, float(lam), float(score)) for lam, score in zip(lams, scores, strict=True)]
        kernel, lam, _ = min(self.scores_, key=lambda found: found[2])
        return kernel, lam

    def _candidates(self, X: Any) -> list[Kernel]:
        if self.features is not None and not isinstance(self.features, int | np.integer):
            return [OnFeatures(Linear(), as_features(self.features, np.shape(X)[1], self.random_state))]
        if isinstance(self.kernel, list | tuple):
            return [kernels.from_config(kernel, own={"delta": Delta}) for kernel in self.kernel]
        if not isinstance(self.kernel, str):
            return [kernels.from_config(self.kernel, own={"delta": Delta})]
        found = kernels.from_config({"name": self.kernel, "ard": True}, n_features=np.shape(X)[-1])
        if not length_scale_names(found):
            return [found]
        return [_with_median(found, X, width, self.random_state) for width in _WIDTHS]

    def _solver(self, pairs: Pairs, features: FeatureMap | None) -> tuple[str, str]:
        executor = executor_of(self.client)
        room = int(0.6 * free_bytes("numpy") / max(1, executor.workers))
        centres = self.centres or self.target_centres
        found, reason = choose(self.solver, pairs.count, centres, features, executor.workers, room, "float64")
        if (
            self.solver == "auto"
            and found == "tiled"
            and not (pairs.sample.path or isinstance(pairs.sample.memory, np.ndarray))
        ):
            return "nystrom", "inputs that are no numbers cannot be stored in tiles"
        return found, reason

    def _feature_map(self, X: Any, kernel: Kernel) -> FeatureMap | None:
        """The map that was given, or random Fourier features of the kernel where features are asked for."""
        if self.solver != "features" and self.features is None:
            return None
        if self.features is not None and not isinstance(self.features, int | np.integer):
            return as_features(self.features, np.shape(X)[1], self.random_state)  # type: ignore[no-any-return]
        if kernel.name not in SAMPLERS:
            raise ConfigError(
                f"{kernel!r} has no random features; choose a kernel of {', '.join(SAMPLERS)}, give a feature map as "
                "`features`, or use another solver"
            )
        return Spectral(spectrum_sample(kernel, np.shape(X)[1], int(self.features or _FEATURES), self.random_state))

    def _exact(self, pairs: Pairs) -> ConditionalEmbedding:
        """By one factorisation here, or by tiles or conjugate gradients over the rows where they are."""
        X, Y = pairs.some(pairs.count, 0)
        Y = as_targets(Y, self.target_kernel_)
        labels = isinstance(self.target_kernel_, Delta)
        weights: Weights
        if self.solver_ == "cholesky":
            with _threads(X):
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
        projected = project(weights, self.target_kernel_, Y, D)
        return ConditionalEmbedding(self.kernel_, self.target_kernel_, X, D, projected, self.regularization_)

    def _inverse(self, pairs: Pairs) -> Inverse:
        if self.client is not None and not pairs.sample.path:
            hosts = {worker["host"] for worker in self.client.scheduler_info(n_workers=-1)["workers"].values()}
            if not hosts <= {"127.0.0.1", "::1", "localhost"}:
                raise DataError(
                    f"rows in memory cannot be read by workers at {', '.join(sorted(hosts))}; store them where all can "
                    "(kme_dist.ingest((X, y), place)) and pass fit(kme_dist.open_dataset(place))"
                )
        return Inverse(
            pairs, self.kernel_, self.regularization_, self.solver_, executor=executor_of(self.client),
            tolerance=self.tolerance, seed=self.random_state,
        )  # fmt: skip

    def _target_centres(self, pairs: Pairs) -> Any:
        labels = isinstance(self.target_kernel_, Delta)
        if labels and not pairs.sample.path:
            return np.unique(pairs.targets)
        if labels and not pairs.targets and (classes := open_dataset(pairs.sample.path).classes) is not None:
            return np.asarray(classes)  # a sample of the rows may lack a rare one
        Y = as_targets(pairs.some(_CHOICE_ROWS, self.random_state)[1], self.target_kernel_)
        if labels:
            return np.unique(Y)
        count = min(self.target_centres or _TARGET_CENTRES, row_count(Y))
        return select(Y, choose_centres(self.target_kernel_, Y, count, "rpcholesky", self.random_state))

    def _with_sums(self, pairs: Pairs, features: FeatureMap | None) -> ConditionalEmbedding:
        """Centres or features of the inputs; targets projected, or all kept where that is wanted and they are here."""
        X, _ = pairs.some(_CHOICE_ROWS, self.random_state)
        basis: Basis
        if features is not None:
            basis = Features(features, int(features.forward(X[:1]).shape[1]))
        else:
            count = min(self.centres or _CENTRES, row_count(X))
            chosen = choose_centres(self.kernel_, X, count, self.centre_choice, self.random_state)
            basis = Centres(self.kernel_, select(X, chosen))
        keep = self.target_centres is None and not pairs.sample.path and not isinstance(self.target_kernel_, Delta)
        needed = 3 * 8 * pairs.count * basis.size
        if keep and needed > free_bytes("numpy"):
            raise ConfigError(
                f"keeping all {pairs.count} targets needs {needed / 1e9:.1f} GB; set target_centres, e.g. 500"
            )
        own = features is not None and not isinstance(self.features, int | np.integer | None)
        variance = 1.0 if features is None or own else float(self.kernel_.scale) ** 2  # type: ignore[attr-defined]
        found, self.retuned_ = fit_sums(
            self.kernel_, self.target_kernel_, pairs, self.regularization_, basis, self._target_centres(pairs),
            executor=executor_of(self.client), keep_targets=keep, retune=self.regularization is None,
            seed=self.random_state, variance=variance,
        )  # fmt: skip
        self.regularization_ = found.regularization
        return found

    # --- asking ----------------------------------------------------------------------------------

    def coefficients(self, X: Any) -> np.ndarray:
        """a(x), one row for each row of X and one column for each target that the model holds."""
        return np.asarray(self._fitted().coefficients(self._scaled(X))).T

    def expectation(self, X: Any, h: Callable[[Any], Any] | Any) -> np.ndarray:
        """E[h(Y) | x]: `h` takes the targets and returns a value (or row of values) for each, or is those values."""
        model = self._fitted()
        targets = model.targets
        if isinstance(targets, np.ndarray) and targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]  # scalar targets, as they were given
        values = np.asarray(h(targets) if callable(h) else h, dtype=np.float64)
        return np.asarray(model.expectation(self._scaled(X), values))

    def predict(self, X: Any) -> np.ndarray:
        """E[Y | x] of numeric targets."""
        targets = self._fitted().targets
        if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "biuf":
            raise DataError(
                "the targets are no numbers and have no mean; use expectation(X, h) with a function of them"
            )
        return self.expectation(X, lambda y: y)

    def evaluate(self, X: Any, Y: Any) -> np.ndarray:
        """μ(x)(y) for every row of X (down) and every target of Y (across)."""
        return np.asarray(self._fitted().evaluate(self._scaled(X), as_targets(Y, self.target_kernel_)))

    def quantiles(self, X: Any, levels: Sequence[float]) -> np.ndarray:
        """Conditional quantiles of scalar targets, one row for each row of X; negative weights count as none."""
        targets = self._fitted().targets
        if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "biuf" or targets.size != len(targets):
            raise DataError("quantiles are of scalar targets; take expectations of functions of others")
        asked = np.asarray(levels, dtype=np.float64)
        if not ((asked >= 0) & (asked <= 1)).all():
            raise ConfigError(f"levels={levels!r}: quantiles need levels from 0 to 1")
        return conditional_quantiles(targets.reshape(-1), self.coefficients(X).T, asked)

    def sample(self, X: Any, size: int, candidates: Any = None) -> list[Any]:
        """For every row of X `size` targets by kernel herding: an evenly weighted sample whose mean is near μ(x).

        They are chosen among `candidates`, by default the targets that the model holds; a list with one entry (an array
        or a list of targets) for each row.
        """
        model = self._fitted()
        pool = model.targets if candidates is None else as_targets(candidates, self.target_kernel_)
        L = np.asarray(self.target_kernel_.gram(pool), dtype=np.float64)
        values = np.asarray(model.evaluate(self._scaled(X), pool))
        return [select(pool, herd(row, L, size)) for row in values]

    def errors(self, X: Any, Y: Any) -> np.ndarray:
        """|L(y, ·) - μ(x)|² of every pair, in the target kernel's Hilbert space."""
        return np.asarray(self._fitted().errors(self._scaled(X), as_targets(Y, self.target_kernel_)))

    def score(self, X: Any, Y: Any) -> float:
        """Minus the mean of `errors`: larger is better."""
        return -float(np.mean(self.errors(X, Y)))

    def _fitted(self) -> ConditionalEmbedding:
        check_is_fitted(self, "embedding_")
        weights = self.embedding_.weights
        if isinstance(weights, Inverse) and getattr(weights.executor, "client", None) is not self.client:
            weights.executor = executor_of(self.client)  # the client was closed, or another one was set
        return self.embedding_

    # --- sparse forms ----------------------------------------------------------------------------

    def sparsify(
        self,
        penalty: str = "element",
        gammas: Sequence[float] | int = 20,
        method: str = "fista",
        refit: bool = True,
        steps: int = 200,
    ) -> list[SparseEmbedding]:
        """Embeddings with fewer and fewer zeros: one for each γ (method "fista") or number of pivots ("cholesky").

        penalty : "element" | "row" (targets) | "column" (inputs)
        gammas : how many, or which; for method "cholesky" how many numbers of pivots, or which
        refit : solve anew on what the penalty kept (it also shrinks what it keeps)
        steps : of FISTA, which finishes what a splitting of the problem has begun
        """
        W, K, L = self.dense_weights()
        if method == "cholesky":
            n = len(K)
            counts = np.unique(np.linspace(1, n, gammas + 1).astype(int)[1:]) if isinstance(gammas, int) else gammas
            found = [sparse.incomplete_cholesky(W, K, L, int(count)) for count in counts]
        elif method == "fista":
            found = list(sparse.path(W, K, L, penalty=penalty, gammas=gammas, steps=steps))
        else:
            raise ConfigError(f"method={method!r} is unknown; choose 'fista' or 'cholesky'")
        whole = sparse.operator_distance(W * 0, W, K, L) or 1.0
        forms = []
        for step in found:
            kept = sparse.refit(step, W, K, L) if refit and method == "fista" else step
            forms.append(self._sparse(kept, whole))
            forms[-1].penalised_distance_ = step.distance / whole
        return forms

    def dense_weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """W, K of the centres and L of the targets."""
        model = self._fitted()
        if model.features is not None:
            raise ConfigError("sparse forms choose among rows, and solver='features' keeps none; use another solver")
        K = np.asarray(model.kernel.gram(model.centres), dtype=np.float64)
        L = np.asarray(model.target_kernel.gram(model.targets), dtype=np.float64)
        return np.asarray(model.weights.forward(np.eye(len(K)))), K, L

    def _sparse(self, step: sparse.SparseStep, whole: float) -> SparseEmbedding:
        M = np.asarray(step.weights)
        rows, columns = np.flatnonzero(M.any(axis=1)), np.flatnonzero(M.any(axis=0))
        model = self._fitted()
        small = ConditionalEmbedding(
            model.kernel,
            model.target_kernel,
            select(model.centres, columns),
            select(model.targets, rows),
            Explicit(M[np.ix_(rows, columns)]),
            model.regularization,
        )
        found = SparseEmbedding(**self.get_params(deep=False))
        found.scaling_, found.solver_, found.embedding_ = self.scaling_, "sparse", small
        found.kernel_, found.target_kernel_ = small.kernel, small.target_kernel
        found.regularization_ = small.regularization
        found.gamma_, found.density_ = step.gamma, step.nonzero / M.size
        found.distance_, found.relative_distance_ = step.distance, step.distance / whole
        return found

    # --- storing ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the fitted embedding as arrays and JSON.

        An exact one is factorised anew after loading: "cholesky" at once, "tiled" and "pcg" when something is asked
        that was not asked before it was saved.
        """
        model = self._fitted()
        arrays: dict[str, np.ndarray] = {}
        attributes: dict[str, Any] = {
            "model": "ConditionalMeanEmbedding",
            "model_format": FORMAT,
            "kernel": model.kernel.to_config(),
            "target_kernel": model.target_kernel.to_config(),
            "regularization": model.regularization,
            "solver": self.solver_,
            "scaling": self.scaling,
        }
        if model.features is None:
            put_rows(arrays, attributes, "centres", model.centres)
        else:
            features: Any = model.features
            if not hasattr(features, "to_config"):
                raise DataError(f"{features!r} cannot be stored: it has no to_config() and arrays")
            attributes["features"] = features.to_config()
            arrays |= {f"features/{name}": value for name, value in features.arrays.items()}
            if isinstance(model.kernel, OnFeatures):
                attributes["kernel"] = None  # it is the map's own
        targets = model.targets
        if isinstance(targets, np.ndarray) and targets.dtype.kind not in "biuf":
            targets = targets.tolist()
        put_rows(arrays, attributes, "targets", targets)
        if isinstance(model.weights, Explicit):
            arrays["weights"] = np.asarray(model.weights.matrix)
        elif isinstance(model.weights, Inverse):
            attributes["tolerance"] = model.weights.tolerance
            arrays |= {f"solved/{key}": value for key, value in model.weights.remembered.items()}
        if self.scaling_ is not None:
            arrays["shift"], arrays["factor"] = self.scaling_.shift, self.scaling_.factor
        store.save_arrays(path, arrays, attributes)

    @classmethod
    def _restore(
        cls, arrays: Mapping[str, np.ndarray], found: Mapping[str, Any], own: Mapping[str, type[Kernel]]
    ) -> ConditionalMeanEmbedding:
        known: dict[str, type[Kernel]] = {"delta": Delta, **own}
        features = restore_features(found["features"], arrays, own) if "features" in found else None
        own_kernel = found["kernel"] is None
        kernel = OnFeatures(Linear(), features) if own_kernel else kernels.from_config(found["kernel"], own=known)
        target_kernel = kernels.from_config(found["target_kernel"], own=known)
        lam = float(found["regularization"])
        model = cls(kernel, target_kernel, lam, solver=found["solver"], scaling=found["scaling"])
        model.kernel_, model.target_kernel_, model.regularization_ = kernel, target_kernel, lam
        model.solver_ = found["solver"]
        model.scaling_ = Scaling(arrays["shift"], arrays["factor"]) if "shift" in arrays else None
        X = None if features is not None else get_rows(arrays, found, "centres")
        Y = get_rows(arrays, found, "targets")
        Y = np.asarray(Y) if isinstance(target_kernel, Delta) else Y
        if "weights" in arrays:
            model.embedding_ = ConditionalEmbedding(
                kernel, target_kernel, X, Y, Explicit(arrays["weights"]), lam, features
            )  # fmt: skip
        elif "tolerance" in found:
            model.tolerance = float(found["tolerance"])
            weights = model._inverse(Pairs(Sample.of(X), Y))
            weights.remembered |= {n.removeprefix("solved/"): v for n, v in arrays.items() if n.startswith("solved/")}
            model.embedding_ = ConditionalEmbedding(kernel, target_kernel, X, Y, weights, lam)
        else:
            with _threads(X):
                model.embedding_ = solve_embedding(kernel, target_kernel, X, Y, lam)
        return model


class SparseEmbedding(ConditionalMeanEmbedding):
    """A sparse form of a fitted embedding: predicts like it, from the few inputs and targets that it kept.

    Attributes
    ----------
    gamma_ : the penalty's weight.   density_ : share of the entries of the dense weights that are not zero.
    distance_, relative_distance_ : to the dense embedding in the Hilbert-Schmidt norm, and as a share of its own norm.
    penalised_distance_ : the relative distance before the entries that were kept were solved for anew.
    """

    gamma_: float
    density_: float
    distance_: float
    relative_distance_: float
    penalised_distance_: float

    @property
    def inputs_kept_(self) -> int:
        return row_count(self.embedding_.centres)

    @property
    def targets_kept_(self) -> int:
        return row_count(self.embedding_.targets)


def _threads(X: Any) -> AbstractContextManager[None]:
    """One BLAS thread for few rows: quicker, and a model that is factorised anew has the same bits."""
    return blas_threads(1 if row_count(X) <= _JUDGED_ROWS else None)


def _with_median(kernel: Kernel, rows: Any, factor: float, seed: int) -> Kernel:
    names = length_scale_names(kernel)
    if not names:
        return kernel
    width = factor * median_length_scale(np.asarray(take(rows, slice(0, 2000)), dtype=np.float64), seed)
    return kernel.replace({name: np.full(kernel.parameters[name].shape, width) for name in names})
