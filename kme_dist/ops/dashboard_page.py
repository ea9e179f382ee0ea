"""The page `/kme`: all runs, live, in Bokeh, beside Dask's own pages.

    cards      one for each run: status, progress, time left, key numbers
    learning   objective q, risk, complexity r, regularisation, gradient norm, accuracy, by step
    pace       rows per second and the fraction of time spent waiting
    scales     length scales: an image if rows are images
    workers    load and counts of each worker

A run has the same colour in its card and in every curve. The page holds no state: `RunBoard` does, and each open page
redraws from it once a second, sending only new points. Colours come from style sheets that follow the reader's
preference for light or dark. `/kme?run=ID` shows a single run, `/kme?run=NAME` those of one config.
"""

from __future__ import annotations

import html
import math
import time
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    HoverTool,
    InlineStyleSheet,
    LinearColorMapper,
    NumeralTickFormatter,
)
from bokeh.models.annotations import ColorBar
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from kme_dist.ops.board import NAME, PACE_COLUMNS, STEP_COLUMNS, BoardRun, Curve, RunBoard, duration

PATH = "/kme"
MILLISECONDS = 1000
RUNS_SHOWN = 6
SCALES_SHOWN = 3
WORKERS_SHOWN = 40
# Legible on white and on black, and none of them the red of a failure.
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#06b6d4", "#84cc16", "#b08968", "#8b95a7")
# Title, column, kind of axis.
LEARNING = (
    ("objective q", "objective", "linear"),
    ("risk", "risk", "linear"),
    ("complexity r", "complexity", "linear"),
    ("regularisation λ", "regularization", "log"),
    ("gradient norm", "gradient_norm", "log"),
    ("accuracy (dashed: of the batch)", "validation_accuracy", "linear"),
)
PACE = (("rows per second", "rows_per_second"), ("fraction of time waiting", "waiting_share"))

_HEAD = """
{% extends "simple.html" %}
{% block extra_resources %}
<style>
:root { color-scheme: light dark;
  --ink: #1f2328; --soft: #656d76; --paper: #ffffff; --back: #f6f8fa; --edge: #d8dee4; --track: #e7ebef;
  --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6edf3; --soft: #9198a1; --paper: #151b23; --back: #0d1117; --edge: #3d444d; --track: #2a313c;
  --good: #3fb950; --bad: #f85149; --warn: #d29922; } }
:root { --bk-background-fill-color: var(--paper); --bk-border-fill-color: var(--paper);
  --bk-outline-line-color: transparent; --bk-axis-line-color: var(--edge); --bk-grid-line-color: var(--track);
  --bk-major-tick-line-color: var(--edge); --bk-minor-tick-line-color: transparent;
  --bk-major-label-text-color: var(--soft); --bk-axis-label-text-color: var(--soft); --bk-text-color: var(--ink); }
html, body { background: var(--back); color: var(--ink); }
.navbar ul, .dropdown-content { background-color: var(--paper); border-bottom: 1px solid var(--edge); }
.navbar li a { color: var(--ink); }
@media (prefers-color-scheme: dark) { #navbar-toggle-icon img { filter: invert(1) hue-rotate(180deg); } }
</style>
{% endblock %}
"""
_STYLE = """
:host { color: var(--ink); font: 13px/1.45 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
:host > div { width: 100%; }
h2 { font-size: 13px; font-weight: 600; margin: 14px 2px 4px; color: var(--soft); }
.runs { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 10px; }
.run { background: var(--paper); border: 1px solid var(--edge); border-left: 5px solid var(--tone); border-radius: 8px;
  padding: 9px 12px; }
.run header { display: flex; gap: 8px; align-items: baseline; }
.run header b { font-size: 15px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.run header span { color: var(--soft); }
.run header .status { margin-left: auto; font-weight: 600; }
.running .status { color: var(--tone); } .succeeded .status { color: var(--good); }
.failed .status, .lost .status { color: var(--bad); } .interrupted .status { color: var(--warn); }
.bar { height: 7px; border-radius: 4px; background: var(--track); margin: 7px 0 5px; overflow: hidden; display: flex; }
.bar i { background: var(--tone); } .bar i.bad { background: var(--bad); }
.bar.unknown { background: repeating-linear-gradient(115deg, var(--track) 0 12px, var(--tone) 12px 18px); opacity: .6; }
.id { color: var(--soft); font: 11px/1.4 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.line { display: flex; justify-content: space-between; color: var(--soft); font-variant-numeric: tabular-nums; }
.numbers { display: grid; grid-template-columns: repeat(4, 1fr); gap: 4px 10px; margin-top: 7px; }
.numbers div { color: var(--soft); font-size: 11px; }
.numbers b { display: block; color: var(--ink); font-size: 14px; font-weight: 600; font-variant-numeric: tabular-nums; }
.note { color: var(--soft); margin-top: 6px; } .bad { color: var(--bad); }
.empty { background: var(--paper); border: 1px dashed var(--edge); border-radius: 8px; padding: 26px;
  text-align: center; color: var(--soft); }
.empty b { display: block; color: var(--ink); font-size: 15px; margin-bottom: 4px; }
code { background: var(--track); border-radius: 4px; padding: 1px 5px; }
table { border-collapse: collapse; width: 100%; background: var(--paper); border: 1px solid var(--edge); }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--track);
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; font-size: 12px; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
"""


