"""Stored predictions: nobody but their own job changes them, damage is found, and appended rows cost their own work."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kme_dist as kme
from kme_dist.core.kernels import Gaussian
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.leases import WriterLease
from kme_dist.data.places import Place
from kme_dist.data.predictions import OutputLayout
from kme_dist.data.receipts import read_receipts, write_receipt
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError
from kme_dist.models import predict as inference
from kme_dist.run import predict as predicting
from kme_dist.run.predict import _added

N, D, CHUNK = 1_000, 3, 256
GOLDEN = Path(__file__).parent / "golden" / "predictions-1.zip"


def rows(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)


def fitted(seed):
    X = rows(100, seed)
    y = np.array(["ash", "birch", "cedar"])[(X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)]
    return kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(D)), steps=0, regularization=1e-3).fit(X, y)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models, whose predictions differ."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (5, 6):
        fitted(seed).save(folder / f"{seed}.zarr")
    return str(folder / "5.zarr"), str(folder / "6.zarr")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(ArrayRows, "output_rows", CHUNK)


@pytest.fixture(params=["disk", "store"])
def home(request, tmp_path):
    return str(tmp_path) if request.param == "disk" else request.getfixturevalue("bucket")


@pytest.fixture
def computed(monkeypatch):
    """The rows of every task, in order: of one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spans, real = [], inference.compute_chunk

    def compute(plan, task, part):
        spans.append((task.start, task.stop))
        return real(plan, task, part)

    monkeypatch.setattr(inference, "compute_chunk", compute)
    return spans


def stop_at(monkeypatch, chunk):
    """The driver dies when it has sent this chunk to a worker; returns what the worker was given."""
    given, real = [], inference.predict_chunk

    def compute(*call):
        if call[1].chunk == chunk:
            given.append(call)
            raise KeyboardInterrupt
        return real(*call)

    monkeypatch.setattr(inference, "predict_chunk", compute)
    return given


def same_as_from_nothing(model, X, out):
    """Stored predictions are those of a job that nobody disturbed."""
    found = kme.open_predictions(out)
    found.verify()
    expected = kme.predict(model, X, dtype="float64")
    p = np.stack([expected[f"probability_{name}"].to_numpy() for name in ("ash", "birch", "cedar")], axis=1)
    np.testing.assert_array_equal(found.read("probability"), p.astype(np.float32))
    assert found.labels().tolist() == expected["label"].to_pylist()


# --- writers that wake up too late ------------------------------------------------------------------


@pytest.mark.chaos(24)
@pytest.mark.parametrize("format", ["zarr", "parquet"])
@pytest.mark.parametrize("where", ["before the first object", "before an object is stored"])
def test_a_worker_that_wakes_up_after_its_job_was_replaced_changes_nothing(models, home, format, where, monkeypatch):
    """Its driver is dead, and the worker had already been told that the job is still current."""
    out, X, options = f"{home}/out", rows(N), {"format": format, "outputs": ("label", "probability")}
    with monkeypatch.context() as patch:
        given = stop_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(models[0], X, out, **options)
    asleep, wake, stalled = threading.Event(), threading.Event(), []

    def pausing(real):
        def paused(*arguments, **more):
            if threading.current_thread() is zombie:
                asleep.set()
                assert wake.wait(60)
            return real(*arguments, **more)

        return paused

    def late():
        try:
            inference.compute_chunk(*given[0])
        except RetryError as error:
            stalled.append(str(error))

    zombie = threading.Thread(target=late)
    names = ["_write_object"] if where == "before the first object" else ["compare_and_write", "write"]
    for name in names:
        owner = OutputLayout if name == "_write_object" else Place
        monkeypatch.setattr(owner, name, pausing(getattr(owner, name)))
    zombie.start()
    assert asleep.wait(60)
    kme.predict(models[1], X, out, overwrite=True, **options)
    content = {key: Place.of(out).read(key) for key in Place.of(out).sizes()}
    wake.set()
    zombie.join()
    for key, before in content.items():
        assert Place.of(out).read(key) == before, key
    same_as_from_nothing(models[1], X, out)
    if "://" in out:
        assert "another job has replaced this one" in stalled[0]
    # What it left behind under its own names does not count, and the next job removes it.
    again = kme.predict(models[1], X, out, **options)
    assert (again.computed, again.skipped) == (0, 4)
    assert not [key for key in Place.of(out).sizes() if key.startswith(("_chunks", "_receipts"))]


