"""The reports of a run and of an evaluation: their numbers, plots, order and text.

`run_page` puts the results of a run on one HTML page; the drawing itself is in `kme_dist.report.page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kme_dist.errors import counted, plural
from kme_dist.pipelines.fit import final_objective
from kme_dist.pipelines.learn import regularization_of
from kme_dist.pipelines.tables import Tables
from kme_dist.report import page as draw
from kme_dist.report import plots as feature_plots
from kme_dist.report.page import Panel, Picture

GRID_POINTS = 160
MOST_MISTAKES = 16


@dataclass(frozen=True, eq=False)
class FittedStart:
    """A starting point and its model; with several starting points also the model without learning."""

    name: str
    model: Any
    metrics: dict[str, Any]
    given: Any = None
    metrics_given: dict[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        return final_objective(self.model)


def run_page(
    name: str,
    starts: Sequence[FittedStart],
    best: FittedStart,
    rows: Tables,
    *,
    initial_features: Any,
    image_shape: tuple[int, ...] | None,
    counts: tuple[int, int],
    config_text: str,
    learn_seconds: float,
    footer: str,
    tables: Sequence[tuple[str, list[str], list[list[str]]]] = (),
) -> str:
    """The page as text. `best` is the start whose model was kept, `rows` are the training and test rows to draw,
    `counts` the number of each, `initial_features` the feature map before learning, if it was learned, `tables` are
    shown before its own."""
    shape = _flat(image_shape)
    classes = [str(label) for label in best.model.classes_]
    steps = sum(len(start.model.history_) for start in starts)
    pictures = [
        *_curves(starts),
        *_accuracy_curve(best.model),
        *_maps(rows, starts, classes),
        _confusion(best.metrics, classes),
        _reliability(best.metrics),
        *_relevance(rows, best, shape),
        *_frequencies(rows, best.model, initial_features, shape),
    ]
    if sum(not picture.wide for picture in pictures) % 2:  # shown in pairs
        pictures.append(_risk_coverage(best.metrics))
    pictures += _mistakes(rows, best, shape)
    return draw.render_html(
        name,
        subtitle=f"{counted(counts[0], 'training row', ',')}, {counted(counts[1], 'test row', ',')}, "
        f"{counted(len(rows.feature_names), 'feature')}, {counted(len(classes), 'class')}",
        headline=_headline(best, counts, steps, learn_seconds),
        figures=pictures,
        tables=[*tables, *_starts_table(starts), _class_table(best.metrics)],
        config_text=config_text,
        footer=footer,
    )


def _headline(
    best: FittedStart, counts: tuple[int, int], steps: int, learn_seconds: float
) -> list[tuple[str, str, str]]:
    metrics = best.metrics
    right = round(metrics["accuracy"] * metrics["rows"])
    learned = kernel_in_words(best.model.kernel_) if hasattr(best.model, "kernel_") else _map(best.model)
    return [
        (
            "Test accuracy",
            f"{100 * metrics['accuracy']:.2f} %",
            f"{right:,} of {counted(metrics['rows'], 'test row', ',')}",
        ),
        ("Log loss", f"{metrics['log_loss']:.3f}", "of the test rows, lower is better"),
        (
            "Calibration error",
            f"{100 * metrics['calibration_error']:.1f} %",
            "mean gap between confidence and accuracy",
        ),
        ("Brier score", f"{metrics['brier']:.3f}", "0 is perfect, 2 is worst"),
        *_weighted(metrics),
        ("Rows", f"{counts[0]:,}", f"for training, {counts[1]:,} for the test"),
        ("Learning", f"{learn_seconds:.1f} s", f"{steps:,} {plural(steps, 'step')}, {_minimised(best.model)}"),
        ("Regularisation", f"{regularization_of(best.model):.3g}", _origin(best.model)),
        ("Kernel" if hasattr(best.model, "kernel_") else "Features", *learned),
    ]


def objective_of(model: Any) -> str:
    """The quantity that learning minimised."""
    if hasattr(model, "objective_"):
        return str(model.objective_)
    return str(model.history_[-1]["phase"]) if model.history_ else "given"


def _minimised(model: Any) -> str:
    """The objective in words; with several candidates also which of them was kept."""
    kept, phase = objective_of(model), str(model.history_[-1]["phase"]) if model.history_ else ""
    return f"objective {kept}" if kept == phase or not phase else f"objective {phase}, kept: {kept} kernel"


def _origin(model: Any) -> str:
    if not hasattr(model, "regularization_"):
        return "of the weights, as given"
    return "retuned on all rows" if getattr(model, "refit_regularization", False) else "learned"


def _flat(shape: tuple[int, ...] | None) -> tuple[int, int] | None:
    """The shape of single-channel images; others are not drawn."""
    return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else None


def _map(model: Any) -> tuple[str, str]:
    """A learned feature map, in two short lines."""
    numbers = sum(int(np.size(value)) for value in model.features_.parameters.values())
    return type(model.features_).__name__, f"{counted(len(model.weights_), 'feature')}, {numbers:,} learned parameters"


def kernel_in_words(kernel: Any) -> tuple[str, str]:
    """A kernel in two short lines: its name, and its parameters as values or ranges."""
    words = []
    for key, value in kernel.parameters.items():
        values = np.atleast_1d(value)
        text = f"{values[0]:.3g}" if values.size == 1 else f"{values.min():.2g} … {values.max():.2g}"
        words.append(f"{key.replace('_', ' ')} {text}")
    return type(kernel).__name__, ", ".join(words[:4])


def learning_pictures(model: Any) -> list[Picture]:
    """The learning curve of one model, its phases one after the other."""
    records: list[dict[str, Any]] = []
    before = 0  # steps of earlier phases
    for record in model.history_:
        if records and record["phase"] != records[-1]["phase"]:
            before = records[-1]["step"]
        records.append({**record, "step": before + record["step"]})
    return _curves([FittedStart("", SimpleNamespace(history_=records), {})])


def _curves(starts: Sequence[FittedStart]) -> list[Picture]:
    histories: dict[str, list[dict[str, Any]]] = {}
    for start in starts:
        phases = dict.fromkeys(str(record["phase"]) for record in start.model.history_)
        for phase in phases:
            words = [start.name, phase if len(phases) > 1 or not start.name else ""]
            histories[" ".join(filter(None, words))] = [
                record for record in start.model.history_ if record["phase"] == phase
            ]
    if not histories:
        return []
    return [
        Picture(
            "Learning curves",
            draw.learning_curves(histories),
            "The objective q is the quantity minimised: the risk on the training rows"
            + (" plus the weighted complexity r of the model" if draw.has_complexity(histories) else "")
            + ". Steps may use different batches of rows, which makes curves noisy. Flat ends mean that learning has "
            "finished.",
            wide=True,
        )
    ]


def _relevance(rows: Tables, best: FittedStart, image_shape: tuple[int, int] | None) -> list[Picture]:
    if image_shape is not None:
        return _pixel_relevance(rows, best, image_shape)
    if getattr(best.model, "sample_", None) is None or len(best.model.feature_groups_) < 2:
        return []
    relevance = best.model.feature_importances("columns")
    return [
        Picture(
            "Feature relevance",
            draw.relevance_bars(relevance, list(best.model.feature_groups_)),
            "How much worse training rows are predicted, by the model without them, if a column has the values of "
            "other rows: the share of each column in the increase of the Brier score. Columns that say the same "
            "share it.",
        )
    ]


def _pixel_relevance(rows: Tables, best: FittedStart, image_shape: tuple[int, int]) -> list[Picture]:
    scales = best.model.kernel_.parameters.get("length_scale") if hasattr(best.model, "kernel_") else None
    if scales is None or np.size(scales) != len(rows.feature_names) or np.size(scales) < 2:
        return []
    # A feature that never changes keeps the length scale it started with, and decides nothing.
    varies = np.ptp(rows.X_train, axis=0) > 0
    inverse = np.where(varies, 1.0 / np.asarray(scales, dtype=np.float64), 0.0)
    spread = rows.X_train.std(axis=0) * best.model.scaling_.factor
    measures = {"inverse length scale": inverse, "spread x inverse length scale": spread * inverse}
    return [
        Picture(
            "Pixel relevance",
            draw.relevance_images(measures, image_shape),
            "Inverse length scales: the prediction depends most on changes of bright pixels. Left: the effect of a "
            "change over a pixel's own range; right: of the changes that occur in the training images (pixels that "
            "hardly ever change are dark).",
        ),
        _pixels({"length scale": np.where(varies, scales, np.nan)}, image_shape, "is learned"),
    ]


def _pixels(scales: Mapping[str, np.ndarray], shape: tuple[int, int], words: str) -> Picture:
    images = {title: np.asarray(values, np.float64).reshape(shape) for title, values in scales.items()}
    return Picture(
        "Pixel length scales",
        draw.svg(
            lambda figure: feature_plots.pixel_length_scales(images, figure=figure),
            (5.0, 4.2 if len(images) == 1 else 3.4),
            "pixels",
        ),
        f"How far a pixel has to change before the prediction does, as it {words}: the darker, the more the pixel "
        "counts. Pixels that never change are left blank.",
    )


def _frequencies(rows: Tables, model: Any, initial: Any, shape: tuple[int, int] | None) -> list[Picture]:
    """For a map of cosines: the spread of its frequencies before and after learning."""
    learned, before = _spectral(getattr(model, "features_", None)), _spectral(initial)
    if learned is None or before is None:
        return []
    if shape is not None:
        varies = np.ptp(rows.X_train, axis=0) > 0
        both = {"before": feature_plots.reach(before), "after": feature_plots.reach(learned)}
        scales = {title: np.where(varies, 1 / values, np.nan) for title, values in both.items()}
        return [_pixels(scales, shape, "follows from the frequencies (1 / root mean square)")]
    size = (5.0, max(4.2, 1.2 + 0.3 * min(len(rows.feature_names), feature_plots.MOST_INPUTS)))
    return [
        Picture(
            "Frequencies",
            draw.svg(
                lambda figure: feature_plots.frequencies(learned, before, rows.feature_names, figure=figure),
                size,
                "frequencies",
            ),
            "Spread of the frequencies of each (scaled) feature: the bar is the central half, the line the central "
            "90 %; grey as drawn, in colour as learned. Higher frequencies resolve finer detail.",
        )
    ]


def _spectral(features: Any) -> Any:
    """The map, or its first layer, that has frequencies."""
    first = features.parts[0] if hasattr(features, "parts") else features
    return first if hasattr(first, "first") else None


def _accuracy_curve(model: Any) -> list[Picture]:
    names = {"embedding network": "curve_", "softmax": "softmax_curve_"}
    curves = {
        name: [(int(point["epoch"]), float(point["accuracy"])) for point in getattr(model, curve, [])]
        for name, curve in names.items()
    }
    if len(curves["embedding network"]) < 2:
        return []
    compared = bool(curves["softmax"])
    shown = curves if compared else {"": curves["embedding network"]}
    return [
        Picture(
            "Accuracy by epoch",
            draw.svg(lambda figure: feature_plots.accuracy_curves(shown, figure=figure), (10.5, 3.2), "epochs"),
            "Accuracy on test rows after every epoch, with weights fitted to all training rows. "
            + ("The other line is the same network with a softmax layer, from the same start. " if compared else "")
            + "Test accuracy was not used to choose any setting or step.",
            wide=True,
        )
    ]


def _confusion(metrics: Mapping[str, Any], classes: Sequence[str]) -> Picture:
    return Picture(
        "Confusion matrix",
        draw.confusion_matrix(metrics["confusion"], classes),
        "Test rows by true class (down) and predicted class (across); mistakes are off the diagonal.",
    )


def _reliability(metrics: Mapping[str, Any]) -> Picture:
    return Picture(
        "Reliability",
        draw.reliability_diagram(metrics["reliability"]),
        "On the dashed line the predicted probability equals the accuracy; "
        "above it the model is underconfident, below it overconfident.",
    )


def _risk_coverage(metrics: Mapping[str, Any], wide: bool = False) -> Picture:
    return Picture(
        "Error rate when uncertain rows are skipped",
        draw.risk_coverage_curve(metrics["risk_coverage"], wide),
        "Error rate when only the rows of lowest entropy are answered. A curve that rises to the right means that the "
        "entropy identifies unreliable predictions; the dashed line is the error rate over all rows.",
        wide=wide,
    )


def _weighted(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The accuracy by weight, if the rows have weights."""
    if "weighted_accuracy" not in metrics:
        return []
    loss = f", log loss {metrics['weighted_log_loss']:.3f}" if "weighted_log_loss" in metrics else ""
    return [("Weighted accuracy", f"{100 * metrics['weighted_accuracy']:.2f} %", f"rows by their weight{loss}")]


