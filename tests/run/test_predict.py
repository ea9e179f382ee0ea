"""Batch inference: every input and output, exactly once, and nothing that changed goes unnoticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import kme_dist as kme
from kme_dist.core import embedding as mce
from kme_dist.core.kernels import Gaussian
from kme_dist.data import lazy
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.new_rows import ModelColumns
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, CorruptError, DataError, NumericalError, RetryError
from kme_dist.models import predict as inference
from kme_dist.models.outputs import OUTPUTS
from kme_dist.run.executors import SerialExecutor

N, D, M = 5_000, 3, 3
CHUNK = 1024


def rows(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    X = rows(120, seed=5)
    y = np.array(["ash", "birch", "cedar"])[(X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)]
    fitted = kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(D)), steps=0, regularization=1e-3).fit(X, y)
    fitted.path = str(tmp_path_factory.mktemp("model") / "model.zarr")
    fitted.save(fitted.path)
    return fitted


@pytest.fixture
def data(tmp_path):
    return ingest(rows(N), tmp_path / "rows.zarr", chunk_bytes=CHUNK * D * 4)


@pytest.fixture
def counted(monkeypatch):
    """The chunks that were computed, in order."""
    chunks = []
    real = inference.predict_chunk

    def compute(plan, task, *rest):
        chunks.append(task.chunk)
        return real(plan, task, *rest)

    monkeypatch.setattr(inference, "predict_chunk", compute)
    return chunks


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch):
    """Without a cluster: what is tested here is which chunks are computed, and in which order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


# --- what is computed ------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["zarr", "parquet"])
def test_every_output_is_what_the_estimator_says(model, data, tmp_path, format):
    g = {"ash": 1.0, "birch": 10.0, "cedar": -2.0}
    out = tmp_path / "scores"
    outcome = kme.predict(model.path, data, out, outputs=OUTPUTS, expectations={"cost": g}, top_k=2, format=format)
    assert (outcome.rows, outcome.chunks, outcome.computed, outcome.quarantined) == (N, 5, 5, [])
    found, X = kme.open_predictions(out), rows(N)
    assert found.status == "complete"
    assert (found.labels() == model.predict(X)).mean() > 0.999
    p = model.predict_proba(X)
    close(found.read("probability"), p)
    close(found.read("decision"), model.decision_probabilities(X))
    close(found.read("entropy"), model.entropy(X))
    close(found.read("rkhs_entropy"), model.entropy(X, kind="rkhs"))
    spread = max(g.values()) - min(g.values())  # a probability that is off by ε moves an expectation by ε times this
    close(found.read("expectation/cost") / spread, model.expectation(X, g) / spread)
    close(found.read("top_probability"), np.sort(p, axis=1)[:, ::-1][:, :2])
    assert (found.read("top_label")[:, 0] == p.argmax(axis=1)).mean() > 0.999
    close(found.read("probability", 1000, 2100), p[1000:2100])
    found.verify()


def test_threads_of_this_process_give_the_same_bits(model, data, tmp_path):
    found = []
    for threads in (1, 3):
        kme.predict(model.path, data, tmp_path / str(threads), executor=SerialExecutor(threads))
        found.append(kme.open_predictions(tmp_path / str(threads)).read("probability"))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("calibration", ["none", "temperature", "isotonic", "softmax"])
