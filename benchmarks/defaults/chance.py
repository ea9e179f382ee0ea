"""How far a lead or a gap on a small table is chance: `MCEClassifier()` against `SVC()` in repeated cross-validation.

    python -m benchmarks.defaults.chance [--set iris] [--repeats 10]

The splits of the table draw their test rows from one fixed half of a set: with 150 rows all five may hang on the same
two or three rows. Here every row is a test row once in each repeat, in all of the set and in either half of it, and the
rows that one model gets wrong more often are listed. Nothing is chosen by these figures. The standard error is that of
Nadeau and Bengio (2003) for training sets that overlap: sqrt((1/runs + test rows / training rows) s²), with s the
deviation of the difference over runs; in brackets the one that takes runs for independent, which is too small.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from sklearn.model_selection import RepeatedStratifiedKFold

from benchmarks.defaults.models import MODELS
from benchmarks.defaults.rows import NAMES, reserve, table

FOLDS = 4
COMPARED = ("mce", "svc")


def compare(X, y, repeats):
    """Accuracy of each model in every run, and how often each row was wrong."""
    hits, wrong = {name: [] for name in COMPARED}, {name: np.zeros(len(y), int) for name in COMPARED}
    for train, test in RepeatedStratifiedKFold(n_splits=FOLDS, n_repeats=repeats, random_state=0).split(X, y):
        for name in COMPARED:
            missed = MODELS[name].build(X[train], y[train]).fit(X[train], y[train]).predict(X[test]) != y[test]
            hits[name].append(1 - missed.mean())
            wrong[name][test] += missed
    return hits, wrong


def line(label, hits):
    ours, theirs = (100 * np.array(hits[name]) for name in COMPARED)
    lead, deviation, runs = (ours - theirs).mean(), (ours - theirs).std(ddof=1), len(ours)
    corrected = deviation * math.sqrt(1 / runs + 1 / (FOLDS - 1))
    return (
        f"{label:12} MCE {ours.mean():.2f} %, SVC {theirs.mean():.2f} %: {lead:+.2f} points, "
        f"standard error {corrected:.2f} ({deviation / math.sqrt(runs):.2f})"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="iris", choices=NAMES)
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args(argv)
    X, y = table(given.set)
    half = np.isin(np.arange(len(y)), reserve(given.set, len(y)))
    print(f"{given.set}, {given.repeats} repeats of {FOLDS} folds")
    for label, rows in (("all rows", half | ~half), ("reserve", half), ("other half", ~half)):
        hits, wrong = compare(X[rows], y[rows], given.repeats)
        print(line(f"{label}, {rows.sum()}", hits), flush=True)
        if rows.all():
            both = zip(wrong["mce"], wrong["svc"], strict=True)
            uneven = [f"{i} ({a}, {b})" for i, (a, b) in enumerate(both) if abs(a - b) > given.repeats / 4]
            print(f"  rows (from 0) that one of them gets wrong more often, times (MCE, SVC): {', '.join(uneven)}")


if __name__ == "__main__":
    main()
