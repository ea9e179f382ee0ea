"""The table as one self-contained page: tables of figures, ranks, and pictures."""

from __future__ import annotations

import html

from benchmarks.defaults import pictures, ranks, summary
from benchmarks.defaults.models import MODELS
from benchmarks.defaults.summary import ranked, shown, title
from kme_dist.errors import plural
from kme_dist.report.page import Picture, render_html

FIGURES = {
    "accuracy": ("Accuracy, %", "Mean ± standard error over splits."),
    "log_loss": (
        "Log loss",
        "Probabilities no smaller than 1e-15, which a class that is missing in training gets. Support vector machines "
        "are calibrated: a sigmoid on the decisions of five folds (fewer if a class has fewer "
        "rows; a class of one row gets its frequency).",
    ),
    "brier": ("Brier score", "Sum over classes of squared differences, between 0 and 2."),
    "calibration": (
        "Calibration error, %",
        "Mean |accuracy - confidence| of the most probable class, over 15 bins of equally many rows. Few test rows "
        "give errors of several points even for exact probabilities.",
    ),
    "fit_cpu": (
        "Fit, processor seconds",
        "One core. Search of the grid included; the folds that calibrate support vector machines are not (last table).",
    ),
    "predict_cpu": ("Prediction of the labels of all test rows, processor seconds", "One core."),
}


def render(figures, records, development):
    """The page of a table."""
    body = [_figure_table(figures, *item) for item in FIGURES.items()]
    rank_table = _rank_table(figures)
    drawn = [*_critical(figures), *_curves(figures, records)]
    many = f"{summary.count_sets(len(figures.sets))}, {len(figures.models)} {plural(len(figures.models), 'model')}, "
    many += "3 folds of the development rows" if development else f"{figures.splits} {plural(figures.splits, 'split')}"
    return render_html(
        "MCEClassifier() on tables nobody tuned it for",
        subtitle=many,
        headline=_tiles(figures),
        figures=[
            _words(figures, development),
            _promises(figures),
            *_against_svc(figures),
            body[0],
            rank_table,
            *drawn,
            *body[1:],
        ],
        tables=[
            *_over_and_failed(figures),
            _calibration_seconds(figures),
        ],
        footer=_footer(records),
    )


def _tiles(figures):
    found = []
    if {"mce", "svc"} <= set(figures.models):
        out = ranks.outcomes(figures, "mce", "svc")
        counts = " · ".join(str(len(out[kind])) for kind in ("wins", "ties", "losses"))
        found.append(("Accuracy against SVC()", counts, "wins · ties · losses"))
    for figure, label in (("accuracy", "Mean rank in accuracy"), ("log_loss", "Mean rank in log loss")):
        place = ranks.ranks(figures, figure, ranked(figures)).get("mce")
        if place:
            found.append(
                (label, f"{place[0]:.2f}", f"of {len(ranked(figures))} models, {summary.count_sets(place[1])}")
            )
    ratio = summary.ratio_of_seconds(figures, figures.sets, "mce", "svc-grid")
    if ratio:
        least = "at least; " if ratio[1] else ""
        found.append(
            ("SVC grid / MCE, fit seconds", f"{ratio[0]:.2g}", f"{least}geometric mean, {summary.count_sets(ratio[2])}")
        )
    return found


