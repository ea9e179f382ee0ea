"""Jobs: the folder is the truth, one driver at a time, one result however often a job is started or killed."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kme_dist.backend import available_cores
from kme_dist.cli import app as cli
from kme_dist.config import ClusterConfig, Config, parse_config
from kme_dist.data import leases
from kme_dist.data.leases import EpochLease, LeaseLost, begin_epoch, latest_epoch
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError
from kme_dist.ops import cluster as clusters
from kme_dist.ops import driver, jobs
from kme_dist.ops.certs import tls_files
from kme_dist.ops.driver import drive
from kme_dist.pipelines.job import run_pipeline
from kme_dist.run.fit.problem import ProgressLine

# A process that starts one job, with a pipeline that notes each chunk it does, skips those that are noted, and so
# behaves like ours do after a kill. Arguments: root, job, seconds for a chunk, chunk to die at.
STARTER = """
import os, signal, sys, time
from pathlib import Path
from kme_dist.data.leases import EpochLease, LeaseLost
from kme_dist.errors import KMEError
from kme_dist.ops import driver, jobs

root, name, seconds, die_at = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
EpochLease.default_beat_s = 0.1

def run(pipeline, config, *, name, command, listener):
    notes = Path(config.output.folder)
    notes.mkdir(parents=True, exist_ok=True)
    for chunk in range(6):
        listener.progress("chunks", chunk, 6)
        if not (notes / str(chunk)).exists():
            time.sleep(seconds)
            if chunk == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with open(notes / str(chunk), "a") as note:
                note.write(f"{os.getpid()}\\n")
    listener.progress("chunks", 6, 6)
    return {"chunks": 6, "by": os.getpid()}

driver.CHECK_EVERY_S = 0.0
try:
    print(driver.drive(jobs.job_at(jobs.job_root(root), name), run, wait_s=60)["result"]["by"])
except LeaseLost:
    sys.exit(4)
