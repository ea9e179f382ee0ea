"""Pictures of learned features: frequencies, pixel length scales, accuracy against epoch.

    frequencies(model.features_, start=first_map).savefig("frequencies.png")
    pixel_length_scales({"3 and 8": scales.reshape(28, 28)})
    accuracy_curves({"embedding network": [(1, 0.981), (2, 0.987)], "softmax": [(1, 0.962), (2, 0.975)]})

Every function returns a matplotlib figure that belongs to no window; saving it is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kme_dist.errors import ConfigError

_INK, _SOFT, _ACCENT = "#1f2937", "#9ca3af", "#c2410c"


def frequencies(features: Any, start: Any = None, names: Sequence[str] | None = None) -> Figure:
    """Where a spectral map looks: the spread of its frequencies for each input, before learning (grey) and after.

    `features` is a `Spectral` map; `start` the map that learning began with; `names` the inputs.
    """
    if not hasattr(features, "first"):
        raise ConfigError(f"{features!r} has no frequencies; a spectral map is needed")
    learned, drawn = _all_frequencies(features), None if start is None else _all_frequencies(start)
    d = len(learned)
    labels = list(names) if names is not None else [f"x{i}" for i in range(d)]
    figure = Figure(figsize=(7.0, max(2.4, 0.28 * d + 1.2)), layout="constrained")
    axes = figure.subplots()
    reach = max(1e-12, float(np.percentile(np.abs(learned), 99.5)))
    if drawn is not None:
        reach = max(reach, float(np.percentile(np.abs(drawn), 99.5)))
    for i in range(d):
        if drawn is not None:
            _spread(axes, i + 0.18, drawn[i], _SOFT)
        _spread(axes, i - (0.18 if drawn is not None else 0.0), learned[i], _ACCENT)
    axes.set_yticks(range(d), labels)
    axes.invert_yaxis()
    axes.set_xlim(-1.05 * reach, 1.05 * reach)
    axes.axvline(0, color=_SOFT, linewidth=0.6)
    axes.set_xlabel("frequency (bar: central half, line: nine tenths)")
    title = f"{learned.shape[1]} learned frequencies" + ("" if drawn is None else ", grey: before learning")
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    _plain(axes)
    return figure


def _all_frequencies(features: Any) -> np.ndarray:
    parts = [features.first] + ([] if features.second is None else [features.second])
    return np.concatenate([np.asarray(part) for part in parts], axis=1)


def _spread(axes: Any, y: float, values: np.ndarray, colour: str) -> None:
    low, lower, middle, upper, high = np.percentile(values, [5, 25, 50, 75, 95])
    axes.plot([low, high], [y, y], color=colour, linewidth=1)
    axes.plot([lower, upper], [y, y], color=colour, linewidth=4, solid_capstyle="butt")
    axes.plot([middle], [y], "|", color=_INK, markersize=7)


def pixel_length_scales(maps: Mapping[str, np.ndarray], columns: int = 3) -> Figure:
    """Which pixels matter: for each title a picture of length scales, dark where they are short.   [HNR, figure 2]"""
    if not maps:
        raise ConfigError("pixel_length_scales needs at least one map")
    rows = -(-len(maps) // columns)
    columns = min(columns, len(maps))
    figure = Figure(figsize=(2.4 * columns + 0.8, 2.5 * rows), layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    logs = {title: np.log10(np.asarray(values, np.float64)) for title, values in maps.items()}
    low, high = min(v.min() for v in logs.values()), max(v.max() for v in logs.values())
    for axes, (title, values) in zip(grid, logs.items(), strict=False):
        axes.imshow(values, cmap="magma", vmin=low, vmax=high, interpolation="nearest")
        axes.set_title(title, fontsize=10, color=_INK)
        axes.set_xticks([])
        axes.set_yticks([])
    for axes in grid[len(logs) :]:
        axes.set_axis_off()
    bar = figure.colorbar(grid[0].images[0], ax=list(grid), shrink=0.8)
    bar.set_label("log10 length scale (dark: the pixel matters)")
    return figure


def accuracy_curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Test accuracy against epoch, one line for each name; the last value is written beside its line."""
    if not any(len(points) for points in curves.values()):
        raise ConfigError("accuracy_curves needs at least one point")
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    colours = (_ACCENT, _INK, "#0f766e", "#6d28d9", _SOFT)
    for (name, points), colour in zip(curves.items(), colours, strict=False):
        if not points:
            continue
        epochs, values = zip(*points, strict=True)
        axes.plot(
            epochs, [100 * value for value in values], "o-", color=colour, linewidth=1.6, markersize=4, label=name
        )
        axes.annotate(
            f"{100 * values[-1]:.2f}",
            (epochs[-1], 100 * values[-1]),
            textcoords="offset points",
            xytext=(6, -3),
            fontsize=9,
            color=colour,
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right")
    _plain(axes)
    return figure


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=3, labelsize=9)
