"""The benchmark of regression: which rows it may test on, and what its summary compares."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import regression
from benchmarks.defaults import results

ROWS = 400


@pytest.fixture
def numbered(monkeypatch):
    """A table whose targets are the numbers of its rows."""
    numbers = np.arange(ROWS, dtype=float)
    monkeypatch.setattr(regression, "table", lambda name: (numbers[:, None], numbers))


def seen():
    return {int(i) for number in (0, 1) for i in np.random.default_rng(number).permutation(ROWS)[300:]}


@pytest.mark.parametrize("split", range(5))
def test_no_row_is_tested_on_that_design_choices_have_seen(split, numbered):
    _, train, _, test = regression.rows_of("abalone", split)
    assert len(test) == ROWS // 4
    assert not seen() & set(test.astype(int))
    assert sorted([*train, *test]) == list(range(ROWS))


def test_splits_and_tables_have_other_test_rows(numbered):
    drawn = {tuple(np.sort(regression.rows_of(name, split)[3])) for name in ("abalone", "cadata") for split in range(3)}
    assert len(drawn) == 6


def test_development_rows_are_never_test_rows(numbered):
    folds = [regression.rows_of("abalone", fold, development=True) for fold in range(3)]
    assert sorted(np.concatenate([test for *_, test in folds]).astype(int)) == sorted(seen())
    for _, train, _, test in folds:
        assert not set(train) & set(test)
        assert set(train.astype(int)) <= seen()


def test_a_search_on_few_rows_is_fitted_to_all_of_them():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    model = regression.Searched(regression.KernelRidge(kernel="rbf"), "kernelridge", 40, alpha=[0.1, 1.0], gamma=[0.5])
    fitted = model.fit(X, X[:, 0])
    assert len(fitted.regressor_["kernelridge"].dual_coef_) == 60
    assert model.best["alpha"] in (0.1, 1.0)


def test_models_are_compared_on_the_splits_that_both_have():
    def task(split, model):
        return {"set": "abalone", "split": split, "model": model, "development": False, "code": None}

    def record(split, model, rmse, seconds, **more):
        return {**task(split, model), "status": "ok", "train": 300, "rmse": rmse, "fit_cpu": seconds, **more}

    own = {"intervals": {"jackknife+": [0.9, 1.0]}}
    records = [record(0, "cme", 1.0, 2.0, **own), record(1, "cme", 3.0, 2.0, **own), record(0, "krr", 2.0, 10.0)]
    text = regression.summary([{k: r[k] for k in task(0, "x")} for r in records], records)
    assert "RMSE 0.500 of the best other (krr); fitted 5.0 times faster than the KRR grid" in text
    assert "splits 0, 1" in text
    assert results.key(records[0]) != results.key(records[1])
