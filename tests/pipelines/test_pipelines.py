"""Promises of a run: right figures, honest data checks, a run folder that never lies."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from threadpoolctl import threadpool_info

import kme_dist
from kme_dist.backend import blas_threads
from kme_dist.config import DataConfig, load_config, parse_config
from kme_dist.data.ingest import ingest
from kme_dist.data.leases import writer_lease
from kme_dist.data.places import Place
from kme_dist.errors import AssumptionWarning, ConfigError, CorruptError, DataError, NumericalError, RetryError
from kme_dist.pipelines import tables
from kme_dist.pipelines.evaluate import measure
from kme_dist.pipelines.folder import Listener, describe_run
from kme_dist.pipelines.progress import RunProgress
from kme_dist.pipelines.run import run
from kme_dist.run.fit.problem import ProgressLine

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def quick(folder, **changes):
    """A run of a second: iris, two features, a few steps."""
    tree = {
        "data": {"source": "sklearn:iris", "features": [2, 3], **changes.pop("data", {})},
        "model": {"objective": "rcb", **changes.pop("model", {})},
        "learn": {"steps": 5, **changes.pop("learn", {})},
        "fit": changes.pop("fit", {}),
        "predict": changes.pop("predict", {}),
        "cluster": {"kind": "serial", **changes.pop("cluster", {})},
        "output": {"folder": str(folder), **changes.pop("output", {})},
    }
    assert not changes
    return parse_config(tree)


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes a second; these tests are about something else."""
    monkeypatch.setattr("kme_dist.pipelines.pages.run_page", lambda *arguments, **settings: "<html></html>")


def status(folder):
    return json.loads((folder / "run.json").read_text())["status"]


# --- figures -------------------------------------------------------------------------------------


def test_measures_agree_with_scikit_learn_and_with_hand_counting():
    rng = np.random.default_rng(0)
    classes = np.array(["a", "b", "c"])
    labels = classes[rng.integers(0, 3, 200)]
    P = rng.dirichlet(np.ones(3), 200)
    seen = measure(labels, P, classes)
    assert seen["accuracy"] == pytest.approx(accuracy_score(labels, classes[P.argmax(axis=1)]))
    assert seen["log_loss"] == pytest.approx(log_loss(labels, P, labels=classes))
    binary = measure(labels[labels != "c"], P[labels != "c", :2], classes[:2])
    share = P[labels != "c", :2] / P[labels != "c", :2].sum(axis=1, keepdims=True)
    positive = labels[labels != "c"] == "b"
    assert binary["brier"] == pytest.approx(2 * brier_score_loss(positive, share[:, 1]))
    assert np.sum(seen["confusion"]) == 200
    assert seen["confusion"][0][1] == np.sum((labels == "a") & (P.argmax(axis=1) == 1))
    assert [row["rows"] for row in seen["per_class"]] == [int(np.sum(labels == c)) for c in classes]


def test_calibration_error_is_the_gap_of_confidence_and_accuracy():
    labels = np.array([0, 0, 1, 1])
    P = np.array([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.3, 0.7]])
    # Bin of 0.8: 2 of 3 right, gap 0.1333; bin of 0.7: 1 of 1 right, gap 0.3.
    assert measure(labels, P, np.array([0, 1]))["calibration_error"] == pytest.approx((3 * (0.8 - 2 / 3) + 0.3) / 4)


@pytest.mark.chaos(22)
def test_a_class_without_test_rows_does_no_harm():
    seen = measure(np.array([0, 1]), np.eye(3)[[0, 1]], np.array([0, 1, 2]))
    assert seen["accuracy"] == seen["balanced_accuracy"] == 1.0
    assert seen["per_class"][2] == {"class": "2", "rows": 0, "precision": 0, "recall": 0, "f1": 0}


# --- data ----------------------------------------------------------------------------------------


