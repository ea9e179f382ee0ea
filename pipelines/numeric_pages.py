"""The reports of a regression: of a run, and of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.data.dataset import Dataset
from kme_dist.data.lazy import open_rows
from kme_dist.data.new_rows import ModelColumns
from kme_dist.data.predictions import Predictions
from kme_dist.errors import plural
from kme_dist.pipelines.pages import kernel_in_words, learning_pictures
from kme_dist.report import numeric as draw
from kme_dist.report.page import Picture, relevance_bars, render_html

SHOWN_ROWS = 20_000  # the first ones, for the pictures


@dataclass(frozen=True, eq=False)
class Compared:
    """True and predicted values of some rows, for pictures."""

    y: np.ndarray
    mean: np.ndarray
    interval: np.ndarray | None

    @classmethod
    def of(cls, predictions: Predictions, data: Dataset, split: str | None) -> Compared:
        count = min(predictions.rows, SHOWN_ROWS)
        y = np.asarray(open_rows(data, ModelColumns(data.features), split=split).read_labels(0, count), np.float64)
        mean = predictions.read("mean", 0, count)
        interval = predictions.read("interval", 0, count) if "interval" in predictions.names else None
        known = np.isfinite(mean)
        return cls(y[known], mean[known], None if interval is None else interval[known])


def run_page(
    name: str,
    model: Any,
    metrics: Mapping[str, Any],
    rows: Compared,
    *,
    counts: tuple[int, int],
    feature_names: Sequence[str],
    config_text: str,
    learn_seconds: float,
    footer: str,
    tables: Sequence[tuple[str, list[str], list[list[str]]]] = (),
) -> str:
    """The page of a run with a CMERegressor; `counts` are the training and test rows, `tables` shown before its own."""
    steps = len(model.history_)
    kept = f", kept: {model.kernel_name_}" if len(model.loo_errors_) > 1 else ""
    left = float(model.loo_rmse_)
    headline = [
        *_headline(metrics, "test rows"),
        ("Leave-one-out RMSE", f"{left:.4g}", "of training rows, expected for new ones"),
        ("Learning", f"{learn_seconds:.1f} s", f"{steps:,} {plural(steps, 'step')}, squared error{kept}"),
        ("Kernel", *kernel_in_words(model.kernel_)),
    ]
    features = len(feature_names)
    return render_html(
        name,
        subtitle=f"{counts[0]:,} training rows, {counts[1]:,} test rows, "
        f"{features} {plural(features, 'feature')}, numeric targets",
        headline=headline,
        figures=[*learning_pictures(model), *pictures(rows, metrics), *_scales(model, feature_names)],
        tables=[*tables, *_candidates(model)],
        config_text=config_text,
        footer=footer,
    )


def evaluation_page(title: str, metrics: Mapping[str, Any], rows: Compared, *, subtitle: str, footer: str) -> str:
    """The page of `kme-dist evaluate` for the predictions of a regressor."""
    headline = _headline(metrics, "rows")
    if metrics["rows_without_answer"]:
        headline.append(("Without prediction", f"{metrics['rows_without_answer']:,}", "skipped rows, left out here"))
    figures = pictures(rows, metrics)
    return render_html(title, subtitle=subtitle, headline=headline, figures=figures, footer=footer)


def _headline(metrics: Mapping[str, Any], what: str) -> list[tuple[str, str, str]]:
    found = [
        ("RMSE", f"{metrics['rmse']:.4g}", f"root mean squared error of {metrics['rows']:,} {what}"),
        ("MAE", f"{metrics['mae']:.4g}", "mean absolute error"),
        ("R²", f"{metrics['r2']:.3f}", "1 is perfect, 0 is the mean"),
    ]
    if "coverage" in metrics:
        nominal = metrics.get("nominal_coverage")
        asked = "" if nominal is None else f", {100 * nominal:g} % asked for"
        found += [
            ("Coverage", f"{100 * metrics['coverage']:.1f} %", f"true values inside their interval{asked}"),
            ("Interval width", f"{metrics['interval_width']:.4g}", "mean over the rows"),
        ]
    return found


def pictures(rows: Compared, metrics: Mapping[str, Any]) -> list[Picture]:
    """Predicted against true, residuals, and coverage where there are intervals."""
    if not len(rows.y):
        return []
    marked = " Marks in the other colour are outside their interval." if rows.interval is not None else ""
    found = [
        Picture(
            "Predicted against true",
            draw.predicted_against_true(rows.y, rows.mean, rows.interval),
            f"On the dashed line the prediction is exact.{marked}",
        ),
        Picture(
            "Residuals",
            draw.residuals(rows.y, rows.mean, rows.interval),
            "True minus predicted value; a trend would mean that the mean is biased."
            + (" The band is the median interval of rows with similar predictions." if marked else ""),
        ),
    ]
    if rows.interval is not None and np.isfinite(rows.interval).all():
        nominal = float(metrics.get("nominal_coverage", 0.9))
        found.append(
            Picture(
                "Coverage of the intervals",
                draw.interval_coverage(rows.y, rows.mean, rows.interval, nominal),
                "Rows grouped by the width of their interval: the share of true values inside should be "
                f"{100 * nominal:g} % in every group (dashed). The band is two standard errors.",
            )
        )
    return found


def _scales(model: Any, names: Sequence[str]) -> list[Picture]:
    scales = model.kernel_.parameters.get("length_scale")
    if scales is None or np.size(scales) != len(names) or len(names) < 2:
        return []
    relevance = np.where(model.scaling_.factor > 0, 1 / np.asarray(scales, np.float64), 0.0)
    return [
        Picture(
            "Inverse length scales",
            relevance_bars(
                relevance / max(relevance.sum(), 1e-300), list(names), quantity="share of the inverse length scales"
            ),
            "How quickly the prediction changes with each feature, in units of the deviation of the feature, as shares "
            "of the sum.",
        )
    ]


def _candidates(model: Any) -> list[tuple[str, list[str], list[list[str]]]]:
    if len(model.loo_errors_) < 2:
        return []
    width = float(model.target_.width[0])
    rows = [[name, f"{error * width:.4g}", f"{1 - error**2:.3f}"] for name, error in model.loo_errors_.items()]
    return [("Kernels compared, on a sample of the training rows", ["kernel", "leave-one-out RMSE", "R²"], rows)]