except KMEError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(job, seconds=0.02, die_at=-1):
    arguments = [sys.executable, "-c", STARTER, str(job.root), job.id, str(seconds), str(die_at)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def chunks_done(job):
    """Who did each chunk, in order; one line for each time it was done."""
    notes = job.folder / "output"
    return {path.name: path.read_text().split() for path in sorted(notes.iterdir())}


def wait_until(true, seconds=240):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    config = parse_config({"data": {"source": "table.zarr"}})
    return jobs.create_job(tmp_path, pipeline="evaluate", config=config, name="nightly", job_id="nightly-1")


@pytest.fixture
def pipeline(monkeypatch):
    """A function that puts its argument in the place of the pipeline `evaluate`."""

    def replace(run):
        module = type(sys)("kme_dist.pipelines.evaluate")
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(driver, "CHECK_EVERY_S", 0.0)
        monkeypatch.setattr(driver, "PAUSE_S", 0.0)

    return replace


# --- one driver, one result ------------------------------------------------------------------------


def test_eight_simultaneous_starts_give_one_result_and_clean_exits(job):
    processes = [start(job) for _ in range(8)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, outputs
    (winner,) = {out.strip() for out, _ in outputs}
    assert chunks_done(job) == {str(chunk): [winner] for chunk in range(6)}
    assert [event["state"] for event in job.events()] == ["running", "succeeded"]


@pytest.mark.chaos(7)
def test_a_killed_driver_is_followed_by_one_that_resumes(job):
    first = start(job, die_at=3)
    first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    second = start(job)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    done = chunks_done(job)
    assert all(len(who) == 1 for who in done.values())
    assert [who == [out.strip()] for who in done.values()] == [False] * 3 + [True] * 3
    assert job.status()["drivers"] == 2


@pytest.mark.chaos(24)
def test_a_driver_that_stalled_does_not_commit_when_it_wakes(job):
    sleeper = start(job, seconds=3.0)  # long enough to be stopped before it is done, on a busy machine too
    wait_until(lambda: job.status().get("progress"))
    sleeper.send_signal(signal.SIGSTOP)
    other = start(job)
    out, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(timeout=60) == 4, "it must notice that it has lost the job"
    sleeper.communicate()
    assert job.result()["result"]["by"] == int(out)
    assert job.status()["state"] == "succeeded"


def test_a_result_is_never_replaced(job):
    assert job.commit({"result": 1})
    assert not job.commit({"result": 2})
    assert job.result() == {"result": 1}


def test_a_living_driver_is_not_disturbed(job, monkeypatch):
    monkeypatch.setattr(EpochLease, "default_beat_s", 0.05)
    with EpochLease.take(job.place, holder="the first"):
        with pytest.raises(RetryError, match=r"another driver is at work there \(the first\)"):
            drive(job, run_pipeline)
        assert latest_epoch(job.place)[0] == 1
    with EpochLease.take(job.place) as lease:  # given back: no need to wait
        assert lease.epoch == 2


def test_of_many_contenders_that_see_the_same_one_gets_the_next_epoch(tmp_path, monkeypatch):
    real, together, seen = leases.latest_epoch, threading.Barrier(8), set()

    def look(place):
        found = real(place)
        if threading.get_ident() not in seen:  # nobody acts before all have looked
            seen.add(threading.get_ident())
            together.wait(timeout=60)
        return found

    monkeypatch.setattr(leases, "latest_epoch", look)
    place, winners = Place.of(tmp_path), []

    def contend():
        lease = EpochLease.take(place, wait_s=60, finished=lambda: bool(winners))
        if lease is not None:
            winners.append(lease.epoch)

    contenders = [threading.Thread(target=contend) for _ in range(8)]
    for thread in contenders:
        thread.start()
    for thread in contenders:
        thread.join()
    assert winners == [1]


def test_who_lost_the_job_is_told(tmp_path):
    place = Place.of(tmp_path)
    with EpochLease.take(place) as lease:
        begin_epoch(place, "an operator")
        with pytest.raises(LeaseLost, match="epoch 2 has begun"):
            lease.check()
    assert latest_epoch(place)[1]["holder"] == "an operator", "the loser must not write into the epoch of another"


# --- states ----------------------------------------------------------------------------------------


def test_a_job_tells_how_it_stands(job, pipeline):
    seen = []

    def run(config, *, name, listener, command):
        listener.say("reading")
        listener.step({"step": 3, "steps": 10, "objective": 1.5, "phase": "learn"})
        seen.append((job.status()["state"], config.output.folder, name))
        return {"accuracy": 0.9}

    assert job.status()["state"] == "waiting"
    pipeline(run)
    done = drive(job, run_pipeline)
    assert seen == [("running", str(job.folder / "output"), "nightly")]
    assert done["result"] == {"accuracy": 0.9}
    assert job.status()["state"] == "succeeded"
    assert job.status()["result"] == {"accuracy": 0.9}
    assert [line["message"] for line in job.logs()][1:] == ["reading", "learn: 3 of 10", "succeeded"]
    assert drive(job, run_pipeline) == done, "a job that is done is not done again"


def test_what_may_pass_is_tried_again_and_what_may_not_is_not(job, pipeline):
    calls = []

    def stumble(config, **_):
        calls.append("stumble")
        if len(calls) < 3:
            raise RetryError("the store is away")
        raise DataError("column width is missing")

    pipeline(stumble)
    with pytest.raises(DataError):
        drive(job, run_pipeline)
    assert len(calls) == 3
    status = job.status()
    assert (status["state"], status["exit_code"], status["error"]) == ("failed", 2, "column width is missing")
    assert [event["state"] for event in job.events()] == ["running", "retrying"] * 2 + ["running", "failed"]


def test_a_bug_leaves_its_traceback_in_the_log(job, pipeline):
    pipeline(lambda config, **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(job, run_pipeline)
    assert job.status()["exit_code"] == 1
    assert "ZeroDivisionError" in job.logs()[-1]["traceback"]


def test_a_job_that_is_asked_to_stop_stops_at_its_next_word(job, pipeline):
    def run(config, *, listener, **_):
        job.request_stop("a test")
        listener.progress("chunks", 1, 9)
        pytest.fail("it went on")

    pipeline(run)
    with pytest.raises(driver.Cancelled):
        drive(job, run_pipeline)
    assert job.status()["state"] == "cancelled"


def test_the_word_of_a_driver_that_lost_the_job_does_not_count(job):
    with EpochLease.take(job.place):
        pass
    job.event("running", epoch=1)
    begin_epoch(job.place, "an operator")
    job.event("running", epoch=2)
    job.event("failed", epoch=1, error="late")
    assert job.status()["state"] == "running"


# --- what a job may be -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../other", "a/b", "", ".hidden", "a\nb", "x" * 200])
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(ConfigError, match="invalid job id"):
        jobs.job_at(tmp_path, name)


@pytest.mark.parametrize("pipeline_name", ["os", "../run", "run.run", "cluster"])
def test_only_pipelines_of_the_package_run(tmp_path, job, pipeline_name):
    with pytest.raises(ConfigError, match="unknown pipeline"):
        jobs.create_job(tmp_path, pipeline=pipeline_name, config=job.config(), name="x")
    path = job.folder / "job.json"
    path.write_text(json.dumps({**job.request(), "pipeline": pipeline_name}))
    with pytest.raises(ConfigError, match=r"job\.json names the pipeline"):
        drive(job, run_pipeline)


@pytest.mark.parametrize("key", [f"{section}.{name}" for section, name in jobs.PATH_KEYS])
@pytest.mark.parametrize("path", ["../outside", "inside/../../outside", "/etc", "link/x", "file:///etc/x", "~/x"])
def test_paths_stay_under_the_root(tmp_path, key, path):
    section, name = key.split(".")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    tree = {"data": {"source": "table.zarr"}, **({} if section == "data" else {section: {}})}
    tree[section][name] = {"cost": path} if name == "expectations" else path
    config = parse_config(tree)
    with pytest.raises(ConfigError, match=key):
        jobs.create_job(root, pipeline="run", config=config, name="x")


def test_paths_are_stored_from_the_root_and_used_from_where_it_is(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    config = parse_config({"data": {"source": str(here / "data" / "t.zarr")}, "output": {"folder": "results"}})
    job = jobs.create_job(here, pipeline="run", config=config, name="x", job_id="x")
    assert str(here) not in (job.folder / "config.yaml").read_text()
    here.rename(there)
    moved = jobs.job_at(jobs.job_root(there), "x").config()
    assert moved.data.source == str(there / "data" / "t.zarr")
    assert moved.output.folder == str(there / "results")


def test_addresses_of_stores_stay_where_they_are_allowed(tmp_path, monkeypatch):
    config = parse_config({"data": {"source": "s3://mine/data/t.zarr"}})
    assert jobs.confined(config, tmp_path).data.source == "s3://mine/data/t.zarr"
    monkeypatch.setenv("KME_STORES", "s3://mine/data, gs://other")
    assert jobs.confined(config, tmp_path).data.source == "s3://mine/data/t.zarr"
    for outside in ("s3://mine/database/t.zarr", "s3://theirs/data/t.zarr", "s3://mine/data/../t.zarr"):
        with pytest.raises(ConfigError, match=r"data\.source"):
            jobs.confined(parse_config({"data": {"source": outside}}), tmp_path)


def test_every_key_that_holds_text_is_known_to_be_a_path_or_not():
    """Whoever adds a key that names a file adds it to PATH_KEYS, or jobs would take it anywhere."""
    no_paths = {
        "data": {
            "label",
            "features",
            "exclude",
            "weight",
            "categories",
            "delimiter",
            "encoding",
            "decimal",
            "thousands",
        },
        "model": {"kernel", "features", "options"},
        "learn": {"feature_cache"},
        "fit": {"memory"},
        "predict": {"split", "id_column"},
        "cluster": None,  # a job takes this section from the worker that it runs on
    }
    paths = set(jobs.PATH_KEYS)
    for section, field in Config.model_fields.items():
        if no_paths.get(section, set()) is None:
            continue
        for name, inner in field.annotation.model_fields.items():
            text = "str" in str(inner.annotation) and "Literal" not in str(inner.annotation)
            if text and name not in no_paths.get(section, set()):
                assert (section, name) in paths, f"is {section}.{name} a path?"


def test_the_same_name_with_another_configuration_is_refused(tmp_path, job):
    same = jobs.create_job(
        tmp_path, pipeline="evaluate", config=parse_config({"data": {"source": "table.zarr"}}), name="n", job_id=job.id
    )
    assert same == job
    other = parse_config({"data": {"source": "another.zarr"}})
    with pytest.raises(ConfigError, match="another configuration"):
        jobs.create_job(tmp_path, pipeline="evaluate", config=other, name="n", job_id=job.id)


@pytest.mark.parametrize(
    ("folder", "scheduled"), [("runs/model", None), ("runs/../runs/model", None), (None, "2026-03-01T02:00:00Z")]
)
def test_a_job_and_its_run_folder_are_not_one_and_the_same(tmp_path, folder, scheduled):
    config = parse_config({"data": {"source": "t.zarr"}, "output": {"folder": folder}})
    with pytest.raises(ConfigError, match=r"is the folder of the job model itself.*--id"):
        jobs.create_job(tmp_path, pipeline="run", config=config, name="model", job_id="model", scheduled=scheduled)
    assert jobs.list_jobs(tmp_path) == []


def test_a_job_may_be_called_like_its_run_folder_where_that_lies_elsewhere(tmp_path):
    for folder in ("results/model", "model", "runs/model/output"):
        config = parse_config({"data": {"source": "t.zarr"}, "output": {"folder": folder}})
        job = jobs.create_job(tmp_path, pipeline="run", config=config, name="m", job_id="model")
        assert job.status()["state"] == "waiting"
        shutil.rmtree(job.folder)


def test_a_run_folder_does_not_become_a_job(tmp_path):
    (tmp_path / "runs" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "model" / "run.json").write_text("{}")
    config = parse_config({"data": {"source": "t.zarr"}})
    with pytest.raises(ConfigError, match="is the run folder of an earlier command"):
        jobs.create_job(tmp_path, pipeline="run", config=config, name="m", job_id="model")


def test_secrets_of_the_environment_stay_out_of_the_folder(job, pipeline, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame+open/very-secret")
    monkeypatch.setenv("MY_API_TOKEN", "token-1234567890")

    def leak(config, *, listener, **_):
        listener.say(f"connecting with {os.environ['AWS_SECRET_ACCESS_KEY']}")
        raise OSError(f"refused: {os.environ['MY_API_TOKEN']}")

    pipeline(leak)
    with pytest.raises(RetryError, match="refused"):
        drive(job, run_pipeline)
    written = "".join(path.read_text() for path in job.folder.rglob("*") if path.is_file())
    assert "sesame" not in written
    assert "token-1234567890" not in written
    assert "<AWS_SECRET_ACCESS_KEY>" in written


# --- on a cluster, over TLS ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(address, folder of certificates, root with a data set) of a cluster that the command keeps up."""
    root = tmp_path_factory.mktemp("root")
    certificates = tmp_path_factory.mktemp("certs")
    rng = np.random.default_rng(3)
    X = rng.normal(size=(400, 3))
    np.savez(root / "table.npz", X=X, y=(X[:, 0] > 0).astype(int))
    assert cli.execute(["ingest", str(root / "table.npz"), str(root / "table.zarr"), "--label", "y", "--quiet"]) == 0
    workers = str(min(2, available_cores()))
    command = [sys.executable, "-m", "kme_dist", "cluster", "--workers", workers, "--tls", str(certificates)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        address = process.stdout.readline().split()[1]
        assert address.startswith("tls://127.0.0.1:")
        yield address, str(certificates), root
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


@pytest.fixture
def operator(cluster, capsys, tmp_path):
    """A function that runs a command for jobs as a person would, and returns its exit code and what it printed."""
    address, certificates, root = cluster

    def command(*arguments, connected=True):
        more = ["--scheduler", address, "--tls", certificates] if connected else []
        code = cli.execute([*arguments, "--root", str(root), *more])
        out, err = capsys.readouterr()
        return code, out if code == 0 else err

    def submit(steps):
        config = tmp_path / "small.yaml"
        config.write_text(
            "data: {source: table.zarr}\n"
            "model: {objective: rcb}\n"
            f"learn: {{steps: {steps}, batch_size: 50, checkpoint_steps: 5}}\n"
            "cluster: {patience_s: 60}\n"
        )
        code, out = command("submit", str(config), "--pipeline", "learn", "--quiet")
        assert code == 0, out
        return jobs.job_at(root, out.strip())

    command.submit = submit
    return command


@pytest.mark.parametrize("steps", [120, pytest.param(400, marks=pytest.mark.slow)])
def test_a_job_runs_by_itself_and_survives_the_death_of_its_driver(operator, steps):
    job = operator.submit(steps=steps)
    told = job.folder / "output" / "metrics.jsonl"
    wait_until(lambda: told.exists() and told.read_text().count("\n") >= 8)  # past its first checkpoint
    epoch, lease = latest_epoch(job.place)
    os.kill(lease["process"], signal.SIGSTOP)  # or it might be done before it was looked at
    code, out = operator("jobs", "status", job.id, "--json")
    assert code == 0, out
    status = json.loads(out)
    assert (status["state"], status["scheduler"]["state"]) == ("running", "running")
    assert status["scheduler"]["connected"], "its tasks are known by the name of its client"
    assert status["scheduler"]["driver"].startswith("process ")
    os.kill(lease["process"], signal.SIGKILL)
    code, out = operator("jobs", "wait", job.id, "--quiet", "--timeout", "200", connected=False)
    assert code == 0, out
    assert job.status()["drivers"] == epoch + 1
    result = job.result()["result"]
    assert result["steps"] == steps
    assert result["steps_now"] < steps, "the second driver must go on from a checkpoint"
    lines = [json.loads(line)["step"] for line in told.read_text().splitlines()]
    assert lines in (list(range(1, steps + 1)), list(range(steps))), "every step once"
    code, out = operator("jobs", "logs", job.id, connected=False)
    assert "succeeded" in out
    code, out = operator("jobs", "list", connected=False)
    assert f"{job.id}  learn     succeeded  {jobs.this_user()[:12]}" in out
    code, out = operator("jobs", "list")
    assert code == 0, out
    assert "not on the scheduler" not in out, "what has ended need not be there"


@pytest.mark.chaos(26)
@pytest.mark.slow
def test_cancel_asks_first(operator):
    job = operator.submit(steps=5000)
    wait_until(lambda: job.status().get("progress"))
    code, out = operator("jobs", "cancel", job.id, "--grace", "120")
    assert (code, out.split()) == (0, [job.id, "cancelled"])
    assert job.status()["drivers"] == 1, "its driver stopped by itself"
    assert job.result() is None
    code, out = operator("jobs", "wait", job.id, connected=False)
    assert code == 130


@pytest.mark.chaos(26)
def test_cancel_then_makes_it_stop_and_frees_the_workers(operator, cluster, monkeypatch):
    job = operator.submit(steps=5000)
    wait_until(lambda: job.status().get("progress"))
    process = latest_epoch(job.place)[1]["process"]
    code, out = operator("jobs", "cancel", job.id, "--grace", "0")
    assert (code, out.split()) == (0, [job.id, "cancelled"])
    wait_until(lambda: not Path(f"/proc/{process}").exists())
    code, out = operator("jobs", "status", job.id, "--json")
    assert json.loads(out)["scheduler"] == {"state": None, "driver": None, "connected": False, "busy": []}
    assert job.result() is None
    monkeypatch.setattr(clusters, "CONNECT_S", 240)
    with clusters.open_client(ClusterConfig(kind="address", address=cluster[0], tls=tls_files(cluster[1]))) as client:
        assert client.submit(sum, [1, 2]).result(timeout=240) == 3, "the workers are free for others"


def test_a_job_that_nobody_took_leaves_no_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(clusters, "CONNECT_S", 0.5)
    (tmp_path / "c.yaml").write_text("data: {source: t.zarr}")
    arguments = ["submit", str(tmp_path / "c.yaml"), "--scheduler", "tcp://127.0.0.1:1", "--root", str(tmp_path)]
    assert cli.execute(arguments) == 75
    assert jobs.list_jobs(tmp_path) == []
    assert "no scheduler answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "line"),
    [
        (None, "submitted; see `kme-dist jobs status j4`"),
        ("succeeded", "job j4 has already succeeded; nothing to do"),
        ("cancelled", "resumes the cancelled job j4; see `kme-dist jobs status j4`"),
        ("failed", "resumes the failed job j4; see `kme-dist jobs status j4`"),
        ("running", "job j4 was submitted before and is running; see `kme-dist jobs status j4`"),
    ],
)
def test_a_submission_says_what_it_did(tmp_path, capsys, monkeypatch, before, line):
    sent = []
    monkeypatch.setattr("kme_dist.ops.submit.submit", lambda job, *_: sent.append(job.id))
    (tmp_path / "c.yaml").write_text("data: {source: t.zarr}")
    arguments = ["submit", str(tmp_path / "c.yaml"), "--id", "j4", "--scheduler", "tcp://h:1", "--root", str(tmp_path)]
    if before is not None:
        assert cli.execute([*arguments, "--quiet"]) == 0
        job = jobs.job_at(tmp_path, "j4")
        job.event(before)
        if before == "succeeded":
            job.commit({"result": {}})
    sent.clear()
    capsys.readouterr()
    assert cli.execute(arguments) == 0
    assert capsys.readouterr() == ("j4\n", f"{line}\n")
    assert sent == ([] if before == "succeeded" else ["j4"])


def test_a_job_that_failed_can_be_resumed(job, pipeline, capsys):
    pipeline(lambda config, **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(job, run_pipeline)
    job.request_stop("an operator, before that")
    pipeline(lambda config, **_: {"rows": 3})
    assert cli.execute(["jobs", "resume", job.id, "--root", str(job.root)]) == 0
    assert capsys.readouterr().out.split() == [job.id, "succeeded"]
    assert cli.execute(["jobs", "status", job.id, "--root", str(job.root)]) == 0
    assert "result\n  rows  3\n" in capsys.readouterr().out


def test_a_job_that_is_cancelled_here_ends_as_cancelled(job, pipeline, capsys):
    def run(config, *, listener, **_):
        job.request_stop("a test")
        listener.progress("chunks", 1, 2)

    pipeline(run)
    assert cli.execute(["jobs", "resume", job.id, "--root", str(job.root), "--quiet"]) == 130
    assert job.status()["state"] == "cancelled"
    advice = f"error: the job {job.id} was cancelled; resume it with `kme-dist jobs resume {job.id}`\n"
    assert capsys.readouterr() == (f"{job.id} cancelled\n", advice)
    assert cli.execute(["jobs", "wait", job.id, "--root", str(job.root), "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "cancelled", "one JSON object"
    assert err == advice


def test_a_list_survives_jobs_that_are_damaged_or_go_away(tmp_path, job, capsys, monkeypatch):
    broken = jobs.create_job(tmp_path, pipeline="run", config=job.config(), name="b", job_id="broken")
    gone = jobs.create_job(tmp_path, pipeline="run", config=job.config(), name="g", job_id="gone")
    (broken.folder / "job.json").write_text("{")
    listed = jobs.list_jobs(tmp_path)
    assert {found.id for found in listed} == {job.id, "broken", "gone"}
    shutil.rmtree(gone.folder)  # between the listing and the look
    monkeypatch.setattr(jobs, "list_jobs", lambda root: listed)
    assert cli.execute(["jobs", "list", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "waiting" in out
    assert "damaged" in out
    assert "gone" not in out


def test_a_wait_ends_when_the_scheduler_does_not_know_a_job_that_stalled(job, monkeypatch):
    from kme_dist.ops import submit

    answers = iter(["processing", None, None, None])
    monkeypatch.setattr(submit, "QUERY_S", 0.0)
    monkeypatch.setattr(submit, "POLL_S", 0.0)
    monkeypatch.setattr(submit, "on_scheduler", lambda jobs, cluster: [{"state": next(answers)}])
    with EpochLease.take(job.place, beat_s=600):
        job.event("running", epoch=1)
        with pytest.raises(RetryError, match=rf"does not know the job {job.id}.*jobs resume {job.id}"):
            submit.wait(job, cluster=ClusterConfig(kind="address", address="tcp://127.0.0.1:1"))
    assert list(answers) == [None], "one look alone proves nothing"


def test_a_wait_continues_while_a_driver_elsewhere_shows_that_it_lives(job, monkeypatch):
    from kme_dist.ops import submit

    epoch = iter(range(100))
    monkeypatch.setattr(submit, "QUERY_S", 0.0)
    monkeypatch.setattr(submit, "POLL_S", 0.0)
    monkeypatch.setattr(submit, "on_scheduler", lambda jobs, cluster: [{"state": None}])
    monkeypatch.setattr(submit, "latest_epoch", lambda place: next(epoch))
    job.event("running")

    def tell(status):
        if len(job.events()) < 5:
            job.event("running")
        else:
            job.commit({"result": 1})

    cluster = ClusterConfig(kind="address", address="tcp://127.0.0.1:1")
    assert submit.wait(job, tell=tell, cluster=cluster)["state"] == "succeeded"


@pytest.mark.parametrize(
    ("facts", "waits"),
    [({"exit_code": 75}, True), ({"exit_code": 75, "given_up": True}, False), ({"exit_code": 65}, False)],
)
def test_a_wait_gives_a_supervisor_the_time_to_resubmit(job, monkeypatch, facts, waits):
    from kme_dist.ops import submit

    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        job.commit({"result": 1})  # by the driver of the resubmission

    monkeypatch.setattr(submit.time, "sleep", pause)
    job.event("waiting", scheduler="tcp://127.0.0.1:1")
    job.event("failed", error="the scheduler was lost", **facts)
    cluster = ClusterConfig(kind="address", address="tcp://127.0.0.1:1")
    assert submit.wait(job, cluster=cluster)["state"] == ("succeeded" if waits else "failed")
    assert bool(pauses) == waits


def test_a_wait_for_a_resubmission_ends(job, monkeypatch):
    from kme_dist.ops import submit

    monkeypatch.setattr(submit, "RESUBMITTED_S", 0.05)
    monkeypatch.setattr(submit, "POLL_S", 0.01)
    job.event("failed", exit_code=75, error="the scheduler was lost")
    assert submit.wait(job)["state"] == "failed", "nobody supervises a job without a scheduler"
    cluster = ClusterConfig(kind="address", address="tcp://127.0.0.1:1")
    assert submit.wait(job, cluster=cluster)["exit_code"] == 75


def test_what_is_not_there_is_one_line(tmp_path, capsys):
    for arguments in (["jobs", "status", "absent"], ["jobs", "wait", "../x"], ["submit", "absent.yaml"]):
        assert cli.execute([*arguments, "--root", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
    assert issubclass(ConfigError, KMEError)


@pytest.mark.parametrize("name", jobs.PIPELINES)
def test_every_pipeline_of_a_job_takes_what_a_driver_passes(name):
    """The driver knows names only; `run_pipeline` calls the function of that name."""
    module = importlib.import_module(f"kme_dist.pipelines.{name}")
    assert {"name", "listener", "command"} <= set(inspect.signature(module.run).parameters)


def test_a_job_names_its_run_and_tells_its_stage(job, pipeline):
    seen = []

    def run(config, *, listener, **_):
        listener.begin("fit")
        seen.append((listener.run_id, latest_progress(job)))
        listener.say(ProgressLine("fit: column 3 of 16", 19, 100))
        seen.append(latest_progress(job))
        return {}

    def latest_progress(job):
        return drivers[0].lease.progress

    drivers, made = [], driver.JobListener.begin

    def begin(self, stage):
        drivers.append(self)
        made(self, stage)

    pipeline(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.JobListener, "begin", begin)
        drive(job, run_pipeline)
    assert seen == [
        (job.id, {"stage": "fit", "done": 0, "total": None}),
        {"stage": "fit", "done": 19, "total": 100},
    ]


def test_what_a_pipeline_reports_reaches_the_log_of_the_job(job, pipeline):
    def run(config, *, name, listener, command):
        listener.start("the median")
        listener.say(f"{name}: {command}")
        listener.progress("chunks", 2, 2)
        return {}

    pipeline(run)
    drive(job, run_pipeline)
    messages = [line["message"] for line in job.logs()]
    assert messages[1:4] == ["starting from the median", "nightly: kme-dist jobs resume nightly-1", "chunks: 2 of 2"]


# --- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe", b'{"state": 7}\n', b'{"time": "x"}\n', b'{"time": "x", "state": "y", "epoch": "z"}\n']
)
def test_a_damaged_line_of_events_hides_no_job(tmp_path, job, capsys, damage):
    job.event("running", epoch=1)
    with (job.folder / "events.jsonl").open("ab") as file:
        file.write(damage)
    assert job.status()["state"] == "running"
    assert cli.execute(["jobs", "list", "--root", str(tmp_path)]) == 0
    assert job.id in capsys.readouterr().out


@pytest.mark.chaos(11)
def test_a_line_that_a_full_disk_cut_short_spoils_no_other(job, monkeypatch):
    job.event("running", epoch=1)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[: len(content) // 2]))
        for write in (lambda: job.event("failed", epoch=1, exit_code=75), lambda: job.log("half a line")):
            with pytest.raises(RetryError, match="no space left"):
                write()
    job.event("failed", epoch=1, exit_code=75)
    job.log("a whole line")
    job.log("another")
    assert [event["state"] for event in job.events()] == ["running", "failed"]
    assert [line["message"] for line in job.logs()] == ["a whole line", "another"]
    assert b"\n\n" not in (job.folder / "log.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("old", "new"), [(b'"message"', b'"messagd"'), (b"second", b"sebond"), (b"second", b"sec\xefnd")]
)
def test_a_damaged_line_of_a_log_is_shown_as_damaged(tmp_path, job, capsys, old, new):
    for message in ("first", "second", "third"):
        job.log(message)
    lines = (job.folder / "log.jsonl").read_bytes().split(b"\n")
    lines[1] = lines[1].replace(old, new)
    (job.folder / "log.jsonl").write_bytes(b"\n".join(lines))
    assert [line["message"] for line in job.logs()] == ["first", "line 2 of log.jsonl is damaged", "third"]
    assert cli.execute(["jobs", "logs", job.id, "--root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3
    assert "damaged" in shown[1]


def test_a_damaged_config_is_an_error_wherever_it_is_read(tmp_path, job):
    config = parse_config({"data": {"source": "table.zarr"}})
    again = {"pipeline": job.request()["pipeline"], "config": config, "name": "x", "job_id": "twice"}
    twice = jobs.create_job(tmp_path, **again)
    path = twice.folder / "config.yaml"
    content = path.read_bytes()
    for damaged in (content.replace(b"table", b"tabme"), b"\xe4" + content[1:]):
        path.write_bytes(damaged)
        assert cli.execute(["jobs", "status", "twice", "--root", str(tmp_path)]) == 65
        with pytest.raises(CorruptError, match=r"config\.yaml was damaged or edited .* remove .* submit"):
            jobs.create_job(tmp_path, **again)
    path.write_bytes(content)
    assert jobs.create_job(tmp_path, **again).id == "twice"
    assert cli.execute(["jobs", "status", "twice", "--root", str(tmp_path)]) == 0


def test_a_damaged_key_of_a_request_is_said_and_other_jobs_are_listed(tmp_path, job, capsys):
    other = jobs.create_job(
        tmp_path, pipeline="evaluate", config=parse_config({"data": {"source": "table.zarr"}}), name="other"
    )
    text = (job.folder / "job.json").read_text()
    (job.folder / "job.json").write_text(text.replace('"pipeline"', '"pipelinf"'))
    with pytest.raises(CorruptError, match="does not match its digest"):
        job.status()
    assert cli.execute(["jobs", "list", "--root", str(tmp_path)]) in (0, 65)
    assert other.id in capsys.readouterr().out


def read_all(job):
    """All that a job's files say."""
    return job.request(), job.config().model_dump(mode="json"), job.result(), job.events()


def test_no_single_bit_of_a_job_changes_what_is_read(job):
    job.commit({"id": job.id, "state": "succeeded", "result": {"accuracy": 0.91, "rows": 1200}})
    job.event("running", epoch=1, driver="host a")
    job.event("succeeded", epoch=1)
    request, config, done, events = whole = read_all(job)
    for name in ("job.json", "config.yaml", "done.json", "events.jsonl"):
        path, noticed = job.folder / name, 0
        content = path.read_bytes()
        bits = np.random.default_rng(0).choice(8 * len(content), min(300, 8 * len(content)), replace=False)
        for bit in bits.tolist():
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                now = read_all(job)
            except CorruptError:
                noticed += 1
                continue
            if name == "events.jsonl":  # a damaged line counts as none; the others are read
                assert all(event in events or set(event) - {"time", "state", "epoch", "driver"} for event in now[3])
                noticed += len(now[3]) < len(events)
                now = (*now[:3], events)
            assert [{k: v for k, v in kept.items() if k in old} for kept, old in zip(now[:3], whole, strict=False)] == [
                request,
                config,
                done,
            ], f"{name}, bit {bit}"
        path.write_bytes(content)
        assert noticed > 0.8 * len(bits), name
    assert read_all(job) == whole


def test_damaged_files_of_a_job_are_named_with_a_way_out(job, capsys):
    job.commit({"id": job.id, "result": {"rows": 12}})
    for name, way_out in (("done.json", f"kme-dist jobs resume {job.id}"), ("job.json", "submit it again")):
        path = job.folder / name
        content = path.read_text()
        path.write_text(content.replace('"id"', '"ie"'))
        assert cli.execute(["jobs", "status", job.id, "--root", str(job.root)]) == 65
        said = capsys.readouterr().err
        assert name in said
        assert way_out in said
        path.write_text(content)
    (job.folder / "done.json").unlink()
    (job.folder / "config.yaml").write_text("data: {source: other.zarr}\n")
    with pytest.raises(CorruptError, match=r"config\.yaml was damaged or edited"):
        drive(job, run_pipeline)


def test_jobs_of_versions_without_digests_are_read(job):
    request = json.loads((job.folder / "job.json").read_text())
    del request["digest"], request["config"]
    (job.folder / "job.json").write_text(json.dumps(request))
    assert job.status()["state"] == "waiting"
    assert job.config().data.source == str(job.root / "table.zarr")
