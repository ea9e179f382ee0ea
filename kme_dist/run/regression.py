"""From rows with numeric targets to a fitted regressor: learn the kernel, compare profiles, fit, leave rows out.

    target = target_of(rows, executor)                                   mean and deviation of the targets
    candidates = learn_regression(data, recipe, executor=executor)       the best one first
    fit = fit_regression(data, recipe, candidates[0], executor=executor)
    fit.embedding, fit.left_out, fit.solver, fit.reason

The kernel starts from a common length scale and is learned by the leave-one-out squared error on batches
(`kme_dist.core.squared`), first as a Matérn kernel of smoothness 3/2. Its length scales are then tried in a Gaussian
and in rougher and smoother Matérn kernels, each tuned on the same rows; the best of them is learned further and tuned
on more rows. Results depend on data and settings, never on the executor.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads, to_host
from kme_dist.core import optim
from kme_dist.core.embedding import Embedding
from kme_dist.core.intervals import LeftOut, Near
from kme_dist.core.kernels import Gaussian, Matern
from kme_dist.core.kernels.base import Kernel, row_count, select
from kme_dist.core.objective import Objective, Workspace
from kme_dist.core.pivots import choose_centres
from kme_dist.core.regularization import search_regularization
from kme_dist.core.risk import positive_rows, row_keys, weight_of_copies
from kme_dist.core.squared import distinct_rows, in_order, solve_rows, squared_objective, tune_squared
from kme_dist.core.sums import Centres, Sums, Values, sum_rows
from kme_dist.core.tuning import START_SHIFT, Tuned, at_median_distance
from kme_dist.data.curves import Curves
from kme_dist.data.dataset import RowSource
from kme_dist.data.places import Place
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.data.statistics import Statistics
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.conditional import Inverse, Pairs, padded_factor, sampled_columns
from kme_dist.run.executors import Executor
from kme_dist.run.fit import Problem, Size, choose, falkon
from kme_dist.run.fit.problem import CENTRES, Room, silent
from kme_dist.run.learn import Batches, learn
from kme_dist.run.learners import (
    STEP_TOLERANCE,
    LearnSettings,
    Record,
    assemble,
    log_parameters,
    within_limits,
)
from kme_dist.run.means import BLOCK_ROWS
from kme_dist.run.samples import curves_of_sample, lowers_loss
from kme_dist.run.scratch import Scratch
from kme_dist.run.train import AUTO, Candidate, Recipe
from kme_dist.run.trainer import LengthScalePrior

PHASE, PROFILE_PHASE = "squared error", "squared error, best profile"
SOLVERS = ("cholesky", "tiled", "pcg", "nystrom", "falkon")
LEFT_OUT_ROWS = 1_000  # for intervals
_COMPARED_ROWS, _TUNED_ROWS = (1_000, 500), (2_000, 1_000)  # rows, and how many of them are left out
_START_TRIALS, _COMPARED_TRIALS, _TUNED_TRIALS = 8, 5, 6
_FIRST_SHARE = 0.6  # of the steps, under the first profile
# Name, smoothness (None: Gaussian), and length scales in those of Matérn 3/2.
_PROFILES = (("matern-5/2", 2.5, 0.8), ("gaussian", None, 0.5), ("matern-1/2", 0.5, 5.0))
_CENTRE_SAMPLE = 20_000  # rows to choose centres from
_LEVERAGE_ROWS = 2_000  # evaluated for λ, with centres
_LEAST_HELD_FROM = 20  # rows, of which some can be held out
_SLAB_ROWS = 2_048
_LEARNED_ROWS = 25  # with fewer different rows, a common factor of the length scales is all they can tell
_local = threading.local()  # memory for a Gram matrix, kept between batches by each thread
_DOUBLE_ROWS = 1_000  # up to that, double precision takes no time worth saving


@dataclass(frozen=True)
class Target:
    """Targets are learned as (y - mean) / width, output by output."""

    mean: np.ndarray
    width: np.ndarray

    def standardised(self, y: Any) -> np.ndarray:
        found: np.ndarray = (np.asarray(y, np.float64).reshape(len(y), -1) - self.mean) / self.width
        return found

    def restored(self, values: np.ndarray) -> np.ndarray:
        found: np.ndarray = values * self.width + self.mean
        return found

    @property
    def scale(self) -> Any:
        """Shift and factor for batches: numbers for one output, else arrays."""
        factor = 1 / self.width
        return (float(self.mean[0]), float(factor[0])) if len(factor) == 1 else (self.mean, factor)


@dataclass(frozen=True)
class RegressionFit:
    """A fitted regressor of standardised targets, and how it was solved."""

    embedding: Embedding
    left_out: LeftOut
    target: Target
    scaling: Scaling
    regularization: float
    solver: str
    reason: str
    loss: float  # mean squared leave-one-out error of the rows left out, in units of the targets' variance
    rows: int
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RegressionLearner:
    """Evaluates a batch by its leave-one-out squared error; targets are standardised."""

    kernel: Kernel
    settings: LearnSettings

    def evaluate(
        self, parameters: optim.Named, X: Any, y: np.ndarray, number: int, weights: np.ndarray | None = None
    ) -> Objective:
        kernel, lam = assemble(self.kernel, parameters)
        X, Y, w, *_ = distinct_rows(X, y.reshape(len(y), -1), weights)
        # Other rows are left out in every step, also if every batch has all rows.
        order = in_order(X, Y)[np.random.default_rng([self.settings.seed, number, 1]).permutation(len(Y))]
        return squared_objective(
            kernel,
            select(X, order),
            Y[order],
            regularization=lam,
            evaluated=self.settings.evaluated,
            workspace=_local.__dict__.setdefault("workspace", Workspace()),
            weights=None if w is None else w[order],
            tolerance=STEP_TOLERANCE,
        )

    def describe(self) -> dict[str, Any]:
        return {"kind": "regression", "kernel": self.kernel.to_config()}


# --- rows -------------------------------------------------------------------------------------------------------------


def numeric_rows(
    source: RowSource, recipe: Recipe, split: str | None = "auto", curves: Curves | None = None
) -> RowsRef:
    """The rows of a split, scaled; their labels must be numbers."""
    if source.classes is not None:
        raise DataError(
            f"{source.path} has class labels, and regression requires numbers; ingest it with the task regression"
        )
    split = source.training_split(split)
    scaling, dtype = recipe.scaling_of(source, split, curves), recipe.precision_for(source, split)
    if source.split_rows(split) <= _DOUBLE_ROWS:
        dtype = "float64"
    rows = RowsRef.of(source, split=split, scaling=scaling, dtype=dtype).with_positive_weight()
    if rows.count < 2:
        raise DataError(f"{source.path}: learning requires at least two rows, found {rows.count}")
    return rows


def target_of(rows: RowsRef, executor: Executor) -> Target:
    """Weighted mean and deviation of the targets; 1 for an output that is constant."""
    calls = [(part,) for part in rows.parts(BLOCK_ROWS)]
    return target_from(executor.map_reduce(target_moments, calls, Statistics.__add__, name="target-moments"), rows.path)


def target_from(found: Statistics, path: str) -> Target:
    """The same from the statistics of targets; DataError if their squares overflow."""
    with np.errstate(invalid="ignore"):
        width = np.sqrt(found.variance)
    if not np.isfinite(width).all():
        raise DataError(
            f"{path}: the variance of the targets overflows; they must be below 1e150, divide them by a constant"
        )
    return Target(found.mean, np.where(width > 1e-12 * np.abs(found.mean), width, 1.0))


def target_moments(rows: RowsRef) -> Statistics:
    y = rows.read_labels(0, rows.count)
    if y is None or np.asarray(y).dtype.kind not in "biuf":
        raise DataError(f"{rows.path} has no numeric targets; ingest it again with the column named by `label`")
    return Statistics.of(np.asarray(y, np.float64).reshape(len(y), -1), rows.weights())


def _sample(
    rows: RowsRef, target: Target, size: int, seed: int, curves: Curves | None
) -> tuple[Any, np.ndarray, np.ndarray | None, float]:
    """Random rows in random order, equal ones merged, with standardised targets; weights of mean 1 (None: all equal),
    and what Wλ is to be divided by for the shift of these rows. The same rows in the same order with curves."""
    plan = rows.plan(size, seed)
    X, y, w = positive_rows(*rows.batch(plan, 0), rows.batch_weights(plan, 0))
    X, Y, w, _, first = distinct_rows(X, target.standardised(y), w)
    order = in_order(X, Y)[np.random.default_rng([seed, 3]).permutation(len(Y))]
    if curves is not None and rows.scale is not None:
        flat = replace(rows, scale=rows.scale.flattened(curves), token=f"{rows.token}-flat")
        X, _, _ = positive_rows(*flat.batch(plan, 0), flat.batch_weights(plan, 0))
        X = X if first is None else select(X, first)
    if w is None:
        return select(X, order), Y[order], None, 1.0
    return select(X, order), Y[order], w[order] / w.mean(), float(w.mean())


# --- learning ---------------------------------------------------------------------------------------------------------


def learn_regression(
    source: RowSource,
    recipe: Recipe,
    *,
    executor: Executor,
    split: str | None = "auto",
    checkpoints: Callable[[str], Checkpoints] | None = None,
    callback: Callable[[Record], None] | None = None,
) -> list[Candidate]:
    """Learn the kernel and λ; several candidates, the best one first, each with its leave-one-out error on a sample.

    With `steps=0` kernel and λ are those of the recipe; with `profiles` it may become a kernel of another profile.
    """
    kernel, lam = recipe.kernel, float(recipe.regularization)
    if recipe.steps == 0:
        return [Candidate("given", kernel, lam, curves=recipe.curves)]
    rows, curves = numeric_rows(source, recipe, split), recipe.curves
    target, n, W = target_of(rows, executor), rows.positive, float(rows.weight)
    settings = recipe.settings(AUTO, round(W))
    batch = min(settings.batch_size or n, n)
    unit = batch * (W / n)  # Σ w of a batch
    history: list[Record] = []

    def tuned(calls: list[tuple[Kernel, float]], size: tuple[int, int], trials: int, fine: bool) -> list[Tuned]:
        common = (size, trials, fine, recipe.seed, curves)
        return executor.map(tune_on_sample, [(rows, target, *own, *common) for own in calls], name="tune")

    def learned(start: Kernel, shift: float, steps: int, phase: str) -> tuple[Kernel, float]:
        assert rows.scale is not None
        if not steps:
            return start, shift
        own = replace(settings, steps=steps, frozen=("scale",) if "scale" in start.parameters else ())
        own = replace(own, seed=own.seed + (phase == PROFILE_PHASE))  # other batches than before
        batches = Batches.of(
            source, batch_size=batch, seed=own.seed, split=split, scaling=rows.scale.flattened(curves),
            dtype=rows.dtype, target=target.scale,
        )  # fmt: skip
        first = log_parameters(start, shift / unit)
        found = learn(
            RegressionLearner(start, own), batches, first, own,
            executor=executor, batches_per_step=recipe.batches_per_step,
            checkpoints=None if checkpoints is None else checkpoints(phase.replace(", ", "-").replace(" ", "-")),
            callback=None if callback is None else lambda record, _: callback(record),
            prior=LengthScalePrior(start, first, own, batches.count, batches.rows.weight),
            after=functools.partial(within_limits, round(unit)), phase=phase, keep_history=False,
        )  # fmt: skip
        history.extend(found.history)
        kernel, lam = assemble(start, found.parameters)
        return kernel, lam * unit

    if recipe.warm:
        start = Tuned(kernel, lam * W, math.inf, np.empty(0), 0)
    else:
        start = tuned([(kernel, math.nan)], _COMPARED_ROWS, _START_TRIALS, False)[0]
        if recipe.flattens:
            curves = executor.map(curves_of_sample, [(rows, recipe.seed, recipe.base)], name="heavy-tails")[0]
        if curves is not None:
            flat = tuned([(kernel, math.nan)], _COMPARED_ROWS, _START_TRIALS, False)[0]
            start, curves = (flat, curves) if lowers_loss(flat, start) else (start, None)
    if not recipe.warm and len(start.losses) < _LEARNED_ROWS:
        return [Candidate("common", start.kernel, start.shift / W, [], start.loss, curves)]
    first_steps = max(1, round(_FIRST_SHARE * settings.steps)) if recipe.profiles else settings.steps
    own = learned(start.kernel, start.shift, first_steps, PHASE)
    variants = _variants(*own, recipe.profiles)
    found = tuned([(k, shift) for _, k, shift in variants], _COMPARED_ROWS, _COMPARED_TRIALS, True)
    if not recipe.warm:
        variants.append(("common", start.kernel, start.shift))
        found.append(start)  # tuned on the same rows
    best = _best(found)
    kernel, shift = found[best].kernel, found[best].shift
    if recipe.profiles and variants[best][0] != "common":
        kernel, shift = learned(kernel, shift, settings.steps - first_steps, PROFILE_PHASE)
    last = tuned([(kernel, shift)], _TUNED_ROWS if n > _COMPARED_ROWS[0] else _COMPARED_ROWS, _TUNED_TRIALS, True)[0]
    order = [best, *(i for i in range(len(found)) if i != best)]
    chosen = {i: (last if i == best else found[i]) for i in order}
    return [
        Candidate(name, tuned.kernel, tuned.shift / W, history if i == best else [], found[i].loss, curves)
        for i, name, tuned in ((i, variants[i][0], chosen[i]) for i in order)
    ]


def tune_on_sample(
    rows: RowsRef,
    target: Target,
    kernel: Kernel,
    shift: float,
    size: tuple[int, int],
    trials: int,
    fine: bool,
    seed: int,
    curves: Curves | None = None,
) -> Tuned:
    """Runs on a worker; `shift` is Wλ. With a shift of NaN the kernel starts at the median distance between rows."""
    X, Y, w, unit = _sample(rows, target, size[0], seed, curves)
    if math.isnan(shift):
        kernel = at_median_distance(kernel, X, seed, factor=1.5)
        shift = START_SHIFT * (kernel.alpha(X) ** 2 or 1.0) * unit
    found = tune_squared(
        kernel, X, Y, shift=shift / unit, trials=trials, evaluated=size[1], weights=w,
        steps=(0.3, 0.8) if fine else (0.6, 1.6), tolerance=STEP_TOLERANCE,
    )  # fmt: skip
    return replace(found, shift=found.shift * unit)


def _variants(kernel: Kernel, shift: float, profiles: bool) -> list[tuple[str, Kernel, float]]:
    """Name, kernel and shift of what is compared: the learned kernel first."""
    if not (profiles and isinstance(kernel, Matern)):
        return [("learned", kernel, shift)]
    found: list[tuple[str, Kernel, float]] = [("matern-3/2", kernel, shift)]
    for name, nu, factor in _PROFILES:
        own = factor * np.asarray(kernel.length_scale)
        made = Gaussian(length_scale=own, scale=kernel.scale)
        found.append((name, made if nu is None else Matern(length_scale=own, scale=kernel.scale, nu=nu), shift))
    return found


def _best(found: list[Tuned]) -> int:
    """The least error, if it is below that of the first by more than the standard error of the difference."""
    least = min(range(len(found)), key=lambda i: found[i].loss)
    gain, error = found[0].gain(found[least])
    return least if gain > max(error, 1e-6 * found[0].loss) else 0


# --- the fit ----------------------------------------------------------------------------------------------------------


def fit_regression(
    source: RowSource,
    recipe: Recipe,
    candidate: Candidate,
    *,
    executor: Executor,
    split: str | None = "auto",
    scratch: str | Path | Place | None = None,
    report: Callable[[str], None] | None = None,
) -> RegressionFit:
    """Solve for the weights on all rows of a split, exactly if that is affordable, else on centres.

    `scratch` is a folder that driver and workers can reach, None if the executor works in this process; only solver
    "falkon" uses it, and resumes from what an interrupted fit left there.
    """
    began, report = time.perf_counter(), report or silent
    rows = numeric_rows(source, recipe, split, candidate.curves)
    target, n = target_of(rows, executor), rows.positive
    exchanged = Scratch.at(scratch)
    room = Room.of(executor, exchanged, recipe.memory)
    size = Size(n, len(target.mean), width=max(1, source.features), dtype=rows.dtype)
    chosen = choose(recipe.solver, size, recipe.centres, None, room, recipe.fit_seconds, iterate=False)
    if chosen.solver not in SOLVERS:
        raise ConfigError(f"solver={chosen.solver!r} requires classes; choose 'auto', {', '.join(map(repr, SOLVERS))}")
    report(f"fit: {chosen.solver} on {rows.count} rows ({chosen.reason})")
    common = _Fit(rows, target, candidate.kernel, candidate.regularization, recipe, executor)
    centres = min(chosen.centres or recipe.centres or CENTRES, n)
    if chosen.solver == "nystrom" and centres < n:
        fit = common.on_centres(centres)
    elif chosen.solver == "falkon" and centres < n >= _LEAST_HELD_FROM:
        fit = common.on_many_centres(centres, room.task, exchanged, report)
    elif chosen.solver in ("tiled", "pcg"):
        fit = common.out_of_core(chosen.solver)
    else:
        fit = common.exact()
    return replace(
        fit, solver=chosen.solver, reason=chosen.reason, rows=rows.count, seconds=time.perf_counter() - began
    )


@dataclass(frozen=True)
class _Fit:
    rows: RowsRef
    target: Target
    kernel: Kernel
    regularization: float
    recipe: Recipe
    executor: Executor

    def exact(self) -> RegressionFit:
        call = (self.rows, self.target, self.kernel, self.regularization, self.recipe.seed)
        V, left, X, dtype = self.executor.map(solve_on_worker, [call], name="fit-cholesky")[0]
        return self._made(X, V, left, self.regularization, {"factorised_in": dtype})

    def out_of_core(self, solver: str) -> RegressionFit:
        """Tiles, or conjugate gradients, over the stored rows; each row left out takes a column of A⁻¹."""
        if self.rows.weighted:
            raise ConfigError(f"solver={solver!r} does not take weights of rows here; use 'cholesky' or 'nystrom'")
        rows = self.rows.in_precision("float64")
        inverse = Inverse(
            Pairs(rows, None), self.kernel, self.regularization, solver, executor=self.executor,
            tolerance=self.recipe.fit.get("tolerance") or 1e-6, seed=self.recipe.seed,
            tile_rows=self.recipe.fit.get("tile_rows"), memory=self.recipe.memory,
        )  # fmt: skip
        X, y = rows.read()
        Y = self.target.standardised(y)
        distinct = distinct_rows(X, Y, None)
        with blas_threads(1):
            V = inverse.solve(np.concatenate([Y, np.ones((len(Y), 1))], axis=1))
            chosen, columns, own = sampled_columns(inverse, len(X), self.regularization, self.recipe.seed, distinct)
            e = V[chosen] / own[:, None]
            near = Near(V[:, -1], np.mean(np.abs(Y), axis=0))
            Z = np.asarray(self.kernel.gram(X[chosen], X))
            left = LeftOut.of(columns, Z, e[:, :-1], near, 1 - e[:, -1])
        return self._made(X, V[:, :-1], left, self.regularization, {})

    def on_centres(self, count: int) -> RegressionFit:
        """Sums over rows, then systems of the size of the centres here; λ is retuned by leave-one-out of a sample."""
        rows, seed = self.rows.in_precision("float64"), self.recipe.seed
        how = self.recipe.fit.get("centre_choice") or "rpcholesky"
        call = (rows, self.kernel, count, how, seed)
        C = self.executor.map(centres_on_worker, [call], name="choose-centres")[0]
        X, Y, drawn = _left_out_sample(rows, self.target, seed)
        keys = row_keys(X, Y)
        basis = Centres(self.kernel, C)
        calls = [(basis, part, self.target, keys) for part in rows.parts(BLOCK_ROWS)]
        sums, copies = self.executor.map_reduce(sum_part, calls, _add_sums, name="regression-sums")
        W, w = sums.weight, copies / weight_of_copies(keys, keys, None)  # of the rows that are left out together
        Y = np.concatenate([Y, np.ones((len(Y), 1))], axis=1)
        with blas_threads(1):
            M = np.asarray(basis.metric(), np.float64)
            Z = np.asarray(basis.rows(X), np.float64)

            def solved(lam: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
                """V, A⁻¹ Zᵀ diag(w) and the leave-one-out residuals of the sample; the last target is 1."""
                factor = padded_factor(sums.G + W * lam * M)
                V = np.asarray(factor.solve(sums.B))
                columns = np.asarray(factor.solve(Z.T)) * w
                room = np.maximum(1 - np.sum(columns * Z.T, axis=0), 1e-6)
                return V, columns, (Y - Z @ V) / room[:, None]

            def errors(lams: list[float]) -> list[float]:
                return [float(np.average(np.mean(solved(lam)[2][:, :-1] ** 2, axis=1), weights=drawn)) for lam in lams]

            lam = self.regularization
            if self.recipe.refit_regularization and self.recipe.steps:
                scale = float(np.mean(self.kernel.diag(X))) or 1.0
                lam, _, _ = search_regularization(errors, scale=scale / W, start=lam)
            V, columns, e = solved(lam)
            few = _some(len(Y), drawn, seed)
            near = Near(V[:, -1], np.average(np.abs(Y[:, :-1]), axis=0, weights=drawn))
            left = LeftOut.of(columns[:, few], Z[few], e[few, :-1], near, 1 - e[few, -1])
        return self._made(C, V[:, :-1], left, lam, {"centres": row_count(C), "centre_choice": how})

    def on_many_centres(self, count: int, room: int, scratch: Scratch, report: Callable[[str], None]) -> RegressionFit:
        """Conjugate gradients; rows held out end them, choose λ, and have the residuals."""
        given, seed, lam = self.recipe.fit, self.recipe.seed, self.regularization
        problem = Problem(
            self.rows, self.kernel, self.executor, scratch, room, seed=seed, tolerance=given.get("tolerance") or 1e-6,
            tile_rows=given.get("tile_rows"), centres=count, centre_choice=given.get("centre_choice") or "auto",
            retune=self.recipe.refit_regularization and self.recipe.steps > 0, target=self.target, report=report,
        )  # fmt: skip
        solved = falkon.prepare(problem).solve(lam)
        held, lam = solved.left_out, solved.regularization or lam
        assert held is not None
        Y = self.target.standardised(held.codes)
        typical = np.average(np.abs(Y), axis=0, weights=held.weights)
        X, E, w = positive_rows(held.rows, Y - held.decisions, held.weights)
        drawn = np.random.default_rng([seed, 6]).choice(
            len(E), min(LEFT_OUT_ROWS, len(E)), replace=False, p=None if w is None else w / w.sum()
        )
        with blas_threads(1):
            left = LeftOut.of_held_out(self.kernel, X[drawn], E[drawn], lam * float(self.rows.weight), typical)
        facts = {**solved.facts, "centres": count, "iterations": solved.iterations}
        return self._made(solved.embedding.centres, solved.weights, left, lam, facts)

    def _made(self, X: Any, V: np.ndarray, left: LeftOut, lam: float, facts: dict[str, Any]) -> RegressionFit:
        assert self.rows.scale is not None
        loss = float(np.mean(left.residuals**2))
        return RegressionFit(
            Embedding(self.kernel, X, V, lam), left, self.target, self.rows.scale, lam, "", "", loss, 0, facts=facts
        )


def solve_on_worker(
    rows: RowsRef, target: Target, kernel: Kernel, lam: float, seed: int
) -> tuple[np.ndarray, LeftOut, Any, str]:
    X, y, w = positive_rows(*rows.read(), rows.weights())
    own = None if w is None else w / w.mean()
    Y = target.standardised(y)
    solved = solve_rows(kernel, X, Y, row_count(X) * lam, own, LEFT_OUT_ROWS, seed)
    Z = np.asarray(kernel.gram(select(X, solved.chosen), X), solved.columns.dtype)
    near = Near(solved.ones, np.average(np.abs(Y), axis=0, weights=w))
    left = LeftOut.of(solved.columns, Z, solved.residuals, near, solved.ones_left)
    return solved.weights, left, X, solved.dtype


def centres_on_worker(rows: RowsRef, kernel: Kernel, count: int, how: str, seed: int) -> Any:
    X, _, _ = _drawn(rows, max(_CENTRE_SAMPLE, 3 * count), seed)
    return to_host(select(X, choose_centres(kernel, X, min(count, row_count(X)), how, seed)))


def sum_part(basis: Centres, rows: RowsRef, target: Target, keys: np.ndarray) -> tuple[Sums, np.ndarray]:
    """Sums for standardised targets, and for one more that is 1; and the weight of the rows that have these keys."""
    X, y, w = positive_rows(*rows.read(), rows.weights())
    Y = target.standardised(y)
    copies = weight_of_copies(keys, row_keys(X, Y), w)
    Y = np.concatenate([Y, np.ones((len(y), 1))], axis=1)
    return sum_rows(basis, X, Y, Values(len(target.mean) + 1), tile_rows=_SLAB_ROWS, weights=w), copies


def _add_sums(left: tuple[Sums, np.ndarray], right: tuple[Sums, np.ndarray]) -> tuple[Sums, np.ndarray]:
    return left[0] + right[0], left[1] + right[1]


def _left_out_sample(rows: RowsRef, target: Target, seed: int) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """Random rows to leave out, copies merged, with standardised targets, and their weights in the sample (None: all
    equal)."""
    X, y, w = _drawn(rows, _LEVERAGE_ROWS, seed)
    X, Y, w, *_ = distinct_rows(X, target.standardised(y), w)
    return X, Y, w


def _some(rows: int, weights: np.ndarray | None, seed: int) -> np.ndarray:
    """Up to LEFT_OUT_ROWS of them, drawn in proportion to their weights: a sample in order would be one end of it."""
    count = min(LEFT_OUT_ROWS, rows)
    p = None if weights is None or count == rows else weights / weights.sum()
    return np.sort(np.random.default_rng([seed, 6]).choice(rows, count, replace=False, p=p))


def _drawn(rows: RowsRef, size: int, seed: int) -> tuple[Any, np.ndarray, np.ndarray | None]:
    return positive_rows(*rows.sample(size, seed), rows.sample_weights(size, seed))