def document(scheduler: Any, extra: dict[str, Any], doc: Any) -> None:
    """Called by Bokeh for every browser that opens the page."""
    request = doc.session_context.request if doc.session_context else None
    wanted = request.arguments.get("run", [b""])[0].decode("utf-8", "replace") if request is not None else ""
    page = Page(scheduler, wanted or None)
    doc.title = "kme-dist"
    doc.theme = BOKEH_THEME
    doc.template = env.from_string(_HEAD)
    doc.template_variables.update(extra)
    doc.add_root(page.root)
    page.update()
    doc.add_periodic_callback(page.update, MILLISECONDS)


class Page:
    """The page in one browser."""

    def __init__(self, scheduler: Any, wanted: str | None = None) -> None:
        self.scheduler, self.wanted = scheduler, wanted
        self.cards, self.workers = _text(), _text()
        self.learning = [Drawing(STEP_COLUMNS) for _ in range(RUNS_SHOWN)]
        self.pace = [Drawing(PACE_COLUMNS) for _ in range(RUNS_SHOWN)]
        self.scales = [ScalesPlot() for _ in range(SCALES_SHOWN)]
        curves = [_chart(title, "step", name, kind, self.learning) for title, name, kind in LEARNING]
        for drawing in self.learning:
            drawing.lines.append(
                curves[-1].line(
                    "step", "accuracy", source=drawing.source, line_width=1.2, line_dash="4 3", visible=False
                )
            )
        pace = [_chart(title, "seconds", name, "linear", self.pace) for title, name in PACE]
        pace[1].y_range.start, pace[1].y_range.end = 0, 1
        pace[0].yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
        pace[1].yaxis.formatter = NumeralTickFormatter(format="0%")
        self.learning_part = column(
            _heading("Learning, by step"),
            column(_wrapped(curves[:3]), _wrapped(curves[3:]), sizing_mode="stretch_width", spacing=10),
            sizing_mode="stretch_width",
        )
        self.pace_part = column(
            _heading("Pace, by seconds since the start"), _wrapped(pace), sizing_mode="stretch_width"
        )
        self.scales_part = column(
            _heading("Length scales (short: the feature matters)"),
            _wrapped([plot.figure for plot in self.scales]),
            sizing_mode="stretch_width",
        )
        self.root = column(
            self.cards,
            self.learning_part,
            self.pace_part,
            self.scales_part,
            self.workers,
            sizing_mode="stretch_width",
            styles={"max-width": "1500px", "margin": "0 auto", "padding-bottom": "20px"},
        )
        self._rows_before: dict[str, tuple[float, float, float]] = {}

    def update(self) -> None:
        board: RunBoard = self.scheduler.extensions[NAME]
        runs = board.latest(RUNS_SHOWN, self.wanted)
        _show(self.cards, cards(runs, self.wanted))
        _show(self.workers, self.worker_table())
        for drawing, run in zip(self.learning, _padded(runs, RUNS_SHOWN), strict=True):
            drawing.follow(run, run.steps if run else None)
        for drawing, run in zip(self.pace, _padded(runs, RUNS_SHOWN), strict=True):
            drawing.follow(run, run.pace if run else None)
        scaled = [run for run in runs if run.scales is not None][-SCALES_SHOWN:]
        for plot, run in zip(self.scales, _padded(scaled, SCALES_SHOWN), strict=True):
            plot.follow(run)
        self.learning_part.visible = any(len(run.steps) for run in runs)
        self.pace_part.visible = any(len(run.pace) for run in runs)
        self.scales_part.visible = bool(scaled)

    def worker_table(self) -> str:
        found = sorted(self.scheduler.workers.values(), key=lambda worker: str(worker.name))
        heads = ("worker", "address", "state", "CPU", "memory", "tasks now", "done", "failed", "rows", "rows/s", "busy")
        lines = [self._worker_line(worker) for worker in found[:WORKERS_SHOWN]]
        more = f"<div class=note>and {len(found) - WORKERS_SHOWN} more</div>" if len(found) > WORKERS_SHOWN else ""
        head = "".join(f"<th>{name}</th>" for name in heads)
        table = f"<table><tr>{head}</tr>{''.join(lines)}</table>{more}" if found else "<div class=note>none</div>"
        return f"<h2>Workers: {len(found)}</h2>{table}"

    def _worker_line(self, worker: Any) -> str:
        counts = worker.metrics.get(NAME) or {}
        rows, now = float(counts.get("rows", 0)), time.monotonic()
        then, before, rate = self._rows_before.get(worker.address, (now, rows, 0.0))
        if now - then >= 2.0 or worker.address not in self._rows_before:
            rate = max(0.0, rows - before) / (now - then) if now > then else 0.0
            self._rows_before[worker.address] = (now, rows, rate)
        limit = f" of {_bytes(worker.memory_limit)}" if worker.memory_limit else ""
        state = worker.status.name
        cells = (
            html.escape(str(worker.name)),
            html.escape(worker.address),
            state if state == "running" else f"<span class=bad>{html.escape(state)}</span>",
            f"{worker.metrics.get('cpu', 0):.0f} %",
            _bytes(worker.metrics.get("memory", 0)) + limit,
            str(len(worker.processing)),
            _count(counts.get("calls", 0)),
            f"<span class=bad>{counts['failed']}</span>" if counts.get("failed") else "0",
            _count(rows),
            _count(rate),
            duration(counts.get("seconds", 0)),
        )
        return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