def test_the_split_holds_out_the_share_and_keeps_classes_alike():
    rows = tables.load(DataConfig(source="sklearn:iris"))
    assert rows.X_train.shape == (120, 4)
    assert rows.X_test.shape == (30, 4)
    assert sorted(np.unique(rows.y_test, return_counts=True)[1]) == [10, 10, 10]
    assert set(rows.y_test) == {"setosa", "versicolor", "virginica"}
    again = tables.load(DataConfig(source="sklearn:iris"))
    assert again.digest == rows.digest
    assert tables.load(DataConfig(source="sklearn:iris", split_seed=1)).digest != rows.digest


@pytest.mark.parametrize("name", ["digits", "iris", "wine", "breast_cancer"])
def test_every_table_offered_by_name_loads(name):
    rows = tables.load(DataConfig(source=f"sklearn:{name}"))
    assert len(rows.feature_names) == rows.X_train.shape[1]


def test_a_value_that_is_no_number_is_found_wherever_it_comes_from(monkeypatch):
    def damaged(source, task):
        X = np.ones((10, 2))
        X[7, 1] = np.nan
        return tables._Source(X, np.arange(10) % 2, ["height", "width"])

    monkeypatch.setattr(tables, "_built_in", damaged)
    with pytest.raises(DataError, match=r"row 7, column 'width': value is nan.*1 of 10 rows"):
        tables.load(DataConfig(source="sklearn:iris"))


def test_features_are_chosen_by_name_or_position_in_the_given_order():
    rows = tables.load(DataConfig(source="sklearn:iris", features=["petal width (cm)", 0]))
    assert rows.feature_names == ["petal width (cm)", "sepal length (cm)"]


def write_csv(path, lines, header="height,width,kind"):
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path)


GOOD = [f"{i % 7}.5,{i},{'ab'[i % 2]}" for i in range(20)]


def test_a_table_of_ones_own_is_read_by_its_label(tmp_path):
    path = write_csv(tmp_path / "good.csv", GOOD)
    rows = tables.load(DataConfig(source=path, label="kind"))
    assert rows.feature_names == ["height", "width"]
    assert len(rows.y_train) == 16
    assert set(rows.y_train) == {"a", "b"}


@pytest.mark.parametrize("cell", ["", "nan"], ids=["empty cell", "nan"])
def test_missing_values_are_marked_and_said_or_refused_where_asked(tmp_path, cell):
    path = write_csv(tmp_path / "holes.csv", [*GOOD, f"{cell},3,a"])
    with pytest.warns(AssumptionWarning, match=r"holes.csv: missing values in 'height' \(1 row\)"):
        rows = tables.load(DataConfig(source=path, label="kind"))
    assert rows.feature_names == ["height", "height:missing", "width"]
    with pytest.raises(DataError, match=r"holes.csv: row 20 \(line 22\), column 'height': the value is missing"):
        tables.load(DataConfig(source=path, label="kind", missing="error"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*GOOD, "inf,3,a"], ["row 20 (line 22)", "'height'", "infinite"]),
        ([*GOOD, "tall,3,a"], ["'height'", "'tall'", "text among numbers"]),
        ([*GOOD, "1,3"], ["row 20 (line 22)", "fields"]),
        ([line[:-1] + "a" for line in GOOD], ["only one class (a)", "data.label"]),
        ([*GOOD, "1,2,c"], ["class c has one row", "data.stratify"]),
        ([f"1,2,{i}.5" for i in range(20)], ["'kind'", "20 different values in 20 rows"]),
        ([], ["no rows"]),
    ],
    ids=["inf", "text", "ragged", "one class", "lonely class", "continuous", "no rows"],
)
def test_bad_tables_are_refused_with_the_place_of_the_fault(tmp_path, lines, words):
    path = write_csv(tmp_path / "bad.csv", lines)
    with pytest.raises(DataError) as caught:
        tables.load(DataConfig(source=path, label="kind", task="classification"))
    for word in ["bad.csv", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"features": ["petal widht (cm)"]}, ["petal widht", "did you mean 'petal width (cm)'"]),
        ({"features": [4]}, ["no column 4", "4 features"]),
        ({"image_shape": (2, 3)}, ["data.image_shape", "6 pixels", "4 features"]),
        ({"label": "kind"}, ["data.label", "its own labels"]),
        ({"source": "absent.csv", "label": "a"}, ["absent.csv", "does not exist"]),
        ({"test_fraction": 0.001}, ["data.test_fraction", "150 rows"]),
    ],
)
def test_settings_that_do_not_fit_the_table_are_refused(settings, words):
    with pytest.raises((ConfigError, DataError)) as caught:
        tables.load(DataConfig(**{"source": "sklearn:iris", **settings}))
    for word in words:
        assert word in str(caught.value)


