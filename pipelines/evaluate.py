"""Evaluation of predictions: `kme-dist evaluate`, `python pipelines/evaluate.py CONFIG`.

    measure(y_test, clf.predict_proba(X_test), clf.classes_)["accuracy"]          # rows in memory
    evaluate("scores.zarr", "rows.zarr", executor=executor)                       # stored rows, chunk by chunk

`evaluate` sums over the chunks on the workers and writes the metrics (`metrics.json`) and a report with plots
(`report.html`) to a folder. In a run, `STAGE` evaluates the predictions of its test rows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.config import ClusterConfig, Config
from kme_dist.core.metrics import Tally, class_codes
from kme_dist.data.dataset import Dataset
from kme_dist.data.places import Place
from kme_dist.data.predictions import Predictions, open_predictions
from kme_dist.errors import counted
from kme_dist.ops.cluster import open_executor
from kme_dist.pipelines import numeric_pages, pages
from kme_dist.pipelines.folder import Listener, now, to_json
from kme_dist.pipelines.predict import PREDICTIONS, models_of, request_of
from kme_dist.pipelines.stages import Run, Stage
from kme_dist.run.evaluate import open_labelled, tally_numbers, tally_predictions
from kme_dist.run.executors import Executor, SerialExecutor

FEW_ROWS = 2_000_000
METRICS = "metrics.json"
HEADLINES = (
    "accuracy",
    "balanced_accuracy",
    "log_loss",
    "brier",
    "calibration_error",
    "top_k_accuracy",
    "weighted_accuracy",
    "weighted_log_loss",
    "rmse",
    "mae",
    "r2",
    "coverage",
    "nominal_coverage",
    "interval_width",
)


def measure(labels: np.ndarray, probabilities: np.ndarray, classes: np.ndarray) -> dict[str, Any]:
    """Accuracy, calibration and confusion of class probabilities in memory.

    Parameters
    ----------
    labels : (n,) array           true classes, each one of `classes`
    probabilities : (n, m) array  non-negative rows in the order of `classes`
    classes : (m,) array          as in `classes_` of an estimator
    """
    return Tally.of(class_codes(labels, classes), probabilities).metrics(list(classes))


def evaluate(
    predictions: str | Path | Predictions,
    data: str | Path | Dataset,
    *,
    split: str | None = None,
    folder: str | Path | None = None,
    executor: Executor | None = None,
    title: str = "Predictions",
) -> dict[str, Any]:
    """Compare stored predictions with the labels of their data set; returns the metrics.

    With `folder`, metrics.json and report.html are written there.
    """
    found = predictions if isinstance(predictions, Predictions) else open_predictions(predictions)
    labelled = data if isinstance(data, Dataset) else open_labelled(found, data)
    predicted = found.state["computed_from"]["data"]
    if split is None and predicted.get("path") == labelled.path:
        split = predicted.get("split")
    executor = executor or SerialExecutor()
    if "mean" in found.names:
        return _evaluate_numbers(found, labelled, split, folder, executor, title)
    tally = tally_predictions(found, labelled, executor=executor, split=split)
    classes = [str(label) for label in found.classes]
    metrics = tally.metrics(classes)
    if folder is not None:
        place = Place.of(folder)
        subtitle = (
            f"{counted(metrics['rows'], 'row', ',')} of {labelled.place.name}{f', split {split}' if split else ''}"
        )
        page = pages.evaluation_page(
            title,
            metrics,
            classes,
            subtitle=f"{subtitle}, {counted(len(classes), 'class')}",
            footer=f"predictions {found.path} · model {found.state['model']} · {now()}",
        )
        place.write(METRICS, to_json(metrics))
        place.write("report.html", page.encode())
    return metrics


def _evaluate_numbers(
    found: Predictions, data: Dataset, split: str | None, folder: str | Path | None, executor: Executor, title: str
) -> dict[str, Any]:
    """The same for the predictions of a regressor."""
    tally = tally_numbers(found, data, executor=executor, split=split)
    metrics = tally.metrics(found.state["computed_from"].get("coverage"))
    if folder is not None:
        place = Place.of(folder)
        page = numeric_pages.evaluation_page(
            title,
            metrics,
            numeric_pages.Compared.of(found, data, split),
            subtitle=f"{metrics['rows']:,} rows of {data.place.name}{f', split {split}' if split else ''}",
            footer=f"predictions {found.path} · model {found.state['model']} · {now()}",
        )
        place.write(METRICS, to_json(metrics))
        place.write("report.html", page.encode())
    return metrics


def run(
    config: Config, *, name: str, fresh: bool = False, listener: Listener | None = None, command: str = ""
) -> dict[str, Any]:
    """Evaluate the output of `kme-dist predict CONFIG`; writes to the same folder."""
    request = request_of(config, name)
    folder = Path(request.out).with_name("evaluation")
    with executor_for(open_predictions(request.out), config.cluster) as executor:
        metrics = evaluate(
            request.out, request.data, split=request.split, folder=folder, executor=executor, title=request.name
        )
    return summary_of(metrics, folder)


def _work(run: Run) -> dict[str, Any]:
    measured = {
        out: evaluate(run.folder.path / out, run.data, split="test", executor=run.executor) for _, out in models_of(run)
    }
    run.folder.store(METRICS, to_json(measured[PREDICTIONS]))
    return {"metrics": measured}


STAGE = Stage("evaluate", _work, lambda run: {"predictions": run.inputs_digest("predict")}, lambda run: [METRICS])


@contextlib.contextmanager
def executor_for(predictions: Predictions, cluster: ClusterConfig) -> Iterator[Executor]:
    """The cluster of a config, or this process if starting a local cluster would take longer than the sums."""
    if cluster.kind == "local" and predictions.rows <= FEW_ROWS:
        yield SerialExecutor()
        return
    with open_executor(cluster) as executor:
        yield executor


def summary_of(metrics: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """The output of `kme-dist evaluate --json`."""
    return {
        "status": "succeeded",
        "rows": metrics["rows"],
        "rows_without_answer": metrics["rows_without_answer"],
        **{key: metrics[key] for key in HEADLINES if key in metrics},
        "metrics": str(Path(folder) / "metrics.json"),
        "report": str(Path(folder) / "report.html"),
    }


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["evaluate", *sys.argv[1:]])