def evaluation_page(
    title: str, metrics: Mapping[str, Any], classes: Sequence[str], *, subtitle: str, footer: str
) -> str:
    """The page of `kme-dist evaluate`: stored predictions against stored labels."""
    pictures = [_confusion(metrics, classes)]
    if "reliability" in metrics:
        pictures += [_reliability(metrics), _risk_coverage(metrics, wide=True)]
    answered = metrics["rows"]
    headline = [
        (
            "Accuracy",
            f"{100 * metrics['accuracy']:.2f} %",
            f"{round(metrics['accuracy'] * answered):,} of {counted(answered, 'row', ',')}",
        ),
        ("Balanced accuracy", f"{100 * metrics['balanced_accuracy']:.2f} %", "mean recall of the classes"),
    ]
    if "log_loss" in metrics:
        headline += [
            ("Log loss", f"{metrics['log_loss']:.3f}", "lower is better"),
            (
                "Calibration error",
                f"{100 * metrics['calibration_error']:.1f} %",
                "mean gap between confidence and accuracy",
            ),
            ("Brier score", f"{metrics['brier']:.3f}", "0 is perfect, 2 is worst"),
            *(
                (f"Top {k}", f"{100 * share:.2f} %", f"true class among the {k} most probable")
                for k, share in metrics["top_k_accuracy"].items()
            ),
        ]
    headline += _weighted(metrics)
    if metrics["rows_without_answer"]:
        headline.append(("Without prediction", f"{metrics['rows_without_answer']:,}", "skipped rows, left out here"))
    return draw.render_html(
        title,
        subtitle=subtitle,
        headline=headline,
        figures=pictures,
        tables=[_class_table(metrics)],
        footer=footer,
    )


