"""`kme-dist predict` and `kme-dist evaluate`: from configs and flags to files, lines and exit codes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.datasets import load_iris

import kme_dist as kme
from kme_dist.cli import app as cli
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.pipelines.evaluate import measure
from kme_dist.pipelines.folder import Listener
from kme_dist.pipelines.predict import RowProgress

KERNEL = Gaussian(length_scale=np.full(4, 0.5))


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A folder as `kme-dist run` leaves it: a data set with parts, and a model of its training rows."""
    monkeypatch.chdir(tmp_path)
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    (tmp_path / "runs/iris").mkdir(parents=True)
    data = ingest((X, names), "runs/iris/data.zarr", split="train=0.6,test=0.4", shuffle=0, dtype="float64")
    train, codes = data.read("train")
    model = kme.MCEClassifier(kernel=KERNEL, steps=0, regularization=1e-4)
    model.fit(train, np.array(data.classes)[codes]).save("runs/iris/model.zarr")
    (tmp_path / "iris.yaml").write_text("data: {source: sklearn:iris}\ncluster: {kind: serial}\n")
    return tmp_path


def call(capsys, *arguments):
    code = cli.execute(list(arguments))
    return code, capsys.readouterr()


def test_a_config_predicts_and_evaluates_the_test_rows_of_its_run(run_folder, capsys):
    code, seen = call(capsys, "predict", "iris.yaml", "--json")
    result = json.loads(seen.out)
    assert (code, result["status"], result["split"], result["computed"]) == (0, "succeeded", "test", 1)
    assert result["rows"] == 60
    code, seen = call(capsys, "predict", "iris.yaml")
    assert code == 0
    assert "0 chunks computed, 1 done before" in seen.out
    code, seen = call(capsys, "evaluate", "iris.yaml", "--json")
    result = json.loads(seen.out)
    assert code == 0
    data, model = kme.open_dataset("runs/iris/data.zarr"), kme.load("runs/iris/model.zarr")
    X, codes = data.read("test")
    expected = measure(np.array(data.classes)[codes], model.predict_proba(X), model.classes_)
    assert result["accuracy"] == pytest.approx(expected["accuracy"])
    assert result["log_loss"] == pytest.approx(expected["log_loss"], rel=1e-3)
    stored = json.loads((run_folder / "runs/iris/evaluation/metrics.json").read_text())
    assert stored["confusion"] == expected["confusion"]
    page = (run_folder / "runs/iris/evaluation/report.html").read_text()
    for words in ("Confusion matrix", "Reliability", "Error rate when uncertain", "versicolor", "Top 2"):
        assert words in page


def test_flags_alone_are_enough(run_folder, capsys):
    (run_folder / "g.yaml").write_text("values: {setosa: 0, versicolor: 1, virginica: 2}\n")
    flags = ["--model", "runs/iris/model.zarr", "--data", "runs/iris/data.zarr", "--out", "scores"]
    options = ["--outputs", "label,entropy", "--expectation", "size=g.yaml", "--top-k", "2", "--format", "parquet"]
    code, seen = call(capsys, "predict", *flags, *options)
    assert code == 0, seen.err
    assert "150 rows (150 computed), 1 chunk computed" in seen.out
    found = kme.open_predictions("scores")
    assert found.names == ["row", "label", "entropy", "expectation/size", "top_label", "top_probability"]
    code, seen = call(capsys, "evaluate", "--predictions", "scores", "--data", "runs/iris/data.zarr")
    assert code == 0, seen.err
    assert "log loss" not in seen.out, "only labels were stored"
    assert "accuracy" in seen.out


def test_mistakes_are_one_line_and_code_two(run_folder, capsys):
    cases = [
        (["predict"], "--model is missing"),
        (["predict", "iris.yaml", "--outputs", "lable"], "lable"),
        (["predict", "iris.yaml", "--expectation", "x"], "NAME=FILE"),
        (["predict", "iris.yaml", "--expectation", "x=none.yaml"], "none.yaml"),
        (["predict", "iris.yaml", "--model", "gone.zarr"], "gone.zarr"),
        (["evaluate", "iris.yaml"], "no predictions exist here"),
        (["evaluate", "--data", "runs/iris/data.zarr"], "--predictions and --data"),
    ]
    for arguments, words in cases:
        code, seen = call(capsys, *arguments)
        assert (code, len(seen.err.splitlines())) == (2, 1), (arguments, seen.err)
        assert words in seen.err


def test_a_skipped_row_is_listed_and_ends_with_65(run_folder, capsys):
    X = load_iris().data.copy()
    X[7, 2] = np.inf
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({f"x{i}": X[:, i] for i in range(4)}), "bad.parquet")
    arguments = ["--model", "runs/iris/model.zarr", "--data", "bad.parquet", "--out", "scores.zarr"]
    code, seen = call(capsys, "predict", *arguments)
    assert code == 65
    assert "skipped row 7: feature 2: the value is inf, must be finite" in seen.err
    code, seen = call(capsys, "inspect", "scores.zarr", "--json")
    assert code == 0
    assert json.loads(seen.out)["status"] == "incomplete"


