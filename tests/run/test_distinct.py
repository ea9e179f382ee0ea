"""Small tables in one form: weights, copies and orders of the same rows are the same bytes; others stay as given."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.reading import Table
from kme_dist.data.sparse import as_sparse_rows
from kme_dist.run.distinct import as_distinct_rows

N, NAMES = 60, ["x0", "x1", "x2"]


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    X = rng.integers(0, 9, size=(N, 3)) / 4.0  # values of a column repeat
    X[:, 0] += np.arange(N) % 7
    X = np.unique(X, axis=0)
    rng.shuffle(X)
    return X, rng.integers(0, 3, len(X)), np.resize([2, 1, 0, 4], len(X))


def repeated(X, y, counts, seed=1):
    order = np.random.default_rng(seed).permutation(counts.sum())
    return np.repeat(X, counts, axis=0)[order], np.repeat(y, counts)[order]


def in_memory(X, y, w=None, **settings):
    return ArrayRows(X, y, ["a", "b", "c"], weights=w, **settings)


def content(source, split=None):
    found, split = as_distinct_rows(source, split)
    assert split is None
    assert found is not source
    X, y = found.read_rows(0, found.rows)
    X = X.toarray() if hasattr(X, "toarray") else X
    return X.tobytes(), y.tobytes(), found.read_weights(0, found.rows).tobytes()


@pytest.mark.parametrize("kind", [np.asarray, as_sparse_rows], ids=["dense", "sparse"])
def test_weights_copies_and_orders_of_the_same_rows_are_the_same_table(table, kind):
    X, y, counts = table
    kept = counts > 0
    one = content(in_memory(kind(X[kept]), y[kept], counts[kept].astype(float)))
    for seed in (1, 2):
        Xr, yr = repeated(X, y, counts, seed)
        assert content(in_memory(kind(Xr), yr)) == one
        order = np.random.default_rng(seed).permutation(len(X))
        Xs, ys, ws = X[order], y[order], counts[order].astype(float)
        assert content(in_memory(kind(Xs[ws > 0]), ys[ws > 0], ws[ws > 0])) == one
    found, _ = as_distinct_rows(in_memory(kind(X[kept]), y[kept], counts[kept].astype(float)), None)
    assert found.rows == kept.sum()
    assert found.split_weight() == counts.sum()


def test_targets_that_are_numbers_are_merged_with_their_rows(table):
    X, _, counts = table
    targets = np.random.default_rng(3).normal(size=(len(X), 2))
    kept = counts > 0
    for y in (targets[:, 0], targets):
        weighted = ArrayRows(X[kept], y[kept], weights=counts[kept].astype(float))
        order = np.random.default_rng(1).permutation(counts.sum())
        copies = ArrayRows(np.repeat(X, counts, axis=0)[order], np.repeat(y, counts, axis=0)[order])
        assert content(copies) == content(weighted)


def test_a_zero_with_a_sign_is_zero():
    X, y, w = np.array([[-0.0, 1.0], [0.0, 1.0], [1.0, 2.0]]), np.array([0, 0, 1]), np.array([2.0, 1.0, 1.0])
    found, _ = as_distinct_rows(in_memory(X, y, w), None)
    assert found.rows == 2
    assert not np.signbit(found.read_rows(0, 2)[0]).any()


def test_a_stored_split_is_that_of_memory(table, tmp_path):
    X, y, counts = table
    Xr, yr = np.concatenate([X, X + 50]), np.concatenate([y, y])
    w = np.concatenate([counts, 3 * counts]).astype(float)
    stored = ingest(
        Table(Xr, yr, NAMES, ["a", "b", "c"], weights=w), tmp_path / "d.zarr", task="classification", dtype="float64",
        split="train=0.6,test=0.4",
    )  # fmt: skip
    few, y_few = stored.read("train")
    kept = stored.weights("train") > 0
    memory = in_memory(few[kept], y_few[kept], stored.weights("train")[kept])
    assert content(stored, "train") == content(memory)
    assert as_distinct_rows(stored, "test") == (stored, "test"), "not the split that is learned from"
    factors = (1.0, 0.0, 2.5)
    merged, _ = as_distinct_rows(stored.with_class_factors(factors), "train")
    assert merged.class_factors == factors
    assert merged.split_weight() == pytest.approx(stored.with_class_factors(factors).split_weight("train"))


def test_the_unit_of_weights_below_one_is_that_of_the_rows_given(table):
    X, y, counts = table
    Xr, yr = repeated(X, y, counts)
    w = np.random.default_rng(5).uniform(0.5, 2, len(yr))
    given = [in_memory(Xr, yr, w / w.mean()), in_memory(Xr, yr, w / w.sum())]
    merged = [as_distinct_rows(source, None)[0] for source in given]
    assert [source.split_weight() for source in merged] == pytest.approx([len(yr), len(yr)])


def test_other_tables_are_as_given(table):
    X, y, counts = table
    weights = counts + 1.0
    many = np.random.default_rng(0).normal(size=(1_001, 3))
    wide = np.random.default_rng(0).normal(size=(60, 20_000))
    cells = np.array([[a, b] for a in (0.0, 1.0) for b in (0.0, 1.0)])
    for source in (
        in_memory(X, y),  # neither weights nor copies
        in_memory(X, y, np.ones(len(y))),
        in_memory(X, y, np.full(len(y), 0.3)),
        in_memory(many, np.arange(1_001) % 3, np.arange(1_001) % 5 + 1.0),  # more than a sample
        in_memory(wide, np.arange(60) % 3, np.arange(60) + 1.0),
        in_memory(cells.repeat(9, axis=0), np.arange(36) % 3),  # few different rows
        in_memory(["ab", "cd", "ab"], np.array([0, 1, 0]), np.array([1.0, 2.0, 3.0])),
    ):
        assert as_distinct_rows(source, None) == (source, None)
    assert as_distinct_rows(in_memory(X, y, weights), None, len(y))[0].rows == len(y)
    assert as_distinct_rows(in_memory(X, y, weights), None, len(y) - 1)[0].weighted
    source = in_memory(X, y, weights)
    assert as_distinct_rows(source, None, len(y) - 1)[0] is source, "more rows than a batch"


def test_a_table_repeated_as_a_whole_keeps_its_order(table):
    X, y, _ = table
    for Xr, yr in ((np.repeat(X, 2, axis=0), np.repeat(y, 2)), (np.tile(X, (2, 1)), np.tile(y, 2))):
        found, _ = as_distinct_rows(in_memory(Xr, yr), None)
        np.testing.assert_array_equal(found.read_rows(0, len(y))[0], X)
        assert found.read_weights(0, len(y)).tolist() == [2.0] * len(y)