def test_a_second_table_is_tested_on_and_must_match(tmp_path):
    train = write_csv(tmp_path / "train.csv", GOOD)
    test = write_csv(tmp_path / "test.csv", GOOD[:4])
    rows = tables.load(DataConfig(source=train, label="kind", test_source=test))
    assert (len(rows.y_train), len(rows.y_test)) == (20, 4)
    other = write_csv(tmp_path / "other.csv", GOOD[:4], header="height,depth,kind")
    with pytest.raises(DataError, match="the column 'width' is missing; found height, depth, kind"):
        tables.load(DataConfig(source=train, label="kind", test_source=other))
    strange = write_csv(tmp_path / "strange.csv", [*GOOD[:4], "1,2,z"])
    with pytest.raises(DataError, match="test row 4 has the label 'z'"):
        tables.load(DataConfig(source=train, label="kind", test_source=strange))


def test_a_data_set_brings_its_labels_and_its_own_split(tmp_path):
    source = write_csv(tmp_path / "good.csv", GOOD)
    place = str(tmp_path / "good.zarr")
    ingest(source, place, label="kind", split="train=0:15,test=15:20")
    rows = tables.load(DataConfig(source=place))
    assert rows.feature_names == ["height", "width"]
    assert rows.X_test[:, 1].tolist() == [15, 16, 17, 18, 19]
    assert rows.y_test.tolist() == ["b", "a", "b", "a", "b"]
    held_out = tables.load(DataConfig(source=place, stored_split=False, test_fraction=0.5, features=["width"]))
    assert held_out.X_test.shape == (10, 1)
    with pytest.raises(ConfigError, match="its own labels"):
        tables.load(DataConfig(source=place, label="width"))


# --- the run folder ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "quick"
    steps = []
    summary = run(quick(folder), name="quick", listener=Listener(step=steps.append))
    return folder, summary, steps


def test_a_run_writes_everything_and_says_so_last(finished):
    folder, summary, steps = finished
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "succeeded"
    assert set(record["stages_seconds"]) == {"ingest", "learn", "fit", "predict", "evaluate", "report"}
    assert record["seeds"] == {"split": 0, "learn": 0}
    assert len(steps) == summary["steps"] == 5
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["objective"] for line in lines] == [step["objective"] for step in steps]
    assert json.loads((folder / "metrics.json").read_text())["accuracy"] == summary["accuracy"]
    assert not summary["reused"]


def test_the_stored_model_gives_the_reported_figures(finished):
    folder, summary, _ = finished
    rows = tables.load(quick(folder).data)
    model = kme_dist.load(folder / "model.zarr")
    table = pd.DataFrame(rows.X_test, columns=rows.feature_names)
    seen = measure(rows.y_test, model.predict_proba(table), model.classes_)
    assert seen["accuracy"] == summary["accuracy"]
    assert seen["log_loss"] == pytest.approx(summary["log_loss"])
    assert model.regularization_ == summary["regularization"]


def test_a_run_is_what_the_estimator_does_alone(finished):
    folder, _, _ = finished
    config = quick(folder)
    rows, model = tables.load(config.data), kme_dist.load(folder / "model.zarr")
    table = pd.DataFrame(rows.X_train, columns=rows.feature_names)
    alone = kme_dist.MCEClassifier(**config.estimator_arguments()).fit(table, rows.y_train)
    np.testing.assert_array_equal(model.embedding_.weights, alone.embedding_.weights)
    assert (model.kernel_, model.regularization_, model.bound_) == (alone.kernel_, alone.regularization_, alone.bound_)
    query = pd.DataFrame(rows.X_test, columns=rows.feature_names)
    np.testing.assert_array_equal(model.predict_proba(query), alone.predict_proba(query))


