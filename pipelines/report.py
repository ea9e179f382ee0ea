"""The last stage of a run: report.html, and the summary for `kme-dist run --json`.

The content of the page is in `kme_dist.pipelines.pages`.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from kme_dist import load
from kme_dist.data.predictions import open_predictions
from kme_dist.pipelines import baselines, numeric_pages, pages, recipes
from kme_dist.pipelines.fit import GIVEN, MODEL
from kme_dist.pipelines.folder import to_yaml
from kme_dist.pipelines.learn import regularization_of
from kme_dist.pipelines.pages import FittedStart
from kme_dist.pipelines.predict import PREDICTIONS
from kme_dist.pipelines.stages import Run, Stage, config_digest

REPORT = "report.html"
NUMERIC_HEADLINES = ("rmse", "mae", "r2", "coverage", "nominal_coverage", "interval_width")
HEADLINES = ("accuracy", "balanced_accuracy", "log_loss", "brier", "calibration_error")


def _work(run: Run) -> dict[str, Any]:
    if run.config.model.kind == recipes.REGRESSION:
        return _numeric_work(run)
    starts, rows = _fitted_starts(run), run.result("ingest")
    best = starts[int(run.result("fit")["best"])]
    settings = run.starts[starts.index(best)].settings
    found, learned_from = _baselines(run)
    page = pages.run_page(
        run.name,
        starts,
        best,
        run.sample,
        initial_features=recipes.initial_features(run.config, settings, run.data.features),
        image_shape=run.image_shape,
        counts=(rows["train_rows"], rows["test_rows"]),
        config_text=to_yaml(run.resolved),
        learn_seconds=run.folder.stages["learn"]["seconds"],
        footer=_footer(run),
        tables=baselines.table(found, learned_from, best.metrics, "this model"),
    )
    run.folder.store(REPORT, page.encode())
    return {**_summary(run, starts, best), "baselines": {one.name: one.figures for one in found}}


def _baselines(run: Run) -> tuple[list[baselines.Baseline], str]:
    return baselines.beside(run.data, run.resolved["learn"]["seed"]) if run.config.output.baselines else ([], "")


def _footer(run: Run) -> str:
    return (
        f"kme-dist {metadata.version('kme-dist')} · {run.folder.facts['started']} · "
        f"configuration {config_digest(run.resolved)[:12]}"
    )


def _numeric_work(run: Run) -> dict[str, Any]:
    path, rows = run.folder.path, run.result("ingest")
    model, metrics = load(path / MODEL), run.result("evaluate")["metrics"][PREDICTIONS]
    found, learned_from = _baselines(run)
    page = numeric_pages.run_page(
        run.name,
        model,
        metrics,
        numeric_pages.Compared.of(open_predictions(path / PREDICTIONS), run.data, "test"),
        counts=(rows["train_rows"], rows["test_rows"]),
        feature_names=run.data.feature_names,
        config_text=to_yaml(run.resolved),
        learn_seconds=run.folder.stages["learn"]["seconds"],
        footer=_footer(run),
        tables=baselines.table(found, learned_from, metrics, "this model"),
    )
    run.folder.store(REPORT, page.encode())
    return {
        **_places(run),
        "baselines": {one.name: one.figures for one in found},
        **{key: metrics[key] for key in NUMERIC_HEADLINES if key in metrics},
        **{key: rows[key] for key in ("train_rows", "test_rows", "features")},
        "steps": len(model.history_),
        "objective": "squared error",
        "solver": model.solver_,
        "regularization": regularization_of(model),
        "starts": [],
    }


def _places(run: Run) -> dict[str, Any]:
    path = run.folder.path
    return {
        "status": "succeeded",
        "folder": str(path),
        "report": str(path / REPORT),
        "model": str(path / MODEL),
        "predictions": str(path / PREDICTIONS),
    }


def _fitted_starts(run: Run) -> list[FittedStart]:
    measured = run.result("evaluate")["metrics"]
    found = []
    for start in run.starts:
        place = run.folder.path / start.folder
        if not start.folder:
            found.append(FittedStart(start.name, load(place / MODEL), measured[PREDICTIONS]))
            continue
        found.append(
            FittedStart(
                start.name,
                load(place / MODEL),
                measured[f"{start.folder}/model-predictions.zarr"],
                load(place / GIVEN),
                measured[f"{start.folder}/given-predictions.zarr"],
            )
        )
    return found


def _summary(run: Run, starts: list[FittedStart], best: FittedStart) -> dict[str, Any]:
    rows = run.result("ingest")
    return {
        **_places(run),
        **{key: best.metrics[key] for key in HEADLINES},
        **{key: rows[key] for key in ("train_rows", "test_rows", "features", "classes")},
        "steps": sum(getattr(start.model, "n_iter_", len(start.model.history_)) for start in starts),
        "objective": pages.objective_of(best.model),
        "solver": str(getattr(best.model, "solver_", "features")),
        "regularization": regularization_of(best.model),
        "starts": [
            {
                "name": start.name,
                "accuracy_before": start.metrics_given["accuracy"],
                "accuracy": start.metrics["accuracy"],
                "objective": start.objective,
                "regularization": float(start.model.regularization_),
            }
            for start in starts
            if start.given is not None
        ],
    }


def _inputs(run: Run) -> dict[str, Any]:
    parts = {key: value for key, value in run.resolved.items() if key not in ("output", "cluster")}
    shown = {"baselines": run.config.output.baselines}
    return {"config": parts, "name": run.name, "evaluation": run.inputs_digest("evaluate"), **shown}


STAGE = Stage("report", _work, _inputs, lambda run: [REPORT], over_workers=False)
