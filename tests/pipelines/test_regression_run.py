"""Regression in a run: `model.kind: cme`, or a label that is a number; stored outputs, metrics, report."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_diabetes

import kme_dist as kme
from kme_dist import CMERegressor
from kme_dist.cli.app import execute
from kme_dist.config import Config, load_config
from kme_dist.errors import ConfigError, DataError
from kme_dist.pipelines import evaluate, fit, learn, predict, recipes, run, tables
from kme_dist.pipelines.folder import Listener

ROOT = Path(__file__).parents[2]


def config_of(source, folder, **sections):
    given = {"data": {"source": str(source)}, "output": {"folder": str(folder)}, "cluster": {"kind": "serial"}}
    given |= {"learn": {"steps": 5}}
    return Config(**{name: {**given.get(name, {}), **sections.get(name, {})} for name in {**given, **sections}})


@pytest.fixture(scope="module")
def diabetes_run(tmp_path_factory):
    """The config that ships, on this process and with few steps."""
    folder = tmp_path_factory.mktemp("diabetes")
    config = load_config(
        ROOT / "configs" / "diabetes.yaml", ["cluster.kind=serial", "learn.steps=10", f"output.folder={folder / 'run'}"]
    )
    return config, folder / "run", run.run(config, name="diabetes")


def test_the_shipped_config_runs_and_its_figures_are_those_of_its_predictions(diabetes_run):
    _, folder, summary = diabetes_run
    scores, data = kme.open_predictions(folder / "predictions.zarr"), kme.open_dataset(folder / "data.zarr")
    assert scores.names == ["row", "mean", "std", "interval"]
    y = data.read("test")[1]
    mean, (low, high) = scores.read("mean", 0, len(y)), scores.read("interval", 0, len(y)).T
    assert summary["rmse"] == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)))
    assert summary["mae"] == pytest.approx(np.mean(np.abs(y - mean)))
    assert summary["r2"] == pytest.approx(1 - np.sum((y - mean) ** 2) / np.sum((y - y.mean()) ** 2))
    assert summary["coverage"] == pytest.approx(np.mean((low <= y) & (y <= high)))
    assert summary["r2"] > 0.3
    assert 0.8 < summary["coverage"] < 1
    stored = json.loads((folder / "metrics.json").read_text())
    assert {"rmse", "mae", "r2", "coverage", "interval_width", "nominal_coverage"} <= set(stored)


def test_the_report_shows_residuals_predictions_and_coverage(diabetes_run):
    page = (diabetes_run[1] / "report.html").read_text()
    for title in ("Predicted against true", "Residuals", "Coverage of the intervals", "RMSE", "R²", "Learning curves"):
        assert title in page
    assert page.count("<svg") >= 5


def test_the_model_of_a_run_is_that_of_the_estimator(diabetes_run):
    _, folder, _ = diabetes_run
    data = kme.open_dataset(folder / "data.zarr")
    own = CMERegressor(steps=10).fit(data)
    X, _ = data.read("test")
    model = kme.load(folder)
    assert model.kernel_ == own.kernel_
    np.testing.assert_array_equal(model.predict(X), own.predict(X))
    scores = kme.open_predictions(folder / "predictions.zarr")
    np.testing.assert_allclose(scores.read("mean", 0, len(X)), own.predict(X), rtol=1e-12)
    np.testing.assert_allclose(scores.read("std", 0, len(X)), own.predict(X, return_std=True)[1], rtol=1e-12)
    np.testing.assert_allclose(scores.read("interval", 0, len(X)).T, own.predict_interval(X), rtol=1e-12)


def test_single_stages_are_those_of_the_run(diabetes_run, tmp_path):
    config, folder, summary = diabetes_run
    own = config.model_copy(update={"output": config.output.model_copy(update={"folder": str(tmp_path / "run")})})
    learn.run(own, name="diabetes")
    fit.run(own, name="diabetes")
    assert kme.load(tmp_path / "run" / "model.zarr").regularization_ > 0
    again = run.run(own, name="diabetes")  # splits the rows: learned and fitted on the training rows
    assert again["rmse"] == summary["rmse"]
    predict.run(own, name="diabetes")
    found = evaluate.run(own, name="diabetes")
    assert found["rmse"] == summary["rmse"]
    assert "Coverage of the intervals" in Path(found["report"]).read_text()
    assert kme.load(tmp_path / "run").kernel_ == kme.load(folder).kernel_


@pytest.mark.parametrize(
    ("solver", "said"),
    [
        ("cholesky", "leave-one-out squared error"),
        ("tiled", "leave-one-out squared error"),
        ("nystrom", "leave-one-out squared error"),
        ("falkon", "held-out squared error"),
    ],
)
def test_the_command_fit_names_the_error_of_a_regression(solver, said, tmp_path, capsys):
    folder = tmp_path / "run"
    changes = ["cluster.kind=serial", "learn.steps=0", f"fit.solver={solver}", f"output.folder={folder}"]
    changes += ["fit.centres=60"] if solver in ("nystrom", "falkon") else []
    command = ["fit", str(ROOT / "configs" / "diabetes.yaml"), *(f"--set={change}" for change in changes), "--quiet"]
    assert execute(command) == 0
    out = capsys.readouterr().out
    assert "log loss" not in out
    assert ("iteration" in out) == (solver == "falkon")
    assert execute([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert f"{said} {result['loss']:.4f}" in out
    assert str(folder / "model.zarr") in out
    assert 0.2 < result["loss"] < 1
    assert execute([*command, "--update"]) == 2


def test_the_coverage_of_intervals_is_an_option_of_predict_and_score(diabetes_run, tmp_path):
    _, folder, _ = diabetes_run
    frame = load_diabetes(as_frame=True).data
    frame.to_csv(tmp_path / "new.csv", index=False)
    wanted = kme.load(folder).predict_interval(frame.to_numpy(), coverage=0.5)
    files = [f"--data={tmp_path / 'new.csv'}", f"--out={tmp_path / 'scores.csv'}", "--quiet"]
    assert execute(["predict", "--model", str(folder), *files, "--coverage", "0.5"]) == 0
    command = [sys.executable, "-m", "kme_dist", "score", "--model", str(folder), "--coverage=0.5"]
    with open(tmp_path / "new.csv", "rb") as rows:
        streamed = subprocess.run(command, stdin=rows, capture_output=True, timeout=120, check=True).stdout
    for file in (tmp_path / "scores.csv", io.BytesIO(streamed)):
        np.testing.assert_allclose(pd.read_csv(file)[["interval_low", "interval_high"]].to_numpy().T, wanted, rtol=1e-6)


def test_the_coverage_that_was_asked_for_stands_beside_the_measured_one(diabetes_run, tmp_path, capsys):
    _, folder, summary = diabetes_run
    assert summary["nominal_coverage"] == 0.9
    paths = ["--predictions", str(folder / "predictions.zarr"), "--data", str(folder / "data.zarr")]
    assert execute(["evaluate", *paths, "--out", str(tmp_path / "evaluation"), "--quiet"]) == 0
    assert f"coverage {100 * summary['coverage']:.1f} % of 90 % intervals" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["predict", "score"])
def test_a_coverage_that_is_none_is_refused(command, diabetes_run, tmp_path, capsys):
    paths = [f"--data={tmp_path / 'new.csv'}", f"--out={tmp_path / 'scores.csv'}"] if command == "predict" else []
    assert execute([command, "--model", str(diabetes_run[1]), *paths, "--coverage", "1.5"]) == 2
    error = capsys.readouterr().err
    assert "coverage" in error
    assert "1.5" in error


def test_predictions_as_parquet_have_named_columns(diabetes_run, tmp_path):
    _, folder, _ = diabetes_run
    X, y = load_diabetes(return_X_y=True)
    kme.predict(str(folder), X, tmp_path / "scores", format="parquet", coverage=0.5)
    table = pd.concat(pd.read_parquet(file) for file in sorted((tmp_path / "scores").rglob("*.parquet")))
    assert {"mean", "std", "interval_low", "interval_high"} <= set(table.columns)
    inside = (table["interval_low"].to_numpy() <= y) & (y <= table["interval_high"].to_numpy())
    assert 0.4 < inside.mean() < 0.75


def test_outputs_of_classes_are_refused_for_a_regressor_and_the_other_way_round(diabetes_run, tmp_path):
    _, folder, _ = diabetes_run
    X, y = load_diabetes(return_X_y=True)
    with pytest.raises(ConfigError, match="'label' is not an output of a regressor; choose from mean, std, interval"):
        kme.predict(str(folder), X, tmp_path / "a", outputs=["label"])
    with pytest.raises(ConfigError, match="top_k requires a model of classes"):
        kme.predict(str(folder), X, tmp_path / "a", top_k=2)
    classifier = kme.MCEClassifier(steps=1).fit(X[:50], y[:50] > 100)
    with pytest.raises(ConfigError, match="'mean' is unknown"):
        kme.predict(classifier, X, tmp_path / "b", outputs=["mean"])


# --- which task -------------------------------------------------------------------------------------


def csv(path, label):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(len(label), 2))
    pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "target": label}).to_csv(path, index=False)
    return path


def test_a_label_of_fractions_is_regression_and_a_line_says_so(tmp_path):
    rng = np.random.default_rng(1)
    source = csv(tmp_path / "rows.csv", rng.normal(size=80).round(3))
    lines = []
    config = config_of(source, tmp_path / "run", data={"label": "target"})
    assert "rmse" in run.run(config, name="rows", listener=Listener(say=lines.append))
    assert [line for line in lines if "the label 'target' is a number: regression" in line]


@pytest.mark.parametrize(
    ("label", "numeric"),
    [
        (np.arange(60) % 3, False),
        ((np.arange(60) % 3).astype(float), False),  # 0.0, 1.0, 2.0
        (np.arange(400) % 150, True),  # integers of many values
        (np.linspace(0, 1, 60), True),
    ],
)
def test_integers_of_few_values_are_classes(label, numeric, tmp_path):
    source = csv(tmp_path / "rows.csv", label)
    assert tables.load(config_of(source, tmp_path, data={"label": "target"}).data).numeric is numeric


def test_the_task_can_be_set_and_contradictions_are_named(tmp_path):
    source = csv(tmp_path / "rows.csv", np.arange(60) % 3)
    as_numbers = config_of(source, tmp_path / "run", data={"label": "target", "task": "regression"})
    assert recipes.settled(as_numbers).model.kind == "cme"
    assert run.run(as_numbers, name="rows")["rmse"] > 0
    with pytest.raises(ConfigError, match=r"model.kind mce predicts classes; set model.kind: cme"):
        recipes.settled(config_of(source, tmp_path, data={"task": "regression"}, model={"kind": "mce"}))
    with pytest.raises(ConfigError, match=r"data.task is classification; remove one"):
        recipes.settled(config_of(source, tmp_path, data={"task": "classification"}, model={"kind": "cme"}))
    with pytest.raises(ConfigError, match=r"model.objective is not supported with model.kind cme"):
        recipes.check(config_of(source, tmp_path, model={"kind": "cme", "objective": "rcb"}))


def test_a_data_set_of_classes_is_not_regressed(tmp_path):
    X = np.random.default_rng(0).normal(size=(30, 2))
    data = kme.ingest((X, np.arange(30) % 2), tmp_path / "rows.zarr")
    with pytest.raises(ConfigError, match="stored as classes"):
        run.run(config_of(data.path, tmp_path / "run", model={"kind": "cme"}), name="rows")
    with pytest.raises(DataError, match="no numeric targets"):
        CMERegressor().fit(data)
