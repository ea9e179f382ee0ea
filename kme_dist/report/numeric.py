"""Figures of numeric predictions: predicted against true, residuals, coverage of intervals.

Each function returns an inline SVG, like those of `kme_dist.report.page`.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kme_dist.report.axes import ACCENT, PALETTE
from kme_dist.report.page import INK, svg

MOST_POINTS = 1_500  # drawn; the first rows
BINS, LEAST_ROWS = 10, 25  # groups, and rows of a group
_SIZE = (5.0, 4.2)
_WRONG = PALETTE[0]


def predicted_against_true(y: np.ndarray, mean: np.ndarray, interval: np.ndarray | None = None) -> str:
    """A mark for each row, true value across and predicted value up; rows outside their interval in another colour."""
    y, mean = y[:MOST_POINTS], mean[:MOST_POINTS]
    outside = _outside(y, interval)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        low, high = min(y.min(), mean.min()), max(y.max(), mean.max())
        axes.plot([low, high], [low, high], color=INK, linewidth=1, linestyle=(0, (4, 4)), alpha=0.6)
        _marks(axes, y, mean, outside)
        axes.set_xlabel("true value")
        axes.set_ylabel("predicted mean")
        axes.set_aspect("equal", adjustable="datalim")

    return svg(draw, _SIZE, "predicted")


def residuals(y: np.ndarray, mean: np.ndarray, interval: np.ndarray | None = None) -> str:
    """True minus predicted value against the predicted value, and the ends of the intervals where they are known."""
    y, mean = y[:MOST_POINTS], mean[:MOST_POINTS]
    outside = _outside(y, interval)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axhline(0, color=INK, linewidth=1, linestyle=(0, (4, 4)), alpha=0.6)
        if interval is not None:
            ends = interval[: len(y)] - mean[:, None]
            middle, low, high = (_by_mean(mean, part) for part in (mean, *ends.T))
            axes.fill_between(middle, low, high, color=ACCENT, alpha=0.15, linewidth=0)
        _marks(axes, mean, y - mean, outside)
        axes.set_xlabel("predicted mean")
        axes.set_ylabel("true minus predicted")

    return svg(draw, _SIZE, "residuals")


def interval_coverage(y: np.ndarray, mean: np.ndarray, interval: np.ndarray, nominal: float) -> str:
    """Share of true values inside their interval, for rows grouped by the width of it; the line is the nominal one."""
    low, high = interval.T
    width, inside = high - low, (low <= y) & (y <= high)
    count = max(1, min(BINS, len(y) // LEAST_ROWS))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        groups = [part for part in np.array_split(np.argsort(width, kind="stable"), count)]
        share = np.array([inside[part].mean() for part in groups])
        error = np.sqrt(nominal * (1 - nominal) / np.array([len(part) for part in groups]))
        at = np.arange(1, len(groups) + 1)
        axes.fill_between(
            [0.5, *at, len(groups) + 0.5], nominal - 2 * error[[0, *range(len(groups)), -1]],
            np.minimum(1, nominal + 2 * error[[0, *range(len(groups)), -1]]), color=ACCENT, alpha=0.15, linewidth=0,
        )  # fmt: skip
        axes.axhline(nominal, color=INK, linewidth=1, linestyle=(0, (4, 4)), alpha=0.6)
        axes.plot(at, share, "o", color=ACCENT, markersize=6)
        axes.set_xticks(at, [f"{np.mean(width[part]):.3g}" for part in groups], rotation=45)
        axes.set_xlim(0.5, len(groups) + 0.5)
        axes.set_ylim(max(0.0, min(share.min(), nominal - 2 * error.max()) - 0.05), 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        axes.set_xlabel("mean width of the intervals of a group of rows")
        axes.set_ylabel("true values inside")
        axes.grid(axis="y")

    return svg(draw, _SIZE, "interval")


def _outside(y: np.ndarray, interval: np.ndarray | None) -> np.ndarray:
    if interval is None:
        return np.zeros(len(y), bool)
    low, high = interval[: len(y)].T
    return np.asarray((y < low) | (y > high))


def _marks(axes: Axes, x: np.ndarray, y: np.ndarray, outside: np.ndarray) -> None:
    for chosen, colour in ((~outside, ACCENT), (outside, _WRONG)):
        axes.scatter(x[chosen], y[chosen], s=14, color=colour, alpha=0.6, linewidths=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
    axes.grid()
    axes.set_axisbelow(True)


def _by_mean(mean: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Medians of values over groups of rows with similar means, in their order."""
    groups = np.array_split(np.argsort(mean, kind="stable"), max(1, min(12, len(mean) // 5)))
    return np.array([np.median(values[part]) for part in groups if len(part)])
