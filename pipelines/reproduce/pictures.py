"""Pictures of a reproduced table, drawn from the records of its folds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from kme_dist.pipelines.reproduce.published import Table
from kme_dist.report import page as draw
from kme_dist.report import plots

Records = Mapping[tuple[str, str], list[dict[str, Any]]]


def of(name: str, table: Table, records: Records) -> list[draw.Picture]:
    """The pictures of a table, as far as its folds are finished."""
    return PICTURES[name](table, records) if name in PICTURES and records else []


def _starts(table: Table, records: Records) -> list[draw.Picture]:
    histories = {
        row: found[0]["history"]
        for (row, method), found in records.items()
        if method == "after learning" and found[0]["history"]
    }
    if not histories:
        return []
    caption = "Objective, risk and complexity over 500 full-gradient steps from both starts."
    return [draw.Picture("Learning from two starts", draw.learning_curves(histories), caption, wide=True)]


def _accuracies(table: Table, records: Records) -> list[draw.Picture]:
    """Accuracy against the number of images, and the length scales of pixels."""
    curves: dict[str, list[tuple[int, float]]] = {}
    maps = {}
    for (row, method), found in records.items():
        first, _, rest = row.partition(" ")
        if rest == "images":
            curves.setdefault(method, []).append((int(first), found[0]["value"]))
        elif first == "pixels":
            maps[rest] = np.array([math.nan if v is None else v for v in found[0]["length_scales"]]).reshape(28, 28)

    def draw_accuracy(figure: Figure) -> None:
        axes = figure.subplots()
        for color, (method, points) in zip(draw.PALETTE, sorted(curves.items()), strict=False):
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=color, label=method, linewidth=1.6, markersize=5)
        printed = [(row, m, v[0]) for row, figures in table.rows.items() for m, v in figures.items() if v]
        marks = [(int(row.split()[0]), value) for row, _, value in printed if row.endswith(" images")]
        axes.plot(*zip(*marks, strict=True), "x", color=draw.INK, markersize=9, label="published")
        _log(axes.xaxis, [n for points in curves.values() for n, _ in points] + [n for n, _ in marks])
        axes.set_xlabel("training images")
        axes.set_ylabel("test accuracy, %")
        axes.grid()
        axes.legend()

    shown = []
    if curves:
        picture = draw.svg(draw_accuracy, (5.2, 4.2), "accuracy")
        shown.append(draw.Picture("Accuracy against the number of images", picture, "Crosses: RCB and ERM as printed."))
    if maps:
        picture = draw.svg(lambda figure: _map(figure, maps), (5.2, 4.2), "pixels")
        shown.append(draw.Picture("Length scales of pixels", picture, "Dark pixels matter; blank ones never vary."))
    return shown


def _log(axis: Any, values: Iterable[float]) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5 of every decade between the values."""
    low, high = min(values := list(values)), max(values)
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if 0.9 * low <= tick <= 1.1 * high]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _map(figure: Figure, maps: Mapping[str, np.ndarray]) -> None:
    plots.pixel_length_scales(maps, figure=figure)


def _gains(table: Table, records: Records) -> list[draw.Picture]:
    """The decrease of the loss against rows and features."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (row, method), found in records.items():
        kernel, rows, features = row.split(", ")
        gain = sum(record["value"] for record in found) / len(found)
        for axis, number, other in (("n", rows, features == "d = 30"), ("d", features, rows == "n = 10")):
            if kernel == "RBF" and other:
                points.setdefault((axis, method), []).append((int(number.rpartition(" ")[2]), gain))

    def draw_gains(figure: Figure) -> None:
        for axes, axis, label in zip(figure.subplots(1, 2), "nd", ("rows, d = 30", "features, n = 10"), strict=True):
            for color, method in zip(draw.PALETTE, table.methods, strict=False):
                if line := sorted(points.get((axis, method), [])):
                    axes.plot(*zip(*line, strict=True), "o-", color=color, label=method, linewidth=1.6)
            _log(axes.xaxis, [x for (where, _), line in points.items() if where == axis for x, _ in line])
            axes.set_xlabel(label)
            axes.set_ylabel("decrease of the loss, %")
            axes.axhline(0, color=draw.INK, linewidth=0.8, linestyle=":")
            axes.grid()
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)

    caption = "Gaussian kernel: by how much the loss is below that of the plain mean, averaged over distributions."
    return [draw.Picture("Gain of shrinkage", draw.svg(draw_gains, (10.5, 3.8), "gains"), caption, wide=True)]


def _paths(table: Table, records: Records) -> list[draw.Picture]:
    """Distance to the dense embedding against the share of entries, of the first seed."""
    found = records.get(("sparse path", "gain"))
    if not found:
        return []
    levels = found[0]["levels"]

    def draw_path(figure: Figure) -> None:
        axes = figure.subplots()
        density = [100 * level["density"] for level in levels]
        for color, key in zip(draw.PALETTE, ("FISTA", "FISTA, refitted", "Cholesky"), strict=False):
            axes.plot(density, [level[key] for level in levels], "o-", color=color, label=key, linewidth=1.6)
        _log(axes.xaxis, density)
        _log(axes.yaxis, [level[key] for level in levels for key in ("FISTA", "FISTA, refitted", "Cholesky")])
        axes.set_xlabel("entries kept, %")
        axes.set_ylabel("relative distance to dense")
        axes.grid()
        axes.legend()

    caption = "Relative distance to the dense embedding; incomplete Cholesky is the better of its two forms."
    return [draw.Picture("Sparse path", draw.svg(draw_path, (5.2, 4.0), "path"), caption)]


PICTURES: dict[str, Callable[[Table, Records], list[draw.Picture]]] = {
    "hnr-figure-1": _starts,
    "hnr-figure-2": _accuracies,
    "kmse-figures": _gains,
    "cme-pendulum": _paths,
}