def test_a_driver_that_lost_its_lease_does_not_commit(models, bucket, monkeypatch):
    """Another process holds the lease by now, and may be computing the same job."""
    out, real = f"{bucket}/out", inference.predict_chunk

    def compute(plan, task, part):
        if task.chunk == 3:
            Place.of(bucket).write("out.lease", json.dumps({"holder": "another"}).encode())
        return real(plan, task, part)

    monkeypatch.setattr(inference, "predict_chunk", compute)
    with pytest.raises(RetryError, match="took over because this process had stalled"):
        kme.predict(models[0], rows(N), out)
    assert kme.open_predictions(out).status == "running"
    assert "_manifest.json" not in Place.of(out).sizes()


@pytest.mark.chaos(24)
@pytest.mark.parametrize("point", ["declare", "_finish", "gather_receipts"])
def test_a_driver_that_stalls_in_an_object_store_while_another_replaces_its_job_changes_nothing(
    models, bucket, monkeypatch, point
):
    out, X = f"{bucket}/out", rows(N)
    monkeypatch.setattr(WriterLease, "_heartbeat", lambda lease: None)  # to others it has stalled
    monkeypatch.setattr(WriterLease, "default_beat_s", 0.02)
    owner = OutputLayout if point == "declare" else predicting
    real, calls = getattr(owner, point), []

    def stalled(*arguments, **more):
        calls.append(point)
        if len(calls) == 1:
            kme.predict(models[1], X, out, overwrite=True)
        return real(*arguments, **more)

    monkeypatch.setattr(owner, point, stalled)
    with pytest.raises(RetryError):
        kme.predict(models[0], X, out)
    same_as_from_nothing(models[1], X, out)


@pytest.mark.parametrize(("format", "record"), [("zarr", "zarr.json"), ("parquet", "_predictions.json")])
def test_a_damaged_name_in_the_record_is_damage(models, tmp_path, format, record):
    out, X = tmp_path / f"out.{format}", rows(20)
    kme.predict(models[0], X, out, format=format)
    path = out / record
    text = path.read_text()
    for old, new in (('"kme-dist/predictions"', '"kme-dist/predicuions"'), ('"format"', '"fosmat"')):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(CorruptError, match="digest"):
            kme.open_predictions(out)
    path.write_text(text)
    if format == "zarr":
        array = out / "label" / "zarr.json"
        for old, new in (('"crc32c"', '"crc31c"'), ('"default"', '"dffault"'), ('"array"', '"brray"')):
            whole = array.read_text()
            assert old in whole
            array.write_text(whole.replace(old, new, 1))
            with pytest.raises(CorruptError):
                kme.open_predictions(out).verify()
            array.write_text(whole)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / record).write_text('{"format": "somebody else"}')
    with pytest.raises((ConfigError, DataError)):
        kme.open_predictions(tmp_path / "other")


def test_receipts_of_other_jobs_and_epochs_do_not_count(models, tmp_path, computed, monkeypatch):
    out, X = tmp_path / "out.zarr", rows(N)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(models[0], X, out)
    place = Place.of(out)
    state = kme.open_predictions(out)
    receipts = read_receipts(place, state.job, state.epoch)
    assert sorted(receipts) == [0, 1, 2]
    write_receipt(place, dataclasses.replace(receipts[0], job="another"))
    write_receipt(place, dataclasses.replace(receipts[1], epoch="ffffffffffff", digests=receipts[0].digests))
    damaged = out / "_receipts" / state.epoch / "00000002.json"
    damaged.write_text(damaged.read_text().replace(receipts[2].digests["label"], "0" * 32))
    computed.clear()
    kme.predict(models[0], X, out)
    assert computed == [(0, 256), (512, 768), (768, 1000)]
    same_as_from_nothing(models[0], X, out)


