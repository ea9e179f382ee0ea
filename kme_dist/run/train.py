"""From a data set to a fitted embedding: learn under each objective to compare, fit each candidate, keep the best.

    recipe = Recipe(kernel, objective="auto", steps=300)
    candidates = learn_candidates(data, recipe, executor=executor)
    trained = fit_candidates(data, recipe, candidates, executor=executor, scratch="run/scratch")
    trained.fit.embedding, trained.best.name, trained.losses

`Recipe` turns the settings of an estimator or a config into those of learning, both in memory and on a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kme_dist.core import optim
from kme_dist.core.embedding import Embedding, exact_weights
from kme_dist.core.features import Identity
from kme_dist.core.kernels import Linear
from kme_dist.core.kernels.base import Kernel, length_scale_names, median_length_scale, select
from kme_dist.core.regularization import scale_to_data
from kme_dist.core.weights import positive_rows
from kme_dist.data.dataset import RowSource
from kme_dist.data.rows import RowsRef
from kme_dist.data.scaling import Scaling
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.fit import Fit, fit_on_dataset
from kme_dist.run.learn import learn_on_dataset
from kme_dist.run.maps import with_features
from kme_dist.run.means import random_features
from kme_dist.run.settings import LearnSettings, Record

SELECTED = ("rcb", "validation")  # objectives that "auto" compares
SEARCHED = ("median", "cv")  # objectives that search on a sample
WHOLE_BATCH_ROWS = 1_000  # with more rows, steps use batches of this size
SAMPLE_ROWS = 1_500  # used in the search for a starting point


@dataclass(frozen=True)
class Recipe:
    """What to learn and fit; the fields are the parameters of the estimator of the same names."""

    kernel: Kernel
    objective: str = "auto"
    refit_regularization: bool = True
    risk: str = "sum"
    complexity_weight: float | None = None
    regularization: float = 1.0
    batch_size: int | None = None
    steps: int = 1000
    learning_rate: float = 0.1
    optimizer: str = "adam"
    scaling: str | None = "unit"
    solver: str = "auto"
    centres: int | None = None
    dtype: str = "float32"
    seed: int = 0
    probability_floor: float | None = None
    features: Any = None  # a map applied to scaled rows, or a number of random features for the fit
    early_stopping: bool | str = "auto"  # stop at a plateau; "auto": all but the published objectives
    n_iter_no_change: int | None = None  # steps of a plateau; None: 50 under objective "auto", else 100
    warm: bool = False  # kernel and λ were learned before: "auto" starts from them, without a search
    # Only in a config:
    batches_per_step: int = 1
    local_steps: int | None = None
    schedule: Callable[[float, int], optim.Schedule] | None = None
    train_share: float | None = None
    backend: str = "numpy"
    fit: dict[str, Any] = field(default_factory=dict)  # further arguments of `fit_on_dataset`

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives to learn under, one after the other; none for "median" and "cv"."""
        if self.objective in SEARCHED:
            return ()
        return SELECTED if self.objective == "auto" else (self.objective,)

    def settings(self, objective: str, rows: int) -> LearnSettings:
        """Settings for one objective. Under "auto" steps are smaller and length scales are kept near their start.
        Unless set, learning stops at a plateau, but the published objectives run all steps."""
        auto, as_published = self.objective == "auto", self.objective in ("rcb", "erm")
        stops = not as_published if self.early_stopping == "auto" else bool(self.early_stopping)
        share = 0.8 if auto else 0.5
        batch = WHOLE_BATCH_ROWS if self.batch_size is None and rows > WHOLE_BATCH_ROWS else self.batch_size
        return LearnSettings(
            objective=objective,
            risk=self.risk,
            complexity_weight=self.complexity_weight,
            steps=int(self.steps),
            batch_size=batch,
            learning_rate=self.learning_rate * (0.5 if auto else 1.0),
            schedule=self.schedule,
            optimizer=self.optimizer,
            train_share=share if self.train_share is None else self.train_share,
            prior_width=1.0 if auto else None,
            patience=(self.n_iter_no_change or (50 if auto else 100)) if stops else None,
            seed=self.seed,
        )

    def scaling_of(self, source: RowSource, split: str | None) -> Scaling:
        """What is applied to rows before the kernel."""
        scaling = Scaling.of(source.split_statistics(split), self.scaling)
        return scaling if isinstance(self.features, int) else with_features(scaling, self.features, self.seed)

    def precision_for(self, source: RowSource, split: str | None) -> str:
        """The precision of scaled rows: double if single cannot resolve their differences.

        Scaling subtracts in double. Unscaled rows may be so far from the origin (years, coordinates) that single
        precision, with a spacing of 1.2e-7 |x|, rounds their differences away.
        """
        found = source.split_statistics(split)
        if self.scaling is None and self.dtype == "float32" and found.count:
            spread = np.sqrt(found.variance)
            largest = np.maximum(np.abs(found.minimum), np.abs(found.maximum))
            if bool(np.any((spread > 0) & (largest * np.finfo(np.float32).eps > 1e-3 * spread))):
                return "float64"
        return self.dtype

    def floor(self, rows: float, n_classes: int) -> float:
        """The least probability of a label: n rows (or rows of weight n) cannot support anything rarer than
        1/(n + m)."""
        return 1.0 / (rows + n_classes) if self.probability_floor is None else float(self.probability_floor)


