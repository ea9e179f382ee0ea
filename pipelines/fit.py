"""`kme-dist fit CONFIG`: the embedding on all rows of a data set, over a cluster. Also `python pipelines/fit.py`.

Kernel (or explicit features) and regularisation are those that `kme-dist learn` left in the run folder (learned.zarr),
or as the config gives them where it has not run. The run folder gets

    model.zarr         what `kme_dist.load` opens: an MCEClassifier, of explicit features a CENClassifier
    statistics.zarr    of centres and features: sums over the rows, and the digest of every chunk that is in them
    run.json           solver and why, residual, iterations, seconds, bytes; see "fit" under "stages"

With the sums the model follows its data without a second look at old rows:

    kme-dist fit CONFIG --update                 adds the chunks of data.source that are not in yet
    kme-dist fit CONFIG --update --remove D      takes the chunks of another data set (last year's, say) out again
    kme-dist fit CONFIG --update --merge M       takes in what another model with the same centres has seen

Kernel, scaling and centres stay as they are; the regularisation is chosen again. A chunk is never counted twice.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist import CENClassifier, MCEClassifier, kernels, load
from kme_dist.config import Config
from kme_dist.core import features
from kme_dist.core.embedding import FeatureEmbedding
from kme_dist.core.sums import Centres, Features
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.ingest import parse_bytes
from kme_dist.data.rows import RowsRef
from kme_dist.data.scaling import Scaling
from kme_dist.data.store import load_arrays
from kme_dist.errors import ConfigError
from kme_dist.ops.cluster import in_words, open_executor
from kme_dist.ops.telemetry import performance_report, telemetry
from kme_dist.pipelines import learn
from kme_dist.pipelines.folder import Listener, RunFolder, folder_of
from kme_dist.run.executors import Executor
from kme_dist.run.fit import Fit, Statistics, add_rows, fit_on_dataset, refit, remove_rows
from kme_dist.run.scratch import Scratch
from kme_dist.run.train import Candidate, Recipe, Trained

MODEL, STATISTICS, SCRATCH = "model.zarr", "statistics.zarr", "scratch"


@dataclass(frozen=True)
class Task:
    """A configuration turned into what the fit takes."""

    data: Dataset
    split: str | None
    settings: dict[str, Any]  # of the estimator
    recipe: Recipe
    candidate: Candidate
    scaling: Scaling
    features: Any  # an explicit map, or None
    further: dict[str, Any]


def prepare(config: Config, folder: Path) -> Task:
    """Open the data set, find what was learned and check that they belong together."""
    learn.features_of_runs.refuse(config, "fit")
    data = learn._open(config.data.source)
    split = "train" if config.data.stored_split and "train" in data.splits else None
    settings = config.estimator_arguments()
    if settings.get("kernel") is None:
        settings.pop("kernel", None)
    model = MCEClassifier(**settings)
    start = kernels.from_config(model.kernel, n_features=data.features)
    candidate = Candidate("given", start, float(model.regularization))
    scaling = Scaling.of(data.split_statistics(split), model.scaling)
    recipe, chosen = model.recipe(data), None
    if config.model.features is not None:
        chosen = features.from_config(config.model.features, n_features=data.features, seed=recipe.seed)
    if (folder / "learned.zarr").exists():
        candidate, scaling, chosen = _learned(folder / "learned.zarr", data, candidate)
    wanted = {key: getattr(config.fit, key) for key in ("centre_choice", "tolerance", "tile_rows")}
    further = {key: value for key, value in wanted.items() if value is not None}
    if config.fit.memory is not None:
        try:
            further["memory"] = parse_bytes(config.fit.memory)
        except ValueError:
            raise ConfigError(f"fit.memory is {config.fit.memory!r}; give bytes such as 2GiB") from None
    return Task(data, split, settings, recipe, candidate, scaling, chosen, further)


def _learned(path: Path, data: Dataset, given: Candidate) -> tuple[Candidate, Scaling, Any]:
    arrays, found = load_arrays(path)
    if found.get("format") != learn.LEARNED_FORMAT:
        raise ConfigError(f"{path} holds nothing that `kme-dist learn` has learned; learn again with --fresh")
    if list(found["feature_names"]) != list(data.feature_names):
        raise ConfigError(
            f"{path} was learned from other columns than those of {data.path}; choose another output.folder"
        )
    kernel, chosen = given.kernel, None
    if "features" in found:
        held = {name.removeprefix("features/"): a for name, a in arrays.items() if name.startswith("features/")}
        chosen = features.from_config(found["features"], arrays=held)
    else:
        kernel = kernels.from_config(found["kernel"])
    candidate = Candidate(found["objective"], kernel, float(found["regularization"]))
    return candidate, Scaling(arrays["scaling/shift"], arrays["scaling/factor"]), chosen


def run(
    config: Config,
    *,
    name: str,
    update: bool = False,
    remove: str | None = None,
    merge: str | None = None,
    fresh: bool = False,
    listener: Listener | None = None,
    command: str = "",
    performance: Path | None = None,
) -> dict[str, Any]:
    """Fit, or bring a fitted model up to date; returns what `kme-dist fit --json` prints.

    `performance` is a file for Dask's report of what the cluster did.
    """
    listener = listener or Listener()
    if (remove is not None or merge is not None) and not update:
        raise ConfigError("--remove and --merge change a model that is there: give --update, too")
    path = folder_of(config, name)
    task = prepare(config, path)
    opened = RunFolder.open(config, name=name, command=command, fresh=fresh, listener=listener)
    with (
        opened as folder,
        open_executor(config.cluster) as executor,
        telemetry(executor, run=name, stage="fit", pipeline=name) as told,
        performance_report(executor, performance),
    ):
        folder.listener.say(f"{task.data}: {in_words(executor)}")

        def say(line: str) -> None:
            listener.say(line)
            told.say(line)

        folder.listener = replace(listener, say=say)
        if update:
            return _updated(task, folder, executor, remove, merge)
        inputs = {
            "data": task.data.digest,
            "split": task.split,
            "kernel": task.candidate.kernel.to_config() if task.features is None else repr(task.features),
            "regularization": task.candidate.regularization,
            "settings": {key: str(value) for key, value in task.settings.items()},
            "fit": config.fit.model_dump(mode="json"),
        }
        return folder.stage("fit", inputs=inputs, outputs=[MODEL], work=lambda: _fitted(task, folder, executor))


def _fitted(task: Task, folder: RunFolder, executor: Executor) -> dict[str, Any]:
    recipe, rows = task.recipe, task.data.split_rows(task.split)
    assert task.data.classes is not None
    fit = fit_on_dataset(
        task.data,
        task.candidate.kernel,
        task.candidate.regularization,
        executor=executor,
        scratch=folder.path / SCRATCH,
        split=task.split,
        scaling=task.scaling,
        dtype=recipe.dtype,
        solver=recipe.solver if task.features is None else "features",
        features=task.features,
        centres=recipe.centres,
        retune=recipe.refit_regularization,
        floor=recipe.floor(rows, len(task.data.classes)),
        seed=recipe.seed,
        report=folder.listener.say,
        **task.further,
    )
    return _stored(task, folder, fit)


def _updated(
    task: Task, folder: RunFolder, executor: Executor, remove: str | None, merge: str | None
) -> dict[str, Any]:
    if not (folder.path / STATISTICS).exists() or not (folder.path / MODEL).exists():
        raise ConfigError(
            f"{folder.path} holds no model of sums that could be updated; fit one with fit.solver nystrom first"
        )
    model, statistics = load(folder.path / MODEL), Statistics.load(folder.path / STATISTICS)
    basis = statistics.basis
    if isinstance(basis, Centres):
        task = replace(task, candidate=Candidate(model.objective_, model.kernel_, model.regularization_), features=None)
    elif isinstance(basis, Features):
        task = replace(task, features=basis.features)
    dtype = str(basis.points.dtype) if isinstance(basis, Centres) else task.recipe.dtype
    scratch = Scratch.at(folder.path / SCRATCH)

    def rows_of(data: Dataset, split: str | None) -> RowsRef:
        if data.classes is None or list(data.classes) != model.classes_.tolist():
            raise ConfigError(
                f"{data.path} has the classes {data.classes}, the model {model.classes_.tolist()}; "
                "only chunks with the same classes can be added or removed"
            )
        return RowsRef.of(data, split=split, scaling=model.scaling_, dtype=dtype, classes=True)

    changes = {"removed_rows": 0, "merged_rows": 0}
    if remove is not None:
        gone = rows_of(open_dataset(remove), None)
        changes["removed_rows"] = remove_rows(statistics, gone, executor=executor, scratch=scratch)
    if merge is not None:
        changes["merged_rows"] = statistics.merge(_other(merge))
    present = rows_of(task.data, task.split)
    changes["added_rows"] = 0 if remove or merge else add_rows(statistics, present, executor=executor, scratch=scratch)
    folder.listener.say(f"fit: {changes['added_rows']} rows added, {changes['removed_rows']} removed, "
                        f"{changes['merged_rows']} merged; {statistics.rows} in all")  # fmt: skip
    assert task.data.classes is not None
    fit = refit(
        statistics,
        model.regularization_,
        executor=executor,
        scratch=folder.path / SCRATCH,
        scaling=model.scaling_,
        retune=task.recipe.refit_regularization,
        floor=task.recipe.floor(statistics.rows, len(task.data.classes)),
    )
    inputs = {"update": sorted(statistics.ledger.elements())}
    work = lambda: {**_stored(task, folder, fit), **changes}  # noqa: E731
    folder.earlier.pop("fit", None)
    return folder.stage("fit", inputs=inputs, outputs=[MODEL], work=work)


def _other(path: str) -> Statistics:
    place = Path(path) / STATISTICS
    return Statistics.load(place if place.exists() else path)


def _stored(task: Task, folder: RunFolder, fit: Fit) -> dict[str, Any]:
    """Statistics first: should this be the last thing that happens, the same command puts the model beside them."""
    if fit.statistics is not None:
        fit.statistics.save(folder.path / STATISTICS)
    else:
        folder.remove(STATISTICS)
    _model(task, fit).save(folder.path / MODEL)
    folder.remove(SCRATCH)
    names = ("solver", "reason", "regularization", "loss", "residual", "iterations", "seconds", "bytes", "rows")
    return {
        "status": "succeeded",
        "folder": str(folder.path),
        "model": str(folder.path / MODEL),
        **{name: getattr(fit, name) for name in names},
        **fit.facts,
    }


def _model(task: Task, fit: Fit) -> Any:
    """The estimator that the fit stands for."""
    if task.features is None:
        losses = {} if fit.loss is None else {task.candidate.name: fit.loss}
        trained = Trained(task.candidate, fit, losses, [task.candidate])
        return MCEClassifier(**task.settings).adopt(task.data, task.recipe, trained, split=task.split)
    assert task.data.classes is not None
    model = CENClassifier(regularization=task.candidate.regularization, dtype=task.recipe.dtype)
    model.features_, model.weights_ = task.features, fit.embedding.weights
    model.embedding_ = FeatureEmbedding(task.features, fit.embedding.weights)
    model.scaling_, model.regularization_ = fit.scaling, fit.regularization
    model.classes_, model.n_features_in_ = np.asarray(task.data.classes), task.data.features
    model.probability_floor_ = task.recipe.floor(fit.rows, len(task.data.classes))
    model.bound_, model.history_, model.curve_, model.softmax_curve_ = math.nan, [], [], []
    return model


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["fit", *sys.argv[1:]])