def test_names_of_columns_travel_from_a_run_to_new_rows(finished):
    folder, _, _ = finished
    rows, model = tables.load(quick(folder).data), kme_dist.load(folder / "model.zarr")
    assert model.feature_names_in_.tolist() == rows.feature_names
    table = pd.DataFrame(rows.X_test, columns=rows.feature_names)
    with pytest.raises(ValueError, match="same order as they were in fit"):
        model.predict(table[table.columns[::-1]])
    with pytest.raises(ValueError, match="seen at fit time, yet now missing"):
        model.predict(table.rename(columns={rows.feature_names[0]: "another"}))


def test_the_stored_config_repeats_the_run(finished, tmp_path, no_pictures):
    folder, summary, _ = finished
    config = load_config(folder / "config.yaml", [f"output.folder={tmp_path / 'again'}"])
    again = run(config, name="again")
    same = ("accuracy", "log_loss", "brier", "calibration_error", "regularization", "objective")
    assert {key: again[key] for key in same} == {key: summary[key] for key in same}
    first, second = (json.loads((f / "run.json").read_text()) for f in (folder, tmp_path / "again"))
    assert first["digests"] == second["digests"]


def test_the_report_shows_what_belongs_to_two_features(finished):
    folder, summary, _ = finished
    page = (folder / "report.html").read_text()
    for title in ("Learning curves", "Probability map", "Confusion matrix", "Reliability", "Feature relevance"):
        assert f"<h2>{title}</h2>" in page
    assert f"{100 * summary['accuracy']:.2f} %" in page
    assert "Pixel relevance" not in page


def test_an_unchanged_run_is_found_and_not_repeated(finished):
    folder, summary, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    steps = []
    again = run(quick(folder), name="quick", listener=Listener(step=steps.append))
    assert again == {**summary, "reused": True}
    assert steps == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("part", "stage"),
    [
        ("predictions.zarr/label/c/0", "predict"),
        ("predictions.zarr/_manifest.json", "predict"),
        ("predictions.zarr/zarr.json", "predict"),
        ("model.zarr/zarr.json", "fit"),
        ("learned.zarr/zarr.json", "learn"),
        ("metrics.json", "evaluate"),
        ("report.html", "report"),
        ("config.yaml", None),
        ("data.zarr/X/c/0/0", None),
        ("metrics.jsonl", None),
    ],
)
def test_what_is_damaged_in_a_run_is_found_and_computed_again(finished, tmp_path, no_pictures, part, stage):
    folder, summary, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    assert describe_run(copy, verify=True)["status"] == "succeeded"
    content = bytearray((copy / part).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / part).write_bytes(content)
    with pytest.raises(CorruptError, match=part.split("/")[0]):
        describe_run(copy, verify=True)
    if stage is None:  # no result that a later stage would use unread: the message says what to do
        return
    said = []
    again = run(quick(copy), name="quick", listener=Listener(say=said.append))
    assert f"{part.split('/')[0]} is damaged and is computed again" in "\n".join(said)
    assert not any("previous" in line for line in said)
    assert again["accuracy"] == summary["accuracy"]
    assert describe_run(copy, verify=True)["status"] == "succeeded"


@pytest.mark.parametrize("key", ["model", "out"])
def test_keys_for_named_rows_are_refused_without_them(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"predict\.{key} without predict\.data.*add `data: PATH`"):
        run(quick(tmp_path / "run", predict={key: "nofile"}), name="x")
    assert not (tmp_path / "run").exists()