def test_a_worker_does_not_take_the_receipt_of_another_job_for_its_own(models, tmp_path, monkeypatch):
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        given = stop_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(models[0], rows(N), out)
    task = given[0][1]
    own = dataclasses.replace(task, chunk=0, start=0, stop=CHUNK)
    own = dataclasses.replace(own, input=read_receipts(Place.of(out), task.job, task.layout.epoch)[0].spans[0].input)
    assert predicting.recorded_chunk(own) is not None
    other_epoch = dataclasses.replace(own.layout, epoch="0123456789ab")
    for other in ({"job": "another"}, {"input": "changed"}, {"stop": CHUNK - 1}, {"layout": other_epoch}):
        assert predicting.recorded_chunk(dataclasses.replace(own, **other)) is None, other


# --- kills ------------------------------------------------------------------------------------------


def test_a_chunk_whose_driver_died_before_it_could_publish_it_is_done(models, tmp_path, computed, monkeypatch):
    out, X, real = tmp_path / "out.zarr", rows(N), OutputLayout.publish

    def publish(layout, chunk, attempt):
        if chunk == 2:
            raise KeyboardInterrupt
        real(layout, chunk, attempt)

    with monkeypatch.context() as patch:
        patch.setattr(OutputLayout, "publish", publish)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(models[0], X, out)
    computed.clear()
    assert kme.predict(models[0], X, out).skipped == 3
    assert computed == [(768, 1000)]
    same_as_from_nothing(models[0], X, out)


@pytest.mark.parametrize("point", ["delete_others", "declare"])
def test_a_job_killed_while_it_replaces_another_resumes(models, tmp_path, monkeypatch, point):
    out, X = tmp_path / "out.zarr", rows(N)
    kme.predict(models[0], X, out, outputs=("label", "probability", "decision"))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Place if point == "delete_others" else OutputLayout, point, killed)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(models[1], X, out, overwrite=True)
    with pytest.raises(DataError, match=r"chunk 0 \(rows from 0\) is not predicted yet"):
        kme.open_predictions(out).labels()
    assert kme.predict(models[1], X, out).computed == 4, "without --overwrite: it is this job's by now"
    same_as_from_nothing(models[1], X, out)


@pytest.mark.parametrize("format", ["zarr", "parquet"])
@pytest.mark.parametrize("point", ["declare", "write"])
def test_while_appended_rows_are_computed_the_old_ones_are_readable_and_no_others(
    models, tmp_path, monkeypatch, format, point
):
    X, out = rows(400), tmp_path / "out"
    kme.predict(models[0], X[:300], out, format=format)
    before = kme.open_predictions(out).read("probability")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OutputLayout, point, killed)
        with pytest.raises(KeyboardInterrupt):
            kme.predict(models[0], X, out, format=format)
    found = kme.open_predictions(out)
    np.testing.assert_array_equal(found.read("probability", 0, 300), before)
    for start in (0, 299, 300):
        with pytest.raises(DataError, match=r"chunk 1 \(rows from 300\) is not predicted yet"):
            found.read("label", start, 301)
    assert kme.predict(models[0], X, out, format=format).computed_rows == 100
    same_as_from_nothing(models[0], X, out)


# --- damage -----------------------------------------------------------------------------------------


def readable(out):
    """All that a reader gets: values, status, and what is on record about rows without predictions."""
    found = kme.open_predictions(out)
    values = [np.asarray(found.read(name)).tobytes() for name in found.names]
    return found.status, found.rows, values, found.labels().tolist(), found.skipped_rows, found.quarantined


