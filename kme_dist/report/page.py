"""Figures of a run, and the HTML page that shows them.

    svg = confusion_matrix(counts, ["cat", "dog"])
    page = render_html("Pets", headline=[("Accuracy", "97.2 %", "350 of 360 test rows")],
                       figures=[Picture("Confusion", svg, "Rows are true classes, ...")])

Each figure function returns an inline SVG drawn with matplotlib's object interface (no global
figure, no display). Axes and text take the colour of the surrounding page, so one figure works in
the light and the dark theme. Class colours are colour-blind safe, and classes also differ by marker
shape. The page needs no network and no script.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kme_dist.report.axes import ACCENT, PALETTE, draw_curves, draw_relevance, draw_reliability, short

MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
# Placeholders for the colours of the page, replaced in the finished SVG.
INK, GRID = "#010203", "#040506"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Picture:
    """One figure of the page: title, inline SVG, and a caption that explains how to read it."""

    title: str
    svg: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Panel:
    """Predictions of a model on a grid over two features.

    probabilities : (rows, columns, m) array   clip-normalised class probabilities
    entropy : (rows, columns) array            in nats
    """

    title: str
    probabilities: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True)
class Tinted:
    """A cell of a table with a tone: "good", "warn", "bad", "off", or "text" for sentences.

    under : a second line, smaller
    """

    text: str
    tone: str
    under: str = ""


# ------------------------------------------------------------------------------------------------
# Figures


def learning_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Objective, risk and complexity against the learning step; one line per history.

    Without complexity the objective is the risk, and is drawn alone.
    """
    columns = [("objective", "objective q"), ("risk", "risk"), ("complexity", "complexity r")]
    shown = columns if has_complexity(histories) else columns[:1]

    def draw(figure: Figure) -> None:
        for axes, (key, title) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            draw_curves(axes, histories, key)
            axes.set_title(title)
        if len(histories) > 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(histories))

    return svg(draw, (10.5, 3.2 if len(histories) > 1 else 2.9), "curves")