def test_a_run_is_repeated_when_anything_differs(tmp_path, no_pictures):
    folder = tmp_path / "run"
    lines = [*GOOD]

    def again(fresh=False, steps=5):
        source = write_csv(tmp_path / "t.csv", lines)
        own = {"source": source, "label": "kind", "features": None}
        summary = run(quick(folder, data=own, learn={"steps": steps}), name="x", fresh=fresh)
        assert status(folder) == "succeeded"
        return not summary["reused"]

    def edit_record(change):
        record = json.loads((folder / "run.json").read_text())
        del record["digest"]
        change(record)
        (folder / "run.json").write_text(json.dumps(record))

    run(quick(folder), name="x")
    assert again(), "other data"
    assert not again(), "nothing"
    assert again(fresh=True), "asked for"
    assert again(steps=6), "other settings"
    lines[-1] = "0.25,1,b"
    assert again(steps=6), "one cell of the table"
    (folder / "report.html").unlink()
    assert again(steps=6), "a lost file"
    edit_record(lambda record: record["versions"].update({"kme-dist": "0.0.1"}))
    assert again(steps=6), "another version"
    edit_record(lambda record: record.update(status="running"))
    assert again(steps=6), "an earlier run that was killed"


def test_only_what_changed_is_done_again(tmp_path, no_pictures):
    folder = tmp_path / "run"

    def done(**changes):
        before = stages(folder)
        run(quick(folder, **changes), name="x")
        return [name for name, facts in stages(folder).items() if facts != before.get(name)]

    def stages(folder):
        return json.loads((folder / "run.json").read_text())["stages"] if folder.exists() else {}

    assert done() == ["ingest", "learn", "fit", "predict", "evaluate", "report"]
    assert done(fit={"refit_regularization": False}) == ["fit", "predict", "evaluate", "report"]
    assert done(fit={"refit_regularization": False}, predict={"outputs": ["label", "decision"]}) == [
        "predict",
        "evaluate",
        "report",
    ]
    assert done(learn={"steps": 6}) == ["learn", "fit", "predict", "evaluate", "report"]


def test_workers_make_the_run_of_a_single_process(finished, tmp_path, no_pictures):
    folder, summary, _ = finished
    over = run(quick(tmp_path / "over", cluster={"kind": "local", "workers": 2, "dashboard": False}), name="quick")
    same = ("accuracy", "log_loss", "regularization", "steps", "solver")
    assert {key: over[key] for key in same} == {key: summary[key] for key in same}
    mine, theirs = (kme_dist.load(place / "model.zarr").embedding_.weights for place in (tmp_path / "over", folder))
    np.testing.assert_array_equal(mine, theirs)


def test_predictions_of_the_test_rows_are_stored_with_their_rows(finished):
    folder, summary, _ = finished
    found = kme_dist.open_predictions(folder / "predictions.zarr")
    truth = kme_dist.open_dataset(folder / "data.zarr").read("test")[1]
    assert found.rows == summary["test_rows"] == 30
    assert (found.read("label", 0, 30) == truth).mean() == summary["accuracy"]


def test_a_run_resumes_from_its_checkpoint_after_a_kill(tmp_path, no_pictures):
    class Stop(BaseException):
        pass

    def stop(step):
        if step["step"] == 8:
            raise Stop

    settings = {"learn": {"steps": 12, "checkpoint_steps": 1}}
    whole = run(quick(tmp_path / "whole", **settings), name="x")
    with pytest.raises(Stop):
        run(quick(tmp_path / "cut", **settings), name="x", listener=Listener(step=stop))
    seen = []
    resumed = run(quick(tmp_path / "cut", **settings), name="x", listener=Listener(step=seen.append))
    assert seen[0]["step"] >= 8, "what was learned is not learned again"
    assert resumed["regularization"] == whole["regularization"]
    lines = [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 13)), "every step is on record once"


def test_a_data_set_with_both_parts_is_used_where_it_lies(tmp_path, no_pictures):
    rows = tables.load(DataConfig(source="sklearn:iris"))
    X, y = np.concatenate([rows.X_train, rows.X_test]), np.concatenate([rows.y_train, rows.y_test])
    place = str(tmp_path / "iris.zarr")
    ingest((X, y), place, task="classification", split="train=0:120,test=120:150")
    summary = run(quick(tmp_path / "run", data={"source": place, "features": None}), name="x")
    assert summary["test_rows"] == 30
    assert not (tmp_path / "run" / "data.zarr").exists()


