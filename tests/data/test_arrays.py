"""Rows in memory are a source of rows like any other: whoever plans, samples or measures them cannot tell."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import RowsRef
from kme_dist.errors import DataError


def table(n=5000, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) * [1, 100, 0.01] + [0, 1e6, 0], rng.integers(0, 3, n)


def stored(tmp_path, X, y, extra=0):
    """The same rows as the training part of a data set."""
    more = np.concatenate([X, X[:extra]]), np.concatenate([y, y[:extra]])
    split = f"train=0:{len(X)}" + (f",test={len(X)}:{len(X) + extra}" if extra else "")
    return ingest(more, tmp_path / "rows.zarr", task="classification", split=split, dtype="float64")


@pytest.mark.parametrize(("n", "extra"), [(10, 0), (900, 300), (5000, 0), (5000, 1700), (400_000, 9)])
def test_the_same_rows_in_memory_and_on_disk_make_the_same_plans_samples_and_statistics(tmp_path, n, extra):
    X, y = table(n)
    data, rows = stored(tmp_path, X, y, extra), ArrayRows(X, y, [0, 1, 2])
    ours, theirs = rows.split_statistics(), data.split_statistics("train")
    for name in ("count", "minimum", "maximum", "mean", "squares"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    for step in (0, 7):
        plans = (RowsRef.of(source, split=split).plan(9, 3) for source, split in ((rows, None), (data, "train")))
        a, b = (plan.batch(step).rows for plan in plans)
        np.testing.assert_array_equal(a, b)
    parts = [
        RowsRef.of(source, split="auto", scaling="standard", dtype="float64", classes=True) for source in (rows, data)
    ]
    for a, b in zip(*(part.sample(50, 1) for part in parts), strict=True):
        np.testing.assert_array_equal(a, b)
    assert parts[0].chunks() == parts[1].chunks()
    first = parts[0].chunks()[0]
    assert rows.span_digests(*first) == data.span_digests(*first)


def test_rows_that_were_spilled_travel_as_file_names(tmp_path):
    X, y = table()
    rows = ArrayRows(X, y, np.array([0, 1, 2])).spill(tmp_path)
    sent = pickle.dumps(rows)
    assert len(sent) < 1000
    arrived = pickle.loads(sent)
    for ours, theirs in zip(rows.take(np.array([5, 3])), arrived.take(np.array([5, 3])), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert arrived.digest == rows.digest


def test_lists_are_rows_too_and_labels_are_counted():
    texts = ArrayRows(["a", "bb", "ccc"], np.array([0, 1, 0]))
    assert texts.take(np.array([2, 0]))[0] == ["ccc", "a"]
    assert texts.features == 0
    with pytest.raises(DataError, match="got 3 rows but 2 labels"):
        ArrayRows(["a", "bb", "ccc"], np.array([0, 1]))


def test_names_of_the_user_are_told_from_names_that_stand_for_none():
    X, y = table(4)
    assert not ArrayRows(X, y).named
    assert ArrayRows(X, y, feature_names=["age", "height", "weight"]).named
