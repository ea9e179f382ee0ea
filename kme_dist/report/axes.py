"""Drawings on given axes, shared by the pages of runs (`page`) and the displays for notebooks (`displays`).

Text has the colour that matplotlib's settings give it, so that a page can choose another one for its theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

# Okabe and Ito's palette; the first three are its red, green and blue.
PALETTE = ("#D55E00", "#009E73", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A", "#B8A900")
ACCENT = "#3B8BD0"
_LEGEND = 0.85  # of the width of the axes, which becomes less when their neighbours get labels
_SMALLEST = 4.0  # size of text, in points


def draw_curves(axes: Axes, histories: Mapping[str, Sequence[Mapping[str, Any]]], quantity: str) -> list[Any]:
    """A quantity of the records of learning steps against the step, one line for each history."""
    values: list[float] = []
    lines = []
    for color, style, (name, history) in zip(
        cycle((ACCENT, *PALETTE[:2], *PALETTE[3:])), cycle(("-", "--", "-.", ":")), histories.items(), strict=False
    ):
        steps = [record["step"] for record in history]
        series = [float(record[quantity]) for record in history]
        values += series
        lines += axes.plot(steps, series, color=color, linestyle=style, linewidth=1.6, label=name)
    axes.set_xlabel("learning step")
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    return lines


def draw_reliability(axes: Axes, bins: Sequence[Mapping[str, Any]], label: str | None = None) -> Any:
    """Accuracy against the probability of the predicted class, bin by bin, beside the diagonal."""
    ink = matplotlib.rcParams["text.color"]
    axes.plot([0, 1], [0, 1], color=ink, linewidth=1, linestyle=(0, (4, 4)), alpha=0.6)
    confidence = [b["confidence"] for b in bins]
    accuracy = [b["accuracy"] for b in bins]
    axes.vlines(confidence, confidence, accuracy, color=PALETTE[0], linewidth=2, alpha=0.7)
    (line,) = axes.plot(
        confidence, accuracy, "o-", color=ACCENT, linewidth=1.6, markersize=6, clip_on=False, zorder=3, label=label
    )
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(0, 1)
    axes.set_aspect("auto")
    axes.grid()
    return line


def draw_relevance(
    axes: Axes, relevance: np.ndarray, names: Sequence[str], most: int = 20, quantity: str = "share of the relevance"
) -> Any:
    """The most relevant features as bars, the most relevant on top."""
    order = np.argsort(relevance, kind="stable")[::-1][:most]
    slim = 0.7 * min(1.0, max(len(order), 2) / 8)  # a few bars share the height, and stay as slim as those of eight
    bars = axes.barh(range(len(order)), relevance[order], color=ACCENT, height=slim)
    axes.set_yticks(range(len(order)), [short(names[index], 28) for index in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(quantity)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    return bars


def draw_legend(axes: Axes) -> None:
    """A legend inside the axes: its text is smaller where they are narrow."""
    size = float(FontProperties(size=matplotlib.rcParams["legend.fontsize"]).get_size_in_points())
    for _ in range(3):
        legend = axes.legend(loc="upper left", frameon=False, handlelength=1.2, borderaxespad=0.3, fontsize=size)
        legend.set_in_layout(False)
        axes.figure.figure.draw_without_rendering()  # so that both widths are known
        share = legend.get_window_extent().width / (_LEGEND * axes.get_window_extent().width)
        if share <= 1:
            return
        size = max(_SMALLEST, size / share)


def cycle(values: Sequence[str]) -> Iterable[str]:
    while True:
        yield from values


def short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
