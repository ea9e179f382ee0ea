"""A label that training never saw: an error that names it, or without effect; never the number of another class."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster

import kme_dist as kme
from kme_dist.cli import app as cli
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.errors import DataError
from kme_dist.pipelines.evaluate import evaluate, measure
from kme_dist.run.executors import DaskExecutor, SerialExecutor

ROWS = 6000
X = np.random.default_rng(0).normal(size=(ROWS, 3)).round(3)
OLD = np.where(X[:, 0] > X[:, 1], "cat", "dog")
SMALL = {"chunk_bytes": "8KiB", "shard_bytes": "16KiB"}
# Before, between and after the known classes in their order, and written like one of them: a search in sorted classes
# finds a place for each.
STRANGE = ["ant", "cow", "eel", "Cat", "cat "]


def labels_with(strange, rows=(ROWS - 7,)):
    """The labels of all rows; those of `rows`, by default of one in the last chunk, are new."""
    labels = OLD.astype("U8")
    labels[list(rows)] = strange
    return labels


def table_of(labels):
    return pa.table({**{f"x{i}": X[:, i] for i in range(3)}, "animal": labels})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a data set of two classes, and a model of them."""
    folder = tmp_path_factory.mktemp("trained")
    data = ingest(table_of(OLD), folder / "old.zarr", label="animal", **SMALL)
    model = kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(3)), steps=0, regularization=1e-3)
    model.fit(data.read()[0][:100], OLD[:100]).save(folder / "model.zarr")
    return folder


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def predicted(trained, folder, labels, **options):
    """Predictions of rows with these labels, and the data set of those rows."""
    data = ingest(table_of(labels), folder / "new.zarr", label="animal", strip=False, **SMALL, **options)
    split = "test" if options else None
    kme.predict(trained / "model.zarr", data, folder / "scores.zarr", outputs=["label", "probability"], split=split)
    return kme.open_predictions(folder / "scores.zarr"), data


@pytest.mark.chaos(14)
@pytest.mark.parametrize("strange", STRANGE)
def test_evaluate_names_a_label_that_one_chunk_has(trained, tmp_path, strange):
    found, data = predicted(trained, tmp_path, labels_with(strange))
    assert found.chunks > 2
    with pytest.raises(DataError, match=rf"class '{strange}' is unknown to the model \(1 row\).*cat, dog"):
        evaluate(found, data)


@pytest.mark.chaos(14)
@pytest.mark.parametrize("strange", STRANGE)
def test_rows_in_memory_are_not_measured_or_calibrated_with_it(trained, strange):
    model, labels = kme.load(trained / "model.zarr"), labels_with(strange, rows=(3, 5))[:50]
    said = rf"label '{strange}' is not among the classes cat, dog \(2 rows\)"
    with pytest.raises(DataError, match=said):
        measure(labels, model.predict_proba(X[:50]), model.classes_)
    with pytest.raises(DataError, match=said):
        model.calibrate(X[:50], labels)
    with pytest.raises(DataError, match=said):
        kme.ReliabilityDisplay.from_estimator(model, X[:50], labels)
    assert model.score(X[:50], labels) == np.mean(model.predict(X[:50]) == labels), "counted as a wrong answer"


@pytest.mark.chaos(14)
def test_the_command_ends_with_2_and_writes_no_metrics(trained, tmp_path, capsys):
    predicted(trained, tmp_path, labels_with("cow"))
    folder = tmp_path / "evaluation"
    command = ["evaluate", "--predictions", "scores.zarr", "--data", "new.zarr", "--out", "evaluation"]
    code = cli.execute([str(tmp_path / word) if "." in word or word == "evaluation" else word for word in command])
    assert code == 2
    assert "class 'cow' is unknown to the model" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.chaos(14)
def test_predictions_of_such_rows_are_those_of_the_same_rows_without_labels(trained, tmp_path):
    found, _ = predicted(trained, tmp_path, labels_with("cow", rows=range(0, ROWS, 9)))
    plain = ingest(X, tmp_path / "plain.zarr", **SMALL)
    kme.predict(trained / "model.zarr", plain, tmp_path / "plain-scores.zarr", outputs=["label", "probability"])
    expected = kme.open_predictions(tmp_path / "plain-scores.zarr")
    for name in ("label", "probability"):
        np.testing.assert_array_equal(found.read(name), expected.read(name))
    assert set(found.labels()) == {"cat", "dog"}


@pytest.mark.chaos(14)
def test_a_class_that_only_other_rows_have_does_no_harm(trained, tmp_path):
    halves = f"train=0:{ROWS // 2},test={ROWS // 2}:{ROWS}"
    found, data = predicted(trained, tmp_path, labels_with("cow", rows=[8]), split=halves)
    metrics = evaluate(found, data, split="test")
    assert metrics["rows"] == ROWS // 2
    assert metrics["accuracy"] == np.mean(found.labels() == OLD[ROWS // 2 :])


@pytest.mark.chaos(14)
@pytest.mark.parametrize("form", ["csv", "parquet", "memory"])
def test_ingest_in_the_encoding_of_the_training_rows_names_label_and_row(trained, tmp_path, capsys, form):
    table = table_of(labels_with("cow"))
    source = tmp_path / f"new.{form}"
    said = rf"{'row' if form != 'csv' else ''}.*{ROWS - 7}.*animal.*class 'cow' is unknown; known: \['cat', 'dog'\]"
    if form == "csv":
        pyarrow.csv.write_csv(table, source)
    elif form == "parquet":
        pq.write_table(table, source)
    given = table if form == "memory" else source
    for unseen in ("error", "zeros"):  # which is about categories of features
        with pytest.raises(DataError, match=said):
            ingest(given, tmp_path / "new.zarr", like=trained / "old.zarr", unseen=unseen, **SMALL)
    if form != "memory":
        command = ["ingest", str(source), str(tmp_path / "new.zarr"), "--like", str(trained / "old.zarr")]
        assert cli.execute(command) == 2
        assert "class 'cow' is unknown" in capsys.readouterr().err
    assert not (tmp_path / "new.zarr").exists()


@pytest.mark.chaos(14)
def test_append_names_it_and_leaves_the_data_set_as_it_was(tmp_path):
    data = ingest(table_of(OLD), tmp_path / "rows.zarr", label="animal", **SMALL)
    with pytest.raises(DataError, match="class 'cow' is unknown"):
        data.append(table_of(labels_with("cow")))
    again = kme.open_dataset(tmp_path / "rows.zarr", verify=True)
    assert (again.rows, list(again.classes)) == (ROWS, ["cat", "dog"])
    np.testing.assert_array_equal(again.read()[1], data.read()[1])


@pytest.mark.chaos(14)
def test_workers_of_a_cluster_name_it_too(trained, tmp_path, client):
    pq.write_table(table_of(labels_with("cow")), tmp_path / "new.parquet", row_group_size=1000)
    with pytest.raises(DataError, match="class 'cow' is unknown; known"):
        ingest(tmp_path / "new.parquet", tmp_path / "like.zarr", like=trained / "old.zarr", client=client, **SMALL)
    assert not (tmp_path / "like.zarr").exists()
    data = ingest(tmp_path / "new.parquet", tmp_path / "new.zarr", label="animal", client=client, **SMALL)
    kme.predict(trained / "model.zarr", data, tmp_path / "scores.zarr", executor=client)
    for executor in (SerialExecutor(), DaskExecutor(client)):
        with pytest.raises(DataError, match="class 'cow' is unknown to the model"):
            evaluate(tmp_path / "scores.zarr", data, executor=executor)
