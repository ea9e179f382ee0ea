"""The table as plain text: a line per set, mean ranks, and the figures that are promised."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from benchmarks.defaults import ranks
from benchmarks.defaults.models import KERNEL_METHODS, MODELS, RANKED

RULE = (
    "A fixed half of every set is its reserve: the test rows of every split, a quarter of the set, are drawn from it, "
    "in each class in proportion, and all other rows are training rows."
)
CHOICES = (
    "The objective, kernels, scalings, candidates and constants of the defaults were chosen by cross-validation inside "
    "the other half (--development), which contains no test row of any split, and on made-up tables. The probability "
    "floor is older than the reserve: it was chosen by test scores on random splits of most of these sets. "
    "The other models have the defaults of their "
    "libraries, or a grid searched by five folds of the training rows."
)
DEVELOPMENT = (
    "Three-fold cross-validation inside the development half of every set: no row of the reserve was read into these "
    "figures. They serve to compare designs, and are not test figures."
)


RULE_OF_SVC = "on no set behind SVC() by more than 0.5 points, or one standard error if larger"


def title(model):
    return MODELS[model].title


def shown(figures, name, model, figure, error=True):
    """A cell as text: mean and standard error over splits, or why it is empty."""
    mean = figures.mean(name, model, figure)
    if mean is None:
        return figures.reason(name, model) if (name, model) in figures.cells else ""
    if figure in ranks.SECONDS:
        return seconds(mean)
    scale, digits = (100, 1) if figure in ("accuracy", "calibration") else (1, 3)
    spread = f" ± {scale * figures.error(name, model, figure):.{digits}f}" if error and figures.splits > 1 else ""
    return f"{scale * mean:.{digits}f}{spread}"


def seconds(value):
    """Three digits are not measured: two are shown, and the clock of processes does not resolve less than 0.01 s."""
    return (
        "< 0.01" if value < 0.01 else f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
    )


def ranked(figures):
    return [model for model in RANKED if model in figures.models]


def rank_line(figures, figure, models):
    """Mean ranks as text: among the models with a figure on each set, and over the sets where all have one."""
    models = [m for m in models if m in figures.models]
    sets = ranks.complete_sets(figures, figure, models)
    found = ranks.ranks(figures, figure, models)
    if not found:
        return "not measured"
    every = max(count for _, count in found.values())
    text = f"{_in_order(found, every)} ({count_sets(every)}, each without the models that have no figure there)"
    if len(sets) == every:
        return f"{_in_order(found, every)} ({count_sets(every)})"
    return f"{text}; where all have figures: " + (
        f"{_in_order(ranks.ranks(figures, figure, models, sets), len(sets))} ({count_sets(len(sets))})"
        if sets
        else "none"
    )


def _in_order(found, every):
    order = sorted(found, key=lambda model: found[model][0])
    fewer = {m: "" if found[m][1] == every else f" on {found[m][1]}" for m in order}
    return ", ".join(f"{title(m)} {found[m][0]:.2f}{fewer[m]}" for m in order)


def count_sets(count):
    return "1 set" if count == 1 else f"{count} sets"


def ratio_of_seconds(figures, sets, model, other):
    """Geometric mean over sets of fit seconds of `other` over those of `model`; at least, if `other` was stopped."""
    ratios, stopped = [], False
    for name in sets:
        ours, theirs = (figures.mean(name, m, "fit_cpu") for m in (model, other))
        if theirs is None and figures.is_over(name, other):
            theirs, stopped = max(r["limit"] for r in figures.cells[name, other].values()), True
        if ours and theirs:
            ratios.append(theirs / ours)
    return (math.exp(np.mean(np.log(ratios))), stopped, len(ratios)) if ratios else None


def promises(figures):
    """The five figures (a) to (e), and the speed against an earlier commit if it was measured, as (label, text)."""
    rows = {name: figures.rows(name) or 0 for name in figures.sets}
    middle = [name for name in figures.sets if 4000 <= rows[name] <= 6000]
    large = [name for name in figures.sets if name.endswith("-15k")]
    found = [("(a) fit seconds of SVC grid / MCE, 4,000 to 6,000 training rows", _ratio(figures, middle, "svc-grid"))]
    found.append(("(b) mean rank in accuracy, kernel methods", rank_line(figures, "accuracy", KERNEL_METHODS)))
    found.append(("(c) mean rank in log loss, all models", rank_line(figures, "log_loss", ranked(figures))))
    found.append((f"(d) {RULE_OF_SVC}", _verdict(figures)))
    times = [f"{name} {shown(figures, name, 'mce', 'fit_cpu')}" for name in large if ("mce" in figures.models)]
    found.append(
        ("(e) fit seconds of MCE, sets of 15,000 rows (11,250 for training)", ", ".join(times) or "not measured")
    )
    if "before" in figures.models:
        found.append(("fit seconds of MCE before / MCE, all sets", _ratio(figures, figures.sets, "before")))
    return found


class Against(NamedTuple):
    """The rule against SVC() on one set, in points of accuracy."""

    name: str
    lead: float
    error: float  # of the lead, over splits
    allowed: float
    passed: bool

    def shown(self, figures):
        error = f"{self.error:.2f}" if figures.splits > 1 else "one split"
        verdict = "pass" if self.passed else "FAIL"
        return (self.name, f"{round(self.lead, 2) + 0.0:+.2f}", error, f"{self.allowed:.2f}", verdict)


AGAINST_HEADS = ("set", "MCE - SVC", "standard error", "allowed behind", "rule")


def against_svc(figures):
    """The rule against SVC() set by set; sets without figures of both are skipped."""
    found = []
    for name in figures.sets:
        compared = ranks.compare(figures, name, "mce", "svc")
        if compared is not None:
            lead, counts = compared
            ours, theirs = (figures.values(name, m, "accuracy") for m in ("mce", "svc"))
            error = ranks.standard_error(ours - theirs)
            found.append(Against(name, 100 * lead, 100 * error, 100 * counts, not ranks.is_behind(lead, counts)))
    return found


def _verdict(figures):
    found = against_svc(figures)
    behind = [f"{one.name} ({one.lead:+.1f}, allowed {one.allowed:.1f})" for one in found if not one.passed]
    if not found:
        return "not measured"
    return f"FAIL: {', '.join(behind)}" if behind else f"pass on {count_sets(len(found))}"


def _ratio(figures, sets, other):
    ratio = ratio_of_seconds(figures, sets, "mce", other)
    if ratio is None:
        return "not measured"
    value, stopped, count = ratio
    names = f" ({', '.join(sets)})" if count == len(sets) <= 3 else f" (geometric mean of {count_sets(count)})"
    return ("at least " if stopped else "") + f"{value:.1f}" + names


def wins(figures, other="svc"):
    """Wins, ties and losses of MCE against another model, as text."""
    found = ranks.outcomes(figures, "mce", other)
    counts = ", ".join(f"{len(found[kind])} {kind}" for kind in ("wins", "ties", "losses"))
    named = "; ".join(f"{kind}: {', '.join(found[kind])}" for kind in ("wins", "losses") if found[kind])
    return counts + (f" ({named})" if named else "")


def text(figures, heading):
    """The whole summary."""
    lines = [heading, ""]
    for figure, label in (
        ("accuracy", "accuracy, % ± standard error"),
        ("log_loss", "log loss"),
        ("fit_cpu", "fit, processor seconds"),
    ):
        width = 15 if figure == "accuracy" and figures.splits > 1 else 13
        lines += [label, f"{'':14}{'rows':>7}" + "".join(f"{title(m):>{width}}" for m in figures.models)]
        for name in figures.sets:
            cells = (shown(figures, name, m, figure, error=figure == "accuracy") for m in figures.models)
            lines.append(f"{name:14}{figures.rows(name) or 0:>7}" + "".join(f"{cell:>{width}}" for cell in cells))
        lines.append("")
    if against := against_svc(figures):
        lines += ["accuracy against SVC(), points: standard error over splits of the difference"]
        table = [AGAINST_HEADS, *(one.shown(figures) for one in against)]
        lines += [f"{name:14}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in table]
        lines += ["", f"accuracy against SVC: {wins(figures)}"]
    lines += [f"{label}: {value}" for label, value in promises(figures)]
    return "\n".join(lines) + "\n"
