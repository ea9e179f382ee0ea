"""`kme-dist fit CONFIG`: the embedding on all rows of a data set, over a cluster. Also `python pipelines/fit.py`.

The candidates that `kme-dist learn` stored in the run folder (learned.zarr) are fitted and the best is kept; without
them, kernel and regularisation are those of the config. It writes to the run folder

    model.zarr         the model for `kme_dist.load`: an MCEClassifier, with explicit features a
                       CENClassifier, of model.kind cme a CMERegressor
    statistics.zarr    with centres or features: sums over the rows, and the digests of the chunks they include
    run.json           solver and the reason for it, residual, iterations, seconds, bytes; see "fit" under "stages"

With the sums a model can be updated without reading old rows again:

    kme-dist fit CONFIG --update                 adds the new chunks of data.source
    kme-dist fit CONFIG --update --remove D      removes the chunks of another data set (e.g. last year's)
    kme-dist fit CONFIG --update --merge M       adds the rows of another model with the same centres

Kernel, scaling, centres and the factors of class weights are kept; the regularisation is re-tuned. A chunk is never
counted twice.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist import CENClassifier, CMERegressor, MCEClassifier, load
from kme_dist.config import Config
from kme_dist.core.sums import Centres, FeatureBasis
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError
from kme_dist.pipelines import ingest, learn, recipes, tables
from kme_dist.pipelines.folder import CONFIG, Listener, to_yaml
from kme_dist.pipelines.learn import LearnedResult
from kme_dist.pipelines.stages import Run, Stage
from kme_dist.run.fit import Fit, FitStatistics, add_rows, fit_on_dataset, refit, remove_rows
from kme_dist.run.fit.additive import stored_class_factors
from kme_dist.run.regression import fit_regression
from kme_dist.run.scratch import Scratch
from kme_dist.run.train import Candidate, Recipe, Trained, fit_candidates

MODEL, GIVEN, STATISTICS, SCRATCH = "model.zarr", "given.zarr", "statistics.zarr", "scratch"
FACTS = ("solver", "reason", "regularization", "loss", "residual", "iterations", "seconds", "bytes", "rows")


def _work(run: Run) -> dict[str, Any]:
    run.folder.remove(*run.outdated)
    run.folder.store(CONFIG, to_yaml(run.resolved).encode())
    learned = learn.load_learned(run)
    if run.config.model.kind == recipes.REGRESSION:
        return _fit_regressor(run, learned)
    if run.config.model.kind != "mce":
        return _fit_network(run, learned)
    if recipes.has_given_features(run.config):
        return _fit_features(run, learned)
    return _fit_kernels(run, learned)


def _fit_kernels(run: Run, learned: LearnedResult | None) -> dict[str, Any]:
    """Fit the best candidate of every starting point; keep the one with the lowest objective."""
    fitted: list[tuple[Any, Trained]] = []
    if learned is None and run.resolved["learn"]["steps"]:
        run.say(
            f"fit: {run.folder.path} holds no {learn.LEARNED}, so the kernel and the regularisation of the config are "
            "fitted as they are; run `kme-dist learn` first to learn them"
        )
    for number, start in enumerate(run.starts):
        given = _given(_recipe(run, start.settings))
        found = [given] if learned is None else learned.starts[number]
        model, trained = _fitted(run, start.settings, found)
        fitted.append((model, trained))
        if start.folder:  # several are compared, each also without learning
            model.save(run.folder.path / start.folder / MODEL)
            _fitted(run, start.as_given, [given])[0].save(run.folder.path / start.folder / GIVEN)
    best = min(range(len(fitted)), key=lambda i: final_objective(fitted[i][0]))
    model, trained = fitted[best]
    facts = [
        {"objective": t.best.name, "losses": t.losses, **{name: getattr(t.fit, name) for name in FACTS}}
        for _, t in fitted
    ]
    return {**_store(run, model, trained.fit), "best": best, "fits": facts}


def _fitted(run: Run, settings: Mapping[str, Any], candidates: list[Candidate]) -> tuple[Any, Trained]:
    recipe = _recipe(run, settings)
    scratch = run.folder.path / SCRATCH
    trained = fit_candidates(
        run.training_data, recipe, candidates, executor=run.executor, scratch=scratch, report=run.say
    )
    Scratch.at(scratch).clear()  # a fit that was killed left files, which no other needs now
    return MCEClassifier(**settings).adopt(run.training_data, recipe, trained), trained


def _recipe(run: Run, settings: Mapping[str, Any]) -> Recipe:
    return recipes.recipe_of(run.config, settings, run.training_data, run.executor)


def _given(recipe: Recipe) -> Candidate:
    return Candidate("given", recipe.kernel, recipe.regularization)


def final_objective(model: Any) -> float:
    """The objective at the end of learning; of several starting points the lowest is kept."""
    own = [record for record in model.history_ if record.get("phase") in (None, getattr(model, "objective_", None))]
    return float((own or model.history_)[-1]["objective"]) if model.history_ else math.inf


def _fit_features(run: Run, learned: LearnedResult | None) -> dict[str, Any]:
    """Fit weights for the features that `learn.mode: full` has learned, or for those of the config."""
    recipe, split = _recipe(run, run.starts[0].settings), run.data.training_split()
    if learned is None:
        chosen, lam, scaling = recipes.feature_map_of(run.config, run.data.features), recipe.regularization, None
    else:
        chosen, lam, scaling = learned.features, learned.regularization, learned.scaling
    fit = fit_on_dataset(
        run.training_data,
        recipe.kernel,
        lam,
        executor=run.executor,
        scratch=run.folder.path / SCRATCH,
        split=split,
        scaling=scaling or recipe.scaling_of(run.data, split),
        dtype=recipe.dtype,
        solver="features",
        features=chosen,
        retune=recipe.refit_regularization,
        floor=recipe.floor(run.training_data.split_weight(split), run.data.n_classes),
        seed=recipe.seed,
        report=run.say,
        **recipe.fit,
    )
    model = CENClassifier(regularization=lam, dtype=recipe.dtype)
    model.adopt(run.data, chosen, fit, recipe.floor(fit.weight, run.data.n_classes))
    return {**_store(run, model, fit), "best": 0, "fits": []}


def _fit_network(run: Run, learned: LearnedResult | None) -> dict[str, Any]:
    """Fit weights for the learned network: the estimator resumes from its last checkpoint, without further steps."""
    if learned is None or not learned.checkpoints:
        raise ConfigError(
            f"{run.folder.path} has no learned model of model.kind {run.config.model.kind!r}; run `kme-dist learn`"
        )
    began = time.monotonic()
    model = learn.fit_network(run, run.folder.path / learned.checkpoints)
    model.save(run.folder.path / MODEL)
    return {
        "status": "succeeded",
        "folder": str(run.folder.path),
        "model": str(run.folder.path / MODEL),
        "solver": "features",
        "reason": f"model.kind {run.config.model.kind}",
        "regularization": learn.regularization_of(model),
        "loss": None,
        "residual": 0.0,  # solved in closed form, or learned
        "iterations": 0,
        "seconds": round(time.monotonic() - began, 3),
        "bytes": int(np.asarray(model.weights_).nbytes),
        "rows": run.data.split_rows(run.data.training_split()),
        "best": 0,
        "fits": [{"objective": run.config.model.kind, "steps": len(model.history_)}],
    }


def _fit_regressor(run: Run, learned: LearnedResult | None) -> dict[str, Any]:
    """Fit the best candidate of model.kind cme."""
    settings, path = run.starts[0].settings, run.folder.path
    recipe = _recipe(run, settings)
    candidates = [_given(recipe)] if learned is None else learned.starts[0]
    fit = fit_regression(
        run.training_data, recipe, candidates[0], executor=run.executor, scratch=path / SCRATCH, report=run.say
    )
    model = CMERegressor(**settings).adopt(run.training_data, candidates, fit)
    model.save(path / MODEL)
    run.folder.remove(SCRATCH)
    return {
        "status": "succeeded",
        "folder": str(path),
        "model": str(path / MODEL),
        **{name: getattr(fit, name) for name in FACTS if hasattr(fit, name)},
        "loss_name": "squared error",  # in units of the targets' variance
        **fit.facts,
        "best": 0,
        "fits": [],
    }


def _store(run: Run, model: Any, fit: Fit) -> dict[str, Any]:
    """Store statistics, then the model: after a kill in between, the same command adds the model."""
    if fit.statistics is not None:
        fit.statistics.save(run.folder.path / STATISTICS)
    else:
        run.folder.remove(STATISTICS)
    model.save(run.folder.path / MODEL)
    run.folder.remove(SCRATCH)
    return {
        "status": "succeeded",
        "folder": str(run.folder.path),
        "model": str(run.folder.path / MODEL),
        **{name: getattr(fit, name) for name in FACTS},
        **fit.facts,
    }


def _inputs(run: Run) -> dict[str, Any]:
    learned = learn.load_learned(run)
    return {
        "data": run.data.digest,
        "learned": None if learned is None else learned.digest,
        "model": run.resolved["model"],
        "seed": run.resolved["learn"]["seed"],
        "fit": run.resolved["fit"],
        "starts": [start.name for start in run.starts],
    }


def _outputs(run: Run) -> list[str]:
    compared = [f"{start.folder}/{name}" for start in run.starts if start.folder for name in (MODEL, GIVEN)]
    return [MODEL, *compared, *([STATISTICS] if (run.folder.path / STATISTICS).exists() else [])]


STAGE = Stage("fit", _work, _inputs, _outputs)


# --- updates --------------------------------------------------------------------------------------------------


def _update_stage(remove: str | None, merge: str | None) -> Stage:
    """Update the model of the run folder. Never skipped: its chunks are compared with those of the data."""

    def work(run: Run) -> dict[str, Any]:
        return _update(run, remove, merge)

    def inputs(run: Run) -> dict[str, Any]:
        return {"update": run.data.digest, "remove": remove, "merge": merge}

    return Stage("fit", work, inputs, lambda run: [MODEL])


def _update(run: Run, remove: str | None, merge: str | None) -> dict[str, Any]:
    path = run.folder.path
    model, statistics = load(path / MODEL), FitStatistics.load(path / STATISTICS)
    data = run.data.with_class_factors(statistics.class_factors)  # those of the fit: "balanced" ones have changed
    recipe, basis = _recipe(run, run.starts[0].settings), statistics.basis
    dtype = str(basis.points.dtype) if isinstance(basis, Centres) else recipe.dtype
    scratch = Scratch.at(path / SCRATCH)

    def rows_of(part: Dataset, split: str | None) -> RowsRef:
        return RowsRef.of(part, split=split, scaling=model.scaling_, dtype=dtype, classes=True)

    changes = {"added_rows": 0, "removed_rows": 0, "merged_rows": 0}
    if remove is not None:
        gone = rows_of(open_dataset(remove), None)
        changes["removed_rows"] = remove_rows(statistics, gone, executor=run.executor, scratch=scratch)
    if merge is not None:
        changes["merged_rows"] = statistics.merge(_statistics_at(merge))
    if remove is None and merge is None:
        present = rows_of(data, data.training_split())
        changes["added_rows"] = add_rows(statistics, present, executor=run.executor, scratch=scratch)
    run.say(f"fit: {changes['added_rows']} rows added, {changes['removed_rows']} removed, "
            f"{changes['merged_rows']} merged; {statistics.rows} in all")  # fmt: skip
    # Features φ with k(x, x') = variance φ(x)·φ(x') were solved with λ / variance.
    solved = model.regularization_ if isinstance(model, CENClassifier) else model.embedding_.regularization
    variance = model.regularization_ / solved
    fit = refit(
        statistics,
        solved,
        executor=run.executor,
        scratch=path / SCRATCH,
        scaling=model.scaling_,
        retune=recipe.refit_regularization,
        floor=recipe.floor(statistics.weight, data.n_classes),
    )
    fit = replace(fit, regularization=fit.regularization * variance)
    if isinstance(model, CENClassifier):
        assert isinstance(basis, FeatureBasis)
        updated = CENClassifier(regularization=model.regularization, dtype=recipe.dtype)
        updated.adopt(data, basis.features, fit, recipe.floor(fit.weight, data.n_classes))
    else:
        kept = Candidate(model.objective_, model.kernel_, model.regularization_, model.history_)
        losses = {} if fit.loss is None else {kept.name: fit.loss}
        updated = MCEClassifier(**run.starts[0].settings).adopt(data, recipe, Trained(kept, fit, losses, [kept]))
    return {**_store(run, updated, fit), **changes}


def _check_update(run: Run, remove: str | None) -> None:
    """Check that the update is possible, before the record of the fit is changed."""
    path = run.folder.path
    if run.config.model.kind == recipes.REGRESSION:
        raise ConfigError(
            "--update is for models of classes, which keep their sums over the rows, and this one predicts numbers; "
            "fit it again on all rows: kme-dist fit CONFIG"
        )
    if not all((path / output).exists() for output in (MODEL, STATISTICS)):
        raise ConfigError(
            f"{path} has no sums to update: only the solvers nystrom and features keep them; fit again, with "
            "fit.solver: nystrom if rows will be added later"
        )
    known = load(path / MODEL).classes_.tolist()
    for part in (run.data, *([] if remove is None else [open_dataset(remove)])):
        if part.classes is None or list(part.classes) != known:
            raise ConfigError(
                f"{part.path} has the classes {part.classes}, the model {known}; "
                "only chunks with the same classes can be added or removed"
            )
    weighted, given = stored_class_factors(path / STATISTICS), run.config.model.class_weight
    if (weighted is None) if given == "balanced" else (run.training_data.class_factors != weighted):
        raise ConfigError(
            f"model.class_weight is {given!r}, and the sums of {path} were weighted by "
            f"{'no class weights that they record' if weighted is None else list(weighted)}; restore "
            "model.class_weight as it was, or fit again without --update"
        )


def _statistics_at(path: str) -> FitStatistics:
    place = Path(path) / STATISTICS
    return FitStatistics.load(place if place.exists() else path)


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
    """Fit, or update a fitted model; returns the output of `kme-dist fit --json`.

    `performance` is a file for Dask's performance report.
    """
    if (remove is not None or merge is not None) and not update:
        raise ConfigError("--remove and --merge require --update")
    if update and tables.dataset_at(config.data.source) is None:
        raise ConfigError(f"data.source {config.data.source} is not a data set; --update adds chunks of one")
    again = (STAGE.name,) if fresh or update else ()
    with Run.open(
        config, name=name, fresh=again, listener=listener, command=command, performance=performance
    ) as current:
        if not fresh and not update and (current.folder.path / MODEL).exists():
            ingest.check_source(config, current.folder.path)  # before the rows are replaced
        current.do(ingest.STAGE)
        if update:
            _check_update(current, remove)
        elif not fresh:
            current.keep_previous((MODEL, STATISTICS, CONFIG), STAGE)
        return current.do(_update_stage(remove, merge) if update else STAGE)


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["fit", *sys.argv[1:]])