@dataclass(frozen=True)
class Candidate:
    """A kernel and a λ, ready for the fit."""

    name: str  # of the objective
    kernel: Kernel
    regularization: float
    history: list[Record] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Trained:
    """The best candidate and its fit; the losses of all candidates, if evaluated."""

    best: Candidate
    fit: Fit  # its λ is that of the kernel, also if solved for features
    losses: dict[str, float]
    candidates: list[Candidate] = field(repr=False)


def learn_candidates(
    dataset: RowSource,
    recipe: Recipe,
    *,
    executor: Executor,
    split: str | None = "auto",
    checkpoints: Callable[[str], Checkpoints] | None = None,
    callback: Callable[[Record], None] | None = None,
) -> list[Candidate]:
    """Learn the kernel under each objective that the recipe compares (one, or two for "auto").

    `checkpoints` returns the checkpoints for the name of an objective.
    """
    split = _resolved(dataset, split)
    rows = dataset.split_rows(split)
    kernel, lam = recipe.kernel, float(recipe.regularization)
    if recipe.steps == 0 and recipe.objective not in SEARCHED:
        return [Candidate("given", kernel, lam)]
    if recipe.objective in SEARCHED or (recipe.objective == "auto" and not recipe.warm):
        kernel, lam = _start(dataset, recipe, split, dataset.split_weight(split), executor)
    if recipe.objective in SEARCHED:
        return [Candidate(recipe.objective, kernel, lam)]
    found = []
    scaling, dtype = recipe.scaling_of(dataset, split), recipe.precision_for(dataset, split)
    for name in recipe.objectives:
        learned = learn_on_dataset(
            dataset,
            kernel,
            lam,
            recipe.settings(name, rows),
            batches_per_step=recipe.batches_per_step,
            local_steps=recipe.local_steps,
            executor=executor,
            checkpoints=None if checkpoints is None else checkpoints(name),
            callback=callback,
            split=split,
            scaling=scaling,
            dtype=dtype,
            backend=recipe.backend,
        )
        found.append(Candidate(name, learned.kernel, learned.regularization, learned.history))
    return found


def fit_candidates(
    dataset: RowSource,
    recipe: Recipe,
    candidates: list[Candidate],
    *,
    executor: Executor,
    scratch: Any = None,
    split: str | None = "auto",
    report: Callable[[str], None] | None = None,
) -> Trained:
    """Fit every candidate on all rows and keep the one with the least leave-one-out loss.

    `scratch` is a folder that the workers can reach; None if the executor works in this process.
    """
    assert dataset.classes is not None
    split = _resolved(dataset, split)
    scaling, dtype = recipe.scaling_of(dataset, split), recipe.precision_for(dataset, split)

    def fitted(candidate: Candidate, retune: bool) -> Fit:
        form = _explicit(recipe, candidate.kernel, scaling, dataset, split)
        fit = fit_on_dataset(
            dataset,
            candidate.kernel,
            candidate.regularization / form.variance,
            executor=executor,
            scratch=scratch,
            split=split,
            scaling=form.scaling,
            dtype=dtype,
            backend=recipe.backend,
            solver=recipe.solver,
            centres=recipe.centres,
            features=form.features,
            retune=retune,
            floor=recipe.floor(dataset.split_weight(split), dataset.n_classes),
            seed=recipe.seed,
            report=report,
            **recipe.fit,
        )
        return replace(fit, regularization=fit.regularization * form.variance)

    as_given = recipe.objective == "cv" or (recipe.steps == 0 and recipe.objective != "median")
    retune = not as_given and (recipe.refit_regularization or len(candidates) > 1)
    fits = [fitted(candidate, retune) for candidate in candidates]
    order = sorted(range(len(fits)), key=lambda i: math.inf if (loss := fits[i].loss) is None else loss)
    best, fit = candidates[order[0]], fits[order[0]]
    losses = {c.name: f.loss for c, f in zip(candidates, fits, strict=True) if f.loss is not None}
    if retune and not recipe.refit_regularization:
        fit = fitted(best, False)
    return Trained(best, fit, losses, candidates)


@dataclass(frozen=True)
class _Form:
    """What the fit solves for: weights of rows or centres (no features), or of explicit features."""

    scaling: Scaling
    features: Any = None
    variance: float = 1.0  # k(x, x') = variance φ(x)·φ(x'), so that λ for the features is λ / variance


