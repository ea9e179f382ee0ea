"""What learn, fit and predict of a config cost on any number of workers: `kme-dist plan CONFIG --workers --rows`.

Counts follow from the config and the number of rows, also where there are no such rows yet; the time follows from the
counts and the constants of a machine by `kme_dist.run.scaling_model`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.config import Config
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import CACHE_BYTES, RowSource
from kme_dist.errors import ConfigError
from kme_dist.pipelines import recipes
from kme_dist.run.fit import SOLVERS, Choice, Room, Size, choose
from kme_dist.run.learn import Batches, kernel_batches
from kme_dist.run.learners import KernelLearner
from kme_dist.run.machine import measured_machine
from kme_dist.run.scaling_model import PROCESS_BYTES, Estimate, Machine, Pass, Stage, estimate
from kme_dist.run.spectral import SpectralWork
from kme_dist.run.train import AUTO, Recipe

# n x n matrices held at a time, by objective
MATRICES = {"rcb": 1, "erm": 1, "validation": 2, "loo": 4, "calibrated": 4}
PREDICTED_ROWS = 8_192  # of a prediction task, where the rows have no chunks
_MADE_UP_ROWS = 4_000
_BACKWARD = 3  # a gradient costs two more products of the same size for each one of the value
BatchSeconds = Callable[[KernelLearner, Any, float], float]


@dataclass(frozen=True)
class Scenario:
    """Rows and workers that need not exist; None: those of the data set and of the config."""

    workers: int | None = None
    rows: int | None = None
    features: int | None = None
    classes: int | None = None
    machine: str | None = None  # a JSON file of constants

    def __post_init__(self) -> None:
        for key in ("workers", "rows", "features", "classes"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key}={value}: must be an integer >= 1")

    def constants(self) -> Machine:
        """Of the file, or measured here."""
        if self.machine is None:
            return measured_machine()
        try:
            given = json.loads(Path(self.machine).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"machine: {self.machine} is not a readable JSON file: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"machine: {self.machine} must hold one JSON object, as `kme-dist plan --measure` prints")
        return Machine.from_mapping(given)


def made_up(scenario: Scenario, data: RowSource | None = None) -> ArrayRows:
    """A few rows with the features and classes of a scenario; what it lacks is that of a data set, or as usual."""
    features = scenario.features or (50 if data is None else data.features)
    classes = scenario.classes or (10 if data is None else max(2, data.n_classes))
    X = np.random.default_rng(0).random((_MADE_UP_ROWS, features), dtype=np.float32)
    return ArrayRows(X, np.arange(len(X)) % classes, classes=range(classes))


def stages(
    config: Config, data: RowSource, rows: int, room: int | None, batch_s: BatchSeconds | None = None
) -> list[Stage]:
    """Learn, fit and predict for `rows` rows like those of `data`; `batch_s` measures a batch instead of counting."""
    recipes.check(config)
    settings = recipes.starts_of(config, data.features)[0].settings
    if config.model.kind == "mce":
        recipe = recipes.recipe_of(config, settings, data)
        if recipe.learns_features:
            return _spectral(recipe, data, rows)
        learned = _learn_features(config, data, rows) if config.model.features else _learn_kernel
        learn = learned if isinstance(learned, Stage) else learned(recipe, data, rows, batch_s)
        features, dtype = recipes.feature_map_of(config, data.features), recipe.dtype
        solver, centres, seconds = recipe.solver, recipe.centres, config.fit.fit_seconds
    elif config.model.kind == recipes.REGRESSION:
        recipe = recipes.recipe_of(config, settings, data)
        learn, features, dtype = _learn_regression(recipe, data, rows), None, recipe.dtype
        solver, centres, seconds = recipe.solver, recipe.centres, config.fit.fit_seconds
    else:
        model = recipes.estimator_of(config, settings)
        learn, features, dtype = _learn_network(model, data, rows), _network(model, data), model.dtype
        solver, centres, seconds = "features", None, None
    size, numeric = _size(data, rows, dtype), config.model.kind == recipes.REGRESSION
    chosen = choose(solver, size, centres, features, Room.of_workers(room), seconds, iterate=not numeric)
    width = _width(features, data)
    size = replace(size, basis=width if features is not None else min(chosen.centres or rows, rows))
    fit = _fit(chosen, size) if config.model.kind != "askl" else Stage("fit", rows, (), PROCESS_BYTES, "none needed")
    if config.model.kind == "mce" and recipe.compares_features(rows):
        learned, solved, _ = _spectral(recipe, data, rows)
        learn, fit = _together(learn, learned), _together(fit, solved)
    return [learn, fit, _predict(size, getattr(data, "output_rows", PREDICTED_ROWS), features)]


def _together(one: Stage, other: Stage) -> Stage:
    """One after the other, in the same stage."""
    held, note = max(one.worker_bytes, other.worker_bytes), f"{one.note}; compared with {other.note}"
    return Stage(one.name, one.rows, (*one.passes, *other.passes), held, note)


def estimates(found: list[Stage], machine: Machine, workers: int, room: int | None) -> list[dict[str, Any]]:
    """The cost of each stage, as plain data with few digits; ConfigError if one does not fit the workers."""
    for stage in found:
        if room is not None and stage.worker_bytes > room:
            raise ConfigError(
                f"{stage.name} needs {stage.worker_bytes / 1e9:.2f} GB on a worker, which has {room / 1e9:.2f} GB; use "
                "workers with more memory (cluster.memory), smaller batches (learn.batch_size) or fewer fit.centres"
            )
    return [_plain(estimate(stage, machine, workers)) for stage in found]


def table(found: list[dict[str, Any]]) -> list[str]:
    """The stages as lines of text."""
    names = ("stage", "seconds", "bottleneck", "read", "worker", "tasks", "scheduler", "depth", "hours per 1e9 rows")
    lines = ["", "{:8} {:>9} {:>11} {:>9} {:>9} {:>10} {:>10} {:>6} {:>19}".format(*names)]
    lines += [
        f"{s['stage']:8} {s['seconds']:9.3g} {s['bottleneck']:>11} {s['bytes_read'] / 1e9:6.3g} GB "
        f"{s['worker_bytes'] / 1e9:6.3g} GB {s['tasks']:10d} {s['scheduler_seconds']:8.3g} s "
        f"{s['reduction_depth']:6d} {s['worker_hours_per_billion_rows']:19.3g}"
        for s in found
    ]
    return lines + [f"{s['stage']}: {s['note']}" for s in found if s["note"]]


def _plain(found: Estimate) -> dict[str, Any]:
    def few_digits(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: few_digits(inner) for key, inner in value.items()}
        return float(f"{value:.3g}") if isinstance(value, float) else value

    return {key: few_digits(value) for key, value in asdict(found).items()}


def _size(data: RowSource, rows: int, dtype: str) -> Size:
    return Size(rows, max(1, data.n_classes), width=data.features, dtype=dtype)


def _width(features: Any, data: RowSource) -> int:
    if features is None:
        return data.features
    return int(np.shape(features.forward(np.zeros((1, data.features))))[1])


# --- learning -----------------------------------------------------------------------------------------


def _learn_kernel(recipe: Recipe, data: RowSource, rows: int, batch_s: BatchSeconds | None) -> Stage:
    """Rounds of gradients of batches, sent straight to the workers."""
    found: list[Pass] = []
    held = size = 0
    for objective in recipe.objectives:
        settings = recipe.settings(objective, rows)
        size = min(settings.batch_size or rows, rows)
        few = replace(settings, batch_size=min(size, data.rows))
        batches = kernel_batches(data, few, split=data.training_split(), scaling=recipe.scaling, dtype=recipe.dtype)
        one = _batch(objective, size, data)
        if batch_s is not None and size <= batches.plan.rows:
            learner = KernelLearner(recipe.kernel, few, data.n_classes)
            one = Pass(1, one.read_bytes, compute_s=batch_s(learner, batches, recipe.regularization))
        local = recipe.local_steps or 1
        work = _times(one, recipe.batches_per_step * local)
        found.append(replace(work, tasks=recipe.batches_per_step, repeats=settings.steps // local, messages=True))
        held = max(held, batch_bytes(size, batches, objective))
    note = f"batches of {size} rows" if found else "no steps"
    if found and recipe.dtype == "float32":
        note += "; up to twice the seconds once λ is too small for float32"
    return Stage("learn", rows, tuple(found), PROCESS_BYTES + 2 * CACHE_BYTES + held, note)


def _learn_regression(recipe: Recipe, data: RowSource, rows: int) -> Stage:
    """The same for numeric targets, counted: as many matrices as the calibrated objective."""
    settings = recipe.settings(AUTO, rows)
    size = min(settings.batch_size or rows, rows)
    work = _times(_batch(AUTO, size, data), recipe.batches_per_step)
    work = replace(work, tasks=recipe.batches_per_step, repeats=settings.steps, messages=True)
    held = 8 * size**2 * MATRICES[AUTO]
    return Stage("learn", rows, (work,), PROCESS_BYTES + 2 * CACHE_BYTES + held, f"batches of {size} rows")


def _batch(objective: str, size: int, data: RowSource) -> Pass:
    """Value and gradient of one batch."""
    square = float(size) ** 2
    return Pass(
        1,
        float(size * data.features * _item(data)),
        _BACKWARD * 2 * square * data.features,
        MATRICES[objective] * square * size,
        exps=square,
    )


def _times(work: Pass, count: int) -> Pass:
    """The work of `count` such tasks."""
    names = ("read_bytes", "flops", "factor_flops", "exps", "compute_s")
    return replace(work, tasks=work.tasks * count, **{name: count * getattr(work, name) for name in names})


def batch_bytes(rows: int, batches: Batches, objective: str) -> int:
    """Memory of one batch with its Gram matrices.

    A batch that fails in single precision is repeated in double, which is the worst case counted here.
    """
    size, features = np.dtype(batches.rows.dtype).itemsize, batches.rows.source.features
    square = size * MATRICES[objective] + (8 if size < 8 else 0)
    return int(rows * rows * square + rows * features * 4 * 8 + rows * batches.rows.n_classes * 8 * 8)


def _item(data: RowSource) -> int:
    return int(np.dtype(getattr(data, "dtype", "float32")).itemsize)


def _learn_features(config: Config, data: RowSource, rows: int) -> Stage:
    """Mode "full": three passes over all rows in every step."""
    features = recipes.feature_map_of(config, data.features)
    steps = recipes.MCEClassifier().steps if config.learn.steps is None else config.learn.steps
    return _full("learn", _width(features, data), steps, data, rows)


def _full(name: str, width: int, steps: int, data: RowSource, rows: int) -> Stage:
    tasks = -(-rows // data.chunk_rows)
    work = Pass(
        tasks,
        float(rows) * data.features * _item(data),
        float(rows) * width * (2 * data.features + width),
        result_bytes=8.0 * width * (width + data.n_classes),
        repeats=3 * steps,
    )
    held = 4 * 8 * width * (width + min(rows, data.chunk_rows))
    return Stage(name, rows, (work,), PROCESS_BYTES + held, f"three passes in each of {steps} steps")


def _network(model: Any, data: RowSource) -> Any:
    model.n_features_in_ = data.features
    return model._start()


def _learn_network(model: Any, data: RowSource, rows: int) -> Stage:
    """CEN and ASKL: rounds of batches; a CEN without batches takes exact gradients."""
    features = _network(model, data)
    width, batch = _width(features, data), model.batch_size
    numbers = sum(int(np.size(value)) for value in features.parameters.values())
    if batch is None and rows > _MADE_UP_ROWS:
        return _full("learn", width, int(model.steps), data, rows)
    size, together = min(int(batch or rows), rows), int(model.batches_per_step)
    steps = int(model.epochs) * -(-rows // (size * together)) if hasattr(model, "epochs") else int(model.steps)
    head = float(size) * width * width + width**3 / 3 if not hasattr(model, "epochs") else 0.0
    work = Pass(
        together,
        float(together * size * data.features * _item(data)),
        together * _BACKWARD * (2.0 * size * numbers + 2.0 * size * width * data.n_classes + head),
        exps=float(together * size * width),
        driver_s=4e-9 * numbers,  # the update of the optimiser
        repeats=steps,
        messages=True,
    )
    held = 8 * (4 * numbers + size * (4 * width + 2 * data.features) + 4 * width * width)
    return Stage("learn", rows, (work,), PROCESS_BYTES + held, f"{steps} steps of {together} x {size} rows")


def _spectral(recipe: Recipe, data: RowSource, rows: int) -> list[Stage]:
    """Networks learned on all rows, then sums over their outputs; prediction evaluates them too."""
    settings = recipe.spectral(rows)
    start = SpectralWork.of(data, settings, data.training_split()).starts[0]
    numbers = sum(int(np.size(value)) for value in start.values())
    steps, local, networks = settings.learning(rows).steps, settings.local_steps, settings.networks
    drawn = float(networks * local * settings.batch_size)
    work = Pass(
        networks,
        drawn * data.features * _item(data),
        _BACKWARD * 2 * drawn * numbers,
        exps=drawn * settings.frequencies,
        driver_s=networks * 4e-9 * numbers,
        repeats=steps // local,
        messages=True,
    )
    held = PROCESS_BYTES + 8 * (4 * numbers + settings.batch_size * (4 * settings.frequencies + 2 * data.features))
    learn = Stage(
        "learn", rows, (work,), held, f"{steps} steps of {networks} networks, {settings.batch_size} rows each"
    )
    size = replace(_size(data, rows, recipe.dtype), basis=networks * data.n_classes)
    fit = _fit(Choice("features", "learned features"), size)
    predict = _predict(size, getattr(data, "output_rows", PREDICTED_ROWS), settings)
    return [learn, *(_evaluating(stage, networks * numbers) for stage in (fit, predict))]


def _evaluating(stage: Stage, numbers: int) -> Stage:
    """The stage, with networks of this many parameters evaluated for every row in its first pass."""
    first, *rest = stage.passes
    return replace(stage, passes=(replace(first, flops=first.flops + 2.0 * stage.rows * numbers), *rest))


# --- fitting and predicting ---------------------------------------------------------------------------


def _fit(chosen: Choice, size: Size) -> Stage:
    held, passes = fit_bytes(chosen.solver, size), SOLVERS[chosen.solver].passes(size)
    return Stage("fit", size.rows, passes, held, f"{chosen.solver}: {chosen.reason}")


def fit_bytes(solver: str, size: Size) -> int:
    """Peak memory of a fit on a worker."""
    return PROCESS_BYTES + 2 * CACHE_BYTES + SOLVERS[solver].cost(size).memory


def _predict(size: Size, chunk: int, features: Any) -> Stage:
    n, p, d, m = float(size.rows), size.basis, size.width, size.columns
    products = 2 * n * p * (d + m)
    exps = n * p if features is None else 0.0
    tasks = -(-size.rows // chunk)
    work = Pass(tasks, n * d * size.item, products, exps=exps, row_values=n * (d + m), streamed=True, published=tasks)
    held = PROCESS_BYTES + 2 * size.item * p * (2 * d + m) + chunk * (40 * d + 32 * m)
    return Stage("predict", size.rows, (work,), held, f"chunks of {chunk} rows")
