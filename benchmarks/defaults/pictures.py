"""The pictures of the page, as inline SVG."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.defaults import ranks
from benchmarks.defaults.models import MODELS
from kme_dist.report.page import ACCENT, GRID, INK, PALETTE, svg

# Colour-blind safe colours of the report; models also differ by marker.
COLOURS = dict(
    zip(
        MODELS,
        (PALETTE[0], PALETTE[2], ACCENT, PALETTE[3], PALETTE[1], PALETTE[4], PALETTE[7], PALETTE[5], PALETTE[6]),
        strict=False,
    )
) | {"before": "#8C510A"}
MARKERS = dict(zip(MODELS, "osD^vP*X<>", strict=True))


def title(model):
    return MODELS[model].title


def critical_difference(means, distance, name):
    """Mean ranks on a line, best on the left, with bars that join models that are not distinguished."""
    order = sorted(means, key=means.__getitem__)
    bars = ranks.indistinct(means, distance)
    count = len(order)
    half = -(-count // 2)
    top = 0.9 + 0.28 * len(bars)

    def draw(figure):
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_xlim(0.4, count + 0.6)
        axes.set_ylim(-(top + 0.5 * half), 1.5)
        axes.plot([1, count], [0, 0], color=INK, linewidth=1)
        for rank in range(1, count + 1):
            axes.plot([rank, rank], [0, 0.15], color=INK, linewidth=1)
            axes.text(rank, 0.3, str(rank), ha="center", fontsize=8)
        end = 1 + min(distance, count - 1)
        axes.plot([1, end], [1.0, 1.0], color=INK, linewidth=1.5, marker="|", markersize=6)
        wide = "" if distance <= count - 1 else ", longer than the axis"
        axes.text(1, 1.15, f"critical difference {distance:.2f}{wide}", fontsize=8)
        for level, bar in enumerate(bars):
            y = -0.35 - 0.28 * level
            ends = [means[bar[0]] - 0.06, means[bar[-1]] + 0.06]
            axes.plot(ends, [y, y], color=INK, linewidth=3.2, solid_capstyle="butt", alpha=0.75)
        for place, label in enumerate(order):
            left = place < half
            y = -(top + 0.5 * (place if left else count - 1 - place))
            x = 0.9 if left else count + 0.1
            weight, colour = ("bold", PALETTE[0]) if label == "MCE" else ("normal", INK)
            axes.plot(
                [means[label], means[label], x],
                [0, y, y],
                color=colour,
                linewidth=1.6 if label == "MCE" else 0.9,
                zorder=3 if label == "MCE" else 2,
            )
            said = f"{label} {means[label]:.2f}"
            side = "right" if left else "left"
            axes.text(
                x + (-0.08 if left else 0.08), y, said, ha=side, va="center", weight=weight, color=colour, fontsize=9
            )
        axes.set_xlim(1 - 0.36 * count, count + 0.36 * count)

    return svg(draw, (5.0, 1.2 + 0.16 * len(bars) + 0.3 * half), name)


def trade(figures, models, sets):
    """Points behind the best of a set against fit seconds."""
    best = {name: max(figures.mean(name, m, "accuracy") for m in models) for name in sets}

    def draw(figure):
        axes = figure.subplots()
        for m in models:
            behind = [100 * (best[name] - figures.mean(name, m, "accuracy")) for name in sets]
            seconds = [max(figures.mean(name, m, "fit_cpu"), ranks.SHORTEST) for name in sets]
            if len(sets) > 1:
                axes.scatter(seconds, behind, s=14, marker=MARKERS[m], color=COLOURS[m], alpha=0.35, linewidths=0)
            middle = math.exp(np.mean(np.log(seconds)))
            axes.scatter(
                [middle], [np.mean(behind)], s=70, marker=MARKERS[m], color=COLOURS[m], label=title(m), zorder=3
            )
        axes.set_xscale("log")
        _plain_log(axes.xaxis)
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(-0.15, 1.2 * max(axes.get_ylim()[1], 1))
        axes.invert_yaxis()
        axes.set_xlabel("fit, processor seconds")
        axes.set_ylabel("points behind the best")
        axes.grid()
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)

    return svg(draw, (5.0, 4.6), "trade")


def seconds_by_rows(figures):
    """Fit seconds of every model against the training rows of the sets."""

    def draw(figure):
        axes = figure.subplots()
        for m in figures.models:
            points, stopped = [], []
            for name in figures.sets:
                rows, mean = figures.rows(name), figures.mean(name, m, "fit_cpu")
                if mean is not None:
                    points.append((rows, max(mean, ranks.SHORTEST)))
                elif figures.is_over(name, m):
                    stopped.append((rows, max(r["limit"] for r in figures.cells[name, m].values())))
            ours = m == "mce"
            points.sort()
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker=MARKERS[m],
                    color=COLOURS[m],
                    markersize=5 if ours else 3.5,
                    linewidth=2 if ours else 0.8,
                    alpha=1 if ours else 0.75,
                    zorder=3 if ours else 2,
                    label=title(m),
                )
            for x, y in stopped:
                axes.plot(
                    [x], [y], marker="^", markersize=8, markerfacecolor="none", color=COLOURS[m], linestyle="none"
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        sizes = [figures.rows(name) or 1 for name in figures.sets]
        low, high = 0.8 * min(sizes), 1.25 * max(sizes)
        axes.set_xlim(low, high)
        axes.set_xticks([n for n in (100, 200, 500, 1000, 2000, 5000, 10_000) if low <= n <= high] or sizes)
        _plain_log(axes.xaxis)
        _plain_log(axes.yaxis)
        axes.set_xlabel("training rows")
        axes.set_ylabel("fit, processor seconds")
        axes.grid()
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)

    return svg(draw, (5.0, 4.6), "seconds")


def _plain_log(axis):
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def pooled(records, model):
    """Rows, confidence and correct rows per range of confidence, each set with weight one over all its test rows."""
    by_set = {}
    for record in records:
        if record["model"] == model and "reliability" in record:
            by_set.setdefault(record["set"], []).append(np.array(record["reliability"]))
    sums = [np.sum(parts, axis=0) for parts in by_set.values()]
    return np.sum([part / part[:, 0].sum() for part in sums], axis=0) / len(sums) if sums else None


def reliability(sums):
    """A small diagram for each model."""
    sums = {m: s for m, s in sums.items() if s is not None}
    columns = min(5, max(len(sums), 1))
    rows = max(1, -(-len(sums) // columns))

    def draw(figure):
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(sums) :]:
            axes.set_axis_off()
        for axes, (m, part) in zip(grid.flat, sums.items(), strict=False):
            part = part[part[:, 0] >= 0.005]
            axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 4)), alpha=0.6)
            confidence, accuracy = part[:, 1] / part[:, 0], part[:, 2] / part[:, 0]
            axes.plot(confidence, accuracy, color=COLOURS[m], linewidth=1.2)
            axes.scatter(
                confidence, accuracy, s=6 + 70 * part[:, 0], color=COLOURS[m], linewidths=0, clip_on=False, zorder=3
            )
            axes.set_title(title(m), fontsize=10)
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
            axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
            axes.grid(color=GRID)
        for axes in grid[-1]:
            axes.set_xlabel("confidence", fontsize=9)
        for axes in grid[:, 0]:
            axes.set_ylabel("accuracy", fontsize=9)

    return svg(draw, (10.5 * columns / 5 + (0 if columns == 5 else 0.6), 2.3 * rows + 0.3), "reliability")
