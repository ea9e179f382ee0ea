"""What runs tell: little, often enough, never in the way, and nothing that is nobody's business."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist import kernels
from kme_dist.errors import ConfigError, DataError
from kme_dist.meter import metered
from kme_dist.ops import telemetry
from kme_dist.ops.dashboard import install
from kme_dist.ops.telemetry import Telemetry, pack_scales, performance_report, unpack_scales
from kme_dist.run.checkpoints import Checkpoints, Snapshot
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.fit.problem import ProgressLine

RECORD = {"step": 1, "steps": 9, "phase": "rcb", "objective": 2.5, "risk": 2.0, "complexity": 0.5, "rows": 100}


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def messages(client, run, *, until=lambda found: True, wait_s=10.0):
    """What the scheduler heard of a run, once `until` holds."""
    deadline = time.monotonic() + wait_s
    while True:
        found = [message for _, message in client.get_events("kme") if message["run"] == run]
        if until(found) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def lines(log):
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_a_step_reaches_the_scheduler_soon_though_no_other_follows(client):
    told = Telemetry(client, run="lone", stage="learn")
    messages(client, "lone", until=lambda found: len(found) == 1)  # that it began; the next one has to wait its turn
    told.step(RECORD)
    found = messages(client, "lone", until=lambda found: len(found) == 2)
    assert found[1]["steps"] == [RECORD]
    told.close()


def test_many_steps_make_few_messages_and_the_last_step_is_in_them(client):
    told = Telemetry(client, run="quick", stage="learn")
    began = time.monotonic()
    for step in range(1, 1001):
        told.step({**RECORD, "step": step, "steps": 1000})
        if step % 20 == 0:
            time.sleep(0.01)
    told.close()
    seconds = time.monotonic() - began
    found = messages(client, "quick", until=lambda found: found and found[-1].get("status") == "succeeded")
    assert len(found) <= 3 + seconds / telemetry.SECONDS_BETWEEN_MESSAGES
    steps = [step["step"] for message in found for step in message["steps"]]
    assert steps == sorted(steps)
    assert steps[-1] == 1000
    assert all(len(message["steps"]) <= telemetry.STEPS_IN_A_MESSAGE for message in found)


def test_telling_never_waits_for_a_scheduler_that_does_not_answer(client, monkeypatch):
    answers = threading.Event()

    async def log_event(topic, msg):
        while not answers.is_set():
            await asyncio.sleep(0.01)

    told = Telemetry(client, run="slow", stage="learn")
    messages(client, "slow", until=bool)
    monkeypatch.setattr(client, "scheduler", SimpleNamespace(log_event=log_event))
    for step in range(200):
        told.step({**RECORD, "step": step})  # would never come back if it waited for an answer
    monkeypatch.undo()
    answers.set()
    told.close()


def test_the_end_is_told_whatever_it_was(client):
    with telemetry.telemetry(client, run="good", stage="fit"):
        pass
    with pytest.raises(ConfigError), telemetry.telemetry(client, run="bad", stage="fit"):
        raise ConfigError("model.steps is 0; needs 1")
    with pytest.raises(KeyboardInterrupt), telemetry.telemetry(client, run="stopped", stage="fit"):
        raise KeyboardInterrupt
    assert messages(client, "good")[-1]["status"] == "succeeded"
    last = messages(client, "bad")[-1]
    assert (last["status"], last["facts"]["exit_code"]) == ("failed", 2)
    assert last["facts"]["message"] == "model.steps is 0; needs 1"
    assert messages(client, "stopped")[-1]["status"] == "interrupted"


def test_a_scheduler_that_went_away_fails_no_run():
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        client = Client(cluster)
        told = Telemetry(client, run="orphan", stage="learn")
        client.close()
    told.step(RECORD)
    told.chunks(1, 0, 2, 10)
    told.event("checkpoint", step=1)
    told.close()


def test_an_executor_stands_for_its_client_and_none_for_no_cluster(client):
    with telemetry.telemetry(DaskExecutor(client), run="by-executor", stage="learn") as told:
        told.chunks(3, 1, 8, 400, retried=2)
    found = messages(client, "by-executor", until=lambda found: found[-1].get("status") == "succeeded")
    chunks = [message["chunks"] for message in found if "chunks" in message]
    assert chunks[-1] == {"done": 3, "failed": 1, "total": 8, "rows": 400, "retried": 2}
    for nobody in (None, SerialExecutor()):
        with telemetry.telemetry(nobody, run="serial", stage="learn") as told:
            told.step(RECORD)
            told.scales(np.ones(4))


def test_an_executor_may_find_its_cluster_later(client):
    executor = SimpleNamespace(client=None)
    with telemetry.telemetry(executor, run="later", stage="predict") as told:
        told.rows(0, 100)
        executor.client = client
        told.rows(40, 100)
    found = messages(client, "later", until=lambda found: found and found[-1].get("status") == "succeeded")
    assert [message["rows"] for message in found if "rows" in message][-1] == {"done": 40, "total": 100}


# --- the log ----------------------------------------------------------------------------------------


def test_a_stage_with_nothing_to_report_shows_that_it_lives(client, monkeypatch):
    monkeypatch.setattr(telemetry, "BEAT_S", 0.1)
    told = Telemetry(client, run="silent", stage="fit")
    assert len(messages(client, "silent", until=lambda found: len(found) >= 4)) >= 4
    told.close()
    (last,) = messages(client, "silent")[-1:]
    assert last["status"] == "succeeded"
    time.sleep(1.0)
    assert messages(client, "silent")[-1] == last, "and not after its end"


def test_a_line_that_says_how_far_a_fit_is_counts_as_progress(client):
    with telemetry.telemetry(client, run="counted", stage="fit") as told:
        told.say(ProgressLine("fit: column 3 of 16", 19, 100))
    units = [message["units"] for message in messages(client, "counted") if "units" in message]
    assert units == [{"done": 19, "total": 100}]


def test_the_log_has_one_whole_json_object_a_line():
    log = io.StringIO()
    with telemetry.telemetry(None, run="digits", stage="learn", log=log) as told:
        told.step({**RECORD, "gradient_norm": float("nan")})
        told.event("checkpoint", step=40, path="runs/digits")
    found = lines(log)
    assert [line["event"] for line in found] == ["started", "step", "checkpoint", "ended"]
    assert all(list(line)[:6] == ["ts", "level", "run", "pipeline", "stage", "event"] for line in found)
    assert all(line["ts"].endswith("+00:00") and line["run"] == "digits" for line in found)
    assert found[1]["gradient_norm"] is None, "JSON has no NaN"
    assert found[-1]["status"] == "succeeded"


def test_steps_are_logged_now_and_then_and_events_always():
    log = io.StringIO()
    with telemetry.telemetry(None, run="digits", stage="learn", log=log) as told:
        for step in range(500):
            told.step({**RECORD, "step": step})
            if step % 100 == 0:
                told.event("checkpoint", step=step)
    events = [line["event"] for line in lines(log)]
    assert events.count("step") <= 2
    assert events.count("checkpoint") == 5


def test_the_log_goes_to_a_file_or_to_stderr(tmp_path, capsys):
    with telemetry.telemetry(None, run="a", stage="fit", log=tmp_path / "run.log"):
        pass
    assert len((tmp_path / "run.log").read_text().splitlines()) == 2
    with telemetry.telemetry(None, run="b", stage="fit", log="-"):
        pass
    assert '"run": "b"' in capsys.readouterr().err


def private_run(client, log):
    with telemetry.telemetry(client, run="private", stage="predict", log=log) as told:
        told.event("opened", data="s3://AKIA123:hunter2@bucket/rows.zarr", secret_key="hunter2", api_token="AKIA123")
        told.event("store", address="https://host/rows?X-Amz-Signature=sig9&part=1")
        raise DataError("row 3, column name: 'patient 17' is no number")


def test_no_credentials_and_no_data_are_told(client):
    log = io.StringIO()
    with pytest.raises(DataError):
        private_run(client, log)
    heard = json.dumps(messages(client, "private"))
    for secret in ("hunter2", "AKIA123", "sig9", "patient 17"):
        assert secret not in log.getvalue()
        assert secret not in heard
    assert "bucket/rows.zarr" in log.getvalue(), "the place itself may be told"
    assert '"error": "DataError"' in log.getvalue()


# --- length scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(28, 28), (32, 32, 3), (16, 8)])
def test_scales_of_images_travel_as_small_images(shape, rng):
    values = np.exp(rng.normal(size=np.prod(shape)))
    packed = pack_scales(values, shape)
    assert packed["image"]
    assert len(packed["levels"]) <= 1024
    logs = np.log10(values).reshape(shape[0], shape[1], -1).mean(axis=2)
    assert np.abs(unpack_scales(packed) - logs).max() <= (logs.max() - logs.min()) / 255 + 1e-12


def test_many_scales_are_averaged_and_few_are_kept(rng):
    large = pack_scales(np.exp(rng.normal(size=100 * 100)), (100, 100))
    assert np.prod(large["shape"]) <= 1024
    assert large["features"] == 10_000
    few = pack_scales(np.array([0.1, 1.0, 10.0]))
    assert not few["image"]
    assert np.allclose(unpack_scales(few).ravel(), [-1, 0, 1], atol=0.01)
    assert pack_scales(np.array([2.0])) is None, "one common length scale is a number, not a picture"


def test_a_kernel_gives_its_length_scales(client):
    told = Telemetry(client, run="kernel", stage="learn")
    told.scales(kernels.Gaussian(length_scale=np.array([1.0, 10.0])) + kernels.Linear())
    told.scales(np.array([5.0, 5.0]))  # too soon after the first
    told.close()
    found = [m["scales"] for m in messages(client, "kernel") if "scales" in m]
    assert len(found) == 1
    assert (found[0]["low"], found[0]["high"]) == (0.0, 1.0)


def test_checkpoints_tell_of_themselves_and_of_the_scales_in_them(client, tmp_path):
    parameters = {"length_scale": np.log([1.0, 100.0]), "scale": np.zeros(()), "regularization": np.zeros(())}
    snapshots = [Snapshot(step, parameters, {}, {"stopped": 0}) for step in (1, 2, 3)]
    with telemetry.telemetry(client, run="saved", stage="learn") as told:
        watched = told.watching(Checkpoints(tmp_path, every_steps=2, every_s=None))
        assert watched.resume({"a": 1}) is None
        assert [watched.offer(snapshot, {"a": 1}) for snapshot in snapshots] == [False, True, False]
        watched.save(snapshots[-1], {"a": 1})  # as a loop does at its end
    found = messages(client, "saved")
    events = [event for message in found for event in message.get("events", [])]
    assert [(event["name"], event["facts"]["step"]) for event in events] == [("checkpoint", 2), ("checkpoint", 3)]
    scales = [message["scales"] for message in found if "scales" in message]
    assert {(each["low"], each["high"]) for each in scales} == {(0.0, 2.0)}
    assert watched.resume({"a": 1}).step == 3


# --- on workers -------------------------------------------------------------------------------------


def metered_work():
    with metered("gram"):
        time.sleep(0.05)
    with metered("factorise"):
        time.sleep(0.02)
    return 1


def test_metered_work_is_told_apart_in_the_fine_performance_metrics(client):
    install(client)
    with telemetry.telemetry(client, run="metered", stage="learn"):
        DaskExecutor(client).map(metered_work, [(), ()], name="metered")

    def seconds(dask_scheduler):
        spans = dask_scheduler.extensions["spans"].spans_search_by_name[("metered", "learn")]
        sums = {}
        for span in spans:
            for key, value in span.cumulative_worker_metrics.items():
                if key[0] == "execute" and key[-1] == "seconds":
                    sums[key[-2]] = sums.get(key[-2], 0.0) + value
        return sums

    deadline = time.monotonic() + 30
    while (found := client.run_on_scheduler(seconds)).get("factorise", 0) < 0.04 and time.monotonic() < deadline:
        time.sleep(0.05)  # they travel with the worker's heartbeat, which may come between the two calls
    assert found["gram"] >= 0.1
    assert found["factorise"] >= 0.04


def test_a_performance_report_is_one_file_that_needs_no_network(client, tmp_path):
    with performance_report(DaskExecutor(client), tmp_path / "reports" / "performance.html"):
        DaskExecutor(client).map(metered_work, [()], name="reported")
    text = (tmp_path / "reports" / "performance.html").read_text(encoding="utf-8")
    assert "metered_work" in text or "reported" in text
    assert "cdn.bokeh.org" not in text
    with performance_report(None, tmp_path / "none.html"), performance_report(client, None):
        pass
    assert not (tmp_path / "none.html").exists()


def test_a_report_that_cannot_be_written_is_refused_before_the_work(client, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"), performance_report(client, tmp_path):
        pytest.fail("the work was begun")


def test_a_cluster_that_went_away_leaves_no_report_and_hides_no_error(tmp_path, caplog):
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        client = Client(cluster)

        def failing():
            with performance_report(client, tmp_path / "report.html"):
                client.close()
                raise KeyError("own")

        with pytest.raises(KeyError, match="own"):
            failing()
    assert "no performance report" in caplog.text


def test_a_line_for_people_goes_to_the_log_and_to_the_scheduler(client):
    log = io.StringIO()
    with telemetry.telemetry(client, run="saying", stage="fit", log=log) as told:
        told.say("fit: column 2 of 16")
    assert lines(log)[1]["line"] == "fit: column 2 of 16"
    events = [event for message in messages(client, "saying") for event in message.get("events", [])]
    assert [(event["name"], event["facts"]["line"]) for event in events] == [("said", "fit: column 2 of 16")]