def test_batch_and_estimator_follow_one_rule(model, tmp_path, calibration):
    """In double precision nothing is left to rounding: stored labels, probabilities and expectations are those of the
    estimator, the label is the argmax of the stored probability, and expectations stay within the values of g."""
    one = kme.load(model.path)
    X = rows(600, seed=6)
    y = np.array(["ash", "birch", "cedar"])[(X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)]
    one.calibrate(X, y, method=calibration)
    Xq = np.concatenate([rows(N), np.full((3, D), 1e4)])  # the last ones far from every centre
    g = [0.0, 1.0, 0.3]
    options = {"dtype": "float64", "outputs": ("label", "probability"), "expectations": {"g": g}, "top_k": 2}
    kme.predict(one, Xq, tmp_path / "out", **options)
    found = kme.open_predictions(tmp_path / "out")
    np.testing.assert_array_equal(found.labels(), one.predict(Xq))
    p = found.read("probability")
    np.testing.assert_array_equal(p.argmax(axis=1), found.read("label"))
    np.testing.assert_array_equal(found.read("top_label")[:, 0], found.read("label"))
    np.testing.assert_array_equal(found.read("top_probability")[:, 0], p.max(axis=1))
    np.testing.assert_allclose(p, one.predict_proba(Xq), rtol=1e-6)
    np.testing.assert_array_equal(one.classes_[one.predict_proba(Xq).argmax(axis=1)], one.predict(Xq))
    expected = found.read("expectation/g")
    np.testing.assert_allclose(expected, one.expectation(Xq, g), rtol=1e-6, atol=1e-7)
    assert expected.min() >= 0
    assert expected.max() <= 1
    assert one.decision_probabilities(Xq)[:, 1].min() < 0, "raw ones would have left them"
    with pytest.raises(ConfigError, match="expected_under"):
        kme.predict(one, Xq, tmp_path / "out", raw_expectations=True, **options)
    kme.predict(one, Xq, tmp_path / "raw", raw_expectations=True, **options)
    raw = kme.open_predictions(tmp_path / "raw").read("expectation/g")
    np.testing.assert_allclose(raw, one.expectation(Xq, g, raw=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", ["zarr", "parquet"])
def test_rows_model_and_output_may_lie_in_an_object_store(model, data, bucket, tmp_path, counted, monkeypatch, format):
    model.save(f"{bucket}/model.zarr")
    far = ingest(rows(N), f"{bucket}/rows.zarr", chunk_bytes=CHUNK * D * 4)
    real, calls = Place._put, []

    def put(place, name, *rest):
        if len(calls) == 10:
            raise KeyboardInterrupt  # as a driver that dies in the middle
        calls.append(name)
        return real(place, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Place, "_put", put)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(f"{bucket}/model.zarr", far, f"{bucket}/scores", format=format)
    begun = len(counted)
    assert 0 < begun <= 5
    outcome = kme.predict(f"{bucket}/model.zarr", far, f"{bucket}/scores", format=format)
    assert outcome.computed < 5, "what was finished is not done again"
    kme.predict(model.path, data, tmp_path / "near", format=format)
    near, there = kme.open_predictions(tmp_path / "near"), kme.open_predictions(f"{bucket}/scores")
    there.verify()
    np.testing.assert_array_equal(there.read("probability"), near.read("probability"))
    assert kme.predict(f"{bucket}/model.zarr", far, f"{bucket}/scores", format=format).computed == 0


def test_any_zarr_library_reads_the_arrays(model, data, tmp_path):
    kme.predict(model.path, data, tmp_path / "out.zarr", expectations={"a": [0, 1, 2]})
    group = zarr.open_group(str(tmp_path / "out.zarr"), mode="r")
    assert group["label"].shape == (N,)
    assert group["probability"].chunks == (CHUNK, M)
    close(group["expectation/a"][:], model.expectation(rows(N), [0, 1, 2]))
    assert group.attrs["classes"] == ["ash", "birch", "cedar"]


def test_parquet_output_reads_as_one_table(model, data, tmp_path):
    kme.predict(model.path, data, tmp_path / "out", format="parquet")
    table = pq.read_table(tmp_path / "out")
    assert table.num_rows == N
    assert table.column_names == ["label", "probability_ash", "probability_birch", "probability_cedar"]
    assert (np.array(table["label"].to_pylist()) == model.predict(rows(N))).mean() > 0.999


def test_inputs_of_all_kinds_give_the_same_answers(model, data, tmp_path):
    import dask.array as da

    X, names = rows(N), list(data.feature_names)
    folder = tmp_path / "parquet"
    folder.mkdir()
    for i, piece in enumerate(np.array_split(X, [700, 3000])):
        table = pa.table({"id": np.arange(len(piece)) + 100 * i, **{n: piece[:, j] for j, n in enumerate(names)}})
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=256)
    inputs = {
        "dataset": (data, {}),
        "path": (data.path, {}),
        "numpy": (X, {}),
        "dask": (da.from_array(X, chunks=(900, 2)), {}),
        "parquet": (str(folder), {"id_column": "id"}),
        "parquet-like": (str(folder), {"like": data}),
    }
    wanted = model.predict_proba(X)
    for kind, (source, options) in inputs.items():
        out = tmp_path / f"{kind}.zarr"
        assert kme.predict(model.path, source, out, **options).rows == N, kind
        close(kme.open_predictions(out).read("probability"), wanted)
    ids = kme.open_predictions(tmp_path / "parquet.zarr").read("id")
    assert ids[:3].tolist() == [0, 1, 2]
    assert ids[700] == 100


def test_text_ids_travel_through_parquet_only(model, tmp_path):
    X = rows(50)
    table = pa.table({"who": [f"row {i}" for i in range(50)], **{f"x{j}": X[:, j] for j in range(D)}})
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=r"who.*parquet"):
        kme.predict(model.path, tmp_path / "in.parquet", tmp_path / "out.zarr", id_column="who")
    kme.predict(model.path, tmp_path / "in.parquet", tmp_path / "out", id_column="who", format="parquet")
    assert pq.read_table(tmp_path / "out")["id"].to_pylist()[:2] == ["row 0", "row 1"]


