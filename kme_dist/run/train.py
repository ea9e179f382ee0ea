"""From a data set to a fitted embedding: learn the kernel, compare candidates on a sample of rows, fit the best.

    recipe = Recipe(kernel, objective="auto", steps=300)
    candidates = learn_candidates(data, recipe, executor=executor)
    trained = fit_candidates(data, recipe, candidates, executor=executor, scratch="run/scratch")
    trained.fit.embedding, trained.best.name, trained.losses

With 40,000 rows or more "auto" also learns spectral features on all rows (`kme_dist.run.spectral`), and
keeps the embedding on them if its loss on held-out rows is lower than that of centres.

`Recipe` turns the settings of an estimator or a config into those of learning, both in memory and on a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from kme_dist.core import optim
from kme_dist.core.calibration import calibrated_loss
from kme_dist.core.features import Identity
from kme_dist.core.grid import cross_validate, with_length_scale
from kme_dist.core.kernels import Gaussian, Linear, Matern
from kme_dist.core.kernels.base import Kernel, length_scale_names, median_length_scale
from kme_dist.core.risk import positive_rows
from kme_dist.core.tuning import FINE, Tuned
from kme_dist.data.curves import Curves
from kme_dist.data.dataset import RowSource
from kme_dist.data.rows import RowsRef, Scaling, resolving_dtype
from kme_dist.errors import DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.distinct import as_distinct_rows
from kme_dist.run.executors import Executor
from kme_dist.run.fit import Fit, Size, choose, fit_on_dataset
from kme_dist.run.fit.problem import CENTRES, silent
from kme_dist.run.learn import learn_on_dataset
from kme_dist.run.learners import LearnSettings, Record
from kme_dist.run.maps import with_features
from kme_dist.run.means import random_features
from kme_dist.run.samples import (
    COMPARED_ROWS,
    curves_of_sample,
    lowers_loss,
    settle_on_sample,
    start_on_sample,
    tune_on_sample,
)
from kme_dist.run.spectral import NAME as SPECTRAL
from kme_dist.run.spectral import LearnedMap, SpectralSettings, learn_spectral

AUTO = "calibrated"  # the objective that "auto" learns under
SEARCHED = ("median", "cv")  # objectives that search on a sample
WHOLE_BATCH_ROWS = 1_000  # with more rows, steps use batches of this size
SAMPLE_ROWS = 1_500  # used in the search of "median" and "cv"
# Of "auto": rows of a batch (a quarter of all rows, within limits), those of a batch that are left out, most steps.
_AUTO_BATCH, _AUTO_EVALUATED, _AUTO_STEPS = (256, 1_000), 256, 100
_AUTO_PRODUCTS = 100_000_000
_COMPARED_TRIALS = 5  # candidates that may still win get as many again
_FEATURE_ROWS = 40_000  # with fewer, half of them as centres are quicker and about as good as learned features
_ROUGHER = 2.0  # length scales of Matérn 1/2, whose correlations fall at once, in those of a Gaussian


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
    scaling: str | None = "auto"
    solver: str = "auto"
    centres: int | None = None
    fit_seconds: float | None = None  # of the final solve under solver "auto"; None: a fixed amount of work
    memory: int | None = None  # bytes for the final solve on one worker; None: its share of the free memory
    dtype: str = "float32"
    seed: int = 0
    probability_floor: float | None = None
    features: Any = None  # a map applied to scaled rows, a number of random features for the fit, or "spectral"
    early_stopping: bool | str = "auto"  # stop at a plateau; "auto": all but the published objectives
    n_iter_no_change: int | None = None  # steps of a plateau; None: 50 under objective "auto", else 100
    warm: bool = False  # kernel and λ were learned before: "auto" starts from them, without a search
    curves: Curves | None = None  # of the rows that a warm kernel was learned from
    base: str = "unit"  # what scaling "auto" is for features without heavy tails
    profiles: bool = False  # "auto" also compares Matérn profiles of the learned length scales
    # Only in a config:
    batches_per_step: int = 1
    local_steps: int | None = None
    delay: int = 0
    schedule: Callable[[float, int], optim.Schedule] | None = None
    train_share: float | None = None
    backend: str = "numpy"
    fit: dict[str, Any] = field(default_factory=dict)  # further arguments of `fit_on_dataset`

    @property
    def objectives(self) -> tuple[str, ...]:
        """Objectives to learn under, one after the other; none for "median" and "cv"."""
        if self.objective in SEARCHED:
            return ()
        return (AUTO,) if self.objective == "auto" else (self.objective,)

    def settings(self, objective: str, rows: int) -> LearnSettings:
        """Settings for one objective. Unless set, learning stops at a plateau, but the published objectives run all
        steps, and "auto" a fixed number of them with a falling rate."""
        if self.objective == "auto":
            return self._auto_settings(objective, rows)
        as_published = self.objective in ("rcb", "erm")
        stops = not as_published if self.early_stopping == "auto" else bool(self.early_stopping)
        batch = WHOLE_BATCH_ROWS if self.batch_size is None and rows > WHOLE_BATCH_ROWS else self.batch_size
        return LearnSettings(
            objective=objective,
            risk=self.risk,
            complexity_weight=self.complexity_weight,
            steps=int(self.steps),
            batch_size=batch,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            optimizer=self.optimizer,
            train_share=0.5 if self.train_share is None else self.train_share,
            patience=(self.n_iter_no_change or 100) if stops else None,
            seed=self.seed,
            delay=self.delay,
        )

    def patience(self, phase: str, rows: int) -> int | None:
        """Steps of a plateau after which learning stops; None if it makes all steps."""
        return None if phase == SPECTRAL else self.settings(phase, rows).patience

    def _auto_settings(self, objective: str, rows: int) -> LearnSettings:
        """Small batches find the ratios of the length scales; their common factor is tuned afterwards. The prior on
        ratios fades quickly with more rows, since a loss that leaves rows out is optimistic about few of them."""
        smallest, largest = _AUTO_BATCH
        if len(names := length_scale_names(self.kernel)) == 1:  # a step costs batch² x features
            largest = max(smallest, min(largest, math.isqrt(_AUTO_PRODUCTS // self.kernel.parameters[names[0]].size)))
        batch = min(max(rows // 4, smallest), largest) if self.batch_size is None else self.batch_size
        own = self.local_steps or 1  # whole rounds of replicas
        most = max(_AUTO_STEPS - _AUTO_STEPS % own, own)
        return LearnSettings(
            objective=objective,
            risk=self.risk,
            steps=min(int(self.steps), most),
            batch_size=batch,
            learning_rate=self.learning_rate,
            schedule=self.schedule or _falling,
            optimizer=self.optimizer,
            evaluated=_AUTO_EVALUATED,
            prior_width=min(1.5, 0.3 * math.sqrt(rows / 300)),
            patience=(self.n_iter_no_change or 50) if self.early_stopping is True else None,
            seed=self.seed,
            delay=self.delay,
        )

    @property
    def flattens(self) -> bool:
        """Whether heavy tails of features may be flattened: under "auto", for a kernel of distances between rows."""
        free = self.scaling == "auto" and self.objective == "auto" and not self.warm
        distances = self.kernel.bounded and bool(length_scale_names(self.kernel))  # a linear kernel has length scales
        return free and distances and (self.features is None or type(self.features) is int)

    def scaling_of(self, source: RowSource, split: str | None, curves: Curves | None = None) -> Scaling:
        """What is applied to rows before the kernel."""
        kind = self.base if self.scaling == "auto" else self.scaling
        names = source.feature_names
        scaling = Scaling.of(source.split_statistics(split), kind, names, source.path).flattened(curves)
        later = isinstance(self.features, int) or self.learns_features  # drawn, or learned, after the kernel
        return scaling if later else with_features(scaling, self.features, self.seed)

    @property
    def learns_features(self) -> bool:
        return isinstance(self.features, str) and self.features == SPECTRAL

    def spectral(self, rows: int) -> SpectralSettings:
        """Settings of spectral features for a number of rows."""
        return SpectralSettings.of(rows, dtype=self.dtype, backend=self.backend, seed=self.seed)

    def compares_features(self, rows: int) -> bool:
        """Whether spectral features are a candidate besides kernels: under "auto", with enough rows that learning them
        does not take longer than the rest."""
        free = self.features is None and self.centres is None and self.solver == "auto" and self.profiles
        if not free or self.objective != "auto" or self.warm or not self.refit_regularization or rows < _FEATURE_ROWS:
            return False
        # Memory does not matter here: the same candidates everywhere.
        return choose("auto", Size(rows, dtype=self.dtype), seconds=self.fit_seconds).solver in ("nystrom", "falkon")

    def precision_for(self, source: RowSource, split: str | None) -> str:
        """The precision of scaled rows: double if single cannot resolve their differences."""
        return resolving_dtype(self.dtype, source, split, self.scaling)

    def floor(self, rows: float, n_classes: int) -> float:
        """The least probability of a label: n rows (or rows of weight n) cannot support anything rarer than
        1/(n + m)."""
        return 1.0 / (rows + n_classes) if self.probability_floor is None else float(self.probability_floor)


@dataclass(frozen=True)
class Candidate:
    """A kernel and a λ, ready for the fit."""

    name: str  # of the objective, or of the kind of kernel under "auto"
    kernel: Kernel
    regularization: float
    history: list[Record] = field(default_factory=list, repr=False)
    loss: float | None = None  # leave-one-out log loss on a sample of rows, if candidates were compared
    curves: Curves | None = None  # for rows with heavy tails, after scaling and before the kernel
    learned: LearnedMap | None = None  # features, instead of a kernel


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
    """Learn the kernel under the objective of the recipe. Under "auto" several candidates, the best one first.

    `checkpoints` returns the checkpoints for the name of an objective.
    """
    split = _resolved(dataset, split)
    if recipe.learns_features:
        return [_learned_features(dataset, recipe, executor, split, checkpoints, callback)]
    dataset, split = as_distinct_rows(dataset, split)
    rows = dataset.split_positive(split)
    kernel, lam = recipe.kernel, float(recipe.regularization)
    if recipe.steps == 0 and recipe.objective not in SEARCHED:
        return [Candidate("given", kernel, lam, curves=recipe.curves)]
    if recipe.objective in SEARCHED:
        kernel, lam = _searched(dataset, recipe, split, executor)
        return [Candidate(recipe.objective, kernel, lam)]
    common: Tuned | None = None
    curves = recipe.curves
    if recipe.objective == "auto":
        batch = min(recipe.settings(AUTO, rows).batch_size or rows, rows)
        if recipe.warm:
            lam = lam * rows / batch  # the same shift
        else:
            common, curves = _start(dataset, recipe, split, executor)
            kernel, lam = common.kernel, common.shift / batch
    found = []
    scaling, dtype = recipe.scaling_of(dataset, split, curves), recipe.precision_for(dataset, split)
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
        found.append(Candidate(name, learned.kernel, learned.regularization, learned.history, curves=curves))
    if recipe.objective == "auto":
        shift = found[0].regularization * batch
        if not recipe.refit_regularization:
            return [replace(found[0], regularization=shift / rows)]
        found = _compared(dataset, recipe, split, executor, replace(found[0], regularization=shift), common)
        if recipe.compares_features(rows):
            found.append(_learned_features(dataset, recipe, executor, split, checkpoints, callback))
    return found


def _learned_features(
    dataset: RowSource,
    recipe: Recipe,
    executor: Executor,
    split: str | None,
    checkpoints: Callable[[str], Checkpoints] | None,
    callback: Callable[[Record], None] | None,
) -> Candidate:
    learned = learn_spectral(
        dataset,
        recipe.spectral(dataset.split_positive(split)),
        executor=executor,
        split=split,
        checkpoints=None if checkpoints is None else checkpoints(SPECTRAL),
        callback=callback,
    )
    return Candidate(SPECTRAL, Linear(), 1e-6, learned.history, learned=learned)


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
    """Fit the candidate with the least leave-one-out loss on all rows; those without a loss are fitted to find it.

    `scratch` is a folder that the workers can reach; None if the executor works in this process.
    """
    assert dataset.classes is not None
    given = dataset, _resolved(dataset, split)
    learned = next((c.learned for c in candidates if c.learned is not None), None)
    source, split = given if learned is not None else as_distinct_rows(*given)
    if report is not None and (different := source.split_rows(split)) < (rows := dataset.split_rows(given[1])):
        report(f"fit: {different} of {rows} rows are different; copies are rows of larger weight")
    dtype = recipe.precision_for(source, split)
    floor = recipe.floor(source.split_weight(split), dataset.n_classes)

    def fitted(candidate: Candidate, retune: bool | str, centres: int | None = None) -> Fit:
        fit = fitted_to(source, split, candidate, retune, centres)
        if fit.statistics is not None and source is not dataset:  # sums of the chunks that are stored, to be updated
            return fitted_to(*given, candidate, retune, centres)
        return replace(fit, rows=dataset.split_rows(given[1]))

    def fitted_to(
        rows: RowSource, part: str | None, candidate: Candidate, retune: bool | str, centres: int | None
    ) -> Fit:
        form = _explicit(recipe, candidate, recipe.scaling_of(source, split, candidate.curves), source, split)
        fit = fit_on_dataset(
            rows,
            candidate.kernel,
            candidate.regularization / form.variance,
            executor=executor,
            scratch=scratch,
            split=part,
            scaling=form.scaling,
            dtype=dtype,
            backend=recipe.backend,
            solver=recipe.solver,
            centres=centres or recipe.centres,
            features=form.features,
            sampled=() if learned is None else learned.held,
            retune=retune,
            floor=floor,
            seed=recipe.seed,
            report=report,
            **{"seconds": recipe.fit_seconds, "memory": recipe.memory, **recipe.fit},
        )
        return replace(fit, regularization=fit.regularization * form.variance)

    if learned is not None:
        probe = recipe.solver == "auto" and recipe.centres is None
        return _fit_features_too(candidates, fitted, floor, probe, report or silent)
    as_given = recipe.objective == "cv" or (recipe.steps == 0 and recipe.objective != "median")
    if candidates[0].loss is not None:  # compared and tuned already
        best = min(candidates, key=lambda candidate: candidate.loss is None)
        losses = {c.name: c.loss for c in candidates if c.loss is not None}
        # Tuned for the exact kernel; with centres less may be better, which some solvers find out on the way.
        return Trained(best, fitted(best, "shared" if recipe.refit_regularization else False), losses, candidates)
    retune = not as_given and (recipe.refit_regularization or len(candidates) > 1)
    fits = [fitted(candidate, retune) for candidate in candidates]
    order = sorted(range(len(fits)), key=lambda i: math.inf if (loss := fits[i].loss) is None else loss)
    best, fit = candidates[order[0]], fits[order[0]]
    losses = {c.name: f.loss for c, f in zip(candidates, fits, strict=True) if f.loss is not None}
    if retune and not recipe.refit_regularization:
        fit = fitted(best, False)
    return Trained(best, fit, losses, candidates)


class _Fitted(Protocol):
    def __call__(self, candidate: Candidate, retune: bool | str, centres: int | None = None) -> Fit: ...


def _fit_features_too(
    candidates: list[Candidate], fitted: _Fitted, floor: float, probe: bool, report: Callable[[str], None]
) -> Trained:
    """Fit learned features and, if there are kernels, the best of them on centres; keep the one with the lower loss on
    the rows that the features were not learned from. With `probe` a few centres tell whether many can be better."""

    def loss(fit: Fit) -> float:
        found = fit.left_out
        return math.inf if found is None else calibrated_loss(found.decisions, found.codes, floor, found.weights)

    learned, *kernels = sorted(candidates, key=lambda candidate: candidate.learned is None)
    fits, losses = {learned.name: fitted(learned, True)}, dict[str, float]()
    losses[learned.name] = loss(fits[learned.name])
    for kernel in kernels[:1]:
        few = fitted(kernel, "shared", CENTRES) if probe else None
        if few is not None and _reached(few, loss(few)) > losses[learned.name]:
            losses[kernel.name] = loss(few)
            report(
                f"fit: {CENTRES} centres have a log loss of {losses[kernel.name]:.4f}; by what half of them have, "
                f"eight times as many would not reach {losses[learned.name]:.4f} of the learned features: not fitted"
            )
        else:
            fits[kernel.name] = fitted(kernel, "shared")
            losses[kernel.name] = loss(fits[kernel.name])
            shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
            report(f"fit: log loss of rows that no feature was learned from: {shown}")
    best = min((c for c in candidates if c.name in fits), key=lambda candidate: losses[candidate.name])
    return Trained(best, fits[best.name], losses, candidates)


def _reached(fit: Fit, loss: float) -> float:
    """What the loss of a fit would be with eight times the centres, if every doubling gains as the last one did and a
    tenth more."""
    now, before = fit.facts.get("loss", 1.0), fit.facts.get("loss_of_half_the_centres", 1.0)
    return 0.9 * loss * min(now / before, 1.0) ** 3 if before > 0 else 0.0


@dataclass(frozen=True)
class _Form:
    """What the fit solves for: weights of rows or centres (no features), or of explicit features."""

    scaling: Scaling
    features: Any = None
    variance: float = 1.0  # k(x, x') = variance φ(x)·φ(x'), so that λ for the features is λ / variance


def _explicit(recipe: Recipe, candidate: Candidate, scaling: Scaling, source: RowSource, split: str | None) -> _Form:
    """Explicit features if learned, if given (a map, or a number of random ones), or if the kernel is linear with fewer
    features than rows: then p x p equations are equivalent to n x n."""
    kernel = candidate.kernel
    if candidate.learned is not None:
        return _Form(candidate.learned.scaling, Identity())
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


# --- "auto" -----------------------------------------------------------------------------------------


def _falling(rate: float, steps: int) -> optim.Schedule:
    return optim.cosine_decay(rate, steps, floor=0.05)


def _start(dataset: RowSource, recipe: Recipe, split: str | None, executor: Executor) -> tuple[Tuned, Curves | None]:
    """The best common factor of the length scales and the best shift, for features as scaled and standardised; and
    curves for features with heavy tails, if the loss is lower with them by more than two standard errors."""
    rows, floor = _rows(dataset, recipe, split), recipe.floor(dataset.split_weight(split), dataset.n_classes)
    found, curves = [], None
    if recipe.flattens:
        curves = executor.map(curves_of_sample, [(rows, recipe.seed, recipe.base)], name="heavy-tails")[0]
    for own in (None, curves)[: 1 if curves is None else 2]:
        scaled = _rows(dataset, recipe, split, own)
        calls = [(scaled, recipe.kernel, spread, floor, recipe.seed) for spread in (False, True)]
        tried = executor.map(start_on_sample, calls, name="starting-point")
        found.append(min((tuned for tuned in tried if tuned is not None), key=lambda tuned: tuned.loss))
    if len(found) == 2 and lowers_loss(found[1], found[0]):
        return found[1], curves
    return found[0], None


def _compared(
    dataset: RowSource, recipe: Recipe, split: str | None, executor: Executor, learned: Candidate, common: Tuned | None
) -> list[Candidate]:
    """Candidates tuned on the same rows, the best one first; `regularization` of `learned` is a shift.

    The first candidate is replaced only by one that is better by more than the standard error of the difference: with
    few rows the least of several losses is mostly luck.
    """
    rows, floor = (
        _rows(dataset, recipe, split, learned.curves),
        recipe.floor(dataset.split_weight(split), dataset.n_classes),
    )
    trials = _variants(learned, common, recipe.profiles)
    common_arguments = (COMPARED_ROWS, _COMPARED_TRIALS, floor, recipe.seed)
    tuned = executor.map(tune_on_sample, [(rows, *own, FINE, *common_arguments) for _, *own in trials], name="tune")
    likely = [i for i, own in enumerate(tuned) if min(tuned, key=lambda t: t.loss).lead(own) < 2]
    finer = (FINE[0] / 2, FINE[1] / 2)
    calls = [(rows, tuned[i].kernel, tuned[i].shift, finer, *common_arguments) for i in likely]
    for i, better in zip(likely, executor.map(tune_on_sample, calls, name="tune"), strict=True):
        tuned[i] = better
    best = 0
    for i in likely:
        if tuned[i].loss < tuned[best].loss and tuned[i].lead(tuned[0]) > 1:
            best = i
    found = executor.map(settle_on_sample, [(rows, tuned[best], finer, floor, recipe.seed)], name="tune")[0]
    order = [best, *(i for i in range(len(tuned)) if i != best)]
    return [
        Candidate(
            trials[i][0],
            (found if i == best else tuned[i]).kernel,
            (found if i == best else tuned[i]).shift / rows.positive,
            learned.history if i == best else [],
            tuned[i].loss,
            learned.curves,
        )
        for i in order
    ]


def _variants(learned: Candidate, common: Tuned | None, profiles: bool) -> list[tuple[str, Kernel, float]]:
    """Name, kernel and shift of what is compared."""
    own, shift = learned.kernel, learned.regularization
    if not (profiles and isinstance(own, Gaussian)):
        found = [("learned", own, shift)]
        return found if common is None else [*found, ("common", common.kernel, common.shift)]
    rough = Matern(length_scale=own.length_scale, scale=own.scale, nu=1.5)
    rougher = Matern(length_scale=_ROUGHER * np.asarray(own.length_scale), scale=own.scale, nu=0.5)
    found = [("learned matern-3/2", rough, shift), ("learned gaussian", own, shift)]
    found.append(("learned matern-1/2", rougher, shift))
    if common is not None and isinstance(common.kernel, Gaussian):
        plain = Matern(length_scale=common.kernel.length_scale, scale=common.kernel.scale, nu=1.5)
        found.append(("common matern-3/2", plain, common.shift))
    return found


def gaussian_of(profile: Matern) -> Gaussian:
    """The Gaussian kernel that a Matérn candidate was made from, up to the factor of its tuning."""
    factor = _ROUGHER if profile.nu == 0.5 else 1.0
    return Gaussian(length_scale=np.asarray(profile.length_scale) / factor, scale=profile.scale)


def _rows(dataset: RowSource, recipe: Recipe, split: str | None, curves: Curves | None = None) -> RowsRef:
    scaling, dtype = recipe.scaling_of(dataset, split, curves), recipe.precision_for(dataset, split)
    return RowsRef.of(dataset, split=split, scaling=scaling, dtype=dtype, classes=True).with_positive_weight()


# --- objectives that search -------------------------------------------------------------------------


def _searched(dataset: RowSource, recipe: Recipe, split: str | None, executor: Executor) -> tuple[Kernel, float]:
    """Kernel and λ by a search on a sample of rows, on one worker."""
    call = (_rows(dataset, recipe, split), without_functions(recipe))
    return executor.map(search_on_sample, [call], name="starting-point")[0]


def search_on_sample(rows: RowsRef, recipe: Recipe) -> tuple[Kernel, float]:
    """Kernel and λ for a random sample of rows. Runs on a worker."""
    plan = rows.plan(SAMPLE_ROWS, recipe.seed)
    X, y, w = positive_rows(*rows.batch(plan, 0), rows.batch_weights(plan, 0))
    n_classes = rows.n_classes
    if recipe.objective == "median" and not hasattr(X, "dtype"):
        return recipe.kernel, float(recipe.regularization)  # no distances of texts, sequences or bags
    width = median_length_scale(X, recipe.seed)
    if recipe.objective == "median":
        return with_length_scale(recipe.kernel, width), float(recipe.regularization)
    return cross_validate(recipe.kernel, X, y, n_classes, width, recipe.seed, w)


def without_functions(recipe: Recipe) -> Recipe:
    """For workers: the schedule is a function that only the driver calls, and need not pickle."""
    return replace(recipe, schedule=None, features=None)