def _explicit(recipe: Recipe, kernel: Kernel, scaling: Scaling, source: RowSource, split: str | None) -> _Form:
    """Explicit features if given (a map, or a number of random ones), or if the kernel is linear with fewer features
    than rows: then p x p equations are equivalent to n x n."""
    if recipe.solver not in ("auto", "features"):
        return _Form(scaling)
    if isinstance(recipe.features, int):
        drawn = random_features(kernel, source.features, recipe.features, recipe.seed)
        return _Form(with_features(scaling, drawn), Identity(), float(kernel.parameters["scale"]) ** 2)
    if isinstance(kernel, Linear) and recipe.centres is None:
        width = scaling.apply(source.read_rows(0, 1)[0], "float64").shape[1]
        if recipe.solver == "features" or width < source.split_rows(split):
            shrunk = scaling if kernel.length_scale is None else scaling.weighted(1 / kernel.length_scale)
            return _Form(shrunk, Identity(), float(kernel.scale) ** 2)
    return _Form(scaling)


def _resolved(dataset: RowSource, split: str | None) -> str | None:
    split = dataset.training_split(split)
    if dataset.classes is None:
        raise DataError(f"{dataset.path} has no class labels; ingest it again with the column named by `label`")
    if dataset.split_rows(split) < 2:
        raise DataError(f"{dataset.path}: learning requires at least two rows, found {dataset.split_rows(split)}")
    return split


# --- starting point ---------------------------------------------------------------------------------


def _start(
    dataset: RowSource, recipe: Recipe, split: str | None, rows: float, executor: Executor
) -> tuple[Kernel, float]:
    """The starting point of learning, found on a sample of rows by one worker."""
    assert dataset.classes is not None
    floor = recipe.floor(rows, len(dataset.classes))
    scaling, dtype = recipe.scaling_of(dataset, split), recipe.precision_for(dataset, split)
    sampled = RowsRef.of(dataset, split=split, scaling=scaling, dtype=dtype, classes=True)
    call = (sampled, without_functions(recipe), floor)
    return executor.map(start_on_sample, [call], name="starting-point")[0]


def start_on_sample(rows: RowsRef, recipe: Recipe, floor: float) -> tuple[Kernel, float]:
    """Kernel and λ for a random sample of rows. Runs on a worker."""
    plan = rows.plan(SAMPLE_ROWS, recipe.seed)
    X, y, w = positive_rows(*rows.batch(plan, 0), rows.batch_weights(plan, 0))
    n_classes = rows.n_classes
    if recipe.objective == "auto":
        return scale_to_data(recipe.kernel, X, y, n_classes, floor=floor, seed=recipe.seed, weights=w)
    width = median_length_scale(X, recipe.seed)
    if recipe.objective == "median":
        return with_length_scale(recipe.kernel, width), float(recipe.regularization)
    return cross_validate(recipe.kernel, X, y, n_classes, width, recipe.seed, w)


def without_functions(recipe: Recipe) -> Recipe:
    """For workers: the schedule is a function that only the driver calls, and need not pickle."""
    return replace(recipe, schedule=None, features=None)


def with_length_scale(kernel: Kernel, width: float) -> Kernel:
    names = list(length_scale_names(kernel))
    if not names:
        raise ConfigError(f"{kernel!r} has no length scale to set; objectives 'median' and 'cv' require one")
    return kernel.replace({name: np.full(kernel.parameters[name].shape, width) for name in names})


def cross_validate(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    width: float,
    seed: int,
    weights: np.ndarray | None = None,
) -> tuple[Kernel, float]:
    """k-fold search over one common length scale and λ: the baseline of the paper."""
    from sklearn.model_selection import StratifiedKFold

    from kme_dist.backend import to_host

    folds = int(max(2, min(5, np.bincount(y)[np.unique(y)].min())))
    splits = list(StratifiedKFold(folds, shuffle=True, random_state=seed % 2**32).split(np.zeros(len(y)), y))
    grid = [(width * factor, float(lam)) for factor in (0.1, 0.3, 1.0, 3.0) for lam in 10.0 ** np.arange(-6.0, 1.0)]
    scores = []
    for scale, lam in grid:
        trial, hits = with_length_scale(kernel, scale), 0.0
        for train, test in splits:
            rows = select(X, train)
            own = None if weights is None else weights[train]
            V = exact_weights(trial, rows, y[train], n_classes, lam, row_weights=own)
            fitted = Embedding(trial, rows, V, lam)
            decided = to_host(fitted.decision(select(X, test))).argmax(axis=1)
            hits += float(((decided == y[test]) * (1 if weights is None else weights[test])).sum())
        scores.append(hits)
    scale, lam = grid[int(np.argmax(scores))]
    return with_length_scale(kernel, scale), lam