def flips(out, count, seed=0):
    """Flip single bits of all files in turn; the files whose damage went unnoticed and changed something."""
    dice, silent, noticed = random.Random(seed), [], 0
    files = sorted(path for path in Path(out).rglob("*") if path.is_file())
    expected = readable(out)
    for turn in range(count):
        path = files[turn % len(files)]
        whole = path.read_bytes()
        damaged, bit = bytearray(whole), dice.randrange(8 * len(whole))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(damaged))
        try:
            if readable(out) != expected:
                silent.append((path.name, bit))
        except KMEError:
            noticed += 1
        finally:
            path.write_bytes(whole)
    return silent, noticed


@pytest.mark.chaos(9)
@pytest.mark.parametrize("format", ["zarr", "parquet"])
def test_single_bits_that_flip_never_change_what_is_read(models, tmp_path, format):
    X = rows(N)
    X[3, 0] = np.nan
    out = tmp_path / "out"
    kme.predict(models[0], X, out, format=format)
    silent, noticed = flips(out, 150)
    assert silent == []
    assert noticed > 100


def test_a_parquet_reader_can_find_damage_as_well(models, tmp_path):
    kme.predict(models[0], rows(N), tmp_path / "out", format="parquet")
    part = tmp_path / "out" / "part-00000001.parquet"
    whole = part.read_bytes()
    pq.read_table(part, page_checksum_verification=True)
    column = pq.read_metadata(part).row_group(0).column(1)
    damaged = bytearray(whole)
    damaged[column.data_page_offset + column.total_compressed_size - 100] ^= 1
    part.write_bytes(bytes(damaged))
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(part, page_checksum_verification=True)
    with pytest.raises(CorruptError, match=r"chunk 1 \(rows from 256\) is missing or does not match its digest"):
        kme.open_predictions(tmp_path / "out").labels()


@pytest.mark.parametrize("format", ["zarr", "parquet"])
def test_a_whole_chunk_of_another_job_is_noticed(models, tmp_path, format):
    """With valid checksums of its own: only the receipt tells."""
    kme.predict(models[0], rows(N), tmp_path / "a", format=format)
    kme.predict(models[1], rows(N), tmp_path / "b", format=format)
    for key in kme.open_predictions(tmp_path / "a").layout.keys(2):
        shutil.copy(tmp_path / "b" / key, tmp_path / "a" / key)
    found = kme.open_predictions(tmp_path / "a")
    found.read("probability", 0, 512)
    with pytest.raises(CorruptError, match="chunk 2"):
        found.read("probability", 500, 600)
    with pytest.raises(CorruptError, match="chunk 2"):
        found.verify()


@pytest.mark.parametrize("format", ["zarr", "parquet"])
def test_a_damaged_record_is_refused_and_replaced_on_request_only(models, tmp_path, format):
    out = tmp_path / "out"
    kme.predict(models[0], rows(N), out, format=format)
    record = out / ("zarr.json" if format == "zarr" else "_predictions.json")
    record.write_text(record.read_text().replace('"complete"', '"complets"'))
    for options in ({}, {"overwrite": True}):
        with pytest.raises(CorruptError, match="does not match its digest; predict again with --from-scratch"):
            kme.predict(models[0], rows(N), out, format=format, **options)
    assert kme.predict(models[0], rows(N), out, format=format, from_scratch=True).computed == 4
    record.write_text("{")
    assert kme.predict(models[0], rows(N), out, format=format, from_scratch=True).computed == 4
    same_as_from_nothing(models[0], rows(N), out)


def test_a_data_set_with_a_damaged_record_is_not_replaced_by_predictions(models, tmp_path):
    ingest(rows(N), tmp_path / "rows.zarr")
    (tmp_path / "rows.zarr" / "zarr.json").write_text("{")
    with pytest.raises(CorruptError):
        kme.predict(models[0], rows(N), tmp_path / "rows.zarr", from_scratch=True)
    assert (tmp_path / "rows.zarr" / "X").exists()


# --- versions ---------------------------------------------------------------------------------------