def _cells(columns, rows):
    """An HTML table; a cell is text, or (text, True) for bold."""

    def one(value, tag="td"):
        text, bold = value if isinstance(value, tuple) else (value, False)
        value, plus, error = html.escape(text).partition(" ± ")
        inside = f"{value} <small>±&nbsp;{error}</small>" if plus else value
        return f"<{tag}>{f'<b>{inside}</b>' if bold else inside}</{tag}>"

    head = "".join(one(column, "th") for column in columns)
    body = "".join(f"<tr>{''.join(map(one, row))}</tr>" for row in rows)
    # Ten columns fit a page in smaller type only.
    return (
        "<style>.dense { font-size: 13px; } .dense small { color: var(--soft); font-weight: 400; font-size: 11px; } "
        ".dense th, .dense td { padding: 4px 5px; white-space: nowrap; } .dense th { font-size: 12px; }</style>"
        f'<div class="scroll dense"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _figure_table(figures, figure, words):
    label, caption = words
    rows = []
    for name in figures.sets:
        means = {m: figures.mean(name, m, figure) for m in figures.models}
        costs = {m: ranks.cost(figure, mean) for m, mean in means.items() if mean is not None}
        best = min(costs.values(), default=None)
        row = [name, f"{figures.rows(name) or 0:,}"]
        row += [(shown(figures, name, m, figure), m in costs and costs[m] == best) for m in means]
        rows.append(row)
    columns = ["set", "rows", *map(title, figures.models)]
    return Picture(label, _cells(columns, rows), f"{caption} Rows: for training. Best in bold.", wide=True)


def _rank_table(figures):
    models = ranked(figures)
    columns = {f: ranks.ranks(figures, f, models) for f in FIGURES}
    rows = []
    for m in models:
        row = [title(m)]
        for found in columns.values():
            best = min((rank for rank, _ in found.values()), default=0)
            row.append((f"{found[m][0]:.2f} ({found[m][1]})", found[m][0] == best) if m in found else "")
        if "mce" in figures.models and m != "mce":
            out = ranks.outcomes(figures, "mce", m)
            row.append(" · ".join(str(len(out[kind])) for kind in ("wins", "ties", "losses")))
        else:
            row.append("")
        rows.append(row)
    heads = ["accuracy", "log loss", "Brier", "calibration", "fit seconds", "prediction seconds"]
    caption = (
        "Mean rank over sets (number of sets), 1 is best. On each set the models that have a figure there are ranked: "
        "a model that was stopped by the limit or is empty is left out of the set's ranks, so that means over "
        "different numbers of sets are not comparable; in seconds a stopped model ranks last. Last column: sets that "
        "MCE wins, ties and loses in accuracy against this model, where more than 0.5 points and more than one "
        "standard error of the paired differences counts. Splits share training rows, so that standard "
        "errors are too small." + (" MCE before does not take part." if "before" in figures.models else "")
    )
    return Picture("Mean ranks", _cells(["model", *heads, "MCE wins · ties · losses"], rows), caption, wide=True)


def _critical(figures):
    """Critical differences without GP, which has figures on small sets only, and with it."""
    found = []
    models = ranked(figures)
    for figure, label in (("accuracy", "accuracy"), ("log_loss", "log loss")):
        for taken in [[m for m in models if m != "gp"], *([models] if "gp" in models else [])]:
            sets = ranks.complete_sets(figures, figure, taken)
            if len(taken) < 3 or len(sets) < 2:
                continue
            means = {m: rank for m, (rank, _) in ranks.ranks(figures, figure, taken, sets).items()}
            distance = ranks.critical_difference(len(taken), len(sets))
            name = f"cd-{figure}-{len(taken)}"
            caption = (
                f"Mean ranks over the {len(sets)} sets where all of these models have figures ({', '.join(sets)}). "
                f"Models joined by a bar differ by less than the critical difference {distance:.2f} (Nemenyi, 0.05)."
            )
            svg = pictures.critical_difference({title(m): r for m, r in means.items()}, distance, name)
            with_gp = " (with GP)" if "gp" in taken else ""
            found.append(Picture(f"Critical difference, {label}{with_gp}", svg, caption))
    return found


def _curves(figures, records):
    models = [m for m in ranked(figures) if m != "gp"]
    sets = ranks.complete_sets(figures, "accuracy", models)
    found = []
    if sets:
        caption = (
            "Points of accuracy behind the best model of a set, against seconds of the fit. Large: mean over the "
            f"{summary.count_sets(len(sets))} where all of these models have figures; small: the sets."
            + (" GP is left out: it has figures on small sets only." if "gp" in figures.models else "")
        )
        found.append(Picture("Accuracy against seconds", pictures.trade(figures, models, sets), caption))
    caption = "Training rows against processor seconds of the fit. Open triangles: stopped by the limit."
    found.append(Picture("Fit seconds against rows", pictures.seconds_by_rows(figures), caption))
    pooled = {m: pictures.pooled(records, m) for m in figures.models}
    caption = (
        "Accuracy against confidence of the most probable class, pooled over sets and splits; every set counts the "
        "same. Below the diagonal: overconfident. Ranges of confidence with less than 0.5 % of the weight are "
        "not drawn."
    )
    found.append(Picture("Reliability", pictures.reliability(pooled), caption, wide=True))
    return found


def _words(figures, development):
    said = [summary.DEVELOPMENT if development else summary.RULE, summary.CHOICES]
    used = "; ".join(f"{title(m)}: {MODELS[m].preparation}" for m in figures.models)
    said.append(f"Models: {used}. One core each, every fit in a process of its own.")
    text = "".join(f"<p>{html.escape(part)}</p>" for part in said)
    return Picture("Which rows, which choices", text, "", wide=True)


def _promises(figures):
    text = "".join(
        f"<p>{html.escape(label)}: <b>{html.escape(value)}</b></p>" for label, value in summary.promises(figures)
    )
    return Picture("Figures that are promised", text, "Seconds are processor seconds on one core.", wide=True)


def _against_svc(figures):
    found = summary.against_svc(figures)
    if not found:
        return []
    rows = [[*cells[:-1], (cells[-1], not one.passed)] for one in found for cells in [one.shown(figures)]]
    caption = (
        f"The rule: {summary.RULE_OF_SVC}. Points of accuracy; the standard error is that of the differences split by "
        "split."
    )
    return [Picture("Accuracy against SVC()", _cells(summary.AGAINST_HEADS, rows), caption, wide=True)]


def _over_and_failed(figures):
    rows = []
    for (name, m), cell in figures.cells.items():
        ended = [record for record in cell.values() if record["status"] in ("over", "failed")]
        for reason in dict.fromkeys(record.get("reason", "") for record in ended):
            splits = ", ".join(str(record["split"]) for record in ended if record.get("reason", "") == reason)
            rows.append([name, title(m), splits, reason])
    return [("Stopped or failed", ["set", "model", "splits", "reason"], rows)] if rows else []


def _calibration_seconds(figures):
    models = [m for m in figures.models if MODELS[m].calibrated]
    rows = [
        [
            name,
            *(summary.seconds(v) if (v := figures.mean(name, m, "calibrate_cpu")) is not None else "" for m in models),
        ]
        for name in figures.sets
    ]
    heads = [f"{title(m)}, calibration" for m in models]
    return ("Processor seconds of calibration, on top of the fit", ["set", *heads], rows)


def _footer(records):
    loads = sorted(float(r["load"]) for r in records if "load" in r)
    codes = sorted({(r["model"], r.get("commit") or "", r["code"]) for r in records if r.get("code")})
    sources = ", ".join(f"{title(model)} {commit} ({code})" for model, commit, code in codes)
    versions = sorted({f"{k} {v}" for r in records for k, v in r.get("versions", {}).items()})
    warned = sum(bool(r.get("warnings")) for r in records)
    return (
        f"{len(records)} cells; load of the machine {loads[0]:.1f} to {loads[-1]:.1f}; commit (digest of the sources): "
        f"{sources}; {', '.join(versions)}; {warned} cells with warnings (results.jsonl)."
    )