def has_complexity(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Whether an objective had a complexity term in some step."""
    return any(float(record["complexity"]) != 0 for history in histories.values() for record in history)


def confusion_matrix(counts: Sequence[Sequence[int]] | np.ndarray, names: Sequence[str]) -> str:
    """Counts of true class (rows) against predicted class (columns), coloured by the fraction of the row."""
    matrix = np.asarray(counts)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _plain(axes)
        axes.imshow(share, cmap=_pale_to_blue(), vmin=0, vmax=1)
        labels = [short(name, 14) for name in names]
        axes.set_xticks(range(len(names)), labels, rotation=_tilt(labels), ha="center")
        axes.set_yticks(range(len(names)), labels)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        if len(names) > 30:
            return
        size = 10 if len(names) <= 12 else 7
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                color = "white" if share[row, column] > 0.45 else "#202020"
                axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=size)

    return svg(draw, (5.0, 4.6), "confusion")


def reliability_diagram(bins: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy against predicted confidence, above a histogram of the confidences."""

    def draw(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
        draw_reliability(top, bins)
        widths = [b["high"] - b["low"] for b in bins]
        bottom.bar(
            [b["low"] for b in bins],
            [b["rows"] for b in bins],
            widths,
            align="edge",
            color=ACCENT,
            alpha=0.8,
            edgecolor="white",
            linewidth=0.5,
        )
        bottom.set_ylabel("rows")
        bottom.set_xlabel("probability of the predicted class")
        bottom.yaxis.set_major_locator(MaxNLocator(3, integer=True))

    return svg(draw, (5.0, 4.6), "reliability")


def risk_coverage_curve(points: Sequence[Mapping[str, float]], wide: bool = False) -> str:
    """Error rate among the most certain rows against coverage, the fraction of rows that these are."""
    first = next((i for i, point in enumerate(points) if point["coverage"] >= 0.02), 0)  # too few rows before
    coverage = [point["coverage"] for point in points[first:]]
    risk = [point["risk"] for point in points[first:]]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.fill_between(coverage, risk, step="pre", color=ACCENT, alpha=0.15, linewidth=0)
        axes.step(coverage, risk, where="pre", color=ACCENT, linewidth=1.8)
        axes.axhline(risk[-1], color=INK, linewidth=1, linestyle=(0, (4, 4)), alpha=0.6)
        axes.set_xlim(0, 1.01)
        axes.set_ylim(0, max(0.01, 1.15 * max(risk)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        axes.set_xlabel("coverage (rows by increasing entropy)")
        axes.set_ylabel("error rate")
        axes.grid()

    return svg(draw, (10.5, 3.2) if wide else (5.0, 4.2), "coverage")


def relevance_images(relevance: Mapping[str, np.ndarray], shape: tuple[int, int]) -> str:
    """Relevance of each pixel as images side by side, one per measure, each with its own scale."""

    def draw(figure: Figure) -> None:
        for axes, (title, values) in zip(figure.subplots(1, len(relevance)), relevance.items(), strict=True):
            _plain(axes)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(title, fontsize=10)
            picture = axes.imshow(values.reshape(shape), cmap="cividis", vmin=0)
            bar = figure.colorbar(picture, ax=axes, location="bottom", shrink=0.9, pad=0.03)
            bar.outline.set_visible(False)
            bar.locator = MaxNLocator(4)

    return svg(draw, (6.0, 3.7), "relevance")


def relevance_bars(
    relevance: np.ndarray, names: Sequence[str], most: int = 20, quantity: str = "share of the relevance"
) -> str:
    """The most relevant features as bars, the most relevant on top."""

    def draw(figure: Figure) -> None:
        draw_relevance(figure.subplots(), relevance, names, most, quantity)

    return svg(draw, (5.0, max(4.2, 0.7 + 0.24 * min(most, len(relevance)))), "relevance")


def image_gallery(images: np.ndarray, titles: Sequence[str], shape: tuple[int, int], columns: int = 8) -> str:
    """Small images in rows, each with a title (misclassified rows, for example)."""
    rows, columns = -(-len(images) // columns), min(columns, len(images))

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for axes, image, title in zip(grid.flat, images, titles, strict=False):
            axes.imshow(image.reshape(shape), cmap="gray_r")
            axes.set_title(title, fontsize=9, loc="center")

    return svg(draw, (1.3 * columns, 1.5 * rows), "gallery")


def probability_maps(
    panels: Sequence[Panel],
    extent: tuple[float, float, float, float],
    points: Sequence[tuple[np.ndarray, np.ndarray, bool]],
    class_names: Sequence[str],
    axis_names: tuple[str, str],
) -> str:
    """Class probabilities as mixed colours, entropy below, one column per panel, with the data points.

    points : sequence of (xy, class index, held out)   held-out rows have a dark edge
    """
    colors = np.array([to_rgb(color) for color in _take(PALETTE, len(class_names))])
    ceiling = float(np.log(len(class_names)))

    def draw(figure: Figure) -> None:
        shape = (2, len(panels)) if len(panels) > 1 else (1, 2)  # a single model is shown side by side
        grid = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).reshape(2, -1)
        for column, panel in enumerate(panels):
            top, bottom = grid[:, column]
            mixture = np.clip(panel.probabilities @ colors, 0, 1)
            # Blended with white, so that the points of a class are visible in its own region.
            pale = 0.35 + 0.65 * mixture
            top.imshow(pale, origin="lower", extent=extent, aspect="auto")
            heat = bottom.imshow(
                panel.entropy,
                origin="lower",
                extent=extent,
                aspect="auto",
                cmap="cividis",
                vmin=0,
                vmax=ceiling,
            )
            for axes in (top, bottom):
                _plain(axes)
                _scatter(axes, points, class_names, size=1.0 if len(panels) > 2 else 1.8)
                axes.set_xlim(extent[:2])
                axes.set_ylim(extent[2:])
            top.set_title(panel.title)
            bottom.set_xlabel(axis_names[0])
        grid[0, 0].set_ylabel(axis_names[1])
        if len(panels) > 1:
            grid[1, 0].set_ylabel(axis_names[1])
        else:
            grid[0, 0].set_xlabel(axis_names[0])
        bar = figure.colorbar(heat, ax=grid[1, :], label="entropy (nats)", pad=0.01)
        bar.outline.set_visible(False)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), markerscale=2)

    height = 5.6 if len(panels) > 3 else 6.2 if len(panels) > 1 else 4.4
    return svg(draw, (10.5, height), "map")


def _scatter(
    axes: Axes,
    points: Sequence[tuple[np.ndarray, np.ndarray, bool]],
    class_names: Sequence[str],
    size: float,
) -> None:
    for xy, index, held_out in points:
        for number, name in enumerate(class_names):
            chosen = xy[index == number]
            axes.scatter(
                chosen[:, 0],
                chosen[:, 1],
                s=size * (24 if held_out else 9),
                marker=MARKERS[number % len(MARKERS)],
                color=PALETTE[number % len(PALETTE)],
                edgecolors="black" if held_out else "white",
                linewidths=0.9 if held_out else 0.4,
                label=None if held_out else short(name, 20),
            )


# ------------------------------------------------------------------------------------------------
# Drawing helpers


def svg(draw: Callable[[Figure], None], size: tuple[float, float], name: str) -> str:
    """Draw on a new figure and return SVG text to embed in a page."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Ids inside one figure must not clash with those of another on the same page.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r"(font: [^;\"]*?px)[^;\"]*", r"\1 system-ui, sans-serif", text)
    drawn = f"--drawn: {96 * size[0]:.0f}px"  # its width at the size it was drawn for
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" style="{drawn}">', text)
    return text.replace(INK, "currentColor").replace(GRID, "var(--grid)")


def _plain(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


def _pale_to_blue() -> Colormap:
    low, high = np.array(to_rgb("#EEF2F6")), np.array(to_rgb("#0B4F8A"))
    return ListedColormap([low + (high - low) * t for t in np.linspace(0, 1, 256)])


def _take(values: Sequence[str], count: int) -> list[str]:
    return [values[index % len(values)] for index in range(count)]


def _tilt(labels: Sequence[str]) -> int:
    return 90 if sum(map(len, labels)) > 50 else 0


# ------------------------------------------------------------------------------------------------
# The page


def render_html(
    title: str,
    *,
    subtitle: str = "",
    headline: Sequence[tuple[str, str, str]] = (),
    figures: Sequence[Picture] = (),
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str | Tinted]]]] = (),
    config_text: str = "",
    footer: str = "",
) -> str:
    """One self-contained page. All text is escaped; only the SVG of the figures is inserted as is.

    headline : (label, value, note) per tile        tables : (title, column names, rows) per table
    """
    tiles = "".join(
        f'<div class="tile"><dt>{_text(label)}</dt><dd>{_text(value)}</dd><p>{_text(note)}</p></div>'
        for label, value, note in headline
    )
    pictures = "".join(
        f'<figure class="{"wide" if picture.wide else ""}"><h2>{_text(picture.title)}</h2>'
        f'<div class="scroll">{picture.svg}</div>'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
        for picture in figures
    )
    return _PAGE.format(
        title=_text(title),
        subtitle=_text(subtitle),
        tiles=tiles,
        pictures=pictures,
        tables="".join(_table(*table) for table in tables),
        config=f"<section><h2>Configuration</h2><pre>{_text(config_text)}</pre></section>" if config_text else "",
        footer=_text(footer),
    )


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Tinted]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        f'<section><h2>{_text(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _cell(cell: str | Tinted) -> str:
    if isinstance(cell, str):
        return f"<td>{_text(cell)}</td>"
    under = f"<br><small>{_text(cell.under)}</small>" if cell.under else ""
    return f'<td class="{_text(cell.tone)}">{_text(cell.text)}{under}</td>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · kme-dist</title>
<style>
:root {{ --page: #f6f7f9; --card: #ffffff; --ink: #1c2126; --soft: #5b6670; --grid: #d8dde2;
        --accent: #1f6fb2; --good: #d9f0e4; --warn: #fbe7c2; --bad: #f8d3cd;
        --shade: #0000004d; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #12161a; --card: #1b2127; --ink: #e4e8ec; --soft: #9aa6b1; --grid: #39434c;
          --accent: #6db3f2; --good: #174a35; --warn: #5a4310; --bad: #66231b;
          --shade: #ffffff4d; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 20px 48px; }}
h1 {{ font-size: 28px; margin: 0; letter-spacing: -0.01em; }}
h2 {{ font-size: 16px; margin: 0 0 8px; }}
.subtitle {{ color: var(--soft); margin: 4px 0 20px; }}
dl {{ display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px;
     margin: 0 0 20px; }}
.tile, figure, section {{ background: var(--card); border: 1px solid var(--grid);
                        border-radius: 10px; padding: 14px 16px; margin: 0; }}
dt {{ color: var(--soft); font-size: 13px; }}
dd {{ margin: 0; font-size: 25px; font-weight: 600; font-variant-numeric: tabular-nums;
     overflow-wrap: anywhere; line-height: 1.25; }}
.tile:first-child dd {{ color: var(--accent); }}
.tile p {{ margin: 2px 0 0; color: var(--soft); font-size: 12.5px; }}
.pictures {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px;
            margin-bottom: 16px; }}
.wide {{ grid-column: 1 / -1; }}
figure svg {{ width: 100%; max-width: calc(1.1 * var(--drawn)); height: auto; display: block; }}
figcaption {{ color: var(--soft); font-size: 13.5px; margin-top: 8px; }}
section {{ margin-bottom: 16px; }}
.scroll {{ overflow-x: auto; background:
  linear-gradient(to right, var(--card) 30%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--card) 30%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / 14px 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / 14px 100% no-repeat scroll; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 5px 12px; border-bottom: 1px solid var(--grid); }}
th {{ color: var(--soft); font-weight: 500; font-size: 13px; }}
th:first-child, td:first-child {{ text-align: left; }}
tbody tr:last-child td {{ border-bottom: 0; }}
td.good {{ background: var(--good); }} td.warn {{ background: var(--warn); }} td.bad {{ background: var(--bad); }}
td.off {{ color: var(--soft); }} td.text {{ text-align: left; }} td small, td.good, td.warn {{ white-space: nowrap; }}
td small {{ opacity: 0.75; }}
pre {{ margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, monospace; }}
footer {{ color: var(--soft); font-size: 13px; }}
@media (max-width: 760px) {{ .pictures {{ grid-template-columns: minmax(0, 1fr); }}
  .wide svg {{ min-width: min(640px, var(--drawn)); }}
  dl {{ grid-template-columns: repeat(2, minmax(0, 1fr)); }} }}
</style></head>
<body><main>
<h1>{title}</h1><p class="subtitle">{subtitle}</p>
<dl>{tiles}</dl>
<div class="pictures">{pictures}</div>
{tables}
{config}
<footer>{footer}</footer>
</main></body></html>
"""