@pytest.fixture
def golden(tmp_path, monkeypatch):
    """Predictions of the first 50 rows, stored in format version 1."""
    shutil.unpack_archive(GOLDEN, tmp_path)
    monkeypatch.setattr(ArrayRows, "output_rows", 8192)
    return tmp_path, np.load(tmp_path / "rows.npy")


@pytest.mark.parametrize("name", ["scores.zarr", "scores.parquet"])
def test_predictions_of_version_1_are_read_and_converted_by_the_next_job(golden, name, computed):
    folder, X = golden
    same_as_from_nothing(folder / "model.zarr", X[:50], folder / name)
    again = kme.predict(folder / "model.zarr", X[:50], folder / name)
    assert (again.computed, again.skipped) == (0, 1)
    same_as_from_nothing(folder / "model.zarr", X[:50], folder / name)
    assert kme.open_predictions(folder / name).state["format_version"] == 2
    grown = kme.predict(folder / "model.zarr", X, folder / name)
    assert (grown.rows, computed) == (60, [(50, 60)])
    same_as_from_nothing(folder / "model.zarr", X, folder / name)


def test_damage_to_predictions_of_version_1_is_found(golden):
    folder, _ = golden
    part = folder / "scores.parquet" / "part-00000000.parquet"
    damaged = bytearray(part.read_bytes())
    damaged[100] ^= 1
    part.write_bytes(bytes(damaged))
    with pytest.raises(CorruptError, match="chunk 0"):
        kme.open_predictions(folder / "scores.parquet").labels()
    found = kme.open_predictions(folder / "bad.zarr")
    assert (found.status, found.labels(0, 2).tolist()) == ("incomplete", [None, None])
    found.verify()


