"""Simple models beside the result of a run: the same rows, honest figures, no model where none makes sense."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_iris

from kme_dist.data.ingest import ingest
from kme_dist.pipelines import baselines


def stored(tmp_path, X, y, **settings):
    return ingest((X, y), tmp_path / "d.zarr", shuffle=0, split="train=0.75,test=0.25", **settings)


def test_classes_are_compared_with_the_most_frequent_one_a_linear_model_and_trees(tmp_path):
    data = stored(tmp_path, *load_iris(return_X_y=True))
    found, rows = baselines.beside(data, seed=0)
    figures = {one.name: one.figures for one in found}
    assert list(figures) == ["most frequent class", "logistic regression", "gradient boosting"]
    _, y = data.read("train")
    _, y_test = data.read("test")
    share = np.bincount(y, minlength=3) / len(y)
    assert figures["most frequent class"]["accuracy"] == np.mean(y_test == share.argmax())
    assert figures["most frequent class"]["log_loss"] == pytest.approx(-np.log(share[y_test]).mean(), rel=0.02)
    assert figures["logistic regression"]["accuracy"] > 0.85
    assert rows == f"{len(y)} training rows"


def test_numbers_are_compared_with_their_mean(tmp_path):
    data = stored(tmp_path, *load_diabetes(return_X_y=True), task="regression")
    found, _ = baselines.beside(data, seed=0)
    figures = {one.name: one.figures for one in found}
    (_, y), (_, y_test) = data.read("train"), data.read("test")
    expected = np.sqrt(np.mean((np.asarray(y_test) - np.mean(y)) ** 2))
    assert figures["mean of the training rows"]["rmse"] == pytest.approx(expected)
    assert figures["ridge regression"]["r2"] > 0.2


def test_large_data_are_sampled_and_the_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "MOST_ROWS", 50)
    monkeypatch.setattr(baselines, "MOST_TEST_ROWS", 20)
    data = stored(tmp_path, *load_iris(return_X_y=True))
    found, rows = baselines.beside(data, seed=0)
    assert rows == "50 of 112 training rows, 20 of 38 test rows"
    ((title, columns, lines),) = baselines.table(found, rows, {"accuracy": 0.97, "log_loss": 0.1}, "this model")
    assert title == "Beside simple models"
    assert columns == ["model", "accuracy", "log loss", "learned from"]
    assert lines[0] == ["this model", "97.00%", "0.1000", "all training rows"]
    assert all(line[-1] == rows for line in lines[1:])
    assert baselines.table([], "", {}, "this model") == []