def test_inspect_tells_and_verifies(run_folder, capsys):
    call(capsys, "predict", "iris.yaml")
    code, seen = call(capsys, "inspect", "runs/iris/predictions.zarr", "--verify", "--json")
    facts = json.loads(seen.out)
    assert (code, facts["rows"], facts["status"], facts["chunks_done"]) == (0, 60, "complete", 1)
    assert facts["arrays"]["probability"] == "60 x 3 float32"
    path = run_folder / "runs/iris/predictions.zarr/entropy/c/0"
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(bytes(content))
    code, seen = call(capsys, "inspect", "runs/iris/predictions.zarr", "--verify")
    assert code == 65
    assert "chunk 0" in seen.err


def test_labels_that_cannot_be_judged_are_refused(run_folder, capsys):
    call(capsys, "predict", "iris.yaml")
    X, y = load_iris(return_X_y=True)
    found = ("evaluate", "--predictions", "runs/iris/predictions.zarr", "--data")
    ingest((X[:60], np.array(["setosa", "rose", "virginica"])[y[:60]]), "strange.zarr")
    assert call(capsys, *found, "strange.zarr")[0] == 2
    ingest((X, np.array(["setosa", "versicolor", "virginica"])[y]), "longer.zarr")
    code, seen = call(capsys, *found, "longer.zarr")
    assert code == 2
    assert "has 60 rows" in seen.err


def test_only_the_rows_that_were_predicted_are_evaluated(run_folder, capsys):
    """Also those of another data set, in another precision: the rows are compared, not the path."""
    call(capsys, "predict", "iris.yaml")
    found = ("evaluate", "--predictions", "runs/iris/predictions.zarr", "--data")
    data = kme.open_dataset("runs/iris/data.zarr")
    X, codes = data.read("test")
    y = np.array(data.classes)[codes]
    for dtype in ("float64", "float32"):
        ingest((X, y), f"same-{dtype}.zarr", dtype=dtype)
        code, seen = call(capsys, *found, f"same-{dtype}.zarr", "--json")
        assert (code, json.loads(seen.out)["rows"]) == (0, 60)
    others = {"other": load_iris().data[:60], "moved": X[np.r_[1:60, 0]], "scaled": X * 2.54}
    for name, rows in others.items():
        ingest((rows, y), f"{name}.zarr")
        code, seen = call(capsys, *found, f"{name}.zarr")
        assert code == 2, name
        assert "does not have the rows that were predicted (row 0 differs)" in seen.err
        assert "runs/iris/data.zarr: evaluate them with it" in seen.err


def test_two_rows_in_another_place_are_noticed_where_identities_can_be_compared(run_folder, capsys):
    """Samples would not see them. In another precision only samples can be compared, and a line says so."""
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    other = np.arange(150)
    other[[5, 130]] = 130, 5
    ingest((X, names), "rows.zarr", dtype="float64")
    ingest((X, names), "same.zarr", dtype="float64")
    ingest((X[other], names[other]), "moved.zarr", dtype="float64")
    ingest((X, names), "single.zarr", dtype="float32")
    call(capsys, "predict", "--model", "runs/iris/model.zarr", "--data", "rows.zarr", "--out", "scores.zarr")
    found = ("evaluate", "--predictions", "scores.zarr", "--data")
    code, seen = call(capsys, *found, "moved.zarr")
    assert code == 2
    assert "the rows that were predicted (rows 0 to 149 have other values, or another order)" in seen.err
    code, seen = call(capsys, *found, "same.zarr")
    assert (code, "only samples" in seen.err) == (0, False)
    code, seen = call(capsys, *found, "single.zarr")
    assert code == 0
    assert "single.zarr: only samples of the rows (8 of 150) were compared with those predicted" in seen.err


def test_a_split_with_the_same_rows_beside_others_is_compared_by_samples(run_folder, capsys):
    """Its chunks have other digests, because they hold rows of another split, too."""
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    for name, training in (("rows", X[:100]), ("others", X[:100] + 1)):
        ingest((np.r_[training, X[100:]], names), f"{name}.zarr", split="train=0:100,test=100:150", dtype="float64")
    given = ("--model", "runs/iris/model.zarr", "--data", "rows.zarr", "--split", "test", "--out", "scores.zarr")
    call(capsys, "predict", *given)
    code, seen = call(capsys, "evaluate", "--predictions", "scores.zarr", "--data", "others.zarr", "--split", "test")
    assert code == 0
    assert "only samples of the rows (8 of 50)" in seen.err


def test_predictions_of_files_are_evaluated_with_a_data_set_of_the_same_rows(run_folder, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    pq.write_table(pa.table({f"x{i}": X[:, i] for i in range(4)}), "new.parquet")
    call(capsys, "predict", "--model", "runs/iris/model.zarr", "--data", "new.parquet", "--out", "scores.zarr")
    found = ("evaluate", "--predictions", "scores.zarr", "--data")
    ingest((X, names), "labelled.zarr")
    assert call(capsys, *found, "labelled.zarr")[0] == 0
    ingest((X[::-1], names), "reversed.zarr")
    code, seen = call(capsys, *found, "reversed.zarr")
    assert code == 2
    assert "row 0 differs" in seen.err


def test_progress_tells_rows_and_what_was_done_before():
    lines, counts = [], []
    listener = Listener(say=lines.append, progress=lambda stage, done, total: counts.append((stage, done, total)))
    progress = RowProgress(listener)
    for done in (1000, 2000, 3000):
        progress(done, 3000)
    assert counts == [("predict", done, 3000) for done in (1000, 2000, 3000)]
    assert lines == ["predict: 1,000 of 3,000 rows were done before"]