class Drawing:
    """The curves of one run in several charts, from one source; only new points are sent to the browser."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.source: Any = ColumnDataSource(_empty(*names, "run"))
        self.lines: list[Any] = []
        self._run: BoardRun | None = None
        self._drawn = (-1, 0)

    def follow(self, run: BoardRun | None, curve: Curve | None) -> None:
        if run is None or curve is None:
            if self._run is not None:
                self.source.data = _empty(*self.source.data)
                self._show(False)
            self._run, self._drawn = None, (-1, 0)
            return
        generation, count = self._drawn
        if run is not self._run or generation != curve.generation:
            self._run, count = run, 0
            self.source.data = curve.since(0) | {"run": [run.run] * len(curve)}
            self._show(True)
        elif len(curve) > count:
            self.source.stream(curve.since(count) | {"run": [run.run] * (len(curve) - count)})
        self._drawn = (curve.generation, len(curve))
        for line in self.lines:
            line.glyph.line_color = tone(run)

    def _show(self, visible: bool) -> None:
        for line in self.lines:
            line.visible = visible  # browsers spend time on empty lines as well


class ScalesPlot:
    """Length scales of one run: an image, or a line over the features."""

    def __init__(self) -> None:
        self.figure = _figure("", height=250, max_width=480)
        self.mapper: Any = LinearColorMapper(palette="Viridis256", low=0, high=1)
        self.pixels: Any = ColumnDataSource(_empty("image", "dw", "dh"))
        self.line: Any = ColumnDataSource(_empty("feature", "scale", "zero"))
        self.image = self.figure.image(
            image="image", x=0, y=0, dw="dw", dh="dh", source=self.pixels, color_mapper=self.mapper
        )
        self.stems = self.figure.segment("feature", "zero", "feature", "scale", source=self.line, line_width=3)
        bar = ColorBar(
            color_mapper=self.mapper, width=8, padding=4, background_fill_alpha=0, major_label_text_color="#8b949e"
        )
        self.figure.add_layout(bar, "right")
        self.figure.grid.visible = False
        self._bar, self._seen = bar, (0.0, 0)

    def follow(self, run: BoardRun | None) -> None:
        self.figure.visible = run is not None
        if run is None or run.scales is None or self._seen == (run.began, run.scales_seen):
            return
        self._seen = (run.began, run.scales_seen)
        scales, grid = run.scales, run.scales.grid
        low, high = float(grid.min()), float(grid.max())
        self.figure.title.text = (
            f"{run.run}: {scales.features} features, log₁₀ of length scales from {low:.2f} to {high:.2f}"
        )
        self.figure.xaxis.visible = self.figure.yaxis.visible = not scales.is_image
        self.image.visible = self._bar.visible = scales.is_image
        self.stems.visible = not scales.is_image
        if scales.is_image:
            self.mapper.low, self.mapper.high = low, max(high, low + 1e-9)
            self.pixels.data = {"image": [grid[::-1]], "dw": [grid.shape[1]], "dh": [grid.shape[0]]}
            self.figure.match_aspect = True
        else:
            values = grid.ravel()
            places = [(i + 0.5) * scales.features / len(values) for i in range(len(values))]
            floor = low - 0.05 * (high - low)  # so that the shortest stem is visible
            self.line.data = {"feature": places, "scale": values, "zero": [floor] * len(values)}
            self.stems.glyph.line_color = tone(run)


# --- pieces -----------------------------------------------------------------------------------------


def tone(run: BoardRun) -> str:
    return COLOURS[run.tone]


def _chart(title: str, x: str, y: str, kind: Any, drawings: list[Drawing]) -> Any:
    chart = _figure(title, height=190, y_axis_type=kind)
    if kind == "log":
        # Bokeh's own ticker leaves half an axis without ticks if it spans less than two decades.
        chart.yaxis.ticker = [mantissa * 10.0**power for power in range(-12, 13) for mantissa in (1, 3)]
        chart.yaxis.formatter = CustomJSTickFormatter(code="return String(Number(tick.toPrecision(1)))")
    lines: list[Any] = []
    for drawing in drawings:
        line = chart.line(x, y, source=drawing.source, line_width=2, line_join="round", visible=False)
        drawing.lines.append(line)
        lines.append(line)
    chart.add_tools(
        HoverTool(
            renderers=lines, tooltips=[("", "@run"), (x, f"@{x}{{0,0}}"), (title, f"@{y}{{0.00000}}")], mode="vline"
        )
    )
    chart.xgrid.visible = False
    return chart


def _figure(title: str, **options: Any) -> Any:
    made: Any = figure(
        title=title,
        min_width=280,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        styles={"border": "1px solid var(--edge)", "border-radius": "8px", "overflow": "hidden"},
        **options,
    )
    made.title.text_font_size, made.title.text_font_style = "12px", "normal"
    made.outline_line_color = None
    made.min_border_bottom, made.min_border_right = 30, 14  # the border would cut off what is too near
    return made


def _wrapped(children: list[Any]) -> Any:
    return row(*children, sizing_mode="stretch_width", spacing=10, styles={"flex-wrap": "wrap"})


def _text(text: str = "") -> Div:
    return Div(
        text=text,
        sizing_mode="stretch_width",
        margin=(5, 0, 5, 0),  # level with the charts on both sides
        stylesheets=[InlineStyleSheet(css=_STYLE)],
    )


def _heading(text: str) -> Div:
    return _text(f"<h2>{text}</h2>")


def _empty(*names: str) -> dict[str, Any]:
    return {name: [] for name in names}


def _show(div: Div, text: str) -> None:
    if div.text != text:
        div.text = text


def _padded(runs: list[BoardRun], count: int) -> list[BoardRun | None]:
    return [*runs, *[None] * (count - len(runs))]


def cards(runs: list[BoardRun], wanted: str | None = None) -> str:
    """All runs as cards; text from messages is escaped."""
    if runs:
        return f"<div class=runs>{''.join(_card(run) for run in runs)}</div>"
    if wanted is not None:
        return f"<div class=empty><b>No run {html.escape(wanted)}</b>See <a href=kme>all runs</a>.</div>"
    return (
        "<div class=empty><b>No runs yet</b>Learning, fitting and prediction on this cluster appear here: "
        "<code>kme-dist learn CONFIG --scheduler ADDRESS</code></div>"
    )


def _card(run: BoardRun) -> str:
    numbers = "".join(f"<div>{name}<b>{value}</b></div>" for name, value in _numbers(run))
    failed = run.chunks.get("failed", 0) / run.total if run.total else 0.0
    bar = f"<i style='width:{100 * (run.share - failed):.1f}%'></i><i class=bad style='width:{100 * failed:.1f}%'></i>"
    unknown = run.status == "running" and not run.total
    return (
        f"<article class='run {run.status}' style='--tone:{tone(run)}'><header>"
        f"<b>{html.escape(run.pipeline or run.run)}</b><span>{html.escape(run.stage)}</span>"
        f"<span class=status>{run.status}</span></header><div class=id>{html.escape(run.run)}</div>"
        f"<div class='bar{' unknown' if unknown else ''}'>{bar}</div>"
        f"<div class=line><span>{_progress(run)}</span><span>{_times(run)}</span></div>"
        f"<div class=numbers>{numbers}</div>{_note(run)}</article>"
    )


def _progress(run: BoardRun) -> str:
    if run.chunks:
        failed = run.chunks["failed"]
        bad = f", <span class=bad>{failed} failed</span>" if failed else ", 0 failed"
        return f"chunks {run.chunks['done']:,} of {run.chunks['total']:,}{bad}"
    if run.rows_total:
        return f"rows {run.rows:,} of {run.rows_total:,}"
    if "step" in run.latest:
        early = "stopped early at " if run.status == "succeeded" and run.done < run.total else ""
        return f"{early}step {run.done:,.0f} of {run.total:,.0f} {html.escape(run.phase)}"
    if run.status == "running":
        return f"{run.share:.0%}" if run.total else "in progress"
    return "done" if run.status == "succeeded" else ""


def _times(run: BoardRun) -> str:
    if run.status != "running":
        return f"took {duration(run.seconds)}"
    left = "" if run.seconds_left is None else f", {duration(run.seconds_left)} left"
    return f"{duration(run.seconds)}{left}"


def _numbers(run: BoardRun) -> list[tuple[str, str]]:
    latest = run.latest
    accuracy = latest.get("validation_accuracy", latest.get("accuracy"))
    shown = [
        ("q", _number(latest.get("objective"))),
        ("risk", _number(latest.get("risk"))),
        ("r", _number(latest.get("complexity"))),
        ("λ", _number(latest.get("regularization"))),
        ("gradient", _number(latest.get("gradient_norm"))),
        ("accuracy", None if accuracy is None else f"{accuracy:.1%}"),
        ("rows/s", _count(run.rows_per_second) if run.rows_per_second else None),
        ("waiting", f"{latest['waiting_share']:.0%}" if "waiting_share" in latest else None),
        ("rows", _count(run.rows) if run.chunks else None),
    ]
    return [(name, value) for name, value in shown if value is not None]


def _note(run: BoardRun) -> str:
    if run.status in ("failed", "lost", "interrupted"):
        said = run.facts.get("message") or run.facts.get("error") or "its process disappeared without a message"
        return f"<div class='note bad'>{html.escape(str(said)[:200])}</div>"
    quiet = time.time() - run.last_message
    if run.status == "running" and quiet > 30:
        return f"<div class=note>no message for {duration(quiet)}</div>"
    if run.events:
        what, when = run.events[-1]
        return f"<div class=note>{html.escape(what)} {duration(max(0.0, time.time() - when))} ago</div>"
    return ""


def _number(value: float | None) -> str | None:
    return (
        None
        if value is None
        else "–"
        if not math.isfinite(value)
        else f"{value:.4g}"
        if value >= 0.01
        else f"{value:.2g}"
    )


def _count(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (size if unit != ' k' else 1e3):.3g}{unit}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
