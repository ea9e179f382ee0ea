"""Tables of figures, and the arithmetic of comparing models over several sets.

figures = Table(records, splits=5)
figures.mean("iris", "mce", "accuracy"), figures.error("iris", "mce", "accuracy")
ranks(figures, "accuracy", ["mce", "svc"])        # {model: (mean rank, number of sets)}
critical_difference(models=9, sets=16)            # Nemenyi, 0.05
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata, studentized_range

HIGHER_IS_BETTER = {"accuracy"}
SECONDS = {"fit_cpu", "predict_cpu"}
MARGIN = 0.005  # half a point of accuracy
SHORTEST = 0.01  # the clock of a process does not resolve less: shorter times are ties


class Table:
    """Figures by set and model. A model has a figure on a set only if every split has it."""

    def __init__(self, records, splits: int):
        self.splits = splits
        self.cells: dict[tuple[str, str], dict[int, dict]] = {}
        for record in records:
            if record["split"] < splits:
                self.cells.setdefault((record["set"], record["model"]), {})[record["split"]] = record
        self.sets = list(dict.fromkeys(name for name, _ in self.cells))
        self.models = list(dict.fromkeys(model for _, model in self.cells))

    def values(self, name: str, model: str, figure: str) -> np.ndarray | None:
        cell = self.cells.get((name, model), {})
        found = [cell[i][figure] for i in sorted(cell) if figure in cell[i]]
        return np.array(found) if len(found) == self.splits else None

    def mean(self, name: str, model: str, figure: str) -> float | None:
        values = self.values(name, model, figure)
        return None if values is None else float(values.mean())

    def error(self, name: str, model: str, figure: str) -> float:
        values = self.values(name, model, figure)
        return 0.0 if values is None else standard_error(values)

    def reason(self, name: str, model: str) -> str:
        """Why a cell is empty."""
        cell = self.cells.get((name, model), {})
        reasons = [record["reason"] for record in cell.values() if record["status"] != "ok" and "reason" in record]
        kinds = {record["status"] for record in cell.values()}
        if "failed" in kinds:
            return "failed"
        return reasons[0] if reasons else f"{len(cell)} of {self.splits} splits"

    def is_over(self, name: str, model: str) -> bool:
        return any(record["status"] == "over" for record in self.cells.get((name, model), {}).values())

    def rows(self, name: str) -> int | None:
        """Training rows of a set, on average over the splits."""
        found = [r["train"] for (s, _), cell in self.cells.items() if s == name for r in cell.values() if "train" in r]
        return round(float(np.mean(found))) if found else None


def standard_error(values) -> float:
    values = np.asarray(values, np.float64)
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def set_ranks(figures: Table, name: str, figure: str, models: Sequence[str]) -> dict[str, float]:
    """Ranks of the models on one set, 1 is best, ties share their mean rank.

    A model without a figure is left out; in seconds, one that was stopped by the limit ranks last.
    """
    means = {}
    for model in models:
        mean = figures.mean(name, model, figure)
        if figure in SECONDS and mean is None and figures.is_over(name, model):
            mean = math.inf
        if mean is not None:
            means[model] = cost(figure, mean)
    return dict(zip(means, rankdata(list(means.values())).tolist(), strict=True)) if means else {}


def cost(figure: str, mean: float) -> float:
    """What is ranked, less is better; differences in the last digits of a mean, or below the clock, are ties."""
    if figure in SECONDS:
        return max(mean, SHORTEST)
    return float(f"{-mean if figure in HIGHER_IS_BETTER else mean:.10g}")


def ranks(figures: Table, figure: str, models: Sequence[str], sets: Sequence[str] | None = None):
    """Mean rank of every model, and over how many sets; sets where fewer than two models have figures are skipped."""
    found: dict[str, list[float]] = {model: [] for model in models}
    for name in figures.sets if sets is None else sets:
        placed = set_ranks(figures, name, figure, models)
        if len(placed) > 1:
            for model, rank in placed.items():
                found[model].append(rank)
    return {model: (float(np.mean(r)), len(r)) for model, r in found.items() if r}


def complete_sets(figures: Table, figure: str, models: Sequence[str]) -> list[str]:
    """Sets where all of these models have the figure."""
    return [name for name in figures.sets if all(figures.mean(name, m, figure) is not None for m in models)]


def critical_difference(models: int, sets: int) -> float:
    """Mean ranks that differ by less are not distinguished by Nemenyi's test at 0.05.

    q sqrt(k (k + 1) / (6 N)), q the studentised range for k models and infinitely many degrees of freedom over sqrt 2
                                                                                  [Demsar 2006, section 3.2.2]
    """
    q = studentized_range.ppf(0.95, models, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(models * (models + 1) / (6 * sets)))


def indistinct(mean_ranks: dict[str, float], difference: float) -> list[list[str]]:
    """The largest runs of models, in the order of their ranks, whose ranks differ by less than `difference`."""
    order = sorted(mean_ranks, key=mean_ranks.__getitem__)
    runs: list[list[str]] = []
    for i, first in enumerate(order):
        run = [m for m in order[i:] if mean_ranks[m] - mean_ranks[first] < difference]
        if len(run) > 1 and not (runs and run[-1] == runs[-1][-1]):
            runs.append(run)
    return runs


def compare(figures: Table, name: str, model: str, other: str) -> tuple[float, float] | None:
    """Lead in accuracy over the other model, and what counts: half a point or one standard error, if larger.

    The standard error is that of the differences split by split.
    """
    ours, theirs = (figures.values(name, m, "accuracy") for m in (model, other))
    if ours is None or theirs is None:
        return None
    return float((ours - theirs).mean()), max(MARGIN, standard_error(ours - theirs))


def is_behind(lead: float, counts: float) -> bool:
    """Whether the rule is broken: behind by more than what counts; rounding of exactly that much is not more."""
    return lead < -counts * (1 + 1e-9)


def outcomes(figures: Table, model: str, other: str) -> dict[str, list[str]]:
    """Sets won, tied and lost by `model` against `other`."""
    found: dict[str, list[str]] = {"wins": [], "ties": [], "losses": []}
    for name in figures.sets:
        compared = compare(figures, name, model, other)
        if compared:
            lead, counts = compared
            kind = "losses" if is_behind(lead, counts) else "wins" if is_behind(-lead, counts) else "ties"
            found[kind].append(name)
    return found