def _mistakes(rows: Tables, best: FittedStart, image_shape: tuple[int, int] | None) -> list[Picture]:
    if image_shape is None:
        return []
    probabilities = np.asarray(best.model.predict_proba(rows.X_test))
    guess = best.model.classes_[probabilities.argmax(axis=1)]
    wrong = np.flatnonzero(guess != rows.y_test)
    wrong = wrong[np.argsort(-probabilities.max(axis=1)[wrong], kind="stable")][:MOST_MISTAKES]
    if not len(wrong):
        return []
    titles = [f"{rows.y_test[row]} → {guess[row]} ({100 * probabilities[row].max():.0f} %)" for row in wrong]
    return [
        Picture(
            "Mistakes",
            draw.image_gallery(rows.X_test[wrong], titles, image_shape),
            "Misclassified test images, most confident first: true class → predicted class, "
            "and the probability of the latter.",
            wide=True,
        )
    ]


def _maps(rows: Tables, starts: Sequence[FittedStart], classes: list[str]) -> list[Picture]:
    """For two features: the predictions of the models over the plane."""
    if len(rows.feature_names) != 2:
        return []
    everything = np.concatenate([rows.X_train, rows.X_test])
    low, high = everything.min(axis=0), everything.max(axis=0)
    low, high = low - 0.08 * (high - low), high + 0.08 * (high - low)
    axes = [np.linspace(low[i], high[i], GRID_POINTS) for i in range(2)]
    points = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
    panels = []
    for start in starts:
        shown = [("before", start.given, start.metrics_given)] if start.given else []
        for moment, model, metrics in [*shown, ("after", start.model, start.metrics)]:
            accuracy = f"{100 * metrics['accuracy']:.2f} %"
            title = f"{start.name}, {moment}: {accuracy}" if start.name else accuracy
            panels.append(
                Panel(
                    title,
                    np.asarray(model.predict_proba(points)).reshape(GRID_POINTS, GRID_POINTS, -1),
                    np.asarray(model.entropy(points)).reshape(GRID_POINTS, GRID_POINTS),
                )
            )
    index = {label: number for number, label in enumerate(starts[0].model.classes_)}
    markers = [
        (X, np.array([index[label] for label in y]), held_out)
        for X, y, held_out in (
            (rows.X_train, rows.y_train, False),
            (rows.X_test, rows.y_test, True),
        )
    ]
    extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
    names = (rows.feature_names[0], rows.feature_names[1])
    return [
        Picture(
            "Probability map",
            draw.probability_maps(panels, extent, markers, classes, names),
            "The colours of the classes mixed by their probabilities, and the entropy: "
            "dark where the model is certain, bright where it is not. Small marks with a light rim are "
            "training rows, large ones with a dark rim test rows; percentages are test accuracies.",
            wide=True,
        )
    ]


def _starts_table(
    starts: Sequence[FittedStart],
) -> list[tuple[str, list[str], list[list[str]]]]:
    if starts[0].given is None:
        return []
    columns = ["start", "accuracy before", "accuracy after", "objective q", "regularisation", "kernel"]
    return [
        (
            "Starting points",
            columns,
            [
                [
                    start.name,
                    f"{100 * start.metrics_given['accuracy']:.2f} %",
                    f"{100 * start.metrics['accuracy']:.2f} %",
                    f"{start.objective:.5g}",
                    f"{float(start.model.regularization_):.4g}",
                    ": ".join(kernel_in_words(start.model.kernel_)),
                ]
                for start in starts
            ],
        )
    ]


def _class_table(metrics: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    return (
        "Classes",
        ["class", "test rows", "precision", "recall", "F1"],
        [
            [
                row["class"],
                f"{row['rows']:,}",
                *(f"{100 * row[key]:.1f} %" for key in ("precision", "recall", "f1")),
            ]
            for row in metrics["per_class"]
        ],
    )