def test_predictions_of_a_later_version_are_refused(models, tmp_path):
    out = tmp_path / "out.zarr"
    kme.predict(models[0], rows(N), out)
    record = out / "zarr.json"
    record.write_text(record.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(DataError, match=r"format version 3; this kme-dist reads versions 1 to 2\. Update"):
        kme.open_predictions(out)


# --- rows that are appended -------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["zarr", "parquet"])
@pytest.mark.parametrize("kind", ["dataset", "numpy", "parquet"])
def test_appended_rows_are_computed_and_no_others(models, tmp_path, computed, kind, format, monkeypatch):
    """5,000 rows, then 4,000, then 1 more, then none."""
    monkeypatch.setattr(ArrayRows, "output_rows", 8192 * 4)
    X, out = rows(9_001), tmp_path / "out"

    def source(start, stop):
        if kind == "numpy":
            return X[:stop]
        if kind == "parquet":
            (tmp_path / "in").mkdir(exist_ok=True)
            part = pa.table(
                {f"x{j}": X[start:stop, j] for j in range(D)} | {"who": [f"row {i}" for i in range(start, stop)]}
            )
            pq.write_table(part, tmp_path / "in" / f"{start:05d}.parquet")
            return tmp_path / "in"
        if start:
            return kme.open_dataset(tmp_path / "rows.zarr").append(X[start:stop])
        return ingest(X[:stop], tmp_path / "rows.zarr")

    inputs = "rows.zarr" if kind == "dataset" else "in"
    options = {"id_column": "who"} if (kind, format) == ("parquet", "parquet") else {}
    for start, stop in ((0, 5_000), (5_000, 9_000), (9_000, 9_001), (9_001, 9_001)):
        computed.clear()
        found = source(start, stop) if start < stop or kind == "numpy" else tmp_path / inputs
        outcome = kme.predict(models[0], found, out, format=format, dtype="float64", **options)
        assert (outcome.rows, outcome.computed_rows) == (stop, stop - start)
        assert [row for span in computed for row in range(*span)] == list(range(start, stop))
        same_as_from_nothing(models[0], X[:stop], out)
    if options:
        assert pq.read_table(out)["id"].to_pylist()[-2:] == ["row 8999", "row 9000"]


def test_appended_rows_of_a_split_are_computed_and_no_others(models, tmp_path, computed):
    X = rows(3_000)
    data = ingest(X[:2_000], tmp_path / "rows.zarr", split="a=0.5,b=0.5", chunk_bytes=CHUNK * D * 4)
    kme.predict(models[0], data, tmp_path / "out.zarr", split="b", dtype="float64")
    before = data.split_rows("b")
    computed.clear()
    data = data.append(X[2_000:])
    kme.predict(models[0], data, tmp_path / "out.zarr", split="b", dtype="float64")
    assert computed[0][0] == before
    assert sum(stop - start for start, stop in computed) == data.split_rows("b") - before
    same_as_from_nothing(models[0], data.read("b")[0], tmp_path / "out.zarr")


def test_a_change_of_old_rows_is_refused_also_if_new_ones_follow(models, tmp_path):
    X, out = rows(400), tmp_path / "out.zarr"
    data = ingest(X[:300], tmp_path / "rows.zarr", chunk_bytes=CHUNK * D * 4)
    kme.predict(models[0], data, out)
    X[280, 1] += 1
    with pytest.raises(ConfigError, match=r"has changed \(chunk 1, already predicted\); replace them with --overwrite"):
        kme.predict(models[0], ingest(X, tmp_path / "rows.zarr", chunk_bytes=CHUNK * D * 4, overwrite=True), out)
    with pytest.raises(ConfigError, match="now has fewer rows"):
        kme.predict(models[0], ingest(X[:270], tmp_path / "rows.zarr", chunk_bytes=CHUNK * D * 4, overwrite=True), out)


@pytest.mark.parametrize("format", ["zarr", "parquet"])
def test_stored_rows_that_are_damaged_are_recomputed_when_others_are_added_to_them(models, tmp_path, computed, format):
    X, out = rows(300), tmp_path / "out"
    kme.predict(models[0], X[:290], out, format=format)
    key = kme.open_predictions(out).layout.keys(1)[-1]
    damaged = bytearray((out / key).read_bytes())
    damaged[40] ^= 1
    (out / key).write_bytes(bytes(damaged))
    computed.clear()
    outcome = kme.predict(models[0], X, out, format=format)
    assert computed == [(290, 300), (256, 300)]
    assert (outcome.quarantined, outcome.computed_rows) == ([], 44)
    same_as_from_nothing(models[0], X, out)


def test_what_is_on_record_of_rows_adds_up_over_nights(models, tmp_path):
    X, out = rows(200), tmp_path / "out.zarr"
    X[[10, 150]] = np.nan
    kme.predict(models[0], X[:100], out)
    second = kme.predict(models[0], X, out)
    assert (second.computed_rows, second.skipped_rows) == (100, 2)
    assert [entry["row"] for entry in second.first_skipped] == [10, 150]


def test_unknown_categories_are_counted_over_all_nights():
    first, second = {"city": (3, "Oslo")}, {"city": (2, "Rome"), "day": (1, "x")}
    assert _added(first, second) == {"city": (5, "Oslo"), "day": (1, "x")}


# --- another model ----------------------------------------------------------------------------------


def test_predictions_of_another_model_are_replaced_on_request_and_nothing_else_is(models, tmp_path):
    out, X = tmp_path / "out.zarr", rows(N)
    kme.predict(models[0], X, out)
    with pytest.raises(ConfigError, match=r"with other settings \(model changed\); replace them with --overwrite"):
        kme.predict(models[1], X, out)
    with pytest.raises(ConfigError, match="outputs changed"):
        kme.predict(models[1], X, out, on_model_change="recompute", outputs=["label"])
    with pytest.raises(ConfigError, match=r"which has changed \(chunk 0"):
        kme.predict(models[0], X + 1, out, on_model_change="recompute")
    with pytest.raises(ConfigError, match="on_model_change='replace' is unknown"):
        kme.predict(models[1], X, out, on_model_change="replace")
    assert kme.predict(models[1], X, out, on_model_change="recompute").computed == 4
    same_as_from_nothing(models[1], X, out)
