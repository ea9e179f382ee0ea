"""A column of weights from the table to the report: `kme-dist ingest --weight`, `data.weight`."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris

import kme_dist as kme
from kme_dist.cli import app as cli
from kme_dist.config import parse_config
from kme_dist.errors import ConfigError
from kme_dist.pipelines import fit as fitting
from kme_dist.pipelines import learn as learning
from kme_dist.pipelines import tables
from kme_dist.pipelines.run import run

SETTINGS = {"objective": "rcb", "steps": 5, "dtype": "float64"}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes a second; these tests are about something else."""
    monkeypatch.setattr("kme_dist.pipelines.pages.run_page", lambda *arguments, **settings: "<html></html>")


@pytest.fixture
def table(tmp_path):
    X, y = load_iris(return_X_y=True, as_frame=True)
    frame = X.assign(kind=y.map({0: "a", 1: "b", 2: "c"}), importance=np.resize([1.0, 2.5, 4.0, 1.5], len(X)))
    frame.to_csv(tmp_path / "iris.csv", index=False)
    return tmp_path / "iris.csv"


def config(source, folder, objective="rcb", **more):
    return parse_config(
        {
            "data": {"source": str(source), "label": "kind", "weight": "importance", **more.pop("data", {})},
            "model": {"objective": objective, "dtype": "float64"},
            "learn": {"steps": 5},
            "cluster": {"kind": "serial"},
            "output": {"folder": str(folder)},
        }
    )


@pytest.mark.parametrize("objective", ["rcb", "auto"])
def test_a_run_with_a_weight_column_gives_the_model_of_python(objective, table, tmp_path):
    settings, own = config(table, tmp_path / "run", objective), {**SETTINGS, "objective": objective}
    done = run(settings, name="weights")
    model = kme.load(tmp_path / "run" / "model.zarr")
    data = kme.open_dataset(tmp_path / "run" / "data.zarr")
    assert "importance" not in data.feature_names
    assert data.schema.weight == "importance"
    X, codes = data.read("train")
    y, w = np.asarray(data.classes)[codes], data.weights("train")
    for again in (kme.MCEClassifier(**own).fit(data), kme.MCEClassifier(**own).fit(X, y, w)):
        assert again.decision_function(X).tobytes() == model.decision_function(X).tobytes()
        assert again.regularization_ == model.regularization_
    plain = kme.MCEClassifier(**own).fit(X, y)
    assert plain.decision_function(X).tobytes() != model.decision_function(X).tobytes()
    X, codes = data.read("test")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    expected = model.score(X, np.asarray(data.classes)[codes], data.weights("test"))
    assert metrics["weighted_accuracy"] == pytest.approx(expected)
    assert done["status"] == "succeeded"
    # New rows need no weights.
    kept = pd.read_csv(table).drop(columns=["importance", "kind"])
    assert len(model.predict(kept[list(model.feature_names_in_)])) == 150


def test_learn_and_fit_on_a_stored_data_set_use_its_weights(table, tmp_path):
    rows = tmp_path / "rows.zarr"
    options = ["--label", "kind", "--weight", "importance", "--shuffle", "0", "--split", "train=0.8,test=0.2"]
    assert cli.execute(["ingest", str(table), str(rows), *options, "--quiet"]) == 0
    settings = config(rows, tmp_path / "run", data={"label": None, "weight": None})
    learning.run(settings, name="weights")
    fitting.run(settings, name="weights")
    model, data = kme.load(tmp_path / "run" / "model.zarr"), kme.open_dataset(rows)
    again = kme.MCEClassifier(**SETTINGS).fit(data)
    X = data.read("test")[0]
    assert again.decision_function(X).tobytes() == model.decision_function(X).tobytes()


@pytest.mark.parametrize("weights", ["balanced", {"a": 3.0, "c": 0.5}])
def test_weights_of_classes_in_a_config_are_those_of_python(table, tmp_path, weights):
    settings = {**config(table, tmp_path / "run").model_dump(exclude_unset=True)}
    settings["model"] |= {"class_weight": weights}
    run(parse_config(settings), name="weights")
    model, data = kme.load(tmp_path / "run" / "model.zarr"), kme.open_dataset(tmp_path / "run" / "data.zarr")
    X = data.read("test")[0]
    again = kme.MCEClassifier(**SETTINGS, class_weight=weights).fit(data)
    assert again.decision_function(X).tobytes() == model.decision_function(X).tobytes()
    plain = kme.MCEClassifier(**SETTINGS).fit(data)
    assert plain.decision_function(X).tobytes() != model.decision_function(X).tobytes()


def test_inspect_shows_the_weights_and_append_keeps_them(table, tmp_path, capsys):
    rows = str(tmp_path / "rows.zarr")
    assert cli.execute(["ingest", str(table), rows, "--label", "kind", "--weight", "importance", "--quiet"]) == 0
    assert cli.execute(["ingest", str(table), rows, "--append", "--quiet"]) == 0
    capsys.readouterr()
    assert cli.execute(["inspect", rows, "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == 300
    total = 2 * np.resize([1.0, 2.5, 4.0, 1.5], 150).sum()
    assert facts["weight"] == {"column": "importance", "sum": pytest.approx(total), "rows_of_weight_zero": 0}
    assert cli.execute(["inspect", rows]) == 0
    assert "importance" in capsys.readouterr().out


def test_rows_of_a_run_move_with_their_weights(table, tmp_path):
    found = tables.load(config(table, tmp_path / "run").data)
    frame = pd.read_csv(table)
    features = frame.columns[:4]
    for X, w in ((found.X_train, found.w_train), (found.X_test, found.w_test)):
        for row, weight in zip(X[:20], w[:20], strict=True):
            same = frame[(frame[features] == row).all(axis=1)]
            assert weight in same["importance"].to_numpy()
    assert found.digest != tables.load(config(table, tmp_path / "run", data={"weight": "petal width (cm)"}).data).digest


def test_a_second_table_may_come_without_weights(table, tmp_path):
    other = tmp_path / "test.csv"
    pd.read_csv(table).drop(columns="importance").iloc[::3].to_csv(other, index=False)
    settings = config(table, tmp_path / "run", data={"test_source": str(other)}).data
    found = tables.load(settings)
    assert found.w_test is None
    data = tables.stored(settings, tmp_path / "data.zarr", found)
    np.testing.assert_array_equal(data.weights("test"), np.ones(50))


def test_weights_that_a_source_does_not_have_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.weight is 'importance', but sklearn:iris has no weights"):
        tables.load(config("sklearn:iris", tmp_path, data={"label": None}).data)
