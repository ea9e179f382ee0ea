"""Figures of learned features: frequencies, pixel length scales, accuracy against epoch.

    frequencies(model.features_, start=first_map).savefig("frequencies.png")
    pixel_length_scales({"3 and 8": scales.reshape(28, 28)})
    accuracy_curves({"embedding network": [(1, 0.981), (2, 0.987)], "softmax": [(1, 0.962), (2, 0.975)]})

Every function returns a matplotlib figure without a window (or draws on the one it is given); the caller saves it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kme_dist.errors import ConfigError

_SOFT, _ACCENT = "#9ca3af", "#c2410c"
_OTHERS = ("#0072B2", "#0f766e", "#8b5cf6", _SOFT)
MOST_INPUTS = 20


def frequencies(
    features: Any, start: Any = None, names: Sequence[str] | None = None, *, figure: Figure | None = None
) -> Figure:
    """Spread of the frequencies of a spectral map for each input, before learning (grey) and after.

    `features` is a `Spectral` map; `start` the map before learning; `names` the inputs. If there are more than
    MOST_INPUTS, those with the widest spread are shown.
    """
    if not hasattr(features, "first"):
        raise ConfigError(f"{features!r} has no frequencies; must be a spectral map")
    learned, drawn = _all_frequencies(features), None if start is None else _all_frequencies(start)
    inputs = len(learned)
    labels = list(names) if names is not None else [f"x{i}" for i in range(inputs)]
    shown = np.sort(np.argsort(-reach(features), kind="stable")[:MOST_INPUTS])
    learned, labels = learned[shown], [_brief(str(labels[i])) for i in shown]
    drawn = None if drawn is None else drawn[shown]
    d = len(shown)
    figure = figure or Figure(figsize=(7.0, max(2.4, 0.28 * d + 1.2)), layout="constrained")
    axes = figure.subplots()
    both = [learned] if drawn is None else [learned, drawn]
    far = max(1e-12, *(float(np.abs(np.percentile(part, [5, 95], axis=1)).max()) for part in both))
    for i in range(d):
        if drawn is not None:
            _spread(axes, i + 0.18, drawn[i], _SOFT)
        _spread(axes, i - (0.18 if drawn is not None else 0.0), learned[i], _ACCENT)
    axes.set_yticks(range(d), labels)
    axes.invert_yaxis()
    axes.set_xlim(-1.05 * far, 1.05 * far)
    axes.axvline(0, color=_SOFT, linewidth=0.6)
    axes.set_xlabel("frequency (bar: central 50 %, line: central 90 %)")
    title = f"{learned.shape[1]} learned frequencies" + ("" if drawn is None else ", grey: before")
    axes.set_title(title + (f"; {d} of {inputs} inputs" if d < inputs else ""), loc="left", fontsize=11)
    _plain(axes)
    return figure


def reach(features: Any) -> np.ndarray:
    """The root mean square of the frequencies of each input: one over a length scale."""
    return np.asarray(np.sqrt(np.mean(_all_frequencies(features) ** 2, axis=1)))


def _brief(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _all_frequencies(features: Any) -> np.ndarray:
    parts = [features.first] + ([] if features.second is None else [features.second])
    return np.concatenate([np.asarray(part) for part in parts], axis=1)


def _spread(axes: Any, y: float, values: np.ndarray, colour: str) -> None:
    low, lower, middle, upper, high = np.percentile(values, [5, 25, 50, 75, 95])
    axes.plot([low, high], [y, y], color=colour, linewidth=1)
    axes.plot([lower, upper], [y, y], color=colour, linewidth=4, solid_capstyle="butt")
    axes.plot([middle], [y], "|", color=matplotlib.rcParams["text.color"], markersize=7)


def pixel_length_scales(maps: Mapping[str, np.ndarray], columns: int = 3, *, figure: Figure | None = None) -> Figure:
    """Relevance of pixels: for each title an image of length scales, dark where they are short.   [HNR, figure 2]

    Pixels that are NaN are left blank.
    """
    if not maps:
        raise ConfigError("pixel_length_scales requires at least one map")
    rows = -(-len(maps) // columns)
    columns = min(columns, len(maps))
    figure = figure or Figure(figsize=(2.4 * columns + 0.8, 2.5 * rows), layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    logs = {title: np.log10(np.asarray(values, np.float64)) for title, values in maps.items()}
    low, high = min(np.nanmin(v) for v in logs.values()), max(np.nanmax(v) for v in logs.values())
    for axes, (title, values) in zip(grid, logs.items(), strict=False):
        axes.imshow(values, cmap="magma", vmin=low, vmax=high, interpolation="nearest")
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    for axes in grid[len(logs) :]:
        axes.set_axis_off()
    bar = figure.colorbar(grid[0].images[0], ax=list(grid), location="bottom", shrink=0.7, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label("log10 length scale (dark: relevant pixel)")
    return figure


def accuracy_curves(curves: Mapping[str, Sequence[tuple[int, float]]], *, figure: Figure | None = None) -> Figure:
    """Test accuracy against epoch, one line for each name; the last value is printed beside its line."""
    if not any(len(points) for points in curves.values()):
        raise ConfigError("accuracy_curves requires at least one point")
    figure = figure or Figure(figsize=(6.4, 3.8), layout="constrained")
    axes, ends = figure.subplots(), []
    for (name, points), colour in zip(curves.items(), (_ACCENT, *_OTHERS), strict=False):
        if not points:
            continue
        epochs, values = zip(*points, strict=True)
        style = "o-" if len(epochs) <= 30 else "-"  # more markers would hide the line
        axes.plot(
            epochs, [100 * value for value in values], style, color=colour, linewidth=1.6, markersize=4, label=name
        )
        ends.append((100 * values[-1], epochs[-1], colour))
    low, high = axes.get_ylim()
    inch_points = 72 * figure.get_size_inches()[1] * 0.75 / (high - low)  # of one per cent, approximately
    lowest = math.inf
    for value, epoch, colour in sorted(ends, reverse=True):
        shift = min(0.0, lowest - 11 - value * inch_points)  # labels that would overlap are stacked
        lowest = value * inch_points + shift
        axes.annotate(
            f"{value:.2f}",
            (epoch, value),
            textcoords="offset points",
            xytext=(6, -3 + shift),
            fontsize=9,
            color=colour,
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.06)
    if any(curves):
        axes.legend(frameon=False, loc="lower right")
    _plain(axes)
    return figure


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=3, labelsize=9)
