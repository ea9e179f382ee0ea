"""The rule on rows: test rows come from the reserve only, design choices see none of them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.defaults import rows

SHIPPED = sorted(rows.SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_development_rows_are_never_test_rows(name):
    _, y = rows.table(name)
    half = rows.reserve(name, len(y))
    assert len(half) == len(np.unique(half)) == len(y) // 2
    for seed in range(5):
        test = rows.test_rows(name, y, seed)
        assert len(np.unique(test)) == len(y) // 4
        assert np.isin(test, half).all()


def test_a_split_has_every_row_once():
    X, _ = rows.table("wine")
    train, _, test, _ = rows.split("wine", 1)
    assert len(test) == len(X) // 4
    both = np.concatenate([train, test])
    np.testing.assert_array_equal(both[np.lexsort(both.T)], X[np.lexsort(X.T)])


def test_splits_differ_and_are_the_same_each_time():
    _, y = rows.table("digits")
    first, second = rows.test_rows("digits", y, 0), rows.test_rows("digits", y, 1)
    assert (first != second).any()
    np.testing.assert_array_equal(first, rows.test_rows("digits", y, 0))


def test_the_reserve_is_that_of_every_machine():
    """A change of these numbers would move test rows into the half where choices were made."""
    assert rows.reserve("iris", 150)[:8].tolist() == [0, 3, 5, 6, 7, 9, 11, 13]


@pytest.mark.parametrize("name", SHIPPED)
def test_test_rows_have_the_classes_of_the_reserve(name):
    _, y = rows.table(name)
    half = np.bincount(y[rows.reserve(name, len(y))])
    test = np.bincount(y[rows.test_rows(name, y, 3)], minlength=len(half))
    assert (np.abs(test - half * (len(y) // 4) / half.sum()) < 1).all()


def test_a_class_of_one_row_may_be_in_either_part():
    y = np.array([0] * 31 + [1])
    taken = {31 in rows._proportional(f"key {i}", y, 16) for i in range(20)}
    assert taken == {True, False}


@pytest.mark.parametrize("name", SHIPPED)
def test_folds_of_the_development_rows_hold_each_row_once(name):
    X, y = rows.development_rows(name)
    folds = list(rows.development_folds(name))
    held = np.concatenate([fold[2] for fold in folds])
    np.testing.assert_array_equal(held[np.lexsort(held.T)], X[np.lexsort(X.T)])
    for train, labels, test, truth in folds:
        assert len(train) + len(test) == len(X)
        assert np.abs(np.bincount(truth) - np.bincount(y) / 3).max() <= 1
        assert len(labels) == len(train)


def test_development_rows_and_folds_have_no_row_of_the_reserve(monkeypatch):
    numbers = np.arange(300)
    monkeypatch.setattr(rows, "table", lambda name: (numbers[:, None], numbers % 3))
    half = rows.reserve("any", 300)
    assert not np.isin(rows.development_rows("any")[0], half).any()
    for fold in range(3):
        X, _, Xq, _ = rows.rows_of("any", fold, development=True)
        assert not np.isin(np.concatenate([X, Xq]), half).any()
    X, _, Xq, _ = rows.rows_of("any", 2)
    assert np.isin(Xq, half).all()
    assert not np.isin(X, Xq).any()


def test_an_unknown_set_is_refused_with_the_known_ones():
    with pytest.raises(SystemExit, match="unknown set 'irs'; use one of iris, wine"):
        rows.table("irs")
