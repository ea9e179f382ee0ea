"""Pictures of fitted models for notebooks, in the form of scikit-learn's display classes.

    kme.RelevanceDisplay.from_estimator(model)
    kme.ReliabilityDisplay.from_estimator(model, X_test, y_test)
    kme.ReliabilityDisplay.from_predictions(y_test, probabilities)
    kme.LearningCurveDisplay.from_estimator(model, quantity="risk")

`from_estimator` computes and draws, on `ax` or on new axes; the display keeps what it shows, and `plot(ax)` draws it
again. After drawing it has `ax_` and `figure_`. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from kme_dist.core.metrics import Tally, class_codes
from kme_dist.errors import ConfigError, DataError

Histories = Mapping[str, Sequence[Mapping[str, Any]]]
_ROUNDING = 1e-6  # of probabilities in single precision


class _Display:
    """Axes to draw on."""

    ax_: Any
    figure_: Any

    def _on(self, ax: Any, size: tuple[float, float]) -> Any:
        if ax is None:
            from matplotlib import pyplot as plt

            _, ax = plt.subplots(figsize=size, layout="constrained")
        self.ax_, self.figure_ = ax, ax.figure
        return ax


class RelevanceDisplay(_Display):
    """The relevance of features as bars, the most relevant on top.

    Parameters
    ----------
    relevance : a number for each feature, e.g. shares of sum 1.   feature_names : their names.

    Attributes
    ----------
    ax_, figure_, bars_ : of the last drawing.
    """

    def __init__(self, relevance: Any, feature_names: Sequence[str]) -> None:
        self.relevance, self.feature_names = np.asarray(relevance, dtype=np.float64), [str(n) for n in feature_names]
        if self.relevance.shape != (len(self.feature_names),):
            raise DataError(
                f"relevance has shape {self.relevance.shape}, but there are {len(self.feature_names)} names"
            )

    @classmethod
    def from_estimator(cls, estimator: Any, *, most: int = 20, ax: Any = None) -> Self:
        """Of a fitted model with `feature_importances_`, ours or scikit-learn's; columns that were encoded as several
        features count as one."""
        if hasattr(estimator, "feature_groups_"):
            found, names = estimator.feature_importances("columns"), list(estimator.feature_groups_)
        elif hasattr(estimator, "feature_importances_"):
            found = np.asarray(estimator.feature_importances_)
            names = list(getattr(estimator, "feature_names_in_", [f"x{i}" for i in range(len(found))]))
        elif hasattr(type(estimator), "feature_importances_"):
            raise ConfigError(f"this {type(estimator).__name__} has no feature_importances_ yet; call fit first")
        else:
            raise ConfigError(
                f"{type(estimator).__name__} has no feature_importances_: it does not measure the relevance of "
                "features; use scikit-learn's found = permutation_importance(model, X_test, y_test), and "
                "kme_dist.RelevanceDisplay(found.importances_mean, names).plot()"
            )
        return cls(found, names).plot(ax, most=most)

    def plot(self, ax: Any = None, *, most: int = 20) -> Self:
        """Draw the `most` relevant features."""
        from kme_dist.report.axes import draw_relevance

        if not isinstance(most, int | np.integer) or most < 1:
            raise ConfigError(f"most={most!r}: must be an integer >= 1, the number of features to draw")
        count = min(most, len(self.relevance))
        self.bars_ = draw_relevance(self._on(ax, (5.0, max(1.8, 0.7 + 0.26 * count))), self.relevance,
                                    self.feature_names, most)  # fmt: skip
        return self


class ReliabilityDisplay(_Display):
    """Accuracy against the probability of the predicted class: on the diagonal a model is calibrated.

    Parameters
    ----------
    bins : of the probability, each with "confidence" (its mean), "accuracy" and "rows".
    calibration_error : mean distance to the diagonal, weighted by rows.   estimator_name : for the legend.

    Attributes
    ----------
    ax_, figure_, line_ : of the last drawing.
    """

    def __init__(
        self, bins: Sequence[Mapping[str, Any]], *, calibration_error: float, estimator_name: str | None = None
    ) -> None:
        self.bins, self.calibration_error, self.estimator_name = list(bins), calibration_error, estimator_name

    @classmethod
    def from_estimator(cls, estimator: Any, X: Any, y: Any, *, name: str | None = None, ax: Any = None) -> Self:
        """Of a fitted classifier with `predict_proba`, on rows that it was not fitted to."""
        if not hasattr(estimator, "predict_proba"):
            raise ConfigError(f"{type(estimator).__name__} has no predict_proba; pass a classifier with probabilities")
        return cls.from_predictions(
            y, estimator.predict_proba(X), classes=estimator.classes_, name=name or type(estimator).__name__, ax=ax
        )

    @classmethod
    def from_predictions(
        cls, y_true: Any, y_prob: Any, *, classes: Any = None, name: str | None = None, ax: Any = None
    ) -> Self:
        """From true labels and probabilities: a column for each of `classes` (None: the sorted labels), or one column,
        that of the second class."""
        labels, probabilities = np.asarray(y_true), np.asarray(y_prob, dtype=np.float64)
        if probabilities.ndim == 1:
            probabilities = np.stack([1 - probabilities, probabilities], axis=1)
        known = np.unique(labels) if classes is None else np.asarray(classes)
        if probabilities.shape != (len(labels), len(known)):
            raise DataError(
                f"probabilities have shape {probabilities.shape}, expected ({len(labels)}, {len(known)}): a row for "
                "each label and a column for each class"
            )
        _check_probabilities(probabilities)
        found = Tally.of(class_codes(labels, known), probabilities).metrics([str(label) for label in known])
        display = cls(found["reliability"], calibration_error=found["calibration_error"], estimator_name=name)
        return display.plot(ax)

    def plot(self, ax: Any = None) -> Self:
        """Draw the bins."""
        from kme_dist.report.axes import draw_legend, draw_reliability

        axes = self._on(ax, (4.8, 4.2))
        error = f"calibration error {100 * self.calibration_error:.1f} %"
        label = f"{self.estimator_name}\n{error}" if self.estimator_name else error
        self.line_ = draw_reliability(axes, self.bins, label)
        axes.set_xlabel("probability of the predicted class")
        draw_legend(axes)
        return self


def _check_probabilities(probabilities: np.ndarray) -> None:
    """Refuse scores and counts, which would be normalised and drawn as if they were probabilities."""
    inside = np.asarray(np.abs(probabilities - 0.5).max(axis=1) <= 0.5 + _ROUNDING)
    sums = probabilities.sum(axis=1)
    bad = ~inside | (np.abs(sums - 1) > 1e-3)
    if bad.any():
        row = int(np.argmax(bad))
        shown = ", ".join(f"{value:.4g}" for value in probabilities[row, :8])
        seen = f"with the sum {sums[row]:.6g}" if inside[row] else "which are not in [0, 1]"
        raise DataError(
            f"row {row} has the probabilities {shown}{', ...' if probabilities.shape[1] > 8 else ''}, {seen}; they "
            "must be in [0, 1] and have the sum 1: pass the result of predict_proba"
        )


class LearningCurveDisplay(_Display):
    """What learning minimised, against the step.

    Parameters
    ----------
    histories : records of steps by name, each with "step" and the quantity.
    quantity : "objective", "risk", "complexity", or any other number of the records.

    Attributes
    ----------
    ax_, figure_, lines_ : of the last drawing.
    """

    def __init__(self, histories: Histories, *, quantity: str = "objective") -> None:
        self.histories, self.quantity = {name: list(records) for name, records in histories.items()}, quantity
        for records in self.histories.values():
            if records and quantity not in records[0]:
                known = [name for name, value in records[0].items() if isinstance(value, int | float)]
                raise ConfigError(f"quantity={quantity!r} is not recorded; choose one of {', '.join(known)}")

    @classmethod
    def from_estimator(cls, estimator: Any, *, quantity: str = "objective", ax: Any = None) -> Self:
        """Of a fitted model that learned in steps, from its `history_`: a line for each phase."""
        history = getattr(estimator, "history_", None)
        if not history:
            raise ConfigError(f"{type(estimator).__name__} has no history_ of steps; fit it with steps > 0 first")
        phases: dict[str, list[Mapping[str, Any]]] = {}
        for record in history:
            phases.setdefault(str(record.get("phase", "learning")), []).append(record)
        return cls(phases, quantity=quantity).plot(ax)

    def plot(self, ax: Any = None) -> Self:
        """Draw the curves."""
        from kme_dist.report.axes import draw_curves

        axes = self._on(ax, (6.0, 3.6))
        self.lines_ = draw_curves(axes, self.histories, self.quantity)
        axes.set_ylabel(self.quantity.replace("_", " "))
        if len(self.histories) > 1:
            axes.legend(frameon=False)
        return self
