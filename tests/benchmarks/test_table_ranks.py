"""Ranks, critical differences, wins and losses."""

from __future__ import annotations

import math

import pytest

from benchmarks.defaults import ranks
from benchmarks.defaults.ranks import Table

# Demsar (2006), table 5 (a): critical values of the two-tailed Nemenyi test at 0.05.
PUBLISHED = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}


@pytest.mark.parametrize(("models", "q"), PUBLISHED.items())
def test_critical_difference_has_the_published_values(models, q):
    q_here = ranks.critical_difference(models, 16) / math.sqrt(models * (models + 1) / (6 * 16))
    assert q_here == pytest.approx(q, abs=2e-3)  # printed with three decimals, one of them rounded wrongly


def test_ties_share_their_mean_rank(record):
    table = Table([record(model=m, accuracy=a) for m, a in (("mce", 0.9), ("svc", 0.9), ("knn", 0.8))], 1)
    assert ranks.set_ranks(table, "iris", "accuracy", ["mce", "svc", "knn"]) == {"mce": 1.5, "svc": 1.5, "knn": 3}


def test_less_loss_and_fewer_seconds_are_better(record):
    table = Table([record(log_loss=0.1, fit_cpu=9.0), record(model="svc", log_loss=0.2, fit_cpu=1.0)], 1)
    assert ranks.set_ranks(table, "iris", "log_loss", ["mce", "svc"]) == {"mce": 1, "svc": 2}
    assert ranks.set_ranks(table, "iris", "fit_cpu", ["mce", "svc"]) == {"mce": 2, "svc": 1}


def test_seconds_below_the_clock_are_ties(record):
    table = Table([record(fit_cpu=0.0), record(model="svc", fit_cpu=0.004)], 1)
    assert ranks.set_ranks(table, "iris", "fit_cpu", ["mce", "svc"]) == {"mce": 1.5, "svc": 1.5}


def stopped(record, **more):
    whole = record(**more, status="over", reason="over 900 s")
    return {k: v for k, v in whole.items() if k not in ("accuracy", "fit_cpu", "log_loss")}


def test_a_stopped_model_ranks_last_in_time_and_is_left_out_otherwise(record):
    table = Table([record(), record(model="knn", accuracy=0.5), stopped(record, model="svc-grid")], 1)
    models = ["svc-grid", "mce", "knn"]
    assert ranks.set_ranks(table, "iris", "fit_cpu", models)["svc-grid"] == 3
    assert ranks.set_ranks(table, "iris", "accuracy", models) == {"mce": 1, "knn": 2}
    assert ranks.complete_sets(table, "accuracy", models) == []
    assert table.reason("iris", "svc-grid") == "over 900 s"


def test_a_model_needs_every_split(record):
    table = Table([record(), record(split=1), record(model="svc")], 2)
    assert table.mean("iris", "mce", "accuracy") == pytest.approx(0.9)
    assert table.mean("iris", "svc", "accuracy") is None
    assert table.reason("iris", "svc") == "1 of 2 splits"


def test_mean_ranks_count_their_sets(record):
    records = [record(name, m, accuracy=a) for name, m, a in (
        ("iris", "mce", 0.9), ("iris", "svc", 0.8), ("wine", "mce", 0.7), ("wine", "svc", 0.8), ("wine", "gp", 0.9),
    )]  # fmt: skip
    assert ranks.ranks(Table(records, 1), "accuracy", ["mce", "svc", "gp"]) == {
        "mce": (2, 2),
        "svc": (2, 2),
        "gp": (1, 1),
    }


def test_bars_join_the_longest_runs_within_the_difference():
    means = {"a": 1.0, "b": 1.5, "c": 2.2, "d": 4.0}
    assert ranks.indistinct(means, 1.0) == [["a", "b"], ["b", "c"]]
    assert ranks.indistinct(means, 2.0) == [["a", "b", "c"], ["c", "d"]]
    assert ranks.indistinct(means, 0.1) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        ([0.906, 0.906], [0.900, 0.900], "wins"),  # 0.6 points, no spread
        ([0.904, 0.904], [0.900, 0.900], "ties"),  # below half a point
        ([0.905, 0.905], [0.900, 0.900], "ties"),  # exactly half a point
        ([0.930, 0.900], [0.900, 0.900], "ties"),  # 1.5 points and a standard error of as much
        ([0.890, 0.880], [0.900, 0.900], "losses"),  # 1.5 points, standard error 0.5
        ([0.950, 0.850], [0.940, 0.840], "wins"),  # the splits differ, the differences do not
    ],
)
def test_a_win_is_more_than_half_a_point_and_one_standard_error(record, ours, theirs, outcome):
    records = [record(split=i, accuracy=a) for i, a in enumerate(ours)]
    records += [record(model="svc", split=i, accuracy=a) for i, a in enumerate(theirs)]
    assert ranks.outcomes(Table(records, 2), "mce", "svc")[outcome] == ["iris"]