def test_a_table_larger_than_memory_is_streamed(tmp_path, no_pictures, monkeypatch):
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", 100)
    source = write_csv(tmp_path / "t.csv", GOOD * 5)
    settings = {"source": source, "label": "kind", "features": None, "stratify": True}
    summary = run(quick(tmp_path / "run", data=settings), name="x")
    assert summary["train_rows"] + summary["test_rows"] == 100
    assert summary["test_rows"] == 20


def test_other_settings_do_not_replace_results_when_forbidden(finished):
    folder, _, _ = finished
    before = (folder / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"output\.overwrite is false.*--fresh"):
        run(quick(folder, learn={"steps": 7}, output={"overwrite": False}), name="quick")
    assert (folder / "run.json").read_bytes() == before


def test_a_folder_of_somebody_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run folder"):
        run(quick(tmp_path), name="x")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "run.json").write_text('{"format": "something else"}')
    with pytest.raises(ConfigError, match=r"run\.json was not written"):
        run(quick(tmp_path), name="x")


def test_settings_that_cannot_work_leave_earlier_results_alone(finished):
    folder, _, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    bad = {"learn": {"starts": [{"name": "a", "length_scale": [1.0, 2.0, 3.0]}]}}
    with pytest.raises((ConfigError, DataError), match="length scale"):
        run(quick(folder, **bad), name="quick")
    with pytest.raises(ConfigError, match="gausian"):
        run(quick(folder, model={"kernel": "gausian"}), name="quick")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), "interrupted"), (NumericalError("too steep"), "failed"), (OSError(28, "full"), "failed")],
)
def test_a_run_that_stops_midway_never_looks_finished(tmp_path, no_pictures, error, expected):
    def stop(step):
        if step["step"] == 3:
            raise error

    run(quick(tmp_path / "run", learn={"steps": 2}), name="x")  # results that will be out of date
    with pytest.raises(type(error)):
        run(quick(tmp_path / "run"), name="x", listener=Listener(step=stop))
    assert status(tmp_path / "run") == expected
    assert not (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "model.zarr").exists()
    assert not run(quick(tmp_path / "run"), name="x")["reused"]
    assert status(tmp_path / "run") == "succeeded"