def test_a_split_is_predicted_in_its_own_order_with_row_numbers(model, tmp_path):
    data = ingest(rows(N), tmp_path / "split.zarr", split="a=0.3,b=0.7", chunk_bytes=CHUNK * D * 4)
    kme.predict(model.path, data, tmp_path / "out.zarr", split="b")
    found = kme.open_predictions(tmp_path / "out.zarr")
    assert found.rows == data.split_rows("b")
    X, _ = data.read("b")
    close(found.read("probability"), model.predict_proba(X))
    np.testing.assert_allclose(rows(N)[found.read("row")], X)


@pytest.mark.chaos(21)
def test_no_rows_are_no_problem(model, tmp_path):
    outcome = kme.predict(model.path, rows(0), tmp_path / "out.zarr")
    assert (outcome.rows, outcome.chunks) == (0, 0)
    assert kme.open_predictions(tmp_path / "out.zarr").labels().shape == (0,)


def test_a_model_in_memory_is_saved_beside_the_output(model, tmp_path):
    kme.predict(model, rows(10), tmp_path / "out.zarr")
    assert kme.load(tmp_path / "out.zarr.model").classes_.tolist() == ["ash", "birch", "cedar"]


def test_a_run_folder_is_taken_for_its_model(model, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    with pytest.raises(DataError, match=r"run has no model\.zarr yet; finish the run"):
        kme.predict(folder, rows(10), tmp_path / "out.zarr")
    model.save(folder / "model.zarr")
    assert kme.load(folder).classes_.tolist() == ["ash", "birch", "cedar"]
    kme.predict(folder, rows(10), tmp_path / "out.zarr")
    assert kme.predict(folder / "model.zarr", rows(10), tmp_path / "out.zarr").computed == 0, "the same job"


def test_calibrated_models_give_calibrated_probabilities(model, tmp_path):
    X = rows(120, seed=5)
    other = kme.load(model.path).calibrate(X, model.predict(X))
    kme.predict(other, rows(100), tmp_path / "out.zarr")
    found = kme.open_predictions(tmp_path / "out.zarr").read("probability")
    close(found, other.predict_proba(rows(100)))
    assert np.abs(found - model.predict_proba(rows(100))).max() > 0.01


def test_double_precision_where_single_loses_the_sum(rng):
    C = rng.normal(size=(40, 2)).astype(np.float32)
    V = rng.normal(size=(40, M)).astype(np.float32)
    assert mce.sufficient_precision(mce.Embedding(Gaussian(), C, V, 0.1)) == "float32"
    assert mce.sufficient_precision(mce.Embedding(Gaussian(), C, 1e5 * V, 0.1)) == "float64"


# --- what is refused -------------------------------------------------------------------------------


def test_mistakes_are_said_before_anything_is_written(model, data, tmp_path):
    cases = [
        ({"outputs": ["labels"]}, ConfigError, "labels"),
        ({"outputs": []}, ConfigError, "outputs: empty"),
        ({"format": "xml"}, ConfigError, "xml"),
        ({"split": "test"}, ConfigError, "no split 'test'"),
        ({"top_k": -1}, ConfigError, "top_k"),
        ({"expectations": {"../x": [1, 2, 3]}}, ConfigError, "letters"),
        ({"expectations": {"x": [1, 2]}}, ConfigError, "3 classes"),
        ({"dtype": "float16"}, ConfigError, "float16"),
        ({"executor": 3}, ConfigError, "Client"),
    ]
    for options, kind, words in cases:
        with pytest.raises(kind, match=words):
            kme.predict(model.path, data, tmp_path / "out.zarr", **options)
    with pytest.raises(DataError, match="2 features, the model was fitted with 3"):
        kme.predict(model.path, rows(5)[:, :2], tmp_path / "out.zarr")
    with pytest.raises(DataError, match="no model found"):
        kme.predict(tmp_path / "nothing.zarr", data, tmp_path / "out.zarr")
    with pytest.raises(DataError, match="the path does not exist"):
        kme.predict(model.path, tmp_path / "nothing.zarr", tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for options in ({}, {"overwrite": True}, {"from_scratch": True}):
        with pytest.raises(ConfigError, match="is not overwritten"):
            kme.predict(model.path, data, tmp_path / "mine", **options)
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.chaos(13)
def test_a_missing_parquet_column_is_refused_before_computing(model, tmp_path):
    names = ["height", "width", "depth"]
    data = ingest(pa.table({name: rows(50)[:, j] for j, name in enumerate(names)}), tmp_path / "rows.zarr")
    pq.write_table(pa.table({name: rows(50)[:, j] for j, name in enumerate(names[:2])}), tmp_path / "new.parquet")
    with pytest.raises(DataError, match=r"new\.parquet: the column 'depth' is missing; found 'height', 'width'"):
        kme.predict(model.path, tmp_path / "new.parquet", tmp_path / "out.zarr", like=data)
    assert not (tmp_path / "out.zarr").exists()


def test_a_model_without_batch_inference_is_told_its_own_method(tmp_path):
    X = rows(20)
    y = (X[:, 0] > 0).astype(int)
    fitted = [
        (kme.ConditionalMeanEmbedding().fit(X, y.astype(float)), "predict"),
        (kme.ParzenClassifier().fit(X, y), "predict"),
        (kme.KernelMean().fit(X), "evaluate"),
    ]
    for model, own in fitted:
        kind = type(model).__name__
        own_words = rf"use its own {own}: model\.{own}\(X\)"
        words = rf"takes MCEClassifier, CENClassifier, ASKLClassifier, CMERegressor, not {kind}; {own_words}"
        model.save(tmp_path / f"{kind}.zarr")
        for given in (model, tmp_path / f"{kind}.zarr"):
            with pytest.raises(ConfigError, match=words):
                kme.predict(given, X, tmp_path / "out.zarr")
    with pytest.raises(ConfigError, match="this MCEClassifier is not fitted; call fit first"):
        kme.predict(kme.MCEClassifier(), X, tmp_path / "out.zarr")
    with pytest.raises(ConfigError, match="got int"):
        kme.predict(3, X, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr.model").exists()


@pytest.mark.chaos(13)
def test_columns_in_another_order_are_found_or_told_the_way_out(tmp_path):
    import pandas as pd

    frame = pd.DataFrame(rows(60), columns=["height", "width", "depth"])
    data = ingest(frame, tmp_path / "fit.zarr")
    model = kme.MCEClassifier(steps=0).fit(frame, (frame["height"] > 0).to_numpy())
    other, out = frame[["width", "height", "depth"]], tmp_path / "out.zarr"
    kme.predict(model, other, out)  # columns of tables are found by name
    np.testing.assert_array_equal(kme.open_predictions(out).labels(), model.predict(frame))
    with pytest.raises(DataError, match=r"'height' there; ingest its source again with `like`"):
        kme.predict(model, ingest(other, tmp_path / "other.zarr"), out)
    again = ingest(other, tmp_path / "again.zarr", like=data)
    kme.predict(model, again, tmp_path / "again-out.zarr")
    with pytest.raises(DataError, match="the rows in memory: 1 feature, the model was fitted with 3"):
        kme.predict(model, rows(5)[:, :1], out)


@pytest.mark.chaos(15)
def test_two_writers_do_not_meet(model, data, tmp_path):
    from kme_dist.data.leases import writer_lease

    with writer_lease(Place.of(tmp_path / "out.zarr")), pytest.raises(RetryError, match="another writer"):
        kme.predict(model.path, data, tmp_path / "out.zarr")


# --- exactly once ----------------------------------------------------------------------------------


def test_a_second_run_does_nothing_and_from_scratch_does_everything(model, data, tmp_path, counted):
    out = tmp_path / "out.zarr"
    kme.predict(model.path, data, out)
    assert counted == [0, 1, 2, 3, 4]
    again = kme.predict(model.path, data, out)
    assert (again.computed, again.skipped, len(counted)) == (0, 5, 5)
    assert kme.predict(model.path, data, out, overwrite=True).computed == 0, "it is the same job"
    assert kme.predict(model.path, data, out, from_scratch=True).computed == 5


def interrupt_after(monkeypatch, count):
    real, done = inference.predict_chunk, []

    def compute(plan, task, *rest):
        if len(done) == count:
            raise KeyboardInterrupt
        done.append(task.chunk)
        return real(plan, task, *rest)

    monkeypatch.setattr(inference, "predict_chunk", compute)


def test_what_an_interrupted_job_did_is_not_done_again(model, data, tmp_path, monkeypatch, counted):
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(model.path, data, out)
    assert kme.open_predictions(out).status == "running"
    counted.clear()
    assert kme.predict(model.path, data, out).skipped == 3
    assert counted == [3, 4]
    close(kme.open_predictions(out).read("probability"), model.predict_proba(rows(N)))


def test_a_changed_model_or_request_is_refused_until_told_otherwise(model, data, tmp_path, monkeypatch):
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(model.path, data, out)
    other = kme.load(model.path).calibrate(rows(120, seed=5), model.predict(rows(120, seed=5)))
    with pytest.raises(ConfigError, match=r"unfinished job with other settings \(model changed"):
        kme.predict(other, data, out)
    with pytest.raises(ConfigError, match="outputs changed"):
        kme.predict(model.path, data, out, outputs=["label"])
    kme.predict(other, data, out, overwrite=True)
    with pytest.raises(ConfigError, match=r"finished predictions .*--overwrite"):
        kme.predict(model.path, data, out)
    assert kme.predict(model.path, data, out, from_scratch=True).computed == 5
    close(kme.open_predictions(out).read("probability"), model.predict_proba(rows(N)))


def test_a_model_that_changes_while_workers_load_it_is_refused(model, data, tmp_path):
    place = tmp_path / "model.zarr"
    model.save(place)
    digest = inference.model_digest(Place.of(place))
    kme.load(place).calibrate(rows(120, seed=5), model.predict(rows(120, seed=5))).save(place)
    with pytest.raises(ConfigError, match="has changed since this job started"):
        inference._scorer(str(place), digest, "float32")


@pytest.mark.parametrize("kind", ["dataset", "numpy", "parquet"])
def test_changed_rows_are_refused_and_appended_ones_are_done(model, tmp_path, counted, kind):
    X, out = rows(N), tmp_path / "out.zarr"

    def source(X, grow=None):
        if kind == "numpy":
            return X
        if kind == "dataset":
            path = tmp_path / "rows.zarr"
            if grow is not None:
                return kme.open_dataset(path).append(X[grow:])
            return ingest(X, path, chunk_bytes=CHUNK * D * 4, overwrite=path.exists())
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        pieces = [X] if grow is None else [X[:grow], X[grow:]]
        for i, piece in enumerate(pieces[grow is not None :], start=grow is not None):
            pq.write_table(pa.table({f"x{j}": piece[:, j] for j in range(D)}), folder / f"{i}.parquet")
        return str(folder)

    monkey = pytest.MonkeyPatch()
    monkey.setattr(lazy, "OUTPUT_ROWS", CHUNK)
    monkey.setattr(ArrayRows, "output_rows", CHUNK)
    try:
        kme.predict(model.path, source(X), out)
        counted.clear()
        longer = np.concatenate([X, rows(2_000, seed=3)])
        grown = kme.predict(model.path, source(longer, grow=N), out)
        assert counted == [4, 5, 6], "the last chunk was not full"
        assert (grown.rows, grown.skipped) == (7_000, 4)
        close(kme.open_predictions(out).read("probability"), model.predict_proba(longer))
        kme.open_predictions(out).verify()
        changed = longer.copy()
        changed[17, 1] += 1
        if kind == "parquet":
            for file in (tmp_path / "folder").iterdir():
                file.unlink()
        with pytest.raises(ConfigError, match=r"has changed \(chunk 0"):
            kme.predict(model.path, source(changed), out)
        with pytest.raises(ConfigError, match=r"fewer rows|has changed"):
            kme.predict(model.path, source(X[:2000]), out)
        kme.predict(model.path, source(changed), out, overwrite=True)
        close(kme.open_predictions(out).read("probability"), model.predict_proba(changed))
    finally:
        monkey.undo()


def test_a_receipt_without_its_chunk_does_not_count(model, data, tmp_path, counted):
    out = tmp_path / "out.zarr"
    kme.predict(model.path, data, out)
    (out / "label" / "c" / "2").unlink()
    (out / "probability" / "c" / "4" / "0").write_bytes(b"half")
    counted.clear()
    kme.predict(model.path, data, out)
    assert counted == [2, 4]
    kme.open_predictions(out).verify()


def test_damage_is_found_by_verify(model, data, tmp_path):
    out = tmp_path / "out.zarr"
    kme.predict(model.path, data, out)
    object_ = out / "probability" / "c" / "1" / "0"
    content = bytearray(object_.read_bytes())
    content[100] ^= 1
    object_.write_bytes(bytes(content))
    with pytest.raises(CorruptError, match="chunk 1"):
        kme.open_predictions(out).verify()


# --- poison ----------------------------------------------------------------------------------------


def test_a_corrupt_chunk_is_tried_again_once_it_is_mended(model, data, tmp_path, counted):
    from kme_dist.data.chunks import StoredArray

    key = StoredArray(data.place, "X").key(0)
    path = data.place.path / key
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[CHUNK * D * 4 + 50] ^= 1  # inside the second chunk of the shard
    path.write_bytes(bytes(broken))
    outcome = kme.predict(model.path, data, tmp_path / "out.zarr")
    assert [entry["chunk"] for entry in outcome.quarantined] == [1]
    assert "CorruptError" in outcome.quarantined[0]["error"]
    path.write_bytes(whole)
    counted.clear()
    mended = kme.predict(model.path, data, tmp_path / "out.zarr")
    assert (counted, mended.quarantined) == ([1], [])
    assert kme.open_predictions(tmp_path / "out.zarr").status == "complete"


@pytest.mark.parametrize("error", [RetryError("no space left"), ConfigError("a changed model"), ValueError("a bug")])
def test_only_damaged_data_quarantine_a_chunk_and_every_other_failure_stops_the_job(
    model, data, tmp_path, monkeypatch, error
):
    real, out = inference.predict_chunk, tmp_path / "out.zarr"

    def compute(plan, task, *rest):
        if task.chunk == 2:
            raise error
        return real(plan, task, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(inference, "predict_chunk", compute)
        with pytest.raises(type(error), match=str(error)):
            kme.predict(model.path, data, out)
    assert kme.open_predictions(out).status == "running"
    assert kme.predict(model.path, data, out).computed == 3


@pytest.mark.parametrize("error", [CorruptError("damaged"), DataError("not a number"), NumericalError("singular")])
def test_a_chunk_that_cannot_be_read_is_tried_three_times_then_quarantined(
    model, data, tmp_path, monkeypatch, counted, error
):
    real = inference.predict_chunk

    def compute(plan, task, *rest):
        result = real(plan, task, *rest)
        if task.chunk == 2:
            raise error
        return result

    monkeypatch.setattr(inference, "predict_chunk", compute)
    outcome = kme.predict(model.path, data, tmp_path / "out.zarr")
    assert sorted(counted) == [0, 1, 2, 2, 2, 3, 4]
    (entry,) = outcome.quarantined
    assert (entry["chunk"], entry["first_row"], entry["rows"]) == (2, 2048, CHUNK)
    assert entry["error"] == f"{type(error).__name__}: {error}"
    found = kme.open_predictions(tmp_path / "out.zarr")
    assert (found.status, found.quarantined) == ("incomplete", outcome.quarantined)
    assert np.isnan(found.read("probability", 2048, 3072)).all()
    assert found.labels()[2100] is None
    clean = np.r_[0:2048, 3072:N]
    close(found.read("probability")[clean], model.predict_proba(rows(N)[clean]))
    found.verify()


def test_a_result_that_gets_lost_is_not_a_finished_chunk(model, data, tmp_path):
    class Forgetful(SerialExecutor):
        def stream(self, function, calls, *, name, ahead=None):
            results = super().stream(function, calls, name=name, ahead=ahead)
            yield from (result for result in results if result[0] != 3)

    with pytest.raises(RetryError, match=r"1 chunk without a result \(the first is 3\); run the same command again"):
        kme.predict(model.path, data, tmp_path / "out.zarr", executor=Forgetful())
    assert kme.open_predictions(tmp_path / "out.zarr").status == "running"
    assert kme.predict(model.path, data, tmp_path / "out.zarr").skipped == 5, "it was stored, only not told"


# --- kills -----------------------------------------------------------------------------------------

DRIVER = """
import os, signal, sys
import kme_dist as kme
from kme_dist.run import predict as predicting

model, data, out, point, count = sys.argv[1:]
left = [int(count)]

def die_at(module, name, after):
    real = getattr(module, name)
    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, wrapped)

where, _, when = point.partition(":")
if where == "chunk":
    die_at(stored.OutputLayout, "write", when == "after")
elif where == "receipt":
    die_at(predicting, "write_receipt", when == "after")
elif where == "manifest":
    die_at(predicting, "gather_receipts", when == "after")
kme.predict(model, data, out)
"""


@pytest.mark.parametrize(
    "point",
    [
        "receipt:before",
        "manifest:before",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("chunk:before", "chunk:after")),
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("receipt:after", "manifest:after")),
    ],
)
def test_a_driver_killed_anywhere_leaves_what_a_second_run_completes(model, data, tmp_path, counted, point):
    count = "1" if point.startswith("manifest") else "3"
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    out = tmp_path / "out.zarr"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(script), model.path, data.path, str(out), point, count]
    assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == -signal.SIGKILL
    expected = {"chunk": [2, 3, 4], "receipt": [2, 3, 4], "manifest": []}[point.split(":")[0]]
    if point == "receipt:after":
        expected = [3, 4]
    kme.predict(model.path, data, out)
    assert counted == expected
    whole = tmp_path / "whole.zarr"
    kme.predict(model.path, data, whole)
    first, second = kme.open_predictions(out), kme.open_predictions(whole)
    for name in second.names:
        assert (first.read(name) == second.read(name)).all()
    first.verify()
    assert not list(out.glob("_receipts/*.json"))
    assert len(json.loads((out / "_manifest.json").read_text())["chunks"]) == 5


def test_gpu_workers_compute_on_the_device(model, tmp_path, device, monkeypatch):
    monkeypatch.setattr(inference.mce, "DEVICE_TILE", (64, 32))  # several blocks of a chunk, moved one ahead
    inference._scorer.cache_clear()
    try:
        kme.predict(model.path, rows(700), tmp_path / "out.zarr", outputs=OUTPUTS)
        scorer = inference._scorer(model.path, inference.model_digest(Place.of(model.path)), "float32")
        assert scorer._device == "cupy"
    finally:
        inference._scorer.cache_clear()
    found = kme.open_predictions(tmp_path / "out.zarr").read("probability")
    close(found, model.probabilities(model.embedding_.decision(model.scaling_.apply(rows(700), "float64"))))


# --- clusters --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


def test_workers_give_the_same_bits_as_this_process(model, data, tmp_path, client):
    import dask.array as da

    kme.predict(model.path, data, tmp_path / "here.zarr")
    here = kme.open_predictions(tmp_path / "here.zarr")
    lazy = da.from_array(rows(N), chunks=(CHUNK, D))
    for name, source in {"dataset": data, "numpy": rows(N), "lazy": lazy}.items():
        out = tmp_path / f"{name}.zarr"
        outcome = kme.predict(model.path, source, out, executor=client)
        assert (outcome.rows, outcome.quarantined) == (N, []), name
        there = kme.open_predictions(out)
        if name != "numpy":  # the same chunks
            np.testing.assert_array_equal(there.read("probability"), here.read("probability"))
        close(there.read("probability"), here.read("probability"))
    with pytest.raises(DataError, match="persisted"):
        kme.predict(model.path, client.persist(lazy), tmp_path / "held.zarr", executor=client)


def test_a_row_that_is_not_finite_does_not_stop_the_workers(model, tmp_path, client):
    import dask.array as da

    X = rows(N)
    X[1500] = np.nan
    outcome = kme.predict(model.path, da.from_array(X, chunks=(CHUNK, D)), tmp_path / "out.zarr", executor=client)
    assert (outcome.computed, outcome.quarantined, outcome.skipped_rows) == (5, [], 1)
    assert outcome.first_skipped[0]["row"] == 1500


@pytest.mark.parametrize("form", ["parquet", "numpy", "dask"])
def test_new_rows_with_integers_beyond_2_53_are_refused(tmp_path, form):
    X = np.stack([np.arange(20), 2**60 + np.arange(20)], axis=1)
    source = X
    if form == "parquet":
        source = str(tmp_path / "new.parquet")
        pq.write_table(pa.table({"a": X[:, 0], "b": X[:, 1]}), source)
    elif form == "dask":
        source = pytest.importorskip("dask.array").from_array(X, chunks=(5, 2))
    with pytest.raises(DataError, match=r"the integer 11529215046068\d+, and beyond 2\*\*53"):
        lazy.open_rows(source, ModelColumns(2, ("a", "b") if form == "parquet" else None)).read(0, 20)
