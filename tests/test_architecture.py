"""docs/architecture.md tells the truth: the three walks, file by file, are what the calls do, and they go one way."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from distributed import LocalCluster

import kme_dist as kme
from kme_dist.cli.app import execute
from kme_dist.config import ClusterConfig
from kme_dist.models import predict as inference
from kme_dist.ops import queue, submit
from kme_dist.ops.drivers import Drivers
from kme_dist.ops.jobs import job_at, job_root
from kme_dist.pipelines.job import run_pipeline
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.learn import learn_on_dataset
from kme_dist.run.learners import LearnSettings
from kme_dist.run.trainer import Trainer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOMES = {f"{Path(kme.__file__).parent}/": "", f"{ROOT / 'pipelines'}/": "pipelines/"}


def traced(call):
    """(caller, callee) files of every call of ours into another file of ours, in the order of their first time.

    Who started `call` is not part of its walk: the caller of the first one is "".
    """
    steps: dict[tuple[str, str], None] = {}
    top = sys._getframe()

    def ours(frame):
        while frame is not top:
            for home, name in HOMES.items():
                if frame.f_code.co_filename.startswith(home):
                    return name + frame.f_code.co_filename.removeprefix(home)
            frame = frame.f_back
        return ""

    def look(frame, event, _):
        if event == "call" and any(frame.f_code.co_filename.startswith(home) for home in HOMES):
            if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                return  # the body of a module or a class: an import, not a call
            steps[ours(frame.f_back), ours(frame)] = None

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(steps)


def listed(heading):
    """The files of a walk in the order of the page, and those that all walks use and nobody needs to open."""
    section = re.search(rf"### {heading}\n(.*?)(?=\n##)", PAGE, re.S).group(1)
    walk = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)
    helpers = re.findall(r"`([\w/]+\.py)`", section.split("Also used:")[1])
    return walk, helpers


def check(heading, steps):
    walk, helpers = listed(heading)
    seen = {name for step in steps for name in step if name} - {"__init__.py"}
    assert seen - set(walk) - set(helpers) == set(), "files that the page does not name"
    assert set(walk) - seen == set(), "files that are named and not visited"
    assert set(helpers) - seen == set(), "helpers that are named and not used"
    back = [
        (a, b) for a, b in steps if a in walk and b in walk and walk.index(a) > walk.index(b)
    ]  # fmt: skip
    assert not back, f"calls against the direction of the walk: {back}"


@pytest.fixture
def stored(tmp_path):
    X = np.random.default_rng(0).normal(size=(400, 3))
    y = (X[:, 0] > 0).astype(int)
    return kme.ingest((X, y), tmp_path / "d.zarr", shuffle=0, chunk_bytes="2KiB", shard_bytes="4KiB")


def test_a_batch_walks_from_zarr_to_the_update(stored, monkeypatch):
    real, found = Trainer.run, []

    def run(self, run_round, *arguments):
        def start():
            real(self, run_round, *arguments)

        found.extend(traced(start))
        return real(self, run_round, *arguments)

    monkeypatch.setattr(Trainer, "run", run)
    data = kme.open_dataset(stored.path)
    kernel = kme.kernels.Gaussian(length_scale=np.ones(3))
    learn_on_dataset(data, kernel, 0.1, LearnSettings(steps=1, batch_size=50), executor=SerialExecutor())
    check("A batch", found)


def test_a_chunk_walks_from_zarr_to_its_receipt(stored, tmp_path, monkeypatch):
    X, y = stored.read()
    kme.MCEClassifier(steps=0, solver="cholesky").fit(X, y).save(tmp_path / "m.zarr")
    real, found = inference.predict_chunk, []

    def second(plan, task, *rest):
        if task.chunk != 1:  # the first one loads the model
            return real(plan, task, *rest)
        found.extend(traced(lambda: real(plan, task, *rest)))
        return real(plan, task, *rest)

    monkeypatch.setattr(inference, "predict_chunk", second)
    kme.predict(str(tmp_path / "m.zarr"), stored.path, tmp_path / "out.zarr", executor=SerialExecutor())
    check("A prediction chunk", found)


def test_a_job_walks_from_the_command_to_its_pipeline(tmp_path, monkeypatch):
    config = tmp_path / "c.yaml"
    config.write_text("data: {source: sklearn:iris}\n", encoding="utf-8")
    (tmp_path / "jobs").mkdir()
    fake = types.ModuleType("kme_dist.pipelines.evaluate")
    fake.run = lambda config, **options: {}
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    # The wire: what the scheduler and the host do with a job is done by hand below, so that all ends are seen.
    monkeypatch.setattr(submit, "_find_host", lambda client, job, entry: None)
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        at = ClusterConfig(kind="address", address=cluster.scheduler_address)
        command = ["submit", str(config), "--pipeline", "evaluate", "--id", "walk", "--quiet"]
        command += ["--root", str(tmp_path / "jobs"), "--scheduler", cluster.scheduler_address]
        sent = traced(lambda: execute(command))
        found = cluster.scheduler.extensions[queue.NAME]
        host = Drivers(at, lambda job: [sys.executable, "-c", ""])
        client = types.SimpleNamespace(id="c", run_on_scheduler=lambda f, told, callback_timeout: found.turn(told))
        stop = types.SimpleNamespace(is_set=lambda: bool(host._children), wait=lambda seconds: None)
        hosted = traced(lambda: host._serve(client, stop))
        host._end()
        job = job_at(job_root(str(tmp_path / "jobs")), "walk")
        driven = traced(lambda: submit.drive_for_host(job, at, run_pipeline))
    check("A submitted job", [*sent, *hosted, *driven])
    assert job.result()["state"] == "succeeded"