def test_a_killed_process_leaves_no_lock_and_no_finished_run(tmp_path, no_pictures):
    program = (
        "import sys\n"
        "from kme_dist.config import load_config\n"
        "from kme_dist.pipelines.folder import Listener\n"
        "from kme_dist.pipelines.run import run\n"
        "config = load_config(sys.argv[1], ['output.folder=' + sys.argv[2], 'learn.steps=100000'])\n"
        "run(config, name='x', listener=Listener(step=lambda step: print(step['step'], flush=True)))\n"
    )
    folder = tmp_path / "run"
    arguments = [sys.executable, "-c", program, str(CONFIGS / "wine.yaml"), str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stdout.readline()
        with pytest.raises(RetryError, match="another writer"):
            run(quick(folder), name="x")
        os.kill(process.pid, signal.SIGKILL)
    assert status(folder) == "running"
    assert not run(quick(folder), name="x")["reused"]
    assert status(folder) == "succeeded"


def test_two_runs_never_write_the_same_folder_at_once(tmp_path):
    folder = tmp_path / "run"
    with writer_lease(Place.of(folder)), pytest.raises(RetryError, match="another writer"):
        run(quick(folder), name="x")


@pytest.mark.slow
def test_the_figure_of_the_paper_comes_out(tmp_path):
    """Over- and underfitted starts on two attributes of iris: 56.67 % before, 73.33 % after, the same place."""
    config = load_config(CONFIGS / "iris_two_attributes.yaml", [f"output.folder={tmp_path / 'iris'}"])
    summary = run(config, name="iris_two_attributes")
    over, under = summary["starts"]
    assert (over["name"], under["name"]) == ("overfitted", "underfitted")
    for start in (over, under):
        assert round(100 * start["accuracy_before"], 2) == 56.67
        assert round(100 * start["accuracy"], 2) == 73.33
    assert over["objective"] == pytest.approx(under["objective"], rel=2e-3)
    assert summary["accuracy"] == pytest.approx(22 / 30)
    page = (tmp_path / "iris" / "report.html").read_text()
    for title in ("overfitted, before: 56.67 %", "underfitted, after: 73.33 %"):
        assert title in page
    lines = [json.loads(line) for line in (tmp_path / "iris" / "metrics.jsonl").read_text().splitlines()]
    assert [line["start"] for line in lines] == ["overfitted"] * 500 + ["underfitted"] * 500


def test_the_linear_algebra_keeps_to_the_threads_of_the_config(tmp_path, no_pictures):
    """One for a small table, whatever the machine offers: the same bits, and no cores fighting over it."""
    seen = set()

    def look(step):
        seen.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")

    with blas_threads(2):
        run(quick(tmp_path / "one"), name="x", listener=Listener(step=look))
    assert seen == {1}


def test_named_features_are_ranked_by_their_relevance(tmp_path):
    config = load_config(CONFIGS / "wine.yaml", [f"output.folder={tmp_path / 'wine'}"])
    assert run(config, name="wine")["accuracy"] > 0.9
    page = (tmp_path / "wine" / "report.html").read_text()
    bars = page[page.index("<h2>Feature relevance</h2>") :]
    names = tables.load(config.data).feature_names
    shown = sorted((bars.index(f">{name}<"), name) for name in names)
    relevance = kme_dist.load(tmp_path / "wine" / "model.zarr").feature_importances_
    assert [name for _, name in shown] == [names[i] for i in np.argsort(relevance, kind="stable")[::-1]]


def test_a_categorical_column_is_one_bar_of_relevance(tmp_path, rng):
    kind, size, noise = rng.choice(["alder", "birch", "cedar"], 90), rng.normal(size=90), rng.normal(size=90)
    label = np.where((kind == "birch") ^ (rng.random(90) < 0.05), "yes", "no")
    lines = [
        "kind,size,noise,label",
        *(f"{k},{s},{n},{y}" for k, s, n, y in zip(kind, size, noise, label, strict=True)),
    ]
    (tmp_path / "trees.csv").write_text("\n".join(lines))
    config = quick(tmp_path / "run", data={"source": str(tmp_path / "trees.csv"), "label": "label", "features": None})
    run(config, name="x")
    page = (tmp_path / "run" / "report.html").read_text()
    bars = page[page.index("<h2>Feature relevance</h2>") :]
    assert bars.index(">kind<") < min(bars.index(">size<"), bars.index(">noise<"))
    assert "kind=birch" not in bars[: bars.index("</figure>")]
    model = kme_dist.load(tmp_path / "run" / "model.zarr")
    assert model.feature_groups_ == {"kind": [0, 1, 2], "size": [3], "noise": [4]}
    assert model.feature_importances("columns")[0] > 0.8


def test_the_start_with_the_lowest_objective_is_kept(tmp_path, no_pictures):
    starts = [
        {"name": "far", "length_scale": 50.0, "regularization": 50.0},
        {"name": "near", "length_scale": 0.3, "regularization": 0.01},
    ]
    summary = run(quick(tmp_path / "run", learn={"steps": 3, "starts": starts}), name="x")
    far, near = summary["starts"]
    assert near["objective"] < far["objective"]
    assert summary["regularization"] == near["regularization"]


# --- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(step, steps=3, phase="rcb"):
    numbers = {"objective": 12.345, "risk": 9.876, "complexity": 1.25}
    return {"step": step, "steps": steps, "phase": phase, **numbers}


def test_a_log_gets_plain_lines_with_every_number():
    stream = io.StringIO()
    with RunProgress(stream) as progress:
        for step in (1, 2, 3):
            progress(record(step))
    assert progress.steps_done == 3
    (line,) = stream.getvalue().splitlines()
    for word in ("rcb", "step 3/3", "steps/s", "q 12.35", "risk 9.876", "r 1.25", "ETA"):
        assert word in line


def test_every_phase_gets_its_last_line_even_when_it_stops_early():
    stream = io.StringIO()
    with RunProgress(stream) as progress:
        progress(record(1))
        progress(record(2))
        progress(record(1, phase="validation"))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("rcb: step 2/3")
    assert second.startswith("validation: step 1/3")


def shown_on_a_terminal(monkeypatch, columns, *calls):
    """The last state of the bars on a terminal of that width, as lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with RunProgress(stream) as progress:
        for call in calls:
            call(progress)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return [line.split("\r")[-1].rstrip() for line in text.rstrip().split("\n")]


def test_a_terminal_gets_a_live_bar_with_every_number(monkeypatch):
    lines = shown_on_a_terminal(monkeypatch, 160, lambda p: p.rename("overfitted"), lambda p: p(record(3)))
    for word in ("overfitted rcb", "3/3", "steps/s", "q 12.35", "risk 9.876", "r 1.25"):
        assert word in lines[-1]


def test_a_bar_fits_eighty_columns_with_nothing_cut_off(monkeypatch):
    long = {**record(3), "regularization": 1e-3, "gradient_norm": 0.5, "rows_per_second": 12345.0, "waiting_share": 0.1}
    (line,) = shown_on_a_terminal(monkeypatch, 80, lambda p: p.rename("a start"), lambda p: p(long))[-1:]
    assert len(line) <= 80
    assert "a start rcb" in line
    assert "3/3  q 12.35" in re.sub(r" +", "  ", line).replace("q  12.35", "q 12.35")
    assert "..." not in line
    assert "…" not in line


def test_learning_that_stopped_early_says_so_and_its_bar_is_full(monkeypatch):
    calls = [lambda p: p(record(93, steps=300)), lambda p: p(record(3, phase="validation"))]
    first, second = shown_on_a_terminal(monkeypatch, 100, *calls)[-2:]
    assert "93/300" in first
    assert "stopped early" in first
    assert "stopped early" not in second
    full = "━" * 10
    assert full in first
    assert full in second


def test_a_stage_moves_its_bar_by_its_own_lines_and_ends_full(monkeypatch):
    calls = [
        lambda p: p.begin("fit"),
        lambda p: p.say(ProgressLine("fit: column 1 of 4", 60, 100)),
        lambda p: p.say("fit: a message"),
        lambda p: p.end("fit"),
    ]
    lines = shown_on_a_terminal(monkeypatch, 80, *calls)
    assert "fit: a message" in lines
    assert not any("column 1 of 4" in line for line in lines), "the bar shows it"
    assert re.match(r"fit +━+ +60/100", lines[-1])


def test_a_log_gets_rows_with_share_rate_and_time_left():
    stream, clock = io.StringIO(), iter(range(0, 100, 10))
    with RunProgress(stream, clock=lambda: next(clock)) as progress:
        progress.count("predict", 0, 1000)
        progress.count("predict", 250, 1000)
    line = stream.getvalue().splitlines()[-1]
    assert re.fullmatch(r"predict: 250 of 1,000 \(25%\), [\d.]+/s, \d+ s left", line)


def test_no_rate_is_shown_where_none_is_known():
    stream = io.StringIO()
    with RunProgress(stream, clock=lambda: 1.0) as progress:
        progress.count("reading", 700, 700)
    assert stream.getvalue() == "reading: 700 of 700 (100%)\n"


def test_quiet_is_quiet():
    for stream in (io.StringIO(), Terminal()):
        with RunProgress(stream, quiet=True) as progress:
            progress(record(3))
        assert stream.getvalue() == ""


def test_not_a_number_is_shown_as_such():
    stream = io.StringIO()
    with RunProgress(stream) as progress:
        progress({**record(3), "objective": math.nan})
    assert "q nan" in stream.getvalue()
