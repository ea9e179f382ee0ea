"""A real run over a real cluster, watched: tasks and kinds of work, scales, checkpoints, chunks, a report."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster

import kme_dist as kme
from kme_dist.cli.app import execute
from kme_dist.config import parse_config
from kme_dist.data.ingest import ingest
from kme_dist.meter import STAGES
from kme_dist.models.predict import predict as predict_all
from kme_dist.ops.telemetry import STATUSES
from kme_dist.pipelines import fit, learn, predict
from kme_dist.pipelines import run as whole
from kme_dist.pipelines.folder import Listener
from kme_dist.run import streams
from kme_dist.run.executors import DaskExecutor

ROWS, FEATURES = 800, 16


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, protocol="tcp://", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def config(client, tmp_path_factory):
    """Of a small data set in several chunks, on that cluster; further sections replace its own."""
    folder = tmp_path_factory.mktemp("observed")
    rng = np.random.default_rng(5)
    X = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    y = (X[:, 5] + X[:, 6] > 0).astype("int64")
    ingest((X, y), folder / "rows.zarr", split="train=0.5,test=0.5", shuffle=0, chunk_bytes=32 * FEATURES * 4)

    def make(name, **sections):
        return parse_config(
            {
                "data": {"source": str(folder / "rows.zarr"), "image_shape": [4, 4]},
                "model": {"objective": "rcb"},
                "learn": {"steps": 6, "batch_size": 60, "checkpoint_steps": 2},
                "fit": {"solver": "nystrom", "centres": 20},
                "cluster": {"kind": "address", "address": client.scheduler.address},
                "output": {"folder": str(folder / name)},
                **sections,
            }
        )

    return make


@pytest.fixture(scope="module")
def said(client, config, tmp_path_factory):
    """What `kme-dist run` said to people, the file of its performance report, and what the worker counted of it."""
    lines, file, before = [], tmp_path_factory.mktemp("report") / "performance.html", scraped(client)
    listener = Listener(say=lines.append, run_id="five-1")
    whole.run(config("five"), name="five", listener=listener, performance=file)
    return lines, file, {key: value - before.get(key, 0.0) for key, value in scraped(client).items()}


def stages_of(client, run, stage, wanted=()):
    """Kinds of work that Dask's fine performance metrics tell apart; they travel with a worker's heartbeat."""

    def seconds(dask_scheduler):
        spans = dask_scheduler.extensions["spans"].spans_search_by_name[run, stage]
        keys = [key for span in spans for key in span.cumulative_worker_metrics]
        return sorted({str(key[-2]) for key in keys if key[0] == "execute" and key[-1] == "seconds"})

    return waited(lambda: set(client.run_on_scheduler(seconds)) & set(STAGES), lambda found: found >= set(wanted))


def waited(look, enough, wait_s=120.0):
    deadline = time.monotonic() + wait_s
    while not enough(found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def scraped(client):
    (worker,) = client.scheduler_info()["workers"].values()
    with urllib.request.urlopen(f"http://127.0.0.1:{worker['services']['dashboard']}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^(kme_\w+){(.*)} (\S+)$", text, flags=re.MULTILINE)
    return {(name, labels): float(value) for name, labels, value in found}


def test_the_stages_of_a_run_are_told_apart_by_kind_of_work(client, said):
    assert stages_of(client, "five-1", "learn", {"read", "gram", "factorise"}) == {"read", "gram", "factorise"}
    assert stages_of(client, "five-1", "fit", set(STAGES)) == set(STAGES)
    assert stages_of(client, "five-1", "predict", {"read", "gram", "write"}) >= {"read", "gram", "write"}
    assert stages_of(client, "five-1", "evaluate", {"reduce"}) >= {"reduce"}


def test_workers_count_every_task_of_a_run_without_being_asked(said):
    _, _, found = said
    assert {labels for name, labels in found if name == "kme_stage_seconds_total"} == {f'stage="{s}"' for s in STAGES}
    gradients = found["kme_tiles_computed_total", 'outcome="done",phase="batch_gradient"']
    assert gradients >= 6, "one for each step; more where an answer was too long on its way, and was computed again"
    assert found["kme_rows_total", 'phase="batch_gradient"'] == 60 * gradients
    assert found["kme_rows_total", 'phase="predict_chunk"'] == ROWS / 2
    assert found["kme_bytes_written_total", 'phase="predict_chunk"'] > 4 * ROWS / 2
    assert found["kme_tiles_computed_total", 'outcome="done",phase="sum_chunks"'] >= 1
    assert found["kme_rows_total", 'phase="reduced"'] == 0, "rows that are joined are not counted again"


def test_the_page_shows_scales_checkpoints_and_chunks(client, said):
    board = client.cluster.scheduler.extensions["kme"]
    learning, fitting, predicting = (board.runs["five-1", stage] for stage in ("learn", "fit", "predict"))
    assert learning.checkpoint_at is not None
    assert learning.scales.is_image, "the config says that rows are images"
    assert learning.scales.grid.shape == (4, 4)
    assert fitting.status == "succeeded"
    chunks = predicting.chunks
    assert (chunks["done"], chunks["failed"], chunks["rows"]) == (chunks["total"], 0, ROWS / 2)
    assert chunks["total"] > 1


def test_a_run_says_where_to_watch_it_and_leaves_a_report(client, said):
    lines, file, _ = said
    assert any(line.endswith(client.dashboard_link.replace("/status", "/kme")) for line in lines), lines
    assert "cdn.bokeh.org" not in file.read_text(encoding="utf-8")


def test_learn_fit_and_predict_alone_are_watched_alike(client, config, tmp_path):
    chosen, files = config("alone"), {stage: tmp_path / f"{stage}.html" for stage in ("learn", "fit", "predict")}
    told = Listener(run_id="alone-1")
    learn.run(chosen, name="alone", performance=files["learn"], listener=told)
    fit.run(chosen, name="alone", performance=files["fit"], listener=told)
    predicted = chosen.model_copy(update={"predict": chosen.predict.model_copy(update={"data": chosen.data.source})})
    predict.run(predicted, name="alone", performance=files["predict"], listener=told)
    board = client.cluster.scheduler.extensions["kme"]
    assert {stage: board.runs["alone-1", stage].status for stage in files} == dict.fromkeys(files, "succeeded")
    assert all(file.stat().st_size > 100_000 for file in files.values())
    assert board.runs["alone-1", "learn"].scales.is_image
    assert board.runs["alone-1", "predict"].chunks["rows"] == ROWS
    assert stages_of(client, "alone-1", "predict", {"read", "gram", "write"}) >= {"read", "gram", "write"}


def test_two_runs_of_one_config_share_neither_card_nor_metrics(client, config):
    board, found = client.cluster.scheduler.extensions["kme"], []
    for folder in ("first", "second"):
        learn.run(config(folder, learn={"steps": 2, "batch_size": 60}), name="twice")
        found.append(json.loads((Path(config(folder).output.folder) / "run.json").read_text())["id"])
    assert len(set(found)) == 2
    assert all(name.startswith("twice-") for name in found)
    with urllib.request.urlopen(client.dashboard_link.replace("/status", "/metrics"), timeout=60) as answer:
        steps = re.findall(
            r'^kme_train_step{phase="learn",pipeline="twice",run_id="(.*)"} 2.0$', answer.read().decode(), re.M
        )
    assert sorted(steps) == sorted(found)
    assert {board.runs[name, "learn"].status for name in found} == {"succeeded"}


def test_chunks_that_fail_are_told_while_others_go_on(client, config, said, tmp_path, monkeypatch):
    """A chunk of the input is damaged: it is tried again, then skipped."""
    monkeypatch.setattr(streams, "MOST_CALLS", 1)  # on a quick machine a task makes several calls, and is repeated too
    told = []
    chosen = config("five")
    shutil.copytree(chosen.data.source, tmp_path / "rows.zarr")
    chunk = sorted(path for path in (tmp_path / "rows.zarr" / "X").rglob("*") if path.is_file() and path.suffix == "")[
        0
    ]
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(bytes(content))
    outcome = predict_all(
        f"{chosen.output.folder}/model.zarr",
        tmp_path / "rows.zarr",
        tmp_path / "out.zarr",
        executor=DaskExecutor(client),
        watch=lambda done, failed, total, rows, *, retried, rejected: told.append((done, failed, total, retried)),
    )
    failed = len(outcome.quarantined)
    assert failed >= 1
    assert told[0] == (0, 0, outcome.chunks, 0)
    assert told[-1] == (outcome.chunks - failed, failed, outcome.chunks, outcome.retried)
    assert outcome.retried == 2 * failed
    assert scraped(client)["kme_tiles_computed_total", 'outcome="failed",phase="predict_chunk"'] == 3 * failed


# --- a job of a schedule --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nightly(client, tmp_path_factory):
    """A function: the exit code of a night that predicts rows.zarr on that cluster; and the folder."""
    root = tmp_path_factory.mktemp("nightly")
    rng = np.random.default_rng(6)
    X = rng.normal(size=(600, 3))
    kme.MCEClassifier(steps=0).fit(X[:100], (X[:100, 0] > 0).astype(int)).save(root / "model.zarr")
    ingest(X, root / "rows.zarr", chunk_bytes=100 * 3 * 4)
    X[[7, 300, 599]] = np.inf
    pq.write_table(pa.table({f"x{i}": X[:, i] for i in range(3)}), root / "holes.parquet")

    def night(name, day, *changes, pipeline="predict"):
        (root / f"{name}.yaml").write_text(
            "data: {source: rows.zarr}\n"
            f"predict: {{model: model.zarr, data: rows.zarr, out: {name}.zarr, outputs: [label]}}\n"
            f"cluster: {{kind: address, address: '{client.scheduler.address}'}}\n"
        )
        command = ["schedule", str(root / f"{name}.yaml"), "--pipeline", pipeline, "--once", "--quiet", "--root"]
        sets = [word for change in changes for word in ("--set", change)]
        return execute([*command, str(root), "--at", f"2026-03-{day:02d}T02:30Z", *sets])

    return night, root


def scheduler_metrics(client):
    with urllib.request.urlopen(client.dashboard_link.replace("/status", "/metrics"), timeout=60) as answer:
        found = re.findall(r"^(kme_\w+){(.*)} (\S+)$", answer.read().decode(), re.M)
    return {(name, labels): float(value) for name, labels, value in found}


def test_skipped_rows_are_counted_and_the_stage_fails_like_the_job(client, nightly):
    night, root = nightly
    assert night("holes", 1, f"predict.data={root / 'holes.parquet'}") == 65
    found = scheduler_metrics(client)
    labels = 'phase="predict",pipeline="holes",{}run_id="holes-20260301T023000Z"'
    assert found["kme_rows_rejected_total", labels.format('reason="invalid",')] == 3
    assert found["kme_run_rows_total", labels.format("")] == 600
    told = {status: found["kme_run_status", f'{labels.format("")},status="{status}"'] for status in STATUSES}
    assert told == {**dict.fromkeys(STATUSES, 0), "failed": 1}
    assert not any(name == "kme_run_last_success_timestamp_seconds" and "holes" in labels for name, labels in found)


def test_a_night_without_new_rows_is_a_success_too_and_only_nights_are_missed(client, nightly, monkeypatch):
    night, root = nightly
    series = "kme_run_last_success_timestamp_seconds", 'phase="predict",pipeline="grown",scheduled="true"'
    assert night("grown", 1) == 0
    first = scheduler_metrics(client)[series]
    assert night("grown", 2) == 0
    assert scheduler_metrics(client)[series] > first
    names = [str(root / name) for name in ("model.zarr", "rows.zarr", "other.zarr")]
    given = ["--model", names[0], "--data", names[1], "--out", names[2], "--scheduler", client.scheduler.address]
    assert execute(["predict", *given, "--quiet"]) == 0
    assert ("kme_run_last_success_timestamp_seconds", 'phase="predict",pipeline="other",scheduled="false"') in (
        scheduler_metrics(client)
    )
    monkeypatch.setattr("kme_dist.ops.cluster.CONNECT_S", 1.0)
    assert night("grown", 3, "cluster.address=tcp://127.0.0.1:9") == 0, "nobody there to be told"


def test_a_scheduled_run_tells_of_the_stages_that_are_up_to_date(client, config):
    chosen, told = config("up-to-date", learn={"steps": 2, "batch_size": 60}), []
    for night in (1, 2):
        whole.run(chosen, name="up-to-date", listener=Listener(run_id=f"night-{night}", scheduled=True))
        told.append({k: v for k, v in scheduler_metrics(client).items() if "last_success" in k[0] and "up-to" in k[1]})
    assert [re.findall('phase="(.*?)"', labels)[0] for _, labels in told[0]] == ["learn", "fit", "predict", "evaluate"]
    assert all(told[1][series] > before for series, before in told[0].items())
